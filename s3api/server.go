package s3api

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/xml"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/url"
	pathpkg "path"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unicode/utf8"

	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/objstore/s3"
)

// Limits, as the package comment says.
const (
	maxHeader  = 64 << 10
	headerTime = 10 * time.Second
	idleTime   = 2 * time.Minute
	pieceTime  = 30 * time.Second
	pauseTime  = 10 * time.Minute
	mostLent   = 16 // pieces that clients are sent out of the cache's memory; beyond, they are copied
	restTime   = 5 * time.Second
	maxRest    = 1 << 30
)

const requestIDHeader = "X-Amz-Request-Id"

// Dataset is what is served. An engine is one.
type Dataset interface {
	Manifest() *catalog.Manifest
	Members() bool
	Listed() time.Time
	MarkStale(keys []string) error
	Stale() bool // MarkStale was called with a key of it since it was listed
	ReadAt(ctx context.Context, m *catalog.Manifest, file int, p []byte, off int64) (int, error)
	WillReadRange(m *catalog.Manifest, file int, off, n int64)
	Lend(m *catalog.Manifest, file int, off int64, n int) (data []byte, release func(), ok bool)
	Opened(m *catalog.Manifest, file int, reader uint32)
	WasRead(m *catalog.Manifest, file int, off, n int64, reader uint32)
	Released(m *catalog.Manifest, file int)
}

// Origin sends requests to the bucket of the source.
type Origin interface {
	Forward(ctx context.Context, r s3.Request) (*http.Response, error)
}

// Served is a dataset and where it comes from.
type Served struct {
	Dataset
	Origin Origin // nil: a folder
	Bucket string
	Prefix string // begins the keys of the dataset
	Where  string // the origin's address, for messages; datasets of one bucket have the same
}

// Stats are an endpoint's counters, of all its datasets.
type Stats struct {
	Listen      string `json:"listen"`
	Requests    int64  `json:"requests"`
	Errors      int64  `json:"errors"`      // requests that the endpoint refused or failed; not the origin's answers
	Forwarded   int64  `json:"forwarded"`   // requests that went to the origin
	Sent        int64  `json:"sent_bytes"`  // bytes of bodies
	Connections int64  `json:"connections"` // open
}

// Limits say what a server does for those whom it serves.
type Limits struct {
	ReadOnly    bool // nothing is written through it
	Connections int  // at most; see conns
}

// Server serves datasets at one address.
type Server struct {
	keys  Keys // who may sign; nil: requests need no signature
	may   Limits
	conns *conns
	log   *slog.Logger
	http  *http.Server
	began time.Time // stands for times that a manifest lacks

	mu   sync.RWMutex
	sets []*dataset // the longest prefixes first

	readers atomic.Uint32 // connections so far
	lent    atomic.Int32  // pieces of the cache's memory that clients are being sent
	count   struct{ requests, errors, forwarded, sent, connections atomic.Int64 }
	listen  atomic.Pointer[string]
}

