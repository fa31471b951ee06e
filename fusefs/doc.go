// Package fusefs shows a dataset as a filesystem (Linux, FUSE) and steers it through the control
// folder .shoal.
//
//	kernel ── LOOKUP, OPEN, READ ──> filesystem ── Volume ──> the engine
//	                                     └─ .shoal ── Control ──> the engine
//
// It is built on go-fuse's raw interface: a node id is computed from the manifest (see nodeID), so
// there are no inode objects, a lookup allocates nothing that must be kept, and a FORGET costs one
// atomic subtraction. A million files that the kernel knows cost this process nothing.
//
// # What holds
//
//   - The data is read-only; every attempt to change it gets EROFS.
//   - A node id belongs to one version of the dataset (a generation). Names are looked up in the
//     version in force; files that are open, and folders that a process stands in, stay on theirs.
//   - Inode numbers are a hash of the path, equal over remounts and versions.
//   - OPEN is always answered, never ENOSYS, because it is the signal that tells where a reader
//     stands. With FOPEN_NOFLUSH close(2) costs no round trip.
//
// # Traps
//
//   - Never read the mount in the process that serves it: one blocked page fault stops the Go
//     scheduler, and with it the answer. The tests serve from a subprocess.
//   - Never notify from inside a handler of the directory concerned: the kernel takes its lock.
//     [Server.Invalidate] has a goroutine of its own.
//   - FLUSH must not be answered with ENOSYS, not even for data: the kernel would stop sending it
//     for plans too.
//   - go-fuse reuses a request's cancel channel, so a context made of it ends with the request.
//   - With splicing enabled go-fuse fills and drains a pipe for every reply, even one that lies in a
//     buffer: five system calls for nothing. Replies come from buffers here, so it is off. Whoever
//     turns it on must splice from page-aligned offsets only: go-fuse sizes the pipe by bytes, an
//     unaligned payload needs a page more, and the short splice is sent as the end of the file.
//   - An interrupted READ that is answered with EINTR becomes SIGBUS in a page fault. Interrupts
//     are therefore honored only for a caller that is about to die (see interrupt.go).
package fusefs
