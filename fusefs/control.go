package fusefs

import (
	"context"
	"errors"
	"io/fs"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/cache/catalog"
)

const controlName = ".shoal" // not listed: it must not appear to ImageFolder as a class folder

// Control nodes, by their number.
const (
	controlRoot = iota
	controlPlans
	controlStats
	controlOrder
	controlRefresh
	controlProfile
	controlPlan // plans/default

	namedPlan = 1 << (kindShift - 1) // and a hash of the name
)

var controlFiles = [...]string{
	controlPlans: "plans", controlStats: "stats", controlOrder: "order", controlRefresh: "refresh",
	controlProfile: "profile", controlPlan: "plan"}

// controlBits are who may read and write the files.
var controlBits = [...]uint32{controlStats: 0o444, controlOrder: 0o444, controlRefresh: 0o644, controlProfile: 0o400,
	controlPlan: 0o666}

const maxPlanBytes = 1 << 30 // ten million paths of 100 bytes

// controlFolder is .shoal.
//
// Modes: anybody may write a plan (0666). With --allow-other the trainer is often another user
// than the daemon, and a plan only makes prefetching better or worse. A refresh costs a listing of the source, so it is
// for the owner (0644), and so is a recording of other users' reads (0400).
//
// A plan is installed by the FLUSH that every close(2) sends, if something was written since the last one; close
// returns the result. A plan that was truncated, and not written to until its last descriptor is closed, is removed,
// as by unlink. A FLUSH must not do that, since each duplicate of the descriptor sends one: `printf x > .shoal/plan`
// sends one before it writes, and two commands in one redirection install twice, the second time everything.
type controlFolder struct {
	c        Control
	opts     Options
	stopping <-chan struct{}
	mounted  time.Time

	install sync.Mutex // an append reads the plan in force and installs a longer one

	mu      sync.Mutex
	handles map[uint64]*controlHandle
	nextFh  uint64 // even; the handle of a writer is one more
}

func (f *controlFolder) add(h *controlHandle, writing bool) (fh uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.nextFh += 2
	if fh = f.nextFh; writing {
		fh++
	}
	f.handles[fh] = h
	return fh
}

// controlHandle is an open control file.
type controlHandle struct {
	name string // as Control.Get takes it

	mu       sync.Mutex
	snapshot []byte        // the content, as it was at open
	staged   []byte        // what was written
	whole    bool          // staged is the whole file; otherwise it is appended
	emptied  bool          // truncated, and not written to since
	dirty    bool          // written to since the last FLUSH
	failed   syscall.Errno // of a write: what is staged is not whole
	reserved int64         // of Options.Memory

	recording Recording // of profile; its stream is the content
}

func newControlFolder(c Control, o Options, stopping <-chan struct{}) *controlFolder {
	return &controlFolder{c: c, opts: o, stopping: stopping, mounted: time.Now(), handles: map[uint64]*controlHandle{}}
}

// fileName returns the name of a control file for Control.Get; "" of a plan that is not in force.
func (f *controlFolder) fileName(index int) string {
	switch {
	case index == controlPlan:
		return "plans/default"
	case index < controlPlan:
		return controlFiles[index]
	}
	for _, name := range f.c.Plans() {
		if planNode(name) == index {
			return "plans/" + name
		}
	}
	return ""
}

func planNode(name string) int {
	if name == "default" {
		return controlPlan
	}
	return int(catalog.Inode([]byte(name))%namedPlan) | namedPlan
}

func (f *controlFolder) mode(index int) uint32 {
	if index == controlRoot || index == controlPlans { // plans can be removed there
		return syscall.S_IFDIR | 0o777
	}
	return syscall.S_IFREG | controlBits[min(index, controlPlan)]
}

// attr fills in attributes without a validity time. The length of stats and order is 0, as in /proc: it is unknown
// until the file is open.
func (f *controlFolder) attr(index int, a *fuse.Attr) {
	a.Mode, a.Nlink, a.Blksize = f.mode(index), 1, blockSize
	switch {
	case index == controlRoot:
		a.Nlink = 3
	case index == controlPlans:
		a.Nlink = 2
	case index >= controlPlan:
		if text, err := f.c.Get(f.fileName(index)); err == nil {
			a.Size = uint64(len(text))
			a.Blocks = (a.Size + 511) / 512
		}
	}
	a.Ino = uint64(makeID(0, kindControl, index))
	a.Uid, a.Gid = f.opts.UID, f.opts.GID
	a.SetTimes(&f.mounted, &f.mounted, &f.mounted)
}

