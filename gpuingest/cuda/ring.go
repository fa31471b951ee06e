//go:build cuda

package cuda

import (
	"errors"
	"fmt"
	"unsafe"

	"gorgonia.org/cu"

	"github.com/shoalfs/shoal/gpuingest"
	"github.com/shoalfs/shoal/gpuingest/cuda/nvtx"
)

const lanes = 2 // batches at once on the device: while the kernel works on one, the next is copied

// lane is a stream of work with memory for the rows as they arrive.
type lane struct {
	stream cu.Stream
	rows   cu.DevicePtr
}

// Ring is a relay.Ring of cmd/shoal-gpu.
type Ring struct {
	d           *Device
	slots       []byte
	slotBytes   int
	bufferBytes int
	pinned      bool
	region      *region
	lanes       [lanes]lane
	ready       []cu.Event // by buffer: its batch is complete
	free        []cu.Event // by buffer: its user is done with it
	graphs      map[graphKey]*graph
	tables      map[*gpuingest.Finish]cu.DevicePtr
	// launched before: drivers load a kernel at its first launch, which a capture does not allow
	ran map[*gpuingest.Finish]bool
}

// graphKey is everything that the addresses in a graph depend on.
type graphKey struct {
	slot, buffer int
	job          *gpuingest.Job
}

// NewRing makes buffers of bufferBytes each, to which batches go from slots of slotBytes each. The slots' memory must
// stay mapped until End. If it fails it holds nothing, and the caller can go on without the device.
func (d *Device) NewRing(slots []byte, slotBytes, buffers, bufferBytes int) (*Ring, error) {
	if slotBytes < 1 || len(slots) == 0 || len(slots)%slotBytes != 0 || buffers < 1 || bufferBytes < 1 {
		return nil, fmt.Errorf("cuda: a ring of %d buffers of %d bytes over slots of %d in %d bytes",
			buffers, bufferBytes, slotBytes, len(slots))
	}
	r := &Ring{d: d, slots: slots, slotBytes: slotBytes, graphs: map[graphKey]*graph{},
		tables: map[*gpuingest.Finish]cu.DevicePtr{}, ran: map[*gpuingest.Finish]bool{}}
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
			if l.stream, err = cu.MakeStream(cu.NonBlocking); err != nil {
				return fail("cuStreamCreate", err)
			}
			// The kernel reads whole words.
			if l.rows, err = cu.MemAlloc(int64(slotBytes+3) / 4 * 4); err != nil {
				return fail(fmt.Sprintf("cuMemAlloc of %d bytes", slotBytes), err)
			}
		}
		for range buffers {
			for _, list := range []*[]cu.Event{&r.ready, &r.free} {
				e, err := cu.MakeEvent(cu.DisableTiming | cu.InterprocessEvent | cu.BlockingSyncEvent)
				if err != nil {
					return fail("cuEventCreate", err)
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
		return fmt.Errorf("cuda: a ring of %d slots and %d buffers has no slot %d or no buffer %d",
			len(r.slots)/r.slotBytes, len(r.ready), slot, buffer)
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
		err := r.free[buffer].Query()
		free = err == nil
		if errors.Is(err, cu.NotReady) {
			return nil
		}
		return fail("cuEventQuery", err)
	})
	return free, err
}

