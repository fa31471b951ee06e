package s3_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"iter"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/lab/rig/memstore"
)

// Harness is one empty store under test.
type Harness struct {
	// Store is the store under test.
	Store objstore.Layer
	// Filler stores the suite's objects; nil: Store.
	Filler objstore.Uploader
	// HostileKeys says that the store can hold "a//b", ".." and "a" beside "a/b".
	HostileKeys bool
	// RefusesHostileKeys says that the store reports such keys as not found. With neither, as for S3 servers over a
	// file system, which clean "a//b" to "a/b", the suite does not test them.
	RefusesHostileKeys bool
	// Resumes says that uploads can be resumed.
	Resumes bool
	// Lossy says that answers are lost: uploads may be left behind.
	Lossy bool
	// Prefix is put before every key, for stores that are shared with others; empty or ending in
	// "/".
	Prefix string
}

// conform checks that the stores from open meet the contract. Each subtest opens one.
func conform(t *testing.T, open func(t *testing.T) Harness) {
	for _, c := range []struct {
		name string
		run  func(t *testing.T, h *harness)
	}{
		{"Stat", testStat}, {"ReadAt", testReadAt}, {"ReadRanges", testReadRanges},
		{"ReadInvalid", testReadInvalid}, {"ReadMissing", testReadMissing}, {"ReadChanged", testReadChanged},
		{"ReadSpans", testReadSpans}, {"ReadSpansInvalid", testReadSpansInvalid},
		{"ReadSpansChanged", testReadSpansChanged}, {"PutReplaces", testPutReplaces}, {"PutNew", testPutNew},
		{"PutNewRace", testPutNewRace}, {"Delete", testDelete}, {"Upload", testUpload},
		{"UploadInvalid", testUploadInvalid}, {"UploadReplaces", testUploadReplaces},
		{"UploadAbort", testUploadAbort}, {"AbortUploads", testAbortUploads}, {"Resume", testResume},
		{"DeleteVersion", testDeleteVersion}, {"ListOrder", testListOrder},
		{"ListPrefix", testListPrefix}, {"ListEmpty", testListEmpty}, {"ListBreak", testListBreak},
		{"List after a key", testListAfter}, {"ListLevel", testListLevel}, {"ListParallel", testListParallel},
		{"ListPages", testListPages}, {"OddKeys", testOddKeys}, {"HostileKeys", testHostileKeys},
		{"Cancel", testCancel}, {"Concurrency", testConcurrency},
		{"Copy", testCopy}, {"CopyChanged", testCopyChanged}, // last: how many requests a failed copy makes varies
	} {
		t.Run(c.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			c.run(t, &harness{Harness: open(t), ctx: ctx})
		})
	}
}

type harness struct {
	Harness
	ctx context.Context
}

func (h *harness) put(t *testing.T, key string, data []byte) objstore.Object {
	t.Helper()
	o, err := h.replace(key, data)
	if err != nil {
		t.Fatalf("put %q: %v", key, err)
	}
	if o.Key != h.Prefix+key || o.Size != int64(len(data)) || o.ETag == "" {
		t.Fatalf("put %q: %+v: want key, %d bytes and an ETag", key, o, len(data))
	}
	return o
}

// replace stores data, whether the object exists or not.
func (h *harness) replace(key string, data []byte) (objstore.Object, error) {
	to := h.Filler
	if to == nil {
		to = h.Store
	}
	return uploadAll(h.ctx, to, h.Prefix+key, data)
}

func (h *harness) delete(t *testing.T, key string) {
	t.Helper()
	if err := h.Store.Delete(h.ctx, key, ""); err != nil {
		t.Fatalf("Delete(%q): %v", key, err)
	}
}

func (h *harness) putAll(t *testing.T, keys ...string) {
	t.Helper()
	for _, k := range keys {
		h.put(t, k, []byte(k))
	}
}

// keys collects a listing's keys without the harness's prefix.
func (h *harness) keys(t *testing.T, seq iter.Seq2[objstore.Object, error]) []string {
	t.Helper()
	var keys []string
	for _, o := range memstore.Collect(t, seq) {
		keys = append(keys, strings.TrimPrefix(o.Key, h.Prefix))
	}
	return keys
}

