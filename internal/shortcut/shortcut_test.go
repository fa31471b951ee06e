package shortcut

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/segment"
	"github.com/shoalfs/shoal/internal/audit"
	"github.com/shoalfs/shoal/lab/rig/memstore"
)

// volume is a dataset with places made up: file i at i*64 of segment 1 + i%2, odd ones only.
type volume struct {
	m       atomic.Pointer[catalog.Manifest]
	dir     string
	mu      sync.Mutex
	opened  []int
	process uint32
	damaged atomic.Int64
}

func (v *volume) Damaged() int64 { return v.damaged.Load() }

func (v *volume) Manifest() *catalog.Manifest { return v.m.Load() }

func (v *volume) Place(_ *catalog.Manifest, file int, _ bool) (segment.Place, bool) {
	return segment.Place{Segment: 1, Salt: 77 * uint64(file%2), Off: int64(file) * 64}, file%2 == 1
}

func (v *volume) SegmentDir(*catalog.Manifest) string { return v.dir }

func (v *volume) Opened(_ *catalog.Manifest, file int, process uint32) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.opened, v.process = append(v.opened, file), process
}

func (v *volume) Released(*catalog.Manifest, int) {}

func build(t testing.TB, files int) *catalog.Manifest {
	t.Helper()
	var objects []objstore.Object
	for i := range files {
		objects = append(objects, objstore.Object{Key: fmt.Sprintf("c/%04d.jpg", i), Size: int64(i + 1), ETag: "e"})
	}
	m, err := catalog.Build(memstore.Listing(objects...), catalog.BuildOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func start(t testing.TB, files int) (*volume, *Server, func() *net.UnixConn) {
	t.Helper()
	v := &volume{dir: t.TempDir()}
	v.m.Store(build(t, files))
	s := New(v, func(p *audit.Peer) {
		if p.PID != os.Getpid() || *p.UID != os.Getuid() {
			t.Errorf("%+v", p)
		}
	})
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(v.dir, "sock")})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close(); _ = l.Close() })
	go func() {
		for {
			c, err := l.AcceptUnix()
			if err != nil {
				return
			}
			go func() { _ = s.Serve(c); _ = c.Close() }()
		}
	}()
	return v, s, func() *net.UnixConn {
		t.Helper()
		c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: filepath.Join(v.dir, "sock")})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		_ = c.SetDeadline(time.Now().Add(10 * time.Second))
		if kind, body := receive(t, c); kind != 'H' || version(body) != v.m.Load().Version()[:16] ||
			string(body[8:]) != v.dir {
			t.Fatalf("%q %x", kind, body)
		}
		return c
	}
}

func version(b []byte) string { return fmt.Sprintf("%016x", binary.LittleEndian.Uint64(b)) }

func receive(t testing.TB, c *net.UnixConn) (kind byte, body []byte) {
	t.Helper()
	head := make([]byte, 5)
	if _, err := io.ReadFull(c, head); err != nil {
		t.Fatal(err)
	}
	body = make([]byte, binary.LittleEndian.Uint32(head))
	if _, err := io.ReadFull(c, body); err != nil {
		t.Fatal(err)
	}
	return head[4], body
}

func request(kind byte, body []byte) []byte {
	return append(binary.LittleEndian.AppendUint32([]byte{kind}, uint32(len(body))), body...)
}

func question(number uint32, path string) []byte {
	return request('A', append(binary.LittleEndian.AppendUint32(nil, number), path...))
}

func send(t testing.TB, c *net.UnixConn, message []byte) {
	t.Helper()
	if _, err := c.Write(message); err != nil {
		t.Fatal(err)
	}
}

