package fusefs

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
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

// BenchmarkFirstListing is ls of 100,000 entries right after mounting, by one process and by four.
func BenchmarkFirstListing(b *testing.B) {
	for _, processes := range []int{1, 4} {
		b.Run(fmt.Sprintf("processes=%d", processes), func(b *testing.B) {
			for b.Loop() {
				b.StopTimer()
				c := mountChild(b, "big")
				b.StartTimer()
				var wg sync.WaitGroup
				for range processes {
					wg.Go(func() {
						if out, err := exec.Command("ls", "-U", c.path("dir")).Output(); err != nil ||
							bytes.Count(out, []byte("\n")) != 100_000 {
							b.Error(len(out), err)
						}
					})
				}
				wg.Wait()
				b.StopTimer()
				c.finish()
				b.StartTimer()
			}
		})
	}
}

// slab returns the bytes of the kernel's objects of a name, all mounts together.
func slab(b *testing.B, name string) float64 {
	text, err := os.ReadFile("/proc/slabinfo")
	if err != nil {
		b.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if f := strings.Fields(line); f[0] == name {
			n, err1 := strconv.ParseFloat(f[1], 64)
			size, err2 := strconv.ParseFloat(f[3], 64)
			if err1 != nil || err2 != nil {
				b.Fatal(err1, err2)
			}
			return n * size
		}
	}
	return 0
}

// BenchmarkMillion mounts a million files and walks them with a stat of each. It tells what an object
// costs the daemon, the manifest included, and the kernel, which gives it back when it is short of
// memory.
func BenchmarkMillion(b *testing.B) {
	c := mountChild(b, "million")
	before, inodes := rss(b, c), slab(b, "fuse_inode")
	for b.Loop() {
		// -ls would do the same through a pipe; -newermt needs every file's time.
		out, err := exec.Command("bash", "-c", "find "+c.dir+" -newermt 1970-01-02 | wc -l").Output()
		if err != nil || strings.TrimSpace(string(out)) != "1001001" {
			b.Fatalf("%s, %v", out, err)
		}
	}
	after := rss(b, c)
	b.ReportMetric(after/1e6, "daemon-B/object")
	b.ReportMetric((after-before)/1e6, "of-that-by-find")
	b.ReportMetric((slab(b, "fuse_inode")-inodes)/1e6, "kernel-inode-B/object")
	b.ReportMetric(cpuOf(b, c.cmd.Process.Pid).Seconds(), "daemon-CPU-s")
}
