package folder

import (
	"archive/zip"
	"cmp"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"os/signal"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"
)

// DefaultLast are patterns of names that say that others are whole: they are published after all closed before.
var DefaultLast = []string{".metadata", "*.index.json", "latest*", "commit_success.txt", "_SUCCESS",
	"trainer_state.json", "_CHECKPOINT_METADATA", "metadata.json", "metadata.pkl"}

// NoFile is why a path is skipped that is neither a file nor a folder.
const NoFile = "it is a link, a pipe, a socket or a device"

// LastNames returns a function that reports whether a path matches one of DefaultLast, or of the given patterns, which
// are path.Match's: of the path if there is a slash in it, else of its last component. Malformed ones are an error.
func LastNames(globs ...string) (func(name string) bool, error) {
	globs = slices.Concat(DefaultLast, globs)
	for _, g := range globs {
		_, err := path.Match(g, "")
		if err == nil && !fs.ValidPath(g) { // such as that of a variable that is not set
			err = errors.New("no path in the folder is like that")
		}
		if err != nil {
			return nil, fmt.Errorf("pattern %q: %w (allowed are *, ?, [a-z] and \\)", g, err)
		}
	}
	return func(name string) bool {
		return slices.ContainsFunc(globs, func(g string) bool {
			base, _ := path.Match(g, path.Base(name))
			whole, _ := path.Match(g, name)
			return whole || base && !strings.Contains(g, "/")
		})
	}, nil
}

// temp are names of what isn't finished: how a component begins, ends, and what it has in it.
var temp = regexp.MustCompile(`(?i)(^|/)(\.tmp|tmp[-_])|\.tmp[.-]|-tmp-|orbax-checkpoint-tmp|` +
	`(\.tmp|\.temp|\.part|\.partial|\.incomplete|\.inprogress|\.__lock|~)(/|$)`)

// Temporary reports whether a component of a path is a name of something unfinished.
func Temporary(name string) bool { return temp.MatchString(name) }

// form returns why a file isn't what its name says, or nil. Of most names it knows nothing.
func form(name string, r io.ReaderAt, size int64) (err error) {
	var head [8]byte
	n, _ := r.ReadAt(head[:], 0)
	switch ext := strings.ToLower(path.Ext(name)); {
	case ext == ".safetensors":
		err = safetensors(binary.LittleEndian.Uint64(head[:]), r, size)
	case slices.Contains([]string{".pt", ".pth", ".ckpt", ".bin"}, ext) && string(head[:min(n, 4)]) == "PK\x03\x04":
		_, err = zip.NewReader(r, size)
	case head[0] == 0 && (strings.HasPrefix(ext, ".pt") || n == 0 && ext == ".ckpt"):
		err = errors.New("it is empty, or begins with zeros")
	}
	return err
}

// safetensors compares a file's size with its header, a JSON object of so many bytes after a u64; the data follow.
func safetensors(header uint64, r io.ReaderAt, size int64) error {
	if size < 8 || header > min(100_000_000, uint64(size-8)) { // safetensors reads no longer one
		return fmt.Errorf("a header of %d bytes in a file of %d", header, size)
	}
	var tensors map[string]struct {
		Offsets json.RawMessage `json:"data_offsets"`
	}
	end, err := int64(0), json.NewDecoder(io.NewSectionReader(r, 8, int64(header))).Decode(&tensors)
	for name, t := range tensors {
		var offsets [2]int64
		if err == nil && name != "__metadata__" {
			err = json.Unmarshal(t.Offsets, &offsets)
			end = max(end, offsets[1])
		}
	}
	if data := size - 8 - int64(header); err == nil && data != end {
		return fmt.Errorf("%d bytes of data, and %d by its header", data, end)
	}
	return err
}

// A refusal says what it means that a file cannot be opened, or a lease not be had.
type refusal struct {
	state State
	why   string
}

func (r refusal) Error() string { return r.why }

