//go:build !cgo

package pillow

import (
	"image"

	"github.com/shoalfs/shoal/gpuingest/jpeg"
)

// A build without cgo refuses every transform of pictures, so nothing calls these.

func (t *Table) Apply([]byte)                                   { panic(jpeg.ErrUnavailable) }
func lumaSum([]byte) uint64                                     { panic(jpeg.ErrUnavailable) }
func histogram([]byte) [3][256]uint32                           { panic(jpeg.ErrUnavailable) }
func Saturation([]byte, float64)                                { panic(jpeg.ErrUnavailable) }
func Hue([]byte, float64)                                       { panic(jpeg.ErrUnavailable) }
func Grey([]byte)                                               { panic(jpeg.ErrUnavailable) }
func Sharpness(_, _ []byte, _ image.Point, _ float64, _ []byte) { panic(jpeg.ErrUnavailable) }
func Blur(_, _ []byte, _, _ image.Point, _ float64)             { panic(jpeg.ErrUnavailable) }
func Mix(_ string, _, _ []byte, _ int)                          { panic(jpeg.ErrUnavailable) }
func Affine(_ []byte, _ image.Point, _ []byte, _ image.Point, _ *[6]float64, _ jpeg.Filter, _ [3]uint8) {
	panic(jpeg.ErrUnavailable)
}
