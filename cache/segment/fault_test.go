package segment

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// TestFaultScripts fails the n-th operation of a kind for every n that a fixed run of appends, syncs, reads and a drop
// has, with every error. The store says so, goes on, keeps its accounts, and what it acknowledged is
// there after the next Open; a look finds nothing damaged then.
func TestFaultScripts(t *testing.T) {
	for _, c := range []struct {
		op   string
		errs []error
	}{
		{"write", []error{syscall.EIO, syscall.ENOSPC, errShort}},
		{"read", []error{syscall.EIO}},
		{"sync", []error{syscall.EIO, syscall.ENOSPC}},
		{"syncdir", []error{syscall.EIO}},
		{"open", []error{syscall.EIO, syscall.ENOSPC, syscall.EMFILE}},
		{"truncate", []error{syscall.EIO}},
		{"remove", []error{syscall.EIO}},
	} {
		for _, errno := range c.errs {
			for every := range 2 { // the n-th only, or from the n-th on
				t.Run(fmt.Sprintf("%s/%v/every=%v", c.op, errno, every == 1), func(t *testing.T) {
					for n := 1; ; n++ {
						if !faultScript(t, c.op, errno, n, every == 1) {
							if n == 1 && c.op != "truncate" {
								t.Error("no operation of this kind")
							}
							return
						}
						if n > 200 {
							t.Fatal("the script does not end")
						}
					}
				})
			}
		}
	}
}

// TestSyncBehindClose has a Sync come to a segment when Close has closed its file, and could not commit its table. The
// file stays: the next Open scans it.
func TestSyncBehindClose(t *testing.T) {
	dir, idx := t.TempDir(), &mapIndex{fail: syscall.ENOSPC}
	s := mustOpen(t, dir, Options{Index: idx}, nil)
	loc, p := mustAppend(t, s, 1, 1000)
	if err := s.Close(); !errors.Is(err, syscall.ENOSPC) {
		t.Fatal(err)
	}
	if err := s.commitAll(false); !errors.Is(err, fs.ErrClosed) {
		t.Error(err)
	}
	idx.fail = nil
	s = mustOpen(t, dir, Options{Index: idx}, nil)
	defer mustClose(t, s)
	got := make([]byte, len(p))
	if err := s.ReadAt(loc, len(p), got, 0); err != nil || !bytes.Equal(got, p) {
		t.Error(err)
	}
}

