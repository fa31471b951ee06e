// Package fusefs mounts a dataset as a filesystem (Linux, FUSE), with the control folder .shoal.
//
//	kernel ── LOOKUP, OPEN, READ ──> filesystem ── Volume ──> the engine
//	                                     └─ .shoal ── Control ──> the engine
//
// Requests come by /dev/fuse or io_uring, from package fuseio (see [Options].Transport). What does not wait is answered
// by quick, on a ring's thread where there is one, and the rest by filesystem.
//
// It uses go-fuse's raw interface: a node ID is computed from the manifest (see nodeID). So there are no inode
// objects, a lookup allocates nothing that must be kept, and a FORGET costs one atomic subtraction. A million files
// known to the kernel cost this process no memory.
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
// # What a file costs
//
// The reader waits for LOOKUP, OPEN and READ, but not for RELEASE (TestRoundTrips). There is one LOOKUP, or none
// after a listing (see plusFits), and no READ for pages that the kernel keeps. Programs add requests that FUSE cannot
// prevent: Python's open asks for a terminal by ioctl, which the kernel passes on each time, and an fstat after the
// first READ brings a GETATTR: reading invalidates the access time, and only a read-only superblock would prevent
// that, but .shoal/plan must be writable.
//
// Replies come from buffers (BenchmarkCeiling, two cores, 8 readers, 63,000 bytes a file, at 82492a9): pread 15,430
// files/s and 70 us of CPU a file, spliced 16,799 and 68, which is within the noise, and would forbid checking what is
// sent. A mapped file sent by writev (82 us: page faults) and O_DIRECT (no read-ahead) were slower. Content in memory:
// copied 18,094 and 45, lent 18,943 and 42, hence Lend of [Volume]. 86% of the CPU is the kernel's, under 2% this
// package's and the manifest's.
//
// A thread that waits for the disk in read(2) keeps its P until sysmon retakes it, which is late on a busy machine.
// On two busy cores a whole daemon with GOMAXPROCS=2 gave 3,567 files/s, p99 21 ms; with 8 it gave 5,891 and 8 ms;
// the ceiling was 5,535 and 10 ms; all for 100 to 107 us of CPU a file. 4 and 8 measured alike. So a program that
// mounts should have at least 4, even in a container limited to two cores, since as many goroutines wait for requests.
//
// Over io_uring a warm file of 63 KB takes 30 to 48 us of this process's CPU instead of 43 to 87, and 8 readers get
// 1.35 times the files (BenchmarkTransport, lab/bench/results/uring.md).
//
// # Traps
//
//   - Never read the mount in the process that serves it: one blocked page fault stops the Go
//     scheduler, and with it the answer. The tests serve from a subprocess.
//   - Never notify from inside a handler of the directory concerned: the kernel takes its lock.
//     Of all handlers only those of .shoal call [Server.Invalidate].
//   - FLUSH must not be answered with ENOSYS, not even for data: the kernel would stop sending it
//     for plans too.
//   - A descriptor for the kernel comes from an os.File that is held until the call returns: one that
//     is garbage-collected closes it.
//   - An interrupted READ that is answered with EINTR becomes SIGBUS in a page fault. Interrupts
//     are therefore honored only for a caller that is about to die (see interrupt.go).
package fusefs
