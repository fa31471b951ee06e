package gpuingest

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/shoalfs/shoal/gpuingest/internal/oracle"
)

// python runs code on numpy: see the oracle's run.
func python(t testing.TB, code string, q oracle.Q, payload []byte) (oracle.Q, []byte) {
	t.Helper()
	all := oracle.Q{"code": code}
	for k, v := range q {
		all[k] = v
	}
	return ask(t, "run", all, payload)
}

func newIngest(t testing.TB, spec string) Ingest {
	t.Helper()
	in, err := New(spec)
	if err != nil {
		t.Fatalf("%s: %v", spec, err)
	}
	again, err := New(in.String())
	if err != nil || again.String() != in.String() || again.Hash() != in.Hash() {
		t.Fatalf("%s: canonical form %s compiles to %v, %v", spec, in, again, err)
	}
	return in
}

// makeRow makes a row into memory that held something else.
func makeRow(in Ingest, src []byte, at Draw) (Row, error) {
	row := Row{Label: -1}
	for _, f := range in.Fields() {
		row.Fields = append(row.Fields, bytes.Repeat([]byte{0xa5}, f.Bytes))
	}
	return row, in.Make(Sample{Data: src}, at, &row)
}

const makeArray = `
rng = np.random.default_rng(q["seed"])
kind = np.dtype(q["from"]).kind
if kind == "f":
    a = (rng.standard_normal(q["shape"]) * q["scale"]).astype(q["from"])
    if q["abs"]:
        a = np.abs(a)
    if q["special"]:
        a.reshape(-1)[:6] = [np.nan, np.inf, -np.inf, 0.0, -0.0, 6e-8]
else:
    info = np.iinfo("u1" if kind == "b" else q["from"])
    a = rng.integers(info.min, info.max, q["shape"], dtype="u1" if kind == "b" else np.dtype(q["from"]).newbyteorder("="), endpoint=True).astype(q["from"])
if q["fortran"]:
    a = np.asfortranarray(a)
f = io.BytesIO()
{"npy": lambda: np.save(f, a), "npz": lambda: np.savez(f, other=a[:1], the_key=a), "npzc": lambda: np.savez_compressed(f, the_key=a, other=a),
 "raw": lambda: f.write(a.tobytes())}[q["as"]]()
w = a.astype(a.dtype.newbyteorder("="))
if q["to"] == "bfloat16":
    import torch
    if w.dtype.kind == "u" and w.dtype.itemsize > 1:
        w = w.astype("f4")
    w = torch.from_numpy(np.ascontiguousarray(w)).to(torch.bfloat16).view(torch.int16).numpy()
else:
    w = w.astype(q["to"])
out = f.getvalue()
answer["file"] = len(out)
out += np.ascontiguousarray(np.transpose(w, q["axes"])).tobytes()
`

// TestArraysEqualNumpy compares every pair of types with numpy's astype (torch's for bfloat16), in both byte orders,
// both memory orders, transposed, from npy, npz and bare numbers.
func TestArraysEqualNumpy(t *testing.T) {
	types := map[string]string{"bool": "?", "int8": "i1", "uint8": "u1", "int16": "i2", "uint16": "u2", "int32": "i4",
		"uint32": "u4", "int64": "i8", "uint64": "u8",
		"float16": "f2", "float32": "f4", "float64": "f8"}
	seed, formats := 0, []string{"npy", "npz", "npzc", "raw"}
	for from, code := range types {
		for to := range elementSize {
			seed++
			floats := code[0] == 'f'
			_, ints := integers[to]
			as, order := formats[seed%4], "<"
			if seed%3 == 0 && as != "raw" {
				order = ">"
			}
			scale := 1e6
			if floats && ints { // what C defines
				scale = 10
			}
			q := oracle.Q{"seed": seed, "from": order + code, "to": to, "shape": []int{5, 7, 11},
				"axes": []int{2, 0, 1}, "as": as, "fortran": seed%2 == 0 && as != "raw", "scale": scale,
				"special": floats && !ints}
			q["abs"] = floats && strings.HasPrefix(to, "u") // what C leaves undefined
			a, b := python(t, makeArray, q, nil)
			n := int(a["file"].(float64))
			file, want := b[:n], b[n:]
			source := map[string]string{"npy": "npy(shape=(5, 7, 11))", "npz": "npz('the_key', (5, 7, 11))",
				"npzc": "npz('the_key', (5, 7, 11))",
				"raw":  fmt.Sprintf("raw_array((5, 7, 11), %q, stored=(5, -1, 11))", from)}[as]
			in := newIngest(t, source+"|transpose(2, 0, 1)|"+to)
			row, err := makeRow(in, file, Draw{})
			if err != nil {
				t.Errorf("%s from %v: %v", in, q, err)
			} else if got := row.Fields[0]; !sameNumbers(got, want, to) {
				t.Errorf("%s from %v differs from numpy", in, q)
			}
		}
	}
}

