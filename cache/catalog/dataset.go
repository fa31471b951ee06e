package catalog

import (
	"bytes"
	"cmp"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"time"

	"github.com/shoalfs/shoal/internal/killpoint"
)

// Dataset is what the catalog holds of one dataset of a cache folder.
type Dataset struct {
	ID       [16]byte
	Source   string // canonical; "" if only record tables are left of it
	Version  string // of the manifest; "" before the first listing
	Files    int
	Bytes    int64 // of all its files, cached or not
	Quota    int64 // bytes of the cache that it may take; 0 is no limit of its own
	Pinned   bool
	LastUsed time.Time // of the last Touch
}

// Datasets returns all datasets that the catalog holds anything of, the last used one first.
func (c *Catalog) Datasets() ([]Dataset, error) {
	list, err := c.datasets()
	if err != nil {
		return nil, fmt.Errorf("catalog: %w", err)
	}
	return list, nil
}

func (c *Catalog) datasets() ([]Dataset, error) {
	byID := make(map[[16]byte]string)
	sources := make(map[string]sourceValue)
	if err := each(c, sourcePrefix, func(name string, v sourceValue) { byID[DatasetID(name)], sources[name] = name, v }); err != nil {
		return nil, err
	}
	var list []Dataset
	seen := make(map[[16]byte]bool)
	add := func(d Dataset) {
		if seen[d.ID] {
			return
		}
		seen[d.ID] = true
		s := sources[d.Source]
		d.Version, d.Files, d.Bytes = s.Version, s.Files, s.Bytes
		list = append(list, d)
	}
	named := make(map[string]bool)
	if err := each(c, datasetPrefix, func(key string, v datasetValue) {
		id, ok := parseID(key)
		if !ok {
			return
		}
		if v.Source == "" { // never touched
			v.Source = byID[id]
		}
		named[v.Source] = true
		add(Dataset{ID: id, Source: v.Source, Quota: v.Quota, Pinned: v.Pinned, LastUsed: v.LastUsed})
	}); err != nil {
		return nil, err
	}
	for name := range sources {
		if !named[name] {
			add(Dataset{ID: DatasetID(name), Source: name})
		}
	}
	entries, err := os.ReadDir(c.tablesDir())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	for _, e := range entries {
		if id, ok := parseID(e.Name()); ok {
			add(Dataset{ID: id})
		}
	}
	slices.SortFunc(list, func(x, y Dataset) int {
		return cmp.Or(y.LastUsed.Compare(x.LastUsed), cmp.Compare(x.Source, y.Source), bytes.Compare(x.ID[:], y.ID[:]))
	})
	return list, nil
}

// parseID returns the dataset that has this id in hex.
func parseID(text string) (id [16]byte, ok bool) {
	n, err := hex.Decode(id[:], []byte(text)[:min(len(text), 32)])
	return id, err == nil && n == len(id) && len(text) == 32
}

// SetQuota sets how many bytes of the cache a dataset may take; 0 is no limit of its own.
func (c *Catalog) SetQuota(id [16]byte, n int64) error {
	if n < 0 {
		return fmt.Errorf("catalog: quota of %d bytes is negative (0 means no limit)", n)
	}
	return c.changeDataset(id, func(v *datasetValue) { v.Quota = n })
}

// SetPinned says whether a dataset may be given up when the cache is full.
func (c *Catalog) SetPinned(id [16]byte, pinned bool) error {
	return c.changeDataset(id, func(v *datasetValue) { v.Pinned = pinned })
}

// SetShuffles has the catalog remember which orders readers of a dataset were found to follow: any JSON.
func (c *Catalog) SetShuffles(id [16]byte, found []byte) error {
	return c.changeDataset(id, func(v *datasetValue) { v.Shuffles = found })
}

// Shuffles returns what SetShuffles was told last, nil before that.
func (c *Catalog) Shuffles(id [16]byte) ([]byte, error) {
	var v datasetValue
	if _, err := c.get(datasetKey(id), &v); err != nil {
		return nil, fmt.Errorf("catalog: dataset %x: %w", id, err)
	}
	return v.Shuffles, nil
}

// Touch notes that a dataset is used now, and the name of its source.
func (c *Catalog) Touch(id [16]byte, source string) error {
	return c.changeDataset(id, func(v *datasetValue) { v.Source, v.LastUsed = source, time.Now().UTC() })
}

func (c *Catalog) changeDataset(id [16]byte, f func(*datasetValue)) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	var v datasetValue
	_, err := c.get(datasetKey(id), &v)
	if err == nil {
		f(&v)
		err = c.change("dataset", map[string]any{datasetKey(id): v})
	}
	if err != nil {
		return fmt.Errorf("catalog: dataset %x: %w", id, err)
	}
	return nil
}

// Forget removes what the catalog holds of a dataset that nobody uses: record tables, facts, and the
// entry of its source. Manifest and layout go by [Catalog.GC]. An id that it does not know is no error.
// After a crash on the way the dataset is still there, and is forgotten by another call.
func (c *Catalog) Forget(id [16]byte) error {
	t := c.tablesOf(id)
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := t.drop(); err != nil {
		return fmt.Errorf("catalog: dataset %x: %w", id, err)
	}
	killpoint.Pass("catalog.forget.tables")
	list, err := c.datasets()
	if err == nil {
		gone := map[string]any{datasetKey(id): nil}
		for _, d := range list {
			// Another dataset may be of the same source.
			if d.ID == id && !slices.ContainsFunc(list, func(o Dataset) bool { return o.ID != id && o.Source == d.Source }) {
				gone[sourcePrefix+d.Source] = nil
			}
		}
		err = c.change("forget", gone)
	}
	if err != nil {
		return fmt.Errorf("catalog: dataset %x: %w", id, err)
	}
	return nil
}
