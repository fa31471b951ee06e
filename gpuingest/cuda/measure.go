//go:build cuda

package cuda

import (
	"errors"
	"fmt"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
	"gorgonia.org/cu"

	"github.com/shoalfs/shoal/gpuingest"
)

// Software reports whether the driver is the software one for tests: its figures are not a GPU's.
func (d *Device) Software() bool { return strings.Contains(strings.ToLower(d.model), "software") }

// Shape is the workload of Measure: batches of rows of height x width uint8 pictures that become DType in Layout.
type Shape struct {
	Rows, Height, Width int
	DType, Layout       string
	Step                time.Duration // of the trainer's compute
	Steps               int
	Repeat              int // copies, kernels and batches that are timed together
}

// Figures are the results of Measure. Bandwidths are in 10^9 bytes a second.
type Figures struct {
	PlainH2D   float64 `json:"plain_h2d_gb_s"`   // cuMemcpyHtoDAsync from page-locked memory, back to back
	RingH2D    float64 `json:"ring_h2d_gb_s"`    // the ring's batches, while kernels run
	H2DShare   float64 `json:"ring_of_plain"`    // the latter of the former
	Copy       float64 `json:"device_copy_gb_s"` // cuMemcpyDtoD, reads and writes counted
	Peak       float64 `json:"peak_gb_s"`        // of the memory, by its clock and width; 0 if the driver does not say
	Kernel     float64 `json:"kernel_gb_s"`      // the fused kernel, reads and writes counted
	KernelPeak float64 `json:"kernel_of_peak"`
	KernelCopy float64 `json:"kernel_of_copy"`
	StepAlone  float64 `json:"step_alone_ms"` // compute without a feed
	StepFed    float64 `json:"step_fed_ms"`   // compute while the next batch is copied
	Stall      float64 `json:"stall"`         // the difference, as a share of the step alone
}

// Measure measures the device. Its compute is also the fused kernel, repeated for the length of a step: it uses all of
// the memory's bandwidth, so copies compete with it more than with most training.
func (d *Device) Measure(s Shape) (f Figures, err error) {
	h, err := gpuingest.Split(fmt.Sprintf("CenterCrop((%d, %d))|%s|%s", s.Height, s.Width, s.DType, s.Layout))
	if err != nil {
		return f, err
	}
	j := &gpuingest.Job{Rows: s.Rows, Finish: h.Finish(), Again: true}
	in := s.Rows * j.Finish.SourceBytes()
	j.Params = (in + 63) / 64 * 64
	page := unix.Getpagesize()
	slotBytes := (j.Params + s.Rows*gpuingest.ParamBytes + page - 1) / page * page
	out := s.Rows * j.Finish.RowBytes()
	const slots, buffers = 4, 4
	mem, err := unix.Mmap(-1, 0, slots*slotBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|
		unix.MAP_POPULATE)
	if err != nil {
		return f, fmt.Errorf("memory for %d slots of %d bytes: %w", slots, slotBytes, err)
	}
	defer func() { err = errors.Join(err, unix.Munmap(mem)) }()
	for i := range slots {
		for k := range s.Rows {
			gpuingest.RowParams{Flags: gpuingest.Filled | uint32(k)&gpuingest.Flip}.Put(
				mem[i*slotBytes+j.Params+k*gpuingest.ParamBytes:])
		}
	}
	ring, err := d.NewRing(mem, slotBytes, buffers, out)
	if err != nil {
		return f, err
	}
	defer func() { err = errors.Join(err, ring.Close()) }()
	m := &meter{d: d, ring: ring, job: j, in: in, out: out}
	if err := m.open(); err != nil {
		return f, errors.Join(err, m.close())
	}
	defer func() { err = errors.Join(err, m.close()) }()
	return m.all(s)
}

// meter holds what the measurements need besides a ring.
type meter struct {
	d        *Device
	ring     *Ring
	job      *gpuingest.Job
	in, out  int
	stream   cu.Stream
	from, to cu.Event
	src, dst cu.DevicePtr // of compute: a batch, and the kernel's result
}

func (m *meter) open() error {
	return m.d.do(func() error {
		var err error
		if m.stream, err = cu.MakeStream(cu.NonBlocking); err != nil {
			return fail("cuStreamCreate", err)
		}
		for _, e := range []*cu.Event{&m.from, &m.to} {
			if *e, err = cu.MakeEvent(cu.BlockingSyncEvent); err != nil {
				return fail("cuEventCreate", err)
			}
		}
		for p, n := range map[*cu.DevicePtr]int{&m.src: m.ring.slotBytes, &m.dst: max(m.out, m.ring.slotBytes)} {
			if *p, err = cu.MemAlloc(int64(n)); err != nil {
				return fail("cuMemAlloc", err)
			}
		}
		return fail("cuMemcpyHtoD", cu.MemcpyHtoD(m.src, unsafe.Pointer(&m.ring.slots[0]), int64(m.ring.slotBytes)))
	})
}

func (m *meter) close() error {
	return m.d.do(func() error {
		var errs []error
		if m.stream != (cu.Stream{}) {
			errs = append(errs, fail("cuStreamSynchronize", m.stream.Synchronize()),
				fail("cuStreamDestroy", m.stream.Destroy()))
		}
		for _, e := range []*cu.Event{&m.from, &m.to} {
			if *e != (cu.Event{}) {
				errs = append(errs, fail("cuEventDestroy", cu.DestroyEvent(e)))
			}
		}
		for _, p := range []cu.DevicePtr{m.src, m.dst} {
			if p != 0 {
				errs = append(errs, fail("cuMemFree", cu.MemFree(p)))
			}
		}
		return errors.Join(errs...)
	})
}

