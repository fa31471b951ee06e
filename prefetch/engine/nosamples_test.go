package engine

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/shoalfs/shoal/cache/cachedir"
)

// A dataset without samples says what its files are, what samples can be, and what to do with formats that are none.
func TestNoSamples(t *testing.T) {
	for name, want := range map[string]string{
		"part-0.parquet":   "what lies in these is samples with --samples rows",
		"part-0.arrow":     "matches none (3 .arrow, 1 .txt); samples are pictures",
		"part-0.jsonl":     "lines of JSON are no samples",
		"table.csv":        "--samples rows)",
		"shard-0.tar.gz":   "decompress the tars, and name them: SOURCE/shard-{000000..000127}.tar",
		"shard-0.tgz":      "decompress the tars",
		"shard-0.TAR":      "name the tars themselves",
		"train.tfrecord":   "another loader",
		"shard.00000.mds":  "what lies in these is samples with --samples rows",
		"embedding.npy":    "(give --samples '*', or a glob that matches)",
		"no-extension.d/x": "matches none (3 without extension, 1 .txt)",
	} {
		dir := t.TempDir()
		for _, path := range []string{"a/" + name, "b/" + name, "c/" + name, "a/note.txt"} {
			path = filepath.Join(dir, path)
			if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, []byte("x"), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		host := HostConfig{Options: cachedir.Options{Path: t.TempDir(), Size: 64 << 20, Memory: 256 << 20}}
		e := open(t, host, Config{Source: dir, Samples: "images", Order: spec(t, "none")})
		err := e.Dataset().NoSamples()
		if want = strings.ReplaceAll(want, "SOURCE", "file://"+dir); err == nil ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v\nwant %q", name, err, want)
		}
		closeEngine(t, e)
	}
}
