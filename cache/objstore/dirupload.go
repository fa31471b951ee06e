package objstore

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	pathpkg "path"
	"path/filepath"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/internal/durable"
)

// nameMax is the longest name of a file on Linux, in bytes.
const nameMax = 255

// createTemp makes the folder of path and, in it, the temporary file that will become path: a rename there always
// stays on one file system.
func createTemp(path string) (*os.File, error) {
	folder, base := filepath.Split(path)
	if err := durable.MkdirAll(filepath.Clean(folder)); err != nil {
		return nil, err
	}
	name := tmpPrefix + rand.Text() + "-" + base
	return os.OpenFile(folder+name[:min(len(name), nameMax)], os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o644)
}

// discardTemp removes a file of createTemp. Its errors do not matter.
func discardTemp(f *os.File) {
	_ = f.Close()
	_ = os.Remove(f.Name())
}

// commitTemp makes a file of createTemp the object: fsync, rename, fsync the folder. After success the file is closed
// and its old name gone.
func commitTemp(f *os.File, key, path string, rename func(from, to string) error) (Object, error) {
	err := f.Sync()
	fi, failed := f.Stat()
	if err = cmp.Or(err, failed, f.Close()); err == nil {
		if err = rename(f.Name(), path); err == nil {
			err = durable.SyncDir(filepath.Dir(path))
		}
	}
	if err != nil {
		return Object{}, err
	}
	return fileObject(key, fi), nil
}

// replace renames from to to, in place of folders, too, if no file is below: Delete leaves them.
func replace(from, to string) error {
	var folders []string
	err := filepath.WalkDir(to, func(path string, e fs.DirEntry, err error) error {
		if folders = append(folders, path); err == nil && !e.IsDir() {
			return fs.ErrExist
		}
		return err
	})
	for n := len(folders); n > 0 && err == nil; n-- {
		err = unix.Rmdir(folders[n-1])
	}
	return os.Rename(from, to)
}

