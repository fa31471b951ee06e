package shard

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
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

	"github.com/shoalfs/shoal/cache/objstore"
)

// item is an entry of a tar in a test. Its bytes are its name's.
type item struct {
	name   string
	size   int
	flag   byte
	format tar.Format
}

func makeTar(t rapid.TB, items ...item) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for i, it := range items {
		h := &tar.Header{Name: it.name, Size: int64(it.size), Typeflag: it.flag, Mode: 0o644,
			ModTime: time.Unix(1e9, 0), Format: it.format}
		switch it.flag {
		case 0:
			h.Typeflag = tar.TypeReg
		case tar.TypeSymlink, tar.TypeLink:
			h.Linkname = "target"
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(bytesOf(uint64(i), it.size)); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func paths(list []Member) (out []string) {
	for _, m := range list {
		out = append(out, m.Path)
	}
	return out
}

// checkForeign compares members with what archive/tar itself reads from the shards.
func checkForeign(t rapid.TB, s *store, set *Set, list []Member) {
	t.Helper()
	data := make(map[string][]byte)
	for i, o := range set.Shards {
		b := get(t, s, o.Key)
		r := tar.NewReader(bytes.NewReader(b))
		for {
			h, err := r.Next()
			if err != nil {
				break
			}
			if data[fmt.Sprintf("%d %s", i, trimName(h.Name))], err = io.ReadAll(r); err != nil {
				t.Fatal(err)
			}
		}
	}
	lastShard, lastOff := -1, int64(0)
	for _, m := range list {
		name := m.Path
		want, ok := data[fmt.Sprintf("%d %s", m.Shard, name)]
		if !ok { // renamed: DIR/SHARD~BASE or DIR/SHARD~2~BASE
			dir, base := filepath.Split(name)
			for more := true; more && !ok; {
				_, base, more = strings.Cut(base, "~")
				want, ok = data[fmt.Sprintf("%d %s", m.Shard, dir+base)]
			}
		}
		got := make([]byte, m.Size)
		if err := s.Mem.ReadAt(context.Background(), set.Shards[m.Shard], got, m.Off); err != nil || !ok ||
			!bytes.Equal(got, want) {
			t.Fatalf("%+v: other bytes than archive/tar's, %v", m, err)
		}
		if want := fmt.Sprintf("%s+%d", set.Shards[m.Shard].ETag, m.Off); m.ETag != want {
			t.Fatalf("%q: ETag %s, want %s", m.Path, m.ETag, want)
		}
		if m.Shard < lastShard || m.Shard == lastShard && m.Off <= lastOff {
			t.Fatalf("%+v is out of order", m)
		}
		lastShard, lastOff = m.Shard, m.Off
	}
}

func TestForeign(t *testing.T) {
	long := strings.Repeat("n", 3000)
	for _, c := range []struct {
		name   string
		tars   [][]item
		want   []string
		report Report
	}{
		{"plain", [][]item{{{name: "a/1.jpg", size: 700}, {name: "a/1.cls", size: 1}, {name: "b/empty"}}},
			[]string{"a/1.jpg", "a/1.cls", "b/empty"}, Report{Members: 3, FromHeaders: 1}},
		{"empty", [][]item{{}, {{name: "x", size: 1}}}, []string{"x"}, Report{Members: 1, FromHeaders: 2}},
		{"dot slash", [][]item{{{name: "./", flag: tar.TypeDir}, {name: "./a", size: 1}, {name: ".//./b", size: 2},
			{name: ".c", size: 3}}},
			[]string{"a", "b", ".c"}, Report{Members: 3, FromHeaders: 1}},
		{"GNU long names", [][]item{
			{{name: "d/" + strings.Repeat("l", 200), size: 5, format: tar.FormatGNU},
				{name: "é/ü", size: 4, format: tar.FormatPAX}}},
			[]string{"d/" + strings.Repeat("l", 200), "é/ü"}, Report{Members: 2, FromHeaders: 1}},
		{"what is no file", [][]item{
			{{name: "l", flag: tar.TypeSymlink}, {name: "h", flag: tar.TypeLink}, {name: "f", flag: tar.TypeFifo},
				{name: "c", flag: tar.TypeChar}, {name: "d/", flag: tar.TypeDir}, {name: "x", size: 9}}},
			[]string{"x"}, Report{Members: 1, FromHeaders: 1, Skipped: 4}},
		{"twice in one", [][]item{
			{{name: "a", size: 1}, {name: "b", size: 2}, {name: "./a", size: 3}, {name: "a", size: 4}}},
			[]string{"b", "a"}, Report{Members: 2, FromHeaders: 1, Replaced: 2}},
		{"twice in two", [][]item{{{name: "c/x.jpg", size: 1}, {name: "y", size: 2}}, {{name: "c/x.jpg", size: 3}},
			{{name: "c/x.jpg", size: 4}, {name: "y", size: 5}, {name: "c/t1~x.jpg", size: 6}}},
			[]string{"c/x.jpg", "y", "c/t1~x.jpg", "c/t2~x.jpg", "t2~y", "c/t2~t1~x.jpg"},
			Report{Members: 6, FromHeaders: 3, Renamed: 4}},
		{"hostile names are left to the catalog",
			[][]item{{{name: "../x", size: 1}, {name: "/etc/passwd", size: 2}, {name: "a//b", size: 3},
				{name: "a/./b", size: 3}, {name: strings.Repeat("n", 300), size: 4}, {name: "ok", size: 5}}},
			[]string{"../x", "/etc/passwd", "a//b", "a/./b", strings.Repeat("n", 300), "ok"},
			Report{Members: 6, FromHeaders: 1}},
		{"name of 64 KiB", [][]item{
			{{name: strings.Repeat("n/", 32<<10) + "n", size: 1, format: tar.FormatPAX},
				{name: strings.Repeat("m", 64<<10), size: 1, format: tar.FormatGNU},
				{name: long, size: 2, format: tar.FormatPAX}}},
			[]string{long}, Report{Members: 1, FromHeaders: 1, Skipped: 2}},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newStore()
			for i, items := range c.tars {
				s.PutBytes(fmt.Sprintf("p/t%d.tar", i), makeTar(t, items...))
			}
			src := objstore.Source{Prefix: "p/"}
			if ok, err := IsSet(context.Background(), s, src); err != nil || !ok {
				t.Fatalf("IsSet: %v, %v", ok, err)
			}
			set, list, err := members(context.Background(), s, src)
			if err != nil {
				t.Fatal(err)
			}
			if got := paths(list); !slices.Equal(got, c.want) {
				t.Errorf("members %.200q, want %.200q", got, c.want)
			}
			got := set.Report()
			if n := got.Renamed + got.Replaced + got.Skipped; n != len(got.Examples) {
				t.Errorf("examples %q", got.Examples)
			}
			got.Examples = nil
			if fmt.Sprint(got) != fmt.Sprint(c.report) {
				t.Errorf("report %+v, want %+v", got, c.report)
			}
			checkForeign(t, s, set, list)
			if strings.HasPrefix(c.name, "hostile") {
				if m := rebuild(t, list); m.Len() != 1 || m.Skipped().Hostile != 5 {
					t.Errorf("the catalog shows %d files and counts %+v", m.Len(), m.Skipped())
				}
			}
		})
	}
}

