// Scenarios. `check NAME` runs one; driver_test.go says under which script, and what has to come of it.

#include <fcntl.h>
#include <pthread.h>
#include <spawn.h>
#include <stdbool.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include "check.h"

extern char **environ;
static const char *self;

// Adds value to each of n words.
static const char add_ptx[] = ".version 6.0\n.target sm_50\n.address_size 64\n"
                              ".visible .entry add(.param .u64 p, .param .u32 n, .param .u32 value)\n{\n"
                              ".reg .pred %p<2>; .reg .b32 %r<8>; .reg .b64 %rd<4>;\n"
                              "ld.param.u64 %rd1, [p]; ld.param.u32 %r1, [n]; ld.param.u32 %r2, [value];\n"
                              "mov.u32 %r3, %ctaid.x; mov.u32 %r4, %ntid.x; mov.u32 %r5, %tid.x;\n"
                              "mad.lo.s32 %r6, %r3, %r4, %r5;\n"
                              "setp.ge.u32 %p1, %r6, %r1;\n@%p1 bra DONE;\n"
                              "mul.wide.u32 %rd2, %r6, 4; add.s64 %rd3, %rd1, %rd2;\n"
                              "ld.global.u32 %r7, [%rd3]; add.s32 %r7, %r7, %r2; st.global.u32 [%rd3], %r7;\n"
                              "DONE:\nret;\n}\n";

static void start(void) {
	CUdevice device;
	CUcontext context;
	ok(cuInit(0));
	ok(cuDeviceGet(&device, 0));
	ok(cuDevicePrimaryCtxRetain(&context, device));
	ok(cuCtxSetCurrent(context));
}

static CUfunction add_function(void) {
	CUmodule module;
	CUfunction f;
	ok(cuModuleLoadData(&module, add_ptx));
	ok(cuModuleGetFunction(&f, module, "add"));
	return f;
}

static void add(CUdeviceptr p, unsigned n, unsigned value, CUstream s) {
	static CUfunction f;
	if (f == NULL)
		f = add_function();
	void *params[] = {&p, &n, &value};
	ok(cuLaunchKernel(f, (n + 63) / 64, 1, 1, 64, 1, 1, 0, s, params, NULL));
}

enum { N = 1000, BYTES = N * 4 };

static unsigned *host(void) {
	unsigned *p = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	ok(cuMemHostRegister_v2(p, 4096, 0));
	return p;
}

static CUdeviceptr device(void) {
	CUdeviceptr p;
	ok(cuMemAlloc_v2(&p, BYTES));
	return p;
}

static CUstream stream(void) {
	CUstream s;
	ok(cuStreamCreate(&s, STREAM_NON_BLOCKING));
	return s;
}

static CUevent event(void) {
	CUevent e;
	ok(cuEventCreate(&e, EVENT_DISABLE_TIMING));
	return e;
}

// hold and release: the file that the script's hold.launch names.
static void release(void) {
	int fd = open(getenv("HOLD"), O_CREAT | O_WRONLY, 0600);
	check(fd >= 0);
	close(fd);
}

static void in_order(void) {
	start();
	unsigned *from = host(), *to = host();
	CUdeviceptr d = device();
	CUstream s = stream();
	for (int i = 0; i < N; i++)
		from[i] = (unsigned)i;
	ok(cuMemcpyHtoDAsync_v2(d, from, BYTES, s));
	add(d, N, 5, s);
	add(d, N, 6, s);
	ok(cuMemcpyDtoHAsync_v2(to, d, BYTES, s));
	ok(cuStreamSynchronize(s));
	for (int i = 0; i < N; i++)
		check(to[i] == (unsigned)i + 11);
	check(cuStreamQuery(s) == CUDA_SUCCESS);
	ok(cuStreamDestroy_v2(s));
	want(CUDA_ERROR_INVALID_HANDLE, cuStreamQuery(s));
}

// A copy reads its source when its turn comes, not when it is queued: what is written meanwhile arrives.
static void late_read(void) {
	start();
	unsigned *from = host(), *to = host();
	CUdeviceptr d = device();
	CUstream s = stream();
	from[0] = 1;
	add(d, 1, 0, s); // held
	ok(cuMemcpyHtoDAsync_v2(d, from, 4, s));
	want(CUDA_ERROR_NOT_READY, cuStreamQuery(s));
	from[0] = 2;
	release();
	ok(cuMemcpyDtoHAsync_v2(to, d, 4, s));
	ok(cuStreamSynchronize(s));
	check(to[0] == 2);
}

