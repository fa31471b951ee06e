package cache

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/internal/trace"
)

// query asks for bytes of one extent, and somebody waits for them:
//
//	inMemory   looks in the ring, and
//	fromDisk   reads what is kept, both without the volume's lock;
//	board      with the lock, looks again, joins the flight that brings the bytes, or begins one;
//	collect    waits for it.
//
// An extent moves from a flight to the ring to the disk, and is in its next place before it leaves the last. So board
// misses nothing, since it looks in that order under the lock under which flights land.
//
// A read of granules (granules.go) is answered in parts: it goes on with what it lacks.
type query struct {
	v        *Volume
	ctx      context.Context
	file, x  int
	off, n   int // which bytes of the extent
	form     form
	purpose  purpose
	heldOnly bool      // what would have to be fetched is not
	due      time.Time // when another node's reader needs them; zero: now
	// for the bytes, which may come in parts; nil: all at once, those from the disk in memory that is reserved for them
	p       []byte
	counted bool // not all was in memory
}

// newQuery asks for bytes of the file from off, as many of n as lie in one extent.
func newQuery(ctx context.Context, v *Volume, file int, off int64, n int) *query {
	q := &query{v: v, ctx: ctx, file: file, x: int(off / ExtentSize), off: int(off % ExtentSize)}
	q.n = int(min(int64(n), v.ExtentBytes(file, q.x)-int64(q.off)))
	return q
}

// form is the form in which bytes are wanted.
type form uint8

const (
	plainForm form = iota // as the file came
	anyForm               // its coded form will do
	codedForm             // its coded form
)

// purpose is who wants bytes.
type purpose uint8

const (
	reading purpose = iota // a reader, who waits
	ahead                  // an order, of what a reader will need
	serving                // another node
)

func (p purpose) class() Class {
	if p == ahead {
		return ForPrefetch
	}
	return ForDemand
}

// lease is bytes that do not change until its buffer is released, which must be done once.
type lease struct {
	data []byte
	buf  *buffer // nil: the bytes are where the reader wanted them
}

// Errors of Serve.
var (
	ErrBusy    = errors.New("cache: the bytes are on their way from another node")
	ErrMemory  = errors.New("cache: no memory now")
	ErrNotHeld = errors.New("cache: not held")
)

// ReadAt fills p from off, with fewer bytes only at the file's end. When ctx ends the reader leaves; the fetch goes on.
func (v *Volume) ReadAt(ctx context.Context, file int, p []byte, off int64) (int, error) {
	p = p[:max(0, min(int64(len(p)), v.m.Size(file)-off))]
	for n := 0; n < len(p); {
		q := newQuery(ctx, v, file, off+int64(n), len(p)-n)
		q.p = p[n : n+q.n]
		q.readAhead()
		for q.n > 0 {
			l, err := q.get()
			if err != nil {
				return n, err
			}
			got := len(l.data)
			if l.buf != nil {
				copy(q.p, l.data)
				l.buf.Release()
			}
			q.p, q.off, q.n, n = q.p[got:], q.off+got, q.n-got, n+got
		}
		q.count(&v.ds.count.RingHits, false)
	}
	count(&v.ds.count.ReadBytes, len(p))
	return len(p), nil
}

// Lend returns n bytes from off if memory has them in one piece. They are valid until release, to be called once.
func (v *Volume) Lend(file int, off int64, n int) (data []byte, release func(), ok bool) {
	q := newQuery(context.Background(), v, file, off, n)
	if q.n < n {
		return nil, nil, false
	}
	l, ok := q.inMemory()
	if !ok {
		return nil, nil, false
	}
	q.count(&v.ds.count.RingHits, false)
	q.wasRead()
	return l.data, l.buf.Release, true
}

