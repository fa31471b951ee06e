package s3server_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/minio/minio-go/v7"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/objstore/objstoretest"
	"github.com/shoalfs/shoal/rig/proxy"
	"github.com/shoalfs/shoal/rig/s3server"
)

// TestS3StoreConforms runs the store contract's suite against the real server, through the proxy.
func TestS3StoreConforms(t *testing.T) {
	const bucket = "conformance"
	s := start(t)
	p, err := proxy.Start(t.Context(), s.URL, proxy.Options{Latency: time.Millisecond, Sigma: 0.5})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Stop)
	c, err := s3server.Client(s.URL, 4)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.MakeBucket(t.Context(), bucket, minio.MakeBucketOptions{}); err != nil {
		t.Fatal(err)
	}
	opened := 0
	objstoretest.Run(t, func(t *testing.T) objstoretest.Harness {
		store, err := objstore.NewS3(t.Context(), objstore.S3Config{
			Endpoint:        p.URL,
			Region:          s3server.Region,
			Bucket:          bucket,
			AccessKeyID:     s3server.AccessKey,
			SecretAccessKey: s3server.SecretKey,
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(store.Close)
		opened++
		return objstoretest.Harness{
			Store: store,
			Delete: func(key string) {
				if err := c.RemoveObject(context.Background(), bucket, key, minio.RemoveObjectOptions{}); err != nil {
					t.Error(err)
				}
			},
			Prefix: fmt.Sprintf("run%d/", opened),
		}
	})
}
