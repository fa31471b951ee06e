package catalog

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/dgraph-io/badger/v4"
	"github.com/dgraph-io/badger/v4/options"
)

// ErrNoManifest is wrapped by the error of [Catalog.Manifest] where the source must be listed.
var ErrNoManifest = errors.New("no manifest of this source")

// catalogVersion is the version of the keys and values below.
const catalogVersion = 1

// Keys:
//
//	format                       u32 LE, catalogVersion
//	source/NAME                  JSON of sourceValue
//	segment/ID                   segmentHead; ID is u32 BE, so that they sort
//	table/ID GENERATION CHUNK    u32 BE each; a part of a record table
//
// A record table can be larger than a transaction, so a commit writes the parts of a new generation
// first and then, in one transaction, the head that names it.
const (
	formatKey     = "format"
	sourcePrefix  = "source/"
	segmentPrefix = "segment/"
	tablePrefix   = "table/"
)

// chunkSize is the largest value. It must stay well below badger's transaction limit, 15% of the
// memtable.
const chunkSize = 256 << 10

// Options of a catalog.
type Options struct {
	// Logger gets warnings, badger's included. The default is [slog.Default].
	Logger *slog.Logger

	noSync bool // for tests that only want speed
}

// Catalog is the index of a cache folder. It is safe for concurrent use. It implements segment.Index.
type Catalog struct {
	dir     string // the cache folder
	db      *badger.DB
	log     *slog.Logger
	rebuilt string
	space   space

	// mu keeps manifest files and the entries that name them together.
	mu sync.Mutex
	// commit serialises commits of record tables.
	commit sync.Mutex
}

type sourceValue struct {
	Version string    `json:"version"`
	Prefix  string    `json:"prefix"`
	Files   int       `json:"files"`
	Bytes   int64     `json:"bytes"`
	Skipped Skipped   `json:"skipped"`
	Listed  time.Time `json:"listed"`
}

// Source is what the catalog holds of one source.
type Source struct {
	Name    string // as given to SetManifest
	Version string // of the dataset
	Prefix  string
	Files   int
	Bytes   int64
	Listed  time.Time // when SetManifest was called
}

// segmentHead is the entry of a segment: u64 size, u32 sealed, u32 generation, u32 chunks, u32 length of
// the table, u32 CRC32C of the table; all LE.
type segmentHead struct {
	size       int64
	sealed     bool
	generation uint32
	chunks     uint32
	length     uint32
	crc        uint32
}

const segmentHeadLen = 28

func (h segmentHead) bytes() []byte {
	le := binary.LittleEndian
	var sealed uint32
	if h.sealed {
		sealed = 1
	}
	b := le.AppendUint64(nil, uint64(h.size))
	for _, v := range [...]uint32{sealed, h.generation, h.chunks, h.length, h.crc} {
		b = le.AppendUint32(b, v)
	}
	return b
}

func parseSegmentHead(b []byte) (segmentHead, error) {
	if len(b) != segmentHeadLen {
		return segmentHead{}, corrupt("segment entry of %d bytes", len(b))
	}
	le := binary.LittleEndian
	return segmentHead{
		size: int64(le.Uint64(b)), sealed: le.Uint32(b[8:]) != 0, generation: le.Uint32(b[12:]),
		chunks: le.Uint32(b[16:]), length: le.Uint32(b[20:]), crc: le.Uint32(b[24:]),
	}, nil
}

func segmentKey(id uint32) []byte {
	return binary.BigEndian.AppendUint32([]byte(segmentPrefix), id)
}

func tableKey(id, generation, chunk uint32) []byte {
	be := binary.BigEndian
	return be.AppendUint32(be.AppendUint32(be.AppendUint32([]byte(tablePrefix), id), generation), chunk)
}

