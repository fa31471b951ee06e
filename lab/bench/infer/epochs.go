package main

import (
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"

	"github.com/shoalfs/shoal/lab/bench/kit"
)

// training is a way to train: the ranks of a world that run here, one process each.
type training struct {
	name    string
	world   int
	ranks   []int
	workers int
	epochs  int
	args    []string
}

// trained is what a rank's process prints.
type trained struct {
	Samples int       `json:"samples"`
	Begins  []float64 `json:"begins"`
	Ends    []float64 `json:"ends"`
}

// train runs all ranks and returns the seconds of each epoch, from the first rank's beginning to the
// last one's end, and the samples read in all.
func (b *bench) train(m *kit.Mount, t training) (seconds []float64, samples int, err error) {
	ranks := make([]trained, len(t.ranks))
	group := filepath.Join(b.Dir, "group")
	if err := os.RemoveAll(group); err != nil {
		return nil, 0, err
	}
	errs := make([]error, len(t.ranks))
	var wg sync.WaitGroup
	for i, rank := range t.ranks {
		wg.Go(func() {
			args := []string{trainer, m.Dir, "--world", strconv.Itoa(t.world), "--rank", strconv.Itoa(rank),
				"--workers", strconv.Itoa(t.workers), "--epochs", strconv.Itoa(t.epochs),
				"--group", group, "--member", strconv.Itoa(i), "--members", strconv.Itoa(len(t.ranks))}
			errs[i] = b.Run(&ranks[i], b.python, append(args, t.args...)...)
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		return nil, 0, err
	}
	for e := range t.epochs {
		begin, end := math.Inf(1), 0.0
		for _, r := range ranks {
			begin, end = min(begin, r.Begins[e]), max(end, r.Ends[e])
		}
		seconds = append(seconds, end-begin)
	}
	for _, r := range ranks {
		samples += r.Samples
	}
	return seconds, samples, nil
}

// epochs compares cold epochs: without an order, inferred, told.
func (b *bench) epochs() error {
	b.Say("## Cold epoch, ImageFolder and DistributedSampler, its default seed\n")
	b.Say("Seconds from the first rank's start to the last one's end, workers' start included. With steps, the dataset's loader returns the file's size, as if there were cores enough to decode, and an accelerator takes its time for each batch of 32. Decoded: PIL, RandomResizedCrop(224), flip, ToTensor; the cores bound it.\n")
	b.Say("| training | --order | s, median | runs | beside none | beside told |")
	b.Say("| --- | --- | ---: | --- | ---: | ---: |")
	var verdicts []string
	both := []int{0, 1}
	for _, t := range []struct {
		training
		headline bool
	}{
		{training{name: "711 samples/s: 1 rank, 4 workers, steps of 45 ms", world: 1, ranks: both[:1], workers: 4, args: []string{"--step", "0.045"}}, true},
		{training{name: "711 samples/s: 2 ranks, 2 workers each, steps of 90 ms", world: 2, ranks: both, workers: 2, args: []string{"--step", "0.090"}}, true},
		{training{name: "as fast as it goes: 1 rank, 4 workers, no steps", world: 1, ranks: both[:1], workers: 4}, false},
		{training{name: "decoded: 1 rank, 2 workers", world: 1, ranks: both[:1], workers: 2, args: []string{"--decode"}}, false},
	} {
		if !strings.Contains(t.name, b.only) {
			continue
		}
		t.epochs = 1
		t.args = append(t.args, "--sampler", "distributed")
		orders := []string{"none", "auto", "torch:seed=0"}
		took := map[string][]float64{}
		for rep := range b.reps {
			for _, spec := range orders {
				m, err := b.mount(photosSource, "cache-infer", spec, true)
				if err != nil {
					return err
				}
				seconds, samples, err := b.train(m, t.training)
				if err := errors.Join(err, m.Close()); err != nil {
					return fmt.Errorf("%s, --order %s: %w", t.name, spec, err)
				}
				if samples != b.photos {
					return fmt.Errorf("%s, --order %s: %d samples read of %d", t.name, spec, samples, b.photos)
				}
				took[spec] = append(took[spec], seconds[0])
				fmt.Fprintf(os.Stderr, "%s, run %d of %d, --order %s: %.1f s\n", t.name, rep+1, b.reps, spec, seconds[0])
			}
		}
		none, told := kit.Median(took["none"]), kit.Median(took["torch:seed=0"])
		for _, spec := range orders {
			s := kit.Median(took[spec])
			b.Say("| %s | %s | %.1f | %s | %.1f× | %.2f |", t.name, spec, s, kit.Numbers(took[spec], 1), none/s, s/told)
		}
		if !t.headline {
			continue
		}
		auto := kit.Median(took["auto"])
		verdicts = append(verdicts, fmt.Sprintf("%s: %.1f times none (at least 5: %s), %.0f%% longer than told (at most 10%%: %s).",
			t.name, none/auto, kit.Verdict(none >= 5*auto), 100*(auto/told-1), kit.Verdict(auto <= 1.1*told)))
	}
	b.sayAll(verdicts)
	return nil
}
