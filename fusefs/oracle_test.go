package fusefs

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/shoalfs/shoal/lab/rig/cputime"
)

// The oracle is a copy of the dataset on a local file system, mounted read-only. Every operation of
// the table runs on both and must give the same bytes and the same errno.

// oracle mounts a test dataset and its copy.
func oracle(t *testing.T, data string, change ...func(*spec)) (c *child, local string) {
	t.Helper()
	c = mountChild(t, data, append([]func(*spec){func(s *spec) { s.Volume = lendVolume }}, change...)...)
	files := localCopy(t, c.data, testArena().content)
	local = t.TempDir()
	if err := unix.Mount(files, local, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Unmount(local, unix.MNT_DETACH) })
	if err := unix.Mount("", local, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
		t.Fatal(err)
	}
	return c, local
}

// told is what an operation gave: an errno or what it says.
func told(err error, format string, args ...any) string {
	var errno syscall.Errno
	switch {
	case errors.As(err, &errno):
		return unix.ErrnoName(errno)
	case err != nil:
		return err.Error()
	}
	return fmt.Sprintf(format, args...)
}

func digest(b []byte) string { return fmt.Sprintf("%d bytes %.16s", len(b), sumOf(b)) }

// withFile opens a file and gives its descriptor to do.
func withFile(path string, flags int, do func(fd int) string) string {
	fd, err := unix.Open(path, flags|unix.O_CLOEXEC, 0)
	if err != nil {
		return told(err, "")
	}
	defer unix.Close(fd)
	return do(fd)
}

type operation struct {
	name string
	do   func(root string) string
	ours string // where the mount differs, and why is told beside it
}

const (
	small  = "b/63k"
	large  = "b/700k"
	one    = "class a/one.jpg"
	empty  = "empty"
	folder = "class a"
)

func openOperations() (ops []operation) {
	for _, o := range []struct {
		name  string
		flags int
	}{
		{"O_RDONLY", unix.O_RDONLY}, {"O_WRONLY", unix.O_WRONLY}, {"O_RDWR", unix.O_RDWR}, {"O_TRUNC", unix.O_TRUNC},
		{"O_APPEND", unix.O_APPEND},
		{"O_WRONLY|O_APPEND", unix.O_WRONLY | unix.O_APPEND}, {"O_WRONLY|O_TRUNC", unix.O_WRONLY | unix.O_TRUNC},
		{"O_CREAT", unix.O_CREAT},
		{"O_CREAT|O_EXCL", unix.O_CREAT | unix.O_EXCL}, {"O_RDWR|O_CREAT", unix.O_RDWR | unix.O_CREAT},
		{"O_DIRECTORY", unix.O_DIRECTORY}, {"O_NOFOLLOW", unix.O_NOFOLLOW},
		{"O_DIRECT", unix.O_DIRECT}, {"O_NOATIME", unix.O_NOATIME}, {"O_PATH", unix.O_PATH},
		{"O_NONBLOCK", unix.O_NONBLOCK}, {"O_SYNC", unix.O_SYNC},
		{"O_CREAT|O_DIRECTORY", unix.O_CREAT | unix.O_DIRECTORY},
		{"O_WRONLY|O_DIRECTORY", unix.O_WRONLY | unix.O_DIRECTORY},
	} {
		for _, path := range []string{small, folder, "", "none", folder + "/none",
			"none/none", small + "/x", small + "/", folder + "/", folder + "/../" + small, "./" + small,
			strings.Repeat("n", 255), strings.Repeat("n", 256), strings.Repeat("n", 256) + "/x", folder + "/" +
				strings.Repeat("n", 256), strings.Repeat("d/", 2048) + "x"} {
			name := path
			if len(name) > 40 {
				name = fmt.Sprintf("%.10s… of %d bytes", name, len(path))
			}
			ops = append(ops, operation{name: fmt.Sprintf("open %s of %q", o.name, name), do: func(root string) string {
				return withFile(root+"/"+path, o.flags, func(int) string { return "opened" })
			}})
		}
	}
	return ops
}

