package engine

import (
	"strings"
	"testing"

	"github.com/shoalfs/shoal/cache/cachedir"
)

// What lies in objects is selected by rows, and one column by its name, with or without what its files end in.
func TestSamplesInObjects(t *testing.T) {
	if err := CheckSamples("rows:"); err == nil || !strings.Contains(err.Error(), "is not valid") {
		t.Errorf("rows without a column's name: %v", err)
	}
	host := HostConfig{Options: cachedir.Options{Path: t.TempDir(), Size: 64 << 20, Memory: 256 << 20}}
	for pattern, want := range map[string]int{"rows": 16, "rows:image": 8, "rows:image.png": 8, "rows:tokens": 8,
		"rows:label": 8, "rows:caption": 8, "rows:cap": 0} {
		e := open(t, host, Config{Source: "../../cache/shard/testdata/sources/mds", Samples: pattern,
			Order: spec(t, "none")})
		d := e.Dataset()
		if d.Len() != want {
			t.Errorf("%s: %d samples, want %d", pattern, d.Len(), want)
		}
		if err := d.NoSamples(); want == 0 &&
			(err == nil || !strings.Contains(err.Error(), "rows:caption.txt, rows:image.png")) {
			t.Errorf("%s: %v", pattern, err)
		}
		closeEngine(t, e)
	}
}
