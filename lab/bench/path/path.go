// Package path has the benchmarks of the whole path, cold and warm: photographs behind a real S3 server and a proxy that
// adds latency. Everything that is compared alternates (A B A B …); medians are reported, with all runs beside them.
package path

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/shoalfs/shoal/lab/bench/kit"
	"github.com/shoalfs/shoal/lab/rig/cputime"
)

type bench struct {
	*kit.Kit
	reps    int
	memory  string
	peakRSS int64
	far     []int // the processes of the store: server and proxy
}

// work is the processor time that a file took, in µs, by who spent it, and the share of the cores that idled.
type work struct{ store, daemon, rest, idle float64 }

// worked measures what f makes of the files, with a daemon or without (0).
func (b *bench) worked(daemon int, f func() error) (w work, err error) {
	sum := func(pids ...int) (s float64) {
		for _, pid := range pids {
			s += kit.CPU(pid)
		}
		return s
	}
	store, own := sum(b.far...), sum(daemon)
	busy, idle := cputime.Cores()
	err = f()
	busy2, idle2 := cputime.Cores()
	w.store, w.daemon, w.idle = sum(b.far...)-store, sum(daemon)-own, (idle2-idle)/max(busy2-busy+idle2-idle, 0.01)
	w.rest = busy2 - busy - w.store - w.daemon
	for _, v := range []*float64{&w.store, &w.daemon, &w.rest} {
		*v *= 1e6 / float64(len(b.Paths))
	}
	return w, err
}

// median takes each column's.
func median(works []work) (m work) {
	column := func(f func(work) float64) float64 {
		var v []float64
		for _, w := range works {
			v = append(v, f(w))
		}
		return kit.Median(v)
	}
	return work{
		column(func(w work) float64 { return w.store }), column(func(w work) float64 { return w.daemon }),
		column(func(w work) float64 { return w.rest }), column(func(w work) float64 { return w.idle }),
	}
}

// Bench is the benchmark path: a cold epoch, a warm one, and the feed beside a DataLoader.
func Bench(flags *flag.FlagSet) func(k *kit.Kit) error {
	latency := flags.Duration("latency", 30*time.Millisecond, "median latency of the store")
	count := flags.Int("photos", 4096, "photographs")
	reps := flags.Int("reps", 5, "runs of each side")
	memory := flags.String("memory", "512MiB", "--memory of the daemon")
	parts := flags.String("parts", "cold,warm,feed", "what to measure")
	return func(k *kit.Kit) error {
		b := &bench{Kit: k, reps: *reps, memory: *memory}
		return b.run(*count, *latency, strings.Split(*parts, ","))
	}
}

func (b *bench) run(count int, latency time.Duration, parts []string) (err error) {
	if err := b.Stored(count, latency); err != nil {
		return err
	}
	b.far = []int{b.Server.Pid(), b.Far.Pid()}
	b.Header("The whole path, cold and warm")
	b.Say("Readers, daemon, proxy and S3 server share the cores. %d photographs, %.1f KB each on average, --memory %s.\n", b.Up.Files, b.KB(), b.memory)
	for _, part := range parts {
		do, ok := map[string]func() error{"cold": b.cold, "warm": b.warm, "feed": b.feed}[part]
		if !ok {
			return fmt.Errorf("no part is called %q: cold, warm, feed", part)
		}
		if err := do(); err != nil {
			return err
		}
	}
	b.Say("## Memory\n")
	b.Say("Highest RSS of any daemon in this run (VmHWM): %d MiB with --memory %s.", b.peakRSS>>20, b.memory)
	return nil
}

// mount mounts the photographs.
func (b *bench) mount(cache string, flags ...string) (*kit.Mount, error) {
	return b.Mount(kit.Source, "mnt", append([]string{"--cache-dir", filepath.Join(b.Dir, cache), "--memory", b.memory, "--kernel-cache", "off"}, flags...)...)
}

// serve serves the photographs.
func (b *bench) serve(cache string) (*kit.Mount, error) {
	return b.Serve(kit.Source, "mnt", "--cache-dir", filepath.Join(b.Dir, cache), "--memory", b.memory)
}

