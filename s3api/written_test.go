package s3api_test

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/minio/minio-go/v7"

	"github.com/shoalfs/shoal/lab/rig/etcd"
	"github.com/shoalfs/shoal/lab/rig/s3server"
	"github.com/shoalfs/shoal/prefetch/engine"
	"github.com/shoalfs/shoal/s3api"
)

// Each write leaves the saved listing stale: one after a refresh that no read came after, one during a refresh, and
// one through another dataset of the bucket.
func TestWritesOutliveARefresh(t *testing.T) {
	srv, err := s3server.Start(context.Background(), s3server.Options{Dir: t.TempDir()})
	must(t, err)
	t.Cleanup(srv.Stop)
	client, err := s3server.Client(srv.URL, 2)
	must(t, err)
	must(t, client.MakeBucket(t.Context(), bucket, minio.MakeBucketOptions{}))
	_, err = client.PutObject(t.Context(), bucket, "train/1.jpg", strings.NewReader("the first"), 9,
		minio.PutObjectOptions{})
	must(t, err)
	dir := filepath.Join(t.TempDir(), "cache")
	put := func(s side, text string) {
		t.Helper()
		if resp, body := s.ask(t, "PUT", "/photos/train/1.jpg", "", nil, []byte(text)); resp.StatusCode !=
			http.StatusOK {
			t.Fatalf("HTTP %d: %s", resp.StatusCode, body)
		}
	}
	life := func(source string, then func(e *engine.Engine, origin s3api.Origin, s side)) (text string) {
		t.Run(source, func(t *testing.T) {
			e := open(t, source, dir, srv.URL)
			origin, _ := e.Origin()
			s := serve(t, e, origin, bucket)
			_, body := s.ask(t, "GET", "/photos/train/1.jpg", "", nil, nil)
			text = string(body)
			if then != nil {
				then(e, origin, s)
			}
		})
		return text
	}
	life("s3://photos/train", func(e *engine.Engine, _ s3api.Origin, s side) {
		put(s, "the second")
		if _, err := e.Refresh(t.Context()); err != nil {
			t.Error(err)
		}
		put(s, "the third")
	})
	if got := life("s3://photos/train", nil); got != "the third" {
		t.Errorf("after a write that followed a refresh: %q", got)
	}
	life("s3://photos/train", func(e *engine.Engine, _ s3api.Origin, s side) {
		put(s, "4th")
		done := make(chan struct{})
		go func() { defer close(done); _, _ = e.Refresh(context.Background()) }()
		for range 20 {
			put(s, "5th is this one")
			select {
			case <-done:
				return
			default:
			}
		}
		<-done
	})
	if got := life("s3://photos/train", nil); got != "5th is this one" {
		t.Errorf("after a write during a refresh: %q", got)
	}
	life("s3://photos", func(_ *engine.Engine, _ s3api.Origin, s side) { put(s, "by way of the bucket") })
	if got := life("s3://photos/train", nil); got != "by way of the bucket" {
		t.Errorf("after a write through the bucket: %q", got)
	}
}

// A key that is written at one endpoint is written at all of the process, and for datasets that come later.
func TestWritesAreSeenElsewhere(t *testing.T) {
	_, shoal, e := served(t, oddKeys[:3])
	origin, _ := e.Origin()
	other := serve(t, e, origin, bucket)
	const path = "/photos/train/a/1"
	read := func(s side) string {
		_, body := s.ask(t, "GET", path, "", nil, nil)
		return string(body)
	}
	if got := read(other); got != "the content of train/a/1" {
		t.Fatal(got)
	}
	if resp, body := shoal.ask(t, "PUT", path, "", nil, []byte("new")); resp.StatusCode != http.StatusOK {
		t.Fatalf("HTTP %d: %s", resp.StatusCode, body)
	}
	if got := read(other); got != "new" {
		t.Errorf("the other endpoint: %q", got)
	}
	if got := read(serve(t, e, origin, bucket)); got != "new" {
		t.Errorf("a later one: %q", got)
	}
}

