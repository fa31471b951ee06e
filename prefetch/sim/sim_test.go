package sim

import (
	"fmt"
	"math"
	"reflect"
	"slices"
	"testing"

	"github.com/shoalfs/shoal/prefetch/order"
	"pgregory.net/rapid"
)

// equal are samples of one size, each an object.
type equal int64

func (s equal) Extents(int) int            { return 1 }
func (s equal) ExtentBytes(int, int) int64 { return int64(s) }

const KB = 1000

// job is a random order of n samples of 100 KB, for two accelerators that take 2,000 of them a second.
func job(n int) Config {
	return Config{
		Order:  func(e int) order.Order { return order.Uniform(n, 1, e) },
		Sizes:  equal(100 * KB),
		Job:    Job{Accelerators: 2, Batch: 20, Workers: 4, Step: 0.02},
		Store:  Store{Latency: 0.03, Connections: 128},
		Memory: 1000 * 100 * KB,
		Epochs: 2,
	}
}

// demandOf is the bytes a second that the accelerators take.
func demandOf(c Config) float64 {
	return float64(c.Accelerators*c.Batch) * 100 * KB / c.Step
}

func run(t testing.TB, c Config) []Epoch {
	t.Helper()
	epochs, err := Run(c)
	if err != nil {
		t.Fatal(err)
	}
	return epochs
}

func near(t *testing.T, what string, got, want, tolerance float64) {
	t.Helper()
	if math.Abs(got-want) > tolerance {
		t.Errorf("%s is %.4f, want %.4f ± %.4f", what, got, want, tolerance)
	}
}

// inMemory is what part of 20,000 samples a job's memory keeps for the next epoch: three quarters of the 1,000 that
// fit. The rest is for what is ahead.
const inMemory = 0.0375

func TestBandwidthBound(t *testing.T) {
	for _, supply := range []float64{0.2, 0.5, 0.9, 2} {
		c := job(20_000)
		c.Bandwidth = supply * demandOf(c)
		kept := 0.
		for _, e := range run(t, c) {
			near(t, "utilisation", e.Utilisation, min(supply/(1-kept), 1), 0.01)
			kept = inMemory
		}
	}
}

// The heads of the answers take their part of the line.
func TestSmallSamplesBandwidthBound(t *testing.T) {
	const size = 8 * KB
	c := job(20_000)
	c.Sizes = equal(size)
	c.Memory = 1000 * size
	c.Bandwidth = 0.5 * demandOf(c) * size / (100 * KB)
	kept := 0.
	for _, e := range run(t, c) {
		near(t, "utilisation", e.Utilisation, 0.5*size/(size+head)/(1-kept), 0.01)
		kept = inMemory
	}
}

func TestRequestsBound(t *testing.T) {
	for _, test := range []struct {
		name string
		set  func(*Config)
		want float64 // requests a second
	}{
		// Of 16 places 14 are for what is fetched ahead; a worker who waits, as one does most of the time
		// here, takes another.
		{"latency", func(c *Config) { c.Connections, c.Accelerators, c.Batch, c.Workers = 16, 1, 40, 1 }, 15 / 0.03},
		{"lognormal latency", func(c *Config) {
			c.Connections, c.LatencySigma, c.Accelerators, c.Batch, c.Workers = 16, 0.5, 1, 40, 4
		}, 15 / (0.03 * math.Exp(0.125))},
		{"request rate", func(c *Config) { c.RequestRate = 700 }, 700},
		{"serial work", func(c *Config) { c.CPU = 0.001 }, 1000},
		{"reading", func(c *Config) { c.Read = 0.005 }, 8 / 0.005},
		{"no workers", func(c *Config) { c.Workers, c.Read = 0, 0.001 }, 40 / (0.02 + 20*0.001)},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := job(10_000)
			c.Epochs = 1 // memory has a part of the next
			test.set(&c)
			for _, e := range run(t, c) {
				near(t, "samples a second, of what is expected", float64(e.Samples)/e.Seconds/test.want, 1, 0.07)
				near(t, "seconds, of the limit", e.Seconds/c.Limits(e).Binding().Seconds, 1.07, 0.08)
			}
		})
	}
}

