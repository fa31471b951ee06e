// Package folder tells which files of a folder tree are whole, as programs write them.
//
//  1. A file is whole when nobody can write it: a read lease is refused while anybody has it open for writing or mapped
//     so. That it was closed says less. Its form must be that of its name as well, or else it is torn.
//  2. An event of inotify only says: look at this path. Events, scans, an overflow and the start have one code, step.
//  3. News come in the order of the last closes. After a look the queue is drained: if the file was closed again, its
//     turn comes later. A close makes its event before it lets go of the file, so files that were closed and refused
//     are looked at again before any other, and from time to time. What a scan finds comes by ctime, of the same age
//     the deepest first, and last the last names of the folder itself.
//  4. A Print is reported only when the kernel's clock has passed it: the next write makes another one.
//     Exception: a mapping of a file on tmpfs that reads a page before it writes it changes no time of the file.
//  5. A lease is held only by a Held, and given back as soon as somebody wants to write, who waits until then. An open
//     for writing with O_NONBLOCK fails instead with EWOULDBLOCK, as with any lease.
//  6. What was reported, and is as it was, isn't reported again. What was reported, and is no more, is Gone.
//  7. Files with temporary names wait for their rename: there are no news of them, and their folders are not watched.
//  8. What is written through a name outside the folder is noticed when its name in the folder is looked at.
//  9. If anything happens during a look at many files, it may have missed what was closed before a last name that it
//     found. So a last name that Next has not reported is called Writing after that, and Next reports it in its turn.
package folder

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Print identifies the content of a file: a write makes another one. Size is in bytes, times are in ns since 1970.
type Print struct {
	Dev   uint64 `json:"dev"`
	Ino   uint64 `json:"ino"`
	Size  int64  `json:"size"`
	Mtime int64  `json:"mtime"`
	Ctime int64  `json:"ctime"`
	Birth int64  `json:"birth,omitempty"` // 0 where the file system knows none
}

// SameContent ignores Ctime, which a new name of the file, a rename or a chmod changes. Birth tells a file from one
// that has got its inode since, and whose Mtime was set, as tar and cp -p do.
func (p Print) SameContent(other Print) bool {
	p.Ctime = other.Ctime
	return p == other
}

// stat is of a path below an open folder, or of what is open if it is "". Links are not followed.
func stat(at int, p string) (st unix.Statx_t, err error) {
	err = unix.Statx(at, p, unix.AT_SYMLINK_NOFOLLOW|unix.AT_EMPTY_PATH, unix.STATX_BASIC_STATS|unix.STATX_BTIME, &st)
	return st, err
}

func printOf(st *unix.Statx_t) Print {
	ns := func(t unix.StatxTimestamp) int64 { return t.Sec*1e9 + int64(t.Nsec) }
	return Print{unix.Mkdev(st.Dev_major, st.Dev_minor), st.Ino, int64(st.Size), ns(st.Mtime), ns(st.Ctime),
		ns(st.Btime)}
}

// State is what a path was found to be.
type State uint8

// The states of a path.
const (
	_         State = iota
	Whole           // nobody can write it, and its form is right
	Writing         // somebody can write it
	Gone            // it was reported, and is no more
	Torn            // nobody can write it, and it isn't what its name says; or it cannot be read
	Skipped         // it cannot become an object
	temporary       // it waits for its rename
	aFolder
)

// News is what a path, relative to the folder and with slashes, has become.
type News struct {
	Path  string
	State State
	Print Print // of Whole and Torn
	Why   string
}

// Counts are how many paths are in each of these states. A temporary folder counts as one.
type Counts struct{ Temporary, Torn, Skipped, Writing int }

// Options of Open.
type Options struct {
	Last   func(path string) bool // as made by LastNames
	Prefix int                    // bytes of a key before the path
	Looked func(files, of int)    // hears how far the first Look is; may be nil
	Inner  bool                   // it may lie in a folder that a daemon follows
	Log    *slog.Logger
}

