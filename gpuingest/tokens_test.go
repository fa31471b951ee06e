package gpuingest

import (
	"bytes"
	"encoding/binary"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/shoalfs/shoal/gpuingest/internal/oracle"
)

const makeDocument = `
a = np.random.default_rng(q["seed"]).integers(0, q["top"], q["count"]).astype(q["dtype"])
f = io.BytesIO(); np.save(f, a)
out = {"npy": f.getvalue(), "json": json.dumps(a.tolist()).encode(), "raw": a.tobytes()}[q["as"]]
answer["file"] = len(out)
row = np.full(q["length"], 9, q["to"]); k = min(len(a), q["length"])
row[:k] = a[len(a)-k:] if q["crop"] == "end" else a[:k]
out += row.tobytes()
`

// TestTokens compares rows with numpy's, from all forms in which documents are stored.
func TestTokens(t *testing.T) {
	seed := 0
	for _, n := range []int{0, 1, 99, 100, 101, 1000} {
		for _, as := range []string{"npy", "json", "raw"} {
			for _, crop := range []string{"start", "end"} {
				for dtype, top := range map[string]int{"<u2": 65536, "<i4": 1 << 30} {
					seed++
					to := []string{"int64", "int32", "uint32"}[seed%3]
					a, b := python(t, makeDocument, oracle.Q{"seed": seed, "count": n, "top": top, "dtype": dtype,
						"as": as, "length": 100, "to": to, "crop": crop}, nil)
					file := int(a["file"].(float64))
					stored := as
					if as == "raw" {
						stored = map[string]string{"<u2": "uint16", "<i4": "int32"}[dtype]
					}
					in := newIngest(t, "tokens(100, "+quote(stored)+", "+quote(to)+", pad=9, crop="+quote(crop)+")")
					row, err := makeRow(in, b[:file], Draw{})
					if err != nil {
						t.Fatalf("%s: %v", in, err)
					}
					if !bytes.Equal(row.Fields[0], b[file:]) {
						t.Errorf("%s of %d %s as %s differs from numpy", in, n, dtype, as)
					}
					if got := native.Uint32(row.Fields[1]); int(got) != min(n, 100) {
						t.Errorf("%s of %d: length %d", in, n, got)
					}
				}
			}
		}
	}
}

func TestTokensRandomCrop(t *testing.T) {
	in := newIngest(t, "tokens(4, 'uint8', 'uint8', crop='random')")
	seen := map[byte]int{}
	for i := range 700 {
		row, err := makeRow(in, []byte{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}, Draw{Seed: 1, Sample: uint64(i)})
		if err != nil {
			t.Fatal(err)
		}
		first := row.Fields[0][0]
		if !bytes.Equal(row.Fields[0], []byte{first, first + 1, first + 2, first + 3}) {
			t.Fatalf("no part of the document: %v", row.Fields[0])
		}
		seen[first]++
	}
	for first := range byte(7) {
		if n := seen[first]; n < 50 || n > 150 { // 100 are expected, the deviation is 9
			t.Errorf("crop at %d came %d times of 700", first, n)
		}
	}
}

func TestTokensRefused(t *testing.T) {
	for spec, want := range map[string]string{
		"tokens()":                            "write tokens(1024)",
		"tokens(0)":                           "number of tokens",
		"tokens(8, 'float32')":                "stored must be",
		"tokens(8, 'npy:float32')":            "stored must be",
		"tokens(8, dtype='fp32')":             "integer type",
		"tokens(8, dtype='uint8', pad=256)":   "pad must be a token",
		"tokens(8, dtype='uint8', pad=-1)":    "pad must be a token",
		"tokens(8, crop='left')":              "crop must be",
		"tokens(8)|fp32":                      "cannot be combined",
		"packed(8)":                           "packed row",
		"packed(8, 'mds')":                    "name a type",
		"tokens(8, 'mds:float32')":            "stored must be",
		"tokens(8, 'mds')":                    "type 255, which is no integer",
		"tokens(8, 'mds:int32')":              "no list in MDS's",
		"packed(8, 'json')":                   "name a type",
		"packed(8, 'npy')":                    "name a type",
		"packed(8, 'uint16', long='drop')":    "long must be",
		"packed(8, 'uint16', crop='start')":   "no argument crop",
		"packt(8, 'uint16')":                  "did you mean packed",
		"tokens(8, 'uint16', 'uint8')":        "token 65535",
		"tokens(8, 'int64', 'uint32')":        "token ",
		"tokens(1, 'uint8', crop=None)":       "crop= cuts out a part",
		"tokens(8, 'json')":                   "not a JSON list",
		"tokens(8, 'npy')":                    "not an npy file",
		"tokens(8, 'npy:uint16')":             "not an npy file",
		"tokens(8, 'uint64', 'int64')":        "token ",
		"packed(8, 'uint16', 'int64', pad=1)": "packed row",
	} {
		in, err := New(spec)
		if err == nil {
			_, err = makeRow(in, bytes.Repeat([]byte{0xff}, 16), Draw{})
			if !errors.Is(err, ErrBadSample) {
				t.Errorf("%s: %v is no bad sample", spec, err)
			}
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", spec, err, want)
		}
	}
}

