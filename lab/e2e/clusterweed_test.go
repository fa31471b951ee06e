package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/lab/rig/s3server"
	"github.com/shoalfs/shoal/lab/rig/subproc"
)

// Four nodes beside other makers' engines: SeaweedFS as their near tier, and juicefs in their place. make conformance
// runs it.

// near asks a node of its near tier.
func near(ctx context.Context, n *fleetNode) (s nearStats, err error) {
	out, err := n.Shoal(ctx, "stat", n.Addr, "--json")
	if err == nil {
		err = json.Unmarshal(out, &s)
	}
	return s, err
}

// fromStore is what all nodes have read from the store since the fleet was made, as a share of the dataset.
func (c *cluster) fromStore() (all float64) {
	for _, n := range c.Nodes {
		all += float64(n.Store().GetBytes) / float64(c.bytes)
	}
	return all
}

// Four nodes share a tier of three volume servers, of which one is killed in the middle of an epoch, without a cluster
// and as one. Each byte is read from the origin once, all bytes are right, and no read takes longer than 5 s. It runs
// with SHOAL_TEST_WEED=PATH.
func TestClusterOverSeaweedFS(t *testing.T) {
	weed := os.Getenv("SHOAL_TEST_WEED")
	if weed == "" {
		t.Skip("no SHOAL_TEST_WEED")
	}
	for _, way := range []struct {
		name string
		make func(*testing.T, float64, ...string) *cluster
	}{{"no cluster", newFleet}, {"cluster", newCluster}} {
		t.Run(way.name, func(t *testing.T) {
			c := way.make(t, 0.1) // most of the later epochs comes from the tier
			url, volumes := seaweedCluster(t, weed, c.Host)
			c.flags = append(c.flags, "--near", "s3://near/train", "--near-endpoint", url)
			c.start()
			got := c.overTier("filled", 0, nil)
			got += c.overTier("a volume server is killed", 1, func() { volumes[0].Stop(0) })
			got += c.overTier("it is gone", 2, nil)
			t.Logf("three epochs: %.3f of the dataset from the origin, %.3f with hedges", got, c.fromStore())
			c.atMost(1.03, got, "three epochs")
		})
	}
}

// overTier has all nodes read their ranks of an epoch through their mounts, and in later epochs one through its feed.
// The feed is faster than the tier takes copies, and those that it drops would be read from the origin again. In the
// middle of the epoch trouble is made. It waits until all copies are put, and returns what was read from the origin,
// without hedges.
func (c *cluster) overTier(what string, epoch int, trouble func()) (origin float64) {
	c.t.Helper()
	const stall = 5 * time.Second
	slowest := make([]time.Duration, len(c.Nodes))
	origin = c.during(what, func() {
		before := c.stats()[1].Reads
		done := make(chan error, 1)
		go func() {
			done <- c.Each(func(n *fleetNode) (err error) {
				if n.Number == 0 && epoch > 0 {
					return c.consume(n, epoch, clusterNodes)
				}
				slowest[n.Number], err = c.read(n, epoch)
				return err
			})
		}()
		if trouble != nil {
			third := int64(len(c.paths) / clusterNodes / 3)
			within(c.t, patience, "a third of the epoch is read", func() bool {
				return c.stats()[1].Reads-before > third
			})
			trouble()
			select {
			case err := <-done:
				c.t.Fatalf("the epoch was over too early: %v", err)
			default:
			}
		}
		if err := <-done; err != nil {
			c.t.Error(err)
		}
	})
	for i, s := range slowest {
		if s > stall {
			c.t.Errorf("%s: a read of node %d took %v", what, i, s)
		}
	}
	c.t.Logf("%s: the slowest read took %v", what, slices.Max(slowest))
	c.each(func(n *fleetNode) error {
		for {
			s, err := near(c.t.Context(), n)
			if err != nil || s.Near.Queued == 0 {
				c.t.Logf("node %d: near %+v, %v", n.Number, s.Near, err)
				return err
			}
			time.Sleep(50 * time.Millisecond)
		}
	})
	return origin
}

// juicefs is a volume of juicefs in the fleet's bucket, with the files of the dataset. Its metadata are in Redis, on
// the machine of etcd.
type juicefs struct {
	*cluster
	bin, meta string
}

func newJuicefs(c *cluster, bin, redis string) *juicefs {
	c.t.Helper()
	j := &juicefs{c, bin, "redis://" + c.EtcdNode.IP + "/1"}
	db, err := subproc.Start("redis", c.EtcdNode.Command(redis, "--bind", c.EtcdNode.IP, "--protected-mode", "no",
		"--save", "", "--dir", c.t.TempDir()))
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() { db.Stop(time.Second) })
	j.verb("format", j.meta, "juicefs", "--storage", "minio", "--bucket", c.Store+"/cluster",
		"--access-key", s3server.AccessKey, "--secret-key", s3server.SecretKey, "--trash-days", "0")
	j.verb("sync", c.dir+"/", "jfs://META/", "--threads", "8")
	return j
}

