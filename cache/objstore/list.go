package objstore

import (
	"context"
	"iter"
	"strings"
	"sync"
	"unicode/utf8"

	"golang.org/x/sync/errgroup"
)

const (
	// prefixesPerWorker is how many prefixes ListParallel gathers per worker before it lists them flat. With fewer,
	// one large folder at the end leaves the other workers idle; each further one costs a request.
	prefixesPerWorker = 4
	// maxSplitDepth bounds the levels that are split: below it a listing is flat. Otherwise a tree with one child per
	// level would cost a request per level.
	maxSplitDepth = 4
	// listBatch objects are sent together from a worker to the caller's loop.
	listBatch = 256
)

// ListParallel yields every object whose key begins with prefix, in no particular order, with up to workers listings
// at once. progress, unless nil, is called now and then, and at the end, from the caller's goroutine with the number
// of objects so far.
//
// The sequence ends after the first error. Memory is bounded by workers and the number of prefixes at the level where
// it splits, not by the number of objects. Breaking out of the loop stops the workers and waits for them.
func ListParallel(ctx context.Context, r Layer, prefix string, workers int,
	progress func(objects int)) iter.Seq2[Object, error] {
	return func(yield func(Object, error) bool) {
		ctx, cancel := context.WithCancel(ctx)
		l := parallelLister{r: r, workers: max(1, workers)}
		l.out = make(chan []Object, l.workers)
		var failed error // written before l.out is closed
		go func() {
			defer close(l.out)
			failed = l.all(ctx, prefix)
		}()
		defer func() {
			cancel()
			for range l.out { // until the workers have ended
			}
		}()

		n := 0
		for batch := range l.out {
			for _, o := range batch {
				if !yield(o, nil) {
					return
				}
			}
			n += len(batch)
			if progress != nil {
				progress(n)
			}
		}
		if failed != nil {
			yield(Object{}, failed)
		}
	}
}

type parallelLister struct {
	r       Layer
	workers int
	out     chan []Object
}

// all splits the key space level by level until there are enough prefixes, then lists them flat.
func (l *parallelLister) all(ctx context.Context, prefix string) (err error) {
	prefixes := []string{prefix}
	isLevel := prefix == "" || strings.HasSuffix(prefix, "/")
	for depth := 0; isLevel && depth < maxSplitDepth; depth++ {
		if len(prefixes) == 0 || len(prefixes) >= prefixesPerWorker*l.workers {
			break
		}
		if prefixes, err = l.each(ctx, prefixes, l.r.ListLevel); err != nil {
			return err
		}
	}
	_, err = l.each(ctx, prefixes, func(ctx context.Context, prefix string) iter.Seq2[Object, error] {
		return l.r.List(ctx, prefix, "")
	})
	return err
}

// each runs list for every prefix, up to l.workers at once, sends the objects, and returns the prefixes that came with
// them.
func (l *parallelLister) each(ctx context.Context, prefixes []string,
	list func(context.Context, string) iter.Seq2[Object, error]) (below []string, err error) {
	var mu sync.Mutex
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(l.workers)
	for _, prefix := range prefixes {
		g.Go(func() error {
			var batch []Object
			for o, err := range list(ctx, prefix) {
				if err != nil {
					return err
				}
				if o.IsPrefix() && utf8.ValidString(o.Key) { // else it cannot be listed, and is counted
					mu.Lock()
					below = append(below, o.Key)
					mu.Unlock()
					continue
				}
				if batch = append(batch, o); len(batch) == listBatch {
					if err := l.send(ctx, batch); err != nil {
						return err
					}
					batch = nil
				}
			}
			return l.send(ctx, batch)
		})
	}
	err = g.Wait()
	return below, err
}

func (l *parallelLister) send(ctx context.Context, batch []Object) error {
	if len(batch) == 0 {
		return nil
	}
	select {
	case l.out <- batch:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
