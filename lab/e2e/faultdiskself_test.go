package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func spawnedFaultDisk(t *testing.T) (d *faultDisk, backing string) {
	t.Helper()
	backing, dir := t.TempDir(), t.TempDir()
	d, err := spawnFaultDisk(t.Context(), backing, dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		d.Stop()
		if b, err := os.ReadFile("/proc/self/mountinfo"); err != nil || strings.Contains(string(b), dir) {
			t.Errorf("still mounted, %v", err)
		}
	})
	return d, backing
}

func setFaults(t *testing.T, d *faultDisk, s faultSettings) {
	t.Helper()
	if err := d.Set(t.Context(), s); err != nil {
		t.Fatal(err)
	}
}

func TestFaultDiskErrors(t *testing.T) {
	d, _ := spawnedFaultDisk(t)
	for _, dir := range []string{"segments", "segments2"} {
		if err := os.Mkdir(filepath.Join(d.Dir, dir), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(d.Dir, dir, "f"), []byte("content"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	f := filepath.Join(d.Dir, "segments/f")
	do := map[string]func() error{
		// the kernel forgets a file's pages when it is opened
		"read":  func() error { _, err := os.ReadFile(f); return err },
		"write": func() error { return os.WriteFile(f, []byte("content"), 0o644) },
		"make": func() error {
			return errors.Join(os.WriteFile(f+"new", nil, 0o644), os.Remove(f+"new"))
		},
		"sync": func() error {
			file, err := os.OpenFile(f, os.O_WRONLY, 0)
			if err != nil {
				return err
			}
			defer file.Close()
			return file.Sync()
		},
	}
	for _, c := range []struct {
		rule  faultRule
		fails string // the one of do
		with  error
	}{
		{faultRule{Op: faultRead, Path: "segments", Errno: "EIO"}, "read", syscall.EIO},
		{faultRule{Op: faultWrite, Path: "segments", Errno: "ENOSPC"}, "write", syscall.ENOSPC},
		{faultRule{Op: faultWrite, Path: "segments/f", Errno: "EIO"}, "write", syscall.EIO},
		{faultRule{Op: faultMake, Path: "segments/fnew", Errno: "EROFS"}, "make", syscall.EROFS},
		{faultRule{Op: faultSync, Path: "segments", Errno: "EIO"}, "sync", syscall.EIO},
		{faultRule{Path: "segment", Errno: "EIO"}, "", nil}, // a prefix of the name, not of the path
		{faultRule{Op: faultRead, Path: "segments2", Errno: "EIO"}, "", nil},
	} {
		setFaults(t, d, faultSettings{Rules: []faultRule{c.rule}})
		for name, op := range do {
			if c.fails == "sync" && name != "read" && name != "sync" {
				continue // a close flushes, and os.WriteFile tells of it
			}
			err := op()
			if name == c.fails && !errors.Is(err, c.with) || name != c.fails && err != nil {
				t.Errorf("%+v: %s: %v", c.rule, name, err)
			}
		}
	}
	setFaults(t, d, faultSettings{Rules: []faultRule{{Op: faultMake, Delay: 200 * time.Millisecond}}})
	start := time.Now()
	if err := os.Mkdir(d.Dir+"/slow", 0o755); err != nil || time.Since(start) < 200*time.Millisecond {
		t.Errorf("delay: %v after %s", err, time.Since(start))
	}
	for _, bad := range []faultRule{{}, {Errno: "ENOSUCH"}, {Op: "flip", Errno: "EIO"}, {Errno: "EIO", Path: "/abs"},
		{Errno: "EIO", Path: "../x"}, {Delay: -1}} {
		if err := d.Set(t.Context(), faultSettings{Rules: []faultRule{bad}}); err == nil {
			t.Errorf("%+v was taken", bad)
		}
	}
	if s, err := d.Stats(t.Context()); err != nil || s.Failed < 6 {
		t.Errorf("%+v, %v", s, err)
	}
}

func TestFaultDiskFillsUp(t *testing.T) {
	d, backing := spawnedFaultDisk(t)
	setFaults(t, d, faultSettings{Capacity: 1 << 20})
	block := bytes.Repeat([]byte("x"), 64<<10)
	fill := func(name string) (n int) {
		f, err := os.OpenFile(filepath.Join(d.Dir, name), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		for ; ; n++ {
			if _, err := f.Write(block); errors.Is(err, syscall.ENOSPC) {
				return n
			} else if err != nil || n > 100 {
				t.Fatal(n, err)
			}
		}
	}
	if n := fill("f"); n < 14 || n > 16 {
		t.Errorf("%d blocks of 64 KiB in 1 MiB", n)
	}
	var st unix.Statfs_t
	if err := unix.Statfs(d.Dir, &st); err != nil || st.Blocks*uint64(st.Bsize) != 1<<20 ||
		st.Bavail*uint64(st.Bsize) > 64<<10 {
		t.Errorf("statfs: %d blocks, %d free, %v", st.Blocks, st.Bavail, err)
	}
	// Whoever replaces a file gets its room back, so does who cuts or removes one.
	if err := os.WriteFile(filepath.Join(d.Dir, "tiny"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(filepath.Join(d.Dir, "tiny"), filepath.Join(d.Dir, "f")); err != nil {
		t.Fatal(err)
	}
	if n := fill("g"); n < 14 {
		t.Errorf("%d blocks after a rename over the first file", n)
	}
	if err := os.Truncate(filepath.Join(d.Dir, "g"), 512<<10); err != nil {
		t.Fatal(err)
	}
	if n := fill("g"); n < 7 || n > 9 {
		t.Errorf("%d blocks in the half that was cut off", n)
	}
	if err := os.Remove(filepath.Join(d.Dir, "g")); err != nil {
		t.Fatal(err)
	}
	if n := fill("h"); n < 14 {
		t.Errorf("%d blocks after a removal", n)
	}
	one, two := filepath.Join(d.Dir, "one"), filepath.Join(d.Dir, "two") // folders have blocks, too
	if err := errors.Join(os.Mkdir(one, 0o755), os.Mkdir(two, 0o755), os.Remove(two)); err != nil {
		t.Fatal(err)
	}
	s, err := d.Stats(t.Context())
	used, e := blocksBelow(backing)
	if err != nil || e != nil || s.Used != used {
		t.Errorf("counted %d, in use %d, %v, %v", s.Used, used, err, e)
	}
	setFaults(t, d, faultSettings{})
	if err := os.WriteFile(filepath.Join(d.Dir, "more"), make([]byte, 2<<20), 0o644); err != nil {
		t.Errorf("without a capacity: %v", err)
	}
}

// What hangs waits, in this folder and no other, and goes on when it is let go. It cannot be killed.
func TestFaultDiskHangs(t *testing.T) {
	d, _ := spawnedFaultDisk(t)
	for _, dir := range []string{"segments", "other"} {
		if err := os.Mkdir(filepath.Join(d.Dir, dir), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(d.Dir, dir, "f"), []byte("content"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	setFaults(t, d, faultSettings{Rules: []faultRule{{Path: "segments", Hang: true}}})
	reader := exec.Command("cat", filepath.Join(d.Dir, "segments/f"))
	var out bytes.Buffer
	reader.Stdout = &out
	if err := reader.Start(); err != nil {
		t.Fatal(err)
	}
	hanging := func(want int64) {
		t.Helper()
		for deadline := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
			s, err := d.Stats(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if s.Hanging == want {
				return
			}
			if time.Now().After(deadline) {
				t.Fatalf("%+v, want %d hanging", s, want)
			}
		}
	}
	hanging(1)
	if err := os.WriteFile(filepath.Join(d.Dir, "other/g"), []byte("x"), 0o644); err != nil {
		t.Errorf("beside what hangs: %v", err)
	}
	if _, err := os.ReadFile(filepath.Join(d.Dir, "other/f")); err != nil {
		t.Errorf("beside what hangs: %v", err)
	}
	setFaults(t, d, faultSettings{})
	if err := reader.Wait(); err != nil || out.String() != "content" {
		t.Errorf("let go: %q, %v", out.String(), err)
	}
	hanging(0)
	if s, err := d.Stats(t.Context()); err != nil || s.Hung != 1 {
		t.Errorf("%+v, %v", s, err)
	}
	// Stop lets go as well: the cleanup would wait for ever otherwise.
	setFaults(t, d, faultSettings{Rules: []faultRule{{Path: "segments", Hang: true}}})
	last := exec.Command("cat", filepath.Join(d.Dir, "segments/f"))
	if err := last.Start(); err != nil {
		t.Fatal(err)
	}
	hanging(1)
	_ = last.Process.Kill()
	state := "S" // as long as it has not taken notice of the signal
	for state == "S" || state == "R" {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", last.Process.Pid))
		if err != nil {
			t.Fatal(err)
		}
		state = strings.Fields(string(b))[2]
	}
	if state != "D" {
		t.Errorf("a process that waits for the disk was killed: its state is %s", state)
	}
	d.Stop()
	_ = last.Wait()
}
