package catalog

import (
	"cmp"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/dgraph-io/badger/v4"

	"github.com/shoalfs/shoal/cache/crypt"
	"github.com/shoalfs/shoal/internal/durable"
	"github.com/shoalfs/shoal/internal/killpoint"
)

// ErrNoManifest is wrapped by errors of [Catalog.Manifest] if the source must be listed.
var ErrNoManifest = errors.New("no manifest of this source")

// Options of a catalog.
type Options struct {
	// Logger gets warnings. The default is [slog.Default].
	Logger *slog.Logger

	// Key encrypts all names of files and sources; nil: no encryption.
	Key *crypt.Key
}

// Catalog is the index of a cache folder. It is safe for concurrent use. Facts of sources and datasets are in memory,
// so reading them never waits for the disk.
type Catalog struct {
	dir     string // the cache folder
	key     *crypt.Key
	log     *slog.Logger
	rebuilt string
	mended  []string // guarded by mu
	db      *badger.DB

	// mu keeps files consistent with the facts that name them, and serializes writers.
	mu sync.Mutex

	tables sync.Map // of *tables, by dataset
}

// Source names the files of one source.
type Source struct {
	Name     string // as given to SetManifest
	Manifest string
	Layout   string // "" where each file is an object
}

// Open opens the catalog of a cache folder, which the caller has locked. Facts that are damaged, and their copy, too,
// are moved aside and replaced by empty ones; [Catalog.Rebuilt] and an error in the log say so. A listing restores
// them, except quotas and pins.
func Open(cacheDir string, o Options) (*Catalog, error) {
	o.Logger = cmp.Or(o.Logger, slog.Default())
	c := &Catalog{dir: cacheDir, key: o.Key, log: o.Logger}
	err := c.openFacts()
	if errors.Is(err, ErrCorrupt) {
		aside := c.factsPath() + ".corrupt"
		for _, suffix := range []string{copySuffix, ""} {
			if e := os.Rename(c.factsPath()+suffix, aside); e != nil && !errors.Is(e, fs.ErrNotExist) {
				return nil, fmt.Errorf("open catalog: %w", errors.Join(err, e))
			}
		}
		o.Logger.Error(
			"catalog is corrupt and was moved aside; sources are listed again, quotas and pins must be set again",
			"moved_to", aside, "err", err)
		c.rebuilt = aside
		err = errors.Join(c.Close(), c.openFacts())
	}
	if err != nil {
		return nil, fmt.Errorf("open catalog: %w", errors.Join(err, c.Close()))
	}
	return c, nil
}

// about says what an error is about; nil stays nil.
func about(err error, format string, args ...any) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("catalog: %s: %w", fmt.Sprintf(format, args...), err)
}

// Close frees the catalog's memory. All changes are on disk already.
func (c *Catalog) Close() error {
	if c.db == nil {
		return nil
	}
	return c.db.Close()
}

// Rebuilt returns where Open moved corrupt facts; "" if it did not have to.
func (c *Catalog) Rebuilt() string { return c.rebuilt }

// Mended returns the files that were written anew from their copies since Open, a line each.
func (c *Catalog) Mended() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.mended
}

// Begin writes the facts, if there are none yet.
func (c *Catalog) Begin() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.change("begin", nil)
}

// DatasetID returns the 16 bytes by which cached records name a source. It is independent of the dataset's version,
// so that a refresh keeps unchanged files.
func DatasetID(source string) [16]byte {
	h := sha256.Sum256([]byte(source))
	return [16]byte(h[:16])
}

func (c *Catalog) manifestDir() string { return filepath.Join(c.dir, "manifests") }
func (c *Catalog) layoutDir() string   { return filepath.Join(c.dir, "layouts") }

