package path

import (
	"errors"
	"fmt"
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

// served is a file system that is ready to be read.
type served struct {
	dir string
	pid int // the daemon's, or 0
	end func() error
}

type side struct {
	name  string
	start func() (served, error)
	cold  bool // drop the kernel's caches
	fill  bool // it has a cache, which is filled first

	target        float64 // how many times as fast shoal is to be; 0: none
	rates, micros []float64
}

// warm measures a warm epoch after a remount with the kernel's caches dropped, 8 reader threads over photographs of 63 KB:
//
//	shoal mount | fuseceiling | rclone mount --vfs-cache-mode full (apt-get install rclone) | local disk, cold | and warm
//
// rclone is given what helps it: its cache filled by a pass before, its directories listed before the
// clock starts, no latency between it and the store, and --use-server-modtime, without which it
// sends a HEAD an open. A first pass fills the caches, and every byte of a second is compared.
func (b *bench) warm() (err error) {
	b.Say("## Warm epoch after a remount, kernel caches dropped, 8 reader threads\n")
	sides := []*side{
		{name: "shoal mount", start: b.shoal, cold: true, fill: true},
		{name: "fuseceiling", start: b.ceiling, cold: true, target: 0.9},
		{name: "local folder, cold page cache", start: b.local, cold: true},
		{name: "local folder, warm page cache", start: b.local},
	}
	if version, err := exec.Command("rclone", "version").Output(); err == nil {
		name, _, _ := strings.Cut(string(version), "\n")
		sides = append(sides, &side{name: name + ", mount --vfs-cache-mode full", start: b.rclone, cold: true, fill: true, target: 8})
	}
	if b.list, err = b.Shuffled("warm.txt"); err != nil {
		return err
	}
	for _, s := range sides {
		for _, flags := range [][]string{nil, {"-verify", b.Photos, "-drop-caches"}} {
			if !s.fill {
				continue
			}
			at, err := s.start()
			if err != nil {
				return err
			}
			_, err = b.Read(at.dir, b.list, flags...)
			time.Sleep(2 * time.Second) // rclone writes its cache's metadata behind
			if err := errors.Join(err, at.end()); err != nil {
				return err
			}
		}
	}
	b.Say("Caches were filled, and verified byte for byte after a remount: %d files each.\n", len(b.Paths))
	for rep := range b.reps {
		fmt.Fprintf(os.Stderr, "round %d of %d:", rep+1, b.reps)
		for _, s := range sides {
			if err := b.measure(s); err != nil {
				return fmt.Errorf("%s: %w", s.name, err)
			}
			fmt.Fprintf(os.Stderr, " %.0f", s.rates[rep])
		}
		fmt.Fprintln(os.Stderr)
	}
	b.Say("| | files/s, median | runs | daemon's CPU, µs a file | shoal beside it: ratio of medians | median of each round's ratio | target |")
	b.Say("| --- | ---: | --- | ---: | ---: | ---: | --- |")
	for _, s := range sides {
		cpu := "—"
		if len(s.micros) > 0 {
			cpu = fmt.Sprintf("%.0f", kit.Median(s.micros))
		}
		ratio, target := kit.Median(sides[0].rates)/kit.Median(s.rates), ""
		if s.target > 0 {
			target = fmt.Sprintf("%.1f: %s", s.target, kit.Verdict(ratio >= s.target))
		}
		b.Say("| %s | %.0f | %s | %s | %.2f | %.2f | %s |", s.name, kit.Median(s.rates), kit.Numbers(s.rates, 0), cpu, ratio,
			kit.Median(kit.Ratios(s.rates, sides[0].rates)), target) // what disturbs a round disturbs its sides alike
	}
	return nil
}

func (b *bench) measure(s *side) error {
	at, err := s.start()
	if err != nil {
		return err
	}
	var flags []string
	if s.cold {
		flags = []string{"-drop-caches"}
	} else if _, err := b.Read(at.dir, b.list); err != nil { // into the page cache
		return errors.Join(err, at.end())
	}
	before := kit.CPU(at.pid)
	r, err := b.Read(at.dir, b.list, flags...)
	cpu := kit.CPU(at.pid) - before
	if err := errors.Join(err, at.end()); err != nil {
		return err
	}
	s.rates = append(s.rates, r.Rate)
	if at.pid != 0 {
		s.micros = append(s.micros, 1e6*cpu/float64(r.Files))
	}
	return nil
}

func (b *bench) local() (served, error) { return served{b.Photos, 0, func() error { return nil }}, nil }

func (b *bench) shoal() (served, error) {
	m, err := b.mount("cache-warm")
	if err != nil {
		return served{}, err
	}
	return served{m.Dir, m.PID, func() error {
		b.peakRSS = max(b.peakRSS, kit.Status(m.PID, "VmHWM"))
		return m.Close()
	}}, nil
}

func (b *bench) ceiling() (served, error) {
	return b.foreground("ceiling", b.Self, "fuseceiling", "-tmp", b.Dir, "-from", b.Photos, filepath.Join(b.Dir, "ceiling"))
}

func (b *bench) rclone() (served, error) {
	env := b.Env
	defer func() { b.Env = env }()
	// Settings of the AWS tools are no business of a plain loopback endpoint; AWS_CA_BUNDLE ends rclone.
	plain := slices.DeleteFunc(os.Environ(), func(kv string) bool { return strings.HasPrefix(kv, "AWS_") })
	b.Env = append(plain, "RCLONE_CONFIG=/dev/null", "RCLONE_CONFIG_S_TYPE=s3", "RCLONE_CONFIG_S_PROVIDER=Other", "RCLONE_CONFIG_S_ENDPOINT="+b.Server.URL,
		"RCLONE_CONFIG_S_REGION="+s3server.Region, "RCLONE_CONFIG_S_ACCESS_KEY_ID="+s3server.AccessKey, "RCLONE_CONFIG_S_SECRET_ACCESS_KEY="+s3server.SecretKey)
	at, err := b.foreground("rclone", "rclone", "mount", "s:photos/train", filepath.Join(b.Dir, "rclone"), "--vfs-cache-mode", "full",
		"--cache-dir", filepath.Join(b.Dir, "cache-rclone"), "--read-only", "--use-server-modtime", "--dir-cache-time", "24h", "--attr-timeout", "24h",
		"--vfs-cache-max-age", "24h", "--poll-interval", "0")
	if err == nil {
		if _, err = kit.Walk(at.dir); err != nil {
			_ = at.end()
		}
	}
	return at, err
}

// foreground runs a file system in the foreground and waits until it is mounted.
func (b *bench) foreground(name, program string, args ...string) (served, error) {
	dir := filepath.Join(b.Dir, name)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return served{}, err
	}
	c := b.Command(program, args...)
	c.Stderr = os.Stderr
	if err := c.Start(); err != nil {
		return served{}, err
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
			return served{dir, c.Process.Pid, end}, nil
		}
		if time.Now().After(deadline) {
			return served{}, errors.Join(fmt.Errorf("%s is not mounted after 30 s", name), end())
		}
	}
}
