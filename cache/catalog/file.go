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
	"sync"

	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/cache/crypt"
	"github.com/shoalfs/shoal/internal/durable"
)

// saveUnder writes an immutable file durably, unless it exists. An encrypted file is always written: each has its own
// key, so there is nothing to compare.
func saveUnder(dir, name string, data []byte, what string, key *crypt.Key) (path string, err error) {
	path = filepath.Join(dir, name)
	if err := durable.MakeDir(dir); err != nil {
		return "", err
	}
	if key != nil {
		return path, writeParts(path, what, key.SealFile(what, name, data))
	}
	if old, err := os.ReadFile(path); err == nil && bytes.Equal(old, data) {
		return path, durable.SyncDir(dir) // a crash may have followed the rename
	}
	return path, write(path, what, data)
}

// loadFile reads the file at path into memory and calls parse, whose result keeps that memory unless parse fails.
//
// The file is not mapped: a page of a mapping that the disk cannot read is a SIGBUS, which ends the process, and a
// slow one blocks a whole Go process at its next garbage collection. The memory is outside Go's heap, whose size
// determines how much garbage may accumulate.
func loadFile(path, what string, key *crypt.Key, parse func(data []byte) error) error {
	var data []byte
	_, err := readFile(path, what, key, func(n int64) (_ []byte, err error) {
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
		err = parse(data)
	}
	if err == nil {
		return nil
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
	return fmt.Errorf("load %s %s: %w", what, path, err)
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

// readParallel fills data from f with several threads: one takes 0.6 s per GiB to copy from the page cache to new
// memory.
func readParallel(f *os.File, data []byte) error {
	const piece = 16 << 20
	errs := make([]error, (len(data)+piece-1)/piece)
	var wg sync.WaitGroup
	places := make(chan struct{}, runtime.GOMAXPROCS(0))
	for i := range errs {
		places <- struct{}{}
		wg.Go(func() {
			defer func() { <-places }()
			from := i * piece
			_, errs[i] = f.ReadAt(data[from:min(from+piece, len(data))], int64(from))
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// checkHeader checks what the headers of all formats have in common.
func checkHeader(data []byte, magic string, version uint32, what string) error {
	le := binary.LittleEndian
	if len(data) < headerLen {
		return corrupt("%d bytes long, shorter than its header", len(data))
	}
	h := data[:headerLen]
	if string(h[:8]) != magic {
		return corrupt("not a %s (magic %q)", what, h[:8])
	}
	// Every later format keeps the header's first 16 and last 4 bytes. The checksum is checked before the version, so
	// that a damaged version is not taken for a newer format.
	if got, want := crc32.Checksum(h[:124], castagnoli), le.Uint32(h[124:]); got != want {
		return corrupt("header has checksum %08x, want %08x", got, want)
	}
	if v := le.Uint32(h[8:]); v > version {
		return fmt.Errorf("%w: format version %d, but this version reads %d", ErrNewerFormat, v, version)
	} else if v != version {
		return corrupt("format version %d", v)
	}
	if n := le.Uint32(h[12:]); n != headerLen {
		return corrupt("header length %d", n)
	}
	return nil
}
