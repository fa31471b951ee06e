// Package soak is the benchmark of that name.
package soak

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/shoalfs/shoal/lab/bench/kit"
	"github.com/shoalfs/shoal/lab/rig/port"
	"github.com/shoalfs/shoal/lab/rig/proxy"
)

const (
	latency    = 10 * time.Millisecond
	roundTime  = 20 * time.Second
	settleTime = time.Minute // that a daemon may take to be at rest
)

// Bench runs one daemon for as long as it is told, while trainers come and go, faults of the store come and go,
// and epochs pass. It fails if anything that was delivered is wrong, if anything was refused, or if the daemon grows.
//
// A soak is a series of rounds. In each round trainers read the mount and the feed, in Go and Python, some are killed in
// the middle, a second dataset is mounted in the same daemon and unmounted, and the weather changes every few seconds:
// latency, errors, resets, cut bodies, outages. At the end of the round all have left and the weather is fine; the
// daemon is looked at then, and is to be as it was after the rounds before: memory, descriptors, goroutines, ledger.
//
// What a trainer reads is compared with the files themselves; what a transform makes of them, with what the first round,
// in fine weather, had.
func Bench(flags *flag.FlagSet) func(k *kit.Kit) error {
	count := flags.Int("photos", 2048, "photographs")
	memory := flags.String("memory", "192MiB", "--memory of the daemon")
	length := flags.Duration("for", 10*time.Minute, "how long")
	seed := flags.Uint64("seed", uint64(time.Now().UnixNano()), "of all that is left to chance, as far as it can be repeated")
	return func(k *kit.Kit) error {
		s := &soak{Kit: k, memory: *memory, chance: rand.New(rand.NewPCG(*seed, 0)), length: *length}
		k.Header("Soak")
		k.Say("%s, seed %d; the daemon has --memory %s and keeps a quarter of the dataset on disk.\n", *length, *seed, *memory)
		return s.run(*count)
	}
}

// soak is one run.
type soak struct {
	*kit.Kit
	memory string
	length time.Duration
	chance *rand.Rand

	others    string // a folder of originals
	mnt, feed string
	admin     string // HOST:PORT
	pid       int
	crew      *crew
	calm      []sample // after each round
}

// sample is the daemon at rest.
type sample struct{ RSS, Files, Goroutines, Ledger int64 }

// stats are the fields of the daemon's that tell whether it rests, and how large it is.
type stats struct {
	PID      int              `json:"pid"`
	InFlight int64            `json:"requests_in_flight"`
	Gets     int64            `json:"get_requests"`
	Opens    int64            `json:"opens"`
	Users    int              `json:"users"`
	Store    map[string]int64 `json:"store_errors"`
	Memory   struct {
		Ledger  int64 `json:"ledger_used"`
		Ring    int64 `json:"ring"`
		RSSAnon int64 `json:"rss_anon"`
	} `json:"memory"`
	Feed struct {
		Open  int   `json:"open_sessions"`
		Held  int64 `json:"held_bytes"`
		Total struct {
			Samples int64 `json:"samples"`
			Bad     int64 `json:"bad_samples"`
		} `json:"total"`
	} `json:"feed"`
}

func (s *soak) run(count int) (err error) {
	if err := s.Stored(count, latency); err != nil {
		return err
	}
	s.others = filepath.Join(s.Photos, filepath.Dir(s.Paths[0])) // one class is a dataset of its own
	if _, err := s.Bed.Server.Upload(s.Ctx, s.others, "photos", "second", nil); err != nil {
		return err
	}
	cache, err := os.MkdirTemp(s.Dir, "cache")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(cache) }()
	admin, release, err := port.Hold()
	if err != nil {
		return err
	}
	defer release()
	s.admin = admin
	if err := os.Setenv("SHOAL_PPROF", "1"); err != nil { // for the heap, at the end
		return err
	}
	m, err := s.Serve(kit.Source, "mnt", "--cache-dir", cache, "--memory", s.memory, "--cache-size", fmt.Sprint(s.Up.Bytes/4),
		"--kernel-cache", "off", "--admin", s.admin)
	if err != nil {
		return err
	}
	s.mnt, s.feed, s.pid = m.Dir, m.Addr, m.PID
	ended := false
	defer func() {
		if !ended {
			err = errors.Join(err, s.end(cache))
		}
	}()
	s.crew = newCrew(s, cache)
	if err := s.crew.learn(); err != nil {
		return err
	}
	begin := time.Now()
	for round := 1; time.Since(begin) < s.length; round++ {
		if err := s.round(round, begin); err != nil {
			return err
		}
	}
	last, err := s.stats()
	if err != nil {
		return err
	}
	ended = true
	return errors.Join(s.report(last), s.end(cache))
}

