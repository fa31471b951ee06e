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
	boxes := func(string) ([]byte, error) { return []byte("0 0.5 0.5 0.4 0.4"), nil }
	const operations = "RandomResizedCrop(224)|RandomHorizontalFlip()"
	for _, spec := range []string{
		operations + "|uint8|nchw",
		"Resize(256)|CenterCrop(224)|ColorJitter(0.4,0.4,0.4,0.1)|fp32|nchw|Normalize((0.485,0.456,0.406),(0.229,0.224,0.225))",
		operations + "|fp16|device",
		operations + "|MixUp(0.2)",
		"views(2x[" + operations + "])",
		"Detection(format='yolo')|Resize((224, 224))",
	} {
		in, err := New(spec)
		if err != nil {
			t.Fatal(err)
		}
		if d, ok := in.(interface{ Decodes() bool }); !ok || !d.Decodes() {
			t.Errorf("%s does not take recoded samples", spec)
		}
		for i := range 20 {
			var rows [2]Row
			for k, data := range [][]byte{src, rec} {
				for _, f := range in.Fields() {
					rows[k].Fields = append(rows[k].Fields, make([]byte, f.Bytes))
				}
				if err := in.Make(Sample{Data: data, Part: boxes}, Draw{Seed: 1, Sample: uint64(i)},
					&rows[k]); err != nil {
					t.Fatal(err)
				}
			}
			if !slices.EqualFunc(rows[0].Fields, rows[1].Fields, bytes.Equal) {
				t.Errorf("%s: sample %d differs", spec, i)
			}
		}
	}
}
