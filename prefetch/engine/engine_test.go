package engine

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/shoalfs/shoal/cache"
	"github.com/shoalfs/shoal/cache/cachedir"
	"github.com/shoalfs/shoal/prefetch/order"
)

// searcher has this binary search, as the daemon's does.
var searcher = []string{"/proc/self/exe", "search-seeds"}

func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == searcher[1] {
		leastShare = 1
		if err := ServeSearch(os.Stdin, os.Stdout); err != nil {
			panic(err)
		}
		return
	}
	goleak.VerifyTestMain(m)
}

// folder makes files of 1 to 9 KiB, classes of perClass.
func folder(t testing.TB, classes, perClass int) (dir string, paths []string) {
	t.Helper()
	dir = t.TempDir()
	for c := range classes {
		for i := range perClass {
			p := fmt.Sprintf("c%02d/f%03d.jpg", c, i)
			data := bytes.Repeat([]byte(p), 1+(c*7+i*13)%900)
			if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, p)), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(dir, p), data, 0o644); err != nil {
				t.Fatal(err)
			}
			paths = append(paths, p)
		}
	}
	return dir, paths
}

func openEngine(t testing.TB, dir, cacheDir, spec string) *Engine {
	t.Helper()
	s, err := order.Parse(spec)
	if err != nil {
		t.Fatal(err)
	}
	return open(t, HostConfig{Options: cachedir.Options{Path: cacheDir, Size: 256 << 20, Memory: 256 << 20}},
		Config{Source: "file://" + dir, Order: s})
}

// open opens a dataset on a host of its own.
func open(t testing.TB, host HostConfig, cfg Config) *Engine {
	t.Helper()
	host.Logger, host.Searcher = slog.New(slog.NewTextHandler(io.Discard, nil)), searcher
	h, err := OpenHost(host)
	if err != nil {
		t.Fatal(err)
	}
	return openOn(t, h, cfg)
}

