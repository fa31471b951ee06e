package testbed

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	humanize "github.com/dustin/go-humanize"

	"github.com/shoalfs/shoal/lab/accelerator"
	"github.com/shoalfs/shoal/lab/rig/cputime"
	"github.com/shoalfs/shoal/lab/rig/daemon"
	"github.com/shoalfs/shoal/lab/rig/proxy"
)

// Stats are the fields of .shoal/stats (docs/stats.md) that measurements need.
type Stats struct {
	Files   int   `json:"files"`
	Samples int   `json:"samples"`
	Bytes   int64 `json:"bytes"`
	Hits    struct {
		Keep int64 `json:"keep"`
		Ring int64 `json:"ring"`
	} `json:"hits"`
	Joined      int64 `json:"joined"`
	Misses      int64 `json:"misses"`
	GetRequests int64 `json:"get_requests"`
	GetBytes    int64 `json:"get_bytes"`
	Memory      struct {
		Limit int64 `json:"ledger_limit"`
	} `json:"memory"`
	Disk struct {
		Kept    int `json:"kept_extents"`
		Extents int `json:"extents"`
	} `json:"disk"`
	Recoded struct {
		Files int `json:"files"`
	} `json:"recoded"`
	Order struct {
		Spec  string `json:"spec"`
		Epoch int    `json:"epoch"`
		State string `json:"state"`
	} `json:"order"`
}

// ReadStats reads the stats of a mount.
func ReadStats(mount string) (s Stats, err error) {
	b, err := os.ReadFile(filepath.Join(mount, ".shoal", "stats"))
	if err != nil {
		return s, fmt.Errorf("%s is not a live shoal mount: %w", mount, err)
	}
	return s, json.Unmarshal(b, &s)
}

// Kept returns the part of the dataset's extents that lies on the mount's disk.
func (s Stats) Kept() float64 { return float64(s.Disk.Kept) / float64(max(s.Disk.Extents, 1)) }

// Epoch is what an epoch over a mount was like: for the accelerators, and for the daemon, whose counters
// here are differences from the end of the epoch before to the end of this one. They hold what was fetched for
// the next epoch meanwhile, and lack what was fetched for this one before.
type Epoch struct {
	Number int `json:"epoch"`
	accelerator.Epoch
	RemoteBytes int64 `json:"remote_bytes"`
	Requests    int64 `json:"requests"`
	Keep        int64 `json:"keep_hits"`
	Ring        int64 `json:"ring_hits"`
	Joined      int64 `json:"joined"`
	Misses      int64 `json:"misses"`
}

// Pass says what accelerators read through a mount.
type Pass struct {
	Shoal, Mount  string // the binary, and the mount point
	Order         string // spec
	Job           accelerator.Job
	First, Epochs int // epochs First .. First+Epochs-1
	Steps         int // of each; 0: all that there are
	// Since are the daemon's counters from which the first epoch's are counted; nil: those when it begins.
	// Zero ones count also what a new daemon fetched before its first reader came.
	Since *Stats
}

// Run runs the epochs, one after the other. It calls progress with each step. It looks up all orders before the first
// epoch, so that nothing lies between two.
func (p Pass) Run(ctx context.Context, progress func(done, steps int)) (epochs []Epoch, err error) {
	orders := make([][]string, p.Epochs)
	for i := range orders {
		if orders[i], err = p.paths(ctx, p.First+i); err != nil {
			return nil, fmt.Errorf("the order of epoch %d: %w", p.First+i, err)
		}
	}
	before := p.Since
	if before == nil {
		now, err := ReadStats(p.Mount)
		if err != nil {
			return nil, err
		}
		before = &now
	}
	for i, paths := range orders {
		e := p.First + i
		positions := len(paths)
		if p.Steps > 0 {
			positions = min(positions, p.Steps*p.Job.Batch*p.Job.Accelerators)
		}
		run, err := p.Job.Run(ctx, positions, &accelerator.Files{Dir: p.Mount, Paths: paths}, progress)
		if err != nil {
			return epochs, fmt.Errorf("epoch %d: %w", e, err)
		}
		after, err := ReadStats(p.Mount)
		if err != nil {
			return epochs, err
		}
		epochs = append(epochs, Epoch{
			Number: e, Epoch: run,
			RemoteBytes: after.GetBytes - before.GetBytes, Requests: after.GetRequests - before.GetRequests,
			Keep: after.Hits.Keep - before.Hits.Keep, Ring: after.Hits.Ring - before.Hits.Ring,
			Joined: after.Joined - before.Joined, Misses: after.Misses - before.Misses,
		})
		before = &after
	}
	return epochs, nil
}

