// Command pairs compares two binaries, pair by pair, and writes lab/bench/results/pairs.md: the rate and the daemon's processor
// time a file of each situation that matters, as the ratio new/old with the 95% interval of its median.
//
//	cold     the order is known, the cache is empty, the store is 30 ms away, 8 readers
//	packed   the same from shards
//	sharing  two feeds with orders of their own on one daemon, whose cache is empty
//	warm     a mount whose cache is full, 8 readers
//	raw      batches of a feed, as stored
//	decoded  batches of a feed, RandomResizedCrop(224)
//
// Run it from the repository's root as root: go run ./lab/bench/pairs -old OTHER/bin/shoal
package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/shoalfs/shoal/lab/bench/kit"
	"golang.org/x/sync/errgroup"
)

const (
	source = "s3://photos/train"
	shards = "s3://photos/packed"
	cold   = "torch:seed=7"
)

// worse is how much more processor time a file may take.
const worse = 1.05

type bench struct {
	*kit.Kit
	sides [2]*side // old, new
	order string   // a file: paths in the order of the epoch
	files int
}

// side is one of the binaries, with a cache that stays warm.
type side struct {
	name, shoal string
	warm        *kit.Mount
	addr        string
	rate, cpu   map[string][]float64 // files/s; µs a file
}

// figures are what one run gave.
type figures struct{ files, seconds, cpu float64 }

func main() {
	old := flag.String("old", "", "the binary to compare with; -shoal is the new one")
	count := flag.Int("photos", 4096, "photographs")
	pairs := flag.Int("pairs", 15, "pairs of runs of each situation")
	only := flag.String("only", "cold,packed,sharing,warm,raw,decoded", "situations")
	kit.Main("lab/bench/results/pairs.md", func(k *kit.Kit) error {
		if *old == "" {
			return errors.New("-old names the binary to compare with")
		}
		b := &bench{Kit: k}
		for i, path := range []string{*old, k.Shoal} {
			b.sides[i] = &side{name: []string{"old", "new"}[i], shoal: path, rate: map[string][]float64{}, cpu: map[string][]float64{}}
		}
		return b.run(*count, *pairs, strings.Split(*only, ","))
	})
}

func (b *bench) run(count, pairs int, only []string) (err error) {
	photos, paths, err := b.Photos(count)
	if err != nil {
		return err
	}
	b.files = len(paths)
	server, far, err := b.Store(30 * time.Millisecond)
	if err != nil {
		return err
	}
	defer server.Stop()
	defer far.Stop()
	if _, err := server.Upload(b.Ctx, photos, "photos", "train", nil); err != nil {
		return err
	}
	if err := b.Run(nil, b.Shoal, "pack", source, shards, "--seed", "1"); err != nil {
		return err
	}
	b.Header("Two binaries, pair by pair")
	for _, s := range b.sides {
		version, _ := b.Command(s.shoal, "version").Output()
		b.Say("%s: %s", s.name, strings.TrimSpace(string(version)))
		if err := b.start(s); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, s.warm.Close()) }()
	}
	for pair := range pairs + 1 { // the first fills the caches, and does not count
		for _, what := range only {
			turn := slices.Clone(b.sides[:])
			if pair%2 == 1 { // who comes second finds the machine as the first has left it
				slices.Reverse(turn)
			}
			for _, s := range turn {
				f, err := b.measure(s, what)
				if err != nil {
					return fmt.Errorf("%s, %s: %w", what, s.name, err)
				}
				if pair > 0 {
					s.rate[what] = append(s.rate[what], f.files/f.seconds)
					s.cpu[what] = append(s.cpu[what], 1e6*f.cpu/f.files)
				}
			}
		}
		fmt.Fprintf(os.Stderr, "pair %d of %d\n", pair, pairs)
	}
	b.report(only)
	return nil
}

func (b *bench) report(only []string) {
	b.Say("\n%d photographs, %d pairs. The interval is that of the median of the pairs' ratios new/old, 95%%.\n", b.files, len(b.sides[0].rate[only[0]]))
	b.Say("| | files/s, old and new | ratio | interval | CPU a file, µs, old and new | ratio | interval | below %.2f |", worse)
	b.Say("| --- | ---: | ---: | --- | ---: | ---: | --- | --- |")
	for _, what := range only {
		old, now := b.sides[0], b.sides[1]
		rate, cpu := kit.Ratios(old.rate[what], now.rate[what]), kit.Ratios(old.cpu[what], now.cpu[what])
		rlo, rhi := kit.Interval(rate)
		clo, chi := kit.Interval(cpu)
		b.Say("| %s | %.0f %.0f | %.3f | %.3f–%.3f | %.1f %.1f | %.3f | %.3f–%.3f | %s |", what, kit.Median(old.rate[what]), kit.Median(now.rate[what]),
			kit.Median(rate), rlo, rhi, kit.Median(old.cpu[what]), kit.Median(now.cpu[what]), kit.Median(cpu), clo, chi, kit.Verdict(chi < worse))
	}
}