// files returns all keys except markers of folders: a local folder keeps those of removed files.
func (h *harness) files(t *testing.T) []string {
	t.Helper()
	return slices.DeleteFunc(h.keys(t, h.Store.List(h.ctx, h.Prefix, "")), func(key string) bool {
		return strings.HasSuffix(key, "/")
	})
}

func wantKind(t *testing.T, what string, err error, want objstore.Kind) {
	t.Helper()
	var e *objstore.Error
	if !errors.As(err, &e) || e.Kind != want {
		t.Errorf("%s: error %v, want kind %q", what, err, want)
		return
	}
	if e.Op == "" || e.Error() == "" {
		t.Errorf("%s: error %#v names no operation", what, e)
	}
}

func wantKeys(t *testing.T, what string, got, want []string) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Errorf("%s:\n got %q\nwant %q", what, got, want)
	}
}

// pattern returns n bytes that differ at every distance of 251.
func pattern(n int) []byte {
	b := make([]byte, n)
	for i := range min(n, 251) {
		b[i] = byte(i)
	}
	for done := 251; done < n; done *= 2 {
		copy(b[done:], b[:done])
	}
	return b
}

func testStat(t *testing.T, h *harness) {
	put := h.put(t, "a/b.jpg", pattern(1000))
	o, err := h.Store.Stat(h.ctx, h.Prefix+"a/b.jpg")
	if err != nil {
		t.Fatal(err)
	}
	if o.Key != put.Key || o.Size != 1000 || o.ETag != put.ETag {
		t.Errorf("Stat = %+v, Put returned %+v", o, put)
	}
	if o.ModTime.IsZero() {
		t.Error("Stat returned no modification time")
	}
	_, err = h.Store.Stat(h.ctx, h.Prefix+"a/none.jpg")
	wantKind(t, "Stat of a missing key", err, objstore.KindNotFound)
	_, err = h.Store.Stat(h.ctx, h.Prefix+"none/none.jpg")
	wantKind(t, "Stat in a missing folder", err, objstore.KindNotFound)
	_, err = h.Store.Stat(h.ctx, h.Prefix+"a")
	wantKind(t, "Stat of a prefix", err, objstore.KindNotFound)
	_, err = h.Store.Stat(h.ctx, "")
	wantKind(t, "Stat of the empty key", err, objstore.KindNotFound)

	for l, err := range h.Store.List(h.ctx, h.Prefix, "") {
		if err != nil {
			t.Fatal(err)
		}
		if l.Key != o.Key || l.Size != o.Size || l.ETag != o.ETag {
			t.Errorf("List says %+v, Stat says %+v", l, o)
		}
	}
}

func testReadAt(t *testing.T, h *harness) {
	for _, size := range []int{1, 511, 4096, 87_000, 1<<20 + 7} {
		data := pattern(size)
		o := h.put(t, fmt.Sprintf("f%d", size), data)
		p := make([]byte, size)
		if err := h.Store.ReadAt(h.ctx, o, p, 0); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(p, data) {
			t.Errorf("%d bytes: content differs", size)
		}
	}
	empty := h.put(t, "empty", nil)
	if err := h.Store.ReadAt(h.ctx, empty, nil, 0); err != nil {
		t.Errorf("read of an empty object: %v", err)
	}
	if o, err := h.Store.Stat(h.ctx, empty.Key); err != nil || o.Size != 0 || o.ETag == "" {
		t.Errorf("Stat of an empty object = %+v, %v", o, err)
	}
}

func testReadRanges(t *testing.T, h *harness) {
	const size = 70_001
	data := pattern(size)
	o := h.put(t, "f", data)
	check := func(off, n int) {
		t.Helper()
		// Canaries: a read must not touch the bytes beside p.
		buf := bytes.Repeat([]byte{0xEE}, n+2)
		if err := h.Store.ReadAt(h.ctx, o, buf[1:n+1:n+1], int64(off)); err != nil {
			t.Errorf("read of %d at %d: %v", n, off, err)
			return
		}
		if !bytes.Equal(buf[1:n+1], data[off:off+n]) || buf[0] != 0xEE || buf[n+1] != 0xEE {
			t.Errorf("read of %d at %d: wrong bytes", n, off)
		}
	}
	for _, r := range [][2]int{{0, size}, {0, 1}, {0, size - 1}, {1, size - 1}, {size - 1, 1}, {0, 0}, {size, 0},
		{4096, 4096}, {65_535, 2}} {
		check(r[0], r[1])
	}
	rng := rand.New(rand.NewPCG(1, 2))
	for range 50 {
		off := rng.IntN(size)
		check(off, rng.IntN(size-off)+1)
	}
}

