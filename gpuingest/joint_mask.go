package gpuingest

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"image"
	"image/png"
	"math"

	"github.com/shoalfs/shoal/gpuingest/jpeg"
)

// segmentation computes the field of a picture's mask.
type segmentation struct {
	annotation
	dtype string
	fill  int // value outside of the picture
}

var segmentationParams = []param{{"mask", "'mask.png'"}, {"dtype", "'uint8'"}, {"fill", "0"}}

func compileSegmentation(p *parser, c call) (beside, error) {
	a, err := bind(p, c, segmentationParams)
	if err != nil {
		return nil, err
	}
	m := &segmentation{annotation: annotation{what: "mask", ext: a.ext("mask")},
		dtype: a.oneOf("dtype", "uint8", "int32", "int64")}
	lo, hi := math.MinInt32, math.MaxInt32
	if m.dtype == "uint8" {
		lo, hi = 0, 255
	}
	m.fill, m.text = a.integer("fill", lo, hi), a.String()
	return m, a.err
}

func (m *segmentation) fields(size image.Point) []Field {
	return []Field{{Name: "mask", DType: m.dtype, Shape: []int{size.Y, size.X},
		Bytes: size.Y * size.X * elementSize[m.dtype]}}
}

// make writes the mask after the picture's steps, where each pixel has the value of the nearest one, by Pillow's
// rule.
//
// The mask goes through the steps as a picture of its own: red is the value's lower byte, green the upper one, and
// blue is 1, except where a step has added pixels: there it is 0.
func (m *segmentation) make(part []byte, size image.Point, steps []step, out [][]byte) error {
	if part == nil {
		return errNoPart
	}
	p := pictures.Get().(*picture)
	defer p.close()
	err := tooLarge("mask", size.X, size.Y)
	if err != nil {
		return err
	}
	if p.buf, err = decodeMask(part, size); err != nil {
		return err
	}
	p.src, p.size0, p.view = *p.buf, size, viewOf(size)
	for _, s := range steps {
		if s.kind == stepColour {
			continue
		}
		s.filter, s.fill = jpeg.Nearest, [3]uint8{}
		if err := p.do(&s); err != nil {
			return err
		}
	}
	if err := p.own(); err != nil {
		return err
	}
	return m.store(out[0], p.src)
}

// store writes the values of packed pixels.
func (m *segmentation) store(dst, rgb []byte) error {
	le, size := binary.LittleEndian, elementSize[m.dtype]
	for ; len(rgb) >= 3; rgb, dst = rgb[3:], dst[size:] {
		v := int64(le.Uint16(rgb))
		if rgb[2] == 0 {
			v = int64(m.fill)
		}
		switch {
		case size == 4:
			le.PutUint32(dst, uint32(v))
		case size == 8:
			le.PutUint64(dst, uint64(v))
		case v > 255:
			return fmt.Errorf("value %d does not fit uint8: write dtype='int32' or 'int64'", v)
		default:
			dst[0] = byte(v)
		}
	}
	return nil
}

// decodeMask decodes a PNG of indices or of grey, 16 bits included, with the values of numpy.array(Image.open(f)). It
// returns packed pixels of lower byte, upper byte, 1, in a buffer of the pool.
func decodeMask(src []byte, size image.Point) (*[]byte, error) {
	if kind := format(src); kind != "PNG" {
		return nil, fmt.Errorf("it is %s: masks are PNG", kind)
	}
	c, err := png.DecodeConfig(bytes.NewReader(src))
	if err != nil {
		return nil, err
	}
	if c.Width != size.X || c.Height != size.Y {
		return nil, fmt.Errorf("it has %dx%d pixels, its picture %dx%d", c.Width, c.Height, size.X, size.Y)
	}
	img, err := png.Decode(bytes.NewReader(src))
	if err != nil {
		return nil, err
	}
	buf := getBuffer(size.X * size.Y * 3)
	dst := *buf
	switch m := img.(type) {
	case *image.Paletted:
		spread(dst, m.Pix, m.Stride, size)
	case *image.Gray:
		if src[pngDepth] == 1 { // Pillow reads False and True, Go 0 and 255
			for i := range m.Pix {
				m.Pix[i] &= 1
			}
		}
		spread(dst, m.Pix, m.Stride, size)
	case *image.Gray16:
		for y := range size.Y {
			to, from := dst[3*y*size.X:], m.Pix[y*m.Stride:]
			for x := range size.X {
				to[3*x], to[3*x+1], to[3*x+2] = from[2*x+1], from[2*x], 1
			}
		}
	default:
		putBuffer(buf)
		return nil, errors.New("it has colours or transparency: masks are PNG of indices or of plain grey")
	}
	return buf, nil
}

// spread writes values of one byte.
func spread(dst, pix []byte, stride int, size image.Point) {
	for y := range size.Y {
		to := dst[3*y*size.X:][:3*size.X]
		for _, v := range pix[y*stride:][:size.X] {
			to[0], to[1], to[2] = v, 0, 1
			to = to[3:]
		}
	}
}
