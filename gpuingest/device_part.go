package gpuingest

import "strings"

// deviceWord at the end of a SPEC requests the host's part of it: rows that a Device can finish.
const deviceWord = "device"

// CutDevice removes the word from a SPEC.
func CutDevice(spec string) (full string, ok bool) {
	i := strings.LastIndexByte(spec, '|')
	if i < 0 || strings.TrimSpace(spec[i+1:]) != deviceWord {
		return spec, false
	}
	return spec[:i], true
}

// HostPart is the host's part of a transform: pictures of uint8 in HWC order (field data), and how a device must
// finish each (field finish, RowParams as four uint16). The device's part is Finish.
//
// A flip at the end of a transform is the device's part. Everything before it, crops above all, is the host's, which
// so decodes only the needed pixels. The random numbers are those of the whole transform, so the finished rows equal
// its rows. Hash is also the whole's: a trainer's state does not depend on where rows were finished.
type HostPart struct {
	whole  *Transform
	host   *Transform
	first  int // of the flips, which are the last operations
	finish *Finish
}

// Split compiles a SPEC, without the word device, into the parts of host and device. It is nil, without error, if
// nothing can be left to a device: raw samples, data other than pictures, erasing, steps over the batch.
func Split(spec string) (*HostPart, error) {
	in, err := New(spec)
	if err != nil {
		return nil, err
	}
	t, ok := in.(*Transform)
	if !ok || t.raw || t.erase != nil {
		return nil, nil
	}
	h := &HostPart{whole: t, first: len(t.ops)}
	for ; h.first > 0; h.first-- {
		if flip, ok := t.ops[h.first-1].operation.(*randomFlip); !ok || flip.kind != stepMirror {
			break
		}
	}
	host := *t
	host.ops = t.ops[:h.first:h.first]
	host.dtype, host.layout, host.norm, host.table = "uint8", "nhwc", "", nil
	h.host = &host
	h.finish = &Finish{DType: t.dtype, Layout: t.layout, Height: t.size.Y, Width: t.size.X,
		SourceHeight: t.size.Y, SourceWidth: t.size.X, Table: t.table}
	return h, nil
}

// Finish is the device's part.
func (h *HostPart) Finish() *Finish { return h.finish }

// Make implements Ingest.
func (h *HostPart) Make(src Sample, at Draw, row *Row) error {
	p := RowParams{Flags: Filled}
	for i := h.first; i < len(h.whole.ops); i++ {
		if r := at.Rand(i); r.Float64() < h.whole.ops[i].operation.(*randomFlip).p {
			p.Flags ^= Flip
		}
	}
	p.Put(row.Fields[1])
	return h.host.Apply(src.Data, at, row.Fields[0])
}

// Decodes is [Transform.Decodes].
func (h *HostPart) Decodes() bool { return true }

// Fields implements Ingest.
func (h *HostPart) Fields() []Field {
	f := h.finish
	return []Field{{Name: "data", DType: "uint8", Shape: []int{f.SourceHeight, f.SourceWidth, 3},
		Bytes: f.SourceBytes()},
		{Name: "finish", DType: "uint16", Shape: []int{ParamBytes / 2}, Bytes: ParamBytes}}
}

// Layout implements Ingest.
func (h *HostPart) Layout() string { return "nhwc" }

// String implements Ingest.
func (h *HostPart) String() string { return h.whole.String() + "|" + deviceWord }

// Hash implements Ingest: it identifies the finished rows.
func (h *HostPart) Hash() string { return h.whole.Hash() }
