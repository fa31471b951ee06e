package s3api_test

import (
	"bytes"
	"context"
	"crypto/md5" //nolint:gosec // S3 asks for it
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"encoding/xml"
	"fmt"
	"hash/crc32"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"
	"github.com/minio/minio-go/v7/pkg/signer"
	"go.uber.org/goleak"

	"github.com/shoalfs/shoal/cache/cachedir"
	"github.com/shoalfs/shoal/lab/rig/s3server"
	"github.com/shoalfs/shoal/prefetch/engine"
	"github.com/shoalfs/shoal/prefetch/order"
	"github.com/shoalfs/shoal/s3api"
)

const (
	bucket = "photos"
	access = "trainer"
	secret = "not-a-secret"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// oddKeys are in an order that is not that of a walk through folders, and have what must be escaped.
var oddKeys = []string{
	"train/a-b/1", "train/a/1", "train/a/b/2", "train/a/b-c/3", "train/a0", "train/b/ü+%20 &?#'.jpg", "train/b/é",
	"train/c d/e=f", "train/c,d;e/(1)!~*",
	"train/n01/1.jpg", "train/n01/2.jpg", "train/n01/10.jpg", "train/n02/1.jpg", "train/zero", "train/large",
	"train/readme.txt",
	"train-other/1", "other/1", "top",
}

func contentOf(key string) []byte {
	switch {
	case strings.HasSuffix(key, "zero"):
		return nil
	case strings.HasSuffix(key, "large"):
		return bytes.Repeat([]byte("0123456789abcdef"), 600<<10/16)
	}
	return []byte("the content of " + key)
}

// bigSize is more than two extents.
const bigSize = 9<<20 + 77

func md5Of(text string) string {
	sum := md5.Sum([]byte(text)) //nolint:gosec // S3 asks for it
	return base64.StdEncoding.EncodeToString(sum[:])
}

// side is an endpoint to ask.
type side struct {
	url            string
	access, secret string
	client         *minio.Client
}

func newSide(t testing.TB, at, access, secret string) side {
	t.Helper()
	u, err := url.Parse(at)
	must(t, err)
	tr := &http.Transport{DisableCompression: true}
	t.Cleanup(tr.CloseIdleConnections)
	c, err := minio.New(u.Host,
		&minio.Options{Creds: credentials.NewStaticV4(access, secret, ""), Region: s3server.Region,
			BucketLookup: minio.BucketLookupPath, Transport: tr})
	must(t, err)
	return side{at, access, secret, c}
}

// ask sends a signed request and returns the answer with its body.
func (s side) ask(t testing.TB, method, path, query string, header map[string]string, body []byte) (
	*http.Response, []byte) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, s.url, bytes.NewReader(body))
	must(t, err)
	req.URL.Path, req.URL.RawQuery = path, query
	for name, value := range header {
		req.Header.Set(name, value)
	}
	if sum := sha256.Sum256(body); req.Header.Get("X-Amz-Content-Sha256") == "" {
		req.Header.Set("X-Amz-Content-Sha256", hex.EncodeToString(sum[:]))
	}
	req = signer.SignV4(*req, s.access, s.secret, "", s3server.Region)
	return s.do(t, req)
}

func (s side) do(t testing.TB, req *http.Request) (*http.Response, []byte) {
	t.Helper()
	tr := &http.Transport{DisableCompression: true}
	defer tr.CloseIdleConnections()
	resp, err := tr.RoundTrip(req)
	must(t, err)
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	must(t, err)
	return resp, data
}

// served starts a store with keys and an endpoint of s3://photos/train before it.
func served(t testing.TB, keys []string, big ...string) (origin, shoal side, e *engine.Engine) {
	t.Helper()
	srv, err := s3server.Start(context.Background(), s3server.Options{Dir: t.TempDir()})
	must(t, err)
	t.Cleanup(srv.Stop)
	origin = newSide(t, srv.URL, s3server.AccessKey, s3server.SecretKey)
	must(t, origin.client.MakeBucket(t.Context(), bucket, minio.MakeBucketOptions{}))
	for _, k := range keys {
		_, err := origin.client.PutObject(t.Context(), bucket, k, bytes.NewReader(contentOf(k)),
			int64(len(contentOf(k))), s3server.PutOptions())
		must(t, err)
	}
	for _, k := range big {
		data := make([]byte, bigSize)
		_, _ = rand.NewChaCha8([32]byte{}).Read(data)
		_, err := origin.client.PutObject(t.Context(), bucket, k, bytes.NewReader(data), bigSize, s3server.PutOptions())
		must(t, err)
	}
	e = open(t, "s3://"+bucket+"/train", filepath.Join(t.TempDir(), "cache"), srv.URL)
	store, _ := e.Origin()
	return origin, serve(t, e, store, bucket), e
}

