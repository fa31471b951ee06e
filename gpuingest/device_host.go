package gpuingest

import (
	"errors"
	"fmt"
)

// HostRing makes the ring of the device that every machine has: its buffers are memory of the process, and Start does the
// work before it returns. It is the reference for other devices, byte for byte.
//
// Slot i is slots[i*slotBytes:(i+1)*slotBytes]; the memory stays the caller's, and must stay mapped until the ring is
// closed.
func HostRing(slots []byte, slotBytes, buffers, bufferBytes int) (Ring, error) {
	if err := CheckRing(slots, slotBytes, buffers, bufferBytes); err != nil {
		return nil, err
	}
	r := &hostRing{slots: slots, slotBytes: slotBytes, buffers: make([][]byte, buffers)}
	for i := range r.buffers {
		r.buffers[i] = make([]byte, bufferBytes)
	}
	return r, nil
}

// CheckRing checks the arguments for a ring.
func CheckRing(slots []byte, slotBytes, buffers, bufferBytes int) error {
	if slotBytes < 1 || len(slots) == 0 || len(slots)%slotBytes != 0 || buffers < 1 || bufferBytes < 1 {
		return fmt.Errorf("gpuingest: a ring of %d buffers of %d bytes over slots of %d in %d bytes", buffers, bufferBytes, slotBytes, len(slots))
	}
	return nil
}

type hostRing struct {
	slots     []byte
	slotBytes int
	buffers   [][]byte
}

var errRing = errors.New("gpuingest: the ring has no such slot or buffer")

func (r *hostRing) Start(slot, buffer int, j *Job) error {
	if slot < 0 || slot >= len(r.slots)/r.slotBytes || buffer < 0 || buffer >= len(r.buffers) {
		return errRing
	}
	src, dst := r.slots[slot*r.slotBytes:][:r.slotBytes], r.buffers[buffer]
	if err := j.Check(len(src), len(dst)); err != nil {
		return err
	}
	if err := j.CheckRows(src); err != nil {
		return err
	}
	for _, c := range j.Copies {
		copy(dst[c.To:], src[c.From:][:c.Bytes])
	}
	if f := j.Finish; f != nil {
		for i := range j.Rows {
			f.Row(dst[j.Target+i*f.RowBytes():][:f.RowBytes()], src[j.Source+i*f.SourceBytes():], j.Row(src, i))
		}
	}
	return nil
}

func (r *hostRing) Wait(buffer int) error {
	if buffer < 0 || buffer >= len(r.buffers) {
		return errRing
	}
	return nil
}

func (r *hostRing) Read(buffer int, p []byte) error {
	if buffer < 0 || buffer >= len(r.buffers) || len(p) > len(r.buffers[buffer]) {
		return errRing
	}
	copy(p, r.buffers[buffer])
	return nil
}

func (r *hostRing) Close() error {
	r.buffers = nil
	return nil
}

// Row finishes one row: dst has RowBytes bytes, src at least SourceBytes.
func (f *Finish) Row(dst, src []byte, p RowParams) {
	if p.Flags&Filled == 0 {
		clear(dst)
		return
	}
	n := f.Elem()
	pixel, channel := 3*n, n
	if f.Layout == "nchw" {
		pixel, channel = n, f.Height*f.Width*n
	}
	for y := range f.Height {
		line := src[((int(p.Y)+y)*f.SourceWidth+int(p.X))*3:][:f.Width*3]
		for x := range f.Width {
			from := x
			if p.Flags&Flip != 0 {
				from = f.Width - 1 - x
			}
			to := dst[(y*f.Width+x)*pixel:]
			for c := range 3 {
				v := line[3*from+c]
				if f.Table == nil {
					to[c*channel] = v
					continue
				}
				at := (c*256 + int(v)) * n
				copy(to[c*channel:][:n], f.Table[at:at+n])
			}
		}
	}
}
