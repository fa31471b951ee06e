package catalog

import (
	"encoding/binary"
	"log/slog"
	"testing"

	"github.com/dgraph-io/badger/v4"
)

// SetFormatForTest writes a format version into a catalog.
func SetFormatForTest(c *Catalog, version uint32) error {
	return c.db.Update(func(tx *badger.Txn) error {
		return tx.Set([]byte(formatKey), binary.LittleEndian.AppendUint32(nil, version))
	})
}

// OpenUnsynced opens a catalog that does not fsync.
func OpenUnsynced(dir string, log *slog.Logger) (*Catalog, error) {
	return Open(dir, Options{Logger: log, noSync: true})
}

// KeysForTest returns all keys of a catalog.
func KeysForTest(t *testing.T, c *Catalog) (keys []string) {
	t.Helper()
	err := c.each("", func(key, _ []byte) error {
		keys = append(keys, string(key))
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return keys
}
