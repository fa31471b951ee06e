package prefetch

import "slices"

// Places tells where files lie in their objects. Ranks number the files by object and then by offset, 0 to Len()-1.
// Implementations are safe for concurrent use.
type Places interface {
	Len() int
	// Rank returns the rank of a file, At the file of a rank.
	Rank(file int) int
	At(rank int) int
	// Extent returns the object of the file at a rank, and its bytes [off, end) there.
	Extent(rank int) (object int, off, end int64)
}

// Coalescing bounds a request for several files.
type Coalescing struct {
	// MaxBytes is the longest span, from the first byte of the first file to the last byte of the last, including
	// unwanted bytes in between. A single file may be longer.
	MaxBytes int64
	// MaxGap is how many unwanted bytes may lie between two wanted files. In a tar there is at least a member's header
	// and the padding before it: 512 to 1,535 bytes, and 1,024 or more for PAX headers. With less than 4 KiB even
	// neighbours may be fetched separately.
	MaxGap int64
	// MaxFiles is the largest number of wanted files.
	MaxFiles int
}

// chunkFiles is the most files of a chunk that are fetched at once: a thousand rows of a column are usual.
const chunkFiles = 16384

// maxPassed is how many unwanted files in a row are passed over. That many tiny members of a tar take 32 KiB of
// headers, so with small gaps the bytes end the search first. With large gaps this bounds the number of calls to
// wanted, each of which takes a lock.
const maxPassed = 64

// Coalesce returns the ranks of the files to fetch in one request with file, which is needed next, ascending and
// including file's: its wanted neighbours in the same object, as far as the gaps between them and the bounds allow.
// It looks to the right first, where a sequential reader continues, and to the left with the rest of the bounds.
//
// wanted is called at most once for each file passed, never for file itself. Every file that it accepts is in the
// result, so it may claim them. Files of several extents never belong in a request for several files: wanted must
// return false for them, and Coalesce must not be called for one.
//
// It takes O(1) time per file returned or passed over; at most 64 in a row are passed over.
func Coalesce(file int, p Places, o Coalescing, wanted func(file int) bool) []int {
	rank := p.Rank(file)
	object, first, last := p.Extent(rank)
	ranks := []int{rank}
	extend := func(step int) {
		passed := 0
		for r := rank + step; r >= 0 && r < p.Len() && len(ranks) < o.MaxFiles && passed <= maxPassed; r += step {
			in, off, end := p.Extent(r)
			gap := max(off-last, first-end)
			if in != object || gap > o.MaxGap || max(last, end)-min(first, off) > o.MaxBytes {
				return
			}
			if !wanted(p.At(r)) {
				passed++
				continue
			}
			passed = 0
			ranks = append(ranks, r)
			first, last = min(first, off), max(last, end)
		}
	}
	extend(1)
	right := len(ranks)
	extend(-1)
	// The left part was found from right to left.
	slices.Reverse(ranks[right:])
	return slices.Concat(ranks[right:], ranks[:right])
}

// Horizon is how far ahead an executor looks that coalesces requests. Positions count from the reader's, not from the
// planned one.
type Horizon struct {
	// Plan: up to here, from Front on, requests are started for missing files.
	Plan int
	// Take: files needed up to here, from the reader's frontier on, may be fetched along.
	Take int
	// Spread is the largest spread that Front accepts.
	Spread int
	// Reserve is the part of the memory that files fetched along may not take.
	Reserve int64
	// Chunk is how many bytes of an object are fetched in any case, whatever is wanted of them; 0: there are no such.
	Chunk int64
}

// NewHorizon returns the horizon of an executor with budget bytes of memory for prefetches, of files of mean bytes
// each.
//
// The distance between Plan and Take makes requests large. An executor that starts a request whenever there is memory
// for a file soon has memory for one file only, each time the reader is done with another, and then fetches file by
// file: measured on 128 shards of 64 MiB with 1 GiB of memory (TestHorizon), 0.64 requests a sample in sequence and
// 0.82 with a window of 16 shards. With an eighth of the budget as the lead that a request needs for its latency, it
// is 0.008 and 0.013. Take is twice the budget: of files that far ahead only those of open shards are resident, on
// average half of them; more brings nothing. The reserve keeps the lead from starving if that guess is wrong, as for
// a uniform order.
//
// A windowed order needs memory for three quarters of its window's shards; with half of it, it needs 0.14 requests a
// sample.
func NewHorizon(budget, mean int64) Horizon {
	n := max(budget/max(mean, 1), 1)
	return Horizon{Plan: int(max(n/8, 1)), Take: int(2 * n), Spread: int(n / 2), Reserve: budget / 8}
}

// Front returns the place of a reader that has read all positions below frontier and none from head on. The workers
// of a loader read a batch each in parallel. The last one is some batches ahead of the first, and its next samples
// are just as urgent. A program that opens one file out of turn must not move it far.
func (h Horizon) Front(frontier, head int) int {
	return frontier + min(max(head-frontier, 0), h.Spread)
}

// Bound returns c for a chunk, with its span limited to the files that may be fetched along with free bytes of memory
// free.
func (h Horizon) Bound(c Coalescing, free int64) Coalescing {
	if h.Chunk > 0 {
		c.MaxBytes, c.MaxGap, c.MaxFiles = max(c.MaxBytes, h.Chunk), max(c.MaxGap, h.Chunk), chunkFiles
	}
	c.MaxBytes = min(c.MaxBytes, free-h.Reserve)
	return c
}
