package objstore_test

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/lab/rig/memstore"
)

// gate is a store whose reads wait until they are let go, one by one.
type gate struct {
	objstore.Layer
	mu      sync.Mutex
	running map[string]chan error // by key
	started []string
	most    int
}

func newGate() *gate { return &gate{running: make(map[string]chan error)} }

func (g *gate) ReadSpans(_ context.Context, o objstore.Object, _ []objstore.Span) error {
	done := make(chan error)
	g.mu.Lock()
	g.running[o.Key] = done
	g.started = append(g.started, o.Key)
	g.most = max(g.most, len(g.running))
	g.mu.Unlock()
	return <-done
}

func (g *gate) finish(key string) {
	g.mu.Lock()
	done := g.running[key]
	delete(g.running, key)
	g.mu.Unlock()
	done <- nil
}

func (g *gate) Stat(context.Context, string) (objstore.Object, error) { panic("not used") }

func (g *gate) List(context.Context, string, string) iter.Seq2[objstore.Object, error] {
	panic("not used")
}

// modelRequest is a request as the model of the limiter sees it.
type modelRequest struct {
	key    string
	class  objstore.Priority
	cancel context.CancelFunc
	urgent *objstore.Urgency
	err    chan error
}

// TestLimitModel compares the limiter with a model that is plain queues, through arrivals, ends,
// cancellations, raised priorities and changed limits.
func TestLimitModel(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		synctest.Test(t, func(t *testing.T) {
			g := newGate()
			n := rapid.IntRange(1, 20).Draw(rt, "n")
			l := objstore.Limit(g, n)
			var running []*modelRequest
			var queues [2][]*modelRequest
			id := 0

			reserved := func() int {
				if n < 2 {
					return 0
				}
				return max(1, n/8)
			}
			fits := func(c objstore.Priority) bool {
				prefetches := 0
				for _, r := range running {
					if r.class == objstore.Prefetch {
						prefetches++
					}
				}
				return len(running) < n && (c == objstore.Demand || prefetches < n-reserved())
			}
			settle := func() {
				for _, c := range []objstore.Priority{objstore.Demand, objstore.Prefetch} {
					for len(queues[c]) > 0 && fits(c) {
						running = append(running, queues[c][0])
						queues[c] = queues[c][1:]
					}
				}
			}
			remove := func(list []*modelRequest, r *modelRequest) []*modelRequest {
				return slices.DeleteFunc(slices.Clone(list), func(x *modelRequest) bool { return x == r })
			}
			check := func() {
				synctest.Wait()
				g.mu.Lock()
				defer g.mu.Unlock()
				var want, got []string
				for _, r := range running {
					want = append(want, r.key)
				}
				for k := range g.running {
					got = append(got, k)
				}
				slices.Sort(want)
				slices.Sort(got)
				if !slices.Equal(got, want) {
					rt.Fatalf("running %v, the model says %v", got, want)
				}
				s := l.Stats()
				if s.InFlight != len(running) || s.WaitingDemand != len(queues[1]) ||
					s.WaitingPrefetch != len(queues[0]) || s.Limit != n {
					rt.Fatalf("stats %+v, the model has %d running and %d, %d waiting",
						s, len(running), len(queues[1]), len(queues[0]))
				}
			}
			waiting := func() []*modelRequest { return append(slices.Clone(queues[0]), queues[1]...) }

			steps := rapid.IntRange(1, 60).Draw(rt, "steps")
			for range steps {
				switch rapid.SampledFrom([]string{"arrive", "arrive", "arrive", "end", "end", "cancel", "raise",
					"limit"}).Draw(rt, "step") {
				case "arrive":
					id++
					r := &modelRequest{
						key: fmt.Sprint(id), class: objstore.Priority(rapid.IntRange(0, 1).Draw(rt, "class")),
						err: make(chan error, 1),
					}
					ctx, cancel := context.WithCancel(context.Background())
					r.cancel = cancel
					if r.class == objstore.Prefetch {
						r.urgent = new(objstore.Urgency)
						ctx = objstore.WithUrgency(ctx, r.urgent)
					}
					go func() { r.err <- l.ReadAt(ctx, objstore.Object{Key: r.key, Size: 1}, make([]byte, 1), 0) }()
					queues[r.class] = append(queues[r.class], r)
					settle()
				case "end":
					if len(running) == 0 {
						continue
					}
					r := rapid.SampledFrom(running).Draw(rt, "which")
					g.finish(r.key)
					running = remove(running, r)
					settle()
					if err := <-r.err; err != nil {
						rt.Fatalf("request %s: %v", r.key, err)
					}
					r.cancel()
				case "cancel":
					all := waiting()
					if len(all) == 0 {
						continue
					}
					r := rapid.SampledFrom(all).Draw(rt, "which")
					r.cancel()
					queues[r.class] = remove(queues[r.class], r)
					settle()
					if err := <-r.err; !errors.Is(err, context.Canceled) {
						rt.Fatalf("canceled request %s: %v", r.key, err)
					}
				case "raise":
					if len(queues[0]) == 0 {
						continue
					}
					r := rapid.SampledFrom(queues[0]).Draw(rt, "which")
					r.urgent.Raise()
					queues[0] = remove(queues[0], r)
					r.class = objstore.Demand
					queues[1] = append(queues[1], r)
					settle()
				case "limit":
					n = rapid.IntRange(1, 20).Draw(rt, "n")
					l.SetLimit(n)
					settle()
				}
				check()
			}
			for _, r := range waiting() {
				r.cancel()
				<-r.err
			}
			queues = [2][]*modelRequest{}
			for _, r := range running {
				g.finish(r.key)
				<-r.err
				r.cancel()
			}
			running = nil
			check()
		})
	})
}

