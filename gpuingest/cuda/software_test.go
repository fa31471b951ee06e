//go:build !cuda

package cuda_test

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/shoalfs/shoal/lab/driver"
)

// root is the module's folder.
const root = "../.."

// TestOnSoftwareDriver runs this package's tests, built with the tag, on a driver in software: as it is, with
// faults, and with work held up.
func TestOnSoftwareDriver(t *testing.T) {
	dir := t.TempDir()
	lib, err := driver.Build(dir)
	if err != nil {
		t.Fatal(err)
	}
	bin := filepath.Join(dir, "cuda.test")
	build(t, "test", "-c", "-o", bin, ".")
	hold, trace := filepath.Join(dir, "go-on"), filepath.Join(dir, "trace")
	for _, c := range []struct{ name, run, script, fault, reason string }{
		{name: "works", run: "."},
		{name: "slow", run: "TestReplay|TestInFlight", script: "delay.copy=300000;delay.launch=500000"},
		{name: "little memory", run: "TestRingsGiveAllBack", script: "memory=67108864"},
		{name: "overlap", run: "TestOverlap", script: "hold.shoal_finish_u16_nchw=" + hold},
		{name: "close cannot wait", run: "TestCloseCannotWait",
			script: "cuStreamSynchronize:1=999;hold.shoal_finish_u16_nchw=" + hold},
		{name: "no device", run: "TestFault", script: "cuInit:1=100", fault: "device", reason: "the driver sees none"},
		{name: "no devices", run: "TestFault", script: "devices=0", fault: "device"},
		{name: "old driver", run: "TestFault", script: "version=9000", fault: "driver",
			reason: "CUDA 9.0, shoal-gpu needs 11.4"},
		{name: "broken driver", run: "TestFault", script: "cuInit:1=999", fault: "driver", reason: "nvidia-smi"},
		{name: "no virtual memory", run: "TestFault", script: "attr.102=0", fault: "device", reason: "in the trainer"},
		{name: "kernel refused", run: "TestFault", script: "cuModuleLoadData:1=218;cuModuleLoadDataEx:1=218",
			fault: "driver"},
		{name: "first buffer", run: "TestFault", script: "cuMemCreate:1=2", fault: "memory", reason: "1 of 4"},
		{name: "third buffer", run: "TestFault", script: "cuMemCreate:3=2", fault: "memory", reason: "3 of 4"},
		{name: "map", run: "TestFault", script: "cuMemMap:2=2", fault: "memory"},
		{name: "access", run: "TestFault", script: "cuMemSetAccess:1=2", fault: "memory"},
		{name: "staging", run: "TestFault", script: "cuMemAlloc:2=2", fault: "memory"},
		{name: "stream", run: "TestFault", script: "cuStreamCreate:2=2", fault: "memory"},
		{name: "event", run: "TestFault", script: "cuEventCreate:3=2", fault: "memory"},
		{name: "page lock", run: "TestFault", script: "cuMemHostRegister:1=2", fault: "memory", reason: "ulimit -l"},
		{name: "launch", run: "TestFault", script: "launch:1=719", fault: "launch", reason: "LaunchFailed"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_ = os.Remove(trace) // there may be none
			cmd := exec.Command(bin, "-test.run", "^("+c.run+")$", "-test.v", "-test.timeout", "2m")
			if c.run == "." {
				cmd.Args[2] = "."
			}
			cmd.Env = append(os.Environ(), "LD_LIBRARY_PATH="+filepath.Dir(lib), "SHOAL_CUDA_SCRIPT="+c.script,
				"SHOAL_CUDA_TRACE="+trace)
			if c.fault != "" {
				cmd.Env = append(cmd.Env, "SHOAL_TEST_FAULT="+c.fault)
			}
			if strings.Contains(c.script, "hold.") {
				_ = os.Remove(hold)
				cmd.Env = append(cmd.Env,
					map[bool]string{true: "SHOAL_TEST_CLOSE=", false: "SHOAL_TEST_HOLD="}[c.run ==
						"TestCloseCannotWait"]+hold)
			}
			out, err := cmd.CombinedOutput()
			if err != nil || !bytes.Contains(out, []byte("\nPASS")) || !bytes.Contains(out, []byte("--- PASS: ")) ||
				!bytes.Contains(out, []byte(c.reason)) {
				t.Errorf("script %q: %v, want %q in:\n%s", c.script, err, c.reason, out)
			}
		})
	}
	t.Run("no driver", func(t *testing.T) {
		cmd := exec.Command(bin, "-test.run", "TestFault", "-test.v")
		// An empty libcuda.so.1, in case the machine has a real one.
		none := t.TempDir()
		if err := os.WriteFile(filepath.Join(none, "libcuda.so.1"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		cmd.Env = append(os.Environ(), "LD_LIBRARY_PATH="+none, "SHOAL_TEST_FAULT=driver")
		if out, err := cmd.CombinedOutput(); err != nil || !bytes.Contains(out, []byte("install NVIDIA's driver")) {
			t.Errorf("%v:\n%s", err, out)
		}
	})
}

// The benchmark never calls a figure of this driver a GPU's.
func TestBenchmarkOnSoftwareDriver(t *testing.T) {
	dir := t.TempDir()
	lib, err := driver.Build(dir)
	if err != nil {
		t.Fatal(err)
	}
	bin := filepath.Join(dir, "bench")
	build(t, "build", "-o", bin, root+"/lab/bench/gpu")
	cmd := exec.Command(bin, "-rows", "4", "-height", "16", "-width", "16", "-steps", "2", "-repeat", "3",
		"-step", "1ms")
	cmd.Env = append(os.Environ(), "LD_LIBRARY_PATH="+filepath.Dir(lib))
	out, _ := cmd.CombinedOutput()
	if code := cmd.ProcessState.ExitCode(); code != 4 ||
		!bytes.Contains(out, []byte(`"figures_of": "software driver: not a GPU"`)) ||
		bytes.Contains(out, []byte("goals")) {
		t.Errorf("exit %d:\n%s", code, out)
	}
}

// Stages are named to profilers where their library is there.
func TestRanges(t *testing.T) {
	dir := t.TempDir()
	lib, err := driver.Build(dir)
	if err != nil {
		t.Fatal(err)
	}
	source, list := filepath.Join(dir, "nvtx.c"), filepath.Join(dir, "ranges")
	code := fmt.Sprintf(`#include <stdint.h>
#include <stdio.h>
static void note(const char *what, uint64_t id) { FILE *f = fopen(%q, "a"); fprintf(f, "%%s %%d\n", what, (int)id); fclose(f); }
static uint64_t last;
uint64_t nvtxRangeStartA(const char *name) { note(name, ++last); return last; }
void nvtxRangeEnd(uint64_t id) { note("end", id); }
`, list)
	if err := os.WriteFile(source, []byte(code), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("gcc", "-shared", "-fPIC", "-o", filepath.Join(dir, "libnvToolsExt.so.1"),
		source).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	bin := filepath.Join(dir, "cuda.test")
	build(t, "test", "-c", "-o", bin, ".")
	cmd := exec.Command(bin, "-test.run", "^TestReplay$")
	cmd.Env = append(os.Environ(), "LD_LIBRARY_PATH="+filepath.Dir(lib))
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	text, err := os.ReadFile(list)
	if err != nil {
		t.Fatal(err)
	}
	queue, wait, end := bytes.Count(text, []byte("shoal: queue copy and kernel")),
		bytes.Count(text, []byte("shoal: wait for the device")), bytes.Count(text, []byte("end "))
	if queue != 36 || wait != 36 || end != 72 {
		t.Errorf("%d batches queued, %d waited for, %d ranges ended; want 36, 36 and 72", queue, wait, end)
	}
}

// build runs the go command with the tag. What it takes beyond a C compiler, `make gpu` has brought.
func build(t *testing.T, command string, args ...string) {
	t.Helper()
	need, err := filepath.Abs(filepath.Join(root, "bin/cuda"))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range []string{"cuda.h", "libcuda.a"} {
		if _, err := os.Stat(filepath.Join(need, f)); err != nil {
			t.Skipf("%v: run `make gpu` first", err)
		}
	}
	cmd := exec.Command("go", append([]string{command, "-tags", "netgo,osusergo,cuda"}, args...)...)
	cmd.Env = append(os.Environ(), "CGO_CFLAGS=-O2 -g -I"+need, "CGO_LDFLAGS=-L"+need)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}
