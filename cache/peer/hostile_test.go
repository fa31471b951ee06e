package peer

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/lab/rig/synced"
)

// hostile is a peer that answers as a test says.
type hostile struct {
	l    net.Listener
	quit chan struct{}
	wg   sync.WaitGroup
	head atomic.Pointer[string] // its answer to the upgrade; "": none
	asks atomic.Int64           // requests
	// answer writes to a request of the pieces that were asked for; false ends the connection.
	answer func(c *hostileConn, r Request, pieces []asked) bool
}

type hostileConn struct {
	net.Conn
	h *hostile
}

const goodHead = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: " + upgradeTo + "\r\n" +
	nodeHeader + ": node-b\r\n\r\n"

func newHostile(t testing.TB, answer func(c *hostileConn, r Request, pieces []asked) bool) *hostile {
	h := &hostile{l: listen(t), quit: make(chan struct{}), answer: answer}
	h.say(goodHead)
	h.wg.Go(func() {
		for {
			c, err := h.l.Accept()
			if err != nil {
				return
			}
			h.wg.Go(func() { h.serve(&hostileConn{c, h}) })
		}
	})
	t.Cleanup(func() {
		close(h.quit)
		_ = h.l.Close()
		h.wg.Wait()
	})
	return h
}

func (h *hostile) say(head string) { h.head.Store(&head) }

func (h *hostile) serve(c *hostileConn) {
	defer func() { _ = c.Close() }()
	stop := make(chan struct{})
	defer close(stop)
	h.wg.Go(func() {
		select {
		case <-h.quit:
		case <-stop:
		}
		_ = c.SetDeadline(time.Unix(1, 0))
	})
	in := bufio.NewReader(c)
	if _, err := http.ReadRequest(in); err != nil {
		return
	}
	head := *h.head.Load()
	if head == "" {
		<-h.quit
		return
	}
	if _, err := io.WriteString(c, head); err != nil || head != goodHead {
		return
	}
	for {
		var length [4]byte
		if _, err := io.ReadFull(in, length[:]); err != nil {
			return
		}
		b := make([]byte, binary.LittleEndian.Uint32(length[:]))
		if _, err := io.ReadFull(in, b); err != nil {
			return
		}
		r, pieces, err := parseRequest(b, nil)
		h.asks.Add(1)
		if err != nil || !h.answer(c, r, pieces) {
			return
		}
	}
}

// sleep reports whether the test still runs.
func (c *hostileConn) sleep(d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-c.h.quit:
		return false
	}
}

func (c *hostileConn) say(b ...[]byte) bool {
	_, err := c.Write(bytes.Join(b, nil))
	return err == nil
}

// trickle writes one byte at a time.
func (c *hostileConn) trickle(every time.Duration, b ...[]byte) bool {
	for _, x := range bytes.Join(b, nil) {
		if !c.say([]byte{x}) || !c.sleep(every) {
			return false
		}
	}
	return true
}

// data returns a right answer for a piece.
func data(r Request, i int, p asked) []byte {
	bytes := noise[1000*p.file:][p.off:][:p.n]
	b := appendFrame(nil, frame{kind: frameData, piece: i, n: p.n, request: r.number})
	return append(appendSums(b, bytes), bytes...)
}

func head(f frame) []byte { return appendFrame(nil, f) }

// lag measures how late this machine wakes up goroutines, which is not the code's fault.
func lag(t testing.TB) (worst func() time.Duration) {
	var most atomic.Int64
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for {
			start := time.Now()
			select {
			case <-stop:
				return
			case <-time.After(5 * time.Millisecond):
			}
			most.Store(max(most.Load(), int64(time.Since(start))))
		}
	}()
	t.Cleanup(func() { close(stop); <-done })
	return func() time.Duration { return time.Duration(4 * most.Load()) }
}

// stall is the most that a read may wait because of a peer.
const stall = fetching + 750*time.Millisecond

