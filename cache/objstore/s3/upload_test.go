package s3_test

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"pgregory.net/rapid"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/objstore/s3"
	"github.com/shoalfs/shoal/lab/rig/memstore"
)

var quick = objstore.RetryPolicy{Base: 1, Cap: 1}

// TestS3SpansOneRequest: one GET, also where gaps are wide; a short body is temporary.
func TestS3SpansOneRequest(t *testing.T) {
	data := randomBytes(1 << 20)
	cut := false
	srv := &S3Server{}
	srv.Intercept = func(w http.ResponseWriter, r *http.Request) bool {
		if cut && r.Method == http.MethodGet {
			Reset(w, "HTTP/1.1 206 Partial Content\r\nETag: \"e\"\r\nLast-Modified: Mon, 02 Jan 2006 15:04:05 GMT\r\n"+
				"Content-Length: 20\r\nContent-Range: bytes 2-21/100\r\n\r\nhello", 200)
			return true
		}
		return false
	}
	s := newS3(t, srv, nil)
	o := objstore.Object{Key: "k", Size: int64(len(data)), ETag: srv.Put("k", data)}
	a, b, c := make([]byte, 100), make([]byte, 70_000), make([]byte, 1)
	spans := []objstore.Span{{Off: 50, P: a}, {Off: 400_000, P: b}, {Off: 1<<20 - 1, P: c}}
	must(t, s.ReadSpans(t.Context(), o, spans))
	if srv.Requests("GET") != 1 || !bytes.Equal(a, data[50:150]) || !bytes.Equal(b, data[400_000:470_000]) ||
		c[0] != data[1<<20-1] {
		t.Errorf("%d GETs, or wrong bytes", srv.Requests("GET"))
	}
	cut = true
	for _, spans := range [][]objstore.Span{
		{{Off: 2, P: make([]byte, 3)}, {Off: 21, P: make([]byte, 1)}}, // ends in the gap
		{{Off: 2, P: make([]byte, 20)}},                               // in a span
	} {
		err := s.ReadSpans(t.Context(), objstore.Object{Key: "k", Size: 100, ETag: "e"}, spans)
		if objstore.KindOf(err) != objstore.KindTransient || !strings.Contains(err.Error(), "after 5 of 20 bytes") ||
			!strings.Contains(err.Error(), "k") {
			t.Errorf("short body: %v", err)
		}
	}
}

// TestS3UploadRequests: what an upload costs, and what the server is asked to verify.
func TestS3UploadRequests(t *testing.T) {
	var mu sync.Mutex
	var requests []string
	srv := &S3Server{}
	srv.Intercept = func(w http.ResponseWriter, r *http.Request) bool {
		mu.Lock()
		defer mu.Unlock()
		crc := ""
		if r.Header.Get("X-Amz-Checksum-Crc32c") != "" {
			crc = " crc32c"
		}
		if r.Method == http.MethodPut && (crc == "" || r.Header.Get("X-Amz-Content-Sha256") != "UNSIGNED-PAYLOAD") {
			t.Errorf("a body without checksum, or hashed twice: %v", r.Header)
		}
		requests = append(requests, r.Method+crc)
		return false
	}
	s := newS3(t, srv, nil)
	for _, c := range []struct {
		size int
		want []string
	}{
		{0, []string{"PUT crc32c"}},
		{4 << 20, []string{"PUT crc32c"}},
		{4<<20 + 1, []string{"POST", "PUT crc32c", "POST crc32c", "HEAD"}},
		{6 << 20, []string{"POST", "PUT crc32c", "PUT crc32c", "POST crc32c", "HEAD"}},
	} {
		requests = nil
		if _, err := uploadAll(t.Context(), s, "k", randomBytes(c.size)); err != nil {
			t.Error(err)
		}
		if !slices.Equal(requests, c.want) {
			t.Errorf("%d bytes: %v, want %v", c.size, requests, c.want)
		}
	}
}

