package segment

import (
	"bytes"
	"crypto/cipher"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"sync"
	"syscall"
	"testing"

	"github.com/shoalfs/shoal/cache/crypt"
)

// testKey is the key of the tests that run encrypted, too.
var testKey = crypt.KeyOf([32]byte{1, 2, 3})

// TestSealedReads reads ranges of encrypted records of all kinds of lengths, in every way, against their bytes,
// and finds nothing of them on the disk.
func TestSealedReads(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 1))
	fsys, idx := newMemFS(), &mapIndex{}
	o := Options{FS: fsys, Index: idx, Key: testKey, Logger: quiet()}
	s := mustOpen(t, "/s", o, nil)
	type kept struct {
		rec Record
		loc Loc
		p   []byte
	}
	var recs []kept
	for i, n := range []int{1, 300, BlockSize - 1, BlockSize, BlockSize + 1, 4*BlockSize + 7, 9*BlockSize + 3,
		ExtentSize} {
		r, p := small(i, n)
		r.ETag = "an etag that is the MD5 of a secret"
		for at := range 16 {
			r.Dataset[at], r.KeyHash[at] = byte(rng.Uint32()), byte(rng.Uint32())
		}
		loc, err := s.Append(r, p)
		if err != nil {
			t.Fatal(err)
		}
		recs = append(recs, kept{r, loc, p})
	}
	read := func() {
		for _, r := range recs {
			for range 12 {
				from := rng.IntN(len(r.p))
				n := 1 + rng.IntN(min(len(r.p)-from, 1+rng.IntN(len(r.p))))
				// Room behind p, which is somebody else's.
				p := bytes.Repeat([]byte{0xa5}, n+64)
				do := s.ReadAt
				if rng.IntN(2) == 0 {
					do = s.ReadAtNow
				}
				if err := do(r.loc, len(r.p), p[:n], int64(from)); err != nil || !bytes.Equal(p[:n], r.p[from:from+n]) {
					t.Fatalf("%d bytes at %d of %d: %v", n, from, len(r.p), err)
				}
				if !bytes.Equal(p[n:], bytes.Repeat([]byte{0xa5}, 64)) {
					t.Fatalf("%d bytes at %d of %d: more was written than asked for", n, from, len(r.p))
				}
			}
		}
	}
	fsys.resident = func(string, int64) bool { return true }
	read()
	if err := s.Sync(); err != nil {
		t.Fatal(err)
	}
	for name, d := range fsys.files {
		for i, r := range recs[1:] {
			for what, b := range map[string][]byte{"payload": r.p[:16], "middle": r.p[len(r.p)/2:][:16],
				"etag": []byte("an etag"), "key hash": r.rec.KeyHash[:], "dataset": r.rec.Dataset[:]} {
				if bytes.Contains(d.data, b) {
					t.Errorf("%s of record %d is in %s", what, i+1, name)
				}
				for id, c := range idx.segs {
					if bytes.Contains(c.table, b) {
						t.Errorf("%s of record %d is in the table of segment %d", what, i+1, id)
					}
				}
			}
		}
	}
	mustClose(t, s)

	// By table and by scan.
	for range 2 {
		seen := 0
		s = mustOpen(t, "/s", o, func(x Extent, loc Loc) {
			if loc != recs[seen].loc || !same(x, recs[seen].rec) {
				t.Errorf("%v: %+v", loc, x)
			}
			seen++
		})
		if seen != len(recs) {
			t.Fatalf("%d records", seen)
		}
		read()
		if err := s.Scrub(t.Context(), func(int) {}, func(r Record, _ Loc) { t.Errorf("%+v is bad", r) }); err != nil {
			t.Fatal(err)
		}
		mustClose(t, s)
		if r, err := Check("/s", CheckOptions{FS: fsys, Index: idx, Key: testKey}); err != nil || len(r.Findings) > 0 ||
			r.Records != len(recs) {
			t.Fatalf("%+v, %v", r, err)
		}
		idx.segs = nil
	}

	// Without the key, and with another one, nothing is visited, and nothing is lost.
	before := bytes.Clone(fsys.files["/s/00000001.seg"].data)
	s = mustOpen(t, "/s", Options{FS: fsys, Logger: quiet()}, func(x Extent, _ Loc) {
		t.Errorf("%+v without the key", x)
	})
	if st := s.Stats(); st.Encrypted != len(recs) {
		t.Errorf("%+v", st)
	}
	mustClose(t, s)
	other := o
	other.Key = crypt.KeyOf([32]byte{9})
	s = mustOpen(t, "/s", other, func(x Extent, _ Loc) { t.Errorf("%+v with another key", x) })
	mustClose(t, s)
	if !bytes.Equal(before, fsys.files["/s/00000001.seg"].data) {
		t.Error("the segment was changed")
	}
}

