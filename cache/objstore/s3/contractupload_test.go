package s3_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/shoalfs/shoal/cache/objstore"
)

func testReadSpans(t *testing.T, h *harness) {
	const size = 300_001
	data := pattern(size)
	o := h.put(t, "f", data)
	check := func(cuts ...int) { // from, to, from, to ...
		t.Helper()
		var spans []objstore.Span
		var bufs [][]byte // with canaries
		for i := 0; i < len(cuts); i += 2 {
			n := cuts[i+1] - cuts[i]
			buf := bytes.Repeat([]byte{0xEE}, n+2)
			bufs, spans = append(bufs, buf), append(spans, objstore.Span{Off: int64(cuts[i]), P: buf[1 : n+1 : n+1]})
		}
		if err := h.Store.ReadSpans(h.ctx, o, spans); err != nil {
			t.Errorf("%v: %v", cuts, err)
			return
		}
		for i, buf := range bufs {
			from, to := cuts[2*i], cuts[2*i+1]
			if !bytes.Equal(buf[1:len(buf)-1], data[from:to]) || buf[0] != 0xEE || buf[len(buf)-1] != 0xEE {
				t.Errorf("%v: wrong bytes in span %d", cuts, i)
			}
		}
	}
	check()
	check(0, size)
	check(5, 6)
	check(0, 1, 1, 2, 2, 3)
	check(0, 1, size-1, size)
	check(1000, 70_000, 70_512, 140_000, 140_000, 140_001, 200_000, 300_000)
	rng := rand.New(rand.NewPCG(5, 6))
	for range 20 {
		var cuts []int
		for at := rng.IntN(1000); at < size-1 && len(cuts) < 60; {
			to := min(size, at+1+rng.IntN(20_000))
			cuts = append(cuts, at, to)
			at = to + rng.IntN(2)*rng.IntN(60_000)
		}
		check(cuts...)
	}
}

func testReadSpansInvalid(t *testing.T, h *harness) {
	o := h.put(t, "f", pattern(100))
	b := func(n int) []byte { return make([]byte, n) }
	for name, spans := range map[string][]objstore.Span{
		"empty span":      {{Off: 3, P: nil}},
		"one empty span":  {{Off: 0, P: b(5)}, {Off: 7, P: b(0)}, {Off: 9, P: b(1)}},
		"overlap":         {{Off: 0, P: b(5)}, {Off: 4, P: b(5)}},
		"the same twice":  {{Off: 5, P: b(5)}, {Off: 5, P: b(5)}},
		"descending":      {{Off: 50, P: b(5)}, {Off: 4, P: b(5)}},
		"past the end":    {{Off: 50, P: b(5)}, {Off: 99, P: b(2)}},
		"negative":        {{Off: -1, P: b(5)}},
		"far off":         {{Off: 0, P: b(5)}, {Off: 1 << 62, P: b(2)}},
		"nearly overflow": {{Off: 1<<63 - 1, P: b(2)}},
	} {
		wantKind(t, name, h.Store.ReadSpans(h.ctx, o, spans), objstore.KindInvalid)
	}
}

func testReadSpansChanged(t *testing.T, h *harness) {
	old := h.put(t, "f", pattern(100))
	spans := []objstore.Span{{Off: 0, P: make([]byte, 10)}, {Off: 90, P: make([]byte, 10)}}
	for _, size := range []int{100, 50, 200} {
		data := pattern(size)
		data[0]++
		h.put(t, "f", data)
		wantKind(t, fmt.Sprintf("spans of an object that now has %d bytes", size), h.Store.ReadSpans(h.ctx, old, spans),
			objstore.KindChanged)
	}
	h.delete(t, old.Key)
	wantKind(t, "spans of a deleted object", h.Store.ReadSpans(h.ctx, old, spans), objstore.KindNotFound)
}

// holds checks that key has data, by Stat, List and reading.
func (h *harness) holds(t *testing.T, o objstore.Object, data []byte) {
	t.Helper()
	if o.Size != int64(len(data)) || o.ETag == "" || o.ModTime.IsZero() {
		t.Errorf("stored %d bytes as %+v", len(data), o)
	}
	st, err := h.Store.Stat(h.ctx, o.Key)
	if err != nil || st.ETag != o.ETag || st.Size != o.Size {
		t.Errorf("Stat says %+v, %v; the upload said %+v", st, err, o)
	}
	p := make([]byte, o.Size)
	if err := h.Store.ReadAt(h.ctx, o, p, 0); err != nil || !bytes.Equal(p, data) {
		t.Errorf("%s: other bytes than were stored (%v)", o.Key, err)
	}
}

