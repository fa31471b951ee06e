package fusefs

import (
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/internal/profile/trace"
)

// A position in a directory stream is a number: 0 is ".", 1 is "..", then the subdirectories, then the files, in the
// manifest's order. So reading a directory of any size needs no state, and seekdir(3) works.

func (f *filesystem) OpenDir(_ <-chan struct{}, in *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	id := nodeID(in.NodeId)
	if id.kind() == kindControl {
		return fuse.OK
	}
	// A directory of one generation never changes, so the kernel may keep the listing. Invalidate drops the root's.
	out.OpenFlags = fuse.FOPEN_CACHE_DIR | fuse.FOPEN_KEEP_CACHE
	if id != rootID {
		return fuse.OK
	}
	for { // the root's node is the same in every generation: the handle pins the one to list
		if g := f.gens.current(); g.retain(1) {
			out.Fh = g.number
			return fuse.OK
		}
	}
}

func (f *filesystem) ReleaseDir(in *fuse.ReleaseIn) {
	if nodeID(in.NodeId) != rootID {
		return
	}
	if g := f.gens.find(in.Fh); g != nil {
		f.gens.release(g, 1)
	}
}

func (f *filesystem) ReadDir(_ <-chan struct{}, in *fuse.ReadIn, out *fuse.DirEntryList) fuse.Status {
	return f.readDir(in, out, false)
}

func (f *filesystem) ReadDirPlus(_ <-chan struct{}, in *fuse.ReadIn, out *fuse.DirEntryList) fuse.Status {
	return f.readDir(in, out, true)
}

func (f *filesystem) readDir(in *fuse.ReadIn, out *fuse.DirEntryList, plus bool) fuse.Status {
	id := nodeID(in.NodeId)
	if id.kind() == kindControl {
		return f.control.readDir(id.index(), in.Offset, out, plus)
	}
	g, dir := f.gens.find(in.Fh), 0
	if id != rootID {
		g, dir = f.gens.find(id.generation()), id.index()
	}
	if g == nil {
		return fuse.Status(syscall.ESTALE)
	}
	m := g.manifest
	f.saw(m, trace.List, in.Pid, -1)
	d := m.Dir(dir)
	dirs := d.EndDir - d.FirstDir
	end := uint64(2 + dirs + d.EndFile - d.FirstFile)
	path := []byte(m.DirPath(dir))
	if len(path) > 0 {
		path = append(path, '/')
	}
	for pos := in.Offset; pos < end; pos++ {
		e := fuse.DirEntry{Mode: syscall.S_IFDIR, Off: pos + 1}
		var node catalog.Node
		switch child := int(pos) - 2; {
		case pos == 0:
			e.Name, e.Ino = ".", dirInode(m, dir)
		case pos == 1:
			e.Name, e.Ino = "..", dirInode(m, d.Parent)
		case child < dirs:
			node = catalog.Node{IsDir: true, Index: d.FirstDir + child}
			e.Name = m.Dir(node.Index).Name
			e.Ino = catalog.Inode(append(path, e.Name...))
		default:
			node = catalog.Node{Index: d.FirstFile + child - dirs}
			e.Name, e.Mode = m.Name(node.Index), syscall.S_IFREG
			e.Ino = catalog.Inode(append(path, e.Name...))
		}
		if !plus {
			if !out.AddDirEntry(e) {
				break
			}
			continue
		}
		entry := out.AddDirLookupEntry(e)
		if entry == nil {
			break
		}
		if pos < 2 || id == rootID && g != f.gens.current() {
			// the kernel knows these two, and names of the root are those of the version in force: an entry without
			// node
			continue
		}
		// Each entry is a lookup to the kernel. The directory's own node, or the root's handle,
		// keeps the generation from being retired.
		g.retain(1)
		f.entry(g, node, entry)
	}
	return fuse.OK
}
