package s3_test

import (
	"bytes"
	"strings"
	"testing"

	"github.com/shoalfs/shoal/cache/objstore"
)

// Objects with notes, as the near tier stores them: whole and in ranges, new and overwritten, of another size, missing.
func TestNotes(t *testing.T) {
	store, ctx := open(t, newBucket(t).URL), t.Context()
	data := bytes.Repeat([]byte("0123456789"), 20_000)
	text := "1 200000 " + strings.Repeat("A", 400) + " etag a%2Fb"
	if err := store.PutNoted(ctx, "n/a b", data, text, true); err != nil {
		t.Fatal(err)
	}
	if err := store.PutNoted(ctx, "n/a b", data, text, true); objstore.KindOf(err) != objstore.KindExists {
		t.Errorf("again: %v", err)
	}
	for _, r := range [][2]int{{0, len(data)}, {0, 100}, {65_536, 65_536}, {199_999, 1}} {
		p := make([]byte, r[1])
		got, err := store.GetNoted(ctx, "n/a b", int64(len(data)), p, int64(r[0]))
		if err != nil || got != text || !bytes.Equal(p, data[r[0]:r[0]+r[1]]) {
			t.Errorf("%v: note %.20q, %v", r, got, err)
		}
	}
	if err := store.PutNoted(ctx, "n/a b", data[:70_000], "another", false); err != nil {
		t.Fatal(err)
	}
	for _, r := range [][2]int{{0, len(data)}, {0, 100}, {65_536, 65_536}, {100_000, 1}} {
		if _, err := store.GetNoted(ctx, "n/a b", int64(len(data)), make([]byte, r[1]), int64(r[0])); objstore.KindOf(
			err) != objstore.KindChanged {
			t.Errorf("%v of an object that is shorter: %v", r, err)
		}
	}
	if got, err := store.GetNoted(ctx, "n/a b", 70_000, make([]byte, 70_000), 0); err != nil || got != "another" {
		t.Errorf("overwritten: %q, %v", got, err)
	}
	if _, err := store.GetNoted(ctx, "n/none", 5, make([]byte, 5), 0); objstore.KindOf(err) != objstore.KindNotFound {
		t.Errorf("none: %v", err)
	}
}
