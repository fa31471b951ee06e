package s3_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/objstore/s3"
	"github.com/shoalfs/shoal/lab/rig/hostile"
	"github.com/shoalfs/shoal/lab/rig/port"
)

// TestS3Errors: every answer is told by kind, with the cause and the remedy in its text.
func TestS3Errors(t *testing.T) {
	for _, c := range []struct {
		name   string
		status int
		code   string
		want   objstore.Kind
		text   []string
	}{
		{"no bucket", 404, "NoSuchBucket", objstore.KindNotFound,
			[]string{"NoSuchBucket", "check the bucket's name", "AWS_ENDPOINT_URL"}},
		{"no key", 404, "NoSuchKey", objstore.KindNotFound, nil},
		{"changed", 412, "PreconditionFailed", objstore.KindChanged, []string{"shoal refresh"}},
		{"range", 416, "InvalidRange", objstore.KindChanged, nil},
		{"denied", 403, "AccessDenied", objstore.KindDenied, []string{"s3:GetObject", "s3:ListBucket"}},
		{"key id", 403, "InvalidAccessKeyId", objstore.KindDenied, []string{"AWS_ACCESS_KEY_ID"}},
		{"secret", 403, "SignatureDoesNotMatch", objstore.KindDenied, []string{"AWS_SECRET_ACCESS_KEY"}},
		{"expired", 400, "ExpiredToken", objstore.KindDenied, []string{"AWS_SESSION_TOKEN"}},
		{"clock", 403, "RequestTimeTooSkewed", objstore.KindInvalid, []string{"clock", "NTP"}},
		{"archived", 403, "InvalidObjectState", objstore.KindDenied, []string{"archive"}},
		{"region", 301, "PermanentRedirect", objstore.KindInvalid, []string{"AWS_REGION=eu-west-9"}},
		{"elsewhere", 302, "Strange", objstore.KindInvalid, []string{"AWS_REGION=eu-west-9"}},
		{"a login page", 302, "", objstore.KindInvalid, []string{"not an S3 API"}},
		{"elsewhere for now", 307, "TemporaryRedirect", objstore.KindTransient, nil},
		{"slow down", 503, "SlowDown", objstore.KindTransient, nil},
		{"internal", 500, "InternalError", objstore.KindTransient, nil},
		{"unknown 503", 503, "Strange", objstore.KindTransient, []string{"Strange", "503"}},
		{"too many", 429, "TooMuch", objstore.KindTransient, nil},
		{"unknown 403", 403, "Strange", objstore.KindDenied, nil},
		{"unknown 400", 400, "Strange", objstore.KindInvalid, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel() // minio-go sleeps after a failure
			srv, gets := &S3Server{}, atomic.Int64{}
			srv.Intercept = func(w http.ResponseWriter, r *http.Request) bool {
				if r.Method == http.MethodGet && strings.HasSuffix(r.URL.Path, "/some/key") {
					gets.Add(1)
				}
				if c.code == "" {
					http.Error(w, "Said by the server", c.status)
					return true
				}
				w.Header().Set("X-Amz-Bucket-Region", "eu-west-9")
				WriteS3Error(w, c.status, c.code, "Said by the server for hush-secret, Signature=abcdef0123")
				return true
			}
			s := newS3(t, srv, nil)
			err := s.ReadAt(t.Context(), objstore.Object{Key: "some/key", Size: 10, ETag: "e"}, make([]byte, 5), 0)
			if got := objstore.KindOf(err); err == nil || got != c.want {
				t.Fatalf("kind %v, want %v: %v", got, c.want, err)
			}
			if sent := s.Requests().Get; sent != 1 || gets.Load() != 1 {
				t.Errorf("%d GETs are told, and %d came, of one", sent, gets.Load())
			}
			if strings.Contains(err.Error(), "not an S3 API") && c.code != "" {
				t.Errorf("it answers as one: %v", err)
			}
			for _, want := range append(c.text, "some/key", "Said by the server") {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%q is not in: %v", want, err)
				}
			}
			for _, secret := range []string{"hush-secret", "key-id", "abcdef0123"} {
				if strings.Contains(err.Error(), secret) {
					t.Errorf("the text holds %q: %v", secret, err)
				}
			}
			if _, err := s.Stat(t.Context(), "some/key"); objstore.KindOf(err) == objstore.KindOther {
				t.Errorf("Stat: %v", err) // HEAD answers have no body: the status decides
			}
			for _, err := range s.List(t.Context(), "p/", "") {
				if objstore.KindOf(err) != c.want ||
					!strings.Contains(err.Error(), "s3://bucket/p/ at http://127.0.0.1") {
					t.Errorf("List: %v", err)
				}
			}
		})
	}
}