// ReadNow fills p from off, inside the file, if the disk has it as it came and need not be waited for. A record that
// cannot be read, or must be restored, is left to ReadAt.
func (v *Volume) ReadNow(file int, p []byte, off int64) bool {
	q := newQuery(context.Background(), v, file, off, len(p))
	k := v.key(file, q.x).record(file)
	if k.d == nil || k.coded || q.n < len(p) || k.d.store.ReadAtNow(k.loc, k.n, p, int64(q.off)) != nil {
		return false
	}
	q.kept(len(p))
	q.wasRead()
	return true
}

// wasRead notes a read by a door that asks for what is here only.
func (q *query) wasRead() {
	count(&q.v.ds.count.ReadBytes, q.n)
	q.readAhead()
}

// Sample returns the whole file. The bytes are valid and do not change until release.
func (v *Volume) Sample(ctx context.Context, file int) (data []byte, release func(), err error) {
	return v.sample(ctx, file, plainForm)
}

// SampleCoded is Sample for a reader that knows the codec: it gets the coded form of a file that is here so.
func (v *Volume) SampleCoded(ctx context.Context, file int) (data []byte, release func(), err error) {
	return v.sample(ctx, file, anyForm)
}

func (v *Volume) sample(ctx context.Context, file int, f form) (data []byte, release func(), err error) {
	q := newQuery(ctx, v, file, 0, ExtentSize)
	if v.codec != nil {
		q.form = f
	}
	var l lease
	switch v.Extents(file) {
	case 0:
		return nil, func() {}, nil
	case 1:
		if l, err = q.get(); err == nil {
			q.count(&v.ds.count.RingHits, false)
			count(&v.ds.count.ReadBytes, len(l.data))
		}
	default:
		if l, err = q.room(int(v.m.Size(file))); err == nil {
			_, err = v.ReadAt(ctx, file, l.data, 0)
		}
	}
	if err != nil {
		l.buf.Release()
		return nil, nil, err
	}
	if l.buf.coded > 0 && v.codec.Form(l.data) == [8]byte{} { // it cannot be decoded: who asks for the file forgets it
		l.buf.Release()
		return v.Sample(ctx, file)
	}
	return l.data, l.buf.Release, nil
}

// Serve lends n bytes of one extent of the file to a peer, whose reader needs them at due; if that is not in the future
// it waits. They are valid and do not change until release. held: only what is in memory or on disk.
func (v *Volume) Serve(ctx context.Context, file int, off int64, n int, due time.Time,
	held bool) (data []byte, release func(), err error) {
	if file < 0 || file >= v.m.Len() || n <= 0 || off < 0 || off > v.m.Size(file)-int64(n) ||
		off%ExtentSize+int64(n) > ExtentSize {
		return nil, nil, fmt.Errorf("cache: there are no %d bytes at %d of file %d in one extent", n, off, file)
	}
	q := newQuery(ctx, v, file, off, n)
	q.purpose, q.due, q.heldOnly = serving, due, held
	l, err := q.get()
	return l.data, l.buf.Release, err
}

// ServeCoded lends the coded form of a file that is here so, to a peer that asks for the whole file and can decode what
// [Codec].Form calls form. It waits for nothing but the disk.
func (v *Volume) ServeCoded(ctx context.Context, file int, off int64, n int, form [8]byte) (
	data []byte, release func(), ok bool) {
	if v.codec == nil || file < 0 || file >= v.m.Len() || off != 0 || v.Extents(file) != 1 ||
		int64(n) != v.m.Size(file) {
		return nil, nil, false
	}
	q := newQuery(ctx, v, file, 0, n)
	q.form, q.purpose, q.heldOnly = codedForm, serving, true
	l, err := q.get()
	if err == nil && v.codec.Form(l.data) != form {
		l.buf.Release()
		err = ErrNotHeld
	}
	return l.data, l.buf.Release, err == nil
}

// get returns the bytes of a request, or the first part of them.
func (q *query) get() (lease, error) {
	for {
		if l, ok := q.inMemory(); ok {
			return l, nil
		}
		if l, ok, err := q.fromDisk(); ok || err != nil {
			return l, err
		}
		b, err := q.board()
		if err != nil {
			return lease{}, err
		}
		if l, ok, err := q.collect(b); ok || err != nil {
			return l, err
		}
		// It has moved, came in another form, was not to be restored, or is to be asked for alone.
	}
}

