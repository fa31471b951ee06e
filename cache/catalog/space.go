package catalog

import (
	"fmt"
	"sync/atomic"
	"syscall"

	humanize "github.com/dustin/go-humanize"
	"golang.org/x/sys/unix"
)

// space keeps badger from a full disk. Badger writes through mappings of files with holes, and a write
// to a hole that finds no block is a SIGBUS, which ends the process, and with it the mount. So what it
// will write must be there to be had before it is asked to.
type space struct {
	dir    string
	staged atomic.Int64 // bytes committed that a close may have to write into a table
}

const (
	// smallWrites is left for what badger writes of itself: pages of its logs, a manifest.
	smallWrites = 1 << 20
	// memtable bounds what badger holds before it writes a table of its own accord.
	memtable = 8 << 20
)

// forCommit fails if the disk may not take n bytes more, to the log now and to a table later.
func (s *space) forCommit(n int) error { return s.check(smallWrites + 2*int64(n) + s.forTables()) }

// forClose fails if the disk may not take what closing writes.
func (s *space) forClose() error { return s.check(smallWrites + s.forTables()) }

func (s *space) forTables() int64 { return 2 * min(s.staged.Load(), memtable) }

func (s *space) check(need int64) error {
	var st unix.Statfs_t
	if err := unix.Statfs(s.dir, &st); err != nil {
		return fmt.Errorf("free space of %s: %w", s.dir, err)
	}
	if free := int64(st.Bavail) * st.Bsize; free < need {
		return fmt.Errorf("%w: %s has %s free and the catalog needs %s", syscall.ENOSPC, s.dir, humanize.IBytes(uint64(free)), humanize.IBytes(uint64(need)))
	}
	return nil
}
