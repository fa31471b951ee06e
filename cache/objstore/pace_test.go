package objstore

import (
	"math"
	"math/rand/v2"
	"testing"

	"pgregory.net/rapid"
)

// model is a store, and the client before it, as a closed queueing network of n requests sees them:
// its goodput is the least of what latency, workers, bandwidth and the processor let through.
type model struct {
	latency   float64 // seconds to the first byte
	size      float64 // bytes a request
	bandwidth float64 // bytes/s; 0: no limit
	slots     float64 // requests that the server works on at once; 0: no limit
	cpu       float64 // seconds of our processor a request; 0: none
	batching  float64 // part of cpu that is saved by a doubling of the number, as wake-ups are shared
	limit     float64 // requests/s above which it says SlowDown; 0: none
}

func (m model) goodput(n int) float64 {
	inside := float64(n)
	if m.slots > 0 {
		inside = min(inside, m.slots)
	}
	rate := inside / m.latency
	if m.cpu > 0 {
		rate = min(rate, 1/(m.cpu*math.Pow(1-m.batching, math.Log2(float64(n)))))
	}
	if m.bandwidth > 0 {
		rate = min(rate, m.bandwidth/m.size)
	}
	return rate * m.size
}

// run feeds p rounds of m with a noise that is uniform in ±noise, and returns all numbers of places.
func (m model) run(p *pace, rounds int, noise float64, rng *rand.Rand) (places []int) {
	for range rounds {
		g := m.goodput(p.places) * (1 + noise*(2*rng.Float64()-1))
		if m.limit > 0 && g > m.limit*m.size {
			p.throttled()
			g = m.limit * m.size
		}
		places = append(places, p.round(g))
	}
	return places
}

func (m model) best(most int) (g float64) {
	for n := 1; n <= most; n++ {
		g = max(g, m.goodput(n))
	}
	return g
}

func TestPace(t *testing.T) {
	for _, c := range []struct {
		name      string
		m         model
		ceiling   int
		low, high int // where it must stay
	}{
		{"latency binds", model{latency: 0.030, size: 62e3}, 512, 512, 512},
		{"the reference rig: 8% from 256 to 512", model{latency: 0.030, size: 62e3, cpu: 400e-6, batching: 0.08},
			512, 512, 512},
		{"a server of 16 workers", model{latency: 0.030, size: 62e3, slots: 16}, 512, 16, 32},
		{"a link of 100 MB/s", model{latency: 0.030, size: 1e6, bandwidth: 100e6}, 512, 8, 16},
		{"our processor binds", model{latency: 0.001, size: 62e3, cpu: 200e-6}, 512, 8, 16},
		{"a small ceiling", model{latency: 0.030, size: 62e3}, 4, 4, 4},
		{"one place", model{latency: 0.030, size: 62e3}, 1, 1, 1},
		{"a ceiling beyond the start's double", model{latency: 0.030, size: 62e3}, 2000, 2000, 2000},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := newPace(c.ceiling)
			rng := rand.New(rand.NewPCG(1, 2))
			c.m.run(p, 60, 0.005, rng)
			held := 0
			for _, n := range c.m.run(p, 400, 0.005, rng) {
				if c.low <= n && n <= c.high {
					held++
				}
			}
			if held < 340 {
				t.Errorf("it is between %d and %d in %d of 400 rounds; home %d", c.low, c.high, held, p.home)
			}
		})
	}
}

// TestPaceStartsFast: a cold start on the rig is at its best number after one round.
func TestPaceStartsFast(t *testing.T) {
	p := newPace(512)
	if got := p.round(model{latency: 0.030, size: 62e3}.goodput(p.places)); got != 512 {
		t.Errorf("%d places after the first round, want 512", got)
	}
}

// TestPaceFollows: a store that gets slower, or faster, is measured again.
func TestPaceFollows(t *testing.T) {
	p := newPace(512)
	rng := rand.New(rand.NewPCG(3, 4))
	fast := model{latency: 0.030, size: 62e3}
	slow := model{latency: 0.030, size: 62e3, slots: 16}
	fast.run(p, 100, 0.01, rng)
	if p.home != 512 {
		t.Fatalf("%d places before a fast store", p.home)
	}
	slow.run(p, 100, 0.01, rng)
	if p.home > 64 {
		t.Fatalf("%d places before a store of 16 workers", p.home)
	}
	fast.run(p, 200, 0.01, rng)
	if p.home != 512 {
		t.Fatalf("%d places before a store that is fast again", p.home)
	}
}

// TestPaceSlowDown: a SlowDown halves at once, a burst of them in one round only once; and what grows
// again stays near the limit without provoking it all the time.
func TestPaceSlowDown(t *testing.T) {
	p := newPace(512)
	model{latency: 0.030, size: 62e3}.run(p, 50, 0, rand.New(rand.NewPCG(5, 6)))
	for range 100 {
		p.throttled()
	}
	if p.places != 256 {
		t.Fatalf("%d places after a burst of SlowDowns at 512, want 256", p.places)
	}
	m := model{latency: 0.030, size: 62e3, limit: 3000} // 90 places
	m.run(p, 200, 0.01, rand.New(rand.NewPCG(7, 8)))
	sum, throttled := 0.0, 0
	const rounds = 1000
	for _, n := range m.run(p, rounds, 0.01, rand.New(rand.NewPCG(9, 10))) {
		sum += min(m.goodput(n), m.limit*m.size)
		if m.goodput(n) > m.limit*m.size {
			throttled++
		}
	}
	if part := sum / rounds / (m.limit * m.size); part < 0.6 || throttled > rounds/10 {
		t.Errorf("%.0f%% of the limit, above it in %d of %d rounds", 100*part, throttled, rounds)
	}
}

// TestPaceModel: whatever the store, the pace comes within 10% of the best goodput and stays between
// its floor and its ceiling.
func TestPaceModel(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		m := model{
			latency: rapid.Float64Range(0.0005, 0.5).Draw(rt, "latency"),
			size:    rapid.Float64Range(1e3, 8e6).Draw(rt, "size"),
		}
		if rapid.Bool().Draw(rt, "bandwidth binds") {
			m.bandwidth = rapid.Float64Range(1e6, 1e10).Draw(rt, "bandwidth")
		}
		if rapid.Bool().Draw(rt, "workers bind") {
			m.slots = float64(rapid.IntRange(1, 2000).Draw(rt, "slots"))
		}
		if rapid.Bool().Draw(rt, "processor binds") {
			m.cpu = rapid.Float64Range(20e-6, 2e-3).Draw(rt, "cpu")
		}
		ceiling := rapid.IntRange(1, 1024).Draw(rt, "ceiling")
		seed := rapid.Uint64().Draw(rt, "seed")
		p := newPace(ceiling)
		for _, n := range m.run(p, 300, 0.005, rand.New(rand.NewPCG(seed, 1))) {
			if n < min(paceFloor, ceiling) || n > ceiling {
				rt.Fatalf("%d places, floor %d, ceiling %d", n, paceFloor, ceiling)
			}
		}
		if got, best := m.goodput(p.home), m.best(ceiling); got < 0.9*best {
			rt.Fatalf("goodput %.3g at %d places, best %.3g", got, p.home, best)
		}
	})
}

// SetLimit sets the number of places, which is fixed from then on. It does not affect requests in flight.
func (l *Limiter) SetLimit(n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.pace = nil
	l.n = max(1, n)
	l.dispatch()
}
