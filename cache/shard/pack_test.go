package shard

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"log/slog"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/lab/rig/memstore"
)

// small are options that make many shards of several parts from little.
func small(seed uint64) PackOptions {
	return PackOptions{ShardSize: 20 << 10, Seed: seed, Permute: permute(seed), Connections: 8, Memory: 64 << 10,
		partSize: 4 << 10}
}

var out = objstore.Source{Prefix: "out/"}

// checkSet compares a set with what it was packed from: manifest, tars by archive/tar's rules (in
// scanTar), and every byte.
func checkSet(t rapid.TB, s *store, m *catalog.Manifest) *Set {
	t.Helper()
	ctx := context.Background()
	set, list, err := members(ctx, s, out)
	if err != nil {
		t.Fatal(err)
	}
	if set.Version != m.Version() || set.Files != m.Len() || set.Bytes != m.Bytes() {
		t.Fatalf("set %+v, dataset version %s", set, m.Version())
	}
	if got := rebuild(t, list); got.Version() != m.Version() {
		t.Fatalf("members have dataset version %s, want %s", got.Version(), m.Version())
	}
	seen := make(map[string]bool)
	for _, x := range list {
		n, ok := m.Find(x.Path)
		if !ok || seen[x.Path] {
			t.Fatalf("%q is not in the dataset, or twice in the set", x.Path)
		}
		seen[x.Path] = true
		want := get(t, s, m.Object(n.Index).Key)
		got := make([]byte, x.Size)
		if err := s.Mem.ReadAt(ctx, set.Shards[x.Shard], got, x.Off); err != nil || !bytes.Equal(got, want) {
			t.Fatalf("%q: other bytes, %v", x.Path, err)
		}
		if !x.ModTime.Equal(m.ModTime(n.Index)) {
			t.Fatalf("%q: time %v, want %v", x.Path, x.ModTime, m.ModTime(n.Index))
		}
	}
	if len(seen) != m.Len() {
		t.Fatalf("%d of %d files", len(seen), m.Len())
	}
	return set
}

