package objstore_test

import (
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/shoalfs/shoal/cache/objstore"
)

func TestParseSource(t *testing.T) {
	cwd, err := os.Getwd()
	must(t, err)
	for _, c := range []struct{ text, canonical, prefix string }{
		{"s3://bucket", "s3://bucket/", ""},
		{"s3://bucket/", "s3://bucket/", ""},
		{"S3://bucket/a", "s3://bucket/a/", "a/"},
		{"s3://bucket/a/b/", "s3://bucket/a/b/", "a/b/"},
		{"s3://bucket/a//b", "s3://bucket/a//b/", "a//b/"},
		{"s3://bucket//", "s3://bucket//", "/"},
		{"s3://bucket/50%25 off?", "s3://bucket/50%25 off?/", "50%25 off?/"},
		{"file:///data/set", "file:///data/set/", ""},
		{"file:///data/../data/set//", "file:///data/set/", ""},
		{"file://localhost/data", "file:///data/", ""},
		{"file:///with%20space", "file:///with%20space/", ""},
		{"file:///", "file:///", ""},
		{"/with space", "file:///with%20space/", ""},
		{"/50%25", "file:///50%2525/", ""},
		{"rel/dir", "file://" + cwd + "/rel/dir/", ""},
	} {
		src, err := objstore.ParseSource(c.text)
		if err != nil {
			t.Errorf("%q: %v", c.text, err)
			continue
		}
		if src.String() != c.canonical || src.Prefix != c.prefix {
			t.Errorf("%q = %q with prefix %q, want %q and %q", c.text, src, src.Prefix, c.canonical, c.prefix)
		}
	}
	for text, want := range map[string]string{
		"":                   "empty source",
		"s3://":              "no bucket",
		"s3:///key":          "no bucket",
		"s3://b":             "bucket \"b\"",
		"s3://Bad_Bucket!/x": "Bad_Bucket!",
		"s3://bucket/" + strings.Repeat("k", 1025):            "prefix",
		"s3://bucket/" + strings.Repeat("k", 1020) + "/x.tar": "prefix",
		"s3://bucket/s-{000000..000127}":                      "ends in .tar",
		"s3://bucket/s-{000000..000127}/":                     "ends in .tar",
		"s3://bucket/s-{0..9}.tar.gz":                         "ends in .tar",
		"s3://bucket/{0..9}/x.tar":                            "after the last /",
		"s3://bucket/{a/b,c}.tar":                             "} without its {",
		"s3://bucket/{a,{b,c}}.tar":                           "braces in braces",
		"/d/x-{0..9999999}.tar":                               "more than 1048576 names",
		"file:///d/x-{0..9.tar":                               "{ without its }",
		"gs://bucket/x":                                       "does not read gs://",
		"http://host/x":                                       "does not read http://",
		"file://host/x":                                       "three slashes",
		"file://x":                                            "three slashes",
		"file:///bad%zz":                                      "percent-encoding",
		"/a\x00b":                                             "zero byte",
	} {
		_, err := objstore.ParseSource(text)
		if objstore.KindOf(err) != objstore.KindInvalid || !strings.Contains(err.Error(), want) ||
			!strings.Contains(err.Error(), "s3://BUCKET/PREFIX") {
			t.Errorf("%q: error %v, want %q and the usage", text, err, want)
		}
	}
}

// What would write into a source is found, by links too, before anything is made.
func TestOverlaps(t *testing.T) {
	dir := t.TempDir()
	must(t, os.MkdirAll(dir+"/train", 0o700))
	must(t, os.Symlink(dir+"/train", dir+"/link"))
	for _, c := range []struct {
		a, b string
		want bool
	}{
		{dir + "/train/new", dir + "/train", true},
		{dir + "/link/new", dir + "/train", true},
		{dir, dir + "/train", true},
		{dir + "/train", dir + "/train", true},
		{"/", dir + "/train", true},
		{dir + "/train2", dir + "/train", false},
		{"s3://bucket/train/new", "s3://bucket/train", true},
		{"s3://bucket", "s3://bucket/train", true},
		{"s3://bucket/train2", "s3://bucket/train", false},
		{"s3://other/train", "s3://bucket/train", false},
		{"s3://bucket/train", dir, false},
	} {
		a, err := objstore.ParseSource(c.a)
		must(t, err)
		b, err := objstore.ParseSource(c.b)
		must(t, err)
		if a.Overlaps(b) != c.want || b.Overlaps(a) != c.want {
			t.Errorf("%s and %s: want %v", a, b, c.want)
		}
	}
}

