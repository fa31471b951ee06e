package daemon

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/internal/handover"
)

// keeperAt starts a keeper, and waits until it listens.
func keeperAt(t *testing.T, address string) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- ServeKeeper(ctx, address) }()
	for {
		if c, err := net.Dial("unix", address[len("unix://"):]); err == nil {
			_ = c.Close()
			break
		}
		select {
		case err := <-ended:
			t.Fatal(err)
		default:
		}
	}
	return func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
}

// asClient is a process that keeps pipes' ends by name.
type asClient struct {
	*net.UnixConn
	left []*keepsake
}

func (c asClient) names() (names []string) {
	for _, k := range c.left {
		names = append(names, k.Name)
	}
	slices.Sort(names)
	return names
}

func newClient(t *testing.T, address, name string) asClient {
	t.Helper()
	c, left, wait, err := connect(address, name)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	if wait <= 0 || wait > letGoPod {
		t.Errorf("what was kept is let go in %v", wait)
	}
	return asClient{c, left}
}

// keep gives a pipe's end, and returns the other, which ends when nobody has that.
func (c asClient) keep(t *testing.T, name, id string) (other *os.File) {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := handover.WriteReply(c.UnixConn, &keepsake{ID: id, Name: name}, int(w.Fd()), int(w.Fd())); err != nil {
		t.Fatal(err)
	}
	_ = w.Close()
	t.Cleanup(func() { _ = r.Close() })
	return r
}

func TestKeeper(t *testing.T) {
	address := "unix://" + filepath.Join(t.TempDir(), "keeper.sock")
	stop := keeperAt(t, address)
	a, b := newClient(t, address, "a"), newClient(t, address, "b")
	if len(a.left)+len(b.left) > 0 {
		t.Fatalf("%v, %v", a.left, b.left)
	}
	first, again, dropped := a.keep(t, "/x", "1"), a.keep(t, "/x", "2"), a.keep(t, "/y", "3")
	b.keep(t, "/z", "4")
	if err := handover.WriteReply(a.UnixConn, &keepsake{ID: "3", Name: "/y"}); err != nil { // takes it back
		t.Fatal(err)
	}
	for _, ended := range []*os.File{first, dropped} { // of two with one name the last is kept
		if _, err := ended.Read(make([]byte, 1)); err == nil {
			t.Error("it is still held")
		}
	}
	_ = a.Close()
	next := newClient(t, address, "a") // waits for the end of the one before it
	if names := next.names(); !slices.Equal(names, []string{"/x"}) || len(next.left[0].files) != 2 {
		t.Fatalf("left: %s", names)
	}
	next.left[0].close()
	if _, err := ended(again); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the keeper has let go what a client only looked at: %v", err)
	}
	_ = b.Close()
	if names := newClient(t, address, "b").names(); !slices.Equal(names, []string{"/z"}) {
		t.Errorf("left by b: %s", names)
	}
	if err := ServeKeeper(t.Context(), address); err == nil {
		t.Error("two keepers listen at one address")
	}
	file := filepath.Join(t.TempDir(), "notes")
	if err := os.WriteFile(file, []byte("mine"), 0o600); err != nil {
		t.Fatal(err)
	}
	over, cancel := context.WithCancel(t.Context())
	cancel()
	if err := ServeKeeper(over, "unix://"+file); err == nil {
		t.Error("a keeper listens in place of a file")
	}
	if _, err := os.ReadFile(file); err != nil {
		t.Errorf("the file is gone: %v", err)
	}
	stop()
}

// ended looks whether the other ends of a pipe are closed.
func ended(r *os.File) (int, error) {
	_ = r.SetReadDeadline(time.Now().Add(10 * time.Millisecond))
	return r.Read(make([]byte, 1))
}

// A process whose keeper has ended is not replaced: its mounts would end with it.
func TestRenewWithoutTheKeeper(t *testing.T) {
	own.away = true
	defer func() { own.away = false }()
	if err := Renew(Again{}); err == nil || !strings.Contains(err.Error(), KeeperEnv) {
		t.Error(err)
	}
}

// Who sends nonsense is not served, and harms nobody.
func TestKeeperHostile(t *testing.T) {
	address := "unix://" + filepath.Join(t.TempDir(), "keeper.sock")
	defer keeperAt(t, address)()
	good := newClient(t, address, "a")
	other := good.keep(t, "/x", "1")
	for _, text := range []string{"", "\xff\xff\xff\xff", "\x02\x00\x00\x00{}", "\x05\x00\x00\x00hello",
		"GET / HTTP/1.1\r\n\r\n"} {
		c, err := net.Dial("unix", address[len("unix://"):])
		if err != nil {
			t.Fatal(err)
		}
		_, _ = c.Write([]byte(text))
		_ = c.(*net.UnixConn).CloseWrite()
		if _, err := c.Read(make([]byte, 1)); err == nil {
			t.Errorf("%q is answered", text)
		}
		_ = c.Close()
	}
	_ = good.Close()
	if names := newClient(t, address, "a").names(); !slices.Equal(names, []string{"/x"}) {
		t.Errorf("left: %s", names)
	}
	if _, err := ended(other); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("it was let go: %v", err)
	}
	var at unix.Stat_t
	if err := unix.Stat(address[len("unix://"):], &at); err != nil || at.Mode&0o777 != 0o600 {
		t.Errorf("mode %o, %v", at.Mode, err)
	}
}
