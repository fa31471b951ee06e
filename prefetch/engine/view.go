package engine

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"maps"
	"math"
	"os"
	"slices"
	"strings"
	"sync"
	"time"
	"weak"

	"github.com/shoalfs/shoal/cache"
	"github.com/shoalfs/shoal/cache/cachedir"
	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/shard"
	"github.com/shoalfs/shoal/internal/trace"
	"github.com/shoalfs/shoal/prefetch"
	"github.com/shoalfs/shoal/prefetch/order"
)

// view is one version of the dataset.
type view struct {
	manifest *catalog.Manifest
	layout   *catalog.Layout // of a packed dataset; nil where each file is an object
	volume   *cache.Volume
	keeping  *keeping
	samples  *catalog.Samples
	groups   func() order.Groups // the samples by shard; computed at the first call
	unpacked string              // why --shards gives no groups
	sharing  *sharing            // nil without a cluster

	listMu sync.Mutex
	lists  map[string][]uint32 // by path, once read
}

// opened is a version that was opened. It lives as long as anything points to its view or its manifest, as mounts do
// that have nodes of it, sessions, and requests.
type opened struct {
	held   *view // nil once another version is in force
	view   weak.Pointer[view]
	lists  []io.Closer   // what the collector does not free
	need   cachedir.Need // its reservation in the cache directory
	unused bool          // when sweep last looked
}

func (o *opened) close(h *Host) (err error) {
	for _, l := range o.lists {
		err = errors.Join(err, l.Close())
	}
	h.Release(o.need)
	return err
}

// sweepEvery is how often versions that nobody uses are looked for. They are freed one look later: the collector may
// find a version without pointers while its last reader still has bytes of it in hand.
const sweepEvery = 30 * time.Second

func (e *Engine) sweep() {
	var past []*view
	var gone []*opened
	e.mu.Lock()
	e.views = slices.DeleteFunc(e.views, func(o *opened) bool {
		v, unused := o.view.Value(), o.unused
		switch o.unused = v == nil; {
		case unused:
			gone = append(gone, o)
		case v != nil && o.held == nil:
			past = append(past, v)
		}
		return unused
	})
	e.mu.Unlock()
	for _, v := range past {
		v.volume.Retire() // again: what was under way then has come since
	}
	for _, o := range gone {
		_ = o.close(e.host)
	}
}

func closeList(m *catalog.Manifest, layout *catalog.Layout) error {
	return errors.Join(m.Close(), layout.Close())
}

// newView reserves a version's metadata and adds it to the cache.
func (e *Engine) newView(m *catalog.Manifest, layout *catalog.Layout, match *catalog.Filter) (*view, error) {
	if layout != nil {
		layout.Chunk = shard.ChunkBytes(layout)
	}
	need, err := e.host.Reserve(m, layout, shard.CodedBytes(layout))
	if err != nil {
		return nil, errors.Join(err, closeList(m, layout))
	}
	v := &view{manifest: m, layout: layout}
	m.Owner = v
	v.samples = m.Samples(match)
	v.keeping = newKeeping(e, v)
	o := cache.VolumeOptions{Manifest: m, Dataset: e.dataset, Name: e.source.String(), Store: e.store,
		Admit: v.keeping.admit()}
	if e.recoding.Coder != nil {
		o.Codec = &e.recoding
	}
	key := keepKey(m, layout)
	o.Rank = func(file, extent int) uint8 {
		if v.sharing.kept(file, extent) || v.inPages(e, file) {
			return math.MaxUint8
		}
		return prefetch.Rank(key(file))
	}
	if layout != nil {
		o.Locate = layout
		if e.shards != nil {
			o.Store = e.shards.store
		}
		o.Store = e.restoring(o.Store, layout.Chunk)
		v.groups = sync.OnceValue(func() order.Groups { return groupsOf(layout, v.samples) })
	} else if e.shards != nil {
		v.unpacked = e.shards.unused
	}
	v.volume = e.cache.NewVolume(o)
	e.share(v)
	lists := []io.Closer{m.Content()}
	if layout != nil {
		lists = append(lists, layout.Content())
	}
	e.mu.Lock()
	e.views = append(e.views, &opened{held: v, view: weak.Make(v), lists: lists, need: need})
	e.mu.Unlock()
	return v, nil
}

// openVersions returns the file names of manifests and layouts in use.
func (s *versions) openVersions() (names []string) {
	s.find(func(v *view) bool {
		names = append(names, v.manifest.FileName(), v.layout.Version())
		return false
	})
	return names
}

// VersionName returns the name by which another process finds a version that is or was in force, unless it is removed.
func (e *Engine) VersionName(m *catalog.Manifest) string { return m.Owner.(*view).name() }