// paxHeader makes a PAX header block and its body.
func paxHeader(records ...string) []byte {
	var body []byte
	for i := 0; i < len(records); i += 2 {
		body = appendPax(body, records[i], records[i+1])
	}
	b := appendBlock(nil, "", "PaxHeaders.0/x", 'x', int64(len(body)), 0)
	return append(b, append(body, make([]byte, pad(int64(len(body)))-int64(len(body)))...)...)
}

func TestForeignRefuses(t *testing.T) {
	good := makeTar(t, item{name: "a", size: 700}, item{name: "b", size: 1000})
	member := append(tarHeader("m", 3, 0), append([]byte("abc"), make([]byte, 509)...)...)
	join := func(parts ...[]byte) []byte { return bytes.Join(parts, nil) }
	sparse := appendBlock(nil, "", "holes", 'S', 0, 0)
	copy(sparse[257:], "ustar  \x00")
	sum := int64(8 * ' ')
	for i, c := range sparse {
		if i < 148 || i >= 156 {
			sum += int64(c)
		}
	}
	octal(sparse[148:155], sum)
	for _, c := range []struct {
		name string
		data []byte
		want string
	}{
		{"truncated in the bytes", good[:1000], `"a" has 700 bytes at offset 512, but the shard ends at 1000`},
		{"truncated in a header", good[:1800],
			"it is truncated: it ends at 1800, inside the entry that begins at offset 1536"},
		{"no bytes", nil, "it has 0 bytes"},
		{"garbage", bytesOf(1, 4096), "no tar header at offset 0"},
		{"garbage in the middle", join(member, bytesOf(1, 4096)), "no tar header at offset 1024"},
		{"shorter than a block", []byte("hello"), "it is truncated"},
		{"gzip", append([]byte("\x1f\x8b\x08\x00"), bytesOf(1, 2000)...), "compressed with gzip"},
		{"zstd", append([]byte("\x28\xb5\x2f\xfd"), bytesOf(1, 2000)...), "compressed with zstd"},
		{"GNU sparse", join(member, sparse, make([]byte, 1024)), `"holes" is sparse`},
		{"PAX sparse 0.1", join(paxHeader("GNU.sparse.map", "0,1", "GNU.sparse.size", "10", "GNU.sparse.numblocks",
			"1"), member, make([]byte, 1024)), "is sparse"},
		{"PAX sparse 1.0", join(paxHeader("GNU.sparse.major", "1", "GNU.sparse.minor", "0", "GNU.sparse.name", "holes",
			"GNU.sparse.realsize", "100"),
			tarHeader("m", 515, 0), []byte("1\n0\n3\n"), make([]byte, 506), []byte("abc"), make([]byte, 509),
			make([]byte, 1024)), `"holes" is sparse`},
		{"PAX size behind the end", join(paxHeader("size", "9223372036854775807"), member),
			"9223372036854775807 bytes at offset 1536"},
		{"negative PAX size", join(paxHeader("size", "-1"), member), "no tar header at offset 0"},
		{"NUL in a PAX name", join(paxHeader("path", "a\x00b"), member), "no tar header at offset 0"},
		{"PAX header of 2 MiB", join(appendBlock(nil, "", "x", 'x', 2<<20, 0), make([]byte, 2<<20), member),
			"no tar header at offset 0"},
		{"wrong checksum", join(member, bytes.Replace(member, []byte("0000644"), []byte("0000645"), 1)),
			"no tar header at offset 1024"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newStore()
			s.PutBytes("p/bad.tar", c.data)
			_, _, err := members(context.Background(), s, objstore.Source{Prefix: "p/"})
			if err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), "p/bad.tar") {
				t.Fatalf("%v, want %q", err, c.want)
			}
		})
	}
}

