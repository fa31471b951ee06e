package fusefs

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

func isErr(path string) bool {
	return strings.HasPrefix(path, "err/") || strings.HasPrefix(path, "slow/")
}

func TestWholeTree(t *testing.T) {
	for _, keep := range []bool{true, false} {
		t.Run(fmt.Sprint("kernel cache ", keep), func(t *testing.T) {
			c := mountChild(t, "tree", func(s *spec) {
				s.Options.KernelCache = keep
				s.Options.UID, s.Options.GID = 12, 34
			})
			want := map[string]testFile{}
			subdirs := map[string]map[string]bool{".": {}}
			for _, f := range c.data {
				want[f.path] = f
				for p := f.path; p != "."; {
					parent := filepath.Dir(p)
					if subdirs[parent] == nil {
						subdirs[parent] = map[string]bool{}
					}
					if p != f.path {
						subdirs[parent][p] = true
					}
					p = parent
				}
			}
			for round := range 2 { // the second one from the kernel's caches
				files, dirs := 0, 0
				err := filepath.WalkDir(c.dir, func(path string, d fs.DirEntry, err error) error {
					if err != nil {
						return err
					}
					rel, _ := filepath.Rel(c.dir, path)
					fi, err := d.Info()
					if err != nil {
						return err
					}
					st := fi.Sys().(*syscall.Stat_t)
					if st.Uid != 12 || st.Gid != 34 {
						t.Errorf("%s: owner %d:%d", rel, st.Uid, st.Gid)
					}
					if d.IsDir() {
						dirs++
						if fi.Mode() != fs.ModeDir|0o555 || int(st.Nlink) != 2+len(subdirs[rel]) {
							t.Errorf("%s: mode %v, %d links, want %d", rel, fi.Mode(), st.Nlink, 2+len(subdirs[rel]))
						}
						return nil
					}
					files++
					f, ok := want[rel]
					if !ok {
						t.Errorf("%s should not exist", rel)
						return nil
					}
					mtime := f.mtime
					if mtime.IsZero() {
						mtime = time.Unix(0, 0)
					}
					if fi.Size() != f.size || fi.Mode() != 0o444 || !fi.ModTime().Equal(mtime) || st.Nlink != 1 ||
						st.Blocks != (f.size+511)/512 {
						t.Errorf("%s: %+v", rel, st)
					}
					if isErr(rel) {
						return nil
					}
					got, err := os.ReadFile(path)
					if err != nil {
						return err
					}
					if !bytes.Equal(got, testArena().content(f)) {
						t.Errorf("%s: wrong content", rel)
					}
					return nil
				})
				if err != nil {
					t.Fatal(err)
				}
				if files != len(want) || dirs != len(subdirs) {
					t.Errorf("round %d: %d files, %d folders, want %d, %d", round, files, dirs, len(want), len(subdirs))
				}
			}
			r := c.report()
			for _, f := range c.data {
				if !isErr(f.path) && r.Opened[f.path] != 2 {
					t.Errorf("%s: opened %d times, want 2: every open must be seen", f.path, r.Opened[f.path])
				}
			}
			c.eventually("every open is released", func(r report) bool {
				return len(r.Opened) == len(r.Released) && fmt.Sprint(r.Opened) == fmt.Sprint(r.Released)
			})
		})
	}
}

func TestDirectoryTimes(t *testing.T) {
	c := mountChild(t, "tree")
	for dir, want := range map[string]time.Time{"class a": day.Add(48 * time.Hour),
		"class a/deep": day.Add(48 * time.Hour), "many": day, ".": day.Add(48 * time.Hour)} {
		fi, err := os.Stat(c.path(dir))
		if err != nil || !fi.ModTime().Equal(want) {
			t.Errorf("%s: %v, %v, want %v", dir, fi.ModTime(), err, want)
		}
	}
}

