package gpuingest

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
)

// Tokens is the Ingest of documents of token ids: one document for each row, cut or padded to a length, with the number
// of its own tokens in the field "length". With a dataset of packed rows (see [Tokens.Packing]) a row holds several
// documents, which the fields distinguish.
type Tokens struct {
	canonical
	length int
	dtype  string // of the row: an integer
	pad    value
	stored string // npy, mds, json, or the type of bare little-endian integers
	inType string // the type in the npy or mds files, "" for any
	given  bool   // stored was: the dataset's names do not count
	crop   string // start, end or random; "" where longer documents are bad
	packed bool
	most   int // documents in a packed row
}

// The npy header that numpy writes for a list of integers, of every length below 10^20.
const npyListHeader = 128

var tokenSources = map[string][]param{
	"tokens": {{"length", ""}, {"stored", "'npy'"}, {"dtype", "'int64'"}, {"pad", "0"}, {"crop", "'start'"}},
	"packed": {{"length", ""}, {"stored", "None"}, {"dtype", "'int64'"}, {"pad", "0"}, {"long", "'error'"}},
}

// compileTokens parses
//
//	tokens(length, stored='npy', dtype='int64', pad=0, crop='start')
//	packed(length, stored=None, dtype='int64', pad=0, long='error')
//
// length is in tokens. stored is npy, npy:TYPE, mds, mds:TYPE, json (a list of numbers) or the TYPE of bare
// little-endian integers.
func compileTokens(p *parser, calls []call) (Ingest, error) {
	c := calls[0]
	a, err := p.single(calls, tokenSources[c.name])
	if err != nil {
		return nil, err
	}
	t := &Tokens{packed: c.name == "packed", most: 1, canonical: canonical(a.String())}
	t.length = a.whole(a.val["length"], "length", "number of tokens", 1, maxOut/32)
	isInteger := func(s string) bool { _, ok := integers[s]; return ok }
	v := a.val["stored"]
	// a default is where the word is
	t.given = v.kind != 'n' && slices.ContainsFunc(c.args, func(g arg) bool { return g.val.pos == v.pos })
	t.stored, t.inType, _ = strings.Cut(v.str, ":")
	headed := t.stored == "npy" || t.stored == "mds"
	switch {
	case t.packed && !t.given:
	case v.kind != 's', t.inType != "" && (!headed || !isInteger(t.inType)),
		!isInteger(t.stored) && !headed && t.stored != "json":
		a.bad(v, "stored must be 'npy', 'npy:uint16' or another type, the same of 'mds', 'json', or the type of bare "+
			"integers such as 'uint16'")
	case t.packed && (t.stored == "json" || headed && t.inType == ""):
		a.bad(v, untyped)
	}
	if v = a.val["dtype"]; v.kind != 's' || !isInteger(v.str) {
		a.bad(v, "dtype must be an integer type such as 'int64'")
	}
	t.dtype = v.str
	if v = a.val["pad"]; v.kind != 'i' || v.num < integers[t.dtype][0] || v.num >= integers[t.dtype][1] {
		a.bad(v, "pad must be a token of type %s", t.dtype)
	}
	t.pad = v
	if !t.packed {
		t.crop = a.crop("start", "end", "random")
	} else if a.oneOf("long", "error", "cut") == "cut" {
		t.crop = "start"
	}
	return t, a.err
}

const untyped = "rows are packed by the sizes of the files, so stored has to name a type: 'npy:uint16', or 'uint16' " +
	"for bare integers"

// Of returns t for a dataset whose samples have names like this one. If stored= is left out, the extension decides: a
// type such as .uint16 is that of bare integers, .mds and .uint16.mds are MDS's arrays. All others are npy, whose type
// rows that are packed have to name.
func (t *Tokens) Of(name string) (*Tokens, error) {
	if t.given {
		return t, nil
	}
	u := *t
	rest, mds := strings.CutSuffix(name, ".mds")
	dtype := rest[strings.LastIndexByte(rest, '.')+1:]
	if _, ok := integers[dtype]; !ok {
		dtype = ""
	}
	stored := dtype
	if mds {
		u.stored, u.inType, stored = "mds", dtype, strings.TrimSuffix("mds:"+dtype, ":")
	} else if dtype != "" {
		u.stored = dtype
	}
	if t.packed && dtype == "" {
		return nil, fmt.Errorf("%s of samples such as %s: %s", t, name, untyped)
	}
	if stored != "" {
		old := map[bool]string{true: "stored=None", false: "stored='npy'"}[t.packed]
		u.canonical = canonical(strings.Replace(t.String(), old, "stored='"+stored+"'", 1))
	}
	return &u, nil
}

