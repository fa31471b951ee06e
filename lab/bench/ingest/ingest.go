// Package ingest is the benchmark of that name.
package ingest

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/shoalfs/shoal/lab/bench/kit"
)

type bench struct {
	*kit.Kit
	python string
	count  int
	reps   int
}

// Bench measures what a trainer gets from the feed beside what it gets from the loaders of others, on the same photographs,
// with a Python that holds the peers:
//
//	python3 -m venv PEERS && PEERS/bin/pip install torch torchvision pillow simplejpeg opencv-python-headless grain grpcio numpy
//	go run ./lab/bench ingest -python PEERS/bin/python
//
// Parts:
//
//	codec   a sample on one core: entropy decoding only, region decoding, with resize, whole; beside the peers
//	loader  whole loaders on all cores, warm, into one Python process that reads every byte
//
// What is compared alternates within a run; medians are reported, with all runs beside them.
func Bench(flags *flag.FlagSet) func(k *kit.Kit) error {
	python := flags.String("python", "python3", "a Python with the peers")
	count := flags.Int("photos", 4096, "photographs")
	reps := flags.Int("reps", 5, "runs of each side")
	parts := flags.String("parts", "codec,loader", "what to measure")
	return func(k *kit.Kit) error {
		return (&bench{Kit: k, python: *python, count: *count, reps: *reps}).run(strings.Split(*parts, ","))
	}
}

func (b *bench) run(parts []string) (err error) {
	if err := b.Photographs(b.count); err != nil {
		return err
	}
	client, err := filepath.Abs("python")
	if err != nil {
		return err
	}
	b.Env = append(b.Env, "PYTHONPATH="+client, "OMP_NUM_THREADS=1")
	b.Header("Ingest and feed, beside others")
	versions, err := b.Command(b.python, "-c", `
import importlib.metadata as m, sys
print("Python", sys.version.split()[0], *(f"{p} {m.version(p)}" for p in ("torch", "torchvision", "pillow", "simplejpeg", "opencv-python-headless", "grain")), sep=", ")`).Output()
	if err != nil {
		return fmt.Errorf("%s: the peers are missing: %w", b.python, err)
	}
	b.Say("%s", strings.TrimSpace(string(versions)))
	for _, part := range parts {
		do, ok := map[string]func() error{"codec": b.codec, "loader": b.loader}[part]
		if !ok {
			return fmt.Errorf("no part is called %q: codec, loader", part)
		}
		if err := do(); err != nil {
			return err
		}
	}
	return nil
}

// linked returns a folder of those photographs that are taken, by links, the first most of them.
func (b *bench) linked(name string, most int, take func(i int, size int64) bool) (dir string, n int, err error) {
	dir = filepath.Join(b.Dir, name)
	if err := os.RemoveAll(dir); err != nil {
		return "", 0, err
	}
	for i, p := range b.Paths {
		from, to := filepath.Join(b.Photos, p), filepath.Join(dir, p)
		info, err := os.Stat(from)
		if err != nil {
			return "", 0, err
		}
		if n == most || !take(i, info.Size()) {
			continue
		}
		n++
		if err := errors.Join(os.MkdirAll(filepath.Dir(to), 0o755), os.Link(from, to)); err != nil {
			return "", 0, err
		}
	}
	return dir, n, nil
}

// seconds is how long a run on one core lasts.
const seconds = "4"

