package engine

import (
	"testing"

	"github.com/shoalfs/shoal/cache/cachedir"
	"github.com/shoalfs/shoal/cache/cluster"
	"github.com/shoalfs/shoal/cache/owner"
	"github.com/shoalfs/shoal/lab/rig/etcd"
)

// A node that comes while another one makes a new version ready is a node of that, too.
func TestNodeComesDuringRefresh(t *testing.T) {
	if _, err := etcd.FindBinary(); err != nil {
		t.Skip(err)
	}
	server, err := etcd.Start(t.Context(), false)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(server.Close)
	url, dir := "etcd://"+server.Addr+"/test", t.TempDir()
	source, _ := folder(t, 1, 3)
	e := open(t, HostConfig{Options: cachedir.Options{Path: dir, Size: 64 << 20, Memory: 256 << 20},
		Cluster: ClusterConfig{URL: url, Advertise: "127.0.0.1:0", Insecure: true}},
		Config{Source: source, Order: spec(t, "none"), Samples: "images"})
	defer closeEngine(t, e)
	m, layout, err := e.catalog.Manifest(e.name)
	if err != nil {
		t.Fatal(err)
	}
	match, err := matchOf("images")
	if err != nil {
		t.Fatal(err)
	}
	next, err := e.newView(m, layout, match)
	if err != nil {
		t.Fatal(err)
	}
	other, err := cluster.Join(
		cluster.Options{URL: url, Self: cluster.Node{ID: "0123456789abcdef", Address: "127.0.0.1:1", Weight: 1}})
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	other.Open(e.datasetID())
	waitFor(t, "the other node is known", func() bool { return e.cur.Load().sharing.Nodes() == 2 })
	e.cur.Store(next)
	e.tellMoved(nil)
	waitFor(t, "the new version has it, too", func() bool { return next.sharing.Nodes() == 2 })
}

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