func readOperations(data []testFile) (ops []operation) {
	add := func(name string, path string, flags int, do func(fd int) string) {
		ops = append(ops, operation{name: name + " of " + path, do: func(root string) string {
			return withFile(root+"/"+path, flags, do)
		}})
	}
	for _, path := range []string{small, large, one, empty, "class a/two.jpg", "class a/deep/er/three.jpg",
		"class a/.hidden"} {
		size := fileOf(data, path).size
		for _, off := range []int64{0, 1, 4095, 4096, size - 1, size, size + 1, size + 4096, 1 << 40, 1 << 62, -1} {
			for _, n := range []int{0, 1, 511, 4096, 70_000, 1 << 20} {
				for name, flags := range map[string]int{"pread": 0, "direct pread": unix.O_DIRECT} {
					if flags != 0 && (n%4096 != 0 || off%4096 != 0) {
						continue // see the operations that differ
					}
					add(fmt.Sprintf("%s %d at %d", name, n, off), path, flags, func(fd int) string {
						// aligned
						buf, err := unix.Mmap(-1, 0, max(n, 1), unix.PROT_READ|unix.PROT_WRITE,
							unix.MAP_ANON|unix.MAP_PRIVATE)
						if err != nil {
							return err.Error()
						}
						defer unix.Munmap(buf)
						got, err := unix.Pread(fd, buf[:n], off)
						return told(err, "%s", digest(buf[:max(got, 0)]))
					})
				}
			}
			for name, whence := range map[string]int{"SEEK_SET": unix.SEEK_SET, "SEEK_CUR": unix.SEEK_CUR,
				"SEEK_END": unix.SEEK_END, "SEEK_DATA": unix.SEEK_DATA, "SEEK_HOLE": unix.SEEK_HOLE, "whence 9": 9} {
				if off > 1<<41 {
					continue // beyond the largest file of ext4, which is EINVAL there
				}
				add(fmt.Sprintf("lseek %d %s", off, name), path, 0, func(fd int) string {
					if _, err := unix.Seek(fd, min(7, size), unix.SEEK_SET); err != nil {
						return err.Error()
					}
					at, err := unix.Seek(fd, off, whence)
					buf := make([]byte, 100)
					n, err2 := unix.Read(fd, buf)
					return told(err, "at %d", at) + told(err2, ", then %s", digest(buf[:max(n, 0)]))
				})
			}
		}
		for _, flags := range []int{0, unix.O_DIRECT} {
			add(fmt.Sprint("read to the end with flags ", flags), path, flags, func(fd int) string {
				buf, err := unix.Mmap(-1, 0, 64<<10, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
				if err != nil {
					return err.Error()
				}
				defer unix.Munmap(buf)
				var all []byte
				for {
					n, err := unix.Read(fd, buf)
					if n <= 0 {
						return told(err, "%s", digest(all))
					}
					all = append(all, buf[:n]...)
				}
			})
		}
		add("readv", path, 0, func(fd int) string {
			iov := [][]byte{make([]byte, 1), make([]byte, 0), make([]byte, 5000), make([]byte, 3)}
			n, err := unix.Readv(fd, iov)
			m, err2 := unix.Preadv(fd, iov[2:], 4)
			return told(err, "%d", n) + told(err2, " %d ", m) + digest(bytes.Join(iov, nil))
		})
		for _, how := range []int{unix.MAP_SHARED, unix.MAP_PRIVATE} {
			for _, prot := range []int{unix.PROT_READ, unix.PROT_READ | unix.PROT_WRITE,
				unix.PROT_READ | unix.PROT_EXEC} {
				add(fmt.Sprintf("mmap %d for %d", how, prot), path, 0, func(fd int) string {
					b, err := unix.Mmap(fd, 0, int(size), prot, how)
					if err != nil {
						return told(err, "")
					}
					defer unix.Munmap(b)
					was := digest(b)
					if prot&unix.PROT_WRITE != 0 {
						clear(b) // a private copy
					}
					return was + " " + digest(b)
				})
			}
		}
		add("mmap beyond the end", path, 0, func(fd int) (text string) {
			pages := (int(size) + 4095) / 4096
			b, err := unix.Mmap(fd, 0, (pages+2)*4096, unix.PROT_READ, unix.MAP_SHARED)
			if err != nil {
				return told(err, "")
			}
			defer unix.Munmap(b)
			rest := digest(b[size : pages*4096]) // zeros
			debug.SetPanicOnFault(true)
			defer func() {
				if recover() != nil {
					text = rest + ", then SIGBUS"
				}
			}()
			return fmt.Sprint(rest, ", then ", b[pages*4096])
		})
		add("sendfile", path, 0, func(fd int) string {
			return copied(func(out int) (int, error) { return unix.Sendfile(out, fd, nil, int(size)+10) })
		})
		add("splice", path, 0, func(fd int) string {
			var p [2]int
			if err := unix.Pipe(p[:]); err != nil {
				return err.Error()
			}
			defer unix.Close(p[0])
			defer unix.Close(p[1])
			n, err := unix.Splice(fd, nil, p[1], nil, 4096, 0)
			buf := make([]byte, n)
			if n > 0 {
				if _, err := unix.Read(p[0], buf); err != nil {
					return err.Error()
				}
			}
			return told(err, "%s", digest(buf))
		})
		add("posix_fadvise, readahead, then read", path, 0, func(fd int) string {
			err := errors.Join(unix.Fadvise(fd, 0, 0, unix.FADV_SEQUENTIAL), unix.Fadvise(fd, 0, 0, unix.FADV_WILLNEED),
				unix.Fadvise(fd, 0, 0, unix.FADV_RANDOM))
			_, _, errno := unix.Syscall(unix.SYS_READAHEAD, uintptr(fd), 0, uintptr(size))
			buf := make([]byte, size)
			n, err2 := unix.Pread(fd, buf, 0)
			err3 := unix.Fadvise(fd, 0, 0, unix.FADV_DONTNEED)
			return told(errors.Join(err, err2, err3), "%d %s", errno, digest(buf[:max(n, 0)]))
		})
		add("what a reader may not do", path, 0, func(fd int) string {
			_, err := unix.Write(fd, []byte("x"))
			_, err2 := unix.Pwrite(fd, []byte("x"), 3)
			return told(err, "") + told(err2, "") + told(unix.Ftruncate(fd, 0), "") +
				told(unix.Fallocate(fd, 0, 0, 10), "") +
				told(unix.Fchmod(fd, 0o777), "") + told(unix.Fchown(fd, 1, 1), "") +
				told(unix.Fsetxattr(fd, "user.x", nil, 0), "") + told(unix.Futimes(fd, make([]unix.Timeval, 2)), "")
		})
		add("what a reader may do", path, 0, func(fd int) string {
			_, tty := unix.IoctlGetTermios(fd, unix.TCGETS)
			left, fion := unix.IoctlGetInt(fd, unix.TIOCINQ)
			lock := unix.Flock_t{Type: unix.F_RDLCK, Len: 10}
			return told(unix.Fsync(fd), "synced") + told(unix.Fdatasync(fd), "synced") +
				told(unix.Syncfs(fd), "synced") + told(unix.Flock(fd, unix.LOCK_SH), "locked") +
				told(unix.FcntlFlock(uintptr(fd), unix.F_SETLK, &lock), "locked") + told(tty, "a terminal") +
				told(fion, "%d left", left) + told(unix.Fchdir(fd), "there")
		})
		add("many threads", path, 0, func(fd int) string {
			all := make([]byte, size)
			var wg sync.WaitGroup
			const part = 3000
			for at := int64(0); at < size; at += part {
				wg.Go(func() { _, _ = unix.Pread(fd, all[at:min(at+part, size)], at) })
			}
			wg.Wait()
			return digest(all)
		})
	}
	return ops
}

// copied tells what copy wrote to a descriptor of a new local file.
func copied(copy func(out int) (int, error)) string {
	f, err := os.CreateTemp("", "fusefs-")
	if err != nil {
		return err.Error()
	}
	defer os.Remove(f.Name())
	defer f.Close()
	for {
		n, err := copy(int(f.Fd()))
		if n <= 0 {
			b, err2 := os.ReadFile(f.Name())
			return told(errors.Join(err, err2), "%s", digest(b))
		}
	}
}

// statx tells what both file systems know; device, inode, blocks and the time of access are their own.
func statx(dirfd int, path string, flags int) string {
	var st unix.Statx_t
	if err := unix.Statx(dirfd, path, flags, unix.STATX_BASIC_STATS, &st); err != nil {
		return told(err, "")
	}
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		st.Size = 0
	}
	return fmt.Sprintf("%o, %d links, %d:%d, %d bytes, %d.%09d",
		st.Mode, st.Nlink, st.Uid, st.Gid, st.Size, st.Mtime.Sec, st.Mtime.Nsec)
}

