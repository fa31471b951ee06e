//go:build cuda

package cuda

/*
#include <cuda.h>
#include <stdlib.h>

int shoal_cuda_load(const char **reason); // link/libcuda.c
*/
import "C"

import (
	"errors"
	"fmt"
	"unsafe"

	"gorgonia.org/cu"

	"github.com/shoalfs/shoal/gpuingest"
)

// Attributes that gorgonia.org/cu does not name.
const (
	attrVMM   = cu.DeviceAttribute(C.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)
	attrPOSIX = cu.DeviceAttribute(C.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)
)

// loaded returns why the driver cannot be used, nil if it can.
func loaded() error {
	var reason *C.char
	switch r := C.shoal_cuda_load(&reason); r {
	case C.CUDA_SUCCESS:
		return nil
	case -1:
		return fmt.Errorf(
			"cuda: %w: %s: install NVIDIA's driver; in a container, run it with the NVIDIA container toolkit",
			gpuingest.ErrNoDriver, C.GoString(reason))
	case C.CUDA_ERROR_NO_DEVICE:
		return fmt.Errorf("cuda: %w: the driver sees none (see `nvidia-smi -L`; CUDA_VISIBLE_DEVICES hides devices)",
			gpuingest.ErrNoDevice)
	default:
		return fmt.Errorf("cuda: %w: %w (check that `nvidia-smi` works)",
			gpuingest.ErrNoDriver, check("cuInit", C.CUresult(r)))
	}
}

