package s3api_test

import (
	"context"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/shoalfs/shoal/cache/objstore/s3"
	"github.com/shoalfs/shoal/s3api"
)

// recorded answers each request itself.
type recorded struct{ got []s3.Request }

func (o *recorded) Forward(_ context.Context, r s3.Request) (*http.Response, error) {
	o.got = append(o.got, r)
	return &http.Response{StatusCode: 200, Header: http.Header{"Access-Control-Allow-Origin": {"*"}},
		Body: http.NoBody}, nil
}

// What the checks have seen is what the origin gets: one source of a copy, nothing that an origin, which keeps objects
// in folders, may take for the bucket or a place outside it, and no leave for web pages to read.
func TestNoWayAround(t *testing.T) {
	dir := t.TempDir()
	must(t, os.WriteFile(filepath.Join(dir, "held"), []byte("x"), 0o600))
	e := open(t, dir, filepath.Join(t.TempDir(), "cache"), "")
	origin := &recorded{}
	s := serveLimited(t, nil, s3api.Limits{Connections: 8}, e, origin, bucket)
	const inChunks = "16\r\n<Delete><Object><Key>.\r\n25\r\n./secret/x</Key></Object></Delete>\r\n0\r\n\r\n"
	list := func(object string) string { return "<Delete><Object>" + object + "</Object></Delete>" }
	for _, c := range []struct {
		method, path string
		header       http.Header
		body         string
	}{
		{"PUT", "/photos/train/x", http.Header{"X-Amz-Copy-Source": {"/photos/a", "/secret/x"}}, ""},
		{"PUT", "/photos/train/x", http.Header{"X-Amz-Copy-Source": {"", "/secret/x"}}, ""},
		{"PUT", "/photos/train/x", http.Header{"X-Amz-Copy-Source": {"/photos/a?versionId=../../secret/x"}}, ""},
		{"PUT", "/photos/train/x", http.Header{"X-Amz-Copy-Source": {"/photos/versionId=a?versionId=../x"}}, ""},
		{"PUT", "/photos//?policy=", nil, ""},
		{"DELETE", "/photos//", nil, ""},
		{"DELETE", "/photos/train/x?uploadId=../../../../secret", nil, ""},
		{"GET", "/photos/train/x?versionId=1&versionId=..%2Fx", nil, ""},
		{"POST", "/photos?delete=", nil, list("<Key>../secret/x</Key>")},
		{"POST", "/photos?delete=", nil, list("<Key>train/x</Key></Object><Object><Key>train/../../secret/x</Key>")},
		{"POST", "/photos?delete=", nil, list("<Key>train/x</Key><VersionId>../../secret/x</VersionId>")},
		{"POST", "/photos?delete=", nil, list("<Key>../secret/x</Key><Key>train/x</Key>")},
		{"POST", "/photos?delete=", http.Header{"X-Amz-Content-Sha256": {"STREAMING-UNSIGNED-PAYLOAD-TRAILER"}},
			inChunks},
		{"POST", "/photos?delete=", http.Header{"Content-Encoding": {"aws-chunked"}}, inChunks},
	} {
		req, err := http.NewRequestWithContext(t.Context(), c.method, s.url+c.path, strings.NewReader(c.body))
		must(t, err)
		if req.Header = c.header; c.header == nil {
			req.Header = http.Header{}
		}
		if resp, body := s.do(t, req); resp.StatusCode < 400 || len(origin.got) > 0 {
			t.Errorf("%s %s %v: HTTP %d %s", c.method, c.path, c.header, resp.StatusCode, body)
		}
		origin.got = nil
	}
	req, err := http.NewRequestWithContext(t.Context(), "GET", s.url+"/photos/none", nil)
	must(t, err)
	req.Header.Set("X-Forwarded-Host", "other.example.com")
	if resp, _ := s.do(t, req); resp.Header.Get("Access-Control-Allow-Origin") != "" {
		t.Error("a web page may read")
	}
	if len(origin.got) != 1 || origin.got[0].Header.Get("X-Forwarded-Host") != "" {
		t.Errorf("%v", origin.got)
	}
	// Whose the bucket is, the origin knows.
	for _, method := range []string{"GET", "HEAD"} {
		origin.got = nil
		s.ask(t, method, "/photos", "list-type=2", map[string]string{"X-Amz-Expected-Bucket-Owner": "1"}, nil)
		if len(origin.got) != 1 || origin.got[0].Header.Get("X-Amz-Expected-Bucket-Owner") != "1" {
			t.Errorf("%s: %v", method, origin.got)
		}
	}
}

