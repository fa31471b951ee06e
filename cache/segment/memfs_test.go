package segment

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
)

// memFS is a file system in memory with scripted faults and power failures.
type memFS struct {
	mu    sync.Mutex
	files map[string]*memData
	// fault, if set, is asked before each operation ("open", "read", "write", "sync", "truncate",
	// "remove", "syncdir", "readdir"). A write that fails has written the first half of its bytes; one that fails with
	// errShort says nothing of it but the count.
	fault func(op, name string, off int64) error
	// resident says which bytes of a file are in memory; nil: no file system of the kind that could
	// tell.
	resident func(name string, off int64) bool
	forgot   []string // ranges that Forget named
	sector   int64    // reads that include this byte fail; 0: none
}

// memData is a file's content: what reads see, and what a power failure leaves for sure.
type memData struct {
	mu            sync.RWMutex
	data, durable []byte
	named         bool // the name is durable
}

// errShort is the fault of a write that writes half and returns no error.
var errShort = errors.New("short")

func newMemFS() *memFS { return &memFS{files: make(map[string]*memData)} }

func (m *memFS) ask(op, name string, off int64) error {
	m.mu.Lock()
	fault := m.fault
	m.mu.Unlock()
	if fault != nil {
		if err := fault(op, name, off); err != nil {
			return &fs.PathError{Op: op, Path: name, Err: err}
		}
	}
	return nil
}

func (m *memFS) setFault(f func(op, name string, off int64) error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.fault = f
}

func (m *memFS) OpenFile(name string, flag int, _ fs.FileMode) (File, error) {
	if err := m.ask("open", name, 0); err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	d := m.files[name]
	switch {
	case d == nil && flag&os.O_CREATE == 0:
		return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrNotExist}
	case d != nil && flag&os.O_EXCL != 0:
		return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrExist}
	case d == nil:
		d = &memData{}
		m.files[name] = d
	}
	return &memFile{fs: m, name: name, d: d}, nil
}

func (m *memFS) MkdirAll(string, fs.FileMode) error { return nil }

func (m *memFS) ReadDir(dir string) ([]string, error) {
	if err := m.ask("readdir", dir, 0); err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	var names []string
	for name := range m.files {
		if filepath.Dir(name) == dir {
			names = append(names, filepath.Base(name))
		}
	}
	slices.Sort(names)
	return names, nil
}

func (m *memFS) Remove(name string) error {
	if err := m.ask("remove", name, 0); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.files, name)
	return nil
}

func (m *memFS) SyncDir(dir string) error {
	if err := m.ask("syncdir", dir, 0); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for name, d := range m.files {
		if filepath.Dir(name) == dir {
			d.mu.Lock()
			d.named = true
			d.mu.Unlock()
		}
	}
	return nil
}

// names returns the files, sorted.
func (m *memFS) names() []string { return slices.Sorted(maps.Keys(m.files)) }

// powerFailure leaves of each file what was fsynced and, of every 4-KiB page changed since, either the old or
// the new bytes.
func (m *memFS) powerFailure(rng *rand.Rand) {
	const page = 4096
	for _, name := range m.names() {
		d := m.files[name]
		if !d.named && rng.IntN(2) == 0 {
			delete(m.files, name)
			continue
		}
		size := min(len(d.data), len(d.durable))
		if more := max(len(d.data), len(d.durable)) - size; more > 0 {
			size += rng.IntN(more + 1)
		}
		after := make([]byte, size)
		for at := 0; at < size; at += page {
			src := d.durable
			if rng.IntN(2) == 0 {
				src = d.data
			}
			if at < len(src) {
				copy(after[at:min(at+page, size)], src[at:])
			}
		}
		m.files[name] = &memData{data: after, durable: bytes.Clone(after), named: true}
	}
}

type memFile struct {
	fs     *memFS
	name   string
	d      *memData
	closed bool // guarded by d.mu
}

