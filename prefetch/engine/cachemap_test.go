package engine

import (
	"context"
	"encoding/json"
	"testing"

	"github.com/shoalfs/shoal/prefetch/order"
	"github.com/shoalfs/shoal/prefetch/run"
)

// sums checks that the strip's cells are parts of a whole, and returns the mean of what one slice says.
func sums(t *testing.T, s run.Strip) (read, kept, ring float64) {
	t.Helper()
	for c := range s.Cells {
		all := int(s.Kept[c]) + int(s.Ring[c]) + int(s.Flying[c])
		if s.Read != nil {
			all += int(s.Read[c])
			read += float64(s.Read[c])
		}
		if all > 100 {
			t.Fatalf("%s, cell %d: %d%%", s.Name, c, all)
		}
		kept += float64(s.Kept[c])
		ring += float64(s.Ring[c])
	}
	n := float64(max(s.Cells, 1))
	return read / n, kept / n, ring / n
}

func TestCacheMap(t *testing.T) {
	dir, paths := folder(t, 4, 50)
	e := openEngine(t, dir, t.TempDir(), "torch:seed=5")
	defer closeEngine(t, e)
	waitFor(t, "the whole epoch is staged or kept", func() bool { return e.Stats().Lead == len(paths) })
	m := e.CacheMap(40)
	if m.Samples != len(paths) || len(m.Orders) != 1 || m.Orders[0].Name != "mount" || !m.Dataset.Exact ||
		m.Dataset.Cells != 40 {
		t.Fatalf("%+v", m)
	}
	if _, kept, ring := sums(t, m.Dataset); kept+ring != 100 {
		t.Errorf("%.1f%% kept and %.1f%% in memory of what is all there", kept, ring)
	}
	spec, _ := order.Parse("torch:seed=5")
	o, err := spec.Order(len(paths), 0)
	if err != nil {
		t.Fatal(err)
	}
	for pos := range 100 {
		read(t, e, dir, paths[o.At(pos)])
	}
	m = e.CacheMap(40)
	s := m.Orders[0]
	if s.Frontier != 100 || s.Position != 100 || s.Planned != len(paths) || s.Len != len(paths) {
		t.Errorf("after 100 of %d: %+v", len(paths), s)
	}
	for c := range s.Cells {
		if want := byte(100 * min(1, max(0, 20-c))); s.Read[c] != want { // 5 samples a cell
			t.Errorf("cell %d: %d%% read, want %d", c, s.Read[c], want)
		}
	}
	waitFor(t, "all is on disk", func() bool { s := e.Stats(); return s.Disk.Kept == s.Disk.Extents })
	if _, kept, _ := sums(t, e.CacheMap(1000).Dataset); kept != 100 {
		t.Errorf("%.1f%% kept, want all", kept)
	}
}

// A map is bounded whatever is asked for, and there is one of an empty order too.
func TestCacheMapIsBounded(t *testing.T) {
	dir, paths := folder(t, 2, 30)
	e := openEngine(t, dir, t.TempDir(), "none")
	defer closeEngine(t, e)
	for asked, want := range map[int]int{-1: 1, 0: 1, 7: 7, 1 << 30: len(paths)} {
		m := e.CacheMap(asked)
		if m.Dataset.Cells != want || len(m.Dataset.Kept) != want || len(m.Orders) != 0 {
			t.Errorf("%d cells asked: %d, %d streams", asked, m.Dataset.Cells, len(m.Orders))
		}
	}
	for range 2 * mapOrders {
		s, err := e.Dataset().Begin("session", order.Sequential(len(paths)), 0, 1)
		if err != nil {
			t.Fatal(err)
		}
		defer e.Dataset().End(s)
	}
	if m := e.CacheMap(10); len(m.Orders) != mapOrders {
		t.Errorf("%d strips", len(m.Orders))
	}
	b, err := json.Marshal(e.CacheMap(10).Dataset)
	if err != nil {
		t.Fatal(err)
	}
	var back run.Strip
	if err := json.Unmarshal(b, &back); err != nil || len(back.Kept) != 10 || back.Read != nil {
		t.Errorf("%s: %v", b, err)
	}
}

// A session's reader that went on from a later position has read what it has read, wherever that is.
func TestCacheMapOfASession(t *testing.T) {
	dir, paths := folder(t, 2, 30)
	e := openEngine(t, dir, t.TempDir(), "none")
	defer closeEngine(t, e)
	s, err := e.Dataset().Begin("session", order.Sequential(len(paths)), 20, 1)
	if err != nil {
		t.Fatal(err)
	}
	defer e.Dataset().End(s)
	for pos := 20; pos < 30; pos++ {
		_, release, err := s.Read(context.Background(), pos)
		if err != nil {
			t.Fatal(err)
		}
		release()
	}
	m := e.CacheMap(MaxMapCells).Orders[0]
	for pos := range m.Cells {
		want := byte(0)
		if pos >= 20 && pos < 30 {
			want = 100
		}
		if pos >= m.Frontier && m.Read[pos] != want {
			t.Errorf("position %d: %d%% read, want %d", pos, m.Read[pos], want)
		}
	}
}
