package e2e

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/shoalfs/shoal/lab/rig/proxy"
	"github.com/shoalfs/shoal/loader/feedclient"
	"github.com/shoalfs/shoal/loader/feedpb"
)

// openFeed opens a session that ends with the test.
func openFeed(t *testing.T, addr string, o *feedpb.Open) *feedclient.Stream {
	t.Helper()
	c, err := feedclient.Dial(addr, feedclient.Security{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	o.Credits = 4
	s, err := c.Open(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

// plane returns the bytes of one array of a batch.
func plane(t *testing.T, b *feedclient.Batch, name string) []byte {
	t.Helper()
	for _, p := range b.Header.GetPlanes() {
		if p.GetName() == name {
			return b.Bytes()[p.GetOffset() : p.GetOffset()+p.GetLength()]
		}
	}
	t.Fatalf("a batch without %s", name)
	return nil
}

// TestPackedTokensOverS3 packs documents that lie in a store into rows: each document comes whole, once an epoch,
// over two ranks, and over a resume.
func TestPackedTokensOverS3(t *testing.T) {
	const docs, length, batch = 300, 64, 4
	dir := t.TempDir()
	seed := uint64(time.Now().UnixNano())
	rng := rand.New(rand.NewPCG(seed, 5))
	want := make([][]uint16, docs)
	for i := range want {
		var b []byte
		for range rng.IntN(length + 1) {
			v := uint16(rng.Uint32())
			want[i], b = append(want[i], v), binary.LittleEndian.AppendUint16(b, v)
		}
		write(t, filepath.Join(dir, "docs", fmt.Sprintf("%04d.bin", i)), b)
	}
	_, env := far(t, proxy.Options{Latency: time.Millisecond})
	addr, _ := serve(t, env, bucket(t, dir), "--samples", "*.bin")
	seen := map[uint64]int{}
	count := func(b *feedclient.Batch) {
		data, segment, position, documents := plane(t, b, "data"), plane(t, b, "segment_ids"), plane(t, b, "position"),
			plane(t, b, "documents")
		most := len(documents) / 8 / b.Rows()
		for r := range b.Rows() {
			at := 0
			for d := range most {
				doc := int64(binary.LittleEndian.Uint64(documents[8*(r*most+d):]))
				if doc < 0 || !b.Valid(r) {
					break
				}
				seen[uint64(doc)]++
				for k, v := range want[doc] {
					i := r*length + at
					if got := binary.LittleEndian.Uint64(data[8*i:]); got != uint64(v) {
						t.Fatalf("seed %d: document %d, token %d is %d, want %d", seed, doc, k, got, v)
					}
					if s, p := binary.LittleEndian.Uint32(segment[4*i:]),
						binary.LittleEndian.Uint32(position[4*i:]); int(s) != d+1 || int(p) != k {
						t.Fatalf("seed %d: document %d, token %d has segment %d and position %d", seed, doc, k, s, p)
					}
					at++
				}
			}
			for ; at < length && b.Valid(r); at++ {
				if s := binary.LittleEndian.Uint32(segment[4*(r*length+at):]); s != 0 {
					t.Fatalf("seed %d: padding has segment %d", seed, s)
				}
			}
		}
		b.Release()
	}
	read := func(s *feedclient.Stream, most int) {
		for n := 0; n < most; n++ {
			b, err := s.Next()
			if errors.Is(err, io.EOF) {
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			count(b)
		}
	}
	check := func(what string) {
		for i := range want {
			if seen[uint64(i)] != 1 {
				t.Errorf("seed %d, %s: document %d came %d times", seed, what, i, seen[uint64(i)])
			}
		}
		clear(seen)
	}
	open := func(rank, world uint32, state string) *feedclient.Stream {
		o := &feedpb.Open{Batch: batch, Rank: rank, World: world, Transform: "packed(64, 'uint16')", Tail: "pad",
			Epochs: 1, Seed: 3, State: state, Session: t.Name()}
		return openFeed(t, addr, o)
	}
	for rank := range uint32(2) {
		read(open(rank, 2, ""), 1<<30)
	}
	check("two ranks")

	s := open(0, 1, "")
	read(s, 5)
	state := s.State()
	s.Close()
	resumed := open(0, 1, state)
	var st struct {
		Feed struct {
			List []struct {
				Packing struct {
					Rows, Documents int
					Tokens, Padding int64
				}
			} `json:"session_list"`
		}
	}
	if err := json.Unmarshal([]byte(mustShoal(t, nil, "stat", addr, "--json")), &st); err != nil {
		t.Fatal(err)
	}
	read(resumed, 1<<30)
	check("resumed")
	found := false
	for _, l := range st.Feed.List {
		if p := l.Packing; p.Documents == docs && p.Tokens+p.Padding == int64(p.Rows)*length &&
			p.Rows == int(resumed.Opened().GetSamples()) {
			found = true
		}
	}
	if !found {
		t.Errorf("the stats tell of no packing: %+v", st)
	}
	_, errs, code := shoal(t, nil, "feed", addr, "--transform", "packed(8, 'uint16')")
	if code == 0 || !strings.Contains(errs, "long='cut'") {
		t.Errorf("documents longer than a row: exit %d, %s", code, errs)
	}

	// One document a row, in buckets of about one length.
	rows := 0
	buckets := &feedpb.Open{Batch: 16, World: 1,
		Transform: "tokens(64, 'uint16', pad=-1)", Order: "buckets", Tail: "uneven", Epochs: 1}
	consume(t, addr, buckets, func(b *feedclient.Batch, planes map[string][]byte) {
		lengths, data := planes["length"], planes["data"]
		for r := range b.Rows() {
			doc := want[b.ID(r)]
			if n := binary.LittleEndian.Uint32(lengths[4*r:]); int(n) != len(doc) {
				t.Fatalf("document %d has length %d, want %d", b.ID(r), n, len(doc))
			}
			for k := range length {
				v := int64(-1)
				if k < len(doc) {
					v = int64(doc[k])
				}
				if got := int64(binary.LittleEndian.Uint64(data[8*(r*length+k):])); got != v {
					t.Fatalf("document %d, token %d is %d, want %d", b.ID(r), k, got, v)
				}
			}
			rows++
		}
	})
	if rows != docs {
		t.Errorf("%d rows, want %d", rows, docs)
	}
}

// TestCSVOverS3 feeds the rows of CSV objects in a store, as they are and as numbers that were fitted over all.
func TestCSVOverS3(t *testing.T) {
	const objects, perObject = 3, 150
	dir, cache := t.TempDir(), t.TempDir()
	var rows []string
	var ages []float64
	cities := []string{"Kiel", "Ulm, Donau", "two\nlines"}
	for o := range objects {
		text := "age,city,y\r\n"
		for i := range perObject {
			age := float64(20 + (i*7+o*13)%50)
			row := fmt.Sprintf("%g,%q,%d", age, cities[i%3], i%5)
			row = strings.ReplaceAll(row, `\n`, "\n")
			rows, ages = append(rows, row), append(ages, age)
			text += row + "\r\n"
		}
		write(t, filepath.Join(dir, fmt.Sprintf("part-%d.csv", o)), []byte(text))
	}
	_, env := far(t, proxy.Options{Latency: time.Millisecond})
	source := bucket(t, dir)
	addr, mnt := serve(t, env, source, "--samples", "rows", "--cache-dir", cache)
	if b, err := os.ReadFile(filepath.Join(mnt, "part-1.csv", "000000000005.row")); err != nil ||
		string(b) != rows[perObject+5] {
		t.Errorf("a row in the mount: %q, %v", b, err)
	}

	n := 0
	consume(t, addr, &feedpb.Open{Batch: 32, World: 1, Tail: "uneven", Epochs: 1},
		func(b *feedclient.Batch, _ map[string][]byte) {
			n++
			for r := range b.Rows() {
				if got := string(b.Row(r)); got != rows[b.ID(r)] {
					t.Fatalf("row %d is %q, want %q", b.ID(r), got, rows[b.ID(r)])
				}
			}
		})
	if want := (len(rows) + 31) / 32; n != want {
		t.Errorf("%d batches, want %d", n, want)
	}

	mean, m2 := 0.0, 0.0
	for _, a := range ages {
		mean += a / float64(len(ages))
	}
	for _, a := range ages {
		m2 += (a - mean) * (a - mean) / float64(len(ages))
	}
	const spec = "table()|zscore('age')|onehot('city')|label('y')"
	read := func(addr string) (hash string) {
		seen := map[int64]bool{}
		o := &feedpb.Open{Batch: 50, World: 1, Tail: "uneven", Epochs: 1, Transform: spec}
		opened := consume(t, addr, o, func(b *feedclient.Batch, planes map[string][]byte) {
			data := planes["data"]
			for r := range b.Rows() {
				id := int(b.ID(r))
				seen[int64(id)] = true
				want := [4]float32{float32((ages[id] - mean) / math.Sqrt(m2))}
				want[1+id%perObject%3] = 1
				for k, w := range want {
					if got := math.Float32frombits(binary.LittleEndian.Uint32(data[4*(4*r+k):])); math.Abs(
						float64(got-w)) > 1e-6 {
						t.Fatalf("row %d, number %d is %v, want %v", id, k, got, w)
					}
				}
				if b.Label(r) != int64(id%perObject%5) {
					t.Fatalf("row %d has label %d", id, b.Label(r))
				}
			}
		})
		if len(seen) != len(rows) {
			t.Errorf("%d rows, want %d", len(seen), len(rows))
		}
		return opened.GetTransformHash()
	}
	hash := read(addr)
	fits, err := filepath.Glob(filepath.Join(cache, "fits", "*.json"))
	if err != nil || len(fits) != 1 {
		t.Fatalf("fits %v, %v", fits, err)
	}
	b, err := os.ReadFile(fits[0])
	if err != nil || !json.Valid(b) || !strings.Contains(string(b), `"Ulm, Donau"`) {
		t.Errorf("the fit is %s, %v", b, err)
	}
	umount(t, mnt)
	addr, _ = serve(t, env, source, "--samples", "rows", "--cache-dir", cache)
	if again := read(addr); again != hash {
		t.Errorf("after a restart the transform's hash is %s, it was %s", again, hash)
	}
	_, errs, code := shoal(t, nil, "feed", addr, "--transform", "table()|zscore('agee')")
	if code == 0 || !strings.Contains(errs, "did you mean age?") {
		t.Errorf("a column that is not there: exit %d, %s", code, errs)
	}
}
