package owner

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// emulate returns the placement of a job with as many ranks on each node.
func emulate(t testing.TB, weights []uint32, ranks int) *Placement {
	t.Helper()
	v := placement{V: placementVersion}
	for i, w := range weights {
		v.Nodes = append(v.Nodes, Node{fmt.Sprintf("%016x", mix(uint64(i))), w})
		for range ranks {
			v.Ranks = append(v.Ranks, i)
		}
	}
	text, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	p, err := ParsePlacement(string(text))
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// Whatever the owners, the ranks have the whole batch between them, each sample once and each rank as many as without a
// placement; and no more samples could be where they are owned.
func TestDeal(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		nodes := rapid.IntRange(1, 9).Draw(rt, "nodes")
		v := placement{V: placementVersion, Ranks: rapid.SliceOfN(rapid.IntRange(0, nodes-1), 1, 20).Draw(rt, "ranks")}
		for i := range nodes {
			v.Nodes = append(v.Nodes, Node{fmt.Sprint(i), 1})
		}
		text, err := json.Marshal(v)
		if err != nil {
			rt.Fatal(err)
		}
		p, err := ParsePlacement(string(text))
		if err != nil {
			rt.Fatal(err)
		}
		n := rapid.IntRange(0, 100).Draw(rt, "n")
		owners := rapid.SliceOfN(rapid.IntRange(-1, nodes-1), n, n).Draw(rt, "owners")
		var all []uint32
		local, room, owned := 0, make([]int, nodes), make([]int, nodes)
		for rank := range p.World() {
			mine := p.Deal(n, func(i int) int { return owners[i] }, rank)
			want := 0
			for pos := rank; pos < n; pos += p.World() {
				want++
			}
			if len(mine) != want || !slices.IsSorted(mine) {
				rt.Fatalf("rank %d has %v, want %d, ascending", rank, mine, want)
			}
			for _, i := range mine {
				local += b2i(owners[i] == p.node[rank])
			}
			room[p.node[rank]] += want
			all = append(all, mine...)
		}
		slices.Sort(all)
		for i := range n {
			if len(all) != n || all[i] != uint32(i) {
				rt.Fatalf("the ranks have %v of %d", all, n)
			}
			if owners[i] >= 0 {
				owned[owners[i]]++
			}
		}
		best := 0
		for node := range nodes {
			best += min(room[node], owned[node])
		}
		if local != best {
			rt.Fatalf("%d samples are local, %d could be", local, best)
		}
	})
}

// Every rank is its node's every k-th, so that a batch sorted by length leaves them equal work.
func TestDealWithinANode(t *testing.T) {
	p := emulate(t, []uint32{1}, 3)
	if got := fmt.Sprint(p.Deal(8, func(int) int { return 0 }, 0), p.Deal(8, func(int) int { return -1 }, 1),
		p.Deal(8, func(int) int { return 0 }, 2)); got != "[0 3 6] [1 4 7] [2 5]" {
		t.Errorf("got %s", got)
	}
}

// locality returns the share of samples read where they are owned, with the placement and without.
func locality(t testing.TB, weights []uint32, ranks, batch, batches int) (placed, chance float64) {
	p := emulate(t, weights, ranks)
	n := p.World() * batch
	owners := p.Owners(source, fileUnit)
	var there, plain int
	for b := range batches {
		of := make([]int, n)
		for i := range of {
			of[i] = owners(b*n + i)
			plain += b2i(of[i] == p.node[i%p.World()])
		}
		for rank := range p.World() {
			for _, i := range p.Deal(n, func(i int) int { return of[i] }, rank) {
				there += b2i(of[i] == p.node[rank])
			}
		}
	}
	return float64(there) / float64(n*batches), float64(plain) / float64(n*batches)
}

// The table of lab/bench/results/placement.md.
func TestLocality(t *testing.T) {
	weights := func(nodes int, of ...uint32) (w []uint32) {
		for i := range nodes {
			w = append(w, of[i%len(of)]<<17)
		}
		return w
	}
	t.Log("| nodes | caches | ranks a node | batch of a rank | local | by chance | of peers, beside chance |")
	for _, c := range []struct {
		name         string
		weights      []uint32
		ranks, batch int
		least        float64
	}{
		{"equal", weights(8, 1), 1, 32, 0.93},
		{"equal", weights(64, 1), 1, 256, 0.97},
		{"equal", weights(64, 1), 8, 32, 0.97},
		{"equal", weights(4, 1), 1, 256, 0.97},
		{"1:2", weights(8, 1, 2), 1, 32, 0.80},
		{"1:2", weights(64, 1, 2), 1, 256, 0.80},
	} {
		batches := 150_000 / (len(c.weights) * c.ranks * c.batch)
		placed, chance := locality(t, c.weights, c.ranks, c.batch, batches)
		t.Logf("| %d | %s | %d | %d | %.1f%% | %.1f%% | %.3f |",
			len(c.weights), c.name, c.ranks, c.batch, 100*placed, 100*chance, (1-placed)/(1-chance))
		if placed < c.least {
			t.Errorf("%d nodes, caches %s, batch %d: %.1f%% of the reads are local, want %.0f%%",
				len(c.weights), c.name, c.batch, 100*placed, 100*c.least)
		}
	}
}

func TestPlacementText(t *testing.T) {
	p, err := ParsePlacement(
		`{"ranks": [0, 1, 0], "v": 2, "nodes": [{"weight": 7, "id": "b"}, {"id": "a", "weight": 9}]}`)
	if err != nil {
		t.Fatal(err)
	}
	const want = `{"v":2,"nodes":[{"id":"a","weight":9},{"id":"b","weight":7}],"ranks":[1,0,1]}`
	if p.String() != want || p.World() != 3 || len(p.Digest()) != 32 {
		t.Errorf("got %s, digest %s", p, p.Digest())
	}
	if q, err := ParsePlacement(want); err != nil || q.Digest() != p.Digest() {
		t.Errorf("the canonical text is another placement, or none: %v", err)
	}
	for text, words := range map[string]string{
		"":                               "not valid JSON",
		"{}":                             "format version 0",
		"{} {}":                          "trailing data",
		`{"v":1,"nodes":[],"ranks":[]}`:  "reads version 2",
		`{"v":3,"nodes":[],"ranks":[]}`:  "reads version 2",
		`{"v":2,"nodes":[],"ranks":[0]}`: "0 nodes",
		`{"v":2,"nodes":[{"id":"a","weight":1}],"ranks":[]}`:                        "0 ranks",
		`{"v":2,"nodes":[{"id":"a","weight":0}],"ranks":[0]}`:                       "an id and a weight",
		`{"v":2,"nodes":[{"id":"a","weight":1},{"id":"a","weight":2}],"ranks":[0]}`: `"a" is there twice`,
		`{"v":2,"nodes":[{"id":"a","weight":1}],"ranks":[0,1]}`:                     "rank 1 is on node 1",
		`{"v":2,"nodes":[{"id":"a","weight":1}],"ranks":[0],"zones":["a"]}`:         "zones",
		`{"v":2,"nodes":[{"id":"a","weight":4294967296}],"ranks":[0]}`:              "weight",
	} {
		if _, err := ParsePlacement(text); err == nil || !strings.Contains(err.Error(), words) {
			t.Errorf("%s: %v, want %q", text, err, words)
		}
	}
}
