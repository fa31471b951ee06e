// Package trace is the format of a mount's recording of its readers: one JSON value on each line, so that a recording
// can be read while it grows, cut between any two lines, and processed with the usual tools.
//
//	{"version":1,"source":"s3://photos/train","files":50000,...}   the first line: Header
//	{"file":17,"sample":17,"size":114660,"path":"a/b.jpg"}         before the first event of a file: File
//	[1204,"o",4711,17]                                             an event: microseconds, kind, process, file
//	[1310,"r",4711,17,0,114660,30512,"miss"]                       a read: ..., offset, bytes, wait in microseconds, area
//	{"lost":12}                                                    events lost because the ring was full, or of another version
//	{"stats":{...}}                                                `.shoal/stats`, added by the reader of the recording
//
// Limits:
//
//   - A process is the thread that made the request, by the kernel's number; 0 is one in a pid namespace that the daemon
//     cannot see.
//   - Reads served by the kernel's page cache are not recorded: then there is only an open.
//   - The kernel reads ahead: reads of one process may overlap in time, and are up to 512 KiB long whatever the process
//     requested.
package trace

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// Version is that of the format. A field may be added without a new one.
const Version = 1

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

func (a Area) String() string {
	if int(a) < len(areas) {
		return areas[a]
	}
	return "Area(" + strconv.Itoa(int(a)) + ")"
}

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
	b = append(b, '[')
	b = strconv.AppendInt(b, e.At.Microseconds(), 10)
	b = append(b, ',', '"', byte(e.Kind), '"', ',')
	b = strconv.AppendUint(b, uint64(e.Process), 10)
	b = append(b, ',')
	b = strconv.AppendInt(b, int64(e.File), 10)
	if e.Kind == Read {
		b = append(b, ',')
		b = strconv.AppendInt(b, e.Off, 10)
		b = append(b, ',')
		b = strconv.AppendInt(b, int64(e.Len), 10)
		b = append(b, ',')
		b = strconv.AppendInt(b, e.Wait.Microseconds(), 10)
		b = append(b, ',', '"')
		b = append(b, e.Area.String()...)
		b = append(b, '"')
	}
	return append(b, ']', '\n')
}

// Losses is the line about events lost because the ring was full, or of another version of the dataset.
type Losses struct {
	Lost int64 `json:"lost"`
}

// AppendJSON appends a line with v: one of this package's types.
func AppendJSON(b []byte, v any) []byte {
	text, err := json.Marshal(v)
	if err != nil {
		panic(err) // unreachable: all of them can be encoded
	}
	return append(append(b, text...), '\n')
}

// parseEvent is the inverse of Event.Append.
func parseEvent(line string) (e Event, err error) {
	fields := strings.Split(strings.TrimSuffix(strings.TrimPrefix(line, "["), "]"), ",")
	fail := func() (Event, error) { return Event{}, fmt.Errorf("%.80q is not an event", line) }
	if len(fields) != 4 && len(fields) != 8 {
		return fail()
	}
	number := func(i int, bits int) (n int64) {
		if err == nil {
			n, err = strconv.ParseInt(fields[i], 10, bits)
		}
		return n
	}
	kind := strings.Trim(fields[1], `"`)
	if len(kind) != 1 {
		return fail()
	}
	e.Kind = Kind(kind[0])
	e.At = time.Duration(number(0, 64)) * time.Microsecond
	process := number(2, 64)
	e.Process, e.File = uint32(process), int32(number(3, 32))
	switch {
	case e.Kind == Read && len(fields) == 8:
		e.Off, e.Len, e.Wait = number(4, 64), int32(number(5, 32)), time.Duration(number(6, 64))*time.Microsecond
		name := strings.Trim(fields[7], `"`)
		for a, n := range areas {
			if n == name {
				e.Area = Area(a)
			}
		}
	case len(fields) == 4 && strings.Contains("ocld", kind):
	default:
		return fail()
	}
	if err != nil || process < 0 || process > 1<<32-1 || e.At < 0 || e.Wait < 0 || e.Off < 0 || e.Len < 0 || e.File < -1 {
		return fail()
	}
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
func (t *Trace) Add(line []byte) error {
	line = bytes.TrimSpace(line)
	switch {
	case len(line) == 0:
		return nil
	case line[0] == '[':
		if !t.begun {
			return errors.New("the recording does not begin with its header")
		}
		e, err := parseEvent(string(line))
		if err == nil {
			t.Events = append(t.Events, e)
			t.Length = max(t.Length, e.At+e.Wait)
		}
		return err
	}
	if !t.begun {
		var h Header
		if err := json.Unmarshal(line, &h); err != nil || h.Version == 0 {
			return fmt.Errorf("%.80q is not the header of a recording (shoal profile --out writes them)", line)
		}
		if h.Version > Version {
			return fmt.Errorf("the recording has version %d, and this program reads up to %d (use a newer shoal)", h.Version, Version)
		}
		t.Header, t.Files, t.begun = h, map[int]File{}, true
		return nil
	}
	var f struct {
		IsFile *int            `json:"file"`
		Lost   int64           `json:"lost"`
		Stats  json.RawMessage `json:"stats"`
		Footer *Footer         `json:"footer"`
		Sample int             `json:"sample"`
		Size   int64           `json:"size"`
		Path   string          `json:"path"`
	}
	if err := json.Unmarshal(line, &f); err != nil {
		return fmt.Errorf("%.80q is not a line of a recording: %w", line, err)
	}
	switch {
	case f.IsFile != nil:
		t.Files[*f.IsFile] = File{*f.IsFile, f.Sample, f.Size, f.Path}
	case f.Stats != nil:
		t.Stats = append(t.Stats, f.Stats)
	case f.Footer != nil:
		t.Length = max(t.Length, time.Duration(f.Footer.Seconds*float64(time.Second)))
	}
	t.Lost += f.Lost
	return nil
}
