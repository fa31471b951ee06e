package machine

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"syscall"
)

// Room returns how many bytes a folder can hold, files that it holds now included: what the file system has
// left for this user, and what the folder takes. The folder need not be there yet.
func Room(dir string) (int64, error) {
	var st syscall.Statfs_t
	at := dir
	for {
		err := syscall.Statfs(at, &st)
		if err == nil {
			break
		}
		if parent := filepath.Dir(at); parent != at && (errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR)) {
			at = parent
			continue
		}
		return 0, fmt.Errorf("free space of %s: %w", at, err)
	}
	return int64(st.Bavail)*st.Bsize + taken(dir), nil
}

// taken returns the bytes that the files of a folder take on the disk. What cannot be read takes none.
func taken(dir string) (n int64) {
	_ = filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return nil //nolint:nilerr // a file that has gone meanwhile takes nothing
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
