package jpeg

import (
	"fmt"
	"image"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// benchFiles are photos of 500x375 at about the given size; 75 KB is that of a usual training sample.
func benchFiles(b *testing.B, size int) [][]byte {
	b.Helper()
	const w, h = 500, 375
	var files [][]byte
	var bytes int
	for i := range 16 {
		pix := photo(b, i*3, w, h)
		var best []byte
		for q := 30; q <= 99; q++ {
			best = encode(b, pix, w, h, Encoding{Quality: q, Subsampling: Sub420})
			if len(best) >= size {
				break
			}
		}
		files, bytes = append(files, best), bytes+len(best)
	}
	b.Logf("%d photos, %d bytes on average", len(files), bytes/len(files))
	return files
}

// rrc draws boxes as RandomResizedCrop does by default.
func rrc(r *rand.Rand) image.Rectangle {
	for {
		area := 500 * 375 * (0.08 + 0.92*r.Float64())
		ratio := math.Exp((2*r.Float64() - 1) * math.Log(4.0/3))
		w, h := int(math.Sqrt(area*ratio)), int(math.Sqrt(area/ratio))
		if w > 0 && h > 0 && w <= 500 && h <= 375 {
			x, y := r.IntN(500-w+1), r.IntN(375-h+1)
			return image.Rect(x, y, x+w, y+h)
		}
	}
}

func benchJob(b *testing.B, make1 func(r *rand.Rand) Job) {
	files := benchFiles(b, 75_000)
	r := rand.New(rand.NewPCG(1, 1))
	jobs := make([]Job, 256)
	for i := range jobs {
		jobs[i] = make1(r)
	}
	dst := make([]byte, 500*375*3*4)
	b.ResetTimer()
	before := cpu(b)
	for i := range b.N {
		j := &jobs[i%len(jobs)]
		size := j.Window.Size()
		if size == (image.Point{}) {
			size = j.Size
		}
		if size == (image.Point{}) {
			size = j.Box.Size()
		}
		if err := Decode(dst[:size.X*size.Y*3*max(j.Elem, 1)], files[i%len(files)], j); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(b.N)/(cpu(b)-before).Seconds(), "images/s/core")
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

// BenchmarkEntropyOnly decodes one pixel of the last row: everything is entropy-decoded, next to nothing transformed.
func BenchmarkEntropyOnly(b *testing.B) {
	benchJob(b, func(*rand.Rand) Job { return Job{Box: image.Rect(0, 374, 1, 375)} })
}

func BenchmarkFullDecode(b *testing.B) {
	benchJob(b, func(*rand.Rand) Job { return Job{Box: image.Rect(0, 0, 500, 375)} })
}

func BenchmarkRegionDecode(b *testing.B) {
	benchJob(b, func(r *rand.Rand) Job { return Job{Box: rrc(r)} })
}

// BenchmarkRegionResizeFlip is a whole sample: RandomResizedCrop(224), RandomHorizontalFlip, uint8, CHW.
func BenchmarkRegionResizeFlip(b *testing.B) {
	benchJob(b, func(r *rand.Rand) Job {
		return Job{Box: rrc(r), Size: image.Pt(224, 224), Flip: r.IntN(2) == 1, Planar: true}
	})
}

func BenchmarkRegionResizeFlipFloat32(b *testing.B) {
	table := make([]byte, 3*256*4)
	benchJob(b, func(r *rand.Rand) Job {
		return Job{Box: rrc(r), Size: image.Pt(224, 224), Flip: r.IntN(2) == 1, Planar: true, Elem: 4, Table: table}
	})
}

// BenchmarkLoops compares the loops by the CPU time of a whole sample each. They alternate every 16 files, and each
// decodes all of them, so that neither another load on the machine nor a file decoded twice in a row favours one.
// -benchtime counts rounds.
func BenchmarkLoops(b *testing.B) {
	for _, kb := range []int{62, 75} {
		b.Run(fmt.Sprint(kb, "KB"), func(b *testing.B) { benchLoops(b, kb*1000) })
	}
}

func benchLoops(b *testing.B, size int) {
	defer setSIMD(vnni)
	files := benchFiles(b, size)
	dst := make([]byte, 224*224*3)
	r := rand.New(rand.NewPCG(1, 1))
	took := make([][]float64, haveSIMD+1) // of each block, in µs for a sample
	b.ResetTimer()
	for round := range b.N {
		jobs := make([]Job, len(files))
		for i := range jobs {
			jobs[i] = Job{Box: rrc(r), Size: image.Pt(224, 224), Flip: r.IntN(2) == 1, Planar: true}
		}
		for k := range took {
			simd := setSIMD((k + round) % len(took))
			before := cpu(b)
			for i, f := range files {
				if err := Decode(dst, f, &jobs[i]); err != nil {
					b.Fatal(err)
				}
			}
			took[simd] = append(took[simd], float64((cpu(b)-before).Microseconds())/float64(len(files)))
		}
	}
	median := func(v []float64) float64 { return slices.Sorted(slices.Values(v))[len(v)/2] }
	for simd, v := range took {
		b.ReportMetric(median(v), fmt.Sprintf("µs/loops%d", simd))
		if simd > avx2 {
			var ratios []float64
			for i := range v {
				ratios = append(ratios, took[avx2][i]/v[i])
			}
			b.ReportMetric(median(ratios), fmt.Sprintf("×/loops%d-than-1", simd))
		}
	}
}

// BenchmarkRecoded compares a whole sample from a recoded file with one from the original.
// They alternate every 16 files, as in BenchmarkLoops. Beside the medians there are the least times of each sample,
// which other work on the machine touches least.
func BenchmarkRecoded(b *testing.B) {
	for _, simd := range []int{avx2, vnni} {
		b.Run(fmt.Sprint("loops", simd), func(b *testing.B) {
			defer setSIMD(vnni)
			if setSIMD(simd) != simd {
				b.Skip("this CPU has none")
			}
			benchRecoded(b, 70_000)
		})
	}
}

func benchRecoded(b *testing.B, size int) {
	files := benchFiles(b, size)
	recs := recodeAll(b, files)
	dst := make([]byte, 224*224*3)
	r := rand.New(rand.NewPCG(1, 1))
	jobs := make([]Job, 4*len(files))
	for i := range jobs {
		jobs[i] = Job{Box: rrc(r), Size: image.Pt(224, 224), Flip: r.IntN(2) == 1, Planar: true}
	}
	names := [2]string{"plain", "recoded"}
	decode := [2]func(i int) error{
		func(i int) error { return Decode(dst, files[i%16], &jobs[i]) },
		func(i int) error { return Decode(dst, recs[i%16], &jobs[i]) },
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var took, ratio [2][]float64
	least := [2][]float64{make([]float64, len(jobs)), make([]float64, len(jobs))}
	b.ResetTimer()
	for round := range b.N {
		var sum [2]float64
		for k := range decode {
			for i := round % 4 * 16; i < round%4*16+16; i++ {
				before := threadCPU(b)
				if err := decode[k](i); err != nil {
					b.Fatal(err)
				}
				t := threadCPU(b) - before
				sum[k] += t / 16
				if l := &least[k][i]; *l == 0 || t < *l {
					*l = t
				}
			}
		}
		for k := range sum {
			took[k], ratio[k] = append(took[k], sum[k]), append(ratio[k], sum[0]/sum[k])
		}
	}
	median := func(v []float64) float64 { return slices.Sorted(slices.Values(v))[len(v)/2] }
	var sums [2]float64
	for k, name := range names {
		for _, t := range least[k] {
			sums[k] += t / float64(len(jobs))
		}
		b.ReportMetric(median(took[k]), "µs/"+name)
		b.ReportMetric(sums[k], "least-µs/"+name)
		if k > 0 {
			b.ReportMetric(median(ratio[k]), "×/"+name)
			b.ReportMetric(sums[0]/sums[k], "least×/"+name)
		}
	}
}

// threadCPU is the thread's CPU time in µs.
func threadCPU(b *testing.B) float64 {
	b.Helper()
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t); err != nil {
		b.Fatal(err)
	}
	return float64(t.Nano()) / 1e3
}

func BenchmarkSize(b *testing.B) {
	files := benchFiles(b, 75_000)
	b.ResetTimer()
	for i := range b.N {
		if _, _, err := Size(files[i%len(files)]); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkRecode compares recoding, restoring and the expansion of all bands with a whole decode, by CPU time. They
// alternate by file. SHOAL_PHOTOS may name a folder of photographs; every 8th is used, and others train the tables.
func BenchmarkRecode(b *testing.B) {
	names, _ := filepath.Glob(filepath.Join(os.Getenv("SHOAL_PHOTOS"), "*", "*.jpg"))
	var files, some [][]byte
	for i := 0; i < len(names); i += 4 {
		f, err := os.ReadFile(names[i])
		if err != nil {
			b.Fatal(err)
		}
		if i%8 == 0 && len(files) < 256 {
			files = append(files, f)
		} else if len(some) < 64 {
			some = append(some, f)
		}
	}
	if len(files) == 0 {
		files = benchFiles(b, 62_000)
		some = files
	}
	tab := train(b, some...)
	recs := make([][]byte, len(files))
	var size, recoded int
	for i, f := range files {
		var err error
		if recs[i], err = tab.recode(nil, f); err != nil {
			b.Fatal(err)
		}
		size, recoded = size+len(f), recoded+min(len(f), len(recs[i]))
	}
	least := map[string][]time.Duration{}
	var buf []byte
	var err error
	measure := func(name string, i int, f func()) {
		if least[name] == nil {
			least[name] = slices.Repeat([]time.Duration{time.Hour}, len(files))
		}
		before := cpu(b)
		f()
		if least[name][i] = min(least[name][i], cpu(b)-before); err != nil {
			b.Fatal(err)
		}
	}
	b.ResetTimer()
	for range b.N {
		for i, f := range files {
			measure("decode", i, func() { _, _, _, err = DecodeRGB(f) })
			measure("recode", i, func() { buf, err = tab.recode(buf[:0], f) })
			measure("restore", i, func() { buf, err = tab.Restore(buf[:0], recs[i]) })
		}
	}
	for name, v := range least {
		var sum time.Duration
		for _, d := range v {
			sum += d
		}
		b.ReportMetric(float64(sum.Microseconds())/float64(len(files)), "µs/"+name)
	}
	b.ReportMetric(float64(recoded)/float64(size), "of-the-bytes")
	b.ReportMetric(float64(size)/float64(len(files)), "bytes/file")
}
