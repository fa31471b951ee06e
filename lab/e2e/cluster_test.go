package e2e

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/shoalfs/shoal/lab/rig/fleet"
	"github.com/shoalfs/shoal/lab/rig/netns"
	"github.com/shoalfs/shoal/lab/rig/proxy"
)

// Four daemons, each on a machine of its own as far as the network goes, and the S3 server on another. What each of them has
// read from the store is counted before the server, so it is exact.

// clusterNodes is how many.
const clusterNodes = 4

// clusterMemory leaves the least for samples (32 MiB), so that what is read again comes from disk, a peer or the store.
const clusterMemory = "110MiB"

// clusterSet is the dataset of these tests: some thousand files of 20 to 60 KB. It is made and uploaded once.
type clusterSet struct {
	dir, source string
	paths       []string
	bytes       int64
}

var clusterData = sync.OnceValues(func() (*clusterSet, error) {
	s := &clusterSet{dir: filepath.Join(workDir, "cluster"), source: "s3://cluster/train"}
	rng := rand.NewChaCha8([32]byte{1})
	sizes := rand.New(rng)
	for i := range 4000 {
		data := make([]byte, 20_000+sizes.IntN(40_000))
		_, _ = rng.Read(data)
		p := fmt.Sprintf("class%02d/img%04d.jpg", i/200, i)
		if err := os.MkdirAll(filepath.Dir(filepath.Join(s.dir, p)), 0o755); err != nil {
			return nil, err
		}
		if err := os.WriteFile(filepath.Join(s.dir, p), data, 0o644); err != nil {
			return nil, err
		}
		s.paths, s.bytes = append(s.paths, p), s.bytes+int64(len(data))
	}
	_, err := server.Upload(context.Background(), s.dir, "cluster", "train", nil)
	return s, err
})

// shareOf returns the --cache-size that holds this share of the dataset and nothing more: beside the bytes there are headers and
// checksums of records, and what the daemon keeps for its catalog.
func (s *clusterSet) shareOf(share float64) string {
	need := share * (float64(s.bytes) + 384*float64(len(s.paths)))
	return strconv.FormatInt(int64((need+1<<20)*32/31), 10) + "B"
}

// want is the digest of what a rank is to get in these epochs.
func (s *clusterSet) want(t testing.TB, spec string, world, rank int, epochs ...int) string {
	t.Helper()
	var order []int
	for _, e := range epochs {
		order = append(order, orderOf(t, spec, len(s.paths), "--epoch", fmt.Sprint(e), "--world", fmt.Sprint(world), "--rank", fmt.Sprint(rank))...)
	}
	return digest(t, s.dir, s.paths, order)
}

// cluster is a fleet over the dataset.
type cluster struct {
	*fleet.Fleet
	*clusterSet
	t     *testing.T
	last  []proxy.Stats // at the last count
	flags []string      // of all daemons
}

// newCluster makes the fleet and starts its daemons, with caches that hold this share of the dataset each.
func newCluster(t *testing.T, far proxy.Options, share float64, flags ...string) *cluster {
	t.Helper()
	if m := netns.Missing(); m != "" {
		t.Skip(m)
	}
	set, err := clusterData()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	c := &cluster{clusterSet: set, t: t, last: make([]proxy.Stats, clusterNodes)}
	c.Fleet, err = fleet.New(context.Background(), fleet.Options{Shoal: shoalBin, Dir: dir, Mounts: true, Nodes: clusterNodes, Rate: 1e9, Store: server.URL, Far: far})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
		if t.Failed() {
			for i := range c.Nodes {
				log, _ := os.ReadFile(filepath.Join(dir, strconv.Itoa(i), "log"))
				t.Logf("node %d: %.3000s", i, log[max(0, len(log)-3000):])
			}
		}
	})
	c.flags = append([]string{"--memory", clusterMemory, "--cache-size", set.shareOf(share), "--order", "none"}, flags...)
	c.each(func(n *fleet.Node) error { return n.Serve(t.Context(), set.source, c.flags...) })
	c.count()
	return c
}