// Random tars, read by windows, give what archive/tar reads from the whole.
func TestForeignModel(t *testing.T) {
	name := rapid.StringMatching(`(\./)?([abc]/){0,2}[a-e]{1,2}(\.jpg)?|[x-z]{120,130}`)
	sizes := rapid.SampledFrom([]int{0, 1, 511, 512, 513, 700, 1023, 1024, 1025, 3000, 4096, 5000, 5120, 9999, 30000,
		60000, 99999, 600 << 10})
	rapid.Check(t, func(t *rapid.T) {
		s := newStore()
		for i := range rapid.IntRange(1, 4).Draw(t, "tars") {
			var items []item
			for range rapid.IntRange(0, 12).Draw(t, "members") {
				items = append(items, item{
					name: name.Draw(t, "name"), size: sizes.Draw(t, "size"),
					format: rapid.SampledFrom([]tar.Format{0, tar.FormatGNU, tar.FormatPAX}).Draw(t, "format"),
				})
			}
			s.PutBytes(fmt.Sprintf("p/%03d.tar", i), makeTar(t, items...))
		}
		set, list, err := members(context.Background(), s, objstore.Source{Prefix: "p/"})
		if err != nil {
			t.Fatal(err)
		}
		checkForeign(t, s, set, list)
		got := paths(list)
		slices.Sort(got)
		if len(slices.Compact(got)) != len(list) {
			t.Fatalf("two members have one path: %q", got)
		}
	})
}

