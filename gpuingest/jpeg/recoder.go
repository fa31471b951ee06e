//go:build cgo

package jpeg

/*
#include "sjrecode.h"
*/
import "C"

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"iter"
	"runtime"
	"sync"
	"unsafe"
)

// Tables are the Huffman tables of a dataset's recoded files. They are immutable and safe for concurrent use.
type Tables struct {
	c     *C.sj_tables
	bytes []byte
	id    [8]byte
}

// trainBytes is how much of files the training looks at, trainLanes how many of their lanes.
const (
	trainBytes = 64 << 20
	trainLanes = 1 << 17
)

// TrainTables makes tables from some files of a dataset: some tens are enough. What cannot be recoded is passed over;
// ErrKeep means that nothing was left.
func TrainTables(files iter.Seq[[]byte]) (*Tables, error) {
	var lanes []lane
	size := 0
	for f := range files {
		if size += len(f); size > trainBytes || len(lanes) > trainLanes {
			break
		}
		var err error
		if lanes, err = appendLanes(lanes, f); err != nil {
			return nil, err
		}
	}
	if len(lanes) == 0 {
		return nil, fmt.Errorf("%w: no file to train tables from", ErrKeep)
	}
	return ParseTables(packTables(trainTables(lanes)))
}

// appendLanes appends the lanes of a file, if it can be recoded.
func appendLanes(lanes []lane, f []byte) ([]lane, error) {
	need := int64(C.sj_recode_needs(bytePtr(f), C.size_t(len(f))))
	c, o, err := coders.get(need, "recode")
	if errors.Is(err, ErrTooLarge) {
		return lanes, nil
	} else if err != nil {
		return nil, err
	}
	defer coders.put(c, o, need)
	switch C.sj_split(c, bytePtr(f), C.size_t(len(f))) {
	case C.SJ_OK:
	case C.SJ_MEMORY:
		return nil, errMemory
	default:
		return lanes, nil
	}
	for i := range int(C.sj_lane_count(c)) {
		var kind C.int
		var n C.size_t
		p := C.sj_lane(c, C.int(i), &kind, &n)
		l := lane{kind: int(kind)}
		for _, s := range unsafe.Slice((*byte)(unsafe.Pointer(p)), int(n)) {
			l.counts[s]++
		}
		if n > 0 {
			lanes = append(lanes, l)
		}
	}
	return lanes, nil
}

// ParseTables reads what Bytes returned. Errors wrap ErrCorrupt.
func ParseTables(b []byte) (*Tables, error) {
	raw := unpackTables(b)
	c := C.sj_tables_parse(bytePtr(raw), C.size_t(len(raw)))
	if c == nil {
		return nil, fmt.Errorf("%w: %d bytes are not tables of recoded files", ErrCorrupt, len(b))
	}
	t := &Tables{c: c, bytes: append([]byte(nil), b...)}
	sum := sha256.Sum256(b)
	copy(t.id[:], sum[:])
	runtime.AddCleanup(t, func(c *C.sj_tables) { C.sj_tables_free(c) }, c)
	return t, nil
}

// Bytes returns the serialised tables, about 4 KB.
func (t *Tables) Bytes() []byte { return t.bytes }

// ID returns a hash of Bytes.
func (t *Tables) ID() [8]byte { return t.id }

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Recode appends the recoded form of the JPEG src to dst. It has been restored and compared when Recode returns. Errors
// wrap ErrKeep where the file is to be kept as it is.
func (t *Tables) Recode(dst, src []byte) ([]byte, error) {
	rec, err := t.recode(dst, src)
	if err == nil && len(rec)-len(dst) >= len(src) {
		return dst, ErrKeep
	}
	return rec, err
}

