// Package trace is the format of a mount's recording of its readers: one JSON value on each line, so that a recording
// can be read while it grows, cut between any two lines, and processed with the usual tools.
//
//	{"version":1,"source":"s3://photos/train","files":50000,...}   the first line: Header
//	{"file":17,"sample":17,"size":114660,"path":"a/b.jpg"}         before the first event of a file: File
//	[1204,"o",4711,17]                                             an event: microseconds, kind, process, file
//	[1310,"r",4711,17,0,114660,30512,"miss"]                       a read: ..., offset, bytes, wait in microseconds, area
//	{"lost":12}                                                    events lost because the ring was full, or of another version
//	{"stats":{...}}                                                `.shoal/stats`, added by the reader of the recording
package trace

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"
)

const Version = 1 // of the format: a field may be added without a new one

// Header is the first line.
type Header struct {
	Version     int       `json:"version"`
	Started     time.Time `json:"started"`
	Source      string    `json:"source"`
	Dataset     string    `json:"dataset"` // its version, hex SHA-256
	Files       int       `json:"files"`
	Samples     int       `json:"samples"` // numbered files
	Bytes       int64     `json:"bytes"`
	Packed      bool      `json:"packed"`          // the files are members of tar shards
	Order       string    `json:"order"`           // --order
	Memory      int64     `json:"memory_for_data"` // bytes
	CacheBytes  int64     `json:"cache_bytes"`     // on disk, for all datasets
	Connections int       `json:"connections"`     // requests that may be in flight
	Trees       []Tree    `json:"trees,omitempty"` // folders whose samples a trainer may number from 0
}

// Tree is a folder whose samples a trainer may have numbered from 0.
type Tree struct {
	Folder string `json:"folder"`
	First  int    `json:"first"`
	Len    int    `json:"len"`
}

// Footer is the last line of a saved recording, {"footer":{...}}.
type Footer struct {
	Seconds float64 `json:"seconds"` // duration of the recording
}

// File describes a file of the dataset.
type File struct {
	File   int    `json:"file"`
	Sample int    `json:"sample"` // -1: not numbered
	Size   int64  `json:"size"`
	Path   string `json:"path"`
}

// Kind is the kind of an event.
type Kind byte

// The kinds of events.
const (
	Open   Kind = 'o'
	Read   Kind = 'r'
	Close  Kind = 'c' // of one open; some time after close(2)
	Lookup Kind = 'l' // a lookup of a name or of attributes; File is -1 if there is no file
	List   Kind = 'd' // a piece of a folder's listing
)

// Area is the source that served a read.
type Area uint8

// The areas.
const (
	None   Area = iota // not a read
	Keep               // the kept set on disk
	Ring               // memory, fetched ahead
	Joined             // a fetch that was under way
	Miss               // the object store, with a fetch that the read began
)

var areas = [...]string{None: "", Keep: "keep", Ring: "ring", Joined: "joined", Miss: "miss"}

func (a Area) String() string { return areas[min(int(a), len(areas)-1)] }

// Event is one action of a process.
type Event struct {
	At      time.Duration // since the recording began
	Wait    time.Duration // until a read was answered
	Off     int64         // of a read
	Process uint32
	File    int32 // -1: none
	Len     int32 // bytes of a read
	Kind    Kind
	Area    Area
}

// Append appends the event's line.
func (e *Event) Append(b []byte) []byte {
	b = fmt.Appendf(b, `[%d,"%c",%d,%d`, e.At.Microseconds(), e.Kind, e.Process, e.File)
	if e.Kind == Read {
		b = fmt.Appendf(b, `,%d,%d,%d,"%s"`, e.Off, e.Len, e.Wait.Microseconds(), e.Area)
	}
	return append(b, "]\n"...)
}

// Losses is the line about events lost because the ring was full, or of another version of the dataset.
type Losses struct {
	Lost int64 `json:"lost"`
}

// AppendJSON appends a line with v: one of this package's types, or what a daemon says, which may be no JSON.
func AppendJSON(b []byte, v any) []byte {
	text, _ := json.Marshal(v)
	return append(append(b, text...), '\n')
}

// parseEvent is the inverse of Event.Append.
func parseEvent(line []byte) (e Event, err error) {
	var kind, area string
	var at, wait int64
	fields := []any{&at, &kind, &e.Process, &e.File, &e.Off, &e.Len, &wait, &area}
	err = json.Unmarshal(line, &fields)
	read := kind == string(Read) && len(fields) == 8
	if other := len(kind) == 1 && strings.Contains("ocld", kind) && len(fields) == 4; err != nil || !read && !other ||
		at < 0 || wait < 0 || e.Off < 0 || e.Len < 0 || e.File < -1 {
		return Event{}, fmt.Errorf("%.80q is not an event", line)
	}
	e.Kind, e.At, e.Wait = Kind(kind[0]), time.Duration(at)*time.Microsecond, time.Duration(wait)*time.Microsecond
	e.Area = Area(max(slices.Index(areas[:], area), 0))
	return e, nil
}

// Trace is a recording in memory.
type Trace struct {
	Header
	Files  map[int]File // the files in events
	Events []Event      // in the order of recording; reads are recorded when they are answered
	Lost   int64
	Stats  []json.RawMessage // snapshots, the first from the beginning
	Length time.Duration     // of the recording: to the last event, or the footer's if that is later

	begun bool
}

// Add adds one line.
func (t *Trace) Add(line []byte) (err error) {
	line = bytes.TrimSpace(line)
	switch {
	case len(line) == 0:
	case !t.begun:
		err = t.begin(line)
	case line[0] == '[':
		var e Event
		if e, err = parseEvent(line); err == nil {
			t.Events, t.Length = append(t.Events, e), max(t.Length, e.At+e.Wait)
		}
	default:
		err = t.addObject(line)
	}
	return err
}

func (t *Trace) begin(line []byte) error {
	if err := json.Unmarshal(line, &t.Header); err != nil || t.Version == 0 {
		return fmt.Errorf("%.80q is not the header of a recording (shoal profile --out writes them)", line)
	}
	if t.Version > Version {
		return fmt.Errorf("the recording has version %d, and this program reads %d (use a newer shoal)",
			t.Version, Version)
	}
	t.Files, t.begun = map[int]File{}, true
	return nil
}

// addObject adds a line that has names for what it says.
func (t *Trace) addObject(line []byte) error {
	var l struct {
		IsFile *int            `json:"file"`
		Stats  json.RawMessage `json:"stats"`
		Footer Footer          `json:"footer"`
		Losses
		File
	}
	if err := json.Unmarshal(line, &l); err != nil {
		return fmt.Errorf("%.80q is not a line of a recording: %w", line, err)
	}
	if l.IsFile != nil {
		l.File.File = *l.IsFile
		t.Files[*l.IsFile] = l.File
	}
	if l.Stats != nil {
		t.Stats = append(t.Stats, l.Stats)
	}
	t.Length = max(t.Length, time.Duration(l.Footer.Seconds*float64(time.Second)))
	t.Lost += l.Lost
	return nil
}
