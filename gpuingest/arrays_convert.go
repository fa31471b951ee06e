package gpuingest

import (
	"encoding/binary"
	"math"
)

// block holds elements between two types: floats as float64, which holds all of them, and integers as 64 bits.
type block struct {
	kind byte // 'f', 'i' or 'u' (uint64, the same bits in i)
	f    [128]float64
	i    [128]int64
}

// converter changes types as numpy's astype does in C: integers wrap, floats round to nearest, half to even, and are
// truncated to integers. A float that the integer type cannot hold, which C leaves undefined, is an error. NaN stays
// NaN; its payload is not kept.
type converter struct {
	from string
	big  bool
	to   string
	b    block
}

// run converts n elements that lie step bytes apart in src.
func (c *converter) run(dst, src []byte, step, n int) error {
	from, to := elementSize[c.from], elementSize[c.to]
	if same := c.from == c.to && c.from != "bool"; same && step == from && (!c.big || from == 1) {
		copy(dst[:n*to], src)
		return nil
	}
	for n > 0 {
		k := min(n, len(c.b.f))
		c.load(src, step, k)
		if err := c.store(dst, &c.b, k); err != nil {
			return err
		}
		if n -= k; n > 0 {
			src, dst = src[k*step:], dst[k*to:]
		}
	}
	return nil
}

func (c *converter) load(src []byte, step, n int) {
	var order binary.ByteOrder = binary.LittleEndian
	if c.big {
		order = binary.BigEndian
	}
	b := &c.b
	b.kind = 'i'
	switch c.from {
	case "bool":
		for k := range n {
			b.i[k] = 0
			if src[k*step] != 0 {
				b.i[k] = 1
			}
		}
	case "int8":
		for k := range n {
			b.i[k] = int64(int8(src[k*step]))
		}
	case "uint8":
		for k := range n {
			b.i[k] = int64(src[k*step])
		}
	case "int16":
		for k := range n {
			b.i[k] = int64(int16(order.Uint16(src[k*step:])))
		}
	case "uint16":
		for k := range n {
			b.i[k] = int64(order.Uint16(src[k*step:]))
		}
	case "int32":
		for k := range n {
			b.i[k] = int64(int32(order.Uint32(src[k*step:])))
		}
	case "uint32":
		for k := range n {
			b.i[k] = int64(order.Uint32(src[k*step:]))
		}
	case "int64", "uint64":
		if c.from == "uint64" {
			b.kind = 'u'
		}
		for k := range n {
			b.i[k] = int64(order.Uint64(src[k*step:]))
		}
	default:
		b.kind = 'f'
		for k := range n {
			at := src[k*step:]
			switch c.from {
			case "float16":
				b.f[k] = fromFloat16(order.Uint16(at))
			case "bfloat16":
				b.f[k] = float64(math.Float32frombits(uint32(order.Uint16(at)) << 16))
			case "float32":
				b.f[k] = float64(math.Float32frombits(order.Uint32(at)))
			case "float64":
				b.f[k] = math.Float64frombits(order.Uint64(at))
			}
		}
	}
}

// integers are each type's lowest value, and the first value above its range, as floats.
var integers = map[string][2]float64{
	"int8": {-0x1p7, 0x1p7}, "uint8": {0, 0x1p8}, "int16": {-0x1p15, 0x1p15}, "uint16": {0, 0x1p16},
	"int32": {-0x1p31, 0x1p31}, "uint32": {0, 0x1p32}, "int64": {-0x1p63, 0x1p63}, "uint64": {0, 0x1p64},
}

func (c *converter) store(dst []byte, b *block, n int) error {
	if limits, ok := integers[c.to]; ok {
		return c.storeInts(dst, b, n, limits)
	}
	if c.to == "bool" {
		for k := range n {
			dst[k] = 0
			if b.kind == 'f' && b.f[k] != 0 || b.kind != 'f' && b.i[k] != 0 {
				dst[k] = 1
			}
		}
		return nil
	}
	for k := range n {
		if c.to == "float64" {
			x := b.f[k]
			switch b.kind {
			case 'i':
				x = float64(b.i[k])
			case 'u':
				x = float64(uint64(b.i[k]))
			}
			native.PutUint64(dst[8*k:], math.Float64bits(x))
			continue
		}
		// Integers round once to float32, and from there to the 16-bit types, as in numpy and torch.
		var x float32
		switch b.kind {
		case 'i':
			x = float32(b.i[k])
		case 'u':
			x = float32(uint64(b.i[k]))
		default:
			if c.to == "float16" {
				native.PutUint16(dst[2*k:], toFloat16(b.f[k]))
				continue
			}
			x = float32(b.f[k])
		}
		switch c.to {
		case "float32":
			native.PutUint32(dst[4*k:], math.Float32bits(x))
		case "float16":
			native.PutUint16(dst[2*k:], toFloat16(float64(x)))
		case "bfloat16":
			if x != x {
				native.PutUint16(dst[2*k:], 0x7fc0)
			} else {
				native.PutUint16(dst[2*k:], bfloat16(x))
			}
		}
	}
	return nil
}

func (c *converter) storeInts(dst []byte, b *block, n int, limits [2]float64) error {
	elem := elementSize[c.to]
	for k := range n {
		v := b.i[k]
		if b.kind == 'f' {
			x := math.Trunc(b.f[k])
			if !(x >= limits[0] && x < limits[1]) {
				return badArray("the value %v does not fit %s", b.f[k], c.to)
			}
			if v = int64(x); x >= 0x1p63 {
				v = int64(uint64(x))
			}
		}
		at := dst[k*elem:]
		switch elem {
		case 1:
			at[0] = byte(v)
		case 2:
			native.PutUint16(at, uint16(v))
		case 4:
			native.PutUint32(at, uint32(v))
		case 8:
			native.PutUint64(at, uint64(v))
		}
	}
	return nil
}

func fromFloat16(h uint16) float64 {
	exp, frac := int(h>>10&0x1f), float64(h&0x3ff)
	var x float64
	switch exp {
	case 0:
		x = frac * 0x1p-24
	case 31:
		if x = math.Inf(1); frac != 0 {
			return math.NaN()
		}
	default:
		x = math.Ldexp(1024+frac, exp-25)
	}
	return math.Copysign(x, 0.5-float64(h>>15))
}

// toFloat16 rounds once, to nearest, half to even.
func toFloat16(x float64) uint16 {
	b := math.Float64bits(x)
	sign := uint16(b >> 48 & 0x8000)
	exp := int(b>>52&0x7ff) - 1023
	frac := b&(1<<52-1) | 1<<52
	switch {
	case x != x:
		return sign | 0x7e00
	case exp > 15:
		return sign | 0x7c00
	case exp < -25:
		return sign
	}
	shift, bias := uint(42), uint64(exp+14)<<10 // frac's leading one adds the last unit of the exponent
	if exp < -14 {
		shift, bias = uint(28-exp), 0
	}
	h := frac >> shift
	if rest, half := frac&(1<<shift-1), uint64(1)<<(shift-1); rest > half || rest == half && h&1 == 1 {
		h++
	}
	return sign | uint16(bias+h)
}
