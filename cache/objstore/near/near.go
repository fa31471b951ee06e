// Package near is a store between the cache and the origin: a distributed S3 engine near the GPUs, which several nodes
// share. What it holds is read there. What it lacks is read from the origin and put there in the background, by the
// node that read it.
//
// # Rules
//
//   - A unit is an aligned 4 MiB of an object, its end, or a smaller object. A copy of a unit is one object of the
//     tier.
//   - A copy's key is the hash of the origin, the object's key, ETag and size, and the unit's number. Another version
//     of the object has other keys, so what is old is never asked for.
//   - A copy's note has that hash and the CRC32C of each granule (64 KiB), with which every read is verified. A copy
//     that does not match is not used, and is put again.
//   - A reader gets the origin's bytes of the version that it asked for, or the origin's own error, whatever the tier
//     does. Nothing that a reader waits for waits for a PUT. The tier delays a read by [longestDelay] at most.
//   - A read of a whole unit that the tier lacks is put there. A read of a part is not; but once half of a unit was
//     read in parts, the unit is read from the origin as a whole, in the background, and put there.
//   - After an error the tier is not read for a second. One read tries it then, and each further error doubles the
//     pause, up to a minute. The same holds for PUTs on their own: a tier that is full or read-only is still read.
//   - Requests to the tier have their own places, counters and deadlines. They are tried once.
package near

import (
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"log/slog"
	"path"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/shoalfs/shoal/cache/objstore"
)

const (
	unitSize    = 4 << 20
	granuleSize = 64 << 10

	readDeadline = 2 * time.Second // of one GET
	putDeadline  = 10 * time.Second
	placeWait    = time.Second     // for a place; then the origin is asked, which has places of its own
	moreUnits    = 2 * time.Second // after that long a read asks the tier for no further unit
	longestDelay = moreUnits + placeWait + readDeadline

	readPlaces   = 32 // 128 MiB in 2 s, so an engine behind 1 Gbit/s, saturated, is within the deadline
	demandPlaces = 4  // of them, not for prefetches
	putPlaces    = 8

	mostDamaged = 16 // copies in a row, after which the engine is what is damaged
)

// LeastMemory is one unit to be put, and one to be verified.
const LeastMemory = 2 * unitSize

// Store is the tier's bucket. Package s3 implements it.
type Store interface {
	GetNoted(ctx context.Context, key string, size int64, p []byte, off int64) (note string, err error)
	PutNoted(ctx context.Context, key string, data []byte, note string, onlyNew bool) error
}

// Config describes a tier.
type Config struct {
	Store  Store
	Prefix string // of keys; empty, or ends in "/"
	Name   string // for the log and the stats
	Memory int64  // most bytes in copies that are being put or verified; at least LeastMemory
	Log    *slog.Logger
}

// Tier is one near tier. Safe for concurrent use.
type Tier struct {
	cfg     Config
	reading *objstore.Circuit
	putting *objstore.Circuit
	places  *semaphore.Weighted
	ahead   *semaphore.Weighted // the places that prefetches may have
	windows *semaphore.Weighted // memory of reads that are verified before they are copied: half of it all
	latency objstore.Histogram
	queue   queue

	inARow atomic.Int64 // damaged copies

	mu    sync.Mutex
	stats Stats // what is counted of them
}

// New returns a tier.
func New(cfg Config) *Tier {
	cfg.Memory = max(cfg.Memory, LeastMemory)
	t := &Tier{
		cfg: cfg, places: semaphore.NewWeighted(readPlaces), ahead: semaphore.NewWeighted(readPlaces - demandPlaces),
		windows: semaphore.NewWeighted(cfg.Memory / 2),
	}
	t.reading = objstore.NewCircuit(time.Now,
		t.say("the near tier is left out: all is read from the origin", "the near tier is read again"))
	t.putting = objstore.NewCircuit(time.Now,
		t.say("nothing is put to the near tier: it is still read", "copies are put to the near tier again"))
	ctx, stop := context.WithCancel(context.Background())
	t.queue = queue{t: t, ctx: ctx, stop: stop, jobs: map[string]*job{}, parts: map[string]int64{}}
	return t
}

// say returns a circuit's change of state for the log.
func (t *Tier) say(stopped, again string) func(cause error) {
	return func(cause error) {
		if cause != nil {
			t.cfg.Log.Warn(stopped, "tier", t.cfg.Name, "cause", cause)
		} else {
			t.cfg.Log.Info(again, "tier", t.cfg.Name)
		}
	}
}

