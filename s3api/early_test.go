package s3api_test

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/minio/minio-go/v7"

	"github.com/shoalfs/shoal/cache/objstore/s3"
	"github.com/shoalfs/shoal/lab/rig/s3server"
	"github.com/shoalfs/shoal/s3api"
)

// An upload that the origin refuses gets the origin's answer, whatever its size and whoever signs how, and not that of
// a broken connection.
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
				// a larger one may break its own connection
				want, _ := origin.ask(t, "PUT", c.path, c.query, c.header, body[:1])
				resp, text := shoal.ask(t, "PUT", c.path, c.query, c.header, body)
				if resp.StatusCode != want.StatusCode || resp.StatusCode/100 != 4 {
					t.Errorf("%d bytes to %s?%s %v: HTTP %d %.300s, want %d as the origin",
						size, c.path, c.query, c.header, resp.StatusCode, text, want.StatusCode)
				}
			}
		}
	}
}

// early is an origin that answers each PUT as soon as it has read a part of the body, and closes the connection at
// once, with the rest of the body unread.
func early(t *testing.T, read int, asks bool) s3api.Origin {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	var running sync.WaitGroup
	running.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			running.Go(func() {
				defer c.Close()
				in := bufio.NewReader(c)
				r, err := http.ReadRequest(in)
				if err != nil {
					return
				}
				if asks && r.Header.Get("Expect") != "" {
					_, _ = io.WriteString(c, "HTTP/1.1 100 Continue\r\n\r\n")
				}
				_, _ = io.CopyN(io.Discard, in, int64(read))
				const text = "<Error><Code>PreconditionFailed</Code><Message>early</Message></Error>"
				_, _ = fmt.Fprintf(c, "HTTP/1.1 412 Precondition Failed\r\nConnection: close\r\nContent-Length: "+
					"%d\r\n\r\n%s", len(text), text)
			})
		}
	})
	t.Cleanup(func() { _ = l.Close(); running.Wait() })
	store, err := s3.New(t.Context(), s3.Config{
		Getenv: func(string) string { return "" }, Endpoint: "http://" + l.Addr().String(), Region: s3server.Region,
		Bucket:      bucket,
		AccessKeyID: "any", SecretAccessKey: "any",
	})
	must(t, err)
	t.Cleanup(store.Close)
	return store
}

// The origin's early answer is the client's, though the origin broke the upload off, for bodies of known length, in
// chunks that are signed, and of unknown length.
func TestEarlyAnswers(t *testing.T) {
	_, _, e := served(t, oddKeys[:3])
	for _, read := range []int{0, 1, 300_000} {
		for _, asks := range []bool{false, true} {
			shoal := serve(t, e, early(t, read, asks), bucket)
			for _, size := range []int{1, 10_000, 100_000, 1 << 20, 9 << 20, 64 << 20} {
				if size < read {
					continue
				}
				for range min(3, 1+10<<20/size) {
					resp, text := shoal.ask(t, "PUT", "/photos/train/new",
						"", map[string]string{"X-Amz-Content-Sha256": "UNSIGNED-PAYLOAD"}, make([]byte, size))
					if resp.StatusCode != 412 || !bytes.Contains(text, []byte("early")) {
						t.Errorf("%d of %d bytes read, asks %v: HTTP %d %.200s",
							read, size, asks, resp.StatusCode, text)
					}
				}
				body := bytes.NewReader(make([]byte, size)) // minio-go signs each chunk
				_, err := shoal.client.PutObject(t.Context(), bucket, "train/new", body, int64(size),
					minio.PutObjectOptions{DisableMultipart: true})
				if minio.ToErrorResponse(err).StatusCode != 412 {
					t.Errorf("%d of %d bytes read, asks %v, signed chunks: %v", read, size, asks, err)
				}
			}
		}
	}
}

// listening starts a server without datasets, with places for so many connections.
func listening(t *testing.T, keys s3api.Keys, most int) (s *s3api.Server, addr string) {
	t.Helper()
	s = s3api.New(keys, s3api.Limits{Connections: most}, slog.New(slog.DiscardHandler))
	l, err := s3api.Listen("127.0.0.1:0", false)
	must(t, err)
	done := make(chan error)
	go func() { done <- s.Serve(l) }()
	t.Cleanup(func() {
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		s.Close(ctx)
		must(t, <-done)
	})
	return s, l.Addr().String()
}

// askOnce opens a connection for one request.
func askOnce(addr string) (int, error) {
	tr := &http.Transport{}
	defer tr.CloseIdleConnections()
	resp, err := (&http.Client{Transport: tr, Timeout: 20 * time.Second}).Get("http://" + addr)
	if err != nil {
		return 0, err
	}
	return resp.StatusCode, resp.Body.Close()
}

// More clients at once than there are places are served one after the other, and none is cut off.
func TestMoreClientsThanPlaces(t *testing.T) {
	_, addr := listening(t, nil, 4)
	var all sync.WaitGroup
	for range 64 {
		all.Go(func() {
			if status, err := askOnce(addr); err != nil || status != 200 {
				t.Errorf("HTTP %d, %v", status, err)
			}
		})
	}
	all.Wait()
}

// A refused upload whose client goes on, or falls silent, keeps no place.
func TestRefusedUploadsKeepNoPlace(t *testing.T) {
	keys, err := s3api.ParseKeys(strings.NewReader(access + " " + secret))
	must(t, err)
	_, addr := listening(t, keys, 4)
	for range 12 {
		c, err := net.Dial("tcp", addr)
		must(t, err)
		defer c.Close()
		_, err = io.WriteString(c,
			"PUT /photos/x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000000\r\n\r\nbegin")
		must(t, err)
		must(t, c.SetReadDeadline(time.Now().Add(20*time.Second)))
		if line, err := bufio.NewReader(c).ReadString('\n'); err != nil || !strings.Contains(line, " 403 ") {
			t.Fatalf("%q, %v", line, err)
		}
	}
	start := time.Now()
	if status, err := askOnce(addr); err != nil || status != 403 {
		t.Errorf("HTTP %d, %v", status, err)
	}
	if took := time.Since(start); took > 3*time.Second {
		t.Errorf("the next client waited for %v", took)
	}
}

// Silent connections make room for those that ask, and requests at work do not.
func TestSilentConnections(t *testing.T) {
	const most = 4
	s, addr := listening(t, nil, most)
	var silent []net.Conn
	for range 3 * most {
		c, err := net.Dial("tcp", addr)
		must(t, err)
		defer c.Close()
		silent = append(silent, c)
		if len(silent)%2 == 0 { // half of a head
			_, _ = c.Write([]byte("GET / HTTP/1.1\r\nHost: localhost\r\n"))
		}
	}
	for range 3 {
		if status, err := askOnce(addr); err != nil || status != 200 {
			t.Errorf("HTTP %d, %v", status, err)
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
			if resp.StatusCode != c.status || resp.Header.Get("X-Content-Type-Options") != "nosniff" ||
				resp.Header.Get("Content-Security-Policy") != "sandbox" {
				t.Errorf("%s with %q?%s: HTTP %d, %v", method, c.header, c.query, resp.StatusCode, resp.Header)
			}
		}
	}
	for method, path := range map[string]string{"PUT": "/photos/train/x", "DELETE": "/photos/" + oddKeys[0],
		"POST": "/photos?delete="} {
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
