// Package pairs is the benchmark in which two sides take turns, pair by pair: two binaries, or one with other flags.
package pairs

import (
	"cmp"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/shoalfs/shoal/lab/bench/kit"
)

// side is one of the two.
type side struct {
	*kit.Kit  // with its binary
	name      string
	flags     []string             // of its daemons
	warm      *kit.Mount           // a daemon of its own, whose cache stays warm
	rate, cpu map[string][]float64 // by situation: files/s, µs a file
}

// situation is one of those in which the sides are compared.
type situation struct {
	name string
	run  func(s *side) (kit.Cost, error)
}

// take has both sides go through all situations, pairs times.
func take(sides [2]*side, situations []situation, pairs int) error {
	for _, s := range sides {
		s.rate, s.cpu = map[string][]float64{}, map[string][]float64{}
	}
	for pair := range pairs {
		for _, what := range situations {
			turn := slices.Clone(sides[:])
			if pair%2 == 1 { // who comes second finds the machine as the first has left it
				slices.Reverse(turn)
			}
			for _, s := range turn {
				c, err := what.run(s)
				if err != nil {
					return fmt.Errorf("%s, %s: %w", what.name, s.name, err)
				}
				s.rate[what.name] = append(s.rate[what.name], c.Files/c.Seconds)
				s.cpu[what.name] = append(s.cpu[what.name], 1e6*c.CPU/c.Files)
			}
		}
		fmt.Fprintf(os.Stderr, "pair %d of %d\n", pair+1, pairs)
	}
	return nil
}

// ratios returns the second side's rate over the first's, of each pair.
func ratios(sides [2]*side, what string) []float64 {
	return kit.Ratios(sides[0].rate[what], sides[1].rate[what])
}

// worse is how much more processor time a file may take.
const worse = 1.05

const shards = "s3://photos/packed"

type bench struct {
	*kit.Kit
	list string // a file: paths in the order of the epoch
}

// Bench compares two binaries: the rate and the daemon's processor time a file of each situation that matters, as the
// ratio new/old with the 95% interval of its median.
//
//	cold     the order is known, the cache is empty, the store is 30 ms away, 8 readers
//	packed   the same from shards
//	sharing  two feeds with orders of their own on one daemon, whose cache is empty
//	warm     a mount whose cache is full, 8 readers
//	raw      batches of a feed, as stored
//	decoded  batches of a feed, RandomResizedCrop(224)
func Bench(flags *flag.FlagSet) func(k *kit.Kit) error {
	old := flags.String("old", "", "the binary to compare with; -shoal is the new one (default: the same)")
	with := flags.String("flags", "", "of the new one's daemons only, separated by spaces")
	count := flags.Int("photos", 4096, "photographs")
	pairs := flags.Int("pairs", 15, "pairs of runs of each situation")
	only := flags.String("only", "cold,packed,sharing,warm,raw,decoded", "situations")
	return func(k *kit.Kit) error {
		if *old == "" && *with == "" {
			return errors.New("-old names the binary to compare with, -flags what the new one is given")
		}
		sides := [2]*side{{name: "old", Kit: k.With(cmp.Or(*old, k.Shoal))}, {name: "new", Kit: k, flags: strings.Fields(*with)}}
		return (&bench{Kit: k}).run(sides, *count, *pairs, strings.Split(*only, ","))
	}
}

