package gpuingest

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"fmt"
	"image"
	"slices"
	"strconv"
	"strings"
)

// cocoBox is one of COCO's annotations. Other members are ignored.
type cocoBox struct {
	BBox     []json.Number   `json:"bbox"` // x, y, width, height in pixels
	Category *int64          `json:"category_id"`
	Crowd    json.RawMessage `json:"iscrowd"`
}

// parseCOCO reads the annotations of one picture: a list of them, or an object with a list "annotations".
// Crowds are left out, as trainers do.
func parseCOCO(_ *detection, boxes []box, part []byte, _ image.Point) ([]box, error) {
	if part == nil {
		return boxes, errNoPart
	}
	var list []cocoBox
	if text := bytes.TrimLeft(part, " \t\r\n"); len(text) > 0 && text[0] == '[' {
		if err := json.Unmarshal(part, &list); err != nil {
			return boxes, err
		}
	} else {
		var file struct {
			Annotations *[]cocoBox `json:"annotations"`
		}
		if err := json.Unmarshal(part, &file); err != nil {
			return boxes, err
		}
		if file.Annotations == nil {
			return boxes, fmt.Errorf("an object without a list \"annotations\"")
		}
		list = *file.Annotations
	}
	for i, a := range list {
		if string(a.Crowd) == "1" || string(a.Crowd) == "true" {
			continue
		}
		if len(a.BBox) != 4 || a.Category == nil {
			return boxes, fmt.Errorf("annotation %d needs a bbox of four numbers and a category_id", i+1)
		}
		var v [4]float64
		for k, n := range a.BBox {
			var err error
			if v[k], err = n.Float64(); err != nil {
				return boxes, fmt.Errorf("bbox of annotation %d: %.40q is not a number", i+1, n)
			}
		}
		var err error
		if boxes, err = add(boxes, box{v[0], v[1], v[0] + v[2], v[1] + v[3], *a.Category}); err != nil {
			return boxes, err
		}
	}
	return boxes, nil
}

// vocFile is PASCAL VOC's annotation of a picture.
type vocFile struct {
	XMLName xml.Name `xml:"annotation"`
	Objects []struct {
		Name string `xml:"name"`
		Box  *struct {
			X1 string `xml:"xmin"`
			Y1 string `xml:"ymin"`
			X2 string `xml:"xmax"`
			Y2 string `xml:"ymax"`
		} `xml:"bndbox"`
	} `xml:"object"`
}

// parseVOC parses one picture's annotations. Pixels count from 1 there, and the last ones belong to the box: a box over
// the whole picture is 1, 1, width, height. So 1 is subtracted from the near edges.
func parseVOC(d *detection, boxes []box, part []byte, _ image.Point) ([]box, error) {
	if part == nil {
		return boxes, errNoPart
	}
	var file vocFile
	if err := xml.Unmarshal(part, &file); err != nil {
		return boxes, err
	}
	for i, o := range file.Objects {
		name := strings.TrimSpace(o.Name)
		label := slices.Index(d.classes, name)
		if label < 0 {
			return boxes, fmt.Errorf("object %d is of class %.100q, which is not among classes", i+1, name)
		}
		if o.Box == nil {
			return boxes, fmt.Errorf("object %d has no bndbox", i+1)
		}
		var v [4]float64
		for k, text := range [4]string{o.Box.X1, o.Box.Y1, o.Box.X2, o.Box.Y2} {
			var err error
			if v[k], err = strconv.ParseFloat(strings.TrimSpace(text), 64); err != nil {
				return boxes, fmt.Errorf("bndbox of object %d: %.40q is not a number", i+1, text)
			}
		}
		var err error
		if boxes, err = add(boxes, box{v[0] - 1, v[1] - 1, v[2], v[3], int64(label)}); err != nil {
			return boxes, err
		}
	}
	return boxes, nil
}

// parseYOLO parses a line for each box: class, centre and size, as fractions of the picture. A picture without a file
// has no boxes.
func parseYOLO(_ *detection, boxes []box, part []byte, size image.Point) ([]box, error) {
	w, h := float64(size.X), float64(size.Y)
	n := 0
	for line := range bytes.Lines(part) {
		n++
		f := bytes.Fields(line)
		if len(f) == 0 {
			continue
		}
		if len(f) != 5 {
			return boxes, fmt.Errorf("line %d has %d numbers, want class, x, y, width, height", n, len(f))
		}
		label, err := strconv.ParseInt(string(f[0]), 10, 64)
		if err != nil {
			return boxes, fmt.Errorf("line %d: class %.40q is not a whole number", n, f[0])
		}
		var v [4]float64
		for k := range v {
			if v[k], err = strconv.ParseFloat(string(f[k+1]), 64); err != nil {
				return boxes, fmt.Errorf("line %d: %.40q is not a number", n, f[k+1])
			}
		}
		x, y, bw, bh := v[0]*w, v[1]*h, v[2]*w, v[3]*h
		if boxes, err = add(boxes, box{x - bw/2, y - bh/2, x + bw/2, y + bh/2, label}); err != nil {
			return boxes, err
		}
	}
	return boxes, nil
}
