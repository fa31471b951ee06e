package jpeg

import (
	"errors"
	"image"
	"slices"
	"sync"
	"testing"
)

// TestMemoryIsCounted: no call allocates more than it takes, all together take no more than the limit, and what is
// idle is given back. A call that can never have what it needs says so.
func TestMemoryIsCounted(t *testing.T) {
	t.Cleanup(func() { SetMemory(1 << 62) })
	TrimMemory(0)
	before := memory.over
	var files [][]byte
	for i, e := range []Encoding{
		{Quality: 85, Subsampling: Sub420}, {Quality: 95, Subsampling: Sub444, Progressive: true},
		{Quality: 70, Components: 1}, {Quality: 30, Subsampling: Sub422, RestartRows: 1},
		{Quality: 99, Subsampling: Sub440}, {Quality: 80, Subsampling: Sub411, Progressive: true},
		{Quality: 80, Components: 4, YCCK: true, Subsampling: Sub420, Progressive: true},
		{Quality: 5, Subsampling: Sub420, Optimize: true},
	} {
		for _, size := range []image.Point{{600, 401}, {16, 1000}, {1001, 40}, {9, 9}} {
			rgb := photo(t, i, size.X, size.Y)
			if e.Components > 0 {
				rgb = slices.Concat(rgb, rgb)[:size.X*size.Y*e.Components]
			}
			files = append(files, encode(t, rgb, size.X, size.Y, e))
		}
	}
	tables, err := TrainTables(slices.Values(files))
	if err != nil {
		t.Fatal(err)
	}
	if err := Register(tables); err != nil {
		t.Fatal(err)
	}
	// Many taps, which no vector loop lays out, and a window far wider than the picture.
	defer setSIMD(vnni)
	for simd := range haveSIMD + 1 {
		setSIMD(simd)
		for _, j := range []Job{{Size: image.Pt(18, 4)}, {Size: image.Pt(18, 4), Filter: Bicubic},
			{Size: image.Pt(9, 4), Window: image.Rect(0, 0, 60000, 1), Box: image.Rect(0, 0, 20, 17)}} {
			size := image.Pt(12000, 17)
			if j.FromPlanes = true; !j.Box.Empty() {
				size = j.Box.Max
			}
			_, _, win := j.parts(size)
			TrimMemory(0)
			if err := Resample(make([]byte, win.Dx()*win.Dy()*3), make([]byte, size.X*size.Y*3+PlanesSlack), size,
				&j); err != nil {
				t.Fatal(err)
			}
		}
	}
	setSIMD(vnni)
	const limit = 12 << 20
	for readers, most := range []int64{1 << 40, limit, 0} {
		SetMemory(max(most, 64<<10))
		var all sync.WaitGroup
		for k := range 1 + 4*min(readers, 1) { // the first has all buffers to itself
			all.Go(func() {
				for i := range files {
					src := files[(i+k*7)%len(files)]
					for _, err := range use(tables, src, most > limit) {
						if err != nil && !errors.Is(err, ErrKeep) && (!errors.Is(err, ErrTooLarge) || most != 0) {
							t.Errorf("limit %d: %v", most, err)
						}
					}
					memory.Lock()
					if memory.used > memory.limit {
						t.Errorf("%d used of %d", memory.used, memory.limit)
					}
					memory.Unlock()
				}
			})
		}
		all.Wait()
		if n := memory.over - before; n > 0 {
			t.Fatalf("limit %d: %d calls allocated more than they took", most, n)
		}
		TrimMemory(0)
		if memory.used != 0 || memory.made.Load() != 0 || len(memory.idle)+len(memory.waiting) != 0 {
			t.Fatalf("%d bytes left, %d idle", memory.used, len(memory.idle))
		}
	}
}

// TestMarkerWithoutLength: it does not hide the header of a file with several scans, whose coefficients are all kept.
func TestMarkerWithoutLength(t *testing.T) {
	if s := shapeOf([]byte("\xff\xd8\xff\xc0\x00\x11\x08\x00\x40\x00\x40\x03\x01\x11\x00\x02\x11\x00\x03\x11\x00" +
		"\xff\x01\x00\x0c\xff\xda\x00\x08\x01\x01\x00\x00\x3f\x00" +
		"\xff\xda\x00\x0c\x03\x01\x00\x02\x11\x03\x11\x00\x3f\x00")); !s.scans {
		t.Errorf("one scan: %+v", s)
	}
}

// use does all that can be done with a file, fresh: each with buffers of its own.
func use(tables *Tables, src []byte, fresh bool) (errs []error) {
	w, h, err := Size(src)
	errs = append(errs, err)
	rec, err := tables.recode(nil, src)
	errs = append(errs, err)
	if err == nil {
		_, err = tables.Restore(nil, rec)
		errs = append(errs, err)
	}
	for _, j := range []Job{
		{}, {Size: image.Pt(64, 64), Filter: Bicubic}, {Size: image.Pt(w*2, 7), Filter: Nearest},
		{Box: image.Rect(w/3, h/3, w, h), Size: image.Pt(224, 224), Planar: true},
		{Size: image.Pt(w, max(h/9, 1)), VerticalFirst: true},
		{Size: image.Pt(max(w/5, 1), max(h/5, 1)), DCT: true, VerticalFirst: true, Planar: true},
		{Size: image.Pt(40, 40), Window: image.Rect(-10, 5, 400, 300), Flip: true},
	} {
		_, out, win := j.parts(image.Pt(w, h))
		j.Size = out
		dst := make([]byte, win.Dx()*win.Dy()*3)
		if fresh {
			TrimMemory(0)
		}
		errs = append(errs, Decode(dst, src, &j))
		if rec != nil {
			errs = append(errs, Decode(dst, rec, &j))
		}
	}
	return errs
}
