package s3api_test

import (
	"bytes"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/minio/minio-go/v7"

	"github.com/shoalfs/shoal/s3api"
)

// An upload that the origin refuses gets the origin's answer, whatever its size and whoever signs how, and not that of a broken
// connection.
func TestRefusedUploads(t *testing.T) {
	origin, shoal, _ := served(t, oddKeys[:3])
	must(t, origin.client.MakeBucket(t.Context(), "other", minio.MakeBucketOptions{}))
	for _, size := range []int{1, 100_000, 300_000, 1 << 20, 5 << 20, 20 << 20} {
		body := make([]byte, size)
		for range 5 {
			for _, c := range []struct {
				path, query string
				header      map[string]string
				status      int
			}{
				{"/photos/" + oddKeys[0], "", map[string]string{"If-None-Match": "*"}, 412},
				{"/photos/train/new", "partNumber=1&uploadId=none", nil, 404},
				{"/photos/train/new", "", map[string]string{"X-Amz-Content-Sha256": strings.Repeat("0", 64)}, 400},
			} {
				want, _ := origin.ask(t, "PUT", c.path, c.query, c.header, body[:1]) // a larger one may break its own connection
				resp, text := shoal.ask(t, "PUT", c.path, c.query, c.header, body)
				if resp.StatusCode != want.StatusCode || resp.StatusCode/100 != 4 {
					t.Errorf("%d bytes to %s?%s %v: HTTP %d %.300s, want %d as the origin", size, c.path, c.query, c.header, resp.StatusCode, text, want.StatusCode)
				}
			}
		}
	}
}

// Silent connections make room for those that ask, and requests at work do not.
func TestSilentConnections(t *testing.T) {
	const most = 4
	s := s3api.New(nil, s3api.Limits{Connections: most}, slog.New(slog.DiscardHandler))
	l, err := s3api.Listen("127.0.0.1:0", false)
	must(t, err)
	done := make(chan error)
	go func() { done <- s.Serve(l) }()
	defer func() { s.Close(t.Context()); must(t, <-done) }()
	var silent []net.Conn
	for range 3 * most {
		c, err := net.Dial("tcp", l.Addr().String())
		must(t, err)
		defer c.Close()
		silent = append(silent, c)
		if len(silent)%2 == 0 { // half of a head
			_, _ = c.Write([]byte("GET / HTTP/1.1\r\nHost: localhost\r\n"))
		}
	}
	for range 3 {
		tr := &http.Transport{}
		resp, err := (&http.Client{Transport: tr, Timeout: 5 * time.Second}).Get("http://" + l.Addr().String())
		must(t, err)
		resp.Body.Close()
		tr.CloseIdleConnections()
		if resp.StatusCode != 200 {
			t.Errorf("HTTP %d", resp.StatusCode)
		}
	}
	if n := s.Stats().Connections; n > most+1 {
		t.Errorf("%d connections", n)
	}
}

// The unsigned endpoint serves programs and not pages, and its answers are never pages.
func TestPages(t *testing.T) {
	_, _, e := served(t, oddKeys[:3])
	store, _ := e.Origin()
	url := serveWith(t, nil, e, store, bucket).url
	for _, c := range []struct {
		header string
		query  string
		status int
	}{
		{"", "", 200},
		{"Sec-Fetch-Site: same-origin", "", 200},
		{"Sec-Fetch-Site: none\nSec-Fetch-Mode: navigate\nSec-Fetch-Dest: document", "", 403},
		{"Sec-Fetch-Site: cross-site\nSec-Fetch-Mode: no-cors\nSec-Fetch-Dest: image", "", 403},
		{"Sec-Fetch-Site: same-site\nSec-Fetch-Mode: cors", "", 403},
		{"Sec-Fetch-Site: same-origin\nSec-Fetch-Mode: navigate\nSec-Fetch-Dest: iframe", "", 403},
		{"Origin: http://evil.example", "", 403},
		{"Origin: null", "", 403},
		{"Referer: http://127.0.0.1:1/page.html", "", 403},
		{"", "response-content-type=text/html", 400},
	} {
		for _, method := range []string{"GET", "HEAD"} {
			req, err := http.NewRequestWithContext(t.Context(), method, url+"/photos/"+oddKeys[0]+"?"+c.query, nil)
			must(t, err)
			for line := range strings.Lines(c.header) {
				name, value, _ := strings.Cut(strings.TrimSpace(line), ": ")
				req.Header.Set(name, value)
			}
			resp, err := http.DefaultTransport.RoundTrip(req)
			must(t, err)
			resp.Body.Close()
			if resp.StatusCode != c.status || resp.Header.Get("X-Content-Type-Options") != "nosniff" || resp.Header.Get("Content-Security-Policy") != "sandbox" {
				t.Errorf("%s with %q?%s: HTTP %d, %v", method, c.header, c.query, resp.StatusCode, resp.Header)
			}
		}
	}
	for method, path := range map[string]string{"PUT": "/photos/train/x", "DELETE": "/photos/" + oddKeys[0], "POST": "/photos?delete="} {
		req, err := http.NewRequestWithContext(t.Context(), method, url+path, bytes.NewReader([]byte("x")))
		must(t, err)
		resp, err := http.DefaultTransport.RoundTrip(req)
		must(t, err)
		resp.Body.Close()
		if resp.StatusCode != 403 {
			t.Errorf("%s %s: HTTP %d", method, path, resp.StatusCode)
		}
	}
}

// heads returns the head of an answer as it comes.
func heads(t *testing.T, s side, path string) string {
	t.Helper()
	c, err := net.Dial("tcp", strings.TrimPrefix(s.url, "http://"))
	must(t, err)
	defer c.Close()
	_, err = fmt.Fprintf(c, "HEAD %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", path)
	must(t, err)
	raw, err := io.ReadAll(c)
	must(t, err)
	return string(raw)
}

func first[T any](x T, _ bool) T { return x }

// What a listing does not know comes from the origin, once, and under the names that it has there.
func TestMetadata(t *testing.T) {
	origin, shoal, e := served(t, oddKeys[:3])
	key := "train/meta.jpg"
	_, err := origin.client.PutObject(t.Context(), bucket, key, bytes.NewReader([]byte("pixels")), 6,
		minio.PutObjectOptions{ContentType: "image/jpeg", UserMetadata: map[string]string{"sha256": "abc", "Camera-Model": "x"}, DisableContentSha256: true})
	must(t, err)
	_, err = e.Refresh(t.Context())
	must(t, err)
	for i := range 3 {
		want, _ := origin.ask(t, "HEAD", "/photos/"+key, "", nil, nil)
		got, _ := shoal.ask(t, "HEAD", "/photos/"+key, "", nil, nil)
		for _, name := range []string{"Content-Type", "Content-Length", "Etag", "X-Amz-Meta-Sha256", "X-Amz-Meta-Camera-Model"} {
			if fmt.Sprint(got.Header[name]) != fmt.Sprint(want.Header[name]) || got.Header.Get(name) == "" {
				t.Errorf("HEAD %d: %s: %q, want %q", i, name, got.Header[name], want.Header[name])
			}
		}
	}
	raw := heads(t, serveWith(t, nil, e, first(e.Origin()), bucket), "/photos/"+key)
	if !strings.Contains(raw, "\r\nx-amz-meta-sha256: abc\r\n") || strings.Count(strings.ToLower(raw), "x-amz-request-id:") != 1 {
		t.Error(raw)
	}
}
