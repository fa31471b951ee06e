// Graphs: what was put into streams under capture, done again as a whole. A graph runs its operations one after the
// other in the order of capture, which every graph's dependencies allow.

#include <stdlib.h>

#include "driver.h"

typedef struct graph {
	unsigned id;
	op *first, *last; // in order of capture
	stream *origin;
	int mode;
	pthread_t thread; // that began the capture
	bool invalid;
} graph;

static unsigned graph_ids;

// What a capture forbids other calls, and a thread has itself forbidden: CUstreamCaptureMode. Calls are unsafe that a
// driver may carry out by work in other streams than the caller's: memory that is made or given back, and every wait
// and query.
enum { GLOBAL, THREAD_LOCAL, RELAXED };
static __thread int thread_mode;

API CUresult cuThreadExchangeStreamCaptureMode(int *mode) {
	ENTER(INIT);
	if (*mode < GLOBAL || *mode > RELAXED)
		return CUDA_ERROR_INVALID_VALUE;
	int old = thread_mode;
	thread_mode = *mode, *mode = old;
	return CUDA_SUCCESS;
}

bool capture_forbids(void) {
	bool forbidden = false;
	LOCKED;
	for (stream *s = streams; s != NULL && thread_mode != RELAXED; s = s->next) {
		graph *g = s->capture;
		if (g == NULL || g->origin != s || g->mode == RELAXED)
			continue;
		if (pthread_equal(g->thread, pthread_self()) || (g->mode == GLOBAL && thread_mode == GLOBAL))
			forbidden = g->invalid = true;
	}
	return forbidden;
}

static void append(graph *g, op *o) {
	if (g->last != NULL)
		g->last->next = o;
	else
		g->first = o;
	g->last = o;
}

CUresult capture(stream *s, op *o) {
	append(s->capture, o);
	s->joined = false;
	return CUDA_SUCCESS;
}

// An event that is recorded in a capture marks the place where another stream may join it, and where the joined one
// comes back.
CUresult capture_record(stream *s, event *e) {
	e->capture = s->capture, e->capture_id = s->capture->id;
	s->joined = true;
	return CUDA_SUCCESS;
}

CUresult capture_wait(stream *s, event *e) {
	if (s->capture == NULL) { // the event's capture takes this stream in, if it goes on still
		for (stream *other = streams; other != NULL; other = other->next)
			if (other->capture != NULL && other->capture == e->capture && other->capture->id == e->capture_id) {
				s->capture = e->capture, s->joined = false;
				return CUDA_SUCCESS;
			}
		return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
	}
	if (e->capture != s->capture || e->capture_id != s->capture->id) { // work outside of the graph
		s->capture->invalid = true;
		return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
	}
	return CUDA_SUCCESS;
}

API CUresult cuStreamBeginCapture_v2(CUstream handle, int mode) {
	ENTER(CONTEXT);
	stream *s = (uintptr_t)handle <= 1 ? NULL : stream_of(handle);
	if (s == NULL) // the default stream cannot be captured
		return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
	if (mode < GLOBAL || mode > RELAXED || s->capture != NULL)
		return CUDA_ERROR_INVALID_VALUE;
	LOCKED;
	s->capture = calloc(1, sizeof(graph));
	s->capture->origin = s, s->capture->id = ++graph_ids, s->joined = true;
	s->capture->mode = mode, s->capture->thread = pthread_self();
	return CUDA_SUCCESS;
}

// blocking_capture tells whether a stream captures that the default stream waits for.
static bool blocking_capture(context *c) {
	LOCKED;
	stream *s = streams;
	while (s != NULL && (s->context != c || s->capture == NULL || (s->flags & STREAM_NON_BLOCKING) != 0))
		s = s->next;
	return s != NULL;
}

API CUresult cuStreamIsCapturing(CUstream handle, int *status) {
	ENTER(CONTEXT);
	STREAM(s, handle);
	// As on hardware: the default stream does not say, since it would wait for the capturing stream. No capture ends of
	// it.
	if (s == s->context->standard && blocking_capture(s->context))
		return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
	*status = s->capture == NULL ? 0 : s->capture->invalid ? 2 : 1;
	return CUDA_SUCCESS;
}

static CUresult destroy(graph *g) {
	if (g == NULL)
		return CUDA_ERROR_INVALID_VALUE;
	for (op *o = g->first; o != NULL;) {
		op *next = o->next;
		op_free(o);
		o = next;
	}
	free(g);
	return CUDA_SUCCESS;
}

API CUresult cuStreamEndCapture(CUstream handle, CUgraph *to) {
	ENTER(CONTEXT);
	stream *s = stream_of(handle);
	if (s == NULL || s->capture == NULL || s->capture->origin != s)
		return CUDA_ERROR_INVALID_VALUE;
	graph *g = s->capture;
	bool unjoined = false;
	LOCKED;
	for (stream *other = streams; other != NULL; other = other->next)
		if (other->capture == g) {
			unjoined = unjoined || (other != s && !other->joined);
			other->capture = NULL;
		}
	*to = NULL;
	if (g->invalid || unjoined) {
		CUresult result = g->invalid ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
		destroy(g);
		return result;
	}
	*to = g;
	return CUDA_SUCCESS;
}

API CUresult cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph g, unsigned long long flags) {
	ENTER(CONTEXT);
	(void)flags;
	if (g == NULL)
		return CUDA_ERROR_INVALID_VALUE;
	graph *copy = calloc(1, sizeof *copy);
	for (op *o = g->first; o != NULL; o = o->next)
		append(copy, op_copy(o));
	*exec = copy;
	return CUDA_SUCCESS;
}

API CUresult cuGraphLaunch(CUgraphExec exec, CUstream handle) {
	ENTER(CONTEXT);
	stream *s = stream_of(handle);
	if (exec == NULL || s == NULL)
		return CUDA_ERROR_INVALID_HANDLE;
	trace("\"call\":\"cuGraphLaunch\",\"stream\":%u", s->id);
	for (op *o = exec->first; o != NULL; o = o->next) {
		CUresult result = enqueue(s, op_copy(o));
		if (result != CUDA_SUCCESS)
			return result;
	}
	return CUDA_SUCCESS;
}

API CUresult cuGraphDestroy(CUgraph g) {
	ENTER(CONTEXT);
	return destroy(g);
}

API CUresult cuGraphExecDestroy(CUgraphExec exec) {
	ENTER(CONTEXT);
	return destroy(exec);
}
