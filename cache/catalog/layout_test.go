package catalog

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/lab/rig/memstore"
)

func seqOf(places ...Place) iter.Seq2[Place, error] {
	return func(yield func(Place, error) bool) {
		for _, p := range places {
			if !yield(p, nil) {
				return
			}
		}
	}
}

func shardObjects(sizes ...int64) []objstore.Object {
	var s []objstore.Object
	for i, size := range sizes {
		s = append(s, objstore.Object{Key: fmt.Sprintf("p/shard-%06d.tar", i), Size: size, ETag: fmt.Sprint("tag", i),
			ModTime: time.Unix(int64(1000+i), 5).UTC()})
	}
	return s
}

// TestLayoutModel compares a layout with a sorted list of places, built, saved and loaded.
func TestLayoutModel(t *testing.T) {
	dir := t.TempDir()
	rapid.Check(t, func(rt *rapid.T) {
		n := rapid.IntRange(1, 40).Draw(rt, "files")
		var objs []objstore.Object
		for i := range n {
			o := object(fmt.Sprintf("c%d/%03d", i%3, i))
			o.Size = rapid.SampledFrom([]int64{3, 3, 0, ExtentSize, ExtentSize + 1, 3 * ExtentSize}).Draw(rt, "size")
			objs = append(objs, o)
		}
		m, err := Build(memstore.Listing(objs...), BuildOptions{})
		if err != nil {
			rt.Fatal(err)
		}
		shards := shardObjects(make([]int64, rapid.IntRange(1, 6).Draw(rt, "shards"))...)
		places, summed := make([]Place, n), rapid.SampledFrom([]int{0, 50, 100}).Draw(rt, "percent that are summed")
		for f := range n {
			s := rapid.IntRange(0, len(shards)-1).Draw(rt, "shard")
			off := rapid.Int64Range(0, 5).Draw(rt, "off") * 512 // hard links: equal offsets occur
			places[f] = Place{Path: m.Path(f), Shard: s, Off: off}
			if rapid.IntRange(0, 99).Draw(rt, "is summed") < summed {
				places[f].Sums = rapid.SliceOfN(rapid.Uint32(), Extents(m.Size(f)), Extents(m.Size(f))).Draw(rt, "sums")
			}
			shards[s].Size = max(shards[s].Size, off+m.Size(f))
		}
		order := make([]int, n) // by rank
		for i := range order {
			order[i] = i
		}
		slices.SortFunc(order, func(x, y int) int {
			return cmp.Or(cmp.Compare(places[x].Shard, places[y].Shard), cmp.Compare(places[x].Off, places[y].Off),
				cmp.Compare(x, y))
		})
		sorted := make([]Place, n)
		for r, f := range order {
			sorted[r] = places[f]
		}
		built, err := BuildLayout(m, shards, seqOf(rapid.Permutation(places).Draw(rt, "order")...))
		if err != nil {
			rt.Fatal(err)
		}
		again, err := BuildLayout(m, shards, seqOf(sorted...))
		if err != nil || !bytes.Equal(again.data, built.data) {
			rt.Fatal("the order of the places matters", err)
		}
		path, err := saveUnder(dir, built.Version(), built.data, "layout", nil)
		if err != nil || filepath.Base(path) != built.Version() {
			rt.Fatal(path, err)
		}
		loaded, err := loadLayout(path, m, nil)
		if err != nil {
			rt.Fatal(err)
		}
		defer os.Remove(path)
		for _, l := range []*Layout{built, loaded} {
			if l.Len() != n || l.Shards() != len(shards) || l.Dataset() != m.Version() ||
				l.Version() != built.Version() || l.Verify() != nil || l.FileSize() != int64(len(built.data)) {
				rt.Fatal(l.Len(), l.Shards(), l.Dataset(), l.Version(), l.Verify(), l.FileSize())
			}
			next := 0
			for s := range shards {
				if l.Shard(s) != shards[s] {
					rt.Fatalf("shard %d: %+v", s, l.Shard(s))
				}
				from, to := l.ShardRanks(s)
				if from != next || to < from {
					rt.Fatalf("shard %d has ranks %d to %d, want from %d", s, from, to, next)
				}
				for r := from; r < to; r++ {
					if places[l.At(r)].Shard != s {
						rt.Fatalf("rank %d is in shard %d, want %d", r, places[l.At(r)].Shard, s)
					}
				}
				next = to
			}
			if next != n {
				rt.Fatalf("%d of %d ranks", next, n)
			}
			for r, f := range order {
				for x := range Extents(m.Size(f)) {
					want := uint32(0)
					if places[f].Sums != nil {
						want = places[f].Sums[x]
					}
					if got := l.Sum(f, x); got != want {
						rt.Fatalf("file %d: sum %x of extent %d; want %+v", f, got, x, places[f])
					}
				}
				shard, off := l.Where(f)
				o, at := l.Locate(f)
				if l.At(r) != f || l.Rank(f) != r || shard != places[f].Shard || off != places[f].Off ||
					o != shards[shard] || at != off {
					rt.Fatalf("file %d: rank %d, shard %d, offset %d, object %+v at %d; want %d, %+v",
						f, l.Rank(f), shard, off, o, at, r, places[f])
				}
			}
		}
		if err := errors.Join(loaded.Close(), loaded.Close(), built.Close()); err != nil {
			rt.Fatal(err)
		}
	})
}

