package s3api_test

import (
	"bytes"
	"context"
	"io"
	"math/rand/v2"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"
	"github.com/minio/minio-go/v7/pkg/signer"

	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/lab/rig/s3server"
	"github.com/shoalfs/shoal/prefetch/engine"
	"github.com/shoalfs/shoal/s3api"
)

// code is the error code in an answer.
func code(body []byte) string {
	_, rest, _ := strings.Cut(string(body), "<Code>")
	c, _, _ := strings.Cut(rest, "</Code>")
	return c
}

// No PUT, copy or deletion is followed by old bytes: not at once, not after a refresh, and not after a restart.
func TestWritesAreSeen(t *testing.T) {
	origin, shoal, e := served(t, oddKeys)
	read := func(key string) string {
		t.Helper()
		resp, body := shoal.ask(t, "GET", "/"+bucket+"/"+key, "", nil, nil)
		if resp.StatusCode != http.StatusOK {
			return code(body)
		}
		return string(body)
	}
	put := func(key, text string) {
		t.Helper()
		if resp, body := shoal.ask(t, "PUT", "/"+bucket+"/"+key, "", nil, []byte(text)); resp.StatusCode !=
			http.StatusOK {
			t.Fatalf("PUT %s: HTTP %d: %s", key, resp.StatusCode, body)
		}
	}
	same := func() {
		t.Helper()
		for _, delimiter := range []string{"", "/"} {
			want, got := listed(t, origin, false, "train/", "", delimiter, 2),
				listed(t, shoal, false, "train/", "", delimiter, 2)
			if !slices.Equal(got, want) {
				t.Errorf("delimiter %q: %q, the store lists %q", delimiter, got, want)
			}
		}
	}
	if got := read("train/readme.txt"); got != "the content of train/readme.txt" {
		t.Fatal(got)
	}
	put("train/readme.txt", "second")
	put("train/new/ü 1", "new")
	if resp, body := shoal.ask(t, "DELETE", "/"+bucket+"/train/a0", "", nil, nil); resp.StatusCode !=
		http.StatusNoContent {
		t.Fatalf("HTTP %d: %s", resp.StatusCode, body)
	}
	if resp, body := shoal.ask(t, "PUT", "/"+bucket+"/train/zero",
		"", map[string]string{"X-Amz-Copy-Source": "/" + bucket + "/train/readme.txt"},
		nil); resp.StatusCode != http.StatusOK {
		t.Fatalf("HTTP %d: %s", resp.StatusCode, body)
	}
	// which this store takes for train/a/1 and train/a/b/2
	list := `<Delete><Object><Key>x/../../` + bucket + `/train/a/1</Key></Object>` +
		`<Object><Key>/train/./a//b/2</Key></Object></Delete>`
	if resp, body := shoal.ask(t, "POST", "/"+bucket, "delete=", map[string]string{"Content-Md5": md5Of(list)},
		[]byte(list)); resp.StatusCode != http.StatusOK {
		t.Fatalf("HTTP %d: %s", resp.StatusCode, body)
	}
	want := map[string]string{"train/readme.txt": "second", "train/new/ü 1": "new", "train/a0": "NoSuchKey",
		"train/zero": "second", "train/a/1": "NoSuchKey", "train/a/b/2": "NoSuchKey"}
	check := func(when string) {
		t.Helper()
		for key, text := range want {
			if got := read(key); got != text {
				t.Errorf("%s: %s is %q, want %q", when, key, got, text)
			}
		}
		same()
	}
	check("at once")
	if changed, err := e.Refresh(t.Context()); !changed || err != nil {
		t.Fatal(changed, err)
	}
	check("after a refresh")
	put("train/readme.txt", "third")
	want["train/readme.txt"] = "third"
	check("after another write")
}

