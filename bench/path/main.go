// Command path measures the whole path of issue A side by side in one run, on real photographs behind a
// real S3 server and a proxy that adds latency, and writes bench/results/path.md. Run it from the
// repository's root: go run ./bench/path
//
// Everything that is compared alternates (A B A B …); medians are reported, with all runs beside them.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"log"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/shoalfs/shoal/rig/photos"
	"github.com/shoalfs/shoal/rig/proxy"
	"github.com/shoalfs/shoal/rig/s3server"
)

type bench struct {
	ctx     context.Context
	dir     string // work folder, absolute
	bin     string
	shoal   string
	env     []string // leads through the proxy
	photos  string
	paths   []string // in ImageFolder's order
	reps    int
	memory  string
	peakRSS int64
	report  bytes.Buffer
}

func main() {
	log.SetFlags(0)
	dir := flag.String("dir", ".bench", "work folder; photographs and objects are kept there")
	out := flag.String("out", "bench/results/path.md", "report")
	latency := flag.Duration("latency", 30*time.Millisecond, "median latency of the store")
	count := flag.Int("photos", 4096, "photographs")
	reps := flag.Int("reps", 5, "runs of each side")
	memory := flag.String("memory", "512MiB", "--memory of the daemon")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	abs, err := filepath.Abs(*dir)
	if err != nil {
		log.Fatal(err)
	}
	b := &bench{ctx: ctx, dir: abs, bin: filepath.Join(abs, "bin"), reps: *reps, memory: *memory}
	if err := b.run(*count, *latency); err != nil {
		log.Fatal("bench: ", err)
	}
	if err := os.MkdirAll(filepath.Dir(*out), 0o755); err != nil {
		log.Fatal(err)
	}
	if err := os.WriteFile(*out, b.report.Bytes(), 0o644); err != nil {
		log.Fatal(err)
	}
}

// say prints a line and adds it to the report.
func (b *bench) say(format string, args ...any) {
	line := fmt.Sprintf(format, args...)
	fmt.Println(line)
	b.report.WriteString(line + "\n")
}

func (b *bench) run(count int, latency time.Duration) error {
	if err := os.MkdirAll(b.bin, 0o755); err != nil {
		return err
	}
	for _, pkg := range []string{"./cmd/shoal", "./bench/bareclient", "./bench/readers", "./bench/fuseceiling"} {
		if out, err := b.command("go", "build", "-o", b.bin+"/", pkg).CombinedOutput(); err != nil {
			return fmt.Errorf("build %s: %w\n%s", pkg, err, out)
		}
	}
	b.shoal = filepath.Join(b.bin, "shoal")
	b.photos = filepath.Join(b.dir, "photos")
	if _, err := photos.Make(b.ctx, b.photos, photos.Options{Count: count}, func(done, total int) {
		if done%512 == 0 {
			fmt.Fprintf(os.Stderr, "photographs: %d of %d\n", done, total)
		}
	}); err != nil {
		return err
	}
	server, err := s3server.Start(b.ctx, s3server.Options{Dir: filepath.Join(b.dir, "objects")})
	if err != nil {
		return err
	}
	defer server.Stop()
	up, err := server.Upload(b.ctx, b.photos, "photos", "train", nil)
	if err != nil {
		return err
	}
	far, err := proxy.Spawn(b.ctx, []string{b.shoal, "rig-proxy"}, server.URL, proxy.Options{Latency: latency, Sigma: 0.3})
	if err != nil {
		return err
	}
	defer far.Stop()
	b.env = append(os.Environ(), s3server.Env(far.URL)...)
	if err := b.listPhotos(); err != nil {
		return err
	}

	host, _ := os.ReadFile("/proc/cpuinfo")
	model := "unknown processor"
	for line := range strings.Lines(string(host)) {
		if name, ok := strings.CutPrefix(line, "model name"); ok {
			model = strings.TrimSpace(strings.TrimLeft(name, "\t :"))
			break
		}
	}
	var uts syscall.Utsname
	_ = syscall.Uname(&uts)
	b.say("# The whole path, cold and warm\n")
	b.say("`go run ./bench/path -photos %d -latency %s -reps %d -memory %s`, %s, %d cores (%s), Linux %s, %s.", count, latency, b.reps, b.memory,
		time.Now().UTC().Format("2006-01-02 15:04 UTC"), runtime.NumCPU(), model, cString(uts.Release[:]), runtime.Version())
	b.say("Readers, daemon, proxy and S3 server share the cores. %d photographs, %.1f KB each on average.\n", up.Files, float64(up.Bytes)/float64(up.Files)/1e3)

	for _, part := range []func() error{b.cold, b.warm, b.feed} {
		if err := part(); err != nil {
			return err
		}
	}
	b.say("## Memory\n")
	b.say("Highest RSS of any daemon in this run (VmHWM): %d MiB with --memory %s.", b.peakRSS>>20, b.memory)
	return nil
}