// inMemory returns the bytes of a request from the ring.
func (q *query) inMemory() (l lease, ok bool) {
	b := q.v.c.get(q.v.key(q.file, q.x), q.reads(), q.form)
	if b == nil {
		return lease{}, false
	}
	return q.lend(b, q.off), true
}

// reads returns how many bytes are read by that: for a peer none.
func (q *query) reads() int {
	if q.purpose == serving {
		return 0
	}
	return q.n
}

// lend is a lease of a buffer, whose byte off is the first of the request.
func (q *query) lend(b *buffer, off int) lease {
	b.wanted(q.purpose != serving)
	if b.coded > 0 {
		return lease{b.data, b}
	}
	return lease{b.data[off:min(off+q.n, len(b.data))], b}
}

// count counts a reader's request, again if it waits again, by where its first bytes come from that are not in memory.
func (q *query) count(c *int64, waits bool) {
	if q.purpose == reading && (waits || !q.counted) {
		count(c, 1)
		q.counted = true
	}
}

// room returns memory for n bytes that a request finds on disk. For a reader it is not demand: many such files together
// must leave memory for fetches that their readers wait for, and prefetched data may hold the memory that it waits for.
func (q *query) room(n int) (lease, error) {
	class := ForPrefetch
	if q.purpose == serving { // the server bounds how much peers get of what prefetching leaves
		if class = ForDemand; !q.v.c.ledger.TryReserve(footprint(n), class) {
			return lease{}, ErrMemory
		}
	} else if err := q.v.c.reserve(q.ctx, footprint(n), class); err != nil {
		return lease{}, err
	}
	b := newBuffer(q.v.c.ledger, n, class)
	return lease{b.data, b}, nil
}

// fromDisk reads the bytes of a request from the kept record, if that has the form.
func (q *query) fromDisk() (l lease, ok bool, err error) {
	k := q.v.key(q.file, q.x).record(q.file)
	if k.d == nil || k.coded && q.form == plainForm || !k.coded && q.form == codedForm {
		return lease{}, false, nil
	}
	off, n := int64(q.off), q.n
	if k.coded {
		off, n = 0, k.n
	}
	if l.data = q.p; q.p == nil || k.coded {
		if l, err = q.room(n); err != nil {
			return lease{}, false, err
		}
	}
	if ok, err = k.read(q.ctx, l.data, off); !ok {
		l.buf.Release()
		return lease{}, false, err
	}
	if k.coded {
		l.buf.coded = n
	}
	q.kept(n)
	return l, true, nil
}

// kept counts n bytes from the disk.
func (q *query) kept(n int) {
	if q.purpose == reading {
		q.count(&q.v.ds.count.KeepHits, false)
		count(&q.v.ds.count.KeptBytes, n)
	}
}

// boarding is what a request waits for: parts on their way, in turn, or a granule that is here. Empty: look again.
type boarding struct {
	parts []*part
	span  trace.Span
	buf   *buffer // with a reference
	kept  keptGranule
}

// board finds what to wait for. It joins the flight that brings the extent, or begins one.
func (q *query) board() (boarding, error) {
	k := q.v.key(q.file, q.x)
	q.v.mu.Lock()
	defer q.v.mu.Unlock()
	if p := q.v.flights[k.piece]; p != nil {
		return q.joining(p)
	}
	inRing, staged := q.v.c.ring.forms(k)
	kept := k.record(q.file)
	onDisk := kept.d != nil
	restorable := staged || onDisk && kept.coded
	switch {
	case q.form != codedForm && (inRing || onDisk && !kept.coded), q.form != plainForm && restorable:
		return boarding{}, nil
	case q.form == codedForm:
		return boarding{}, ErrNotHeld
	case restorable:
		from := &restorer{keptRecord: kept}
		if from.staged = q.v.c.get(k, int(q.v.m.Size(q.file)), codedForm); from.staged == nil &&
			(!onDisk || !kept.coded) {
			return boarding{}, nil // it left memory a moment ago
		}
		return q.depart(q.whole(), from)
	}
	if b, ok := q.boardGranule(k.granule(q.off / granuleSize)); ok {
		return b, nil
	}
	if q.purpose == serving && (q.heldOnly || !q.v.gives(q.file, q.x) || !q.fetchesPart(k)) {
		return boarding{}, ErrNotHeld
	}
	if f := q.v.failed[k.extent()]; time.Since(f.at) < failureTime {
		return boarding{}, f.err
	}
	return q.depart(q.missing(k), nil)
}

