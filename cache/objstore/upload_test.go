package objstore_test

import (
	"bytes"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/lab/rig/memstore"
)

var quick = objstore.RetryPolicy{Base: 1, Cap: 1}

// TestRetryLostAnswers: what a request has done whose answer was lost is found out.
func TestRetryLostAnswers(t *testing.T) {
	m := memstore.New()
	f := Fault(t, m, "* * 1 lost\nput new 1-2 lost\nput part 3 lost\nput part 4 lost\ndelete copied 1 lost")
	stack := objstore.Retry(f, quick)
	o, err := stack.PutNew(t.Context(), "new", []byte("mine"))
	if err != nil || o.Size != 4 {
		t.Errorf("PutNew whose answer was lost: %+v, %v", o, err)
	}
	if _, err := stack.PutNew(t.Context(), "new", []byte("mine")); objstore.KindOf(err) != objstore.KindExists {
		t.Errorf("PutNew of a key that is there: %v", err)
	}
	const partSize = 5 << 20
	data := make([]byte, partSize+1<<20)
	_, _ = rand.NewChaCha8([32]byte{}).Read(data) // no two parts are equal
	u, err := stack.Upload(t.Context(), "part", int64(len(data)), partSize)
	must(t, err)
	must(t, u.Part(t.Context(), 0, data[:partSize]))
	must(t, u.Part(t.Context(), 1, data[partSize:]))
	o, err = u.Complete(t.Context())
	p := make([]byte, len(data))
	if err != nil || stack.ReadAt(t.Context(), o, p, 0) != nil || !bytes.Equal(p, data) {
		t.Errorf("upload: %+v, %v", o, err)
	}
	o, err = stack.Copy(t.Context(), o, "copied")
	if err != nil || o.Key != "copied" {
		t.Errorf("Copy whose answer was lost: %+v, %v", o, err)
	}
	for range 2 {
		must(t, stack.Delete(t.Context(), "copied", o.ETag))
	}
	must(t, stack.Delete(t.Context(), "new", ""))
	for i, n := range f.Hits() {
		if n == 0 {
			t.Errorf("rule %d never acted", i+1)
		}
	}
	// Somebody else's object, stored between two tries, is not ours.
	m.PutBytes("other", []byte("them"))
	stack = objstore.Retry(Fault(t, m, "put other 1 503"), quick)
	if _, err := stack.PutNew(t.Context(), "other", []byte("mine")); objstore.KindOf(err) != objstore.KindExists {
		t.Errorf("PutNew beside another writer: %v", err)
	}
}

// TestRetryNotExists: KindExists is final.
func TestRetryNotExists(t *testing.T) {
	m := memstore.New()
	m.PutBytes("k", []byte("x"))
	meter := objstore.NewMeter(m)
	stack := objstore.Retry(meter, quick)
	if _, err := stack.PutNew(t.Context(), "k", []byte("x")); objstore.KindOf(err) != objstore.KindExists {
		t.Errorf("PutNew: %v", err)
	}
	if s := meter.Stats(); s.Puts != 1 || s.Errors["exists already"] != 1 || stack.Stats().Retries != 0 {
		t.Errorf("%+v, %+v: want one try", s, stack.Stats())
	}
}

// readOnly hides all but Reader.
type readOnly struct{ objstore.Reader }

// TestReadSpans: spans of a store that reads one range at a time are read one by one.
func TestReadSpans(t *testing.T) {
	m := memstore.New()
	o := m.PutBytes("k", []byte("0123456789"))
	a, b := make([]byte, 2), make([]byte, 3)
	if err := objstore.ReadSpans(t.Context(), readOnly{m}, o, []objstore.Span{{Off: 1, P: a}, {Off: 7, P: b}}); err !=
		nil || string(a)+string(b) != "12789" {
		t.Errorf("spans %q %q, %v", a, b, err)
	}
	if err := objstore.ReadSpans(t.Context(), readOnly{m}, o,
		[]objstore.Span{{Off: 8, P: make([]byte, 3)}}); objstore.KindOf(err) != objstore.KindInvalid {
		t.Errorf("ReadSpans past the end: %v", err)
	}
}

