// Package owner says which node of a cluster keeps a unit of a dataset. It is pure: no clock, no I/O, and its results
// are those of integers, so that all nodes agree whatever their architecture.
package owner

import (
	"crypto/sha256"
	"encoding/binary"
	"math"
	"math/bits"
)

// Node is a member of a cluster as ownership sees it. With weight 0 it owns nothing.
type Node struct {
	ID     string `json:"id"`
	Weight uint32 `json:"weight"`
}

// Owners say who owns the units of one source. They are immutable, and safe for concurrent use.
//
// It is rendezvous hashing: each node draws a number for the unit, exponentially distributed with its weight as the
// rate, and the least wins. So a node owns units in proportion to its weight, one that joins takes only what it is to
// own, and the units of one that leaves go to all others.
type Owners struct {
	nodes []Node
	seeds []uint64 // a node's, from source and ID
	// a draw, divided by the weight, is more than half of its number times this, but for the smallest numbers
	rates  []float64
	all    []int // the nodes' indices
	source uint64
}

// New returns the owners among the nodes, in any order: it changes the indices, but not who owns.
func New(source [16]byte, nodes []Node) *Owners {
	o := &Owners{nodes: append([]Node(nil), nodes...), seeds: make([]uint64, len(nodes)),
		rates: make([]float64, len(nodes)), all: make([]int, len(nodes)), source: seed(source, "")}
	for i, n := range nodes {
		o.seeds[i], o.all[i], o.rates[i] = seed(source, n.ID), i, 0.9999*math.Log2E*0x1p-63/max(float64(n.Weight), 1)
	}
	return o
}

// seed differs from everything that other hashes of the same names begin with, such as prefetch.Keep's: what a node
// keeps of its units is independent of which it owns.
func seed(source [16]byte, id string) uint64 {
	sum := sha256.Sum256([]byte("shoal owner 1\x00" + string(source[:]) + id))
	return binary.LittleEndian.Uint64(sum[:])
}

// Of returns the index of the unit's owner, -1 if no node has a weight. It takes some 5 ns a node.
func (o *Owners) Of(unit uint64) int { return o.contest(unit, -1, o.all, false) }

// Owns reports whether node i is the unit's owner. Of n nodes it looks at some ln n: then one has drawn less, mostly.
func (o *Owners) Owns(i int, unit uint64) bool {
	return o.nodes[i].Weight > 0 && o.contest(unit, i, o.all, true) == i
}

// contest returns who has drawn the least for a unit of a node with a weight, unless that is -1, and the others; or,
// with once, who first drew less than that node.
func (o *Owners) contest(unit uint64, best int, others []int, once bool) int {
	m := mix(unit ^ o.source)
	lo, hi := math.Inf(1), math.Inf(1) // bounds of the least
	if best >= 0 {
		lo, hi = o.bounds(best, mix(m+o.seeds[best]))
	}
	for _, i := range others {
		h := mix(m + o.seeds[i])
		if float64(int64(h>>1))*o.rates[i] > hi && h > 1<<21 || o.nodes[i].Weight == 0 || i == best {
			continue
		}
		if l, u := o.bounds(i, h); best < 0 || u < lo || l <= hi && o.precedes(i, best, m) {
			if best, lo, hi = i, l, u; once {
				break
			}
		}
	}
	return best
}

// bounds returns bounds of a node's draw, divided by its weight. The logarithm in integers takes 20 times as long.
func (o *Owners) bounds(i int, h uint64) (lo, hi float64) {
	draw, weight := -math.Log2(float64(^h|1)*0x1p-64), float64(o.nodes[i].Weight)
	off := draw*1e-12 + 0x1p-50
	return (draw - off) / weight, (draw + off) / weight
}

// precedes reports whether node i has drawn less than node j.
func (o *Owners) precedes(i, j int, m uint64) bool {
	a, b := exponential(mix(m+o.seeds[i])), exponential(mix(m+o.seeds[j]))
	v, w := uint64(o.nodes[i].Weight), uint64(o.nodes[j].Weight)
	return less(a, v, b, w) || !less(b, w, a, v) && o.nodes[i].ID < o.nodes[j].ID
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

// mix is the finaliser of SplitMix64.
func mix(z uint64) uint64 {
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}

// Buckets is how many parts there are of the units of a source. Each part has one owner, as if it were a unit. So who
// owns what of any number of units is known by so many contests. The nodes' shares are less even than if each unit had
// one: of 1,000 nodes the fullest has some 10% above the mean, and of 64 some 2%.
const Buckets = 1 << 20

// Bucket returns the part of a unit, which is any number that names it.
func Bucket(unit uint64) int { return int(mix(unit) >> 44) }

// ShardUnits returns the units of a shard's runs. Each has one owner, so that one request can fetch neighbours.
func ShardUnits(shardKey string) func(run int64) uint64 {
	sum := sha256.Sum256([]byte(shardKey))
	a, b := binary.LittleEndian.Uint64(sum[:]), binary.LittleEndian.Uint64(sum[8:])
	return func(run int64) uint64 { return a ^ mix(b+uint64(run)) }
}
