package e2e

import (
	"encoding/json"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/shoalfs/shoal/lab/rig/proxy"
)

// Four feeds of one order on one daemon, that can neither keep nor stage the dataset, over a line that limits
// them. They do not begin at the same moment: what was read before the last one has begun is fetched for it
// again, and until then the line is a slow one. But for that, all of them together fetch what one would, and not four
// times as much. Their batches go in chunks: slots of four feeds would take as much memory as there is for what is
// shared.
func TestFeedsShareFetches(t *testing.T) {
	long(t)
	dir, paths := tree(t, 4, 80, 256<<10) // 80 MiB, where less than 50 may be staged
	line := proxy.Options{Latency: 10 * time.Millisecond, Bandwidth: 1 << 20}
	p, env := far(t, line)
	addr := "unix://" + filepath.Join(t.TempDir(), "run", "feed.sock")
	mnt := t.TempDir()
	mustShoal(t, env, "serve", bucket(t, dir), "--listen", addr, "--mount", mnt, "--cache-dir", t.TempDir(), "--daemon",
		"--memory", "144MiB", "--cache-size", "9MiB", "--connections", "16")
	t.Cleanup(func() { umount(t, mnt) })

	results := make([]feedResult, 4)
	var wg sync.WaitGroup
	for i := range results {
		wg.Go(func() {
			results[i] = feed(t, addr, "--order", "uniform:seed=7", "--batch", "8", "--session", string(rune('a'+i)),
				"--weight", "2", "--transport", "chunks")
		})
	}
	within(t, patience, "all feeds are open", func() bool {
		var s struct {
			Feed struct {
				Open int `json:"open_sessions"`
			}
		}
		decode(t, mustShoal(t, nil, "stat", addr, "--json"), &s)
		return s.Feed.Open == len(results)
	})
	line.Bandwidth = 12 << 20
	if err := p.Set(line); err != nil {
		t.Fatal(err)
	}
	wg.Wait()
	want := digest(t, dir, paths, orderOf(t, "uniform:seed=7", len(paths)))
	for i, r := range results {
		if r.Digest != want || r.Samples != len(paths) {
			t.Errorf("feed %d: %d samples, digest %s", i, r.Samples, r.Digest)
		}
	}
	var s struct {
		Bytes    int64
		GetBytes int64 `json:"get_bytes"`
	}
	if err := json.Unmarshal([]byte(mustShoal(t, nil, "stat", "--json", mnt)), &s); err != nil {
		t.Fatal(err)
	}
	t.Logf("%d bytes fetched for a dataset of %d", s.GetBytes, s.Bytes)
	if s.GetBytes < s.Bytes/2 || s.GetBytes > s.Bytes*2 {
		t.Errorf("4 feeds fetched %.2f times the dataset's %d bytes", float64(s.GetBytes)/float64(s.Bytes), s.Bytes)
	}
}