// codec measures a sample on one core.
func (b *bench) codec() error {
	b.Say("\n## A sample on one core: RandomResizedCrop(224) and flip, uint8")
	dir, n, err := b.linked("photos-60-90", 512, func(_ int, size int64) bool { return size >= 60_000 && size <= 90_000 })
	if err != nil {
		return err
	}
	if n < 64 {
		return fmt.Errorf("only %d photographs of 60 to 90 KB among %d: ask for more by -photos", n, len(b.Paths))
	}
	b.Say("\n%d photographs of 60 to 90 KB.", n)
	peers := []string{"torchvision-uint8", "pil-uint8", "pil-fp32", "simplejpeg-cv2"}
	rates := map[string][]float64{}
	for range b.reps {
		for _, link := range links {
			var r rate
			if err := b.Run(&r, "taskset", "-c", "0", b.Self, "chain", link, dir, seconds); err != nil {
				return err
			}
			rates[link] = append(rates[link], r.PerS)
		}
		for _, peer := range peers {
			var r rate
			if err := b.Run(&r, "taskset", "-c", "0", b.python, "lab/bench/ingest/peers.py", "codec", peer, dir, seconds); err != nil {
				return err
			}
			rates[peer] = append(rates[peer], r.PerS)
		}
	}
	b.Say("Images a second of processor time, file in the page cache to pixels in place.\n")
	b.Say("| what | images/s, median | us an image | runs |")
	b.Say("| --- | ---: | ---: | --- |")
	names := map[string]string{"entropy": "entropy decoding only", "region": "region decoding (crop, 2-pixel margin)", "resize": "region + resize", "sample": "**whole sample, Pillow-exact**"}
	for _, what := range append(append([]string{}, links...), peers...) {
		name := names[what]
		if name == "" {
			name = what
		}
		m := kit.Median(rates[what])
		b.Say("| %s | %.0f | %.0f | %s |", name, m, 1e6/m, kit.Numbers(rates[what], 0))
	}
	sample := kit.Median(rates["sample"])
	share := sample / kit.Median(rates["region"])
	b.Say("\nThe whole sample has **%.0f%%** of the rate of region decoding (target 75%%: %s); outside the codec it costs **%.0f us** (target 150: %s).",
		100*share, kit.Verdict(share >= 0.75), 1e6/sample-1e6/kit.Median(rates["region"]), kit.Verdict(1e6/sample-1e6/kit.Median(rates["region"]) < 150))
	for _, t := range []struct {
		peer   string
		target float64
	}{{"torchvision-uint8", 1.5}, {"pil-uint8", 2.2}, {"pil-fp32", 2.2}, {"simplejpeg-cv2", 1}} {
		ratio := sample / kit.Median(rates[t.peer])
		b.Say("- **%.2f** times %s (target %.1f: %s)", ratio, t.peer, t.target, kit.Verdict(ratio >= t.target))
	}
	return nil
}

// serve serves source, warm, does f, and ends the daemon.
func (b *bench) serve(source, name string, f func(addr string, pid int) error) error {
	recode := "off"
	if name == "recoded" {
		recode = "on"
	}
	m, err := b.Serve(source, "mnt", "--cache-dir", filepath.Join(b.Dir, "cache-"+name), "--memory", "1GiB", "--recode", recode)
	if err != nil {
		return err
	}
	if _, err = b.Feed(m.Addr); err == nil { // fills the cache
		err = b.recoded(m.Addr, recode == "on")
	}
	if err == nil {
		err = f(m.Addr, m.PID)
	}
	return errors.Join(err, m.Close())
}

// recoded waits until all photographs are kept in the recoded form, if they are to be.
func (b *bench) recoded(addr string, all bool) error {
	for deadline := time.Now().Add(5 * time.Minute); all; time.Sleep(time.Second) {
		var s struct {
			Recoded struct{ Files int }
		}
		if err := b.Run(&s, b.Shoal, "stat", addr, "--json"); err != nil || s.Recoded.Files >= len(b.Paths) {
			return err
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("only %d of %d photographs were recoded in 5 minutes", s.Recoded.Files, len(b.Paths))
		}
	}
	return nil
}

