package owner

import (
	"fmt"
	"os"
	"runtime"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"
)

// TestSimulation is a cluster of 1,000 nodes whose caches differ by a factor of 8, before and after one more joins.
// SHOAL_UNITS=100000000 is the size of lab/bench/results/ownership.md, which takes a minute of CPU time.
func TestSimulation(t *testing.T) {
	n := 200_000
	if s := os.Getenv("SHOAL_UNITS"); s != "" {
		var err error
		if n, err = strconv.Atoi(s); err != nil {
			t.Fatal(err)
		}
	}
	var nodes []Node
	var weight float64
	for i := range 1001 {
		nodes = append(nodes, Node{fmt.Sprintf("%016x", mix(uint64(i))), uint32(1<<20 + i%8<<20)})
		weight += float64(nodes[i].Weight)
	}
	joined, share := nodes[1000], float64(nodes[1000].Weight)/weight
	weight -= float64(joined.Weight)
	unit := func(i int) int { return Bucket(fileUnit(i)) }
	size := func(i int) int64 { return 16<<10 + int64(mix(^uint64(i))%(256<<10)) } // photographs: 16 to 272 KiB

	// The table grows by what is reserved for it, and nothing else.
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	owners := New(source, nodes[:1000])
	table := NewTable(owners)
	runtime.ReadMemStats(&after)
	memory := after.TotalAlloc - before.TotalAlloc

	start := cpuTime(t)
	set := owners.Owned(500)
	own := cpuTime(t) - start
	start = cpuTime(t)
	for b := range Buckets {
		table.Of(b)
	}
	fill := cpuTime(t) - start
	start = cpuTime(t)
	of := func(i int) int { return table.Of(unit(i)) }
	owned := byOwner(n, 1000, of, size)
	look := cpuTime(t) - start
	start = cpuTime(t)
	next := table.Next(New(source, nodes))
	follow := cpuTime(t) - start
	start = cpuTime(t)
	mine := byOwner(n, 2, func(i int) int { return b2i(set.Has(unit(i))) }, size)
	pass := cpuTime(t) - start

	var all int64
	balance := 0.0
	for i, bytes := range owned {
		all += bytes
		if i == 500 && bytes != mine[1] {
			t.Fatalf("node %d owns %d bytes, by its set %d", i, bytes, mine[1])
		}
	}
	short := 0.0 // what nodes own less than their shares is not kept by those that own more
	for i, bytes := range owned {
		share := float64(nodes[i].Weight) / weight
		balance = max(balance, float64(bytes)/float64(all)/share)
		short += max(share-float64(bytes)/float64(all), 0)
	}

	// After the join the owner is the new node, or the same as before. A tenth of the units shows it.
	moved := byOwner(n/10, 3, func(i int) int {
		switch next.Of(unit(i * 10)) {
		case 1000:
			return 1
		case of(i * 10):
			return 0
		}
		return 2
	}, func(i int) int64 { return size(i * 10) })

	each := func(d time.Duration) time.Duration { return d / time.Duration(n) }
	t.Logf("%d units of %d GB on 1,000 nodes", n, all/1e9)
	t.Logf("most bytes of a node, by its weight: %.4f of the mean; %.4f of all bytes are not kept if all fit",
		balance, short)
	t.Logf("a node joins: %.5f of the bytes move to it, its share is %.5f; %d bytes move elsewhere",
		float64(moved[1])/float64(moved[0]+moved[1]+moved[2]), share, moved[2])
	t.Logf("CPU time: a node's own buckets %v, all owners %v, those after the join %v; a unit's owner %v and whether "+
		"a node owns it %v, with the sum of bytes",
		own, fill, follow, each(look), each(pass))
	t.Logf("table %.1f MB", float64(memory)/1e6)
	if moved[2] != 0 {
		t.Errorf("%d bytes moved between nodes that stayed", moved[2])
	}
	if n >= 10_000_000 && (balance > 1.3 || short > 0.02) {
		t.Errorf("a node has %.3f times the mean, and %.3f are not kept", balance, short)
	}
	if own > time.Second || follow > 2*time.Second {
		t.Errorf("a node's own buckets take %v, a join %v", own, follow)
	}
}

// cpuTime is what this process has used of the processors: other programs may keep them busy.
func cpuTime(t *testing.T) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano())
}

// byOwner returns the bytes of the units 0..n-1 by what of returns.
func byOwner(n, owners int, of func(i int) int, size func(i int) int64) []int64 {
	sum := make([]int64, owners)
	var mu sync.Mutex
	var wg sync.WaitGroup
	cpus := runtime.GOMAXPROCS(0)
	for c := range cpus {
		wg.Go(func() {
			mine := make([]int64, owners)
			for i := n / cpus * c; i < n && (i < n/cpus*(c+1) || c == cpus-1); i++ {
				mine[of(i)] += size(i)
			}
			mu.Lock()
			defer mu.Unlock()
			for i, s := range mine {
				sum[i] += s
			}
		})
	}
	wg.Wait()
	return sum
}

func BenchmarkOf(b *testing.B) {
	for _, n := range []int{4, 64, 1000} {
		var nodes []Node
		for i := range n {
			nodes = append(nodes, Node{fmt.Sprintf("%016x", mix(uint64(i))), 1 << 20})
		}
		o := New(source, nodes)
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			for i := 0; b.Loop(); i++ {
				o.Of(uint64(i))
			}
		})
	}
}
