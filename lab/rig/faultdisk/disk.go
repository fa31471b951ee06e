package faultdisk

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

// disk is the file system.
type disk struct {
	backing string
	cur     atomic.Pointer[settings]

	countMu  sync.Mutex
	counters Stats

	// mu makes "is there room, write, what did it take" one step. Held only under a capacity.
	mu sync.Mutex
}

// mountDisk mounts the folder backing at mountpoint.
func mountDisk(backing, mountpoint string) (*disk, *fuse.Server, error) {
	d := &disk{backing: backing}
	d.cur.Store(&settings{ended: make(chan struct{})})
	loop, err := fusefs.NewLoopbackRoot(backing)
	if err != nil {
		return nil, nil, err
	}
	// A loopback's own root does not know that it is wrapped.
	data := loop.(*fusefs.LoopbackNode).RootData
	root := &node{LoopbackNode: fusefs.LoopbackNode{RootData: data}, disk: d}
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
func (d *disk) set(s Settings) error {
	for _, r := range s.Rules {
		if err := r.validate(); err != nil {
			return fmt.Errorf("faultdisk: %w", err)
		}
	}
	if s.Capacity > 0 {
		used, err := blocks(d.backing)
		if err != nil {
			return fmt.Errorf("faultdisk: %w", err)
		}
		d.count(func(s *Stats) { s.Used = used })
	}
	close(d.cur.Swap(&settings{s, make(chan struct{})}).ended)
	return nil
}

func (d *disk) stats() Stats {
	d.countMu.Lock()
	defer d.countMu.Unlock()
	return d.counters
}

// count changes the counters.
func (d *disk) count(change func(s *Stats)) {
	d.countMu.Lock()
	defer d.countMu.Unlock()
	change(&d.counters)
}

// blocks returns how many bytes of blocks a folder takes.
func blocks(dir string) (sum int64, err error) {
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
func (d *disk) pass(op Op, name string) syscall.Errno {
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
			d.count(func(s *Stats) { s.Hung++; s.Hanging++ })
			<-s.ended
			d.count(func(s *Stats) { s.Hanging-- })
			goto again
		}
		if r.Errno != "" {
			d.count(func(s *Stats) { s.Failed++ })
			return errnos[r.Errno]
		}
	}
	return 0
}

// grow lets an operation through that may take up to n bytes more of the backing file name, if there is room for them.
func (d *disk) grow(op Op, name string, n int64, run func() syscall.Errno) syscall.Errno {
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
		d.count(func(s *Stats) { s.Failed++ })
		return syscall.ENOSPC
	}
	before := d.blocksOf(name)
	errno := run()
	d.count(func(s *Stats) { s.Used += d.blocksOf(name) - before })
	return errno
}

func (d *disk) blocksOf(name string) int64 { return blocksAt(filepath.Join(d.backing, name)) }

// blocksAt returns the bytes of blocks of a file or folder, 0 if it is gone.
func blocksAt(path string) int64 {
	var st unix.Stat_t
	_ = unix.Lstat(path, &st)
	return st.Blocks * 512
}

// node is a file or folder. Everything that a rule can strike is overridden; the rest is the
// loopback's.
type node struct {
	fusefs.LoopbackNode
	disk *disk
	last atomic.Pointer[string] // path when it was last opened, for what is unlinked and still open
}

// handle is a loopback's open file that does not offer its descriptor: with passthrough the kernel
// would read and write without asking us.
type handle struct{ *fusefs.LoopbackFile }

func (handle) PassthroughFd() (int, bool) { return 0, false }

func wrapped(f fusefs.FileHandle) fusefs.FileHandle {
	if file, ok := f.(*fusefs.LoopbackFile); ok {
		return handle{file}
	}
	return f
}

func (n *node) WrapChild(_ context.Context, ops fusefs.InodeEmbedder) fusefs.InodeEmbedder {
	return &node{LoopbackNode: fusefs.LoopbackNode{RootData: ops.(*fusefs.LoopbackNode).RootData}, disk: n.disk}
}

func (n *node) name() string {
	if _, parent := n.Parent(); parent == nil && !n.IsRoot() {
		if p := n.last.Load(); p != nil {
			return *p
		}
	}
	return n.Path(nil)
}

func (n *node) child(name string) string { return path.Join(n.name(), name) }

// Lookup and the methods below implement the interfaces of package fs of the same names.
func (n *node) Lookup(ctx context.Context, name string, out *fuse.EntryOut) (*fusefs.Inode, syscall.Errno) {
	if errno := n.disk.pass(Look, n.child(name)); errno != 0 {
		return nil, errno
	}
	return n.LoopbackNode.Lookup(ctx, name, out)
}

func (n *node) Getattr(ctx context.Context, f fusefs.FileHandle, out *fuse.AttrOut) syscall.Errno {
	if errno := n.disk.pass(Look, n.name()); errno != 0 {
		return errno
	}
	return n.LoopbackNode.Getattr(ctx, f, out)
}

func (n *node) Open(ctx context.Context, flags uint32) (fusefs.FileHandle, uint32, syscall.Errno) {
	name := n.name()
	if errno := n.disk.pass(Look, name); errno != 0 {
		return nil, 0, errno
	}
	n.last.Store(&name)
	f, fuseFlags, errno := n.LoopbackNode.Open(ctx, flags)
	return wrapped(f), fuseFlags, errno
}

func (n *node) OpendirHandle(ctx context.Context, flags uint32) (fusefs.FileHandle, uint32, syscall.Errno) {
	if errno := n.disk.pass(Look, n.name()); errno != 0 {
		return nil, 0, errno
	}
	return n.LoopbackNode.OpendirHandle(ctx, flags)
}

