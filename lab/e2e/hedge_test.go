package e2e

import (
	"encoding/json"
	"path"
	"testing"
	"time"

	"github.com/shoalfs/shoal/lab/rig/proxy"
)

type hedgeStats struct {
	Gets   int64 `json:"get_requests"`
	Hedges struct{ Sent, Won int64 }
}

// TestHedges: readers who wait for the store get past GETs that are held up for half a minute, at no more
// than 2% second GETs; a store that is slow as a whole gets fewer than the budget of these and the reads
// before would allow, 12.
func TestHedges(t *testing.T) {
	const latency, stall = 5 * time.Millisecond, 30 * time.Second
	dir, paths := tree(t, 4, 400, 4<<10)
	p, env := far(t, proxy.Options{Latency: latency})
	source := bucket(t, dir)
	mnt := mount(t, env, source, "--order", "none", "--kernel-cache", "off")
	stats := func() (s hedgeStats) {
		t.Helper()
		if err := json.Unmarshal([]byte(mustShoal(t, nil, "stat", mnt, "--json")), &s); err != nil {
			t.Fatal(err)
		}
		return s
	}

	readAll(t, mnt, dir, paths[:600]) // what is usual here
	var faults []proxy.Fault
	for i := 700; i < 1200; i += 150 { // the first GET, and not the second
		faults = append(faults, proxy.Fault{Kind: proxy.Slow, For: stall, Key: path.Base(paths[i]), Count: 1})
	}
	if err := p.Set(proxy.Options{Latency: latency, Faults: faults}); err != nil {
		t.Fatal(err)
	}
	before := p.Stats()
	start := time.Now()
	readAll(t, mnt, dir, paths[600:1200])
	took, s := time.Since(start), stats()
	if p.Stats().Sub(before).Faults["slow"] == 0 {
		t.Fatal("nothing was held up")
	}
	if s.Hedges.Won == 0 || s.Hedges.Sent*50 > s.Gets {
		t.Errorf("%+v", s)
	}
	if took > stall {
		t.Errorf("600 reads took %s", took)
	}
	t.Logf("600 reads took %s: %+v", took.Round(time.Millisecond), s)

	if err := p.Set(proxy.Options{Latency: 100 * latency}); err != nil {
		t.Fatal(err)
	}
	readAll(t, mnt, dir, paths[1200:1400])
	slow := stats()
	if sent := slow.Hedges.Sent - s.Hedges.Sent; sent > 8 || slow.Hedges.Sent*50 > slow.Gets {
		t.Errorf("%d second GETs for 200 reads of a store that is slow as a whole", sent)
	}
	t.Logf("200 slow reads: %+v", slow)
}
