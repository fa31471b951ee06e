// Command warm measures a warm epoch after a remount with the kernel's caches dropped, 8 reader
// threads over photographs of 63 KB, and writes lab/bench/results/warm.md:
//
//	shoal mount | lab/bench/fuseceiling | rclone mount --vfs-cache-mode full | local disk, cold | and warm
//
// all in turns. Run it from the repository's root as root, with rclone installed (apt-get install
// rclone): go run ./lab/bench/warm
//
// rclone is given what helps it: its cache filled by a pass before, its directories listed before the
// clock starts, no latency between it and the store, and --use-server-modtime, without which it
// sends a HEAD an open. The others have no need of a store.
package main

import (
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/lab/bench/kit"
	"github.com/shoalfs/shoal/lab/rig/s3server"
)

type side struct {
	name string
	// start gets the side ready and returns the folder to read, the daemon's pid or 0, and the end.
	start func() (dir string, pid int, end func() error, err error)
	cold  bool // drop the kernel's caches

	rates, micros []float64
}

type bench struct {
	*kit.Kit
	photos string
	list   string
	url    string // of the S3 server
	memory string
}

func main() {
	count := flag.Int("photos", 4096, "photographs")
	reps := flag.Int("reps", 7, "runs of each side")
	memory := flag.String("memory", "512MiB", "--memory of the daemon")
	kit.Main("lab/bench/results/warm.md", func(k *kit.Kit) error {
		b := &bench{Kit: k, memory: *memory}
		return b.run(*count, *reps)
	})
}

func (b *bench) run(count, reps int) error {
	if _, err := exec.LookPath("rclone"); err != nil {
		return errors.New("rclone is not installed (apt-get install rclone)")
	}
	var paths []string
	var err error
	if b.photos, paths, err = b.Photos(count); err != nil {
		return err
	}
	server, far, err := b.Store(0)
	if err != nil {
		return err
	}
	defer server.Stop()
	defer far.Stop()
	b.url = server.URL
	up, err := server.Upload(b.Ctx, b.photos, "photos", "train", nil)
	if err != nil {
		return err
	}
	rand.New(rand.NewPCG(1, 1)).Shuffle(len(paths), func(i, j int) { paths[i], paths[j] = paths[j], paths[i] })
	if b.list, err = b.List("warm.txt", paths); err != nil {
		return err
	}
	rclone, err := exec.Command("rclone", "version").Output()
	if err != nil {
		return err
	}
	version, _, _ := strings.Cut(string(rclone), "\n")
	b.Header("Warm epoch after a remount, kernel caches dropped, 8 reader threads")
	b.Say("%d photographs, %.1f KB each on average. Readers and daemon share the cores. %s.\n", up.Files, float64(up.Bytes)/float64(up.Files)/1e3, version)

	// A first pass fills the caches, and every byte of a second is compared.
	for _, fill := range []*side{{name: "shoal", start: b.shoal}, {name: "rclone", start: b.rclone}} {
		for pass := range 2 {
			dir, _, end, err := fill.start()
			if err != nil {
				return fmt.Errorf("%s: %w", fill.name, err)
			}
			var flags []string
			if pass == 1 {
				flags = []string{"-verify", b.photos, "-drop-caches"}
			}
			_, err = b.Read(dir, b.list, flags...)
			if pass == 0 {
				time.Sleep(2 * time.Second) // rclone writes its cache's metadata behind
			}
			if err := errors.Join(err, end()); err != nil {
				return fmt.Errorf("%s: %w", fill.name, err)
			}
		}
	}
	b.Say("Verified byte for byte after a remount: shoal and rclone, %d files each.\n", len(paths))

	local := func() (string, int, func() error, error) { return b.photos, 0, func() error { return nil }, nil }
	sides := []*side{
		{name: "shoal mount", start: b.shoal, cold: true},
		{name: "lab/bench/fuseceiling", start: b.ceiling, cold: true},
		{name: "rclone mount --vfs-cache-mode full", start: b.rclone, cold: true},
		{name: "local folder, cold page cache", start: local, cold: true},
		{name: "local folder, warm page cache", start: local},
	}
	for rep := range reps {
		for _, s := range sides {
			if err := b.measure(s); err != nil {
				return fmt.Errorf("%s: %w", s.name, err)
			}
		}
		fmt.Fprintf(os.Stderr, "round %d of %d: %s\n", rep+1, reps, func() (t string) {
			for _, s := range sides {
				t += fmt.Sprintf(" %.0f", s.rates[rep])
			}
			return t
		}())
	}
	b.Say("| | files/s, median | runs | daemon's CPU, µs a file |")
	b.Say("| --- | ---: | --- | ---: |")
	for _, s := range sides {
		cpu := "—"
		if len(s.micros) > 0 {
			cpu = fmt.Sprintf("%.0f", kit.Median(s.micros))
		}
		b.Say("| %s | %.0f | %s | %s |", s.name, kit.Median(s.rates), kit.Numbers(s.rates, 0), cpu)
	}
	// Each round's ratio: what disturbs a round disturbs its sides alike.
	ratio := func(other *side) []float64 {
		var r []float64
		for i := range sides[0].rates {
			r = append(r, sides[0].rates[i]/other.rates[i])
		}
		return r
	}
	ceiling, rc := ratio(sides[1]), ratio(sides[2])
	b.Say("\n| shoal beside | ratio of medians | median of each round's ratio | rounds | target | |")
	b.Say("| --- | ---: | ---: | --- | ---: | --- |")
	row := func(name string, other *side, r []float64, target float64) {
		m := kit.Median(sides[0].rates) / kit.Median(other.rates)
		b.Say("| %s | %.2f | %.2f | %s | %.2f | %s |", name, m, kit.Median(r), kit.Numbers(r, 2), target, kit.Verdict(m >= target))
	}
	row("fuseceiling", sides[1], ceiling, 0.9)
	row("rclone", sides[2], rc, 8)
	return nil
}