// use has f use a daemon, and ends it.
func (b *bench) use(m *kit.Mount, err error, f func(m *kit.Mount) error) error {
	if err != nil {
		return err
	}
	err = f(m)
	b.peakRSS = max(b.peakRSS, kit.Status(m.PID, "VmHWM"))
	return errors.Join(err, m.Close())
}

// shuffled lists what DistributedSampler(seed=7) reads in epoch 0.
func (b *bench) shuffled() (string, error) {
	out, err := b.Command(b.Shoal, "order", kit.Cold, "--n", strconv.Itoa(len(b.Paths))).Output()
	if err != nil {
		return "", err
	}
	var paths []string
	for _, word := range strings.Fields(string(out)) {
		i, err := strconv.Atoi(word)
		if err != nil {
			return "", err
		}
		paths = append(paths, b.Paths[i])
	}
	return b.List("order.txt", paths)
}

// bareClient gets n objects with so many requests in flight, and returns how many in a second.
func (b *bench) bareClient(inFlight, n int) (float64, error) {
	r, err := b.Bare(inFlight, "-prefix", "train/", "-n", strconv.Itoa(n))
	return r.Rate, err
}

// cold compares a first epoch with a known order, one without, a raw feed, and a bare client.
func (b *bench) cold() error {
	b.Say("## Cold epoch, 8 reader threads\n")
	best, curve, err := b.Best([]int{8, 16, 32, 64, 96, 128, 192, 256, 512}, func(c int) (float64, error) {
		if c <= 16 {
			return b.bareClient(c, min(len(b.Paths), 1024))
		}
		return b.bareClient(c, len(b.Paths))
	})
	if err != nil {
		return err
	}
	b.Say("Bare minio-go client, objects/s by requests in flight: %s.\n", curve)

	list, err := b.shuffled()
	if err != nil {
		return err
	}
	rates, works := map[string][]float64{}, map[string][]work{}
	for rep := range b.reps + 1 {
		add := func(what string, rate float64, w work) {
			if rep > 0 { // the first round is verified, and its rates do not count
				rates[what], works[what] = append(rates[what], rate), append(works[what], w)
			}
		}
		for _, spec := range []string{kit.Cold, "none"} {
			if err := b.empty(); err != nil {
				return err
			}
			m, err := b.mount(coldCache, "--order", spec)
			if err := b.use(m, err, func(m *kit.Mount) error {
				var flags []string
				if rep == 0 {
					flags = []string{"-verify", b.Photos}
				}
				var r kit.Read
				w, err := b.worked(m.PID, func() (err error) {
					r, err = b.Read(m.Dir, list, flags...)
					return err
				})
				if add(spec, r.Rate, w); rep == 0 && err == nil {
					b.Say("Verified byte for byte, cold, --order %s: %d files.", spec, r.Files)
				}
				return err
			}); err != nil {
				return err
			}
		}
		if err := b.empty(); err != nil {
			return err
		}
		m, err := b.serve(coldCache)
		if err := b.use(m, err, func(m *kit.Mount) error {
			var f kit.Fed
			w, err := b.worked(m.PID, func() (err error) {
				f, err = b.Feed(m.Addr, "--order", kit.Cold)
				return err
			})
			if add("feed", f.Rate, w); err == nil && f.Samples != len(b.Paths) {
				err = fmt.Errorf("the feed gave %d samples of %d", f.Samples, len(b.Paths))
			}
			return err
		}); err != nil {
			return err
		}
		var rate float64
		w, err := b.worked(0, func() (err error) {
			rate, err = b.bareClient(best, len(b.Paths))
			return err
		})
		if err != nil {
			return err
		}
		add("bare", rate, w)
	}
	with, without, feed, bare := rates[kit.Cold], rates["none"], rates["feed"], rates["bare"]
	b.Say("")
	b.Say("| | files/s, median | runs | processor time of a file, µs: server and proxy | daemon | client and kernel threads | of the cores idle |")
	b.Say("| --- | ---: | --- | ---: | ---: | ---: | ---: |")
	for _, row := range []struct{ name, key string }{
		{"mount, order known", kit.Cold}, {"mount, no order", "none"}, {"raw feed", "feed"}, {fmt.Sprintf("bare client, %d in flight", best), "bare"},
	} {
		w := median(works[row.key])
		b.Say("| %s | %.0f | %s | %.0f | %.0f | %.0f | %.0f%% |", row.name, kit.Median(rates[row.key]), kit.Numbers(rates[row.key], 0),
			w.store, w.daemon, w.rest, 100*w.idle)
	}
	known, fed := kit.Median(with)/kit.Median(bare), kit.Median(feed)/kit.Median(bare)
	b.Say("\nOrder known is **%.1f times** no order, and **%.0f%%** of the bare client (target 80%%: %s). The raw feed reaches **%.0f%%** (target 90%%: %s).\n",
		kit.Median(with)/kit.Median(without), 100*known, kit.Verdict(known >= 0.8), 100*fed, kit.Verdict(fed >= 0.9))
	return nil
}