func (b *bench) run(sides [2]*side, count, pairs int, only []string) (err error) {
	feed := func(flags ...string) func(s *side) (kit.Cost, error) {
		return func(s *side) (kit.Cost, error) {
			return s.warm.Cost(func() (int, error) {
				f, err := s.Feed(s.warm.Addr, flags...)
				return f.Samples, err
			})
		}
	}
	all := map[string]func(s *side) (kit.Cost, error){
		"cold":    func(s *side) (kit.Cost, error) { return b.cold(s, kit.Source) },
		"packed":  func(s *side) (kit.Cost, error) { return b.cold(s, shards) },
		"sharing": b.sharing,
		"warm": func(s *side) (kit.Cost, error) {
			return s.warm.Cost(func() (int, error) {
				r, err := s.Read(s.warm.Dir, b.list)
				return r.Files, err
			})
		},
		"raw":     feed("--epochs", "2"),
		"decoded": feed("--transform", "RandomResizedCrop(224)|uint8"),
	}
	var situations []situation
	for _, what := range only {
		if all[what] == nil {
			return fmt.Errorf("no situation is called %q", what)
		}
		situations = append(situations, situation{what, all[what]})
	}
	if err := b.Stored(count, 30*time.Millisecond); err != nil {
		return err
	}
	for _, s := range sides {
		s.Env = b.Env
	}
	if err := b.Run(nil, b.Shoal, "pack", kit.Source, shards, "--seed", "1"); err != nil {
		return err
	}
	if b.list, err = b.Order(kit.Cold, "pairs.txt"); err != nil {
		return err
	}
	b.Header("Two binaries, pair by pair")
	for _, s := range sides {
		version, _ := b.Command(s.Shoal, "version").Output()
		b.Say("%s: %s", s.name, strings.TrimSpace(string(version)))
		cache := filepath.Join(b.Dir, "cache-pairs-"+s.name)
		if err := os.RemoveAll(cache); err != nil {
			return err
		}
		if s.warm, err = s.Serve(kit.Source, "pairs-"+s.name, append(s.flags, "--kernel-cache", "off", "--order", kit.Cold, "--cache-dir", cache)...); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, s.warm.Close()) }()
	}
	if err := take(sides, situations, 1); err != nil { // fills the caches, and does not count
		return err
	}
	if err := take(sides, situations, pairs); err != nil {
		return err
	}
	b.Say("\n%d photographs, %d pairs. The interval is that of the median of the pairs' ratios new/old, 95%%.\n", len(b.Paths), pairs)
	b.Say("| | files/s, old and new | ratio | interval | CPU a file, µs, old and new | ratio | interval | below %.2f |", worse)
	b.Say("| --- | ---: | ---: | --- | ---: | ---: | --- | --- |")
	for _, what := range only {
		old, now := sides[0], sides[1]
		rate, cpu := ratios(sides, what), kit.Ratios(old.cpu[what], now.cpu[what])
		rlo, rhi := kit.Interval(rate)
		clo, chi := kit.Interval(cpu)
		b.Say("| %s | %.0f %.0f | %.3f | %.3f–%.3f | %.1f %.1f | %.3f | %.3f–%.3f | %s |", what, kit.Median(old.rate[what]), kit.Median(now.rate[what]),
			kit.Median(rate), rlo, rhi, kit.Median(old.cpu[what]), kit.Median(now.cpu[what]), kit.Median(cpu), clo, chi, kit.Verdict(chi < worse))
	}
	return nil
}

// fresh empties the cache directory of the cold situations, and returns the flags for it.
func (s *side) fresh() ([]string, error) {
	cache := filepath.Join(s.Dir, "cache-pairs")
	return append(s.flags, "--cache-dir", cache, "--memory", "512MiB"), os.RemoveAll(cache)
}

// cold mounts over an empty cache directory and reads an epoch; the start counts.
func (b *bench) cold(s *side, source string) (c kit.Cost, err error) {
	flags, err := s.fresh()
	if err != nil {
		return c, err
	}
	begin := time.Now()
	m, err := s.Mount(source, "mnt-pairs", append(flags, "--kernel-cache", "off", "--order", kit.Cold)...)
	if err != nil {
		return c, err
	}
	defer func() { err = errors.Join(err, m.Close()) }()
	r, err := b.Read(m.Dir, b.list)
	return kit.Cost{Files: float64(r.Files), Seconds: time.Since(begin).Seconds(), CPU: kit.CPU(m.PID)}, err
}

// sharing serves over an empty cache directory and has two trainers read an epoch each at the same time; the start counts.
func (b *bench) sharing(s *side) (c kit.Cost, err error) {
	flags, err := s.fresh()
	if err != nil {
		return c, err
	}
	begin := time.Now()
	m, err := s.Serve(kit.Source, "mnt-pairs", flags...)
	if err != nil {
		return c, err
	}
	defer func() { err = errors.Join(err, m.Close()) }()
	var g errgroup.Group
	for seed := range 2 {
		g.Go(func() error {
			_, err := s.Feed(m.Addr, "--seed", strconv.Itoa(seed))
			return err
		})
	}
	err = g.Wait()
	return kit.Cost{Files: float64(2 * len(b.Paths)), Seconds: time.Since(begin).Seconds(), CPU: kit.CPU(m.PID)}, err
}
