package fuseio

// The server runs in a child process (this test binary, started again): a process must not read its own mount.

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/lab/rig/uringswitch"
)

const (
	serveEnv = "FUSEIO_TEST_SERVE"
	devEnv   = "FUSEIO_TEST_DEV" // without rings
)

func TestMain(m *testing.M) {
	if what := os.Getenv(serveEnv); what != "" {
		if err := serve(what); err != nil {
			fmt.Println("error", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// serve mounts at os.Args[1] until the mount is gone, and checks that nothing is left.
func serve(what string) error {
	dir, from := os.Args[1], os.Args[2]
	mo := &fuse.MountOptions{FsName: "test", Name: "uring", DirectMountStrict: true, MaxWrite: 256 << 10}
	var raw fuse.RawFileSystem
	var o Options
	if what == "loopback" {
		root, err := fs.NewLoopbackRoot(from)
		if err != nil {
			return err
		}
		raw = fs.NewNodeFS(root, &fs.Options{})
	} else {
		tiny := &tinyFS{RawFileSystem: fuse.NewDefaultRawFileSystem(), notes: from, met: make(chan struct{})}
		raw, o.Quick = tiny, &quickFS{tinyFS: tiny}
		o.Inline = func(h *fuse.InHeader) bool { return true }
	}
	if trimAfter = 300 * time.Millisecond; os.Getenv(devEnv) == "" {
		o.Depth = 16
	}
	goroutines, files, maps := runtime.NumGoroutine(), open(), mapped()
	fd, err := Mount(dir, mo)
	if err != nil {
		return err
	}
	device := os.NewFile(uintptr(fd), "/dev/fuse")
	s, err := New(raw, device, nil, mo, o)
	if err != nil {
		return err
	}
	if what == "tiny" {
		var text []byte
		for _, l := range s.lanes {
			text = fmt.Appendln(text, uintptr(unsafe.Pointer(&l.memory[0])), len(l.memory))
		}
		if err := os.WriteFile(filepath.Join(from, lanesNote), text, 0o600); err != nil {
			return err
		}
	}
	fmt.Println("ready")
	s.Serve()
	if err := device.Close(); err != nil {
		return err
	}
	if rings, err := s.Rings(); err != nil || (rings.Threads > 0) != (o.Depth > 0) {
		return fmt.Errorf("rings: %v, %w", rings, err)
	}
	for range 100 { // threads end a moment after their goroutines
		if time.Sleep(10 * time.Millisecond); runtime.NumGoroutine() <= goroutines && open() <= files {
			break
		}
	}
	if n := runtime.NumGoroutine(); n > goroutines {
		return fmt.Errorf("%d goroutines are left of %d", n, goroutines)
	}
	if n := open(); n > files && what != "loopback" { // whose files wait for RELEASE, which the unmount may cut off
		return fmt.Errorf("%d descriptors are open, %d were", n, files)
	}
	if n := mapped(); n > maps {
		return fmt.Errorf("%d mappings of rings, %d were", n, maps)
	}
	fmt.Println("done")
	return nil
}

func open() int {
	list, _ := os.ReadDir("/proc/self/fd")
	return len(list)
}

func mapped() int {
	text, _ := os.ReadFile("/proc/self/maps")
	return bytes.Count(text, []byte("io_uring"))
}

// tinyFS has files NAME that hold their name's first byte 1 MiB long; those whose name begins with s wait for others.
type tinyFS struct {
	fuse.RawFileSystem
	notes string // a folder, where tests see what goes on here
	slow  atomic.Int32
	met   chan struct{} // closed once so many slow reads were there at a time
}

const together = 8

// Notes: where the lanes' memory lies, and a byte for each read that has begun to wait for its interrupt.
const lanesNote, waitingNote = "lanes", "waiting"

const tinySize = 300_000 // two READs

func tinyAttr(node uint64, a *fuse.Attr) {
	a.Ino, a.Mode, a.Nlink = node, syscall.S_IFREG|0o444, 1
	a.Size = tinySize
	if node == 1 {
		a.Mode = syscall.S_IFDIR | 0o755
	}
}

func (f *tinyFS) Lookup(_ <-chan struct{}, h *fuse.InHeader, name string, out *fuse.EntryOut) fuse.Status {
	out.NodeId = uint64(name[0]) + 1000
	tinyAttr(out.NodeId, &out.Attr)
	return fuse.OK
}

func (f *tinyFS) GetAttr(_ <-chan struct{}, in *fuse.GetAttrIn, out *fuse.AttrOut) fuse.Status {
	tinyAttr(in.NodeId, &out.Attr)
	return fuse.OK
}

func (f *tinyFS) Open(_ <-chan struct{}, in *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	out.OpenFlags = fuse.FOPEN_DIRECT_IO
	return fuse.OK
}

func (f *tinyFS) Read(cancel <-chan struct{}, in *fuse.ReadIn, buf []byte) (fuse.ReadResult, fuse.Status) {
	switch byte(in.NodeId - 1000) {
	case 's':
		if f.slow.Add(1) == together {
			close(f.met)
		}
		select {
		case <-f.met:
		case <-time.After(time.Minute):
			return nil, fuse.EIO
		}
		time.Sleep(50 * time.Millisecond) // a store takes its time
	case 'i':
		note, err := os.OpenFile(filepath.Join(f.notes, waitingNote), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
		if err == nil {
			_, err = note.WriteString("i")
			_ = note.Close()
		}
		if err != nil {
			return nil, fuse.ToStatus(err)
		}
		<-cancel
		return nil, fuse.EINTR
	}
	n := min(len(buf), max(0, tinySize-int(in.Offset)))
	copy(buf, bytes.Repeat([]byte{byte(in.NodeId - 1000)}, n))
	return fuse.ReadResultData(buf[:n]), fuse.OK
}

// quickFS is what can be answered at once.
type quickFS struct{ *tinyFS }

func (f *quickFS) Read(cancel <-chan struct{}, in *fuse.ReadIn, buf []byte) (fuse.ReadResult, fuse.Status) {
	if c := byte(in.NodeId - 1000); c == 's' || c == 'i' {
		return nil, WouldBlock
	}
	return f.tinyFS.Read(cancel, in, buf)
}

// start mounts and returns the mount point.
func start(t *testing.T, what, from string) (dir string, daemon *exec.Cmd) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("only root can mount directly")
	}
	if os.Getenv(devEnv) == "" {
		uringswitch.On(t)
		if err := Available(); err != nil {
			t.Skip(err)
		}
	}
	dir = t.TempDir()
	cmd := exec.Command(os.Args[0], dir, from)
	cmd.Env = append(os.Environ(), serveEnv+"="+what)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	if !lines.Scan() || lines.Text() != "ready" {
		t.Fatal(lines.Text())
	}
	t.Cleanup(func() {
		_ = unix.Unmount(dir, unix.MNT_DETACH)
		if cmd.ProcessState != nil {
			return
		}
		if !lines.Scan() || lines.Text() != "done" {
			t.Error(lines.Text())
		}
		if err := cmd.Wait(); err != nil {
			t.Error(err)
		}
	})
	return dir, cmd
}

// TestOverDevice runs all tests again, with all requests coming by /dev/fuse.
func TestOverDevice(t *testing.T) {
	if os.Getenv(devEnv) != "" {
		t.Skip("this is the second run")
	}
	cmd := exec.Command(os.Args[0], "-test.timeout=5m", "-test.v="+strconv.FormatBool(testing.Verbose()))
	cmd.Env = append(os.Environ(), devEnv+"=1")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

// TestKilledReaderHasPages: the kernel has a page to copy a request to, whatever happens to the process meanwhile.
func TestKilledReaderHasPages(t *testing.T) {
	s := &Server{payload: 256 << 10}
	var held [64][]byte
	for i := range held { // so many that not all can have been used before
		held[i] = s.input()
		var there [1]byte
		page := uintptr(unsafe.Pointer(&held[i][0])) &^ uintptr(os.Getpagesize()-1)
		if _, _, errno := unix.Syscall(unix.SYS_MINCORE, page, 1, uintptr(unsafe.Pointer(&there))); errno != 0 ||
			there[0]&1 == 0 {
			t.Fatal(i, errno, there)
		}
	}
	runtime.KeepAlive(held)
}

// TestBuffersAreAsAgreed: the limit of requests may be lower by now than when another process answered the first one.
func TestBuffersAreAsAgreed(t *testing.T) {
	agreed, first := 2*maxWrite(), fuse.InitIn{InHeader: fuse.InHeader{Opcode: 26}, Major: 7, Minor: 40}
	s, err := New(fuse.NewDefaultRawFileSystem(), os.Stdin, bytesOf(&first),
		&fuse.MountOptions{MaxWrite: agreed}, Options{})
	if err != nil || s.payload < agreed {
		t.Error(err, agreed)
	}
}

// TestReadersAreFew: many that come back from their answers at the same time do not all wait again, each with a buffer.
func TestReadersAreFew(t *testing.T) {
	var pipe [2]int
	s := &Server{payload: 1 << 20, gone: make(chan struct{}), log: log.New(io.Discard, "", 0)}
	if err := unix.Pipe2(pipe[:], unix.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	s.fd = pipe[0]
	const all = 300
	var left atomic.Int32
	for range all {
		s.wg.Go(func() { s.serveDevice(); left.Add(1) })
	}
	for deadline := time.Now().Add(time.Minute); int(left.Load()) != all-
		max(min(runtime.GOMAXPROCS(0), 16), 2); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%d of %d readers wait", s.waiting.Load(), all)
		}
	}
	_ = unix.Close(pipe[1])
	s.wg.Wait()
	_ = unix.Close(pipe[0])
}

// TestReadsAtOnceAndLater: reads that wait hold up no others; they wait for each other.
func TestReadsAtOnceAndLater(t *testing.T) {
	dir, _ := start(t, "tiny", t.TempDir())
	var wg sync.WaitGroup
	for i := range 64 {
		name := fmt.Sprint(string("hs"[i%2]), i)
		wg.Go(func() {
			text, err := os.ReadFile(filepath.Join(dir, name))
			if err != nil || !bytes.Equal(text, bytes.Repeat([]byte(name[:1]), tinySize)) {
				t.Errorf("%s: %d bytes, %v", name, len(text), err)
			}
		})
	}
	wg.Wait()
}

// TestMemoryIsGivenBack: an idle ring keeps no pages of its payloads. Which pages there are, is read from the page
// table: smaps shows a lane's memory in one mapping with whatever the kernel has merged it with, such as an arena of
// libc's malloc.
func TestMemoryIsGivenBack(t *testing.T) {
	if os.Getenv(devEnv) != "" {
		t.Skip("no rings")
	}
	notes := t.TempDir()
	dir, daemon := start(t, "tiny", notes)
	where, err := os.ReadFile(filepath.Join(notes, lanesNote))
	if err != nil {
		t.Fatal(err)
	}
	pages, err := os.Open(fmt.Sprintf("/proc/%d/pagemap", daemon.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	defer pages.Close()
	page := os.Getpagesize()
	resident := func() (kib int) {
		for lane := range strings.Lines(string(where)) {
			var at, size int
			if _, err := fmt.Sscan(lane, &at, &size); err != nil {
				t.Fatal(err)
			}
			words := make([]byte, 8*(size/page))
			if _, err := pages.ReadAt(words, int64(8*(at/page))); err != nil {
				t.Fatal(err)
			}
			for ; len(words) > 0; words = words[8:] {
				kib += int(words[7]>>7) * page >> 10 // the highest bit: present
			}
		}
		return kib
	}
	// The first requests may come by /dev/fuse, until the rings are ready, and a busy machine may be slower to look
	// than the ring to trim.
	used := 0
	for deadline := time.Now().Add(time.Minute); used < 512; used = resident() {
		if time.Now().After(deadline) {
			t.Fatalf("16 reads used only %d KiB", used)
		}
		var wg sync.WaitGroup
		for i := range 16 {
			wg.Go(func() { _, _ = os.ReadFile(filepath.Join(dir, fmt.Sprint("s", i))) })
		}
		wg.Wait()
	}
	for deadline := time.Now().Add(time.Minute); resident() > used/4; time.Sleep(50 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%d KiB of %d are still there", resident(), used)
		}
	}
	if text, err := os.ReadFile(filepath.Join(dir, "again")); err != nil || len(text) != tinySize || text[0] != 'a' {
		t.Errorf("%d bytes, %v", len(text), err)
	}
}

// waiting returns how many reads have begun to wait for an interrupt.
func waiting(notes string) int {
	text, _ := os.ReadFile(filepath.Join(notes, waitingNote))
	return len(text)
}

func waitFor(t *testing.T, notes string, n int) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); waiting(notes) < n; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%d reads wait, want %d", waiting(notes), n)
		}
	}
}

