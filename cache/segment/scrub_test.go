package segment

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestScrub damages some records of several segments, also after they were read, and has them found, without a page of
// somebody else's forgotten.
func TestScrub(t *testing.T) {
	fsys, idx := newMemFS(), &mapIndex{}
	o := Options{FS: fsys, Index: idx, SegmentSize: 500_000, Logger: quiet()}
	s := mustOpen(t, "/s", o, nil)
	const n = 60
	var locs []Loc
	for i := range n {
		loc, _ := mustAppend(t, s, i, 40_000)
		locs = append(locs, loc)
	}
	mustClose(t, s)
	s = mustOpen(t, "/s", o, nil)
	defer mustClose(t, s)
	damage := func(i int) {
		fsys.files[segmentFile(locs[i].Segment())].data[locs[i].off()+int64(locs[i].gap())+39_999] ^= 1
	}
	damage(0)
	damage(25)
	fsys.files[segmentFile(locs[30].Segment())].data[locs[30].off()] ^= 1
	damage(59)
	damage(40)
	s.Free(locs[40]) // nobody cares
	if err := s.ReadAt(locs[10], 40_000, make([]byte, 40_000), 0); err != nil {
		t.Fatal(err)
	}
	// The second segment is in memory, of the others nothing.
	fsys.resident = func(name string, _ int64) bool { return name == "/s/00000002.seg" }
	var bad []string
	var paced int
	err := s.Scrub(t.Context(), func(n int) { paced += n }, func(r Record, loc Loc) {
		i := slices.IndexFunc(locs, loc.Same)
		want, _ := small(i, 40_000)
		want.File = NoFile // which no header tells
		bad = append(bad, fmt.Sprintf("%d %v", i, r == want))
		s.Free(loc)
	})
	if err != nil || fmt.Sprint(bad) != "[0 true 25 true 30 false 59 true]" {
		t.Errorf("%v, %v", bad, err)
	}
	size := int(locs[1].off() - locs[0].off())
	if want := (n - 1) * size; paced != want {
		t.Errorf("paced %d bytes, want %d", paced, want)
	}
	if st := s.Stats(); st.Scrubbed != n-1-4 || st.Checks != 1 || st.Records != n-5 {
		t.Errorf("%+v", st)
	}
	for _, f := range fsys.forgot {
		if f[:12] == "00000002.seg" {
			t.Errorf("%s was forgotten", f)
		}
	}
	if len(fsys.forgot) == 0 {
		t.Error("what the scrub brought in stays")
	}
	// What was checked is not checked again by a read of a few bytes, but by the next scrub.
	paced = 0
	if err := s.ReadAt(locs[11], 40_000, make([]byte, 100), 70); err != nil || s.Stats().Checks != 1 {
		t.Error(err, s.Stats().Checks)
	}
	damage(11)
	if err := s.ReadAt(locs[11], 40_000, make([]byte, 20_000), 70); !errors.Is(err, ErrCorrupt) {
		t.Errorf("what was damaged after it was read: %v", err)
	}
	if err := s.Scrub(t.Context(), func(n int) {
		paced += n
	}, func(r Record, _ Loc) { bad = append(bad, r.ETag) }); err != nil || paced != (n-5)*size || len(bad) != 5 {
		t.Errorf("all: %d bytes, %v, %v", paced, bad, err)
	}
	// Who still has the place of what was found damaged gets none of it, not even a few bytes.
	if err := s.ReadAt(locs[11], 40_000, make([]byte, 100), 70); !errors.Is(err, ErrCorrupt) {
		t.Error(err)
	}
}

// TestScrubAlmostBlocks has payloads that fill their blocks, so that the header makes one more of the slot.
func TestScrubAlmostBlocks(t *testing.T) {
	s := mustOpen(t, "/s", Options{FS: newMemFS()}, nil)
	defer mustClose(t, s)
	for i, n := range []int{BlockSize, BlockSize - 1, 2 * BlockSize, ExtentSize, 1} {
		mustAppend(t, s, i, n)
	}
	if err := s.Scrub(t.Context(), func(int) {}, func(_ Record, loc Loc) { t.Error(loc) }); err != nil ||
		s.Stats().Scrubbed != 5 {
		t.Errorf("%d are right: %v", s.Stats().Scrubbed, err)
	}
}

