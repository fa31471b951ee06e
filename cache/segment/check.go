package segment

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/shoalfs/shoal/cache/crypt"
	"github.com/shoalfs/shoal/internal/killpoint"
)

// CheckOptions of a Check.
type CheckOptions struct {
	// Context ends the check early; nil means none.
	Context context.Context
	// Repair repairs the findings; see Finding.Remedy. Without it nothing is written.
	Repair bool
	// Key is the store's key; nil for an unencrypted one.
	Key *crypt.Key
	// Index is the index that the store of this folder uses; without it the tables are not compared.
	Index Index
	// Coded, unless nil, tells whether a file of so many bytes comes back from its shorter form.
	Coded func(payload []byte, size int64) error
	// Progress, unless nil, is called now and then with the bytes checked and their total.
	Progress func(done, total int64)
	// MaxFindings is how many findings are listed; all are counted. The default is 1,000.
	MaxFindings int
	// FS is the file system; the default is the operating system's.
	FS FS
}

// Finding is one thing that is wrong.
type Finding struct {
	File   string
	Offset int64 // in the file; -1 if none applies
	What   string
	Remedy string // what a repair does, or the user must do
	// Repaired says that the remedy was applied.
	Repaired bool
}

// String returns the finding on one line.
func (f Finding) String() string {
	where := f.File
	if f.Offset >= 0 {
		where += fmt.Sprintf(" at %d", f.Offset)
	}
	state := "remedy"
	if f.Repaired {
		state = "repaired"
	}
	return fmt.Sprintf("%s: %s (%s: %s)", where, f.What, state, f.Remedy)
}

// Report is what Check found.
type Report struct {
	Segments int
	Bytes    int64 // of their files
	Records  int   // with a valid header and payload

	// No damage, and no findings:
	Holes int // places where an append was cut off before others, or a repair made a record void
	// records that cannot be read (encrypted without the key, unencrypted with one); a repair leaves them alone
	Encrypted int

	BadSegments int   // without a valid header
	Newer       int   // segments of a newer version; left alone
	BadRecords  int   // header or payload damaged
	TornTails   int   // segments that end in bytes of no record
	TornBytes   int64 // in them
	BadTables   int   // tables of the index that cannot be read, or that differ from the segments
	Unreadable  int   // files that the disk fails to read
	TempFiles   int   // leftovers
	Unknown     int   // files that are not ours; never removed

	Findings []Finding // the first MaxFindings
	Omitted  int       // those beyond
	Repaired int       // of all findings
}

// Damage counts damage. Unknown files, and segments of a newer version, are findings, but not damage.
func (r *Report) Damage() int {
	return r.BadSegments + r.BadRecords + r.TornTails + r.BadTables + r.Unreadable + r.TempFiles
}

// checker is one Check.
type checker struct {
	o       CheckOptions
	dir     string
	report  Report
	done    int64
	total   int64
	removed bool // files were
}

// Check reads all segments of a folder and compares them with their checksums and with the index. No store may have
// the folder open. Damage is not an error but a finding. An error means a folder that cannot be listed, a failed
// repair, or the end of the context; then the report covers what was checked so far.
//
// After a repair the next Open serves every good record and no other. It cuts torn tails, overwrites the magic of a
// damaged record, so that it stays a hole, rewrites a damaged segment header if the first record is good, removes the
// file otherwise, and removes leftover temporary files. It drops the tables of changed segments, so that Open scans
// them. It does not change records that it cannot read, segments of a newer version, or files with unknown names.
// Two records of one extent are not damage: the later one counts.
func Check(dir string, o CheckOptions) (Report, error) {
	o.Context = cmp.Or(o.Context, context.Background())
	o.FS = cmp.Or[FS](o.FS, osFS{})
	if o.MaxFindings <= 0 {
		o.MaxFindings = 1000
	}
	if o.Progress == nil {
		o.Progress = func(int64, int64) {}
	}
	c := &checker{o: o, dir: dir}
	if err := c.run(); err != nil {
		return c.report, fmt.Errorf("segment: check %s: %w", dir, err)
	}
	return c.report, nil
}