// TestSealedTampering changes each part of an encrypted record by somebody who knows the format and makes the
// header's checksum right again: nothing but an error comes of it.
func TestSealedTampering(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 2))
	for round := range 36 {
		fsys := newMemFS()
		o := Options{FS: fsys, Key: testKey, Logger: quiet()}
		s := mustOpen(t, "/s", o, nil)
		var locs []Loc
		var recs []Record
		want := map[Record][]byte{}
		for i := range 3 {
			r, p := small(i, 2*BlockSize+100)
			loc, err := s.Append(r, p)
			if err != nil {
				t.Fatal(err)
			}
			locs, recs = append(locs, loc), append(recs, r)
			want[r] = p
		}
		mustClose(t, s)
		data := fsys.files["/s/00000001.seg"].data
		h := data[locs[1].off():]
		header, sealed := recs[1].headerLen(), sealLen(recs[1].Length)
		area, at := "", 0
		switch round % 6 {
		case 0:
			area, at = "identity", identityAt+rng.IntN(identityLen)
			h[at] ^= byte(1 + rng.IntN(255))
		case 1:
			area, at = "place in the object", 72
			h[at] ^= 0 // below: both sizes, so that the record still makes sense
			binary.LittleEndian.PutUint64(h[64:], uint64(recs[1].ObjectSize+ExtentSize))
			binary.LittleEndian.PutUint64(h[72:], ExtentSize)
		case 2:
			area, at = "seal", header+rng.IntN(sealed)
			h[at] ^= byte(1 + rng.IntN(255))
		case 3:
			area, at = "payload", locs[1].gap()+rng.IntN(recs[1].Length)
			h[at] ^= byte(1 + rng.IntN(255))
		case 4: // the first record in the place of the second, as a whole
			area = "another record"
			copy(h[32:locs[1].gap()+recs[1].Length], data[locs[0].off()+32:])
		case 5: // blocks of one record in another order
			area = "blocks"
			p := h[locs[1].gap():]
			a, b := bytes.Clone(p[:BlockSize]), bytes.Clone(p[BlockSize:2*BlockSize])
			copy(p, b)
			copy(p[BlockSize:], a)
			tags := h[header+seedLen+tagLen:]
			a, b = bytes.Clone(tags[:tagLen]), bytes.Clone(tags[tagLen:2*tagLen])
			copy(tags, b)
			copy(tags[tagLen:], a)
		}
		copy(h[12:16], []byte{0, 0, 0, 0})
		binary.LittleEndian.PutUint32(h[12:], crc(h[:header]))
		if r, err := Check("/s", CheckOptions{FS: fsys, Key: testKey}); err != nil || r.BadRecords != 1 {
			t.Errorf("%s at %d: a check says %+v, %v", area, at, r, err)
		}
		s = mustOpen(t, "/s", o, func(x Extent, loc Loc) {
			if i := slices.Index(locs, loc); i < 0 || !same(x, recs[i]) {
				t.Errorf("%s at %d: %+v was visited", area, at, x)
			}
		})
		whole := make([]byte, recs[1].Length)
		if err := s.ReadAt(locs[1], len(whole), whole, 0); !errors.Is(err, ErrCorrupt) && !errors.Is(err, ErrGone) {
			t.Errorf("%s at %d: %v", area, at, err)
		}
		for _, i := range []int{0, 2} {
			if err := s.ReadAt(locs[i], len(whole), whole, 0); err != nil || !bytes.Equal(whole, want[recs[i]]) {
				t.Errorf("%s at %d: record %d: %v", area, at, i, err)
			}
		}
		mustClose(t, s)
	}
}

