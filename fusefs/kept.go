package fusefs

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/fusefs/fuseio"
)

// A mount outlives the process that serves it where another one holds its descriptors, which are /dev/fuse and a file
// in memory, the memo. At every moment it is
//
//   - served: a process answers. What the kernel is about to learn is written into the memo before.
//   - held: nobody answers, and requests wait, also those that the dead process had read.
//   - taken over: a process was given the descriptors. It reads in the memo under which numbers the kernel knows
//     versions, and what was agreed on with the first request, which comes once. It serves, and has the kernel send
//     again what was read and not answered (FUSE_NOTIFY_RESEND, Linux 6.9).
//   - gone: it was unmounted or aborted, or nobody has the descriptors any more. Requests fail.
//
// Whoever holds a mount neither reads /dev/fuse nor asks it. Descriptors of an unmounted mount keep nothing alive.
//
// Handles of the dataset's files mean nothing, so they stay valid. Those of .shoal name a life of the mount: what was
// written to a plan and not closed is lost with its life, and write, close and read fail with EIO.
//
// Which nodes of a version the kernel knows is not taken over, so the versions that were there stay as long as the
// process. How many files are open is in the memo. A request that is answered twice may make it wrong by one.

// Holder has the descriptors of mounts while no process serves them.
type Holder interface {
	Keep(mountpoint string, files ...*os.File) (drop func()) // gives it a mount's, until drop is called
	Held(mountpoint string) []*os.File                       // of a dead process, or nil; the caller closes them
}

// ErrUnmounted says that a mount was unmounted while it was held.
var ErrUnmounted = errors.New("it was unmounted while no daemon served it")

// Memo is what another process must know of a mount.
type Memo struct {
	Mountpoint, Device string
	Source             string // Options.FsName
	Note               []byte // Options.Note
	First              []byte // the kernel's first request, with what was agreed on
	MaxWrite           int
}

// Word is a line of the memo after the first: a version's number, or one that the kernel knows no more. Older programs
// also wrote the names of plans, with the number 0.
type Word struct {
	Generation uint64
	Version    string
	Gone       uint64 `json:",omitempty"`
}

const memoText = 4096 // where the memo's lines begin; before it are the counts

type counts struct {
	open  atomic.Int64 // files of the dataset
	lives atomic.Int64
}

// kept is a mount's descriptors and memo.
type kept struct {
	Memo
	*counts
	words      []Word // when it was taken over
	fuse, memo *os.File
	drop       func()
	mu         sync.Mutex // of writes
}

// newKept makes the memo of a mount that is served by device, which it owns.
func newKept(device *os.File, m Memo) (k *kept, err error) {
	k = &kept{Memo: m, fuse: device, drop: func() {}}
	memo, err := unix.MemfdCreate("shoal mount", unix.MFD_CLOEXEC)
	if err != nil {
		return k, os.NewSyscallError("memfd_create", err)
	}
	k.memo = os.NewFile(uintptr(memo), "memo")
	if err = k.memo.Truncate(memoText); err == nil {
		err = errors.Join(k.write(m), k.begin())
	}
	return k, err
}

// begin begins a life. The counts stay mapped while the process lives: they are asked for even after the end.
func (k *kept) begin() error {
	page, err := unix.Mmap(int(k.memo.Fd()), 0, memoText, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return os.NewSyscallError("mmap", err)
	}
	k.counts = (*counts)(unsafe.Pointer(&page[0]))
	k.lives.Add(1)
	return nil
}

// ReadMemo returns what a memo says that no process writes. A last line that is cut off was not acted upon yet. It is
// removed, so that the next one is a line of its own.
func ReadMemo(memo *os.File) (m Memo, words []Word, err error) {
	size, err := memo.Seek(0, io.SeekEnd)
	if err != nil {
		return m, nil, err
	}
	text := make([]byte, max(0, size-memoText))
	if _, err := memo.ReadAt(text, memoText); err != nil {
		return m, nil, fmt.Errorf("memo of a mount: %w", err)
	}
	text = text[:bytes.LastIndexByte(text, '\n')+1]
	first, rest, _ := bytes.Cut(text, []byte("\n"))
	if err := errors.Join(memo.Truncate(memoText+int64(len(text))), json.Unmarshal(first, &m)); err != nil {
		return m, nil, fmt.Errorf("memo of a mount: %w", err)
	}
	for line := range bytes.Lines(rest) {
		var w Word
		if json.Unmarshal(line, &w) != nil {
			break
		}
		words = slices.DeleteFunc(append(words, w), func(old Word) bool {
			return old.Gone > 0 || old.Generation == w.Gone
		})
	}
	return m, words, nil
}