// round has trainers and faults come and go, and looks at the daemon when they have gone.
func (s *soak) round(n int, begin time.Time) error {
	seeds := s.chance.Uint64()
	over := make(chan struct{})
	done := make(chan error, 1)
	go func() { done <- s.weather(rand.New(rand.NewPCG(seeds, 1)), over) }()
	err := s.crew.work(rand.New(rand.NewPCG(seeds, 2)), time.Now().Add(roundTime))
	close(over)
	if err := errors.Join(err, <-done, s.Bed.Failed()); err != nil {
		return err
	}
	at, err := s.rest()
	if err != nil {
		return err
	}
	s.calm = append(s.calm, at)
	s.Say("%4d %6s  RSS %5.1f MiB  %3d files  %3d goroutines  ledger %5.1f MiB  %s", n, time.Since(begin).Round(time.Second), mib(at.RSS), at.Files, at.Goroutines, mib(at.Ledger), s.crew.tally())
	return nil
}

func mib(n int64) float64 { return float64(n) / (1 << 20) }

// rest waits until nobody wants anything of the daemon, and looks at it.
func (s *soak) rest() (sample, error) {
	for deadline := time.Now().Add(settleTime); ; time.Sleep(100 * time.Millisecond) {
		st, err := s.stats()
		if err != nil {
			return sample{}, err
		}
		if st.PID != s.pid {
			return sample{}, fmt.Errorf("the daemon is another process now: %d, was %d", st.PID, s.pid)
		}
		if st.Feed.Open == 0 && st.Feed.Held == 0 && st.InFlight == 0 && st.Users == 1 {
			at := sample{RSS: st.Memory.RSSAnon, Ledger: st.Memory.Ledger - st.Memory.Ring}
			if at.Files, err = s.files(); err != nil {
				return sample{}, err
			}
			at.Goroutines, err = s.goroutines()
			return at, err
		}
		if time.Now().After(deadline) {
			return sample{}, fmt.Errorf("the daemon does not come to rest: %+v", st)
		}
	}
}

// files counts the daemon's descriptors, but for sockets: connections to the store are kept for 90 s, as many as were
// wanted then.
func (s *soak) files() (n int64, err error) {
	dir := fmt.Sprintf("/proc/%d/fd", s.pid)
	list, err := os.ReadDir(dir)
	for _, f := range list {
		if what, e := os.Readlink(filepath.Join(dir, f.Name())); e == nil && !strings.HasPrefix(what, "socket:") {
			n++
		}
	}
	return n, err
}

// goroutines counts the daemon's, but for the two of each connection that is kept.
func (s *soak) goroutines() (n int64, err error) {
	resp, err := http.Get("http://" + s.admin + "/debug/pprof/goroutine?debug=1")
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	for group := range strings.SplitSeq(string(text), "\n\n") {
		count, _, ok := strings.Cut(group, " @ ")
		if k, e := strconv.ParseInt(count[strings.LastIndexByte(count, '\n')+1:], 10, 64); ok && e == nil && !strings.Contains(group, "net/http.") {
			n += k
		}
	}
	return n, err
}

func (s *soak) stats() (st stats, err error) {
	out, err := s.Command(s.Shoal, "stat", s.feed, "--json").Output()
	if err != nil {
		return st, fmt.Errorf("shoal stat: %w", err)
	}
	return st, json.Unmarshal(out, &st)
}