func testReadInvalid(t *testing.T, h *harness) {
	o := h.put(t, "f", pattern(100))
	for _, r := range []struct{ off, n int64 }{{0, 101}, {100, 1}, {101, 0}, {-1, 1}, {-1, 0}, {1 << 62, 1},
		{1<<63 - 1, 1}} {
		err := h.Store.ReadAt(h.ctx, o, make([]byte, r.n), r.off)
		wantKind(t, fmt.Sprintf("read of %d at %d", r.n, r.off), err, objstore.KindInvalid)
	}
}

func testReadMissing(t *testing.T, h *harness) {
	o := h.put(t, "d/f", pattern(100))
	h.delete(t, o.Key)
	wantKind(t, "whole read of a deleted object", h.Store.ReadAt(h.ctx, o, make([]byte, 100), 0), objstore.KindNotFound)
	wantKind(t, "ranged read of a deleted object", h.Store.ReadAt(h.ctx, o, make([]byte, 10), 5), objstore.KindNotFound)
	_, err := h.Store.Stat(h.ctx, o.Key)
	wantKind(t, "Stat of a deleted object", err, objstore.KindNotFound)
}

func testReadChanged(t *testing.T, h *harness) {
	for _, c := range []struct {
		name string
		size int
	}{{"same size", 100}, {"shorter", 50}, {"longer", 200}} {
		old := h.put(t, "f", pattern(100))
		data := pattern(c.size)
		data[0]++
		now := h.put(t, "f", data)
		if now.ETag == old.ETag {
			t.Fatalf("%s: the ETag stayed %s", c.name, old.ETag)
		}
		wantKind(t, c.name+", whole read", h.Store.ReadAt(h.ctx, old, make([]byte, 100), 0), objstore.KindChanged)
		wantKind(t, c.name+", ranged read", h.Store.ReadAt(h.ctx, old, make([]byte, 10), 3), objstore.KindChanged)
		wantKind(t, c.name+", read of the old end", h.Store.ReadAt(h.ctx, old, make([]byte, 10), 90),
			objstore.KindChanged)
		p := make([]byte, c.size)
		if err := h.Store.ReadAt(h.ctx, now, p, 0); err != nil || !bytes.Equal(p, data) {
			t.Errorf("%s: read of the new version: %v", c.name, err)
		}
	}
}

func testPutReplaces(t *testing.T, h *harness) {
	h.put(t, "f", pattern(10))
	o := h.put(t, "f", []byte("new"))
	p := make([]byte, 3)
	if err := h.Store.ReadAt(h.ctx, o, p, 0); err != nil || string(p) != "new" {
		t.Errorf("read %q, %v", p, err)
	}
	wantKeys(t, "after two Puts", h.keys(t, h.Store.List(h.ctx, h.Prefix, "")), []string{"f"})
}

// orderKeys are keys whose order by whole key differs from the order of a directory walk.
var orderKeys = []string{
	"a-b", "a.txt", "a/b", "a/b-c/d", "a/b.c", "a/c/d/e", "a/c/d0", "a/c0", "a0", "a0/b", "aa/z",
	"B/x", "b", "c/1", "c/10", "c/2", "ä/ö.jpg", "z/日本/写真.jpg", "~",
}

// orderTree is orderKeys without keys that are at once a file and a folder.
func orderTree() []string {
	keys := slices.DeleteFunc(slices.Clone(orderKeys), func(k string) bool {
		return slices.Contains([]string{"a/b", "a0"}, k)
	})
	return append(keys, "a/b/f")
}

func testListOrder(t *testing.T, h *harness) {
	keys := orderTree()
	rand.New(rand.NewPCG(3, 4)).Shuffle(len(keys), func(i, j int) { keys[i], keys[j] = keys[j], keys[i] })
	h.putAll(t, keys...)
	slices.Sort(keys)
	wantKeys(t, "List", h.keys(t, h.Store.List(h.ctx, h.Prefix, "")), keys)
}

