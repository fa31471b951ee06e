// Package memory is the benchmark of what knowing an order costs: jobs over one mount with little memory, which reads
// without an order, infers the orders, or follows plans.
package memory

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/shoalfs/shoal/lab/bench/kit"
	"github.com/shoalfs/shoal/lab/rig/daemon"
	"github.com/shoalfs/shoal/lab/rig/proxy"
	"github.com/shoalfs/shoal/lab/rig/testbed"
)

const (
	memory  = "112MiB"
	data    = 36 << 20 // what memory leaves for samples, little more than the least
	files   = 2000
	epochs  = 3
	latency = 15 * time.Millisecond
	// step is how long a job that computes takes for perStep files, and pace how much faster it is than the line allows.
	step    = 40 * time.Millisecond
	perStep = 16
	pace    = 1.1
	most    = 1.02 // times the GETs without an order
)

// modes are the ways of a mount to know the orders.
var modes = [3]string{"none", "auto", "told"}

// row is a situation: cache and memory are parts of the dataset, such as "1/8".
type row struct {
	cache, memory string
	jobs          int
	reader        string // "fast", "paced" (it computes; the line is narrow), "kernel" (fast, with the kernel's page cache)
}

func (r row) String() string {
	return fmt.Sprintf("cache %s memory %s jobs %d %s", r.cache, r.memory, r.jobs, r.reader)
}

func rows() (all []row) {
	for _, reader := range []string{"fast", "paced", "kernel"} {
		for _, m := range []string{"1/2", "1/4", "1/50"} {
			for _, c := range []string{"0", "1/8", "1/2", "9/8"} {
				for jobs := 1; jobs <= 3; jobs++ {
					all = append(all, row{c, m, jobs, reader})
				}
			}
		}
	}
	return all
}

// part is the value of a row's cache or memory.
func part(s string) float64 {
	var a, b float64 = 0, 1
	_, _ = fmt.Sscanf(s, "%g/%g", &a, &b) // rows has made it
	return a / b
}

// dataset has files of such a size that the memory is the row's part of all.
func (r row) dataset() testbed.Dataset {
	return testbed.Dataset{Name: "memory", Samples: files, Size: int64(data/part(r.memory)) / files}
}

// result is what jobs took: Gets are those by the end of each epoch.
type result struct {
	Seconds float64
	Gets    []int64
}

// Bench prints the GETs and seconds of three epochs, a line for each row that -rows matches.
func Bench(flags *flag.FlagSet) func(k *kit.Kit) error {
	pick := flags.String("rows", "fast", "`regexp` of rows, which are named cache C memory M jobs N READER with "+
		"C of 0, 1/8, 1/2, 9/8; M of 1/50, 1/4, 1/2; N of 1, 2, 3; READER of fast, paced, kernel")
	rounds := flags.Int("rounds", 1, "runs of each mode, in turns")
	return func(k *kit.Kit) (err error) {
		only, err := regexp.Compile(*pick)
		if err != nil {
			return err
		}
		bed, err := testbed.Start(k.Ctx, filepath.Join(k.Dir, "memory"), k.Shoal, k.Self, "s3proxy")
		if err != nil {
			return err
		}
		defer bed.Close()
		k.Header("Three epochs without an order, with inferred orders, and with told ones")
		k.Say("%d files, as large as the row's memory says; --memory %s, of which 36 MiB are for samples. The store is at %v. Each "+
			"job reads all files in its own torch order. GETs without hedges; medians of %d.\n", files, memory, latency, *rounds)
		k.Say("| cache | memory | jobs | reader | GETs none | auto | told | auto/none | told/none | at most %.2f "+
			"| s none | auto/none | told/none |\n%s", most, strings.Repeat("| --- ", 13)+"|")
		for _, r := range rows() {
			if only.MatchString(r.String()) {
				if err := r.measure(k, bed, *rounds); err != nil {
					return fmt.Errorf("%v: %w", r, err)
				}
			}
		}
		return os.RemoveAll(filepath.Join(bed.Dir, "cache"))
	}
}

