package cache

import (
	"testing"
	"time"

	"pgregory.net/rapid"
)

// A reader who waits for granules that a plan fetches makes their request urgent.
func TestRangeUrgency(t *testing.T) {
	f := newFixture(t, 12*mib)
	c := newPatient(Options{Memory: 64 << 20, Logger: quiet})
	defer closeCache(t, c)
	v := c.NewVolume(VolumeOptions{Manifest: f.m, Dataset: [16]byte{1}, Store: f.gate})
	opened := f.gate.close()
	landed := make(chan error, 2)
	r := Range{Extent: 1, Off: granuleSize, N: 2 * granuleSize}
	if n, out := v.PrefetchRange(nil, r, time.Now().Add(time.Hour), func(_ int, err error) { landed <- err }); n != 2 ||
		out != Started {
		t.Fatal(n, out)
	}
	v.mu.Lock()
	fl := v.flights[extentKey{v, 1 << 8}.granule(1).piece].fl
	v.mu.Unlock()
	if fl.urgency.Raised() {
		t.Error("urgent from the beginning")
	}
	done := make(chan struct{})
	go func() {
		readRight(t, v, f.bytes[0], ExtentSize+granuleSize, 2*granuleSize)
		close(done)
	}()
	eventually(t, "the request is urgent", fl.urgency.Raised)
	opened()
	<-done
	for range 2 {
		if err := <-landed; err != nil {
			t.Error(err)
		}
	}
	if s := c.Stats(); s.Joined != 1 || s.Reads != 1 || s.Misses != 0 {
		t.Errorf("%+v", s)
	}
}

// Granules that were fetched for ranges are read without another fetch, and their memory is the account's until they
// are spent.
func TestRangesModel(t *testing.T) {
	c, v, want, y := openLarge(t, 8*mib, "")
	a := c.NewAccount(1)
	rapid.Check(t, func(rt *rapid.T) {
		held := map[[2]int]bool{} // granules on the account, by extent
		of := func(r Range) (all [][2]int) {
			for g := r.Off / granuleSize; g*granuleSize < r.Off+r.N; g++ {
				all = append(all, [2]int{r.Extent, g})
			}
			return all
		}
		has := func(r Range) bool {
			for _, g := range of(r) {
				if !held[g] {
					return false
				}
			}
			return true
		}
		draw := func(rt *rapid.T) Range {
			r := Range{Extent: rapid.IntRange(0, 2).Draw(rt, "extent"),
				Off: rapid.IntRange(0, ExtentSize-1).Draw(rt, "off")}
			r.N = rapid.IntRange(1, min(200<<10, ExtentSize-r.Off)).Draw(rt, "n")
			return r
		}
		rt.Repeat(map[string]func(*rapid.T){
			"prefetch": func(rt *rapid.T) {
				r := draw(rt)
				if len(held)+4 > 64 {
					return
				}
				done := make(chan error)
				n, out := v.PrefetchRange(a, r, time.Time{}, func(_ int, err error) { done <- err })
				if has(r) && out != Present || out > Present { // what was spent may be there, too
					rt.Fatalf("%+v: outcome %d", r, out)
				}
				for range n {
					if err := <-done; err != nil {
						rt.Fatal(err)
					}
				}
				for _, g := range of(r) {
					held[g] = true
				}
			},
			"read": func(rt *rapid.T) {
				r := draw(rt)
				if !has(r) {
					return
				}
				before := y.requests.Load()
				readRight(t, v, want, r.Extent*ExtentSize+r.Off, r.N)
				if y.requests.Load() != before || v.WhereRange(r) != InMemory {
					rt.Fatalf("%+v is fetched again", r)
				}
			},
			"spend": func(rt *rapid.T) {
				r, keep := draw(rt), rapid.IntRange(0, 70).Draw(rt, "another wants")
				v.SpendRange(r, func(off, _ int64) bool { return int(off%ExtentSize)/granuleSize == keep })
				for _, g := range of(r) {
					if g[1] != keep {
						delete(held, g)
					}
				}
			},
			"": func(rt *rapid.T) {
				if got := a.Held(); got != int64(len(held))*footprint(granuleSize) {
					rt.Fatalf("%d bytes on the account for %d granules", got, len(held))
				}
			},
		})
		for g := range held {
			v.SpendRange(Range{Extent: g[0], Off: g[1] * granuleSize, N: 1}, func(int64, int64) bool { return false })
		}
		c.ring.drop(nil)
	})
	c.CloseAccount(a)
}
