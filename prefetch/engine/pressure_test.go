package engine

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/shoalfs/shoal/cache"
	"github.com/shoalfs/shoal/cache/cachedir"
	"github.com/shoalfs/shoal/prefetch/order"
)

// openSmall opens files of 1 MiB, folders of n, with memory for about 42 of them and no disk.
func openSmall(t *testing.T, spec string, n ...int) (e *Engine, dir string, paths [][]string) {
	t.Helper()
	dir = t.TempDir()
	noise := make([]byte, 2<<20)
	_, _ = rand.NewChaCha8([32]byte{7}).Read(noise)
	for c, files := range n {
		paths = append(paths, nil)
		for i := range files {
			p := fmt.Sprintf("c%02d/f%03d.jpg", c, i)
			if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, p)), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(dir, p), noise[i<<10:][:1<<20], 0o644); err != nil {
				t.Fatal(err)
			}
			paths[c] = append(paths[c], p)
		}
	}
	s, err := order.Parse(spec)
	if err != nil {
		t.Fatal(err)
	}
	e = open(t, HostConfig{Options: cachedir.Options{Path: t.TempDir(), Size: 0, Memory: 128 << 20}},
		Config{Source: "file://" + dir, Order: s})
	t.Cleanup(func() { closeEngine(t, e) })
	return e, dir, paths
}

// readAhead reads like a reader who is always slower than the store: it waits until what it reads
// next has been fetched ahead, which without anybody asking for it must happen.
func readAhead(t *testing.T, e *Engine, dir, path string) {
	t.Helper()
	node, ok := e.Manifest().Find(path)
	if !ok {
		t.Fatalf("no %s", path)
	}
	waitFor(t, path+" is fetched ahead", func() bool { return e.cur.Load().volume.Where(node.Index, 0) > cache.OnWay })
	read(t, e, dir, path)
}

// What is left in memory of one epoch serves the next, or gives its place to what the next needs
// first; either way nothing that was counted as staged is gone when its turn comes.
func TestEpochsThatDoNotFitMemory(t *testing.T) {
	e, dir, paths := openSmall(t, "torch:seed=1", 64)
	spec, _ := order.Parse("torch:seed=1")
	for epoch := range 4 {
		o, err := spec.Order(64, epoch)
		if err != nil {
			t.Fatal(err)
		}
		for pos := range o.Len() {
			readAhead(t, e, dir, paths[0][o.At(pos)])
		}
	}
	s := e.Stats()
	if s.Misses+s.Joined != 0 || s.Order.Epoch != 3 {
		t.Errorf("%d misses, %d joined, %+v", s.Misses, s.Joined, s.Order)
	}
}

// What was fetched for a plan that is given up makes way for the next plan.
func TestPlanMakesWay(t *testing.T) {
	e, dir, paths := openSmall(t, "auto", 60, 50)
	for round := range 4 {
		which := paths[round%2]
		if err := e.PutPlan("default", []byte(strings.Join(which, "\n"))); err != nil {
			t.Fatal(err)
		}
		for _, p := range which[:20] {
			readAhead(t, e, dir, p)
		}
		waitFor(t, "memory is full", func() bool { s := e.Stats(); return s.Lead > 15 && s.InFlight == 0 })
	}
	// What still lay in memory from before may go between the moment in which it is seen there and its open.
	if s := e.Stats(); s.Misses > 2 {
		t.Errorf("%d misses", s.Misses)
	}
}

// A reader of other files takes memory from what was fetched ahead; that is fetched again in time.
func TestStraysTakeMemoryBack(t *testing.T) {
	e, dir, paths := openSmall(t, "auto", 60, 50)
	if err := e.PutPlan("default", []byte(strings.Join(paths[0], "\n"))); err != nil {
		t.Fatal(err)
	}
	for i, p := range paths[0] {
		if i%10 == 0 {
			waitFor(t, "as much is staged as fits", func() bool {
				s := e.Stats()
				return s.InFlight == 0 && (s.Lead >= 30 || s.Lead == len(paths[0])-i)
			})
			for _, stray := range paths[1][:20+i/2] {
				read(t, e, dir, stray)
			}
		}
		readAhead(t, e, dir, p)
	}
}

// Two plans that share files: what one reader is done with stays for the other.
func TestPlansShareFiles(t *testing.T) {
	e, dir, paths := openSmall(t, "auto", 16)
	for _, name := range []string{"a", "b"} {
		if err := e.PutPlan(name, []byte(strings.Join(paths[0], "\n"))); err != nil {
			t.Fatal(err)
		}
	}
	for _, p := range paths[0] {
		readAhead(t, e, dir, p)
	}
	if s := e.Stats(); s.GetRequests-s.Hedges.Sent != 16 || s.Misses != 0 {
		t.Errorf("%d GETs, %d misses for 16 files", s.GetRequests, s.Misses)
	}
}

// Two plans that do not fit memory together, the first begun long before the second: both readers
// are ahead of nothing before long.
func TestPlansShareMemory(t *testing.T) {
	e, dir, paths := openSmall(t, "auto", 60, 60)
	if err := e.PutPlan("a", []byte(strings.Join(paths[0], "\n"))); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "the first has all memory", func() bool { s := e.Stats(); return s.Lead > 35 && s.InFlight == 0 })
	if err := e.PutPlan("b", []byte(strings.Join(paths[1], "\n"))); err != nil {
		t.Fatal(err)
	}
	for i := range 60 {
		readAhead(t, e, dir, paths[0][i])
		if i >= 10 { // by then the first one's reader has given ten places up
			readAhead(t, e, dir, paths[1][i-10])
		}
	}
	for i := range 10 {
		readAhead(t, e, dir, paths[1][50+i])
	}
}

// Programs open a file to look at its header and open it again to read it, and trainers augment one sample several
// times: what was read stays for a while, although what is fetched ahead wants its memory.
func TestOpenedAgain(t *testing.T) {
	e, dir, paths := openSmall(t, "torch:seed=1", 160)
	order := e.order()
	o, err := order.Order(160, 0)
	if err != nil {
		t.Fatal(err)
	}
	next := make(chan string)
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			for p := range next {
				for range 3 {
					read(t, e, dir, p)
				}
			}
		})
	}
	for pos := range 100 { // the head of the next epoch is not fetched yet
		next <- paths[0][o.At(pos)]
	}
	close(next)
	wg.Wait()
	if s := e.Stats(); s.Misses > 16 {
		t.Errorf("%d of 300 opens had to start their own fetch", s.Misses)
	}
}
