package doctor

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"time"
)

func dialUnix(path string) error {
	c, err := net.DialTimeout("unix", path, time.Second)
	if err == nil {
		err = c.Close()
	}
	return err
}

func (o *Options) versionChecks() []Check {
	m := o.machine
	return []Check{
		{Area: "versions", Name: "shoal", Run: func(context.Context) Result { return shoalVersion(o.ShoalVersion) }},
		{Area: "versions", Name: "python", Takes: 2 * time.Second, Run: func(ctx context.Context) Result { return python(ctx, m, o.Python) }},
	}
}

// libraries are the dependencies that matter to mounts and feeds.
var libraries = map[string]string{
	"github.com/hanwen/go-fuse/v2": "go-fuse", "github.com/minio/minio-go/v7": "minio-go", "google.golang.org/grpc": "grpc",
}

func shoalVersion(version string) Result {
	r := ok("shoal %s, %s, %s/%s", version, runtime.Version(), runtime.GOOS, runtime.GOARCH)
	info, read := debug.ReadBuildInfo()
	if !read {
		return r
	}
	var parts []string
	for _, d := range info.Deps {
		if name, known := libraries[d.Path]; known {
			parts = append(parts, name+" "+d.Version)
		}
	}
	slices.Sort(parts)
	if len(parts) > 0 {
		r.Measured += "; " + strings.Join(parts, ", ")
	}
	return r
}

// pythonScript prints the versions from package metadata: importing torch would take seconds.
const pythonScript = `
import json, platform, sys
try:
    from importlib import metadata
except ImportError:
    metadata = None
found = {"python": platform.python_version(), "executable": sys.executable}
for name in ("numpy", "torch", "torchvision", "grpcio", "shoal"):
    try:
        found[name] = metadata.version(name)
    except Exception:
        pass
print(json.dumps(found))
`

// leastPython are the oldest versions that the client supports.
var leastPython = map[string][2]int{"python": {3, 9}, "numpy": {1, 21}, "grpcio": {1, 46}}

func python(ctx context.Context, m *Machine, name string) Result {
	args := []string{"-c", pythonScript}
	program := name
	if program == "" {
		program, args = "/usr/bin/env", []string{"python3", "-c", pythonScript}
	}
	out, err := m.Command(ctx, program, args...)
	if err != nil {
		return skipped("no Python 3 runs here (%s): mounts need none; a feed's trainer needs one where it runs", lastLine(err.Error()))
	}
	var found map[string]string
	if err := json.Unmarshal([]byte(out), &found); err != nil {
		return skipped("python3's output is not JSON: %s", err)
	}
	parts := []string{"Python " + found["python"] + " (" + found["executable"] + ")"}
	var missing, old []string
	for _, lib := range []string{"numpy", "grpcio", "torch", "torchvision"} {
		if v := found[lib]; v != "" {
			parts = append(parts, lib+" "+v)
		} else if _, needed := leastPython[lib]; needed {
			missing = append(missing, lib)
		} else {
			parts = append(parts, "no "+lib)
		}
	}
	for lib, least := range leastPython {
		var major, minor int
		if n, _ := fmt.Sscanf(found[lib], "%d.%d", &major, &minor); n == 2 && (major < least[0] || major == least[0] && minor < least[1]) {
			old = append(old, fmt.Sprintf("%s %s (needs %d.%d)", lib, found[lib], least[0], least[1]))
		}
	}
	slices.Sort(old)
	r := ok("%s", strings.Join(parts, ", "))
	other := "or name the trainer's interpreter: --python PATH"
	switch {
	case len(missing) > 0:
		return r.because(Warn, strings.Join(missing, " and ")+" are missing from this interpreter: shoal.Feed needs them (the mount does not)", found["executable"]+" -m pip install "+strings.Join(missing, " ")+"; "+other)
	case len(old) > 0:
		return r.because(Warn, "too old for shoal.Feed: "+strings.Join(old, ", "), "upgrade, "+other)
	}
	return r
}

func (o *Options) gpuChecks() []Check {
	m := o.machine
	return []Check{
		{Area: "gpu", Name: "driver", Run: func(context.Context) Result { return gpuDriver(m) }},
		{Area: "gpu", Name: "libcuda", Run: func(context.Context) Result { return libcuda(m) }},
		{Area: "gpu", Name: "devices", Takes: 2 * time.Second, Run: func(ctx context.Context) Result { return gpuDevices(ctx, m) }},
		{Area: "gpu", Name: "mps", Run: func(context.Context) Result { return mps(m) }},
	}
}

