package shard

import (
	"cmp"
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/cespare/xxhash/v2"

	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/objstore"
)

// Member is one file of a set.
type Member struct {
	Path    string // as it is shown
	ETag    string
	Size    int64
	ModTime time.Time // zero if unknown
	Shard   int       // number in Set.Shards
	Off     int64     // of its bytes in the shard of Set.Objects

	Sum    uint32 // CRC32C of its bytes, if Summed
	Summed bool
	sums   string // those of its extents, if it has several and they are known
}

// ExtentSum returns the CRC32C of an extent of the file, 0 if it is not known.
func (m *Member) ExtentSum(x int) uint32 {
	switch {
	case m.Size <= catalog.ExtentSize:
		return m.Sum
	case m.sums == "":
		return 0
	}
	return binary.LittleEndian.Uint32([]byte(m.sums[4*x:]))
}

// OpenOptions configure Open. Zero values mean the defaults.
type OpenOptions struct {
	// SkipBad leaves out shards that are missing, or whose members cannot be found: the shard or its index is damaged,
	// truncated or compressed. Without it one of them is an error. A store that does not answer and an index of a
	// later version are errors in any case.
	SkipBad bool
	// Columns are those of Parquet files that are shown; none: all.
	Columns []string
	// Manifest and Layout are an earlier list, or nil: samples of unchanged Parquet files are taken from there.
	Manifest *catalog.Manifest
	Layout   *catalog.Layout
	Logger   *slog.Logger

	// memory bounds the indexes that wait for their turn; that of one shard may exceed it. For tests.
	memory int64
}

// Set is a set of shards. Shards and the rest of the fields must not be changed. It is safe for concurrent use.
type Set struct {
	// Shards are the tars, in the order of their names, or of the pattern.
	Shards []objstore.Object
	// Version is the dataset version of our own set; "" for foreign tars.
	Version string
	// Files and Bytes are the totals of our own set; 0 for foreign tars, before they are read.
	Files int
	Bytes int64

	r       objstore.Reader
	o       OpenOptions
	summary *Summary                   // nil for foreign tars
	beside  map[string]objstore.Object // .sidx, .idx and .index, by key

	badShards

	mu     sync.Mutex
	report Report
}

// Report says how the members of a set were found, and which are not shown as they are in the tars.
type Report struct {
	Members int `json:"members"` // that are shown
	// Shards by the way their members were found.
	FromIndex   int `json:"from_index"`   // .sidx
	FromWds2idx int `json:"from_wds2idx"` // .idx or .index
	FromHeaders int `json:"from_headers"`
	Renamed     int `json:"renamed"`  // have a path that another shard has, and are shown under a new one
	Replaced    int `json:"replaced"` // are replaced by a later member of the same shard and path
	Skipped     int `json:"skipped"`  // links, devices, FIFOs, and names over 4,095 bytes
	// Examples holds the first few of the last three, with the reason.
	Examples []string `json:"examples,omitempty"`
}

func (r *Report) example(format string, args ...any) {
	if len(r.Examples) < maxExamples {
		r.Examples = append(r.Examples, fmt.Sprintf(format, args...))
	}
}

const (
	maxExamples = 16
	parallel    = 16 // shards whose indexes are read at once; 30 ms a GET: some 500 a second

	// maxProbe bounds how much of a listing is searched for a first .tar: a million .json files are not a shard set.
	maxProbe = 10_000
)

// isShardFile reports whether key may be in a prefix of shards.
func isShardFile(key string) bool {
	// some tools mark folders
	return isIndexFile(key) || slices.Contains([]string{tarSuffix, ".json"}, path.Ext(key)) ||
		strings.HasSuffix(key, "/")
}

func isIndexFile(key string) bool {
	return slices.Contains([]string{".idx", ".index", indexSuffix}, path.Ext(key))
}

