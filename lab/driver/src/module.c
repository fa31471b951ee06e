// Modules and kernels: PTX, which ptx.sed and a compiler make into a shared object. The threads of a block run one
// after the other, each from barrier to barrier, on stacks of their own. Each access to memory is checked: it has to
// lie in one live allocation, at a multiple of its size.

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include "driver.h"
#include "ptx.h"

typedef struct module {
	void *library;
	struct function *functions;
} module;

enum { JIT_ERROR_LOG = 5, JIT_ERROR_LOG_BYTES = 6 };

// compile returns NULL, with what is wrong in error.
static void *compile(const char *ptx, char *error, size_t size) {
	char text[] = SOURCE "/ptx-XXXXXX", object[sizeof text + 3];
	int fd = mkstemp(text);
	FILE *f = fdopen(fd, "w");
	if (f == NULL || fputs(ptx, f) < 0 || fclose(f) != 0)
		return NULL;
	snprintf(object, sizeof object, "%s.so", text);
	static const char command[] =
		"exec 2>&1; sed -Ezf '" SOURCE "/ptx.sed' '%s' | ${CC:-gcc} -O1 -w -Werror=implicit-function-declaration -fwrapv "
	                              "-fno-strict-aliasing -fPIC -shared -DPTX -include '" SOURCE "/ptx.h' -x c -o '%s' -";
	char line[sizeof command + sizeof text + sizeof object];
	snprintf(line, sizeof line, command, text, object);
	FILE *said = popen(line, "r");
	if (said != NULL) {
		error[fread(error, 1, size - 1, said)] = 0;
		pclose(said);
	}
	void *library = dlopen(object, RTLD_NOW | RTLD_LOCAL);
	unlink(text);
	unlink(object);
	return library;
}

static CUresult load(CUmodule *handle, const void *image, unsigned count, const int *options, void **values) {
	const unsigned char *bytes = image;
	if (memcmp(bytes, "\x7f" "ELF", 4) == 0 || memcmp(bytes, "\x50\xed\x55\xba", 4) == 0)
		return CUDA_ERROR_INVALID_IMAGE; // machine code: there is no such machine here
	char error[4096] = "", *log = NULL;
	void *library = compile(image, error, sizeof error);
	if (library != NULL) {
		*handle = calloc(1, sizeof **handle);
		(*handle)->library = library;
		return CUDA_SUCCESS;
	}
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
	for (function *f = m->functions, *next; f != NULL; f = next) {
		next = f->next;
		free(f);
	}
	dlclose(m->library);
	free(m);
	return result;
}

API CUresult cuModuleGetFunction(CUfunction *handle, CUmodule m, const char *name) {
	ENTER(CONTEXT);
	if (m == NULL)
		return CUDA_ERROR_INVALID_HANDLE;
	function f = {.next = m->functions};
	char gather[160], bytes[160];
	snprintf(f.name, sizeof f.name, "%s", name);
	snprintf(gather, sizeof gather, "%s_gather", f.name);
	snprintf(bytes, sizeof bytes, "%s_bytes", f.name);
	const unsigned *size = dlsym(m->library, bytes), *shared = dlsym(m->library, "ptx_shared");
	if (size == NULL)
		return CUDA_ERROR_NOT_FOUND;
	f.run = dlsym(m->library, name), f.gather = dlsym(m->library, gather);
	f.bytes = *size, f.shared = shared != NULL ? *shared : 0;
	*handle = m->functions = malloc(sizeof f);
	*m->functions = f;
	return CUDA_SUCCESS;
}

// The launch whose thread runs on this stream's.
static __thread struct {
	const op *op;
	char *shared;
	ucontext_t stream, *threads;
	ptx_thread *states;
	unsigned now, living;
	bool failed;
} grid;

enum { STACK = 64 << 10 };

static void barrier(void) { swapcontext(&grid.threads[grid.now], &grid.stream); }

static char *at(bool shared, uint64_t address, unsigned bytes, int access, int line) {
	const op *o = grid.op;
	unsigned all = o->function->shared + o->shared;
	char *p = NULL;
	if (address % bytes != 0)
		fatal(CUDA_ERROR_MISALIGNED_ADDRESS, "kernel %s, PTX line %d: misaligned address", o->name, line);
	else if (!shared) {
		// Neighbours lie in what the launch names, which stays while it runs: the tables need not be searched.
		for (int i = 0; i < o->nused && p == NULL; i++) {
			const range *r = o->used[i];
			if ((r->access & access) == access && address - r->base < r->size && bytes <= r->size - (address - r->base))
				p = r->alias + (address - r->base);
		}
		if (p == NULL)
			p = reach(address, bytes, access, o->name);
	} else if (address <= all && bytes <= all - address)
		p = grid.shared + address;
	else
		fatal(CUDA_ERROR_ILLEGAL_ADDRESS, "kernel %s, PTX line %d: beyond shared memory", o->name, line);
	if (p == NULL) {
		grid.failed = true;
		barrier(); // for good
	}
	return p;
}

static void begin(void) {
	grid.op->function->run(&grid.states[grid.now], grid.op->params);
	grid.states[grid.now].barrier = NULL;
	grid.living--;
}

static void run_block(unsigned x, unsigned y, unsigned z, unsigned count, char *stacks) {
	const op *o = grid.op;
	memset(grid.shared, 0xa5, o->function->shared + o->shared);
	for (unsigned k = 0; k < count; k++) {
		unsigned across = o->block[0], down = o->block[1];
		grid.states[k] = (ptx_thread){{k % across, k / across % down, k / across / down}, {across, down, o->block[2]},
			{x, y, z},
		                              {o->grid[0], o->grid[1], o->grid[2]}, at, barrier};
		getcontext(&grid.threads[k]);
		grid.threads[k].uc_stack.ss_sp = stacks + (size_t)k * STACK, grid.threads[k].uc_stack.ss_size = STACK;
		grid.threads[k].uc_link = &grid.stream;
		makecontext(&grid.threads[k], begin, 0);
	}
	for (grid.living = count; grid.living > 0 && !grid.failed;)
		for (grid.now = 0; grid.now < count && !grid.failed; grid.now++)
			if (grid.states[grid.now].barrier != NULL)
				swapcontext(&grid.stream, &grid.threads[grid.now]);
}

void launch(const op *o) {
	unsigned count = o->block[0] * o->block[1] * o->block[2];
	char *stacks = mmap(NULL, (size_t)count * STACK, PROT_READ | PROT_WRITE,
		MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (stacks == MAP_FAILED) {
		fatal(CUDA_ERROR_OUT_OF_MEMORY, "kernel %s: no memory for %u stacks", o->name, count);
		return;
	}
	grid.op = o, grid.failed = false;
	grid.shared = malloc(o->function->shared + o->shared + 1);
	grid.threads = calloc(count, sizeof *grid.threads), grid.states = calloc(count, sizeof *grid.states);
	for (unsigned z = 0; z < o->grid[2]; z++)
		for (unsigned y = 0; y < o->grid[1]; y++)
			for (unsigned x = 0; x < o->grid[0] && !grid.failed; x++)
				run_block(x, y, z, count, stacks);
	free(grid.states);
	free(grid.threads);
	free(grid.shared);
	munmap(stacks, (size_t)count * STACK);
}
