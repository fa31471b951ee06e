package gpuingest

import (
	"image"

	"github.com/shoalfs/shoal/gpuingest/internal/pillow"
	"github.com/shoalfs/shoal/gpuingest/jpeg"
)

// stepKind is the kind of a step.
type stepKind uint8

const (
	stepCrop   stepKind = iota // crops to box; border and fill define pixels outside of the picture
	stepResize                 // to size, with filter
	stepMirror                 // left to right
	stepTurn                   // top to bottom
	stepAffine                 // to size, by matrix, with filter; outside of the picture is fill
	stepColour                 // changes values in place, by colour and amount
	stepRefuse                 // the picture is smaller than size: a bad sample
)

// step is one action on a picture with all parameters fixed. Operations draw steps from the picture's size and random
// numbers, never from pixels. So data that belongs to the picture (boxes, masks, keypoints) can go through the same
// steps: by move, or as a picture of its own with another filter and fill.
type step struct {
	kind   stepKind
	border pillow.Border
	colour colour
	filter jpeg.Filter
	fill   [3]uint8
	box    image.Rectangle // in the picture's coordinates; may extend beyond it
	size   image.Point     // after the step
	// matrix maps a point of the result to one of the source, as Pillow's: the pixel at (x, y) of the result is the
	// source's at (m0*x' + m1*y' + m2, m3*x' + m4*y' + m5) with (x', y') = (x+0.5, y+0.5).
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

// move returns the matrix that maps points of a picture of this size to their places after the step, in pixels
// from the upper left corner: x' = m0*x + m1*y + m2, y' = m3*x + m4*y + m5. It maps corners of boxes; the caller
// clips boxes that leave the picture.
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
		*r = at.Rand(t.view*viewPlaces + i)
		steps, size = op.next(steps, size, r)
	}
	return steps
}

// view is a picture after the steps so far, without its pixels until they are needed. Crops and flips fold into one
// jpeg.Job with a single resize. A second resize, or a resize after a flip or padding, first computes the pixels
// (pixels, in transform.go), since only then the bytes are Pillow's.
type view struct {
	job     jpeg.Job // Box, Size, Window and flips, all set
	resized bool
}

func viewOf(size image.Point) view {
	all := image.Rectangle{Max: size}
	return view{job: jpeg.Job{Box: all, Size: size, Window: all}}
}

// size is the current size of the picture.
func (v *view) size() image.Point { return v.job.Window.Size() }

// crop crops the current picture to r; pixels outside of it are zero.
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

// plain reports whether the view is exactly the source's pixels.
func (v *view) plain() bool {
	j := &v.job
	all := image.Rectangle{Max: j.Size}
	return !v.resized && !j.Flip && !j.Turn && j.Box == all && j.Window == all
}

// foldable reports whether a resize can join the job.
func (v *view) foldable() bool {
	return !v.resized && !v.job.Flip && !v.job.Turn && v.job.Window.In(image.Rectangle{Max: v.job.Size})
}

// resize requires a foldable view.
func (v *view) resize(to image.Point, f jpeg.Filter) {
	box := v.job.Window.Add(v.job.Box.Min)
	v.job.Box, v.job.Size, v.job.Window, v.resized = box, to, image.Rectangle{Max: to}, true
	v.job.Filter = f
}
