package segment

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"pgregory.net/rapid"
)

// encrypt sets the flag of a record in a segment's bytes, and makes its header right again.
func encrypt(data []byte, loc Loc) {
	h := data[loc.off():]
	h[6] |= flagEncrypted
	n := binary.LittleEndian.Uint32(h[8:])
	copy(h[12:16], []byte{0, 0, 0, 0})
	binary.LittleEndian.PutUint32(h[12:], crc(h[:n]))
}

// written is a record that a test wrote.
type written struct {
	rec       Record
	loc       Loc
	payload   []byte
	encrypted bool
	sealed    int // length of its seal, which a store with a key writes
}

// survives reports whether a record's bytes are what they were.
func (w *written) survives(before, after []byte) bool {
	same := func(from, to int64) bool {
		return int64(len(after)) >= to && bytes.Equal(before[from:to], after[from:to])
	}
	off := w.loc.off()
	from := off + int64(w.loc.gap())
	to := from + int64(w.rec.Length)
	if w.encrypted { // nobody can tell whether its payload is right
		return same(off, off+int64(w.rec.headerLen())) && int64(len(after)) >= to
	}
	return same(off, off+int64(w.rec.headerLen()+w.sealed)) && same(from, to)
}

// zeroed reports whether a record's header is zero.
func (w *written) zeroed(after []byte) bool {
	from, to := w.loc.off(), min(w.loc.off()+recHeaderLen, int64(len(after)))
	return from < to && len(bytes.Trim(after[from:to], "\x00")) == 0
}

func segmentFile(id uint32) string { return fmt.Sprintf("/s/%08d.seg", id) }

