package s3api

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/xml"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/objstore/s3"
)

// Limits, as the package comment says.
const (
	maxHeader   = 64 << 10
	headerTime  = 10 * time.Second
	idleTime    = 2 * time.Minute
	pieceTime   = 30 * time.Second
	maxConns    = 1024
	maxRequests = 256
)

const requestIDHeader = "X-Amz-Request-Id"

// Dataset is what is served. An engine is one.
type Dataset interface {
	Manifest() *catalog.Manifest
	Members() bool
	Listed() time.Time
	MarkStale() error
	ReadAt(ctx context.Context, m *catalog.Manifest, file int, p []byte, off int64) (int, error)
	Lend(m *catalog.Manifest, file int, off int64, n int) (data []byte, release func(), ok bool)
	Opened(m *catalog.Manifest, file int, reader uint32)
	Released(m *catalog.Manifest, file int)
}

// Origin sends requests to the bucket of the source.
type Origin interface {
	Forward(ctx context.Context, r s3.Request) (*http.Response, error)
}

// Options are a server's settings.
type Options struct {
	Bucket string // the name of the dataset's bucket
	Origin string // where the dataset comes from, for messages
	Keys   Keys   // who may sign; nil: requests need no signature
	Log    *slog.Logger
}

// Stats are a server's counters.
type Stats struct {
	Listen      string `json:"listen"`
	Requests    int64  `json:"requests"`
	Errors      int64  `json:"errors"`      // requests that the endpoint refused or failed; not the origin's answers
	Forwarded   int64  `json:"forwarded"`   // requests that went to the origin
	Sent        int64  `json:"sent_bytes"`  // bytes of bodies
	Connections int64  `json:"connections"` // open
}

// Server serves one dataset.
type Server struct {
	data   Dataset
	origin Origin
	o      Options
	http   *http.Server
	places chan struct{} // of requests at work
	began  time.Time     // stands for times that the manifest lacks

	opens   opens
	written written
	running sync.WaitGroup // handlers

	mu   sync.Mutex
	tree *tree     // of the last listing
	seen time.Time // the listing that written knows

	readers atomic.Uint32 // connections so far
	count   struct{ requests, errors, forwarded, sent, connections atomic.Int64 }
	listen  atomic.Pointer[string]
}

// New returns a server of data. origin is nil for a folder.
func New(data Dataset, origin Origin, o Options) *Server {
	s := &Server{data: data, origin: origin, o: o, places: make(chan struct{}, maxRequests), began: time.Now(), opens: opens{data: data}}
	s.http = &http.Server{
		Handler: s, MaxHeaderBytes: maxHeader, ReadHeaderTimeout: headerTime, IdleTimeout: idleTime,
		ErrorLog: slog.NewLogLogger(o.Log.Handler(), slog.LevelDebug),
		ConnContext: func(ctx context.Context, _ net.Conn) context.Context {
			return context.WithValue(ctx, readerKey{}, s.readers.Add(1))
		},
		ConnState: func(_ net.Conn, state http.ConnState) {
			switch state {
			case http.StateNew:
				s.count.connections.Add(1)
			case http.StateClosed, http.StateHijacked:
				s.count.connections.Add(-1)
			}
		},
	}
	return s
}

// readerKey finds the number of the connection in a request's context.
type readerKey struct{}

// Serve serves l until Close.
func (s *Server) Serve(l net.Listener) error {
	at := l.Addr().String()
	s.listen.Store(&at)
	err := s.http.Serve(&limited{Listener: l, places: make(chan struct{}, maxConns)})
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}

// Close ends the server: requests at work may end until ctx does. Afterwards no reader of the dataset is left.
func (s *Server) Close(ctx context.Context) {
	if s.http.Shutdown(ctx) != nil {
		_ = s.http.Close()
	}
	s.running.Wait()
	s.opens.close()
}

// Stats returns the counters.
func (s *Server) Stats() Stats {
	st := Stats{
		Requests: s.count.requests.Load(), Errors: s.count.errors.Load(), Forwarded: s.count.forwarded.Load(),
		Sent: s.count.sent.Load(), Connections: s.count.connections.Load(),
	}
	if at := s.listen.Load(); at != nil {
		st.Listen = *at
	}
	return st
}

