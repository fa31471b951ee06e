// Package audit records who opened what: one line of JSON for each event, in a file that is rotated (docs/security.md
// lists the events and their fields).
//
// Callers never wait for the file: events go through a queue to a goroutine that writes them. If it cannot keep up,
// because the disk is full or hangs, events are lost. They are counted and reported: in the log and, once the file can
// be written again, in the file itself. So an audit log is as complete as its disk allows, and says where it is not.
package audit

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

// Event is a line. Empty fields are left out.
type Event struct {
	Time   time.Time `json:"time"`
	Event  string    `json:"event"`
	Daemon int       `json:"daemon"` // process id of the writer

	Outcome string `json:"outcome,omitempty"` // "" is done; "refused", "failed"
	Cause   string `json:"cause,omitempty"`

	Source     string   `json:"source,omitempty"`
	Dataset    string   `json:"dataset,omitempty"` // version
	Mountpoint string   `json:"mountpoint,omitempty"`
	CacheDir   string   `json:"cache_dir,omitempty"`
	Listen     []string `json:"listen,omitempty"`
	Verb       string   `json:"verb,omitempty"`
	Plan       string   `json:"plan,omitempty"`
	Method     string   `json:"method,omitempty"`
	Order      string   `json:"order,omitempty"`

	Session   string  `json:"session,omitempty"`
	Client    string  `json:"client,omitempty"`
	Rank      *int    `json:"rank,omitempty"`
	World     int     `json:"world,omitempty"`
	Batch     int     `json:"batch,omitempty"`
	Epoch     *int    `json:"epoch,omitempty"`
	Transform string  `json:"transform,omitempty"`
	Samples   int64   `json:"samples,omitempty"`
	Seconds   float64 `json:"seconds,omitempty"`

	Quota   int64  `json:"quota,omitempty"`
	KeyID   string `json:"key_id,omitempty"`
	Version string `json:"version,omitempty"` // of shoal
	Lost    int64  `json:"lost,omitempty"`    // events, before this one

	Peer *Peer `json:"peer,omitempty"`
}

// Peer is the originator, as far as the kernel or TLS vouches for it.
type Peer struct {
	PID  int    `json:"pid,omitempty"` // 0: in another pid namespace, or on another machine
	UID  *int   `json:"uid,omitempty"`
	GID  *int   `json:"gid,omitempty"`
	Comm string `json:"comm,omitempty"` // name of the process, which the process can choose

	Network string `json:"network,omitempty"` // "unix", "tcp"
	Address string `json:"address,omitempty"`
	Subject string `json:"tls_subject,omitempty"` // of a certificate that was verified
	Serial  string `json:"tls_serial,omitempty"`
	Token   string `json:"token,omitempty"` // first 8 hex digits of its SHA-256
}

// Options are the settings of a log.
type Options struct {
	Path     string `flag:"audit-log"`
	MaxBytes int64  // size at which the file is rotated; 0: never
	Keep     int    // number of rotated files to keep
	Logger   *slog.Logger
}

const queueLen = 4096 // events: seconds of a hanging disk, at more sessions than anybody opens

const closeWait = 2 * time.Second // how long Close waits for a disk that hangs

// Log accepts events; a nil Log discards them. Safe for concurrent use.
type Log struct {
	*sink
	base Event
}

// sink is the file and its writer.
type sink struct {
	path  string
	file  *Rotating
	log   *slog.Logger
	queue chan Event
	ended chan struct{}
	lost  atomic.Int64 // not reported in the file yet
	total atomic.Int64 // since the start
	wrote atomic.Int64

	mu     sync.Mutex
	closed bool
}

// Open opens or creates a log. Its error names the file.
func Open(o Options) (*Log, error) {
	o.Logger = cmp.Or(o.Logger, slog.Default())
	f, err := OpenRotating(o.Path, o.MaxBytes, o.Keep)
	if err != nil {
		return nil, fmt.Errorf("audit log: %w", err)
	}
	s := &sink{path: o.Path, file: f, log: o.Logger, queue: make(chan Event, queueLen), ended: make(chan struct{})}
	go s.run()
	return &Log{sink: s}, nil
}

// Path returns the file's path.
func (l *Log) Path() string {
	if l == nil {
		return ""
	}
	return l.path
}

// With returns a log that adds base's fields to its events.
func (l *Log) With(base Event) *Log {
	if l == nil {
		return nil
	}
	return &Log{sink: l.sink, base: base}
}

// Write queues an event. It never waits.
func (l *Log) Write(e Event) {
	if l == nil {
		return
	}
	e.Time, e.Daemon = time.Now().UTC(), os.Getpid()
	e.Source = cmp.Or(e.Source, l.base.Source)
	e.Dataset = cmp.Or(e.Dataset, l.base.Dataset)
	e.Mountpoint = cmp.Or(e.Mountpoint, l.base.Mountpoint)
	e.CacheDir = cmp.Or(e.CacheDir, l.base.CacheDir)
	e.Order = cmp.Or(e.Order, l.base.Order)
	e.Peer = cmp.Or(e.Peer, l.base.Peer)
	s := l.sink
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return
	}
	select {
	case s.queue <- e:
	default:
		s.lose(errors.New("the queue is full: the disk is too slow"))
	}
}

// lose counts an event that is not in the file, and reports the first one.
func (s *sink) lose(cause error) {
	s.total.Add(1)
	if s.lost.Add(1) == 1 {
		s.log.Error("the audit log cannot be written; events are lost and counted", "file", s.path, "cause", cause,
			"remedy", "make room on its disk, or give another --audit-log")
	}
}

func (s *sink) run() {
	defer close(s.ended)
	for e := range s.queue {
		e.Lost = s.lost.Load()
		b, err := json.Marshal(e)
		if err == nil {
			_, err = s.file.Write(append(b, '\n'))
		}
		if err != nil {
			s.lose(err)
			continue
		}
		s.wrote.Add(1)
		if e.Lost > 0 {
			s.lost.Add(-e.Lost)
			s.log.Warn("the audit log can be written again", "file", s.path, "lost", e.Lost)
		}
	}
}

// Counts returns how many events were written, and how many were lost.
func (l *Log) Counts() (written, lost int64) {
	if l == nil {
		return 0, 0
	}
	return l.wrote.Load(), l.total.Load()
}

// Close writes the queued events, unless the disk hangs, and closes the file.
func (l *Log) Close() error {
	if l == nil {
		return nil
	}
	s := l.sink
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return nil
	}
	s.closed = true
	close(s.queue)
	s.mu.Unlock()
	select {
	case <-s.ended:
		return s.file.Close()
	case <-time.After(closeWait):
		return fmt.Errorf("audit log: the disk of %s hangs; %d events are not written", s.path, len(s.queue))
	}
}
