// Package s3 is the store of a bucket behind the S3 API. It uses minio-go and, for GETs, its own connections.
package s3

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"log/slog"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/aws/aws-sdk-go-v2/config"
	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"
	"github.com/minio/minio-go/v7/pkg/s3utils"

	"github.com/shoalfs/shoal/cache/objstore"
)

// Config sets the bucket, endpoint and credentials. Empty fields come from the environment, as with the AWS tools.
type Config struct {
	// Getenv reads the AWS variables, and HOME; nil means [os.Getenv]. It does not apply to a profile's
	// credential_process, which runs in this process's environment, to tokens of `aws sso login`, which are in its
	// home, and to HTTP_PROXY and the like.
	Getenv func(name string) string

	Endpoint string // URL, or host[:port] for https
	Fallback string // the endpoint if nothing sets one; empty: Amazon S3
	Setting  string // that sets Endpoint, for remedies; empty: the environment's variable
	Region   string
	Bucket   string

	AccessKeyID, SecretAccessKey, SessionToken string
	Anonymous                                  bool // sign nothing

	CABundle string // PEM file of certificate authorities to trust besides the system's

	// Store has the options of any store.
	Store objstore.StoreOptions

	// Logger gets messages when credentials are renewed or cannot be; nil: none.
	Logger *slog.Logger

	// Clock is this machine's time; nil: [time.Now].
	Clock func() time.Time

	profile *config.SharedConfig
}

// maxIdle is how many idle connections are kept: at least the number of requests in flight, or connections are opened
// and closed all the time.
const maxIdle = 1024

// Store is a bucket behind the S3 API.
//
// It tries every request once: [objstore.Retry] repeats it. (minio-go still sleeps up to 200 ms after a temporary
// failure before it returns the error, in addition to the policy's sleeps.) Requests use path style, HTTP/1.1 and, to
// pin the version, If-Match. It requires a general-purpose bucket, which lists in key order, unlike S3 Express
// directory buckets.
type Store struct {
	core      minio.Core
	keys      *keyring
	bucket    string
	endpoint  string // URL
	setting   string // that sets it
	weakETag  bool
	direct    bool        // not through a proxy
	pays      bool        // the requester
	sse       []header    // of the customer's key: then ETags are not MD5s
	noCRC     atomic.Bool // the store refuses CRC32C: bodies go with their MD5
	transport *http.Transport
	slow      *http.Transport   // waits longer for an answer: copies, completed uploads, and what is forwarded
	forwarder http.RoundTripper // over slow
	counts    requestCounts
	versions  *versions // nil: only current ones are read
	getter    *getter   // nil: minio-go sends GETs, too
	time      *clock
}

var _ objstore.Store = (*Store)(nil)

const endpointRemedy = " is like http://127.0.0.1:9000 or https://s3.eu-central-1.amazonaws.com"

