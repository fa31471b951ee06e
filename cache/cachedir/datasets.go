package cachedir

import (
	"cmp"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	humanize "github.com/dustin/go-humanize"

	"github.com/shoalfs/shoal/cache"
	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/crypt"
	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/segment"
)

// Info describes one dataset in the directory.
type Info struct {
	catalog.Dataset
	Open      bool
	Users     int   // mounts and feeds
	DiskBytes int64 // of its segments
	Kept      int   // extents kept; open datasets only
	Extents   int
}

// Plain is the source without its endpoint, as a user writes it. A key may have a question mark, too.
func (i Info) Plain() string {
	if at := strings.LastIndex(i.Source, "?endpoint="); at >= 0 {
		return i.Source[:at]
	}
	return i.Source
}

// Datasets returns the datasets in the directory, by source, open or not.
func (d *Dir) Datasets() ([]Info, error) {
	facts, err := d.Catalog.Datasets()
	if err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	var infos []Info
	for _, f := range facts {
		infos = append(infos, Info{Dataset: f, Open: d.open[f.ID], DiskBytes: d.idle[f.ID]})
	}
	slices.SortFunc(infos, func(a, b Info) int { return strings.Compare(a.Source, b.Source) })
	return infos, nil
}

// Find returns the dataset that text names: a source as the user wrote it, its canonical name, or the first digits of
// the dataset's id.
func (d *Dir) Find(text string) (Info, error) {
	all, err := d.Datasets()
	if err != nil {
		return Info{}, err
	}
	var found []Info
	named := text
	if src, err := objstore.ParseSource(text); err == nil {
		named = src.String()
	}
	for _, i := range all {
		if i.Source == text || i.Plain() == named ||
			len(text) >= 4 && strings.HasPrefix(hex.EncodeToString(i.ID[:]), text) {
			found = append(found, i)
		}
	}
	switch len(found) {
	case 1:
		return found[0], nil
	case 0:
		return Info{}, fmt.Errorf("no dataset %q in %s (`shoal cache ls %s` lists them)", text, d.o.Path, d.o.Path)
	}
	return Info{}, fmt.Errorf(
		"%q names %d datasets in %s (give the first digits of the id that `shoal cache ls` shows)", text,
		len(found), d.o.Path)
}

// Enter says that a dataset is open, or about to be: nothing else may drop its segments until Leave.
func (d *Dir) Enter(id [16]byte) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.open[id] = true
}

// Leave says that a dataset is no longer open. Its data on disk stays.
func (d *Dir) Leave(id [16]byte) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.open, id)
	_, err := d.countIdle(id)
	return err
}

// OpenDisk attaches a dataset's segments to a volume of it. If --cache-size leaves no space for data, it logs that,
// and the dataset is cached in memory only. versions is how many versions of datasets are open.
func (d *Dir) OpenDisk(v *cache.Volume, id [16]byte, title string, quota int64, versions int, log *slog.Logger) error {
	budget := d.Cache.Budget()
	if limit := budget.Limit(); limit < minDisk {
		err := os.RemoveAll(d.segments(id)) // their tables go when the dataset is opened next
		d.mu.Lock()
		_, _ = d.countIdle(id)
		meta, enough := d.metaOnDisk(), d.enough(versions)
		d.mu.Unlock()
		if over := budget.Used() - limit; over > 0 {
			d.makeRoom(over)
		}
		log.Warn("--cache-size leaves no room for data on disk; caching in memory only",
			"cache_size", humanize.IBytes(uint64(d.o.Size)), "metadata", humanize.IBytes(uint64(meta)),
			"remedy", "give at least "+RoundUp(enough))
		return err
	}
	if err := d.Catalog.Touch(id, title); err != nil {
		log.Warn("cannot record in the catalog that the dataset is in use", "cause", err)
	}
	counted := func() int64 {
		d.mu.Lock()
		defer d.mu.Unlock()
		defer delete(d.idle, id)
		return d.idle[id]
	}
	return v.OpenDisk(d.segments(id),
		segment.Options{Key: d.Key, MaxBytes: quota, Counted: counted, Index: d.Catalog.Index(id), Logger: log})
}

// Remove deletes a dataset from the directory. It must not be open, nor be opened before this returns. Its lists stay
// until the catalog's next GC. A slow disk holds up nobody else.
func (d *Dir) Remove(id [16]byte) error {
	d.Enter(id) // others leave it alone
	err := errors.Join(os.RemoveAll(d.segments(id)), d.Leave(id))
	if err == nil {
		err = d.Catalog.Forget(id)
	}
	return err
}

