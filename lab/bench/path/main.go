// Command path measures the whole path side by side in one run, on real photographs behind a real S3
// server and a proxy that adds latency, and writes lab/bench/results/path.md. Run it from the repository's
// root: go run ./lab/bench/path
//
// Everything that is compared alternates (A B A B …); medians are reported, with all runs beside them.
package main

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/shoalfs/shoal/lab/bench/kit"
	"github.com/shoalfs/shoal/lab/rig/cputime"
)

const source = "s3://photos/train"

type bench struct {
	*kit.Kit
	photos  string
	paths   []string // in ImageFolder's order
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
		*v *= 1e6 / float64(len(b.paths))
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

func main() {
	latency := flag.Duration("latency", 30*time.Millisecond, "median latency of the store")
	count := flag.Int("photos", 4096, "photographs")
	reps := flag.Int("reps", 5, "runs of each side")
	memory := flag.String("memory", "512MiB", "--memory of the daemon")
	parts := flag.String("parts", "cold,warm,feed", "what to measure")
	kit.Main("lab/bench/results/path.md", func(k *kit.Kit) error {
		b := &bench{Kit: k, reps: *reps, memory: *memory}
		return b.run(*count, *latency, strings.Split(*parts, ","))
	})
}

func (b *bench) run(count int, latency time.Duration, parts []string) (err error) {
	if b.photos, b.paths, err = b.Photos(count); err != nil {
		return err
	}
	server, far, err := b.Store(latency)
	if err != nil {
		return err
	}
	defer server.Stop()
	defer far.Stop()
	b.far = []int{server.Pid(), far.Pid()}
	up, err := server.Upload(b.Ctx, b.photos, "photos", "train", nil)
	if err != nil {
		return err
	}
	b.Header("The whole path, cold and warm")
	b.Say("Readers, daemon, proxy and S3 server share the cores. %d photographs, %.1f KB each on average, --memory %s.\n",
		up.Files, float64(up.Bytes)/float64(up.Files)/1e3, b.memory)
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

// mount mounts the photographs, does f, and unmounts.
func (b *bench) mount(cache string, f func(m *kit.Mount) error, flags ...string) error {
	m, err := b.Mount(source, "mnt", append([]string{"--cache-dir", cache, "--memory", b.memory, "--kernel-cache", "off"}, flags...)...)
	if err != nil {
		return err
	}
	err = f(m)
	b.peakRSS = max(b.peakRSS, kit.Status(m.PID, "VmHWM"))
	if e := m.Close(); err == nil {
		err = e
	}
	return err
}

// shuffled lists what DistributedSampler(seed=7) reads in epoch 0.
func (b *bench) shuffled() (string, error) {
	out, err := b.Command(b.Shoal, "order", "torch:seed=7", "--n", strconv.Itoa(len(b.paths))).Output()
	if err != nil {
		return "", err
	}
	var paths []string
	for _, word := range strings.Fields(string(out)) {
		i, err := strconv.Atoi(word)
		if err != nil {
			return "", err
		}
		paths = append(paths, b.paths[i])
	}
	return b.List("order.txt", paths)
}

type bare struct {
	Rate float64 `json:"objects_per_s"`
}

// bareClient gets n objects (0: all) with so many requests in flight.
func (b *bench) bareClient(inFlight, n int) (r bare, err error) {
	err = b.Run(&r, filepath.Join(b.Bin, "bareclient"), "-prefix", "train/", "-c", strconv.Itoa(inFlight), "-n", strconv.Itoa(n))
	return r, err
}

// cold compares a first epoch with a known order, one without, a raw feed, and a bare client.
func (b *bench) cold() error {
	b.Say("## Cold epoch, 8 reader threads\n")
	best, bestRate := 0, 0.0
	var curve []string
	for _, c := range []int{8, 16, 32, 64, 96, 128, 192, 256, 512} {
		n := len(b.paths)
		if c <= 16 {
			n = min(n, 1024)
		}
		r, err := b.bareClient(c, n)
		if err != nil {
			return err
		}
		curve = append(curve, fmt.Sprintf("%d: %.0f", c, r.Rate))
		if r.Rate > bestRate {
			best, bestRate = c, r.Rate
		}
	}
	b.Say("Bare minio-go client, objects/s by requests in flight: %s.\n", strings.Join(curve, ", "))

	list, err := b.shuffled()
	if err != nil {
		return err
	}
	cache := filepath.Join(b.Dir, "cache-cold")
	rates, works := map[string][]float64{}, map[string][]work{}
	for rep := range b.reps + 1 {
		for _, spec := range []string{"torch:seed=7", "none"} {
			if err := os.RemoveAll(cache); err != nil {
				return err
			}
			err := b.mount(cache, func(m *kit.Mount) error {
				var flags []string
				if rep == 0 {
					flags = []string{"-verify", b.photos} // this run's rate is not counted
				}
				var r kit.Result
				w, err := b.worked(m.PID, func() (err error) {
					r, err = b.Read(m.Dir, list, flags...)
					return err
				})
				if rep > 0 {
					rates[spec], works[spec] = append(rates[spec], r.Rate), append(works[spec], w)
				} else if err == nil {
					b.Say("Verified byte for byte, cold, --order %s: %d files.", spec, r.Files)
				}
				return err
			}, "--order", spec)
			if err != nil {
				return err
			}
		}
		raw, rawWork, err := b.rawFeed(cache)
		if err != nil {
			return err
		}
		var r bare
		bareWork, err := b.worked(0, func() (err error) {
			r, err = b.bareClient(best, len(b.paths))
			return err
		})
		if err != nil {
			return err
		}
		if rep > 0 {
			rates["feed"], rates["bare"] = append(rates["feed"], raw), append(rates["bare"], r.Rate)
			works["feed"], works["bare"] = append(works["feed"], rawWork), append(works["bare"], bareWork)
		}
	}
	with, without, feed, bare := rates["torch:seed=7"], rates["none"], rates["feed"], rates["bare"]
	b.Say("")
	b.Say("| | files/s, median | runs | processor time of a file, µs: server and proxy | daemon | client and kernel threads | of the cores idle |")
	b.Say("| --- | ---: | --- | ---: | ---: | ---: | ---: |")
	for _, row := range []struct{ name, key string }{
		{"mount, order known", "torch:seed=7"}, {"mount, no order", "none"}, {"raw feed", "feed"}, {fmt.Sprintf("bare client, %d in flight", best), "bare"},
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

// serve serves the photographs, does f, and ends the daemon.
func (b *bench) serve(cache string, f func(addr string, m *kit.Mount) error) error {
	mnt := filepath.Join(b.Dir, "mnt")
	if err := os.MkdirAll(mnt, 0o755); err != nil {
		return err
	}
	addr := "unix://" + filepath.Join(b.Dir, "feed.sock")
	if err := b.Run(nil, b.Shoal, "serve", source, "--listen", addr, "--mount", mnt, "--cache-dir", cache, "--memory", b.memory, "--daemon"); err != nil {
		return err
	}
	m, err := b.Attach(mnt)
	if err == nil {
		err = f(addr, m)
		b.peakRSS = max(b.peakRSS, kit.Status(m.PID, "VmHWM"))
	}
	if e := m.Close(); err == nil {
		err = e
	}
	return err
}

// rawFeed consumes one cold epoch of undecoded samples and returns the rate, samples/s.
func (b *bench) rawFeed(cache string) (rate float64, w work, err error) {
	if err := os.RemoveAll(cache); err != nil {
		return 0, w, err
	}
	err = b.serve(cache, func(addr string, m *kit.Mount) error {
		var r struct {
			Rate    float64 `json:"samples_per_second"`
			Samples int     `json:"samples"`
		}
		var err error
		w, err = b.worked(m.PID, func() error {
			return b.Run(&r, b.Shoal, "feed", addr, "--batch", "64", "--order", "torch:seed=7", "--json")
		})
		if err != nil {
			return err
		}
		if r.Samples != len(b.paths) {
			return fmt.Errorf("the feed gave %d samples of %d", r.Samples, len(b.paths))
		}
		rate = r.Rate
		return nil
	})
	return rate, w, err
}

// warm compares a remounted warm cache with the ceiling of go-fuse.
func (b *bench) warm() error {
	b.Say("## Warm epoch after a remount, kernel caches dropped, 8 reader threads\n")
	var paths []string
	for _, i := range rand.New(rand.NewPCG(1, 1)).Perm(len(b.paths)) {
		paths = append(paths, b.paths[i])
	}
	list, err := b.List("warm.txt", paths)
	if err != nil {
		return err
	}
	cache, err := b.filled(list)
	if err != nil {
		return err
	}
	var ours, ceiling, local []float64
	for rep := range b.reps + 1 {
		err := b.mount(cache, func(m *kit.Mount) error {
			flags := []string{"-drop-caches"}
			if rep == 0 {
				flags = append(flags, "-verify", b.photos)
			}
			r, err := b.Read(m.Dir, list, flags...)
			if rep > 0 {
				ours = append(ours, r.Rate)
			} else if err == nil {
				b.Say("Verified byte for byte, warm: %d files.\n", r.Files)
			}
			return err
		})
		if err != nil {
			return err
		}
		if rep == 0 {
			continue
		}
		r, err := b.ceiling(list)
		if err != nil {
			return err
		}
		ceiling = append(ceiling, r.Rate)
		if r, err = b.Read(b.photos, list, "-drop-caches"); err != nil {
			return err
		}
		local = append(local, r.Rate)
	}
	b.Say("| | files/s, median | runs |")
	b.Say("| --- | ---: | --- |")
	b.Say("| mount | %.0f | %s |", kit.Median(ours), kit.Numbers(ours, 0))
	b.Say("| lab/bench/fuseceiling | %.0f | %s |", kit.Median(ceiling), kit.Numbers(ceiling, 0))
	b.Say("| the local folder, cold page cache | %.0f | %s |", kit.Median(local), kit.Numbers(local, 0))
	b.Say("\nThe mount reaches **%.0f%%** of the ceiling.\n", 100*kit.Median(ours)/kit.Median(ceiling))
	return nil
}

// filled returns a cache directory that holds everything.
func (b *bench) filled(list string) (string, error) {
	cache := filepath.Join(b.Dir, "cache-warm")
	return cache, b.mount(cache, func(m *kit.Mount) error {
		_, err := b.Read(m.Dir, list)
		return err
	}, "--order", "sequential")
}

// ceiling reads the same files through a filesystem that does nothing but serve them.
func (b *bench) ceiling(list string) (kit.Result, error) {
	mnt := filepath.Join(b.Dir, "ceiling")
	if err := os.MkdirAll(mnt, 0o755); err != nil {
		return kit.Result{}, err
	}
	c := b.Command(filepath.Join(b.Bin, "fuseceiling"), "-from", b.photos, mnt)
	c.Stderr = os.Stderr
	if err := c.Start(); err != nil {
		return kit.Result{}, err
	}
	for range 100 {
		if _, err := os.Stat(filepath.Join(mnt, b.paths[0])); err == nil {
			break
		}
		time.Sleep(50 * time.Millisecond)
	}
	r, err := b.Read(mnt, list, "-drop-caches")
	_ = c.Process.Signal(syscall.SIGINT)
	if e := c.Wait(); err == nil {
		err = e
	}
	return r, err
}

// feed compares the feed with a DataLoader on the same warm mount.
func (b *bench) feed() error {
	b.Say("## Decoded batches into a Python process, warm: RandomResizedCrop(224) + flip, batch 64\n")
	all, err := b.List("all.txt", b.paths)
	if err != nil {
		return err
	}
	cache, err := b.filled(all)
	if err != nil {
		return err
	}
	python, err := filepath.Abs("python")
	if err != nil {
		return err
	}
	b.Env = append(b.Env, "PYTHONPATH="+python)
	return b.serve(cache, func(addr string, m *kit.Mount) error {
		b.Say("| batches | images/s, median | runs |")
		b.Say("| --- | ---: | --- |")
		for _, kind := range []string{"uint8", "fp32"} {
			rates := map[string][]float64{}
			for range b.reps {
				for door, where := range map[string]string{"feed": addr, "dataloader": m.Dir} {
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