// Packing says how to pack a dataset for a transform.
type Packing struct {
	Length int  // tokens in a row
	Cut    bool // longer documents are cut; otherwise they are an error
	// Tokens computes the number of a document's tokens from its size in bytes.
	Tokens func(size int64) (int64, error)
}

// Packing returns how to pack the dataset; ok is false if each row is one document.
func (t *Tokens) Packing() (p Packing, ok bool) {
	dtype, header, what := t.stored, int64(0), "a list"
	switch t.stored {
	case "npy":
		dtype, header, what = t.inType, npyListHeader, "an npy file"
	case "mds":
		dtype, what = t.inType, "an MDS array"
	}
	elem := int64(elementSize[dtype])
	return Packing{Length: t.length, Cut: t.crop != "", Tokens: func(size int64) (int64, error) {
		header := header
		if t.stored == "mds" { // the length is of the shortest type that holds it
			for header = 2; header < 9 && (size-header)/elem >= 1<<(8*(header-1)); {
				header = 2*header - 1
			}
		}
		if size < header || (size-header)%elem != 0 {
			return 0, fmt.Errorf("%d bytes are not %s of %s", size, what, dtype)
		}
		return (size - header) / elem, nil
	}}, t.packed
}

// Packed returns t for rows of up to most documents.
func (t *Tokens) Packed(most int) *Tokens {
	u := *t
	u.most = max(1, most)
	return &u
}

// Fields implements Ingest. Packed rows have the tokens; each token's document in the row, from 1 on, 0 for padding;
// its position in that document; and the documents' sample numbers, -1 after the last.
func (t *Tokens) Fields() []Field {
	n := []int{t.length}
	f := []Field{{Name: "data", DType: t.dtype, Shape: n, Bytes: t.length * elementSize[t.dtype]}}
	if !t.packed {
		return append(f, Field{Name: "length", DType: "int32", Shape: []int{}, Bytes: 4})
	}
	return append(f,
		Field{Name: "segment_ids", DType: "int32", Shape: n, Bytes: 4 * t.length},
		Field{Name: "position", DType: "int32", Shape: n, Bytes: 4 * t.length},
		Field{Name: "documents", DType: "int64", Shape: []int{t.most}, Bytes: 8 * t.most})
}

// Make implements Ingest.
func (t *Tokens) Make(src Sample, at Draw, row *Row) error {
	if t.packed {
		return t.pack(src.Data, row)
	}
	doc, err := t.parse(src.Data)
	if err != nil {
		return err
	}
	n, from := doc.shape[0], 0
	if n > t.length {
		switch t.crop {
		case "":
			return badArray("a document of %d tokens in a row of %d (crop= cuts out a part)", n, t.length)
		case "end":
			from = n - t.length
		case "random":
			rand := at.Rand(0)
			from = rand.IntN(n - t.length + 1)
		}
		n = t.length
	}
	fill(row.Fields[0][n*elementSize[t.dtype]:], t.dtype, t.pad)
	native.PutUint32(row.Fields[1], uint32(n))
	return t.copy(row.Fields[0], doc, from, n)
}

// pack builds a row from documents framed by package loader (loader.Packed.Begin).
func (t *Tokens) pack(b []byte, row *Row) error {
	le := binary.LittleEndian
	if len(b) < 8 {
		return badArray("a packed row of %d bytes", len(b))
	}
	count := le.Uint64(b)
	if count > uint64(t.most) || uint64(len(b)-8)/16 < count {
		return badArray("a packed row of %d documents, at most %d are expected", count, t.most)
	}
	head, rest := b[8:8+16*count], b[8+16*count:]
	elem, end := elementSize[t.dtype], 0
	for i := range int(count) {
		sample, size := le.Uint64(head[16*i:]), le.Uint64(head[16*i+8:])
		if size > uint64(len(rest)) {
			return badArray("packed document %d is cut short", sample)
		}
		doc, err := t.parse(rest[:size])
		if err != nil {
			return fmt.Errorf("document %d: %w", sample, err)
		}
		rest = rest[size:]
		n := doc.shape[0]
		if t.crop != "" {
			n = min(n, t.length)
		}
		if n > t.length-end {
			return badArray("document %d has %d tokens, more than expected from its size: %d are left in the row of "+
				"%d (npy files need numpy's usual header of %d bytes)",
				sample, n, t.length-end, t.length, npyListHeader)
		}
		if err := t.copy(row.Fields[0][elem*end:], doc, 0, n); err != nil {
			return fmt.Errorf("document %d: %w", sample, err)
		}
		for k := range n {
			native.PutUint32(row.Fields[1][4*(end+k):], uint32(i+1))
			native.PutUint32(row.Fields[2][4*(end+k):], uint32(k))
		}
		native.PutUint64(row.Fields[3][8*i:], sample)
		end += n
	}
	clear(row.Fields[1][4*end:])
	clear(row.Fields[2][4*end:])
	for i := int(count); i < t.most; i++ {
		native.PutUint64(row.Fields[3][8*i:], 1<<64-1)
	}
	fill(row.Fields[0][elem*end:], t.dtype, t.pad)
	return nil
}

