package order

import (
	"cmp"
	"fmt"
	"math"
	"slices"
)

// Unless a spec says otherwise there are 16 buckets: enough that a batch's lengths are within some
// percent of each other for usual distributions. A small dataset has fewer, so that each bucket has 8 batches
// to shuffle samples among: a bucket of one batch is the same batch in every epoch.
const (
	defaultBuckets = 16
	bucketBatches  = 8
)

// newBuckets returns an order of length buckets, buckets@2: each global batch (batch positions from a multiple of batch
// on) holds samples of about the same length, so that padding to the longest wastes little, and the ranks that share it
// have equal work. count is the number of buckets, 0 for min(16, max(M/8, 1)).
//
// Of n samples there are M = ⌊n/B⌋ whole batches, and one of the n - M·B that are left, if any, comes last: whether it
// is dropped, padded or read short is for the reader to decide. Which samples these are differs by epoch: each sample
// has about the same chance, but for the n - M·B next to a bucket's bound, which have twice that.
//
// The algorithm. mix, c and a draw below m are those of Windowed, with the state k = mix(mix(seed+c) +
// c) ^ mix(mix(epoch)+c).
//
//  1. Sort the samples by (length, position in Uniform(n, seed, epoch)).
//  2. K = max(min(count, M), 1) buckets are cut from the sorted list, bucket i of B·(⌊(i+1)M/K⌋-⌊iM/K⌋) samples;
//     draw t below K: the n - M·B more are bucket t's.
//  3. Shuffle each bucket, in order: for i = 0..size-2 draw z below size-i and swap i and i+z. Cut
//     it into batches of B; what is left of bucket t is the last batch.
//  4. Shuffle the M whole batches in the same way.
//  5. Sort each batch, the last one included, by (length, position in Uniform), draw d below its size, and
//     move the first d to its end.
//
// By step 5 the ranks' work differs little whatever their number: rank r takes the positions r, r+W, …
// of a batch, so that its sum differs from any other rank's by at most the difference between the batch's
// longest sample and its shortest. The draw of d gives each rank each place as often: none has always the
// longer ones, or always the same class where classes take turns in length.
//
// It takes 4 bytes a sample, 20 more while it is made.
func newBuckets(n int, size func(sample int) int64, seed uint64, epoch, batch, count int) (Order, error) {
	if n >= math.MaxUint32 {
		return nil, fmt.Errorf("%d samples: 2^32-2 are the most", n)
	}
	whole := n / batch
	count = cmp.Or(count, min(defaultBuckets, whole/bucketBatches))
	count = max(min(count, whole), 1)
	type item struct {
		size   int64
		place  uint32
		sample uint32
	}
	compare := func(a, b item) int { return cmp.Or(cmp.Compare(a.size, b.size), cmp.Compare(a.place, b.place)) }
	items := make([]item, n)
	u := newUniform(n, seed, epoch)
	for place := range items {
		sample := u.At(place)
		items[place] = item{size(sample), uint32(place), uint32(sample)}
	}
	slices.SortFunc(items, compare)

	k := draws(mix13(mix13(seed+golden)+golden) ^ mix13(mix13(uint64(epoch))+golden))
	tail := k.below(count)
	batches := make([][]item, 0, whole)
	var last []item
	for i, from := 0, 0; i < count; i++ {
		to := from + ((i+1)*whole/count-i*whole/count)*batch
		if i == tail {
			to += n - whole*batch
		}
		bucket := items[from:to]
		shuffle(bucket, &k)
		for ; len(bucket) >= batch; bucket = bucket[batch:] {
			batches = append(batches, bucket[:batch])
		}
		if i == tail {
			last = bucket
		}
		from = to
	}
	shuffle(batches, &k)
	all := make(list, 0, n)
	for _, b := range append(batches, last) {
		slices.SortFunc(b, compare)
		d := k.below(len(b))
		for i := range b {
			all = append(all, b[(i+d)%len(b)].sample)
		}
	}
	return all, nil
}