// sameNumbers compares bytes, and NaN with any NaN.
func sameNumbers(got, want []byte, dtype string) bool {
	if bytes.Equal(got, want) {
		return true
	}
	if len(got) != len(want) || !strings.Contains(dtype, "float") {
		return false
	}
	g, w := converter{from: dtype}, converter{from: dtype}
	elem := elementSize[dtype]
	for i := 0; i < len(got); i += elem {
		g.load(got[i:], elem, 1)
		w.load(want[i:], elem, 1)
		if !bytes.Equal(got[i:i+elem], want[i:i+elem]) && (g.b.f[0] == g.b.f[0] || w.b.f[0] == w.b.f[0]) {
			return false
		}
	}
	return true
}

// TestHalves compares all halves of float16's range, and each neighbour, with numpy.
func TestHalves(t *testing.T) {
	_, b := python(t, `
h = np.arange(65536, dtype="u2").view("f2").astype("f8")
h = h[np.isfinite(h)]
x = np.concatenate([h, (h[1:] + h[:-1]) / 2])
x = np.concatenate([x, np.nextafter(x, 1e9), np.nextafter(x, -1e9), [65519.99, 65520.0, 1e300, 5e-324]])
out = x.tobytes() + x.astype("f2").tobytes()`, nil, nil)
	n := len(b) / 10
	in := newIngest(t, fmt.Sprintf("raw_array((%d,), 'float64')|fp16", n))
	row, err := makeRow(in, b[:8*n], Draw{})
	if err != nil || !bytes.Equal(row.Fields[0], b[8*n:]) {
		t.Fatalf("float16 differs from numpy (%v)", err)
	}
}