// open opens a dataset.
func open(t testing.TB, source, cacheDir, endpoint string) *engine.Engine {
	t.Helper()
	return openIn(t, engine.ClusterConfig{}, source, cacheDir, endpoint)
}

func openIn(t testing.TB, cluster engine.ClusterConfig, source, cacheDir, endpoint string) *engine.Engine {
	t.Helper()
	log := slog.New(slog.DiscardHandler)
	h, err := engine.OpenHost(
		engine.HostConfig{Cluster: cluster,
			Options: cachedir.Options{Path: cacheDir, Size: 1 << 30, Memory: 256 << 20, Logger: log}})
	must(t, err)
	t.Cleanup(func() { must(t, h.Close()) })
	env := map[string]string{}
	for _, kv := range s3server.Env(endpoint) {
		name, value, _ := strings.Cut(kv, "=")
		env[name] = value
	}
	spec, err := order.Parse("none")
	must(t, err)
	e, err := h.Open(t.Context(),
		engine.Config{Source: source, Order: spec, Samples: "*", Connections: 8, Logger: log,
			Getenv: func(name string) string { return env[name] }})
	must(t, err)
	t.Cleanup(func() { must(t, e.Close()) })
	return e
}

// serve serves a dataset until the test ends.
func serve(t testing.TB, data s3api.Dataset, origin s3api.Origin, bucket string) side {
	t.Helper()
	keys, err := s3api.ParseKeys(strings.NewReader(access + " " + secret))
	must(t, err)
	return serveWith(t, keys, data, origin, bucket)
}

func serveWith(t testing.TB, keys s3api.Keys, data s3api.Dataset, origin s3api.Origin, bucket string) side {
	t.Helper()
	return serveLimited(t, keys, s3api.Limits{ReadOnly: keys == nil, Connections: 1024}, data, origin, bucket)
}

func serveLimited(t testing.TB, keys s3api.Keys, may s3api.Limits, data s3api.Dataset, origin s3api.Origin,
	bucket string) side {
	t.Helper()
	return serveSet(t, keys, may,
		s3api.Served{Dataset: data, Origin: origin, Bucket: bucket, Prefix: data.Manifest().Prefix(),
			Where: "the origin"})
}

func serveSet(t testing.TB, keys s3api.Keys, may s3api.Limits, set s3api.Served) side {
	t.Helper()
	s := s3api.New(keys, may, slog.New(slog.DiscardHandler))
	remove, err := s.Add(set)
	must(t, err)
	l, err := s3api.Listen("127.0.0.1:0", true)
	must(t, err)
	done := make(chan error, 1)
	go func() { done <- s.Serve(l) }()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		s.Close(ctx)
		remove(ctx)
		must(t, <-done)
	})
	return newSide(t, "http://"+l.Addr().(*net.TCPAddr).String(), access, secret)
}

// same asks both sides, and compares status, body and the headers named.
func same(t *testing.T, a, b side, method, path, query string, header map[string]string, headers ...string) {
	t.Helper()
	wantResp, want := a.ask(t, method, path, query, header, nil)
	gotResp, got := b.ask(t, method, path, query, header, nil)
	name := fmt.Sprintf("%s %s?%s %v", method, path, query, header)
	if gotResp.StatusCode != wantResp.StatusCode {
		t.Errorf("%s: HTTP %d (%.300s), the store answers %d (%.300s)",
			name, gotResp.StatusCode, got, wantResp.StatusCode, want)
		return
	}
	if wantResp.StatusCode >= 300 {
		return
	}
	for _, h := range headers {
		if g, w := gotResp.Header.Get(h), wantResp.Header.Get(h); g != w {
			t.Errorf("%s: %s %q, the store answers %q", name, h, g, w)
		}
	}
	if !bytes.Equal(got, want) {
		t.Errorf("%s: %d bytes, the store answers %d", name, len(got), len(want))
	}
}

