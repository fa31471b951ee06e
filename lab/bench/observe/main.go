// Command observe measures what it costs to be looked at, and writes lab/bench/results/observe.md. Two daemons with the same
// warm dataset take turns, pair by pair: one with nothing but its log, the other with an admin address that
// is scraped every second (/metrics, /api/history), traces of everything to a collector, and a log in JSON:
//
//	8 readers of the mount | raw batches of the feed | decoded batches of the feed
//
// Collector and scraper are in this process, and share the cores. Run it from the repository's root as root: go run ./lab/bench/observe
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/shoalfs/shoal/lab/bench/kit"
	"github.com/shoalfs/shoal/lab/rig/otlp"
	"github.com/shoalfs/shoal/lab/rig/port"
)

// target is the part of the throughput that looking may cost.
const target = 0.02

type bench struct {
	*kit.Kit
	list   string
	passes int
}

// side is a daemon.
type side struct {
	name  string
	addr  string
	mount *kit.Mount
	rates map[string][]float64 // by door
	cpu   map[string][]float64 // µs a sample
}

func main() {
	count := flag.Int("photos", 4096, "photographs")
	pairs := flag.Int("pairs", 15, "pairs of runs through each door")
	passes := flag.Int("passes", 4, "epochs in a run of the mount and of the raw feed")
	kit.Main("lab/bench/results/observe.md", func(k *kit.Kit) error {
		b := &bench{Kit: k, passes: *passes}
		return b.run(*count, *pairs)
	})
}

// door is a way in which samples are read. run returns samples and seconds.
type door struct {
	name string
	run  func(s *side) (samples int, seconds float64, err error)
}

func (b *bench) run(count, pairs int) (err error) {
	photos, paths, err := b.Photos(count)
	if err != nil {
		return err
	}
	server, far, err := b.Store(0)
	if err != nil {
		return err
	}
	defer server.Stop()
	defer far.Stop()
	if _, err := server.Upload(b.Ctx, photos, "photos", "train", nil); err != nil {
		return err
	}
	if b.list, err = b.List("observe.txt", paths); err != nil {
		return err
	}
	collector := otlp.Start()
	defer collector.Close()
	admin, release, err := port.Hold()
	if err != nil {
		return err
	}
	defer release()
	off, err := b.start("off", nil)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, off.mount.Close()) }()
	on, err := b.start("on", []string{"OTEL_EXPORTER_OTLP_ENDPOINT=" + collector.URL, "OTEL_TRACES_SAMPLER=always_on"},
		"--admin", admin, "--log-format", "json")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, on.mount.Close()) }()
	scrapes := scrape(admin)
	defer scrapes.stop()

	doors := []door{
		{"mount, 8 readers", func(s *side) (int, float64, error) {
			files, seconds := 0, 0.
			for range b.passes {
				r, err := b.Read(s.mount.Dir, b.list)
				if err != nil {
					return 0, 0, err
				}
				files, seconds = files+r.Files, seconds+r.Seconds
			}
			return files, seconds, nil
		}},
		{"feed, raw samples", func(s *side) (int, float64, error) { return b.feed(s, b.passes) }},
		{"feed, RandomResizedCrop(224)", func(s *side) (int, float64, error) {
			return b.feed(s, 1, "--transform", "RandomResizedCrop(224)|uint8")
		}},
	}
	for _, s := range []*side{off, on} { // into the cache
		for _, d := range doors {
			if _, _, err := d.run(s); err != nil {
				return fmt.Errorf("%s, %s: %w", s.name, d.name, err)
			}
		}
	}
	b.Header("What it costs to be looked at")
	b.Say("%d photographs, all in the cache. On: /metrics and /api/history every second, traces of everything by OTLP/HTTP, "+
		"log in JSON. Scraper and collector share the cores.\n", len(paths))
	spans := len(collector.Spans())
	for pair := range pairs {
		for _, d := range doors {
			turn := []*side{off, on}
			if pair%2 == 1 { // who comes second finds the machine as the first has left it
				slices.Reverse(turn)
			}
			for _, s := range turn {
				before := kit.CPU(s.mount.PID)
				n, seconds, err := d.run(s)
				if err != nil {
					return fmt.Errorf("%s, %s: %w", s.name, d.name, err)
				}
				s.rates[d.name] = append(s.rates[d.name], float64(n)/seconds)
				s.cpu[d.name] = append(s.cpu[d.name], 1e6*(kit.CPU(s.mount.PID)-before)/float64(n))
			}
		}
		fmt.Fprintf(os.Stderr, "pair %d of %d\n", pair+1, pairs)
	}
	b.report(doors, off, on)
	times, bytes := scrapes.stop()
	b.Say("\nScrapes of /metrics: %d, median %.2f ms from request to last byte, %.0f bytes. Spans: %d, %d bytes of OTLP in all.", len(times),
		1e3*kit.Median(times), bytes, len(collector.Spans())-spans, collector.Bytes())
	return errors.Join(collector.Errors()...)
}

