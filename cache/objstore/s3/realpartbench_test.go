package s3_test

import (
	"bytes"
	"math/rand/v2"
	"net/http"
	"os"
	"strings"
	"testing"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"

	"github.com/shoalfs/shoal/lab/rig/cputime"
	"github.com/shoalfs/shoal/lab/rig/s3server"
)

// BenchmarkPart stores parts of 16 MiB, by Upload and, beside it, as minio-go signs them by default over
// plain HTTP (SHA-256 by chunks), and with no checksum at all.
func BenchmarkPart(b *testing.B) {
	const size = 16 << 20
	s := newBucket(b)
	data := make([]byte, size)
	_, _ = rand.NewChaCha8([32]byte{1}).Read(data)
	measure := func(name string, part func(n int) error) {
		b.Run(name, func(b *testing.B) {
			b.SetBytes(size)
			before := cputime.Sum(os.Getpid())
			for i := range b.N {
				if err := part(i % 100); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric((cputime.Sum(os.Getpid())-before)*1e3/float64(b.N), "client-ms/op")
		})
	}
	u, err := open(b, s.URL).Upload(b.Context(), "shoal", 100*size, size)
	if err != nil {
		b.Fatal(err)
	}
	measure("Upload", func(n int) error { return u.Part(b.Context(), n, data) })
	if err := u.Abort(b.Context()); err != nil {
		b.Fatal(err)
	}

	core, err := minio.NewCore(strings.TrimPrefix(s.URL, "http://"), &minio.Options{
		Creds: credentials.NewStaticV4(s3server.AccessKey, s3server.SecretKey, ""), Region: s3server.Region,
		BucketLookup: minio.BucketLookupPath, Transport: &http.Transport{DisableCompression: true},
	})
	if err != nil {
		b.Fatal(err)
	}
	id, err := core.NewMultipartUpload(b.Context(), bucket, "minio", minio.PutObjectOptions{})
	if err != nil {
		b.Fatal(err)
	}
	measure("signed-chunks", func(n int) error {
		_, err := core.PutObjectPart(b.Context(), bucket, "minio", id, n+1, bytes.NewReader(data), size,
			minio.PutObjectPartOptions{})
		return err
	})
	measure("unsigned", func(n int) error {
		_, err := core.PutObjectPart(b.Context(), bucket, "minio", id, n+1, bytes.NewReader(data), size,
			minio.PutObjectPartOptions{DisableContentSha256: true})
		return err
	})
	if err := core.AbortMultipartUpload(b.Context(), bucket, "minio", id); err != nil {
		b.Fatal(err)
	}
}
