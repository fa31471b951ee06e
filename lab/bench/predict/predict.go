// Package predict is the benchmark of that name.
package predict

import (
	"flag"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/shoalfs/shoal/internal/progress"
	"github.com/shoalfs/shoal/lab/bench/kit"
	"github.com/shoalfs/shoal/lab/rig/testbed"
)

// target is how far a prediction may be from the measurement, in points of utilisation.
const target = 2.0

// record is a measurement, or a calibration, as it is kept.
type record struct {
	Work      *kit.Work   `json:"work,omitempty"`   // of a calibration
	Epochs    []kit.Epoch `json:"epochs,omitempty"` // those that are compared
	Bytes     int64       `json:"dataset_bytes,omitempty"`
	Kept      float64     `json:"kept,omitempty"`
	Bandwidth float64     `json:"bandwidth,omitempty"`
	Busy      float64     `json:"busy,omitempty"`
	CPU       float64     `json:"cpu,omitempty"`
}

type bench struct {
	*kit.Kit
	bed  *testbed.Bed
	done *kit.Records[record]
	bars *progress.Printer
	// random says how to draw the same configurations again; empty where none are.
	random string
}

// Bench puts what `shoal plan` predicts beside measurements: for each configuration of a grid the utilisation of emulated
// accelerators over a real mount, and what plan says of the same source with the same figures.
//
// Measurements are kept as lines of JSON in the work folder and not made again, so that an interrupted run
// goes on, and a changed model is compared with the same measurements. -fresh begins anew. -random 12 adds
// configurations that nobody has chosen; the report names the seed that draws them again.
func Bench(flags *flag.FlagSet) func(k *kit.Kit) error {
	random := flags.Int("random", 0, "in addition so many configurations drawn at random from the ranges of the grid")
	seed := flags.Uint64("seed", uint64(time.Now().Unix()), "of -random; the default is the time")
	quick := flags.Bool("quick", false, "a third of the configurations")
	fresh := flags.Bool("fresh", false, "forget the measurements of the work folder")
	only := flags.String("only", "", "only configurations whose name contains this; their measurements are made again")
	measured := flags.Bool("measured", false, "measure nothing: predict again what was measured")
	return func(k *kit.Kit) error {
		b := &bench{Kit: k, bars: progress.New(os.Stderr)}
		if *random > 0 {
			b.random = fmt.Sprintf("`-random %d -seed %d` draws the last %[1]d configurations again.\n", *random, *seed)
		}
		if *only != "" {
			k.Out = ""
		}
		return b.run(append(grid(*quick), drawn(*random, *seed)...), *fresh, *measured, *only)
	}
}

func (b *bench) run(all []testbed.Config, fresh, measured bool, only string) (err error) {
	if b.done, err = kit.OpenRecords[record](filepath.Join(b.Dir, "measured.jsonl"), fresh); err != nil {
		return err
	}
	var list []testbed.Config
	for _, c := range all {
		if _, ok := b.done.Get(name(c)); strings.Contains(name(c), only) && (ok || !measured) {
			list = append(list, c)
		}
	}
	b.Header("Predicted beside measured")
	if b.random != "" {
		b.Say("%s", b.random)
	}
	if b.bed, err = testbed.Start(b.Ctx, filepath.Join(b.Dir, "bed"), b.Shoal, b.Self, "s3proxy"); err != nil {
		return err
	}
	defer b.bed.Close()
	works := map[string]kit.Work{}
	bar := b.bars.Start("configurations", len(list))
	for i, c := range list {
		w, err := b.calibrate(c)
		if err == nil {
			works[c.Dataset.Prefix()] = w
			err = b.measure(c, only != "" && !measured, bar)
		}
		if err != nil {
			bar.Done("failed")
			return fmt.Errorf("%s: %w", name(c), err)
		}
		bar.Set(i+1, len(list))
	}
	bar.Done("")
	return b.report(list, works)
}

// calibrate returns what the machine itself takes for a dataset's samples.
func (b *bench) calibrate(c testbed.Config) (kit.Work, error) {
	key := "calibration " + c.Dataset.Prefix()
	if rec, ok := b.done.Get(key); ok {
		return *rec.Work, nil
	}
	w, err := kit.Calibrate(b.Ctx, b.bed, c)
	if err != nil {
		return w, err
	}
	return w, b.done.Add(key, record{Work: &w})
}