func TestScrubEnds(t *testing.T) {
	fsys := newMemFS()
	o := Options{FS: fsys, SegmentSize: 2000, Logger: quiet()}
	s := mustOpen(t, "/s", o, nil)
	for i := range 12 {
		mustAppend(t, s, i, 1500)
	}
	ctx, cancel := context.WithCancel(t.Context())
	runs := 0
	if err := s.Scrub(ctx, func(int) {
		if runs++; runs == 3 {
			cancel()
		}
	}, func(_ Record, loc Loc) { t.Error(loc) }); !errors.Is(err, context.Canceled) || runs != 3 {
		t.Errorf("%d runs: %v", runs, err)
	}
	// One segment that cannot be read does not hide the others; a disk that reads nothing is left alone.
	failing := "/s/00000005.seg"
	tries := 0
	fsys.setFault(func(op, name string, _ int64) error {
		if op == "read" && (failing == "" || name == failing) {
			tries++
			return syscall.EIO
		}
		return nil
	})
	if err := s.Scrub(t.Context(), func(int) {}, func(_ Record, loc Loc) {
		t.Errorf("%v is not bad", loc)
	}); !errors.Is(err, syscall.EIO) || tries != 1 || s.Stats().Scrubbed != 3+11 {
		t.Errorf("%d tries, %d right: %v", tries, s.Stats().Scrubbed, err)
	}
	failing, tries = "", 0
	if err := s.Scrub(t.Context(), func(int) {}, func(_ Record, loc Loc) {
		t.Errorf("%v is not bad", loc)
	}); !errors.Is(err, syscall.EIO) || tries != scrubErrors {
		t.Errorf("%d tries: %v", tries, err)
	}
	fsys.setFault(nil)
	// Segments that go meanwhile, and a store that closes.
	runs = 0
	if err := s.Scrub(t.Context(), func(int) {
		runs++
		if _, err := s.DropSegment(uint32(2 * runs)); err != nil {
			t.Error(err)
		}
	}, func(_ Record, loc Loc) { t.Errorf("%v is not bad", loc) }); err != nil || runs != 6 {
		t.Errorf("%d runs: %v", runs, err)
	}
	if err := s.Scrub(t.Context(), func(int) {
		mustClose(t, s)
	}, func(_ Record, loc Loc) { t.Error(loc) }); !errors.Is(err, ErrClosed) {
		t.Error(err)
	}
}

// TestScrubBesides scrubs while others append, read, free and drop, with real files.
func TestScrubBesides(t *testing.T) {
	s := mustOpen(t, t.TempDir(), Options{SegmentSize: 256 << 10, Budget: NewBudget(4 << 20)}, nil)
	defer mustClose(t, s)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			for ctx.Err() == nil {
				if err := s.Scrub(ctx, func(int) {}, func(r Record, loc Loc) {
					t.Errorf("%v is not bad: %+v", loc, r)
				}); err != nil && !errors.Is(err, context.Canceled) {
					t.Error(err)
				}
			}
		})
	}
	for i := range 600 {
		r, p := small(i, 1+i*97%30_000)
		loc, err := s.Append(r, p)
		if errors.Is(err, ErrFull) {
			if _, err := s.DropSegment(s.Segments()[0].ID); err != nil {
				t.Error(err)
			}
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		got := make([]byte, len(p))
		if err := s.ReadAtNow(loc, len(p), got, 0); err != nil && !errors.Is(err, ErrWouldBlock) ||
			err == nil && !bytes.Equal(got, p) {
			t.Error(err)
		}
		if i%9 == 0 {
			s.Free(loc)
		}
	}
	cancel()
	wg.Wait()
}

