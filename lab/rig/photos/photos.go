// Package photos makes a training set of real photographs: varied crops of the photographs in
// Debian's wallpaper packages, as JPEG files in one folder a class, the way ImageFolder wants them.
//
// The set is a pure function of its size and the source files: the same bytes on every run, however
// many cores make it. It is kept between runs and made again only when another size is asked for.
//
// Trap: a file must be 40 to 120 KB at a few hundred thousand pixels. Fog and sky compress to less
// at any quality, so each file searches its quality, and where that does not do, its crop.
package photos

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"image"
	"io/fs"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync/atomic"

	"golang.org/x/sync/errgroup"

	"github.com/shoalfs/shoal/gpuingest/jpeg"
)

// DefaultCount is how many photographs there are where nobody says.
const DefaultCount = 4096

// The smallest and the largest file.
const minBytes, maxBytes = 41_000, 119_000

// algorithm changes when as many files would have other bytes; seed is that of crops, sizes, chroma samplings and
// qualities.
const algorithm, seed = 3, 1

// Set describes a finished training set.
type Set struct {
	Files   int
	Classes int
	Bytes   int64
	Made    bool // false when it was there already
}

// marker is the file that says what a folder holds; its dot keeps it out of listings.
const marker = ".shoal-photos.json"

type state struct {
	Algorithm int
	Set       Set // empty until it is complete
}

// sizes are the files' widths and heights; the mix resembles ImageNet's.
var sizes = []image.Point{
	{500, 375}, {500, 375}, {500, 375}, {375, 500}, {375, 500}, {500, 333}, {333, 500},
	{640, 480}, {480, 640}, {512, 384}, {480, 480},
}

// Make fills dir/CLASS/NNNN.jpg with count files, or finds that it has done so before. progress, if not nil, is called
// from several goroutines after each file. A folder that holds anything else is refused; what an interrupted Make has
// left is made again.
func Make(ctx context.Context, dir string, count int, progress func(done, total int)) (_ Set, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("make photographs in %s: %w", dir, err)
		}
	}()
	sources, err := Sources()
	if err != nil {
		return Set{}, err
	}
	if count < len(sources) {
		return Set{}, fmt.Errorf("%d files: want at least %d, one a class", count, len(sources))
	}
	set, ok, err := existing(dir, count, sources)
	if ok || err != nil {
		return set, err
	}
	st := state{Algorithm: algorithm}
	if err := st.write(dir); err != nil {
		return Set{}, err
	}

	var done, bytes atomic.Int64
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(runtime.GOMAXPROCS(0))
	first := 0
	for i, src := range sources {
		// Class i gets the files first..first+n-1; the remainder goes to the first classes.
		n := count / len(sources)
		if i < count%len(sources) {
			n++
		}
		begin := first
		first += n
		g.Go(func() error {
			if err := ctx.Err(); err != nil {
				return err
			}
			from, err := load(src.Path)
			if err != nil {
				return err
			}
			folder := filepath.Join(dir, src.Class)
			if err := os.MkdirAll(folder, 0o755); err != nil {
				return err
			}
			var c cropper
			for k := range n {
				if err := ctx.Err(); err != nil {
					return err
				}
				b, err := c.make(from, sampleRand(seed, src.Class, k))
				if err != nil {
					return fmt.Errorf("crop %d of %s: %w", k, src.Path, err)
				}
				if err := os.WriteFile(filepath.Join(folder, fmt.Sprintf("%s_%05d.jpg", src.Class, begin+k)), b,
					0o644); err != nil {
					return err
				}
				bytes.Add(int64(len(b)))
				if d := done.Add(1); progress != nil {
					progress(int(d), count)
				}
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return Set{}, err
	}
	st.Set = Set{Files: count, Classes: len(sources), Bytes: bytes.Load()}
	if err := st.write(dir); err != nil {
		return Set{}, err
	}
	st.Set.Made = true
	return st.Set, nil
}

// existing returns the set in dir if it is whole and of this size. Otherwise it clears the
// class folders of a set that was made before, and refuses a folder that holds anything else.
func existing(dir string, count int, sources []Source) (Set, bool, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) || err == nil && len(entries) == 0 {
		return Set{}, false, nil
	}
	if err != nil {
		return Set{}, false, err
	}
	b, err := os.ReadFile(filepath.Join(dir, marker))
	if err != nil {
		return Set{}, false, fmt.Errorf(
			"the folder is not empty and holds no training set of ours; name another one or empty it (%w)", err)
	}
	var st state
	if json.Unmarshal(b, &st) == nil && st.Algorithm == algorithm && st.Set.Files == count && st.Set.matches(dir) {
		return st.Set, true, nil
	}
	for _, s := range sources {
		if err := os.RemoveAll(filepath.Join(dir, s.Class)); err != nil {
			return Set{}, false, err
		}
	}
	return Set{}, false, nil
}

// matches reports whether dir still holds as many files and bytes as were made.
func (s Set) matches(dir string) bool {
	got := Set{Classes: s.Classes}
	err := filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || d.Name() == marker {
			return err
		}
		fi, err := d.Info()
		if err != nil {
			return err
		}
		got.Files++
		got.Bytes += fi.Size()
		return nil
	})
	return err == nil && got == s
}

