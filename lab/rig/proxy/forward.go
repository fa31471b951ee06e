package proxy

import (
	"context"
	"encoding/xml"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/shoalfs/shoal/internal/pause"
)

// exchange is one request with its answer. The reverse proxy's hooks find it in the request's context.
type exchange struct {
	p     *Proxy
	w     http.ResponseWriter
	r     *http.Request
	op    Op
	shape *shape
	fault *Fault    // nil when there is none, or none any more
	due   time.Time // no response leaves earlier
}

type exchangeKey struct{}

type connKey struct{}

// newServer serves p's clients. Each connection counts in p.wg from its accepting to its end.
func newServer(ctx context.Context, p *Proxy) *http.Server {
	return &http.Server{
		Handler:                      http.HandlerFunc(p.serve),
		DisableGeneralOptionsHandler: true,
		BaseContext:                  func(net.Listener) context.Context { return ctx },
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return context.WithValue(ctx, connKey{}, c)
		},
		ConnState: func(_ net.Conn, state http.ConnState) {
			switch state {
			case http.StateNew:
				p.wg.Add(1)
			case http.StateClosed:
				p.wg.Done()
			}
		},
		ErrorLog: log.New(io.Discard, "", 0), // faults are no news
	}
}

// newForward passes requests on to the server at up.
func newForward(up *url.URL) *httputil.ReverseProxy {
	return &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.Out.URL.Scheme, r.Out.URL.Host = up.Scheme, up.Host
			r.Out.URL.RawQuery = r.In.URL.RawQuery // as it was signed
			if r.In.Header.Get("Expect") != "" {
				// The server knows it in lower case only; clients that write it otherwise wait in vain.
				r.Out.Header.Set("Expect", "100-continue")
			}
		},
		Transport: &http.Transport{
			DisableCompression:    true,
			MaxIdleConnsPerHost:   1 << 14,
			IdleConnTimeout:       2 * time.Second, // before the server closes it while a request is under way
			ExpectContinueTimeout: time.Minute,     // a body is sent when the server asks for it
		},
		ModifyResponse: func(resp *http.Response) error {
			return resp.Request.Context().Value(exchangeKey{}).(*exchange).answered(resp)
		},
		ErrorHandler: func(w http.ResponseWriter, r *http.Request, err error) {
			r.Context().Value(exchangeKey{}).(*exchange).refuse(http.StatusBadGateway, "BadGateway", err.Error())
		},
		BufferPool: buffers{},
		ErrorLog:   log.New(io.Discard, "", 0),
	}
}

// serve answers one request.
func (p *Proxy) serve(w http.ResponseWriter, r *http.Request) {
	start := time.Now()
	op, key := parseRequest(r.Method, r.URL)
	x := &exchange{p: p, w: w, r: r, op: op, shape: p.shape.Load()}
	x.fault = x.shape.pick(x.op, key)
	x.due = start.Add(x.shape.delay())
	p.count(func(c *Stats) { c.received(x.op, x.fault) })
	defer p.count(func(c *Stats) { c.InFlight-- })
	if x.fault != nil {
		switch {
		case x.fault.Kind == Slow:
			x.due = x.due.Add(x.fault.For)
		case x.fault.Kind == Unavailable:
			x.refuseUnasked(http.StatusServiceUnavailable, "SlowDown")
			return
		case x.fault.Kind == ETag && r.Header.Get("If-Match") != "":
			x.refuseUnasked(http.StatusPreconditionFailed, "PreconditionFailed")
			return
		}
	}
	r = r.WithContext(context.WithValue(r.Context(), exchangeKey{}, x)) // the server looks at its own one's Body
	if r.ContentLength != 0 {
		r.Body = &upload{r.Body, p}
	}
	w.Header()["Content-Type"] = nil // none is made up
	p.forward.ServeHTTP(w, r)
}

// sleep waits for d; it returns an error when the client has gone or the proxy is being stopped.
func (x *exchange) sleep(d time.Duration) error {
	if d <= 0 {
		return nil
	}
	return pause.For(x.r.Context(), d)
}

// refuse answers with an S3 error of the proxy's own.
func (x *exchange) refuse(status int, code, message string) {
	if x.r.Context().Err() != nil {
		panic(http.ErrAbortHandler) // nobody listens
	}
	x.w.Header().Set("Content-Type", "application/xml")
	x.w.WriteHeader(status)
	_ = xml.NewEncoder(x.w).Encode(struct {
		XMLName       xml.Name `xml:"Error"`
		Code, Message string
	}{Code: code, Message: message})
}

// refuseUnasked answers in the server's place.
func (x *exchange) refuseUnasked(status int, code string) {
	if x.r.Header.Get("Expect") == "" { // else the body comes only when the server asks for it
		if _, err := io.Copy(io.Discard, x.r.Body); err != nil {
			panic(http.ErrAbortHandler)
		}
	}
	_ = x.sleep(time.Until(x.due))
	x.refuse(status, code, "injected by the proxy")
}

