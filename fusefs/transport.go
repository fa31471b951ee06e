package fusefs

import (
	"errors"
	"fmt"
	"os"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/shoalfs/shoal/fusefs/fuseio"
)

// Values of [Options].Transport.
const (
	TransportAuto  = "auto"  // rings, if they are possible and pay for this dataset
	TransportURing = "uring" // rings, or Mount fails
	TransportDev   = "dev"   // read(2) and write(2) of /dev/fuse
)

// maxRingFile is the mean size of files above which auto keeps to /dev/fuse. A ring saves system calls and wake-ups,
// and copies the bytes once more: READs of 512 KiB have few of the former and many of the latter.
const maxRingFile = 1 << 20

// spareEntries are for requests that the kernel waits for while reads ahead, which MaxBackground bounds, have the
// others: the reads of one CPU that wait for the store should not delay its names.
const spareEntries = 16

// Transport describes how requests come from the kernel.
type Transport struct {
	fuseio.Rings        // none: /dev/fuse
	Why          string // that was chosen, or fallen back to
}

// String describes it in a line of the stats.
func (t Transport) String() string {
	switch {
	case t.Threads > 0:
		return fmt.Sprintf("io_uring: %d threads, %d requests in flight at most, buffers of %d MiB",
			t.Threads, t.Entries, t.Buffers>>20)
	case t.Why != "":
		return "/dev/fuse: " + t.Why
	}
	return "/dev/fuse"
}

// Transport returns how requests come from the kernel now.
func (s *Server) Transport() Transport {
	rings, err := s.transport.Rings()
	if err != nil {
		return Transport{Why: "the kernel refused the rings"}
	}
	return Transport{rings, s.why}
}

// attach mounts f at path, unless it has a mount, with the transport that its options ask for. why tells why auto did
// not choose rings.
func attach(f *filesystem, path string, mo *fuse.MountOptions) (
	t *fuseio.Server, device *os.File, why string, err error) {
	o, m := f.opts, f.volume.Manifest()
	inline := func(h *fuse.InHeader) bool { return nodeID(h.NodeId).kind() != kindControl } // all of .shoal may wait
	dev := fuseio.Options{Quick: quick{f}, Inline: inline}
	if k := f.kept; k != nil {
		mo.MaxWrite = k.MaxWrite
		t, err = fuseio.New(f, k.fuse, k.First, mo, dev)
		return t, k.fuse, "", err
	}
	rings := dev
	rings.Depth, rings.Memory = o.MaxBackground+spareEntries, o.RingMemory
	mean := m.Bytes() / int64(max(m.Len(), 1))
	switch {
	case o.Transport == TransportURing:
		err = fuseio.Available()
	case o.Transport == TransportDev:
		rings.Depth = 0
	case mean > maxRingFile:
		rings.Depth, why = 0, fmt.Sprintf("files have %d KiB on average", mean>>10)
	}
	var fd int
	if err == nil {
		fd, err = fuseio.Mount(path, mo)
	}
	if err == nil {
		device = os.NewFile(uintptr(fd), "/dev/fuse")
		t, err = fuseio.New(f, device, nil, mo, rings)
		if errors.Is(err, fuseio.ErrUnavailable) && o.Transport != TransportURing {
			why = err.Error()
			t, err = fuseio.New(f, device, nil, mo, dev)
		}
		if err != nil {
			err = errors.Join(err, device.Close(), unmount(path, true))
		}
	}
	switch {
	case errors.Is(err, fuseio.ErrUnavailable):
		err = fmt.Errorf("--fuse-transport uring: %w (or use auto)", err)
	case err == nil && !t.Agreed(fuse.CAP_OVER_IO_URING):
		f.keepable(path, device, t, mo)
	}
	return t, device, why, err
}

// quick is a filesystem that never waits. It answers [fuseio.WouldBlock] instead.
type quick struct{ *filesystem }

func (q quick) Read(_ <-chan struct{}, in *fuse.ReadIn, buf []byte) (fuse.ReadResult, fuse.Status) {
	g, k, file := q.resolve(nodeID(in.NodeId))
	if k != kindFile {
		return nil, fuse.Status(syscall.ESTALE)
	}
	buf = wanted(g.manifest, file, in, buf)
	if len(buf) == 0 {
		return fuse.ReadResultData(nil), fuse.OK
	}
	if q.recording() {
		return nil, fuseio.WouldBlock
	}
	if p := q.pagesOf(g.manifest); p != nil {
		p.asked(file)
	}
	if data, release, ok := q.volume.Lend(g.manifest, file, int64(in.Offset), len(buf)); ok {
		q.volume.WasRead(g.manifest, file, int64(in.Offset), int64(len(data)), in.Pid)
		return &lent{data, release}, fuse.OK
	}
	if !q.volume.ReadNow(g.manifest, file, buf, int64(in.Offset)) {
		return nil, fuseio.WouldBlock
	}
	q.volume.WasRead(g.manifest, file, int64(in.Offset), int64(len(buf)), in.Pid)
	return fuse.ReadResultData(buf), fuse.OK
}

// lent is a [fuse.ReadResult] in memory that is written from where it is.
type lent struct {
	data    []byte
	release func()
}

func (l *lent) Size() int { return len(l.data) }

func (l *lent) Bytes([]byte) ([]byte, fuse.Status) { return l.data, fuse.OK }

func (l *lent) Done() { l.release() }
