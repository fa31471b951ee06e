package catalog_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/cache/catalog"
)

// small mounts a file system of so many MiB.
func small(t *testing.T, mib int) string {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, fmt.Sprintf("size=%dm", mib)); err != nil {
		t.Fatalf("mount a tmpfs: %v", err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	return dir
}

// fill takes every free block.
func fill(t *testing.T, name string) {
	t.Helper()
	f, err := os.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for block := make([]byte, 4096); err == nil; {
		_, err = f.Write(block)
	}
	if !errors.Is(err, syscall.ENOSPC) {
		t.Fatal(err)
	}
}

// TestFullDisk: when others have taken every block, what the catalog is asked for works or fails; nothing
// ends the process, which a SIGBUS would.
func TestFullDisk(t *testing.T) {
	t.Parallel()
	dir := small(t, 24)
	ballast := filepath.Join(dir, "ballast")
	c := open(t, filepath.Join(dir, "cache"))
	m := build(t, "", "a/1.jpg")
	if err := c.SetManifest("s", m, nil); err != nil {
		t.Fatal(err)
	}
	fill(t, ballast)
	id := catalog.DatasetID("s")
	done := 0
	var err error
	for ; err == nil && done < 100_000; done++ {
		err = c.SetQuota(id, int64(done))
	}
	if !errors.Is(err, syscall.ENOSPC) || !strings.Contains(err.Error(), "--cache-dir") {
		t.Fatalf("after %d commits: %v", done, err)
	}
	if done < 1000 {
		t.Errorf("only %d commits found their blocks reserved", done)
	}
	if err := c.Index(id).CommitSegment(1, 64, true, make([]byte, 64<<10)); !errors.Is(err, syscall.ENOSPC) {
		t.Error(err)
	}
	if err := c.SetManifest("t", build(t, "", "a/1.jpg", "a/2.jpg"), nil); !errors.Is(err, syscall.ENOSPC) {
		t.Error(err)
	}
	if err := c.Close(); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("close: %v", err)
	}
	if _, err := catalog.Open(filepath.Join(dir, "another"), catalog.Options{Logger: quiet()}); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("open: %v", err)
	}
	// Reads go on, and commits when there is room again.
	check := func(quota int64) {
		t.Helper()
		if got, _, err := c.Manifest("s"); err != nil {
			t.Error(err)
		} else if err := got.Close(); err != nil {
			t.Error(err)
		}
		list, err := c.Datasets()
		if err != nil || len(list) != 1 || list[0].Quota != quota {
			t.Errorf("%+v, %v; want quota %d", list, err, quota)
		}
	}
	check(int64(done - 2))
	if err := os.Remove(ballast); err != nil {
		t.Fatal(err)
	}
	if err := c.SetQuota(id, 7); err != nil {
		t.Fatal(err)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	c = open(t, filepath.Join(dir, "cache"))
	defer c.Close()
	if c.Rebuilt() != "" {
		t.Error("rebuilt")
	}
	check(7)
}

// TestDiskFillsMeanwhile lets others take and give back all blocks at any moment of many commits.
func TestDiskFillsMeanwhile(t *testing.T) {
	t.Parallel()
	dir := small(t, 24)
	c, err := catalog.OpenUnsynced(filepath.Join(dir, "cache"), quiet())
	if err != nil {
		t.Fatal(err)
	}
	ballast := filepath.Join(dir, "ballast")
	var wg sync.WaitGroup
	stop := make(chan struct{})
	wg.Go(func() {
		for {
			fill(t, ballast)
			select {
			case <-stop:
				return
			case <-time.After(time.Millisecond):
			}
			if err := os.Truncate(ballast, 0); err != nil {
				t.Error(err)
			}
		}
	})
	id, last, failed := [16]byte{1}, "", 0
	for i := range 1500 {
		name := fmt.Sprint(i, strings.Repeat("x", 1500))
		switch err := c.Touch(id, name); {
		case err == nil:
			last = name
		case errors.Is(err, syscall.ENOSPC):
			failed++
		default:
			t.Fatal(err)
		}
	}
	close(stop)
	wg.Wait()
	if err := os.Remove(ballast); err != nil {
		t.Fatal(err)
	}
	list, err := c.Datasets()
	if err != nil || len(list) != 1 || list[0].Source != last {
		t.Errorf("%d datasets, %v", len(list), err)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	t.Logf("%d of 1500 commits failed", failed)
}

// TestManyCommits passes the size of a memtable and starts often: all is kept, and the
// files stay few.
func TestManyCommits(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	c := openUnsynced(t, dir)
	id := [16]byte{1}
	for i := range 120 { // 12 MB
		if err := c.Touch(id, fmt.Sprint(i, strings.Repeat("x", 100_000))); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 8 {
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
		c = openUnsynced(t, dir)
		if list, err := c.Datasets(); err != nil || len(list) != 1 || !strings.HasPrefix(list[0].Source, "119x") || list[0].Quota != int64(i) {
			t.Fatalf("start %d: %d datasets, %v", i, len(list), err)
		}
		if err := c.SetQuota(id, int64(i+1)); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	tables, err := filepath.Glob(filepath.Join(dir, "catalog", "*.sst"))
	if err != nil || len(tables) > 6 {
		t.Errorf("%d tables, %v", len(tables), err)
	}
	var size int64
	for _, name := range tables {
		st, err := os.Stat(name)
		if err != nil {
			t.Fatal(err)
		}
		size += st.Size()
	}
	if size > 4<<20 {
		t.Errorf("tables of %d bytes for 100 KB of facts", size)
	}
}
