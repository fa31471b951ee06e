package gpuingest

import (
	"bytes"
	"encoding/json"
	"errors"
	"math"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/shoalfs/shoal/gpuingest/internal/oracle"
)

func fitRows(t testing.TB, spec, header string, rows []string) (*Table, *Fit) {
	t.Helper()
	table := newIngest(t, spec).(*Table)
	f, err := table.Fitter("v", []byte(header), ',')
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range rows {
		if err := f.Add([]byte(r)); err != nil {
			t.Fatal(err)
		}
	}
	fit, err := f.Fit()
	if err != nil {
		t.Fatal(err)
	}
	parsed, err := ParseFit(fit.JSON())
	if err != nil || !bytes.Equal(parsed.JSON(), fit.JSON()) {
		t.Fatalf("the fit's JSON does not give the fit: %v", err)
	}
	fitted, err := table.With(parsed)
	if err != nil {
		t.Fatal(err)
	}
	return fitted, parsed
}

// A fit is stored as JSON, which has no bytes that are not UTF-8: such categories would be others when they are read
// back.
func TestFitOfLatin1(t *testing.T) {
	table := newIngest(t, "table()|ordinal('city')|number('age')").(*Table)
	if _, err := table.Fitter("v", []byte("city,age,stra\xdfe"), ','); err == nil ||
		!strings.Contains(err.Error(), "not UTF-8") {
		t.Errorf("the first row: %v", err)
	}
	f, err := table.Fitter("v", []byte("city,age"), ',')
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Add([]byte("Z\xfcrich,3")); err == nil || !strings.Contains(err.Error(), `column "city"`) ||
		!strings.Contains(err.Error(), "not UTF-8") {
		t.Errorf("a category: %v", err)
	}
}

const makeTable = `
rng = np.random.default_rng(q["seed"])
n = 997
age = rng.normal(40, 12, n)
pay = rng.lognormal(8, 1.5, n)
same = np.full(n, 3.25)
city = rng.choice(["Kiel", "Ulm, Donau", "He said \"no\"", "two\nlines", ""], n)
kind = rng.integers(0, 300, n).astype(str)
y = rng.integers(0, 7, n)
import csv
f = io.StringIO(); w = csv.writer(f, lineterminator="\x00")
for row in zip(map(repr, age.tolist()), map(repr, pay.tolist()), same, city, kind, y):
    w.writerow(row)
answer["rows"] = f.getvalue().split("\x00")[:-1]
cats = sorted(set(city.tolist()))
onehot = (city[:, None] == np.array(cats)[None, :]).astype(float)
lo, hi = np.quantile(pay, [0.02, 0.97])
data = np.column_stack([age, (age - age.min()) / (age.max() - age.min()), np.clip((pay - pay.mean()) / pay.std(), -2, 2), np.clip(pay, lo, hi), onehot, same - same.mean(), same - same.min()])
kinds = sorted(set(kind.tolist()))
out = data.astype("f8").tobytes() + np.array([kinds.index(k) for k in kind], "i8").tobytes() + y.astype("i8").tobytes()
answer["width"] = data.shape[1]
answer["low"], answer["high"] = lo, hi
`

// TestTableEqualsNumpy compares every operation with numpy's, whose sums are rounded otherwise, and turns the rows
// back into what they were.
func TestTableEqualsNumpy(t *testing.T) {
	const spec = "table()|number('age')|minmax('age')|zscore('pay', clip=2)|outliers('pay', 0.02, " +
		"0.97)|onehot('city', missing='category')|ordinal('kind')|zscore('same')|minmax('same')|label('y')|fp64"
	for seed := range 5 {
		a, want := python(t, makeTable, oracle.Q{"seed": seed}, nil)
		var rows []string
		for _, r := range a["rows"].([]any) {
			rows = append(rows, r.(string))
		}
		table, fit := fitRows(t, spec, "age,pay,same,city,kind,y", rows)
		if f := fit.Features[3]; f.Low != a["low"] || f.High != a["high"] {
			t.Errorf("quantiles %v, %v, numpy %v, %v", f.Low, f.High, a["low"], a["high"])
		}
		width := int(a["width"].(float64))
		if f := table.Fields(); f[0].Shape[0] != width || f[1].Shape[0] != 1 || fit.Rows != 997 || fit.BadRows != 0 {
			t.Fatalf("fields %v, %d rows, %d bad", f, fit.Rows, fit.BadRows)
		}
		at := func(i int) uint64 { return native.Uint64(want[8*i:]) }
		for i, r := range rows {
			row, err := makeRow(table, []byte(r), Draw{})
			if err != nil {
				t.Fatalf("%q: %v", r, err)
			}
			data := make([]float64, width)
			for k := range data {
				data[k] = math.Float64frombits(native.Uint64(row.Fields[0][8*k:]))
				if w := math.Float64frombits(at(i*width + k)); math.Abs(data[k]-w) > 1e-12*max(1, math.Abs(w)) {
					t.Fatalf("seed %d, row %d: number %d is %v, numpy has %v", seed, i, k, data[k], w)
				}
			}
			if got := native.Uint64(row.Fields[1]); got != at(len(rows)*width+i) {
				t.Fatalf("row %d: category %d, want %d", i, got, at(len(rows)*width+i))
			}
			if uint64(row.Label) != at(len(rows)*(width+1)+i) {
				t.Fatalf("row %d: label %d", i, row.Label)
			}
		}
	}
}

