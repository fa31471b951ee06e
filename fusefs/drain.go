package fusefs

import (
	"sync/atomic"
	"syscall"
)

// errDraining is what an open fails with once the mount is about to end. A trainer must not take it for a file
// that is missing, as it may ENOENT.
const errDraining = syscall.ESHUTDOWN

// draining is how a mount ends without cutting off who is in the middle of a file.
type draining struct {
	begun atomic.Bool
	open  atomic.Int64 // files of the dataset
}

// Drain refuses every open from now on, also of control files, with ESHUTDOWN. What is open can be read to its
// end.
func (s *Server) Drain() { s.fs.draining.begun.Store(true) }

// OpenFiles returns how many files of the dataset are open. The kernel releases a file some time after its last
// close(2), and not at all where an open was interrupted at the wrong moment, so it may be a little too high.
func (s *Server) OpenFiles() int { return int(max(s.fs.draining.open.Load(), 0)) }
