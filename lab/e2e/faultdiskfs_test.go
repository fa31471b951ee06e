package e2e

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	fusefs "github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// faultFS is the file system.
type faultFS struct {
	backing string
	cur     atomic.Pointer[faultsInForce]

	countMu  sync.Mutex
	counters faultStats

	// mu makes "is there room, write, what did it take" one step. Held only under a capacity.
	mu sync.Mutex
}

// mountFaultDisk mounts the folder backing at mountpoint.
func mountFaultDisk(backing, mountpoint string) (*faultFS, *fuse.Server, error) {
	d := &faultFS{backing: backing}
	d.cur.Store(&faultsInForce{ended: make(chan struct{})})
	loop, err := fusefs.NewLoopbackRoot(backing)
	if err != nil {
		return nil, nil, err
	}
	// A loopback's own root does not know that it is wrapped.
	data := loop.(*fusefs.LoopbackNode).RootData
	root := &faultNode{LoopbackNode: fusefs.LoopbackNode{RootData: data}, disk: d}
	data.RootNode = root
	second := time.Second
	server, err := fusefs.Mount(mountpoint, root, &fusefs.Options{
		AttrTimeout: &second, EntryTimeout: &second,
		MountOptions: fuse.MountOptions{
			FsName: backing, Name: "faultdisk", DirectMountStrict: os.Geteuid() == 0,
			// A background request that hangs takes one of these, and a rule for one folder must not
			// hold up the others'.
			MaxBackground: 4096, MaxWrite: 1 << 20,
		},
	})
	if err != nil {
		return nil, nil, err
	}
	return d, server, nil
}

// set puts settings in force; what hangs under the old ones goes on under the new ones.
func (d *faultFS) set(s faultSettings) error {
	for _, r := range s.Rules {
		if err := r.validate(); err != nil {
			return fmt.Errorf("faultdisk: %w", err)
		}
	}
	if s.Capacity > 0 {
		used, err := blocksBelow(d.backing)
		if err != nil {
			return fmt.Errorf("faultdisk: %w", err)
		}
		d.count(func(s *faultStats) { s.Used = used })
	}
	close(d.cur.Swap(&faultsInForce{s, make(chan struct{})}).ended)
	return nil
}

func (d *faultFS) stats() faultStats {
	d.countMu.Lock()
	defer d.countMu.Unlock()
	return d.counters
}

// count changes the counters.
func (d *faultFS) count(change func(s *faultStats)) {
	d.countMu.Lock()
	defer d.countMu.Unlock()
	change(&d.counters)
}

// blocksBelow returns how many bytes of blocks a folder takes.
func blocksBelow(dir string) (sum int64, err error) {
	err = filepath.WalkDir(dir, func(p string, _ fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) { // gone since it was listed
			return nil
		}
		sum += blocksAt(p)
		return err
	})
	return sum, err
}

// pass lets an operation through, late or not at all.
func (d *faultFS) pass(op faultOp, name string) syscall.Errno {
again:
	s := d.cur.Load()
	for _, r := range s.Rules {
		if !r.selects(op, name) {
			continue
		}
		if r.Delay > 0 {
			time.Sleep(r.Delay)
		}
		if r.Hang {
			// Not even an interrupt ends it: a task that waits for a disk is in state D.
			d.count(func(s *faultStats) { s.Hung++; s.Hanging++ })
			<-s.ended
			d.count(func(s *faultStats) { s.Hanging-- })
			goto again
		}
		if r.Errno != "" {
			d.count(func(s *faultStats) { s.Failed++ })
			return errnos[r.Errno]
		}
	}
	return 0
}

