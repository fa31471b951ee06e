package driver_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"image"
	"image/color"
	"image/png"
	"math/rand/v2"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/shoalfs/shoal/gpuingest"
)

// finishJob is one launch of the kernel.
type finishJob struct {
	elem, nchw, n, h, w, srcH, srcW, grid, block, shift uint32
	rows                                                []row
	table, src                                          []byte
}

type row struct {
	X, Y  uint16
	Flags uint32
}

func (j *finishJob) encode(b *bytes.Buffer) {
	hasTable := uint32(0)
	if j.table != nil {
		hasTable = 1
	}
	for _, v := range []any{[]uint32{j.elem, j.nchw, j.n, j.h, j.w, j.srcH, j.srcW, j.grid, j.block, j.shift, hasTable},
		j.rows, j.table, j.src} {
		if err := binary.Write(b, binary.LittleEndian, v); err != nil {
			panic(err) // a buffer does not fail
		}
	}
}

func (j *finishJob) String() string {
	return fmt.Sprintf("elements of %d bytes, nchw %d, %dx%dx%d of %dx%d, grid %d x %d, source off by %d, table %t",
		j.elem, j.nchw, j.n, j.h, j.w, j.srcH, j.srcW, j.grid, j.block, j.shift, j.table != nil)
}

// expect is the kernel's contract in plain loops.
func (j *finishJob) expect() []byte {
	e := int(j.elem)
	n, h, w := int(j.n), int(j.h), int(j.w)
	out := make([]byte, n*3*h*w*e)
	for i, r := range j.rows {
		if r.Flags&2 == 0 {
			continue
		}
		for y := range h {
			for x := range w {
				from := x
				if r.Flags&1 != 0 {
					from = w - 1 - x
				}
				for c := range 3 {
					v := j.src[((i*int(j.srcH)+int(r.Y)+y)*int(j.srcW)+int(r.X)+from)*3+c]
					at := ((i*h+y)*w+x)*3 + c
					if j.nchw == 1 {
						at = ((i*3+c)*h+y)*w + x
					}
					if j.table == nil {
						out[at] = v
						continue
					}
					copy(out[at*e:][:e], j.table[(c*256+int(v))*e:])
				}
			}
		}
	}
	return out
}

func finish(t *testing.T, jobs []*finishJob) [][]byte {
	t.Helper()
	var in bytes.Buffer
	for _, j := range jobs {
		j.encode(&in)
	}
	cmd := exec.CommandContext(t.Context(), filepath.Join(dir, "finish"), "../../python/shoal/finish.ptx")
	cmd.Stdin = &in
	var errs bytes.Buffer
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v\n%s", err, errs.String())
	}
	results := make([][]byte, len(jobs))
	for i, j := range jobs {
		size := int(j.n * 3 * j.h * j.w * j.elem)
		results[i], out = out[:size], out[size:]
	}
	return results
}

// TestKernel runs the PTX that is committed on random jobs of all sizes of elements, layouts, offsets, flips and launch
// shapes.
func TestKernel(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	u32 := func(from, to int) uint32 { return uint32(from + rng.IntN(to-from+1)) }
	var jobs []*finishJob
	for _, elem := range []uint32{1, 2, 4} {
		for _, nchw := range []uint32{0, 1} {
			for k := range 24 {
				j := &finishJob{elem: elem, nchw: nchw, n: u32(1, 4), h: u32(1, 9), w: u32(1, 13), grid: u32(1, 5),
					block: u32(1, 96), shift: u32(0, 3)}
				if k%3 == 0 {
					j.w = (j.w + 3) / 4 * 4 // the fast path
				}
				j.srcH, j.srcW = j.h+u32(0, 3), j.w+u32(0, 5)
				for range j.n {
					r := row{uint16(u32(0, int(j.srcW-j.w))), uint16(u32(0, int(j.srcH-j.h))), u32(0, 1) | 2}
					if rng.IntN(5) == 0 {
						r.Flags = 0
					}
					j.rows = append(j.rows, r)
				}
				j.src = make([]byte, j.n*j.srcH*j.srcW*3)
				for i := range j.src {
					j.src[i] = byte(rng.Uint32())
				}
				if elem > 1 || k%2 == 0 {
					j.table = make([]byte, 3*256*elem)
					for i := range j.table {
						j.table[i] = byte(rng.Uint32())
					}
				}
				jobs = append(jobs, j)
			}
		}
	}
	for i, got := range finish(t, jobs) {
		if !bytes.Equal(got, jobs[i].expect()) {
			t.Errorf("%v: not the bytes that the contract says", jobs[i])
		}
	}
}

// TestKernelEqualsHost compares with the pixels of the host's transforms: the same picture, uint8 rows finished by the
// kernel, and finished on the host.
func TestKernelEqualsHost(t *testing.T) {
	const w, h = 13, 10
	img := image.NewNRGBA(image.Rect(0, 0, w, h))
	rng := rand.New(rand.NewPCG(1, 2))
	for y := range h {
		for x := range w {
			img.Set(x, y, color.NRGBA{byte(rng.Uint32()), byte(rng.Uint32()), byte(rng.Uint32()), 255})
		}
	}
	var picture bytes.Buffer
	if err := png.Encode(&picture, img); err != nil {
		t.Fatal(err)
	}
	apply := func(spec string, src []byte) []byte {
		tr, err := gpuingest.Compile(spec)
		if err != nil {
			t.Fatal(err)
		}
		out := make([]byte, tr.OutBytes())
		if err := tr.Apply(src, gpuingest.Draw{}, out); err != nil {
			t.Fatal(err)
		}
		return out
	}
	// Every value of every channel in a row of 256 pixels gives the table.
	ramp := image.NewNRGBA(image.Rect(0, 0, 256, 1))
	for x := range 256 {
		ramp.Set(x, 0, color.NRGBA{byte(x), byte(x), byte(x), 255})
	}
	var values bytes.Buffer
	if err := png.Encode(&values, ramp); err != nil {
		t.Fatal(err)
	}
	var jobs []*finishJob
	var wants [][]byte
	for dtype, elem := range map[string]uint32{"uint8": 1, "fp16": 2, "bf16": 2, "fp32": 4} {
		for layout, nchw := range map[string]uint32{"nchw": 1, "nhwc": 0} {
			for _, flip := range []uint32{0, 1} {
				norm := ""
				if dtype != "uint8" {
					norm = "|Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))"
				}
				mirror := []string{"", "|RandomHorizontalFlip(1.0)"}[flip]
				wants = append(wants, apply("CenterCrop((8, 10))"+mirror+"|"+dtype+"|"+layout+norm, picture.Bytes()))
				// The kernel cuts the same window from the whole picture: torchvision rounds half to even.
				j := &finishJob{elem: elem, nchw: nchw, n: 1, h: 8, w: 10, srcH: h, srcW: w, grid: 2, block: 64,
					rows: []row{{2, 1, flip | 2}},
					src:  apply(fmt.Sprintf("CenterCrop((%d, %d))|uint8|nhwc", h, w), picture.Bytes())}
				if dtype != "uint8" {
					j.table = apply("CenterCrop((1, 256))|"+dtype+"|nchw"+norm, values.Bytes())
				}
				jobs = append(jobs, j)
			}
		}
	}
	for i, got := range finish(t, jobs) {
		if !bytes.Equal(got, wants[i]) {
			t.Errorf("%v: not the host's pixels", jobs[i])
		}
	}
}