// recode is Recode whatever the size.
func (t *Tables) recode(dst, src []byte) ([]byte, error) {
	need := int64(C.sj_recode_needs(bytePtr(src), C.size_t(len(src))))
	c, o, err := coders.get(need, "recode")
	if errors.Is(err, ErrTooLarge) {
		return dst, fmt.Errorf("%w: %w", ErrKeep, err)
	} else if err != nil {
		return dst, err
	}
	defer coders.put(c, o, need)
	rc := C.sj_recode(c, t.c, bytePtr(t.id[:]), C.uint32_t(crc32.Checksum(src, castagnoli)), bytePtr(src),
		C.size_t(len(src)))
	runtime.KeepAlive(t)
	switch rc {
	case C.SJ_OK, C.SJ_LARGER:
		return appendOutput(dst, c), nil
	case C.SJ_MEMORY:
		return dst, errMemory
	}
	return dst, ErrKeep
}

// Restore appends the original of a recoded file to dst. Errors wrap ErrCorrupt, or ErrNoTables if its tables have not
// been registered.
func Restore(dst, rec []byte) ([]byte, error) {
	t := registered(RecodedTables(rec))
	if t == nil {
		return dst, ErrNoTables
	}
	return t.Restore(dst, rec)
}

// Restore is the function Restore with these tables, registered or not.
func (t *Tables) Restore(dst, rec []byte) ([]byte, error) {
	if !IsRecoded(rec) {
		return dst, fmt.Errorf("%w: not a recoded file", ErrCorrupt)
	}
	if id := RecodedTables(rec); id != t.id {
		return dst, fmt.Errorf("%w: it needs %x, these are %x", ErrNoTables, id, t.id)
	}
	need := int64(C.sj_restore_needs(bytePtr(rec), C.size_t(len(rec)), t.c))
	c, o, err := coders.get(need, "restore")
	if err != nil {
		return dst, err
	}
	defer coders.put(c, o, need)
	rc := C.sj_restore(c, t.c, bytePtr(rec), C.size_t(len(rec)))
	runtime.KeepAlive(t)
	switch rc {
	case C.SJ_OK:
	case C.SJ_MEMORY:
		return dst, errMemory
	default:
		return dst, fmt.Errorf("%w: recoded file of %d bytes", ErrCorrupt, len(rec))
	}
	n := len(dst)
	dst = appendOutput(dst, c)
	if crc32.Checksum(dst[n:], castagnoli) != binary.LittleEndian.Uint32(rec[20:]) {
		return dst[:n], fmt.Errorf("%w: recoded file of %d bytes: the checksum of the original differs",
			ErrCorrupt, len(rec))
	}
	return dst, nil
}

func appendOutput(dst []byte, c *C.sj_coder) []byte {
	var n C.size_t
	p := C.sj_coder_output(c, &n)
	return append(dst, unsafe.Slice((*byte)(unsafe.Pointer(p)), int(n))...)
}

var coders = &pool[*C.sj_coder]{func() *C.sj_coder {
	return C.sj_coder_new()
}, func(c *C.sj_coder) { C.sj_coder_free(c) }, func(c *C.sj_coder) int { return int(C.sj_coder_bytes(c)) }}

// maxTables bounds the registry: a set takes about 1 MiB.
const maxTables = 256

var registry = struct {
	sync.RWMutex
	sets map[[8]byte]*Tables
}{sets: map[[8]byte]*Tables{}}

// Register makes tables known to DecodeSized and Restore for as long as the process lives. It may be called again with
// the same tables. It fails if there are too many.
func Register(t *Tables) error {
	registry.Lock()
	defer registry.Unlock()
	if registry.sets[t.id] != nil {
		return nil
	}
	if len(registry.sets) >= maxTables {
		return fmt.Errorf("jpeg: %d sets of tables are registered, which is the limit", maxTables)
	}
	registry.sets[t.id] = t
	return nil
}

// registered returns the tables of an ID; nil if they have not been registered.
func registered(id [8]byte) *Tables {
	registry.RLock()
	defer registry.RUnlock()
	return registry.sets[id]
}
