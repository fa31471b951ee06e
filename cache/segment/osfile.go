package segment

import (
	"errors"
	"io/fs"
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/internal/durable"
)

// OS is the operating system's file system.
var OS FS = osFS{}

type osFS struct{}

func (osFS) OpenFile(name string, flag int, perm fs.FileMode) (File, error) {
	f, err := os.OpenFile(name, flag, perm)
	if err != nil {
		return nil, err
	}
	raw, err := f.SyscallConn()
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	file := osFile{f, raw}
	file.advise(0, 0, unix.FADV_RANDOM) // reads are random: the kernel is not to read ahead
	return file, nil
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
func (osFS) Remove(name string) error                     { return os.Remove(name) }
func (osFS) SyncDir(name string) error                    { return durable.SyncDir(name) }

// osFile is a file of the operating system. Reads into several buffers use the descriptor by Control of its RawConn: it
// stays open until they end, as by ReadAt and not by Fd, and there may be several, unlike by Read of the RawConn.
type osFile struct {
	*os.File
	raw syscall.RawConn
}

// vectorRead is one preadv2; it is kept with its closure, so that a read allocates nothing.
type vectorRead struct {
	bufs  [][]byte
	off   int64
	flags int
	n     int
	err   error
	do    func(fd uintptr)
}

var vectorReads = sync.Pool{New: func() any {
	v := new(vectorRead)
	v.do = func(fd uintptr) {
		for {
			v.n, v.err = unix.Preadv2(int(fd), v.bufs, v.off, v.flags)
			if !errors.Is(v.err, unix.EINTR) {
				return
			}
		}
	}
	return v
}}

func (f osFile) preadv(bufs [][]byte, off int64, flags int) (int, error) {
	v := vectorReads.Get().(*vectorRead)
	v.bufs, v.off, v.flags = bufs, off, flags
	n, err := 0, fs.ErrClosed // the only error of Control
	if f.raw.Control(v.do) == nil {
		n, err = v.n, v.err
	}
	v.bufs, v.n, v.err = nil, 0, nil
	vectorReads.Put(v)
	return max(n, 0), err
}

func (f osFile) ReadVAt(bufs [][]byte, off int64) (int, error) {
	n, err := f.preadv(bufs, off, 0)
	if err != nil {
		return 0, &os.PathError{Op: "read", Path: f.Name(), Err: err}
	}
	// A short read means the end of the file, or an interrupt by a signal: a plain read of the rest tells.
	got := n
	for _, b := range bufs {
		if got >= len(b) {
			got -= len(b)
			continue
		}
		k, err := f.ReadAt(b[got:], off+int64(n))
		n += k
		if err != nil {
			return n, err
		}
		got = 0
	}
	return n, nil
}

func (f osFile) ReadNowAt(bufs [][]byte, off int64) (int, error) {
	n, err := f.preadv(bufs, off, unix.RWF_NOWAIT)
	switch {
	case errors.Is(err, unix.EAGAIN):
		err = ErrWouldBlock
	case errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.ENOSYS), errors.Is(err, unix.EINVAL):
		err = errors.ErrUnsupported
	}
	return n, err
}

func (f osFile) Size() (int64, error) {
	st, err := f.Stat()
	if err != nil {
		return 0, err
	}
	return st.Size(), nil
}

func (f osFile) Fetch(off, n int64)  { f.advise(off, n, unix.FADV_WILLNEED) }
func (f osFile) Forget(off, n int64) { f.advise(off, n, unix.FADV_DONTNEED) }

func (f osFile) advise(off, n int64, advice int) {
	_ = f.raw.Control(func(fd uintptr) { _ = unix.Fadvise(int(fd), off, n, advice) })
}

func (f osFile) Absent(off, n int64) (absent bool) {
	_ = f.raw.Control(func(fd uintptr) {
		var s unix.Cachestat_t
		err := unix.Cachestat(uint(fd), &unix.CachestatRange{Off: uint64(off), Len: uint64(n)}, &s, 0)
		absent = err == nil && s.Cache == 0
	})
	return absent
}

func (f osFile) Punch(off, n int64) (err error) {
	if failed := f.raw.Control(func(fd uintptr) {
		err = unix.Fallocate(int(fd), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, off, n)
	}); failed != nil {
		return failed
	}
	return err
}
