package parts

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// timeout is how long the kernel trusts names and attributes.
const timeout = 4 * time.Hour

// Fuseceiling is the limit that Shoal's mount is measured against: a bare go-fuse filesystem that
// serves files from one open file by splicing (ReadResultFd) and does nothing else. It knows no
// versions, follows no reader, checks no byte and has nothing to look up but an array index.
//
//	fuseceiling -from DIR MOUNTPOINT          the same tree and bytes as DIR
//
// It serves until SIGINT or SIGTERM, and unmounts. "ready" on stdout tells that it is mounted.
//
// The descriptor behind ReadResultFd is a raw one: an *os.File that is garbage-collected closes its
// descriptor, and every later read is EINVAL.
//
// Files begin at page boundaries of the one file. go-fuse sizes its pipe by bytes, but a pipe holds
// pages: a payload that begins in the middle of one takes a slot more, the splice comes out short, and
// go-fuse sends that as a short reply, which the kernel takes for the end of the file.
func Fuseceiling(args []string) error {
	flags := flag.NewFlagSet("fuseceiling", flag.ContinueOnError)
	from := flags.String("from", "", "the folder whose files are served")
	tmp := flags.String("tmp", os.TempDir(), "where the one file is made")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() != 1 || *from == "" {
		return errors.New("give -from and one mount point")
	}

	backing, err := os.CreateTemp(*tmp, "fuseceiling-")
	if err != nil {
		return err
	}
	defer func() { _ = os.Remove(backing.Name()) }()
	defer backing.Close()
	b := &bare{RawFileSystem: fuse.NewDefaultRawFileSystem(), root: newDir("", 0)}
	if err := b.copyTree(*from, backing); err != nil {
		return err
	}
	if b.fd, err = unix.Open(backing.Name(), unix.O_RDONLY|unix.O_CLOEXEC, 0); err != nil {
		return err
	}
	defer func() { _ = unix.Close(b.fd) }()

	server, err := fuse.NewServer(b, flags.Arg(0), &fuse.MountOptions{
		FsName: "ceiling", Name: "fuseceiling", DirectMountStrict: os.Geteuid() == 0,
		MaxBackground: 256, MaxWrite: 512 << 10, ExplicitDataCacheControl: true,
	})
	if err != nil {
		return err
	}
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, os.Interrupt, syscall.SIGTERM)
	go func() {
		<-stop
		if err := server.Unmount(); err != nil {
			fmt.Fprintln(os.Stderr, "fuseceiling:", err)
			_ = unix.Unmount(flags.Arg(0), unix.MNT_DETACH)
		}
	}()
	fmt.Println("ready")
	server.Serve()
	return nil
}

// alignment of each file's offset in the one file.
const alignment = 4096

func align(offset int64) int64 { return (offset + alignment - 1) &^ (alignment - 1) }

// node is a folder or a file. Its id is its index + 1, the root's 1.
type node struct {
	name     string
	id       int
	parent   int
	offset   int64 // in the one file
	size     int64
	children []*node // in order of name; nil for a file
	byName   map[string]*node
}

func newDir(name string, id int) *node { return &node{name: name, id: id, byName: map[string]*node{}} }

type bare struct {
	fuse.RawFileSystem
	fd    int
	root  *node
	nodes []*node
}

// add puts a file or folder into the tree.
func (b *bare) add(parent *node, c *node) *node {
	if b.nodes == nil {
		b.nodes = []*node{b.root}
	}
	c.id, c.parent = len(b.nodes), parent.id
	b.nodes = append(b.nodes, c)
	parent.children = append(parent.children, c)
	parent.byName[c.name] = c
	return c
}

// copyTree puts the files below dir into the one file.
func (b *bare) copyTree(dir string, backing *os.File) error {
	at := map[string]*node{".": b.root}
	var offset int64
	return filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(dir, path)
		if err != nil || rel == "." {
			return err
		}
		parent := at[filepath.Dir(rel)]
		switch {
		case d.IsDir():
			at[rel] = b.add(parent, newDir(d.Name(), 0))
			return nil
		case !d.Type().IsRegular():
			return nil
		}
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		defer f.Close()
		if _, err := backing.Seek(offset, io.SeekStart); err != nil {
			return err
		}
		n, err := backing.ReadFrom(f)
		b.add(parent, &node{name: d.Name(), offset: offset, size: n})
		offset = align(offset + n)
		return err
	})
}

