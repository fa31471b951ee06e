package catalog

import (
	"cmp"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/dgraph-io/badger/v4"
	"github.com/dgraph-io/badger/v4/options"
)

// The facts are what the catalog knows of sources and datasets. They are few and small: some 200 bytes per source.
// Badger holds them in memory, since it would map its files on disk (ADR 60). CACHE-DIR/facts and its copy, replaced
// as a whole at each change, hold a JSON object with badger's keys and values. Keys:
//
//	source/NAME    JSON of sourceValue
//	dataset/ID     JSON of datasetValue; ID is 16 bytes in hex
const (
	sourcePrefix  = "source/"
	datasetPrefix = "dataset/"
)

type sourceValue struct {
	Version  string   `json:"version"`
	Manifest string   `json:"manifest,omitempty"` // name of its file, if that is not the version
	Layout   string   `json:"layout,omitempty"`   // its version
	Prefix   string   `json:"prefix"`
	Files    int      `json:"files"`
	Bytes    int64    `json:"bytes"`
	Skipped  Skipped  `json:"skipped"`
	Stale    bool     `json:"stale,omitempty"`  // it has changed since
	Number   int64    `json:"number,omitempty"` // of the listing, among those of a cluster; 0: none of a cluster
	Past     []string `json:"past,omitempty"`   // the versions before it, the last pastVersions of them
}

const pastVersions = 16

func (v sourceValue) manifest() string { return cmp.Or(v.Manifest, v.Version) }

// datasetValue describes a dataset, independent of its version.
type datasetValue struct {
	Source   string    `json:"source"`
	Quota    int64     `json:"quota,omitempty"`
	Pinned   bool      `json:"pinned,omitempty"`
	LastUsed time.Time `json:"last_used"`

	Shuffles json.RawMessage `json:"shuffles,omitempty"`
}

const factsName = "facts"

func (c *Catalog) factsPath() string { return filepath.Join(c.dir, factsName) }

// openFacts reads the file; there is none at first. Its error wraps ErrCorrupt if starting empty helps.
func (c *Catalog) openFacts() error {
	db, err := badger.Open(badger.DefaultOptions("").WithInMemory(true).WithLogger(nil).
		WithMemTableSize(8 << 20).WithNumMemtables(2).WithNumCompactors(0).WithNumLevelZeroTablesStall(1 << 20).
		WithCompression(options.None).WithBlockCacheSize(0).WithIndexCacheSize(0).
		WithDetectConflicts(false). // writers hold a mutex
		WithMetricsEnabled(false))
	if err != nil {
		return err
	}
	c.db = db
	body, err := c.loadTwice(c.factsPath(), factsName)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	var all map[string]json.RawMessage
	if err := json.Unmarshal(body, &all); err != nil {
		return corrupt("%s: %v", c.factsPath(), err)
	}
	return put(c, all)
}

// get decodes the value of a key into v, and reports whether it exists.
func (c *Catalog) get(key string, v any) (ok bool, err error) {
	err = c.db.View(func(txn *badger.Txn) error {
		item, err := txn.Get([]byte(key))
		if err != nil {
			return err
		}
		return item.Value(func(b []byte) error { return json.Unmarshal(b, v) })
	})
	if errors.Is(err, badger.ErrKeyNotFound) {
		return false, nil
	}
	return err == nil, err
}

// each decodes the values of all keys with a prefix, in the order of the keys.
func each[T any](c *Catalog, prefix string, f func(name string, v T)) error {
	return c.db.View(func(txn *badger.Txn) error {
		it := txn.NewIterator(badger.IteratorOptions{Prefix: []byte(prefix), PrefetchValues: true, PrefetchSize: 100})
		defer it.Close()
		for it.Rewind(); it.Valid(); it.Next() {
			var v T
			if err := it.Item().Value(func(b []byte) error { return json.Unmarshal(b, &v) }); err != nil {
				return err
			}
			f(strings.TrimPrefix(string(it.Item().Key()), prefix), v)
		}
		return nil
	})
}

// change sets keys, or deletes those whose value is nil, atomically and durably. c.mu is held. The killpoints' names
// begin with what.
func (c *Catalog) change(what string, values map[string]any) error {
	all := map[string]any{}
	if err := each(c, "", func(key string, v json.RawMessage) { all[key] = v }); err != nil {
		return err
	}
	for key, v := range values {
		if all[key] = v; v == nil {
			delete(all, key)
		}
	}
	body, err := json.Marshal(all)
	if err == nil {
		err = c.saveTwice(c.factsPath(), factsName, what, body)
	}
	if err == nil {
		err = put(c, values)
	}
	return full(err)
}

// full adds the remedy to the error of a full disk.
func full(err error) error {
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		return fmt.Errorf("%w (make room, or use another --cache-dir)", err)
	}
	return err
}

// put is change in memory.
func put[T any](c *Catalog, values map[string]T) error {
	batch := c.db.NewWriteBatch()
	defer batch.Cancel()
	for key, v := range values {
		b, err := json.Marshal(v)
		if any(v) == nil {
			err = batch.Delete([]byte(key))
		} else if err == nil {
			err = batch.Set([]byte(key), b)
		}
		if err != nil {
			return err
		}
	}
	return batch.Flush()
}

func datasetKey(id [16]byte) string { return datasetPrefix + hex.EncodeToString(id[:]) }
