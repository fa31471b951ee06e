package objstore_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/lab/rig/memstore"
)

// timed is a store whose reads take what delay says, by count from 0; a cancelled read ends at once.
type timed struct {
	*memstore.Mem
	delay func(i int64) time.Duration
	reads atomic.Int64
}

func (s *timed) wait(ctx context.Context) error {
	t := time.NewTimer(s.delay(s.reads.Add(1) - 1))
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return nil
	}
}

func (s *timed) ReadSpans(ctx context.Context, o objstore.Object, spans []objstore.Span) error {
	if err := s.wait(ctx); err != nil {
		return err
	}
	return s.Mem.ReadSpans(ctx, o, spans)
}

// purse is memory of a limited size that is counted.
type purse struct {
	mu          sync.Mutex
	left, least int64
	full        int64
}

func newPurse(n int64) *purse { return &purse{left: n, least: n, full: n} }

func (p *purse) Borrow(n int64) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.left < n {
		return false
	}
	p.left -= n
	p.least = min(p.least, p.left)
	return true
}

func (p *purse) Return(n int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.left += n
}

// jitter is a latency around 30 ms, as a healthy store has it.
func jitter() time.Duration { return 25*time.Millisecond + rand.N(10*time.Millisecond) } //nolint:gosec // a simulation

// load reads o total times, workers at once, and returns the times that the reads took.
func load(t *testing.T, r objstore.Reader, o objstore.Object, want []byte, workers, total int,
	ctx context.Context) []time.Duration {
	t.Helper()
	var next atomic.Int64
	took := make([]time.Duration, total)
	var wg sync.WaitGroup
	for range workers {
		wg.Go(func() {
			p := make([]byte, o.Size)
			for i := next.Add(1) - 1; i < int64(total); i = next.Add(1) - 1 {
				start := time.Now()
				clear(p)
				if err := r.ReadAt(ctx, o, p, 0); err != nil {
					t.Error(err)
					return
				}
				took[i] = time.Since(start)
				if !bytes.Equal(p, want) {
					t.Error("other bytes")
					return
				}
			}
		})
	}
	wg.Wait()
	return took
}

func over(took []time.Duration, d time.Duration) (n int) {
	for _, t := range took {
		if t > d {
			n++
		}
	}
	return n
}

// TestHedge: of 1% of the reads that stall for 10 s all but a few are cut short, for a fleet of readers
// and for one reader alone; second GETs stay below 2%, their memory comes back.
func TestHedge(t *testing.T) {
	for _, workers := range []int{1, 8, 64} {
		t.Run(fmt.Sprint(workers), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := &timed{Mem: memstore.New(), delay: func(i int64) time.Duration {
					if i%100 == 99 {
						return 10 * time.Second
					}
					return jitter()
				}}
				want := bytes.Repeat([]byte("shoal"), 1000)
				o := s.PutBytes("k", want)
				memory := newPurse(1 << 20)
				m := objstore.NewMeter(s)
				h := objstore.Hedge(m, memory)
				const total = 10_000
				took := load(t, h, o, want, workers, total, t.Context())
				h.Wait()
				st := h.Stats()
				if n := over(took, time.Second); n > 10 {
					t.Errorf("%d of %d reads took more than 1 s; 100 GETs stalled; %+v", n, total, st)
				}
				if st.Sent > total/50 || st.Won < 80 {
					t.Errorf("%+v for %d reads", st, total)
				}
				if got := m.Stats().Reads; got != total+st.Sent {
					t.Errorf("the meter counts %d GETs for %d reads and %d second ones", got, total, st.Sent)
				}
				if memory.left != memory.full {
					t.Errorf("%d bytes of memory did not come back", memory.full-memory.left)
				}
				if n := m.Stats().InFlight; n != 0 {
					t.Errorf("%d in flight", n)
				}
			})
		})
	}
}

// TestHedgeSlowStore: a store that slows as a whole, by five times or to a standstill, gets next to no
// second GETs.
func TestHedgeSlowStore(t *testing.T) {
	for _, slow := range []time.Duration{150 * time.Millisecond, 5 * time.Second} {
		t.Run(slow.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var all atomic.Bool
				s := &timed{Mem: memstore.New(), delay: func(i int64) time.Duration {
					if all.Load() {
						return slow + jitter()
					}
					return jitter()
				}}
				want := []byte("content")
				o := s.PutBytes("k", want)
				h := objstore.Hedge(s, nil)
				load(t, h, o, want, 64, 5000, t.Context())
				before := h.Stats().Sent
				all.Store(true)
				load(t, h, o, want, 64, 400, t.Context())
				if sent := h.Stats().Sent - before; sent > 8 {
					t.Errorf("%d second GETs to a store that is slow as a whole, at the rate of a quick one 8 in 400 "+
						"are the most", sent)
				}
				if h.Stats().Sent-before > 2 {
					t.Errorf("%d second GETs while nobody was overtaken", h.Stats().Sent-before)
				}
			})
		})
	}
}

