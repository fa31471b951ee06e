package segment

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"go.uber.org/goleak"

	"github.com/shoalfs/shoal/cache/crypt"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// small returns the record and payload number i.
func small(i, length int) (Record, []byte) {
	r := Record{Dataset: [16]byte{7}, ETag: fmt.Sprintf("tag%d", i), ObjectSize: int64(length), Length: length}
	binary.LittleEndian.PutUint32(r.KeyHash[:], uint32(i))
	p := make([]byte, length)
	rng := rand.New(rand.NewPCG(uint64(i), 1))
	for j := range p {
		p[j] = byte(rng.Uint32())
	}
	return r, p
}

// same reports whether what Open says of a record is right; where it has scanned, it does not know the file.
func same(x Extent, r Record) bool {
	want := r.extent()
	if x.File == NoFile {
		want.File = NoFile
	}
	return x == want
}

// numberOf returns the number of the record that small made, of less than a thousand.
func numberOf(t testing.TB, x Extent) int {
	t.Helper()
	for i := range 1000 {
		r := Record{ETag: fmt.Sprintf("tag%d", i), ObjectSize: int64(x.Length)}
		binary.LittleEndian.PutUint32(r.KeyHash[:], uint32(i))
		if IDOf(r.KeyHash, r.ObjectSize, r.ETag) == x.ID {
			return i
		}
	}
	t.Fatalf("nobody wrote %+v", x)
	return 0
}

func mustAppend(t testing.TB, s *Store, i, length int) (Loc, []byte) {
	t.Helper()
	r, p := small(i, length)
	loc, err := s.Append(r, p)
	if err != nil {
		t.Fatal(err)
	}
	return loc, p
}

