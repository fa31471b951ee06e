//go:build cuda

// Package nvtx marks time spans for NVIDIA's profilers, through libnvToolsExt.so.1 if it is installed; otherwise it
// does nothing.
package nvtx

/*
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>

static uint64_t (*range_start)(const char *);
static void (*range_end)(uint64_t);

static int nvtx_load(void) {
	void *lib = dlopen("libnvToolsExt.so.1", RTLD_NOW | RTLD_LOCAL);
	if (!lib)
		return 0;
	range_start = (uint64_t (*)(const char *))dlsym(lib, "nvtxRangeStartA");
	range_end = (void (*)(uint64_t))dlsym(lib, "nvtxRangeEnd");
	return range_start && range_end;
}
static uint64_t nvtx_start(const char *name) { return range_start(name); }
static void nvtx_end(uint64_t id) { range_end(id); }
*/
import "C"

import "sync"

var present = sync.OnceValue(func() bool { return C.nvtx_load() != 0 })

// names are the C strings of constant names, made once each.
var names sync.Map

// Range begins a span, which the returned function ends, on any thread. Names are constants.
func Range(name string) (end func()) {
	if !present() {
		return func() {}
	}
	s, ok := names.Load(name)
	if !ok {
		s, _ = names.LoadOrStore(name, C.CString(name))
	}
	id := C.nvtx_start(s.(*C.char))
	return func() { C.nvtx_end(id) }
}
