package jpeg

/*
#cgo noescape sj_coefs_read
#cgo nocallback sj_coefs_read
#cgo noescape sj_coefs_decode
#cgo nocallback sj_coefs_decode
#include "shoaljpeg.h"
*/
import "C"

import (
	"fmt"
	"image"
	"runtime"
)

// coefs are a JPEG's coefficients as libjpeg reads them: a recoded file without its recoding, for the test of the way
// from coefficients to pixels.
type coefs struct {
	c    *C.sj_coefs
	size image.Point
	pin  runtime.Pinner
}

func readCoefs(src []byte) (*coefs, error) {
	w, h, err := Size(src)
	if err != nil {
		return nil, err
	}
	s, err := getScratch()
	if err != nil {
		return nil, err
	}
	defer putScratch(s)
	k := &coefs{size: image.Pt(w, h)}
	k.pin.Pin(bytePtr(src))
	if k.c = C.sj_coefs_read(s, bytePtr(src), C.size_t(len(src))); k.c == nil {
		k.pin.Unpin()
		return nil, fmt.Errorf("%w: its coefficients cannot be read: %s", ErrCorrupt, C.GoString(C.sj_message(s)))
	}
	return k, nil
}

func (k *coefs) close() {
	C.sj_coefs_free(k.c)
	k.pin.Unpin()
}

func (k *coefs) decode(dst []byte, j *Job) error {
	s, err := getScratch()
	if err != nil {
		return err
	}
	defer putScratch(s)
	if err := j.fill(C.sj_req(s), k.size, len(dst)); err != nil {
		return err
	}
	return result(s, C.sj_coefs_decode(s, k.c, bytePtr(j.Table), bytePtr(dst)), k.size, len(dst))
}