// each does f for all nodes at once.
func (c *cluster) each(f func(n *fleet.Node) error) {
	c.t.Helper()
	var wg sync.WaitGroup
	for _, n := range c.Nodes {
		wg.Go(func() {
			if err := f(n); err != nil {
				c.t.Error(err)
			}
		})
	}
	wg.Wait()
	if c.t.Failed() {
		c.t.FailNow()
	}
}

// count returns the bytes of samples that each node has read from the store since the last count, and all of them, as a share
// of the dataset. It waits until nothing is on its way, nor to be written.
func (c *cluster) count() (nodes []int64, all float64) {
	c.t.Helper()
	c.each(func(n *fleet.Node) error {
		for n.Runs() {
			s, err := n.Stats(c.t.Context())
			if err != nil || s.Disk.Queued == 0 && n.Store().InFlight == 0 {
				return err
			}
			time.Sleep(50 * time.Millisecond)
		}
		return nil
	})
	for i, n := range c.Nodes {
		now := n.Store()
		nodes = append(nodes, now.Sub(c.last[i]).GetBytes)
		c.last[i] = now
		all += float64(nodes[i]) / float64(c.bytes)
	}
	return nodes, all
}

// epoch has all nodes consume an epoch: of world 4 each its rank, of world 1 each all of it. Each must get what the order says. It returns
// what was read from the store, as a share of the dataset, without hedges.
func (c *cluster) epoch(epoch, world int) float64 {
	c.t.Helper()
	const spec = "torch:seed=7"
	start := time.Now()
	before := c.stats()
	c.each(func(n *fleet.Node) error {
		rank := n.Number % world
		got, err := n.Feed(c.t.Context(), "--order", spec, "--batch", "50", "--epoch", fmt.Sprint(epoch), "--world", fmt.Sprint(world), "--rank", fmt.Sprint(rank))
		if err == nil && got.Digest != c.want(c.t, spec, world, rank, epoch) {
			err = fmt.Errorf("node %d: %d samples with another digest than the order's", n.Number, got.Samples)
		}
		return err
	})
	took := time.Since(start)
	nodes, all := c.count()
	after := c.stats()
	var hedges int64 // of about the mean size each
	for i := range after {
		hedges += after[i].Hedges.Sent - before[i].Hedges.Sent
	}
	all -= float64(hedges) / float64(len(c.paths))
	c.t.Logf("epoch %d of world %d in %.1f s: %.3f of the dataset from the store without hedges\n%s", epoch, world, took.Seconds(), all, c.table(nodes, before, after))
	return all
}

func (c *cluster) stats() []fleet.Stats {
	c.t.Helper()
	all := make([]fleet.Stats, len(c.Nodes))
	c.each(func(n *fleet.Node) (err error) {
		if n.Runs() {
			all[n.Number], err = n.Stats(c.t.Context())
		}
		return err
	})
	return all
}

// table shows the bytes from the store and how the reads of each node ended.
func (c *cluster) table(store []int64, before, after []fleet.Stats) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%6s %12s %8s %8s %8s %8s %8s %8s %7s\n", "node", "store bytes", "of all", "disk", "memory", "joined", "misses", "kept", "hedges")
	for i, s := range after {
		p := before[i]
		fmt.Fprintf(&b, "%6d %12d %8.3f %8d %8d %8d %8d %8d %7d\n", i, store[i], float64(store[i])/float64(c.bytes),
			s.Hits.Keep-p.Hits.Keep, s.Hits.Ring-p.Hits.Ring, s.Joined-p.Joined, s.Misses-p.Misses, s.Disk.Kept, s.Hedges.Sent-p.Hedges.Sent)
	}
	return b.String()
}

// Without a cluster each node reads for itself what it does not keep, so two epochs of one job read most of the dataset twice, and
// a job on each node reads all of it four times.
func TestClusterBaseline(t *testing.T) {
	c := newCluster(t, proxy.Options{Latency: 5 * time.Millisecond}, 0.3)
	if got := c.epoch(0, 4) + c.epoch(1, 4); got < 1.6 || got > 1.85 {
		t.Errorf("two epochs of one job read %.3f of the dataset from the store", got)
	}
	if got := c.epoch(2, 1); got < 2.6 || got > 3 {
		t.Errorf("four jobs read %.3f of the dataset from the store, with three tenths of it kept by each node", got)
	}
}