// Open opens the catalog of a cache folder, which the caller has locked. A catalog that badger finds
// corrupt is moved aside and begun anew, which [Catalog.Rebuilt] tells and the log says loudly; what it
// held comes back by a listing and a scan of the segments. One of a newer format is an error that
// wraps ErrNewerFormat.
func Open(cacheDir string, o Options) (*Catalog, error) {
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	c := &Catalog{dir: cacheDir, log: o.Logger, space: space{dir: cacheDir}}
	dir := filepath.Join(cacheDir, "catalog")
	if err := os.MkdirAll(dir, 0o777); err != nil {
		return nil, fmt.Errorf("open catalog: %w", err)
	}
	if err := c.space.forCommit(0); err != nil {
		return nil, fmt.Errorf("open catalog: %w", err)
	}
	// Badger ends the process on some damage. The marker outlives that, and grows by a byte with each
	// start, so that the same files are not tried for ever. Once may have been a kill just then.
	marker := dir + ".opening"
	var err error
	if st, e := os.Stat(marker); e == nil && st.Size() >= maxOpenings {
		err = corrupt("the last %d starts of shoal ended while they opened the catalog", maxOpenings)
	} else {
		if err := appendByte(marker); err != nil {
			return nil, fmt.Errorf("open catalog: %w", err)
		}
		err = c.open(dir, o)
	}
	defer func() { _ = os.Remove(marker) }() // a marker that stays costs a rebuild, nothing else
	if err != nil && isDamage(err) {
		aside := dir + ".corrupt"
		if e := os.RemoveAll(aside); e != nil {
			return nil, fmt.Errorf("open catalog: %w", errors.Join(err, e))
		}
		if e := os.Rename(dir, aside); e != nil {
			return nil, fmt.Errorf("open catalog: %w", errors.Join(err, e))
		}
		o.Logger.Error("catalog is corrupt and was moved aside; sources are listed and segments scanned again",
			"moved_to", aside, "err", err)
		c.rebuilt = aside
		if e := os.MkdirAll(dir, 0o777); e != nil {
			return nil, fmt.Errorf("open catalog: %w", e)
		}
		err = c.open(dir, o)
	}
	if err != nil {
		return nil, fmt.Errorf("open catalog %s: %w", dir, err)
	}
	return c, nil
}

// maxOpenings is how many starts may end while they open the same catalog.
const maxOpenings = 2

func appendByte(name string) error {
	f, err := os.OpenFile(name, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	_, err = f.Write([]byte{'.'})
	return errors.Join(err, f.Close())
}

// isDamage reports whether an error of badger can be cured by beginning anew, as against one of the
// system.
func isDamage(err error) bool {
	if errors.Is(err, ErrNewerFormat) || strings.Contains(err.Error(), "Cannot acquire directory lock") {
		return false
	}
	for _, e := range []error{
		fs.ErrPermission, syscall.ENOSPC, syscall.EDQUOT, syscall.EIO, syscall.EROFS, syscall.EMFILE, syscall.ENFILE,
		syscall.ENOMEM, syscall.ESTALE,
	} {
		// Badger does not wrap all causes.
		if errors.Is(err, e) || strings.Contains(err.Error(), e.Error()) {
			return false
		}
	}
	return true
}

// badgerOptions make badger small: the catalog holds a few large values and is read once at start.
func badgerOptions(dir string, log *slog.Logger) badger.Options {
	return badger.DefaultOptions(dir).
		WithLogger(badgerLog{log}).
		// A commit promises to be durable, and there is one every few seconds at most.
		WithSyncWrites(true).
		// Memtables are allocated at open and their logs mapped at twice the size; 8 MiB are
		// the least that lets a transaction hold a few chunks.
		WithMemTableSize(8 << 20).
		WithNumMemtables(2).
		// All values stay in the tree: nothing is ever written to the value log, and compaction
		// alone frees what was replaced.
		WithValueThreshold(1 << 20).
		WithValueLogFileSize(1 << 20).
		WithBaseTableSize(2 << 20).
		WithBaseLevelSize(8 << 20).
		WithNumLevelZeroTables(2).
		WithNumLevelZeroTablesStall(4).
		WithNumCompactors(2). // its minimum
		WithCompression(options.None).
		WithBlockCacheSize(0).
		WithIndexCacheSize(0).
		// Not at open: badger does it in goroutines of its own, where a panic over damaged
		// offsets cannot be caught. We verify everything after it.
		WithChecksumVerificationMode(options.OnBlockRead).
		WithDetectConflicts(false). // writers hold a mutex
		WithMetricsEnabled(false)
}

func (c *Catalog) open(dir string, o Options) error {
	db, err := badger.Open(badgerOptions(dir, c.log).WithSyncWrites(!o.noSync))
	if err != nil {
		return err
	}
	c.db = db
	if err = noPanic(c.db.VerifyChecksum); err == nil {
		err = c.checkFormat()
	}
	if err != nil {
		return errors.Join(err, noPanic(db.Close))
	}
	return nil
}

// noPanic makes an error of a panic of badger, which follows damaged offsets without looking.
func noPanic(f func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = corrupt("badger panicked: %v", p)
		}
	}()
	return f()
}

