package engine

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/shoalfs/shoal/prefetch/order"
)

// openAs plays a trainer's open and read of a sample.
func openAs(t testing.TB, e *Engine, process uint32, sample int) {
	t.Helper()
	v := e.cur.Load()
	m, file := v.manifest, v.samples.File(sample)
	e.Opened(m, file, process)
	p := make([]byte, m.Size(file))
	if _, err := e.ReadAt(context.Background(), m, file, p, 0); err != nil {
		t.Fatal(err)
	}
	e.Released(m, file)
}

// A reader that tells nothing is followed, until a plan tells something else or the dataset is closed.
func TestInference(t *testing.T) {
	const n = 600
	dir := t.TempDir()
	for i := range n {
		writeFile(t, filepath.Join(dir, fmt.Sprintf("c%d/img%d.jpg", i%3, i)), fmt.Append(nil, i))
	}
	before := runtime.NumGoroutine()
	e := openEngine(t, dir, t.TempDir(), "auto")
	if text := string(e.orders.text()); !strings.HasPrefix(text, "order: none yet") ||
		!strings.Contains(text, "shoal.hint(loader)") {
		t.Error(text)
	}
	reads := order.Torch(n, 77, 0, 1, 0, 0, false)
	for pos := range 64 {
		openAs(t, e, 9, reads.At(pos))
	}
	eventually(t, "an order", func() bool { return e.Stats().Order.State == "inferred" })
	s := e.Stats()
	if s.Order.Spec != "torch:seed=77" || s.Order.Position != 64 || s.Order.Epoch != 0 {
		t.Errorf("%+v", s.Order)
	}
	eventually(t, "all prefetched", func() bool { return e.Stats().Lead == n-64 })
	misses := e.Stats().Misses
	for pos := 64; pos < n; pos++ {
		openAs(t, e, 9, reads.At(pos))
	}
	if s = e.Stats(); s.Misses != misses || s.Order.Position != n {
		t.Errorf("%d misses, before %d, %+v", s.Misses, misses, s.Order)
	}
	reads = order.Torch(n, 77, 1, 1, 0, 0, false)
	for pos := range 40 {
		openAs(t, e, 10, reads.At(pos))
	}
	eventually(t, "the next epoch", func() bool { return e.Stats().Order.Epoch == 1 })
	if streams := e.orders.mounted(); len(streams) != 1 {
		t.Errorf("%d streams", len(streams))
	}

	// Somebody else's shuffle, whose seed is far in the search of all: it is not found before the test looks.
	reads = order.Torch(n, 4_000_000_001, 0, 1, 0, 0, false)
	for pos := 0; pos < n && e.Stats().Order.State != "searching"; pos++ {
		openAs(t, e, 11, reads.At(pos))
	}
	eventually(t, "letting go", func() bool { return e.Stats().Order.State == "searching" })
	if streams := e.orders.mounted(); len(streams) != 0 {
		t.Errorf("%d streams", len(streams))
	}

	if err := e.PutPlan("default", []byte("c0/img0.jpg\n")); err != nil {
		t.Fatal(err)
	}
	if text := string(e.orders.text()); e.orders.inference.Load() != nil || !strings.HasPrefix(text, "order: plan") {
		t.Error(text)
	}
	closeEngine(t, e)
	eventually(t, "all goroutines ended", func() bool { return runtime.NumGoroutine() <= before })
}

// What is being searched does not keep a dataset from closing.
func TestInferenceCloses(t *testing.T) {
	const n = 400
	dir := t.TempDir()
	for i := range n {
		writeFile(t, filepath.Join(dir, fmt.Sprintf("c/%d.jpg", i)), fmt.Append(nil, i))
	}
	before := runtime.NumGoroutine()
	e := openEngine(t, dir, t.TempDir(), "auto")
	reads := order.Torch(n, 4_000_000_001, 0, 1, 0, 0, false)
	for pos := range 200 {
		openAs(t, e, 9, reads.At(pos))
	}
	eventually(t, "a search", func() bool { return strings.Contains(string(e.orders.text()), "searching") })
	closeEngine(t, e)
	eventually(t, "all goroutines ended", func() bool { return runtime.NumGoroutine() <= before })
}

// What was found is known at once in another life, whatever it took to find it.
func TestInferenceRemembers(t *testing.T) {
	const n, seed = 600, 1017 // no usual seed
	dir, cacheDir := t.TempDir(), t.TempDir()
	for i := range n {
		writeFile(t, filepath.Join(dir, fmt.Sprintf("c%d/img%d.jpg", i%3, i)), fmt.Append(nil, i))
	}
	reads := order.Torch(n, seed, 0, 1, 0, 0, false)
	for life, opens := range []int{80, 60} { // of which a first search may see 12, and another 24
		e := openEngine(t, dir, cacheDir, "auto")
		for pos := range opens {
			openAs(t, e, 9, reads.At(pos))
		}
		eventually(t, "an order", func() bool { return e.Stats().Order.State == "inferred" })
		want := "small seeds"
		if life > 0 {
			want = "usual seeds"
		}
		if text := string(e.orders.text()); !strings.Contains(text, "torch:seed=1017") ||
			!strings.Contains(text, want) {
			t.Errorf("life %d: %s", life, text)
		}
		closeEngine(t, e)
	}
}

func writeFile(t testing.TB, path string, data []byte) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, data, 0o644); err != nil {
		t.Fatal(err)
	}
}

// eventually is waitFor for what is computed, on a machine that may have little time for it.
func eventually(t testing.TB, what string, f func() bool) {
	t.Helper()
	for deadline := time.Now().Add(5 * time.Minute); !f(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
	}
}

// An open that began before a refresh, and goes on after it, says nothing to who watches the new version, which has
// fewer files.
func TestOpenWhileRefreshed(t *testing.T) {
	dir, paths := folder(t, 2, 20)
	e := openEngine(t, dir, t.TempDir(), "auto")
	defer closeEngine(t, e)
	before := e.cur.Load()
	for _, p := range paths[1:] {
		if err := os.Remove(filepath.Join(dir, p)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := e.Refresh(context.Background()); err != nil {
		t.Fatal(err)
	}
	after := e.cur.Swap(before)
	e.Opened(before.manifest, len(paths)-1, 1)
	e.cur.Store(after)
	e.Released(before.manifest, len(paths)-1)
}