func openOn(t testing.TB, h *Host, cfg Config) *Engine {
	t.Helper()
	cfg.Samples, cfg.Connections = cmp.Or(cfg.Samples, "images"), 32
	e, err := h.Open(context.Background(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

func closeEngine(t testing.TB, e *Engine) {
	t.Helper()
	if err := errors.Join(e.Close(), e.host.Close()); err != nil {
		t.Error(err)
	}
}

// read plays a reader of the mount.
func read(t testing.TB, e *Engine, dir, path string) {
	t.Helper()
	m := e.Manifest()
	node, ok := m.Find(path)
	if !ok {
		t.Fatalf("no %s", path)
	}
	want, err := os.ReadFile(filepath.Join(dir, path))
	if err != nil {
		t.Fatal(err)
	}
	e.Opened(m, node.Index, 0)
	p := make([]byte, len(want)+1)
	n, err := e.ReadAt(context.Background(), m, node.Index, p, 0)
	if err != nil || !bytes.Equal(p[:n], want) {
		t.Fatalf("%s: %d bytes, want %d, %v", path, n, len(want), err)
	}
	e.Released(m, node.Index)
}

func waitFor(t testing.TB, what string, f func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !f(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
	}
}

func TestOrderFetchesBeforeTheReader(t *testing.T) {
	dir, paths := folder(t, 4, 50)
	e := openEngine(t, dir, t.TempDir(), "torch:seed=5")
	defer closeEngine(t, e)
	waitFor(t, "the whole epoch is staged", func() bool { return e.Stats().Lead == len(paths) })
	spec, _ := order.Parse("torch:seed=5")
	for epoch := range 3 {
		o, err := spec.Order(len(paths), epoch)
		if err != nil {
			t.Fatal(err)
		}
		for pos := range o.Len() {
			read(t, e, dir, paths[o.At(pos)])
			runtime.Gosched() // no reader takes a whole epoch while the next order is worked out
		}
		if s := e.Stats(); s.Order.Epoch != epoch || s.Order.State != "finished" || s.Misses+s.Joined != 0 {
			t.Errorf("epoch %d: %+v, %d misses, %d joined", epoch, s.Order, s.Misses, s.Joined)
		}
	}
	if s := e.Stats(); s.GetRequests-s.Hedges.Sent != int64(len(paths)) {
		t.Errorf("%d GETs for %d files", s.GetRequests, len(paths))
	}
}

func TestPlans(t *testing.T) {
	dir, paths := folder(t, 2, 10)
	e := openEngine(t, dir, t.TempDir(), "auto")
	defer closeEngine(t, e)
	if text := string(e.orders.text()); !strings.HasPrefix(text, "order: none") {
		t.Errorf("before any plan: %s", text)
	}
	none := openEngine(t, dir, t.TempDir(), "none")
	defer closeEngine(t, none)
	if text := string(none.orders.text()); !strings.Contains(text, "auto") || strings.Contains(text, ".shoal/plan") {
		t.Errorf("where plans are refused: %s", text)
	}
	plan := strings.Join(paths, "\n") + "\n"
	if err := e.PutPlan("default", []byte(plan)); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "the plan is staged", func() bool { return e.Stats().Lead == len(paths) })
	for _, bad := range []string{"", "c00/none.jpg\n", "c00\n", plan + "/etc/passwd\n"} {
		if err := e.PutPlan("default", []byte(bad)); err == nil {
			t.Errorf("plan %q was taken", bad)
		}
	}
	if text := string(e.orders.text()); !strings.Contains(text, "line 21") || !strings.Contains(text, "/etc/passwd") {
		t.Errorf("the refusal does not name the line:\n%s", text)
	}
	got, err := e.Get("plans/default")
	if err != nil || string(got) != plan {
		t.Errorf("after refusals the plan is %d bytes, %v", len(got), err)
	}
	// A second stream for another rank.
	if err := e.PutPlan("rank1", []byte("./"+paths[3]+"\n"+paths[3]+"\n")); err != nil {
		t.Fatal(err)
	}
	if names := e.Plans(); len(names) != 2 {
		t.Errorf("plans %v", names)
	}
	// Whatever the name, a plan has one line.
	if err := e.PutPlan("x)\norder: y\xff", []byte(paths[0]+"\n")); err != nil {
		t.Fatal(err)
	}
	if text := string(e.orders.text()); !strings.Contains(text, `.shoal/plans/x)\norder: y\xff)`) {
		t.Errorf("a name with a line break:\n%s", text)
	}
	if _, err := e.Get("plans/none"); !os.IsNotExist(err) {
		t.Errorf("a plan that nobody wrote: %v", err)
	}
}

func TestRefreshKeepsPlansAndOldReaders(t *testing.T) {
	dir, paths := folder(t, 2, 10)
	e := openEngine(t, dir, t.TempDir(), "auto")
	defer closeEngine(t, e)
	if err := e.PutPlan("default", []byte(strings.Repeat(paths[0]+"\n", 50_000))); err != nil {
		t.Fatal(err)
	}
	ledger := e.cache.Ledger() // has no room for the plan twice
	rest := ledger.Limit() - ledger.Used() - 700<<10
	if !ledger.TryReserve(rest, cache.ForDemand) {
		t.Fatal("no memory")
	}
	defer ledger.Release(rest, cache.ForDemand)
	old := e.Manifest()
	if changed, err := e.Refresh(context.Background()); changed || err != nil {
		t.Fatalf("nothing changed: %v, %v", changed, err)
	}
	if err := os.WriteFile(filepath.Join(dir, "c00/new.jpg"), []byte("new"), 0o644); err != nil {
		t.Fatal(err)
	}
	if changed, err := e.Refresh(context.Background()); !changed || err != nil {
		t.Fatalf("a new file: %v, %v", changed, err)
	}
	read(t, e, dir, "c00/new.jpg")
	node, _ := old.Find(paths[5])
	if n, err := e.ReadAt(context.Background(), old, node.Index, make([]byte, 10), 0); n != 10 || err != nil {
		t.Errorf("a file that was open before: %d, %v", n, err)
	}
	if names := e.Plans(); len(names) != 1 || len(e.orders.mounted()) != 1 {
		t.Errorf("plans %v, %d streams, %s", names, len(e.orders.mounted()), e.orders.text())
	}
}

// A version is freed once nobody uses it, and not before. What was read last may name one or two a little longer.
func TestVersionsEnd(t *testing.T) {
	for _, spec := range []string{"auto", "torch:seed=5", "none"} {
		dir, paths := folder(t, 2, 10)
		e := openEngine(t, dir, t.TempDir(), spec)
		defer closeEngine(t, e)
		memory := e.cache.Ledger().Limit
		alone, held := memory(), e.Manifest()
		for i := range 20 {
			if err := e.PutPlan("job", []byte(strings.Join(paths, "\n")+"\n")); (err != nil) != (spec == "none") {
				t.Fatal(err)
			}
			for _, p := range paths {
				read(t, e, dir, p)
			}
			if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("c00/new%d.jpg", i)), []byte("new"),
				0o644); err != nil {
				t.Fatal(err)
			}
			if changed, err := e.Refresh(context.Background()); !changed || err != nil {
				t.Fatalf("a new file: %v, %v", changed, err)
			}
		}
		each := (alone - memory()) / 20
		waitFor(t, "the versions are freed", func() bool {
			runtime.GC()
			e.sweep()
			return alone-memory() <= 5*each
		})
		if n, err := e.ReadAt(context.Background(), held, 5, make([]byte, 10), 0); n != 10 || err != nil {
			t.Errorf("of the version that is used: %d, %v", n, err)
		}
		if got := held.Path(5); got != paths[5] {
			t.Errorf("its file 5 is %s", got)
		}
		read(t, e, dir, "c00/new19.jpg")
	}
}

