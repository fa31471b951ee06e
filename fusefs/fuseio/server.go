package fuseio

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"log"
	"maps"
	"math/bits"
	"os"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// WouldBlock is what Options.Quick answers if it would have to wait.
const WouldBlock = fuse.EAGAIN

const (
	defaultMemory = 512 << 20
	minDepth      = 8
	farDepth      = 8 // of a queue whose CPU this process cannot use
)

// Options of a server.
type Options struct {
	// Quick answers those requests for which Inline is true that quick.go knows. It must not wait: it returns
	// WouldBlock instead, without any effect, and the request is made to the file system. nil: all are.
	Quick  fuse.RawFileSystem
	Inline func(h *fuse.InHeader) bool
	Depth  int // how many requests of a CPU can be in flight by its ring; 0: no rings
	Memory int // bounds the sum of payloads, in bytes of address space, at the cost of depth; 0: 512 MiB
}

// Server is a mount.
type Server struct {
	o        Options
	fs       fuse.RawFileSystem
	main     *fuse.ProtocolServer
	log      *log.Logger
	panicked func(v any) fuse.Status

	device  *os.File // /dev/fuse, which stays open until Serve returns
	fd      int
	first   []byte // request, with what was agreed on
	payload int
	inputs  sync.Pool     // buffers for the largest request
	outputs [33]sync.Pool // and for payloads of replies, by the logarithm of their size
	waiting atomic.Int32  // readers of /dev/fuse

	lanes  []*lane
	begun  chan struct{} // closed when the lanes may go on, if they are of use
	use    bool
	wg     sync.WaitGroup // lanes and handlers
	rings  bool           // the kernel has agreed to them
	failed atomic.Bool    // and refused them after all
	gone   chan struct{}
	over   sync.Once // closes gone

	mu     sync.Mutex
	flight map[uint64]struct{} // requests that go-fuse answers
}

// New answers the first request of device, which Mount opened, with options like those of fuse.NewServer. If another
// process has answered it, first is what its First returned. The caller closes device after Serve. mo has a
// PanicHandler if o has Quick. An error that wraps ErrUnavailable says that rings are not possible here; then nothing
// was answered.
func New(fs fuse.RawFileSystem, device *os.File, first []byte, mo *fuse.MountOptions, o Options) (*Server, error) {
	o.Memory = cmp.Or(o.Memory, defaultMemory)
	options := *mo
	options.Logger = cmp.Or(options.Logger, log.Default())
	options.MaxWrite = min(options.MaxWrite, maxWrite())
	if o.Depth > 0 {
		options.ExtraCapabilities |= fuse.CAP_OVER_IO_URING
	}
	s := &Server{
		o: o, fs: fs, log: options.Logger, panicked: options.PanicHandler, first: first, device: device,
		fd: int(device.Fd()), payload: pages(max(mo.MaxWrite, minReadBuffer)),
		main: fuse.NewProtocolServer(fs, &options), begun: make(chan struct{}), gone: make(chan struct{}),
		flight: map[uint64]struct{}{},
	}
	if o.Quick == nil || options.Debug { // which logs what go-fuse decodes
		s.o.Inline = func(*fuse.InHeader) bool { return false }
	}
	var err error
	if o.Depth > 0 {
		if err = Available(); err == nil {
			if err = s.openLanes(); err != nil {
				err = fmt.Errorf("%w: %w", ErrUnavailable, err)
			}
		}
	}
	if err == nil {
		if err = s.init(); err != nil {
			err = fmt.Errorf("the first request: %w", err)
		}
	}
	if err != nil {
		s.beginLanes(false)
		return nil, err
	}
	return s, nil
}

// openLanes makes a ring for each CPU of this process.
func (s *Server) openLanes() error {
	cpus, err := possibleCPUs()
	if err != nil {
		return err
	}
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err != nil {
		return os.NewSyscallError("sched_getaffinity", err)
	}
	mine := map[int]*lane{}
	for cpu := range cpus {
		if set.IsSet(cpu) {
			l := &lane{s: s, cpu: cpu, stride: s.payload}
			s.lanes, mine[cpu] = append(s.lanes, l), l
		}
	}
	if len(s.lanes) == 0 {
		return errors.New("no CPU")
	}
	depth := min(s.o.Depth, max(minDepth, s.o.Memory/s.payload/cpus))
	for cpu := range cpus {
		l, n := mine[cpu], depth
		if l == nil {
			l, n = s.lanes[cpu%len(s.lanes)], min(depth, farDepth)
		}
		for range n {
			l.entries = append(l.entries, entry{qid: uint16(cpu)})
		}
	}
	made := make(chan error, len(s.lanes))
	for _, l := range s.lanes {
		s.wg.Go(func() { l.run(made) })
	}
	for range s.lanes {
		err = errors.Join(err, <-made)
	}
	return err
}

