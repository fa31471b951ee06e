// Streams: a queue and a thread each. What is put in is done in order, after the operations of other streams that it
// has to wait for, and while the caller goes on.

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "driver.h"

stream *streams; // they stay, since operations of others may name them
static unsigned stream_ids;

static const char *const kinds[] = {"copy", "set", "launch", "record", "wait"};

op *op_copy(const op *o) {
	op *c = malloc(sizeof *c);
	*c = *o;
	c->next = NULL, c->deps = NULL, c->ndeps = 0;
	if (o->params != NULL) {
		c->params = malloc(o->function->bytes);
		memcpy(c->params, o->params, o->function->bytes);
	}
	if (o->event != NULL)
		event_hold(o->event);
	return c;
}

void op_free(op *o) {
	if (o->event != NULL)
		event_drop(o->event);
	free(o->params);
	free(o->deps);
	free(o);
}

// run does the operation's work. It holds no lock.
static void run(op *o) {
	if (atomic_load(&lost) != 0 && o->kind != RECORD)
		return; // nothing is done in a lost context, but queues go on, and events come, so that waiting ends
	CUresult failed = o->kind < RECORD ? fault(kinds[o->kind]) : CUDA_SUCCESS;
	if (failed != CUDA_SUCCESS) {
		int none = 0;
		atomic_compare_exchange_strong(&lost, &none, failed);
		return;
	}
	char *dst, *src;
	switch (o->kind) {
	case COPY:
		src = reach(o->src, o->bytes, 1, o->name), dst = reach(o->dst, o->bytes, 2, o->name);
		if (dst != NULL && src != NULL)
			memcpy(dst, src, o->bytes);
		break;
	case SET:
		dst = reach(o->dst, o->bytes, 2, "memset");
		if (dst != NULL)
			memset(dst, o->value, o->bytes);
		break;
	case LAUNCH:
		launch(o);
		break;
	case RECORD:
		event_done(o->event, o->record);
		break;
	case WAIT:
		break;
	}
}

static bool ready(const op *o) {
	for (int i = 0; i < o->ndeps; i++)
		if (o->deps[i].stream->done < o->deps[i].number)
			return false;
	return true;
}

static void *work(void *arg) {
	stream *s = arg;
	for (;;) {
		pthread_mutex_lock(&lock);
		while (s->head == NULL || !ready(s->head))
			pthread_cond_wait(&changed, &lock);
		op *o = s->head;
		pthread_mutex_unlock(&lock);
		if (o->kind == WAIT)
			event_wait(o->event, o->record);
		int64_t start = now();
		if (o->kind < RECORD) {
			pace(kinds[o->kind]);
			pace(o->name);
		}
		run(o);
		trace("\"op\":\"%s\",\"name\":\"%s\",\"stream\":%u,\"start\":%lld,\"end\":%lld,\"bytes\":%llu", kinds[o->kind],
		      o->name != NULL ? o->name : "", s->id, (long long)start, (long long)now(), (unsigned long long)o->bytes);
		pthread_mutex_lock(&lock);
		for (int i = 0; i < o->nused; i++)
			o->used[i]->pending--;
		s->head = o->next;
		if (s->head == NULL)
			s->tail = NULL;
		s->done++;
		pthread_cond_broadcast(&changed);
		pthread_mutex_unlock(&lock);
		op_free(o);
	}
	return NULL;
}

// new_stream is called with the lock held.
static stream *new_stream(context *c, unsigned flags) {
	stream *s = calloc(1, sizeof *s);
	s->context = c, s->flags = flags, s->id = ++stream_ids;
	s->next = streams;
	pthread_t thread;
	if (pthread_create(&thread, NULL, work, s) != 0) {
		free(s);
		return NULL;
	}
	pthread_detach(thread);
	streams = s;
	return s;
}

stream *stream_of(CUstream handle) {
	LOCKED;
	if ((uintptr_t)handle <= 2) { // the default stream, by its three names
		context *c = current();
		if (c->standard == NULL)
			c->standard = new_stream(c, 0);
		return c->standard;
	}
	for (stream *s = streams; s != NULL; s = s->next)
		if (s == handle && !s->destroyed)
			return s;
	return NULL;
}

