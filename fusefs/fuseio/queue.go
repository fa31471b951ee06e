package fuseio

import (
	"bytes"
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

const (
	// shortCopy is how many bytes of replies are submitted without telling the Go scheduler. The kernel copies them in
	// about 100 µs; a garbage collection would wait that long for this thread.
	shortCopy = 512 << 10
	wakeUp    = ^uint64(0) // user data of the read of the eventfd
	// slice is a thread's time slice. A short one lets it run sooner when it wakes up on a busy CPU, for no larger
	// share of that.
	slice    = 100 * time.Microsecond
	patience = 100 * time.Millisecond // of a thread after an error of io_uring_enter, which should not be
)

var trimAfter = 10 * time.Second // without requests payloads are given back; tests shorten it

// entry is a request's place.
type entry struct {
	id      uint64 // its user data
	qid     uint16
	command uint64 // the last, REGISTER or COMMIT_AND_FETCH
	head    *reqHeader
	payload []byte
	iov     [2]unix.Iovec

	request [16]uint64 // the header with the operation's own behind it
	in, out [2][]byte
	size    int  // of the reply's payload
	held    bool // by the server
	touched bool // the payload has pages

	next *entry // in lane.finished
}

// lane is a ring with its thread, which serves one or more of the kernel's queues.
type lane struct {
	s       *Server
	cpu     int // to be bound to
	entries []entry
	memory  []byte // headers and payloads
	stride  int    // of payloads

	ring   *ring
	wake   int // eventfd
	woken  *[8]byte
	live   int  // entries that have not ended
	busy   int  // of those, with the server
	copies int  // bytes to be copied by the next submission
	used   bool // since payloads were given back

	handlers sync.WaitGroup        // goroutines
	finished atomic.Pointer[entry] // by them, a stack
	asleep   atomic.Bool
	quit     atomic.Bool
}

// run is the thread of a lane. It tells made when there is a ring, and then waits for beginLanes.
func (l *lane) run(made chan<- error) {
	runtime.LockOSThread() // for ever: the thread ends with the goroutine
	var set unix.CPUSet
	set.Set(l.cpu)
	_ = unix.SchedSetaffinity(0, &set) // elsewhere it works, too
	if a, err := unix.SchedGetAttr(0, 0); err == nil {
		a.Runtime = uint64(slice)
		_ = unix.SchedSetAttr(0, a, 0)
	}
	err := l.open()
	defer l.close()
	made <- err
	if err != nil {
		return
	}
	if <-l.s.begun; !l.s.use {
		return
	}
	if err := l.ring.registerFile(l.s.fd); err != nil {
		l.s.refused(err)
		return
	}
	l.listen()
	for i := range l.entries {
		l.command(&l.entries[i], cmdRegister)
	}
	l.live = len(l.entries)
	for l.live > 0 && (!l.quit.Load() || l.busy > 0) {
		if err := l.turn(); err != nil {
			l.s.log.Printf("fuseio: %v", err)
			time.Sleep(patience)
		}
	}
}

// open makes the ring and maps the entries.
func (l *lane) open() (err error) {
	if l.ring, err = newRing(len(l.entries) + 1); err != nil {
		return err
	}
	heads := pages(8 + len(l.entries)*int(unsafe.Sizeof(reqHeader{})))
	l.memory, err = unix.Mmap(-1, 0, heads+len(l.entries)*l.stride, unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return err
	}
	l.woken = (*[8]byte)(l.memory)
	for i := range l.entries {
		e := &l.entries[i]
		e.id = uint64(i)
		e.head = (*reqHeader)(unsafe.Pointer(&l.memory[8+i*int(unsafe.Sizeof(reqHeader{}))]))
		e.payload = l.memory[heads+i*l.stride:][:l.stride:l.stride]
		e.out = [2][]byte{e.head.inOut[:outHeader], e.payload}
		e.iov[0].Base, e.iov[1].Base = (*byte)(unsafe.Pointer(e.head)), &e.payload[0]
		e.iov[0].SetLen(int(unsafe.Sizeof(reqHeader{})))
		e.iov[1].SetLen(l.stride)
	}
	l.wake, err = unix.Eventfd(0, unix.EFD_CLOEXEC)
	return err
}

// close frees everything that open has made, but the eventfd, which Serve may still write to.
func (l *lane) close() {
	l.handlers.Wait()
	if l.ring != nil {
		l.ring.close()
	}
	_ = unix.Munmap(l.memory)
}

// turn submits what is ready and takes what has come. It waits if there is neither.
func (l *lane) turn() error {
	l.collect()
	if err := l.ring.submit(l.copies <= shortCopy); err != nil {
		return err
	}
	l.copies = 0
	if l.ring.reap(l.completed) > 0 || l.finished.Load() != nil {
		return nil
	}
	l.asleep.Store(true)
	defer l.asleep.Store(false)
	if l.finished.Load() != nil || l.quit.Load() { // their wake-up may have come before
		return nil
	}
	limit := time.Duration(0)
	if l.used {
		limit = trimAfter
	}
	err := l.ring.wait(limit)
	if errors.Is(err, errIdle) {
		l.trim()
		err = nil
	}
	l.ring.reap(l.completed)
	return err
}

// collect prepares the replies that goroutines have finished.
func (l *lane) collect() {
	for e := l.finished.Swap(nil); e != nil; {
		next := e.next
		l.commit(e)
		e = next
	}
}

// finish is how a goroutine hands an entry back. The entry is not its any more.
func (l *lane) finish(e *entry) {
	for {
		e.next = l.finished.Load()
		if l.finished.CompareAndSwap(e.next, e) {
			break
		}
	}
	l.rouse()
}

// rouse ends the thread's sleep.
func (l *lane) rouse() {
	if l.asleep.Swap(false) {
		_, _ = unix.Write(l.wake, []byte{1, 0, 0, 0, 0, 0, 0, 0})
	}
}

// listen reads the eventfd.
func (l *lane) listen() {
	s := l.ring.next()
	s.opcode, s.fd, s.userData = ioRead, int32(l.wake), wakeUp
	s.addr, s.len = uint64(uintptr(unsafe.Pointer(l.woken))), uint32(len(l.woken))
}

// command prepares an entry's next command.
func (l *lane) command(e *entry, op uint64) {
	e.command = op
	s := l.ring.next()
	s.opcode, s.flags, s.cmdOp, s.userData = opURingCmd, sqeFixedFile, op, e.id
	s.cmd = cmdReq{commitID: e.head.ent.commitID, qid: e.qid}
	if op == cmdRegister {
		s.addr, s.len = uint64(uintptr(unsafe.Pointer(&e.iov))), uint32(len(e.iov))
	}
}

// commit prepares an entry's reply.
func (l *lane) commit(e *entry) {
	l.busy--
	e.held = false
	e.head.ent.payloadSize = uint32(e.size)
	l.copies += e.size
	e.touched, l.used = true, true
	l.command(e, cmdCommitAndFetch)
}

// completed takes a completion: a request, or the end of an entry.
func (l *lane) completed(userData uint64, res int32) {
	if userData == wakeUp {
		l.listen()
		return
	}
	e := &l.entries[userData]
	switch errno := unix.Errno(-res); {
	case res >= 0:
		l.busy++
		e.held = true
		l.request(e)
	case errno == unix.EINTR || errno == unix.EAGAIN:
		l.command(e, e.command)
	default:
		l.live--
		if errno != unix.ENOTCONN && errno != unix.ECONNABORTED && errno != unix.ECANCELED {
			if e.command == cmdRegister {
				l.s.refused(errno)
			} else {
				l.s.log.Printf("fuseio: an entry of queue %d is lost: %v", e.qid, errno)
			}
		}
	}
}

// request answers at once if that is possible, and otherwise by a goroutine.
func (l *lane) request(e *entry) {
	request, h := bytesOf(&e.request), (*fuse.InHeader)(unsafe.Pointer(&e.request))
	copy(request, e.head.inOut[:inHeader])
	e.in[0] = request[:behind(h)]
	copy(e.in[0][inHeader:], e.head.opIn[:])
	if e.in[1] = e.payload[:min(int(e.head.ent.payloadSize), len(e.payload))]; h.Opcode == opIoctl {
		e.in[1] = bytes.Clone(e.in[1])
	}
	if l.s.o.Inline(h) && l.s.answerQuickly(h, e) {
		l.commit(e)
		return
	}
	l.handlers.Go(func() {
		n := l.s.handle(h, e.in[:], e.out[:])
		if n == 0 { // a ring cannot do without
			n = outHeader
			putHeader(e.out[0], n, 0, h.Unique)
		}
		e.size = n - outHeader
		l.finish(e)
	})
}

// answerQuickly lets Quick fill in the reply, if it can.
func (s *Server) answerQuickly(h *fuse.InHeader, e *entry) bool {
	data, done, status := s.quickly(h, e.in[1], e.payload)
	if status == WouldBlock {
		return false
	}
	if e.size = len(data); e.size > 0 && &data[0] != &e.payload[0] {
		copy(e.payload, data)
	}
	done()
	putHeader(e.out[0], outHeader+e.size, -int32(status), h.Unique)
	return true
}

// trim gives the payloads back that the kernel owns: it touches them only in io_uring_enter.
func (l *lane) trim() {
	l.used = l.busy > 0
	for i := range l.entries {
		e := &l.entries[i]
		if e.touched && !e.held {
			_ = unix.Madvise(e.payload, unix.MADV_DONTNEED)
			e.touched = false
		}
	}
}
