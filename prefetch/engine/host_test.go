package engine

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"unicode/utf8"

	"github.com/shoalfs/shoal/cache/cachedir"
	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/objstore/stores"
	"github.com/shoalfs/shoal/cache/shard"
	"github.com/shoalfs/shoal/prefetch/order"
)

// packFolder packs a folder and returns the set's.
func packFolder(t testing.TB, dir string, shardSize int64) string {
	t.Helper()
	ctx := context.Background()
	src, err := objstore.NewDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	m, err := catalog.Build(src.List(ctx, "", ""), catalog.BuildOptions{})
	if err != nil {
		t.Fatal(err)
	}
	to := t.TempDir()
	dst, _, err := stores.Create(ctx, to, stores.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := shard.Pack(ctx, m, src, dst, "",
		shard.PackOptions{ShardSize: shardSize, Permute: PackOrder(1)}); err != nil {
		t.Fatal(err)
	}
	return to
}

func spec(t testing.TB, text string) order.Spec {
	t.Helper()
	s, err := order.Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func newHost(t testing.TB, dir string, size int64) *Host {
	t.Helper()
	h, err := OpenHost(HostConfig{
		Options: cachedir.Options{Path: dir, Size: size, Memory: 256 << 20,
			Logger: slog.New(slog.NewTextHandler(io.Discard, nil))}})
	if err != nil {
		t.Fatal(err)
	}
	return h
}

// A mount of a shard set shows the files that were packed, as the same dataset, and with a known order
// fetches many by a request.
func TestPackedSource(t *testing.T) {
	dir, paths := folder(t, 4, 100)
	set := packFolder(t, dir, 256<<10)
	plain := openEngine(t, dir, t.TempDir(), "none")
	version := plain.Manifest().Version()
	closeEngine(t, plain)
	for _, spec := range []string{"windowed:seed=1,window=2", "uniform:seed=1", "none"} {
		t.Run(spec, func(t *testing.T) {
			e := openEngine(t, set, t.TempDir(), spec)
			defer closeEngine(t, e)
			if got := e.Manifest().Version(); got != version {
				t.Errorf("version %s, that of the source is %s", got, version)
			}
			inOrder := paths
			if spec != "none" {
				var b bytes.Buffer
				if err := e.WriteOrder(&b, e.order(), true); err != nil {
					t.Fatal(err)
				}
				inOrder = strings.Fields(b.String())
				waitFor(t, "everything is kept", func() bool { k, n := e.cur.Load().volume.Kept(); return k == n })
			}
			if len(inOrder) != len(paths) {
				t.Fatalf("%d of %d files in the order", len(inOrder), len(paths))
			}
			for _, p := range inOrder {
				read(t, e, dir, p)
			}
			s := e.Stats()
			if want := int64(len(paths) / 10); spec != "none" && s.GetRequests > want {
				t.Errorf("%d requests for %d files", s.GetRequests, len(paths))
			}
			if !s.Packed {
				t.Error("not packed")
			}
		})
	}
}

// Each write of an order is text: a daemon sends it as such, and would replace half a character.
func TestOrderInWholeLines(t *testing.T) {
	dir := t.TempDir()
	for i := range 3000 {
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("訓練用の猫の写真_%d.jpg", i)), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	e := openEngine(t, dir, t.TempDir(), "uniform:seed=1")
	defer closeEngine(t, e)
	var all texts
	if err := e.WriteOrder(&all, e.order(), true); err != nil {
		t.Fatal(err)
	}
	if lines := strings.Count(strings.Join(all, ""), ".jpg\n"); lines != 3000 || len(all) < 2 {
		t.Errorf("%d lines in %d writes", lines, len(all))
	}
	for i, text := range all {
		if !utf8.ValidString(text) || !strings.HasSuffix(text, "\n") {
			t.Errorf("write %d is not whole: %.20q…", i, text)
		}
	}
}

// texts are what was written.
type texts []string

func (w *texts) Write(p []byte) (int, error) { *w = append(*w, string(p)); return len(p), nil }

// With --shards the source keeps its name, its version and what is cached of it.
func TestShardsStandIn(t *testing.T) {
	dir, paths := folder(t, 2, 40)
	set, cacheDir := packFolder(t, dir, 1<<20), t.TempDir()
	host := HostConfig{Options: cachedir.Options{Path: cacheDir, Size: 256 << 20, Memory: 256 << 20}}
	e := open(t, host, Config{Source: dir, Order: spec(t, "none")})
	for _, p := range paths[:40] {
		read(t, e, dir, p)
	}
	closeEngine(t, e)
	e = open(t, host, Config{Source: dir, Shards: set, Order: spec(t, "none")})
	for _, p := range paths {
		read(t, e, dir, p)
	}
	if s := e.Stats(); !s.Packed || s.Hits.Keep != 40 || s.Misses != 40 {
		t.Errorf("packed %v, %d kept, %d missed", s.Packed, s.Hits.Keep, s.Misses)
	}
	closeEngine(t, e)

	// Another version: the source's own files are read, and the reason is told.
	if err := os.WriteFile(filepath.Join(dir, "c00/new.jpg"), []byte("new"), 0o644); err != nil {
		t.Fatal(err)
	}
	e = open(t, host, Config{Source: dir, Shards: set, Order: spec(t, "none"), Refresh: true})
	defer func() { closeEngine(t, e) }()
	read(t, e, dir, "c00/new.jpg")
	if s := e.Stats(); s.Packed || len(s.Errors) == 0 || !strings.Contains(s.Errors[0].Text, "another version") {
		t.Errorf("packed %v, errors %v", s.Packed, s.Errors)
	}
	// An order over shards is refused for that reason, also by the next start, which looks again.
	for range 2 {
		if _, err := spec(t, "windowed:seed=1,window=4").Over(e.cur.Load().facts(), 0); !errors.Is(err,
			order.ErrNeedsShards) || !strings.Contains(err.Error(), "holds another version of the dataset") ||
			!strings.Contains(err.Error(), set) {
			t.Errorf("windowed: %v", err)
		}
		closeEngine(t, e)
		e = open(t, host, Config{Source: dir, Shards: set, Order: spec(t, "none")})
	}
}

// Two datasets share a directory. Both stay over restarts; the one that is not open makes room when it
// must, unless it is pinned.
func TestDatasetsShareADirectory(t *testing.T) {
	const size = 40 << 20
	big := func(seed byte) (dir string, paths []string) {
		dir = t.TempDir()
		for i := range 24 {
			p := fmt.Sprintf("c/%02d.jpg", i)
			if err := os.MkdirAll(filepath.Join(dir, "c"), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(dir, p), bytes.Repeat([]byte{seed, byte(i)}, 512<<10),
				0o644); err != nil {
				t.Fatal(err)
			}
			paths = append(paths, p)
		}
		return dir, paths
	}
	a, aPaths := big(1)
	b, bPaths := big(2)
	cacheDir := t.TempDir()
	fill := func(h *Host, dir string, paths []string) (kept int) {
		t.Helper()
		e := openOn(t, h, Config{Source: dir, Order: spec(t, "none")})
		for _, p := range paths {
			read(t, e, dir, p)
		}
		if err := e.cur.Load().volume.Flush(context.Background()); err != nil {
			t.Fatal(err)
		}
		kept, _ = e.cur.Load().volume.Kept()
		if err := e.Close(); err != nil {
			t.Fatal(err)
		}
		return kept
	}
	info := func(h *Host, dir string) cachedir.Info {
		t.Helper()
		d, err := h.Find(dir)
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	h := newHost(t, cacheDir, size)
	if n := fill(h, a, aPaths); n != 24 {
		t.Fatalf("%d of 24 kept", n)
	}
	if n := fill(h, b, bPaths); n != 24 {
		t.Errorf("%d of the second dataset kept: the first, which is not open, should have made room", n)
	}
	used, limit := h.Usage()
	if used > limit {
		t.Errorf("%d bytes used of %d", used, limit)
	}
	if n := info(h, a).DiskBytes; n < limit-24<<20-10<<20 { // room is made by 8 MiB
		t.Errorf("%d bytes of the first are left where %d are used of %d", n, used, limit)
	}
	if err := h.Catalog.SetPinned(info(h, b).ID, true); err != nil {
		t.Fatal(err)
	}
	if err := h.Close(); err != nil {
		t.Fatal(err)
	}

	h = newHost(t, cacheDir, size)
	if n := fill(h, a, aPaths); n >= 24 {
		t.Errorf("%d of the first kept beside a pinned one of 24 MiB", n)
	}
	if n := info(h, b).DiskBytes; n < 24<<20 {
		t.Errorf("%d bytes of the pinned one are left", n)
	}
	if err := h.Remove(info(h, b).ID); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(cacheDir, "segments", hex.EncodeToString(catalogID(b)))); err == nil {
		t.Error("the removed dataset has segments")
	}
	e := openOn(t, h, Config{Source: a, Order: spec(t, "none")})
	if err := h.Remove(info(h, a).ID); err == nil {
		t.Error("an open dataset was removed")
	}
	if err := h.SetQuota(info(h, a).ID, 16<<20); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "the quota holds", func() bool { return e.cur.Load().volume.Stats().DiskUsed <= 16<<20 })
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
	if err := h.Close(); err != nil {
		t.Fatal(err)
	}
}

// stopping is a handler that waits at a message for stop to be closed, after it has closed there.
type stopping struct {
	slog.Handler
	at          string
	there, stop chan struct{}
}

func (h stopping) Handle(ctx context.Context, r slog.Record) error {
	if strings.HasPrefix(r.Message, h.at) {
		close(h.there)
		<-h.stop
	}
	return h.Handler.Handle(ctx, r)
}

// What a dataset needs that is not open yet, of a version that is not in force any more, stays when another one's old
// lists go.
func TestListsOfHeldMountsStay(t *testing.T) {
	held, _ := folder(t, 1, 2)
	other, _ := folder(t, 1, 3)
	change := func(e *Engine, dir, name string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, "c00", name), []byte("new"), 0o644); err != nil {
			t.Fatal(err)
		}
		if changed, err := e.Refresh(t.Context()); !changed || err != nil {
			t.Fatal(changed, err)
		}
	}
	host := HostConfig{Options: cachedir.Options{Path: t.TempDir(), Size: 64 << 20, Memory: 256 << 20}}
	e := open(t, host, Config{Source: held, Order: spec(t, "none")})
	old := e.VersionName(e.Manifest())
	version := e.Manifest().Version()
	change(e, held, "a.jpg")
	names, name, list := strings.Split(old, "/"), e.name, strings.Split(old, "/")[1]
	closeEngine(t, e)
	host.Held = func() []string { return names }
	e = open(t, host, Config{Source: other, Order: spec(t, "none")})
	m, _, err := e.catalog.Past(name, version, names[1], names[2])
	if err != nil || m == nil || m.Version() != version {
		t.Fatal(m, err)
	}
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	defer closeEngine(t, e)
	names = nil // it is open
	change(e, other, "b.jpg")
	if _, _, err := e.catalog.Past(name, version, list, ""); err == nil {
		t.Error("the list of a version that nobody needs is there")
	}
}

