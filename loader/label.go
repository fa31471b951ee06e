package loader

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// labelSource says where labels come from. The zero value leaves it to the dataset.
type labelSource struct {
	kind string   // "", folder, cls, json, none, or the extension of a file that holds a number, such as label.int64
	keys []string // of json
}

const (
	labelFolder = "folder"
	labelCls    = "cls"
	labelJSON   = "json"
	labelNone   = "none"
)

// numbers are the types of files that hold one number, with their lengths: columns of MDS.
var numbers = map[string]int{"int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "int32": 4, "uint32": 4, "int64": 8}

// numberType returns the type that an extension ends in, "" if it is none.
func numberType(ext string) string {
	if dtype := ext[strings.LastIndexByte(ext, '.')+1:]; dtype != ext && numbers[dtype] > 0 {
		return dtype
	}
	return ""
}

// parseNumber reads a little-endian number.
func parseNumber(b []byte, dtype string) (int64, error) {
	size := numbers[dtype]
	if len(b) != size {
		return 0, fmt.Errorf("%d bytes are not one %s", len(b), dtype)
	}
	var whole [8]byte
	copy(whole[8-size:], b) // at the upper end, so that the shift extends the sign
	n := binary.LittleEndian.Uint64(whole[:])
	if dtype[0] == 'u' {
		return int64(n >> (64 - 8*size)), nil
	}
	return int64(n) >> (64 - 8*size), nil
}

// parseLabel reads folder, cls, json:KEY, NAME.TYPE, none, or nothing.
func parseLabel(text string) (labelSource, error) {
	switch text = strings.TrimSpace(text); text {
	case "", labelFolder, labelCls, labelNone:
		return labelSource{kind: text}, nil
	}
	if path, ok := strings.CutPrefix(text, labelJSON+":"); ok {
		if keys := strings.Split(path, "."); !slices.Contains(keys, "") {
			return labelSource{labelJSON, keys}, nil
		}
	}
	if numberType(text) != "" && !strings.ContainsAny(text, "/:,") {
		return labelSource{kind: text}, nil
	}
	return labelSource{}, fmt.Errorf(
		"label %.100q: must be folder (the class folder), cls (the number in the file .cls beside a sample), "+
			"json:KEY (a number in its file .json, json:a.b inside an object), COLUMN.TYPE (a column of integers, "+
			"such as label.int64), or none", text)
}

// String returns what parseLabel reads.
func (l labelSource) String() string {
	if l.kind == labelJSON {
		return labelJSON + ":" + strings.Join(l.keys, ".")
	}
	return l.kind
}

// part returns the extension of the file that the label is in, "" if it is in none.
func (l labelSource) part() string {
	switch l.kind {
	case labelFolder, labelNone:
		return ""
	}
	return l.kind
}

// over replaces the zero value by the dataset's default: the class folders if there are any, else the .cls files
// if there are any.
func (l labelSource) over(ds Dataset) labelSource {
	if l.kind != "" {
		return l
	}
	if len(ds.Classes()) == 0 {
		if found, numbered := ds.Parts(labelCls); found && !numbered {
			return labelSource{kind: labelCls}
		}
	}
	return labelSource{kind: labelFolder}
}

// hashed adds the source to a transform's hash in states, unless the source is the folder.
func (l labelSource) hashed(hash string) string {
	if l.kind == labelFolder {
		return hash
	}
	return hash + ",label=" + l.String()
}

// maxLabelFile is the largest file that a label is read from.
const maxLabelFile = 16 << 20

// of returns the label of a sample, from its part or from its folder. Its errors make the sample bad.
func (l labelSource) of(folder int64, part []byte) (int64, error) {
	switch l.kind {
	case labelNone:
		return -1, nil
	case labelFolder:
		return folder, nil
	}
	if part == nil {
		return 0, fmt.Errorf("it has no .%s file, where its label should be", l.kind)
	}
	if len(part) > maxLabelFile {
		return 0, fmt.Errorf("its .%s has %d bytes, the limit for labels is %d", l.kind, len(part), maxLabelFile)
	}
	var n int64
	var err error
	switch l.kind {
	case labelCls:
		n, err = parseCls(part)
	case labelJSON:
		n, err = jsonNumber(part, l.keys)
	default:
		n, err = parseNumber(part, numberType(l.kind))
	}
	if err != nil {
		return 0, fmt.Errorf("label in its .%s: %w", l.kind, err)
	}
	return n, nil
}

// parseCls reads a class number in decimal digits, with white space around it.
func parseCls(b []byte) (int64, error) {
	text := bytes.TrimSpace(b)
	n, err := strconv.ParseInt(string(text[:min(len(text), 32)]), 10, 64)
	if err != nil || len(text) > 32 {
		return 0, fmt.Errorf("%.32q is not an integer", text)
	}
	return n, nil
}

// jsonNumber returns the integer at a path of keys through objects.
func jsonNumber(b []byte, keys []string) (int64, error) {
	for i, key := range keys {
		var object map[string]json.RawMessage
		if err := json.Unmarshal(b, &object); err != nil {
			if _, ok := errors.AsType[*json.SyntaxError](err); ok {
				return 0, fmt.Errorf("not JSON: %w", err)
			}
			return 0, fmt.Errorf("%s is not an object", name(keys[:i]))
		}
		value, ok := object[key]
		if !ok {
			return 0, fmt.Errorf("no key %s", name(keys[:i+1]))
		}
		b = value
	}
	n, err := strconv.ParseInt(string(b), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("%s is %.40s, not an integer", name(keys), b)
	}
	return n, nil
}

func name(keys []string) string {
	if len(keys) == 0 {
		return "the whole"
	}
	return strconv.Quote(strings.Join(keys, "."))
}
