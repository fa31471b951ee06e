package engine

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/shoalfs/shoal/cache"
	"github.com/shoalfs/shoal/internal/pause"
	"github.com/shoalfs/shoal/internal/trace"
	"github.com/shoalfs/shoal/prefetch/order"
	"github.com/shoalfs/shoal/prefetch/run"
)

// WarmProgress is the progress of warming.
type WarmProgress struct {
	Files, FilesDone int   // missing at the start, and kept now
	Bytes, BytesDone int64 // of them
	Kept, Extents    int   // of the whole dataset
	Full             bool  // the disk took no more
	Errors           int   // files that could not be read
	FirstError       string
}

// warmReaders take the place of a trainer: enough to keep up with any store, since they read from memory.
const warmReaders = 4

// Limits of what a reader holds until it is on disk: a request's worth of the writer's time.
const (
	warmFiles = 64
	warmBytes = 4 << 20
)

// warmPasses is how often Warm goes over the list at most.
const warmPasses = 4

// Warm keeps files of the version in force on disk, in a cluster on its owners' disks: those that lines of relative
// paths name, as in a plan, in this order; without a list those of a kept set of about that fraction of the dataset's
// bytes, spread evenly over every order. It ends early when the disk is full. A file that cannot be read is counted and
// named, and the others go on. Files dropped from memory before they were written, for a waiting reader, are read
// again.
func (e *Engine) Warm(ctx context.Context, fraction float64, list []byte, progress func(WarmProgress)) (
	p WarmProgress, err error) {
	_, span := trace.Start(ctx, "dataset.warm") // its reads would make a span for each file
	defer func() {
		span.Int("shoal.files", int64(p.FilesDone))
		span.Int("shoal.bytes", p.BytesDone)
		span.End(err)
	}()
	for {
		if p, err = e.warmVersion(ctx, e.cur.Load(), fraction, list, progress); !errors.Is(err, errMoved) {
			return p, err
		}
	}
}

// warmVersion is Warm of one version. It fails with errMoved once another is in force.
func (e *Engine) warmVersion(ctx context.Context, v *view, fraction float64, list []byte, progress func(WarmProgress)) (
	p WarmProgress, err error) {
	var files []uint32
	if list != nil {
		if files, err = parsePlan(v.manifest, list, e.orders.mountPoints()); err != nil {
			return p, fmt.Errorf("--list: %w", err)
		}
	} else if files = v.all(); fraction < 1 {
		admit := keepOf(v.manifest, v.layout, int64(fraction*float64(v.manifest.Bytes())), v.manifest.Size)
		files = slices.DeleteFunc(files, func(f uint32) bool { return !admit(int(f)) })
	}
	w := &warming{e: e, v: v, declined: v.volume.Stats().Declined}
	missing, bytes := w.lacks(files, false)
	w.of.Files, w.of.Bytes = len(missing), bytes
	full := false
	for pass := 0; pass < warmPasses && len(missing) > 0 && !full && w.failed.Load() == 0 && err == nil; pass++ {
		full, err = w.pass(ctx, missing, progress)
		missing, bytes = w.lacks(missing, true)
		w.files.Store(int64(w.of.Files - len(missing)))
		w.bytes.Store(w.of.Bytes - bytes)
	}
	p = w.progress()
	p.Full, p.Errors = full, int(w.failed.Load())
	if text := w.first.Load(); text != nil {
		p.FirstError = *text
	}
	progress(p)
	return p, err
}

// warming is the reading of files that are not kept.
type warming struct {
	e        *Engine
	v        *view
	of       WarmProgress // Files and Bytes
	declined int64        // extents declined by the disk before

	s    *run.Stream // of one pass
	list order.Order

	next, files, bytes, failed atomic.Int64
	first                      atomic.Pointer[string] // what went wrong
}

// errFull says that the disk is full, errMoved that the version is no longer in force.
var errFull, errMoved = errors.New("full"), errors.New("there is another version")

// lacks returns those files that are not kept, and their bytes. With shared it is enough that other nodes keep them.
func (w *warming) lacks(files []uint32, shared bool) (missing []uint32, bytes int64) {
	shared = shared && w.failed.Load() == 0
	for _, f := range files {
		if kept := w.v.volume.Residence(int(f)) == cache.OnDisk; !kept && (!shared || !w.v.sharing.elsewhere(int(f))) {
			missing = append(missing, f)
			bytes += w.v.manifest.Size(int(f))
		}
	}
	return missing, bytes
}

// pass reads files once, and reports whether the disk is full.
func (w *warming) pass(ctx context.Context, files []uint32, progress func(WarmProgress)) (full bool, err error) {
	w.list = order.List(files)
	w.next.Store(0)
	o := w.e.orders.options("warm", w.v, once(w.list))
	o.Choose, o.Has = false, nil // it chooses the kept files itself
	if w.s, err = w.e.orders.beginSession(o); err != nil {
		return false, err
	}
	defer w.e.orders.endSession(w.s)
	var telling sync.WaitGroup
	ticking, stop := context.WithCancel(context.Background())
	telling.Go(func() {
		for range pause.Every(ticking, 200*time.Millisecond) {
			progress(w.progress())
		}
	})
	g, gctx := errgroup.WithContext(ctx)
	for range warmReaders {
		g.Go(func() error { return w.read(gctx) })
	}
	err = g.Wait()
	stop()
	telling.Wait()
	if flushErr := w.v.volume.Flush(ctx); err == nil {
		err = flushErr
	}
	if errors.Is(err, errFull) || err == nil && w.isFull() {
		full, err = true, nil
	}
	if err == nil {
		err = w.e.cache.Sync()
	}
	return full, err
}

