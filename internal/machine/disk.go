package machine

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"syscall"
)

// Room returns how many bytes a folder can hold, including the files in it: the space left for this user, and the
// space of the folder. The folder need not exist.
func Room(dir string) (int64, error) {
	var st syscall.Statfs_t
	at, err := dir, syscall.Statfs(dir, &st)
	for (errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR)) && at != filepath.Dir(at) {
		at = filepath.Dir(at)
		err = syscall.Statfs(at, &st)
	}
	if err != nil {
		return 0, fmt.Errorf("free space of %s: %w", at, err)
	}
	return int64(st.Bavail)*st.Bsize + taken(dir), nil
}

// taken returns the disk space of a folder's files. Unreadable files count as 0.
func taken(dir string) (n int64) {
	_ = filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return nil //nolint:nilerr // a file removed in the meantime uses nothing
		}
		if info, err := d.Info(); err == nil {
			if st, ok := info.Sys().(*syscall.Stat_t); ok {
				n += st.Blocks * 512
			}
		}
		return nil
	})
	return n
}
