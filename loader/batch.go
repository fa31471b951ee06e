package loader

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/shoalfs/shoal/internal/trace"
	"github.com/shoalfs/shoal/loader/feedpb"
)

// IgnoredLabel is the label of rows without a usable sample. torch's losses skip it by default (ignore_index),
// so padding does not affect a loss even if the trainer never looks at valid.
const IgnoredLabel = -100

// The names of planes.
const (
	planeData    = "data"
	planeLabel   = "label"
	planeID      = "id"
	planeValid   = "valid"
	planeOffsets = "offsets"
)

// numpyNames are numpy's for the short names of element types.
var numpyNames = map[string]string{"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}

// planes lays out a batch of rows, and returns its total length. dataBytes is the length of the data plane of raw
// samples.
func planes(t Transform, rows int, dataBytes int64) ([]*feedpb.Plane, int64) {
	var list []*feedpb.Plane
	var end int64
	add := func(name, dtype string, length int64, shape ...uint64) {
		off := alignUp(end)
		list = append(list, &feedpb.Plane{Name: name, Dtype: dtype, Shape: shape, Offset: uint64(off),
			Length: uint64(length)})
		end = off + length
	}
	n := uint64(rows)
	if t == nil {
		add(planeData, "uint8", dataBytes, uint64(dataBytes))
	} else {
		for _, f := range t.Fields() {
			shape := []uint64{n}
			for _, d := range f.Shape {
				shape = append(shape, uint64(d))
			}
			add(f.Name, cmp.Or(numpyNames[f.DType], f.DType), int64(rows)*int64(f.Bytes), shape...)
		}
	}
	add(planeLabel, "int64", 8*int64(rows), n)
	add(planeID, "int64", 8*int64(rows), n)
	add(planeValid, "uint8", int64(rows), n)
	if t == nil {
		add(planeOffsets, "uint64", 8*int64(rows+1), n+1)
	}
	return list, end
}

// batch is a batch under construction or in delivery. Each row is filled by one reader.
type batch struct {
	by      *session // the session that builds it
	at      place
	source  *source
	header  *feedpb.BatchHeader // complete once done is closed
	state   State               // once it is consumed; the header's
	rows    []row
	next    int             // row to be filled; the crew's
	ctx     context.Context // done once no session wants the batch
	planes  map[string][]byte
	pending atomic.Int32
	span    trace.Span
	taken   chan struct{} // closed when the last row has a reader
	done    chan struct{} // closed when no row is pending

	buf  *buffer // its memory, or
	slot uint32  // number in the pass's memory; 0: none

	failed bool // once it is done: in a way that no policy can skip

	// Guarded by pass.mu, for batches in slots.
	refs     int // sessions
	complete bool
	cancel   context.CancelCauseFunc // of ctx, if other sessions may want the batch
}

// row is one row that holds a sample.
type row struct {
	batch *batch
	i     int
	pos   int // position in the source's order
	draw  Draw
	out   Row
	err   error
}

// source is one epoch's stream of samples. It is closed when its last reference is gone: a session refers to the
// source of its last batch, and a row to its own until it is read.
type source struct {
	stream Stream
	read   func(ctx context.Context, pos int) (data []byte, release func(), err error)
	at     place // of the batch that is read from it next; guarded by pass.mu
	refs   atomic.Int32
}

// retain adds a reference, unless none was left.
func (s *source) retain() bool {
	for {
		n := s.refs.Load()
		if n == 0 {
			return false
		}
		if s.refs.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

func (s *source) drop() {
	if s.refs.Add(-1) == 0 {
		// An error has no receiver: every requested sample was read.
		_ = s.stream.Close()
	}
}

// newBatch returns batch k of an epoch: another session's batch for the same place, or a new one that is
// laid out and passed to the readers to be filled.
func (s *session) newBatch(ctx context.Context, p plan, k, epoch int) (*batch, error) {
	at := place{epoch, p.cursor + k*p.global()}
	if s.lease != nil {
		b, err := s.pass.take(ctx, s, at)
		if err != nil {
			return nil, err
		}
		if b != nil {
			return s.follow(b), nil
		}
	}
	ds, sp := s.ds, s.spec
	rows, ids := p.rows(k), make([]int, p.samples(k))
	var dataBytes int64
	for i := range ids {
		ids[i] = p.seq.At(p.pos(k) + i)
		if sp.transform == nil {
			dataBytes += ds.Size(ids[i])
		}
	}
	list, total := planes(sp.transform, rows, dataBytes)
	if total > s.srv.o.MaxBatchBytes {
		return nil, coded(codes.ResourceExhausted,
			"batch %d of epoch %d has %d bytes, more than the server's limit of %d: lower the batch size",
			p.index(k), epoch, total, s.srv.o.MaxBatchBytes)
	}
	state := sp.state(ds, epoch, p.after(k))
	b := &batch{by: s, at: at, ctx: s.ctx, state: state,
		header: &feedpb.BatchHeader{Index: uint64(p.index(k)), Epoch: uint32(epoch), Rows: uint32(rows),
			TotalBytes: uint64(total), Planes: list, State: state.JSON()},
		rows: make([]row, len(ids)), planes: make(map[string][]byte, len(list)),
		taken: make(chan struct{}), done: make(chan struct{}),
	}
	for {
		src, err := s.sourceAt(at, p, k)
		if err != nil {
			return nil, err
		}
		b.source = src
		got, err := s.pass.claim(ctx, s, b, total)
		if err != nil {
			return nil, err
		}
		if got == b {
			break
		}
		if got != nil {
			return s.follow(got), nil
		}
	}
	s.startSpan(b)
	data, err := s.place(ctx, b, rows, total)
	if err != nil {
		b.span.End(err)
		return nil, err
	}
	s.lay(b, p, k, ids, data)
	s.pass.crew.add(b)
	return b, nil
}

// place finds memory for a batch that this session builds.
func (s *session) place(ctx context.Context, b *batch, rows int, total int64) ([]byte, error) {
	if b.slot != 0 {
		b.header.Slot = b.slot
		s.pass.mem.begin(b.slot, b.header)
		return s.pass.mem.slot(b.slot)[slotHeaderBytes:], nil
	}
	if err := s.srv.o.Memory.Reserve(ctx, bufferSize(total)); err != nil {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		return nil, coded(codes.ResourceExhausted, "a batch of %d samples needs %d bytes: %w", rows, total, err)
	}
	b.buf = s.newBuffer(total)
	return b.buf.data, nil
}

// lay cuts data into planes and rows, and fills the planes that the readers do not.
func (s *session) lay(b *batch, p plan, k int, ids []int, data []byte) {
	ds, sp, rows := s.ds, s.spec, int(b.header.GetRows())
	var end uint64
	for _, pl := range b.header.GetPlanes() {
		clear(data[end:pl.Offset]) // the gap: never send another batch's bytes
		end = pl.Offset + pl.Length
		b.planes[pl.Name] = data[pl.Offset:end:end]
	}
	for i, id := range ids {
		pos := p.pos(k) + i
		b.rows[i] = row{batch: b, i: i, pos: pos, out: Row{Label: int64(ds.Label(id))},
			draw: Draw{Seed: sp.seed, Epoch: b.header.GetEpoch(), Sample: uint64(id),
				Occurrence: p.occurrence(pos, ds.Len())}}
	}
	if sp.transform == nil {
		b.cutRaw(ds, rows)
	} else {
		b.cut(sp.transform.Fields())
	}
	for i := len(ids); i < rows; i++ {
		b.set(i, -1, IgnoredLabel, 0)
	}
	b.pending.Store(int32(len(ids)))
	b.source.refs.Add(int32(len(ids)))
	if len(ids) == 0 {
		b.finish()
	}
}

// sourceAt returns a source whose next batch is the one at a place. That is the source of the session's last
// batch, unless others have read on from it, or it is of another epoch.
func (s *session) sourceAt(at place, p plan, k int) (*source, error) {
	s.pass.mu.Lock()
	ready := s.source != nil && s.source.at == at
	s.pass.mu.Unlock()
	if ready {
		return s.source, nil
	}
	s.adopt(nil)
	name := fmt.Sprintf("feed/%s/rank%d/epoch%d", s.spec.session, s.spec.rank, at.epoch)
	if s.begun == at.epoch+1 { // the first may still be read from
		s.again++
		name += fmt.Sprintf("/%d", s.again)
	}
	s.begun = at.epoch + 1
	stream, err := s.ds.Begin(name, p.seq, p.pos(k), s.spec.weight, s.spec.parts...)
	if err != nil {
		return nil, fmt.Errorf("begin %s: %w", name, err)
	}
	s.source = &source{stream: stream, read: stream.Read, at: at}
	if c, ok := stream.(CodedStream); ok {
		if t, ok := s.spec.transform.(Decodes); ok && t.Decodes() {
			s.source.read = c.ReadCoded
		}
	}
	s.source.refs.Store(1)
	return s.source, nil
}

// adopt makes src the session's source, and takes over the caller's reference.
func (s *session) adopt(src *source) {
	if s.source != nil {
		s.source.drop()
	}
	s.source = src
}

// follow continues from another session's batch.
func (s *session) follow(b *batch) *batch {
	s.count.shared.Add(1)
	switch {
	case b.source == s.source:
	case b.source.retain():
		s.adopt(b.source)
	default:
		s.adopt(nil)
	}
	return b
}

// cut gives each row its part of every field, and clears the gaps between them.
func (b *batch) cut(fields []Field) {
	all := make([][]byte, len(b.rows)*len(fields))
	for i := range b.rows {
		b.rows[i].out.Fields, all = all[:len(fields):len(fields)], all[len(fields):]
	}
	for j, f := range fields {
		plane := b.planes[f.Name]
		for i := range b.rows {
			b.rows[i].out.Fields[j], plane = plane[:f.Bytes:f.Bytes], plane[f.Bytes:]
		}
		clear(plane)
	}
}

// cutRaw gives each row the bytes of its sample, back to back, and writes the offsets.
func (b *batch) cutRaw(ds Dataset, rows int) {
	all := make([][]byte, len(b.rows))
	data, offsets := b.planes[planeData], b.planes[planeOffsets]
	var off int64
	for i := range rows + 1 {
		binary.LittleEndian.PutUint64(offsets[8*i:], uint64(off))
		if i < len(b.rows) {
			end := off + ds.Size(int(b.rows[i].draw.Sample))
			all[i] = data[off:end:end]
			b.rows[i].out.Fields = all[i : i+1]
			off = end
		}
	}
}

// set writes a row's small planes.
func (b *batch) set(i int, id, label int64, valid byte) {
	binary.LittleEndian.PutUint64(b.planes[planeID][8*i:], uint64(id))
	binary.LittleEndian.PutUint64(b.planes[planeLabel][8*i:], uint64(label))
	b.planes[planeValid][i] = valid
}

// fill reads and transforms the row's sample.
func (r *row) fill() {
	b := r.batch
	if r.err = b.ctx.Err(); r.err == nil {
		r.err = r.read(b.ctx, b.by)
	}
	b.source.drop()
	if id := int64(r.draw.Sample); r.err == nil {
		b.set(r.i, id, r.out.Label, 1)
	} else { // the session's policy is applied later
		for _, f := range r.out.Fields {
			clear(f)
		}
		b.set(r.i, id, IgnoredLabel, 0)
	}
	if b.pending.Add(-1) == 0 {
		b.finish()
	}
}

// finish completes a batch whose rows are all settled.
func (b *batch) finish() {
	if m, ok := b.by.spec.transform.(Mixer); ok && len(b.rows) > 0 && b.ctx.Err() == nil {
		b.mix(m, b.by.spec)
	}
	for i := range b.rows {
		bad, ok := errors.AsType[*badSample](b.rows[i].err)
		if ok {
			b.header.Bad = append(b.header.Bad, &feedpb.BadSample{Row: uint32(i), Id: uint64(bad.id), Path: bad.path,
				Cause: strings.ToValidUTF8(bad.err.Error(), "\ufffd")})
		}
		b.failed = b.failed || !ok && b.rows[i].err != nil
	}
	b.header.Valid = uint32(len(b.rows) - len(b.header.Bad))
	b.header.Draws = b.draws()
	b.by.pass.completed(b)
	b.endSpan()
	close(b.done)
}

// draws returns the draws field of the header, nil if no row is a picture.
func (b *batch) draws() []byte {
	if !slices.ContainsFunc(b.rows, func(r row) bool { return r.out.Width > 0 }) {
		return nil
	}
	out := make([]byte, 12*b.header.GetRows())
	for i := range b.rows {
		if r := &b.rows[i]; r.err == nil {
			for k, n := range [...]uint32{r.out.Width, r.out.Height, r.draw.Occurrence} {
				binary.LittleEndian.PutUint32(out[12*i+4*k:], n)
			}
		}
	}
	return out
}

// mix applies the transform's step over the whole batch; its rows are done.
func (b *batch) mix(m Mixer, sp *spec) {
	rows := make([]*Row, len(b.rows))
	for i := range b.rows {
		if b.rows[i].err == nil {
			rows[i] = &b.rows[i].out
		}
	}
	m.Mix(Draw{Seed: sp.seed, Epoch: b.header.GetEpoch(), Sample: b.header.GetIndex(),
		Occurrence: uint32(sp.rank)}, rows)
	for i, r := range rows {
		if r != nil {
			b.set(i, int64(b.rows[i].draw.Sample), r.Label, 1)
		}
	}
}

func (r *row) read(ctx context.Context, s *session) error {
	id := int(r.draw.Sample)
	s.count.fetch.Add(1)
	data, release, err := r.batch.source.read(ctx, r.pos)
	beside := parts{s: s, r: r}
	if err == nil {
		defer release()
		defer beside.release()
		err = beside.read(ctx)
	}
	s.count.fetch.Add(-1)
	if err != nil {
		return fmt.Errorf("sample %d (%s): %w", id, s.ds.Path(id), err)
	}
	s.count.sourceBytes.Add(int64(len(data)))
	told, _ := beside.find(s.spec.label.part())
	if r.out.Label, err = s.spec.label.of(r.out.Label, told); err != nil {
		return &badSample{id, s.ds.Path(id), err}
	}
	if s.spec.transform == nil {
		dst := r.out.Fields[0]
		if len(data) != len(dst) {
			return refused("sample %d (%s): %d bytes where the dataset's version has %d: refresh the dataset",
				id, s.ds.Path(id), len(data), len(dst))
		}
		copy(dst, data)
		return nil
	}
	select {
	case s.srv.cpu <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	start := time.Now()
	s.count.decode.Add(1)
	if err = ctx.Err(); err == nil {
		part := func(ext string) ([]byte, error) { return beside.apply(ctx, ext) }
		err = s.spec.transform.Make(Sample{Data: data, Part: part}, r.draw, &r.out)
	}
	s.count.decode.Add(-1)
	s.srv.decoding.Record(time.Since(start))
	<-s.srv.cpu
	if beside.err != nil {
		return fmt.Errorf("sample %d (%s): %w", id, s.ds.Path(id), beside.err)
	}
	if err != nil && ctx.Err() == nil {
		return &badSample{id, s.ds.Path(id), err}
	}
	return err
}

// settle applies a session's policy to a finished batch: quota is the number of bad samples allowed in the epoch,
// of which badSoFar were in earlier batches. It returns the error that ends the stream, if any.
func (b *batch) settle(sp *spec, quota int, badSoFar *int) error {
	for i := range b.rows {
		r := &b.rows[i]
		if r.err == nil {
			continue
		}
		bad, ok := errors.AsType[*badSample](r.err)
		if !ok {
			return r.err
		}
		if *badSoFar++; *badSoFar > quota {
			if quota == 0 {
				return fmt.Errorf(`%w (repair or remove it, or open the feed with bad="skip:0.1%%")`, bad)
			}
			return fmt.Errorf("%w: more than the %d that %s allows in epoch %d",
				bad, quota, sp.bad.text, b.header.GetEpoch())
		}
	}
	return nil
}

// headerAfter returns the header for a session that has skipped this many bad samples of the epoch, including
// this batch's.
func (b *batch) headerAfter(bad int) *feedpb.BatchHeader {
	if bad == 0 {
		return b.header
	}
	h := proto.CloneOf(b.header) // other sessions may send it, with counts of their own
	state := b.state
	state.Bad = bad
	h.State = state.JSON()
	return h
}