// start starts the daemon of the warm situations.
func (b *bench) start(s *side) (err error) {
	at := filepath.Join(b.Dir, "pairs-"+s.name)
	cache := filepath.Join(b.Dir, "cache-pairs-"+s.name)
	s.addr = "unix://" + at + ".sock"
	if err := errors.Join(os.RemoveAll(cache), os.MkdirAll(at, 0o755)); err != nil {
		return err
	}
	if err := b.Run(nil, s.shoal, "serve", source, "--listen", s.addr, "--mount", at, "--daemon", "--kernel-cache", "off",
		"--order", cold, "--cache-dir", cache); err != nil {
		return err
	}
	s.warm, err = b.Attach(at)
	return err
}

func (b *bench) measure(s *side, what string) (figures, error) {
	switch what {
	case "cold":
		return b.empty(s, source)
	case "packed":
		return b.empty(s, shards)
	case "sharing":
		return b.sharing(s)
	case "warm":
		list, err := b.list(s.warm)
		if err != nil {
			return figures{}, err
		}
		return b.cost(s.warm.PID, func() (float64, error) {
			r, err := b.Read(s.warm.Dir, list)
			return float64(r.Files), err
		})
	case "raw":
		return b.feed(s, "--epochs", "2")
	case "decoded":
		return b.feed(s, "--transform", "RandomResizedCrop(224)|uint8")
	}
	return figures{}, fmt.Errorf("no situation is called %q", what)
}

// cost measures what f reads.
func (b *bench) cost(pid int, f func() (files float64, err error)) (fig figures, err error) {
	cpu, begin := kit.CPU(pid), time.Now()
	fig.files, err = f()
	fig.seconds, fig.cpu = time.Since(begin).Seconds(), kit.CPU(pid)-cpu
	return fig, err
}

// feed consumes batches of the warm daemon.
func (b *bench) feed(s *side, flags ...string) (figures, error) {
	return b.cost(s.warm.PID, func() (float64, error) {
		var r struct{ Samples float64 }
		err := b.Run(&r, s.shoal, append([]string{"feed", s.addr, "--batch", "64", "--json"}, flags...)...)
		return r.Samples, err
	})
}

// fresh empties the cache directory of the cold situations.
func (b *bench) fresh() (string, error) {
	cache := filepath.Join(b.Dir, "cache-pairs")
	return cache, os.RemoveAll(cache)
}

// empty mounts over an empty cache directory and reads an epoch; the start counts.
func (b *bench) empty(s *side, source string) (fig figures, err error) {
	cache, err := b.fresh()
	if err != nil {
		return fig, err
	}
	k, begin := *b.Kit, time.Now()
	k.Shoal = s.shoal
	m, err := k.Mount(source, "mnt-pairs", "--cache-dir", cache, "--memory", "512MiB", "--kernel-cache", "off", "--order", cold)
	if err != nil {
		return fig, err
	}
	defer func() { err = errors.Join(err, m.Close()) }()
	list, err := b.list(m)
	if err != nil {
		return fig, err
	}
	r, err := b.Read(m.Dir, list)
	return figures{float64(r.Files), time.Since(begin).Seconds(), kit.CPU(m.PID)}, err
}

// sharing serves over an empty cache directory and has two trainers read an epoch each at the same time; the start counts.
func (b *bench) sharing(s *side) (fig figures, err error) {
	cache, err := b.fresh()
	if err != nil {
		return fig, err
	}
	at := filepath.Join(b.Dir, "mnt-pairs")
	addr, begin := "unix://"+at+".sock", time.Now()
	if err := b.Run(nil, s.shoal, "serve", source, "--listen", addr, "--mount", at, "--daemon", "--cache-dir", cache, "--memory", "512MiB"); err != nil {
		return fig, err
	}
	m, err := b.Attach(at)
	defer func() { err = errors.Join(err, m.Close()) }()
	if err != nil {
		return fig, err
	}
	var g errgroup.Group
	for seed := range 2 {
		g.Go(func() error {
			return b.Run(nil, s.shoal, "feed", addr, "--batch", "64", "--json", "--seed", strconv.Itoa(seed))
		})
	}
	err = g.Wait()
	return figures{float64(2 * b.files), time.Since(begin).Seconds(), kit.CPU(m.PID)}, err
}

// list returns the list of files in the order; it is made once.
func (b *bench) list(m *kit.Mount) (string, error) {
	if b.order == "" {
		out, err := b.Command(b.Shoal, "order", cold, "--mount", m.Dir, "--paths").Output()
		if err != nil {
			return "", fmt.Errorf("shoal order %s --mount %s --paths: %w", cold, m.Dir, err)
		}
		if b.order, err = b.List("pairs.txt", strings.Fields(string(out))); err != nil {
			return "", err
		}
	}
	return b.order, nil
}