func testPutNew(t *testing.T, h *harness) {
	for _, size := range []int{0, 1, 100_000, 6 << 20} {
		key, data := h.Prefix+fmt.Sprintf("d/new%d", size), pattern(size)
		given := bytes.Clone(data)
		o, err := h.Store.PutNew(h.ctx, key, given)
		if err != nil {
			t.Fatalf("PutNew of %d bytes: %v", size, err)
		}
		clear(given) // it is the caller's again
		h.holds(t, o, data)
		_, err = h.Store.PutNew(h.ctx, key, []byte("another"))
		wantKind(t, "PutNew of a key that is there", err, objstore.KindExists)
		h.holds(t, o, data)
	}
	h.put(t, "d/put", []byte("by Put"))
	_, err := h.Store.PutNew(h.ctx, h.Prefix+"d/put", []byte("x"))
	wantKind(t, "PutNew of a key that Put stored", err, objstore.KindExists)
	h.delete(t, h.Prefix+"d/put")
	if _, err := h.Store.PutNew(h.ctx, h.Prefix+"d/put", []byte("x")); err != nil {
		t.Errorf("PutNew of a deleted key: %v", err)
	}
	wantKeys(t, "after PutNew", h.keys(t, h.Store.List(h.ctx, h.Prefix, "")),
		[]string{"d/new0", "d/new1", "d/new100000", "d/new6291456", "d/put"})
}

// testPutNewRace: one of several writers wins, and the stored bytes are its own.
func testPutNewRace(t *testing.T, h *harness) {
	for round := range 10 {
		key := h.Prefix + fmt.Sprintf("race%d", round)
		const writers = 8
		var won atomic.Int32
		var winner atomic.Int32
		var wg sync.WaitGroup
		for w := range writers {
			wg.Go(func() {
				_, err := h.Store.PutNew(h.ctx, key, bytes.Repeat([]byte{byte('a' + w)}, 1000+w))
				switch {
				case err == nil:
					won.Add(1)
					winner.Store(int32(w))
				case objstore.KindOf(err) != objstore.KindExists:
					t.Errorf("a writer that lost: %v", err)
				}
			})
		}
		wg.Wait()
		if won.Load() != 1 {
			t.Fatalf("%d of %d writers won", won.Load(), writers)
		}
		o, err := h.Store.Stat(h.ctx, key)
		if err != nil {
			t.Fatal(err)
		}
		w := int(winner.Load())
		h.holds(t, o, bytes.Repeat([]byte{byte('a' + w)}, 1000+w))
	}
}

func testDelete(t *testing.T, h *harness) {
	h.putAll(t, "d/a", "d/b")
	h.delete(t, h.Prefix+"d/a")
	wantKeys(t, "after Delete", h.keys(t, h.Store.List(h.ctx, h.Prefix, "")), []string{"d/b"})
	h.delete(t, h.Prefix+"d/a")
	h.delete(t, h.Prefix+"none/none")
	h.delete(t, h.Prefix+"d/b/c")
	h.delete(t, h.Prefix+"d") // a folder is no object
	wantKeys(t, "after Deletes of what is not there", h.keys(t, h.Store.List(h.ctx, h.Prefix, "")), []string{"d/b"})
}

const partSize = 5 << 20

// parts cuts data.
func parts(data []byte) [][]byte {
	var out [][]byte
	for len(data) > partSize {
		out, data = append(out, data[:partSize]), data[partSize:]
	}
	return append(out, data)
}

// randomBytes returns bytes of which no two parts are equal.
func randomBytes(n int) []byte {
	b := make([]byte, n)
	var seed [32]byte
	binary.LittleEndian.PutUint64(seed[:], uint64(n))
	_, _ = rand.NewChaCha8(seed).Read(b) // never fails
	return b
}

// uploadAll stores data under key, in parts of 5 MiB.
func uploadAll(ctx context.Context, w objstore.Uploader, key string, data []byte) (objstore.Object, error) {
	u, err := w.Upload(ctx, key, int64(len(data)), partSize)
	if err != nil {
		return objstore.Object{}, err
	}
	for n, p := range parts(data) {
		if err := u.Part(ctx, n, p); err != nil {
			return objstore.Object{}, err
		}
	}
	return u.Complete(ctx)
}