func TestHostilePeers(t *testing.T) {
	cases := map[string]struct {
		head   string // "": goodHead
		answer func(c *hostileConn, r Request, pieces []asked) bool
		filled int  // of 2 pieces
		late   bool // several reads take it to be away
		on     bool // it stays in use
	}{
		"frozen":    {head: "none"},
		"503":       {head: "HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n"},
		"404":       {head: "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"},
		"later":     {head: "HTTP/1.1 426 Upgrade Required\r\nUpgrade: shoal-peer/5\r\nContent-Length: 0\r\n\r\n"},
		"another":   {head: strings.Replace(goodHead, "node-b", "node-c", 1)},
		"not http":  {head: "\x16\x03\x01 nonsense\r\n\r\n"},
		"long head": {head: "HTTP/1.1 101 OK\r\nX: " + strings.Repeat("x", 1<<20) + "\r\n\r\n"},
		"half-open": {answer: func(c *hostileConn, _ Request, _ []asked) bool { <-c.h.quit; return false }, late: true},
		"closes":    {answer: func(*hostileConn, Request, []asked) bool { return false }},
		"freezes in the bytes": {answer: func(c *hostileConn, r Request, p []asked) bool {
			c.say(data(r, 0, p[0]), data(r, 1, p[1])[:1000])
			<-c.h.quit
			return false
		}, filled: 1, late: true},
		"ends in the bytes": {answer: func(c *hostileConn, r Request, p []asked) bool {
			c.say(data(r, 0, p[0]), data(r, 1, p[1])[:1000])
			return false
		}, filled: 1},
		"trickles": {answer: func(c *hostileConn, r Request, p []asked) bool {
			return c.trickle(20*time.Millisecond, data(r, 0, p[0]))
		}, late: true},
		"trickles slowly": {answer: func(c *hostileConn, r Request, p []asked) bool {
			return c.trickle(900*time.Millisecond, data(r, 0, p[0]))
		}, late: true},
		"waits": {answer: func(c *hostileConn, r Request, _ []asked) bool {
			for c.say(head(frame{kind: frameWait, request: r.number})) && c.sleep(100*time.Millisecond) {
			}
			return false
		}, late: true},
		"a million waits": {answer: func(c *hostileConn, r Request, _ []asked) bool {
			b := bytes.Repeat(head(frame{kind: frameWait, request: r.number}), 10_000)
			for range 100 {
				if !c.say(b) {
					return false
				}
			}
			return false
		}},
		"wrong checksum": {answer: func(c *hostileConn, r Request, p []asked) bool {
			b := data(r, 1, p[1])
			b[len(b)-1]++
			return c.say(data(r, 0, p[0]), b)
		}, filled: 1},
		"too long": {answer: func(c *hostileConn, r Request, p []asked) bool {
			p[0].n++
			return c.say(data(r, 0, p[0]))
		}},
		"too short": {answer: func(c *hostileConn, r Request, p []asked) bool {
			p[0].n--
			return c.say(data(r, 0, p[0]))
		}},
		"a piece that is not": {answer: func(c *hostileConn, r Request, p []asked) bool {
			return c.say(data(r, 2, p[0]))
		}},
		"a piece twice": {answer: func(c *hostileConn, r Request, p []asked) bool {
			return c.say(data(r, 1, p[1]), data(r, 1, p[1]))
		}, filled: 1},
		"another's bytes": {answer: func(c *hostileConn, r Request, p []asked) bool {
			r.number--
			return c.say(data(r, 0, p[0]))
		}},
		"no reason": {answer: func(c *hostileConn, r Request, _ []asked) bool {
			return c.say(head(frame{kind: frameNo, request: r.number}))
		}},
		"an unknown reason": {answer: func(c *hostileConn, r Request, _ []asked) bool {
			return c.say(head(frame{kind: frameNo, reason: numReasons, request: r.number}))
		}},
		"nonsense": {answer: func(c *hostileConn, _ Request, _ []asked) bool { return c.say(noise[:1000]) }},
		"refuses": {answer: func(c *hostileConn, r Request, p []asked) bool {
			return c.say(head(frame{kind: frameNo, reason: Busy, piece: 1, request: r.number}), data(r, 0, p[0]))
		}, filled: 1, on: true},
		"more than was asked for": {answer: func(c *hostileConn, r Request, p []asked) bool {
			return c.say(data(r, 0, p[0]), data(r, 1, p[1]), data(r, 1, p[1]), noise[:100])
		}, filled: 2, on: true},
	}
	for name, tt := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newHostile(t, tt.answer)
			if tt.head != "" {
				h.say(strings.TrimPrefix(tt.head, "none"))
			}
			b := &bed{client: NewClient(ClientConfig{Log: quiet(&synced.Buffer{})}),
				node: Node{ID: "node-b", Address: h.l.Addr().String()}}
			defer b.client.Close()
			worst := lag(t)
			reads := 1
			if tt.late {
				reads = mostLate
			}
			for range reads {
				start := time.Now()
				pieces := want(1000, 1, 2)
				n := b.read(t, pieces)
				if took := time.Since(start); took > stall+worst() {
					t.Errorf("a read took %v, on a machine that is late by %v", took, worst())
				}
				if n != tt.filled {
					t.Errorf("%d filled: %+v", n, b.stats())
				}
			}
			if !tt.on { // what is silent is pinged first
				until(t, "it is away", func() bool { return b.stats().State == "away" })
			}
			s := b.stats()
			if (s.State == "on") != tt.on || s.Errors+s.Damaged+s.Late == 0 != tt.on || s.InFlight != 0 {
				t.Errorf("%+v", s)
			}
			if tt.on {
				if n := b.read(t, want(1000, 1, 2)); n != tt.filled {
					t.Errorf("then %d filled: %+v", n, b.stats())
				}
				return
			}
			asks, start := h.asks.Load(), time.Now()
			if b.client.Ready("node-b") && time.Since(start) < time.Second/2 {
				t.Error("it is still to be asked")
			}
			b.read(t, want(1000, 1))
			if s := b.stats(); s.Cause == "" || s.Passed == 0 && time.Since(start) < time.Second/2 {
				t.Errorf("asked again after %d requests: %+v", asks, s)
			}
		})
	}
}

