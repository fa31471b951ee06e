package s3

import (
	"crypto/md5" //nolint:gosec // S3 requires the key's MD5, to detect a corrupted key; nothing is secured by it.
	"encoding/base64"
	"errors"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"time"

	"github.com/shoalfs/shoal/cache/objstore"
)

// checkCustomerKey refuses to send the key over plain HTTP, as S3 refuses to take it, unless it stays on this machine.
func checkCustomerKey(k objstore.CustomerKey, at *url.URL) error {
	if k.IsZero() || at.Scheme == "https" {
		return nil
	}
	if addr, err := netip.ParseAddr(at.Hostname()); err == nil && addr.IsLoopback() || at.Hostname() == "localhost" {
		return nil
	}
	return errors.New("with SSE-C each request carries the key, and over http:// it could be read in transit")
}

// The headers of SSE-C and of requester pays.
const (
	headerPayer    = "X-Amz-Request-Payer"
	headerKey      = "X-Amz-Server-Side-Encryption-Customer-Key"
	payerRequester = "requester"
)

type header struct{ name, value string }

// keyHeaders returns the headers of a customer's key, in the order of their names.
func keyHeaders(k objstore.CustomerKey) []header {
	if k.IsZero() {
		return nil
	}
	sum := md5.Sum(k.Bytes()) //nolint:gosec // see the import
	return []header{
		{"X-Amz-Server-Side-Encryption-Customer-Algorithm", "AES256"},
		{headerKey, base64.StdEncoding.EncodeToString(k.Bytes())},
		{headerKey + "-Md5", base64.StdEncoding.EncodeToString(sum[:])},
	}
}

// extraHeaders adds to minio-go's requests headers that it cannot add to all of them: requester pays, and the
// customer's key, even on an unencrypted connection, and If-Match of a deletion or a PUT. S3 requires them to be
// signed, so the requests are signed again; also if this machine's clock is off.
type extraHeaders struct {
	s    *Store
	next http.RoundTripper
}

func (h extraHeaders) RoundTrip(r *http.Request) (*http.Response, error) {
	signed := time.Now() // by minio-go, or by send
	if h.s.time.off() {
		signed = h.s.time.now()
	}
	resp, err := h.send(r)
	if err != nil || !h.s.time.refused(resp.StatusCode, resp.Header.Get("Date"), signed) ||
		r.Body != nil && r.Body != http.NoBody && r.GetBody == nil {
		return resp, err
	}
	_ = resp.Body.Close()
	if r = r.Clone(r.Context()); r.GetBody != nil {
		if r.Body, err = r.GetBody(); err != nil {
			return nil, err
		}
	}
	return h.send(r)
}

func (h extraHeaders) send(r *http.Request) (*http.Response, error) {
	h.s.counts.request(r)
	sse := len(h.s.sse) > 0 && takesKey(r)
	match := objstore.MatchOf(r.Context())
	if !sse && !h.s.pays && match == "" && !h.s.time.off() {
		return h.next.RoundTrip(r)
	}
	r = r.Clone(r.Context())
	if h.s.pays {
		r.Header.Set(headerPayer, payerRequester)
	}
	if match != "" && r.Method != http.MethodHead && !strings.HasPrefix(match, weakPrefix) {
		r.Header.Set("If-Match", `"`+match+`"`)
	}
	if sse {
		for _, e := range h.s.sse {
			r.Header.Set(e.name, e.value)
			if isCopy(r) { // of an object that has the same key
				r.Header.Set(headerSource+"-"+strings.TrimPrefix(e.name, "X-Amz-"), e.value)
			}
		}
	}
	// Credential=ID/DAY/REGION/s3/aws4_request; anonymous requests have none.
	_, scope, _ := strings.Cut(r.Header.Get("Authorization"), "Credential=")
	// signed chunk by chunk with the request
	if parts := strings.SplitN(scope, "/", 4); len(parts) == 4 &&
		!strings.HasPrefix(r.Header.Get("X-Amz-Content-Sha256"), "STREAMING-AWS4") {
		r.Header.Del("X-Amz-Security-Token")
		if err := sign(r, h.s.keys.cur.Load().value, parts[2], h.s.time.now()); err != nil {
			return nil, err
		}
	}
	return h.next.RoundTrip(r)
}

// takesKey reports whether a request, whose path begins with the bucket, reads or writes an object's bytes or
// metadata. S3 accepts no key in listings and deletions.
func takesKey(r *http.Request) bool {
	_, key, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/"), "/")
	return key != "" && r.Method != http.MethodDelete
}