func (n *node) Statfs(ctx context.Context, out *fuse.StatfsOut) syscall.Errno {
	if errno := n.disk.pass(Look, n.name()); errno != 0 {
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

func (n *node) Setattr(ctx context.Context, f fusefs.FileHandle, in *fuse.SetAttrIn, out *fuse.AttrOut) syscall.Errno {
	op := Look // times and modes are no change of what is stored
	if _, ok := in.GetSize(); ok {
		op = Make
	}
	return n.disk.grow(op, n.name(), 0, func() syscall.Errno { return n.LoopbackNode.Setattr(ctx, f, in, out) })
}

func (n *node) Create(ctx context.Context, name string, flags, mode uint32, out *fuse.EntryOut) (
	child *fusefs.Inode, f fusefs.FileHandle, fuseFlags uint32, errno syscall.Errno) {
	p := n.child(name)
	errno = n.disk.grow(Make, p, 1, func() (errno syscall.Errno) { // a full disk has no room for a name
		child, f, fuseFlags, errno = n.LoopbackNode.Create(ctx, name, flags, mode, out)
		return errno
	})
	if errno == 0 {
		child.Operations().(*node).last.Store(&p)
	}
	return child, wrapped(f), fuseFlags, errno
}

func (n *node) Mkdir(ctx context.Context, name string, mode uint32, out *fuse.EntryOut) (
	child *fusefs.Inode, errno syscall.Errno) {
	errno = n.disk.grow(Make, n.child(name), 1, func() (errno syscall.Errno) {
		child, errno = n.LoopbackNode.Mkdir(ctx, name, mode, out)
		return errno
	})
	return child, errno
}

func (n *node) Unlink(ctx context.Context, name string) syscall.Errno {
	return n.disk.grow(Make, n.child(name), 0, func() syscall.Errno { return n.LoopbackNode.Unlink(ctx, name) })
}

func (n *node) Rmdir(ctx context.Context, name string) syscall.Errno {
	return n.disk.grow(Make, n.child(name), 0, func() syscall.Errno { return n.LoopbackNode.Rmdir(ctx, name) })
}

func (n *node) Rename(ctx context.Context, name string, to fusefs.InodeEmbedder, newName string,
	flags uint32) syscall.Errno {
	if errno := n.disk.pass(Make, n.child(name)); errno != 0 {
		return errno
	}
	// What the name stood for before gives its blocks back.
	moved := n.disk.blocksOf(n.child(name))
	return n.disk.grow(Make, to.(*node).child(newName), 0, func() syscall.Errno {
		errno := n.LoopbackNode.Rename(ctx, name, to, newName, flags)
		if errno == 0 && n.disk.cur.Load().Capacity > 0 {
			n.disk.count(func(s *Stats) { s.Used -= moved }) // counted at the old name already
		}
		return errno
	})
}

func (n *node) Read(ctx context.Context, f fusefs.FileHandle, dest []byte, off int64) (fuse.ReadResult, syscall.Errno) {
	if errno := n.disk.pass(Read, n.name()); errno != 0 {
		return nil, errno
	}
	return f.(fusefs.FileReader).Read(ctx, dest, off)
}

func (n *node) Write(ctx context.Context, f fusefs.FileHandle, data []byte,
	off int64) (written uint32, errno syscall.Errno) {
	return n.write(int64(len(data)), func() (uint32, syscall.Errno) {
		return f.(fusefs.FileWriter).Write(ctx, data, off)
	})
}

func (n *node) Writev(ctx context.Context, f fusefs.FileHandle, data [][]byte,
	off int64) (written uint32, errno syscall.Errno) {
	var size int64
	for _, b := range data {
		size += int64(len(b))
	}
	return n.write(size, func() (uint32, syscall.Errno) { return f.(fusefs.FileWritever).Writev(ctx, data, off) })
}

func (n *node) write(size int64, run func() (uint32, syscall.Errno)) (written uint32, errno syscall.Errno) {
	errno = n.disk.grow(Write, n.name(), size, func() (errno syscall.Errno) {
		written, errno = run()
		return errno
	})
	return written, errno
}

func (n *node) Allocate(ctx context.Context, f fusefs.FileHandle, off, size uint64, mode uint32) syscall.Errno {
	need := int64(size)
	if mode&unix.FALLOC_FL_PUNCH_HOLE != 0 {
		need = 0
	}
	return n.disk.grow(Write, n.name(), need, func() syscall.Errno {
		return f.(fusefs.FileAllocater).Allocate(ctx, off, size, mode)
	})
}

func (n *node) CopyFileRange(ctx context.Context, in fusefs.FileHandle, offIn uint64, out *fusefs.Inode,
	fout fusefs.FileHandle, offOut, size, flags uint64) (uint32, syscall.Errno) {
	// The caller falls back to reading and writing.
	return 0, syscall.ENOSYS
}

func (n *node) Fsync(ctx context.Context, f fusefs.FileHandle, flags uint32) syscall.Errno {
	if errno := n.disk.pass(Sync, n.name()); errno != 0 {
		return errno
	}
	return f.(fusefs.FileFsyncer).Fsync(ctx, flags)
}

func (n *node) Flush(ctx context.Context, f fusefs.FileHandle) syscall.Errno {
	if errno := n.disk.pass(Sync, n.name()); errno != 0 {
		return errno
	}
	return f.(fusefs.FileFlusher).Flush(ctx)
}
