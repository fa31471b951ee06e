package gpuingest

import (
	"archive/zip"
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strings"
)

const npyMagic = "\x93NUMPY"

const (
	maxNpyHeader   = 64 << 10
	maxTensors     = 100_000_000 // bytes of a safetensors header: the format's own limit
	maxInflated    = 1 << 30     // bytes of an npz's member
	inflateAtFirst = 1 << 20
)

// parseNpy parses a file (numpy.lib.format, versions 1 to 3).
func parseNpy(b []byte) (a array, err error) {
	if len(b) < 10 || !bytes.HasPrefix(b, []byte(npyMagic)) {
		return a, badArray("not an npy file: %s", format(b))
	}
	size, at := int(binary.LittleEndian.Uint16(b[8:])), 10
	switch major := b[6]; {
	case major == 2 || major == 3:
		if len(b) < 12 {
			return a, badArray("npy: the header is cut short")
		}
		if u := binary.LittleEndian.Uint32(b[8:]); u <= maxNpyHeader {
			size, at = int(u), 12
		} else {
			return a, badArray("npy: a header of %d bytes", u)
		}
	case major != 1:
		return a, badArray("npy: format version %d", major)
	}
	if b = b[at:]; len(b) < size {
		return a, badArray("npy: the header is cut short")
	}
	if err := a.describe(string(b[:size])); err != nil {
		return a, badArray("npy header: %w", err)
	}
	b = b[size:]
	n, ok := byteSize(a.shape, a.dtype)
	if !ok || n > int64(len(b)) {
		return a, badArray("npy: %v %s do not fit into the %d bytes after the header: the file is cut short", a.shape,
			a.dtype, len(b))
	}
	a.data = b[:n]
	return a, nil
}

// describe parses the header's Python dictionary.
func (a *array) describe(s string) error {
	p := &parser{s: s}
	if !p.accept('{') {
		return errors.New("no dictionary")
	}
	seen := map[string]bool{}
	for !p.accept('}') {
		key, err := p.value(0)
		if err != nil || key.kind != 's' || !p.accept(':') {
			return errors.New("no dictionary")
		}
		if key.str == "descr" && p.peek() == '[' {
			return errors.New("a structured type: use the transform raw, or save each field as a separate array")
		}
		v, err := p.value(0)
		if err != nil {
			return errors.New("no dictionary")
		}
		seen[key.str] = true
		switch {
		case key.str == "descr" && v.kind == 's':
			if err := a.descr(v.str); err != nil {
				return err
			}
		case key.str == "fortran_order" && v.kind == 'b':
			a.fortran = v.num != 0
		case key.str == "shape" && v.kind == 't' && len(v.list) <= maxDims:
			for _, d := range v.list {
				if d.kind != 'i' || d.num < 0 || d.num > math.MaxInt32*1024 {
					return fmt.Errorf("size %s", d)
				}
				a.shape = append(a.shape, int(d.num))
			}
		default:
			return fmt.Errorf("%s is %s", key, v)
		}
		if !p.accept(',') && p.peek() != '}' {
			return errors.New("no dictionary")
		}
	}
	if p.peek(); len(seen) != 3 || p.i != len(s) {
		return errors.New("it must have descr, fortran_order and shape, once each")
	}
	return nil
}

// descr parses a type such as "<f4".
func (a *array) descr(s string) error {
	names := map[string]string{
		"b1": "bool", "i1": "int8", "u1": "uint8", "i2": "int16", "u2": "uint16", "i4": "int32", "u4": "uint32",
		"i8": "int64", "u8": "uint64", "f2": "float16", "f4": "float32", "f8": "float64",
	}
	if s == "" {
		return errors.New("no type")
	}
	dtype, ok := names[s[1:]]
	if !ok || !strings.Contains("<>|=", s[:1]) {
		return fmt.Errorf(
			"type %q: supported are bool, integers, and floats of 16 to 64 bits; use the transform raw for others", s)
	}
	a.dtype, a.big = dtype, s[0] == '>'
	return nil
}

// parseNpz reads one member. It inflates no more than the member's header accounts for.
func parseNpz(b []byte, key string) (array, error) {
	z, err := zip.NewReader(bytes.NewReader(b), int64(len(b)))
	if err != nil {
		return array{}, badArray("not an npz file: %w", err)
	}
	var have []string
	for _, f := range z.File {
		name := strings.TrimSuffix(f.Name, ".npy")
		if name != key && f.Name != key {
			if len(have) < 8 {
				have = append(have, name)
			}
			continue
		}
		r, err := f.Open()
		if err != nil {
			return array{}, badArray("npz member %q: %w", key, err)
		}
		defer r.Close()
		limit := int64(min(f.UncompressedSize64, maxInflated+1))
		if limit > maxInflated {
			return array{}, badArray("npz member %q has %d bytes, the limit is %d", key, f.UncompressedSize64,
				maxInflated)
		}
		// The file's size field is not trusted: memory grows with the data.
		buf := bytes.NewBuffer(make([]byte, 0, min(limit+bytes.MinRead, inflateAtFirst)))
		if _, err := io.Copy(buf, io.LimitReader(r, limit+1)); err != nil {
			return array{}, badArray("npz member %q: %w", key, err)
		}
		return parseNpy(buf.Bytes())
	}
	return array{}, badArray("the npz has no array %q, but %q", key, have)
}

// safeTypes maps safetensors' type names.
var safeTypes = map[string]string{
	"BOOL": "bool", "I8": "int8", "U8": "uint8", "I16": "int16", "U16": "uint16", "I32": "int32", "U32": "uint32",
	"I64": "int64", "U64": "uint64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
}

// parseSafetensors reads one tensor: u64 length of the header, the header (JSON), the tensors back to back.
func parseSafetensors(b []byte, name string) (array, error) {
	if len(b) < 8 {
		return array{}, badArray("safetensors: %d bytes", len(b))
	}
	n := binary.LittleEndian.Uint64(b)
	if n > maxTensors || n > uint64(len(b)-8) {
		return array{}, badArray("safetensors: a header of %d bytes in a file of %d", n, len(b))
	}
	header, data := b[8:8+n], b[8+n:]
	var all map[string]json.RawMessage
	if err := json.Unmarshal(header, &all); err != nil {
		return array{}, badArray("safetensors header: %w", err)
	}
	tensor, ok := all[name]
	if !ok {
		have := slices.Sorted(maps.Keys(all))
		return array{}, badArray("safetensors: no tensor %q, but %q", name, have[:min(8, len(have))])
	}
	var t struct {
		DType   string   `json:"dtype"`
		Shape   []int    `json:"shape"`
		Offsets []uint64 `json:"data_offsets"`
	}
	if err := json.Unmarshal(tensor, &t); err != nil {
		return array{}, badArray("safetensors, tensor %q: %w", name, err)
	}
	dtype, ok := safeTypes[t.DType]
	if !ok {
		return array{}, badArray("safetensors, tensor %q has type %q, which is not supported: use the transform raw",
			name, t.DType)
	}
	size, ok := byteSize(t.Shape, dtype)
	if !ok || len(t.Shape) > maxDims || len(t.Offsets) != 2 || t.Offsets[0] > t.Offsets[1] ||
		t.Offsets[1] > uint64(len(data)) || t.Offsets[1]-t.Offsets[0] != uint64(size) {
		return array{}, badArray("safetensors, tensor %q: shape %v and offsets %v in %d bytes of data", name,
			t.Shape, t.Offsets, len(data))
	}
	return array{dtype: dtype, shape: t.Shape, data: data[t.Offsets[0]:t.Offsets[1]]}, nil
}
