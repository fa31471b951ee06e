package segment

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strings"
	"syscall"
	"testing"

	"pgregory.net/rapid"
)

// modelRecord is what the model knows of one append.
type modelRecord struct {
	rec     Record
	known   Extent // as a table has it
	payload []byte
	loc     Loc  // 0 if it was not acknowledged, or is gone
	synced  bool // a Sync returned after it
	freed   bool // in this life of the store
	// maybe says that damage was done to it, so that it may be missing or ErrCorrupt.
	maybe bool
	// unacked says that its append failed or never ended: it may show up after a crash, or not.
	unacked bool
}

// machine drives a store and compares it with a model: a list of records.
type machine struct {
	fs   *memFS
	idx  *mapIndex
	o    Options
	s    *Store
	recs []*modelRecord // by id, which is the key hash
	rng  *rand.Rand
	hung bool // an append never ends, so Close would wait for it
	late bool // a fault was met while the store sealed: Sync may still return its error

	budget  *Budget
	foreign int64 // what others took of it
	used    int64 // by the store, at the last check
}

func quiet() *slog.Logger { return slog.New(slog.NewTextHandler(io.Discard, nil)) }

// newRecord draws the facts of a record and its bytes.
func (m *machine) newRecord(t *rapid.T) *modelRecord {
	length := rapid.OneOf(rapid.IntRange(1, 300), rapid.IntRange(1, 20_000),
		rapid.IntRange(BlockSize-100, 2*BlockSize+100)).Draw(t, "length")
	r := &modelRecord{payload: make([]byte, length)}
	for i := range r.payload {
		r.payload[i] = byte(m.rng.Uint32())
	}
	if length > 200 && rapid.IntRange(0, 3).Draw(t, "header-like") == 0 && len(m.recs) > 0 {
		// A payload that holds the header of another record.
		old := m.recs[m.rng.IntN(len(m.recs))]
		at := (m.rng.IntN(length-150) / unit) * unit
		copy(r.payload[at:], appendHeader(nil, &old.rec, old.payload, m.rng.Uint64(), int64(at), 192))
	}
	r.rec = Record{
		Dataset: [16]byte{byte(rapid.IntRange(0, 2).Draw(t, "dataset"))},
		ETag:    strings.Repeat("e", rapid.SampledFrom([]int{0, 1, 32, 35, MaxETag}).Draw(t, "etag")),
		Offset:  int64(rapid.SampledFrom([]int{0, ExtentSize, 1 << 40}).Draw(t, "offset")), Length: length,
		File: uint32(rapid.SampledFrom([]int{0, 1 << 20, NoFile}).Draw(t, "file")),
	}
	r.rec.ObjectSize = r.rec.Offset + int64(length)
	binary.LittleEndian.PutUint32(r.rec.KeyHash[:], uint32(len(m.recs)))
	r.known = r.rec.extent()
	m.recs = append(m.recs, r)
	return r
}

func (m *machine) known() []*modelRecord {
	var known []*modelRecord
	for _, r := range m.recs {
		if r.loc != 0 {
			known = append(known, r)
		}
	}
	return known
}

func (m *machine) pick(t *rapid.T) *modelRecord {
	known := m.known()
	if len(known) == 0 {
		t.Skip("no records")
	}
	return known[rapid.IntRange(0, len(known)-1).Draw(t, "record")]
}

func (m *machine) append(t *rapid.T) {
	r := m.newRecord(t)
	loc, err := m.s.Append(r.rec, r.payload)
	if errors.Is(err, ErrFull) {
		most := int64(len(r.payload) + maxHeadLen + 2*unit + segHeaderLen + payloadAlign)
		own := m.o.MaxBytes == 0 || m.s.Used()+most <= m.o.MaxBytes
		shared := m.budget.Limit() == 0 || m.budget.Used()+most <= m.budget.Limit()
		if own && shared {
			t.Fatalf("full at %d of %d bytes, budget %d of %d",
				m.s.Used(), m.o.MaxBytes, m.budget.Used(), m.budget.Limit())
		}
		return
	}
	if err != nil || loc == 0 {
		t.Fatalf("append: %v, %v", loc, err)
	}
	r.loc = loc
}