// With SkipBad a shard that is damaged or missing costs what it holds, and no more; what the store does not answer is
// an error all the same, and so is a set of which nothing is left.
func TestSkipBad(t *testing.T) {
	ctx := context.Background()
	all := func(s *store, src objstore.Source, skip bool) (*Set, []Member, error) {
		set, err := Open(ctx, s, src, OpenOptions{SkipBad: skip})
		var list []Member
		if err == nil {
			for m, e := range set.Members(ctx) {
				if err = e; err == nil {
					list = append(list, m)
				}
			}
		}
		return set, list, err
	}
	check := func(t *testing.T, s *store, src objstore.Source, bad []int, shown int) {
		t.Helper()
		if _, _, err := all(s, src, false); err == nil || !strings.Contains(err.Error(), "--bad-shards") {
			t.Errorf("without SkipBad: %v", err)
		}
		for range 2 {
			set, list, err := all(s, src, true)
			if err != nil {
				t.Fatal(err)
			}
			if got := slices.Sorted(maps.Keys(set.Bad())); !slices.Equal(got, bad) || len(list) != shown {
				t.Errorf("%v are bad, and %d members shown, want %v and %d", set.Bad(), len(list), bad, shown)
			}
			for _, m := range list {
				if err := s.Mem.ReadAt(ctx, set.Shards[m.Shard], make([]byte, m.Size), m.Off); err != nil {
					t.Error(err)
				}
			}
		}
	}
	whole := func(i int) []byte {
		return makeTar(t, item{name: fmt.Sprintf("c%d/a.jpg", i), size: 700},
			item{name: fmt.Sprintf("c%d/b.jpg", i), size: 9})
	}
	foreign := func() *store {
		s := newStore()
		for i := range 40 { // more than are read at once
			s.PutBytes(fmt.Sprintf("p/x-%02d.tar", i), whole(i))
		}
		s.PutBytes("p/x-07.tar", whole(7)[:1000])
		s.PutBytes("p/x-39.tar", bytesOf(1, 3000))
		s.PutBytes("p/x-00.tar", append([]byte("\x1f\x8b"), bytesOf(2, 900)...))
		return s
	}
	t.Run("foreign", func(t *testing.T) { check(t, foreign(), objstore.Source{Prefix: "p/"}, []int{0, 7, 39}, 74) })
	t.Run("named", func(t *testing.T) {
		check(t, foreign(), objstore.Source{Prefix: "p/", Shards: "x-{00..41}.tar"}, []int{0, 7, 39, 40, 41}, 74)
	})
	t.Run("own", func(t *testing.T) {
		s := newStore()
		o := small(1)
		if _, err := Pack(ctx, fill(t, s, manyFiles(60)), s, s, "out/", o); err != nil {
			t.Fatal(err)
		}
		set, list, err := all(s, out, false)
		if err != nil || len(set.Shards) < 5 {
			t.Fatal(err, len(set.Shards))
		}
		var left int
		for _, m := range list {
			if m.Shard != 1 && m.Shard != 2 && m.Shard != 3 {
				left++
			}
		}
		must := func(err error) {
			if err != nil {
				t.Fatal(err)
			}
		}
		must(s.Mem.Delete(ctx, "out/"+shardName(1), ""))
		s.PutBytes("out/"+shardName(2), []byte("cut short"))
		s.PutBytes("out/"+shardName(3)+indexSuffix, bytesOf(3, 500))
		check(t, s, out, []int{1, 2, 3}, left)
	})
	t.Run("manifest", func(t *testing.T) {
		s := newStore()
		m := fill(t, s, manyFiles(60))
		if _, err := Pack(ctx, m, s, s, "out/", small(1)); err != nil {
			t.Fatal(err)
		}
		summary := get(t, s, "out/"+SummaryName)
		s.PutBytes("out/"+SummaryName, summary[:len(summary)/2])
		check(t, s, out, nil, m.Len())
	})
	t.Run("nothing left", func(t *testing.T) {
		s := newStore()
		s.PutBytes("p/x.tar", []byte("no tar"))
		if _, _, err := all(s, objstore.Source{Prefix: "p/"}, true); err == nil ||
			!strings.Contains(err.Error(), "p/x.tar") {
			t.Errorf("%v", err)
		}
	})
	t.Run("the store fails", func(t *testing.T) {
		set, err := Open(ctx, failingReader{foreign(), "p/x-20.tar"}, objstore.Source{Prefix: "p/"},
			OpenOptions{SkipBad: true})
		if err != nil {
			t.Fatal(err)
		}
		for _, err = range set.Members(ctx) {
			if err != nil {
				break
			}
		}
		if objstore.KindOf(err) != objstore.KindTransient {
			t.Errorf("%v", err)
		}
	})
}

