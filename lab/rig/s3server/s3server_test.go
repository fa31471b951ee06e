package s3server_test

import (
	"crypto/md5"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/minio/minio-go/v7"

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

// What is laid straight into the server's folder is listed and read like what was sent.
func TestLay(t *testing.T) {
	s := newBucket(t)
	tiny := s3server.Tiny{Size: 7, Folders: append(s3server.Folders(3, 50), s3server.Folder{Name: "big", Files: 100})}
	must(t, s.Lay(t.Context(), "tiny", "a/b", tiny))
	c, err := s3server.Client(s.URL, 1)
	must(t, err)
	n := 0
	for o := range c.ListObjects(t.Context(), "tiny", minio.ListObjectsOptions{Prefix: "a/b/", Recursive: true}) {
		if n++; o.Err != nil || o.Size != 7 || len(o.ETag) != 32 {
			t.Fatalf("%s: %d bytes, ETag %q, %v", o.Key, o.Size, o.ETag, o.Err)
		}
	}
	if n != 250 {
		t.Errorf("%d objects", n)
	}
	r, err := c.GetObject(t.Context(), "tiny", "a/b/big/0000099.jpg", minio.GetObjectOptions{})
	must(t, err)
	b, err := io.ReadAll(r)
	must(t, err)
	info, err := r.Stat()
	must(t, err)
	if sum := md5.Sum(b); info.ETag != hex.EncodeToString(sum[:]) {
		t.Errorf("%d bytes with ETag %s", len(b), info.ETag)
	}
}