func TestPlaces(t *testing.T) {
	v, _, dial := start(t, near+44)
	c := dial()
	le, number := binary.LittleEndian, uint32(1<<32-3)
	for path, want := range map[string][2]int{"c/0007.jpg": {0, near}, "c/0299.jpg": {near, 44}, "c/0300.jpg": {0, 0},
		"c": {0, 0}, "": {0, 0}, "../x\x00": {0, 0}} {
		number++
		send(t, c, question(number, path))
		kind, body := receive(t, c)
		if kind != 'P' || le.Uint32(body) != number || version(body[4:]) != v.m.Load().Version()[:16] ||
			int(le.Uint32(body[12:])) != want[1] {
			t.Fatalf("%q: %q, %x", path, kind, body[:16])
		}
		body = body[12:]
		names := body[4+28*want[1]:]
		for i := range want[1] {
			e, file := body[4+28*i:], want[0]+i
			p, _ := v.Place(nil, file, false)
			name := fmt.Sprintf("c/%04d.jpg\x00", file)
			if int(le.Uint32(e)) != file || le.Uint32(e[4:]) != 1 || le.Uint64(e[8:]) != p.Salt ||
				le.Uint64(e[16:]) != uint64(p.Off) || int(le.Uint32(e[24:])) != file+1 ||
				string(names[:len(name)]) != name {
				t.Fatalf("%q: entry %d: %x, %q", path, i, e[:28], names[:len(name)])
			}
			names = names[len(name):]
		}
	}
	send(t, c, request('O', []byte{3, 0, 0, 0, 1, 0, 0, 0}))
	send(t, c, question(1, "")) // after it
	receive(t, c)
	if v.mu.Lock(); !slices.Equal(v.opened, []int{3, 1}) || v.process != uint32(os.Getpid()) {
		t.Errorf("opened %v by %d", v.opened, v.process)
	}
	v.mu.Unlock()
}

// ended reports whether the client of a connection sees that it has ended, whatever waits to be received.
func ended(t testing.TB, c *net.UnixConn) (end bool) {
	t.Helper()
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	_ = raw.Control(func(fd uintptr) {
		at := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
		n, err := unix.Poll(at, 0)
		end = err == nil && n == 1 && at[0].Revents&unix.POLLRDHUP != 0
	})
	return end
}

// When Moved and Close have returned, clients see it, also those with an answer that they have not received.
func TestEndIsSeen(t *testing.T) {
	v, s, dial := start(t, near)
	for _, end := range []func(){s.Moved, s.Moved, s.Close} {
		quiet, busy := dial(), dial()
		for range 20 {
			send(t, busy, question(1, "c/0001.jpg"))
		}
		v.m.Store(build(t, near+1))
		if end(); !ended(t, quiet) || !ended(t, busy) {
			t.Fatal("a client does not see the end")
		}
	}
	c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: filepath.Join(v.dir, "sock")})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, io.EOF) && !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("after Close: %v", err)
	}
}

// A client that knows places loses them with its next message after damage was found; one that comes later does not.
func TestDamageEndsConnections(t *testing.T) {
	v, _, dial := start(t, near)
	for range 2 {
		c := dial()
		send(t, c, question(1, "c/0001.jpg"))
		v.damaged.Add(1)
		send(t, c, question(2, "c/0001.jpg"))
		if _, err := io.Copy(io.Discard, c); err != nil && !errors.Is(err, unix.ECONNRESET) {
			t.Fatalf("the client keeps its places: %v", err)
		}
	}
}

// What is no message ends its own connection, and nothing else.
func TestHostileMessages(t *testing.T) {
	_, _, dial := start(t, 10)
	other := dial()
	for _, message := range [][]byte{{'X', 0, 0, 0, 0}, {'A', 255, 255, 255, 255}, request('O', []byte{1, 2, 3}),
		request('O', []byte{10, 0, 0, 0}), request('S', nil), request('A', []byte("abc")), {'A', 9}} {
		c := dial()
		if _, err := c.Write(message); err != nil {
			t.Fatal(err)
		}
		_ = c.CloseWrite()
		if n, err := c.Read(make([]byte, 1)); err == nil {
			t.Errorf("%q: %d bytes", message, n)
		}
	}
	send(t, other, question(1, "c/0001.jpg"))
	if kind, _ := receive(t, other); kind != 'P' {
		t.Errorf("%q", kind)
	}
}

// A client that reads nothing holds up neither a new version nor the end for long.
func TestClientThatIsStopped(t *testing.T) {
	defer func(d time.Duration) { patience = d }(patience)
	patience = 200 * time.Millisecond
	_, s, dial := start(t, near)
	c := dial()
	for range 200 {
		if _, err := c.Write(question(1, "c/0001.jpg")); err != nil {
			break
		}
	}
	time.Sleep(50 * time.Millisecond) // until the server waits for it
	begun := time.Now()
	s.Moved()
	s.Close()
	if took := time.Since(begun); took > 2*time.Second {
		t.Errorf("it took %v", took)
	}
}
