package shard

import (
	"archive/tar"
	"bytes"
	"errors"
	"hash/crc32"
	"io"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/shoalfs/shoal/cache/catalog"
)

// A header is what its length was planned to be, and archive/tar reads what was put in.
func TestHeader(t *testing.T) {
	if h := tarHeader("a\x00b", 1, 0); h != nil || headerLen("ü\x00b", 1) != 0 {
		t.Errorf("NUL in a name: %q", h)
	}
	long := strings.Repeat("d/", 90) + "x.jpg"
	check := func(t rapid.TB, name string, size, mtime int64) {
		h := tarHeader(name, size, mtime)
		if int64(len(h)) != headerLen(name, size) {
			t.Fatalf("%.80q of %d bytes: header has %d bytes, planned %d", name, size, len(h), headerLen(name, size))
		}
		in := bytes.NewReader(h)
		got, err := tar.NewReader(in).Next()
		if err != nil {
			t.Fatalf("%q: %v", name, err)
		}
		if got.Name != name || got.Size != size || got.Typeflag != tar.TypeReg || got.Mode != 0o644 || got.Uid != 0 ||
			in.Len() != 0 {
			t.Fatalf("%q of %d bytes reads back as %+v, %d bytes behind it", name, size, got, in.Len())
		}
		if want := time.Unix(max(0, mtime), 0); mtime <= ustarOctal && !got.ModTime.Equal(want) {
			t.Fatalf("%q: time %v, want %v", name, got.ModTime, want)
		}
	}
	for _, c := range []struct {
		name   string
		size   int64
		blocks int64
	}{
		{"a.jpg", 0, 1},
		{strings.Repeat("a", 100), 1, 1},
		{strings.Repeat("a", 101), 1, 3},
		{long, 1, 1},
		{strings.Repeat("p", 155) + "/" + strings.Repeat("n", 100), 1, 1},
		{strings.Repeat("p", 156) + "/" + strings.Repeat("n", 99), 1, 3},
		{"é.jpg", 1, 3},
		{strings.Repeat("ü/", 2000) + "x", 1, 2 + 12},
		{"a.bin", ustarOctal, 1},
		{"a.bin", ustarOctal + 1, 3},
	} {
		if got := headerLen(c.name, c.size); got != c.blocks*blockSize {
			t.Errorf("%.40q of %d bytes: header of %d bytes, want %d blocks", c.name, c.size, got, c.blocks)
		}
		check(t, c.name, c.size, 1e9)
	}
	rapid.Check(t, func(t *rapid.T) {
		part := rapid.StringMatching(`[a-zé%. ]{1,60}`)
		name := strings.Join(rapid.SliceOfN(part, 1, 30).Draw(t, "parts"), "/")
		check(t, name, rapid.Int64Range(0, 1<<40).Draw(t, "size"), rapid.Int64Range(-5, 1<<34).Draw(t, "mtime"))
	})
}

// The regular expression by which WebDataset splits names.
var wdsSplit = regexp.MustCompile(`^((?:.*/|)[^.]+)[.]([^/]*)$`)

func TestEscape(t *testing.T) {
	long := strings.Repeat("x", 250)
	for _, c := range []struct {
		name string
		m    mode
		want string
	}{
		{"img.jpg", modePlain, "img.jpg"},
		{"img.seg.png", modePlain, "img.seg.png"},
		{"img.0001.jpg", modeSplit, "img%2E0001.jpg"},
		{"img.jpg", modeSplit, "img.jpg"},
		{"frame.0001", modeWhole, "frame%2E0001.noext"},
		{"LICENSE", modePlain, "LICENSE.noext"},
		{"LICENSE.noext", modePlain, "LICENSE%2Enoext.noext"},
		{"foo.", modePlain, "foo%2E.noext"},
		{".DS_Store", modePlain, "%2EDS_Store.noext"},
		{".a.jpg", modePlain, "%2Ea.jpg"},
		{"...", modePlain, "%2E%2E%2E.noext"},
		{"a%20b.jpg", modePlain, "a%20b.jpg"},
		{"a%2Eb.jpg", modePlain, "a%252Eb.jpg"},
		{"a%25.jpg", modePlain, "a%2525.jpg"},
		{"a..jpg", modePlain, "a..jpg"},
		{long + ".x.y", modePlain, long + ".x.y"},
		{long + ".x.yy", modeSplit, "%2e"},
	} {
		got := escape(c.name, c.m, nil).String()
		if strings.HasPrefix(c.want, "%2e") {
			if !strings.HasPrefix(got, "%2e") || len(got) != 3+32+3 {
				t.Errorf("%.20q: %q", c.name, got)
			}
			continue
		}
		if got != c.want {
			t.Errorf("%q: %q, want %q", c.name, got, c.want)
		}
	}
}