// A daemon that was killed after a write lists the source again, and one without a write does not.
func TestWritesOutliveTheDaemon(t *testing.T) {
	srv, err := s3server.Start(context.Background(), s3server.Options{Dir: t.TempDir()})
	must(t, err)
	t.Cleanup(srv.Stop)
	client, err := s3server.Client(srv.URL, 2)
	must(t, err)
	must(t, client.MakeBucket(t.Context(), bucket, minio.MakeBucketOptions{}))
	store := func(text string) {
		_, err := client.PutObject(t.Context(), bucket, "train/1.jpg", strings.NewReader(text), int64(len(text)),
			minio.PutObjectOptions{})
		must(t, err)
	}
	store("first")
	dir := filepath.Join(t.TempDir(), "cache")
	life := func(then func(s side)) (size int64) {
		t.Run("life", func(t *testing.T) {
			e := open(t, "s3://"+bucket+"/train", dir, srv.URL)
			origin, _ := e.Origin()
			size = e.Manifest().Size(0)
			then(serve(t, e, origin, bucket))
		})
		return size
	}
	life(func(side) { store("by others") })
	if n := life(func(s side) {
		if resp, body := s.ask(t, "PUT", "/"+bucket+"/train/2.jpg", "", nil, []byte("2")); resp.StatusCode !=
			http.StatusOK {
			t.Errorf("HTTP %d: %s", resp.StatusCode, body)
		}
	}); n != 5 {
		t.Errorf("listed again without need: %d bytes", n)
	}
	if n := life(func(side) {}); n != 9 {
		t.Errorf("not listed again: %d bytes", n)
	}
}

// A dataset that stays open, as a mount's, does not forget what was written through an endpoint that has ended.
func TestWritesOutliveTheEndpoint(t *testing.T) {
	srv, err := s3server.Start(context.Background(), s3server.Options{Dir: t.TempDir()})
	must(t, err)
	t.Cleanup(srv.Stop)
	client, err := s3server.Client(srv.URL, 2)
	must(t, err)
	must(t, client.MakeBucket(t.Context(), bucket, minio.MakeBucketOptions{}))
	_, err = client.PutObject(t.Context(), bucket, oddKeys[0], strings.NewReader("old"), 3, s3server.PutOptions())
	must(t, err)
	e := open(t, "s3://"+bucket+"/train", filepath.Join(t.TempDir(), "cache"), srv.URL)
	origin, _ := e.Origin()
	t.Run("first", func(t *testing.T) {
		s := serve(t, e, origin, bucket)
		if _, body := s.ask(t, "GET", "/photos/"+oddKeys[0], "", nil, nil); string(body) != "old" {
			t.Errorf("%s", body)
		}
		if resp, body := s.ask(t, "PUT", "/photos/"+oddKeys[0], "", nil, []byte("new")); resp.StatusCode !=
			http.StatusOK {
			t.Fatalf("HTTP %d: %s", resp.StatusCode, body)
		}
	})
	s := serve(t, e, origin, bucket)
	if _, body := s.ask(t, "GET", "/photos/"+oddKeys[0], "", nil, nil); string(body) != "new" {
		t.Errorf("%s", body)
	}
	if _, err := e.Refresh(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, body := s.ask(t, "GET", "/photos/"+oddKeys[0], "", nil, nil); string(body) != "new" || e.Stale() {
		t.Errorf("%s", body)
	}
}

// A client that has a part of another version gets all of this one (RFC 9110, 13.1.5), as from Amazon S3. versitygw
// does not look at it.
func TestIfRange(t *testing.T) {
	_, shoal, _ := served(t, oddKeys[:3])
	path, content := "/"+bucket+"/"+oddKeys[0], string(contentOf(oddKeys[0]))
	resp, _ := shoal.ask(t, "HEAD", path, "", nil, nil)
	etag, modified := resp.Header.Get("ETag"), resp.Header.Get("Last-Modified")
	for of, same := range map[string]bool{etag: true, modified: true, `"other"`: false, "W/" + etag: false,
		"Mon, 01 Jan 2024 00:00:00 GMT": false} {
		for _, method := range []string{"GET", "HEAD"} {
			want, status := content, http.StatusOK
			if same {
				want, status = content[:4], http.StatusPartialContent
			}
			resp, body := shoal.ask(t, method, path, "", map[string]string{"Range": "bytes=0-3", "If-Range": of}, nil)
			if resp.StatusCode != status || resp.ContentLength != int64(len(want)) ||
				method == "GET" && string(body) != want {
				t.Errorf("%s If-Range: %s: HTTP %d, %d bytes, %q",
					method, of, resp.StatusCode, resp.ContentLength, body)
			}
		}
	}
}

// Headers that a presigned request has in its query are headers, also those that are refused.
func TestHoistedHeaders(t *testing.T) {
	origin, shoal, _ := served(t, oddKeys[:3])
	presigned := func(method, key, query string) (*http.Response, []byte) {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), method, shoal.url+"/"+bucket+"/"+key+"?"+query, nil)
		must(t, err)
		return shoal.do(t, signer.PreSignV4(*req, access, secret, "", s3server.Region, 60))
	}
	if resp, body := presigned("PUT", "train/hoisted",
		"x-amz-meta-color=red&X-Amz-Meta-Size=10%20cm&x-id=PutObject"); resp.StatusCode != http.StatusOK {
		t.Fatalf("HTTP %d: %s", resp.StatusCode, body)
	}
	o, err := origin.client.StatObject(t.Context(), bucket, "train/hoisted", minio.StatObjectOptions{})
	must(t, err)
	if o.UserMetadata["Color"] != "red" || o.UserMetadata["Size"] != "10 cm" {
		t.Errorf("%v", o.UserMetadata)
	}
	for _, name := range []string{"x-amz-copy-source", "X-Amz-Copy-Source"} {
		if resp, body := presigned("PUT", "train/stolen", name+"=/other/secret"); resp.StatusCode !=
			http.StatusForbidden || code(body) != "AccessDenied" {
			t.Errorf("%s: HTTP %d: %s", name, resp.StatusCode, body)
		}
		if resp, body := shoal.ask(t, "PUT", "/photos/train/stolen", name+"=%2Fother%2Fsecret", nil,
			nil); resp.StatusCode != http.StatusForbidden || code(body) != "AccessDenied" {
			t.Errorf("%s: HTTP %d: %s", name, resp.StatusCode, body)
		}
	}
}

