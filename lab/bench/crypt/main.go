// Command crypt measures what encryption at rest costs, and writes lab/bench/results/crypt.md: the same photographs of
// 63 KB in a cache in clear and in one that is encrypted, read in turns
//
//	by 8 threads through a mount, the segments in the page cache, and the disk's bytes cold
//	by a feed of raw samples, and of decoded ones (RandomResizedCrop(224), flip)
//
// Run it from the repository's root as root: go run ./lab/bench/crypt
package main

import (
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"

	"github.com/shoalfs/shoal/lab/bench/kit"
)

// target is the share of the rate in clear that an encrypted cache should have.
const target = 0.9

// side is a way to keep the cache.
type side struct {
	name  string
	flags []string
}

// workload is a way to read it; values[i] are the rates of side i, and micros[i] the CPU of a sample.
type workload struct {
	name   string
	run    func(s side) (rate, micros float64, err error)
	values [2][]float64
	micros [2][]float64
}

type bench struct {
	*kit.Kit
	source, list string
	files        int
}

func main() {
	count := flag.Int("photos", 4096, "photographs")
	reps := flag.Int("reps", 7, "runs of each side")
	kit.Main("lab/bench/results/crypt.md", func(k *kit.Kit) error {
		b := &bench{Kit: k}
		return b.run(*count, *reps)
	})
}

func (b *bench) run(count, reps int) error {
	photos, paths, err := b.Photos(count)
	if err != nil {
		return err
	}
	b.source, b.files = "file://"+photos, len(paths)
	rand.New(rand.NewPCG(1, 1)).Shuffle(len(paths), func(i, j int) { paths[i], paths[j] = paths[j], paths[i] })
	if b.list, err = b.List("crypt.txt", paths); err != nil {
		return err
	}
	key := filepath.Join(b.Dir, "crypt.key")
	if err := os.WriteFile(key, []byte(strings.Repeat("5eed", 16)), 0o600); err != nil {
		return err
	}
	sides := [2]side{
		{"clear", []string{"--cache-dir", filepath.Join(b.Dir, "cache-clear")}},
		{"encrypted", []string{"--cache-dir", filepath.Join(b.Dir, "cache-crypt"), "--encryption-key-file", key}},
	}
	b.Header("Encryption at rest: an encrypted cache beside one in clear")
	b.Say("%d photographs. Readers and daemon share the cores. Every byte was compared first.\n", len(paths))
	for _, s := range sides {
		if err := b.Run(nil, b.Shoal, append([]string{"warm", b.source, "--refresh"}, s.flags...)...); err != nil {
			return err
		}
		if _, _, err := b.mount(s, "-verify", photos); err != nil {
			return err
		}
	}
	workloads := []*workload{
		{name: "mount, segments in the page cache", run: func(s side) (float64, float64, error) { return b.mount(s) }},
		{name: "feed, raw", run: func(s side) (float64, float64, error) { return b.feed(s) }},
		{name: "feed, decoded", run: func(s side) (float64, float64, error) {
			return b.feed(s, "--transform", "RandomResizedCrop(224)|RandomHorizontalFlip()|uint8|nhwc")
		}},
		// The last one, since it leaves nothing of either side in the page cache but what it read itself.
		{name: "mount, page cache cold", run: func(s side) (float64, float64, error) { return b.mount(s, "-drop-caches") }},
	}
	for rep := range reps {
		for _, s := range sides {
			if _, _, err := b.mount(s); err != nil { // back into the page cache
				return err
			}
		}
		for _, w := range workloads {
			for i, s := range sides {
				rate, micros, err := w.run(s)
				if err != nil {
					return fmt.Errorf("%s, %s: %w", w.name, s.name, err)
				}
				w.values[i], w.micros[i] = append(w.values[i], rate), append(w.micros[i], micros)
			}
		}
		fmt.Fprintf(os.Stderr, "round %d of %d\n", rep+1, reps)
	}
	b.Say("| | clear, files/s | encrypted, files/s | ratio of medians | rounds | CPU µs a file | target %.2f |", target)
	b.Say("| --- | ---: | ---: | ---: | --- | --- | --- |")
	for _, w := range workloads {
		clear, crypt := kit.Median(w.values[0]), kit.Median(w.values[1])
		var rounds []float64
		for i := range w.values[0] {
			rounds = append(rounds, w.values[1][i]/w.values[0][i])
		}
		b.Say("| %s | %.0f | %.0f | %.2f | %s | %.0f, %.0f | %s |", w.name, clear, crypt, crypt/clear, kit.Numbers(rounds, 2),
			kit.Median(w.micros[0]), kit.Median(w.micros[1]), kit.Verdict(crypt/clear >= target))
	}
	b.Say("\nAll runs, files/s, in clear and encrypted:\n")
	for _, w := range workloads {
		b.Say("- %s: %s; %s", w.name, kit.Numbers(w.values[0], 0), kit.Numbers(w.values[1], 0))
	}
	return nil
}

// mount reads the mount once. Nothing may come from the source.
func (b *bench) mount(s side, flags ...string) (rate, micros float64, err error) {
	m, err := b.Mount(b.source, "mnt", append(s.flags, "--kernel-cache", "off", "--order", "none")...)
	if err != nil {
		return 0, 0, err
	}
	defer func() { err = errors.Join(err, m.Close()) }()
	before := kit.CPU(m.PID)
	r, err := b.Read(m.Dir, b.list, flags...)
	if err != nil {
		return 0, 0, err
	}
	cpu := kit.CPU(m.PID) - before
	st, err := m.Stats()
	if err == nil && st.Misses > 0 {
		err = fmt.Errorf("%d files came from the source", st.Misses)
	}
	return r.Rate, 1e6 * cpu / float64(r.Files), err
}

// feed takes one epoch.
func (b *bench) feed(s side, flags ...string) (rate, micros float64, err error) {
	addr := "unix://" + filepath.Join(b.Dir, "crypt.sock")
	mnt := filepath.Join(b.Dir, "mnt")
	if err := b.Run(nil, b.Shoal, append([]string{"serve", b.source, "--listen", addr, "--mount", mnt, "--daemon", "--order", "none"}, s.flags...)...); err != nil {
		return 0, 0, err
	}
	m, err := b.Attach(mnt)
	if err != nil {
		return 0, 0, err
	}
	defer func() { err = errors.Join(err, m.Close()) }()
	var r struct {
		Samples int     `json:"samples"`
		Rate    float64 `json:"samples_per_second"`
	}
	before := kit.CPU(m.PID)
	if err := b.Run(&r, b.Shoal, append([]string{"feed", addr, "--batch", "64", "--json"}, flags...)...); err != nil {
		return 0, 0, err
	}
	cpu := kit.CPU(m.PID) - before
	st, err := m.Stats()
	switch {
	case err == nil && st.Misses > 0:
		err = fmt.Errorf("%d files came from the source", st.Misses)
	case err == nil && r.Samples != b.files:
		err = fmt.Errorf("%d of %d samples came", r.Samples, b.files)
	}
	return r.Rate, 1e6 * cpu / float64(b.files), err
}