func TestJSONListWithNull(t *testing.T) {
	if a, err := parseJSONList([]byte("[1, null, 3]")); !errors.Is(err, ErrBadSample) {
		t.Errorf("%v, %v", a, err)
	}
}

// frame is a packed row as package loader reads it.
func frame(docs ...[]byte) []byte {
	b := binary.LittleEndian.AppendUint64(nil, uint64(len(docs)))
	for i, d := range docs {
		b = binary.LittleEndian.AppendUint64(b, uint64(100+i))
		b = binary.LittleEndian.AppendUint64(b, uint64(len(d)))
	}
	return append(b, bytes.Join(docs, nil)...)
}

func TestPackedRows(t *testing.T) {
	in := newIngest(t, "packed(6, 'uint8', dtype='uint8', pad=7)").(*Tokens)
	p, ok := in.Packing()
	if n, err := p.Tokens(5); !ok || p.Length != 6 || p.Cut || n != 5 || err != nil {
		t.Fatalf("packing %+v: %d, %v", p, n, err)
	}
	four := in.Packed(4)
	row, err := makeRow(four, frame([]byte{1, 2}, nil, []byte{3}), Draw{})
	if err != nil {
		t.Fatal(err)
	}
	ints := func(b []byte) (list []int32) {
		for ; len(b) > 0; b = b[4:] {
			list = append(list, int32(native.Uint32(b)))
		}
		return list
	}
	if want := []byte{1, 2, 3, 7, 7, 7}; !bytes.Equal(row.Fields[0], want) {
		t.Errorf("data %v", row.Fields[0])
	}
	if got := ints(row.Fields[1]); !slices.Equal(got, []int32{1, 1, 3, 0, 0, 0}) {
		t.Errorf("segment_ids %v", got)
	}
	if got := ints(row.Fields[2]); !slices.Equal(got, []int32{0, 1, 0, 0, 0, 0}) {
		t.Errorf("position %v", got)
	}
	if got := ints(row.Fields[3]); !slices.Equal(got, []int32{100, 0, 101, 0, 102, 0, -1, -1}) {
		t.Errorf("documents %v", got)
	}
	for _, bad := range [][]byte{nil, frame()[:7], frame([]byte{1}, []byte{2})[:20], frame([]byte{1, 2, 3})[:25],
		frame(nil, nil, nil, nil, nil), frame([]byte{1, 2, 3, 4}, []byte{5, 6, 7})} {
		if _, err := makeRow(four, bad, Draw{}); !errors.Is(err, ErrBadSample) {
			t.Errorf("%v: %v", bad, err)
		}
	}
	cut := newIngest(t, "packed(6, 'uint8', dtype='uint8', long='cut')").(*Tokens)
	if row, err = makeRow(cut, frame([]byte{1, 2, 3, 4, 5, 6, 7, 8}), Draw{}); err != nil ||
		!bytes.Equal(row.Fields[0], []byte{1, 2, 3, 4, 5, 6}) {
		t.Errorf("cut: %v, %v", row.Fields, err)
	}
}

// TestNpyListSize: the number of tokens follows from the size of numpy's files.
func TestNpyListSize(t *testing.T) {
	a, _ := python(t, `
answer["sizes"] = []
for n in [0, 1, 9, 10, 99999, 100000, 3000000]:
    f = io.BytesIO(); np.save(f, np.zeros(n, "<u2")); answer["sizes"].append([n, len(f.getvalue())])`, nil, nil)
	p, _ := newIngest(t, "packed(10, 'npy:uint16')").(*Tokens).Packing()
	for _, s := range a["sizes"].([]any) {
		n, size := s.([]any)[0].(float64), s.([]any)[1].(float64)
		if got, err := p.Tokens(int64(size)); err != nil || got != int64(n) {
			t.Errorf("%v tokens in %v bytes: %d, %v", n, size, got, err)
		}
	}
	for _, size := range []int64{0, 127, 129} {
		if _, err := p.Tokens(size); err == nil {
			t.Errorf("%d bytes are taken for an npy file of uint16", size)
		}
	}
}

