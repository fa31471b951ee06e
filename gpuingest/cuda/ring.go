//go:build cuda

package cuda

// #include <cuda.h>
import "C"

import (
	"errors"
	"fmt"
	"unsafe"

	"github.com/shoalfs/shoal/gpuingest"
	"github.com/shoalfs/shoal/gpuingest/cuda/nvtx"
)

// lanes is how many batches the device processes at once: while the kernel works on one, the next is copied.
const lanes = 2

// lane is a stream of work with memory for the rows as they arrive.
type lane struct {
	stream C.CUstream
	rows   C.CUdeviceptr
}

// Ring is a gpuingest.Ring whose buffers can be handed over to another process.
type Ring struct {
	d           *Device
	slots       []byte
	slotBytes   int
	bufferBytes int
	pinned      bool
	region      *region
	lanes       [lanes]lane
	ready       []C.CUevent // by buffer: its batch is complete
	free        []C.CUevent // by buffer: its user is done with it
	graphs      map[graphKey]*graph
	tables      map[*gpuingest.Finish]C.CUdeviceptr
	ran         map[*gpuingest.Finish]bool // launched before: drivers load a kernel at its first launch, which a capture does not allow
}

// graphKey is everything that the addresses in a graph depend on.
type graphKey struct {
	slot, buffer int
	job          *gpuingest.Job
}

// NewRing makes buffers of bufferBytes each, to which batches go from slots, as gpuingest.HostRing does. If it fails it
// holds nothing, and the caller can go on without the device.
func (d *Device) NewRing(slots []byte, slotBytes, buffers, bufferBytes int) (*Ring, error) {
	if err := gpuingest.CheckRing(slots, slotBytes, buffers, bufferBytes); err != nil {
		return nil, err
	}
	r := &Ring{d: d, slots: slots, slotBytes: slotBytes, graphs: map[graphKey]*graph{},
		tables: map[*gpuingest.Finish]C.CUdeviceptr{}, ran: map[*gpuingest.Finish]bool{}}
	err := d.do(func() error {
		unit, err := granularity(d.dev)
		if err != nil {
			return err
		}
		r.bufferBytes = (bufferBytes + unit - 1) / unit * unit
		if r.region, err = newRegion(d.dev, buffers, r.bufferBytes); err != nil {
			return err
		}
		for i := range r.lanes {
			l := &r.lanes[i]
			if err := check("cuStreamCreate", C.cuStreamCreate(&l.stream, C.CU_STREAM_NON_BLOCKING)); err != nil {
				return err
			}
			// The kernel reads whole words.
			if l.rows, err = alloc((slotBytes + 3) / 4 * 4); err != nil {
				return err
			}
		}
		for range buffers {
			for _, list := range []*[]C.CUevent{&r.ready, &r.free} {
				e, err := newEvent(C.CU_EVENT_DISABLE_TIMING | C.CU_EVENT_INTERPROCESS | C.CU_EVENT_BLOCKING_SYNC)
				if err != nil {
					return err
				}
				*list = append(*list, e)
			}
		}
		if err := pin(slots); err != nil {
			return fmt.Errorf("page-lock %d bytes of slots (see `ulimit -l`): %w", len(slots), err)
		}
		r.pinned = true
		return nil
	})
	if err != nil {
		return nil, errors.Join(err, r.Close())
	}
	return r, nil
}

// BufferBytes is the size of a buffer: the requested size, rounded up to the device's granularity.
func (r *Ring) BufferBytes() int { return r.bufferBytes }

// Export returns a descriptor of each buffer's memory, which the caller closes, and handles of its events.
func (r *Ring) Export() (fds []int, ready, free [][]byte, err error) {
	err = r.d.do(func() error {
		for i := range r.ready {
			fd, err := r.region.export(i)
			if err != nil {
				return err
			}
			fds = append(fds, fd)
			a, err := handle(r.ready[i])
			if err != nil {
				return err
			}
			b, err := handle(r.free[i])
			if err != nil {
				return err
			}
			ready, free = append(ready, a), append(free, b)
		}
		return nil
	})
	return fds, ready, free, err
}

func (r *Ring) check(slot, buffer int) error {
	if slot < 0 || slot >= len(r.slots)/r.slotBytes || buffer < 0 || buffer >= len(r.ready) {
		return fmt.Errorf("cuda: a ring of %d slots and %d buffers has no slot %d or no buffer %d", len(r.slots)/r.slotBytes, len(r.ready), slot, buffer)
	}
	return nil
}

