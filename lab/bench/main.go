// Command bench compares two binaries, or one with other flags, pair by pair: the rate and the daemon's processor time
// a file of each situation that matters, as the ratio new/old with the 95% interval of its median. Machines are never
// quiet, so the sides take turns.
//
//	go run ./lab/bench -old OTHER/bin/shoal [flags]     from the repository's root, as root
package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	"github.com/prometheus/procfs"
	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/lab/rig/etcd"
	"github.com/shoalfs/shoal/lab/rig/photos"
	"github.com/shoalfs/shoal/lab/rig/proxy"
	"github.com/shoalfs/shoal/lab/rig/testbed"
)

func main() {
	run := pairs
	args := os.Args[1:]
	if len(args) > 0 && args[0] == proxy.Verb {
		run, args = proxy.Main, args[1:]
	}
	if err := run(args); err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

const (
	source = "s3://photos/train"
	shards = "s3://photos/packed"
	cold   = "torch:seed=7" // the order of a cold epoch, that of DistributedSampler(seed=7)
)

// bench is one run.
type bench struct {
	bed    *testbed.Bed
	paths  []string     // of the photographs, in the order of the epoch
	etcd   *etcd.Server // nil before a situation needs it
	report bytes.Buffer
}

// pairs compares two binaries in these situations:
//
//	cold     the order is known, the cache is empty, the store is 30 ms away, 8 readers
//	packed   the same from shards
//	sharing  two feeds with orders of their own on one daemon, whose cache is empty
//	random   64 KiB at random offsets of large objects, the cache is empty, 8 readers
//	warm     a mount whose cache is full, 8 readers
//	raw      batches of a feed, as stored
//	decoded  batches of a feed, RandomResizedCrop(224)
//	recoded  the same from recoded photographs
//	s3       GETs of the S3 endpoint, whose cache is full, 8 connections
//	peer     as cold, and another node has all; the processor time is that of both
func pairs(args []string) error {
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	dir := flags.String("dir", ".bench", "work folder; photographs, objects and measurements are kept there")
	out := flags.String("out", "lab/bench/results/pairs.md", "report")
	now := flags.String("shoal", "", "the new binary (default: built from this tree)")
	old := flags.String("old", "", "the binary to compare with (default: the new one)")
	with := flags.String("flags", "", "of the new one's daemons only, separated by spaces")
	count := flags.Int("photos", 4096, "photographs")
	pairs := flags.Int("pairs", 15, "pairs of runs of each situation")
	only := flags.String("only", "cold,packed,sharing,random,warm,raw,decoded,recoded,s3,peer", "situations")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if *old == "" && *with == "" || *pairs < 1 || flags.NArg() > 0 {
		return errors.New("give -old, the binary to compare with, or -flags, what the new one is given; " +
			"-pairs is at least 1, and there are no arguments")
	}
	names := strings.Split(*only, ",")
	for _, what := range names {
		if situations[what] == nil {
			return fmt.Errorf("no situation is called %q", what)
		}
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	b := &bench{}
	binaries, err := b.prepare(ctx, *dir, *old, *now, *count)
	if err != nil {
		return err
	}
	defer b.bed.Close()
	sides := [2]*side{{name: "old"}, {name: "new", flags: strings.Fields(*with)}}
	for i, s := range sides {
		s.bench, s.bed = b, b.bed.With(binaries[i])
	}
	if err := b.run(ctx, sides, *pairs, names); err != nil {
		return err
	}
	b.say("\nLoad average at the end: %s.", load())
	return os.WriteFile(*out, b.report.Bytes(), 0o644)
}

// prepare finds the binaries, old and new, and starts a store that holds the photographs, as files and packed.
func (b *bench) prepare(ctx context.Context, dir, old, now string, count int) (binaries [2]string, err error) {
	if dir, err = filepath.Abs(dir); err != nil {
		return binaries, err
	}
	if now == "" {
		now = filepath.Join(dir, "bin", "shoal")
		if out, err := exec.CommandContext(ctx, "go", "build", "-o", now, "./cmd/shoal").CombinedOutput(); err != nil {
			return binaries, fmt.Errorf("build: %w\n%s", err, out)
		}
	}
	for i, path := range []string{cmp.Or(old, now), now} {
		if binaries[i], err = filepath.Abs(path); err != nil {
			return binaries, err
		}
	}
	folder := filepath.Join(dir, "photos")
	if _, err = photos.Make(ctx, folder, count, func(done, total int) {
		if done%512 == 0 {
			fmt.Fprintf(os.Stderr, "photographs: %d of %d\n", done, total)
		}
	}); err != nil {
		return binaries, err
	}
	if b.bed, err = testbed.Start(ctx, dir, binaries[1]); err != nil {
		return binaries, err
	}
	if _, err = b.bed.Server.Upload(ctx, folder, "photos", "train", nil); err == nil {
		err = b.bed.Lay(ctx, large, nil)
	}
	if err == nil {
		_, err = b.bed.Shoal(ctx, "pack", source, shards, "--seed", "1")
	}
	if err == nil {
		err = b.bed.Proxy.Set(ctx, proxy.Options{Latency: 30 * time.Millisecond, Sigma: 0.3})
	}
	if err != nil {
		b.bed.Close()
	}
	return binaries, err
}

// say prints a line and adds it to the report.
func (b *bench) say(format string, args ...any) {
	line := fmt.Sprintf(format, args...)
	fmt.Println(line)
	b.report.WriteString(line + "\n")
}

// machine describes where this runs.
func machine() string {
	model := "unknown processor"
	proc, _ := procfs.NewDefaultFS() // the next call tells
	if cores, err := proc.CPUInfo(); err == nil && len(cores) > 0 {
		model = cores[0].ModelName
	}
	var uts unix.Utsname
	_ = unix.Uname(&uts)
	return fmt.Sprintf("%d cores (%s), Linux %s, %s, load %s at the start",
		runtime.NumCPU(), model, unix.ByteSliceToString(uts.Release[:]), runtime.Version(), load())
}

func load() string {
	b, _ := os.ReadFile("/proc/loadavg")
	first, _, _ := strings.Cut(string(b), " ")
	return first
}
