package cache

import (
	"fmt"
	"testing"

	"pgregory.net/rapid"

	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/segment"
)

// TestAdoption compares what a volume makes of records with a search through all files, whatever their hints say.
func TestAdoption(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		largest := rapid.SampledFrom([]int64{100, 3 * ExtentSize}).Draw(t, "largest")
		m, err := catalog.Build(func(yield func(objstore.Object, error) bool) {
			for i := range rapid.IntRange(1, 20).Draw(t, "files") {
				if !yield(objstore.Object{Key: fmt.Sprintf("a/%02d", i),
					Size: rapid.Int64Range(1, largest).Draw(t, "size"), ETag: "e"}, nil) {
					return
				}
			}
		}, catalog.BuildOptions{})
		if err != nil {
			t.Fatal(err)
		}
		c := New(Options{Memory: 1 << 20})
		defer c.Close()
		ds := [16]byte{7}
		admit := func(file, extent int) bool { return (file+extent)%2 == 0 }
		v := c.NewVolume(VolumeOptions{Manifest: m, Dataset: ds, Admit: admit})
		a := adoption{v: v}
		want := make(map[uint32]uint64)
		n := rapid.IntRange(0, 60).Draw(t, "records")
		for i := range n {
			loc := segment.Loc(i + 1)
			file := rapid.IntRange(0, m.Len()-1).Draw(t, "file")
			x := segment.Extent{Dataset: ds, ID: m.ID(file),
				Offset: ExtentSize * rapid.Int64Range(0, 3).Draw(t, "extent"), File: uint32(file)}
			ours := x.Offset < m.Size(file)
			if x.Length = 1; ours {
				x.Length = int(v.ExtentBytes(file, int(x.Offset/ExtentSize)))
			}
			switch rapid.SampledFrom([]string{"", "", "hint", "far", "none", "version", "dataset", "offset"}).Draw(
				t, "kind") {
			case "hint":
				x.File = uint32(rapid.IntRange(0, m.Len()-1).Draw(t, "hint"))
			case "far":
				x.File = 1 << 31
			case "none":
				x.File = segment.NoFile
			case "version":
				x.ID[11]++
				ours = false
			case "dataset":
				x.Dataset[0]++
				ours = false
			case "offset":
				x.Offset++
				ours = false
			}
			a.visit(x, loc)
			e := v.extent(file, int(x.Offset/ExtentSize))
			if ours {
				want[e] = uint64(loc) // the last of the extent
			}
		}
		unclaimed := a.finish()
		kept, missing := 0, int64(0)
		for f := range m.Len() {
			for i := range v.Extents(f) {
				e := v.extent(f, i)
				loc := v.loc(e)
				if loc != want[e] {
					t.Fatalf("extent %d of file %d is at %d, wanted %d", i, f, loc, want[e])
				}
				if loc != 0 {
					kept++
				} else if admit(f, i) {
					missing++
				}
			}
		}
		if got, _ := v.Kept(); got != kept || kept+len(unclaimed) != n {
			t.Fatalf("%d kept, %d counted, %d unclaimed of %d", kept, got, len(unclaimed), n)
		}
		if got := v.admission.Load().missing.Load(); got != missing {
			t.Fatalf("%d missing, want %d", got, missing)
		}
	})
}

// TestReopenNeedsNoSearch: what was kept and left in good order is found again without a look at any other file.
func TestReopenNeedsNoSearch(t *testing.T) {
	f := newFixture(t, 100, 200, 300, 400, 500)
	index, err := catalog.Open(t.TempDir(), catalog.Options{Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	defer index.Close()
	dir := t.TempDir()
	o := segment.Options{Logger: quiet}
	c := New(Options{Memory: 1 << 20, Disk: 1 << 30, Logger: quiet})
	v := f.volume(c)
	o.Index = index.Index(v.ds.id)
	if err := v.OpenDisk(dir, o); err != nil {
		t.Fatal(err)
	}
	for _, file := range []int{3, 1} {
		if _, err := v.ReadAt(t.Context(), file, make([]byte, 1000), 0); err != nil {
			t.Fatal(err)
		}
	}
	closeCache(t, c)

	c = New(Options{Memory: 1 << 20, Disk: 1 << 30, Logger: quiet})
	defer closeCache(t, c)
	a := adoption{v: f.volume(c)}
	s, err := segment.Open(dir, o, a.visit)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if kept, _ := a.v.Kept(); len(a.moved) > 0 || kept != 2 || a.v.loc(1) == 0 || a.v.loc(3) == 0 {
		t.Errorf("%d adopted, %d to be looked for", kept, len(a.moved))
	}
}
