// Package cachedir owns a cache directory and what its datasets share: the lock, the key, the catalog, and the
// accounts of memory and disk. It guards that one process owns the directory, that everything under it stays within
// --cache-size and everything in memory within --memory, and that cached data outlives the process that cached it.
//
// Datasets that are not open keep their segments until another one needs the space. Then they give it back (see
// package cache), least recently used first, except pinned ones.
package cachedir

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	humanize "github.com/dustin/go-humanize"

	"github.com/shoalfs/shoal/cache"
	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/crypt"
	"github.com/shoalfs/shoal/internal/pause"
)

// Options say which directory is owned, and within which bounds.
type Options struct {
	Path   string // owned while it is open
	Size   int64  `flag:"cache-size"` // bytes on disk, everything under Path counted
	Memory int64  `flag:"memory"`     // bytes of memory for the whole process
	// Secret is the key that encrypts the directory; nil: it is not encrypted. A new directory is made accordingly; an
	// existing one of the other kind, or with another key, is refused.
	Secret   *crypt.Secret
	ResetOld bool // empty a directory of an older format, which is refused otherwise
	Logger   *slog.Logger
}

// Dir is a cache directory that this process owns. Safe for concurrent use.
type Dir struct {
	Catalog *catalog.Catalog
	Cache   *cache.Cache
	Key     *crypt.Key // nil: in clear

	o      Options
	unlock func() error

	background sync.WaitGroup
	stop       context.CancelFunc

	mu       sync.Mutex
	open     map[[16]byte]bool  // datasets that are open, or about to be
	idle     map[[16]byte]int64 // bytes of segments of datasets that are not open
	metadata int64              // bytes on disk reserved for the open datasets' metadata
	offHeap  int64              // bytes of memory that the open datasets' manifests and layouts take
	native   int64              // bytes of memory withheld for Native
}

const (
	// overhead is the memory of a daemon without samples: Go runtime, badger's memtables, gRPC, FUSE request buffers,
	// the buffers of 512 connections. Measured as RSS of a mounted daemon over an empty ledger.
	overhead = 64 << 20
	// minLedger lets eight readers wait for 1-MiB objects while prefetching goes on.
	minLedger = 32 << 20
	// LeastNative is the memory for decoders in C while nobody has asked for more. It is not a part of --memory.
	LeastNative = 32 << 20
	// mostNative is for the largest pictures, several at once.
	mostNative = 1 << 30
	// bytesPerFile is the engine's memory per file while an order is in force: 8 for the kept record's place, 4 each
	// for this epoch's order, the next one's and the inverse, some bits.
	bytesPerFile = 24
	// bytesPerExtent is the memory of each further extent of a file: the record's place and a bit.
	bytesPerExtent = 9
	// catalogOnDisk is reserved of --cache-size for the catalog's own files, the log and the socket.
	catalogOnDisk = 8 << 20
	// tableOnDisk is reserved for each record's line in its table: 30 bytes, twice while the table is replaced.
	tableOnDisk = 64
	// minDisk is the least space for which data is kept on disk.
	minDisk = 4 << 20
	// syncInterval bounds what a crash of the machine (not of the daemon) can cost in refetches.
	syncInterval = 30 * time.Second
)

// LeastMemory is the least Options.Memory, in bytes.
const LeastMemory = overhead + (minLedger*4+2)/3

// RoundUp formats a number of bytes for a flag, rounded up to whole MiB, or GiB if that is exact enough: the size that
// an error recommends must be enough.
func RoundUp(n int64) string {
	if n >= 100<<30 {
		return fmt.Sprintf("%dGiB", (n+1<<30-1)>>30)
	}
	return fmt.Sprintf("%dMiB", (n+1<<20-1)>>20)
}

// ledgerOf returns how much of --memory is for data and metadata. The garbage collector and the size classes of
// buffers need about a quarter on top of live bytes.
func ledgerOf(memory int64) int64 { return (memory - overhead) * 3 / 4 }

// ForecastMemory returns how much of a daemon's memory remains for samples of a dataset with so many files, if no
// more is known: their metadata takes some 110 bytes each. It may be negative.
func ForecastMemory(memory int64, files int) int64 {
	return ledgerOf(memory - int64(files)*(bytesPerFile+110))
}