// What may not go through the endpoint is refused, with S3's codes.
func TestRefused(t *testing.T) {
	_, shoal, _ := served(t, oddKeys[:3])
	for _, c := range []struct {
		method, path, query string
		header              map[string]string
		status              int
		code                string
	}{
		{"GET", "/other/x", "", nil, 404, "NoSuchBucket"},
		{"PUT", "/new-bucket", "", nil, 404, "NoSuchBucket"},
		{"GET", "/photos/none", "", nil, 404, "NoSuchKey"},
		{"DELETE", "/photos", "", nil, 403, "AccessDenied"},
		{"PUT", "/photos", "policy=", nil, 403, "AccessDenied"},
		{"PUT", "/photos", "", nil, 409, "BucketAlreadyOwnedByYou"},
		{"PATCH", "/photos/x", "", nil, 405, "MethodNotAllowed"},
		{"POST", "/", "", nil, 405, "MethodNotAllowed"},
		{"GET", "//photos/train/a/1", "", nil, 405, "MethodNotAllowed"}, // and not the list of buckets
		{"PUT", "/photos/x", "", map[string]string{"X-Amz-Copy-Source": "/other/secret"}, 403, "AccessDenied"},
		{"PUT", "/photos/x", "", map[string]string{"X-Amz-Copy-Source": "other%2Fsecret"}, 403, "AccessDenied"},
		{"PUT", "/photos/x", "", map[string]string{"X-Amz-Copy-Source": "photos/../other/secret"}, 403, "AccessDenied"},
		{"GET", "/photos/train/../../other/x", "", nil, 400, "InvalidURI"},
		{"GET", "/photos/./x", "", nil, 404, "NoSuchKey"}, // the origin's word
		{"GET", "/photos/..", "", nil, 400, "InvalidURI"},
		{"GET", "/photos/\xff", "", nil, 400, "InvalidURI"},
		{"POST", "/photos", "delete=", nil, 400, "MalformedXML"},
		{"GET", "/photos", "list-type=2&prefix=train/&max-keys=x", nil, 400, "InvalidArgument"},
		{"GET", "/photos", "list-type=2&prefix=train/&max-keys=-1", nil, 400, "InvalidArgument"},
		{"GET", "/photos", "list-type=2&prefix=train/&encoding-type=x", nil, 400, "InvalidArgument"},
		{"GET", "/photos/train/a/1", "", map[string]string{"Range": "bytes=5000-"}, 416, "InvalidRange"},
		{"GET", "/photos/train/a/1", "", map[string]string{"If-Match": "x"}, 412, "PreconditionFailed"},
	} {
		resp, body := shoal.ask(t, c.method, c.path, c.query, c.header, nil)
		if resp.StatusCode != c.status || code(body) != c.code {
			t.Errorf("%s %s?%s %v: HTTP %d %s, want %d %s",
				c.method, c.path, c.query, c.header, resp.StatusCode, body, c.status, c.code)
		}
	}
}