// Free reports whether the work is over after which another process recorded that a buffer is free; true if nothing was
// recorded. A copy into the buffer must not start before. The event is polled and not queued before the copy: if that
// process is killed, the event may never come, and queued work that waits for it could not be ended.
func (r *Ring) Free(buffer int) (free bool, err error) {
	if err := r.check(0, buffer); err != nil {
		return false, err
	}
	err = r.d.do(func() error {
		done := C.cuEventQuery(r.free[buffer])
		if free = done == C.CUDA_SUCCESS; done == C.CUDA_ERROR_NOT_READY {
			return nil
		}
		return check("cuEventQuery", done)
	})
	return free, err
}

// Start implements gpuingest.Ring.
func (r *Ring) Start(slot, buffer int, j *gpuingest.Job) error {
	if err := r.check(slot, buffer); err != nil {
		return err
	}
	src := r.slots[slot*r.slotBytes:][:r.slotBytes]
	if err := j.Check(len(src), r.bufferBytes); err != nil {
		return err
	}
	if err := j.CheckRows(src); err != nil {
		return err
	}
	defer nvtx.Range("shoal: queue copy and kernel")()
	l := &r.lanes[buffer%lanes]
	dst := r.region.at + C.CUdeviceptr(buffer*r.bufferBytes)
	return r.d.do(func() error {
		table, err := r.table(j.Finish)
		if err != nil {
			return err
		}
		if err := r.launch(graphKey{slot, buffer, j}, l, func() error { return r.queue(l, src, dst, table, j) }); err != nil {
			return err
		}
		if err := clearRows(l.stream, src, dst, j); err != nil {
			return err
		}
		return check("cuEventRecord", C.cuEventRecord(r.ready[buffer], l.stream))
	})
}

// launch makes the device do the work: through its graph if there is one.
func (r *Ring) launch(key graphKey, l *lane, work func() error) error {
	if f := key.job.Finish; !key.job.Again || !r.ran[f] {
		r.ran[f] = true
		return work()
	}
	g := r.graphs[key]
	if g == nil {
		var err error
		if g, err = capture(l.stream, work); err != nil {
			return err
		}
		r.graphs[key] = g
	}
	return g.launch(l.stream)
}

// queue queues the copies of a batch and the kernel.
func (r *Ring) queue(l *lane, src []byte, dst C.CUdeviceptr, table C.CUdeviceptr, j *gpuingest.Job) error {
	copyIn := func(to C.CUdeviceptr, from, n int) error {
		if n == 0 {
			return nil
		}
		return check("cuMemcpyHtoDAsync", C.cuMemcpyHtoDAsync(to, unsafe.Pointer(&src[from]), C.size_t(n), l.stream))
	}
	for _, c := range merged(j.Copies) {
		if err := copyIn(dst+C.CUdeviceptr(c.To), c.From, c.Bytes); err != nil {
			return err
		}
	}
	f := j.Finish
	if f == nil || j.Rows == 0 {
		return nil
	}
	// Rows have the same offsets on the device as in the slot, so that neighbours are copied together.
	for _, c := range merged([]gpuingest.Copy{{From: j.Source, To: j.Source, Bytes: j.Rows * f.SourceBytes()},
		{From: j.Params, To: j.Params, Bytes: j.Rows * gpuingest.ParamBytes}}) {
		if err := copyIn(l.rows+C.CUdeviceptr(c.To), c.From, c.Bytes); err != nil {
			return err
		}
	}
	return r.d.launchFinish(l.stream, j, dst+C.CUdeviceptr(j.Target), l.rows+C.CUdeviceptr(j.Source), l.rows+C.CUdeviceptr(j.Params), table)
}

// launchFinish queues the kernel.
func (d *Device) launchFinish(s C.CUstream, j *gpuingest.Job, dst, src, rows, table C.CUdeviceptr) error {
	f := j.Finish
	fn, err := d.function(f)
	if err != nil {
		return err
	}
	const threads = 256
	groups := j.Rows * f.Height * ((f.Width + 3) / 4) // a thread computes four pixels
	blocks := min((groups+threads-1)/threads, d.blocks)
	return launchKernel(fn, blocks, threads, s, []C.ulonglong{dst, src, rows, table,
		C.ulonglong(j.Rows), C.ulonglong(f.Height), C.ulonglong(f.Width), C.ulonglong(f.SourceHeight), C.ulonglong(f.SourceWidth)})
}

