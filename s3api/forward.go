package s3api

import (
	"bytes"
	"context"
	"encoding/xml"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"path"
	"strings"
	"time"

	"github.com/shoalfs/shoal/cache/objstore/s3"
)

// maxDelete bounds the body of a request that deletes several keys, which is read before it is sent: it has at most
// 1,000 keys of 1 KiB.
const maxDelete = 2 << 20

// kept are the headers that end here, of a request; dropped those of an answer.
var (
	kept = []string{"Authorization", "X-Amz-Algorithm", "X-Amz-Credential", "X-Amz-Expires", "X-Amz-Signedheaders",
		"X-Amz-Signature", "X-Amz-Date", "Date", "X-Amz-Security-Token", "Connection", "Keep-Alive",
		"Proxy-Connection", "Te", "Trailer", "Transfer-Encoding", "Upgrade", "Expect", "Content-Length",
		"Proxy-Authorization", "Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Port",
		"X-Forwarded-Prefix", "X-Forwarded-Proto", "X-Real-Ip"} // SeaweedFS checks signatures for that host
	dropped = []string{"Connection", "Keep-Alive", "Transfer-Encoding", "Trailer", "Upgrade", "Proxy-Authenticate",
		"Location"}
)

func (d *dataset) forward(w http.ResponseWriter, r *http.Request, key string, q url.Values) error {
	if d.Origin == nil {
		return &apiError{http.StatusNotImplemented, "NotImplemented", "A folder is served, which has no such resource"}
	}
	d.server.count.forwarded.Add(1)
	req := s3.Request{Method: r.Method, Key: key, Query: q, Header: r.Header.Clone()}
	for _, name := range kept {
		req.Header.Del(name)
	}
	control := http.NewResponseController(w)
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	if r.ContentLength != 0 {
		req.Length, req.Body = r.ContentLength, r.Body
		_, req.Chunks = r.Body.(*chunked)
	}
	resp, err := d.Origin.Forward(ctx, req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode >= 300 && resp.StatusCode != http.StatusNotModified && resp.StatusCode < 400 {
		return &apiError{http.StatusBadGateway, "InternalError", fmt.Sprintf(
			"The origin answers with a redirect, HTTP %d: check AWS_ENDPOINT_URL and AWS_REGION of the daemon",
			resp.StatusCode)}
	}
	if r.Method == http.MethodGet && key != "" && resp.StatusCode < 300 && resp.ContentLength < 0 &&
		len(resp.TransferEncoding) == 0 { // ours would have an end, however it is sent
		return &apiError{http.StatusBadGateway, "InternalError",
			"The origin's answer has no length, and may have been cut off: check the proxies before the origin"}
	}
	for _, name := range dropped {
		resp.Header.Del(name)
	}
	if d.server.keys == nil {
		resp.Header.Del("Access-Control-Allow-Origin") // no web page reads here, whatever the bucket's rules say
	}
	copyHeader(w.Header(), resp.Header)
	inert(w.Header())
	w.WriteHeader(resp.StatusCode)
	stalled := time.AfterFunc(2*pieceTime, cancel)
	defer stalled.Stop()
	n, err := io.CopyBuffer(patient{w, control, d, stalled}, resp.Body, make([]byte, 32<<10))
	d.server.count.sent.Add(n)
	if err != nil {
		panic(http.ErrAbortHandler) // the answer is cut off
	}
	return nil
}

// copyHeader adds an answer's headers. The names of user metadata are keys to their users, and are sent as S3 sends
// them.
func copyHeader(to, from http.Header) {
	for name, values := range from {
		if strings.HasPrefix(name, "X-Amz-Meta-") {
			name = strings.ToLower(name)
		} else if name == requestIDHeader || name == "X-Amz-Id-2" {
			values = values[:1]
		}
		to[name] = values
	}
}

// patient writes as long as the client goes on reading, and the origin goes on sending.
type patient struct {
	w       io.Writer
	control *http.ResponseController
	of      *dataset
	stalled *time.Timer
}

func (p patient) Write(b []byte) (int, error) {
	if p.of.left.Err() != nil {
		return 0, http.ErrAbortHandler
	}
	p.stalled.Stop()
	n, err := p.w.Write(b)
	p.stalled.Reset(2 * pieceTime)
	if len(bytes.TrimSpace(b)) == 0 { // the origin is at work, and has its client wait
		_ = p.control.Flush()
	}
	return n, err
}

func (d *dataset) write(w http.ResponseWriter, r *http.Request, key string, q url.Values) error {
	if d.Origin == nil {
		return denied("The endpoint serves a folder, and does not write to it: change the files in %s", d.Where)
	}
	if sources, copies := r.Header["X-Amz-Copy-Source"]; copies {
		from, _ := url.PathUnescape(sources[0])
		_, version, _ := strings.Cut(from, "versionId=")
		if bucket, key, _ := strings.Cut(strings.TrimPrefix(from, "/"), "/"); len(sources) > 1 || bucket != d.Bucket ||
			key == "" || !within(bucket, key) || dotted(strings.ReplaceAll(version, "=", "/")) { // any of several
			return denied("The endpoint copies within bucket %s only: copy from others at %s", d.Bucket, d.Where)
		}
	}
	keys := []string{key}
	if key == "" {
		if r.Method == http.MethodPut && plain(r, q) { // rclone makes sure of the bucket before it writes
			return errBucketOwned
		}
		if r.Method != http.MethodPost || !q.Has("delete") {
			return denied("The endpoint does not change the bucket's settings: do it at %s", d.Where)
		}
		var err error
		if keys, err = deleted(r, d.Bucket); err != nil {
			return err
		}
	}
	for _, key := range keys { // and what they may become on the way
		if clean := strings.TrimPrefix(path.Join(d.Bucket, key), d.Bucket+"/"); clean != key {
			keys = append(keys, clean)
		}
	}
	end, err := d.changing(keys)
	if err != nil {
		return err
	}
	defer end()
	return d.forward(w, r, key, q)
}

// deleted returns the keys that a request for several deletions names. Its body can be read again.
func deleted(r *http.Request, bucket string) (keys []string, err error) {
	// Of a body in chunks the origin reads other keys: those that go on in the next chunk.
	if strings.HasPrefix(r.Header.Get("X-Amz-Content-Sha256"), "STREAMING-") || r.Header.Get("Content-Encoding") != "" {
		return nil, badArgument("A list of deletions cannot come in chunks with a trailer, or compressed")
	}
	body, err := io.ReadAll(io.LimitReader(r.Body, maxDelete+1))
	if err != nil {
		return nil, bad("IncompleteBody", "The body ended early")
	}
	var list struct {
		Object []struct{ Key, VersionId []string }
	}
	malformed := len(body) > maxDelete || xml.Unmarshal(body, &list) != nil
	for _, o := range list.Object {
		malformed = malformed || len(o.Key) != 1 || len(o.VersionId) > 1 // of two the origin may take the other one
		if malformed {
			break
		}
		if keys = append(keys, o.Key[0]); !within(bucket, o.Key[0]) || dotted(strings.Join(o.VersionId, "")) {
			return nil, denied("The endpoint deletes in bucket %s only: %q may leave it", bucket, o.Key[0])
		}
	}
	if malformed {
		return nil, bad("MalformedXML",
			"The XML you provided was not well-formed or did not validate against our published schema")
	}
	r.Body, r.ContentLength = io.NopCloser(bytes.NewReader(body)), int64(len(body))
	return keys, nil
}