// Without keys, no web page that a browser of this machine shows can read or write.
func TestUnsigned(t *testing.T) {
	_, _, e := served(t, oddKeys[:3])
	origin, _ := e.Origin()
	reads := serveWith(t, nil, e, origin, bucket)
	writes := serveLimited(t, nil, s3api.Limits{Connections: 1024}, e, origin, bucket)
	keys, err := s3api.ParseKeys(strings.NewReader(access + " " + secret))
	must(t, err)
	only := serveLimited(t, keys, s3api.Limits{ReadOnly: true, Connections: 1024}, e, origin, bucket)
	if resp, body := only.ask(t, "PUT", "/photos/other", "", nil, []byte("x")); resp.StatusCode != 403 ||
		!bytes.Contains(body, []byte("--s3-read-only")) {
		t.Errorf("a signed PUT to a read-only endpoint: HTTP %d %s", resp.StatusCode, body)
	}
	for _, c := range []struct {
		method, path, host string
		header             map[string]string
		status             int
	}{
		{"GET", "/photos/" + oddKeys[0], "localhost:9000", nil, 200},
		{"GET", "/photos/" + oddKeys[0], "127.0.0.1", nil, 200},
		{"GET", "/photos/" + oddKeys[0], "rebound.example.com", nil, 403},
		{"GET", "/photos/" + oddKeys[0], "127.0.0.1.example.com", nil, 403},
		{"DELETE", "/photos/other", "localhost", nil, 204},
		{"POST", "/photos?delete=", "127.0.0.1:9000", map[string]string{"Origin": "https://example.com"}, 403},
		{"DELETE", "/photos/" + oddKeys[0], "127.0.0.1:9000", map[string]string{"Sec-Fetch-Site": "cross-site"}, 403},
	} {
		for _, s := range []side{reads, writes} {
			req, err := http.NewRequestWithContext(t.Context(), c.method, s.url+c.path, strings.NewReader(""))
			must(t, err)
			req.Host = c.host
			for name, v := range c.header {
				req.Header.Set(name, v)
			}
			status := c.status
			if s == reads && c.method != "GET" {
				status = 403
			}
			if resp, body := s.do(t, req); resp.StatusCode != status {
				t.Errorf("%s %s at %s %v: HTTP %d %s, want %d",
					c.method, c.path, c.host, c.header, resp.StatusCode, body, status)
			}
		}
	}
}

