package objstore

import (
	"cmp"
	"context"
	"math/bits"
	"sync"
	"time"
)

// Hedger sends a second request for a late one, and takes the first answer (J. Dean and L. A. Barroso, "The Tail at
// Scale", CACM 56(2), 2013). The usual place is Retry(Limit(Hedge(Meter(store)))): the meter counts the second GET
// like any other, and the wait for a place makes no request late. Second GETs take no place: they are few.
//
// A read is late if it takes longer than 98 of 100 reads of its size, and a reader needs the bytes: now, if it is
// Demand, or raised to it; soon, if its [Urgency] has a due time that the usual latency would miss. A prefetch with
// time to spare is not hedged.
//
// Second GETs are at most 2% of all, in number and in bytes. None are sent while the whole store is slow and they
// would only add to its load: for a read that later reads have not overtaken, while the median of the latest reads is
// twice the usual one, and for a while after second GETs stopped coming in first.
type Hedger struct {
	below
	m HedgeMemory

	others sync.WaitGroup // second GETs under way

	mu         sync.Mutex
	classes    [hedgeClasses]latencies
	inFlight   int     // reads
	completed  int64   // reads
	tokens     float64 // second GETs that may be sent
	byteTokens float64
	wins       float64 // part of the latest second GETs that came in first
	pause      int     // reads that pass before the next one is sent
	stats      HedgeStats
}

// HedgeMemory supplies the memory for second answers. A nil one is unlimited.
type HedgeMemory interface {
	// Borrow reserves n bytes without waiting, or returns false.
	Borrow(n int64) bool
	// Return gives n bytes back.
	Return(n int64)
}

// HedgeStats are counts since the start.
type HedgeStats struct {
	Sent int64 `json:"sent"` // second GETs
	Won  int64 `json:"won"`  // of them, that came in first
}

const (
	hedgeClasses = 8 // of sizes: to 16 KiB, 64 KiB, … 64 MiB, and above
	// hedgeShare is the budget; lateQuantile matches it.
	hedgeShare   = 0.02
	lateQuantile = 1 - hedgeShare
	// hedgeBurst bounds the tokens saved in a quiet time, so that a store that stops does not get a salvo.
	hedgeBurst      = 8
	hedgeByteBurst  = 64 << 20
	slowMedian      = 2.0 // times the median before
	winWeight       = 1.0 / 16
	fewWins         = 0.1  // below that hedges do not help …
	pauseReads      = 1000 // … and this many reads pass before the next one is sent
	latencySamples  = 32   // between two looks at the quantiles
	latencyHistory  = 1024 // samples after which the older half is forgotten
	leastLateFactor = 1.5  // late is at least so many medians, so that a steady store's jitter is not,
	// leastLate is the least time after which a read is late: a second GET takes a round trip itself.
	leastLate      = 20 * time.Millisecond
	mostLateFactor = 8 // and at most so many, also where more than 2% of the reads stall
)

// Hedge decorates r.
func Hedge(r Layer, m HedgeMemory) *Hedger { return &Hedger{below: r, m: m, wins: 1} }

// Stats returns the counts.
func (h *Hedger) Stats() HedgeStats {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.stats
}

// Wait returns when the last second GET has ended. It is cancelled once its read is done.
func (h *Hedger) Wait() { h.others.Wait() }

// latencies are the recent latencies of reads of one size class.
type latencies struct {
	recent, now, before [histSub * histOctaves]uint16 // the latest few, this half of the history, the half before
	n                   int                           // in now
	median              time.Duration
	late                time.Duration // zero: not known yet
	slow                bool          // the latest took far longer than earlier ones
}

func classOf(n int64) int { return min(bits.Len64(uint64(max(0, n-1))>>14+1)/2, hedgeClasses-1) }

func (l *latencies) record(d time.Duration) {
	b := bucketOf(uint64(max(0, d.Microseconds())))
	l.recent[b]++
	l.now[b]++
	if l.n++; l.n%latencySamples != 0 {
		return
	}
	all := l.now
	for i, c := range l.before {
		all[i] += c
	}
	latest := quantile(&l.recent, 0.5)
	l.slow = l.median > 0 && latest > time.Duration(slowMedian*float64(l.median))
	l.median = quantile(&all, 0.5)
	factor := func(f float64) time.Duration { return time.Duration(f * float64(l.median)) }
	l.late = max(leastLate, min(max(quantile(&all, lateQuantile), factor(leastLateFactor)), factor(mostLateFactor)))
	clear(l.recent[:])
	if l.n == latencyHistory/2 {
		l.before = l.now
		l.n = 0
		clear(l.now[:])
	}
}

// quantile is the upper end of the bucket with that quantile.
func quantile(counts *[histSub * histOctaves]uint16, q float64) time.Duration {
	total := 0
	for _, c := range counts {
		total += int(c)
	}
	rank := int(q*float64(total)) + 1
	for b, c := range counts {
		if rank -= int(c); rank <= 0 {
			return time.Duration(bucketStart(b+1)) * time.Microsecond
		}
	}
	return time.Duration(bucketStart(len(counts))) * time.Microsecond
}

// read is one read and its second GET.
type read struct {
	h     *Hedger
	ctx   context.Context
	o     Object
	spans []Span
	n     int64 // bytes of the spans
	class int
	start time.Time
	// overtaken is the count of completed reads at which later reads have overtaken this one: those in flight when it
	// began, and a quarter more, are done.
	overtaken int64
	cancel    context.CancelFunc // of the first GET

	mu     sync.Mutex
	timer  *time.Timer
	unlook func() // ends the watch for a raised urgency
	done   bool   // the first GET has returned

	buf   []byte             // of the second GET
	stop  context.CancelFunc // of it; nil: it was not sent
	ended chan struct{}      // closed when it has returned
	err   error              // of it, then
	came  bool               // it came in first
	over  chan struct{}      // closed when buf is no longer needed
}