// New returns a server without datasets. Without keys, requests need no signature.
func New(keys Keys, may Limits, log *slog.Logger) *Server {
	s := &Server{keys: keys, may: may, log: log, began: time.Now(),
		conns: &conns{most: max(may.Connections, 1), freed: make(chan struct{}, 1), all: map[net.Conn]*place{}}}
	s.http = &http.Server{
		Handler: s, DisableGeneralOptionsHandler: true, MaxHeaderBytes: maxHeader, ReadHeaderTimeout: headerTime,
		IdleTimeout: idleTime,
		ErrorLog:    slog.NewLogLogger(log.Handler(), slog.LevelDebug),
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return context.WithValue(ctx, readerKey{}, &reader{number: s.readers.Add(1), conn: c})
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

// Add serves a dataset until remove is called. Then requests at work may end until the context does, and no reader of
// the dataset is left.
func (s *Server) Add(o Served) (remove func(ctx context.Context), err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, d := range s.sets {
		if d.Bucket == o.Bucket && d.Where != o.Where {
			return nil, fmt.Errorf("S3 endpoint: it already serves bucket %s of %s; serve the one of %s at "+
				"another address", o.Bucket, d.Where, o.Where)
		}
	}
	d := &dataset{Served: o, server: s, opens: opens{data: o.Dataset}}
	d.meta.origin = objstore.NewCircuit(time.Now, func(cause error) {
		if cause != nil {
			s.log.Warn("the origin does not answer: HEADs do without metadata", "origin", d.Where, "cause", cause)
		}
	})
	d.left, d.cut = context.WithCancel(context.Background())
	everywhere.Lock()
	for _, x := range everywhere.sets {
		if x.Bucket == d.Bucket && x.Where == d.Where {
			d.written.adopt(&x.written) // d may have been listed before
		}
	}
	everywhere.sets = append(everywhere.sets, d)
	everywhere.Unlock()
	if d.Stale() {
		s.log.Warn("keys were written through an endpoint that has ended: all go to the origin until a refresh",
			"source", d.Where, "prefix", d.Prefix)
		d.written.begin([]string{""})()
	}
	s.sets = append(s.sets, d)
	slices.SortStableFunc(s.sets, func(a, b *dataset) int { return len(b.Prefix) - len(a.Prefix) })
	return d.remove, nil
}

// enter returns the dataset for a key, or for the prefix of a listing: the one of the longest prefix that it begins
// with, or any of the bucket. The caller ends with running.Done.
func (s *Server) enter(bucket, key string) (d *dataset, ok bool) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	for _, x := range s.sets {
		if x.Bucket == bucket && (d == nil || strings.HasPrefix(key, x.Prefix)) {
			if d = x; strings.HasPrefix(key, x.Prefix) {
				break
			}
		}
	}
	if d == nil {
		return nil, false
	}
	d.running.Add(1)
	return d, true
}

type readerKey struct{}

type reader struct {
	number uint32
	conn   net.Conn
}

func readerOf(r *http.Request) *reader { return r.Context().Value(readerKey{}).(*reader) }

// Serve serves l until Close.
func (s *Server) Serve(l net.Listener) error {
	s.listen.Store(new(l.Addr().String()))
	err := s.http.Serve(&listener{l, s.conns})
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}

// Close ends the server: requests at work may end until ctx does. Datasets are removed afterwards.
func (s *Server) Close(ctx context.Context) {
	if s.http.Shutdown(ctx) != nil {
		_ = s.http.Close()
	}
}

// Stats returns the counters.
func (s *Server) Stats() Stats {
	st := Stats{Requests: s.count.requests.Load(), Errors: s.count.errors.Load(), Forwarded: s.count.forwarded.Load(),
		Sent: s.count.sent.Load(), Connections: s.count.connections.Load()}
	if at := s.listen.Load(); at != nil {
		st.Listen = *at
	}
	return st
}

func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.count.requests.Add(1)
	if !s.conns.work(readerOf(r).conn, true) {
		panic(http.ErrAbortHandler) // it made room for another a moment ago
	}
	defer s.conns.work(readerOf(r).conn, false)
	var id [8]byte
	_, _ = rand.Read(id[:])
	w.Header().Set(requestIDHeader, strings.ToUpper(hex.EncodeToString(id[:])))
	inert(w.Header())
	control := http.NewResponseController(w)
	var body *upload
	if r.ContentLength != 0 {
		body = &upload{ReadCloser: r.Body, control: control, asks: r.Header.Get("Expect") != ""}
		_ = control.EnableFullDuplex() // the answer does not wait for what is left of the body
		r = r.WithContext(r.Context()) // net/http asks its own Body whether the client was told to send
		r.Body = body
	}
	if err := s.serve(w, r); err != nil {
		if e := errorOf(err); e.status >= 400 {
			s.count.errors.Add(1)
			s.log.Debug("S3 request refused", "method", r.Method, "path", r.URL.Path, "code", e.code, "cause", err)
		}
		fail(w, r, err)
	}
	if body != nil {
		s.conns.work(readerOf(r).conn, false) // a client that was refused keeps no place by sending on
		body.rest()
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
	unhoist(r.Header, query)
	bucket, key, _ := strings.Cut(path, "/")
	read := r.Method == http.MethodGet || r.Method == http.MethodHead
	switch {
	case path == "" && r.Method == http.MethodGet: // not //BUCKET/KEY: the list would be taken for the object
		s.buckets(w)
		return nil
	case bucket == "",
		!read && r.Method != http.MethodPut && r.Method != http.MethodPost && r.Method != http.MethodDelete:
		return errMethod
	case !within(bucket, key), slices.ContainsFunc(slices.Concat(query["uploadId"], query["versionId"]), dotted):
		return errURI
	case !read && s.may.ReadOnly && s.keys == nil:
		return denied("Unsigned requests only read: start the endpoint with --s3-anonymous=write, or with --s3-keys")
	case !read && s.may.ReadOnly:
		return denied("The endpoint is read-only (--s3-read-only)")
	}
	d, ok := s.enter(bucket, cmp.Or(key, query.Get("prefix")))
	if !ok {
		return errNoSuchBucket
	}
	defer d.running.Done()
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	defer context.AfterFunc(d.left, cancel)()
	r = r.WithContext(ctx)
	switch {
	case !read:
		return d.write(w, r, key, query)
	case key == "":
		return d.bucket(w, r, query)
	}
	if d.Origin == nil && query.Get("partNumber") == "1" { // which AWS's C library wants of an empty object
		query.Del("partNumber")
	}
	if plain(r, query) && !dotted(key) {
		if m, file, held := d.held(key); held {
			return d.object(w, r, m, file)
		}
		if d.Origin == nil {
			return errNoSuchKey
		}
	}
	return d.forward(w, r, key, query)
}

func (s *Server) admit(r *http.Request, query url.Values) error {
	if s.keys != nil {
		return s.keys.verify(r, query, time.Now())
	}
	// A web page whose name was pointed at this machine (DNS rebinding) must not read the dataset through a browser.
	if !LoopbackName(r.Host) {
		return denied("The unsigned endpoint serves localhost only")
	}
	if page(r) {
		return denied("The unsigned endpoint does not serve web pages: a browser asks for one of another address, or " +
			"opens this one")
	}
	for name := range query {
		if strings.HasPrefix(name, "response-") {
			return errAnonymousHeaders
		}
	}
	return unchunk(r, nil)
}

// page reports whether a browser asks for something that it shows or runs, or on behalf of a page of another origin. It
// says so by Sec-Fetch-*; browsers that do not send these name the page in Origin or Referer.
func page(r *http.Request) bool {
	site, mode, dest := r.Header.Get("Sec-Fetch-Site"), r.Header.Get("Sec-Fetch-Mode"), r.Header.Get("Sec-Fetch-Dest")
	if site != "" && site != "same-origin" || mode == "navigate" || mode == "no-cors" || dest != "" && dest != "empty" {
		return true
	}
	for _, name := range []string{"Origin", "Referer"} {
		for _, text := range r.Header[name] {
			if u, err := url.Parse(text); err != nil || u.Host != r.Host {
				return true
			}
		}
	}
	return false
}

// inert keeps a browser from taking an answer for a page, or for a part of one of another origin: an object may hold
// HTML, and anybody may have written it.
func inert(h http.Header) {
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Content-Security-Policy", "sandbox")
	h.Set("Cross-Origin-Resource-Policy", "same-origin")
}

// LoopbackName reports whether a Host header names this machine and can name no other.
func LoopbackName(host string) bool {
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	host = strings.ToLower(strings.TrimSuffix(strings.Trim(host, "[]"), "."))
	ip := net.ParseIP(host)
	return host == "localhost" || strings.HasSuffix(host, ".localhost") || ip != nil && ip.IsLoopback()
}

// within reports whether a key stays below its bucket if a server or proxy on the way to the origin cleans its path.
func within(bucket, key string) bool {
	return key == "" || strings.Trim(key, "/") != "" && strings.HasPrefix(pathpkg.Join("/", bucket, key),
		"/"+bucket+"/")
}

// dotted reports whether a key may become another on the way to the origin, or an ID the path of something else there.
func dotted(key string) bool {
	return slices.ContainsFunc(strings.Split(key, "/"), func(part string) bool { return part == "." || part == ".." })
}

// unhoist makes headers of the parameters that stand for them, as presigned requests have them, and drops the
// operation's name.
func unhoist(h http.Header, query url.Values) {
	for name, values := range query {
		if strings.HasPrefix(strings.ToLower(name), "x-amz-") {
			h[http.CanonicalHeaderKey(name)] = values
			delete(query, name)
		}
	}
	query.Del("x-id")
}

// plain reports whether a request is for an object as it is, and not for a version, a part or another sub-resource.
func plain(r *http.Request, query url.Values) bool {
	return len(query) == 0 && r.Header.Get("X-Amz-Server-Side-Encryption-Customer-Key") == "" && !asksOwner(r)
}

// asksOwner reports whether a request is meant for one owner's bucket, whom only the origin knows.
func asksOwner(r *http.Request) bool { return r.Header.Get("X-Amz-Expected-Bucket-Owner") != "" }

// listParameters are those of a listing. Any other makes a GET of the bucket one of a sub-resource.
var listParameters = []string{"list-type", "prefix", "delimiter", "max-keys", "continuation-token", "start-after",
	"marker", "encoding-type", "fetch-owner"}

func (d *dataset) bucket(w http.ResponseWriter, r *http.Request, query url.Values) error {
	for name := range query {
		switch {
		case name == "location" && d.Origin == nil:
			writeXML(w, http.StatusOK, struct {
				XMLName xml.Name `xml:"http://s3.amazonaws.com/doc/2006-03-01/ LocationConstraint"`
			}{})
			return nil
		case !slices.Contains(listParameters, name):
			return d.forward(w, r, "", query)
		}
	}
	if r.Method == http.MethodHead && d.Origin != nil && asksOwner(r) {
		return d.forward(w, r, "", query)
	} else if r.Method == http.MethodHead {
		w.Header().Set("X-Amz-Bucket-Region", "us-east-1") // clients look it up here, and sign for it; any is accepted
		w.WriteHeader(http.StatusOK)
		return nil
	}
	return d.list(w, r, query)
}

func (s *Server) buckets(w http.ResponseWriter) {
	type bucket struct{ Name, CreationDate string }
	names := map[string]bool{}
	s.mu.RLock()
	for _, d := range s.sets {
		names[d.Bucket] = true
	}
	s.mu.RUnlock()
	var buckets []bucket
	for _, name := range slices.Sorted(maps.Keys(names)) {
		buckets = append(buckets, bucket{name, s.began.UTC().Format(time.RFC3339)})
	}
	writeXML(w, http.StatusOK, struct {
		XMLName xml.Name `xml:"http://s3.amazonaws.com/doc/2006-03-01/ ListAllMyBucketsResult"`
		Owner   struct{ ID, DisplayName string }
		Buckets []bucket `xml:"Buckets>Bucket"`
	}{Buckets: buckets})
}

// Listen opens an address, HOST:PORT, and refuses one beyond loopback unless requests are signed.
func Listen(addr string, signed bool) (net.Listener, error) {
	a, err := net.ResolveTCPAddr("tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("S3 endpoint: %w (write HOST:PORT, such as 127.0.0.1:9000)", err)
	}
	if !signed && !a.IP.IsLoopback() {
		return nil, fmt.Errorf("S3 endpoint %s: other machines can reach it, and requests would need no signature "+
			"(give --s3-keys, or an address such as 127.0.0.1:%d)", addr, a.Port)
	}
	l, err := net.ListenTCP("tcp", a)
	if errors.Is(err, syscall.EADDRINUSE) {
		return nil, fmt.Errorf("S3 endpoint %s: another process listens there: stop it or choose another port", addr)
	}
	if err != nil {
		return nil, fmt.Errorf("S3 endpoint: %w", err)
	}
	return l, nil
}