// A disk that takes its time over a removal holds up nobody else.
func TestRemoveOnASlowDisk(t *testing.T) {
	dir, paths := folder(t, 1, 2)
	cacheDir := t.TempDir()
	log := stopping{slog.NewTextHandler(io.Discard, nil), "manifest or layout is lost", make(chan struct{}),
		make(chan struct{})}
	h, err := OpenHost(HostConfig{
		Options: cachedir.Options{Path: cacheDir, Size: 64 << 20, Memory: 256 << 20, Logger: slog.New(log)}})
	if err != nil {
		t.Fatal(err)
	}
	e := openOn(t, h, Config{Source: dir, Order: spec(t, "none")})
	read(t, e, dir, paths[0])
	name, manifest := e.name, e.Manifest().FileName()
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
	// It is the catalog that waits, and so the removal: for who finds that a list is lost.
	if err := os.Remove(filepath.Join(cacheDir, "manifests", manifest)); err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	all.Go(func() {
		if _, _, err := h.Catalog.Manifest(name); !errors.Is(err, catalog.ErrNoManifest) {
			t.Error(err)
		}
	})
	<-log.there
	all.Go(func() {
		if err := h.Remove(e.dataset); err != nil {
			t.Error(err)
		}
	})
	waitFor(t, "the segments are removed", func() bool {
		_, err := os.Stat(filepath.Join(cacheDir, "segments", hex.EncodeToString(e.dataset[:])))
		return errors.Is(err, os.ErrNotExist)
	})
	waitFor(t, "nobody has the host's lock", func() bool {
		free := h.mu.TryLock()
		if free {
			h.mu.Unlock()
		}
		return free
	})
	if _, err := h.Datasets(); err != nil {
		t.Error(err)
	}
	if h.users() > 0 || len(h.engines()) > 0 {
		t.Error("what is removed is open")
	}
	early, cancel := context.WithCancel(t.Context())
	cancel()
	if same, err := h.enter(early, &Engine{identity: e.identity}); same != nil || !errors.Is(err, context.Canceled) {
		t.Errorf("who opens what is being removed does not wait: %v, %v", same, err)
	}
	all.Go(func() { // waits for the first, and finds nothing left to do
		if err := h.Remove(e.dataset); err != nil {
			t.Error(err)
		}
	})
	close(log.stop)
	all.Wait()
	if infos, err := h.Datasets(); err != nil || len(infos) > 0 {
		t.Errorf("%v, %v", infos, err)
	}
	if err := h.Close(); err != nil {
		t.Fatal(err)
	}
}