// samplesOf says how WebDataset reads a tar: members whose names agree up to the first dot and that follow
// each other are one sample.
func samplesOf(t rapid.TB, s *store, o objstore.Object) (samples [][]string) {
	t.Helper()
	sc, err := scanTar(context.Background(), s.Mem, o, func(int64) error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	last := ""
	sc.ix.members(func(_ int, m indexMember) bool {
		g := wdsSplit.FindStringSubmatch(m.path)
		if g == nil {
			t.Fatalf("WebDataset drops %q", m.path)
		}
		if g[1] != last {
			samples = append(samples, nil)
			last = g[1]
		}
		samples[len(samples)-1] = append(samples[len(samples)-1], g[2])
		return true
	})
	return samples
}

// Whatever the names and sizes, the set holds the same dataset, and no two fields of one WebDataset
// sample have one extension.
func TestPackModel(t *testing.T) {
	part := rapid.SampledFrom([]string{"a", "b", "img", "é", ".", "%2E", "%", "-1", "noext", ".jpg", ".json", ".0001",
		".0002", " "})
	name := rapid.Custom(func(t *rapid.T) string {
		return strings.Join(rapid.SliceOfN(part, 1, 4).Draw(t, "name"), "")
	}).Filter(func(s string) bool { return s != "." && s != ".." })
	path := rapid.Custom(func(t *rapid.T) string {
		return strings.Join(rapid.SliceOfN(name, 1, 3).Draw(t, "path"), "/")
	})
	rapid.Check(t, func(t *rapid.T) {
		s := newStore()
		sizes := rapid.OneOf(rapid.IntRange(0, 2000), rapid.SampledFrom([]int{0, 511, 512, 513, 4096, 30000}))
		m := fill(t, s, rapid.MapOfN(path, sizes, 1, 40).Draw(t, "files"))
		o := small(rapid.Uint64().Draw(t, "seed"))
		o.ShardSize = rapid.Int64Range(1, 40<<10).Draw(t, "shard size")
		res, err := Pack(context.Background(), m, s, s, "out/", o)
		if err != nil {
			t.Fatal(err)
		}
		set := checkSet(t, s, m)
		if res.Files != m.Len() || res.Bytes != m.Bytes() || res.Shards != len(set.Shards) ||
			res.Escaped != set.summary.Escaped {
			t.Fatalf("%+v", res)
		}
		var size int64
		for _, sh := range set.Shards {
			size += sh.Size
			for _, fields := range samplesOf(t, s, sh) {
				slices.Sort(fields)
				if len(slices.Compact(fields)) != len(fields) {
					t.Fatalf("a sample of %s has two fields of one name: %q", sh.Key, fields)
				}
			}
		}
		if size != res.Size {
			t.Fatalf("shards have %d bytes, Pack says %d", size, res.Size)
		}
	})
}

// Files of one stem stay together, and the others do not merge.
// The index has the checksum of each extent of a larger member, whatever the parts of the upload, and those that have
// none are read.
func TestPackSumsExtents(t *testing.T) {
	s := newStore()
	m := fill(t, s, map[string]int{"in/a.bin": 2*catalog.ExtentSize + 77, "in/b.bin": 2 * catalog.ExtentSize,
		"in/c.bin": catalog.ExtentSize, "in/d.bin": 5, "in/e.bin": 0})
	o := small(3)
	o.partSize, o.Memory = 1<<20+512, 8<<20
	if _, err := Pack(t.Context(), m, s, s, "out/", o); err != nil {
		t.Fatal(err)
	}
	_, list, err := members(t.Context(), s, out)
	if err != nil || len(list) != m.Len() {
		t.Fatal(len(list), err)
	}
	for _, member := range list {
		data := get(t, s, "src/"+member.Path)
		for x := range catalog.Extents(member.Size) {
			extent := data[x*catalog.ExtentSize : min((x+1)*catalog.ExtentSize, len(data))]
			if got, want := member.ExtentSum(x), crc32.Checksum(extent, castagnoli); got != want {
				t.Errorf("extent %d of %s: %08x, want %08x", x, member.Path, got, want)
			}
		}
		if member.sums = ""; member.Size > catalog.ExtentSize && member.ExtentSum(1) != 0 {
			t.Error("a checksum that is not there")
		}
	}
}

func TestPackSamples(t *testing.T) {
	s := newStore()
	files := map[string]int{
		"c/1.jpg": 10, "c/1.json": 5, "c/1.seg.png": 7, "c/1": 3, "c/1-x.jpg": 4,
		"c/img.0001.jpg": 1, "c/img.0001.json": 1, "c/img.0002.jpg": 1, "c/img.jpg": 1,
		"c/.DS_Store": 1, "README": 2,
	}
	for i := range 300 {
		files[fmt.Sprintf("v/frame.%06d", i)] = 1
	}
	m := fill(t, s, files)
	o := small(1)
	o.ShardSize = 1 << 30
	res, err := Pack(context.Background(), m, s, s, "out/", o)
	if err != nil {
		t.Fatal(err)
	}
	if want := (Escaped{Files: 306, Dotfiles: 1, NoExtension: 3, SameStem: 303}); res.Escaped != want {
		t.Errorf("escaped %+v, want %+v", res.Escaped, want)
	}
	set := checkSet(t, s, m)
	var got []string
	for _, fields := range samplesOf(t, s, set.Shards[0]) {
		slices.Sort(fields)
		got = append(got, strings.Join(fields, " "))
	}
	slices.Sort(got)
	want := []string{"jpg json noext seg.png", "jpg", "jpg json", "jpg", "jpg", "noext", "noext"}
	for range 300 {
		want = append(want, "noext")
	}
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("samples %q, want %q", got, want)
	}
}

// What is packed is a function of dataset, seed and size alone: not of memory, connections or parts.
func TestPackIsDeterministic(t *testing.T) {
	s := newStore()
	m := fill(t, s, manyFiles(50))
	for i, o := range []PackOptions{
		small(3), {ShardSize: 20 << 10, Seed: 3, Permute: permute(3), Connections: 1, Memory: 20 << 20}} {
		if _, err := Pack(context.Background(), m, s, s, fmt.Sprintf("out%d/", i), o); err != nil {
			t.Fatal(err)
		}
	}
	names := keys(s, "out0/")
	if !slices.Equal(names, keys(s, "out1/")) || len(names) < 5 {
		t.Fatalf("%q, %q", names, keys(s, "out1/"))
	}
	for _, n := range names {
		if strings.HasSuffix(n, ".tar") && !bytes.Equal(get(t, s, "out0/"+n), get(t, s, "out1/"+n)) {
			t.Errorf("%s differs", n)
		}
	}
}

