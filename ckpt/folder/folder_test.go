package folder

import (
	"archive/zip"
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"
)

func TestMain(m *testing.M) {
	if os.Getenv("FOLDER_WRITER") != "" {
		writer()
		return
	}
	goleak.VerifyTestMain(m)
}

// writer is another process that writes files, as told by its standard input: open PATH, map PATH, store N CHAR, close
// N. It answers each line.
func writer() {
	type opened struct {
		fd   int
		page []byte
	}
	var all []opened
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		verb, arg, _ := strings.Cut(in.Text(), " ")
		var n int
		var char byte
		fmt.Sscan(arg, &n, &char)
		var err error
		switch verb {
		case "open", "map":
			o := opened{fd: -1}
			o.fd, err = unix.Open(arg, unix.O_RDWR|unix.O_CREAT|unix.O_CLOEXEC, 0o666)
			if err == nil && verb == "map" {
				o.page, err = unix.Mmap(o.fd, 0, 1, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
				unix.Close(o.fd)
			}
			all = append(all, o)
			n = len(all) - 1
		case "store":
			if all[n].page != nil {
				all[n].page[0] = char
			} else {
				_, err = unix.Write(all[n].fd, []byte{char})
			}
		case "close":
			if all[n].page != nil {
				err = unix.Munmap(all[n].page)
			} else {
				err = unix.Close(all[n].fd)
			}
		}
		fmt.Println(n, err)
	}
}

// A process is a writer's.
type process struct {
	t   rapid.TB
	in  io.Writer
	out *bufio.Reader
}

func startWriter(t *testing.T) *process {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), "FOLDER_WRITER=1")
	in, _ := cmd.StdinPipe()
	out, _ := cmd.StdoutPipe()
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		in.Close()
		if err := cmd.Wait(); err != nil {
			t.Error(err)
		}
	})
	return &process{t, in, bufio.NewReader(out)}
}

func (p *process) say(line string) { fmt.Fprintln(p.in, line) }

func (p *process) hear() int {
	p.t.Helper()
	var n int
	var answer string
	line, err := p.out.ReadString('\n')
	if _, e := fmt.Sscan(line, &n, &answer); err != nil || e != nil || answer != "<nil>" {
		p.t.Fatalf("the writer said %q, %v", line, err)
	}
	return n
}

func (p *process) do(format string, args ...any) int {
	p.t.Helper()
	p.say(fmt.Sprintf(format, args...))
	return p.hear()
}

// A watcher keeps what Next says.
type watcher struct {
	t    rapid.TB
	f    *Folder
	dir  string
	stop func()

	mu    sync.Mutex
	moved sync.Cond
	view  map[string]News
	log   []News
	err   error
}

var last, _ = LastNames()

func options() Options { return Options{Last: last, Log: slog.New(slog.DiscardHandler)} }

func follow(t rapid.TB, dir string) *watcher {
	t.Helper()
	f, err := Open(dir, options())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	w := &watcher{t: t, f: f, dir: dir, view: map[string]News{}}
	w.moved.L = &w.mu
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			news, err := f.Next(ctx)
			w.mu.Lock()
			for _, n := range news {
				if n.State == Whole && w.view[n.Path] == n || Temporary(n.Path) {
					t.Errorf("told again, or too early: %+v", n)
				}
				w.view[n.Path] = n
			}
			w.log = append(w.log, news...)
			w.err = err
			w.moved.Broadcast()
			w.mu.Unlock()
			if err != nil {
				return
			}
		}
	}()
	w.stop = sync.OnceFunc(func() {
		cancel()
		<-done
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	})
	if t, ok := t.(*testing.T); ok {
		t.Cleanup(w.stop)
	}
	return w
}

// await waits until the view is as asked.
func (w *watcher) await(what string, ok func() bool) {
	w.t.Helper()
	late := time.AfterFunc(30*time.Second, func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.err = errors.New("it does not come")
		w.moved.Broadcast()
	})
	defer late.Stop()
	w.mu.Lock()
	defer w.mu.Unlock()
	for !ok() {
		if w.err != nil {
			w.t.Fatalf("%s: %v; view %+v, counts %+v", what, w.err, w.view, w.f.refused)
		}
		w.moved.Wait()
	}
}

func (w *watcher) awaitState(p string, s State) News {
	w.t.Helper()
	w.await(fmt.Sprintf("%s in state %d", p, s), func() bool { return w.view[p].State == s })
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.view[p]
}

// whole returns the paths that were reported whole, in order.
func (w *watcher) whole() (paths []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, n := range w.log {
		if n.State == Whole {
			paths = append(paths, n.Path)
		}
	}
	return paths
}

func write(t rapid.TB, p string, content string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(p), 0o777); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(p, []byte(content), 0o666); err != nil {
		t.Fatal(err)
	}
}