// hanging never answers.
type hanging struct{ asked chan struct{} }

func (o hanging) Forward(ctx context.Context, _ s3.Request) (*http.Response, error) {
	o.asked <- struct{}{}
	<-ctx.Done()
	return nil, ctx.Err()
}

// A dataset leaves a server that goes on, though its origin does not answer.
func TestRemoveFromAHangingOrigin(t *testing.T) {
	_, _, e := served(t, oddKeys[:3])
	s := s3api.New(nil, s3api.Limits{Connections: 1024}, slog.New(slog.DiscardHandler))
	origin := hanging{make(chan struct{})}
	remove, err := s.Add(s3api.Served{Dataset: e, Origin: origin, Bucket: bucket, Prefix: e.Manifest().Prefix(),
		Where: "the origin"})
	must(t, err)
	l, err := s3api.Listen("127.0.0.1:0", false)
	must(t, err)
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }()
	asked := make(chan struct{})
	go func() {
		defer close(asked)
		resp, err := http.Get("http://" + l.Addr().String() + "/photos/none")
		if err == nil {
			_, _ = io.Copy(io.Discard, resp.Body)
			_ = resp.Body.Close()
		}
		http.DefaultClient.CloseIdleConnections()
	}()
	<-origin.asked
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	gone := make(chan struct{})
	go func() { remove(ctx); close(gone) }()
	select {
	case <-gone:
	case <-time.After(3 * time.Second):
		t.Error("it waits for the origin")
	}
	s.Close(ctx)
	<-asked
	must(t, <-served)
}

// forbidding lets nobody list the parts of an upload.
type forbidding struct{}

func (forbidding) Forward(_ context.Context, r s3.Request) (*http.Response, error) {
	return &http.Response{StatusCode: http.StatusForbidden, Header: http.Header{},
		Body: io.NopCloser(strings.NewReader("no " + r.Query.Get("uploadId")))}, nil
}

// What the origin refuses is the client's answer, and keeps no place.
func TestPartsThatMayNotBeListed(t *testing.T) {
	_, _, e := served(t, oddKeys[:3])
	s := serveLimited(t, nil, s3api.Limits{Connections: 1}, e, forbidding{}, bucket)
	for range 3 { // each with a connection of its own, which stays
		client := http.Client{Timeout: time.Minute, Transport: &http.Transport{}}
		defer client.CloseIdleConnections()
		resp, err := client.Get(s.url + "/photos/train/new?uploadId=mine")
		must(t, err)
		text, err := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		if resp.StatusCode != http.StatusForbidden || string(text) != "no mine" || err != nil {
			t.Errorf("HTTP %d: %q, %v", resp.StatusCode, text, err)
		}
	}
}

// unsized is an origin whose answers have no length.
type unsized struct{ coding []string }

func (o unsized) Forward(context.Context, s3.Request) (*http.Response, error) {
	return &http.Response{StatusCode: http.StatusOK, Header: http.Header{}, ContentLength: -1,
		TransferEncoding: o.coding, Body: io.NopCloser(strings.NewReader("half"))}, nil
}

// An object that ends with the origin's connection may have been cut off, which an answer of our own would hide.
func TestObjectsWithoutAnEnd(t *testing.T) {
	_, _, e := served(t, oddKeys[:3])
	for _, c := range []struct {
		path   string
		coding []string
		status int
	}{
		{"/photos/train/new", nil, 502}, {"/photos/train/new", []string{"chunked"}, 200},
		{"/photos/", nil, 200}, // XML has an end
	} {
		s := serve(t, e, unsized{c.coding}, bucket)
		if resp, text := s.ask(t, "GET", c.path, "", nil, nil); resp.StatusCode != c.status ||
			c.status == 200 && string(text) != "half" {
			t.Errorf("%v: HTTP %d: %s", c, resp.StatusCode, text)
		}
	}
}