// Signatures: what is unsigned, wrongly signed, old or presigned for another request is refused.
func TestSignatures(t *testing.T) {
	_, shoal, _ := served(t, oddKeys)
	const path = "/" + bucket + "/train/b/ü+%20 &?#'.jpg"
	request := func(change func(r *http.Request)) *http.Request {
		r, err := http.NewRequestWithContext(t.Context(), "GET", shoal.url, nil)
		must(t, err)
		r.URL.Path = path
		if change != nil {
			change(r)
		}
		return r
	}
	signed := func(r *http.Request, access, secret string) *http.Request {
		return signer.SignV4(*r, access, secret, "", "eu-west-1")
	}
	presigned := func(r *http.Request, expires int64) *http.Request {
		return signer.PreSignV4(*r, access, secret, "", "eu-west-1", expires)
	}
	with := func(r *http.Request, change func(r *http.Request)) *http.Request { change(r); return r }
	hash := func(r *http.Request) { r.Header.Set("X-Amz-Content-Sha256", "UNSIGNED-PAYLOAD") }
	for name, c := range map[string]struct {
		r    *http.Request
		want string
	}{
		"signed":         {signed(request(hash), access, secret), ""},
		"without a hash": {signed(request(nil), access, secret), "InvalidRequest"},
		"presigned":      {presigned(request(nil), 60), ""},
		"unsigned":       {request(nil), "AccessDenied"},
		"unknown key":    {signed(request(hash), "nobody", secret), "InvalidAccessKeyId"},
		"wrong secret":   {signed(request(hash), access, "wrong"), "SignatureDoesNotMatch"},
		"version 2": {request(func(r *http.Request) { r.Header.Set("Authorization", "AWS a:b") }),
			"InvalidRequest"},
		"other path": {with(signed(request(hash), access, secret), func(r *http.Request) {
			r.URL.Path = "/photos/train/zero"
		}), "SignatureDoesNotMatch"},
		"other method": {with(signed(request(hash), access, secret), func(r *http.Request) {
			r.Method = "DELETE"
		}), "SignatureDoesNotMatch"},
		"other query": {with(presigned(request(nil), 60), func(r *http.Request) {
			r.URL.RawQuery += "&versionId=1"
		}), "SignatureDoesNotMatch"},
		"a header more": {with(signed(request(hash), access, secret), func(r *http.Request) {
			r.Header.Set("X-Amz-Acl", "public-read")
		}), "AccessDenied"},
		"old": {with(signed(request(hash), access, secret), func(r *http.Request) {
			r.Header.Set("X-Amz-Date", dateIn(t, r, -time.Hour))
		}), "RequestTimeTooSkewed"},
		"from tomorrow": {with(signed(request(hash), access, secret), func(r *http.Request) {
			r.Header.Set("X-Amz-Date", dateIn(t, r, time.Hour))
		}), "RequestTimeTooSkewed"},
		"signed in chunks": {signed(request(func(r *http.Request) {
			r.Header.Set("X-Amz-Content-Sha256", "STREAMING-AWS4-HMAC-SHA256-PAYLOAD")
		}), access, secret), "IncompleteBody"},
		"presigned forever": {presigned(request(nil), 8*24*3600), "AuthorizationQueryParametersError"},
		"half presigned": {request(func(r *http.Request) { r.URL.RawQuery = "X-Amz-Signature=00" }),
			"AuthorizationQueryParametersError"},
	} {
		resp, body := shoal.do(t, c.r)
		if got := code(body); got != c.want || (resp.StatusCode == http.StatusOK) != (c.want == "") {
			t.Errorf("%s: HTTP %d %s, want %q", name, resp.StatusCode, body, c.want)
		}
	}
	u, err := shoal.client.PresignedGetObject(t.Context(), bucket, "train/n01/1.jpg", time.Minute, url.Values{})
	must(t, err)
	r, err := http.NewRequestWithContext(t.Context(), "GET", u.String(), nil)
	must(t, err)
	if _, body := shoal.do(t, r); string(body) != "the content of train/n01/1.jpg" {
		t.Errorf("presigned by minio-go: %s", body)
	}
}