// Coded pieces that were not asked for, or are no shorter than the file, break the protocol.
func TestHostileCoded(t *testing.T) {
	for name, c := range map[string]struct {
		form [8]byte
		n    int
		flip bool
		ok   bool
	}{
		"right": {form: form, n: 999, ok: true}, "not asked for": {n: 999}, "as long": {form: form, n: 1000},
		"longer": {form: form, n: 1001},
		"empty":  {form: form}, "wrong checksum": {form: form, n: 999, flip: true},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHostile(t, func(conn *hostileConn, r Request, _ []asked) bool {
				b := appendSums(head(frame{kind: frameCoded, n: c.n, request: r.number}), noise[:c.n])
				b = append(b, noise[:c.n]...)
				if c.flip {
					b[len(b)-1]++
				}
				return conn.say(b)
			})
			client := NewClient(ClientConfig{Log: quiet(&synced.Buffer{})})
			defer client.Close()
			pieces := want(1000, 1)
			client.Read(t.Context(), Node{ID: "node-b", Address: h.l.Addr().String()}, Request{Form: c.form}, pieces)
			if s := client.Stats()[0]; pieces[0].Filled != c.ok || (s.Errors+s.Damaged == 0) != c.ok ||
				(s.State == "on") != c.ok {
				t.Errorf("filled %v, %+v", pieces[0].Filled, s)
			}
		})
	}
}

// A prefetch waits longer, until a reader needs it.
func TestPatience(t *testing.T) {
	h := newHostile(t, func(c *hostileConn, r Request, _ []asked) bool {
		for c.say(head(frame{kind: frameWait, request: r.number})) && c.sleep(100*time.Millisecond) {
		}
		return false
	})
	c := NewClient(ClientConfig{Log: quiet(&synced.Buffer{})})
	defer c.Close()
	worst := lag(t)
	u := objstore.NewUrgency(time.Time{})
	done := make(chan time.Time)
	go func() {
		c.Read(objstore.WithUrgency(t.Context(), u), Node{ID: "node-b", Address: h.l.Addr().String()}, Request{},
			want(10, 1))
		done <- time.Now()
	}()
	select {
	case <-done:
		t.Error("a prefetch did not wait")
	case <-time.After(2 * patience):
	}
	raised := time.Now()
	u.Raise()
	if took := (<-done).Sub(raised); took > stall+worst() {
		t.Errorf("a reader waited %v", took)
	}
}

// Connections that have been closed meanwhile cost no read.
func TestRestartedPeer(t *testing.T) {
	var ends atomic.Bool
	h := newHostile(t, func(c *hostileConn, r Request, p []asked) bool {
		return c.say(data(r, 0, p[0])) && !ends.Load()
	})
	b := &bed{client: NewClient(ClientConfig{Log: quiet(&synced.Buffer{})}),
		node: Node{ID: "node-b", Address: h.l.Addr().String()}}
	defer b.client.Close()
	ends.Store(true)
	for range 20 { // the end may be seen before the next question, or by it
		if n := b.read(t, want(10, 1)); n != 1 {
			t.Errorf("%+v", b.stats())
		}
	}
	// Another address of the same node.
	ends.Store(false)
	b.read(t, want(10, 1))
	h2 := newHostile(t, h.answer)
	b.node.Address = h2.l.Addr().String()
	if n := b.read(t, want(10, 1)); n != 1 || h2.asks.Load() != 1 {
		t.Errorf("%d, %d asked at the new address", n, h2.asks.Load())
	}
	b.client.Retain(nil)
	if len(b.client.Stats()) != 0 {
		t.Error("not forgotten")
	}
}

