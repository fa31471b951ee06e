package s3

import (
	"context"
	"crypto/sha256"
	"hash"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	miniosigner "github.com/minio/minio-go/v7/pkg/signer"

	"github.com/shoalfs/shoal/cache/objstore"
)

// Request is a request that somebody else makes of the bucket.
type Request struct {
	Method string
	Key    string // empty: the bucket itself
	Query  url.Values
	Header http.Header // without Host and without a signature; Forward changes it
	Body   io.Reader   // nil: none
	Length int64       // of the body; -1: not known
	Chunks bool        // sign the body chunk by chunk: the store must notice if it ends early
}

// slowAnswer is how long the store may take to begin its answer to a request that is forwarded.
const slowAnswer = 10 * time.Minute

// hasher is what minio-go's signer takes.
type hasher struct{ hash.Hash }

func (hasher) Close() {}

// Forward signs a request with the store's credentials, sends it once, and returns the store's answer, whatever its
// status. The payload's hash is the header's X-Amz-Content-Sha256, which the store checks; without one it is not signed.
func (s *Store) Forward(ctx context.Context, r Request) (*http.Response, error) {
	g := s.keys.generation()
	region, err := s.core.GetBucketLocation(ctx, s.bucket) // of minio-go's cache, after the first time
	if err != nil {
		return nil, s.fail(ctx, g, "forward", s.url(r.Key), err)
	}
	endpoint := s.endpoint
	if endpoint == "https://s3.amazonaws.com" && region != "us-east-1" {
		endpoint = "https://s3." + region + ".amazonaws.com"
	}
	path := "/" + s.bucket + "/" + r.Key
	req, err := http.NewRequestWithContext(ctx, r.Method, endpoint, r.Body)
	if err != nil {
		return nil, err
	}
	req.URL.Path, req.URL.RawPath = path, string(AppendPath(nil, path))
	req.URL.RawQuery = strings.ReplaceAll(r.Query.Encode(), "+", "%20")
	req.Header, req.ContentLength = r.Header, r.Length
	// versitygw 1.8 leaves the end of a body of unknown length unread, and takes it for the next request.
	req.Close = r.Length < 0
	if r.Length == 0 {
		req.Body = http.NoBody // and not a body of unknown length
	}
	if v := s.keys.get(ctx); v.AccessKeyID != "" && !v.SignerType.IsAnonymous() {
		if r.Chunks && r.Length > 0 {
			req = miniosigner.StreamingSignV4(req, v.AccessKeyID, v.SecretAccessKey, v.SessionToken, region, r.Length, s.time.now().UTC(), hasher{sha256.New()})
		} else {
			if req.Header.Get("X-Amz-Content-Sha256") == "" {
				req.Header.Set("X-Amz-Content-Sha256", "UNSIGNED-PAYLOAD")
			}
			req = miniosigner.SignV4(*req, v.AccessKeyID, v.SecretAccessKey, v.SessionToken, region)
		}
	}
	if r.Method == http.MethodGet && r.Key != "" {
		s.counts.get.Add(1)
	}
	resp, err := s.forwarder.RoundTrip(req)
	if err != nil {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		return nil, &objstore.Error{Op: "forward", Key: s.url(r.Key), Kind: objstore.KindTransient, Err: err}
	}
	return resp, nil
}