// TestLimitRace lets cancellation and a free place meet: whoever wins, no place is lost.
func TestLimitRace(t *testing.T) {
	m := memstore.New()
	o := m.PutBytes("k", []byte("x"))
	l := objstore.Limit(m, 2)
	var wg sync.WaitGroup
	for w := range 16 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for i := range 300 {
				ctx, cancel := context.WithTimeout(context.Background(), time.Duration((w*i)%50)*time.Microsecond)
				u := new(objstore.Urgency)
				if w%2 == 0 {
					ctx = objstore.WithUrgency(ctx, u)
					go u.Raise()
				}
				if err := l.ReadAt(ctx, o, make([]byte, 1), 0); err != nil && ctx.Err() == nil {
					t.Error(err)
				}
				cancel()
			}
		}()
	}
	wg.Wait()
	if s := l.Stats(); s.InFlight != 0 || s.WaitingDemand != 0 || s.WaitingPrefetch != 0 {
		t.Errorf("gauges after all ended: %+v", s)
	}
}

func TestPriorityOf(t *testing.T) {
	ctx := context.Background()
	if objstore.PriorityOf(ctx) != objstore.Demand {
		t.Error("a context without priority is not Demand")
	}
	u := new(objstore.Urgency)
	ctx = objstore.WithUrgency(ctx, u)
	if objstore.PriorityOf(ctx) != objstore.Prefetch {
		t.Error("an urgency that was not raised is not Prefetch")
	}
	u.Raise()
	u.Raise()
	if objstore.PriorityOf(ctx) != objstore.Demand || !u.Raised() {
		t.Error("a raised urgency is not Demand")
	}
}

// slots is a store whose reads take 10 ms, and no more than so many of which go on at once.
type slots struct {
	*memstore.Mem
	free chan struct{}
	slow atomic.Bool // answers SlowDown
}

func (s *slots) ReadSpans(ctx context.Context, o objstore.Object, spans []objstore.Span) error {
	s.free <- struct{}{}
	time.Sleep(10 * time.Millisecond)
	<-s.free
	if s.slow.CompareAndSwap(true, false) {
		return &objstore.Error{Op: "read", Key: o.Key, Kind: objstore.KindTransient, SlowDown: true}
	}
	return s.Mem.ReadSpans(ctx, o, spans)
}

// TestLimitAdaptive: the places go to what the store can work on, at a SlowDown to half, and stay where
// they are while few of them are in use.
func TestLimitAdaptive(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const most = 512
		s := &slots{Mem: memstore.New(), free: make(chan struct{}, 2000)}
		o := s.PutBytes("k", make([]byte, 50_000))
		l := objstore.LimitAdaptive(s, most)
		read := func(workers, times int) {
			var wg sync.WaitGroup
			for range workers {
				wg.Go(func() {
					p := make([]byte, o.Size)
					for range times {
						if err := l.ReadAt(t.Context(), o, p, 0); err != nil &&
							objstore.KindOf(err) != objstore.KindTransient {
							t.Error(err)
						}
					}
				})
			}
			wg.Wait()
		}
		start := l.Places()
		read(8, 200)
		if got := l.Places(); got != start {
			t.Errorf("%d places, %d before: 8 readers cannot have told it anything", got, start)
		}
		read(600, 8)
		if got := l.Places(); got != most {
			t.Errorf("%d places before a store that takes any number, want %d", got, most)
		}
		s.slow.Store(true)
		read(1, 1)
		if got := l.Places(); got != most/2 {
			t.Errorf("%d places after a SlowDown, want %d", got, most/2)
		}

		l = objstore.LimitAdaptive(s, most)
		s.free = make(chan struct{}, 16)
		read(600, 8)
		if got := l.Places(); got < 8 || got > 32 {
			t.Errorf("%d places before a store of 16 workers", got)
		}
		if st := l.Stats(); st.InFlight != 0 || st.Limit != l.Places() {
			t.Errorf("%+v", st)
		}
	})
}
