package objstoretest

import (
	"bufio"
	"bytes"
	"context"
	"crypto/md5"
	"encoding/base64"
	"encoding/hex"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// S3Server is the part of the S3 API that a reader needs, in memory: ListObjectsV2, GET with Range
// and If-Match, HEAD, PUT and DELETE. It exists beside a real server for what that cannot do: hold
// hostile keys and answer as told. It checks no signatures, only that there is one by AccessKey.
type S3Server struct {
	Bucket    string
	AccessKey string // empty: no credentials are asked for

	// Intercept, if set, may answer a request itself and then returns true.
	Intercept func(w http.ResponseWriter, r *http.Request) bool
	// IgnoreIfMatch and IgnoreRange make it a server that does not know these headers.
	IgnoreIfMatch, IgnoreRange bool
	// NoETag makes listings and answers lack ETags.
	NoETag bool
	// PageSize is the most keys in a listing's page; 0 means 1,000.
	PageSize int

	mu       sync.Mutex
	objects  map[string]s3Object
	requests map[string]int // by method
}

type s3Object struct {
	data []byte
	etag string
	mod  time.Time
}

// Start serves the bucket on loopback until the test ends and returns the endpoint's URL.
func (s *S3Server) Start(t testing.TB) string {
	srv := httptest.NewServer(s)
	t.Cleanup(srv.Close)
	return srv.URL
}

// Put stores an object and returns its ETag.
func (s *S3Server) Put(key string, data []byte) string {
	sum := md5.Sum(data)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.objects == nil {
		s.objects = make(map[string]s3Object)
	}
	o := s3Object{slices.Clone(data), hex.EncodeToString(sum[:]), time.Now().UTC()}
	s.objects[key] = o
	return o.etag
}

// Delete removes an object.
func (s *S3Server) Delete(key string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.objects, key)
}

// Requests returns how many requests with this method have come.
func (s *S3Server) Requests(method string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.requests[method]
}

// WriteS3Error answers with an S3 error document.
func WriteS3Error(w http.ResponseWriter, status int, code, message string) {
	w.Header().Set("Content-Type", "application/xml")
	w.WriteHeader(status)
	fmt.Fprintf(w, "%s<Error><Code>%s</Code><Message>", xml.Header, code)
	_ = xml.EscapeText(w, []byte(message))
	fmt.Fprint(w, "</Message></Error>")
}

// ServeHTTP implements [http.Handler]. It looks at the path as it was sent: a mux would clean
// "a//b" and "..".
func (s *S3Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	if s.requests == nil {
		s.requests = make(map[string]int)
	}
	s.requests[r.Method]++
	s.mu.Unlock()
	if s.Intercept != nil && s.Intercept(w, r) {
		return
	}
	if s.AccessKey != "" && !strings.Contains(r.Header.Get("Authorization"), "Credential="+s.AccessKey+"/") {
		if r.Header.Get("Authorization") == "" {
			WriteS3Error(w, 403, "AccessDenied", "Access Denied")
		} else {
			WriteS3Error(w, 403, "InvalidAccessKeyId", "The AWS Access Key Id you provided does not exist in our records.")
		}
		return
	}
	path, _, _ := strings.Cut(r.RequestURI, "?")
	path, err := url.PathUnescape(strings.TrimPrefix(path, "/"))
	if err != nil {
		WriteS3Error(w, 400, "InvalidURI", "Couldn't parse the specified URI.")
		return
	}
	bucket, key, _ := strings.Cut(path, "/")
	switch {
	case bucket != s.Bucket:
		WriteS3Error(w, 404, "NoSuchBucket", "The specified bucket does not exist")
	case key == "" && r.Method == http.MethodGet:
		s.list(w, r.URL.Query())
	case r.Method == http.MethodGet, r.Method == http.MethodHead:
		s.get(w, r, key)
	case r.Method == http.MethodPut:
		s.put(w, r, key)
	case r.Method == http.MethodDelete:
		s.Delete(key)
		w.WriteHeader(http.StatusNoContent)
	default:
		WriteS3Error(w, 405, "MethodNotAllowed", "The specified method is not allowed against this resource.")
	}
}