// report says how flat the daemon stayed.
func (s *soak) report(last stats) error {
	s.Say("\n%s; %d GETs, errors of the store: %v; %d files opened, %d samples fed, %d bad.", s.crew.tally(), last.Gets, last.Store, last.Opens, last.Feed.Total.Samples, last.Feed.Total.Bad)
	if len(s.calm) < 9 {
		s.Say("Too few rounds to judge growth: give it 5 minutes at least.")
		return nil
	}
	// The first third warms up: pools fill, the runtime finds its heap's size.
	third := len(s.calm) / 3
	var errs []error
	s.Say("\n| at rest, median of rounds | %d-%d | %d-%d | allowed |\n| --- | --- | --- | --- |", third+1, 2*third, len(s.calm)-third+1, len(s.calm))
	for _, m := range []struct {
		name  string
		of    func(sample) int64
		unit  float64
		slack func(before float64) float64
	}{
		{"RSS without file pages, MiB", func(p sample) int64 { return p.RSS }, 1 << 20, func(b float64) float64 { return b*1.08 + 8 }},
		{"open files, but for sockets", func(p sample) int64 { return p.Files }, 1, func(b float64) float64 { return b + 6 }},
		// Pools of workers come to their full size little by little: 512 fetchers, 16 readers of the disk.
		{"goroutines, but for kept connections", func(p sample) int64 { return p.Goroutines }, 1, func(b float64) float64 { return b*1.02 + 6 }},
		{"ledger without the ring, MiB", func(p sample) int64 { return p.Ledger }, 1 << 20, func(b float64) float64 { return b + 1 }},
	} {
		median := func(part []sample) float64 {
			var v []float64
			for _, p := range part {
				v = append(v, float64(m.of(p))/m.unit)
			}
			return kit.Median(v)
		}
		before, after := median(s.calm[third:2*third]), median(s.calm[len(s.calm)-third:])
		s.Say("| %s | %.1f | %.1f | %.1f |", m.name, before, after, m.slack(before))
		if after > m.slack(before) {
			errs = append(errs, fmt.Errorf("%s grew from %.1f to %.1f", m.name, before, after))
		}
	}
	return errors.Join(errs...)
}

// end unmounts, waits for the daemon, and reads its log.
func (s *soak) end(cache string) error {
	err := s.fine()
	if out, e := s.Command(s.Shoal, "umount", s.mnt).CombinedOutput(); e != nil {
		err = errors.Join(err, fmt.Errorf("shoal umount: %w\n%s", e, out))
	}
	text, e := os.ReadFile(filepath.Join(cache, "shoal.log"))
	if e != nil {
		return errors.Join(err, e)
	}
	var bad []string
	for line := range bytes.Lines(text) {
		for _, sign := range []string{"level=ERROR", "panic:", "fatal error:", "goroutine "} {
			if bytes.Contains(line, []byte(sign)) {
				bad = append(bad, strings.TrimSpace(string(line)))
			}
		}
	}
	if len(bad) > 0 {
		err = errors.Join(err, fmt.Errorf("the daemon's log has %d errors:\n%s", len(bad), strings.Join(bad[:min(len(bad), 20)], "\n")))
	}
	if out, e := s.Command(s.Shoal, "fsck", cache).CombinedOutput(); e != nil {
		err = errors.Join(err, fmt.Errorf("shoal fsck: %w\n%s", e, out))
	}
	return err
}

// fine has the store answer as it should.
func (s *soak) fine() error {
	return s.Bed.Far(s.Ctx, proxy.Options{Latency: latency, Sigma: 0.3})
}

// weathers are what a store is like for a few seconds.
var weathers = []proxy.Options{
	{Latency: latency, Sigma: 0.3},
	{Latency: latency, Sigma: 0.3},
	{Latency: 80 * time.Millisecond, Sigma: 0.6},
	{Latency: latency, Bandwidth: 4 << 20},
	{Latency: latency, Faults: []proxy.Fault{{Kind: proxy.Unavailable, P: 0.1}}},
	{Latency: latency, Faults: []proxy.Fault{{Kind: proxy.Reset, P: 0.05, At: 0.5}, {Kind: proxy.Truncate, P: 0.05, At: 0.5}}},
	{Latency: latency, Faults: []proxy.Fault{{Kind: proxy.Stall, P: 0.01, For: 5 * time.Second, At: 0.5}, {Kind: proxy.Slow, P: 0.02, For: 2 * time.Second}}},
	{Latency: latency, Faults: []proxy.Fault{{Kind: proxy.Unavailable, P: 1}}}, // an outage
	{Latency: latency, Faults: []proxy.Fault{{Kind: proxy.Reset, P: 1, At: 0.5}}},
}

// weather changes until over is closed, and is fine then.
func (s *soak) weather(chance *rand.Rand, over <-chan struct{}) error {
	for {
		w := weathers[chance.IntN(len(weathers))]
		length := time.Duration(2+chance.IntN(5)) * time.Second
		if slices.ContainsFunc(w.Faults, func(f proxy.Fault) bool { return f.P == 1 }) {
			length = 2 * time.Second // which retries outlast
		}
		w.Seed = chance.Uint64()
		if err := s.Bed.Far(s.Ctx, w); err != nil {
			return err
		}
		select {
		case <-time.After(length):
		case <-over:
			return s.fine()
		case <-s.Ctx.Done():
			return s.Ctx.Err()
		}
	}
}
