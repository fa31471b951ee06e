package cache

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/internal/trace"
)

// request asks for bytes of one extent. It does not change. Every read and every fetch is one:
//
//	inMemory   looks in the ring, and
//	fromDisk   reads what is kept, both without the volume's lock;
//	board      with the lock, looks again, joins the flight that brings the bytes, or begins one;
//	collect    waits for it.
//
// An extent moves from a flight to the ring to the disk, and is in its next place before it leaves the last. So board misses
// nothing, since it looks in that order under the lock under which flights land.
type request struct {
	file, x  int
	off, n   int // which bytes of the extent
	form     form
	purpose  purpose
	heldOnly bool      // what would have to be fetched is not
	due      time.Time // when a reader needs them; zero: unknown
}

// query is a request that somebody waits for.
type query struct {
	request
	v   *Volume
	ctx context.Context
	p   []byte // where bytes from the disk are put; nil: in memory that is reserved for them
}

// query asks for bytes of the file from off, as many of n as lie in one extent.
func (v *Volume) query(ctx context.Context, file int, off int64, n int) *query {
	q := &query{request: request{file: file, x: int(off / ExtentSize), off: int(off % ExtentSize)}, v: v, ctx: ctx}
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

// class is what memory is reserved as.
func (p purpose) class() Class {
	if p == ahead {
		return ForPrefetch
	}
	return ForDemand
}

// lease is bytes that do not change until release, which must be called once.
type lease struct {
	data []byte
	buf  *buffer // nil: the bytes are where the reader wanted them
}

func (l lease) release() {
	if l.buf != nil {
		l.buf.Release()
	}
}

// Errors of Serve.
var (
	ErrBusy    = errors.New("cache: the bytes are on their way from another node")
	ErrMemory  = errors.New("cache: no memory now")
	ErrNotHeld = errors.New("cache: not held")
)

// ReadAt fills p from the file's offset off, with fewer bytes only at the end of the file. When ctx ends the reader
// leaves; the fetch goes on.
func (v *Volume) ReadAt(ctx context.Context, file int, p []byte, off int64) (int, error) {
	p = p[:max(0, min(int64(len(p)), v.m.Size(file)-off))]
	for n := 0; n < len(p); {
		q := v.query(ctx, file, off+int64(n), len(p)-n)
		q.p = p[n : n+q.n]
		q.readAhead()
		l, err := q.get()
		if err != nil {
			return n, err
		}
		if l.buf != nil {
			copy(p[n:], l.data)
			l.release()
		}
		n += q.n
	}
	count(&v.ds.count.ReadBytes, len(p))
	return len(p), nil
}

// Lend returns n bytes of the file from off if they are in memory in one piece. They do not change until release,
// which must be called once.
func (v *Volume) Lend(file int, off int64, n int) (data []byte, release func(), ok bool) {
	q := v.query(context.Background(), file, off, n)
	if q.n < n {
		return nil, nil, false
	}
	l, ok := q.inMemory()
	if !ok {
		return nil, nil, false
	}
	q.wasRead()
	return l.data, l.buf.Release, true
}

// ReadNow fills p from off, inside the file, if the disk has it as it came and need not be waited for. A record that cannot be
// read, or must be restored, is left to ReadAt.
func (v *Volume) ReadNow(file int, p []byte, off int64) bool {
	q := v.query(context.Background(), file, off, len(p))
	k := v.keptRecord(file, q.x)
	if k.d == nil || k.coded || q.n < len(p) || k.d.store.ReadAtNow(k.loc, k.n, p, int64(q.off)) != nil {
		return false
	}
	v.ds.count.kept(len(p))
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
	q := v.query(ctx, file, 0, ExtentSize)
	if v.codec != nil {
		q.form = f
	}
	var l lease
	switch v.Extents(file) {
	case 0:
		return nil, func() {}, nil
	case 1:
		if l, err = q.get(); err == nil {
			count(&v.ds.count.ReadBytes, len(l.data))
		}
	default:
		if l, err = q.room(int(v.m.Size(file))); err == nil {
			_, err = v.ReadAt(ctx, file, l.data, 0)
		}
	}
	if err != nil {
		l.release()
		return nil, nil, err
	}
	if l.buf.coded > 0 && v.codec.Form(l.data) == [8]byte{} { // it cannot be decoded: who asks for the file forgets it
		l.release()
		return v.Sample(ctx, file)
	}
	return l.data, l.release, nil
}

// Serve lends n bytes of one extent of the file to a peer, whose reader needs them at due; if that is not in the future
// it waits. They are valid and do not change until release. held: only what is in memory or on disk.
func (v *Volume) Serve(ctx context.Context, file int, off int64, n int, due time.Time, held bool) (data []byte, release func(), err error) {
	if file < 0 || file >= v.m.Len() || n <= 0 || off < 0 || off > v.m.Size(file)-int64(n) || off%ExtentSize+int64(n) > ExtentSize {
		return nil, nil, fmt.Errorf("cache: there are no %d bytes at %d of file %d in one extent", n, off, file)
	}
	q := v.query(ctx, file, off, n)
	q.purpose, q.due, q.heldOnly = serving, due, held
	l, err := q.get()
	return l.data, l.release, err
}

// ServeCoded lends the coded form of a file that is here so, to a peer that asks for the whole file and can decode what
// [Codec].Form calls form. It waits for nothing but the disk.
func (v *Volume) ServeCoded(ctx context.Context, file int, off int64, n int, form [8]byte) (data []byte, release func(), ok bool) {
	if v.codec == nil || file < 0 || file >= v.m.Len() || off != 0 || v.Extents(file) != 1 || int64(n) != v.m.Size(file) {
		return nil, nil, false
	}
	q := v.query(ctx, file, 0, n)
	q.form, q.purpose, q.heldOnly = codedForm, serving, true
	l, err := q.get()
	if err == nil && v.codec.Form(l.data) != form {
		l.release()
		err = ErrNotHeld
	}
	return l.data, l.release, err == nil
}

// get returns the bytes of a request. Those that come from the disk are put into p, unless that is nil.
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
		// It has moved, or came in another form, or is to be asked for alone.
	}
}

