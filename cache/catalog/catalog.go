package catalog

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/dgraph-io/badger/v4"
	"github.com/dgraph-io/badger/v4/options"

	"github.com/shoalfs/shoal/cache/crypt"
	"github.com/shoalfs/shoal/internal/killpoint"
)

// ErrNoManifest is wrapped by the error of [Catalog.Manifest] where the source must be listed.
var ErrNoManifest = errors.New("no manifest of this source")

// catalogVersion is the version of the keys and values below. Version 1 held the record tables, too, by
// segment alone.
const catalogVersion = 2

// Keys:
//
//	format         u32 LE, catalogVersion
//	source/NAME    JSON of sourceValue
//	dataset/ID     JSON of datasetValue; ID is 16 bytes
//
// Of version 1, dropped when it is opened:
//
//	segment/ID, table/ID GENERATION CHUNK
const (
	formatKey     = "format"
	sourcePrefix  = "source/"
	datasetPrefix = "dataset/"
	segmentPrefix = "segment/"
	tablePrefix   = "table/"
)

// Options of a catalog.
type Options struct {
	// Logger gets warnings, badger's included. The default is [slog.Default].
	Logger *slog.Logger

	// Key encrypts what names files and sources; nil: they lie in clear.
	Key *crypt.Key

	noSync bool // for tests that only want speed
}

// Catalog is the index of a cache folder. It is safe for concurrent use.
type Catalog struct {
	dir     string // the cache folder
	key     *crypt.Key
	db      *badger.DB
	lock    *os.File // the folder of badger's files; nil once closed
	log     *slog.Logger
	rebuilt string

	// mu keeps files and the entries that name them together, and badger's writers one at a time.
	mu     sync.Mutex
	space  space
	tables map[[16]byte]*tables
}

type sourceValue struct {
	Version string    `json:"version"`
	Layout  string    `json:"layout,omitempty"` // its version
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
	Layout  string // version of the layout in shards; "" where each file is an object
	Prefix  string
	Files   int
	Bytes   int64
	Listed  time.Time // when SetManifest was called
}

