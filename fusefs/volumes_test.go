package fusefs

import (
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/cache/catalog"
)

// Kinds of volumes that a child can serve besides memVolume. All have its bytes.
const (
	preadVolume = "pread" // one file, read into a buffer
	crcVolume   = "crc"   // the same, with the checksum that the cache computes
	copyVolume  = "copy"  // memory, through ReadAt
	lendVolume  = "lend"  // memory, lent
)

// makeVolume wraps v. folder gets the one file of the first kind.
func makeVolume(v *memVolume, kind, folder string) (Volume, error) {
	switch kind {
	case "":
		return v, nil
	}
	o := &oneFile{memVolume: v, crc: kind == crcVolume}
	m := v.Manifest()
	var at int64
	for i := range m.Len() {
		o.offsets = append(o.offsets, at)
		at = (at + m.Size(i) + 4095) &^ 4095
	}
	all := make([]byte, at)
	for i := range m.Len() {
		v.arena.readAt(m.Path(i), m.ETag(i), all[o.offsets[i]:o.offsets[i]+m.Size(i)], 0)
	}
	switch kind {
	case copyVolume:
		o.all = all
		return o, nil
	case lendVolume:
		o.all = all
		return &lender{oneFile: o}, nil
	}
	path := filepath.Join(folder, "onefile")
	if fi, err := os.Stat(path); err != nil || fi.Size() != at { // an earlier child's is as good
		if err := os.WriteFile(path, all, 0o600); err != nil {
			return nil, err
		}
	}
	var err error
	o.fd, err = unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	return o, err
}

// oneFile has its files in one file or in memory, each from a page boundary on.
type oneFile struct {
	*memVolume
	offsets []int64
	fd      int
	crc     bool
	all     []byte
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func (o *oneFile) ReadAt(_ context.Context, _ *catalog.Manifest, file int, p []byte, off int64) (int, error) {
	at := o.offsets[file] + off
	if o.all != nil {
		return copy(p, o.all[at:]), nil
	}
	n, err := unix.Pread(o.fd, p, at)
	if o.crc {
		crc32.Checksum(p[:n], castagnoli)
	}
	return n, err
}

// ReadNow implements Volume: all is in memory, also the page cache.
func (o *oneFile) ReadNow(m *catalog.Manifest, file int, p []byte, off int64) bool {
	n, err := o.ReadAt(context.Background(), m, file, p, off)
	return err == nil && n == len(p)
}

// lender lends, but for every seventh file.
type lender struct {
	*oneFile
	lent, returned atomic.Int64
}

func (l *lender) Lend(_ *catalog.Manifest, file int, off int64, n int) ([]byte, func(), bool) {
	if file%7 == 6 {
		return nil, nil, false
	}
	l.lent.Add(1)
	at := l.offsets[file] + off
	return l.all[at : at+int64(n)], func() { l.returned.Add(1) }, true
}

// localCopy writes a dataset as local files with the modes and times that the mount shows.
func localCopy(t testing.TB, files []testFile, content func(testFile) []byte) string {
	t.Helper()
	dir := t.TempDir()
	for _, f := range files {
		path := filepath.Join(dir, f.path)
		mtime := f.mtime
		if mtime.IsZero() {
			mtime = epoch
		}
		err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, content(f), 0o444),
			os.Chtimes(path, mtime, mtime))
		if err != nil {
			t.Fatal(err)
		}
	}
	m := buildManifest(files)
	for d := m.Dirs() - 1; d >= 0; d-- {
		path := filepath.Join(dir, m.DirPath(d))
		if err := errors.Join(os.Chmod(path, 0o555), os.Chtimes(path, m.DirTime(d), m.DirTime(d))); err != nil {
			t.Fatal(fmt.Errorf("%s: %w", path, err))
		}
	}
	return dir
}
