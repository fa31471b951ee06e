package objstore

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"iter"
	"net"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"
	"github.com/minio/minio-go/v7/pkg/s3utils"
)

// S3Config says which bucket, where, and as whom. What is left empty comes from the AWS environment:
// AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, AWS_REGION, AWS_DEFAULT_REGION, AWS_ACCESS_KEY_ID,
// AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_PROFILE, AWS_CONFIG_FILE,
// AWS_SHARED_CREDENTIALS_FILE, AWS_CA_BUNDLE, AWS_NO_SIGN_REQUEST, container, web identity and
// instance roles.
type S3Config struct {
	Endpoint string // URL, or host[:port] for https; none at all means Amazon S3
	Region   string
	Bucket   string

	AccessKeyID, SecretAccessKey, SessionToken string
	Anonymous                                  bool // sign nothing

	CABundle string // PEM file of certificate authorities to trust besides the system's

	// WeakETag accepts objects whose listing has no ETag and identifies their version by size
	// and modification time (1 s). Some gateways list such objects.
	WeakETag bool

	// MaxConns is how many idle connections are kept for the next requests. It should be at
	// least the number of requests in flight, or connections are opened and closed all the time.
	// Default 1024.
	MaxConns int
}

// S3 is a bucket behind the S3 API.
//
// It tries every request once: retrying is [Retry]'s. (minio-go sleeps up to 200 ms after a temporary
// failure even so, before it returns the error; that adds to the policy's sleeps.) Requests use path style, HTTP/1.1 and, to name
// the version, If-Match. It serves general-purpose buckets, which list in key order; S3 Express
// directory buckets do not.
type S3 struct {
	core      minio.Core
	creds     *credentials.Credentials
	bucket    string
	endpoint  string // URL
	weakETag  bool
	transport *http.Transport
}

var _ Store = (*S3)(nil)

// NewS3 prepares access to a bucket. It resolves configuration and credentials and reports what is
// wrong with them; it does not contact the store (only, without other credentials, the instance
// metadata service, for a second or two).
func NewS3(ctx context.Context, cfg S3Config) (*S3, error) {
	invalid := func(remedy string, err error) error {
		return &Error{Op: "open", Key: "s3://" + cfg.Bucket, Kind: KindInvalid, Err: err, Remedy: remedy}
	}
	if err := s3utils.CheckValidBucketName(cfg.Bucket); err != nil {
		return nil, invalid("check the bucket's name", err)
	}
	if err := cfg.fillFromEnv(); err != nil {
		return nil, err
	}
	host, secure, err := parseEndpoint(cfg.Endpoint)
	if err != nil {
		return nil, invalid("AWS_ENDPOINT_URL is like http://127.0.0.1:9000 or https://s3.eu-central-1.amazonaws.com", err)
	}
	setDefault(&cfg.MaxConns, 1024)
	transport, err := newTransport(cfg)
	if err != nil {
		return nil, invalid("check AWS_CA_BUNDLE", err)
	}
	client := &http.Client{Transport: transport, Timeout: 10 * time.Second}
	creds, err := awsCredentials(ctx, cfg, client)
	if err != nil {
		transport.CloseIdleConnections()
		return nil, err
	}
	region := cfg.Region
	if region == "" && !s3utils.IsAmazonEndpoint(url.URL{Scheme: "https", Host: host}) {
		// Amazon's region is asked for once; other servers rarely check it, and minio-go would
		// ask them at every start.
		region = "us-east-1"
	}
	core, err := minio.NewCore(host, &minio.Options{
		Creds:        creds,
		Secure:       secure,
		Transport:    listGuard{transport},
		Region:       region,
		BucketLookup: minio.BucketLookupPath,
		MaxRetries:   1,
	})
	if err != nil {
		transport.CloseIdleConnections()
		return nil, invalid("AWS_ENDPOINT_URL is like http://127.0.0.1:9000 or https://s3.eu-central-1.amazonaws.com", err)
	}
	core.SetAppInfo("shoal", "1")
	return &S3{
		core: *core, creds: creds, bucket: cfg.Bucket, weakETag: cfg.WeakETag, transport: transport,
		endpoint: core.EndpointURL().Scheme + "://" + core.EndpointURL().Host,
	}, nil
}

// Endpoint returns the endpoint's URL, without a slash at its end.
func (s *S3) Endpoint() string { return s.endpoint }

// Close closes the idle connections. Requests under way are not disturbed.
func (s *S3) Close() { s.transport.CloseIdleConnections() }

