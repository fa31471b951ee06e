package relay

import (
	"fmt"
	"slices"

	"google.golang.org/protobuf/proto"

	"github.com/shoalfs/shoal/gpuingest"
	"github.com/shoalfs/shoal/loader/feedpb"
)

const planeData, planeFinish = "data", "finish" // the planes that are not passed on unchanged

// numpyNames are numpy's names of a device's types.
var numpyNames = map[string]string{"uint8": "uint8", "fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}

// layout says where a batch lies in a buffer, and how it gets there.
type layout struct {
	planes []*feedpb.Plane
	total  int // bytes
	small  int // where the planes after data begin
	job    *gpuingest.Job
	onHost []gpuingest.Copy // of these, what trainers read in the host's memory
}

// lay lays out a batch of rows with the server's planes, whose offsets count from `at` in the slot. finish is nil
// if the planes are only copied.
func lay(planes []*feedpb.Plane, rows, at int, finish *gpuingest.Finish) (*layout, error) {
	l := &layout{job: &gpuingest.Job{Rows: rows, Finish: finish}}
	seen := map[string]bool{}
	for _, p := range planes {
		name, from, n := p.GetName(), at+int(p.GetOffset()), int(p.GetLength())
		seen[name] = true
		if finish != nil && name == planeFinish {
			if n != rows*gpuingest.ParamBytes {
				return nil, fmt.Errorf("plane %s has %d bytes for %d rows", name, n, rows)
			}
			l.job.Params = from
			continue
		}
		q := proto.CloneOf(p)
		l.total = (l.total + 63) / 64 * 64
		if finish != nil && name == planeData {
			if n != rows*finish.SourceBytes() {
				return nil, fmt.Errorf("plane %s has %d bytes for %d rows of %d", name, n, rows, finish.SourceBytes())
			}
			h, w := uint64(finish.Height), uint64(finish.Width)
			q.Dtype, q.Shape = numpyNames[finish.DType], []uint64{uint64(rows), 3, h, w}
			if finish.Layout == "nhwc" {
				q.Shape = []uint64{uint64(rows), h, w, 3}
			}
			l.job.Source, l.job.Target, n = from, l.total, rows*finish.RowBytes()
		} else {
			c := gpuingest.Copy{From: from, To: l.total, Bytes: n}
			l.job.Copies = append(l.job.Copies, c)
			if slices.Contains(onHost, name) {
				l.onHost = append(l.onHost, c)
			}
		}
		if len(l.planes) == 1 {
			l.small = l.total
		}
		q.Offset, q.Length = uint64(l.total), uint64(n)
		l.planes = append(l.planes, q)
		l.total += n
	}
	if len(l.planes) < 2 || l.planes[0].GetName() != planeData || finish != nil && !seen[planeFinish] {
		return nil, fmt.Errorf("the device cannot process these planes: %v", planes)
	}
	return l, nil
}

var onHost = []string{"label", "id", "valid", "offsets"} // the planes that a trainer reads in the host's memory

// host copies the planes onHost from the slot to dst, with the offsets of the buffer after data.
func (l *layout) host(dst, slot []byte) {
	for _, c := range l.onHost {
		copy(dst[c.To-l.small:], slot[c.From:][:c.Bytes])
	}
}