func (b *bench) measure(c testbed.Config, again bool, bar *progress.Bar) error {
	if _, ok := b.done.Get(name(c)); ok && !again {
		return nil
	}
	r, err := b.bed.Measure(b.Ctx, c, func(step string, _, _ int) { bar.Note(step + ": " + name(c)) })
	if err != nil {
		return err
	}
	rec := record{Bytes: r.Bytes, Kept: r.Kept, Bandwidth: r.Bandwidth, Busy: r.Busy, CPU: r.CPU}
	for _, e := range r.Epochs[1:] {
		whole := kit.Whole(e.Epoch)
		rec.Epochs = append(rec.Epochs, kit.Epoch{Seconds: whole.Seconds, Compute: whole.Compute, Requests: float64(e.Requests), Bytes: float64(e.RemoteBytes)})
	}
	return b.done.Add(name(c), rec)
}

func (b *bench) report(list []testbed.Config, works map[string]kit.Work) error {
	b.Say("Emulated accelerators read a real mount; utilisation of the %d epochs after the first, the waits for their first batches", epochs-1)
	b.Say("included, and that of the least and of the most busy of them; GETs and MB are of one epoch. `cached` is what lay on disk at")
	b.Say("the start, `bandwidth` a multiple of what the rest needs. `busy` is the part of the cores that was busy, `rig` what store, proxy,")
	b.Say("daemon and accelerators took of it: a row near 100%% is bound by the machine, not by what is modelled.\n")
	b.Say("| samples | layout | cached | bandwidth | latency | connections | accelerators × batch, step | order | measured | single epochs | predicted | points | GETs | predicted | MB | predicted | rig | busy |")
	b.Say("| --- | --- | ---: | ---: | ---: | ---: | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
	var off []float64
	within := 0
	for _, c := range list {
		m, _ := b.done.Get(name(c))
		p, err := kit.Predict(b.Ctx, b.bed, c, testbed.Result{Bytes: m.Bytes, Kept: m.Kept, Bandwidth: m.Bandwidth}, works[c.Dataset.Prefix()])
		if err != nil {
			return fmt.Errorf("%s: %w", name(c), err)
		}
		predicted, measured := kit.Mean(p[1:]), kit.Mean(m.Epochs)
		d := 100 * (predicted.Utilisation() - measured.Utilisation())
		least, most := 1.0, 0.0
		for _, e := range m.Epochs {
			least, most = min(least, e.Utilisation()), max(most, e.Utilisation())
		}
		off = append(off, math.Abs(d))
		mark := ""
		if math.Abs(d) <= target {
			within++
		} else {
			mark = " **!**"
		}
		layout := "loose"
		if c.Packed {
			layout = "packed"
		}
		b.Say("| %d × %s | %s | %.3f | %s | %v | %d | %d × %d, %v | %s | %.1f%% | %.1f to %.1f%% | %.1f%% | %+.1f%s | %.0f | %.0f | %.0f | %.0f | %.0f%% | %.0f%% |", c.Dataset.Samples, kib(c.Dataset.Size), layout,
			m.Kept, speed(c), c.Latency, c.Connections, c.Job.Accelerators, c.Job.Batch, c.Job.Step, c.Order, 100*measured.Utilisation(), 100*least, 100*most, 100*predicted.Utilisation(), d, mark,
			measured.Requests, predicted.Requests, measured.Bytes/1e6, predicted.Bytes/1e6, 100*m.CPU, 100*m.Busy)
	}
	b.Say("\n%d configurations: %d within %g points, median %.2f, max %.2f: target %s.", len(list), within, target, kit.Median(off), slices.Max(append(off, 0)), kit.Verdict(within == len(list)))
	b.Say("\nThe machine's own time, which the model is given: measured once a dataset, with nothing else limited.\n")
	b.Say("| dataset | a sample read from disk, one worker | a request, all processes together |")
	b.Say("| --- | ---: | ---: |")
	for _, c := range list {
		if w, ok := works[c.Dataset.Prefix()]; ok {
			b.Say("| %d × %s | %.2f ms | %.2f ms |", c.Dataset.Samples, kib(c.Dataset.Size), 1e3*w.Read, 1e3*w.Fetch)
			delete(works, c.Dataset.Prefix())
		}
	}
	return nil
}