func TestTableMissing(t *testing.T) {
	rows := []string{"1,a,x", "3,,y", ",b,x", "NaN,a,", "oops,a,x", "1,a"}
	table, fit := fitRows(t,
		"table()|number('n', missing='mean')|number('n', missing=-1)|onehot('c', missing='category')|label('y')",
		"n,c,y", rows)
	if fit.BadRows != 2 || fit.Features[0].MissingRows != 2 || fit.Features[2].MissingRows != 1 {
		t.Errorf("fit %s", fit.JSON())
	}
	row, err := makeRow(table, []byte(rows[2]), Draw{})
	var got []float32
	for b := row.Fields[0]; len(b) > 0; b = b[4:] {
		got = append(got, math.Float32frombits(native.Uint32(b)))
	}
	if err != nil || !slices.Equal(got, []float32{2, -1, 0, 0, 1}) || row.Label != 0 {
		t.Errorf("%v, label %d, %v", got, row.Label, err)
	}
	for r, want := range map[string]string{"1,a,": "label", "oops,a,x": "not a finite number", "1,a": "2 fields",
		"1,zz,x": "no category", "1,a,z": "no category", "inf,a,x": "not a finite", "0x1,a,x": "not a finite",
		`1,"a,x`: "unterminated quote"} {
		if _, err := makeRow(table, []byte(r), Draw{}); !errors.Is(err, ErrBadSample) ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", r, err, want)
		}
	}
	strict, _ := fitRows(t, "table()|zscore('n')", "n,c,y", rows)
	if _, err := makeRow(strict, []byte(",a,x"), Draw{}); !errors.Is(err, ErrBadSample) ||
		!strings.Contains(err.Error(), "missing= names") {
		t.Errorf("missing: %v", err)
	}
	other, _ := fitRows(t, "table()|zscore('n')", "n,c,y", append(rows, "7,a,x"))
	if strict.Hash() == other.Hash() {
		t.Error("two fits have one hash")
	}
	if err := table.Make(Sample{Data: []byte("1,a,x")}, Draw{}, &Row{Fields: row.Fields}); err != nil {
		t.Error(err)
	}
	if err := newIngest(t, "table()|number('n')").Make(Sample{}, Draw{}, &Row{Fields: [][]byte{{}}}); err == nil ||
		errors.Is(err, ErrBadSample) {
		t.Errorf("a table that was not fitted: %v", err)
	}
}

func TestTableRefused(t *testing.T) {
	for spec, want := range map[string]string{
		"table()":                                   "there is no operation on a column",
		"table()|ordinal('a')":                      "there is no operation on a column",
		"table('a')|number('b')":                    "takes no arguments",
		"table()|zscor('a')":                        "did you mean zscore",
		"table()|zscore('a', clip=0)":               "clip must be",
		"table()|outliers('a', 0.5, 0.1)":           "quantiles",
		"table()|onehot('a', missing='mean')":       "'error' or 'category'",
		"table()|number('a', missing='zero')":       "'error', 'mean' or a number",
		"table()|number('a')|label('b')|label('c')": "second label",
		"table()|number('a')|fp32|fp64":             "one type",
		"table()|number()":                          "write number('age')",
	} {
		if _, err := New(spec); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", spec, err, want)
		}
	}
	table := newIngest(t, "table()|number('agee')").(*Table)
	if _, err := table.Fitter("v", []byte("age,age2"), ','); err == nil ||
		!strings.Contains(err.Error(), `no column "agee": did you mean age?`) {
		t.Errorf("unknown column: %v", err)
	}
	f, err := table.Fitter("v", []byte("agee"), ',')
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.Fit(); err == nil || !strings.Contains(err.Error(), "no valid value") {
		t.Errorf("no rows: %v", err)
	}
	for _, bad := range []string{"", "{}", `{"v":1,"comma":",","features":[{"column":"a"}]}`,
		`{"v":1,"comma":",","columns":["a"],"features":[{"column":"a","op":"number","at":3,"width":1}]}`} {
		if _, err := ParseFit([]byte(bad)); err == nil {
			t.Errorf("fit %s is read", bad)
		}
	}
}

