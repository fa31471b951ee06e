package gpuingest

import (
	"image"

	"github.com/shoalfs/shoal/gpuingest/internal/pillow"
	"github.com/shoalfs/shoal/gpuingest/jpeg"
)

// stepKind says what a step does.
type stepKind uint8

const (
	stepCrop   stepKind = iota // takes box; what lies outside of the picture follows border and fill
	stepResize                 // to size, with filter
	stepMirror                 // left to right
	stepTurn                   // top to bottom
	stepAffine                 // to size, by matrix, with filter; outside of the picture is fill
	stepColour                 // changes values and moves nothing: colour and amount say how
	stepRefuse                 // the picture is smaller than size: a bad sample
)

// step is one action on a picture with everything about it decided. Operations draw steps from the picture's size and
// from random numbers, never from pixels: what belongs to the picture (boxes, masks, keypoints) can so be put through
// the same steps, by move, or by taking the step on a mask's own picture with another filter and fill.
type step struct {
	kind   stepKind
	border pillow.Border
	colour colour
	filter jpeg.Filter
	fill   [3]uint8
	box    image.Rectangle // in the picture's coordinates; may reach beyond it
	size   image.Point     // after the step
	// matrix takes a point of the result to one of the picture before, as Pillow's: the pixel at (x, y) of the
	// result is what lies at (m0*x' + m1*y' + m2, m3*x' + m4*y' + m5) with (x', y') = (x+0.5, y+0.5).
	matrix [6]float64
	amount float64
}

// after is the picture's size after the step.
func (s *step) after(size image.Point) image.Point {
	switch s.kind {
	case stepCrop:
		return s.box.Size()
	case stepResize, stepAffine:
		return s.size
	}
	return size
}

// move returns the matrix that takes points of a picture of this size to where they lie after the step, in pixels
// measured from the picture's upper left corner: x' = m0*x + m1*y + m2, y' = m3*x + m4*y + m5. Corners of boxes are
// points; what leaves the picture is the caller's to clip.
func (s *step) move(size image.Point) [6]float64 {
	switch s.kind {
	case stepCrop:
		return [6]float64{1, 0, float64(-s.box.Min.X), 0, 1, float64(-s.box.Min.Y)}
	case stepResize:
		return [6]float64{float64(s.size.X) / float64(size.X), 0, 0, 0, float64(s.size.Y) / float64(size.Y), 0}
	case stepMirror:
		return [6]float64{-1, 0, float64(size.X), 0, 1, 0}
	case stepTurn:
		return [6]float64{1, 0, 0, 0, -1, float64(size.Y)}
	case stepAffine:
		m := s.matrix
		det := m[0]*m[4] - m[1]*m[3]
		if det == 0 {
			return [6]float64{}
		}
		a, b, c, d := m[4]/det, -m[1]/det, -m[3]/det, m[0]/det
		return [6]float64{a, b, -a*m[2] - b*m[5], c, d, -c*m[2] - d*m[5]}
	}
	return [6]float64{1, 0, 0, 0, 1, 0}
}

// plan appends the steps of all operations for a picture of the given size. It is a pure function of size and draw; r
// is scratch.
func (t *Transform) plan(steps []step, size image.Point, at Draw, r *Rand) []step {
	for i, op := range t.ops {
		*r = at.Rand(i)
		n := len(steps)
		steps = op.draw(steps, size, r)
		for j := n; j < len(steps); j++ {
			size = steps[j].after(size)
		}
	}
	return steps
}

// view is a picture as the steps so far have left it: nothing is computed until pixels must exist. Crops and flips
// fold into one jpeg.Job beside a single resize; a second resize, or a resize of something flipped or padded, first
// makes the pixels (pixels, in transform.go), since only then are the bytes those of Pillow.
type view struct {
	job     jpeg.Job // Box, Size, Window and flips, all set
	resized bool
}

func viewOf(size image.Point) view {
	all := image.Rectangle{Max: size}
	return view{job: jpeg.Job{Box: all, Size: size, Window: all}}
}

// size is that of the picture as it stands.
func (v *view) size() image.Point { return v.job.Window.Size() }

// crop takes r of the picture as it stands; what lies outside is zero.
func (v *view) crop(r image.Rectangle) {
	w := v.job.Window
	if v.job.Flip {
		r.Min.X, r.Max.X = w.Dx()-r.Max.X, w.Dx()-r.Min.X
	}
	if v.job.Turn {
		r.Min.Y, r.Max.Y = w.Dy()-r.Max.Y, w.Dy()-r.Min.Y
	}
	v.job.Window = r.Add(w.Min)
}

// plain tells whether the view is nothing but the source's pixels.
func (v *view) plain() bool {
	j := &v.job
	all := image.Rectangle{Max: j.Size}
	return !v.resized && !j.Flip && !j.Turn && j.Box == all && j.Window == all
}

// foldable tells whether a resize can join the job.
func (v *view) foldable() bool {
	return !v.resized && !v.job.Flip && !v.job.Turn && v.job.Window.In(image.Rectangle{Max: v.job.Size})
}

// resize needs a foldable view.
func (v *view) resize(to image.Point, f jpeg.Filter) {
	box := v.job.Window.Add(v.job.Box.Min)
	v.job.Box, v.job.Size, v.job.Window, v.resized = box, to, image.Rectangle{Max: to}, true
	v.job.Filter = f
}
