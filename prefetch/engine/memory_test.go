package engine

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/shoalfs/shoal/cache/cachedir"
	"github.com/shoalfs/shoal/prefetch/order"
)

// memoryCase is jobs that read three epochs side by side on one mount, each in torch's shuffle by a seed of its own,
// with workers that are new in every epoch. disk and memory are shares of the data.
type memoryCase struct {
	jobs         int
	disk, memory float64
	order        string // none, auto, told
}

const memoryFiles, memorySize = 2000, 38 << 10

// gets returns how many GETs that takes.
func (c memoryCase) gets(t *testing.T, dir string) int {
	t.Helper()
	const workers, batch, epochs = 4, 16, 3
	o, err := order.Parse(strings.Replace(c.order, "told", "auto", 1))
	if err != nil {
		t.Fatal(err)
	}
	all := float64(memoryFiles * memorySize)
	e := open(t, HostConfig{Options: cachedir.Options{Path: t.TempDir(), Size: int64(c.disk * all), Memory: 256 << 20}},
		Config{Source: "file://" + dir, Order: o})
	defer closeEngine(t, e)
	ledger := e.cache.Ledger()
	over := ledger.Limit() - int64(c.memory*all)
	ledger.Withhold(over)
	defer ledger.Withhold(-over)
	for epoch := range epochs {
		var orders []order.Order
		for job := range c.jobs {
			o := order.Torch(memoryFiles, uint64(1+1000*job), epoch, 1, 0, 0, false)
			orders = append(orders, o)
			if c.order != "told" {
				continue
			}
			var b strings.Builder
			for pos := range memoryFiles {
				fmt.Fprintf(&b, "img%04d.jpg\n", o.At(pos))
			}
			if err := e.PutPlan(fmt.Sprint("job", job), []byte(b.String())); err != nil {
				t.Fatal(err)
			}
		}
		for pos := range memoryFiles {
			for job, o := range orders {
				openAs(t, e, uint32(1000*epoch+100*job+1+pos/batch%workers), o.At(pos))
			}
			if pos%batch > 0 {
				continue
			}
			// trainers are slower than the daemon
			waitFor(t, "what came is written, and all opens were looked at", func() bool {
				i := e.orders.inference.Load()
				if i == nil {
					return e.cache.Stats().DiskQueued == 0
				}
				i.mu.Lock()
				defer i.mu.Unlock()
				return e.cache.Stats().DiskQueued == 0 && len(i.opens) == 0 && !i.said.active
			})
		}
	}
	s := e.Stats()
	return int(s.GetRequests - s.Hedges.Sent)
}

// An order that is known costs no more GETs than none, whatever the cache, the memory and the jobs beside.
// SHOAL_MEMORY=all is the table of lab/bench/results/memory.md that is without a mount.
func TestOrderCostsNoGets(t *testing.T) {
	disks, memories, jobs := []float64{1. / 2}, []float64{1. / 4}, []int{1, 2}
	if testing.Short() {
		jobs = jobs[1:]
	}
	if os.Getenv("SHOAL_MEMORY") == "all" {
		disks, memories, jobs = []float64{0, 1. / 8, 1. / 2, 9. / 8}, []float64{1. / 50, 1. / 4, 1. / 2}, []int{1, 2, 3}
	}
	dir := t.TempDir()
	noise := make([]byte, 1<<20)
	_, _ = rand.NewChaCha8([32]byte{7}).Read(noise)
	for i := range memoryFiles {
		writeFile(t, filepath.Join(dir, fmt.Sprintf("img%04d.jpg", i)), noise[i:][:memorySize])
	}
	t.Log("| cache | memory | jobs | none | auto | told | auto/none | told/none |")
	for _, disk := range disks {
		for _, memory := range memories {
			for _, n := range jobs {
				var got [3]int
				var of [3]float64
				for i, order := range []string{"none", "auto", "told"} {
					got[i] = memoryCase{jobs: n, disk: disk, memory: memory, order: order}.gets(t, dir)
					of[i] = float64(got[i]) / float64(got[0])
				}
				t.Logf("| %.3f | %.2f | %d | %d | %d | %d | %.3f | %.3f |",
					disk, memory, n, got[0], got[1], got[2], of[1], of[2])
				if max(of[1], of[2]) > 1.02 {
					t.Errorf("cache %.3f, memory %.2f, %d jobs: an order cost GETs", disk, memory, n)
				}
			}
		}
	}
}