// One stream is held: another that waits for its event stays, a third goes on.
static void events(void) {
	start();
	unsigned *to = host();
	CUdeviceptr a = device(), b = device();
	CUstream held = stream(), waits = stream(), other = stream();
	CUevent e = event(), done = event();
	ok(cuEventQuery(e)); // never recorded
	ok(cuMemsetD8Async(a, 0, BYTES, held));
	add(a, N, 7, held);
	ok(cuEventRecord(e, held));
	ok(cuStreamWaitEvent(waits, e, 0));
	ok(cuMemcpyDtoHAsync_v2(to, a, BYTES, waits));
	ok(cuEventRecord(done, waits));
	ok(cuMemsetD8Async(b, 1, BYTES, other));
	ok(cuStreamSynchronize(other)); // overlaps what is held
	want(CUDA_ERROR_NOT_READY, cuEventQuery(e));
	want(CUDA_ERROR_NOT_READY, cuEventQuery(done));
	want(CUDA_ERROR_NOT_READY, cuStreamQuery(waits));
	check(to[0] == 0);
	ok(cuEventDestroy_v2(e)); // what waits, waits on
	release();
	ok(cuEventSynchronize(done));
	for (int i = 0; i < N; i++)
		check(to[i] == 7);
	ok(cuCtxSynchronize());
}

// A wait is for the record that was the newest then, not for later ones.
static void records(void) {
	start();
	CUdeviceptr a = device();
	CUstream held = stream(), free_ = stream(), waits = stream();
	CUevent e = event();
	ok(cuEventRecord(e, free_));
	ok(cuStreamWaitEvent(waits, e, 0));
	add(a, 1, 0, held);
	ok(cuEventRecord(e, held));
	ok(cuStreamSynchronize(waits));
	want(CUDA_ERROR_NOT_READY, cuEventQuery(e));
	// And the other way: a later record that is done does not let go who waits for an earlier one.
	CUstream second = stream();
	ok(cuStreamWaitEvent(second, e, 0));
	ok(cuEventRecord(e, free_));
	ok(cuEventSynchronize(e));
	want(CUDA_ERROR_NOT_READY, cuStreamQuery(second));
	release();
	ok(cuStreamSynchronize(second));
}

static void default_stream(void) {
	start();
	CUdeviceptr a = device(), b = device();
	CUstream blocking, apart = stream();
	ok(cuStreamCreate(&blocking, 0));
	add(a, 1, 0, NULL); // held
	ok(cuMemsetD8Async(b, 1, BYTES, blocking));
	ok(cuMemsetD8Async(b, 1, BYTES, apart));
	ok(cuStreamSynchronize(apart));
	want(CUDA_ERROR_NOT_READY, cuStreamQuery(blocking));
	release();
	ok(cuStreamSynchronize(blocking));
	ok(cuStreamSynchronize(NULL));
}

static void timing(void) {
	start();
	CUdeviceptr a = device();
	CUstream s = stream();
	CUevent from, to;
	ok(cuEventCreate(&from, 0));
	ok(cuEventCreate(&to, 0));
	ok(cuEventRecord(from, s));
	ok(cuMemsetD8Async(a, 0, BYTES, s)); // which the script has last 20 ms
	ok(cuEventRecord(to, s));
	float ms = 0;
	ok(cuEventSynchronize(to));
	ok(cuEventElapsedTime(&ms, from, to));
	check(ms >= 20);
	want(CUDA_ERROR_INVALID_HANDLE, cuEventElapsedTime(&ms, event(), to));
}