// New prepares access to a bucket. It resolves configuration and credentials and reports their errors. It does not
// contact the store (only, without other credentials, the instance metadata service, for a second or two).
func New(ctx context.Context, cfg Config) (*Store, error) {
	invalid := func(remedy string, err error) error {
		return &objstore.Error{Op: "open", Key: "s3://" + cfg.Bucket, Kind: objstore.KindInvalid, Err: err,
			Remedy: remedy}
	}
	if err := s3utils.CheckValidBucketName(cfg.Bucket); err != nil {
		return nil, invalid("check the bucket's name", err)
	}
	if cfg.Getenv == nil {
		cfg.Getenv = os.Getenv
	}
	if err := cfg.fillFromEnv(); err != nil {
		return nil, err
	}
	setting := cmp.Or(cfg.Setting, endpointVariable(cfg.Getenv))
	at, err := parseEndpoint(cfg.Endpoint)
	if err != nil {
		return nil, invalid(setting+endpointRemedy, err)
	}
	if err := checkCustomerKey(cfg.Store.CustomerKey, at); err != nil {
		return nil, invalid("use an https:// endpoint; the key is sent in the clear to this machine only", err)
	}
	if cfg.Store.RequesterPays && cfg.Anonymous {
		return nil, invalid("give credentials, or omit --store requester-pays", errors.New(
			"the requester cannot pay: requests are not signed"))
	}
	cfg.Logger = cmp.Or(cfg.Logger, slog.New(slog.DiscardHandler))
	if cfg.Clock == nil {
		cfg.Clock = time.Now
	}
	transport, err := newTransport(cfg)
	if err != nil {
		return nil, invalid("check AWS_CA_BUNDLE", err)
	}
	client := &http.Client{Transport: transport, Timeout: 10 * time.Second}
	keys, err := awsCredentials(ctx, cfg, client)
	if err != nil {
		transport.CloseIdleConnections()
		return nil, err
	}
	amazon := s3utils.IsAmazonEndpoint(*at)
	region := cfg.Region
	if region == "" && !amazon {
		// Amazon's region is requested once; other servers rarely check it, and minio-go would ask them at every start.
		region = "us-east-1"
	}
	slow := transport.Clone()
	slow.ResponseHeaderTimeout = slowAnswer
	slow.ExpectContinueTimeout = time.Second
	slow.DialContext = answered
	s := &Store{keys: keys, bucket: cfg.Bucket, endpoint: at.Scheme + "://" + at.Host,
		setting: setting, weakETag: cfg.Store.WeakETag, sse: keyHeaders(cfg.Store.CustomerKey),
		pays: cfg.Store.RequesterPays, transport: transport, slow: slow,
		time: &clock{base: cfg.Clock, log: cfg.Logger}}
	s.forwarder = extraHeaders{s, slow}
	core, err := minio.NewCore(at.Host, &minio.Options{
		Creds:        credentials.New(chainLink{keys}),
		Secure:       s.secure(),
		Transport:    answerGuard{extraHeaders{s, transport}, s.forwarder},
		Region:       region,
		BucketLookup: minio.BucketLookupPath,
		MaxRetries:   1,
	})
	if err != nil {
		transport.CloseIdleConnections()
		return nil, invalid(setting+endpointRemedy, err)
	}
	core.SetAppInfo("shoal", "1")
	s.core = *core
	if !cfg.Store.CurrentOnly {
		s.versions = &versions{log: cfg.Logger}
	}
	proxy, err := transport.Proxy(&http.Request{URL: at})
	if s.direct = proxy == nil && err == nil; s.direct && !amazon {
		s.getter = newGetter(s, at.Host, region)
	}
	return s, nil
}

// Requests returns the requests sent, as they are charged.
func (s *Store) Requests() objstore.Requests {
	c := &s.counts
	return objstore.Requests{Get: c.get.Load(), Head: c.head.Load(), List: c.list.Load(), Put: c.put.Load(),
		Delete: c.del.Load(), Received: c.received.Load(), Sent: c.sent.Load()}
}

// Endpoint returns the endpoint's URL, without a slash at its end.
func (s *Store) Endpoint() string { return s.endpoint }

// Close closes the idle connections. It does not affect requests in flight.
func (s *Store) Close() {
	s.keys.stop()
	s.transport.CloseIdleConnections()
	s.slow.CloseIdleConnections()
	if s.getter != nil {
		s.getter.wires.close()
	}
}

// Check implements [objstore.Store]: one listing of one key, tried three times.
func (s *Store) Check(ctx context.Context) error {
	return objstore.FastFail.Do(ctx, "check", s.url(""), func(tctx context.Context) error {
		err := s.probeEither(tctx)
		if err != nil && ctx.Err() == nil && !is[*objstore.Error](err) { // the try's own timeout
			err = &objstore.Error{Op: "check", Key: s.url(""), Kind: objstore.KindTransient,
				Err:    fmt.Errorf("no answer within %v", objstore.FastFail.TryTimeout),
				Remedy: s.remedy(remedyReach)}
		}
		return err
	})
}

func (s *Store) probe(ctx context.Context) error {
	g := s.keys.generation()
	for o := range s.core.ListObjectsIter(ctx, s.bucket, s.listOptions("", "", true, 1)) {
		if o.Err != nil {
			return s.fail(ctx, g, "check", s.url(""), o.Err)
		}
		s.keys.accept()
		return nil
	}
	return ctx.Err()
}

// url names a key or prefix with the bucket and the endpoint, for errors.
func (s *Store) url(key string) string {
	return "s3://" + s.bucket + "/" + key + " at " + s.endpoint
}

// Stat implements [objstore.Reader].
func (s *Store) Stat(ctx context.Context, key string) (objstore.Object, error) {
	o, _, err := s.stat(ctx, key)
	return o, err
}

