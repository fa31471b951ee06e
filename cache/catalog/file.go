package catalog

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"slices"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/cache/crypt"
	"github.com/shoalfs/shoal/internal/durable"
)

// content is the file that a manifest or a layout reads from: on the heap if it was built here, beside it if loaded.
type content struct {
	data   []byte
	loaded bool
}

// Raw returns the content of the file, for another node. It must not be changed, or used after Close.
func (c *content) Raw() []byte { return c.data }

// Content returns what Close frees, which holds nothing else.
func (c *content) Content() io.Closer { return c }

// FileSize returns the length of the file in bytes, which is also its size in memory.
func (c *content) FileSize() int64 { return int64(len(c.data)) }

// Close frees the memory. No other method may be running or be called afterwards. What was built here stays.
func (c *content) Close() error {
	if !c.loaded {
		return nil
	}
	c.loaded = false
	return unix.Munmap(c.data)
}

// saveUnder writes an immutable file durably, unless it exists. An encrypted file is always written: each has its own
// key, so there is nothing to compare.
func saveUnder(dir, name string, data []byte, what string, key *crypt.Key) (path string, err error) {
	path = filepath.Join(dir, name)
	if err = durable.MkdirAll(dir); err == nil && key != nil {
		err = write(path, what, key.SealFile(what, name, data))
	} else if err == nil {
		if old, none := os.ReadFile(path); none == nil && bytes.Equal(old, data) {
			err = durable.SyncDir(dir) // a crash may have followed the rename
		} else {
			err = write(path, what, slices.Values([][]byte{data}))
		}
	}
	if err != nil {
		return "", fmt.Errorf("save %s: %w", what, err)
	}
	return path, nil
}

// loadFile reads the file at path into memory and calls parse, whose result keeps that memory unless parse fails.
//
// The file is not mapped: a page of a mapping that the disk cannot read is a SIGBUS, which ends the process, and a
// slow one blocks a whole Go process at its next garbage collection. The memory is outside Go's heap, whose size
// determines how much garbage may accumulate.
func loadFile[T any](path, what string, key *crypt.Key, parse func(data []byte) (*T, error)) (v *T, err error) {
	var data []byte
	_, err = readFile(path, what, key, func(n int64) (_ []byte, err error) {
		if n < headerLen || n > math.MaxInt {
			return nil, corrupt("%d bytes long", n)
		}
		data, err = unix.Mmap(-1, 0, int(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
		if err == nil {
			_ = unix.Madvise(data, unix.MADV_HUGEPAGE) // halves the time to fill it, if the kernel has them
		}
		return data, err
	})
	if err == nil {
		err = unix.Mprotect(data, unix.PROT_READ)
	}
	if err == nil {
		v, err = parse(data)
	}
	if err == nil {
		return v, nil
	}
	if data != nil {
		_ = unix.Munmap(data)
	}
	switch {
	case errors.Is(err, ErrNewerFormat):
		err = fmt.Errorf("%w (use that version of shoal, or another --cache-dir)", err)
	case errors.Is(err, ErrCorrupt):
		err = fmt.Errorf("%w (remove it; the dataset is then listed again)", err)
	}
	return nil, fmt.Errorf("load %s %s: %w", what, path, err)
}

// readFile reads the file at path, which is sealed if there is a key, into memory from alloc.
func readFile(path, what string, key *crypt.Key, alloc func(n int64) ([]byte, error)) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	n := st.Size()
	if key != nil {
		n = crypt.FileLen(n)
	}
	data, err := alloc(n)
	if err != nil {
		return nil, err
	}
	if key == nil {
		err = readParallel(f, data)
	} else {
		err = key.OpenFile(what, filepath.Base(path), f, data)
	}
	if errors.Is(err, crypt.ErrOpen) || errors.Is(err, io.EOF) {
		err = corrupt("%v", err)
	}
	return data, err
}

// readParallel fills data from f with several threads: one copies a GiB from the page cache to new memory in 0.6 s.
func readParallel(f *os.File, data []byte) error {
	const piece = 16 << 20
	var g errgroup.Group
	g.SetLimit(runtime.GOMAXPROCS(0))
	for from := 0; from < len(data); from += piece {
		g.Go(func() error {
			_, err := f.ReadAt(data[from:min(from+piece, len(data))], int64(from))
			return err
		})
	}
	return g.Wait()
}

// CheckHeader checks what the headers of manifests, layouts, record tables and the indexes of shards have in common,
// and returns the format's version: they begin with the magic (8), the version (u32) and the header's length (u32), and
// end with the CRC32C of what follows (u32), and that of the header (u32).
func CheckHeader(data []byte, length int, magic string, oldest, newest uint32, what string) (uint32, error) {
	le := binary.LittleEndian
	if len(data) < length {
		return 0, corrupt("%d bytes long, shorter than its header", len(data))
	}
	h, end := data[:length], length-4
	if string(h[:8]) != magic {
		return 0, corrupt("not %s (magic %q)", what, h[:8])
	}
	// Every later format keeps the header's first 16 and last 4 bytes. The checksum is checked before the version, so
	// that a damaged version is not taken for a newer format.
	if got, want := crc32.Checksum(h[:end], castagnoli), le.Uint32(h[end:]); got != want {
		return 0, corrupt("header has checksum %08x, want %08x", got, want)
	}
	version := le.Uint32(h[8:])
	if version > newest {
		return 0, fmt.Errorf("%w: format version %d, but this version reads %d", ErrNewerFormat, version, newest)
	}
	if n := le.Uint32(h[12:]); version < oldest || int(n) != length {
		return 0, corrupt("format version %d, header length %d", version, n)
	}
	return version, nil
}

// CheckContent compares what follows such a header with its checksum.
func CheckContent(data []byte, length int) error {
	want := binary.LittleEndian.Uint32(data[length-8:])
	if got := crc32.Checksum(data[length:], castagnoli); got != want {
		return corrupt("content has checksum %08x, want %08x", got, want)
	}
	return nil
}

// seal writes the two checksums.
func seal(data []byte) {
	binary.LittleEndian.PutUint32(data[120:], crc32.Checksum(data[headerLen:], castagnoli))
	binary.LittleEndian.PutUint32(data[124:], crc32.Checksum(data[:124], castagnoli))
}

// appendOffsets appends where the text of each of list begins among all of them, and where they end.
func appendOffsets[T any](b []byte, list []T, length func(T) int) []byte {
	off := uint64(0)
	for _, v := range list {
		b = binary.LittleEndian.AppendUint64(b, off)
		off += uint64(length(v))
	}
	return binary.LittleEndian.AppendUint64(b, off)
}