// Ranges and conditions are answered as a store answers them.
func TestObjectsAsTheStore(t *testing.T) {
	origin, shoal, _ := served(t, oddKeys)
	headers := []string{"ETag", "Content-Length", "Content-Range", "Last-Modified", "Accept-Ranges"}
	for _, key := range oddKeys {
		for _, method := range []string{"GET", "HEAD"} {
			same(t, origin, shoal, method, "/"+bucket+"/"+key, "", nil, headers...)
		}
	}
	ranges := []string{
		"bytes=0-0", "bytes=0-9", "bytes=5-", "bytes=-5", "bytes=-1000000", "bytes=10-1000000", "bytes=614399-",
		"bytes=614399-614399", "bytes=300000-599999",
		"bytes=614400-", "bytes=614400-614500", "bytes=99999999999999999999-", "bytes=-0", "bytes=", "bytes=-",
		"bytes=5-2", "bytes=a-b", "bytes=0-1,4-5",
	}
	for _, key := range []string{"train/large", "train/zero", "train/readme.txt"} {
		for _, text := range ranges {
			same(t, origin, shoal, "GET", "/"+bucket+"/"+key, "", map[string]string{"Range": text}, "Content-Range",
				"Content-Length", "ETag")
		}
	}
	// What S3 tells, and this store does not: clients on AWS's C library learn from it that an object is empty.
	if _, body := shoal.ask(t, "GET", "/photos/train/zero", "", map[string]string{"Range": "bytes=0-9"},
		nil); !bytes.Contains(body, []byte("<ActualObjectSize>0</ActualObjectSize>")) {
		t.Errorf("%s", body)
	}
	info, err := origin.client.StatObject(t.Context(), bucket, "train/large", minio.StatObjectOptions{})
	must(t, err)
	before, after := info.LastModified.Add(-time.Hour).Format(http.TimeFormat),
		info.LastModified.Add(time.Hour).Format(http.TimeFormat)
	for _, header := range []map[string]string{
		{"If-Match": `"` + info.ETag + `"`}, {"If-Match": info.ETag}, {"If-Match": `"other"`}, {"If-Match": "*"},
		{"If-None-Match": `"` + info.ETag + `"`}, {"If-None-Match": `"other"`}, {"If-None-Match": "*"},
		{"If-Modified-Since": before}, {"If-Modified-Since": after}, {"If-Unmodified-Since": before},
		{"If-Unmodified-Since": after},
		{"If-Match": `"` + info.ETag + `"`, "If-Unmodified-Since": before},
		{"If-None-Match": `"other"`, "If-Modified-Since": after},
		{"If-Match": `"other"`, "Range": "bytes=0-9"}, {"If-Match": `"` + info.ETag + `"`, "Range": "bytes=5-9"},
	} {
		for _, method := range []string{"GET", "HEAD"} {
			same(t, origin, shoal, method, "/"+bucket+"/train/large", "", header, "ETag", "Content-Range")
		}
	}
	for _, path := range []string{"/photos/train/none", "/photos/none", "/photos/train/a", "/photos/train/a/",
		"/other-bucket/x", "/photos/train/readme.txt/x"} {
		same(t, origin, shoal, "GET", path, "", nil)
		same(t, origin, shoal, "HEAD", path, "", nil)
	}
	same(t, origin, shoal, "HEAD", "/photos", "", nil, "X-Amz-Bucket-Region")
	same(t, origin, shoal, "HEAD", "/photos/", "", nil)
	same(t, origin, shoal, "GET", "/photos/train/large", "partNumber=1", nil, "Content-Length")
}

// listed is a listing of all pages by the requests of one version of the API. The number of pages is not compared: the
// store says that there are more when only keys with another prefix follow.
func listed(t *testing.T, s side, v1 bool, prefix, after, delimiter string, perPage int) (all []string) {
	t.Helper()
	core, token := minio.Core{Client: s.client}, ""
	for range 100 {
		var contents []minio.ObjectInfo
		var prefixes []minio.CommonPrefix
		var more bool
		if v1 {
			r, err := core.ListObjects(bucket, prefix, after, delimiter, perPage)
			must(t, err)
			contents, prefixes, more = r.Contents, r.CommonPrefixes, r.IsTruncated
			if after = r.NextMarker; more && after == "" {
				after = r.Contents[len(r.Contents)-1].Key
			}
		} else {
			r, err := core.ListObjectsV2(bucket, prefix, after, token, delimiter, perPage)
			must(t, err)
			contents, prefixes, more, token = r.Contents, r.CommonPrefixes, r.IsTruncated, r.NextContinuationToken
		}
		for _, o := range contents {
			all = append(all, fmt.Sprint(o.Key, o.Size, o.ETag, o.LastModified.Truncate(time.Second)))
		}
		for _, p := range prefixes {
			all = append(all, p.Prefix)
		}
		if !more {
			break
		}
	}
	slices.Sort(all)
	return all
}