// answered delays the server's response, and puts a download in the place of its body.
func (x *exchange) answered(resp *http.Response) error {
	if err := x.sleep(time.Until(x.due)); err != nil {
		return err
	}
	if x.fault != nil && x.fault.Kind == ETag {
		if tag := resp.Header.Get("ETag"); tag != "" {
			resp.Header.Set("ETag", changedETag(tag))
		}
	}
	d := &download{ReadCloser: resp.Body, x: x}
	// S3 gives the length of every object. A body without one is a listing or an error: faults strike after its head,
	// and the bandwidth limit passes it by.
	if resp.ContentLength > 0 {
		d.bandwidth = x.shape.Bandwidth > 0
		if x.fault != nil {
			d.strikeAt = min(int64(x.fault.At*float64(resp.ContentLength)), resp.ContentLength-1)
		}
	}
	resp.Body = d
	return nil
}

// changedETag makes another ETag of the same length out of one, quotes kept.
func changedETag(tag string) string {
	i := strings.IndexAny(tag, "0123456789abcdefABCDEF")
	switch {
	case i < 0:
		return tag
	case tag[i] == '0':
		return tag[:i] + "f" + tag[i+1:]
	}
	return tag[:i] + "0" + tag[i+1:]
}

// errStruck ends a connection by a fault.
var errStruck = errors.New("fault injected")

// strike carries out the faults that break or delay a response at a point. It returns an error when the connection must
// end.
func (x *exchange) strike(fault *Fault) error {
	if fault.Kind != Stall && fault.Kind != Reset && fault.Kind != Truncate {
		return nil
	}
	if err := http.NewResponseController(x.w).Flush(); err != nil { // what came before
		return err
	}
	if fault.Kind == Stall {
		return x.sleep(fault.For)
	}
	if c, ok := x.r.Context().Value(connKey{}).(*net.TCPConn); ok && fault.Kind == Reset {
		_ = c.SetLinger(0)
	}
	return errStruck
}

// download is a response's body on its way to the client: limited, counted, and struck by the fault at its place.
type download struct {
	io.ReadCloser
	x         *exchange
	bandwidth bool
	sent      int64
	strikeAt  int64
}

// bandwidthChunk is the grain of the bandwidth limit.
const bandwidthChunk = 64 << 10

func (d *download) Read(b []byte) (int, error) {
	x := d.x
	if fault := x.fault; fault != nil {
		if d.sent == d.strikeAt {
			x.fault = nil
			if err := x.strike(fault); err != nil {
				return 0, err
			}
		} else {
			b = b[:min(int64(len(b)), d.strikeAt-d.sent)]
		}
	}
	if d.bandwidth {
		b = b[:min(len(b), bandwidthChunk)]
	}
	n, err := d.ReadCloser.Read(b)
	if d.bandwidth && n > 0 {
		if err := x.sleep(x.shape.reserve(n, time.Now())); err != nil {
			return 0, err
		}
	}
	if x.op == OpGet { // counted first, so that a client that has it all finds it in the counters
		x.p.count(func(c *Stats) { c.GetBytes += int64(n) })
	}
	d.sent += int64(n)
	return n, err
}

// upload counts the bytes of a request's body.
type upload struct {
	io.ReadCloser
	p *Proxy
}

func (u *upload) Read(b []byte) (int, error) {
	n, err := u.ReadCloser.Read(b)
	u.p.count(func(c *Stats) { c.PutBytes += int64(n) })
	return n, err
}

// bufferSize takes a whole sample of the usual size.
const bufferSize = 160 << 10

var bufferPool = sync.Pool{New: func() any { return new([bufferSize]byte) }}

// buffers is the reverse proxy's way to bufferPool.
type buffers struct{}

func (buffers) Get() []byte  { return bufferPool.Get().(*[bufferSize]byte)[:] }
func (buffers) Put(b []byte) { bufferPool.Put((*[bufferSize]byte)(b)) }

// parseRequest returns what a request does, and its key without the bucket, which is empty for a bucket.
func parseRequest(method string, u *url.URL) (op Op, key string) {
	_, key, _ = strings.Cut(strings.TrimPrefix(u.Path, "/"), "/")
	return opOf(method, key, u.RawQuery), key
}

// opOf sorts requests. An object's sub-resources (?acl, ?tagging, ?uploadId, ...) are no reads of
// its content; AWS clients mark the plain operation with x-id=GetObject, and pre-signed URLs carry
// X-Amz-*, and partNumber and versionId read content.
func opOf(method, key, query string) Op {
	if key == "" {
		if method == "GET" && (query == "" || strings.Contains(query, "list-type") ||
			strings.Contains(query, "prefix=")) {
			return OpList
		}
		return OpOther
	}
	for q := range strings.SplitSeq(query, "&") {
		name, _, _ := strings.Cut(q, "=")
		switch {
		case name == "", name == "x-id", name == "partNumber", name == "versionId":
		case len(name) > 6 && strings.EqualFold(name[:6], "x-amz-"):
		case name == "uploadId" && method == "PUT":
		default:
			return OpOther
		}
	}
	switch method {
	case "GET":
		return OpGet
	case "HEAD":
		return OpHead
	case "PUT":
		return OpPut
	}
	return OpOther
}
