package ckpt

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/minio/minio-go/v7"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/objstore/stores"
	"github.com/shoalfs/shoal/ckpt/folder"
	"github.com/shoalfs/shoal/lab/rig/s3server"
)

// Savers write, rename, write again and remove at once, while others wait and ask; the carrier is stopped and started
// again. In the end the bucket is as the folder, and nothing runs any more. It is for the race detector.
func TestCarrier(t *testing.T) {
	store, src := bucketOf(t)
	last, err := folder.LastNames()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	carry := func(then func()) {
		t.Helper()
		c, err := Open(t.Context(), Config{
			Dir: dir, Prefix: src.Prefix, Dest: src.String(), Store: store, Last: last, Delete: true,
			Drain: time.Minute, Log: slog.New(slog.DiscardHandler),
			Link: "/nowhere", Refresh: func(context.Context) error { return nil },
		})
		if err != nil {
			t.Fatal(err)
		}
		ctx, stop := context.WithCancel(t.Context())
		ready, ended := make(chan struct{}), make(chan error)
		go func() { ended <- c.Run(ctx, func() { close(ready) }) }()
		<-ready
		then()
		stop()
		if err := errors.Join(<-ended, c.Close()); err != nil {
			t.Error(err)
		}
	}
	for round := range 3 {
		carry(func() {
			var savers sync.WaitGroup
			for s := range 4 {
				savers.Go(func() {
					for i := range 6 {
						at := filepath.Join(dir, fmt.Sprintf("step-%d-%d-%d", round, s, i))
						save(t, filepath.Join(at, "small"), 1000*i)
						save(t, filepath.Join(at, "large"), 5<<20)
						save(t, filepath.Join(at, ".metadata"), 10)
						switch i % 3 {
						case 0:
							save(t, filepath.Join(at, "large"), 6<<20)
						case 1:
							if err := os.Rename(at, at+"-renamed"); err != nil {
								t.Error(err)
							}
						default:
							if err := os.RemoveAll(at); err != nil {
								t.Error(err)
							}
						}
						client, rel, err := Find(dir)
						if err == nil {
							_, err = client.Wait(t.Context(), rel, 1, i%2 == 0)
						}
						if err == nil {
							_, err = client.Status(t.Context())
						}
						if err != nil {
							t.Error(err)
						}
					}
				})
			}
			savers.Wait()
		})
	}
	want := map[string]int64{}
	err = filepath.WalkDir(dir, func(p string, e fs.DirEntry, err error) error {
		if rel, _ := filepath.Rel(dir, p); err == nil && e.Type().IsRegular() && !under(rel, folder.Home) {
			fi, err := e.Info()
			if err == nil {
				want[src.Prefix+rel] = fi.Size()
			}
			return err
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for o, err := range store.List(t.Context(), src.Prefix, "") {
		if err != nil {
			t.Fatal(err)
		}
		if size, ok := want[o.Key]; !ok || size != o.Size {
			t.Errorf("%s has %d bytes, and here %d, %v", o.Key, o.Size, size, ok)
		}
		delete(want, o.Key)
	}
	for p := range want {
		t.Errorf("%s is not in the bucket", p)
	}
	if left, err := store.Uploads(t.Context(), ""); err != nil || len(left) > 0 {
		t.Errorf("uploads are left: %v, %v", left, err)
	}
	stacks := make([]byte, 4<<20)
	for end := time.Now().Add(30 * time.Second); ; runtime.Gosched() {
		running := string(stacks[:runtime.Stack(stacks, true)])
		if !strings.Contains(running, "ckpt.(*Carrier)") && !strings.Contains(running, "ckpt/folder.") &&
			!strings.Contains(running, "ckpt.(*prefixLock)") {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("something still runs:\n%s", running)
		}
	}
}

// bucketOf returns a destination on a real server.
func bucketOf(t *testing.T) (objstore.Layer, objstore.Source) {
	t.Helper()
	at, _ := serverOf(t)
	return bucketAt(t, at, objstore.RetryPolicy{})
}

// serverOf starts a real server, and makes the bucket.
func serverOf(t *testing.T) (at string, client *minio.Client) {
	t.Helper()
	server, err := s3server.Start(t.Context(), s3server.Options{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(server.Stop)
	client, err = s3server.Client(server.URL, 4)
	if err != nil {
		t.Fatal(err)
	}
	if err := s3server.MakeBucket(t.Context(), client, "bucket"); err != nil {
		t.Fatal(err)
	}
	return server.URL, client
}

// bucketAt is the destination at a server.
func bucketAt(t *testing.T, at string, policy objstore.RetryPolicy) (objstore.Layer, objstore.Source) {
	t.Helper()
	for _, e := range s3server.Env(at) {
		name, value, _ := strings.Cut(e, "=")
		t.Setenv(name, value)
	}
	base, src, err := stores.Open(t.Context(), "s3://bucket/run", stores.Options{})
	if err != nil {
		t.Fatal(err)
	}
	return objstore.Retry(objstore.Limit(base, 32), policy), src
}

func save(t *testing.T, path string, size int) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Error(err)
	}
	if err := os.WriteFile(path, bytes.Repeat([]byte{'a'}, size), 0o644); err != nil {
		t.Error(err)
	}
}