// dateIn is a request's date, moved within its day where that is possible.
func dateIn(t *testing.T, r *http.Request, d time.Duration) string {
	t.Helper()
	now, err := time.Parse("20060102T150405Z", r.Header.Get("X-Amz-Date"))
	must(t, err)
	if moved := now.Add(d); moved.Day() == now.Day() {
		return moved.Format("20060102T150405Z")
	}
	return now.Add(-d).Format("20060102T150405Z")
}

// An object of several extents comes whole, by GET, by ranges and by minio-go's own reader.
func TestLargeObject(t *testing.T) {
	origin, shoal, _ := served(t, nil, "train/big.bin")
	want, err := origin.client.GetObject(t.Context(), bucket, "train/big.bin", minio.GetObjectOptions{})
	must(t, err)
	all, err := io.ReadAll(want)
	must(t, err)
	must(t, want.Close())
	_, got := shoal.ask(t, "GET", "/"+bucket+"/train/big.bin", "", nil, nil)
	if !bytes.Equal(got, all) || len(all) != bigSize {
		t.Errorf("%d bytes", len(got))
	}
	o, err := shoal.client.GetObject(t.Context(), bucket, "train/big.bin", minio.GetObjectOptions{})
	must(t, err)
	defer o.Close()
	p := make([]byte, 3<<20)
	for _, off := range []int64{5 << 20, 100, 4<<20 - 1, 0} {
		if _, err := o.ReadAt(p, off); err != nil || !bytes.Equal(p, all[off:off+int64(len(p))]) {
			t.Errorf("at %d: %v", off, err)
		}
	}
}

// flipped changes a bit of a request's body, from its end if it is negative; -1 changes none.
type flipped struct{ at int }

func (f flipped) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Body != nil && r.Body != http.NoBody {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return nil, err
		}
		if f.at != -1 {
			body[(len(body)+f.at)%len(body)] ^= 1
		}
		r.Body = io.NopCloser(bytes.NewReader(body))
	}
	tr := &http.Transport{DisableKeepAlives: true}
	return tr.RoundTrip(r)
}

// Bodies that are signed chunk by chunk, as minio-go's are over plain HTTP, arrive as they were signed, or not at all.
func TestSignedChunks(t *testing.T) {
	origin, shoal, _ := served(t, oddKeys[:3])
	put := func(at, size int, trailer bool) (want []byte, err error) {
		want = make([]byte, size)
		_, _ = rand.NewChaCha8([32]byte{1}).Read(want)
		c, err := minio.New(strings.TrimPrefix(shoal.url, "http://"), &minio.Options{
			Creds: credentials.NewStaticV4(access, secret, ""), Region: s3server.Region, Transport: flipped{at},
			TrailingHeaders: trailer, MaxRetries: 1,
		})
		must(t, err)
		_, err = c.PutObject(t.Context(), bucket, oddKeys[0], bytes.NewReader(want), int64(size),
			minio.PutObjectOptions{PartSize: 5 << 20})
		return want, err
	}
	read := func(s side) []byte {
		o, err := s.client.GetObject(t.Context(), bucket, oddKeys[0], minio.GetObjectOptions{})
		must(t, err)
		defer o.Close()
		data, err := io.ReadAll(o)
		must(t, err)
		return data
	}
	for _, trailer := range []bool{false, true} {
		for _, size := range []int{6 << 20, 200_000, 64 << 10, 1, 0} {
			want, err := put(-1, size, trailer)
			if err != nil {
				t.Errorf("%d bytes, trailer %v: %v", size, trailer, err)
			} else if !bytes.Equal(read(origin), want) || !bytes.Equal(read(shoal), want) {
				t.Errorf("%d bytes, trailer %v: others arrived", size, trailer)
			}
		}
	}
	before := read(origin)
	for _, at := range []int{100, 70_000, 200_000, -10} { // the last one is in the signature of the end
		if _, err := put(at, 200_000, false); minio.ToErrorResponse(err).Code != "SignatureDoesNotMatch" {
			t.Errorf("a bit at %d was changed on the way: %v", at, err)
		}
	}
	for _, at := range []int{0, 5, 30} { // the size, the name, the signature
		if _, err := put(at, 200_000, false); err == nil {
			t.Errorf("a bit at %d was changed on the way", at)
		}
	}
	if got := read(origin); !bytes.Equal(got, before) {
		t.Errorf("what was refused was written: %d bytes instead of %d", len(got), len(before))
	}
}