func cString(s []int8) string {
	var b []byte
	for _, c := range s {
		if c == 0 {
			break
		}
		b = append(b, byte(c))
	}
	return string(b)
}

func (b *bench) command(name string, args ...string) *exec.Cmd {
	c := exec.CommandContext(b.ctx, name, args...)
	c.Env = b.env
	c.Cancel = func() error { return c.Process.Signal(syscall.SIGTERM) }
	c.WaitDelay = 20 * time.Second
	return c
}

// output runs a program that prints one line of JSON last.
func (b *bench) output(into any, name string, args ...string) error {
	c := b.command(name, args...)
	var stderr bytes.Buffer
	c.Stderr = &stderr
	out, err := c.Output()
	if err != nil {
		return fmt.Errorf("%s %s: %w\n%s", filepath.Base(name), strings.Join(args, " "), err, stderr.String())
	}
	if into == nil {
		return nil
	}
	lines := bytes.Split(bytes.TrimSpace(out), []byte("\n"))
	return json.Unmarshal(lines[len(lines)-1], into)
}

func (b *bench) listPhotos() error {
	return filepath.WalkDir(b.photos, func(p string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() || d.Name()[0] == '.' {
			return err
		}
		rel, err := filepath.Rel(b.photos, p)
		b.paths = append(b.paths, rel)
		return err
	})
}

// mountAt mounts the photographs and returns the function that unmounts.
func (b *bench) mountAt(mnt, cache string, flags ...string) (umount func() error, err error) {
	if err := os.MkdirAll(mnt, 0o755); err != nil {
		return nil, err
	}
	args := append([]string{"mount", "s3://photos/train", mnt, "--cache-dir", cache, "--memory", b.memory, "--kernel-cache", "off", "--daemon"}, flags...)
	if err := b.output(nil, b.shoal, args...); err != nil {
		return nil, err
	}
	return func() error {
		b.noteRSS(mnt)
		return b.output(nil, b.shoal, "umount", mnt)
	}, nil
}

// noteRSS remembers the highest resident set of the daemon behind a mount.
func (b *bench) noteRSS(mnt string) {
	raw, err := os.ReadFile(filepath.Join(mnt, ".shoal", "stats"))
	var s struct{ PID int }
	if err != nil || json.Unmarshal(raw, &s) != nil {
		return
	}
	status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", s.PID))
	for line := range strings.Lines(string(status)) {
		if rest, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			kib, _ := strconv.ParseInt(strings.Fields(rest)[0], 10, 64)
			b.peakRSS = max(b.peakRSS, kib<<10)
		}
	}
}

type readResult struct {
	Files   int     `json:"files"`
	Bytes   int64   `json:"bytes"`
	Seconds float64 `json:"seconds"`
	Rate    float64 `json:"files_per_s"`
	Errors  int     `json:"errors"`
}

// read reads the listed files below dir with 8 threads.
func (b *bench) read(dir, list string, flags ...string) (readResult, error) {
	var r readResult
	err := b.output(&r, filepath.Join(b.bin, "readers"), append(append([]string{"-list", list, "-threads", "8"}, flags...), dir)...)
	if err == nil && r.Errors > 0 {
		err = fmt.Errorf("%d files could not be read or differ", r.Errors)
	}
	return r, err
}

// writeList writes the paths in the given order to a file.
func (b *bench) writeList(name string, order []int) (string, error) {
	var buf bytes.Buffer
	for _, i := range order {
		buf.WriteString(b.paths[i] + "\n")
	}
	path := filepath.Join(b.dir, name)
	return path, os.WriteFile(path, buf.Bytes(), 0o644)
}

// torchOrder is what DistributedSampler(seed=7) reads in epoch 0.
func (b *bench) torchOrder() ([]int, error) {
	out, err := b.command(b.shoal, "order", "torch:seed=7", "--n", strconv.Itoa(len(b.paths))).Output()
	if err != nil {
		return nil, err
	}
	var order []int
	for line := range strings.Lines(string(out)) {
		i, err := strconv.Atoi(strings.TrimSpace(line))
		if err != nil {
			return nil, err
		}
		order = append(order, i)
	}
	return order, nil
}

