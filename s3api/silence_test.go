package s3api_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/objstore/s3"
	"github.com/shoalfs/shoal/s3api"
)

// gate holds back the bytes from at on until it is open.
type gate struct {
	s3api.Dataset
	at   int64
	open chan struct{}
}

func (g gate) Lend(m *catalog.Manifest, file int, off int64, n int) (data []byte, release func(), ok bool) {
	if off+int64(n) > g.at {
		select {
		case <-g.open:
		default:
			return nil, nil, false
		}
	}
	return g.Dataset.Lend(m, file, off, n)
}

func (g gate) ReadAt(ctx context.Context, m *catalog.Manifest, file int, p []byte, off int64) (int, error) {
	if off+int64(len(p)) > g.at {
		<-g.open
	}
	return g.Dataset.ReadAt(ctx, m, file, p, off)
}

// A client that ends a connection in silence hears a word each second while bytes are fetched: before the first of them
// an informational answer, if it is of the AWS Common Runtime, and then some of those that are there.
func TestNoSilence(t *testing.T) {
	origin, _, e := served(t, nil, "train/big.bin")
	_, want := origin.ask(t, "GET", "/"+bucket+"/train/big.bin", "", nil, nil)
	get := func(at int64, agent string, whileShut func(s *s3api.Server, in *bufio.Reader)) {
		t.Helper()
		s, g := s3api.New(nil, s3api.Limits{Connections: 8}, slog.New(slog.DiscardHandler)),
			gate{e, at, make(chan struct{})}
		remove, err := s.Add(s3api.Served{Dataset: g, Bucket: bucket, Prefix: e.Manifest().Prefix(),
			Where: "the origin"})
		must(t, err)
		l, err := s3api.Listen("127.0.0.1:0", false)
		must(t, err)
		done := make(chan error, 1)
		go func() { done <- s.Serve(l) }()
		conn, err := net.Dial("tcp", l.Addr().String())
		must(t, err)
		must(t, conn.SetDeadline(time.Now().Add(5*time.Minute)))
		_, err = fmt.Fprintf(conn, "GET /%s/train/big.bin HTTP/1.1\r\nHost: localhost\r\nUser-Agent: %s\r\n\r\n",
			bucket, agent)
		must(t, err)
		in := bufio.NewReader(conn)
		received := make(chan error, 1)
		receive := func() {
			resp, err := http.ReadResponse(in, nil)
			for err == nil && agent != "" && resp.StatusCode == http.StatusContinue {
				resp, err = http.ReadResponse(in, nil)
			}
			if err != nil || resp.StatusCode != http.StatusOK {
				received <- fmt.Errorf("%v, %w", resp, err)
				return
			}
			got, err := io.ReadAll(resp.Body)
			if err == nil && !bytes.Equal(got, want) {
				err = fmt.Errorf("%d bytes, and not those of the file", len(got))
			}
			received <- err
		}
		if at > 0 { // the kernel's buffers may not hold what comes while it is shut
			go receive()
		}
		whileShut(s, in)
		close(g.open)
		if at == 0 {
			receive()
		}
		if err := <-received; err != nil {
			t.Errorf("held at %d: %v", at, err)
		}
		_ = conn.Close()
		s.Close(t.Context())
		remove(t.Context())
		must(t, <-done)
	}
	get(0, "CRTS3NativeClient/0.1.x platform/unknown", func(_ *s3api.Server, in *bufio.Reader) {
		for range 2 {
			if resp, err := http.ReadResponse(in, nil); err != nil || resp.StatusCode != http.StatusContinue {
				t.Fatalf("%v, %v", resp, err)
			}
		}
	})
	for _, at := range []int64{4 << 20, 4<<20 + 5<<10} { // the end of an extent, and in a piece
		get(at, "", func(s *s3api.Server, _ *bufio.Reader) {
			for before := int64(0); ; {
				switch now := s.Stats().Sent; {
				case now >= 4<<20:
					t.Fatalf("%d bytes at once: nothing is left to say", now)
				case before == 0 && now > 4<<20-1000, before > 0 && now > before+16:
					if before > 0 {
						return
					}
					before = now
				}
				select {
				case <-t.Context().Done():
				case <-time.After(time.Millisecond):
				}
			}
		})
	}
}

// defect panics in reads from at on.
type defect struct {
	s3api.Dataset
	at int64
}

func (d defect) Lend(*catalog.Manifest, int, int64, int) (data []byte, release func(), ok bool) {
	return nil, nil, false
}

func (d defect) ReadAt(ctx context.Context, m *catalog.Manifest, file int, p []byte, off int64) (int, error) {
	if off >= d.at {
		panic("at " + fmt.Sprint(off))
	}
	return d.Dataset.ReadAt(ctx, m, file, p, off)
}

