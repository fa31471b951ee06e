package hostile

import (
	"bufio"
	"bytes"
	"context"
	"crypto/md5" //nolint:gosec // ETags are MD5s
	"crypto/tls"
	"encoding/xml"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/shoalfs/shoal/internal/pause"
	"github.com/shoalfs/shoal/lab/rig/hostile"
)

// Op is what a request asks for.
type Op string

// The operations.
const (
	Get   Op = "get"
	Head  Op = "head"
	Probe Op = "probe" // the listing of one key, by which a client looks whether the store is there
	List  Op = "list"
	Other Op = "other"
)

// ETag returns the ETag of an object, without quotes.
func ETag(data []byte) string { return fmt.Sprintf("%x", md5.Sum(data)) } //nolint:gosec // see the import

// Server is an S3 server over bare connections that answers soundly, but where a script wants it otherwise: any byte
// may come, or none. It has one bucket, of any name, checks no signatures and takes no writes. Its methods are safe for
// concurrent use.
type Server struct {
	listener net.Listener
	objects  map[string][]byte
	stopped  context.Context
	stop     context.CancelFunc
	conns    sync.WaitGroup

	mu     sync.Mutex
	script Script
	counts map[string]int // by operation and key
}

// Script may answer a request. It returns false for those that are to be answered soundly, and true where it has
// answered; the connection goes on then unless the script closes it.
type Script func(x *Exchange) bool

// Start serves objects on a loopback port; over TLS if config is not nil.
func Start(objects map[string][]byte, config *tls.Config, script Script) (*Server, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	if config != nil {
		l = tls.NewListener(l, config)
	}
	s := &Server{listener: l, objects: objects, script: script, counts: map[string]int{}}
	s.stopped, s.stop = context.WithCancel(context.Background())
	s.conns.Go(func() {
		for c, err := l.Accept(); err == nil; c, err = l.Accept() {
			s.conns.Go(func() {
				defer c.Close()
				// at once if it was accepted while it stopped
				defer context.AfterFunc(s.stopped, func() { _ = c.Close() })()
				s.serve(c)
			})
		}
	})
	return s, nil
}

// Addr returns the port's address.
func (s *Server) Addr() string { return s.listener.Addr().String() }

// Set replaces the script; nil answers soundly.
func (s *Server) Set(script Script) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.script = script
}

// Count returns how many requests of an operation there were for a key, or, of listings, for a prefix.
func (s *Server) Count(op Op, key string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.counts[string(op)+" "+key]
}

// Stop closes all connections and waits until nobody serves them.
func (s *Server) Stop() {
	_ = s.listener.Close()
	s.stop()
	s.conns.Wait()
}

func (s *Server) serve(c net.Conn) {
	for r := bufio.NewReader(c); ; {
		req, err := http.ReadRequest(r)
		if err != nil {
			return
		}
		x := &Exchange{Request: req, server: s, conn: c}
		x.describe()
		s.mu.Lock()
		script, name := s.script, string(x.Op)+" "+x.Key
		x.N = s.counts[name]
		s.counts[name]++
		s.mu.Unlock()
		if script == nil || !script(x) {
			x.Send(x.Sound().Bytes())
		}
		if x.closed {
			return
		}
	}
}

// Exchange is one request, and the place for its answer.
type Exchange struct {
	*http.Request
	Op  Op
	Key string // or a listing's prefix
	N   int    // how many requests of this operation and key there were before

	server *Server
	conn   net.Conn
	closed bool
}

func (x *Exchange) describe() {
	_, key, _ := strings.Cut(strings.TrimPrefix(x.URL.Path, "/"), "/")
	q := x.URL.Query()
	switch {
	case key == "" && q.Get("list-type") == "2":
		x.Op, x.Key = List, q.Get("prefix")
		if q.Get("max-keys") == "1" {
			x.Op = Probe
		}
	case key != "" && x.Method == http.MethodGet:
		x.Op, x.Key = Get, key
	case key != "" && x.Method == http.MethodHead:
		x.Op, x.Key = Head, key
	default:
		x.Op, x.Key = Other, key
	}
}

// Send writes to the connection; a client that has gone is its own affair.
func (x *Exchange) Send(b []byte) {
	if _, err := x.conn.Write(b); err != nil {
		x.closed = true
	}
}

// Close ends the connection in good order.
func (x *Exchange) Close() { x.closed = true }

// Reset ends the connection by a TCP reset.
func (x *Exchange) Reset() {
	if tcp, ok := x.conn.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
	x.closed = true
}

// Stall says nothing more until the client has gone or the server stops. What the client sends meanwhile is dropped.
func (x *Exchange) Stall() {
	var b [1]byte
	for {
		if _, err := x.conn.Read(b[:]); err != nil {
			x.closed = true
			return
		}
	}
}

// HalfClose sends the end of what is sent, and says nothing more.
func (x *Exchange) HalfClose() {
	if c, ok := x.conn.(interface{ CloseWrite() error }); ok {
		_ = c.CloseWrite()
	}
	x.Stall()
}

// Drip sends b, a byte every so often.
func (x *Exchange) Drip(b []byte, every time.Duration) {
	for i := range b {
		if x.closed = x.closed || pause.For(x.server.stopped, every) != nil; x.closed {
			return
		}
		x.Send(b[i : i+1])
	}
}

// Pour sends b again and again until the client has gone or the server stops.
func (x *Exchange) Pour(b []byte) {
	b = bytes.Repeat(b, 1+(16<<10)/len(b))
	for !x.closed && x.server.stopped.Err() == nil {
		x.Send(b)
	}
}