// VersionNamed returns the last version of that name, or nil.
func (s *versions) VersionNamed(name string) *catalog.Manifest {
	if v := s.find(func(v *view) bool { return v.name() == name }); v != nil {
		return v.manifest
	}
	return nil
}

// collect removes the lists of versions that no dataset uses any more.
func (e *Engine) collect() {
	e.host.mu.Lock()
	keep := e.host.versions()
	e.host.mu.Unlock()
	if n, err := e.catalog.GC(keep...); err != nil {
		e.log.Warn("old manifests were not removed", "cause", err)
	} else if n > 0 {
		e.log.Debug("old manifests removed", "count", n)
	}
}

// find returns the last version of which is says so, that is or was in force; nil: there is none.
func (s *versions) find(is func(*view) bool) *view {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, o := range slices.Backward(s.views) {
		if v := o.view.Value(); v != nil && is(v) {
			return v
		}
	}
	return nil
}

// name has the version, and the names of the files of manifest and layout.
func (v *view) name() string {
	return strings.Join([]string{v.manifest.Version(), v.manifest.FileName(), v.layout.Version()}, "/")
}

// openPast opens the versions of Config.Past that are still there, for readers only. It comes before anything is
// listed, which removes what nobody uses.
func (e *Engine) openPast(match *catalog.Filter) {
	if e.cfg.Past == nil {
		return
	}
	for _, name := range e.cfg.Past(e.Source()) {
		names := strings.Split(name, "/")
		err := errors.New("no name of a version")
		if len(names) == 3 {
			var m *catalog.Manifest
			var l *catalog.Layout
			if m, l, err = e.catalog.Past(e.name, names[0], names[1], names[2]); err == nil && m != nil {
				var v *view
				if v, err = e.newView(m, l, match); err == nil {
					v.volume.Retire()
				}
			}
		}
		if err != nil {
			e.log.Warn("files left open when the daemon was replaced fail: their version is lost",
				"version", name, "cause", err)
		}
	}
}

// list lists the source and makes the result the catalog's current version.
func (e *Engine) list(ctx context.Context) (m *catalog.Manifest, layout *catalog.Layout, err error) {
	start := time.Now()
	ctx, span := trace.Start(ctx, "dataset.list")
	defer func() {
		span.Str("shoal.source", e.source.String())
		if m != nil {
			span.Int("shoal.files", int64(m.Len()))
		}
		span.End(err)
	}()
	packed := !e.cfg.rows()
	if packed {
		packed, err = shard.IsSet(ctx, e.store, e.source)
	}
	if err != nil {
		return nil, nil, err
	}
	if e.cfg.rows() {
		m, layout, err = e.listRows(ctx)
	} else if packed {
		m, layout, err = e.listPacked(ctx, e.store, e.source, nil)
	} else {
		m, err = e.listFiles(ctx)
	}
	if err == nil && e.shards != nil {
		layout, err = e.shards.layout(ctx, e, m)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("list %s: %w", e.source, err)
	}
	if err := e.catalog.SetManifest(e.name, m, layout, 0); err != nil {
		return nil, nil, err
	}
	if at := e.host.changed.Load(); at != nil && at.After(start) { // and this may have been listed before
		if err := e.MarkStale([]string{e.source.Prefix}); err != nil {
			return nil, nil, err
		}
	}
	// From here on the saved files are used, and the listing's heap is freed.
	if m, layout, err = e.catalog.Manifest(e.name); err != nil {
		return nil, nil, err
	}
	e.collect()
	e.log.Info("listed", "source", e.source.String(), "files", m.Len(), "packed", packed,
		"took", time.Since(start).Round(time.Millisecond))
	if s := m.Skipped(); s.Hostile+s.Shadowed > 0 {
		e.log.Warn("some keys cannot be shown as files", "hostile", s.Hostile, "shadowed_by_a_folder", s.Shadowed,
			"examples", s.Examples)
	}
	return m, layout, nil
}

// listFiles lists a tree of objects, each a file.
func (e *Engine) listFiles(ctx context.Context) (*catalog.Manifest, error) {
	// 16 parallel listings: a page of 1,000 keys takes a store about 100 ms.
	objects := objstore.ListParallel(ctx, e.store, e.source.Prefix, 16, e.cfg.Progress)
	m, err := catalog.Build(objects, catalog.BuildOptions{Prefix: e.source.Prefix, Empty: e.cfg.Empty})
	if d, ok := e.base.(*objstore.Dir); ok {
		if l := d.TakeLeftOut(); l.Dangling+l.Special > 0 {
			e.log.Warn("some entries of the folder are not files and are not shown", "dangling_links", l.Dangling,
				"pipes_sockets_devices", l.Special, "examples", l.Examples)
		}
	}
	return m, err
}

