package gpuingest

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"image"
	"image/color"
	"image/png"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/shoalfs/shoal/gpuingest/internal/oracle"
)

// made is a row of a joint transform.
type made struct {
	data   []byte
	boxes  [][4]float64
	labels []int64
	mask   []byte
}

func build(t testing.TB, spec string) Ingest {
	t.Helper()
	in, err := New(spec)
	if err != nil {
		t.Fatalf("%s: %v", spec, err)
	}
	return in
}

// tryMake makes a row in memory that holds garbage, and checks what pads it.
func tryMake(t testing.TB, in Ingest, src []byte, parts map[string]string, at Draw) (m made, err error) {
	t.Helper()
	row := Row{}
	for _, f := range in.Fields() {
		row.Fields = append(row.Fields, bytes.Repeat([]byte{0xa5}, f.Bytes))
	}
	sample := Sample{Data: src, Part: func(ext string) ([]byte, error) {
		if text, ok := parts[ext]; ok {
			return []byte(text), nil
		}
		return nil, nil
	}}
	if err := in.Make(sample, at, &row); err != nil {
		return m, err
	}
	if row.Width == 0 || row.Height == 0 {
		t.Error("the row has no size of the stored picture, which batch.params needs")
	}
	le := binary.LittleEndian
	m.data = row.Fields[0]
	n := -1
	for i, f := range in.Fields() {
		b := row.Fields[i]
		switch f.Name {
		case "boxes":
			for k := range f.Shape[0] {
				var box [4]float64
				for c := range box {
					box[c] = float64(math.Float32frombits(le.Uint32(b[16*k+4*c:])))
				}
				m.boxes = append(m.boxes, box)
			}
		case "labels":
			for k := range f.Shape[0] {
				m.labels = append(m.labels, int64(le.Uint64(b[8*k:])))
			}
		case "boxes_n":
			n = int(le.Uint64(b))
		case "mask":
			m.mask = b
		}
	}
	if n >= 0 {
		for k := n; k < len(m.boxes); k++ {
			if m.boxes[k] != [4]float64{} || m.labels[k] != -1 {
				t.Errorf("padding %d is %v, label %d", k, m.boxes[k], m.labels[k])
			}
		}
		m.boxes, m.labels = m.boxes[:n], m.labels[:n]
	}
	return m, nil
}

func makeJoint(t testing.TB, in Ingest, src []byte, parts map[string]string, at Draw) made {
	t.Helper()
	m, err := tryMake(t, in, src, parts, at)
	if err != nil {
		t.Fatalf("%s: %v", in, err)
	}
	return m
}

// jointChains are chains of every kind of geometry.
var jointChains = []string{
	"RandomResizedCrop(96)",
	"RandomResizedCrop((64, 120))|RandomHorizontalFlip()|RandomVerticalFlip()",
	"RandomHorizontalFlip()|RandomResizedCrop((80, 60), scale=(0.5, 1.0))",
	"Resize(90)|CenterCrop(75)|RandomVerticalFlip(p=1)",
	"CenterCrop(400)|RandomHorizontalFlip()", // padded
	"Resize((64, 64))|CenterCrop((100, 40))|RandomHorizontalFlip()",
	"RandomVerticalFlip()|Resize((50, 150))|RandomHorizontalFlip()|Resize((90, 70))",
	"Resize((120, 120))",
	"RandomRotation((90, 90), expand=True)|Resize((64, 80))",
	"Pad((3, 7, 11, 0), fill=9)|RandomHorizontalFlip()|RandomCrop(70, padding=20, pad_if_needed=True)",
}

// turningChains turn and shear: the box that holds what they make of a box is larger than it.
var turningChains = []string{
	"RandomRotation(30)|CenterCrop(120)",
	"RandAugment(magnitude=20)|Resize((100, 100))",
}