// Errors of Hold. After each of them the file is looked at again, and Next has news of it.
var (
	ErrWriting error = refusal{Writing, "somebody can write it"}
	ErrChanged       = errors.New("it has changed")
	ErrGone    error = refusal{Gone, "it no longer exists"}

	refusals = map[error]error{unix.EAGAIN: ErrWriting, unix.ENOENT: ErrGone, unix.ENOTDIR: ErrGone,
		unix.ELOOP: ErrGone, unix.EINVAL: ErrGone, unix.ENXIO: ErrGone, // which is no file any more
		unix.EXDEV:  refusal{Skipped, "another file system is mounted there"},
		unix.EACCES: refusal{Skipped, "it belongs to another user (run shoal ckpt as the trainer's user)"}}
)

// open opens what is below the folder, on its file system, and never through a link.
func (f *Folder) open(p string, flags uint64) (*os.File, error) {
	fd, err := unix.Openat2(f.at, p, &unix.OpenHow{Flags: flags | unix.O_NOFOLLOW | unix.O_CLOEXEC | unix.O_NOCTTY,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_XDEV})
	return os.NewFile(uintptr(fd), p), err
}

// lease opens a file for reading, and takes the lease. Closing the file, also after an error, gives it back.
func (f *Folder) lease(p string) (file *os.File, print Print, err error) {
	if file, err = f.open(p, unix.O_NONBLOCK); err == nil {
		_, err = unix.FcntlInt(file.Fd(), unix.F_SETLEASE, unix.F_RDLCK)
	}
	if err == nil {
		st, statErr := stat(int(file.Fd()), "") // now nobody writes it
		print, err = printOf(&st), statErr
	}
	return file, print, err
}

// look says what a path is. It waits until the clock has passed the file's Print, some ms at most, and until an empty
// file is 0.1 s old, unless an event has said that it was closed: what comes after it may be a last name.
func (f *Folder) look(t turn) (now News, err error) {
	now.Path = t.path
	st, err := stat(f.at, t.path)
	kind := st.Mode & unix.S_IFMT
	switch {
	case err != nil:
	case Temporary(t.path):
		now.State = temporary
	case !utf8.ValidString(t.path), f.Prefix+len(t.path) > 1024:
		now.State, now.Why = Skipped, "a key of S3 is UTF-8, and no longer than 1,024 bytes"
	case kind == unix.S_IFDIR:
		dir, openErr := f.open(t.path, unix.O_DIRECTORY)
		dir.Close()
		now.State, err = aFolder, openErr
	case kind != unix.S_IFREG:
		now.State, now.Why = Skipped, NoFile
	default:
		for early := time.Duration(1); err == nil && early > 0; time.Sleep(early) {
			early, err = f.inspect(t, &now)
		}
	}
	if r, ok := errors.AsType[refusal](cmp.Or(refusals[err], err)); ok {
		now, err = News{Path: t.path, State: r.state, Why: r.why}, nil
	}
	if now.State == Skipped && kind == unix.S_IFREG {
		now.State = Torn // the last names of its folder may name it
	}
	// its other names have changed too
	f.stale = f.stale || st.Nlink > 1 && !now.Print.SameContent(f.known[t.path].Print)
	return now, err
}

// inspect looks at a regular file, under the lease. It says how long to wait while a write could leave the Print so.
func (f *Folder) inspect(t turn, now *News) (early time.Duration, err error) {
	file, print, err := f.lease(t.path)
	if err != nil {
		file.Close()
		return 0, err
	}
	defer file.Close()
	var clock unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_REALTIME_COARSE, &clock) // every kernel has it
	age := time.Duration(clock.Nano() - print.Ctime)
	if print.Ctime%1e9 == 0 {
		age -= time.Second - 1 // a file system that keeps whole seconds
	}
	if age <= 0 && age > -2*time.Second { // beyond, the clock was set back
		return time.Millisecond - age/2, nil
	}
	now.State, now.Print = Whole, print
	if f.formed[t.path] != print {
		if why := form(t.path, file, print.Size); why != nil {
			now.State, now.Why = Torn, why.Error()
		} else {
			f.formed[t.path] = print
		}
	}
	if print.Size == 0 && !t.closed && age > 0 && age < time.Second/10 {
		return time.Second/10 - age, nil // perhaps it was made, and not opened yet
	}
	return 0, nil
}

