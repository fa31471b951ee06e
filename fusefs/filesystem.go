package fusefs

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/internal/profile/trace"
)

const (
	etagAttr    = "user.shoal.etag"
	versionAttr = "user.shoal.version"
	stateAttr   = "user.shoal.state"

	maxName = 255

	// blockSize is the read size that stat(2) recommends. Python sizes a file's buffer by it, so an image of usual
	// size needs one READ instead of several growing ones.
	blockSize = 128 << 10
)

// filesystem answers the kernel, as a fuse.RawFileSystem. Undefined methods return ENOSYS, which the kernel remembers:
// locks, poll, fallocate, SEEK_HOLE, copy_file_range and statx then have the kernel's own behavior. Only ioctls are
// asked again each time, and their ENOSYS becomes ENOTTY.
type filesystem struct {
	fuse.RawFileSystem
	volume   Volume
	pages    atomic.Pointer[pages]
	opts     Options
	gens     *generations
	control  *controlFolder
	stopping chan struct{} // closed when the server wants to end
	draining draining
	kept     *kept // nil: the mount ends with this process
}

// resolve finds a node. The root belongs to the version in force.
func (f *filesystem) resolve(id nodeID) (*generation, kind, int) {
	if id == rootID {
		return f.gens.current(), kindDir, 0
	}
	if id.kind() == kindControl {
		return nil, kindControl, id.index()
	}
	g := f.gens.find(id.generation())
	if g == nil {
		return nil, kindNone, 0
	}
	return g, id.kind(), id.index()
}

func (f *filesystem) Lookup(_ <-chan struct{}, header *fuse.InHeader, name string, out *fuse.EntryOut) fuse.Status {
	parent := nodeID(header.NodeId)
	if parent == rootID && name == controlName {
		f.control.entry(controlRoot, out)
		return fuse.OK
	}
	for {
		g, k, index := f.resolve(parent)
		switch {
		case k == kindControl:
			return f.control.lookup(index, name, out)
		case k != kindDir:
			return fuse.Status(syscall.ESTALE)
		case len(name) > maxName:
			return fuse.Status(syscall.ENAMETOOLONG)
		}
		node, ok := g.manifest.Lookup(index, name)
		f.looked(g.manifest, header.Pid, node, ok)
		if !ok {
			out.SetEntryTimeout(trusted) // and no node: the kernel remembers that the name does not exist
			return fuse.OK
		}
		if !g.retain(1) {
			continue // retired at this moment; only possible for the root, in the newest generation
		}
		f.entry(g, node, out)
		return fuse.OK
	}
}

// entry fills in a looked-up node. The caller has counted the reference.
func (f *filesystem) entry(g *generation, node catalog.Node, out *fuse.EntryOut) {
	if node.IsDir {
		out.NodeId = uint64(makeID(g.number, kindDir, node.Index))
		f.dirAttr(g, node.Index, &out.Attr)
	} else {
		out.NodeId = uint64(makeID(g.number, kindFile, node.Index))
		f.fileAttr(g.manifest, node.Index, &out.Attr)
	}
	out.SetEntryTimeout(trusted)
	out.SetAttrTimeout(trusted)
}

func (f *filesystem) Forget(id, n uint64) {
	node := nodeID(id)
	if node == rootID || node.kind() == kindControl {
		return
	}
	if g := f.gens.find(node.generation()); g != nil {
		f.gens.release(g, int64(n))
	}
}

func (f *filesystem) GetAttr(_ <-chan struct{}, in *fuse.GetAttrIn, out *fuse.AttrOut) fuse.Status {
	g, k, index := f.resolve(nodeID(in.NodeId))
	switch k {
	case kindDir:
		f.dirAttr(g, index, &out.Attr)
	case kindFile:
		f.looked(g.manifest, in.Pid, catalog.Node{Index: index}, true)
		f.fileAttr(g.manifest, index, &out.Attr)
	case kindControl:
		f.control.attr(index, &out.Attr)
		return fuse.OK
	default:
		return fuse.Status(syscall.ESTALE)
	}
	out.SetTimeout(trusted)
	return fuse.OK
}