// If the order cannot go on in the new version, no stream follows the old one by the numbers of the new one's files.
func TestRefreshEndsTheOrder(t *testing.T) {
	dir, paths := folder(t, 1, 10)
	e := openEngine(t, dir, t.TempDir(), "sequential")
	defer closeEngine(t, e)
	for _, p := range paths {
		if err := os.Rename(filepath.Join(dir, p), filepath.Join(dir, p+".txt")); err != nil {
			t.Fatal(err)
		}
	}
	var told bool
	e.untold = func(served bool) { told = served }
	if changed, err := e.Refresh(context.Background()); !changed || err == nil {
		t.Errorf("%v, %v: there is no sample", changed, err)
	}
	if !told {
		t.Error("the cluster does not learn of the version that this node serves")
	}
	if n := len(e.orders.mounted()); n != 0 {
		t.Errorf("%d streams of the old version", n)
	}
}

// TestRefreshBesideOthers: of two refreshes at a time one finds what has changed, and a plan that is written
// meanwhile is one of the version in force.
func TestRefreshBesideOthers(t *testing.T) {
	dir, paths := folder(t, 2, 10)
	e := openEngine(t, dir, t.TempDir(), "auto")
	defer closeEngine(t, e)
	for i := range 30 {
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("c00/new%d.jpg", i)), []byte("new"), 0o644); err != nil {
			t.Fatal(err)
		}
		var all sync.WaitGroup
		var changes atomic.Int64
		for range 2 {
			all.Go(func() {
				changed, err := e.Refresh(context.Background())
				if err != nil {
					t.Error(err)
				}
				if changed {
					changes.Add(1)
				}
			})
		}
		all.Go(func() {
			for k := range 5 {
				if err := e.PutPlan("default", []byte(paths[(i+k)%len(paths)])); err != nil {
					t.Error(err)
				}
			}
		})
		all.Wait()
		if n := changes.Load(); n != 1 {
			t.Errorf("%d refreshes found one change", n)
		}
		if s := e.orders.mounted(); len(s) != 1 || s[0].Volume != e.cur.Load().volume {
			t.Errorf("%d streams, or one of a version that is gone", len(s))
		}
		if plan, err := e.Get("plans/default"); err != nil || string(plan) != paths[(i+4)%len(paths)] {
			t.Errorf("the plan in force is %s, %v, and not the last one", plan, err)
		}
		if e.orders.inference.Load() != nil {
			t.Error("an order is searched although a plan is in force")
		}
	}
}

func TestReopenListsAndFetchesNothing(t *testing.T) {
	dir, paths := folder(t, 2, 10)
	cache := t.TempDir()
	for i := range 2 {
		e := openEngine(t, dir, cache, "sequential")
		for _, p := range paths {
			read(t, e, dir, p)
		}
		if s := e.Stats(); i == 1 && (s.GetRequests != 0 || s.ListRequests != 0 || s.Hits.Keep != int64(len(paths))) {
			t.Errorf("second open: %+v", s)
		}
		closeEngine(t, e)
	}
}

func TestFeedStream(t *testing.T) {
	dir, paths := folder(t, 2, 20)
	e := openEngine(t, dir, t.TempDir(), "auto")
	defer closeEngine(t, e)
	d := e.Dataset()
	seq := order.Uniform(d.Len(), 1, 0)
	s, err := d.Begin("session", seq, 10, 0)
	if err != nil {
		t.Fatal(err)
	}
	for pos := 10; pos < seq.Len(); pos++ {
		data, release, err := s.Read(context.Background(), pos)
		want, _ := os.ReadFile(filepath.Join(dir, paths[seq.At(pos)]))
		if err != nil || !bytes.Equal(data, want) || d.Path(seq.At(pos)) != paths[seq.At(pos)] {
			t.Fatalf("position %d: %d bytes, %v", pos, len(data), err)
		}
		release()
	}
	d.End(s)
	if n := e.Stats().GetRequests; n != int64(len(paths)-10) {
		t.Errorf("%d GETs for %d samples", n, len(paths)-10)
	}
}

func TestStatsSchema(t *testing.T) {
	dir, _ := folder(t, 1, 2)
	e := openEngine(t, dir, t.TempDir(), "none")
	defer closeEngine(t, e)
	b, err := json.Marshal(e.Stats())
	if err != nil {
		t.Fatal(err)
	}
	var got map[string]any
	if err := json.Unmarshal(b, &got); err != nil {
		t.Fatal(err)
	}
	for _, field := range []string{"version", "opens", "reads", "get_requests", "get_bytes", "hits", "stall_seconds",
		"lead_samples", "order", "errors"} {
		if _, ok := got[field]; !ok {
			t.Errorf("no field %q", field)
		}
	}
	if err := e.PutPlan("default", []byte("c00/f000.jpg\n")); err == nil {
		t.Error("--order none took a plan")
	}
}
