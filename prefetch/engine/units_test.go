package engine

import (
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/shoalfs/shoal/cache"
	"github.com/shoalfs/shoal/cache/cachedir"
	"github.com/shoalfs/shoal/cache/segment"
	"github.com/shoalfs/shoal/prefetch"
)

// A file's units depend on its path alone, so a new listing moves none.
func TestUnitsOfFiles(t *testing.T) {
	dir := t.TempDir()
	write := func(name string, n int64) {
		t.Helper()
		name = filepath.Join(dir, "c", name)
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, nil, 0o644); err != nil {
			t.Fatal(err)
		}
		if err := os.Truncate(name, n); err != nil {
			t.Fatal(err)
		}
	}
	write("1.jpg", 100)
	write("2.jpg", cache.ExtentSize+1)
	e := open(t, HostConfig{Options: cachedir.Options{Path: t.TempDir(), Size: 64 << 20, Memory: 128 << 20}},
		Config{Source: "file://" + dir})
	defer closeEngine(t, e)
	check := func(samples int) {
		t.Helper()
		d := e.Dataset()
		if d.Len() != samples {
			t.Fatalf("%d samples, want %d", d.Len(), samples)
		}
		unit := d.Units()
		for i := range samples {
			h := sha256.Sum256([]byte(d.Path(i)))
			id := segment.IDOf([16]byte(h[:16]), d.v.manifest.Size(d.v.samples.File(i)),
				d.v.manifest.ETag(d.v.samples.File(i)))
			if got, want := unit(i), id.Uint64(); got != want {
				t.Errorf("%s: unit %x, want %x", d.Path(i), got, want)
			}
			if of := units(d.v.manifest, nil); of(d.v.samples.File(i), 1) == unit(i) {
				t.Errorf("%s: two extents are one unit", d.Path(i))
			}
		}
	}
	check(2)
	before := e.Dataset()
	write("0.jpg", 10)
	if changed, err := e.Refresh(t.Context()); !changed || err != nil {
		t.Fatal(changed, err)
	}
	check(3)
	if e.Dataset().Source() != before.Source() {
		t.Error("a new listing is another source for owners")
	}
}

// Files that begin in the same 4 MiB of a shard are one unit, and their further extents are of the runs that they lie
// in.
func TestUnitsOfShards(t *testing.T) {
	dir := t.TempDir()
	if err := os.MkdirAll(filepath.Join(dir, "c"), 0o755); err != nil {
		t.Fatal(err)
	}
	for i := range 24 {
		if err := os.WriteFile(filepath.Join(dir, "c", fmt.Sprintf("%02d.jpg", i)), make([]byte, 1<<20),
			0o644); err != nil {
			t.Fatal(err)
		}
	}
	e := open(t, HostConfig{Options: cachedir.Options{Path: t.TempDir(), Size: 64 << 20, Memory: 128 << 20}},
		Config{Source: "file://" + packFolder(t, dir, 13<<20)})
	defer closeEngine(t, e)
	d := e.Dataset()
	m, l := d.v.manifest, d.v.layout
	runs, of := map[string]uint64{}, units(m, l)
	for i := range d.Len() {
		shard, off := l.Locate(d.v.samples.File(i))
		for extent := range 2 {
			run := fmt.Sprintf("%s %d", shard.Key, off/prefetch.GroupBytes+int64(extent))
			unit := of(d.v.samples.File(i), extent)
			if known, ok := runs[run]; ok && known != unit {
				t.Errorf("%s has units %x and %x", run, known, unit)
			}
			runs[run] = unit
		}
		if want := of(d.v.samples.File(i), 0); d.Units()(i) != want {
			t.Errorf("sample %d: another unit than its first extent", i)
		}
	}
	all := map[uint64]bool{}
	for _, unit := range runs {
		all[unit] = true
	}
	if len(all) != len(runs) || len(runs) < 6 {
		t.Errorf("%d runs of shards are %d units", len(runs), len(all))
	}
}
