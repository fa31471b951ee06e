package shard

import (
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/cache/objstore"
)

// Unpacked is the progress and the result of [Set.Unpack].
type Unpacked struct {
	Files int   // that are in the folder
	Kept  int   // of these, those that were there already
	Bytes int64 // of Files
}

const (
	unpackers = 16
	// unpackPiece is the length of a read: neighbours in a shard share one, and a larger file takes several.
	unpackPiece = 8 << 20
	// unpackFolder holds what is being written, at the top of the folder.
	unpackFolder = ".shoal-unpack"
)

// Unpack restores the files of the set under the folder dir, which it makes if there is none, and verifies them against
// the checksums of the index. Foreign tars without an index of ours have none. progress is never called concurrently.
//
// A file appears complete or not at all, and nothing outside dir is written. Files that are there and equal are kept,
// so that a call continues where an earlier one ended. One that is there and differs is an error. Members whose name no
// file can have are left out; then Unpack returns an error in the end.
func (s *Set) Unpack(ctx context.Context, dir string, progress func(Unpacked)) (_ Unpacked, err error) {
	if err := os.MkdirAll(dir, 0o777); err != nil {
		return Unpacked{}, fmt.Errorf("unpack: %w", err)
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return Unpacked{}, fmt.Errorf("unpack: %w", err)
	}
	defer func() { _ = root.Close() }()
	top, err := root.Open(".")
	if err != nil {
		return Unpacked{}, fmt.Errorf("unpack: %w", err)
	}
	defer top.Close()
	if err := unix.Flock(int(top.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return Unpacked{}, fmt.Errorf("unpack: %s: another process unpacks here (let it finish): %w", dir, err)
	}
	u := &unpacker{Set: s, objects: s.Objects(), root: root, dir: dir, progress: progress}
	u.buffers.New = func() any { return new([unpackPiece]byte) }
	// An earlier run that was killed has left some.
	if err = root.RemoveAll(unpackFolder); err == nil {
		err = root.Mkdir(unpackFolder, 0o700)
	}
	if err != nil {
		return Unpacked{}, fmt.Errorf("unpack to %s: %w (give a folder that this user can write)", dir, err)
	}
	err = errors.Join(u.run(ctx), root.RemoveAll(unpackFolder))
	if err == nil {
		err = unix.Syncfs(int(top.Fd())) // the folders
	}
	if err == nil && len(u.leftOut) > 0 {
		err = fmt.Errorf(
			"%d members have names that no file below a folder can have, and were left out: %s (tar lists them)",
			len(u.leftOut), strings.Join(u.leftOut[:min(len(u.leftOut), maxExamples)], ", "))
	}
	if err != nil {
		return u.now, fmt.Errorf("unpack: %w", err)
	}
	return u.now, nil
}

type unpacker struct {
	*Set
	objects  []objstore.Object
	root     *os.Root
	dir      string
	progress func(Unpacked)
	buffers  sync.Pool // of *[unpackPiece]byte
	leftOut  []string

	mu  sync.Mutex
	now Unpacked
}

// run hands neighbours to goroutines that restore them.
func (u *unpacker) run(ctx context.Context) (err error) {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(unpackers)
	var group []Member
	send := func() {
		if members := group; len(members) > 0 {
			g.Go(func() error { return u.restore(ctx, members) })
		}
		group = nil
	}
	for m, failed := range u.Members(ctx) {
		if err = failed; err != nil {
			break
		}
		if !filepath.IsLocal(m.Path) || path.Clean(m.Path) != m.Path || strings.IndexByte(m.Path, 0) >= 0 ||
			m.Path == "." ||
			slices.ContainsFunc(strings.Split(m.Path, "/"), func(name string) bool { return len(name) > 255 }) ||
			m.Path == unpackFolder || strings.HasPrefix(m.Path, unpackFolder+"/") {
			u.leftOut = append(u.leftOut, fmt.Sprintf("%.300q in %s", m.Path, u.Shards[m.Shard].Key))
			continue
		}
		if len(group) > 0 && (m.Shard != group[0].Shard || m.Off+m.Size-group[0].Off > unpackPiece) {
			send()
		}
		group = append(group, m)
	}
	if err == nil {
		send()
	}
	return errors.Join(g.Wait(), err)
}

// restore restores neighbours in a shard. Of several the last ends at most unpackPiece after the first begins.
func (u *unpacker) restore(ctx context.Context, group []Member) error {
	buf := u.buffers.Get().(*[unpackPiece]byte)
	defer u.buffers.Put(buf)
	var todo []Member
	for _, m := range group {
		sum, there, err := u.there(m, buf[:])
		switch {
		case err != nil:
			return err
		case there && m.Summed && sum != m.Sum:
			return u.differs(m)
		case there && m.Summed:
			u.done(m, true)
		default:
			todo = append(todo, m)
		}
	}
	if len(todo) == 0 {
		return nil
	}
	first, last := todo[0], todo[len(todo)-1]
	whole := last.Off + last.Size - first.Off
	if whole <= unpackPiece && len(todo) > 1 {
		err := u.r.ReadAt(ctx, u.objects[first.Shard], buf[:whole], first.Off)
		if err == nil {
			for _, m := range todo {
				data := buf[m.Off-first.Off:][:m.Size]
				if err := u.write(m, func(_ int64, n int64) ([]byte, error) { return data[:n], nil }); err != nil {
					return err
				}
			}
			return nil
		}
		// otherwise one is damaged: read alone, it is the one that fails
		if objstore.KindOf(err) != objstore.KindInvalid {
			return fmt.Errorf("%s to %s: %w", first.Path, last.Path, err)
		}
	}
	for _, m := range todo {
		err := u.write(m, func(off, n int64) ([]byte, error) {
			if err := u.r.ReadAt(ctx, u.objects[m.Shard], buf[:n], m.Off+off); err != nil {
				return nil, fmt.Errorf("%s: %w", m.Path, err)
			}
			return buf[:n], nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// there returns whether m's file is there already, and its checksum.
func (u *unpacker) there(m Member, buf []byte) (sum uint32, there bool, err error) {
	switch fi, err := u.root.Lstat(m.Path); {
	case errors.Is(err, fs.ErrNotExist):
		return 0, false, nil
	case err != nil:
		return 0, false, err
	case !fi.Mode().IsRegular() || fi.Size() != m.Size:
		return 0, true, u.differs(m)
	}
	f, err := u.root.Open(m.Path)
	if err != nil {
		return 0, true, err
	}
	defer f.Close()
	h := crc32.New(castagnoli)
	_, err = io.CopyBuffer(h, struct{ io.Reader }{f}, buf) // by buf: the file itself would take a small one
	return h.Sum32(), true, err
}

func (u *unpacker) differs(m Member) error {
	return fmt.Errorf("%s is there already, and is not what %s holds (move it away, or unpack into another folder)",
		filepath.Join(u.dir, m.Path), u.Shards[m.Shard].Key)
}

// write makes m's file from pieces that read returns.
func (u *unpacker) write(m Member, read func(off, n int64) ([]byte, error)) (err error) {
	temp := fmt.Sprintf("%s/%d-%d", unpackFolder, m.Shard, m.Off)
	f, err := u.root.OpenFile(temp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
	if err != nil {
		return err
	}
	defer f.Close()
	var sum uint32
	for off := int64(0); off < m.Size; off += unpackPiece {
		data, err := read(off, min(unpackPiece, m.Size-off))
		if err != nil {
			return err
		}
		sum = crc32.Update(sum, castagnoli, data)
		if _, err := f.Write(data); err != nil {
			return err
		}
	}
	if m.Summed && sum != m.Sum {
		return fmt.Errorf("%q in %s has checksum %08x, and its index says %08x (restore the shard, or pack the "+
			"source again into another place)", m.Path, u.Shards[m.Shard].Key, sum, m.Sum)
	}
	if !m.Summed { // only now is it known whether a file that is there is this one
		old, there, err := u.there(m, make([]byte, 64<<10))
		switch {
		case err != nil:
			return err
		case there && old != sum:
			return u.differs(m)
		case there:
			u.done(m, true)
			return u.root.Remove(temp)
		}
	}
	if err := f.Sync(); err != nil {
		return err
	}
	if !m.ModTime.IsZero() {
		if err := u.root.Chtimes(temp, m.ModTime, m.ModTime); err != nil {
			return err
		}
	}
	if err := u.root.MkdirAll(path.Dir(m.Path), 0o777); err != nil {
		return err
	}
	if err := u.root.Rename(temp, m.Path); err != nil {
		return err
	}
	u.done(m, false)
	return nil
}

func (u *unpacker) done(m Member, kept bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.now.Files++
	u.now.Bytes += m.Size
	if kept {
		u.now.Kept++
	}
	if u.progress != nil {
		u.progress(u.now)
	}
}
