package proxy_test

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/minio/minio-go/v7"

	"github.com/shoalfs/shoal/lab/rig/cputime"
	"github.com/shoalfs/shoal/lab/rig/proxy"
	"github.com/shoalfs/shoal/lab/rig/s3server"
)

// BenchmarkGet measures what the proxy costs: it runs in a process of its own, 64 readers fetch
// 63-kB objects through it, and the CPU time of that process per GET is reported.
func BenchmarkGet(b *testing.B) {
	b.Setenv("SHOAL_TEST_PROXY", "1")
	const bucket = "test"
	s, err := s3server.Start(b.Context(), s3server.Options{Dir: b.TempDir()})
	if err != nil {
		b.Fatal(err)
	}
	defer s.Stop()
	c, err := s3server.Client(s.URL, 64)
	if err != nil {
		b.Fatal(err)
	}
	if err := c.MakeBucket(b.Context(), bucket, minio.MakeBucketOptions{}); err != nil {
		b.Fatal(err)
	}
	for i := range 64 {
		if _, err := c.PutObject(b.Context(), bucket, fmt.Sprintf("k%d", i), bytes.NewReader(make([]byte, 63_000)),
			63_000, s3server.PutOptions()); err != nil {
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
			c, err := s3server.Client(p.URL, 64)
			if err != nil {
				b.Fatal(err)
			}
			core := minio.Core{Client: c}
			before := cputime.Sum(p.Pid())
			next := make(chan int)
			var wg sync.WaitGroup
			for range 64 {
				wg.Go(func() {
					for i := range next {
						r, _, _, err := core.GetObject(b.Context(), bucket, fmt.Sprintf("k%d", i%64),
							minio.GetObjectOptions{})
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
			b.ReportMetric((cputime.Sum(p.Pid())-before)/float64(b.N)*1e6, "proxy-µs/op")
		})
	}
}