// failingReader does not answer reads of one key.
type failingReader struct {
	*store
	key string
}

func (r failingReader) ReadAt(ctx context.Context, o objstore.Object, p []byte, off int64) error {
	if o.Key == r.key {
		return &objstore.Error{Op: "read", Key: o.Key, Kind: objstore.KindTransient}
	}
	return r.store.ReadAt(ctx, o, p, off)
}

// wds2idx makes an index as DALI's tool does, from GNU tar's block numbers.
func wds2idx(t *testing.T, data []byte) []byte {
	t.Helper()
	name := filepath.Join(t.TempDir(), "x.tar")
	if err := os.WriteFile(name, data, 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("python3", filepath.Join("testdata", "wds2idx.py"), name).Output()
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func TestWds2idx(t *testing.T) {
	plain := []item{{name: "a/1.jpg", size: 700}, {name: "a/1.cls", size: 1}, {name: "./a/2.jpg", size: 512},
		{name: "a/2.cls"}}
	plainIdx := wds2idx(t, makeTar(t, plain...))
	for _, c := range []struct {
		name  string
		items []item
		used  bool
		alter func(idx []byte) []byte
	}{
		{"plain", plain, true, nil},
		{"carriage returns", plain, true, func(b []byte) []byte {
			return bytes.ReplaceAll(b, []byte("\n"), []byte("\r\n"))
		}},
		{"with a folder", append([]item{{name: "a/", flag: tar.TypeDir}}, plain...), false, nil},
		{"with a dotfile", append([]item{{name: "a/.hidden", size: 3}}, plain...), false, nil},
		{"with PAX", []item{{name: "a/1.jpg", size: 3, format: tar.FormatPAX},
			{name: strings.Repeat("é", 80) + ".jpg", size: 4}}, false, nil},
		{"with a space", []item{{name: "a/my 1.jpg", size: 3}}, false, nil},
		{"last one missing", plain, false, func(b []byte) []byte {
			return []byte("v1.2 1\njpg 512 700 a/1.jpg cls 2048 1 a/1.cls\n")
		}},
		{"another name", plain, false, func(b []byte) []byte {
			return bytes.Replace(b, []byte("a/1.jpg"), []byte("b/1.jpg"), 1)
		}},
		{"another size", plain, false, func(b []byte) []byte {
			return bytes.Replace(b, []byte(" 700 "), []byte(" 701 "), 1)
		}},
		{"v1.1", plain, false, func([]byte) []byte { return []byte("v1.1 1\njpg 512 700\n") }},
		{"garbage", plain, false, func([]byte) []byte { return bytesOf(1, 100) }},
		{"empty", plain, false, func([]byte) []byte { return nil }},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newStore()
			data := makeTar(t, c.items...)
			s.PutBytes("p/x.tar", data)
			set, want, err := members(context.Background(), s, objstore.Source{Prefix: "p/"})
			if err != nil || set.Report().FromHeaders != 1 {
				t.Fatal(err, set.Report())
			}
			idx := plainIdx
			if &c.items[0] != &plain[0] {
				idx = wds2idx(t, data)
			}
			if c.alter != nil {
				idx = c.alter(slices.Clone(idx))
			}
			s.PutBytes("p/x.idx", idx)
			set, got, err := members(context.Background(), s, objstore.Source{Prefix: "p/"})
			if err != nil {
				t.Fatal(err)
			}
			if used := set.Report().FromWds2idx == 1; used != c.used {
				t.Errorf("index used: %v, want %v\n%s", used, c.used, idx)
			}
			for i := range got {
				got[i].ModTime, want[i].ModTime = time.Time{}, time.Time{}
			}
			if !slices.Equal(got, want) {
				t.Errorf("members %+v, want %+v", got, want)
			}
			// An index that is older than its tar belongs to another one.
			s.PutBytes("p/x.tar", data)
			if set, _, err = members(context.Background(), s, objstore.Source{Prefix: "p/"}); err != nil ||
				set.Report().FromHeaders != 1 {
				t.Errorf("older index: %v, %+v", err, set.Report())
			}
		})
	}
}