// places are folders on a disk and in memory.
func places(t *testing.T, test func(t *testing.T, dir string)) {
	for _, base := range []string{"", "/dev/shm"} {
		t.Run("on "+filepath.Base(base), func(t *testing.T) {
			dir, err := os.MkdirTemp(base, "folder")
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { os.RemoveAll(dir) })
			test(t, dir)
		})
	}
}

func TestStart(t *testing.T) {
	places(t, func(t *testing.T, dir string) {
		for _, p := range []string{"a/2", "a/1", "a/.metadata", "0"} {
			write(t, filepath.Join(dir, p), p)
		}
		write(t, filepath.Join(dir, "b.tmp"), "")
		write(t, filepath.Join(dir, ".tmp-x/y"), "")
		write(t, filepath.Join(dir, "t.safetensors"), "short")
		os.Symlink("0", filepath.Join(dir, "link"))
		unix.Mkfifo(filepath.Join(dir, "pipe"), 0o666)
		os.WriteFile(filepath.Join(dir, "bad\xff"), nil, 0o666)
		os.WriteFile(filepath.Join(dir, "bad\xff.tmp"), nil, 0o666)
		w := follow(t, dir)
		w.awaitState("link", Skipped)
		w.awaitState("pipe", Skipped)
		w.awaitState("bad\xff", Torn) // the last names of its folder may name it
		w.awaitState("t.safetensors", Torn)
		w.awaitState("0", Whole)
		w.await("all", func() bool { return len(w.view) == 8 })
		if c := w.f.Counts(); c != (Counts{Temporary: 3, Torn: 2, Skipped: 2}) {
			t.Errorf("%+v", c)
		}
		news, err := w.f.Look()
		if err != nil || len(news) != 8 || !slices.Contains(news, w.awaitState("0", Whole)) {
			t.Errorf("%+v, %v", news, err)
		}
		w.await("no news", func() bool { return len(w.log) == 8 })
	})
}

// What cannot be read is not left out: a last name beside it may name it.
func TestUnreadable(t *testing.T) {
	dir := t.TempDir()
	write(t, filepath.Join(dir, "x"), "x")
	f, err := Open(dir, options())
	if err = errors.Join(err, os.Chmod(filepath.Join(dir, "x"), 0)); err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	looked := make(chan error)
	go func() {
		runtime.LockOSThread() // which ends with the goroutine
		if os.Geteuid() == 0 { // who reads all
			_, err = unix.SetfsuidRetUid(65534)
		}
		news, lookErr := f.Look()
		if err = errors.Join(err, lookErr); len(news) != 1 || news[0].State != Torn {
			err = fmt.Errorf("%+v, %w", news, err)
		}
		looked <- err
	}()
	if err := <-looked; err != nil {
		t.Error(err)
	}
}

// A folder that may not be written is refused for that.
func TestUnwritable(t *testing.T) {
	dir := t.TempDir()
	if err := errors.Join(os.Chmod(filepath.Dir(dir), 0o755), os.Chmod(dir, 0o555)); err != nil {
		t.Fatal(err)
	}
	opened := make(chan error)
	go func() {
		runtime.LockOSThread() // which ends with the goroutine
		if os.Geteuid() == 0 { // who writes all
			_, _ = unix.SetfsuidRetUid(65534)
		}
		_, err := Open(dir, options())
		opened <- err
	}()
	err := <-opened
	if !errors.Is(err, fs.ErrPermission) || !strings.Contains(err.Error(), filepath.Join(dir, Home)) ||
		!strings.Contains(err.Error(), "as the trainer's user") {
		t.Error(err)
	}
}