// A layout of a set that was packed without checksums of extents, as an earlier build stored it: those of files of one
// extent are known.
func TestLayoutWithoutSumsOfExtents(t *testing.T) {
	a, b := object("a/1"), object("a/2")
	b.Size = 2 * ExtentSize
	m, err := Build(memstore.Listing(a, b), BuildOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, whole := range []uint32{0, 1, 2, 3, math.MaxUint32} {
		l, err := encodeLayout(m, shardObjects(20<<20), []uint32{0, 0}, []int64{512, 2048}, []uint32{0, 1},
			[]uint32{7, whole})
		if err != nil {
			t.Fatal(err)
		}
		if l.Sum(0, 0) != 7 || l.Sum(1, 0) != 0 || l.Sum(1, 1) != 0 {
			t.Errorf("%d: %x %x %x", whole, l.Sum(0, 0), l.Sum(1, 0), l.Sum(1, 1))
		}
	}
}

func TestBuildLayoutErrors(t *testing.T) {
	m := mustBuild(t, BuildOptions{}, "a/1", "a/2", "b/3") // 3 bytes each
	shards := shardObjects(1000, 600)
	ok := []Place{{Path: "a/1", Shard: 0, Off: 512}, {Path: "a/2", Shard: 1, Off: 597},
		{Path: "b/3", Shard: 0, Off: 997}}
	if _, err := BuildLayout(m, shards, seqOf(ok...)); err != nil {
		t.Fatal(err)
	}
	with := func(i int, p Place) []Place {
		c := slices.Clone(ok)
		c[i] = p
		return c
	}
	for name, tt := range map[string]struct {
		shards []objstore.Object
		places []Place
		want   string
	}{
		"no place":  {shards, ok[:2], `1 of 3 files have no place in a shard, "b/3"`},
		"no places": {shards, nil, `3 of 3 files`},
		"two places": {shards, append(slices.Clone(ok), Place{Path: "a/1", Shard: 1, Off: 0}),
			`"a/1" has two places: 512 in shard "p/shard-000000.tar" and 0 in shard "p/shard-000001.tar"`},
		"twice the same": {shards, append(slices.Clone(ok), ok[0]), `two places`},
		"unknown shard":  {shards, with(0, Place{Path: "a/1", Shard: 2, Off: 0}), "shard 2 of 2"},
		"negative shard": {shards, with(0, Place{Path: "a/1", Shard: -1, Off: 0}), "shard -1 of 2"},
		"beyond the shard": {shards, with(1, Place{Path: "a/2", Shard: 1, Off: 598}),
			`beyond the end of shard "p/shard-000001.tar", which has 600 bytes`},
		"far beyond":      {shards, with(1, Place{Path: "a/2", Shard: 1, Off: math.MaxInt64}), "beyond the end"},
		"negative offset": {shards, with(1, Place{Path: "a/2", Shard: 1, Off: -1}), "beyond the end"},
		"unknown file": {shards, with(0, Place{Path: "a/x", Shard: 0, Off: 0}),
			`"a/x" is in shard 0 but is not a file`},
		"a folder":     {shards, with(0, Place{Path: "a", Shard: 0, Off: 0}), "is not a file"},
		"no shards":    {nil, ok, "0 shards"},
		"shard's size": {[]objstore.Object{{Key: "s", Size: -1}}, ok, "size -1"},
		"shard's key":  {[]objstore.Object{{Size: 1}}, ok, `shard ""`},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := BuildLayout(m, tt.shards, seqOf(tt.places...)); err == nil ||
				!strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want %q", err, tt.want)
			}
		})
	}
	cut := errors.New("header of a member is damaged")
	_, err := BuildLayout(m, shards, func(yield func(Place, error) bool) {
		if yield(ok[0], nil) {
			yield(Place{}, cut)
		}
	})
	if !errors.Is(err, cut) {
		t.Error(err)
	}
}