// faultScript reports whether the n-th operation came to pass.
func faultScript(t *testing.T, op string, errno error, n int, every bool) (came bool) {
	fsys, idx, budget := newMemFS(), &mapIndex{}, NewBudget(0)
	o := Options{FS: fsys, Index: idx, SegmentSize: 6000, Logger: quiet(), Budget: budget}
	if n%3 == 2 {
		o.Key = testKey
	}
	s := mustOpen(t, "/s", o, nil)
	var mu sync.Mutex
	count := 0
	fsys.setFault(func(o, _ string, _ int64) error {
		mu.Lock()
		defer mu.Unlock()
		if o != op {
			return nil
		}
		if count++; count == n || every && count > n {
			return errno
		}
		return nil
	})
	acked := make(map[Loc][]byte)
	fail := func(what string, err error) {
		want := errno
		if errors.Is(errno, errShort) {
			want = io.ErrShortWrite
		}
		if err != nil && !errors.Is(err, want) {
			t.Errorf("%s %d: %s: %v", op, n, what, err)
		}
	}
	for i := range 12 {
		r, p := small(i, 1000+i)
		loc, err := s.Append(r, p)
		if fail("append", err); err == nil {
			acked[loc] = p
		}
		if i%4 == 3 {
			fail("sync", s.Sync())
		}
		if budget.Used() != s.Used() {
			t.Fatalf("%s %d: %d bytes of the budget, %d used", op, n, budget.Used(), s.Used())
		}
	}
	for loc, p := range acked {
		got := make([]byte, len(p))
		if err := s.ReadAt(loc, len(p), got, 0); err == nil && !bytes.Equal(got, p) {
			t.Errorf("%s %d: wrong bytes at %v", op, n, loc)
		} else if op == "sync" && errors.Is(err, ErrGone) {
			delete(acked, loc)
		} else {
			fail("read", err)
		}
	}
	if infos := s.Segments(); len(infos) > 2 {
		_, err := s.DropSegment(infos[0].ID)
		fail("drop", err)
		for loc := range acked {
			if loc.Segment() == infos[0].ID {
				delete(acked, loc)
			}
		}
	}
	fail("close", s.Close())
	if budget.Used() != 0 {
		t.Errorf("%s %d: closed, and %d bytes are taken", op, n, budget.Used())
	}
	fsys.setFault(nil)

	found := make(map[Loc]bool)
	s = mustOpen(t, "/s", o, func(_ Extent, loc Loc) { found[loc] = true })
	for loc, p := range acked {
		got := make([]byte, len(p))
		if err := s.ReadAt(loc, len(p), got, 0); err != nil || !bytes.Equal(got, p) || !found[loc] {
			t.Errorf("%s %d: %v was acknowledged, and then: %v", op, n, loc, err)
		}
	}
	mustClose(t, s)
	r, err := Check("/s", CheckOptions{FS: fsys, Index: idx})
	// Where even the bytes that make a place void could not be written there may be half a header, which
	// looks like damage; and where a file was not removed its table is gone.
	if err != nil || !r.Clean() && (op != "write" || !every) {
		t.Errorf("%s %d: %v, %v", op, n, r.Findings, err)
	}
	return count >= n
}

// TestHangingFile lets one write, or another operation, hang: whoever does not need that file goes on.
func TestHangingFile(t *testing.T) {
	for _, op := range []string{"write", "truncate", "open", "sync", "remove"} {
		t.Run(op, func(t *testing.T) {
			fsys := newMemFS()
			s := mustOpen(t, "/s", Options{FS: fsys, SegmentSize: 20_000, Index: &mapIndex{}}, nil)
			var locs []Loc
			var want []byte
			for i := range 30 {
				loc, p := mustAppend(t, s, i, 1000)
				if i == 0 {
					want = p
				}
				locs = append(locs, loc)
			}
			hung, release := make(chan struct{}), make(chan struct{})
			var once sync.Once
			fsys.setFault(func(o, name string, _ int64) error {
				if op == "truncate" && o == "write" && strings.Contains(name, "00000002") {
					return syscall.ENOSPC
				}
				if o == op && !strings.Contains(name, "00000001") {
					once.Do(func() { close(hung) })
					<-release
				}
				return nil
			})
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				switch op {
				case "sync":
					_ = s.Sync()
				case "remove":
					_, _ = s.DropSegment(2)
				default:
					for i := range 20 {
						_, _ = s.Append(small(100+i, 1000))
					}
				}
			}()
			<-hung
			// All of this needs no disk, or another file.
			done := make(chan struct{})
			go func() {
				defer close(done)
				p := make([]byte, 1000)
				if err := s.ReadAt(locs[0], 1000, p, 0); err != nil || !bytes.Equal(p, want) {
					t.Error(err)
				}
				s.Used()
				s.Stats()
				s.Segments()
				s.SetMaxBytes(1 << 40)
				s.Free(locs[1])
				if _, err := s.DropSegment(1); err != nil {
					t.Error(err)
				}
				if err := s.ReadAt(locs[0], 1000, p, 0); !errors.Is(err, ErrGone) {
					t.Error(err)
				}
			}()
			select {
			case <-done:
			case <-time.After(time.Minute):
				t.Error("one file hangs, and so does everybody")
			}
			close(release)
			<-ended
			<-done
			fsys.setFault(nil)
			mustClose(t, s)
		})
	}
}
