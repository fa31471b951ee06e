package s3

import (
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"

	"github.com/shoalfs/shoal/cache/objstore"
)

// requestCounts are the counters behind [objstore.Requests].
type requestCounts struct {
	get, head, list, put, del, received, sent atomic.Int64
}

func (c *requestCounts) load() objstore.Requests {
	return objstore.Requests{
		Get: c.get.Load(), Head: c.head.Load(), List: c.list.Load(), Put: c.put.Load(), Delete: c.del.Load(),
		Received: c.received.Load(), Sent: c.sent.Load(),
	}
}

// countedBody counts bytes as they come.
type countedBody struct {
	io.ReadCloser
	received *atomic.Int64
}

func (b countedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.received.Add(int64(n))
	return n, err
}

// countedRequests counts requests that net/http sends. A [getter] counts its own.
type countedRequests struct {
	next   http.RoundTripper
	counts *requestCounts
}

func (c countedRequests) RoundTrip(r *http.Request) (*http.Response, error) {
	_, key, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/"), "/")
	q := r.URL.Query()
	switch {
	case r.Method == http.MethodGet && key != "" && !q.Has("uploadId"):
		c.counts.get.Add(1)
	case r.Method == http.MethodGet && (q.Has("list-type") || q.Has("versions") || q.Has("uploads") ||
		q.Has("uploadId")):
		c.counts.list.Add(1)
	case r.Method == http.MethodPut, r.Method == http.MethodPost:
		c.counts.put.Add(1)
		n := r.ContentLength
		if n < 0 { // a forwarded upload that is sent in chunks
			n, _ = strconv.ParseInt(r.Header.Get("X-Amz-Decoded-Content-Length"), 10, 64)
		}
		c.counts.sent.Add(n)
	case r.Method == http.MethodDelete:
		c.counts.del.Add(1)
	default:
		c.counts.head.Add(1)
	}
	return c.next.RoundTrip(r)
}