func goldenLayout(t testing.TB) (*Manifest, *Layout) {
	t.Helper()
	m := mustBuild(t, BuildOptions{}, "a/1", "a/2", "b/c/3", "r")
	shards := shardObjects(4096, 0, 2048)
	shards[1].ModTime, shards[1].ETag = time.Time{}, ""
	l, err := BuildLayout(m, shards,
		seqOf(Place{Path: "r", Shard: 2, Off: 512}, Place{Path: "a/2", Shard: 0, Off: 1536},
			Place{Path: "a/1", Shard: 0, Off: 512}, Place{Path: "b/c/3", Shard: 2, Off: 1536}))
	if err != nil {
		t.Fatal(err)
	}
	return m, l
}

// TestLayoutGolden holds the format still.
func TestLayoutGolden(t *testing.T) {
	golden := filepath.Join("testdata", "layout-v1.bin")
	m, l := goldenLayout(t)
	if *update {
		if err := os.WriteFile(golden, l.data, 0o666); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(l.data, want) {
		t.Error("the layout of the same places has other bytes than before")
	}
	loaded, err := loadLayout(golden, m, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer loaded.Close()
	o, off := loaded.Locate(3) // files are in sample order: r, a/1, a/2, b/c/3
	if o.Key != "p/shard-000002.tar" || o.ETag != "tag2" || !o.ModTime.Equal(time.Unix(1002, 5)) || off != 1536 ||
		loaded.Verify() != nil || !loaded.Shard(1).ModTime.IsZero() {
		t.Errorf("%+v at %d, %v", o, off, loaded.Verify())
	}
}

func TestLoadLayoutDamaged(t *testing.T) {
	m, l := goldenLayout(t)
	for n := range len(l.data) {
		if _, err := parseLayout(l.data[:n], m); !errors.Is(err, ErrCorrupt) {
			t.Fatalf("cut to %d bytes: %v", n, err)
		}
		b := bytes.Clone(l.data)
		b[n] ^= 0x10
		if _, err := parseLayout(b, m); !errors.Is(err, ErrCorrupt) {
			t.Fatalf("byte %d flipped: %v", n, err)
		}
	}
	other := mustBuild(t, BuildOptions{}, "a/1", "a/2", "b/c/3", "s")
	if _, err := parseLayout(l.data, other); !errors.Is(err, ErrCorrupt) {
		t.Errorf("the layout of another dataset: %v", err)
	}
	newer := bytes.Clone(l.data)
	newer[8] = 3
	seal(newer)
	path := filepath.Join(t.TempDir(), "layout")
	if err := os.WriteFile(path, newer, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := loadLayout(path, m, nil); !errors.Is(err, ErrNewerFormat) ||
		!strings.Contains(err.Error(), "--cache-dir") {
		t.Errorf("newer: %v", err)
	}
	if err := os.Truncate(path, 10); err != nil {
		t.Fatal(err)
	}
	if _, err := loadLayout(path, m, nil); !errors.Is(err, ErrCorrupt) {
		t.Errorf("cut: %v", err)
	}
	if _, err := loadLayout(path+"x", m, nil); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("missing: %v", err)
	}
	// What is under a right checksum and a wrong version is found by Verify alone.
	b := bytes.Clone(l.data)
	b[48]++
	seal(b)
	if odd, err := parseLayout(b, m); err != nil || !errors.Is(odd.Verify(), ErrCorrupt) {
		t.Errorf("%v", err)
	}
}

// TestLayoutColumns makes each column wrong by itself, under right checksums.
func TestLayoutColumns(t *testing.T) {
	m, l := goldenLayout(t)
	at := func(col []byte) int { return len(l.data) - fromEnd(l.data, col) }
	le := binary.LittleEndian
	shards := headerLen + 2*8*(l.Shards()+1)
	first := shards + 2*8*l.Shards()
	for name, tt := range map[string]struct {
		at   int
		wide bool
		add  uint64
		want string
	}{
		"rank out of range":  {at(l.ranks), false, 4, "which has another"},
		"two of one rank":    {at(l.order), false, 1, "which has another"},
		"file out of range":  {at(l.order), false, math.MaxUint32 - 10, "which has another"},
		"offset descends":    {at(l.offs) + 8*l.At(0), true, 1100, "out of order"},
		"offset beyond":      {at(l.offs) + 8*l.At(1), true, 1 << 20, "in a shard of"},
		"offset negative":    {at(l.offs) + 8*l.At(0), true, 1 << 63, "out of order"},
		"shard too small":    {shards, true, math.MaxUint64 - 4000, "in a shard of"},
		"shard's size":       {shards, true, 1 << 63, "size -"},
		"first rank is late": {first, false, 1, "begins at rank"},
		"first rank too far": {first + 4, false, 3, "begins at rank"},
		"ranks are missing":  {first + 4*l.Shards(), false, 1, "hold 5 files of 4"},
		"key offsets":        {headerLen + 8, true, 1000, "keys"},
		"ETag offsets":       {headerLen + 8*(l.Shards()+1), true, 1, "ETags"},
	} {
		t.Run(name, func(t *testing.T) {
			b := bytes.Clone(l.data)
			if tt.wide {
				le.PutUint64(b[tt.at:], le.Uint64(b[tt.at:])+tt.add)
			} else {
				le.PutUint32(b[tt.at:], le.Uint32(b[tt.at:])+uint32(tt.add))
			}
			seal(b)
			if _, err := parseLayout(b, m); !errors.Is(err, ErrCorrupt) || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want %q", err, tt.want)
			}
		})
	}
}

// fromEnd returns how far the begin of part is from the end of whole.
func fromEnd(whole, part []byte) int {
	for i := range whole {
		if &whole[i] == &part[0] {
			return len(whole) - i
		}
	}
	panic("no part of it")
}

// FuzzLoadLayout gives parseLayout hostile bytes under right checksums. What it accepts must not make
// any method panic, and its ranks are a permutation.
func FuzzLoadLayout(f *testing.F) {
	m, l := goldenLayout(f)
	f.Add(l.data, uint16(0), uint64(0))
	addTampered(f, l.data, 80)
	f.Fuzz(func(t *testing.T, data []byte, at uint16, add uint64) {
		data = tampered(data, at, add)
		l, err := parseLayout(data, m)
		if err != nil {
			return
		}
		seen := make(map[int]bool)
		for s := range l.Shards() {
			from, to := l.ShardRanks(s)
			for r := from; r < to; r++ {
				file := l.At(r)
				shard, off := l.Where(file)
				o, _ := l.Locate(file)
				if seen[file] || l.Rank(file) != r || shard != s || off < 0 || off+m.Size(file) > o.Size {
					t.Fatalf("file %d at rank %d: shard %d, offset %d of %d", file, r, shard, off, o.Size)
				}
				seen[file] = true
			}
		}
		if len(seen) != m.Len() {
			t.Fatalf("%d of %d files", len(seen), m.Len())
		}
		_ = l.Verify()
	})
}

// TestCatalogLayouts keeps manifest and layout together through the catalog.
func TestCatalogLayouts(t *testing.T) {
	dir := t.TempDir()
	c, err := Open(dir, Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	m, l := goldenLayout(t)
	if err := c.SetManifest("s", mustBuild(t, BuildOptions{}, "x"), l, 0); err == nil ||
		!strings.Contains(err.Error(), "the layout belongs to") {
		t.Error(err)
	}
	set := func() {
		t.Helper()
		if err := c.SetManifest("s", m, l, 0); err != nil {
			t.Fatal(err)
		}
	}
	get := func() error {
		m2, l2, err := c.Manifest("s")
		if err != nil {
			return err
		}
		if l2 == nil || l2.Version() != l.Version() || m2.Version() != m.Version() {
			t.Fatal("another version")
		}
		return errors.Join(l2.Close(), m2.Close())
	}
	set()
	if err := get(); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "layouts", l.Version())
	for name, damage := range map[string]func() error{
		"removed": func() error { return os.Remove(path) },
		"cut":     func() error { return os.Truncate(path, 200) },
		"another's": func() error {
			places := seqOf(Place{Path: "r", Shard: 2, Off: 512}, Place{Path: "a/2", Shard: 0, Off: 1536},
				Place{Path: "a/1", Shard: 0, Off: 512}, Place{Path: "b/c/3", Shard: 2, Off: 1024})
			o, err := BuildLayout(m, l.shards, places)
			return errors.Join(err, os.Remove(path), os.WriteFile(path, o.data, 0o600))
		},
	} {
		if err := damage(); err != nil {
			t.Fatal(err)
		}
		if err := get(); !errors.Is(err, ErrNoManifest) {
			t.Errorf("%s: %v", name, err)
		}
		set()
		if err := get(); err != nil {
			t.Errorf("%s, then set again: %v", name, err)
		}
	}
	// The layout goes with its source, unless it is in use.
	if err := c.SetManifest("s", m, nil, 0); err != nil {
		t.Fatal(err)
	}
	if n, err := c.GC(l.Version()); n != 0 || err != nil {
		t.Error(n, err)
	}
	if n, err := c.GC(); n != 1 || err != nil {
		t.Error(n, err)
	}
	if m2, l2, err := c.Manifest("s"); err != nil || l2 != nil {
		t.Error(l2, err)
	} else if err := m2.Close(); err != nil {
		t.Error(err)
	}
}
