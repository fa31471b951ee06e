package cache

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"testing"
)

// Files have a place once they are on disk and verified; those of several extents and empty ones never have.
func TestPlace(t *testing.T) {
	f := newFixture(t, 70<<10, ExtentSize+100, 0)
	for _, dir := range []string{"", t.TempDir()} {
		c, v := f.open(t, 64<<20, dir, 64<<20)
		for i, want := range f.bytes {
			got := make([]byte, len(want))
			if _, err := v.ReadAt(t.Context(), i, got, 0); err != nil || !bytes.Equal(got, want) {
				t.Fatalf("file %d: %v", i, err)
			}
		}
		if dir != "" {
			eventually(t, "all are kept", func() bool { return v.Residence(0) == OnDisk && v.Residence(1) == OnDisk })
			if _, ok := v.Place(0, false); ok {
				t.Error("a place that nobody has verified")
			}
		}
		p, ok := v.Place(0, true)
		if ok != (dir != "") {
			t.Errorf("dir %q: %v", dir, ok)
		}
		for file := 1; file < 3; file++ {
			if _, ok := v.Place(file, true); ok {
				t.Errorf("file %d has a place", file)
			}
		}
		if (v.SegmentDir() == "") != (dir == "") {
			t.Errorf("dir %q: segments in %q", dir, v.SegmentDir())
		}
		if dir != "" {
			s, err := os.Open(filepath.Join(v.SegmentDir(), fmt.Sprintf("%08d.seg", p.Segment)))
			if err != nil {
				t.Fatal(err)
			}
			got := make([]byte, len(f.bytes[0]))
			if _, err := s.ReadAt(got, p.Off); err != nil || !bytes.Equal(got, f.bytes[0]) {
				t.Errorf("other bytes, %v", err)
			}
			_ = s.Close()
		}
		closeCache(t, c)
	}
}
