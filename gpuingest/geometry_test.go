package gpuingest

import (
	"image"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/shoalfs/shoal/gpuingest/jpeg"
)

// TestMoveFollowsPixels puts a bright spot through random chains of every step that moves, and finds it where move
// says.
func TestMoveFollowsPixels(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 21))
	found := 0
	for trial := range 400 {
		size := image.Pt(60+r.IntN(80), 60+r.IntN(80))
		spot := image.Pt(r.IntN(size.X-12), r.IntN(size.Y-12))
		s := subject{size, make([]byte, size.X*size.Y*3)}
		for y := spot.Y; y < spot.Y+12; y++ {
			for x := spot.X; x < spot.X+12; x++ {
				s.pix[(y*size.X+x)*3] = 255
			}
		}
		x, y := float64(spot.X)+6, float64(spot.Y)+6
		var steps []step
		at := size
		for range 1 + r.IntN(4) {
			n := len(steps)
			switch r.IntN(6) {
			case 0:
				steps = append(steps, step{kind: stepCrop,
					box: image.Rect(-r.IntN(9), -r.IntN(9), at.X-r.IntN(9), at.Y+r.IntN(9))})
			case 1:
				steps = append(steps, step{kind: stepResize, size: image.Pt(at.X/2+r.IntN(at.X), at.Y/2+r.IntN(at.Y)),
					filter: jpeg.Filter(r.IntN(3))})
			case 2:
				steps = append(steps, step{kind: stepMirror})
			case 3:
				steps = append(steps, step{kind: stepTurn})
			case 4:
				steps = rotate(steps, at, r.Float64()*360, jpeg.Filter(r.IntN(3)), r.IntN(2) == 0, nil, [3]uint8{})
			case 5:
				c := canvas{filter: jpeg.Filter(r.IntN(3))}
				steps = c.do(steps, deed(r.IntN(int(doRotate)+1)), r.Float64()*0.6-0.3, at)
			}
			for i := n; i < len(steps); i++ {
				m := steps[i].move(at)
				x, y = m[0]*x+m[1]*y+m[2], m[3]*x+m[4]*y+m[5]
				at = steps[i].after(at)
			}
		}
		end, pix := s.take(t, steps)
		if x < 25 || y < 25 || x > float64(end.X)-25 || y > float64(end.Y)-25 {
			continue // partly outside: its middle is elsewhere
		}
		found++
		var sx, sy, sum float64
		for i := range end.X * end.Y {
			v := float64(pix[3*i])
			sx += v * (float64(i%end.X) + 0.5)
			sy += v * (float64(i/end.X) + 0.5)
			sum += v
		}
		if math.Abs(sx/sum-x) > 1 || math.Abs(sy/sum-y) > 1 {
			t.Errorf("trial %d: the spot's middle is at %.2f, %.2f and should be at %.2f, %.2f: %+v",
				trial, sx/sum, sy/sum, x, y, steps)
		}
	}
	if found < 100 {
		t.Errorf("only %d spots stayed inside", found)
	}
}
