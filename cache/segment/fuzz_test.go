package segment

import (
	"bytes"
	"encoding/binary"
	"testing"
)

// FuzzHeader gives parseHeader hostile bytes under a right checksum. What it takes must be inside the segment, and
// be written again as it was.
func FuzzHeader(f *testing.F) {
	for i, n := range []int{1, 5000, BlockSize, 3*BlockSize + 1} {
		r, p := small(i, n)
		r.Offset = int64(i) * ExtentSize
		r.ObjectSize += r.Offset
		f.Add(appendHeader(nil, &r, p, 7, 640, int(alignUp(int64(r.headerLen()), unit))), int64(640), int64(1<<20))
	}
	f.Fuzz(func(t *testing.T, b []byte, off, size int64) {
		b = bytes.Clone(b)
		le := binary.LittleEndian
		if len(b) >= recHeaderLen {
			le.PutUint64(b[16:], 7)
			le.PutUint64(b[24:], uint64(off))
			if n := le.Uint32(b[8:]); n >= recHeaderLen && int64(n) <= int64(len(b)) {
				copy(b[12:16], []byte{0, 0, 0, 0})
				le.PutUint32(b[12:], crc(b[:n]))
			}
		}
		if off < 0 || off > maxSegmentSize { // of a caller
			return
		}
		h, err := parseHeader(b, 7, off, size)
		if err != nil {
			return
		}
		r := mustRecord(&h)
		if r.check() != nil || h.gap < r.headerLen() || h.gap > maxGap || off+int64(h.gap)+int64(r.Length) > size ||
			len(h.crcs) != 4*blocks(r.Length) {
			t.Fatalf("%+v of a segment of %d bytes", h, size)
		}
		again := appendHeader(nil, &r, make([]byte, r.Length), 7, off, h.gap)
		n := len(again) - len(h.crcs)
		for i, c := range again[:n] {
			padding := i >= recHeaderLen+len(r.ETag) || i >= 92 && i < 96
			if i >= 12 && i < 16 || i >= 6 && i < 8 && h.encrypted || padding {
				continue
			}
			if b[i] != c {
				t.Fatalf("byte %d is %x, written again %x", i, b[i], c)
			}
		}
	})
}

// FuzzSegmentHeader gives hostile segment headers under a right checksum.
func FuzzSegmentHeader(f *testing.F) {
	f.Add(appendSegmentHeader(nil, 1, 99), uint32(1))
	f.Add(appendSegmentHeader(nil, 2, 99), uint32(1))
	f.Add([]byte(segmentMagic), uint32(0))
	f.Fuzz(func(t *testing.T, b []byte, id uint32) {
		b = bytes.Clone(b)
		if len(b) >= segHeaderLen {
			binary.LittleEndian.PutUint32(b[60:], crc(b[:60]))
		}
		salt, err := parseSegmentHeader(b, id)
		if err == nil && binary.LittleEndian.Uint64(b[16:]) != salt {
			t.Fatal(salt)
		}
	})
}

// FuzzCheck repairs hostile files. What comes of it must check clean, and open.
func FuzzCheck(f *testing.F) {
	fsys := newMemFS()
	s := mustOpen(f, "/s", Options{FS: fsys}, nil)
	var locs []Loc
	for i := range 5 {
		loc, _ := mustAppend(f, s, i, 10+200*i)
		locs = append(locs, loc)
	}
	mustClose(f, s)
	data := fsys.files["/s/00000001.seg"].data
	f.Add(data)
	for _, at := range []int64{0, 20, locs[0].off(), locs[1].off() + 30, locs[2].off() + int64(locs[2].gap()),
		locs[4].off() + 8} {
		b := bytes.Clone(data)
		b[at] ^= 0x55
		f.Add(b)
		f.Add(b[:at])
	}
	b := bytes.Clone(data)
	encrypt(b, locs[3])
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		fsys := newMemFS()
		fsys.files["/s/00000001.seg"] = &memData{data: bytes.Clone(b)}
		r, err := Check("/s", CheckOptions{FS: fsys, Repair: true})
		if err != nil || r.Newer == 0 && r.Repaired != len(r.Findings) {
			t.Fatalf("%v, %v", r.Findings, err)
		}
		again, err := Check("/s", CheckOptions{FS: fsys})
		if err != nil || !again.Clean() || again.Records != r.Records || again.Encrypted != r.Encrypted {
			t.Fatalf("%+v after %+v, %v", again, r, err)
		}
		if r.Newer > 0 {
			return
		}
		seen := 0
		s := mustOpen(t, "/s", Options{FS: fsys}, func(Extent, Loc) { seen++ })
		defer mustClose(t, s)
		if seen != r.Records || s.Stats().Encrypted != r.Encrypted {
			t.Fatalf("%d records, %+v", seen, r)
		}
		if err := s.Scrub(t.Context(), func(int) {}, func(_ Record, loc Loc) {
			t.Errorf("%v is bad", loc)
		}); err != nil {
			t.Fatal(err)
		}
	})
}