// TestInterrupt kills a reader whose request only ends by an interrupt, which may come before the request.
func TestInterrupt(t *testing.T) {
	notes := t.TempDir()
	dir, _ := start(t, "tiny", notes)
	for i := range 20 {
		before := waiting(notes)
		reader := exec.Command("cat", filepath.Join(dir, "interrupted"))
		if err := reader.Start(); err != nil {
			t.Fatal(err)
		}
		if i%4 > 0 {
			waitFor(t, notes, before+1)
		}
		_ = reader.Process.Kill()
		done := make(chan error, 1)
		go func() { done <- reader.Wait() }()
		select {
		case <-done:
		case <-time.After(10 * time.Second):
			t.Fatal("the reader does not die")
		}
	}
}

// TestAbort ends the mount while requests wait.
func TestAbort(t *testing.T) {
	notes := t.TempDir()
	dir, _ := start(t, "tiny", notes)
	for i := range 8 {
		reader := exec.Command("cat", filepath.Join(dir, fmt.Sprint("i", i)))
		if err := reader.Start(); err != nil {
			t.Fatal(err)
		}
		defer func() {
			if err := reader.Wait(); err == nil {
				t.Error("a reader got something")
			}
		}()
	}
	waitFor(t, notes, 8)
	_ = unix.Unmount(dir, unix.MNT_FORCE)
}