func manyFiles(n int) map[string]int {
	files := make(map[string]int)
	for i := range n {
		files[fmt.Sprintf("class%d/%04d.jpg", i%3, i)] = i * 37 % 3000
	}
	files["class0/large.bin"] = 25 << 10 // a shard of its own
	files["class0/empty"] = 0
	return files
}

// A store that does not list uploads, or not to everybody, can be packed to.
func TestPackWithoutListingUploads(t *testing.T) {
	for _, kind := range []objstore.Kind{objstore.KindInvalid, objstore.KindDenied} {
		s := newStore()
		m := fill(t, s, manyFiles(30))
		s.cleanUp = &objstore.Error{Op: "list", Key: "out/", Kind: kind}
		var log bytes.Buffer
		o := small(1)
		o.Logger = slog.New(slog.NewTextHandler(&log, nil))
		if _, err := Pack(context.Background(), m, s, s, "out/", o); err != nil {
			t.Fatal(err)
		}
		checkSet(t, s, m)
		if !strings.Contains(log.String(), "unfinished uploads") {
			t.Errorf("the log says %q", log.String())
		}
	}
}

// twice begins each upload twice: the first answer was lost.
type twice struct{ *store }

func (s twice) Upload(ctx context.Context, key string, size, partSize int64) (objstore.Upload, error) {
	_, _ = s.store.Upload(ctx, key, size, partSize)
	return s.store.Upload(ctx, key, size, partSize)
}

// Uploads that a lost answer hid do not outlive the pack, others' do.
func TestPackEndsLostUploads(t *testing.T) {
	s := newStore()
	m := fill(t, s, manyFiles(30))
	if _, err := s.Upload(t.Context(), "other/shard-000000.tar", 1, 1); err != nil {
		t.Fatal(err)
	}
	if _, err := Pack(t.Context(), m, s, twice{s}, "out/", small(1)); err != nil {
		t.Fatal(err)
	}
	if checkSet(t, s, m); len(s.uploads) != 1 {
		t.Errorf("%d uploads are left, not the one of others", len(s.uploads))
	}
}

// A pack that dies at any request, with or without that request having happened, is finished by the next
// one; the set is the same as one made at once, and nothing else is left.
func TestPackResumes(t *testing.T) {
	ctx := context.Background()
	ref := newStore()
	files := manyFiles(30)
	m := fill(t, ref, files)
	if _, err := Pack(ctx, m, ref, ref, "out/", small(5)); err != nil {
		t.Fatal(err)
	}
	total := ref.ops
	names := keys(ref, "out/")
	resumed := 0
	for at := 1; at <= total; at++ {
		for _, lost := range []bool{false, true} {
			s := newStore()
			m := fill(t, s, files)
			s.failAt, s.lost = at, lost
			_, err := Pack(ctx, m, s, s, "out/", small(5))
			if err == nil && (at < total-1 || !lost) {
				t.Fatalf("request %d failed without notice", at)
			}
			s.failAt = 0
			res, err := Pack(ctx, m, s, s, "out/", small(5))
			if err != nil {
				t.Fatalf("after request %d of %d (answer lost: %v): %v", at, total, lost, err)
			}
			resumed += res.Resumed
			if got := keys(s, "out/"); !slices.Equal(got, names) || len(s.uploads) > 0 {
				t.Fatalf("after request %d: %q and %d uploads, want %q", at, got, len(s.uploads), names)
			}
			for _, n := range names {
				if strings.HasSuffix(n, ".tar") && !bytes.Equal(get(t, s, "out/"+n), get(t, ref, "out/"+n)) {
					t.Fatalf("after request %d: %s differs", at, n)
				}
			}
			checkSet(t, s, m)
		}
	}
	if resumed == 0 {
		t.Error("no shard was ever taken over")
	}
}

