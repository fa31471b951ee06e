package s3_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/objstore/s3"
	"github.com/shoalfs/shoal/lab/rig/memstore"
	"github.com/shoalfs/shoal/lab/rig/synced"
)

func noPause(t *testing.T) objstore.RetryPolicy {
	return objstore.RetryPolicy{Sleep: func(context.Context, time.Duration) error { t.Error("a pause"); return nil }}
}

// TestPinnedVersions: what was listed stays readable in a versioned bucket, whatever is put over it, by one
// listing a key; nothing is listed while nothing changed.
func TestPinnedVersions(t *testing.T) {
	for _, c := range []struct {
		name   string
		ignore bool // a server that does not know If-Match
	}{{"If-Match", false}, {"a server without If-Match", true}} {
		t.Run(c.name, func(t *testing.T) {
			var listings atomic.Int64
			srv := &S3Server{Versioned: true, IgnoreIfMatch: c.ignore, AccessKey: "key-id"}
			srv.Intercept = func(_ http.ResponseWriter, r *http.Request) bool {
				if err := verifyV4(r, "hush-secret"); err != nil {
					t.Error(err)
				}
				if r.URL.Query().Has("versions") {
					listings.Add(1)
				}
				return false
			}
			var log synced.Buffer
			s := newS3(t, srv, func(cfg *s3.Config) { cfg.Logger = slog.New(slog.NewTextHandler(&log, nil)) })
			r := objstore.Retry(objstore.Limit(s, 8), noPause(t))
			var objects []objstore.Object
			for i := range 20 {
				key := fmt.Sprintf("dir/o %02d", i)
				objects = append(objects,
					objstore.Object{Key: key, Size: 100, ETag: srv.Put(key, bytes.Repeat([]byte{byte(i + 1)}, 100))})
				srv.Put(key+"x", []byte("another key that begins with it"))
			}
			readAll := func() {
				t.Helper()
				var wg sync.WaitGroup
				for i, o := range objects {
					for off := range int64(4) {
						wg.Go(func() {
							p := make([]byte, 25)
							if err := r.ReadAt(t.Context(), o, p, 25*off); err != nil || p[7] != byte(i+1) {
								t.Errorf("%s at %d: %v", o.Key, 25*off, err)
							}
						})
					}
				}
				wg.Wait()
			}
			readAll()
			if listings.Load() != 0 || log.String() != "" {
				t.Errorf("%d listings of what did not change: %s", listings.Load(), log.String())
			}
			for i, o := range objects {
				srv.Put(o.Key, make([]byte, 100))
				switch i % 3 {
				case 1:
					srv.Put(o.Key, []byte("shorter"))
				case 2:
					srv.Delete(o.Key)
				}
			}
			readAll()
			readAll()
			if n := listings.Load(); n != 20 {
				t.Errorf("%d listings for 20 keys", n)
			}
			if n := strings.Count(log.String(), "\n"); n == 0 || n > 3 ||
				!strings.Contains(log.String(), "shoal refresh") {
				t.Errorf("%d lines: %s", n, log.String())
			}
			// What the listing of now says is read as it is now.
			for _, o := range memstore.Collect(t, r.List(t.Context(), "dir/o 01", "")) {
				must(t, r.ReadAt(t.Context(), o, make([]byte, o.Size), 0))
			}
			// An old version that is deleted for good is a changed object.
			for _, o := range objects[:3] {
				srv.Purge(o.Key)
				before := listings.Load()
				for range 3 {
					_ = r.ReadAt(t.Context(), o, make([]byte, 25), 25)
				}
				if n := listings.Load() - before; n > 1 {
					t.Errorf("%d listings for reads of what is gone", n)
				}
				if err := r.ReadAt(t.Context(), o, make([]byte, 25), 0); objstore.KindOf(err) != objstore.KindChanged &&
					objstore.KindOf(err) != objstore.KindNotFound {
					t.Errorf("purged %s: %v", o.Key, err)
				}
			}
		})
	}
}