// A rectangle of white pixels lies, behind any chain, where its box says: within half a pixel for each resize.
func TestBoxesFollowPixels(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	kept := 0
	for range 400 {
		w, h := 20+r.IntN(300), 20+r.IntN(300)
		x, y := r.IntN(w), r.IntN(h)
		rect := image.Rect(x, y, x+1+r.IntN(w-x), y+1+r.IntN(h-y))
		img := image.NewGray(image.Rect(0, 0, w, h))
		for y := rect.Min.Y; y < rect.Max.Y; y++ {
			for x := rect.Min.X; x < rect.Max.X; x++ {
				img.SetGray(x, y, color.Gray{255})
			}
		}
		var src bytes.Buffer
		if err := png.Encode(&src, img); err != nil {
			t.Fatal(err)
		}
		chains := slices.Concat(jointChains, turningChains[:1])
		chain := chains[r.IntN(len(chains))]
		turns := slices.Contains(turningChains, chain)
		spec := strings.NewReplacer("Crop(96)", "Crop(96, interpolation='nearest')", "120))",
			"120), interpolation='nearest')",
			"1.0))", "1.0), interpolation='nearest')", "Resize(90)", "Resize(90, interpolation='nearest')", "(64, 64))",
			"(64, 64), interpolation='nearest')",
			"150))", "150), interpolation='nearest')", "70))", "70), interpolation='nearest')", "80))",
			"80), interpolation='nearest')").Replace(chain)
		in := build(t, "Detection(min_size=0, min_area=0)|"+spec+"|nhwc")
		if n := strings.Count(spec, "nearest"); n != strings.Count(chain, "Resize(")+strings.Count(chain, "Resized") {
			t.Fatalf("%s: a resize that blurs", spec)
		}
		tolerance := 0.51
		if strings.Count(spec, "nearest") == 2 {
			tolerance += 0.5 * 90 / 50 // the first resize's half pixel, as the second one magnifies it
		}
		note := fmt.Sprintf(`[{"bbox": [%d, %d, %d, %d], "category_id": 7}]`, x, y, rect.Dx(), rect.Dy())
		if turns {
			tolerance++
		}
		m := makeJoint(t, in, src.Bytes(), map[string]string{"json": note},
			Draw{Seed: seed, Sample: r.Uint64N(1 << 40)})
		shape := in.Fields()[0].Shape
		white := image.Rectangle{}
		for y := range shape[0] {
			for x := range shape[1] {
				if m.data[3*(y*shape[1]+x)] == 255 {
					white = white.Union(image.Rect(x, y, x+1, y+1))
				}
			}
		}
		if len(m.boxes) == 0 {
			if white.Dx() > int(tolerance*2) && white.Dy() > int(tolerance*2) {
				t.Errorf("%s of %dx%d: %v lies at %v and has no box", spec, w, h, rect, white)
			}
			continue
		}
		kept++
		b := m.boxes[0]
		if m.labels[0] != 7 || b[2] <= b[0] || b[3] <= b[1] || b[0] < 0 || b[1] < 0 || b[2] > float64(shape[1]) ||
			b[3] > float64(shape[0]) {
			t.Fatalf("%s: box %v, label %d", spec, b, m.labels[0])
		}
		if white.Empty() { // between two pixels
			if !turns && b[2]-b[0] > 2*tolerance && b[3]-b[1] > 2*tolerance {
				t.Errorf("%s of %dx%d: %v has the box %v and no pixel", spec, w, h, rect, b)
			}
			continue
		}
		if turns { // what a corner was cut off from has the box of the whole still
			if float64(white.Min.X) < b[0]-tolerance || float64(white.Min.Y) < b[1]-tolerance ||
				float64(white.Max.X) > b[2]+tolerance || float64(white.Max.Y) > b[3]+tolerance {
				t.Errorf("%s of %dx%d: %v lies at %v, outside of its box %v", spec, w, h, rect, white, b)
			}
			continue
		}
		for k, edge := range [4]int{white.Min.X, white.Min.Y, white.Max.X, white.Max.Y} {
			if math.Abs(b[k]-float64(edge)) > tolerance {
				t.Errorf("%s of %dx%d: %v lies at %v, its box at %v", spec, w, h, rect, white, b)
			}
		}
	}
	if kept < 200 {
		t.Errorf("%d boxes of 400 were left", kept)
	}
}

