package fusefs

import (
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/internal/profile/trace"
)

// Recorder is a [Control] that can record readers' actions: it enables `.shoal/profile`.
type Recorder interface {
	Record() (Recording, error) // is the file's content until it is closed; any error is EBUSY to the opener

	// Recording reports whether a recording is running. It is called for nearly every request, so it must cost no more
	// than an atomic load.
	Recording() bool

	Saw(m *catalog.Manifest, e trace.Event, at time.Time) // an action of a process, and when it began; e.At is not set

	Area(m *catalog.Manifest, file int, off int64) trace.Area // from which a read would be served now
}

// Recording is a stream of the lines of package trace.
type Recording interface {
	Read(p []byte) int // fills p with new data, and returns 0 if there is none
	Close()            // ends it, and may be called again
}

func (f *filesystem) recording() bool { return f.recorder != nil && f.recorder.Recording() }

// saw records an event without duration.
func (f *filesystem) saw(m *catalog.Manifest, kind trace.Kind, process uint32, file int) {
	if f.recording() {
		f.recorder.Saw(m, trace.Event{Kind: kind, Process: process, File: int32(file)}, time.Now())
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

// record is a recorded READ; the zero value is one that is not recorded.
type record struct {
	to    Recorder
	m     *catalog.Manifest
	began time.Time
	event trace.Event
}

func (f *filesystem) beginRead(m *catalog.Manifest, in *fuse.ReadIn, file, n int) record {
	return record{f.recorder, m, time.Now(), trace.Event{
		Kind: trace.Read, Process: in.Pid, File: int32(file), Off: int64(in.Offset), Len: int32(n),
		Area: f.recorder.Area(m, file, int64(in.Offset)),
	}}
}

// end says that the read was answered.
func (r *record) end() {
	if r.to != nil {
		r.event.Wait = time.Since(r.began)
		r.to.Saw(r.m, r.event, r.began)
	}
}