func (q *query) whole() []part {
	return []part{{key: q.v.key(q.file, q.x), file: q.file, form: q.form, spent: q.purpose == serving}}
}

// joining waits for a part that is on its way. v.mu is held.
func (q *query) joining(p *part) (b boarding, err error) {
	switch {
	case q.purpose != serving:
		q.count(&q.v.ds.count.Joined, true)
		b.span = q.waits("joined")
	case q.heldOnly && p.fl.from == nil: // else its coded copy is here
		return boarding{}, ErrNotHeld
	case p.fl.asks(): // a peer waits for no other node
		return boarding{}, ErrBusy
	case !p.fl.funded.Load():
		return boarding{}, ErrMemory
	}
	b.parts = q.ride(p)
	return b, nil
}

// ride joins a part, and the granules after it that are on their way, as far as the request goes. v.mu is held.
func (q *query) ride(p *part) (parts []*part) {
	for ; p != nil; p = q.v.flights[p.key.granule(int(p.key.kind())).piece] {
		p.join(q.reads())
		if p.fl.urgency != nil && (q.purpose != serving || !q.due.After(time.Now())) {
			p.fl.urgency.Raise()
		}
		parts = append(parts, p)
		if !p.key.isGranule() || p.key.off()+granuleSize >= int64(q.off+q.n) {
			break
		}
	}
	return parts
}

// depart begins a flight of parts, which are restored unless from is nil, and waits for those that the request begins
// with. v.mu is held.
func (q *query) depart(parts []part, from *restorer) (b boarding, err error) {
	switch {
	case q.purpose == serving:
		if !q.v.c.ledger.TryReserve(sizeOf(parts)+from.need(), ForDemand) {
			from.close()
			return boarding{}, ErrMemory
		}
	case from == nil:
		q.count(&q.v.ds.count.Misses, true)
		b.span = q.waits("miss")
	case from.staged == nil:
		q.kept(q.n)
	}
	fl := q.v.begin(q.purpose, q.due, b.span, parts, from, nil)
	if fl == nil {
		from.close()
		b.span.End(ErrClosed)
		return boarding{}, ErrClosed
	}
	b.parts = q.ride(&fl.parts[0])
	return b, nil
}

// collect waits for what a request boarded. It returns false if the request is to look again.
func (q *query) collect(b boarding) (l lease, ok bool, err error) {
	switch off := q.off % granuleSize; {
	case b.buf != nil:
		return q.lend(b.buf, off), true, nil
	case b.kept.d != nil:
		l.data = q.p[:min(q.n, granuleSize-off)]
		if ok, err = b.kept.read(q.ctx, l.data, off); ok {
			q.kept(len(l.data))
		}
		return l, ok, err
	case len(b.parts) == 0:
		return lease{}, false, nil
	}
	first, got := b.parts[0], 0
	if q.purpose == reading && first.fl.from == nil { // otherwise it does not wait for the store
		q.v.ds.stall.Add(1)
		defer q.v.ds.stall.Add(-1)
	}
	for i, p := range b.parts {
		if err = p.await(q.ctx, q.reads()); err != nil {
			for _, p := range b.parts[i+1:] {
				p.leave(q.reads())
			}
			break
		}
		if p.key.isGranule() {
			got += copy(q.p[got:], p.buf.data[(q.off+got)%granuleSize:])
			p.buf.Release()
		}
	}
	b.span.End(err)
	switch {
	case got > 0:
		return lease{data: q.p[:got]}, true, nil
	case err == nil && first.buf.coded > 0 && q.form == plainForm: // to be restored
		first.buf.Release()
		return lease{}, false, nil
	case err == nil:
		return q.lend(first.buf, q.off), true, nil
	case q.ctx.Err() == nil && first.blames(err):
		return lease{}, false, nil
	}
	return lease{}, false, q.v.store.named(q.file, cmp.Or(q.ctx.Err(), err))
}

