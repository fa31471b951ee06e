package driver_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/shoalfs/shoal/lab/driver"
)

// dir has the driver and the programs of check.
var dir string

func TestMain(m *testing.M) {
	os.Exit(run(m))
}

func run(m *testing.M) int {
	var err error
	if dir, err = os.MkdirTemp("", "shoal-driver-*"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer func() { _ = os.RemoveAll(dir) }()
	if err := build(dir); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return m.Run()
}

func build(dir string, flags ...string) error {
	if _, err := driver.Build(dir, flags...); err != nil {
		return err
	}
	for _, name := range []string{"check", "finish"} {
		args := append([]string{"-std=c11", "-D_GNU_SOURCE", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread",
			"-o", filepath.Join(dir, name), filepath.Join("testdata", "check", name+".c"), "-L" + dir, "-lcuda",
			"-Wl,-rpath," + dir}, flags...)
		if out, err := exec.Command("gcc", args...).CombinedOutput(); err != nil {
			return fmt.Errorf("%w\n%s", err, out)
		}
	}
	return nil
}

// scenario runs one of check.c, and returns what it said and how it ended.
func scenario(t *testing.T, dir, name, script string) (output string, trace []map[string]any, err error) {
	t.Helper()
	tmp := t.TempDir()
	path, hold := filepath.Join(tmp, "trace"), filepath.Join(tmp, "hold")
	// a scenario takes milliseconds: one that hangs has failed
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, filepath.Join(dir, "check"), name)
	cmd.Env = append(os.Environ(), "SHOAL_CUDA_SCRIPT="+strings.ReplaceAll(script, "HOLD", hold),
		"SHOAL_CUDA_TRACE="+path, "HOLD="+hold, "TSAN_OPTIONS=atexit_sleep_ms=0")
	cmd.WaitDelay = time.Second
	out, err := cmd.CombinedOutput()
	b, readErr := os.ReadFile(path)
	if readErr != nil && !errors.Is(readErr, os.ErrNotExist) {
		t.Fatal(readErr)
	}
	for line := range bytes.Lines(b) {
		var entry map[string]any
		if err := json.Unmarshal(line, &entry); err != nil {
			t.Fatalf("trace: %v: %s", err, line)
		}
		trace = append(trace, entry)
	}
	return string(out), trace, err
}

const held = "hold.add=HOLD"

var scenarios = []struct{ name, script string }{
	{"in_order", "delay.copy=2000000;delay.add=3000000"},
	{"late_read", held},
	{"events", held},
	{"records", held},
	{"default_stream", held},
	{"timing", "delay.set=20000000"},
	{"graph", ""},
	{"capture_modes", ""},
	{"mapping", ""},
	{"exchange", held},
	{"third_create_fails", "cuMemCreate:3=2"},
	{"memory_ends", "memory=4194304"},
	{"no_device", "devices=0"},
	{"before_init", "version=9000"},
	{"lost_context", "launch:2=719"},
	{"bad_ptx", ""},
	{"registration", ""},
	{"pageable", ""},
	{"kernel_too_far", "trap=error"},
}

func TestScenarios(t *testing.T) {
	for _, s := range scenarios {
		t.Run(s.name, func(t *testing.T) {
			t.Parallel()
			if out, _, err := scenario(t, dir, s.name, s.script); err != nil {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
}

// TestScenariosUnderThreadSanitizer looks for races in the driver itself.
func TestScenariosUnderThreadSanitizer(t *testing.T) {
	tmp := t.TempDir()
	if err := build(tmp, "-fsanitize=thread"); err != nil {
		t.Skipf("this compiler has no thread sanitizer: %v", err)
	}
	if out, _, err := scenario(t, tmp, "in_order", ""); err != nil && strings.Contains(out, "FATAL: ThreadSanitizer") {
		t.Skipf("the thread sanitizer does not run here: %s", out)
	}
	for _, s := range scenarios {
		if s.name == "late_read" {
			continue // whose subject is a race of the program's
		}
		t.Run(s.name, func(t *testing.T) {
			t.Parallel()
			if out, _, err := scenario(t, tmp, s.name, s.script); err != nil {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
}

// TestEnds is about what hardware may let pass in silence.
func TestEnds(t *testing.T) {
	for _, s := range []struct{ name, script, says string }{
		{"free_in_use", held, "cuMemFree of"},
		{"unregister_in_use", held, "cuMemHostUnregister of"},
		{"unmap_in_use", held, "cuMemUnmap of"},
		{"copy_too_long", "", "HtoD writes 68 bytes"},
		{"no_access", "", "memset writes 4 bytes"},
		{"kernel_too_far", "", "add reads 4 bytes"},
		{"kernel_askew", "", "misaligned address"},
		{"used_after_free", "", "which is free again"},
		{"pageable", "pageable=0", "not page-locked"},
	} {
		t.Run(s.name, func(t *testing.T) {
			t.Parallel()
			out, trace, err := scenario(t, dir, s.name, s.script)
			var exit *exec.ExitError
			if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGABRT ||
				!strings.Contains(out, s.says) {
				t.Errorf("%v, %q: want SIGABRT and a message with %q", err, out, s.says)
			}
			if len(trace) == 0 || trace[len(trace)-1]["fatal"] == nil {
				t.Errorf("the trace ends with %v", trace)
			}
		})
	}
}

func TestDeviceMemoryIsNotTheHosts(t *testing.T) {
	out, _, err := scenario(t, dir, "read_by_host", "")
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGSEGV {
		t.Errorf("%v, %q: want SIGSEGV", err, out)
	}
}

// TestTrace reads from the trace that operations of one stream follow each other, and that a copy of pageable memory
// was noticed.
func TestTrace(t *testing.T) {
	out, trace, err := scenario(t, dir, "in_order", "delay.launch=1000000")
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	var names []string
	end := 0.0
	for _, e := range trace {
		if e["op"] == nil {
			continue
		}
		names = append(names, fmt.Sprint(e["name"]))
		if start := e["start"].(float64); start < end {
			t.Errorf("%v begins before what lies ahead of it ends", e)
		}
		end = e["end"].(float64)
	}
	if want := "[HtoD add add DtoH]"; fmt.Sprint(names) != want {
		t.Errorf("operations %v, want %s", names, want)
	}
	if out, trace, err = scenario(t, dir, "pageable", ""); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	noticed := 0
	for _, e := range trace {
		if e["pageable"] != nil {
			noticed++
		}
	}
	if noticed != 2 {
		t.Errorf("%d copies of pageable memory noticed, want 2: %v", noticed, trace)
	}
}