// torchvisionBoxes are torchvision's kernels for boxes (transforms v2), in float32, in a model of their own.
const torchvisionBoxes = `
f = np.float32
boxes = np.array(q["boxes"], dtype=f).reshape(-1, 4)
w, h = q["size"]
def clamp(b, w, h):
    b[:, 0::2] = b[:, 0::2].clip(0, w)
    b[:, 1::2] = b[:, 1::2].clip(0, h)
    return b
boxes = clamp(boxes, w, h)
for s in q["steps"]:
    if s["kind"] == "crop":
        x1, y1, x2, y2 = s["box"]
        boxes = boxes - np.array([x1, y1, x1, y1], dtype=f)
        w, h = x2 - x1, y2 - y1
        boxes = clamp(boxes, w, h)
    elif s["kind"] == "resize":
        nw, nh = s["size"]
        boxes = boxes * np.array([nw / w, nh / h, nw / w, nh / h], dtype=f)
        w, h = nw, nh
    elif s["kind"] == "mirror":
        boxes[:, [2, 0]] = w - boxes[:, [0, 2]]
    elif s["kind"] == "turn":
        boxes[:, [3, 1]] = h - boxes[:, [1, 3]]
    elif s["kind"] == "affine":
        inverse = np.linalg.inv(np.array(s["matrix"] + [0, 0, 1]).reshape(3, 3))
        x, y = boxes[:, [0, 2, 2, 0]], boxes[:, [1, 1, 3, 3]]
        x, y = inverse[0, 0] * x + inverse[0, 1] * y + inverse[0, 2], inverse[1, 0] * x + inverse[1, 1] * y + inverse[1, 2]
        w, h = s["size"]
        boxes = clamp(np.stack([x.min(1), y.min(1), x.max(1), y.max(1)], axis=1).astype(f), w, h)
boxes = clamp(boxes, w, h)  # as its documentation advises, or rounding removes boxes at the edge
ws, hs = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
valid = (ws >= q["min_size"]) & (hs >= q["min_size"]) & (ws * hs >= q["min_area"])
valid &= (boxes >= 0).all(axis=1) & (boxes[:, 2] <= w) & (boxes[:, 3] <= h)
out = boxes[valid].astype("<f4").tobytes()
answer = {"labels": [i for i, v in enumerate(valid) if v]}
`

// stepsOf describes the steps of a transform to the oracle.
func stepsOf(t testing.TB, tr *Transform, size image.Point, at Draw) (list []oracle.Q) {
	t.Helper()
	var r Rand
	for _, s := range tr.plan(nil, size, at, &r) {
		switch s.kind {
		case stepCrop:
			list = append(list, oracle.Q{"kind": "crop",
				"box": []int{s.box.Min.X, s.box.Min.Y, s.box.Max.X, s.box.Max.Y}})
		case stepResize:
			list = append(list, oracle.Q{"kind": "resize", "size": []int{s.size.X, s.size.Y}})
		case stepMirror:
			list = append(list, oracle.Q{"kind": "mirror"})
		case stepTurn:
			list = append(list, oracle.Q{"kind": "turn"})
		case stepAffine:
			list = append(list, oracle.Q{"kind": "affine", "size": []int{s.size.X, s.size.Y}, "matrix": s.matrix[:]})
		case stepColour:
		default:
			t.Fatalf("step %+v", s)
		}
	}
	return list
}

// Boxes and what is left of them are torchvision's.
func TestBoxesAreTorchvisions(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	removed := 0
	for i := range 200 {
		size := image.Pt(30+r.IntN(600), 30+r.IntN(600))
		src := pngOf(t, image.NewGray(image.Rectangle{Max: size}))
		var boxes [][4]float64
		var note []string
		for k := range r.IntN(20) {
			b := [4]float64{r.Float64()*float64(size.X)*1.1 - 5, r.Float64()*float64(size.Y)*1.1 - 5}
			// Widths and heights of a quarter's multiples, so that sums are the same in float32.
			for c := range 2 {
				b[c] = math.Round(b[c]*4) / 4
				b[c+2] = b[c] + math.Round(r.ExpFloat64()*100)/4
			}
			boxes = append(boxes, b)
			note = append(note, fmt.Sprintf(`{"bbox": [%g, %g, %g, %g], "category_id": %d, "iscrowd": 0}`, b[0], b[1],
				b[2]-b[0], b[3]-b[1], k))
		}
		chains := slices.Concat(jointChains, turningChains)
		chain := chains[i%len(chains)]
		minSize, minArea := float64(r.IntN(6))+0.37, float64(r.IntN(60))+0.37 // off what rounding could decide
		in := build(t, fmt.Sprintf("Detection(min_size=%g, min_area=%g)|%s", minSize, minArea, chain))
		at := Draw{Seed: seed, Sample: uint64(i)}
		q := oracle.Q{"code": torchvisionBoxes, "boxes": append([][4]float64{}, boxes...),
			"size":  []int{size.X, size.Y},
			"steps": stepsOf(t, compile(t, chain), size, at), "min_size": minSize, "min_area": minArea}
		a, out := ask(t, "run", q, nil)
		m := makeJoint(t, in, src,
			map[string]string{"json": `{"annotations": [` + strings.Join(note, ", ") + `], "other": {}}`}, at)
		var labels []int64
		for _, l := range a["labels"].([]any) {
			labels = append(labels, int64(l.(float64)))
		}
		if !slices.Equal(m.labels, labels) {
			t.Fatalf("%s of %v, %v: boxes %v are left, torchvision leaves %v", in, size, boxes, m.labels, labels)
		}
		removed += len(boxes) - len(labels)
		for k, b := range m.boxes {
			for c := range b {
				want := float64(math.Float32frombits(binary.LittleEndian.Uint32(out[16*k+4*c:])))
				if math.Abs(b[c]-want) > 1e-3 {
					t.Errorf("%s of %v: box %v, torchvision's %v at %d", in, size, b, want, c)
				}
			}
		}
	}
	if removed < 100 {
		t.Errorf("%d boxes were removed", removed)
	}
}

