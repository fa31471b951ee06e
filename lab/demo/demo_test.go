package demo

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"image/png"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"testing/fstest"
	"time"

	"github.com/shoalfs/shoal/lab/rig/daemon"
	"github.com/shoalfs/shoal/lab/rig/photos"
	"github.com/shoalfs/shoal/lab/rig/proxy"
)

// These tests check how the demo conducts its processes, not Shoal: this test binary plays the shoal
// binary (see standIn), with a bind mount of the photographs in place of the FUSE mount. The store,
// the proxy and the trainer are the real ones. `make demo` is the test with the real binary.

func TestMain(m *testing.M) {
	if os.Getenv("SHOAL_TEST_STANDIN") != "" && len(os.Args) > 1 && !strings.HasPrefix(os.Args[1], "-test.") {
		if err := standIn(os.Args[1:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	dir, err := os.MkdirTemp("", "shoal-demo-test-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	set = filepath.Join(dir, "photos")
	code := m.Run()
	_ = os.RemoveAll(dir)
	os.Exit(code)
}

// set is the folder of the training set that the tests share, of count photographs: to make one
// takes longer than the rest of a test.
var set string

const count = 64

func photographs(t *testing.T) string {
	t.Helper()
	if _, err := photos.Make(t.Context(), set, count, nil); err != nil {
		t.Fatal(err)
	}
	return set
}

// standIn is the shoal binary of these tests.
func standIn(args []string) error {
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM)
	if os.Getenv("SHOAL_TEST_STANDIN") == "broken" && args[0] != proxy.Verb {
		return errors.New("this shoal is broken")
	}
	switch args[0] {
	case proxy.Verb:
		return proxy.Main(args[1:])
	case "stat":
		fmt.Println(`{"version": 1, "get_requests": 0, "get_bytes": 0}`)
		return nil
	case "mount":
		mnt := args[2]
		if err := syscall.Mount(filepath.Join(filepath.Dir(mnt), "photos"), mnt, "", syscall.MS_BIND, ""); err != nil {
			return err
		}
		<-stop
		if os.Getenv("SHOAL_TEST_STANDIN") == "messy" {
			return nil // leaves its mount
		}
		return syscall.Unmount(mnt, 0)
	case "serve":
		l, err := net.Listen("unix", strings.TrimPrefix(args[slices.Index(args, "--listen")+1], "unix://"))
		if err != nil {
			return err
		}
		defer l.Close()
		<-stop
		return nil
	}
	return fmt.Errorf("unexpected verb %q", args[0])
}

// feed is the Python client of these tests.
const feed = `
import torch

class Batch:
    def __init__(self, data, label):
        self.data, self.label = data, label

    def __iter__(self):
        return iter((self.data, self.label))

class Feed(torch.utils.data.IterableDataset):
    def __init__(self, address, batch_size, **spec):
        assert address.startswith("unix://"), address
        self.batch = batch_size

        self.classes = ["a", "b"]

    def set_epoch(self, epoch):
        pass

    def __len__(self):
        return 4

    def __iter__(self):
        for i in range(4):
            yield Batch(torch.full((self.batch, 3, 224, 224), i * 50, dtype=torch.uint8), torch.zeros(self.batch, dtype=torch.int64))
`

func options(t *testing.T, mode, client string) Options {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("bind mounts take root")
	}
	t.Setenv("SHOAL_TEST_STANDIN", mode)
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("TMPDIR", t.TempDir())
	work := t.TempDir()
	if err := os.CopyFS(filepath.Join(work, "photos"), os.DirFS(photographs(t))); err != nil {
		t.Fatal(err)
	}
	o := Defaults()
	o.Shoal, o.WorkDir, o.Latency = exe, work, time.Millisecond
	o.Photos, o.Steps, o.Batch, o.Workers = count, 4, 4, 1
	o.Client, o.Progress = fstest.MapFS{"shoal/__init__.py": {Data: []byte(client)}}, t.Output()
	return o
}

// children returns the processes whose parent is this one.
func children(t *testing.T) []int {
	t.Helper()
	entries, err := os.ReadDir("/proc")
	if err != nil {
		t.Fatal(err)
	}
	var pids []int
	for _, e := range entries {
		b, err := os.ReadFile(filepath.Join("/proc", e.Name(), "stat"))
		if err != nil {
			continue
		}
		_, rest, _ := strings.Cut(string(b), ") ")
		if f := strings.Fields(rest); len(f) > 1 && f[1] == strconv.Itoa(os.Getpid()) {
			pid, _ := strconv.Atoi(e.Name())
			pids = append(pids, pid)
		}
	}
	return pids
}

func checkClean(t *testing.T, o Options) {
	t.Helper()
	if pids := children(t); len(pids) > 0 {
		t.Errorf("processes %v are left", pids)
	}
	if m, err := daemon.Mounts(o.WorkDir); err != nil || len(m) > 0 {
		t.Errorf("mounts %v are left, %v", m, err)
	}
	if left, err := os.ReadDir(os.TempDir()); err != nil || len(left) > 0 {
		t.Errorf("temporary files are left: %v, %v", left, err)
	}
}

func TestRun(t *testing.T) {
	o := options(t, "tidy", feed)
	var out bytes.Buffer
	if err := Run(t.Context(), o, &out); err != nil {
		t.Fatal(err)
	}
	checkClean(t, o)
	for _, want := range []string{"samples/s", "mount, order unknown, cold", "mount, order known, warm", "feed, warm",
		"contact-sheet.png"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the output lacks %q:\n%s", want, &out)
		}
	}
	f, err := os.Open(filepath.Join(o.WorkDir, "contact-sheet.png"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if img, err := png.Decode(f); err != nil || img.Bounds().Dx() < 400 {
		t.Errorf("contact sheet: %v, %v", img, err)
	}
}

func TestInterrupted(t *testing.T) {
	if testing.Short() {
		t.Skip("make night runs it")
	}
	o := options(t, "messy", feed)
	o.Steps = 1000 // an epoch; the trainer is interrupted in it
	ctx, cancel := context.WithCancelCause(t.Context())
	interrupt := errors.New("interrupted by the test")
	go func() {
		// As soon as the first trainer has said something: its run is mounted, and its workers read.
		for ctx.Err() == nil {
			records, _ := filepath.Glob(filepath.Join(o.WorkDir, "runs", "*.jsonl"))
			for _, r := range records {
				if fi, err := os.Stat(r); err == nil && fi.Size() > 0 {
					cancel(interrupt)
				}
			}
			time.Sleep(5 * time.Millisecond)
		}
	}()
	err := Run(ctx, o, new(bytes.Buffer))
	if !errors.Is(err, interrupt) {
		t.Fatalf("got %v", err)
	}
	checkClean(t, o)
}

func TestFailures(t *testing.T) {
	t.Run("daemon", func(t *testing.T) {
		o := options(t, "broken", feed)
		err := Run(t.Context(), o, new(bytes.Buffer))
		if err == nil || !strings.Contains(err.Error(), "this shoal is broken") {
			t.Errorf("got %v, want the daemon's own words", err)
		}
		checkClean(t, o)
	})
	t.Run("trainer", func(t *testing.T) {
		o := options(t, "tidy", feed)
		o.Python = filepath.Join(t.TempDir(), "python")
		// Finds all modules, but cannot train.
		if err := os.WriteFile(o.Python, []byte(
			"#!/bin/sh\n[ \"$1\" = -c ] && exit 0\necho no training today >&2\nexit 1\n"), 0o755); err != nil {
			t.Fatal(err)
		}
		err := Run(t.Context(), o, new(bytes.Buffer))
		if err == nil || !strings.Contains(err.Error(), "no training today") {
			t.Errorf("got %v, want the trainer's own words", err)
		}
		checkClean(t, o)
	})
}

func TestMissing(t *testing.T) {
	o := Defaults()
	o.Shoal, o.Python = "/nonexistent/bin/shoal", "/nonexistent/python3"
	t.Setenv("PATH", "/nonexistent")
	t.Setenv("SHOAL_VERSITYGW", "/nonexistent/versitygw")
	var said bytes.Buffer
	o.Progress = &said
	o.WorkDir = filepath.Join(t.TempDir(), "work")
	if err := Run(t.Context(), o, new(bytes.Buffer)); !errors.Is(err, ErrMissing) {
		t.Fatalf("got %v", err)
	}
	for _, want := range []string{"apt-get install", "python3-torch", "python3-torchvision", "go install",
		"make build"} {
		if !strings.Contains(said.String(), want) {
			t.Errorf("%s\nlacks %q", &said, want)
		}
	}
	if _, err := os.Stat(o.WorkDir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a demo that cannot run made its folder: %v", err)
	}
}