func (f *controlFolder) entry(index int, out *fuse.EntryOut) {
	out.NodeId = uint64(makeID(0, kindControl, index))
	f.attr(index, &out.Attr)
	if index < namedPlan { // these are always there
		out.SetEntryTimeout(trusted)
	}
}

func (f *controlFolder) lookup(dir int, name string, out *fuse.EntryOut) fuse.Status {
	if dir == controlPlans {
		if _, err := f.c.Get("plans/" + name); err != nil && name != "default" {
			return fuse.ENOENT
		}
		f.entry(planNode(name), out)
		return fuse.OK
	}
	index := slices.Index(controlFiles[:], name)
	if dir != controlRoot || index < controlPlans {
		return fuse.ENOENT
	}
	f.entry(index, out)
	return fuse.OK
}

func (f *controlFolder) readDir(dir int, offset uint64, out *fuse.DirEntryList, plus bool) fuse.Status {
	// Not profile: walking the folder must not start a recording.
	names := append([]string{".", "..", controlFiles[controlPlan]}, controlFiles[controlPlans:controlProfile]...)
	if dir == controlPlans {
		names = append(names[:2], f.c.Plans()...)
	}
	for pos := offset; pos < uint64(len(names)); pos++ {
		e := fuse.DirEntry{Name: names[pos], Mode: syscall.S_IFREG, Off: pos + 1}
		if pos < 2 || names[pos] == "plans" && dir == controlRoot {
			e.Mode = syscall.S_IFDIR
		}
		// Without a node in the entry the kernel looks the name up when it needs it.
		if plus && out.AddDirLookupEntry(e) == nil || !plus && !out.AddDirEntry(e) {
			break
		}
	}
	return fuse.OK
}

// notPlan reports a name of what editors write beside a file: .NAME.swp and NAME~.
func notPlan(name string) bool { return strings.HasPrefix(name, ".") || strings.HasSuffix(name, "~") }

// create reserves a plan's name; the plan exists once it is installed.
func (f *controlFolder) create(dir int, name string, flags uint32, out *fuse.CreateOut) fuse.Status {
	if dir != controlPlans || notPlan(name) {
		return fuse.EROFS
	}
	if len(name) > maxName {
		return fuse.Status(syscall.ENAMETOOLONG)
	}
	f.entry(planNode(name), &out.EntryOut)
	return f.openFile("plans/"+name, flags, &out.OpenOut)
}

func (f *controlFolder) open(index int, flags uint32, out *fuse.OpenOut) fuse.Status {
	if index == controlRoot || index == controlPlans {
		return fuse.Status(syscall.EISDIR)
	}
	writing := flags&syscall.O_ACCMODE != syscall.O_RDONLY
	if writing && f.mode(index)&0o222 == 0 {
		return fuse.EROFS
	}
	if index == controlProfile {
		return f.openProfile(out)
	}
	name := f.fileName(index)
	if name == "" {
		return fuse.Status(syscall.ESTALE) // the kernel looks its name up again
	}
	return f.openFile(name, flags, out)
}

func (f *controlFolder) openFile(name string, flags uint32, out *fuse.OpenOut) fuse.Status {
	h := &controlHandle{name: name, whole: flags&syscall.O_TRUNC != 0, emptied: flags&syscall.O_TRUNC != 0}
	if flags&syscall.O_ACCMODE != syscall.O_WRONLY {
		text, err := f.c.Get(h.name)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			f.opts.Logger.Warn("control file cannot be read", "file", controlName+"/"+h.name, "cause", err)
			return fuse.Status(errnoOf(err))
		}
		h.snapshot = text
	}
	out.Fh = f.add(h, flags&syscall.O_ACCMODE != syscall.O_RDONLY)
	out.OpenFlags = fuse.FOPEN_DIRECT_IO // the page cache would clip reads at the reported size, and keep old content
	return fuse.OK
}

// openProfile starts a recording, which ends when the file is closed, even if its reader is killed.
func (f *controlFolder) openProfile(out *fuse.OpenOut) fuse.Status {
	r, err := f.c.Record()
	if err != nil {
		f.opts.Logger.Warn("the recording was not started", "cause", err)
		return fuse.EBUSY
	}
	out.Fh = f.add(&controlHandle{name: "profile", recording: r}, false)
	out.OpenFlags = fuse.FOPEN_DIRECT_IO | fuse.FOPEN_NONSEEKABLE
	return fuse.OK
}

func (f *controlFolder) handle(fh uint64) *controlHandle {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.handles[fh]
}

