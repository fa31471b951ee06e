package catalog

import (
	"cmp"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/shoalfs/shoal/cache/segment"
	"github.com/shoalfs/shoal/internal/durable"
)

const (
	tableMagic     = "SHOALTAB"
	tableVersion   = 1
	tableHeaderLen = 64
	tableSuffix    = ".table"
)

// tables are the record tables of a dataset's segments, a file each:
// CACHE-DIR/tables/DATASET/NNNNNNNN.table, replaced as a whole. Little endian:
//
//	offset
//	     0  +--------------------------------+
//	        | magic "SHOALTAB"               |  8 bytes
//	     8  | format version (1)             |  u32
//	    12  | header length (64)             |  u32
//	    16  | dataset                        |  16 bytes
//	    32  | number of the segment          |  u32
//	    36  | 1 if the segment is sealed     |  u32
//	    40  | size of the segment            |  u64, the part that the table covers
//	    48  | length of the table            |  u64
//	    56  | CRC32C of the table            |  u32
//	    60  | CRC32C of bytes 0..59          |  u32
//	    64  +--------------------------------+
//	        | the table                      |  as package segment writes it
//	        +--------------------------------+
type tables struct {
	c       *Catalog
	dataset [16]byte
	dir     string
	mu      sync.Mutex // commits and drops, one at a time
}

func (c *Catalog) tablesDir() string { return filepath.Join(c.dir, "tables") }

// Index returns the record tables of a dataset.
func (c *Catalog) Index(dataset [16]byte) segment.Index { return c.tablesOf(dataset) }

func (c *Catalog) tablesOf(dataset [16]byte) *tables {
	t, _ := c.tables.LoadOrStore(dataset, &tables{c: c, dataset: dataset,
		dir: filepath.Join(c.tablesDir(), hex.EncodeToString(dataset[:]))})
	return t.(*tables)
}

func (t *tables) path(id uint32) string {
	return filepath.Join(t.dir, fmt.Sprintf("%08d%s", id, tableSuffix))
}

func (t *tables) CommitSegment(id uint32, size int64, sealed bool, table []byte) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	le := binary.LittleEndian
	h := make([]byte, tableHeaderLen)
	copy(h, tableMagic)
	le.PutUint32(h[8:], tableVersion)
	le.PutUint32(h[12:], tableHeaderLen)
	copy(h[16:], t.dataset[:])
	le.PutUint32(h[32:], id)
	if sealed {
		h[36] = 1
	}
	le.PutUint64(h[40:], uint64(size))
	le.PutUint64(h[48:], uint64(len(table)))
	le.PutUint32(h[56:], crc32.Checksum(table, castagnoli))
	le.PutUint32(h[60:], crc32.Checksum(h[:60], castagnoli))
	err := durable.MkdirAll(t.dir)
	if err == nil {
		err = write(t.path(id), "table", slices.Values([][]byte{h, table}))
	}
	return about(err, "record table of segment %08d", id)
}

// LoadSegments implements segment.Index. A damaged table is passed as an empty one, so that its segment is scanned.
func (t *tables) LoadSegments(yield func(id uint32, size int64, sealed bool, table []byte) error) error {
	ids, err := t.list()
	if err != nil {
		return fmt.Errorf("catalog: %w", err)
	}
	for _, id := range ids {
		size, sealed, table, err := t.load(id)
		if err != nil {
			t.c.log.Error("record table of a segment is damaged; the segment is scanned", "path", t.path(id),
				"err", err)
		}
		if err := yield(id, size, sealed, table); err != nil {
			return err
		}
	}
	return nil
}

// list returns the numbers of the segments that have a table, ascending, and removes the temporary files of a crash.
func (t *tables) list() ([]uint32, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	entries, err := os.ReadDir(t.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var ids []uint32
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), durable.TempPrefix) {
			if err := os.Remove(filepath.Join(t.dir, e.Name())); err != nil {
				return nil, err
			}
			continue
		}
		digits, ok := strings.CutSuffix(e.Name(), tableSuffix)
		if id, err := strconv.ParseUint(digits, 10, 32); ok && err == nil &&
			filepath.Base(t.path(uint32(id))) == e.Name() {
			ids = append(ids, uint32(id))
		}
	}
	slices.SortFunc(ids, cmp.Compare)
	return ids, nil
}

// load reads a table: of no bytes, and size 0, with an error.
func (t *tables) load(id uint32) (size int64, sealed bool, table []byte, err error) {
	b, err := os.ReadFile(t.path(id))
	if err == nil {
		_, err = CheckHeader(b, tableHeaderLen, tableMagic, tableVersion, tableVersion, "a record table")
	}
	if err == nil {
		err = CheckContent(b, tableHeaderLen)
	}
	if err != nil {
		return 0, false, nil, err
	}
	le, h, table := binary.LittleEndian, b[:tableHeaderLen], b[tableHeaderLen:]
	n, flag := le.Uint64(h[40:]), le.Uint32(h[36:])
	switch {
	case [16]byte(h[16:32]) != t.dataset || le.Uint32(h[32:]) != id:
		return 0, false, nil, corrupt("the table of segment %d of dataset %x", le.Uint32(h[32:]), h[16:32])
	case le.Uint64(h[48:]) != uint64(len(table)):
		return 0, false, nil, corrupt("table of %d bytes, want %d", len(table), le.Uint64(h[48:]))
	case n > math.MaxInt64 || flag > 1:
		return 0, false, nil, corrupt("size %d, sealed %d", n, flag)
	}
	return int64(n), flag == 1, table, nil
}

func (t *tables) DropSegment(id uint32) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	err := os.Remove(t.path(id))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil {
		err = durable.SyncDir(t.dir)
	}
	return about(err, "record table of segment %08d", id)
}

// drop removes all tables of the dataset.
func (t *tables) drop() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	err := os.RemoveAll(t.dir)
	if err == nil {
		err = durable.SyncDir(t.c.tablesDir())
	}
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}