// Open opens the catalog of a cache folder, which the caller has locked. A catalog that badger finds
// corrupt is moved aside and begun anew, which [Catalog.Rebuilt] tells and the log says loudly; what it
// held comes back by a listing, but for quotas and pins. One of an older format is migrated: its sources
// stay, and its record tables, which were for all datasets together, go, so that segments are scanned
// once. One of a newer format is an error that wraps ErrNewerFormat.
func Open(cacheDir string, o Options) (*Catalog, error) {
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	dir := filepath.Join(cacheDir, "catalog")
	c := &Catalog{dir: cacheDir, key: o.Key, log: o.Logger, space: space{dir: dir}, tables: make(map[[16]byte]*tables)}
	if err := os.MkdirAll(dir, 0o777); err != nil {
		return nil, fmt.Errorf("open catalog: %w", err)
	}
	if err := c.space.forOpen(); err != nil {
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
		o.Logger.Error("catalog is corrupt and was moved aside; sources are listed again, quotas and pins must be set again",
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
	if errors.Is(err, ErrNewerFormat) || errors.Is(err, ErrInUse) {
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

// mergeTables is from how many tables on they are merged at open. Each start of a process adds one.
const mergeTables = 4

// badgerOptions make badger small: the catalog holds little and is read once at start.
func badgerOptions(dir string, log *slog.Logger) badger.Options {
	return badger.DefaultOptions(dir).
		WithLogger(badgerLog{log}).
		// A commit promises to be durable, and there is one every few seconds at most.
		WithSyncWrites(true).
		// Memtables are allocated at open and their logs mapped at twice the size. Version 1
		// held large values; its logs need a memtable of the same size to be read back.
		WithMemTableSize(memtable).
		WithNumMemtables(2).
		// All values stay in the tree: nothing is ever written to the value log, and compaction
		// alone frees what was replaced.
		WithValueThreshold(1 << 20).
		WithValueLogFileSize(1 << 20).
		WithBaseTableSize(2 << 20).
		WithBaseLevelSize(8 << 20).
		// Tables are merged at open, by us: never in the background, where a full disk would
		// be a SIGBUS (see space).
		WithNumLevelZeroTables(mergeTables).
		WithNumLevelZeroTablesStall(1 << 20).
		WithNumCompactors(0).
		WithCompression(options.None).
		WithBlockCacheSize(0).
		WithIndexCacheSize(0).
		// Not at open: badger does it in goroutines of its own, where a panic over damaged
		// offsets cannot be caught. We verify everything after it.
		WithChecksumVerificationMode(options.OnBlockRead).
		WithDetectConflicts(false). // writers hold a mutex
		WithBypassLockGuard(true).  // we lock: badger's lock can outlast its Close (see unlock)
		WithMetricsEnabled(false)
}

func (c *Catalog) open(dir string, o Options) (err error) {
	if c.lock, err = lockFolder(dir); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.unlock())
		}
	}()
	var db *badger.DB
	err = guard(func() (err error) {
		bo := badgerOptions(dir, c.log).WithSyncWrites(!o.noSync)
		if c.key != nil { // badger then cannot do without its caches
			bo = bo.WithEncryptionKey(c.key.Derive("catalog", nil)).WithBlockCacheSize(1 << 20).WithIndexCacheSize(1 << 20)
		}
		db, err = badger.Open(bo)
		return err
	})
	if err != nil {
		return err
	}
	c.db, c.space.log = db, ""
	if err = guard(db.VerifyChecksum); err == nil {
		err = c.merge()
	}
	if err == nil {
		err = c.checkFormat()
	}
	if err != nil {
		return errors.Join(err, guard(db.Close))
	}
	return nil
}

// merge makes one table of many.
func (c *Catalog) merge() error {
	n := 0
	for _, t := range c.db.Tables() {
		if t.Level == 0 {
			n++
		}
	}
	if n < mergeTables {
		return nil
	}
	return guard(func() error { return c.db.Flatten(1) })
}

// checkFormat reads the format version, or writes it if the catalog is new.
func (c *Catalog) checkFormat() error {
	b, err := c.get([]byte(formatKey))
	if errors.Is(err, badger.ErrKeyNotFound) {
		return c.writeFormat()
	}
	if err != nil {
		return err
	}
	if len(b) != 4 {
		return corrupt("format version of %d bytes", len(b))
	}
	switch v := binary.LittleEndian.Uint32(b); {
	case v > catalogVersion:
		return fmt.Errorf("%w: format version %d, this one reads %d (use that version of shoal, or another --cache-dir)", ErrNewerFormat, v, catalogVersion)
	case v == 1:
		// A crash on the way leaves version 1, and less to drop.
		if err := guard(func() error { return c.db.DropPrefix([]byte(segmentPrefix), []byte(tablePrefix)) }); err != nil {
			return err
		}
		killpoint.Pass("catalog.migrate.dropped")
		return c.writeFormat()
	case v != catalogVersion:
		return corrupt("format version %d", v)
	}
	return nil
}

func (c *Catalog) writeFormat() error {
	return c.write("format", entry{[]byte(formatKey), binary.LittleEndian.AppendUint32(nil, catalogVersion)})
}

// entry is a key and its new value; nil removes the key.
type entry struct{ key, value []byte }

// write commits entries, all or none. Its killpoints are named for what is written.
func (c *Catalog) write(what string, entries ...entry) error {
	n := int64(0)
	for _, e := range entries {
		n += int64(len(e.key)+len(e.value)) + entryOverhead
	}
	if err := c.space.reserve(n); err != nil {
		return err
	}
	killpoint.Pass("catalog." + what + ".reserved")
	err := c.db.Update(func(tx *badger.Txn) error {
		for _, e := range entries {
			var err error
			if e.value == nil {
				err = tx.Delete(e.key)
			} else {
				err = tx.Set(e.key, e.value)
			}
			if err != nil {
				return err
			}
		}
		return nil
	})
	if err == nil {
		killpoint.Pass("catalog." + what + ".committed")
	}
	return err
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
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.space.forClose(); err != nil {
		return fmt.Errorf("catalog is not compacted: %w", err)
	}
	if err := errors.Join(c.db.Close(), c.unlock()); err != nil {
		return fmt.Errorf("close catalog: %w", err)
	}
	return nil
}

// unlock lets others open the catalog. It may be called again.
func (c *Catalog) unlock() error {
	f := c.lock
	if c.lock = nil; f == nil {
		return nil
	}
	return unlock(f)
}

// DatasetID returns the 16 bytes by which cached records name a source. It does not depend on the
// dataset's version, so that a refresh keeps what did not change.
func DatasetID(source string) [16]byte {
	h := sha256.Sum256([]byte(source))
	return [16]byte(h[:16])
}

func (c *Catalog) manifestDir() string { return filepath.Join(c.dir, "manifests") }
func (c *Catalog) layoutDir() string   { return filepath.Join(c.dir, "layouts") }

// Manifest loads the current version for a source, whose name must be canonical, and its layout in
// shards; nil where each file is an object. The caller closes both. The error wraps ErrNoManifest where
// the source was never listed, and where one of the files is missing or damaged.
func (c *Catalog) Manifest(source string) (*Manifest, *Layout, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	b, err := c.get([]byte(sourcePrefix + source))
	if errors.Is(err, badger.ErrKeyNotFound) {
		return nil, nil, fmt.Errorf("catalog: %w: %s", ErrNoManifest, source)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("catalog: %s: %w", source, err)
	}
	var v sourceValue
	if err := json.Unmarshal(b, &v); err != nil {
		return nil, nil, fmt.Errorf("catalog: %w: %s: %w", ErrNoManifest, source, err)
	}
	m, l, err := c.load(v)
	if errors.Is(err, ErrCorrupt) || errors.Is(err, fs.ErrNotExist) {
		c.log.Error("manifest or layout is lost; the source must be listed again", "source", source, "err", err)
		return nil, nil, fmt.Errorf("catalog: %w: %w", ErrNoManifest, err)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("catalog: %s: %w", source, err)
	}
	// The file may have been saved last for another source that holds the same version.
	m.prefix, m.skipped = v.Prefix, v.Skipped
	return m, l, nil
}

func (c *Catalog) load(v sourceValue) (_ *Manifest, _ *Layout, err error) {
	if !isVersion(v.Version) || v.Layout != "" && !isVersion(v.Layout) {
		return nil, nil, corrupt("entry names version %q, layout %q", v.Version, v.Layout)
	}
	m, err := load(filepath.Join(c.manifestDir(), v.Version), c.key)
	if err != nil {
		return nil, nil, err
	}
	if m.Version() != v.Version {
		return nil, nil, errors.Join(corrupt("manifest %s is that of version %s", v.Version, m.Version()), m.Close())
	}
	if v.Layout == "" {
		return m, nil, nil
	}
	l, err := loadLayout(filepath.Join(c.layoutDir(), v.Layout), m, c.key)
	if err == nil && l.Version() != v.Layout {
		err = errors.Join(corrupt("layout %s is that of version %s", v.Layout, l.Version()), l.Close())
	}
	if err != nil {
		return nil, nil, errors.Join(err, m.Close())
	}
	return m, l, nil
}

// SetManifest saves a manifest and its layout, nil where each file is an object, and makes them the
// current version of a source.
func (c *Catalog) SetManifest(source string, m *Manifest, l *Layout) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	v := sourceValue{
		Version: m.Version(), Prefix: m.prefix, Files: m.files, Bytes: m.bytes, Skipped: m.skipped, Listed: time.Now().UTC(),
	}
	if l != nil {
		if l.dataset != m.version {
			return fmt.Errorf("catalog: %s: the layout is that of dataset version %s, the manifest has version %s", source, l.Dataset(), v.Version)
		}
		v.Layout = l.Version()
		if _, err := l.save(c.layoutDir(), c.key); err != nil {
			return fmt.Errorf("catalog: %s: %w", source, err)
		}
	}
	if _, err := m.save(c.manifestDir(), c.key); err != nil {
		return fmt.Errorf("catalog: %s: %w", source, err)
	}
	b, err := json.Marshal(v)
	if err == nil {
		err = c.write("source", entry{[]byte(sourcePrefix + source), b})
	}
	if err != nil {
		return fmt.Errorf("catalog: %s: %w", source, err)
	}
	return nil
}

