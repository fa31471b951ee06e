// Runs the device kernel on jobs from standard input: `finish PTX`. A job is nine numbers of 32 bits (element size, 1
// for nchw, n, h, w, srcH, srcW, grid, block), one for the source's distance from a multiple of 4, one that says
// whether there is a table, then rows, table and source. The result goes to standard output.

#include "check.h"

static void take(void *p, size_t n) { check(fread(p, 1, n, stdin) == n); }

static CUdeviceptr put(size_t n, size_t shift) {
	CUdeviceptr d;
	char *p = malloc(n + 1);
	take(p, n);
	ok(cuMemAlloc_v2(&d, n + shift));
	ok(cuMemcpyHtoD_v2(d + shift, p, n));
	free(p);
	return d + shift;
}

int main(int argc, char **argv) {
	check(argc == 2);
	FILE *f = fopen(argv[1], "r");
	check(f != NULL);
	char *ptx = calloc(1, 1 << 20);
	check(fread(ptx, 1, (1 << 20) - 1, f) > 0);
	CUdevice device;
	CUcontext context;
	CUmodule module;
	ok(cuInit(0));
	ok(cuDeviceGet(&device, 0));
	ok(cuDevicePrimaryCtxRetain(&context, device));
	ok(cuCtxSetCurrent(context));
	ok(cuModuleLoadData(&module, ptx));
	unsigned job[11];
	while (fread(job, sizeof job, 1, stdin) == 1) {
		unsigned elem = job[0], n = job[2], h = job[3], w = job[4], src_h = job[5], src_w = job[6];
		char name[64];
		snprintf(name, sizeof name, "shoal_finish_u%u_%s", elem * 8, job[1] ? "nchw" : "nhwc");
		CUfunction kernel;
		ok(cuModuleGetFunction(&kernel, module, name));
		CUdeviceptr rows = put((size_t)n * 8, 0), table = job[10] ? put((size_t)3 * 256 * elem, 0) : 0;
		CUdeviceptr src = put((size_t)n * src_h * src_w * 3, job[9]), dst;
		size_t bytes = (size_t)n * 3 * h * w * elem;
		ok(cuMemAlloc_v2(&dst, bytes));
		void *params[] = {&dst, &src, &rows, &table, &n, &h, &w, &src_h, &src_w};
		ok(cuLaunchKernel(kernel, job[7], 1, 1, job[8], 1, 1, 0, NULL, params, NULL));
		char *out = malloc(bytes);
		ok(cuMemcpyDtoH_v2(out, dst, bytes));
		check(fwrite(out, 1, bytes, stdout) == bytes);
		free(out);
		ok(cuMemFree_v2(dst));
		ok(cuMemFree_v2(src - job[9]));
		ok(cuMemFree_v2(rows));
		if (job[10])
			ok(cuMemFree_v2(table));
	}
	return 0;
}