// merged joins copies that are adjacent on both sides within about a cache line: copying the gap is cheaper than
// another transfer.
func merged(list []gpuingest.Copy) []gpuingest.Copy {
	const gap = 256
	var out []gpuingest.Copy
	for _, c := range list {
		if k := len(out) - 1; k >= 0 {
			last := &out[k]
			end := last.From + last.Bytes
			if c.From-c.To == last.From-last.To && c.From >= end && c.From-end <= gap {
				last.Bytes = c.From + c.Bytes - last.From
				continue
			}
		}
		out = append(out, c)
	}
	return out
}

// clearRows zeroes rows without a sample.
func clearRows(s C.CUstream, src []byte, dst C.CUdeviceptr, j *gpuingest.Job) error {
	if j.Finish == nil {
		return nil
	}
	n := j.Finish.RowBytes()
	for from := 0; from < j.Rows; from++ {
		to := from
		for to < j.Rows && j.Row(src, to).Flags&gpuingest.Filled == 0 {
			to++
		}
		if to > from {
			at := dst + C.CUdeviceptr(j.Target+from*n)
			if err := check("cuMemsetD8Async", C.cuMemsetD8Async(at, 0, C.size_t((to-from)*n), s)); err != nil {
				return err
			}
			from = to
		}
	}
	return nil
}

// table returns the address of the values' table on the device.
func (r *Ring) table(f *gpuingest.Finish) (C.CUdeviceptr, error) {
	if f == nil || f.Table == nil {
		return 0, nil
	}
	if at, ok := r.tables[f]; ok {
		return at, nil
	}
	at, err := alloc(len(f.Table))
	if err != nil {
		return 0, err
	}
	r.tables[f] = at
	return at, check("cuMemcpyHtoD", C.cuMemcpyHtoD(at, unsafe.Pointer(&f.Table[0]), C.size_t(len(f.Table))))
}

// Wait implements gpuingest.Ring.
func (r *Ring) Wait(buffer int) error {
	if err := r.check(0, buffer); err != nil {
		return err
	}
	defer nvtx.Range("shoal: wait for the device")()
	return r.d.do(func() error { return check("cuEventSynchronize", C.cuEventSynchronize(r.ready[buffer])) })
}

// Read implements gpuingest.Ring.
func (r *Ring) Read(buffer int, p []byte) error {
	if err := r.check(0, buffer); err != nil {
		return err
	}
	if len(p) == 0 || len(p) > r.bufferBytes {
		return fmt.Errorf("cuda: %d bytes of a buffer of %d", len(p), r.bufferBytes)
	}
	return r.d.do(func() error {
		return check("cuMemcpyDtoH", C.cuMemcpyDtoH(unsafe.Pointer(&p[0]), r.region.at+C.CUdeviceptr(buffer*r.bufferBytes), C.size_t(len(p))))
	})
}

// Close implements gpuingest.Ring. If it cannot wait for the device, it frees nothing, since the device may still use
// it.
func (r *Ring) Close() error {
	return r.d.do(func() error {
		var errs []error
		for i := range r.lanes {
			if l := &r.lanes[i]; l.stream != nil {
				if err := check("cuStreamSynchronize", C.cuStreamSynchronize(l.stream)); err != nil {
					return err
				}
			}
		}
		for i := range r.lanes {
			if l := &r.lanes[i]; l.stream != nil {
				errs = append(errs, check("cuStreamDestroy", C.cuStreamDestroy(l.stream)))
			}
		}
		for _, g := range r.graphs {
			errs = append(errs, g.close())
		}
		for i := range r.lanes {
			if l := &r.lanes[i]; l.rows != 0 {
				errs = append(errs, check("cuMemFree", C.cuMemFree(l.rows)))
			}
		}
		for _, at := range r.tables {
			errs = append(errs, check("cuMemFree", C.cuMemFree(at)))
		}
		for _, list := range [][]C.CUevent{r.ready, r.free} {
			for _, e := range list {
				errs = append(errs, check("cuEventDestroy", C.cuEventDestroy(e)))
			}
		}
		if r.region != nil {
			errs = append(errs, r.region.close())
		}
		if r.pinned {
			errs = append(errs, unpin(r.slots))
		}
		*r = Ring{d: r.d, slotBytes: r.slotBytes}
		return errors.Join(errs...)
	})
}
