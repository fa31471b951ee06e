package shard

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"hash/crc32"
	"image/png"
	"io/fs"
	"math"
	"os"
	"path"
	"path/filepath"
	"strings"
	"testing"

	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/lab/rig/memstore"
)

const written = "testdata/sources" // by lab/e2e/sources.py

// stored puts a folder of testdata into a store.
func stored(t testing.TB, folder string) *memstore.Mem {
	t.Helper()
	mem := memstore.New()
	err := filepath.WalkDir(filepath.Join(written, folder), func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		data, err := os.ReadFile(p)
		rel, _ := filepath.Rel(written, p)
		mem.PutBytes(filepath.ToSlash(rel), data)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return mem
}

// readRows reads all members, and checks what an [Index] promises of them.
func readRows(t testing.TB, r objstore.Reader, prefix string, o OpenOptions) (
	files map[string][]byte, bad map[int]error, err error) {
	t.Helper()
	s, err := OpenRows(t.Context(), r, objstore.Source{Prefix: prefix}, o)
	if err != nil {
		return nil, nil, err
	}
	files = map[string][]byte{}
	restorer := NewRestorer(r, nil, nil, 0)
	shard, off, late := 0, int64(0), error(nil)
	for m, err := range s.Members(t.Context()) {
		if err != nil {
			return nil, s.Bad(), err
		}
		object := s.Objects()[m.Shard]
		if m.Shard < shard || m.Shard == shard && m.Off < off || m.Off < 0 || m.Size < 0 || m.Off > object.Size-m.Size {
			t.Fatalf("%s: %d bytes at %d of object %d, %s, of %d bytes, after %d at %d",
				m.Path, m.Size, m.Off, m.Shard, object.Key, object.Size, off, shard)
		}
		etag := object.ETag[strings.LastIndexByte(object.ETag, ':')+1:]
		if m.ETag != fmt.Sprintf("%s+%d", etag, m.Off) {
			t.Fatalf("%s has the ETag %s, its object %s", m.Path, m.ETag, object.ETag)
		}
		shard, off = m.Shard, m.Off
		b := make([]byte, m.Size)
		if err := restorer.ReadAt(t.Context(), object, b, m.Off); err != nil {
			late = cmp.Or(late, err) // then Members finds out, too, if not yet
			continue
		}
		if _, twice := files[m.Path]; twice {
			t.Fatalf("%s twice", m.Path)
		}
		files[m.Path] = b
		if m.Summed && m.Size <= catalog.ExtentSize && crc32.Checksum(b, castagnoli) != m.ExtentSum(0) {
			t.Fatalf("%s has another checksum", m.Path)
		}
	}
	if late != nil && len(s.Bad()) == 0 {
		t.Fatal(late)
	}
	return files, s.Bad(), nil
}

// TestSourcesEqualTheirLibraries compares the samples with what Megatron's IndexedDataset and MosaicML's reader read.
func TestSourcesEqualTheirLibraries(t *testing.T) {
	files := map[string][]byte{}
	for _, folder := range []string{"megatron", "mds", "tokens", "parquet"} {
		f, bad, err := readRows(t, stored(t, folder), folder+"/", OpenOptions{})
		if err != nil || len(bad) > 0 {
			t.Fatal(err, bad)
		}
		for name, b := range f {
			files[folder+"/"+name] = b
		}
	}
	f, err := os.Open(written + "/samples.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	rows := 0
	take := func(name string) []byte {
		b, ok := files[name]
		if !ok {
			t.Errorf("%s is missing", name)
		}
		delete(files, name)
		return b
	}
	for lines := bufio.NewScanner(f); lines.Scan(); rows++ {
		var s struct {
			Of, Type string
			Doc, Row int
			Tokens   []uint16
			Files    map[string][]byte
			Columns  struct {
				Caption      string
				Label        int64
				ID           *uint32
				Weight       float64
				Meta         json.RawMessage
				Image, Photo struct{ Pixels []byte }
				Tokens       []int32
			}
		}
		if err := json.Unmarshal(lines.Bytes(), &s); err != nil {
			t.Fatal(err)
		}
		if s.Type != "" {
			want, _ := binary.Append(nil, binary.LittleEndian, s.Tokens)
			if got := take(fmt.Sprintf("megatron/%s/%012d.%s", s.Of, s.Doc, s.Type)); !bytes.Equal(got, want) {
				t.Errorf("document %d of %s is %d, want %d", s.Doc, s.Of, got, want)
			}
			continue
		}
		if s.Files != nil {
			dir, base := path.Split(strings.TrimSuffix(s.Of, parquetSuffix))
			for name, want := range s.Files {
				name = fmt.Sprintf("%s%s-%012d.%s", dir, strings.ReplaceAll(base, ".", "_"), s.Row, name)
				if got := take(name); !bytes.Equal(got, want) {
					t.Errorf("%s is %q, want %q", name, got, want)
				}
			}
			continue
		}
		c := s.Columns
		stem := fmt.Sprintf("%s-%012d", strings.ReplaceAll(strings.TrimSuffix(s.Of, ".mds"), ".", "_"), s.Row)
		if c.ID != nil {
			if got := take(stem + ".id.uint32"); binary.LittleEndian.Uint32(got) != *c.ID {
				t.Errorf("%s: id %d", stem, got)
			}
			want, _ := binary.Append(nil, binary.LittleEndian, c.Tokens)
			if got := take(stem + ".tokens.int32.mds"); !bytes.HasSuffix(got, want) ||
				len(got)-len(want) != 2+len(c.Tokens)/256 {
				t.Errorf("%s: tokens %d, want %d after a head", stem, got, want)
			}
			continue
		}
		if got := take(stem + ".caption.txt"); string(got) != c.Caption {
			t.Errorf("%s: caption %q, want %q", stem, got, c.Caption)
		}
		if got := take(stem + ".label.int64"); int64(binary.LittleEndian.Uint64(got)) != c.Label {
			t.Errorf("%s: label %d, want %d", stem, got, c.Label)
		}
		if got := take(stem + ".weight.float32"); math.Float32frombits(binary.LittleEndian.Uint32(got)) !=
			float32(c.Weight) {
			t.Errorf("%s: weight %d, want %g", stem, got, c.Weight)
		}
		if got := take(stem + ".meta.json"); !bytes.Equal(got, c.Meta) {
			t.Errorf("%s: meta %s, want %s", stem, got, c.Meta)
		}
		if got := take(stem + ".photo.jpg"); !bytes.HasPrefix(got, []byte("\xff\xd8")) ||
			!bytes.HasSuffix(got, []byte("\xff\xd9")) {
			t.Errorf("%s: photo %q", stem, got)
		}
		want, _ := binary.Append(nil, binary.LittleEndian, c.Tokens)
		if got := take(stem + ".tokens.uint16.mds"); len(got) < len(want)/2 {
			t.Errorf("%s: tokens %d, want %d", stem, got, c.Tokens)
		}
		picture, err := png.Decode(bytes.NewReader(take(stem + ".image.png")))
		if err != nil {
			t.Fatal(err)
		}
		var pixels []byte
		for y := range 6 {
			for x := range 8 {
				r, g, b, _ := picture.At(x, y).RGBA()
				pixels = append(pixels, byte(r>>8), byte(g>>8), byte(b>>8))
			}
		}
		if !bytes.Equal(pixels, c.Image.Pixels) {
			t.Errorf("%s: other pixels", stem)
		}
	}
	if rows != 96 || len(files) > 0 {
		t.Errorf("%d samples; files of none: %d", rows, len(files))
	}
}

// change returns a store with some of testdata changed.
func change(t testing.TB, folder, key string, f func(b []byte) []byte) *memstore.Mem {
	t.Helper()
	mem := stored(t, folder)
	b, err := os.ReadFile(filepath.Join(written, folder, key))
	if err != nil {
		t.Fatal(err)
	}
	if b = f(bytes.Clone(b)); b == nil {
		_ = mem.Delete(t.Context(), folder+"/"+key, "")
	} else {
		mem.PutBytes(folder+"/"+key, b)
	}
	return mem
}

// TestSourcesThatLie has an error for each lie, which names the file and the place. With SkipBad only what it is about
// is left out.
func TestSourcesThatLie(t *testing.T) {
	put := func(at int, v uint64, n int) func(b []byte) []byte {
		return func(b []byte) []byte {
			var w [8]byte
			binary.LittleEndian.PutUint64(w[:], v)
			copy(b[at:], w[:n])
			return b
		}
	}
	replace := func(old, new string) func(b []byte) []byte {
		return func(b []byte) []byte {
			if !bytes.Contains(b, []byte(old)) {
				t.Fatalf("no %s", old)
			}
			return bytes.Replace(b, []byte(old), []byte(new), 1)
		}
	}
	cut := func(n int) func(b []byte) []byte { return func(b []byte) []byte { return b[:len(b)-n] } }
	const a, ix, shard = "a_text_document.idx", "index.json", "shard.00001.mds"
	for _, c := range []struct {
		what, folder, key string
		change            func(b []byte) []byte
		want              string
		whole             bool // SkipBad does not help
	}{
		{"magic", "megatron", a, put(0, 'X', 1), "no index of Megatron's", false},
		{"version", "megatron", a, put(9, 2, 8), "version 2 at byte 9", false},
		{"type", "megatron", a, put(17, 9, 1), "type 9 at byte 17", false},
		{"no type", "megatron", a, put(17, 0, 1), "type 0 at byte 17", false},
		{"other type", "megatron", a, put(17, 4, 1), "sequence", false},
		{"2^63 sequences", "megatron", a, put(18, 1<<63, 8), "9223372036854775808 sequences", false},
		{"2^64/12 sequences", "megatron", a, put(18, 1<<64/12+1, 8), "do not make its 314 bytes", false},
		{"2^63 documents", "megatron", a, put(26, 1<<63, 8), "9223372036854775808 documents", false},
		{"truncated index", "megatron", a, cut(1), "do not make its 313 bytes", false},
		{"truncated header", "megatron", a, cut(300), "14 bytes, the header has 34", false},
		{"modes", "megatron", a, func(b []byte) []byte {
			return append(b, make([]byte, binary.LittleEndian.Uint64(b[18:]))...)
		}, "multimodal", false},
		{"negative length", "megatron", a, put(34, 1<<32-1, 4), "sequence 0 has -1 tokens", false},
		{"long sequence", "megatron", a, put(34, 1<<31-1, 4), "sequence 0 has 2147483647 tokens", false},
		{"offset outside", "megatron", a, put(34+12*4, 1<<40, 8), "sequence 0 has", false},
		{"overlap", "megatron", a, put(34+12*4+8, 0, 8), "sequence 1 has", false},
		{"document outside", "megatron", a, put(34+12*12+8*16, 1<<62, 8), "document 16 begins with sequence", false},
		{"first document", "megatron", a, put(34+12*12, 1, 8), "document 0 begins with sequence 1", false},
		{"last document", "megatron", a, func(b []byte) []byte {
			return put(34+12*12+8*16, 11, 8)(put(34+12*12+8*15, 11, 8)(b))
		}, "document 16 begins with sequence 11", false},
		{"truncated data", "megatron", "a_text_document.bin", cut(2), "of 354 bytes", false},
		{"more data", "megatron", "a_text_document.bin", func(b []byte) []byte {
			return append(b, 0, 0)
		}, "do not belong together", false},
		{"no data", "megatron", "a_text_document.bin", func([]byte) []byte {
			return nil
		}, "which it is the index of", false},

		{"not JSON", "mds", ix, cut(1), "mds/index.json: ", true},
		{"a list", "mds", ix, func([]byte) []byte { return []byte("[1]") }, "cannot unmarshal array", true},
		{"no shards", "mds", ix, func([]byte) []byte { return []byte(`{"version": 2}`) }, "with 0 shards", true},
		{"version of the index", "mds", ix, replace(`"version": 2}`, `"version": 3}`),
			"but only version 2 is read", true},
		{"version", "mds", ix, replace(`"version": 2, "zip`, `"version": 3, "zip`), "only mds, version 2", true},
		{"format", "mds", ix, replace(`"format": "mds"`, `"format": "jsonl"`), "shard 0: format", true},
		{"compressed", "mds", ix, replace(`"compression": null`, `"compression": "zstd"`), "compressed", true},
		{"no file", "mds", ix, replace(`"raw_data"`, `"row_data"`), "raw_data", true},
		{"encoding", "mds", ix, replace(`"png"`, `"jxl"`), `column "image" of encoding "jxl"`, true},
		{"type of an array", "mds", ix, replace(`ndarray:uint16`, `ndarray:U16`), `"ndarray:U16"`, true},
		{"shape of an array", "mds", ix, replace(`ndarray:uint16`, `ndarray:uint16:3,0`), "ndarray:uint16:3,0", true},
		{"huge shape", "mds", ix, replace(`ndarray:uint16`, `ndarray:uint16:2000000000,2000000000`),
			"cannot be read", true},
		{"size", "mds", ix, replace("null, 8", "null, 4"), `"label" has 4 bytes, but int has 8`, true},
		{"a size too many", "mds", ix, replace("null, 8", "null, 8, 8"), "8 column_sizes", true},
		{"path", "mds", ix, replace(`"caption", "image"`, `"../caption", "image"`), "has a slash", true},
		{"column twice", "mds", ix, replace(`"caption", "image"`, `"image", "image"`), "used twice", true},
		{"outside", "mds", ix, replace(`"shard.00000.mds"`, `"../shard.00000.mds"`), "outside its folder", true},
		{"2^63 samples", "mds", ix, replace(`"samples": 3`, `"samples": 9223372036854775808`),
			"mds/index.json: ", true},
		{"2^62 samples", "mds", ix, replace(`"samples": 3`, `"samples": 4611686018427387904`),
			"4611686018427387904 samples", false},
		{"other samples", "mds", ix, replace(`"samples": 3`, `"samples": 4`), "has 4 samples, it says 3", false},
		{"no shard", "mds", shard, func([]byte) []byte { return nil }, "which is not there", false},
		{"truncated shard", "mds", shard, cut(1), "has 3639 bytes, but it has 3638", false},
		{"offset in the offsets", "mds", shard, put(4, 12, 4), "sample 0 begins at byte 12", false},
		{"sample outside", "mds", shard, put(8, 1<<32-1, 4), "sample 0 has the bytes", false},
		{"sample backwards", "mds", shard, put(8, 24, 4), "sample 0 has the bytes", false},
		{"column outside", "mds", shard, func(b []byte) []byte {
			return put(int(binary.LittleEndian.Uint32(b[4:])), 1<<32-1, 4)(b)
		}, "column caption.txt of sample 0", false},
		{"column short", "mds", shard, func(b []byte) []byte {
			return put(int(binary.LittleEndian.Uint32(b[4:])), 0, 4)(b)
		}, "the columns of sample 0", false},
	} {
		t.Run(c.folder+": "+c.what, func(t *testing.T) {
			mem := change(t, c.folder, c.key, c.change)
			named := c.folder + "/" + strings.TrimSuffix(strings.TrimSuffix(c.key, ".idx"), ".bin")
			if c.key == ix && !c.whole {
				named = "mds/shard.00000.mds"
			}
			_, _, err := readRows(t, mem, c.folder+"/", OpenOptions{})
			if err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), named) {
				t.Fatalf("%v, want %q of %s", err, c.want, named)
			}
			all, _, err := readRows(t, stored(t, c.folder), c.folder+"/", OpenOptions{})
			if err != nil {
				t.Fatal(err)
			}
			files, bad, err := readRows(t, mem, c.folder+"/", OpenOptions{SkipBad: true})
			if c.whole {
				if err == nil {
					t.Error("an index that cannot be read is skipped")
				}
				return
			}
			if err != nil || len(bad) != 1 {
				t.Fatalf("%v, %d bad", err, len(bad))
			}
			for name, b := range all {
				if got, ok := files[name]; !bytes.Equal(b, got) || !ok {
					if !strings.HasPrefix(c.folder+"/"+strings.ReplaceAll(name, "shard_0000", "shard.0000"),
						strings.TrimSuffix(named, ".mds")) {
						t.Errorf("%s is lost with %s", name, named)
					}
				}
			}
		})
	}
}

