package gpuingest

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
			f.Row(buffer[j.Target+i*f.RowBytes():][:f.RowBytes()], slot[j.Source+i*f.SourceBytes():], j.Row(slot, i))
		}
	}
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
