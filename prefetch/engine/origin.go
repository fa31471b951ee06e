package engine

import (
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

// Listed returns when the listing of the version in force began; the zero time until the first refresh. It is called
// before Manifest, which then has all changes of before that time.
func (e *Engine) Listed() time.Time {
	if t := e.listed.Load(); t != nil {
		return *t
	}
	return time.Time{}
}

// MarkStale records that the source's bucket has changed since it was listed: the next daemon lists it again, as this or
// another dataset. It is called before a change, and after it: a listing may have run in between.
func (e *Engine) MarkStale() error {
	now := time.Now()
	e.host.changed.Store(&now)
	if e.source.Scheme != "s3" {
		return e.catalog.MarkStale(e.name)
	}
	return e.catalog.MarkStale("s3://" + e.source.Bucket + "/")
}