// TestMeterSpansAndUploads: a read of spans is one read of all that came, gaps included.
func TestMeterSpansAndUploads(t *testing.T) {
	m := memstore.New()
	o := m.PutBytes("k", make([]byte, 1000))
	meter := objstore.NewMeter(Fault(t, m, "read k 2 503\nput up 2 503\nput new 2 503"))
	spans := []objstore.Span{{Off: 100, P: make([]byte, 10)}, {Off: 500, P: make([]byte, 100)}}
	for range 3 {
		_ = meter.ReadSpans(t.Context(), o, spans)
	}
	must(t, meter.ReadSpans(t.Context(), o, nil))
	s := meter.Stats()
	if s.Reads != 3 || s.Bytes != 2*500 || s.Errors["temporary failure"] != 1 {
		t.Errorf("after reads: %+v", s)
	}
	_, _ = meter.PutNew(t.Context(), "new", make([]byte, 30))
	_, _ = meter.PutNew(t.Context(), "new2", make([]byte, 3))
	u, err := meter.Upload(t.Context(), "up", 10, 10)
	must(t, err)
	if u.Part(t.Context(), 0, make([]byte, 10)) == nil {
		t.Error("the fault did not strike")
	}
	must(t, u.Part(t.Context(), 0, make([]byte, 10)))
	_, err = u.Complete(t.Context())
	must(t, err)
	must(t, u.Abort(t.Context()))
	must(t, meter.Delete(t.Context(), "up", ""))
	_, err = objstore.AbortUploads(t.Context(), meter, "")
	must(t, err)
	s = meter.Stats()
	if s.Puts != 4 || s.Written != 30+3+10 || s.Others != 5 || s.InFlight != 0 || s.Errors["temporary failure"] != 2 {
		t.Errorf("after uploads: %+v", s)
	}
}

// TestFaultSpans: each fault of a read strikes a read of spans.
func TestFaultSpans(t *testing.T) {
	m := memstore.New()
	o := m.PutBytes("k", []byte("0123456789"))
	f := Fault(t, m, "read k 1 flip\nread k 2 truncate\nread k 3 lost\nread k 4 changed")
	read := func() (string, error) {
		a, b := make([]byte, 2), make([]byte, 3)
		err := f.ReadSpans(t.Context(), o, []objstore.Span{{Off: 1, P: a}, {Off: 7, P: b}})
		return string(a) + string(b), err
	}
	if got, err := read(); err != nil || got == "12789" || len(got) != 5 {
		t.Errorf("flip: %q, %v", got, err)
	}
	for _, want := range []objstore.Kind{objstore.KindTransient, objstore.KindTransient, objstore.KindChanged} {
		if _, err := read(); objstore.KindOf(err) != want {
			t.Errorf("error %v, want %v", err, want)
		}
	}
	if got, err := read(); err != nil || got != "12789" {
		t.Errorf("after all: %q, %v", got, err)
	}
}

