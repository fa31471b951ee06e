package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/shoalfs/shoal/lab/rig/daemon"
	"github.com/shoalfs/shoal/lab/rig/etcd"
	"github.com/shoalfs/shoal/lab/rig/netns"
	"github.com/shoalfs/shoal/lab/rig/proxy"
	"github.com/shoalfs/shoal/lab/rig/subproc"
)

// Four daemons, each on a machine of its own as far as the network goes, and the S3 server on another. What each of
// them has read from the store is counted before the server, so it is exact.

// clusterNodes is how many.
const clusterNodes = 4

// clusterMemory leaves little for samples (36 MiB of 80 MB, or 72 of 160), so that most of what is read again comes
// from disk, a peer or the store.
func clusterMemory() string { return fmt.Sprintf("%dMiB", atMost(112, 160)) }

// clusterSet is the dataset of these tests: some thousand files of 20 to 60 KB. It is made and uploaded once.
type clusterSet struct {
	dir, source string
	paths       []string
	bytes       int64
	wanted      sync.Map // *wanted, by the arguments of want
}

var clusterData = sync.OnceValues(func() (*clusterSet, error) {
	s := &clusterSet{dir: filepath.Join(workDir, "cluster"), source: "s3://cluster/train"}
	rng := rand.NewChaCha8([32]byte{1})
	sizes := rand.New(rng)
	for i := range atMost(2000, 4000) {
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

// want is the digest of what a rank is to get in these epochs.
func (s *clusterSet) want(t testing.TB, spec string, world, rank int, epochs ...int) string {
	t.Helper()
	of, _ := s.wanted.LoadOrStore(fmt.Sprint(spec, world, rank, epochs), &wanted{})
	w := of.(*wanted)
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.digest == "" { // or the test that computed it has failed
		var order []int
		for _, e := range epochs {
			order = append(order, orderOf(t, spec, len(s.paths), "--epoch", fmt.Sprint(e), "--world", fmt.Sprint(world),
				"--rank", fmt.Sprint(rank))...)
		}
		w.digest = digest(t, s.dir, s.paths, order)
	}
	return w.digest
}

// wanted is what want has computed.
type wanted struct {
	mu     sync.Mutex
	digest string
}

// cluster is a fleet over the dataset.
type cluster struct {
	*fleet
	*clusterSet
	t     *testing.T
	last  []proxy.Stats // at the last count
	late  int64         // answers of peers, at the last check
	hung  int64         // operations of disks, likewise
	flags []string      // of all daemons
}

// latency is that of the store.
var latency = proxy.Options{Latency: 5 * time.Millisecond}

// newFleet makes the fleet; no daemon runs yet. Their caches are to hold this share of the dataset each.
func newFleet(t *testing.T, share float64, flags ...string) *cluster {
	t.Helper()
	if m := netns.Missing(); m != "" {
		t.Skip(m)
	}
	set, err := clusterData()
	if err != nil {
		t.Fatal(err)
	}
	return fleetOver(t, set, server.URL, share, flags...)
}

// fleetOver makes a fleet over another dataset, whose store is at this URL.
func fleetOver(t *testing.T, set *clusterSet, store string, share float64, flags ...string) *cluster {
	t.Helper()
	dir := t.TempDir()
	c := &cluster{clusterSet: set, t: t, last: make([]proxy.Stats, clusterNodes)}
	var err error
	c.fleet, err = makeFleet(context.Background(),
		fleetOptions{Shoal: shoalBin, Dir: dir, Mounts: true, Nodes: clusterNodes, Rate: 1e9, Store: store,
			Far: latency})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			for i, n := range c.Nodes {
				var said struct{ Cluster, Errors json.RawMessage }
				out, _ := n.Shoal(context.Background(), "stat", n.Addr, "--json")
				_ = json.Unmarshal(out, &said)
				log, _ := os.ReadFile(filepath.Join(dir, strconv.Itoa(i), "log"))
				t.Logf("node %d: %s\n%s\n%s", i, said.Cluster, said.Errors, log[max(0, len(log)-3000):])
			}
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	c.flags = append([]string{"--memory", clusterMemory(), "--cache-size",
		daemon.CacheSize(share, set.bytes, len(set.paths))}, flags...)
	if !slices.Contains(flags, "--order") {
		c.flags = append(c.flags, "--order", "none")
	}
	return c
}

// newCluster makes a fleet whose daemons are one cluster, with etcd on a machine of its own. None runs yet.
func newCluster(t *testing.T, share float64, flags ...string) *cluster {
	t.Helper()
	if _, err := etcd.FindBinary(); err != nil {
		t.Skip(err)
	}
	c := newFleet(t, share, flags...)
	c.join()
	return c
}

// join starts etcd. All daemons that are started from now on are one cluster.
func (c *cluster) join() {
	c.t.Helper()
	join, err := c.StartEtcd(c.t.Context())
	if err != nil {
		c.t.Fatal(err)
	}
	c.flags = append(c.flags, join...)
}

// start starts daemons, by default all.
func (c *cluster) start(nodes ...int) {
	c.t.Helper()
	c.each(func(n *fleetNode) error {
		if len(nodes) > 0 && !slices.Contains(nodes, n.Number) {
			return nil
		}
		return n.Serve(c.t.Context(), c.source, c.flags...)
	})
	if len(nodes) == 0 && c.Etcd != nil {
		c.settled()
	}
}

// settled waits until ownership is.
func (c *cluster) settled() {
	c.t.Helper()
	if err := c.Settled(c.t.Context()); err != nil {
		c.t.Fatal(err)
	}
}

// each does f for all nodes at once.
func (c *cluster) each(f func(n *fleetNode) error) {
	c.t.Helper()
	if err := c.Each(f); err != nil {
		c.t.Fatal(err)
	}
}

// count returns the bytes of samples that each node has read from the store since the last count, and all of them, as a
// share of the dataset. It waits until nothing is on its way, nor to be written.
func (c *cluster) count() (nodes []int64, all float64) {
	c.t.Helper()
	c.each(func(n *fleetNode) error {
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

const clusterOrder = "torch:seed=7"

// epoch has all nodes consume an epoch: of world 4 each its rank, of world 1 each all of it. Each must get what the
// order says. It returns what was read from the store, as a share of the dataset, without hedges.
func (c *cluster) epoch(epoch, world int) float64 {
	c.t.Helper()
	return c.during(fmt.Sprintf("epoch %d of world %d", epoch, world), func() {
		c.t.Helper()
		c.each(func(n *fleetNode) error { return c.consume(n, epoch, world) })
	})
}

// consume has a node's consumer read its rank of an epoch, and compares the digest.
func (c *cluster) consume(n *fleetNode, epoch, world int) error {
	p, out, err := c.begin(n, epoch, world)
	if err == nil {
		err = p.Wait(c.t.Context())
	}
	if err != nil {
		return err
	}
	return c.consumed(n, out, epoch, world)
}

// begin starts a node's consumer.
func (c *cluster) begin(n *fleetNode, epoch, world int) (*subproc.Proc, *bytes.Buffer, error) {
	return n.Begin("feed", n.Addr, "--json", "--order", clusterOrder, "--batch", "50", "--epoch", fmt.Sprint(epoch),
		"--world", fmt.Sprint(world), "--rank", fmt.Sprint(n.Number%world))
}

// consumed compares the digest that a consumer has printed.
func (c *cluster) consumed(n *fleetNode, out *bytes.Buffer, epoch, world int) error {
	var got fleetFed
	err := json.Unmarshal(out.Bytes(), &got)
	if err == nil && got.Digest != c.want(c.t, clusterOrder, world, n.Number%world, epoch) {
		err = fmt.Errorf("node %d: %d samples with another digest than the order's", n.Number, got.Samples)
	}
	return err
}

// during does f and returns what was read from the store since the last count, as a share of the dataset, without
// hedges.
func (c *cluster) during(what string, f func()) float64 {
	c.t.Helper()
	before, start := c.stats(), time.Now()
	f()
	took := time.Since(start)
	nodes, all := c.count()
	after := c.stats()
	var hedges int64 // of about the mean size each
	for i := range after {
		hedges += max(after[i].Hedges.Sent-before[i].Hedges.Sent, 0)
	}
	all -= float64(hedges) / float64(len(c.paths))
	c.t.Logf("%s in %.1f s: %.3f of the dataset from the store without hedges\n%s",
		what, took.Seconds(), all, c.table(nodes, before, after))
	return all
}

// warm reads epochs until the caches hold what they can. It returns the number of the next epoch.
func (c *cluster) warm() (epoch int) {
	c.t.Helper()
	for before := 2.0; epoch < 5; {
		got := c.epoch(epoch, clusterNodes)
		epoch++
		if got < 0.002 || got > before*0.9 {
			break
		}
		before = got
	}
	return epoch
}

// atMost fails the test if more of the dataset was read from the store. On a machine so busy that peers are late for a
// second, what they were asked for is read from the store, which is right, and no longer exact. Where a disk did not
// answer for 2 s, what lies on it is read from the store until it does, and what waits to be written to it holds
// memory: no figure is to be expected.
func (c *cluster) atMost(most, got float64, what string) {
	c.t.Helper()
	late, hung := int64(0), int64(0)
	for _, s := range c.stats() {
		hung += s.Disk.Errors
		for _, n := range s.Cluster.Nodes {
			late += n.Asked.Late + n.Asked.Passed
		}
	}
	if late > c.late {
		c.t.Logf("%s: peers were late %d times", what, late-c.late)
		most += 2 * float64(late-c.late) / float64(len(c.paths)) // by the reader, and by the owner for the next one
	}
	if hung > c.hung {
		c.t.Logf("%s: %d operations of disks hung: %.3f of the dataset from the store is not judged",
			what, hung-c.hung, got)
		most = math.Inf(1)
	}
	c.late, c.hung = late, hung
	if got > most {
		c.t.Errorf("%s: %.3f of the dataset was read from the store, want at most %.3f", what, got, most)
	}
}

func (c *cluster) stats() []fleetStats {
	c.t.Helper()
	all := make([]fleetStats, len(c.Nodes))
	c.each(func(n *fleetNode) (err error) {
		if n.Runs() {
			all[n.Number], err = n.Stats(c.t.Context())
		}
		return err
	})
	return all
}

// table shows the bytes from the store and how the reads of each node ended.
func (c *cluster) table(store []int64, before, after []fleetStats) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%6s %12s %8s %12s %12s %8s %8s %8s %8s %8s %7s\n", "node", "store bytes", "of all", "peers' bytes",
		"given bytes", "disk", "memory", "joined", "misses", "kept", "hedges")
	for i, s := range after {
		p := before[i]
		fmt.Fprintf(&b, "%6d %12d %8.3f %12d %12d %8d %8d %8d %8d %8d %7d\n", i, store[i],
			float64(store[i])/float64(c.bytes), s.Cluster.Peers-p.Cluster.Peers,
			s.Cluster.Given.Bytes-p.Cluster.Given.Bytes,
			s.Hits.Keep-p.Hits.Keep, s.Hits.Ring-p.Hits.Ring, s.Joined-p.Joined, s.Misses-p.Misses, s.Disk.Kept,
			s.Hedges.Sent-p.Hedges.Sent)
	}
	return b.String()
}

// Without a cluster each node reads for itself: a job on each reads the dataset four times, and then what it does not
// keep.
func TestClusterBaseline(t *testing.T) {
	long(t)
	c := newFleet(t, 0.3)
	c.start()
	if got := c.epoch(0, 1); got < 3.9 || got > 4.1 {
		t.Errorf("four jobs read %.3f of the dataset from the store", got)
	}
	if got := c.epoch(1, 4); got < 0.3 || got > 0.8 {
		t.Errorf("one job on four nodes read %.3f of the dataset from the store, with three tenths of it kept by "+
			"each, and some in memory", got)
	}
}

// Caches that hold 1.2 of the dataset together: each byte is read from the store once, in whichever epoch and by
// however many jobs.
func TestClusterReadsOnce(t *testing.T) {
	long(t) // the next is as sharp
	c := newCluster(t, 0.3)
	c.start()
	c.atMost(1.03, c.epoch(0, 4)+c.epoch(1, 4), "two epochs")
}

// A job on each node, over empty caches, in the same order and thus at about the same place.
func TestClusterReadsOnceForFourJobs(t *testing.T) {
	c := newCluster(t, 0.3)
	c.start()
	c.atMost(1.03, c.epoch(0, 1), "four jobs")
	c.atMost(0.01, c.epoch(1, 1), "four jobs, once more") // also with little memory, most of which prefetching has
}

// Large files and little memory: who asks waits until the owner has some, and does not read from the store what the
// owner will.
func TestClusterLittleMemory(t *testing.T) {
	c := newCluster(t, 0.3)
	dir, paths := tree(t, 4, 40, 1<<20)
	c.clusterSet = &clusterSet{dir: dir, source: bucket(t, dir), paths: paths}
	for _, p := range paths {
		fi, err := os.Stat(filepath.Join(dir, p))
		if err != nil {
			t.Fatal(err)
		}
		c.bytes += fi.Size()
	}
	c.flags[slices.Index(c.flags, "--memory")+1] = "300MiB"
	c.flags[slices.Index(c.flags, "--cache-size")+1] = daemon.CacheSize(0.4, c.bytes, len(paths))
	c.start()
	c.atMost(1.03, c.epoch(0, 1), "four jobs")
	c.atMost(0.01, c.epoch(1, 1), "four jobs, once more")
}

// Caches that hold a fifth of the dataset each: a later epoch reads no more than what none of them keeps.
func TestClusterOfSmallCaches(t *testing.T) {
	c := newCluster(t, 0.2)
	c.start()
	first := c.warm()
	for e := first; e < first+atMost(1, 3); e++ {
		c.atMost((1-0.8)*1.08, c.epoch(e, 4), "a later epoch")
	}
}

// read has a consumer read a rank of an epoch from the node's mount, as two workers of a trainer would, and returns how
// long the slowest file took.
func (c *cluster) read(n *fleetNode, epoch int) (slowest time.Duration, err error) {
	order := orderOf(c.t, clusterOrder, len(c.paths), "--epoch", fmt.Sprint(epoch), "--world", fmt.Sprint(clusterNodes),
		"--rank", fmt.Sprint(n.Number))
	var wg sync.WaitGroup
	var mu sync.Mutex
	for k := range 2 {
		wg.Go(func() {
			for i := k; i < len(order); i += 2 {
				p := c.paths[order[i]]
				start := time.Now()
				got, e := os.ReadFile(filepath.Join(n.Mount, p))
				took := time.Since(start)
				want, _ := os.ReadFile(filepath.Join(c.dir, p))
				if e == nil && !bytes.Equal(got, want) {
					e = fmt.Errorf("%d bytes that are not the object's %d", len(got), len(want))
				}
				mu.Lock()
				slowest = max(slowest, took)
				if e != nil {
					err = fmt.Errorf("node %d: %s: %w", n.Number, p, e)
				}
				stop := err != nil
				mu.Unlock()
				if stop {
					return
				}
			}
		})
	}
	wg.Wait()
	return slowest, err
}

// stall is how long no read may take, whatever a peer does, on a machine that wakes programs in time.
const stall = 2 * time.Second

// noStall fails the test if one of the reads that were the slowest took too long: it goes through six programs.
func noStall(t *testing.T, slowest []time.Duration, late time.Duration) {
	t.Helper()
	if most := slices.Max(slowest); most > stall+6*late {
		t.Errorf("a read took %v, on a machine that was late by %v", most, late)
	}
}

// A node is killed, frozen, or cut off from the others, in the middle of an epoch: what the others read is right,
// through feeds and mounts, no read takes longer than 2 s, and what is read from the store is no more than what that
// node has kept.
func TestClusterNodeInTrouble(t *testing.T) {
	c := newCluster(t, 0.3)
	c.start()
	first := c.warm()
	victim := c.Nodes[clusterNodes-1]
	apart := func(apart bool) error {
		return c.Each(func(n *fleetNode) error { return n.Apart(apart) })
	}
	for i, trouble := range []struct {
		name       string
		alone      bool // each node reads for itself what the others keep
		begin, end func() error
	}{
		{"killed", false, func() error {
			victim.Kill()
			return nil
		}, func() error { return victim.Serve(t.Context(), c.source, c.flags...) }},
		{"frozen", false, func() error {
			return victim.Signal(syscall.SIGSTOP)
		}, func() error { return victim.Signal(syscall.SIGCONT) }},
		{"cut off", true, func() error { return apart(true) }, func() error { return apart(false) }},
	} {
		epoch := first + i
		got := c.during(trouble.name, func() {
			var all, others sync.WaitGroup
			late, slow := lag(), make([]time.Duration, clusterNodes)
			for _, n := range c.Nodes {
				group := &others
				if n == victim && !trouble.alone {
					group = &all // may end with an error, and not before the trouble
				}
				group.Go(func() {
					var err error
					var slowest time.Duration
					if n.Number == 0 {
						err = c.consume(n, epoch, clusterNodes)
					} else {
						slowest, err = c.read(n, epoch)
					}
					if group == &all {
						return
					}
					slow[n.Number] = slowest
					if t.Logf("%s: the slowest read of node %d took %v", trouble.name, n.Number, slowest); err != nil {
						t.Errorf("%s: node %d: %v", trouble.name, n.Number, err)
					}
				})
			}
			time.Sleep(500 * time.Millisecond)
			err := trouble.begin()
			others.Wait()
			if err := errors.Join(err, trouble.end()); err != nil {
				t.Fatal(err)
			}
			noStall(t, slow, late())
			all.Wait()
		})
		most := 1.0 / clusterNodes * 1.05
		if trouble.alone {
			most = 0.75
		}
		c.atMost(most, got, trouble.name)
	}
}

// A node that pauses for a little longer than a silence costs the reads that met it, and is asked again at once.
func TestClusterNodePauses(t *testing.T) {
	c := newCluster(t, 0.3)
	c.start()
	epoch, victim := c.warm(), c.Nodes[clusterNodes-1]
	lateAnswers := func() (n int64) { // but for the victim's, of which there are to be few
		for _, s := range c.stats()[:clusterNodes-1] {
			for _, other := range s.Cluster.Nodes {
				if !strings.HasPrefix(other.Address, victim.IP+":") {
					n += other.Asked.Late
				}
			}
		}
		return n
	}
	for range atMost(2, 5) {
		before := lateAnswers()
		got := c.during("a pause", func() {
			var all sync.WaitGroup
			late, slow := lag(), make([]time.Duration, clusterNodes)
			for _, n := range c.Nodes[:clusterNodes-1] {
				all.Go(func() {
					slowest, err := c.read(n, epoch)
					slow[n.Number] = slowest
					if t.Logf("the slowest read of node %d took %v", n.Number, slowest); err != nil {
						t.Errorf("node %d: %v", n.Number, err)
					}
				})
			}
			time.Sleep(300 * time.Millisecond)
			err := victim.Signal(syscall.SIGSTOP)
			time.Sleep(1300 * time.Millisecond)
			if err := errors.Join(err, victim.Signal(syscall.SIGCONT)); err != nil {
				t.Fatal(err)
			}
			all.Wait()
			noStall(t, slow, late())
		})
		epoch++
		most := 20 + 2*float64(lateAnswers()-before) // three nodes with two readers each; and as atMost has it
		if files := got * float64(len(c.paths)); files > most {
			t.Errorf("about %.0f files were read from the store, want at most %.0f", files, most)
		}
	}
}

// etcd is stopped, frozen, cut off and started empty: the last view stays, so no byte is read from the store again.
func TestClusterEtcdInTrouble(t *testing.T) {
	c := newCluster(t, 0.3)
	c.start()
	first := c.warm()
	nothing := func() error { return nil }
	for i, trouble := range []struct {
		name       string
		begin, end func() error
	}{
		{"stopped", func() error {
			c.Etcd.Stop()
			return nil
		}, func() error { return c.Etcd.Restart(t.Context(), false) }},
		{"frozen", c.Etcd.Freeze, c.Etcd.Thaw},
		{"cut off", c.EtcdNode.Down, c.EtcdNode.Up},
		{"started empty", func() error { return c.Etcd.Restart(t.Context(), true) }, nothing},
	} {
		if err := trouble.begin(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Duration(atMost(3, 12)) * time.Second) // 2 until it is noticed; leases end after 10
		c.atMost(0.01, c.epoch(first+i, 4), "etcd "+trouble.name)
		if err := trouble.end(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Duration(atMost(0, 10)) * time.Second)
	}
	time.Sleep(3 * time.Second)
	c.atMost(0.01, c.epoch(first+4, 4), "after all that")
}

// Nodes start one after the other, and their consumers with them. Each keeps what it owns of the view that it knows.
// Once all are there ownership settles, and after some epochs nothing is read from the store again.
func TestClusterStartsApart(t *testing.T) {
	c := newCluster(t, 0.35)
	got := c.during("starts apart", func() {
		var wg sync.WaitGroup
		for i, n := range c.Nodes {
			if i > 0 {
				time.Sleep(time.Duration(atMost(3, 30)) * time.Second)
			}
			c.start(i)
			wg.Go(func() {
				if err := c.consume(n, 0, clusterNodes); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
	})
	t.Logf("the first epoch read %.3f of the dataset from the store", got)
	c.settled()
	moved := 0.0
	for e := range 4 {
		moved += c.epoch(1+e, 4)
	}
	c.atMost(0.75, moved, "while ownership settles") // three quarters of it have moved
	c.atMost(0.02, c.epoch(5, 4), "once it has")
}

// One node lists the source again: all of them follow.
func TestClusterRefresh(t *testing.T) {
	c := newCluster(t, 0.3)
	dir, paths := tree(t, 2, 50, 20<<10)
	c.clusterSet = &clusterSet{dir: dir, source: bucket(t, dir), paths: paths, bytes: 1}
	c.start()
	c.each(func(n *fleetNode) error { readAll(t, n.Mount, dir, paths); return nil })
	was := c.stats()
	write(t, filepath.Join(dir, paths[7]), bytes.Repeat([]byte("new"), 5000))
	write(t, filepath.Join(dir, "class00/added.jpg"), bytes.Repeat([]byte("added"), 5000))
	upload(t, dir, bucketName(t))
	if _, err := c.Nodes[1].Shoal(t.Context(), "refresh", c.Nodes[1].Mount); err != nil {
		t.Fatal(err)
	}
	within(t, patience, "all nodes have the new version", func() bool {
		now := c.stats()
		return now[1].Dataset != was[1].Dataset && !slices.ContainsFunc(now, func(s fleetStats) bool {
			return s.Dataset != now[1].Dataset
		})
	})
	within(t, patience, "all mounts have it", func() bool {
		return !slices.ContainsFunc(c.Nodes, func(n *fleetNode) bool {
			_, err := os.Stat(filepath.Join(n.Mount, "class00/added.jpg"))
			return err != nil
		})
	})
	c.each(func(n *fleetNode) error { readAll(t, n.Mount, dir, append(paths, "class00/added.jpg")); return nil })
}

// etcd comes back from an older copy: the version does not go back, and who comes later gets the newest. And a warm
// node starts while the store is away.
func TestClusterGoesForward(t *testing.T) {
	c := newCluster(t, 2)
	dir, paths := tree(t, 2, 20, 20<<10)
	c.clusterSet = &clusterSet{dir: dir, source: bucket(t, dir), paths: paths, bytes: 2 << 20}
	c.start()
	was := c.stats()[0].Dataset
	restore, err := c.Etcd.Save(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(dir, "class00/added.jpg"), bytes.Repeat([]byte("added"), 5000))
	paths = append(paths, "class00/added.jpg")
	upload(t, dir, bucketName(t))
	if _, err := c.Nodes[1].Shoal(t.Context(), "refresh", c.Nodes[1].Mount); err != nil {
		t.Fatal(err)
	}
	isNew := func(nodes ...*fleetNode) func() bool {
		return func() bool {
			for _, n := range nodes {
				if s, err := n.Stats(t.Context()); err != nil || s.Dataset == was {
					return false
				}
			}
			return true
		}
	}
	within(t, patience, "all nodes have the new version", isNew(c.Nodes...))
	if err := restore(t.Context()); err != nil {
		t.Fatal(err)
	}
	within(t, patience, "etcd has the new version again", func() bool {
		s := c.stats()
		return slices.ContainsFunc(s, func(s fleetStats) bool {
			return slices.ContainsFunc(s.Errors, func(e struct{ Text string }) bool {
				return strings.Contains(e.Text, "as if it had been restored")
			})
		})
	})
	c.settled()
	c.each(func(n *fleetNode) error { readAll(t, n.Mount, dir, paths); return nil })
	if !isNew(c.Nodes...)() {
		t.Error("a node went back")
	}
	// One that has nothing yet takes the list from the others.
	first := c.Nodes[0]
	if err := errors.Join(first.Stop(), os.RemoveAll(first.Cache)); err != nil {
		t.Fatal(err)
	}
	c.start(0)
	c.settled()
	if !isNew(first)() {
		t.Error("a new node got the old version")
	}
	readAll(t, first.Mount, dir, paths)

	c.each(func(n *fleetNode) error {
		return errors.Join(n.Stop(),
			n.Far(proxy.Options{Faults: []proxy.Fault{{Kind: proxy.Unavailable, Op: proxy.OpAny, P: 1}}}))
	})
	c.start()
	c.each(func(n *fleetNode) error { readAll(t, n.Mount, dir, paths); return nil })
}

// A node that refreshes while etcd is away does not go back to the older version that etcd still has when it starts
// again, be it that the node starts again, too: the others follow it.
func TestClusterRefreshAlone(t *testing.T) {
	c := newCluster(t, 2)
	dir, paths := tree(t, 2, 20, 20<<10)
	c.clusterSet = &clusterSet{dir: dir, source: bucket(t, dir), paths: paths, bytes: 2 << 20}
	c.start()
	n := c.Nodes[1]
	for _, stays := range []bool{true, false} {
		was := c.stats()[1].Dataset
		c.Etcd.Stop()
		added := fmt.Sprintf("class00/added-%t.jpg", stays)
		write(t, filepath.Join(dir, added), bytes.Repeat([]byte("added"), 5000))
		paths = append(paths, added)
		upload(t, dir, bucketName(t))
		if _, err := n.Shoal(t.Context(), "refresh", n.Mount); err != nil {
			t.Fatal(err)
		}
		is := c.stats()[1].Dataset
		if is == was {
			t.Fatal("nothing was refreshed")
		}
		if !stays {
			if err := n.Stop(); err != nil {
				t.Fatal(err)
			}
		}
		if err := c.Etcd.Restart(t.Context(), false); err != nil {
			t.Fatal(err)
		}
		if !stays {
			c.start(1)
		}
		within(t, patience, "all nodes have its version", func() bool {
			return !slices.ContainsFunc(c.stats(), func(s fleetStats) bool { return s.Dataset != is })
		})
		c.each(func(n *fleetNode) error { readAll(t, n.Mount, dir, paths); return nil })
	}
}

// Neither of two versions that were listed after etcd's older copy was saved is taken for the newer one: a node whose
// version has the higher number, but is the older listing, does not turn another back, whose files would be gone. Both
// list again.
func TestClusterForked(t *testing.T) {
	c := newCluster(t, 2)
	dir, paths := tree(t, 2, 20, 20<<10)
	c.clusterSet = &clusterSet{dir: dir, source: bucket(t, dir), paths: paths, bytes: 2 << 20}
	c.start(0)
	restore, err := c.Etcd.Save(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	change := func(path string) {
		write(t, filepath.Join(dir, path), bytes.Repeat([]byte(t.Name()), 100+rand.IntN(1000)))
		upload(t, dir, bucketName(t))
	}
	dataset := func(n *fleetNode) string {
		s, err := n.Stats(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return s.Dataset
	}
	old, fresh := c.Nodes[0], c.Nodes[1]
	for _, p := range paths[:2] { // twice, so that its number is the higher one
		change(p)
		if _, err := old.Shoal(t.Context(), "refresh", old.Mount); err != nil {
			t.Fatal(err)
		}
	}
	was := dataset(old)
	if err := errors.Join(old.Stop(), restore(t.Context())); err != nil {
		t.Fatal(err)
	}
	change(paths[0])
	c.start(1) // nobody sends etcd's version, so it lists
	is := dataset(fresh)
	if is == was {
		t.Fatal("nothing has changed")
	}
	c.start(0)
	within(t, patience, "both have the newest version", func() bool {
		return dataset(old) == is && dataset(fresh) == is
	})
	for _, n := range []*fleetNode{old, fresh} {
		readAll(t, n.Mount, dir, paths)
	}
	if dataset(old) != is || dataset(fresh) != is {
		t.Error("one went back")
	}
}

// A node is drained: the others take over what it owns, from it, and it reads from them like before.
func TestClusterDrain(t *testing.T) {
	c := newCluster(t, 0.4)
	c.start()
	first := c.warm()
	join := c.flags[slices.Index(c.flags, "--cluster"):]
	if _, err := c.Nodes[0].Shoal(t.Context(), "cluster", "drain", c.Nodes[2].IP+":7400", join[0], join[1],
		"--cluster-insecure"); err != nil {
		t.Fatal(err)
	}
	within(t, patience, "all nodes know it", func() bool {
		return !slices.ContainsFunc(c.stats(), func(s fleetStats) bool {
			return !slices.ContainsFunc(s.Cluster.Nodes, func(n fleetPeer) bool { return n.Draining && n.Owned == 0 })
		})
	})
	time.Sleep(3 * time.Second)
	c.atMost(0.02, c.epoch(first, 4), "while it drains")
	if err := c.Nodes[2].Stop(); err != nil {
		t.Fatal(err)
	}
	time.Sleep(3 * time.Second)
	got := c.during("without it", func() {
		c.each(func(n *fleetNode) error {
			if !n.Runs() {
				return nil
			}
			return c.consume(n, first+1, clusterNodes)
		})
	})
	c.atMost(0.1, got, "without it")
}

// clusterTrainer reads a rank of two epochs from a mount with DistributedSampler and workers, and prints the digest of
// each epoch.
const clusterTrainer = `
import glob, hashlib, sys, torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

class Files(Dataset):
    def __init__(self, root):
        self.root, self.paths = root, sorted(glob.glob("class*/*.jpg", root_dir=root))
    def __len__(self):
        return len(self.paths)
    def __getitem__(self, i):
        with open(self.root + "/" + self.paths[i], "rb") as f:
            return i, f.read()

files = Files(sys.argv[1])
sampler = DistributedSampler(files, num_replicas=4, rank=int(sys.argv[2]), seed=7)
loader = DataLoader(files, batch_size=50, sampler=sampler, num_workers=2, collate_fn=list)
for epoch in range(2):
    sampler.set_epoch(epoch)
    h = hashlib.sha256()
    for batch in loader:
        for i, data in batch:
            h.update(i.to_bytes(8, "little") + len(data).to_bytes(8, "little") + data)
    print(h.hexdigest())
`

// The same through mounts: four unmodified trainers with torch's DistributedSampler.
func TestClusterTrainers(t *testing.T) {
	long(t)
	c := newCluster(t, 0.3, "--order", "torch:seed=7,world=4,rank={i}")
	c.start()
	c.atMost(1.03, c.during("two epochs by torch", func() {
		c.each(func(n *fleetNode) error {
			out, err := python(t, clusterTrainer, n.Mount, strconv.Itoa(n.Number)).Output()
			want := c.want(t, clusterOrder, 4, n.Number, 0) + "\n" + c.want(t, clusterOrder, 4, n.Number, 1) + "\n"
			if err == nil && string(out) != want {
				err = fmt.Errorf("node %d: its trainer has read %s, want %s", n.Number, out, want)
			}
			return err
		})
	}), "two epochs by torch")
}

// Nodes are killed, stopped, frozen and cut off, and etcd with them, SHOAL_CLUSTER_EVENTS times (make night), while
// each node's consumer reads epoch after epoch: what it is given is what the order says, unless its own node died. At
// the end nothing is in use, and nothing is read from the store twice.
func TestClusterAtRandom(t *testing.T) {
	events, _ := strconv.Atoi(os.Getenv("SHOAL_CLUSTER_EVENTS"))
	if events == 0 {
		t.Skip("make night runs it: SHOAL_CLUSTER_EVENTS is how many events there are, SHOAL_SEED which")
	}
	seed, _ := strconv.ParseUint(os.Getenv("SHOAL_SEED"), 10, 64)
	t.Logf("SHOAL_SEED=%d", seed)
	rng := rand.New(rand.NewPCG(seed, 1))
	c := newCluster(t, 0.4)
	c.start()
	var lives [clusterNodes]atomic.Int64 // starts and ends of a node's daemon: odd while there is none
	var epochs atomic.Int64
	var wg sync.WaitGroup
	stop := make(chan struct{})
	for _, n := range c.Nodes {
		wg.Go(func() {
			for epoch := 0; ; epoch++ {
				select {
				case <-stop:
					return
				default:
				}
				life := lives[n.Number].Load()
				if life%2 == 1 {
					time.Sleep(100 * time.Millisecond)
					continue
				}
				if err := c.consume(n, epoch, clusterNodes); err != nil {
					if life == lives[n.Number].Load() {
						t.Errorf("epoch %d: %v", epoch, err)
					}
					continue
				}
				epochs.Add(1)
			}
		})
	}
	apart := func(apart bool) error {
		return c.Each(func(n *fleetNode) error { return n.Apart(apart) })
	}
	some := func() time.Duration { return time.Duration(300+rng.IntN(4000)) * time.Millisecond }
	for i := range events {
		n := c.Nodes[rng.IntN(clusterNodes)]
		life := &lives[n.Number]
		again := func() error {
			defer life.Add(1)
			return n.Serve(t.Context(), c.source, c.flags...)
		}
		event := []struct {
			name       string
			begin, end func() error
		}{
			{"killed", func() error { life.Add(1); n.Kill(); return nil }, again},
			{"stopped", func() error { life.Add(1); return n.Stop() }, again},
			{"frozen", func() error {
				return n.Signal(syscall.SIGSTOP)
			}, func() error { return n.Signal(syscall.SIGCONT) }},
			{"cut off", n.Down, n.Up},
			{"apart, as are all others", func() error { return apart(true) }, func() error { return apart(false) }},
			{"with etcd stopped", func() error {
				c.Etcd.Stop()
				return nil
			}, func() error { return c.Etcd.Restart(t.Context(), rng.IntN(2) == 0) }},
			{"with etcd frozen", c.Etcd.Freeze, c.Etcd.Thaw},
			{"with etcd cut off", c.EtcdNode.Down, c.EtcdNode.Up},
		}[rng.IntN(8)]
		t.Logf("%d: node %d %s", i, n.Number, event.name)
		err := event.begin()
		time.Sleep(some() * time.Duration(1+2*rng.IntN(2))) // longer than a lease, at times
		if err := errors.Join(err, event.end()); err != nil {
			t.Fatal(err)
		}
		time.Sleep(some())
	}
	close(stop)
	wg.Wait()
	t.Logf("%d epochs of a rank", epochs.Load())
	time.Sleep(20 * time.Second) // leases have ended, and the view is quiet
	c.epoch(1000, 4)
	c.atMost(0.01, c.epoch(1001, 4), "at the end")
	for i, s := range c.stats() {
		if m := s.Memory; m.Used != m.Ring || m.Batches+m.Waiting+s.InFlight+int64(s.Feed.Open) != 0 {
			t.Errorf("node %d still uses %+v, %d requests, %d sessions", i, m, s.InFlight, s.Feed.Open)
		}
	}
}

// Four jobs that each read everything, of which the caches hold a quarter: what an owner does not keep it fetches for
// all, also if each is a tenth of an epoch behind another.
func TestClusterOwnersFetchForAll(t *testing.T) {
	c := newCluster(t, 0.0625)
	// A quarter of the memory for data, 17 MiB, is for what others are still to ask for. A turn of it is 1.2 epochs.
	c.flags[slices.Index(c.flags, "--memory")+1] = "144MiB"
	c.start()
	c.epoch(0, 1)
	for e := 1; e <= atMost(2, 4); e++ {
		c.atMost(1.3, c.epoch(e, 1), "an epoch of four jobs")
	}
	for e := 5; e < 5+atMost(1, 2); e++ {
		got := c.during("an epoch in which each is behind another", func() { c.staggered(e) })
		c.atMost(1.3, got, "four jobs, each behind another")
	}
}

// staggered has the consumers read an epoch, each a tenth of it behind another. While one starts, which takes as long
// as it takes, those before it stand still.
func (c *cluster) staggered(epoch int) {
	c.t.Helper()
	before := c.stats()
	reaches := func(i int, samples int64) {
		within(c.t, patience, fmt.Sprintf("the consumer of node %d has %d samples", i, samples), func() bool {
			s, err := c.Nodes[i].Stats(c.t.Context())
			return err == nil && s.Delivered-before[i].Delivered >= samples
		})
	}
	procs, outs := make([]*subproc.Proc, len(c.Nodes)), make([]*bytes.Buffer, len(c.Nodes))
	all := func(s syscall.Signal) {
		for _, p := range procs {
			if p != nil {
				_ = p.Signal(s) // it may have ended
			}
		}
	}
	defer all(syscall.SIGCONT)
	for i, n := range c.Nodes {
		var err error
		if procs[i], outs[i], err = c.begin(n, epoch, 1); err != nil {
			c.t.Fatal(err)
		}
		reaches(i, 1)
		if all(syscall.SIGCONT); i < len(c.Nodes)-1 {
			reaches(0, int64(len(c.paths)*(i+1)/10))
			all(syscall.SIGSTOP)
		}
	}
	c.each(func(n *fleetNode) error {
		if err := procs[n.Number].Wait(c.t.Context()); err != nil {
			return err
		}
		return c.consumed(n, outs[n.Number], epoch, 1)
	})
}

// Four ranks that read different samples, of which the caches hold a quarter, and memory little more: nothing is
// fetched by way of another node, but for what shows that this does not pay. Between nodes goes what they keep for each
// other.
func TestClusterRanksFetchForThemselves(t *testing.T) {
	long(t) // with fewer files it hangs on chance
	c := newCluster(t, 0.0625)
	// with more it may pay: what one fetched another finds in the next epoch
	c.flags[slices.Index(c.flags, "--memory")+1] = "112MiB"
	c.start()
	c.epoch(0, 4)
	c.epoch(1, 4)
	before, kept, share := c.stats(), 0, 0.0
	const epochs = 4 // one has some hundred files from other nodes: 4% more or less by chance
	for e := 2; e < 2+epochs; e++ {
		c.epoch(e, 4)
	}
	for i, s := range c.stats() {
		share += float64(s.Cluster.Given.Bytes-before[i].Cluster.Given.Bytes) / float64(c.bytes) / float64(epochs)
		kept += before[i].Disk.Kept
	}
	// 0.167 if owners fetch nothing else, and 0.65 if they fetch everything.
	if t.Logf("%.4f of the dataset went from node to node in an epoch, with %d of %d files kept",
		share, kept, len(c.paths)); share > 0.2 {
		t.Errorf("%.4f of the dataset went from node to node in an epoch, want at most 0.2", share)
	}
}

// Two zones of two nodes: each zone reads the store for itself, and what its caches hold does not go between zones.
// What one zone does not keep it reads from the other, if that has it, and once.
func TestClusterZones(t *testing.T) {
	for _, test := range []struct {
		name   string
		shares []float64 // that each node's cache holds
		most   float64   // between the zones in an epoch
		store  float64   // in a later epoch
	}{
		{"all fits", []float64{0.6, 0.6, 0.6, 0.6}, 0.001, 0.01},
		// 0.61 if each crosses once, 1.22 if each node asks for itself, and from the store the same if no zone asks the
		// other. On a busy machine some answers are late, and asked for again.
		{"a small zone", []float64{0.2, 0.2, 0.6, 0.6}, 1, 0.2},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := newCluster(t, 0)
			zone := func(n *fleetNode) string { return []string{"a", "b"}[n.Number/2] }
			c.each(func(n *fleetNode) error {
				flags := append(slices.Clone(c.flags), "--zone", zone(n))
				flags[slices.Index(flags, "--cache-size")+1] = daemon.CacheSize(test.shares[n.Number], c.bytes,
					len(c.paths))
				return n.Serve(t.Context(), c.source, flags...)
			})
			c.settled()
			between := func() (share float64) {
				all := c.stats()
				for i, s := range all {
					for _, other := range s.Cluster.Nodes {
						if i < 2 && other.Zone == "b" || i >= 2 && other.Zone == "a" {
							share += float64(other.Asked.Bytes) / float64(c.bytes)
						}
					}
				}
				return share
			}
			c.atMost(2.03, c.epoch(0, 1), "four jobs in two zones")
			c.epoch(1, 1)
			for e := 2; e < 2+atMost(1, 2); e++ {
				before := between()
				c.atMost(test.store, c.epoch(e, 1), "a later epoch")
				got := between() - before
				if t.Logf("%.4f of the dataset went between the zones", got); got > test.most {
					t.Errorf("%.4f of the dataset went between the zones, want at most %.3f", got, test.most)
				}
			}
		})
	}
}