// ReadAt implements [Reader].
func (h *Hedger) ReadAt(ctx context.Context, o Object, p []byte, off int64) error {
	return ReadAt(ctx, h, o, p, off)
}

// ReadSpans implements [SpanReader].
func (h *Hedger) ReadSpans(ctx context.Context, o Object, spans []Span) error {
	if err := CheckSpans(o, spans); err != nil || len(spans) == 0 {
		return cmp.Or(err, ctx.Err())
	}
	gross := SpansLength(spans)
	r := &read{h: h, ctx: ctx, o: o, spans: spans, class: classOf(gross), start: time.Now()}
	for _, s := range spans {
		r.n += int64(len(s.P))
	}
	h.mu.Lock()
	h.tokens = min(h.tokens+hedgeShare, hedgeBurst)
	h.byteTokens = min(h.byteTokens+hedgeShare*float64(gross), hedgeByteBurst)
	h.pause = max(0, h.pause-1)
	after := h.classes[r.class].late
	others := int64(h.inFlight)
	h.inFlight++
	r.overtaken = h.completed + others + others/4
	h.mu.Unlock()

	fctx := ctx
	if after > 0 {
		fctx, r.cancel = context.WithCancel(ctx)
		defer r.cancel()
		r.mu.Lock()
		r.timer = time.AfterFunc(after, r.overdue)
		r.mu.Unlock()
	}
	return r.finish(h.below.ReadSpans(fctx, o, spans))
}

// overdue decides whether to send the read a second time now, or when to check again.
func (r *read) overdue() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.done || r.stop != nil {
		return
	}
	h := r.h
	h.mu.Lock()
	defer h.mu.Unlock()
	usual := h.classes[r.class].late
	if PriorityOf(r.ctx) != Demand {
		u := urgencyOf(r.ctx)
		if u == nil {
			return
		}
		if r.unlook == nil {
			r.unlook = u.watch(func() { go r.overdue() }) // it may call at once, under our locks
		}
		due, ok := u.Due()
		if !ok {
			return
		}
		if spare := time.Until(due) - usual; spare > 0 {
			r.timer.Reset(spare)
			return
		}
	}
	if !h.may(r) {
		r.timer.Reset(usual) // a stall can outlast the reason against it
		return
	}
	h.tokens--
	h.byteTokens -= float64(SpansLength(r.spans))
	h.stats.Sent++
	r.buf, r.ended, r.over = make([]byte, r.n), make(chan struct{}), make(chan struct{})
	var ctx context.Context
	ctx, r.stop = context.WithCancel(r.ctx)
	h.others.Go(func() { r.ask(ctx) })
	tell(r.ctx, "hedge sent", nil)
}

// may reports whether a second GET for r may be sent now, and borrows its memory. h.mu is held.
func (h *Hedger) may(r *read) bool {
	switch {
	case h.tokens < 1 || h.byteTokens < float64(SpansLength(r.spans)):
	case h.pause > 0 || h.classes[r.class].slow || h.completed < r.overtaken:
	default:
		return h.m == nil || h.m.Borrow(r.n)
	}
	return false
}

// ask sends the second GET, and returns its memory when the read is over.
func (r *read) ask(ctx context.Context) {
	own, buf := make([]Span, len(r.spans)), r.buf
	for i, s := range r.spans {
		own[i] = Span{Off: s.Off, P: buf[:len(s.P):len(s.P)]}
		buf = buf[len(s.P):]
	}
	err := r.h.below.ReadSpans(ctx, r.o, own)
	r.stop()
	r.mu.Lock()
	r.err = err
	if err == nil && !r.done {
		r.came = true
		r.cancel()
	}
	r.mu.Unlock()
	close(r.ended)
	<-r.over
	if r.h.m != nil {
		r.h.m.Return(r.n)
	}
}

// finish takes the first GET's outcome and returns the read's.
func (r *read) finish(err error) error {
	took := time.Since(r.start)
	if r.timer != nil {
		r.timer.Stop()
	}
	r.mu.Lock()
	r.done = true
	if r.unlook != nil {
		r.unlook()
	}
	r.mu.Unlock()

	won := false
	if r.stop != nil {
		// The caller gets a second answer that has arrived, or may still succeed where the first GET failed.
		if !r.came && (err == nil || KindOf(err) != KindTransient || r.ctx.Err() != nil) {
			r.stop()
		} else if <-r.ended; err != nil && r.err == nil {
			won, err = true, nil
			buf := r.buf
			for _, s := range r.spans {
				buf = buf[copy(s.P, buf):]
			}
			tell(r.ctx, "hedge won", nil)
		}
		close(r.over)
	}
	r.h.ended(r, took, err, won)
	return err
}

func (h *Hedger) ended(r *read, took time.Duration, err error, won bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.inFlight--
	h.completed++
	if err == nil {
		h.classes[r.class].record(took) // at least the first GET's time if the second one won
	}
	if r.stop == nil {
		return
	}
	win := 0.0
	if won {
		win = 1
		h.stats.Won++
	}
	if h.wins += winWeight * (win - h.wins); h.wins < fewWins {
		h.wins, h.pause = fewWins/(1-winWeight), pauseReads // two that lose are the next pause
	}
}
