package e2e

import (
	"bytes"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/minio/minio-go/v7"

	"github.com/shoalfs/shoal/lab/rig/proxy"
	"github.com/shoalfs/shoal/lab/rig/subproc"
)

// linksIn returns the symbolic links below a folder, and where they lead. It follows none.
func linksIn(t testing.TB, dir string) map[string]string {
	t.Helper()
	found := map[string]string{}
	err := filepath.WalkDir(dir, func(p string, e fs.DirEntry, err error) error {
		if err == nil && e.Type()&fs.ModeSymlink != 0 {
			rel, _ := filepath.Rel(dir, p)
			found[rel], err = os.Readlink(p)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// A second node, whose folder is empty, finds the complete checkpoints of the first one as links into a mount, and
// reads them. Nothing that is there is replaced, and a mount that hangs hangs nothing.
func TestCkptLink(t *testing.T) {
	one, two, mnt := t.TempDir(), t.TempDir(), t.TempDir()
	name := newBucket(t, "")
	_, env := far(t, proxy.Options{})
	dest := "s3://" + name + "/run"
	save := func(dir, step string, last bool) {
		write(t, filepath.Join(dir, step, "a.bin"), bytes.Repeat([]byte(step), 100_000))
		if last {
			write(t, filepath.Join(dir, step, ".metadata"), []byte(step))
		}
	}
	d := carry(t, env, one, dest)
	save(one, "step-1", true)
	mustShoal(t, env, "ckpt", "wait", one, "--timeout", "60s")
	mountAt(t, env, dest, mnt) // it lists one checkpoint only
	save(one, "step-2", true)
	save(one, "top/step-3", true)
	save(one, "half", false)
	save(one, "taken", true)
	mustShoal(t, env, "ckpt", "wait", one, "--timeout", "60s")
	d.signal(t, syscall.SIGTERM)
	d.ended(t)

	// It starts with what a user has there.
	save(two, "taken", false)
	if err := os.Symlink(filepath.Join(mnt, "step-1"), filepath.Join(two, "best")); err != nil {
		t.Fatal(err)
	}
	d = carry(t, env, two, dest, "--link", mnt)
	want := map[string]string{"best": filepath.Join(mnt, "step-1")}
	for _, step := range []string{"step-1", "step-2", "top/step-3"} {
		want[step] = filepath.Join(mnt, step)
	}
	if got := linksIn(t, two); !maps.Equal(got, want) {
		t.Fatalf("links: %v", got)
	}
	for _, step := range []string{"step-1", "step-2", "top/step-3"} {
		for _, file := range []string{"a.bin", ".metadata"} {
			got, err := os.ReadFile(filepath.Join(two, step, file))
			if here, _ := os.ReadFile(filepath.Join(one, step, file)); err != nil || !bytes.Equal(got, here) {
				t.Errorf("%s/%s: %d bytes, %v", step, file, len(got), err)
			}
		}
	}
	if got := mustShoal(t, env, "ckpt", "latest", two); got != filepath.Join(two, "top/step-3")+"\n" {
		t.Errorf("latest: %q", got)
	}
	if got := mustShoal(t, env, "ckpt", "ls", two); strings.Count(got, "in the bucket, linked") != 3 {
		t.Errorf("ls:\n%s", got)
	}
	// What is saved here is carried, and what --keep-local removes becomes a link; what the bucket loses is no link any
	// more.
	stop := func() { d.signal(t, syscall.SIGTERM); d.ended(t) }
	save(two, "step-4", true)
	mustShoal(t, env, "ckpt", "wait", filepath.Join(two, "step-4"), "--timeout", "60s")
	stop()
	for _, file := range []string{"a.bin", ".metadata"} {
		if err := store(t).RemoveObject(t.Context(), name, "run/step-1/"+file,
			minio.RemoveObjectOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	d = carry(t, env, two, dest, "--link", mnt, "--keep-local", "1")
	save(two, "step-5", true)
	mustShoal(t, env, "ckpt", "wait", filepath.Join(two, "step-5"), "--timeout", "60s")
	delete(want, "step-1")
	want["step-4"] = filepath.Join(mnt, "step-4")
	within(t, patience, "the links follow", func() bool { return maps.Equal(linksIn(t, two), want) })
	if got := slices.Sorted(maps.Keys(local(t, two))); !slices.Equal(got,
		[]string{"step-5/.metadata", "step-5/a.bin", "taken/a.bin"}) {
		t.Errorf("here: %v", got)
	}
	stop()
	if _, errs, code := shoal(t, env, "ckpt", mnt, "s3://"+name+"/other"); code != 1 ||
		!strings.Contains(errs, "it is on FUSE: writers of other hosts are not noticed (use a folder on a local disk") {
		t.Errorf("a mount is carried: exit %d, %s", code, errs)
	}

	pid := readStats(t, mnt).PID
	if err := subproc.Signal(pid, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = syscall.Kill(pid, syscall.SIGCONT) }()
	three := t.TempDir()
	d = carry(t, env, three, dest, "--link", mnt)
	d.says(t, "is not refreshed")
	if got := linksIn(t, three); len(got) != 5 {
		t.Errorf("links: %v", got)
	}
	save(three, "step-6", true)
	mustShoal(t, env, "ckpt", "wait", filepath.Join(three, "step-6"), "--timeout", "60s")
	stop()
	for _, c := range [][]string{{three, filepath.Join(three, "mnt")}, {filepath.Join(mnt, "x"), mnt}} {
		if _, errs, code := shoal(t, env, "ckpt", c[0], dest, "--link", c[1]); code != 2 ||
			!strings.Contains(errs, "overlap") {
			t.Errorf("%v: exit %d, %s", c, code, errs)
		}
	}
}
