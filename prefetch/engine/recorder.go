package engine

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/shoalfs/shoal/cache"
	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/internal/profile/trace"
)

// recorder passes readers' events to the running recordings. Without any it costs one atomic load.
type recorder struct {
	mu         sync.Mutex
	recordings atomic.Pointer[[]*Recording] // nil before the first
}

// running returns the recordings, which is never changed.
func (r *recorder) running() []*Recording {
	if list := r.recordings.Load(); list != nil {
		return *list
	}
	return nil
}

const (
	// queuedEvents is how many unread events a recording buffers: at 50,000 events a second, which is more than two
	// cores serve, more than a second.
	queuedEvents = 1 << 16
	eventBytes   = 48
	// maxRecordings bounds how many may run for a dataset.
	maxRecordings = 4
)

// ErrRecordings is wrapped by errors about too many recordings.
var ErrRecordings = errors.New("too many recordings")

// Recording is a bounded queue of the events of readers of a dataset's mounts, from Record to Close. It is read as a
// stream of the lines of package trace. Events that find the queue full are counted and lost.
type Recording struct {
	engine   *Engine
	view     *view
	began    time.Time
	reserved int64

	events chan trace.Event
	lost   atomic.Int64

	reading sync.Mutex
	known   []uint64 // the files that were described
	text    []byte   // not read yet
}

// Record begins a recording. It takes some 4 MiB of the ledger until it is closed.
func (e *Engine) Record() (*Recording, error) {
	v := e.cur.Load()
	r := &Recording{engine: e, view: v, began: time.Now()}
	words := (v.manifest.Len() + 63) / 64
	need := int64(queuedEvents*eventBytes + 8*words)
	e.recorder.mu.Lock()
	defer e.recorder.mu.Unlock()
	list := slices.Clone(e.recorder.running())
	if len(list) == maxRecordings {
		return nil, fmt.Errorf("%w: %d are under way (end one of them)", ErrRecordings, len(list))
	}
	if !e.cache.TryReserve(need) {
		return nil, fmt.Errorf("a recording needs %d bytes of memory, and --memory leaves too little; raise it", need)
	}
	r.reserved, r.events, r.known = need, make(chan trace.Event, queuedEvents), make([]uint64, words)
	r.text = trace.AppendJSON(nil, r.header())
	list = append(list, r)
	e.recorder.recordings.Store(&list)
	return r, nil
}

func (r *Recording) header() trace.Header {
	e, v := r.engine, r.view
	_, disk := e.host.Usage()
	h := trace.Header{
		Version: trace.Version, Started: r.began.UTC(), Source: e.source.String(), Dataset: v.manifest.Version(),
		Files: v.manifest.Len(), Samples: v.samples.Len(), Bytes: v.manifest.Bytes(), Packed: v.layout != nil,
		Order: e.order().String(), Memory: e.cache.Ledger().Limit(), CacheBytes: disk,
		Connections: e.remoteOf(v).limiter.Places(),
	}
	for _, t := range v.samples.Trees() {
		h.Trees = append(h.Trees, trace.Tree(t))
	}
	return h
}

// Close ends the recording. Unread events are lost.
func (r *Recording) Close() {
	rec := &r.engine.recorder
	rec.mu.Lock()
	defer rec.mu.Unlock()
	old := rec.running()
	list := slices.DeleteFunc(slices.Clone(old), func(other *Recording) bool { return other == r })
	if len(list) == len(old) {
		return
	}
	rec.recordings.Store(&list)
	r.engine.cache.Ledger().Release(r.reserved, cache.ForDemand)
}

// Recording reports whether events are being recorded.
func (e *Engine) Recording() bool { return len(e.recorder.running()) > 0 }

// Area tells where a read of the file at off would be served from now.
func (e *Engine) Area(m *catalog.Manifest, file int, off int64) trace.Area {
	switch e.volumeOf(m).Where(file, int(off/cache.ExtentSize)) {
	case cache.OnDisk:
		return trace.Keep
	case cache.InMemory:
		return trace.Ring
	case cache.OnWay:
		return trace.Joined
	}
	return trace.Miss
}

// Saw records an event of version m, which began at the given time. Events of another version than the one in force
// when a recording began count as lost: their files have other numbers.
func (e *Engine) Saw(m *catalog.Manifest, ev trace.Event, at time.Time) {
	for _, r := range e.recorder.running() {
		ev.At = max(at.Sub(r.began), 0)
		if r.view.manifest != m {
			r.lost.Add(1)
			continue
		}
		select {
		case r.events <- ev:
		default:
			r.lost.Add(1)
		}
	}
}

// maxText bounds the text formatted ahead of a read.
const maxText = 64 << 10

// Read fills p with the stream's next bytes. It returns 0 if there is nothing new: more may come later.
func (r *Recording) Read(p []byte) (n int) {
	r.reading.Lock()
	defer r.reading.Unlock()
	for n < len(p) {
		if len(r.text) == 0 && !r.format() {
			break
		}
		k := copy(p[n:], r.text)
		n += k
		r.text = r.text[k:]
	}
	return n
}

// format formats some events. It reports whether there were any.
func (r *Recording) format() bool {
	r.text = r.text[:0]
	for len(r.text) < maxText {
		if lost := r.lost.Swap(0); lost > 0 {
			r.text = trace.AppendJSON(r.text, trace.Losses{Lost: lost})
		}
		select {
		case ev := <-r.events:
			r.describe(int(ev.File))
			r.text = ev.Append(r.text)
		default:
			return len(r.text) > 0
		}
	}
	return true
}

// describe adds a file's line before its first event.
func (r *Recording) describe(file int) {
	if file < 0 || r.known[file/64]>>(file%64)&1 != 0 {
		return
	}
	r.known[file/64] |= 1 << (file % 64)
	m := r.view.manifest
	sample, ok := r.view.samples.Sample(file)
	if !ok {
		sample = -1
	}
	r.text = trace.AppendJSON(r.text, trace.File{File: file, Sample: sample, Size: m.Size(file), Path: m.Path(file)})
}
