package cputime

import (
	"os"
	"testing"
	"time"
)

func TestParseCores(t *testing.T) {
	busy, idle := parseCores("cpu  100 10 50 9999 777 4 6 30 11 12\ncpu0 1 2 3\n")
	if busy != 2 || idle != 107.76 {
		t.Errorf("got %v s busy and %v s idle, want 2 and 107.76", busy, idle)
	}
	if busy, idle := parseCores(""); busy != 0 || idle != 0 {
		t.Errorf("got %v and %v s of nothing", busy, idle)
	}
}

func TestProcess(t *testing.T) {
	begin := time.Now()
	for time.Since(begin) < 100*time.Millisecond { //nolint:revive // it is to spin
	}
	own, err := Process(os.Getpid())
	if err != nil || own <= 0 {
		t.Errorf("%v s, %v after spinning", own, err)
	}
	if all, err := Family(os.Getpid()); err != nil || all < own {
		t.Errorf("%v s with children, %v s without, %v", all, own, err)
	}
	if gone, err := Process(1 << 30); err == nil || gone != 0 {
		t.Errorf("a process that is not there used %v s, %v", gone, err)
	}
}