func TestEscapeIsUnique(t *testing.T) {
	unescape := strings.NewReplacer("%2E", ".", "%25", "%")
	name := rapid.Custom(func(t *rapid.T) string {
		return strings.Join(rapid.SliceOfN(rapid.SampledFrom([]string{".", "%", "2", "E", "e", "5", "a", "noext", "é"}),
			1, 12).Draw(t, "name"), "")
	}).Filter(func(s string) bool { return s != "." && s != ".." })
	rapid.Check(t, func(t *rapid.T) {
		n := name.Draw(t, "name")
		m := mode(rapid.IntRange(0, 2).Draw(t, "mode"))
		got := escape(n, m, nil).String()
		back := strings.TrimSuffix(got, "."+noExt)
		if back = unescape.Replace(back); back != n {
			t.Fatalf("%q (mode %d) is written %q, which reads as %q", n, m, got, back)
		}
		if !wdsSplit.MatchString("d.e/" + got) {
			t.Fatalf("%q is written %q, which WebDataset drops", n, got)
		}
		if s := wdsSplit.FindStringSubmatch("d.e/" + got); s[1] != "d.e/"+escape(n, m, nil).stem {
			t.Fatalf("%q is written %q, of which WebDataset takes the stem %q", n, got, s[1])
		}
	})
}

func drawIndex(t *rapid.T) (*index, []indexMember) {
	ix := &index{dataset: [32]byte{1, 2}, plan: [16]byte{3}, shard: rapid.IntRange(0, 1e6).Draw(t, "shard"),
		etag: "tag", coded: rapid.Bool().Draw(t, "coded")}
	var list []indexMember
	at, large := int64(0), rapid.Bool().Draw(t, "some are large")
	for range rapid.IntRange(0, 20).Draw(t, "n") {
		m := indexMember{
			off: at + blockSize*rapid.Int64Range(1, 4).Draw(t, "gap"), size: rapid.Int64Range(0, 5000).Draw(t, "size"),
			mtime: rapid.Int64().Draw(t, "mtime"), crc: rapid.Uint32().Draw(t, "crc"),
			path: rapid.StringN(1, 20, 80).Draw(t, "path"), tarName: rapid.StringN(0, 20, 80).Draw(t, "name"),
			etag: rapid.StringN(1, 5, 20).Draw(t, "etag"),
		}
		if large && rapid.Bool().Draw(t, "is large") {
			m.size += 3 * catalog.ExtentSize
			m.sums = strings.Repeat("sum.", catalog.Extents(m.size))
		}
		if m.stored = m.size; ix.coded && m.size > 1 && m.sums == "" && rapid.Bool().Draw(t, "short") {
			m.stored = rapid.Int64Range(1, m.size-1).Draw(t, "stored")
		}
		at = m.off + pad(m.stored)
		if err := ix.append(m); err != nil {
			t.Fatal(err)
		}
		list = append(list, m)
	}
	ix.size = at + endLen
	return ix, list
}

func TestIndexRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		ix, want := drawIndex(t)
		data, err := ix.encode()
		if err != nil {
			t.Fatal(err)
		}
		back, err := parseIndex(data)
		if err != nil {
			t.Fatal(err)
		}
		var got []indexMember
		back.members(func(_ int, m indexMember) bool { got = append(got, m); return true })
		if !slices.Equal(got, want) || back.dataset != ix.dataset || back.plan != ix.plan || back.shard != ix.shard ||
			back.size != ix.size || back.etag != ix.etag {
			t.Fatalf("reads back as %+v %+v", back, got)
		}
		// Every damage of one byte, and every cut, is noticed.
		i := rapid.IntRange(0, len(data)-1).Draw(t, "at")
		bad := slices.Clone(data)
		bad[i] ^= byte(rapid.IntRange(1, 255).Draw(t, "xor"))
		if _, err := parseIndex(bad); !errors.Is(err, catalog.ErrCorrupt) {
			t.Fatalf("byte %d changed: %v", i, err)
		}
		if _, err := parseIndex(data[:i]); !errors.Is(err, catalog.ErrCorrupt) {
			t.Fatalf("cut at %d: %v", i, err)
		}
	})
}