// TestMDSArrays reads what MosaicML's encoding ndarray makes of lists of every length's own form, and knows their
// lengths before.
func TestMDSArrays(t *testing.T) {
	for _, n := range []int{1, 7, 255, 256, 65535, 65536} {
		for dtype, code := range map[string]byte{"uint8": 8, "int16": 17, "int32": 33, "uint64": 64} {
			head := []byte{4, byte(n)}
			if n > 255 {
				head = []byte{5, byte(n), byte(n >> 8)}
			}
			if n > 65535 {
				head = []byte{6, byte(n), byte(n >> 8), byte(n >> 16), 0}
			}
			b := append(head, bytes.Repeat([]byte{1}, n*elementSize[dtype])...)
			p, _ := newIngest(t, "packed(10, 'mds:"+dtype+"')").(*Tokens).Packing()
			if got, err := p.Tokens(int64(len(b))); err != nil || got != int64(n) {
				t.Errorf("%d %s in %d bytes: %d, %v", n, dtype, len(b), got, err)
			}
			if got, err := p.Tokens(int64(len(b)) - 1); err == nil && dtype != "uint8" {
				t.Errorf("%d %s in a byte less: %d", n, dtype, got)
			}
			for spec, b := range map[string][]byte{"tokens(70000, 'mds:" + dtype + "', 'uint64')": b,
				"tokens(70000, 'mds', 'uint64')": append([]byte{code}, b...)} {
				row, err := makeRow(newIngest(t, spec), b, Draw{})
				if err != nil || native.Uint32(row.Fields[1]) != uint32(n) || row.Fields[0][8*n-8] != 1 {
					t.Errorf("%s of %d: %d, %v", spec, n, row.Fields[1], err)
				}
				if _, err := makeRow(newIngest(t, spec), b[:len(b)-1], Draw{}); err == nil {
					t.Errorf("%s of %d, cut short: no error", spec, n)
				}
			}
		}
	}
	// two dimensions, none, lengths that lie
	for _, b := range []string{"\x08\x01\x01\x00\x00\x00", "\x00", "", "\x07\xff\xff\xff\xff\xff\xff\xff\xff",
		"\x04\x02\x00\x00\x00\x00"} {
		if _, err := makeRow(newIngest(t, "tokens(8, 'mds:int32')"), []byte(b), Draw{}); !errors.Is(err, ErrBadSample) {
			t.Errorf("%q: %v", b, err)
		}
	}
}

// TestTokensOf: where stored= is left out, the samples' names say what it is.
func TestTokensOf(t *testing.T) {
	for _, c := range []struct{ spec, name, want string }{
		{"tokens(8)", "a.bin/000000000000.uint16", "stored='uint16'"},
		{"tokens(8)", "a/1.npy", "stored='npy'"},
		{"tokens(8)", "a/uint16", "stored='npy'"},
		{"tokens(8)", "s-0.tokens.int32.mds", "stored='mds:int32'"},
		{"tokens(8)", "s-0.tokens.mds", "stored='mds'"},
		{"tokens(8, 'json')", "a.bin/000000000000.uint16", "stored='json'"},
		{"tokens(8, stored='npy')", "a.bin/000000000000.uint16", "stored='npy'"},
		{"packed(8)", "a.bin/000000000000.int32", "stored='int32'"},
		{"packed(8)", "s-0.tokens.int32.mds", "stored='mds:int32'"},
		{"packed(8, 'npy:uint16')", "x.bin/0.int32", "stored='npy:uint16'"},
		{"packed(8)", "a/1.npy", ""},
		{"packed(8)", "s-0.tokens.mds", ""},
		{"packed(8)", "a.bin/0.float32", ""},
	} {
		of, err := newIngest(t, c.spec).(*Tokens).Of(c.name)
		if c.want == "" {
			if err == nil || !strings.Contains(err.Error(), "stored has to name a type") {
				t.Errorf("%s of %s: %v, %v", c.spec, c.name, of, err)
			}
			continue
		}
		if err != nil || !strings.Contains(of.String(), c.want) {
			t.Errorf("%s of %s: %v, %v, want %s", c.spec, c.name, of, err, c.want)
			continue
		}
		if again := newIngest(t, of.String()).(*Tokens); again.Hash() != of.Hash() || again.stored != of.stored ||
			again.inType != of.inType {
			t.Errorf("%s is %+v, its text compiles to %+v", c.spec, of, again)
		}
	}
}

func FuzzTokens(f *testing.F) {
	f.Add([]byte("[1, 2, 3]"))
	f.Add([]byte("\x21\x04\x02\x01\x00\x00\x00\x02\x00\x00\x00"))
	f.Add(frame([]byte("\x04\x01\x01\x00\x00\x00\x00\x00\x00\x00")))
	f.Add(frame([]byte{1, 2}, []byte{3, 4}))
	f.Add(append([]byte(npyMagic+"\x01\x00\x36\x00{'descr': '<i4', 'fortran_order': False, 'shape': (3,)}\n"),
		make([]byte, 12)...))
	var all []Ingest
	for _, spec := range []string{"tokens(4, 'npy', 'int32')", "tokens(4, 'json', 'uint8', crop='random')",
		"tokens(4, 'uint16', 'int8', crop='end')", "packed(4, 'uint16')", "packed(4, 'npy:int32', long='cut')",
		"tokens(4, 'mds')", "packed(4, 'mds:int64', long='cut')"} {
		in, err := New(spec)
		if err != nil {
			f.Fatal(err)
		}
		if p, ok := in.(*Tokens); ok && p.packed {
			in = p.Packed(3)
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
