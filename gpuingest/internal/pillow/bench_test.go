package pillow

import (
	"image"
	"math/rand/v2"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/gpuingest/jpeg"
)

// cpu is the thread's CPU time in microseconds: unlike the clock it means something on a machine with other work.
func cpu(b *testing.B) float64 {
	b.Helper()
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t); err != nil {
		b.Fatal(err)
	}
	return float64(t.Nano()) / 1e3
}

// BenchmarkKernels times each operation on 224 x 224 pixels of a gradient with noise.
func BenchmarkKernels(b *testing.B) {
	size := image.Pt(224, 224)
	r := rand.New(rand.NewPCG(1, 2))
	src := make([]byte, 3*size.X*size.Y)
	for i := range src {
		src[i] = byte(i/3%224/2 + i%3*40 + r.IntN(40))
	}
	dst, pix, row := make([]byte, len(src)), make([]byte, len(src)), make([]byte, 3*size.X)
	turned := &[6]float64{0.98, 0.17, -15, -0.17, 0.98, 20}
	for _, k := range []struct {
		name string
		f    func()
	}{
		{"brightness", func() { Brightness(pix, 1.2) }}, {"contrast", func() { Contrast(pix, 1.2) }},
		{"saturation", func() { Saturation(pix, 1.2) }}, {"hue", func() { Hue(pix, 0.1) }},
		{"equalize", func() { Equalize(pix) }}, {"grey", func() { Grey(pix) }},
		{"sharpness", func() { Sharpness(dst, pix, size, 1.5, row) }},
		{"blur 23", func() { Blur(dst, pix, size, image.Pt(23, 23), 2) }},
		{"nearest", func() { Affine(dst, size, pix, size, turned, jpeg.Nearest, [3]uint8{}) }},
		{"bilinear", func() { Affine(dst, size, pix, size, turned, jpeg.Bilinear, [3]uint8{}) }},
		{"bicubic", func() { Affine(dst, size, pix, size, turned, jpeg.Bicubic, [3]uint8{}) }},
		{"mix", func() { Mix("uint8", dst, pix, 12345) }},
	} {
		b.Run(k.name, func(b *testing.B) {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			start := cpu(b)
			for b.Loop() {
				copy(pix, src)
				k.f()
			}
			b.ReportMetric((cpu(b)-start)/float64(b.N), "us-cpu")
		})
	}
}
