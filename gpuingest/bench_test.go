package gpuingest

import (
	"fmt"
	"image"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/gpuingest/jpeg"
)

// benchFiles are photos of 500x375 at about 75 KB, the size of a usual training sample.
func benchFiles(b *testing.B) [][]byte {
	b.Helper()
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
	return files
}

// BenchmarkChain takes each sample through the stages one after another and compares them by the thread's CPU time:
// entropy decoding of the whole, decoding of the region, region and resize, and the whole sample by Apply.
func BenchmarkChain(b *testing.B) {
	files := benchFiles(b)
	tr := compile(b, "RandomResizedCrop(224)|RandomHorizontalFlip()|uint8|nchw")
	dst := make([]byte, 500*375*3)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var spent [4]float64
	var steps []step
	var r Rand
	for i := 0; b.Loop(); i++ {
		f, at := files[i%len(files)], Draw{Seed: 1, Sample: uint64(i)}
		size := image.Pt(500, 375)
		steps = tr.plan(steps[:0], size, at, &r)
		box := steps[0].box
		for stage := range spent {
			start := threadTime(b)
			var err error
			switch stage {
			case 0:
				err = jpeg.DecodeSized(dst[:3], f, size, &jpeg.Job{Box: image.Rect(0, 374, 1, 375)})
			case 1:
				err = jpeg.DecodeSized(dst[:box.Dx()*box.Dy()*3], f, size, &jpeg.Job{Box: box})
			case 2:
				err = jpeg.DecodeSized(dst[:224*224*3], f, size, &jpeg.Job{Box: box, Size: image.Pt(224, 224)})
			case 3:
				err = tr.Apply(f, at, dst[:tr.OutBytes()])
			}
			spent[stage] += threadTime(b) - start
			if err != nil {
				b.Fatal(err)
			}
		}
	}
	n := float64(b.N)
	for stage, name := range []string{"entropy/s", "region/s", "resized/s", "samples/s"} {
		b.ReportMetric(n*1e6/spent[stage], name)
	}
	b.ReportMetric(100*spent[1]/spent[3], "%-of-region")
	b.ReportMetric((spent[3]-spent[1])/n, "us-outside-codec")
}

// BenchmarkApply is the whole sample of several transforms. With SHOAL_BENCH_FILES=DIR the photos are also written
// there, so that other programs can be timed on the same files.
func BenchmarkApply(b *testing.B) {
	files := benchFiles(b)
	for _, spec := range []string{
		"RandomResizedCrop(224)|RandomHorizontalFlip()|uint8|nhwc",
		"RandomResizedCrop(224)|RandomHorizontalFlip()|uint8|nchw",
		"RandomResizedCrop(224)|RandomHorizontalFlip()|fp32|Normalize((0.485,0.456,0.406),(0.229,0.224,0.225))",
		"RandomResizedCrop(224)|RandomHorizontalFlip()|fp16|Normalize((0.485,0.456,0.406),(0.229,0.224,0.225))",
		"RandomResizedCrop(224, interpolation='bicubic')|RandomHorizontalFlip()|uint8|nchw",
		"RandomResizedCrop(224)|RandomHorizontalFlip()|uint8|nchw|dct",
		"RandomResizedCrop(224)|ColorJitter(0.4, 0.4, 0.4)|uint8|nchw",
		"RandomResizedCrop(224)|ColorJitter(0.4, 0.4, 0.4, 0.1)|uint8|nchw",
		"RandomResizedCrop(224)|RandAugment()|uint8|nchw",
		"RandomResizedCrop(224)|TrivialAugmentWide(interpolation='bilinear')|uint8|nchw",
		"RandomResizedCrop(224)|GaussianBlur(23)|uint8|nchw",
		"RandomResizedCrop(224)|RandomRotation(15, 'bicubic')|uint8|nchw",
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

// Recipes of docs/transforms.md, which TestRecipes compares with the page.
const (
	dinoCrops = "views(2x[RandomResizedCrop(224, scale=(0.4, 1.0), interpolation='bicubic')|RandomHorizontalFlip()], " +
		"8x[RandomResizedCrop(96, scale=(0.05, 0.4), interpolation='bicubic')|RandomHorizontalFlip()])|uint8"
	dinoRecipe = "views([RandomResizedCrop(224,scale=(0.4,1.0),interpolation='bicubic')|RandomHorizontalFlip()|RandomApply([ColorJitter(0.4,0.4,0.2,0.1)],0.8)|RandomGrayscale(0.2)|GaussianBlur(23)], [RandomResizedCrop(224,scale=(0.4,1.0),interpolation='bicubic')|RandomHorizontalFlip()|RandomApply([ColorJitter(0.4,0.4,0.2,0.1)],0.8)|RandomGrayscale(0.2)|RandomApply([GaussianBlur(23)],0.1)|RandomSolarize(128,p=0.2)], 8x[RandomResizedCrop(96,scale=(0.05,0.4),interpolation='bicubic')|RandomHorizontalFlip()|RandomApply([ColorJitter(0.4,0.4,0.2,0.1)],0.8)|RandomGrayscale(0.2)|RandomApply([GaussianBlur(23)],0.5)])|fp16|Normalize((0.485,0.456,0.406),(0.229,0.224,0.225))"
)

// BenchmarkViews compares views with as many decodes: each sample is made both ways, one after the other, by the
// thread's CPU time. The metric is the ratio of the medians.
func BenchmarkViews(b *testing.B) {
	files := benchFiles(b)
	for name, spec := range map[string]string{"crops": dinoCrops,
		"bilinear": strings.ReplaceAll(dinoCrops, ", interpolation='bicubic'", ""), "recipe": dinoRecipe} {
		b.Run(name, func(b *testing.B) {
			v := views(b, spec)
			var fields [][]byte
			for _, f := range v.Fields() {
				fields = append(fields, make([]byte, f.Bytes))
			}
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			var once, each []float64
			for i := 0; b.Loop(); i++ {
				src, at := files[i%len(files)], Draw{Seed: 1, Sample: uint64(i)}
				start := threadTime(b)
				if err := v.Make(Sample{Data: src}, at, &Row{Fields: fields}); err != nil {
					b.Fatal(err)
				}
				middle := threadTime(b)
				for k, t := range v.views {
					if err := t.Apply(src, at, fields[k]); err != nil {
						b.Fatal(err)
					}
				}
				once, each = append(once, middle-start), append(each, threadTime(b)-middle)
			}
			slices.Sort(once)
			slices.Sort(each)
			crops, median := float64(len(fields))*1e6, len(once)/2
			b.ReportMetric(crops/once[median], "crops/s")
			b.ReportMetric(crops/each[median], "crops/s-each-decoded")
			b.ReportMetric(each[median]/once[median], "times")
		})
	}
}

// threadTime is the thread's CPU time in microseconds: unlike the clock it means something on a machine with other
// work.
func threadTime(b *testing.B) float64 {
	b.Helper()
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t); err != nil {
		b.Fatal(err)
	}
	return float64(t.Nano()) / 1e3
}