// loader compares whole loaders.
func (b *bench) loader() error {
	b.Say("\n## Whole loaders, all cores, everything in the page cache, batches of 64 into a Python process that reads every byte")
	raw := filepath.Join(b.Dir, "photos-raw")
	if err := os.RemoveAll(raw); err != nil {
		return err
	}
	if err := b.Run(nil, b.Shoal, "pack", "file://"+b.Photos, "file://"+raw, "--decode", "--spool", b.Dir, "--json"); err != nil {
		return err
	}
	type row struct{ name, source string }
	rows := []row{{"feed-uint8", "jpeg"}, {"feed-uint8", "raw"}, {"feed-fp32", "jpeg"}, {"pil-fp32", ""}, {"torchvision-uint8", ""}, {"grain", ""}, {"feed-uint8", "recoded"}}
	rates, memory := map[row][]float64{}, map[row][]float64{}
	for range b.reps {
		for _, r := range rows {
			measure := func(where string, pid int) error {
				res, rss, err := b.watch(pid, "loader", r.name, where, "64", strconv.Itoa(2*b.count))
				rates[r], memory[r] = append(rates[r], res.PerS), append(memory[r], rss)
				return err
			}
			var err error
			switch r.source {
			case "jpeg", "recoded":
				err = b.serve("file://"+b.Photos, r.source, measure)
			case "raw":
				err = b.serve("file://"+raw, r.source, measure)
			default:
				err = measure(b.Photos, 0)
			}
			if err != nil {
				return err
			}
		}
	}
	names := map[row]string{
		rows[0]: "**feed, uint8**", rows[1]: "**feed, uint8, from `pack --decode`**", rows[2]: "**feed, fp32 + Normalize**",
		rows[3]: "DataLoader(ImageFolder, num_workers=2), PIL, ToTensor, Normalize", rows[4]: "DataLoader(num_workers=2), decode_jpeg and torchvision v2 on uint8",
		rows[5]: "Grain, 4 threads, simplejpeg + OpenCV (no antialiasing), uint8", rows[6]: "**feed, uint8, from recoded JPEG**",
	}
	b.Say("\n| loader | images/s, median | runs | memory of all its processes, MB |")
	b.Say("| --- | ---: | --- | ---: |")
	for _, r := range rows {
		b.Say("| %s | %.0f | %s | %.0f |", names[r], kit.Median(rates[r]), kit.Numbers(rates[r], 0), kit.Median(memory[r]))
	}
	feed := kit.Median(rates[rows[0]])
	b.Say("")
	for i, target := range map[int]float64{3: 3, 4: 1.5, 5: 1.2} {
		ratio := feed / kit.Median(rates[rows[i]])
		b.Say("- uint8 feed: **%.2f** times %s (target %.1f: %s)", ratio, names[rows[i]], target, kit.Verdict(ratio >= target))
	}
	ratio := kit.Median(rates[rows[6]]) / feed
	b.Say("- from recoded JPEG: **%.2f** times the uint8 feed from JPEG (target 1.6: %s)", ratio, kit.Verdict(ratio >= 1.6))
	share := kit.Median(memory[rows[0]]) / kit.Median(memory[rows[5]])
	b.Say("- memory: **%.2f** times Grain's (target 2: %s). Proportional set size, the highest of samples each half second; pages of files do not count.", share, kit.Verdict(share <= 2))
	return nil
}

// result is what peers.py prints.
type result struct {
	Images  int     `json:"images"`
	PerS    float64 `json:"per_s"`
	Seconds float64 `json:"seconds"`
}

// watch runs a role of peers.py and returns the most memory in MB that it, its children and pid, if not 0, had together.
func (b *bench) watch(pid int, args ...string) (r result, mb float64, err error) {
	c := b.Command(b.python, append([]string{"lab/bench/ingest/peers.py"}, args...)...)
	var out, errs strings.Builder
	c.Stdout, c.Stderr = &out, &errs
	if err := during(c, 500*time.Millisecond, func() error {
		sum := 0.0
		for _, pid := range append(family(c.Process.Pid), pid) {
			sum += anonymous(pid)
		}
		mb = max(mb, sum)
		return nil
	}); err != nil {
		return r, mb, fmt.Errorf("%v: %w\n%s", args, err, errs.String())
	}
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	err = json.Unmarshal([]byte(lines[len(lines)-1]), &r)
	return r, mb, err
}

// during runs a command and looks at something meanwhile.
func during(c *exec.Cmd, every time.Duration, look func() error) error {
	if err := c.Start(); err != nil {
		return err
	}
	done := make(chan error, 1)
	go func() { done <- c.Wait() }()
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		select {
		case err := <-done:
			return err
		case <-tick.C:
			if err := look(); err != nil {
				_ = c.Process.Signal(syscall.SIGTERM)
				return errors.Join(err, <-done)
			}
		}
	}
}

// family returns a process and all that descend from it.
func family(pid int) []int {
	all := []int{pid}
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", pid, pid)) // gone: no children
	for _, word := range strings.Fields(string(text)) {
		if child, err := strconv.Atoi(word); err == nil {
			all = append(all, family(child)...)
		}
	}
	return all
}

// anonymous returns a process's share of memory in MB that is not of files on a disk: its own, and its part of what is shared.
func anonymous(pid int) float64 {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	sum := 0.0
	for line := range strings.Lines(string(text)) {
		f := strings.Fields(line)
		if len(f) >= 2 && (f[0] == "Pss_Anon:" || f[0] == "Pss_Shmem:") {
			kb, _ := strconv.ParseFloat(f[1], 64)
			sum += kb / 1e3
		}
	}
	return sum
}
