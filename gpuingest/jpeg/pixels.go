package jpeg

/*
#cgo noescape sj_trial_read
#cgo nocallback sj_trial_read
#cgo noescape sj_trial_decode
#cgo nocallback sj_trial_decode
#cgo noescape sj_decode_recoded
#cgo nocallback sj_decode_recoded
#include "shoaljpeg.h"
*/
import "C"

import (
	"bytes"
	"errors"
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
	need := j.needs(size) + recodedNeeds(src)
	s, err := scratches.get(need, "decode")
	if err != nil {
		return 0, err
	}
	defer scratches.put(s, need)
	if err := j.fill(C.sj_req(s), size, len(dst)); err != nil {
		return 0, err
	}
	rc = C.sj_decode_recoded(s, t.c, bytePtr(src), C.size_t(len(src)), bytePtr(j.Table), bytePtr(dst))
	return rc, result(s, rc, size, len(src))
}

// works tries the ways from coefficients to pixels with small pictures: they repeat libjpeg's arithmetic, and reach into
// it. Where the pixels differ, recoded files are restored first.
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
	for _, e := range []Encoding{{Quality: 70, Subsampling: Sub420}, {Quality: 90, Subsampling: Sub440, Progressive: true}} {
		src, err := EncodeWith(nil, pix, w, h, e)
		if err != nil {
			return false
		}
		k, err := readCoefs(src)
		if err != nil {
			return false
		}
		j := Job{Box: image.Rect(3, 5, w-3, h-2)}
		a, b := make([]byte, j.Box.Dx()*j.Box.Dy()*3), make([]byte, j.Box.Dx()*j.Box.Dy()*3)
		errA, rc := Decode(a, src, &j), k.decode(b, &j)
		k.close()
		if errA != nil || rc != nil && !errors.Is(rc, errRestore) || rc == nil && !bytes.Equal(a, b) {
			return false
		}
	}
	return true
}

// coefs are a JPEG's coefficients as libjpeg reads them: a recoded file without its recoding, for the test of the way
// from coefficients to pixels.
type coefs struct {
	c    *C.sj_trial
	size image.Point
	pin  runtime.Pinner
}

func readCoefs(src []byte) (*coefs, error) {
	w, h, err := Size(src)
	if err != nil {
		return nil, err
	}
	s, err := scratches.get(0, "decode") // small, or a test's
	if err != nil {
		return nil, err
	}
	defer scratches.put(s, 0)
	k := &coefs{size: image.Pt(w, h)}
	k.pin.Pin(bytePtr(src))
	if k.c = C.sj_trial_read(s, bytePtr(src), C.size_t(len(src))); k.c == nil {
		k.pin.Unpin()
		return nil, fmt.Errorf("%w: its coefficients cannot be read: %s", ErrCorrupt, C.GoString(C.sj_message(s)))
	}
	return k, nil
}

func (k *coefs) close() {
	C.sj_trial_free(k.c)
	k.pin.Unpin()
}

var errRestore = errors.New("only the original can be decoded")

func (k *coefs) decode(dst []byte, j *Job) error {
	s, err := scratches.get(0, "decode")
	if err != nil {
		return err
	}
	defer scratches.put(s, 0)
	if err := j.fill(C.sj_req(s), k.size, len(dst)); err != nil {
		return err
	}
	rc := C.sj_trial_decode(s, k.c, bytePtr(j.Table), bytePtr(dst))
	if rc == C.SJ_RESTORE {
		return errRestore
	}
	return result(s, rc, k.size, len(dst))
}
