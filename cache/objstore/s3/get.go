package s3

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/minio/minio-go/v7"
)

// getter sends the GETs of an S3 store over [wires]. A store has none, and minio-go sends its GETs, if signing and
// sending is not enough: for Amazon, whose regions have their own hosts, and behind an HTTP proxy.
type getter struct {
	wires  wires
	signer signer
	host   string
	root   string // "/BUCKET/", percent-encoded
	s      *Store
}

func newGetter(s *Store, host, region string) *getter {
	config := cmp.Or(s.transport.TLSClientConfig, &tls.Config{MinVersion: tls.VersionTLS12})
	return &getter{
		wires:  wires{dial: dialer(host, s.secure(), config), maxIdle: maxIdle},
		signer: signer{region: region, pays: s.pays, sse: s.sse},
		host:   host, root: string(AppendPath(nil, "/"+s.bucket+"/")), s: s,
	}
}

// answer is a 2xx answer to a GET.
type answer struct {
	status       int
	body         io.ReadCloser
	length       int64 // -1: unknown
	etag         string
	contentRange string
	modified     time.Time // zero: unknown
	note         string    // of an object that [Store.PutNoted] stored
}

// errAskOtherwise means that minio-go should send a request: it rejects text that no header can contain.
var errAskOtherwise = errors.New("not a request for our own connections")

// get requests bytes of an object; etag, rangeOf or version may be empty. Its errors are those of minio-go. It also
// reports whether the clock was off, and is not any more.
func (g *getter) get(ctx context.Context, key, etag, rangeOf, version string) (a answer, skewed bool, err error) {
	v := g.s.keys.get(ctx)
	if !visible(etag) || !visible(v.AccessKeyID) || !visible(v.SessionToken) || !visible(version) {
		return answer{}, false, errAskOtherwise
	}
	var signed time.Time
	g.s.counts.get.Add(1)
	w, err := g.wires.do(ctx, etag, func(b, scratch []byte) (head, spare []byte) {
		signed = g.s.time.now()
		b = append(b, "GET "...)
		b = append(b, g.root...)
		b = AppendPath(b, key)
		r := signedGet{host: g.host, path: b[len("GET "):], etag: etag, rangeOf: rangeOf}
		if version != "" {
			r.query = "versionId=" + url.QueryEscape(version)
			b = append(b, '?')
			b = append(b, r.query...)
		}
		b = append(b, " HTTP/1.1\r\nUser-Agent: shoal\r\n"...)
		return g.signer.appendHeaders(b, scratch, &r, &v, signed)
	})
	if err != nil {
		return answer{}, false, err
	}
	h := &w.head
	if h.status == http.StatusOK || h.status == http.StatusPartialContent {
		a = answer{
			status: h.status, body: w.body(), length: h.length,
			etag:         string(bytes.TrimSuffix(bytes.TrimPrefix(h.etag, []byte{'"'}), []byte{'"'})),
			contentRange: string(h.contentRange), note: string(h.note),
		}
		a.modified, _ = http.ParseTime(string(h.lastModified)) // zero if it is none
		return a, false, nil
	}
	text, _ := io.ReadAll(io.LimitReader(w.body(), maxErrorText)) // a part is enough
	err = errorAnswer(h, bytes.TrimSpace(text))
	skewed = g.s.time.refused(h.status, string(h.date), signed)
	_ = w.Close()
	return answer{}, skewed, err
}

// visible reports whether s can be in a header, and signed, without escapes.
func visible(s string) bool {
	return strings.IndexFunc(s, func(r rune) bool { return r <= ' ' || r > '~' }) < 0
}

// maxErrorText is the most bytes read of an error's body. S3's errors have 300.
const maxErrorText = 64 << 10

func errorAnswer(h *answerHead, text []byte) error {
	e := minio.ErrorResponse{StatusCode: h.status}
	if err := xml.Unmarshal(text, &e); err != nil {
		e = minio.ErrorResponse{StatusCode: h.status, Code: http.StatusText(h.status), Message: string(text)}
	}
	e.Region = cmp.Or(strings.TrimSpace(e.Region), string(h.region))
	e.Code = cmp.Or(e.Code, fmt.Sprint("HTTP ", h.status))
	return e
}
