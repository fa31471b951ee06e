package demo

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	humanize "github.com/dustin/go-humanize"

	"github.com/shoalfs/shoal/lab/rig/etcd"
	"github.com/shoalfs/shoal/lab/rig/fleet"
	"github.com/shoalfs/shoal/lab/rig/netns"
	"github.com/shoalfs/shoal/lab/rig/photos"
	"github.com/shoalfs/shoal/lab/rig/proxy"
	"github.com/shoalfs/shoal/lab/rig/s3server"
)

const (
	// clusterNodes is how many nodes a cluster is played with.
	clusterNodes = 4
	clusterBatch = 32
	// clusterLink is the rate of their links, in bits a second.
	clusterLink = 1_000_000_000
	// clusterKept is how much of the dataset all caches hold together.
	clusterKept = 1.2
	// clusterMemory leaves 144 MiB for samples: less than a dataset of the usual size, and enough to serve peers.
	clusterMemory = "256MiB"
	// sampleEvery is how often the counters before the store are looked at.
	sampleEvery = 100 * time.Millisecond
)

// act is an epoch of a job on all nodes.
type act struct {
	Title, Detail string
	epoch         int
	kill          bool // the last node, after a third of its samples and before the others fetch theirs, which takes a second

	Seconds float64
	Rows    []Origin // a row a node
	Course  []int64  // bytes read from the store so far, every sampleEvery
	Right   int      // nodes whose trainer got what the order says
}

// Origin is where the bytes came from that a node's trainer read.
type Origin struct {
	Store int64 // that the node read from the store, for itself and others
	Peers int64 // that others gave it
	Own   int64 // the rest of what its trainer read, from its own disk and memory
	Given int64 // that it gave to others
	Dead  bool
}

// Sum is that of all nodes.
func (a *act) Sum() (o Origin) {
	for _, r := range a.Rows {
		o.Store, o.Peers, o.Own, o.Given = o.Store+r.Store, o.Peers+r.Peers, o.Own+r.Own, o.Given+r.Given
	}
	return o
}

// Alive is how many nodes were there at the end.
func (a *act) Alive() (n int) {
	for _, r := range a.Rows {
		if !r.Dead {
			n++
		}
	}
	return n
}

// clusterJob is a job on several nodes.
type clusterJob struct {
	*job
	paths []string // of the photographs, in the order in which shoal numbers them
	bytes int64
	acts  []*act
}

// Cluster plays a job on four nodes, each in a network namespace, with caches that hold the dataset only together: two epochs without a
// cluster; two with one, and a third in which a node is killed. It prints a table of bytes by origin and the path of a report to out. Of
// o only Shoal, WorkDir, Photos, Latency, Sigma, Seed and Progress matter. When it returns, no process, namespace or
// bridge of it is left.
func Cluster(ctx context.Context, o Options, out io.Writer) error {
	o.Proxy = []string{"none"} // each node has its own, in this process
	o, err := o.withDefaults()
	if err != nil {
		return err
	}
	j := newJob(o)
	if missing := j.missingForCluster(); len(missing) > 0 {
		return o.lacks("To play a cluster on this machine, these are missing:", missing)
	}
	if err := (&clusterJob{job: j}).run(ctx, out); err != nil {
		if ctx.Err() != nil {
			return fmt.Errorf("cluster: stopped; nothing is left running: %w", context.Cause(ctx))
		}
		return fmt.Errorf("cluster: %w", err)
	}
	return nil
}

func (j *job) missingForCluster() (missing []string) {
	if m := netns.Missing(); m != "" {
		missing = append(missing, m)
	}
	if _, err := photos.Sources(); errors.Is(err, photos.ErrNoSources) {
		missing = append(missing, "Debian packages: apt-get update && apt-get install --no-install-recommends "+strings.Join(photos.Packages(), " "))
	}
	for _, find := range []func() (string, error){s3server.FindBinary, etcd.FindBinary} {
		if _, err := find(); err != nil {
			missing = append(missing, err.Error())
		}
	}
	return missing
}

