package cache

import (
	"errors"
	"io/fs"
	"os"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/shoalfs/shoal/cache/segment"
)

// faultFS is the operating system's files behind scripted faults. It cannot tell what is in the page
// cache, so every read waits for it.
type faultFS struct {
	mu    sync.Mutex
	rules map[string]error // by operation: open, read, write, sync, remove
	hung  chan struct{}    // closed by heal

	ops    map[string]*atomic.Int64
	inside atomic.Int64 // operations that hang
}

// errHang as a rule makes the operation wait for heal.
const errHang = syscall.Errno(0xfff)

func newFaultFS() *faultFS {
	f := &faultFS{rules: map[string]error{}, hung: make(chan struct{}), ops: map[string]*atomic.Int64{}}
	for _, op := range []string{"open", "read", "write", "sync", "remove"} {
		f.ops[op] = new(atomic.Int64)
	}
	return f
}

func (f *faultFS) set(err error, ops ...string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, op := range ops {
		f.rules[op] = err
	}
}

func (f *faultFS) heal() {
	f.mu.Lock()
	defer f.mu.Unlock()
	clear(f.rules)
	close(f.hung)
	f.hung = make(chan struct{})
}

func (f *faultFS) ask(op, name string) error {
	f.ops[op].Add(1)
	f.mu.Lock()
	err, hung := f.rules[op], f.hung
	f.mu.Unlock()
	if err == errHang { //nolint:errorlint // a marker
		f.inside.Add(1)
		<-hung
		f.inside.Add(-1)
		return nil
	}
	if err != nil {
		return &fs.PathError{Op: op, Path: name, Err: err}
	}
	return nil
}

func (f *faultFS) OpenFile(name string, flag int, perm fs.FileMode) (segment.File, error) {
	if err := f.ask("open", name); err != nil {
		return nil, err
	}
	file, err := segment.OS.OpenFile(name, flag, perm)
	if err != nil {
		return nil, err
	}
	return &faultFile{file, name, f}, nil
}

func (f *faultFS) ReadDir(name string) (names []string, err error) {
	entries, err := os.ReadDir(name)
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names, err
}

func (f *faultFS) MkdirAll(name string, perm fs.FileMode) error { return os.MkdirAll(name, perm) }
func (f *faultFS) SyncDir(string) error                         { return nil }

func (f *faultFS) Remove(name string) error {
	if err := f.ask("remove", name); err != nil {
		return err
	}
	return os.Remove(name)
}

type faultFile struct {
	segment.File
	name string
	fs   *faultFS
}

func (f *faultFile) ReadAt(p []byte, off int64) (int, error) {
	if err := f.fs.ask("read", f.name); err != nil {
		return 0, err
	}
	return f.File.ReadAt(p, off)
}

func (f *faultFile) WriteAt(p []byte, off int64) (int, error) {
	if err := f.fs.ask("write", f.name); err != nil {
		n, _ := f.File.WriteAt(p[:len(p)/2], off)
		return n, err
	}
	return f.File.WriteAt(p, off)
}

// Sync tells no disk: the tests do not lose power.
func (f *faultFile) Sync() error { return f.fs.ask("sync", f.name) }

func (f *faultFile) Punch(off, n int64) error {
	if err := f.fs.ask("write", f.name); err != nil {
		return err
	}
	return f.File.Punch(off, n)
}

func (f *faultFile) ReadVAt(bufs [][]byte, off int64) (int, error) {
	if err := f.fs.ask("read", f.name); err != nil {
		return 0, err
	}
	return f.File.ReadVAt(bufs, off)
}

func (f *faultFile) ReadNowAt([][]byte, int64) (int, error) { return 0, errors.ErrUnsupported }