// Errors that errors of Open wrap.
var (
	ErrInUse      = catalog.ErrInUse // another process owns the directory
	ErrEncryption = catalog.ErrKey   // the directory needs a key, another key, or none
)

// Open locks and opens the directory. Its errors name the thing, the cause and the remedy.
func Open(o Options) (_ *Dir, err error) {
	o.Logger = cmp.Or(o.Logger, slog.Default())
	if o.Memory < LeastMemory {
		return nil, fmt.Errorf("--memory %s is too little for the daemon itself; give at least %s",
			humanize.IBytes(uint64(max(o.Memory, 0))), RoundUp(LeastMemory))
	}
	d := &Dir{o: o, open: map[[16]byte]bool{}, idle: map[[16]byte]int64{}}
	d.limitHeap()
	defer func() {
		if err = WithRemedy(err, o.Path); err != nil {
			err = errors.Join(err, d.Close())
		}
	}()
	if err := os.MkdirAll(o.Path, 0o700); err != nil {
		return nil, fmt.Errorf("cache directory: %w (give another --cache-dir)", err)
	}
	if d.Key, d.unlock, err = catalog.Lock(o.Path, o.Secret, o.ResetOld); err != nil {
		return nil, err
	}
	d.o.Secret = nil // not needed any more; Rekey may replace it
	if d.Catalog, err = catalog.Open(o.Path, catalog.Options{Logger: o.Logger, Key: d.Key}); err != nil {
		return nil, err
	}
	d.Cache = cache.New(cache.Options{Memory: ledgerOf(o.Memory), Disk: max(d.diskLimit(), 1), OnFull: d.makeRoom,
		Logger: o.Logger})
	if err := d.findIdle(); err != nil {
		return nil, err
	}
	ctx, stop := context.WithCancel(context.Background())
	d.stop = stop
	d.background.Go(func() { d.syncLoop(ctx) })
	return d, nil
}

// wrongKind are the errors of an entry that is of another kind than it should be.
var wrongKind = []error{syscall.EISDIR, syscall.ENOTDIR, syscall.EEXIST, syscall.ENOENT, syscall.ELOOP, syscall.ESPIPE,
	syscall.ENXIO, syscall.ENODEV}

// WithRemedy adds the remedy to an error about a full or read-only disk, or about an entry of the cache directory that
// is not what it should be: a folder instead of a file, the reverse, a link to nothing, a pipe.
func WithRemedy(err error, dir string) error {
	switch {
	case errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT):
		return fmt.Errorf("cache directory: %w (free space on the disk of %s, or give another --cache-dir)", err, dir)
	case (errors.Is(err, syscall.EROFS) || errors.Is(err, syscall.EACCES)) && strings.Contains(err.Error(), dir+"/"):
		return fmt.Errorf("cache directory: %w (make %s writable for this user, or give another --cache-dir)", err, dir)
	case slices.ContainsFunc(wrongKind, func(e error) bool {
		return errors.Is(err, e)
	}) && strings.Contains(err.Error(), dir+"/"):
		return fmt.Errorf("%w (repair the cache directory with: shoal fsck %s --repair)", err, dir)
	}
	return err
}

// Path returns where the directory is.
func (d *Dir) Path() string { return d.o.Path }

// FitsDir returns the folder for values computed from the content of datasets.
func (d *Dir) FitsDir() string { return filepath.Join(d.o.Path, "fits") }

// diskLimit derives the segments' limit from --cache-size, which holds metadata first. d.mu is held, or d is new.
func (d *Dir) diskLimit() int64 { return max(1, d.o.Size-d.metaOnDisk()) } // 0 would mean no limit

// metaOnDisk is the part of --cache-size that is not for segments. d.mu is held, or d is new.
func (d *Dir) metaOnDisk() int64 { return min(catalogOnDisk, 1<<20+d.o.Size/32) + d.metadata }