// ServeHTTP implements [http.Handler].
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.running.Add(1)
	defer s.running.Done()
	s.count.requests.Add(1)
	var id [8]byte
	_, _ = rand.Read(id[:])
	w.Header().Set(requestIDHeader, strings.ToUpper(hex.EncodeToString(id[:])))
	control := http.NewResponseController(w)
	_ = control.SetWriteDeadline(time.Now().Add(pieceTime)) // in place of the last request's
	if r.ContentLength != 0 {
		_ = control.SetReadDeadline(time.Now().Add(pieceTime))
	}
	select {
	case s.places <- struct{}{}:
		defer func() { <-s.places }()
	case <-r.Context().Done():
		return
	}
	if err := s.serve(w, r); err != nil {
		if e := errorOf(err); e.status >= 400 {
			s.count.errors.Add(1)
			s.o.Log.Debug("S3 request refused", "method", r.Method, "path", r.URL.Path, "code", e.code, "cause", err)
		}
		_ = control.SetWriteDeadline(time.Now().Add(pieceTime))
		fail(w, r, err)
	}
}

// serve answers a request, or returns the error to answer with.
func (s *Server) serve(w http.ResponseWriter, r *http.Request) error {
	query, err := url.ParseQuery(r.URL.RawQuery)
	path, ok := strings.CutPrefix(r.URL.Path, "/")
	if err != nil || !ok || !utf8.ValidString(path) || strings.ContainsRune(path, 0) {
		return errURI
	}
	if err := s.admit(r, query); err != nil {
		return err
	}
	bucket, key, _ := strings.Cut(path, "/")
	read := r.Method == http.MethodGet || r.Method == http.MethodHead
	switch {
	case !read && r.Method != http.MethodPut && r.Method != http.MethodPost && r.Method != http.MethodDelete:
		return errMethod
	case bucket == "" && r.Method == http.MethodGet:
		s.buckets(w)
		return nil
	case bucket == "":
		return errMethod
	case bucket != s.o.Bucket:
		return errNoSuchBucket
	case slices.ContainsFunc(strings.Split(key, "/"), func(part string) bool { return part == "." || part == ".." }):
		return errURI // on the way to the origin it might become another path
	case !read:
		return s.write(w, r, key, query)
	case key == "":
		return s.bucket(w, r, query)
	}
	if plain(r, query) {
		if m, file, held := s.held(key); held {
			return s.object(w, r, m, file)
		}
		if s.origin == nil {
			return errNoSuchKey
		}
	}
	return s.forward(w, r, key, query)
}

// admit checks who asks.
func (s *Server) admit(r *http.Request, query url.Values) error {
	if s.o.Keys != nil {
		return s.o.Keys.verify(r, query, time.Now())
	}
	// A web page whose name was pointed at this machine (DNS rebinding) must not read the dataset through a browser.
	if !loopbackName(r.Host) {
		return denied("The unsigned endpoint serves localhost only")
	}
	return nil
}

// loopbackName reports whether a Host header names this machine and can name no other.
func loopbackName(host string) bool {
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	host = strings.ToLower(strings.Trim(host, "[]"))
	ip := net.ParseIP(host)
	return host == "localhost" || strings.HasSuffix(host, ".localhost") || ip != nil && ip.IsLoopback()
}

// plain reports whether a request is for an object as it is, and not for a version, a part or another sub-resource.
func plain(r *http.Request, query url.Values) bool {
	for name := range query {
		if name != "x-id" && !strings.HasPrefix(name, "X-Amz-") {
			return false
		}
	}
	return r.Header.Get("X-Amz-Server-Side-Encryption-Customer-Key") == ""
}

// held finds a key in the manifest, if the endpoint may answer for it.
func (s *Server) held(key string) (m *catalog.Manifest, file int, ok bool) {
	s.catchUp()
	if s.written.has(key) {
		return nil, 0, false
	}
	m = s.data.Manifest()
	path, below := strings.CutPrefix(key, m.Prefix())
	if !below || s.data.Members() {
		return nil, 0, false
	}
	node, found := m.Find(path)
	return m, node.Index, found && !node.IsDir
}

