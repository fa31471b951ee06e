package objstore_test

import (
	"math"
	"strings"
	"testing"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/objstore/objstoretest"
)

// TestRequestsAreCounted: as many as the server has had, of each kind, pages and all.
func TestRequestsAreCounted(t *testing.T) {
	srv := &objstoretest.S3Server{PageSize: 2, Versioned: true}
	s := newS3(t, srv, nil)
	etag := srv.Put("a", []byte("0123456789"))
	for _, k := range []string{"b", "c", "d", "e"} {
		srv.Put(k, []byte(k))
	}
	o := objstore.Object{Key: "a", Size: 10, ETag: etag}
	p := make([]byte, 4)
	must(t, s.ReadAt(t.Context(), o, p, 3))
	must(t, s.ReadSpans(t.Context(), o, []objstore.Span{{Off: 0, P: p[:1]}, {Off: 5, P: p[1:2]}}))
	_ = s.ReadAt(t.Context(), objstore.Object{Key: "a", Size: 10, ETag: "odd tag"}, p, 0) // by minio-go, and its versions are listed
	_, err := s.Stat(t.Context(), "a")
	must(t, err)
	if n := len(collect(t, s.List(t.Context(), ""))); n != 5 {
		t.Fatalf("%d listed", n)
	}
	_, err = s.PutNew(t.Context(), "new", []byte("xyz"))
	must(t, err)
	u, err := s.Upload(t.Context(), "up", 6<<20, 6<<20)
	must(t, err)
	must(t, u.Part(t.Context(), 0, make([]byte, 6<<20)))
	_, err = u.Complete(t.Context()) // and asks for the object
	must(t, err)
	must(t, s.Delete(t.Context(), "new"))
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
	if r := objstore.RequestsOf(objstoretest.NewMem()); r != (objstore.Requests{}) {
		t.Errorf("memory: %+v", r)
	}
}

func TestPrices(t *testing.T) {
	r := objstore.Requests{Get: 1_000_000, Head: 1000, List: 2000, Put: 500, Delete: 9999, Received: 10e9, Sent: 1e9}
	for text, want := range map[string]float64{
		"get=0.0004/1000,list=0.005/1000,gb=0.09,currency=USD": 0.4 + 0.0004 + 0.01 + 0.0025 + 0.9,
		"gb=0.09":                       0.9,
		" gib = 0.09 , currency = EUR ": 0.09 * 10e9 / (1 << 30),
		"get=1e-6,head=0,put=0,list=1":  1 + 2000,
		"get=0":                         0,
		"":                              0,
	} {
		p, err := objstore.ParsePrices(text)
		if err != nil || math.Abs(p.Of(r)-want) > 1e-9 || p.IsZero() != (text == "") {
			t.Errorf("%q: %+v costs %v, want %v; %v", text, p, p.Of(r), want, err)
		}
		if strings.Contains(text, "EUR") != (p.Currency == "EUR") {
			t.Errorf("%q: currency %q", text, p.Currency)
		}
	}
	for text, want := range map[string]string{
		"get": "is no price", "fetch=1": "the keys are", "get=x": "not a number", "get=1/0": "0 or more", "get=-1": "0 or more", "get=NaN": "0 or more", "get=Inf": "0 or more",
		"get=1,get=2": "twice", "gb=1,gib=1": "twice", "currency=USD": "no price is given", "get=1,currency=": "no currency", "get=1,currency=a b": "no currency", ",": "is no price", "get=1/x": "not a number",
	} {
		if _, err := objstore.ParsePrices(text); err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "gb=0.09") {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
}

func FuzzParsePrices(f *testing.F) {
	for _, s := range []string{"get=0.0004/1000,list=0.005/1000,gb=0.09,currency=USD", "gib=1", "get=1/1e-300", "currency=€,put=0x1p-2", ",,", "get=1e309"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		p, err := objstore.ParsePrices(text)
		if err != nil {
			return
		}
		got := p.Of(objstore.Requests{Get: 1 << 40, Head: 1 << 40, List: 1 << 40, Put: 1 << 40, Received: 1 << 60})
		if math.IsNaN(got) || math.IsInf(got, 0) || got < 0 {
			t.Errorf("%q: %v", text, got)
		}
	})
}