func nameOperations(data []testFile) (ops []operation) {
	add := func(name string, do func(root string) string) { ops = append(ops, operation{name: name, do: do}) }
	paths := []string{"", "none", small + "/x", folder + "/none", "many"}
	for _, f := range data {
		paths = append(paths, f.path, filepath.Dir(f.path))
	}
	for _, path := range paths {
		add("statx "+path, func(root string) string { return statx(unix.AT_FDCWD, root+"/"+path, 0) })
		add("lstat "+path, func(root string) string {
			return statx(unix.AT_FDCWD, root+"/"+path, unix.AT_SYMLINK_NOFOLLOW)
		})
	}
	for _, path := range []string{"", "none", small, folder, small + "/x", "class a/deep", ".", "..",
		"./class a/../b/63k"} {
		add("fstat "+path, func(root string) string {
			if path == ".." {
				return "" // outside
			}
			return withFile(root+"/"+path, unix.O_PATH, func(fd int) string {
				return statx(fd, "", unix.AT_EMPTY_PATH)
			})
		})
		for _, mode := range []uint32{unix.F_OK, unix.R_OK, unix.W_OK, unix.X_OK, unix.R_OK | unix.X_OK,
			unix.R_OK | unix.W_OK, 99} {
			if path != ".." {
				add(fmt.Sprintf("access %d %s", mode, path), func(root string) string {
					return told(unix.Access(root+"/"+path, mode), "allowed") +
						told(unix.Faccessat(unix.AT_FDCWD, root+"/"+path, mode, unix.AT_EACCESS), "allowed")
				})
			}
		}
		add("readlink "+path, func(root string) string {
			_, err := unix.Readlink(root+"/"+path, make([]byte, 100))
			return told(err, "a link")
		})
	}
	for _, dir := range []string{"", folder, "many", "err", small, "none", "class a/deep/er"} {
		add("readdir "+dir, func(root string) string {
			entries, err := os.ReadDir(root + "/" + dir)
			var names []string
			for _, e := range entries {
				names = append(names, e.Name()+e.Type().String())
			}
			return told(err, "%q", names)
		})
		add("seekdir "+dir, func(root string) string {
			return withFile(root+"/"+dir, unix.O_RDONLY, func(fd int) string {
				first, err := dirents(fd)
				if err != nil {
					return told(err, "")
				}
				if len(first) > 5 { // again from the middle
					at := len(first) / 2
					if _, err := unix.Seek(fd, first[at].off, unix.SEEK_SET); err != nil {
						return told(err, "")
					}
					rest, err := dirents(fd)
					if err != nil || !slices.Equal(rest, first[at+1:]) {
						return fmt.Sprint("after seekdir: ", len(rest), err)
					}
				}
				if _, err := unix.Seek(fd, 0, unix.SEEK_SET); err != nil {
					return told(err, "")
				}
				again, err := dirents(fd)
				if err != nil || !slices.Equal(first, again) {
					return fmt.Sprint("after rewinddir: ", len(again), err)
				}
				var names []string
				for _, e := range first {
					names = append(names, fmt.Sprint(e.kind, e.name))
				}
				slices.Sort(names)
				return fmt.Sprintf("%q", names)
			})
		})
		add("read, pread and mmap "+dir, func(root string) string {
			return withFile(root+"/"+dir, unix.O_RDONLY, func(fd int) string {
				_, err := unix.Read(fd, make([]byte, 0))
				_, err2 := unix.Pread(fd, make([]byte, 10), 3)
				return told(err, "read") + told(err2, "read")
			})
		})
	}
	tv := []unix.Timeval{{}, {}}
	fresh, long := "fresh", strings.Repeat("n", 256)
	mutations := map[string]func(root, path string) error{
		"truncate":    func(r, p string) error { return unix.Truncate(r+p, 0) },
		"chmod":       func(r, p string) error { return unix.Chmod(r+p, 0o777) },
		"chown":       func(r, p string) error { return unix.Chown(r+p, 1, 1) },
		"lchown":      func(r, p string) error { return unix.Lchown(r+p, 1, 1) },
		"utimes":      func(r, p string) error { return unix.Utimes(r+p, tv) },
		"mkdir":       func(r, p string) error { return unix.Mkdir(r+p, 0o755) },
		"mknod":       func(r, p string) error { return unix.Mknod(r+p, unix.S_IFREG|0o644, 0) },
		"mkfifo":      func(r, p string) error { return unix.Mkfifo(r+p, 0o644) },
		"symlink":     func(r, p string) error { return unix.Symlink("x", r+p) },
		"link to":     func(r, p string) error { return unix.Link(r+"/"+one, r+p) },
		"link from":   func(r, p string) error { return unix.Link(r+p, r+"/"+fresh) },
		"setxattr":    func(r, p string) error { return unix.Setxattr(r+p, "user.x", []byte("v"), 0) },
		"removexattr": func(r, p string) error { return unix.Removexattr(r+p, "user.x") },
		"getxattr":    func(r, p string) error { _, err := unix.Getxattr(r+p, "user.x", make([]byte, 10)); return err },
		"unlink":      func(r, p string) error { return unix.Unlink(r + p) },
		"rmdir":       func(r, p string) error { return unix.Rmdir(r + p) },
		"rename from": func(r, p string) error { return unix.Rename(r+p, r+"/"+fresh) },
		"rename to":   func(r, p string) error { return unix.Rename(r+"/"+one, r+p) },
		"O_TMPFILE": func(r, p string) error {
			fd, err := unix.Open(r+p, unix.O_TMPFILE|unix.O_RDWR, 0o600)
			if err == nil {
				unix.Close(fd)
			}
			return err
		},
	}
	// A read-only mount says EROFS before it looks for what is to be removed. This one is mounted
	// for writing, because of .shoal, and the kernel looks first: what is missing or of the wrong
	// kind is told as on a file system that can be written to.
	ours := map[string]string{
		"unlink fresh": "ENOENT", "unlink class a/new": "ENOENT", "unlink class a": "EISDIR",
		"unlink " + long: "ENAMETOOLONG",
		"rmdir fresh":    "ENOENT", "rmdir class a/new": "ENOENT", "rmdir b/63k": "ENOTDIR",
		"rmdir " + long:     "ENAMETOOLONG",
		"rename from fresh": "ENOENT", "rename from class a/new": "ENOENT", "rename from " + long: "ENAMETOOLONG",
		"rename to class a": "ENOTEMPTY", "rename to " + long: "ENAMETOOLONG", "link from class a": "EPERM",
	}
	for _, name := range slices.Sorted(maps.Keys(mutations)) {
		for _, path := range []string{small, folder, "class a/new", fresh, "none/x", small + "/x", long} {
			key := name + " " + path
			ops = append(ops, operation{name: key, ours: ours[key], do: func(root string) string {
				return told(mutations[name](root, "/"+path), "done")
			}})
		}
	}
	ops = append(ops,
		// A copy within the kernel needs one file system type on both sides; who gets EXDEV reads
		// and writes.
		operation{name: "copy_file_range", ours: "EXDEV", do: func(root string) string {
			return withFile(root+"/"+small, 0, func(fd int) string {
				return copied(func(out int) (int, error) { return unix.CopyFileRange(fd, nil, out, nil, 10_000, 0) })
			})
		}},
		// The block device behind ext4 wants sectors; FUSE reads what it is asked for.
		operation{name: "unaligned O_DIRECT", ours: "100 bytes", do: func(root string) string {
			return withFile(root+"/"+small, unix.O_DIRECT, func(fd int) string {
				n, err := unix.Pread(fd, make([]byte, 100), 7)
				return told(err, "%d bytes", n)
			})
		}},
	)
	return ops
}

