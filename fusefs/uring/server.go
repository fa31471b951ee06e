package uring

import (
	"cmp"
	"errors"
	"fmt"
	"log"
	"maps"
	"os"
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
	// farDepth is the depth of a queue whose CPU this process cannot use.
	farDepth = 8
)

// Options of a server.
type Options struct {
	// Quick answers requests on the thread of a ring. It must not wait: it returns WouldBlock instead, without any
	// effect, and the request is made to the file system. nil: every request gets a goroutine.
	Quick fuse.RawFileSystem
	// Inline reports whether a request is worth asking Quick.
	Inline func(h *fuse.InHeader) bool
	// Depth is how many requests of a CPU can be in flight.
	Depth int
	// Memory bounds the sum of payloads, in bytes of address space, at the cost of depth; 0: 512 MiB.
	Memory int
}

// Server is a mount.
type Server struct {
	o     Options
	fs    fuse.RawFileSystem
	main  *fuse.ProtocolServer
	quick *fuse.ProtocolServer
	log   *log.Logger

	file    *os.File // /dev/fuse
	conn    syscall.RawConn
	payload int
	buffers sync.Pool // for requests of /dev/fuse

	lanes  []*lane
	begun  chan struct{} // closed when the lanes may go on, if they are of use
	use    bool
	wg     sync.WaitGroup // lanes and handlers
	rings  bool           // the kernel has agreed to them
	failed atomic.Bool    // and refused them after all
	gone   chan struct{}

	mu     sync.Mutex
	flight map[uint64]struct{} // requests with goroutines
}

