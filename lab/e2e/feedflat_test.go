package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"testing"
	"time"

	"github.com/shoalfs/shoal/lab/rig/proxy"
	"github.com/shoalfs/shoal/loader/feedclient"
	"github.com/shoalfs/shoal/loader/feedpb"
)

// Twenty epochs, and as many sessions as epochs, leave a server as it was after the first: no descriptor,
// no goroutine, no reservation more. How its memory goes on is logged; it depends on the collector.
func TestFeedStaysFlat(t *testing.T) {
	const epochs = 20
	dir, paths := pictures(t, 8, 24)
	_, env := far(t, proxy.Options{})
	addr, mnt := serve(t, env, bucket(t, dir))
	pid := readStats(t, mnt).PID
	type look struct {
		RSS, Used, Held   int64
		Goroutines, Files int
	}
	now := func() look {
		var s struct {
			stats
			Feed struct {
				Held int64 `json:"held_bytes"`
				Open int   `json:"open_sessions"`
			}
		}
		if err := json.Unmarshal([]byte(mustShoal(t, nil, "stat", addr, "--json")), &s); err != nil {
			t.Fatal(err)
		}
		files, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
		if err != nil {
			t.Fatal(err)
		}
		return look{s.Memory.RSS, s.Memory.Used, s.Feed.Held, s.Memory.Goroutines, len(files)}
	}
	client, err := feedclient.Dial(addr, feedclient.Security{})
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	open := func(epochs uint32) *feedclient.Stream {
		s, err := client.Open(t.Context(),
			&feedpb.Open{Batch: 32, Epochs: epochs,
				Transform: "RandomResizedCrop(96)|RandomHorizontalFlip()|uint8|nchw"})
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	read := func(s *feedclient.Stream, batches int) {
		for range batches {
			b, err := s.Next()
			if err != nil {
				t.Fatal(err)
			}
			b.Release()
		}
	}
	perEpoch := len(paths) / 32

	long := open(epochs)
	var first, last look
	for epoch := range epochs {
		read(long, perEpoch)
		one := open(1)
		read(one, perEpoch)
		if _, err := one.Next(); !errors.Is(err, io.EOF) {
			t.Fatalf("after the epoch: %v", err)
		}
		one.Close()
		last = now()
		if epoch == 0 {
			first = last
		}
	}
	if _, err := long.Next(); !errors.Is(err, io.EOF) {
		t.Errorf("after the last epoch: %v", err)
	}
	long.Close()
	t.Logf("after 1 epoch %+v, after %d %+v: %.2f MiB an epoch",
		first, epochs, last, float64(last.RSS-first.RSS)/(epochs-1)/(1<<20))

	// What one epoch needs at its busiest is what twenty need. The store's connections come and go.
	within(t, 2*time.Minute, "the server holds no more than after the first epoch, and nothing of any batch",
		func() bool {
			last = now()
			return last.Files <= first.Files && last.Goroutines <= first.Goroutines && last.Held == 0 && last.Used == 0
		})
	if grown := last.RSS - first.RSS; grown > 100<<20 {
		t.Errorf("%d MiB more after %d epochs", grown>>20, epochs)
	}
}
