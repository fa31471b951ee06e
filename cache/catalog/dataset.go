package catalog

import (
	"cmp"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"time"

	"github.com/dgraph-io/badger/v4"

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

// datasetValue is the value of dataset/ID.
type datasetValue struct {
	Source   string    `json:"source"`
	Quota    int64     `json:"quota,omitempty"`
	Pinned   bool      `json:"pinned,omitempty"`
	LastUsed time.Time `json:"last_used"`
}

func datasetKey(id [16]byte) []byte { return append([]byte(datasetPrefix), id[:]...) }

// Datasets returns all datasets that the catalog holds anything of, the last used one first.
func (c *Catalog) Datasets() ([]Dataset, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	list, err := c.datasets()
	if err != nil {
		return nil, fmt.Errorf("catalog: %w", err)
	}
	return list, nil
}

func (c *Catalog) datasets() ([]Dataset, error) {
	sources, err := c.sources()
	if err != nil {
		return nil, err
	}
	byName := make(map[string]Source, len(sources))
	byID := make(map[[16]byte]string, len(sources))
	for _, s := range sources {
		byName[s.Name] = s
		byID[DatasetID(s.Name)] = s.Name
	}
	var list []Dataset
	seen := make(map[[16]byte]bool)
	add := func(d Dataset) {
		if seen[d.ID] {
			return
		}
		seen[d.ID] = true
		s := byName[d.Source]
		d.Version, d.Files, d.Bytes = s.Version, s.Files, s.Bytes
		list = append(list, d)
	}
	named := make(map[string]bool)
	err = c.each(datasetPrefix, func(key, value []byte) error {
		var v datasetValue
		if err := json.Unmarshal(value, &v); err != nil || len(key) != 16 {
			return corrupt("entry of dataset %x: %v", key, err)
		}
		if v.Source == "" { // never touched
			v.Source = byID[[16]byte(key)]
		}
		named[v.Source] = true
		add(Dataset{ID: [16]byte(key), Source: v.Source, Quota: v.Quota, Pinned: v.Pinned, LastUsed: v.LastUsed})
		return nil
	})
	if err != nil {
		return nil, err
	}
	for _, s := range sources {
		if !named[s.Name] {
			add(Dataset{ID: DatasetID(s.Name), Source: s.Name})
		}
	}
	entries, err := os.ReadDir(c.tablesDir())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	for _, e := range entries {
		if id, err := hex.DecodeString(e.Name()); err == nil && len(id) == 16 {
			add(Dataset{ID: [16]byte(id)})
		}
	}
	slices.SortStableFunc(list, func(x, y Dataset) int {
		return cmp.Or(y.LastUsed.Compare(x.LastUsed), cmp.Compare(x.Source, y.Source))
	})
	return list, nil
}

// SetQuota sets how many bytes of the cache a dataset may take; 0 is no limit of its own.
func (c *Catalog) SetQuota(id [16]byte, n int64) error {
	if n < 0 {
		return fmt.Errorf("catalog: quota of %d bytes (0 is no limit)", n)
	}
	return c.change(id, func(v *datasetValue) { v.Quota = n })
}

// SetPinned says whether a dataset may be given up when the cache is full.
func (c *Catalog) SetPinned(id [16]byte, pinned bool) error {
	return c.change(id, func(v *datasetValue) { v.Pinned = pinned })
}

// Touch notes that a dataset is used now, and the name of its source.
func (c *Catalog) Touch(id [16]byte, source string) error {
	return c.change(id, func(v *datasetValue) { v.Source, v.LastUsed = source, time.Now().UTC() })
}

func (c *Catalog) change(id [16]byte, f func(*datasetValue)) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	v, err := c.dataset(id)
	if err == nil {
		f(&v)
		var b []byte
		if b, err = json.Marshal(v); err == nil {
			err = c.write("dataset", entry{datasetKey(id), b})
		}
	}
	if err != nil {
		return fmt.Errorf("catalog: dataset %x: %w", id, err)
	}
	return nil
}

// dataset returns the facts of a dataset, none if it has no entry.
func (c *Catalog) dataset(id [16]byte) (datasetValue, error) {
	var v datasetValue
	b, err := c.get(datasetKey(id))
	if errors.Is(err, badger.ErrKeyNotFound) {
		return v, nil
	}
	if err == nil && json.Unmarshal(b, &v) != nil {
		err = corrupt("entry %.100q", b)
	}
	return v, err
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
	delete(c.tables, id)
	killpoint.Pass("catalog.forget.tables")
	list, err := c.datasets()
	if err != nil {
		return fmt.Errorf("catalog: dataset %x: %w", id, err)
	}
	gone := []entry{{key: datasetKey(id)}}
	for _, d := range list {
		if d.ID != id || d.Source == "" {
			continue
		}
		// Another dataset may be of the same source.
		if !slices.ContainsFunc(list, func(o Dataset) bool { return o.ID != id && o.Source == d.Source }) {
			gone = append(gone, entry{key: []byte(sourcePrefix + d.Source)})
		}
	}
	if err := c.write("forget", gone...); err != nil {
		return fmt.Errorf("catalog: dataset %x: %w", id, err)
	}
	return nil
}