// reseal makes the checksums of a changed index right.
func reseal(data []byte) []byte {
	if len(data) < indexHeader {
		return data
	}
	put := func(at int, v uint32) {
		data[at], data[at+1], data[at+2], data[at+3] = byte(v), byte(v>>8), byte(v>>16), byte(v>>24)
	}
	put(120, crc32.Checksum(data[indexHeader:], castagnoli))
	put(124, crc32.Checksum(data[:124], castagnoli))
	return data
}

func TestIndexRefuses(t *testing.T) {
	ix := &index{etag: "t", size: 3 * blockSize}
	if err := ix.append(indexMember{off: 512, size: 10, path: "p", etag: "e"}); err != nil {
		t.Fatal(err)
	}
	good, err := ix.encode()
	if err != nil {
		t.Fatal(err)
	}
	row := indexHeader + 1
	for name, change := range map[string]func(b []byte){
		"magic":       func(b []byte) { b[0] = 'X' },
		"version 0":   func(b []byte) { b[8] = 0 },
		"header len":  func(b []byte) { b[12] = 64 },
		"members":     func(b []byte) { b[68] = 2 },
		"huge":        func(b []byte) { b[71] = 0xff },
		"tar size":    func(b []byte) { b[72], b[73] = 0, 2 },
		"negative":    func(b []byte) { b[79] = 0x80 },
		"sum":         func(b []byte) { b[80] = 11 },
		"strings":     func(b []byte) { b[95] = 0xff },
		"etag":        func(b []byte) { b[96] = 0 },
		"file length": func(b []byte) { b[112]++ },
		"offset":      func(b []byte) { b[row+1] = 0 },
		"unaligned":   func(b []byte) { b[row]++ },
		"big offset":  func(b []byte) { b[row+7] = 0x7f },
		"member size": func(b []byte) { b[row+9] = 0xff },
		"neg size":    func(b []byte) { b[row+15] = 0xff },
		"no path":     func(b []byte) { b[row+28], b[row+32] = 0, 2 },
		"path length": func(b []byte) { b[row+29] = 1 },
	} {
		b := slices.Clone(good)
		change(b)
		if _, err := parseIndex(reseal(b)); !errors.Is(err, catalog.ErrCorrupt) {
			t.Errorf("%s: %v", name, err)
		}
	}
	b := slices.Clone(good)
	b[8] = 5
	if _, err := parseIndex(reseal(b)); !errors.Is(err, catalog.ErrNewerFormat) {
		t.Errorf("newer: %v", err)
	}
	if err := ix.append(indexMember{path: strings.Repeat("x", 70000), etag: "e"}); err == nil {
		t.Error("a path of 70,000 bytes fits")
	}
}

func FuzzIndex(f *testing.F) {
	ix := &index{etag: "tag", size: 8192}
	for i, p := range []string{"a/b.jpg", "c"} {
		if err := ix.append(indexMember{off: 512 + int64(i)*2048, size: 100, path: p, tarName: "x",
			etag: "e"}); err != nil {
			f.Fatal(err)
		}
	}
	data, err := ix.encode()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(data)
	f.Add(data[:indexHeader])
	f.Fuzz(func(t *testing.T, data []byte) {
		ix, err := parseIndex(reseal(data)) // else it never gets past the checksums
		if err != nil {
			return
		}
		end := int64(0)
		ix.members(func(_ int, m indexMember) bool {
			if m.off < end || m.off+m.size > ix.size || m.path == "" || m.etag == "" {
				t.Fatalf("accepted %+v", m)
			}
			end = m.off + m.size
			return true
		})
	})
}

func goodSummary() Summary {
	return Summary{
		params: params{
			Format: summaryFormat, Version: 1, Dataset: strings.Repeat("ab", 32), Seed: 1<<64 - 1, ShardSize: 1 << 20,
			Plan: strings.Repeat("cd", 16), Source: "s3://b/<p>", Files: 3, Bytes: 100,
		},
		Shards: []SummaryMember{{"shard-000000.tar", 4096, 2, "e1"}, {"shard-000001.tar", 2048, 1, "e2"}},
	}
}