type dirent struct {
	name string
	kind byte
	off  int64
}

// dirents reads a directory from where it stands.
func dirents(fd int) (all []dirent, err error) {
	buf := make([]byte, 2000)
	for {
		n, err := unix.Getdents(fd, buf)
		if n <= 0 {
			return all, err
		}
		for at := 0; at < n; {
			d := (*unix.Dirent)(unsafe.Pointer(&buf[at]))
			name := buf[at+19 : at+int(d.Reclen)]
			all = append(all, dirent{string(name[:bytes.IndexByte(name, 0)]), d.Type, d.Off})
			at += int(d.Reclen)
		}
	}
}

func TestOperations(t *testing.T) {
	for _, keep := range []bool{true, false} {
		t.Run(fmt.Sprint("kernel cache ", keep), func(t *testing.T) {
			c, local := oracle(t, "tree", func(s *spec) { s.Options.KernelCache = keep })
			ops := slices.Concat(openOperations(), readOperations(c.data), nameOperations(c.data))
			differ := 0
			for _, op := range ops {
				want, got := op.do(local), op.do(c.dir)
				if op.ours != "" {
					differ++
					if want == op.ours {
						t.Errorf("%s: the local copy says %s too: it is no exception", op.name, want)
					}
					want = op.ours
				}
				if got != want {
					t.Errorf("%s: %s, want %s", op.name, got, want)
				}
			}
			t.Logf("%d operations, of which %d differ on purpose", len(ops), differ)
		})
	}
}

