package segment

import (
	"sort"
	"sync/atomic"
)

// slot is the place of a record. These 12 bytes are all the memory that a record of a sealed segment needs.
type slot struct {
	off   uint32 // in units
	units uint32 // with padding
	block uint32 // number of its first block in the segment
}

// slots are the records of one segment by ascending offset, and one bit per block that says that its checksum was
// correct. The only writer holds the store's lock; readers take none.
type slots struct {
	n       atomic.Int64 // recs[:n] can be read
	recs    []slot
	checked []uint64 // accessed atomically
}

func newSlots(recs, blocks int) *slots {
	return &slots{recs: make([]slot, recs), checked: make([]uint64, (blocks+63)/64)}
}

// resized returns a copy with space for so many records and blocks. A bit that is set in the old one meanwhile is
// lost, and that block is checked once more.
func (t *slots) resized(recs, blocks int) *slots {
	r := newSlots(recs, blocks)
	n := t.n.Load()
	copy(r.recs, t.recs[:n])
	for i := range min(len(t.checked), len(r.checked)) {
		r.checked[i] = atomic.LoadUint64(&t.checked[i])
	}
	r.n.Store(n)
	return r
}

// blocks returns the number of blocks of the first n records.
func (t *slots) blocks(n int64) int {
	if n == 0 {
		return 0
	}
	last := t.recs[n-1]
	// The header is shorter than a block, so this may count one too many; never one too few.
	return int(last.block) + blocks(int(last.units)*unit)
}

// add appends a record and returns the slots that hold it.
func (t *slots) add(off, size int64) *slots {
	n := t.n.Load()
	first := t.blocks(n)
	recs, bits := len(t.recs), 64*len(t.checked)
	if int(n) == recs {
		recs = max(256, 2*recs)
	}
	if need := first + blocks(int(size)); need > bits {
		bits = max(256, 2*need)
	}
	if recs > len(t.recs) || bits > 64*len(t.checked) {
		t = t.resized(recs, bits)
	}
	t.recs[n] = slot{off: uint32(off / unit), units: uint32(size / unit), block: uint32(first)}
	t.n.Store(n + 1)
	return t
}

// find returns the number of the record at off, or -1.
func (t *slots) find(off int64) int {
	recs := t.recs[:t.n.Load()]
	want := uint32(off / unit)
	i := sort.Search(len(recs), func(i int) bool { return recs[i].off >= want })
	if i < len(recs) && recs[i].off == want {
		return i
	}
	return -1
}

// isChecked reports whether all blocks from first to last of record i were checked.
func (t *slots) isChecked(i, first, last int) bool {
	for b := int(t.recs[i].block) + first; b <= int(t.recs[i].block)+last; b++ {
		if atomic.LoadUint64(&t.checked[b/64])&(1<<(b%64)) == 0 {
			return false
		}
	}
	return true
}

// setChecked notes that these blocks were right, or not.
func (t *slots) setChecked(i, first, last int, right bool) {
	for b := int(t.recs[i].block) + first; b <= int(t.recs[i].block)+last; b++ {
		if bit := uint64(1) << (b % 64); right {
			atomic.OrUint64(&t.checked[b/64], bit)
		} else {
			atomic.AndUint64(&t.checked[b/64], ^bit)
		}
	}
}
