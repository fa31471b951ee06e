package fusefs

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/fusefs/fuseio"
	"github.com/shoalfs/shoal/internal/machine"
	"github.com/shoalfs/shoal/internal/profile/trace"
)

// Volume is the mounted data. It is safe for concurrent use.
type Volume interface {
	// Manifest returns the version in force for new lookups. It is called for nearly every request, so it must cost no
	// more than an atomic load. Returned manifests stay usable for the life of the mount: the kernel may have old
	// files open.
	Manifest() *catalog.Manifest

	// ReadAt fills p from the file's offset off, inside the file, and returns fewer bytes than len(p) only at its end.
	// ctx ends when the reader is interrupted; it is valid only until ReadAt returns. The fetch continues, and a later
	// read finds its result. Errors are [objstore.Error] or the context's.
	ReadAt(ctx context.Context, m *catalog.Manifest, file int, p []byte, off int64) (int, error)

	// Opened says that a reader has opened the file, before it reads: this signal tells the reader's position. process
	// is the thread, which identifies the reader; 0 if its pid namespace is not visible from here. It must be cheap
	// and must not block.
	Opened(m *catalog.Manifest, file int, process uint32)

	// Released says that the last descriptor of one open was closed. It comes some time after close(2), and not at all
	// if the mount is aborted.
	Released(m *catalog.Manifest, file int)

	// Lend returns the n bytes of the file from off, n > 0 and inside the file, from which the kernel copies them. They
	// must not change until release, which is called once, when the kernel has its copy: very soon, unless the reader's
	// buffer must be paged in. If they are not in memory, or not in one piece, ok is false and ReadNow is called. Lend
	// must not block. It saves 7% of the daemon's CPU (see the package's comment).
	Lend(m *catalog.Manifest, file int, off int64, n int) (data []byte, release func(), ok bool)

	// ReadNow fills p from the file's offset off, inside the file. It returns false, whatever it did to p, rather than
	// wait, as for a page that is not in the kernel's cache.
	ReadNow(m *catalog.Manifest, file int, p []byte, off int64) bool

	WasRead(m *catalog.Manifest, file int, off, n int64, process uint32) // n bytes from off; process is as for Opened

	State(m *catalog.Manifest, file int) string // the attribute user.shoal.state: "kept", "staged" or "remote"

	// Permissions returns a file's own mode bits, of which the mount shows those to read and to execute. If ok is
	// false, everybody may read.
	Permissions(m *catalog.Manifest, file int) (bits uint32, ok bool)

	// SetPages is called once, if pages are kept. What the kernel probably has need not be fetched ahead.
	SetPages(has func(m *catalog.Manifest, file int) bool)

	VersionName(m *catalog.Manifest) string     // by which another process knows it
	VersionNamed(name string) *catalog.Manifest // nil: unknown
}

// Control implements the files of .shoal. It is safe for concurrent use.
type Control interface {
	// Get returns the content of "stats", "order", "refresh" or "plans/NAME", or an error that wraps [fs.ErrNotExist].
	// The bytes do not change afterwards.
	Get(name string) ([]byte, error)

	// PutPlan checks a whole plan and installs it, or fails and keeps the old one. The caller owns data again when
	// PutPlan returns. Any error is EINVAL to the writer.
	PutPlan(name string, data []byte) error

	// RemovePlan ends a plan, or fails with an error that wraps [fs.ErrNotExist] if there is none.
	RemovePlan(name string) error

	Plans() []string // their names, for `ls .shoal/plans`

	// Refresh lists the source again and returns when a new version, if any, is in force. ctx ends when the caller is
	// killed.
	Refresh(ctx context.Context) error

	Record() (Recording, error) // is the content of .shoal/profile until it is closed; an error is EBUSY to the opener

	// Recording reports whether a recording is running. It is called for nearly every request, so it must cost no more
	// than an atomic load.
	Recording() bool

	Saw(m *catalog.Manifest, e trace.Event, at time.Time) // an action of a process, and when it began; e.At is not set

	Area(m *catalog.Manifest, file int, off int64) trace.Area // from which a read would be served now
}

// Witness records the users of a mount. Its methods are called before the reply, so they must not wait.
type Witness interface {
	Opening(who Caller)                     // of a file, each time
	Did(who Caller, file string, err error) // after an action through a file of .shoal, "plans/NAME" or "refresh"
}

// Caller identifies the process of a request, as the kernel reports it.
type Caller struct {
	Thread, UID, GID uint32 // Thread is 0 if its pid namespace is not visible from here
}

// Memory accounts for written plans until they are installed.
type Memory interface {
	Reserve(n int64) bool // does not block; if it cannot, the write fails with ENOMEM
	Release(n int64)
}

