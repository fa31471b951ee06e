package s3

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/minio/minio-go/v7"
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

// unasked is the size up to which a body is read before it is sent, so that it can be sent twice, and is sent without
// asking first, which takes a round trip, or a second with stores that do not reply: so much is written whatever the
// store does.
const unasked = 64 << 10

// answered makes connections on which an answer that comes before the whole body was sent is not lost. A store that
// refuses an upload answers, and closes the connection; net/http then fails the request for the write that broke,
// unless it has read the answer.
func answered(ctx context.Context, network, addr string) (net.Conn, error) {
	c, err := dial(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	return &answeredConn{Conn: c, read: make(chan struct{})}, nil
}

type answeredConn struct {
	net.Conn
	once sync.Once
	read chan struct{} // closed when reading has failed, which is after the answer, and by Close
}

func (c *answeredConn) Close() error {
	c.once.Do(func() { close(c.read) })
	return c.Conn.Close()
}

func (c *answeredConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if err != nil {
		c.once.Do(func() { close(c.read) })
	}
	return n, err
}

// Write implements [net.Conn]. A failure is told when there is nothing to be read any more.
func (c *answeredConn) Write(p []byte) (int, error) {
	_ = c.SetWriteDeadline(time.Now().Add(slowAnswer)) // the time for an answer begins after the last one
	n, err := c.Conn.Write(p)
	if err != nil {
		select {
		case <-c.read:
		case <-time.After(time.Second):
		}
	}
	return n, err
}

// hasher is what minio-go's signer takes.
type hasher struct{ hash.Hash }

func (hasher) Close() {}

// Forward signs a request with the store's credentials, sends it once, and returns the store's answer, whatever its
// status. If the store refuses the time of a clock that is off, it is sent again. If its body is gone by then, or if
// the store refuses credentials that have been replaced, the error is of a kind that the client tries again. The
// payload's hash is the header's X-Amz-Content-Sha256, which the store checks; without one it is not signed.
func (s *Store) Forward(ctx context.Context, r Request) (*http.Response, error) {
	failed := func(err error) error {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		return &objstore.Error{Op: "forward", Key: s.url(r.Key), Kind: objstore.KindTransient, Err: err}
	}
	if r.Length > 0 && r.Length <= unasked {
		data, err := io.ReadAll(r.Body)
		if err != nil {
			return nil, failed(err)
		}
		if r.Body = bytes.NewReader(data); r.Chunks {
			r.Chunks = false
			r.Header.Set("X-Amz-Content-Sha256", fmt.Sprintf("%x", sha256.Sum256(data)))
		}
	}
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
	signed := s.time.now()
	if v := s.keys.get(ctx); v.HasKeys() {
		if r.Chunks && r.Length > 0 && len(s.sse) == 0 && !s.pays { // else send signs it again, with more headers
			req = miniosigner.StreamingSignV4(req, v.AccessKeyID, v.SecretAccessKey, v.SessionToken, region, r.Length,
				signed.UTC(), hasher{sha256.New()})
		} else {
			if req.Header.Get("X-Amz-Content-Sha256") == "" {
				req.Header.Set("X-Amz-Content-Sha256", "UNSIGNED-PAYLOAD")
			}
			req = miniosigner.SignV4(*req, v.AccessKeyID, v.SecretAccessKey, v.SessionToken, region)
		}
	}
	if r.Length < 0 || r.Length > unasked { // the store may refuse before it has the body
		req.Header.Set("Expect", "100-continue")
	}
	resp, err := s.forwarder.RoundTrip(req)
	if err != nil {
		return nil, failed(err)
	}
	if r.Length != 0 && req.GetBody == nil && s.time.refused(resp.StatusCode, resp.Header.Get("Date"), signed) {
		_ = resp.Body.Close()
		return nil, failed(errors.New(
			"the store refuses requests by this machine's clock; the next ones have the store's time"))
	}
	if code := resp.StatusCode; code == http.StatusBadRequest || code == http.StatusUnauthorized ||
		code == http.StatusForbidden {
		late := time.AfterFunc(pageTimeout, func() { _ = resp.Body.Close() }) // which ends the reading
		text, _ := io.ReadAll(io.LimitReader(resp.Body, maxErrorText))
		late.Stop()
		_ = resp.Body.Close()
		resp.Body = io.NopCloser(bytes.NewReader(text))
		e := minio.ToErrorResponse(errorAnswer(&answerHead{status: code}, text))
		if theirs := code == http.StatusBadRequest && len(text) > 0 && !refusal(e.Code); !theirs &&
			s.renewed(ctx, g, e) {
			return nil, failed(errors.New(
				"the store refuses credentials that have changed; the next requests have the new ones"))
		}
	}
	return resp, nil
}
