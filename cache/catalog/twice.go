package catalog

import (
	"bytes"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
)

// A small file that no listing brings back stands twice, at PATH and at PATH.copy, since one may be lost or damaged.
// Each is a line with its kind, the format's version and the CRC32C of the rest, and the rest. In an encrypted folder
// both are sealed (package crypt). The first is the truth: it is replaced first, and what a crash left of the copy
// follows it.
const (
	copySuffix  = ".copy"
	twiceFormat = "shoal %s 1 %08x\n"
)

// saveTwice replaces a file and its copy. The killpoints' names begin with what.
func (c *Catalog) saveTwice(path, kind, what string, body []byte) error {
	if err := c.saveOnce(path, kind, what, body); err != nil {
		return err
	}
	c.saveCopy(path, kind, what, body)
	return nil
}

// saveCopy replaces the copy, which is not worth an error: the next change, or the next start, tries again.
func (c *Catalog) saveCopy(path, kind, what string, body []byte) {
	if err := c.saveOnce(path+copySuffix, kind, what, body); err != nil {
		c.log.Warn("a copy could not be written, and there is none for now", "path", path+copySuffix, "err", err)
		_ = os.Remove(path + copySuffix) // none is better than an old one
	}
}

func (c *Catalog) saveOnce(path, kind, what string, body []byte) error {
	data := append(fmt.Appendf(nil, twiceFormat, kind, crc32.Checksum(body, castagnoli)), body...)
	return write(path, what, c.key.SealFile(kind, filepath.Base(path), data))
}

// loadTwice reads what saveTwice wrote, and mends whichever of the two is not right. Its error wraps fs.ErrNotExist if
// there is neither, and ErrCorrupt if none is right.
func (c *Catalog) loadTwice(path, kind string) ([]byte, error) {
	body, err := c.loadOnce(path, kind)
	if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, ErrCorrupt) && !errors.Is(err, syscall.EIO) {
		return nil, err
	}
	second, bad := c.loadOnce(path+copySuffix, kind)
	switch {
	case err != nil && bad == nil:
		c.mend(path, err)
		if e := c.saveOnce(path, kind, kind, second); e != nil {
			c.log.Warn("a file of the cache could not be repaired; its copy is used", "path", path, "err", e)
		}
		return second, nil
	case err != nil && errors.Is(err, fs.ErrNotExist) && !errors.Is(bad, fs.ErrNotExist):
		return nil, fmt.Errorf("there is no %s, and its copy: %w", path, bad)
	case err != nil:
		return nil, err
	case bad != nil && !errors.Is(bad, fs.ErrNotExist): // none: it could not be written
		c.mend(path+copySuffix, bad)
		c.saveCopy(path, kind, kind, body)
	case !bytes.Equal(body, second):
		c.saveCopy(path, kind, kind, body)
	}
	return body, nil
}

// mend notes that a file is written anew by the other one.
func (c *Catalog) mend(path string, err error) {
	if errors.Is(err, fs.ErrNotExist) {
		err = errors.New("it was missing")
	}
	c.log.Warn("a file of the cache is restored from its copy", "path", path, "err", err)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.mended = append(c.mended, fmt.Sprintf("%s: %v (repaired: restored from its copy)", path, err))
}

func (c *Catalog) loadOnce(path, kind string) ([]byte, error) {
	b, err := readFile(path, kind, c.key, func(n int64) ([]byte, error) { return make([]byte, n), nil })
	if err != nil {
		return nil, err
	}
	head, body, _ := bytes.Cut(b, []byte("\n"))
	if want := fmt.Sprintf(twiceFormat, kind, crc32.Checksum(body, castagnoli)); string(head)+"\n" != want {
		return nil, corrupt("%s begins with %.40q, want %q", path, head, want)
	}
	return body, nil
}
