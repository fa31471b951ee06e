package main

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestVerbsBeginAsTheLastEnds: who waits for the verbs does not mind one that begins just then.
func TestVerbsBeginAsTheLastEnds(t *testing.T) {
	var v verbs
	for range 20_000 {
		last := make(chan struct{})
		v.Go(func() { <-last })
		idle := v.ended()
		close(last)
		v.Go(func() {})
		<-idle
	}
	running := make(chan struct{})
	v.Go(func() { <-running })
	idle := v.ended()
	select {
	case <-idle:
		t.Error("ended while one runs")
	default:
	}
	close(running)
	<-idle
}

// TestAttachToOneThatEnds: a daemon that closes its socket before it has read what is asked is ending, and the verb
// tries again. What is asked is more than a socket holds, so the writing of it fails.
func TestAttachToOneThatEnds(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("AWS_LONG", strings.Repeat("x", 4<<20))
	l, err := listenUnix(filepath.Join(dir, socketName))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		if conn, err := l.Accept(); err == nil {
			_, _ = conn.Read(make([]byte, 1))
			conn.Close()
		}
	}()
	if err := attach(t.Context(), dir, []string{"cache", "ls"}, nil); !errors.Is(err, errEnding) {
		t.Errorf("%v, want %v", err, errEnding)
	}
}

// TestOwnerOfALongPath: a cache directory's path may be longer than a socket's.
func TestOwnerOfALongPath(t *testing.T) {
	dir := filepath.Join(t.TempDir(), strings.Repeat("d", maxSocketPath))
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	l, err := listenUnix(filepath.Join(dir, socketName))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if pid := ownerOf(filepath.Join(dir, socketName)); pid != os.Getpid() {
		t.Errorf("process %d", pid)
	}
}
