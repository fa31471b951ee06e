package fusefs

import (
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/internal/profile/trace"
)

// Recorder is a [Control] that can record what readers do: then there is `.shoal/profile`.
type Recorder interface {
	// Record begins a recording, which is the file's content until it is closed. Any error is EBUSY to
	// the one who opens it.
	Record() (Recording, error)

	// Recording reports whether one is under way. It is called for nearly every request, so it must
	// cost no more than an atomic load.
	Recording() bool

	// Saw takes note of what a process did, and when it began. e.At is not set.
	Saw(m *catalog.Manifest, e trace.Event, at time.Time)

	// Area tells where a read would be served from now.
	Area(m *catalog.Manifest, file int, off int64) trace.Area
}

// Recording is a stream of the lines of package trace.
type Recording interface {
	// Read fills p with what is new, and returns 0 when nothing is.
	Read(p []byte) int
	// Close ends it. It may be called again.
	Close()
}

func (f *filesystem) recording() bool { return f.recorder != nil && f.recorder.Recording() }

// saw records an event that takes no time.
func (f *filesystem) saw(m *catalog.Manifest, kind trace.Kind, process uint32, file int) {
	if f.recording() {
		f.recorder.Saw(m, trace.Event{Kind: kind, Process: process, File: int32(file)}, time.Now())
	}
}

// looked records that a name, or what is known of it, was asked for.
func (f *filesystem) looked(m *catalog.Manifest, process uint32, n catalog.Node, ok bool) {
	file := -1
	if ok && !n.IsDir {
		file = n.Index
	}
	f.saw(m, trace.Lookup, process, file)
}

// record is a READ that is recorded; the zero value is one that is not.
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

// lent says that the read was served from memory.
func (r *record) lent() {
	r.event.Area = trace.Ring
	r.end()
}

// end says that the read was answered.
func (r *record) end() {
	if r.to != nil {
		r.event.Wait = time.Since(r.began)
		r.to.Saw(r.m, r.event, r.began)
	}
}
