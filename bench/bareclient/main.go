// Command bareclient reads every object under a prefix once, with minio-go and nothing else, at a
// given number of requests in flight: the rate that any cache in front of the same store can at best
// approach when cold. It prints one line of JSON.
//
// Endpoint and keys come from AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/url"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"
)

func main() {
	log.SetFlags(0)
	bucket := flag.String("bucket", "photos", "bucket")
	prefix := flag.String("prefix", "", "key prefix")
	conns := flag.Int("c", 64, "requests in flight")
	limit := flag.Int("n", 0, "read only the first n objects (0: all)")
	flag.Parse()
	ctx := context.Background()

	u, err := url.Parse(os.Getenv("AWS_ENDPOINT_URL"))
	if err != nil || u.Host == "" {
		log.Fatal("bareclient: set AWS_ENDPOINT_URL")
	}
	client, err := minio.New(u.Host, &minio.Options{
		Creds:        credentials.NewEnvAWS(),
		Secure:       u.Scheme == "https",
		Region:       "us-east-1",
		BucketLookup: minio.BucketLookupPath,
		Transport:    &http.Transport{MaxIdleConns: *conns, MaxIdleConnsPerHost: *conns, DisableCompression: true, ReadBufferSize: 64 << 10},
	})
	if err != nil {
		log.Fatal(err)
	}
	var keys []string
	for o := range client.ListObjects(ctx, *bucket, minio.ListObjectsOptions{Prefix: *prefix, Recursive: true}) {
		if o.Err != nil {
			log.Fatal(o.Err)
		}
		keys = append(keys, o.Key)
	}
	if *limit > 0 {
		keys = keys[:min(*limit, len(keys))]
	}

	core := minio.Core{Client: client}
	var next, bytes atomic.Int64
	var wg sync.WaitGroup
	start := time.Now()
	for range *conns {
		wg.Go(func() {
			buf := make([]byte, 256<<10)
			for {
				i := int(next.Add(1)) - 1
				if i >= len(keys) {
					return
				}
				body, _, _, err := core.GetObject(ctx, *bucket, keys[i], minio.GetObjectOptions{})
				if err != nil {
					log.Fatal(err)
				}
				n, err := io.CopyBuffer(io.Discard, struct{ io.Reader }{body}, buf)
				body.Close()
				if err != nil {
					log.Fatal(err)
				}
				bytes.Add(n)
			}
		})
	}
	wg.Wait()
	seconds := time.Since(start).Seconds()
	out, err := json.Marshal(map[string]any{
		"connections": *conns, "objects": len(keys), "bytes": bytes.Load(), "seconds": seconds,
		"objects_per_s": float64(len(keys)) / seconds, "bytes_per_s": float64(bytes.Load()) / seconds,
	})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(string(out))
}
