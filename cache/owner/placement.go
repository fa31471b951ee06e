package owner

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
)

// Placement says on which nodes the ranks of a job run. Which rank reads a sample follows from it, so all agree on it.
type Placement struct {
	nodes []Node
	node  []int   // by rank
	ranks [][]int // by node, ascending
}

const placementVersion = 2

// placement is the text of a Placement.
type placement struct {
	V     int    `json:"v"`
	Nodes []Node `json:"nodes"`
	Ranks []int  `json:"ranks"`
}

// ParsePlacement reads {"v":2,"nodes":[{"id":"…","weight":102400},…],"ranks":[0,0,1,…]}: the index of each rank's node.
// Each bucket of units has an owner, as in a cluster. Version 1, which no release wrote, had one for each unit.
func ParsePlacement(text string) (*Placement, error) {
	var v placement
	d := json.NewDecoder(bytes.NewReader([]byte(text)))
	d.DisallowUnknownFields()
	if err := d.Decode(&v); err != nil {
		return nil, fmt.Errorf("placement: not valid JSON: %w", err)
	}
	if d.More() {
		return nil, errors.New("placement: trailing data after the JSON object")
	}
	switch {
	case v.V != placementVersion:
		return nil, fmt.Errorf(
			"placement: format version %d, this program reads version %d (make a new one with shoal.placement)", v.V,
			placementVersion)
	case len(v.Nodes) == 0 || len(v.Ranks) == 0:
		return nil, fmt.Errorf("placement: %d nodes and %d ranks: it needs one of each", len(v.Nodes), len(v.Ranks))
	}
	p := &Placement{nodes: slices.Clone(v.Nodes)}
	for _, n := range v.Nodes {
		if n.ID == "" || n.Weight == 0 {
			return nil, fmt.Errorf("placement: node %q of weight %d: each node needs an id and a weight",
				n.ID, n.Weight)
		}
	}
	// In the order of their ids, so that equal placements have equal texts.
	slices.SortFunc(p.nodes, func(a, b Node) int { return cmp.Compare(a.ID, b.ID) })
	at := make(map[string]int, len(p.nodes))
	for i, n := range p.nodes {
		if _, again := at[n.ID]; again {
			return nil, fmt.Errorf("placement: node %q is there twice", n.ID)
		}
		at[n.ID] = i
	}
	p.ranks = make([][]int, len(p.nodes))
	for rank, i := range v.Ranks {
		if i < 0 || i >= len(v.Nodes) {
			return nil, fmt.Errorf("placement: rank %d is on node %d, nodes are 0 to %d", rank, i, len(v.Nodes)-1)
		}
		node := at[v.Nodes[i].ID]
		p.node = append(p.node, node)
		p.ranks[node] = append(p.ranks[node], rank)
	}
	return p, nil
}

// String returns the canonical text.
func (p *Placement) String() string {
	b, err := json.Marshal(placement{V: placementVersion, Nodes: p.nodes, Ranks: p.node})
	if err != nil {
		panic(err) // strings and integers only
	}
	return string(b)
}

// Digest names the placement, in 32 hex digits.
func (p *Placement) Digest() string {
	sum := sha256.Sum256([]byte(p.String()))
	return hex.EncodeToString(sum[:16])
}

// World returns the number of ranks.
func (p *Placement) World() int { return len(p.node) }

// Home returns the id of the rank's node.
func (p *Placement) Home(rank int) string { return p.nodes[p.node[rank]].ID }

// Nodes returns the number of nodes.
func (p *Placement) Nodes() int { return len(p.nodes) }

// Owners returns who owns each of a source's units, by its index in Deal. unit returns their names.
func (p *Placement) Owners(source [16]byte, unit func(i int) uint64) func(i int) int {
	t := NewTable(New(source, p.nodes))
	return func(i int) int { return t.Of(Bucket(unit(i))) }
}

// Deal divides a global batch of n samples among the ranks, and returns which of them the rank gets, ascending. Each
// rank gets as many as if they were dealt out like cards, rank 0 first. owner returns the node that owns a sample, by
// its place in the batch.
//
// No division has more samples on their owners' nodes: a node gets those that it owns, the first ones if it owns more
// than its ranks take, and the others fill up the nodes that own fewer. A node deals its samples out to its ranks.
func (p *Placement) Deal(n int, owner func(i int) int, rank int) []uint32 {
	world := len(p.node)
	room := make([]int, len(p.nodes))
	for r, node := range p.node {
		room[node] += dealt(n, world, r)
	}
	of := make([]int32, n) // node by sample
	var rest []int
	for i := range of {
		node := owner(i)
		if node < 0 || room[node] == 0 {
			rest = append(rest, i)
			continue
		}
		room[node]--
		of[i] = int32(node)
	}
	node := 0
	for _, i := range rest {
		for room[node] == 0 {
			node++
		}
		room[node]--
		of[i] = int32(node)
	}
	home := p.node[rank]
	turns := len(p.ranks[home])
	turn, _ := slices.BinarySearch(p.ranks[home], rank)
	mine := make([]uint32, 0, dealt(n, world, rank))
	for i, node := range of {
		if int(node) != home {
			continue
		}
		if turn == 0 {
			mine, turn = append(mine, uint32(i)), turns
		}
		turn--
	}
	return mine
}

// dealt returns how many of n cards rank gets.
func dealt(n, world, rank int) int { return (n - rank + world - 1) / world }