const fsName = "shoal" // for the kernel: mounts are of type fuse.shoal

// Defaults of [Options].
const (
	// trusted is how long the kernel trusts names, even missing ones, and attributes: a refresh tells it what has
	// changed.
	trusted = 4 * time.Hour
	// DefaultMaxBackground is how many asynchronous READs the kernel sends before it waits. Reads through the page
	// cache are asynchronous, so it bounds how many readers can wait for the store at a time. 64 readers of a store
	// that takes 30 ms got 290 files/s with the kernel's default of 12, 1,360 with 64, and 1,840 with 256; with warm
	// data and 8 readers there is no difference (BenchmarkSlowStore, BenchmarkCold).
	DefaultMaxBackground = 256
	// maxRequest is the largest READ, in bytes. Each goroutine that waits for a request has a buffer of this size. Four
	// readers of 16-MiB files in memory, with a read-ahead of 1 MiB: 1,069 MiB/s in READs of 128 KiB, 1,383 of 256,
	// 1,631 of 512, 640 of 1,024. With 512 and a read-ahead of 128 KiB 1,159, of 4 MiB 1,172. Files of 63 KB need one
	// READ in all cases. (Medians of 5 on a busy machine.)
	maxRequest = 512 << 10
)

// Options of a mount. The zero value of a field means its default.
type Options struct {
	KernelCache   bool    // keep a file's pages in the kernel's cache between opens
	AllowOther    bool    // let other users in; the kernel then checks the modes
	UID, GID      uint32  // owner of all nodes
	MaxBackground int     // asynchronous requests in flight
	ReadAhead     int     // bytes that the kernel reads ahead; set only if root
	Debug         bool    // log every message, at level Debug
	FsName        string  // the source, as df(1) shows it
	Transport     string  // TransportAuto, TransportURing or TransportDev
	RingMemory    int     // bounds the rings' buffers, in bytes of address space
	Memory        Memory  // accounts for staged plans
	Witness       Witness // records users of the mount; may be nil
	Holder        Holder  // has the mount while no process serves it; may be nil
	Note          []byte  // for the process that takes it over
	Logger        *slog.Logger
}

// plusFits reports whether every listing also gives the kernel the files' attributes (READDIRPLUS), which saves a
// LOOKUP at each file's stat or first open: find with a stat of each of a million files took 14 s and 2 s of this
// process's CPU with it, and 37 s and 14 s with a LOOKUP each (BenchmarkMillion). But each file then costs the kernel
// 1.1 KB, even in a walk that reads only names. The kernel frees that when it is short of memory; until then it may use
// a sixteenth. Beyond that, listings include attributes only when the kernel expects to need them (READDIRPLUS_AUTO).
func plusFits(files int, memory int64) bool {
	const kernelBytes = 952 + 192 // fuse_inode and dentry on Linux 6.18
	return int64(files) <= memory/16/kernelBytes
}

// Server is an active mount.
type Server struct {
	fs         *filesystem
	transport  *fuseio.Server
	why        string // it has no rings
	mountpoint string // absolute, without symbolic links
	device     string // of the mount, MAJOR:MINOR

	notifying sync.Mutex
	known     *catalog.Manifest // the latest whose names the kernel may know; nil once the server has ended

	stop sync.Once
	done chan struct{} // closed when the server has ended completely
}

// Mount mounts v and c at the folder mountpoint and serves until it is unmounted. It replaces the mount of a dead
// process. Errors name the thing, the cause and the remedy.
func Mount(mountpoint string, v Volume, c Control, o Options) (*Server, error) {
	o.MaxBackground = cmp.Or(o.MaxBackground, DefaultMaxBackground)
	o.FsName = cmp.Or(o.FsName, fsName)
	o.Logger = cmp.Or(o.Logger, slog.Default())
	k, err := takeKept(mountpoint, o.Holder)
	path := mountpoint
	if k == nil || errors.Is(err, errAborted) {
		k = nil
		path, err = freeMountpoint(mountpoint, o)
	}
	if err != nil {
		return nil, err
	}
	f := newFilesystem(v, c, o, k)
	root := os.Geteuid() == 0
	t, device, why, err := attach(f, path, mountOptions(v, o, root))
	if err != nil {
		f.kept.close()
		return nil, mountError(path, root, err)
	}
	if why != "" {
		o.Logger.Debug("requests come by /dev/fuse, not by io_uring", "why", why)
	}
	s := &Server{fs: f, transport: t, why: why, mountpoint: path, known: f.gens.known(), done: make(chan struct{})}
	if err := s.keep(); err != nil {
		f.kept.close() // the last descriptor
		return nil, err
	}
	go func() {
		defer close(s.done)
		t.Serve()
		s.notifying.Lock() // whoever notifies has been let go
		s.known = nil
		s.notifying.Unlock()
		f.control.close()
		f.kept.close()
		_ = device.Close() // unless that was done
	}()
	if k != nil {
		s.device = k.Device
		s.resume()
		return s, nil
	}
	// The device number comes from mountinfo, because a stat of the mount would be a request to this process.
	if mi, err := findMount(path); err == nil && mi != nil {
		s.device = mi.Device
	}
	if o.ReadAhead > 0 && root {
		bdi := filepath.Join("/sys/class/bdi", s.device, "read_ahead_kb")
		if err := os.WriteFile(bdi, []byte(strconv.Itoa(o.ReadAhead>>10)), 0); err != nil {
			o.Logger.Warn("read-ahead was not set; the kernel's default applies", "cause", err)
		}
	}
	return s, nil
}

