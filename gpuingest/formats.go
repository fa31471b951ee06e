package gpuingest

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"image"
	"image/color"
	_ "image/png"

	_ "golang.org/x/image/webp"

	"github.com/shoalfs/shoal/gpuingest/jpeg"
)

// begins are formats and their first bytes.
var begins = []struct {
	begin []byte
	name  string
}{
	{[]byte("\x89PNG\r\n\x1a\n"), "PNG"}, {[]byte(npyMagic), "npy"}, {[]byte("GIF8"), "GIF"}, {[]byte("BM"), "BMP"},
	{[]byte("II*\x00"), "TIFF"}, {[]byte("MM\x00*"), "TIFF"}, {[]byte("\x1f\x8b"), "gzip"},
	{[]byte("<?xml"), "XML or HTML"}, {[]byte("<svg"), "XML or HTML"}, {[]byte("<!DOCTYPE"), "XML or HTML"},
	{[]byte("<html"), "XML or HTML"},
}

// format names a file's format by its first bytes.
func format(b []byte) string {
	switch {
	case len(b) == 0:
		return "an empty file"
	case len(b) >= 12 && string(b[:4]) == "RIFF" && string(b[8:12]) == "WEBP":
		return "WebP"
	case len(b) >= 12 && string(b[4:8]) == "ftyp":
		return "HEIF, AVIF or MP4"
	}
	for _, f := range begins {
		if bytes.HasPrefix(b, f.begin) {
			return f.name
		}
	}
	return fmt.Sprintf("unknown (first bytes % x)", b[:min(8, len(b))])
}

// tooLarge rejects a picture of too many pixels.
func tooLarge(kind string, w, h int) error {
	if err := jpeg.CheckSize(image.Pt(w, h)); err != nil {
		return fmt.Errorf("%w: %s: %w", ErrBadSample, kind, err)
	}
	return nil
}

// decodeOther replaces p.src by packed RGB.
func (p *picture) decodeOther() error {
	kind := format(p.src)
	switch kind {
	case "npy":
		return p.npyPicture()
	case "PNG", "WebP": // which their packages tell image of
	default:
		return fmt.Errorf("%w: neither JPEG, PNG, WebP nor npy but %s: convert it, limit --samples to pictures, or "+
			"use the transform raw", ErrBadSample, kind)
	}
	c, _, err := image.DecodeConfig(bytes.NewReader(p.src))
	if err != nil {
		return fmt.Errorf("%w: %s header: %w", ErrBadSample, kind, err)
	}
	if err := tooLarge(kind, c.Width, c.Height); err != nil {
		return err
	}
	img, _, err := image.Decode(bytes.NewReader(p.src))
	if err != nil {
		return fmt.Errorf("%w: %s: %w", ErrBadSample, kind, err)
	}
	size := img.Bounds().Size()
	if size.X < 1 || size.Y < 1 {
		return fmt.Errorf("%w: %s of %v pixels", ErrBadSample, kind, size)
	}
	if m, ok := img.(*image.Paletted); ok {
		complete(m.Palette, p.src)
	}
	p.buf = getBuffer(size.X * size.Y * 3)
	toRGB(*p.buf, img, p.src[pngColour] == 0)
	p.src, p.size0 = *p.buf, size
	return nil
}

// complete makes grey what a PNG's palette lacks and its pixels have, as Pillow does: Go makes it black.
func complete(palette color.Palette, png []byte) {
	for at := 8; at+8 <= len(png); at += 12 + int(binary.BigEndian.Uint32(png[at:])) {
		if string(png[at+4:at+8]) == "PLTE" {
			for i := int(binary.BigEndian.Uint32(png[at:])) / 3; i < len(palette); i++ {
				palette[i] = color.Gray{uint8(i)}
			}
			return
		}
	}
}

// Where a PNG has the bits of a sample and the type of its colours, which is 0 for grey without a channel of alpha.
const pngDepth, pngColour = 24, 25