// A Folder follows a folder tree.
type Folder struct {
	Options
	Dir       string // absolute, without links
	at, queue int    // descriptors of the folder, and of inotify
	inotify   *os.File
	buf       [16 << 10]byte

	mu    sync.Mutex // guards what follows
	known map[string]News
	// of what had its form: it is read again, which takes up to some ms, when the Print is another
	formed  map[string]Print
	news    []News
	watches map[int32]string // folders by watch descriptor
	stale   bool             // what is known may be something else
	line    []*turn
	places  map[string]*turn // the last turn of each path in line
	refused []string         // what is Writing, in this order
	pause   time.Duration    // until they have their next turn
}

// Open begins to follow a folder, and makes .shoal in it, which is not reported. It refuses, with the remedy, what
// cannot work: shared file systems, cache directories of shoal, a folder that is followed, too low limits of inotify.
func Open(dir string, o Options) (_ *Folder, err error) {
	f := &Folder{Options: o, queue: -1, known: map[string]News{}, formed: map[string]Print{},
		watches: map[int32]string{}, places: map[string]*turn{}, pause: time.Second}
	if f.at, err = unix.Open(dir, unix.O_DIRECTORY|unix.O_CLOEXEC, 0); err != nil {
		return nil, fmt.Errorf("folder %s: %w (name the folder that the trainer saves into)", dir, err)
	}
	if f.queue, err = unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK); err != nil {
		err = fmt.Errorf("inotify: %w (if there are too many, raise sysctl fs.inotify.max_user_instances)", err)
	}
	f.inotify = os.NewFile(uintptr(f.queue), "inotify")
	if err = cmp.Or(err, f.refuse()); err == nil {
		err = f.scan(".")
	}
	if err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("folder %s: %w", dir, err)
	}
	return f, nil
}

// Close is called when all other calls have returned.
func (f *Folder) Close() error {
	_ = unix.Flock(f.at, unix.LOCK_UN) // a child that is being forked has the descriptor as well
	return errors.Join(f.inotify.Close(), unix.Close(f.at))
}

// At is a path below the folder, whose own name another folder, or a link, may have by now. It holds until Close.
func (f *Folder) At(p string) string { return fmt.Sprintf("/proc/self/fd/%d/", f.at) + p }

// Counts says how much waits, or is left out.
func (f *Folder) Counts() Counts {
	f.mu.Lock()
	defer f.mu.Unlock()
	var n [aFolder]int
	for _, k := range f.known {
		n[k.State]++
	}
	return Counts{n[temporary], n[Torn], n[Skipped], n[Writing]}
}

// Next returns what is new, in the order in which files were closed; it waits until something is. The first calls give
// the whole tree. It is called by one goroutine. After an error it may be called again, and nothing is lost.
func (f *Folder) Next(ctx context.Context) (news []News, err error) {
	conn, err := f.inotify.SyscallConn()
	defer context.AfterFunc(ctx, func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.ring()
	})()
	for news == nil && err == nil {
		_ = f.inotify.SetReadDeadline(time.Time{})
		_ = conn.Read(func(uintptr) bool { // again after an event: none is missed if it comes before the wait
			f.mu.Lock()
			defer f.mu.Unlock()
			if err = ctx.Err(); err == nil {
				err = f.work()
			}
			news, f.news = f.news, nil
			_ = f.inotify.SetReadDeadline(time.Now().Add(f.pause))
			return news != nil || err != nil
		})
	}
	if news != nil {
		err = nil // it comes again
	}
	return news, err
}

// ring wakes Next, under the mutex.
func (f *Folder) ring() { _ = f.inotify.SetReadDeadline(time.Unix(1, 0)) }

// Look says now what each file is, also what hasn't changed, but for temporary names. Next will report what it hasn't.
func (f *Folder) Look() (news []News, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	defer f.ring()
	err = f.drain()
	before := len(f.line)
	all, walkErr := f.walk(".")
	var looked []News
	for i := range all {
		all[i].closed = true
		now, lookErr := f.look(all[i])
		looked, walkErr = append(looked, now), cmp.Or(walkErr, lookErr)
		if f.Looked != nil {
			f.Looked(i+1, len(all))
		}
	}
	f.Looked = nil
	err = cmp.Or(err, walkErr, f.drain())
	quiet := len(f.line) == before
	for i, now := range looked {
		if now.State < temporary {
			news = append(news, now)
		}
		if was, ok := f.known[now.Path]; now != was {
			if now.State < temporary && (ok || now.State != Gone) {
				f.known[now.Path] = News{Path: now.Path} // whatever it is then, Next says it
			}
			if f.push(all[i]); !quiet && now.State == Whole && f.Last(now.Path) { // rule 9
				now = News{Path: now.Path, State: Writing, Why: ErrWriting.Error()}
				news, f.known[now.Path] = append(news, now), now
				if was.State != Writing {
					f.refused = append(f.refused, now.Path)
				}
			}
		}
	}
	return news, err
}

