package prefetch

import "slices"

// Places says where files lie in their objects. Ranks number the files by object and then by offset,
// 0 to Len()-1. Implementations are safe for concurrent use.
type Places interface {
	Len() int
	// Rank returns the rank of a file, At the file of a rank.
	Rank(file int) int
	At(rank int) int
	// Extent returns the object that holds the file of a rank, and its bytes [off, end) there.
	Extent(rank int) (object int, off, end int64)
}

// Coalescing bounds a request for several files.
type Coalescing struct {
	// MaxBytes is the longest span, from the first byte of the first file to the last byte of the
	// last, including what nobody wants in between. A single file may be longer.
	MaxBytes int64
	// MaxGap is how many bytes that nobody wants may lie between two files that are wanted. In a tar
	// that is at least a member's header and the padding before it: 512 to 1,535 bytes, and 1,024 or
	// more in addition for PAX headers. With less than 4 KiB even neighbours may be fetched apart.
	MaxGap int64
	// MaxFiles is the largest number of files, counting those that are wanted.
	MaxFiles int
}

// maxPassed is how many files in a row are passed over that are not wanted. Members of a tar that are
// that small together take 32 KiB of headers, so with small gaps the bytes end the search first; it
// bounds the number of calls to wanted, which take a lock each, where large gaps are allowed.
const maxPassed = 64

// Coalesce returns the ranks of the files that are to be fetched by one request with file, which is
// needed next, ascending, file's own among them: of its neighbours in the same object those that are
// wanted, as far as the gaps between them and the bounds allow. It looks to the right first, which is
// where a reader in sequence goes on, and to the left with what is left of the bounds.
//
// wanted is asked at most once about each file passed, never about file itself, and whatever it wants
// is in the result: it may claim what it answers true for. Files of several extents never belong into a request for several files: let wanted say
// false for them, and do not call Coalesce for one.
//
// It takes O(1) time for each file returned or passed over, of which there are at most 64 in a row.
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

// Horizon is how far ahead an executor goes that coalesces requests. Positions count from the reader's, not
// from the one that is being planned.
type Horizon struct {
	// Plan: up to here, from Front on, a request is started for what is not resident.
	Plan int
	// Take: what is needed up to here, from the reader's frontier on, may come along.
	Take int
	// Spread is the most that Front believes.
	Spread int
	// Reserve is the part of the memory that nothing may take that only comes along.
	Reserve int64
}

// NewHorizon returns the horizon of an executor with budget bytes of memory for what is fetched ahead,
// of files of mean bytes each.
//
// What makes requests large is the distance between Plan and Take. An executor that starts a request
// whenever there is memory for a file soon has memory for one file only, each time the reader is done
// with another, and then fetches file by file: measured on 128 shards of 64 MiB with 1 GiB of memory
// (TestHorizon), 0.64 requests a sample in sequence and 0.82 with a window of 16 shards. With an
// eighth of the budget as the lead that a request needs for its latency, it is 0.008 and 0.013.
// Take is twice what the budget holds, because of what lies that far ahead only the files of open shards
// are resident, half of them in the mean; as many more bring nothing. The reserve keeps the lead from
// starving where that guess is wrong, as it is for a uniform order.
//
// A windowed order needs memory for three quarters of its window's shards; with half of it, it takes
// 0.14 requests a sample.
func NewHorizon(budget, mean int64) Horizon {
	n := max(budget/max(mean, 1), 1)
	return Horizon{Plan: int(max(n/8, 1)), Take: int(2 * n), Spread: int(n / 2), Reserve: budget / 8}
}

// Front returns where a reader stands who has read all positions below frontier and none from head on. The
// workers of a loader read a batch each, side by side: the last one is their number of batches ahead of the
// first, and needs what comes next as soon. Somebody who opens one file out of turn must not move it far.
func (h Horizon) Front(frontier, head int) int {
	return frontier + min(max(head-frontier, 0), h.Spread)
}

// Bound returns c with its span bounded by what may come along while free bytes of memory are free.
func (h Horizon) Bound(c Coalescing, free int64) Coalescing {
	c.MaxBytes = min(c.MaxBytes, free-h.Reserve)
	return c
}
