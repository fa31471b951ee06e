// The part of NVIDIA's driver interface (CUDA 11.8) that Shoal calls: types, numbers and layouts as every program
// that is linked against libcuda.so.1 expects them. Written out here, so that the driver builds with gcc alone.
#pragma once

#include <stddef.h>
#include <stdint.h>

#define API __attribute__((visibility("default")))

#define RESULTS(X)                                                                                                     \
	X(SUCCESS, 0, "no error")                                                                                          \
	X(ERROR_INVALID_VALUE, 1, "invalid argument")                                                                      \
	X(ERROR_OUT_OF_MEMORY, 2, "out of memory")                                                                         \
	X(ERROR_NOT_INITIALIZED, 3, "initialization error")                                                                \
	X(ERROR_NO_DEVICE, 100, "no CUDA-capable device is detected")                                                      \
	X(ERROR_INVALID_DEVICE, 101, "invalid device ordinal")                                                             \
	X(ERROR_INVALID_IMAGE, 200, "device kernel image is invalid")                                                      \
	X(ERROR_INVALID_CONTEXT, 201, "invalid device context")                                                            \
	X(ERROR_INVALID_PTX, 218, "a PTX JIT compilation failed")                                                          \
	X(ERROR_INVALID_HANDLE, 400, "invalid resource handle")                                                            \
	X(ERROR_NOT_FOUND, 500, "named symbol not found")                                                                  \
	X(ERROR_NOT_READY, 600, "device not ready")                                                                        \
	X(ERROR_ILLEGAL_ADDRESS, 700, "an illegal memory access was encountered")                                          \
	X(ERROR_HOST_MEMORY_ALREADY_REGISTERED, 712, "part or all of the requested memory range is already mapped")        \
	X(ERROR_HOST_MEMORY_NOT_REGISTERED, 713, "pointer does not correspond to a registered memory region")              \
	X(ERROR_MISALIGNED_ADDRESS, 716, "misaligned address")                                                             \
	X(ERROR_LAUNCH_FAILED, 719, "unspecified launch failure")                                                          \
	X(ERROR_NOT_PERMITTED, 800, "operation not permitted")                                                             \
	X(ERROR_STREAM_CAPTURE_UNSUPPORTED, 900, "operation not permitted when stream is capturing")                       \
	X(ERROR_STREAM_CAPTURE_INVALIDATED, 901, "operation failed due to a previous error during capture")                \
	X(ERROR_STREAM_CAPTURE_UNJOINED, 904, "capturing stream has unjoined work")                                        \
	X(ERROR_STREAM_CAPTURE_ISOLATION, 905, "dependency created on uncaptured work in another stream")                  \
	X(ERROR_STREAM_CAPTURE_IMPLICIT, 906, "dependency on a capturing stream through the default stream")               \
	X(ERROR_CAPTURED_EVENT, 907, "operation not permitted on an event last recorded in a capturing stream")            \
	X(ERROR_UNKNOWN, 999, "unknown error")

#define X(name, value, text) CUDA_##name = value,
typedef enum { RESULTS(X) } CUresult;
#undef X

typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct context *CUcontext;
typedef struct stream *CUstream;
typedef struct event *CUevent;
typedef struct module *CUmodule;
typedef struct function *CUfunction;
typedef struct graph *CUgraph;
typedef struct graph *CUgraphExec;
typedef unsigned long long CUmemGenericAllocationHandle;

typedef struct {
	char bytes[16];
} CUuuid;

typedef struct {
	char reserved[64];
} CUipcEventHandle;

typedef struct {
	int type; // 1: a device
	int id;
} CUmemLocation;

typedef struct {
	int type;                 // 1: pinned
	int requestedHandleTypes; // 1: POSIX descriptor
	CUmemLocation location;
	void *win32HandleMetaData;
	struct {
		unsigned char compressionType, gpuDirectRDMACapable;
		unsigned short usage;
		unsigned char reserved[4];
	} allocFlags;
} CUmemAllocationProp;

typedef struct {
	CUmemLocation location;
	int flags; // 1: read, 3: read and write
} CUmemAccessDesc;

enum { STREAM_NON_BLOCKING = 1 };
enum { EVENT_BLOCKING_SYNC = 1, EVENT_DISABLE_TIMING = 2, EVENT_INTERPROCESS = 4 };