// Shards that do not belong to their index, and indexes that are damaged, are made again.
func TestPackMakesDamagedShardsAgain(t *testing.T) {
	ctx := context.Background()
	for name, damage := range map[string]func(s *store){
		"index cut": func(s *store) { s.PutBytes("out/shard-000000.tar.sidx", []byte("SHOALIDX")) },
		"index of other": func(s *store) {
			s.PutBytes("out/shard-000000.tar.sidx", get(t, s, "out/shard-000001.tar.sidx"))
		},
		"tar replaced": func(s *store) { s.PutBytes("out/shard-000000.tar", get(t, s, "out/shard-000000.tar")) },
		"tar cut":      func(s *store) { s.PutBytes("out/shard-000000.tar", []byte("x")) },
		"tar gone":     func(s *store) { _ = s.Delete(ctx, "out/shard-000000.tar", "") },
	} {
		t.Run(name, func(t *testing.T) {
			s := newStore()
			m := fill(t, s, manyFiles(30))
			marker := []byte(nil)
			o := small(2)
			o.Progress = func(Progress) {
				if marker == nil {
					marker = get(t, s, "out/"+MarkerName)
				}
			}
			if _, err := Pack(ctx, m, s, s, "out/", o); err != nil {
				t.Fatal(err)
			}
			s.PutBytes("out/"+MarkerName, marker)
			_ = s.Delete(ctx, "out/"+SummaryName, "")
			damage(s)
			res, err := Pack(ctx, m, s, s, "out/", small(2))
			if err != nil || res.Resumed != res.Shards-1 {
				t.Fatalf("%+v, %v", res, err)
			}
			checkSet(t, s, m)
		})
	}
}

func TestPackRefuses(t *testing.T) {
	ctx := context.Background()
	newSet := func(t *testing.T) (*store, *catalog.Manifest) {
		s := newStore()
		m := fill(t, s, manyFiles(10))
		if _, err := Pack(ctx, m, s, s, "out/", small(1)); err != nil {
			t.Fatal(err)
		}
		return s, m
	}
	for _, c := range []struct {
		name string
		run  func(t *testing.T) error
		want string
	}{
		{"another seed", func(t *testing.T) error {
			s, m := newSet(t)
			_, err := Pack(ctx, m, s, s, "out/", small(2))
			return err
		}, "seed 1, this one 2"},
		{"another size", func(t *testing.T) error {
			s, m := newSet(t)
			o := small(1)
			o.ShardSize++
			_, err := Pack(ctx, m, s, s, "out/", o)
			return err
		}, "shard size"},
		{"another order of the seed", func(t *testing.T) error {
			s, m := newSet(t)
			o := small(1)
			o.Permute = permute(9)
			_, err := Pack(ctx, m, s, s, "out/", o)
			return err
		}, "plan"},
		{"another dataset", func(t *testing.T) error {
			s, _ := newSet(t)
			s.PutBytes("src/class0/0000.jpg", nil)
			m, err := catalog.Build(s.Mem.List(ctx, "src/", ""), catalog.BuildOptions{Prefix: "src/"})
			if err != nil {
				t.Fatal(err)
			}
			_, err = Pack(ctx, m, s, s, "out/", small(1))
			return err
		}, "dataset version"},
		{"begun with other parameters", func(t *testing.T) error {
			s := newStore()
			m := fill(t, s, manyFiles(10))
			s.failAt = 20
			if _, err := Pack(ctx, m, s, s, "out/", small(1)); err == nil {
				t.Fatal("no failure")
			}
			s.failAt = 0
			_, err := Pack(ctx, m, s, s, "out/", small(2))
			return err
		}, "unfinished pack has other parameters: it has seed 1, this one 2"},
		{"shards of nobody", func(t *testing.T) error {
			s := newStore()
			m := fill(t, s, manyFiles(10))
			s.PutBytes("out/shard-000000.tar", []byte("x"))
			_, err := Pack(ctx, m, s, s, "out/", small(1))
			return err
		}, "out/shard-000000.tar exists already"},
		{"damaged manifest", func(t *testing.T) error {
			s := newStore()
			m := fill(t, s, manyFiles(10))
			s.PutBytes("out/"+SummaryName, []byte("{"))
			_, err := Pack(ctx, m, s, s, "out/", small(1))
			return err
		}, "corrupt"},
		{"source changed", func(t *testing.T) error {
			s := newStore()
			m := fill(t, s, manyFiles(10))
			s.PutBytes("src/class1/0001.jpg", bytesOf(99, 37))
			_, err := Pack(ctx, m, s, s, "out/", small(1))
			return err
		}, "src/class1/0001.jpg has changed since it was listed"},
		{"source gone", func(t *testing.T) error {
			s := newStore()
			m := fill(t, s, manyFiles(10))
			_ = s.Mem.Delete(ctx, "src/class1/0001.jpg", "")
			_, err := Pack(ctx, m, s, s, "out/", small(1))
			return err
		}, "src/class1/0001.jpg has changed since it was listed"},
		{"flipped byte read back", func(t *testing.T) error {
			s := newStore()
			m := fill(t, s, manyFiles(10))
			s.onRead = func(o objstore.Object, p []byte, off int64) {
				if o.Key == "out/shard-000000.tar" && off == 0 {
					p[700] ^= 1
				}
			}
			_, err := Pack(ctx, m, s, s, "out/", small(1))
			return err
		}, "out/shard-000000.tar does not read back as it was written"},
		{"no order", func(t *testing.T) error {
			s := newStore()
			o := small(1)
			o.Permute = nil
			_, err := Pack(ctx, fill(t, s, manyFiles(1)), s, s, "out/", o)
			return err
		}, "no order"},
		{"wrong order", func(t *testing.T) error {
			s := newStore()
			o := small(1)
			o.Permute = func(n int) Order { return make(perm, n) }
			_, err := Pack(ctx, fill(t, s, manyFiles(5)), s, s, "out/", o)
			return err
		}, "twice"},
		{"little memory", func(t *testing.T) error {
			s := newStore()
			_, err := Pack(ctx, fill(t, s, manyFiles(5)), s, s, "out/",
				PackOptions{Permute: permute(1), Memory: 1 << 20})
			return err
		}, "--memory"},
		{"prefix", func(t *testing.T) error {
			s := newStore()
			_, err := Pack(ctx, fill(t, s, manyFiles(5)), s, s, "out", small(1))
			return err
		}, "slash"},
	} {
		t.Run(c.name, func(t *testing.T) {
			err := c.run(t)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Fatalf("%v, want %q", err, c.want)
			}
		})
	}
	// The same again is no error.
	s, m := newSet(t)
	s.PutBytes("out/"+MarkerName, []byte("left by a kill between the last two steps"))
	res, err := Pack(ctx, m, s, s, "out/", small(1))
	if err != nil || !res.Complete || slices.Contains(keys(s, "out/"), MarkerName) {
		t.Fatalf("%+v, %v, %q", res, err, keys(s, "out/"))
	}
}

