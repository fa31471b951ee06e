package jpeg

import "fmt"

// Size reads the width and height in pixels from a JPEG's header (ITU-T T.81, B.1), without libjpeg and without
// reading past the frame header: usually a few hundred bytes, more if EXIF or profiles precede it. src may be recoded.
//
// Errors wrap ErrTruncated, ErrCorrupt or ErrUnsupported.
func Size(src []byte) (w, h int, err error) {
	if IsRecoded(src) {
		src = verbatim(src)
	}
	at, err := frameAt(src)
	if err != nil {
		return 0, 0, err
	}
	return frame(src[at:], src[at-1], int(src[at])<<8|int(src[at+1]))
}

// frameAt returns where the frame header begins, behind its marker.
func frameAt(src []byte) (at int, err error) {
	switch {
	case len(src) == 0:
		return 0, fmt.Errorf("%w: no bytes", ErrTruncated)
	case len(src) < 3 && "\xff\xd8"[:min(2, len(src))] == string(src[:min(2, len(src))]):
		return 0, fmt.Errorf("%w: %d bytes", ErrTruncated, len(src))
	case len(src) < 3 || src[0] != 0xff || src[1] != 0xd8 || src[2] != 0xff:
		return 0, fmt.Errorf("%w: the file starts with % x, a JPEG with ff d8 ff", ErrCorrupt, src[:min(4, len(src))])
	}
	for i := 2; ; {
		// Skip everything up to the next marker, like libjpeg (which warns).
		for i < len(src) && src[i] != 0xff {
			i++
		}
		for i < len(src) && src[i] == 0xff {
			i++
		}
		if i >= len(src) {
			return 0, fmt.Errorf("%w: %d bytes hold no frame header", ErrTruncated, len(src))
		}
		m := src[i]
		i++
		switch {
		case m == 0x00:
			continue // a stuffed byte of junk
		case m == 0x01 || m >= 0xd0 && m <= 0xd7:
			continue // TEM and RSTn stand alone
		case m == 0xd8:
			return 0, fmt.Errorf("%w: a second start marker at byte %d", ErrCorrupt, i-2)
		case m == 0xd9 || m == 0xda:
			return 0, fmt.Errorf("%w: marker ff %02x at byte %d before any frame header", ErrCorrupt, m, i-2)
		}
		if i+2 > len(src) {
			return 0, fmt.Errorf("%w: it ends in the header, at byte %d", ErrTruncated, len(src))
		}
		n := int(src[i])<<8 | int(src[i+1])
		if n < 2 {
			return 0, fmt.Errorf("%w: segment ff %02x at byte %d has length %d", ErrCorrupt, m, i-2, n)
		}
		if m >= 0xc0 && m <= 0xcf && m != 0xc4 && m != 0xc8 && m != 0xcc {
			return i, nil
		}
		i += n
	}
}

// frame reads a frame header: length, precision, height, width, components.
func frame(p []byte, marker byte, n int) (w, h int, err error) {
	if n < 8 {
		return 0, 0, fmt.Errorf("%w: frame header of %d bytes", ErrCorrupt, n)
	}
	if len(p) < 8 {
		return 0, 0, fmt.Errorf("%w: it ends in the frame header", ErrTruncated)
	}
	h, w = int(p[3])<<8|int(p[4]), int(p[5])<<8|int(p[6])
	switch {
	case marker == 0xc3 || marker >= 0xc5 && marker <= 0xc7 || marker == 0xcb || marker >= 0xcd:
		return 0, 0, fmt.Errorf("%w: lossless or hierarchical coding (frame type ff %02x)", ErrUnsupported, marker)
	case p[2] != 8:
		return 0, 0, fmt.Errorf("%w: %d bits a sample, want 8", ErrUnsupported, p[2])
	case w == 0 || h == 0:
		return 0, 0, fmt.Errorf("%w: size %dx%d", ErrCorrupt, w, h)
	case p[7] != 1 && p[7] != 3 && p[7] != 4:
		return 0, 0, fmt.Errorf("%w: %d components, want 1, 3 or 4", ErrUnsupported, p[7])
	}
	return w, h, nil
}