func testListPrefix(t *testing.T, h *harness) {
	keys := orderTree()
	h.putAll(t, keys...)
	slices.Sort(keys)
	for _, prefix := range []string{"a", "a/", "a/b", "a/b/", "a/c", "a/c/", "a/c/d/", "c/1", "c/10", "c/100", "ä/",
		"z/日", "none", "none/", "b/", "b", "~"} {
		want := slices.DeleteFunc(slices.Clone(keys), func(k string) bool { return !strings.HasPrefix(k, prefix) })
		wantKeys(t, fmt.Sprintf("List(%q)", prefix), h.keys(t, h.Store.List(h.ctx, h.Prefix+prefix, "")), want)
	}
}

func testListEmpty(t *testing.T, h *harness) {
	wantKeys(t, "List of an empty store", h.keys(t, h.Store.List(h.ctx, h.Prefix, "")), nil)
	wantKeys(t, "ListLevel of an empty store", h.keys(t, h.Store.ListLevel(h.ctx, h.Prefix)), nil)
}

func testListBreak(t *testing.T, h *harness) {
	h.putAll(t, "a/1", "a/2", "b/1", "b/2")
	n := 0
	for _, err := range h.Store.List(h.ctx, h.Prefix, "") {
		if err != nil {
			t.Fatal(err)
		}
		if n++; n == 2 {
			break
		}
	}
	// A sequence can be used again, and a loop can read.
	seq := h.Store.List(h.ctx, h.Prefix, "")
	for range 2 {
		for o, err := range seq {
			if err != nil {
				t.Fatal(err)
			}
			if err := h.Store.ReadAt(h.ctx, o, make([]byte, o.Size), 0); err != nil {
				t.Fatal(err)
			}
		}
	}
}

func testListAfter(t *testing.T, h *harness) {
	keys := orderTree()
	h.putAll(t, keys...)
	slices.Sort(keys)
	for _, prefix := range []string{"", "a/", "c/1"} {
		for _, after := range append(slices.Clone(keys), "a/", "a/b/", "0", "zzz", "a/c/d/") {
			want := slices.DeleteFunc(slices.Clone(keys), func(k string) bool {
				return !strings.HasPrefix(k, prefix) || k <= after
			})
			got := h.keys(t, h.Store.List(h.ctx, h.Prefix+prefix, h.Prefix+after))
			wantKeys(t, fmt.Sprintf("List(%q, %q)", prefix, after), got, want)
		}
	}
}

func testListLevel(t *testing.T, h *harness) {
	h.putAll(t, orderTree()...)
	for _, c := range []struct{ prefix, objects, prefixes string }{
		{"", "a-b a.txt b ~", "B/ a/ a0/ aa/ c/ z/ ä/"},
		{"a/", "a/b.c a/c0", "a/b-c/ a/b/ a/c/"},
		{"a/c/", "a/c/d0", "a/c/d/"},
		{"a/c/d/", "a/c/d/e", ""},
		{"none/", "", ""},
	} {
		var objects, prefixes []string
		for o, err := range h.Store.ListLevel(h.ctx, h.Prefix+c.prefix) {
			if err != nil {
				t.Fatal(err)
			}
			key := strings.TrimPrefix(o.Key, h.Prefix)
			if o.IsPrefix() {
				prefixes = append(prefixes, key)
			} else {
				objects = append(objects, key)
			}
		}
		wantKeys(t, fmt.Sprintf("objects under %q", c.prefix), objects, strings.Fields(c.objects))
		wantKeys(t, fmt.Sprintf("prefixes under %q", c.prefix), prefixes, strings.Fields(c.prefixes))
	}
}

func testListParallel(t *testing.T, h *harness) {
	keys := orderTree()
	for i := range 60 {
		keys = append(keys, fmt.Sprintf("train/class%02d/deep/er/%d.jpg", i%20, i))
	}
	h.putAll(t, keys...)
	slices.Sort(keys)
	for _, workers := range []int{1, 3, 16} {
		for _, prefix := range []string{"", "train/", "train", "none/"} {
			last := -1
			got := h.keys(t, objstore.ListParallel(h.ctx, h.Store, h.Prefix+prefix, workers, func(n int) { last = n }))
			slices.Sort(got)
			want := slices.DeleteFunc(slices.Clone(keys), func(k string) bool { return !strings.HasPrefix(k, prefix) })
			wantKeys(t, fmt.Sprintf("ListParallel(%q) by %d", prefix, workers), got, want)
			if len(want) > 0 && last != len(want) {
				t.Errorf("progress ended at %d of %d", last, len(want))
			}
		}
	}
}