// A tree is reported in the order of ctime, with last ones after others of the same age.
func TestStartOrder(t *testing.T) {
	dir := t.TempDir()
	var want []string
	for _, p := range []string{"c", "b/latest", "b/x", "a"} {
		write(t, filepath.Join(dir, p), p)
		want = append(want, p)
		for at := ctime(t, filepath.Join(dir, p)); ; { // until the clock of the file system goes on
			write(t, filepath.Join(dir, "probe.tmp"), "")
			if ctime(t, filepath.Join(dir, "probe.tmp")) > at {
				break
			}
		}
	}
	w := follow(t, dir)
	w.await("all", func() bool { return len(w.log) == 4 })
	if got := w.whole(); !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

func ctime(t *testing.T, p string) int64 {
	var st unix.Stat_t
	if err := unix.Stat(p, &st); err != nil {
		t.Fatal(err)
	}
	return st.Ctim.Nano()
}

func TestFolders(t *testing.T) {
	places(t, func(t *testing.T, dir string) {
		w := follow(t, dir)
		for _, p := range []string{".metadata", "deep/er/1", "2", "3.tmp"} {
			write(t, filepath.Join(dir, "step.tmp", p), p)
		}
		write(t, filepath.Join(dir, "mark"), "")
		w.awaitState("mark", Whole)
		write(t, filepath.Join(dir, "step.tmp/empty"), "")
		if err := os.Rename(filepath.Join(dir, "step.tmp"), filepath.Join(dir, "step")); err != nil {
			t.Fatal(err)
		}
		w.awaitState("step/.metadata", Whole)
		if got := w.whole(); len(got) != 5 || got[4] != "step/.metadata" {
			t.Errorf("%v: the last one isn't last", got)
		}
		write(t, filepath.Join(dir, "step/deep/er/new"), "")
		w.awaitState("step/deep/er/new", Whole)
		os.Rename(filepath.Join(dir, "step"), filepath.Join(dir, "again"))
		w.awaitState("again/deep/er/new", Whole)
		w.awaitState("step/deep/er/1", Gone)
		write(t, filepath.Join(dir, "again/deep/er/after"), "")
		w.awaitState("again/deep/er/after", Whole)
		outside := dir + "-outside"
		os.Rename(filepath.Join(dir, "again"), outside)
		defer os.RemoveAll(outside)
		w.awaitState("again/deep/er/after", Gone)
		os.Rename(outside, filepath.Join(dir, "back"))
		w.awaitState("back/deep/er/after", Whole)
		os.RemoveAll(filepath.Join(dir, "back"))
		w.awaitState("back/deep/er/after", Gone)
		write(t, filepath.Join(dir, "back"), "a file")
		w.awaitState("back", Whole)
		os.Remove(filepath.Join(dir, "back"))
		write(t, filepath.Join(dir, "back/file"), "")
		w.awaitState("back", Gone)
		w.awaitState("back/file", Whole)
		w.await("no watches of what is gone", func() bool {
			w.f.mu.Lock()
			defer w.f.mu.Unlock()
			return len(w.f.watches) == 2
		})
	})
}

// A change of rights, owner or times, which no close follows, is looked at: it may be readable only now, and copytree
// sets the time of what it has closed.
func TestAttributes(t *testing.T) {
	places(t, func(t *testing.T, dir string) {
		w := follow(t, dir)
		write(t, filepath.Join(dir, "d/a"), "a")
		w.awaitState("d/a", Whole)
		if err := os.Chtimes(filepath.Join(dir, "d/a"), time.Unix(1, 0), time.Unix(1, 0)); err != nil {
			t.Fatal(err)
		}
		w.await("its time", func() bool { return w.view["d/a"].Print.Mtime == 1e9 })
	})
}

// A change of rights alone leaves a file its place among those that were closed.
func TestAttributesKeepTheOrder(t *testing.T) {
	places(t, func(t *testing.T, dir string) {
		f, err := Open(dir, options())
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		write(t, filepath.Join(dir, "d/x"), "x")
		if _, err := f.Next(t.Context()); err != nil {
			t.Fatal(err)
		}
		write(t, filepath.Join(dir, "d/a"), "a")
		write(t, filepath.Join(dir, "latest"), "l")
		if err := os.Chmod(filepath.Join(dir, "d/a"), 0o600); err != nil {
			t.Fatal(err)
		}
		var got []string
		for len(got) < 2 {
			news, err := f.Next(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			for _, n := range news {
				got = append(got, n.Path)
			}
		}
		if got[0] != "d/a" || got[1] != "latest" {
			t.Errorf("in this order: %v", got)
		}
	})
}

func TestRemoved(t *testing.T) {
	for name, remove := range map[string]func(string) error{"removed": os.RemoveAll, "renamed": func(p string) error {
		return os.Rename(p, p+"2")
	}} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "dir")
			write(t, filepath.Join(dir, "x"), "")
			f, err := Open(dir, options())
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			if err := remove(dir); err != nil {
				t.Fatal(err)
			}
			for err == nil {
				_, err = f.Next(context.Background())
			}
			if !strings.Contains(err.Error(), "was removed, renamed or unmounted") {
				t.Error(err)
			}
		})
	}
}