// Stats are counts since the start.
type Stats struct {
	Tier     string `json:"tier"`
	State    string `json:"state"`     // on, read-only (nothing is put), away
	Reads    int64  `json:"reads"`     // of units, or of parts of one
	Hits     int64  `json:"hits"`      // that the tier answered
	Misses   int64  `json:"misses"`    // that it had no copy for
	Passed   int64  `json:"passed"`    // that did not ask it: it was skipped, or had no free place
	Bytes    int64  `json:"bytes"`     // of hits
	Puts     int64  `json:"puts"`      // copies stored
	PutBytes int64  `json:"put_bytes"` // of them
	Exist    int64  `json:"exist"`     // copies that another node had stored meanwhile
	// units read from the origin a second time, to be put: they had been read in parts
	Fills    int64   `json:"fills"`
	Dropped  int64   `json:"dropped"` // copies that were not put: the queue was full, or the tier does not take any
	Damaged  int64   `json:"damaged"` // copies that did not match
	Errors   int64   `json:"errors"`  // requests that failed or had no answer in time
	InFlight int64   `json:"in_flight"`
	Queued   int64   `json:"queued_bytes"` // of memory: copies to be put, and reads to be verified
	Median   float64 `json:"latency_p50_seconds"`
	P99      float64 `json:"latency_p99_seconds"`
}

// Stats returns the counts.
func (t *Tier) Stats() Stats {
	t.mu.Lock()
	s := t.stats
	t.mu.Unlock()
	s.Tier, s.State = t.cfg.Name, "on"
	s.Median, s.P99 = t.latency.Quantile(0.5).Seconds(), t.latency.Quantile(0.99).Seconds()
	t.queue.mu.Lock()
	s.Queued += t.queue.memory
	t.queue.mu.Unlock()
	switch {
	case t.reading.IsOpen():
		s.State = "away"
	case t.putting.IsOpen():
		s.State = "read-only"
	}
	return s
}

func (t *Tier) count(of *int64, n int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	*of += n
}

// Close puts what is queued, for at most 5 s, and ends.
func (t *Tier) Close() { t.queue.close() }

// Over returns below with the tier in front of its reads. origin names below for all nodes: its endpoint and bucket.
func (t *Tier) Over(below objstore.Layer, origin string) objstore.Layer {
	return &store{below, t, origin}
}

type store struct {
	objstore.Layer // the origin
	t              *Tier
	origin         string
}

func (s *store) ReadAt(ctx context.Context, o objstore.Object, p []byte, off int64) error {
	return objstore.ReadAt(ctx, s, o, p, off)
}

// ReadSpans implements [objstore.SpanReader]: it reads what it can from the tier, and the rest from the origin.
func (s *store) ReadSpans(ctx context.Context, o objstore.Object, spans []objstore.Span) error {
	if len(spans) == 0 || objstore.CheckSpans(o, spans) != nil {
		return s.Layer.ReadSpans(ctx, o, spans)
	}
	until := time.Now().Add(moreUnits)
	var rest []*part
	var missing []objstore.Span
	passed := false
	for _, q := range s.partsOf(o, spans) {
		if passed = passed || time.Now().After(until); passed {
			s.t.count(&s.t.stats.Reads, 1)
			s.t.count(&s.t.stats.Passed, 1)
		} else {
			passed = !s.t.read(ctx, q)
		}
		if q.got != hit {
			rest, missing = append(rest, q), append(missing, q.spans...)
		}
	}
	if len(rest) == 0 {
		return nil
	}
	if err := s.Layer.ReadSpans(ctx, o, missing); err != nil {
		return err
	}
	for _, q := range rest {
		if q.got == missed || q.got == mismatched {
			s.t.queue.offer(s.Layer, q)
		}
	}
	return nil
}

// outcome is what the tier had for a part.
type outcome uint8

const (
	unasked    outcome = iota // or no answer
	hit                       // the bytes
	missed                    // no copy
	mismatched                // a copy that is damaged
)

// part is a read's spans in one unit.
type part struct {
	o     objstore.Object
	key   string // of the copy
	off   int64  // of the unit in the object
	size  int64  // of the unit
	spans []objstore.Span
	got   outcome
}

func (s *store) partsOf(o objstore.Object, spans []objstore.Span) (parts []*part) {
	var q *part
	for _, sp := range spans {
		for len(sp.P) > 0 {
			unit := sp.Off / unitSize
			if q == nil || q.off != unit*unitSize {
				q = &part{o: o, key: s.t.cfg.Prefix + keyOf(s.origin, o, unit), off: unit * unitSize,
					size: min(unitSize, o.Size-unit*unitSize)}
				parts = append(parts, q)
			}
			n := min(int64(len(sp.P)), q.off+q.size-sp.Off)
			q.spans = append(q.spans, objstore.Span{Off: sp.Off, P: sp.P[:n:n]})
			sp.Off, sp.P = sp.Off+n, sp.P[n:]
		}
	}
	return parts
}

// whole reports whether the part is all of its unit, in one piece.
func (q *part) whole() bool { return int64(len(q.spans[0].P)) == q.size }

// window returns the granules that the part needs, as offsets in the unit.
func (q *part) window() (lo, hi int64) {
	last := q.spans[len(q.spans)-1]
	lo = (q.spans[0].Off - q.off) / granuleSize * granuleSize
	hi = last.Off + int64(len(last.P)) - q.off + granuleSize - 1
	return lo, min(hi/granuleSize*granuleSize, q.size)
}