// TestS3Broken: what goes wrong below the S3 API.
func TestS3Broken(t *testing.T) {
	const head = "HTTP/1.1 206 Partial Content\r\nETag: \"e\"\r\nLast-Modified: Mon, 02 Jan 2006 15:04:05 GMT\r\n" +
		"Content-Length: 5\r\nContent-Range: bytes 2-6/10\r\n\r\nhello"
	answer := func(s string) func(w http.ResponseWriter, r *http.Request) bool {
		return func(w http.ResponseWriter, r *http.Request) bool { Reset(w, s, len(s)); return true }
	}
	for _, c := range []struct {
		name      string
		intercept func(w http.ResponseWriter, r *http.Request) bool
		want      objstore.Kind
		text      string
	}{
		{"reset", func(w http.ResponseWriter, r *http.Request) bool {
			Reset(w, "", 0)
			return true
		}, objstore.KindTransient, ""},
		{"truncated head", answer(head[:30]), objstore.KindTransient, ""},
		{"truncated body", answer(head[:len(head)-2]), objstore.KindTransient, "after 3 of 5 bytes"},
		{"other length", answer(strings.Replace(strings.Replace(head, "th: 5", "th: 4", 1), "hello", "hell", 1)),
			objstore.KindTransient, "the answer has 4"},
		{"other range", answer(strings.Replace(head, "2-6/10", "3-7/10", 1)), objstore.KindTransient, "3-7/10"},
		{"too long a range", answer(strings.Replace(head, "2-6/10", "2-7/10", 1)), objstore.KindTransient, "2-7/10"},
		{"two ranges", answer(strings.Replace(head, "Content-Range", "Content-Range: bytes 3-7/10\r\nContent-Range",
			1)), objstore.KindTransient, "3-7/10"},
		{"chunked", answer(strings.Replace(strings.Replace(head, "Content-Length: 5", "Transfer-Encoding: chunked", 1),
			"hello", "5\r\nhello\r\n0\r\n\r\n", 1)), 0, ""},
		{"wrong range header", answer(strings.Replace(head, "bytes 2-6/10", "nonsense", 1)), objstore.KindTransient,
			"nonsense"},
		{"other size", answer(strings.Replace(head, "2-6/10", "2-6/11", 1)), objstore.KindChanged, ""},
		{"unknown size", answer(strings.Replace(head, "2-6/10", "2-6/*", 1)), 0, ""},
		{"other etag", answer(strings.Replace(head, `"e"`, `"f"`, 1)), objstore.KindChanged, "now holds ETag f"},
		{"200 for a range", answer("HTTP/1.1 200 OK\r\nETag: \"e\"\r\nLast-Modified: Mon, 02 Jan 2006 15:04:05 " +
			"GMT\r\nContent-Length: 10\r\n\r\n0123456789"), objstore.KindInvalid, "Range"},
		{"not HTTP", answer("SSH-2.0-OpenSSH_9.2\r\n"), objstore.KindTransient, ""},
		{"sound", answer(head), 0, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newS3(t, &S3Server{Intercept: c.intercept}, nil)
			p := make([]byte, 5)
			err := s.ReadAt(t.Context(), objstore.Object{Key: "k", Size: 10, ETag: "e"}, p, 2)
			if c.want == 0 {
				if err != nil || string(p) != "hello" {
					t.Fatalf("read %q, %v", p, err)
				}
				return
			}
			if err == nil || objstore.KindOf(err) != c.want || !strings.Contains(err.Error(), c.text) {
				t.Errorf("error %v, want kind %v with %q", err, c.want, c.text)
			}
		})
	}
}

// TestS3Unsendable: a request that no header can hold is refused, and not tried again.
func TestS3Unsendable(t *testing.T) {
	for _, c := range []struct{ etag, token, header string }{
		{"e\x01", "", "If-Match"}, {"e", "hush-token\n", "X-Amz-Security-Token"}} {
		s := newS3(t, &S3Server{}, func(cfg *s3.Config) { cfg.SessionToken = c.token })
		err := s.ReadAt(t.Context(), objstore.Object{Key: "k", Size: 10, ETag: c.etag}, make([]byte, 5), 2)
		if objstore.KindOf(err) != objstore.KindInvalid || !strings.Contains(err.Error(), c.header) ||
			!strings.Contains(err.Error(), "control character") || strings.Contains(err.Error(), "hush") {
			t.Error(err)
		}
	}
}