// A pattern names shards among other objects; those of our own sets are read by their indexes.
func TestPattern(t *testing.T) {
	ctx := context.Background()
	s := newStore()
	for i := range 3 {
		s.PutBytes(fmt.Sprintf("p/s-%d.tar", i), makeTar(t, item{name: fmt.Sprintf("%d.jpg", i), size: 10 * i}))
	}
	s.PutBytes("p/readme.md", nil)
	s.PutBytes("p/s-9.tar.gz", nil)
	src := objstore.Source{Scheme: "s3", Bucket: "b", Prefix: "p/", Shards: "s-{2,0}.tar"}
	if ok, err := IsSet(ctx, s, src); err != nil || !ok {
		t.Fatal(ok, err)
	}
	set, list, err := members(ctx, s, src)
	if err != nil || !slices.Equal(paths(list), []string{"2.jpg", "0.jpg"}) || set.Version != "" {
		t.Fatal(paths(list), err)
	}
	for pattern, want := range map[string]string{
		"s-{0..5}.tar":    "p/s-3.tar, which is not there",
		"s-{0,0}.tar":     "twice",
		"s-9.tar.gz":      "not a .tar",
		"other-{0,1}.tar": "not there",
	} {
		src.Shards = pattern
		if _, err := Open(ctx, s, src, OpenOptions{}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", pattern, err, want)
		}
	}

	m := fill(t, s, map[string]int{"c/.a.jpg": 10, "c/b": 20})
	o := small(1)
	o.ShardSize = 1
	if _, err := Pack(ctx, m, s, s, "out/", o); err != nil {
		t.Fatal(err)
	}
	src = objstore.Source{Scheme: "s3", Bucket: "b", Prefix: "out/", Shards: "shard-{000000..000001}.tar"}
	set, list, err = members(ctx, s, src)
	if err != nil || set.Report().FromIndex != 2 || rebuild(t, list).Version() != m.Version() {
		t.Fatal(set.Report(), paths(list), err)
	}
	// An index that does not fit is not used where there are headers.
	s.PutBytes("out/shard-000000.tar.sidx", get(t, s, "out/shard-000001.tar.sidx"))
	set, list, err = members(ctx, s, src)
	if r := set.Report(); err != nil || r.FromIndex != 1 || r.FromHeaders != 1 || len(list) != 2 {
		t.Fatal(r, paths(list), err)
	}
}

