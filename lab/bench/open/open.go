// Package open is the benchmark of that name.
package open

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/shoalfs/shoal/lab/bench/kit"
)

// target is the least ratio of shoal.open to the mount.
const target = 2

// Bench measures warm reads of photographs into Python: by open of a mount's files, and by shoal.open of the same, in turns.
func Bench(flags *flag.FlagSet) func(k *kit.Kit) error {
	photos := flags.Int("photos", 4096, "photographs")
	rounds := flags.Int("rounds", 9, "rounds of each")
	python := flags.String("python", "/usr/bin/python3", "interpreter with numpy, grpcio and torch")
	return func(k *kit.Kit) error {
		if err := k.Stored(*photos, 0); err != nil {
			return err
		}
		list, err := k.Shuffled("open.txt")
		if err != nil {
			return err
		}
		k.Header("shoal.open beside the mount, warm, into Python")
		k.Say("%d photographs, %.1f KB each on average, all on disk and in the page cache, in one shuffled order. Readers and daemon share the cores.\n", k.Up.Files, k.KB())
		k.Say("| reader | --kernel-cache | open, files/s | shoal.open, files/s | ratio of medians | target | |")
		k.Say("| --- | --- | --- | --- | ---: | ---: | --- |")
		cache := filepath.Join(k.Dir, "cache-open")
		for _, kernel := range []string{"off", "auto"} {
			m, err := k.Mount(kit.Source, "mnt", "--cache-dir", cache, "--cache-size", "8GiB", "--kernel-cache", kernel)
			if err != nil {
				return err
			}
			if err := errors.Join(measure(k, m, list, *python, kernel, *rounds), m.Close()); err != nil {
				return err
			}
		}
		return os.RemoveAll(cache)
	}
}

// measure measures both on one mount, with one reader and with workers.
func measure(k *kit.Kit, m *kit.Mount, list, python, kernel string, rounds int) error {
	if _, err := k.Read(m.Dir, list); err != nil {
		return err
	}
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(100 * time.Millisecond) {
		s, err := m.Stats()
		if err != nil {
			return err
		}
		if s.Disk.Kept >= k.Up.Files {
			break
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%d of %d photographs are on disk", s.Disk.Kept, k.Up.Files)
		}
	}
	for _, workers := range []int{0, 2} {
		var rates map[string][]float64
		if err := k.Run(&rates, python, "lab/bench/open/open.py", m.Dir, list, strconv.Itoa(workers), strconv.Itoa(rounds)); err != nil {
			return err
		}
		name, ratio := "a loop in one process", kit.Median(rates["shoal.open"])/kit.Median(rates["open"])
		if workers > 0 {
			name = fmt.Sprintf("DataLoader, %d workers", workers)
		}
		k.Say("| %s | %s | %.0f: %s | %.0f: %s | %.1f | %d | %s |", name, kernel, kit.Median(rates["open"]), kit.Numbers(rates["open"], 0),
			kit.Median(rates["shoal.open"]), kit.Numbers(rates["shoal.open"], 0), ratio, target, kit.Verdict(ratio >= target))
	}
	return nil
}