// testListPages lists more keys than fit on one page of S3 (1,000).
func testListPages(t *testing.T, h *harness) {
	const n = 1050
	var keys []string
	var wg sync.WaitGroup
	sem := make(chan struct{}, 8)
	for i := range n {
		key := fmt.Sprintf("p/%04d", i)
		keys = append(keys, key)
		wg.Add(1)
		sem <- struct{}{}
		go func() {
			defer func() { <-sem; wg.Done() }()
			if _, err := h.replace(key, []byte("x")); err != nil {
				t.Error(err)
			}
		}()
	}
	wg.Wait()
	wantKeys(t, "List over pages", h.keys(t, h.Store.List(h.ctx, h.Prefix, "")), keys)
	wantKeys(t, "ListLevel over pages", h.keys(t, h.Store.ListLevel(h.ctx, h.Prefix+"p/")), keys)
}

// wantKeyAsContent checks that an object holds its key, as putAll has put it.
func (h *harness) wantKeyAsContent(t *testing.T, o objstore.Object) {
	t.Helper()
	p := make([]byte, o.Size)
	if err := h.Store.ReadAt(h.ctx, o, p, 0); err != nil || h.Prefix+string(p) != o.Key {
		t.Errorf("read of %q = %q, %v", o.Key, p, err)
	}
}

func testOddKeys(t *testing.T, h *harness) {
	keys := []string{
		"with space/a b.jpg", "plus+sign", "percent%20", "q?uery=1&x=2", "hash#tag", "quote'\"", "back\\slash",
		"brackets[1]{2}<3>", "semi;colon:at@", "comma,dollar$", "tilde~!*()", "ünïcödé/é", "emoji/🐟.png", ".hidden",
		"trailing.",
		" leading", "end ", "new\u00a0nbsp", "a...b/c",
	}
	h.putAll(t, keys...)
	slices.Sort(keys)
	wantKeys(t, "List", h.keys(t, h.Store.List(h.ctx, h.Prefix, "")), keys)
	for o, err := range h.Store.List(h.ctx, h.Prefix, "") {
		if err != nil {
			t.Fatal(err)
		}
		h.wantKeyAsContent(t, o)
		if s, err := h.Store.Stat(h.ctx, o.Key); err != nil || s.ETag != o.ETag {
			t.Errorf("Stat of %q = %+v, %v", o.Key, s, err)
		}
	}
}

// hostileKeys are legal in S3 but impossible in a file system.
var hostileKeys = []string{
	"a", "a/b", "a//b", "a///", "a/", "/lead", "//", ".", "..", "../up", "d/./e", "d/../e", "d/..", "new\nline",
	"tab\there",
}

func testHostileKeys(t *testing.T, h *harness) {
	if !h.HostileKeys && !h.RefusesHostileKeys {
		t.Skip("the store keeps such keys under other names")
	}
	if !h.HostileKeys {
		// Such keys must fail cleanly, and never reach another object.
		h.put(t, "a/b", []byte("a/b"))
		for _, key := range []string{"a//b", "a/./b", "a/../a/b", "../x", "/a/b", "a/b/", "a/b/c"} {
			_, err := h.Store.Stat(h.ctx, h.Prefix+key)
			wantKind(t, fmt.Sprintf("Stat(%q)", key), err, objstore.KindNotFound)
			err = h.Store.ReadAt(h.ctx, objstore.Object{Key: h.Prefix + key, Size: 3, ETag: "x"}, make([]byte, 3), 0)
			wantKind(t, fmt.Sprintf("ReadAt(%q)", key), err, objstore.KindNotFound)
		}
		return
	}
	h.putAll(t, hostileKeys...)
	keys := slices.Sorted(slices.Values(hostileKeys))
	wantKeys(t, "List", h.keys(t, h.Store.List(h.ctx, h.Prefix, "")), keys)
	for o, err := range h.Store.List(h.ctx, h.Prefix, "") {
		if err != nil {
			t.Fatal(err)
		}
		h.wantKeyAsContent(t, o)
	}
	for _, workers := range []int{1, 4} {
		got := h.keys(t, objstore.ListParallel(h.ctx, h.Store, h.Prefix, workers, nil))
		slices.Sort(got)
		wantKeys(t, "ListParallel", got, keys)
	}
}

