// Command auto measures what --order auto, the default, costs and brings beside a mount that was told, in
// interleaved pairs of cold mounts, and writes lab/bench/results/auto.md: a permutation that no seed of torch's gives
// beside --order none, and reading in sequence beside --order sequential. Run it from the repository's root as root:
// go run ./lab/bench/auto [-load 4]
package main

import (
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/shoalfs/shoal/lab/bench/kit"
)

// contest is what is read, and the order that auto is compared with.
type contest struct {
	name, told string
	shuffled   bool
	files      int     // that are read: about 5 s of them
	least      float64 // where the interval of the difference has to begin
}

func main() {
	pairs := flag.Int("pairs", 15, "pairs of each kind")
	load := flag.Int("load", 0, "busy loops beside")
	threads := flag.Int("threads", 4, "readers")
	only := flag.String("only", "", "only the kinds whose name contains this")
	latency := flag.Duration("latency", 30*time.Millisecond, "median latency of the store")
	shuffled := flag.Int("shuffled", 512, "files read in a permutation")
	sequential := flag.Int("sequential", 12288, "files read in sequence, of the same dataset")
	contests := func() []contest {
		return []contest{
			{"permutation", "none", true, *shuffled, -0.05},
			{"sequential", "sequential", false, *sequential, -0.10},
		}
	}
	kit.Main("lab/bench/results/auto.md", func(k *kit.Kit) error {
		paths, err := lay(k, max(*shuffled, *sequential))
		if err != nil {
			return err
		}
		server, far, err := k.Store(*latency)
		if err != nil {
			return err
		}
		defer server.Stop()
		defer far.Stop()
		if _, err := server.Upload(k.Ctx, filepath.Join(k.Dir, "pairs"), "pairs", "train", nil); err != nil {
			return err
		}
		stop, err := busy(k, *load)
		if err != nil {
			return err
		}
		defer stop()
		k.Header("What --order auto costs and brings")
		k.Say("%d files of 16 KB, %d reader threads, the store at %s, %d busy loops beside. Pairs of cold mounts, which of them is first alternates. The interval is of the mean of auto/told - 1 over the pairs, by bootstrap.\n", len(paths), *threads, *latency, *load)
		k.Say("| order | pairs | auto, files/s | told | files/s | mean difference | 95%% interval | target |")
		k.Say("| --- | ---: | ---: | --- | ---: | ---: | --- | --- |")
		for _, c := range contests() {
			if !strings.Contains(c.name, *only) {
				continue
			}
			if err := c.run(k, paths, *pairs, *threads); err != nil {
				return fmt.Errorf("%s: %w", c.name, err)
			}
		}
		return nil
	})
}

// run says how the contest ends.
func (c contest) run(k *kit.Kit, paths []string, pairs, threads int) error {
	var auto, told, diff []float64
	for i := range pairs {
		order := slices.Clone(paths)
		if c.shuffled { // another one each time, as numpy's unseeded generator has it
			rand.New(rand.NewPCG(uint64(i), 1)).Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
		}
		list, err := k.List("pairs.txt", order[:c.files])
		if err != nil {
			return err
		}
		specs := []string{"auto", c.told}
		if i%2 == 1 {
			slices.Reverse(specs)
		}
		rate := map[string]float64{}
		for _, spec := range specs {
			if rate[spec], err = read(k, list, spec, threads); err != nil {
				return fmt.Errorf("--order %s: %w", spec, err)
			}
		}
		fmt.Fprintf(os.Stderr, "%s, pair %d of %d: auto %.0f, %s %.0f files/s\n", c.name, i+1, pairs, rate["auto"], c.told, rate[c.told])
		auto, told, diff = append(auto, rate["auto"]), append(told, rate[c.told]), append(diff, rate["auto"]/rate[c.told]-1)
	}
	lo, hi := interval(diff)
	k.Say("| %s | %d | %.0f | %s | %.0f | %+.1f%% | %+.1f%% to %+.1f%% | above %+.0f%%: %s |",
		c.name, pairs, kit.Median(auto), c.told, kit.Median(told), 100*mean(diff), 100*lo, 100*hi, 100*c.least, kit.Verdict(lo > c.least))
	return nil
}

// read reads the listed files through a cold mount and returns the files a second.
func read(k *kit.Kit, list, spec string, threads int) (float64, error) {
	cache := filepath.Join(k.Dir, "cache-pairs")
	if err := os.RemoveAll(cache); err != nil {
		return 0, err
	}
	m, err := k.Mount("s3://pairs/train", "mnt", "--cache-dir", cache, "--memory", "512MiB", "--kernel-cache", "off", "--order", spec)
	if err != nil {
		return 0, err
	}
	r, err := k.Read(m.Dir, list, "-threads", strconv.Itoa(threads))
	return r.Rate, errors.Join(err, m.Close())
}

// interval returns the 95% interval of the mean, by bootstrap.
func interval(v []float64) (lo, hi float64) {
	rng := rand.New(rand.NewPCG(1, 1))
	means := make([]float64, 10_000)
	draw := make([]float64, len(v))
	for i := range means {
		for j := range draw {
			draw[j] = v[rng.IntN(len(v))]
		}
		means[i] = mean(draw)
	}
	slices.Sort(means)
	return means[len(means)/40], means[len(means)-1-len(means)/40]
}

func mean(v []float64) (sum float64) {
	for _, x := range v {
		sum += x / float64(len(v))
	}
	return sum
}

// lay makes the files, in 16 class folders, and returns their paths.
func lay(k *kit.Kit, count int) ([]string, error) {
	dir := filepath.Join(k.Dir, "pairs")
	data := make([]byte, 16<<10)
	for i := range count {
		path := filepath.Join(dir, fmt.Sprintf("class%02d", i*16/count), fmt.Sprintf("%06d.jpg", i))
		if _, err := os.Stat(path); err == nil {
			continue
		}
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return nil, err
		}
		copy(data, strconv.Itoa(i))
		if err := os.WriteFile(path, data, 0o644); err != nil {
			return nil, err
		}
	}
	return kit.Walk(dir)
}

// busy starts so many loops that each keep a core busy, until stop.
func busy(k *kit.Kit, n int) (stop func(), err error) {
	var all []*exec.Cmd
	stop = func() {
		for _, c := range all {
			_ = c.Process.Kill()
			_ = c.Wait()
		}
	}
	for range n {
		c := exec.CommandContext(k.Ctx, "sh", "-c", "while :; do :; done")
		if err := c.Start(); err != nil {
			stop()
			return nil, err
		}
		all = append(all, c)
	}
	return stop, nil
}