static void graph(void) {
	start();
	unsigned *from = host(), *to = host();
	CUdeviceptr d = device();
	CUstream s = stream(), side = stream();
	CUevent fork_ = event(), join = event();
	ok(cuStreamBeginCapture_v2(s, 2));
	want(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, cuStreamSynchronize(s));
	ok(cuMemcpyHtoDAsync_v2(d, from, BYTES, s));
	ok(cuEventRecord(fork_, s));
	ok(cuStreamWaitEvent(side, fork_, 0));
	add(d, N, 3, side);
	ok(cuEventRecord(join, side));
	ok(cuStreamWaitEvent(s, join, 0));
	ok(cuMemcpyDtoHAsync_v2(to, d, BYTES, s));
	CUgraph g;
	CUgraphExec exec;
	ok(cuStreamEndCapture(s, &g));
	ok(cuGraphInstantiateWithFlags(&exec, g, 0));
	ok(cuGraphDestroy(g));
	ok(cuStreamSynchronize(s));
	check(to[0] == 0); // nothing was done yet
	for (unsigned round = 1; round < 4; round++) {
		for (int i = 0; i < N; i++)
			from[i] = round * 1000 + (unsigned)i;
		ok(cuGraphLaunch(exec, s));
		ok(cuStreamSynchronize(s));
		for (int i = 0; i < N; i++)
			check(to[i] == round * 1000 + (unsigned)i + 3);
	}
	ok(cuGraphExecDestroy(exec));
	// A stream that has joined a capture has to come back.
	ok(cuStreamBeginCapture_v2(s, 2));
	ok(cuEventRecord(fork_, s));
	ok(cuStreamWaitEvent(side, fork_, 0));
	add(d, N, 3, side);
	want(CUDA_ERROR_STREAM_CAPTURE_UNJOINED, cuStreamEndCapture(s, &g));
	// Work outside of a capture cannot be waited for in it.
	ok(cuEventRecord(join, side));
	ok(cuStreamBeginCapture_v2(s, 2));
	want(CUDA_ERROR_STREAM_CAPTURE_ISOLATION, cuStreamWaitEvent(s, join, 0));
	want(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, cuStreamEndCapture(s, &g));
}

static CUevent asked;
static int asked_mode;

static void *ask(void *unused) {
	(void)unused;
	int mode = asked_mode;
	start();
	ok(cuThreadExchangeStreamCaptureMode(&mode));
	check(mode == 0); // a thread's own, and global at first
	CUresult got = cuEventQuery(asked);
	CUresult synchronized = cuEventSynchronize(asked);
	CUdeviceptr p;
	CUresult allocated = cuMemAlloc_v2(&p, 4096);
	check(got == synchronized && got == allocated);
	return (void *)(uintptr_t)got;
}

static CUresult ask_in_thread(int mode) {
	pthread_t thread;
	void *got;
	asked_mode = mode;
	check(pthread_create(&thread, NULL, ask, NULL) == 0 && pthread_join(thread, &got) == 0);
	return (CUresult)(uintptr_t)got;
}

// What another thread may do while a graph is being captured depends on both modes, as cuda.h has it.
static void capture_modes(void) {
	start();
	CUstream s = stream(), side = stream();
	asked = event();
	ok(cuEventRecord(asked, side));
	ok(cuStreamSynchronize(side));
	enum { GLOBAL, THREAD_LOCAL, RELAXED };
	for (int capture = GLOBAL; capture <= RELAXED; capture++)
		for (int mode = GLOBAL; mode <= RELAXED; mode++) {
			CUgraph g;
			ok(cuStreamBeginCapture_v2(s, capture));
			bool forbidden = capture == GLOBAL && mode == GLOBAL;
			check(ask_in_thread(mode) == (forbidden ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS));
			want(forbidden ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS, cuStreamEndCapture(s, &g));
		}
	// The capturing thread itself.
	for (int capture = GLOBAL; capture <= RELAXED; capture++)
		for (int mode = GLOBAL; mode <= RELAXED; mode++) {
			CUgraph g;
			int was = mode;
			ok(cuThreadExchangeStreamCaptureMode(&was));
			ok(cuStreamBeginCapture_v2(s, capture));
			bool forbidden = capture != RELAXED && mode != RELAXED;
			want(forbidden ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS, cuEventQuery(asked));
			want(forbidden ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS, cuStreamEndCapture(s, &g));
			ok(cuThreadExchangeStreamCaptureMode(&was));
			check(was == mode);
		}
	int wrong = 3;
	want(CUDA_ERROR_INVALID_VALUE, cuThreadExchangeStreamCaptureMode(&wrong));
}

enum { UNIT = 2 << 20 };

static const CUmemAllocationProp prop = {.type = 1, .requestedHandleTypes = 1, .location = {1, 0}};
static const CUmemAccessDesc access_ = {{1, 0}, 3};