func testUpload(t *testing.T, h *harness) {
	for _, size := range []int{0, 1, 70_000, partSize, partSize + 1, 2*partSize + 12_345} {
		key, data := h.Prefix+fmt.Sprintf("up/f%d", size), randomBytes(size)
		u, err := h.Store.Upload(h.ctx, key, int64(size), partSize)
		if err != nil {
			t.Fatalf("Upload of %d bytes: %v", size, err)
		}
		ps := parts(data)
		// Backwards, all at once, and the first one twice, the wrong bytes first.
		if size > 0 {
			wrong := bytes.Clone(ps[0])
			wrong[0]++
			if err := u.Part(h.ctx, 0, wrong); err != nil {
				t.Fatal(err)
			}
		}
		var wg sync.WaitGroup
		for n := len(ps) - 1; n >= 0 && size > 0; n-- {
			given := bytes.Clone(ps[n])
			wg.Go(func() {
				if err := u.Part(h.ctx, n, given); err != nil {
					t.Errorf("part %d of %d bytes: %v", n, size, err)
				}
				clear(given)
			})
		}
		wg.Wait()
		if _, err := h.Store.Stat(h.ctx, key); objstore.KindOf(err) != objstore.KindNotFound {
			t.Errorf("%d bytes are there before Complete: %v", size, err)
		}
		wantKeys(t, "during an upload", h.keys(t, h.Store.List(h.ctx, key, "")), nil)
		o, err := u.Complete(h.ctx)
		if err != nil {
			t.Fatalf("Complete of %d bytes: %v", size, err)
		}
		h.holds(t, o, data)
		if again, err := u.Complete(h.ctx); err != nil || again.ETag != o.ETag {
			t.Errorf("Complete again: %+v, %v", again, err)
		}
		if err := u.Abort(h.ctx); err != nil {
			t.Errorf("Abort after Complete: %v", err)
		}
		h.holds(t, o, data)
		if size > 0 {
			if err := u.Part(h.ctx, 0, ps[0]); err == nil {
				t.Error("a part after Complete succeeded")
			}
		}
	}
	if n, err := objstore.AbortUploads(h.ctx, h.Store, h.Prefix+"up/"); n != 0 || err != nil {
		t.Errorf("%d uploads are left behind (%v)", n, err)
	}
}

func testUploadInvalid(t *testing.T, h *harness) {
	key := h.Prefix + "up/f"
	for _, c := range []struct{ size, part int64 }{
		{-1, partSize}, {100, 0}, {100, -1}, {100, 99}, {partSize, partSize - 1}, {1 << 62, partSize}, {1<<63 - 1, 1},
	} {
		_, err := h.Store.Upload(h.ctx, key, c.size, c.part)
		wantKind(t, fmt.Sprintf("%d bytes in parts of %d", c.size, c.part), err, objstore.KindInvalid)
	}
	u, err := h.Store.Upload(h.ctx, key, partSize+100, partSize)
	if err != nil {
		t.Fatal(err)
	}
	full := make([]byte, partSize)
	for _, c := range []struct{ n, length int }{{-1, partSize}, {2, 100}, {0, 100}, {0, partSize - 1}, {1, 99},
		{1, partSize}, {1, 0}} {
		wantKind(t, fmt.Sprintf("part %d with %d bytes", c.n, c.length), u.Part(h.ctx, c.n, full[:c.length]),
			objstore.KindInvalid)
	}
	_, err = u.Complete(h.ctx)
	wantKind(t, "Complete without parts", err, objstore.KindInvalid)
	if err := u.Part(h.ctx, 0, full); err != nil {
		t.Fatal(err)
	}
	_, err = u.Complete(h.ctx)
	wantKind(t, "Complete without the last part", err, objstore.KindInvalid)
	if err := u.Part(h.ctx, 1, full[:100]); err != nil {
		t.Fatal(err)
	}
	o, err := u.Complete(h.ctx)
	if err != nil {
		t.Fatalf("Complete after the missing part came: %v", err)
	}
	h.holds(t, o, make([]byte, partSize+100))
}

func testUploadReplaces(t *testing.T, h *harness) {
	old := h.put(t, "f", pattern(10))
	data := randomBytes(partSize + 1)
	u, err := h.Store.Upload(h.ctx, old.Key, int64(len(data)), partSize)
	if err != nil {
		t.Fatal(err)
	}
	for n, p := range parts(data) {
		if err := u.Part(h.ctx, n, p); err != nil {
			t.Fatal(err)
		}
	}
	h.holds(t, old, pattern(10))
	o, err := u.Complete(h.ctx)
	if err != nil {
		t.Fatal(err)
	}
	h.holds(t, o, data)
	wantKind(t, "read of what was replaced", h.Store.ReadAt(h.ctx, old, make([]byte, 10), 0), objstore.KindChanged)
}