func (k *kept) write(line any) error {
	b, err := json.Marshal(line)
	if err != nil {
		return err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	end, err := k.memo.Seek(0, io.SeekEnd)
	if err == nil {
		if _, err = k.memo.Write(append(b, '\n')); err != nil {
			_ = k.memo.Truncate(end) // half a line would spoil the next one
		}
	}
	return err
}

func (k *kept) close() {
	if k != nil {
		k.drop()
		_ = k.fuse.Close()
		_ = k.memo.Close()
	}
}

// takeKept takes over the mount at a place that is held, or returns nil if none is. The mount may be gone by now:
// ErrUnmounted.
func takeKept(mountpoint string, h Holder) (k *kept, err error) {
	if h == nil {
		return nil, nil
	}
	files := h.Held(mountpoint)
	if len(files) != 2 {
		return nil, nil
	}
	k = &kept{fuse: files[0], memo: files[1], drop: func() {}}
	if k.Memo, k.words, err = ReadMemo(k.memo); err == nil && !k.alive() {
		err = ErrUnmounted
		if mi, _ := findMount(k.Mountpoint); mi != nil && mi.Device == k.Device {
			err = errAborted
		}
	}
	if err == nil {
		err = k.begin()
	}
	if err != nil {
		k.close()
	}
	return k, err
}

var errAborted = errors.New("the mount was aborted") // a held mount is dead, but still in its place

// alive asks the kernel once. Who waited for it to report the end would be woken by every request.
func (k *kept) alive() bool {
	for p := []unix.PollFd{{Fd: int32(k.fuse.Fd())}}; ; {
		if _, err := unix.Poll(p, 0); !errors.Is(err, unix.EINTR) {
			return err == nil && p[0].Revents&unix.POLLERR == 0
		}
	}
}

// keepable makes f.kept if a holder can have the mount at path, which t serves by device.
func (f *filesystem) keepable(path string, device *os.File, t *fuseio.Server, mo *fuse.MountOptions) {
	mi, _ := findMount(path)
	if f.opts.Holder == nil || !t.Agreed(fuse.CAP_HAS_RESEND) || mi == nil {
		return
	}
	k, err := newKept(device, Memo{path, mi.Device, f.opts.FsName, f.opts.Note, t.First(), mo.MaxWrite})
	if err != nil {
		f.opts.Logger.Warn("the mount will not outlive this process", "mountpoint", path, "cause", err)
		_ = k.memo.Close()
		return
	}
	f.kept = k
}

// note writes that the kernel knows a version, or no more.
func (f *filesystem) note(g *generation, gone bool) error {
	if gone {
		return f.kept.write(Word{Gone: g.number})
	}
	return f.kept.write(Word{Generation: g.number, Version: f.volume.VersionName(g.manifest)})
}

// keep begins to write the memo, and lets the holder have the mount.
func (s *Server) keep() error {
	f, k := s.fs, s.fs.kept
	if k == nil {
		return nil
	}
	f.draining.counts = k.counts
	f.control.nextFh = uint64(k.lives.Load()) << 32 // no earlier life has given such handles
	f.gens.note = f.note
	newest := f.gens.newest()
	if !slices.ContainsFunc(k.words, func(w Word) bool { return w.Generation == newest.number }) {
		if err := f.note(newest, false); err != nil {
			return fmt.Errorf("mount %s: %w", s.mountpoint, err)
		}
	}
	k.drop = f.opts.Holder.Keep(s.mountpoint, k.fuse, k.memo)
	if status := s.transport.Resend(); status != fuse.OK { // here, since the end of Serve closes the descriptor
		return fmt.Errorf("mount %s: resend: %v", s.mountpoint, status)
	}
	return nil
}

// resume goes on after another process.
func (s *Server) resume() {
	gens, words := s.fs.gens, s.fs.kept.words
	// perhaps the kernel has it of a version that is lost
	lost := len(words) > 0 && words[len(words)-1].Generation != gens.newest().number
	if lost || gens.known() != gens.current().manifest {
		s.Invalidate(nil)
	}
}

// Kept returns why the mount ends with this process, or nil if it can be taken over.
func (s *Server) Kept() error {
	switch {
	case s.fs.kept != nil:
		return nil
	case s.Transport().Threads > 0:
		return errors.New(
			"requests come by io_uring, which no other process can take over (mount it with --fuse-transport dev)")
	case s.fs.opts.Holder == nil:
		return errors.New("it ends with the client that waits for it in the foreground (mount it with --daemon)")
	}
	return errors.New("the kernel would not send requests again (Linux 6.9 does; here unmount it, and mount it again)")
}