func catalogID(dir string) []byte {
	src, err := objstore.ParseSource(dir)
	if err != nil {
		panic(err)
	}
	id := catalog.DatasetID(src.Canonical())
	return id[:]
}

// The second user of a dataset shares it; the last one closes it.
func TestUsersShareADataset(t *testing.T) {
	dir, paths := folder(t, 2, 10)
	h := newHost(t, t.TempDir(), 64<<20)
	first := openOn(t, h, Config{Source: dir, Order: spec(t, "auto")})
	if _, err := h.Open(context.Background(),
		Config{Source: dir, Order: spec(t, "windowed:seed=1,window=2"), Samples: "images",
			Connections: 1}); err == nil {
		t.Error("an order of shards, of single files")
	}
	if s := first.Stats(); s.Order.Spec != "auto" || first.orders.inference.Load() == nil {
		t.Errorf("order %+v: the refused one's is in force", s.Order)
	}
	second := openOn(t, h, Config{Source: dir, Order: spec(t, "sequential")})
	if first != second {
		t.Fatal("two engines of one dataset")
	}
	h.mu.Lock()
	users := first.users
	first.users = 0 // it is being closed
	h.mu.Unlock()
	if _, ok := h.Use(first.dataset); ok {
		t.Error("a dataset that is being closed has another user")
	}
	first.users = users
	if got := first.Stats().Order.Spec; got != "sequential" {
		t.Errorf("order %s: the second user's should be in force", got)
	}
	if _, err := h.Open(context.Background(),
		Config{Source: dir, Order: spec(t, "uniform:seed=1"), Samples: "images", Connections: 1}); err == nil ||
		!strings.Contains(err.Error(), "sequential") {
		t.Errorf("another order: %v", err)
	}
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	for _, p := range paths {
		read(t, second, dir, p)
	}
	if err := second.Close(); err != nil {
		t.Fatal(err)
	}
	if err := h.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestWarm(t *testing.T) {
	dir, paths := folder(t, 4, 50)
	for _, source := range []string{dir, packFolder(t, dir, 128<<10)} {
		e := openEngine(t, source, t.TempDir(), "none")
		var last WarmProgress
		p, err := e.Warm(context.Background(), 0.5, nil, func(p WarmProgress) { last = p })
		if err != nil || p.Errors > 0 || p.Full {
			t.Fatalf("%+v, %v", p, err)
		}
		half := e.Manifest().Bytes() / 2
		if p.BytesDone > half || p.BytesDone < half*7/10 || p.Kept != p.FilesDone || last != p {
			t.Errorf("half of %d bytes: %+v, last told %+v", 2*half, p, last)
		}
		if p, err = e.Warm(context.Background(), 1, nil, func(WarmProgress) {}); err != nil || p.Kept != len(paths) {
			t.Errorf("all: %+v, %v", p, err)
		}
		if p, err = e.Warm(context.Background(), 1, []byte("nothing\n"), func(WarmProgress) {}); err == nil {
			t.Errorf("what is not there: %+v", p)
		}
		closeEngine(t, e)
	}
}

// What is warmed is chosen of the version that is warmed, though others with fewer files come into force meanwhile.
func TestWarmWhileRefreshed(t *testing.T) {
	dir, paths := folder(t, 2, 20)
	e := openEngine(t, dir, t.TempDir(), "none")
	defer closeEngine(t, e)
	var refreshing sync.WaitGroup
	done := make(chan struct{})
	refreshing.Go(func() {
		defer close(done)
		for _, p := range paths[1:] {
			if err := os.Remove(filepath.Join(dir, p)); err != nil {
				t.Error(err)
			}
			if changed, err := e.Refresh(context.Background()); err != nil || !changed {
				t.Errorf("%v, %v", changed, err)
			}
		}
	})
	for running := true; running; {
		select {
		case <-done:
			running = false
		default:
		}
		if _, err := e.Warm(context.Background(), 1, nil, func(WarmProgress) {}); err != nil {
			t.Error(err)
		}
	}
	refreshing.Wait()
	if p, err := e.Warm(context.Background(), 1, nil, func(WarmProgress) {}); err != nil || p.Kept != 1 ||
		p.Extents != 1 {
		t.Errorf("%+v, %v", p, err)
	}
}

// All is kept that was to be, with memory for a small part of it: what has been read is not let go of
// before it is written.
func TestWarmWithLittleMemory(t *testing.T) {
	const files = 150
	dir := t.TempDir()
	for i := range files {
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("%03d.bin", i)),
			bytes.Repeat([]byte{byte(i), 1}, 512<<10), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	// 50 MiB, of 36 for data
	if err := os.WriteFile(filepath.Join(dir, "large.bin"), bytes.Repeat([]byte("large"), 10<<20), 0o644); err != nil {
		t.Fatal(err)
	}
	e := open(t, HostConfig{Options: cachedir.Options{Path: t.TempDir(), Size: 1 << 30, Memory: 112 << 20}},
		Config{Source: dir, Order: spec(t, "none")})
	defer closeEngine(t, e)
	p, err := e.Warm(context.Background(), 1, nil, func(WarmProgress) {})
	if err != nil || p.Kept != files+13 || p.Full || p.Errors > 0 {
		t.Errorf("%+v, %v", p, err)
	}
}

// A version that is no longer in force is not warmed on: nothing of it would be kept.
func TestWarmOfAnotherVersion(t *testing.T) {
	dir, paths := folder(t, 4, 100)
	e := openEngine(t, dir, t.TempDir(), "none")
	defer closeEngine(t, e)
	old := e.cur.Load()
	if err := os.WriteFile(filepath.Join(dir, "c00", "new.jpg"), []byte("new"), 0o644); err != nil {
		t.Fatal(err)
	}
	if changed, err := e.Refresh(context.Background()); err != nil || !changed {
		t.Fatalf("%v, %v", changed, err)
	}
	if p, err := e.warmVersion(context.Background(), old, 1, nil, func(WarmProgress) {}); !errors.Is(err, errMoved) ||
		p.FilesDone > warmReaders {
		t.Errorf("%+v, %v", p, err)
	}
	if p, err := e.Warm(context.Background(), 1, nil, func(WarmProgress) {}); err != nil || p.Kept != len(paths)+1 {
		t.Errorf("%+v, %v", p, err)
	}
}

// After a pass the dataset is published, once, and the set holds its version.
func TestPublish(t *testing.T) {
	dir, paths := folder(t, 2, 30)
	to := filepath.Join(t.TempDir(), "set")
	e := open(t, HostConfig{Options: cachedir.Options{Path: t.TempDir(), Size: 64 << 20, Memory: 256 << 20}},
		Config{Source: dir, Publish: to, Order: spec(t, "none")})
	for _, p := range paths {
		read(t, e, dir, p)
	}
	waitFor(t, "the set is complete", func() bool {
		_, err := os.Stat(filepath.Join(to, shard.SummaryName))
		return err == nil
	})
	version := e.Manifest().Version()
	closeEngine(t, e)
	e = openEngine(t, to, t.TempDir(), "none")
	defer closeEngine(t, e)
	if got := e.Manifest().Version(); got != version {
		t.Errorf("published version %s, want %s", got, version)
	}
	h := newHost(t, t.TempDir(), 64<<20)
	if _, err := h.Open(context.Background(),
		Config{Source: dir, Publish: filepath.Join(dir, "new"), Order: spec(t, "none"), Samples: "*",
			Connections: 1}); err == nil ||
		!strings.Contains(err.Error(), "overlap") {
		t.Errorf("publishing into the source: %v", err)
	}
	if _, err := os.Lstat(filepath.Join(dir, "new")); err == nil {
		t.Error("a folder was made in the source")
	}
	if err := h.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestFsck(t *testing.T) {
	dir, paths := folder(t, 2, 30)
	cacheDir := t.TempDir()
	e := openEngine(t, dir, cacheDir, "none")
	for _, p := range paths {
		read(t, e, dir, p)
	}
	closeEngine(t, e)
	check := func(repair bool) *cachedir.Report {
		t.Helper()
		r, err := cachedir.Fsck(context.Background(), cacheDir,
			cachedir.FsckOptions{Repair: repair, Progress: func(int64, int64) {}})
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	if r := check(false); r.Damage != 0 || r.Records != len(paths) || r.Datasets != 1 {
		t.Fatalf("%+v", r)
	}
	segments, _ := filepath.Glob(filepath.Join(cacheDir, "segments", "*", "*.seg"))
	manifests, _ := filepath.Glob(filepath.Join(cacheDir, "manifests", "*"))
	for _, name := range []string{segments[0], manifests[0]} {
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		for i := range 128 { // more than the padding between records
			b[len(b)/2+i] ^= 1
		}
		if err := os.WriteFile(name, b, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if r := check(false); r.Damage < 2 || len(r.Findings) < 2 {
		t.Errorf("%+v", r)
	}
	if r := check(true); r.Damage < 2 {
		t.Errorf("%+v", r)
	}
	if r := check(false); r.Damage != 0 || r.Records < len(paths)-2 {
		t.Errorf("after the repair: %+v", r)
	}
	e = openEngine(t, dir, cacheDir, "none")
	defer closeEngine(t, e)
	for _, p := range paths {
		read(t, e, dir, p)
	}
	if s := e.Stats(); s.Misses > 2 {
		t.Errorf("%d files were lost", s.Misses)
	}
}