// The same trace over a line of 1.05 times what the missing share needs. The table:
// `go test -run KeepsBusy -v ./prefetch/sim`.
func TestKeepsBusy(t *testing.T) {
	const n = 30_000
	t.Log("f     utilisation  hits   bytes")
	for _, f := range []float64{0.25, 0.5, 0.75, 0.9} {
		c := job(n)
		c.CacheBytes, c.Warm, c.Epochs = int64(f*n*100*KB), true, 3
		c.Bandwidth = 1.05 * (1 - f) * demandOf(c)
		e := run(t, c)[2]
		hits := float64(e.KeepHits) / n
		t.Logf("%.2f  %.3f        %.3f  %.3f", f, e.Utilisation, hits, float64(e.Bytes)/(n*100*KB))
		near(t, "hits", hits, f, 0.01)
		if e.Utilisation < 0.99 {
			t.Errorf("f=%.2f: the kept set leaves %.4f", f, e.Utilisation)
		}
	}
}

// shardsOf are tars of n samples, so many in each, without headers but with gaps of 1 KiB.
type shardsOf struct{ n, per int }

func (s shardsOf) Len() int          { return s.n }
func (s shardsOf) Rank(file int) int { return file }
func (s shardsOf) At(rank int) int   { return rank }
func (s shardsOf) Extent(rank int) (object int, off, end int64) {
	off = int64(rank%s.per) * (100*KB + 1<<10)
	return rank / s.per, off, off + 100*KB
}

// One request brings many neighbours, so a store of few requests a second feeds the accelerators.
func TestShards(t *testing.T) {
	const n, per = 20_000, 500
	for _, test := range []struct {
		name string
		of   func(e int) order.Order
		bulk bool
		most float64 // requests a sample
	}{
		{"sequential", func(int) order.Order { return order.Sequential(n) }, false, 0.03},
		{"windowed", func(e int) order.Order { return windowed(order.Contiguous(n, per), 1, e, 4) }, false, 0.05},
		{"bulk", func(e int) order.Order { return windowed(order.Contiguous(n, per), 1, e, 4) }, true, 0.05},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := job(n)
			c.Memory = 4000 * 100 * KB
			c.Order, c.Places, c.Bulk, c.RequestRate = test.of, shardsOf{n, per}, test.bulk, 200
			if test.bulk {
				c.CacheBytes = n * 100 * KB
			}
			epochs := run(t, c)
			e := epochs[0]
			if share := float64(e.Requests) / n; share > test.most || e.Utilisation < 0.97 {
				t.Errorf("%.4f requests a sample, utilisation %.3f", share, e.Utilisation)
			}
			if gaps := float64(e.Bytes)/(n*100*KB) - 1; gaps < 0 || gaps > 0.02 {
				t.Errorf("%.3f of the bytes are gaps", gaps)
			}
			if test.bulk && epochs[1].Requests > 0 {
				t.Errorf("%d requests when all is kept", epochs[1].Requests)
			}
		})
	}
}

func TestEqualRunsAreEqual(t *testing.T) {
	c := job(2000)
	c.LatencySigma, c.Bandwidth, c.CacheBytes = 0.5, 120e6, 100e6
	a, b := run(t, c), run(t, c)
	if !reflect.DeepEqual(a, b) {
		t.Errorf("one run: %+v, another: %+v", a, b)
	}
	c.Seed = 1
	if reflect.DeepEqual(a, run(t, c)) {
		t.Error("another seed changes nothing")
	}
}

// uneven are samples of several extents.
type uneven []int64

const unevenExtent = 100

func (u uneven) Extents(f int) int { return int((u[f] + unevenExtent - 1) / unevenExtent) }
func (u uneven) ExtentBytes(f, x int) int64 {
	return min(u[f]-int64(x)*unevenExtent, unevenExtent)
}

