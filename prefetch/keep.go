package prefetch

import "math"

// KeepOptions adjust a Keep. The zero value treats all sizes alike.
type KeepOptions struct {
	// SmallFirst prefers small files: the odds that a file is kept go with its size to the power of
	// -SmallFirst, until they are 1. It does not change how many bytes have to be fetched in an epoch,
	// which is all that is not kept, but with 1 and 2 fewer requests fetch them, fewer and larger ones,
	// and with 0 each size is kept in proportion.
	//
	// Requests bind where the mean file is smaller than bandwidth × latency / connections, such as
	// 470 KB at 1 GB/s, 30 ms and 64 connections, and each is an object of its own: then take 1. Where
	// neighbours in a shard are fetched together, or files are larger, bytes bind: then take 0, which
	// keeps what has to be fetched in a short window most even.
	SmallFirst float64
}

// Keep says which files are kept when not all of them fit. A file is kept if a hash of its key is below a
// threshold, so the kept set is one drawn at random whatever the order in which files arrive or are read:
// from any stretch of any order that does not depend on the hash, about the same share is missing, also
// where each epoch is like the one before (in sequence, by a plan, or by a trainer that never calls
// set_epoch). First come, first kept has this property only where each epoch's order is another; where it
// is not, all that is missing comes in one piece.
//
// Measured over a line of 1.05 times what the missing share needs, 5% of the dataset fetched ahead, a
// quarter to nine tenths kept (TestKeepTable): an accelerator is busy for 99% of the time or more under
// every order; with first come, first kept for 66 to 88% where the order repeats itself; with LRU for 10 to
// 82%; with Belady's replacement, which fetches no more bytes than Keep, for 66 to 88%, because it fetches
// all of them late in the epoch.
//
// It takes O(1) memory and depends on nothing but the files' keys and sizes, so that it is the same after
// a restart, and files stay or go by themselves when the dataset changes a little. With more capacity all
// that was kept before is kept, and more.
//
// It is immutable, and as safe for concurrent use as the functions it is given.
type Keep struct {
	size  func(file int) int64
	key   func(file int) uint64
	small float64
	below uint64 // the score from which on files are not kept
}

// NewKeep returns which of the files 0..n-1 are kept in capacity bytes. size is what a file takes of
// them, key a number that stands for its name, which need not be random. It calls both about each file
// twice, and takes some 25 ns a file beside them.
//
// Files of equal keys are kept together (unless SmallFirst tells them apart). Where several files of a shard
// are fetched by one request, files that are kept one by one cut such requests in pieces: give all files that
// begin in the same few megabytes of a shard one key. Measured at half kept, 16 shards of 64 MiB open, runs
// of 4 MiB: 0.007 requests a sample instead of 0.25, while the peak of what is fetched in 1,000 samples
// is 1.3 instead of 1.1 times what is fair (TestHorizonKeep).
//
// What is kept never exceeds the capacity. It fails to fill it by about one file, or one key's files, or by a
// millionth of the kept files if that is more.
func NewKeep(n int, size func(file int) int64, key func(file int) uint64, capacity int64, o KeepOptions) *Keep {
	k := &Keep{size: size, key: key, small: o.SmallFirst}
	// The threshold is found as a number of 32 bits, half by half: in each round, bytes by the half's value.
	var found uint64
	for round := range 2 {
		shift := 48 - 16*round
		sums := make([]int64, 1<<16)
		for f := range n {
			if score := k.score(f); round == 0 || score>>48 == found {
				sums[score>>shift&0xffff] += size(f)
			}
		}
		value := uint64(0)
		for ; value < uint64(len(sums)) && sums[value] <= capacity; value++ {
			capacity -= sums[value]
		}
		if value == uint64(len(sums)) {
			if round == 0 {
				k.below = math.MaxUint64
				return k
			}
		}
		found = found<<16 | value
	}
	k.below = found << 32
	return k
}

// Admit reports whether the file is kept.
func (k *Keep) Admit(file int) bool { return k.score(file) < k.below }

// score puts the files in the order in which growing capacities admit them: a random number in (0,1),
// times the size to the power of SmallFirst. Positive floating-point numbers compare as their bits do.
func (k *Keep) score(file int) uint64 {
	// Mix13, the finaliser of SplitMix64 (see order.Uniform), of a key that other uses of it do not have.
	z := k.key(file) + 0x9e3779b97f4a7c15
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	u := (float64((z^z>>31)>>11) + 0.5) / (1 << 53)
	if k.small != 0 {
		u *= math.Pow(float64(max(k.size(file), 1)), k.small)
	}
	return math.Float64bits(u)
}