// toRGB converts like Pillow's convert("RGB"): alpha is dropped, not blended; 16-bit values keep the upper 8 bits,
// except in grey without a channel of alpha, which Pillow reads as integers and clips at 255.
func toRGB(dst []byte, img image.Image, grey bool) {
	b := img.Bounds()
	w, h := b.Dx(), b.Dy()
	switch m := img.(type) {
	case *image.YCbCr:
		webpRGB(dst, m)
		return
	case *image.NYCbCrA:
		webpRGB(dst, &m.YCbCr)
		return
	}
	for y := range h {
		row := dst[y*w*3 : (y+1)*w*3]
		switch m := img.(type) {
		case *image.RGBA: // opaque, so not premultiplied
			take(row, m.Pix[y*m.Stride:], 4, 1)
		case *image.NRGBA:
			take(row, m.Pix[y*m.Stride:], 4, 1)
		case *image.RGBA64:
			take(row, m.Pix[y*m.Stride:], 8, 2)
		case *image.NRGBA64:
			if grey { // one of its values is transparent
				clip16(row, m.Pix[y*m.Stride:], 8)
			} else {
				take(row, m.Pix[y*m.Stride:], 8, 2)
			}
		case *image.Gray:
			for x, v := range m.Pix[y*m.Stride:][:w] {
				row[3*x], row[3*x+1], row[3*x+2] = v, v, v
			}
		case *image.Gray16:
			clip16(row, m.Pix[y*m.Stride:], 2)
		default: // paletted
			for x := range w {
				c := color.NRGBAModel.Convert(img.At(b.Min.X+x, b.Min.Y+y)).(color.NRGBA)
				row[3*x], row[3*x+1], row[3*x+2] = c.R, c.G, c.B
			}
		}
	}
}

// take copies the first bytes of three channels of `each` bytes, from pixels of `step` bytes.
func take(dst, src []byte, step, each int) {
	for i := 0; i < len(dst); i += 3 {
		dst[i], dst[i+1], dst[i+2] = src[0], src[each], src[2*each]
		src = src[step:]
		if len(src) < step {
			break
		}
	}
}

// clip16 clips the first channel of pixels of `step` bytes.
func clip16(dst, src []byte, step int) {
	for i := 0; i < len(dst); i += 3 {
		v := src[i/3*step+1]
		if src[i/3*step] != 0 {
			v = 255
		}
		dst[i], dst[i+1], dst[i+2] = v, v, v
	}
}

// webpRGB converts lossy WebP's 4:2:0 as libwebp does by default, bit for bit: "fancy" upsampling, which weights the
// nearest four chroma samples 9:3:3:1 in two rounding steps, and 14-bit fixed-point colour conversion.
func webpRGB(dst []byte, m *image.YCbCr) {
	w, h := m.Rect.Dx(), m.Rect.Dy()
	cw := (w + 1) / 2
	chroma := func(plane []byte, y int) []byte {
		y = min(max(y, 0), (h+1)/2-1)
		return plane[y*m.CStride:][:cw]
	}
	u, v := make([]byte, w), make([]byte, w)
	for y := range h {
		// Rows 2k-1 and 2k lie between chroma rows k-1 and k.
		near, far := y/2, y/2-1
		if y%2 == 1 {
			far = y/2 + 1
		}
		webpUpsample(u, chroma(m.Cb, near), chroma(m.Cb, far))
		webpUpsample(v, chroma(m.Cr, near), chroma(m.Cr, far))
		row := dst[y*w*3 : (y+1)*w*3]
		for x, l := range m.Y[y*m.YStride:][:w] {
			yy, cb, cr := int(l)*19077>>8, int(u[x]), int(v[x])
			row[3*x] = webpClip(yy + cr*26149>>8 - 14234)
			row[3*x+1] = webpClip(yy - cb*6419>>8 - cr*13320>>8 + 8708)
			row[3*x+2] = webpClip(yy + cb*33050>>8 - 17685)
		}
	}
}

func webpClip(v int) byte { return byte(min(max(v>>6, 0), 255)) }

// webpUpsample doubles a chroma row; near is the pixels' own row, far the one above or below.
func webpUpsample(dst, near, far []byte) {
	n := len(dst)
	edge := func(i int) byte { return byte((3*int(near[i]) + int(far[i]) + 2) >> 2) }
	dst[0] = edge(0)
	for i := 1; i <= (n-1)/2; i++ {
		nl, nr, fl, fr := int(near[i-1]), int(near[i]), int(far[i-1]), int(far[i])
		sum := nl + nr + fl + fr + 8
		dst[2*i-1] = byte((nl + (sum+2*(nr+fl))>>3) >> 1)
		dst[2*i] = byte((nr + (sum+2*(nl+fr))>>3) >> 1)
	}
	if n%2 == 0 {
		dst[n-1] = edge(n/2 - 1)
	}
}