func (u uneven) total() (n int64) {
	for _, b := range u {
		n += b
	}
	return n
}

// drawn is a small configuration, of whatever kind.
func drawn(t *rapid.T) (Config, uneven) {
	sizes := uneven(rapid.SliceOfN(
		rapid.Int64Range(0, rapid.SampledFrom([]int64{unevenExtent, 450}).Draw(t, "largest")), 1, 120).Draw(t, "sizes"))
	n := len(sizes)
	world := rapid.IntRange(1, 3).Draw(t, "world")
	torch := rapid.Bool().Draw(t, "torch")
	c := Config{
		Order: func(e int) order.Order {
			if torch { // pads, so that samples occur twice
				return order.Torch(n, 7, e, world, 0, world-1, false)
			}
			return order.Uniform(n, 7, e)
		},
		Samples: n, Sizes: sizes,
		Job: Job{
			Accelerators: rapid.IntRange(1, 4).Draw(t, "accelerators"), Batch: rapid.IntRange(1, 9).Draw(t, "batch"),
			Workers:  rapid.IntRange(0, 4).Draw(t, "workers"),
			Step:     rapid.SampledFrom([]float64{1e-3, 0.1, 1}).Draw(t, "step"),
			Prefetch: rapid.IntRange(0, 5).Draw(t, "prefetch"),
			Read:     rapid.SampledFrom([]float64{0, 0, 1e-3, 0.05}).Draw(t, "read"),
		},
		Store: Store{
			Bandwidth:    rapid.SampledFrom([]float64{0, 1e3, 1e5}).Draw(t, "bandwidth"),
			Latency:      rapid.SampledFrom([]float64{0, 0.01, 0.2}).Draw(t, "latency"),
			LatencySigma: rapid.SampledFrom([]float64{0, 0.5}).Draw(t, "sigma"),
			Connections:  rapid.IntRange(1, 20).Draw(t, "connections"),
			RequestRate:  rapid.SampledFrom([]float64{0, 50}).Draw(t, "rate"),
			CPU:          rapid.SampledFrom([]float64{0, 0.01}).Draw(t, "cpu"),
		},
		CacheBytes: rapid.Int64Range(0, sizes.total()+100).Draw(t, "cache"),
		Memory:     rapid.Int64Range(8*unevenExtent, 4000).Draw(t, "memory"),
		Epochs:     rapid.IntRange(1, 4).Draw(t, "epochs"), Warm: rapid.Bool().Draw(t, "warm"),
		Seed: rapid.Uint64().Draw(t, "seed"),
	}
	return c, sizes
}

func TestRunProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c, sizes := drawn(t)
		line := func(of string) Line {
			return Line{rapid.SampledFrom([]float64{0, 1e3, 1e5}).Draw(t, of+" bandwidth"),
				rapid.SampledFrom([]float64{0, 0.01}).Draw(t, of+" latency")}
		}
		if rapid.Bool().Draw(t, "shared") {
			c.Peers = &Peers{Nodes: rapid.IntRange(1, 4).Draw(t, "nodes"), Line: line("link")}
		}
		if rapid.Bool().Draw(t, "a near tier") {
			tier := line("near")
			c.Near = &tier
		}
		epochs, err := Run(c)
		if err != nil {
			t.Fatal(err)
		}
		if len(epochs) != c.Epochs {
			t.Fatalf("%d epochs of %d", len(epochs), c.Epochs)
		}
		var seconds float64
		var requests, extents int64
		var sum Limits
		for i, e := range epochs {
			positions := c.Order(i).Len()
			if e.Epoch != i || e.Samples != positions || e.KeepHits+e.RingHits+e.Waits != int64(positions) {
				t.Fatalf("%+v: of %d positions", e, positions)
			}
			global := c.Accelerators * c.nodes() * c.Batch
			var steps int64
			for _, n := range e.Stalls {
				steps += n
			}
			if want := (positions + global - 1) / global; steps != int64(want) {
				t.Fatalf("%d steps of %d", steps, want)
			}
			if e.Utilisation <= 0 || e.Utilisation > 1 || e.Seconds < e.Compute-1e-9 ||
				math.Abs(e.Seconds-e.Compute-e.Stall) > 1e-6 {
				t.Fatalf("%+v: times do not fit", e)
			}
			if e.MemoryPeak > c.Memory {
				t.Fatalf("%d bytes of %d in memory", e.MemoryPeak, c.Memory)
			}
			for _, a := range []Answers{{e.Bytes, e.Requests}, e.Near, e.Peers} {
				if a.Bytes > 0 && (a.Requests == 0 || a.Bytes > (a.Requests+1)*unevenExtent) ||
					c.nodes() == 1 && a.Bytes > a.Requests*unevenExtent {
					t.Fatalf("%d bytes by %d requests", a.Bytes, a.Requests)
				}
			}
			if c.nodes() == 1 && e.Peers.Bytes > 0 || c.Near == nil && e.Near.Bytes > 0 {
				t.Fatalf("%+v: from peers or a tier that are not there", e)
			}
			l := c.Limits(e)
			seconds += e.Seconds
			sum.Bandwidth += l.Bandwidth
			sum.Rate += l.Rate
			sum.CPU += l.CPU
			sum.Near += l.Near
			sum.Link += l.Link
			requests += e.Requests
		}
		for f := range sizes {
			extents += int64(sizes.Extents(f))
		}
		if c.Warm {
			extents = 0
		}
		if c.CacheBytes >= sizes.total() && c.CacheBytes > 0 && c.Peers == nil && requests > extents {
			t.Fatalf("%d requests for %d extents, though all of them fit", requests, extents)
		}
		// Everything counted was sent, and nearly all has arrived, by the end. A request stands for one of each node.
		for name, limit := range map[string]float64{"bandwidth": sum.Bandwidth, "near tier": sum.Near, "link": sum.Link,
			"rate": sum.Rate - float64(c.nodes())/max(c.RequestRate, 1), "cpu": sum.CPU} {
			if seconds < limit-1e-6 {
				t.Fatalf("%g s, of which the %s alone takes %g", seconds, name, limit)
			}
		}
	})
}

// The plan of an epoch comes to a sample that the last reader of the one before has read in part only. What that
// one has had goes into the cache with the rest, and is not fetched again.
func TestReadInPart(t *testing.T) {
	sizes := uneven{0, 1, 301}
	e := run(t, Config{
		Order: func(e int) order.Order { return order.Uniform(len(sizes), 7, e) }, Sizes: sizes,
		Job: Job{Accelerators: 1, Batch: 1, Step: 1e-3}, Store: Store{Connections: 1, RequestRate: 50},
		CacheBytes: 393, Memory: 800, Epochs: 2,
	})
	if all := e[0].Requests + e[1].Requests; all != 5 {
		t.Errorf("%d requests for 5 extents, though all of them fit", all)
	}
}

// What is fetched is what is not in the cache, each extent once.
func TestBytesAreMissesBytes(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c, sizes := drawn(t)
		c.Order = func(e int) order.Order { return order.Uniform(len(sizes), 7, e) }
		c.Warm = true
		var kept int64
		r := keptBy(t, c)
		for f := range sizes {
			if r(f) {
				kept += sizes[f]
			}
		}
		epochs, err := Run(c)
		if err != nil {
			t.Fatal(err)
		}
		missed, sum := sizes.total()-kept, int64(0)
		single := slices.Max(sizes) <= unevenExtent
		for i, e := range epochs {
			sum += e.Bytes
			// What is staged at the end of an epoch is not fetched again at the head of the next. Extents
			// of a sample that is open already are fetched for its next reader, and then read by this one.
			all := int64(i+1) * missed
			if sum > all+c.Memory || sum < all-int64(i+1)*c.Memory {
				t.Fatalf("by epoch %d %d bytes are fetched, of %d that are missing", i, sum, all)
			}
			if single && (e.Bytes > missed || i == 0 && e.Bytes != missed) {
				t.Fatalf("epoch %d fetches %d bytes, of %d that are missing", i, e.Bytes, missed)
			}
		}
	})
}

