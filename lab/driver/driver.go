// Package driver builds a libcuda.so.1 in software, for tests of what is written against NVIDIA's driver on machines
// without a GPU: Build, then run the program with LD_LIBRARY_PATH on the folder.
//
// It has the driver calls that Shoal uses, on host memory. Streams are threads: work is done later, in order, and only
// after what it has to wait for. Device memory cannot be read by the host. Kernels are PTX, which src/ptx.sed makes
// into C for $CC (gcc). It is strict where hardware is silent: memory that is freed, unmapped or unregistered while
// queued work uses it, and accesses beyond an allocation, end the process with a message. src/script.c says how faults,
// delays and a trace are asked for (SHOAL_CUDA_SCRIPT, SHOAL_CUDA_TRACE).
//
// It says nothing about speed: no time that was taken with it is a GPU's.
package driver

import (
	"cmp"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
)

//go:embed src
var source embed.FS

// Build compiles the driver with $CC (gcc) to libcuda.so.1 in the folder dir, beside which libcuda.so links to it, and
// returns its path. flags go to the compiler as well, such as -fsanitize=thread.
func Build(dir string, flags ...string) (string, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return "", err
	}
	src, err := os.MkdirTemp(dir, "libcuda-*") // stays: the driver finds there what it compiles kernels with
	if err != nil {
		return "", err
	}
	if err := os.CopyFS(src, source); err != nil {
		return "", err
	}
	files, err := fs.Glob(source, "src/*.c")
	if err != nil {
		return "", err
	}
	cc := cmp.Or(os.Getenv("CC"), "gcc")
	lib := filepath.Join(dir, "libcuda.so.1")
	args := append([]string{
		"-std=c11", "-D_GNU_SOURCE", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared",
		"-fvisibility=hidden",
		"-pthread", "-Wl,-z,defs", "-Wl,-soname,libcuda.so.1", "-DSOURCE=\"" + src + "/src\"", "-o", lib,
	}, flags...)
	cmd := exec.Command(cc, append(args, files...)...)
	cmd.Dir = src
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build the software libcuda.so.1: %w\n%s", err, out)
	}
	if err := os.Symlink("libcuda.so.1", filepath.Join(dir, "libcuda.so")); err != nil && !errors.Is(err, fs.ErrExist) {
		return "", err
	}
	return lib, nil
}
