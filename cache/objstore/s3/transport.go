package s3

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"hash/maphash"
	"io"
	"net/http"
	"net/url"
	"os"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// parseEndpoint returns an endpoint's URL, which has a scheme and a host. Its errors do not repeat the text, which may
// contain a password.
func parseEndpoint(text string) (*url.URL, error) {
	if text == "" {
		text = "s3.amazonaws.com"
	}
	if !strings.Contains(text, "://") {
		text = "https://" + text
	}
	u, err := url.Parse(text)
	switch {
	case err != nil:
		return nil, errors.New("the endpoint is not a URL")
	case u.Scheme != "http" && u.Scheme != "https":
		return nil, errors.New("the endpoint's scheme is neither http nor https")
	case u.User != nil:
		return nil, errors.New(
			"the endpoint contains a user name; credentials go into AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
	case u.Host == "" || u.Hostname() == "":
		return nil, errors.New("the endpoint names no host")
	case (u.Path != "" && u.Path != "/") || u.RawQuery != "" || u.Fragment != "":
		return nil, errors.New("the endpoint has a path; the bucket is part of the source, s3://BUCKET/PREFIX")
	}
	if _, err := strconv.ParseUint("0"+u.Port(), 10, 16); err != nil {
		return nil, errors.New("the endpoint's port is greater than 65535")
	}
	usual := map[string]string{"http": ":80", "https": ":443"}[u.Scheme]
	return &url.URL{Scheme: u.Scheme, Host: strings.TrimSuffix(strings.ToLower(u.Host), usual)}, nil
}

// answerGuard sits between minio-go and the transport and checks what minio-go does not: the status of an answer
// ([withStatus]), and that a listing is one and ends. minio-go takes any XML for an empty listing, even a wrong
// endpoint's "It works!", and reads a page as long as bytes come, and pages as long as there are more ([pages]).
type answerGuard struct {
	http.RoundTripper
	slow http.RoundTripper // for copies, and completed uploads, whose parts some stores copy
}

// pageTimeout bounds one page of a listing, from the request to its last byte, and the answers that begin an upload, or
// say in which of Amazon's regions the bucket is. Stores take 0.1 to 1 s.
const pageTimeout = 30 * time.Second

// maxPage bounds a page's bytes. 1,000 keys of 1,024 bytes, percent-encoded, take under 5 MiB. Tests lower it.
var maxPage int64 = 16 << 20

var (
	errNotXML   = errors.New("the answer is a web page")
	errOtherXML = errors.New("the answer is other XML")
	errSlowPage = fmt.Errorf("no whole answer arrived within %v", pageTimeout)
	errLongPage = fmt.Errorf("the answer has more than %d MiB", maxPage>>20)
)

func (g answerGuard) RoundTrip(r *http.Request) (*http.Response, error) {
	if isCopy(r) || r.Method == http.MethodPost && r.URL.Query().Has("uploadId") {
		resp, err := g.slow.RoundTrip(r)
		if err == nil { // as long as bytes come: some stores send spaces while they copy
			resp.Body = &pageBody{bufio.NewReader(resp.Body), resp.Body, r.Context(), r.Context(), func() {}, maxPage}
		}
		return resp, err
	}
	list := isListing(r)
	if !list && !r.URL.Query().Has("location") {
		resp, err := g.RoundTripper.RoundTrip(r)
		if status, ok := r.Context().Value(statusKey{}).(*int); ok && err == nil {
			*status = resp.StatusCode
		}
		return resp, err
	}
	if p, ok := r.Context().Value(pagesKey{}).(*pages); ok && list {
		p.next = true
		if err := p.once("continuation token", r.URL.Query().Get("continuation-token")); err != nil {
			return nil, err
		}
	}
	ctx, cancel := context.WithTimeout(r.Context(), pageTimeout)
	page := &pageBody{caller: r.Context(), ctx: ctx, cancel: cancel, left: maxPage}
	resp, err := g.RoundTripper.RoundTrip(r.WithContext(ctx))
	if err != nil {
		err = page.cause(err)
		cancel()
		return nil, err
	}
	page.body, page.Closer, resp.Body = bufio.NewReader(resp.Body), resp.Body, page
	ofWeb := strings.HasPrefix(resp.Header.Get("Content-Type"), "text/html") // minio-go takes any 404 for NoSuchBucket
	if resp.StatusCode == http.StatusOK || resp.StatusCode == http.StatusNotFound && ofWeb {
		if err := page.isResult(resp.Header.Get("Content-Type")); err != nil {
			_ = page.Close()
			return nil, err
		}
	}
	return resp, nil
}

// root finds the name of XML's first element.
var root = regexp.MustCompile(`^(?:\xef\xbb\xbf)?\s*(?:<\?[^>]*\?>\s*)?<(?:\w+:)?(\w+)`)

// isResult returns an error for an answer that is certainly not a listing. The decoder reports text that is not XML.
func (b *pageBody) isResult(contentType string) error {
	if strings.HasPrefix(contentType, "text/html") || strings.HasPrefix(contentType, "application/json") {
		return errNotXML
	}
	start, _ := b.body.Peek(256) // as many as there are
	if m := root.FindSubmatch(start); m != nil && !bytes.HasSuffix(m[1], []byte("Result")) &&
		string(m[1]) != "LocationConstraint" {
		return fmt.Errorf("%w: <%s>", errOtherXML, m[1])
	}
	return nil
}

// isListing reports whether a request lists keys, versions, uploads or their parts, or begins an upload.
func isListing(r *http.Request) bool {
	query := "&" + r.URL.RawQuery
	return r.Method == http.MethodGet && (strings.Contains(query, "&list-type=") ||
		strings.Contains(query, "&versions=") || strings.Contains(query, "&uploadId=")) ||
		r.Method != http.MethodHead && strings.Contains(query, "&uploads=")
}

// pageBody is the body of a page of a listing.
type pageBody struct {
	body *bufio.Reader
	io.Closer
	caller, ctx context.Context // ctx has the page's deadline
	cancel      context.CancelFunc
	left        int64
}

func (b *pageBody) Read(p []byte) (int, error) {
	if b.left <= 0 {
		return 0, errLongPage
	}
	n, err := b.body.Read(p[:min(int64(len(p)), b.left)])
	b.left -= int64(n)
	if err != nil && !errors.Is(err, io.EOF) {
		err = b.cause(err)
	}
	return n, err
}

// cause is err, or that the page timed out.
func (b *pageBody) cause(err error) error {
	if b.ctx.Err() != nil && b.caller.Err() == nil {
		return errSlowPage
	}
	return err
}

func (b *pageBody) Close() error {
	err := b.Closer.Close()
	b.cancel()
	return err
}

type statusKey struct{}

// withStatus makes answerGuard write the status of the answer to minio-go's request, which minio-go hides, to status.
func withStatus(ctx context.Context, status *int) context.Context {
	return context.WithValue(ctx, statusKey{}, status)
}

type pagesKey struct{}

// pages records one listing's pages to detect a listing that goes in circles: each page must have a new token, and
// begin with a new key.
type pages struct {
	seen map[uint64]struct{} // hashes: a large listing has many pages, and tokens of some hundred bytes
	next bool                // the next key is a page's first
}

var pagesSeed = maphash.MakeSeed()

// once records a token, which is empty for the first page, or a page's first key.
func (p *pages) once(what, text string) error {
	h := maphash.String(pagesSeed, what+text)
	if _, ok := p.seen[h]; ok {
		return fmt.Errorf("the listing goes in circles: the %s %.200q came twice%w", what, text, errCircle)
	}
	if p.seen == nil {
		p.seen = make(map[uint64]struct{})
	}
	p.seen[h] = struct{}{}
	return nil
}

var errCircle = errors.New("") // the error that wraps it says it

// newTransport returns a transport for hundreds of small concurrent requests.
func newTransport(cfg Config) (*http.Transport, error) {
	t := &http.Transport{
		Proxy:                 http.ProxyFromEnvironment,
		DialContext:           dial,
		TLSHandshakeTimeout:   10 * time.Second,
		ResponseHeaderTimeout: headTimeout,
		MaxIdleConns:          2 * maxIdle, // the endpoint, and a region's
		MaxIdleConnsPerHost:   maxIdle,
		IdleConnTimeout:       idleTimeout,
		// Objects are delivered as they are stored; gzip would also make their length unknown.
		DisableCompression: true,
		// One connection per request: HTTP/2 would put all on one, behind one flow-control window and one lock.
		ForceAttemptHTTP2: false,
		TLSNextProto:      map[string]func(string, *tls.Conn) http.RoundTripper{},
		// A body passes through the read buffer only if a read is smaller than it; ReadAt reads large slices past it.
		// 16 KiB holds the headers and a small object in one read, and costs 16 MiB for 1,024 connections.
		ReadBufferSize:         16 << 10,
		WriteBufferSize:        4 << 10, // a request's head is 1 KiB
		MaxResponseHeaderBytes: maxHead,
	}
	if cfg.CABundle != "" {
		pem, err := os.ReadFile(cfg.CABundle)
		if err != nil {
			return nil, err
		}
		pool, err := x509.SystemCertPool()
		if err != nil {
			pool = x509.NewCertPool()
		}
		if !pool.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("%s contains no certificate", cfg.CABundle)
		}
		t.TLSClientConfig = &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}
	}
	return t, nil
}