// TestS3WholeAnswers: what may come as the answer to a GET without Range. Each goes over a bare connection and,
// for an ETag that cannot be sent there, over net/http.
func TestS3WholeAnswers(t *testing.T) {
	const (
		etag   = "ETag: \"e\"\r\n"
		date   = "Last-Modified: Mon, 02 Jan 2006 15:04:05 GMT\r\n"
		whole  = "HTTP/1.1 200 OK\r\n" + etag + date
		part   = "HTTP/1.1 206 Partial Content\r\n" + etag + date + "Content-Length: 10\r\n"
		length = "Content-Length: 10\r\n\r\n"
		chunks = "Transfer-Encoding: chunked\r\n\r\n"
		bytes  = "0123456789"
	)
	weak := strings.Replace(whole, `"e"`, `W/"e"`, 1)
	for _, c := range []struct {
		name, answer string
		want         objstore.Kind
		text         string
	}{
		{"whole", whole + length + bytes, 0, ""},
		{"a part", part + "Content-Range: bytes 500-509/5000\r\n\r\n" + bytes, objstore.KindTransient,
			"bytes 500-509/5000"},
		{"the first part", part + "Content-Range: bytes 0-9/5000\r\n\r\n" + bytes, objstore.KindTransient,
			"bytes 0-9/5000"},
		{"all of it as a part", part + "Content-Range: bytes 0-9/10\r\n\r\n" + bytes, objstore.KindTransient,
			"HTTP 206"},
		{"a part of no range", part + "\r\n" + bytes, objstore.KindTransient, "HTTP 206"},
		{"200 with a range", whole + "Content-Range: bytes 10-19/20\r\n" + length + bytes, objstore.KindTransient,
			"bytes 10-19/20"},
		{"shorter", whole + "Content-Length: 4\r\n\r\n0123", objstore.KindTransient, "the answer has 4"},
		{"longer", whole + "Content-Length: 12\r\n\r\n0123456789ab", objstore.KindTransient, "the answer has 12"},
		{"no ETag", "HTTP/1.1 200 OK\r\n" + date + length + bytes, objstore.KindTransient, "no ETag"},
		{"another ETag", strings.Replace(whole, `"e"`, `"f"`, 1) + length + bytes, objstore.KindChanged, "ETag f"},
		{"the ETag, weak", weak + length + bytes, objstore.KindTransient, "proxy"},
		{"two ETags", strings.Replace(whole, `"e"`, "\"e\"\r\nETag: \"f\"", 1) + length + bytes, objstore.KindTransient,
			"ETag"},
		{"one ETag, twice", strings.Replace(whole, `"e"`, "\"e\"\r\nETag: \"e\"", 1) + length + bytes, 0, ""},
		{"two ranges", whole + "Content-Range: bytes 0-9/10\r\nContent-Range: bytes 1-9/10\r\n" + length + bytes,
			objstore.KindTransient, "Content-Range"},
		{"a head of 100 KB", whole + "X: " + strings.Repeat("x", 100<<10) + "\r\n" + length + bytes,
			objstore.KindTransient, ""},
		{"chunked", whole + chunks + "4\r\n0123\r\n6;x=y\r\n456789\r\n0\r\n\r\n", 0, ""},
		{"chunked, shorter", whole + chunks + "4\r\n0123\r\n0\r\n\r\n", objstore.KindTransient, "after 4 of 10"},
		{"chunked, longer", whole + chunks + "b\r\n0123456789a\r\n0\r\n\r\n", objstore.KindTransient,
			"longer than announced"},
		{"chunked, cut before its end", whole + chunks + "a\r\n0123456789\r\n", objstore.KindTransient, ""},
		{"chunks that are none", whole + chunks + bytes, objstore.KindTransient, ""},
		{"up to the end of the connection", whole + "Connection: close\r\n\r\n" + bytes, 0, ""},
		{"up to an early end", whole + "Connection: close\r\n\r\n0123", objstore.KindTransient, "after 4 of 10"},
		{"up to a late end", whole + "Connection: close\r\n\r\n" + bytes + "a", objstore.KindTransient,
			"longer than announced"},
		{"HTTP/1.0", strings.Replace(whole, "1.1", "1.0", 1) + "\r\n" + bytes, 0, ""},
	} {
		for _, etag := range []string{"e", "e e"} {
			t.Run(c.name+"/"+etag, func(t *testing.T) {
				answer := strings.ReplaceAll(c.answer, `"e"`, `"`+etag+`"`)
				s := newS3(t, &S3Server{Intercept: func(w http.ResponseWriter, r *http.Request) bool {
					if !r.URL.Query().Has("versions") {
						Reset(w, answer, len(answer))
					}
					return !r.URL.Query().Has("versions")
				}}, nil)
				o := objstore.Object{Key: "k", Size: 10, ETag: etag}
				for _, read := range []func(p []byte) error{
					func(p []byte) error { return s.ReadAt(t.Context(), o, p, 0) },
					func(p []byte) error {
						return s.ReadSpans(t.Context(), o,
							[]objstore.Span{{Off: 0, P: p[:3]}, {Off: 3, P: p[3:6]}, {Off: 6, P: p[6:]}})
					},
				} {
					p := make([]byte, 10)
					err := read(p)
					if c.want == 0 && (err != nil || string(p) != "0123456789") {
						t.Errorf("read %q, %v", p, err)
					}
					if c.want != 0 && (objstore.KindOf(err) != c.want || !strings.Contains(err.Error(), c.text)) {
						t.Errorf("error %v, want kind %v with %q", err, c.want, c.text)
					}
				}
			})
		}
	}
}