// TestDirUpload: what is left in the folder at each moment.
func TestDirUpload(t *testing.T) {
	d, root := newDir(t)
	names := func() (out []string) {
		must(t, filepath.WalkDir(root, func(path string, e os.DirEntry, err error) error {
			if err == nil && !e.IsDir() {
				out = append(out, e.Name())
			}
			return err
		}))
		return out
	}
	long := strings.Repeat("n", 255)
	for _, key := range []string{"a/b/x.tar", long} {
		u, err := d.Upload(t.Context(), key, 10, 10)
		must(t, err)
		must(t, u.Part(t.Context(), 0, make([]byte, 10)))
		if got := names(); len(got) != 1 || !strings.HasPrefix(got[0], ".shoal-put-") {
			t.Errorf("during an upload: %q", got)
		}
		if got := keysOf(memstore.Collect(t, d.List(t.Context(), "", ""))); len(got) != 0 && got[0] != "a/b/" {
			t.Errorf("a listing shows %q", got)
		}
		_, err = u.Complete(t.Context())
		must(t, err)
		if got := names(); !slices.Equal(got, []string{filepath.Base(key)}) {
			t.Errorf("after Complete: %q", got)
		}
		if _, err := d.PutNew(t.Context(), key, []byte("x")); objstore.KindOf(err) != objstore.KindExists ||
			len(names()) != 1 {
			t.Errorf("PutNew: %v, and %q is left", err, names())
		}
		must(t, d.Delete(t.Context(), key, ""))
	}
	// A folder becomes a file when no file is below it.
	_, err := d.PutNew(t.Context(), "a/b/x.tar", nil)
	must(t, err)
	for _, can := range []bool{false, true} {
		u, err := d.Upload(t.Context(), "a", 1, 1)
		must(t, err)
		must(t, u.Part(t.Context(), 0, []byte("x")))
		if _, err := u.Complete(t.Context()); (err == nil) != can {
			t.Errorf("of a folder %t: %v", can, err)
		}
		must(t, d.Delete(t.Context(), "a/b/x.tar", ""))
	}
	must(t, d.Delete(t.Context(), "a", ""))
	// Those of a process that has died, of today and of older versions.
	must(t, os.WriteFile(root+"/.shoal-put-123", nil, 0o644))
	_, err = d.Upload(t.Context(), "a/b/"+long, 1, 1)
	must(t, err)
	for _, c := range []struct {
		prefix string
		want   int
	}{{"a/b/m", 0}, {"a/b/nnm", 0}, {"a/b/nn", 1}, {"a", 0}, {"", 1}} {
		if n, err := objstore.AbortUploads(t.Context(), d, c.prefix); n != c.want || err != nil {
			t.Errorf("AbortUploads(%.20q) = %d, %v, want %d", c.prefix, n, err, c.want)
		}
	}
	// Nothing but unfinished uploads is aborted.
	must(t, os.WriteFile(root+"/f", nil, 0o644))
	for _, id := range []string{"f", "../" + filepath.Base(root) + "/f", "", ".shoal-put-1/../f"} {
		must(t, d.AbortUpload(t.Context(), "f", id))
	}
	must(t, os.Remove(root+"/f"))
	if got := names(); len(got) != 0 {
		t.Errorf("%q is left", got)
	}
	for _, key := range []string{"../x", "a//b", ".shoal-put-x", ""} {
		if _, err := d.PutNew(t.Context(), key, nil); objstore.KindOf(err) != objstore.KindInvalid {
			t.Errorf("PutNew(%q): %v", key, err)
		}
		if _, err := d.Upload(t.Context(), key, 1, 1); objstore.KindOf(err) != objstore.KindInvalid {
			t.Errorf("Upload(%q): %v", key, err)
		}
		if _, err := d.Copy(t.Context(), objstore.Object{Key: "x"}, key); objstore.KindOf(err) != objstore.KindInvalid {
			t.Errorf("Copy to %q: %v", key, err)
		}
	}
}

// What is put replaces folders that removals have left, and none with a file.
func TestDirOverFolders(t *testing.T) {
	d, root := newDir(t)
	put := func(key string) error {
		u, err := d.Upload(t.Context(), key, 1, 1)
		must(t, err)
		must(t, u.Part(t.Context(), 0, []byte("x")))
		_, err = u.Complete(t.Context())
		return err
	}
	must(t, put("a/c/d"))
	must(t, os.MkdirAll(root+"/a/b/empty", 0o700))
	over := put("a")
	if _, err := os.Stat(root + "/a/b/empty"); over == nil || err != nil {
		t.Errorf("a file took the place of another one below it, or of a folder beside that: %v", err)
	}
	must(t, d.Delete(t.Context(), "a/c/d", ""))
	must(t, put("a"))
	o, err := d.Stat(t.Context(), "a")
	must(t, err)
	must(t, os.Mkdir(root+"/e", 0o700))
	if _, err := d.Copy(t.Context(), o, "e"); err != nil {
		t.Error(err)
	}
}
