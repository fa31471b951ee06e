package s3_test

import (
	"bytes"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/minio/minio-go/v7"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/objstore/s3"
	"github.com/shoalfs/shoal/lab/rig/proxy"
	"github.com/shoalfs/shoal/lab/rig/s3server"
)

const bucket = "conformance"

// newBucket makes the bucket on a server of its own.
func newBucket(t testing.TB) *s3server.Server {
	t.Helper()
	s, err := s3server.Start(t.Context(), s3server.Options{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Stop)
	c, err := s3server.Client(s.URL, 4)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.MakeBucket(t.Context(), bucket, minio.MakeBucketOptions{}); err != nil {
		t.Fatal(err)
	}
	return s
}

func open(t testing.TB, endpoint string) *s3.Store {
	t.Helper()
	store, err := s3.New(t.Context(), s3.Config{
		Endpoint:        endpoint,
		Region:          s3server.Region,
		Bucket:          bucket,
		AccessKeyID:     s3server.AccessKey,
		SecretAccessKey: s3server.SecretKey,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(store.Close)
	return store
}

// TestSignedHeadersConform runs the store contract's suite against the real server, through the proxy, with latency and
// faults in one request of ten: under Retry nobody notices. The signatures of all operations stay right with the
// headers of requester-pays and SSE-C, which the server takes and leaves unread.
func TestSignedHeadersConform(t *testing.T) {
	s := newBucket(t)
	p, err := proxy.Start(t.Context(), s.URL, proxy.Options{
		// Of this seed no answer to the beginning of an upload is lost: that would leave an upload more.
		Latency: time.Millisecond, Sigma: 0.5, Seed: 6,
		Faults: []proxy.Fault{
			{Kind: proxy.Unavailable, Op: proxy.OpAny, P: 0.05},
			{Kind: proxy.Reset, P: 0.05, At: 0.5},
			{Kind: proxy.Truncate, P: 0.05, At: 0.9},
			{Kind: proxy.Reset, Op: proxy.OpPut, P: 0.05},
			{Kind: proxy.Reset, Op: proxy.OpOther, P: 0.05}, // the answer to a Complete is lost
		},
	})
	must(t, err)
	t.Cleanup(p.Stop)
	key, err := objstore.ParseCustomerKey(bytes.Repeat([]byte{1}, 32))
	must(t, err)
	direct := open(t, s.URL)
	opened := 0
	conform(t, func(t *testing.T) Harness {
		opened++
		store, err := s3.New(t.Context(), s3.Config{
			Endpoint: p.URL, Region: s3server.Region, Bucket: bucket, AccessKeyID: s3server.AccessKey,
			SecretAccessKey: s3server.SecretKey,
			Store:           objstore.StoreOptions{RequesterPays: true, CustomerKey: key},
		})
		must(t, err)
		t.Cleanup(store.Close)
		stack := objstore.Retry(objstore.Limit(objstore.NewMeter(store), 64),
			objstore.RetryPolicy{Base: time.Millisecond, Cap: 5 * time.Millisecond, Tries: 20})
		return Harness{Store: stack, Filler: direct, Resumes: true, Lossy: true, Prefix: fmt.Sprintf("run%d/", opened)}
	})
	if st := p.Stats(); st.Faults["503"] == 0 || st.Faults["reset"] == 0 || st.Faults["truncate"] == 0 {
		t.Errorf("faults that struck: %v", st.Faults)
	}
}

// TestSkewedClock: a machine whose clock is an hour off, either way, works with the store's time, and says so once. An
// hour is more than the real server accepts.
func TestSkewedClock(t *testing.T) {
	s := newBucket(t)
	direct := open(t, s.URL)
	for _, off := range []time.Duration{-time.Hour, time.Hour, 4 * time.Minute} {
		var log bytes.Buffer
		opened := 0
		skewed := func() *s3.Store {
			store, err := s3.New(t.Context(), s3.Config{
				Endpoint: s.URL, Region: s3server.Region, Bucket: bucket, AccessKeyID: s3server.AccessKey,
				SecretAccessKey: s3server.SecretKey,
				Clock: func() time.Time {
					return time.Now().Add(off)
				}, Logger: slog.New(slog.NewTextHandler(&log, nil)),
			})
			must(t, err)
			t.Cleanup(store.Close)
			return store
		}
		o, err := direct.PutNew(t.Context(), fmt.Sprint("skew", off), []byte("hello"))
		must(t, err)
		p := make([]byte, 5)
		must(t, skewed().ReadAt(t.Context(), o, p, 0)) // the first request is a GET
		_, err = skewed().Stat(t.Context(), o.Key)     // or a HEAD, whose answer says nothing
		must(t, err)
		// A PUT's body cannot be sent again from below: that is left to the retries of the stack.
		_, err = objstore.Retry(skewed(), objstore.FastFail).PutNew(t.Context(), fmt.Sprint("skewed", off),
			[]byte("hello"))
		must(t, err)
		forwarded(t, skewed, off)
		conform(t, func(t *testing.T) Harness {
			opened++
			stack := objstore.Retry(objstore.Limit(objstore.NewMeter(skewed()), 64),
				objstore.RetryPolicy{Base: time.Millisecond, Cap: 5 * time.Millisecond, Tries: 20})
			return Harness{Store: stack, Filler: direct, Resumes: true, Prefix: fmt.Sprintf("runs%v/%d/", off, opened)}
		})
		if n := strings.Count(log.String(), "clock is off"); (n > 0) != (off.Abs() > 15*time.Minute) || n > opened+7 {
			t.Errorf("%v off: said %d times by %d stores\n%s", off, n, opened+7, log.String())
		}
	}
}

// forwarded: a small upload that is forwarded is sent again; of a larger one, which is gone, the client is told to send
// it again. The first request of each store is the one that meets the skew.
func forwarded(t *testing.T, skewed func() *s3.Store, off time.Duration) {
	t.Helper()
	for _, c := range []struct {
		length int
		chunks bool
	}{{10_000, false}, {10_000, true}, {1 << 20, false}, {1 << 20, true}} {
		store := skewed()
		put := func() (*http.Response, error) {
			body := io.NopCloser(bytes.NewReader(make([]byte, c.length)))
			return store.Forward(t.Context(),
				s3.Request{Method: "PUT", Key: fmt.Sprint("forwarded", off, c), Header: http.Header{}, Body: body,
					Length: int64(c.length), Chunks: c.chunks})
		}
		resp, err := put()
		if c.length > 64<<10 && off.Abs() > 15*time.Minute {
			if objstore.KindOf(err) != objstore.KindTransient {
				t.Errorf("%v off, %+v: %v, %v, want an error that is tried again", off, c, resp, err)
			}
			resp, err = put()
		}
		if err != nil || resp.StatusCode != http.StatusOK {
			t.Errorf("%v off, %+v: %v, %v", off, c, resp, err)
			continue
		}
		must(t, resp.Body.Close())
	}
}

// TestServerVerifiesChecksums: what our uploads rely on. A body that does not fit its CRC32C is refused,
// as a PUT and as a part, and as a whole object, by an error that is tried again.
func TestServerVerifiesChecksums(t *testing.T) {
	s := newBucket(t)
	c, err := s3server.Client(s.URL, 1)
	if err != nil {
		t.Fatal(err)
	}
	core := minio.Core{Client: c}
	const wrong = "AAAAAA=="
	data := []byte("not zero bytes")
	_, err = core.PutObject(t.Context(), bucket, "k", bytes.NewReader(data), int64(len(data)), "",
		"", minio.PutObjectOptions{
			DisableContentSha256: true, UserMetadata: map[string]string{"x-amz-checksum-crc32c": wrong},
		})
	if code := minio.ToErrorResponse(err).Code; code != "BadDigest" {
		t.Errorf("PUT: %v", err)
	}
	id, err := core.NewMultipartUpload(t.Context(), bucket, "k", minio.PutObjectOptions{
		UserMetadata: map[string]string{"x-amz-checksum-algorithm": "CRC32C", "x-amz-checksum-type": "FULL_OBJECT"},
	})
	if err != nil {
		t.Fatal(err)
	}
	_, err = core.PutObjectPart(t.Context(), bucket, "k", id, 1, bytes.NewReader(data), int64(len(data)),
		minio.PutObjectPartOptions{
			DisableContentSha256: true, CustomHeader: http.Header{"X-Amz-Checksum-Crc32c": {wrong}},
		})
	if code := minio.ToErrorResponse(err).Code; code != "BadDigest" {
		t.Errorf("part: %v", err)
	}
	right := minio.ChecksumCRC32C.ChecksumBytes(data).Encoded()
	part, err := core.PutObjectPart(t.Context(), bucket, "k", id, 1, bytes.NewReader(data), int64(len(data)),
		minio.PutObjectPartOptions{
			DisableContentSha256: true, CustomHeader: http.Header{"X-Amz-Checksum-Crc32c": {right}},
		})
	must(t, err)
	_, err = core.CompleteMultipartUpload(t.Context(), bucket, "k", id,
		[]minio.CompletePart{{PartNumber: 1, ETag: part.ETag, ChecksumCRC32C: right}}, minio.PutObjectOptions{
			UserMetadata: map[string]string{"x-amz-checksum-crc32c": wrong, "x-amz-checksum-type": "FULL_OBJECT"},
		})
	if code := minio.ToErrorResponse(err).Code; code != "BadDigest" {
		t.Errorf("whole: %v", err)
	}
	if err := core.AbortMultipartUpload(t.Context(), bucket, "k", id); err != nil {
		t.Error(err)
	}
}

// The server has the checksum of a whole object, also of an upload that another process has begun. One that takes
// the checksum for something else is not given it.
func TestServerHasTheChecksumOfTheWhole(t *testing.T) {
	s := newBucket(t)
	c, err := s3server.Client(s.URL, 1)
	must(t, err)
	core, store, data := minio.Core{Client: c}, open(t, s.URL), randomBytes(2*partSize+77)
	whole := map[string]string{"x-amz-checksum-algorithm": "CRC32C", "x-amz-checksum-type": "FULL_OBJECT"}
	inParts := map[string]string{"x-amz-checksum-algorithm": "CRC32C"}
	for name, begun := range map[string]map[string]string{"new": nil, "whole": whole, "in parts": inParts,
		"taken for whole": inParts} {
		u, err := store.Upload(t.Context(), name, int64(len(data)), partSize)
		must(t, err)
		if begun != nil {
			must(t, u.Abort(t.Context()))
			id, err := core.NewMultipartUpload(t.Context(), bucket, name, minio.PutObjectOptions{UserMetadata: begun})
			must(t, err)
			u, _, err = store.Resume(t.Context(), name, id, int64(len(data)), partSize)
			must(t, err)
		}
		if name == "taken for whole" {
			s3.SetWhole(u)
		}
		for n, p := range parts(data) {
			must(t, u.Part(t.Context(), n, p))
		}
		_, err = u.Complete(t.Context())
		must(t, err)
		o, err := c.StatObject(t.Context(), bucket, name, minio.StatObjectOptions{Checksum: true})
		must(t, err)
		is := o.ChecksumMode == "FULL_OBJECT" && o.ChecksumCRC32C == minio.ChecksumCRC32C.ChecksumBytes(data).Encoded()
		if is != (name == "new" || name == "whole") {
			t.Errorf("%s: %s %s", name, o.ChecksumMode, o.ChecksumCRC32C)
		}
	}
}

// What one author has stored, however, another does not delete, nor one whose ETag is right. What nobody is known to
// have stored stays, unless the ETag is given. The server compares the ETag with the deletion.
func TestAuthors(t *testing.T) {
	s := newBucket(t)
	store := open(t, s.URL)
	mine, theirs := objstore.WithAuthor(t.Context(), "mine"), objstore.WithAuthor(t.Context(), "theirs")
	for name, size := range map[string]int{"small": 10, "large": 6 << 20} {
		o, err := uploadAll(mine, store, name, pattern(size))
		must(t, err)
		made, err := store.Copy(mine, o, name+"-copy")
		must(t, err)
		for _, o := range []objstore.Object{o, made} {
			wantKind(t, "whatever is there", store.Delete(theirs, o.Key, ""), objstore.KindChanged)
			wantKind(t, "of another author", store.Delete(theirs, o.Key, o.ETag), objstore.KindChanged)
			wantKind(t, "another version", store.Delete(mine, o.Key, "e"), objstore.KindChanged)
			must(t, store.Delete(mine, o.Key, ""))
			_, err := store.Stat(t.Context(), o.Key)
			wantKind(t, "it has gone", err, objstore.KindNotFound)
			must(t, store.Delete(mine, o.Key, ""))
		}
		o, err = uploadAll(t.Context(), store, name, pattern(size))
		must(t, err)
		wantKind(t, "of nobody", store.Delete(mine, o.Key, ""), objstore.KindChanged)
		must(t, store.Delete(mine, o.Key, o.ETag))
	}
}

// Of writers that replace the same version by one PUT one wins; the server compares the ETag as it stores.
func TestMatch(t *testing.T) {
	s := newBucket(t)
	store := open(t, s.URL)
	o, err := uploadAll(t.Context(), store, "k", []byte("old"))
	must(t, err)
	for round := range 20 {
		var won atomic.Int32
		var next objstore.Object
		var wg sync.WaitGroup
		for w := range 8 {
			wg.Go(func() {
				made, err := uploadAll(objstore.WithMatch(t.Context(), o.ETag), store, "k", fmt.Append(nil, round, w))
				if err == nil {
					won.Add(1)
					next = made
				} else if k := objstore.KindOf(err); k != objstore.KindChanged && k != objstore.KindTransient {
					t.Errorf("a writer that lost: %v", err)
				}
			})
		}
		wg.Wait()
		if won.Load() != 1 {
			t.Fatalf("%d of 8 writers won", won.Load())
		}
		o = next
	}
	must(t, store.Delete(t.Context(), "k", ""))
	_, err = uploadAll(objstore.WithMatch(t.Context(), o.ETag), store, "k", []byte("new"))
	wantKind(t, "nothing is there", err, objstore.KindNotFound)
}
