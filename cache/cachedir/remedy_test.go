package cachedir

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// A segment that is no file, but a link to nothing, a pipe or a folder: the error names what repairs it.
func TestWithRemedy(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "segments")
	if err := os.Symlink("/nowhere", path); err != nil {
		t.Fatal(err)
	}
	_, missing := os.Open(path)
	pipe := &os.PathError{Op: "read", Path: path, Err: syscall.ESPIPE}
	for _, err := range []error{missing, pipe, &os.PathError{Op: "open", Path: path, Err: syscall.EISDIR}} {
		if got := WithRemedy(err, dir).Error(); !strings.Contains(got, "shoal fsck "+dir+" --repair") {
			t.Error(got)
		}
	}
	for _, cause := range []error{syscall.EROFS, syscall.EACCES} {
		if got := WithRemedy(&os.PathError{Op: "open", Path: path, Err: cause}, dir).Error(); !strings.Contains(got,
			"(make "+dir+" writable") {
			t.Error(got)
		}
	}
	if got := WithRemedy(missing, "/elsewhere"); !errors.Is(got, missing) || got.Error() != missing.Error() {
		t.Error(got)
	}
}
