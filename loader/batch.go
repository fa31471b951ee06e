package loader

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/shoalfs/shoal/loader/feedpb"
)

// IgnoredLabel is the label of rows without a usable sample: what torch's losses skip by default
// (ignore_index), so that padding does not enter a loss even if the trainer never looks at valid.
const IgnoredLabel = -100

// The names of planes.
const (
	planeData    = "data"
	planeLabel   = "label"
	planeID      = "id"
	planeValid   = "valid"
	planeOffsets = "offsets"
)

// numpyName translates the short names of element types.
func numpyName(dtype string) string {
	switch dtype {
	case "fp16":
		return "float16"
	case "bf16":
		return "bfloat16"
	case "fp32":
		return "float32"
	}
	return dtype
}

// planes lays out a batch of rows. dataBytes is the length of the data plane of raw samples. It
// returns the length of the whole.
func planes(t Transform, rows int, dataBytes int64) ([]*feedpb.Plane, int64) {
	var list []*feedpb.Plane
	var end int64
	add := func(name, dtype string, length int64, shape ...uint64) {
		off := alignUp(end)
		list = append(list, &feedpb.Plane{Name: name, Dtype: dtype, Shape: shape, Offset: uint64(off), Length: uint64(length)})
		end = off + length
	}
	n := uint64(rows)
	if t == nil {
		add(planeData, "uint8", dataBytes, uint64(dataBytes))
	} else {
		shape := []uint64{n}
		for _, d := range t.Shape() {
			shape = append(shape, uint64(d))
		}
		add(planeData, numpyName(t.DType()), int64(rows)*int64(t.OutBytes()), shape...)
	}
	add(planeLabel, "int64", 8*int64(rows), n)
	add(planeID, "int64", 8*int64(rows), n)
	add(planeValid, "uint8", int64(rows), n)
	if t == nil {
		add(planeOffsets, "uint64", 8*int64(rows+1), n+1)
	}
	return list, end
}

// batch is one batch on its way. Its rows are filled by workers, each row by one.
type batch struct {
	header  *feedpb.BatchHeader
	quota   int // of bad samples in the epoch
	rows    []row
	buf     *buffer
	planes  map[string][]byte
	pending atomic.Int32
	done    chan struct{} // closed when no row is pending
}

// row is one row that holds a sample.
type row struct {
	batch  *batch
	i      int
	source *source
	pos    int // in the source's order
	draw   Draw
	dst    []byte
	err    error
}

// source is one epoch's stream of samples, closed when nobody reads from it any more.
type source struct {
	stream Stream
	refs   atomic.Int32
}

func (s *source) drop() {
	if s.refs.Add(-1) == 0 {
		// There is nobody to tell: all that was asked for has been read.
		_ = s.stream.Close()
	}
}

// newBatch reserves and lays out batch k of an epoch. All is filled in but what the workers write.
func (s *session) newBatch(ctx context.Context, p plan, k, epoch int, src *source) (*batch, error) {
	ds, sp := s.ds, s.spec
	rows, samples := p.rows(k), p.samples(k)
	ids := make([]int, samples)
	var dataBytes int64
	for i := range ids {
		ids[i] = p.seq.At(p.pos(k) + i)
		if sp.transform == nil {
			dataBytes += ds.Size(ids[i])
		}
	}
	list, total := planes(sp.transform, rows, dataBytes)
	if total > s.srv.o.MaxBatchBytes {
		return nil, coded(codes.ResourceExhausted, fmt.Errorf("batch %d of epoch %d has %d bytes, more than the server's limit of %d: lower the batch size",
			p.index(k), epoch, total, s.srv.o.MaxBatchBytes))
	}
	if err := s.srv.memory.Reserve(ctx, bufferSize(total)); err != nil {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		return nil, coded(codes.ResourceExhausted, fmt.Errorf("a batch of %d samples needs %d bytes: %w", rows, total, err))
	}
	b := &batch{
		header: &feedpb.BatchHeader{Index: uint64(p.index(k)), Epoch: uint32(epoch), Rows: uint32(rows), TotalBytes: uint64(total),
			Planes: list, State: sp.state(ds, epoch, p.after(k)).JSON()},
		quota: sp.bad.allows(p.seq.Len()),
		rows:  make([]row, samples),
		buf:   s.newBuffer(total), planes: make(map[string][]byte, len(list)),
		done: make(chan struct{}),
	}
	var end uint64
	for _, pl := range list {
		clear(b.buf.data[end:pl.Offset]) // the gap: never send what another batch left behind
		end = pl.Offset + pl.Length
		b.planes[pl.Name] = b.buf.data[pl.Offset:end:end]
	}
	var off int64
	for i, id := range ids {
		var length int64
		if sp.transform == nil {
			length = ds.Size(id)
			binary.LittleEndian.PutUint64(b.planes[planeOffsets][8*i:], uint64(off))
		} else {
			length = int64(sp.transform.OutBytes())
		}
		pos := p.pos(k) + i
		b.rows[i] = row{batch: b, i: i, source: src, pos: pos, dst: b.planes[planeData][off : off+length : off+length],
			draw: Draw{sp.seed, uint32(epoch), uint64(id), uint32(p.globalPos(pos) / max(ds.Len(), 1))}}
		b.set(i, int64(id), int64(ds.Label(id)), true)
		off += length
	}
	clear(b.planes[planeData][off:])
	for i := samples; i < rows; i++ {
		b.set(i, -1, IgnoredLabel, false)
	}
	if sp.transform == nil {
		for i := samples; i <= rows; i++ {
			binary.LittleEndian.PutUint64(b.planes[planeOffsets][8*i:], uint64(off))
		}
	}
	b.pending.Store(int32(samples))
	if samples == 0 {
		close(b.done)
	}
	src.refs.Add(int32(samples))
	return b, nil
}

