package engine

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/shoalfs/shoal/internal/trace"
	"github.com/shoalfs/shoal/prefetch/order"
)

// WarmProgress tells how far a warming is.
type WarmProgress struct {
	Files, FilesDone int   // that were missing, and that are kept now
	Bytes, BytesDone int64 // of them
	Kept, Extents    int   // of the whole dataset
	Full             bool  // the disk took no more
	Errors           int   // files that could not be read
	FirstError       string
}

// warmReaders play the trainer that warming has not: enough to keep ahead of every store, since what
// they read lies in memory already.
const warmReaders = 4

// What a reader holds at most until it is on disk: a request's worth of the writer's time.
const (
	warmFiles = 64
	warmBytes = 4 << 20
)

// warmPasses is how often Warm goes over the list at most.
const warmPasses = 4

// Warm keeps the files on disk, in the order of the list, which names files of the version in force;
// all of them if it is nil. It ends early when the disk is full. A file that cannot be read is
// counted and named, and the others go on. What was let go of before it was written, for a reader who
// waited for its memory, is read again.
func (e *Engine) Warm(ctx context.Context, files []uint32, progress func(WarmProgress)) (p WarmProgress, err error) {
	_, span := trace.Start(ctx, "dataset.warm") // its reads would be as many spans as there are files
	defer func() {
		span.Int("shoal.files", int64(p.FilesDone))
		span.Int("shoal.bytes", p.BytesDone)
		span.End(err)
	}()
	p, err = e.warm(ctx, files, progress)
	for pass := 1; pass < warmPasses && err == nil && !p.Full && p.Errors == 0 && p.FilesDone < p.Files; pass++ {
		before := p
		sum := func(n WarmProgress) WarmProgress {
			n.Files, n.Bytes = before.Files, before.Bytes
			n.FilesDone, n.BytesDone = n.FilesDone+before.FilesDone, n.BytesDone+before.BytesDone
			return n
		}
		p, err = e.warm(ctx, files, func(n WarmProgress) { progress(sum(n)) })
		p = sum(p)
	}
	return p, err
}

// warm is one pass.
func (e *Engine) warm(ctx context.Context, files []uint32, progress func(WarmProgress)) (WarmProgress, error) {
	v := e.cur.Load()
	if files == nil {
		files = v.all()
	}
	var p WarmProgress
	missing := files[:0:0]
	for _, f := range files {
		if !v.volume.KeptWhole(int(f)) {
			missing = append(missing, f)
			p.Bytes += v.manifest.Size(int(f))
		}
	}
	p.Files = len(missing)
	snapshot := func(files, bytes int64) WarmProgress {
		now := p
		now.FilesDone, now.BytesDone = int(files), bytes
		now.Kept, now.Extents = v.volume.Kept()
		return now
	}
	if p.Files == 0 {
		p = snapshot(0, 0)
		progress(p)
		return p, nil
	}
	list := order.List(missing)
	s, err := e.newStream("warm", v, func(epoch int) order.Order {
		if epoch > 0 {
			return nil
		}
		return list
	}, 0, 0, 1)
	if err != nil {
		return p, err
	}
	e.addSession(s)
	defer e.endSession(s)

	var next, doneFiles, doneBytes, failed atomic.Int64
	var first atomic.Pointer[string]
	declined := v.volume.Stats().Declined
	full := errors.New("full")
	g, gctx := errgroup.WithContext(ctx)
	for range warmReaders {
		g.Go(func() error {
			// What was read is let go of when it is on disk: memory that is short would take it before.
			var held []func()
			var bytes int
			settle := func() error {
				err := v.volume.Flush(gctx)
				for _, release := range held {
					release()
				}
				held, bytes = held[:0], 0
				return err
			}
			for {
				pos := int(next.Add(1)) - 1
				if pos >= list.Len() {
					return settle()
				}
				data, release, err := s.Read(gctx, pos)
				if err == nil {
					held = append(held, release)
				}
				if gctx.Err() != nil {
					return errors.Join(gctx.Err(), settle())
				}
				if err != nil {
					failed.Add(1)
					text := v.manifest.Path(list.At(pos)) + ": " + err.Error()
					first.CompareAndSwap(nil, &text)
					continue
				}
				doneFiles.Add(1)
				doneBytes.Add(int64(len(data)))
				if bytes += len(data); len(held) < warmFiles && bytes < warmBytes {
					continue
				}
				if err := settle(); err != nil {
					return err
				}
				if v.volume.Stats().Declined > declined {
					return full
				}
			}
		})
	}
	stop := make(chan struct{})
	ticked := make(chan struct{})
	go func() {
		defer close(ticked)
		t := time.NewTicker(200 * time.Millisecond)
		defer t.Stop()
		for {
			select {
			case <-stop:
				return
			case <-t.C:
				progress(snapshot(doneFiles.Load(), doneBytes.Load()))
			}
		}
	}()
	err = g.Wait()
	close(stop)
	<-ticked
	if flushErr := v.volume.Flush(ctx); err == nil {
		err = flushErr
	}
	var kept, keptBytes int64
	for _, f := range missing {
		if v.volume.KeptWhole(int(f)) {
			kept++
			keptBytes += v.manifest.Size(int(f))
		}
	}
	p = snapshot(kept, keptBytes)
	p.Errors = int(failed.Load())
	if text := first.Load(); text != nil {
		p.FirstError = *text
	}
	if errors.Is(err, full) || err == nil && v.volume.Stats().Declined > declined {
		p.Full, err = true, nil
	}
	if err == nil {
		err = e.cache.Sync()
	}
	progress(p)
	return p, err
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

// WarmFraction returns files that make up about that fraction of the dataset's bytes, and the files of
// which a kept set of that size would consist: spread evenly over every order.
func (e *Engine) WarmFraction(fraction float64) []uint32 {
	v := e.cur.Load()
	if fraction >= 1 {
		return v.all()
	}
	admit := keepOf(v.manifest, v.layout, int64(fraction*float64(v.manifest.Bytes())), v.manifest.Size)
	var files []uint32
	for _, f := range v.all() {
		if admit(int(f)) {
			files = append(files, f)
		}
	}
	return files
}

// FilesOf returns the files that lines of relative paths name, as in a plan.
func (e *Engine) FilesOf(list []byte) ([]uint32, error) {
	o, err := parsePlan(e.cur.Load().manifest, list, e.mountPoints())
	if err != nil {
		return nil, err
	}
	files := make([]uint32, o.Len())
	for i := range files {
		files[i] = uint32(o.At(i))
	}
	return files, nil
}

const (
	// scrubAfter leaves the start of a run to its trainer.
	scrubAfter = 2 * time.Minute
	// scrubRate in bytes a second is little beside any disk, and walks a terabyte in 18 hours.
	scrubRate = 16 << 20
	// scrubEvery is how often everything is read again.
	scrubEvery = 24 * time.Hour
)

// scrubLoop reads the records that no reader has read since the start, so that damage is found before
// it is needed.
func (e *Engine) scrubLoop(ctx context.Context) {
	wait := scrubAfter
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
		wait = scrubEvery
		bad, err := e.cur.Load().volume.Scrub(ctx, scrubRate)
		switch {
		case err != nil && ctx.Err() == nil:
			e.log.Warn("scrub of the cache ended early", "cause", err)
		case bad > 0:
			e.log.Warn("scrub of the cache found damaged records; they are fetched again", "records", bad)
		}
	}
}
