package segment

import (
	"errors"
	"io"
	"io/fs"
	"os"
)

// FS is the part of a file system that a store needs. Tests put faults and crashes behind it.
type FS interface {
	// OpenFile is [os.OpenFile].
	OpenFile(name string, flag int, perm fs.FileMode) (File, error)
	// ReadDir returns the names in a folder, sorted.
	ReadDir(name string) ([]string, error)
	MkdirAll(name string, perm fs.FileMode) error
	Remove(name string) error
	// SyncDir makes the names in a folder durable.
	SyncDir(name string) error
}

// File is an open segment. Its methods are safe for concurrent use, Close included: calls that began
// before it finish, those that come after it fail with [fs.ErrClosed].
type File interface {
	io.ReaderAt
	io.WriterAt
	Size() (int64, error)
	Truncate(size int64) error
	Sync() error
	Close() error
}

// A File may implement more. Otherwise ReadAt is used, or nothing.
type (
	// vectorReader fills several buffers one after the other with one system call.
	vectorReader interface {
		// ReadVAt is ReadAt of all the buffers.
		ReadVAt(bufs [][]byte, off int64) (int, error)
	}
	// nowReader reads without waiting for the disk.
	nowReader interface {
		// ReadNowAt fills the buffers as far as their bytes are in memory. It returns ErrWouldBlock if not even the
		// first byte is, and errors.ErrUnsupported if the file system cannot tell.
		ReadNowAt(bufs [][]byte, off int64) (int, error)
	}
	// pageCache gives the kernel hints about reads, and asks it what it has.
	pageCache interface {
		Scattered()
		Fetch(off, n int64)
		Absent(off, n int64) bool
		Forget(off, n int64)
	}
)

// ReadNow fills the buffers with bytes in memory, or returns ErrWouldBlock; also at the end of the file. It returns
// errors.ErrUnsupported if the file cannot tell what is in memory.
func ReadNow(f File, bufs [][]byte, off int64) error {
	r, ok := f.(nowReader)
	if !ok {
		return errors.ErrUnsupported
	}
	want := 0
	for _, b := range bufs {
		want += len(b)
	}
	n, err := r.ReadNowAt(bufs, off)
	if err == nil && n < want {
		return ErrWouldBlock
	}
	return err
}

// Punch makes a hole of n bytes at off. It returns errors.ErrUnsupported if the file cannot have holes.
func Punch(f File, off, n int64) error {
	p, ok := f.(interface{ Punch(off, n int64) error })
	if !ok {
		return errors.ErrUnsupported
	}
	return p.Punch(off, n)
}

// readV fills the buffers from off on.
func readV(f File, bufs [][]byte, off int64) (n int, err error) {
	if v, ok := f.(vectorReader); ok {
		return v.ReadVAt(bufs, off)
	}
	for _, b := range bufs {
		k, err := f.ReadAt(b, off+int64(n))
		n += k
		if k < len(b) {
			return n, err
		}
	}
	return n, nil
}

// OS is the operating system's file system.
var OS FS = osFS{}

type osFS struct{}

func (osFS) OpenFile(name string, flag int, perm fs.FileMode) (File, error) {
	f, err := os.OpenFile(name, flag, perm)
	if err != nil {
		return nil, err
	}
	return newOSFile(f)
}

func (osFS) ReadDir(name string) ([]string, error) {
	entries, err := os.ReadDir(name)
	names := make([]string, len(entries))
	for i, e := range entries {
		names[i] = e.Name()
	}
	return names, err
}

func (osFS) MkdirAll(name string, perm fs.FileMode) error { return os.MkdirAll(name, perm) }

func (osFS) Remove(name string) error { return os.Remove(name) }

func (osFS) SyncDir(name string) error {
	d, err := os.Open(name)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

func (f osFile) Size() (int64, error) {
	st, err := f.Stat()
	if err != nil {
		return 0, err
	}
	return st.Size(), nil
}