// TestS3UploadWithoutCRC: a store that refuses the header of CRC32C, as s3proxy does, is sent the MD5, of which it
// hears by one request in vain.
func TestS3UploadWithoutCRC(t *testing.T) {
	var refused, sums atomic.Int64
	srv := &S3Server{Intercept: func(w http.ResponseWriter, r *http.Request) bool {
		if r.Header.Get("Content-Md5") != "" {
			sums.Add(1)
		}
		if r.Header.Get("X-Amz-Checksum-Crc32c") == "" {
			return false
		}
		refused.Add(1)
		WriteS3Error(w, 501, "NotImplemented", "A header you provided implies functionality that is not implemented.")
		return true
	}}
	r := objstore.Retry(newS3(t, srv, nil), noPause(t))
	if _, err := r.PutNew(t.Context(), "small", []byte("x")); err != nil {
		t.Error(err)
	}
	data := randomBytes(12 << 20)
	if _, err := uploadAll(t.Context(), r, "k", data); err != nil {
		t.Error(err)
	}
	o, err := r.Stat(t.Context(), "k")
	must(t, err)
	got := make([]byte, len(data))
	if err := r.ReadAt(t.Context(), o, got, 0); err != nil || !bytes.Equal(got, data) {
		t.Errorf("other bytes, %v", err)
	}
	if refused.Load() != 1 || sums.Load() != 4 {
		t.Errorf("%d requests in vain, %d with an MD5", refused.Load(), sums.Load())
	}
	// In parts from the start.
	r = objstore.Retry(newS3(t, srv, nil), noPause(t))
	if _, err := uploadAll(t.Context(), r, "k2", data); err != nil {
		t.Error(err)
	}
}

// TestS3UploadETagOfTheObject: the object that an upload returns is the one that the store has, where the answer to
// the upload's end says another ETag, as s3proxy's does.
func TestS3UploadETagOfTheObject(t *testing.T) {
	behind := &S3Server{Bucket: "bucket"}
	s := newS3(t, &S3Server{Intercept: func(w http.ResponseWriter, r *http.Request) bool {
		if r.Method != http.MethodPost || !r.URL.Query().Has("uploadId") {
			behind.ServeHTTP(w, r)
			return true
		}
		answer := httptest.NewRecorder()
		behind.ServeHTTP(answer, r)
		fmt.Fprint(w, strings.Replace(answer.Body.String(), "<ETag>", "<ETag>x", 1))
		return true
	}}, nil)
	o, err := uploadAll(t.Context(), s, "k", randomBytes(6<<20))
	must(t, err)
	if err := s.ReadAt(t.Context(), o, make([]byte, 100), 0); err != nil {
		t.Error(err)
	}
}

