package engine

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shoalfs/shoal/cache"
	"github.com/shoalfs/shoal/prefetch/run"
)

// numbered lays so many files in three class folders and opens them.
func numbered(t *testing.T, n int) *Engine {
	t.Helper()
	dir := t.TempDir()
	for i := range n {
		writeFile(t, filepath.Join(dir, fmt.Sprintf("c%d/img%04d.jpg", i*3/n, i)), fmt.Append(nil, i))
	}
	e := openEngine(t, dir, t.TempDir(), "auto")
	t.Cleanup(func() { closeEngine(t, e) })
	return e
}

// Who reads in sequence is followed after 16 opens, across folders, from where it begins; so is the next pass. From
// then on everything has been asked for before it is read, for a reader that gives it the time.
func TestReadInSequence(t *testing.T) {
	const n, from = 900, 200
	e := numbered(t, n)
	for pass, most := range []int64{16, 0} {
		misses := e.Stats().Misses
		for i := from; i < n; i++ {
			if i >= from+16 {
				eventually(t, "a sequence, planned further than its reader", func() bool {
					s := e.Stats()
					return s.Order.State == "inferred" && len(s.Streams) > 0 && s.Streams[0].Planned > i-from
				})
			}
			openAs(t, e, 9, i)
		}
		if m := e.Stats().Misses - misses; m > most {
			t.Errorf("pass %d: %d reads had to start their own fetch", pass, m)
		}
	}
	if s := e.Stats(); s.Order.Spec != "sequential" || len(s.Streams) != 1 || s.Streams[0].Name != sequenceName {
		t.Errorf("%+v, %+v", s.Order, s.Streams)
	}
	if text := string(e.orders.text()); !strings.Contains(text, "file after file of the listing, from c0/img02") {
		t.Error(text)
	}
}

// What workers leave between them when they are recognised is fetched ahead like the rest.
func TestWorkersInSequence(t *testing.T) {
	const n, workers, batch = 768, 4, 32
	e := numbered(t, n)
	for i := range n {
		if i >= 16+2*workers {
			eventually(t, "a sequence, planned further than its readers", func() bool {
				s := e.Stats()
				return s.Order.State == "inferred" && len(s.Streams) > 0 &&
					s.Streams[0].Planned >= min((i/(workers*batch)+1)*workers*batch, n-1)
			})
		}
		w, step := i%workers, i/workers
		openAs(t, e, uint32(20+w), step/batch*workers*batch+w*batch+step%batch)
	}
	if m := e.Stats().Misses; m > 16+2*workers {
		t.Errorf("%d reads had to start their own fetch", m)
	}
}

// Opens that wait to be looked at when a sequence is seen among those before them count as read, too.
func TestSequenceInOneLook(t *testing.T) {
	e := numbered(t, 300)
	i := e.orders.inference.Load()
	i.mu.Lock()
	for file := range 40 {
		i.opens = append(i.opens, run.Opening{Process: 9, File: file})
	}
	i.mu.Unlock()
	openAs(t, e, 9, 40) // wakes it
	eventually(t, "all of them", func() bool {
		s := e.Stats().Streams
		return len(s) == 1 && s[0].Position == 41 && s[0].Consumed == 41
	})
}

