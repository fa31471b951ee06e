// Package accelerator emulates accelerators that train: each fetches a batch, computes for as long as the
// real one would (it sleeps), and waits for the others. What counts is the share of the time that they
// compute. The shapes of package workload are those of MLPerf Storage; the results are not MLPerf results.
package accelerator

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/shoalfs/shoal/internal/pause"
)

// Reader delivers one epoch's samples. It is called by all loaders' workers at once, for each position
// once, in an order that is nearly that of the positions.
type Reader interface {
	// Read reads the sample at a position of the epoch's order, whole, and returns its size in bytes.
	// It returns when the bytes have arrived, and soon after ctx has ended if it can. An error ends
	// the run; Read does not try again on its caller's behalf.
	Read(ctx context.Context, pos int) (int64, error)
}

// Files reads samples from files, as a Dataset's __getitem__ does: open, read to the end, close. A read
// of a mount whose daemon hangs cannot be ended by a context.
type Files struct {
	Dir   string
	Paths []string // below Dir, by position in the epoch's order

	buffers sync.Pool
}

// fileBuffer is what one read asks for, as Python's buffered reads of a known size do.
const fileBuffer = 1 << 20

// Read reads a file. An empty one is an error, since no sample is.
func (f *Files) Read(_ context.Context, pos int) (n int64, err error) {
	file, err := os.Open(filepath.Join(f.Dir, f.Paths[pos]))
	if err != nil {
		return 0, err
	}
	defer file.Close()
	buf, ok := f.buffers.Get().(*[]byte)
	if !ok {
		b := make([]byte, fileBuffer)
		buf = &b
	}
	defer f.buffers.Put(buf)
	// Neither shows that it could copy by itself, with reads of another size.
	n, err = io.CopyBuffer(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{file}, *buf)
	if err == nil && n == 0 {
		err = fmt.Errorf("%s is empty: no sample is", file.Name())
	}
	return n, err
}

// Job is what n equal accelerators do together: in each step every one of them takes a batch and
// computes, and none begins before all have theirs, since gradients are averaged in every step.
//
// The global batch of step k is positions [k·n·Batch, (k+1)·n·Batch) of the order, of which accelerator a
// takes a, a+n, …, as ranks of a DistributedSampler do. An incomplete step at the end is left out.
type Job struct {
	Accelerators int
	Batch        int           // samples that one accelerator takes a step
	Step         time.Duration // compute time of a batch
	// Workers is how many batches each accelerator's loader reads at a time, one sample after the
	// other within each, as a DataLoader's num_workers processes do.
	Workers int
	// Prefetch is how many batches each loader has ready or under way beside the one that is being
	// computed: a DataLoader's num_workers × prefetch_factor. Fewer than Workers leave workers idle.
	Prefetch int
}

// Steps returns how many steps an epoch of so many positions has.
func (j Job) Steps(positions int) int { return positions / (j.Accelerators * j.Batch) }

// Rate returns the samples a second that the accelerators take together when they never wait.
func (j Job) Rate() float64 { return float64(j.Accelerators*j.Batch) / j.Step.Seconds() }

// Step is what one step of an epoch was like. Times are in seconds.
type Step struct {
	Start float64 `json:"start"` // when it began to compute, from the start of the first step
	Stall float64 `json:"stall"` // how long, before, the accelerators waited; the first step's is 0
}

// Epoch is what became of an epoch. Times are in seconds.
//
// All accelerators have the same times, because of the barrier, so these are the times of each.
type Epoch struct {
	Seconds     float64 `json:"seconds"` // from the first step's start to the last one's end
	Compute     float64 `json:"compute_seconds"`
	Stall       float64 `json:"stall_seconds"` // Seconds - Compute
	Utilisation float64 `json:"utilisation"`   // Compute / Seconds
	// FirstBatch is how long the accelerators waited for their first batch, before Seconds began: the
	// loaders begin each epoch empty, as a DataLoader's iterator does.
	FirstBatch float64 `json:"first_batch_seconds"`
	Samples    int     `json:"samples"`
	Bytes      int64   `json:"bytes"` // of the samples
	// Oversleep is how much later than it should the emulation woke up from computing, in all. It is not
	// in the times above (see Job.Run); much of it means that the machine is too busy for this run.
	Oversleep float64 `json:"oversleep_seconds"`
	Steps     []Step  `json:"steps"`
}

