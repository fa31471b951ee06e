package gpuingest

import (
	"encoding/binary"
	"fmt"
	"image"
	"math"
	"slices"
	"sync"
)

// detection computes the fields of a picture's boxes.
type detection struct {
	annotation
	format  string
	classes []string // names by label; of format voc
	max     int
	minSize float64 // pixels of the result, width and height
	minArea float64
}

// boxFormats are the formats of annotations, each with its usual extension.
var boxFormats = map[string]struct {
	ext   string
	parse func(d *detection, boxes []box, part []byte, size image.Point) ([]box, error)
}{
	"coco": {"json", parseCOCO},
	"voc":  {"xml", parseVOC},
	"yolo": {"txt", parseYOLO},
}

const (
	// maxBoxes bounds the boxes of a picture, in its file and in a row.
	maxBoxes = 10_000
	// maxAnnotation bounds the bytes of an annotation file, before it is parsed.
	maxAnnotation = 16 << 20
)

var detectionParams = []param{
	{"boxes", "None"}, {"format", "'coco'"}, {"classes", "None"}, {"max_boxes", "100"}, {"min_size", "1.0"},
	{"min_area", "1.0"},
}

func compileDetection(p *parser, c call) (beside, error) {
	a, err := bind(p, c, detectionParams)
	if err != nil {
		return nil, err
	}
	d := &detection{annotation: annotation{what: "boxes"}, format: a.oneOf("format", "coco", "voc", "yolo")}
	if a.val["boxes"].kind == 'n' {
		a.val["boxes"] = value{kind: 's', str: boxFormats[d.format].ext}
	}
	if a.err == nil {
		d.ext = a.ext("boxes")
		d.setClasses(a)
	}
	d.max = a.integer("max_boxes", 1, maxBoxes)
	d.minSize = a.real("min_size", 0, maxSide*maxSide, "a number of pixels, 0 or more")
	d.minArea = a.real("min_area", 0, maxSide*maxSide, "a number of pixels, 0 or more")
	d.text = a.String()
	return d, a.err
}

func (d *detection) setClasses(a *args) {
	v := a.val["classes"]
	switch {
	case v.kind == 'n' && d.format == "voc":
		a.err = a.p.fail(a.of.pos, len(a.of.name),
			"write classes=('aeroplane', 'bicycle', ...), in the order of their labels",
			"format 'voc' has names of classes and no numbers")
	case v.kind == 'n':
		return
	case d.format != "voc":
		a.bad(v, "classes are only for format 'voc'; '%s' has numbers", d.format)
	case v.kind == 's':
		v.list = []value{v}
	}
	for _, x := range v.list {
		if x.kind != 's' || x.str == "" || slices.Contains(d.classes, x.str) {
			a.bad(x, "classes must be a tuple of names, each once")
		}
		d.classes = append(d.classes, x.str)
	}
	if len(d.classes) == 0 {
		a.bad(v, "classes must be a tuple of names, one or more")
	}
	a.val["classes"] = value{kind: 't', list: v.list}
}

func (d *detection) fields(image.Point) []Field {
	return []Field{
		{Name: "boxes", DType: "float32", Shape: []int{d.max, 4}, Bytes: 16 * d.max},
		{Name: "labels", DType: "int64", Shape: []int{d.max}, Bytes: 8 * d.max},
		{Name: "boxes_n", DType: "int64", Bytes: 8},
	}
}

// box is a rectangle in pixels from the upper left corner of the picture, and its label.
type box struct {
	x1, y1, x2, y2 float64
	label          int64
}

// clip cuts the box to a picture of the given size.
func (b *box) clip(size image.Point) {
	w, h := float64(size.X), float64(size.Y)
	b.x1, b.x2 = min(max(b.x1, 0), w), min(max(b.x2, 0), w)
	b.y1, b.y2 = min(max(b.y1, 0), h), min(max(b.y2, 0), h)
}

// move replaces the box by the smallest box around its corners after a step.
func (b *box) move(m *[6]float64) {
	x1, y1, x2, y2 := math.Inf(1), math.Inf(1), math.Inf(-1), math.Inf(-1)
	for _, c := range [4][2]float64{{b.x1, b.y1}, {b.x2, b.y1}, {b.x1, b.y2}, {b.x2, b.y2}} {
		x, y := m[0]*c[0]+m[1]*c[1]+m[2], m[3]*c[0]+m[4]*c[1]+m[5]
		x1, y1, x2, y2 = min(x1, x), min(y1, y), max(x2, x), max(y2, y)
	}
	b.x1, b.y1, b.x2, b.y2 = x1, y1, x2, y2
}

// follow applies the steps of a picture to boxes. At each step it clips boxes to the picture, like torchvision's v2
// kernels. It returns the boxes that are still large enough, in their order, like SanitizeBoundingBoxes.
func (d *detection) follow(boxes []box, size image.Point, steps []step) []box {
	for i := range steps {
		s := &steps[i]
		m, after := s.move(size), s.after(size)
		for j := range boxes {
			boxes[j].move(&m)
			boxes[j].clip(after)
		}
		size = after
	}
	kept := boxes[:0]
	for _, b := range boxes {
		if w, h := b.x2-b.x1, b.y2-b.y1; w > 0 && h > 0 && w >= d.minSize && h >= d.minSize && w*h >= d.minArea {
			kept = append(kept, b)
		}
	}
	return kept
}

// boxLists hold boxes between parsing and storing.
var boxLists = sync.Pool{New: func() any { return new([]box) }}

// make writes a row's fields.
func (d *detection) make(part []byte, size image.Point, steps []step, out [][]byte) error {
	list := boxLists.Get().(*[]box)
	defer boxLists.Put(list)
	if len(part) > maxAnnotation {
		return fmt.Errorf("%d bytes, the limit is %d", len(part), maxAnnotation)
	}
	boxes, err := boxFormats[d.format].parse(d, (*list)[:0], part, size)
	*list = boxes[:0]
	if err != nil {
		return err
	}
	for i := range boxes {
		boxes[i].clip(size)
	}
	boxes = d.follow(boxes, size, steps)
	if len(boxes) > d.max {
		return fmt.Errorf("%d boxes remain, max_boxes is %d: raise it", len(boxes), d.max)
	}
	le := binary.LittleEndian
	to, labels := out[0], out[1]
	for i, b := range boxes {
		for k, v := range [4]float64{b.x1, b.y1, b.x2, b.y2} {
			le.PutUint32(to[16*i+4*k:], math.Float32bits(float32(v)))
		}
		le.PutUint64(labels[8*i:], uint64(b.label))
	}
	clear(to[16*len(boxes):])
	for i := len(boxes); i < d.max; i++ {
		le.PutUint64(labels[8*i:], math.MaxUint64) // -1: unused
	}
	le.PutUint64(out[2], uint64(len(boxes)))
	return nil
}

// add appends a box of a file, if it is valid.
func add(boxes []box, b box) ([]box, error) {
	for _, v := range [4]float64{b.x1, b.y1, b.x2, b.y2} {
		if !(math.Abs(v) < 1e9) {
			return boxes, fmt.Errorf("box %d has a coordinate of %g", len(boxes)+1, v)
		}
	}
	if b.x2 < b.x1 || b.y2 < b.y1 {
		return boxes, fmt.Errorf("box %d has its corners reversed: (%g, %g) to (%g, %g)",
			len(boxes)+1, b.x1, b.y1, b.x2, b.y2)
	}
	if len(boxes) == maxBoxes {
		return boxes, fmt.Errorf("more than %d boxes", maxBoxes)
	}
	return append(boxes, b), nil
}
