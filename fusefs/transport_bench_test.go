package fusefs

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

// BenchmarkTransport compares io_uring with /dev/fuse: warm data, a fresh mount for each pass, so that the kernel asks
// for every name and page, and readers in C. The arms take turns, first one and then the other, so that a noisy machine
// is noisy to both. It logs medians: files per second, and microseconds of the server's CPU per file; for
// lab/bench/results/uring.md.
//
//	go test -run '^$' -bench Transport -benchtime 5x ./fusefs
func BenchmarkTransport(b *testing.B) {
	needRings(b)
	b.Setenv(procsEnv, "4") // as the daemon has at least
	reader := filepath.Join(b.TempDir(), "reader")
	if out, err := exec.Command("gcc", "-O2", "-pthread", "-o", reader,
		"testdata/reader.c").CombinedOutput(); err != nil {
		b.Fatalf("%v\n%s", err, out)
	}
	for _, bm := range []struct {
		name, data, volume string
		readers            int
		delay              time.Duration
	}{
		{"63KB-1", "bench", preadVolume, 1, 0},
		{"63KB-8", "bench", preadVolume, 8, 0},
		{"63KB-64", "bench", preadVolume, 64, 0},
		{"63KB-lent-8", "bench", lendVolume, 8, 0},
		{"4KiB-1", "small", preadVolume, 1, 0},
		{"4KiB-8", "small", preadVolume, 8, 0},
		{"30ms-64", "cold", "", 64, 30 * time.Millisecond},
		{"30ms-8", "cold", "", 8, 30 * time.Millisecond},
		{"512KiB-4", "half", preadVolume, 4, 0},
		{"1MiB-4", "one", preadVolume, 4, 0},
		{"16MiB-4", "huge", preadVolume, 4, 0},
	} {
		b.Run(bm.name, func(b *testing.B) {
			folder := b.TempDir()
			arms := []*arm{{name: TransportDev}, {name: TransportURing}}
			for b.Loop() {
				for _, a := range arms {
					c := mountChild(b, bm.data, func(s *spec) {
						s.ArenaMiB, s.Volume, s.Folder, s.Delay, s.Options.Transport = 16, bm.volume, folder,
							bm.delay, a.name
						s.Options.ReadAhead = 512 << 10
					})
					var list bytes.Buffer
					for _, i := range rand.Perm(len(c.data)) {
						fmt.Fprintln(&list, c.path(c.data[i].path))
					}
					cmd := exec.Command(reader, fmt.Sprint(bm.readers))
					cmd.Stdin, cmd.Stderr = &list, os.Stderr
					cpu := cpuOf(b, c.cmd.Process.Pid)
					out, err := cmd.Output()
					if err != nil {
						b.Fatal(err)
					}
					var files, size, seconds float64
					if _, err := fmt.Sscan(string(out), &files, &size, &seconds); err != nil {
						b.Fatal(err)
					}
					a.rates = append(a.rates, files/seconds)
					a.cpu = append(a.cpu, (cpuOf(b, c.cmd.Process.Pid)-cpu).Seconds()*1e6/files)
					c.finish()
				}
				arms[0], arms[1] = arms[1], arms[0]
			}
			dev, rings := arms[0], arms[1]
			if dev.name != TransportDev {
				dev, rings = rings, dev
			}
			b.ReportMetric(median(rings.rates)/median(dev.rates), "rate")
			b.ReportMetric(median(rings.cpu)/median(dev.cpu), "CPU")
			b.Logf("| %s | %.0f | %.0f | %.2f | %.1f | %.1f | %.2f |",
				bm.name, median(dev.rates), median(rings.rates), median(rings.rates)/median(dev.rates),
				median(dev.cpu), median(rings.cpu), median(rings.cpu)/median(dev.cpu))
		})
	}
}
