// Package fuseio carries requests and replies between the kernel and a go-fuse RawFileSystem, by read(2) and write(2)
// of /dev/fuse or over io_uring (Linux 6.14). It is in place of fuse.NewServer: Mount mounts, New answers the first
// request, and Serve the others until the mount is gone. The requests that every file costs it decodes itself, for
// Options.Quick, and go-fuse decodes the rest.
//
// # Readers
//
// Goroutines read /dev/fuse, and answer what they have read. One that was the last to wait there starts another before
// it answers, and one that finds enough waiting ends.
//
// The first page of a buffer is touched before the kernel writes to it. A process that is killed as the kernel copies a
// request gets no page any more, and the request would fail with EIO, where another process that holds /dev/fuse could
// answer it (ADR 83).
//
// # Rings
//
// A request by /dev/fuse costs two system calls, and wakes a thread that the kernel chooses. Over io_uring each CPU
// has a queue of entries, which are buffers registered with the kernel. A request made on a CPU is put into an entry
// of its queue, and one system call hands back any number of answers and fetches as many requests.
//
// # Entries
//
// An entry is a header (struct fuse_uring_req_header), where requests and replies have fixed places, and a payload as
// large as the largest READ or WRITE. At every moment one side owns both:
//
//	          REGISTER                request
//	(made) ──────────────► kernel ──────────────► server ──┬─ answered on the ring's thread ──┐
//	                         ▲                             └─ by a goroutine, then finished ──┤
//	                         └───────────────────── COMMIT_AND_FETCH ─────────────────────────┘
//
// The kernel owns an entry from the submission of its command until the command's completion is seen, and touches it
// only while the ring's thread is in io_uring_enter. The server owns it then, until it submits the next command. A
// completion with an error ends the entry for good. The reply is copied by the kernel during the submission.
//
// Input and output share the payload: a handler must not read its input any more once it writes output. Handlers get
// names as strings, so this concerns only ioctls, whose input is copied.
//
// # Threads
//
//   - Each ring has a goroutine locked to a thread, and bound to a CPU, with a short time slice. Only it touches the
//     ring (IORING_SETUP_SINGLE_ISSUER), and it hands out requests. There is a ring for each CPU that this process may
//     use; queues of the other CPUs are divided among them, since the kernel demands a queue for every possible CPU
//     before it uses any.
//   - A request that can be answered without waiting is answered right there, by Options.Quick: to wake a goroutine and
//     then the thread again costs more than the request. A wait there would stop all other requests of the CPU, so
//     Quick answers WouldBlock instead.
//   - Everything else, and what Quick declines, gets a goroutine and goes to the file system. When it has finished, it
//     puts the entry on the ring's list and wakes the thread by an eventfd, if it sleeps. So the number of entries
//     bounds how many requests of a CPU can wait at a time; more wait in the kernel.
//   - The thread enters the kernel without waiting first, by a raw system call as long as it has little to copy: the Go
//     scheduler does not notice, and keeps its P. Only when there is nothing to do it waits, in a system call like
//     others.
//   - FORGET and INTERRUPT always come by /dev/fuse, and so does everything until the rings are ready, or for ever if
//     the kernel refuses them.
//
// # Interrupts
//
// An INTERRUPT for a request in a ring comes by another way, so it may overtake the request. It is tried again for a
// short time if the request is not found.
//
// # Teardown
//
// When the mount is gone, read(2) of /dev/fuse fails with ENODEV and the kernel ends the entries that it owns. All
// requests in flight are interrupted then. A thread leaves when its last entry has ended, so no handler is left that
// could touch a payload, and it unmaps them. Serve returns after the last thread, then nothing is left open or mapped.
//
// # Memory
//
// Payloads are mapped, not in Go's heap, and count only when they are touched. The kernel reuses the entry that became
// free last, so those are as many as requests were in flight. A ring that is idle for trimAfter gives them back.
// Options.Memory bounds the sum, as virtual memory.
package fuseio
