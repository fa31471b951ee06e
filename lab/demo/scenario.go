package demo

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/shoalfs/shoal/lab/rig/cputime"
	"github.com/shoalfs/shoal/lab/rig/daemon"
	"github.com/shoalfs/shoal/lab/rig/proxy"
	"github.com/shoalfs/shoal/lab/rig/subproc"
	"github.com/shoalfs/shoal/lab/rig/testbed"
)

// Step is one training step as the trainer timed it; times in seconds.
type Step struct {
	T       float64 `json:"t"`       // when its batch was there, from the start of the loop
	Wait    float64 `json:"wait"`    // how long it waited for it
	Compute float64 `json:"compute"` // how long it then computed
	Samples int     `json:"samples"`
}

// Result is one scenario's outcome.
type Result struct {
	Title   string
	Steps   []Step
	Seconds float64 // the loop, workers' start included
	Samples int
	// Counters of the daemon (its stats), over the daemon's life, and of the store as the proxy
	// saw it.
	Gets, GetBytes           int64
	StoreGets, StoreGetBytes int64
	// CPU seconds while the loop ran. The trainer's hold its workers; the store's, the proxy.
	TrainerCPU, ShoalCPU, StoreCPU float64
	OtherCPU                       float64 // of everything else on the machine
	Bound                          string  // what bounds it
}

// Rate is in samples/s.
func (r *Result) Rate() float64 { return float64(r.Samples) / r.Seconds }

// WaitShare is the share of the loop's time that the trainer waited for data, 0 to 1.
func (r *Result) WaitShare() float64 {
	var w float64
	for _, s := range r.Steps {
		w += s.Wait
	}
	return w / r.Seconds
}

// scenario is one way of feeding the trainer.
type scenario struct {
	name, title string
	cache       string // name of the cache folder
	cold        bool   // begin with an empty cache
	order       string // for the mount
	epoch       int    // that the trainer trains
	feed        bool
}

func (j *job) scenarios() []scenario {
	return []scenario{
		// A plain read-through cache: each worker waits for each file.
		{name: "none", title: "mount, order unknown, cold", cache: "cache-none", cold: true, order: "none"},
		// The same trainer. Shoal computes the sampler's order and fetches ahead of it.
		{name: "order", title: "mount, order known, cold", cache: "cache", cold: true,
			order: fmt.Sprintf("torch:seed=%d", j.Seed)},
		// The second epoch, after a remount: the samples are on the local disk.
		{name: "warm", title: "mount, order known, warm", cache: "cache", epoch: 1,
			order: fmt.Sprintf("torch:seed=%d,epoch=1", j.Seed)},
		// Batches arrive decoded, cropped and flipped, as uint8; no DataLoader workers.
		{name: "feed", title: "feed, warm", cache: "cache", epoch: 2, feed: true},
	}
}

// runScenario starts a daemon, trains, and stops the daemon.
func (j *job) runScenario(ctx context.Context, s scenario) (_ *Result, err error) {
	cache := j.path(s.cache)
	if s.cold {
		if err := os.RemoveAll(cache); err != nil {
			return nil, err
		}
	}
	if err := os.MkdirAll(cache, 0o700); err != nil {
		return nil, err
	}
	before, err := j.bed.Proxy.Stats(ctx)
	if err != nil {
		return nil, err
	}
	j.dropped = dropKernelCaches()

	bar := j.bars.Start(s.title, 0)
	result := "failed"
	defer func() { bar.Done(result) }()
	bar.Set(0, 0, "starting")
	d, target, err := j.startDaemon(ctx, s, cache)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, d.Close()) }()

	r := &Result{Title: s.title}
	cpu := j.cpu(d)
	if err := j.train(ctx, s, target, r, bar.Set); err != nil {
		return nil, errors.Join(err, d.Failed(), j.bed.Failed())
	}
	now := j.cpu(d)
	r.ShoalCPU, r.StoreCPU = now.shoal-cpu.shoal, now.store-cpu.store
	r.OtherCPU = max(now.machine-cpu.machine-r.ShoalCPU-r.StoreCPU-now.trainers+cpu.trainers, 0)
	if err := j.counters(ctx, target, before, r); err != nil {
		return nil, err
	}
	r.Bound = j.explain(r, s)
	result = fmt.Sprintf("%.0f samples/s, %.0f%% waiting", r.Rate(), 100*r.WaitShare())
	return r, nil
}

// startDaemon runs shoal. target is what the trainer is given, and `shoal stat`.
func (j *job) startDaemon(ctx context.Context, s scenario, cache string) (d *daemon.Daemon, target string, err error) {
	target = j.path("mnt")
	at := daemon.Place{Mount: target, Log: j.path("runs", s.name+".shoal.log")}
	args := []string{"mount", source, target, "--order", s.order}
	if s.feed {
		at.Mount, at.Socket = "", filepath.Join(j.sockets, "feed.sock")
		target = "unix://" + at.Socket
		args = []string{"serve", source, "--listen", target}
	}
	d, err = j.bed.Daemon(ctx, at, append(args, "--cache-dir", cache, "--cache-size", j.CacheSize,
		"--memory", j.Memory)...)
	return d, target, err
}

