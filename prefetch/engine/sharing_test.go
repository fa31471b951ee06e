package engine

import (
	"testing"

	"github.com/shoalfs/shoal/cache/cluster"
	"github.com/shoalfs/shoal/cache/owner"
)

// A former owner is asked as long as it has the dataset open, also while it drains, and no more once it has left.
func TestFormerOwnerHasLeft(t *testing.T) {
	const dataset = "d"
	node := func(id string) cluster.Node {
		return cluster.Node{ID: id, Instance: id, Weight: 1, Open: []string{dataset}}
	}
	former := &members{self: -1, nodes: []cluster.Node{node("a"), node("b")}}
	former.table = owner.NewTable(owner.New([16]byte{1}, []owner.Node{{ID: "a", Weight: 1}, {ID: "b", Weight: 1}}))
	s := &sharing{unit: func(file, _ int) uint64 { return uint64(file) << 44 }}
	asked := func(m *members) (n [2]int) {
		for file := range 100 {
			if i, _ := s.keeper(m, file, 0, true); i >= 0 {
				n[i]++
			}
		}
		return n
	}
	all := asked(former)
	if all[0]+all[1] != 100 || all[0]*all[1] == 0 {
		t.Fatalf("%v of 100 are asked of two nodes", all)
	}
	drains := node("b")
	drains.Draining = true
	closed := node("b")
	closed.Open = nil
	for _, c := range []struct {
		view cluster.View
		b    int
	}{
		{cluster.View{Nodes: []cluster.Node{node("a"), drains, node("c")}}, all[1]},
		{cluster.View{Nodes: []cluster.Node{node("a"), closed}}, 0},
		{cluster.View{Nodes: []cluster.Node{node("a"), node("c")}}, 0},
	} {
		if got := asked(former.still(c.view, dataset)); got != [2]int{all[0], c.b} {
			t.Errorf("%+v: %v are asked, want %d of b", c.view.Nodes, got, c.b)
		}
	}
}

// Who is still to ask for what a node lends is of its zone: the others have owners of their own.
func TestNodesOfTheZone(t *testing.T) {
	s := &sharing{}
	s.now.Store(&members{nodes: make([]cluster.Node, 2), far: []*members{{nodes: make([]cluster.Node, 3)}}})
	if n := s.Nodes(); n != 2 {
		t.Errorf("%d nodes", n)
	}
}