func (f *filesystem) fileAttr(m *catalog.Manifest, file int, a *fuse.Attr) {
	var buf [512]byte
	a.Ino = catalog.Inode(m.AppendPath(buf[:0], file))
	a.Mode = syscall.S_IFREG | f.permissions(m, file)
	a.Nlink = 1
	a.Size = uint64(m.Size(file))
	a.Blocks = (a.Size + 511) / 512
	a.Blksize = blockSize
	f.owner(a)
	setTimes(a, m.ModTime(file))
}

// permissions returns the mode bits of a file that the mount allows.
func (f *filesystem) permissions(m *catalog.Manifest, file int) uint32 {
	if own, ok := f.volume.Permissions(m, file); ok {
		return own & 0o555
	}
	return 0o444
}

func (f *filesystem) dirAttr(g *generation, dir int, a *fuse.Attr) {
	m := g.manifest
	d := m.Dir(dir)
	a.Ino = dirInode(m, dir)
	a.Mode = syscall.S_IFDIR | 0o555
	a.Nlink = uint32(2 + d.EndDir - d.FirstDir) // find(1) relies on it
	a.Blksize = 4096
	f.owner(a)
	setTimes(a, g.manifest.DirTime(dir)) // stores have no folder times; this one is the same on every mount
}

func (f *filesystem) owner(a *fuse.Attr) { a.Uid, a.Gid = f.opts.UID, f.opts.GID }

func setTimes(a *fuse.Attr, t time.Time) {
	if t.IsZero() {
		t = time.Unix(0, 0)
	}
	a.SetTimes(&t, &t, &t)
}

func dirInode(m *catalog.Manifest, dir int) uint64 {
	if dir == 0 {
		return uint64(rootID)
	}
	return catalog.Inode([]byte(m.DirPath(dir)))
}

func (f *filesystem) Open(_ <-chan struct{}, in *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	g, k, file := f.resolve(nodeID(in.NodeId))
	if f.draining.begun.Load() {
		return fuse.Status(errDraining)
	}
	switch k {
	case kindFile:
	case kindControl:
		return f.control.open(file, in.Flags, out)
	case kindDir:
		return fuse.Status(syscall.EISDIR)
	default:
		return fuse.Status(syscall.ESTALE)
	}
	if in.Flags&syscall.O_ACCMODE != syscall.O_RDONLY || in.Flags&syscall.O_TRUNC != 0 {
		return fuse.EROFS
	}
	if f.opts.Witness != nil {
		f.opts.Witness.Opening(callerOf(&in.InHeader))
	}
	out.OpenFlags = fuse.FOPEN_NOFLUSH
	f.saw(g.manifest, trace.Open, in.Pid, file)
	if f.opts.KernelCache {
		out.OpenFlags |= fuse.FOPEN_KEEP_CACHE
	}
	if p := f.pagesOf(g.manifest); p != nil {
		p.opened(file)
	}
	f.draining.open.Add(1)
	f.volume.Opened(g.manifest, file, in.Pid)
	return fuse.OK
}

func (f *filesystem) Read(cancel <-chan struct{}, in *fuse.ReadIn, buf []byte) (fuse.ReadResult, fuse.Status) {
	g, k, file := f.resolve(nodeID(in.NodeId))
	switch k {
	case kindFile:
	case kindControl:
		return f.control.read(in, buf)
	default:
		return nil, fuse.Status(syscall.ESTALE)
	}
	if buf = wanted(g.manifest, file, in, buf); len(buf) == 0 {
		return fuse.ReadResultData(nil), fuse.OK
	}
	end := f.recordRead(g.manifest, in, file, len(buf))
	if p := f.pagesOf(g.manifest); p != nil {
		p.asked(file)
	}
	n, err := f.volume.ReadAt(requestContext{cancel}, g.manifest, file, buf, int64(in.Offset))
	if err != nil && interrupted(cancel) && errors.Is(err, context.Canceled) && !dying(in.Pid) &&
		!interrupted(f.stopping) {
		ctx, stop := callerContext(cancel, f.stopping, in.Pid)
		n, err = f.volume.ReadAt(ctx, g.manifest, file, buf, int64(in.Offset))
		stop()
	}
	end()
	if err == nil && n < len(buf) {
		// The kernel would take a short reply for the end of the file, and remember it.
		err = fmt.Errorf("%d of %d bytes at %d: %w", n, len(buf), in.Offset, io.ErrUnexpectedEOF)
	}
	if err != nil {
		return nil, f.readError(cancel, g.manifest, file, err)
	}
	f.volume.WasRead(g.manifest, file, int64(in.Offset), int64(n), in.Pid)
	return fuse.ReadResultData(buf), fuse.OK
}