// A refused connection, and a circuit that closes again.
func TestAwayAndBack(t *testing.T) {
	l := listen(t)
	address := l.Addr().String()
	_ = l.Close()
	var mu sync.Mutex
	clock := time.Now()
	log := &synced.Buffer{}
	b := &bed{client: NewClient(ClientConfig{Log: quiet(log)}), node: Node{ID: "node-b", Address: address}}
	b.client.now = func() time.Time {
		mu.Lock()
		defer mu.Unlock()
		return clock
	}
	defer b.client.Close()
	for range 3 {
		b.read(t, want(10, 1))
	}
	if s := b.stats(); s.Errors != 1 || s.Passed != 2 || s.State != "away" || !strings.Contains(s.Cause, "refused") {
		t.Errorf("%+v", s)
	}
	h := newHostile(t, func(c *hostileConn, r Request, p []asked) bool { return c.say(data(r, 0, p[0])) })
	b.node.Address = h.l.Addr().String()
	mu.Lock()
	clock = clock.Add(time.Second)
	mu.Unlock()
	if n := b.read(t, want(10, 1)); n != 1 || b.stats().State != "on" {
		t.Errorf("%+v", b.stats())
	}
	if out := log.String(); strings.Count(out, "does not answer") != 1 || strings.Count(out, "asked again") != 1 {
		t.Error(out)
	}
}

// Whatever a client sends, the server ends its connection or answers, and goes on.
func TestHostileClients(t *testing.T) {
	b := newBed(t, newShelf(1))
	request := func(change func(b []byte) []byte) []byte {
		return change(appendRequest(nil, Request{Dataset: dataset, Version: version}, want(100, 1)))
	}
	upgrade := fmt.Sprintf("GET %sread HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: %s\r\n\r\n",
		basePath, upgradeTo)
	for name, send := range map[string]string{
		"nonsense":       upgrade + string(noise[:100]),
		"no length":      upgrade + "\x00\x00\x00\x00",
		"a huge length":  upgrade + "\xff\xff\xff\xff",
		"many pieces":    upgrade + string(request(func(b []byte) []byte { b[6], b[7] = 0xff, 0xff; return b })),
		"no pieces":      upgrade + string(request(func(b []byte) []byte { b[6], b[7] = 0, 0; return b })),
		"flags":          upgrade + string(request(func(b []byte) []byte { b[4] = 2; return b })),
		"a huge piece":   upgrade + string(request(func(b []byte) []byte { b[4+headSize+31] = 0xff; return b })),
		"a long ETag":    upgrade + string(request(func(b []byte) []byte { b[4+headSize+32] = 0xff; return b })),
		"another path":   "GET /shoal/peer/v1/manifest/..%2f..%2fetc%2fpasswd HTTP/1.1\r\nHost: x\r\n\r\n",
		"no upgrade":     "GET " + basePath + "read HTTP/1.1\r\nHost: x\r\n\r\n",
		"another method": "POST " + basePath + "read HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n",
		"leaves":         upgrade + string(request(func(b []byte) []byte { return b[:20] })),
		"reads nothing":  upgrade + strings.Repeat(string(request(func(b []byte) []byte { return b })), 100),
	} {
		t.Run(name, func(t *testing.T) {
			c, err := net.Dial("tcp", b.node.Address)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = c.Close() }()
			_, _ = io.WriteString(c, send)
			if name == "leaves" || name == "reads nothing" {
				return
			}
			_ = c.SetDeadline(time.Now().Add(10 * time.Second))
			if strings.HasPrefix(send, upgrade) {
				got, err := io.ReadAll(c) // until the server ends it
				if !strings.HasPrefix(string(got), "HTTP/1.1 101") || len(got) > 200 {
					t.Errorf("%q, %v", got, err)
				}
				return
			}
			answer, err := http.ReadResponse(bufio.NewReader(c), nil)
			if err != nil || answer.StatusCode < 400 {
				t.Errorf("%v, %v", answer, err)
			}
		})
	}
	if n := b.read(t, want(100, 1)); n != 1 {
		t.Errorf("%+v", b.stats())
	}
}

// A client that leaves while the owner fetches leaves nothing behind, nor does a server that is closed.
func TestLeaving(t *testing.T) {
	s := newShelf()
	s.gate = make(chan struct{})
	defer close(s.gate)
	b := newBed(t, s)
	c, err := net.Dial("tcp", b.node.Address)
	if err != nil {
		t.Fatal(err)
	}
	_, _ = fmt.Fprintf(c, "GET %sread HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: %s\r\n\r\n",
		basePath, upgradeTo)
	_, _ = c.Write(appendRequest(nil, Request{Dataset: dataset, Version: version}, want(100, 1)))
	until(t, "it is served", func() bool { return b.server.Stats().InFlight == 1 })
	if st := b.server.Stats(); st.Memory != 0 || st.Connections != 1 {
		t.Errorf("%+v", st)
	}
	_ = c.Close()
	until(t, "the server notices", func() bool {
		st := b.server.Stats()
		return st.InFlight == 0 && st.Memory == 0 && st.Connections == 0
	})
	// until the bed closes the server
	go b.client.Read(t.Context(), b.node, Request{Dataset: dataset, Version: version}, want(100, 1))
	until(t, "it is served", func() bool { return b.server.Stats().InFlight == 1 })
}

func until(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("waited in vain: %s", what)
		}
	}
}
