// The stand-in for the CUDA driver that shoal-gpu is linked against: every driver call of cuda.h (the Makefile makes
// calls.h of it), each a jump to the driver's function. The driver, libcuda.so.1, is loaded at the first call of
// cuInit.
//
// If linked against the driver itself, a program does not start on a machine without one: the dynamic linker ends
// it before its first line, and so does package gorgonia.org/cu in its init if there is a driver but no device.
// Here cuInit always succeeds, and shoal_cuda_load returns the driver's own result, so that the program can report
// it and go on without the driver.
#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>

// absent replaces calls that the driver does not have, and all calls before cuInit.
static int absent(void)
{
	return 500; // CUDA_ERROR_NOT_FOUND
}

#if defined(__x86_64__)
#define JUMP(name) "jmp *shoal_" #name "(%rip)\n"
#elif defined(__aarch64__)
#define JUMP(name) "adrp x16, shoal_" #name "\nldr x16, [x16, :lo12:shoal_" #name "]\nbr x16\n"
#else
#error "shoal-gpu runs on x86-64 and arm64"
#endif

#define CALL(name) \
	__attribute__((visibility("hidden"))) void *shoal_##name = (void *)absent; \
	__asm__(".text\n.globl " #name "\n.type " #name ", %function\n" #name ":\n" JUMP(name) ".size " #name ", .-" #name "\n");
#include "calls.h"
#undef CALL

static struct {
	const char *name;
	void **call;
} calls[] = {
#define CALL(name) {#name, &shoal_##name},
#include "calls.h"
#undef CALL
};

static int result; // of the driver's cuInit, -1 if there is no driver
static char why[512];

static void load(void)
{
	void *lib = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
	int (*init)(unsigned) = NULL;
	if (lib)
		init = (int (*)(unsigned))dlsym(lib, "cuInit");
	if (!init) {
		const char *e = dlerror();
		snprintf(why, sizeof why, "%s", e ? e : "libcuda.so.1 has no cuInit");
		result = -1;
		return;
	}
	for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
		void *f = dlsym(lib, calls[i].name);
		if (f)
			*calls[i].call = f;
	}
	result = init(0);
}

static pthread_once_t once = PTHREAD_ONCE_INIT;

// shoal_cuda_load returns the result of the driver's cuInit, or -1 and the reason if the driver could not be
// loaded.
int shoal_cuda_load(const char **reason)
{
	pthread_once(&once, load);
	*reason = why;
	return result;
}

// cuInit replaces the driver's own.
int cuInit(unsigned flags)
{
	(void)flags;
	pthread_once(&once, load);
	return 0;
}
