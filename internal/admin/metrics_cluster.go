package admin

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/shoalfs/shoal/prefetch/engine"
)

// clusterMetrics are absent without a cluster.
var clusterMetrics = []metric{
	ofCluster(prometheus.GaugeValue, "cluster_joined", "1 while etcd answers and has this node.", func(s *engine.ClusterStats) float64 { return float64(is(s.State == "joined")) }),
	ofCluster(prometheus.GaugeValue, "cluster_nodes", "Nodes of the cluster, as of the last list.", func(s *engine.ClusterStats) float64 { return float64(len(s.Nodes)) }),
	ofCluster(prometheus.GaugeValue, "cluster_owned_ratio", "Share of the dataset that this node owns.", func(s *engine.ClusterStats) float64 { return s.Owned }),
	ofCluster(prometheus.GaugeValue, "cluster_nodes_away", "Nodes that are left out, since they do not answer this one as they should.", func(s *engine.ClusterStats) float64 { return float64(len(s.Away())) }),
	ofCluster(prometheus.CounterValue, "cluster_disk_bytes_total", "Bytes of the dataset read from this node's own disk.", func(s *engine.ClusterStats) float64 { return float64(s.DiskBytes) }),
	ofCluster(prometheus.CounterValue, "peer_other_version_total", "Pieces that other nodes did not give, since they have another version of the dataset.", func(s *engine.ClusterStats) float64 { return float64(s.OtherVersion()) }),
	ofCluster(prometheus.CounterValue, "peer_bytes_total", "Bytes of the dataset read from other nodes.", func(s *engine.ClusterStats) float64 { return float64(s.PeerBytes) }),
	ofCluster(prometheus.CounterValue, "peer_given_bytes_total", "Bytes given to other nodes, of all datasets.", func(s *engine.ClusterStats) float64 { return float64(s.Given.Bytes) }),
	ofCluster(prometheus.CounterValue, "peer_given_pieces_total", "Pieces of extents given to other nodes.", func(s *engine.ClusterStats) float64 { return float64(s.Given.Pieces) }),
	ofCluster(prometheus.CounterValue, "peer_busy_total", "Pieces not given to other nodes for lack of memory or of a place.", func(s *engine.ClusterStats) float64 { return float64(s.Given.Busy) }),
}

func ofCluster(kind prometheus.ValueType, name, help string, of func(s *engine.ClusterStats) float64) metric {
	return ofPart(func(s *Snapshot) *engine.ClusterStats { return s.Cluster }, kind, name, help, of)
}