// Manifest loads the current version of a source, whose name must be canonical, and its layout in shards; nil if each
// file is an object. The caller closes both. The error wraps ErrNoManifest if the source was never listed, and if one
// of the files is missing or damaged.
func (c *Catalog) Manifest(source string) (*Manifest, *Layout, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	var v sourceValue
	ok, err := c.get(sourcePrefix+source, &v)
	if err != nil {
		return nil, nil, fmt.Errorf("catalog: %s: %w", source, err)
	}
	if !ok {
		return nil, nil, fmt.Errorf("catalog: %w: %s", ErrNoManifest, source)
	}
	m, l, err := c.load(v)
	if errors.Is(err, ErrCorrupt) || errors.Is(err, fs.ErrNotExist) {
		c.log.Error("manifest or layout is lost; the source must be listed again", "source", source, "err", err)
		return nil, nil, fmt.Errorf("catalog: %w: %w", ErrNoManifest, err)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("catalog: %s: %w", source, err)
	}
	// The file may have been saved last for another source with the same version.
	m.prefix, m.skipped = v.Prefix, v.Skipped
	return m, l, nil
}

// Past loads a version of a source that is not the current one any more, by the names of its files. layout may be "".
// It returns nil for the current one.
func (c *Catalog) Past(source, version, manifest, layout string) (*Manifest, *Layout, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	var now sourceValue
	if _, err := c.get(sourcePrefix+source, &now); err != nil {
		return nil, nil, fmt.Errorf("catalog: %s: %w", source, err)
	}
	// a stale one is about to be replaced
	if now.Version == version && now.manifest() == manifest && now.Layout == layout && !now.Stale {
		return nil, nil, nil
	}
	m, l, err := c.load(sourceValue{Version: version, Manifest: manifest, Layout: layout})
	if err != nil {
		return nil, nil, fmt.Errorf("catalog: %s: version %s: %w", source, version, err)
	}
	m.prefix = now.Prefix
	return m, l, nil
}

func (c *Catalog) load(v sourceValue) (_ *Manifest, _ *Layout, err error) {
	if !isVersion(v.Version) || !isVersion(v.manifest()) || v.Layout != "" && !isVersion(v.Layout) {
		return nil, nil, corrupt("entry names version %q, manifest %q, layout %q", v.Version, v.Manifest, v.Layout)
	}
	m, err := load(filepath.Join(c.manifestDir(), v.manifest()), c.key)
	if err != nil {
		return nil, nil, err
	}
	if m.Version() != v.Version {
		return nil, nil, errors.Join(corrupt("manifest %s belongs to version %s", v.manifest(), m.Version()), m.Close())
	}
	if v.Layout == "" {
		return m, nil, nil
	}
	l, err := loadLayout(filepath.Join(c.layoutDir(), v.Layout), m, c.key)
	if err == nil && l.Version() != v.Layout {
		err = errors.Join(corrupt("layout %s belongs to version %s", v.Layout, l.Version()), l.Close())
	}
	if err != nil {
		return nil, nil, errors.Join(err, m.Close())
	}
	return m, l, nil
}

// SetManifest saves a manifest and its layout, nil if each file is an object, and makes them the current version of a
// source. number is that of another node's listing in its cluster, which says nothing of MarkStale: it may have begun
// before. 0: this one's.
func (c *Catalog) SetManifest(source string, m *Manifest, l *Layout, number int64) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	v := sourceValue{Version: m.Version(), Prefix: m.prefix, Files: m.files, Bytes: m.bytes, Skipped: m.skipped}
	if name := m.FileName(); name != v.Version {
		v.Manifest = name
	}
	if l != nil {
		if l.dataset != m.version {
			return fmt.Errorf(
				"catalog: %s: the layout belongs to dataset version %s, but the manifest to version %s", source,
				l.Dataset(), v.Version)
		}
		v.Layout = l.Version()
		if _, err := saveUnder(c.layoutDir(), v.Layout, l.data, "layout", c.key); err != nil {
			return fmt.Errorf("catalog: %s: %w", source, err)
		}
	}
	if _, err := saveUnder(c.manifestDir(), m.FileName(), m.data, "manifest", c.key); err != nil {
		return fmt.Errorf("catalog: %s: %w", source, err)
	}
	old := c.known(source)
	if v.Number, v.Past = old.Number, old.Past; v.Number > 0 && (v.Version != old.Version || v.Layout != old.Layout) {
		v.Number++
		v.Past = append(v.Past, old.Version)
		v.Past = v.Past[max(0, len(v.Past)-pastVersions):]
	}
	if number > 0 {
		v.Number, v.Stale = number, old.Stale
	}
	return about(c.change("source", map[string]any{sourcePrefix + source: v}), "%s", source)
}

