//go:build cuda

package cuda

// #include <cuda.h>
// #include <stdlib.h>
import "C"

import (
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"unsafe"

	"github.com/shoalfs/shoal/gpuingest"
	"github.com/shoalfs/shoal/gpuingest/cuda/kernel"
)

// minDriver is the oldest supported driver, in cuDriverGetVersion's units: cuGraphInstantiateWithFlags needs 11.4.
const minDriver = 11040

// Device is one GPU.
type Device struct {
	number int
	dev    C.CUdevice
	ctx    C.CUcontext
	module C.CUmodule
	blocks int // of a kernel that strides
	uuid   string
	model  string

	mu      sync.Mutex
	kernels map[string]C.CUfunction
	closed  bool
}

// Open prepares device number n. Its errors wrap gpuingest.ErrNoDriver, ErrNoDevice or ErrDeviceMemory if they apply.
func Open(n int) (*Device, error) {
	if err := loaded(); err != nil {
		return nil, err
	}
	var v, count C.int
	if err := check("cuDriverGetVersion", C.cuDriverGetVersion(&v)); err != nil {
		return nil, err
	}
	if v < minDriver {
		return nil, fmt.Errorf("cuda: %w: the driver supports CUDA %s, shoal-gpu needs %s or newer: install a newer NVIDIA driver",
			gpuingest.ErrNoDriver, version(v), version(minDriver))
	}
	if err := check("cuDeviceGetCount", C.cuDeviceGetCount(&count)); err != nil {
		return nil, err
	}
	if n < 0 || n >= int(count) {
		return nil, fmt.Errorf("cuda:%d: %w: the driver shows %d (see `nvidia-smi -L`; CUDA_VISIBLE_DEVICES hides devices)", n, gpuingest.ErrNoDevice, count)
	}
	d := &Device{number: n, kernels: map[string]C.CUfunction{}}
	if err := check("cuDeviceGet", C.cuDeviceGet(&d.dev, C.int(n))); err != nil {
		return nil, err
	}
	if err := d.describe(); err != nil {
		return nil, err
	}
	if err := check("cuDevicePrimaryCtxRetain", C.cuDevicePrimaryCtxRetain(&d.ctx, d.dev)); err != nil {
		return nil, err
	}
	ptx := C.CString(kernel.PTX)
	defer C.free(unsafe.Pointer(ptx))
	err := d.do(func() error {
		return check("cuModuleLoadData of the kernel", C.cuModuleLoadData(&d.module, unsafe.Pointer(ptx)))
	})
	if err != nil {
		return nil, errors.Join(err, check("cuDevicePrimaryCtxRelease", C.cuDevicePrimaryCtxRelease(d.dev)))
	}
	return d, nil
}

// describe reads the device's properties, and checks that it is usable.
func (d *Device) describe() error {
	for _, a := range []struct {
		attr C.CUdevice_attribute
		what string
	}{
		{C.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, "virtual memory management"},
		{C.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, "memory that is shared by descriptor"},
	} {
		if has, err := d.attribute(a.attr); err != nil {
			return err
		} else if has == 0 {
			return fmt.Errorf("%s: %w with %s: use the GPU in the trainer instead (docs/gpu.md)", d.Name(), gpuingest.ErrNoDevice, a.what)
		}
	}
	sms, err := d.attribute(C.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
	if err != nil {
		return err
	}
	// Eight blocks of 256 threads fill a multiprocessor; more would only load the table more often.
	d.blocks = 8 * max(sms, 1)
	if d.uuid, err = uuid(d.dev); err != nil {
		return err
	}
	var name [256]C.char
	err = check("cuDeviceGetName", C.cuDeviceGetName(&name[0], C.int(len(name)), d.dev))
	d.model = strings.TrimRight(C.GoString(&name[0]), " ")
	return err
}

func (d *Device) attribute(a C.CUdevice_attribute) (int, error) {
	var v C.int
	err := check("cuDeviceGetAttribute", C.cuDeviceGetAttribute(&v, a, d.dev))
	return int(v), err
}

// Name is "cuda:" and the number.
func (d *Device) Name() string { return fmt.Sprintf("cuda:%d", d.number) }

// UUID identifies the device, independent of its number in a process.
func (d *Device) UUID() string { return d.uuid }

// Model is the driver's name for the device.
func (d *Device) Model() string { return d.model }

// Close frees everything that the device holds. Its rings must be closed before.
func (d *Device) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil
	}
	d.closed = true
	err := d.do(func() error { return check("cuModuleUnload", C.cuModuleUnload(d.module)) })
	return errors.Join(err, check("cuDevicePrimaryCtxRelease", C.cuDevicePrimaryCtxRelease(d.dev)))
}

// do runs f on a thread with the device's context.
func (d *Device) do(f func() error) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := check("cuCtxSetCurrent", C.cuCtxSetCurrent(d.ctx)); err != nil {
		return err
	}
	return f()
}

// function returns the kernel for a type and layout.
func (d *Device) function(f *gpuingest.Finish) (C.CUfunction, error) {
	name, err := kernel.Name(f.Elem(), f.Layout)
	if err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if fn, ok := d.kernels[name]; ok {
		return fn, nil
	}
	text := C.CString(name)
	defer C.free(unsafe.Pointer(text))
	var fn C.CUfunction
	if err := check("cuModuleGetFunction "+name, C.cuModuleGetFunction(&fn, d.module, text)); err != nil {
		return nil, err
	}
	d.kernels[name] = fn
	return fn, nil
}

func version(v C.int) string { return fmt.Sprintf("%d.%d", v/1000, v%1000/10) }