// IsSet reports whether src is a set of shards: it names them, or has the manifest of a set or of an unfinished one,
// or has only .tar, .idx, .index, .sidx and .json, at least one of them a .tar.
func IsSet(ctx context.Context, r objstore.Reader, src objstore.Source) (bool, error) {
	if src.Shards != "" {
		return true, nil
	}
	for _, name := range []string{SummaryName, MarkerName} {
		switch _, err := r.Stat(ctx, src.Prefix+name); {
		case err == nil:
			return true, nil
		case objstore.KindOf(err) != objstore.KindNotFound:
			return false, err
		}
	}
	n, tars := 0, false
	for o, err := range r.List(ctx, src.Prefix, "") {
		if err != nil {
			return false, err
		}
		tars = tars || strings.HasSuffix(o.Key, tarSuffix)
		if n++; !isShardFile(o.Key) || n > maxProbe && !tars {
			return false, nil
		}
	}
	return tars, nil
}

// Open lists the shards of src, or reads their manifest. It does not read members.
func Open(ctx context.Context, r objstore.Reader, src objstore.Source, o OpenOptions) (*Set, error) {
	o.memory = cmp.Or(o.memory, 256<<20)
	o.Logger = cmp.Or(o.Logger, slog.New(slog.DiscardHandler))
	s := &Set{r: r, o: o, beside: make(map[string]objstore.Object), badShards: badShards{o.SkipBad, map[int]error{}}}
	if src.Shards != "" {
		return s, s.openKeys(ctx, src.ShardKeys(), src.String())
	}
	data, err := readObject(ctx, r, src.Prefix+SummaryName, maxSummary)
	if err != nil {
		return nil, err
	}
	if data != nil {
		switch err := s.openOwn(ctx, src.Prefix, data); {
		case !errors.Is(err, catalog.ErrCorrupt) || s.summary != nil:
			return s, err
		case !o.SkipBad:
			return nil, fmt.Errorf("%w (restore it, or pack again into another prefix; mount and serve read the "+
				"shards without it with --bad-shards skip)", err)
		default:
			o.Logger.Warn("the manifest of a shard set is damaged; its shards are read without it", "cause", err,
				"remedy", "restore it, or pack again into another prefix")
		}
	} else if _, err := r.Stat(ctx, src.Prefix+MarkerName); err == nil {
		return nil, fmt.Errorf("%s: the shards are not complete: %s is there, %s is not (run the same shoal pack "+
			"again)", src, MarkerName, SummaryName)
	} else if objstore.KindOf(err) != objstore.KindNotFound {
		return nil, err
	}
	return s, s.openPrefix(ctx, src.Prefix, src.String())
}

// openOwn takes the shards in a manifest, and checks that they exist.
func (s *Set) openOwn(ctx context.Context, prefix string, data []byte) error {
	key := prefix + SummaryName
	sum, err := ParseSummary(data)
	if err != nil {
		return fmt.Errorf("%s: %w", key, err)
	}
	s.summary, s.Version, s.Files, s.Bytes = sum, sum.Dataset, sum.Files, sum.Bytes
	there := make(map[string]objstore.Object, 2*len(sum.Shards))
	for o, err := range s.r.List(ctx, prefix+"shard-", "") {
		if err != nil {
			return err
		}
		there[o.Key] = o
	}
	missing := func(name string) error {
		return fmt.Errorf("%s names %s, which is not there (restore it, or pack again into another prefix)", key, name)
	}
	for i, m := range sum.Shards {
		tar, index := prefix+m.Name, prefix+m.Name+indexSuffix
		var err error
		o, ok := there[tar]
		switch {
		case !ok:
			o = objstore.Object{Key: tar, Size: m.Size}
			err = missing(tar)
		case there[index].Key == "":
			err = missing(index)
		case o.Size != m.Size:
			err = fmt.Errorf("%s says that %s has %d bytes, but it has %d (restore it, or pack again into another "+
				"prefix)", key, tar, m.Size, o.Size)
		}
		if err := s.orSkip(i, err); err != nil {
			return err
		}
		s.Shards = append(s.Shards, o)
		s.beside[index] = there[index]
	}
	return nil
}