// newFilesystem returns what answers the kernel. k is the mount if it was taken over.
func newFilesystem(v Volume, c Control, o Options, k *kept) *filesystem {
	stopping := make(chan struct{})
	f := &filesystem{
		RawFileSystem: fuse.NewDefaultRawFileSystem(), volume: v, opts: o, stopping: stopping,
		control: newControlFolder(c, o, stopping), kept: k,
	}
	var earlier []Word
	if f.draining.counts = new(counts); k != nil {
		earlier = k.words
	}
	f.gens = newGenerations(v, earlier)
	if o.KernelCache {
		v.SetPages(f.has)
	}
	return f
}

// freeMountpoint checks a mount point and who mounts there, removes a mount of a process that has died, and returns the
// path.
func freeMountpoint(mountpoint string, o Options) (path string, err error) {
	path, dead, err := check(mountpoint)
	if err == nil {
		err = MayMount(o)
	}
	if err != nil || !dead {
		return path, err
	}
	o.Logger.Warn("replacing the mount of a process that has died", "mountpoint", path)
	if err := unmount(path, true); err != nil {
		return "", fmt.Errorf(
			"mount point %s: a dead mount cannot be removed: %w (as its owner: fusermount3 -uz %s)", path, err, path)
	}
	if path, dead, err = check(path); err == nil && dead {
		err = fmt.Errorf("mount point %s: several dead mounts lie on it (umount -l %s until it is a folder again)",
			path, path)
	}
	return path, err
}

func mountOptions(v Volume, o Options, root bool) *fuse.MountOptions {
	mo := &fuse.MountOptions{
		AllowOther: o.AllowOther, FsName: o.FsName, Name: fsName, Debug: o.Debug,
		Logger:            slog.NewLogLogger(o.Logger.Handler(), slog.LevelDebug),
		DirectMountStrict: root, // no fallback: its error would hide the cause
		MaxBackground:     o.MaxBackground,
		MaxWrite:          maxRequest,
		// The content of a node never changes, so the kernel need not check times to keep pages.
		ExplicitDataCacheControl: true,
		// O_TRUNC comes with the open, so it is clear whose staged content it clears.
		ExtraCapabilities: fuse.CAP_ATOMIC_O_TRUNC | fuse.CAP_HAS_RESEND,
		PanicHandler: func(v any) fuse.Status {
			o.Logger.Error("panic while answering the kernel", "panic", v, "stack", string(debug.Stack()))
			return fuse.EIO
		},
	}
	if o.AllowOther {
		// Otherwise every user could read everything, whatever the modes. If only the owner has access, mutations
		// should return EROFS and not EACCES.
		mo.Options = append(mo.Options, "default_permissions")
	}
	if !plusFits(v.Manifest().Len(), machine.ReadMemory().Total) {
		mo.ExtraCapabilities |= fuse.CAP_READDIRPLUS_AUTO
	}
	return mo
}

func mountError(path string, root bool, err error) error {
	remedy := ""
	switch {
	case errors.Is(err, fuseio.ErrUnavailable): // which has its own
	case !root:
		remedy = " (the folder must belong to you)"
	case errors.Is(err, syscall.EPERM):
		remedy = " (root lacks the capability CAP_SYS_ADMIN; in a container: --cap-add SYS_ADMIN --device /dev/fuse, " +
			"and an AppArmor profile that lets it mount)"
	}
	return fmt.Errorf("mount on %s: %w%s", path, err, remedy)
}

// Device returns the number of the mount's device, MAJOR:MINOR, "" if it is not known.
func (s *Server) Device() string { return s.device }

// Wait returns when the mount is gone and the server has ended completely.
func (s *Server) Wait() { <-s.done }