// TestPlantedRecord puts a record in clear into an encrypted segment: it is not served.
func TestPlantedRecord(t *testing.T) {
	fsys := newMemFS()
	o := Options{FS: fsys, Key: testKey, Logger: quiet()}
	s := mustOpen(t, "/s", o, nil)
	loc, _ := mustAppend(t, s, 0, 1000)
	salt := s.segment(1).salt
	mustClose(t, s)
	d := fsys.files["/s/00000001.seg"]
	r, p := small(1, 500)
	off := alignUp(int64(len(d.data)), unit)
	gap := int(alignUp(int64(r.headerLen()), unit))
	d.data = append(d.data, make([]byte, int(off)+gap-len(d.data))...)
	copy(d.data[off:], appendHeader(nil, &r, p, salt, off, gap))
	d.data = append(d.data, p...)
	s = mustOpen(t, "/s", o, func(_ Extent, got Loc) {
		if got != loc {
			t.Errorf("%v was visited", got)
		}
	})
	defer mustClose(t, s)
	if err := s.ReadAt(makeLoc(1, off, gap), 500, make([]byte, 500), 0); !errors.Is(err, ErrGone) {
		t.Error(err)
	}
	if st := s.Stats(); st.Encrypted != 1 || st.Records != 1 {
		t.Errorf("%+v", st)
	}
}

// nonces remembers what was sealed by which key with which nonce.
type nonces struct {
	mu   sync.Mutex
	seen map[string]string // what was sealed
	uses int
	t    *testing.T
}

type spyAEAD struct {
	cipher.AEAD
	n    *nonces
	salt uint64
}

func (a spyAEAD) Seal(dst, nonce, plain, ad []byte) []byte {
	a.n.mu.Lock()
	defer a.n.mu.Unlock()
	a.n.uses++
	k := fmt.Sprintf("%x %x", a.salt, nonce)
	if old, ok := a.n.seen[k]; ok {
		a.n.t.Errorf("nonce %s was used for %.20q and for %.20q", k, old, plain)
	}
	a.n.seen[k] = string(plain)
	return a.AEAD.Seal(dst, nonce, plain, ad)
}

// TestNoncesDiffer appends with failures of the disk, crashes, torn tails and power failures, so that offsets of
// one segment are written again and again, and sees no nonce twice.
func TestNoncesDiffer(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 3))
	fsys := newMemFS()
	spies := &nonces{seen: map[string]string{}, t: t}
	o := Options{FS: fsys, Index: &mapIndex{}, Key: testKey, Logger: quiet(), SegmentSize: 200_000}
	rewritten := 0
	for range 60 {
		s := mustOpen(t, "/s", o, nil)
		spied := map[uint32]bool{}
		for i := range 30 {
			if g := s.active; g != nil && !spied[g.id] {
				g.key = &sealer{spyAEAD{g.key.records, spies, g.salt}, g.key.tables}
				spied[g.id] = true
			}
			fail := rng.IntN(4) == 0
			fsys.setFault(func(op, _ string, _ int64) error {
				if fail && op == "write" && rng.IntN(2) == 0 {
					return syscall.ENOSPC
				}
				return nil
			})
			r, p := small(i, 1+rng.IntN(3000))
			if _, err := s.Append(r, p); err != nil {
				if !errors.Is(err, syscall.ENOSPC) && !errors.Is(err, io.ErrShortWrite) {
					t.Fatal(err)
				}
				rewritten++
			}
			fsys.setFault(nil)
		}
		close(s.sealC) // as kill -9 would
		s.sealer.Wait()
		switch rng.IntN(3) {
		case 0:
			fsys.powerFailure(rng)
		case 1: // a torn tail
			names := fsys.names()
			d := fsys.files[names[len(names)-1]]
			d.data = d.data[:max(segHeaderLen, len(d.data)-rng.IntN(4000))]
		}
	}
	if rewritten < 100 || spies.uses < 2000 {
		t.Errorf("%d appends failed, %d seals were seen: the test shows nothing", rewritten, spies.uses)
	}
}