// found adds a finding. When repairing, it first calls fix, unless nil, and returns its error.
func (c *checker) found(file string, off int64, what, remedy string, fix func() error) error {
	f := Finding{File: file, Offset: off, What: what, Remedy: remedy}
	var err error
	if c.o.Repair && fix != nil {
		if err = fix(); err == nil {
			f.Repaired = true
			c.report.Repaired++
		} else {
			err = fmt.Errorf("repair %s: %w", file, err)
		}
	}
	if len(c.report.Findings) < c.o.MaxFindings {
		c.report.Findings = append(c.report.Findings, f)
	} else {
		c.report.Omitted++
	}
	return err
}

// segmentID returns the number in the name of a segment.
func segmentID(name string) (id uint32, ok bool) {
	num, ok := strings.CutSuffix(name, ".seg")
	n, err := strconv.ParseUint(num, 10, 32)
	if !ok || err != nil || len(num) != 8 || n == 0 || n > maxSeg {
		return 0, false
	}
	return uint32(n), true
}

func (c *checker) run() error {
	names, err := c.o.FS.ReadDir(c.dir)
	if err != nil {
		return err
	}
	var ids []uint32 // sorted, as the names are
	for _, name := range names {
		id, ok := segmentID(name)
		if !ok {
			if err := c.other(name); err != nil {
				return err
			}
			continue
		}
		ids = append(ids, id)
		if f, err := c.o.FS.OpenFile(c.path(id), os.O_RDONLY, 0); err == nil {
			if n, err := f.Size(); err == nil {
				c.total += n
			}
			_ = f.Close()
		}
	}
	c.o.Progress(0, c.total)
	stale, err := walk(ids, c.o.Index, c.segment, func(err error) error {
		c.report.BadTables++
		return c.found(c.dir, -1, fmt.Sprintf("the index cannot be read: %v", err),
			"none is needed, the next start scans the segments", nil)
	})
	if err != nil {
		return err
	}
	for _, id := range stale {
		c.report.BadTables++
		if err := c.found(c.path(id), -1, "the index lists this segment, but its file is missing",
			"remove it from the index", func() error { return c.dropTable(id) }); err != nil {
			return err
		}
	}
	if c.removed {
		return c.o.FS.SyncDir(c.dir)
	}
	return nil
}

// other checks a file that is not a segment.
func (c *checker) other(name string) error {
	path := filepath.Join(c.dir, name)
	if strings.HasPrefix(name, ".tmp") || strings.HasSuffix(name, ".tmp") {
		c.report.TempFiles++
		return c.found(path, -1, "left over from a killed process", "remove it", func() error {
			c.removed = true
			return c.o.FS.Remove(path)
		})
	}
	c.report.Unknown++
	return c.found(path, -1, "not a file of shoal", "inspect it and remove it yourself", nil)
}

func (c *checker) path(id uint32) string { return filepath.Join(c.dir, fmt.Sprintf("%08d.seg", id)) }

// dropTable removes a segment from the index, so that the next Open scans it.
func (c *checker) dropTable(id uint32) error {
	if c.o.Index == nil {
		return nil
	}
	err := c.o.Index.DropSegment(id)
	killpoint.Pass("segment.repair.index")
	return err
}

// remove deletes a useless segment.
func (c *checker) remove(id uint32) error {
	c.removed = true
	err := c.o.FS.Remove(c.path(id))
	killpoint.Pass("segment.repair.removed")
	return errors.Join(err, c.dropTable(id))
}