// beginLanes lets all lanes go on, or end.
func (s *Server) beginLanes(use bool) {
	s.use = use
	close(s.begun)
	if !use {
		s.endLanes()
	}
}

func (s *Server) endLanes() {
	s.wg.Wait()
	for _, l := range s.lanes {
		if l.wake > 0 {
			_ = unix.Close(l.wake)
			l.wake = 0
		}
	}
}

// init answers the first request, in which the kernel offers what it can do.
func (s *Server) init() error {
	isNew, buf := s.first == nil, make([]byte, minReadBuffer)
	n := copy(buf, s.first)
	if isNew {
		var err error
		if n, err = s.read(buf); err != nil {
			return err
		}
	}
	s.first = buf[:n]
	in := (*fuse.InitIn)(unsafe.Pointer(&s.first[0]))
	reply := make([]byte, minReadBuffer)
	n, _ = s.main.HandleRequest([][]byte{s.first}, [][]byte{reply})
	if n < outHeader+int(unsafe.Sizeof(fuse.InitOut{})) {
		return syscall.EPROTO
	}
	out := (*fuse.InitOut)(unsafe.Pointer(&reply[outHeader]))
	in.Flags, in.Flags2 = in.Flags&out.Flags, in.Flags2&out.Flags2
	s.rings = s.Agreed(fuse.CAP_OVER_IO_URING)
	if !isNew {
		return nil
	}
	return s.write(reply[:n])
}

// First returns the first request, for New in another process.
func (s *Server) First() []byte { return s.first }

// Agreed tells whether the kernel and this server have agreed on a capability.
func (s *Server) Agreed(capability uint64) bool {
	return (*fuse.InitIn)(unsafe.Pointer(&s.first[0])).Flags64()&capability != 0
}

// Serve answers until the mount is gone, and all has ended.
func (s *Server) Serve() {
	s.beginLanes(s.rings)
	s.wg.Go(s.serveDevice)
	<-s.gone
	for _, l := range s.lanes {
		l.quit.Store(true)
		l.rouse()
	}
	ended := make(chan struct{})
	go func() { s.endLanes(); close(ended) }()
	s.interruptAll(ended)
	s.fs.OnUnmount()
}

// serveDevice is a reader of /dev/fuse. If no other waits there when it has read a request, it starts one before it
// answers.
func (s *Server) serveDevice() {
	enough := int32(min(max(runtime.GOMAXPROCS(0), 2), 16))
	for others := s.waiting.Load(); others < enough; others = s.waiting.Load() {
		if !s.waiting.CompareAndSwap(others, others+1) {
			continue
		}
		buf := s.input()
		n, err := s.read(buf)
		last := s.waiting.Add(-1) == 0
		request := bytes.Clone(buf[:max(n, 0)]) // a handler that waits needs no large buffer
		s.inputs.Put(&buf)
		switch {
		case err == syscall.ENOENT || err == syscall.EAGAIN || err == syscall.EFAULT || err == syscall.ENOMEM: //nolint:errorlint
			continue // the request was interrupted, or has failed
		case err != nil || n < inHeader:
			if err != syscall.ENODEV { //nolint:errorlint // the plain number
				s.log.Printf("fuseio: read /dev/fuse: %d bytes, %v", n, err)
			}
			s.over.Do(func() { close(s.gone) })
			return
		}
		switch h := (*fuse.InHeader)(unsafe.Pointer(&request[0])); h.Opcode {
		case opForget, opBatchForget: // which do not wait
			s.main.HandleRequest([][]byte{request}, nil)
		default:
			if last {
				s.wg.Go(s.serveDevice)
			}
			s.answer(h, request)
		}
	}
}

func (s *Server) input() []byte {
	if buf, ok := s.inputs.Get().(*[]byte); ok {
		return *buf
	}
	buf := make([]byte, s.payload+writeHeader)
	buf[0] = 0 // the page has to be there: see doc.go
	return buf
}

