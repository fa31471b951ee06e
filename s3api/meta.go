package s3api

import (
	"net/http"
	"strings"
	"sync"

	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/objstore/s3"
)

// mostMeta is how many objects' headers are remembered: some 100 bytes each.
const mostMeta = 1 << 16

// meta is what the listing does not say of held objects: Content-Type, user metadata, checksums. A HEAD asks the origin once.
type meta struct {
	mu    sync.Mutex
	of    *catalog.Manifest
	files map[int]http.Header
}

// describe adds what is known of a file; for a HEAD what the origin says, if it has the same version.
func (mt *meta) describe(d *dataset, r *http.Request, m *catalog.Manifest, file int, h http.Header) {
	mt.mu.Lock()
	if mt.of != m || len(mt.files) >= mostMeta {
		mt.of, mt.files = m, map[int]http.Header{}
	}
	known, ok := mt.files[file]
	mt.mu.Unlock()
	if !ok {
		if r.Method != http.MethodHead || d.Origin == nil {
			return
		}
		d.server.count.forwarded.Add(1)
		resp, err := d.Origin.Forward(r.Context(), s3.Request{Method: http.MethodHead, Key: m.Prefix() + m.Path(file), Header: http.Header{"X-Amz-Checksum-Mode": {"ENABLED"}}})
		if err != nil {
			return // the bytes are here all the same
		}
		_ = resp.Body.Close()
		if resp.StatusCode != http.StatusOK || strings.Trim(resp.Header.Get("ETag"), `"`) != m.ETag(file) {
			return
		}
		known = http.Header{}
		for name, values := range resp.Header {
			if name == "Content-Type" || name == "Content-Encoding" || name == "Cache-Control" || name == "Content-Disposition" || name == "Content-Language" ||
				strings.HasPrefix(name, "X-Amz-Meta-") || strings.HasPrefix(name, "X-Amz-Checksum-") {
				known[name] = values
			}
		}
		mt.mu.Lock()
		if mt.of == m {
			mt.files[file] = known
		}
		mt.mu.Unlock()
	}
	for name, values := range known {
		if strings.HasPrefix(name, "X-Amz-Checksum-") && (r.Header.Get("X-Amz-Checksum-Mode") == "" || r.Header.Get("Range") != "") {
			continue
		}
		copyHeader(h, http.Header{name: values})
	}
}
