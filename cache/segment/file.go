package segment

import (
	"io"
	"io/fs"
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
	// ReadVAt is ReadAt of several buffers, one after the other.
	ReadVAt(bufs [][]byte, off int64) (int, error)
	// ReadNowAt fills the buffers as far as their bytes are in memory. It returns ErrWouldBlock if not even the
	// first byte is, and errors.ErrUnsupported if the file system cannot tell.
	ReadNowAt(bufs [][]byte, off int64) (int, error)
	Size() (int64, error)
	Truncate(size int64) error
	// Punch gives the space of a range back. It returns errors.ErrUnsupported if the file cannot have holes.
	Punch(off, n int64) error
	Sync() error
	Close() error

	// The rest tells the kernel what will be read and what will not, and asks what of it is in memory.

	// Fetch starts to read a range into the page cache.
	Fetch(off, n int64)
	// Absent tells whether nothing of a range is in the page cache; false if the kernel cannot tell (before Linux 6.5).
	Absent(off, n int64) bool
	// Forget drops a range from the page cache.
	Forget(off, n int64)
}

// ReadNow fills the buffers with bytes in memory, or returns ErrWouldBlock; also at the end of the file. It returns
// errors.ErrUnsupported if the file cannot tell what is in memory.
func ReadNow(f File, bufs [][]byte, off int64) error {
	n, err := f.ReadNowAt(bufs, off)
	if err == nil && n < lengthOf(bufs) {
		return ErrWouldBlock
	}
	return err
}

// lengthOf is that of all buffers together.
func lengthOf(bufs [][]byte) (n int) {
	for _, b := range bufs {
		n += len(b)
	}
	return n
}