// checkFormat reads the format version, or writes it if the catalog is new.
func (c *Catalog) checkFormat() error {
	b, err := c.get([]byte(formatKey))
	if errors.Is(err, badger.ErrKeyNotFound) {
		return c.db.Update(func(tx *badger.Txn) error {
			return tx.Set([]byte(formatKey), binary.LittleEndian.AppendUint32(nil, catalogVersion))
		})
	}
	if err != nil {
		return err
	}
	if len(b) != 4 {
		return corrupt("format version of %d bytes", len(b))
	}
	if v := binary.LittleEndian.Uint32(b); v > catalogVersion {
		return fmt.Errorf("%w: format version %d, this one reads %d (use that version of shoal, or another --cache-dir)", ErrNewerFormat, v, catalogVersion)
	} else if v != catalogVersion {
		return corrupt("format version %d", v)
	}
	return nil
}

func (c *Catalog) get(key []byte) (value []byte, err error) {
	err = c.db.View(func(tx *badger.Txn) error {
		item, err := tx.Get(key)
		if err != nil {
			return err
		}
		value, err = item.ValueCopy(nil)
		return err
	})
	return value, err
}

// Rebuilt returns where Open moved a corrupt catalog; "" if it did not have to.
func (c *Catalog) Rebuilt() string { return c.rebuilt }

// Close closes the catalog. Manifests stay usable. On a full disk it leaves badger as it is, and fails:
// the next Open finds what was committed in badger's log.
func (c *Catalog) Close() error {
	if err := c.space.forClose(); err != nil {
		return fmt.Errorf("catalog is not compacted: %w", err)
	}
	if err := c.db.Close(); err != nil {
		return fmt.Errorf("close catalog: %w", err)
	}
	return nil
}

// DatasetID returns the 16 bytes by which cached records name a source. It does not depend on the
// dataset's version, so that a refresh keeps what did not change.
func DatasetID(source string) [16]byte {
	h := sha256.Sum256([]byte(source))
	return [16]byte(h[:16])
}

func (c *Catalog) manifestDir() string { return filepath.Join(c.dir, "manifests") }

// Manifest loads the current version for a source, whose name must be canonical. The caller closes
// it. The error wraps ErrNoManifest where the source was never listed, and where the file is missing or
// damaged.
func (c *Catalog) Manifest(source string) (*Manifest, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	b, err := c.get([]byte(sourcePrefix + source))
	if errors.Is(err, badger.ErrKeyNotFound) {
		return nil, fmt.Errorf("catalog: %w: %s", ErrNoManifest, source)
	}
	if err != nil {
		return nil, fmt.Errorf("catalog: %s: %w", source, err)
	}
	var v sourceValue
	if err := json.Unmarshal(b, &v); err != nil {
		return nil, fmt.Errorf("catalog: %w: %s: %w", ErrNoManifest, source, err)
	}
	m, err := Load(filepath.Join(c.manifestDir(), v.Version))
	if err == nil && m.Version() != v.Version {
		err = errors.Join(corrupt("manifest %s is that of version %s", v.Version, m.Version()), m.Close())
	}
	if errors.Is(err, ErrCorrupt) || errors.Is(err, fs.ErrNotExist) {
		c.log.Error("manifest is lost; the source must be listed again", "source", source, "err", err)
		return nil, fmt.Errorf("catalog: %w: %w", ErrNoManifest, err)
	}
	if err != nil {
		return nil, fmt.Errorf("catalog: %s: %w", source, err)
	}
	// The file may have been saved last for another source that holds the same version.
	m.prefix, m.skipped = v.Prefix, v.Skipped
	return m, nil
}