// keptBy returns which samples are kept at the start.
func keptBy(t *rapid.T, c Config) func(sample int) bool {
	s := &simulation{Config: c, orders: map[int]order.Locator{}}
	if err := s.volume.init(s); err != nil {
		t.Fatal(err)
	}
	return func(f int) bool { return s.volume.cache.has(f, s.volume.extent(f, 0)) }
}

func TestMoreBandwidthDoesNotHurt(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := job(1000)
		c.CacheBytes = rapid.Int64Range(0, 1000*100*KB).Draw(t, "cache")
		c.Bandwidth = rapid.Float64Range(0.05, 1.5).Draw(t, "share of the demand") * demandOf(c)
		c.LatencySigma = 0.4
		c.Seed = rapid.Uint64().Draw(t, "seed")
		less, err := Run(c)
		if err != nil {
			t.Fatal(err)
		}
		c.Bandwidth *= rapid.Float64Range(1, 4).Draw(t, "times")
		more, err := Run(c)
		if err != nil {
			t.Fatal(err)
		}
		for i := range less {
			if more[i].Utilisation < less[i].Utilisation-0.02 {
				t.Fatalf("epoch %d: %.4f, and with more bandwidth %.4f", i, less[i].Utilisation, more[i].Utilisation)
			}
		}
	})
}