// TestS3UploadFaults: what goes wrong on the way to the server, under retry.
func TestS3UploadFaults(t *testing.T) {
	data := randomBytes(6 << 20)
	is := func(r *http.Request, what string) bool {
		q := r.URL.Query()
		switch what {
		case "part":
			return r.Method == http.MethodPut && q.Has("uploadId")
		case "complete":
			return r.Method == http.MethodPost && q.Has("uploadId")
		case "begin":
			return r.Method == http.MethodPost && q.Has("uploads")
		}
		return false
	}
	flipped := func(srv *S3Server, w http.ResponseWriter, r *http.Request) bool {
		body, _ := io.ReadAll(r.Body)
		body[len(body)/2] ^= 1
		r.Body = io.NopCloser(bytes.NewReader(body))
		return false
	}
	for _, c := range []struct {
		name, what string
		fault      func(srv *S3Server, w http.ResponseWriter, r *http.Request) bool
		want       objstore.Kind // of the upload without Retry
	}{
		{"503", "part", func(_ *S3Server, w http.ResponseWriter, r *http.Request) bool {
			WriteS3Error(w, 503, "SlowDown", "Please reduce your request rate.") // before the body is read
			return true
		}, objstore.KindTransient},
		{"reset", "part", func(_ *S3Server, w http.ResponseWriter, r *http.Request) bool {
			Reset(w, "", 0)
			return true
		}, objstore.KindTransient},
		{"flipped bit", "part", flipped, objstore.KindTransient},
		{"503 at the start", "begin", func(_ *S3Server, w http.ResponseWriter, r *http.Request) bool {
			WriteS3Error(w, 503, "SlowDown", "Please reduce your request rate.")
			return true
		}, objstore.KindTransient},
		{"503 at the end", "complete", func(_ *S3Server, w http.ResponseWriter, r *http.Request) bool {
			WriteS3Error(w, 503, "SlowDown", "Please reduce your request rate.")
			return true
		}, objstore.KindTransient},
		{"error in an answer of 200", "complete", func(_ *S3Server, w http.ResponseWriter, r *http.Request) bool {
			WriteS3Error(w, 200, "InternalError", "We encountered an internal error. Please try again.")
			return true
		}, objstore.KindTransient},
		{"lost answer", "complete", func(srv *S3Server, w http.ResponseWriter, r *http.Request) bool {
			srv.Intercept = nil // this handler's request is let through, its answer is not
			srv.ServeHTTP(discard{http.Header{}}, r)
			Reset(w, "", 0)
			return true
		}, objstore.KindTransient},
	} {
		for _, retry := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, retry %v", c.name, retry), func(t *testing.T) {
				t.Parallel() // minio-go sleeps after a failure
				srv := &S3Server{}
				var once sync.Once
				srv.Intercept = func(w http.ResponseWriter, r *http.Request) (done bool) {
					if is(r, c.what) {
						once.Do(func() { done = c.fault(srv, w, r) })
					}
					return done
				}
				s := newS3(t, srv, nil)
				if !retry {
					if _, err := uploadAll(t.Context(), s, "k", data); objstore.KindOf(err) != c.want ||
						!strings.Contains(err.Error(), "bucket/k at http") {
						t.Errorf("error %v, want %v", err, c.want)
					}
					return
				}
				o, err := uploadAll(t.Context(), objstore.Retry(s, quick), "k", data)
				p := make([]byte, len(data))
				if err != nil || s.ReadAt(t.Context(), o, p, 0) != nil || !bytes.Equal(p, data) || srv.Uploads() != 0 {
					t.Errorf("%+v, %v; %d uploads left", o, err, srv.Uploads())
				}
			})
		}
	}
}

// TestLostAnswerUnderACustomerKey: where ETags tell nothing of the bytes, an object of as many parts is not taken for
// that of an upload whose end was answered to nobody: it may be an earlier one.
func TestLostAnswerUnderACustomerKey(t *testing.T) {
	key, err := objstore.ParseCustomerKey(make([]byte, 32))
	must(t, err)
	srv := &S3Server{OpaqueETags: true}
	var once sync.Once
	srv.Intercept = func(w http.ResponseWriter, r *http.Request) (done bool) {
		if r.Method == http.MethodPost && r.URL.Query().Has("uploadId") {
			once.Do(func() {
				srv.Intercept = nil
				srv.ServeHTTP(discard{http.Header{}}, r)
				Reset(w, "", 0)
				done = true
			})
		}
		return done
	}
	s := newS3(t, srv, func(cfg *s3.Config) { cfg.Store.CustomerKey = key })
	data := bytes.Repeat([]byte("x"), 6<<20)
	r := objstore.Retry(s, quick)
	u, err := r.Upload(t.Context(), "k", int64(len(data)), 6<<20)
	must(t, err)
	must(t, u.Part(t.Context(), 0, data))
	if o, err := u.Complete(t.Context()); objstore.KindOf(err) != objstore.KindNotFound || srv.Uploads() != 0 {
		t.Errorf("%+v, %v; %d uploads left", o, err, srv.Uploads())
	}
}

// discard is an answer that nobody gets.
type discard struct{ h http.Header }

func (d discard) Header() http.Header         { return d.h }
func (d discard) Write(p []byte) (int, error) { return len(p), nil }
func (d discard) WriteHeader(int)             {}

// TestS3PutNewConflict: 409 means that another request is under way; a look says how it ended.
func TestS3PutNewConflict(t *testing.T) {
	for _, exists := range []bool{true, false} {
		srv := &S3Server{}
		srv.Intercept = func(w http.ResponseWriter, r *http.Request) bool {
			if r.Method == http.MethodPut {
				WriteS3Error(w, 409, "ConditionalRequestConflict", "Conflicting conditional operation")
			}
			return r.Method == http.MethodPut
		}
		s := newS3(t, srv, nil)
		want := objstore.KindTransient
		if exists {
			srv.Put("k", []byte("theirs"))
			want = objstore.KindExists
		}
		if _, err := s.PutNew(t.Context(), "k", []byte("mine")); objstore.KindOf(err) != want {
			t.Errorf("there: %v: %v", exists, err)
		}
	}
}