// stat is Stat, with the object's note.
func (s *Store) stat(ctx context.Context, key string) (o objstore.Object, note string, err error) {
	if !validKey(key) {
		return o, "", &objstore.Error{Op: "stat", Key: key, Kind: objstore.KindNotFound, Err: errKey}
	}
	g := s.keys.generation()
	info, err := s.core.StatObject(ctx, s.bucket, key, minio.StatObjectOptions{})
	if err != nil {
		return o, "", s.fail(ctx, g, "stat", key, err)
	}
	o, err = s.object("stat", info)
	return o, info.Metadata.Get(headerNote), err
}

var errKey = errors.New("S3 keys are 1 to 1,024 bytes of UTF-8 and not blank")

// validKey reports whether minio-go would send a request for key.
func validKey(key string) bool { return s3utils.CheckValidObjectName(key) == nil }

// weakPrefix begins ETags made of size and time. No server makes such ETags.
const weakPrefix = "weak-"

// object converts minio-go's description. An object without ETag cannot be pinned to a version; a folder marker has
// no bytes that could change.
func (s *Store) object(op string, info minio.ObjectInfo) (objstore.Object, error) {
	o := objstore.Object{Key: info.Key, Size: info.Size, ETag: etagOf(info), ModTime: info.LastModified}
	if marker := o.Size == 0 && strings.HasSuffix(o.Key, "/"); info.ETag == "" && !s.weakETag && !marker {
		return objstore.Object{}, &objstore.Error{Op: op, Key: info.Key, Kind: objstore.KindInvalid,
			Err:    errors.New("the store returns no ETag for this object"),
			Remedy: "upload it again through the S3 API, or use --store weak-etag to go by size and time"}
	}
	return o, nil
}

// etagOf returns the ETag of an object, or its weak one.
func etagOf(info minio.ObjectInfo) string {
	if info.ETag != "" {
		return info.ETag
	}
	return weakETag(info.Size, info.LastModified)
}

// weakETag has a resolution of 1 s, that of the Last-Modified header. A zero time means unknown.
func weakETag(size int64, mod time.Time) string {
	e := weakPrefix + strconv.FormatInt(size, 16)
	if !mod.IsZero() {
		e += "-" + strconv.FormatInt(mod.Unix(), 16)
	}
	return e
}

// ReadAt implements [objstore.Reader].
func (s *Store) ReadAt(ctx context.Context, o objstore.Object, p []byte, off int64) error {
	return objstore.ReadAt(ctx, s, o, p, off)
}

// ReadSpans implements [objstore.SpanReader]: one GET, whose body goes straight into the spans; the gaps are dropped.
// Reading exactly Content-Length bytes sees the body's end, so the connection is reused.
func (s *Store) ReadSpans(ctx context.Context, o objstore.Object, spans []objstore.Span) error {
	if err := objstore.CheckSpans(o, spans); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil || len(spans) == 0 {
		return err
	}
	a, err := s.get(ctx, o, spans[0].Off, objstore.SpansLength(spans))
	if err != nil {
		return err
	}
	defer a.body.Close()
	return s.fill(ctx, o, &a, spans)
}

// fill reads the body of an answer, which begins with the first span.
func (s *Store) fill(ctx context.Context, o objstore.Object, a *answer, spans []objstore.Span) (err error) {
	body, length := a.body, objstore.SpansLength(spans)
	if a.length < 0 {
		body = &sizedBody{body, length}
	}
	var n int64
	defer func() { s.counts.received.Add(n) }()
	for _, span := range spans {
		if gap := span.Off - spans[0].Off - n; gap > 0 {
			gap, err = io.CopyN(io.Discard, body, gap)
			n += gap
		}
		if err == nil {
			var m int
			m, err = io.ReadFull(body, span.P)
			n += int64(m)
		}
		if cerr := ctx.Err(); err != nil && cerr != nil {
			return cerr
		} else if err != nil {
			return &objstore.Error{Op: "read", Key: o.Key, Kind: objstore.KindTransient,
				Err: fmt.Errorf("body ended after %d of %d bytes: %w", n, length, err)}
		}
	}
	return nil
}