// Listings, from the manifest or the origin, have what the store lists.
func TestListingsAsTheStore(t *testing.T) {
	origin, shoal, _ := served(t, oddKeys)
	n := 0
	for _, prefix := range []string{"train/", "train/a", "train/a/", "train/n0", "train/n01/1", "train/b/ü",
		"train/none", "", "tra", "other/"} {
		for _, delimiter := range []string{"", "/", "-", ".jpg", "b"} {
			for _, after := range []string{"", "train/", "train/a", "train/a/1", "train/a/b/2", "train/n01/10.jpg",
				"train/zz", "zzz"} {
				for _, perPage := range []int{1, 3, 1000} {
					for _, v1 := range []bool{true, false} {
						if v1 && delimiter != "" && strings.HasPrefix(after, "train/a/") {
							continue
						}
						want := listed(t, origin, v1, prefix, after, delimiter, perPage)
						got := listed(t, shoal, v1, prefix, after, delimiter, perPage)
						if n++; !slices.Equal(got, want) {
							t.Errorf("v1 %t, prefix %q, delimiter %q, after %q, %d a page:\n%q, the store lists\n%q",
								v1, prefix, delimiter, after, perPage, got, want)
						}
					}
				}
			}
		}
	}
	t.Logf("%d listings", n)
}

// What SDKs add to a read, and the sub-resources of an object, are answered as the store answers them, from the cache
// or by the store itself.
func TestReadsOfSDKsAsTheStore(t *testing.T) {
	origin, shoal, _ := served(t, oddKeys)
	info, err := origin.client.StatObject(t.Context(), bucket, "train/large", minio.StatObjectOptions{})
	must(t, err)
	tag := `"` + info.ETag + `"`
	for _, key := range []string{"train/large", "train/zero", "train/b/ü+%20 &?#'.jpg", "train/none"} {
		path := "/" + bucket + "/" + key
		for _, method := range []string{"GET", "HEAD"} {
			for _, header := range []map[string]string{
				{"X-Amz-Checksum-Mode": "ENABLED"}, {"X-Amz-Checksum-Mode": "ENABLED", "Range": "bytes=2-5"},
				{"X-Amz-Request-Payer": "requester"},
				{"Accept-Encoding": "gzip"}, {"Range": "bytes=1-2"}, {"Range": "bytes=0-1,3-4"}, {"Range": "items=0-1"},
				{"If-None-Match": tag, "Range": "bytes=2-5"}, {"If-None-Match": "W/" + tag},
				{"If-Modified-Since": "yesterday"},
			} {
				same(t, origin, shoal, method, path, "", header, "ETag", "Content-Length", "Content-Range",
					"Last-Modified")
			}
			for _, query := range []string{
				"partNumber=1", "partNumber=2", "partNumber=x", "versionId=null", "versionId=none",
				"response-content-type=image%2Fpng",
				"response-content-disposition=attachment%3B%20filename%3D%22a%20b%22&response-cache-control=no-cache",
			} {
				same(t, origin, shoal, method, path, query, nil, "ETag", "Content-Length", "Content-Type",
					"Content-Disposition", "Cache-Control")
			}
		}
		for _, query := range []string{"acl=", "tagging=", "legal-hold=", "retention=", "uploads="} {
			same(t, origin, shoal, "GET", path, query, nil)
		}
		same(t, origin, shoal, "GET", path, "attributes=",
			map[string]string{"X-Amz-Object-Attributes": "ETag,ObjectSize,StorageClass"})
	}
	for _, query := range []string{"location=", "versioning=", "acl=", "policy=", "tagging=", "cors=", "uploads=",
		"uploads=&prefix=train/"} {
		same(t, origin, shoal, "GET", "/"+bucket, query, nil)
	}
}

