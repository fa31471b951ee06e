package order

import (
	"errors"
	"slices"
	"strconv"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func itoa(n int) string { return strconv.Itoa(n) }

// Each sample once; each batch from one bucket of neighbours in length; equal work on every rank
// whatever their number; nothing but (seed, epoch, sizes) matters.
func TestBucketsModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		sizes := rapid.SliceOfN(rapid.Int64Range(0, 30), 0, 120).Draw(t, "sizes")
		n := len(sizes)
		batch := rapid.IntRange(1, 12).Draw(t, "batch")
		spec, err := Parse("buckets:seed=" + rapid.SampledFrom(seedsOfTorch).Draw(t, "seed") + ",batch=" + itoa(batch))
		if err != nil {
			t.Fatal(err)
		}
		count := max(1, min(defaultBuckets, n/batch/bucketBatches))
		if rapid.Bool().Draw(t, "count given") {
			k := rapid.IntRange(1, 9).Draw(t, "count")
			if spec, err = spec.With("count", itoa(k)); err != nil {
				t.Fatal(err)
			}
			count = max(1, min(k, n/batch))
		}
		epoch := rapid.IntRange(0, 4).Draw(t, "epoch")
		f := Facts{Samples: n, Size: func(s int) int64 { return sizes[s] }}
		o, err := spec.Over(f, epoch)
		if err != nil {
			t.Fatal(err)
		}
		got := samples(o)
		if all := slices.Sorted(slices.Values(got)); !slices.Equal(all, samples(Sequential(n))) && n > 0 {
			t.Fatalf("not each sample once: %v", got)
		}
		// In the sorted list a bucket is a run: of the samples shorter than a batch's longest and longer
		// than its shortest no more than a bucket's can be outside the batch.
		bucket := (n/batch+count-1)/count*batch + n%batch
		for from := 0; from < n; from += batch {
			b := got[from:min(from+batch, n)]
			var of []int64
			for _, s := range b {
				of = append(of, sizes[s])
			}
			least, most := slices.Min(of), slices.Max(of)
			between := 0
			for _, x := range sizes {
				if x > least && x < most {
					between++
				}
			}
			if between > bucket {
				t.Fatalf("a batch from %d to %d spans %d samples, more than a bucket of %d",
					least, most, between, bucket)
			}
			turns := 0 // of the batch, gone round: from a longer one to a shorter one
			for i := range of {
				if of[i] > of[(i+1)%len(of)] {
					turns++
				}
			}
			if turns > 1 {
				t.Fatalf("a batch is not sorted: %v", of)
			}
			if len(b) < batch {
				continue
			}
			for world := 1; world <= batch; world++ {
				if batch%world != 0 {
					continue
				}
				work := make([]int64, world)
				for i, s := range b {
					work[i%world] += sizes[s]
				}
				if d := slices.Max(work) - slices.Min(work); d > most-least {
					t.Fatalf("%d ranks: work %v differs by more than %d", world, work, most-least)
				}
			}
		}
		again, err := spec.Over(f, epoch)
		if err != nil || !slices.Equal(samples(again), got) {
			t.Fatal("another order the second time")
		}
	})
}

// Where all samples are as long, it is a uniform shuffle: ties do not follow the sample number.
func TestBucketsTies(t *testing.T) {
	const n = 5
	counts := make([]int, 120)
	each(60*120, func(seed uint64, epoch int) {
		o, err := newBuckets(n, func(int) int64 { return 7 }, seed, epoch, 1, 1)
		if err != nil {
			t.Fatal(err)
		}
		p, rank := samples(o), 0
		for i := range p {
			below := 0
			for _, x := range p[i+1:] {
				if x < p[i] {
					below++
				}
			}
			rank = rank*(n-i) + below
		}
		counts[rank]++
	})
	chi2(t, "permutation", counts, 119)
}

// Over many epochs each bucket comes early as often as late, and each sample is in the short batch about
// as often as any other; those at a bucket's bound, which are in either bucket, twice as often.
func TestBucketsStatistics(t *testing.T) {
	const n, batch, count = 103, 10, 5
	first, tail := make([]int, count), make([]int, n)
	each(6_000, func(seed uint64, epoch int) {
		o, err := newBuckets(n, func(s int) int64 { return int64(s) }, seed, epoch, batch, count)
		if err != nil {
			t.Fatal(err)
		}
		// The tail shifts the buckets' bounds by at most 3.
		begin := slices.Sorted(slices.Values(samples(o)[:batch]))
		first[min(begin[batch/2]/20, count-1)]++
		for pos := n / batch * batch; pos < n; pos++ {
			tail[o.At(pos)]++
		}
	})
	for i, c := range first {
		if c < 6_000/count*9/10 || c > 6_000/count*11/10 {
			t.Errorf("bucket %d begins %d epochs of 20,000", i, c)
		}
	}
	for s, c := range tail {
		if want := 6_000 * 3 / n; c < want*3/5 || c > want*11/5 {
			t.Errorf("sample %d is in the short batch of %d epochs, want about %d", s, c, want)
		}
	}
}

// The bits of buckets@2 are a promise. The values are those of another implementation, in Python,
// written from the comments.
func TestBucketsGolden(t *testing.T) {
	sizes := []int64{5, 90, 12, 7, 55, 3, 41, 41, 8, 60, 2, 33, 21}
	f := Facts{Samples: len(sizes), Size: func(s int) int64 { return sizes[s] }}
	for _, c := range []struct {
		text  string
		epoch int
		want  []int
	}{
		{"buckets:seed=1,batch=3", 0, []int{0, 12, 5, 8, 4, 10, 6, 9, 7, 2, 1, 3, 11}},
		{"buckets:seed=1,batch=3,count=2", 0, []int{11, 4, 9, 8, 12, 5, 6, 1, 7, 3, 2, 10, 0}},
		{"buckets:seed=1,batch=3,count=2", 1, []int{2, 10, 0, 12, 11, 7, 8, 5, 3, 1, 6, 9, 4}},
		{"buckets:seed=-7,batch=20,count=3", 5, []int{10, 5, 0, 3, 8, 2, 12, 11, 6, 7, 4, 9, 1}},
	} {
		o, err := must(t, c.text).Over(f, c.epoch)
		if err != nil {
			t.Fatal(err)
		}
		if got := samples(o); !slices.Equal(got, c.want) {
			t.Errorf("%s, epoch %d: %#v", c.text, c.epoch, got)
		}
	}
}

func TestBucketsErrors(t *testing.T) {
	if _, err := must(t, "buckets:seed=1,batch=4").Order(9, 0); !errors.Is(err, ErrNeedsFacts) ||
		!strings.Contains(err.Error(), "lengths") {
		t.Errorf("without sizes: %v", err)
	}
	if err := must(t, "buckets:seed=1,batch=4,world=3,rank=0").Check(); err == nil ||
		!strings.Contains(err.Error(), "multiple of world") {
		t.Errorf("4 for 3 ranks: %v", err)
	}
	if _, err := newBuckets(1<<32, nil, 0, 0, 1, 1); err == nil {
		t.Error("2^32 samples are accepted")
	}
}

func BenchmarkBuckets1M(b *testing.B) {
	b.ReportAllocs()
	for b.Loop() {
		if _, err := newBuckets(1_000_000, func(s int) int64 {
			return int64(s*7919) % 100_000
		}, 1, 0, 256, 0); err != nil {
			b.Fatal(err)
		}
	}
}
