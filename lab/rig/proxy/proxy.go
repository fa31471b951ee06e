// Package proxy makes an S3 server on loopback behave like one far away, and on request like a broken one: it adds
// lognormal latency to the first byte, limits the bandwidth, and injects scripted faults.
//
// The HTTP is net/http/httputil's (forward.go). Heads keep what the client signed (the Host header, path and query). It
// shares the cores with what is being measured: BenchmarkGet (objects of 63 kB, two cores) gives 95 µs of CPU a GET
// under load, and 200 when 30 ms of latency leave the cores mostly idle (waking up costs more then); 1,900 GETs a
// second then, which the latency bounds.
//
// Traps:
//
//   - The latency is counted from the arrival of the request and overlaps the server's own work: a
//     response never leaves earlier than that, and no later than the server allows. A median of
//     30 ms is thus 30 ms as the client sees it, not 30 ms and the server.
//   - Latency is per request, as on a real network, not per byte. The bandwidth, in contrast, is one bucket for all.
//   - Faults are chosen per request, by rules in order; the first rule that fires wins.
package proxy

import (
	"context"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"sync"
	"sync/atomic"
	"time"
)

// Options says how the far store behaves.
type Options struct {
	Latency time.Duration // the median time from a request's arrival to the first byte of its response
	// Sigma is the standard deviation of the latency's logarithm; 0 makes every request take
	// exactly Latency. At 0.3 the 99th percentile is twice the median.
	Sigma float64
	// Bandwidth limits responses of known length (all objects are), all connections together, in
	// bytes/s; 0 is no limit.
	Bandwidth int64
	Faults    []Fault // are tried in order for each request
	Seed      uint64  // makes latencies and random faults repeatable, as far as the order of requests is
}

// Stats counts what has passed since the start. An object GET is a GET of one key's content, not a
// listing or another sub-resource.
type Stats struct {
	Requests              int64
	Gets                  int64 // object GETs received
	GetBytes              int64 // body bytes sent in answer to object GETs
	Heads, Lists, Puts    int64
	PutBytes              int64
	InFlight, MaxInFlight int64
	Faults                map[string]int64 // injected, by kind
}

// Sub returns the difference of the counters s - o. The gauges InFlight and MaxInFlight stay s's.
func (s Stats) Sub(o Stats) Stats {
	d := s
	d.Requests -= o.Requests
	d.Gets -= o.Gets
	d.GetBytes -= o.GetBytes
	d.Heads -= o.Heads
	d.Lists -= o.Lists
	d.Puts -= o.Puts
	d.PutBytes -= o.PutBytes
	d.Faults = make(map[string]int64, len(s.Faults))
	for k, n := range s.Faults {
		if n -= o.Faults[k]; n != 0 {
			d.Faults[k] = n
		}
	}
	return d
}

// received counts a request that begins.
func (s *Stats) received(op Op, fault *Fault) {
	s.Requests++
	switch op {
	case OpGet:
		s.Gets++
	case OpHead:
		s.Heads++
	case OpList:
		s.Lists++
	case OpPut:
		s.Puts++
	}
	s.InFlight++
	s.MaxInFlight = max(s.MaxInFlight, s.InFlight)
	if fault != nil {
		s.Faults[string(fault.Kind)]++
	}
}

// Proxy is a running proxy.
type Proxy struct {
	URL string // the endpoint to give to clients, "http://HOST:PORT"

	server  *http.Server
	forward *httputil.ReverseProxy
	cancel  context.CancelFunc
	wg      sync.WaitGroup // the accepting goroutine and one for each client connection
	shape   atomic.Pointer[shape]

	statsMu sync.Mutex
	stats   Stats
}

// Start listens on loopback and forwards to the S3 server at upstream ("http://host:port") until Stop or the
// end of ctx.
func Start(ctx context.Context, upstream string, o Options) (*Proxy, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("proxy: %w", err)
	}
	p, err := Serve(ctx, l, upstream, o)
	if err != nil {
		_ = l.Close()
	}
	return p, err
}

