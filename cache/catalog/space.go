package catalog

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"syscall"

	humanize "github.com/dustin/go-humanize"
	"golang.org/x/sys/unix"
)

// space keeps badger from a full disk. Badger writes through mappings of files with holes, and a write
// to a hole that finds no block is a SIGBUS, which ends the process, and with it the mount. So:
//
//   - The log that a commit writes to gets its blocks before the commit ([space.reserve]). Nobody can
//     take those away, so a commit on a full disk is an error and nothing more.
//   - Tables are written at four moments only: when the catalog is opened and closed, when it is
//     migrated, and once every memtable of commits, some 8 MiB. The record tables of segments, which
//     were nearly all of it, are plain files, and nothing is compacted in the background.
//   - Before each of those moments there must be space for it and slack beside: another process would
//     have to take all the slack within the milliseconds that the write lasts.
//
// On a file system that writes each block to a new place (btrfs, zfs) reserving does not help: there a
// disk that is filled in the wrong moment still ends the daemon. What it had committed is found by the
// next one.
type space struct {
	dir       string // badger's
	log       string // the log that badger writes now
	used      int64  // bound of what badger wrote to it
	allocated int64  // bytes at its begin that have blocks
	noReserve bool   // the file system has no fallocate
}

const (
	// smallWrites is left for what badger writes of itself at any time: its manifest of a few KB, and
	// the first pages of a new log.
	smallWrites = 1 << 20
	// slack is what other processes may take while badger writes a table. At 1 GB/s, which is a fast
	// disk, that is 4 ms; a table of 100 KB takes less than one.
	slack = 4 << 20
	// memtable is what badger holds before it writes a table of its own accord.
	memtable = 8 << 20
	// reserveStep is by how much a log's blocks grow: commits of days, and no loss on a small disk.
	reserveStep = 1 << 20
	// entryOverhead bounds what an entry takes beside key and value: 22 bytes of header, 8 of
	// version, 4 of checksum in the log; a node of up to 100 bytes in the memtable.
	entryOverhead = 128
	// logOverhead bounds what a commit takes beside its entries: the log's own header, the entry that
	// ends a transaction, and the zeros behind it.
	logOverhead = 256
)

// reserve makes sure that a commit of n bytes finds blocks in the log.
func (s *space) reserve(n int64) error {
	if err := s.current(); err != nil {
		return err
	}
	n += logOverhead
	if s.used+n >= memtable {
		// Badger is about to write a table and to begin another log.
		if err := s.check(smallWrites + slack + memtable); err != nil {
			return err
		}
	}
	least := s.used + n + 4096
	if want := min(roundUp(least, reserveStep), 2*memtable); want > s.allocated {
		err := s.allocate(want)
		if errors.Is(err, syscall.ENOSPC) { // the last blocks, then
			err = s.allocate(min(roundUp(least, 4096), want))
		}
		if err != nil {
			return err
		}
	}
	s.used += n
	return nil
}

func roundUp(n, unit int64) int64 { return (n + unit - 1) / unit * unit }

// current finds the log that badger writes now.
func (s *space) current() error {
	logs, err := filepath.Glob(filepath.Join(s.dir, "*.mem"))
	if err != nil || len(logs) == 0 {
		return fmt.Errorf("no log in %s: %w", s.dir, errors.Join(err, os.ErrNotExist))
	}
	if last := slices.Max(logs); last != s.log {
		s.log, s.used, s.allocated = last, logOverhead, 0
	}
	return nil
}

func (s *space) allocate(want int64) error {
	if s.noReserve {
		return s.check(2 * smallWrites)
	}
	f, err := os.OpenFile(s.log, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	for err = unix.EINTR; err == unix.EINTR; { //nolint:errorlint // a bare errno
		err = unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_KEEP_SIZE, 0, want)
	}
	switch {
	case errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.ENOSYS):
		s.noReserve = true
		return s.check(2 * smallWrites)
	case err != nil:
		return fmt.Errorf("%w: %s could not get %s for the catalog's log (make room, or use another --cache-dir)", err, s.dir, humanize.IBytes(uint64(want-s.allocated)))
	}
	s.allocated = want
	return nil
}

// forOpen fails if the disk may not take what badger writes when it is opened: tables of the logs that a
// killed process left, and of the tables that are merged. It asks for no slack, so that a cache that filled
// its disk can be opened again; nobody reads through a mount yet that would end.
func (s *space) forOpen() error {
	need := int64(smallWrites)
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		return err
	}
	tables := int64(0)
	for _, e := range entries {
		name := filepath.Join(s.dir, e.Name())
		var st unix.Stat_t
		if unix.Stat(name, &st) != nil {
			continue // it counts nothing
		}
		switch filepath.Ext(name) {
		case ".mem":
			n, err := dataLen(name, min(st.Size, 512*st.Blocks, 2*memtable))
			if err != nil {
				return err
			}
			need += n
		case ".sst":
			tables += min(st.Size, memtable)
		}
	}
	return s.check(need + min(tables, 2*memtable))
}

// dataLen returns the length of a log without the zeros at the end of its first n bytes.
func dataLen(name string, n int64) (int64, error) {
	f, err := os.Open(name)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	b := make([]byte, n)
	got, err := io.ReadFull(f, b)
	if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
		return 0, err
	}
	return int64(len(bytes.TrimRight(b[:got], "\x00"))), nil
}

// forClose fails if the disk may not take what closing writes.
func (s *space) forClose() error { return s.check(smallWrites + slack + min(s.used, memtable)) }

func (s *space) check(need int64) error {
	var st unix.Statfs_t
	if err := unix.Statfs(s.dir, &st); err != nil {
		return fmt.Errorf("free space of %s: %w", s.dir, err)
	}
	if free := int64(st.Bavail) * st.Bsize; free < need {
		return fmt.Errorf("%w: %s has %s free and the catalog needs %s (make room, or use another --cache-dir)", syscall.ENOSPC, s.dir, humanize.IBytes(uint64(free)), humanize.IBytes(uint64(need)))
	}
	return nil
}

// guard makes an error of a panic of badger, which follows damaged offsets without looking, and of a
// fault in its mappings. It sees neither in the goroutines that badger starts.
func guard(f func() error) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		switch p := recover().(type) {
		case nil:
		case interface {
			error
			Addr() uintptr
		}:
			// No block for a hole, or a block that cannot be read: not damage of what is written.
			err = fmt.Errorf("%w: fault in a file of badger: %w", syscall.EIO, p)
		default:
			err = corrupt("badger panicked: %s", strings.TrimSpace(fmt.Sprint(p)))
		}
	}()
	return f()
}
