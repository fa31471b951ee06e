package parts

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strings"
	"sync/atomic"
	"time"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"
	"golang.org/x/sync/errgroup"
)

// Bareclient reads every object under a prefix once, with minio-go and nothing else, at a
// given number of requests in flight: the rate that any cache in front of the same store can at best
// approach when cold. With -range it reads the objects in pieces of so many bytes: the rate that a
// reader of shards can approach. It prints one line of JSON.
//
// Endpoint and keys come from AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.
func Bareclient(args []string) error {
	flags := flag.NewFlagSet("bareclient", flag.ContinueOnError)
	bucket := flags.String("bucket", "photos", "bucket")
	prefix := flags.String("prefix", "", "key prefix")
	conns := flags.Int("c", 64, "requests in flight")
	limit := flags.Int("n", 0, "read only the first n objects (0: all)")
	suffix := flags.String("suffix", "", "read only objects whose keys end so")
	piece := flags.Int64("range", 0, "bytes a GET (0: whole objects)")
	if err := flags.Parse(args); err != nil {
		return err
	}
	ctx := context.Background()

	u, err := url.Parse(os.Getenv("AWS_ENDPOINT_URL"))
	if err != nil || u.Host == "" {
		return errors.New("set AWS_ENDPOINT_URL")
	}
	client, err := minio.New(u.Host, &minio.Options{
		Creds:        credentials.NewEnvAWS(),
		Secure:       u.Scheme == "https",
		Region:       "us-east-1",
		BucketLookup: minio.BucketLookupPath,
		Transport:    &http.Transport{MaxIdleConns: *conns, MaxIdleConnsPerHost: *conns, DisableCompression: true, ReadBufferSize: 64 << 10},
	})
	if err != nil {
		return err
	}
	type job struct {
		key       string
		off, size int64 // size 0: the whole object
	}
	var jobs []job
	objects := 0
	for o := range client.ListObjects(ctx, *bucket, minio.ListObjectsOptions{Prefix: *prefix, Recursive: true}) {
		if o.Err != nil {
			return o.Err
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
	var g errgroup.Group
	start := time.Now()
	for range *conns {
		g.Go(func() error {
			buf := make([]byte, 256<<10)
			for {
				i := int(next.Add(1)) - 1
				if i >= len(jobs) {
					return nil
				}
				j := jobs[i]
				var o minio.GetObjectOptions
				if j.size > 0 {
					if err := o.SetRange(j.off, j.off+j.size-1); err != nil {
						return err
					}
				}
				body, _, _, err := core.GetObject(ctx, *bucket, j.key, o)
				if err != nil {
					return err
				}
				n, err := io.CopyBuffer(io.Discard, struct{ io.Reader }{body}, buf)
				body.Close()
				if err == nil && j.size > 0 && n != j.size {
					err = fmt.Errorf("%s: %d bytes at %d, want %d", j.key, n, j.off, j.size)
				}
				if err != nil {
					return err
				}
				bytes.Add(n)
			}
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	seconds := time.Since(start).Seconds()
	return json.NewEncoder(os.Stdout).Encode(map[string]any{
		"connections": *conns, "objects": objects, "gets": len(jobs), "bytes": bytes.Load(), "seconds": seconds,
		"objects_per_s": float64(objects) / seconds, "bytes_per_s": float64(bytes.Load()) / seconds,
	})
}
