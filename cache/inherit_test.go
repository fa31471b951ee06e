package cache

import (
	"slices"
	"testing"

	"github.com/shoalfs/shoal/cache/segment"
)

// A record of an older version is freed if the newer one, which others read before it inherits, has one of its own.
func TestInheritWhatIsThere(t *testing.T) {
	const size = 60 << 10
	f := newFixture(t, size, size)
	c, old := f.open(t, 64<<20, t.TempDir(), 64<<20)
	defer closeCache(t, c)
	read := func(v *Volume, file int) {
		t.Helper()
		if _, err := v.ReadAt(t.Context(), file, make([]byte, size), 0); err != nil {
			t.Fatal(err)
		}
		if err := v.Flush(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	read(old, 0)
	read(old, 1)
	v := f.volume(c)
	read(v, 0)
	v.Inherit(old)
	old.Retire()
	if s := old.ds.disk.Load().store.Segments(); len(s) != 1 || s[0].Records != 2 {
		t.Errorf("%+v", s)
	}
	before := f.gate.reads.Load()
	read(v, 0)
	read(v, 1)
	if kept, _ := v.Kept(); kept != 2 || f.gate.reads.Load() != before {
		t.Errorf("%d extents are kept, %d fetched", kept, f.gate.reads.Load()-before)
	}
}

// A version that takes over the records of another one while segments are dropped and rewritten has those that are
// left, and only those.
func TestInheritWhileGivingBack(t *testing.T) {
	const files, size = 24, 60 << 10
	f := newFixture(t, slices.Repeat([]int{size}, files)...)
	c := newPatient(Options{Memory: 64 << 20, Logger: quiet})
	defer closeCache(t, c)
	old := f.volume(c)
	if err := old.OpenDisk(t.TempDir(), segment.Options{SegmentSize: 8 * size, Logger: quiet}); err != nil {
		t.Fatal(err)
	}
	read := func(v *Volume) {
		for file := range files {
			if _, err := v.ReadAt(t.Context(), file, make([]byte, size), 0); err != nil {
				t.Fatal(err)
			}
		}
		if err := v.Flush(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	read(old)
	v, statfs, disk := (*Volume)(nil), c.statfs, old.ds.disk.Load()
	c.statfs = func(dir string) (free, size int64, err error) {
		if v == nil { // once it is known what is in the segment, before any of it is copied
			v = f.volume(c)
			v.Inherit(old)
			old.Retire()
		}
		return statfs(dir)
	}
	old.SetQuota(10 * size)
	if err := old.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	if v == nil {
		t.Fatal("no segment was rewritten")
	}
	kept := 0
	for e := range uint32(files) {
		if loc, _ := v.at(e); loc != 0 && disk.store.Has(loc) {
			kept++
		}
	}
	if n, _ := v.Kept(); n != kept || kept < 8 {
		t.Errorf("%d extents count as kept, of which %d are on disk", n, kept)
	}
	v.SetAdmit(func(int, int) bool { return false })
	before := int(f.gate.reads.Load())
	read(v)
	if n := int(f.gate.reads.Load()) - before; n != files-kept {
		t.Errorf("%d files of %d were fetched, though %d are kept", n, files, kept)
	}
}