// What was a file when it was looked at, and is something else by the time that it is opened, stops nothing.
func TestFileToFolder(t *testing.T) {
	dir := t.TempDir()
	w := follow(t, dir)
	a := filepath.Join(dir, "a")
	for range 200 {
		write(t, a, "a")
		if err := errors.Join(os.Remove(a), os.Mkdir(a, 0o777), os.Remove(a), unix.Mkfifo(a, 0o666),
			os.Remove(a)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(a, 0o777); err != nil {
		t.Fatal(err)
	}
	if err := w.f.Unchanged("a", Print{}); !errors.Is(err, ErrGone) {
		t.Error(err)
	}
	write(t, filepath.Join(dir, "end"), "")
	w.awaitState("end", Whole)
}

// A folder that has been moved is still the one that is looked at, whatever has its name.
func TestMoved(t *testing.T) {
	for what, replace := range map[string]func(dir string) error{"nothing": func(string) error { return nil },
		"a folder": func(dir string) error { return os.Mkdir(dir, 0o700) },
		"a link":   func(dir string) error { return os.Symlink(dir+"2", dir) }} {
		t.Run(what, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "dir")
			write(t, filepath.Join(dir, "x"), "x")
			f, err := Open(dir, options())
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			if err := errors.Join(os.Rename(dir, dir+"2"), replace(dir)); err != nil {
				t.Fatal(err)
			}
			news, err := f.Look()
			if err != nil || len(news) != 1 || news[0].Path != "x" || news[0].State != Whole {
				t.Errorf("%+v, %v", news, err)
			}
			if what != "a link" { // Next says so
				return
			}
			for seen := ""; seen != "x"; seen = news[0].Path {
				if news, err = f.Next(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}

// A writer in another process waits for no longer than it takes to give the lease back.
func TestHold(t *testing.T) {
	places(t, func(t *testing.T, dir string) {
		p := startWriter(t)
		w := follow(t, dir)
		name := filepath.Join(dir, "x")
		n := p.do("open %s", name)
		p.do("store %d %d", n, 'x')
		w.awaitState("x", Writing)
		if c := w.f.Counts(); c.Writing != 1 {
			t.Errorf("%+v", c)
		}
		if _, err := w.f.Hold("x", Print{}); !errors.Is(err, ErrWriting) {
			t.Error(err)
		}
		p.do("close %d", n)
		old := w.awaitState("x", Whole).Print
		h, err := w.f.Hold("x", old)
		if err != nil || !h.Whole() {
			t.Fatal(err)
		}
		b := make([]byte, 1)
		if _, err := h.ReadAt(b, 0); err != nil || b[0] != 'x' {
			t.Error(b, err)
		}
		began := time.Now()
		n = p.do("open %s", name) // returns only because the lease is given back
		t.Logf("the writer waited %v", time.Since(began))
		<-h.Broken
		if h.Whole() {
			t.Error("whole")
		}
		h.Close()
		p.do("store %d %d", n, 'x')
		p.do("close %d", n)
		w.await("a new print", func() bool { n := w.view["x"]; return n.State == Whole && n.Print != old })
		if _, err := w.f.Hold("x", old); !errors.Is(err, ErrChanged) {
			t.Error(err)
		}
		now := w.awaitState("x", Whole).Print
		os.Link(name, filepath.Join(dir, "y")) // no event of x
		y := w.awaitState("y", Whole).Print
		if !y.SameContent(now) || y == now {
			t.Errorf("%+v, %+v", y, now)
		}
		if _, err := w.f.Hold("x", now); !errors.Is(err, ErrChanged) {
			t.Error(err)
		}
		w.await("x anew", func() bool { return w.view["x"].Print == y })
		n = p.do("map %s", name)
		p.do("store %d %d", n, 'x')
		if _, err := w.f.Hold("y", y); !errors.Is(err, ErrWriting) {
			t.Error(err)
		}
		w.awaitState("y", Writing)
		p.do("close %d", n)
		w.await("both anew", func() bool {
			return w.view["x"].Print == w.view["y"].Print && w.view["x"].Print.Mtime != y.Mtime
		})
		os.Remove(name)
		w.awaitState("x", Gone)
		if _, err := w.f.Hold("x", y); !errors.Is(err, ErrGone) {
			t.Error(err)
		}
	})
}

func TestRefuse(t *testing.T) {
	dir := t.TempDir()
	write(t, filepath.Join(dir, "file"), "")
	write(t, filepath.Join(dir, "cache/FORMAT"), "shoal cache 4\n")
	write(t, filepath.Join(dir, "cache/segments/in/x"), "")
	write(t, filepath.Join(dir, "busy/in/x"), "")
	os.Symlink("busy", filepath.Join(dir, "alias"))
	write(t, filepath.Join(dir, "linked/x"), "")
	os.Symlink(t.TempDir(), filepath.Join(dir, "linked", Home)) // what is beyond has no lease
	busy, err := Open(filepath.Join(dir, "busy"), options())
	if err != nil {
		t.Fatal(err)
	}
	defer busy.Close()
	l, err := net.Listen("unix", filepath.Join(dir, "busy/.shoal/ckpt.sock"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for p, want := range map[string]string{
		"none":              "no such file",
		"file":              "not a directory (name the folder that the trainer saves into)",
		"cache":             "is a cache directory of shoal (name",
		"cache/segments/in": "is a cache directory of shoal (name",
		".":                 "", // cache or busy, as they come
		"busy":              "another process follows it already: end that one, or name another folder",
		"alias":             "another process follows it already",
		"busy/in":           "another daemon follows",
		"linked":            "a lease or inotify does not work there",
		"/proc":             "",
	} {
		if !filepath.IsAbs(p) {
			p = filepath.Join(dir, p)
		}
		f, err := Open(p, options())
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", p, err)
		}
		if err == nil {
			f.Close()
		}
	}
	os.RemoveAll(filepath.Join(dir, "cache"))
	if _, err := Open(dir, options()); err == nil ||
		!strings.Contains(err.Error(), "another daemon follows "+dir+"/busy") {
		t.Error(err)
	}
	l.Close() // a socket of a daemon that was killed
	f, err := Open(dir, options())
	if err != nil {
		t.Fatal(err)
	}
	f.Close()
}

// File systems that others write unnoticed are refused by name, and those of one machine are not.
func TestSharedFileSystems(t *testing.T) {
	for magic, name := range map[uint32]string{
		unix.NFS_SUPER_MAGIC: "NFS", unix.FUSE_SUPER_MAGIC: "FUSE", unix.SMB_SUPER_MAGIC: "SMB",
		unix.SMB2_SUPER_MAGIC: "SMB", unix.CIFS_SUPER_MAGIC: "CIFS", unix.CEPH_SUPER_MAGIC: "CephFS",
		unix.V9FS_MAGIC: "9p", unix.OCFS2_SUPER_MAGIC: "OCFS2", unix.AFS_SUPER_MAGIC: "AFS",
		unix.AFS_FS_MAGIC: "AFS", unix.CODA_SUPER_MAGIC: "Coda",
		unix.EXT4_SUPER_MAGIC: "", unix.XFS_SUPER_MAGIC: "", unix.BTRFS_SUPER_MAGIC: "", unix.TMPFS_MAGIC: "",
		unix.OVERLAYFS_SUPER_MAGIC: "",
	} {
		if shared[magic] != name {
			t.Errorf("%#x is %q, not %q", magic, shared[magic], name)
		}
	}
}

// On overlayfs a lease tells of who has opened a file, and not of mappings, which is said.
func TestOverlay(t *testing.T) {
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	for _, name := range []string{"lower", "upper", "work", "merged"} {
		if err := os.Mkdir(at(name), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	err := unix.Mount("overlay", at("merged"), "overlay", 0,
		"lowerdir="+at("lower")+",upperdir="+at("upper")+",workdir="+at("work"))
	if err != nil {
		t.Skip(err)
	}
	defer func() { _ = unix.Unmount(at("merged"), unix.MNT_DETACH) }() // an inotify ends late
	for name, warns := range map[string]bool{"merged": true, "lower": false} {
		var said strings.Builder
		o := options()
		o.Log = slog.New(slog.NewTextHandler(&said, nil))
		f, err := Open(at(name), o)
		if err != nil {
			t.Fatal(err)
		}
		if f.Close(); strings.Contains(said.String(), "mapping") != warns {
			t.Errorf("%s: %q", name, said.String())
		}
	}
}

func TestOverflow(t *testing.T) {
	text, err := os.ReadFile("/proc/sys/fs/inotify/max_queued_events")
	if err != nil {
		t.Fatal(err)
	}
	limit, _ := strconv.Atoi(strings.TrimSpace(string(text)))
	if limit > 1<<17 {
		t.Skip("the queue is too long to fill")
	}
	dir := t.TempDir()
	write(t, filepath.Join(dir, "d/gone"), "")
	f, err := Open(dir, options())
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	view := map[string]State{}
	next := func() {
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		news, err := f.Next(ctx)
		if err != nil {
			t.Fatal(err, view)
		}
		for _, n := range news {
			view[n.Path] = n.State
		}
	}
	for view["d/gone"] != Whole {
		next()
	}
	for i := range limit/2 + 10 {
		p := filepath.Join(dir, "x"+strconv.Itoa(i%2)) // two at a time, since equal events in a row are one
		write(t, p, "")
		os.Remove(p)
	}
	os.RemoveAll(filepath.Join(dir, "d"))
	write(t, filepath.Join(dir, "new/er/file"), "")
	for view["new/er/file"] != Whole || view["d/gone"] != Gone {
		next()
	}
	write(t, filepath.Join(dir, "new/er/file2"), "")
	for view["new/er/file2"] != Whole {
		next()
	}
}

func TestTemporary(t *testing.T) {
	for _, p := range []string{".tmp123", "a/.tmpX/b", "tmp-checkpoint-10/x", "x.tmp", "X.TMP", "x.temp", "x.part",
		"x.partial", "x.incomplete",
		"x.inprogress", "x~", "tmp_step-10/model.safetensors", "d/manifest.ocdbt.__lock", "a.tmp.b", "x.tmp-12",
		"d.orbax-checkpoint-tmp-1690/x", "d.orbax-checkpoint-tmp", ".metadata.tmp", "x/tmp-1/y"} {
		if !Temporary(p) {
			t.Errorf("%s is temporary", p)
		}
	}
	for _, p := range []string{"x", "template", "a/tmp/x", "tmp", "partial", "x.parts", "checkpoint-10/x", "attempt-1",
		".metadata", "x.tmpl"} {
		if Temporary(p) {
			t.Errorf("%s is not temporary", p)
		}
	}
}

func TestLast(t *testing.T) {
	last, err := LastNames("done-*", "run/*/end")
	if err != nil {
		t.Fatal(err)
	}
	for p, want := range map[string]bool{"a/.metadata": true, "model.safetensors.index.json": true, "x/latest": true,
		"latest_checkpointed_iteration.txt": true,
		"step/commit_success.txt":           true, "_SUCCESS": true, "a/trainer_state.json": true,
		"_CHECKPOINT_METADATA": true, "iter_0000010/metadata.json": true, "step/metadata.pkl": true, "x/done-1": true,
		"run/1/end": true,
		"end":       false, "x/run/1/end": false, "done": false, "metadata": false, "x/latest/y": false} {
		if last(p) != want {
			t.Errorf("%s: %v", p, !want)
		}
	}
	for _, bad := range []string{"[", "x[", "a/[b", `\`, "", "/a/done", "done/", "./done"} {
		if _, err := LastNames(bad); err == nil {
			t.Errorf("%q is a pattern", bad)
		}
	}
}

func tensors(header string, data int) string {
	return string(binary.LittleEndian.AppendUint64(nil, uint64(len(header)))) + header + strings.Repeat("d", data)
}

func zipped(t testing.TB) string {
	var b bytes.Buffer
	z := zip.NewWriter(&b)
	f, err := z.Create("archive/data.pkl")
	if err != nil {
		t.Fatal(err)
	}
	f.Write(make([]byte, 100))
	z.Close()
	return b.String()
}

func TestForm(t *testing.T) {
	two := `{"__metadata__":{"format":"pt","data_offsets":"x"},"b":{"dtype":"U8","shape":[2],"data_offsets":[3,5]},"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}}   `
	z := zipped(t)
	for _, c := range []struct {
		name, content string
		ok            bool
	}{
		{"x.safetensors", tensors(two, 5), true},
		{"x.SAFETENSORS", tensors(two, 4), false},
		{"x.safetensors", tensors(two, 6), false},
		{"x.safetensors", tensors("{}", 0), true},
		{"x.safetensors", tensors("", 0), false},
		{"x.safetensors", tensors(`{"a":{}}`, 0), false},
		{"x.safetensors", tensors(`{"a":1}`, 0), false},
		{"x.safetensors", tensors(`[]`, 0), false},
		{"x.safetensors", "", false},
		{"x.safetensors", "1234567", false},
		{"x.safetensors", "\xff\xff\xff\xff\xff\xff\xff\xff{}", false},
		{"x.safetensors", "\x00\x00\x00\x00\x00\x00\x00\x00", false},
		{"x.txt", "", true},
		{"x.pt", z, true},
		{"x.pt", z[:len(z)-1], false},
		{"x.ckpt", z[:len(z)/2], false},
		{"x.bin", "pickle", true},
		{"x.pth", "", false},
		{"x.pt", strings.Repeat("\x00", 100) + z[100:], false},
		{"x.ckpt", "", false},
		{"x.bin", "", true},
		{"x.zip", z[:10], true},
	} {
		if why := form(c.name, strings.NewReader(c.content), int64(len(c.content))); (why == nil) != c.ok {
			t.Errorf("%s %.40q: %v", c.name, c.content, why)
		}
	}
}

func FuzzForm(f *testing.F) {
	f.Add([]byte(tensors(`{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}}`, 3)))
	f.Add([]byte(zipped(f)))
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, name := range []string{"x.pt", "x.safetensors"} {
			whole := form(name, bytes.NewReader(b), int64(len(b))) == nil
			if whole && name == "x.safetensors" && form(name, bytes.NewReader(append(b, 0)), int64(len(b)+1)) == nil {
				t.Error("a byte more is whole as well")
			}
		}
	})
}

// News come in the order of the last closes, whoever closes in between.
func TestOrder(t *testing.T) {
	places(t, func(t *testing.T, dir string) {
		rapid.Check(t, func(r *rapid.T) {
			dir, err := os.MkdirTemp(dir, "r")
			if err != nil {
				r.Fatal(err)
			}
			defer os.RemoveAll(dir)
			w := follow(r, dir)
			defer w.stop()
			open := map[string]*os.File{}
			var want []string
			closed := func(p string) {
				open[p].Close()
				delete(open, p)
				want = append(slices.DeleteFunc(want, func(o string) bool { return o == p }), p)
			}
			for range rapid.IntRange(1, 40).Draw(r, "steps") {
				p := rapid.SampledFrom([]string{"a", "b", "c", "d"}).Draw(r, "path")
				if open[p] == nil {
					if open[p], err = os.OpenFile(filepath.Join(dir, p), os.O_CREATE|os.O_WRONLY, 0o666); err != nil {
						r.Fatal(err)
					}
				}
				open[p].WriteString("x")
				if rapid.Bool().Draw(r, "close") {
					closed(p)
				}
			}
			for _, p := range slices.Sorted(maps.Keys(open)) {
				closed(p)
			}
			for _, p := range want {
				w.await(p, func() bool {
					st, err := stat(unix.AT_FDCWD, filepath.Join(dir, p))
					return err == nil && w.view[p].State == Whole && w.view[p].Print == printOf(&st)
				})
			}
			var got []string
			for _, p := range w.whole() {
				got = append(slices.DeleteFunc(got, func(o string) bool { return o == p }), p)
			}
			if !slices.Equal(got, want) {
				r.Errorf("%v, want %v: %+v", got, want, w.log)
			}
		})
	})
}

// Of what changed in the same tick of the clock, what is deeper comes first: latest names what is below.
func TestLookOrderOfATick(t *testing.T) {
	dir := t.TempDir()
	f, err := Open(dir, options())
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	deep, top := filepath.Join(dir, "step/.metadata"), filepath.Join(dir, "latest")
	for {
		write(t, deep, "1")
		if write(t, top, "2"); ctime(t, top) == ctime(t, deep) {
			break
		}
	}
	news, err := f.Look()
	if err != nil || len(news) != 2 || news[0].Path != "step/.metadata" {
		t.Errorf("%+v, %v", news, err)
	}
}

// What lies in new folders has its place among what was heard of meanwhile: a last name comes after all that was closed
// before, wherever, and no later than another last name that was closed after it.
func TestScanOrder(t *testing.T) {
	places(t, func(t *testing.T, dir string) {
		f, err := Open(dir, options())
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		write(t, filepath.Join(dir, "old/x"), "x")
		if _, err := f.Next(t.Context()); err != nil {
			t.Fatal(err)
		}
		for _, p := range []string{"meta", "shards"} { // one is looked through before the other
			if err := os.Mkdir(filepath.Join(dir, p), 0o777); err != nil {
				t.Fatal(err)
			}
		}
		want := []string{"old/latest", "old/y", "shards/z", "meta/.metadata", "latest"}
		for _, p := range want {
			write(t, filepath.Join(dir, p), p)
			for at := ctime(t, filepath.Join(dir, p)); ; { // until the clock of the file system goes on
				write(t, filepath.Join(dir, "probe.tmp"), "")
				if ctime(t, filepath.Join(dir, "probe.tmp")) > at {
					break
				}
			}
		}
		var got []string
		for len(got) < len(want) {
			news, err := f.Next(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			for _, n := range news {
				got = append(got, n.Path)
			}
		}
		if first := slices.Index(got, "old/latest"); len(got) != len(want) ||
			first > slices.Index(got, "meta/.metadata") || !slices.Equal(got[3:], want[3:]) {
			t.Errorf("in this order: %v", got)
		}
	})
}

// A look at everything is in the order of change, as at the start.
func TestLookOrder(t *testing.T) {
	dir := t.TempDir()
	f, err := Open(dir, options())
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	first, second := filepath.Join(dir, "z/.metadata"), filepath.Join(dir, "latest")
	write(t, first, "a")
	for write(t, second, "b"); ctime(t, second) <= ctime(t, first); {
		write(t, second, "b")
	}
	news, err := f.Look()
	if err != nil || len(news) != 2 || news[0].Path != "z/.metadata" {
		t.Errorf("%+v, %v", news, err)
	}
}

// What is closed behind a look's back, and then its last name, which the look finds: the last name is not reported
// before.
func TestLookWhileSaved(t *testing.T) {
	dir := t.TempDir()
	o := options()
	isLast, late := o.Last, func() {}
	o.Last = func(p string) bool {
		if p == "latest" { // the walk is there: it has listed the folder
			late()
		}
		return isLast(p)
	}
	write(t, filepath.Join(dir, "latest"), "1")
	f, err := Open(dir, o)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if news, err := f.Next(t.Context()); err != nil || len(news) != 1 {
		t.Fatalf("%+v, %v", news, err)
	}
	late = func() {
		late = func() {}
		write(t, filepath.Join(dir, "step-2/w"), "2")
		write(t, filepath.Join(dir, "latest.tmp"), "2")
		if err := os.Rename(filepath.Join(dir, "latest.tmp"), filepath.Join(dir, "latest")); err != nil {
			t.Error(err)
		}
	}
	news, err := f.Look()
	if n := len(news); err != nil || n == 0 || news[n-1].Path != "latest" || news[n-1].State != Writing {
		t.Errorf("the look: %+v, %v", news, err)
	}
	var order []string
	for len(order) < 2 {
		news, err := f.Next(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range news {
			if n.State == Whole {
				order = append(order, n.Path)
			}
		}
	}
	if !slices.Equal(order, []string{"step-2/w", "latest"}) {
		t.Errorf("in this order: %v", order)
	}
}

func BenchmarkLook(b *testing.B) {
	dir := b.TempDir()
	for i := range 10_000 {
		if err := os.MkdirAll(filepath.Join(dir, fmt.Sprint(i/100)), 0o755); err != nil {
			b.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprint(i/100), fmt.Sprint(i)), []byte("a"), 0o644); err != nil {
			b.Fatal(err)
		}
	}
	f, err := Open(dir, options())
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	for b.Loop() {
		if _, err := f.Look(); err != nil {
			b.Fatal(err)
		}
	}
}

// The form of a file is not read again while its Print is what it was, also by an earlier process. The first Look tells
// how far it is.
func TestKnow(t *testing.T) {
	dir := t.TempDir()
	at := filepath.Join(dir, "a.safetensors")
	write(t, at, "torn")
	write(t, filepath.Join(dir, "b"), "")
	var looked []int
	o := options()
	o.Looked = func(files, of int) { looked = append(looked, files, of) }
	f, err := Open(dir, o)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	look := func(want State) Print {
		t.Helper()
		news, err := f.Look()
		i := slices.IndexFunc(news, func(n News) bool { return n.Path == "a.safetensors" })
		if err != nil || i < 0 || news[i].State != want {
			t.Fatalf("%+v, %v", news, err)
		}
		return news[i].Print
	}
	if _, err := f.Look(); err != nil || !slices.Equal(looked, []int{1, 2, 2, 2}) {
		t.Errorf("%v, %v", looked, err)
	}
	f.Know("a.safetensors", look(Torn))
	look(Whole)
	write(t, at, "torn again")
	look(Torn)
	write(t, at, tensors(`{"t":{"data_offsets":[0,4]}}`, 4))
	look(Whole)
}

// Another user's daemon counts in folders that only their owners write, also behind a link, which all may write.
func TestCheckSocket(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("makes another user's socket")
	}
	dir := t.TempDir()
	home := filepath.Join(dir, Home)
	link := filepath.Join(t.TempDir(), "link")
	if err := errors.Join(os.Mkdir(home, 0o755), os.WriteFile(filepath.Join(home, Socket), nil, 0o600),
		os.Symlink(dir, link)); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		mode         fs.FileMode
		around, home int
		counts       bool
	}{{0o755, 0, 12345, true}, {0o777, 0, 0, true}, {0o777, 12345, 12345, true}, {0o777, 0, 12345, false},
		{0o777, 12345, 54321, false}} {
		if err := errors.Join(os.Chmod(dir, c.mode), os.Chown(dir, c.around, -1),
			os.Chown(home, c.home, -1)); err != nil {
			t.Fatal(err)
		}
		for _, at := range []string{dir, link} {
			if err := CheckSocket(at); (err == nil) != c.counts {
				t.Errorf("%s: %+v: %v", at, c, err)
			}
		}
	}
	if err := CheckSocket(home); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
}

// What Look has said, and Next has not yet, Next says again when it has changed since.
func TestLookThenGone(t *testing.T) {
	dir := t.TempDir()
	f, err := Open(dir, options())
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	view := map[string]State{}
	look := func() {
		news, err := f.Look()
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range news {
			view[n.Path] = n.State
		}
	}
	until := func(p string) {
		write(t, filepath.Join(dir, p), p)
		for view[p] != Whole {
			news, err := f.Next(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			for _, n := range news {
				view[n.Path] = n.State
			}
		}
	}
	write(t, filepath.Join(dir, "a"), "a")
	look()
	if err := os.Remove(filepath.Join(dir, "a")); err != nil {
		t.Fatal(err)
	}
	until("b")
	w, err := os.OpenFile(filepath.Join(dir, "b"), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	look()
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	until("c")
	if view["a"] != Gone || view["b"] != Whole {
		t.Errorf("%v", view)
	}
}