static CUdeviceptr map(CUmemGenericAllocationHandle h) {
	CUdeviceptr at;
	ok(cuMemAddressReserve(&at, 2 * UNIT, 0, 0, 0));
	ok(cuMemMap(at, UNIT, 0, h, 0));
	return at;
}

static void mapping(void) {
	start();
	CUmemGenericAllocationHandle h;
	size_t before, between, after, total;
	ok(cuMemGetInfo_v2(&before, &total));
	want(CUDA_ERROR_INVALID_VALUE, cuMemCreate(&h, UNIT + 1, &prop, 0)); // sizes are multiples of the granularity
	ok(cuMemCreate(&h, UNIT, &prop, 0));
	CUdeviceptr at = map(h);
	want(CUDA_ERROR_INVALID_VALUE, cuMemMap(at, UNIT, 0, h, 0)); // there is one
	ok(cuMemSetAccess(at, UNIT, &access_, 1));
	ok(cuMemRelease(h)); // the mapping keeps it
	unsigned one = 1, got = 0;
	ok(cuMemcpyHtoD_v2(at + 8, &one, 4));
	ok(cuMemcpyDtoH_v2(&got, at + 8, 4));
	check(got == 1);
	want(CUDA_ERROR_INVALID_VALUE, cuMemAddressFree(at, 2 * UNIT)); // still mapped
	ok(cuMemGetInfo_v2(&between, &total));
	ok(cuMemUnmap(at, UNIT));
	ok(cuMemAddressFree(at, 2 * UNIT));
	ok(cuMemGetInfo_v2(&after, &total));
	check(before == after && between == before - UNIT);
}

