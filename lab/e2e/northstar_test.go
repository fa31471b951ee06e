package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shoalfs/shoal/lab/accelerator"
	"github.com/shoalfs/shoal/lab/rig/etcd"
	"github.com/shoalfs/shoal/lab/rig/netns"
	"github.com/shoalfs/shoal/lab/rig/proxy"
)

// The north star on four nodes: a distributed job whose emulated accelerators say how busy they are, caches that hold a
// part f of the dataset together, and one line to the store for all nodes, of 1.1·(1-f) of what the accelerators take.

const (
	starBatch = 8 // of an accelerator; each node has one
	starFiles = 4000
	starSize  = 200 << 10 // on average: the dataset is some six times as large as all memory for samples
	// starMemory leaves 36 MiB for samples, little more than the least.
	starMemory = "112MiB"
	// starWaits is how much more of the time accelerators may wait than over a local disk, and starReads how many times
	// more may be read from the store than all disks lack.
	starWaits, starReads = 0.01, 1.03
)

// star is such a job.
type star struct {
	*cluster
	step time.Duration
}

// train runs the ranks of these nodes from a step of an epoch on, over their mounts or over the local disk.
func (s *star) train(epoch, from int, local bool, progress func(done, steps int), nodes ...int) (
	accelerator.Epoch, error) {
	s.t.Helper()
	files := &accelerator.Files{Dir: "/"}
	var orders [][]int
	for _, n := range nodes {
		spec := fmt.Sprintf("%s,epoch=%d,world=%d,rank=%d", clusterOrder, epoch, clusterNodes, n)
		orders = append(orders, orderOf(s.t, spec, len(s.paths)))
	}
	for at := from * starBatch; at < len(orders[0]); at++ {
		for i, n := range nodes {
			dir := s.Nodes[n].Mount
			if local {
				dir = s.dir
			}
			files.Paths = append(files.Paths, filepath.Join(dir, s.paths[orders[i][at]]))
		}
	}
	job := accelerator.Job{Accelerators: len(nodes), Batch: starBatch, Step: s.step, Workers: 2, Prefetch: 4}
	return job.Run(s.t.Context(), len(files.Paths), files, progress)
}

// whole runs an epoch of all ranks.
func (s *star) whole(epoch int, local bool) float64 {
	s.t.Helper()
	e, err := s.train(epoch, 0, local, nil, 0, 1, 2, 3)
	if err != nil {
		s.t.Fatal(err)
	}
	return waiting(s.t, e)
}

// waiting is the part of an epoch in which accelerators waited, the first batch included.
func waiting(t *testing.T, e accelerator.Epoch) float64 {
	t.Helper()
	var stalls []string
	for _, step := range e.Steps {
		if step.Stall > 0.02 {
			stalls = append(stalls, fmt.Sprintf("%.2f until %.1f", step.Stall, step.Start))
		}
	}
	t.Logf("%.1f s: waited %.3f s (%s), and %.3f s for the first batch; woke up %.2f s too late in all",
		e.Seconds, e.Stall, strings.Join(stalls, ", "), e.FirstBatch, e.Oversleep)
	return (e.Stall + e.FirstBatch) / (e.Seconds + e.FirstBatch)
}

// lacks is the part of the dataset that no disk of these nodes has.
func (s *star) lacks(nodes ...int) float64 {
	kept := 0
	for i, one := range s.stats() {
		if slices.Contains(nodes, i) {
			kept += one.Disk.Kept
		}
	}
	return 1 - float64(kept)/float64(len(s.paths))
}

// replace kills the last node in mid-epoch, once the others have done a third of it, and starts another in its place,
// whose disk is empty, on which its rank goes on. It returns the part of the epoch in which the others waited.
func (s *star) replace(epoch int) (waited float64) {
	s.t.Helper()
	victim := s.Nodes[clusterNodes-1]
	var done atomic.Int64
	var lost sync.WaitGroup
	lost.Go(func() {
		_, err := s.train(epoch, 0, false, func(at, _ int) { done.Store(int64(at)) }, victim.Number)
		if err == nil {
			s.t.Error("the node's rank has ended before it was killed")
			return
		}
		flags := slices.Clone(s.flags)
		flags[slices.Index(flags, "--order")+1] += fmt.Sprintf(",epoch=%d", epoch)
		if err = errors.Join(os.RemoveAll(victim.Cache), victim.Serve(s.t.Context(), s.source, flags...)); err == nil {
			_, err = s.train(epoch, int(done.Load()), false, nil, victim.Number)
		}
		if err != nil {
			s.t.Error(err)
		}
	})
	e, err := s.train(epoch, 0, false, func(at, steps int) {
		if at == steps/3 {
			go victim.Kill()
		}
	}, 0, 1, 2)
	lost.Wait()
	if err != nil {
		s.t.Fatal(err)
	}
	return waiting(s.t, e)
}