// uuid returns a device's UUID: of a MIG instance its own, which gorgonia.org/cu's call does not know.
func uuid(n cu.Device) (string, error) {
	var id C.CUuuid
	err := check("cuDeviceGetUuid_v2", C.cuDeviceGetUuid_v2(&id, C.CUdevice(n)))
	b := *(*[16]byte)(unsafe.Pointer(&id))
	return fmt.Sprintf("GPU-%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:]), err
}

// callError is the driver's error from a call of this file.
type callError struct {
	code C.CUresult
	text string
}

func (e *callError) Error() string { return e.text }

// Is maps errors of this file to those of gorgonia.org/cu.
func (e *callError) Is(target error) bool {
	switch target {
	case cu.OutOfMemory:
		return e.code == C.CUDA_ERROR_OUT_OF_MEMORY
	case cu.NotFound:
		return e.code == C.CUDA_ERROR_NOT_FOUND
	}
	return false
}

func check(call string, r C.CUresult) error {
	if r == C.CUDA_SUCCESS {
		return nil
	}
	var name *C.char
	text := fmt.Sprintf("error %d", int(r))
	if C.cuGetErrorString(r, &name) == C.CUDA_SUCCESS && name != nil {
		text = fmt.Sprintf("%s (%s)", C.GoString(name), text)
	}
	return fail(call, &callError{r, text})
}

// pin page-locks memory until it is unpinned.
func pin(p []byte) error {
	return check("cuMemHostRegister",
		C.cuMemHostRegister(unsafe.Pointer(&p[0]), C.size_t(len(p)), C.CU_MEMHOSTREGISTER_PORTABLE))
}

func unpin(p []byte) error {
	return check("cuMemHostUnregister", C.cuMemHostUnregister(unsafe.Pointer(&p[0])))
}

// kind is memory of a device that can be handed over as a descriptor.
func kind(dev cu.Device) *C.CUmemAllocationProp {
	return &C.CUmemAllocationProp{_type: C.CU_MEM_ALLOCATION_TYPE_PINNED,
		requestedHandleTypes: C.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
		location:             C.CUmemLocation{_type: C.CU_MEM_LOCATION_TYPE_DEVICE, id: C.int(dev)}}
}

// granularity is the unit of sizes of device memory.
func granularity(dev cu.Device) (int, error) {
	var n C.size_t
	err := check("cuMemGetAllocationGranularity", C.cuMemGetAllocationGranularity(&n, kind(dev),
		C.CU_MEM_ALLOC_GRANULARITY_MINIMUM))
	return int(n), err
}

// region is a reserved range of addresses with memory in it, allocation by allocation.
type region struct {
	at    cu.DevicePtr
	size  int // of each allocation
	mem   []C.CUmemGenericAllocationHandle
	total int
}

// newRegion makes n allocations of size bytes, a multiple of the granularity, side by side.
func newRegion(dev cu.Device, n, size int) (r *region, err error) {
	r = &region{size: size, total: n * size}
	var at C.CUdeviceptr
	if err := check("cuMemAddressReserve", C.cuMemAddressReserve(&at, C.size_t(r.total), 0, 0, 0)); err != nil {
		return nil, err
	}
	r.at = cu.DevicePtr(at)
	for i := range n {
		var h C.CUmemGenericAllocationHandle
		if err := check(fmt.Sprintf("cuMemCreate of %d bytes, %d of %d", size, i+1, n),
			C.cuMemCreate(&h, C.size_t(size), kind(dev), 0)); err != nil {
			return nil, errors.Join(err, r.close())
		}
		if err := check("cuMemMap", C.cuMemMap(at+C.CUdeviceptr(i*size), C.size_t(size), 0, h, 0)); err != nil {
			return nil, errors.Join(err, check("cuMemRelease", C.cuMemRelease(h)), r.close())
		}
		r.mem = append(r.mem, h)
	}
	access := C.CUmemAccessDesc{location: kind(dev).location, flags: C.CU_MEM_ACCESS_FLAGS_PROT_READWRITE}
	if err := check("cuMemSetAccess", C.cuMemSetAccess(at, C.size_t(r.total), &access, 1)); err != nil {
		return nil, errors.Join(err, r.close())
	}
	return r, nil
}

// export returns a descriptor of allocation i, which the caller closes.
func (r *region) export(i int) (int, error) {
	var fd C.int
	err := check("cuMemExportToShareableHandle", C.cuMemExportToShareableHandle(unsafe.Pointer(&fd), r.mem[i],
		C.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0))
	return int(fd), err
}

func (r *region) close() error {
	var errs []error
	for i, h := range r.mem {
		errs = append(errs, check("cuMemUnmap",
			C.cuMemUnmap(C.CUdeviceptr(r.at)+C.CUdeviceptr(i*r.size), C.size_t(r.size))),
			check("cuMemRelease", C.cuMemRelease(h)))
	}
	r.mem = nil
	errs = append(errs, check("cuMemAddressFree", C.cuMemAddressFree(C.CUdeviceptr(r.at), C.size_t(r.total))))
	return errors.Join(errs...)
}

// handle makes an interprocess event available to other processes.
func handle(e cu.Event) ([]byte, error) {
	var h C.CUipcEventHandle
	err := check("cuIpcGetEventHandle", C.cuIpcGetEventHandle(&h, rawEvent(e)))
	return C.GoBytes(unsafe.Pointer(&h), C.int(unsafe.Sizeof(h))), err
}

// graph is recorded work that can be launched any number of times.
type graph struct{ exec C.CUgraphExec }

// capture records what work queues on the stream, without doing it.
func capture(s cu.Stream, work func() error) (*graph, error) {
	stream := rawStream(s)
	// This mode excludes calls of other threads from the capture.
	if err := check("cuStreamBeginCapture",
		C.cuStreamBeginCapture(stream, C.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)); err != nil {
		return nil, err
	}
	err := work()
	var g C.CUgraph
	if err := errors.Join(err, check("cuStreamEndCapture", C.cuStreamEndCapture(stream, &g))); err != nil {
		if g != nil {
			C.cuGraphDestroy(g)
		}
		return nil, err
	}
	defer C.cuGraphDestroy(g)
	made := &graph{}
	return made, check("cuGraphInstantiate", C.cuGraphInstantiateWithFlags(&made.exec, g, 0))
}

func (g *graph) launch(s cu.Stream) error {
	return check("cuGraphLaunch", C.cuGraphLaunch(g.exec, rawStream(s)))
}

func (g *graph) close() error { return check("cuGraphExecDestroy", C.cuGraphExecDestroy(g.exec)) }

// cu's handles are structs of one pointer.
func rawStream(s cu.Stream) C.CUstream { return *(*C.CUstream)(unsafe.Pointer(&s)) }
func rawEvent(e cu.Event) C.CUevent    { return *(*C.CUevent)(unsafe.Pointer(&e)) }
