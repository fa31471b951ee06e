package objstore

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// Dir is a local folder as a store. A key is the path below the folder with "/" between its parts. A folder within it
// that has no entries to list is listed as S3 tools mark folders: as an empty object whose key ends in "/". Such an
// object cannot be read.
//
// The ETag consists of modification time, size and inode. A file overwritten in place within the file system's time
// granularity (usually 1 to 4 ms), with the same size, keeps its ETag; only reading it all could tell.
//
// Symbolic links to files and folders are followed, as in torchvision's ImageFolder; a link to a parent folder is
// skipped. A link out of the folder fails the listing, unless [StoreOptions].LinksOutside allows it: anybody with
// write access to the folder could expose any file of this machine. Dangling links, sockets, pipes and devices are
// skipped and counted ([Dir.TakeLeftOut]).
type Dir struct {
	root         string
	linksOutside bool

	mu      sync.Mutex
	leftOut map[string]bool // by key: whether it is a link
}

// LeftOut counts the entries of a folder that a listing cannot show.
type LeftOut struct {
	Dangling int      // links to nothing
	Special  int      // sockets, pipes and devices
	Examples []string // the first few keys, sorted
}

// maxLeftOut bounds how many entries left out are remembered.
const maxLeftOut = 100_000

// TakeLeftOut returns the entries left out since the last call.
func (d *Dir) TakeLeftOut() (l LeftOut) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, link := range d.leftOut {
		if link {
			l.Dangling++
		} else {
			l.Special++
		}
	}
	l.Examples = slices.Sorted(maps.Keys(d.leftOut))
	l.Examples = l.Examples[:min(len(l.Examples), 5)]
	d.leftOut = nil
	return l
}

// leave counts an entry that is not shown, once even if its folder is walked repeatedly.
func (d *Dir) leave(key string, link bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.leftOut == nil {
		d.leftOut = make(map[string]bool)
	}
	if len(d.leftOut) < maxLeftOut {
		d.leftOut[key] = link
	}
}

// checkLink fails if a link leads out of the folder and this is not allowed.
func (d *Dir) checkLink(key, path string) error {
	if d.linksOutside {
		return nil
	}
	to, err := filepath.EvalSymlinks(path)
	if err != nil {
		return fileError("list", key, err)
	}
	root, err := filepath.EvalSymlinks(d.root)
	if err != nil {
		return fileError("list", d.root, err)
	}
	if to == root || strings.HasPrefix(to, strings.TrimSuffix(root, "/")+"/") {
		return nil
	}
	return &Error{Op: "list", Key: key, Kind: KindInvalid,
		Err:    fmt.Errorf("it is a link to %s, outside %s", to, d.root),
		Remedy: "give --store links-outside to follow it, or remove the link"}
}

var _ Store = (*Dir)(nil)

// tmpPrefix begins the names of unfinished files, of this process or of one that has died. They are not objects. The
// rest of the name is random bytes and the object's base name, by which Uploads finds them.
const tmpPrefix = ".shoal-put-"

// NewDir returns the store of the folder root.
func NewDir(root string) (*Dir, error) {
	abs, err := filepath.Abs(root)
	if err != nil {
		return nil, &Error{Op: "open", Key: root, Kind: KindInvalid, Err: err}
	}
	return &Dir{root: abs}, nil
}

// Check implements [Store]: the folder exists and can be listed.
func (d *Dir) Check(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	f, err := os.Open(d.root)
	if err == nil {
		_, err = f.ReadDir(1)
		f.Close()
	}
	if err != nil && !errors.Is(err, io.EOF) {
		e := fileError("check", d.root, err)
		if e.Kind == KindNotFound {
			e.Remedy = "check the path; file:// sources are folders"
		}
		return e
	}
	return nil
}

// path returns the file for key; ok is false if no file can have this key.
func (d *Dir) path(key string) (path string, ok bool) {
	// ValidPath refuses "..", "a//b", "/a" and "a/"; "." is the root itself.
	if !fs.ValidPath(key) || key == "." || strings.IndexByte(key, 0) >= 0 {
		return "", false
	}
	return d.root + "/" + key, true
}

// Stat implements [Reader].
func (d *Dir) Stat(ctx context.Context, key string) (Object, error) {
	if err := ctx.Err(); err != nil {
		return Object{}, err
	}
	path, ok := d.path(key)
	if !ok {
		return Object{}, &Error{Op: "stat", Key: key, Kind: KindNotFound}
	}
	fi, err := os.Stat(path)
	if err != nil {
		return Object{}, fileError("stat", key, err)
	}
	if !fi.Mode().IsRegular() {
		return Object{}, &Error{Op: "stat", Key: key, Kind: KindNotFound, Err: errNotRegular}
	}
	return fileObject(key, fi), nil
}

var errNotRegular = errors.New("not a regular file")

// ReadAt implements [Reader].
func (d *Dir) ReadAt(ctx context.Context, o Object, p []byte, off int64) error {
	return ReadAt(ctx, d, o, p, off)
}