// pageOf is what a page of a listing says, but for its token.
type pageOf struct {
	Name, Prefix, Marker, NextMarker, StartAfter, Delimiter, EncodingType string
	KeyCount, MaxKeys                                                     int
	IsTruncated                                                           bool
	Contents                                                              []struct{ Key string }
	CommonPrefixes                                                        []struct{ Prefix string }
}

// plain undoes where the store differs from S3: it never escapes, and gives a marker without a delimiter.
func (p *pageOf) plain(t *testing.T, escaped bool) {
	t.Helper()
	if p.Delimiter == "" {
		p.NextMarker = ""
	}
	if !escaped {
		return
	}
	if p.EncodingType != "url" {
		t.Errorf("encoding type %q", p.EncodingType)
	}
	p.EncodingType = ""
	texts := []*string{&p.Prefix, &p.Marker, &p.NextMarker, &p.StartAfter, &p.Delimiter}
	for i := range p.Contents {
		texts = append(texts, &p.Contents[i].Key)
	}
	for i := range p.CommonPrefixes {
		texts = append(texts, &p.CommonPrefixes[i].Prefix)
	}
	for _, text := range texts {
		var err error
		if *text, err = url.QueryUnescape(*text); err != nil {
			t.Error(err)
		}
	}
}

// A page says of itself what the store's says: the parameters, escaped as they are there, and how many keys it has.
func TestPagesAsTheStore(t *testing.T) {
	origin, shoal, _ := served(t, oddKeys)
	for _, query := range []string{
		"", "max-keys=0", "max-keys=1", "max-keys=2000", "max-keys=", "delimiter=/", "delimiter=%2F&max-keys=2",
		"delimiter=a", "delimiter=1", "delimiter=.j", "delimiter=%20", "delimiter=",
		"delimiter=%C3%BC", "encoding-type=url", "encoding-type=url&delimiter=%20",
		"encoding-type=url&delimiter=%C3%BC", "prefix=train/b/%C3%BC&encoding-type=url",
		"prefix=train/c%20d/&encoding-type=url&delimiter=/", "prefix=train/c,d%3Be/&encoding-type=url",
		"prefix=train/a&delimiter=/", "prefix=train/a/&delimiter=/",
		"prefix=train/n01/&max-keys=2", "delimiter=/&max-keys=1", "prefix=train/none", "prefix=train/zero",
	} {
		for _, version := range []string{"list-type=2", "list-type=2&start-after=train/a0",
			"list-type=2&start-after=train/b/%C3%A9", "list-type=2&start-after=a", "marker=train/a0", "marker=a",
			"list-type=2&start-after=train/n01/"} {
			q := version + "&" + query
			if !strings.Contains(query, "prefix=") {
				q += "&prefix=train/"
			}
			var pages [2]pageOf
			for i, s := range []side{origin, shoal} {
				resp, body := s.ask(t, "GET", "/"+bucket, q, nil, nil)
				if resp.StatusCode != http.StatusOK {
					t.Fatalf("%s: HTTP %d: %s", q, resp.StatusCode, body)
				}
				must(t, xml.Unmarshal(body, &pages[i]))
				pages[i].plain(t, i == 1 && strings.Contains(q, "encoding-type=url"))
			}
			if !reflect.DeepEqual(pages[0], pages[1]) {
				t.Errorf("%s:\n%+v, the store answers\n%+v", q, pages[1], pages[0])
			}
		}
	}
}

// chunked is a body as SDKs send it with a checksum at its end.
func chunked(data []byte, sum uint32) ([]byte, map[string]string) {
	var b bytes.Buffer
	for part := range slices.Chunk(data, 64<<10) {
		fmt.Fprintf(&b, "%x\r\n%s\r\n", len(part), part)
	}
	crc := base64.StdEncoding.EncodeToString(binary.BigEndian.AppendUint32(nil, sum))
	fmt.Fprintf(&b, "0\r\nx-amz-checksum-crc32:%s\r\n\r\n", crc)
	return b.Bytes(), map[string]string{
		"Content-Encoding": "aws-chunked", "X-Amz-Content-Sha256": "STREAMING-UNSIGNED-PAYLOAD-TRAILER",
		"X-Amz-Trailer":                "x-amz-checksum-crc32",
		"X-Amz-Decoded-Content-Length": strconv.Itoa(len(data)), "X-Amz-Sdk-Checksum-Algorithm": "CRC32",
	}
}

