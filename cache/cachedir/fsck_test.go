package cachedir

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Facts that are lost are found out whatever the directory is called.
func TestFsckOfAnyName(t *testing.T) {
	for _, name := range []string{"cache", "run[1]", "run[", "run*"} {
		dir := filepath.Join(t.TempDir(), name)
		segments := filepath.Join(dir, "segments", strings.Repeat("ab", 16))
		if err := errors.Join(os.MkdirAll(segments, 0o700),
			os.WriteFile(filepath.Join(segments, "00000001.seg"), nil, 0o600)); err != nil {
			t.Fatal(err)
		}
		r, err := Fsck(t.Context(), dir, FsckOptions{Progress: func(int64, int64) {}, Repair: true})
		if err != nil || !strings.Contains(strings.Join(r.Findings, "\n"), "the catalog and its copy are missing") {
			t.Errorf("%s: %+v, %v", name, r, err)
		}
	}
}