// MarkStale records that keys below prefix have changed since sources in their folders were listed, until SetManifest.
func (c *Catalog) MarkStale(prefix string, keys []string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	marked := map[string]any{}
	err := each(c, sourcePrefix+prefix, func(name string, v sourceValue) {
		folder := name[:strings.LastIndexByte(name, '/')+1]
		if !v.Stale && slices.ContainsFunc(keys, func(key string) bool { return strings.HasPrefix(key, folder) }) {
			v.Stale = true
			marked[sourcePrefix+prefix+name] = v
		}
	})
	if err == nil && len(marked) > 0 {
		err = c.change("source", marked)
	}
	return about(err, "%s", prefix)
}

// Stale reports whether a source is marked.
func (c *Catalog) Stale(source string) bool { return c.known(source).Stale }

// Number returns the number of the source's current version; 0 if it is no cluster's.
func (c *Catalog) Number(source string) int64 { return c.known(source).Number }

// Had reports whether the source had a version lately, or has it.
func (c *Catalog) Had(source, version string) bool {
	v := c.known(source)
	return v.Version == version || slices.Contains(v.Past, version)
}

// known returns what is known of a source: nothing, if that cannot be read.
func (c *Catalog) known(source string) (v sourceValue) {
	if _, err := c.get(sourcePrefix+source, &v); err != nil {
		return sourceValue{}
	}
	return v
}

// SetNumber remembers which of a cluster's listings the source's current version is. SetManifest counts on from there,
// so that what a node lists while the cluster is away, or before it is killed, is newer than what the cluster had.
func (c *Catalog) SetNumber(source string, number int64) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	var v sourceValue
	ok, err := c.get(sourcePrefix+source, &v)
	if err == nil && ok && v.Number != number {
		v.Number = number
		err = c.change("source", map[string]any{sourcePrefix + source: v})
	}
	return about(err, "%s", source)
}

// Sources returns the sources that have a manifest, by name.
func (c *Catalog) Sources() (sources []Source, err error) {
	err = each(c, sourcePrefix, func(name string, v sourceValue) {
		sources = append(sources, Source{name, v.manifest(), v.Layout})
	})
	return sources, err
}

// GC removes manifest and layout files that no source names, except those named in keep. It returns how many.
func (c *Catalog) GC(keep ...string) (removed int, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	kept := make(map[string]bool)
	for _, v := range keep {
		kept[v] = true
	}
	if err := each(c, sourcePrefix, func(_ string, s sourceValue) {
		kept[s.manifest()], kept[s.Layout] = true, true
	}); err != nil {
		return 0, about(err, "what nobody names")
	}
	for _, dir := range []string{c.manifestDir(), c.layoutDir(), c.codingsDir()} {
		entries, e := os.ReadDir(dir)
		if e != nil && !errors.Is(e, fs.ErrNotExist) {
			err = errors.Join(err, e)
		}
		for _, entry := range entries {
			// Only files that Save writes. c.mu is held, so temporary files are left from a crash.
			name := entry.Name()
			if (!isVersion(name) || kept[name]) && !strings.HasPrefix(name, durable.TempPrefix) {
				continue
			}
			if e := os.Remove(filepath.Join(dir, name)); e != nil {
				err = errors.Join(err, e)
				continue
			}
			killpoint.Pass("catalog.gc.removed")
			removed++
		}
	}
	return removed, about(err, "what nobody names")
}

func isVersion(name string) bool {
	return len(name) == 64 && strings.Trim(name, "0123456789abcdef") == ""
}