func (st state) write(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	b, err := json.MarshalIndent(st, "", "\t")
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, marker), b, 0o644) // if it is cut off, the set is made again
}

// sampleRand gives each file random numbers of its own, so that the order of making does not matter.
func sampleRand(seed uint64, class string, k int) *rand.Rand {
	h := fnv.New64a()
	_, _ = h.Write([]byte(class))
	return rand.New(rand.NewPCG(seed^h.Sum64(), uint64(k)))
}

// cropper makes files; it keeps its buffers.
type cropper struct {
	rgb []byte
	out []byte
}

// attempts is how many crops are tried for one file.
const attempts = 12

// make draws crops until one can be stored in a number of bytes that is allowed. The result is valid
// until the next call.
func (c *cropper) make(from photograph, rng *rand.Rand) ([]byte, error) {
	full := from.size
	target := math.Exp(math.Log(63_000) + 0.25*rng.NormFloat64())
	target = min(max(target, 1.08*minBytes), 0.92*maxBytes)
	for try := range attempts {
		size := sizes[rng.IntN(len(sizes))]
		// How many source pixels make one of the file's: never less than one (nothing is
		// enlarged unless the photograph is small), at most what fits.
		most := min(float64(full.X)/float64(size.X), float64(full.Y)/float64(size.Y))
		zoom := math.Exp(rng.Float64() * math.Log(most))
		if try >= attempts/2 { // a large part holds more detail than a small one
			zoom = most
		}
		w, h := zoom*float64(size.X), zoom*float64(size.Y)
		x, y := rng.Float64()*(float64(full.X)-w), rng.Float64()*(float64(full.Y)-h)
		sub := jpeg.Sub420
		if rng.IntN(2) == 0 {
			sub = jpeg.Sub444
		}
		c.rgb = slices.Grow(c.rgb[:0], 3*size.X*size.Y)[:3*size.X*size.Y]
		crop := &jpeg.Job{Box: image.Rect(int(x), int(y), int(x+w), int(y+h)), Size: size, Flip: rng.IntN(2) == 0}
		if err := jpeg.Resample(c.rgb, from.rgb, full, crop); err != nil {
			return nil, err
		}
		ok, err := c.encode(size, sub, int(target))
		if ok || err != nil {
			return c.out, err
		}
	}
	return nil, fmt.Errorf("no crop in %d fits %d to %d bytes", attempts, minBytes, maxBytes)
}

// encode searches the quality at which the picture takes about target bytes, by bisection: size
// grows with quality. It reports whether the result has an allowed size.
func (c *cropper) encode(size image.Point, sub jpeg.Subsampling, target int) (bool, error) {
	lo, hi := 30, 100
	for q := 88; ; q = (lo + hi) / 2 {
		var err error
		if c.out, err = jpeg.Encode(c.out[:0], c.rgb, size.X, size.Y, q, sub); err != nil {
			return false, err
		}
		n := len(c.out)
		if n < target {
			lo = q
		} else {
			hi = q
		}
		if near := 20*max(n-target, target-n) <= 3*target; near || hi-lo <= 1 {
			return n >= minBytes && n <= maxBytes, nil
		}
	}
}

// photograph is packed RGB.
type photograph struct {
	rgb  []byte
	size image.Point
}

func load(path string) (p photograph, err error) {
	b, err := os.ReadFile(path)
	if err == nil {
		p.rgb, p.size.X, p.size.Y, err = jpeg.DecodeRGB(b)
	}
	return p, err
}
