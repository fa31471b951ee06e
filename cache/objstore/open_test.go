package objstore_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

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
		"s3://bucket/" + strings.Repeat("k", 1025): "prefix",
		"s3://bucket/s-{000000..000127}.tar":       "tar shards are not read by this version",
		"s3://bucket/s-000000.tar":                 "tar shards are not read by this version",
		"gs://bucket/x":                            "does not read gs://",
		"http://host/x":                            "does not read http://",
		"file://host/x":                            "three slashes",
		"file://x":                                 "three slashes",
		"file:///bad%zz":                           "percent-encoding",
		"/a\x00b":                                  "zero byte",
	} {
		_, err := objstore.ParseSource(text)
		if objstore.KindOf(err) != objstore.KindInvalid || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "s3://BUCKET/PREFIX") {
			t.Errorf("%q: error %v, want %q and the usage", text, err, want)
		}
	}
}

func FuzzParseSource(f *testing.F) {
	for _, s := range []string{"s3://bucket/a//b", "file:///with%20space", "/plain/50%", "rel", "s3://bucket//", "file:////", "s3://bucket/{1..2}"} {
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
		again, err := objstore.ParseSource(src.String())
		if err != nil || again != src {
			t.Errorf("%q = %+v, prints as %q, which is %+v, %v", text, src, src, again, err)
		}
	})
}

func TestOpen(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "list.txt")
	must(t, os.WriteFile(file, []byte("a\n"), 0o644))
	store, src, err := objstore.Open(t.Context(), dir, objstore.Options{})
	must(t, err)
	if got := collect(t, store.List(t.Context(), src.Prefix)); len(got) != 1 || got[0].Key != "list.txt" {
		t.Errorf("listed %v", got)
	}
	for text, want := range map[string]string{
		file:          "list files and tar shards are not read by this version",
		dir + "/none": "s3://BUCKET/PREFIX",
		os.DevNull:    "it is a file",
	} {
		if _, _, err := objstore.Open(t.Context(), text, objstore.Options{}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: error %v, want %q", text, err, want)
		}
	}
	t.Setenv("AWS_ACCESS_KEY_ID", "k")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "s")
	var canonical []string
	for _, endpoint := range []string{"http://127.0.0.1:9000", "http://127.0.0.1:9000/", "http://127.0.0.1:9001"} {
		t.Setenv("AWS_ENDPOINT_URL", endpoint)
		s, src, err := objstore.Open(t.Context(), "s3://bucket/train", objstore.Options{})
		must(t, err)
		s.(*objstore.S3).Close()
		canonical = append(canonical, src.Canonical())
	}
	if canonical[0] != canonical[1] || canonical[0] == canonical[2] {
		t.Errorf("canonical texts %q: want the first two equal, the third different", canonical)
	}
}
