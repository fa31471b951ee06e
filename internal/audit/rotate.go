package audit

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/internal/durable"
)

// Rotating is a file to which lines are appended, and that is rotated when it is full: FILE becomes FILE.1, that
// FILE.2, and so on, and the last one is removed. One process at a time can own it. If another program moves the file,
// as logrotate does, the next line starts a new one.
//
// It is not a library's: docs/adr/0065-logs-are-rotated-by-our-own.md says why.
type Rotating struct {
	path string
	max  int64
	keep int

	mu   sync.Mutex
	f    *os.File
	size int64
}

// OpenRotating opens a file for lines. It is rotated before a line that would make it larger than max bytes, unless max
// is 0; keep is the number of rotated files to keep.
func OpenRotating(path string, max int64, keep int) (*Rotating, error) {
	r := &Rotating{path: path, max: max, keep: keep}
	return r, r.open()
}

// open opens and locks the file at the path. If it fails, r.f is unchanged.
func (r *Rotating) open() error {
	f, err := os.OpenFile(r.path, os.O_CREATE|os.O_APPEND|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s is not a regular file (give another path)", r.path)
	}
	if err == nil {
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if errors.Is(err, unix.EWOULDBLOCK) {
			err = fmt.Errorf("another process writes to %s (give each daemon its own file)", r.path)
		}
	}
	if err != nil {
		return errors.Join(err, f.Close())
	}
	size := info.Size()
	if size > 0 { // complete a line that a crash or a full disk cut short
		last := make([]byte, 1)
		if _, err := f.ReadAt(last, size-1); err == nil && last[0] != '\n' {
			n, _ := f.Write([]byte{'\n'})
			size += int64(n)
		}
	}
	if r.f != nil {
		_ = r.f.Close()
	}
	r.f, r.size = f, size
	return nil
}

// Write appends one line, whole or not at all, as far as the disk allows.
func (r *Rotating) Write(line []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.f == nil {
		return 0, fs.ErrClosed
	}
	moved, err := r.moved()
	if err == nil && moved {
		err = r.open()
	}
	if err == nil && r.max > 0 && r.size > 0 && r.size+int64(len(line)) > r.max {
		if err = Shift(r.path, r.keep); err == nil {
			err = r.open()
		}
	}
	if err != nil {
		return 0, err
	}
	n, err := r.f.Write(line)
	if err == nil && n < len(line) {
		err = io.ErrShortWrite
	}
	if err != nil && n > 0 && r.f.Truncate(r.size) == nil { // half a line would corrupt the next one
		n = 0
	}
	r.size += int64(n)
	return n, err
}

// moved reports whether the path now names another file than r's.
func (r *Rotating) moved() (bool, error) {
	ours, err := r.f.Stat()
	if err != nil {
		return false, err
	}
	there, err := os.Stat(r.path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return false, err
	}
	return !os.SameFile(ours, there), nil // nothing is not the same
}

// Shift makes room for a new file at path: the existing file becomes path.1, and so on, up to keep.
func Shift(path string, keep int) error {
	name := func(i int) string {
		if i == 0 {
			return path
		}
		return path + "." + strconv.Itoa(i)
	}
	for i := keep; ; i++ { // files beyond keep, from a time when more were kept
		if err := os.Remove(name(i)); errors.Is(err, fs.ErrNotExist) {
			break
		} else if err != nil {
			return err
		}
	}
	for i := keep - 1; i >= 0; i-- {
		if err := os.Rename(name(i), name(i+1)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return durable.SyncDir(filepath.Dir(path))
}

// Close closes the file.
func (r *Rotating) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.f == nil {
		return nil
	}
	// Unlock first: a child that is being forked holds the descriptor, and with it the lock, until its exec.
	err := errors.Join(unix.Flock(int(r.f.Fd()), unix.LOCK_UN), r.f.Close())
	r.f = nil
	return err
}
