package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/lab/rig/proxy"
)

// smallDisk mounts a tmpfs of 64 MiB.
func smallDisk(t *testing.T) (dir string) {
	t.Helper()
	dir = t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=64m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	return dir
}

// fill makes six checkpoints, and fills the disk before they are closed.
func fill(t *testing.T, dir string) {
	t.Helper()
	var closing []*os.File
	for i := range 6 {
		for file, size := range map[string]int{"a.bin": 5 << 20, ".metadata": 1} {
			at := filepath.Join(dir, fmt.Sprintf("step-%d-%s", i, strings.Repeat("x", 200)), file)
			write(t, at, nil)
			f, err := os.OpenFile(at, os.O_WRONLY, 0)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := f.Write(make([]byte, size)); err != nil {
				t.Fatal(err)
			}
			closing = append(closing, f)
		}
	}
	filler, err := os.Create(filepath.Join(dir, "filler.tmp"))
	for err == nil {
		_, err = filler.Write(make([]byte, 4096))
	}
	for _, f := range append(closing, filler) {
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// A full disk stops neither the uploads of what lies there, nor --keep-local, which frees it. Nor does it stop the
// start of a daemon that was there before; any other says what to do.
func TestCkptDiskFull(t *testing.T) {
	_, env := far(t, proxy.Options{})
	for _, again := range []bool{false, true} {
		dir, name := smallDisk(t), newBucket(t, fmt.Sprint(again))
		dest := "s3://" + name + "/run"
		d := carry(t, env, dir, dest, "--keep-local", "1")
		if again {
			d.signal(t, syscall.SIGKILL)
			<-d.exited
		}
		fill(t, dir)
		if again {
			carry(t, env, dir, dest, "--keep-local", "1")
		}
		mustShoal(t, env, "ckpt", "wait", dir, "--timeout", "60s")
		within(t, patience, "the older ones have gone here", func() bool { return len(local(t, dir)) == 3 })
		if there := published(t, name, "run"); len(there) != 12 {
			t.Errorf("%d objects", len(there))
		}
	}
	dir := smallDisk(t)
	fill(t, dir)
	out, errs, code := shoal(t, env, "ckpt", dir, "s3://"+newBucket(t, "")+"/run")
	if code == 0 || !strings.Contains(errs, "no space left on device") || !strings.Contains(errs, "free some space") ||
		!strings.Contains(errs, dir) {
		t.Errorf("exit %d: %s%s", code, out, errs)
	}
}

// What could not be published is no trouble any more when it has gone; and the newest of single files is found, too.
func TestCkptTroubleGoes(t *testing.T) {
	dir := t.TempDir()
	name := newBucket(t, "")
	p, env := far(t, proxy.Options{})
	carry(t, env, dir, "s3://"+name+"/run")
	write(t, filepath.Join(dir, "model.pt"), []byte("a"))
	write(t, filepath.Join(dir, "latest"), []byte("model.pt"))
	mustShoal(t, env, "ckpt", "wait", dir, "--timeout", "60s")
	if got := mustShoal(t, env, "ckpt", "latest", "s3://"+name+"/run"); got != "s3://"+name+"/run/model.pt\n" {
		t.Errorf("latest: %q", got)
	}
	if err := p.Set(proxy.Options{
		Faults: []proxy.Fault{{Kind: proxy.Unavailable, Op: proxy.OpPut, Key: "bad"}}}); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(dir, "bad"), []byte("b"))
	within(t, patience, "there is trouble", func() bool {
		return strings.Contains(mustShoal(t, env, "ckpt", "ls", dir), "trouble: ")
	})
	if err := os.Remove(filepath.Join(dir, "bad")); err != nil {
		t.Fatal(err)
	}
	within(t, patience, "there is none", func() bool {
		return !strings.Contains(mustShoal(t, env, "ckpt", "ls", dir), "trouble: ")
	})
}
