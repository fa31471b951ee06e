// Package cuda is gpuingest's Device on an NVIDIA GPU, by the driver API: gorgonia.org/cu, and beside it the few
// calls that it lacks (calls.go).
//
// It is built with the tag cuda, against the header of CUDA 11.8 and folder link, which stands in for the driver
// until there is one: see link/libcuda.c. `make gpu` has the flags.
//
// Traps:
//   - A context is current to a thread, and goroutines move. All calls go through Device.do.
//   - Everything queued is asynchronous, its errors as well: they appear at a later call and poison the context for
//     good. After an error from Wait, close.
//   - cuMemcpyHtoDAsync from memory that is not page-locked is not asynchronous, and cannot be captured in a graph.
package cuda