// paths returns what the mount's readers read in an epoch, as paths in it, as its daemon says.
func (p Pass) paths(ctx context.Context, epoch int) ([]string, error) {
	cmd := exec.CommandContext(ctx, p.Shoal, "order", p.Order, "--mount", p.Mount,
		"--epoch", strconv.Itoa(epoch), "--paths")
	cmd.Env = append(os.Environ(), settled)
	out, err := cmd.Output()
	if failed := (*exec.ExitError)(nil); errors.As(err, &failed) {
		err = errors.New(strings.TrimPrefix(strings.TrimSpace(string(failed.Stderr)), "shoal: "))
	}
	return strings.Split(strings.TrimSuffix(string(out), "\n"), "\n"), err
}

// Bandwidth is how fast the store is: bytes a second, or a multiple of what the accelerators need of it,
// or, as zero value, without a limit.
type Bandwidth struct {
	Absolute float64 // B/s
	Times    float64 // of (1 - kept part) × what the accelerators take when they never wait
}

// Type implements pflag.Value.
func (b *Bandwidth) Type() string { return "bandwidth" }

func (b *Bandwidth) String() string {
	switch {
	case b.Times > 0:
		return fmt.Sprintf("%gx", b.Times)
	case b.Absolute > 0:
		return humanize.Bytes(uint64(b.Absolute))
	}
	return "none"
}

// Set takes 1.1x, 40MB/s or none.
func (b *Bandwidth) Set(text string) error {
	if text == "none" {
		*b = Bandwidth{}
		return nil
	}
	if times, ok := strings.CutSuffix(text, "x"); ok {
		v, err := strconv.ParseFloat(times, 64)
		if err == nil && v > 0 && !math.IsInf(v, 0) {
			*b = Bandwidth{Times: v}
			return nil
		}
	} else if n, err := humanize.ParseBytes(strings.TrimSuffix(text, "/s")); err == nil && n > 0 && n < 1<<50 {
		*b = Bandwidth{Absolute: float64(n)}
		return nil
	}
	return fmt.Errorf("%q is not a bandwidth (write 1.1x, 40MB/s or none)", text)
}

// Config is one measurement: a dataset in a store that is so far and so narrow, a daemon, accelerators.
type Config struct {
	Dataset     Dataset
	Job         accelerator.Job
	Cached      float64 // part of the dataset that the cache may hold, and holds at the start
	Bandwidth   Bandwidth
	Latency     time.Duration // median to the first byte
	Sigma       float64       // of its logarithm
	Memory      int64         // of the daemon, bytes
	Connections int           // the requests that the daemon may have in flight; 0 is its default
	Order       string        // spec, in which the accelerators read
	Told        string        // spec that the mount is given; "" is Order
	Epochs      int
}

// Result is what a measurement gave, as `shoal-lab bench --json` prints it (docs/bench.md).
type Result struct {
	Samples   int     `json:"samples"`
	Bytes     int64   `json:"dataset_bytes"`
	Kept      float64 `json:"cached"`          // part of the dataset on disk when the run began
	Demand    float64 `json:"demand"`          // B/s that the accelerators take when they never wait
	Bandwidth float64 `json:"-"`               // the store's, B/s; 0 is no limit
	Memory    int64   `json:"memory_for_data"` // what --memory leaves for samples, B
	Epochs    []Epoch `json:"-"`
	// Busy is the part of all cores that was busy during the epochs, whoever used them: near 1, the machine
	// and not the store bounds the run. CPU is the part that the run itself used: store, proxy, daemon
	// and accelerators.
	Busy float64 `json:"busy,omitempty"`
	CPU  float64 `json:"cpu,omitempty"`
}

// Bound is the highest utilisation that the bandwidth allows: each sample is read once an epoch, so what is
// not kept has to come, whatever is done.
func (r Result) Bound() float64 {
	need := r.Demand * (1 - r.Kept)
	if r.Bandwidth == 0 || need <= r.Bandwidth {
		return 1
	}
	return r.Bandwidth / need
}

// Stages of a measurement, as progress is told of them.
const (
	Laying  = "laying objects"
	Warming = "warming the cache"
	Running = "running"
)

