package s3_test

import (
	"net/http"
	"testing"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/objstore/s3"
)

// TestResumePages: a list of parts comes in pages.
func TestResumePages(t *testing.T) {
	h := Harness{Store: newS3(t, &S3Server{PageSize: 2}, nil), Resumes: true}
	testResume(t, &harness{Harness: h, ctx: t.Context()})
}

// TestDeleteVersionRaces: a version that another request stores, or deletes, between the two requests.
func TestDeleteVersionRaces(t *testing.T) {
	for _, c := range []struct {
		name    string
		between func(srv *S3Server, w http.ResponseWriter) (answered bool)
		want    objstore.Kind
		left    string
	}{
		{"replaced", func(srv *S3Server, _ http.ResponseWriter) bool {
			srv.Put("k", []byte("new"))
			return false
		}, objstore.KindChanged, "new"},
		{"deleted", func(srv *S3Server, _ http.ResponseWriter) bool {
			srv.Delete("k")
			return false
		}, objstore.KindOther, ""},
		{"conflict", func(_ *S3Server, w http.ResponseWriter) bool {
			WriteS3Error(w, 409, "ConditionalRequestConflict", "another request is under way")
			return true
		}, objstore.KindTransient, "old"},
	} {
		srv := &S3Server{}
		srv.Intercept = func(w http.ResponseWriter, r *http.Request) bool {
			return r.Method == http.MethodDelete && c.between(srv, w)
		}
		s := newS3(t, srv, nil)
		etag := srv.Put("k", []byte("old"))
		err := s.Delete(t.Context(), "k", etag)
		if objstore.KindOf(err) != c.want || (err == nil) != (c.name == "deleted") {
			t.Errorf("%s: %v", c.name, err)
		}
		o, _ := s.Stat(t.Context(), "k")
		if o.Size != int64(len(c.left)) {
			t.Errorf("%s: %d bytes are left", c.name, o.Size)
		}
	}
	// A store that ignores If-Match.
	h := Harness{Store: newS3(t, &S3Server{IgnoreIfMatch: true}, nil)}
	testDeleteVersion(t, &harness{Harness: h, ctx: t.Context()})
}

// TestCopyFailsLate: an answer that began with status 200 and tells of an error is no copy.
func TestCopyFailsLate(t *testing.T) {
	failed := 0
	srv := &S3Server{Intercept: func(w http.ResponseWriter, r *http.Request) bool {
		if !isCopy(r) || failed == 2 {
			return false
		}
		failed++
		WriteS3Error(w, 200, "InternalError", "We encountered an internal error. Please try again.")
		return true
	}}
	s := newS3(t, srv, nil)
	etag := srv.Put("k", []byte("data"))
	from := objstore.Object{Key: "k", Size: 4, ETag: etag}
	srv.Put("to", []byte("DATA"))
	_, err := s.Copy(t.Context(), from, "to")
	wantKind(t, "a copy that failed late", err, objstore.KindTransient)
	o, err := objstore.Retry(s, quick).Copy(t.Context(), from, "to")
	if err != nil || o.ETag != etag || failed != 2 {
		t.Errorf("%+v, %v, after %d failures", o, err, failed)
	}
}

// TestWeakCopies: copies and deletions of versions of a store without ETags go by size and time.
func TestWeakCopies(t *testing.T) {
	srv := &S3Server{NoETag: true}
	s := newS3(t, srv, func(cfg *s3.Config) { cfg.Store.WeakETag = true })
	srv.Put("k", []byte("data"))
	o, err := s.Stat(t.Context(), "k")
	must(t, err)
	_, err = s.Copy(t.Context(), o, "to")
	must(t, err)
	srv.Put("k", []byte("longer data"))
	_, err = s.Copy(t.Context(), o, "to")
	wantKind(t, "Copy", err, objstore.KindChanged)
	wantKind(t, "Delete", s.Delete(t.Context(), "k", o.ETag), objstore.KindChanged)
	o, err = s.Stat(t.Context(), "k")
	must(t, err)
	must(t, s.Delete(t.Context(), "k", o.ETag))
}
