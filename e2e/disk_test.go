package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/shoalfs/shoal/rig/faultdisk"
	"github.com/shoalfs/shoal/rig/proxy"
)

// hangTime is how long the disk hangs: SHOAL_HANG=30s is what issue B asks for, and what nightly runs
// give; the limits of the daemon are well below the shorter one.
func hangTime(t testing.TB) time.Duration {
	text := os.Getenv("SHOAL_HANG")
	if text == "" {
		return 8 * time.Second
	}
	d, err := time.ParseDuration(text)
	if err != nil {
		t.Fatalf("SHOAL_HANG: %v", err)
	}
	return d
}

// The disk of the cache fails, fills up or hangs while 8 readers read. Nobody sees an error or a wrong
// byte, nobody waits longer than a few seconds, the stats say that the disk is out of use, and when
// it is well again it is taken back.
func TestDiskTrouble(t *testing.T) {
	const patience = 5 * time.Second // "no stall beyond a few seconds"
	for _, c := range []struct {
		name     string
		settings faultdisk.Settings
		hangs    bool
		reads    bool // strikes what is read: the readers begin with all on disk
	}{
		{"ENOSPC", faultdisk.Settings{Rules: []faultdisk.Rule{{Op: faultdisk.Write, Path: "cache/segments", Errno: "ENOSPC"}}}, false, false},
		{"EIO on writes", faultdisk.Settings{Rules: []faultdisk.Rule{{Op: faultdisk.Write, Path: "cache/segments", Errno: "EIO"}}}, false, false},
		{"EIO on fsync", faultdisk.Settings{Rules: []faultdisk.Rule{{Op: faultdisk.Sync, Path: "cache/segments", Errno: "EIO"}, {Op: faultdisk.Write, Path: "cache/segments", Errno: "EIO"}}}, false, false},
		{"EIO on reads", faultdisk.Settings{Rules: []faultdisk.Rule{{Op: faultdisk.Read, Path: "cache/segments", Errno: "EIO"}}}, false, true},
		{"hangs on writes", faultdisk.Settings{Rules: []faultdisk.Rule{{Path: "cache/segments", Hang: true}}}, true, false},
		{"hangs on reads", faultdisk.Settings{Rules: []faultdisk.Rule{{Path: "cache/segments", Hang: true}}}, true, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel() // each waits for its own disk most of the time
			dir, paths := tree(t, 4, 60, 64<<10)
			_, env := far(t, proxy.Options{Latency: 2 * time.Millisecond})
			source := bucket(t, dir)
			disk := badDisk(t)
			cache := filepath.Join(disk.Dir, "cache")
			mnt := mount(t, env, source, "--cache-dir", cache, "--order", "none", "--kernel-cache", "off", "--memory", "160MiB")
			// Before the disk is let go: a daemon that waits for it cannot end.
			t.Cleanup(func() { _ = disk.Set(t.Context(), faultdisk.Settings{}) })
			pid := readStats(t, mnt).PID
			// What is read while the disk is away may stay in memory; the last files are for after it.
			later := paths[200:]
			known := paths[:200]
			first := known[:60]
			if c.reads {
				first = known
			}
			readAll(t, mnt, dir, first)
			waitKept(t, mnt, len(first))

			if err := disk.Set(t.Context(), c.settings); err != nil {
				t.Fatal(err)
			}
			dropCaches(t) // what was written lies in the page cache, which no fault reaches
			r := startReading(t, 8, mnt, dir, known)
			within(t, patience+10*time.Second, "the stats say that the disk is out of use", func() bool { return readStats(t, mnt).Disk.OutOfUse })
			if c.hangs {
				time.Sleep(hangTime(t))
			} else {
				time.Sleep(2 * time.Second)
			}
			s := readStats(t, mnt)
			if !s.Disk.OutOfUse || len(s.Errors) == 0 {
				t.Errorf("the stats: %+v, %+v", s.Disk, s.Errors)
			}
			d, err := disk.Stats(t.Context())
			if err != nil || d.Failed+d.Hung == 0 {
				t.Errorf("nothing was injected: %+v, %v", d, err)
			}
			if c.hangs && d.Hanging == 0 {
				t.Errorf("nothing hangs: %+v", d)
			}
			if err := disk.Set(t.Context(), faultdisk.Settings{}); err != nil {
				t.Fatal(err)
			}
			within(t, 90*time.Second, "the disk is taken back", func() bool { return !readStats(t, mnt).Disk.OutOfUse })
			files, longest := r.end()
			t.Logf("%d reads, the slowest %s; %v", files, longest.Round(time.Millisecond), s.Errors)
			if longest > patience {
				t.Errorf("a reader waited for %s", longest)
			}
			if files < len(known) {
				t.Errorf("only %d reads", files)
			}
			// It serves and keeps again.
			kept := readStats(t, mnt).Disk.Kept
			readAll(t, mnt, dir, paths)
			waitKept(t, mnt, kept+len(later))
			if now := readStats(t, mnt).PID; now != pid {
				t.Errorf("another daemon: %d, before %d", now, pid)
			}
			umount(t, mnt)
			log, err := os.ReadFile(filepath.Join(cache, "shoal.log"))
			if err != nil {
				t.Fatal(err)
			}
			for _, word := range []string{"panic", "SIGBUS", "still reserved"} {
				if strings.Contains(string(log), word) {
					t.Errorf("log:\n%.3000s", log)
				}
			}
			mustBeClean(t, cache)
		})
	}
}

