package s3api_test

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/minio/minio-go/v7"

	"github.com/shoalfs/shoal/cache/objstore/s3"
	"github.com/shoalfs/shoal/s3api"
)

// raw returns an answer as it comes.
func raw(t *testing.T, s side, method, path string) string {
	t.Helper()
	c, err := net.Dial("tcp", strings.TrimPrefix(s.url, "http://"))
	must(t, err)
	defer c.Close()
	_, err = fmt.Fprintf(c, "%s %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", method, path)
	must(t, err)
	text, err := io.ReadAll(c)
	must(t, err)
	return string(text)
}

// counted is an origin that keeps what it is asked for.
type counted struct {
	s3api.Origin
	mu    sync.Mutex
	asked []string
}

func (o *counted) Forward(ctx context.Context, r s3.Request) (*http.Response, error) {
	o.mu.Lock()
	o.asked = append(o.asked, r.Method+" "+r.Key)
	o.mu.Unlock()
	return o.Origin.Forward(ctx, r)
}

// take returns what was asked since the last call.
func (o *counted) take() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	text := strings.Join(o.asked, ", ")
	o.asked = nil
	return text
}

// What a listing does not know comes from the origin, once a listing, and under the names that it has there. New
// metadata of the same bytes are seen after a write through the endpoint, and after a refresh.
func TestMetadata(t *testing.T) {
	origin, _, e := served(t, oddKeys[:3])
	const key = "train/meta.jpg"
	sum := base64.StdEncoding.EncodeToString(
		binary.BigEndian.AppendUint32(nil, crc32.Checksum([]byte("pixels"), crc32.MakeTable(crc32.Castagnoli))))
	put := func(s side, kind string) {
		t.Helper()
		_, err := s.client.PutObject(t.Context(), bucket, key, bytes.NewReader([]byte("pixels")), 6,
			minio.PutObjectOptions{
				ContentType: kind, CacheControl: "max-age=60", ContentDisposition: "inline", ContentLanguage: "de",
				UserMetadata: map[string]string{"sha256": "abc", "Camera-Model": kind,
					"X-Amz-Checksum-Crc32c": sum},
				DisableContentSha256: true,
			})
		must(t, err)
	}
	refresh := func() { _, err := e.Refresh(t.Context()); must(t, err) }
	put(origin, "image/jpeg")
	refresh()
	store, _ := e.Origin()
	asked := &counted{Origin: store}
	shoal := serve(t, e, asked, bucket)
	check := func(what, kind, requests string) {
		t.Helper()
		for range 3 {
			for _, method := range []string{"HEAD", "GET"} {
				for _, mode := range []map[string]string{nil, {"X-Amz-Checksum-Mode": "ENABLED"},
					{"X-Amz-Checksum-Mode": "ENABLED", "Range": "bytes=5-1"}} { // which is none
					want, _ := origin.ask(t, method, "/photos/"+key, "", mode, nil)
					got, body := shoal.ask(t, method, "/photos/"+key, "", mode, nil)
					for _, name := range []string{"Content-Type", "Content-Length", "Cache-Control",
						"Content-Disposition", "Content-Language", "Etag", "X-Amz-Meta-Sha256",
						"X-Amz-Meta-Camera-Model", "X-Amz-Checksum-Crc32c"} {
						if g, w := fmt.Sprint(got.Header[name]), fmt.Sprint(want.Header[name]); g != w ||
							name != "X-Amz-Checksum-Crc32c" && w == "[]" {
							t.Errorf("%s: %s %v: %s: %s, want %s", what, method, mode, name, g, w)
						}
					}
					if got.Header.Get("Content-Type") != kind || method == "GET" && string(body) != "pixels" {
						t.Errorf("%s: %q, want %s", what, got.Header.Get("Content-Type"), kind)
					}
				}
			}
		}
		if got := asked.take(); requests != "" && got != requests {
			t.Errorf("%s: the origin was asked for %q", what, got)
		}
	}
	check("listed", "image/jpeg", "HEAD "+key)
	put(shoal, "image/png") // the same bytes, and so the same ETag
	check("written through the endpoint", "image/png", "")
	refresh()
	check("refreshed", "image/png", "HEAD "+key)
	put(origin, "image/webp")
	refresh()
	check("written past the endpoint", "image/webp", "HEAD "+key)
}

// away is an origin that does not answer.
type away struct {
	s3api.Origin
	asked atomic.Int32
}

func (o *away) Forward(context.Context, s3.Request) (*http.Response, error) {
	o.asked.Add(1)
	return nil, errors.New("no answer")
}

// HEADs go on without an origin that does not answer, and most without asking it.
func TestHeadsWithoutTheOrigin(t *testing.T) {
	_, _, e := served(t, oddKeys[:3])
	var origin away
	s := serve(t, e, &origin, bucket)
	for range 20 {
		if resp, _ := s.ask(t, "HEAD", "/photos/"+oddKeys[0], "", nil, nil); resp.StatusCode != http.StatusOK ||
			resp.ContentLength != int64(len(contentOf(oddKeys[0]))) {
			t.Errorf("HTTP %d, %d bytes", resp.StatusCode, resp.ContentLength)
		}
	}
	if n := origin.asked.Load(); n > 10 {
		t.Errorf("it was asked %d times", n)
	}
}

