package cputime

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"
)

func TestCores(t *testing.T) {
	dir := t.TempDir()
	if busy := cores(dir); busy != 0 {
		t.Errorf("got %v s of nothing", busy)
	}
	if err := os.WriteFile(filepath.Join(dir, "stat"), []byte("cpu  100 10 50 9999 777 4 6 30 11 12\ncpu0 1 2 3\n"),
		0o600); err != nil {
		t.Fatal(err)
	}
	if busy := cores(dir); busy != 2 {
		t.Errorf("got %v s, want 2", busy)
	}
}

func TestProcess(t *testing.T) {
	// By its own time: on a busy machine it may not have run at all in a tenth of a second.
	var ru syscall.Rusage
	for ru.Utime.Nano()+ru.Stime.Nano() < int64(100*time.Millisecond) {
		if err := syscall.Getrusage(syscall.RUSAGE_SELF, &ru); err != nil {
			t.Fatal(err)
		}
	}
	own, err := Process(os.Getpid())
	if err != nil || own < 0.1 {
		t.Errorf("%v s, %v after 0.1 s", own, err)
	}
	if all := Family(); all < own-0.05 { // it counts the other threads late
		t.Errorf("%v s with children, %v s without", all, own)
	}
	if gone, err := Process(1 << 30); err == nil || gone != 0 {
		t.Errorf("a process that is not there used %v s, %v", gone, err)
	}
}

func TestSum(t *testing.T) {
	if own := Sum(1<<30, os.Getpid()); own <= 0 || own > Sum(os.Getpid()) {
		t.Errorf("this process and one that is not there used %v s", own)
	}
}