// Sources returns what the catalog holds, by name.
func (c *Catalog) Sources() ([]Source, error) {
	sources, err := c.sources()
	if err != nil {
		return nil, fmt.Errorf("catalog: %w", err)
	}
	return sources, nil
}

func (c *Catalog) sources() ([]Source, error) {
	var sources []Source
	err := c.each(sourcePrefix, func(name, value []byte) error {
		var v sourceValue
		if err := json.Unmarshal(value, &v); err != nil {
			return corrupt("source %s: %v", name, err)
		}
		sources = append(sources, Source{string(name), v.Version, v.Layout, v.Prefix, v.Files, v.Bytes, v.Listed})
		return nil
	})
	return sources, err
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

// GC removes manifest and layout files that no source names and that are not in keep, a list of versions
// of either. It returns how many. A file that is mapped stays readable by who has it mapped.
func (c *Catalog) GC(keep ...string) (removed int, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	sources, err := c.sources()
	if err != nil {
		return 0, fmt.Errorf("catalog: %w", err)
	}
	kept := make(map[string]bool)
	for _, v := range keep {
		kept[v] = true
	}
	for _, s := range sources {
		kept[s.Version], kept[s.Layout] = true, true
	}
	var errs []error
	for _, dir := range []string{c.manifestDir(), c.layoutDir()} {
		entries, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
		for _, e := range entries {
			// Nothing but what Save writes; the mutex makes temporary files those of a crash.
			name := e.Name()
			if (!isVersion(name) || kept[name]) && !strings.HasPrefix(name, tempPrefix) {
				continue
			}
			if err := os.Remove(filepath.Join(dir, name)); err != nil {
				errs = append(errs, err)
				continue
			}
			killpoint.Pass("catalog.gc.removed")
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
