package segment

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
)

// oldLayout makes flat segments: number i has records of dataset i%2+1.
func oldLayout(t testing.TB, dir string, segments int) map[Record][]byte {
	t.Helper()
	want := make(map[Record][]byte)
	s := mustOpen(t, dir, Options{SegmentSize: segHeaderLen}, nil)
	for i := range segments {
		r, p := small(i, 1000+i)
		r.Dataset = [16]byte{15: byte(i%2 + 1)}
		if _, err := s.Append(r, p); err != nil {
			t.Fatal(err)
		}
		want[r] = p
	}
	mustClose(t, s)
	return want
}

// readAllOf opens a folder and compares each record with what was written.
func readAllOf(t testing.TB, dir string, want map[Record][]byte) (n int) {
	t.Helper()
	locs := make(map[Loc]Record)
	s := mustOpen(t, dir, Options{}, func(r Record, loc Loc) { locs[loc] = r })
	defer mustClose(t, s)
	for loc, r := range locs {
		p := make([]byte, r.Length)
		if err := s.ReadAt(loc, r.Length, p, 0); err != nil || !bytes.Equal(p, want[r]) || filepath.Base(dir) != fmt.Sprintf("%x", r.Dataset) {
			t.Errorf("%s %v: %v", dir, loc, err)
		}
	}
	return len(locs)
}

func TestMigrate(t *testing.T) {
	dir := t.TempDir()
	one, two := filepath.Join(dir, fmt.Sprintf("%032x", 1)), filepath.Join(dir, fmt.Sprintf("%032x", 2))
	if n, err := Migrate(filepath.Join(dir, "none")); n != 0 || err != nil {
		t.Fatal(n, err)
	}
	if n, err := Migrate(dir); n != 0 || err != nil {
		t.Fatal(n, err)
	}
	want := oldLayout(t, dir, 6)
	// No record, no header, another header's damage, a foreign file.
	empty := appendSegmentHeader(nil, 7, 9)
	for name, b := range map[string][]byte{"00000007.seg": empty, "00000008.seg": nil, "00000009.seg": []byte("x"), "notes.txt": []byte("mine")} {
		if err := os.WriteFile(filepath.Join(dir, name), b, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	first := filepath.Join(dir, "00000001.seg")
	b, err := os.ReadFile(first)
	if err != nil {
		t.Fatal(err)
	}
	b[20] ^= 1
	if err := os.WriteFile(first, b, 0o644); err != nil {
		t.Fatal(err)
	}
	// The dataset's folder has that number already.
	if err := os.Mkdir(two, 0o777); err != nil {
		t.Fatal(err)
	}
	taken := filepath.Join(two, "00000002.seg")
	if err := os.WriteFile(taken, appendSegmentHeader(nil, 2, 5), 0o644); err != nil {
		t.Fatal(err)
	}
	if n, err := Migrate(dir); n != 6 || err != nil {
		t.Fatal(n, err)
	}
	if n, err := Migrate(dir); n != 0 || err != nil {
		t.Fatal(n, err)
	}
	names, _ := osFS{}.ReadDir(dir)
	if fmt.Sprint(names) != fmt.Sprint([]string{filepath.Base(one), filepath.Base(two), "notes.txt"}) {
		t.Error(names)
	}
	names, _ = osFS{}.ReadDir(two)
	if fmt.Sprint(names) != "[00000002.seg 00000003.seg 00000004.seg 00000006.seg]" {
		t.Error(names)
	}
	if n := readAllOf(t, one, want) + readAllOf(t, two, want); n != 6 {
		t.Errorf("%d records", n)
	}
	for _, d := range []string{one, two} {
		if r, err := Check(d, CheckOptions{}); err != nil || !r.Clean() || len(r.Findings) > 0 {
			t.Errorf("%+v, %v", r, err)
		}
	}
}

func TestMigrateRefuses(t *testing.T) {
	dir := t.TempDir()
	oldLayout(t, dir, 2)
	path := filepath.Join(dir, "00000002.seg")
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	b[8] = 2
	binary.LittleEndian.PutUint32(b[60:], crc(b[:60]))
	if err := os.WriteFile(path, b, 0o644); err != nil {
		t.Fatal(err)
	}
	if n, err := Migrate(dir); n != 0 || !errors.Is(err, ErrNewerFormat) {
		t.Error(n, err)
	}
	if names, _ := (osFS{}).ReadDir(dir); len(names) != 2 {
		t.Error(names)
	}
}

// TestGolden reads a segment that version 1 wrote before there was a later change.
func TestGolden(t *testing.T) {
	dir := t.TempDir()
	b, err := os.ReadFile("testdata/golden/00000001.seg")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "00000001.seg"), b, 0o644); err != nil {
		t.Fatal(err)
	}
	if r, err := Check(dir, CheckOptions{Repair: true}); err != nil || len(r.Findings) != 0 || r.Records != 6 {
		t.Fatalf("%+v, %v", r, err)
	}
	lengths := []int{1, 63, 64, 5000, 300, BlockSize + 5}
	i := 0
	locs := make([]Loc, len(lengths))
	s := mustOpen(t, dir, Options{}, func(r Record, loc Loc) {
		want, _ := small(i, lengths[i])
		if i == 5 {
			want.Offset, want.ObjectSize, want.ETag = ExtentSize, 10<<20, ""
		}
		if r != want {
			t.Errorf("record %d is %+v, want %+v", i, r, want)
		}
		locs[i] = loc
		i++
	})
	defer mustClose(t, s)
	if i != len(lengths) || s.Stats().Recovery != (Recovery{Scanned: 6}) {
		t.Fatalf("%d records, %+v", i, s.Stats())
	}
	for i, n := range lengths {
		_, want := small(i, n)
		if i == 5 {
			for j := range want {
				want[j] = byte(j / 1000)
			}
		}
		p := make([]byte, n)
		if err := s.ReadAt(locs[i], n, p, 0); err != nil || !bytes.Equal(p, want) {
			t.Errorf("record %d: %v", i, err)
		}
	}
	// It is written today byte for byte as it was.
	again := appendSegmentHeader(nil, 1, binary.LittleEndian.Uint64(b[16:]))
	if !bytes.Equal(again, b[:segHeaderLen]) {
		t.Error("another segment header")
	}
	r, p := small(3, 5000)
	if h := appendHeader(nil, &r, p, s.segment(1).salt, locs[3].off(), locs[3].gap()); !bytes.Equal(h, b[locs[3].off():][:len(h)]) {
		t.Error("another record header")
	}
}
