// Package cuda is gpuingest's Device on an NVIDIA GPU, through the driver API: gorgonia.org/cu, and the few calls that
// it lacks (calls.go).
//
// It is built with the tag cuda, against the header of CUDA 11.8 and folder link, which stands in for the driver
// at build time: see link/libcuda.c. `make gpu` has the flags.
//
// Rules for this code:
//   - A context is current to a thread, and goroutines move between threads. All calls go through Device.do.
//   - All queued work is asynchronous, and so are its errors: they appear at a later call and make the context
//     unusable. After an error from Wait, close.
//   - cuMemcpyHtoDAsync from memory that is not page-locked is synchronous, and cannot be captured in a graph.
package cuda
