package sim

import (
	"os"
	"runtime"
	"strconv"
	"testing"

	"github.com/shoalfs/shoal/prefetch/order"
)

// A sample takes a byte for where it is just now, and three bits: kept, and read in this epoch and in the next. All
// else is as much as is in memory or in flight. The orders themselves are not counted: uniform computes each position,
// torch's permutations are lists.
//
// SHOAL_SIM_SAMPLES=100000000 go test -run TestMemoryOfManySamples -v -timeout 1h ./prefetch/sim
func TestMemoryOfManySamples(t *testing.T) {
	n := 10_000_000
	if testing.Short() {
		n = 1_000_000
	}
	if text := os.Getenv("SHOAL_SIM_SAMPLES"); text != "" {
		var err error
		if n, err = strconv.Atoi(text); err != nil {
			t.Fatal(err)
		}
	}
	for _, test := range []struct {
		order string
		part  int     // of the samples, for time
		most  float64 // bytes a sample beside the orders
	}{
		{"uniform:seed=1", 1, 1.375},
		{"torch:seed=1", 10, 1.375},
	} {
		n := n / test.part
		t.Run(test.order, func(t *testing.T) {
			spec, err := order.Parse(test.order)
			if err != nil {
				t.Fatal(err)
			}
			before := live()
			first := order.Index(mustOrder(t, spec, n, 0))
			orders := 2 * (live() - before) // this epoch's and the next one's
			runtime.KeepAlive(first)
			before = live()
			c := job(n)
			c.Order = func(e int) order.Order { return mustOrder(t, spec, n, e) }
			c.CacheBytes, c.Warm, c.Epochs = int64(n)/2*100*KB, true, 1
			c.Batch, c.Step = 200, 0.2 // the same rate in fewer steps
			c.Bandwidth = 0.55 * demandOf(c)
			var peak int64
			looked := -1
			c.Watch = func(_, step, steps int) bool {
				if at := 16 * step / steps; at > looked {
					looked, peak = at, max(peak, live()-before)
				}
				return true
			}
			run(t, c)
			beside := float64(peak-orders) / float64(n)
			t.Logf("%d samples: %.1f MB at most, of which the orders take %.1f MB: %.2f bytes a sample beside",
				n, float64(peak)/1e6, float64(orders)/1e6, beside)
			if fixed := 1e6 / float64(n); beside > test.most+fixed { // what lies in memory and flies
				t.Errorf("%.2f bytes a sample beside the orders, want %.2f", beside, test.most+fixed)
			}
		})
	}
}

func mustOrder(t *testing.T, spec order.Spec, n, epoch int) order.Order {
	o, err := spec.Order(n, epoch)
	if err != nil {
		t.Fatal(err)
	}
	return o
}

// live returns the bytes of the heap that are in use.
func live() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}