// TestKilled: the mount of a killed server is dead, and its readers get an error.
func TestKilled(t *testing.T) {
	notes := t.TempDir()
	dir, daemon := start(t, "tiny", notes)
	reader := exec.Command("cat", filepath.Join(dir, "i"))
	if err := reader.Start(); err != nil {
		t.Fatal(err)
	}
	waitFor(t, notes, 1)
	_ = daemon.Process.Kill()
	_ = daemon.Wait()
	if err := reader.Wait(); err == nil {
		t.Error("the reader got something")
	}
	if _, err := os.Stat(filepath.Join(dir, "x")); !errors.Is(err, syscall.ENOTCONN) &&
		!errors.Is(err, syscall.ECONNABORTED) {
		t.Error(err)
	}
}

// TestEveryOperation lets the shell work in a mount of a folder: each operation's header has its own size.
func TestEveryOperation(t *testing.T) {
	from := t.TempDir()
	dir, _ := start(t, "loopback", from)
	script := `set -e
cd "$0"
mkdir -p a/b; echo one > a/one; ln a/one a/two; ln -s one a/link; test "$(readlink a/link)" = one
mv a/two a/b/three; mkfifo a/fifo; chmod 600 a/one; touch -d @1000 a/one; test "$(stat -c %Y a/one)" = 1000
truncate -s 10 a/one; test "$(stat -c %s a/one)" = 10; fallocate -l 20000 a/space
dd if=/dev/urandom of=data bs=1M count=5 status=none; cp data copy; cmp data copy; cat data copy > both; test "$(stat -c %s both)" = 10485760
ls -la a >/dev/null; find . >/dev/null; df . >/dev/null; rm a/b/three; rmdir a/b
for i in $(seq 300); do echo $i > a/file$i; done; test "$(ls a | grep -c file)" = 300
sync data; exec 3>>a/one; flock 3; echo more >&3; rm -r a`
	if out, err := exec.Command("bash", "-c", script, dir).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	file := filepath.Join(dir, "copy")
	long := strings.Repeat("v", 200)
	if err := unix.Setxattr(file, "user.name", []byte(long), 0); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, 300)
	if n, err := unix.Getxattr(file, "user.name", got); err != nil || string(got[:n]) != long {
		t.Errorf("%q, %v", got[:max(n, 0)], err)
	}
	if n, err := unix.Listxattr(file, got); err != nil || string(got[:n]) != "user.name\x00" {
		t.Errorf("%q, %v", got[:max(n, 0)], err)
	}
	if err := unix.Removexattr(file, "user.name"); err != nil {
		t.Error(err)
	}
	fd, err := unix.Open(file, unix.O_RDONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if off, err := unix.Seek(fd, 0, unix.SEEK_END); err != nil || off != 5<<20 {
		t.Error(off, err)
	}
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), 2<<30|4096<<16,
		uintptr(unsafe.Pointer(new([4096]byte)))); errno != unix.ENOTTY {
		t.Error("an ioctl that asks for a page:", errno)
	}
	if err := unix.Renameat2(unix.AT_FDCWD, dir+"/data", unix.AT_FDCWD, dir+"/both", unix.RENAME_EXCHANGE); err != nil {
		t.Error(err)
	}
	if text, err := os.ReadFile(filepath.Join(from, "data")); err != nil || len(text) != 10<<20 {
		t.Error(len(text), err)
	}
}

func TestCountCPUs(t *testing.T) {
	for list, want := range map[string]int{"0": 1, "0-1": 2, "0-3,8,10-11": 7} {
		if n, err := countCPUs(list); err != nil || n != want {
			t.Errorf("%s: %d, %v", list, n, err)
		}
	}
	if _, err := countCPUs("0-x"); err == nil {
		t.Error("nonsense was counted")
	}
}

// A helper that passes nothing is not waited for, and the error has what one that fails says: with --daemon its
// standard error would be the log.
func TestFusermountFails(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("PATH", dir)
	for does, want := range map[string]string{
		"": "passed no descriptor", "echo it is not yours >&2; exit 1": ": it is not yours",
	} {
		path := filepath.Join(dir, "fusermount3")
		if err := os.WriteFile(path, []byte("#!/bin/sh\n"+does), 0o700); err != nil { //nolint:gosec // a program
			t.Fatal(err)
		}
		if fd, err := Mount(dir, &fuse.MountOptions{}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %d, %v", does, fd, err)
		}
	}
}
