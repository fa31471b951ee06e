package objstore

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// nameMax is the longest name of a file on Linux, in bytes.
const nameMax = 255

// createTemp makes the folder of path and, in it, the temporary file that will become path: a rename there always
// stays on one file system.
func createTemp(path string) (*os.File, error) {
	folder, base := filepath.Split(path)
	if err := makeFolder(filepath.Clean(folder)); err != nil {
		return nil, err
	}
	var random [8]byte
	_, _ = rand.Read(random[:]) // never fails
	name := tmpPrefix + hex.EncodeToString(random[:]) + "-" + base
	return os.OpenFile(folder+name[:min(len(name), nameMax)], os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o644)
}

// makeFolder makes a folder and its parents durably, as files are.
func makeFolder(folder string) error {
	if fi, err := os.Stat(folder); err == nil && fi.IsDir() {
		return nil
	}
	parent := filepath.Dir(folder)
	if parent == folder {
		return nil
	}
	if err := makeFolder(parent); err != nil {
		return err
	}
	if err := os.Mkdir(folder, 0o777); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return syncFolder(parent)
}

// tempOf reports whether name is a temporary file of an object whose base name begins with base.
func tempOf(name, base string) bool {
	rest, ok := strings.CutPrefix(name, tmpPrefix)
	if !ok {
		return false
	}
	if _, of, ok := strings.Cut(rest, "-"); ok {
		// The end of a long name is cut off.
		return strings.HasPrefix(of, base) || (len(name) == nameMax && strings.HasPrefix(base, of))
	}
	return base == "" // left by an older version, which kept no name
}

// discardTemp removes a file of createTemp. Its errors do not matter.
func discardTemp(f *os.File) {
	_ = f.Close()
	_ = os.Remove(f.Name())
}

// commitTemp makes a file of createTemp the object: fsync, rename, fsync the folder. After success the file is closed
// and its old name gone.
func commitTemp(f *os.File, key, path string, rename func(from, to string) error) (Object, error) {
	if err := f.Sync(); err != nil {
		return Object{}, err
	}
	fi, err := f.Stat()
	if err != nil {
		return Object{}, err
	}
	if err := f.Close(); err != nil {
		return Object{}, err
	}
	if err := rename(f.Name(), path); err != nil {
		return Object{}, err
	}
	if err := syncFolder(filepath.Dir(path)); err != nil {
		return Object{}, err
	}
	return fileObject(key, fi), nil
}

func syncFolder(folder string) error {
	f, err := os.Open(folder)
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Sync()
}

// renameNew renames from to to and fails with EEXIST if to exists. A link is the oldest way to do that atomically;
// file systems without links have renameat2.
func renameNew(from, to string) error {
	err := unix.Link(from, to)
	switch {
	case err == nil:
		return os.Remove(from)
	case errors.Is(err, unix.EEXIST):
		return err
	}
	if err2 := unix.Renameat2(unix.AT_FDCWD, from, unix.AT_FDCWD, to, unix.RENAME_NOREPLACE); err2 == nil || errors.Is(err2, unix.EEXIST) {
		return err2
	}
	return err
}

// PutNew implements [Uploader]. The file is first written and synced under another name, so that not even a crash
// leaves a torn one.
func (d *Dir) PutNew(ctx context.Context, key string, data []byte) (Object, error) {
	path, err := d.target(ctx, key)
	if err != nil {
		return Object{}, err
	}
	if _, err := os.Lstat(path); err == nil {
		return Object{}, Exists(key) // without writing it all first
	}
	f, err := createTemp(path)
	if err != nil {
		return Object{}, putError(ctx, key, err)
	}
	var o Object
	if _, err = f.Write(data); err == nil {
		o, err = commitTemp(f, key, path, renameNew)
	}
	if err != nil {
		discardTemp(f)
		if errors.Is(err, fs.ErrExist) {
			return Object{}, Exists(key)
		}
		return Object{}, putError(ctx, key, err)
	}
	return o, nil
}

// target returns the file in which key is stored.
func (d *Dir) target(ctx context.Context, key string) (string, error) {
	if err := ctx.Err(); err != nil {
		return "", err
	}
	path, ok := d.path(key)
	if !ok || strings.HasPrefix(filepath.Base(path), tmpPrefix) {
		return "", &Error{Op: "put", Key: key, Kind: KindInvalid, Err: errors.New("this key cannot be the name of a file")}
	}
	return path, nil
}

// putError is the error of a failed write, or the context's own.
func putError(ctx context.Context, key string, err error) error {
	if cerr := ctx.Err(); cerr != nil {
		return cerr
	}
	e := fileError("put", key, err)
	if e.Kind == KindDenied {
		e.Remedy = "give this user permission to write there"
	}
	return e
}

