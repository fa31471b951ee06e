package fuseio

import (
	"bytes"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"
)

// quickly asks Quick for what readers ask for with every file. h has its operation's own header behind it, and rest is
// what follows. The reply's payload is in out, or lent until done is called. go-fuse's decoding would cost as much
// again as the file system, and copy what is lent.
func (s *Server) quickly(h *fuse.InHeader, rest, out []byte) (data []byte, done func(), status fuse.Status) {
	done = func() {}
	defer func() {
		if v := recover(); v != nil {
			status = s.panicked(v)
		}
		if status != fuse.OK {
			data = nil
		}
	}()
	q := s.o.Quick
	switch in := unsafe.Pointer(h); h.Opcode {
	case opLookup:
		name, _, _ := bytes.Cut(rest, []byte{0})
		text := string(name) // out may be rest
		data, status = replyIn(out, func(to *fuse.EntryOut) fuse.Status { return q.Lookup(nil, h, text, to) })
	case opGetAttr:
		data, status = replyIn(out, func(to *fuse.AttrOut) fuse.Status {
			return q.GetAttr(nil, (*fuse.GetAttrIn)(in), to)
		})
	case opOpen:
		data, status = replyIn(out, func(to *fuse.OpenOut) fuse.Status { return q.Open(nil, (*fuse.OpenIn)(in), to) })
	case opRead:
		var r fuse.ReadResult
		if r, status = q.Read(nil, (*fuse.ReadIn)(in), out[:(*fuse.ReadIn)(in).Size]); status == fuse.OK {
			done = r.Done
			data, status = r.Bytes(nil)
		}
	case opIoctl: // Python's open asks every file whether it is a terminal
		data, status = replyIn(out, func(to *fuse.IoctlOut) fuse.Status {
			return q.Ioctl(nil, (*fuse.IoctlIn)(in), rest, to, nil)
		})
	case opRelease:
		q.Release(nil, (*fuse.ReleaseIn)(in))
	default:
		status = WouldBlock
	}
	return data, done, status
}

// replyIn has do fill in a reply of out's first bytes.
func replyIn[T any](out []byte, do func(to *T) fuse.Status) ([]byte, fuse.Status) {
	to := (*T)(unsafe.Pointer(&out[0]))
	clear(bytesOf(to))
	return out[:unsafe.Sizeof(*to)], do(to)
}

// behind is how long a request's header is with the operation's own.
func behind(h *fuse.InHeader) int { return inHeader + int(opIn[h.Opcode%uint32(len(opIn))]) }
