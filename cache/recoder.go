package cache

import (
	"cmp"
	"context"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/shoalfs/shoal/cache/segment"
	"github.com/shoalfs/shoal/internal/killpoint"
	"github.com/shoalfs/shoal/internal/pause"
)

// leastCodable is the share of a segment that may be coded from which it is recoded: the rest is written anew.
const leastCodable = 0.25

// Recoder brings the kept files of a dataset into their coded form, a segment at a time. One goroutine uses it.
type Recoder struct {
	v       *Volume
	threads int
	rest    func(worked time.Duration)

	tried   []atomic.Uint32       // a bit an extent: it has no coded form
	counted []segment.SegmentInfo // all segments, when the codable bytes of each were last counted
	queue   []uint32              // those of which much was codable, which take no more appends
	growing uint32                // and the one in use then, if it is such
}

// NewRecoder returns a recoder that encodes on so many threads. Each calls rest after some work, which may sleep.
func NewRecoder(v *Volume, threads int, rest func(worked time.Duration)) *Recoder {
	return &Recoder{v: v, threads: threads, rest: rest, tried: make([]atomic.Uint32, (len(v.locs)+31)/32)}
}

// Some returns up to n kept files, spread over the dataset, as they came, of 16 MiB at most.
func (r *Recoder) Some(ctx context.Context, n int) (files [][]byte) {
	v := r.v
	if v.ds.readable() == nil || !v.ds.enter() {
		return nil
	}
	defer v.ds.flights.Done()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(v.ds.ctx, cancel)()
	var all []int
	for k := range r.files {
		all = append(all, k.file)
	}
	left := 16 << 20
	for i := range min(n, len(all)) {
		file := all[i*len(all)/min(n, len(all))]
		k := v.key(file, 0).record(file)
		if left -= k.n; left < 0 {
			break
		}
		p := make([]byte, k.n)
		if k.d != nil && !k.coded && k.d.read(ctx, k.loc, k.n, p, 0) == nil {
			files = append(files, p)
		}
	}
	return files
}

// Next recodes a segment of which much has not been tried yet. It returns false if there is none; a segment that still
// grows is none. It ends early with ctx, or the dataset.
func (r *Recoder) Next(ctx context.Context) (more bool) {
	v := r.v
	d := v.ds.readable()
	if v.codec == nil || d == nil || d.noWrites.Load() || !v.ds.enter() {
		return false
	}
	defer v.ds.flights.Done()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(v.ds.ctx, cancel)()
	if len(r.queue) == 0 {
		r.count(ctx, d)
	}
	if len(r.queue) == 0 {
		return false
	}
	id := r.queue[0]
	r.queue = r.queue[1:]
	var todo []keptRecord
	for k := range r.files {
		if k.loc.Segment() == id {
			todo = append(todo, k)
		}
	}
	slices.SortFunc(todo, func(a, b keptRecord) int { return cmp.Compare(a.loc, b.loc) }) // as they lie
	var made atomic.Bool
	var g errgroup.Group
	g.SetLimit(r.threads)
	for _, k := range todo {
		if ctx.Err() != nil || d.noWrites.Load() {
			break
		}
		g.Go(func() error {
			start := time.Now()
			if r.recode(ctx, k) {
				made.Store(true)
			}
			r.rest(time.Since(start))
			return nil
		})
	}
	_ = g.Wait()
	if made.Load() {
		_ = d.writer.do(ctx, func() {
			d.purge(id)
			d.heed("reclaim", d.shrink())
		})
	}
	if ctx.Err() == nil && !d.noWrites.Load() && !d.noReads.Load() {
		return true
	}
	r.counted = nil // it may not have got far
	return false
}

// files yields what is kept of files that may have a coded form.
func (r *Recoder) files(yield func(k keptRecord) bool) {
	for file := range r.v.m.Len() {
		if r.v.Extents(file) != 1 {
			continue
		}
		k := r.v.key(file, 0).record(file)
		if k.d != nil && !k.coded && r.tried[k.extent()/32].Load()&(1<<(k.extent()%32)) == 0 && !yield(k) {
			return
		}
	}
}

