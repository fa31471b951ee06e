package gpuingest

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// Device is where finished batches are wanted. It does the last part of a transform there (Finish): what is left of a
// picture once the host has decoded, cropped and resized it to uint8 rows. The host device is the reference, package
// gpuingest/cuda has the other one; both give the same bytes.
//
// Its methods are safe for concurrent use.
type Device interface {
	// Name is host, or cuda: and a number.
	Name() string
	// Ring makes buffers of bufferBytes each, which batches go to from slots. Slot i is
	// slots[i*slotBytes:(i+1)*slotBytes]; the memory is prepared once, stays the caller's, and must stay mapped until
	// the ring is closed. Nothing is held when it fails, and the caller can go on without the device.
	Ring(slots []byte, slotBytes, buffers, bufferBytes int) (Ring, error)
	// Close gives back all that the device holds. Its rings are closed before.
	Close() error
}

// Ring is the work of one stream of batches. It is for one goroutine, but for Wait and Read, which may be called from
// another.
type Ring interface {
	// Start begins to make the slot's batch in the buffer and returns once that is queued. From then on until Wait
	// has returned for the buffer, nobody writes to the slot or looks at the buffer.
	Start(slot, buffer int, j *Job) error
	// Wait returns when the buffer's batch is complete, with the error that it ended in. After an error nothing that
	// the ring holds can be relied on; all that is left is to close it.
	Wait(buffer int) error
	// Read copies the beginning of a buffer, whose batch is complete, to host memory.
	Read(buffer int, p []byte) error
	// Close waits for what was started and gives the buffers back. After an error the slots must stay mapped: the device
	// may be reading them.
	Close() error
}

// Errors of devices, by what can be done about them. All of them leave the host path.
var (
	ErrNoDriver     = errors.New("there is no usable driver")
	ErrNoDevice     = errors.New("there is no such device")
	ErrDeviceMemory = errors.New("the device is out of memory")
)

// Job says where a batch lies in a slot, and where it goes in a buffer. Offsets are in bytes.
type Job struct {
	Rows   int
	Finish *Finish // what is done to the rows; nil: nothing, all planes are copied
	Source int     // in the slot: Rows pictures of Finish.SourceBytes
	Params int     // in the slot: Rows RowParams
	Target int     // in the buffer: Rows rows of Finish.RowBytes, a multiple of 16
	Copies []Copy  // the other planes
	Again  bool    // the same *Job will come again: what can be prepared once is kept for it
}

// Copy is a plane that is left as it is.
type Copy struct{ From, To, Bytes int }

// Check tells what of a job lies outside a slot or a buffer, or is no work that a device knows.
func (j *Job) Check(slotBytes, bufferBytes int) error {
	inside := func(what string, at, n, of int) error {
		if at < 0 || n < 0 || at > of || n > of-at {
			return fmt.Errorf("gpuingest: %s, %d bytes at %d, of a batch of %d rows lie outside its %d bytes", what, n, at, j.Rows, of)
		}
		return nil
	}
	var errs []error
	for _, c := range j.Copies {
		errs = append(errs, inside("a plane in the slot", c.From, c.Bytes, slotBytes), inside("a plane in the buffer", c.To, c.Bytes, bufferBytes))
	}
	if f := j.Finish; f != nil {
		if err := f.check(); err != nil {
			return err
		}
		if j.Rows < 0 || j.Target%16 != 0 {
			return fmt.Errorf("gpuingest: %d rows to offset %d: no job of a device", j.Rows, j.Target)
		}
		errs = append(errs, inside("the rows in the slot", j.Source, j.Rows*f.SourceBytes(), slotBytes),
			inside("the rows' parameters", j.Params, j.Rows*ParamBytes, slotBytes), inside("the rows in the buffer", j.Target, j.Rows*f.RowBytes(), bufferBytes))
	}
	return errors.Join(errs...)
}

// Finish is a device's part of a transform: of each row, a picture of uint8 in HWC order, it takes a window, mirrors
// it, looks up each value in a table and writes it in the wanted layout. Values are looked up, never computed, so that
// every device gives the same bytes.
type Finish struct {
	DType                     string // uint8, fp16, bf16 or fp32
	Layout                    string // nchw or nhwc
	Height, Width             int    // of the result
	SourceHeight, SourceWidth int    // of the rows as they come
	Table                     []byte // 3 x 256 elements of DType, by channel and value; nil for uint8 as it is
}

// Elem is the size of an element of the result in bytes.
func (f *Finish) Elem() int { return dtypes[f.DType] }

// SourceBytes is the length of a row as it comes.
func (f *Finish) SourceBytes() int { return f.SourceHeight * f.SourceWidth * 3 }

// RowBytes is the length of a row of the result.
func (f *Finish) RowBytes() int { return f.Height * f.Width * 3 * f.Elem() }

func (f *Finish) check() error {
	n := f.Elem()
	if n == 0 || f.Layout != "nchw" && f.Layout != "nhwc" {
		return fmt.Errorf("gpuingest: no device makes %s in %s", f.DType, f.Layout)
	}
	if f.Height < 1 || f.Width < 1 || f.Height > f.SourceHeight || f.Width > f.SourceWidth || f.SourceHeight > maxSide || f.SourceWidth > maxSide {
		return fmt.Errorf("gpuingest: rows of %dx%d cannot be cut from %dx%d", f.Width, f.Height, f.SourceWidth, f.SourceHeight)
	}
	if len(f.Table) != 3*256*n && (n != 1 || f.Table != nil) {
		return fmt.Errorf("gpuingest: a table of %d bytes for %s", len(f.Table), f.DType)
	}
	return nil
}

// ParamBytes is the length of a row's parameters in a slot, little-endian as the kernel reads them.
const ParamBytes = 8

// RowParams says how one row is finished. The window lies within the row as it comes.
type RowParams struct {
	X, Y  uint16 // the window's corner in the row as it comes
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

func readParams(p []byte) RowParams {
	return RowParams{binary.LittleEndian.Uint16(p), binary.LittleEndian.Uint16(p[2:]), binary.LittleEndian.Uint32(p[4:])}
}

// Row reads the parameters of a row from its slot.
func (j *Job) Row(slot []byte, i int) RowParams { return readParams(slot[j.Params+i*ParamBytes:]) }

// CheckRows tells which row's window lies outside its picture: kernels do not look.
func (j *Job) CheckRows(slot []byte) error {
	if j.Finish == nil {
		return nil
	}
	f := j.Finish
	for i := range j.Rows {
		r := j.Row(slot, i)
		if int(r.X) > f.SourceWidth-f.Width || int(r.Y) > f.SourceHeight-f.Height {
			return fmt.Errorf("gpuingest: row %d is to be cut at (%d, %d), %dx%d from %dx%d", i, r.X, r.Y, f.Width, f.Height, f.SourceWidth, f.SourceHeight)
		}
	}
	return nil
}