// TestCheckRepairsAnything damages random bytes. A repaired folder must check clean and open with all the records
// that were not touched, and no other.
func TestCheckRepairsAnything(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		rng := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 5))
		fsys, idx := newMemFS(), &mapIndex{}
		o := Options{FS: fsys, Logger: quiet(), Index: idx,
			SegmentSize: int64(rapid.SampledFrom([]int{segHeaderLen, 4 << 10, 400 << 10}).Draw(t, "segment size"))}
		if rapid.IntRange(0, 3).Draw(t, "keyed") == 3 {
			o.Key = testKey
		}
		s, err := Open("/s", o, nil)
		if err != nil {
			t.Fatal(err)
		}
		var recs []*written
		for i := range rapid.IntRange(1, 12).Draw(t, "records") {
			r, p := small(i, rapid.SampledFrom([]int{1, 60, 700, 5000, BlockSize, BlockSize + 9}).Draw(t, "length"))
			loc, err := s.Append(r, p)
			if err != nil {
				t.Fatal(err)
			}
			w := &written{rec: r, loc: loc, payload: p}
			if recs = append(recs, w); o.Key != nil {
				w.sealed = sealLen(r.Length)
			}
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		for _, w := range recs {
			if o.Key == nil && rapid.IntRange(0, 9).Draw(t, "encrypt") == 0 {
				w.encrypted = true
				encrypt(fsys.files[segmentFile(w.loc.Segment())].data, w.loc)
				delete(idx.segs, w.loc.Segment())
			}
		}
		// Nothing is wrong yet.
		if r, err := Check("/s", CheckOptions{FS: fsys, Index: idx, Key: o.Key}); err != nil || !r.Clean() ||
			len(r.Findings) != 0 || r.Records+r.Encrypted != len(recs) {
			t.Fatalf("before the damage: %+v, %v", r, err)
		}
		before := make(map[string][]byte)
		for name, d := range fsys.files {
			before[name] = bytes.Clone(d.data)
		}
		for range rapid.IntRange(1, 6).Draw(t, "damages") {
			names := fsys.names()
			d := fsys.files[names[rng.IntN(len(names))]]
			at := rng.IntN(max(len(d.data), 1))
			if rng.IntN(3) == 0 {
				at = min(at, rng.IntN(2*segHeaderLen+recHeaderLen))
			}
			switch kind := rapid.SampledFrom([]string{"flip", "flip", "cut", "zero", "junk", "index", "table", "stale",
				"magic"}).Draw(t, "damage"); kind {
			case "flip":
				if at < len(d.data) {
					d.data[at] ^= byte(1 + rng.IntN(255))
				}
			case "cut":
				d.data = bytes.Clone(d.data[:at])
			case "zero":
				clear(d.data[at:min(len(d.data), at+rng.IntN(9000))])
			case "junk":
				d.data = append(bytes.Clone(d.data), randomBytes(1+rng.IntN(3000))...)
			case "magic": // many at once
				for off := segHeaderLen; off+unit <= len(d.data); off += unit {
					if string(d.data[off:off+4]) == recordMagic && rng.IntN(2) == 0 {
						d.data[off+40] ^= 1
					}
				}
			case "index":
				idx.segs = nil
			case "table":
				for _, c := range idx.segs {
					c.table[rng.IntN(len(c.table))] ^= 1
				}
			case "stale":
				_ = idx.CommitSegment(uint32(50+rng.IntN(9)), 640, true, appendTable(nil, nil))
			}
		}
		good := make(map[Record]*written)
		first := make(map[uint32]*written)
		var bad []string
		for _, w := range recs {
			if id := w.loc.Segment(); first[id] == nil {
				first[id] = w
			}
		}
		damaged := false
		hole := make(map[uint32]bool) // by segment: the record before reads as one
		for _, w := range recs {
			name := segmentFile(w.loc.Segment())
			was, is := before[name], fsys.files[name].data
			// What was cut at the very end of another record was not there, for all that a check knows. Nor was what
			// begins with zeros, as where an append was never written, up to the next record, unless a table names it.
			_, named := idx.segs[w.loc.Segment()]
			hole[w.loc.Segment()] = !named && !w.survives(was, is) && (hole[w.loc.Segment()] || w.zeroed(is))
			gone := int64(len(is)) <= w.loc.off() || hole[w.loc.Segment()]
			damaged = damaged || !w.survives(was, is) && !gone
			headed := len(is) >= segHeaderLen && bytes.Equal(was[:segHeaderLen], is[:segHeaderLen])
			damaged = damaged || !headed
			// The segment's header can be made anew from that of the first record, if the payload is inside the file;
			// with a table that can be read, from any.
			intact := func(f *written) bool {
				to := f.loc.off() + int64(f.rec.headerLen())
				return int64(len(is)) >= f.loc.off()+int64(f.loc.gap()+f.rec.Length) &&
					bytes.Equal(was[f.loc.off():to], is[f.loc.off():to])
			}
			mended := intact(first[w.loc.Segment()])
			if c, ok := idx.segs[w.loc.Segment()]; ok && !mended {
				table, err := newSealer(o.Key, binary.LittleEndian.Uint64(was[16:])).openTable(w.loc.Segment(), c.table)
				if err == nil {
					_, _, err = parseTable(table, int64(len(is)))
				}
				mended = err == nil && slices.ContainsFunc(recs, func(r *written) bool {
					return r.loc.Segment() == w.loc.Segment() && intact(r)
				})
			}
			if w.survives(was, is) && (headed || mended) {
				good[w.rec] = w
			} else {
				bad = append(bad, w.loc.String())
			}
		}

		looked, err := Check("/s", CheckOptions{FS: fsys, Index: idx, Key: o.Key})
		if err != nil {
			t.Fatal(err)
		}
		if damaged && looked.Clean() {
			t.Fatalf("%v are damaged, and the report is clean: %+v", bad, looked)
		}
		r, err := Check("/s", CheckOptions{FS: fsys, Index: idx, Key: o.Key, Repair: true})
		if err != nil {
			t.Fatal(err)
		}
		if r.Repaired != len(r.Findings) || len(r.Findings) != len(looked.Findings) {
			t.Fatalf("%d findings at first, %d in the repair, %d repaired:\n%v",
				len(looked.Findings), len(r.Findings), r.Repaired, r.Findings)
		}
		again, err := Check("/s", CheckOptions{FS: fsys, Index: idx, Key: o.Key})
		if err != nil || !again.Clean() || len(again.Findings) != 0 {
			t.Fatalf("after the repair: %v, %v\nwhich found %v", again.Findings, err, r.Findings)
		}
		plain := 0
		for _, w := range good {
			if w.encrypted {
				name := segmentFile(w.loc.Segment())
				if !w.survives(before[name], fsys.files[name].data) {
					t.Fatalf("%v is encrypted, and was changed", w.loc)
				}
			} else {
				plain++
			}
		}
		if again.Records != plain || again.Encrypted != len(good)-plain {
			t.Fatalf("%d records, %d encrypted; want %d, %d", again.Records, again.Encrypted, plain, len(good)-plain)
		}
		seen := 0
		at := make(map[Loc]*written)
		for _, w := range good {
			at[w.loc] = w
		}
		s, err = Open("/s", o, func(x Extent, loc Loc) {
			if w := at[loc]; w == nil || w.encrypted || !same(x, w.rec) {
				t.Fatalf("%v: %+v was visited; bad are %v", loc, x, bad)
			}
			seen++
		})
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		if seen != plain {
			t.Fatalf("%d records visited, want %d", seen, plain)
		}
		if rec := s.Stats().Recovery; rec.TornBytes+int64(rec.BadSegments+rec.Mended+rec.Lost+rec.BadTables) != 0 {
			t.Fatalf("repaired, and then: %+v", rec)
		}
		for _, w := range recs {
			p := make([]byte, w.rec.Length)
			err := s.ReadAt(w.loc, len(p), p, 0)
			if g := good[w.rec]; g != nil && !g.encrypted {
				if err != nil || !bytes.Equal(p, w.payload) {
					t.Fatalf("%v: %v", w.loc, err)
				}
			} else if err == nil {
				t.Fatalf("%v is damaged or encrypted, and was read", w.loc)
			}
		}
	})
}