// A Held is a file that nobody has written since Hold.
type Held struct {
	io.ReaderAt
	Broken chan struct{} // closed when somebody wants to write, and by Close
	file   *os.File
	sigio  chan os.Signal
}

// Unchanged returns an error if a file has other content, or somebody can write it.
func (f *Folder) Unchanged(p string, print Print) error {
	file, now, err := f.lease(p)
	file.Close()
	if err == nil && !now.SameContent(print) {
		err = ErrChanged
	}
	return cmp.Or(refusals[err], err)
}

// Hold opens a file that has this Print, and takes the lease. Its errors wrap ErrWriting, ErrChanged or ErrGone.
func (f *Folder) Hold(p string, print Print) (*Held, error) {
	file, now, err := f.lease(p)
	if err == nil && now != print {
		err = ErrChanged
	}
	if err != nil {
		file.Close()
		f.mu.Lock()
		defer f.mu.Unlock()
		f.push(turn{path: p, closed: true})
		f.ring()
		return nil, fmt.Errorf("%s: %w", p, cmp.Or(refusals[err], err))
	}
	h := &Held{file, make(chan struct{}), file, make(chan os.Signal, 1)}
	h.sigio <- unix.SIGIO // it may have come already
	signal.Notify(h.sigio, unix.SIGIO)
	go h.answer()
	return h, nil
}

// answer gives the lease back when a writer waits for it.
func (h *Held) answer() {
	defer close(h.Broken)
	for range h.sigio {
		if !h.Whole() {
			_, _ = unix.FcntlInt(h.file.Fd(), unix.F_SETLEASE, unix.F_UNLCK) // fails if the kernel has taken it
			return
		}
	}
}

// Sync makes a file durable under its name. Its error may be ErrGone.
func (f *Folder) Sync(p string) error {
	file, err := f.open(p, unix.O_NONBLOCK)
	if err == nil {
		err = file.Sync()
	}
	if file.Close(); err != nil || p == "." {
		return cmp.Or(refusals[err], err)
	}
	return f.Sync(path.Dir(p))
}

// Whole reports whether nobody has written, or wanted to, since Hold.
func (h *Held) Whole() bool {
	kind, err := unix.FcntlInt(h.file.Fd(), unix.F_GETLEASE, 0)
	return err == nil && kind == unix.F_RDLCK
}

// Close gives the lease back.
func (h *Held) Close() error {
	signal.Stop(h.sigio)
	close(h.sigio)
	<-h.Broken
	return h.file.Close()
}

// Home is the folder, in the one that is followed, that is the daemon's. Socket is its socket there.
const Home, Socket = ".shoal", "ckpt.sock"

// MakeHome makes Home at a path. Whoever may enter the folder around it reaches the socket; what else is there is 0600.
func MakeHome(at string) {
	_ = os.Mkdir(at, 0o755) // there may be one
	if d, err := os.OpenFile(at, unix.O_DIRECTORY|unix.O_NOFOLLOW, 0); err == nil {
		_ = d.Chmod(0o755) // whatever the umask, or an older release, has left
		d.Close()
	}
}

// Own reports whether a path is the daemon's.
func Own(p string) bool { return p == Home || strings.HasPrefix(p, Home+"/") }

// CheckSocket returns nil if the socket of a daemon of dir is there. In a folder like /tmp anybody can make one, which
// says what he likes: it counts if it is root's, this user's, or that of the folder's owner.
func CheckSocket(dir string) error {
	if _, err := os.Lstat(filepath.Join(dir, Home, Socket)); err != nil {
		return err
	}
	var around, home unix.Stat_t
	if err := cmp.Or(unix.Stat(dir, &around), unix.Lstat(filepath.Join(dir, Home), &home)); err != nil {
		return err
	}
	if around.Mode&unix.S_IWOTH != 0 && home.Uid != 0 && home.Uid != around.Uid && int(home.Uid) != os.Geteuid() {
		return fs.ErrNotExist
	}
	return nil
}