static void depend(op *o, stream *on) {
	if (on == NULL || on->queued == on->done)
		return;
	o->deps = realloc(o->deps, (size_t)(o->ndeps + 1) * sizeof *o->deps);
	o->deps[o->ndeps++] = (dependency){on, on->queued};
}

static void use(op *o, uint64_t address) {
	range *r = address == 0 ? NULL : range_at(address);
	if (r != NULL && o->nused < (int)(sizeof o->used / sizeof o->used[0])) {
		r->pending++;
		o->used[o->nused++] = r;
	}
}

CUresult enqueue(stream *s, op *o) {
	LOCKED;
	if (s->capture != NULL)
		return capture(s, o);
	// What the default stream is known for: it waits for all streams of its context, and they for it, except those
	// that were made not to.
	if (s == s->context->standard) {
		for (stream *other = streams; other != NULL; other = other->next)
			if (other != s && other->context == s->context && (other->flags & STREAM_NON_BLOCKING) == 0)
				depend(o, other);
	} else if ((s->flags & STREAM_NON_BLOCKING) == 0)
		depend(o, s->context->standard);
	o->nused = 0;
	if (o->kind == COPY || o->kind == SET)
		use(o, o->dst);
	if (o->kind == COPY)
		use(o, o->src);
	if (o->kind == LAUNCH)
		for (size_t at = 0; at + 8 <= o->function->bytes; at += 8) {
			uint64_t address;
			memcpy(&address, (char *)o->params + at, 8);
			use(o, address);
		}
	++s->queued;
	if (s->tail != NULL)
		s->tail->next = o;
	else
		s->head = o;
	s->tail = o;
	pthread_cond_broadcast(&changed);
	return CUDA_SUCCESS;
}

// drain waits until all that is in the stream now is done.
static CUresult drain(stream *s) {
	LOCKED;
	for (uint64_t until = s->queued; s->done < until;)
		pthread_cond_wait(&changed, &lock);
	return (CUresult)atomic_load(&lost);
}

static op *new_op(kind k, const char *name) {
	op *o = calloc(1, sizeof *o);
	o->kind = k, o->name = name;
	return o;
}