// ReadSpans implements [SpanReader]. Gaps are not read. The version is compared before and after the read, to detect
// a file that is written to meanwhile.
func (d *Dir) ReadSpans(ctx context.Context, o Object, spans []Span) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := CheckSpans(o, spans); err != nil || len(spans) == 0 {
		return err
	}
	path, ok := d.path(o.Key)
	if !ok {
		return &Error{Op: "read", Key: o.Key, Kind: KindNotFound}
	}
	fd, err := d.open(path, o)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }() // opened for reading: nothing can be lost
	for _, s := range spans {
		if err := pread(ctx, fd, o, s.P, s.Off); err != nil {
			return err
		}
	}
	return sameVersion(fd, o)
}

// open opens path if it is the version o.
func (d *Dir) open(path string, o Object) (fd int, err error) {
	// O_NONBLOCK: opening a pipe that replaced the file must not hang. Raw calls, because os.File would register each
	// descriptor with the poller.
	for err = unix.EINTR; errors.Is(err, unix.EINTR); {
		fd, err = unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	}
	if err != nil {
		return -1, fileError("read", o.Key, err)
	}
	if err := sameVersion(fd, o); err != nil {
		_ = unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// pread fills p from off, in bounded steps, so that a read of gigabytes can be cancelled.
func pread(ctx context.Context, fd int, o Object, p []byte, off int64) error {
	for done := 0; done < len(p); {
		if err := ctx.Err(); err != nil {
			return err
		}
		n, err := unix.Pread(fd, p[done:min(len(p), done+8<<20)], off+int64(done))
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return fileError("read", o.Key, err)
		case n == 0: // truncated since the version was compared
			return Changed(o, "")
		default:
			done += n
		}
	}
	return nil
}

// sameVersion returns KindChanged unless the open file is the version o.
func sameVersion(fd int, o Object) error {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return fileError("read", o.Key, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return &Error{Op: "read", Key: o.Key, Kind: KindNotFound, Err: errNotRegular}
	}
	var buf [etagMax]byte
	if etag := appendETag(buf[:0], st.Mtim.Nano(), st.Size, st.Ino); string(etag) != o.ETag {
		return Changed(o, string(etag))
	}
	return nil
}

const etagMax = 3*16 + 2

func appendETag(b []byte, mtimeNs, size int64, inode uint64) []byte {
	return fmt.Appendf(b, "%x-%x-%x", uint64(mtimeNs), uint64(size), inode)
}

func fileObject(key string, fi fs.FileInfo) Object {
	inode := fi.Sys().(*syscall.Stat_t).Ino
	etag := appendETag(make([]byte, 0, etagMax), fi.ModTime().UnixNano(), fi.Size(), inode)
	return Object{Key: key, Size: fi.Size(), ETag: string(etag), ModTime: fi.ModTime()}
}

// List implements [Reader].
func (d *Dir) List(ctx context.Context, prefix, after string) iter.Seq2[Object, error] {
	return dirWalk{d: d, ctx: ctx, prefix: prefix, after: after, recurse: true}.walk
}

// ListLevel implements [Layer].
func (d *Dir) ListLevel(ctx context.Context, prefix string) iter.Seq2[Object, error] {
	return dirWalk{d: d, ctx: ctx, prefix: prefix}.walk
}

// dirWalk walks a tree in key order. Sorting the names in each folder is not enough: "a-b" < "a/b" though "a" <
// "a-b", because "-" < "/". So folders sort with their "/" appended; then depth-first order is key order.
type dirWalk struct {
	d       *Dir
	ctx     context.Context
	prefix  string
	after   string // keys up to and including it are left out; "" leaves out none
	recurse bool
	yield   func(Object, error) bool
	parents []os.FileInfo // of the folders from the root to the current one
}

// walk is the sequence. It has a walk of its own, so that it can be run again.
func (w dirWalk) walk(yield func(Object, error) bool) {
	w.yield = yield
	// Link loops are also searched among the ancestors of the first folder, so that a listing split by prefix sees the
	// same tree as one from the root.
	path := w.d.root
	fi, err := os.Stat(path)
	if err == nil && !fi.IsDir() {
		err = syscall.ENOTDIR
	}
	if err != nil {
		w.yield(Object{}, fileError("list", path, err))
		return
	}
	base := w.prefix[:strings.LastIndexByte(w.prefix, '/')+1]
	if base != "" {
		if _, ok := w.d.path(strings.TrimSuffix(base, "/")); !ok {
			return // no file can have such a key
		}
	}
	for part := range strings.SplitSeq(strings.TrimSuffix(base, "/"), "/") {
		if part == "" {
			break
		}
		w.parents = append(w.parents, fi)
		path += "/" + part
		link, lerr := os.Lstat(path)
		if fi, err = os.Stat(path); lerr != nil || err != nil {
			if err = errors.Join(lerr, err); !isAbsent(err) {
				w.yield(Object{}, fileError("list", path, err))
			}
			return // as in S3: nothing lies under such a prefix
		}
		if !fi.IsDir() || (link.Mode()&fs.ModeSymlink != 0 && w.isParent(fi)) {
			return
		}
	}
	if !w.folder(base, path, fi) {
		return
	}
	if err := w.ctx.Err(); err != nil {
		w.yield(Object{}, err)
	}
}

// folder walks one folder whose key is dir ("" or ending in "/"). It returns false after the end of the sequence.
func (w *dirWalk) folder(dir, path string, self os.FileInfo) bool {
	if err := w.ctx.Err(); err != nil {
		w.yield(Object{}, err)
		return false
	}
	entries, err := os.ReadDir(path)
	if err != nil {
		if isAbsent(err) && dir != "" {
			return true // removed meanwhile
		}
		w.yield(Object{}, fileError("list", path, err))
		return false
	}
	w.parents = append(w.parents, self)
	defer func() { w.parents = w.parents[:len(w.parents)-1] }()
	list, err := w.shown(dir, path, entries)
	if err != nil {
		w.yield(Object{}, err)
		return false
	}
	if len(list) == 0 && dir != "" && strings.HasPrefix(dir, w.prefix) && dir > w.after {
		o := fileObject(dir, self)
		o.Size = 0
		return w.yield(o, nil)
	}
	for _, e := range list {
		key := dir + e.name
		name, isDir := strings.CutSuffix(e.name, "/")
		switch {
		case !w.wants(key, isDir):
			continue
		case isDir && !w.recurse:
			if !w.yield(Object{Key: key}, nil) {
				return false
			}
			continue
		}
		below, fi := path+"/"+name, e.info
		if fi == nil {
			if fi, err = os.Lstat(below); err != nil {
				if isAbsent(err) {
					continue
				}
				w.yield(Object{}, fileError("list", key, err))
				return false
			}
		}
		if isDir && !w.folder(key, below, fi) || !isDir && !w.yield(fileObject(key, fi), nil) {
			return false
		}
	}
	return true
}

// wants reports whether key, or for a folder any key below it, must be listed.
func (w *dirWalk) wants(key string, isDir bool) bool {
	if !isDir {
		return strings.HasPrefix(key, w.prefix) && key > w.after
	}
	return (strings.HasPrefix(key, w.prefix) || strings.HasPrefix(w.prefix, key)) &&
		(key >= w.after || strings.HasPrefix(w.after, key))
}

// dirEntry is an entry of a folder in a listing.
type dirEntry struct {
	name string      // with "/" after a folder
	info os.FileInfo // of what a link leads to, else nil
}

// shown returns the listed entries of a folder, in key order, and records those left out.
func (w *dirWalk) shown(dir, path string, entries []os.DirEntry) ([]dirEntry, error) {
	list := make([]dirEntry, 0, len(entries))
	for _, e := range entries {
		name := e.Name()
		if strings.HasPrefix(name, tmpPrefix) {
			continue
		}
		switch t := e.Type(); {
		case t.IsRegular():
			list = append(list, dirEntry{name: name})
		case t.IsDir():
			list = append(list, dirEntry{name: name + "/"})
		case t&fs.ModeSymlink != 0, t&fs.ModeIrregular != 0:
			fi, err := os.Stat(path + "/" + name)
			switch {
			case err != nil:
				w.d.leave(dir+name, true)
				continue
			case fi.Mode().IsRegular():
				list = append(list, dirEntry{name, fi})
			case fi.IsDir() && !w.isParent(fi):
				list = append(list, dirEntry{name + "/", fi})
			case !fi.IsDir():
				w.d.leave(dir+name, false)
			}
			if err := w.d.checkLink(dir+name, path+"/"+name); err != nil {
				return nil, err
			}
		default:
			w.d.leave(dir+name, false)
		}
	}
	slices.SortFunc(list, func(a, b dirEntry) int { return strings.Compare(a.name, b.name) })
	return list, nil
}

func (w *dirWalk) isParent(fi os.FileInfo) bool {
	return slices.ContainsFunc(w.parents, func(p os.FileInfo) bool { return os.SameFile(p, fi) })
}

// isAbsent reports whether err means that there is no such file.
func isAbsent(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) || errors.Is(err, syscall.ELOOP) ||
		errors.Is(err, syscall.ENAMETOOLONG)
}

// fileError classifies an error of the file system.
func fileError(op, key string, err error) *Error {
	e := &Error{Op: op, Key: key, Err: err}
	if pe, ok := errors.AsType[*fs.PathError](err); ok { // its path repeats the key
		e.Err = pe.Err
	}
	switch {
	case isAbsent(err):
		e.Kind = KindNotFound
	case errors.Is(err, fs.ErrPermission):
		e.Kind, e.Remedy = KindDenied, "give the daemon's user permission to read it"
	case errors.Is(err, syscall.EMFILE), errors.Is(err, syscall.ENFILE):
		e.Kind, e.Remedy = KindTransient, "raise the limit of open files (ulimit -n)"
	case errors.Is(err, syscall.ESTALE), errors.Is(err, syscall.ETIMEDOUT), errors.Is(err, syscall.EAGAIN),
		errors.Is(err, os.ErrDeadlineExceeded):
		e.Kind = KindTransient // network file systems
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		e.Kind, e.Remedy = KindOther, "free space on the file system"
	}
	return e
}