// event is a line of a trainer's output, see trainer/record.py.
type event struct {
	Event string `json:"event"`
	Step
	Total      int     `json:"total"`
	Seconds    float64 `json:"seconds"`
	CPUSeconds float64 `json:"cpu_seconds"`
}

// train runs the trainer and fills in what it reports.
func (j *job) train(ctx context.Context, s scenario, target string, r *Result,
	show func(done, total int, note string)) error {
	args := []string{j.path("trainer", "trainer_mount.py"), target, "--workers", strconv.Itoa(j.Workers)}
	if s.feed {
		args = []string{j.path("trainer", "trainer_feed.py"), target, "--sheet", j.path("contact-sheet.png")}
	}
	args = append(args, "--batch", strconv.Itoa(j.Batch), "--seed", strconv.Itoa(j.Seed),
		"--epoch", strconv.Itoa(s.epoch))
	if j.Steps > 0 {
		args = append(args, "--steps", strconv.Itoa(j.Steps))
	}
	record, err := os.Create(j.path("runs", s.name+".jsonl"))
	if err != nil {
		return err
	}
	defer record.Close()
	pr, pw := io.Pipe()
	cmd := exec.Command(j.Python, args...)
	// DataLoader's workers keep folders there and leave them when they are killed.
	tmp, err := os.MkdirTemp("", "shoal-demo-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(tmp) }()
	cmd.Env = append(slices.Clone(j.bed.Env), "PYTHONDONTWRITEBYTECODE=1", "PYTHONWARNINGS=ignore", "TMPDIR="+tmp)
	cmd.Dir = j.path("trainer")
	cmd.Stdout = pw
	show(0, 0, "the trainer starts")
	p, err := subproc.Start("the trainer ("+filepath.Base(args[0])+")", cmd)
	if err != nil {
		return err
	}
	parsed := make(chan error, 1)
	go func() {
		err := r.parse(io.TeeReader(pr, record), j.Steps, show)
		// Whatever is wrong with the output, the trainer must not block on a full pipe.
		_, _ = io.Copy(io.Discard, pr)
		parsed <- err
	}()
	err = p.Wait(ctx)
	_ = pw.Close()
	if perr := <-parsed; err == nil {
		err = perr
	}
	return err
}

// parse reads a trainer's events until the end of rd.
func (r *Result) parse(rd io.Reader, limit int, show func(done, total int, note string)) error {
	sc := bufio.NewScanner(rd)
	total, ended := 0, false
	for sc.Scan() {
		var e event
		if err := json.Unmarshal(sc.Bytes(), &e); err != nil {
			return fmt.Errorf("the trainer wrote %.100q instead of an event: %w", sc.Text(), err)
		}
		switch e.Event {
		case "start":
			total = e.Total
			if limit > 0 {
				total = min(total, limit)
			}
			show(0, total, "")
		case "step":
			r.Steps = append(r.Steps, e.Step)
			r.Samples += e.Samples
			show(len(r.Steps), total, fmt.Sprintf("%.0f samples/s", float64(r.Samples)/(e.T+e.Compute)))
		case "end":
			r.Seconds, r.TrainerCPU, ended = e.Seconds, e.CPUSeconds, true
		default:
			return fmt.Errorf("the trainer wrote an unknown event %q", e.Event)
		}
	}
	if err := sc.Err(); err != nil {
		return err
	}
	if !ended || len(r.Steps) == 0 || r.Seconds <= 0 {
		return fmt.Errorf("the trainer ended after %d steps without a result", len(r.Steps))
	}
	return nil
}

// counters reads what the daemon says it fetched and what the store has seen. Both are asked until
// they agree, at most for two seconds, since read-ahead may be in flight.
func (j *job) counters(ctx context.Context, target string, before proxy.Stats, r *Result) error {
	for deadline := time.Now().Add(2 * time.Second); ; {
		st, err := j.shoalStats(ctx, target)
		if err != nil {
			return err
		}
		now, err := j.bed.Proxy.Stats(ctx)
		if err != nil {
			return err
		}
		seen := now.Sub(before)
		r.Gets, r.GetBytes = st.GetRequests, st.GetBytes
		r.StoreGets, r.StoreGetBytes = seen.Gets, seen.GetBytes
		if r.Gets == r.StoreGets && r.GetBytes == r.StoreGetBytes || time.Now().After(deadline) {
			return nil
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// shoalStats asks the daemon, which may hang.
func (j *job) shoalStats(ctx context.Context, target string) (st testbed.Stats, err error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	out, err := j.bed.Shoal(ctx, "stat", target, "--json")
	if err == nil {
		err = json.Unmarshal([]byte(out), &st)
	}
	return st, err
}

// cpuTimes are CPU seconds used so far. The trainers' are those of this process and of its children
// that have ended, which between two readings are the trainer, its workers and a few short helpers.
type cpuTimes struct{ shoal, store, trainers, machine float64 }

func (j *job) cpu(d *daemon.Daemon) cpuTimes {
	return cpuTimes{shoal: cputime.Sum(d.Pid()), store: cputime.Sum(j.bed.Server.Pid(), j.bed.Proxy.Pid()),
		trainers: cputime.Family(), machine: cputime.Cores()}
}