// New mounts fs at the folder dir with options like those of fuse.NewServer, and answers the first request. Its error
// wraps ErrUnavailable if rings are not possible here; then nothing is mounted.
func New(fs fuse.RawFileSystem, dir string, mo *fuse.MountOptions, o Options) (*Server, error) {
	o.Memory = cmp.Or(o.Memory, defaultMemory)
	options := *mo
	options.Logger = cmp.Or(options.Logger, log.Default())
	options.MaxWrite = min(options.MaxWrite, maxWrite())
	options.ExtraCapabilities |= fuse.CAP_OVER_IO_URING
	s := &Server{
		o: o, fs: fs, log: options.Logger, payload: pages(max(options.MaxWrite, minReadBuffer)),
		main: fuse.NewProtocolServer(fs, &options), begun: make(chan struct{}), gone: make(chan struct{}), flight: map[uint64]struct{}{},
	}
	if o.Quick != nil && !options.Debug { // which would log what Quick declines twice
		s.quick = fuse.NewProtocolServer(o.Quick, &options)
	}
	s.buffers.New = func() any { b := make([]byte, s.payload+writeHeader); return &b }
	if err := Available(); err != nil {
		return nil, err
	}
	if err := s.openLanes(); err != nil {
		s.beginLanes(false)
		return nil, fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	fd, err := Mount(dir, &options)
	if err == nil {
		s.file = os.NewFile(uintptr(fd), "/dev/fuse")
		s.conn, err = s.file.SyscallConn()
	}
	if err != nil {
		s.beginLanes(false)
		return nil, err
	}
	if err := s.init(); err != nil {
		s.beginLanes(false)
		_ = s.file.Close() // which ends the mount
		_ = unix.Unmount(dir, unix.MNT_DETACH)
		return nil, fmt.Errorf("the first request: %w", err)
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

// endLanes waits for the lanes.
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
	buf := make([]byte, minReadBuffer)
	n, err := s.read(buf)
	if err != nil {
		return err
	}
	in := (*fuse.InitIn)(unsafe.Pointer(&buf[0]))
	request := [][]byte{buf[:n]}
	reply := make([]byte, minReadBuffer)
	if s.quick != nil { // it needs to know, too
		s.quick.HandleRequest(request, [][]byte{reply})
	}
	n, _ = s.main.HandleRequest(request, [][]byte{reply})
	if n < outHeader {
		return syscall.EIO
	}
	s.rings = in.Flags64()&fuse.CAP_OVER_IO_URING != 0
	if status := (*fuse.OutHeader)(unsafe.Pointer(&reply[0])).Status; status != 0 {
		return syscall.Errno(-status)
	}
	return s.write(reply[:n])
}

// Serve answers until the mount is gone, and all has ended.
func (s *Server) Serve() {
	s.beginLanes(s.rings)
	s.serveDevice()
	close(s.gone)
	s.interruptAll()
	for _, l := range s.lanes {
		l.quit.Store(true)
		l.rouse()
	}
	s.endLanes()
	_ = s.file.Close()
	s.fs.OnUnmount()
}

// serveDevice answers what comes by /dev/fuse.
func (s *Server) serveDevice() {
	buf := make([]byte, s.payload+writeHeader)
	for {
		n, err := s.read(buf)
		switch {
		case err == syscall.ENODEV: //nolint:errorlint // the plain number
			return
		case err == syscall.ENOENT || err == syscall.EAGAIN: //nolint:errorlint // the plain number
			continue // the request was interrupted
		case err != nil:
			s.log.Printf("uring: read /dev/fuse: %v", err)
			return
		case n < inHeader:
			s.log.Printf("uring: a request of %d bytes", n)
			continue
		}
		h := (*fuse.InHeader)(unsafe.Pointer(&buf[0]))
		switch h.Opcode {
		case opForget, opBatchForget:
			s.main.HandleRequest([][]byte{buf[:n]}, nil)
		case opInterrupt:
			s.interrupt(append([]byte(nil), buf[:n]...))
		default:
			request, unique := append([]byte(nil), buf[:n]...), h.Unique
			s.begin(unique)
			s.wg.Go(func() {
				defer s.end(unique)
				s.answer(request)
			})
		}
	}
}

// answer answers a request of /dev/fuse there.
func (s *Server) answer(request []byte) {
	b := s.buffers.Get().(*[]byte)
	defer s.buffers.Put(b)
	n, status := s.main.HandleRequest([][]byte{request}, [][]byte{*b})
	if n == 0 && status != fuse.OK {
		n = outHeader
		putHeader(*b, n, -int32(status), (*fuse.InHeader)(unsafe.Pointer(&request[0])).Unique)
	}
	if n == 0 {
		return
	}
	if err := s.write((*b)[:n]); err != nil && err != syscall.ENOENT && err != syscall.ENODEV { //nolint:errorlint // the plain number
		s.log.Printf("uring: write /dev/fuse: %v", err)
	}
}

// interrupt passes an INTERRUPT on.
func (s *Server) interrupt(request []byte) {
	var reply [64]byte
	n, _ := s.main.HandleRequest([][]byte{request}, [][]byte{reply[:]})
	if n == 0 {
		return
	}
	// EAGAIN: it is not in flight. The kernel repeats the INTERRUPT if it knows the request at /dev/fuse.
	if err := s.write(reply[:n]); err != syscall.ENOENT { //nolint:errorlint // the plain number
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

// interruptAll ends what is in flight when the mount is gone.
func (s *Server) interruptAll() {
	for wait := time.Millisecond; ; wait = min(2*wait, 100*time.Millisecond) {
		s.mu.Lock()
		all := slices.Collect(maps.Keys(s.flight))
		s.mu.Unlock()
		if len(all) == 0 {
			return
		}
		for _, unique := range all {
			in := fuse.InterruptIn{Unique: unique}
			in.Opcode, in.InHeader.Unique, in.Length = opInterrupt, unique|1, uint32(unsafe.Sizeof(in))
			var reply [64]byte
			s.main.HandleRequest([][]byte{bytesOf(&in)}, [][]byte{reply[:]})
		}
		time.Sleep(wait)
	}
}

func (s *Server) begin(unique uint64) {
	s.mu.Lock()
	s.flight[unique] = struct{}{}
	s.mu.Unlock()
}

func (s *Server) end(unique uint64) {
	s.mu.Lock()
	delete(s.flight, unique)
	s.mu.Unlock()
}

// refused says that the kernel did not take an entry. From then on it sends everything by /dev/fuse.
func (s *Server) refused(err error) {
	if !s.failed.Swap(true) {
		s.log.Printf("uring: the kernel refuses the rings, so /dev/fuse serves: %v", err)
	}
}

// Stats describes a server.
type Stats struct {
	Rings   bool // requests come by rings
	Lanes   int  // threads
	Entries int
	Memory  int // address space of the payloads
}

// Stats returns the state of the server.
func (s *Server) Stats() (t Stats) {
	t.Rings, t.Lanes = s.rings && !s.failed.Load(), len(s.lanes)
	for _, l := range s.lanes {
		t.Entries += len(l.entries)
		t.Memory += len(l.entries) * l.stride
	}
	return t
}

// read reads one request of /dev/fuse.
func (s *Server) read(buf []byte) (n int, err error) {
	for {
		if s.conn.Control(func(fd uintptr) { n, err = syscall.Read(int(fd), buf) }) != nil {
			return 0, syscall.ENODEV
		}
		if err != syscall.EINTR { //nolint:errorlint // the plain number
			return n, err
		}
	}
}

// write writes one message to /dev/fuse.
func (s *Server) write(msg []byte) (err error) {
	if s.conn.Control(func(fd uintptr) { _, err = syscall.Write(int(fd), msg) }) != nil {
		return syscall.ENODEV
	}
	return err
}

// descriptor returns /dev/fuse for a ring to register, which is done before it can be closed.
func (s *Server) descriptor() (n int) {
	_ = s.conn.Control(func(fd uintptr) { n = int(fd) })
	return n
}

// pages rounds up to whole pages.
func pages(n int) int {
	size := os.Getpagesize()
	return (n + size - 1) / size * size
}
