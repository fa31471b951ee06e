package fusefs

import (
	"errors"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/shoalfs/shoal/cache/catalog"
)

// passthrough hands local files to the kernel, which then reads them itself. OPEN and RELEASE still arrive.
//
// All simultaneous opens of a node must be passed through, to the same backing file, or none: the kernel fails an
// open that contradicts another (EIO). So the first open decides, and the others follow until the last release. The
// kernel decrements its count before RELEASE arrives, so ours is never smaller.
//
// A file rewritten in place while open shows the new content: this process is not involved any more.
type passthrough struct {
	backer Backer
	log    *slog.Logger
	device backingDevice
	off    atomic.Bool // not available here
	shards [64]backingShard
}

// backingDevice is the part of [fuse.Server] for backing files.
type backingDevice interface {
	RegisterBackingFd(m *fuse.BackingMap) (int32, syscall.Errno)
	UnregisterBackingFd(id int32) syscall.Errno
}

// backingShard is a part of the open nodes. Opening a file may wait for a disk, so with a single lock every open
// would wait for it.
type backingShard struct {
	mu    sync.Mutex
	nodes map[nodeID]*backing
}

type backing struct {
	id    int32 // the kernel's; 0: not passed through
	opens int
}

func newPassthrough(b Backer, log *slog.Logger) *passthrough {
	p := &passthrough{backer: b, log: log}
	for i := range p.shards {
		p.shards[i].nodes = map[nodeID]*backing{}
	}
	return p
}

func (p *passthrough) shard(node nodeID) *backingShard {
	return &p.shards[node.index()%len(p.shards)]
}

// open fills in the reply to an OPEN and reports whether the file is passed through. Every successful open needs a
// release.
func (p *passthrough) open(node nodeID, m *catalog.Manifest, file int, out *fuse.OpenOut) (passed bool, errno syscall.Errno) {
	s := p.shard(node)
	s.mu.Lock()
	defer s.mu.Unlock()
	b := s.nodes[node]
	if b == nil {
		id, errno := p.register(m, file)
		if errno != 0 {
			return false, errno
		}
		b = &backing{id: id}
		s.nodes[node] = b
	}
	b.opens++
	if b.id == 0 {
		return false, 0
	}
	// The only other flag allowed here is FOPEN_DIRECT_IO, which is not wanted.
	out.OpenFlags = fuse.FOPEN_PASSTHROUGH | fuse.FOPEN_NOFLUSH
	out.BackingID = b.id
	return true, 0
}

// register registers the local file with the kernel. It returns 0 if the file must be served as any other.
func (p *passthrough) register(m *catalog.Manifest, file int) (id int32, errno syscall.Errno) {
	if p.off.Load() {
		return 0, 0
	}
	f, ok := p.backer.BackingFile(m, file)
	if !ok {
		return 0, 0
	}
	defer f.Close() // the kernel has its own reference
	if !unchanged(f, m, file) {
		return 0, syscall.ESTALE
	}
	id, errno = p.device.RegisterBackingFd(&fuse.BackingMap{Fd: int32(f.Fd())})
	switch {
	case errno == 0:
		return id, 0
	case errors.Is(errno, syscall.ELOOP):
		// The file system is itself stacked on others, as overlayfs; other files may be elsewhere.
	case p.off.CompareAndSwap(false, true):
		// EPERM: no CAP_SYS_ADMIN. EOPNOTSUPP, ENOTTY, EINVAL: a kernel before 6.9, or one built without.
		p.log.Info("local files are read by this process, not by the kernel itself", "cause", errno)
	}
	return 0, 0
}

// unchanged compares a local file with its size and time in the manifest.
func unchanged(f *os.File, m *catalog.Manifest, file int) bool {
	fi, err := f.Stat()
	if err != nil || !fi.Mode().IsRegular() || fi.Size() != m.Size(file) {
		return false
	}
	listed := m.ModTime(file)
	return listed.IsZero() || fi.ModTime().Equal(listed)
}

// release ends one open.
func (p *passthrough) release(node nodeID) {
	s := p.shard(node)
	s.mu.Lock()
	defer s.mu.Unlock()
	b := s.nodes[node]
	if b == nil {
		return
	}
	if b.opens--; b.opens > 0 {
		return
	}
	delete(s.nodes, node)
	if b.id != 0 {
		if errno := p.device.UnregisterBackingFd(b.id); errno != 0 {
			p.log.Warn("the kernel did not release a backing file", "id", b.id, "cause", errno)
		}
	}
}