// TestVersionsThatCannotBeHad: a bucket that is not versioned, a user who may not list, and one who may not
// read versions, servers that refuse or do not know these requests, and --object-versions=off: as before, without
// a listing a read, and at once.
func TestVersionsThatCannotBeHad(t *testing.T) {
	for _, c := range []struct {
		name          string
		versioned     bool
		list, get     string // the error's code
		off           bool
		most          int64 // listings for ten objects
		log, inRemedy string
	}{
		{name: "not versioned", most: 1},
		{name: "listing denied", versioned: true, list: "AccessDenied", most: 1, log: "s3:ListBucketVersions"},
		{name: "not implemented", versioned: true, list: "NotImplemented", most: 1, log: "cannot be listed"},
		{name: "answered as a listing of objects", versioned: true,
			list: "<ListBucketResult><IsTruncated>true</IsTruncated><Contents><Key>k0</Key></Contents></ListBucketResult>", most: 1, log: "does not list versions"},
		{name: "answered with a page", versioned: true,
			list: "<!doctype html><html><head><title>It works!</title></head></html>", most: 1,
			log: "does not list versions"},
		{name: "answered with nothing", versioned: true, list: " ", most: 1, log: "does not list versions"},
		{name: "versionId ignored", versioned: true, get: "ignored", most: 10},
		{name: "reading denied", versioned: true, get: "AccessDenied", most: 1, inRemedy: "s3:GetObjectVersion"},
		{name: "off", versioned: true, off: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			var listings atomic.Int64
			srv := &S3Server{Versioned: c.versioned}
			srv.Intercept = func(w http.ResponseWriter, r *http.Request) bool {
				q := r.URL.Query()
				code := ""
				if q.Has("versions") {
					listings.Add(1)
					code = c.list
				} else if q.Has("versionId") {
					code = c.get
				}
				switch code {
				case "":
					return false
				case "ignored":
					r.URL.RawQuery = ""
					return false
				case "AccessDenied":
					WriteS3Error(w, 403, code, "no")
				case "NotImplemented":
					WriteS3Error(w, 501, code, "no")
				default:
					fmt.Fprint(w, code)
				}
				return true
			}
			var log synced.Buffer
			s := newS3(t, srv, func(cfg *s3.Config) {
				cfg.Logger, cfg.Store.CurrentOnly = slog.New(slog.NewTextHandler(&log, nil)), c.off
			})
			r := objstore.Retry(s, noPause(t))
			for i := range 10 {
				key := fmt.Sprint("k", i)
				o := objstore.Object{Key: key, Size: 3, ETag: srv.Put(key, []byte("one"))}
				srv.Put(key, []byte("two"))
				err := r.ReadAt(t.Context(), o, make([]byte, 3), 0)
				if objstore.KindOf(err) != objstore.KindChanged || !strings.Contains(err.Error(), "shoal refresh") {
					t.Errorf("%s: %v", key, err)
				}
				if c.inRemedy != "" && i == 0 && !strings.Contains(err.Error(), c.inRemedy) {
					t.Errorf("%q is not in: %v", c.inRemedy, err)
				}
			}
			if n := listings.Load(); n > c.most {
				t.Errorf("%d listings", n)
			}
			if text := log.String(); c.log != "" && !strings.Contains(text, c.log) {
				t.Errorf("the log says %q", text)
			}
		})
	}
}

// TestWeakVersions: without ETags the version is found by size and time.
func TestWeakVersions(t *testing.T) {
	srv := &S3Server{Versioned: true, NoETag: true}
	s := newS3(t, srv, func(cfg *s3.Config) { cfg.Store.WeakETag = true })
	r := objstore.Retry(s, noPause(t))
	at := time.Now().Add(-time.Hour)
	srv.PutAt("k", []byte("one"), at)
	listed := memstore.Collect(t, r.List(t.Context(), "", ""))
	srv.PutAt("k", []byte("two"), at.Add(2*time.Second))
	srv.Delete("k")
	p := make([]byte, 3)
	if err := r.ReadAt(t.Context(), listed[0], p, 0); err != nil || string(p) != "one" {
		t.Errorf("%q, %v", p, err)
	}
}

// TestVersionsWhileTheStoreStumbles: a listing of versions that fails for a while is no changed object.
func TestVersionsWhileTheStoreStumbles(t *testing.T) {
	var asked atomic.Int64
	srv := &S3Server{Versioned: true}
	srv.Intercept = func(w http.ResponseWriter, r *http.Request) bool {
		if r.URL.Query().Has("versions") && asked.Add(1) < 3 {
			WriteS3Error(w, 503, "SlowDown", "later")
			return true
		}
		return false
	}
	s := newS3(t, srv, nil)
	o := objstore.Object{Key: "k", Size: 3, ETag: srv.Put("k", []byte("one"))}
	srv.Put("k", []byte("two"))
	p := make([]byte, 3)
	r := objstore.Retry(s, objstore.RetryPolicy{Sleep: func(context.Context, time.Duration) error { return nil }})
	if err := r.ReadAt(t.Context(), o, p, 0); err != nil || string(p) != "one" {
		t.Errorf("%q, %v", p, err)
	}
}
