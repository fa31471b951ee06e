package engine

import (
	"bytes"
	"fmt"
	"iter"
	"math/rand/v2"
	slashpath "path"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/prefetch/order"
	"github.com/shoalfs/shoal/prefetch/run"
)

func manifest(t testing.TB, keys ...string) *catalog.Manifest {
	t.Helper()
	var listing iter.Seq2[objstore.Object, error] = func(yield func(objstore.Object, error) bool) {
		for _, k := range keys {
			if !yield(objstore.Object{Key: k, Size: 1, ETag: "e"}, nil) {
				return
			}
		}
	}
	m, err := catalog.Build(listing, catalog.BuildOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func TestParsePlan(t *testing.T) {
	m := manifest(t, "a/1.jpg", "a/2.jpg", "b/3.jpg", "root.txt")
	for _, c := range []struct {
		text string
		want []string // paths
		err  string
	}{
		{"a/2.jpg\nb/3.jpg\n", []string{"a/2.jpg", "b/3.jpg"}, ""},
		{"a/2.jpg", []string{"a/2.jpg"}, ""},
		{"./a/1.jpg\n\n./a/1.jpg\n", []string{"a/1.jpg", "a/1.jpg"}, ""},
		{"root.txt\n", []string{"root.txt"}, ""}, // a plan names files, numbered or not
		{"", nil, "names no file"},
		{"a/1.jpg\na\n", nil, `line 2: "a" is a folder`},
		{"a/1.jpg\r\n\r\nb/3.jpg\r\n", []string{"a/1.jpg", "b/3.jpg"}, ""},
		{"/mnt/train/a/1.jpg\r\n/mnt/train/./b/3.jpg\n././/a/2.jpg\n", []string{"a/1.jpg", "b/3.jpg", "a/2.jpg"}, ""},
		// as programs join paths
		{"/mnt/train//a/1.jpg\na//2.jpg\na/../b/3.jpg\n", []string{"a/1.jpg", "a/2.jpg", "b/3.jpg"}, ""},
		{"../train/a/1.jpg\n", nil, "line 1"},
		{"/a/1.jpg\n", nil, "line 1"},
		{"/mnt/training/a/1.jpg\n", nil, "line 1"},
		{strings.Repeat("x\n", 30), nil, "and 10 more"},
	} {
		files, err := parsePlan(m, []byte(c.text), []string{"/data", "/mnt/train"})
		o := order.List(files)
		if c.err != "" {
			if err == nil || !strings.Contains(err.Error(), c.err) {
				t.Errorf("%q: %v, want %q", c.text, err, c.err)
			}
			continue
		}
		if err != nil || o.Len() != len(c.want) {
			t.Errorf("%q: %v", c.text, err)
			continue
		}
		for i, path := range c.want {
			if got := m.Path(o.At(i)); got != path {
				t.Errorf("%q at %d: %s, want %s", c.text, i, got, path)
			}
		}
	}
}

// Whatever is written, a plan is taken only if every line of it names a file.
func FuzzParsePlan(f *testing.F) {
	m := manifest(f, "a/1.jpg", "a/2.jpg", "b/3.jpg")
	f.Add([]byte("a/1.jpg\nb/3.jpg\n"))
	f.Add([]byte("./a/2.jpg\n\n../x\n"))
	f.Add([]byte("a//1.jpg\x00\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		files, err := parsePlan(m, data, nil)
		o := order.List(files)
		if err != nil {
			return
		}
		n := 0
		for _, line := range strings.Split(string(data), "\n") {
			line = slashpath.Clean(strings.TrimSuffix(line, "\r"))
			if line == "." {
				continue
			}
			node, ok := m.Find(line)
			if !ok || node.IsDir || o.At(n) != node.Index {
				t.Fatalf("line %q was taken", line)
			}
			n++
		}
		if n != o.Len() {
			t.Fatalf("%d positions for %d lines", o.Len(), n)
		}
	})
}

func TestParseRanges(t *testing.T) {
	m := manifest(t, "a/1.bin", "a\t2", "b/3.bin") // of 1 byte each
	for _, c := range []struct{ text, want string }{
		{"#ranges\na/1.bin\t0\t1\na\t2\t0\t1\r\n\n./b/3.bin\t0\t1\n/mnt/train/a/1.bin\t0\t1",
			"[{1 0 1} {0 0 1} {2 0 1} {1 0 1}]"},
		{"#ranges\r\n/mnt/train/a/1.bin\t0\t1\r\n", "[{1 0 1}]"},
		{"#ranges\n", "it names no range"},
		{"#ranges\na/1.bin\n", `line 2: "a/1.bin" is not PATH, OFFSET and LENGTH`},
		{"#ranges\na/1.bin\t0\n", "line 2: "},
		{"#ranges\na/1.bin\t0\t1\na/1.bin\t-1\t1\n", `line 3: offset "-1" is not a number of bytes`},
		{"#ranges\na/1.bin\t0\t0\n", `length "0" is not a positive number of bytes`},
		{"#ranges\na/1.bin\t0\t-1\n", `length "-1"`},
		{"#ranges\na/1.bin\t0\t9223372036854775808\n", "length"},
		{"#ranges\na/1.bin\t0\t2\n", `line 2: 2 bytes from 0: "a/1.bin" has 1`},
		{"#ranges\na/1.bin\t1\t9223372036854775807\n", `"a/1.bin" has 1`},
		{"#ranges\na/1.bin\t2\t1\n", `"a/1.bin" has 1`},
		{"#ranges\na\t0\t1\n", `"a" is a folder`},
		{"#ranges\nc.bin\t0\t1\n", `no file "c.bin" in the dataset`},
		{"#ranges\n" + strings.Repeat("x\n", 30), "and 10 more"},
	} {
		ranges, err := parseRanges(m, []byte(c.text), []string{"/mnt/train"})
		if got := fmt.Sprint(ranges); err != nil && !strings.Contains(err.Error(), c.want) ||
			err == nil && got != c.want {
			t.Errorf("%q: %v, %v; not %s", c.text, ranges, err, c.want)
		}
	}
}

// A plan may be any file, by mistake: what is said of it stays short, and what has too many lines is refused before it
// is parsed.
func TestPlansOfAnything(t *testing.T) {
	m := manifest(t, "a/1.bin")
	long := strings.Repeat("\x00", 8<<20)
	for _, text := range []string{long, "#ranges\n" + long, "#ranges\na/1.bin\t0\t" + long,
		"#ranges\na/1.bin\t" + long + "\t1", "#ranges\n" + long + "\t0\t1", "#ranges\n\t0\t" + long,
		"#ranges\n" + strings.Repeat("./", 1<<20) + "a/1.bin\t0\t2"} {
		_, err := parsePlan(m, []byte(text), nil)
		if ofRanges([]byte(text)) {
			_, err = parseRanges(m, []byte(text), nil)
		}
		if err == nil || len(err.Error()) > 2000 {
			t.Errorf("%.30q: an error of %d bytes", text, len(err.Error()))
		}
	}
	e := numbered(t, 600)
	lines := int(e.cache.Ledger().Limit() / 12)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	text := bytes.Repeat([]byte("c0/img0007.jpg\n"), lines)
	err := e.PutPlan("default", text)
	if runtime.ReadMemStats(&after); err == nil || !strings.Contains(err.Error(), "--memory leaves too little") {
		t.Error(err)
	}
	if took := int64(after.TotalAlloc-before.TotalAlloc) - int64(len(text)); took > int64(lines) {
		t.Errorf("%d lines took %d bytes before they were refused", lines, took)
	}
}

// Whatever is written, only ranges that lie in files are taken.
func FuzzParseRanges(f *testing.F) {
	m := manifest(f, "a/1.bin", "a\t2", "b/3.bin")
	f.Add([]byte("#ranges\na/1.bin\t0\t1\n"))
	f.Add([]byte("#ranges\na\t2\t0\t1\r\n"))
	f.Add([]byte("#ranges\nb/3.bin\t-9223372036854775808\t9223372036854775807\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		ranges, err := parseRanges(m, data, nil)
		for _, r := range ranges {
			if err == nil && (r.File < 0 || r.File >= m.Len() || r.Off < 0 || r.N <= 0 || r.Off+r.N > m.Size(r.File)) {
				t.Fatalf("%+v was taken", r)
			}
		}
	})
}

// That the readers do not follow a plan may be found out while the dataset is closed: the plan is not withdrawn a
// second time then, nor its order inferred.
func TestPlanDepartsAtTheEnd(t *testing.T) {
	const n = 600
	dir := t.TempDir()
	var plan strings.Builder
	for i := range n {
		writeFile(t, filepath.Join(dir, fmt.Sprintf("c/img%04d.jpg", i)), fmt.Append(nil, i))
		fmt.Fprintf(&plan, "c/img%04d.jpg\n", i)
	}
	e := openEngine(t, dir, t.TempDir(), "auto")
	if err := e.PutPlan("default", []byte(plan.String())); err != nil {
		t.Fatal(err)
	}
	s := e.orders.mounted()[0]
	departed := make(chan struct{})
	s.Departs = func(*run.Stream, int, int) { close(departed) }
	for _, sample := range rand.New(rand.NewPCG(1, 2)).Perm(n)[:100] {
		openAs(t, e, 9, sample)
	}
	<-departed
	if err := e.Close(); err != nil {
		t.Error(err)
	}
	used := e.cache.Ledger().Used()
	e.orders.withdraw("default", s, 0, 32)
	if now := e.cache.Ledger().Used(); now != used || e.orders.inference.Load() != nil {
		t.Errorf("%d bytes of the ledger are used, before it was %d; inferring: %t",
			now, used, e.orders.inference.Load() != nil)
		e.orders.stopInferring()
	}
	if err := e.host.Close(); err != nil {
		t.Error(err)
	}
}
