// Package demo is the main job on real input, as one command shows it: real photographs in a real S3
// server that is 30 ms away, read by a real PyTorch trainer through Shoal; without a known order,
// with it, warm, and through the feed. Every part runs in a process of its own, as it would in
// earnest.
//
// Traps:
//
//   - The demo never touches the mount itself: a daemon that hangs would hang it too, and then
//     nothing would be cleaned up. It asks `shoal stat`, with a timeout.
//   - Everything that is started is stopped, everything that is mounted is unmounted, on success,
//     failure, Ctrl-C and SIGTERM; what a SIGKILL has left is cleared at the next start.
//   - "Warm" must not mean the kernel's page cache: the mount is made anew and, as root, the
//     kernel's caches are dropped before each run.
package demo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"time"

	humanize "github.com/dustin/go-humanize"

	"github.com/shoalfs/shoal/internal/progress"
	"github.com/shoalfs/shoal/lab/rig/daemon"
	"github.com/shoalfs/shoal/lab/rig/photos"
	"github.com/shoalfs/shoal/lab/rig/proxy"
	"github.com/shoalfs/shoal/lab/rig/testbed"
	"github.com/shoalfs/shoal/python"
)

// Options says what to run.
type Options struct {
	Shoal             string        // absolute path of the shoal binary; Store does without
	WorkDir           string        // keeps photographs, objects, caches and results
	Client            fs.FS         // the Python client as "shoal/*.py"
	Python            string        // the interpreter that has torch
	Latency           time.Duration // the store's median time to the first byte
	Sigma             float64       // standard deviation of its logarithm
	Photos            int           // in the training set
	Steps             int           // of each run; 0: one epoch
	Batch             int           // photographs a step
	Workers           int           // the DataLoader's num_workers
	Seed              int           // the sampler's
	CacheSize, Memory string        // passed to shoal
	Progress          io.Writer     // gets the progress bars
}

// Defaults returns what is run where nobody says otherwise. Workers are twice the cores of a small machine, since
// without a known order they mostly wait.
func Defaults() Options {
	return Options{
		WorkDir: "shoal-demo", Client: python.Files, Python: "/usr/bin/python3", Latency: 30 * time.Millisecond,
		Sigma: 0.3, Photos: photos.DefaultCount, Batch: 16, Workers: 4, Seed: 7, CacheSize: "2GiB", Memory: "512MiB",
		Progress: os.Stderr,
	}
}

const (
	bucket = "photos"
	prefix = "train"
	source = "s3://" + bucket + "/" + prefix
)

// job is one run of the demo.
type job struct {
	Options
	bars    *progress.Printer
	bed     *testbed.Bed
	sockets string // folder: the path of a socket has 107 bytes at most, and WorkDir may be deep
	dropped bool   // the kernel's caches could be dropped
}

func newJob(o Options) (_ *job, err error) {
	if o.WorkDir, err = filepath.Abs(o.WorkDir); err != nil {
		return nil, fmt.Errorf("demo: %w", err)
	}
	return &job{Options: o, bars: progress.New(o.Progress)}, nil
}

// Run runs the demo and prints its result, a table and the path of the contact sheet, to out. When it returns, with or
// without an error, no process and no mount of it is left.
func Run(ctx context.Context, o Options, out io.Writer) error {
	j, err := newJob(o)
	if err != nil {
		return err
	}
	if missing := j.missing(ctx); len(missing) > 0 {
		fmt.Fprintln(o.Progress, "To run on this machine, the demo lacks:")
		for _, m := range missing {
			fmt.Fprintln(o.Progress, "  - "+m)
		}
		return fmt.Errorf("%w: get what is listed above", ErrMissing)
	}
	if err := j.run(ctx, out); err != nil {
		if ctx.Err() != nil {
			return fmt.Errorf("demo: stopped; nothing is left running or mounted: %w", context.Cause(ctx))
		}
		return fmt.Errorf("demo: %w", err)
	}
	return nil
}

func (j *job) path(elem ...string) string {
	return filepath.Join(append([]string{j.WorkDir}, elem...)...)
}

func (j *job) run(ctx context.Context, out io.Writer) error {
	if err := j.prepare(ctx); err != nil {
		return err
	}
	defer j.close()
	err := errors.Join(os.MkdirAll(j.path("runs"), 0o755), j.writeTrainers())
	if err != nil {
		return err
	}
	if j.sockets, err = os.MkdirTemp("", "shoal-demo-"); err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(j.sockets) }()

	var results []*Result
	for _, s := range j.scenarios() {
		r, err := j.runScenario(ctx, s)
		if err != nil {
			return fmt.Errorf("%s: %w", s.title, err)
		}
		results = append(results, r)
	}
	rep := &report{Options: j.Options, Results: results, Cores: runtime.NumCPU(), Dropped: j.dropped}
	rep.print(out)
	fmt.Fprintf(out, "\ncontact sheet  %s\n", j.path("contact-sheet.png"))
	return nil
}

// prepare starts store and proxy, makes the training set, uploads it, and moves the store away.
func (j *job) prepare(ctx context.Context) (err error) {
	if j.bed, err = testbed.Start(ctx, j.WorkDir, j.Shoal); err != nil {
		return err
	}
	if err = j.fill(ctx); err == nil {
		err = j.bed.Proxy.Set(ctx, proxy.Options{Latency: j.Latency, Sigma: j.Sigma, Seed: 1})
	}
	if err != nil {
		j.close()
	}
	return err
}

// fill makes the training set and uploads it.
func (j *job) fill(ctx context.Context) error {
	bar := j.bars.Start("making photographs", j.Photos)
	set, err := photos.Make(ctx, j.path("photos"), j.Photos, func(done, total int) {
		bar.Set(done, total, "")
	})
	result := fmt.Sprintf("%s files in %d classes, %s",
		humanize.Comma(int64(set.Files)), set.Classes, humanize.Bytes(uint64(set.Bytes)))
	switch {
	case err != nil:
		result = "failed"
	case !set.Made:
		result += ", kept from the last run"
	}
	bar.Done(result)
	if err != nil {
		return err
	}
	bar = j.bars.Start("uploading to the S3 server", set.Files)
	up, err := j.bed.Server.Upload(ctx, j.path("photos"), bucket, prefix, func(done, total int) {
		bar.Set(done, total, "")
	})
	result = fmt.Sprintf("%s objects sent, %s there before",
		humanize.Comma(int64(up.Sent)), humanize.Comma(int64(up.Files-up.Sent)))
	if err != nil {
		result = "failed"
	}
	bar.Done(result)
	return err
}

// close stops the store and the proxy.
func (j *job) close() {
	// Each run has stopped its daemon and unmounted; this is for what went wrong there.
	_ = daemon.Unmount(j.WorkDir)
	j.bed.Close()
}
