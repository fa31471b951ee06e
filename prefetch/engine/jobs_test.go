package engine

import (
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"testing"

	"github.com/shoalfs/shoal/cache/cachedir"
	"github.com/shoalfs/shoal/prefetch/order"
)

// twoJobs has two jobs read three epochs side by side on one mount, each in torch's shuffle by a seed of its own and
// with workers that are new in every epoch. It returns how many GETs that took, of 12,000 opens.
func twoJobs(t *testing.T, spec string) int {
	t.Helper()
	const n, workers, batch, epochs = 2000, 4, 16, 3
	dir := t.TempDir()
	noise := make([]byte, 1<<20)
	_, _ = rand.NewChaCha8([32]byte{7}).Read(noise)
	for i := range n {
		writeFile(t, filepath.Join(dir, fmt.Sprintf("img%04d.jpg", i)), noise[i:][:80<<10])
	}
	o, err := order.Parse(spec)
	if err != nil {
		t.Fatal(err)
	}
	e := open(t, HostConfig{Options: cachedir.Options{Path: t.TempDir(), Memory: 128 << 20}}, Config{Source: "file://" + dir, Order: o})
	defer closeEngine(t, e)
	for epoch := range epochs {
		first, second := order.Torch(n, 1, epoch, 1, 0, 0, false), order.Torch(n, 1001, epoch, 1, 0, 0, false)
		for pos := range n {
			process := uint32(100*epoch + 1 + pos/batch%workers)
			openAs(t, e, process, first.At(pos))
			openAs(t, e, process+workers, second.At(pos))
			if i := e.orders.inference.Load(); i != nil && pos%16 == 0 { // trainers are slower than the daemon
				waitFor(t, "it has looked at all opens", func() bool {
					i.mu.Lock()
					defer i.mu.Unlock()
					return len(i.opens) == 0 && !i.said.active
				})
			}
		}
	}
	s := e.Stats()
	return int(s.GetRequests - s.Hedges.Sent)
}

// Jobs with seeds of their own on one mount cost no more than without any order, whichever of them the order is of: the
// other's opens move nothing, and what it reads stays for the one whose order is known.
func TestTwoJobs(t *testing.T) {
	if testing.Short() {
		t.Skip("make night runs it")
	}
	none := twoJobs(t, "none")
	for _, spec := range []string{"torch:seed=1", "torch:seed=1001", "auto"} {
		n := twoJobs(t, spec)
		t.Logf("--order %s: %d GETs, none %d", spec, n, none)
		if n > none {
			t.Errorf("--order %s took %d GETs, none took %d", spec, n, none)
		}
	}
}