// TestKindsOfSources names what is not one kind.
func TestKindsOfSources(t *testing.T) {
	mem := stored(t, "megatron")
	mem.PutBytes("megatron/other.bin", []byte("no index: no source"))
	mem.PutBytes("megatron/index.json", []byte("{}")) // without .mds: another index
	if _, _, err := readRows(t, mem, "megatron/", OpenOptions{}); err != nil {
		t.Error(err)
	}
	mem.PutBytes("megatron/x.csv", []byte("a,b\n1,2\n"))
	if _, _, err := readRows(t, mem, "megatron/", OpenOptions{SkipBad: true}); err == nil ||
		!strings.Contains(err.Error(), "x.csv and megatron/") {
		t.Error(err)
	}
	_ = mem.Delete(t.Context(), "megatron/x.csv", "")
	b := change(t, "megatron", "b_text_sentence.idx", func(b []byte) []byte { // 2 bytes of each token, but int16
		b[17] = 3
		return b
	})
	if _, _, err := readRows(t, b, "megatron/", OpenOptions{}); err == nil ||
		!strings.Contains(err.Error(),
			"has tokens of type int16, megatron/a_text_document.bin has tokens of type uint16") {
		t.Error(err)
	}
	mds := stored(t, "mds")
	top, _ := os.ReadFile(written + "/mds/index.json")
	// as the library's merge_index writes it
	mds.PutBytes("index.json", bytes.ReplaceAll(top, []byte(`"shard.`), []byte(`"mds/shard.`)))
	one, _, err := readRows(t, mds, "mds/", OpenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	all, _, err := readRows(t, mds, "", OpenOptions{})
	if err != nil || len(all) != len(one) || all["mds/shard_00000-000000000001.caption.txt"] == nil {
		t.Errorf("a merged index: %v, %d files, want %d", err, len(all), len(one))
	}
	twice := change(t, "mds", "index.json", func(b []byte) []byte { // which the library reads twice
		var ix map[string]any
		if err := json.Unmarshal(b, &ix); err != nil {
			t.Fatal(err)
		}
		shards := ix["shards"].([]any)
		ix["shards"] = append(shards, shards...)
		b, _ = json.Marshal(ix)
		return b
	})
	if all, _, err := readRows(t, twice, "mds/", OpenOptions{}); err != nil || len(all) != len(one) {
		t.Errorf("an index that names each shard twice: %v, %d files, want %d", err, len(all), len(one))
	}
	ctx, cancel := context.WithCancel(t.Context())
	s, err := OpenRows(ctx, mds, objstore.Source{Prefix: "mds/"}, OpenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for range s.Members(ctx) {
		break
	}
	if cancel(); lastError(ctx, s) == nil {
		t.Error("it ends without an error though it was cancelled")
	}
}

// fuzzed reads the samples of a store, and fails if they are not inside their objects.
func fuzzed(t *testing.T, mem *memstore.Mem) {
	_, _, _ = readRows(t, mem, "", OpenOptions{})
	_, _, _ = readRows(t, mem, "", OpenOptions{SkipBad: true})
}

func FuzzDocuments(f *testing.F) {
	for _, name := range []string{"a_text_document", "b_text_sentence"} {
		idx, _ := os.ReadFile(written + "/megatron/" + name + ".idx")
		bin, _ := os.ReadFile(written + "/megatron/" + name + ".bin")
		f.Add(idx, bin)
	}
	f.Fuzz(func(t *testing.T, idx, bin []byte) {
		mem := memstore.New()
		mem.PutBytes("a.bin", bin)
		mem.PutBytes("a.idx", idx)
		fuzzed(t, mem)
	})
}

func FuzzMDS(f *testing.F) {
	for _, folder := range []string{"mds", "tokens"} {
		ix, _ := os.ReadFile(written + "/" + folder + "/index.json")
		shard, _ := os.ReadFile(written + "/" + folder + "/shard.00000.mds")
		f.Add(ix, shard)
		f.Add([]byte(fmt.Sprintf(`{"version": 2, "shards": [{"version": 2, "format": "mds", "column_names": ["a", "b"], "column_encodings": ["str", "bytes"], "column_sizes": [null, null],
			"raw_data": {"basename": "shard.00000.mds", "bytes": %d}, "samples": 1}]}`, 4*3+8+3)), []byte("\x01\x00\x00\x00\x0c\x00\x00\x00\x17\x00\x00\x00\x01\x00\x00\x00\x02\x00\x00\x00abc"))
	}
	f.Fuzz(func(t *testing.T, ix, shard []byte) {
		mem := memstore.New()
		mem.PutBytes("index.json", ix)
		mem.PutBytes("shard.00000.mds", shard)
		fuzzed(t, mem)
	})
}
