package gpuingest

import (
	"encoding/binary"
	"image"

	"github.com/shoalfs/shoal/internal/rows"
)

// The types that a feed has too.
type (
	// Field is one array of a batch; a sample becomes one row of it.
	Field = rows.Field
	// Row is the destination of a sample.
	Row = rows.Row
	// Draw determines all random numbers of a row.
	Draw = rows.Draw
	// Rand is those of one operation.
	Rand = rows.Rand
	// Sample is a sample's bytes, and the files that belong to it. Errors of its Part are passed on.
	Sample = rows.Sample
)

// native is the machine's byte order: tables and tensors stay within one machine.
var native = binary.NativeEndian

// Ingest turns samples into rows. It is safe for concurrent use.
type Ingest interface {
	// Make writes the whole row. Errors that the sample's bytes cause wrap ErrBadSample.
	Make(src Sample, at Draw, row *Row) error
	// Fields describes a row. The caller must not change it.
	Fields() []Field
	// Layout is nchw or nhwc, empty if it has no meaning.
	Layout() string
	// String returns the canonical form, which compiles to an equal Ingest.
	String() string
	// Hash identifies the canonical form: equal hashes mean equal rows for equal draws.
	Hash() string
}

// canonical is the canonical form of an Ingest whose rows have no layout of pictures.
type canonical string

func (c canonical) String() string { return string(c) }

func (c canonical) Hash() string { return hashOf(string(c)) }

func (canonical) Layout() string { return "" }

// families are the kinds of samples other than pictures, by the first word of a SPEC.
var families = map[string]func(p *parser, calls []call) (Ingest, error){
	"npy": compileArray, "npz": compileArray, "safetensors": compileArray, "raw_array": compileArray,
	"tokens": compileTokens, "packed": compileTokens, "table": compileTable, "audio": compileAudio,
}

// New compiles a SPEC of any kind. Errors are *SpecError.
func New(spec string) (Ingest, error) {
	if whole, ok := CutDevice(spec); ok {
		if h, err := Split(whole); err != nil {
			return nil, err
		} else if h != nil {
			return h, nil
		}
		return New(whole) // nothing can be left to a device
	}
	calls, err := parseSpec(spec)
	if err != nil {
		return nil, err
	}
	if compile, ok := families[calls[0].name]; ok {
		return compile(&parser{s: spec}, calls)
	}
	if calls[0].name == viewsWord {
		return compileViews(newParser(spec, calls), calls)
	}
	if jointWords[calls[0].name] != nil {
		return compileJoint(&parser{s: spec}, calls)
	}
	t, err := Compile(spec)
	if err != nil {
		return nil, err
	}
	return t.ingest(), nil
}

// Make implements Ingest.
func (t *Transform) Make(src Sample, at Draw, row *Row) error {
	return t.applyWith(src.Data, at, row.Fields[0], func(size image.Point, _ []step) error {
		row.Width, row.Height = uint32(size.X), uint32(size.Y)
		return nil
	})
}

// Decodes reports whether samples are pictures, which may be recoded JPEGs too.
func (t *Transform) Decodes() bool { return !t.raw }

// Fields implements Ingest. The shape of raw is zeros.
func (t *Transform) Fields() []Field {
	shape := []int{3, t.size.Y, t.size.X}
	switch t.layout {
	case "nhwc":
		shape = []int{t.size.Y, t.size.X, 3}
	case rawWord:
		shape[0] = 0
	}
	return []Field{{Name: "data", DType: t.dtype, Shape: shape, Bytes: t.OutBytes()}}
}