// A file that no memory can hold in parts is refused before anything is written.
func TestPackPartLength(t *testing.T) {
	huge := []objstore.Object{{Key: "huge.bin", Size: 4 << 40, ETag: "x"}}
	m, err := catalog.Build(func(yield func(objstore.Object, error) bool) {
		yield(huge[0], nil)
	}, catalog.BuildOptions{})
	if err != nil {
		t.Fatal(err)
	}
	s := newStore()
	_, err = Pack(context.Background(), m, s, s, "out/", PackOptions{Permute: permute(1)})
	if err == nil || !strings.Contains(err.Error(), "set --memory to") || len(keys(s, "out/")) > 0 {
		t.Fatal(err)
	}
	k := packer{o: PackOptions{partSize: partSize}}
	for _, size := range []int64{1, 64 << 20, 70 << 30, 4 << 40} {
		if n := k.partLen(size); n < minPartSize || (size+n-1)/n > 10000 {
			t.Errorf("%d bytes: parts of %d", size, n)
		}
	}
}

// Ending a pack ends it soon and leaves no upload and no goroutine.
func TestPackCancel(t *testing.T) {
	s := newStore()
	m := fill(t, s, manyFiles(40))
	ctx, cancel := context.WithCancel(context.Background())
	s.latency = time.Millisecond
	n := 0
	s.onRead = func(objstore.Object, []byte, int64) {
		if n++; n == 30 {
			cancel()
		}
	}
	if _, err := Pack(ctx, m, s, s, "out/", small(1)); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	if len(s.uploads) > 0 {
		t.Errorf("%d uploads are left", len(s.uploads))
	}
}

func TestPackProgress(t *testing.T) {
	s := newStore()
	m := fill(t, s, manyFiles(40))
	var last Progress
	o := small(1)
	o.Progress = func(p Progress) {
		if p.Bytes < last.Bytes || p.Files < last.Files || p.Shards < last.Shards {
			t.Errorf("%+v after %+v", p, last)
		}
		last = p
	}
	res, err := Pack(context.Background(), m, s, s, "out/", o)
	if err != nil {
		t.Fatal(err)
	}
	if want := (Progress{m.Len(), m.Len(), m.Bytes(), m.Bytes(), res.Shards, res.Shards, 0}); last != want {
		t.Errorf("ends with %+v, want %+v", last, want)
	}
}

