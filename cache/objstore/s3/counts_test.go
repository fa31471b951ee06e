package s3_test

import (
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/lab/rig/memstore"
)

// TestRequestsAreCounted: as many as the server has had, of each kind, pages and all.
func TestRequestsAreCounted(t *testing.T) {
	srv := &S3Server{PageSize: 2, Versioned: true}
	s := newS3(t, srv, nil)
	etag := srv.Put("a", []byte("0123456789"))
	for _, k := range []string{"b", "c", "d", "e"} {
		srv.Put(k, []byte(k))
	}
	o := objstore.Object{Key: "a", Size: 10, ETag: etag}
	p := make([]byte, 4)
	must(t, s.ReadAt(t.Context(), o, p, 3))
	must(t, s.ReadSpans(t.Context(), o, []objstore.Span{{Off: 0, P: p[:1]}, {Off: 5, P: p[1:2]}}))
	// by minio-go, and its versions are listed
	_ = s.ReadAt(t.Context(), objstore.Object{Key: "a", Size: 10, ETag: "odd tag"}, p, 0)
	_, err := s.Stat(t.Context(), "a")
	must(t, err)
	if n := len(memstore.Collect(t, s.List(t.Context(), "", ""))); n != 5 {
		t.Fatalf("%d listed", n)
	}
	_, err = s.PutNew(t.Context(), "new", []byte("xyz"))
	must(t, err)
	u, err := s.Upload(t.Context(), "up", 6<<20, 6<<20)
	must(t, err)
	must(t, u.Part(t.Context(), 0, make([]byte, 6<<20)))
	_, err = u.Complete(t.Context()) // and asks for the object
	must(t, err)
	must(t, s.Delete(t.Context(), "new", ""))
	got := objstore.RequestsOf(s)
	if got.Sent < 6<<20+3 || got.Sent > 6<<20+2000 { // the list of parts is a body too
		t.Errorf("%d bytes sent", got.Sent)
	}
	got.Sent = 0
	if want := (objstore.Requests{Get: 3, Head: 2, List: 4, Put: 4, Delete: 1, Received: 10}); got != want {
		t.Errorf("%+v\nwant %+v", got, want)
	}
	if n := int64(srv.Requests("GET")); n != got.Get+got.List {
		t.Errorf("the server had %d GETs", n)
	}
	if n := srv.Requests("PUT") + srv.Requests("POST"); n != 4 {
		t.Errorf("the server had %d PUTs and POSTs", n)
	}
}

// TestSecondTriesAreCounted: a request that is sent again, by the store's time, is two, whoever sends it.
func TestSecondTriesAreCounted(t *testing.T) {
	for _, etag := range []string{"plain", "odd tag"} { // the second by minio-go
		var refused atomic.Bool
		srv := &S3Server{Intercept: func(w http.ResponseWriter, r *http.Request) bool {
			if refused.Swap(true) {
				return false
			}
			w.Header().Set("Date", time.Now().Add(time.Hour).UTC().Format(http.TimeFormat))
			WriteS3Error(w, http.StatusForbidden, "RequestTimeTooSkewed", "")
			return true
		}}
		s := newS3(t, srv, nil)
		_ = s.ReadAt(t.Context(), objstore.Object{Key: "a", Size: 10, ETag: etag}, make([]byte, 4), 3) // it has none
		if got, n := s.Requests(), srv.Requests("GET"); got.Get != 2 || int64(n) != got.Get+got.List {
			t.Errorf("%s: %+v, and the server had %d GETs", etag, got, n)
		}
	}
}
