//go:build !cgo

package jpeg

import (
	"image"
	"iter"
	"time"
)

// Available tells that this build decodes JPEG.
const Available = false

// Tables cannot be made without cgo.
type Tables struct{}

// Whatever needs C fails, and holds no memory.

func DecodeSized(_, _ []byte, _ image.Point, _ *Job) error           { return ErrUnavailable }
func Resample(_, _ []byte, _ image.Point, _ *Job) error              { return ErrUnavailable }
func EncodeWith(dst, _ []byte, _, _ int, _ Encoding) ([]byte, error) { return dst, ErrUnavailable }
func TrainTables(iter.Seq[[]byte]) (*Tables, error)                  { return nil, ErrUnavailable }
func ParseTables([]byte) (*Tables, error)                            { return nil, ErrUnavailable }
func Register(*Tables) error                                         { return ErrUnavailable }
func Restore(dst, _ []byte) ([]byte, error)                          { return dst, ErrUnavailable }
func (t *Tables) Bytes() []byte                                      { return nil }
func (t *Tables) ID() [8]byte                                        { return [8]byte{} }
func (t *Tables) Recode(dst, _ []byte) ([]byte, error)               { return dst, ErrUnavailable }
func (t *Tables) Restore(dst, _ []byte) ([]byte, error)              { return dst, ErrUnavailable }
func SetMemory(int64)                                                {}
func TrimMemory(time.Duration)                                       {}
