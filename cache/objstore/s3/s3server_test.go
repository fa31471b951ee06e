package s3_test

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"crypto/md5"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"encoding/xml"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"maps"
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

// S3Server is the part of the S3 API that Shoal needs, in memory: ListObjectsV2, GET with Range and If-Match, HEAD,
// PUT with If-None-Match and CRC32C, DELETE with If-Match, copies, and multipart uploads. It supplements a real server:
// it accepts hostile keys and gives scripted answers. It does not check signatures, only that there is one by
// AccessKey.
type S3Server struct {
	Bucket    string
	AccessKey string // empty: no credentials are asked for

	// Intercept, if set, may answer a request itself and then returns true.
	Intercept func(w http.ResponseWriter, r *http.Request) bool
	// IgnoreIfMatch and IgnoreRange make it a server without support for these headers.
	IgnoreIfMatch, IgnoreRange bool
	// OpaqueETags are not the MD5 of the data, and differ each time, as with a customer's key.
	OpaqueETags bool
	// NoETag makes listings and answers lack ETags.
	NoETag bool
	// Versioned makes it a versioned bucket: overwritten and deleted versions can be read by ID.
	Versioned bool
	// PageSize is the most keys in a listing's page; 0 means 1,000.
	PageSize int

	mu       sync.Mutex
	objects  map[string]s3Object
	history  map[string][]s3Version // by key, newest last
	uploads  map[string]*s3Upload   // by id
	lastID   int
	requests map[string]int // by method
}

type s3Upload struct {
	key   string
	parts map[int]s3Object
}

type s3Version struct {
	s3Object
	id     string
	marker bool // of a deletion
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
func (s *S3Server) Put(key string, data []byte) string { return s.PutAt(key, data, time.Now()) }

// PutAt is Put at another time; the zero time is not sent.
func (s *S3Server) PutAt(key string, data []byte, at time.Time) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	o := s3Object{slices.Clone(data), s.etag(data), at.UTC()}
	s.store(key, o)
	return o.etag
}

// etag returns the ETag of an object or a part. s.mu is held.
func (s *S3Server) etag(data []byte) string {
	sum := md5.Sum(data)
	if s.OpaqueETags {
		s.lastID++
		sum = md5.Sum(fmt.Append(nil, s.lastID, sum))
	}
	return hex.EncodeToString(sum[:])
}

// store is called with s.mu held.
func (s *S3Server) store(key string, o s3Object) {
	if s.objects == nil {
		s.objects = make(map[string]s3Object)
	}
	s.objects[key] = o
	s.record(key, s3Version{s3Object: o})
}

// record is called with s.mu held.
func (s *S3Server) record(key string, v s3Version) {
	if !s.Versioned {
		return
	}
	if s.history == nil {
		s.history = make(map[string][]s3Version)
	}
	s.lastID++
	v.id = fmt.Sprintf("v.%06d+", s.lastID)
	s.history[key] = append(s.history[key], v)
}

// Purge removes all versions of an object except the current one.
func (s *S3Server) Purge(key string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if h := s.history[key]; len(h) > 0 {
		s.history[key] = h[len(h)-1:]
	}
}

// Uploads returns how many multipart uploads are unfinished.
func (s *S3Server) Uploads() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.uploads)
}

// Delete removes an object.
func (s *S3Server) Delete(key string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.objects, key)
	s.record(key, s3Version{s3Object: s3Object{mod: time.Now().UTC()}, marker: true})
}

// Requests returns how many requests with this method have arrived.
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

