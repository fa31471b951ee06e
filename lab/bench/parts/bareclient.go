package parts

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"io"
	"net/http"
	"net/url"
	"os"
	"sync/atomic"
	"time"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"
	"golang.org/x/sync/errgroup"
)

// Bareclient reads every object of bucket photos under a prefix once, with minio-go and nothing else, at a
// given number of requests in flight: the rate that any cache in front of the same store can at best
// approach when cold. It prints one line of JSON.
//
// Endpoint and keys come from AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.
func Bareclient(args []string) error {
	flags := flag.NewFlagSet("bareclient", flag.ContinueOnError)
	prefix := flags.String("prefix", "", "key prefix")
	conns := flags.Int("c", 64, "requests in flight")
	limit := flags.Int("n", 0, "read only the first n objects (0: all)")
	if err := flags.Parse(args); err != nil {
		return err
	}
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
	const bucket = "photos"
	ctx := context.Background()
	var keys []string
	for o := range client.ListObjects(ctx, bucket, minio.ListObjectsOptions{Prefix: *prefix, Recursive: true}) {
		if o.Err != nil {
			return o.Err
		}
		if *limit == 0 || len(keys) < *limit {
			keys = append(keys, o.Key)
		}
	}

	core := minio.Core{Client: client}
	var next atomic.Int64
	var g errgroup.Group
	start := time.Now()
	for range *conns {
		g.Go(func() error {
			buf := make([]byte, 256<<10)
			for i := next.Add(1) - 1; i < int64(len(keys)); i = next.Add(1) - 1 {
				body, _, _, err := core.GetObject(ctx, bucket, keys[i], minio.GetObjectOptions{})
				if err != nil {
					return err
				}
				_, err = io.CopyBuffer(io.Discard, struct{ io.Reader }{body}, buf)
				body.Close()
				if err != nil {
					return err
				}
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	seconds := time.Since(start).Seconds()
	return json.NewEncoder(os.Stdout).Encode(map[string]float64{"objects_per_s": float64(len(keys)) / seconds})
}