// get requests length bytes from off of the version o and returns the answer once its head announces exactly that.
func (s *Store) get(ctx context.Context, o objstore.Object, off, length int64) (a answer, err error) {
	if !validKey(o.Key) {
		return a, &objstore.Error{Op: "read", Key: o.Key, Kind: objstore.KindNotFound, Err: errKey}
	}
	var etag, rangeOf string
	if length != o.Size {
		rangeOf = rangeHeader(off, length)
	}
	if !strings.HasPrefix(o.ETag, weakPrefix) {
		etag = o.ETag
	}
	version := ""
	if s.versions != nil {
		version = s.versions.of(o)
	}
	g := s.keys.generation()
	if a, err = s.ask(ctx, o.Key, etag, rangeOf, version); err != nil {
		return a, s.orPinned(ctx, o, version, s.fail(ctx, g, "read", o.Key, err))
	}
	s.keys.accept()
	if err := s.checkAnswer(o, off, length, &a); err != nil {
		_ = a.body.Close()
		return a, s.orPinned(ctx, o, version, err)
	}
	return a, nil
}

// ask sends a GET. etag, rangeOf or version may be empty. Its errors are minio-go's.
func (s *Store) ask(ctx context.Context, key, etag, rangeOf, version string) (answer, error) {
	if s.getter != nil {
		a, skewed, err := s.getter.get(ctx, key, etag, rangeOf, version)
		if skewed {
			a, _, err = s.getter.get(ctx, key, etag, rangeOf, version)
		}
		if !errors.Is(err, errAskOtherwise) {
			return a, err
		}
	}
	opts := minio.GetObjectOptions{VersionID: version}
	if rangeOf != "" {
		opts.Set("Range", rangeOf)
	}
	if etag != "" {
		opts.Set("If-Match", `"`+etag+`"`)
	}
	var status int
	body, info, header, err := s.core.GetObject(withStatus(ctx, &status), s.bucket, key, opts)
	for _, name := range []string{"ETag", "Content-Range"} {
		if v := header.Values(name); err == nil && len(v) > 1 && v[0] != v[1] {
			_ = body.Close()
			err = fmt.Errorf("%w: %s %.40q", errBadHead, name, v)
		}
	}
	if err != nil {
		return answer{}, err
	}
	return answer{status: status, body: body, length: info.Size, etag: info.ETag,
		contentRange: header.Get("Content-Range"), modified: info.LastModified, note: header.Get(headerNote)}, nil
}

// checkAnswer checks the head of a 2xx answer to a GET of n bytes of o from off. docs/SEMANTICS.md lists the check of
// each field. Requests for a whole object have no Range.
//
// The ETag reveals a server that ignores If-Match. If the ETag is right and another field is not, the object has not
// changed: something between here and the store is broken, perhaps for a moment.
func (s *Store) checkAnswer(o objstore.Object, off, n int64, a *answer) error {
	fail := func(format string, args ...any) error {
		return &objstore.Error{Op: "read", Key: o.Key, Kind: objstore.KindTransient, Err: fmt.Errorf(format, args...)}
	}
	weak := strings.HasPrefix(o.ETag, weakPrefix)
	untimed := weakETag(o.Size, time.Time{}) // then the sizes alone are compared, below
	switch have := weakETag(o.Size, a.modified); {
	case weak && have != o.ETag && have != untimed && o.ETag != untimed:
		return objstore.Changed(o, have)
	case !weak && a.etag == "":
		return fail("the answer has no ETag")
	case !weak && strings.TrimPrefix(a.etag, `W/"`) == o.ETag && a.etag != o.ETag:
		return fail(`the answer's ETag is weak (W/"%s"): a proxy in front of the store may have changed the bytes`,
			o.ETag)
	case !weak && a.etag != o.ETag:
		return objstore.Changed(o, a.etag)
	}
	if n == o.Size {
		switch {
		case a.status != http.StatusOK || a.contentRange != "":
			return fail("asked for the whole object, the answer is a part of it (HTTP %d, range %.80q)",
				a.status, a.contentRange)
		case weak && a.length >= 0 && a.length != n:
			return objstore.Changed(o, "")
		}
	} else {
		if a.status == http.StatusOK {
			return &objstore.Error{Op: "read", Key: o.Key, Kind: objstore.KindInvalid,
				Err:    errors.New("the server answered a request for a range with the whole object"),
				Remedy: "use a store, and proxies in front of it, that serve Range requests: " + s.endpoint}
		}
		first, last, size, ok := parseContentRange(a.contentRange)
		switch {
		case !ok || first != off || last != off+n-1:
			return fail("asked for %d bytes at %d, the answer's range is %.80q", n, off, a.contentRange)
		case size >= 0 && size != o.Size:
			return objstore.Changed(o, "")
		}
	}
	if a.length >= 0 && a.length != n {
		return fail("asked for %d bytes, the answer has %d", n, a.length)
	}
	return nil
}