func (b *bare) attr(n *node, a *fuse.Attr) {
	a.Ino = uint64(n.id + 1)
	if n.byName != nil {
		a.Mode, a.Nlink = syscall.S_IFDIR|0o555, 2
		return
	}
	a.Mode, a.Nlink = syscall.S_IFREG|0o444, 1
	a.Size, a.Blocks, a.Blksize = uint64(n.size), uint64(n.size+511)/512, 128<<10
}

func (b *bare) entry(n *node, out *fuse.EntryOut) {
	out.NodeId = uint64(n.id + 1)
	b.attr(n, &out.Attr)
	out.SetEntryTimeout(timeout)
	out.SetAttrTimeout(timeout)
}

func (b *bare) Lookup(_ <-chan struct{}, h *fuse.InHeader, name string, out *fuse.EntryOut) fuse.Status {
	n := b.nodes[h.NodeId-1].byName[name]
	if n == nil {
		out.SetEntryTimeout(timeout)
		return fuse.OK
	}
	b.entry(n, out)
	return fuse.OK
}

func (b *bare) GetAttr(_ <-chan struct{}, in *fuse.GetAttrIn, out *fuse.AttrOut) fuse.Status {
	b.attr(b.nodes[in.NodeId-1], &out.Attr)
	out.SetTimeout(timeout)
	return fuse.OK
}

func (b *bare) Open(_ <-chan struct{}, _ *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	out.OpenFlags = fuse.FOPEN_NOFLUSH | fuse.FOPEN_KEEP_CACHE
	return fuse.OK
}

func (b *bare) Read(_ <-chan struct{}, in *fuse.ReadIn, buf []byte) (fuse.ReadResult, fuse.Status) {
	n := b.nodes[in.NodeId-1]
	size := min(int64(in.Size), n.size-int64(in.Offset))
	if size <= 0 {
		return fuse.ReadResultData(nil), fuse.OK
	}
	off := n.offset + int64(in.Offset)
	if off%alignment == 0 {
		return fuse.ReadResultFd(uintptr(b.fd), off, int(size)), fuse.OK
	}
	got, err := unix.Pread(b.fd, buf[:size], off)
	if err != nil {
		return nil, fuse.ToStatus(err)
	}
	return fuse.ReadResultData(buf[:got]), fuse.OK
}

func (b *bare) OpenDir(<-chan struct{}, *fuse.OpenIn, *fuse.OpenOut) fuse.Status { return fuse.OK }

func (b *bare) ReadDir(_ <-chan struct{}, in *fuse.ReadIn, out *fuse.DirEntryList) fuse.Status {
	return b.readDir(in, out, false)
}

func (b *bare) ReadDirPlus(_ <-chan struct{}, in *fuse.ReadIn, out *fuse.DirEntryList) fuse.Status {
	return b.readDir(in, out, true)
}

func (b *bare) readDir(in *fuse.ReadIn, out *fuse.DirEntryList, plus bool) fuse.Status {
	children := b.nodes[in.NodeId-1].children
	for i := in.Offset; i < uint64(len(children)); i++ {
		c := children[i]
		e := fuse.DirEntry{Name: c.name, Mode: syscall.S_IFREG, Ino: uint64(c.id + 1), Off: i + 1}
		if c.byName != nil {
			e.Mode = syscall.S_IFDIR
		}
		if !plus {
			if !out.AddDirEntry(e) {
				break
			}
		} else if entry := out.AddDirLookupEntry(e); entry != nil {
			b.entry(c, entry)
		} else {
			break
		}
	}
	return fuse.OK
}

// String implements fuse.RawFileSystem.
func (b *bare) String() string { return "fuseceiling" }