// parseEndpoint splits an endpoint into host[:port] and whether it is https. Its errors do not
// repeat the text, which may hold a password.
func parseEndpoint(text string) (host string, secure bool, err error) {
	if text == "" {
		return "s3.amazonaws.com", true, nil
	}
	if !strings.Contains(text, "://") {
		text = "https://" + text
	}
	u, err := url.Parse(text)
	switch {
	case err != nil:
		return "", false, errors.New("the endpoint is not a URL")
	case u.Scheme != "http" && u.Scheme != "https":
		return "", false, errors.New("the endpoint's scheme is neither http nor https")
	case u.User != nil:
		return "", false, errors.New("the endpoint holds a user name; credentials go into AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
	case u.Host == "" || u.Hostname() == "":
		return "", false, errors.New("the endpoint names no host")
	case (u.Path != "" && u.Path != "/") || u.RawQuery != "" || u.Fragment != "":
		return "", false, errors.New("the endpoint has a path; the bucket is part of the source, s3://BUCKET/PREFIX")
	}
	host = strings.ToLower(u.Host)
	if u.Scheme == "http" {
		host = strings.TrimSuffix(host, ":80")
	} else {
		host = strings.TrimSuffix(host, ":443")
	}
	return host, u.Scheme == "https", nil
}

// listGuard refuses web pages as listings. minio-go takes any XML for an empty listing, and a wrong
// endpoint's "It works!" page, or a captive portal, would pass for an empty bucket.
type listGuard struct{ http.RoundTripper }

func (g listGuard) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := g.RoundTripper.RoundTrip(r)
	if err == nil && resp.StatusCode == http.StatusOK && strings.Contains(r.URL.RawQuery, "list-type=") {
		if t := resp.Header.Get("Content-Type"); strings.HasPrefix(t, "text/html") || strings.HasPrefix(t, "application/json") {
			resp.Body.Close()
			return nil, errNotXML
		}
	}
	return resp, err
}

var errNotXML = errors.New("the answer to a listing is a web page")

// newTransport returns a transport for hundreds of small requests at once.
func newTransport(cfg S3Config) (*http.Transport, error) {
	t := &http.Transport{
		Proxy: http.ProxyFromEnvironment,
		DialContext: (&net.Dialer{
			Timeout:   5 * time.Second, // a live store answers a SYN in milliseconds
			KeepAlive: 15 * time.Second,
		}).DialContext,
		TLSHandshakeTimeout: 10 * time.Second,
		// Stores answer slowly when they are loaded, but an answer that has not begun after 20 s
		// is better asked for again. Bodies that stall are ended by the retry policy.
		ResponseHeaderTimeout: 20 * time.Second,
		MaxIdleConns:          2 * cfg.MaxConns, // the endpoint, and a region's endpoint after a redirect
		MaxIdleConnsPerHost:   cfg.MaxConns,
		IdleConnTimeout:       90 * time.Second,
		// Objects are delivered as they are stored; gzip would also make their length unknown.
		DisableCompression: true,
		// One connection a request: HTTP/2 would put all on one, behind one flow-control window
		// and one lock.
		ForceAttemptHTTP2: false,
		TLSNextProto:      map[string]func(string, *tls.Conn) http.RoundTripper{},
		// A body passes through the read buffer only where a read is smaller than it; ReadAt
		// reads large slices past it. 16 KiB takes the headers and a small object in one read
		// and costs 16 MiB for 1,024 connections.
		ReadBufferSize:  16 << 10,
		WriteBufferSize: 4 << 10, // a request's head is 1 KiB
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
			return nil, fmt.Errorf("%s holds no certificate", cfg.CABundle)
		}
		t.TLSClientConfig = &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}
	}
	return t, nil
}