// TestHedgeDue: a prefetch is hedged when its reader is near, and at once when it is raised; one that
// nobody waits for is not.
func TestHedgeDue(t *testing.T) {
	const stall = time.Minute
	for _, c := range []struct {
		name     string
		due      time.Duration // from the start; 0: not known
		raise    time.Duration // 0: never
		from, to time.Duration // when the read must be done
	}{
		{"near", 50 * time.Millisecond, 0, 60 * time.Millisecond, time.Second},
		{"far", 10 * time.Second, 0, 9 * time.Second, 11 * time.Second},
		{"never", 2 * time.Minute, 0, stall, stall},
		{"unknown", 0, 0, stall, stall},
		{"raised", 2 * time.Minute, 5 * time.Second, 5 * time.Second, 6 * time.Second},
		{"raised, unknown", 0, 5 * time.Second, 5 * time.Second, 6 * time.Second},
		{"raised early", 0, time.Millisecond, 40 * time.Millisecond, time.Second},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var stalls atomic.Bool
				s := &timed{Mem: memstore.New(), delay: func(int64) time.Duration {
					if stalls.CompareAndSwap(true, false) {
						return stall
					}
					return 30 * time.Millisecond
				}}
				want := []byte("content")
				o := s.PutBytes("k", want)
				h := objstore.Hedge(s, nil)
				load(t, h, o, want, 1, 500, t.Context())
				stalls.Store(true)
				var due time.Time
				if c.due > 0 {
					due = time.Now().Add(c.due)
				}
				u := objstore.NewUrgency(due)
				if c.raise > 0 {
					time.AfterFunc(c.raise, u.Raise)
				}
				took := load(t, h, o, want, 1, 1, objstore.WithUrgency(t.Context(), u))[0]
				if took < c.from || took > c.to {
					t.Errorf("it took %v, want %v to %v", took, c.from, c.to)
				}
			})
		})
	}
}

// TestHedgeUseless: where second GETs are as late as the first they stop.
func TestHedgeUseless(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &timed{Mem: memstore.New(), delay: func(i int64) time.Duration { return jitter() }}
		slow := &timed{Mem: s.Mem, delay: func(int64) time.Duration { return 300 * time.Millisecond }}
		want := []byte("content")
		quick, late := s.PutBytes("quick", want), s.PutBytes("late", want)
		h := objstore.Hedge(byKey{s, slow}, nil)
		for range 40 { // one key in fifty is always late
			load(t, h, quick, want, 1, 490, t.Context())
			load(t, h, late, want, 1, 10, t.Context())
		}
		if sent := h.Stats().Sent; sent > 100 {
			t.Errorf("%+v: 400 would have been in the budget, but none comes in first", h.Stats())
		}
	})
}

// byKey reads the object "late" from another store than all others.
type byKey struct {
	*timed
	late *timed
}

func (b byKey) ReadSpans(ctx context.Context, o objstore.Object, spans []objstore.Span) error {
	if o.Key == "late" {
		return b.late.ReadSpans(ctx, o, spans)
	}
	return b.timed.ReadSpans(ctx, o, spans)
}

// TestHedgeModel: through stalls, failures, cancellations and scarce memory every read returns its own
// bytes or an error that its GETs gave, and at the end all memory is back.
func TestHedgeModel(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		stallEvery := rapid.Int64Range(2, 200).Draw(rt, "stall every")
		failEvery := rapid.Int64Range(2, 200).Draw(rt, "fail every")
		workers := rapid.IntRange(1, 32).Draw(rt, "workers")
		budget := rapid.Int64Range(0, 100_000).Draw(rt, "memory")
		synctest.Test(t, func(t *testing.T) {
			s := &timed{Mem: memstore.New(), delay: func(i int64) time.Duration {
				if i%stallEvery == 0 {
					return 2 * time.Second
				}
				return jitter()
			}}
			want := bytes.Repeat([]byte("0123456789"), 1000)
			o := s.PutBytes("k", want)
			memory := newPurse(budget)
			h := objstore.Hedge(failing{s, failEvery, new(atomic.Int64)}, memory)
			var next atomic.Int64
			var wg sync.WaitGroup
			for range workers {
				wg.Go(func() {
					p := make([]byte, 6000)
					for i := next.Add(1); i <= 600; i = next.Add(1) {
						ctx, cancel := t.Context(), context.CancelFunc(func() {})
						if i%7 == 0 {
							ctx, cancel = context.WithTimeout(ctx, 50*time.Millisecond)
						}
						clear(p)
						err := h.ReadSpans(ctx, o, []objstore.Span{{Off: 10, P: p[:1000]}, {Off: 2000, P: p[1000:]}})
						switch {
						case err == nil && (!bytes.Equal(p[:1000], want[10:1010]) ||
							!bytes.Equal(p[1000:], want[2000:7000])):
							t.Error("other bytes")
						case err != nil && ctx.Err() == nil && !errors.Is(err, errFailing):
							t.Errorf("an error that no GET gave: %v", err)
						}
						cancel()
					}
				})
			}
			wg.Wait()
			h.Wait()
			if memory.left != memory.full || memory.least < 0 {
				t.Errorf("of %d bytes of memory %d are back", memory.full, memory.left)
			}
			if sent := h.Stats().Sent; sent > 12 {
				t.Errorf("%d second GETs for 600", sent)
			}
		})
	})
}

var errFailing = errors.New("failing")

// failing fails every nth read, when it is done.
type failing struct {
	*timed
	every int64
	n     *atomic.Int64
}

func (f failing) ReadSpans(ctx context.Context, o objstore.Object, spans []objstore.Span) error {
	err := f.timed.ReadSpans(ctx, o, spans)
	if err == nil && f.n.Add(1)%f.every == 0 {
		return &objstore.Error{Op: "read", Key: o.Key, Kind: objstore.KindTransient, Err: errFailing}
	}
	return err
}
