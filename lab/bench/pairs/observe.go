package pairs

import (
	"errors"
	"flag"
	"io"
	"net/http"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"github.com/shoalfs/shoal/lab/bench/kit"
	"github.com/shoalfs/shoal/lab/rig/otlp"
	"github.com/shoalfs/shoal/lab/rig/port"
)

// looking is the part of the throughput that it may cost.
const looking = 0.02

// Observe measures what it costs to be looked at. Two daemons with the same warm dataset take turns, pair by pair: one with
// nothing but its log, the other with an admin address that is scraped every second (/metrics, /api/history), traces of
// everything to a collector, and a log in JSON:
//
//	8 readers of the mount | raw batches of the feed | decoded batches of the feed
//
// Collector and scraper are in this process, and share the cores.
func Observe(flags *flag.FlagSet) func(k *kit.Kit) error {
	count := flags.Int("photos", 4096, "photographs")
	pairs := flags.Int("pairs", 15, "pairs of runs through each door")
	passes := flags.Int("passes", 4, "epochs in a run of the mount and of the raw feed")
	return func(k *kit.Kit) error { return observe(k, *count, *pairs, *passes) }
}

func observe(k *kit.Kit, count, pairs, passes int) (err error) {
	if err := k.Stored(count, 0); err != nil {
		return err
	}
	list, err := k.List("observe.txt", k.Paths)
	if err != nil {
		return err
	}
	collector := otlp.Start()
	defer collector.Close()
	admin, release, err := port.Hold()
	if err != nil {
		return err
	}
	defer release()
	looked := k.With(k.Shoal)
	looked.Env = append(looked.Env[:len(looked.Env):len(looked.Env)], "OTEL_EXPORTER_OTLP_ENDPOINT="+collector.URL, "OTEL_TRACES_SAMPLER=always_on")
	sides := [2]*side{{Kit: k, name: "off"}, {Kit: looked, name: "on", flags: []string{"--admin", admin, "--log-format", "json"}}}
	for _, s := range sides {
		name := "observe-" + s.name
		if s.warm, err = s.Serve(kit.Source, name, append(s.flags, "--kernel-cache", "off", "--order", "sequential",
			"--cache-dir", filepath.Join(k.Dir, "cache-"+name))...); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, s.warm.Close()) }()
	}
	scrapes := scrape(admin)
	defer scrapes.stop()

	feed := func(flags ...string) func(s *side) (kit.Cost, error) {
		return func(s *side) (kit.Cost, error) {
			return s.warm.Cost(func() (int, float64, error) {
				f, err := k.Feed(s.warm.Addr, flags...)
				return f.Samples, f.Seconds, err
			})
		}
	}
	doors := []situation{
		{"mount, 8 readers", func(s *side) (kit.Cost, error) {
			return s.warm.Cost(func() (files int, seconds float64, err error) {
				for range passes {
					r, err := k.Read(s.warm.Dir, list)
					if err != nil {
						return 0, 0, err
					}
					files, seconds = files+r.Files, seconds+r.Seconds
				}
				return files, seconds, nil
			})
		}},
		{"feed, raw samples", feed("--epochs", strconv.Itoa(passes))},
		{"feed, RandomResizedCrop(224)", feed("--epochs", "1", "--transform", decoded)},
	}
	if err := take(sides, doors, 1); err != nil { // into the cache
		return err
	}
	k.Header("What it costs to be looked at")
	k.Say("%d photographs, all in the cache. On: /metrics and /api/history every second, traces of everything by OTLP/HTTP, "+
		"log in JSON. Scraper and collector share the cores.\n", len(k.Paths))
	spans := len(collector.Spans())
	if err := take(sides, doors, pairs); err != nil {
		return err
	}
	k.Say("| samples/s, medians | off | on | median of each pair's ratio | pairs | daemon's CPU, off and on, µs a sample | target | |")
	k.Say("| --- | ---: | ---: | ---: | --- | ---: | ---: | --- |")
	off, on := sides[0], sides[1]
	for _, d := range doors {
		r := ratios(sides, d.name)
		m := kit.Median(r)
		k.Say("| %s | %.0f | %.0f | %.3f | %s | %.1f %.1f | %.2f | %s |", d.name, kit.Median(off.rate[d.name]), kit.Median(on.rate[d.name]), m,
			kit.Numbers(r, 2), kit.Median(off.cpu[d.name]), kit.Median(on.cpu[d.name]), 1-looking, kit.Verdict(m >= 1-looking))
	}
	times, bytes := scrapes.stop()
	k.Say("\nScrapes of /metrics: %d, median %.2f ms from request to last byte, %.0f bytes. Spans: %d, %d bytes of OTLP in all.", len(times),
		1e3*kit.Median(times), bytes, len(collector.Spans())-spans, collector.Bytes())
	return errors.Join(collector.Errors()...)
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
