package s3server_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/shoalfs/shoal/lab/rig/s3server"
)

// Only what differs from what is there moves, also into a server that was started anew over the folder of another.
func TestUploadSendsTheDifference(t *testing.T) {
	dir, files := t.TempDir(), t.TempDir()
	file := func(i int) string { return filepath.Join(files, fmt.Sprintf("img %03d.jpg", i)) }
	write := func(i int, text string) { must(t, os.WriteFile(file(i), []byte(text), 0o644)) }
	var s *s3server.Server
	start := func() {
		var err error
		s, err = s3server.Start(t.Context(), s3server.Options{Dir: dir})
		must(t, err)
		t.Cleanup(s.Stop)
	}
	upload := func(sent, deleted int) {
		t.Helper()
		up, err := s.Upload(t.Context(), files, "photos", "train/a", nil)
		if err != nil || up.Files != 5 || up.Sent != sent || up.Deleted != deleted {
			t.Errorf("%+v, %v; want %d sent and %d deleted", up, err, sent, deleted)
		}
	}
	for i := range 5 {
		write(i, "first")
	}
	start()
	upload(5, 0)
	write(0, "changed")
	must(t, os.Rename(file(1), file(5)))
	upload(2, 1)
	pid := s.Pid()
	s.Stop()
	if err := syscall.Kill(pid, 0); !errors.Is(err, syscall.ESRCH) {
		t.Errorf("the server is still there after Stop: %v", err)
	}
	start()
	upload(0, 0)
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