func median(v []float64) float64 {
	s := slices.Sorted(slices.Values(v))
	if len(s) == 0 {
		return 0
	}
	return (s[(len(s)-1)/2] + s[len(s)/2]) / 2
}

func numbers(v []float64) string {
	var s []string
	for _, x := range v {
		s = append(s, strconv.FormatFloat(x, 'f', 0, 64))
	}
	return strings.Join(s, " ")
}

// cold compares a first epoch with a known order, one without, and a bare client.
func (b *bench) cold() error {
	b.say("## Cold epoch, 8 reader threads\n")
	type bare struct {
		Rate float64 `json:"objects_per_s"`
	}
	best, bestRate := 0, 0.0
	var curve []string
	for _, c := range []int{8, 16, 32, 64, 96, 128, 192, 256, 512} {
		var r bare
		n := len(b.paths)
		if c <= 16 {
			n = min(n, 1024)
		}
		if err := b.output(&r, filepath.Join(b.bin, "bareclient"), "-prefix", "train/", "-c", strconv.Itoa(c), "-n", strconv.Itoa(n)); err != nil {
			return err
		}
		curve = append(curve, fmt.Sprintf("%d: %.0f", c, r.Rate))
		if r.Rate > bestRate {
			best, bestRate = c, r.Rate
		}
	}
	b.say("Bare minio-go client, objects/s by requests in flight: %s.\n", strings.Join(curve, ", "))

	order, err := b.torchOrder()
	if err != nil {
		return err
	}
	list, err := b.writeList("order.txt", order)
	if err != nil {
		return err
	}
	var with, without, bares []float64
	mnt := filepath.Join(b.dir, "mnt")
	for rep := range b.reps {
		for _, spec := range []string{"torch:seed=7", "none"} {
			cache := filepath.Join(b.dir, "cache-cold")
			if err := os.RemoveAll(cache); err != nil {
				return err
			}
			umount, err := b.mountAt(mnt, cache, "--order", spec)
			if err != nil {
				return err
			}
			var flags []string
			if rep == 0 {
				flags = []string{"-verify", b.photos} // this run's rate is not counted
			}
			r, err := b.read(mnt, list, flags...)
			if e := umount(); err == nil {
				err = e
			}
			if err != nil {
				return err
			}
			if rep == 0 {
				b.say("Verified byte for byte, cold, --order %s: %d files.", spec, r.Files)
				continue
			}
			if spec == "none" {
				without = append(without, r.Rate)
			} else {
				with = append(with, r.Rate)
			}
		}
		var r bare
		if err := b.output(&r, filepath.Join(b.bin, "bareclient"), "-prefix", "train/", "-c", strconv.Itoa(best)); err != nil {
			return err
		}
		bares = append(bares, r.Rate)
	}
	b.say("")
	b.say("| | files/s, median | runs |")
	b.say("| --- | ---: | --- |")
	b.say("| mount, order known | %.0f | %s |", median(with), numbers(with))
	b.say("| mount, no order | %.0f | %s |", median(without), numbers(without))
	b.say("| bare client, %d in flight | %.0f | %s |", best, median(bares), numbers(bares))
	b.say("\nOrder known is **%.1f times** no order, and **%.0f%%** of the bare client.\n", median(with)/median(without), 100*median(with)/median(bares))
	return nil
}