// set writes a row's small planes.
func (b *batch) set(i int, id, label int64, valid bool) {
	binary.LittleEndian.PutUint64(b.planes[planeID][8*i:], uint64(id))
	binary.LittleEndian.PutUint64(b.planes[planeLabel][8*i:], uint64(label))
	b.planes[planeValid][i] = 0
	if valid {
		b.planes[planeValid][i] = 1
	}
}

// fill reads and transforms the row's sample.
func (r *row) fill(ctx context.Context, s *session) {
	if r.err = ctx.Err(); r.err == nil {
		r.err = r.read(ctx, s)
	}
	r.source.drop()
	if r.batch.pending.Add(-1) == 0 {
		close(r.batch.done)
	}
}

func (r *row) read(ctx context.Context, s *session) error {
	id := int(r.draw.Sample)
	start := time.Now()
	data, release, err := r.source.stream.Read(ctx, r.pos)
	s.count.fetch.add(time.Since(start))
	if err != nil {
		return fmt.Errorf("sample %d (%s): %w", id, s.ds.Path(id), err)
	}
	defer release()
	s.count.sourceBytes.Add(int64(len(data)))
	if s.spec.transform == nil {
		if len(data) != len(r.dst) {
			return coded(codes.FailedPrecondition, fmt.Errorf("sample %d (%s): %d bytes where the dataset's version has %d: refresh the dataset",
				id, s.ds.Path(id), len(data), len(r.dst)))
		}
		copy(r.dst, data)
		return nil
	}
	select {
	case s.srv.cpu <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	start = time.Now()
	err = s.spec.transform.Apply(ctx, data, r.draw, r.dst)
	s.count.decode.add(time.Since(start))
	<-s.srv.cpu
	if err != nil && ctx.Err() == nil {
		return &badSample{id, s.ds.Path(id), err}
	}
	return err
}

// settle applies the policy to a batch whose rows are done: bad rows become zeros and are reported.
// It returns the error that ends the stream, if one does. badSoFar counts the epoch's.
func (b *batch) settle(s *session, badSoFar *int) error {
	for i := range b.rows {
		r := &b.rows[i]
		if r.err == nil {
			continue
		}
		var bad *badSample
		if !errors.As(r.err, &bad) {
			return r.err
		}
		if *badSoFar++; *badSoFar > b.quota {
			if b.quota == 0 {
				return fmt.Errorf(`%w (repair or remove it, or open the feed with bad="skip:0.1%%")`, bad)
			}
			return fmt.Errorf("%w: more than the %d that %s allows in epoch %d", bad, b.quota, s.spec.bad.text, b.header.GetEpoch())
		}
		clear(r.dst)
		b.set(r.i, int64(bad.id), IgnoredLabel, false)
		b.header.Bad = append(b.header.Bad, &feedpb.BadSample{Row: uint32(r.i), Id: uint64(bad.id), Path: bad.path, Cause: bad.err.Error()})
	}
	b.header.Valid = uint32(len(b.rows) - len(b.header.Bad))
	return nil
}

// duration adds up time in nanoseconds.
type duration struct{ atomic.Int64 }

func (d *duration) add(t time.Duration) { d.Add(int64(t)) }

func (d *duration) seconds() float64 { return math.Round(float64(d.Load())/1e3) / 1e6 }