// As many files are read at once as connections are allowed, and buffers stay within the memory.
func TestPackKeepsConnectionsBusy(t *testing.T) {
	files := make(map[string]int)
	for i := range 400 {
		files[fmt.Sprintf("c/%03d.jpg", i)] = 3000
	}
	s := newStore()
	m := fill(t, s, files)
	s.latency = 20 * time.Millisecond
	o := PackOptions{ShardSize: 64 << 10, Seed: 1, Permute: permute(1), Connections: 40, Memory: 512 << 10,
		partSize: 16 << 10}
	synctest.Test(t, func(t *testing.T) {
		begin := time.Now()
		if _, err := Pack(t.Context(), m, s, s, "out/", o); err != nil {
			t.Fatal(err)
		}
		// 400 files by 40 connections are 10 rounds of 20 ms; 21 shards read back in 5 parts by 4 are 26
		// rounds, beside that. One after the other all would take 10 s.
		if d := time.Since(begin); d > time.Second {
			t.Errorf("%v", d)
		}
	})
	s.latency = 0
	checkSet(t, s, m)
}

// What other programs make of a shard: GNU tar, Python's tarfile, WebDataset's grouping, and a reader
// that walks the blocks as wds2idx does.
func TestOtherReaders(t *testing.T) {
	s := newStore()
	files := manyFiles(20)
	maps.Copy(files, map[string]int{
		"long/" + strings.Repeat("d/", 70) + strings.Repeat("n", 120) + ".jpg": 100,
		"é/ü.jpg": 5, "c/img.0001.jpg": 600, "c/img.0002.jpg": 700, "c/.hidden": 3, "c/s.jpg": 9, "c/s.json": 8,
		"c/s.seg.png": 7, "a b/new\nline.txt": 6,
	})
	m := fill(t, s, files)
	o := small(4)
	o.ShardSize = 1 << 30
	if _, err := Pack(context.Background(), m, s, s, "out/", o); err != nil {
		t.Fatal(err)
	}
	checkSet(t, s, m)
	dir := t.TempDir()
	name := filepath.Join(dir, "s.tar")
	if err := os.WriteFile(name, get(t, s, "out/shard-000000.tar"), 0o600); err != nil {
		t.Fatal(err)
	}
	ix, err := parseIndex(get(t, s, "out/shard-000000.tar.sidx"))
	if err != nil {
		t.Fatal(err)
	}
	tree := filepath.Join(dir, "tree")
	if err := os.Mkdir(tree, 0o700); err != nil {
		t.Fatal(err)
	}
	if msg, err := exec.Command("tar", "-xf", name, "-C", tree).CombinedOutput(); err != nil || len(msg) > 0 {
		t.Fatalf("tar: %v: %s", err, msg)
	}
	list, err := exec.Command("tar", "--quoting-style=literal", "--show-transformed", "-tf", name).Output()
	if err != nil {
		t.Fatal(err)
	}
	var offsets, names strings.Builder
	n := 0
	ix.members(func(_ int, x indexMember) bool {
		tarName := x.path
		if x.tarName != "" {
			tarName = x.tarName
		}
		node, _ := m.Find(x.path)
		got, err := os.ReadFile(filepath.Join(tree, tarName))
		if err != nil || !bytes.Equal(got, get(t, s, m.Object(node.Index).Key)) {
			t.Errorf("tar made %q of %q: %v", tarName, x.path, err)
		}
		fmt.Fprintf(&names, "%s\n", tarName)
		fmt.Fprintf(&offsets, "%d %d %q\n", x.off, x.size, tarName)
		n++
		return true
	})
	if string(list) != names.String() || n != m.Len() {
		t.Errorf("tar -t lists\n%s\nwant\n%s", list, names.String())
	}
	var want strings.Builder
	for _, fields := range samplesOf(t, s, objstore.Object{Key: "out/shard-000000.tar", Size: ix.size, ETag: ix.etag}) {
		fmt.Fprintf(&want, "%s\n", strings.Join(fields, " "))
	}
	py := exec.Command("python3", filepath.Join("testdata", "readers.py"), name)
	py.Env = append(os.Environ(), "PYTHONUTF8=1")
	got, err := py.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, got)
	}
	sections := strings.Split(string(got), "--\n")
	if len(sections) != 3 {
		t.Fatalf("%s", got)
	}
	for i, what := range []string{"samples", "tarfile's offsets", "offsets by blocks"} {
		w := offsets.String()
		if i == 0 {
			w = want.String()
		}
		if sections[i] != w {
			t.Errorf("%s:\n%s\nwant\n%s", what, sections[i], w)
		}
	}
}

