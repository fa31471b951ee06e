package fuseio

import (
	"errors"
	"os"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// What is used of <linux/io_uring.h>.
const (
	setupCQSize       = 1 << 3
	setupSQE128       = 1 << 10
	setupSingleIssuer = 1 << 12
	setupDeferTaskrun = 1 << 13
	setupNoSQArray    = 1 << 16

	enterGetEvents      = 1 << 0
	enterExtArg         = 1 << 3
	enterRegisteredRing = 1 << 4

	registerFiles     = 2
	registerRingFDs   = 20
	unregisterRingFDs = 21

	offSQRing = 0
	offSQEs   = 0x10000000

	ioRead       = 22
	opURingCmd   = 46
	sqeFixedFile = 1
)

// sqe is struct io_uring_sqe of 128 bytes, as IORING_OP_URING_CMD uses it.
type sqe struct {
	opcode, flags uint8
	ioprio        uint16
	fd            int32
	cmdOp         uint64 // off
	addr          uint64
	len           uint32
	rwFlags       uint32
	userData      uint64
	_             uint64
	cmd           cmdReq // struct fuse_uring_cmd_req starts at byte 48
	_             [56]byte
}

type cmdReq struct {
	flags, commitID uint64
	qid             uint16
	_               [6]byte
}

type cqe struct {
	userData uint64
	res      int32
	flags    uint32
}

// ringOffsets is struct io_sqring_offsets, and io_cqring_offsets, which alone has cqes.
type ringOffsets struct {
	head, tail, ringMask, ringEntries, _, cqes, _, _ uint32
	userAddr                                         uint64
}

type params struct {
	sqEntries, cqEntries, flags, sqThreadCPU, sqThreadIdle, features, wqFd uint32
	resv                                                                   [3]uint32
	sqOff, cqOff                                                           ringOffsets
}

// ringUpdate is struct io_uring_rsrc_update.
type ringUpdate struct {
	offset, resv uint32
	data         uint64
}

// ring is an io_uring. All its methods belong to the thread that made it.
type ring struct {
	fd       int // index of the registered ring, for enter
	file     int // its descriptor
	sqTail   *uint32
	sqMask   uint32
	cqHead   *uint32
	cqTail   *uint32
	cqMask   uint32
	cqes     []cqe
	sqes     []sqe
	mapped   [2][]byte
	tail     uint32 // of the submission queue, ours
	pending  uint32 // submissions that the kernel has not taken yet
	extended *extArg
}

// extArg is struct io_uring_getevents_arg with its time-out.
type extArg struct {
	sigmask        uint64
	sigmaskSize    uint32
	minWait        uint32
	ts             uint64
	seconds, nanos int64 // the argument proper ends before
}

// newRing makes a ring for n commands in flight. Every kernel with FUSE over io_uring has the flags.
func newRing(n int) (*ring, error) {
	p := params{flags: setupSQE128 | setupCQSize | setupSingleIssuer | setupDeferTaskrun | setupNoSQArray,
		cqEntries: uint32(2 * n)}
	fd, _, errno := unix.Syscall(unix.SYS_IO_URING_SETUP, uintptr(n), uintptr(unsafe.Pointer(&p)), 0)
	if errno != 0 {
		return nil, os.NewSyscallError("io_uring_setup", errno)
	}
	r := &ring{fd: -1, file: int(fd), extended: new(extArg)}
	var err error
	size := max(int(p.sqOff.tail)+4, int(p.cqOff.cqes+p.cqEntries*uint32(unsafe.Sizeof(cqe{}))))
	if r.mapped[0], err = unix.Mmap(r.file, offSQRing, size, unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_SHARED|unix.MAP_POPULATE); err == nil {
		r.mapped[1], err = unix.Mmap(r.file, offSQEs, int(p.sqEntries)*int(unsafe.Sizeof(sqe{})),
			unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_POPULATE)
	}
	if err != nil {
		r.close()
		return nil, os.NewSyscallError("mmap", err)
	}
	at := func(off uint32) *uint32 { return (*uint32)(unsafe.Pointer(&r.mapped[0][off])) }
	r.sqTail, r.sqMask = at(p.sqOff.tail), *at(p.sqOff.ringMask)
	r.cqHead, r.cqTail, r.cqMask = at(p.cqOff.head), at(p.cqOff.tail), *at(p.cqOff.ringMask)
	r.cqes = unsafe.Slice((*cqe)(unsafe.Pointer(&r.mapped[0][p.cqOff.cqes])), p.cqEntries)
	r.sqes = unsafe.Slice((*sqe)(unsafe.Pointer(&r.mapped[1][0])), p.sqEntries)
	// The ring and /dev/fuse are registered, so that a command does not look up descriptors.
	up := ringUpdate{offset: ^uint32(0), data: uint64(fd)}
	if _, _, errno := unix.Syscall6(unix.SYS_IO_URING_REGISTER, fd, registerRingFDs, uintptr(unsafe.Pointer(&up)), 1, 0,
		0); errno != 0 {
		r.close()
		return nil, os.NewSyscallError("io_uring_register", errno)
	}
	r.fd = int(up.offset)
	return r, nil
}

// registerFile makes a file number 0 of commands with sqeFixedFile.
func (r *ring) registerFile(fd int) error {
	files := [1]int32{int32(fd)}
	_, _, errno := unix.Syscall6(unix.SYS_IO_URING_REGISTER, uintptr(r.file), registerFiles,
		uintptr(unsafe.Pointer(&files)), 1, 0, 0)
	if errno != 0 {
		return os.NewSyscallError("io_uring_register", errno)
	}
	return nil
}

// next returns an empty submission. There is always one: there are as many as commands.
func (r *ring) next() *sqe {
	s := &r.sqes[r.tail&r.sqMask]
	*s = sqe{}
	r.tail++
	r.pending++
	return s
}

// submit hands over what was prepared and lets completions in, without waiting. A short one is hidden from the Go
// scheduler.
func (r *ring) submit(short bool) error {
	atomic.StoreUint32(r.sqTail, r.tail)
	enter := unix.Syscall6
	if short {
		enter = unix.RawSyscall6
	}
	n, _, errno := enter(unix.SYS_IO_URING_ENTER, uintptr(r.fd), uintptr(r.pending), 0,
		enterGetEvents|enterRegisteredRing, 0, 0)
	if errno != 0 {
		return again(errno)
	}
	r.pending -= uint32(n)
	return nil
}

// wait waits for a completion. It returns errIdle if none came within the time; 0 is for ever.
func (r *ring) wait(limit time.Duration) error {
	flags, arg, size := uintptr(enterGetEvents|enterRegisteredRing), unsafe.Pointer(nil), uintptr(0)
	if limit > 0 {
		x := r.extended
		*x = extArg{seconds: int64(limit / time.Second), nanos: int64(limit % time.Second)}
		x.ts = uint64(uintptr(unsafe.Pointer(&x.seconds)))
		flags, arg, size = flags|enterExtArg, unsafe.Pointer(x), unsafe.Offsetof(x.seconds)
	}
	_, _, errno := unix.Syscall6(unix.SYS_IO_URING_ENTER, uintptr(r.fd), 0, 1, flags, uintptr(arg), size)
	if errno == unix.ETIME {
		return errIdle
	}
	return again(errno)
}

var errIdle = errors.New("no completion in time")

// again drops the errors after which the same call may succeed.
func again(errno unix.Errno) error {
	switch errno {
	case 0, unix.EINTR, unix.EAGAIN, unix.EBUSY:
		return nil
	}
	return os.NewSyscallError("io_uring_enter", errno)
}

// reap calls f for each completion that is there, and returns their number.
func (r *ring) reap(f func(userData uint64, res int32)) int {
	head, tail := *r.cqHead, atomic.LoadUint32(r.cqTail)
	n := int(tail - head)
	for ; head != tail; head++ {
		c := r.cqes[head&r.cqMask]
		atomic.StoreUint32(r.cqHead, head+1)
		f(c.userData, c.res)
	}
	return n
}

// close ends the ring. Commands that the kernel still has are canceled.
func (r *ring) close() {
	if r.fd >= 0 { // the thread may live on, and would hold the ring by this
		up := ringUpdate{offset: uint32(r.fd)}
		_, _, _ = unix.Syscall6(unix.SYS_IO_URING_REGISTER, uintptr(r.file), unregisterRingFDs,
			uintptr(unsafe.Pointer(&up)), 1, 0, 0)
	}
	for _, m := range r.mapped {
		if m != nil {
			_ = unix.Munmap(m)
		}
	}
	_ = unix.Close(r.file)
}
