//go:build !cgo

package jpeg

import (
	"image"
	"iter"
	"time"
)

// Available tells that this build decodes JPEG.
const Available = false

// DecodeSized fails.
func DecodeSized(_, _ []byte, _ image.Point, _ *Job) error { return ErrUnavailable }

// Resample fails.
func Resample(_, _ []byte, _ image.Point, _ *Job) error { return ErrUnavailable }

// EncodeWith fails.
func EncodeWith(dst, _ []byte, _, _ int, _ Encoding) ([]byte, error) { return dst, ErrUnavailable }

// Tables cannot be made without cgo.
type Tables struct{}

// TrainTables fails.
func TrainTables(iter.Seq[[]byte]) (*Tables, error) { return nil, ErrUnavailable }

// ParseTables fails.
func ParseTables([]byte) (*Tables, error) { return nil, ErrUnavailable }

// Bytes returns nothing.
func (t *Tables) Bytes() []byte { return nil }

// ID returns nothing.
func (t *Tables) ID() [8]byte { return [8]byte{} }

// Recode fails.
func (t *Tables) Recode(dst, _ []byte) ([]byte, error) { return dst, ErrUnavailable }

// Restore fails.
func Restore(dst, _ []byte) ([]byte, error) { return dst, ErrUnavailable }

// Restore fails.
func (t *Tables) Restore(dst, _ []byte) ([]byte, error) { return dst, ErrUnavailable }

// Register fails.
func Register(*Tables) error { return ErrUnavailable }

// SetMemory does nothing.
func SetMemory(int64) {}

// TrimMemory does nothing.
func TrimMemory(time.Duration) {}
