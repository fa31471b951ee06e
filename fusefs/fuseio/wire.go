package fuseio

import (
	"os"
	"slices"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"
)

// What is used of <linux/fuse.h>.
const (
	cmdRegister       = 1
	cmdCommitAndFetch = 2

	opLookup      = 1
	opForget      = 2
	opGetAttr     = 3
	opOpen        = 14
	opRead        = 15
	opRelease     = 18
	opGetXAttr    = 22
	opListXAttr   = 23
	opReadDir     = 28
	opInterrupt   = 36
	opIoctl       = 39
	opBatchForget = 42
	opReadDirPlus = 44

	outHeader = int(unsafe.Sizeof(fuse.OutHeader{}))
	inHeader  = int(unsafe.Sizeof(fuse.InHeader{}))

	minReadBuffer = 8192 // FUSE_MIN_READ_BUFFER
	writeHeader   = 80   // of a WRITE, the longest
)

// reqHeader is struct fuse_uring_req_header.
type reqHeader struct {
	inOut [128]byte // fuse_in_header, and fuse_out_header in a reply
	opIn  [128]byte // the operation's own header
	ent   struct {
		flags, commitID   uint64
		payloadSize, _pad uint32
		_reserved         uint64
	}
}

// opIn is how many bytes of reqHeader.opIn an operation has, which the kernel does not tell. go-fuse takes requests as
// the stream of /dev/fuse, where the operation's header is followed by its names and data.
var opIn = [64]uint8{
	3: size[fuse.GetAttrIn](), 4: size[fuse.SetAttrIn](), 8: size[fuse.MknodIn](), 9: size[fuse.MkdirIn](),
	12: 8, // RENAME: RenameIn without flags
	13: size[fuse.LinkIn](), 14: size[fuse.OpenIn](), 15: size[fuse.ReadIn](), 16: size[fuse.WriteIn](),
	18: size[fuse.ReleaseIn](), 20: size[fuse.FsyncIn](),
	21: 8, // SETXATTR without FUSE_SETXATTR_EXT, which go-fuse negotiates only on demand
	22: size[fuse.GetXAttrIn](), 23: size[fuse.GetXAttrIn](), 25: size[fuse.FlushIn](), 27: size[fuse.OpenIn](),
	28: size[fuse.ReadIn](), 29: size[fuse.ReleaseIn](), 30: size[fuse.FsyncIn](), 31: size[fuse.LkIn](),
	32: size[fuse.LkIn](), 33: size[fuse.LkIn](), 34: size[fuse.AccessIn](), 35: size[fuse.CreateIn](),
	37: 16, // BMAP
	39: size[fuse.IoctlIn](),
	40: 24, // POLL
	41: size[fuse.NotifyRetrieveIn](), 43: size[fuse.FallocateIn](), 44: size[fuse.ReadIn](),
	45: size[fuse.RenameIn](), 46: size[fuse.LseekIn](), 47: size[fuse.CopyFileRangeIn](),
	51: size[fuse.CreateIn](), // TMPFILE
	52: size[fuse.StatxIn](), 53: size[fuse.CopyFileRangeIn](),
}

// size returns the bytes of T, which begins with an InHeader, behind that.
func size[T any]() uint8 {
	var t T
	return uint8(int(unsafe.Sizeof(t)) - inHeader)
}

// putHeader makes b a reply of n bytes that begins with b.
func putHeader(b []byte, n int, status int32, unique uint64) {
	*(*fuse.OutHeader)(unsafe.Pointer(&b[0])) = fuse.OutHeader{Length: uint32(n), Status: status, Unique: unique}
}

// payloadOf is how large the buffer for a reply's payload has to be. The request has its operation's own header, as all
// have.
func payloadOf(h *fuse.InHeader) (size int) {
	switch at := unsafe.Pointer(h); h.Opcode {
	case opRead, opReadDir, opReadDirPlus:
		size = int((*fuse.ReadIn)(at).Size)
	case opGetXAttr, opListXAttr:
		size = int((*fuse.GetXAttrIn)(at).Size)
	case opIoctl:
		size = int(unsafe.Sizeof(fuse.IoctlOut{})) + int((*fuse.IoctlIn)(at).OutSize)
	}
	return max(size, os.Getpagesize())
}

// bytesOf returns the memory of a structure.
func bytesOf[T any](t *T) []byte { return unsafe.Slice((*byte)(unsafe.Pointer(t)), unsafe.Sizeof(*t)) }

// Resend makes the kernel send everything again that was read and not answered.
func (s *Server) Resend() fuse.Status { return s.notify(fuse.NOTIFY_RESEND, nil, nil) }

// EntryNotify is fuse.Server.EntryNotify.
func (s *Server) EntryNotify(parent uint64, name string) fuse.Status {
	entry := fuse.NotifyInvalEntryOut{Parent: parent, NameLen: uint32(len(name))}
	return s.notify(fuse.NOTIFY_INVAL_ENTRY, bytesOf(&entry), append([]byte(name), 0))
}

// InodeNotify is fuse.Server.InodeNotify.
func (s *Server) InodeNotify(node uint64, off, length int64) fuse.Status {
	entry := fuse.NotifyInvalInodeOut{Ino: node, Off: off, Length: length}
	return s.notify(fuse.NOTIFY_INVAL_INODE, bytesOf(&entry), nil)
}

// notify sends a message that answers no request. It goes to /dev/fuse: rings take only answers.
func (s *Server) notify(code fuse.Status, body, rest []byte) fuse.Status {
	msg := slices.Concat(make([]byte, outHeader), body, rest)
	putHeader(msg, len(msg), -int32(code), 0)
	return fuse.ToStatus(s.write(msg))
}
