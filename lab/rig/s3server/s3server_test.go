package s3server_test

import (
	"bytes"
	"crypto/md5"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/minio/minio-go/v7"

	"github.com/shoalfs/shoal/lab/rig/s3server"
)

func start(t *testing.T) *s3server.Server {
	t.Helper()
	s, err := s3server.Start(t.Context(), s3server.Options{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Stop)
	return s
}

// writeTree makes n files of various sizes in folders and returns their contents by path.
func writeTree(t *testing.T, dir string, n int) map[string][]byte {
	t.Helper()
	rng := rand.New(rand.NewPCG(1, 2))
	tree := make(map[string][]byte)
	for i := range n {
		rel := fmt.Sprintf("class-%d/img %03d.jpg", i%5, i)
		b := make([]byte, rng.IntN(90_000))
		for j := range b {
			b[j] = byte(rng.Uint32())
		}
		tree[rel] = b
		p := filepath.Join(dir, rel)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, b, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return tree
}

func TestUploadAndReadBack(t *testing.T) {
	s := start(t)
	dir := t.TempDir()
	tree := writeTree(t, dir, 60)

	up, err := s.Upload(t.Context(), dir, "photos", "train/a", nil)
	if err != nil {
		t.Fatal(err)
	}
	if up.Files != 60 || up.Sent != 60 || up.Deleted != 0 {
		t.Fatalf("first upload: %+v", up)
	}

	c, err := s3server.Client(s.URL, 4)
	if err != nil {
		t.Fatal(err)
	}
	seen := 0
	for o := range c.ListObjects(t.Context(), "photos", minio.ListObjectsOptions{Prefix: "train/a/", Recursive: true}) {
		if o.Err != nil {
			t.Fatal(o.Err)
		}
		if o.ETag == "" {
			t.Errorf("%s: empty ETag in the listing", o.Key)
		}
		want, ok := tree[strings.TrimPrefix(o.Key, "train/a/")]
		if !ok {
			t.Fatalf("unexpected key %s", o.Key)
		}
		r, err := c.GetObject(t.Context(), "photos", o.Key, minio.GetObjectOptions{})
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(r)
		_ = r.Close()
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			t.Fatalf("%s: read back %d other bytes", o.Key, len(got))
		}
		seen++
	}
	if seen != len(tree) {
		t.Fatalf("listed %d objects, want %d", seen, len(tree))
	}

	// Again: one file changed, one gone, one new; only these move.
	var names []string
	for rel := range tree {
		names = append(names, rel)
	}
	if err := os.WriteFile(filepath.Join(dir, names[0]), []byte("changed"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(dir, names[1])); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "class-0", "new.jpg"), []byte("new"), 0o644); err != nil {
		t.Fatal(err)
	}
	var calls int
	up, err = s.Upload(t.Context(), dir, "photos", "train/a", func(done, total int) {
		if done == total {
			calls++
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	if up.Files != 60 || up.Sent != 2 || up.Deleted != 1 {
		t.Fatalf("second upload: %+v", up)
	}
	if calls != 1 {
		t.Fatalf("progress reported the end %d times", calls)
	}
}

func TestDataOutlivesServer(t *testing.T) {
	dir := t.TempDir()
	files := t.TempDir()
	writeTree(t, files, 5)
	for i, wantSent := range []int{5, 0} {
		s, err := s3server.Start(t.Context(), s3server.Options{Dir: dir})
		if err != nil {
			t.Fatal(err)
		}
		up, err := s.Upload(t.Context(), files, "photos", "", nil)
		pid := s.Pid()
		s.Stop()
		if err != nil {
			t.Fatal(err)
		}
		if up.Sent != wantSent {
			t.Fatalf("run %d: %+v", i, up)
		}
		if err := syscall.Kill(pid, 0); !errors.Is(err, syscall.ESRCH) {
			t.Fatalf("run %d: the server is still there after Stop: %v", i, err)
		}
	}
}

func TestWrongBinary(t *testing.T) {
	t.Setenv("SHOAL_VERSITYGW", filepath.Join(t.TempDir(), "none"))
	_, err := s3server.FindBinary()
	if err == nil || !strings.Contains(err.Error(), "get it with") {
		t.Fatalf("got %v", err)
	}
	_, err = s3server.Start(t.Context(), s3server.Options{Dir: t.TempDir(), Binary: "/bin/false"})
	if err == nil || !strings.Contains(err.Error(), "versitygw") {
		t.Fatalf("a server that ends at once: got %v", err)
	}
}

// What is laid straight into the server's folder is listed and read like what was sent.
func TestLay(t *testing.T) {
	s := start(t)
	tiny := s3server.Tiny{Size: 7, Folders: append(s3server.Folders(3, 50), s3server.Folder{Name: "big", Files: 1500})}
	if err := s.Lay(t.Context(), "tiny", "a/b", tiny); err != nil {
		t.Fatal(err)
	}
	c, err := s3server.Client(s.URL, 1)
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for o := range c.ListObjects(t.Context(), "tiny", minio.ListObjectsOptions{Prefix: "a/b/", Recursive: true}) {
		if o.Err != nil {
			t.Fatal(o.Err)
		}
		if n++; o.Size != 7 || len(o.ETag) != 32 {
			t.Fatalf("%s: %d bytes, ETag %q", o.Key, o.Size, o.ETag)
		}
	}
	if n != 1650 {
		t.Errorf("%d objects", n)
	}
	r, err := c.GetObject(t.Context(), "tiny", "a/b/big/0001499.jpg", minio.GetObjectOptions{})
	if err != nil {
		t.Fatal(err)
	}
	b, err := io.ReadAll(r)
	info, e := r.Stat()
	if err != nil || e != nil {
		t.Fatal(err, e)
	}
	sum := md5.Sum(b)
	if info.ETag != hex.EncodeToString(sum[:]) {
		t.Errorf("%d bytes with ETag %s", len(b), info.ETag)
	}
}

// A tree of more files than one inode may have names.
func TestLayTiny(t *testing.T) {
	dir := t.TempDir()
	if err := s3server.LayTiny(t.Context(), dir, s3server.Tiny{Folders: []s3server.Folder{{Name: "big", Files: 70_000}}, Size: 3}); err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir(filepath.Join(dir, "big"))
	if err != nil || len(entries) != 70_000 {
		t.Errorf("%d files, %v", len(entries), err)
	}
	if fi, err := os.Stat(filepath.Join(dir, "big/0069999.jpg")); err != nil || fi.Size() != 3 {
		t.Error(fi, err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 1 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}