// parse parses a document: a list of integers.
func (t *Tokens) parse(b []byte) (array, error) {
	switch t.stored {
	case "npy":
		a, err := parseNpy(b)
		if err != nil {
			return a, err
		}
		if _, ok := integers[a.dtype]; !ok || len(a.shape) != 1 || t.inType != "" && a.dtype != t.inType {
			return a, badArray("an array of %v %s instead of a list of %s integers", a.shape, a.dtype, t.inType)
		}
		return a, nil
	case "json":
		return parseJSONList(b)
	case "mds":
		return parseMDS(b, t.inType)
	}
	return parseRaw(b, []int{-1}, t.stored)
}

// mdsTypes are the types of MDS's arrays by their codes.
var mdsTypes = map[byte]string{
	8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 32: "uint32", 33: "int32", 64: "uint64", 65: "int64"}

// parseMDS parses a list of integers in MDS's encoding ndarray: the code of the type, unless that is known; 4 times the
// number of dimensions, and the logarithm of the length of one; the dimensions; the numbers.
func parseMDS(b []byte, dtype string) (array, error) {
	if dtype == "" && len(b) > 0 {
		if dtype = mdsTypes[b[0]]; dtype == "" {
			return array{}, badArray("an MDS array of type %d, which is no integer", b[0])
		}
		b = b[1:]
	}
	if len(b) == 0 || b[0]>>2 != 1 || len(b) < 1+1<<(b[0]&3) {
		return array{}, badArray("%d bytes that begin with %.10q are no list in MDS's encoding ndarray", len(b), b)
	}
	var n [8]byte
	from := 1 + copy(n[:1<<(b[0]&3)], b[1:])
	if length := binary.LittleEndian.Uint64(n[:]); length != uint64((len(b)-from)/elementSize[dtype]) {
		return array{}, badArray("a list of %d %s in MDS's encoding ndarray, but of %d bytes", length, dtype,
			len(b)-from)
	}
	return parseRaw(b[from:], []int{-1}, dtype)
}

var errNull = errors.New("null is no token")

// parseJSONList parses a list of integers.
func parseJSONList(b []byte) (array, error) {
	d := json.NewDecoder(bytes.NewReader(b))
	if tok, err := d.Token(); err != nil || tok != json.Delim('[') {
		return array{}, badArray("not a JSON list: %.40q", b)
	}
	a := array{dtype: "int64", shape: []int{0}}
	for d.More() {
		v := int64(math.MinInt64) // which null leaves as it is
		if err := d.Decode(&v); err != nil || v == math.MinInt64 {
			return array{}, badArray("element %d of the JSON list: %w", a.shape[0], cmp.Or(err, errNull))
		}
		a.data = binary.LittleEndian.AppendUint64(a.data, uint64(v))
		a.shape[0]++
	}
	if _, err := d.Token(); err != nil {
		return array{}, badArray("unterminated JSON list: %w", err)
	}
	return a, nil
}

// copy writes n tokens from the from-th on. A token that does not fit the type is an error, never truncated.
func (t *Tokens) copy(dst []byte, doc array, from, n int) error {
	if n == 0 {
		return nil
	}
	elem := elementSize[doc.dtype]
	src := doc.data[elem*from : elem*(from+n)]
	if fits := integers[t.dtype]; doc.dtype != t.dtype &&
		(integers[doc.dtype][0] < fits[0] || integers[doc.dtype][1] > fits[1]) {
		c := converter{from: doc.dtype, big: doc.big}
		for k := 0; k < n; k += len(c.b.i) {
			m := min(n-k, len(c.b.i))
			c.load(src[elem*k:], elem, m)
			for _, v := range c.b.i[:m] {
				if f := float64(v); c.b.kind == 'u' && v < 0 && t.dtype != "uint64" || c.b.kind == 'i' && f < fits[0] ||
					f >= fits[1] {
					return badArray("token %d does not fit %s", v, t.dtype)
				}
			}
		}
	}
	c := converter{from: doc.dtype, big: doc.big, to: t.dtype}
	return c.run(dst, src, elem, n)
}
