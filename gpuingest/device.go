package gpuingest

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// A device is a destination of finished batches. It performs the last part of a transform (Finish), on pictures that
// the host has decoded, cropped and resized to uint8 rows. Job.Do is the reference for package gpuingest/cuda; both
// produce the same bytes.

// Errors of devices, by remedy. After each of them the host path still works.
var (
	ErrNoDriver     = errors.New("there is no usable driver")
	ErrNoDevice     = errors.New("there is no such device")
	ErrDeviceMemory = errors.New("the device is out of memory")
)

// Job says where a batch is in a slot, and where it goes in a buffer. Offsets are in bytes.
type Job struct {
	Rows   int
	Finish *Finish // applied to the rows; nil: all planes are only copied
	Source int     // in the slot: Rows pictures of Finish.SourceBytes
	Params int     // in the slot: Rows RowParams
	Target int     // in the buffer: Rows rows of Finish.RowBytes, a multiple of 16
	Copies []Copy  // the other planes
	Again  bool    // the same *Job will come again: prepared work is kept for it
}

// Copy is a plane that is copied unchanged.
type Copy struct{ From, To, Bytes int }

// Check reports an error if a job exceeds a slot or a buffer, or no device can do it: kernels do not check.
func (j *Job) Check(slot []byte, bufferBytes int) error {
	inside := func(what string, at, n, of int) error {
		if at < 0 || n < 0 || at > of || n > of-at {
			return fmt.Errorf("gpuingest: %s, %d bytes at %d, of a batch of %d rows lie outside its %d bytes",
				what, n, at, j.Rows, of)
		}
		return nil
	}
	var errs []error
	for _, c := range j.Copies {
		errs = append(errs, inside("a plane in the slot", c.From, c.Bytes, len(slot)),
			inside("a plane in the buffer", c.To, c.Bytes, bufferBytes))
	}
	f := j.Finish
	if f != nil {
		if err := f.check(); err != nil {
			return err
		}
		if j.Rows < 0 || j.Target%16 != 0 {
			return fmt.Errorf("gpuingest: %d rows to offset %d: not a job for a device", j.Rows, j.Target)
		}
		errs = append(errs, inside("the rows in the slot", j.Source, j.Rows*f.SourceBytes(), len(slot)),
			inside("the rows' parameters", j.Params, j.Rows*ParamBytes, len(slot)),
			inside("the rows in the buffer", j.Target, j.Rows*f.RowBytes(), bufferBytes))
	}
	if err := errors.Join(errs...); err != nil || f == nil {
		return err
	}
	for i := range j.Rows {
		r := j.Row(slot, i)
		if int(r.X) > f.SourceWidth-f.Width || int(r.Y) > f.SourceHeight-f.Height {
			return fmt.Errorf("gpuingest: row %d is to be cut at (%d, %d), %dx%d from %dx%d",
				i, r.X, r.Y, f.Width, f.Height, f.SourceWidth, f.SourceHeight)
		}
	}
	return nil
}

// Finish is a device's part of a transform. For each row, a picture of uint8 in HWC order, it cuts out a window,
// mirrors it, looks up each value in a table and writes the result in the wanted layout. Values are looked up, never
// computed, so that every device gives the same bytes.
type Finish struct {
	DType                     string // uint8, fp16, bf16 or fp32
	Layout                    string // nchw or nhwc
	Height, Width             int    // of the result
	SourceHeight, SourceWidth int    // of the source rows
	Table                     []byte // 3 x 256 elements of DType, by channel and value; nil for uint8 as it is
}

// Elem is the size of an element of the result in bytes.
func (f *Finish) Elem() int { return dtypes[f.DType] }

// SourceBytes is the length of a source row.
func (f *Finish) SourceBytes() int { return f.SourceHeight * f.SourceWidth * 3 }

// RowBytes is the length of a result row.
func (f *Finish) RowBytes() int { return f.Height * f.Width * 3 * f.Elem() }

func (f *Finish) check() error {
	n := f.Elem()
	if n == 0 || f.Layout != "nchw" && f.Layout != "nhwc" {
		return fmt.Errorf("gpuingest: no device supports %s in %s", f.DType, f.Layout)
	}
	if f.Height < 1 || f.Width < 1 || f.Height > f.SourceHeight || f.Width > f.SourceWidth ||
		f.SourceHeight > maxSide || f.SourceWidth > maxSide {
		return fmt.Errorf("gpuingest: rows of %dx%d cannot be cut from %dx%d",
			f.Width, f.Height, f.SourceWidth, f.SourceHeight)
	}
	if len(f.Table) != 3*256*n && (n != 1 || f.Table != nil) {
		return fmt.Errorf("gpuingest: a table of %d bytes for %s", len(f.Table), f.DType)
	}
	return nil
}

// ParamBytes is the length of a row's parameters in a slot, little-endian as the kernel reads them.
const ParamBytes = 8

// RowParams says how one row is finished. The window lies within the source row.
type RowParams struct {
	X, Y  uint16 // the window's corner in the source row
	Flags uint32 // Flip, Filled
}

// The flags of a row.
const (
	Flip   uint32 = 1 << iota // mirror the window left to right
	Filled                    // there is a sample; without it, all of the row becomes zeros
)

// Put writes the parameters to p.
func (r RowParams) Put(p []byte) {
	binary.LittleEndian.PutUint16(p, r.X)
	binary.LittleEndian.PutUint16(p[2:], r.Y)
	binary.LittleEndian.PutUint32(p[4:], r.Flags)
}

// Row reads the parameters of a row from its slot.
func (j *Job) Row(slot []byte, i int) RowParams {
	p := slot[j.Params+i*ParamBytes:]
	return RowParams{binary.LittleEndian.Uint16(p), binary.LittleEndian.Uint16(p[2:]),
		binary.LittleEndian.Uint32(p[4:])}
}