// TestArrayFit compares crops and padding with numpy's slices.
func TestArrayFit(t *testing.T) {
	_, file := python(t, `f = io.BytesIO(); np.save(f, np.arange(6*9, dtype="i4").reshape(6, 9)); out = f.getvalue()`,
		nil, nil)
	_, want := python(t, `a = np.full((4, 12), 7, "i4"); a[:, :9] = np.arange(6*9, dtype="i4").reshape(6, 9)[1:5]; out = a.tobytes()`, nil, nil)
	row, err := makeRow(newIngest(t, "npy((4, 12), crop='center', pad=7)|int32"), file, Draw{})
	if err != nil || !bytes.Equal(row.Fields[0], want) {
		t.Errorf("center crop and padding: %v, differs from numpy", err)
	}
	random := newIngest(t, "npy((3, 4), crop='random')|int32")
	seen := map[int32]bool{}
	for i := range 400 {
		at := Draw{Seed: 5, Epoch: 1, Sample: uint64(i)}
		a, err := makeRow(random, file, at)
		if err != nil {
			t.Fatal(err)
		}
		b, _ := makeRow(random, file, at)
		first := int32(binary.LittleEndian.Uint32(a.Fields[0]))
		seen[first] = true
		for r := range 3 {
			for c := range 4 {
				if v := int32(binary.LittleEndian.Uint32(a.Fields[0][4*(4*r+c):])); v != first+int32(9*r+c) {
					t.Fatalf("draw %d is no crop: %v", i, a.Fields[0])
				}
			}
		}
		if !bytes.Equal(a.Fields[0], b.Fields[0]) {
			t.Fatal("equal draws differ")
		}
	}
	if len(seen) != 4*6 {
		t.Errorf("%d of 24 crops in 400 draws", len(seen))
	}
	for spec, want := range map[string]string{
		"npy((4, 12))|int32":                         "crop= cuts out a part",
		"npy((7, 9))|int32":                          "pad= extends it",
		"npy((54,))|int32":                           "shape [6 9]",
		"npz('a', (6, 9))|int32":                     "not an npz file",
		"safetensors('a', (6, 9))|int32":             "safetensors",
		"raw_array((6, 9), 'int32')":                 "not an array of int32",
		"Resize((8, 8))":                             "a picture is uint8",
		"npy((6, 9))|fp32|uint8":                     "one type is enough",
		"npy((6, 9))":                                "the type of the rows is missing",
		"npy((6, 9))|transpose(0, 0)|fp32":           "each axis",
		"npy((6, 9))|flot32":                         "did you mean",
		"npy((7, 9), pad=300)|uint8":                 "pad=300 does not fit uint8",
		"npy((7, 9), pad=-1.5)|uint8":                "pad=-1.5 does not fit uint8",
		"npy((65536, 65536))|fp32":                   "more than 2147483647 bytes",
		"raw_array((6, 9), 'int32', stored=(-1,-1))": "whole numbers",
		"npyy((6, 9))":                               "did you mean npy",
	} {
		in, err := New(spec)
		if err == nil {
			_, err = makeRow(in, file, Draw{})
			if !errors.Is(err, ErrBadSample) {
				t.Errorf("%s: %v is no bad sample", spec, err)
			}
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", spec, err, want)
		}
	}
}

// safetensor is a file of two tensors, as the format's description has it.
func safetensor(header string, data []byte) []byte {
	return append(append(binary.LittleEndian.AppendUint64(nil, uint64(len(header))), header...), data...)
}

func TestSafetensors(t *testing.T) {
	_, data := python(t, `out = np.arange(5, dtype="f4").tobytes() + np.arange(6, dtype="f4").astype("f4").tobytes()`,
		nil, nil)
	header := `{"__metadata__":{"format":"pt"},"w":{"dtype":"F32","shape":[5],"data_offsets":[0,20]},"x":{"dtype":"F32","shape":[2,3],"data_offsets":[20,44]},"h":{"dtype":"BF16","shape":[2],"data_offsets":[4,8]}}`
	file := safetensor(header, data)
	row, err := makeRow(newIngest(t, "safetensors('x', (2, 3))|float32"), file, Draw{})
	if err != nil || !bytes.Equal(row.Fields[0], data[20:44]) {
		t.Errorf("x: %v %v", row.Fields, err)
	}
	row, err = makeRow(newIngest(t, "safetensors('h', 2)|fp32"), file, Draw{})
	if want := []byte{0, 0, 0, 0, 0, 0, 0x80, 0x3f}; err != nil || !bytes.Equal(row.Fields[0], want) {
		t.Errorf("bfloat16: %v %v", row.Fields, err)
	}
	row, err = makeRow(newIngest(t, "safetensors('h', 2)|bf16"), file, Draw{})
	if err != nil || !bytes.Equal(row.Fields[0], data[4:8]) {
		t.Errorf("bfloat16 as it is: %v %v", row.Fields, err)
	}
	for _, bad := range []string{
		`{"x":{"dtype":"F32","shape":[2,3],"data_offsets":[20,48]}}`,
		`{"x":{"dtype":"F32","shape":[2,3],"data_offsets":[24,20]}}`,
		`{"x":{"dtype":"F32","shape":[-2,-3],"data_offsets":[20,44]}}`,
		`{"x":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}}`,
		`{"x":{"dtype":"F8_E4M3","shape":[24],"data_offsets":[20,44]}}`,
		`{"x":[1]}`, `{"y":{}}`, `[`, `{`, `{"x"`, ``,
	} {
		if _, err := parseSafetensors(safetensor(bad, data), "x"); !errors.Is(err, ErrBadSample) {
			t.Errorf("%s: %v", bad, err)
		}
	}
	if _, err := parseSafetensors(binary.LittleEndian.AppendUint64(nil, 1<<62), "x"); !errors.Is(err, ErrBadSample) {
		t.Errorf("hostile length: %v", err)
	}
}