func (s *S3Server) get(w http.ResponseWriter, r *http.Request, key string) {
	s.mu.Lock()
	o, ok := s.objects[key]
	s.mu.Unlock()
	if !ok {
		WriteS3Error(w, 404, "NoSuchKey", "The specified key does not exist.")
		return
	}
	if m := r.Header.Get("If-Match"); m != "" && m != `"`+o.etag+`"` && !s.IgnoreIfMatch {
		WriteS3Error(w, 412, "PreconditionFailed", "At least one of the pre-conditions you specified did not hold")
		return
	}
	h := w.Header()
	if !s.NoETag {
		h["ETag"] = []string{`"` + o.etag + `"`}
	}
	h.Set("Last-Modified", o.mod.Format(http.TimeFormat))
	h.Set("Content-Type", "application/octet-stream")
	h.Set("Accept-Ranges", "bytes")
	data, status := o.data, 200
	if rg := r.Header.Get("Range"); rg != "" && !s.IgnoreRange {
		var first, last int
		if _, err := fmt.Sscanf(rg, "bytes=%d-%d", &first, &last); err != nil || first > last || first >= len(data) {
			WriteS3Error(w, 416, "InvalidRange", "The requested range is not satisfiable")
			return
		}
		last = min(last, len(data)-1)
		h.Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", first, last, len(data)))
		data, status = data[first:last+1], 206
	}
	h.Set("Content-Length", strconv.Itoa(len(data)))
	w.WriteHeader(status)
	if r.Method == http.MethodGet {
		_, _ = w.Write(data) // a client that has gone is its own affair
	}
}

func (s *S3Server) put(w http.ResponseWriter, r *http.Request, key string) {
	body := io.Reader(r.Body)
	if strings.HasPrefix(r.Header.Get("X-Amz-Content-Sha256"), "STREAMING-") {
		body = &chunkedReader{r: bufio.NewReader(r.Body)}
	}
	data, err := io.ReadAll(body)
	want := r.Header.Get("X-Amz-Decoded-Content-Length")
	if err != nil || (want != "" && want != strconv.Itoa(len(data))) {
		WriteS3Error(w, 400, "IncompleteBody", "You did not provide the number of bytes specified by the Content-Length HTTP header.")
		return
	}
	if sum := r.Header.Get("Content-Md5"); sum != "" {
		if have := md5.Sum(data); base64.StdEncoding.EncodeToString(have[:]) != sum {
			WriteS3Error(w, 400, "BadDigest", "The Content-MD5 you specified did not match what we received.")
			return
		}
	}
	w.Header()["ETag"] = []string{`"` + s.Put(key, data) + `"`}
}

// chunkedReader decodes aws-chunked bodies: "SIZE-IN-HEX;chunk-signature=...\r\n" DATA "\r\n", up to
// a chunk of size 0. Signatures are not checked.
type chunkedReader struct {
	r    *bufio.Reader
	left int64
	err  error
}

func (c *chunkedReader) Read(p []byte) (int, error) {
	if c.err != nil {
		return 0, c.err
	}
	if c.left == 0 {
		var line string
		for line == "" && c.err == nil {
			line, c.err = c.r.ReadString('\n')
			line = strings.TrimRight(line, "\r\n")
		}
		size, _, _ := strings.Cut(line, ";")
		c.left, c.err = strconv.ParseInt(size, 16, 64)
		if c.err == nil && c.left == 0 {
			c.err = io.EOF
		}
		if c.err != nil {
			return 0, c.err
		}
	}
	n, err := c.r.Read(p[:min(int64(len(p)), c.left)])
	c.left -= int64(n)
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	c.err = err
	return n, nil
}

type listResult struct {
	XMLName               xml.Name `xml:"http://s3.amazonaws.com/doc/2006-03-01/ ListBucketResult"`
	Name                  string
	Prefix                string
	Delimiter             string `xml:",omitempty"`
	EncodingType          string `xml:",omitempty"`
	KeyCount              int
	MaxKeys               int
	IsTruncated           bool
	NextContinuationToken string `xml:",omitempty"`
	Contents              []listContent
	CommonPrefixes        []listPrefix
}

