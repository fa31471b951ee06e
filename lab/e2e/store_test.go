package e2e

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/shoalfs/shoal/lab/rig/proxy"
)

// A store that stumbles: with 8 readers, with and without read-ahead, every byte is right and no
// reader sees an error.
func TestStoreStumbles(t *testing.T) {
	long(t)
	dir, paths := tree(t, 4, 60, 64<<10)
	p, env := far(t, proxy.Options{Latency: 2 * time.Millisecond})
	source := bucket(t, dir)
	for _, c := range []struct {
		name   string
		faults []proxy.Fault
	}{
		{"503 bursts", []proxy.Fault{{Kind: proxy.Unavailable, P: 0.3, Count: 150}}},
		{"503 at once", []proxy.Fault{{Kind: proxy.Unavailable, Count: 20}}},
		{"resets", []proxy.Fault{{Kind: proxy.Reset, P: 0.2, At: 0.5}}},
		{"resets before the first byte", []proxy.Fault{{Kind: proxy.Reset, P: 0.2}}},
		{"truncation", []proxy.Fault{{Kind: proxy.Truncate, P: 0.2, At: 0.7}}},
		{"stalls", []proxy.Fault{{Kind: proxy.Stall, P: 0.05, At: 0.5, For: 2 * time.Second}}},
		{"slow first byte", []proxy.Fault{{Kind: proxy.Slow, P: 0.05, For: 2 * time.Second}}},
		{"all of it", []proxy.Fault{
			{Kind: proxy.Unavailable, P: 0.1}, {Kind: proxy.Reset, P: 0.1, At: 0.3},
			{Kind: proxy.Truncate, P: 0.1, At: 0.9},
			{Kind: proxy.Slow, P: 0.02, For: time.Second},
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, order := range []string{"none", "torch:seed=5"} {
				// The faults stand before the mount: read-ahead may fetch the whole tree before a reader comes.
				before := p.Stats()
				if err := p.Set(proxy.Options{Latency: 2 * time.Millisecond, Faults: c.faults, Seed: 3}); err != nil {
					t.Fatal(err)
				}
				mnt := mount(t, env, source, "--order", order, "--kernel-cache", "off")
				start := time.Now()
				readAll(t, mnt, dir, torchOrder(t, "torch:seed=5", paths))
				took := time.Since(start)
				d := p.Stats().Sub(before)
				if len(d.Faults) == 0 {
					t.Errorf("--order %s: nothing was injected", order)
				}
				t.Logf("--order %s: %s, %d GETs, injected %v", order, took.Round(time.Millisecond), d.Gets, d.Faults)
				if took > 60*time.Second {
					t.Errorf("--order %s: one epoch took %s", order, took)
				}
				umount(t, mnt)
			}
		})
	}
}

// A store that is gone, or whose object changed, is a clear error within a bounded time, and a store
// that comes back is read again.
func TestStoreFails(t *testing.T) {
	dir, paths := tree(t, 2, 10, 16<<10)
	p, env := far(t, proxy.Options{})
	source := bucket(t, dir)
	mnt := mount(t, env, source, "--order", "none", "--kernel-cache", "off")
	read := func(i int) error {
		got, err := os.ReadFile(filepath.Join(mnt, paths[i]))
		if err != nil {
			return err
		}
		if want, _ := os.ReadFile(filepath.Join(dir, paths[i])); !bytes.Equal(got, want) {
			t.Errorf("%s: wrong bytes", paths[i])
		}
		return nil
	}
	set := func(f ...proxy.Fault) {
		t.Helper()
		if err := p.Set(proxy.Options{Faults: f}); err != nil {
			t.Fatal(err)
		}
	}
	set(proxy.Fault{Kind: proxy.ETag})
	if err := read(0); !errors.Is(err, syscall.ESTALE) {
		t.Errorf("a changed ETag: %v, want ESTALE", err)
	}
	// All at once: each is told of only when the retries are used up.
	forever := []proxy.Fault{
		{Kind: proxy.Unavailable, Key: "*img0001.jpg"}, {Kind: proxy.Reset, Key: "*img0002.jpg"},
		{Kind: proxy.Truncate, Key: "*img0003.jpg", At: 0.5},
	}
	set(forever...)
	var wg sync.WaitGroup
	for i, f := range forever {
		wg.Go(func() {
			start := time.Now()
			err := read(i + 1)
			if took := time.Since(start); !errors.Is(err, syscall.EIO) || took > 75*time.Second {
				t.Errorf("%s for ever: %v after %s", f.Kind, err, took)
			}
		})
	}
	wg.Wait()
	var text []string
	for _, e := range readStats(t, mnt).Errors {
		text = append(text, e.Text)
	}
	for i := range forever {
		if !strings.Contains(strings.Join(text, "\n"), paths[i+1]) {
			t.Errorf("the stats do not name %s: %q", paths[i+1], text)
		}
	}
	set()
	for i := range forever { // each failure is told again for a moment
		within(t, patience, "the store is read again", func() bool { return read(i+1) == nil })
	}
	readAll(t, mnt, dir, paths[1:])
}