func TestIsSet(t *testing.T) {
	for _, c := range []struct {
		keys []string
		want bool
	}{
		{[]string{"p/a.tar"}, true},
		{[]string{"p/a.tar", "p/a.idx", "p/b/c.tar", "p/info.json", "p/b/"}, true},
		{[]string{"p/a.tar", "p/readme.md"}, false},
		{[]string{"p/a.json"}, false},
		{[]string{"p/a.tar.gz"}, false},
		{[]string{"p/shoal-manifest.json", "p/x.jpg"}, true},
		{[]string{"p/shoal-pack.json", "p/x.jpg"}, true},
		{nil, false},
	} {
		s := newStore()
		for _, k := range c.keys {
			s.PutBytes(k, nil)
		}
		if got, err := IsSet(context.Background(), s, objstore.Source{Prefix: "p/"}); err != nil || got != c.want {
			t.Errorf("%q: %v, %v", c.keys, got, err)
		}
	}
	s := newStore()
	s.failAt = 1
	if _, err := IsSet(context.Background(), s, objstore.Source{Prefix: "p/"}); !errors.Is(err, errKilled) {
		t.Error(err)
	}
}

// Sets of ours that are not whole.
func TestOwnRefuses(t *testing.T) {
	ctx := context.Background()
	for _, c := range []struct {
		name   string
		damage func(s *store)
		want   string
	}{
		{"shard gone", func(s *store) {
			_ = s.Delete(ctx, "out/shard-000001.tar", "")
		}, "names out/shard-000001.tar, which is not there"},
		{"index gone", func(s *store) {
			_ = s.Delete(ctx, "out/shard-000001.tar.sidx", "")
		}, "names out/shard-000001.tar.sidx, which is not there"},
		{"another size", func(s *store) { s.PutBytes("out/shard-000001.tar", []byte("x")) }, "but it has 1"},
		{"index damaged", func(s *store) {
			b := get(t, s, "out/shard-000001.tar.sidx")
			b[200] ^= 1
			s.PutBytes("out/shard-000001.tar.sidx", b)
		}, "index out/shard-000001.tar.sidx: corrupt"},
		{"index of another shard", func(s *store) {
			s.PutBytes("out/shard-000001.tar.sidx", get(t, s, "out/shard-000000.tar.sidx"))
		}, "index out/shard-000001.tar.sidx: corrupt"},
		{"another tar of this size", func(s *store) {
			b := get(t, s, "out/shard-000001.tar")
			copy(b, "xxxxxxxx")
			s.PutBytes("out/shard-000001.tar", b)
		}, "another tar than out/shard-000001.tar"},
		{"manifest gone", func(s *store) {
			_ = s.Delete(ctx, "out/"+SummaryName, "")
			s.PutBytes("out/"+MarkerName, nil)
		}, "not complete"},
		{"manifest damaged", func(s *store) {
			s.PutBytes("out/"+SummaryName, []byte("[]"))
		}, "out/shoal-manifest.json: corrupt"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newStore()
			m := fill(t, s, manyFiles(20))
			if _, err := Pack(ctx, m, s, s, "out/", small(1)); err != nil {
				t.Fatal(err)
			}
			c.damage(s)
			_, _, err := members(ctx, s, out)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Fatalf("%v, want %q", err, c.want)
			}
		})
	}
}

// A copy of a set has other ETags and is the same dataset.
func TestCopiedSet(t *testing.T) {
	ctx := context.Background()
	s := newStore()
	m := fill(t, s, manyFiles(20))
	if _, err := Pack(ctx, m, s, s, "out/", small(1)); err != nil {
		t.Fatal(err)
	}
	for _, k := range keys(s, "out/") {
		s.PutBytes("out/"+k, get(t, s, "out/"+k))
	}
	checkSet(t, s, m)
}

