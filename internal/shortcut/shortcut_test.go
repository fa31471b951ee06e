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
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/objstore/objstoretest"
	"github.com/shoalfs/shoal/cache/segment"
)

// volume is a dataset with places made up: file i at i*64 of segment 1 + i%2, odd ones only.
type volume struct {
	m       *catalog.Manifest
	dir     string
	mu      sync.Mutex
	opened  []int
	process uint32
}

func (v *volume) Manifest() *catalog.Manifest { return v.m }

func (v *volume) Place(_ *catalog.Manifest, file int, _ bool) (segment.Place, bool) {
	return segment.Place{Segment: 1, Salt: 77 * uint64(file%2), Off: int64(file) * 64}, file%2 == 1
}

func (v *volume) OpenSegment(_ *catalog.Manifest, p segment.Place) (*os.File, error) {
	if p.Salt != 77 {
		return nil, segment.ErrGone
	}
	return os.Open(filepath.Join(v.dir, "segment"))
}

func (v *volume) Opened(_ *catalog.Manifest, file int, process uint32) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.opened, v.process = append(v.opened, file), process
}

func (v *volume) Released(*catalog.Manifest, int) {}

func start(t testing.TB, files int) (*volume, *Server, func() *net.UnixConn) {
	t.Helper()
	v := &volume{dir: t.TempDir()}
	if err := os.WriteFile(filepath.Join(v.dir, "segment"), []byte("its bytes"), 0o600); err != nil {
		t.Fatal(err)
	}
	var objects []objstore.Object
	for i := range files {
		objects = append(objects, objstore.Object{Key: fmt.Sprintf("c/%04d.jpg", i), Size: int64(i + 1), ETag: "e"})
	}
	m, err := catalog.Build(objstoretest.Listing(objects...), catalog.BuildOptions{})
	if err != nil {
		t.Fatal(err)
	}
	v.m = m
	s := New(v, func(p unix.Ucred) {
		if int(p.Pid) != os.Getpid() || int(p.Uid) != os.Getuid() {
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
		if kind, body, _ := receive(t, c); kind != 'H' || len(body) != 8 {
			t.Fatalf("%q %x", kind, body)
		}
		return c
	}
}

func receive(t testing.TB, c *net.UnixConn) (kind byte, body []byte, files []int) {
	t.Helper()
	head, oob := make([]byte, 5), make([]byte, unix.CmsgSpace(16))
	n, oobn, _, _, err := c.ReadMsgUnix(head, oob)
	if err == nil && n < 5 {
		_, err = io.ReadFull(c, head[max(n, 1):])
	}
	if err != nil {
		t.Fatal(err)
	}
	messages, _ := unix.ParseSocketControlMessage(oob[:oobn])
	for i := range messages {
		rights, _ := unix.ParseUnixRights(&messages[i])
		files = append(files, rights...)
	}
	body = make([]byte, binary.LittleEndian.Uint32(head))
	if _, err := io.ReadFull(c, body); err != nil {
		t.Fatal(err)
	}
	return head[4], body, files
}

func request(kind byte, body []byte) []byte {
	return append(binary.LittleEndian.AppendUint32([]byte{kind}, uint32(len(body))), body...)
}

func ask(t testing.TB, c *net.UnixConn, kind byte, body []byte) (byte, []byte, []int) {
	t.Helper()
	if _, err := c.Write(request(kind, body)); err != nil {
		t.Fatal(err)
	}
	return receive(t, c)
}

func TestPlaces(t *testing.T) {
	v, s, dial := start(t, near+44)
	c := dial()
	le := binary.LittleEndian
	for path, want := range map[string][2]int{"c/0007.jpg": {0, near}, "c/0299.jpg": {near, 44}, "c/0300.jpg": {0, 0}, "c": {0, 0}, "": {0, 0}, "../x\x00": {0, 0}} {
		kind, body, _ := ask(t, c, 'A', []byte(path))
		if kind != 'P' || int(le.Uint32(body)) != want[1] {
			t.Fatalf("%q: %q, %d files", path, kind, le.Uint32(body))
		}
		names := body[4+28*want[1]:]
		for i := range want[1] {
			e, file := body[4+28*i:], want[0]+i
			p, _ := v.Place(v.m, file, false)
			name := fmt.Sprintf("c/%04d.jpg\x00", file)
			if int(le.Uint32(e)) != file || le.Uint32(e[4:]) != 1 || le.Uint64(e[8:]) != p.Salt || le.Uint64(e[16:]) != uint64(p.Off) || int(le.Uint32(e[24:])) != file+1 || string(names[:len(name)]) != name {
				t.Fatalf("%q: entry %d: %x, %q", path, i, e[:28], names[:len(name)])
			}
			names = names[len(name):]
		}
	}
	segmentOf := func(salt uint64) []byte { return le.AppendUint64(le.AppendUint32(nil, 1), salt) }
	if kind, body, files := ask(t, c, 'S', segmentOf(5)); kind != 'F' || body[0] != 0 || len(files) != 0 {
		t.Errorf("a segment that was dropped: %q %x %v", kind, body, files)
	}
	kind, body, files := ask(t, c, 'S', segmentOf(77))
	if kind != 'F' || body[0] != 1 || len(files) != 1 {
		t.Fatalf("%q %x %v", kind, body, files)
	}
	f := os.NewFile(uintptr(files[0]), "")
	defer f.Close()
	if data, err := io.ReadAll(f); err != nil || string(data) != "its bytes" {
		t.Errorf("%q, %v", data, err)
	}
	if _, err := f.WriteAt([]byte("x"), 0); !errors.Is(err, unix.EBADF) {
		t.Errorf("a client can write to the cache: %v", err)
	}
	_, _ = c.Write(request('O', []byte{3, 0, 0, 0, 1, 0, 0, 0}))
	ask(t, c, 'A', nil) // after it
	if v.mu.Lock(); !slices.Equal(v.opened, []int{3, 1}) || v.process != uint32(os.Getpid()) {
		t.Errorf("opened %v by %d", v.opened, v.process)
	}
	v.mu.Unlock()
	s.Moved()
	if kind, body, _ := receive(t, c); kind != 'I' || le.Uint64(body) != 1 {
		t.Errorf("%q %x", kind, body)
	}
	s.Close()
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, io.EOF) && !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("after Close: %v", err)
	}
}

// What is no message ends its own connection, and nothing else.
func TestHostileMessages(t *testing.T) {
	_, _, dial := start(t, 10)
	other := dial()
	for _, message := range [][]byte{{'X', 0, 0, 0, 0}, {'A', 255, 255, 255, 255}, request('O', []byte{1, 2, 3}), request('O', []byte{10, 0, 0, 0}), request('S', nil), {'A', 9}} {
		c := dial()
		if _, err := c.Write(message); err != nil {
			t.Fatal(err)
		}
		_ = c.CloseWrite()
		if n, err := c.Read(make([]byte, 1)); err == nil {
			t.Errorf("%q: %d bytes", message, n)
		}
	}
	if kind, _, _ := ask(t, other, 'A', []byte("c/0001.jpg")); kind != 'P' {
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
		if _, err := c.Write(request('A', []byte("c/0001.jpg"))); err != nil {
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