// wanted returns the part of buf that a READ fills, which is empty behind the file's end.
func wanted(m *catalog.Manifest, file int, in *fuse.ReadIn, buf []byte) []byte {
	left := m.Size(file) - int64(in.Offset)
	return buf[:max(0, min(int64(len(buf)), int64(in.Size), left))]
}

func (f *filesystem) readError(cancel <-chan struct{}, m *catalog.Manifest, file int, err error) fuse.Status {
	errno := errnoOf(err)
	if errno == syscall.EINTR {
		if interrupted(cancel) {
			return fuse.EINTR // the caller is gone: nothing to log
		}
		errno = syscall.EIO // canceled by the engine: many programs would repeat an EINTR forever
	}
	f.opts.Logger.Warn("read failed", "path", m.Path(file), "errno", errno.Error(), "cause", err)
	return fuse.Status(errno)
}

func (f *filesystem) Release(_ <-chan struct{}, in *fuse.ReleaseIn) {
	switch g, k, index := f.resolve(nodeID(in.NodeId)); k {
	case kindFile:
		f.saw(g.manifest, trace.Close, in.Pid, index)
		f.draining.open.Add(-1)
		if p := f.pagesOf(g.manifest); p != nil {
			p.released(index)
		}
		f.volume.Released(g.manifest, index)
	case kindControl:
		f.control.release(callerOf(&in.InHeader), in.Fh)
	}
}

func callerOf(h *fuse.InHeader) Caller { return Caller{h.Pid, h.Uid, h.Gid} }

func (f *filesystem) Flush(cancel <-chan struct{}, in *fuse.FlushIn) fuse.Status {
	if nodeID(in.NodeId).kind() == kindControl {
		return f.control.flush(cancel, callerOf(&in.InHeader), in.Fh)
	}
	return fuse.OK // a kernel before 5.16, without FOPEN_NOFLUSH
}

func (f *filesystem) Fsync(cancel <-chan struct{}, in *fuse.FsyncIn) fuse.Status {
	return f.Flush(cancel, &fuse.FlushIn{InHeader: in.InHeader, Fh: in.Fh})
}

// Access: the kernel calls it only without default_permissions, that is if only the owner can access the mount.
func (f *filesystem) Access(_ <-chan struct{}, in *fuse.AccessIn) fuse.Status {
	g, k, index := f.resolve(nodeID(in.NodeId))
	writable := k == kindControl && f.control.mode(index)&0o222 != 0
	isDir := k == kindDir || k == kindControl && f.control.mode(index)&syscall.S_IFMT == syscall.S_IFDIR
	switch {
	case in.Mask&fuse.W_OK != 0 && !writable:
		return fuse.EROFS
	case in.Mask&fuse.X_OK != 0 && !isDir && (k != kindFile || f.permissions(g.manifest, index)&0o111 == 0):
		return fuse.EACCES
	}
	return fuse.OK
}

// StatFs: the dataset's totals, nothing free.
func (f *filesystem) StatFs(_ <-chan struct{}, _ *fuse.InHeader, out *fuse.StatfsOut) fuse.Status {
	m := f.gens.current().manifest
	const block = 4096
	out.Bsize, out.Frsize, out.NameLen = block, block, maxName
	out.Blocks = (uint64(m.Bytes()) + block - 1) / block
	out.Files = uint64(m.Len() + m.Dirs())
	return fuse.OK
}

func (f *filesystem) GetXAttr(_ <-chan struct{}, header *fuse.InHeader, attr string, dest []byte) (
	uint32, fuse.Status) {
	g, k, index := f.resolve(nodeID(header.NodeId))
	var value string
	switch {
	case attr == versionAttr && (k == kindFile || k == kindDir):
		value = g.manifest.Version()
	case attr == etagAttr && k == kindFile:
		value = g.manifest.ETag(index)
	case attr == stateAttr && k == kindFile:
		value = f.volume.State(g.manifest, index)
	default:
		return 0, fuse.ENODATA
	}
	return copyAttr(dest, value)
}