// answer answers a request of /dev/fuse there.
func (s *Server) answer(h *fuse.InHeader, request []byte) {
	if h.Opcode == opInterrupt {
		s.interrupt(request)
		return
	}
	class := bits.Len(uint(payloadOf(h) - 1))
	pool := &s.outputs[class]
	payload, ok := pool.Get().(*[]byte)
	if !ok {
		b := make([]byte, 1<<class)
		payload = &b
	}
	defer pool.Put(payload)
	var head [outHeader]byte
	if s.o.Inline(h) {
		if data, done, status := s.quickly(h, request[behind(h):], *payload); status != WouldBlock {
			putHeader(head[:], outHeader+len(data), -int32(status), h.Unique)
			s.reply(head[:], data)
			done()
			return
		}
	}
	if n := s.handle(h, [][]byte{request}, [][]byte{head[:], *payload}); n > 0 {
		s.reply(head[:], (*payload)[:n-outHeader])
	}
}

// handle has go-fuse answer a request in out, whose first part is for the header. n is 0 if no reply is due.
func (s *Server) handle(h *fuse.InHeader, in, out [][]byte) (n int) {
	s.mu.Lock()
	s.flight[h.Unique] = struct{}{}
	s.mu.Unlock()
	n, status := s.main.HandleRequest(in, out)
	s.mu.Lock()
	delete(s.flight, h.Unique)
	s.mu.Unlock()
	if n == 0 && status != fuse.OK {
		n = outHeader
		putHeader(out[0], n, -int32(status), h.Unique)
	}
	return n
}

func (s *Server) reply(head, payload []byte) {
	if err := s.write(head, payload); err != nil && err != syscall.ENOENT && err != syscall.ENODEV { //nolint:errorlint
		s.log.Printf("fuseio: write /dev/fuse: %v", err)
	}
}

func (s *Server) interrupt(request []byte) {
	var reply [64]byte
	n, _ := s.main.HandleRequest([][]byte{request}, [][]byte{reply[:]})
	if n == 0 {
		return
	}
	// EAGAIN: it is not in flight. The kernel repeats the INTERRUPT if it knows the request at /dev/fuse.
	if err := s.write(reply[:n]); err != syscall.ENOENT || !s.rings { //nolint:errorlint // the plain number
		return
	}
	s.wg.Go(func() {
		for wait := time.Millisecond; n > 0 && wait < time.Second/4; wait *= 2 {
			select {
			case <-s.gone:
				return
			case <-time.After(wait):
			}
			n, _ = s.main.HandleRequest([][]byte{request}, [][]byte{reply[:]})
		}
	})
}

// interruptAll interrupts what is in flight, when the mount is gone, until all has ended.
func (s *Server) interruptAll(ended <-chan struct{}) {
	for wait := time.Millisecond; ; wait = min(2*wait, 100*time.Millisecond) {
		s.mu.Lock()
		all := slices.Collect(maps.Keys(s.flight))
		s.mu.Unlock()
		for _, unique := range all {
			in := fuse.InterruptIn{Unique: unique}
			in.Opcode, in.InHeader.Unique, in.Length = opInterrupt, unique|1, uint32(unsafe.Sizeof(in))
			var reply [64]byte
			s.main.HandleRequest([][]byte{bytesOf(&in)}, [][]byte{reply[:]})
		}
		select {
		case <-ended:
			return
		case <-time.After(wait):
		}
	}
}

// refused says that the kernel did not take an entry. From then on it sends everything by /dev/fuse.
func (s *Server) refused(err error) {
	if !s.failed.Swap(true) {
		s.log.Printf("fuseio: the kernel refuses the rings, so /dev/fuse serves: %v", err)
	}
}

// Rings describes the rings of a server, if it has any.
type Rings struct {
	Threads int
	Entries int // requests that can be in flight
	Buffers int // bytes of address space for them
}

// Rings fails if the kernel does not use them.
func (s *Server) Rings() (r Rings, err error) {
	if len(s.lanes) > 0 && (!s.rings || s.failed.Load()) {
		return r, ErrUnavailable
	}
	r.Threads = len(s.lanes)
	for _, l := range s.lanes {
		r.Entries += len(l.entries)
		r.Buffers += len(l.entries) * l.stride
	}
	return r, nil
}

func (s *Server) read(buf []byte) (n int, err error) {
	for {
		if n, err = syscall.Read(s.fd, buf); err != syscall.EINTR { //nolint:errorlint // the plain number
			return n, err
		}
	}
}

func (s *Server) write(msg ...[]byte) error {
	_, err := unix.Writev(s.fd, msg)
	return err
}

func pages(n int) int {
	size := os.Getpagesize()
	return (n + size - 1) / size * size
}
