package objstore

import (
	"context"
	"errors"
	"iter"
	"math/bits"
	"sync/atomic"
	"time"
)

// Meter counts what passes through it. Put next to the store it sees every try; above [Retry] it
// sees what callers see. Its cost is a few atomic additions and two readings of the clock a request.
type Meter struct {
	r Reader

	requests [numOps]atomic.Int64
	errors   [len(kindNames)]atomic.Int64
	canceled atomic.Int64
	inFlight atomic.Int64
	bytes    atomic.Int64
	listed   atomic.Int64
	latency  Histogram
}

const (
	opRead = iota
	opStat
	opList
	numOps
)

// NewMeter decorates r.
func NewMeter(r Reader) *Meter { return &Meter{r: r} }

var (
	_ Reader      = (*Meter)(nil)
	_ Prefixer    = (*Meter)(nil)
	_ ListerAfter = (*Meter)(nil)
)

// MeterStats are counts since the start, and latencies of ReadAt.
type MeterStats struct {
	Reads    int64 `json:"reads"`     // ReadAt: GET requests of an S3 store
	Stats    int64 `json:"stats"`     // Stat: HEAD requests
	Lists    int64 `json:"lists"`     // listings begun, of a tree or a level; each may be many requests
	Listed   int64 `json:"listed"`    // objects and prefixes listed
	Bytes    int64 `json:"bytes"`     // delivered by ReadAt without error
	InFlight int64 `json:"in_flight"` // zero when nothing runs
	Canceled int64 `json:"canceled"`  // ended by the caller's context; not counted as errors
	// Errors by Kind.String().
	Errors map[string]int64 `json:"errors,omitempty"`
	// Median and P99 of the time that a successful ReadAt took, within 10%.
	Median time.Duration `json:"median_ns"`
	P99    time.Duration `json:"p99_ns"`
}

// Stats returns the counts.
func (m *Meter) Stats() MeterStats {
	s := MeterStats{
		Reads:    m.requests[opRead].Load(),
		Stats:    m.requests[opStat].Load(),
		Lists:    m.requests[opList].Load(),
		Listed:   m.listed.Load(),
		Bytes:    m.bytes.Load(),
		InFlight: m.inFlight.Load(),
		Canceled: m.canceled.Load(),
	}
	for k := range m.errors {
		if n := m.errors[k].Load(); n > 0 {
			if s.Errors == nil {
				s.Errors = make(map[string]int64)
			}
			s.Errors[Kind(k).String()] = n
		}
	}
	q := m.latency.Quantiles(0.5, 0.99)
	s.Median, s.P99 = q[0], q[1]
	return s
}

// Latency returns the histogram of ReadAt.
func (m *Meter) Latency() *Histogram { return &m.latency }

func (m *Meter) begin(op int) {
	m.requests[op].Add(1)
	m.inFlight.Add(1)
}

func (m *Meter) end(ctx context.Context, err error) {
	m.inFlight.Add(-1)
	if err == nil {
		return
	}
	var e *Error
	switch {
	case errors.As(err, &e):
		if int(e.Kind) < len(m.errors) {
			m.errors[e.Kind].Add(1)
		}
	case ctx.Err() != nil && errors.Is(context.Cause(ctx), errTryTimeout):
		m.errors[KindTransient].Add(1)
	case ctx.Err() != nil:
		m.canceled.Add(1)
	default:
		m.errors[KindOther].Add(1)
	}
}

// Stat implements [Reader].
func (m *Meter) Stat(ctx context.Context, key string) (Object, error) {
	m.begin(opStat)
	o, err := m.r.Stat(ctx, key)
	m.end(ctx, err)
	return o, err
}

// ReadAt implements [Reader].
func (m *Meter) ReadAt(ctx context.Context, o Object, p []byte, off int64) error {
	m.begin(opRead)
	start := time.Now()
	err := m.r.ReadAt(ctx, o, p, off)
	if err == nil {
		m.latency.Record(time.Since(start))
		m.bytes.Add(int64(len(p)))
	}
	m.end(ctx, err)
	return err
}

// List implements [Reader].
func (m *Meter) List(ctx context.Context, prefix string) iter.Seq2[Object, error] {
	return m.list(ctx, m.r.List(ctx, prefix))
}

// ListAfter implements [ListerAfter].
func (m *Meter) ListAfter(ctx context.Context, prefix, after string) iter.Seq2[Object, error] {
	return m.list(ctx, listAfter(ctx, m.r, prefix, after))
}

// ListLevel implements [Prefixer].
func (m *Meter) ListLevel(ctx context.Context, prefix string) iter.Seq2[Object, error] {
	return m.list(ctx, listLevel(ctx, m.r, prefix))
}

func (m *Meter) list(ctx context.Context, seq iter.Seq2[Object, error]) iter.Seq2[Object, error] {
	return func(yield func(Object, error) bool) {
		var failed error
		m.begin(opList)
		defer func() { m.end(ctx, failed) }() // also when the loop's body panics
		for o, err := range seq {
			if err == nil {
				m.listed.Add(1)
			}
			failed = err
			if !yield(o, err) {
				return
			}
		}
	}
}

// Histogram counts durations in buckets whose width is an eighth of a power of two, from 1 µs to
// half an hour, so that quantiles are right within 10% at any scale. The zero value is ready to
// use; all methods may be called at once.
type Histogram struct {
	buckets [histSub * histOctaves]atomic.Int64
}

const (
	histSubBits = 3 // 8 buckets an octave: a bucket spans at most 12.5%, its middle is off by 6.25%
	histSub     = 1 << histSubBits
	histOctaves = 30
)

// bucketOf returns the bucket of us microseconds: the exponent and the histSubBits bits below the
// leading one, as in a floating-point number.
func bucketOf(us uint64) int {
	if us < histSub {
		return int(us)
	}
	e := bits.Len64(us) - histSubBits - 1 // how far to shift to keep histSubBits+1 bits
	return min((e+1)<<histSubBits+int(us>>e)-histSub, histSub*histOctaves-1)
}

// bucketStart returns the least number of microseconds in bucket b.
func bucketStart(b int) uint64 {
	if b < histSub {
		return uint64(b)
	}
	e := b>>histSubBits - 1
	return uint64(b&(histSub-1)+histSub) << e
}

// Record counts d.
func (h *Histogram) Record(d time.Duration) {
	h.buckets[bucketOf(uint64(max(0, d.Microseconds())))].Add(1)
}

// Quantiles returns the durations below which the parts qs (each in [0,1], ascending) of what was
// recorded lie; zero when nothing was.
func (h *Histogram) Quantiles(qs ...float64) []time.Duration {
	var counts [len(h.buckets)]int64
	var total int64
	for i := range counts {
		counts[i] = h.buckets[i].Load()
		total += counts[i]
	}
	out := make([]time.Duration, len(qs))
	b, sum := 0, counts[0]
	for i, q := range qs {
		if total == 0 {
			break
		}
		rank := max(1, int64(q*float64(total)+0.5))
		for sum < rank && b < len(counts)-1 {
			b++
			sum += counts[b]
		}
		mid := (bucketStart(b) + bucketStart(b+1)) / 2
		out[i] = time.Duration(mid) * time.Microsecond
	}
	return out
}