// Know tells that a file had its form when its Print was this.
func (f *Folder) Know(p string, print Print) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.formed[p] = print
}

// A turn is a path that is to be looked at.
type turn struct {
	path   string
	closed bool  // by an event that says so: what is empty then is meant to be
	print  Print // by a scan
	last   int
	own    int // a last name of the folder that is looked through
}

// push gives a path its turn, after all others.
func (f *Folder) push(t turn) {
	f.places[t.path] = &t
	f.line = append(f.line, &t)
}

// first gives paths their turn before all others, but those that have theirs already.
func (f *Folder) first(turns ...turn) {
	later := f.line
	f.line = nil
	for _, t := range turns {
		if f.places[t.path] == nil {
			f.push(t)
		}
	}
	f.line = append(f.line, later...)
}

// drain takes all events that there are.
func (f *Folder) drain() error {
	for {
		n, err := unix.Read(f.queue, f.buf[:])
		if errors.Is(err, unix.EAGAIN) {
			return nil
		} else if err != nil {
			return fmt.Errorf("inotify: %w", err)
		}
		for b := f.buf[:n]; len(b) > 0; {
			u := binary.NativeEndian.Uint32
			wd, mask, end := int32(u(b)), u(b[4:]), unix.SizeofInotifyEvent+u(b[12:])
			name, _, _ := bytes.Cut(b[unix.SizeofInotifyEvent:end], []byte{0})
			b = b[end:]
			dir, ok := f.watches[wd]
			switch p := path.Join(dir, string(name)); {
			case mask&unix.IN_Q_OVERFLOW != 0:
				f.Log.Warn("the kernel dropped events of the folder: scanning all of it again", "folder", f.Dir)
				f.stale = true
				f.push(turn{path: "."})
			case mask&unix.IN_IGNORED != 0:
				delete(f.watches, wd)
			case ok && !Own(p) && mask&unix.IN_ATTRIB != 0: // which changes nothing in the order of what was closed
				f.stale = true
			case ok && !Own(p):
				f.stale = f.stale || mask&unix.IN_ISDIR != 0 && mask&(unix.IN_DELETE|unix.IN_MOVED_FROM) != 0
				f.push(turn{path: p, closed: mask&(unix.IN_CLOSE_WRITE|unix.IN_MOVED_TO) != 0})
			}
		}
	}
}

// work gives all in line their turn, and gathers the news.
func (f *Folder) work() error {
	var a, b unix.Stat_t
	if unix.Stat(f.Dir, &a) != nil || unix.Fstat(f.at, &b) != nil || a.Dev != b.Dev || a.Ino != b.Ino {
		return fmt.Errorf("folder %s was removed, renamed or unmounted (start shoal ckpt again when it is back)", f.Dir)
	}
	if err := f.drain(); err != nil {
		return err
	}
	f.pause = min(2*f.pause, time.Second)
	for done := false; !done && len(f.news) < 256; {
		var turns []*turn
		for _, p := range f.refused {
			turns = append(turns, &turn{path: p})
		}
		if len(f.line) > 0 {
			t := f.line[0]
			if f.line = f.line[1:]; f.places[t.path] != t {
				continue // it comes later
			}
			delete(f.places, t.path)
			turns = append(turns, t)
		} else if done = !f.stale; f.stale {
			f.sweep()
		}
		for _, t := range turns {
			if err := f.step(*t); err != nil {
				f.first(*t, *turns[len(turns)-1])
				return fmt.Errorf("folder %s: %s: %w", f.Dir, t.path, err)
			}
		}
	}
	return nil
}