// TestQuantiles compares with numpy's default method, bit for bit.
func TestQuantiles(t *testing.T) {
	a, b := python(t, `
rng = np.random.default_rng(4)
answer["p"], answer["q"] = [], []
for n in [1, 2, 3, 10, 101, 1000]:
    x = np.sort(rng.normal(0, 1e3, n)); p = np.concatenate([[0, 0.01, 0.25, 0.5, 0.99, 1], rng.random(20)])
    answer["p"].append(p.tolist()); answer["q"].append(np.quantile(x, p).tolist()); out += x.tobytes()`, nil, nil)
	var q struct {
		P [][]float64
		Q [][]float64
	}
	j, _ := json.Marshal(a)
	if err := json.Unmarshal(j, &q); err != nil {
		t.Fatal(err)
	}
	for i, n := range []int{1, 2, 3, 10, 101, 1000} {
		x := make([]float64, n)
		for k := range x {
			x[k], b = math.Float64frombits(native.Uint64(b)), b[8:]
		}
		for k, p := range q.P[i] {
			if got := quantile(x, p); got != q.Q[i][k] {
				t.Errorf("quantile %v of %d is %v, numpy has %v", p, n, got, q.Q[i][k])
			}
		}
	}
}

func FuzzTableRow(f *testing.F) {
	f.Add(`1,"a ""b""",c`)
	f.Add("\"")
	table, _ := fitRows(f, "table()|number('n', missing=0)|onehot('c')|label('y')", "n,c,y", []string{"1,a,x", "2,b,y"})
	f.Fuzz(func(t *testing.T, row string) {
		if _, err := makeRow(table, []byte(row), Draw{}); err != nil && !errors.Is(err, ErrBadSample) {
			t.Fatal(err)
		}
		if fields, err := splitRow([]byte(row), ',', nil); err == nil {
			var parts []string
			for _, s := range fields {
				parts = append(parts, `"`+strings.ReplaceAll(s, `"`, `""`)+`"`)
			}
			again, err := splitRow([]byte(strings.Join(parts, ",")), ',', nil)
			if err != nil || !slices.Equal(again, fields) {
				t.Fatalf("%q comes back as %q, %v", fields, again, err)
			}
		}
	})
}

// TestInvertInPython runs the lines of docs/records.md.
func TestInvertInPython(t *testing.T) {
	doc, err := os.ReadFile("../docs/records.md")
	if err != nil {
		t.Fatal(err)
	}
	_, code, ok := strings.Cut(string(doc), "```python\ndef invert")
	code, _, end := strings.Cut(code, "```")
	if !ok || !end {
		t.Fatal("docs/records.md has no invert")
	}
	rows := []string{"31.5,2,-7,Kiel,x,9", "40,4,9.25,Ulm,y,9", "22,8,1,Bonn,x,9"}
	table, fit := fitRows(t, "table()|number('a')|minmax('b')|zscore('c')|onehot('d')|ordinal('e')|zscore('f')|fp64",
		"a,b,c,d,e,f", rows)
	for _, r := range rows {
		row, err := makeRow(table, []byte(r), Draw{})
		if err != nil {
			t.Fatal(err)
		}
		answer, _ := python(t, "def invert"+code+`
got = invert(json.loads(q["fit"]), np.frombuffer(b[:-8], "f8"), np.frombuffer(b[-8:], "i8"))
answer["row"] = [str(got[k]) if k in "de" else float(got[k]) for k in "abcdef"]`, oracle.Q{"fit": string(fit.JSON())}, bytes.Join(row.Fields, nil))
		for i, s := range strings.Split(r, ",") {
			switch got := answer["row"].([]any)[i].(type) {
			case string:
				if got != s {
					t.Errorf("%s: field %d comes back as %q", r, i, got)
				}
			case float64:
				if want, _ := parseNumber(s); math.Abs(got-want) > 1e-12 {
					t.Errorf("%s: field %d comes back as %v", r, i, got)
				}
			}
		}
	}
}