func (b *bench) measure(s *side) error {
	dir, pid, end, err := s.start()
	if err != nil {
		return err
	}
	var flags []string
	if s.cold {
		flags = []string{"-drop-caches"}
	} else if _, err := b.Read(dir, b.list); err != nil { // into the page cache
		return errors.Join(err, end())
	}
	before := kit.CPU(pid)
	r, err := b.Read(dir, b.list, flags...)
	cpu := kit.CPU(pid) - before
	if err := errors.Join(err, end()); err != nil {
		return err
	}
	s.rates = append(s.rates, r.Rate)
	if pid != 0 {
		s.micros = append(s.micros, 1e6*cpu/float64(r.Files))
	}
	return nil
}

func (b *bench) shoal() (string, int, func() error, error) {
	m, err := b.Mount("s3://photos/train", "mnt", "--cache-dir", filepath.Join(b.Dir, "cache-warm"), "--memory", b.memory, "--kernel-cache", "off")
	if err != nil {
		return "", 0, nil, err
	}
	return m.Dir, m.PID, m.Close, nil
}

func (b *bench) ceiling() (string, int, func() error, error) {
	return b.serve("ceiling", filepath.Join(b.Bin, "fuseceiling"), "-tmp", b.Dir, "-from", b.photos, filepath.Join(b.Dir, "ceiling"))
}

func (b *bench) rclone() (string, int, func() error, error) {
	env := b.Env
	defer func() { b.Env = env }()
	// Settings of the AWS tools are no business of a plain loopback endpoint; AWS_CA_BUNDLE ends rclone.
	plain := slices.DeleteFunc(os.Environ(), func(kv string) bool { return strings.HasPrefix(kv, "AWS_") })
	b.Env = append(plain, "RCLONE_CONFIG=/dev/null", "RCLONE_CONFIG_S_TYPE=s3", "RCLONE_CONFIG_S_PROVIDER=Other", "RCLONE_CONFIG_S_ENDPOINT="+b.url,
		"RCLONE_CONFIG_S_REGION="+s3server.Region, "RCLONE_CONFIG_S_ACCESS_KEY_ID="+s3server.AccessKey, "RCLONE_CONFIG_S_SECRET_ACCESS_KEY="+s3server.SecretKey)
	dir, pid, end, err := b.serve("rclone", "rclone", "mount", "s:photos/train", filepath.Join(b.Dir, "rclone"), "--vfs-cache-mode", "full",
		"--cache-dir", filepath.Join(b.Dir, "cache-rclone"), "--read-only", "--use-server-modtime", "--dir-cache-time", "24h", "--attr-timeout", "24h",
		"--vfs-cache-max-age", "24h", "--poll-interval", "0")
	if err == nil {
		if _, err = kit.Walk(dir); err != nil {
			_ = end()
		}
	}
	return dir, pid, end, err
}

// serve runs a file system in the foreground and waits until it is mounted.
func (b *bench) serve(name, program string, args ...string) (string, int, func() error, error) {
	dir := filepath.Join(b.Dir, name)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", 0, nil, err
	}
	c := b.Command(program, args...)
	c.Stderr = os.Stderr
	if err := c.Start(); err != nil {
		return "", 0, nil, err
	}
	// Both end by themselves when they are unmounted; rclone calls every signal a failure.
	end := func() error {
		for deadline := time.Now().Add(10 * time.Second); unix.Unmount(dir, 0) != nil; time.Sleep(50 * time.Millisecond) {
			if time.Now().After(deadline) {
				_ = unix.Unmount(dir, unix.MNT_DETACH)
				_ = c.Process.Kill()
				break
			}
		}
		return c.Wait()
	}
	var at, above unix.Stat_t
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		if unix.Stat(dir, &at) == nil && unix.Stat(b.Dir, &above) == nil && at.Dev != above.Dev {
			return dir, c.Process.Pid, end, nil
		}
		if time.Now().After(deadline) {
			return "", 0, nil, errors.Join(fmt.Errorf("%s is not mounted after 30 s", name), end())
		}
	}
}