// TestS3PartIsLent: when Part has failed, the caller may write to its slice at once.
func TestS3PartIsLent(t *testing.T) {
	s := newS3(t, &S3Server{Intercept: func(w http.ResponseWriter, r *http.Request) bool {
		if r.Method != http.MethodPut {
			return false
		}
		WriteS3Error(w, 403, "AccessDenied", "Access Denied") // while the body is still coming
		return true
	}}, nil)
	u, err := s.Upload(t.Context(), "k", 32<<20, 32<<20)
	must(t, err)
	p := make([]byte, 32<<20)
	for range 3 {
		err := u.Part(t.Context(), 0, p)
		clear(p) // the race detector is the judge
		if err == nil {
			t.Fatal("the part was taken")
		}
	}
	must(t, u.Abort(t.Context()))
}

// failing fails the second and the fifth write of each key before it is done, and the first delete after it.
type failing struct {
	objstore.Layer
	writes, deletes map[string]int
}

var errScripted error = &objstore.Error{Op: "test", Kind: objstore.KindTransient, Err: errors.New("scripted")}

func (f *failing) write(key string, do func() error) error {
	if f.writes[key]++; f.writes[key] == 2 || f.writes[key] == 5 {
		return errScripted
	}
	return do()
}

func (f *failing) delete(key string, do func() error) error {
	if f.deletes[key]++; f.deletes[key] == 1 {
		return cmp.Or(do(), errScripted)
	}
	return do()
}

func (f *failing) PutNew(ctx context.Context, key string, data []byte) (o objstore.Object, err error) {
	err = f.write(key, func() (err error) { o, err = f.Layer.PutNew(ctx, key, data); return err })
	return o, err
}

func (f *failing) Upload(ctx context.Context, key string, size, partSize int64) (objstore.Upload, error) {
	u := &failingUpload{f: f, key: key}
	err := f.write(key, func() (err error) { u.Upload, err = f.Layer.Upload(ctx, key, size, partSize); return err })
	return u, err
}

func (f *failing) Delete(ctx context.Context, key, etag string) error {
	return f.delete(key, func() error { return f.Layer.Delete(ctx, key, etag) })
}

type failingUpload struct {
	objstore.Upload
	f   *failing
	key string
}

func (u *failingUpload) Part(ctx context.Context, n int, p []byte) error {
	return u.f.write(u.key, func() error { return u.Upload.Part(ctx, n, p) })
}

func (u *failingUpload) Complete(ctx context.Context) (o objstore.Object, err error) {
	err = u.f.write(u.key, func() (err error) { o, err = u.Upload.Complete(ctx); return err })
	return o, err
}

func (u *failingUpload) Abort(ctx context.Context) error {
	return u.f.delete(u.key, func() error { return u.Upload.Abort(ctx) })
}

