package fusefs

import (
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/internal/profile/trace"
)

// Recording is a stream of the lines of package trace.
type Recording interface {
	Read(p []byte) int // fills p with new data, and returns 0 if there is none
	Close()            // ends it, and may be called again
}

func (f *filesystem) recording() bool { return f.control.c.Recording() }

// saw records an event without duration.
func (f *filesystem) saw(m *catalog.Manifest, kind trace.Kind, process uint32, file int) {
	if f.recording() {
		f.control.c.Saw(m, trace.Event{Kind: kind, Process: process, File: int32(file)}, time.Now())
	}
}

// looked records a lookup of a name or its attributes.
func (f *filesystem) looked(m *catalog.Manifest, process uint32, n catalog.Node, ok bool) {
	file := -1
	if ok && !n.IsDir {
		file = n.Index
	}
	f.saw(m, trace.Lookup, process, file)
}

// recordRead records a READ once end is called, when it is answered.
func (f *filesystem) recordRead(m *catalog.Manifest, in *fuse.ReadIn, file, n int) (end func()) {
	if !f.recording() {
		return func() {}
	}
	began, to := time.Now(), f.control.c
	e := trace.Event{Kind: trace.Read, Process: in.Pid, File: int32(file), Off: int64(in.Offset), Len: int32(n),
		Area: to.Area(m, file, int64(in.Offset))}
	return func() {
		e.Wait = time.Since(began)
		to.Saw(m, e, began)
	}
}
