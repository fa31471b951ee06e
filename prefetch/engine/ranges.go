package engine

import (
	"bytes"
	"fmt"
	"strconv"
	"strings"

	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/prefetch/order"
	"github.com/shoalfs/shoal/prefetch/run"
)

// rangesLine begins a plan whose lines are ranges of files: PATH, OFFSET and LENGTH in bytes, with tabs between them.
const rangesLine = "#ranges"

func ofRanges(plan []byte) bool {
	first, _, _ := bytes.Cut(plan, []byte("\n"))
	return string(bytes.TrimSuffix(first, []byte("\r"))) == rangesLine
}

// rangeBytes is the memory for a range of a plan, apart from its text.
const rangeBytes = 160

// readRanges is orders.read of a plan of ranges.
func (r *orders) readRanges(v *view, w written, data []byte) (written, error) {
	ranges, err := parseRanges(v.manifest, data, r.mountPoints())
	if err != nil {
		return w, err
	}
	w.lines = len(ranges)
	w.options.Layout, w.options.Has, w.options.Keep, w.options.Choose = nil, nil, nil, false
	number := func() []uint32 { return w.stream.Renumber(ranges) }
	if w.stream = r.ofPlan(w.options.Name, v, true); w.stream == nil {
		var numbers []uint32
		w.options.Ranges, numbers = run.NewRanges(v.volume, ranges)
		number = func() []uint32 { return numbers }
	}
	w.order = func() order.Locator { return order.Index(order.List(number())) }
	return w, nil
}

func parseRanges(m *catalog.Manifest, data []byte, mountPoints []string) (ranges []run.Range, err error) {
	first := true
	_, bad := order.ParseLines(data, maxPlanErrors, func(line string) (int, error) {
		line = strings.TrimSuffix(line, "\r")
		if first || line == "" {
			first = false
			return -1, nil
		}
		one, err := parseRange(m, line, mountPoints)
		ranges = append(ranges, one)
		return -1, err
	})
	if len(bad) > 0 {
		return nil, fmt.Errorf("%s (after %s: PATH, OFFSET and LENGTH in bytes, with tabs between them)",
			strings.Join(bad, "\n"), rangesLine)
	}
	if len(ranges) == 0 {
		return nil, fmt.Errorf("it names no range")
	}
	return ranges, nil
}

func parseRange(m *catalog.Manifest, line string, mountPoints []string) (r run.Range, err error) {
	end := strings.LastIndexByte(line, '\t') // names may have tabs, too
	middle := strings.LastIndexByte(line[:max(end, 0)], '\t')
	if middle < 0 {
		return r, fmt.Errorf("%.300q is not PATH, OFFSET and LENGTH", line)
	}
	path, offset, length := line[:middle], line[middle+1:end], line[end+1:]
	if r.File, err = findFile(m, path, mountPoints); err != nil {
		return r, err
	}
	if r.File < 0 {
		return r, fmt.Errorf("%.300q has no path", line)
	}
	size := m.Size(r.File)
	if r.Off, err = strconv.ParseInt(offset, 10, 64); err != nil || r.Off < 0 {
		return r, fmt.Errorf("offset %.300q is not a number of bytes", offset)
	}
	if r.N, err = strconv.ParseInt(length, 10, 64); err != nil || r.N <= 0 {
		return r, fmt.Errorf("length %.300q is not a positive number of bytes", length)
	}
	if r.Off > size || r.N > size-r.Off {
		return r, fmt.Errorf("%d bytes from %d: %.300q has %d", r.N, r.Off, path, size)
	}
	return r, nil
}
