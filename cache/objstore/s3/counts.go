package s3

import (
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
)

// requestCounts are the counters behind [Store.Requests].
type requestCounts struct {
	get, head, list, put, del, received, sent atomic.Int64
}

// request counts a request that net/http sends. A [getter] counts its own.
func (c *requestCounts) request(r *http.Request) {
	_, key, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/"), "/")
	switch {
	case r.Method == http.MethodGet && isListing(r):
		c.list.Add(1)
	case r.Method == http.MethodGet && key != "":
		c.get.Add(1)
	case r.Method == http.MethodPut, r.Method == http.MethodPost:
		c.put.Add(1)
		n := r.ContentLength
		if n < 0 { // a forwarded upload that is sent in chunks
			n, _ = strconv.ParseInt(r.Header.Get("X-Amz-Decoded-Content-Length"), 10, 64)
		}
		c.sent.Add(n)
	case r.Method == http.MethodDelete:
		c.del.Add(1)
	default:
		c.head.Add(1)
	}
}