// Rekey makes another secret the one that opens the directory; the old one no longer does. Cached data stays as it
// is: it is encrypted with the directory's own key.
func (d *Dir) Rekey(s crypt.Secret) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.Key == nil {
		return fmt.Errorf(
			"%w: the cache in %s is not encrypted (remove the folder and begin with --encryption-key-file)",
			ErrEncryption, d.o.Path)
	}
	return d.Key.Rewrap(d.o.Path, s)
}

// Accepts fails if a process that shares the directory gives another key than the directory's. A process without a
// key was authorized otherwise.
func (d *Dir) Accepts(s *crypt.Secret) error {
	switch {
	case s == nil:
		return nil
	case d.Key == nil:
		return fmt.Errorf("%w: the daemon of %s does not encrypt its cache (give no key, or another --cache-dir)",
			ErrEncryption, d.o.Path)
	case d.Key.SecretID() != s.ID():
		return fmt.Errorf(
			"%w: %w: the daemon of %s has the key %s and was given %s (give that key, none, or another --cache-dir)",
			ErrEncryption, crypt.ErrWrongSecret, d.o.Path, d.Key.SecretID(), s.ID())
	}
	return nil
}

// Usage returns the bytes that all segments occupy, and their limit.
func (d *Dir) Usage() (used, limit int64) { return d.Cache.Budget().Used(), d.Cache.Budget().Limit() }

func (d *Dir) segments(id [16]byte) string {
	return filepath.Join(d.o.Path, "segments", hex.EncodeToString(id[:]))
}

// findIdle counts the segments that datasets left on disk. If that exceeds the limit nothing is dropped yet: the
// choice depends on which dataset is opened.
func (d *Dir) findIdle() error {
	entries, err := os.ReadDir(filepath.Join(d.o.Path, "segments"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("cache directory: %w", err)
	}
	for _, e := range entries {
		if id, ok := catalog.ParseID(e.Name()); ok && e.IsDir() {
			_, _ = d.countIdle(id) // an error shows again when the dataset is opened
		}
	}
	return nil
}

func folderBytes(dir string) (n int64, err error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	for _, e := range entries {
		if fi, err := e.Info(); err == nil {
			n += fi.Size()
		}
	}
	return n, err
}

// makeRoom has datasets that are not open give back need bytes, least recently used first. It reports whether any did.
func (d *Dir) makeRoom(need int64) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	log := d.o.Logger
	facts, err := d.Catalog.Datasets()
	if err != nil {
		log.Error("datasets cannot be listed, so none of their space is freed", "cause", err)
		return false
	}
	byID := map[[16]byte]catalog.Dataset{}
	for _, f := range facts {
		byID[f.ID] = f
	}
	// Those that the catalog does not know, and so not when they were used, come first.
	candidates := slices.SortedFunc(maps.Keys(d.idle), func(a, b [16]byte) int {
		return cmp.Or(byID[a].LastUsed.Compare(byID[b].LastUsed), strings.Compare(byID[a].Source, byID[b].Source))
	})
	freed := int64(0)
	for _, id := range candidates {
		if freed >= need {
			break
		}
		if d.open[id] || byID[id].Pinned { // or it is being opened
			continue
		}
		before := d.idle[id]
		segments, err := d.Cache.GiveBack(d.segments(id), segment.Options{Key: d.Key, Logger: log,
			MaxBytes: d.Cache.Budget().Limit(), Index: d.Catalog.Index(id)}, need-freed)
		if err != nil {
			log.Error("cannot free space of a dataset that is not open", "source", byID[id].Source, "cause", err)
		}
		left, _ := d.countIdle(id)
		if freed += before - left; segments > 0 {
			log.Warn("cached data of a dataset that is not open was dropped: another dataset needs the space (pin "+
				"it, or raise --cache-size)", "source", byID[id].Source, "gave_back",
				humanize.IBytes(uint64(before-left)), "segments", segments, "left", humanize.IBytes(uint64(left)))
		}
	}
	return freed > 0
}

// countIdle counts what a dataset that is not open has on disk. d.mu is held, or d is new.
func (d *Dir) countIdle(id [16]byte) (n int64, err error) {
	n, err = folderBytes(d.segments(id))
	d.Cache.Budget().Take(n)
	d.Cache.Budget().Give(d.idle[id])
	if d.idle[id] = n; n == 0 {
		delete(d.idle, id)
	}
	return n, err
}