func testUploadAbort(t *testing.T, h *harness) {
	for _, size := range []int{1, 2*partSize + 1} {
		key, data := h.Prefix+fmt.Sprintf("up/f%d", size), randomBytes(size)
		u, err := h.Store.Upload(h.ctx, key, int64(size), partSize)
		if err != nil {
			t.Fatal(err)
		}
		if err := u.Part(h.ctx, 0, parts(data)[0]); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if err := u.Abort(h.ctx); err != nil {
				t.Fatalf("Abort: %v", err)
			}
		}
		if err := u.Part(h.ctx, 0, parts(data)[0]); err == nil {
			t.Error("a part after Abort succeeded")
		}
		if _, err := u.Complete(h.ctx); err == nil {
			t.Error("Complete after Abort succeeded")
		}
	}
	wantKeys(t, "after Abort", h.files(t), nil)
	if n, err := objstore.AbortUploads(h.ctx, h.Store, h.Prefix); n != 0 || err != nil {
		t.Errorf("%d uploads are left behind (%v)", n, err)
	}
}

func testAbortUploads(t *testing.T, h *harness) {
	const size = partSize + 1
	begin := func(key string) objstore.Upload {
		u, err := h.Store.Upload(h.ctx, h.Prefix+key, size, partSize)
		if err != nil {
			t.Fatal(err)
		}
		return u
	}
	store := func(u objstore.Upload, from int) {
		for n, p := range parts(make([]byte, size))[from:] {
			if err := u.Part(h.ctx, from+n, p); err != nil {
				t.Fatal(err)
			}
		}
	}
	var gone []objstore.Upload
	for _, key := range []string{"set/shard-0.tar", "set/shard-0.tar", "set/shard-1.tar", "set/deep/x y+.tar",
		"set/sha/x"} {
		u := begin(key)
		store(u, 1) // the last part
		gone = append(gone, u)
	}
	other, beside := begin("set2/shard-0.tar"), begin("other")
	store(other, 0)
	store(beside, 0)
	abort := func(prefix string, want int) {
		t.Helper()
		if n, err := objstore.AbortUploads(h.ctx, h.Store, h.Prefix+prefix); n != want || err != nil {
			t.Errorf("AbortUploads(%q) = %d, %v, want %d", prefix, n, err, want)
		}
	}
	abort("none", 0)
	abort("none/none/", 0)
	abort("set/shard-1", 1)
	abort("set/shard-1", 0)
	abort("set/sha", 3)
	abort("set/", 1)
	for i, u := range gone {
		if err := u.Part(h.ctx, 1, make([]byte, 1)); err == nil {
			t.Errorf("upload %d took a part after it was aborted", i)
		}
		if _, err := u.Complete(h.ctx); err == nil {
			t.Errorf("upload %d was completed after it was aborted", i)
		}
	}
	for _, u := range []objstore.Upload{other, beside} {
		if _, err := u.Complete(h.ctx); err != nil {
			t.Errorf("an upload of another prefix: %v", err)
		}
	}
	wantKeys(t, "after AbortUploads", h.files(t), []string{"other", "set2/shard-0.tar"})
}

// testResume: what a process that died has uploaded is found, goes on, and is aborted one by one.
func testResume(t *testing.T, h *harness) {
	key, data := h.Prefix+"up/f", randomBytes(3*partSize+1000)
	ps, size := parts(data), int64(3*partSize+1000)
	begin := func(key string) objstore.Upload {
		u, err := h.Store.Upload(h.ctx, key, size, partSize)
		must(t, err)
		return u
	}
	dead, other, beside := begin(key), begin(key), begin(key+"1")
	for _, n := range []int{3, 0, 1} {
		must(t, dead.Part(h.ctx, n, ps[n]))
	}
	list, err := h.Store.Uploads(h.ctx, key)
	must(t, err)
	var ids []string
	for _, u := range list {
		if u.Key == key {
			ids = append(ids, u.ID)
		}
	}
	slices.Sort(ids)
	want := []string{dead.ID(), other.ID()}
	slices.Sort(want)
	if !slices.Equal(ids, want) || len(list) != 3 {
		t.Errorf("uploads of %s: %q, want %q; with the prefix: %+v", key, ids, want, list)
	}
	for range 2 {
		must(t, h.Store.AbortUpload(h.ctx, key, other.ID()))
	}
	err = other.Part(h.ctx, 0, ps[0])
	for tries := 0; tries < 10 && objstore.KindOf(err) == objstore.KindTransient; tries++ {
		// versitygw answers without reading it, and on a busy machine the answer may be lost
		err = other.Part(h.ctx, 0, ps[0])
	}
	if objstore.KindOf(err) != objstore.KindNotFound {
		t.Errorf("a part of an aborted upload: %v", err)
	}
	must(t, h.Store.AbortUpload(h.ctx, key+"1", beside.ID()))
	for _, id := range []string{"", other.ID(), "no-such-upload"} {
		_, _, err = h.Store.Resume(h.ctx, key, id, size, partSize)
		wantKind(t, "Resume of "+id, err, objstore.KindNotFound)
	}
	_, _, err = h.Store.Resume(h.ctx, key+"1", dead.ID(), size, partSize)
	wantKind(t, "Resume of another key's upload", err, objstore.KindNotFound)
	u, stored, err := h.Store.Resume(h.ctx, key, dead.ID(), size, partSize)
	if !h.Resumes {
		wantKind(t, "Resume in a store that cannot", err, objstore.KindNotFound)
		must(t, dead.Abort(h.ctx))
		return
	}
	must(t, err)
	goOn(t, h, u, dead, stored, ps)
	o, err := u.Complete(h.ctx)
	must(t, err)
	h.holds(t, o, data)
	_, _, err = h.Store.Resume(h.ctx, key, dead.ID(), size, partSize)
	wantKind(t, "Resume of a completed upload", err, objstore.KindNotFound)
	if list, err := h.Store.Uploads(h.ctx, h.Prefix); len(list) != 0 || err != nil {
		t.Errorf("%+v is left, %v", list, err)
	}
}