func (w *warming) progress() WarmProgress {
	p := w.of
	p.FilesDone, p.BytesDone = int(w.files.Load()), w.bytes.Load()
	p.Kept, p.Extents = w.v.volume.Kept()
	return p
}

func (w *warming) isFull() bool { return w.v.volume.Stats().Declined > w.declined }

// read is one of several readers, who share the list.
func (w *warming) read(ctx context.Context) error {
	// Files are released when they are on disk: otherwise short memory would drop them before.
	var held []func()
	var bytes int64
	settle := func() error {
		err := w.v.volume.Flush(ctx)
		for _, release := range held {
			release()
		}
		held, bytes = held[:0], 0
		return err
	}
	for {
		pos := int(w.next.Add(1)) - 1
		if pos >= w.list.Len() {
			return settle()
		}
		_, release, err := w.s.ReadBy(ctx, pos, w.sample)
		if err == nil {
			held = append(held, release)
		}
		switch {
		case ctx.Err() != nil:
			return errors.Join(ctx.Err(), settle())
		case w.e.cur.Load() != w.v:
			return errors.Join(errMoved, settle())
		case errors.Is(err, errFull):
			return errors.Join(err, settle())
		case err != nil:
			w.failed.Add(1)
			w.first.CompareAndSwap(nil, new(w.v.manifest.Path(w.list.At(pos))+": "+err.Error()))
			continue
		}
		w.files.Add(1)
		size := w.v.manifest.Size(w.list.At(pos))
		w.bytes.Add(size)
		if bytes += size; len(held) < warmFiles && bytes < warmBytes {
			continue
		}
		if err := settle(); err != nil {
			return err
		}
		if w.isFull() {
			return errFull
		}
	}
}

// sample is Volume.Sample, but brings a file that may be larger than the memory an extent at a time, and returns
// nothing of it.
func (w *warming) sample(ctx context.Context, file int) (data []byte, release func(), err error) {
	v := w.v.volume
	if v.Extents(file) < 2 {
		return v.Sample(ctx, file)
	}
	p := make([]byte, cache.ExtentSize)
	for x := range v.Extents(file) {
		if v.KeptExtent(file, x) {
			continue
		}
		if _, err := v.ReadAt(ctx, file, p, int64(x)*cache.ExtentSize); err != nil {
			return nil, nil, err
		}
		if err := v.Flush(ctx); err != nil {
			return nil, nil, err
		}
		if w.isFull() {
			return nil, nil, errFull
		}
	}
	return nil, func() {}, nil
}

// all returns the files of a version in the order in which they are read fastest.
func (v *view) all() []uint32 {
	files := make([]uint32, v.manifest.Len())
	for i := range files {
		files[i] = uint32(i)
		if v.layout != nil {
			files[i] = uint32(v.layout.At(i))
		}
	}
	return files
}

const (
	// scrubAfter leaves the start of a run to its trainer.
	scrubAfter = 2 * time.Minute
	// scrubRate in bytes a second is little for any disk, and covers a terabyte in 18 hours.
	scrubRate = 16 << 20
	// scrubEvery is how long after one scrub the next begins.
	scrubEvery = 24 * time.Hour
)

// scrubLoop reads all records again and again, so that damage is found before they are needed, and where nobody checks
// what is read: a few bytes of a file, and what shoal.open reads.
func (e *Engine) scrubLoop(ctx context.Context) {
	for wait := scrubAfter; pause.For(ctx, wait) == nil; wait = scrubEvery {
		bad, err := e.cur.Load().volume.Scrub(ctx, scrubRate)
		switch {
		case err != nil && ctx.Err() == nil:
			e.log.Warn("scrub of the cache ended early", "cause", err)
		case bad > 0:
			e.log.Warn("scrub of the cache found damaged records; they are fetched again", "records", bad)
		}
	}
}

// Verify compares what is kept of the version in force with the store, and drops what differs (cache.Volume.Verify).
func (e *Engine) Verify(ctx context.Context, progress func(done, total int)) (cache.Verified, error) {
	r, err := e.cur.Load().volume.Verify(ctx, progress)
	if len(r.Files) > 0 {
		e.tellMoved(r.Files)
	}
	return r, err
}

// verifyKept is Verify after a node gave wrong bytes.
func (e *Engine) verifyKept(ctx context.Context) {
	r, err := e.Verify(ctx, nil)
	if err != nil && ctx.Err() == nil {
		e.log.Error("what is kept could not be compared with the store; `shoal cache verify` tries again", "cause", err)
		return
	}
	e.log.Warn("what is kept was compared with the store", "extents", r.Extents, "asked_for", r.Asked,
		"dropped", r.Dropped, "not_in_the_store", r.Unknown)
}
