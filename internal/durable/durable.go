// Package durable writes files so that after a crash the old or the new content is there.
package durable

import (
	"errors"
	"io/fs"
	"iter"
	"os"
	"path/filepath"

	"github.com/shoalfs/shoal/internal/killpoint"
)

// TempPrefix begins the names of files that are being written. What a crash leaves of them may be removed.
const TempPrefix = ".tmp-"

// Write replaces the file at path by data: it writes a temporary file beside it, fsyncs that, renames it, and fsyncs
// the folder. Its killpoints are point with ".created", ".written", ".synced", ".renamed" and ".durable".
func Write(path, point string, mode fs.FileMode, data iter.Seq[[]byte]) (err error) {
	dir := filepath.Dir(path)
	f, err := os.CreateTemp(dir, TempPrefix+"*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = f.Close()
			_ = os.Remove(f.Name())
		}
	}()
	killpoint.Pass(point + ".created")
	for d := range data {
		if _, err = f.Write(d); err != nil {
			return err
		}
	}
	killpoint.Pass(point + ".written")
	if err = errors.Join(f.Chmod(mode), f.Sync()); err != nil {
		return err
	}
	if err = f.Close(); err != nil {
		return err
	}
	killpoint.Pass(point + ".synced")
	if err = os.Rename(f.Name(), path); err != nil {
		return err
	}
	killpoint.Pass(point + ".renamed")
	if err = SyncDir(dir); err != nil {
		return err
	}
	killpoint.Pass(point + ".durable")
	return nil
}

// SyncDir makes what was created, renamed or removed in a folder durable.
func SyncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// MkdirAll makes a folder and its missing parents durable: it fsyncs each parent of a new one.
func MkdirAll(dir string) error {
	if _, err := os.Stat(dir); err == nil || !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	parent := filepath.Dir(dir)
	if err := MkdirAll(parent); err != nil { // the root is there
		return err
	}
	if err := os.Mkdir(dir, 0o777); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return SyncDir(parent)
}