// TestUploadModel: any sequence of operations on a folder, and on the client of an S3 server, under
// faults and retry, does what it does on the model.
func TestUploadModel(t *testing.T) {
	base := t.TempDir()
	srv := &S3Server{PageSize: 2}
	store := newS3(t, srv, nil)
	run := 0
	rapid.Check(t, func(rt *rapid.T) {
		root, err := os.MkdirTemp(base, "")
		must(t, err)
		defer os.RemoveAll(root)
		d, err := objstore.NewDir(root)
		must(t, err)
		run++
		prefix := fmt.Sprintf("run%d/", run)
		type uploader interface {
			objstore.Reader
			objstore.Uploader
		}
		model := memstore.New()
		stores := []uploader{
			model,
			objstore.Retry(&failing{Layer: d, writes: map[string]int{}, deletes: map[string]int{}}, quick),
			objstore.Retry(objstore.Limit(objstore.NewMeter(store), 2), quick),
		}
		type pair struct {
			ups  []objstore.Upload
			data []byte
		}
		var open []pair
		key := func() string {
			return prefix + rapid.SampledFrom([]string{"a/x", "a/y", "b", "c/d/e"}).Draw(rt, "key")
		}
		// Contents differ, since under Retry PutNew of the very bytes that are there may succeed.
		version := uint64(0)
		content := func() []byte {
			version++
			return binary.BigEndian.AppendUint64(
				make([]byte, rapid.SampledFrom([]int{0, 1, 92}).Draw(rt, "size")), version)
		}
		// each runs f on all stores, which must agree on the kind of the outcome.
		each := func(what string, f func(i int, s uploader) error) error {
			var first error
			for i, s := range stores {
				err := f(i, s)
				if i == 0 {
					first = err
				} else if (err == nil) != (first == nil) || objstore.KindOf(err) != objstore.KindOf(first) {
					rt.Fatalf("%s: store %d says %v, the model %v", what, i, err, first)
				}
			}
			return first
		}
		pick := func() int {
			if len(open) == 0 {
				rt.Skip("no upload is open")
			}
			return rapid.IntRange(0, len(open)-1).Draw(rt, "upload")
		}
		rt.Repeat(map[string]func(*rapid.T){
			"putnew": func(*rapid.T) {
				k, data := key(), content()
				each("PutNew", func(_ int, s uploader) error { _, err := s.PutNew(t.Context(), k, data); return err })
			},
			"delete": func(*rapid.T) {
				k := key()
				each("Delete", func(_ int, s uploader) error { return s.Delete(t.Context(), k, "") })
			},
			"begin": func(*rapid.T) {
				p := pair{make([]objstore.Upload, len(stores)), content()}
				k := key()
				each("Upload", func(i int, s uploader) (err error) {
					p.ups[i], err = s.Upload(t.Context(), k, int64(len(p.data)), 100)
					return err
				})
				open = append(open, p)
			},
			"part": func(*rapid.T) {
				p := open[pick()]
				each("Part", func(i int, _ uploader) error { return p.ups[i].Part(t.Context(), 0, p.data) })
			},
			"complete": func(*rapid.T) {
				p := open[pick()]
				each("Complete", func(i int, _ uploader) error { _, err := p.ups[i].Complete(t.Context()); return err })
			},
			"abort": func(*rapid.T) {
				p := open[pick()]
				each("Abort", func(i int, _ uploader) error { return p.ups[i].Abort(t.Context()) })
			},
			"": func(*rapid.T) {
				want := memstore.Collect(rt, model.List(t.Context(), prefix, ""))
				for i, s := range stores[1:] {
					got := slices.DeleteFunc(memstore.Collect(rt, s.List(t.Context(), prefix, "")),
						func(o objstore.Object) bool {
							return strings.HasSuffix(o.Key, "/") // a folder whose files have gone
						})
					if !slices.Equal(keysOf(got), keysOf(want)) {
						rt.Fatalf("store %d lists %q, the model %q", i+1, keysOf(got), keysOf(want))
					}
					for j, o := range got {
						p, q := make([]byte, o.Size), make([]byte, want[j].Size)
						must(t, s.ReadAt(t.Context(), o, p, 0))
						must(t, model.ReadAt(t.Context(), want[j], q, 0))
						if !bytes.Equal(p, q) {
							rt.Fatalf("store %d: %q differs", i+1, o.Key)
						}
					}
				}
			},
		})
	})
}

// TestWordsAreNotSecrets: what is too short to be a secret is left in an error's words, and a secret is not.
func TestWordsAreNotSecrets(t *testing.T) {
	srv := &S3Server{Intercept: func(w http.ResponseWriter, r *http.Request) bool {
		WriteS3Error(w, 400, "InvalidRequest", "the latest test of hush-secret failed")
		return true
	}}
	for id, want := range map[string]string{"e": "the latest test of … failed", "test": "the latest test of … failed",
		"latest": "the … test of … failed"} {
		s := newS3(t, srv, func(c *s3.Config) { c.AccessKeyID = id })
		if _, err := s.PutNew(t.Context(), "k", nil); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("access key %q: %v", id, err)
		}
	}
}
