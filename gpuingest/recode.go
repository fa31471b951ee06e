package gpuingest

import (
	"fmt"
	"image"
	"strconv"
	"strings"

	"github.com/shoalfs/shoal/gpuingest/jpeg"
)

// Recode makes the files of a dataset cheaper to read or decode, once, before they are packed, like FFCV. The zero
// value changes nothing.
type Recode struct {
	// Short is the largest shorter side of a picture in pixels: larger pictures are resized to it with Pillow's
	// bilinear filter, smaller ones are unchanged. 0: no resize.
	Short int
	// Quality is the JPEG quality of resized pictures, 1 to 100, with chroma at half the size (4:2:0) as in
	// Pillow.
	Quality int
	// Decode stores pixels instead of JPEG: npy files, uint8 [height, width, 3], of width x height x 3 bytes.
	Decode bool
}

// ParseResize parses the value of --resize: short=N, or nothing.
func ParseResize(text string) (short int, err error) {
	if text == "" {
		return 0, nil
	}
	n, ok := strings.CutPrefix(text, "short=")
	if short, err = strconv.Atoi(n); !ok || err != nil || short < 1 || short > maxSide {
		return 0, fmt.Errorf("resize %q: write short=N, the pixels of the shorter side, 1 to %d", text, maxSide)
	}
	return short, nil
}

// String describes the changes to pictures, for a set's manifest; empty if there are none.
func (r Recode) String() string {
	var parts []string
	if r.Short > 0 {
		parts = append(parts, fmt.Sprintf("resize short=%d bilinear", r.Short))
	}
	switch {
	case r.Decode:
		parts = append(parts, "decoded to npy uint8 HWC")
	case r.Short > 0:
		parts = append(parts, fmt.Sprintf("JPEG quality=%d 4:2:0", r.Quality))
	}
	return strings.Join(parts, ", ")
}

// NpySuffix is added to the name of a picture that Recode has decoded.
const NpySuffix = ".npy"

// Apply returns the new content of a file, and the suffix to add to its name. Files that need no change are returned
// unchanged. Errors wrap ErrBadSample: the file is not a picture that Compile's transforms can read.
func (r Recode) Apply(src []byte) (dst []byte, suffix string, err error) {
	p := pictures.Get().(*picture)
	defer p.close()
	if err := p.open(src); err != nil {
		return nil, "", ofSample(err)
	}
	size := p.size0
	if short := min(size.X, size.Y); r.Short > 0 && short > r.Short {
		// As in torchvision's Resize(short), the longer side is truncated, not rounded.
		size = image.Pt(max(1, size.X*r.Short/short), max(1, size.Y*r.Short/short))
	} else if !r.Decode {
		return src, "", nil
	}
	head := ""
	if r.Decode {
		head = npyPictureHeader(size)
	}
	out := make([]byte, len(head)+size.X*size.Y*3)
	copy(out, head)
	if err := p.store(out[len(head):], &jpeg.Job{Size: size}); err != nil {
		return nil, "", ofSample(err)
	}
	if r.Decode {
		return out, NpySuffix, nil
	}
	dst, err = jpeg.Encode(nil, out, size.X, size.Y, r.Quality, jpeg.Sub420)
	return dst, "", err
}

// npyPictureHeader is the header of an npy file of version 1.0 that holds a picture: 128 bytes (numpy.lib.format).
func npyPictureHeader(size image.Point) string {
	dict := fmt.Sprintf("{'descr': '|u1', 'fortran_order': False, 'shape': (%d, %d, 3), }", size.Y, size.X)
	return fmt.Sprintf("\x93NUMPY\x01\x00\x76\x00%-117s\n", dict)
}
