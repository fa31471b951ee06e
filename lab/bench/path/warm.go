package path

import (
	"errors"
	"flag"
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

const warmCache = "cache-warm"

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

	rates, micros []float64
}

type warm struct {
	*kit.Kit
	list    string
	memory  string
	peakRSS int64
}

// Warm measures a warm epoch after a remount with the kernel's caches dropped, 8 reader threads over photographs of 63 KB:
//
//	shoal mount | fuseceiling | rclone mount --vfs-cache-mode full (apt-get install rclone) | local disk, cold | and warm
//
// rclone is given what helps it: its cache filled by a pass before, its directories listed before the
// clock starts, no latency between it and the store, and --use-server-modtime, without which it
// sends a HEAD an open. The others have no need of a store.
func Warm(flags *flag.FlagSet) func(k *kit.Kit) error {
	count := flags.Int("photos", 4096, "photographs")
	reps := flags.Int("reps", 7, "runs of each side")
	memory := flags.String("memory", "512MiB", "--memory of the daemon")
	return func(k *kit.Kit) error { return (&warm{Kit: k, memory: *memory}).run(*count, *reps) }
}

func (b *warm) run(count, reps int) error {
	rclone, err := exec.Command("rclone", "version").Output()
	if err != nil {
		return fmt.Errorf("rclone is not installed (apt-get install rclone): %w", err)
	}
	if err := b.Stored(count, 0); err != nil {
		return err
	}
	if b.list, err = b.Shuffled("warm.txt"); err != nil {
		return err
	}
	version, _, _ := strings.Cut(string(rclone), "\n")
	b.Header("Warm epoch after a remount, kernel caches dropped, 8 reader threads")
	b.Say("%d photographs, %.1f KB each on average. Readers and daemon share the cores. %s.\n", b.Up.Files, b.KB(), version)

	// A first pass fills the caches, and every byte of a second is compared.
	for _, start := range []func() (served, error){b.shoal, b.rclone} {
		at, err := start()
		if err != nil {
			return err
		}
		_, err = b.Read(at.dir, b.list)
		time.Sleep(2 * time.Second) // rclone writes its cache's metadata behind
		if err := errors.Join(err, at.end()); err != nil {
			return err
		}
		if err := b.verify(start); err != nil {
			return err
		}
	}
	b.Say("Verified byte for byte after a remount: shoal and rclone, %d files each.\n", len(b.Paths))

	sides := []*side{
		{name: "shoal mount", start: b.shoal, cold: true},
		{name: "fuseceiling", start: b.ceiling, cold: true},
		{name: "rclone mount --vfs-cache-mode full", start: b.rclone, cold: true},
		{name: "local folder, cold page cache", start: b.local, cold: true},
		{name: "local folder, warm page cache", start: b.local},
	}
	if err := b.rounds(sides, reps); err != nil {
		return err
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
	b.Say("\n| shoal beside | ratio of medians | median of each round's ratio | rounds | target | |")
	b.Say("| --- | ---: | ---: | --- | ---: | --- |")
	for _, t := range []struct {
		name   string
		other  *side
		target float64
	}{{"fuseceiling", sides[1], 0.9}, {"rclone", sides[2], 8}} {
		m := kit.Median(sides[0].rates) / kit.Median(t.other.rates)
		r := kit.Ratios(t.other.rates, sides[0].rates) // what disturbs a round disturbs its sides alike
		b.Say("| %s | %.2f | %.2f | %s | %.2f | %s |", t.name, m, kit.Median(r), kit.Numbers(r, 2), t.target, kit.Verdict(m >= t.target))
	}
	return nil
}

// verify compares every byte of a side.
func (b *warm) verify(start func() (served, error)) error {
	at, err := start()
	if err != nil {
		return err
	}
	_, err = b.Read(at.dir, b.list, "-verify", b.Photos, "-drop-caches")
	return errors.Join(err, at.end())
}

// rounds measures the sides in turns.
func (b *warm) rounds(sides []*side, reps int) error {
	for rep := range reps {
		fmt.Fprintf(os.Stderr, "round %d of %d:", rep+1, reps)
		for _, s := range sides {
			if err := b.measure(s); err != nil {
				return fmt.Errorf("%s: %w", s.name, err)
			}
			fmt.Fprintf(os.Stderr, " %.0f", s.rates[rep])
		}
		fmt.Fprintln(os.Stderr)
	}
	return nil
}

func (b *warm) measure(s *side) error {
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

func (b *warm) local() (served, error) { return served{b.Photos, 0, func() error { return nil }}, nil }

func (b *warm) shoal() (served, error) {
	m, err := b.Mount(kit.Source, "mnt", "--cache-dir", filepath.Join(b.Dir, warmCache), "--memory", b.memory, "--kernel-cache", "off")
	if err != nil {
		return served{}, err
	}
	return served{m.Dir, m.PID, func() error {
		b.peakRSS = max(b.peakRSS, kit.Status(m.PID, "VmHWM"))
		return m.Close()
	}}, nil
}

func (b *warm) ceiling() (served, error) {
	return b.serve("ceiling", b.Self, "fuseceiling", "-tmp", b.Dir, "-from", b.Photos, filepath.Join(b.Dir, "ceiling"))
}

func (b *warm) rclone() (served, error) {
	env := b.Env
	defer func() { b.Env = env }()
	// Settings of the AWS tools are no business of a plain loopback endpoint; AWS_CA_BUNDLE ends rclone.
	plain := slices.DeleteFunc(os.Environ(), func(kv string) bool { return strings.HasPrefix(kv, "AWS_") })
	b.Env = append(plain, "RCLONE_CONFIG=/dev/null", "RCLONE_CONFIG_S_TYPE=s3", "RCLONE_CONFIG_S_PROVIDER=Other", "RCLONE_CONFIG_S_ENDPOINT="+b.Server.URL,
		"RCLONE_CONFIG_S_REGION="+s3server.Region, "RCLONE_CONFIG_S_ACCESS_KEY_ID="+s3server.AccessKey, "RCLONE_CONFIG_S_SECRET_ACCESS_KEY="+s3server.SecretKey)
	at, err := b.serve("rclone", "rclone", "mount", "s:photos/train", filepath.Join(b.Dir, "rclone"), "--vfs-cache-mode", "full",
		"--cache-dir", filepath.Join(b.Dir, "cache-rclone"), "--read-only", "--use-server-modtime", "--dir-cache-time", "24h", "--attr-timeout", "24h",
		"--vfs-cache-max-age", "24h", "--poll-interval", "0")
	if err == nil {
		if _, err = kit.Walk(at.dir); err != nil {
			_ = at.end()
		}
	}
	return at, err
}

// serve runs a file system in the foreground and waits until it is mounted.
func (b *warm) serve(name, program string, args ...string) (served, error) {
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
