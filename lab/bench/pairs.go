package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/shoalfs/shoal/lab/accelerator"
	"github.com/shoalfs/shoal/lab/rig/cputime"
	"github.com/shoalfs/shoal/lab/rig/daemon"
	"github.com/shoalfs/shoal/lab/rig/testbed"
)

// side is one of the two.
type side struct {
	*bench
	bed       *testbed.Bed // with its binary
	name      string
	flags     []string             // of its daemons
	warm      *server              // whose cache stays warm
	rate, cpu map[string][]float64 // by situation: files/s, µs a file
}

// server serves a mount and a feed.
type server struct {
	*side
	*daemon.Daemon
	mnt, feed string
}

// cost is what it took to read so many files.
type cost struct{ files, seconds, cpu float64 }

// situation is one of those in which the sides are compared.
type situation func(ctx context.Context, s *side) (cost, error)

var situations = map[string]situation{
	"cold":    func(ctx context.Context, s *side) (cost, error) { return s.cold(ctx, source) },
	"packed":  func(ctx context.Context, s *side) (cost, error) { return s.cold(ctx, shards) },
	"sharing": func(ctx context.Context, s *side) (cost, error) { return s.fresh(ctx, source, nil, s.share) },
	"warm": func(ctx context.Context, s *side) (cost, error) {
		return s.warm.cost(func() (int, error) { return s.warm.read(ctx) })
	},
	"raw":     fed("--epochs", "2"),
	"decoded": fed("--transform", "RandomResizedCrop(224)|uint8"),
}

func fed(flags ...string) situation {
	return func(ctx context.Context, s *side) (cost, error) {
		return s.warm.cost(func() (int, error) { return s.warm.consume(ctx, flags...) })
	}
}

// worse is how much more processor time a file may take.
const worse = 1.05

func (b *bench) run(ctx context.Context, sides [2]*side, pairs int, only []string) (err error) {
	b.say("# Two binaries, pair by pair\n\n`go run ./lab/bench %s`, %s, %s.\n", strings.Join(os.Args[1:], " "),
		time.Now().UTC().Format("2006-01-02 15:04 UTC"), machine())
	for _, s := range sides {
		version, _ := s.bed.Shoal(ctx, "version")
		b.say("%s: %s", s.name, strings.TrimSpace(version))
		cache := filepath.Join(b.bed.Dir, "cache-"+s.name)
		if err := os.RemoveAll(cache); err != nil {
			return err
		}
		if s.warm, err = s.serve(ctx, source, "mnt-"+s.name, "--order", cold, "--cache-dir", cache); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, s.warm.Close()) }()
	}
	paths, err := sides[1].bed.Shoal(ctx, "order", cold, "--mount", sides[1].warm.mnt, "--epoch", "0", "--paths")
	if err != nil {
		return err
	}
	b.paths = strings.Split(strings.TrimSuffix(paths, "\n"), "\n")
	if err := take(ctx, sides, only, 1); err != nil { // fills the caches, and does not count
		return err
	}
	if err := take(ctx, sides, only, pairs); err != nil {
		return err
	}
	b.say("\n%d photographs, %d pairs. The interval is that of the median of the pairs' ratios new/old, 95%%.\n",
		len(b.paths), pairs)
	b.say(
		"| | files/s, old and new | ratio | interval | CPU a file, µs, old and new | ratio | interval | below %.2f |",
		worse)
	b.say("| --- | ---: | ---: | --- | ---: | ---: | --- | --- |")
	for _, what := range only {
		old, now := sides[0], sides[1]
		rate, cpu := ratios(old.rate[what], now.rate[what]), ratios(old.cpu[what], now.cpu[what])
		rlo, rhi := interval(rate)
		clo, chi := interval(cpu)
		verdict := "**missed**"
		if chi < worse {
			verdict = "met"
		}
		b.say("| %s | %.0f %.0f | %.3f | %.3f–%.3f | %.1f %.1f | %.3f | %.3f–%.3f | %s |", what, median(old.rate[what]),
			median(now.rate[what]),
			median(rate), rlo, rhi, median(old.cpu[what]), median(now.cpu[what]), median(cpu), clo, chi, verdict)
	}
	return nil
}