// SetManifest saves a manifest and makes it the current version of a source.
func (c *Catalog) SetManifest(source string, m *Manifest) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, err := m.Save(c.manifestDir()); err != nil {
		return fmt.Errorf("catalog: %s: %w", source, err)
	}
	if err := c.space.forCommit(0); err != nil {
		return fmt.Errorf("catalog: %s: %w", source, err)
	}
	b, err := json.Marshal(sourceValue{
		Version: m.Version(), Prefix: m.prefix, Files: m.files, Bytes: m.bytes, Skipped: m.skipped, Listed: time.Now().UTC(),
	})
	if err == nil {
		err = c.db.Update(func(tx *badger.Txn) error { return tx.Set([]byte(sourcePrefix+source), b) })
	}
	if err != nil {
		return fmt.Errorf("catalog: %s: %w", source, err)
	}
	return nil
}

// Sources returns what the catalog holds, by name.
func (c *Catalog) Sources() ([]Source, error) {
	var sources []Source
	err := c.each(sourcePrefix, func(name, value []byte) error {
		var v sourceValue
		if err := json.Unmarshal(value, &v); err != nil {
			return corrupt("source %s: %v", name, err)
		}
		sources = append(sources, Source{string(name), v.Version, v.Prefix, v.Files, v.Bytes, v.Listed})
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("catalog: %w", err)
	}
	return sources, nil
}

// each calls f for each key with a prefix, in order, with the rest of the key. f must not keep its
// arguments.
func (c *Catalog) each(prefix string, f func(key, value []byte) error) error {
	return c.db.View(func(tx *badger.Txn) error {
		it := tx.NewIterator(badger.IteratorOptions{Prefix: []byte(prefix)})
		defer it.Close()
		for it.Rewind(); it.Valid(); it.Next() {
			err := it.Item().Value(func(v []byte) error { return f(it.Item().Key()[len(prefix):], v) })
			if err != nil {
				return err
			}
		}
		return nil
	})
}

// GC removes manifest files that no source names and that are not in keep, a list of versions. It
// returns how many. A file that is mapped stays readable by who has it mapped.
func (c *Catalog) GC(keep ...string) (removed int, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	sources, err := c.Sources()
	if err != nil {
		return 0, err
	}
	for _, s := range sources {
		keep = append(keep, s.Version)
	}
	entries, err := os.ReadDir(c.manifestDir())
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("catalog: %w", err)
	}
	var errs []error
	for _, e := range entries {
		// Nothing but what Save writes; the mutex makes temporary files those of a crash.
		if name := e.Name(); isVersion(name) && !slices.Contains(keep, name) || strings.HasPrefix(name, tempPrefix) {
			if err := os.Remove(filepath.Join(c.manifestDir(), name)); err != nil {
				errs = append(errs, err)
				continue
			}
			removed++
		}
	}
	if err := errors.Join(errs...); err != nil {
		return removed, fmt.Errorf("catalog: %w", err)
	}
	return removed, nil
}

func isVersion(name string) bool {
	return len(name) == 64 && strings.Trim(name, "0123456789abcdef") == ""
}

// CommitSegment implements segment.Index.
func (c *Catalog) CommitSegment(id uint32, size int64, sealed bool, table []byte) error {
	c.commit.Lock()
	defer c.commit.Unlock()
	if err := c.space.forCommit(len(table)); err != nil {
		return fmt.Errorf("catalog: segment %08d: %w", id, err)
	}
	c.space.staged.Add(int64(len(table)))
	key := segmentKey(id)
	h := segmentHead{size: size, sealed: sealed, length: uint32(len(table)), crc: crc32.Checksum(table, castagnoli)}
	old, err := c.get(key)
	switch {
	case err == nil:
		// A damaged head is replaced like any other.
		prev, _ := parseSegmentHead(old)
		h.generation = prev.generation + 1
	case !errors.Is(err, badger.ErrKeyNotFound):
		return fmt.Errorf("catalog: segment %08d: %w", id, err)
	}
	batch := c.db.NewWriteBatch()
	defer batch.Cancel()
	for rest := table; len(rest) > 0; h.chunks++ {
		n := min(len(rest), chunkSize)
		if err := batch.Set(tableKey(id, h.generation, h.chunks), rest[:n]); err != nil {
			return fmt.Errorf("catalog: segment %08d: %w", id, err)
		}
		rest = rest[n:]
	}
	if err := batch.Flush(); err != nil {
		return fmt.Errorf("catalog: segment %08d: %w", id, err)
	}
	if err := c.db.Update(func(tx *badger.Txn) error { return tx.Set(key, h.bytes()) }); err != nil {
		return fmt.Errorf("catalog: segment %08d: %w", id, err)
	}
	return c.dropTables(id, &h)
}

