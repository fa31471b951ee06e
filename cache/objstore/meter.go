package objstore

import (
	"context"
	"errors"
	"iter"
	"math/bits"
	"os"
	"sync/atomic"
	"time"
)

// Meter counts the requests that pass through it. Next to the store it sees every try; above [Retry] it sees what
// callers see. It costs a few atomic additions and two clock readings per request.
type Meter struct {
	each

	requests [numOps]atomic.Int64
	outcomes [numOps][numOutcomes]atomic.Int64
	errors   [len(kindNames)]atomic.Int64
	inFlight atomic.Int64
	reading  atomic.Int64 // reads in flight
	asked    atomic.Int64 // since when they go unanswered, in Unix nanoseconds; 0: they do not
	bytes    atomic.Int64
	written  atomic.Int64
	slowed   atomic.Int64
	latency  Histogram
	onRead   func(key string, bytes int64, took time.Duration, err error) // nil for nobody
}

const (
	opRead = iota
	opStat
	opList
	opPut
	opOther
	numOps
)

const (
	outcomeOK = iota
	outcomeError
	outcomeCanceled // the caller's context ended
	numOutcomes
)

var opNames = [numOps]string{"get", "head", "list", "put", "other"}

// NewMeter decorates r.
func NewMeter(r Layer) *Meter {
	m := &Meter{}
	m.each = each{r, m.request}
	return m
}

// MeterStats are counts since the start, and latencies of reads.
type MeterStats struct {
	Reads    int64 `json:"reads"`     // ReadAt and ReadSpans: GET requests of an S3 store
	Stats    int64 `json:"stats"`     // Stat: HEAD requests
	Lists    int64 `json:"lists"`     // listings begun, of a tree or a level; each may be many requests
	Bytes    int64 `json:"bytes"`     // of reads without error, the gaps between spans included
	Puts     int64 `json:"puts"`      // PutNew and an Upload's Part: PUT requests of an S3 store
	Written  int64 `json:"written"`   // bytes that these stored without error
	Others   int64 `json:"others"`    // Copy, and the requests of uploads and deletions but Part
	InFlight int64 `json:"in_flight"` // zero when nothing runs
	Canceled int64 `json:"canceled"`  // ended by the caller's context; not counted as errors
	// Outcomes of the finished requests, by type: get, head, list, put, other.
	Outcomes  map[string]Outcomes `json:"outcomes"`
	SlowDowns int64               `json:"slow_downs"`       // failed requests whose answer asked for fewer requests
	Errors    map[string]int64    `json:"errors,omitempty"` // by Kind.String()
	// Silent is for how long no read was answered, over tries that ran out of time; 0 while none is in flight.
	Silent time.Duration `json:"silent_ns"`
	// Median and P99 of the time that a successful read took, within 10%.
	Median time.Duration `json:"median_ns"`
	P99    time.Duration `json:"p99_ns"`
}

// Outcomes counts requests by outcome.
type Outcomes struct {
	OK       int64 `json:"ok"`
	Failed   int64 `json:"failed"`
	Canceled int64 `json:"canceled"` // by the caller's context
}

// Add adds the counts of another meter.
func (o Outcomes) Add(p Outcomes) Outcomes {
	return Outcomes{o.OK + p.OK, o.Failed + p.Failed, o.Canceled + p.Canceled}
}

// OnRead calls f for every finished read, except those that the caller's context ended. It is set before the first
// read, and called by many goroutines at once.
func (m *Meter) OnRead(f func(key string, bytes int64, took time.Duration, err error)) { m.onRead = f }

// Stats returns the counts.
func (m *Meter) Stats() MeterStats {
	s := MeterStats{
		Reads: m.requests[opRead].Load(), Stats: m.requests[opStat].Load(), Lists: m.requests[opList].Load(),
		Puts: m.requests[opPut].Load(), Others: m.requests[opOther].Load(), Bytes: m.bytes.Load(),
		Written:  m.written.Load(),
		InFlight: m.inFlight.Load(), SlowDowns: m.slowed.Load(),
		Outcomes: make(map[string]Outcomes, numOps), Errors: map[string]int64{},
	}
	for op := range m.outcomes {
		o := Outcomes{m.outcomes[op][outcomeOK].Load(), m.outcomes[op][outcomeError].Load(),
			m.outcomes[op][outcomeCanceled].Load()}
		s.Outcomes[opNames[op]] = o
		s.Canceled += o.Canceled
	}
	for k := range m.errors {
		if n := m.errors[k].Load(); n > 0 {
			s.Errors[Kind(k).String()] = n
		}
	}
	if asked := m.asked.Load(); asked != 0 && m.reading.Load() > 0 {
		s.Silent = max(0, time.Since(time.Unix(0, asked)))
	}
	s.Median, s.P99 = m.latency.Quantile(0.5), m.latency.Quantile(0.99)
	return s
}

// Latency returns the histogram of reads.
func (m *Meter) Latency() *Histogram { return &m.latency }

func (m *Meter) begin(op int) {
	m.requests[op].Add(1)
	m.inFlight.Add(1)
}

