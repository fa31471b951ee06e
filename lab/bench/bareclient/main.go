// Command bareclient reads every object under a prefix once, with minio-go and nothing else, at a
// given number of requests in flight: the rate that any cache in front of the same store can at best
// approach when cold. With -range it reads the objects in pieces of so many bytes: the rate that a
// reader of shards can approach. It prints one line of JSON.
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
	"strings"
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
	suffix := flag.String("suffix", "", "read only objects whose keys end so")
	piece := flag.Int64("range", 0, "bytes a GET (0: whole objects)")
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
	type job struct {
		key       string
		off, size int64 // size 0: the whole object
	}
	var jobs []job
	objects := 0
	for o := range client.ListObjects(ctx, *bucket, minio.ListObjectsOptions{Prefix: *prefix, Recursive: true}) {
		if o.Err != nil {
			log.Fatal(o.Err)
		}
		if !strings.HasSuffix(o.Key, *suffix) || *limit > 0 && objects == *limit {
			continue
		}
		objects++
		if *piece <= 0 {
			jobs = append(jobs, job{key: o.Key})
			continue
		}
		for off := int64(0); off < o.Size; off += *piece {
			jobs = append(jobs, job{o.Key, off, min(*piece, o.Size-off)})
		}
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
				if i >= len(jobs) {
					return
				}
				j := jobs[i]
				var o minio.GetObjectOptions
				if j.size > 0 {
					if err := o.SetRange(j.off, j.off+j.size-1); err != nil {
						log.Fatal(err)
					}
				}
				body, _, _, err := core.GetObject(ctx, *bucket, j.key, o)
				if err != nil {
					log.Fatal(err)
				}
				n, err := io.CopyBuffer(io.Discard, struct{ io.Reader }{body}, buf)
				body.Close()
				if err == nil && j.size > 0 && n != j.size {
					err = fmt.Errorf("%s: %d bytes at %d, want %d", j.key, n, j.off, j.size)
				}
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
		"connections": *conns, "objects": objects, "gets": len(jobs), "bytes": bytes.Load(), "seconds": seconds,
		"objects_per_s": float64(objects) / seconds, "bytes_per_s": float64(bytes.Load()) / seconds,
	})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(string(out))
}
