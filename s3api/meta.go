package s3api

import (
	"context"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/objstore/s3"
)

const (
	// maxMeta bounds the headers that a dataset remembers. With more, it begins again.
	maxMeta = 16 << 20
	// metaTime is how long a HEAD waits for the origin: the endpoint has the rest of the answer.
	metaTime = 5 * time.Second
)

// described begin the headers of an object that a listing does not have.
var described = []string{
	"Cache-Control", "Content-Disposition", "Content-Encoding", "Content-Language", "Content-Type", "Expires",
	"X-Amz-Checksum-", "X-Amz-Meta-",
	"X-Amz-Missing-Meta", "X-Amz-Server-Side-Encryption", "X-Amz-Storage-Class", "X-Amz-Version-Id",
	"X-Amz-Website-Redirect-Location",
}

// meta is what the listing does not say of held objects. A HEAD asks the origin once a listing: metadata may change
// while bytes and ETag, and so the dataset's version, stay.
type meta struct {
	mu    sync.Mutex
	of    *catalog.Manifest
	at    time.Time // of the listing
	files map[int]http.Header
	size  int
}

// describe adds what is known of a file; for a HEAD what the origin says, if it has the same version.
func (mt *meta) describe(d *dataset, r *http.Request, m *catalog.Manifest, file int, h http.Header) {
	at := d.Listed()
	mt.mu.Lock()
	if mt.of != m || !mt.at.Equal(at) || mt.size > maxMeta {
		mt.of, mt.at, mt.files, mt.size = m, at, map[int]http.Header{}, 0
	}
	known, ok := mt.files[file]
	mt.mu.Unlock()
	if !ok && r.Method == http.MethodHead && d.Origin != nil {
		if known = d.head(r.Context(), m, file); known != nil {
			mt.mu.Lock()
			if mt.of == m && mt.at.Equal(at) {
				mt.files[file] = known
				mt.size += 128
				for name, values := range known {
					mt.size += 64 + len(name) + len(strings.Join(values, ""))
				}
			}
			mt.mu.Unlock()
		}
	}
	for name, values := range known {
		if !strings.HasPrefix(name, "X-Amz-Checksum-") ||
			r.Header.Get("X-Amz-Checksum-Mode") != "" && r.Header.Get("Range") == "" {
			copyHeader(h, http.Header{name: values})
		}
	}
}

// head asks the origin for a file's headers. They are empty if it has another version by now, and nil if it does not
// say.
func (d *dataset) head(ctx context.Context, m *catalog.Manifest, file int) http.Header {
	ctx, cancel := context.WithTimeout(ctx, metaTime)
	defer cancel()
	d.server.count.forwarded.Add(1)
	resp, err := d.Origin.Forward(ctx,
		s3.Request{Method: http.MethodHead, Key: m.Prefix() + m.Path(file),
			Header: http.Header{"X-Amz-Checksum-Mode": {"ENABLED"}}})
	if err != nil {
		return nil
	}
	_ = resp.Body.Close()
	known := http.Header{}
	switch {
	case resp.StatusCode != http.StatusOK:
		return nil
	case strings.Trim(resp.Header.Get("ETag"), `"`) != m.ETag(file):
		return known
	}
	for name, values := range resp.Header {
		if slices.ContainsFunc(described, func(p string) bool { return strings.HasPrefix(name, p) }) &&
			!strings.Contains(name, "-Customer-") {
			known[name] = values
		}
	}
	return known
}