// Delete implements [Uploader]. Folders stay, and are listed if they are empty.
func (d *Dir) Delete(ctx context.Context, key string) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	path, ok := d.path(key)
	if !ok {
		return nil // this key cannot be the name of a file
	}
	err := unix.Unlink(path)
	if err == nil {
		err = syncFolder(filepath.Dir(path))
	} else if fi, serr := os.Lstat(path); isAbsent(err) || (serr == nil && fi.IsDir()) {
		return nil
	}
	if err != nil {
		return fileError("delete", key, err)
	}
	return nil
}

// Upload implements [Uploader]: the parts are written in place to a temporary file beside the final one, hidden from
// listings.
func (d *Dir) Upload(ctx context.Context, key string, size, partSize int64) (Upload, error) {
	plan, err := PlanParts(key, size, partSize)
	if err != nil {
		return nil, err
	}
	path, err := d.target(ctx, key)
	if err != nil {
		return nil, err
	}
	f, err := createTemp(path)
	if err != nil {
		return nil, putError(ctx, key, err)
	}
	return &dirUpload{PartPlan: plan, path: path, f: f, stored: make([]bool, plan.Parts)}, nil
}

type dirUpload struct {
	PartPlan
	path string
	f    *os.File

	mu     sync.Mutex
	stored []bool
	made   *Object // by Complete
	ended  bool    // by Abort, or by a Complete that failed
}

// Part implements [Upload].
func (u *dirUpload) Part(ctx context.Context, n int, p []byte) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := u.Check(n, len(p)); err != nil {
		return err
	}
	if u.over() {
		return u.Gone()
	}
	off := int64(n) * u.PartSize
	for done := 0; done < len(p); {
		if err := ctx.Err(); err != nil {
			return err
		}
		m, err := u.f.WriteAt(p[done:min(len(p), done+8<<20)], off+int64(done)) // cancellable
		if err != nil {
			return putError(ctx, u.Key, err)
		}
		done += m
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	u.stored[n] = true
	return nil
}

// over reports whether the upload has ended, or its file was removed.
func (u *dirUpload) over() bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.ended || u.made != nil {
		return true
	}
	fi, err := u.f.Stat()
	if err != nil {
		return true
	}
	st, ok := fi.Sys().(*syscall.Stat_t)
	return ok && st.Nlink == 0 // AbortUploads
}

// Complete implements [Upload].
func (u *dirUpload) Complete(ctx context.Context) (Object, error) {
	if err := ctx.Err(); err != nil {
		return Object{}, err
	}
	u.mu.Lock()
	made := u.made
	u.mu.Unlock()
	if made != nil {
		return *made, nil
	}
	if u.over() {
		return Object{}, u.Gone()
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	for n, ok := range u.stored {
		if !ok && u.Size > 0 {
			return Object{}, u.Missing(n)
		}
	}
	o, err := commitTemp(u.f, u.Key, u.path, os.Rename)
	if err != nil {
		// A failed fsync may have dropped pages, and a second one would not report that: everything must be written
		// again.
		u.ended = true
		discardTemp(u.f)
		return Object{}, putError(ctx, u.Key, fmt.Errorf("the upload was aborted: %w", err))
	}
	u.made = &o
	return o, nil
}

// Abort implements [Upload].
func (u *dirUpload) Abort(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.made == nil && !u.ended {
		u.ended = true
		discardTemp(u.f)
	}
	return nil
}

// AbortUploads implements [Uploader]. It searches all folders below prefix, but does not follow links.
func (d *Dir) AbortUploads(ctx context.Context, prefix string) (n int, err error) {
	folder, base := prefix[:strings.LastIndexByte(prefix, '/')+1], prefix[strings.LastIndexByte(prefix, '/')+1:]
	root := d.root
	if folder != "" {
		var ok bool
		if root, ok = d.path(strings.TrimSuffix(folder, "/")); !ok {
			return 0, ctx.Err() // no file has such a key
		}
	}
	root += "/" // so that the first folder may be a link
	err = filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		if cerr := ctx.Err(); cerr != nil {
			return cerr
		}
		if err != nil {
			if isAbsent(err) {
				return nil // also: taken away meanwhile
			}
			return fileError("list", path, err)
		}
		top := path != root && filepath.Dir(path) == filepath.Clean(root)
		if e.IsDir() {
			if top && !strings.HasPrefix(e.Name(), base) {
				return fs.SkipDir
			}
			return nil
		}
		want := ""
		if top {
			want = base
		}
		if !e.Type().IsRegular() || !tempOf(e.Name(), want) {
			return nil
		}
		switch err := os.Remove(path); {
		case err == nil:
			n++
		case !isAbsent(err):
			return fileError("delete", path, err)
		}
		return nil
	})
	return n, err
}
