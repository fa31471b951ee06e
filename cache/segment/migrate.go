package segment

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/shoalfs/shoal/internal/killpoint"
)

// Migrate moves the segments of the older layout, which lie in dir itself, each to the folder of the
// dataset that its first valid record names: dir/<32 hex digits>/NNNNNNNN.seg. A segment without a valid record is
// removed and logged. It may be killed at any time and run again. No store may have one of the folders open.
//
// A segment of a newer version is an error that wraps ErrNewerFormat, and nothing is moved then. The
// name is taken from the number in the header; where the folder has that number already, the segment
// gets the next one that is free.
func Migrate(dir string) (moved int, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("segment: move the segments of %s to their datasets: %w", dir, err)
		}
	}()
	names, err := osFS{}.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	type move struct {
		path string
		old  oldSegment
	}
	var moves []move
	for _, name := range names {
		if id, ok := segmentID(name); ok {
			path := filepath.Join(dir, name)
			old, err := readOldSegment(path, id)
			if err != nil {
				return 0, fmt.Errorf("%s: %w", path, err)
			}
			moves = append(moves, move{path, old})
		}
	}
	folders := make(map[string]bool)
	for _, m := range moves {
		if !m.old.valid {
			slog.Warn("cache segment of the older layout has no valid record; removed", "file", m.path)
			if err := os.Remove(m.path); err != nil {
				return moved, err
			}
			killpoint.Pass("segment.migrate.removed")
			continue
		}
		folder := filepath.Join(dir, fmt.Sprintf("%x", m.old.dataset))
		if !folders[folder] {
			if err := os.MkdirAll(folder, 0o777); err != nil {
				return moved, err
			}
			killpoint.Pass("segment.migrate.folder")
		}
		folders[folder] = true
		if err := m.old.move(m.path, folder); err != nil {
			return moved, err
		}
		killpoint.Pass("segment.migrate.renamed")
		moved++
	}
	for folder := range folders {
		if err := (osFS{}).SyncDir(folder); err != nil {
			return moved, err
		}
		killpoint.Pass("segment.migrate.newdir")
	}
	if len(moves) > 0 {
		err = osFS{}.SyncDir(dir)
		killpoint.Pass("segment.migrate.olddir")
	}
	return moved, err
}

// oldSegment is what Migrate must know of a segment.
type oldSegment struct {
	valid   bool
	id      uint32 // of the header
	salt    uint64
	dataset [16]byte
}

func readOldSegment(path string, id uint32) (old oldSegment, err error) {
	f, err := osFS{}.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return old, err
	}
	defer func() { _ = f.Close() }()
	size, err := f.Size()
	if err != nil {
		return old, err
	}
	var head [segHeaderLen]byte
	n, err := f.ReadAt(head[:], 0)
	if err != nil && !errors.Is(err, io.EOF) {
		return old, err
	}
	old.id = headerID(head[:n], id)
	old.salt, err = parseSegmentHeader(head[:n], old.id)
	if errors.Is(err, ErrCorrupt) {
		var ok bool
		if old.salt, ok = salvageSalt(f, size); !ok {
			return old, nil
		}
		err = mendHeader(f, old.id, old.salt)
	}
	if err != nil {
		return old, err
	}
	w := window{r: f, size: size}
	_, h, err := resync(&w, old.salt, segHeaderLen, size)
	if err != nil || h.rec.Length == 0 {
		return old, err
	}
	old.valid, old.dataset = true, h.rec.Dataset
	return old, nil
}

// move renames a segment into a folder.
func (old *oldSegment) move(path, folder string) error {
	target := func(id uint32) string { return filepath.Join(folder, fmt.Sprintf("%08d.seg", id)) }
	id := old.id
	for {
		_, err := os.Lstat(target(id))
		if errors.Is(err, os.ErrNotExist) {
			break
		}
		if err != nil {
			return err
		}
		if id++; id > maxSeg {
			return fmt.Errorf("all %d segment numbers of %s are used up (empty the cache folder)", maxSeg, folder)
		}
	}
	if id != old.id {
		f, err := osFS{}.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			return err
		}
		if err := errors.Join(mendHeader(f, id, old.salt), f.Close()); err != nil {
			return err
		}
	}
	return os.Rename(path, target(id))
}