// Plans can be removed, are bounded in number, and one that nobody reads by keeps nobody from inferring.
func TestPlansEnd(t *testing.T) {
	const n = 600
	e := numbered(t, n)
	put := func(name string) error { return e.PutPlan(name, []byte("c0/img0007.jpg\nc1/img0300.jpg\n")) }
	if err := e.RemovePlan("default"); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
	used := e.cache.Ledger().Used()
	for i := range maxPlans {
		if err := put(fmt.Sprint("job", i)); err != nil {
			t.Fatal(err)
		}
	}
	if err := put("another"); err == nil || !strings.Contains(err.Error(), "rm MOUNTPOINT/.shoal/plans/NAME") {
		t.Error(err)
	}
	if err := put("job0"); err != nil { // in its own place
		t.Error(err)
	}
	for i := range maxPlans - 1 {
		if err := e.RemovePlan(fmt.Sprint("job", i)); err != nil {
			t.Fatal(err)
		}
	}
	if err := put("another"); err != nil || len(e.orders.mounted()) != 2 || e.orders.inference.Load() != nil {
		t.Errorf("%v, %d streams", err, len(e.orders.mounted()))
	}

	later := func(d time.Duration) {
		e.orders.planning.Lock()
		e.orders.look(time.Now().Add(d))
		e.orders.planning.Unlock()
	}
	later(0)
	if e.orders.inference.Load() != nil {
		t.Error("fresh plans, and the order is inferred")
	}
	later(2 * staleAfter)
	if text := string(e.orders.text()); e.orders.inference.Load() == nil ||
		!strings.Contains(text, "rm .shoal/plans/another ends it") || !e.Stats().Streams[0].Stale {
		t.Error(text)
	}
	for i := range 40 {
		openAs(t, e, 9, 100+i)
	}
	eventually(t, "a sequence beside stale plans", func() bool { return e.Stats().Order.State == "inferred" })
	openAs(t, e, 9, 7)
	later(3 * staleAfter)
	if text := string(e.orders.text()); e.orders.inference.Load() != nil || len(e.orders.mounted()) != 2 ||
		strings.Contains(text, "stale") {
		t.Error(text)
	}

	for _, name := range e.Plans() {
		if err := e.RemovePlan(name); err != nil {
			t.Error(err)
		}
	}
	if e.orders.inference.Load() == nil || len(e.orders.mounted()) != 0 {
		t.Error("without a plan the order is not inferred")
	}
	eventually(t, "all memory back", func() bool { return e.cache.Ledger().Used() <= used+1<<20 })

	// Those of jobs that were killed make way.
	for i := range maxPlans {
		if err := put(fmt.Sprint("job", i)); err != nil {
			t.Fatal(err)
		}
	}
	if err := put("another"); err == nil {
		t.Error("more plans than may be in force")
	}
	later(2 * staleAfter)
	if err := put("another"); err != nil || len(e.Plans()) != maxPlans || !slices.Contains(e.Plans(), "another") {
		t.Errorf("%v, %d plans", err, len(e.Plans()))
	}
}

// What was said of the ends of plans is said until there is another one: each job may have a name of its own.
func TestPlansThatEndedAreForgotten(t *testing.T) {
	e := numbered(t, 600)
	for i := range 3 {
		name := fmt.Sprint("job", i)
		if err := e.PutPlan(name, []byte("c0/img0007.jpg\nc1/img0300.jpg\n")); err != nil {
			t.Fatal(err)
		}
		if text := string(e.orders.text()); strings.Contains(text, "ended") {
			t.Error(text)
		}
		openAs(t, e, 9, 7)
		if err := e.RemovePlan(name); err != nil {
			t.Fatal(err)
		}
		if text := string(e.orders.text()); strings.Count(text, "ended") != 1 ||
			!strings.Contains(text, "plan "+name+" ended") {
			t.Error(text)
		}
	}
}

// Who opens large files one after another and reads little of each gets none of them ahead; who reads them gets all.
func TestSkimming(t *testing.T) {
	const files, size = 48, cache.ExtentSize + 1<<20
	for name, read := range map[string]int{"their beginnings": 4096, "all of them": size} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			for i := range files {
				f, err := os.Create(filepath.Join(dir, fmt.Sprintf("%03d.rec", i)))
				if err == nil {
					err = errors.Join(f.Truncate(size), f.Close())
				}
				if err != nil {
					t.Fatal(err)
				}
			}
			e := openEngine(t, dir, t.TempDir(), "auto")
			t.Cleanup(func() { closeEngine(t, e) })
			m, p := e.cur.Load().manifest, make([]byte, read)
			if text := string(e.orders.text()); !strings.Contains(text, "shoal.hint(ranges=") {
				t.Error(text)
			}
			i := e.orders.inference.Load()
			for n := range files + 1 { // when the last is looked at, those before have been
				file := min(n, files-1)
				e.Opened(m, file, 9)
				if _, err := e.ReadAt(t.Context(), m, file, p, 0); err != nil {
					t.Fatal(err)
				}
				e.WasRead(m, file, 0, int64(read), 9)
				e.Released(m, file)
				eventually(t, "all to be looked at", func() bool {
					i.mu.Lock()
					defer i.mu.Unlock()
					return i.said.reads == n+1
				})
			}
			planned := func() (n int) {
				for _, s := range e.Stats().Streams {
					n = max(n, s.Planned)
				}
				return n
			}
			if read == size {
				eventually(t, "all to be fetched", func() bool { return planned() == files })
			} else if n := len(e.Stats().Streams); n > 0 {
				t.Errorf("%d streams", n)
			}
		})
	}
}