// listIndex lists the samples that an index finds in shards. m, unless nil, is the manifest of the packed dataset.
func (e *Engine) listIndex(ctx context.Context, index shard.Index, m *catalog.Manifest) (
	*catalog.Manifest, *catalog.Layout, error) {
	var p places
	for member, err := range index.Members(ctx) {
		if err != nil {
			return nil, nil, err
		}
		p.add(member)
		if e.cfg.Progress != nil && len(p.off)%1000 == 0 {
			e.cfg.Progress(len(p.off))
		}
	}
	if p.bad = index.Bad(); m == nil {
		var err error
		if m, err = catalog.Build(p.objects(), catalog.BuildOptions{}); err != nil {
			return nil, nil, err
		}
	} else if len(p.bad) > 0 {
		return nil, nil, errBadShards
	}
	layout, err := catalog.BuildLayout(m, e.leaveOut(index), p.places(m))
	return m, layout, err
}

// listRows finds the samples in the objects, each a file.
func (e *Engine) listRows(ctx context.Context) (*catalog.Manifest, *catalog.Layout, error) {
	o := shard.OpenOptions{Logger: e.log, SkipBad: e.cfg.SkipBadShards, Columns: e.cfg.columns()}
	if m, l, err := e.catalog.Manifest(e.name); err == nil {
		defer func() { _ = closeList(m, l) }()
		o.Manifest, o.Layout = m, l
	}
	rows, err := shard.OpenRows(ctx, e.store, e.source, o)
	if err != nil {
		return nil, nil, err
	}
	return e.listIndex(ctx, rows, nil)
}

// listPacked reads the index of a shard set. m, unless nil, is the manifest of the packed dataset.
func (e *Engine) listPacked(ctx context.Context, store objstore.Reader, source objstore.Source, m *catalog.Manifest) (
	*catalog.Manifest, *catalog.Layout, error) {
	set, err := shard.Open(ctx, store, source, shard.OpenOptions{Logger: e.log, SkipBad: e.cfg.SkipBadShards})
	if err != nil {
		return nil, nil, err
	}
	if m != nil && set.Version != m.Version() {
		return nil, nil, errOtherVersion
	}
	m, layout, err := e.listIndex(ctx, set, m)
	if err != nil {
		return nil, nil, err
	}
	if r := set.Report(); r.Renamed+r.Replaced+r.Skipped > 0 {
		e.log.Warn("some members of the shards are shown under another name, or not at all", "renamed", r.Renamed,
			"replaced", r.Replaced, "skipped", r.Skipped, "examples", r.Examples)
	}
	if set.Version != "" && set.Version != m.Version() && len(set.Bad()) == 0 {
		return nil, nil, fmt.Errorf(
			"the shards' indexes give dataset version %.12s, and their manifest names %.12s (pack the dataset again)",
			m.Version(), set.Version)
	}
	return m, layout, nil
}

// leaveOut returns the objects of an index, in which those that are left out have no ETag, and logs these.
func (e *Engine) leaveOut(index shard.Index) []objstore.Object {
	objects, bad := index.Objects(), index.Bad()
	if len(bad) == 0 {
		return objects
	}
	objects = slices.Clone(objects)
	var examples []string
	for _, i := range slices.Sorted(maps.Keys(bad)) {
		objects[i].ETag = ""
		if len(examples) < badExamples {
			examples = append(examples, bad[i].Error())
		}
	}
	e.log.Warn("bad shards are left out of the dataset", "shards", len(bad), "of", len(objects), "examples", examples,
		"remedy", "restore them, then run shoal refresh")
	return objects
}

// badExamples is how many bad shards are named in messages.
const badExamples = 16

// badShards returns how many shards were left out, and the first keys.
func (v *view) badShards() (n int, examples []string) {
	if v.layout == nil {
		return 0, nil
	}
	for i := range v.layout.Shards() {
		if o := v.layout.Shard(i); o.ETag == "" {
			if n++; n <= badExamples {
				examples = append(examples, fmt.Sprintf("%s: a bad shard", o.Key))
			}
		}
	}
	return n, examples
}

// places gathers members in arenas: ten million of them would be some GiB of strings.
type places struct {
	names []byte // paths and ETags, one after the other
	off   []uint64
	etag  []uint16 // length of the ETag, which follows the path
	size  []int64
	mtime []int64
	shard []uint32
	at    []int64
	sums  []uint32 // of the extents, at least one a member
	bad   map[int]error
}

