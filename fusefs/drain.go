package fusefs

import (
	"sync/atomic"
	"syscall"
)

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
