//go:build !cgo

package jpeg

import "image"

// Available tells that this build decodes JPEG.
const Available = false

// DecodeSized fails.
func DecodeSized(_, _ []byte, _ image.Point, _ *Job) error { return ErrUnavailable }

// Resample fails.
func Resample(_, _ []byte, _ image.Point, _ *Job) error { return ErrUnavailable }

// EncodeWith fails.
func EncodeWith(dst, _ []byte, _, _ int, _ Encoding) ([]byte, error) { return dst, ErrUnavailable }