// TestReads reads at random through several descriptors of several kinds, as fsx does, and compares
// with what the file holds.
func TestReads(t *testing.T) {
	c := mountChild(t, "tree", func(s *spec) { s.Volume = lendVolume })
	names := []string{small, large, one, empty, "b/große Datei \\ \"x\".bin", "class a/.hidden"}
	content := map[string][]byte{}
	for _, n := range names {
		content[n] = testArena().content(fileOf(c.data, n))
	}
	type handle struct {
		fd   int
		name string
		pos  int64
		mem  []byte
	}
	rapid.Check(t, func(t *rapid.T) {
		var handles []*handle
		shut := func(h *handle) {
			if h.mem != nil {
				unix.Munmap(h.mem)
			}
			unix.Close(h.fd)
		}
		defer func() {
			for _, h := range handles {
				shut(h)
			}
		}()
		open := func(t *rapid.T) {
			name := rapid.SampledFrom(names).Draw(t, "name")
			fd, err := unix.Open(c.path(name), rapid.SampledFrom([]int{0, 0, unix.O_DIRECT}).Draw(t, "flags"), 0)
			if err != nil {
				t.Fatal(err)
			}
			handles = append(handles, &handle{fd: fd, name: name})
		}
		pick := func(t *rapid.T) (*handle, []byte) {
			if len(handles) == 0 {
				open(t) // rapid gives up where it finds nothing but actions to skip
			}
			h := rapid.SampledFrom(handles).Draw(t, "handle")
			return h, content[h.name]
		}
		check := func(t *rapid.T, h *handle, off int64, got, want []byte, err error) {
			if err != nil || !bytes.Equal(got, want) {
				t.Fatalf("%s at %d: %d bytes, %v, want %d", h.name, off, len(got), err, len(want))
			}
		}
		cut := func(b []byte, off int64, n int) []byte {
			return b[min(off, int64(len(b))):min(off+int64(n), int64(len(b)))]
		}
		sizes := rapid.OneOf(rapid.IntRange(0, 5000), rapid.IntRange(0, 3<<20))
		t.Repeat(map[string]func(*rapid.T){
			"open": open,
			"close": func(t *rapid.T) {
				h, _ := pick(t)
				handles = slices.DeleteFunc(handles, func(o *handle) bool { return o == h })
				shut(h)
			},
			"read": func(t *rapid.T) {
				h, b := pick(t)
				buf := make([]byte, sizes.Draw(t, "n"))
				n, err := unix.Read(h.fd, buf)
				check(t, h, h.pos, buf[:max(n, 0)], cut(b, h.pos, len(buf)), err)
				h.pos += int64(n)
			},
			"pread": func(t *rapid.T) {
				h, b := pick(t)
				buf, off := make([]byte, sizes.Draw(t, "n")), int64(sizes.Draw(t, "off"))
				n, err := unix.Pread(h.fd, buf, off)
				check(t, h, off, buf[:max(n, 0)], cut(b, off, len(buf)), err)
			},
			"seek": func(t *rapid.T) {
				h, b := pick(t)
				off := int64(sizes.Draw(t, "off"))
				at, err := unix.Seek(h.fd, -min(off, int64(len(b))), io.SeekEnd)
				if err != nil || at != int64(len(b))-min(off, int64(len(b))) {
					t.Fatal(at, err)
				}
				h.pos = at
			},
			"map": func(t *rapid.T) {
				h, b := pick(t)
				if h.mem != nil || len(b) == 0 {
					t.Skip()
				}
				var err error
				if h.mem, err = unix.Mmap(h.fd, 0, len(b), unix.PROT_READ, unix.MAP_SHARED); err != nil {
					t.Fatal(err)
				}
			},
			"mapped read": func(t *rapid.T) {
				h, b := pick(t)
				if h.mem == nil {
					t.Skip()
				}
				off, n := int64(sizes.Draw(t, "off")), sizes.Draw(t, "n")
				check(t, h, off, cut(h.mem, off, n), cut(b, off, n), nil)
			},
			"drop": func(t *rapid.T) {
				h, _ := pick(t)
				if err := unix.Fadvise(h.fd, 0, 0, unix.FADV_DONTNEED); err != nil {
					t.Fatal(err)
				}
			},
		})
	})
}