// inMemory returns the bytes of a request from the ring.
func (q *query) inMemory() (l lease, ok bool) {
	k, off, read := q.v.key(q.v.extent(q.file, q.x)), q.off, q.n
	if q.purpose == serving {
		read = 0
	}
	b := q.v.c.get(k, read, q.form)
	if g := off / granuleSize; b == nil && q.purpose == serving && q.v.Extents(q.file) > 1 && off+q.n <= (g+1)*granuleSize {
		b, off = q.v.c.get(k.granule(g), 0, plainForm), off-g*granuleSize
	}
	if b == nil {
		return lease{}, false
	}
	if q.purpose == reading {
		count(&q.v.ds.count.RingHits, 1)
	}
	return q.lend(b, off), true
}

// lend is a lease of a buffer, whose byte off is the first of the request.
func (q *query) lend(b *buffer, off int) lease {
	b.wanted(q.purpose != serving)
	if b.coded > 0 {
		return lease{b.data, b}
	}
	return lease{b.data[off:][:q.n], b}
}

// room returns memory for n bytes that a request finds on disk. For a reader it is not demand: many such files together must
// leave memory for fetches that their readers wait for, and prefetched data may hold the memory that it waits for.
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
	k := q.v.keptRecord(q.file, q.x)
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
		l.release()
		return lease{}, false, err
	}
	if k.coded {
		l.buf.coded = n
	}
	if q.purpose == reading {
		q.v.ds.count.kept(n)
	}
	return l, true, nil
}

// boarding is what a request waits for: parts, and granules that are here. It is empty if the extent is here by now.
type boarding struct {
	seats []seat
	span  trace.Span
}

// seat is a part of a flight, or bytes that are here.
type seat struct {
	p    *part
	buf  *buffer
	kept keptGranule
}