const noGPU = "no NVIDIA GPU here: mounts and feeds need none; the trainer's container may have one"

func (m *Machine) gpus() []string {
	found, _ := filepath.Glob(m.path("/dev/nvidia[0-9]*"))
	for i := range found {
		found[i] = strings.TrimPrefix(found[i], m.Root)
	}
	return found
}

func gpuDriver(m *Machine) Result {
	text, err := m.read("/proc/driver/nvidia/version")
	gpus := m.gpus()
	switch {
	case err != nil && len(gpus) == 0:
		return skipped(noGPU)
	case err != nil:
		return ok("%s, but the driver reports no version", strings.Join(gpus, ", ")).because(Warn, "the kernel module may not be loaded", "sudo modprobe nvidia")
	case len(gpus) == 0:
		return ok("the driver is loaded, but /dev/nvidia0 does not exist").because(Warn, "this container has no access to the GPU, or the device files were not created yet", "docker run --gpus all (in Kubernetes: resources.limits nvidia.com/gpu), or nvidia-modprobe -u -c 0")
	}
	first, _, _ := strings.Cut(text, "\n")
	_, version, _ := strings.Cut(first, ":")
	r := ok("%s; %s", strings.Join(strings.Fields(version), " "), strings.Join(gpus, ", "))
	for _, g := range append(gpus, "/dev/nvidiactl") {
		if err := m.OpenRW(m.path(g)); err != nil {
			return ok("%s: %s", g, cause(err)).because(Fail, "CUDA cannot be used by this user", "ls -l "+g+"; in a container: --gpus all")
		}
	}
	return r
}

// libcuda searches like the dynamic linker.
func libcuda(m *Machine) Result {
	folders := []string{"/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/nvidia/lib64", "/usr/local/cuda/compat", "/usr/lib/wsl/lib"}
	for dir := range strings.SplitSeq(m.Getenv("LD_LIBRARY_PATH"), ":") {
		if dir != "" {
			folders = append([]string{dir}, folders...)
		}
	}
	for _, dir := range folders {
		path := filepath.Join(dir, "libcuda.so.1")
		if target, err := filepath.EvalSymlinks(m.path(path)); err == nil {
			return ok("%s (%s)", path, filepath.Base(target))
		}
	}
	if len(m.gpus()) == 0 {
		return skipped(noGPU)
	}
	return ok("libcuda.so.1 is not in the usual folders").because(Fail, "there is a GPU, but no program can use CUDA", "docker run --gpus all with NVIDIA_DRIVER_CAPABILITIES=compute,utility, or install the driver's libcuda1")
}

func gpuDevices(ctx context.Context, m *Machine) Result {
	program, err := m.LookPath("nvidia-smi")
	if err != nil {
		if len(m.gpus()) == 0 {
			return skipped(noGPU)
		}
		return skipped("nvidia-smi is not in PATH")
	}
	out, err := m.Command(ctx, program, "--query-gpu=name,memory.total,utilization.gpu,compute_mode,pcie.link.gen.current,pcie.link.width.current", "--format=csv,noheader")
	if err != nil {
		return ok("nvidia-smi: %s", lastLine(err.Error())).because(Fail, "driver and library do not match, or the GPU has fallen off the bus", "nvidia-smi; dmesg | grep -i nvrm")
	}
	var gpus []string
	exclusive := false
	for line := range strings.Lines(strings.TrimSpace(out)) {
		f := strings.Split(strings.TrimSpace(line), ", ")
		if len(f) < 6 {
			continue
		}
		gpus = append(gpus, fmt.Sprintf("%s %s, %s busy, PCIe %s x%s", f[0], f[1], f[2], f[4], f[5]))
		exclusive = exclusive || strings.Contains(f[3], "Exclusive")
	}
	r := ok("%s", strings.Join(gpus, "; "))
	if exclusive {
		return r.because(OK, "compute mode is exclusive: trainer and shoal-gpu share the GPU only under MPS", "")
	}
	return r
}

func mps(m *Machine) Result {
	if len(m.gpus()) == 0 {
		return skipped(noGPU)
	}
	dir := cmp.Or(m.Getenv("CUDA_MPS_PIPE_DIRECTORY"), "/tmp/nvidia-mps")
	if _, err := os.Lstat(m.path(filepath.Join(dir, "control"))); err != nil {
		return ok("no MPS control daemon at %s", dir).because(OK, "two processes on one GPU get time slices in turn; this matters only for shoal-gpu beside a trainer (docs/gpu.md)", "")
	}
	return ok("MPS control daemon at %s", dir)
}