// resident returns how many bytes of a file are in the page cache.
func resident(t *testing.T, f osFile) (n int) {
	t.Helper()
	size, err := f.Size()
	if err != nil {
		t.Fatal(err)
	}
	b, err := unix.Mmap(int(f.Fd()), 0, int(size), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(b)
	pages := make([]byte, (size+4095)/4096)
	if err := mincore(b, pages); err != nil {
		t.Fatal(err)
	}
	for _, p := range pages {
		n += int(p&1) * 4096
	}
	return n
}

// TestReadNowOnDisk goes through the real page cache.
func TestReadNowOnDisk(t *testing.T) {
	s := mustOpen(t, t.TempDir(), Options{}, nil)
	defer mustClose(t, s)
	var locs []Loc
	var want [][]byte
	for i := range 20 {
		loc, p := mustAppend(t, s, i, 300_000)
		locs, want = append(locs, loc), append(want, p)
	}
	if err := s.Sync(); err != nil {
		t.Fatal(err)
	}
	f := s.segment(1).f.(osFile)
	p := make([]byte, 300_000)
	// Somebody else on the machine may drop what was just read, but not each time.
	all := make([]byte, s.Used())
	hit := func(loc Loc, q []byte, off int64) (err error) {
		for range 20 {
			if err = s.ReadAtNow(loc, len(p), q, off); !errors.Is(err, ErrWouldBlock) || s.noNow.Load() {
				return err
			}
			if _, err := f.ReadAt(all, 0); err != nil && !errors.Is(err, io.EOF) {
				t.Fatal(err)
			}
		}
		return err
	}
	if err := hit(locs[0], p, 0); s.noNow.Load() {
		t.Logf("the file system of %s has no RWF_NOWAIT", s.dir)
		if !errors.Is(err, ErrWouldBlock) {
			t.Fatal(err)
		}
		return
	}
	for i, loc := range locs {
		for _, r := range [][2]int{{7, 100}, {0, 300_000}, {BlockSize, BlockSize}, {299_999, 1}} {
			q := p[:r[1]]
			if err := hit(loc, q, int64(r[0])); err != nil || !bytes.Equal(q, want[i][r[0]:r[0]+r[1]]) {
				t.Fatalf("%v %v: %v", loc, r, err)
			}
		}
	}
	// The kernel may keep what it was asked to drop, or on a busy machine read what is asked for before it looks
	// whether it has it. So each second question goes to the kernel alone: if it refuses those, it refuses the store's
	// as well.
	var err error
	absent, refused := 0, 0
	for end := time.Now().Add(10 * time.Second); refused < 20 && !errors.Is(err, ErrWouldBlock) &&
		time.Now().Before(end); {
		if f.Forget(0, 0); resident(t, f) > 0 {
			continue
		}
		if absent++; absent%2 == 1 {
			if _, err := f.ReadNowAt([][]byte{p}, locs[10].off()); errors.Is(err, ErrWouldBlock) {
				refused++
			}
		} else if err = s.ReadAtNow(locs[10], len(p), p, 0); err == nil && !bytes.Equal(p, want[10]) {
			t.Fatal("wrong bytes")
		}
	}
	if refused == 20 {
		t.Errorf("of a file that is not in memory: %v", err)
	} else if !errors.Is(err, ErrWouldBlock) {
		t.Logf("not seen to block: the file was out of memory %d times, and of %d questions the kernel refused %d",
			absent, (absent+1)/2, refused)
	}
	if err := s.ReadAt(locs[10], len(p), p, 0); err != nil || !bytes.Equal(p, want[10]) {
		t.Error(err)
	}
	if err := hit(locs[10], p, 0); err != nil || !bytes.Equal(p, want[10]) {
		t.Error(err)
	}
	// A scrub leaves the page cache as it is.
	var before, after int
	for try := 0; ; try++ {
		f.Forget(0, 0)
		if err := s.ReadAt(locs[10], len(p), p, 0); err != nil {
			t.Fatal(err)
		}
		before = resident(t, f)
		if err := s.Scrub(t.Context(), func(int) {}, func(_ Record, loc Loc) { t.Error(loc) }); err != nil {
			t.Fatal(err)
		}
		after = resident(t, f)
		if n := s.Stats().Scrubbed; n != int64(20*(try+1)) {
			t.Fatalf("%d scrubbed in %d scrubs", n, try+1)
		}
		// A busy kernel may drop more than it was asked to, or not what it was asked to, but not each time.
		if after >= before-2*BlockSize && after <= before+1<<20 {
			break
		}
		if try == 20 {
			t.Fatalf("%d bytes in memory, %d before", after, before)
		}
	}
	t.Logf("%d bytes in memory before a scrub of %d, %d after", before, s.Used(), after)
}

// TestReadNowLearns asks a file system that cannot tell but once.
func TestReadNowLearns(t *testing.T) {
	fsys := newMemFS()
	s := mustOpen(t, "/s", Options{FS: fsys}, nil)
	loc, p := mustAppend(t, s, 1, 1000)
	asked := 0
	fsys.setFault(func(op, _ string, _ int64) error {
		if op == "read" {
			asked++
		}
		return nil
	})
	for range 5 {
		if err := s.ReadAtNow(loc, len(p), make([]byte, 1000), 0); !errors.Is(err, ErrWouldBlock) {
			t.Error(err)
		}
	}
	if asked != 1 || s.Stats().Checks != 0 {
		t.Errorf("asked %d times, %+v", asked, s.Stats())
	}
	mustClose(t, s)
	if err := s.ReadAtNow(loc, len(p), p, 0); !errors.Is(err, ErrWouldBlock) && !errors.Is(err, ErrGone) {
		t.Error(err)
	}
}

// TestReadsAfterClose shows each way to read on files that are closed: never the bytes of another file that
// has got the descriptor.
func TestReadsAfterClose(t *testing.T) {
	s := mustOpen(t, t.TempDir(), Options{}, nil)
	loc, p := mustAppend(t, s, 1, 1000)
	other, _ := mustAppend(t, s, 2, 1000)
	if err := s.ReadAt(loc, 1000, p, 0); err != nil {
		t.Fatal(err)
	}
	mustClose(t, s)
	for name, read := range map[string]func(Loc, int, []byte, int64) error{"ReadAt": s.ReadAt,
		"ReadAtNow": s.ReadAtNow} {
		for _, l := range []Loc{loc, other} { // checked, and not
			if err := read(l, 1000, p, 0); !errors.Is(err, ErrGone) {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
}
