package main

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/shoalfs/shoal/lab/bench/kit"
)

// locks measures how soon each kind of training is recognised.
func (b *bench) locks() error {
	small := func() uint32 { return rand.Uint32N(1000) }
	b.Say("## Reads and seconds until the order is known\n")
	b.Say("%d small files, two epochs, cold. Reads and seconds count from the epoch's first open, of all ranks together; a lock is seen up to %v late. `lost` is how often a lock was given up within an epoch, in all runs.\n", b.tiny, pollEvery)
	b.Say("| training | epoch 0: reads | s | epoch 1: reads | s | lost | found, last run |")
	b.Say("| --- | --- | --- | --- | --- | ---: | --- |")
	var verdicts []string
	four := []int{0, 1, 2, 3}
	for _, k := range []struct {
		training
		seed  func() uint32 // nil: none is given
		whole bool          // only a search of all seeds can find it
	}{
		{training{name: "DistributedSampler, default seed", world: 1, ranks: four[:1], workers: 4, args: []string{"--sampler", "distributed"}}, nil, false},
		{training{name: "DistributedSampler, seed below 1000, 4 ranks here", world: 4, ranks: four, workers: 2, args: []string{"--sampler", "distributed"}}, small, false},
		{training{name: "DistributedSampler, seed below 1000, ranks 2 and 3 of 4 here", world: 4, ranks: four[2:], workers: 2, args: []string{"--sampler", "distributed"}}, small, false},
		{training{name: "DistributedSampler, seed below 1000, never set_epoch", world: 1, ranks: four[:1], workers: 4, args: []string{"--sampler", "distributed", "--no-set-epoch"}}, small, false},
		{training{name: "DistributedSampler, seed below 1000, persistent workers", world: 1, ranks: four[:1], workers: 4, args: []string{"--sampler", "distributed", "--persistent"}}, small, false},
		{training{name: "DataLoader(shuffle=True), manual_seed below 1000", world: 1, ranks: four[:1], workers: 4, args: []string{"--sampler", "loader"}}, small, false},
		{training{name: "DataLoader(shuffle=True), manual_seed below 1000, persistent workers", world: 1, ranks: four[:1], workers: 4, args: []string{"--sampler", "loader", "--persistent"}}, small, false},
		{training{name: "DataLoader(shuffle=True, generator), seed below 1000", world: 1, ranks: four[:1], workers: 4, args: []string{"--sampler", "generator"}}, small, false},
		{training{name: "DistributedSampler, any seed of 32 bits", world: 1, ranks: four[:1], workers: 4, args: []string{"--sampler", "distributed"}}, rand.Uint32, true},
		{training{name: "DistributedSampler, any seed of 32 bits, 2 ranks here", world: 2, ranks: four[:2], workers: 2, args: []string{"--sampler", "distributed"}}, rand.Uint32, true},
		{training{name: "DataLoader(shuffle=True), unseeded", world: 1, ranks: four[:1], workers: 4, args: []string{"--sampler", "loader"}}, nil, true},
	} {
		if !strings.Contains(k.name, b.only) {
			continue
		}
		k.epochs = 2
		var reads, seconds [2][]float64
		lost, spec := 0, ""
		for rep := range b.lockReps {
			t := k.training
			if k.seed != nil {
				t.args = append(slices.Clone(t.args), "--seed", strconv.FormatUint(uint64(k.seed()), 10))
			}
			m, err := b.mount(tinySource, "cache-tiny", "auto", true)
			if err != nil {
				return err
			}
			w := watch(m)
			_, samples, err := b.train(m, t)
			all, watchErr := w.end()
			if err := errors.Join(err, watchErr, m.Close()); err != nil {
				return fmt.Errorf("%s: %w", t.name, err)
			}
			for e := range 2 {
				l := epochLock(all, int64(e*samples/2), int64((e+1)*samples/2))
				reads[e], seconds[e] = append(reads[e], l.reads), append(seconds[e], l.seconds)
				lost += l.lost
				if e == 0 {
					spec = l.spec
				}
			}
			fmt.Fprintf(os.Stderr, "%s, run %d of %d: %s: epoch 0 known after %.0f reads, %.2f s; epoch 1 after %.0f, %.2f s\n",
				t.name, rep+1, b.lockReps, spec, reads[0][rep], seconds[0][rep], reads[1][rep], seconds[1][rep])
		}
		b.Say("| %s | %s | %s | %s | %s | %d | %s |", k.name, kit.Numbers(reads[0], 0), kit.Numbers(seconds[0], 2), kit.Numbers(reads[1], 0), kit.Numbers(seconds[1], 2), lost, spec)
		if worst := slices.Max(reads[0]); k.whole {
			verdicts = append(verdicts, fmt.Sprintf("%s: at most %.0f s (at most 60: %s).", k.name, slices.Max(seconds[0]), kit.Verdict(slices.Max(seconds[0]) <= 60)))
		} else {
			verdicts = append(verdicts, fmt.Sprintf("%s: at most %.0f reads (at most 64: %s).", k.name, worst, kit.Verdict(worst <= 64)))
		}
	}
	b.sayAll(verdicts)
	return nil
}
