package cache

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/shoalfs/shoal/cache/segment"
	"github.com/shoalfs/shoal/internal/pause"
)

// dataset is the state that the versions of one dataset share.
type dataset struct {
	c      *Cache
	id     [16]byte
	name   string               // in the log
	disk   atomic.Pointer[disk] // nil: memory only
	count  Counts
	stall  pause.Total     // of readers, for the store
	ctx    context.Context // ends at close; flights run under it, not under their readers
	cancel context.CancelFunc

	mu      sync.Mutex
	flights sync.WaitGroup // none is added once ctx has ended, which it does under mu
	volumes []*Volume      // that were not retired

	opening sync.Mutex // held while the segments are opened
	moving  sync.Mutex // held while a record's place changes in all versions, or is inherited
}

// dataset returns the dataset of this id, which is made if need be.
func (c *Cache) dataset(id [16]byte, name string) *dataset {
	c.mu.Lock()
	defer c.mu.Unlock()
	ds := c.datasets[id]
	if ds == nil {
		ds = &dataset{c: c, id: id, name: name}
		ds.ctx, ds.cancel = context.WithCancel(context.Background())
		if c.closed {
			ds.cancel()
		}
		c.datasets[id] = ds
	}
	return ds
}

// enter lets a flight start, which ends with flights.Done. It returns false once the dataset is closed.
func (ds *dataset) enter() bool {
	ds.mu.Lock()
	defer ds.mu.Unlock()
	if ds.ctx.Err() != nil {
		return false
	}
	ds.flights.Add(1)
	return true
}

func (ds *dataset) list() []*Volume {
	ds.mu.Lock()
	defer ds.mu.Unlock()
	return slices.Clone(ds.volumes)
}

// forget drops the places of records that are gone, in all versions.
func (ds *dataset) forget(gone func(loc segment.Loc) bool) {
	ds.moving.Lock()
	defer ds.moving.Unlock()
	for _, v := range ds.list() {
		v.forget(gone)
	}
}

// readable returns the disk tier if it may be read from.
func (ds *dataset) readable() *disk {
	if d := ds.disk.Load(); d != nil && !d.noReads.Load() {
		return d
	}
	return nil
}

// close takes the dataset out of the cache: flights end, queued writes are done, segments are closed, memory is freed.
func (ds *dataset) close() error {
	ds.mu.Lock()
	open := ds.ctx.Err() == nil
	ds.cancel()
	ds.mu.Unlock()
	if !open {
		return nil
	}
	ds.flights.Wait()
	var err error
	if d := ds.disk.Load(); d != nil {
		err = d.close()
	}
	ds.c.ring.drop(func(k extentKey) bool { return k.v.ds == ds })
	ds.c.mu.Lock()
	delete(ds.c.datasets, ds.id)
	ds.addTo(&ds.c.gone)
	ds.c.mu.Unlock()
	return err
}

// addTo adds its counts to n, with the waits that go on.
func (ds *dataset) addTo(n *Counts) {
	ds.count.addTo(n)
	n.Stall += ds.stall.Sum()
}

// Close takes the volume's dataset, with all its versions, out of the cache; other datasets go on. It must have no
// readers left. Its segments stay on disk and can be opened again. If the disk hangs, Close gives up after some
// seconds and says so in its error; then this process must not open the segments again.
func (v *Volume) Close() error { return v.ds.close() }

// errLeftBehind is wrapped by the error of a close that did not wait for a hanging disk.
var errLeftBehind = errors.New("left behind")
