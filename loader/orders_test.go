package loader_test

import (
	"bytes"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/shoalfs/shoal/loader"
	"github.com/shoalfs/shoal/loader/feedpb"
	"github.com/shoalfs/shoal/prefetch/order"
)

// Orders that need sizes or classes are delivered as the order package has them, and go on at another
// world size where a state was taken.
func TestOrdersOverFacts(t *testing.T) {
	ds := &testDataset{Samples: 60}
	r := start(t, ds, loader.Options{}, 0)
	facts := order.Facts{Samples: 60, Size: ds.Size, Classes: ds.Classes, Label: ds.Label}
	for text, name := range map[string]string{
		"mixture:seed=3,weights=class0:1+class[1-4]:2": "mixture@2:seed=3,weights=class0:1+class[1-4]:2",
		// the session's seed
		"mixture:weights=class0:3+class1:1,samples=56": "mixture@2:seed=5,weights=class0:3+class1:1,samples=56",
		"buckets":                                    "buckets@2:seed=5,batch=8",
		"buckets:seed=2,batch=8,count=3":             "buckets@2:seed=2,batch=8,count=3",
		"torch-loader:seed=3,from=manual_seed":       "torch-loader@1:seed=3,from=manual_seed",
		"torch-loader:seed=3,from=generator,epoch=1": "torch-loader@1:seed=3,from=generator",
	} {
		spec, err := order.ParseVersioned(name)
		if err != nil {
			t.Fatal(err)
		}
		o, err := spec.Over(facts, 1)
		if err != nil {
			t.Fatal(err)
		}
		var want []int64
		for pos := range o.Len() {
			want = append(want, int64(o.At(pos)))
		}
		open := &feedpb.Open{Session: "s", Order: text, Seed: 5, Batch: 8, Epoch: 1, Epochs: 1, Tail: "pad"}
		s := r.open(t, open)
		if got := s.Opened().GetOrder(); got != name {
			t.Errorf("%s is called %s", text, got)
		}
		var got []int64
		for range 3 {
			b, err := s.Next()
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, validIDs(b)...)
			b.Release()
		}
		state := s.State()
		got = append(got, drain(t, s)...)
		if !slices.Equal(got, want) {
			t.Errorf("%s: delivered %v\n want %v", text, got, want)
		}
		rest := make([]int64, len(want)-24)
		for rank := range uint32(2) {
			share := drain(t, r.open(t,
				&feedpb.Open{Session: "s", Seed: 5, Batch: 4, World: 2, Rank: rank, Epochs: 1, State: state}))
			for i, id := range share {
				rest[2*i+int(rank)] = id
			}
		}
		if !slices.Equal(rest, want[24:]) {
			t.Errorf("%s: two ranks resume with %v\n want %v", text, rest, want[24:])
		}
		one := drain(t, r.open(t, &feedpb.Open{Session: "s", Order: text, Seed: 5, Epochs: 1, State: state}))
		if !slices.Equal(one, want[24:]) {
			t.Errorf("%s: the state's batch resumes with %v\n want %v", text, one, want[24:])
		}
		if spec.Batch() > 0 {
			_, err := r.dial(t).Open(t.Context(),
				&feedpb.Open{Session: "s", Seed: 5, Batch: 5, Epochs: 1, State: state, Rebatch: true})
			wantError(t, err, codes.InvalidArgument, "batches of 8", "global batch is 5")
		}
	}
	// A state of an earlier version of an algorithm is another order's.
	for _, text := range []string{"", "mixture:weights=class0:1+class1:1"} {
		old := r.open(t, &feedpb.Open{Session: "s", Order: "mixture:weights=class0:1+class1:1", Batch: 8,
			Epochs: 1}).State()
		_, err := r.dial(t).Open(t.Context(),
			&feedpb.Open{Session: "s", Order: text, Batch: 8, Epochs: 1,
				State: strings.Replace(old, "mixture@2", "mixture@1", 1)})
		wantError(t, err, codes.FailedPrecondition, "mixture@1", "this program has mixture@2",
			"start the epoch again without a state")
	}
	for text, words := range map[string]string{
		"list:/etc/passwd":            "reads no local files",
		"mixture:weights=zebra:1":     `"zebra" has no sample`,
		"buckets:seed=1,batch=9":      "global batch is 8",
		"torch-loader:seed=1,epoch=1": "not known in advance",
	} {
		_, err := r.dial(t).Open(t.Context(), &feedpb.Open{Session: "s", Order: text, Batch: 8})
		wantError(t, err, codes.InvalidArgument, words)
	}
}

// A sample that a mixture repeats within an epoch is augmented anew each time.
func TestRepeatedSamplesDrawAnew(t *testing.T) {
	r := start(t, &testDataset{Samples: 20}, loader.Options{}, 0)
	for _, text := range []string{"mixture:seed=1,weights=@0-1:1+@2-19:1,samples=20",
		"torch-loader:seed=1,from=manual_seed,samples=20,replacement=1"} {
		s := r.open(t, &feedpb.Open{Session: "s", Order: text, Batch: 20, Epochs: 1, Transform: "ramp(5,7)|uint8"})
		b, err := s.Next()
		if err != nil {
			t.Fatal(err)
		}
		repeated := 0
		for i := range b.Rows() {
			for j := range i {
				if b.ID(i) == b.ID(j) {
					repeated++
					if bytes.Equal(b.Row(i), b.Row(j)) {
						t.Errorf("%s: rows %d and %d are sample %d with the same augmentation", text, i, j, b.ID(i))
					}
				}
			}
		}
		if repeated == 0 {
			t.Errorf("%s repeats nothing", text)
		}
		b.Release()
		drain(t, s)
	}
}