// In warm epochs accelerators wait no more than over a local disk, and the store is read for what all disks lack. While
// a node is replaced they wait no longer than the line takes for what was lost with it, and until it counts as away.
// SHOAL_NORTH_STAR is how long an epoch lasts if nothing is waited for, such as 20s.
func TestClusterNorthStar(t *testing.T) {
	lasts, _ := time.ParseDuration(os.Getenv("SHOAL_NORTH_STAR"))
	if lasts == 0 {
		t.Skip("SHOAL_NORTH_STAR is how long an epoch lasts, such as 20s")
	}
	if m := netns.Missing(); m != "" {
		t.Skip(m)
	}
	if _, err := etcd.FindBinary(); err != nil {
		t.Skip(err)
	}
	dir, paths := tree(t, 20, starFiles/20, starSize)
	set := &clusterSet{dir: dir, source: bucket(t, dir), paths: paths}
	for _, p := range paths {
		set.bytes += int64(len(content(t, filepath.Join(dir, p))))
	}
	for _, share := range []float64{0.25, 0.5} {
		t.Run(fmt.Sprint(share), func(t *testing.T) { followStar(t, set, share, lasts) })
	}
}

// followStar is TestClusterNorthStar with caches for a part of the dataset.
func followStar(t *testing.T, set *clusterSet, share float64, lasts time.Duration) {
	line, _ := far(t, proxy.Options{})
	c := fleetOver(t, set, line.URL, share/clusterNodes, "--order", clusterOrder+",world=4,rank={i}")
	c.flags[slices.Index(c.flags, "--memory")+1] = starMemory
	c.join()
	c.start()
	s := &star{cluster: c, step: time.Millisecond}
	cold := s.during("two epochs over a wide line", func() { s.whole(0, false); s.whole(1, false) })
	t.Logf("%.3f of the dataset was read while caches filled; all disks lack %.3f", cold, s.lacks(0, 1, 2, 3))

	s.step = lasts * clusterNodes * starBatch / starFiles
	rate := 1.1 * (1 - share) * float64(c.bytes) / lasts.Seconds()
	if err := line.Set(proxy.Options{Bandwidth: int64(rate)}); err != nil {
		t.Fatal(err)
	}
	local, waited, epoch := s.whole(2, true), 0.0, 2
	for ; epoch < 5; epoch++ {
		lack := s.lacks(0, 1, 2, 3)
		got := s.during("a warm epoch", func() { waited += s.whole(epoch, false) / 3 })
		t.Logf("a warm epoch: %.3f of the dataset from the store, all disks lack %.3f, ratio %.3f", got, lack, got/lack)
		c.atMost(starReads*lack, got, "a warm epoch")
	}
	// What the killed node had fetched ahead is lost with it, as is what it had kept.
	lack := s.lacks(0, 1, 2)
	lost := float64(s.stats()[clusterNodes-1].Memory.Used) / float64(c.bytes)
	var beside float64
	got := s.during("killed and replaced", func() { beside = s.replace(epoch) })
	t.Logf(
		"killed and replaced: %.3f of the dataset from the store, the other disks lack %.3f, it had %.3f in memory, "+
			"ratio %.3f", got, lack, lost, got/(lack+lost))
	c.atMost(starReads*lack+lost, got, "while a node is replaced")
	// The line may take longer than an epoch lasts, and a node that says nothing counts as away after a second.
	longer := max(0, got*float64(c.bytes)/rate/lasts.Seconds()-1)
	away := 1 / lasts.Seconds()
	lack = s.lacks(0, 1, 2, 3)
	got = s.during("the epoch after", func() { s.whole(epoch+1, false) }) // in which the new node's disk fills
	t.Logf("the epoch after: %.3f of the dataset from the store, all disks lacked %.3f, ratio %.3f",
		got, lack, got/lack)

	local = (local + s.whole(2, true)) / 2
	t.Logf("waited %.4f of the time, %.4f over a local disk, %.4f while a node was replaced, for whose bytes the "+
		"line took "+
		"%.3f longer than an epoch lasts", waited, local, beside, longer)
	if most := local + starWaits; waited > most || beside > most+longer+away {
		t.Error("accelerators wait")
	}
}