// TestCheckNamesFindings has one thing wrong at a time.
func TestCheckNamesFindings(t *testing.T) {
	type world struct {
		fs   *memFS
		idx  *mapIndex
		seg  *memData
		locs []Loc
	}
	for name, c := range map[string]struct {
		damage func(w *world)
		want   Report // the counts that are not 0 besides segments, bytes, records and payload
		offset func(w *world) int64
		what   string
		kept   bool // not repaired
		lost   int  // records
		unread bool
	}{
		"nothing": {damage: func(*world) {}},
		"payload": {
			damage: func(w *world) { w.seg.data[w.locs[1].off()+int64(w.locs[1].gap())] ^= 1 },
			want:   Report{BadRecords: 1}, what: "payload of a record is damaged", offset: func(w *world) int64 {
				return w.locs[1].off()
			}, lost: 1,
		},
		"header": {
			damage: func(w *world) { w.seg.data[w.locs[1].off()+50] ^= 1 },
			want:   Report{BadRecords: 1}, what: "header of a record is damaged", offset: func(w *world) int64 {
				return w.locs[1].off()
			}, lost: 1,
		},
		"last header": {
			damage: func(w *world) { w.seg.data[w.locs[3].off()+50] ^= 1 },
			want:   Report{TornTails: 1, TornBytes: 3128, BadTables: 1}, what: "3128 bytes at the end are not a record",
			offset: func(w *world) int64 { return w.locs[3].off() }, lost: 1,
		},
		"last payload": {
			damage: func(w *world) { w.seg.data[len(w.seg.data)-1] ^= 1 },
			want:   Report{BadRecords: 1}, what: "payload of a record is damaged", offset: func(w *world) int64 {
				return w.locs[3].off()
			}, lost: 1,
		},
		"never written": {
			damage: func(w *world) {
				clear(w.seg.data[w.locs[1].off():w.locs[2].off()])
				w.idx.segs = nil
			},
			want: Report{Holes: 1}, lost: 1,
		},
		"segment header": {
			damage: func(w *world) { w.seg.data[20] ^= 1 },
			want:   Report{BadSegments: 1}, what: "damaged segment header",
		},
		"both headers": {
			damage: func(w *world) { w.seg.data[20] ^= 1; w.seg.data[w.locs[0].off()] ^= 1 },
			want:   Report{BadSegments: 1, BadRecords: 1}, what: "damaged segment header", lost: 1,
		},
		"both headers and no table": {
			damage: func(w *world) { w.seg.data[20] ^= 1; w.seg.data[w.locs[0].off()] ^= 1; w.idx.segs = nil },
			want:   Report{BadSegments: 1}, what: "damaged segment header", lost: 4,
		},
		"newer": {
			damage: func(w *world) {
				w.seg.data[8] = 2
				binary.LittleEndian.PutUint32(w.seg.data[60:], crc(w.seg.data[:60]))
			},
			want: Report{Newer: 1}, what: "newer version", kept: true, lost: 4,
		},
		"encrypted": {
			damage: func(w *world) { encrypt(w.seg.data, w.locs[2]); w.idx.segs = nil },
			want:   Report{Encrypted: 1}, lost: 1,
		},
		"table": {
			damage: func(w *world) { w.idx.segs[1].table[9] ^= 1 },
			want:   Report{BadTables: 1}, what: "table in the index is damaged",
		},
		"other table": {
			damage: func(w *world) {
				c := w.idx.segs[1]
				entries, _, _ := parseTable(c.table, c.size)
				entries[1].ID[0]++
				w.idx.segs[1] = cover{c.size, c.sealed, appendTable(nil, entries)}
			},
			want: Report{BadTables: 1}, what: "a different record at",
		},
		"table with more": {
			damage: func(w *world) {
				c := w.idx.segs[1]
				entries, _, _ := parseTable(c.table, c.size)
				e := entries[3]
				e.off = entries[3].end()
				w.idx.segs[1] = cover{e.end(), c.sealed, appendTable(nil, append(entries, e))}
			},
			want: Report{BadTables: 1}, what: "the segment has none",
		},
		"table with less": {
			damage: func(w *world) {
				c := w.idx.segs[1]
				entries, _, _ := parseTable(c.table, c.size)
				w.idx.segs[1] = cover{c.size, c.sealed, appendTable(nil, entries[:2])}
			},
			want: Report{BadTables: 1}, what: "a different record at",
		},
		"sealed too early": {
			damage: func(w *world) {
				c := w.idx.segs[1]
				entries, _, _ := parseTable(c.table, c.size)
				w.idx.segs[1] = cover{entries[1].end(), true, appendTable(nil, entries[:2])}
			},
			want: Report{BadTables: 1}, what: "ends before the record",
		},
		"stale index": {
			damage: func(w *world) { _ = w.idx.CommitSegment(9, 64, true, appendTable(nil, nil)) },
			want:   Report{BadTables: 1}, what: "its file is missing",
		},
		"leftover": {
			damage: func(w *world) { w.fs.files["/s/.tmp-123"] = &memData{data: []byte("x")} },
			want:   Report{TempFiles: 1}, what: "left over",
		},
		"unknown": {
			damage: func(w *world) { w.fs.files["/s/notes.txt"] = &memData{data: []byte("x")} },
			want:   Report{Unknown: 1}, what: "not a file of shoal", kept: true,
		},
		"bad sector": {
			damage: func(w *world) {
				w.fs.sector = w.locs[1].off() + int64(w.locs[1].gap()) + 2500
			},
			want: Report{BadRecords: 1}, what: "input/output error", offset: func(w *world) int64 {
				return w.locs[1].off()
			}, lost: 1,
		},
		"dead disk": {
			damage: func(w *world) {
				w.fs.setFault(func(op, _ string, off int64) error {
					if op == "read" {
						return syscall.EIO
					}
					return nil
				})
			},
			want: Report{Unreadable: 1}, what: "cannot be read", kept: true, unread: true, lost: 4,
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := &world{fs: newMemFS(), idx: &mapIndex{}}
			o := Options{FS: w.fs, Index: w.idx, Logger: quiet()}
			s := mustOpen(t, "/s", o, nil)
			for i := range 4 {
				loc, _ := mustAppend(t, s, i, 3000)
				w.locs = append(w.locs, loc)
			}
			mustClose(t, s)
			w.seg = w.fs.files["/s/00000001.seg"]
			c.damage(w)
			size := len(w.seg.data)
			var last, total int64
			calls := 0
			progress := func(done, all int64) {
				if done < last || done > all {
					t.Errorf("progress %d after %d of %d", done, last, all)
				}
				calls++
				last, total = done, all
			}
			r, err := Check("/s", CheckOptions{FS: w.fs, Index: w.idx, Progress: progress})
			if err != nil {
				t.Fatal(err)
			}
			if calls < 2 || last != total || total != int64(size) {
				t.Errorf("%d calls, %d of %d of %d bytes done", calls, last, total, size)
			}
			got := r
			got.Segments, got.Bytes, got.Records, got.Findings = 0, 0, 0, nil
			if fmt.Sprint(got) != fmt.Sprint(c.want) {
				t.Errorf("got  %+v\nwant %+v\n%v", got, c.want, r.Findings)
			}
			if c.what != "" {
				if len(r.Findings) == 0 || !strings.Contains(r.Findings[0].String(), c.what) ||
					r.Findings[0].Remedy == "" || r.Findings[0].Repaired {
					t.Errorf("%v, want %q", r.Findings, c.what)
				} else if c.offset != nil && r.Findings[0].Offset != c.offset(w) {
					t.Errorf("at %d, want %d", r.Findings[0].Offset, c.offset(w))
				}
			}
			if len(w.seg.data) != size {
				t.Error("a look changed the file")
			}
			r, err = Check("/s", CheckOptions{FS: w.fs, Index: w.idx, Repair: true})
			if err != nil || !c.kept && r.Repaired != len(r.Findings) || c.kept && r.Repaired != 0 {
				t.Fatalf("%d repaired: %v, %v", r.Repaired, r.Findings, err)
			}
			again, err := Check("/s", CheckOptions{FS: w.fs, Index: w.idx})
			if err != nil || again.Clean() == c.unread || !c.kept && len(again.Findings) > 0 ||
				again.Records != 4-c.lost {
				t.Fatalf("after the repair: %+v, %v", again, err)
			}
			if w.fs.files["/s/notes.txt"] == nil && name == "unknown" || w.fs.files["/s/.tmp-123"] != nil {
				t.Error(w.fs.names())
			}
		})
	}
}

