package engine

import (
	"cmp"
	"time"

	"github.com/shoalfs/shoal/cache/objstore/s3"
)

// Origin returns the bucket of the source, and whether it is one.
func (e *Engine) Origin() (*s3.Store, bool) {
	s, ok := e.base.(*s3.Store)
	return s, ok
}

// Members reports whether the files of the dataset are parts of the source's objects, and not objects themselves.
func (e *Engine) Members() bool { return e.shards == nil && e.cur.Load().layout != nil }

// Listed returns a time before the listing of the version in force; the zero time until the first refresh here. It is
// called before Manifest, which then has all changes of before that time.
func (e *Engine) Listed() time.Time { return *cmp.Or(e.listed.Load(), new(time.Time)) }

// Stale reports whether MarkStale was called with keys of the source since it was listed.
func (e *Engine) Stale() bool { return e.catalog.Stale(e.name) }

// MarkStale records that keys of the source's bucket have changed: the next daemon lists the sources again that have
// them. It is called before a change, and after it: a listing may have run in between.
func (e *Engine) MarkStale(keys []string) error {
	e.host.changed.Store(new(time.Now()))
	return e.catalog.MarkStale("s3://"+e.source.Bucket+"/", keys)
}