func (f *filesystem) ListXAttr(_ <-chan struct{}, header *fuse.InHeader, dest []byte) (uint32, fuse.Status) {
	switch _, k, _ := f.resolve(nodeID(header.NodeId)); k {
	case kindFile:
		return copyAttr(dest, etagAttr+"\x00"+versionAttr+"\x00"+stateAttr+"\x00")
	case kindDir:
		return copyAttr(dest, versionAttr+"\x00")
	}
	return 0, fuse.OK
}

func copyAttr(dest []byte, value string) (uint32, fuse.Status) {
	if len(dest) < len(value) {
		return uint32(len(value)), fuse.ERANGE
	}
	return uint32(copy(dest, value)), fuse.OK
}

func (f *filesystem) SetAttr(_ <-chan struct{}, in *fuse.SetAttrIn, out *fuse.AttrOut) fuse.Status {
	if id := nodeID(in.NodeId); id.kind() == kindControl {
		return f.control.setAttr(id.index(), in, out)
	}
	return fuse.EROFS
}

// Create: only plans can be made.
func (f *filesystem) Create(_ <-chan struct{}, in *fuse.CreateIn, name string, out *fuse.CreateOut) fuse.Status {
	if id := nodeID(in.NodeId); id.kind() == kindControl {
		return f.control.create(id.index(), name, in.Flags, out)
	}
	return fuse.EROFS
}

func (f *filesystem) Write(_ <-chan struct{}, in *fuse.WriteIn, data []byte) (uint32, fuse.Status) {
	if nodeID(in.NodeId).kind() == kindControl {
		return f.control.write(in, data)
	}
	return 0, fuse.EROFS
}

// The following methods would change the tree, which is read-only.

func (*filesystem) Mknod(<-chan struct{}, *fuse.MknodIn, string, *fuse.EntryOut) fuse.Status {
	return fuse.EROFS
}
func (*filesystem) Mkdir(<-chan struct{}, *fuse.MkdirIn, string, *fuse.EntryOut) fuse.Status {
	return fuse.EROFS
}
func (*filesystem) Rmdir(<-chan struct{}, *fuse.InHeader, string) fuse.Status { return fuse.EROFS }
func (*filesystem) Link(<-chan struct{}, *fuse.LinkIn, string, *fuse.EntryOut) fuse.Status {
	return fuse.EROFS
}
func (*filesystem) Tmpfile(<-chan struct{}, *fuse.CreateIn, *fuse.CreateOut) fuse.Status {
	return fuse.EROFS
}
func (*filesystem) RemoveXAttr(<-chan struct{}, *fuse.InHeader, string) fuse.Status {
	return fuse.EROFS
}
func (*filesystem) Symlink(<-chan struct{}, *fuse.InHeader, string, string, *fuse.EntryOut) fuse.Status {
	return fuse.EROFS
}

// Unlink: only plans can be removed.
func (f *filesystem) Unlink(_ <-chan struct{}, in *fuse.InHeader, name string) fuse.Status {
	if id := nodeID(in.NodeId); id.kind() == kindControl {
		return f.control.unlink(callerOf(in), id.index(), name)
	}
	return fuse.EROFS
}

// Rename: only plans can have another name.
func (f *filesystem) Rename(_ <-chan struct{}, in *fuse.RenameIn, from, to string) fuse.Status {
	if old, dir := nodeID(in.NodeId), nodeID(in.Newdir); old.kind() == kindControl && dir.kind() == kindControl {
		return f.control.rename(callerOf(&in.InHeader), in.Flags, old.index(), from, dir.index(), to)
	}
	return fuse.EROFS
}

func (f *filesystem) SetXAttr(_ <-chan struct{}, in *fuse.SetXAttrIn, _ string, _ []byte) fuse.Status {
	if nodeID(in.NodeId).kind() == kindControl {
		return fuse.ENOTSUP // cp -p goes on without
	}
	return fuse.EROFS
}
