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
	list    string // a file: paths in the order of the warm epochs
	far     []int  // the processes of the store: server and proxy
}

// work is the processor time that a file took, in µs, by who spent it: the store, the daemon and the rest; and the share
// of the cores that idled, in percent.
type work [4]float64

// worked measures what f makes of the files, with a daemon or without (0).
func (b *bench) worked(daemon int, f func() error) (w work, err error) {
	spent := func() (store, own, busy, idle float64) {
		for _, pid := range b.far {
			store += kit.CPU(pid)
		}
		busy, idle = cputime.Cores()
		return store, kit.CPU(daemon), busy, idle
	}
	store, own, busy, idle := spent()
	err = f()
	store2, own2, busy2, idle2 := spent()
	w[0], w[1] = store2-store, own2-own
	w[2] = busy2 - busy - w[0] - w[1]
	for i := range w[:3] {
		w[i] *= 1e6 / float64(len(b.Paths))
	}
	w[3] = 100 * (idle2 - idle) / max(busy2-busy+idle2-idle, 0.01)
	return w, err
}

// median takes each column's.
func median(works []work) (m work) {
	for i := range m {
		var column []float64
		for _, w := range works {
			column = append(column, w[i])
		}
		m[i] = kit.Median(column)
	}
	return m
}

// Bench is the benchmark path: a cold epoch and a warm one.
func Bench(flags *flag.FlagSet) func(k *kit.Kit) error {
	latency := flags.Duration("latency", 30*time.Millisecond, "median latency of the store")
	count := flags.Int("photos", 4096, "photographs")
	reps := flags.Int("reps", 5, "runs of each side")
	memory := flags.String("memory", "512MiB", "--memory of the daemon")
	parts := flags.String("parts", "cold,warm", "what to measure")
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
		do, ok := map[string]func() error{"cold": b.cold, "warm": b.warm}[part]
		if !ok {
			return fmt.Errorf("no part is called %q: cold, warm", part)
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

// bareClient gets n objects with so many requests in flight, and returns how many in a second.
func (b *bench) bareClient(inFlight, n int) (float64, error) {
	var r struct {
		Rate float64 `json:"objects_per_s"`
	}
	err := b.Part(&r, "bareclient", "-c", strconv.Itoa(inFlight), "-prefix", "train/", "-n", strconv.Itoa(n))
	return r.Rate, err
}

// best finds the number of requests in flight at which a bare client is fastest, and says how fast it is at each.
func (b *bench) best() (best int, curve string, err error) {
	top := 0.0
	for _, c := range []int{8, 16, 32, 64, 96, 128, 192, 256, 512} {
		n := len(b.Paths)
		if c <= 16 {
			n = min(n, 1024)
		}
		r, err := b.bareClient(c, n)
		if err != nil {
			return 0, "", err
		}
		curve += fmt.Sprintf(", %d: %.0f", c, r)
		if r > top {
			best, top = c, r
		}
	}
	return best, strings.TrimPrefix(curve, ", "), nil
}

// cold compares a first epoch with a known order, one without, a raw feed, and a bare client.
func (b *bench) cold() error {
	b.Say("## Cold epoch, 8 reader threads\n")
	best, curve, err := b.best()
	if err != nil {
		return err
	}
	b.Say("Bare minio-go client, objects/s by requests in flight: %s.\n", curve)
	list, err := b.Order(kit.Cold, "order.txt")
	if err != nil {
		return err
	}
	rates, works := map[string][]float64{}, map[string][]work{}
	for rep := range b.reps + 1 {
		for _, what := range []string{kit.Cold, "none", "feed", "bare"} {
			var rate float64
			var w work
			switch what {
			case "feed":
				rate, w, err = b.coldFeed()
			case "bare":
				w, err = b.worked(0, func() (err error) {
					rate, err = b.bareClient(best, len(b.Paths))
					return err
				})
			default:
				rate, w, err = b.coldMount(what, list, rep == 0)
			}
			if err != nil {
				return err
			}
			if rep > 0 { // the first round is verified, and its rates do not count
				rates[what], works[what] = append(rates[what], rate), append(works[what], w)
			}
		}
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
			w[0], w[1], w[2], w[3])
	}
	known, fed := kit.Median(with)/kit.Median(bare), kit.Median(feed)/kit.Median(bare)
	b.Say("\nOrder known is **%.1f times** no order, and **%.0f%%** of the bare client (target 80%%: %s). The raw feed reaches **%.0f%%** (target 90%%: %s).\n",
		kit.Median(with)/kit.Median(without), 100*known, kit.Verdict(known >= 0.8), 100*fed, kit.Verdict(fed >= 0.9))
	return nil
}

// coldMount reads an epoch through a mount whose cache is empty.
func (b *bench) coldMount(spec, list string, verify bool) (rate float64, w work, err error) {
	if err := b.empty(); err != nil {
		return 0, w, err
	}
	m, err := b.mount(coldCache, "--order", spec)
	err = b.use(m, err, func(m *kit.Mount) (err error) {
		var flags []string
		if verify {
			flags = []string{"-verify", b.Photos}
		}
		var r kit.Read
		w, err = b.worked(m.PID, func() (err error) {
			r, err = b.Read(m.Dir, list, flags...)
			return err
		})
		if rate = r.Rate; verify && err == nil {
			b.Say("Verified byte for byte, cold, --order %s: %d files.", spec, r.Files)
		}
		return err
	})
	return rate, w, err
}

// coldFeed takes an epoch from a raw feed whose cache is empty.
func (b *bench) coldFeed() (rate float64, w work, err error) {
	if err := b.empty(); err != nil {
		return 0, w, err
	}
	m, err := b.serve(coldCache)
	err = b.use(m, err, func(m *kit.Mount) (err error) {
		var f kit.Fed
		w, err = b.worked(m.PID, func() (err error) {
			f, err = b.Feed(m.Addr, "--order", kit.Cold)
			return err
		})
		if rate = f.Rate; err == nil && f.Samples != len(b.Paths) {
			err = fmt.Errorf("the feed gave %d samples of %d", f.Samples, len(b.Paths))
		}
		return err
	})
	return rate, w, err
}

const coldCache = "cache-cold"

// empty empties the cache directory of the cold epochs.
func (b *bench) empty() error { return os.RemoveAll(filepath.Join(b.Dir, coldCache)) }