func (p *places) add(m shard.Member) {
	p.off = append(p.off, uint64(len(p.names)))
	p.names = append(append(p.names, m.Path...), m.ETag...)
	p.etag = append(p.etag, uint16(len(m.ETag)))
	p.size = append(p.size, m.Size)
	p.mtime = append(p.mtime, catalog.Nanos(m.ModTime))
	p.shard = append(p.shard, uint32(m.Shard))
	p.at = append(p.at, m.Off)
	for x := range max(1, catalog.Extents(m.Size)) {
		p.sums = append(p.sums, m.ExtentSum(x))
	}
}

func (p *places) text(i int) (path, etag string) {
	end := uint64(len(p.names))
	if i+1 < len(p.off) {
		end = p.off[i+1]
	}
	cut := end - uint64(p.etag[i])
	return string(p.names[p.off[i]:cut]), string(p.names[cut:end])
}

func (p *places) objects() iter.Seq2[objstore.Object, error] {
	return func(yield func(objstore.Object, error) bool) {
		for i := range p.off {
			if p.bad[int(p.shard[i])] != nil {
				continue
			}
			path, etag := p.text(i)
			if !yield(objstore.Object{Key: path, Size: p.size[i], ETag: etag,
				ModTime: catalog.TimeOf(p.mtime[i])}, nil) {
				return
			}
		}
	}
}

// places yields the places of the files of m; members that m does not show are left out.
func (p *places) places(m *catalog.Manifest) iter.Seq2[catalog.Place, error] {
	hidden := m.Skipped().Total()+m.Skipped().Markers > 0
	return func(yield func(catalog.Place, error) bool) {
		rest := p.sums
		for i := range p.off {
			path, _ := p.text(i)
			sums := rest[:max(1, catalog.Extents(p.size[i]))]
			rest = rest[len(sums):]
			if p.bad[int(p.shard[i])] != nil {
				continue
			}
			if hidden {
				if node, ok := m.Find(path); !ok || node.IsDir {
					continue
				}
			}
			if !yield(catalog.Place{Path: path, Shard: int(p.shard[i]), Off: p.at[i], Sums: sums}, nil) {
				return
			}
		}
	}
}

// groupsOf returns the samples by shard, or by its chunks if it has those, in the order of their offsets.
func groupsOf(l *catalog.Layout, s *catalog.Samples) order.Groups {
	g := &shardGroups{first: make([]int, 1, l.Shards()+1), samples: make([]uint32, 0, s.Len())}
	for i := range l.Shards() {
		from, to := l.ShardRanks(i)
		run, chunk := shard.Run(l.Shard(i)), int64(0)
		for rank := from; rank < to; rank++ {
			if run > 0 {
				if _, off, _ := l.Extent(rank); off/run != chunk {
					g.end()
					chunk = off / run
				}
			}
			if sample, ok := s.Sample(l.At(rank)); ok {
				g.samples = append(g.samples, uint32(sample))
			}
		}
		g.end()
	}
	return g
}

// shardGroups implements order.Groups.
type shardGroups struct {
	first   []int // of each group in samples, and the end
	samples []uint32
}

// end ends a group. One without samples is none.
func (g *shardGroups) end() {
	if g.first[len(g.first)-1] < len(g.samples) {
		g.first = append(g.first, len(g.samples))
	}
}

func (g *shardGroups) Len() int         { return len(g.first) - 1 }
func (g *shardGroups) Size(i int) int   { return g.first[i+1] - g.first[i] }
func (g *shardGroups) At(i, at int) int { return int(g.samples[g.first[i]+at]) }

// facts are what orders over sample numbers depend on.
func (v *view) facts() order.Facts {
	return order.Facts{
		Samples: v.samples.Len(), Shards: v.groups, Unpacked: v.unpacked, List: v.list,
		Size:    func(sample int) int64 { return v.manifest.Size(v.samples.File(sample)) },
		Classes: v.samples.Classes, Label: v.samples.Label,
	}
}

// list reads the samples in the list file name, by number or by path, once per version: later changes of the file do
// not change the order in force.
func (v *view) list(name string) ([]uint32, error) {
	v.listMu.Lock()
	defer v.listMu.Unlock()
	if l, ok := v.lists[name]; ok {
		return l, nil
	}
	data, err := os.ReadFile(name)
	if err != nil {
		return nil, fmt.Errorf("list: %w", err)
	}
	l, err := order.ParseList(data, v.samples.Len(), func(path string) (int, bool) {
		node, ok := v.manifest.Find(path)
		if !ok || node.IsDir {
			return 0, false
		}
		return v.samples.Sample(node.Index)
	})
	if err != nil {
		return nil, fmt.Errorf("list %s: %w", name, err)
	}
	if v.lists == nil {
		v.lists = map[string][]uint32{}
	}
	v.lists[name] = l
	return l, nil
}