func pngOf(t testing.TB, img image.Image) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := png.Encode(&b, img); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// pillowMask takes the steps on a mask with Pillow, one by one.
const pillowMask = `
from PIL import Image
im = Image.open(io.BytesIO(b))
answer = {"mode": im.mode}
a = np.array(im).astype(np.int64)
# Two bytes a pixel, as two pictures: Pillow 9.4 does not resize all modes.
for s in q["steps"]:
    planes = []
    for part, fill in ((a % 256, q["fill"] % 256), (a // 256 % 256, q["fill"] // 256 % 256)):
        p = Image.fromarray(part.astype(np.uint8), "L")
        if s["kind"] == "crop":
            x1, y1, x2, y2 = s["box"]
            whole = Image.new("L", (x2 - x1, y2 - y1), fill)
            whole.paste(p, (-x1, -y1))
            p = whole
        elif s["kind"] == "resize":
            p = p.resize(s["size"], Image.NEAREST)
        elif s["kind"] == "mirror":
            p = p.transpose(Image.FLIP_LEFT_RIGHT)
        elif s["kind"] == "turn":
            p = p.transpose(Image.FLIP_TOP_BOTTOM)
        elif s["kind"] == "affine":
            p = p.transform(tuple(s["size"]), Image.AFFINE, tuple(s["matrix"]), Image.NEAREST, fillcolor=fill)
        planes.append(np.array(p).astype(np.int64))
    a = planes[0] + 256 * planes[1]
out = a.astype(q["dtype"]).tobytes()
`

// Masks made of real photographs, of every mode, are Pillow's behind every chain, and the picture is what it is
// without a mask.
func TestMasksArePillows(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	const quantised = `
from PIL import Image
im = Image.frombytes("RGB", q["size"], b)
m = {"P": lambda: im.quantize(21), "P4": lambda: im.quantize(16), "L": lambda: im.convert("L"), "1": lambda: im.convert("1"),
     "I;16": lambda: Image.fromarray((np.array(im.convert("L")).astype(np.uint16) * 250))}[q["mode"]]()
f = io.BytesIO()
m.save(f, "PNG", **({"bits": 4} if q["mode"] == "P4" else {}))
out = f.getvalue()
`
	for i, size := range []image.Point{{150, 100}, {97, 231}} {
		pix := photo(t, i, size.X, size.Y)
		src := photoJPEG(t, i, size.X, size.Y, 420)
		for _, mode := range []string{"P", "P4", "L", "1", "I;16"} {
			_, mask := ask(t, "run", oracle.Q{"code": quantised, "mode": mode, "size": []int{size.X, size.Y}}, pix)
			for c, chain := range slices.Concat(jointChains, turningChains) {
				at := Draw{Seed: seed, Sample: uint64(10*i + c)}
				dtype, fill := "int64", 255
				if mode != "I;16" && c%2 == 0 {
					dtype, fill = "uint8", 0
				}
				in := build(t, fmt.Sprintf("Segmentation(dtype='%s', fill=%d)|%s", dtype, fill, chain))
				m := makeJoint(t, in, src, map[string]string{"mask.png": string(mask)}, at)
				tr := compile(t, chain)
				a, want := ask(t, "run", oracle.Q{"code": pillowMask, "steps": stepsOf(t, tr, size, at), "fill": fill,
					"dtype": "<" + map[string]string{"int64": "i8", "uint8": "u1"}[dtype]}, mask)
				if !bytes.Equal(m.mask, want) {
					t.Errorf("mask of mode %s (%s), %v, %s: not Pillow's", mode, a["mode"], size, in)
				}
				if !bytes.Equal(m.data, apply(t, tr, src, at)) {
					t.Errorf("%s: the picture is another beside a mask", in)
				}
			}
		}
	}
}