// waits begins the span of a reader that waits for a fetch.
func (q *query) waits(area string) trace.Span {
	if !trace.On() {
		return trace.Span{}
	}
	_, span := trace.Start(q.ctx, "read.wait")
	span.Str("shoal.path", q.v.m.Path(q.file))
	span.Int("shoal.extent", int64(q.x))
	span.Str("shoal.area", area) // as in the metric shoal_reads_total
	return span
}

// Outcome is the result of a Prefetch.
type Outcome uint8

// The outcomes of Prefetch.
const (
	Started  Outcome = iota // done will be called
	Present                 // resident or on its way already
	NoMemory                // no memory now; OnFreed tells when to try again
	Closed                  // the cache is closing
)

// PrefetchGroup is Prefetch of several files by one request: files of one extent each in one object, by ascending
// offset. Files that are resident or in flight are left out, and so is everything after the first file that does not
// lie behind the one before it in the same object, or of which one asks a peer and the other does not. Memory is
// reserved for as many files from the front as possible; the outcome is NoMemory only if that is none. due is when the
// first of them is needed.
//
// done is called once for each started file, from another goroutine. A reader that asks for one of them meanwhile
// makes the whole request urgent. If the request fails, all its files fail; a reader that waits for one tries again
// with its own request, unless the store is in trouble.
func (v *Volume) PrefetchGroup(a *Account, files []int, due time.Time, done func(file int, err error)) (
	started int, out Outcome) {
	started, _, out = v.start(ahead, due, a, files, done)
	return started, out
}

// Gather is for a peer that asks for the files at due, and then gets each by Serve: it starts to fetch those that are
// missing and of one extent, by as few requests as PrefetchGroup would. It never blocks.
func (v *Volume) Gather(files []int, due time.Time) {
	for out := Started; len(files) > 0 && (out == Started || out == Present); {
		_, files, out = v.start(serving, due, nil, files, nil)
	}
}

// start begins a flight of files, as PrefetchGroup says. It also returns the files from which on it left all out.
func (v *Volume) start(purpose purpose, due time.Time, a *Account, files []int, done func(file int, err error)) (
	started int, rest []int, out Outcome) {
	var parts []part
	var from Source // whom the last of them asks first
	var o objstore.Object
	var end int64
	out = Present
	v.mu.Lock()
	defer v.mu.Unlock()
	for i, file := range files {
		p := part{key: v.key(file, 0), file: file, account: a, spent: purpose == serving}
		if v.Extents(file) != 1 || purpose == ahead && p.key.claim(a, false) ||
			purpose == serving && (p.key.here() || !v.gives(file, 0)) {
			continue
		}
		at, off := v.store.object(file)
		asked := purpose.sources(v, file, 0)[0]
		behind := len(parts) == 0 || at.Key == o.Key && at.ETag == o.ETag && off >= end && asked == from
		if behind && !v.c.ledger.TryReserve(p.size(), purpose.class()) {
			behind, out = false, NoMemory
		}
		if !behind {
			rest = files[i:]
			break
		}
		o, end, from = at, off+v.m.Size(file), asked
		parts = append(parts, p)
	}
	switch {
	case len(parts) == 0:
		return 0, rest, out
	case v.begin(purpose, due, trace.Span{}, parts, nil, done) == nil:
		return 0, nil, Closed
	}
	return len(parts), rest, Started
}
