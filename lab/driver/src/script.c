// What the test prescribes: faults, delays, the machine's properties; and the trace of what happened.
//
// SHOAL_CUDA_SCRIPT holds entries separated by semicolons:
//
//	devices=0  version=9000  memory=1073741824  attr.102=0    what the machine is
//	cuMemCreate:3=2    the third call returns 2 (of every call: cuMemCreate:*=2); version suffixes are left out
//	launch:2=719       the second operation of its kind fails in its stream, and the context is lost
//	delay.copy=2000000 nanoseconds that each operation of a kind (copy, set, launch) or of a name (HtoD, DtoH,
//	                   DtoD, a kernel's name) takes longer
//	hold.NAME=PATH     such an operation does not begin before the file PATH exists
//	trap=error         what is fatal loses the context, as on hardware, and does not end the process
//	pageable=0         asynchronous copies of memory that is not page-locked are fatal: hardware waits for them
//
// SHOAL_CUDA_TRACE names a file that gets one JSON object a line.

#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "driver.h"

_Atomic int lost;

typedef struct entry {
	char *key, *value;
	_Atomic long calls;
	struct entry *next;
} entry;

static entry *entries;
static int trace_fd = -1;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void load(void) {
	const char *path = getenv("SHOAL_CUDA_TRACE");
	if (path != NULL && *path != 0)
		trace_fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
	const char *script = getenv("SHOAL_CUDA_SCRIPT");
	if (script == NULL)
		return;
	char *text = strdup(script), *rest;
	for (char *word = strtok_r(text, ";", &rest); word != NULL; word = strtok_r(NULL, ";", &rest)) {
		char *equals = strchr(word, '=');
		if (equals == NULL) {
			fprintf(stderr, "software libcuda: script entry %s: KEY=VALUE is wanted\n", word);
			abort();
		}
		*equals = 0;
		entry *e = calloc(1, sizeof *e);
		e->key = strdup(word), e->value = strdup(equals + 1), e->next = entries;
		entries = e;
	}
	free(text);
}

static entry *find(const char *key) {
	pthread_once(&once, load);
	for (entry *e = entries; e != NULL; e = e->next)
		if (strcmp(e->key, key) == 0)
			return e;
	return NULL;
}

long long setting(const char *name, long long otherwise) {
	entry *e = find(name);
	return e == NULL ? otherwise : strtoll(e->value, NULL, 0);
}

CUresult fault(const char *name) {
	pthread_once(&once, load);
	size_t length = strlen(name);
	if (length > 3 && name[length - 3] == '_' && name[length - 2] == 'v')
		length -= 3;
	CUresult result = CUDA_SUCCESS;
	for (entry *e = entries; e != NULL; e = e->next) {
		if (strncmp(e->key, name, length) != 0 || e->key[length] != ':')
			continue;
		long call = atomic_fetch_add(&e->calls, 1) + 1;
		const char *which = e->key + length + 1;
		if (*which == '*' || strtol(which, NULL, 10) == call)
			result = (CUresult)strtol(e->value, NULL, 10);
	}
	return result;
}

static _Atomic bool initialised;

CUresult enter(const char *call, int needs) {
	CUresult result = fault(call);
	if (result != CUDA_SUCCESS) {
		trace("\"call\":\"%s\",\"result\":%d", call, result);
		return result;
	}
	if (strcmp(call, "cuInit") == 0)
		atomic_store(&initialised, true);
	if (needs >= INIT && !atomic_load(&initialised))
		return CUDA_ERROR_NOT_INITIALIZED;
	if (needs >= CONTEXT) {
		if (current() == NULL)
			return CUDA_ERROR_INVALID_CONTEXT;
		if (atomic_load(&lost) != 0)
			return (CUresult)atomic_load(&lost);
	}
	if (needs >= UNSAFE && capture_forbids()) {
		trace("\"call\":\"%s\",\"result\":%d", call, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
		return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
	}
	return CUDA_SUCCESS;
}

void pace(const char *name) {
	char key[256];
	snprintf(key, sizeof key, "delay.%s", name);
	long long ns = setting(key, 0);
	if (ns > 0)
		nanosleep(&(struct timespec){ns / 1000000000, ns % 1000000000}, NULL);
	snprintf(key, sizeof key, "hold.%s", name);
	entry *e = find(key);
	while (e != NULL && access(e->value, F_OK) != 0)
		nanosleep(&(struct timespec){0, 1000000}, NULL);
}

int64_t now(void) {
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

void trace(const char *format, ...) {
	pthread_once(&once, load);
	if (trace_fd < 0)
		return;
	char line[1024];
	int n = snprintf(line, sizeof line, "{\"pid\":%d,", getpid());
	va_list list;
	va_start(list, format);
	n += vsnprintf(line + n, sizeof line - (size_t)n - 3, format, list);
	va_end(list);
	if ((size_t)n > sizeof line - 3)
		n = sizeof line - 3;
	line[n++] = '}', line[n++] = '\n';
	if (write(trace_fd, line, (size_t)n) != n) // in one call, so that processes do not mix
		abort();
}

void fatal(CUresult result, const char *format, ...) {
	char text[768];
	va_list list;
	va_start(list, format);
	vsnprintf(text, sizeof text, format, list);
	va_end(list);
	fprintf(stderr, "software libcuda: %s\n", text);
	trace("\"fatal\":%d", result);
	entry *e = find("trap");
	if (e == NULL || strcmp(e->value, "error") != 0)
		abort();
	int none = 0;
	atomic_compare_exchange_strong(&lost, &none, result);
}
