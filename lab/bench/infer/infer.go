// Package infer is the benchmark of that name.
package infer

import (
	"errors"
	"flag"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/shoalfs/shoal/lab/bench/kit"
)

type bench struct {
	*kit.Kit
	memory, python, only string
	photos, reps         int
}

const trainer = "lab/bench/infer/train.py"

// Bench measures a mount without --order, with real torch processes: the cold epoch of an unmodified ImageFolder training
// beside the same without an order and with the order told.
func Bench(flags *flag.FlagSet) func(k *kit.Kit) error {
	b := &bench{}
	flags.StringVar(&b.only, "only", "", "only the trainings whose name contains this")
	latency := flags.Duration("latency", 30*time.Millisecond, "median latency of the store")
	flags.IntVar(&b.photos, "photos", 8192, "photographs")
	flags.IntVar(&b.reps, "reps", 3, "runs of each side")
	flags.StringVar(&b.memory, "memory", "512MiB", "--memory of the daemon")
	flags.StringVar(&b.python, "python", "/usr/bin/python3", "interpreter with torch and torchvision")
	return func(k *kit.Kit) error {
		b.Kit = k
		return b.run(*latency)
	}
}

func (b *bench) run(latency time.Duration) error {
	version, err := b.Command(b.python, "-c", "import torch, torchvision; print('torch', torch.__version__, 'torchvision', torchvision.__version__)").Output()
	if err != nil {
		return fmt.Errorf("%s has no torch and torchvision: give -python another: %w", b.python, err)
	}
	if err := b.Stored(b.photos, latency); err != nil {
		return err
	}
	b.Header("A mount without --order")
	b.Say("%d photographs, %.1f KB each on average; the store at %s. %s. Trainers, daemon, proxy and S3 server share the cores.\n",
		b.Up.Files, b.KB(), latency, strings.TrimSpace(string(version)))
	return b.epochs()
}

// mount mounts with an empty cache.
func (b *bench) mount(order string) (*kit.Mount, error) {
	cache := filepath.Join(b.Dir, "cache-infer")
	if err := os.RemoveAll(cache); err != nil {
		return nil, err
	}
	return b.Mount(kit.Source, "mnt", "--cache-dir", cache, "--memory", b.memory, "--kernel-cache", "off", "--order", order)
}

// training is a way to train, with a process for each rank.
type training struct {
	name           string
	ranks, workers int
	args           []string
	headline       bool
}

// train runs all ranks and returns the seconds of the epoch, from the first rank's beginning to the
// last one's end, and the samples read in all.
func (b *bench) train(m *kit.Mount, t training) (seconds float64, samples int, err error) {
	ranks := make([]struct {
		Samples    int
		Begin, End float64
	}, t.ranks)
	group := filepath.Join(b.Dir, "group")
	if err := os.RemoveAll(group); err != nil {
		return 0, 0, err
	}
	var g errgroup.Group
	for i := range ranks {
		g.Go(func() error {
			args := []string{trainer, m.Dir, "--world", strconv.Itoa(t.ranks), "--rank", strconv.Itoa(i), "--group", group, "--workers", strconv.Itoa(t.workers)}
			return b.Run(&ranks[i], b.python, append(args, t.args...)...)
		})
	}
	err = g.Wait()
	begin, end := math.Inf(1), 0.0
	for _, r := range ranks {
		begin, end, samples = min(begin, r.Begin), max(end, r.End), samples+r.Samples
	}
	return end - begin, samples, err
}

// epochs compares cold epochs: without an order, inferred, told.
func (b *bench) epochs() error {
	b.Say("## Cold epoch, ImageFolder and DistributedSampler, its default seed\n")
	b.Say("Seconds from the first rank's start to the last one's end, workers' start included. With steps, the dataset's loader returns the file's size, as if there were cores enough to decode, and an accelerator takes its time for each batch of 32. Decoded: PIL, RandomResizedCrop(224), flip, ToTensor; the cores bound it.\n")
	b.Say("| training | --order | s, median | runs | beside none | beside told |")
	b.Say("| --- | --- | ---: | --- | ---: | ---: |")
	var verdicts []string
	for _, t := range []training{
		{"711 samples/s: 1 rank, 4 workers, steps of 45 ms", 1, 4, []string{"--step", "0.045"}, true},
		{"711 samples/s: 2 ranks, 2 workers each, steps of 90 ms", 2, 2, []string{"--step", "0.090"}, true},
		{"as fast as it goes: 1 rank, 4 workers, no steps", 1, 4, nil, false},
		{"decoded: 1 rank, 2 workers", 1, 2, []string{"--decode"}, false},
	} {
		if !strings.Contains(t.name, b.only) {
			continue
		}
		orders := []string{"none", "auto", "torch:seed=0"}
		took := map[string][]float64{}
		for rep := range b.reps {
			for _, spec := range orders {
				m, err := b.mount(spec)
				if err != nil {
					return err
				}
				seconds, samples, err := b.train(m, t)
				if err := errors.Join(err, m.Close()); err != nil {
					return fmt.Errorf("%s, --order %s: %w", t.name, spec, err)
				}
				if samples != b.photos {
					return fmt.Errorf("%s, --order %s: %d samples read of %d", t.name, spec, samples, b.photos)
				}
				took[spec] = append(took[spec], seconds)
				fmt.Fprintf(os.Stderr, "%s, run %d of %d, --order %s: %.1f s\n", t.name, rep+1, b.reps, spec, seconds)
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
	b.Say("")
	for _, v := range verdicts {
		b.Say("- %s", v)
	}
	return nil
}