// segment checks one file; table is its entry in the index, or nil.
func (c *checker) segment(id uint32, table *cover) (err error) {
	path := c.path(id)
	before, size, mended := c.done, int64(0), false
	defer func() {
		c.done = before + size
		c.o.Progress(c.done, c.total)
	}()
	if err := c.o.Context.Err(); err != nil {
		return err
	}
	unreadable := func(off int64, err error) error {
		c.report.Unreadable++
		return c.found(path, off, fmt.Sprintf("cannot be read: %v", err),
			"check the disk; lost data is fetched again", nil)
	}
	flag := os.O_RDONLY
	if c.o.Repair {
		flag = os.O_RDWR
	}
	f, err := c.o.FS.OpenFile(path, flag, 0)
	if err != nil {
		return unreadable(-1, err)
	}
	defer func() { _ = f.Close() }()
	if size, err = f.Size(); err != nil {
		return unreadable(-1, err)
	}
	var head [segHeaderLen]byte
	n, err := f.ReadAt(head[:], 0)
	if err != nil && !errors.Is(err, io.EOF) {
		return unreadable(0, err)
	}
	c.report.Segments++
	c.report.Bytes += size
	salt, err := parseSegmentHeader(head[:n], id)
	if errors.Is(err, ErrNewerFormat) {
		c.report.Newer++
		return c.found(path, 0, err.Error(), "left alone", nil)
	}
	if err != nil {
		c.report.BadSegments++
		var ok bool
		if salt, ok = salvageSalt(f, size, id, table, c.o.Key); !ok {
			return c.found(path, 0, err.Error(),
				"remove the file; its records cannot be told apart, and its data is fetched again",
				func() error { return c.remove(id) })
		}
		if err := c.found(path, 0, err.Error(), "rewrite the header from a record", func() error {
			mended = true
			return mendHeader(f, id, salt)
		}); err != nil {
			return err
		}
	}
	x := &segmentCheck{checker: c, f: f, id: id, path: path, salt: salt, key: newSealer(c.o.Key, salt), size: size,
		end: segHeaderLen}
	if err := x.scan(); err != nil {
		if c.o.Context.Err() != nil {
			return err
		}
		return unreadable(x.end, err)
	}
	if err := x.judge(); err != nil {
		return err
	}
	if table != nil && x.encrypted == 0 {
		if what := x.compare(table); what != "" {
			c.report.BadTables++
			return c.found(path, -1, what, "remove it from the index; the next start scans the segment",
				func() error { return c.dropTable(id) })
		}
	}
	if (mended || x.changed) && table != nil {
		return c.dropTable(id)
	}
	return nil
}

// segmentCheck is the check of one segment with a valid header.
type segmentCheck struct {
	*checker
	f         File
	id        uint32
	path      string
	salt      uint64
	key       *sealer
	size      int64
	end       int64 // behind the last valid record
	good      []entry
	bad       []Finding // records to be voided
	encrypted int
	changed   bool // something was written
}

// scan reads all records and their payloads.
func (x *segmentCheck) scan() error {
	payloads := window{r: x.f, size: x.size}
	var failed error
	headersEnd := int64(segHeaderLen)
	_, _, err := scan(x.f, x.salt, segHeaderLen, x.size, func(off int64, h *header) {
		if failed != nil {
			return
		}
		if failed = x.o.Context.Err(); failed != nil {
			return
		}
		if off > headersEnd {
			x.hole(headersEnd)
		}
		end := off + h.end()
		headersEnd = end
		x.done += h.end()
		if !h.ours(x.key) {
			x.encrypted++
			x.end = end
			return
		}
		if rec, what := x.verify(&payloads, off, h); what != "" {
			x.bad = append(x.bad, Finding{Offset: off, What: what})
		} else {
			x.good = append(x.good, entry{Extent: rec.extent(), off: off, gap: h.gap})
			x.end = end
		}
		x.o.Progress(x.done, x.total)
	})
	return errors.Join(failed, err)
}

// hole checks a place where a header should be and is not.
func (x *segmentCheck) hole(off int64) {
	var b [recHeaderLen]byte
	if _, err := x.f.ReadAt(b[:], off); err != nil && !errors.Is(err, io.EOF) {
		x.bad = append(x.bad, Finding{Offset: off, What: fmt.Sprintf("header of a record cannot be read: %v", err)})
		return
	}
	if b == [recHeaderLen]byte{} || string(b[:len(voidMagic)]) == voidMagic {
		x.report.Holes++ // never written, or made void
		return
	}
	x.bad = append(x.bad, Finding{Offset: off, What: "header of a record is damaged"})
}