// step looks at a path and learns what it is, if nothing was heard of it meanwhile.
func (f *Folder) step(t turn) error {
	now, err := f.look(t)
	if err == nil {
		err = f.drain()
	}
	if f.places[t.path] != nil || err != nil {
		return err
	}
	if now.State == aFolder {
		err = f.scan(t.path)
		now.State = Gone // if it was a file
	}
	was, ok := f.known[t.path]
	if f.known[t.path] = now; now.State == Gone {
		delete(f.known, t.path)
		delete(f.formed, t.path)
	}
	if now.State != Writing {
		f.refused = slices.DeleteFunc(f.refused, func(p string) bool { return p == t.path })
	} else if was.State != Writing {
		f.refused = append(f.refused, t.path)
	}
	if now.State == Writing && (t.closed || now != was) {
		f.pause = time.Millisecond
	}
	if was != now && (ok || now.State != Gone) && now.State < temporary && was.State < temporary {
		f.news = append(f.news, now)
	}
	return err
}

// sweep gives what is known a turn if it is something else now.
func (f *Folder) sweep() {
	f.stale = false
	for _, p := range slices.Sorted(maps.Keys(f.known)) {
		if st, err := stat(f.at, p); err != nil || printOf(&st) != f.known[p].Print {
			f.push(turn{path: p})
		}
	}
}

// scan watches a folder and all below, and gives what it finds a turn. What was closed before one of its last names may
// be in line: then last names come after all others, by ctime.
func (f *Folder) scan(dir string) error {
	all, err := f.walk(dir)
	all = slices.DeleteFunc(all, func(t turn) bool { return f.known[t.path] == News{t.path, Whole, t.print, ""} })
	err = cmp.Or(err, f.drain())
	alone := len(f.line) == 0
	if f.first(all...); alone || !slices.ContainsFunc(all, func(t turn) bool { return t.last > 0 }) {
		return err
	}
	ages := map[*turn]int64{} // of last names
	for _, t := range f.line {
		if f.Last(t.path) {
			if st, _ := stat(f.at, t.path); st.Mode&unix.S_IFMT == unix.S_IFREG {
				ages[t] = printOf(&st).Ctime
			}
		}
	}
	slices.SortStableFunc(f.line, func(a, b *turn) int { return cmp.Compare(ages[a], ages[b]) })
	return err
}

// walk lists what is below a folder, but folders that can be entered: by ctime; its own last names, which may name all,
// last. It watches each before it reads it.
func (f *Folder) walk(dir string) (all []turn, err error) {
	root := f.At("")
	err = filepath.WalkDir(root+dir, func(at string, d fs.DirEntry, err error) error {
		var t turn
		if t.path, _ = filepath.Rel(root, at); Own(t.path) {
			return fs.SkipDir
		}
		if err == nil && d.IsDir() {
			if now, _ := f.look(t); now.State == aFolder {
				wd, err := unix.InotifyAddWatch(f.queue, at, unix.IN_CLOSE_WRITE|unix.IN_MOVE|unix.IN_CREATE|
					unix.IN_DELETE|unix.IN_ATTRIB)
				if errors.Is(err, fs.ErrNotExist) {
					return fs.SkipDir // it has an event
				} else if err != nil {
					return fmt.Errorf("inotify: %s: %w (if no watch is left, raise sysctl fs.inotify.max_user_watches)",
						t.path, err)
				}
				if f.watches[int32(wd)] = t.path; t.path != "." {
					err = ours(filepath.Join(f.Dir, t.path))
				}
				return err
			}
			err = fs.SkipDir
		}
		st, _ := stat(unix.AT_FDCWD, at)
		if t.print = printOf(&st); f.Last(t.path) {
			if t.last = 1; path.Dir(t.path) == dir {
				t.own = 1
			}
		}
		all = append(all, t)
		if is, ok := errors.AsType[unix.Errno](err); ok && refusals[is] != nil {
			err = nil // it comes as what it is by then
		}
		return err
	})
	slices.SortFunc(all, func(a, b turn) int {
		return cmp.Or(a.own-b.own, cmp.Compare(a.print.Ctime, b.print.Ctime), a.last-b.last,
			strings.Count(b.path, "/")-strings.Count(a.path, "/"), cmp.Compare(a.path, b.path))
	})
	return all, err
}
