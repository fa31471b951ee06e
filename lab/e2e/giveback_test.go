package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/lab/rig/proxy"
)

// diskSpace returns what the segments of a mount's dataset take, and what those of all may take.
func diskSpace(t testing.TB, target string) (used, limit int64) {
	t.Helper()
	var s struct {
		Disk struct {
			Used   int64 `json:"used"`
			Budget int64 `json:"budget"`
		}
	}
	decode(t, mustShoal(t, nil, "stat", target, "--json"), &s)
	return s.Disk.Used, s.Disk.Budget
}

// logOf returns what a daemon has logged in its cache directory.
func logOf(t testing.TB, cache string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(cache, "shoal.log"))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// A cache that may take less than it holds gives back what is too much and serves all the rest: with a smaller
// --cache-size, on a disk that another program fills, and with a quota that is set while it is mounted or not.
func TestGiveBack(t *testing.T) {
	long(t)
	const largest = 200 << 10              // what a file takes at most
	dir, paths := tree(t, 4, 150, 128<<10) // about 75 MiB, in segments of 8
	p, env := far(t, proxy.Options{})
	source := bucket(t, dir)
	full := filepath.Join(t.TempDir(), "cache")
	mnt := mount(t, env, source, "--cache-dir", full, "--cache-size", "128MiB", "--order", "none")
	readAll(t, mnt, dir, paths)
	waitKept(t, mnt, len(paths))
	held, limit := diskSpace(t, mnt)
	umount(t, mnt)
	sized := func(share float64) string { // --cache-size of which so much is for segments
		return fmt.Sprint(128<<20 - (limit-int64(share*float64(held)))*32/31)
	}

	// serves reads all and compares what is fetched with what no longer fits the limit.
	serves := func(t *testing.T, mnt, cache string, limit int64) {
		t.Helper()
		used, _ := diskSpace(t, mnt)
		before := p.Stats()
		readAll(t, mnt, dir, paths)
		gets := p.Stats().Sub(before).Gets - readStats(t, mnt).Hedges.Sent
		per := held / int64(len(paths))
		t.Logf("of %d files in %.1f MiB, %d are served without a GET from %.1f MiB, limit %.1f MiB",
			len(paths), float64(held)/(1<<20), int64(len(paths))-gets, float64(used)/(1<<20), float64(limit)/(1<<20))
		if used > limit || used < min(held, limit)-2*largest {
			t.Errorf("%d bytes are left of %d, the limit is %d", used, held, limit)
		}
		if lost := (held - used) / per; gets > lost+lost/5+2 { // files differ in size
			t.Errorf("%d GETs where %d files were given back", gets, lost)
		}
		if log := logOf(t, cache); held > limit &&
			(!strings.Contains(log, "WARN") || !strings.Contains(log, "source="+source) ||
				!strings.Contains(log, "segments=")) {
			t.Errorf("the log does not say what was given back:\n%s", log)
		}
		umount(t, mnt)
		mustBeClean(t, cache)
	}
	copied := func(t *testing.T, cache string) string {
		t.Helper()
		if err := os.CopyFS(cache, os.DirFS(full)); err != nil {
			t.Fatal(err)
		}
		if err := os.Remove(filepath.Join(cache, "shoal.log")); err != nil {
			t.Fatal(err)
		}
		return cache
	}
	for _, share := range []float64{0.99, 0.5, 0.1} {
		t.Run(fmt.Sprint(share), func(t *testing.T) {
			cache := copied(t, filepath.Join(t.TempDir(), "cache"))
			mnt := mount(t, env, source, "--cache-dir", cache, "--cache-size", sized(share), "--order", "none",
				"--kernel-cache", "off")
			_, limit := diskSpace(t, mnt)
			if got := float64(limit) / float64(held); got < share-0.01 || got > share+0.01 {
				t.Fatalf("the limit is %.3f of what is held", got)
			}
			serves(t, mnt, cache, limit)
		})
	}
	t.Run("intruder", func(t *testing.T) {
		disk := t.TempDir()
		if err := unix.Mount("tmpfs", disk, "tmpfs", 0, "size=160m"); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = unix.Unmount(disk, unix.MNT_DETACH) })
		cache := copied(t, filepath.Join(disk, "cache"))
		write(t, filepath.Join(disk, "ballast"), make([]byte, 74<<20))
		mnt := mount(t, env, source, "--cache-dir", cache, "--cache-size", "auto", "--order", "none",
			"--kernel-cache", "off")
		_, limit := diskSpace(t, mnt)
		if limit >= held || limit < held/2 {
			t.Fatalf("auto leaves %d bytes for the %d that are held", limit, held)
		}
		serves(t, mnt, cache, limit)
	})
	for _, running := range []bool{true, false} {
		t.Run(fmt.Sprintf("quota, mounted %v", running), func(t *testing.T) {
			cache := copied(t, filepath.Join(t.TempDir(), "cache"))
			mnt := t.TempDir()
			do := func(running bool) {
				if running {
					mountAt(t, env, source, mnt, "--cache-dir", cache, "--order", "none", "--kernel-cache", "off")
				} else {
					mustShoal(t, env, "cache", "quota", cache, source, "60MiB")
				}
			}
			do(running)
			do(!running)
			within(t, patience, "the quota holds", func() bool {
				used, _ := diskSpace(t, mnt)
				return used <= 60<<20
			})
			serves(t, mnt, cache, 60<<20)
		})
	}
	t.Run("beside another dataset", func(t *testing.T) { // which is not open, and gives instead
		cache := copied(t, filepath.Join(t.TempDir(), "cache"))
		other := strings.Replace(source, "/train", "/train/class00", 1)
		mnt := mount(t, env, other, "--cache-dir", cache, "--cache-size", "128MiB", "--order", "none")
		list, err := filepath.Glob(filepath.Join(mnt, "*"))
		if err != nil || len(list) != 150 {
			t.Fatalf("%d files, %v", len(list), err)
		}
		readAll(t, mnt, filepath.Join(dir, "class00"), bases(list))
		waitKept(t, mnt, len(list))
		umount(t, mnt)
		mountAt(t, env, other, mnt, "--cache-dir", cache, "--cache-size", sized(1.1), "--order", "none",
			"--kernel-cache", "off")
		if kept := readStats(t, mnt).Disk.Kept; kept != len(list) {
			t.Errorf("%d of %d files are kept of the dataset that was opened", kept, len(list))
		}
		_, limit := diskSpace(t, mnt)
		all := int64(0)
		for _, e := range cacheLs(t, cache) {
			all += e.Disk
		}
		if all > limit || all < limit-2*largest {
			t.Errorf("%d bytes are left, the limit is %d", all, limit)
		}
		umount(t, mnt)
		mustBeClean(t, cache)
	})
}

func bases(paths []string) (names []string) {
	for _, p := range paths {
		names = append(names, filepath.Base(p))
	}
	return names
}
