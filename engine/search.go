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
	"github.com/shoalfs/shoal/prefetch/infer"
)

// Seeds are searched in a process of its own, one a search, since inside the daemon a search holds places
// of Go's scheduler for which readers wait, whatever the priority of its threads.
//
//	daemon ── searchRequest ──► stdin   HostConfig.Searcher, which calls ServeSearch
//	       ◄── searchAnswer ─── stdout
//
// The process ends when it has answered, when its standard input ends, when the thread that started it does,
// when it is killed because the search came too late, and when it has used the CPU time that it was given. It has
// no state but the request, so that nothing is lost whenever it ends.

// searchRequest is what a search process reads.
type searchRequest struct {
	Task    infer.Task
	Seconds int // of CPU time at most
}

// searchAnswer is what it writes.
type searchAnswer struct {
	Finding infer.Finding
	Found   bool
}

// soonOpens is up to how many opens a trainer is expected to be recognised after. Such a search takes a fraction
// of a second of one thread.
const soonOpens = 64

// soon reports whether a search is worth a share of a busy machine. Others take what nobody wants.
func soon(t infer.Task) bool {
	return t.Depth == infer.Usual && len(t.Opens) <= soonOpens
}

// searchElsewhere has a search carried out by a process, and returns how much CPU time that took.
func (h *Host) searchElsewhere(ctx context.Context, r searchRequest) (a searchAnswer, used time.Duration, err error) {
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
		return a, 0, err
	}
	err = gob.NewEncoder(in).Encode(r)
	if waitErr := cmd.Wait(); waitErr != nil {
		err = waitErr // whose death explains why it read no more
	}
	used = cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()
	if err == nil {
		err = gob.NewDecoder(&out).Decode(&a)
	}
	if err != nil && complaint.Len() > 0 {
		err = fmt.Errorf("%w: %.200s", err, complaint.Bytes())
	}
	return a, used, err
}

// ServeSearch is the search process: it reads one request, and writes what it came to. The end of in ends the
// process.
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
	// Where memory ends, the search goes first.
	_ = os.WriteFile("/proc/self/oom_score_adj", []byte("500"), 0)
	p := newSearchPace(soon(r.Task))
	runtime.GOMAXPROCS(p.threads + 1)
	var a searchAnswer
	a.Finding, a.Found = runSearch(infer.NewSearch(r.Task), p)
	return gob.NewEncoder(out).Encode(a)
}

// searchPace is how much of the machine a search may take: half of the time of the cores that nobody else has used
// of late, on half of them at most, since two may share one, and in a group with a quota of CPU time a tenth of that.
// Its priority is an ordinary one: a process that is always ready to run and hardly ever does costs others more than
// one that sleeps (ADR 40).
type searchPace struct {
	threads int
	most    float64 // each thread's share of the time, at most
	least   float64
	share   atomic.Uint64 // math.Float64bits of the share in force
}

const (
	// leastSoon is the least share of one core for what may recognise the trainer at once, a fifth of a second of
	// work: the next epoch's search must end before the reader is far into it, on a busy machine, too.
	leastSoon       = 0.2
	paceSearchEvery = 200 * time.Millisecond
)

// leastShare is the least share of one core for any other search. Tests, which keep the machine busy, change it.
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

// follow adjusts the share to what the machine has to spare, until stop is closed.
func (p *searchPace) follow(stop <-chan struct{}) {
	t := time.NewTicker(paceSearchEvery)
	defer t.Stop()
	before := machine.IdleCPU()
	for {
		select {
		case <-stop:
			return
		case <-t.C:
		}
		now := machine.IdleCPU()
		spare := (now - before).Seconds() / paceSearchEvery.Seconds() // cores
		before = now
		p.set(spare / 2 / float64(p.threads))
	}
}

// rest sleeps after so much work as the share demands.
func (p *searchPace) rest(worked time.Duration) {
	if share := math.Float64frombits(p.share.Load()); share < 1 {
		time.Sleep(time.Duration(float64(worked) * (1/share - 1)))
	}
}

// runSearch carries a search out.
func runSearch(s *infer.Search, p *searchPace) (best infer.Finding, found bool) {
	var next atomic.Int64
	var done atomic.Bool
	var mu sync.Mutex
	var wg sync.WaitGroup
	steps := s.Steps()
	stop := make(chan struct{})
	defer close(stop)
	go p.follow(stop)
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
					if !found || f.Bits > best.Bits {
						best, found = f, true
					}
					done.Store(true)
				})
				p.rest(time.Since(began))
			}
		})
	}
	wg.Wait()
	return best, found
}
