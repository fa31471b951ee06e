package engine

import (
	"bytes"
	"context"
	"encoding/gob"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/internal/machine"
	"github.com/shoalfs/shoal/internal/pause"
	"github.com/shoalfs/shoal/prefetch/infer"
)

// Each search for seeds runs in its own process: inside the daemon it would hold places of Go's scheduler that
// readers wait for, whatever the priority of its threads.
//
//	daemon ── searchRequest ──► stdin   HostConfig.Searcher, which calls ServeSearch
//	       ◄── infer.Finding ── stdout; without Reads there is none
//
// The process ends when it has answered, when its standard input ends, when the thread that started it does, when it
// is killed because the search is too late, and when it has used its CPU time. It has no state but the request, so
// nothing is lost when it ends.

type searchRequest struct {
	Task    infer.Task
	Seconds int // of CPU time at most
}

// searchElsewhere runs a search in a process, and returns its CPU time.
func (h *Host) searchElsewhere(ctx context.Context, r searchRequest) (f infer.Finding, used time.Duration, err error) {
	// The kernel ends the child with the thread that started it.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd := exec.CommandContext(ctx, h.cfg.Searcher[0], h.cfg.Searcher[1:]...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setsid: true}
	var out, complaint bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &complaint
	in, err := cmd.StdinPipe() // closed by Wait
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return f, 0, err
	}
	err = gob.NewEncoder(in).Encode(r)
	if waitErr := cmd.Wait(); waitErr != nil {
		err = waitErr // its exit explains the failed write
	}
	used = cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()
	if err == nil {
		err = gob.NewDecoder(&out).Decode(&f)
	}
	if err != nil && complaint.Len() > 0 {
		err = fmt.Errorf("%w: %.200s", err, complaint.Bytes())
	}
	return f, used, err
}

// ServeSearch is the search process: it reads one request, and writes the answer. The end of in ends the process.
func ServeSearch(in io.Reader, out io.Writer) error {
	var r searchRequest
	if err := gob.NewDecoder(in).Decode(&r); err != nil {
		return fmt.Errorf("search request: %w", err)
	}
	go func() {
		_, _ = io.Copy(io.Discard, in)
		os.Exit(1)
	}()
	limit := uint64(max(r.Seconds, 1))
	if err := unix.Setrlimit(unix.RLIMIT_CPU, &unix.Rlimit{Cur: limit, Max: limit}); err != nil {
		return fmt.Errorf("bound the search's CPU time: %w", err)
	}
	// If memory runs out, the search is killed first.
	_ = os.WriteFile("/proc/self/oom_score_adj", []byte("500"), 0)
	p := newSearchPace(r.Task.Depth == infer.Usual && len(r.Task.Opens) <= soonOpens)
	runtime.GOMAXPROCS(p.threads + 1)
	return gob.NewEncoder(out).Encode(runSearch(infer.NewSearch(r.Task), p))
}

// searchPace is how much of the machine a search may use: half of the recent idle time of the cores, on half of them
// at most, since two may share one, and in a group with a quota of CPU time a tenth of that. It has normal priority:
// a process that is always ready to run and hardly ever does costs others more than one that sleeps (ADR 40).
type searchPace struct {
	threads int
	most    float64 // each thread's share of the time, at most
	least   float64
	share   atomic.Uint64 // math.Float64bits of the share in force
}

const (
	// soonOpens is the number of opens by which a trainer should be recognised. Such a search takes a fraction of a
	// second of one thread, and deserves a share of a busy machine. Others use idle time only.
	soonOpens = 64
	// leastSoon is the least share of one core for a search that may recognise the trainer at once, a fifth of a
	// second of work: the next epoch's search must end before the reader is far into it, even on a busy machine.
	leastSoon       = 0.2
	paceSearchEvery = 200 * time.Millisecond
)

// leastShare is the least share of one core for other searches. Tests, which keep the machine busy, change it.
var leastShare = 0.01

func newSearchPace(soon bool) *searchPace {
	p := &searchPace{threads: max(1, runtime.GOMAXPROCS(0)/2), most: 1, least: leastShare}
	if soon {
		p.threads, p.least = 1, leastSoon
	}
	if quota := machine.CPUQuota("/"); quota > 0 {
		p.threads, p.most = 1, min(quota/10, 1)
	}
	p.set(p.least)
	return p
}

func (p *searchPace) set(share float64) {
	p.share.Store(math.Float64bits(min(max(share, p.least), p.most)))
}

// follow adjusts the share to the machine's idle time, until ctx ends.
func (p *searchPace) follow(ctx context.Context) {
	before := machine.IdleCPU()
	for range pause.Every(ctx, paceSearchEvery) {
		now := machine.IdleCPU()
		spare := (now - before).Seconds() / paceSearchEvery.Seconds() // cores
		before = now
		p.set(spare / 2 / float64(p.threads))
	}
}

// pause is how long to rest after some work, as the share demands.
func (p *searchPace) pause(worked time.Duration) time.Duration {
	share := math.Float64frombits(p.share.Load())
	return time.Duration(float64(worked) * (1/share - 1))
}

func runSearch(s *infer.Search, p *searchPace) (best infer.Finding) {
	var next atomic.Int64
	var done atomic.Bool
	var mu sync.Mutex
	var wg sync.WaitGroup
	steps := s.Steps()
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	go p.follow(ctx)
	for range p.threads {
		wg.Go(func() {
			for !done.Load() {
				step := int(next.Add(1)) - 1
				if step >= steps {
					return
				}
				began := time.Now()
				s.Run(step, done.Load, func(f infer.Finding) {
					mu.Lock()
					defer mu.Unlock()
					if best.Reads == 0 || f.Bits > best.Bits {
						best = f
					}
					done.Store(true)
				})
				time.Sleep(p.pause(time.Since(began)))
			}
		})
	}
	wg.Wait()
	return best
}