API CUresult cuStreamCreate(CUstream *handle, unsigned flags) {
	ENTER(CONTEXT);
	if ((flags & ~1u) != 0)
		return CUDA_ERROR_INVALID_VALUE;
	LOCKED;
	*handle = new_stream(current(), flags);
	return *handle == NULL ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

// As on hardware it returns at once: what is in the stream is still done.
API CUresult cuStreamDestroy_v2(CUstream handle) {
	ENTER(CONTEXT);
	stream *s = (uintptr_t)handle <= 2 ? NULL : stream_of(handle);
	if (s == NULL)
		return CUDA_ERROR_INVALID_HANDLE;
	s->destroyed = true;
	return CUDA_SUCCESS;
}

API CUresult cuStreamSynchronize(CUstream handle) {
	ENTER(UNSAFE);
	STREAM(s, handle);
	return s->capture != NULL ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : drain(s);
}

API CUresult cuStreamQuery(CUstream handle) {
	ENTER(UNSAFE);
	STREAM(s, handle);
	if (s->capture != NULL)
		return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
	LOCKED;
	return s->done == s->queued ? (CUresult)atomic_load(&lost) : CUDA_ERROR_NOT_READY;
}

API CUresult cuCtxSynchronize(void) {
	ENTER(UNSAFE);
	pthread_mutex_lock(&lock);
	stream *first = streams;
	pthread_mutex_unlock(&lock);
	for (stream *s = first; s != NULL; s = s->next)
		if (s->context == current())
			drain(s);
	return (CUresult)atomic_load(&lost);
}

// locked tells whether host memory is page-locked.
static bool locked(uint64_t address, size_t bytes) {
	LOCKED;
	range *r = range_at(address);
	return r != NULL && r->kind == HOST_MEMORY && address + bytes <= r->base + r->size;
}

// copy queues a copy. Host memory that is not page-locked is read and written before it returns, as hardware has to do
// through a buffer of the driver's.
static CUresult copy(const char *name, uint64_t dst, uint64_t src, size_t bytes, CUstream handle, uint64_t host,
	bool async) {
	STREAM(s, handle);
	if (bytes == 0)
		return CUDA_SUCCESS;
	range *temporary = NULL;
	if (host != 0 && !locked(host, bytes)) {
		if (async) {
			trace("\"pageable\":\"%s\",\"address\":%llu,\"bytes\":%zu", name, (unsigned long long)host, bytes);
			if (setting("pageable", 1) == 0)
				fatal(CUDA_ERROR_INVALID_VALUE,
				"asynchronous copy %s of %zu bytes at %#llx, which are not page-locked: hardware would wait for it",
				      name, bytes, (unsigned long long)host);
		}
		if (s->capture != NULL)
			return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
		temporary = range_add(host, bytes, (char *)(uintptr_t)host, HOST_MEMORY);
	}
	op *o = new_op(COPY, name);
	o->dst = dst, o->src = src, o->bytes = bytes;
	CUresult result = enqueue(s, o);
	if (result == CUDA_SUCCESS && (!async || temporary != NULL))
		result = drain(s);
	if (temporary != NULL) {
		LOCKED;
		temporary->live = false;
	}
	return result;
}

API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr dst, const void *src, size_t bytes, CUstream s) {
	ENTER(CONTEXT);
	return copy("HtoD", dst, (uint64_t)src, bytes, s, (uint64_t)src, true);
}

API CUresult cuMemcpyDtoHAsync_v2(void *dst, CUdeviceptr src, size_t bytes, CUstream s) {
	ENTER(CONTEXT);
	return copy("DtoH", (uint64_t)dst, src, bytes, s, (uint64_t)dst, true);
}

API CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream s) {
	ENTER(CONTEXT);
	return copy("DtoD", dst, src, bytes, s, 0, true);
}

API CUresult cuMemcpyHtoD_v2(CUdeviceptr dst, const void *src, size_t bytes) {
	ENTER(UNSAFE);
	return copy("HtoD", dst, (uint64_t)src, bytes, NULL, (uint64_t)src, false);
}

API CUresult cuMemcpyDtoH_v2(void *dst, CUdeviceptr src, size_t bytes) {
	ENTER(UNSAFE);
	return copy("DtoH", (uint64_t)dst, src, bytes, NULL, (uint64_t)dst, false);
}

API CUresult cuMemsetD8Async(CUdeviceptr dst, unsigned char value, size_t count, CUstream handle) {
	ENTER(CONTEXT);
	STREAM(s, handle);
	if (count == 0)
		return CUDA_SUCCESS;
	op *o = new_op(SET, "memset");
	o->dst = dst, o->value = value, o->bytes = count;
	return enqueue(s, o);
}

API CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                            unsigned shared, CUstream handle, void **params, void **extra) {
	ENTER(CONTEXT);
	stream *s = stream_of(handle);
	if (f == NULL || s == NULL)
		return CUDA_ERROR_INVALID_HANDLE;
	if (gx == 0 || gy == 0 || gz == 0 || bx == 0 || by == 0 || bz == 0 || gy > 65535 || gz > 65535 || bz > 64 ||
	    (uint64_t)bx * by * bz > 1024 || shared > (48 << 10) || extra != NULL || (params == NULL && f->bytes != 0))
		return CUDA_ERROR_INVALID_VALUE;
	op *o = new_op(LAUNCH, f->name);
	o->function = f, o->shared = shared;
	o->grid[0] = gx, o->grid[1] = gy, o->grid[2] = gz;
	o->block[0] = bx, o->block[1] = by, o->block[2] = bz;
	o->params = calloc(1, f->bytes + 1);
	f->gather(params, o->params);
	return enqueue(s, o);
}