// timed returns the device's time for the work that work queues on the meter's stream, after a warm-up.
func (m *meter) timed(n int, work func() error) (time.Duration, error) {
	var took time.Duration
	err := m.d.do(func() error {
		if err := work(); err != nil { // warm
			return err
		}
		if err := m.from.Record(m.stream); err != nil {
			return fail("cuEventRecord", err)
		}
		for range n {
			if err := work(); err != nil {
				return err
			}
		}
		if err := errors.Join(m.to.Record(m.stream), m.to.Synchronize()); err != nil {
			return fail("cuEventSynchronize", err)
		}
		ms, err := m.from.Elapsed(m.to)
		took = time.Duration(ms * float64(time.Millisecond) / float64(n))
		return fail("cuEventElapsedTime", err)
	})
	return max(took, 1), err
}

// kernel queues one run of the fused kernel.
func (m *meter) kernel() error {
	table, err := m.ring.table(m.job.Finish)
	if err != nil {
		return err
	}
	return m.d.launchFinish(m.stream, m.job, m.dst, m.src, m.src+cu.DevicePtr(m.job.Params), table)
}

func (m *meter) all(s Shape) (f Figures, err error) {
	rate := func(bytes int, t time.Duration) float64 { return float64(bytes) / 1e9 / t.Seconds() }
	t, err := m.timed(s.Repeat, func() error {
		return fail("cuMemcpyHtoDAsync",
			cu.MemcpyHtoDAsync(m.src, unsafe.Pointer(&m.ring.slots[0]), int64(m.ring.slotBytes), m.stream))
	})
	if err != nil {
		return f, err
	}
	f.PlainH2D = rate(m.ring.slotBytes, t)
	if t, err = m.timed(s.Repeat, func() error {
		return fail("cuMemcpyDtoDAsync", cu.MemcpyDtoDAsync(m.dst, m.src, int64(m.ring.slotBytes), m.stream))
	}); err != nil {
		if !m.d.Software() { // which has no such call
			return f, err
		}
	} else {
		f.Copy = rate(2*m.ring.slotBytes, t)
	}
	clock, err1 := m.d.dev.Attribute(cu.MemoryClockRate)
	width, err2 := m.d.dev.Attribute(cu.GlobalMemoryBusWidth)
	if errors.Join(err1, err2) == nil {
		f.Peak = 2 * float64(clock) * 1e3 * float64(width) / 8 / 1e9
	}
	step, err := m.timed(s.Repeat, m.kernel)
	if err != nil {
		return f, err
	}
	f.Kernel = rate(m.in+m.out, step)
	if f.Peak > 0 {
		f.KernelPeak = f.Kernel / f.Peak
	}
	if f.Copy > 0 {
		f.KernelCopy = f.Kernel / f.Copy
	}
	if f.RingH2D, err = m.ringRate(s.Repeat); err != nil {
		return f, err
	}
	f.H2DShare = f.RingH2D / f.PlainH2D

	kernels := max(1, int(s.Step/step))
	alone, err := m.steps(s.Steps, kernels, false)
	if err != nil {
		return f, err
	}
	fed, err := m.steps(s.Steps, kernels, true)
	if err != nil {
		return f, err
	}
	f.StepAlone, f.StepFed = 1e3*alone.Seconds(), 1e3*fed.Seconds()
	f.Stall = (fed - alone).Seconds() / alone.Seconds()
	return f, nil
}

// ringRate is the rate of n batches through the ring, by the host's clock, once all graphs are made.
func (m *meter) ringRate(n int) (float64, error) {
	buffers := len(m.ring.ready)
	pass := func(n int) error {
		for i := range n {
			if i >= buffers {
				if err := m.ring.Wait(i % buffers); err != nil {
					return err
				}
			}
			if err := m.ring.Start(i%buffers, i%buffers, m.job); err != nil {
				return err
			}
		}
		for b := range min(buffers, n) {
			if err := m.ring.Wait(b); err != nil {
				return err
			}
		}
		return nil
	}
	if err := pass(3 * buffers); err != nil {
		return 0, err
	}
	begin := time.Now()
	if err := pass(n); err != nil {
		return 0, err
	}
	return float64(n) * float64(m.in+m.job.Rows*gpuingest.ParamBytes) / 1e9 / time.Since(begin).Seconds(), nil
}

// steps is the mean duration of a step: kernels of compute, with the next batch copied meanwhile if fed.
func (m *meter) steps(n, kernels int, fed bool) (time.Duration, error) {
	buffers := len(m.ring.ready)
	if fed {
		if err := m.ring.Start(0, 0, m.job); err != nil {
			return 0, err
		}
	}
	var begin time.Time
	for i := range n + 1 {
		if i == 1 { // the first step only warms
			begin = time.Now()
		}
		if fed {
			if err := m.ring.Wait(i % buffers); err != nil {
				return 0, err
			}
			if next := (i + 1) % buffers; i < n {
				if err := m.ring.Start(next, next, m.job); err != nil {
					return 0, err
				}
			}
		}
		err := m.d.do(func() error {
			for range kernels {
				if err := m.kernel(); err != nil {
					return err
				}
			}
			return fail("cuStreamSynchronize", m.stream.Synchronize())
		})
		if err != nil {
			return 0, err
		}
	}
	return time.Since(begin) / time.Duration(n), nil
}