func TestParseShards(t *testing.T) {
	cwd, err := os.Getwd()
	must(t, err)
	for _, c := range []struct{ text, canonical, shards, first, last string }{
		{"s3://bucket/p/shard-{000000..000127}.tar", "", "shard-{000000..000127}.tar", "p/shard-000000.tar",
			"p/shard-000127.tar"},
		{"s3://bucket/x.tar", "", "x.tar", "x.tar", "x.tar"},
		{"s3://bucket/.tar", "", ".tar", ".tar", ".tar"},
		{"s3://bucket/a//x{,-b}.tar", "", "x{,-b}.tar", "a//x.tar", "a//x-b.tar"},
		{"s3://bucket/x{1}.tar", "", "x{1}.tar", "x{1}.tar", "x{1}.tar"},
		{"file:///data/x-{0..9},50%25.tar", "", "x-{0..9},50%.tar", "x-0,50%.tar", "x-9,50%.tar"},
		{"file:///data/%7B0..1%7D.tar", "file:///data/{0..1}.tar", "{0..1}.tar", "0.tar", "1.tar"},
		{"/data/../x {a,b}.tar", "file:///x%20{a,b}.tar", "x {a,b}.tar", "x a.tar", "x b.tar"},
		{"/x.tar", "file:///x.tar", "x.tar", "x.tar", "x.tar"},
		{"x.tar", "file://" + cwd + "/x.tar", "x.tar", "x.tar", "x.tar"},
		{"s3://bucket/x.tar/", "", "", "", ""}, // a folder
		{"/data/x.tar/", "file:///data/x.tar/", "", "", ""},
		{"s3://bucket/x.tar.gz", "s3://bucket/x.tar.gz/", "", "", ""},
	} {
		src, err := objstore.ParseSource(c.text)
		if err != nil {
			t.Errorf("%q: %v", c.text, err)
			continue
		}
		want := c.canonical
		if want == "" {
			want = c.text
		}
		keys := src.ShardKeys()
		if c.first == "" {
			keys = append(keys, "")
		}
		if src.String() != want || src.Shards != c.shards || len(keys) == 0 || keys[0] != c.first ||
			keys[len(keys)-1] != c.last {
			t.Errorf("%q = %q, shards %q, keys %q", c.text, src, src.Shards, keys)
		}
	}
}

func TestExpandBraces(t *testing.T) {
	for pattern, want := range map[string]string{
		"":                         "",
		"x":                        "x",
		"{0..3}":                   "0 1 2 3",
		"{3..0}":                   "3 2 1 0",
		"{08..11}":                 "08 09 10 11",
		"{8..011}":                 "008 009 010 011",
		"{000..2}":                 "000 001 002",
		"{0..0}":                   "0",
		"{00..0}":                  "00",
		"{10..8}":                  "10 9 8",
		"{a,b}-{1..2}":             "a-1 a-2 b-1 b-2",
		"{a,}x{,b}":                "ax axb x xb",
		"{}{x}{.}":                 "{}{x}{.}",
		"p{1..2}{3..4}.t":          "p13.t p14.t p23.t p24.t",
		"{001..3,4}":               "!a range in a list",
		"{a..c}":                   "!{FIRST..LAST}",
		"{..}":                     "!{FIRST..LAST}",
		"{1..}":                    "!{FIRST..LAST}",
		"{-1..3}":                  "!{FIRST..LAST}",
		"{1..9..2}":                "!{FIRST..LAST}",
		"{+1..9}":                  "!{FIRST..LAST}",
		"{0..9999999999999999999}": "!18 digits",
		"{0..999999999999999999}":  "!more than 1048576 names",
		"{0..1048576}":             "!more than 1048576 names",
		"{0..1023}{0..1023}x{0,1}": "!more than 1048576 names",
		"{0..1048575}" + strings.Repeat("x", 200): "!128 MiB",
		strings.Repeat("{0..9}", 100):             "!more than 1048576 names",
		"{a,{b,c}}":                               "!braces in braces",
		"{{0..1}}":                                "!braces in braces",
		"{0..1":                                   "!{ without its }",
		"0..1}":                                   "!} without its {",
		"{" + strings.Repeat(",", 1<<20) + "}":    "!more than 1048576 names",
	} {
		names, err := objstore.ExpandBraces(pattern)
		if text, bad := strings.CutPrefix(want, "!"); bad {
			if err == nil || !strings.Contains(err.Error(), text) {
				t.Errorf("%.40q: %d names, error %v, want %q", pattern, len(names), err, text)
			}
			continue
		}
		if got := strings.Join(names, " "); err != nil || got != want {
			t.Errorf("%q: %q, %v, want %q", pattern, got, err, want)
		}
	}
	names, err := objstore.ExpandBraces("{0000000..1048575}")
	if err != nil || len(names) != 1<<20 || names[1<<20-1] != "1048575" || names[7] != "0000007" {
		t.Errorf("the largest range: %d names, %v", len(names), err)
	}
}