// isBad reports whether a shard itself is the cause of its error.
func isBad(err error) bool {
	var store *objstore.Error
	return !errors.As(err, &store) && !errors.Is(err, catalog.ErrNewerFormat) && !errors.Is(err, context.Canceled) &&
		!errors.Is(err, context.DeadlineExceeded)
}

// openPrefix takes all tars under a prefix.
func (s *Set) openPrefix(ctx context.Context, prefix, name string) error {
	for o, err := range s.r.List(ctx, prefix, "") {
		if err != nil {
			return err
		}
		switch {
		case strings.HasSuffix(o.Key, tarSuffix):
			s.Shards = append(s.Shards, o)
		case isIndexFile(o.Key):
			s.beside[o.Key] = o
		case !isShardFile(o.Key):
			return fmt.Errorf(
				"%s is not a set of shards: it contains %q (name the shards, as in shard-{000000..000127}.tar)",
				name, o.Key)
		}
	}
	if len(s.Shards) == 0 {
		return fmt.Errorf("%s contains no .tar", name)
	}
	return nil
}

// openKeys takes the shards of a pattern. One listing of their common prefix finds sizes and indexes.
func (s *Set) openKeys(ctx context.Context, keys []string, name string) error {
	if len(keys) == 0 {
		return fmt.Errorf("%s names no shards", name)
	}
	common := keys[0]
	wanted := make(map[string]int, len(keys))
	for i, k := range keys {
		if !strings.HasSuffix(k, tarSuffix) {
			return fmt.Errorf(
				"%s names %s, which is not a .tar (compressed tars are not read: store them uncompressed)", name, k)
		}
		if _, ok := wanted[k]; ok {
			return fmt.Errorf("%s names %s twice", name, k)
		}
		wanted[k] = i
		for !strings.HasPrefix(k, common) {
			common = common[:len(common)-1]
		}
	}
	// An index may have a shorter name than its shard: a.b.tar and a.idx.
	dir, base := path.Split(strings.TrimSuffix(common, tarSuffix))
	base, _, _ = strings.Cut(base, ".")
	s.Shards = make([]objstore.Object, len(keys))
	for o, err := range s.r.List(ctx, dir+base, "") {
		if err != nil {
			return err
		}
		if i, ok := wanted[o.Key]; ok {
			s.Shards[i] = o
		} else if isIndexFile(o.Key) {
			s.beside[o.Key] = o
		}
	}
	for i, o := range s.Shards {
		if o.Key != "" {
			continue
		}
		if err := s.orSkip(i, fmt.Errorf("%s names %s, which is not there", name, keys[i])); err != nil {
			return err
		}
		s.Shards[i].Key = keys[i]
	}
	return nil
}

// Report returns the findings of the last completed [Set.Members].
func (s *Set) Report() Report {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.report
}

// loaded is the members of one shard.
type loaded struct {
	*scan
	from   func(r *Report) *int
	summed bool // the index has checksums
	cost   int64
	err    error
}