// TestNpyPictures: a picture that was stored decoded gives the same rows as its PNG, from all that Pillow would
// convert to RGB.
func TestNpyPictures(t *testing.T) {
	const w, h = 301, 215
	rgb := photo(t, 2, w, h)
	for _, mode := range []string{"RGB", "L", "RGBA"} {
		_, asPNG := ask(t, "save", oracle.Q{"w": w, "h": h, "format": "PNG", "mode": mode}, rgb)
		_, npy := python(t, `from PIL import Image
f = io.BytesIO(); np.save(f, np.asarray(Image.open(io.BytesIO(b)))); out = f.getvalue()`, nil, asPNG)
		for _, spec := range []string{"RandomResizedCrop(96)|RandomHorizontalFlip()",
			"Resize(128)|CenterCrop(100)|fp16|nhwc"} {
			tr := compile(t, spec)
			for i := range 20 {
				at := Draw{Seed: 3, Sample: uint64(i)}
				if !bytes.Equal(apply(t, tr, npy, at), apply(t, tr, asPNG, at)) {
					t.Fatalf("%s of %s: npy and PNG differ", spec, mode)
				}
			}
		}
	}
}

func FuzzArrays(f *testing.F) {
	npy := []byte(npyMagic + "\x01\x00\x36\x00{'descr': '<i4', 'fortran_order': False, 'shape': (3,)}\n")
	f.Add(append(npy, make([]byte, 12)...))
	f.Add(safetensor(`{"x":{"dtype":"F32","shape":[3],"data_offsets":[0,12]}}`, make([]byte, 12)))
	f.Add([]byte("PK\x05\x06" + strings.Repeat("\x00", 18)))
	var all []Ingest
	for _, spec := range []string{"npy((3,), crop='random', pad=1)|fp32", "npz('x', (3,), crop='center', pad=0)|int8",
		"safetensors('x', (3,), crop='random', pad=0)|int64",
		"raw_array((3,), 'uint16', stored=(-1,), crop='center', pad=1)|bool", "Resize((4, 4))"} {
		in, err := New(spec)
		if err != nil {
			f.Fatal(err)
		}
		all = append(all, in)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, in := range all {
			if _, err := makeRow(in, b, Draw{}); err != nil && !errors.Is(err, ErrBadSample) {
				t.Fatalf("%s: %v", in, err)
			}
		}
	})
}

// TestConvertBlocks: longer runs than a block, with steps, are converted whole.
func TestConvertBlocks(t *testing.T) {
	seed := rand.Uint64()
	rng := rand.New(rand.NewPCG(seed, 1))
	n := 1 + rng.IntN(1000)
	src := make([]byte, 3*n)
	for i := range src {
		src[i] = byte(rng.Uint32())
	}
	dst := make([]byte, 4*n)
	c := converter{from: "uint8", to: "int32"}
	if err := c.run(dst, src, 3, n); err != nil {
		t.Fatal(err)
	}
	for i := range n {
		if got := binary.NativeEndian.Uint32(dst[4*i:]); got != uint32(src[3*i]) {
			t.Fatalf("seed %d: element %d is %d, want %d", seed, i, got, src[3*i])
		}
	}
}

// TestNpyPictureStays: a picture that is the sample's own bytes is not changed in place.
func TestNpyPictureStays(t *testing.T) {
	head := "{'descr': '|u1', 'fortran_order': False, 'shape': (4, 4, 3), }"
	head += strings.Repeat(" ", 63-(10+len(head))%64) + "\n"
	src := slices.Concat([]byte("\x93NUMPY\x01\x00"), []byte{byte(len(head)), 0}, []byte(head), make([]byte, 4*4*3))
	kept := bytes.Clone(src)
	apply(t, compile(t, "CenterCrop(4)|RandomInvert(1)"), src, Draw{})
	if !bytes.Equal(src, kept) {
		t.Error("the sample's bytes have changed")
	}
}