// board finds what to wait for. It joins the flight that brings the extent, or begins one.
func (q *query) board() (boarding, error) {
	e := q.v.extent(q.file, q.x)
	k := q.v.key(e)
	q.v.mu.Lock()
	defer q.v.mu.Unlock()
	if p := q.v.flights[k.piece]; p != nil {
		return q.joining(p)
	}
	inRing, staged := q.v.c.ring.forms(k)
	kept := q.v.keptRecord(q.file, q.x)
	onDisk := kept.d != nil
	restorable := staged || onDisk && kept.coded
	switch {
	case q.form != codedForm && (inRing || onDisk && !kept.coded), q.form != plainForm && restorable:
		return boarding{}, nil
	case q.form == codedForm, q.heldOnly && !restorable:
		return boarding{}, ErrNotHeld
	case restorable:
		from := &restorer{keptRecord: kept}
		if from.staged = q.v.c.get(k, int(q.v.m.Size(q.file)), codedForm); from.staged == nil && (!onDisk || !kept.coded) {
			return boarding{}, nil // it left memory a moment ago
		}
		return q.depart(from)
	}
	if q.purpose == serving && (!q.v.gives(q.file, q.x) || !q.fetchesPart(e)) {
		return boarding{}, ErrNotHeld
	}
	if q.purpose == reading && q.p != nil {
		if b, ok, err := q.boardGranules(e); ok || err != nil {
			return b, err
		}
	}
	if err := q.v.failed.lately(e); err != nil {
		return boarding{}, err
	}
	return q.depart(nil)
}

// joining waits for a part that is on its way. v.mu is held.
func (q *query) joining(p *part) (b boarding, err error) {
	b.seats = []seat{{p: p}}
	if q.purpose == serving {
		switch {
		case q.heldOnly:
			return boarding{}, ErrNotHeld
		case p.fl.asks(): // a peer waits for no other node
			return boarding{}, ErrBusy
		case p.fl.memory.Load() == 0:
			return boarding{}, ErrMemory
		}
		p.join(0)
		p.hurry(!q.due.After(time.Now()))
		return b, nil
	}
	count(&q.v.ds.count.Joined, 1)
	p.join(q.n)
	p.hurry(true)
	b.span = q.waits("joined")
	return b, nil
}

// depart begins a flight of the whole extent, which is restored unless from is nil, and waits for it. v.mu is held.
func (q *query) depart(from *restorer) (b boarding, err error) {
	parts := []part{{key: q.v.key(q.v.extent(q.file, q.x)), file: q.file, form: q.form, spent: q.purpose == serving}}
	sources := q.v.sources(q.purpose, q.file, q.x)
	if from != nil {
		sources = append([]Source{from}, sources...)
	}
	n := 0
	if q.purpose == serving {
		if !q.v.c.ledger.TryReserve(parts[0].size()+from.need(), ForDemand) {
			from.close()
			return boarding{}, ErrMemory
		}
	} else {
		switch n = q.n; {
		case from == nil:
			count(&q.v.ds.count.Misses, 1)
			b.span = q.waits("miss")
		case from.staged == nil:
			q.v.ds.count.kept(n)
		default:
			count(&q.v.ds.count.RingHits, 1)
		}
	}
	fl := q.v.begin(q.request, b.span, parts, sources, nil)
	if fl == nil {
		from.close()
		b.span.End(ErrClosed)
		return boarding{}, ErrClosed
	}
	fl.parts[0].join(n)
	fl.parts[0].hurry(q.purpose == serving && !q.due.After(time.Now()))
	b.seats = []seat{{p: &fl.parts[0]}}
	return b, nil
}