// The stores themselves, with parts as large as S3 wants them.
func TestPackOnStores(t *testing.T) {
	ctx := context.Background()
	folder, err := objstore.NewDir(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	for _, dst := range []objstore.Layer{memstore.New(), folder} {
		for i := range 14 {
			data := bytesOf(uint64(i), 1<<20+i)
			if _, err := dst.PutNew(ctx, fmt.Sprintf("src/c%d/%02d.bin", i%2, i), data); err != nil {
				t.Fatal(err)
			}
		}
		m, err := catalog.Build(dst.List(ctx, "src/", ""), catalog.BuildOptions{Prefix: "src/"})
		if err != nil {
			t.Fatal(err)
		}
		res, err := Pack(ctx, m, dst, dst, "out/",
			PackOptions{ShardSize: 12 << 20, Seed: 1, Permute: permute(1), Memory: 20 << 20})
		if err != nil || res.Shards != 2 {
			t.Fatalf("%T: %+v, %v", dst, res, err)
		}
		set, err := Open(ctx, dst, out, OpenOptions{})
		if err != nil {
			t.Fatal(err)
		}
		var list []Member
		for x, err := range set.Members(ctx) {
			if err != nil {
				t.Fatal(err)
			}
			list = append(list, x)
			n, _ := m.Find(x.Path)
			want, got := make([]byte, x.Size), make([]byte, x.Size)
			if err := errors.Join(dst.ReadAt(ctx, m.Object(n.Index), want, 0),
				dst.ReadAt(ctx, set.Shards[x.Shard], got, x.Off)); err != nil || !bytes.Equal(got, want) {
				t.Fatalf("%T: %s: other bytes, %v", dst, x.Path, err)
			}
		}
		if rebuild(t, list).Version() != m.Version() {
			t.Errorf("%T: another dataset version", dst)
		}
	}
}

// What a plan takes of memory and time: 9 bytes a file and 4 a sample stay.
func BenchmarkPlan(b *testing.B) {
	const n = 1_000_000
	m, err := catalog.Build(func(yield func(objstore.Object, error) bool) {
		for i := range n {
			if !yield(objstore.Object{Key: fmt.Sprintf("class%03d/%08d.jpg", i%1000, i), Size: 63 << 10,
				ETag: "0123456789abcdef"}, nil) {
				return
			}
		}
	}, catalog.BuildOptions{})
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := newPlan(m, nil, defaultShardSize, 1, func(n int) Order { return stride(n) }); err != nil {
			b.Fatal(err)
		}
	}
}

// stride is an order without a table.
type stride int

func (s stride) Len() int       { return int(s) }
func (s stride) At(pos int) int { return int(int64(pos) * 7919 % int64(s)) }

func BenchmarkPack(b *testing.B) {
	const n, size = 2000, 63 << 10
	mem := memstore.New()
	data := bytesOf(1, size)
	for i := range n {
		mem.PutBytes(fmt.Sprintf("src/class%d/%05d.jpg", i%10, i), data)
	}
	ctx := context.Background()
	m, err := catalog.Build(mem.List(ctx, "src/", ""), catalog.BuildOptions{Prefix: "src/"})
	if err != nil {
		b.Fatal(err)
	}
	b.SetBytes(n * size)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := Pack(ctx, m, mem, mem, "out/", PackOptions{Permute: permute(1)}); err != nil {
			b.Fatal(err)
		}
		b.StopTimer()
		for o := range mem.List(ctx, "out/", "") {
			if err := mem.Delete(ctx, o.Key, ""); err != nil {
				b.Fatal(err)
			}
		}
		b.StartTimer()
	}
	b.ReportMetric(float64(b.N)*n/b.Elapsed().Seconds(), "files/s")
}