// take has both sides go through all situations, pairs times.
func take(ctx context.Context, sides [2]*side, only []string, pairs int) error {
	for _, s := range sides {
		s.rate, s.cpu = map[string][]float64{}, map[string][]float64{}
	}
	for pair := range pairs {
		for _, what := range only {
			turn := slices.Clone(sides[:])
			if pair%2 == 1 { // who comes second finds the machine as the first has left it
				slices.Reverse(turn)
			}
			for _, s := range turn {
				c, err := situations[what](ctx, s)
				if err != nil {
					return fmt.Errorf("%s, %s: %w", what, s.name, err)
				}
				s.rate[what] = append(s.rate[what], c.files/c.seconds)
				s.cpu[what] = append(s.cpu[what], 1e6*c.cpu/c.files)
			}
		}
		fmt.Fprintf(os.Stderr, "pair %d of %d\n", pair+1, pairs)
	}
	return nil
}

// serve starts a daemon of the side's.
func (s *side) serve(ctx context.Context, source, name string, flags ...string) (_ *server, err error) {
	at := filepath.Join(s.bed.Dir, name)
	d := &server{side: s, mnt: at, feed: "unix://" + at + ".sock"}
	args := slices.Concat([]string{"serve", source, "--listen", d.feed, "--mount", at, "--kernel-cache", "off"},
		flags, s.flags)
	d.Daemon, err = s.bed.Daemon(ctx, daemon.Place{Mount: at, Socket: at + ".sock", Log: at + ".log"}, args...)
	return d, err
}

// threads read at a time, as a DataLoader's workers do.
const threads = 8

// read reads the photographs in the order of the epoch. Each thread takes the next one.
func (d *server) read(ctx context.Context) (files int, err error) {
	photographs := accelerator.Files{Dir: d.mnt, Paths: d.paths}
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(threads)
	for at := range d.paths {
		g.Go(func() error {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			_, err := photographs.Read(ctx, at)
			return err
		})
	}
	return len(d.paths), g.Wait()
}

// consume takes batches of 64 of the feed.
func (d *server) consume(ctx context.Context, flags ...string) (samples int, err error) {
	out, err := d.bed.Shoal(ctx, append([]string{"feed", d.feed, "--batch", "64", "--json"}, flags...)...)
	var r struct{ Samples int }
	if err == nil {
		err = json.Unmarshal([]byte(out), &r)
	}
	return r.Samples, err
}

// cost measures what f reads.
func (d *server) cost(f func() (files int, err error)) (cost, error) {
	cpu, begin := cputime.Sum(d.Pid()), time.Now()
	files, err := f()
	return cost{float64(files), time.Since(begin).Seconds(), cputime.Sum(d.Pid()) - cpu}, err
}

// fresh serves over an empty cache directory, and measures what f reads there; the start counts.
func (s *side) fresh(ctx context.Context, source string, flags []string,
	f func(ctx context.Context, d *server) (int, error)) (c cost, err error) {
	cache := filepath.Join(s.bed.Dir, "cache")
	if err := os.RemoveAll(cache); err != nil {
		return c, err
	}
	begin := time.Now()
	d, err := s.serve(ctx, source, "mnt", append(flags, "--cache-dir", cache, "--memory", "512MiB")...)
	if err != nil {
		return c, err
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	files, err := f(ctx, d)
	return cost{float64(files), time.Since(begin).Seconds(), cputime.Sum(d.Pid())}, err
}

// cold reads an epoch whose order the daemon was told.
func (s *side) cold(ctx context.Context, source string) (cost, error) {
	return s.fresh(ctx, source, []string{"--order", cold}, func(ctx context.Context, d *server) (int, error) {
		return d.read(ctx)
	})
}

// share has two trainers read an epoch each at the same time.
func (s *side) share(ctx context.Context, d *server) (int, error) {
	var g errgroup.Group
	for seed := range 2 {
		g.Go(func() error {
			_, err := d.consume(ctx, "--seed", strconv.Itoa(seed))
			return err
		})
	}
	return 2 * len(s.paths), g.Wait()
}