// verify returns the record at off, and what is wrong with it, "" if nothing is.
func (x *segmentCheck) verify(payloads *window, off int64, h *header) (rec Record, what string) {
	rec, known := h.record(x.key)
	if !known {
		return rec, "header of a record is damaged, or was written with another key"
	}
	payload, err := payloads.at(off+int64(h.gap), rec.Length, max(rec.Length, scanChunk))
	if err != nil { // somewhere in all that
		payload, err = payloads.at(off+int64(h.gap), rec.Length, rec.Length)
	}
	if err != nil {
		return rec, fmt.Sprintf("payload of a record cannot be read: %v", err)
	}
	if len(payload) < rec.Length || !h.open(x.key, payload[:rec.Length]) {
		return rec, "payload of a record is damaged"
	}
	if x.o.Coded != nil && rec.Offset == 0 && int64(rec.Length) < min(rec.ObjectSize, ExtentSize) {
		if err := x.o.Coded(payload[:rec.Length], rec.ObjectSize); err != nil {
			return rec, fmt.Sprintf("a recoded file cannot be restored: %v", err)
		}
	}
	return rec, ""
}

// judge counts a scan's findings and repairs them.
func (x *segmentCheck) judge() error {
	x.report.Records += len(x.good)
	x.report.Encrypted += x.encrypted
	// After the last good record nothing needs to be voided: it is cut off.
	for _, b := range x.bad {
		x.report.BadRecords++
		remedy := "mark it as void; its data is fetched again"
		if b.Offset >= x.end {
			remedy = "cut it off; its data is fetched again"
		}
		if err := x.found(x.path, b.Offset, b.What, remedy, func() error {
			x.changed = true
			if b.Offset >= x.end {
				return nil // below
			}
			err := writeAt(x.f, []byte(voidMagic), b.Offset)
			killpoint.Pass("segment.repair.void")
			return err
		}); err != nil {
			return err
		}
	}
	if x.size > x.end {
		from := x.end
		var magic [len(voidMagic)]byte
		_, _ = x.f.ReadAt(magic[:], from)
		if n := len(x.bad); string(magic[:]) == voidMagic {
			x.report.Holes++
		} else if n == 0 || x.bad[n-1].Offset < from {
			x.report.TornTails++
			x.report.TornBytes += x.size - from
			if err := x.found(x.path, from, fmt.Sprintf(
				"%d bytes at the end are not a record: a crash interrupted an append", x.size-from), "cut them off",
				func() error { return nil }); err != nil { // below
				return err
			}
		}
		if x.o.Repair {
			x.changed = true
			if err := x.f.Truncate(from); err != nil {
				return fmt.Errorf("repair %s: %w", x.path, err)
			}
			killpoint.Pass("segment.repair.cut")
		}
	}
	if x.changed {
		if err := x.f.Sync(); err != nil {
			return fmt.Errorf("repair %s: %w", x.path, err)
		}
		killpoint.Pass("segment.repair.file")
	}
	return nil
}

// compare returns how the index's table differs from the segment, or "".
func (x *segmentCheck) compare(c *cover) string {
	table, err := x.key.openTable(x.id, c.table)
	var entries []entry
	lost := 0
	if err == nil {
		entries, lost, err = parseTable(table, maxSegmentSize+2*ExtentSize)
	}
	switch {
	case err != nil || lost > 0 || !c.valid():
		return "the table in the index is damaged"
	case len(entries) > 0 && entries[len(entries)-1].end() > c.size:
		return "the table in the index names records beyond its own end"
	}
	tabled := make(map[int64]*entry, len(entries))
	for i := range entries {
		entries[i].File = NoFile // not in the segment
		tabled[entries[i].off] = &entries[i]
	}
	for i := range x.good {
		e := &x.good[i]
		switch t := tabled[e.off]; {
		case e.off >= c.size && c.sealed:
			return "the index says that the segment is full, but it ends before the record at " +
				strconv.FormatInt(e.off, 10)
		case e.off < c.size && (t == nil || *t != *e):
			return fmt.Sprintf("the table in the index has a different record at %d than the segment", e.off)
		}
		delete(tabled, e.off)
	}
	// A record that only the table has was damaged, and was reported already.
	for i := range entries {
		if off := entries[i].off; tabled[off] != nil && !x.isBad(off) {
			return fmt.Sprintf("the table in the index has a record at %d, but the segment has none", off)
		}
	}
	return ""
}

func (x *segmentCheck) isBad(off int64) bool {
	_, ok := slices.BinarySearchFunc(x.bad, off, func(b Finding, off int64) int { return cmp.Compare(b.Offset, off) })
	return ok
}