// Other processes fill the disk under the cache, and empty it again.
func TestDiskFillsUp(t *testing.T) {
	dir, paths := tree(t, 4, 60, 64<<10)
	_, env := far(t, proxy.Options{})
	source := bucket(t, dir)
	disk := badDisk(t)
	cache := filepath.Join(disk.Dir, "cache")
	mnt := mount(t, env, source, "--cache-dir", cache, "--order", "none", "--kernel-cache", "off", "--memory", "160MiB")
	readAll(t, mnt, dir, paths[:20])
	waitKept(t, mnt, 20)
	d, err := disk.Stats(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	used := diskUsage(t, cache)
	if err := disk.Set(t.Context(), faultdisk.Settings{Capacity: used + 4<<20}); err != nil {
		t.Fatal(err)
	}
	known := paths[:200] // the others are for after it
	readAll(t, mnt, dir, known)
	within(t, 15*time.Second, "the stats say that the disk is out of use", func() bool { return readStats(t, mnt).Disk.OutOfUse })
	readAll(t, mnt, dir, known)
	if now, err := disk.Stats(t.Context()); err != nil || now.Failed == d.Failed {
		t.Errorf("no write failed: %+v, %v", now, err)
	}
	if err := disk.Set(t.Context(), faultdisk.Settings{}); err != nil {
		t.Fatal(err)
	}
	within(t, 90*time.Second, "the disk is taken back", func() bool { return !readStats(t, mnt).Disk.OutOfUse })
	kept := readStats(t, mnt).Disk.Kept
	readAll(t, mnt, dir, paths)
	waitKept(t, mnt, kept+40)
	umount(t, mnt)
	mustBeClean(t, cache)
}

// A cache of a hundredth of the dataset, in memory and on disk, with 64 readers: limits hold, nothing
// starves, every byte is right.
func TestHundredth(t *testing.T) {
	dir, paths := tree(t, 8, 250, 96<<10) // about 190 MiB
	_, env := far(t, proxy.Options{Latency: 2 * time.Millisecond})
	source := bucket(t, dir)
	for _, order := range []string{"torch:seed=1", "none"} {
		cache := t.TempDir()
		const cacheSize, memory = 2 << 20, 128 << 20
		mnt := mount(t, env, source, "--cache-dir", cache, "--cache-size", fmt.Sprint(cacheSize), "--memory", fmt.Sprint(memory), "--order", order, "--kernel-cache", "off")
		r := startReading(t, 64, mnt, dir, torchOrder(t, "torch:seed=1", paths))
		within(t, 60*time.Second, "one epoch", func() bool {
			r.mu.Lock()
			defer r.mu.Unlock()
			return r.files >= len(paths)
		})
		files, longest := r.end()
		s := readStats(t, mnt)
		t.Logf("--order %s: %d reads, the slowest %s, RSS %d MiB, kept %d", order, files, longest.Round(time.Millisecond), s.Memory.RSS>>20, s.Disk.Kept)
		if s.Memory.RSS > memory+100<<20 || s.Memory.Peak > s.Memory.Limit {
			t.Errorf("--order %s: RSS %d, ledger %d of %d", order, s.Memory.RSS, s.Memory.Peak, s.Memory.Limit)
		}
		if used := diskUsage(t, cache); used > cacheSize {
			t.Errorf("--order %s: %d bytes in the cache directory with --cache-size %d", order, used, cacheSize)
		}
		if longest > 10*time.Second {
			t.Errorf("--order %s: a reader starved for %s", order, longest)
		}
		umount(t, mnt)
		mustBeClean(t, cache)
	}
}