func (f *controlFolder) read(in *fuse.ReadIn, buf []byte) (fuse.ReadResult, fuse.Status) {
	h := f.handle(in.Fh)
	if h == nil { // it was opened in another life of the mount
		return nil, fuse.EIO
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	buf = buf[:min(len(buf), int(in.Size))]
	if h.recording != nil {
		return fuse.ReadResultData(buf[:h.recording.Read(buf)]), fuse.OK
	}
	text := h.snapshot
	if h.whole {
		text = h.staged
	}
	n := copy(buf, text[min(in.Offset, uint64(len(text))):])
	return fuse.ReadResultData(buf[:n]), fuse.OK
}

func (f *controlFolder) write(in *fuse.WriteIn, data []byte) (uint32, fuse.Status) {
	h := f.handle(in.Fh)
	if h == nil {
		return 0, fuse.EIO
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.name == "refresh" {
		h.dirty = true
	} else if errno := f.stage(h, in, data); errno != 0 {
		h.emptied, h.failed = false, errno
		return 0, fuse.Status(errno)
	}
	return uint32(len(data)), fuse.OK
}

// stage takes what is written to a plan. h.mu is held.
func (f *controlFolder) stage(h *controlHandle, in *fuse.WriteIn, data []byte) syscall.Errno {
	offset := in.Offset
	if in.Flags&syscall.O_APPEND != 0 {
		offset = uint64(len(h.staged)) // the kernel's end of file may be stale
	} else if !h.whole {
		// A write into the middle: the current content becomes the start of the staged one.
		old, err := f.c.Get(h.name)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return errnoOf(err)
		}
		if errno := f.grow(h, len(old)+len(h.staged)); errno != 0 {
			return errno
		}
		h.staged, h.whole = joinPlan(slices.Clone(old), h.staged), true
	}
	if offset > uint64(len(h.staged)) {
		return syscall.EINVAL // a hole: no line of a plan
	}
	if offset+uint64(len(data)) > maxPlanBytes {
		return syscall.EFBIG
	}
	end := int(offset) + len(data)
	if errno := f.grow(h, end); errno != 0 {
		return errno
	}
	if end > len(h.staged) {
		h.staged = append(h.staged, make([]byte, end-len(h.staged))...)
	}
	copy(h.staged[offset:], data)
	h.dirty, h.emptied = true, false
	return 0
}

// grow makes sure that n bytes of staging are accounted for and allocated. h.mu is held.
func (f *controlFolder) grow(h *controlHandle, n int) syscall.Errno {
	if n <= cap(h.staged) {
		return 0
	}
	want := max(n, min(2*cap(h.staged), maxPlanBytes))
	if m := f.opts.Memory; !m.Reserve(int64(want) - h.reserved) {
		if want = n; !m.Reserve(int64(want) - h.reserved) {
			f.opts.Logger.Warn("too little memory for the written plan", "plan", h.name, "bytes", n)
			return syscall.ENOMEM
		}
	}
	h.reserved = int64(want)
	h.staged = slices.Grow(h.staged, want-len(h.staged))
	return 0
}

// drop frees the staged content, and ends a recording. h.mu is held.
func (f *controlFolder) drop(h *controlHandle) {
	if h.recording != nil {
		h.recording.Close()
	}
	h.staged = nil
	if h.reserved > 0 {
		f.opts.Memory.Release(h.reserved)
		h.reserved = 0
	}
}

// joinPlan appends lines to a plan that may lack its last newline.
func joinPlan(old, appended []byte) []byte {
	if len(old) > 0 && len(appended) > 0 && old[len(old)-1] != '\n' {
		old = append(old, '\n')
	}
	return append(old, appended...)
}

// flush carries out the written request, once. Its result is that of close(2).
func (f *controlFolder) flush(cancel <-chan struct{}, who Caller, fh uint64) fuse.Status {
	h := f.handle(fh)
	if h == nil && fh&1 == 0 {
		return fuse.OK
	} else if h == nil {
		return fuse.EIO // what was written is lost
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.dirty || h.failed != 0 {
		return fuse.Status(h.failed)
	}
	h.dirty = false
	if h.name == "refresh" {
		ctx, stop := callerContext(cancel, f.stopping, who.Thread)
		defer stop()
		err := f.c.Refresh(ctx)
		f.did(who, h.name, err)
		if err != nil {
			f.opts.Logger.Warn("refresh failed", "cause", err)
			if errors.Is(err, context.Canceled) && interrupted(cancel) {
				return fuse.EINTR
			}
			return fuse.EIO
		}
		return fuse.OK
	}
	name := strings.TrimPrefix(h.name, "plans/")
	f.install.Lock()
	defer f.install.Unlock()
	text := h.staged
	if !h.whole {
		old, err := f.c.Get(h.name)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fuse.Status(errnoOf(err))
		}
		if len(old)+len(text) >= maxPlanBytes {
			return fuse.Status(syscall.EFBIG)
		}
		text = joinPlan(slices.Clone(old), text)
	}
	err := f.c.PutPlan(name, text)
	f.did(who, h.name, err)
	if err != nil {
		f.opts.Logger.Warn("plan refused; the old one stays in force", "plan", name, "cause", err)
		return fuse.EINVAL
	}
	if !h.whole {
		f.drop(h) // it is part of the plan now; the next append follows it
	}
	return fuse.OK
}

func (f *controlFolder) did(who Caller, file string, err error) {
	if f.opts.Witness != nil {
		f.opts.Witness.Did(who, file, err)
	}
}

// planAt returns the name of the plan that a file of a folder is, "" if it is none.
func planAt(dir int, name string) string {
	switch {
	case dir == controlPlans:
		return name
	case dir == controlRoot && name == "plan":
		return "default"
	}
	return ""
}

func (f *controlFolder) unlink(who Caller, dir int, name string) fuse.Status {
	if name = planAt(dir, name); name == "" {
		return fuse.EROFS
	}
	return f.remove(who, name)
}

// rename puts a plan in force under another name, as who replaces a file by a whole new one does.
func (f *controlFolder) rename(who Caller, flags uint32, oldDir int, from string, newDir int, to string) fuse.Status {
	from, to = planAt(oldDir, from), planAt(newDir, to)
	text, err := f.c.Get("plans/" + from)
	_, missing := f.c.Get("plans/" + to)
	switch {
	case from == "" || to == "" || notPlan(to):
		return fuse.EROFS
	case err != nil:
		return fuse.Status(errnoOf(err))
	case flags&^unix.RENAME_NOREPLACE != 0 || len(to) > maxName:
		return fuse.EINVAL
	case flags != 0 && missing == nil:
		return fuse.Status(syscall.EEXIST)
	case from == to:
		return fuse.OK
	}
	f.install.Lock()
	err = f.c.PutPlan(to, text)
	f.install.Unlock()
	if f.did(who, "plans/"+to, err); err != nil {
		f.opts.Logger.Warn("plan refused; the old one stays in force", "plan", to, "cause", err)
		return fuse.EINVAL
	}
	return f.remove(who, from)
}

func (f *controlFolder) remove(who Caller, name string) fuse.Status {
	f.install.Lock()
	defer f.install.Unlock()
	err := f.c.RemovePlan(name)
	if errors.Is(err, fs.ErrNotExist) {
		return fuse.ENOENT
	}
	f.did(who, "plans/"+name, err)
	if err != nil {
		f.opts.Logger.Warn("the plan stays in force", "plan", name, "cause", err)
		return fuse.Status(errnoOf(err))
	}
	return fuse.OK
}

// setAttr truncates. Times, modes and owners are accepted, for touch(1), cp -p and Python's shutil.copy, and ignored.
func (f *controlFolder) setAttr(index int, in *fuse.SetAttrIn, out *fuse.AttrOut) fuse.Status {
	if f.mode(index)&0o222 == 0 {
		return fuse.EROFS
	}
	if in.Valid&fuse.FATTR_SIZE != 0 && index != controlRefresh {
		h := f.handle(in.Fh) // none is 0, which is sent without one
		switch {
		case h != nil:
			if errno := f.truncate(h, in.Size); errno != 0 {
				return fuse.Status(errno)
			}
		case in.Size != 0: // 0 is O_TRUNC's, of an open that follows
			return fuse.EINVAL
		}
	}
	f.attr(index, &out.Attr)
	return fuse.OK
}

func (f *controlFolder) truncate(h *controlHandle, size uint64) syscall.Errno {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case size == 0:
		f.drop(h)
		h.whole, h.dirty, h.emptied, h.failed = true, false, true, 0
	case h.whole && size <= uint64(len(h.staged)):
		h.staged = h.staged[:size]
		h.dirty, h.failed = true, 0
	default:
		return syscall.EINVAL
	}
	return 0
}

func (f *controlFolder) release(who Caller, fh uint64) {
	f.mu.Lock()
	h := f.handles[fh]
	delete(f.handles, fh)
	f.mu.Unlock()
	if h != nil {
		h.mu.Lock()
		f.drop(h)
		emptied := h.emptied
		h.mu.Unlock()
		if plan, ok := strings.CutPrefix(h.name, "plans/"); ok && emptied {
			f.remove(who, plan)
		}
	}
}

// close frees the memory of open handles: after an abort no RELEASE comes.
func (f *controlFolder) close() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, h := range f.handles {
		h.mu.Lock()
		f.drop(h)
		h.mu.Unlock()
	}
	clear(f.handles)
}