// goOn stores what is missing of an upload of which the store has the parts 0, 1 and 3.
func goOn(t *testing.T, h *harness, u, dead objstore.Upload, stored int, ps [][]byte) {
	t.Helper()
	if u.ID() != dead.ID() || stored != 3 {
		t.Fatalf("resumed %s as %s, with %+v", dead.ID(), u.ID(), stored)
	}
	// By another plan, the last part is of another size, and the store's parts are beyond the end.
	_, some, err := h.Store.Resume(h.ctx, h.Prefix+"up/f", u.ID(), partSize+5, partSize)
	if err != nil || some != 1 {
		t.Errorf("resumed by another plan: %+v, %v", some, err)
	}
	_, err = u.Complete(h.ctx)
	wantKind(t, "Complete without a part", err, objstore.KindInvalid)
	for n := range ps {
		must(t, u.Part(h.ctx, n, ps[n]))
	}
}

// testCopy: small objects by one request and large ones in parts.
func testCopy(t *testing.T, h *harness) {
	for _, size := range []int{0, 1, 70_000, partSize, 3*partSize + 12_345} {
		data := randomBytes(size)
		from := h.put(t, fmt.Sprintf("from/x y+%d", size), data)
		key := h.Prefix + fmt.Sprintf("to/deep/ü f%d", size)
		for range 2 {
			o, err := h.Store.Copy(h.ctx, from, key)
			if err != nil || o.Key != key {
				t.Fatalf("Copy of %d bytes: %+v, %v", size, o, err)
			}
			h.holds(t, o, data)
		}
		h.holds(t, from, data)
	}
	if n, err := objstore.AbortUploads(h.ctx, h.Store, h.Prefix); n != 0 && !h.Lossy || err != nil {
		t.Errorf("%d uploads are left behind (%v)", n, err)
	}
}

func testCopyChanged(t *testing.T, h *harness) {
	for _, size := range []int{100, 2*partSize + 5} {
		from := h.put(t, "from", randomBytes(size))
		data := randomBytes(size)
		data[0]++
		h.put(t, "from", data)
		_, err := h.Store.Copy(h.ctx, from, h.Prefix+"to")
		wantKind(t, "Copy of a replaced object", err, objstore.KindChanged)
		h.delete(t, h.Prefix+"from")
		_, err = h.Store.Copy(h.ctx, from, h.Prefix+"to")
		wantKind(t, "Copy of a deleted object", err, objstore.KindNotFound)
	}
	wantKeys(t, "after failed copies", h.files(t), nil)
	if n, err := objstore.AbortUploads(h.ctx, h.Store, h.Prefix); n != 0 && !h.Lossy || err != nil {
		t.Errorf("%d uploads are left behind (%v)", n, err)
	}
}

func testDeleteVersion(t *testing.T, h *harness) {
	old := h.put(t, "d/a", pattern(10))
	o := h.put(t, "d/a", pattern(11))
	wantKind(t, "Delete of a replaced version", h.Store.Delete(h.ctx, o.Key, old.ETag), objstore.KindChanged)
	h.holds(t, o, pattern(11))
	for range 2 {
		must(t, h.Store.Delete(h.ctx, o.Key, o.ETag))
		wantKeys(t, "after Delete of the version", h.files(t), nil)
	}
	must(t, h.Store.Delete(h.ctx, h.Prefix+"none/none", o.ETag))
}