// TestS3PutEmpty: an empty object goes up with a Content-Length and without a body.
func TestS3PutEmpty(t *testing.T) {
	var length int64 = -1
	var encoding []string
	s := newS3(t, &S3Server{Intercept: func(w http.ResponseWriter, r *http.Request) bool {
		length, encoding = r.ContentLength, r.TransferEncoding
		return false
	}}, nil)
	if _, err := s.PutNew(t.Context(), "empty", nil); err != nil {
		t.Fatal(err)
	}
	if length != 0 || len(encoding) != 0 {
		t.Errorf("Content-Length %d, Transfer-Encoding %v", length, encoding)
	}
}

func TestS3IgnoresIfMatch(t *testing.T) {
	srv := &S3Server{IgnoreIfMatch: true}
	s := newS3(t, srv, nil)
	old := objstore.Object{Key: "k", Size: 3, ETag: srv.Put("k", []byte("old"))}
	srv.Put("k", []byte("new"))
	if err := s.ReadAt(t.Context(), old, make([]byte, 3), 0); objstore.KindOf(err) != objstore.KindChanged {
		t.Errorf("read of an old version from a server without If-Match: %v", err)
	}
}

func TestS3WeakETag(t *testing.T) {
	srv := &S3Server{NoETag: true}
	strict := newS3(t, srv, nil)
	srv.Put("k", []byte("content"))
	if _, err := strict.Stat(t.Context(), "k"); objstore.KindOf(err) != objstore.KindInvalid ||
		!strings.Contains(err.Error(), "--store weak-etag") {
		t.Errorf("Stat of an object without ETag: %v", err)
	}
	for _, err := range strict.List(t.Context(), "", "") {
		if objstore.KindOf(err) != objstore.KindInvalid || !strings.Contains(err.Error(), "k:") {
			t.Errorf("List of an object without ETag: %v", err)
		}
	}
	weak, err := s3.New(t.Context(), s3.Config{
		Endpoint: strict.Endpoint(), Bucket: "bucket", Anonymous: true, Store: objstore.StoreOptions{WeakETag: true},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer weak.Close()
	var o objstore.Object
	for l, err := range weak.List(t.Context(), "", "") {
		if err != nil {
			t.Fatal(err)
		}
		o = l
	}
	if s, err := weak.Stat(t.Context(), "k"); err != nil || s.ETag != o.ETag {
		t.Errorf("Stat says %q, List says %q (%v)", s.ETag, o.ETag, err)
	}
	p := make([]byte, 7)
	if err := weak.ReadAt(t.Context(), o, p, 0); err != nil || string(p) != "content" {
		t.Errorf("read %q, %v", p, err)
	}
	srv.Put("k", []byte("longer content"))
	for _, n := range []int{7, 3} {
		if err := weak.ReadAt(t.Context(), o, make([]byte, n), 0); objstore.KindOf(err) != objstore.KindChanged {
			t.Errorf("read of %d bytes of a changed object: %v", n, err)
		}
	}
	// As many bytes at another time.
	srv.PutAt("k", []byte("CONTENT"), o.ModTime.Add(2*time.Second))
	for _, n := range []int{7, 3} {
		if err := weak.ReadAt(t.Context(), o, make([]byte, n), 0); objstore.KindOf(err) != objstore.KindChanged {
			t.Errorf("read of %d bytes of an object of another time: %v", n, err)
		}
	}
	// Where listing or answer tell no time, the size is what is left.
	srv.PutAt("untimed", []byte("content"), time.Time{})
	for _, o := range []objstore.Object{{Key: "untimed", Size: 7, ETag: o.ETag}, {Key: "k", Size: 7, ETag: "weak-7"}} {
		for _, n := range []int{7, 3} {
			if err := weak.ReadAt(t.Context(), o, make([]byte, n), 0); err != nil {
				t.Errorf("%s: %v", o.Key, err)
			}
		}
		o.Size, o.ETag = 8, "weak-8"
		for _, n := range []int{8, 3} {
			if err := weak.ReadAt(t.Context(), o, make([]byte, n), 0); objstore.KindOf(err) != objstore.KindChanged {
				t.Errorf("%s: read of %d bytes of another size: %v", o.Key, n, err)
			}
		}
	}
}

// TestS3ReusesConnections: with as many connections as readers, no request opens another.
func TestS3ReusesConnections(t *testing.T) {
	const readers, reads = 64, 20
	var mu sync.Mutex
	conns := map[string]map[string]bool{"GET": {}, "HEAD": {}} // by the method and their other end
	srv := &S3Server{Bucket: "bucket", Intercept: func(_ http.ResponseWriter, r *http.Request) bool {
		mu.Lock()
		defer mu.Unlock()
		conns[r.Method][r.RemoteAddr] = true
		return false
	}}
	data := bytes.Repeat([]byte("x"), 60_000)
	etag := srv.Put("k", data)
	hs := httptest.NewServer(srv)
	defer hs.Close()
	s, err := s3.New(t.Context(), s3.Config{Endpoint: hs.URL, Bucket: "bucket", Anonymous: true})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	var wg sync.WaitGroup
	for range readers {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for i := range reads {
				n := len(data) - i%2*1000 // whole objects and ranges
				if err := s.ReadAt(t.Context(), objstore.Object{Key: "k", Size: 60_000, ETag: etag}, make([]byte, n),
					0); err != nil {
					t.Error(err)
					return
				}
				if _, err := s.Stat(t.Context(), "missing"); objstore.KindOf(err) != objstore.KindNotFound {
					t.Error(err)
				}
			}
		}()
	}
	wg.Wait()
	if n := len(conns["GET"]); n > readers {
		t.Errorf("%d connections for the GETs of %d readers", n, readers)
	}
	// HEADs go by net/http, which may dial for a request that then gets another's connection: on a busy machine a
	// few more than readers are normal.
	if n := len(conns["HEAD"]); n > readers*reads/4 {
		t.Errorf("%d connections for %d HEADs", n, readers*reads)
	}
	if got, want := srv.Requests("GET"), readers*reads; got != want {
		t.Errorf("%d GETs for %d reads", got, want)
	}
}

func TestS3CancelDuringBody(t *testing.T) {
	started := make(chan struct{})
	srv := &S3Server{Intercept: func(w http.ResponseWriter, r *http.Request) bool {
		w.Header().Set("ETag", `"e"`)
		w.Header().Set("Last-Modified", time.Now().UTC().Format(http.TimeFormat))
		w.Header().Set("Content-Length", "10")
		w.Write([]byte("half"))
		w.(http.Flusher).Flush()
		close(started)
		Hang(r, time.Minute)
		return true
	}}
	s := newS3(t, srv, nil)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() { <-started; cancel() }()
	err := s.ReadAt(ctx, objstore.Object{Key: "k", Size: 10, ETag: "e"}, make([]byte, 10), 0)
	if !errors.Is(err, context.Canceled) {
		t.Errorf("ReadAt canceled in its body: %v", err)
	}
}

// TestS3Check: what a user sees who has one thing wrong.
func TestS3Check(t *testing.T) {
	good := &S3Server{Bucket: "bucket", AccessKey: "key-id"}
	endpoint := good.Start(t)
	html := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprint(w, "<html><body>It works!</body></html>")
	}))
	t.Cleanup(html.Close)
	tlsServer := httptest.NewUnstartedServer(good)
	tlsServer.Config.ErrorLog = log.New(io.Discard, "", 0) // it is told of our failed handshakes
	tlsServer.StartTLS()
	t.Cleanup(tlsServer.Close)
	closed, release, err := port.Hold()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(release)
	refused := "http://" + closed
	waits, hangsUp := "http://"+patient(t), "https://"+strict(t, tlsServer.TLS)

	for _, c := range []struct {
		name string
		cfg  s3.Config
		want objstore.Kind
		text []string
	}{
		{"sound", s3.Config{Endpoint: endpoint}, 0, nil},
		{"bucket", s3.Config{Endpoint: endpoint, Bucket: "other"}, objstore.KindNotFound,
			[]string{"s3://other/ at " + endpoint, "check the bucket's name"}},
		{"credential", s3.Config{Endpoint: endpoint, AccessKeyID: "wrong"}, objstore.KindDenied,
			[]string{"InvalidAccessKeyId", "AWS_ACCESS_KEY_ID", endpoint}},
		{"anonymous", s3.Config{Endpoint: endpoint, Anonymous: true}, objstore.KindDenied, []string{"AccessDenied"}},
		{"refused", s3.Config{Endpoint: refused}, objstore.KindTransient,
			[]string{"connection refused", "3 tries", "AWS_ENDPOINT_URL", refused}},
		{"refused, of a near tier", s3.Config{Endpoint: refused, Setting: "--near-endpoint"}, objstore.KindTransient,
			[]string{"check --near-endpoint (now " + refused}},
		{"https to http, of a near tier", s3.Config{Endpoint: strings.Replace(endpoint, "http", "https", 1),
			Setting: "--near-endpoint"}, objstore.KindInvalid, []string{"(set --near-endpoint=" + endpoint + ")"}},
		{"https to http, by the variable for S3", s3.Config{Endpoint: strings.Replace(endpoint, "http", "https", 1),
			Getenv: func(name string) string {
				return map[string]string{"AWS_ENDPOINT_URL_S3": "x"}[name]
			}}, objstore.KindInvalid, []string{"(set AWS_ENDPOINT_URL_S3=" + endpoint + ")"}},
		{"no such host", s3.Config{Endpoint: "http://store.invalid:9000"}, objstore.KindTransient,
			[]string{"store.invalid", "AWS_ENDPOINT_URL"}},
		{"not S3", s3.Config{Endpoint: html.URL}, objstore.KindInvalid, []string{"not an S3 API", html.URL}},
		{"http to https", s3.Config{Endpoint: strings.Replace(tlsServer.URL, "https", "http", 1)}, objstore.KindInvalid,
			[]string{"speaks TLS", "set AWS_ENDPOINT_URL=" + tlsServer.URL}},
		{"https to http", s3.Config{Endpoint: strings.Replace(endpoint, "http", "https", 1)}, objstore.KindInvalid,
			[]string{"speaks plain HTTP", "set AWS_ENDPOINT_URL=" + endpoint}},
		{"no scheme, to http", s3.Config{Endpoint: strings.TrimPrefix(endpoint, "http://")}, objstore.KindInvalid,
			[]string{"set AWS_ENDPOINT_URL=" + endpoint}},
		{"https to http that waits for a request", s3.Config{Endpoint: strings.Replace(waits, "http", "https", 1)},
			objstore.KindInvalid, []string{"set AWS_ENDPOINT_URL=" + waits}},
		{"http to TLS that hangs up", s3.Config{Endpoint: strings.Replace(hangsUp, "https", "http", 1)},
			objstore.KindInvalid, []string{"set AWS_ENDPOINT_URL=" + hangsUp}},
		{"unknown authority", s3.Config{Endpoint: tlsServer.URL}, objstore.KindInvalid, []string{"AWS_CA_BUNDLE"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			cfg := c.cfg
			if cfg.Bucket == "" {
				cfg.Bucket = "bucket"
			}
			if cfg.AccessKeyID == "" && !cfg.Anonymous {
				cfg.AccessKeyID = "key-id"
			}
			if !cfg.Anonymous {
				cfg.SecretAccessKey = "hush-secret"
			}
			s, err := s3.New(t.Context(), cfg)
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			err = s.Check(t.Context())
			if c.want == 0 {
				if err != nil {
					t.Error(err)
				}
				return
			}
			if objstore.KindOf(err) != c.want {
				t.Fatalf("kind %v, want %v: %v", objstore.KindOf(err), c.want, err)
			}
			for _, want := range c.text {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%q is not in: %v", want, err)
				}
			}
			if strings.Contains(err.Error(), "hush-secret") {
				t.Errorf("the text holds the secret: %v", err)
			}
			t.Log(err)
		})
	}

	t.Run("proxy that is away", func(t *testing.T) {
		s, err := s3.New(t.Context(), s3.Config{Endpoint: endpoint, Bucket: "bucket", Anonymous: true})
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		// net/http reads HTTP_PROXY once
		away := &net.OpError{Op: "proxyconnect", Net: "tcp", Err: syscall.ECONNREFUSED}
		if remedy := s.RemedyOf(away); !strings.Contains(remedy, "HTTPS_PROXY") {
			t.Error(remedy)
		}
	})
	t.Run("CA bundle", func(t *testing.T) {
		pem := filepath.Join(t.TempDir(), "ca.pem")
		writePEM(t, pem, tlsServer.Certificate().Raw)
		s, err := s3.New(t.Context(), s3.Config{
			Endpoint: tlsServer.URL, Bucket: "bucket", AccessKeyID: "key-id", SecretAccessKey: "x", CABundle: pem,
		})
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		if err := s.Check(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// patient serves HTTP, and waits for the end of anything else.
func patient(t *testing.T) string {
	return hostile.Listen(t, func(c net.Conn) {
		r := bufio.NewReader(c)
		if b, err := r.Peek(3); err == nil && string(b) == "GET" {
			_, _ = io.WriteString(c, "HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")
		}
		_, _ = io.Copy(io.Discard, r)
	})
}

// strict serves TLS, and hangs up on anything else.
func strict(t *testing.T, config *tls.Config) string {
	return hostile.Listen(t, func(c net.Conn) {
		if c := tls.Server(c, config); c.Handshake() == nil {
			_, _ = io.Copy(io.Discard, c)
		}
	})
}

// TestS3Environment: endpoint, region and credentials come from where the AWS tools take them.
func TestS3Environment(t *testing.T) {
	good := &S3Server{Bucket: "bucket", AccessKey: "from-env"}
	envURL := good.Start(t)
	fileServer := &S3Server{Bucket: "bucket", AccessKey: "from-file"}
	fileURL := fileServer.Start(t)
	dir := t.TempDir()
	config, creds := filepath.Join(dir, "config"), filepath.Join(dir, "credentials")
	write := func(path, text string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(config, "[default]\nregion = eu-north-1\n\n[profile rig]\nregion = eu-west-3\nendpoint_url = "+fileURL+
		"\n\n[profile nested]\nservices = local\n\n[services local]\ns3 =\n  endpoint_url = "+fileURL+"\n  other = 1\n")
	write(creds, "[rig]\naws_access_key_id = from-file\naws_secret_access_key = s\n[nested]\naws_access_key_id = "+
		"from-file\naws_secret_access_key = s\n")

	for _, c := range []struct {
		name string
		env  map[string]string
		want string // endpoint, or the error's text
		ok   bool
	}{
		{"variables", map[string]string{"AWS_ENDPOINT_URL": envURL, "AWS_ACCESS_KEY_ID": "from-env",
			"AWS_SECRET_ACCESS_KEY": "s"}, envURL, true},
		{"S3's own variable first",
			map[string]string{"AWS_ENDPOINT_URL": "http://127.0.0.1:1", "AWS_ENDPOINT_URL_S3": envURL,
				"AWS_ACCESS_KEY_ID": "from-env", "AWS_SECRET_ACCESS_KEY": "s"}, envURL, true},
		{"profile", map[string]string{"AWS_PROFILE": "rig"}, fileURL, true},
		{"services section", map[string]string{"AWS_PROFILE": "nested"}, fileURL, true},
		{"variable before profile", map[string]string{"AWS_PROFILE": "rig", "AWS_ENDPOINT_URL": envURL,
			"AWS_ACCESS_KEY_ID": "from-env", "AWS_SECRET_ACCESS_KEY": "s"}, envURL, true},
		{"half a pair", map[string]string{"AWS_ENDPOINT_URL": envURL, "AWS_ACCESS_KEY_ID": "from-env"},
			"AWS_SECRET_ACCESS_KEY is not", false},
		{"the other half", map[string]string{"AWS_ENDPOINT_URL": envURL, "AWS_SECRET_ACCESS_KEY": "hush"},
			"AWS_ACCESS_KEY_ID is not", false},
		{"none", map[string]string{"AWS_ENDPOINT_URL": envURL}, "set AWS_ACCESS_KEY_ID", false},
		{"no profile of that name", map[string]string{"AWS_ENDPOINT_URL": envURL, "AWS_PROFILE": "typo"},
			"typo", false},
		{"unsigned", map[string]string{"AWS_ENDPOINT_URL": envURL, "AWS_NO_SIGN_REQUEST": "true"}, envURL, true},
		{"Amazon", map[string]string{"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "s"},
			"https://s3.amazonaws.com", true},
		{"endpoint with a wrong port", map[string]string{"AWS_ENDPOINT_URL": "http://127.0.0.1:100000"}, "65535",
			false},
		{"endpoint with a path", map[string]string{"AWS_ENDPOINT_URL": envURL + "/bucket"}, "has a path", false},
		{"endpoint with a password", map[string]string{"AWS_ENDPOINT_URL": "http://me:hush@host"},
			"contains a user name", false},
		{"endpoint of another kind", map[string]string{"AWS_ENDPOINT_URL": "ftp://host"},
			"neither http nor https", false},
		{"no CA bundle", map[string]string{"AWS_ENDPOINT_URL": envURL, "AWS_CA_BUNDLE": "/none.pem"},
			"AWS_CA_BUNDLE", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Setenv("AWS_CONFIG_FILE", config)
			t.Setenv("AWS_SHARED_CREDENTIALS_FILE", creds)
			for k, v := range c.env {
				t.Setenv(k, v)
			}
			s, err := s3.New(t.Context(), s3.Config{Bucket: "bucket"})
			if !c.ok {
				if err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "hush") {
					t.Errorf("error %v, want %q and no secret", err, c.want)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			if s.Endpoint() != c.want {
				t.Errorf("endpoint %s, want %s", s.Endpoint(), c.want)
			}
			if c.want == envURL && c.env["AWS_NO_SIGN_REQUEST"] == "" || c.want == fileURL {
				if err := s.Check(t.Context()); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

// TestS3InstanceRole: without other credentials the metadata service is asked, for a short time.
func TestS3InstanceRole(t *testing.T) {
	good := &S3Server{Bucket: "bucket", AccessKey: "from-role"}
	endpoint := good.Start(t)
	imds := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/latest/api/token":
			fmt.Fprint(w, "token")
		case "/latest/meta-data/iam/security-credentials/":
			fmt.Fprint(w, "role")
		default:
			fmt.Fprintf(w, `{"Code":"Success","AccessKeyId":"from-role","SecretAccessKey":"s","Token":"t","Expiration":%q}`,
				time.Now().Add(time.Hour).UTC().Format(time.RFC3339))
		}
	}))
	defer imds.Close()
	t.Setenv("AWS_EC2_METADATA_DISABLED", "")
	t.Setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", imds.URL)
	s, err := s3.New(t.Context(), s3.Config{Endpoint: endpoint, Bucket: "bucket"})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if err := s.Check(t.Context()); err != nil {
		t.Error(err)
	}

	// A service that accepts connections and says nothing.
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	t.Setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://"+silent.Addr().String())
	_, err = s3.New(t.Context(), s3.Config{Endpoint: endpoint, Bucket: "bucket"})
	if objstore.KindOf(err) != objstore.KindDenied || !strings.Contains(err.Error(), "no credentials") ||
		!strings.Contains(err.Error(), "set AWS_ACCESS_KEY_ID") {
		t.Errorf("without credentials: %v", err)
	}
	t.Log(err)
}

// BenchmarkS3ReadAt reads 63-KB objects from a loopback server in this process; its allocations
// are the client's and the server's together. The two after it are the same under bare minio-go, and
// under net/http without signatures: what is theirs is not ours to save.
func BenchmarkS3ReadAt(b *testing.B) {
	srv := &S3Server{}
	data := bytes.Repeat([]byte("x"), 63_000)
	etag := srv.Put("train/n01440764/n01440764_10026.JPEG", data)
	s := newS3(b, srv, nil)
	o := objstore.Object{Key: "train/n01440764/n01440764_10026.JPEG", Size: int64(len(data)), ETag: etag}
	b.SetBytes(o.Size)
	b.ReportAllocs()
	b.SetParallelism(8)
	b.RunParallel(func(pb *testing.PB) {
		p := make([]byte, o.Size)
		for pb.Next() {
			if err := s.ReadAt(context.Background(), o, p, 0); err != nil {
				b.Error(err)
			}
		}
	})
}

func BenchmarkMinioBare(b *testing.B) {
	srv := &S3Server{Bucket: "bucket"}
	const key = "train/n01440764/n01440764_10026.JPEG"
	data := bytes.Repeat([]byte("x"), 63_000)
	etag := srv.Put(key, data)
	u, err := url.Parse(srv.Start(b))
	if err != nil {
		b.Fatal(err)
	}
	core, err := minio.NewCore(u.Host, &minio.Options{
		Creds: credentials.NewStaticV4("key-id", "hush-secret", ""), Region: "us-east-1",
		BucketLookup: minio.BucketLookupPath,
		MaxRetries:   1, Transport: &http.Transport{MaxIdleConnsPerHost: 512, DisableCompression: true},
	})
	if err != nil {
		b.Fatal(err)
	}
	b.SetBytes(int64(len(data)))
	b.ReportAllocs()
	b.SetParallelism(8)
	b.RunParallel(func(pb *testing.PB) {
		p := make([]byte, len(data))
		for pb.Next() {
			var opts minio.GetObjectOptions
			if err := opts.SetMatchETag(etag); err != nil {
				b.Error(err)
			}
			body, _, _, err := core.GetObject(context.Background(), "bucket", key, opts)
			if err != nil {
				b.Error(err)
				continue
			}
			if _, err := io.ReadFull(body, p); err != nil {
				b.Error(err)
			}
			body.Close()
		}
	})
}

func BenchmarkHTTPBare(b *testing.B) {
	srv := &S3Server{Bucket: "bucket"}
	const key = "train/n01440764/n01440764_10026.JPEG"
	data := bytes.Repeat([]byte("x"), 63_000)
	srv.Put(key, data)
	u, err := url.Parse(srv.Start(b) + "/bucket/" + key)
	if err != nil {
		b.Fatal(err)
	}
	tr := &http.Transport{MaxIdleConnsPerHost: 512, DisableCompression: true}
	b.SetBytes(int64(len(data)))
	b.ReportAllocs()
	b.SetParallelism(8)
	b.RunParallel(func(pb *testing.PB) {
		p := make([]byte, len(data))
		for pb.Next() {
			resp, err := tr.RoundTrip(&http.Request{Method: "GET", URL: u, Header: http.Header{"Authorization": {"x"}}})
			if err != nil {
				b.Error(err)
				continue
			}
			if _, err := io.ReadFull(resp.Body, p); err != nil {
				b.Error(err)
			}
			resp.Body.Close()
		}
	})
}