func (c *clusterJob) run(ctx context.Context, out io.Writer) error {
	began := time.Now()
	if err := os.MkdirAll(c.WorkDir, 0o755); err != nil {
		return err
	}
	unlock, err := lockDir(c.WorkDir)
	if err != nil {
		return err
	}
	defer unlock()
	defer c.close()
	if err := c.prepareStore(ctx); err != nil {
		return err
	}
	if err := c.list(); err != nil {
		return err
	}
	if err := c.play(ctx, false, []*act{
		{Title: "no cluster, first epoch", Detail: "Each node reads what its trainer reads from the store."},
		{Title: "no cluster, second epoch", epoch: 1, Detail: "The sampler gives each node other samples: most of them another node has kept."},
	}); err != nil {
		return err
	}
	if err := c.play(ctx, true, []*act{
		{Title: "cluster, first epoch", Detail: "Each sample is read from the store once, by the node that owns it, and given to the node whose trainer reads it."},
		{Title: "cluster, second epoch", epoch: 1, Detail: "Everything is in some node's cache."},
		{Title: "cluster, a node is killed", epoch: 2, kill: true, Detail: "Node 4 is killed after a third of its samples, before the others begin. What it has owned is read from the store."},
	}); err != nil {
		return err
	}
	r := &clusterReport{Options: c.Options, Acts: c.acts, Bytes: c.bytes, Cores: runtime.NumCPU(), Began: began, Took: time.Since(began)}
	if err := render(c.path("cluster.html"), "cluster.html.tmpl", r); err != nil {
		return err
	}
	r.print(out)
	fmt.Fprintf(out, "\nreport  %s\n", c.path("cluster.html"))
	return nil
}

// list looks at the photographs.
func (c *clusterJob) list() error {
	return filepath.WalkDir(c.path("photos"), func(p string, d fs.DirEntry, err error) error {
		if err != nil || filepath.Ext(p) != ".jpg" {
			return err
		}
		info, err := d.Info()
		if err == nil {
			c.paths, c.bytes = append(c.paths, p), c.bytes+info.Size()
		}
		return err
	})
}

