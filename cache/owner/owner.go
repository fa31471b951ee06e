// Package owner says which node of a cluster keeps a unit of a dataset. It is pure: no clock, no I/O, and integers only, so that
// all nodes agree whatever their architecture.
package owner

import (
	"crypto/sha256"
	"encoding/binary"
	"math/bits"
)

// Node is a member of a cluster as ownership sees it. With weight 0 it owns nothing.
type Node struct {
	ID     string
	Weight uint32
}

// Owners say who owns the units of one source. They are immutable, and safe for concurrent use.
//
// It is rendezvous hashing: each node draws a number for the unit, exponentially distributed with its weight as the rate,
// and the least wins. So a node owns units in proportion to its weight, one that joins takes only what it is to own, and the
// units of one that leaves go to all others.
type Owners struct {
	nodes  []Node
	seeds  []uint64 // a node's, from source and ID
	source uint64
}

// New returns the owners among the nodes, in any order: it changes the indices, but not who owns.
func New(source [16]byte, nodes []Node) *Owners {
	o := &Owners{nodes: append([]Node(nil), nodes...), seeds: make([]uint64, len(nodes)), source: seed(source, "")}
	for i, n := range nodes {
		o.seeds[i] = seed(source, n.ID)
	}
	return o
}

// seed differs from everything that other hashes of the same names begin with, such as prefetch.Keep's: what a node keeps of
// its units is independent of which it owns.
func seed(source [16]byte, id string) uint64 {
	sum := sha256.Sum256([]byte("shoal owner 1\x00" + string(source[:]) + id))
	return binary.LittleEndian.Uint64(sum[:])
}

// Of returns the index of the unit's owner, -1 if no node has a weight. It takes some 3 ns a node.
func (o *Owners) Of(unit uint64) int {
	m := mix(unit ^ o.source)
	best, least, of := -1, uint64(0), uint64(0)
	for i, s := range o.seeds {
		h, weight := mix(m+s), uint64(o.nodes[i].Weight)
		// The logarithm takes 30 times as long as all else, so most nodes are ruled out by a lower bound of it.
		if weight == 0 || best >= 0 && less(least, of, atLeast(h), weight) {
			continue
		}
		draw := exponential(h)
		if best < 0 || less(draw, weight, least, of) || !less(least, of, draw, weight) && o.nodes[i].ID < o.nodes[best].ID {
			best, least, of = i, draw, weight
		}
	}
	return best
}

// less reports whether a/v < b/w.
func less(a, v, b, w uint64) bool {
	ah, al := bits.Mul64(a, w)
	bh, bl := bits.Mul64(b, v)
	_, borrow := bits.Sub64(al, bl, 0)
	_, borrow = bits.Sub64(ah, bh, borrow)
	return borrow != 0
}

// fraction is the number of bits after the point of a draw. Up to 64 come before it.
const fraction = 57

// exponential returns -log2(1 - h/2^64), rounded to a fraction of 57 bits. It rises with h.
func exponential(h uint64) uint64 {
	u := ^h | 1
	shift := bits.LeadingZeros64(u)
	x := u << shift // in [1, 2), with 63 bits after the point
	log := uint64(63 - shift)
	for range fraction { // squaring a number doubles its logarithm
		hi, _ := bits.Mul64(x, x)
		carry := hi >> 63
		log, x = log<<1|carry, hi<<(1-carry&63)
	}
	return 64<<fraction - log
}

// atLeast is at most exponential(h): -log2(1-v) ≥ 1.4427 v.
func atLeast(h uint64) uint64 {
	v := h >> (64 - fraction)
	return v + v>>2 + v>>3
}

// mix is the finaliser of SplitMix64.
func mix(z uint64) uint64 {
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}

// FileUnit is the unit of an extent of a file that is an object of its own.
func FileUnit(pathHash [16]byte, extent int) uint64 {
	return binary.LittleEndian.Uint64(pathHash[:]) ^ mix(binary.LittleEndian.Uint64(pathHash[8:])+uint64(extent))
}

// ShardUnit is the unit of a run of a shard, which has one owner so that files next to each other can be fetched by one request.
func ShardUnit(shardKey string, run int64) uint64 {
	sum := sha256.Sum256([]byte(shardKey))
	return binary.LittleEndian.Uint64(sum[:]) ^ mix(binary.LittleEndian.Uint64(sum[8:])+uint64(run))
}