// Serve is Start on a listener, which it closes in the end.
func Serve(ctx context.Context, l net.Listener, upstream string, o Options) (*Proxy, error) {
	u, err := url.Parse(upstream)
	if err != nil || u.Scheme != "http" || u.Host == "" {
		return nil, fmt.Errorf("proxy: upstream %q: want http://host:port", upstream)
	}
	sh, err := newShape(o)
	if err != nil {
		return nil, err
	}
	p := &Proxy{URL: "http://" + l.Addr().String(), stats: Stats{Faults: make(map[string]int64)}}
	p.shape.Store(sh)
	p.forward = newForward(u)
	ctx, p.cancel = context.WithCancel(ctx)
	p.server = newServer(ctx, p)
	p.wg.Go(func() {
		_ = p.server.Serve(l) // until Close
		// A connection that was accepted while Close ran is closed by this one.
		_ = p.server.Close()
	})
	context.AfterFunc(ctx, func() { _ = p.server.Close() })
	return p, nil
}

// Set changes latency, bandwidth, faults and seed for the requests that arrive from now on. The
// fault rules start counting anew.
func (p *Proxy) Set(o Options) error {
	sh, err := newShape(o)
	if err != nil {
		return err
	}
	p.shape.Store(sh)
	return nil
}

// Stop closes the listener and every connection and waits for all goroutines.
func (p *Proxy) Stop() {
	p.cancel()
	p.wg.Wait()
	p.forward.Transport.(*http.Transport).CloseIdleConnections()
}

// Stats returns the counters.
func (p *Proxy) Stats() Stats {
	p.statsMu.Lock()
	defer p.statsMu.Unlock()
	s := p.stats
	s.Faults = maps.Clone(s.Faults)
	return s
}

// count changes the counters.
func (p *Proxy) count(change func(s *Stats)) {
	p.statsMu.Lock()
	defer p.statsMu.Unlock()
	change(&p.stats)
}

// shape is one setting of the behaviour, with the state that belongs to it.
type shape struct {
	Options

	mu    sync.Mutex
	rng   *rand.Rand
	rules []rule
	free  time.Time // when the bandwidth bucket will have sent all that was reserved
}

func newShape(o Options) (*shape, error) {
	if o.Latency < 0 || o.Sigma < 0 || math.IsNaN(o.Sigma) || o.Bandwidth < 0 {
		return nil, fmt.Errorf("proxy: latency %v, sigma %v and bandwidth %v must not be negative",
			o.Latency, o.Sigma, o.Bandwidth)
	}
	s := &shape{Options: o, rng: rand.New(rand.NewPCG(o.Seed, 0x73686f616c))}
	for _, f := range o.Faults {
		s.rules = append(s.rules, rule{Fault: f})
	}
	return s, nil
}

// delay draws one request's latency: median · e^(σ·N(0,1)).
func (s *shape) delay() time.Duration {
	if s.Latency == 0 || s.Sigma == 0 {
		return s.Latency
	}
	s.mu.Lock()
	z := s.rng.NormFloat64()
	s.mu.Unlock()
	return time.Duration(float64(s.Latency) * math.Exp(s.Sigma*z))
}

// burst is how much unused bandwidth is kept for later.
const burst = 20 * time.Millisecond

// reserve takes n bytes from the bandwidth bucket and returns how long to wait before sending them.
func (s *shape) reserve(n int, now time.Time) time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	if earliest := now.Add(-burst); s.free.Before(earliest) {
		s.free = earliest
	}
	wait := s.free.Sub(now)
	s.free = s.free.Add(time.Duration(float64(n) / float64(s.Bandwidth) * float64(time.Second)))
	return max(wait, 0)
}

// pick returns the fault for a request, or nil.
func (s *shape) pick(op Op, key string) *Fault {
	if len(s.rules) == 0 {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range s.rules {
		if s.rules[i].fires(op, key, s.rng) {
			return &s.rules[i].Fault
		}
	}
	return nil
}