func (b *bench) report(doors []door, off, on *side) {
	b.Say("| samples/s, medians | off | on | median of each pair's ratio | pairs | daemon's CPU, off and on, µs a sample | target | |")
	b.Say("| --- | ---: | ---: | ---: | --- | ---: | ---: | --- |")
	for _, d := range doors {
		var ratios []float64
		for i, r := range off.rates[d.name] {
			ratios = append(ratios, on.rates[d.name][i]/r)
		}
		m := kit.Median(ratios)
		b.Say("| %s | %.0f | %.0f | %.3f | %s | %.1f %.1f | %.2f | %s |", d.name, kit.Median(off.rates[d.name]), kit.Median(on.rates[d.name]), m,
			kit.Numbers(ratios, 2), kit.Median(off.cpu[d.name]), kit.Median(on.cpu[d.name]), 1-target, kit.Verdict(m >= 1-target))
	}
}

// start starts a daemon with mount and feed.
func (b *bench) start(name string, environ []string, flags ...string) (*side, error) {
	at := filepath.Join(b.Dir, "observe-"+name)
	s := &side{name: name, addr: "unix://" + filepath.Join(b.Dir, "observe-"+name+".sock"), rates: map[string][]float64{}, cpu: map[string][]float64{}}
	if err := os.MkdirAll(at, 0o755); err != nil {
		return nil, err
	}
	args := append([]string{"serve", "s3://photos/train", "--listen", s.addr, "--mount", at, "--daemon", "--kernel-cache", "off", "--order", "sequential",
		"--cache-dir", filepath.Join(b.Dir, "cache-observe-"+name)}, flags...)
	c := b.Command(b.Shoal, args...)
	c.Env = append(slices.Clip(c.Env), environ...)
	if out, err := c.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("%s: %w\n%s", name, err, out)
	}
	var err error
	s.mount, err = b.Attach(at)
	return s, err
}

// feed consumes epochs.
func (b *bench) feed(s *side, epochs int, flags ...string) (samples int, seconds float64, err error) {
	var r struct {
		Samples int
		Seconds float64
	}
	err = b.Run(&r, b.Shoal, append([]string{"feed", s.addr, "--batch", "64", "--epochs", strconv.Itoa(epochs), "--json"}, flags...)...)
	return r.Samples, r.Seconds, err
}

// scraper asks for what Prometheus and a dashboard ask for, once a second.
type scraper struct {
	quit  chan struct{}
	done  sync.WaitGroup
	end   sync.Once
	times []float64
	bytes float64
}

func scrape(admin string) *scraper {
	s := &scraper{quit: make(chan struct{})}
	s.done.Go(func() {
		t := time.NewTicker(time.Second)
		defer t.Stop()
		for {
			select {
			case <-t.C:
			case <-s.quit:
				return
			}
			start := time.Now()
			if n, err := get("http://" + admin + "/metrics"); err == nil {
				s.times, s.bytes = append(s.times, time.Since(start).Seconds()), float64(n)
			}
			_, _ = get("http://" + admin + "/api/history")
		}
	})
	return s
}

// stop returns how long the scrapes took, in seconds, and the bytes of the last one.
func (s *scraper) stop() ([]float64, float64) {
	s.end.Do(func() { close(s.quit) })
	s.done.Wait()
	return s.times, s.bytes
}

func get(url string) (int64, error) {
	resp, err := http.Get(url)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	return io.Copy(io.Discard, resp.Body)
}