// dropTables deletes the parts of a segment's tables but for those of keep, if any.
func (c *Catalog) dropTables(id uint32, keep *segmentHead) error {
	prefix := binary.BigEndian.AppendUint32([]byte(tablePrefix), id)
	var keys [][]byte
	err := c.db.View(func(tx *badger.Txn) error {
		it := tx.NewIterator(badger.IteratorOptions{Prefix: prefix})
		defer it.Close()
		for it.Rewind(); it.Valid(); it.Next() {
			k := it.Item().KeyCopy(nil)
			rest := k[len(prefix):]
			if keep != nil && len(rest) == 8 && binary.BigEndian.Uint32(rest) == keep.generation && binary.BigEndian.Uint32(rest[4:]) < keep.chunks {
				continue
			}
			keys = append(keys, k)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("catalog: segment %08d: %w", id, err)
	}
	if len(keys) == 0 {
		return nil
	}
	batch := c.db.NewWriteBatch()
	defer batch.Cancel()
	for _, k := range keys {
		if err := batch.Delete(k); err != nil {
			return fmt.Errorf("catalog: segment %08d: %w", id, err)
		}
	}
	if err := batch.Flush(); err != nil {
		return fmt.Errorf("catalog: segment %08d: %w", id, err)
	}
	return nil
}

// LoadSegments implements segment.Index. A segment whose entry is damaged is passed with an empty
// table, so that it is scanned.
func (c *Catalog) LoadSegments(yield func(id uint32, size int64, sealed bool, table []byte) error) error {
	var table []byte
	return c.each(segmentPrefix, func(key, value []byte) error {
		if len(key) != 4 {
			return fmt.Errorf("catalog: %w", corrupt("segment key of %d bytes", len(key)))
		}
		id := binary.BigEndian.Uint32(key)
		h, err := parseSegmentHead(value)
		if err == nil {
			table, err = c.table(table[:0], id, h)
		}
		if err != nil {
			c.log.Error("record table of a segment is damaged", "segment", id, "err", err)
			return yield(id, 0, false, nil)
		}
		return yield(id, h.size, h.sealed, table)
	})
}

// table appends a segment's record table to dst.
func (c *Catalog) table(dst []byte, id uint32, h segmentHead) ([]byte, error) {
	err := c.db.View(func(tx *badger.Txn) error {
		for chunk := range h.chunks {
			item, err := tx.Get(tableKey(id, h.generation, chunk))
			if err != nil {
				return fmt.Errorf("part %d of %d: %w", chunk, h.chunks, err)
			}
			if err := item.Value(func(v []byte) error { dst = append(dst, v...); return nil }); err != nil {
				return fmt.Errorf("part %d of %d: %w", chunk, h.chunks, err)
			}
		}
		return nil
	})
	if err == nil && (uint64(len(dst)) != uint64(h.length) || crc32.Checksum(dst, castagnoli) != h.crc) {
		err = corrupt("%d bytes, want %d, or a wrong checksum", len(dst), h.length)
	}
	return dst, err
}

// DropSegment implements segment.Index.
func (c *Catalog) DropSegment(id uint32) error {
	c.commit.Lock()
	defer c.commit.Unlock()
	if err := c.db.Update(func(tx *badger.Txn) error { return tx.Delete(segmentKey(id)) }); err != nil {
		return fmt.Errorf("catalog: segment %08d: %w", id, err)
	}
	return c.dropTables(id, nil)
}

// badgerLog passes badger's warnings and errors on; what it says beyond that is of no use to a user.
type badgerLog struct{ log *slog.Logger }

func (l badgerLog) Errorf(f string, a ...any) {
	l.log.Error("badger: " + strings.TrimSpace(fmt.Sprintf(f, a...)))
}

func (l badgerLog) Warningf(f string, a ...any) {
	l.log.Warn("badger: " + strings.TrimSpace(fmt.Sprintf(f, a...)))
}

func (l badgerLog) Infof(f string, a ...any) {
	l.log.Debug("badger: " + strings.TrimSpace(fmt.Sprintf(f, a...)))
}

func (l badgerLog) Debugf(string, ...any) {}
