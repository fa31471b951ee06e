package shard

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"fmt"
	"strings"

	"github.com/shoalfs/shoal/cache/objstore"
)

// Megatron's IndexedDataset is two objects. X.bin has the token ids of all sequences, X.idx says where they are:
//
//	"MMIDIDX\0\0", u64 version (1), u8 code of the type, u64 N sequences, u64 D: documents and 1 more
//	N x i32 tokens of the sequence, N x i64 its offset in X.bin, D x i64 number of the document's first sequence
//
// Each document is a file X.bin/000000000000.uint16 and so on, named after the type. Offsets that are not the sum of
// the lengths before them are refused: no writer makes them.
const (
	idxHeader = 34
	idxMagic  = "MMIDIDX\x00\x00"
)

// idxTypes are the types by their codes.
var idxTypes = [...]string{"", "uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16"}

// lengthOf is the length of a number of a type.
var lengthOf = map[string]int64{"uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8, "int8": 1, "int16": 2, "int32": 4,
	"int64": 8, "float16": 2, "float32": 4, "float64": 8}

// openDocuments adds the .bin of an .idx.
func (s *Rows) openDocuments(idx objstore.Object, there map[string]objstore.Object) (err error) {
	key := idx.Key[:len(idx.Key)-len(".idx")] + ".bin"
	o, ok := there[key]
	if !ok {
		o.Key, err = key, fmt.Errorf("%s is there, but no %s, which it is the index of", idx.Key, key)
	}
	return s.add(o, func(ctx context.Context, o objstore.Object, emit func(Member) bool) (string, error) {
		kind, err := s.documents(ctx, o, idx, emit)
		if err != nil {
			err = fmt.Errorf("its index %s: %w", idx.Key, err)
		}
		return kind, err
	}, err)
}

// documents finds the documents of o. It holds some MiB, however long the index is.
func (s *Rows) documents(ctx context.Context, o, idx objstore.Object, emit func(Member) bool) (kind string, err error) {
	if idx.Size < idxHeader {
		return "", corrupt("%d bytes, the header has %d", idx.Size, idxHeader)
	}
	h := make([]byte, idxHeader)
	if err := s.r.ReadAt(ctx, idx, h, 0); err != nil {
		return "", err
	}
	le := binary.LittleEndian
	version, code, n, d, rest := le.Uint64(h[9:]), h[17], le.Uint64(h[18:]), le.Uint64(h[26:]),
		uint64(idx.Size-idxHeader)
	switch {
	case !bytes.HasPrefix(h, []byte(idxMagic)):
		return "", corrupt("it begins with %q, not %q: it is no index of Megatron's", h[:9], idxMagic)
	case version != 1:
		return "", corrupt("version %d at byte 9, only 1 is known", version)
	case code == 0 || int(code) >= len(idxTypes):
		return "", corrupt("type %d at byte 17, only 1 to %d are known", code, len(idxTypes)-1)
	case n <= rest/13 && d <= rest/8 && 13*n+8*d == rest && n > 0:
		return "", corrupt("its sequences have modes: it is of a multimodal dataset, which is not supported")
	case n > rest/12 || d > rest/8 || d == 0 || 12*n+8*d != rest:
		return "", corrupt("%d sequences and %d documents at bytes 18 and 26 do not make its %d bytes", n, d, idx.Size)
	}
	dtype := idxTypes[code]
	bytesEach := lengthOf[dtype]
	lengths, a := s.from(ctx, idx, idxHeader)
	defer a.close()
	offsets, a := s.from(ctx, idx, idxHeader+int64(4*n))
	defer a.close()
	firsts, a := s.from(ctx, idx, idxHeader+int64(12*n))
	defer a.close()
	base := strings.TrimPrefix(o.Key, s.prefix) + "/"
	seq, at := uint64(0), int64(0)
	for doc := range d {
		next, err := number(firsts, 8)
		if err != nil {
			return "", err
		}
		if next < seq || next > n || doc == 0 && next > 0 || doc == d-1 && next < n {
			return "", corrupt("document %d begins with sequence %d, where the last one began with %d of %d", doc,
				next, seq, n)
		}
		from := at
		for ; seq < next; seq++ {
			length, lengthErr := number(lengths, 4)
			off, offErr := number(offsets, 8)
			if err := cmp.Or(lengthErr, offErr); err != nil {
				return "", err
			}
			if off != uint64(at) || length > 1<<31-1 || int64(length)*bytesEach > o.Size-at {
				return "", corrupt("sequence %d has %d tokens at %d, but those before it end at %d of %d bytes", seq,
					int32(length), off, at, o.Size)
			}
			at += int64(length) * bytesEach
		}
		if doc > 0 && !emit(Member{Path: fmt.Sprintf("%s%012d.%s", base, doc-1, dtype), Off: from, Size: at - from}) {
			return "", ctx.Err()
		}
	}
	if at != o.Size {
		return "", corrupt("its sequences have %d bytes, %s has %d: they do not belong together", at, o.Key, o.Size)
	}
	return "tokens of type " + dtype, nil
}
