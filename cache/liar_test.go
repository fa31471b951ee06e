package cache

import (
	"context"
	"crypto/md5"
	"encoding/hex"
	"fmt"
	"testing"

	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/objstore/objstoretest"
	"github.com/shoalfs/shoal/cache/segment"
)

// liar has every file, and each third with other bytes.
type liar struct {
	want       [][]byte
	distrusted []int
}

func (l *liar) Asks(int, int) bool { return true }

func (l *liar) Distrust(file, _ int) { l.distrusted = append(l.distrusted, file) }

func (l *liar) Read(_ context.Context, wants []Want, _ bool) []Want {
	for _, w := range wants {
		copy(w.P, l.want[w.File][w.Off:])
		if w.File%3 == 0 {
			w.P[len(w.P)/2] ^= 1
		}
	}
	return nil
}

// tagged is a store whose objects have other ETags than they have in the memory store below.
type tagged struct {
	*gate
	was map[string]string
}

func (s tagged) ReadAt(ctx context.Context, o objstore.Object, p []byte, off int64) error {
	o.ETag = s.was[o.Key]
	return s.gate.ReadAt(ctx, o, p, off)
}

// What a node gives with other bytes reaches no reader and no disk where ETags are MD5s, whole objects and parts; and what was kept
// otherwise is found by Verify. Where ETags only look like MD5s, all works as without them.
func TestLiars(t *testing.T) {
	for _, c := range []struct {
		name string
		etag func(data []byte) string
		sums bool
	}{
		{"MD5", func(data []byte) string { s := md5.Sum(data); return hex.EncodeToString(s[:]) }, true},
		{"as of KMS", func(data []byte) string { s := md5.Sum(append([]byte("x"), data...)); return hex.EncodeToString(s[:]) }, false},
		{"multipart", func(data []byte) string { s := md5.Sum(data); return hex.EncodeToString(s[:]) + "-2" }, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			mem := objstoretest.NewMem()
			store := tagged{&gate{Reader: mem}, map[string]string{}}
			var objects []objstore.Object
			l := &liar{}
			for i := range 300 {
				data := noise[i*101:][:5000+i]
				o := mem.PutBytes(fmt.Sprintf("a/%04d", i), data)
				store.was[o.Key] = o.ETag
				o.ETag = c.etag(data)
				objects, l.want = append(objects, o), append(l.want, data)
			}
			m, err := catalog.Build(objstoretest.Listing(objects...), catalog.BuildOptions{Prefix: "a/"})
			if err != nil {
				t.Fatal(err)
			}
			ca := newPatient(Options{Memory: 64 << 20, Disk: 64 << 20, Logger: quiet})
			defer closeCache(t, ca)
			v := ca.NewVolume(VolumeOptions{Manifest: m, Dataset: [16]byte{5}, Store: store, Peers: l})
			if err := v.OpenDisk(t.TempDir(), segment.Options{SegmentSize: 1 << 20, Logger: quiet}); err != nil {
				t.Fatal(err)
			}
			wrong := 0
			for i, want := range l.want {
				p := make([]byte, len(want))
				if _, err := v.ReadAt(t.Context(), i, p, 0); err != nil {
					t.Fatal(err)
				}
				if string(p) != string(want) {
					wrong++
				}
			}
			settled(t, ca)
			if c.sums && (wrong > 0 || len(l.distrusted) != 100) || !c.sums && len(l.distrusted) == 0 {
				t.Errorf("%d wrong, distrusted %d times", wrong, len(l.distrusted))
			}
			if !c.sums && wrong > 100-len(l.distrusted) {
				t.Errorf("%d wrong, %d distrusted", wrong, len(l.distrusted))
			}
			r, err := v.Verify(t.Context(), nil)
			if err != nil || r.Extents != 300 || r.Dropped != wrong {
				t.Errorf("%+v, %v; %d were wrong", r, err, wrong)
			}
			if kept, _ := v.Kept(); kept != 300-wrong {
				t.Errorf("%d are kept", kept)
			}
		})
	}
}