// measure runs the modes in turns and prints the row.
func (r row) measure(k *kit.Kit, bed *testbed.Bed, rounds int) error {
	d, far := r.dataset(), proxy.Options{Latency: latency, Seed: 1}
	if r.reader == "paced" {
		far.Bandwidth = int64(float64(int64(r.jobs*perStep)*d.Size) / step.Seconds() / pace)
	}
	err := errors.Join(bed.Lay(k.Ctx, d, func(int, int) {}), bed.Far(k.Ctx, far))
	var gets, seconds [len(modes)][]float64
	for n := 0; n < rounds*len(modes) && err == nil; n++ {
		i := (n + n/len(modes)) % len(modes) // each round begins with another one
		var all, first result
		if all, first, err = r.run(k.Ctx, bed, modes[i]); err != nil {
			return fmt.Errorf("%s: %w", modes[i], err)
		}
		fmt.Fprintf(os.Stderr, "%v %s: %.1f s, GETs by the end of each epoch of the first job %d, and of all jobs %d\n", r,
			modes[i], all.Seconds, first.Gets, all.Gets)
		gets[i], seconds[i] = append(gets[i], float64(all.Gets[0])), append(seconds[i], all.Seconds)
	}
	var g, s [len(modes)]float64
	for i := range modes {
		g[i], s[i] = kit.Median(gets[i]), kit.Median(seconds[i])
	}
	if err == nil {
		k.Say("| %s | %s | %d | %s | %.0f | %.0f | %.0f | %.3f | %.3f | %s | %.1f | %.2f | %.2f |", r.cache, r.memory, r.jobs,
			r.reader, g[0], g[1], g[2], g[1]/g[0], g[2]/g[0], kit.Verdict(max(g[1], g[2]) <= most*g[0]), s[0], s[1]/s[0], s[2]/s[0])
	}
	return err
}

// run runs the jobs over a fresh mount.
func (r row) run(ctx context.Context, bed *testbed.Bed, mode string) (all, first result, err error) {
	cache, d := filepath.Join(bed.Dir, "cache"), r.dataset()
	if err := os.RemoveAll(cache); err != nil {
		return all, first, err
	}
	order := map[string]string{"none": "none", "auto": "auto", "told": "auto"}[mode]
	kernel := map[bool]string{true: "on", false: "off"}[r.reader == "kernel"]
	m, err := bed.Mount(ctx, d.Source(), "mnt", "--cache-dir", cache, "--memory", memory, "--samples", "*", "--order", order,
		"--kernel-cache", kernel, "--cache-size", daemon.CacheSize(part(r.cache), d.Bytes(), files))
	if err != nil {
		return all, first, err
	}
	defer func() { err = errors.Join(err, m.Close()) }()
	jobs, args := make([]result, r.jobs), make([][]string, r.jobs)
	for j := range jobs {
		if args[j], err = r.args(ctx, bed, m.Dir, mode, j); err != nil {
			return all, first, err
		}
	}
	g, gctx := errgroup.WithContext(ctx)
	k := kit.Kit{Ctx: gctx}
	for j := range jobs {
		g.Go(func() error { return k.Run(&jobs[j], "/usr/bin/python3", args[j]...) })
	}
	err = g.Wait()
	for _, one := range jobs {
		all.Seconds = max(all.Seconds, one.Seconds)
	}
	s, failed := testbed.ReadStats(m.Dir)
	all.Gets = []int64{s.GetRequests - s.Hedges.Sent}
	return all, jobs[0], errors.Join(err, failed)
}

// args are the arguments of a job.
func (r row) args(ctx context.Context, bed *testbed.Bed, mount, mode string, job int) ([]string, error) {
	args := []string{"-B", "lab/bench/memory/job.py", mount, "", "0"}
	if mode == "told" {
		args[3] = "job" + strconv.Itoa(job)
	}
	if r.reader == "paced" {
		args[4] = strconv.FormatFloat(step.Seconds(), 'f', -1, 64)
	}
	for e := range epochs {
		spec := fmt.Sprintf("torch:seed=%d,epoch=%d", 7+job, e)
		out, err := bed.Shoal(ctx, "order", spec, "--mount", mount, "--paths")
		list := filepath.Join(bed.Dir, fmt.Sprintf("order-%d-%d", job, e))
		if err = errors.Join(err, os.WriteFile(list, []byte(out), 0o644)); err != nil {
			return nil, err
		}
		args = append(args, list)
	}
	return args, nil
}
