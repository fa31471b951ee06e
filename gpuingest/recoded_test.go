package gpuingest

import (
	"bytes"
	"slices"
	"testing"

	"github.com/shoalfs/shoal/gpuingest/jpeg"
)

// TestRecodedSample: a transform takes a recoded JPEG, and makes of it what it makes of the original.
func TestRecodedSample(t *testing.T) {
	const w, h = 333, 251
	src, err := jpeg.Encode(nil, photo(t, 2, w, h), w, h, 90, jpeg.Sub420)
	if err != nil {
		t.Fatal(err)
	}
	tables, err := jpeg.TrainTables(slices.Values([][]byte{src}))
	if err != nil {
		t.Fatal(err)
	}
	if err := jpeg.Register(tables); err != nil {
		t.Fatal(err)
	}
	rec, err := tables.Recode(nil, src)
	if err != nil {
		t.Fatal(err)
	}
	for _, spec := range []string{
		"RandomResizedCrop(224)|RandomHorizontalFlip()|uint8|nchw",
		"Resize(256)|CenterCrop(224)|ColorJitter(0.4,0.4,0.4,0.1)|fp32|nchw|Normalize((0.485,0.456,0.406),(0.229,0.224,0.225))",
	} {
		tr := compile(t, spec)
		for i := range 20 {
			want, got := make([]byte, tr.OutBytes()), make([]byte, tr.OutBytes())
			if err := tr.Apply(src, Draw{Seed: 1, Sample: uint64(i)}, want); err != nil {
				t.Fatal(err)
			}
			if err := tr.Apply(rec, Draw{Seed: 1, Sample: uint64(i)}, got); err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(want, got) {
				t.Errorf("%s: sample %d differs", spec, i)
			}
		}
	}
}
