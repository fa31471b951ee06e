package fusefs

import (
	"errors"
	"fmt"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/fusefs/uring"
)

// Values of [Options].Transport.
const (
	TransportAuto  = "auto"  // rings, if they are possible and pay for this dataset
	TransportURing = "uring" // rings, or Mount fails
	TransportDev   = "dev"   // read(2) and write(2) of /dev/fuse
)

// maxRingFile is the mean size of files above which auto keeps to /dev/fuse. A ring saves system calls and wake-ups, and copies
// the bytes once more: READs of 512 KiB have few of the former and many of the latter.
const maxRingFile = 1 << 20

// spareEntries are for requests that the kernel waits for while reads ahead, which MaxBackground bounds, have the others: the reads
// of one CPU that wait for the store should not delay its names.
const spareEntries = 16

// transport is how requests come from the kernel: a [fuse.Server] or a [uring.Server].
type transport interface {
	Serve()
	EntryNotify(parent uint64, name string) fuse.Status
	InodeNotify(node uint64, off, length int64) fuse.Status
}

// Transport describes how requests come from the kernel.
type Transport struct {
	Name    string `json:"name"`              // "uring" or "dev"
	Why     string `json:"why,omitempty"`     // "dev" was chosen, or fallen back to
	Threads int    `json:"threads,omitempty"` // of rings
	Entries int    `json:"entries,omitempty"` // requests that can be in flight
	Buffers int    `json:"buffers,omitempty"` // bytes of address space for them
}

// String describes it in a line of the stats.
func (t Transport) String() string {
	switch {
	case t.Name == TransportURing:
		return fmt.Sprintf("io_uring: %d threads, %d requests in flight at most, buffers of %d MiB", t.Threads, t.Entries, t.Buffers>>20)
	case t.Why != "":
		return "/dev/fuse: " + t.Why
	}
	return "/dev/fuse"
}

// Transport returns how requests come from the kernel now.
func (s *Server) Transport() Transport {
	rings, ok := s.transport.(*uring.Server)
	if !ok {
		return Transport{Name: TransportDev, Why: s.why}
	}
	t := rings.Stats()
	if !t.Rings {
		return Transport{Name: TransportDev, Why: "the kernel refused the rings"}
	}
	return Transport{Name: TransportURing, Threads: t.Lanes, Entries: t.Entries, Buffers: t.Memory}
}

// attach mounts f at path with the transport that o asks for. why tells why auto did not choose rings.
func attach(f *filesystem, path string, mo *fuse.MountOptions, o Options, m *catalog.Manifest) (t transport, why string, err error) {
	switch {
	case f.kept != nil:
		mo.MaxWrite = f.kept.MaxWrite
		t, _, err = serveOpen(f, int(f.kept.fuse.Fd()), f.kept.First, mo)
		return t, "", err
	case o.Transport == TransportURing:
	case o.Transport == TransportDev:
		t, err = serveDevice(f, path, mo)
		return t, "", err
	default:
		if mean := m.Bytes() / int64(max(m.Len(), 1)); mean > maxRingFile {
			t, err = serveDevice(f, path, mo)
			return t, fmt.Sprintf("files have %d KiB on average", mean>>10), err
		}
	}
	rings, err := uring.New(f, path, mo, uring.Options{Quick: quick{f}, Inline: inline, Depth: o.MaxBackground + spareEntries, Memory: o.RingMemory})
	switch {
	case err == nil:
		return rings, "", nil
	case !errors.Is(err, uring.ErrUnavailable):
		return nil, "", err
	case o.Transport == TransportURing:
		return nil, "", fmt.Errorf("--fuse-transport uring: %w (or use auto)", err)
	}
	why = err.Error()
	t, err = serveDevice(f, path, mo)
	return t, why, err
}

// Opcodes of <linux/fuse.h>.
const (
	opLookup     = 1
	opGetAttr    = 3
	opOpen       = 14
	opRead       = 15
	opStatFS     = 17
	opRelease    = 18
	opFlush      = 25
	opOpenDir    = 27
	opReleaseDir = 29
	opAccess     = 34
	opIoctl      = 39
)

// inline reports whether a request may be answered on a ring's thread: it is for the dataset, and for nothing that walks or waits.
// All of .shoal may wait.
func inline(h *fuse.InHeader) bool {
	switch h.Opcode {
	case opRead, opOpen, opRelease, opLookup, opGetAttr, opStatFS, opFlush, opOpenDir, opReleaseDir, opAccess, opIoctl:
		return nodeID(h.NodeId).kind() != kindControl
	}
	return false
}

// quick is a filesystem that never waits. It answers [uring.WouldBlock] instead.
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
		return nil, uring.WouldBlock
	}
	if r := q.lend(g.manifest, file, in, len(buf)); r != nil {
		return r, fuse.OK
	}
	if !q.volume.ReadNow(g.manifest, file, buf, int64(in.Offset)) {
		return nil, uring.WouldBlock
	}
	q.wasRead(g.manifest, file, in, len(buf))
	return fuse.ReadResultData(buf), fuse.OK
}