// Answer is an answer as it is sent.
type Answer struct {
	Status string // with the version: "HTTP/1.1 200 OK"
	Header [][2]string
	Body   []byte
}

// Bytes returns the answer as it is sent.
func (a *Answer) Bytes() []byte {
	var b bytes.Buffer
	b.WriteString(a.Status + "\r\n")
	for _, h := range a.Header {
		b.WriteString(h[0] + ": " + h[1] + "\r\n")
	}
	b.WriteString("\r\n")
	b.Write(a.Body)
	return b.Bytes()
}

// Get returns a header's value.
func (a *Answer) Get(name string) string {
	for _, h := range a.Header {
		if h[0] == name {
			return h[1]
		}
	}
	return ""
}

// Add adds a header.
func (a *Answer) Add(name, value string) { a.Header = append(a.Header, [2]string{name, value}) }

// Del removes a header.
func (a *Answer) Del(name string) {
	a.Header = slices.DeleteFunc(a.Header, func(h [2]string) bool { return h[0] == name })
}

// Set replaces a header.
func (a *Answer) Set(name, value string) { a.Del(name); a.Add(name, value) }

// Sized replaces the body, and the length with it.
func (a *Answer) Sized(body []byte) {
	a.Body = body
	a.Set("Content-Length", strconv.Itoa(len(body)))
}

// Chunked sends the body in chunks.
func (a *Answer) Chunked() {
	a.Del("Content-Length")
	a.Add("Transfer-Encoding", "chunked")
	var b bytes.Buffer
	for chunk := range slices.Chunk(a.Body, 1500) {
		fmt.Fprintf(&b, "%x\r\n%s\r\n", len(chunk), chunk)
	}
	b.WriteString("0\r\n\r\n")
	a.Body = b.Bytes()
}

// XML returns an answer that is XML.
func XML(status, body string) *Answer {
	a := &Answer{Status: "HTTP/1.1 " + status}
	a.Add("Content-Type", "application/xml")
	a.Sized([]byte(body))
	return a
}

// Error returns S3's answer for an error.
func Error(status, code string) *Answer {
	return XML(status, xml.Header+"<Error><Code>"+code+"</Code><Message>as the table says</Message></Error>")
}

// Sound returns the answer that a store would give.
func (x *Exchange) Sound() *Answer {
	switch x.Op {
	case List, Probe:
		return XML("200 OK", hostile.Page("", x.Entries()...))
	case Other:
		return Error("501 Not Implemented", "NotImplemented")
	}
	data, ok := x.server.objects[x.Key]
	switch {
	case !ok && x.Op == Head:
		a := Error("404 Not Found", "")
		a.Body = nil
		return a
	case !ok:
		return Error("404 Not Found", "NoSuchKey")
	}
	a := &Answer{Status: "HTTP/1.1 200 OK"}
	a.Add("ETag", `"`+ETag(data)+`"`)
	a.Add("Last-Modified", hostile.Modified.Format(http.TimeFormat))
	a.Add("Accept-Ranges", "bytes")
	if r := x.Header.Get("Range"); r != "" {
		var first, last int
		if _, err := fmt.Sscanf(r, "bytes=%d-%d", &first, &last); err != nil || first > last || last >= len(data) {
			return Error("416 Range Not Satisfiable", "InvalidRange")
		}
		a.Status = "HTTP/1.1 206 Partial Content"
		a.Add("Content-Range", fmt.Sprintf("bytes %d-%d/%d", first, last, len(data)))
		data = data[first : last+1]
	}
	a.Sized(data)
	if x.Op == Head {
		a.Body = nil
	}
	return a
}

// Entries are those of a sound listing, which has one page. Objects lie in one folder.
func (x *Exchange) Entries() []string {
	var entries []string
	for _, k := range slices.Sorted(maps.Keys(x.server.objects)) {
		if data := x.server.objects[k]; strings.HasPrefix(k, x.Key) {
			entries = append(entries, hostile.Entry(k, strconv.Itoa(len(data)), ETag(data)))
		}
	}
	return entries
}

// A sound answer, and then one that never comes: Stop ends the connection of whoever waits for it.
func TestStopEndsWhatStalls(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	data := []byte("content")
	stalls := make(chan struct{})
	s, err := Start(map[string][]byte{"d/a.bin": data}, nil, func(x *Exchange) bool {
		if x.N == 0 {
			return false
		}
		close(stalls)
		x.Stall()
		return true
	})
	if err != nil {
		t.Fatal(err)
	}
	client := &http.Client{Transport: &http.Transport{MaxConnsPerHost: 1}}
	defer client.CloseIdleConnections()
	get := func() ([]byte, error) {
		r, err := client.Get("http://" + s.Addr() + "/bucket/d/a.bin")
		if err != nil {
			return nil, err
		}
		defer r.Body.Close()
		return io.ReadAll(r.Body)
	}
	if got, err := get(); err != nil || !bytes.Equal(got, data) {
		t.Errorf("%q, %v", got, err)
	}
	done := make(chan error)
	go func() {
		_, err := get()
		done <- err
	}()
	<-stalls
	s.Stop()
	if err := <-done; err == nil {
		t.Error("an answer that never came")
	}
	if n := s.Count(Get, "d/a.bin"); n < 2 {
		t.Errorf("%d requests were counted", n)
	}
}