// read reads a part from the tier. It reports whether the tier answered.
func (t *Tier) read(ctx context.Context, q *part) (answered bool) {
	t.count(&t.stats.Reads, 1)
	if t.queue.copy(q) { // on its way there
		t.hit(q)
		return true
	}
	probe, ok := t.reading.Enter()
	if !ok {
		t.count(&t.stats.Passed, 1)
		return false
	}
	lo, hi := q.window()
	exact := len(q.spans) == 1 && q.spans[0].Off == q.off+lo && int64(len(q.spans[0].P)) == hi-lo
	need := hi - lo
	if exact {
		need = 0
	}
	leave := t.take(ctx, need)
	if leave == nil {
		t.reading.Withdraw(probe)
		t.count(&t.stats.Passed, 1)
		return false
	}
	defer leave()
	buf := q.spans[0].P
	if !exact {
		buf = make([]byte, need)
	}
	err := t.get(ctx, q, buf, lo)
	switch {
	case err == nil:
		for _, sp := range q.spans {
			if !exact {
				copy(sp.P, buf[sp.Off-q.off-lo:])
			}
		}
		t.hit(q)
		t.inARow.Store(0)
	case ctx.Err() != nil:
		t.reading.Withdraw(probe)
		return false
	case objstore.KindOf(err) == objstore.KindNotFound:
		q.got = missed
		t.count(&t.stats.Misses, 1)
		err = nil
	case errors.Is(err, errDamaged):
		q.got = mismatched
		t.count(&t.stats.Damaged, 1)
		n := t.inARow.Add(1)
		if n == 1 {
			t.cfg.Log.Warn("a copy in the near tier is damaged: it is read from the origin, and replaced",
				"tier", t.cfg.Name, "cause", err)
		}
		if n < mostDamaged {
			err = nil
		} else {
			err = fmt.Errorf("%d copies in a row, this one: %w", n, err)
		}
	}
	if err != nil {
		t.count(&t.stats.Errors, 1)
	}
	t.reading.Leave(probe, err)
	return err == nil
}

func (t *Tier) hit(q *part) {
	q.got = hit
	t.count(&t.stats.Hits, 1)
	for _, sp := range q.spans {
		t.count(&t.stats.Bytes, int64(len(sp.P)))
	}
}

// take waits for a place and for memory. It returns nil if there are none in time.
func (t *Tier) take(ctx context.Context, memory int64) (leave func()) {
	ctx, cancel := context.WithTimeout(ctx, placeWait)
	defer cancel()
	ahead := int64(0)
	if objstore.PriorityOf(ctx) == objstore.Prefetch {
		ahead = 1
	}
	all := [...]struct {
		of *semaphore.Weighted
		n  int64
	}{{t.ahead, ahead}, {t.places, 1}, {t.windows, memory}}
	free := func(taken int) {
		for _, a := range all[:taken] {
			a.of.Release(a.n)
		}
	}
	for i, a := range all {
		if a.n > 0 && a.of.Acquire(ctx, a.n) != nil {
			free(i)
			return nil
		}
	}
	t.count(&t.stats.Queued, memory)
	t.count(&t.stats.InFlight, 1)
	return func() {
		t.count(&t.stats.InFlight, -1)
		t.count(&t.stats.Queued, -memory)
		free(len(all))
	}
}

// get reads and verifies the granules of a part.
func (t *Tier) get(ctx context.Context, q *part, buf []byte, lo int64) error {
	ctx, cancel := context.WithTimeoutCause(ctx, readDeadline, errLate)
	defer cancel()
	start := time.Now()
	text, err := t.cfg.Store.GetNoted(ctx, q.key, q.size, buf, lo)
	if err != nil {
		if context.Cause(ctx) == errLate { //nolint:errorlint // set above, bare
			return errLate
		}
		if objstore.KindOf(err) == objstore.KindChanged {
			return fmt.Errorf("%w: %w", errDamaged, err)
		}
		return err
	}
	t.latency.Record(time.Since(start))
	n, err := parseNote(text)
	if err == nil && (n.id != path.Base(q.key) || n.size != q.size) {
		err = errors.New("the note is of another copy")
	}
	if err != nil {
		return fmt.Errorf("%w: %s: %w", errDamaged, q.key, err)
	}
	for i := int64(0); i < int64(len(buf)); i += granuleSize {
		if crc32.Checksum(buf[i:min(i+granuleSize, int64(len(buf)))], castagnoli) != n.sums[(lo+i)/granuleSize] {
			return fmt.Errorf("%w: %s: checksum of the granule at %d", errDamaged, q.key, lo+i)
		}
	}
	return nil
}

var (
	errDamaged = errors.New("damaged copy")
	errLate    = fmt.Errorf("no answer within %v", readDeadline)
)
