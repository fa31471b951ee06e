package ingest

import (
	"encoding/json"
	"errors"
	"fmt"
	"image"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/shoalfs/shoal/gpuingest"
	"github.com/shoalfs/shoal/gpuingest/jpeg"
	"github.com/shoalfs/shoal/lab/bench/kit"
)

// links are the steps of a sample, each with all before it. Every one reads its file, as the peers do.
var links = []string{"entropy", "region", "resize", "sample"}

// rate is what a role prints.
type rate struct {
	Images int     `json:"images"`
	PerS   float64 `json:"per_s"` // images a second of processor time
	Bytes  int64   `json:"bytes"`
}

// Chain runs LINK over the photographs of DIR for SECONDS of this process.
func Chain(args []string) error {
	if len(args) != 3 {
		return errors.New("chain LINK DIR SECONDS")
	}
	link, dir := args[0], args[1]
	seconds, err := strconv.ParseFloat(args[2], 64)
	if err != nil {
		return err
	}
	paths, err := kit.Walk(dir)
	if err != nil {
		return err
	}
	t, err := gpuingest.Compile("RandomResizedCrop(224)|RandomHorizontalFlip()|uint8|nchw")
	if err != nil {
		return err
	}
	dst := make([]byte, 1<<26)
	var src []byte
	one := func(n int) error {
		if src, err = readFile(filepath.Join(dir, paths[n%len(paths)]), src); err != nil {
			return err
		}
		if link == "sample" {
			return t.Apply(src, gpuingest.Draw{Seed: 1, Sample: uint64(n)}, dst[:t.OutBytes()])
		}
		w, h, err := jpeg.Size(src)
		if err != nil {
			return err
		}
		j := job(link, n, w, h)
		out := j.Size
		if out == (image.Point{}) {
			out = j.Box.Size()
		}
		return jpeg.Decode(dst[:out.X*out.Y*3], src, &j)
	}
	r := rate{}
	for n := range 32 {
		if err := one(n); err != nil {
			return err
		}
	}
	before, end := kit.CPU(os.Getpid()), time.Now().Add(time.Duration(seconds*float64(time.Second)))
	for time.Now().Before(end) {
		if err := one(r.Images); err != nil {
			return fmt.Errorf("%s: %w", paths[r.Images%len(paths)], err)
		}
		r.Images++
		r.Bytes += int64(len(src))
	}
	r.PerS = float64(r.Images) / (kit.CPU(os.Getpid()) - before)
	return json.NewEncoder(os.Stdout).Encode(r)
}

// job is what is decoded of picture n.
func job(link string, n, w, h int) jpeg.Job {
	if link == "entropy" { // one pixel of the last row: all is entropy-decoded, next to nothing transformed
		return jpeg.Job{Box: image.Rect(0, h-1, 1, h)}
	}
	r := rand.New(rand.NewPCG(1, uint64(n)))
	box := image.Rect(0, 0, w, h)
	for range 10 { // RandomResizedCrop's
		area := float64(w*h) * (0.08 + 0.92*r.Float64())
		ratio := math.Exp((2*r.Float64() - 1) * math.Log(4.0/3))
		bw, bh := int(math.Round(math.Sqrt(area*ratio))), int(math.Round(math.Sqrt(area/ratio)))
		if bw > 0 && bh > 0 && bw <= w && bh <= h {
			x, y := r.IntN(w-bw+1), r.IntN(h-bh+1)
			box = image.Rect(x, y, x+bw, y+bh)
			break
		}
	}
	if link == "region" {
		return jpeg.Job{Box: box}
	}
	return jpeg.Job{Box: box, Size: image.Pt(224, 224)}
}

func readFile(path string, into []byte) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if int64(cap(into)) < info.Size() {
		into = make([]byte, 2*info.Size())
	}
	into = into[:info.Size()]
	_, err = f.ReadAt(into, 0)
	return into, err
}
