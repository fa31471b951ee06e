package fusefs

import (
	"context"
	"errors"
	"io/fs"
	"syscall"

	"github.com/shoalfs/shoal/cache/objstore"
)

// errnoOf maps the error of a read to the errno of the reader's system call. This is the only such table.
//
//	caller gone                      EINTR
//	object changed or vanished       ESTALE   the mount shows a version that the store no longer has
//	access denied                    EACCES
//	no such control file             ENOENT
//	invalid, temporary, other        EIO      temporary ones were retried before they got here
func errnoOf(err error) syscall.Errno {
	if errors.Is(err, context.Canceled) {
		return syscall.EINTR
	}
	switch objstore.KindOf(err) {
	case objstore.KindChanged, objstore.KindNotFound:
		return syscall.ESTALE
	case objstore.KindDenied:
		return syscall.EACCES
	}
	// After the kinds: a vanished object of a file:// source is ErrNotExist too.
	if errors.Is(err, fs.ErrNotExist) {
		return syscall.ENOENT
	}
	return syscall.EIO
}
