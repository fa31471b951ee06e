// Virtual memory management: reservations of addresses, allocations that are memfds, mappings of these into those.

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "driver.h"

#define GRANULARITY (2ull << 20)
#define MEMFD_NAME "shoal-software-device"

typedef struct allocation {
	int fd;
	uint64_t size;
	int references; // the handle's, and one for each mapping
	bool exportable, imported;
} allocation;

typedef struct reservation {
	uint64_t base, size;
	void *whole; // as mapped, before alignment
	size_t whole_size;
	struct reservation *next;
} reservation;

static reservation *reservations;

API CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *prop, int option) {
	ENTER(INIT);
	(void)option;
	if (prop->type != 1 || prop->location.type != 1)
		return CUDA_ERROR_INVALID_VALUE;
	*granularity = GRANULARITY;
	return CUDA_SUCCESS;
}

API CUresult cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr at,
                                 unsigned long long flags) {
	ENTER(CONTEXT);
	if (size == 0 || size % GRANULARITY != 0 || flags != 0 || (alignment & (alignment - 1)) != 0)
		return CUDA_ERROR_INVALID_VALUE;
	(void)at; // a wish
	if (alignment < GRANULARITY)
		alignment = GRANULARITY;
	size_t whole = size + alignment;
	char *p = mmap(NULL, whole, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (p == MAP_FAILED)
		return CUDA_ERROR_OUT_OF_MEMORY;
	reservation *r = calloc(1, sizeof *r);
	r->base = ((uint64_t)p + alignment - 1) / alignment * alignment, r->size = size;
	r->whole = p, r->whole_size = whole;
	LOCKED;
	r->next = reservations;
	reservations = r;
	*address = r->base;
	return CUDA_SUCCESS;
}

// occupied tells whether anything is mapped in a reservation; with the lock held.
static bool occupied(uint64_t address, size_t size) {
	for (uint64_t at = address; at < address + size; at += GRANULARITY)
		if (range_at(at) != NULL)
			return true;
	return false;
}

API CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
	ENTER(CONTEXT);
	LOCKED;
	reservation **at = &reservations;
	while (*at != NULL && ((*at)->base != address || (*at)->size != size))
		at = &(*at)->next;
	reservation *r = *at;
	if (r == NULL || occupied(address, size))
		return CUDA_ERROR_INVALID_VALUE;
	*at = r->next;
	munmap(r->whole, r->whole_size);
	free(r);
	return CUDA_SUCCESS;
}

static void drop(allocation *a) {
	{
		LOCKED;
		if (--a->references > 0)
			return;
	}
	close(a->fd);
	if (!a->imported)
		return_memory(a->size);
	free(a);
}

API CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop,
                         unsigned long long flags) {
	ENTER(UNSAFE);
	if (size == 0 || size % GRANULARITY != 0 || flags != 0 || prop->type != 1 || prop->location.type != 1 ||
	    (prop->requestedHandleTypes & ~1) != 0)
		return CUDA_ERROR_INVALID_VALUE;
	if (!reserve_memory(size))
		return CUDA_ERROR_OUT_OF_MEMORY;
	allocation *a = calloc(1, sizeof *a);
	a->fd = memfd_create(MEMFD_NAME, MFD_CLOEXEC);
	a->size = size, a->references = 1, a->exportable = prop->requestedHandleTypes == 1;
	if (a->fd < 0 || ftruncate(a->fd, (off_t)size) != 0) {
		drop(a);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	*handle = (CUmemGenericAllocationHandle)a;
	return CUDA_SUCCESS;
}

API CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
	ENTER(UNSAFE);
	if (handle == 0)
		return CUDA_ERROR_INVALID_VALUE;
	drop((allocation *)handle);
	return CUDA_SUCCESS;
}

API CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                      unsigned long long flags) {
	ENTER(UNSAFE);
	allocation *a = (allocation *)handle;
	if (a == NULL || flags != 0 || size == 0 || size % GRANULARITY != 0 || address % GRANULARITY != 0 || offset != 0 ||
	    size > a->size)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&lock);
	bool reserved = false;
	for (reservation *r = reservations; r != NULL; r = r->next)
		reserved = reserved || (address >= r->base && address + size <= r->base + r->size);
	bool free_there = reserved && !occupied(address, size);
	pthread_mutex_unlock(&lock);
	if (!free_there)
		return CUDA_ERROR_INVALID_VALUE;
	char *alias = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, a->fd, 0);
	if (alias == MAP_FAILED)
		return CUDA_ERROR_OUT_OF_MEMORY;
	range *r = range_add(address, size, alias, MAPPED_MEMORY);
	LOCKED;
	r->allocation = a;
	a->references++;
	return CUDA_SUCCESS;
}

// mapping returns what is mapped at an address, and ends with end or before; else NULL.
static range *mapping(uint64_t at, uint64_t end) {
	range *r = range_at(at);
	return r != NULL && r->kind == MAPPED_MEMORY && r->base == at && at + r->size <= end ? r : NULL;
}

API CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc *desc, size_t count) {
	ENTER(UNSAFE);
	if (count != 1 || desc->location.type != 1 || (desc->flags & ~3) != 0)
		return CUDA_ERROR_INVALID_VALUE;
	LOCKED;
	for (uint64_t at = address; at < address + size;) {
		range *r = mapping(at, address + size);
		if (r == NULL)
			return CUDA_ERROR_INVALID_VALUE;
		r->access = desc->flags;
		at += r->size;
	}
	return CUDA_SUCCESS;
}

API CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
	ENTER(UNSAFE);
	for (uint64_t at = address; at < address + size;) {
		pthread_mutex_lock(&lock);
		range *r = mapping(at, address + size);
		bool used = r != NULL && in_use("cuMemUnmap", r);
		if (r != NULL && !used)
			r->live = false;
		pthread_mutex_unlock(&lock);
		if (r == NULL)
			return CUDA_ERROR_INVALID_VALUE;
		if (used)
			return CUDA_ERROR_ILLEGAL_ADDRESS;
		munmap(r->alias, r->size);
		drop(r->allocation);
		at += r->size;
	}
	trace("\"call\":\"cuMemUnmap\",\"address\":%llu,\"bytes\":%zu", address, size);
	return CUDA_SUCCESS;
}

API CUresult cuMemExportToShareableHandle(void *to, CUmemGenericAllocationHandle handle, int type,
                                          unsigned long long flags) {
	ENTER(CONTEXT);
	allocation *a = (allocation *)handle;
	if (a == NULL || type != 1 || flags != 0 || !a->exportable)
		return CUDA_ERROR_INVALID_VALUE;
	int fd = fcntl(a->fd, F_DUPFD_CLOEXEC, 0);
	if (fd < 0)
		return CUDA_ERROR_OUT_OF_MEMORY;
	*(int *)to = fd;
	return CUDA_SUCCESS;
}

API CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *os_handle, int type) {
	ENTER(UNSAFE);
	int fd = (int)(intptr_t)os_handle;
	char link[64], target[128];
	snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
	ssize_t n = readlink(link, target, sizeof target - 1);
	struct stat st;
	if (type != 1 || n < 0 || fstat(fd, &st) != 0)
		return CUDA_ERROR_INVALID_VALUE;
	target[n] = 0;
	if (strstr(target, MEMFD_NAME) == NULL) // some other file
		return CUDA_ERROR_INVALID_VALUE;
	allocation *a = calloc(1, sizeof *a);
	a->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
	a->size = (uint64_t)st.st_size, a->references = 1, a->exportable = true, a->imported = true;
	*handle = (CUmemGenericAllocationHandle)a;
	return CUDA_SUCCESS;
}