// Uploads of all kinds that an SDK makes reach the store, which checks them, and are read at once.
func TestUploadsOfSDKs(t *testing.T) {
	origin, shoal, _ := served(t, oddKeys)
	read := func(key string, want []byte) {
		t.Helper()
		for _, s := range []side{origin, shoal} {
			if resp, got := s.ask(t, "GET", "/"+bucket+"/"+key, "", nil, nil); !bytes.Equal(got, want) {
				t.Errorf("%s: HTTP %d, %d bytes, want %d", key, resp.StatusCode, len(got), len(want))
			}
		}
	}
	data := make([]byte, 300<<10)
	_, _ = rand.NewChaCha8([32]byte{2}).Read(data)
	body, header := chunked(data, crc32.ChecksumIEEE(data))
	if resp, text := shoal.ask(t, "PUT", "/"+bucket+"/train/readme.txt", "", header, body); resp.StatusCode !=
		http.StatusOK {
		t.Errorf("HTTP %d: %s", resp.StatusCode, text)
	}
	read("train/readme.txt", data)
	body, header = chunked(data[1:], crc32.ChecksumIEEE(data))
	if resp, text := shoal.ask(t, "PUT", "/"+bucket+"/train/readme.txt", "", header, body); resp.StatusCode !=
		http.StatusBadRequest || code(text) != "BadDigest" {
		t.Errorf("a wrong checksum: HTTP %d: %s", resp.StatusCode, text)
	}
	read("train/readme.txt", data)
	if resp, text := shoal.ask(t, "PUT", "/"+bucket+"/train/zero",
		"", map[string]string{"X-Amz-Content-Sha256": strings.Repeat("0", 64)},
		data); resp.StatusCode != http.StatusBadRequest {
		t.Errorf("a wrong hash: HTTP %d: %s", resp.StatusCode, text)
	}
	read("train/zero", nil)
	// The origin refuses this before it has read the body, and closes the connection: its answer may be lost in that.
	refused := 0
	for try := 0; try < 10 && refused != http.StatusPreconditionFailed &&
		(try == 0 || refused == http.StatusServiceUnavailable); try++ {
		resp, _ := shoal.ask(t, "PUT", "/"+bucket+"/train/a0", "", map[string]string{"If-None-Match": "*"}, data)
		refused = resp.StatusCode
	}
	if refused != http.StatusPreconditionFailed {
		t.Errorf("a key that is there: HTTP %d", refused)
	}
	read("train/a0", contentOf("train/a0"))
	parts := func(s side, key string, end func(core minio.Core, id string, done []minio.CompletePart)) {
		t.Helper()
		core := minio.Core{Client: s.client}
		id, err := core.NewMultipartUpload(t.Context(), bucket, key, minio.PutObjectOptions{})
		must(t, err)
		var done []minio.CompletePart
		for i := range 2 {
			part, err := core.PutObjectPart(t.Context(), bucket, key, id, i+1, bytes.NewReader(large[i*5<<20:][:5<<20]),
				5<<20, minio.PutObjectPartOptions{DisableContentSha256: true})
			must(t, err)
			done = append(done, minio.CompletePart{PartNumber: i + 1, ETag: part.ETag})
		}
		end(core, id, done)
	}
	parts(shoal, "train/large", func(core minio.Core, id string, done []minio.CompletePart) {
		read("train/large", contentOf("train/large")) // until the upload is complete
		same(t, origin, shoal, "GET", "/"+bucket+"/train/large", "uploadId="+id, nil)
		same(t, origin, shoal, "GET", "/"+bucket, "uploads=&prefix=train/", nil)
		_, err := core.CompleteMultipartUpload(t.Context(), bucket, "train/large", id, done, minio.PutObjectOptions{})
		must(t, err)
	})
	read("train/large", large[:10<<20])
	same(t, origin, shoal, "GET", "/"+bucket+"/train/large", "partNumber=2", nil, "Content-Length", "Content-Range")
	parts(shoal, "train/a/1", func(core minio.Core, id string, _ []minio.CompletePart) {
		must(t, core.AbortMultipartUpload(t.Context(), bucket, "train/a/1", id))
	})
	read("train/a/1", contentOf("train/a/1"))
}

// large is the data of uploads in parts.
var large = bytes.Repeat([]byte("0123456789abcdefg"), 10<<20/17+1)