// bashBraces is what bash makes of a pattern without spaces and other special characters.
func bashBraces(t *testing.T, pattern string) []string {
	out, err := exec.Command("bash", "-c", "printf '%s\n' "+pattern).Output()
	must(t, err)
	return strings.Split(strings.TrimSuffix(string(out), "\n"), "\n")
}

// TestExpandBracesAsBash: where we accept a pattern, we read it as bash does.
func TestExpandBracesAsBash(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		pattern := rapid.StringMatching(
			`x(\{(0{0,2}[0-9]{1,2}\.\.0{0,2}[0-9]{1,2}|[ab]{0,2}(,[ab]{0,2}){1,3})\}|[a-z.-]){0,3}`).Draw(rt, "pattern")
		got, err := objstore.ExpandBraces(pattern)
		if err != nil {
			rt.Fatalf("%q: %v", pattern, err)
		}
		if want := bashBraces(t, pattern); !slices.Equal(got, want) {
			rt.Fatalf("%q:\n got %q\nwant %q", pattern, got, want)
		}
	})
}

func FuzzExpandBraces(f *testing.F) {
	for _, s := range []string{"shard-{000000..000127}.tar", "{a,b}", "{3..0}x{}", "{{", "}", "{0..9}{0..9}{0..9}",
		"{1..2..3}", "{,}"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, pattern string) {
		names, err := objstore.ExpandBraces(pattern)
		if err != nil {
			return
		}
		if len(names) == 0 || len(names) > 1<<20 {
			t.Fatalf("%q makes %d names", pattern, len(names))
		}
		for _, n := range names {
			if len(n) > len(pattern) {
				t.Fatalf("%q makes the longer %q", pattern, n)
			}
		}
	})
}

func FuzzParseSource(f *testing.F) {
	for _, s := range []string{"s3://bucket/a//b", "file:///with%20space", "/plain/50%", "rel", "s3://bucket//",
		"file:////", "s3://bucket/{1..2}", "s3://bucket/p/s-{00..12}.tar", "/d/{a,b}.tar", "file:///d/%7Bx.tar",
		"x.tar/"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		src, err := objstore.ParseSource(text)
		if err != nil {
			if objstore.KindOf(err) != objstore.KindInvalid {
				t.Errorf("%q: %v", text, err)
			}
			return
		}
		if src.Prefix != "" && !strings.HasSuffix(src.Prefix, "/") {
			t.Errorf("%q: prefix %q", text, src.Prefix)
		}
		if keys := src.ShardKeys(); (len(keys) > 0) != strings.HasSuffix(src.Shards, ".tar") {
			t.Errorf("%q: shards %q, %d keys", text, src.Shards, len(keys))
		}
		again, err := objstore.ParseSource(src.String())
		if err != nil || again != src {
			t.Errorf("%q = %+v, prints as %q, which is %+v, %v", text, src, src, again, err)
		}
	})
}