// Two processes, one buffer: the child waits for the parent's event on its stream, and the parent for the child's.
static void exchange(void) {
	start();
	CUmemGenericAllocationHandle h;
	CUevent ready, done;
	int fd;
	ok(cuMemCreate(&h, UNIT, &prop, 0));
	CUdeviceptr at = map(h);
	ok(cuMemSetAccess(at, UNIT, &access_, 1));
	ok(cuMemExportToShareableHandle(&fd, h, 1, 0));
	ok(cuEventCreate(&ready, EVENT_INTERPROCESS | EVENT_DISABLE_TIMING));
	ok(cuEventCreate(&done, EVENT_INTERPROCESS | EVENT_DISABLE_TIMING));
	CUipcEventHandle handles[2];
	ok(cuIpcGetEventHandle(&handles[0], ready));
	ok(cuIpcGetEventHandle(&handles[1], done));
	int to[2], back[2];
	check(pipe2(to, O_CLOEXEC) == 0 && pipe2(back, O_CLOEXEC) == 0);
	// What the child gets as 10 to 12 lies above them first: else one move may overwrite what the next is to move.
	int sources[] = {fd, to[0], back[1]};
	posix_spawn_file_actions_t actions;
	posix_spawn_file_actions_init(&actions);
	for (int i = 0; i < 3; i++) {
		int high = fcntl(sources[i], F_DUPFD_CLOEXEC, 13);
		check(high >= 0);
		close(sources[i]); // so that a child that ends is seen at the pipe
		sources[i] = high;
		posix_spawn_file_actions_adddup2(&actions, high, 10 + i);
	}
	pid_t child;
	char *argv[] = {(char *)self, "exchange-child", NULL};
	check(posix_spawn(&child, self, &actions, NULL, argv, environ) == 0);
	for (int i = 0; i < 3; i++)
		close(sources[i]);
	check(write(to[1], handles, sizeof handles) == sizeof handles);
	CUstream s = stream();
	add(at, N, 0, s); // held
	ok(cuMemsetD8Async(at, 9, BYTES, s));
	ok(cuEventRecord(ready, s));
	char byte = 1;
	check(write(to[1], &byte, 1) == 1); // ready is recorded, though not reached
	check(read(back[0], &byte, 1) == 1);
	release();
	check(read(back[0], &byte, 1) == 1); // done is recorded
	ok(cuStreamWaitEvent(s, done, 0));
	unsigned got;
	ok(cuStreamSynchronize(s));
	ok(cuMemcpyDtoH_v2(&got, at, 4));
	check(got == 0x09090909 + 7);
	int status;
	check(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void exchange_child(void) {
	start();
	CUipcEventHandle handles[2];
	check(read(11, handles, sizeof handles) == sizeof handles);
	CUevent ready, done;
	ok(cuIpcOpenEventHandle(&ready, handles[0]));
	ok(cuIpcOpenEventHandle(&done, handles[1]));
	CUmemGenericAllocationHandle h;
	ok(cuMemImportFromShareableHandle(&h, (void *)10, 1));
	close(10); // the import keeps it
	CUdeviceptr at = map(h);
	ok(cuMemRelease(h));
	ok(cuMemSetAccess(at, UNIT, &access_, 1));
	CUstream s = stream();
	char byte;
	check(read(11, &byte, 1) == 1);
	ok(cuStreamWaitEvent(s, ready, 0));
	unsigned *to = host();
	ok(cuMemcpyDtoHAsync_v2(to, at, 4, s));
	CUfunction f = add_function();
	unsigned n = 1, value = 7;
	void *params[] = {&at, &n, &value};
	ok(cuEventQuery(done));
	want(CUDA_ERROR_NOT_READY, cuStreamQuery(s)); // the parent's stream is held
	check(write(12, &byte, 1) == 1);
	ok(cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, s, params, NULL));
	ok(cuEventRecord(done, s));
	check(write(12, &byte, 1) == 1);
	ok(cuStreamSynchronize(s));
	check(to[0] == 0x09090909);
}

static void third_create_fails(void) {
	start();
	CUmemGenericAllocationHandle h;
	ok(cuMemCreate(&h, UNIT, &prop, 0));
	ok(cuMemCreate(&h, UNIT, &prop, 0));
	want(CUDA_ERROR_OUT_OF_MEMORY, cuMemCreate(&h, UNIT, &prop, 0));
	ok(cuMemCreate(&h, UNIT, &prop, 0));
}

static void memory_ends(void) { // memory=4194304
	start();
	CUdeviceptr a, b;
	ok(cuMemAlloc_v2(&a, 3 << 20));
	want(CUDA_ERROR_OUT_OF_MEMORY, cuMemAlloc_v2(&b, 2 << 20));
	ok(cuMemFree_v2(a));
	ok(cuMemAlloc_v2(&b, 2 << 20));
	want(CUDA_ERROR_INVALID_VALUE, cuMemFree_v2(b + 8));
}

static void no_device(void) { want(CUDA_ERROR_NO_DEVICE, cuInit(0)); }

static void before_init(void) {
	int n;
	CUdeviceptr d;
	want(CUDA_ERROR_NOT_INITIALIZED, cuDeviceGetCount(&n));
	ok(cuInit(0));
	want(CUDA_ERROR_INVALID_CONTEXT, cuMemAlloc_v2(&d, 4));
	ok(cuDriverGetVersion(&n));
	check(n == 9000); // version=9000
}

static void lost_context(void) { // launch:2=719
	start();
	CUdeviceptr d = device();
	CUstream s = stream();
	add(d, 1, 0, s);
	ok(cuStreamSynchronize(s));
	add(d, 1, 0, s);
	want(CUDA_ERROR_LAUNCH_FAILED, cuStreamSynchronize(s));
	want(CUDA_ERROR_LAUNCH_FAILED, cuMemAlloc_v2(&d, 4));
}

static void bad_ptx(void) {
	start();
	static const char text[] =
		".version 6.0\n.target sm_50\n.address_size 64\n.visible .entry f()\n{\n.reg .b32 %r<2>;\nsin.approx.f32 %r1, %r0;\nret;\n}\n";
	char log[1024] = "";
	int options[] = {5, 6};
	void *values[] = {log, (void *)sizeof log};
	CUmodule m;
	want(CUDA_ERROR_INVALID_PTX, cuModuleLoadDataEx(&m, text, 2, options, values));
	check(strstr(log, ":7:") != NULL);
	want(CUDA_ERROR_INVALID_IMAGE, cuModuleLoadData(&m, "\x7f" "ELF and so on"));
	ok(cuModuleLoadData(&m, add_ptx));
	CUfunction f;
	want(CUDA_ERROR_NOT_FOUND, cuModuleGetFunction(&f, m, "sub"));
	ok(cuModuleUnload(m));
}

static void registration(void) {
	start();
	char *p = mmap(NULL, 3 * 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	ok(cuMemHostRegister_v2(p, 2 * 4096, 0));
	want(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, cuMemHostRegister_v2(p + 4096, 4096, 0));
	ok(cuMemHostUnregister(p));
	want(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, cuMemHostUnregister(p));
	munmap(p, 3 * 4096);
	want(CUDA_ERROR_INVALID_VALUE, cuMemHostRegister_v2(p, 4096, 0));
}

static void pageable(void) {
	start();
	static unsigned from[N], to[N];
	CUdeviceptr d = device();
	CUstream s = stream();
	from[5] = 5;
	ok(cuMemcpyHtoDAsync_v2(d, from, BYTES, s));
	ok(cuStreamQuery(s)); // it has been waited for
	ok(cuMemcpyDtoHAsync_v2(to, d, BYTES, s));
	check(to[5] == 5);
}

// What ends the process. All but the last two hold work in a stream.

static void free_in_use(void) {
	start();
	CUdeviceptr d = device();
	add(d, 1, 0, stream());
	cuMemFree_v2(d);
}

static void unregister_in_use(void) {
	start();
	CUdeviceptr d = device();
	unsigned *p = host();
	CUstream s = stream();
	add(d, 1, 0, s);
	ok(cuMemcpyHtoDAsync_v2(d, p, 4, s));
	cuMemHostUnregister(p);
}

static void unmap_in_use(void) {
	start();
	CUmemGenericAllocationHandle h;
	ok(cuMemCreate(&h, UNIT, &prop, 0));
	CUdeviceptr at = map(h);
	ok(cuMemSetAccess(at, UNIT, &access_, 1));
	add(at, 1, 0, stream());
	cuMemUnmap(at, UNIT);
}

static void copy_too_long(void) {
	start();
	unsigned *p = host();
	CUdeviceptr d;
	ok(cuMemAlloc_v2(&d, 64));
	CUstream s = stream();
	cuMemcpyHtoDAsync_v2(d, p, 68, s);
	cuStreamSynchronize(s);
}

static void no_access(void) {
	start();
	CUmemGenericAllocationHandle h;
	ok(cuMemCreate(&h, UNIT, &prop, 0));
	CUstream s = stream();
	cuMemsetD8Async(map(h), 0, 4, s);
	cuStreamSynchronize(s);
}

static void kernel_too_far(void) {
	start();
	CUdeviceptr d;
	ok(cuMemAlloc_v2(&d, 64));
	CUstream s = stream();
	add(d, 17, 1, s);
	cuStreamSynchronize(s);
	want(CUDA_ERROR_ILLEGAL_ADDRESS, cuCtxSynchronize()); // with trap=error
}

static void kernel_askew(void) {
	start();
	CUstream s = stream();
	add(device() + 2, 1, 1, s);
	cuStreamSynchronize(s);
}

static void used_after_free(void) {
	start();
	CUdeviceptr d = device();
	ok(cuMemFree_v2(d));
	CUstream s = stream();
	add(d, 1, 1, s);
	cuStreamSynchronize(s);
}

static void read_by_host(void) {
	start();
	volatile unsigned *p = (volatile unsigned *)device();
	printf("%u", *p);
}

static const struct {
	const char *name;
	void (*run)(void);
} scenarios[] = {
    {"in_order", in_order}, {"late_read", late_read}, {"events", events}, {"records", records},
        {"default_stream", default_stream},
    {"timing", timing}, {"graph", graph}, {"capture_modes", capture_modes}, {"mapping", mapping},
    {"exchange", exchange},
    {"exchange-child", exchange_child}, {"third_create_fails", third_create_fails}, {"memory_ends", memory_ends},
    {"no_device", no_device}, {"before_init", before_init}, {"lost_context", lost_context}, {"bad_ptx", bad_ptx},
    {"registration", registration}, {"pageable", pageable}, {"free_in_use", free_in_use},
    {"unregister_in_use", unregister_in_use},
    {"unmap_in_use", unmap_in_use}, {"copy_too_long", copy_too_long}, {"no_access", no_access},
    {"kernel_too_far", kernel_too_far},
    {"kernel_askew", kernel_askew}, {"used_after_free", used_after_free}, {"read_by_host", read_by_host},
};

int main(int argc, char **argv) {
	self = argv[0];
	for (size_t i = 0; argc == 2 && i < sizeof scenarios / sizeof scenarios[0]; i++)
		if (strcmp(scenarios[i].name, argv[1]) == 0) {
			scenarios[i].run();
			return 0;
		}
	fprintf(stderr, "no scenario %s\n", argc > 1 ? argv[1] : "");
	return 2;
}
