// A driver in software: streams are threads, device memory is host memory that only streams reach.
//
// One lock guards all state, and one condition announces every change of it: what is sought here is order that can be
// trusted, not speed. Streams run their operations without the lock.
//
// Traps that hardware punishes in silence and this driver does aloud: see fatal().
#pragma once

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "api.h"

extern pthread_mutex_t lock;
extern pthread_cond_t changed;

// LOCKED holds the lock until the block ends.
static inline void unlock(pthread_mutex_t **held) { pthread_mutex_unlock(*held); }
#define LOCKED                                                                                                         \
	pthread_mutex_t *held __attribute__((cleanup(unlock))) = &lock;                                                    \
	pthread_mutex_lock(held)

// script.c

// Every call begins with ENTER: it fails as the script wants, before cuInit, without a context where it needs one,
// after an operation has failed, as a context does that is lost, and, where it is UNSAFE, while a capture of a graph
// forbids it.
enum { ANY, INIT, CONTEXT, UNSAFE };
CUresult enter(const char *call, int needs);
#define ENTER(needs)                                                                                                   \
	do {                                                                                                               \
		CUresult entered = enter(__func__, needs);                                                                     \
		if (entered != CUDA_SUCCESS)                                                                                   \
			return entered;                                                                                            \
	} while (0)

long long setting(const char *name, long long otherwise); // NAME=NUMBER of the script
void pace(const char *name);                              // the script's delay and hold for a kind, or a name
CUresult fault(const char *name);                         // counts it against all entries NAME:N and NAME:*
int64_t now(void);                                        // ns, monotonic, comparable between processes
void trace(const char *format, ...) __attribute__((format(printf, 1, 2)));

// fatal ends the process with a message. With trap=error in the script it returns, and the context is lost with that
// result, as on hardware.
void fatal(CUresult result, const char *format, ...) __attribute__((format(printf, 2, 3)));
extern _Atomic int lost;

// memory.c

typedef enum { DEVICE_MEMORY, MAPPED_MEMORY, HOST_MEMORY } memory_kind;

// A range is memory that the device may use. Addresses of device memory cannot be read by the host, as on hardware:
// the bytes are at alias.
typedef struct range {
	uint64_t base, size;
	char *alias;
	memory_kind kind;
	int access;  // 1: read, 2: write
	int pending; // operations in queues that use it
	bool live, allocated;
	struct allocation *allocation; // of MAPPED_MEMORY
	struct range *next;
} range;

range *range_at(uint64_t address);                                         // live, or NULL
range *range_add(uint64_t base, uint64_t size, char *alias, memory_kind);  // takes the lock
bool in_use(const char *call, range *r);                                   // fatal if operations in queues use it
char *reach(uint64_t address, uint64_t size, int access, const char *who); // the bytes, or fatal and NULL
bool reserve_memory(uint64_t bytes);                                       // of the device's, by setting memory=
void return_memory(uint64_t bytes);

// stream.c

typedef enum { COPY, SET, LAUNCH, RECORD, WAIT } kind;

typedef struct {
	struct stream *stream;
	uint64_t number;
} dependency;

typedef struct op {
	kind kind;
	const char *name;         // "HtoD", or the kernel's
	uint64_t dst, src, bytes; // COPY, SET
	unsigned char value;      // SET
	struct function *function;
	unsigned grid[3], block[3];
	unsigned shared;
	void *params; // a copy, owned
	struct event_state *event; // RECORD, WAIT: owned reference
	uint64_t record;
	range *used[16];
	int nused;
	dependency *deps;
	int ndeps;
	struct op *next;
} op;

typedef struct stream {
	struct context *context;
	unsigned flags, id;
	bool destroyed;
	uint64_t queued, done;
	op *head, *tail;
	struct graph *capture;
	bool joined; // an event was recorded after the last operation that was captured
	struct stream *next;
} stream;

stream *stream_of(CUstream handle); // resolves the default streams; NULL if there is no such stream
#define STREAM(s, handle)                                                                                              \
	stream *s = stream_of(handle);                                                                                     \
	if (s == NULL)                                                                                                     \
		return CUDA_ERROR_INVALID_HANDLE
CUresult enqueue(stream *s, op *o); // takes the operation; to the graph while the stream is captured
CUresult cuCtxSynchronize(void);
extern stream *streams; // of all contexts, by next; with the lock held
op *op_copy(const op *o);
void op_free(op *o);

// event.c

typedef struct event_state event_state;
typedef struct event {
	event_state *state;
	struct context *context;
	unsigned flags;
	int fd;                // of an interprocess event's memory, else -1
	struct graph *capture; // in which it was recorded last, of number capture_id
	unsigned capture_id;
	struct event *next;
} event;

void event_hold(event_state *);
void event_drop(event_state *);
void event_done(event_state *, uint64_t record);
// looks again and again: another process, of which it may come, cannot signal
void event_wait(event_state *, uint64_t record);

// graph.c

// All with the lock held. capture takes the operation.
CUresult capture(stream *s, op *o);
CUresult capture_record(stream *s, event *e);
CUresult capture_wait(stream *s, event *e);

// whether this thread may not make an unsafe call now; the capture is spoilt then. Takes the lock
bool capture_forbids(void);

// module.c

typedef struct function {
	char name[128];
	void (*run)(const void *thread, const void *params);
	void (*gather)(void **from, void *params);
	unsigned bytes, shared; // of parameters, and of shared memory
	struct function *next;
} function;

void launch(const op *o);

typedef struct context {
	CUdevice device;
	int retained; // of a primary context
	stream *standard;
} context;

context *current(void);