func TestBigDirectory(t *testing.T) {
	c := mountChild(t, "big")
	for round := range 2 {
		entries, err := os.ReadDir(c.path("dir"))
		if err != nil {
			t.Fatal(err)
		}
		if len(entries) != 100_000 || entries[0].Name() != "file-000000.jpg" ||
			entries[99_999].Name() != "file-099999.jpg" {
			t.Fatalf("round %d: %d entries", round, len(entries))
		}
		for i := 1; i < len(entries); i++ {
			if entries[i].Name() == entries[i-1].Name() {
				t.Fatalf("%s twice", entries[i].Name())
			}
		}
	}
	if fi, err := os.Stat(c.path("dir/file-054321.jpg")); err != nil || fi.Size() != 10 {
		t.Error(fi, err)
	}

	// telldir and seekdir: going back to a position gives what followed it.
	fd, err := unix.Open(c.path("dir"), unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	buf := make([]byte, 1000)
	type entry struct {
		name string
		off  int64
	}
	read := func() (es []entry) {
		n, err := unix.Getdents(fd, buf)
		if err != nil {
			t.Fatal(err)
		}
		for at := 0; at < n; {
			d := (*unix.Dirent)(unsafe.Pointer(&buf[at]))
			name := buf[at+19 : at+int(d.Reclen)]
			es = append(es, entry{string(name[:bytes.IndexByte(name, 0)]), d.Off})
			at += int(d.Reclen)
		}
		return es
	}
	var all []entry
	for range 200 {
		all = append(all, read()...)
	}
	if all[0].name != "." || all[1].name != ".." {
		t.Errorf("begins with %v", all[:2])
	}
	for _, i := range []int{0, 1, 2, 17, 1000, 3} {
		if _, err := unix.Seek(fd, all[i].off, io.SeekStart); err != nil {
			t.Fatal(err)
		}
		if got := read()[0]; got != all[i+1] {
			t.Errorf("after entry %d comes %v, want %v", i, got, all[i+1])
		}
	}
}

func fileOf(data []testFile, path string) testFile {
	return data[slices.IndexFunc(data, func(f testFile) bool { return f.path == path })]
}

func TestKindsOfReads(t *testing.T) {
	c := mountChild(t, "tree")
	f := fileOf(c.data, "b/große Datei \\ \"x\".bin")
	want := testArena().content(f)
	path := c.path(f.path)

	t.Run("pread", func(t *testing.T) {
		h, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer h.Close()
		seed := rand.Uint64()
		r := rand.New(rand.NewPCG(seed, 0))
		for range 200 {
			off, n := r.Int64N(f.size+10), r.IntN(1<<r.IntN(21))
			p := make([]byte, n)
			got, err := h.ReadAt(p, off)
			if exp := want[min(off, f.size):min(off+int64(n), f.size)]; !bytes.Equal(p[:got], exp) {
				t.Fatalf("seed %d: %d bytes at %d: got %d, %v", seed, n, off, got, err)
			}
		}
	})
	t.Run("seek", func(t *testing.T) {
		h, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer h.Close()
		if end, err := h.Seek(-100, io.SeekEnd); err != nil || end != f.size-100 {
			t.Fatal(end, err)
		}
		got, err := io.ReadAll(h)
		if err != nil || !bytes.Equal(got, want[f.size-100:]) {
			t.Fatal(len(got), err)
		}
		if hole, err := h.Seek(0, unix.SEEK_HOLE); err != nil || hole != f.size {
			t.Errorf("hole at %d, %v", hole, err)
		}
	})
	t.Run("mmap", func(t *testing.T) {
		h, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer h.Close()
		b, err := unix.Mmap(int(h.Fd()), 0, int(f.size), unix.PROT_READ, unix.MAP_SHARED)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Munmap(b)
		if !bytes.Equal(b, want) {
			t.Error("wrong content")
		}
	})
	t.Run("O_DIRECT", func(t *testing.T) {
		h, err := os.OpenFile(path, os.O_RDONLY|unix.O_DIRECT, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer h.Close()
		got, err := io.ReadAll(h)
		if err != nil || !bytes.Equal(got, want) {
			t.Fatal(len(got), err)
		}
	})
	t.Run("copied by cp and sendfile", func(t *testing.T) {
		to := filepath.Join(t.TempDir(), "copy")
		if out, err := exec.Command("cp", path, to).CombinedOutput(); err != nil {
			t.Fatal(err, string(out))
		}
		if got, err := os.ReadFile(to); err != nil || !bytes.Equal(got, want) {
			t.Fatal(len(got), err)
		}
	})
}

func TestConcurrentReaders(t *testing.T) {
	c := mountChild(t, "tree", func(s *spec) { s.Options.KernelCache = false })
	var wg sync.WaitGroup
	for reader := range 8 {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(uint64(reader), 1))
			for _, i := range r.Perm(len(c.data)) {
				f := c.data[i]
				if isErr(f.path) {
					continue
				}
				if got, err := os.ReadFile(c.path(f.path)); err != nil || !bytes.Equal(got, testArena().content(f)) {
					t.Errorf("%s: %d bytes, %v", f.path, len(got), err)
				}
			}
		})
	}
	wg.Wait()
}

