package catalog

import (
	"bytes"
	"cmp"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/shoalfs/shoal/internal/durable"
	"github.com/shoalfs/shoal/internal/killpoint"
)

// Dataset describes one dataset of a cache folder.
type Dataset struct {
	ID       [16]byte
	Source   string // canonical; "" if it has only record tables
	Version  string // of the manifest; "" before the first listing
	Files    int
	Bytes    int64 // of all its files, cached or not
	Quota    int64 // its limit in bytes of the cache; 0 means none
	Pinned   bool
	LastUsed time.Time // of the last Touch
}

// Datasets returns all datasets in the catalog, most recently used first.
func (c *Catalog) Datasets() ([]Dataset, error) {
	byID := make(map[[16]byte]string)
	sources := make(map[string]sourceValue)
	if err := each(c, sourcePrefix, func(name string, v sourceValue) {
		byID[DatasetID(name)], sources[name] = name, v
	}); err != nil {
		return nil, fmt.Errorf("catalog: %w", err)
	}
	all := make(map[[16]byte]Dataset)
	add := func(d Dataset) {
		if _, there := all[d.ID]; !there {
			s := sources[d.Source]
			d.Version, d.Files, d.Bytes = s.Version, s.Files, s.Bytes
			all[d.ID] = d
		}
	}
	named := make(map[string]bool)
	if err := each(c, datasetPrefix, func(key string, v datasetValue) {
		id, ok := ParseID(key)
		if !ok {
			return
		}
		if v.Source == "" { // never touched
			v.Source = byID[id]
		}
		named[v.Source] = true
		add(Dataset{ID: id, Source: v.Source, Quota: v.Quota, Pinned: v.Pinned, LastUsed: v.LastUsed})
	}); err != nil {
		return nil, fmt.Errorf("catalog: %w", err)
	}
	for name := range sources {
		if !named[name] {
			add(Dataset{ID: DatasetID(name), Source: name})
		}
	}
	entries, err := os.ReadDir(c.tablesDir())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("catalog: %w", err)
	}
	for _, e := range entries {
		if id, ok := ParseID(e.Name()); ok {
			add(Dataset{ID: id})
		}
	}
	return slices.SortedFunc(maps.Values(all), func(x, y Dataset) int {
		return cmp.Or(y.LastUsed.Compare(x.LastUsed), cmp.Compare(x.Source, y.Source), bytes.Compare(x.ID[:], y.ID[:]))
	}), nil
}

// ParseID parses a dataset's id in hex, the name of its folders.
func ParseID(text string) (id [16]byte, ok bool) {
	n, err := hex.Decode(id[:], []byte(text)[:min(len(text), 32)])
	return id, err == nil && n == len(id) && len(text) == 32
}

// SetQuota limits how many bytes of the cache a dataset may use; 0 means no limit of its own.
func (c *Catalog) SetQuota(id [16]byte, n int64) error {
	if n < 0 {
		return fmt.Errorf("catalog: quota of %d bytes is negative (0 means no limit)", n)
	}
	return c.changeDataset(id, func(v *datasetValue) { v.Quota = n })
}

// SetPinned says whether a dataset must stay when the cache is full.
func (c *Catalog) SetPinned(id [16]byte, pinned bool) error {
	return c.changeDataset(id, func(v *datasetValue) { v.Pinned = pinned })
}

// SetShuffles stores the orders that readers of a dataset were found to follow: any JSON.
func (c *Catalog) SetShuffles(id [16]byte, found []byte) error {
	return c.changeDataset(id, func(v *datasetValue) { v.Shuffles = found })
}

// Shuffles returns the last value of SetShuffles, nil before that.
func (c *Catalog) Shuffles(id [16]byte) ([]byte, error) {
	var v datasetValue
	_, err := c.get(datasetKey(id), &v)
	return v.Shuffles, about(err, "dataset %x", id)
}

// SetCoding stores what a codec needs for the files of a dataset that are kept coded: some KiB, the oldest first.
// Nothing else can make it again, so it stands in a file of its own, twice.
func (c *Catalog) SetCoding(id [16]byte, tables [][]byte) error {
	c.mu.Lock() // GC removes temporary files
	defer c.mu.Unlock()
	body, err := json.Marshal(tables)
	if err == nil {
		err = durable.MkdirAll(c.codingsDir())
	}
	if err == nil {
		err = c.saveTwice(c.codingPath(id), codingKind, codingKind, body)
	}
	return about(full(err), "coding of dataset %x", id)
}

// Coding returns the last value of SetCoding, nil before that, and if both copies are lost.
func (c *Catalog) Coding(id [16]byte) (tables [][]byte) {
	body, err := c.loadTwice(c.codingPath(id), codingKind)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil {
		err = json.Unmarshal(body, &tables)
	}
	if err != nil {
		c.log.Error("tables of recoded files cannot be read", "path", c.codingPath(id), "err", err)
	}
	return tables
}

const codingKind = "coding"

func (c *Catalog) codingsDir() string { return filepath.Join(c.dir, "codings") }

func (c *Catalog) codingPath(id [16]byte) string {
	return filepath.Join(c.codingsDir(), hex.EncodeToString(id[:]))
}

// Touch records that a dataset is used now, and the name of its source.
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
	return about(err, "dataset %x", id)
}

// Forget removes a dataset that is not in use from the catalog: record tables, facts, and the entry of its source.
// [Catalog.GC] removes manifest and layout. An unknown id is no error. After a crash in between, the dataset is still
// there, and another call forgets it.
func (c *Catalog) Forget(id [16]byte) error {
	t := c.tablesOf(id)
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := t.drop(); err != nil {
		return about(err, "dataset %x", id)
	}
	for _, suffix := range []string{copySuffix, ""} {
		if err := os.Remove(c.codingPath(id) + suffix); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return about(err, "dataset %x", id)
		}
	}
	killpoint.Pass("catalog.forget.tables")
	list, err := c.Datasets()
	if err == nil {
		gone := map[string]any{datasetKey(id): nil}
		for _, d := range list {
			// Another dataset may have the same source.
			if d.ID == id && !slices.ContainsFunc(list, func(o Dataset) bool {
				return o.ID != id && o.Source == d.Source
			}) {
				gone[sourcePrefix+d.Source] = nil
			}
		}
		err = c.change("forget", gone)
	}
	return about(err, "dataset %x", id)
}
