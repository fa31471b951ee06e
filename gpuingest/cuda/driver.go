//go:build cuda

package cuda

import (
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"

	"gorgonia.org/cu"

	"github.com/shoalfs/shoal/gpuingest"
	"github.com/shoalfs/shoal/gpuingest/cuda/kernel"
)

// minDriver is the oldest supported driver, in cuDriverGetVersion's units: cuGraphInstantiateWithFlags needs 11.4.
const minDriver = 11040

// Device is one GPU.
type Device struct {
	number int
	dev    cu.Device
	ctx    cu.CUContext
	module cu.Module
	blocks int // of a kernel that strides
	uuid   string
	model  string

	mu      sync.Mutex
	kernels map[string]cu.Function
}

// Open prepares device number n. Its errors wrap gpuingest.ErrNoDriver, ErrNoDevice or ErrDeviceMemory if they apply.
func Open(n int) (*Device, error) {
	if err := loaded(); err != nil {
		return nil, err
	}
	if v := cu.Version(); v < minDriver {
		return nil, fmt.Errorf(
			"cuda: %w: the driver supports CUDA %s, shoal-gpu needs %s or newer: install a newer NVIDIA driver",
			gpuingest.ErrNoDriver, version(v), version(minDriver))
	}
	count, err := cu.NumDevices()
	if err != nil {
		return nil, fail("cuDeviceGetCount", err)
	}
	if n < 0 || n >= count {
		return nil, fmt.Errorf(
			"cuda:%d: %w: the driver shows %d (see `nvidia-smi -L`; CUDA_VISIBLE_DEVICES hides devices)", n,
			gpuingest.ErrNoDevice, count)
	}
	d := &Device{number: n, kernels: map[string]cu.Function{}}
	if d.dev, err = cu.GetDevice(n); err != nil {
		return nil, fail("cuDeviceGet", err)
	}
	if err := d.describe(); err != nil {
		return nil, err
	}
	if d.ctx, err = d.dev.RetainPrimaryCtx(); err != nil {
		return nil, fail("cuDevicePrimaryCtxRetain", err)
	}
	err = d.do(func() error {
		var err error
		d.module, err = cu.LoadData(kernel.PTX)
		return fail("cuModuleLoadData of the kernel", err)
	})
	if err != nil {
		return nil, errors.Join(err, d.dev.ReleasePrimaryCtx())
	}
	return d, nil
}

// describe reads the device's properties, and checks that it is usable.
func (d *Device) describe() error {
	for _, a := range []struct {
		attr cu.DeviceAttribute
		what string
	}{{attrVMM, "virtual memory management"}, {attrPOSIX, "memory that is shared by descriptor"}} {
		if has, err := d.dev.Attribute(a.attr); err != nil {
			return fail("cuDeviceGetAttribute", err)
		} else if has == 0 {
			return fmt.Errorf("%s: %w with %s: use the GPU in the trainer instead (docs/gpu.md)",
				d.Name(), gpuingest.ErrNoDevice, a.what)
		}
	}
	sms, err := d.dev.Attribute(cu.MultiprocessorCount)
	if err != nil {
		return fail("cuDeviceGetAttribute", err)
	}
	// Eight blocks of 256 threads fill a multiprocessor; more would only load the table more often.
	d.blocks = 8 * max(sms, 1)
	if d.uuid, err = uuid(d.dev); err != nil {
		return err
	}
	if d.model, err = d.dev.Name(); err != nil {
		return fail("cuDeviceGetName", err)
	}
	d.model = strings.TrimRight(d.model, "\x00 ")
	return nil
}

// Name is "cuda:" and the number.
func (d *Device) Name() string { return fmt.Sprintf("cuda:%d", d.number) }

// UUID identifies the device, independent of its number in a process.
func (d *Device) UUID() string { return d.uuid }

// Model is the driver's name for the device.
func (d *Device) Model() string { return d.model }

// Close frees everything that the device holds, once. Its rings must be closed before.
func (d *Device) Close() error {
	err := d.do(func() error { return fail("cuModuleUnload", d.module.Unload()) })
	return errors.Join(err, fail("cuDevicePrimaryCtxRelease", d.dev.ReleasePrimaryCtx()))
}

// do runs f on a thread with the device's context.
func (d *Device) do(f func() error) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := cu.SetCurrentContext(d.ctx); err != nil {
		return fail("cuCtxSetCurrent", err)
	}
	return f()
}

// function returns the kernel for a type and layout.
func (d *Device) function(f *gpuingest.Finish) (cu.Function, error) {
	name := kernel.Name(f.Elem(), f.Layout)
	d.mu.Lock()
	defer d.mu.Unlock()
	if fn, ok := d.kernels[name]; ok {
		return fn, nil
	}
	fn, err := d.module.Function(name)
	if err != nil {
		return fn, fail("cuModuleGetFunction "+name, err)
	}
	d.kernels[name] = fn
	return fn, nil
}

func version(v int) string { return fmt.Sprintf("%d.%d", v/1000, v%1000/10) }

// fail names the failed call and, by the error it wraps, the remedy.
func fail(call string, err error) error {
	var kind error
	switch {
	case err == nil:
		return nil
	case errors.Is(err, cu.OutOfMemory):
		kind = gpuingest.ErrDeviceMemory
	case errors.Is(err, cu.NoDevice), errors.Is(err, cu.InvalidDevice):
		kind = gpuingest.ErrNoDevice
	case errors.Is(err, cu.InvalidPtx), errors.Is(err, cu.NoBinaryForGpu), errors.Is(err, cu.NotFound):
		kind = gpuingest.ErrNoDriver
	default:
		return fmt.Errorf("cuda: %s: %w", call, err)
	}
	return fmt.Errorf("cuda: %w: %s: %w", kind, call, err)
}
