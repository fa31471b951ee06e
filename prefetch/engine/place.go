package engine

import (
	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/segment"
)

// Place is Volume.Place of the version m.
func (e *Engine) Place(m *catalog.Manifest, file int, check bool) (segment.Place, bool) {
	return e.volumeOf(m).Place(file, check)
}

// Damaged is Volume.Damaged.
func (e *Engine) Damaged() int64 { return e.cur.Load().volume.Damaged() }

// SegmentDir is Volume.SegmentDir of the version m.
func (e *Engine) SegmentDir(m *catalog.Manifest) string { return e.volumeOf(m).SegmentDir() }
