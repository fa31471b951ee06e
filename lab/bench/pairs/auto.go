package pairs

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

// Auto measures what --order auto, the default, costs and brings beside a mount that was told, in pairs of cold mounts: a
// permutation that no seed of torch's gives beside --order none, and reading in sequence beside --order sequential.
func Auto(flags *flag.FlagSet) func(k *kit.Kit) error {
	pairs := flags.Int("pairs", 15, "pairs of each kind")
	load := flags.Int("load", 0, "busy loops beside")
	threads := flags.Int("threads", 4, "readers")
	only := flags.String("only", "", "only the kinds whose name contains this")
	latency := flags.Duration("latency", 30*time.Millisecond, "median latency of the store")
	shuffled := flags.Int("shuffled", 512, "files read in a permutation")
	sequential := flags.Int("sequential", 12288, "files read in sequence, of the same dataset")
	return func(k *kit.Kit) error {
		dir := filepath.Join(k.Dir, "pairs")
		paths, err := small(dir, max(*shuffled, *sequential))
		if err != nil {
			return err
		}
		if err := k.Store(*latency); err != nil {
			return err
		}
		if _, err := k.Server.Upload(k.Ctx, dir, "pairs", "train", nil); err != nil {
			return err
		}
		stop, err := busy(k, *load)
		defer stop()
		if err != nil {
			return err
		}
		k.Header("What --order auto costs and brings")
		k.Say("%d files of 16 KB, %d reader threads, the store at %s, %d busy loops beside. Pairs of cold mounts, which of them is first alternates. The interval is of the mean of auto/told - 1 over the pairs, by bootstrap.\n", len(paths), *threads, *latency, *load)
		k.Say("| order | pairs | auto, files/s | told | files/s | mean difference | 95%% interval | target |")
		k.Say("| --- | ---: | ---: | --- | ---: | ---: | --- | --- |")
		for _, c := range []contest{{"permutation", "none", *shuffled, -0.05}, {"sequential", "sequential", *sequential, -0.10}} {
			if !strings.Contains(c.name, *only) {
				continue
			}
			if err := c.run(k, paths, *pairs, *threads); err != nil {
				return err
			}
		}
		return nil
	}
}

// contest is what is read, and the order that auto is compared with.
type contest struct {
	name, told string
	files      int     // that are read: about 5 s of them
	least      float64 // where the interval of the difference has to begin
}

// run says how the contest ends.
func (c contest) run(k *kit.Kit, paths []string, pairs, threads int) error {
	sides := [2]*side{{Kit: k, name: c.told}, {Kit: k, name: "auto"}}
	list, reads := "", 0
	read := func(s *side) (cost kit.Cost, err error) {
		if reads++; reads%2 == 1 { // a pair begins
			order := slices.Clone(paths)
			if c.name == "permutation" { // another one each time, as numpy's unseeded generator has it
				rand.New(rand.NewPCG(uint64(reads/2), 1)).Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
			}
			if list, err = k.List("pairs.txt", order[:c.files]); err != nil {
				return cost, err
			}
		}
		cache := filepath.Join(k.Dir, "cache-pairs")
		if err := os.RemoveAll(cache); err != nil {
			return cost, err
		}
		m, err := k.Mount("s3://pairs/train", "mnt", "--cache-dir", cache, "--memory", "512MiB", "--kernel-cache", "off", "--order", s.name)
		if err != nil {
			return cost, err
		}
		cost, err = m.Cost(func() (int, float64, error) {
			r, err := k.Read(m.Dir, list, "-threads", strconv.Itoa(threads))
			return r.Files, r.Seconds, err
		})
		return cost, errors.Join(err, m.Close())
	}
	if err := take(sides, []situation{{c.name, read}}, pairs); err != nil {
		return err
	}
	diff := ratios(sides, c.name)
	for i := range diff {
		diff[i]--
	}
	lo, hi := interval(diff)
	k.Say("| %s | %d | %.0f | %s | %.0f | %+.1f%% | %+.1f%% to %+.1f%% | above %+.0f%%: %s |", c.name, pairs, kit.Median(sides[1].rate[c.name]), c.told,
		kit.Median(sides[0].rate[c.name]), 100*mean(diff), 100*lo, 100*hi, 100*c.least, kit.Verdict(lo > c.least))
	return nil
}

// interval returns the 95% interval of the mean, by bootstrap.
func interval(v []float64) (lo, hi float64) {
	rng := rand.New(rand.NewPCG(1, 1))
	means, draw := make([]float64, 10_000), make([]float64, len(v))
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

// small makes files of 16 KB, in 16 class folders, and returns their paths below dir.
func small(dir string, count int) ([]string, error) {
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
	for range n {
		c := exec.CommandContext(k.Ctx, "sh", "-c", "while :; do :; done")
		if err = c.Start(); err != nil {
			break
		}
		all = append(all, c)
	}
	return func() {
		for _, c := range all {
			_ = c.Process.Kill()
			_ = c.Wait()
		}
	}, err
}