// verb runs a verb of juicefs on the first node.
func (j *juicefs) verb(args ...string) {
	j.t.Helper()
	cmd := j.Nodes[0].Command(j.bin, args...)
	cmd.Env = append(os.Environ(), "META="+j.meta)
	if out, err := cmd.CombinedOutput(); err != nil {
		j.t.Fatalf("juicefs %s: %v\n%s", args[0], err, out)
	}
}

// up mounts the volume on each node, read-only, with metadata that are kept for an hour, and an empty cache of its own.
func (j *juicefs) up() (down func()) {
	size := int64(peersCache * float64(j.bytes+4096*int64(len(j.paths)))) // it counts 4 KiB for each
	procs := make([]*subproc.Proc, len(j.Nodes))
	j.each(func(n *fleetNode) (err error) {
		cmd := n.Command(j.bin, "mount", j.meta, n.Mount, "--read-only", "--no-usage-report", "--no-bgjob",
			"--backup-meta", "0", "--cache-dir", n.Cache,
			"--cache-size", fmt.Sprintf("%dM", size>>20+1), "--free-space-ratio", "0.01", "--attr-cache", "1h",
			"--entry-cache", "1h", "--dir-entry-cache", "1h", "--open-cache", "1h")
		if procs[n.Number], err = subproc.Start("juicefs", cmd); err != nil {
			return err
		}
		for _, err = os.Stat(filepath.Join(n.Mount, j.paths[0])); err != nil; _,
			err = os.Stat(filepath.Join(n.Mount, j.paths[0])) {
			if failed := procs[n.Number].Failed(); failed != nil {
				return failed
			}
			time.Sleep(50 * time.Millisecond)
		}
		return nil
	})
	return func() {
		j.each(func(n *fleetNode) error {
			err := unix.Unmount(n.Mount, 0)
			procs[n.Number].Stop(5 * time.Second)
			return err
		})
	}
}

// peersCache is how much of the dataset each node may keep.
const peersCache = 0.3

// Two epochs of a DistributedSampler job read from mounts by the same program: of shoal without and with a cluster, and
// of juicefs, in turn, with caches of the same size that are empty at first. It prints the table of
// lab/bench/results/cluster-peers.md. It runs with SHOAL_TEST_JUICEFS=PATH.
func TestClusterBesideJuiceFS(t *testing.T) {
	bin := os.Getenv("SHOAL_TEST_JUICEFS")
	redis, err := exec.LookPath("redis-server")
	if bin == "" || err != nil {
		t.Skip("no SHOAL_TEST_JUICEFS, or no redis-server: ", err)
	}
	c := newCluster(t, peersCache)
	alone := c.flags[:slices.Index(c.flags, "--cluster")]
	j := newJuicefs(c, bin, redis)
	stop := func() { c.each((*fleetNode).Stop) }
	ways := []*struct {
		name    string
		up      func() (down func())
		store   [2][]float64
		seconds [2][]float64
	}{
		{name: "shoal", up: func() func() {
			c.each(func(n *fleetNode) error { return n.Serve(t.Context(), c.source, alone...) })
			return stop
		}},
		{name: "shoal --cluster", up: func() func() { c.start(); return stop }},
		{name: "juicefs", up: j.up},
	}
	for range atMost(1, 3) {
		for _, way := range ways {
			c.each(func(n *fleetNode) error { return os.RemoveAll(n.Cache) })
			down := way.up()
			c.count()
			var unhedged float64
			for epoch := range 2 {
				before, start := c.fromStore(), time.Now()
				unhedged += c.during(way.name, func() {
					c.each(func(n *fleetNode) error { _, err := c.read(n, epoch); return err })
					way.seconds[epoch] = append(way.seconds[epoch], time.Since(start).Seconds())
				})
				way.store[epoch] = append(way.store[epoch], c.fromStore()-before)
			}
			down()
			if way == ways[1] {
				c.atMost(1.03, unhedged, "two epochs as a cluster")
			}
		}
	}
	var b strings.Builder
	for _, way := range ways {
		fmt.Fprintf(&b, "| %s ", way.name)
		for epoch := range 2 {
			fmt.Fprintf(&b, "| %.3f | %.1f ", way.store[epoch], way.seconds[epoch])
		}
		b.WriteString("|\n")
	}
	t.Logf("%d files, %d bytes; bytes from the store as a share of the dataset, and seconds, of the first epoch and "+
		"of the second:\n%s", len(c.paths), c.bytes, b.String())
}