func TestCheckEnds(t *testing.T) {
	fsys := newMemFS()
	s := mustOpen(t, "/s", Options{FS: fsys, SegmentSize: 2000}, nil)
	for i := range 5 {
		mustAppend(t, s, 1, 1000+i) // one extent, five times
	}
	mustClose(t, s)
	r, err := Check("/s", CheckOptions{FS: fsys})
	if err != nil || !r.Clean() || r.Segments != 5 || r.Records != 5 {
		t.Errorf("%+v, %v", r, err)
	}
	for name, d := range fsys.files {
		d.data[len(d.data)-1] ^= 1
		fsys.files[name] = d
	}
	r, err = Check("/s", CheckOptions{FS: fsys, MaxFindings: 2})
	if err != nil || len(r.Findings) != 2 || r.Omitted != 3 || r.BadRecords != 5 {
		t.Errorf("%+v, %v", r, err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	n := 0
	r, err = Check("/s", CheckOptions{FS: fsys, Context: ctx, Progress: func(int64, int64) {
		if n++; n == 3 {
			cancel()
		}
	}})
	if !errors.Is(err, context.Canceled) || r.Segments >= 5 {
		t.Errorf("%+v, %v", r, err)
	}
	for _, op := range []string{"write", "sync", "truncate", "remove"} {
		fsys := newMemFS()
		s := mustOpen(t, "/s", Options{FS: fsys}, nil)
		loc, _ := mustAppend(t, s, 1, 1000)
		mustAppend(t, s, 2, 1000)
		mustClose(t, s)
		d := fsys.files["/s/00000001.seg"]
		d.data[loc.off()+int64(loc.gap())] ^= 1
		d.data = append(d.data, randomBytes(300)...)
		fsys.files["/s/x.tmp"] = &memData{}
		fsys.setFault(func(o, _ string, _ int64) error {
			if o == op {
				return syscall.EROFS
			}
			return nil
		})
		if _, err := Check("/s", CheckOptions{FS: fsys, Repair: true}); !errors.Is(err, syscall.EROFS) ||
			!strings.Contains(err.Error(), "/s/") {
			t.Errorf("%s fails: %v", op, err)
		}
	}
	if _, err := Check(filepath.Join(t.TempDir(), "none"), CheckOptions{}); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
}

// TestEncryptedStays shows that Open neither serves nor loses encrypted records.
func TestEncryptedStays(t *testing.T) {
	fsys, idx := newMemFS(), &mapIndex{}
	o := Options{FS: fsys, Index: idx, SegmentSize: 3000, Logger: quiet()}
	s := mustOpen(t, "/s", o, nil)
	var locs []Loc
	for i := range 4 { // two a segment
		loc, _ := mustAppend(t, s, i, 1000)
		locs = append(locs, loc)
	}
	mustClose(t, s)
	idx.segs = nil
	data := fsys.files["/s/00000001.seg"].data
	encrypt(data, locs[0])
	encrypt(data, locs[1])
	want := bytes.Clone(data)
	for range 3 {
		seen := 0
		s = mustOpen(t, "/s", o, func(_ Extent, loc Loc) {
			if loc.Segment() == 1 {
				t.Errorf("%v was visited", loc)
			}
			seen++
		})
		if st := s.Stats(); seen != 2 || st.Encrypted != 2 || st.Recovery.Encrypted != 2 ||
			s.Segments()[0].Garbage != 0 {
			t.Fatalf("%d visited, %+v", seen, st)
		}
		if n, err := s.Reclaim(); n != 0 || err != nil {
			t.Fatal(n, err)
		}
		for _, loc := range locs[:2] {
			if err := s.ReadAt(loc, 1000, make([]byte, 10), 0); !errors.Is(err, ErrGone) {
				t.Error(err)
			}
		}
		mustClose(t, s)
		if !bytes.Equal(fsys.files["/s/00000001.seg"].data, want) {
			t.Fatal("the segment was changed")
		}
	}
}

// Clean reports whether nothing is damaged.
func (r *Report) Clean() bool { return r.Damage() == 0 }