// A panic in a read costs that request, and is logged: before the first byte the answer is an error, and then the
// connection breaks.
func TestPanicInARead(t *testing.T) {
	_, _, e := served(t, nil, "train/big.bin")
	for _, at := range []int64{0, 1 << 20} {
		var log bytes.Buffer
		s := s3api.New(nil, s3api.Limits{Connections: 8}, slog.New(slog.NewTextHandler(&log, nil)))
		remove, err := s.Add(s3api.Served{Dataset: defect{e, at}, Bucket: bucket, Prefix: e.Manifest().Prefix(),
			Where: "the origin"})
		must(t, err)
		l, err := s3api.Listen("127.0.0.1:0", false)
		must(t, err)
		done := make(chan error, 1)
		go func() { done <- s.Serve(l) }()
		for range 2 {
			resp, err := http.Get("http://" + l.Addr().String() + "/" + bucket + "/train/big.bin")
			must(t, err)
			got, err := io.ReadAll(resp.Body)
			_ = resp.Body.Close()
			if at == 0 && (resp.StatusCode != http.StatusInternalServerError ||
				!bytes.Contains(got, []byte("InternalError"))) || at > 0 && (resp.StatusCode != http.StatusOK ||
				err == nil) {
				t.Errorf("a panic at %d: %s, %v, %.200q", at, resp.Status, err, got)
			}
		}
		s.Close(t.Context())
		remove(t.Context())
		must(t, <-done)
		if n := strings.Count(log.String(), "silence_test.go"); n != 2 ||
			!strings.Contains(log.String(), "level=ERROR") {
			t.Errorf("%d stacks in the log:\n%s", n, log.String())
		}
	}
}

// piped is an origin whose answer comes as it is written.
type piped struct {
	s3api.Origin
	body io.ReadCloser
}

func (p piped) Forward(context.Context, s3.Request) (*http.Response, error) {
	return &http.Response{StatusCode: http.StatusOK, Header: http.Header{}, Body: p.body}, nil
}

// What an origin sends to have its client wait, while it puts an upload together, is passed on at once.
func TestOriginHasItsClientWait(t *testing.T) {
	_, _, e := served(t, oddKeys[:3])
	store, _ := e.Origin()
	body, origin := io.Pipe()
	s := serveLimited(t, nil, s3api.Limits{Connections: 8}, e, piped{store, body}, bucket)
	go func() { _, _ = origin.Write([]byte(" \n")) }()
	client := http.Client{Timeout: time.Minute, Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Post(s.url+"/photos/train/new?uploadId=1", "", strings.NewReader("<x/>"))
	must(t, err)
	defer resp.Body.Close()
	first := make([]byte, 2)
	_, err = io.ReadFull(resp.Body, first)
	must(t, err)
	go func() { _, _ = origin.Write([]byte("<done/>")); _ = origin.Close() }()
	rest, err := io.ReadAll(resp.Body)
	must(t, err)
	if text := string(first) + string(rest); text != " \n<done/>" {
		t.Errorf("%q", text)
	}
}

// failing fails each read.
type failing struct{ s3api.Dataset }

func (failing) Lend(*catalog.Manifest, int, int64, int) (data []byte, release func(), ok bool) {
	return nil, nil, false
}

func (failing) ReadAt(context.Context, *catalog.Manifest, int, []byte, int64) (int, error) {
	return 0, &objstore.Error{Op: "read", Key: "any", Kind: objstore.KindDenied, Err: errors.New("a policy")}
}

// An error has no metadata of the object: clients would check its text against the object's checksum, and caches keep
// it.
func TestErrorsHaveNoMetadata(t *testing.T) {
	_, _, e := served(t, oddKeys[:3])
	store, _ := e.Origin()
	s := serve(t, failing{e}, store, bucket)
	for range 2 { // the first HEAD has the origin's metadata kept
		s.ask(t, "HEAD", "/photos/"+oddKeys[0], "", map[string]string{"X-Amz-Checksum-Mode": "ENABLED"}, nil)
		resp, text := s.ask(t, "GET", "/photos/"+oddKeys[0],
			"", map[string]string{"X-Amz-Checksum-Mode": "ENABLED", "Range": "bytes=0-0"}, nil)
		if resp.StatusCode != http.StatusForbidden || resp.Header.Get("Content-Range") != "" ||
			resp.Header.Get("Accept-Ranges") != "" || resp.Header.Get("Content-Type") != "application/xml" {
			t.Errorf("HTTP %d, %v, %s", resp.StatusCode, resp.Header, text)
		}
	}
}
