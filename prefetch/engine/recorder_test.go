package engine

import (
	"bytes"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/shoalfs/shoal/internal/profile/trace"
)

// drain reads what a recording holds.
func drain(r *Recording, size int) []byte {
	var all []byte
	p := make([]byte, size)
	for {
		n := r.Read(p)
		if n == 0 {
			return all
		}
		all = append(all, p[:n]...)
	}
}

func parse(t testing.TB, text []byte) *trace.Trace {
	t.Helper()
	var tr trace.Trace
	for line := range bytes.Lines(text) {
		if err := tr.Add(line); err != nil {
			t.Fatal(err)
		}
	}
	return &tr
}

func TestRecordingHoldsWhatReadersDo(t *testing.T) {
	dir, paths := folder(t, 3, 20)
	e := openEngine(t, dir, t.TempDir(), "none")
	defer closeEngine(t, e)
	m := e.Manifest()
	used := e.Cache().Ledger().Used()
	if e.Recording() {
		t.Fatal("a recording without anybody's asking")
	}
	e.Saw(m, trace.Event{Kind: trace.Open}, time.Now()) // nobody listens
	r, err := e.Record()
	if err != nil {
		t.Fatal(err)
	}
	if !e.Recording() || e.Cache().Ledger().Used() <= used {
		t.Error("a recording that nobody sees, or that takes no memory")
	}
	for i, p := range paths[:10] {
		n, _ := m.Find(p)
		if a := e.Area(m, n.Index, 0); a != trace.Miss {
			t.Errorf("%s before it was read: %s", p, a)
		}
		read(t, e, dir, p)
		waitFor(t, p+" on disk or in memory", func() bool {
			a := e.Area(m, n.Index, 0)
			return a == trace.Keep || a == trace.Ring
		})
		at := r.began.Add(time.Duration(i) * time.Millisecond)
		e.Saw(m, trace.Event{Kind: trace.Open, Process: 7, File: int32(n.Index)}, at)
		e.Saw(m, trace.Event{Kind: trace.Read, Process: 7, File: int32(n.Index), Off: 4096, Len: 100,
			Wait: time.Millisecond, Area: trace.Miss}, at)
	}
	e.Saw(m, trace.Event{Kind: trace.Lookup, Process: 7, File: -1}, r.began)
	tr := parse(t, drain(r, 100)) // cut anywhere
	if tr.Header.Files != 60 || tr.Samples != 60 || tr.Bytes != m.Bytes() || tr.Order != "none" ||
		tr.Dataset != m.Version() {
		t.Errorf("header: %+v", tr.Header)
	}
	if len(tr.Events) != 21 || len(tr.Files) != 10 || tr.Lost != 0 {
		t.Errorf("%d events, %d files, %d lost", len(tr.Events), len(tr.Files), tr.Lost)
	}
	want := trace.Event{At: 9 * time.Millisecond, Kind: trace.Read, Process: 7, File: tr.Events[18].File, Off: 4096,
		Len: 100, Wait: time.Millisecond, Area: trace.Miss}
	if tr.Events[19] != want {
		t.Errorf("event: %+v, want %+v", tr.Events[19], want)
	}
	if f := tr.Files[int(want.File)]; f.Path != paths[9] || f.Sample != 9 || f.Size != m.Size(int(want.File)) {
		t.Errorf("file: %+v", f)
	}

	// More than it holds is counted.
	for range queuedEvents + 5 {
		e.Saw(m, trace.Event{Kind: trace.Open, Process: 7, File: 0}, time.Now())
	}
	rest := drain(r, 1<<20)
	if n := strings.Count(string(rest), `"o"`); n != queuedEvents || !strings.Contains(string(rest), `{"lost":5}`) {
		t.Errorf("%d of %d events, or not 5 that were lost", n, queuedEvents)
	}
	if e.Saw(m, trace.Event{Kind: trace.Open}, time.Now()); len(drain(r, 100)) == 0 {
		t.Error("it does not go on")
	}
	e.Saw(nil, trace.Event{Kind: trace.Open}, time.Now()) // of another version
	if text := string(drain(r, 100)); text != "{\"lost\":1}\n" {
		t.Errorf("an event of another version: %q", text)
	}
	r.Close()
	r.Close()
	if e.Recording() || e.Cache().Ledger().Used() != used {
		t.Errorf("after its end: recording %t, %d bytes held, before %d",
			e.Recording(), e.Cache().Ledger().Used(), used)
	}
}

func TestRecordingsAreBounded(t *testing.T) {
	dir, _ := folder(t, 1, 4)
	e := openEngine(t, dir, t.TempDir(), "none")
	defer closeEngine(t, e)
	used := e.Cache().Ledger().Used()
	var all []*Recording
	for range maxRecordings {
		r, err := e.Record()
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, r)
	}
	if _, err := e.Record(); !errors.Is(err, ErrRecordings) {
		t.Errorf("one too many: %v", err)
	}
	e.Saw(e.Manifest(), trace.Event{Kind: trace.Open}, time.Now())
	for i, r := range all {
		if tr := parse(t, drain(r, 4096)); len(tr.Events) != 1 {
			t.Errorf("recording %d has %d events", i, len(tr.Events))
		}
		r.Close()
	}
	if e.Cache().Ledger().Used() != used {
		t.Errorf("%d bytes held, before %d", e.Cache().Ledger().Used(), used)
	}
}

// BenchmarkSaw is what an open costs more, without a recording and with one that is read as a reader of the control
// file reads it.
func BenchmarkSaw(b *testing.B) {
	dir, _ := folder(b, 1, 100)
	e := openEngine(b, dir, b.TempDir(), "none")
	defer closeEngine(b, e)
	m := e.Manifest()
	saw := func(i int) {
		if e.Recording() {
			e.Saw(m, trace.Event{Kind: trace.Open, Process: 7, File: int32(i % 100)}, time.Now())
		}
	}
	b.Run("off", func(b *testing.B) {
		for i := range b.N {
			saw(i)
		}
	})
	b.Run("on", func(b *testing.B) {
		r, err := e.Record()
		if err != nil {
			b.Fatal(err)
		}
		defer r.Close()
		for i := range b.N {
			saw(i)
			if i%4096 == 0 {
				drain(r, 256<<10)
			}
		}
	})
}
