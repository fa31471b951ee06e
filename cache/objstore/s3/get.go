package s3

import (
	"bytes"
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
	"github.com/minio/minio-go/v7/pkg/s3utils"
)

// getter sends the GETs of an S3 store over [wires]. A store has none, and minio-go sends its GETs, if signing and
// sending is not enough: for Amazon, whose regions have their own hosts, and behind an HTTP proxy.
type getter struct {
	wires  wires
	signer signer
	host   string
	root   string // "/BUCKET/", percent-encoded
	keys   *keyring
	time   *clock
	counts *requestCounts
}

// newGetter returns a getter for the bucket at host, or nil.
func newGetter(cfg Config, host string, secure bool, region string, transport *http.Transport, keys *keyring,
	time *clock, counts *requestCounts) *getter {
	u := &url.URL{Scheme: "http", Host: host}
	if secure {
		u.Scheme = "https"
	}
	if proxy, err := transport.Proxy(&http.Request{URL: u}); proxy != nil || err != nil ||
		s3utils.IsAmazonEndpoint(*u) || region == "" {
		return nil
	}
	config := &tls.Config{MinVersion: tls.VersionTLS12}
	if transport.TLSClientConfig != nil {
		config = transport.TLSClientConfig.Clone()
	}
	return &getter{
		wires:  wires{dial: dialer(host, secure, config), maxIdle: maxIdle},
		signer: signer{region: region, pays: cfg.Store.RequesterPays, sse: keyHeaders(cfg.Store.CustomerKey)},
		host:   host, root: string(AppendPath(nil, "/"+cfg.Bucket+"/")), keys: keys, time: time, counts: counts,
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
	v := g.keys.get(ctx)
	if !v.SignerType.IsV4() && !v.SignerType.IsAnonymous() || !visible(etag) || !visible(v.AccessKeyID) ||
		!visible(v.SessionToken) || !visible(version) {
		return answer{}, false, errAskOtherwise
	}
	var signed time.Time
	g.counts.get.Add(1)
	w, err := g.wires.do(ctx, etag, func(b, scratch []byte) (head, spare []byte) {
		signed = g.time.now()
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
	err = errorAnswer(h, w.text(maxErrorText))
	skewed = g.time.refused(h.status, string(h.date), signed)
	_ = w.Close()
	return answer{}, skewed, err
}

// visible reports whether s can be in a header, and signed, without escapes.
func visible(s string) bool {
	return strings.IndexFunc(s, func(r rune) bool { return r <= ' ' || r > '~' }) < 0
}

// maxErrorText is the most bytes read of an error's body. S3's errors have 300.
const maxErrorText = 64 << 10

// errorAnswer returns an error answer as an error of minio-go.
func errorAnswer(h *answerHead, text []byte) error {
	e := minio.ErrorResponse{StatusCode: h.status}
	if err := xml.Unmarshal(text, &e); err != nil {
		e = minio.ErrorResponse{StatusCode: h.status, Code: http.StatusText(h.status), Message: string(text)}
	}
	if e.Region = strings.TrimSpace(e.Region); e.Region == "" {
		e.Region = string(h.region)
	}
	if e.Code == "" {
		e.Code = fmt.Sprint("HTTP ", h.status)
	}
	return e
}