func (f *memFile) ReadAt(p []byte, off int64) (int, error) {
	if err := f.fs.ask("read", f.name, off); err != nil {
		return 0, err
	}
	if at := f.fs.sector; at > 0 && off <= at && at < off+int64(len(p)) {
		return 0, syscall.EIO
	}
	f.d.mu.RLock()
	defer f.d.mu.RUnlock()
	if f.closed {
		return 0, fs.ErrClosed
	}
	if off >= int64(len(f.d.data)) {
		return 0, io.EOF
	}
	n := copy(p, f.d.data[off:])
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

func (f *memFile) WriteAt(p []byte, off int64) (int, error) {
	err := f.fs.ask("write", f.name, off)
	if err != nil {
		p = p[:len(p)/2]
	}
	f.d.mu.Lock()
	defer f.d.mu.Unlock()
	if f.closed {
		return 0, fs.ErrClosed
	}
	if end := int(off) + len(p); end > len(f.d.data) {
		f.d.data = append(f.d.data, make([]byte, end-len(f.d.data))...)
	}
	n := copy(f.d.data[off:], p)
	if errors.Is(err, errShort) {
		err = nil
	}
	return n, err
}

func (f *memFile) ReadNowAt(bufs [][]byte, off int64) (int, error) {
	if err := f.fs.ask("read", f.name, off); err != nil {
		return 0, err
	}
	f.fs.mu.Lock()
	resident := f.fs.resident
	f.fs.mu.Unlock()
	if resident == nil {
		return 0, errors.ErrUnsupported
	}
	f.d.mu.RLock()
	defer f.d.mu.RUnlock()
	if f.closed {
		return 0, fs.ErrClosed
	}
	n := 0
	for _, b := range bufs {
		for i := range b {
			if off+int64(n) >= int64(len(f.d.data)) {
				return n, nil
			}
			if !resident(f.name, off+int64(n)) {
				if n == 0 {
					return 0, ErrWouldBlock
				}
				return n, nil
			}
			b[i] = f.d.data[off+int64(n)]
			n++
		}
	}
	return n, nil
}

func (f *memFile) ReadVAt(bufs [][]byte, off int64) (n int, err error) {
	for _, b := range bufs {
		if len(b) == 0 {
			continue // which asks no disk for anything
		}
		k, err := f.ReadAt(b, off+int64(n))
		n += k
		if k < len(b) {
			return n, err
		}
	}
	return n, nil
}

func (f *memFile) Punch(int64, int64) error { return errors.ErrUnsupported }

func (f *memFile) Fetch(int64, int64) {}

func (f *memFile) Absent(int64, int64) bool { return false }

func (f *memFile) Forget(off, n int64) {
	f.fs.mu.Lock()
	defer f.fs.mu.Unlock()
	f.fs.forgot = append(f.fs.forgot, fmt.Sprintf("%s %d+%d", filepath.Base(f.name), off, n))
}

func (f *memFile) Size() (int64, error) {
	f.d.mu.RLock()
	defer f.d.mu.RUnlock()
	return int64(len(f.d.data)), nil
}

func (f *memFile) Truncate(size int64) error {
	if err := f.fs.ask("truncate", f.name, size); err != nil {
		return err
	}
	f.d.mu.Lock()
	defer f.d.mu.Unlock()
	if size < int64(len(f.d.data)) {
		f.d.data = slices.Clone(f.d.data[:size])
	}
	return nil
}

func (f *memFile) Sync() error {
	err := f.fs.ask("sync", f.name, 0)
	f.d.mu.Lock()
	defer f.d.mu.Unlock()
	if err != nil { // the kernel marks the pages clean and says nothing more
		f.d.data = bytes.Clone(f.d.durable)
		return err
	}
	f.d.durable = bytes.Clone(f.d.data)
	return nil
}

func (f *memFile) Close() error {
	f.d.mu.Lock()
	defer f.d.mu.Unlock()
	if f.closed {
		return fs.ErrClosed
	}
	f.closed = true
	return nil
}
