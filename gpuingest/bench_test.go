package gpuingest

import (
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/shoalfs/shoal/gpuingest/jpeg"
)

// BenchmarkApply is the whole sample, 500x375 photos of about 75 KB. With SHOAL_BENCH_FILES=DIR the photos are also
// written there, so that other programs can be timed on the same files.
func BenchmarkApply(b *testing.B) {
	const w, h = 500, 375
	var files [][]byte
	bytes := 0
	for i := range 16 {
		pix := photo(b, i*3, w, h)
		var f []byte
		for q := 60; q < 100 && len(f) < 75_000; q++ {
			var err error
			if f, err = jpeg.Encode(f[:0], pix, w, h, q, 420); err != nil {
				b.Fatal(err)
			}
		}
		files, bytes = append(files, f), bytes+len(f)
		if dir := os.Getenv("SHOAL_BENCH_FILES"); dir != "" {
			if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("%02d.jpg", i)), f, 0o644); err != nil {
				b.Fatal(err)
			}
		}
	}
	b.Logf("%d photos, %d bytes on average", len(files), bytes/len(files))
	for _, spec := range []string{
		"RandomResizedCrop(224)|RandomHorizontalFlip()|uint8|nhwc",
		"RandomResizedCrop(224)|RandomHorizontalFlip()|uint8|nchw",
		"RandomResizedCrop(224)|RandomHorizontalFlip()|fp32|Normalize((0.485,0.456,0.406),(0.229,0.224,0.225))",
		"RandomResizedCrop(224)|RandomHorizontalFlip()|fp16|Normalize((0.485,0.456,0.406),(0.229,0.224,0.225))",
		"Resize(256)|CenterCrop(224)|uint8",
	} {
		b.Run(spec, func(b *testing.B) {
			tr := compile(b, spec)
			dst := make([]byte, tr.OutBytes())
			before := cpu(b)
			for i := 0; b.Loop(); i++ {
				if err := tr.Apply(files[i%len(files)], Draw{Seed: 1, Sample: uint64(i)}, dst); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(b.N)/(cpu(b)-before).Seconds(), "images/s/core")
		})
	}
}

// cpu is the process's CPU time: unlike the clock it means something on a machine with other work.
func cpu(b *testing.B) time.Duration {
	b.Helper()
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
