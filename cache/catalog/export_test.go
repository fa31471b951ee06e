package catalog

import (
	"encoding/binary"
	"log/slog"

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