// renameNew renames from to to and fails with EEXIST if to exists. A link is the oldest way to do that atomically;
// file systems without links have renameat2.
func renameNew(from, to string) error {
	err := unix.Link(from, to)
	if err == nil {
		return os.Remove(from)
	} else if errors.Is(err, unix.EEXIST) {
		return err
	}
	if err2 := unix.Renameat2(unix.AT_FDCWD, from, unix.AT_FDCWD, to, unix.RENAME_NOREPLACE); err2 == nil ||
		errors.Is(err2, unix.EEXIST) {
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
	return makeFile(ctx, key, path, renameNew, func(f *os.File) error {
		_, err := f.Write(data)
		return err
	})
}

// makeFile makes the object of what fill writes.
func makeFile(ctx context.Context, key, path string, rename func(from, to string) error, fill func(f *os.File) error) (
	o Object, err error) {
	f, err := createTemp(path)
	if err != nil {
		return Object{}, putError(ctx, key, err)
	}
	if err = fill(f); err == nil {
		if o, err = commitTemp(f, key, path, rename); err == nil {
			return o, nil
		}
	}
	discardTemp(f)
	if errors.Is(err, fs.ErrExist) {
		return Object{}, Exists(key)
	}
	if _, ok := errors.AsType[*Error](err); ok {
		return Object{}, err
	}
	return Object{}, putError(ctx, key, err)
}

// target returns the file in which key is stored.
func (d *Dir) target(ctx context.Context, key string) (string, error) {
	if err := ctx.Err(); err != nil {
		return "", err
	}
	path, ok := d.path(key)
	if !ok || strings.HasPrefix(filepath.Base(path), tmpPrefix) {
		return "", &Error{Op: "put", Key: key, Kind: KindInvalid,
			Err: errors.New("this key cannot be the name of a file")}
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

// Delete implements [Uploader]. Folders stay, and are listed if they are empty. A version stored between the comparison
// of the ETag and the deletion is deleted, too: no system call does both.
func (d *Dir) Delete(ctx context.Context, key, etag string) error {
	err := ctx.Err()
	if etag != "" || AuthorOf(ctx) != "" {
		err = Current(ctx, d, Object{Key: key, ETag: etag})
	}
	if err != nil {
		return UnlessMissing(err)
	}
	path, ok := d.path(key)
	if !ok {
		return nil // this key cannot be the name of a file
	}
	if err = unix.Unlink(path); err == nil {
		err = durable.SyncDir(filepath.Dir(path))
	} else if fi, serr := os.Lstat(path); isAbsent(err) || (serr == nil && fi.IsDir()) {
		return nil
	}
	if err != nil {
		return fileError("delete", key, err)
	}
	return nil
}

// Copy implements [Uploader]. The kernel copies; file systems that can share the bytes.
func (d *Dir) Copy(ctx context.Context, from Object, key string) (Object, error) {
	path, err := d.target(ctx, key)
	if err != nil {
		return Object{}, err
	}
	source, _ := d.path(from.Key) // no file is at ""
	fd, err := d.open(source, from)
	if err != nil {
		return Object{}, err
	}
	in := os.NewFile(uintptr(fd), source)
	defer in.Close()
	return makeFile(ctx, key, path, replace, func(out *os.File) error {
		const step = 64 << 20 // cancellable
		for done := int64(0); done < from.Size; done += step {
			_, err := io.CopyN(out, in, min(step, from.Size-done))
			if err = cmp.Or(ctx.Err(), sameVersion(fd, from), err); err != nil {
				return err
			}
		}
		return nil
	})
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
	return &dirUpload{PartPlan: plan, d: d, path: path, f: f, stored: make([]bool, plan.Parts)}, nil
}

type dirUpload struct {
	PartPlan
	d    *Dir
	path string
	f    *os.File

	mu     sync.Mutex
	stored []bool
	made   *Object // by Complete
}

// ID implements [Upload]: the temporary file's path below the folder.
func (u *dirUpload) ID() string { return pathpkg.Join(pathpkg.Dir(u.Key), filepath.Base(u.f.Name())) }

func (u *dirUpload) Part(ctx context.Context, n int, p []byte) error {
	if err := cmp.Or(ctx.Err(), u.Check(n, len(p))); err != nil {
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

// over reports whether the upload has ended, which closes its file, or AbortUpload has removed that.
func (u *dirUpload) over() bool {
	fi, err := u.f.Stat()
	return err != nil || fi.Sys().(*syscall.Stat_t).Nlink == 0
}

func (u *dirUpload) Complete(ctx context.Context) (Object, error) {
	if err := ctx.Err(); err != nil {
		return Object{}, err
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.made != nil {
		return *u.made, nil
	}
	if u.over() {
		return Object{}, u.Gone()
	}
	for n, ok := range u.stored {
		if !ok && u.Size > 0 {
			return Object{}, u.Missing(n)
		}
	}
	if match := MatchOf(ctx); match != "" {
		if err := Current(ctx, u.d, Object{Key: u.Key, ETag: match}); err != nil {
			return Object{}, err
		}
	}
	o, err := commitTemp(u.f, u.Key, u.path, replace)
	if err != nil {
		// A failed fsync may have dropped pages, and a second one would not report that: everything must be written
		// again.
		discardTemp(u.f)
		return Object{}, putError(ctx, u.Key, fmt.Errorf("the upload was aborted: %w", err))
	}
	u.made = &o
	return o, nil
}

func (u *dirUpload) Abort(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.made == nil {
		discardTemp(u.f)
	}
	return nil
}

// Resume implements [Uploader]: a temporary file does not show which of its parts were written, so none goes on.
func (d *Dir) Resume(_ context.Context, key, _ string, _, _ int64) (Upload, int, error) {
	return nil, 0, PartPlan{Key: key}.Gone()
}

// AbortUpload implements [Uploader].
func (d *Dir) AbortUpload(ctx context.Context, _, id string) error {
	path, ok := d.path(id)
	if err := ctx.Err(); err != nil || !ok || !strings.HasPrefix(filepath.Base(path), tmpPrefix) {
		return err
	}
	if err := os.Remove(path); err != nil && !isAbsent(err) {
		return fileError("delete", id, err)
	}
	return nil
}

// Uploads implements [Uploader]. It searches all folders below prefix, but does not follow links. The end of a long
// key is cut off.
func (d *Dir) Uploads(ctx context.Context, prefix string) (list []Unfinished, err error) {
	folder, root := prefix[:strings.LastIndexByte(prefix, '/')+1], d.root
	if below, ok := d.path(strings.TrimSuffix(folder, "/")); ok {
		root = below
	} else if folder != "" {
		return nil, ctx.Err() // no file has such a key
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
		id := strings.TrimPrefix(path, d.root+"/")
		if e.IsDir() {
			if path != root && !strings.HasPrefix(id, prefix) {
				return fs.SkipDir
			}
			return nil
		}
		rest, ok := strings.CutPrefix(e.Name(), tmpPrefix)
		_, of, _ := strings.Cut(rest, "-") // older versions kept no name
		key := strings.TrimSuffix(id, e.Name()) + of
		if !ok || !strings.HasPrefix(key, prefix) && (len(e.Name()) < nameMax || !strings.HasPrefix(prefix, key)) {
			return nil
		}
		if e.Type().IsRegular() {
			list = append(list, Unfinished{key, id})
		}
		return nil
	})
	return list, err
}
