// The device, contexts and the names of results.

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "driver.h"

#define MAX_DEVICES 8

pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

static context *primaries[MAX_DEVICES];
static __thread context *stack[32];
static __thread int depth;

static int devices(void) {
	long long n = setting("devices", 1);
	return n < 0 ? 0 : n > MAX_DEVICES ? MAX_DEVICES : (int)n;
}

context *current(void) { return depth > 0 ? stack[depth - 1] : NULL; }

API CUresult cuInit(unsigned flags) {
	ENTER(ANY);
	if (flags != 0)
		return CUDA_ERROR_INVALID_VALUE;
	return devices() == 0 ? CUDA_ERROR_NO_DEVICE : CUDA_SUCCESS;
}

API CUresult cuDriverGetVersion(int *version) {
	ENTER(ANY);
	*version = (int)setting("version", 11080);
	return CUDA_SUCCESS;
}

API CUresult cuGetErrorString(CUresult error, const char **text) {
	switch (error) {
#define X(n, value, t)                                                                                                 \
	case CUDA_##n:                                                                                                     \
		*text = t;                                                                                                     \
		return CUDA_SUCCESS;
		RESULTS(X)
#undef X
	}
	*text = NULL;
	return CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuDeviceGetCount(int *count) {
	ENTER(INIT);
	*count = devices();
	return CUDA_SUCCESS;
}

API CUresult cuDeviceGet(CUdevice *device, int ordinal) {
	ENTER(INIT);
	if (ordinal < 0 || ordinal >= devices())
		return CUDA_ERROR_INVALID_DEVICE;
	*device = ordinal;
	return CUDA_SUCCESS;
}

API CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
	ENTER(INIT);
	snprintf(name, (size_t)length, "Shoal software device %d", device);
	return CUDA_SUCCESS;
}

// cuDeviceGetUuid is the GPU's, as if the devices were MIG instances of one; those have their own from the other call.
API CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
	ENTER(INIT);
	(void)device;
	memcpy(uuid->bytes, "shoal-software-", 16);
	return CUDA_SUCCESS;
}

API CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
	CUresult result = cuDeviceGetUuid(uuid, device);
	uuid->bytes[15] = (char)device;
	return result;
}

API CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device) {
	ENTER(INIT);
	if (device < 0 || device >= devices())
		return CUDA_ERROR_INVALID_DEVICE;
	static const int usual[] = {
		[16] = 4,  // multiprocessors
		[75] = 8,  // compute capability, major
		[102] = 1, // virtual memory management
		[103] = 1, // POSIX descriptors of it
	};
	char key[32];
	snprintf(key, sizeof key, "attr.%d", attribute);
	*value = (int)setting(key, (size_t)attribute < sizeof usual / sizeof usual[0] ? usual[attribute] : 0);
	return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice device) {
	ENTER(INIT);
	if (device < 0 || device >= devices())
		return CUDA_ERROR_INVALID_DEVICE;
	LOCKED;
	if (primaries[device] == NULL) {
		primaries[device] = calloc(1, sizeof(context));
		primaries[device]->device = device;
	}
	*c = primaries[device];
	(*c)->retained++;
	return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
	ENTER(INIT);
	LOCKED;
	bool used = device >= 0 && device < MAX_DEVICES && primaries[device] != NULL && primaries[device]->retained > 0;
	if (used)
		primaries[device]->retained--;
	return used ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
	ENTER(INIT);
	LOCKED;
	*flags = 0;
	*active = device >= 0 && device < MAX_DEVICES && primaries[device] != NULL && primaries[device]->retained > 0;
	return CUDA_SUCCESS;
}

API CUresult cuCtxPushCurrent_v2(CUcontext c) {
	ENTER(INIT);
	if (c == NULL)
		return CUDA_ERROR_INVALID_CONTEXT;
	if (depth == sizeof stack / sizeof stack[0])
		return CUDA_ERROR_INVALID_VALUE;
	stack[depth++] = c;
	return CUDA_SUCCESS;
}

API CUresult cuCtxPopCurrent_v2(CUcontext *c) {
	ENTER(INIT);
	if (depth == 0)
		return CUDA_ERROR_INVALID_CONTEXT;
	context *top = stack[--depth];
	if (c != NULL)
		*c = top;
	return CUDA_SUCCESS;
}

API CUresult cuCtxSetCurrent(CUcontext c) {
	ENTER(INIT);
	if (depth > 0)
		depth--;
	if (c != NULL)
		stack[depth++] = c;
	return CUDA_SUCCESS;
}