// Members yields the members of all shards, by shard and then by offset. It reads the indexes of several shards at
// once. A path costs 16 bytes or so of memory (none in our own sets). The sequence ends after the first error.
// Breaking out of it leaks nothing.
//
// A wds2idx index is trusted if it is not older than its tar, accounts for every block of it, and agrees with three
// of its headers. Otherwise the headers are read, which takes longer and gives the same members, with their
// modification times.
func (s *Set) Members(ctx context.Context) iter.Seq2[Member, error] {
	return func(yield func(Member, error) bool) {
		b := &budget{left: s.o.memory, changed: make(chan struct{})}
		e := emitter{set: s, seen: make(map[uint64]struct{})}
		missing := maps.Clone(s.bad) // for the goroutines below
		done := inTurn(ctx, len(s.Shards), parallel, 1, func(ctx context.Context, shard int, put func(loaded) bool) {
			var l loaded
			if l.err = missing[shard]; l.err == nil {
				l = s.load(ctx, shard, func(n int64) error { return b.take(ctx, shard, n) })
			}
			put(l)
		}, func(shard int, from <-chan loaded) (more bool) {
			l, ok := <-from
			if !ok {
				l.err = ctx.Err()
			}
			defer b.give(l.cost)
			if l.err == nil {
				return e.emit(shard, l, yield)
			}
			err := s.orSkip(shard, l.err)
			if err != nil {
				yield(Member{}, err)
			}
			return err == nil
		})
		if !done {
			return
		}
		if err := s.all(len(s.Shards)); err != nil {
			yield(Member{}, err)
			return
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		s.report = e.report
	}
}

// emitter gives every member a unique path.
type emitter struct {
	set    *Set
	report Report
	// seen has hashes of the paths. If two paths have the same hash, as in one of a million sets of ten million
	// members, one of them gets another name; no bytes are lost.
	seen map[uint64]struct{}
}

func (e *emitter) emit(shard int, l loaded, yield func(Member, error) bool) bool {
	o := e.set.Shards[shard]
	own := e.set.summary != nil
	*l.from(&e.report)++
	e.report.Replaced += len(l.dead)
	e.report.Skipped += l.Skipped
	for _, x := range l.Examples {
		e.report.example("%s", x)
	}
	ok := true
	grown := int64(0)
	l.ix.members(func(i int, m indexMember) bool {
		if l.dead[i] {
			return true
		}
		out := Member{Path: m.path, ETag: m.etag, Size: m.size, ModTime: catalog.TimeOf(m.mtime), Shard: shard,
			Off: m.off + grown, Sum: m.crc, Summed: l.summed, sums: m.sums}
		grown += m.size - m.stored
		if out.ETag == "" {
			out.ETag = o.ETag + "+" + strconv.FormatInt(m.off, 10)
		}
		// The paths of our own set come from one manifest.
		if !own && !e.take(out.Path) {
			out.Path = e.rename(m.path, strings.TrimSuffix(path.Base(o.Key), tarSuffix))
			e.report.Renamed++
			e.report.example("%.300q in %s: an earlier shard has it, so it is shown as %.300q", m.path, o.Key, out.Path)
		}
		e.report.Members++
		ok = yield(out, nil)
		return ok
	})
	return ok
}

// take reports whether path is new.
func (e *emitter) take(path string) bool {
	h := xxhash.Sum64String(path)
	if _, ok := e.seen[h]; ok {
		return false
	}
	e.seen[h] = struct{}{}
	return true
}

func (e *emitter) rename(p, shard string) string {
	dir, base := path.Split(p)
	for n := 1; ; n++ {
		name := dir + shard + "~" + base
		if n > 1 {
			name = dir + shard + "~" + strconv.Itoa(n) + "~" + base
		}
		if e.take(name) {
			return name
		}
	}
}

// load finds the members of a shard.
func (s *Set) load(ctx context.Context, shard int, reserve func(n int64) error) (l loaded) {
	counted := func(n int64) error {
		l.cost += n
		return reserve(n)
	}
	o := s.Shards[shard]
	if side, ok := s.beside[o.Key+indexSuffix]; ok {
		ix, err := s.loadIndex(ctx, o, side, shard, counted)
		if err == nil {
			l.scan, l.summed, l.from = &scan{ix: ix}, true, func(r *Report) *int { return &r.FromIndex }
			return l
		}
		if s.summary != nil || !errors.Is(err, catalog.ErrCorrupt) && !errors.Is(err, catalog.ErrNewerFormat) {
			l.err = err
			return l
		}
		s.o.Logger.Warn("index does not match its shard; reading headers instead", "err", err)
	}
	keys := indexKeys(o.Key)
	if i := slices.IndexFunc(keys, func(key string) bool { return s.beside[key].Key != "" }); i >= 0 {
		l.from = func(r *Report) *int { return &r.FromWds2idx }
		if l.scan, l.err = s.loadWds(ctx, o, s.beside[keys[i]], counted); l.scan != nil || l.err != nil {
			return l
		}
	}
	l.from = func(r *Report) *int { return &r.FromHeaders }
	l.scan, l.err = scanTar(ctx, s.r, o, counted)
	return l
}

// loadIndex reads a .sidx and checks that it belongs to the tar o.
func (s *Set) loadIndex(ctx context.Context, o, side objstore.Object, shard int, reserve func(n int64) error) (
	*index, error) {
	bad := func(err error) error {
		return fmt.Errorf("index %s: %w (restore it, or remove the set and pack again)", side.Key, err)
	}
	if side.Size > maxIndex {
		return nil, bad(corrupt("%d bytes", side.Size))
	}
	if err := reserve(side.Size); err != nil {
		return nil, err
	}
	data, err := readWhole(ctx, s.r, side, maxIndex)
	if err != nil {
		return nil, err
	}
	ix, err := parseIndex(data)
	if err != nil {
		return nil, bad(err)
	}
	if ix.size != o.Size {
		return nil, bad(corrupt("it belongs to a tar of %d bytes, %s has %d", ix.size, o.Key, o.Size))
	}
	if s.summary == nil && ix.coded {
		return nil, fmt.Errorf("%s has recoded members, and what restores them is in %s, which is damaged or not "+
			"read (restore that, and name the prefix as the source)", o.Key, SummaryName)
	}
	if s.summary != nil {
		m := s.summary.Shards[shard]
		if hex.EncodeToString(ix.dataset[:]) != s.Version || hex.EncodeToString(ix.plan[:]) != s.summary.Plan ||
			ix.shard != shard || ix.len() != m.Members {
			return nil, bad(corrupt("it belongs to another set than %s", SummaryName))
		}
	}
	if ix.etag != o.ETag {
		// A copy of a set has other ETags. Another tar of the same size has other headers.
		same, err := probe(ctx, s.r, o, ix)
		if err != nil {
			return nil, err
		}
		if !same {
			return nil, bad(corrupt("it belongs to another tar than %s", o.Key))
		}
	}
	return ix, nil
}

// loadWds reads a wds2idx index; nil if it does not agree with the tar o.
func (s *Set) loadWds(ctx context.Context, o, side objstore.Object, reserve func(n int64) error) (*scan, error) {
	no := func(why error) (*scan, error) {
		s.o.Logger.Info("wds2idx index is not used; reading headers instead", "index", side.Key, "why", why)
		return nil, nil
	}
	if side.Size > maxIndex {
		return no(errTooLong)
	}
	if side.ModTime.Before(o.ModTime) && !side.ModTime.IsZero() {
		return no(errors.New("older than its shard"))
	}
	// The text, the parsed index, and again without "./", with the map of paths.
	if err := reserve(6 * side.Size); err != nil {
		return nil, err
	}
	data, err := readWhole(ctx, s.r, side, maxIndex)
	if err != nil {
		return nil, err
	}
	ix, err := parseWds(data)
	if err != nil {
		return no(err)
	}
	if ok, err := agrees(ctx, s.r, o, ix); err != nil {
		return nil, err
	} else if !ok {
		return no(errors.New("does not account for every block of the shard"))
	}
	sc := newScan()
	ix.members(func(_ int, m indexMember) bool {
		m.path, m.mtime = trimName(m.path), catalog.Nanos(o.ModTime)
		err = sc.add(o.Key, m)
		return err == nil
	})
	sc.where = nil
	return sc, err
}

// budget bounds the memory of waiting shards. The shard whose turn it is gets all that it needs, so there is progress.
type budget struct {
	mu      sync.Mutex
	left    int64
	turn    int
	changed chan struct{} // closed when one of them is another
}

// take reserves n bytes for shard i.
func (b *budget) take(ctx context.Context, i int, n int64) error {
	for {
		b.mu.Lock()
		ok, changed := b.left >= n || i == b.turn, b.changed
		if ok {
			b.left -= n
		}
		b.mu.Unlock()
		if ok {
			return ctx.Err()
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// give returns the memory of the shard whose turn it was. The next one has its turn.
func (b *budget) give(n int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.left += n
	b.turn++
	close(b.changed)
	b.changed = make(chan struct{})
}