func (m *Meter) end(ctx context.Context, op int, err error) {
	m.inFlight.Add(-1)
	if err == nil || op == opStat && KindOf(err) == KindNotFound { // which is an answer
		m.outcomes[op][outcomeOK].Add(1)
		return
	}
	outcome := outcomeError
	switch e, ok := errors.AsType[*Error](err); {
	case ok:
		m.errors[e.Kind].Add(1)
		if e.SlowDown {
			m.slowed.Add(1)
		}
	case ctx.Err() != nil && errors.Is(context.Cause(ctx), errTryTimeout):
		m.errors[KindTransient].Add(1)
	case ctx.Err() != nil:
		outcome = outcomeCanceled
	default:
		m.errors[KindOther].Add(1)
	}
	m.outcomes[op][outcome].Add(1)
}

func (m *Meter) request(ctx context.Context, r request, f func(ctx context.Context) error) error {
	m.begin(r.class)
	start := time.Now()
	if r.class == opRead {
		m.reading.Add(1)
		m.asked.CompareAndSwap(0, start.UnixNano())
	}
	err := f(ctx)
	switch {
	case r.class == opRead:
		took := time.Since(start)
		switch left := m.reading.Add(-1); {
		case err != nil && (errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(context.Cause(ctx), errTryTimeout)):
		case left == 0:
			m.asked.Store(0)
		case ctx.Err() == nil:
			m.asked.Store(start.Add(took).UnixNano())
		}
		if err == nil {
			m.latency.Record(took)
			m.bytes.Add(r.bytes)
		}
		if m.onRead != nil && (err == nil || ctx.Err() == nil) {
			m.onRead(r.key, r.bytes, took, err)
		}
	case r.class == opPut && err == nil:
		m.written.Add(r.bytes)
	}
	m.end(ctx, r.class, err)
	return err
}

// List implements [Reader].
func (m *Meter) List(ctx context.Context, prefix, after string) iter.Seq2[Object, error] {
	return m.list(ctx, m.below.List(ctx, prefix, after))
}

// ListLevel implements [Layer].
func (m *Meter) ListLevel(ctx context.Context, prefix string) iter.Seq2[Object, error] {
	return m.list(ctx, m.below.ListLevel(ctx, prefix))
}

func (m *Meter) list(ctx context.Context, seq iter.Seq2[Object, error]) iter.Seq2[Object, error] {
	return func(yield func(Object, error) bool) {
		var failed error
		m.begin(opList)
		defer func() { m.end(ctx, opList, failed) }() // also when the loop's body panics
		for o, err := range seq {
			failed = err
			if !yield(o, err) {
				return
			}
		}
	}
}

// Histogram counts durations in buckets whose width is an eighth of a power of two, from 1 µs to half an hour, so
// that quantiles are accurate to 10% at any scale. The zero value is ready to use; all methods may be called
// concurrently.
type Histogram struct {
	buckets [histSub * histOctaves]atomic.Int64
	micros  atomic.Int64 // all together
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
	us := max(0, d.Microseconds())
	h.buckets[bucketOf(uint64(us))].Add(1)
	h.micros.Add(us)
}

// HistogramBounds is how many bounds a [HistogramCounts] has: 128 µs and its doubles, to 33.6 s.
const HistogramBounds = 19

const firstBoundBits = 7 // of 128 µs

// HistogramBound returns a bound of a [HistogramCounts]. It is the edge of a bucket, so no count is an estimate.
func HistogramBound(i int) time.Duration { return time.Microsecond << (firstBoundBits + i) }

// HistogramCounts is a snapshot of a [Histogram].
type HistogramCounts struct {
	Count int64
	Sum   time.Duration
	Below [HistogramBounds]int64 // how many were shorter than HistogramBound(i)
}

// Add adds the counts of another histogram.
func (c *HistogramCounts) Add(d HistogramCounts) {
	c.Count += d.Count
	c.Sum += d.Sum
	for i, n := range d.Below {
		c.Below[i] += n
	}
}

// Counts returns what was recorded.
func (h *Histogram) Counts() HistogramCounts {
	c := HistogramCounts{Sum: time.Duration(h.micros.Load()) * time.Microsecond}
	bound := 0
	for b := range h.buckets {
		for bound < HistogramBounds && bucketStart(b) >= uint64(HistogramBound(bound).Microseconds()) {
			c.Below[bound] = c.Count
			bound++
		}
		c.Count += h.buckets[b].Load()
	}
	return c
}

// Quantile returns the duration below which the part q, in [0,1], of the recorded ones lies; zero if there are none.
func (h *Histogram) Quantile(q float64) time.Duration {
	var counts [len(h.buckets)]int64
	var total int64
	for i := range counts {
		counts[i] = h.buckets[i].Load()
		total += counts[i]
	}
	rank := max(1, int64(q*float64(total)+0.5))
	for b, n := range counts {
		if rank -= n; rank <= 0 {
			return time.Duration((bucketStart(b)+bucketStart(b+1))/2) * time.Microsecond
		}
	}
	return 0
}