// ServeHTTP implements [http.Handler]. It uses the raw path: a mux would clean "a//b" and "..".
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
			WriteS3Error(w, 403, "InvalidAccessKeyId",
				"The AWS Access Key Id you provided does not exist in our records.")
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
	q := r.URL.Query()
	switch {
	case bucket != s.Bucket:
		WriteS3Error(w, 404, "NoSuchBucket", "The specified bucket does not exist")
	case key == "" && r.Method == http.MethodGet && q.Has("uploads"):
		s.listUploads(w, q)
	case r.Method == http.MethodPost && q.Has("uploads"):
		s.begin(w, key)
	case key == "" && r.Method == http.MethodGet && q.Has("versions"):
		s.listVersions(w, q)
	case q.Has("uploadId"):
		s.upload(w, r, key, q)
	case key == "" && r.Method == http.MethodGet:
		s.list(w, q)
	case r.Method == http.MethodGet, r.Method == http.MethodHead:
		s.get(w, r, key)
	case r.Method == http.MethodPut:
		s.put(w, r, key)
	case r.Method == http.MethodDelete:
		s.deleteIf(w, r, key)
	default:
		WriteS3Error(w, 405, "MethodNotAllowed", "The specified method is not allowed against this resource.")
	}
}

func (s *S3Server) get(w http.ResponseWriter, r *http.Request, key string) {
	s.mu.Lock()
	o, ok := s.objects[key]
	id := r.URL.Query().Get("versionId")
	if id != "" {
		ok = false
		for _, v := range s.history[key] {
			if v.id == id && !v.marker {
				o, ok = v.s3Object, true
			}
		}
	}
	s.mu.Unlock()
	if !ok && id != "" {
		WriteS3Error(w, 404, "NoSuchVersion", "The specified version does not exist.")
		return
	}
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
	if !o.mod.IsZero() {
		h.Set("Last-Modified", o.mod.Format(http.TimeFormat))
	}
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

func (s *S3Server) deleteIf(w http.ResponseWriter, r *http.Request, key string) {
	s.mu.Lock()
	o, ok := s.objects[key]
	s.mu.Unlock()
	if m := r.Header.Get("If-Match"); m != "" && (!ok || m != `"`+o.etag+`"`) && !s.IgnoreIfMatch {
		WriteS3Error(w, 412, "PreconditionFailed", "At least one of the pre-conditions you specified did not hold")
		return
	}
	s.Delete(key)
	w.WriteHeader(http.StatusNoContent)
}

// source returns what a request to copy copies. On an error it answers and returns false.
func (s *S3Server) source(w http.ResponseWriter, r *http.Request) (data []byte, ok bool) {
	from, err := url.PathUnescape(r.Header.Get("X-Amz-Copy-Source"))
	s.mu.Lock()
	o, ok := s.objects[strings.TrimPrefix(strings.TrimPrefix(from, "/"), s.Bucket+"/")]
	s.mu.Unlock()
	if err != nil || !ok {
		WriteS3Error(w, 404, "NoSuchKey", "The specified key does not exist.")
		return nil, false
	}
	if m := r.Header.Get("X-Amz-Copy-Source-If-Match"); m != "" && m != `"`+o.etag+`"` {
		WriteS3Error(w, 412, "PreconditionFailed", "At least one of the pre-conditions you specified did not hold")
		return nil, false
	}
	if sse := "Server-Side-Encryption-Customer-Key"; r.Header.Get("X-Amz-"+sse) != r.Header.Get(
		"X-Amz-Copy-Source-"+sse) {
		WriteS3Error(w, 400, "InvalidRequest", "The object was stored using a form of Server Side Encryption.")
		return nil, false
	}
	if rg := r.Header.Get("X-Amz-Copy-Source-Range"); rg != "" {
		var first, last int
		if _, err := fmt.Sscanf(rg, "bytes=%d-%d", &first, &last); err != nil || first > last || last >= len(o.data) {
			WriteS3Error(w, 400, "InvalidArgument", "The x-amz-copy-source-range value is not valid")
			return nil, false
		}
		return o.data[first : last+1], true
	}
	return o.data, true
}

// copied answers a request to copy with the ETag.
func copied(w http.ResponseWriter, root, etag string) {
	writeXML(w, struct {
		XMLName            xml.Name
		LastModified, ETag string
	}{xml.Name{Local: root}, time.Now().UTC().Format("2006-01-02T15:04:05.000Z"), `"` + etag + `"`})
}

// listParts answers ListParts, in pages. s.mu is held.
func (s *S3Server) listParts(w http.ResponseWriter, u *s3Upload, q url.Values) {
	type part struct {
		PartNumber     int
		ETag           string
		Size           int
		ChecksumCRC32C string `xml:",omitempty"`
	}
	var res struct {
		XMLName              xml.Name `xml:"ListPartsResult"`
		Bucket, Key          string
		NextPartNumberMarker int
		IsTruncated          bool
		Part                 []part
	}
	after, _ := strconv.Atoi(q.Get("part-number-marker"))
	for _, n := range slices.Sorted(maps.Keys(u.parts)) {
		if n <= after {
			continue
		}
		if len(res.Part) == cmp.Or(s.PageSize, 1000) {
			res.IsTruncated = true
			break
		}
		p := u.parts[n]
		res.NextPartNumberMarker = n
		res.Part = append(res.Part, part{n, `"` + p.etag + `"`, len(p.data), crcOf(p.data)})
	}
	writeXML(w, res)
}

func crcOf(p []byte) string {
	return base64.StdEncoding.EncodeToString(
		binary.BigEndian.AppendUint32(nil, crc32.Checksum(p, crc32.MakeTable(crc32.Castagnoli))))
}

func (s *S3Server) put(w http.ResponseWriter, r *http.Request, key string) {
	o, ok := s.receive(w, r)
	if !ok {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, exists := s.objects[key]; exists && r.Header.Get("If-None-Match") == "*" {
		WriteS3Error(w, 412, "PreconditionFailed", "At least one of the pre-conditions you specified did not hold")
		return
	}
	s.store(key, o)
	w.Header()["ETag"] = []string{`"` + o.etag + `"`}
	if isCopy(r) {
		copied(w, "CopyObjectResult", o.etag)
	}
}

func isCopy(r *http.Request) bool { return r.Header.Get("X-Amz-Copy-Source") != "" }

// receive reads a body and verifies it against the headers. On an error it answers and returns false.
func (s *S3Server) receive(w http.ResponseWriter, r *http.Request) (o s3Object, ok bool) {
	if isCopy(r) {
		data, ok := s.source(w, r)
		s.mu.Lock()
		defer s.mu.Unlock()
		return s3Object{data, s.etag(data), time.Now().UTC()}, ok
	}
	body := io.Reader(r.Body)
	if strings.HasPrefix(r.Header.Get("X-Amz-Content-Sha256"), "STREAMING-") {
		body = &chunkedReader{r: bufio.NewReader(r.Body)}
	}
	data, err := io.ReadAll(body)
	want := r.Header.Get("X-Amz-Decoded-Content-Length")
	if err != nil || (want != "" && want != strconv.Itoa(len(data))) {
		WriteS3Error(w, 400, "IncompleteBody",
			"You did not provide the number of bytes specified by the Content-Length HTTP header.")
		return o, false
	}
	if sum := r.Header.Get("Content-Md5"); sum != "" {
		if have := md5.Sum(data); base64.StdEncoding.EncodeToString(have[:]) != sum {
			WriteS3Error(w, 400, "BadDigest", "The Content-MD5 you specified did not match what we received.")
			return o, false
		}
	}
	if sum := r.Header.Get("X-Amz-Checksum-Crc32c"); sum != "" {
		if crcOf(data) != sum {
			WriteS3Error(w, 400, "BadDigest", "The CRC32C you specified did not match the calculated checksum.")
			return o, false
		}
		w.Header().Set("X-Amz-Checksum-Crc32c", sum)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s3Object{data, s.etag(data), time.Now().UTC()}, true
}

func writeXML(w http.ResponseWriter, v any) {
	var buf bytes.Buffer
	buf.WriteString(xml.Header)
	if err := xml.NewEncoder(&buf).Encode(v); err != nil {
		WriteS3Error(w, 500, "InternalError", err.Error())
		return
	}
	w.Header().Set("Content-Type", "application/xml")
	_, _ = w.Write(buf.Bytes())
}

// begin answers CreateMultipartUpload.
func (s *S3Server) begin(w http.ResponseWriter, key string) {
	s.mu.Lock()
	s.lastID++
	id := fmt.Sprintf("upload-%06d", s.lastID)
	if s.uploads == nil {
		s.uploads = make(map[string]*s3Upload)
	}
	s.uploads[id] = &s3Upload{key: key, parts: make(map[int]s3Object)}
	s.mu.Unlock()
	writeXML(w, struct {
		XMLName               xml.Name `xml:"InitiateMultipartUploadResult"`
		Bucket, Key, UploadId string
	}{Bucket: s.Bucket, Key: key, UploadId: id})
}

// upload answers UploadPart, UploadPartCopy, ListParts, CompleteMultipartUpload and AbortMultipartUpload.
func (s *S3Server) upload(w http.ResponseWriter, r *http.Request, key string, q url.Values) {
	id := q.Get("uploadId")
	noUpload := func() {
		WriteS3Error(w, 404, "NoSuchUpload", "The specified multipart upload does not exist.")
	}
	if r.Method == http.MethodPut {
		n, err := strconv.Atoi(q.Get("partNumber"))
		if err != nil || n < 1 || n > 10_000 {
			WriteS3Error(w, 400, "InvalidArgument", "Part number must be an integer between 1 and 10000, inclusive")
			return
		}
		o, ok := s.receive(w, r)
		if !ok {
			return
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		u := s.uploads[id]
		if u == nil || u.key != key {
			noUpload()
			return
		}
		u.parts[n] = o
		w.Header()["ETag"] = []string{`"` + o.etag + `"`}
		if isCopy(r) {
			copied(w, "CopyPartResult", o.etag)
		}
		return
	}
	var list struct {
		Part []struct {
			PartNumber int
			ETag       string
		}
	}
	if r.Method == http.MethodPost {
		if err := xml.NewDecoder(r.Body).Decode(&list); err != nil || len(list.Part) == 0 {
			WriteS3Error(w, 400, "MalformedXML", "The XML you provided was not well-formed")
			return
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	u := s.uploads[id]
	switch {
	case u == nil || u.key != key:
		noUpload()
		return
	case r.Method == http.MethodDelete:
		delete(s.uploads, id)
		w.WriteHeader(http.StatusNoContent)
		return
	case r.Method == http.MethodGet:
		s.listParts(w, u, q)
		return
	case r.Method != http.MethodPost:
		WriteS3Error(w, 405, "MethodNotAllowed", "The specified method is not allowed against this resource.")
		return
	}
	var data, sums []byte
	for i, p := range list.Part {
		part, ok := u.parts[p.PartNumber]
		switch {
		case i > 0 && p.PartNumber <= list.Part[i-1].PartNumber:
			WriteS3Error(w, 400, "InvalidPartOrder", "The list of parts was not in ascending order.")
			return
		case !ok || strings.Trim(p.ETag, `"`) != part.etag:
			WriteS3Error(w, 400, "InvalidPart", "One or more of the specified parts could not be found.")
			return
		case i < len(list.Part)-1 && len(part.data) < 5<<20:
			WriteS3Error(w, 400, "EntityTooSmall", "Your proposed upload is smaller than the minimum allowed size")
			return
		}
		sum := md5.Sum(part.data)
		data, sums = append(data, part.data...), append(sums, sum[:]...)
	}
	o := s3Object{data, fmt.Sprintf("%s-%d", s.etag(sums), len(list.Part)), time.Now().UTC()}
	s.store(key, o)
	delete(s.uploads, id)
	writeXML(w, struct {
		XMLName           xml.Name `xml:"CompleteMultipartUploadResult"`
		Bucket, Key, ETag string
	}{Bucket: s.Bucket, Key: key, ETag: `"` + o.etag + `"`})
}

// listUploads answers ListMultipartUploads, in pages.
func (s *S3Server) listUploads(w http.ResponseWriter, q url.Values) {
	type upload struct{ Key, UploadId string }
	var res struct {
		XMLName                           xml.Name `xml:"ListMultipartUploadsResult"`
		Bucket, EncodingType              string
		NextKeyMarker, NextUploadIdMarker string
		IsTruncated                       bool
		Upload                            []upload
	}
	res.Bucket, res.EncodingType = s.Bucket, "url"
	after := upload{q.Get("key-marker"), q.Get("upload-id-marker")}
	compare := func(a, b upload) int {
		return cmp.Or(strings.Compare(a.Key, b.Key), strings.Compare(a.UploadId, b.UploadId))
	}
	s.mu.Lock()
	for id, u := range s.uploads {
		if up := (upload{u.key, id}); strings.HasPrefix(u.key, q.Get("prefix")) && compare(up, after) > 0 {
			res.Upload = append(res.Upload, up)
		}
	}
	s.mu.Unlock()
	slices.SortFunc(res.Upload, compare)
	if page := cmp.Or(s.PageSize, 1000); len(res.Upload) > page {
		res.Upload, res.IsTruncated = res.Upload[:page], true
		last := res.Upload[page-1]
		res.NextKeyMarker, res.NextUploadIdMarker = url.QueryEscape(last.Key), url.QueryEscape(last.UploadId)
	}
	for i := range res.Upload {
		res.Upload[i].Key = url.QueryEscape(res.Upload[i].Key)
	}
	writeXML(w, res)
}

// listVersions answers ListObjectVersions, on one page.
func (s *S3Server) listVersions(w http.ResponseWriter, q url.Values) {
	type entry struct {
		XMLName                            xml.Name
		Key, VersionId, LastModified, ETag string
		IsLatest                           bool
		Size                               int
	}
	var res struct {
		XMLName      xml.Name `xml:"ListVersionsResult"`
		Name, Prefix string
		EncodingType string
		IsTruncated  bool
		Entries      []entry
	}
	res.Name, res.Prefix, res.EncodingType = s.Bucket, url.QueryEscape(q.Get("prefix")), "url"
	const layout = "2006-01-02T15:04:05.000Z"
	s.mu.Lock()
	history := s.history
	if !s.Versioned { // each object has the version "null"
		history = make(map[string][]s3Version)
		for k, o := range s.objects {
			history[k] = []s3Version{{s3Object: o, id: "null"}}
		}
	}
	for _, k := range slices.Sorted(maps.Keys(history)) {
		if !strings.HasPrefix(k, q.Get("prefix")) {
			continue
		}
		for i, v := range slices.Backward(history[k]) {
			e := entry{
				XMLName: xml.Name{Local: "Version"}, Key: url.QueryEscape(k), VersionId: v.id,
				LastModified: v.mod.Format(layout), ETag: `"` + v.etag + `"`,
				IsLatest: i == len(history[k])-1, Size: len(v.data),
			}
			if s.NoETag {
				e.ETag = ""
			}
			if v.marker {
				e.XMLName.Local = "DeleteMarker"
			}
			res.Entries = append(res.Entries, e)
		}
	}
	s.mu.Unlock()
	writeXML(w, res)
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
		Name: s.Bucket, Prefix: encode(prefix), Delimiter: delimiter, EncodingType: q.Get("encoding-type"),
		MaxKeys: page,
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
			Key: encode(k), LastModified: o.mod.Format("2006-01-02T15:04:05.000Z"), Size: len(o.data),
			StorageClass: "STANDARD",
		}
		if !s.NoETag {
			c.ETag = `"` + o.etag + `"`
		}
		res.Contents = append(res.Contents, c)
	}
	s.mu.Unlock()
	writeXML(w, res)
}

// Hang waits until the client has disconnected or d is over; for interceptors.
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
