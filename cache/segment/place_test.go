package segment

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"testing"
)

// A place is given once all blocks were verified, and its bytes stay those of the record, though the segment is
// dropped.
func TestPlace(t *testing.T) {
	const length = 3*BlockSize + 100
	dir := t.TempDir()
	s := mustOpen(t, dir, Options{}, nil)
	mustAppend(t, s, 1, 5000)
	loc, want := mustAppend(t, s, 2, length)
	for _, r := range [][2]int64{{0, BlockSize}, {2 * BlockSize, BlockSize}, {3*BlockSize + 50, 50},
		{BlockSize + 7, 1}} {
		if _, ok := s.Place(loc, length, false); ok {
			t.Fatalf("a place before %v was read", r)
		}
		if err := s.ReadAt(loc, length, make([]byte, r[1]), r[0]); err != nil {
			t.Fatal(err)
		}
	}
	p, ok := s.Place(loc, length, false)
	if !ok {
		t.Fatal("no place of a verified record")
	}
	f, err := openSegment(s, p)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := s.DropSegment(loc.Segment()); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, length)
	if _, err := f.ReadAt(got, p.Off); err != nil && !errors.Is(err, io.EOF) || !bytes.Equal(got, want) {
		t.Errorf("other bytes, %v", err)
	}
	if _, ok := s.Place(loc, length, false); ok {
		t.Error("a place in a dropped segment")
	}
	if _, err := openSegment(s, p); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a dropped segment: %v", err)
	}
	mustClose(t, s)
}

// Encrypted records have no place, and a segment that has another's number is none of a place.
func TestNoPlace(t *testing.T) {
	s := mustOpen(t, t.TempDir(), Options{Key: testKey}, nil)
	loc, _ := mustAppend(t, s, 1, 5000)
	if err := s.ReadAt(loc, 5000, make([]byte, 5000), 0); err != nil {
		t.Fatal(err)
	}
	if _, ok := s.Place(loc, 5000, true); ok {
		t.Error("a place of an encrypted record")
	}
	mustClose(t, s)
	var places []Place
	for i := range 2 {
		s := mustOpen(t, t.TempDir(), Options{}, nil)
		loc, _ := mustAppend(t, s, i, 5000)
		p, ok := s.Place(loc, 5000, true)
		if places = append(places, p); !ok || p.Segment != places[0].Segment {
			t.Fatalf("%+v", places)
		}
		if f, err := openSegment(s, places[0]); i == 0 && err == nil {
			_ = f.Close()
		} else if i == 0 || !errors.Is(err, errOther) {
			t.Errorf("%d: %v", i, err)
		}
		mustClose(t, s)
	}
}

var errOther = errors.New("another segment")

// openSegment does what a client of internal/shortcut does.
func openSegment(s *Store, p Place) (*os.File, error) {
	f, err := os.Open(filepath.Join(s.dir, fmt.Sprintf("%08d.seg", p.Segment)))
	if err != nil {
		return nil, err
	}
	var salt [8]byte
	if _, err = f.ReadAt(salt[:], 16); err == nil && binary.LittleEndian.Uint64(salt[:]) != p.Salt {
		err = errOther
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}