func mustOpen(t testing.TB, dir string, o Options, visit func(Extent, Loc)) *Store {
	t.Helper()
	if o.Logger == nil {
		o.Logger = quiet()
	}
	s, err := Open(dir, o, visit)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func mustClose(t testing.TB, s *Store) {
	t.Helper()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestOnDisk goes through the real file system: several segments, a reopening, a drop.
func TestOnDisk(t *testing.T) {
	dir, idx := filepath.Join(t.TempDir(), "segments"), &mapIndex{}
	o := Options{SegmentSize: 1 << 20, Index: idx}
	s := mustOpen(t, dir, o, nil)
	locs := make(map[Loc][]byte)
	for i := range 50 {
		loc, p := mustAppend(t, s, i, 100_000+i)
		locs[loc] = p
	}
	mustClose(t, s)
	mustClose(t, s)
	if _, err := s.Append(small(1, 1)); !errors.Is(err, ErrClosed) {
		t.Error(err)
	}
	if err := s.Sync(); !errors.Is(err, ErrClosed) {
		t.Error(err)
	}
	for loc, p := range locs {
		if err := s.ReadAt(loc, len(p), make([]byte, 1), 0); !errors.Is(err, ErrGone) {
			t.Error("a closed store reads:", err)
		}
	}

	seen := 0
	s = mustOpen(t, dir, o, func(x Extent, loc Loc) {
		seen++
		if want, _ := small(numberOf(t, x), x.Length); !same(x, want) || len(locs[loc]) != x.Length {
			t.Errorf("%v: %+v", loc, x)
		}
	})
	defer mustClose(t, s)
	st := s.Stats()
	if seen != 50 || st.Records != 50 || st.Segments != 5 || st.Recovery != (Recovery{}) {
		t.Fatalf("%d records, %+v", seen, st)
	}
	files, _ := filepath.Glob(filepath.Join(dir, "*.seg"))
	var onDisk int64
	for _, f := range files {
		info, err := os.Stat(f)
		if err != nil {
			t.Fatal(err)
		}
		onDisk += alignUp(info.Size(), unit)
	}
	if len(files) != 5 || onDisk != s.Used() {
		t.Errorf("%d files of %d bytes, used %d", len(files), onDisk, s.Used())
	}
	for round := range 2 {
		for loc, want := range locs {
			p := make([]byte, len(want))
			if err := s.ReadAt(loc, len(want), p, 0); err != nil || !bytes.Equal(p, want) {
				t.Fatalf("%v: %v", loc, err)
			}
		}
		if got, want := s.Stats().Checks, int64(50*(round+1)); got != want {
			t.Errorf("%d reads had %d checks", want, got)
		}
	}
	died := 0
	s.visitLive(s.segment(2), func(r Record, loc Loc) {
		died++
		if loc.Segment() != 2 || len(locs[loc]) != r.Length {
			t.Errorf("%v died: %+v", loc, r)
		}
	})
	freed, err := s.DropSegment(2)
	if err != nil || died != 10 || freed < 1_000_000 {
		t.Fatalf("%d died, %d bytes freed: %v", died, freed, err)
	}
	if _, err := os.Stat(filepath.Join(dir, "00000002.seg")); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
	if freed, err := s.DropSegment(2); freed != 0 || err != nil {
		t.Error(freed, err)
	}
}

// TestReadParts reads parts of a long payload: blocks are checked when they are first touched, and whenever half of
// their bytes are read.
func TestReadParts(t *testing.T) {
	s := mustOpen(t, "/s", Options{FS: newMemFS()}, nil)
	defer mustClose(t, s)
	loc, want := mustAppend(t, s, 1, 3*BlockSize+77)
	for _, r := range []struct{ off, n, checks int }{
		{10, 5, 1}, {0, BlockSize, 2}, {BlockSize - 1, 2, 3}, {BlockSize, BlockSize, 4}, {3 * BlockSize, 77, 5},
		{3*BlockSize + 70, 7, 5}, {0, len(want), 6}, {0, len(want), 7}, {5, 0, 7}, {1, BlockSize / 2, 8},
		{1, BlockSize/2 - 1, 8},
	} {
		p := make([]byte, r.n)
		if err := s.ReadAt(loc, len(want), p, int64(r.off)); err != nil || !bytes.Equal(p, want[r.off:r.off+r.n]) {
			t.Errorf("[%d, %d): %v", r.off, r.off+r.n, err)
		}
		if got := s.Stats().Checks; got != int64(r.checks) {
			t.Errorf("[%d, %d): %d checks so far, want %d", r.off, r.off+r.n, got, r.checks)
		}
	}
	for _, r := range []struct{ length, off, n int }{{len(want), -1, 1}, {len(want), len(want), 1},
		{len(want), 1, len(want)}} {
		if err := s.ReadAt(loc, r.length, make([]byte, r.n), int64(r.off)); err == nil || errors.Is(err, ErrCorrupt) {
			t.Errorf("%+v: %v", r, err)
		}
	}
	for _, bad := range []Loc{0, loc + 1<<gapBits, 1 << 62} {
		if err := s.ReadAt(bad, 10, make([]byte, 1), 0); !errors.Is(err, ErrGone) {
			t.Errorf("%v: %v", bad, err)
		}
	}
}

func TestAppendRefuses(t *testing.T) {
	s := mustOpen(t, "/s", Options{FS: newMemFS()}, nil)
	defer mustClose(t, s)
	ok, p := small(1, 10)
	for name, change := range map[string]func(*Record){
		"empty":    func(r *Record) { r.Length = 0 },
		"long":     func(r *Record) { r.Length = ExtentSize + 1 },
		"offset":   func(r *Record) { r.Offset = -1 },
		"beyond":   func(r *Record) { r.Offset = 1 },
		"overflow": func(r *Record) { r.Offset = 1<<63 - 5; r.ObjectSize = 1<<63 - 1 },
		"ETag":     func(r *Record) { r.ETag = strings.Repeat("x", MaxETag+1) },
	} {
		r := ok
		change(&r)
		if _, err := s.Append(r, p[:min(len(p), max(r.Length, 0))]); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	if _, err := s.Append(ok, p[:5]); err == nil {
		t.Error("a payload of another length was accepted")
	}
	if s.Used() != 0 {
		t.Errorf("used %d", s.Used())
	}
}

// TestMaxBytes fills a store to the byte, and again after a segment was dropped.
func TestMaxBytes(t *testing.T) {
	s := mustOpen(t, "/s", Options{FS: newMemFS(), SegmentSize: 10_000, MaxBytes: 50_000}, nil)
	defer mustClose(t, s)
	fill := func() (n int) {
		for ; ; n++ {
			_, err := s.Append(small(n, 1000))
			if errors.Is(err, ErrFull) {
				return n
			}
			if err != nil {
				t.Fatal(err)
			}
			if s.Used() > 50_000 {
				t.Fatalf("used %d", s.Used())
			}
		}
	}
	first := fill()
	if first < 40 {
		t.Errorf("%d records, %+v", first, s.Stats())
	}
	var most SegmentInfo
	for i, info := range s.Segments() {
		if i == 1 {
			most = info
		}
	}
	if _, err := s.DropSegment(most.ID); err != nil {
		t.Fatal(err)
	}
	if again := fill(); again < most.Records-1 {
		t.Errorf("%d records fit in the space of %d", again, most.Records)
	}
}

// TestFormat holds version 1 still, byte by byte.
func TestFormat(t *testing.T) {
	r := Record{ETag: "abcde", ObjectSize: 1 << 40, Offset: 4 << 20, Length: BlockSize + 3, File: NoFile}
	for i := range 16 {
		r.Dataset[i], r.KeyHash[i] = byte(i), byte(0xf0+i)
	}
	payload := bytes.Repeat([]byte{0xa5}, r.Length)
	h := appendHeader(nil, &r, payload, 0x1122334455667788, 0x40, 128)
	want := "53485243 0100 0000 70000000 1e8ee6ba 8877665544332211 4000000000000000" +
		" 000102030405060708090a0b0c0d0e0f f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff" +
		" 0000000000010000 0000400000000000 03000200 80000000 05000000 00000000" +
		" 6162636465000000 1d9850ce a358427f"
	if got := fmt.Sprintf("%x", h); got != strings.ReplaceAll(want, " ", "") {
		t.Errorf("record header\ngot  %s\nwant %s", got, strings.ReplaceAll(want, " ", ""))
	}
	got, err := parseHeader(h, 0x1122334455667788, 0x40, 1<<30)
	if err != nil || mustRecord(&got) != r || got.gap != 128 || !got.checkBlocks(0, payload) ||
		!got.checkBlocks(1, payload[BlockSize:]) || got.checkBlocks(0, payload[1:]) ||
		!got.checkBlocks(0, payload[:7], nil, payload[7:BlockSize+1], payload[BlockSize+1:]) {
		t.Errorf("%+v, %v", got, err)
	}
	seg := appendSegmentHeader(nil, 3, 0x1122334455667788)
	wantSeg := "53484f414c534547 01000000 03000000 8877665544332211" + strings.Repeat("00", 36) + "7a7b998c"
	if got := fmt.Sprintf("%x", seg); got != strings.ReplaceAll(wantSeg, " ", "") {
		t.Errorf("segment header\ngot  %s\nwant %s", got, strings.ReplaceAll(wantSeg, " ", ""))
	}
}

func TestNewerFormat(t *testing.T) {
	fsys := newMemFS()
	s := mustOpen(t, "/s", Options{FS: fsys}, nil)
	mustAppend(t, s, 1, 100)
	mustClose(t, s)
	d := fsys.files["/s/00000001.seg"].data
	d[8] = 2
	h := appendSegmentHeader(nil, 1, binary.LittleEndian.Uint64(d[16:]))
	h[8] = 2
	binary.LittleEndian.PutUint32(h[60:], crc(h[:60]))
	copy(d, h)
	before := bytes.Clone(d)
	_, err := Open("/s", Options{FS: fsys, Logger: quiet()}, nil)
	if !errors.Is(err, ErrNewerFormat) || !strings.Contains(err.Error(), "00000001.seg") ||
		!strings.Contains(err.Error(), "--cache-dir") {
		t.Fatal(err)
	}
	if !bytes.Equal(fsys.files["/s/00000001.seg"].data, before) {
		t.Error("a newer segment was changed")
	}
}

// TestCutSegment opens a store whose committed segment lost its end.
func TestCutSegment(t *testing.T) {
	fsys, idx := newMemFS(), &mapIndex{}
	o := Options{FS: fsys, Index: idx, Logger: quiet()}
	s := mustOpen(t, "/s", o, nil)
	var locs []Loc
	for i := range 4 {
		loc, _ := mustAppend(t, s, i, 1000)
		locs = append(locs, loc)
	}
	mustClose(t, s)
	d := fsys.files["/s/00000001.seg"]
	d.data = d.data[:locs[2].off()+500]
	seen := 0
	s = mustOpen(t, "/s", o, func(Extent, Loc) { seen++ })
	defer mustClose(t, s)
	if st := s.Stats(); seen != 2 || st.Recovery.Lost != 2 || st.Recovery.TornBytes != 500 || st.Records != 2 {
		t.Errorf("%d records, %+v", seen, st)
	}
	if loc, _ := mustAppend(t, s, 9, 1000); loc != locs[2] {
		t.Errorf("the next record lies at %v, want %v", loc, locs[2])
	}
}

// A voided record is not there after a restart, nor after a kill, in whatever segment it was. The others are.
func TestVoid(t *testing.T) {
	for _, key := range []*crypt.Key{nil, testKey} {
		for _, killed := range []bool{false, true} {
			o := Options{FS: newMemFS(), Index: &mapIndex{}, Key: key, SegmentSize: 10_000, Logger: quiet()}
			s := mustOpen(t, "/s", o, nil)
			for i := range 10 {
				mustAppend(t, s, i, 3000)
			}
			mustClose(t, s)
			locs := map[int]Loc{}
			s = mustOpen(t, "/s", o, func(x Extent, loc Loc) { locs[numberOf(t, x)] = loc })
			for _, i := range []int{0, 4, 5, 9, 5} {
				if err := s.Void(locs[i]); err != nil {
					t.Error(err)
				}
			}
			mustAppend(t, s, 10, 3000)
			if !killed {
				mustClose(t, s)
			}
			for range 2 {
				var got []int
				next := mustOpen(t, "/s", o, func(x Extent, _ Loc) { got = append(got, numberOf(t, x)) })
				if want := []int{1, 2, 3, 6, 7, 8, 10}; !slices.Equal(got, want) {
					t.Errorf("key %v, killed %v: %v, want %v", key != nil, killed, got, want)
				}
				mustClose(t, next)
			}
			last := Loc(0)
			next := mustOpen(t, "/s", o, func(_ Extent, loc Loc) { last = loc })
			if err := next.Void(last); err != nil {
				t.Error(err)
			}
			mustClose(t, next)
			if r, err := Check("/s", CheckOptions{FS: o.FS, Index: o.Index, Key: key}); err != nil || r.Damage() != 0 ||
				r.TornTails != 0 {
				t.Errorf("key %v: the last record was given up, and that is damage: %+v, %v", key != nil, r, err)
			}
			if killed {
				mustClose(t, s)
			}
		}
	}
}

// The first pages of a segment are lost: what lies behind them is not, as the table tells where it is; encrypted or
// not, and though a cached file looks like a segment.
func TestZeroedStart(t *testing.T) {
	for _, key := range []*crypt.Key{nil, testKey} {
		fsys, idx := newMemFS(), &mapIndex{}
		o := Options{FS: fsys, Index: idx, Key: key, Logger: quiet()}
		s := mustOpen(t, "/s", o, nil)
		want := map[int][]byte{}
		for i := range 6 {
			_, want[i] = mustAppend(t, s, i, 3000)
		}
		other, p := small(6, len(fsys.files["/s/00000001.seg"].data))
		copy(p, fsys.files["/s/00000001.seg"].data)
		if _, err := s.Append(other, p); err != nil {
			t.Fatal(err)
		}
		want[6] = p
		mustClose(t, s)
		clear(fsys.files["/s/00000001.seg"].data[:4096])
		for range 2 { // the header has been mended then
			got := 0
			var locs []Loc
			var lengths, numbers []int
			s = mustOpen(t, "/s", o, func(x Extent, loc Loc) {
				locs, lengths = append(locs, loc), append(lengths, x.Length)
				if x.Length == 3000 {
					numbers = append(numbers, numberOf(t, x))
				} else {
					numbers = append(numbers, 6)
				}
			})
			for i, loc := range locs {
				p := make([]byte, lengths[i])
				if err := s.ReadAt(loc, len(p), p, 0); err == nil && !bytes.Equal(p, want[numbers[i]]) {
					t.Errorf("key %v: record %d: other bytes", key != nil, numbers[i])
				} else if err == nil {
					got++
				}
			}
			if got != 5 { // the first two records began in what was lost
				t.Errorf("key %v: %d records of 7 are left", key != nil, got)
			}
			mustClose(t, s)
		}
	}
}

// TestScanResumesBehindHole has appends that never ended between others that did.
func TestScanResumesBehindHole(t *testing.T) {
	fsys := newMemFS()
	m := &Options{FS: fsys, Logger: quiet()}
	s := mustOpen(t, "/s", *m, nil)
	mustAppend(t, s, 0, 5000)
	hole, _ := small(100, 3*scanChunk) // longer than what a search reads at once
	if _, _, err := s.leave(hole); err != nil {
		t.Fatal(err)
	}
	mustAppend(t, s, 1, 5000)
	// This one has all of its payload, but no header; and its payload is a copy of the segment.
	copyOf, _ := small(101, len(fsys.files["/s/00000001.seg"].data))
	g, e, err := s.leave(copyOf)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := g.f.WriteAt(fsys.files["/s/00000001.seg"].data, e.off+int64(e.gap)); err != nil {
		t.Fatal(err)
	}
	mustAppend(t, s, 2, 5000)
	if _, _, err := s.leave(hole); err != nil { // and a torn tail
		t.Fatal(err)
	}
	if _, err := g.f.WriteAt(make([]byte, 10_000), s.active.end-20_000); err != nil {
		t.Fatal(err)
	}
	close(s.sealC)
	s.sealer.Wait()

	var got []int
	s = mustOpen(t, "/s", *m, func(x Extent, _ Loc) { got = append(got, numberOf(t, x)) })
	defer mustClose(t, s)
	st := s.Stats()
	if fmt.Sprint(got) != "[0 1 2]" || st.Recovery.Holes != 2 || st.Recovery.Scanned != 3 ||
		st.Recovery.TornBytes == 0 {
		t.Fatalf("%v, %+v", got, st)
	}
	if info := s.Segments()[0]; info.Garbage < 3*scanChunk {
		t.Errorf("garbage %d", info.Garbage)
	}
	if int64(len(fsys.files["/s/00000001.seg"].data)) > s.Used() {
		t.Error("the torn tail was not cut")
	}
}

// TestFullDisk shows that a write that fails in the middle of others costs only its own record.
func TestFullDisk(t *testing.T) {
	fsys := newMemFS()
	s := mustOpen(t, "/s", Options{FS: fsys, Logger: quiet()}, nil)
	var writes atomic.Uint32
	fsys.setFault(func(op, _ string, _ int64) error {
		// A third of them, but not every third: an append that fails is three writes, too.
		if op == "write" && writes.Add(1)*0x9e3779b1>>16%3 == 0 {
			return syscall.ENOSPC
		}
		return nil
	})
	var mu sync.Mutex
	locs := make(map[Loc][]byte)
	failed := 0
	var wg sync.WaitGroup
	for w := range 8 {
		wg.Go(func() {
			for i := range 50 {
				r, p := small(w*50+i, 100+50*i)
				loc, err := s.Append(r, p)
				mu.Lock()
				if err == nil {
					locs[loc] = p
				} else if errors.Is(err, syscall.ENOSPC) {
					failed++
				} else {
					t.Error(err)
				}
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	fsys.setFault(nil)
	if failed == 0 || len(locs) == 0 || failed+len(locs) != 400 {
		t.Fatalf("%d failed, %d did not", failed, len(locs))
	}
	check := func() {
		t.Helper()
		if st := s.Stats(); st.Records != len(locs) {
			t.Fatalf("%d records, want %d", st.Records, len(locs))
		}
		for loc, want := range locs {
			p := make([]byte, len(want))
			if err := s.ReadAt(loc, len(want), p, 0); err != nil || !bytes.Equal(p, want) {
				t.Fatalf("%v: %v", loc, err)
			}
		}
	}
	check()
	mustClose(t, s)
	seen := 0
	s = mustOpen(t, "/s", Options{FS: fsys}, func(_ Extent, loc Loc) {
		if locs[loc] == nil {
			t.Errorf("%v was never written", loc)
		}
		seen++
	})
	defer mustClose(t, s)
	check()
}

// A file that was made, not written, and not removed is not in the way of the next.
func TestFailedCreation(t *testing.T) {
	fsys := newMemFS()
	s := mustOpen(t, "/s", Options{FS: fsys, Logger: quiet()}, nil)
	fsys.setFault(func(op, _ string, _ int64) error {
		if op == "write" || op == "remove" {
			return syscall.EIO
		}
		return nil
	})
	if _, err := s.Append(small(1, 10)); !errors.Is(err, syscall.EIO) {
		t.Error(err)
	}
	fsys.setFault(nil)
	mustAppend(t, s, 1, 10)
	mustClose(t, s)
}

// A store that cannot write what it has says so when it is closed.
func TestFsyncFailsAtClose(t *testing.T) {
	fsys, budget := newMemFS(), NewBudget(0)
	s := mustOpen(t, "/s", Options{FS: fsys, Budget: budget, Logger: quiet()}, nil)
	mustAppend(t, s, 1, 10)
	fsys.setFault(func(op, _ string, _ int64) error {
		if op == "sync" {
			return syscall.EIO
		}
		return nil
	})
	if err := s.Close(); !errors.Is(err, syscall.EIO) || budget.Used() != 0 {
		t.Error(err, budget.Used())
	}
}

// A segment that is dropped while its fsync fails goes once.
func TestDropBesideAFailedFsync(t *testing.T) {
	fsys, budget := newMemFS(), NewBudget(0)
	s := mustOpen(t, "/s", Options{FS: fsys, Budget: budget, Logger: quiet()}, nil)
	mustAppend(t, s, 1, 10)
	g, syncs, fails := s.segment(1), make(chan struct{}), make(chan struct{})
	fsys.setFault(func(op, _ string, _ int64) error {
		if op != "sync" {
			return nil
		}
		close(syncs)
		<-fails
		return syscall.EIO
	})
	synced, dropped := make(chan error), make(chan error)
	go func() { synced <- s.Sync() }()
	<-syncs
	go func() { _, err := s.DropSegment(1); dropped <- err }()
	for waits := false; !waits; {
		s.mu.Lock()
		waits = g.dropped
		s.mu.Unlock()
	}
	close(fails)
	if err := <-synced; !errors.Is(err, syscall.EIO) {
		t.Error(err)
	}
	if err := <-dropped; err != nil || s.Used() != 0 || budget.Used() != 0 {
		t.Error(err, s.Used(), budget.Used())
	}
	fsys.setFault(nil)
	mustClose(t, s)
}

// TestFailingDisk shows errors other than those of content.
func TestFailingDisk(t *testing.T) {
	fsys, idx := newMemFS(), &mapIndex{}
	o := Options{FS: fsys, Index: idx, Logger: quiet()}
	s := mustOpen(t, "/s", o, nil)
	loc, _ := mustAppend(t, s, 1, 1000)
	fail := func(ops string) {
		fsys.setFault(func(op, _ string, _ int64) error {
			if strings.Contains(ops, op) {
				return syscall.EIO
			}
			return nil
		})
	}
	fail("read")
	if err := s.ReadAt(loc, 1000, make([]byte, 1000), 0); !errors.Is(err, syscall.EIO) || errors.Is(err, ErrCorrupt) {
		t.Error(err)
	}
	fail("sync")
	if err := s.Sync(); !errors.Is(err, syscall.EIO) || len(idx.segs) != 0 {
		t.Error(err, len(idx.segs))
	}
	fail("")
	if err := s.ReadAt(loc, 1000, make([]byte, 1000), 0); !errors.Is(err, ErrGone) || s.Used() != 0 {
		t.Error(err, s.Used()) // what could not be written may differ
	}
	mustAppend(t, s, 1, 1000)
	fail("remove")
	if _, err := s.DropSegment(2); !errors.Is(err, syscall.EIO) {
		t.Error(err)
	}
	fail("open")
	if _, err := s.Append(small(2, 10)); !errors.Is(err, syscall.EIO) || s.Used() != 0 {
		t.Error(err, s.Used())
	}
	fail("write")
	if _, err := s.Append(small(2, 10)); !errors.Is(err, syscall.EIO) || s.Used() != 0 {
		t.Error(err, s.Used())
	}
	fail("")
	loc, p := mustAppend(t, s, 3, 1000)
	mustClose(t, s)
	fail("read")
	if _, err := Open("/s", o, nil); !errors.Is(err, syscall.EIO) {
		t.Error(err)
	}
	fail("")
	fsys.files["/s/00000005.seg"].data[loc.off()+int64(loc.gap())+5] ^= 1
	s = mustOpen(t, "/s", o, nil)
	defer mustClose(t, s)
	if err := s.ReadAt(loc, len(p), make([]byte, 1), 500); !errors.Is(err, ErrCorrupt) ||
		!strings.Contains(err.Error(), "segment 00000005") {
		t.Error(err)
	}
}

// TestConcurrent appends, reads, frees, drops and syncs at once, with real files.
func TestConcurrent(t *testing.T) {
	dir, idx := t.TempDir(), &mapIndex{}
	o := Options{SegmentSize: 256 << 10, MaxBytes: 3 << 20, Index: idx}
	s := mustOpen(t, dir, o, nil)
	type rec struct {
		loc Loc
		p   []byte
	}
	var mu sync.Mutex
	var recs []rec
	var appended atomic.Int64
	var wg sync.WaitGroup
	for w := range 4 {
		wg.Go(func() {
			for i := range 300 {
				r, p := small(w*1000+i, 1+i*97%30_000)
				loc, err := s.Append(r, p)
				if errors.Is(err, ErrFull) {
					infos := s.Segments()
					if _, err := s.DropSegment(infos[i%len(infos)].ID); err != nil {
						t.Error(err)
					}
					continue
				}
				if err != nil {
					t.Error(err)
					return
				}
				appended.Add(1)
				mu.Lock()
				recs = append(recs, rec{loc, p})
				mu.Unlock()
			}
		})
	}
	for r := range 4 {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(r), 3))
			for range 1000 {
				mu.Lock()
				if len(recs) == 0 {
					mu.Unlock()
					continue
				}
				x := recs[rng.IntN(len(recs))]
				mu.Unlock()
				off := rng.IntN(len(x.p))
				p := make([]byte, 1+rng.IntN(len(x.p)-off))
				err := s.ReadAt(x.loc, len(x.p), p, int64(off))
				if err != nil && !errors.Is(err, ErrGone) || err == nil && !bytes.Equal(p, x.p[off:off+len(p)]) {
					t.Errorf("%v: %v", x.loc, err)
				}
				if rng.IntN(50) == 0 {
					s.Free(x.loc)
				}
			}
		})
	}
	wg.Go(func() {
		for range 20 {
			if err := s.Sync(); err != nil {
				t.Error(err)
			}
			if _, err := s.Reclaim(); err != nil {
				t.Error(err)
			}
			s.Stats()
		}
	})
	wg.Wait()
	mustClose(t, s)
	if appended.Load() < 300 {
		t.Errorf("only %d appends", appended.Load())
	}
	s = mustOpen(t, dir, o, nil)
	defer mustClose(t, s)
	if st := s.Stats(); st.Recovery != (Recovery{}) {
		t.Errorf("after a clean close: %+v", st.Recovery)
	}
	for _, x := range recs {
		p := make([]byte, len(x.p))
		if err := s.ReadAt(x.loc, len(x.p), p, 0); err != nil && !errors.Is(err, ErrGone) ||
			err == nil && !bytes.Equal(p, x.p) {
			t.Errorf("%v: %v", x.loc, err)
		}
	}
}

func TestDefaultSegmentSize(t *testing.T) {
	for maxBytes, want := range map[int64]int64{
		0: 256 << 20, 1 << 20: 8 << 20, 1 << 30: 64 << 20, 20 << 30: 256 << 20, 4 << 40: 1 << 30, 1 << 60: 2 << 30,
	} {
		o := Options{MaxBytes: maxBytes}
		if err := o.setDefaults(); err != nil || o.SegmentSize != want {
			t.Errorf("for %d: %d, want %d, %v", maxBytes, o.SegmentSize, want, err)
		}
	}
	if _, err := Open(t.TempDir(), Options{SegmentSize: maxSegmentSize + 1}, nil); err == nil {
		t.Error("a segment size that no Loc can reach was accepted")
	}
}

// TestSlotsGrowInProportion counts what the memory holds of many records, appended and recovered.
func TestSlotsGrowInProportion(t *testing.T) {
	fsys := newMemFS()
	s := mustOpen(t, "/s", Options{FS: fsys}, nil)
	const n = 5000
	check := func() {
		t.Helper()
		if tab := s.active.tab.Load(); tab.n.Load() != n || len(tab.recs) > 2*n+256 || 64*len(tab.checked) > 4*n+256 {
			t.Errorf("%d records have room for %d, and %d bits", tab.n.Load(), len(tab.recs), 64*len(tab.checked))
		}
	}
	for i := range n {
		mustAppend(t, s, i, 10)
	}
	check()
	mustClose(t, s)
	s = mustOpen(t, "/s", Options{FS: fsys}, nil)
	defer mustClose(t, s)
	check()
}

// FuzzScan gives a scan hostile bytes behind a right segment header. It must end, and find only records
// that lie inside the file and do not overlap.
func FuzzScan(f *testing.F) {
	fsys := newMemFS()
	s := mustOpen(f, "/s", Options{FS: fsys}, nil)
	for i := range 5 {
		mustAppend(f, s, i, 10+200*i)
	}
	salt := s.active.salt
	mustClose(f, s)
	data := fsys.files["/s/00000001.seg"].data
	f.Add(data, uint16(0), uint32(0))
	for off := segHeaderLen; off < len(data); off += 28 {
		f.Add(data, uint16(off), uint32(1))
		f.Add(data, uint16(off), uint32(1<<31))
	}
	f.Fuzz(func(t *testing.T, data []byte, at uint16, add uint32) {
		if len(data) < segHeaderLen {
			return
		}
		data = bytes.Clone(data)
		if int(at)+4 <= len(data) {
			binary.LittleEndian.PutUint32(data[at:], binary.LittleEndian.Uint32(data[at:])+add)
		}
		// Put right what a checksum would refuse: the scan must not rely on it.
		for off := segHeaderLen; off+recHeaderLen <= len(data); off += unit {
			h := data[off:]
			if string(h[:4]) != recordMagic {
				continue
			}
			binary.LittleEndian.PutUint64(h[16:], salt)
			binary.LittleEndian.PutUint64(h[24:], uint64(off))
			if n := binary.LittleEndian.Uint32(h[8:]); n >= recHeaderLen && int(n) <= len(h) {
				copy(h[12:16], []byte{0, 0, 0, 0})
				binary.LittleEndian.PutUint32(h[12:], crc(h[:n]))
			}
		}
		next := int64(segHeaderLen)
		var entries []entry
		end, _, err := scan(bytes.NewReader(data), salt, segHeaderLen, int64(len(data)), func(off int64, h *header) {
			if off < next || off%unit != 0 || h.rec.check() != nil ||
				off+int64(h.gap)+int64(h.rec.Length) > int64(len(data)) {
				t.Fatalf("record %+v at %d, gap %d", h.rec, off, h.gap)
			}
			next = off + h.end()
			h.checkBlocks(0, data[off+int64(h.gap):][:h.rec.Length])
			entries = append(entries, entry{Extent: scanned(h), off: off, gap: h.gap})
		})
		if err != nil || end != next {
			t.Fatalf("ended at %d, want %d: %v", end, next, err)
		}
		// Whatever was found makes a table that says the same.
		got, lost, err := parseTable(appendTable(nil, entries), int64(len(data)))
		if err != nil || lost != 0 || len(got) != len(entries) {
			t.Fatalf("table of %d: %d, %d lost, %v", len(entries), len(got), lost, err)
		}
		for i := range got {
			if got[i] != entries[i] {
				t.Fatalf("table has %+v, want %+v", got[i], entries[i])
			}
		}
	})
}

func scanned(h *header) Extent {
	r := mustRecord(h)
	return r.extent()
}

// FuzzTable gives parseTable hostile bytes under a right checksum.
func FuzzTable(f *testing.F) {
	var entries []entry
	off := int64(segHeaderLen)
	for i := range 3 {
		r, _ := small(i, 1000*(i+1))
		r.Dataset[0] = byte(i / 2)
		e := entry{Extent: r.extent(), off: off, gap: 128}
		entries = append(entries, e)
		off = e.end()
	}
	f.Add(appendTable(nil, entries), off)
	f.Add(appendTable(nil, entries), entries[2].off+10)
	f.Add(appendTable(nil, nil), int64(64))
	f.Fuzz(func(t *testing.T, b []byte, size int64) {
		if len(b) < 4 {
			return
		}
		b = bytes.Clone(b)
		binary.LittleEndian.PutUint32(b[len(b)-4:], crc(b[:len(b)-4]))
		entries, lost, err := parseTable(b, size)
		if err != nil {
			return
		}
		next := int64(segHeaderLen)
		for _, e := range entries {
			if e.off < next || e.Length < 1 || e.Length > ExtentSize || e.Offset < 0 ||
				e.gap < headerLen(0, e.Length) || e.gap > maxGap || e.off >= maxSegmentSize ||
				e.off+int64(e.gap)+int64(e.Length) > size {
				t.Fatalf("entry %+v", e)
			}
			next = e.end()
		}
		if lost < 0 {
			t.Fatal("lost", lost)
		}
	})
}
