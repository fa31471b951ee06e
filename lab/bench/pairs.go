package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
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
	"github.com/shoalfs/shoal/lab/rig/etcd"
	"github.com/shoalfs/shoal/lab/rig/testbed"
)

// side is one of the two.
type side struct {
	*bench
	bed       *testbed.Bed         // with its binary
	name, s3  string               // the latter is the address of its endpoint
	flags     []string             // of its daemons
	warm      map[string]*server   // whose caches stay, by what they are for
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
	"random":  func(ctx context.Context, s *side) (cost, error) { return s.fresh(ctx, large.Source(), nil, random) },
	"warm":    kept("warm", (*server).read),
	"raw": kept("warm", func(d *server, ctx context.Context) (int, error) {
		return d.consume(ctx, "--epochs", "2")
	}),
	"decoded": kept("warm", (*server).decode),
	"recoded": kept("recoded", (*server).decode, "--recode", "on"),
	"s3": func(ctx context.Context, s *side) (cost, error) {
		return kept("s3", (*server).get, "--s3", s.s3, "--s3-anonymous")(ctx, s)
	},
	"peer": func(ctx context.Context, s *side) (cost, error) { return s.peer(ctx) },
}

// kept is what read costs on a daemon whose cache stays.
func kept(name string, read func(*server, context.Context) (int, error), flags ...string) situation {
	return func(ctx context.Context, s *side) (cost, error) {
		d, err := s.keep(ctx, name, flags...)
		if err != nil {
			return cost{}, err
		}
		return d.cost(func() (int, error) { return read(d, ctx) })
	}
}

// keep returns the side's daemon of that name. If there is none yet, it starts one and fills its cache.
func (s *side) keep(ctx context.Context, name string, flags ...string) (*server, error) {
	if d := s.warm[name]; d != nil {
		return d, nil
	}
	cache := filepath.Join(s.bed.Dir, "cache-"+name+"-"+s.name)
	if err := os.RemoveAll(cache); err != nil {
		return nil, err
	}
	d, err := s.serve(ctx, source, name+"-"+s.name, append(flags, "--order", cold, "--cache-dir", cache)...)
	if err != nil {
		return nil, err
	}
	s.warm[name] = d
	if _, err = d.read(ctx); err == nil && slices.Contains(flags, "--recode") {
		err = d.Until(ctx, d.isRecoded)
	}
	return d, err
}

// isRecoded returns an error unless nearly all photographs are recoded.
func (d *server) isRecoded(context.Context) error {
	st, err := testbed.ReadStats(d.mnt)
	if err == nil && 10*st.Recoded.Files < 9*len(d.paths) {
		err = fmt.Errorf("%d of %d are recoded", st.Recoded.Files, len(d.paths))
	}
	return err
}

// worse is how much more processor time a file may take.
const worse = 1.05

// run has both sides take turns.
func (b *bench) run(ctx context.Context, sides [2]*side, pairs int, only []string) (err error) {
	b.say("# Two binaries, pair by pair\n\n`go run ./lab/bench %s`, %s, %s.\n", strings.Join(os.Args[1:], " "),
		time.Now().UTC().Format("2006-01-02 15:04 UTC"), machine())
	for _, s := range sides {
		version, _ := s.bed.Shoal(ctx, "version")
		b.say("%s: %s", s.name, strings.TrimSpace(version))
		s.warm = map[string]*server{}
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return err
		}
		s.s3 = l.Addr().String()
		_ = l.Close()
		defer func() {
			for _, d := range s.warm {
				err = errors.Join(err, d.Close())
			}
		}()
	}
	d, err := sides[1].keep(ctx, "warm")
	if err != nil {
		return err
	}
	paths, err := sides[1].bed.Shoal(ctx, "order", cold, "--mount", d.mnt, "--epoch", "0", "--paths")
	if err != nil {
		return err
	}
	b.paths = strings.Split(strings.TrimSuffix(paths, "\n"), "\n")
	defer func() {
		if b.etcd != nil {
			b.etcd.Close()
		}
	}()
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

// each has the threads do n things. Each thread takes the next one.
func each(ctx context.Context, n int, do func(i int) error) (int, error) {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(threads)
	for i := range n {
		g.Go(func() error {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			return do(i)
		})
	}
	return n, g.Wait()
}

// read reads the photographs in the order of the epoch.
func (d *server) read(ctx context.Context) (files int, err error) {
	photographs := accelerator.Files{Dir: d.mnt, Paths: d.paths}
	return each(ctx, len(d.paths), func(i int) error {
		_, err := photographs.Read(ctx, i)
		return err
	})
}

// large are objects of which parts are read at random.
var large = testbed.Dataset{Name: "large", Samples: 4, Size: 64 << 20}

func random(ctx context.Context, d *server) (reads int, err error) {
	rng := rand.New(rand.NewPCG(7, 7))
	at := make([]int64, 2048)
	for i := range at {
		at[i] = rng.Int64N(large.Size - 64<<10)
	}
	return each(ctx, len(at), func(i int) error {
		f, err := os.Open(filepath.Join(d.mnt, large.Path(i%large.Samples)))
		if err != nil {
			return err
		}
		_, err = f.ReadAt(make([]byte, 64<<10), at[i])
		return errors.Join(err, f.Close())
	})
}

// get reads the photographs through the S3 endpoint.
func (d *server) get(ctx context.Context) (files int, err error) {
	return each(ctx, len(d.paths), func(i int) error {
		at := "http://" + d.s3 + strings.TrimPrefix(source, "s3:/") + "/" + d.paths[i]
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, at, nil)
		if err != nil {
			return err
		}
		r, err := http.DefaultClient.Do(req)
		if err != nil {
			return err
		}
		defer r.Body.Close()
		if _, err = io.Copy(io.Discard, r.Body); err == nil && r.StatusCode != http.StatusOK {
			err = fmt.Errorf("%s: %s", at, r.Status)
		}
		return err
	})
}

func (d *server) decode(ctx context.Context) (samples int, err error) {
	return d.consume(ctx, "--transform", "RandomResizedCrop(224)|uint8")
}

// peer reads an epoch on a node whose cache is empty; another has all of it. The cost is that of both.
func (s *side) peer(ctx context.Context) (c cost, err error) {
	if s.etcd == nil {
		if s.etcd, err = etcd.Start(ctx, false); err != nil {
			return c, err
		}
	}
	flags := []string{"--cluster", "etcd://" + s.etcd.Addr + "/" + s.name, "--cluster-insecure", "--advertise",
		"127.0.0.1:0"}
	owner, err := s.keep(ctx, "owner", flags...)
	if err != nil {
		return c, err
	}
	other, err := owner.cost(func() (n int, err error) {
		c, err = s.fresh(ctx, source, append(flags, "--order", cold), epoch)
		return 1, err
	})
	c.cpu += other.cpu
	return c, err
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
	return s.fresh(ctx, source, []string{"--order", cold}, epoch)
}

func epoch(ctx context.Context, d *server) (int, error) { return d.read(ctx) }

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