// Another node's listing that began before a write, and reaches this one after it, does not bring the old bytes back:
// not at once, and not after a kill.
func TestWritesOutliveAListOfTheCluster(t *testing.T) {
	if _, err := etcd.FindBinary(); err != nil {
		t.Skip(err)
	}
	cluster, err := etcd.Start(t.Context(), false)
	must(t, err)
	t.Cleanup(cluster.Close)
	srv, err := s3server.Start(context.Background(), s3server.Options{Dir: t.TempDir()})
	must(t, err)
	t.Cleanup(srv.Stop)
	client, err := s3server.Client(srv.URL, 2)
	must(t, err)
	must(t, client.MakeBucket(t.Context(), bucket, minio.MakeBucketOptions{}))
	store := func(key, text string) {
		_, err := client.PutObject(t.Context(), bucket, key, strings.NewReader(text), int64(len(text)),
			minio.PutObjectOptions{})
		must(t, err)
	}
	store("train/1.jpg", "the first")
	// The proxy between holds one level of a listing back until the test lets it go.
	to, err := url.Parse(srv.URL)
	must(t, err)
	var slow atomic.Bool
	listed, wait := make(chan struct{}), make(chan struct{})
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	through := &httputil.ReverseProxy{Transport: transport}
	// and not the name that is signed
	through.Rewrite = func(r *httputil.ProxyRequest) { r.Out.URL.Scheme, r.Out.URL.Host = to.Scheme, to.Host }
	through.ModifyResponse = func(resp *http.Response) error {
		if resp.Request.URL.Query().Get("delimiter") != "/" || !slow.CompareAndSwap(true, false) {
			return nil
		}
		text, err := io.ReadAll(resp.Body)
		resp.Body = io.NopCloser(bytes.NewReader(text))
		close(listed)
		<-wait
		return err
	}
	front := httptest.NewServer(through)
	t.Cleanup(front.Close)

	in := engine.ClusterConfig{URL: "etcd://" + cluster.Addr + "/test", Advertise: "127.0.0.1:0", Insecure: true}
	a := openIn(t, in, "s3://"+bucket+"/train", filepath.Join(t.TempDir(), "cache"), front.URL)
	b := openIn(t, in, "s3://"+bucket+"/train", filepath.Join(t.TempDir(), "cache"), front.URL)
	origin, _ := a.Origin()
	s := serve(t, a, origin, bucket)
	read := func() string {
		t.Helper()
		_, body := s.ask(t, "GET", "/photos/train/1.jpg", "", nil, nil)
		return string(body)
	}
	if got := read(); got != "the first" {
		t.Fatal(got)
	}
	store("train/2.jpg", "another")
	slow.Store(true)
	done := make(chan error, 1)
	go func() { _, err := b.Refresh(context.Background()); done <- err }()
	<-listed
	if resp, body := s.ask(t, "PUT", "/photos/train/1.jpg", "", nil, []byte("the second")); resp.StatusCode !=
		http.StatusOK {
		t.Fatalf("HTTP %d: %s", resp.StatusCode, body)
	}
	if got := read(); got != "the second" {
		t.Errorf("after the write: %q", got)
	}
	close(wait)
	must(t, <-done)
	for a.Manifest().Len() < 2 { // the other node's listing
		select {
		case <-t.Context().Done():
			t.Fatal("the other node's listing has not come")
		case <-time.After(10 * time.Millisecond):
		}
	}
	if got := read(); got != "the second" || !a.Stale() {
		t.Errorf("after the other node's listing: %q, to be listed again: %t", got, a.Stale())
	}
	if _, err := a.Refresh(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := read(); got != "the second" || a.Stale() {
		t.Errorf("after one's own: %q, to be listed again: %t", got, a.Stale())
	}
}
