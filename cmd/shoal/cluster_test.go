package main

import (
	"strings"
	"testing"

	"github.com/shoalfs/shoal/cache/cluster"
	"github.com/shoalfs/shoal/prefetch/engine"
)

// A plan counts the nodes that own something of a source: those that have it open and are not drained.
func TestClusterPlan(t *testing.T) {
	node := func(id string, gib uint32, sources ...string) (n seenNode) {
		n.Node = cluster.Node{ID: id, Weight: gib << 10}
		for _, s := range sources {
			n.Datasets = append(n.Datasets, engine.NodeDataset{Source: s, Bytes: 12 << 30})
		}
		return n
	}
	drained := node("d", 4, "s3://x/")
	drained.Draining = true
	nodes := []seenNode{node("a", 4, "s3://x/"), node("b", 4, "s3://x/", "s3://y/"), node("c", 4), drained}
	for _, of := range []struct {
		leave string
		join  int64
		want  string
	}{
		{want: "s3://x/, 12 GiB\nNODE  OWNS     KEEPS\na     6.0 GiB  4.0 GiB\nb     6.0 GiB  4.0 GiB\neach epoch " +
			"reads 4.0 GiB from the bucket\n" +
			"s3://y/, 12 GiB\nNODE  OWNS    KEEPS\nb     12 GiB  4.0 GiB\neach epoch reads 8.0 GiB from the bucket\n"},
		{leave: "b", want: "s3://x/, 12 GiB\nNODE  OWNS    KEEPS\na     12 GiB  4.0 GiB\n6.0 GiB of the node that " +
			"leaves get new owners: from it if it is drained first, else from the bucket\neach epoch reads 8.0 GiB " +
			"from the bucket\n" +
			"s3://y/, 12 GiB\nno node would own it: each epoch of each node would read all of it from the bucket\n"},
		{join: 5 << 50, want: "s3://x/, 12 GiB\nNODE          OWNS    KEEPS\na             24 KiB  24 KiB\nb         " +
			"    24 KiB  24 KiB\nthe new node  12 GiB  12 GiB\n12 GiB move to the new node\neach epoch reads 0 B " +
			"from the bucket\n"},
	} {
		var out strings.Builder
		if err := planCluster(&out, nodes, of.leave, of.join); err != nil || !strings.HasPrefix(out.String(), of.want) {
			t.Errorf("leave %q, join %d: %v\n%s\nwant\n%s", of.leave, of.join, err, out.String(), of.want)
		}
	}
	if err := planCluster(&strings.Builder{}, nil, "", 1<<30); err == nil {
		t.Error("a cluster without nodes has a plan")
	}
}