const coldCache = "cache-cold"

// empty empties the cache directory of the cold epochs.
func (b *bench) empty() error { return os.RemoveAll(filepath.Join(b.Dir, coldCache)) }

// filled fills the cache directory of the warm epochs.
func (b *bench) filled(list string) error {
	m, err := b.mount(warmCache, "--order", "sequential")
	return b.use(m, err, func(m *kit.Mount) error {
		_, err := b.Read(m.Dir, list)
		return err
	})
}

// warm compares a remounted warm cache with the ceiling of go-fuse.
func (b *bench) warm() error {
	b.Say("## Warm epoch after a remount, kernel caches dropped, 8 reader threads\n")
	list, err := b.Shuffled("warm.txt")
	if err != nil {
		return err
	}
	if err := b.filled(list); err != nil {
		return err
	}
	w := &warm{Kit: b.Kit, list: list, memory: b.memory}
	if err := w.verify(w.shoal); err != nil {
		return err
	}
	b.Say("Verified byte for byte, warm: %d files.\n", len(b.Paths))
	sides := []*side{
		{name: "mount", start: w.shoal, cold: true},
		{name: "fuseceiling", start: w.ceiling, cold: true},
		{name: "the local folder, cold page cache", start: w.local, cold: true},
	}
	if err := w.rounds(sides, b.reps); err != nil {
		return err
	}
	b.Say("| | files/s, median | runs |")
	b.Say("| --- | ---: | --- |")
	for _, s := range sides {
		b.Say("| %s | %.0f | %s |", s.name, kit.Median(s.rates), kit.Numbers(s.rates, 0))
	}
	b.peakRSS = max(b.peakRSS, w.peakRSS)
	b.Say("\nThe mount reaches **%.0f%%** of the ceiling.\n", 100*kit.Median(sides[0].rates)/kit.Median(sides[1].rates))
	return nil
}

// feed compares the feed with a DataLoader on the same warm mount.
func (b *bench) feed() error {
	b.Say("## Decoded batches into a Python process, warm: RandomResizedCrop(224) + flip, batch 64\n")
	all, err := b.List("all.txt", b.Paths)
	if err != nil {
		return err
	}
	if err := b.filled(all); err != nil {
		return err
	}
	python, err := filepath.Abs("python")
	if err != nil {
		return err
	}
	b.Env = append(b.Env, "PYTHONPATH="+python)
	m, err := b.serve(warmCache)
	return b.use(m, err, func(m *kit.Mount) error {
		b.Say("| batches | images/s, median | runs |")
		b.Say("| --- | ---: | --- |")
		for _, kind := range []string{"uint8", "fp32"} {
			rates := map[string][]float64{}
			for range b.reps {
				for door, where := range map[string]string{"feed": m.Addr, "dataloader": m.Dir} {
					var r struct {
						Rate float64 `json:"images_per_s"`
					}
					if err := b.Run(&r, "/usr/bin/python3", "lab/bench/path/loaders.py", door, where, "64", kind); err != nil {
						return err
					}
					rates[door] = append(rates[door], r.Rate)
				}
			}
			b.Say("| feed, %s | %.0f | %s |", kind, kit.Median(rates["feed"]), kit.Numbers(rates["feed"], 0))
			b.Say("| ImageFolder + DataLoader(num_workers=2), PIL, %s | %.0f | %s |", kind, kit.Median(rates["dataloader"]), kit.Numbers(rates["dataloader"], 0))
			b.Say("| ratio, %s | **%.2f** | |", kind, kit.Median(rates["feed"])/kit.Median(rates["dataloader"]))
		}
		b.Say("")
		return nil
	})
}