// The names of user metadata are in lower case as S3 sends them, and each request has one id, from the cache and from
// the origin.
func TestNamesAsTheyAreSent(t *testing.T) {
	origin, _, e := served(t, oddKeys[:3])
	for _, key := range []string{"train/meta", "other/meta"} {
		_, err := origin.client.PutObject(t.Context(), bucket, key, strings.NewReader("x"), 1,
			minio.PutObjectOptions{UserMetadata: map[string]string{"SHA256": "abc"}, DisableContentSha256: true})
		must(t, err)
	}
	_, err := e.Refresh(t.Context())
	must(t, err)
	store, _ := e.Origin()
	s := serveWith(t, nil, e, store, bucket)
	for _, key := range []string{"train/meta", "other/meta"} {
		for _, method := range []string{"HEAD", "GET"} {
			text := raw(t, s, method, "/photos/"+key)
			if !strings.Contains(text, "\r\nx-amz-meta-sha256: abc\r\n") ||
				strings.Count(strings.ToLower(text), "x-amz-request-id:") != 1 ||
				strings.Count(strings.ToLower(text), "x-amz-id-2:") > 1 {
				t.Errorf("%s %s: %s", method, key, text)
			}
		}
	}
}

// Keys with dots are the origin's, as they were written; those that a path would lead out of the bucket are refused.
func TestDottedKeys(t *testing.T) {
	_, _, e := served(t, oddKeys[:3])
	store, _ := e.Origin()
	asked := &counted{Origin: store}
	s := serveWith(t, nil, e, asked, bucket)
	for _, key := range []string{"./x", "train/./a/1", "train/a/../a/1", "a/..", "a/.", "train/a/1/..",
		"x/../../photos/y", "..x", "train/...", "a//b", "a/%2e%2e/b", "a/%2E/b", "%2e%2e/x", "../photos", "../other/x",
		"x/../../other/y", "."} {
		text := raw(t, s, "GET", "/photos/"+key)
		plain := strings.NewReplacer("%2e", ".", "%2E", ".").Replace(key)
		want := "GET " + plain
		if out := filepath.Join("/photos", plain); out != "/photos" && !strings.HasPrefix(out, "/photos/") ||
			out == "/photos" {
			want = ""
		}
		if got := asked.take(); got != want || want == "" && !strings.Contains(text, "<Code>InvalidURI</Code>") {
			t.Errorf("%s: the origin was asked for %q: %s", key, got, text)
		}
	}
}

// Endpoints of different daemons tell each other nothing: after a write through one, the other has the old bytes, or
// fails, and never mixes them, until it has listed again.
func TestWritesElsewhereAreSeenAfterARefresh(t *testing.T) {
	origin, shoal, _ := served(t, oddKeys[:3], "train/big")
	old, err := origin.client.GetObject(t.Context(), bucket, "train/big", minio.GetObjectOptions{})
	must(t, err)
	defer old.Close()
	before, err := io.ReadAll(old)
	must(t, err)
	other := open(t, "s3://"+bucket+"/train", filepath.Join(t.TempDir(), "other"), origin.url)
	store, _ := other.Origin()
	keys, err := s3api.ParseKeys(strings.NewReader(access + " " + secret))
	must(t, err)
	far := serveSet(t, keys, s3api.Limits{Connections: 1024},
		s3api.Served{Dataset: other, Origin: store, Bucket: bucket, Prefix: "train/", Where: "as from another process"})
	const path = "/photos/train/big"
	far.ask(t, "GET", path, "", map[string]string{"Range": "bytes=0-99"}, nil) // it has a part of the old bytes
	after := bytes.Repeat([]byte("new"), bigSize/3)
	if resp, body := shoal.ask(t, "PUT", path, "", nil, after); resp.StatusCode != http.StatusOK {
		t.Fatalf("HTTP %d: %s", resp.StatusCode, body)
	}
	if _, body := shoal.ask(t, "GET", path, "", nil, nil); !bytes.Equal(body, after) {
		t.Error("the writer does not read what it wrote")
	}
	for _, r := range []string{"bytes=0-99", fmt.Sprintf("bytes=%d-", bigSize-99)} {
		resp, body := far.ask(t, "GET", path, "", map[string]string{"Range": r}, nil)
		if fits := bytes.HasPrefix(before, body) ||
			bytes.HasSuffix(before, body); resp.StatusCode != http.StatusPreconditionFailed &&
			(resp.StatusCode != http.StatusPartialContent || !fits) {
			t.Errorf("%s: HTTP %d, %d bytes that are not the old ones", r, resp.StatusCode, len(body))
		}
	}
	_, err = other.Refresh(t.Context())
	must(t, err)
	if _, body := far.ask(t, "GET", path, "", nil, nil); !bytes.Equal(body, after) {
		t.Error("the other endpoint has old bytes after a refresh")
	}
}