// Start implements relay.Ring.
func (r *Ring) Start(slot, buffer int, j *gpuingest.Job) error {
	if err := r.check(slot, buffer); err != nil {
		return err
	}
	src := r.slots[slot*r.slotBytes:][:r.slotBytes]
	if err := j.Check(src, r.bufferBytes); err != nil {
		return err
	}
	defer nvtx.Range("shoal: queue copy and kernel")()
	l := &r.lanes[buffer%lanes]
	dst := r.region.at + cu.DevicePtr(buffer*r.bufferBytes)
	return r.d.do(func() error {
		table, err := r.table(j.Finish)
		if err != nil {
			return err
		}
		if err := r.launch(graphKey{slot, buffer, j}, l, func() error {
			return r.queue(l, src, dst, table, j)
		}); err != nil {
			return err
		}
		return fail("cuEventRecord", r.ready[buffer].Record(l.stream))
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
func (r *Ring) queue(l *lane, src []byte, dst cu.DevicePtr, table cu.DevicePtr, j *gpuingest.Job) error {
	copyIn := func(to cu.DevicePtr, from, n int) error {
		if n == 0 {
			return nil
		}
		return fail("cuMemcpyHtoDAsync", cu.MemcpyHtoDAsync(to, unsafe.Pointer(&src[from]), int64(n), l.stream))
	}
	for _, c := range merged(j.Copies) {
		if err := copyIn(dst+cu.DevicePtr(c.To), c.From, c.Bytes); err != nil {
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
		if err := copyIn(l.rows+cu.DevicePtr(c.To), c.From, c.Bytes); err != nil {
			return err
		}
	}
	return r.d.launchFinish(l.stream, j, dst+cu.DevicePtr(j.Target), l.rows+cu.DevicePtr(j.Source),
		l.rows+cu.DevicePtr(j.Params), table)
}

// launchFinish queues the kernel.
func (d *Device) launchFinish(s cu.Stream, j *gpuingest.Job, dst, src, rows, table cu.DevicePtr) error {
	f := j.Finish
	fn, err := d.function(f)
	if err != nil {
		return err
	}
	args := [9]uint64{uint64(dst), uint64(src), uint64(rows), uint64(table),
		uint64(j.Rows), uint64(f.Height), uint64(f.Width), uint64(f.SourceHeight), uint64(f.SourceWidth)}
	params := make([]unsafe.Pointer, len(args))
	for i := range args {
		params[i] = unsafe.Pointer(&args[i]) // Launch reads eight bytes of each
	}
	const threads = 256
	groups := j.Rows * f.Height * ((f.Width + 3) / 4) // a thread computes four pixels
	blocks := min((groups+threads-1)/threads, d.blocks)
	return fail("cuLaunchKernel", fn.Launch(blocks, 1, 1, threads, 1, 1, 0, s, params))
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

// table returns the address of the values' table on the device.
func (r *Ring) table(f *gpuingest.Finish) (cu.DevicePtr, error) {
	if f == nil || f.Table == nil {
		return 0, nil
	}
	if at, ok := r.tables[f]; ok {
		return at, nil
	}
	at, err := cu.MemAlloc(int64(len(f.Table)))
	if err != nil {
		return 0, fail("cuMemAlloc of a table", err)
	}
	r.tables[f] = at
	return at, fail("cuMemcpyHtoD", cu.MemcpyHtoD(at, unsafe.Pointer(&f.Table[0]), int64(len(f.Table))))
}

// Wait implements relay.Ring.
func (r *Ring) Wait(buffer int) error {
	if err := r.check(0, buffer); err != nil {
		return err
	}
	defer nvtx.Range("shoal: wait for the device")()
	return r.d.do(func() error { return fail("cuEventSynchronize", r.ready[buffer].Synchronize()) })
}

// End implements relay.Ring. If it cannot wait for the device, it frees nothing, since the device may still use it.
func (r *Ring) End() error {
	return r.d.do(func() error {
		for _, l := range r.lanes {
			if l.stream != (cu.Stream{}) {
				if err := l.stream.Synchronize(); err != nil {
					return fail("cuStreamSynchronize", err)
				}
			}
		}
		var errs []error
		for _, g := range r.graphs {
			errs = append(errs, g.close())
		}
		for _, l := range r.lanes {
			if l.stream != (cu.Stream{}) {
				errs = append(errs, fail("cuStreamDestroy", l.stream.Destroy()))
			}
			if l.rows != 0 {
				errs = append(errs, fail("cuMemFree", cu.MemFree(l.rows)))
			}
		}
		for _, at := range r.tables {
			errs = append(errs, fail("cuMemFree", cu.MemFree(at)))
		}
		if r.pinned {
			errs = append(errs, unpin(r.slots))
		}
		r.slots, r.pinned, r.lanes, r.graphs, r.tables = nil, false, [lanes]lane{}, nil, nil
		return errors.Join(errs...)
	})
}

// Close implements relay.Ring.
func (r *Ring) Close() error {
	errs := []error{r.End()}
	if r.slots != nil {
		return errs[0]
	}
	return r.d.do(func() error {
		for _, list := range [][]cu.Event{r.ready, r.free} {
			for i := range list {
				errs = append(errs, fail("cuEventDestroy", cu.DestroyEvent(&list[i])))
			}
		}
		if r.region != nil {
			errs = append(errs, r.region.close())
		}
		*r = Ring{d: r.d, slotBytes: r.slotBytes}
		return errors.Join(errs...)
	})
}