func TestWrongConfigurations(t *testing.T) {
	for name, spoil := range map[string]func(*Config){
		"no order":      func(c *Config) { c.Order = nil },
		"no sizes":      func(c *Config) { c.Sizes = nil },
		"unknown order": func(c *Config) { c.Order = func(int) order.Order { return nil } },
		"unknown epoch 1": func(c *Config) {
			c.Order = func(e int) order.Order {
				if e > 0 {
					return nil
				}
				return order.Sequential(10)
			}
		},
		"empty":        func(c *Config) { c.Order = func(int) order.Order { return order.Sequential(0) } },
		"accelerators": func(c *Config) { c.Accelerators = 0 },
		"batch":        func(c *Config) { c.Batch = 0 },
		"workers":      func(c *Config) { c.Workers = -1 },
		"step":         func(c *Config) { c.Step = 0 },
		"step NaN":     func(c *Config) { c.Step = math.NaN() },
		"bandwidth":    func(c *Config) { c.Bandwidth = math.Inf(1) },
		"latency":      func(c *Config) { c.Latency = -1 },
		"connections":  func(c *Config) { c.Connections = 0 },
		"epochs":       func(c *Config) { c.Epochs = 0 },
		"cache":        func(c *Config) { c.CacheBytes = -1 },
		"memory":       func(c *Config) { c.Memory = 799 * KB },
		"no nodes":     func(c *Config) { c.Peers = &Peers{} },
		"tier":         func(c *Config) { c.Near = &Line{Latency: -1} },
	} {
		c := job(100)
		spoil(&c)
		if _, err := Run(c); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

func TestCacheFor(t *testing.T) {
	const n = 5_000
	c := job(n)
	c.Bandwidth = 0.5 * demandOf(c)
	runs := 0
	bytes, ok, err := CacheFor(c, 0.95, n*100*KB, func(run, of int) {
		if runs++; run >= of {
			t.Errorf("run %d of %d", run, of)
		}
	})
	if err != nil || !ok || runs == 0 {
		t.Fatal(bytes, ok, err, runs)
	}
	// What is missing takes (1-f)/0.5 of the compute time. Three quarters of the memory are a cache, too.
	near(t, "the part that is cached", float64(bytes)/(n*100*KB), 1-0.5/0.95-0.15, 0.03)

	c.CacheBytes = bytes
	bandwidth, ok, err := BandwidthFor(c, 0.95, nil)
	if err != nil || !ok {
		t.Fatal(ok, err)
	}
	near(t, "the bandwidth, of the demand's", bandwidth/demandOf(c), 0.5, 0.04)

	c.Workers, c.Read = 0, 1
	if bytes, ok, err := CacheFor(c, 0.95, n*100*KB, nil); ok || err != nil {
		t.Errorf("%d bytes of cache help a trainer that reads too slowly (%v)", bytes, err)
	}
	if _, ok, err := BandwidthFor(c, 0.95, nil); ok || err != nil {
		t.Errorf("bandwidth helps a trainer that reads too slowly (%v)", err)
	}
}

// Four nodes take turns at the samples of an order, and each byte leaves the store once while their caches have room:
// the counts are those that a hand computes.
func TestPeers(t *testing.T) {
	const n, all, nodes = 8_000, 8_000 * 100 * KB, 4
	for _, test := range []struct {
		caches                      float64 // of the dataset, together
		store0, peers0, disk0       float64 // of the dataset: what epoch 0 reads, where from
		store1, peers1, disk1, most float64
	}{
		// A quarter of what is kept is the reader's own. In epoch 0 a peer passes on what it has to fetch.
		{1.2, 1, 0.75, 0, 0, 0.75, 0.25, 0.01},
		{0.8, 1, 0.6, 0, 0.2, 0.6, 0.2, 0.01},
		{0, 1, 0, 0, 1, 0, 0, 0.04}, // what lies in memory at the end of epoch 0 is not fetched for epoch 1
	} {
		c := job(n)
		c.Memory = 100 * 100 * KB
		c.Peers, c.CacheBytes = &Peers{Nodes: nodes}, int64(test.caches*all/nodes)
		e := run(t, c)
		for i, want := range [][3]float64{{test.store0, test.peers0, test.disk0},
			{test.store1, test.peers1, test.disk1}} {
			near(t, fmt.Sprintf("caches of %g, epoch %d: the part from the store", test.caches, i),
				float64(e[i].Bytes)/all, want[0], test.most)
			near(t, "the part from peers", float64(e[i].Peers.Bytes)/all, want[1], 0.02)
			near(t, "the part from disk", float64(e[i].DiskBytes)/all, want[2], 0.02)
			if e[i].Samples != n || e[i].KeepHits+e[i].RingHits+e[i].Waits != n {
				t.Errorf("epoch %d: %+v", i, e[i])
			}
		}
	}
}

// A node whose part is small prefetches the next epoch at once. Others read those samples now, so they leave the store
// once.
func TestManyPeers(t *testing.T) {
	const n = 1_000
	c := job(n)
	c.Batch, c.Peers, c.CacheBytes = 4, &Peers{Nodes: 100}, n*100*KB
	for i, e := range run(t, c) {
		if want := []int64{n, 0}[min(i, 1)]; e.Requests != want {
			t.Errorf("epoch %d: %d requests to the store, want %d", i, e.Requests, want)
		}
	}
}

// Three quarters of the bytes come over a link that brings half of that, or a fifth over the store's line, which the
// nodes share: then the accelerators of each are half busy, and the limits say by what.
func TestPeersBound(t *testing.T) {
	c := job(8_000)
	c.Memory = 100 * 100 * KB
	c.Peers, c.CacheBytes, c.Warm = &Peers{Nodes: 4, Line: Line{Bandwidth: 0.5 * 0.75 * demandOf(c), Latency: 1e-3}},
		2_000*100*KB, true
	e := run(t, c)[1]
	near(t, "utilisation at the link's limit", e.Utilisation, 0.5, 0.02)
	if l := c.Limits(e).Binding(); l.Name != "the link" {
		t.Errorf("bound by %s", l.Name)
	}
	c.CacheBytes, c.Peers.Bandwidth = 1_600*100*KB, 0
	c.Bandwidth = 0.5 * 0.2 * 4 * demandOf(c)
	e = run(t, c)[1]
	near(t, "utilisation at the store's limit", e.Utilisation, 0.5, 0.03)
	if l := c.Limits(e).Binding(); l.Name != "bandwidth" {
		t.Errorf("bound by %s", l.Name)
	}
}

// What was read once comes from the near tier, over its line.
func TestNear(t *testing.T) {
	const n, all = 8_000, 8_000 * 100 * KB
	for _, nodes := range []int{1, 4} {
		c := job(n)
		c.Memory, c.CacheBytes = 100*100*KB, int64(0.4*all/nodes)
		c.Near = &Line{Bandwidth: 0.5 * 0.6 * float64(nodes) * demandOf(c), Latency: 1e-3}
		if nodes > 1 {
			c.Peers = &Peers{Nodes: nodes}
		}
		e := run(t, c)
		near(t, "epoch 0, from the store", float64(e[0].Bytes)/all, 1, 0.02)
		near(t, "epoch 1, from the store", float64(e[1].Bytes)/all, 0, 0.02)
		near(t, "epoch 1, from the tier", float64(e[1].Near.Bytes)/all, 0.6, 0.03)
		near(t, "utilisation at the tier's limit", e[1].Utilisation, 0.5, 0.03)
		if l := c.Limits(e[1]).Binding(); l.Name != "the near tier" {
			t.Errorf("bound by %s", l.Name)
		}
		c.Warm = true
		if e = run(t, c); e[0].Bytes != 0 {
			t.Errorf("%d bytes from the store of what the tier has", e[0].Bytes)
		}
	}
}

// The simulator's speed: ns/op over the samples of an epoch.
func BenchmarkRun(b *testing.B) {
	const n = 1_000_000
	c := job(n)
	c.CacheBytes, c.Warm, c.Epochs = n/2*100*KB, true, 1
	c.Bandwidth, c.LatencySigma = 0.55*demandOf(c), 0.3
	b.ReportAllocs()
	for b.Loop() {
		run(b, c)
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/n, "ns/sample")
}

// What fits the memory is fetched once, though nothing is cached: it stays until the memory is wanted.
func TestRemains(t *testing.T) {
	const n = 400
	c := job(n)
	c.Epochs = 3
	c.Memory = 2 * n * 100 * KB
	e, err := Run(c)
	if err != nil {
		t.Fatal(err)
	}
	if e[0].Requests != n || e[1].Requests != 0 || e[2].Requests != 0 {
		t.Errorf("twice the memory: %d, %d, %d requests for %d samples", e[0].Requests, e[1].Requests, e[2].Requests, n)
	}
	c.Memory = n * 100 * KB / 4
	if e, err = Run(c); err != nil {
		t.Fatal(err)
	}
	if e[2].Requests < n*3/4 || e[2].Requests > n || e[2].MemoryPeak > c.Memory {
		t.Errorf("a quarter of the memory: %d requests for %d samples, %d B of %d",
			e[2].Requests, n, e[2].MemoryPeak, c.Memory)
	}
}

// A reader who fetches something himself does it in a place of his own, and takes none of those for what is
// fetched ahead: 14 requests ahead and 2 of readers bring what the accelerator needs, 12 and 2 do not.
func TestDemandTakesItsOwnPlaces(t *testing.T) {
	const n, size = 1024, 256 << 10
	e := run(t, Config{
		Order: func(e int) order.Order { return order.Uniform(n, 7, e) }, Samples: n, Sizes: equal(size), Warm: true,
		Job:        Job{Accelerators: 1, Batch: 16, Workers: 4, Step: 0.083, Prefetch: 8},
		Store:      Store{Latency: 0.1, LatencySigma: 0.3, Connections: 16},
		CacheBytes: n / 4 * size, Memory: 36 << 20, Epochs: 3,
	})
	if u := e[2].Utilisation; u < 0.98 {
		t.Errorf("utilisation %.3f", u)
	}
}

// windowed is order.Windowed where nothing is wrong.
func windowed(g order.Groups, seed uint64, epoch, window int) order.Locator {
	o, err := order.Windowed(g, seed, epoch, window)
	if err != nil {
		panic(err)
	}
	return o
}