// A loop that ends early, and a context that ends, leave nothing behind, also where a shard waits for
// memory.
func TestMembersEndEarly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStore()
		for i := range 30 {
			var items []item
			for j := range 30 {
				items = append(items, item{name: fmt.Sprintf("%d/%d", i, j), size: 1000})
			}
			s.PutBytes(fmt.Sprintf("p/%02d.tar", i), makeTar(t, items...))
		}
		s.latency = time.Millisecond
		set, err := Open(context.Background(), s, objstore.Source{Prefix: "p/"}, OpenOptions{memory: 1})
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		for _, err := range set.Members(context.Background()) {
			if err != nil {
				t.Fatal(err)
			}
			if n++; n == 40 {
				synctest.Wait() // the next shards wait for memory
				break
			}
		}
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		n = 0
		for _, err = range set.Members(ctx) {
			if n++; n == 40 {
				cancel()
			}
		}
		if !errors.Is(err, context.Canceled) {
			t.Errorf("ended with %v after %d", err, n)
		}
		n = 0
		for _, err := range set.Members(context.Background()) {
			if err != nil {
				t.Fatal(err)
			}
			n++
		}
		if n != 900 || set.Report().Members != 900 {
			t.Errorf("%d members with 1 byte of memory", n)
		}
	})
}

// Small members are read through, large ones jumped over.
func TestScanRequests(t *testing.T) {
	for _, c := range []struct {
		n, size int
		maxGets int
		maxRead int64
	}{
		{400, 63 << 10, 30, 26 << 20},
		{12, 2 << 20, 16, 1 << 20},
		{5000, 100, 10, 6 << 20},
	} {
		s := newStore()
		var items []item
		for i := range c.n {
			items = append(items, item{name: fmt.Sprintf("c/%06d.jpg", i), size: c.size})
		}
		s.PutBytes("p/x.tar", makeTar(t, items...))
		s.latency = 2 * time.Millisecond
		begin := time.Now()
		_, list, err := members(context.Background(), s, objstore.Source{Prefix: "p/"})
		if err != nil || len(list) != c.n {
			t.Fatal(len(list), err)
		}
		t.Logf("%d members of %d bytes: %d GETs, %d bytes, %v",
			c.n, c.size, s.gets, s.read, time.Since(begin).Round(time.Millisecond))
		if s.gets > c.maxGets || s.read > c.maxRead {
			t.Errorf("%d members of %d bytes took %d GETs of %d bytes", c.n, c.size, s.gets, s.read)
		}
	}
}

// FuzzTar: no input panics, and what is accepted lies in the tar, in order.
func FuzzTar(f *testing.F) {
	f.Add(makeTar(f, item{name: "a/1.jpg", size: 700}, item{name: "a/1.cls", size: 1}))
	f.Add(makeTar(f, item{name: strings.Repeat("l", 200), size: 5, format: tar.FormatGNU},
		item{name: "é", size: 4, format: tar.FormatPAX}))
	f.Add(makeTar(f, item{name: "l", flag: tar.TypeSymlink}, item{name: "a", size: 3}, item{name: "./a", size: 4}))
	f.Fuzz(func(t *testing.T, data []byte) {
		s := newStore()
		o := s.PutBytes("x.tar", data)
		sc, err := scanTar(context.Background(), s, o, func(int64) error { return nil })
		if err != nil {
			if !strings.Contains(err.Error(), "x.tar") {
				t.Fatalf("%v does not name the shard", err)
			}
			return
		}
		end := int64(0)
		sc.ix.members(func(_ int, m indexMember) bool {
			if m.off < end+blockSize || m.off%blockSize != 0 || m.size < 0 || m.size > o.Size-m.off {
				t.Fatalf("accepted %+v of %d bytes", m, o.Size)
			}
			end = m.off + m.size
			return true
		})
	})
}
