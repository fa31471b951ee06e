package proxy_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"

	"github.com/shoalfs/shoal/lab/rig/proxy"
	"github.com/shoalfs/shoal/lab/rig/s3server"
)

const bucket = "test"

// server starts versitygw with an empty bucket.
func server(t testing.TB) *s3server.Server {
	t.Helper()
	s, err := s3server.Start(t.Context(), s3server.Options{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Stop)
	c, err := s3server.Client(s.URL, 1)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.MakeBucket(t.Context(), bucket, minio.MakeBucketOptions{}); err != nil {
		t.Fatal(err)
	}
	return s
}

func through(t testing.TB, s *s3server.Server, o proxy.Options) (*proxy.Proxy, *minio.Client) {
	t.Helper()
	p, err := proxy.Start(t.Context(), s.URL, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Stop)
	c, err := s3server.Client(p.URL, 64)
	if err != nil {
		t.Fatal(err)
	}
	return p, c
}

func content(n, seed int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i*seed + i>>7)
	}
	return b
}

func read(t testing.TB, c *minio.Client, key string, o minio.GetObjectOptions) ([]byte, error) {
	t.Helper()
	r, err := c.GetObject(t.Context(), bucket, key, o)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	return io.ReadAll(r)
}

// TestSignedTraffic runs each kind of request that Shoal makes through the proxy to a server that
// verifies signatures.
func TestSignedTraffic(t *testing.T) {
	p, c := through(t, server(t), proxy.Options{Latency: 2 * time.Millisecond, Sigma: 0.5, Seed: 1})
	ctx := t.Context()
	sizes := []int{0, 1, 63_000, 160 << 10, 6 << 20}
	etags := make(map[string]string)
	for i, n := range sizes {
		key := fmt.Sprintf("dir %d/päth+%d.jpg", i, i)
		info, err := c.PutObject(ctx, bucket, key, bytes.NewReader(content(n, i+3)), int64(n), s3server.PutOptions())
		if err != nil {
			t.Fatal(err)
		}
		etags[key] = info.ETag
		st, err := c.StatObject(ctx, bucket, key, minio.StatObjectOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if st.Size != int64(n) || st.ETag != info.ETag {
			t.Errorf("%s: stat says %d bytes, ETag %s; want %d, %s", key, st.Size, st.ETag, n, info.ETag)
		}
		got, err := read(t, c, key, minio.GetObjectOptions{})
		if err != nil || !bytes.Equal(got, content(n, i+3)) {
			t.Errorf("%s: read %d bytes, %v", key, len(got), err)
		}
		if n < 1000 {
			continue
		}
		var ranged minio.GetObjectOptions
		if err := ranged.SetRange(500, 999); err != nil {
			t.Fatal(err)
		}
		if err := ranged.SetMatchETag(info.ETag); err != nil {
			t.Fatal(err)
		}
		got, err = read(t, c, key, ranged)
		if err != nil || !bytes.Equal(got, content(n, i+3)[500:1000]) {
			t.Errorf("%s: range: %d bytes, %v", key, len(got), err)
		}
		var stale minio.GetObjectOptions
		if err := stale.SetMatchETag("0123456789abcdef0123456789abcdef"); err != nil {
			t.Fatal(err)
		}
		if _, err = read(t, c, key, stale); minio.ToErrorResponse(err).StatusCode != http.StatusPreconditionFailed {
			t.Errorf("%s: If-Match with another ETag: got %v", key, err)
		}
	}
	// A multipart upload, and a listing of more than one page.
	big := content(11<<20, 9)
	if _, err := c.PutObject(ctx, bucket, "big", bytes.NewReader(big), int64(len(big)), minio.PutObjectOptions{PartSize: 5 << 20}); err != nil {
		t.Fatal(err)
	}
	if got, err := read(t, c, "big", minio.GetObjectOptions{}); err != nil || !bytes.Equal(got, big) {
		t.Errorf("multipart: %d bytes, %v", len(got), err)
	}
	listed := 0
	for o := range c.ListObjects(ctx, bucket, minio.ListObjectsOptions{Recursive: true, MaxKeys: 2}) {
		if o.Err != nil {
			t.Fatal(o.Err)
		}
		if o.Key != "big" && strings.Trim(o.ETag, `"`) != etags[o.Key] {
			t.Errorf("%s: listed with ETag %q, want %q", o.Key, o.ETag, etags[o.Key])
		}
		listed++
	}
	if listed != len(sizes)+1 {
		t.Errorf("listed %d objects", listed)
	}
	if _, err := read(t, c, "none", minio.GetObjectOptions{}); minio.ToErrorResponse(err).Code != "NoSuchKey" {
		t.Errorf("missing key: got %v", err)
	}
	s := p.Stats()
	if s.Gets == 0 || s.Heads == 0 || s.Lists < 3 || s.Puts == 0 || s.GetBytes < int64(len(big)) || s.PutBytes < int64(len(big)) {
		t.Errorf("stats %+v", s)
	}
}

// TestManyReaders keeps 64 requests in flight and checks every byte.
func TestManyReaders(t *testing.T) {
	p, c := through(t, server(t), proxy.Options{})
	const n = 64
	for i := range n {
		b := content(40_000+i*500, i+1)
		if _, err := c.PutObject(t.Context(), bucket, fmt.Sprintf("k%d", i), bytes.NewReader(b), int64(len(b)), s3server.PutOptions()); err != nil {
			t.Fatal(err)
		}
	}
	// Long enough for all to be under way.
	if err := p.Set(proxy.Options{Latency: 200 * time.Millisecond, Sigma: 0.3, Seed: 2}); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for w := range n {
		wg.Go(func() {
			for j := range 5 {
				i := (w*7 + j*13) % n
				got, err := read(t, c, fmt.Sprintf("k%d", i), minio.GetObjectOptions{})
				if err != nil || !bytes.Equal(got, content(40_000+i*500, i+1)) {
					t.Errorf("k%d: %d bytes, %v", i, len(got), err)
				}
			}
		})
	}
	wg.Wait()
	if s := p.Stats(); s.Gets != 5*n || s.MaxInFlight < n/2 {
		t.Errorf("stats %+v", s)
	}
}

// TestFaultsAsS3ClientSeesThem injects each fault into one GET; minio-go's own retries are off.
func TestFaultsAsS3ClientSeesThem(t *testing.T) {
	s := server(t)
	_, direct := through(t, s, proxy.Options{})
	want := content(100_000, 5)
	if _, err := direct.PutObject(t.Context(), bucket, "k", bytes.NewReader(want), int64(len(want)), s3server.PutOptions()); err != nil {
		t.Fatal(err)
	}
	st, err := direct.StatObject(t.Context(), bucket, "k", minio.StatObjectOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		fault string
		check func(got []byte, etag string, err error) bool
	}{
		{"503", func(_ []byte, _ string, err error) bool { return minio.ToErrorResponse(err).Code == "SlowDown" }},
		{"reset:at=0.5", func(b []byte, _ string, err error) bool { return err != nil && len(b) < len(want) }},
		{"truncate:at=0.5", func(b []byte, _ string, err error) bool {
			return errors.Is(err, io.ErrUnexpectedEOF) && len(b) == 50_000
		}},
		{"stall:for=1h", func(_ []byte, _ string, err error) bool { var ne net.Error; return errors.As(err, &ne) && ne.Timeout() }},
		{"slow:for=1h", func(_ []byte, _ string, err error) bool { var ne net.Error; return errors.As(err, &ne) && ne.Timeout() }},
		{"flip:at=0", func(b []byte, _ string, err error) bool {
			return err == nil && len(b) == len(want) && b[0] != want[0] && bytes.Equal(b[1:], want[1:])
		}},
		{"etag", func(b []byte, etag string, err error) bool {
			return err == nil && bytes.Equal(b, want) && etag != st.ETag
		}},
	} {
		t.Run(tt.fault, func(t *testing.T) {
			f, err := proxy.ParseFault(tt.fault)
			if err != nil {
				t.Fatal(err)
			}
			f.Count, f.Key = 1, "k"
			p, _ := through(t, s, proxy.Options{Faults: []proxy.Fault{f}})
			c, err := minio.New(strings.TrimPrefix(p.URL, "http://"), &minio.Options{
				Creds:        credentials.NewStaticV4(s3server.AccessKey, s3server.SecretKey, ""),
				Region:       s3server.Region,
				BucketLookup: minio.BucketLookupPath,
				MaxRetries:   1, // the fault itself, not how minio-go gets over it
			})
			if err != nil {
				t.Fatal(err)
			}
			core := minio.Core{Client: c}
			var got []byte
			var etag string
			ctx := t.Context()
			if f.For > 0 {
				var cancel context.CancelFunc
				ctx, cancel = context.WithTimeout(ctx, 200*time.Millisecond)
				defer cancel()
			}
			body, info, _, err := core.GetObject(ctx, bucket, "k", minio.GetObjectOptions{})
			if err == nil {
				etag = info.ETag
				got, err = io.ReadAll(body)
				_ = body.Close()
			}
			if !tt.check(got, etag, err) {
				t.Errorf("the client saw %d bytes, ETag %q, error %v", len(got), etag, err)
			}
		})
	}
}

// BenchmarkGet measures what the proxy costs: it runs in a process of its own, 64 readers fetch
// 63-kB objects through it, and the CPU time of that process per GET is reported.
func BenchmarkGet(b *testing.B) {
	b.Setenv("SHOAL_TEST_PROXY", "1")
	s := server(b)
	c, err := s3server.Client(s.URL, 64)
	if err != nil {
		b.Fatal(err)
	}
	for i := range 64 {
		if _, err := c.PutObject(b.Context(), bucket, fmt.Sprintf("k%d", i), bytes.NewReader(content(63_000, i)), 63_000, s3server.PutOptions()); err != nil {
			b.Fatal(err)
		}
	}
	for _, latency := range []time.Duration{0, 30 * time.Millisecond} {
		b.Run(latency.String(), func(b *testing.B) {
			p, err := proxy.Spawn(b.Context(), []string{os.Args[0]}, s.URL, proxy.Options{Latency: latency, Sigma: 0.3})
			if err != nil {
				b.Fatal(err)
			}
			defer p.Stop()
			if f := os.Getenv("PROXY_PROFILE"); f != "" {
				go saveProfile(b, p.Control, f)
			}
			c, err := s3server.Client(p.URL, 64)
			if err != nil {
				b.Fatal(err)
			}
			core := minio.Core{Client: c}
			before, err := p.Stats(b.Context())
			if err != nil {
				b.Fatal(err)
			}
			next := make(chan int)
			var wg sync.WaitGroup
			for range 64 {
				wg.Go(func() {
					for i := range next {
						r, _, _, err := core.GetObject(b.Context(), bucket, fmt.Sprintf("k%d", i%64), minio.GetObjectOptions{})
						if err != nil {
							b.Error(err)
							continue
						}
						_, _ = io.Copy(io.Discard, r)
						_ = r.Close()
					}
				})
			}
			b.SetBytes(63_000)
			b.ResetTimer()
			for i := range b.N {
				next <- i
			}
			close(next)
			wg.Wait()
			b.StopTimer()
			after, err := p.Stats(b.Context())
			if err != nil {
				b.Fatal(err)
			}
			d := after.Sub(before)
			b.ReportMetric(d.CPUSeconds/float64(b.N)*1e6, "proxy-µs/op")
		})
	}
}
