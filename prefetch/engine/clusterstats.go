package engine

import (
	"github.com/shoalfs/shoal/cache/cluster"
	"github.com/shoalfs/shoal/cache/peer"
)

// ClusterStats are what this node knows of its cluster, and of the dataset in it.
type ClusterStats struct {
	Cluster string `json:"cluster"` // its URL, without a password
	Node    string `json:"node"`    // this one
	// joining, joined, away (etcd does not answer: the nodes known last stay), refused
	State     string           `json:"state"`
	Cause     string           `json:"cause,omitempty"`
	Revision  int64            `json:"revision"`
	Owned     float64          `json:"owned"`      // share of the dataset that this node owns
	PeerBytes int64            `json:"peer_bytes"` // read from other nodes, of this dataset
	DiskBytes int64            `json:"disk_bytes"` // read from this node's disk, of this dataset
	Given     peer.ServerStats `json:"given"`      // to other nodes, of all datasets
	Nodes     []ClusterNode    `json:"nodes"`
}

// ClusterNode is a node as this one sees it.
type ClusterNode struct {
	ID       string      `json:"id"`
	Address  string      `json:"address"`
	Zone     string      `json:"zone,omitempty"`
	Version  string      `json:"version"` // of its program
	Weight   uint32      `json:"weight"`  // its cache in MiB
	Draining bool        `json:"draining"`
	Open     bool        `json:"open"`            // it has the dataset open
	Owned    float64     `json:"owned"`           // share of the dataset
	Asked    *peer.Stats `json:"asked,omitempty"` // by this node; nil of itself
	Problem  string      `json:"problem,omitempty"`
}

// away reports whether the node is left out, since it does not answer as it should.
func (n *ClusterNode) away() bool { return n.Asked != nil && n.Asked.State == "away" }

// problem says in words why the node is not read from; "" if it is.
func (n *ClusterNode) problem() string {
	switch {
	case n.away():
		return "left out: " + n.Asked.Cause
	case n.Draining:
		return "draining: it owns nothing"
	case !n.Open:
		return "does not have the dataset open"
	}
	return ""
}

// Away returns the nodes that this one leaves out, since they do not answer as they should.
func (s *ClusterStats) Away() (nodes []ClusterNode) {
	for _, n := range s.Nodes {
		if n.away() {
			nodes = append(nodes, n)
		}
	}
	return nodes
}

// OtherVersion returns how many pieces other nodes did not give since they have another version of the dataset.
func (s *ClusterStats) OtherVersion() (pieces int64) {
	for _, n := range s.Nodes {
		if n.Asked != nil {
			pieces += n.Asked.No["version"]
		}
	}
	return pieces
}

// clusterStats returns nil without a cluster.
func (e *Engine) clusterStats(peerBytes, diskBytes int64) *ClusterStats {
	n := e.host.node
	if n == nil {
		return nil
	}
	state, view := n.cluster.State(), n.cluster.View()
	s := &ClusterStats{
		Cluster: n.at.String(), Node: n.id, State: state.Phase, Cause: state.Error, Revision: view.Rev,
		PeerBytes: peerBytes, DiskBytes: diskBytes, Given: n.server.Stats(), Nodes: []ClusterNode{},
	}
	shares, asked := cluster.Shares(e.membersOf(view).all()), map[string]peer.Stats{}
	for _, of := range n.client.Stats() {
		asked[of.Node] = of
	}
	for _, node := range view.Nodes {
		c := ClusterNode{ID: node.ID, Address: node.Address, Zone: node.Zone, Version: node.Version,
			Weight: node.Weight, Draining: node.Draining, Open: node.Has(e.datasetID()), Owned: shares[node.ID]}
		if of, ok := asked[node.ID]; ok {
			c.Asked = &of
		}
		c.Problem = c.problem()
		s.Nodes = append(s.Nodes, c)
	}
	s.Owned = shares[n.id]
	return s
}

// NodeDataset is a dataset that a node has open. Counters count since the node's start.
type NodeDataset struct {
	Source     string `json:"source"`
	Version    string `json:"version"`
	Files      int    `json:"files"`
	Bytes      int64  `json:"bytes"`       // of the dataset
	Disk       int64  `json:"disk"`        // that it takes in the node's cache
	StoreBytes int64  `json:"store_bytes"` // read from the store
	PeerBytes  int64  `json:"peer_bytes"`  // from other nodes
	DiskBytes  int64  `json:"disk_bytes"`  // from the node's own disk
}

// nodeDatasets is what this node tells whoever asks its address for it, of the datasets that are not being closed.
func (h *Host) nodeDatasets() any {
	list := []NodeDataset{}
	for _, e := range h.engines() {
		if !e.guests.enter() {
			continue
		}
		s := e.Stats()
		e.guests.leave()
		list = append(list, NodeDataset{
			Source: s.Source, Version: s.Dataset, Files: s.Files, Bytes: s.Bytes, Disk: s.Disk.Used,
			StoreBytes: s.GetBytes, PeerBytes: s.Cluster.PeerBytes, DiskBytes: s.Cluster.DiskBytes,
		})
	}
	return list
}