func testCancel(t *testing.T, h *harness) {
	o := h.put(t, "f", pattern(100))
	h.putAll(t, "g", "h")
	ctx, cancel := context.WithCancel(h.ctx)
	cancel()
	if err := h.Store.ReadAt(ctx, o, make([]byte, 100), 0); !errors.Is(err, context.Canceled) {
		t.Errorf("ReadAt with a canceled context: %v", err)
	}
	if _, err := h.Store.Stat(ctx, o.Key); !errors.Is(err, context.Canceled) {
		t.Errorf("Stat with a canceled context: %v", err)
	}
	if err := h.Store.ReadSpans(ctx, o, []objstore.Span{{Off: 0, P: make([]byte, 10)}}); !errors.Is(err,
		context.Canceled) {
		t.Errorf("ReadSpans with a canceled context: %v", err)
	}
	if _, err := h.Store.PutNew(ctx, h.Prefix+"new", []byte("x")); !errors.Is(err, context.Canceled) {
		t.Errorf("PutNew with a canceled context: %v", err)
	}
	if _, err := h.Store.Upload(ctx, h.Prefix+"new", 1, 1); !errors.Is(err, context.Canceled) {
		t.Errorf("Upload with a canceled context: %v", err)
	}
	for _, etag := range []string{"", o.ETag} {
		if err := h.Store.Delete(ctx, o.Key, etag); !errors.Is(err, context.Canceled) {
			t.Errorf("Delete(%q) with a canceled context: %v", etag, err)
		}
	}
	if _, err := h.Store.Copy(ctx, o, h.Prefix+"copy"); !errors.Is(err, context.Canceled) {
		t.Errorf("Copy with a canceled context: %v", err)
	}
	if _, err := h.Store.Uploads(ctx, h.Prefix); !errors.Is(err, context.Canceled) {
		t.Errorf("Uploads with a canceled context: %v", err)
	}
	if err := h.Store.AbortUpload(ctx, h.Prefix+"f", "id"); !errors.Is(err, context.Canceled) {
		t.Errorf("AbortUpload with a canceled context: %v", err)
	}
	if _, _, err := h.Store.Resume(ctx, h.Prefix+"f", "id", 1, 1); h.Resumes && !errors.Is(err, context.Canceled) {
		t.Errorf("Resume with a canceled context: %v", err)
	}
	lists := map[string]iter.Seq2[objstore.Object, error]{
		"List": h.Store.List(ctx, h.Prefix, ""), "ListParallel": objstore.ListParallel(ctx, h.Store, h.Prefix, 4, nil),
	}
	for name, seq := range lists {
		var last error
		for _, err := range seq {
			last = err
		}
		if !errors.Is(last, context.Canceled) {
			t.Errorf("%s with a canceled context ended with %v", name, last)
		}
	}
	// Canceled during the read.
	ctx, cancel = context.WithCancel(h.ctx)
	defer cancel()
	var last error
	for _, err := range h.Store.List(ctx, h.Prefix, "") {
		cancel()
		last = err
	}
	if !errors.Is(last, context.Canceled) {
		t.Errorf("List canceled on the way ended with %v", last)
	}
}

func testConcurrency(t *testing.T, h *harness) {
	const objects, readers, reads = 20, 32, 20
	var os []objstore.Object
	var contents [][]byte
	for i := range objects {
		data := bytes.Repeat([]byte{byte(i)}, 1000+i*997)
		os, contents = append(os, h.put(t, fmt.Sprintf("d%d/f", i), data)), append(contents, data)
	}
	var wg sync.WaitGroup
	for r := range readers {
		wg.Add(1)
		go func() {
			defer wg.Done()
			rng := rand.New(rand.NewPCG(uint64(r), 0))
			for range reads {
				i := rng.IntN(objects)
				off := rng.IntN(len(contents[i]))
				p := make([]byte, rng.IntN(len(contents[i])-off)+1)
				if err := h.Store.ReadAt(h.ctx, os[i], p, int64(off)); err != nil {
					t.Error(err)
					return
				}
				if !bytes.Equal(p, contents[i][off:off+len(p)]) {
					t.Errorf("object %d: wrong bytes", i)
				}
			}
		}()
	}
	wg.Wait()
}