// enough returns a --cache-size that leaves space for data beside the metadata. That grows with it: the catalog's
// part by a 32nd, the lines of each open version by a 64th. d.mu is held.
func (d *Dir) enough(versions int) int64 {
	return d.o.Size + (d.metaOnDisk()+minDisk-d.o.Size)*64/int64(max(62-versions, 1))
}

// Need is the memory and disk space of an open version of a dataset beside its samples, in bytes.
type Need struct {
	memory, disk int64
	offHeap      int64 // of memory: manifest and layout
}

// Reserve reserves memory and disk for a version's metadata, and fails if it does not fit. layout may be nil. besides
// is the memory that reading its shards needs.
func (d *Dir) Reserve(m *catalog.Manifest, layout *catalog.Layout, besides int64) (n Need, err error) {
	n.offHeap = m.FileSize()
	if layout != nil {
		n.offHeap += layout.FileSize()
	}
	more := m.Bytes() / cache.ExtentSize // extents, beyond one a file
	// The ledger counts three quarters of --memory.
	n.memory = (n.offHeap + int64(m.Len())*bytesPerFile + more*bytesPerExtent + besides) * 3 / 4
	n.disk = diskFor(2*n.offHeap, int64(m.Len())+more, d.o.Size)
	return n, d.reserve(n, m.Len())
}

// diskFor returns the disk space for a version's metadata: files, and a line of a table for each extent that fits.
func diskFor(files, extents, cacheSize int64) int64 {
	return files + min(extents, cacheSize>>12)*tableOnDisk
}

func (d *Dir) reserve(n Need, files int) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	ledger := d.Cache.Ledger()
	if ledger.Limit()-n.memory < minLedger || !ledger.Withhold(n.memory) {
		taken := ledgerOf(d.o.Memory) - ledger.Limit()
		least := overhead + ((taken+n.memory+minLedger)*4+2)/3 // whose ledger holds as much
		return fmt.Errorf("--memory %s is too little for %d files: metadata takes %s, what is open already %s, and "+
			"the daemon %s; give at least %s",
			humanize.IBytes(uint64(d.o.Memory)), files, humanize.IBytes(uint64(n.memory)),
			humanize.IBytes(uint64(taken)), humanize.IBytes(overhead), RoundUp(least))
	}
	d.charge(n.disk, n.offHeap)
	return nil
}

// Release gives back what Reserve took.
func (d *Dir) Release(n Need) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.Cache.Ledger().Withhold(-n.memory)
	d.charge(-n.disk, -n.offHeap)
}

// Native returns how much memory decoders and coders in C may take together, from now on: LeastNative, and an eighth
// of what the ledger has for others, which is withheld from it for good.
func (d *Dir) Native() int64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	ledger := d.Cache.Ledger()
	limit := ledger.Limit()
	if n := min(limit/8, (limit-minLedger)/2, mostNative); d.native == 0 && n > 0 && ledger.Withhold(n) {
		d.native = n
		d.limitHeap()
	}
	return LeastNative + d.native
}

// charge changes the metadata's reservation. d.mu is held.
func (d *Dir) charge(disk, offHeap int64) {
	d.metadata += disk
	d.offHeap += offHeap
	d.limitHeap()
	d.Cache.Budget().SetLimit(d.diskLimit())
}

// limitHeap limits Go's heap to --memory without manifests, layouts and the memory of C code, which are outside it.
// d.mu is held, or d is new.
func (d *Dir) limitHeap() { debug.SetMemoryLimit(d.o.Memory - d.offHeap - d.native) }

func (d *Dir) syncLoop(ctx context.Context) {
	for range pause.Every(ctx, syncInterval) {
		if err := d.Cache.Sync(); err != nil {
			d.o.Logger.Error("cache not synced to disk", "cause", WithRemedy(err, d.o.Path))
		}
	}
}

// Close leaves the directory to the next owner. The datasets must have been closed.
func (d *Dir) Close() (err error) {
	if d.stop != nil {
		d.stop()
		d.background.Wait()
	}
	if d.Cache != nil {
		err = d.Cache.Close()
	}
	if d.Catalog != nil {
		err = errors.Join(err, d.Catalog.Close())
	}
	if d.unlock != nil {
		err = errors.Join(err, d.unlock())
	}
	return err
}