// Formats of annotations, as their tools write them.
func TestBoxFormats(t *testing.T) {
	src := pngOf(t, image.NewGray(image.Rect(0, 0, 200, 100)))
	const voc = `<annotation><folder>VOC2007</folder><filename>000001.jpg</filename><size><width>200</width></size>
	<object><name>dog</name><pose>Left</pose><difficult>0</difficult><bndbox><xmin>1</xmin><ymin>1</ymin><xmax>200</xmax><ymax>100</ymax></bndbox></object>
	<object><name>person</name><bndbox><xmax>60</xmax><xmin>11</xmin><ymin>21</ymin><ymax>50.5</ymax></bndbox>
	<part><name>head</name><bndbox><xmin>1</xmin><ymin>1</ymin><xmax>2</xmax><ymax>2</ymax></bndbox></part></object></annotation>`
	for _, tt := range []struct {
		spec, ext, text string
		boxes           [][4]float64
		labels          []int64
	}{
		{"", "json", `{"annotations": [{"bbox": [10, 20.5, 30, 40], "category_id": 18, "segmentation": [[1, 2]], "iscrowd": 0}]}`, [][4]float64{{10, 20.5, 40, 60.5}}, []int64{18}},
		{"", "json", `[{"bbox": [10, 20, 30, 40], "category_id": 1, "iscrowd": 1}, {"category_id": 0, "bbox": [190, 90, 30, 40]}]`, [][4]float64{{190, 90, 200, 100}}, []int64{0}},
		{"", "json", `{"annotations": []}`, nil, nil},
		{"boxes='coco.json'", "coco.json", ` []`, nil, nil},
		{"format='voc', classes=('person', 'dog')", "xml", voc, [][4]float64{{0, 0, 200, 100}, {10, 20, 60, 50.5}},
			[]int64{1, 0}},
		{"format='yolo'", "txt",
			"3 0.5 0.5 1.0 1.0\n\n0 0.25 0.5 0.1 0.2\r\n", [][4]float64{{0, 0, 200, 100}, {40, 40, 60, 60}},
			[]int64{3, 0}},
		{"format='yolo'", "none", "", nil, nil},
	} {
		in := build(t, "Detection("+tt.spec+")|Resize((100, 200))")
		m := makeJoint(t, in, src, map[string]string{tt.ext: tt.text}, Draw{})
		ok := len(m.boxes) == len(tt.boxes) && slices.Equal(m.labels, tt.labels)
		for i := range m.boxes {
			for c := range 4 {
				ok = ok && math.Abs(m.boxes[i][c]-tt.boxes[i][c]) < 1e-4
			}
		}
		if !ok {
			t.Errorf("%s %s: %v %v, want %v %v", tt.spec, tt.text, m.boxes, m.labels, tt.boxes, tt.labels)
		}
	}
}

