// Memory: what the device may use, and the checks that it uses nothing else.

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "driver.h"

static range *ranges; // newest first; dead ones stay, for messages
static uint64_t taken;

static uint64_t up(uint64_t n, uint64_t unit) { return (n + unit - 1) / unit * unit; }

range *range_at(uint64_t address) {
	for (range *r = ranges; r != NULL; r = r->next)
		if (r->live && address >= r->base && address - r->base < r->size)
			return r;
	return NULL;
}

range *range_add(uint64_t base, uint64_t size, char *alias, memory_kind kind) {
	range *r = calloc(1, sizeof *r);
	r->base = base, r->size = size, r->alias = alias, r->kind = kind, r->live = true;
	r->access = kind == MAPPED_MEMORY ? 0 : 3;
	LOCKED;
	r->next = ranges;
	ranges = r;
	return r;
}

bool in_use(const char *call, range *r) {
	if (r->pending == 0)
		return false;
	fatal(CUDA_ERROR_ILLEGAL_ADDRESS,
		"%s of %#llx while %d operations in streams still use it: wait for them first", call,
	      (unsigned long long)r->base, r->pending);
	return true;
}

// where describes an address, for messages.
static void where(uint64_t address, char *text, size_t size) {
	range *in = NULL, *below = NULL;
	for (range *r = ranges; r != NULL; r = r->next)
		if (in == NULL && address >= r->base && address - r->base < r->size)
			in = r;
		else if (r->live && address >= r->base + r->size && (below == NULL || r->base > below->base))
			below = r;
	if (in != NULL)
		snprintf(text, size, "byte %llu of %llu at %#llx, which %s", (unsigned long long)(address - in->base),
		         (unsigned long long)in->size, (unsigned long long)in->base,
		         in->live ? "ends too early, or may not be used so" : "is free again");
	else if (below != NULL)
		snprintf(text, size, "%llu bytes beyond the %llu at %#llx",
		         (unsigned long long)(address - below->base - below->size), (unsigned long long)below->size,
		         (unsigned long long)below->base);
	else
		snprintf(text, size, "no memory of the device, and none that is registered");
}

char *reach(uint64_t address, uint64_t size, int access, const char *who) {
	LOCKED;
	range *r = range_at(address);
	// Whole words may be read at the end of memory whose length is none of theirs.
	if (r != NULL && size <= up(r->size, 4) - (address - r->base) && (r->access & access) == access)
		return r->alias + (address - r->base);
	char text[256];
	where(address, text, sizeof text);
	fatal(CUDA_ERROR_ILLEGAL_ADDRESS, "%s %s %llu bytes at %#llx: %s", who, access & 2 ? "writes" : "reads",
	      (unsigned long long)size, (unsigned long long)address, text);
	return NULL;
}

bool reserve_memory(uint64_t bytes) {
	LOCKED;
	bool fits = taken + bytes <= (uint64_t)setting("memory", 8LL << 30);
	if (fits)
		taken += bytes;
	return fits;
}

void return_memory(uint64_t bytes) {
	LOCKED;
	taken -= bytes;
}

API CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
	ENTER(CONTEXT);
	LOCKED;
	*total = (size_t)setting("memory", 8LL << 30);
	*free_bytes = *total - taken;
	return CUDA_SUCCESS;
}

API CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t size) {
	ENTER(UNSAFE);
	if (size == 0)
		return CUDA_ERROR_INVALID_VALUE;
	uint64_t room = up(size, 4096);
	if (!reserve_memory(room))
		return CUDA_ERROR_OUT_OF_MEMORY;
	char *view = mmap(NULL, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	char *alias = mmap(NULL, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (view == MAP_FAILED || alias == MAP_FAILED) {
		return_memory(room);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	memset(alias, 0xa5, room); // fresh memory is not zero
	range_add((uint64_t)view, size, alias, DEVICE_MEMORY)->allocated = true;
	*address = (CUdeviceptr)view;
	return CUDA_SUCCESS;
}

API CUresult cuMemFree_v2(CUdeviceptr address) {
	ENTER(UNSAFE);
	if (address == 0)
		return CUDA_SUCCESS;
	LOCKED;
	range *r = range_at(address);
	if (r == NULL || r->base != address || r->kind != DEVICE_MEMORY)
		return CUDA_ERROR_INVALID_VALUE;
	if (in_use("cuMemFree", r))
		return CUDA_ERROR_ILLEGAL_ADDRESS;
	r->live = false;
	munmap((void *)r->base, up(r->size, 4096));
	munmap(r->alias, up(r->size, 4096));
	taken -= up(r->size, 4096);
	return CUDA_SUCCESS;
}

static bool mapped(const char *p, size_t size) {
	long page = sysconf(_SC_PAGESIZE);
	char *start = (char *)((uintptr_t)p & ~(uintptr_t)(page - 1));
	size_t length = (size_t)(p + size - start), pages = (length + (size_t)page - 1) / (size_t)page;
	unsigned char *resident = malloc(pages);
	bool ok = mincore(start, length, resident) == 0;
	free(resident);
	return ok;
}

API CUresult cuMemHostRegister_v2(void *p, size_t size, unsigned flags) {
	ENTER(UNSAFE);
	if (p == NULL || size == 0 || !mapped(p, size))
		return CUDA_ERROR_INVALID_VALUE;
	uint64_t base = (uint64_t)p;
	{
		LOCKED;
		for (range *r = ranges; r != NULL; r = r->next)
			if (r->live && base < r->base + r->size && r->base < base + size)
				return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
	}
	(void)flags;
	range_add(base, size, p, HOST_MEMORY);
	return CUDA_SUCCESS;
}

API CUresult cuMemHostUnregister(void *p) {
	ENTER(UNSAFE);
	LOCKED;
	range *r = range_at((uint64_t)p);
	if (r == NULL || r->base != (uint64_t)p || r->kind != HOST_MEMORY || r->allocated)
		return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
	if (in_use("cuMemHostUnregister", r))
		return CUDA_ERROR_ILLEGAL_ADDRESS;
	r->live = false;
	return CUDA_SUCCESS;
}

API CUresult cuMemHostAlloc(void **p, size_t size, unsigned flags) {
	ENTER(UNSAFE);
	char *bytes = mmap(NULL, up(size, 4096), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (size == 0 || bytes == MAP_FAILED)
		return CUDA_ERROR_OUT_OF_MEMORY;
	(void)flags;
	range_add((uint64_t)bytes, size, bytes, HOST_MEMORY)->allocated = true;
	*p = bytes;
	return CUDA_SUCCESS;
}
