package cache

import (
	"testing"
	"time"
)

// A file goes from the store by a flight into memory and on to the disk, and of several extents the farthest counts.
func TestResidence(t *testing.T) {
	f := newFixture(t, 70<<10, ExtentSize+100)
	for _, dir := range []string{"", t.TempDir()} {
		c, v := f.open(t, 64<<20, dir, 64<<20)
		open := f.gate.close()
		landed := make(chan struct{}, 3)
		fetch := func(file, x int) {
			if out := v.Prefetch(nil, file, x, time.Time{}, func(int, error) { landed <- struct{}{} }); out != Started {
				t.Fatalf("file %d, extent %d: outcome %d", file, x, out)
			}
		}
		is := func(file int, want Residence) {
			t.Helper()
			if got := v.Residence(file); got != want {
				t.Errorf("dir %q, file %d: %d, want %d", dir, file, got, want)
			}
		}
		is(0, InStore)
		fetch(0, 0)
		is(0, OnWay)
		fetch(1, 0)
		is(1, InStore)
		fetch(1, 1)
		is(1, OnWay)
		open()
		for range 3 {
			<-landed
		}
		if dir == "" {
			is(0, InMemory)
			is(1, InMemory)
		} else {
			eventually(t, "both are kept", func() bool { return v.Residence(0) == OnDisk && v.Residence(1) == OnDisk })
		}
		closeCache(t, c)
	}
}