// warmMemory is --memory of the warming. With little of it, what outruns the disk is let go of unwritten.
const warmMemory = "1GiB"

// cacheSize returns the --cache-size that holds a part of the dataset. For all of it, it has room to spare: nothing may
// be left out.
func (c Config) cacheSize() string {
	share := c.Cached
	if share == 1 {
		share = 2
	}
	return daemon.CacheSize(share, c.Dataset.Bytes(), c.Dataset.Samples)
}

// Measure lays, warms, mounts, runs, and unmounts. The cache of the measurement before is thrown away.
func (b *Bed) Measure(ctx context.Context, c Config, progress func(step string, done, total int)) (
	r Result, err error) {
	if err := b.Proxy.Set(ctx, proxy.Options{}); err != nil {
		return r, err
	}
	if err := b.Lay(ctx, c.Dataset, func(done, total int) { progress(Laying, done, total) }); err != nil {
		return r, err
	}
	source := c.Dataset.Source()
	r.Samples, r.Bytes = c.Dataset.Samples, c.Dataset.Bytes()
	r.Demand = c.Job.Rate() * float64(r.Bytes) / float64(r.Samples)
	cache := filepath.Join(b.Dir, "cache")
	if err := os.RemoveAll(cache); err != nil {
		return r, err
	}
	flags := []string{"--cache-dir", cache, "--cache-size", c.cacheSize(), "--samples", "*"}
	if c.Cached > 0 {
		progress(Warming, 0, 1)
		out, err := b.Shoal(ctx,
			append([]string{"warm", source, "--fraction", fmt.Sprint(min(c.Cached, 1)), "--memory", warmMemory},
				flags...)...)
		if err != nil {
			return r, err
		}
		if r.Kept, err = parseWarm(out); err != nil {
			return r, err
		}
		progress(Warming, 1, 1)
	}
	if r.Bandwidth = c.Bandwidth.Absolute; c.Bandwidth.Times > 0 {
		r.Bandwidth = c.Bandwidth.Times * (1 - r.Kept) * r.Demand
	}
	// Before the daemon starts, which begins to fetch at once.
	if err := b.Proxy.Set(ctx,
		proxy.Options{Latency: c.Latency, Sigma: c.Sigma, Bandwidth: int64(r.Bandwidth), Seed: 1}); err != nil {
		return r, err
	}
	told := cmp.Or(c.Told, c.Order)
	if c.Connections > 0 {
		flags = append(flags, "--connections", strconv.Itoa(c.Connections))
	}
	mnt := filepath.Join(b.Dir, "mnt")
	args := append([]string{"mount", source, mnt, "--kernel-cache", "off", "--order", told,
		"--memory", strconv.FormatInt(c.Memory, 10) + "B"}, flags...)
	d, err := b.Daemon(ctx, daemon.Place{Mount: mnt, Log: mnt + ".log"}, args...)
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	s, err := ReadStats(mnt)
	if err != nil {
		return r, err
	}
	r.Kept, r.Memory = s.Kept(), s.Memory.Limit
	pids := []int{b.Server.Pid(), b.Proxy.Pid(), d.Pid(), os.Getpid()}
	own, busy, begin := cputime.Sum(pids...), cputime.Cores(), time.Now()
	pass := Pass{Shoal: b.shoal, Mount: mnt, Order: c.Order, Job: c.Job, Epochs: max(c.Epochs, 1), Since: &Stats{}}
	r.Epochs, err = pass.Run(ctx, func(done, steps int) { progress(Running, done, steps) })
	all := time.Since(begin).Seconds() * float64(runtime.NumCPU())
	r.Busy, r.CPU = (cputime.Cores()-busy)/all, (cputime.Sum(pids...)-own)/all
	if err != nil {
		return r, errors.Join(err, d.Failed(), b.Failed())
	}
	return r, nil
}

// parseWarm reads what `shoal warm` prints: 1,198 of 2,400 extents of SOURCE are kept.
func parseWarm(out string) (kept float64, err error) {
	var n, all int64
	if _, err := fmt.Sscanf(strings.ReplaceAll(out, ",", ""), "%d of %d extents", &n, &all); err != nil || all == 0 {
		return 0, fmt.Errorf("shoal warm printed %.200q, not how much is kept", out)
	}
	return float64(n) / float64(all), nil
}