// warm compares a remounted warm cache with the ceiling of go-fuse.
func (b *bench) warm() error {
	b.say("## Warm epoch after a remount, kernel caches dropped, 8 reader threads\n")
	order := rand.New(rand.NewPCG(1, 1)).Perm(len(b.paths))
	list, err := b.writeList("warm.txt", order)
	if err != nil {
		return err
	}
	mnt, cache := filepath.Join(b.dir, "mnt"), filepath.Join(b.dir, "cache-warm")
	if err := b.fill(mnt, cache, list); err != nil {
		return err
	}
	var ours, ceiling, local []float64
	for rep := range b.reps + 1 {
		umount, err := b.mountAt(mnt, cache)
		if err != nil {
			return err
		}
		flags := []string{"-drop-caches"}
		if rep == 0 {
			flags = append(flags, "-verify", b.photos)
		}
		r, err := b.read(mnt, list, flags...)
		if e := umount(); err == nil {
			err = e
		}
		if err != nil {
			return err
		}
		if rep == 0 {
			b.say("Verified byte for byte, warm: %d files.\n", r.Files)
			continue
		}
		ours = append(ours, r.Rate)
		r, err = b.ceiling(list)
		if err != nil {
			return err
		}
		ceiling = append(ceiling, r.Rate)
		if r, err = b.read(b.photos, list, "-drop-caches"); err != nil {
			return err
		}
		local = append(local, r.Rate)
	}
	b.say("| | files/s, median | runs |")
	b.say("| --- | ---: | --- |")
	b.say("| mount | %.0f | %s |", median(ours), numbers(ours))
	b.say("| bench/fuseceiling | %.0f | %s |", median(ceiling), numbers(ceiling))
	b.say("| the local folder, cold page cache | %.0f | %s |", median(local), numbers(local))
	b.say("\nThe mount reaches **%.0f%%** of the ceiling.\n", 100*median(ours)/median(ceiling))
	return nil
}

// fill reads everything once through a mount, so that the cache holds it.
func (b *bench) fill(mnt, cache, list string) error {
	umount, err := b.mountAt(mnt, cache, "--order", "sequential")
	if err != nil {
		return err
	}
	_, err = b.read(mnt, list)
	if e := umount(); err == nil {
		err = e
	}
	return err
}

// ceiling reads the same files through a filesystem that does nothing but serve them.
func (b *bench) ceiling(list string) (readResult, error) {
	mnt := filepath.Join(b.dir, "ceiling")
	if err := os.MkdirAll(mnt, 0o755); err != nil {
		return readResult{}, err
	}
	c := b.command(filepath.Join(b.bin, "fuseceiling"), "-from", b.photos, mnt)
	c.Stderr = os.Stderr
	if err := c.Start(); err != nil {
		return readResult{}, err
	}
	for range 100 {
		if _, err := os.Stat(filepath.Join(mnt, b.paths[0])); err == nil {
			break
		}
		time.Sleep(50 * time.Millisecond)
	}
	r, err := b.read(mnt, list, "-drop-caches")
	_ = c.Process.Signal(syscall.SIGINT)
	if e := c.Wait(); err == nil {
		err = e
	}
	return r, err
}

// feed compares the feed with a DataLoader on the same warm mount.
func (b *bench) feed() error {
	b.say("## Decoded batches into a Python process, warm: RandomResizedCrop(224) + flip, batch 64\n")
	mnt, cache := filepath.Join(b.dir, "mnt"), filepath.Join(b.dir, "cache-warm")
	if err := os.MkdirAll(mnt, 0o755); err != nil {
		return err
	}
	sock := "unix://" + filepath.Join(b.dir, "feed.sock")
	if err := b.output(nil, b.shoal, "serve", "s3://photos/train", "--listen", sock, "--mount", mnt,
		"--cache-dir", cache, "--memory", b.memory, "--daemon"); err != nil {
		return err
	}
	defer func() {
		b.noteRSS(mnt)
		if err := b.output(nil, b.shoal, "umount", mnt); err != nil {
			log.Print(err)
		}
	}()
	python, err := filepath.Abs("python")
	if err != nil {
		return err
	}
	b.env = append(b.env, "PYTHONPATH="+python)
	b.say("| batches | images/s, median | runs |")
	b.say("| --- | ---: | --- |")
	for _, kind := range []string{"uint8", "fp32"} {
		rates := map[string][]float64{}
		for range b.reps {
			for door, where := range map[string]string{"feed": sock, "dataloader": mnt} {
				var r struct {
					Rate float64 `json:"images_per_s"`
				}
				if err := b.output(&r, "/usr/bin/python3", "bench/path/loaders.py", door, where, "64", kind); err != nil {
					return err
				}
				rates[door] = append(rates[door], r.Rate)
			}
		}
		b.say("| feed, %s | %.0f | %s |", kind, median(rates["feed"]), numbers(rates["feed"]))
		b.say("| ImageFolder + DataLoader(num_workers=2), PIL, %s | %.0f | %s |", kind, median(rates["dataloader"]), numbers(rates["dataloader"]))
		b.say("| ratio, %s | **%.2f** | |", kind, median(rates["feed"])/median(rates["dataloader"]))
	}
	b.say("")
	return nil
}