// catchUp lets go of written keys that the version in force has. It is called before Manifest.
func (s *Server) catchUp() {
	at := s.data.Listed()
	s.mu.Lock()
	news := at.After(s.seen)
	s.seen = at
	s.mu.Unlock()
	if !news {
		return
	}
	s.written.listed(at)
	if s.written.any() { // after the listing began: what it saved is stale again
		if err := s.data.MarkStale(); err != nil {
			s.o.Log.Warn("the saved listing could not be marked as stale: run the next daemon with --refresh", "cause", err)
		}
	}
}

// treeOf returns the tree of a manifest.
func (s *Server) treeOf(m *catalog.Manifest) *tree {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.tree == nil || s.tree.m != m {
		s.tree = &tree{m: m}
	}
	return s.tree
}

// listParameters are those of a listing. Any other makes a GET of the bucket one of a sub-resource.
var listParameters = []string{"list-type", "prefix", "delimiter", "max-keys", "continuation-token", "start-after", "marker", "encoding-type", "fetch-owner", "x-id"}

// bucket answers a GET or HEAD of the bucket.
func (s *Server) bucket(w http.ResponseWriter, r *http.Request, query url.Values) error {
	for name := range query {
		switch {
		case name == "location" && s.origin == nil:
			writeXML(w, http.StatusOK, struct {
				XMLName xml.Name `xml:"http://s3.amazonaws.com/doc/2006-03-01/ LocationConstraint"`
			}{})
			return nil
		case !slices.Contains(listParameters, name) && !strings.HasPrefix(name, "X-Amz-"):
			return s.forward(w, r, "", query)
		}
	}
	if r.Method == http.MethodHead {
		w.WriteHeader(http.StatusOK)
		return nil
	}
	return s.list(w, r, query)
}

// buckets answers ListBuckets.
func (s *Server) buckets(w http.ResponseWriter) {
	type bucket struct{ Name, CreationDate string }
	writeXML(w, http.StatusOK, struct {
		XMLName xml.Name `xml:"http://s3.amazonaws.com/doc/2006-03-01/ ListAllMyBucketsResult"`
		Owner   struct{ ID, DisplayName string }
		Buckets []bucket `xml:"Buckets>Bucket"`
	}{Buckets: []bucket{{s.o.Bucket, s.began.UTC().Format(time.RFC3339)}}})
}

func hostOf(r *http.Request) string {
	host, _, _ := net.SplitHostPort(r.RemoteAddr)
	return host
}

// Listen opens an address, HOST:PORT, and refuses one beyond loopback unless requests are signed.
func Listen(addr string, signed bool) (net.Listener, error) {
	a, err := net.ResolveTCPAddr("tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("S3 endpoint: %w (write HOST:PORT, such as 127.0.0.1:9000)", err)
	}
	if !signed && !a.IP.IsLoopback() {
		return nil, fmt.Errorf("S3 endpoint %s: other machines can reach it, and requests would need no signature (give --s3-keys, or an address such as 127.0.0.1:%d)", addr, a.Port)
	}
	l, err := net.ListenTCP("tcp", a)
	if err != nil {
		return nil, fmt.Errorf("S3 endpoint: %w", err)
	}
	return l, nil
}

// limited accepts a connection only if there is a place for it.
type limited struct {
	net.Listener
	places chan struct{}
}

// Accept implements [net.Listener].
func (l *limited) Accept() (net.Conn, error) {
	l.places <- struct{}{}
	c, err := l.Listener.Accept()
	if err != nil {
		<-l.places
		return nil, err
	}
	return &placed{Conn: c, leave: sync.OnceFunc(func() { <-l.places })}, nil
}

// placed is a connection with a place.
type placed struct {
	net.Conn
	leave func()
}

// Close implements [net.Conn].
func (c *placed) Close() error {
	defer c.leave()
	return c.Conn.Close()
}