// Programs that people use give the same result on both. Times of access and what folders occupy are
// left out.
func TestPrograms(t *testing.T) {
	c, local := oracle(t, "tree")
	files := `find . -type f -print0 | LC_ALL=C sort -z`
	sums := filepath.Join(t.TempDir(), "sums")
	for _, tc := range []struct{ name, script string }{
		{"find", `find . -printf '%P %y %m %n %U:%G %T@ ' \( -type f -printf '%s\n' -o -printf '\n' \) | LC_ALL=C sort`},
		{"du", files + ` | du --files0-from=- --apparent-size -bc`},
		{"ls", `LC_ALL=C ls -lR --time-style=full-iso . | tr -s ' ' | awk '/^total/ {next} /^d/ {$5=""} {print}'`},
		{"wc", files + ` | wc --files0-from=- -c`},
		{"md5sum", `tee=` + sums + `; [ -s $tee ] || { ` + files +
			` | xargs -0 md5sum >$tee; }; md5sum -c --quiet $tee && wc -l <$tee`},
		{"tar", `tar -c --sort=name --format=gnu . | md5sum`},
		{"cp -r", `cp -r --preserve=mode,timestamps . "$TO" && cd "$TO" && ` + files +
			` | xargs -0 md5sum && find . -printf '%P %m %T@\n' | LC_ALL=C sort | md5sum`},
		{"rsync", `rsync -a --chmod=Du+w ./ "$TO/" && cd "$TO" && ` + files + ` | xargs -0 md5sum`},
		{"rsync again sends nothing", `rsync -a ./ "$TO/" && rsync -ai ./ "$TO/"`},
		{"diff", `diff -r . ` + local + ` && echo equal`},
		{"cmp", `find "class a" b -type f -print0 | xargs -0 -I{} cmp {} ` + local + `/{} && echo equal`},
		{"grep", `LC_ALL=C grep -rlc '[aeiou]' . | LC_ALL=C sort`},
		{"head, tail, dd", `head -c 100 b/700k | md5sum; tail -c 1000 b/700k | md5sum; dd if=b/700k bs=3001 skip=17 count=9 2>/dev/null | md5sum; dd if=b/700k bs=64k iflag=direct 2>/dev/null | md5sum`},
		{"python", `python3 -c 'import os,mmap,shutil,hashlib
for d,_,fs in sorted(os.walk("b")):
    for f in sorted(fs):
        p=os.path.join(d,f)
        with open(p,"rb") as h: a=h.read()
        with open(p,"rb") as h: m=mmap.mmap(h.fileno(),0,prot=mmap.PROT_READ)
        assert a==m[:]==open(p,"rb",buffering=0).read(); print(p,hashlib.md5(a).hexdigest(),os.path.getsize(p))
    shutil.copytree(d,os.environ["TO"]+"/b",dirs_exist_ok=True)'`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			run := func(dir string) string {
				cmd := exec.Command("bash", "-o", "pipefail", "-c", tc.script)
				to := t.TempDir()
				cmd.Dir, cmd.Env = dir, append(os.Environ(), "TO="+to)
				out, err := cmd.CombinedOutput()
				if err != nil {
					t.Errorf("%v\n%s", err, out)
				}
				return string(out)
			}
			if want, got := run(local), run(c.dir); got != want || want == "" && !strings.Contains(tc.name, "nothing") {
				g, w := strings.Split(got, "\n"), strings.Split(want, "\n")
				for i := range min(len(g), len(w)) {
					if g[i] != w[i] {
						t.Fatalf("line %d: %q, on the local copy %q", i+1, g[i], w[i])
					}
				}
				t.Errorf("%d lines, on the local copy %d", len(g), len(w))
			}
		})
	}
}

// Several processes list a folder of 100,000 entries at a time; the kernel asks in parallel
// (PARALLEL_DIROPS).
func TestFirstListing(t *testing.T) {
	c := mountChild(t, "big")
	used := func() float64 {
		seconds, err := cputime.Process(c.cmd.Process.Pid)
		if err != nil {
			t.Fatal(err)
		}
		return seconds
	}
	before := used()
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			out, err := exec.Command("ls", "-U", c.path("dir")).Output()
			if err != nil || bytes.Count(out, []byte("\n")) != 100_000 {
				t.Errorf("%d bytes, %v", len(out), err)
			}
		})
	}
	wg.Wait()
	// BenchmarkFirstListing measures. This is to notice an algorithm that does not scale, with the race
	// detector on a busy machine, on which the time that passes says nothing.
	if d := used() - before; d > 15 {
		t.Errorf("it took %.1f s of the processor", d)
	}
}