// play starts the nodes, with empty caches, and plays acts.
func (c *clusterJob) play(ctx context.Context, clustered bool, acts []*act) (err error) {
	dir := c.path("cluster")
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	bar, result := c.bars.Start("starting four nodes", 0), "failed"
	done := sync.OnceFunc(func() { bar.Done(result) })
	defer done()
	f, err := fleet.New(ctx, fleet.Options{
		Shoal: c.Shoal, Dir: dir, Nodes: clusterNodes, Rate: clusterLink, Store: c.store.URL,
		Far: proxy.Options{Latency: c.Latency, Sigma: c.Sigma, Seed: 1},
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	flags := []string{"--order", "none", "--memory", clusterMemory, "--cache-size", fleet.CacheSize(clusterKept/clusterNodes, c.bytes, len(c.paths))}
	if clustered {
		join, err := f.StartEtcd(ctx)
		if err != nil {
			return err
		}
		flags = append(flags, join...)
	}
	if err := f.Each(func(n *fleet.Node) error { return n.Serve(ctx, source, flags...) }); err != nil {
		return err
	}
	if clustered {
		bar.Note("until they know each other")
		if err := f.Settled(ctx); err != nil {
			return err
		}
	}
	result = "each with a cache for " + humanize.Bytes(uint64(float64(c.bytes)*clusterKept/clusterNodes))
	done()
	for _, a := range acts {
		if err := c.epoch(ctx, f, a); err != nil {
			return fmt.Errorf("%s: %w", a.Title, err)
		}
		c.acts = append(c.acts, a)
	}
	return nil
}

// epoch plays one act.
func (c *clusterJob) epoch(ctx context.Context, f *fleet.Fleet, a *act) (err error) {
	bar, result := c.bars.Start(a.Title, len(c.paths)), "failed"
	defer func() { bar.Done(result) }()
	before, stores := make([]fleet.Stats, clusterNodes), make([]int64, clusterNodes)
	if err := f.Each(func(n *fleet.Node) (err error) {
		stores[n.Number] = n.Store().GetBytes
		before[n.Number], err = n.Stats(ctx)
		return err
	}); err != nil {
		return err
	}
	trainers := f.Nodes
	if a.kill {
		victim := f.Nodes[clusterNodes-1]
		third := strconv.Itoa(len(c.paths)/clusterNodes/3/clusterBatch + 1)
		if _, err := victim.Feed(ctx, append(c.flags(a.epoch, victim.Number), "--batches", third)...); err != nil {
			return err
		}
		victim.Kill()
		trainers = f.Nodes[:clusterNodes-1]
	}
	begin := time.Now()
	var got [clusterNodes]fleet.Fed
	fed := make(chan error, 1)
	go func() {
		fed <- f.Each(func(n *fleet.Node) (err error) {
			if slices.Contains(trainers, n) {
				got[n.Number], err = n.Feed(ctx, c.flags(a.epoch, n.Number)...)
			}
			return err
		})
	}()
	if err := c.watch(ctx, f, a, bar.Set, before, stores, fed); err != nil {
		return err
	}
	a.Seconds = time.Since(begin).Seconds()
	for i, n := range trainers {
		if got[i].Digest == c.want(ctx, n, a.epoch) {
			a.Right++
		}
	}
	if err := c.origins(ctx, f, a, before, stores); err != nil {
		return err
	}
	result = fmt.Sprintf("%s from the store, %s from peers, %.1f s", humanize.Bytes(uint64(a.Sum().Store)), humanize.Bytes(uint64(a.Sum().Peers)), a.Seconds)
	return nil
}

// flags are those of shoal feed.
func (c *clusterJob) flags(epoch, rank int) []string {
	return []string{"--batch", strconv.Itoa(clusterBatch), "--order", fmt.Sprintf("torch:seed=%d", c.Seed), "--epoch", strconv.Itoa(epoch), "--world", strconv.Itoa(clusterNodes), "--rank", strconv.Itoa(rank)}
}

// watch follows the act until all trainers have ended.
func (c *clusterJob) watch(ctx context.Context, f *fleet.Fleet, a *act, progress func(done, total int), before []fleet.Stats, stores []int64, fed chan error) error {
	delivered := make([]int64, clusterNodes)
	for tick := 0; ; tick++ {
		select {
		case err := <-fed:
			return err
		case <-time.After(sampleEvery):
		}
		// One node at a time: each question is a process.
		look := tick % clusterNodes
		if s, err := f.Nodes[look].Stats(ctx); f.Nodes[look].Runs() && err == nil {
			delivered[look] = s.Delivered - before[look].Delivered
		}
		var bytes, all int64
		for i, n := range f.Nodes {
			bytes, all = bytes+n.Store().GetBytes-stores[i], all+delivered[i]
		}
		a.Course = append(a.Course, bytes)
		progress(int(all), len(c.paths))
	}
}

// origins fills in where the bytes came from.
func (c *clusterJob) origins(ctx context.Context, f *fleet.Fleet, a *act, before []fleet.Stats, stores []int64) error {
	a.Rows = make([]Origin, clusterNodes)
	return f.Each(func(n *fleet.Node) error {
		o, was := &a.Rows[n.Number], before[n.Number]
		o.Store = n.Store().GetBytes - stores[n.Number]
		if o.Dead = !n.Runs(); o.Dead {
			return nil
		}
		s, err := n.Stats(ctx)
		o.Peers, o.Given = s.Cluster.Peers-was.Cluster.Peers, s.Cluster.Given.Bytes-was.Cluster.Given.Bytes
		o.Own = max(s.Read-was.Read-o.Peers-max(o.Store-o.Given, 0), 0)
		return err
	})
}

// want returns the digest of what a node's trainer must get: the photographs in the sampler's order.
func (c *clusterJob) want(ctx context.Context, n *fleet.Node, epoch int) string {
	args := append([]string{"order", "--n", strconv.Itoa(len(c.paths)), fmt.Sprintf("torch:seed=%d", c.Seed)}, c.flags(epoch, n.Number)[4:]...)
	out, err := n.Shoal(ctx, args...)
	if err != nil {
		return err.Error()
	}
	h := sha256.New()
	for _, line := range strings.Fields(string(out)) {
		i, err := strconv.Atoi(line)
		if err != nil || i >= len(c.paths) {
			return "no number of a photograph: " + line
		}
		data, err := os.ReadFile(c.paths[i])
		if err != nil {
			return err.Error()
		}
		var head [16]byte
		binary.LittleEndian.PutUint64(head[:8], uint64(i))
		binary.LittleEndian.PutUint64(head[8:], uint64(len(data)))
		h.Write(head[:])
		h.Write(data)
	}
	return hex.EncodeToString(h.Sum(nil))
}