func TestReadOnly(t *testing.T) {
	c := mountChild(t, "tree")
	file, dir, fresh := c.path("README.md"), c.path("class a"), c.path("fresh")
	open := func(path string, flags int) error {
		fd, err := unix.Open(path, flags, 0o644)
		if err == nil {
			unix.Close(fd)
		}
		return err
	}
	tv := []unix.Timeval{{}, {}}
	for name, do := range map[string]func() error{
		"open for writing":  func() error { return open(file, unix.O_WRONLY) },
		"open for both":     func() error { return open(file, unix.O_RDWR) },
		"open to append":    func() error { return open(file, unix.O_WRONLY|unix.O_APPEND) },
		"open and truncate": func() error { return open(file, unix.O_WRONLY|unix.O_TRUNC) },
		"create":            func() error { return open(fresh, unix.O_WRONLY|unix.O_CREAT) },
		"create below": func() error {
			return open(c.path("class a", "x"), unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL)
		},
		"O_TMPFILE":         func() error { return open(dir, unix.O_WRONLY|unix.O_TMPFILE) },
		"truncate":          func() error { return unix.Truncate(file, 0) },
		"chmod":             func() error { return unix.Chmod(file, 0o777) },
		"chmod of a folder": func() error { return unix.Chmod(dir, 0o777) },
		"chmod of the root": func() error { return unix.Chmod(c.dir, 0o777) },
		"chown":             func() error { return unix.Chown(file, 1, 1) },
		"utimes":            func() error { return unix.Utimes(file, tv) },
		"unlink":            func() error { return unix.Unlink(file) },
		"rmdir":             func() error { return unix.Rmdir(c.path("new")) },
		"rmdir of a folder": func() error { return unix.Rmdir(dir) },
		"mkdir":             func() error { return unix.Mkdir(fresh, 0o755) },
		"mknod":             func() error { return unix.Mknod(fresh, unix.S_IFREG|0o644, 0) },
		"mkfifo":            func() error { return unix.Mkfifo(fresh, 0o644) },
		"symlink":           func() error { return unix.Symlink("README.md", fresh) },
		"link":              func() error { return unix.Link(file, fresh) },
		"rename":            func() error { return unix.Rename(file, fresh) },
		"rename over":       func() error { return unix.Rename(file, c.path("empty")) },
		"rename a folder":   func() error { return unix.Rename(dir, fresh) },
		"rename exchanging": func() error {
			return unix.Renameat2(-100, file, -100, c.path("empty"), unix.RENAME_EXCHANGE)
		},
		"setxattr":             func() error { return unix.Setxattr(file, "user.x", []byte("v"), 0) },
		"setxattr of the ETag": func() error { return unix.Setxattr(file, etagAttr, []byte("v"), 0) },
		"removexattr":          func() error { return unix.Removexattr(file, etagAttr) },
		"access for writing":   func() error { return unix.Access(file, unix.W_OK) },
		"mkdir in .shoal":      func() error { return unix.Mkdir(c.path(".shoal/x"), 0o755) },
		"create in .shoal":     func() error { return open(c.path(".shoal/x"), unix.O_WRONLY|unix.O_CREAT) },
		"write stats":          func() error { return open(c.path(".shoal/stats"), unix.O_WRONLY) },
		"truncate order":       func() error { return unix.Truncate(c.path(".shoal/order"), 0) },
		"unlink plan":          func() error { return unix.Unlink(c.path(".shoal/plan")) },
		"rename order": func() error {
			return unix.Rename(c.path(".shoal/order"), c.path(".shoal/plans/x"))
		},
		"chmod order": func() error { return unix.Chmod(c.path(".shoal/order"), 0o777) },
		"an editor's swap file": func() error {
			return open(c.path(".shoal/plans/.x.swp"), unix.O_RDWR|unix.O_CREAT)
		},
		"an editor's backup file": func() error { return open(c.path(".shoal/plans/x~"), unix.O_RDWR|unix.O_CREAT) },
	} {
		want := unix.EROFS
		if name == "rmdir" || name == "unlink plan" { // it would end a plan, and there is none
			want = unix.ENOENT
		}
		if err := do(); !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", name, err, want)
		}
	}
	if got, err := os.ReadFile(file); err != nil || !bytes.Equal(got, testArena().content(c.data[0])) {
		t.Errorf("the file changed: %v", err)
	}
}