// What cannot be used makes a bad sample with a cause.
func TestBadAnnotations(t *testing.T) {
	src := pngOf(t, image.NewGray(image.Rect(0, 0, 200, 100)))
	other := string(pngOf(t, image.NewGray(image.Rect(0, 0, 201, 100))))
	deep := string(pngOf(t, image.NewGray16(image.Rect(0, 0, 200, 100))))
	full := image.NewGray16(image.Rect(0, 0, 200, 100))
	full.SetGray16(100, 50, color.Gray16{300})
	const coco = "Detection()|Resize((100, 200))"
	const voc = "Detection(format='voc', classes=('dog',))|Resize((100, 200))"
	const yolo = "Detection(format='yolo')|Resize((100, 200))"
	const mask = "Segmentation()|Resize((100, 200))"
	box := `{"bbox": [1, 2, 3, 4], "category_id": 1}`
	for _, tt := range []struct{ spec, ext, text, cause string }{
		{coco, "none", "", "json: the file is missing"},
		{coco, "json", "", "JSON"},
		{coco, "json", "{", "JSON"},
		{coco, "json", "{}", "annotations"},
		{coco, "json", `{"annotations": null}`, "annotations"},
		{coco, "json", `{"annotations": [{}]}`, "category_id"},
		{coco, "json", `[{"bbox": [1, 2, 3], "category_id": 1}]`, "four"},
		{coco, "json", `[{"bbox": [1, 2, 3, null], "category_id": 1}]`, "number"},
		{coco, "json", `[{"bbox": [1, 2, -3, 4], "category_id": 1}]`, "corners reversed"},
		{coco, "json", `[{"bbox": [1, 2, 1e300, 4], "category_id": 1}]`, "1e+300"},
		{coco, "json", `[{"bbox": [1, 2, 1e999, 4], "category_id": 1}]`, "number"},
		{coco, "json", `[{"bbox": [1, 2, 3, 4], "category_id": 1.5}]`, "category_id"},
		{coco, "json", `[{"bbox": [1, 2, 3, 4]}]`, "category_id"},
		{coco, "json", "[" + strings.Repeat(box+",", 100) + box + "]", "max_boxes"},
		{coco, "json", "[" + strings.Repeat(box+",", maxBoxes) + box + "]", "10000"},
		{coco, "json", strings.Repeat("[", 20000), "depth"},
		{coco, "json", strings.Repeat(" ", maxAnnotation+1), "limit"},
		{voc, "none", "", "xml: the file is missing"},
		{voc, "xml", "<annotation><object><name>cat</name></object></annotation>", `"cat"`},
		{voc, "xml", "<annotation><object><name>dog</name></object></annotation>", "bndbox"},
		{voc, "xml", "<annotation><object><name>dog</name><bndbox><xmin>x</xmin></bndbox></object></annotation>",
			"number"},
		{voc, "xml", "<other/>", "annotation"},
		{voc, "xml", "<annotation><object>", "XML"},
		{yolo, "txt", "1 2 3", "line 1"},
		{yolo, "txt", "1 0.5 0.5 0.1 0.1\n1.5 0.5 0.5 0.1 0.1", "line 2"},
		{yolo, "txt", "1 nan 0.5 0.1 0.1", "NaN"},
		{yolo, "txt", "1 0.5 0.5 -0.1 0.1", "corners reversed"},
		{mask, "none", "", "mask.png: the file is missing"},
		{mask, "mask.png", "", "empty"},
		{mask, "mask.png", "GIF89a", "GIF"},
		{mask, "mask.png", other, "201x100"},
		{mask, "mask.png", other[:60], "mask.png"},
		{mask, "mask.png", string(pngOf(t, image.NewNRGBA(image.Rect(0, 0, 200, 100)))), "colours"},
		{mask, "mask.png", string(pngOf(t, full)), "dtype='int32'"},
	} {
		_, err := tryMake(t, build(t, tt.spec), src, map[string]string{tt.ext: tt.text}, Draw{})
		if !errors.Is(err, ErrBadSample) || !strings.Contains(err.Error(), tt.cause) {
			t.Errorf("%s with %.60q: %v, want it to name %q", tt.spec, tt.text, err, tt.cause)
		}
	}
	makeJoint(t, build(t, mask), src, map[string]string{"mask.png": deep}, Draw{}) // 16 bits whose values fit
	// What the store says of a part is no fault of the sample's.
	gone := errors.New("the store is away")
	for _, spec := range []string{coco, mask} {
		in := build(t, spec)
		row := Row{}
		for _, f := range in.Fields() {
			row.Fields = append(row.Fields, make([]byte, f.Bytes))
		}
		err := in.Make(Sample{Data: src, Part: func(string) ([]byte, error) { return nil, gone }}, Draw{}, &row)
		if !errors.Is(err, gone) || errors.Is(err, ErrBadSample) {
			t.Errorf("%s: %v", spec, err)
		}
	}
	// A header that claims more pixels than may be is refused before anything is made of the mask.
	huge := []byte("\xff\xd8\xff\xc0\x00\x11\x08\xff\xff\xff\xff\x03\x01\x22\x00\x02\x11\x01\x03\x11\x01\xff\xd9")
	if _, err := tryMake(t, build(t, mask), huge, map[string]string{"mask.png": other}, Draw{}); !errors.Is(err,
		ErrBadSample) {
		t.Errorf("a picture of 65535x65535: %v", err)
	}
}