func TestSummary(t *testing.T) {
	good := goodSummary()
	data, err := encodeJSON(good)
	if err != nil {
		t.Fatal(err)
	}
	back, err := ParseSummary(data)
	if err != nil {
		t.Fatal(err)
	}
	if back.params != good.params || !slices.Equal(back.Shards, good.Shards) {
		t.Fatalf("reads back as %+v", back)
	}
	for name, change := range map[string]func(s *Summary){
		"format":     func(s *Summary) { s.Format = "tar" },
		"version":    func(s *Summary) { s.Version = 0 },
		"dataset":    func(s *Summary) { s.Dataset = "../" },
		"plan":       func(s *Summary) { s.Plan = "" },
		"no shards":  func(s *Summary) { s.Shards = nil },
		"shard name": func(s *Summary) { s.Shards[1].Name = "../shard-000001.tar" },
		"order":      func(s *Summary) { s.Shards[0], s.Shards[1] = s.Shards[1], s.Shards[0] },
		"size":       func(s *Summary) { s.Shards[0].Size = -1 },
		"huge":       func(s *Summary) { s.Shards[0].Size = 1 << 62 },
		"members":    func(s *Summary) { s.Shards[0].Members = 1 << 50 },
		"no members": func(s *Summary) { s.Shards[0].Members = 0 },
		"etag":       func(s *Summary) { s.Shards[0].ETag = "" },
		"files":      func(s *Summary) { s.Files = 4 },
		"bytes":      func(s *Summary) { s.Bytes = 1 << 40 },
	} {
		s := goodSummary()
		change(&s)
		data, err := encodeJSON(s)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := ParseSummary(data); !errors.Is(err, catalog.ErrCorrupt) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := ParseSummary([]byte(`{"version":3,"shards":7}`)); !errors.Is(err, catalog.ErrNewerFormat) {
		t.Errorf("newer: %v", err)
	}
}

func FuzzSummary(f *testing.F) {
	s := goodSummary()
	data, err := encodeJSON(s)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(data)
	f.Fuzz(func(t *testing.T, data []byte) {
		if s, err := ParseSummary(data); err == nil {
			n := 0
			for _, m := range s.Shards {
				n += m.Members
				if strings.Contains(m.Name, "/") || m.Size < 0 {
					t.Fatalf("accepted %+v", m)
				}
			}
			if n != s.Files {
				t.Fatalf("%d files, shards hold %d", s.Files, n)
			}
		}
		if p, err := parseMarker(data); err == nil && p.Files <= 0 {
			t.Fatalf("accepted %+v", p)
		}
	})
}

func TestParseWds(t *testing.T) {
	good := "v1.2 2\njpg 512 10 a/1.jpg json 1536 5 a/1.json\ncls.txt 2560 0 2.cls.txt\n"
	ix, err := parseWds([]byte(good))
	if err != nil || ix.len() != 3 {
		t.Fatalf("%v, %v", ix, err)
	}
	if _, err := parseWds([]byte("v1.1 1\njpg 512 10\n")); !errors.Is(err, errNoNames) {
		t.Errorf("v1.1: %v", err)
	}
	for _, bad := range []string{
		"", "v1.2", "v1.2 x\n", "v1.2 -1\n", "v1.2 0\n", "v1.2 99999999999999999999\n", "v1.2 2\njpg 512 10 1.jpg\n",
		"v9 1\n", "v1.2 1\njpg 512 10\n", "v1.2 1\njpg 512 ten 1.jpg\n", "v1.2 1\njpg 512 -1 1.jpg\n",
		"v1.2 1\njpg 512 10 my photo.jpg\n", "v1.2 1\njpg 512 10 1.png\n", "v1.2 1\njpg 512 10 \\303.jpg\n",
		"v1.2 1\njpg 512 10 1.jpg\nextra 1 1 1.extra\n", "v1.2 2\njpg 5120 10 1.jpg\njpg 512 10 2.jpg\n", "v1.2 1\n\n",
		"v1.2 1\njpg 9223372036854775807 9223372036854775807 1.jpg\n", "v1.2 1\nREADME 512 10 README\n",
	} {
		if _, err := parseWds([]byte(bad)); !errors.Is(err, catalog.ErrCorrupt) {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

func FuzzWds(f *testing.F) {
	f.Add([]byte("v1.2 2\njpg 512 10 a/1.jpg json 1536 5 a/1.json\ncls.txt 2560 0 2.cls.txt\n"))
	f.Add([]byte("v1.1 1\njpg 512 10\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		ix, err := parseWds(data)
		if err != nil {
			return
		}
		end := int64(0)
		ix.members(func(_ int, m indexMember) bool {
			if m.off < end || m.size < 0 || m.off+m.size < m.off || m.path == "" {
				t.Fatalf("accepted %+v", m)
			}
			end = m.off + m.size
			return true
		})
	})
}

var _ io.ReadSeeker = (*ahead)(nil)