// count queues all segments of which much is codable: one look at every extent for all of them. The one in use takes no
// more appends then, as coded records are to lie by themselves; if it is the only one, it is left until nothing has
// changed between two looks. Nothing is counted while the segments stay as they were.
func (r *Recoder) count(ctx context.Context, d *disk) {
	var segments []segment.SegmentInfo
	if d.writer.do(ctx, func() { segments = d.store.Segments() }) != nil {
		return
	}
	if !slices.Equal(segments, r.counted) {
		start := time.Now()
		bytes := map[uint32]int64{}
		for k := range r.files {
			bytes[k.loc.Segment()] += k.loc.Bytes(k.n)
		}
		r.counted, r.growing = segments, 0
		for _, s := range segments {
			switch n := bytes[s.ID]; {
			case n == 0 || float64(n) < leastCodable*float64(s.Live):
			case s.Active:
				r.growing = s.ID
			default:
				r.queue = append(r.queue, s.ID)
			}
		}
		r.rest(time.Since(start))
		if len(r.queue) == 0 {
			return
		}
	}
	if id := r.growing; id != 0 && d.writer.do(ctx, func() { d.store.Retire(id) }) == nil {
		r.growing, r.queue = 0, append(r.queue, id)
	}
}

// recode encodes one file, and puts it in the place of its plain record. It reports whether it did.
func (r *Recoder) recode(ctx context.Context, k keptRecord) bool {
	v, n := r.v, k.n
	for !v.c.ledger.TryReserve(2*footprint(n), ForDemand) {
		if pause.For(ctx, 10*time.Millisecond) != nil {
			return false
		}
	}
	defer v.c.ledger.Release(2*footprint(n), ForDemand)
	plain, out := getBytes(n), getBytes(n)
	defer putBytes(plain)
	if ok, _ := k.read(ctx, plain, 0); !ok {
		return false
	}
	made, ok := v.codec.Encode(out[:0], plain)
	if !ok || len(made) == 0 || len(made) >= n {
		putBytes(out)
		r.tried[k.extent()/32].Or(1 << (k.extent() % 32))
		return false
	}
	used := false
	if k.d.writer.do(ctx, func() {
		rec := k.describe(len(made))
		used = k.replaced(k.d.append(rec, made, func() (segment.Loc, error) {
			return k.d.store.AppendBeyond(rec, made) // until the plain record's segment is dropped
		}), len(made))
	}) != nil {
		return false
	}
	putBytes(out)
	return used
}

// keepPlain has a restored file take the place of its coded record, if there is room for it. r may be nil.
func (r *restorer) keepPlain(file *buffer) {
	if r == nil || r.staged != nil || !r.v.codec.KeepRestored() || r.d.plain.Swap(true) {
		return
	}
	file.refs.Add(1)
	r.d.writer.start(func() {
		if r.d.checkSpace(int64(len(file.data))) == nil { // otherwise writing would end, for what need not be written
			r.replaced(r.d.appendInRoom(r.extentKey, file.data), isPlain)
		}
		file.Release()
		r.d.plain.Store(false)
	})
}

// isPlain is the length of the coded record for one that is not coded, in [extentKey.moved].
const isPlain = -1

// replaced says that a record of the file's other form was appended at to, unless that is 0. It takes the first one's
// place in all versions. coded is its length, or isPlain. Only the writer calls it.
func (k keptRecord) replaced(to segment.Loc, coded int) (used bool) {
	d, from := k.d, k.loc
	if to == 0 {
		return false
	}
	killpoint.Pass("cache.recode.appended")
	used = k.moved(from, to, coded)
	killpoint.Pass("cache.recode.moved")
	if !used { // it was lost, perhaps to a Verify, or copied elsewhere, meanwhile
		from = to
		_ = d.store.Void(to) // so that it does not come back; if that fails, it is freed
	}
	d.free(from)
	return used
}
