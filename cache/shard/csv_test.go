package shard

import (
	"bytes"
	"context"
	"encoding/csv"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/lab/rig/memstore"
)

// scanAll cuts text in chunks of random lengths.
func scanAll(rng *rand.Rand, text []byte) (rows []string, at []int64, err error) {
	p := rowScanner{comma: ',', row: func(from, to int64, row []byte) bool {
		if !bytes.Equal(text[from:to], row) {
			rows = append(rows, fmt.Sprintf("%q at %d to %d is %q", row, from, to, text[from:to]))
			return false
		}
		rows, at = append(rows, string(row)), append(at, from)
		return true
	}}
	for rest := text; len(rest) > 0; {
		n := min(len(rest), 3+rng.IntN(40))
		if err := p.feed(rest[:n]); err != nil {
			return rows, at, err
		}
		rest = rest[n:]
	}
	return rows, at, p.end()
}

// TestRowsEqualCSV writes random records by encoding/csv and finds each row whole, wherever chunks end.
func TestRowsEqualCSV(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	rng := rand.New(rand.NewPCG(seed, 3))
	pieces := []string{"a", "7", ",", "\"", "\n", " ", "é", "x\"y", "longer text", ""}
	for range 300 {
		var want [][]string
		var text bytes.Buffer
		w := csv.NewWriter(&text)
		w.UseCRLF = rng.IntN(2) == 0
		for range rng.IntN(30) {
			rec := make([]string, 3)
			for i := range rec {
				for range rng.IntN(4) {
					rec[i] += pieces[rng.IntN(len(pieces))]
				}
			}
			want = append(want, rec)
			_ = w.Write(rec)
		}
		w.Flush()
		b := text.Bytes()
		if rng.IntN(3) == 0 { // no line end after the last row
			b = bytes.TrimRight(b, "\r\n")
		}
		rows, _, err := scanAll(rng, b)
		if err != nil || len(rows) != len(want) {
			t.Fatalf("seed %d: %d rows of %d, %v\n%q", seed, len(rows), len(want), err, b)
		}
		for i, row := range rows {
			got, err := csv.NewReader(strings.NewReader(row)).Read()
			for k := range want[i] { // the reader makes \n of \r\n within quotes, the writer the other way round
				want[i][k] = strings.ReplaceAll(want[i][k], "\r\n", "\n")
			}
			if err != nil || !slices.Equal(got, want[i]) {
				t.Fatalf("seed %d: row %d is %q (%v), want %q", seed, i, got, err, want[i])
			}
		}
	}
}

func TestRowScannerEdges(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for text, want := range map[string][]string{
		"":                                {},
		"a,b\n":                           {"a,b"},
		"\xef\xbb\xbfa,b\r\n\r\n\n1,2":    {"a,b", "1,2"},
		"5\" pipe,x\n1,\"\"\n":            {"5\" pipe,x", "1,\"\""},
		"\"a\nb\",\"c\"\"\n\"\r\n\"\",\n": {"\"a\nb\",\"c\"\"\n\"", "\"\","},
	} {
		rows, _, err := scanAll(rng, []byte(text))
		if err != nil || !slices.Equal(rows, want) && len(rows)+len(want) > 0 {
			t.Errorf("%q: %q, %v, want %q", text, rows, err, want)
		}
	}
	if _, _, err := scanAll(rng, []byte("a\n\"b\nc\n")); err == nil || !strings.Contains(err.Error(), "byte 2") {
		t.Errorf("quote without end: %v", err)
	}
}

// TestRows reads objects larger than a GET, in a store.
func TestRows(t *testing.T) {
	mem := memstore.New()
	const rows = 120_000
	var want []string
	for k := range 6 {
		b := []byte("id,text\n")
		for i := range rows * (k % 2) {
			row := fmt.Sprintf("%d,\"line one %d\nline two, of object %d, and some more text to make it long\"",
				i, i, k)
			want = append(want, row)
			b = append(append(b, row...), '\n')
		}
		mem.PutBytes(fmt.Sprintf("t/%d.csv", k), b)
	}
	mem.PutBytes("t/readme.md", []byte("no rows"))
	open := func() *Rows {
		s, err := OpenRows(t.Context(), mem, objstore.Source{Prefix: "t/"}, OpenOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	s := open()
	n, columns := 0, 0
	for m, err := range s.Members(t.Context()) {
		if err != nil {
			t.Fatal(err)
		}
		if strings.HasSuffix(m.Path, "/"+ColumnsName) {
			columns++
			continue
		}
		if n%9973 == 0 || n == len(want)-1 {
			b := make([]byte, m.Size)
			if err := mem.ReadAt(t.Context(), s.objects[m.Shard], b, m.Off); err != nil || string(b) != want[n] {
				t.Fatalf("%s: %q, %v, want %q", m.Path, b, err, want[n])
			}
		}
		n++
	}
	if n != len(want) || columns != 6 {
		t.Errorf("%d rows and %d times columns, want %d and 6", n, columns, len(want))
	}
	for range s.Members(t.Context()) {
		break // stops and awaits what it began
	}
	mem.PutBytes("t/3.csv", []byte("text,id\n1,2\n"))
	if err := lastError(t.Context(), open()); err == nil || !strings.Contains(err.Error(), "t/3.csv has the columns") {
		t.Errorf("other columns: %v", err)
	}
	mem.PutBytes("t/3.csv", nil)
	if err := lastError(t.Context(), open()); err == nil || !strings.Contains(err.Error(), "it is empty") {
		t.Errorf("empty object: %v", err)
	}
	for text, want := range map[string]string{
		"\xff\xfei\x00d\x00\n\x001\x00\n\x00": "UTF-16", // as spreadsheets export it
		"\x1f\x8b\x08\x01abc\ndef":            "compressed with gzip",
		"id,text\r1,a\r2,b\r":                 "CR alone",
	} { // it is the first, and must not decide what the others' columns are
		mem.PutBytes("t/3.csv", []byte("id,text\n1,2\n"))
		mem.PutBytes("t/+.csv", []byte(text))
		if err := lastError(t.Context(), open()); err == nil || !strings.Contains(err.Error(), "t/+.csv: ") ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v", text, err)
		}
	}
	mem.PutBytes("t/+.csv", []byte("id,\"a\rb\"\n1,2\n"))
	if err := lastError(t.Context(), open()); err == nil || !strings.Contains(err.Error(), "has the columns") {
		t.Errorf("a CR within quotes: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := lastError(ctx, s); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	if _, err := OpenRows(t.Context(), mem, objstore.Source{Prefix: "u/"}, OpenOptions{}); err == nil {
		t.Error("a prefix without objects")
	}
}

func lastError(ctx context.Context, s *Rows) (last error) {
	for _, err := range s.Members(ctx) {
		last = err
	}
	return last
}
