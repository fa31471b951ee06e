// Package python carries the trainer's client, the Python package shoal, inside the binary, so that
// `shoal-lab demo` can unpack it where there is no checkout.
package python

import "embed"

// FinishPTX is the device kernel, made of gpuingest/cuda/kernel/finish.cu.
//
//go:embed shoal/finish.ptx
var FinishPTX string

// Files holds shoal/*.py, the sitecustomize and the adapters of `shoal run`, py.typed and the device kernel. Copied
// into a folder that is on PYTHONPATH, they are the package; they need grpcio and numpy, and use torch where it is
// installed.
//
//go:embed shoal/*.py shoal/_site/*.py shoal/_adapters/*.py shoal/py.typed shoal/finish.ptx
var Files embed.FS
