package gpuingest

import (
	"image"

	"github.com/shoalfs/shoal/gpuingest/jpeg"
)

// Do does the job on the host, which is the reference for devices, byte for byte.
func (j *Job) Do(slot, buffer []byte) error {
	if err := j.Check(slot, len(buffer)); err != nil {
		return err
	}
	for _, c := range j.Copies {
		copy(buffer[c.To:], slot[c.From:][:c.Bytes])
	}
	if f := j.Finish; f != nil {
		for i := range j.Rows {
			if err := f.Row(buffer[j.Target+i*f.RowBytes():][:f.RowBytes()],
				slot[j.Source+i*f.SourceBytes():][:f.SourceBytes()], j.Row(slot, i)); err != nil {
				return err
			}
		}
	}
	return nil
}

// Row finishes one row: dst has RowBytes bytes, src SourceBytes.
func (f *Finish) Row(dst, src []byte, p RowParams) error {
	if p.Flags&Filled == 0 {
		clear(dst)
		return nil
	}
	at := image.Pt(int(p.X), int(p.Y))
	return jpeg.Resample(dst, src, image.Pt(f.SourceWidth, f.SourceHeight), &jpeg.Job{
		Box:  image.Rectangle{Max: image.Pt(f.Width, f.Height)}.Add(at),
		Flip: p.Flags&Flip != 0, Planar: f.Layout == "nchw", Elem: f.Elem(), Table: f.Table})
}