func TestNegativeLookups(t *testing.T) {
	c := mountChild(t, "tree")
	for range 3 {
		for _, name := range []string{"nope", "class a/nope", "nope/nope", ".shoal/nope", ".shoal/plans/nope",
			"class a/.shoal", "CLASS A"} {
			if _, err := os.Lstat(c.path(name)); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
	if _, err := os.Lstat(c.path("README.md/x")); !errors.Is(err, unix.ENOTDIR) {
		t.Error(err)
	}
	if _, err := os.Lstat(c.path(strings.Repeat("n", 256))); !errors.Is(err, unix.ENAMETOOLONG) {
		t.Error(err)
	}
}

func inodes(t *testing.T, dir string) map[string]uint64 {
	t.Helper()
	m := map[string]uint64{}
	seen := map[uint64]string{}
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		fi, err := d.Info()
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(dir, path)
		ino := fi.Sys().(*syscall.Stat_t).Ino
		if other, twice := seen[ino]; twice {
			t.Errorf("%s and %s have one inode number", rel, other)
		}
		seen[ino], m[rel] = rel, ino
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func TestInodesAreStable(t *testing.T) {
	c := mountChild(t, "tree")
	before := inodes(t, c.dir)

	// d_ino, as readdir tells it, is st_ino.
	out, err := exec.Command("ls", "-1Ui", c.path("many")).Output()
	if err != nil {
		t.Fatal(err)
	}
	var ino uint64
	var name string
	if _, err := fmt.Sscan(string(out), &ino, &name); err != nil || before["many/"+name] != ino {
		t.Errorf("readdir says %d for %s, stat %d (%v)", ino, name, before["many/"+name], err)
	}

	if err := os.WriteFile(c.path(".shoal/refresh"), []byte("x"), 0); err != nil {
		t.Fatal(err)
	}
	after := inodes(t, c.dir)
	for path, ino := range after {
		if old, ok := before[path]; ok && old != ino {
			t.Errorf("%s: inode %d, in the version before %d", path, ino, old)
		}
	}
	c.finish()
	again := inodes(t, mountChild(t, "tree").dir)
	for path, ino := range before {
		if again[path] != ino {
			t.Errorf("%s: inode %d, before the remount %d", path, again[path], ino)
		}
	}
}

func TestXattrAndStatfs(t *testing.T) {
	c := mountChild(t, "tree")
	get := func(path, name string) string {
		buf := make([]byte, 100)
		n, err := unix.Getxattr(c.path(path), name, buf)
		if err != nil {
			return err.Error()
		}
		if size, err := unix.Getxattr(c.path(path), name, nil); err != nil || size != n {
			t.Errorf("%s of %s: length %d, %v, want %d", name, path, size, err, n)
		}
		return string(buf[:n])
	}
	version := buildManifest(c.data).Version()
	state := func(path string) string {
		m := buildManifest(c.data)
		n, _ := m.Find(path)
		return new(memVolume).State(m, n.Index)
	}
	for _, tc := range []struct{ path, name, want string }{
		{"b/63k", etagAttr, "b2"},
		{"b/63k", versionAttr, version},
		{"README.md", stateAttr, state("README.md")},
		{"b/63k", stateAttr, state("b/63k")},
		{"b/700k", stateAttr, state("b/700k")},
		{"b", stateAttr, unix.ENODATA.Error()},
		{"b", versionAttr, version},
		{".", versionAttr, version},
		{"b", etagAttr, unix.ENODATA.Error()},
		{"b/63k", "user.other", unix.ENODATA.Error()},
		{"b/63k", "security.capability", unix.ENODATA.Error()},
		{"b/63k", etagAttr, "b2"}, // a refused one has not turned xattrs off
	} {
		if got := get(tc.path, tc.name); got != tc.want {
			t.Errorf("%s of %s: %q, want %q", tc.name, tc.path, got, tc.want)
		}
	}
	if _, err := unix.Getxattr(c.path("b/63k"), etagAttr, make([]byte, 1)); err != unix.ERANGE {
		t.Errorf("short buffer: %v", err)
	}
	list := make([]byte, 100)
	n, err := unix.Listxattr(c.path("b/63k"), list)
	if err != nil || string(list[:n]) != etagAttr+"\x00"+versionAttr+"\x00"+stateAttr+"\x00" {
		t.Errorf("list: %q, %v", list[:max(n, 0)], err)
	}

	var st unix.Statfs_t
	if err := unix.Statfs(c.dir, &st); err != nil {
		t.Fatal(err)
	}
	m := buildManifest(c.data)
	if int64(st.Blocks) != (m.Bytes()+4095)/4096 || st.Bfree != 0 || int(st.Files) != m.Len()+m.Dirs() ||
		st.Namelen != 255 {
		t.Errorf("%+v", st)
	}
	if mi, err := findMount(c.dir); err != nil || mi.Type != "fuse.shoal" || mi.Source != "s3://bucket/tree" {
		t.Errorf("%+v, %v", mi, err)
	}
}

func TestErrno(t *testing.T) {
	c := mountChild(t, "tree")
	for name, want := range map[string]error{
		"changed": unix.ESTALE, "missing": unix.ESTALE, "denied": unix.EACCES, "invalid": unix.EIO,
		"transient": unix.EIO, "other": unix.EIO, "canceled": unix.EIO, "short": unix.EIO,
	} {
		if _, err := os.ReadFile(c.path("err", name)); !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", name, err, want)
		}
	}
	c.finish() // its log is complete then
	if log := c.log.String(); !strings.Contains(log, "path=err/changed") || !strings.Contains(log, "access denied") {
		t.Errorf("the log names no path or cause:\n%s", log)
	}
}

func TestReadAheadIsSet(t *testing.T) {
	c := mountChild(t, "tree", func(s *spec) { s.Options.ReadAhead = 640 << 10 })
	mi, err := findMount(c.dir)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile("/sys/class/bdi/" + mi.Device + "/read_ahead_kb"); err != nil || string(got) != "640\n" {
		t.Errorf("%q, %v", got, err)
	}
}

// directReader is a child that reads a file with O_DIRECT in one system call and handles SIGUSR1,
// without restarting calls.
func directReader(path string) int {
	runtime.LockOSThread()
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECT, 0)
	if err != nil {
		fmt.Println(err)
		return 1
	}
	fmt.Println(unix.Gettid())
	n, err := unix.Pread(fd, make([]byte, 8192), 0)
	fmt.Println(n, err)
	return 0
}

func TestInterrupt(t *testing.T) {
	c := mountChild(t, "tree")
	for _, tc := range []struct {
		name string
		args []string
		sig  syscall.Signal
	}{
		{"buffered, SIGINT", []string{"cat"}, syscall.SIGINT},
		{"direct, SIGTERM", []string{"dd", "iflag=direct", "bs=64k", "of=/dev/null"}, syscall.SIGTERM},
		{"direct, SIGQUIT", []string{"dd", "iflag=direct", "bs=64k", "of=/dev/null"}, syscall.SIGQUIT},
		{"direct, SIGKILL", []string{"dd", "iflag=direct", "bs=64k", "of=/dev/null"}, syscall.SIGKILL},
	} {
		t.Run(tc.name, func(t *testing.T) {
			path := c.path("slow/file")
			if tc.args[0] == "dd" {
				path = "if=" + path
			}
			cmd := exec.Command(tc.args[0], append(tc.args[1:], path)...)
			cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			c.eventually("the read waits", func(r report) bool { return r.Waiting > 0 })
			cmd.Process.Signal(tc.sig)
			done := make(chan error, 1)
			go func() { done <- cmd.Wait() }()
			select {
			case <-done:
			case <-time.After(time.Minute):
				t.Error("the reader hangs")
			}
			c.do("release") // a read through the page cache goes on without its reader
			c.eventually("no read waits", func(r report) bool { return r.Waiting == 0 })
			c.do("hold")
		})
	}
	t.Run("a handled signal does not fail the read", func(t *testing.T) {
		canceled := c.report().Canceled
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), readerEnv+"="+c.path("slow/file"))
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		var tid, n int
		var result string
		if _, err := fmt.Fscan(out, &tid); err != nil {
			t.Fatal(err)
		}
		c.eventually("the read waits", func(r report) bool { return r.Waiting > 0 })
		// The Go runtime handles SIGURG, which it sends to itself to preempt goroutines.
		if err := unix.Tgkill(cmd.Process.Pid, tid, unix.SIGURG); err != nil {
			t.Fatal(err)
		}
		c.eventually("the interrupt arrived and the read waits again", func(r report) bool {
			return r.Canceled > canceled && r.Waiting > 0
		})
		c.do("release")
		if _, err := fmt.Fscan(out, &n, &result); err != nil || n != 8192 || result != "<nil>" {
			t.Errorf("read: %d %s (%v)", n, result, err)
		}
		cmd.Wait()
	})
}