// AtSocket calls f with a short path of the socket of the daemon of dir: its own may be longer than addresses can be.
func AtSocket(dir string, f func(address string) error) error {
	at, err := os.Open(filepath.Join(dir, Home))
	if err != nil {
		return err
	}
	defer at.Close()
	return f(fmt.Sprintf("/proc/self/fd/%d/%s", at.Fd(), Socket))
}

// shared are file systems that others write unnoticed: a lease or inotify says nothing of other hosts.
var shared = map[uint32]string{0x6969: "NFS", 0x65735546: "FUSE", 0x517B: "SMB", 0xFF534D42: "CIFS", 0xFE534D42: "SMB",
	0x00C36400: "CephFS", 0x01021997: "9p", 0x0BD00BD0: "Lustre", 0x47504653: "GPFS", 0x5346414F: "AFS",
	0x19830326: "BeeGFS", 0x7461636F: "OCFS2", 0x01161970: "GFS2", 0x6B414653: "AFS", 0x73757245: "Coda"}

// refuse fails if the folder cannot be followed, or another daemon does. It locks it.
func (f *Folder) refuse() error {
	var system unix.Statfs_t
	dir, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", f.at))
	if err = cmp.Or(err, unix.Fstatfs(f.at, &system)); err != nil {
		return err
	} else if name := shared[uint32(system.Type)]; name != "" {
		return fmt.Errorf(
			"it is on %s: writers of other hosts are not noticed (use a folder on a local disk or tmpfs)", name)
	} else if system.Type == unix.OVERLAYFS_SUPER_MAGIC {
		f.Log.Warn("on overlayfs a file that is closed, and still written through a mapping, counts as whole",
			"folder", dir, "remedy", "if your saver maps files, name a folder on a volume")
	}
	if err := unix.Flock(f.at, unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return fmt.Errorf("lock: %w (another process follows it already: end that one, or name another folder)", err)
	}
	for f.Dir = dir; dir != "/" && !f.Inner; dir = filepath.Dir(dir) {
		if err := ours(dir); err != nil {
			return err
		}
	}
	at := filepath.Join(f.Dir, Home)
	MakeHome(at)
	file, err := os.CreateTemp(at, "probe-*")
	if err = cmp.Or(os.MkdirAll(at, 0o755), err); err != nil { // which says why there is no Home, if there is none
		return fmt.Errorf("%w (free some space, if there is none; and run shoal ckpt as the trainer's user)", err)
	}
	name := filepath.Join(Home, filepath.Base(file.Name()))
	_, watched := unix.InotifyAddWatch(f.queue, at, unix.IN_CLOSE_WRITE)
	_, _, refused := f.lease(name)
	file.Close()
	held, _, err := f.lease(name)
	held.Close()
	_ = os.Remove(file.Name())
	_, told := unix.Read(f.queue, f.buf[:])
	if err = errors.Join(watched, told, err); err != nil || !errors.Is(refused, unix.EAGAIN) {
		return fmt.Errorf("a lease or inotify does not work there: %w, %w (use a folder on a local disk or tmpfs)",
			err, refused)
	}
	return nil
}

// ours fails if a folder around or below belongs to something else of shoal.
func ours(dir string) error {
	var st unix.Stat_t
	if unix.Stat(dir+"/FORMAT", &st) == nil && unix.Stat(dir+"/segments/.", &st) == nil {
		return fmt.Errorf("%s is a cache directory of shoal (name a folder that isn't in one, nor around one)", dir)
	}
	answers := func(address string) error {
		c, err := net.Dial("unix", address)
		if err == nil {
			c.Close()
		}
		return err
	}
	if AtSocket(dir, answers) == nil {
		return fmt.Errorf(
			"another daemon follows %s (end that one, or name a folder that isn't in its, nor around it)", dir)
	}
	return nil
}
