package fusefs

import (
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// readAll reads every file of the dataset once, in random order, with the kernel's caches dropped.
func readAll(b *testing.B, c *child, threads int) {
	b.StopTimer()
	if err := os.WriteFile("/proc/sys/vm/drop_caches", []byte("3"), 0); err != nil {
		b.Fatal(err)
	}
	order := rand.Perm(len(c.data))
	b.StartTimer()
	var next atomic.Int64
	var wg sync.WaitGroup
	for range threads {
		wg.Go(func() {
			for i := next.Add(1) - 1; i < int64(len(order)); i = next.Add(1) - 1 {
				if _, err := os.ReadFile(c.path(c.data[order[i]].path)); err != nil {
					b.Error(err)
				}
			}
		})
	}
	wg.Wait()
}

// BenchmarkCold is 4,000 files of 63 KB from memory, 8 readers, nothing in the kernel's caches.
func BenchmarkCold(b *testing.B) {
	c := mountChild(b, "bench", func(s *spec) { s.ArenaMiB = 256 })
	for b.Loop() {
		readAll(b, c, 8)
	}
	b.ReportMetric(float64(b.N*len(c.data))/b.Elapsed().Seconds(), "files/s")
}

// BenchmarkSlowStore shows that MaxBackground is what bounds readers that wait for a store.
func BenchmarkSlowStore(b *testing.B) {
	for _, background := range []int{12, 64, DefaultMaxBackground} {
		b.Run(fmt.Sprintf("background=%d", background), func(b *testing.B) {
			c := mountChild(b, "bench", func(s *spec) {
				s.ArenaMiB, s.Delay, s.Options.MaxBackground = 16, 30*time.Millisecond, background
			})
			for b.Loop() {
				readAll(b, c, 64)
			}
			b.ReportMetric(float64(b.N*len(c.data))/b.Elapsed().Seconds(), "files/s")
		})
	}
}

// rss returns the resident memory of the child, without garbage, in bytes.
func rss(b *testing.B, c *child) float64 {
	c.do("collect")
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", c.cmd.Process.Pid))
	if err != nil {
		b.Fatal(err)
	}
	for line := range strings.Lines(string(status)) {
		if f := strings.Fields(line); f[0] == "VmRSS:" {
			kib, err := strconv.ParseFloat(f[1], 64)
			if err != nil {
				b.Fatal(err)
			}
			return kib * 1024
		}
	}
	b.Fatal("no VmRSS")
	return 0
}

// BenchmarkMillion walks a million files with a stat of each, and tells what that costs the daemon.
func BenchmarkMillion(b *testing.B) {
	c := mountChild(b, "million")
	before := rss(b, c)
	for b.Loop() {
		n := 0
		err := filepath.WalkDir(c.dir, func(_ string, d fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			n++
			_, err = d.Info()
			return err
		})
		if err != nil || n != 1_001_001 {
			b.Fatal(n, err)
		}
	}
	b.ReportMetric((rss(b, c)-before)/1e6, "grown-MB")
}