func TestJointSpecs(t *testing.T) {
	const end = "|Resize(size=(8, 9), interpolation='bilinear', max_size=None, antialias=True)|uint8|nchw|pillow(9.4)"
	for spec, want := range map[string]string{
		"Detection()|Resize((8, 9))": "Detection(boxes='json', format='coco', " +
			"classes=None, max_boxes=100, min_size=1.0, min_area=1.0)" + end,
		"Detection('a.json', max_boxes=7, min_size=0)|Resize((8,9))|nchw": "Detection(boxes='a.json', format='coco', " +
			"classes=None, max_boxes=7, min_size=0.0, min_area=1.0)" + end,
		`Detection(format="voc", classes=['a', "b's"])|Resize((8, 9))`: `Detection(boxes='xml', format='voc', classes=('a', "b's"), max_boxes=100, min_size=1.0, min_area=1.0)` + end,
		"Detection(format='voc', classes=('a',))|Resize((8, 9))": "Detection(boxes='xml', format='voc', " +
			"classes=('a',), max_boxes=100, min_size=1.0, min_area=1.0)" + end,
		"Segmentation()|Resize((8, 9))": "Segmentation(mask='mask.png', dtype='uint8', fill=0)" + end,
		"Segmentation('seg.png', 'int64', -100)|Detection(format='yolo')|Resize((8, 9))": "Detection(boxes='txt', " +
			"format='yolo', classes=None, max_boxes=100, min_size=1.0, min_area=1.0)|" +
			"Segmentation(mask='seg.png', dtype='int64', fill=-100)" + end,
	} {
		in := build(t, spec)
		if in.String() != want {
			t.Errorf("%s is\n%s, want\n%s", spec, in, want)
		}
		if again := build(t, in.String()); again.String() != in.String() || again.Hash() != in.Hash() {
			t.Errorf("%s: the canonical form reads as %s", in, again)
		}
	}
	in := build(t, "Detection(max_boxes=5)|Segmentation(dtype='int64')|Resize((8, 9))|fp16|nhwc")
	var fields []string
	for _, f := range in.Fields() {
		fields = append(fields, fmt.Sprintf("%s %s %v %d", f.Name, f.DType, f.Shape, f.Bytes))
	}
	if got := strings.Join(fields, "; "); got !=
		"data fp16 [8 9 3] 432; boxes float32 [5 4] 80; labels int64 [5] 40; boxes_n int64 [] 8; mask int64 [8 9] 576" {
		t.Error(got)
	}
	if w, ok := in.(*joint); !ok || !slices.Equal(w.Parts(), []string{"json", "mask.png"}) || in.Layout() != "nhwc" {
		t.Errorf("%v, layout %s", in, in.Layout())
	}
	for spec, at := range map[string]string{
		"Detection()":                                       "",
		"Detection()|Detection()|Resize((8, 9))":            "Detection()|Resize",
		"Detection()|raw":                                   "raw",
		"Detection()|Rezise((8, 9))":                        "Rezise",
		"Detection()|Resize((8, 9))|Segmentation()":         "Segmentation",
		"Resize((8, 9))|Detection()":                        "Detection",
		"Detection(box='json')|Resize((8, 9))":              "box",
		"Detection('a/b')|Resize((8, 9))":                   "'a/b'",
		"Detection('.json')|Resize((8, 9))":                 "'.json'",
		"Detection(3)|Resize((8, 9))":                       "3)",
		"Detection(format='pascal')|Resize((8, 9))":         "'pascal'",
		"Detection(format='voc')|Resize((8, 9))":            "Detection",
		"Detection(classes=('a',))|Resize((8, 9))":          "('a',)",
		"Detection(format='voc', classes=(1,))|Resize((8))": "1,)",
		"Detection(format='voc', classes=())|Resize((8))":   "()",
		"Detection(max_boxes=0)|Resize((8, 9))":             "0)",
		"Detection(max_boxes=1e3)|Resize((8, 9))":           "1e3",
		"Detection(min_area=-1)|Resize((8, 9))":             "-1",
		"Segmentation(dtype='fp32')|Resize((8, 9))":         "'fp32'",
		"Segmentation(fill=256)|Resize((8, 9))":             "256",
		"Segmentation(fill=-1)|Resize((8, 9))":              "-1",
		"Detection()|Resize((8, 9))|MixUp()":                "MixUp",
		"Detection()|SanitizeBoundingBoxes()|Resize((8,9))": "Sanitize",
	} {
		_, err := New(spec)
		var se *SpecError
		if !errors.As(err, &se) {
			t.Errorf("%s: %v", spec, err)
		} else if se.Spec != spec || !strings.HasPrefix(spec[se.Pos:], at) || at == "" && se.Pos != len(spec) {
			t.Errorf("%s: points at %q, want %q (%v)", spec, spec[se.Pos:], at, err)
		}
	}
}