func TestDeadMountIsReplaced(t *testing.T) {
	c := mountChild(t, "tree")
	f, err := os.Open(c.path("many/299.bin"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	c.kill()
	if _, err := os.Stat(c.dir); !died(err) {
		t.Fatalf("a dead mount says %v", err)
	}
	if err := Check(c.dir); err != nil {
		t.Errorf("Check: %v", err)
	}
	again := mountChild(t, "tree", func(s *spec) { s.Mountpoint = c.dir })
	if _, err := os.ReadFile(again.path("many/299.bin")); err != nil {
		t.Error(err)
	}
	if _, err := f.Read(make([]byte, 1)); !died(err) {
		t.Errorf("an open file of the dead mount says %v", err)
	}
	again.finish() // its log is complete then
	if !strings.Contains(again.log.String(), "replacing the mount of a process that has died") {
		t.Errorf("not logged:\n%s", again.log.String())
	}
}

func TestUnmountOfDeadMount(t *testing.T) {
	c := mountChild(t, "tree")
	c.kill()
	if err := Unmount(c.dir, false); err != nil {
		t.Fatal(err)
	}
	if _, err := os.ReadDir(c.dir); err != nil {
		t.Error(err)
	}
}

func TestUnmountBusy(t *testing.T) {
	c := mountChild(t, "tree")
	f, err := os.Open(c.path("README.md"))
	if err != nil {
		t.Fatal(err)
	}
	err = Unmount(c.dir, false)
	if err == nil || !strings.Contains(err.Error(), fmt.Sprintf("(pid %d)", os.Getpid())) ||
		!strings.Contains(err.Error(), "--lazy") {
		t.Errorf("busy: %v", err)
	}
	if got := c.do("unmount"); !strings.Contains(got, "in use by") {
		t.Errorf("busy: %s", got)
	}
	if _, err := f.Read(make([]byte, 1)); err != nil {
		t.Error(err)
	}
	f.Close()
	c.eventually("released", func(r report) bool { return r.Released["README.md"] == 1 })
}

func TestUnmountByAnotherProcess(t *testing.T) {
	c := mountChild(t, "tree")
	if err := Unmount(c.dir, false); err != nil {
		t.Fatal(err)
	}
	c.finish() // its server has ended by itself
}

// A mount that is bound elsewhere goes on there.
func TestUnmountOfOnePlace(t *testing.T) {
	c := mountChild(t, "tree")
	m, err := At(c.dir)
	if err != nil {
		t.Fatal(err)
	}
	bound := t.TempDir()
	if err := unix.Mount(c.dir, bound, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	for _, left := range []bool{true, false} { // then another mount may get the device's number
		if err := Unmount(Place(m.Device), false); err != nil {
			t.Fatal(err)
		}
		if at := Place(m.Device); (at == bound) != left || at == c.dir {
			t.Errorf("the mount is at %q", at)
		}
	}
	c.finish()
}

func TestLazyUnmount(t *testing.T) {
	c := mountChild(t, "tree")
	f := fileOf(c.data, "b/700k")
	h, err := os.Open(c.path(f.path))
	if err != nil {
		t.Fatal(err)
	}
	if err := Unmount(c.dir, true); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(c.path("README.md")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("after detaching: %v", err)
	}
	if got, err := io.ReadAll(h); err != nil || !bytes.Equal(got, testArena().content(f)) {
		t.Errorf("an open file after detaching: %d bytes, %v", len(got), err)
	}
	// Its server must not take away what is mounted there now.
	again := mountChild(t, "tree", func(s *spec) { s.Mountpoint = c.dir })
	if got := c.do("unmount"); got != "ok" {
		t.Error(got)
	}
	if _, err := os.Stat(again.path("README.md")); err != nil {
		t.Error(err)
	}
	h.Close()
	again.finish()
}

// A stopped daemon hangs whoever looks at its mount, but neither Unmount nor what it prints.
func TestUnmountOfHangingMount(t *testing.T) {
	c := mountChild(t, "tree")
	c.cmd.Process.Signal(syscall.SIGSTOP)
	if err := Unmount(c.dir, true); err != nil {
		t.Error(err)
	}
	c.kill()
}

// Users other than root mount through fusermount3.
func TestMountWithoutRoot(t *testing.T) {
	// Without udev the device may be root's alone, and then only root can mount.
	dev, err := os.Stat("/dev/fuse")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod("/dev/fuse", 0o666); err != nil {
		t.Fatal(err)
	}
	defer os.Chmod("/dev/fuse", dev.Mode().Perm())
	dir, err := os.MkdirTemp("/tmp", "fusefs-mnt-")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	const nobody = 65534
	mnt := filepath.Join(dir, "m n,t")
	if err := errors.Join(os.Mkdir(mnt, 0o755), os.Chown(mnt, nobody, nobody), os.Chmod(dir, 0o755)); err != nil {
		t.Fatal(err)
	}
	c := mountChild(t, "tree", func(s *spec) {
		s.Mountpoint, s.UID, s.Options.ReadAhead, s.Options.FsName = mnt, nobody, 1<<20, "s3://bucket/a,b c"
	})
	if mi, err := findMount(mnt); err != nil || mi.Source != "s3://bucket/a,b c" || mi.Type != "fuse.shoal" {
		t.Errorf("%+v, %v", mi, err)
	}
	cmd := exec.Command("cat", c.path("README.md"))
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	if out, err := cmd.CombinedOutput(); err != nil || !bytes.Equal(out, testArena().content(c.data[0])) {
		t.Errorf("%d bytes, %v", len(out), err)
	}
	c.finish()
}

func TestCheck(t *testing.T) {
	dir := t.TempDir()
	full := filepath.Join(dir, "full")
	if err := os.MkdirAll(filepath.Join(full, "sub"), 0o755); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	c := mountChild(t, "tree")
	link := filepath.Join(dir, "link")
	if err := os.Symlink(c.dir, link); err != nil {
		t.Fatal(err)
	}
	loop := filepath.Join(dir, "loop")
	if err := os.Symlink("loop", loop); err != nil {
		t.Fatal(err)
	}
	relative := filepath.Join(dir, "relative")
	if err := os.Symlink("link", relative); err != nil {
		t.Fatal(err)
	}
	dangling := filepath.Join(dir, "dangling")
	if err := os.Symlink("gone/deep", dangling); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct{ path, cause, remedy string }{
		{dangling, "does not exist", "mkdir -p " + filepath.Join(dir, "gone/deep") + ")"},
		{loop, "too many levels of symbolic links", ""},
		{relative, "s3://bucket/tree is mounted there already", "shoal umount"},
		{filepath.Join(dir, "none"), "does not exist", "mkdir -p"},
		{file, "is not a folder", "give an empty folder"},
		{full, `not empty: it holds "sub"`, "give an empty folder"},
		{c.dir, "s3://bucket/tree is mounted there already", "shoal umount"},
		{link, "s3://bucket/tree is mounted there already", "shoal umount"},
		{c.path("many"), "not empty", "empty folder"},
	} {
		err := Check(tc.path)
		if err == nil || !strings.Contains(err.Error(), tc.path) || !strings.Contains(err.Error(), tc.cause) ||
			!strings.Contains(err.Error(), tc.remedy) {
			t.Errorf("%s: %v, want %q and %q", tc.path, err, tc.cause, tc.remedy)
		}
	}
	if err := Check(filepath.Join(full, "sub")); err != nil {
		t.Error(err)
	}
	for path, want := range map[string]string{full: "nothing is mounted there",
		"/proc": "not of shoal", filepath.Join(dir, "none"): "nothing is mounted there"} {
		if err := Unmount(path, false); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("unmount %s: %v, want %q", path, err, want)
		}
	}
	// A volume of another type is a fine mount point.
	tmpfs := filepath.Join(dir, "tmpfs")
	if err := os.Mkdir(tmpfs, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("none", tmpfs, "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	defer unix.Unmount(tmpfs, unix.MNT_DETACH)
	over := mountChild(t, "tree", func(s *spec) { s.Mountpoint = tmpfs })
	if _, err := os.Stat(over.path("README.md")); err != nil {
		t.Error(err)
	}
	over.finish()
}

func TestNewVersion(t *testing.T) {
	c := mountChild(t, "tree")
	v1, v2 := c.data, datasets["tree"](2)
	read := func(path string) []byte {
		b, err := os.ReadFile(c.path(path))
		if err != nil {
			t.Errorf("%s: %v", path, err)
		}
		return b
	}
	for _, f := range v1 {
		if !isErr(f.path) {
			read(f.path)
		}
	}
	for _, name := range []string{"new", "newroot", "class a/nope"} {
		if _, err := os.Stat(c.path(name)); !errors.Is(err, fs.ErrNotExist) {
			t.Fatal(name, err)
		}
	}
	changed, err := os.Open(c.path("class a/one.jpg"))
	if err != nil {
		t.Fatal(err)
	}
	defer changed.Close()
	gone, err := os.Open(c.path("b/700k"))
	if err != nil {
		t.Fatal(err)
	}
	defer gone.Close()
	root, err := os.Open(c.dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	if _, err := root.Readdirnames(1); err != nil {
		t.Fatal(err)
	}

	if err := os.WriteFile(c.path(".shoal/refresh"), []byte("now\n"), 0); err != nil {
		t.Fatal(err)
	}

	// Everything is the new version at once, though names were to be trusted for hours.
	for _, f := range v2 {
		if !isErr(f.path) && !bytes.Equal(read(f.path), testArena().content(f)) {
			t.Errorf("%s: not the new content", f.path)
		}
	}
	for _, name := range []string{"class a/two.jpg", "b/700k", "b"} {
		if _, err := os.Stat(c.path(name)); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s is still there: %v", name, err)
		}
	}
	if entries, err := os.ReadDir(c.dir); err != nil ||
		!slices.ContainsFunc(entries, func(e fs.DirEntry) bool { return e.Name() == "newroot" }) {
		t.Errorf("listing: %v, %v", entries, err)
	}
	// What is open stays what it was, also the parts that were never read.
	for f, want := range map[*os.File]testFile{changed: fileOf(v1, "class a/one.jpg"), gone: fileOf(v1, "b/700k")} {
		if got, err := io.ReadAll(f); err != nil || !bytes.Equal(got, testArena().content(want)) {
			t.Errorf("open %s: %d bytes, %v", f.Name(), len(got), err)
		}
	}
	if r := c.report(); r.Generations != 2 {
		t.Errorf("%d generations while old files are open, want 2", r.Generations)
	}
	changed.Close()
	gone.Close()
	root.Close()
	// The kernel may keep an unused inode of the old version until it needs the memory, and where it finds
	// little else to drop also then: names that were used lately get a second chance.
	c.eventually("the old version is forgotten", func(r report) bool {
		if r.Generations == 1 {
			return true
		}
		if err := os.WriteFile("/proc/sys/vm/drop_caches", []byte("2"), 0); err != nil {
			t.Fatal(err)
		}
		return false
	})

	c.do("fail refresh")
	if err := os.WriteFile(c.path(".shoal/refresh"), []byte("now\n"), 0); !errors.Is(err, unix.EIO) {
		t.Errorf("a failed refresh says %v", err)
	}
}

// A server that must end takes open files away, also from readers who wait.
func TestAbort(t *testing.T) {
	c := mountChild(t, "tree")
	f := fileOf(c.data, "b/700k")
	h, err := os.Open(c.path(f.path))
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	if got := c.do("abort"); got != "ok" {
		t.Error(got)
	}
	c.finish() // it has ended although the file is open
	if _, err := h.ReadAt(make([]byte, 10), 600<<10); err == nil {
		t.Error("a read after the abort succeeded")
	}
	if _, err := os.Stat(c.path("README.md")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("after the abort: %v", err)
	}
}