// Unmount removes the mount. If it is in use, the error names the users; lazy detaches it at once, and it ends with its
// last user. Waiting reads end when their reader dies or the server stops; [Server.Wait] returns when all has ended.
func (s *Server) Unmount(lazy bool) error {
	select {
	case <-s.done:
		return nil
	default:
	}
	mi, err := findMount(s.mountpoint) // another process may have detached it, and even mounted something in its place
	if err == nil && mi != nil && mi.Device == s.device {
		err = unmountOrTell(s.mountpoint, lazy, 0)
	}
	if err == nil || lazy {
		s.stop.Do(func() { close(s.fs.stopping) })
	}
	return err
}

// Abort removes the mount even from its users: their open files fail from now on. [Server.Wait] returns when all has
// ended. Without root, open files cannot be aborted: then it is Unmount(true), and they fail when the process ends.
func (s *Server) Abort() error {
	s.stop.Do(func() { close(s.fs.stopping) })
	mi, err := findMount(s.mountpoint)
	if err != nil || mi == nil || mi.Device != s.device {
		return err
	}
	// The kernel aborts the connection even if it then finds the mount busy.
	if unix.Unmount(s.mountpoint, unix.MNT_FORCE|unix.UMOUNT_NOFOLLOW) == nil {
		return nil
	}
	return unmountOrTell(s.mountpoint, true, 0)
}

// errDraining is the error of an open once the mount is about to end. A trainer must not take the file for missing,
// as it might with ENOENT.
const errDraining = syscall.ESHUTDOWN

// draining ends a mount without interrupting readers in the middle of a file.
type draining struct {
	begun atomic.Bool
	*counts
}

// Drain refuses every open from now on, even of control files, with ESHUTDOWN. Open files can be read to their end.
func (s *Server) Drain() { s.fs.draining.begun.Store(true) }

// Draining reports whether Drain was called.
func (s *Server) Draining() bool { return s.fs.draining.begun.Load() }

// OpenFiles returns how many files of the dataset are open. It may be a little too high: the kernel releases a file
// some time after its last close(2), and not at all if an open was interrupted at the wrong moment.
func (s *Server) OpenFiles() int { return int(max(s.fs.draining.open.Load(), 0)) }

// Invalidate makes the kernel forget names, so that lookups see the version in force. Open files, and folders that
// are a process's working directory, stay as they are. It returns when that is done, or when the server ends. It may
// be called from [Control]. With files, it makes the kernel forget their bytes instead.
func (s *Server) Invalidate(files []int) {
	s.notifying.Lock()
	defer s.notifying.Unlock()
	if s.known == nil {
		return
	}
	now := s.fs.gens.current()
	for _, file := range files {
		s.transport.InodeNotify(uint64(makeID(now.number, kindFile, file)), 0, 0) // ENOENT: unknown to the kernel
	}
	if files == nil {
		s.notify(s.known, now.manifest)
		s.known = now.manifest
	}
}

// notify drops every name at the root, of both versions: also the new ones, because the kernel may remember that they
// were missing. Names below go with their folder.
func (s *Server) notify(before, now *catalog.Manifest) {
	for _, m := range []*catalog.Manifest{before, now} {
		root := m.Dir(0)
		for d := root.FirstDir; d < root.EndDir; d++ {
			s.transport.EntryNotify(uint64(rootID), m.Dir(d).Name) // ENOENT: unknown to the kernel
		}
		for file := root.FirstFile; file < root.EndFile; file++ {
			s.transport.EntryNotify(uint64(rootID), m.Name(file))
		}
		if before == now {
			break
		}
	}
	s.transport.InodeNotify(uint64(rootID), 0, 0) // attributes and the cached listing
}

const fuseConf = "/etc/fuse.conf" // in which an administrator enables allow_other

// MayMount checks what mounting needs besides the mount point.
func MayMount(o Options) error {
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENXIO), errors.Is(err, unix.ENODEV):
		return fmt.Errorf("/dev/fuse: %w (load the kernel module: modprobe fuse; in a container: --device /dev/fuse "+
			"--cap-add SYS_ADMIN)", err)
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		return fmt.Errorf(
			"/dev/fuse: %w (chmod 666 /dev/fuse; in a container: --device /dev/fuse --cap-add SYS_ADMIN)", err)
	case err != nil:
		return fmt.Errorf("/dev/fuse: %w", err)
	}
	_ = unix.Close(fd)
	if os.Geteuid() == 0 {
		return nil
	}
	if _, err := fuseio.Fusermount(); err != nil {
		return err
	}
	if !o.AllowOther {
		return nil
	}
	conf, err := os.ReadFile(fuseConf)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("%s: %w", fuseConf, err)
	}
	for line := range strings.Lines(string(conf)) {
		if strings.TrimSpace(line) == "user_allow_other" {
			return nil
		}
	}
	return fmt.Errorf("--allow-other: %s does not have the line user_allow_other (add it, or mount as root)", fuseConf)
}
