package engine

import (
	"context"
	"fmt"
	"time"

	"github.com/shoalfs/shoal/cache"
	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/objstore/stores"
	"github.com/shoalfs/shoal/cache/shard"
	"github.com/shoalfs/shoal/internal/pause"
	"github.com/shoalfs/shoal/prefetch/order"
)

// PackOrder is the seeded random order in which samples are packed: with classes one after the other, an order that
// keeps a few shards open would read few classes at a time.
func PackOrder(seed uint64) func(n int) shard.Order {
	return func(n int) shard.Order { return order.Uniform(n, seed, 0) }
}

const (
	// publishConnections is few compared with a trainer's stream.
	publishConnections = 16
	publishMemory      = 64 << 20
	publishPoll        = 2 * time.Second
)

// startPublish packs the dataset to Config.Publish once a pass over it is complete.
func (e *Engine) startPublish(ctx context.Context) error {
	where, err := objstore.ParseSource(e.cfg.Publish)
	where.Endpoint = e.source.Endpoint
	if err == nil && where.Overlaps(e.source) {
		return fmt.Errorf("--publish %s and the source %s overlap (give another place)", where, e.source)
	}
	dst, where, err := stores.Create(ctx, e.cfg.Publish, e.storeOptions())
	if err != nil {
		return fmt.Errorf("--publish: %w", err)
	}
	e.published.Store(&dst)
	e.background.Go(func() {
		if err := e.publish(ctx, dst, where); err != nil && ctx.Err() == nil {
			e.log.Error("the dataset was not published", "destination", where.String(), "cause", err)
		}
	})
	return nil
}

func (e *Engine) publish(ctx context.Context, dst objstore.Store, where objstore.Source) error {
	for !e.passed() {
		if err := pause.For(ctx, publishPoll); err != nil {
			return err
		}
	}
	v := e.cur.Load()
	if v.layout != nil {
		e.log.Info("the dataset is packed already; nothing is published", "destination", where.String())
		return nil
	}
	start := time.Now()
	e.log.Info("a pass over the dataset is complete; it is published as shards", "destination", where.String())
	if !e.cache.TryReserve(publishMemory) {
		return fmt.Errorf("it needs %d bytes of memory, and --memory leaves too little; raise it", publishMemory)
	}
	defer e.cache.Ledger().Release(publishMemory, cache.ForDemand)
	res, err := shard.Pack(ctx, v.manifest, volumeReader{v}, objstore.Retry(dst, e.retryPolicy(dst)), where.Prefix,
		shard.PackOptions{
			Permute: PackOrder(0), Connections: publishConnections, Memory: publishMemory, Source: e.source.String(),
			Logger: e.log,
		})
	if err != nil {
		return err
	}
	e.log.Info("published", "destination", where.String(), "shards", res.Shards, "files", res.Files,
		"took", time.Since(start).Round(time.Second))
	return nil
}

// passed reports whether every file was read once, or is kept.
func (e *Engine) passed() bool {
	if kept, extents := e.cur.Load().volume.Kept(); kept == extents {
		return true
	}
	for _, s := range e.orders.mounted() {
		if p := s.Position(); p.Epoch > s.First || p.Pass > 0 || p.Consumed == p.Len {
			return true
		}
	}
	return false
}

// volumeReader reads the files of a version through the cache, as objects. It is an objstore.ReaderAt.
type volumeReader struct{ v *view }

func (r volumeReader) ReadAt(ctx context.Context, o objstore.Object, p []byte, off int64) error {
	node, ok := r.v.manifest.Find(o.Key[len(r.v.manifest.Prefix()):])
	if !ok {
		return &objstore.Error{Op: "read", Key: o.Key, Kind: objstore.KindNotFound}
	}
	_, err := r.v.volume.ReadAt(ctx, node.Index, p, off)
	return err
}
