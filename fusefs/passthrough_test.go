package fusefs

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hanwen/go-fuse/v2/fuse"
)

// readTree compares every file of a mount with the dataset.
func readTree(t *testing.T, c *child) {
	t.Helper()
	for _, f := range c.data {
		if got, err := os.ReadFile(c.path(f.path)); err != nil || !bytes.Equal(got, testArena().content(f)) {
			t.Errorf("%s: %d bytes, %v", f.path, len(got), err)
		}
	}
}

// passable says whether the kernel can read the files of a folder in our place.
func passable(t *testing.T, dir string) bool {
	t.Helper()
	var uts unix.Utsname
	var st unix.Statfs_t
	if err := errors.Join(unix.Uname(&uts), unix.Statfs(dir, &st)); err != nil {
		t.Fatal(err)
	}
	var major, minor int
	if _, err := fmt.Sscanf(unix.ByteSliceToString(uts.Release[:]), "%d.%d", &major, &minor); err != nil {
		t.Fatal(err)
	}
	return (major > 6 || major == 6 && minor >= 9) && st.Type != unix.OVERLAYFS_SUPER_MAGIC
}

// The kernel reads local files by itself, and every open is seen all the same.
func TestPassthrough(t *testing.T) {
	local := localCopy(t, datasets["tree"](1), testArena().content)
	passed := passable(t, local)
	c := mountChild(t, "tree", func(s *spec) { s.Volume, s.Folder = backedVolume, local })
	for range 2 {
		readTree(t, c)
	}
	c.eventually("every open was seen and released, and no read, if the kernel can do without", func(r report) bool {
		for _, f := range c.data {
			if r.Released[f.path] != 2 || r.Opened[f.path] != 2 {
				return false
			}
		}
		return (r.Reads == 0) == passed && r.PassedOpens == 0
	})

	// Several opens of one node share its backing file, in whatever order they end.
	f := fileOf(c.data, "b/700k")
	want := testArena().content(f)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 20 {
				if got, err := os.ReadFile(c.path(f.path)); err != nil || !bytes.Equal(got, want) {
					t.Errorf("%d bytes, %v", len(got), err)
				}
			}
		})
	}
	wg.Wait()
	h, err := os.Open(c.path(f.path))
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	b, err := unix.Mmap(int(h.Fd()), 0, int(f.size), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(b, want) {
		t.Error("mmap: wrong content")
	}
	if err := unix.Munmap(b); err != nil {
		t.Error(err)
	}
}

// A file that is not the listed one is refused, not shown.
func TestPassthroughOfChangedFiles(t *testing.T) {
	local := localCopy(t, datasets["tree"](1), testArena().content)
	at := func(name string) string { return filepath.Join(local, name) }
	touched, longer, gone, folder := at("many/001.bin"), at("many/002.bin"), at("many/003.bin"), at("many/004.bin")
	err := errors.Join(
		os.Chtimes(touched, time.Time{}, day.Add(time.Nanosecond)),
		os.WriteFile(longer, make([]byte, 663), 0o644), os.Chtimes(longer, day, day),
		os.Remove(gone),
		os.Remove(folder), os.Mkdir(folder, 0o755), os.Chtimes(folder, day, day))
	if err != nil {
		t.Fatal(err)
	}
	c := mountChild(t, "tree", func(s *spec) { s.Volume, s.Folder = backedVolume, local })
	for path, want := range map[string]error{touched: unix.ESTALE, longer: unix.ESTALE, folder: unix.ESTALE, gone: unix.ESTALE} {
		rel, _ := filepath.Rel(local, path)
		if path == gone {
			want = unix.ENOENT // ReadAt's error, which the test's volume does not dress up
		}
		if _, err := os.ReadFile(c.path(rel)); !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", rel, err, want)
		}
	}
	if _, err := os.ReadFile(c.path("many/005.bin")); err != nil {
		t.Error(err)
	}
	c.eventually("nothing is held", func(r report) bool { return r.PassedOpens == 0 })
}

// Without the privilege, files are served by the process.
func TestPassthroughNotPermitted(t *testing.T) {
	dev, err := os.Stat("/dev/fuse")
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("/tmp", "fusefs-pass-")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	const nobody = 65534
	local, mnt := localCopy(t, datasets["tree"](1), testArena().content), filepath.Join(dir, "mnt")
	if err := errors.Join(os.Chmod("/dev/fuse", 0o666), os.Chmod(dir, 0o755), os.Mkdir(mnt, 0o755), os.Chown(mnt, nobody, nobody),
		os.Chmod(filepath.Dir(local), 0o755)); err != nil {
		t.Fatal(err)
	}
	defer os.Chmod("/dev/fuse", dev.Mode().Perm())
	c := mountChild(t, "tree", func(s *spec) {
		s.Mountpoint, s.UID, s.Volume, s.Folder = mnt, nobody, backedVolume, local
		s.Options.AllowOther = false
	})
	// The mount is its owner's alone, even for root.
	cmd := asUser(nobody, "sha256sum", c.path("b/700k"), c.path("README.md"))
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	for i, name := range []string{"b/700k", "README.md"} {
		if line := strings.Split(string(out), "\n")[i]; !strings.HasPrefix(line, sumOf(testArena().content(fileOf(c.data, name)))) {
			t.Errorf("%s: %s", name, line)
		}
	}
	if r := c.report(); r.Reads == 0 {
		t.Error("nobody read: was it passed through without CAP_SYS_ADMIN?")
	}
	c.finish()
	if !strings.Contains(c.log.String(), "local files are read by this process") {
		t.Errorf("the fallback is not told:\n%s", c.log.String())
	}
}

// scriptedDevice is a kernel that says what it is told to.
type scriptedDevice struct {
	errno      syscall.Errno
	registered map[int32]bool
	next       int32
}

func (d *scriptedDevice) RegisterBackingFd(*fuse.BackingMap) (int32, syscall.Errno) {
	if d.errno != 0 {
		return 0, d.errno
	}
	d.next++
	d.registered[d.next] = true
	return d.next, 0
}

func (d *scriptedDevice) UnregisterBackingFd(id int32) syscall.Errno {
	if !d.registered[id] {
		return syscall.ENOENT
	}
	delete(d.registered, id)
	return 0
}
