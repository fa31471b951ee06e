// Modules: PTX that was loaded, and its functions.

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ptx.h"

size_t function_params(const function *f) { return f->params_bytes; }
const char *function_name(const function *f) { return f->name; }

void function_gather(const function *f, void **params, void *to) {
	for (int i = 0; i < f->nparams; i++)
		memcpy((char *)to + f->params[i].offset, params[i], f->params[i].bytes);
}

enum { JIT_ERROR_LOG = 5, JIT_ERROR_LOG_BYTES = 6 };

static CUresult load(CUmodule *handle, const void *image, unsigned count, const int *options, void **values) {
	const unsigned char *bytes = image;
	if (memcmp(bytes, "\x7f" "ELF", 4) == 0 || memcmp(bytes, "\x50\xed\x55\xba", 4) == 0)
		return CUDA_ERROR_INVALID_IMAGE; // machine code: there is no such machine here
	char error[512] = "";
	module *m = ptx_parse(image, error, sizeof error);
	if (m != NULL) {
		*handle = m;
		trace("\"call\":\"cuModuleLoadData\"");
		return CUDA_SUCCESS;
	}
	char *log = NULL;
	size_t size = 0;
	for (unsigned i = 0; i < count; i++) {
		if (options[i] == JIT_ERROR_LOG)
			log = values[i];
		if (options[i] == JIT_ERROR_LOG_BYTES)
			size = (size_t)(uintptr_t)values[i];
	}
	if (log != NULL && size > 0)
		snprintf(log, size, "%s", error);
	else
		fprintf(stderr, "software libcuda: %s\n", error);
	return CUDA_ERROR_INVALID_PTX;
}

API CUresult cuModuleLoadDataEx(CUmodule *handle, const void *image, unsigned count, int *options, void **values) {
	ENTER(UNSAFE);
	return load(handle, image, count, options, values);
}

API CUresult cuModuleLoadData(CUmodule *handle, const void *image) {
	ENTER(UNSAFE);
	return load(handle, image, 0, NULL, NULL);
}

API CUresult cuModuleUnload(CUmodule m) {
	ENTER(UNSAFE);
	if (m == NULL)
		return CUDA_ERROR_INVALID_HANDLE;
	CUresult result = cuCtxSynchronize(); // kernels in queues are made of it
	ptx_free(m);
	return result;
}

API CUresult cuModuleGetFunction(CUfunction *handle, CUmodule m, const char *name) {
	ENTER(CONTEXT);
	if (m == NULL)
		return CUDA_ERROR_INVALID_HANDLE;
	for (function *f = m->functions; f != NULL; f = f->next)
		if (strcmp(f->name, name) == 0) {
			*handle = f;
			return CUDA_SUCCESS;
		}
	return CUDA_ERROR_NOT_FOUND;
}