// collect waits for what a request boarded. It returns false if the request is to look again.
func (q *query) collect(b boarding) (l lease, ok bool, err error) {
	if len(b.seats) == 0 {
		return lease{}, false, nil
	}
	start := time.Now()
	first := b.seats[0].p
	if first == nil || first.key.kind() != whole {
		if err = q.collectGranules(b); errors.Is(err, errMoved) {
			return lease{}, false, nil
		}
		count((*int64)(&q.v.ds.count.Stall), int(time.Since(start)))
		return lease{data: q.p}, err == nil, err
	}
	err = first.await(q.ctx)
	fl := first.fl
	if q.purpose == reading && fl.restores() == nil { // otherwise it did not wait for the store
		count((*int64)(&q.v.ds.count.Stall), int(time.Since(start)))
	}
	if err != nil {
		b.span.End(err)
		return lease{}, false, err
	}
	b.span.End(fl.err)
	switch {
	case fl.err != nil && first.blames(fl.err):
		return lease{}, false, nil
	case fl.err != nil:
		return lease{}, false, q.v.store.named(q.file, fl.err)
	case first.buf.coded > 0 && q.form == plainForm: // to be restored
		first.buf.Release()
		return lease{}, false, nil
	}
	return q.lend(first.buf, q.off), true, nil
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

// Prefetch starts to fetch an extent that nobody waits for yet, on account a, which may be nil. due is when a reader
// will need it, zero if unknown. It never blocks. done is called once after Started, from another goroutine.
func (v *Volume) Prefetch(a *Account, file, x int, due time.Time, done func(file int, err error)) Outcome {
	g := group{v: v, account: a, request: request{x: x, n: int(v.ExtentBytes(file, x)), form: anyForm, purpose: ahead, due: due}}
	_, _, out := g.start([]int{file}, done)
	return out
}

// PrefetchGroup is Prefetch of several files by one request: files of one extent each in one object, by ascending
// offset. Files that are resident or in flight are left out, and so is everything after the first file that does not
// lie behind the one before it in the same object, or of which one asks a peer and the other does not. Memory is
// reserved for as many files from the front as possible; the outcome is NoMemory only if that is none. due is when the
// first of them is needed.
//
// done is called once for each started file, from another goroutine. A reader that asks for one of them meanwhile
// makes the whole request urgent. If the request fails, all its files fail; a reader that waits for one tries again
// with its own request, unless the store is in trouble.
func (v *Volume) PrefetchGroup(a *Account, files []int, due time.Time, done func(file int, err error)) (started int, out Outcome) {
	g := group{v: v, account: a, request: request{form: anyForm, purpose: ahead, due: due}}
	started, _, out = g.start(files, done)
	return started, out
}

// Gather is for a peer that asks for the files at due, and then gets each by Serve: it starts to fetch those that are
// missing and of one extent, by as few requests as PrefetchGroup would. It never blocks.
func (v *Volume) Gather(files []int, due time.Time) {
	g := group{v: v, request: request{purpose: serving, due: due}}
	for out := Started; len(files) > 0 && (out == Started || out == Present); {
		_, files, out = g.start(files, nil)
	}
}

// group asks for several files that nobody waits for yet, or, if n is not 0, for extent x of each.
type group struct {
	request
	v       *Volume
	account *Account
}

// start begins a flight of files, as PrefetchGroup says. It also returns the files from which on it left all out.
func (g *group) start(files []int, done func(file int, err error)) (started int, rest []int, out Outcome) {
	v := g.v
	var parts []part
	var sources []Source
	var o objstore.Object
	var end int64
	out = Present
	v.mu.Lock()
	defer v.mu.Unlock()
	for i, file := range files {
		p := part{key: v.key(v.extent(file, g.x)), file: file, form: g.form, account: g.account, spent: g.purpose == serving}
		if g.n == 0 && v.Extents(file) != 1 || g.isHere(p.key) || g.purpose == serving && !v.gives(file, g.x) {
			continue
		}
		at, off := v.store.object(file)
		from := v.sources(g.purpose, file, g.x)
		behind := len(parts) == 0 || at.Key == o.Key && at.ETag == o.ETag && off >= end && from[0] == sources[0]
		if behind && !v.c.ledger.TryReserve(p.size(), g.purpose.class()) {
			behind, out = false, NoMemory
		}
		if !behind {
			rest = files[i:]
			break
		}
		o, end, sources = at, off+v.m.Size(file), from
		parts = append(parts, p)
	}
	switch {
	case len(parts) == 0:
		return 0, rest, out
	case v.begin(g.request, trace.Span{}, parts, sources, done) == nil:
		return 0, nil, Closed
	case g.purpose == ahead:
		count(&v.ds.count.Prefetched, len(parts))
	}
	return len(parts), rest, Started
}

// isHere reports whether an extent is here or on its way; if so it is claimed for an order. The volume's lock is held.
func (g *group) isHere(k extentKey) bool {
	if g.purpose == serving {
		return k.here()
	}
	return g.v.claim(g.account, k.extent())
}
