// Events. The state of an event says which of its records are done; that of an interprocess event lies in a memfd,
// which its handle names by process and descriptor.

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "driver.h"

// A record is waited for by its number: one that was made later, in another stream, may be done earlier.
#define RECORDS 256

typedef struct {
	_Atomic uint64_t recorded;
	_Atomic uint64_t done[RECORDS]; // at number % RECORDS: the newest that is done
	_Atomic int64_t time;           // when the newest was done
} records;

struct event_state {
	records *records;
	_Atomic int references;
};

void event_hold(event_state *s) { atomic_fetch_add(&s->references, 1); }

void event_drop(event_state *s) {
	if (atomic_fetch_sub(&s->references, 1) != 1)
		return;
	munmap(s->records, sizeof *s->records);
	free(s);
}

void event_done(event_state *s, uint64_t record) {
	atomic_store(&s->records->time, now());
	atomic_store(&s->records->done[record % RECORDS], record);
}

static bool event_is_done(event_state *s, uint64_t record) {
	return record == 0 || atomic_load(&s->records->done[record % RECORDS]) >= record;
}

void event_wait(event_state *s, uint64_t record) {
	while (!event_is_done(s, record)) {
		struct timespec t;
		clock_gettime(CLOCK_REALTIME, &t);
		t.tv_nsec += 200000;
		t.tv_sec += t.tv_nsec / 1000000000, t.tv_nsec %= 1000000000;
		LOCKED;
		if (!event_is_done(s, record))
			pthread_cond_timedwait(&changed, &lock, &t);
	}
}

static CUresult enqueue_event(CUevent e, CUstream handle, bool record) {
	STREAM(s, handle);
	if (e == NULL || e->context->device != s->context->device)
		return CUDA_ERROR_INVALID_HANDLE;
	{
		LOCKED;
		if (s->capture != NULL || (!record && e->capture != NULL))
			return record ? capture_record(s, e) : capture_wait(s, e);
		if (record)
			e->capture = NULL;
	}
	op *o = calloc(1, sizeof *o);
	o->kind = record ? RECORD : WAIT;
	o->event = e->state;
	event_hold(e->state);
	o->record = record ? atomic_fetch_add(&e->state->records->recorded, 1) +
		1 : atomic_load(&e->state->records->recorded);
	return enqueue(s, o);
}

API CUresult cuEventRecord(CUevent e, CUstream s) {
	ENTER(CONTEXT);
	return enqueue_event(e, s, true);
}

API CUresult cuStreamWaitEvent(CUstream s, CUevent e, unsigned flags) {
	ENTER(CONTEXT);
	return flags != 0 ? CUDA_ERROR_INVALID_VALUE : enqueue_event(e, s, false);
}

static event *new_event(unsigned flags, int fd) {
	event *e = calloc(1, sizeof *e);
	e->state = calloc(1, sizeof *e->state);
	e->flags = flags, e->fd = fd, e->context = current();
	atomic_store(&e->state->references, 1);
	e->state->records = mmap(NULL, sizeof *e->state->records, PROT_READ | PROT_WRITE,
		MAP_SHARED | (fd < 0 ? MAP_ANONYMOUS : 0), fd, 0);
	if (e->state->records == MAP_FAILED) {
		free(e->state);
		free(e);
		return NULL;
	}
	return e;
}

API CUresult cuEventCreate(CUevent *handle, unsigned flags) {
	ENTER(CONTEXT);
	if ((flags & ~7u) != 0 || (flags & 6) == EVENT_INTERPROCESS) // those between processes keep no time
		return CUDA_ERROR_INVALID_VALUE;
	int fd = -1;
	if (flags & EVENT_INTERPROCESS) {
		fd = memfd_create("shoal-software-event", MFD_CLOEXEC);
		if (fd < 0 || ftruncate(fd, sizeof(records)) != 0)
			return CUDA_ERROR_OUT_OF_MEMORY;
	}
	*handle = new_event(flags, fd);
	return *handle == NULL ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

// As on hardware, waits that are queued hold.
API CUresult cuEventDestroy_v2(CUevent e) {
	ENTER(CONTEXT);
	if (e == NULL)
		return CUDA_ERROR_INVALID_HANDLE;
	event_drop(e->state);
	if (e->fd >= 0)
		close(e->fd);
	free(e);
	return CUDA_SUCCESS;
}

API CUresult cuEventQuery(CUevent e) {
	ENTER(UNSAFE);
	if (e == NULL)
		return CUDA_ERROR_INVALID_HANDLE;
	if (e->capture != NULL)
		return CUDA_ERROR_CAPTURED_EVENT;
	if (!event_is_done(e->state, atomic_load(&e->state->records->recorded)))
		return CUDA_ERROR_NOT_READY;
	return (CUresult)atomic_load(&lost);
}

API CUresult cuEventSynchronize(CUevent e) {
	ENTER(UNSAFE);
	if (e == NULL)
		return CUDA_ERROR_INVALID_HANDLE;
	if (e->capture != NULL)
		return CUDA_ERROR_CAPTURED_EVENT;
	event_wait(e->state, atomic_load(&e->state->records->recorded));
	return (CUresult)atomic_load(&lost);
}

API CUresult cuEventElapsedTime(float *milliseconds, CUevent from, CUevent to) {
	ENTER(CONTEXT);
	if (from == NULL || to == NULL || ((from->flags | to->flags) & EVENT_DISABLE_TIMING) != 0)
		return CUDA_ERROR_INVALID_HANDLE;
	records *a = from->state->records, *b = to->state->records;
	uint64_t first = atomic_load(&a->recorded), second = atomic_load(&b->recorded);
	if (first == 0 || second == 0)
		return CUDA_ERROR_INVALID_HANDLE;
	if (!event_is_done(from->state, first) || !event_is_done(to->state, second))
		return CUDA_ERROR_NOT_READY;
	*milliseconds = (float)((double)(atomic_load(&b->time) - atomic_load(&a->time)) / 1e6);
	return CUDA_SUCCESS;
}

typedef struct {
	char magic[8];
	int pid, fd;
} ipc_name;

API CUresult cuIpcGetEventHandle(CUipcEventHandle *handle, CUevent e) {
	ENTER(CONTEXT);
	if (e == NULL || e->fd < 0)
		return CUDA_ERROR_INVALID_HANDLE;
	memset(handle, 0, sizeof *handle);
	ipc_name name = {"shoal-e", getpid(), e->fd};
	memcpy(handle->reserved, &name, sizeof name);
	return CUDA_SUCCESS;
}

API CUresult cuIpcOpenEventHandle(CUevent *handle, CUipcEventHandle from) {
	ENTER(CONTEXT);
	ipc_name name;
	memcpy(&name, from.reserved, sizeof name);
	if (memcmp(name.magic, "shoal-e", sizeof name.magic) != 0)
		return CUDA_ERROR_INVALID_VALUE;
	if (name.pid == getpid()) // hardware wants another process
		return CUDA_ERROR_INVALID_CONTEXT;
	char path[64];
	snprintf(path, sizeof path, "/proc/%d/fd/%d", name.pid, name.fd);
	int fd = open(path, O_RDWR | O_CLOEXEC);
	if (fd < 0)
		return CUDA_ERROR_INVALID_VALUE;
	*handle = new_event(EVENT_INTERPROCESS | EVENT_DISABLE_TIMING, fd);
	return *handle == NULL ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}
