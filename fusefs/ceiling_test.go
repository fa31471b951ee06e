package fusefs

import (
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/shoalfs/shoal/lab/rig/cputime"
)

// BenchmarkCeiling compares ways to answer a READ with a plain pread of one file: 4,000 files of 63,000 bytes, 8
// readers, the kernel's caches dropped before each pass. All mounts are up at once and take turns, so that a noisy
// machine is noisy to all; medians of files/s and the CPU that each daemon takes a file are logged, and the ratio to
// the first is the metric.
//
//	go test -run '^$' -bench Ceiling -benchtime 10x ./fusefs
func BenchmarkCeiling(b *testing.B) {
	var arms []*arm
	for _, kind := range []string{preadVolume, crcVolume, copyVolume, lendVolume} {
		c := mountChild(b, "bench", func(s *spec) { s.Volume, s.Folder = kind, b.TempDir() })
		arms = append(arms, &arm{name: kind, dir: c.dir, pid: c.cmd.Process.Pid})
	}
	race(b, arms)
}

// arm is one of the mounts that are compared.
type arm struct {
	name  string
	dir   string
	pid   int
	paths []string
	rates []float64
	cpu   []float64 // microseconds a file
}

// race lets the arms take turns.
func race(b *testing.B, arms []*arm) {
	for _, a := range arms {
		err := filepath.WalkDir(a.dir, func(path string, d fs.DirEntry, err error) error {
			if err == nil && !d.IsDir() {
				a.paths = append(a.paths, path)
			}
			return err
		})
		if err != nil {
			b.Fatal(err)
		}
	}
	for b.Loop() {
		for _, a := range arms {
			cpu := cpuOf(b, a.pid)
			seconds := readPass(b, a.paths, 8)
			n := float64(len(a.paths))
			a.rates = append(a.rates, n/seconds)
			a.cpu = append(a.cpu, (cpuOf(b, a.pid)-cpu).Seconds()*1e6/n)
		}
	}
	first := median(arms[0].rates)
	for _, a := range arms {
		b.Logf("%-8s %6.0f files/s %3.0f%%, daemon %3.0f us CPU a file",
			a.name, median(a.rates), 100*median(a.rates)/first, median(a.cpu))
		if a != arms[0] {
			b.ReportMetric(median(a.rates)/first, a.name+"/"+arms[0].name)
		}
	}
}

func median(v []float64) float64 {
	s := slices.Sorted(slices.Values(v))
	return (s[(len(s)-1)/2] + s[len(s)/2]) / 2
}

// readPass drops the kernel's caches, reads all files in random order and returns the seconds.
func readPass(b *testing.B, paths []string, threads int) float64 {
	syscall.Sync() // dirty pages are not dropped
	if err := os.WriteFile("/proc/sys/vm/drop_caches", []byte("3"), 0); err != nil {
		b.Fatal(err)
	}
	order := rand.Perm(len(paths))
	var next atomic.Int64
	var wg sync.WaitGroup
	start := time.Now()
	for range threads {
		wg.Go(func() {
			buf := make([]byte, 128<<10)
			for i := next.Add(1) - 1; i < int64(len(order)); i = next.Add(1) - 1 {
				if n, err := readOnce(paths[order[i]], buf); err != nil || n == 0 {
					b.Errorf("%s: %d bytes, %v", paths[order[i]], n, err)
				}
			}
		})
	}
	wg.Wait()
	return time.Since(start).Seconds()
}

func readOnce(path string, buf []byte) (int, error) {
	fd, err := syscall.Open(path, syscall.O_RDONLY|syscall.O_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	defer syscall.Close(fd)
	n := 0
	for {
		got, err := syscall.Read(fd, buf[n:])
		if got <= 0 || err != nil {
			return n, err
		}
		n += got
	}
}

// cpuOf returns the CPU time that a process has used.
func cpuOf(b *testing.B, pid int) time.Duration {
	b.Helper()
	seconds, err := cputime.Process(pid)
	if err != nil {
		b.Fatal(err)
	}
	return time.Duration(seconds * float64(time.Second))
}