// sizedBody is a body of unknown length, chunked or up to the end of the connection. It must end after left bytes:
// the last ones are returned only after that is verified.
type sizedBody struct {
	io.ReadCloser
	left int64
}

// Read implements [io.Reader]. If the body is too long it returns no bytes at all, since [io.ReadFull] ignores an
// error that comes with the last ones.
func (b *sizedBody) Read(p []byte) (int, error) {
	if b.left == 0 || len(p) == 0 {
		return 0, io.EOF
	}
	n, err := b.ReadCloser.Read(p[:min(int64(len(p)), b.left)])
	b.left -= int64(n)
	if b.left > 0 || n == 0 {
		return n, err
	}
	var more [1]byte
	switch extra, err := io.ReadFull(b.ReadCloser, more[:]); {
	case extra > 0:
		return 0, errors.New("the answer is longer than announced")
	case !errors.Is(err, io.EOF):
		return 0, err
	}
	return n, nil
}

// rangeHeader returns bytes=FIRST-LAST.
func rangeHeader(off, n int64) string {
	return "bytes=" + strconv.FormatInt(off, 10) + "-" + strconv.FormatInt(off+n-1, 10)
}

// parseContentRange parses "bytes FIRST-LAST/SIZE"; size is -1 for "*".
func parseContentRange(s string) (first, last, size int64, ok bool) {
	s, ok = strings.CutPrefix(s, "bytes ")
	span, total, ok2 := strings.Cut(s, "/")
	from, to, ok3 := strings.Cut(span, "-")
	first, err := strconv.ParseInt(from, 10, 64)
	last, err2 := strconv.ParseInt(to, 10, 64)
	if !ok || !ok2 || !ok3 || err != nil || err2 != nil {
		return 0, 0, 0, false
	}
	if total == "*" {
		return first, last, -1, true
	}
	size, err = strconv.ParseInt(total, 10, 64)
	return first, last, size, err == nil
}

// List implements [objstore.Reader].
func (s *Store) List(ctx context.Context, prefix, after string) iter.Seq2[objstore.Object, error] {
	return s.list(ctx, prefix, after, true)
}

// ListLevel implements [objstore.Layer].
func (s *Store) ListLevel(ctx context.Context, prefix string) iter.Seq2[objstore.Object, error] {
	return s.list(ctx, prefix, "", false)
}

func (s *Store) listOptions(prefix, after string, recurse bool, maxKeys int) minio.ListObjectsOptions {
	return minio.ListObjectsOptions{Prefix: prefix, StartAfter: after, Recursive: recurse, MaxKeys: maxKeys,
		FetchOwner: new(false)}
}

func (s *Store) list(ctx context.Context, prefix, after string, recurse bool) iter.Seq2[objstore.Object, error] {
	return func(yield func(objstore.Object, error) bool) {
		// Keys are UTF-8 of at most 1,024 bytes: none begins with another prefix.
		if s3utils.CheckValidObjectNamePrefix(prefix) != nil {
			return
		}
		g := s.keys.generation()
		seen := &pages{}
		for info := range s.core.ListObjectsIter(context.WithValue(ctx, pagesKey{}, seen), s.bucket,
			s.listOptions(prefix, after, recurse, 0)) {
			err := info.Err
			if err == nil && seen.next {
				seen.next, err = false, seen.once("first key of a page", info.Key)
			}
			if err == nil && !strings.HasPrefix(info.Key, prefix) {
				err = fmt.Errorf("%w: %.200q", errOtherPrefix, info.Key)
			}
			if err != nil {
				yield(objstore.Object{}, s.fail(ctx, g, "list", s.url(prefix), err))
				return
			}
			s.keys.accept()
			// minio-go marks a prefix only by missing fields. An object "a/" is the level's own prefix or lies behind
			// the prefix "a/".
			if !recurse && info.Key != prefix && strings.HasSuffix(info.Key, "/") {
				if !yield(objstore.Object{Key: info.Key}, nil) {
					return
				}
				continue
			}
			o, err := s.object("list", info)
			if !yield(o, err) || err != nil {
				return
			}
		}
		// minio-go ends silently when the context does.
		if err := ctx.Err(); err != nil {
			yield(objstore.Object{}, err)
		}
	}
}

var errOtherPrefix = errors.New("a key was listed that does not begin with the prefix")
