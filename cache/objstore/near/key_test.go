package near

import (
	"hash/crc32"
	"reflect"
	"strings"
	"testing"

	"github.com/shoalfs/shoal/cache/objstore"
)

// All nodes, of all versions of Shoal, must make the same keys.
func TestKey(t *testing.T) {
	o := objstore.Object{Key: "train/a b.jpg", ETag: "0f", Size: 9}
	if k := keyOf("http://origin/bucket", o, 0); k !=
		"v1/0c/0c4a8255abeadaba446e5674b7ec8df9ebc7df4d2adfc5c1d23120abc88829b9" {
		t.Errorf("%s", k)
	}
	seen := map[string]bool{}
	for _, c := range []struct {
		origin string
		o      objstore.Object
		unit   int64
	}{
		{"a", o, 0}, {"a", o, 1}, {"b", o, 0},
		{"a", objstore.Object{Key: "train/a", ETag: `b.jpg" "0f`, Size: 9}, 0},
		{"a", objstore.Object{Key: o.Key, ETag: "0e", Size: 9}, 0},
		{"a", objstore.Object{Key: o.Key, ETag: "0f", Size: 10}, 0},
	} {
		seen[keyOf(c.origin, c.o, c.unit)] = true
	}
	if len(seen) != 6 {
		t.Errorf("%d keys", len(seen))
	}
}

func TestNote(t *testing.T) {
	data := make([]byte, granuleSize+1)
	data[granuleSize] = 'x'
	n := noteOf(objstore.Object{Key: "ä b", ETag: "e-1"}, "v1/ab/abcd", data)
	if want := (note{granuleSize + 1,
		"abcd", []uint32{crc32.Checksum(data[:granuleSize], castagnoli), crc32.Checksum([]byte("x"), castagnoli)},
		"e-1", "ä b"}); !reflect.DeepEqual(n, want) {
		t.Errorf("%+v", n)
	}
	back, err := parseNote(n.String())
	if back.etag, back.key = n.etag, n.key; err != nil || !reflect.DeepEqual(back, n) {
		t.Errorf("%+v, %v", back, err)
	}
	// The longest one fits into S3's metadata.
	for _, key := range []string{strings.Repeat("ä", 500), "a" + strings.Repeat("ä", 500),
		"ab" + strings.Repeat("ä", 500)} {
		long := noteOf(objstore.Object{Key: key, ETag: strings.Repeat("f", 64) + "-10000"},
			keyOf("", objstore.Object{}, 0), make([]byte, unitSize)).String()
		if _, err := parseNote(long); err != nil || len(long) > 1024 {
			t.Errorf("%d bytes, %v", len(long), err)
		}
	}
	for _, bad := range []string{"", "1", "1 1 i AAAAAA== e", "2 1 i AAAAAA== e k", "1 0 i  e k", "1 -1 i AAAAAA== e k",
		"1 9999999 i AAAAAA== e k", "1 65537 i AAAAAA== e k", "1 1 i AAAA e k", "1 1 i AAAAAA== e k k"} {
		if _, err := parseNote(bad); err == nil {
			t.Errorf("%q is a note", bad)
		}
	}
}

func FuzzNote(f *testing.F) {
	f.Add(noteOf(objstore.Object{Key: "a", ETag: "b"}, "c", []byte("data")).String())
	f.Add("1 65537 i AAAAAA== e k")
	f.Fuzz(func(t *testing.T, text string) {
		n, err := parseNote(text)
		if err != nil {
			return
		}
		if n.size < 1 || n.size > unitSize || int64(len(n.sums)) != (n.size+granuleSize-1)/granuleSize {
			t.Errorf("%q: %d checksums of %d bytes", text, len(n.sums), n.size)
		}
		if back, err := parseNote(n.String()); err != nil || !reflect.DeepEqual(n, back) {
			t.Errorf("%q: %+v, %+v, %v", text, n, back, err)
		}
	})
}