// appendFails injects an error at one of the writes.
func (m *machine) appendFails(t *rapid.T) {
	fault := rapid.SampledFrom([]error{syscall.ENOSPC, syscall.EIO, errShort}).Draw(t, "errno")
	errno := fault
	if errors.Is(fault, errShort) {
		errno = io.ErrShortWrite
	}
	after := rapid.IntRange(0, 2).Draw(t, "writes before")
	r := m.newRecord(t)
	m.fs.setFault(func(op, _ string, _ int64) error {
		if op == "write" {
			if after--; after < 0 {
				return fault
			}
		}
		return nil
	})
	loc, err := m.s.Append(r.rec, r.payload)
	m.fs.setFault(nil)
	switch {
	case err == nil:
		r.loc = loc // the fault came too late
	case errors.Is(err, errno):
		r.unacked = true
	case !errors.Is(err, ErrFull):
		t.Fatal(err)
	}
}

// hang leaves an append in the middle: its place is taken, and some of the bytes are written.
func (m *machine) hang(t *rapid.T) {
	r := m.newRecord(t)
	g, e, err := m.s.leave(r.rec)
	if errors.Is(err, ErrFull) {
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	m.hung, r.unacked = true, true
	part := r.payload[:rapid.IntRange(0, len(r.payload)).Draw(t, "written")]
	if _, err := g.f.WriteAt(part, e.off+int64(e.gap)); err != nil {
		t.Fatal(err)
	}
}

// checkRead reads a range of a record's payload.
func (m *machine) checkRead(t *rapid.T, r *modelRecord, p []byte, off int64) {
	err := m.s.ReadAt(r.loc, r.rec.Length, p, off)
	if err != nil {
		if !r.maybe || !errors.Is(err, ErrCorrupt) {
			t.Fatalf("read %v [%d, %d): %v", r.loc, off, off+int64(len(p)), err)
		}
		return
	}
	if !bytes.Equal(p, r.payload[off:off+int64(len(p))]) {
		t.Fatalf("read %v [%d, %d): wrong bytes", r.loc, off, off+int64(len(p)))
	}
}

func (m *machine) read(t *rapid.T) {
	r := m.pick(t)
	off := rapid.IntRange(0, r.rec.Length).Draw(t, "from")
	n := rapid.IntRange(0, r.rec.Length-off).Draw(t, "n")
	m.checkRead(t, r, make([]byte, n), int64(off))
}

// readNow reads what a random part of the page cache allows.
func (m *machine) readNow(t *rapid.T) {
	r := m.pick(t)
	off := rapid.IntRange(0, r.rec.Length-1).Draw(t, "from")
	p := make([]byte, rapid.IntRange(1, r.rec.Length-off).Draw(t, "n"))
	m.forgetPages()
	err := m.s.ReadAtNow(r.loc, r.rec.Length, p, int64(off))
	switch {
	case errors.Is(err, ErrWouldBlock):
		from := r.loc.off() + int64(r.loc.gap())
		missing := m.s.noNow.Load()
		for at := r.loc.off(); at < from+int64(r.rec.Length); at++ {
			missing = missing || !m.fs.resident("", at)
		}
		if !missing && !r.maybe {
			t.Fatalf("read now %v [%d, %d): would block, and all is there", r.loc, off, off+len(p))
		}
	case err != nil:
		if !r.maybe || !errors.Is(err, ErrCorrupt) {
			t.Fatalf("read now %v: %v", r.loc, err)
		}
	case !bytes.Equal(p, r.payload[off:off+len(p)]):
		t.Fatalf("read now %v [%d, %d): wrong bytes", r.loc, off, off+len(p))
	}
}

// forgetPages puts other pages into memory.
func (m *machine) forgetPages() {
	salt := m.rng.Uint64()
	density := m.rng.Uint64() % 5
	m.fs.resident = func(_ string, off int64) bool {
		return (uint64(off)/4096*0x9e3779b97f4a7c15^salt)>>40%4 < density
	}
	if m.rng.IntN(60) == 0 {
		m.fs.resident = nil
	}
}

// scrub walks all records; those that it calls bad were damaged, and those that it does not are right.
func (m *machine) scrub(t *rapid.T) {
	m.forgetPages()
	bad := make(map[Loc]Record)
	if err := m.s.Scrub(context.Background(), func(int) {}, func(r Record, loc Loc) {
		bad[makeLoc(loc.Segment(), loc.off(), 0)] = r
	}); err != nil {
		t.Fatal(err)
	}
	for _, r := range m.known() {
		at := makeLoc(r.loc.Segment(), r.loc.off(), 0)
		rec, isBad := bad[at]
		rec.File = r.rec.File // which no header tells
		delete(bad, at)
		if isBad && (!r.maybe || r.freed || rec.Length != 0 && rec != r.rec) {
			t.Fatalf("scrub says that %v is bad (freed %v): %+v, want %+v", r.loc, r.freed, rec, r.rec)
		}
		if isBad {
			if err := m.s.ReadAt(r.loc, r.rec.Length, make([]byte, r.rec.Length), 0); !errors.Is(err, ErrCorrupt) {
				t.Fatalf("%v is bad, and was read: %v", r.loc, err)
			}
			m.s.Free(r.loc)
			r.freed = true
			continue
		}
		if !r.freed {
			if err := m.s.ReadAt(r.loc, r.rec.Length, make([]byte, r.rec.Length), 0); err != nil {
				t.Fatalf("%v was scrubbed, and is bad: %v", r.loc, err)
			}
		}
	}
	if len(bad) > 0 {
		t.Fatalf("scrub found bad what nobody knows: %v", bad)
	}
}

// resize changes both bounds, and what others hold of the shared one.
func (m *machine) resize(t *rapid.T) {
	m.o.MaxBytes = int64(rapid.SampledFrom([]int{0, 200 << 10, 2 << 20}).Draw(t, "max bytes"))
	m.s.SetMaxBytes(m.o.MaxBytes)
	m.budget.SetLimit(int64(rapid.SampledFrom([]int{0, 300 << 10, 3 << 20}).Draw(t, "limit")))
	n := int64(rapid.IntRange(0, 300<<10).Draw(t, "foreign"))
	m.budget.Give(m.foreign)
	if m.foreign = 0; m.budget.TryTake(n) {
		m.foreign = n
	} else if m.budget.Used()+n <= m.budget.Limit() {
		t.Fatalf("%d bytes refused at %d of %d", n, m.budget.Used(), m.budget.Limit())
	}
}

func (m *machine) free(t *rapid.T) {
	r := m.pick(t)
	m.s.Free(r.loc)
	m.s.Free(r.loc)
	r.freed = true
}

func (m *machine) sync(t *rapid.T) {
	err := m.s.Sync()
	for tries := 0; err != nil && m.late && tries < 3; tries++ {
		err = m.s.Sync()
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range m.known() {
		r.synced = true
	}
}

// failSync has Sync fail, and waits for what the store was sealing meanwhile. Its error may come with a later Sync.
func (m *machine) failSync(fault func(error)) {
	fault(syscall.EIO)
	_ = m.s.Sync()
	fault(nil)
	_ = m.s.Sync()
	m.late = true
}

// syncFails shows that a failed commit promises nothing and breaks nothing, and that after a failed fsync the segment
// is gone, or had nothing to write.
func (m *machine) syncFails(t *rapid.T) {
	if rapid.Bool().Draw(t, "index") {
		m.failSync(func(err error) {
			m.idx.mu.Lock()
			defer m.idx.mu.Unlock()
			m.idx.fail = err
		})
		return
	}
	if m.hung {
		t.Skip("an append hangs")
	}
	m.failSync(func(err error) {
		m.fs.setFault(func(op, _ string, _ int64) error {
			if op == "sync" {
				return err
			}
			return nil
		})
	})
	for _, r := range m.known() {
		if r.loc != 0 && m.s.segment(r.loc.Segment()) == nil {
			m.forget(t, r.loc.Segment(), nil)
		}
	}
}

func (m *machine) drop(t *rapid.T) {
	infos := m.s.Segments()
	if len(infos) == 0 || m.hung {
		t.Skip("no segment to drop")
	}
	info := infos[rapid.IntRange(0, len(infos)-1).Draw(t, "segment")]
	died := make(map[Loc]Record)
	m.s.visitLive(m.s.segment(info.ID), func(r Record, loc Loc) { died[loc] = r })
	freed, err := m.s.DropSegment(info.ID)
	if err != nil || freed != info.Bytes {
		t.Fatalf("freed %d of %d: %v", freed, info.Bytes, err)
	}
	m.forget(t, info.ID, died)
}

// condense drops a segment but for what the spare bytes hold of it.
func (m *machine) condense(t *rapid.T) {
	infos := m.s.Segments()
	if len(infos) == 0 || m.hung {
		t.Skip("no segment to condense")
	}
	info := infos[rapid.IntRange(0, len(infos)-1).Draw(t, "segment")]
	spare := int64(rapid.IntRange(0, int(info.Bytes)).Draw(t, "spare"))
	size := func(loc Loc, r Record) int64 { return alignUp(int64(loc.gap()+r.Length), unit) }
	first := func(r Record) bool { return r.KeyHash[0]%2 == 0 }
	byLoc := map[Loc]*modelRecord{}
	for _, r := range m.known() {
		byLoc[r.loc] = r
	}
	used, left := m.s.Used(), spare
	var largest int64 // of the moved records that are not of the first
	freed, err := m.s.Condense(info.ID, spare, func(r Record, _ Loc) bool { return first(r) }, func(from, to Loc) {
		r := byLoc[from]
		if r == nil || r.freed || to.Segment() == info.ID {
			t.Fatalf("%v moved to %v", from, to)
		}
		if r.loc, r.synced = to, false; !first(r.rec) {
			largest = max(largest, size(to, r.rec))
		}
		left -= size(to, r.rec)
	})
	if err != nil || left < 0 || freed < info.Bytes-spare || m.s.Used() > used-freed+segHeaderLen {
		t.Fatalf("freed %d of %d bytes, spare %d, %d left: %v", freed, info.Bytes, spare, left, err)
	}
	for _, r := range byLoc {
		if n := size(r.loc, r.rec); r.loc.Segment() == info.ID && !r.freed && !r.maybe &&
			(n <= left-segHeaderLen || first(r.rec) && n <= largest) {
			t.Fatalf("%d bytes of %d spare were left, and a record of %d was dropped; others of up to %d were not",
				left, spare, n, largest)
		}
	}
	m.used = m.s.Used()
	m.forget(t, info.ID, nil)
}

// forget removes the records of a segment from the model and compares them with those reported.
func (m *machine) forget(t *rapid.T, id uint32, died map[Loc]Record) {
	for _, r := range m.known() {
		if r.loc.Segment() != id {
			continue
		}
		rec, ok := died[r.loc]
		rec.File = r.rec.File // which no header tells
		if died != nil && ok == r.freed && !r.maybe {
			t.Fatalf("%v: reported %v, freed %v", r.loc, ok, r.freed)
		}
		if ok && rec != r.rec && !r.maybe {
			t.Fatalf("%v died as %+v", r.loc, rec)
		}
		if err := m.s.ReadAt(r.loc, r.rec.Length, make([]byte, 1), 0); !errors.Is(err, ErrGone) {
			t.Fatalf("%v: %v after its segment was dropped", r.loc, err)
		}
		r.loc = 0
	}
}

func (m *machine) reclaim(t *rapid.T) {
	if m.hung {
		t.Skip("an append hangs")
	}
	before := m.s.Segments()
	freed, err := m.s.Reclaim()
	if err != nil {
		t.Fatal(err)
	}
	var want int64
	for _, info := range before {
		live := 0
		for _, r := range m.known() {
			if r.loc.Segment() == info.ID && !r.freed {
				live++
			}
		}
		if live == 0 && info.Bytes > segHeaderLen {
			want += info.Bytes
			m.forget(t, info.ID, nil)
		}
	}
	if freed != want {
		t.Fatalf("reclaimed %d bytes, want %d", freed, want)
	}
}

func (m *machine) close(t *rapid.T) {
	if m.hung {
		t.Skip("an append hangs")
	}
	if err := m.s.Close(); err != nil {
		t.Fatal(err)
	}
	for _, r := range m.known() {
		r.synced = true
	}
	if m.budget.Used() != m.foreign {
		t.Fatalf("closed, and %d bytes of the budget are taken, want %d", m.budget.Used(), m.foreign)
	}
	m.s = nil
	m.reopen(t)
}

// abandon ends the store as kill -9 would, but for its goroutine.
func (m *machine) abandon() {
	if m.s != nil {
		close(m.s.sealC)
		m.s.sealer.Wait()
		m.s = nil
	}
}

func (m *machine) kill(t *rapid.T) {
	m.abandon()
	m.reopen(t)
}

func (m *machine) power(t *rapid.T) {
	m.abandon()
	m.fs.powerFailure(m.rng)
	for _, r := range m.known() {
		if !r.synced {
			r.maybe = true
		}
	}
	m.reopen(t)
}

// damage flips a byte or cuts a file while the store is down.
func (m *machine) damage(t *rapid.T) {
	names := m.fs.names()
	if len(names) == 0 {
		t.Skip("no file")
	}
	m.abandon()
	name := names[rapid.IntRange(0, len(names)-1).Draw(t, "file")]
	d := m.fs.files[name]
	if len(d.data) == 0 {
		m.reopen(t)
		return
	}
	at := rapid.IntRange(0, len(d.data)-1).Draw(t, "at")
	cut := rapid.Bool().Draw(t, "cut")
	if cut {
		d.data = d.data[:at:at]
	} else {
		d.data[at] ^= byte(rapid.IntRange(1, 255).Draw(t, "flip"))
	}
	for _, r := range m.known() {
		from := r.loc.off()
		to := from + int64(r.loc.gap()+r.rec.Length)
		if name != fmt.Sprintf("/segments/%08d.seg", r.loc.Segment()) {
			continue
		}
		if at < segHeaderLen || int64(at) < to && (cut || int64(at) >= from) {
			r.maybe = true
		}
	}
	m.reopen(t)
}

// loseIndex drops the index, or damages a table in it.
func (m *machine) loseIndex(t *rapid.T) {
	m.abandon()
	if rapid.Bool().Draw(t, "all") {
		m.idx.segs = nil
	} else {
		for id, c := range m.idx.segs {
			if len(c.table) > 0 && m.rng.IntN(2) == 0 {
				c.table[m.rng.IntN(len(c.table))] ^= 1
				m.idx.segs[id] = c
			}
		}
	}
	m.reopen(t)
}

func (m *machine) reopen(t *rapid.T) {
	m.hung = false
	before := make(map[*modelRecord]bool)
	for _, r := range m.known() {
		before[r] = true
		r.loc, r.freed = 0, false
	}
	var last Loc
	if m.s != nil {
		t.Fatal("the store is open")
	}
	// The process is a new one, and so is its budget.
	limit := m.budget.Limit()
	m.budget = NewBudget(limit)
	m.budget.Take(m.foreign)
	m.o.Budget = m.budget
	s, err := Open("/segments", m.o, func(x Extent, loc Loc) {
		id := slices.IndexFunc(m.recs, func(r *modelRecord) bool { return x.ID == r.known.ID })
		if id < 0 {
			t.Fatalf("%v: nobody wrote %+v", loc, x)
		}
		r := m.recs[id]
		if x.File == NoFile { // scanned
			x.File = r.known.File
		}
		if x != r.known {
			t.Fatalf("%v: %+v, want %+v", loc, x, r.known)
		}
		if !before[r] && !r.unacked && !r.maybe {
			t.Fatalf("%v: record %d was dropped", loc, id)
		}
		if loc <= last {
			t.Fatalf("%v visited after %v", loc, last)
		}
		last = loc
		if r.unacked {
			r.maybe = true
		}
		r.loc = loc
	})
	if err != nil {
		t.Fatal(err)
	}
	m.s = s
	for r := range before {
		if r.loc == 0 && !r.maybe {
			t.Fatalf("record %d of %d bytes is lost", binary.LittleEndian.Uint32(r.rec.KeyHash[:]), r.rec.Length)
		}
	}
	// The whole of every record, so that what was found right later is not what is on the disk by
	// chance.
	for _, r := range m.known() {
		m.checkRead(t, r, make([]byte, r.rec.Length), 0)
	}
}

// check compares the accounts with the model.
func (m *machine) check(t *rapid.T) {
	st := m.s.Stats()
	if got := m.budget.Used() - m.foreign; got != st.UsedBytes {
		t.Fatalf("uses %d bytes, took %d", st.UsedBytes, got)
	}
	if over := m.o.MaxBytes > 0 && st.UsedBytes > m.o.MaxBytes; over && st.UsedBytes > m.used {
		t.Fatalf("grew from %d to %d of %d bytes", m.used, st.UsedBytes, m.o.MaxBytes)
	}
	if limit := m.budget.Limit(); limit > 0 && m.budget.Used() > limit && st.UsedBytes > m.used {
		t.Fatalf("grew from %d to %d; budget %d of %d bytes", m.used, st.UsedBytes, m.budget.Used(), limit)
	}
	m.used = st.UsedBytes
	var used, live int64
	records := 0
	for _, r := range m.known() {
		if !r.freed {
			records++
			live += alignUp(int64(r.loc.gap()+r.rec.Length), unit)
		}
	}
	for _, info := range m.s.Segments() {
		used += info.Bytes
		if info.Garbage < 0 {
			t.Fatalf("segment %d has %d bytes of garbage", info.ID, info.Garbage)
		}
	}
	if st.UsedBytes != used || st.LiveBytes != live || st.Records != records {
		t.Fatalf("stats %+v, want %d used, %d live bytes, %d records", st, used, live, records)
	}
}

func TestStoreModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := &machine{fs: newMemFS(), idx: &mapIndex{}, rng: rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 1))}
		m.o = Options{
			SegmentSize: int64(rapid.SampledFrom([]int{segHeaderLen, 4 << 10, 100 << 10, 4 << 20}).Draw(t,
				"segment size")),
			MaxBytes: int64(rapid.SampledFrom([]int{0, 200 << 10, 2 << 20}).Draw(t, "max bytes")),
			FS:       m.fs, Index: m.idx, Logger: quiet(),
		}
		if rapid.IntRange(0, 3).Draw(t, "encrypted") == 3 {
			m.o.Key = testKey
		}
		m.budget = NewBudget(int64(rapid.SampledFrom([]int{0, 300 << 10, 3 << 20}).Draw(t, "limit")))
		m.reopen(t)
		defer m.abandon()
		t.Repeat(map[string]func(*rapid.T){
			"append":       m.append,
			"append more":  m.append,
			"append fails": m.appendFails,
			"hang":         m.hang,
			"read":         m.read,
			"read now":     m.readNow,
			"scrub":        m.scrub,
			"resize":       m.resize,
			"free":         m.free,
			"sync":         m.sync,
			"sync fails":   m.syncFails,
			"drop":         m.drop,
			"condense":     m.condense,
			"reclaim":      m.reclaim,
			"close":        m.close,
			"kill":         m.kill,
			"power":        m.power,
			"damage":       m.damage,
			"lose index":   m.loseIndex,
			"":             m.check,
		})
	})
}