// Run runs one epoch of so many positions and returns when all that it has started has ended. progress,
// which may be nil, is called after each step, from this goroutine.
//
// What a sleeping process cannot do is wake up in time, so time is kept on two clocks. Loaders read, and
// are asked for more, in real time. The accelerators' own times are computed: a step begins when the one
// before should have ended, or when the last of its batches arrived, whichever is later. An accelerator
// that wakes up late, to find a batch that has arrived meanwhile, has not waited for data.
func (j Job) Run(ctx context.Context, positions int, r Reader, progress func(done, steps int)) (Epoch, error) {
	if j.Accelerators < 1 || j.Batch < 1 || j.Workers < 1 || j.Prefetch < 1 || j.Step <= 0 {
		return Epoch{}, fmt.Errorf(
			"accelerator: %d accelerators, batch %d, step %v, %d workers, %d batches ahead: all must be above 0",
			j.Accelerators, j.Batch, j.Step, j.Workers, j.Prefetch)
	}
	steps := j.Steps(positions)
	if steps == 0 {
		return Epoch{}, fmt.Errorf("accelerator: %d samples are no global batch of %d × %d",
			positions, j.Accelerators, j.Batch)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var workers sync.WaitGroup
	loaders := make([]*loader, j.Accelerators)
	begin := time.Now()
	for a := range loaders {
		l := newLoader(j, a, steps, r)
		loaders[a] = l
		for _, q := range l.queues {
			workers.Go(func() {
				if err := l.work(ctx, q); err != nil {
					cancel(err) // without effect once the run has ended
				}
			})
		}
	}
	e := Epoch{Steps: make([]Step, 0, steps)}
	err := j.compute(ctx, &e, loaders, begin, steps, progress)
	for _, l := range loaders {
		for _, q := range l.queues {
			close(q)
		}
	}
	cancel(err) // workers that read must not go on with their batches
	workers.Wait()
	return e, err
}

// compute is the accelerators' side of Run.
func (j Job) compute(ctx context.Context, e *Epoch, loaders []*loader, begin time.Time, steps int,
	progress func(done, steps int)) error {
	var first, end time.Time // of the first step; of the step before
	for k := range steps {
		start := end
		for _, l := range loaders {
			select {
			case <-l.batches[k].ready:
			case <-ctx.Done():
				return context.Cause(ctx)
			}
			if at := l.batches[k].at; at.After(start) {
				start = at
			}
			e.Bytes += l.batches[k].bytes
		}
		for _, l := range loaders {
			l.ask()
		}
		var stall time.Duration
		if k == 0 {
			first = start
			e.FirstBatch = start.Sub(begin).Seconds()
		} else {
			stall = start.Sub(end)
		}
		e.Steps = append(e.Steps, Step{start.Sub(first).Seconds(), stall.Seconds()})
		end = start.Add(j.Step)
		if pause.For(ctx, time.Until(end)) != nil {
			return context.Cause(ctx)
		}
		e.Oversleep += time.Since(end).Seconds()
		if progress != nil {
			progress(k+1, steps)
		}
	}
	e.Samples = steps * j.Batch * j.Accelerators
	e.Seconds = end.Sub(first).Seconds()
	e.Compute = (time.Duration(steps) * j.Step).Seconds()
	e.Stall = e.Seconds - e.Compute
	e.Utilisation = e.Compute / e.Seconds
	return nil
}

// loader reads one accelerator's batches ahead of it.
type loader struct {
	job     Job
	rank    int
	reader  Reader
	batches []batch
	asked   int
	queues  []chan int // batches to read, by worker; never full
}

// batch is one accelerator's share of a step. What stands in it may be read once ready is closed.
type batch struct {
	ready chan struct{}
	at    time.Time // when its last sample had arrived
	bytes int64
}

func newLoader(j Job, rank, steps int, r Reader) *loader {
	l := &loader{job: j, rank: rank, reader: r, batches: make([]batch, steps), queues: make([]chan int, j.Workers)}
	for w := range l.queues {
		l.queues[w] = make(chan int, (j.Prefetch+j.Workers-1)/j.Workers)
	}
	for k := range l.batches {
		l.batches[k].ready = make(chan struct{})
	}
	for range j.Prefetch {
		l.ask()
	}
	return l
}

// ask has one more batch read, at the start and whenever one is taken, by the workers in turn, as
// DataLoader does.
func (l *loader) ask() {
	if l.asked < len(l.batches) {
		l.queues[l.asked%len(l.queues)] <- l.asked
		l.asked++
	}
}

// work reads batches until their queue is closed or ctx ends.
func (l *loader) work(ctx context.Context, queue <-chan int) error {
	n, size := l.job.Accelerators, l.job.Batch
	for k := range queue {
		b := &l.batches[k]
		for i := range size {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			pos := (k*size+i)*n + l.rank
			bytes, err := l.reader.Read(ctx, pos)
			if err != nil {
				return fmt.Errorf("accelerator %d, step %d, position %d: %w", l.rank, k, pos, err)
			}
			b.bytes += bytes
		}
		b.at = time.Now()
		close(b.ready)
	}
	return nil
}
