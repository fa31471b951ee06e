package python

import (
	"archive/zip"
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"
)

func TestVersion(t *testing.T) {
	for v, want := range map[string]string{
		"0.1.0":                        "0.1.0",
		"0.2.0-rc.1":                   "0.2.0rc1",
		"1.0.0-b2":                     "1.0.0b2",
		"0.1.0-dev":                    "0.1.0.dev0",
		"0.1.0-dev.g5f2c1ab":           "0.1.0.dev0+g5f2c1ab",
		"0.1.0-dev.g5f2c1ab-dirty":     "0.1.0.dev0+g5f2c1ab.dirty",
		"0.1.0-12-g5f2c1ab":            "0.1.0.post12+g5f2c1ab",
		"0.1.0-12-g5f2c1ab-dirty":      "0.1.0.post12+g5f2c1ab.dirty",
		"0.1.0-dirty":                  "0.1.0+dirty",
		"0.2.0-rc.1-3-g5f2c1ab":        "0.2.0rc1.post3+g5f2c1ab",
		"0.1.1-0.20261123050102-abcde": "0.1.1-0.20261123050102-abcde", // Go's pseudo-versions are no release
	} {
		if got := Version(v); got != want {
			t.Errorf("%s: %s, want %s", v, got, want)
		}
	}
}

// A wheel names its files and their sums, and is the same bytes each time.
func TestWheel(t *testing.T) {
	w := Wheel{Name: "shoalfs", Version: "0.1.0-dev.gabc",
		Tags:    []string{"py3-none-manylinux2014_x86_64", "py3-none-musllinux_1_1_x86_64"},
		Created: time.Unix(1_700_000_000, 0), Scripts: []File{{Name: "shoal", Data: []byte("\x7fELF")}},
		Notes: []File{{Name: "licenses/shoal", Data: []byte("Apache")}}}
	var one, two bytes.Buffer
	if err := w.Write(&one); err != nil {
		t.Fatal(err)
	}
	if err := w.Write(&two); err != nil || !bytes.Equal(one.Bytes(), two.Bytes()) {
		t.Errorf("%v: two wheels differ", err)
	}
	if got, want := w.FileName(),
		"shoalfs-0.1.0.dev0+gabc-py3-none-manylinux2014_x86_64.musllinux_1_1_x86_64.whl"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	z, err := zip.NewReader(bytes.NewReader(one.Bytes()), int64(one.Len()))
	if err != nil {
		t.Fatal(err)
	}
	contents := map[string]string{}
	for _, f := range z.File {
		r, err := f.Open()
		if err != nil {
			t.Fatal(err)
		}
		data, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		contents[f.Name] = string(data)
		if script := strings.HasSuffix(f.Name, "scripts/shoal"); script != (f.Mode().Perm() == 0o755) {
			t.Errorf("%s has mode %v", f.Name, f.Mode())
		}
	}
	const info = "shoalfs-0.1.0.dev0+gabc.dist-info/"
	if got := contents["shoal/_version.py"]; got != "__version__ = \"0.1.0.dev0+gabc\"\n" {
		t.Errorf("_version.py: %q", got)
	}
	if !strings.Contains(contents[info+"METADATA"], "\nName: shoalfs\nVersion: 0.1.0.dev0+gabc\n") ||
		!strings.Contains(contents[info+"WHEEL"], "Tag: py3-none-musllinux_1_1_x86_64\n") {
		t.Errorf("%s\n%s", contents[info+"METADATA"], contents[info+"WHEEL"])
	}
	record := contents[info+"RECORD"]
	for name, data := range contents {
		sum := sha256.Sum256([]byte(data))
		line := fmt.Sprintf("%s,sha256=%s,%d\n", name, base64.RawURLEncoding.EncodeToString(sum[:]), len(data))
		if name == info+"RECORD" {
			line = name + ",,\n"
		}
		if !strings.Contains(record, line) {
			t.Errorf("RECORD does not have %q", line)
		}
	}
	if n := strings.Count(record, "\n"); n != len(contents) {
		t.Errorf("RECORD has %d lines for %d files", n, len(contents))
	}
}
