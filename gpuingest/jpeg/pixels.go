package jpeg

/*
#include "shoaljpeg.h"
*/
import "C"

import (
	"bytes"
	"fmt"
	"image"
	"runtime"
	"sync"
)

// decodeRecoded is DecodeSized for a recoded file.
func decodeRecoded(dst, src []byte, size image.Point, j *Job) error {
	t := registered(RecodedTables(src))
	if t == nil {
		return fmt.Errorf("%w: %x", ErrNoTables, RecodedTables(src))
	}
	if works() {
		if rc, err := t.decode(dst, src, size, j); rc != C.SJ_RESTORE {
			return err
		}
	}
	jpeg, err := t.Restore(nil, src)
	if err != nil {
		return err
	}
	return DecodeSized(dst, jpeg, size, j)
}

func (t *Tables) decode(dst, src []byte, size image.Point, j *Job) (rc C.int, err error) {
	err = j.with("decode", recodedNeeds(src), dst, src, size, func(s *C.sj_scratch) C.int {
		rc = C.sj_decode_recoded(s, t.c, bytePtr(src), C.size_t(len(src)), bytePtr(j.Table), bytePtr(dst))
		return rc
	})
	runtime.KeepAlive(t)
	if rc == C.SJ_CORRUPT { // libjpeg's message, if it has one, is about what has been made of it
		err = fmt.Errorf("%w: recoded file of %d bytes", ErrCorrupt, len(src))
	}
	return rc, err
}

// works tries the ways from coefficients to pixels with small pictures: they repeat libjpeg's arithmetic, and reach
// into it. Where the pixels differ, recoded files are restored first.
func works() bool {
	tried.Do(func() { tried.ok = try() })
	return tried.ok
}

var tried struct {
	sync.Once
	ok bool
}

func try() bool {
	const w, h = 72, 41
	pix := make([]byte, w*h*3)
	for i := range pix {
		pix[i] = byte(i*i>>7 ^ i)
	}
	t, err := flatTables()
	if err != nil {
		return false
	}
	for _, e := range []Encoding{{Quality: 70, Subsampling: Sub420},
		{Quality: 90, Subsampling: Sub440, Progressive: true}} {
		src, err := EncodeWith(nil, pix, w, h, e)
		if err != nil {
			return false
		}
		rec, err := t.recode(nil, src)
		if err != nil {
			return false
		}
		j := Job{Box: image.Rect(3, 5, w-3, h-2)}
		a, b := make([]byte, j.Box.Dx()*j.Box.Dy()*3), make([]byte, j.Box.Dx()*j.Box.Dy()*3)
		err = DecodeSized(a, src, image.Pt(w, h), &j)
		rc, errB := t.decode(b, rec, image.Pt(w, h), &j)
		if err != nil || rc != C.SJ_RESTORE && (errB != nil || !bytes.Equal(a, b)) {
			return false
		}
	}
	return true
}

// flatTables returns tables of codes of 8 bits: any file can be recoded by them, if not to a smaller one.
func flatTables() (*Tables, error) {
	return ParseTables(packTables(bytes.Repeat([]byte{0x88}, tablesSize)))
}