// counting counts opens and releases.
type counting struct {
	*engine.Engine
	mu           sync.Mutex
	opened, open int
}

func (c *counting) Opened(m *catalog.Manifest, file int, reader uint32) {
	c.mu.Lock()
	c.opened, c.open = c.opened+1, c.open+1
	c.mu.Unlock()
	c.Engine.Opened(m, file, reader)
}

func (c *counting) Released(m *catalog.Manifest, file int) {
	c.mu.Lock()
	c.open--
	c.mu.Unlock()
	c.Engine.Released(m, file)
}

// A GET is an open, ranged GETs of one object are one together, and HEAD is none. In the end nothing is open.
func TestOpens(t *testing.T) {
	_, _, e := served(t, oddKeys)
	c := &counting{Engine: e}
	origin, _ := e.Origin()
	t.Run("reads", func(t *testing.T) {
		s := serve(t, c, origin, bucket)
		for range 2 {
			s.ask(t, "GET", "/photos/train/n01/1.jpg", "", nil, nil)
			s.ask(t, "HEAD", "/photos/train/n01/1.jpg", "", nil, nil)
		}
		for _, r := range []string{"bytes=0-9", "bytes=10-19", "bytes=-5"} {
			s.ask(t, "GET", "/photos/train/large", "", map[string]string{"Range": r}, nil)
		}
		if c.opened != 3 {
			t.Errorf("%d opens, want 2 of whole objects and 1 of ranges", c.opened)
		}
	})
	if c.open != 0 {
		t.Errorf("%d files are open", c.open)
	}
}

// A folder is served under the name of a bucket, and nothing is written to it.
func TestFolder(t *testing.T) {
	dir := t.TempDir()
	for _, k := range []string{"a-b/1", "a/1", "a0", "b/2"} {
		must(t, os.MkdirAll(filepath.Dir(filepath.Join(dir, k)), 0o755))
		must(t, os.WriteFile(filepath.Join(dir, k), []byte("the content of "+k), 0o644))
	}
	s := serve(t, open(t, dir, filepath.Join(t.TempDir(), "cache"), ""), nil, bucket)
	var got []string
	for o := range s.client.ListObjects(t.Context(), bucket, minio.ListObjectsOptions{Recursive: true}) {
		must(t, o.Err)
		got = append(got, o.Key)
	}
	if want := []string{"a-b/1", "a/1", "a0", "b/2"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	buckets, err := s.client.ListBuckets(t.Context())
	if err != nil || len(buckets) != 1 || buckets[0].Name != bucket {
		t.Errorf("%v, %v", buckets, err)
	}
	if location, err := s.client.GetBucketLocation(t.Context(), bucket); err != nil || location == "" {
		t.Errorf("%q, %v", location, err)
	}
	for _, c := range []struct{ method, path, query, code string }{
		{"GET", "/photos/a0", "", ""}, {"GET", "/photos/a", "", "NoSuchKey"}, {"PUT", "/photos/a0", "", "AccessDenied"},
		{"DELETE", "/photos/a0", "", "AccessDenied"},
		{"GET", "/photos/a0", "partNumber=1", ""}, {"GET", "/photos/a0", "partNumber=2", "NotImplemented"},
		{"GET", "/photos/a0", "versionId=1", "NotImplemented"}, {"GET", "/photos", "uploads=", "NotImplemented"},
		{"GET", "/photos", "continuation-token=x&list-type=2", "InvalidArgument"},
	} {
		if _, body := s.ask(t, c.method, c.path, c.query, nil, nil); code(body) != c.code {
			t.Errorf("%s %s?%s: %s, want %q", c.method, c.path, c.query, body, c.code)
		}
	}
}
