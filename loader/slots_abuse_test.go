package loader_test

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/shoalfs/shoal/loader"
	"github.com/shoalfs/shoal/loader/feedclient"
	"github.com/shoalfs/shoal/loader/feedpb"
)

// plain opens a stream as protobuf has it, without the client's care.
func plain(t *testing.T, addr string, o *feedpb.Open) (
	grpc.BidiStreamingClient[feedpb.ClientMessage, feedpb.ServerMessage], *feedpb.Opened) {
	t.Helper()
	conn, err := grpc.NewClient(addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	s, err := feedpb.NewFeedClient(conn).Stream(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Send(&feedpb.ClientMessage{Kind: &feedpb.ClientMessage_Open{Open: o}}); err != nil {
		t.Fatal(err)
	}
	m, err := s.Recv()
	if err != nil {
		t.Fatal(err)
	}
	return s, m.GetOpened()
}

func release(slots ...uint32) *feedpb.ClientMessage {
	return &feedpb.ClientMessage{Kind: &feedpb.ClientMessage_Release{Release: &feedpb.Release{Slots: slots}}}
}

// handover asks for a pool and returns the connection and the server's answer.
func handover(t *testing.T, addr, key string) (net.Conn, map[string]any) {
	t.Helper()
	return ask(t, addr, map[string]any{"v": 1, "key": key})
}

func ask(t *testing.T, addr string, request map[string]any) (net.Conn, map[string]any) {
	t.Helper()
	c := dialSocket(t, addr)
	text, err := json.Marshal(request)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Write(append(binary.LittleEndian.AppendUint32([]byte("SHOALFD1"), uint32(len(text))),
		text...)); err != nil {
		t.Fatal(err)
	}
	var size [4]byte
	if _, err := io.ReadFull(c, size[:]); err != nil { // the descriptor is closed by the kernel
		t.Fatal(err)
	}
	reply := make([]byte, binary.LittleEndian.Uint32(size[:]))
	if _, err := io.ReadFull(c, reply); err != nil {
		t.Fatal(err)
	}
	var answer map[string]any
	if err := json.Unmarshal(reply, &answer); err != nil {
		t.Fatal(err)
	}
	return c, answer
}

func dialSocket(t *testing.T, addr string) net.Conn {
	t.Helper()
	c, err := net.Dial("unix", strings.TrimPrefix(addr, "unix://"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// A slot that the client does not hold cannot be given back.
func TestWrongRelease(t *testing.T) {
	r := start(t, &testDataset{Samples: 100}, loader.Options{}, 0)
	for name, wrong := range map[string]func(got uint32) []*feedpb.ClientMessage{
		"never had": func(got uint32) []*feedpb.ClientMessage { return []*feedpb.ClientMessage{release(got%3 + 1)} },
		"none":      func(uint32) []*feedpb.ClientMessage { return []*feedpb.ClientMessage{release(0)} },
		"beyond":    func(uint32) []*feedpb.ClientMessage { return []*feedpb.ClientMessage{release(1 << 31)} },
		"twice": func(got uint32) []*feedpb.ClientMessage {
			return []*feedpb.ClientMessage{release(got), release(got)}
		},
		"together": func(got uint32) []*feedpb.ClientMessage { return []*feedpb.ClientMessage{release(got, got)} },
	} {
		t.Run(name, func(t *testing.T) {
			s, opened := plain(t, r.addr, &feedpb.Open{Batch: 4, Slots: 3, Credits: 1, Transform: "ramp(4,4)"})
			handover(t, r.addr, opened.GetPool().GetKey())
			m, err := s.Recv()
			if err != nil || m.GetBatch().GetSlot() == 0 {
				t.Fatalf("got %v, %v", m, err)
			}
			for _, w := range wrong(m.GetBatch().GetSlot()) {
				if err := s.Send(w); err != nil && !errors.Is(err, io.EOF) {
					t.Fatal(err)
				}
			}
			for err == nil {
				_, err = s.Recv()
			}
			if loader.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), "release a slot once") {
				t.Errorf("got %v", err)
			}
		})
	}
	s, opened := plain(t, r.addr, &feedpb.Open{Batch: 4})
	if opened.GetPool() != nil {
		t.Fatal("a pool that was not asked for")
	}
	if err := s.Send(release(1)); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Recv(); loader.Code(err) != codes.InvalidArgument ||
		!strings.Contains(err.Error(), "without slots") {
		t.Errorf("got %v", err)
	}
}

// No handover but the right one, once, gets a descriptor, and no peer keeps others waiting.
func TestHandovers(t *testing.T) {
	r := start(t, &testDataset{Samples: 100}, loader.Options{}, 0)
	silent := make([]net.Conn, 20)
	for i := range silent {
		silent[i] = dialSocket(t, r.addr)
		if i%2 == 0 { // a part of the magic
			if _, err := silent[i].Write([]byte("SHOALFD1\x20\x00\x00\x00{")[:1+i%13]); err != nil {
				t.Fatal(err)
			}
		}
	}
	s, opened := plain(t, r.addr, &feedpb.Open{Batch: 4, Slots: 3, Credits: 1, Transform: "ramp(4,4)"})
	if _, answer := handover(t, r.addr, "0123456789abcdef0123456789abcdef"); !strings.Contains(
		fmt.Sprint(answer["error"]), "no open session") {
		t.Errorf("a wrong key: %v", answer)
	}
	pool := opened.GetPool()
	c, answer := handover(t, r.addr, pool.GetKey())
	if answer["error"] != nil || answer["slots"] != float64(pool.GetSlots()) ||
		answer["slot_bytes"] != float64(pool.GetSlotBytes()) || pool.GetSlots() != 3 {
		t.Fatalf("got %v for %v", answer, pool)
	}
	if _, answer := handover(t, r.addr, pool.GetKey()); !strings.Contains(fmt.Sprint(answer["error"]), "used before") {
		t.Errorf("twice: %v", answer)
	}
	for _, garbage := range []string{"SHOALFD2aaaaaaaaaaaaaaa", "SHOALFD1\xff\xff\xff\xff{}",
		"SHOALFD1\x02\x00\x00\x00[]", "SHOALFD1\x04\x00\x00\x00\xff\xfe\xfd\xfc",
		"SHOALFD1\x0b\x00\x00\x00" + `{"v":2}    `, "S" + strings.Repeat("x", 100_000), "GET / HTTP/1.1\r\n\r\n",
		"\x16\x03\x01\x00\x00"} {
		c := dialSocket(t, r.addr)
		_, _ = io.WriteString(c, garbage) // the server may have closed it before the end
		_ = c.(*net.UnixConn).CloseWrite()
		_ = c.SetReadDeadline(time.Now().Add(time.Minute))
		reply, _ := io.ReadAll(c)
		if bytes.Contains(reply, []byte("slot_bytes")) {
			t.Errorf("%q got %q", garbage[:10], reply)
		}
	}
	if m, err := s.Recv(); err != nil || m.GetBatch() == nil {
		t.Fatalf("after all that: %v, %v", m, err)
	}
	// The end of the connection is the end of the lease.
	c.Close()
	var err error
	for err == nil {
		_, err = s.Recv()
	}
	if loader.Code(err) != codes.Unavailable {
		t.Errorf("without its lease the session ended with %v", err)
	}
	if _, answer := handover(t, r.addr, pool.GetKey()); !strings.Contains(fmt.Sprint(answer["error"]),
		"no open session") {
		t.Errorf("the key of a session that is over: %v", answer)
	}
	for _, c := range silent {
		c.Close()
	}
}

// memfds counts this process's slots: descriptors, and mappings whatever their descriptors. Tests that
// do not release their batches have left some.
func memfds(t *testing.T) (n int) {
	t.Helper()
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, fd := range fds {
		if target, err := os.Readlink("/proc/self/fd/" + fd.Name()); err == nil &&
			strings.Contains(target, "shoal-slots") {
			n++
		}
	}
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	return n + strings.Count(string(maps), "shoal-slots")
}

func TestHelperClient(t *testing.T) {
	addr := os.Getenv("SHOAL_TEST_FEED")
	if addr == "" {
		t.Skip("the process of TestKilledClient")
	}
	c, err := feedclient.Dial(addr, feedclient.Security{})
	if err != nil {
		t.Fatal(err)
	}
	c.Transport = feedclient.Slots
	s, err := c.Open(t.Context(),
		&feedpb.Open{Batch: 16, Transform: "ramp(32,32)", Tail: "uneven", Credits: 2, Slots: 5,
			Readonly: os.Getenv("SHOAL_TEST_READONLY") != ""})
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if _, err := s.Next(); err != nil {
			t.Fatal(err)
		}
	}
	fmt.Println("holding")
	select {}
}

// killed runs a client in a process of its own and kills it while it holds slots.
func killed(t *testing.T, addr string, env ...string) {
	t.Helper()
	c := exec.Command(os.Args[0], "-test.run=^TestHelperClient$", "-test.v")
	c.Env = append(append(os.Environ(), "SHOAL_TEST_FEED="+addr), env...)
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	held := false
	for !held && lines.Scan() {
		held = strings.Contains(lines.Text(), "holding")
	}
	if err := c.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = c.Wait() // it was killed
	if !held {
		t.Fatal("the client never held a batch")
	}
}

// A client that is killed leaves nothing: no memory, no descriptor, no reservation.
func TestKilledClient(t *testing.T) {
	before := memfds(t)
	r := start(t, &testDataset{Samples: 1000}, loader.Options{}, 0)
	for range 3 {
		killed(t, r.addr)
		r.empty(t)
	}
	if n := memfds(t) - before; n != 0 {
		t.Errorf("%d descriptors and mappings of slots are left", n)
	}
	if st := r.server.Stats(); st.Failed != 0 {
		t.Errorf("%d sessions failed", st.Failed)
	}
}

// A client that is killed gives back what it held to those that share its pass.
func TestKilledFollower(t *testing.T) {
	r := start(t, &testDataset{Samples: 2000}, loader.Options{}, 0)
	r.client.Transport = feedclient.Slots
	s := r.open(t, &feedpb.Open{Batch: 16, Transform: "ramp(32,32)", Credits: 2, Slots: 5, Readonly: true, Epochs: 1,
		Tail: "uneven"})
	killed(t, r.addr, "SHOAL_TEST_READONLY=1")
	if ids := drain(t, s); len(ids) != 2000 {
		t.Errorf("%d samples", len(ids))
	}
	st := r.server.Stats()
	if st.Total.Shared == 0 || st.Total.InSlots != st.Total.Batches {
		t.Errorf("%d of %d batches in slots, %d shared", st.Total.InSlots, st.Total.Batches, st.Total.Shared)
	}
	s.Close()
	r.empty(t)
}

// A server that ends while slots are held lets go of them; the client's batches stay as they are.
func TestServerEndsWithSlotsHeld(t *testing.T) {
	before := memfds(t)
	r, stop := serve(t, filepath.Join(t.TempDir(), "feed.sock"), &testDataset{Samples: 1000}, loader.Options{}, 0)
	r.client.Transport = feedclient.Slots
	s := r.open(t, &feedpb.Open{Batch: 16, Transform: "ramp(32,32)", Slots: 6})
	var kept []*feedclient.Batch
	var was [][]byte
	for range 3 {
		b, err := s.Next()
		if err != nil {
			t.Fatal(err)
		}
		kept, was = append(kept, b), append(was, bytes.Clone(b.Bytes()))
	}
	r.server.Close()
	if n := memfds(t) - before; n != 1 {
		t.Errorf("%d descriptors and mappings, of which the client's mapping is one", n)
	}
	for i, b := range kept {
		if !bytes.Equal(b.Bytes(), was[i]) {
			t.Errorf("batch %d changed", i)
		}
		b.Release()
	}
	s.Close()
	if n := memfds(t) - before; n != 0 {
		t.Errorf("%d descriptors and mappings are left", n)
	}
	stop()
}