// No file of annotations, of whatever bytes, gives boxes that are not inside the picture, or a panic.
func FuzzAnnotations(f *testing.F) {
	for _, s := range []string{
		`{"annotations": [{"bbox": [10, 20.5, 30, 40], "category_id": 18, "iscrowd": 0}]}`,
		`[{"bbox": ["1", 2, 3, 4], "category_id": 1}]`,
		`<annotation><object><name>a</name><bndbox><xmin>1</xmin><ymin>1</ymin><xmax>20</xmax><ymax>10</ymax></bndbox></object></annotation>`,
		"0 0.5 0.5 0.25 0.25\n1 1e-300 1e300 1 1", "[[[", "<a><!ENTITY", "\xff\xfe",
	} {
		f.Add([]byte(s), uint64(len(s)))
	}
	type target struct {
		d  *detection
		tr *Transform
	}
	var targets []target
	for i, format := range []string{"format='coco'", "format='voc', classes=('a', 'b')", "format='yolo'"} {
		in := build(f, "Detection("+format+", max_boxes=10000)|"+jointChains[i]).(*joint)
		targets = append(targets, target{in.beside[0].(*detection), in.picture})
	}
	f.Fuzz(func(t *testing.T, part []byte, sample uint64) {
		size := image.Pt(int(sample%700)+1, int(sample/700%500)+1)
		var r Rand
		for _, g := range targets {
			boxes, err := boxFormats[g.d.format].parse(g.d, nil, part, size)
			if err != nil {
				continue
			}
			steps := g.tr.plan(nil, size, Draw{Sample: sample & (1<<48 - 1)}, &r)
			for i := range boxes {
				boxes[i].clip(size)
			}
			for _, b := range g.d.follow(boxes, size, steps) {
				if !(b.x1 >= 0 && b.y1 >= 0 && b.x2 <= float64(g.tr.size.X) && b.y2 <= float64(g.tr.size.Y) &&
					b.x1 < b.x2 && b.y1 < b.y2) {
					t.Fatalf("%s: box %+v in %v", g.d.text, b, g.tr.size)
				}
			}
		}
	})
}

// FuzzMask: masks of whatever bytes.
func FuzzMask(f *testing.F) {
	f.Add(pngOf(f, image.NewGray(image.Rect(0, 0, 20, 10))))
	f.Add(pngOf(f, image.NewPaletted(image.Rect(0, 0, 20, 10), color.Palette{color.Black, color.White})))
	f.Add(pngOf(f, image.NewGray16(image.Rect(0, 0, 20, 10))))
	m := build(f, "Segmentation(dtype='int32')|Resize((8, 9))").(*joint)
	mask := m.beside[0].(*segmentation)
	out := [][]byte{make([]byte, mask.fields(image.Pt(9, 8))[0].Bytes)}
	f.Fuzz(func(t *testing.T, part []byte) {
		var r Rand
		size := image.Pt(20, 10)
		_ = mask.make(part, size, m.picture.plan(nil, size, Draw{}, &r), out) // an error is an answer
	})
}

func BenchmarkJoint(b *testing.B) {
	src := photoJPEG(b, 1, 640, 480, 420)
	var note []string
	for i := range 15 {
		note = append(note, fmt.Sprintf(
			`{"bbox": [%d, 20, 130, 140], "category_id": 18, "iscrowd": 0, "area": 12.5, "segmentation": [[%s1]]}`,
			i*10, strings.Repeat("123.45, ", 60)))
	}
	parts := map[string]string{
		"json":     `{"annotations": [` + strings.Join(note, ", ") + `]}`,
		"mask.png": string(pngOf(b, image.NewGray(image.Rect(0, 0, 640, 480)))),
	}
	for _, spec := range []string{"", "Detection()|", "Segmentation()|"} {
		in := build(b, spec+"RandomResizedCrop(512)|RandomHorizontalFlip()")
		b.Run(spec, func(b *testing.B) {
			row := Row{}
			for _, f := range in.Fields() {
				row.Fields = append(row.Fields, make([]byte, f.Bytes))
			}
			i := uint64(0)
			for b.Loop() {
				i++
				err := in.Make(Sample{Data: src, Part: func(ext string) ([]byte, error) {
					return []byte(parts[ext]), nil
				}}, Draw{Sample: i}, &row)
				if err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
