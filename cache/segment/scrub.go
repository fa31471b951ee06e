package segment

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
)

const (
	// scrubRun is how much a scrub checks, and passes to pace, at a time, unless a record is longer: it bounds memory.
	scrubRun = 1 << 20
	// scrubStep is how much it reads at a time. A step that is not all in memory is read and dropped as a whole, so a
	// longer one would evict more of others' pages. BenchmarkScrub, ext4 on a cloud disk: without pace a scrub reads
	// 270 MB/s, so a full terabyte takes about an hour.
	scrubStep = BlockSize
	// scrubErrors is how many runs may be unreadable before a scrub gives up: one bad sector must not hide the rest,
	// and a dead disk should not be read a million times.
	scrubErrors = 8
)

// Scrub reads and checks all records, the oldest segment first, so that damage is found before a reader needs the
// bytes, and where reads do not check: those of a few bytes, and those of other processes. Damaged records are passed
// to bad, for the owner to free, with a Loc that is not equal to the one that Append returned, but [Loc.Same]. If even
// the header is damaged, the record has Length 0. pace is called after each read with its length, and sleeps as long as
// the owner wants. Unreadable records stay unchecked, and the error is returned at the end.
//
// A scrub leaves the page cache as it was, to 128 KiB. It reads by its own descriptor, without read-ahead: first the
// bytes in memory (RWF_NOWAIT), then the rest, and drops only these (POSIX_FADV_DONTNEED). A cache is larger than
// memory, so the pages of one pass would evict those in use and be evicted before their own use. If the file system
// cannot tell what is in memory nothing is dropped, since it might be in use.
func (s *Store) Scrub(ctx context.Context, pace func(n int), bad func(Record, Loc)) error {
	x := &scrubber{s: s, ctx: ctx, pace: pace, bad: bad}
	for _, g := range s.sorted() {
		if err := x.segment(g); err != nil {
			x.errs = append(x.errs, err)
			break
		}
	}
	return errors.Join(x.errs...)
}

// scrubber is one scrub.
type scrubber struct {
	s    *Store
	ctx  context.Context
	pace func(n int)
	bad  func(Record, Loc)
	buf  []byte
	errs []error
}

// errGiveUp ends a scrub; the errors are in errs.
var errGiveUp = errors.New("the scrub gave up")

// scrubRecord is a record to check.
type scrubRecord struct {
	slot      int
	off, size int64
}

// todo returns the records of a segment that are to be checked.
func (x *scrubber) todo(g *segment) ([]scrubRecord, error) {
	x.s.mu.Lock()
	defer x.s.mu.Unlock()
	if x.s.closed {
		return nil, ErrClosed
	}
	if g.dropped {
		return nil, nil
	}
	t := g.tab.Load()
	var todo []scrubRecord
	for i := range int(t.n.Load()) {
		if r := t.recs[i]; !g.isDead(i) {
			todo = append(todo, scrubRecord{i, int64(r.off) * unit, int64(r.units) * unit})
		}
	}
	return todo, nil
}

func (x *scrubber) segment(g *segment) error {
	todo, err := x.todo(g)
	if err != nil || len(todo) == 0 {
		return err
	}
	f, err := x.s.o.FS.OpenFile(x.s.path(g.id), os.O_RDONLY, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // dropped
	}
	if err != nil {
		return x.failed(g, err)
	}
	defer func() { _ = f.Close() }()
	for len(todo) > 0 {
		if err := x.ctx.Err(); err != nil {
			return err
		}
		x.s.mu.Lock()
		closed := x.s.closed
		x.s.mu.Unlock()
		if closed {
			return ErrClosed
		}
		if x.s.segment(g.id) != g {
			return nil
		}
		// A run ends when it is long enough, and before a record that needs no check.
		n := 1
		for n < len(todo) && todo[n].off == todo[n-1].off+todo[n-1].size && todo[n].off+todo[n].size-
			todo[0].off <= scrubRun {
			n++
		}
		if err := x.run(g, f, todo[:n]); err != nil {
			return err
		}
		todo = todo[n:]
	}
	return nil
}

// failed notes a disk error.
func (x *scrubber) failed(g *segment, err error) error {
	x.errs = append(x.errs, fmt.Errorf("segment: scrub segment %08d: %w", g.id, err))
	if len(x.errs) >= scrubErrors {
		return errGiveUp
	}
	return nil
}

// run reads and checks neighbouring records.
func (x *scrubber) run(g *segment, f File, recs []scrubRecord) error {
	from := recs[0].off
	size := int(recs[len(recs)-1].off + recs[len(recs)-1].size - from)
	if cap(x.buf) < size {
		x.buf = make([]byte, max(size, scrubRun))
	}
	buf := x.buf[:size]
	n, err := x.fill(f, buf, from)
	x.pace(size)
	if err != nil {
		return x.failed(g, err)
	}
	buf = buf[:n]
	for _, r := range recs {
		b := buf[min(r.off-from, int64(n)):]
		h, err := parseHeader(b[:min(len(b), maxHeadLen)], g.salt, r.off, r.off+int64(len(b)))
		right := err == nil && h.ours(g.key) && h.end() == r.size && h.open(g.key, b[h.gap:h.gap+h.rec.Length])
		if g.tab.Load().setChecked(r.slot, 0, blocks(int(r.size))-1, right); right {
			x.s.scrubbed.Add(1)
			continue
		}
		var rec Record
		if err == nil {
			rec, _ = h.record(g.key)
		}
		x.s.mu.Lock()
		gone := g.dropped || g.isDead(r.slot) // meanwhile
		x.s.mu.Unlock()
		if !gone {
			x.bad(rec, makeLoc(g.id, r.off, 0))
		}
	}
	return nil
}

// fill reads a run, a step at a time, and drops the pages that it brought in. n is less at the end of the file.
//
// ReadNowAt makes the kernel read the requested range, so only that much is requested as is dropped again. If the disk
// is quick, or the processor busy, the bytes may even come in time: so a range of which nothing is in memory is not
// requested.
func (x *scrubber) fill(f File, buf []byte, off int64) (n int, err error) {
	const page = 4096 // only whole pages can be forgotten
	for n < len(buf) {
		at := off + int64(n)
		step := buf[n:min(int64(len(buf)), alignUp(at+1, scrubStep)-off)]
		k := 0
		if !x.s.noNow.Load() && !f.Absent(at, int64(len(step))) {
			k, err = f.ReadNowAt([][]byte{step}, at)
			if errors.Is(err, errors.ErrUnsupported) {
				x.s.noNow.Store(true)
			} else if err != nil && !errors.Is(err, ErrWouldBlock) {
				return 0, err
			}
			if err == nil && k == len(step) {
				n += k
				continue
			}
		}
		m, err := f.ReadAt(step[k:], at+int64(k))
		if !x.s.noNow.Load() {
			from := (at + int64(k)) &^ (page - 1)
			f.Forget(from, alignUp(at+int64(len(step)), page)-from)
		}
		n += k + m
		if errors.Is(err, io.EOF) {
			return n, nil // the last record is not padded; a file that was cut shows by its checksums
		}
		if err != nil {
			return 0, err
		}
	}
	return n, nil
}