// grow lets an operation through that may take up to n bytes more of the backing file name, if there is room for them.
func (d *faultFS) grow(op faultOp, name string, n int64, run func() syscall.Errno) syscall.Errno {
	if errno := d.pass(op, name); errno != 0 {
		return errno
	}
	capacity := d.cur.Load().Capacity
	if capacity == 0 {
		return run()
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if n > 0 && d.stats().Used+n > capacity {
		d.count(func(s *faultStats) { s.Failed++ })
		return syscall.ENOSPC
	}
	before := d.blocksOf(name)
	errno := run()
	d.count(func(s *faultStats) { s.Used += d.blocksOf(name) - before })
	return errno
}

func (d *faultFS) blocksOf(name string) int64 { return blocksAt(filepath.Join(d.backing, name)) }

// blocksAt returns the bytes of blocks of a file or folder, 0 if it is gone.
func blocksAt(path string) int64 {
	var st unix.Stat_t
	_ = unix.Lstat(path, &st)
	return st.Blocks * 512
}

// faultNode is a file or folder. Everything that a rule can strike is overridden; the rest is the
// loopback's.
type faultNode struct {
	fusefs.LoopbackNode
	disk *faultFS
	last atomic.Pointer[string] // path when it was last opened, for what is unlinked and still open
}

// faultHandle is a loopback's open file that does not offer its descriptor: with passthrough the kernel
// would read and write without asking us.
type faultHandle struct{ *fusefs.LoopbackFile }

func (faultHandle) PassthroughFd() (int, bool) { return 0, false }

func ownHandle(f fusefs.FileHandle) fusefs.FileHandle {
	if file, ok := f.(*fusefs.LoopbackFile); ok {
		return faultHandle{file}
	}
	return f
}

func (n *faultNode) WrapChild(_ context.Context, ops fusefs.InodeEmbedder) fusefs.InodeEmbedder {
	return &faultNode{LoopbackNode: fusefs.LoopbackNode{RootData: ops.(*fusefs.LoopbackNode).RootData}, disk: n.disk}
}

func (n *faultNode) name() string {
	if _, parent := n.Parent(); parent == nil && !n.IsRoot() {
		if p := n.last.Load(); p != nil {
			return *p
		}
	}
	return n.Path(nil)
}

func (n *faultNode) child(name string) string { return path.Join(n.name(), name) }

// Lookup and the methods below implement the interfaces of package fs of the same names.
func (n *faultNode) Lookup(ctx context.Context, name string, out *fuse.EntryOut) (*fusefs.Inode, syscall.Errno) {
	if errno := n.disk.pass(faultLook, n.child(name)); errno != 0 {
		return nil, errno
	}
	return n.LoopbackNode.Lookup(ctx, name, out)
}

func (n *faultNode) Getattr(ctx context.Context, f fusefs.FileHandle, out *fuse.AttrOut) syscall.Errno {
	if errno := n.disk.pass(faultLook, n.name()); errno != 0 {
		return errno
	}
	return n.LoopbackNode.Getattr(ctx, f, out)
}

func (n *faultNode) Open(ctx context.Context, flags uint32) (fusefs.FileHandle, uint32, syscall.Errno) {
	name := n.name()
	if errno := n.disk.pass(faultLook, name); errno != 0 {
		return nil, 0, errno
	}
	n.last.Store(&name)
	f, fuseFlags, errno := n.LoopbackNode.Open(ctx, flags)
	return ownHandle(f), fuseFlags, errno
}

func (n *faultNode) OpendirHandle(ctx context.Context, flags uint32) (fusefs.FileHandle, uint32, syscall.Errno) {
	if errno := n.disk.pass(faultLook, n.name()); errno != 0 {
		return nil, 0, errno
	}
	return n.LoopbackNode.OpendirHandle(ctx, flags)
}

func (n *faultNode) Statfs(ctx context.Context, out *fuse.StatfsOut) syscall.Errno {
	if errno := n.disk.pass(faultLook, n.name()); errno != 0 {
		return errno
	}
	errno := n.LoopbackNode.Statfs(ctx, out)
	if capacity := n.disk.cur.Load().Capacity; errno == 0 && capacity > 0 && out.Bsize > 0 {
		size := uint64(out.Bsize)
		out.Blocks = uint64(capacity) / size
		out.Bfree = uint64(max(capacity-n.disk.stats().Used, 0)) / size
		out.Bavail = out.Bfree
	}
	return errno
}

func (n *faultNode) Setattr(ctx context.Context, f fusefs.FileHandle, in *fuse.SetAttrIn,
	out *fuse.AttrOut) syscall.Errno {
	op := faultLook // times and modes are no change of what is stored
	if _, ok := in.GetSize(); ok {
		op = faultMake
	}
	return n.disk.grow(op, n.name(), 0, func() syscall.Errno { return n.LoopbackNode.Setattr(ctx, f, in, out) })
}

func (n *faultNode) Create(ctx context.Context, name string, flags, mode uint32, out *fuse.EntryOut) (
	child *fusefs.Inode, f fusefs.FileHandle, fuseFlags uint32, errno syscall.Errno) {
	p := n.child(name)
	errno = n.disk.grow(faultMake, p, 1, func() (errno syscall.Errno) { // a full disk has no room for a name
		child, f, fuseFlags, errno = n.LoopbackNode.Create(ctx, name, flags, mode, out)
		return errno
	})
	if errno == 0 {
		child.Operations().(*faultNode).last.Store(&p)
	}
	return child, ownHandle(f), fuseFlags, errno
}

func (n *faultNode) Mkdir(ctx context.Context, name string, mode uint32, out *fuse.EntryOut) (
	child *fusefs.Inode, errno syscall.Errno) {
	errno = n.disk.grow(faultMake, n.child(name), 1, func() (errno syscall.Errno) {
		child, errno = n.LoopbackNode.Mkdir(ctx, name, mode, out)
		return errno
	})
	return child, errno
}

func (n *faultNode) Unlink(ctx context.Context, name string) syscall.Errno {
	return n.disk.grow(faultMake, n.child(name), 0, func() syscall.Errno { return n.LoopbackNode.Unlink(ctx, name) })
}

func (n *faultNode) Rmdir(ctx context.Context, name string) syscall.Errno {
	return n.disk.grow(faultMake, n.child(name), 0, func() syscall.Errno { return n.LoopbackNode.Rmdir(ctx, name) })
}

func (n *faultNode) Rename(ctx context.Context, name string, to fusefs.InodeEmbedder, newName string,
	flags uint32) syscall.Errno {
	if errno := n.disk.pass(faultMake, n.child(name)); errno != 0 {
		return errno
	}
	// What the name stood for before gives its blocks back.
	moved := n.disk.blocksOf(n.child(name))
	return n.disk.grow(faultMake, to.(*faultNode).child(newName), 0, func() syscall.Errno {
		errno := n.LoopbackNode.Rename(ctx, name, to, newName, flags)
		if errno == 0 && n.disk.cur.Load().Capacity > 0 {
			n.disk.count(func(s *faultStats) { s.Used -= moved }) // counted at the old name already
		}
		return errno
	})
}

func (n *faultNode) Read(ctx context.Context, f fusefs.FileHandle, dest []byte, off int64) (
	fuse.ReadResult, syscall.Errno) {
	if errno := n.disk.pass(faultRead, n.name()); errno != 0 {
		return nil, errno
	}
	return f.(fusefs.FileReader).Read(ctx, dest, off)
}

func (n *faultNode) Write(ctx context.Context, f fusefs.FileHandle, data []byte,
	off int64) (written uint32, errno syscall.Errno) {
	return n.write(int64(len(data)), func() (uint32, syscall.Errno) {
		return f.(fusefs.FileWriter).Write(ctx, data, off)
	})
}

func (n *faultNode) Writev(ctx context.Context, f fusefs.FileHandle, data [][]byte,
	off int64) (written uint32, errno syscall.Errno) {
	var size int64
	for _, b := range data {
		size += int64(len(b))
	}
	return n.write(size, func() (uint32, syscall.Errno) { return f.(fusefs.FileWritever).Writev(ctx, data, off) })
}

func (n *faultNode) write(size int64, run func() (uint32, syscall.Errno)) (written uint32, errno syscall.Errno) {
	errno = n.disk.grow(faultWrite, n.name(), size, func() (errno syscall.Errno) {
		written, errno = run()
		return errno
	})
	return written, errno
}

func (n *faultNode) Allocate(ctx context.Context, f fusefs.FileHandle, off, size uint64, mode uint32) syscall.Errno {
	need := int64(size)
	if mode&unix.FALLOC_FL_PUNCH_HOLE != 0 {
		need = 0
	}
	return n.disk.grow(faultWrite, n.name(), need, func() syscall.Errno {
		return f.(fusefs.FileAllocater).Allocate(ctx, off, size, mode)
	})
}

func (n *faultNode) CopyFileRange(ctx context.Context, in fusefs.FileHandle, offIn uint64, out *fusefs.Inode,
	fout fusefs.FileHandle, offOut, size, flags uint64) (uint32, syscall.Errno) {
	// The caller falls back to reading and writing.
	return 0, syscall.ENOSYS
}

func (n *faultNode) Fsync(ctx context.Context, f fusefs.FileHandle, flags uint32) syscall.Errno {
	if errno := n.disk.pass(faultSync, n.name()); errno != 0 {
		return errno
	}
	return f.(fusefs.FileFsyncer).Fsync(ctx, flags)
}

func (n *faultNode) Flush(ctx context.Context, f fusefs.FileHandle) syscall.Errno {
	if errno := n.disk.pass(faultSync, n.name()); errno != 0 {
		return errno
	}
	return f.(fusefs.FileFlusher).Flush(ctx)
}