type listContent struct {
	Key          string
	LastModified string
	ETag         string `xml:",omitempty"`
	Size         int
	StorageClass string
}

type listPrefix struct{ Prefix string }

func (s *S3Server) list(w http.ResponseWriter, q url.Values) {
	if q.Get("list-type") != "2" {
		WriteS3Error(w, 501, "NotImplemented", "only ListObjectsV2")
		return
	}
	prefix, delimiter := q.Get("prefix"), q.Get("delimiter")
	page := s.PageSize
	if page == 0 {
		page = 1000
	}
	if n, err := strconv.Atoi(q.Get("max-keys")); err == nil {
		page = min(page, n)
	}
	after := q.Get("start-after")
	if token := q.Get("continuation-token"); token != "" {
		b, err := base64.URLEncoding.DecodeString(token)
		if err != nil {
			WriteS3Error(w, 400, "InvalidArgument", "The continuation token provided is incorrect")
			return
		}
		after = string(b)
	}
	encode := func(k string) string { return k }
	if q.Get("encoding-type") == "url" {
		encode = url.QueryEscape
	}
	res := listResult{
		Name: s.Bucket, Prefix: encode(prefix), Delimiter: delimiter, EncodingType: q.Get("encoding-type"), MaxKeys: page,
	}
	s.mu.Lock()
	keys := make([]string, 0, len(s.objects))
	for k := range s.objects {
		if strings.HasPrefix(k, prefix) && k > after {
			keys = append(keys, k)
		}
	}
	slices.Sort(keys)
	last := after
	for _, k := range keys {
		entry, isPrefix := k, false
		if delimiter != "" {
			if i := strings.Index(k[len(prefix):], delimiter); i >= 0 {
				entry, isPrefix = k[:len(prefix)+i+len(delimiter)], true
				// A prefix that the page before ended with is not listed twice.
				if strings.HasPrefix(after, entry) || entry == last {
					continue
				}
			}
		}
		if res.KeyCount == page {
			res.IsTruncated = true
			res.NextContinuationToken = base64.URLEncoding.EncodeToString([]byte(last))
			break
		}
		res.KeyCount++
		last = entry
		if isPrefix {
			res.CommonPrefixes = append(res.CommonPrefixes, listPrefix{encode(entry)})
			continue
		}
		o := s.objects[k]
		c := listContent{
			Key: encode(k), LastModified: o.mod.Format("2006-01-02T15:04:05.000Z"), Size: len(o.data), StorageClass: "STANDARD",
		}
		if !s.NoETag {
			c.ETag = `"` + o.etag + `"`
		}
		res.Contents = append(res.Contents, c)
	}
	s.mu.Unlock()
	var buf bytes.Buffer
	buf.WriteString(xml.Header)
	if err := xml.NewEncoder(&buf).Encode(res); err != nil {
		WriteS3Error(w, 500, "InternalError", err.Error())
		return
	}
	w.Header().Set("Content-Type", "application/xml")
	_, _ = w.Write(buf.Bytes())
}

// Hang waits until the client has gone away or d is over; for interceptors.
func Hang(r *http.Request, d time.Duration) {
	ctx, cancel := context.WithTimeoutCause(r.Context(), d, errors.New("hung long enough"))
	defer cancel()
	<-ctx.Done()
}

// Reset sends the first n bytes of answer and closes the connection; with a TCP reset if n is 0.
func Reset(w http.ResponseWriter, answer string, n int) {
	conn, buf, err := w.(http.Hijacker).Hijack()
	if err != nil {
		panic(err)
	}
	_, _ = buf.WriteString(answer[:min(n, len(answer))])
	_ = buf.Flush()
	if tcp, ok := conn.(*net.TCPConn); ok && n == 0 {
		_ = tcp.SetLinger(0)
	}
	conn.Close()
}
