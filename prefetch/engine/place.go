package engine

import (
	"os"

	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/segment"
)

// Place is Volume.Place of the version m.
func (e *Engine) Place(m *catalog.Manifest, file int, check bool) (segment.Place, bool) {
	return e.volumeOf(m).Place(file, check)
}

// OpenSegment opens a segment with a place of the version m.
func (e *Engine) OpenSegment(m *catalog.Manifest, p segment.Place) (*os.File, error) {
	return e.volumeOf(m).OpenSegment(p)
}