// Check implements [Checker]: one listing of one key, tried three times.
func (s *S3) Check(ctx context.Context) error {
	a := attempts{t: &Retrier{p: FastFail.withDefaults()}}
	for {
		tctx, cancel := context.WithTimeout(ctx, FastFail.TryTimeout)
		err := s.probe(tctx)
		cancel()
		if err == nil {
			return nil
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		var e *Error
		if !errors.As(err, &e) { // the try's own timeout
			err = &Error{
				Op: "check", Key: s.url(""), Kind: KindTransient,
				Err: fmt.Errorf("no answer within %v", FastFail.TryTimeout), Remedy: fmt.Sprintf(remedyReach, s.endpoint),
			}
		}
		if err = a.again(ctx, err); err != nil {
			return err
		}
	}
}

func (s *S3) probe(ctx context.Context) error {
	for o := range s.core.ListObjectsIter(ctx, s.bucket, s.listOptions("", "", true, 1)) {
		if o.Err != nil {
			return s.fail(ctx, "check", s.url(""), o.Err)
		}
		return nil
	}
	return ctx.Err()
}

// url names a key or prefix with the bucket and the endpoint, for errors.
func (s *S3) url(key string) string {
	return "s3://" + s.bucket + "/" + key + " at " + s.endpoint
}

// Stat implements [Reader].
func (s *S3) Stat(ctx context.Context, key string) (Object, error) {
	if !validKey(key) {
		return Object{}, &Error{Op: "stat", Key: key, Kind: KindNotFound, Err: errKey}
	}
	info, err := s.core.StatObject(ctx, s.bucket, key, minio.StatObjectOptions{})
	if err != nil {
		return Object{}, s.fail(ctx, "stat", key, err)
	}
	return s.object("stat", info)
}

var errKey = errors.New("S3 keys are 1 to 1,024 bytes of UTF-8 and not blank")

// validKey says whether minio-go would send a request for key.
func validKey(key string) bool { return s3utils.CheckValidObjectName(key) == nil }

// weakPrefix begins ETags that are made of size and time. No server makes such ETags.
const weakPrefix = "weak-"

// object converts minio-go's description. An object without ETag cannot be pinned to a version.
func (s *S3) object(op string, info minio.ObjectInfo) (Object, error) {
	o := Object{Key: info.Key, Size: info.Size, ETag: info.ETag, ModTime: info.LastModified}
	if o.ETag == "" {
		if !s.weakETag {
			return Object{}, &Error{
				Op: op, Key: info.Key, Kind: KindInvalid, Err: errors.New("the store gives no ETag for this object"),
				Remedy: "upload it again through the S3 API, or use --weak-etag to go by size and time",
			}
		}
		o.ETag = weakETag(o.Size, o.ModTime)
	}
	return o, nil
}

// weakETag has a resolution of 1 s, that of the Last-Modified header.
func weakETag(size int64, mod time.Time) string {
	return weakPrefix + strconv.FormatInt(size, 16) + "-" + strconv.FormatInt(mod.Unix(), 16)
}

// ReadAt implements [Reader]: one GET, whose body goes straight into p.
func (s *S3) ReadAt(ctx context.Context, o Object, p []byte, off int64) error {
	if err := checkRange(o, len(p), off); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil || len(p) == 0 {
		return err
	}
	if !validKey(o.Key) {
		return &Error{Op: "read", Key: o.Key, Kind: KindNotFound, Err: errKey}
	}
	weak := strings.HasPrefix(o.ETag, weakPrefix)
	whole := int64(len(p)) == o.Size
	var opts minio.GetObjectOptions
	if !whole {
		opts.Set("Range", rangeHeader(off, len(p)))
	}
	if !weak {
		opts.Set("If-Match", `"`+o.ETag+`"`)
	}
	body, info, header, err := s.core.GetObject(ctx, s.bucket, o.Key, opts)
	if err != nil {
		return s.fail(ctx, "read", o.Key, err)
	}
	defer body.Close()

	// Servers that ignore If-Match are caught here.
	switch {
	case weak:
		if have := weakETag(o.Size, info.LastModified); have != o.ETag {
			return errChanged(o, have)
		}
	case info.ETag != o.ETag:
		return errChanged(o, info.ETag)
	}
	if err := s.checkAnswer(o, len(p), off, whole, info.Size, header.Get("Content-Range")); err != nil {
		return err
	}
	// Reading exactly Content-Length bytes sees the body's end, so the connection is reused.
	if n, err := io.ReadFull(body, p); err != nil {
		if cerr := ctx.Err(); cerr != nil {
			return cerr
		}
		return &Error{
			Op: "read", Key: o.Key, Kind: KindTransient,
			Err: fmt.Errorf("body ended after %d of %d bytes: %w", n, len(p), err),
		}
	}
	return nil
}

// checkAnswer checks a 2xx answer's head: length is its Content-Length, -1 for none.
func (s *S3) checkAnswer(o Object, n int, off int64, whole bool, length int64, contentRange string) error {
	if contentRange == "" && !whole {
		return &Error{
			Op: "read", Key: o.Key, Kind: KindInvalid, Err: errors.New("the server answered a request for a range with the whole object"),
			Remedy: "use a store, and proxies before it, that serve Range requests: " + s.endpoint,
		}
	}
	if !whole {
		start, size, ok := parseContentRange(contentRange)
		if !ok || start != off {
			return &Error{
				Op: "read", Key: o.Key, Kind: KindTransient,
				Err: fmt.Errorf("asked for %d bytes at %d, the answer's range is %.80q", n, off, contentRange),
			}
		}
		if size >= 0 && size != o.Size {
			return errChanged(o, "")
		}
	}
	if length != int64(n) {
		if whole && length >= 0 {
			return errChanged(o, "") // same ETag, other size: only with weak ones
		}
		return &Error{
			Op: "read", Key: o.Key, Kind: KindTransient,
			Err: fmt.Errorf("asked for %d bytes, the answer has %d", n, length),
		}
	}
	return nil
}

// rangeHeader returns bytes=FIRST-LAST.
func rangeHeader(off int64, n int) string {
	b := make([]byte, 0, 48)
	b = append(b, "bytes="...)
	b = strconv.AppendInt(b, off, 10)
	b = append(b, '-')
	b = strconv.AppendInt(b, off+int64(n)-1, 10)
	return string(b)
}

// parseContentRange parses "bytes FIRST-LAST/SIZE"; size is -1 for "*".
func parseContentRange(s string) (first, size int64, ok bool) {
	s, ok = strings.CutPrefix(s, "bytes ")
	span, total, ok2 := strings.Cut(s, "/")
	from, _, ok3 := strings.Cut(span, "-")
	first, err := strconv.ParseInt(from, 10, 64)
	if !ok || !ok2 || !ok3 || err != nil {
		return 0, 0, false
	}
	if total == "*" {
		return first, -1, true
	}
	size, err = strconv.ParseInt(total, 10, 64)
	return first, size, err == nil
}

// List implements [Reader].
func (s *S3) List(ctx context.Context, prefix string) iter.Seq2[Object, error] {
	return s.list(ctx, prefix, "", true)
}

// ListAfter implements [ListerAfter].
func (s *S3) ListAfter(ctx context.Context, prefix, after string) iter.Seq2[Object, error] {
	return s.list(ctx, prefix, after, true)
}

// ListLevel implements [Prefixer].
func (s *S3) ListLevel(ctx context.Context, prefix string) iter.Seq2[Object, error] {
	return s.list(ctx, prefix, "", false)
}

func (s *S3) listOptions(prefix, after string, recurse bool, maxKeys int) minio.ListObjectsOptions {
	noOwner := false
	return minio.ListObjectsOptions{Prefix: prefix, StartAfter: after, Recursive: recurse, MaxKeys: maxKeys, FetchOwner: &noOwner}
}

func (s *S3) list(ctx context.Context, prefix, after string, recurse bool) iter.Seq2[Object, error] {
	return func(yield func(Object, error) bool) {
		// Keys are UTF-8 of at most 1,024 bytes: nothing begins with another prefix.
		if s3utils.CheckValidObjectNamePrefix(prefix) != nil {
			return
		}
		for info := range s.core.ListObjectsIter(ctx, s.bucket, s.listOptions(prefix, after, recurse, 0)) {
			if info.Err != nil {
				yield(Object{}, s.fail(ctx, "list", s.url(prefix), info.Err))
				return
			}
			// minio-go marks a prefix by nothing but the fields that it lacks. An object
			// "a/" is the level's own prefix or lies behind the prefix "a/".
			if !recurse && info.Key != prefix && strings.HasSuffix(info.Key, "/") {
				if !yield(Object{Key: info.Key}, nil) {
					return
				}
				continue
			}
			o, err := s.object("list", info)
			if !yield(o, err) || err != nil {
				return
			}
		}
		// minio-go ends in silence when the context does.
		if err := ctx.Err(); err != nil {
			yield(Object{}, err)
		}
	}
}

// Put implements [Putter]. Objects of more than 16 MiB go up in parts.
func (s *S3) Put(ctx context.Context, key string, r io.Reader, size int64) (Object, error) {
	if !validKey(key) || size < 0 {
		return Object{}, &Error{Op: "put", Key: key, Kind: KindInvalid, Err: errKey}
	}
	info, err := s.core.Client.PutObject(ctx, s.bucket, key, r, size, minio.PutObjectOptions{
		// minio-go would send an empty body as one signed chunk without Content-Length. Servers
		// refuse that, or (versitygw) leave the chunk unread and fail the next request on the
		// connection.
		DisableContentSha256: size == 0,
	})
	if err != nil {
		return Object{}, s.fail(ctx, "put", s.url(key), err)
	}
	mod := info.LastModified
	if mod.IsZero() {
		mod = time.Now()
	}
	return Object{Key: key, Size: size, ETag: info.ETag, ModTime: mod}, nil
}
