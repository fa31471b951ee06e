package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/shoalfs/shoal/lab/rig/proxy"
)

// segments returns the segment files of a cache directory that has some.
func segments(t testing.TB, cache string) []string {
	t.Helper()
	list := segmentsIfAny(t, cache)
	if len(list) == 0 {
		t.Fatalf("no segments in %s", cache)
	}
	return list
}

// segmentsIfAny returns the segment files of a cache directory; one that nothing was read through has none.
func segmentsIfAny(t testing.TB, cache string) (list []string) {
	t.Helper()
	err := filepath.WalkDir(filepath.Join(cache, "segments"), func(p string, d os.DirEntry, err error) error {
		if err == nil && strings.HasSuffix(p, ".seg") {
			list = append(list, p)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return list
}

// fsck finds what is damaged, mends it on request, and what was damaged is never served.
func TestFsck(t *testing.T) {
	long(t)
	dir, paths := tree(t, 3, 40, 32<<10)
	p, env := far(t, proxy.Options{})
	source := bucket(t, dir)
	content, err := os.ReadFile(filepath.Join(dir, paths[17]))
	if err != nil {
		t.Fatal(err)
	}
	full := t.TempDir()
	mnt := mount(t, env, source, "--cache-dir", full)
	for _, n := range []int{40, len(paths)} { // content is among the first: there is as much behind it
		readAll(t, mnt, dir, paths[:n])
		waitKept(t, mnt, n)
	}
	umount(t, mnt)
	filled := func(t *testing.T) (cache string) {
		cache = filepath.Join(t.TempDir(), "cache")
		if err := os.CopyFS(cache, os.DirFS(full)); err != nil {
			t.Fatal(err)
		}
		return cache
	}
	// replace puts something else where the first match of a pattern was.
	replace := func(pattern string, with func(path string) error) func(t *testing.T, cache string) {
		return func(t *testing.T, cache string) {
			t.Helper()
			list, err := filepath.Glob(filepath.Join(cache, pattern))
			if err != nil || len(list) == 0 {
				t.Fatalf("%s: %v", pattern, err)
			}
			if err := os.RemoveAll(list[0]); err != nil {
				t.Fatal(err)
			}
			if err := with(list[0]); err != nil {
				t.Fatal(err)
			}
		}
	}
	folder := func(path string) error {
		return errors.Join(os.Mkdir(path, 0o755), os.WriteFile(filepath.Join(path, "x"), []byte("x"), 0o644))
	}
	empty := func(path string) error { return os.Mkdir(path, 0o755) }
	file := func(path string) error { return os.WriteFile(path, []byte("garbage"), 0o644) }
	nothing := func(string) error { return nil }
	edit := func(t *testing.T, path string, change func([]byte) []byte) {
		t.Helper()
		b, err := os.ReadFile(path)
		if err == nil {
			err = os.WriteFile(path, change(b), 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	payload := func(t *testing.T, b []byte) int {
		t.Helper()
		at := bytes.Index(b, content)
		if at < 0 {
			t.Fatal("the segment does not hold the file")
		}
		return at
	}
	for _, c := range []struct {
		name   string
		damage func(t *testing.T, cache string)
		clean  bool // no damage that loses data
		gets   int  // at least so many files are fetched again
		refuse bool // a mount refuses it, and names fsck --repair, which loses nothing
	}{
		{"nothing", func(*testing.T, string) {}, true, 0, false},
		{"one bit of a payload", func(t *testing.T, cache string) {
			edit(t, segments(t, cache)[0], func(b []byte) []byte { b[payload(t, b)+100] ^= 1; return b })
		}, false, 1, false},
		{"a header", func(t *testing.T, cache string) {
			edit(t, segments(t, cache)[0], func(b []byte) []byte {
				at := bytes.LastIndex(b[:payload(t, b)], []byte("SHRC"))
				b[at+40] ^= 0xff
				return b
			})
		}, false, 1, false},
		{"zeros in the middle", func(t *testing.T, cache string) {
			edit(t, segments(t, cache)[0], func(b []byte) []byte {
				at := payload(t, b)
				clear(b[at : at+2*len(content)])
				return b
			})
		}, false, 1, false},
		{"a segment cut in half", func(t *testing.T, cache string) {
			edit(t, segments(t, cache)[0], func(b []byte) []byte { return b[:payload(t, b)+10] })
		}, false, 1, false},
		{"a segment's own header", func(t *testing.T, cache string) { // its records say all themselves
			edit(t, segments(t, cache)[0], func(b []byte) []byte { b[0] ^= 0xff; return b })
		}, false, 0, false},
		{"an empty segment file", func(t *testing.T, cache string) {
			edit(t, segments(t, cache)[0], func(b []byte) []byte { return nil })
		}, false, 1, false},
		{"a manifest", func(t *testing.T, cache string) {
			files, _ := filepath.Glob(filepath.Join(cache, "manifests", "*"))
			if len(files) == 0 {
				t.Fatal("no manifest")
			}
			edit(t, files[0], func(b []byte) []byte { b[len(b)/2] ^= 0xff; return b })
		}, false, 0, false},
		{"a manifest of garbage", replace("manifests/*", file), false, 0, false},
		{"a manifest that is a folder", replace("manifests/*", folder), false, 0, true},
		{"manifests that is a file", replace("manifests", file), false, 0, true},
		{"no manifests", replace("manifests", nothing), true, 0, false},
		{"a segment that is a folder", replace("segments/*/*.seg", folder), false, len(paths), true},
		{"a segment that is an empty folder", replace("segments/*/*.seg", empty), false, len(paths), true},
		{"a dataset's segments that are a file", replace("segments/*", file), false, len(paths), true},
		{"segments that is a file", replace("segments", file), false, len(paths), true},
		{"a table that is a folder", replace("tables/*/*.table", folder), false, 0, false},
		{"a table of garbage", replace("tables/*/*.table", file), false, 0, false},
		{"a dataset's tables that are a file", replace("tables/*", file), false, 0, false},
		{"tables that is a file", replace("tables", file), false, 0, true},
		{"no FORMAT", replace("FORMAT", nothing), false, 0, false},
		{"a FORMAT of garbage", replace("FORMAT", file), false, 0, true},
		{"a FORMAT that is a folder", replace("FORMAT", folder), false, 0, true},
		{"no lock", replace("lock", nothing), true, 0, false},
		{"a lock of garbage", replace("lock", file), true, 0, false},
		{"a lock that is a folder", replace("lock", folder), false, 0, true},
		{"no facts", replace("facts", nothing), false, 0, false}, // the copy has them
		{"no facts, nor a copy", func(t *testing.T, cache string) {
			replace("facts.copy", nothing)(t, cache)
			replace("facts", nothing)(t, cache)
		}, false, 0, false},
		{"facts of garbage, as is the copy", func(t *testing.T, cache string) {
			replace("facts.copy", file)(t, cache)
			replace("facts", file)(t, cache)
		}, false, 0, false},
		{"facts of garbage", replace("facts", file), false, 0, false},
		{"facts that are a folder", replace("facts", folder), false, 0, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			cache := filled(t)
			c.damage(t, cache)
			out, code := fsck(t, cache)
			if c.clean != (code == 0) || code > 1 {
				t.Fatalf("exit %d\n%s", code, out)
			}
			var report map[string]any
			stdout, _, again := shoal(t, nil, "fsck", cache, "--json")
			// which the first one has done
			if decode(t, strings.SplitN(stdout, "\n", 2)[0], &report); again != code &&
				!strings.Contains(out, "the catalog was damaged") && !strings.Contains(out, "from its copy") {
				t.Errorf("--json: exit %d, without %d", again, code)
			}
			// As it is, without a repair, nothing that is damaged is served.
			unrepaired := t.TempDir()
			if err := os.CopyFS(unrepaired+"/c", os.DirFS(cache)); err != nil {
				t.Fatal(err)
			}
			for _, at := range []string{unrepaired + "/c", cache} {
				if at == cache {
					repair, _ := fsck(t, cache, "--repair")
					if out += repair; !c.clean && !strings.Contains(out, "repaired") &&
						!strings.Contains(out, "listed again") {
						t.Errorf("--repair says nothing of it:\n%s", out)
					}
					mustBeClean(t, cache)
				}
				if c.refuse && at != cache {
					_, errs, code := shoal(t, env, "mount", source, t.TempDir(), "--cache-dir", at, "--daemon")
					if code != 1 || !strings.Contains(errs, "shoal fsck "+at+" --repair") {
						t.Errorf("a mount: exit %d, %s", code, errs)
					}
					continue
				}
				mnt := mount(t, env, source, "--cache-dir", at, "--kernel-cache", "off")
				before := p.Stats() // behind what tries the key
				readAll(t, mnt, dir, paths)
				// 2% are hedges
				if d := p.Stats().Sub(before); d.Gets < int64(c.gets) ||
					c.gets < 2 && d.Gets > int64(len(paths)+len(paths)/50+1) || c.gets == 0 && d.Gets > 0 {
					t.Errorf("%d GETs after the damage", d.Gets)
				} else {
					t.Logf("%d of %d files fetched again", d.Gets, len(paths))
				}
				waitKept(t, mnt, len(paths))
				umount(t, mnt)
			}
			mustBeClean(t, cache)
		})
	}

	// A folder that is in use, and one that is no cache.
	cache := t.TempDir()
	mnt = mount(t, env, source, "--cache-dir", cache)
	if out, code := fsck(t, cache); code != 1 || !strings.Contains(out, fmt.Sprint(readStats(t, mnt).PID)) {
		t.Errorf("in use: exit %d, %s", code, out)
	}
	if out, code := fsck(t, t.TempDir()); code != 1 || !strings.Contains(out, "cache") {
		t.Errorf("an empty folder: exit %d, %s", code, out)
	}
}

// The catalog is lost: it is rebuilt from a listing and the segments, and nothing is fetched again.
func TestLostCatalog(t *testing.T) {
	dir, paths := tree(t, 3, 40, 32<<10)
	p, env := far(t, proxy.Options{})
	source := bucket(t, dir)
	cache := t.TempDir()
	mnt := mount(t, env, source, "--cache-dir", cache)
	readAll(t, mnt, dir, paths)
	waitKept(t, mnt, len(paths))
	umount(t, mnt)
	entries, err := os.ReadDir(cache)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if e.IsDir() && e.Name() != "segments" || strings.HasPrefix(e.Name(), "facts") {
			if err := os.RemoveAll(filepath.Join(cache, e.Name())); err != nil {
				t.Fatal(err)
			}
		}
	}
	before := p.Stats()
	mountAt(t, env, source, mnt, "--cache-dir", cache)
	readAll(t, mnt, dir, paths)
	if d := p.Stats().Sub(before); d.Gets != 0 {
		t.Errorf("%d GETs after the catalog was lost", d.Gets)
	}
	umount(t, mnt)
	mustBeClean(t, cache)
}

type cacheEntry struct {
	Dir    string `json:"cache_dir"`
	ID     string `json:"id"`
	Source string `json:"source"`
	Files  int    `json:"files"`
	Disk   int64  `json:"disk_bytes"`
	Quota  int64  `json:"quota"`
	Pinned bool   `json:"pinned"`
	Open   bool   `json:"open"`
}

func cacheLs(t testing.TB, cache string) map[string]cacheEntry {
	t.Helper()
	var list []cacheEntry
	decode(t, mustShoal(t, nil, "cache", "ls", cache, "--json"), &list)
	entries := make(map[string]cacheEntry)
	for _, e := range list {
		source, _, _ := strings.Cut(e.Source, "?")
		entries[strings.TrimSuffix(source, "/")] = e
	}
	return entries
}

// Without a directory, ls tells of each default one what that one holds, whoever owns it, and in JSON as one list.
// Where no daemon runs, verify opens a dataset of a bucket at the endpoint that it was cached from, whatever the
// environment names now.
func TestCacheVerbsOnBuckets(t *testing.T) {
	dir, paths := tree(t, 2, 10, 8<<10)
	source := bucket(t, dir)
	_, env := far(t, proxy.Options{})
	_, other := far(t, proxy.Options{})
	home := t.TempDir()
	env = append(env, "HOME="+home, "XDG_CACHE_HOME=")
	a, b := filepath.Join(home, ".cache/shoal/a"), filepath.Join(home, ".cache/shoal/b")
	mnt := mount(t, env, source, "--cache-dir", a)
	readAll(t, mnt, dir, paths)
	waitKept(t, mnt, len(paths))
	mustShoal(t, env, "warm", "file://"+dir, "--cache-dir", b)
	var list []cacheEntry
	decode(t, mustShoal(t, env, "cache", "ls", "--json"), &list)
	if len(list) != 2 || list[0].Dir != a || !list[0].Open || list[1].Dir != b || list[1].Open {
		t.Errorf("%+v", list)
	}
	if text := mustShoal(t, env, "cache", "ls"); strings.Count(text, source+"/ ") != 1 ||
		strings.Count(text, b+"\n") != 1 {
		t.Errorf("%s", text)
	}
	for range 2 { // by the daemon, and without one
		if text := mustShoal(t, other, "cache", "verify", a, source); !strings.HasPrefix(text,
			"20 extents of "+source+"/ are as in the store") {
			t.Errorf("%s", text)
		}
		if mounted(mnt) {
			umount(t, mnt)
		}
	}
	table, rows := t.TempDir(), t.TempDir()
	write(t, filepath.Join(table, "x.csv"), []byte("a,b\n1,2\n"))
	mustShoal(t, nil, "warm", "file://"+table, "--samples", "rows", "--cache-dir", rows)
	decode(t, mustShoal(t, nil, "cache", "ls", rows, "--json"), &list)
	mustShoal(t, nil, "cache", "verify", rows, list[0].ID)
	if decode(t, mustShoal(t, nil, "cache", "ls", rows, "--json"), &list); len(list) != 1 {
		t.Errorf("a dataset more: %+v", list)
	}
}

// Two mounts share one cache directory through the one daemon that owns it, by quota; ls, rm, pin and
// quota show and change that, with the daemon and without.
func TestSharedCache(t *testing.T) {
	long(t)
	dirA, pathsA := tree(t, 2, 200, 96<<10) // about 38 MiB
	dirB, pathsB := tree(t, 3, 50, 32<<10)
	_, env := far(t, proxy.Options{})
	name := bucketName(t)
	upload(t, dirA, name+"-a")
	upload(t, dirB, name+"-b")
	a, b := "s3://"+name+"-a/train", "s3://"+name+"-b/train"
	cache := t.TempDir()
	mntA := mount(t, env, a, "--cache-dir", cache, "--kernel-cache", "off")
	mntB := mount(t, env, b, "--cache-dir", cache, "--kernel-cache", "off")
	if x, y := readStats(t, mntA).PID, readStats(t, mntB).PID; x != y {
		t.Errorf("two daemons, %d and %d, on one cache directory", x, y)
	}
	pid := readStats(t, mntA).PID
	sameTree(t, mntA, dirA, pathsA)
	sameTree(t, mntB, dirB, pathsB)
	waitKept(t, mntA, len(pathsA))
	waitKept(t, mntB, len(pathsB))
	ls := cacheLs(t, cache)
	if len(ls) != 2 || !ls[a].Open || !ls[b].Open || ls[a].Files != len(pathsA) || ls[a].Disk < 30<<20 ||
		ls[b].Disk < 2<<20 {
		t.Errorf("ls: %+v", ls)
	}
	if _, errs, code := shoal(t, nil, "cache", "rm", cache, a); code != 1 ||
		!strings.Contains(errs, "open") && !strings.Contains(errs, "mounted") && !strings.Contains(errs, "use") {
		t.Errorf("rm of what is mounted: exit %d, %s", code, errs)
	}
	// One goes, the other stays, with the daemon.
	umount(t, mntA)
	if mounted(mntA) || !mounted(mntB) || readStats(t, mntB).PID != pid {
		t.Error("the second mount did not outlive the first")
	}
	within(t, patience, "what was unmounted to be closed", func() bool { return !cacheLs(t, cache)[a].Open })
	if e := cacheLs(t, cache)[a]; e.Disk < 30<<20 {
		t.Errorf("after umount: %+v", e)
	}
	// A quota of 16 MiB on what takes 38.
	mustShoal(t, nil, "cache", "quota", cache, a, "16MiB")
	mustShoal(t, nil, "cache", "pin", cache, b)
	ls = cacheLs(t, cache)
	if ls[a].Quota != 16<<20 || !ls[b].Pinned {
		t.Errorf("quota and pin: %+v", ls)
	}
	mustShoal(t, nil, "cache", "rm", cache, a)
	if e, ok := cacheLs(t, cache)[a]; ok && e.Disk != 0 {
		t.Errorf("after rm: %+v", e)
	}
	mountAt(t, env, a, mntA, "--cache-dir", cache, "--kernel-cache", "off")
	mustShoal(t, nil, "cache", "quota", cache, a, "16MiB")
	readAll(t, mntA, dirA, pathsA)
	readAll(t, mntA, dirA, pathsA)
	within(t, patience, "some of it is on disk", func() bool { return cacheLs(t, cache)[a].Disk >= 4<<20 })
	if e := cacheLs(t, cache)[a]; e.Disk > 16<<20 {
		t.Errorf("%d bytes on disk with a quota of 16 MiB", e.Disk)
	}
	mustShoal(t, nil, "cache", "quota", cache, a, "none")
	readAll(t, mntA, dirA, pathsA)
	within(t, patience, "without a quota all is kept", func() bool {
		readAll(t, mntA, dirA, pathsA)
		return cacheLs(t, cache)[a].Disk > 30<<20
	})
	umount(t, mntA)
	umount(t, mntB)
	gone(t, pid)

	// Without a daemon.
	ls = cacheLs(t, cache)
	if len(ls) != 2 || ls[a].Open || !ls[b].Pinned {
		t.Errorf("ls without a daemon: %+v", ls)
	}
	mustShoal(t, nil, "cache", "unpin", cache, b)
	mustShoal(t, nil, "cache", "rm", cache, b)
	if _, errs, code := shoal(t, nil, "cache", "rm", cache, "s3://nobody/knows"); code != 1 ||
		!strings.Contains(errs, "s3://nobody/knows") {
		t.Errorf("rm of an unknown source: exit %d, %s", code, errs)
	}
	if _, errs, code := shoal(t, nil, "cache", "quota", cache, a, "lots"); code != 2 ||
		!strings.Contains(errs, "lots") {
		t.Errorf("a bad quota: exit %d, %s", code, errs)
	}
	mustBeClean(t, cache)
}

// When the directory is full, what is neither open nor pinned goes first; what is pinned stays.
func TestPinnedStays(t *testing.T) {
	dirs := map[string]string{}
	var files = map[string][]string{}
	_, env := far(t, proxy.Options{})
	name := bucketName(t)
	source := func(k string) string { return "s3://" + name + "-" + k + "/train" }
	for _, k := range []string{"pinned", "loose", "new"} {
		dirs[k], files[k] = tree(t, 2, 80, 96<<10) // about 15 MiB
		upload(t, dirs[k], name+"-"+k)
	}
	cache := t.TempDir()
	fill := func(k string) {
		t.Helper()
		mnt := mount(t, env, source(k), "--cache-dir", cache, "--cache-size", "44MiB", "--kernel-cache", "off")
		for range 3 {
			readAll(t, mnt, dirs[k], files[k])
		}
		umount(t, mnt)
	}
	fill("pinned")
	fill("loose")
	mustShoal(t, nil, "cache", "pin", cache, source("pinned"))
	before := cacheLs(t, cache)
	fill("new")
	after := cacheLs(t, cache)
	if x, y := before[source("pinned")].Disk, after[source("pinned")].Disk; y < x {
		t.Errorf("pinned: %d bytes, before %d", y, x)
	}
	if x, y := before[source("loose")].Disk, after[source("loose")].Disk; y >= x {
		t.Errorf("not pinned, not open: %d bytes, before %d", y, x)
	}
	if after[source("new")].Disk < 8<<20 {
		t.Errorf("the new one got %d bytes", after[source("new")].Disk)
	}
	if used := diskUsage(t, cache); used > 44<<20 {
		t.Errorf("%d bytes with --cache-size 44MiB", used)
	}
	mustBeClean(t, cache)
}

// The daemon that two mounts share dies: both fail at once, both come back, warm.
func TestSharedDaemonDies(t *testing.T) {
	dir, paths := tree(t, 2, 30, 32<<10)
	p, env := far(t, proxy.Options{})
	name := bucketName(t)
	upload(t, dir, name+"-a")
	upload(t, dir, name+"-b")
	cache := t.TempDir()
	var mnts []string
	for _, k := range []string{"a", "b"} {
		mnt := mount(t, env, "s3://"+name+"-"+k+"/train", "--cache-dir", cache)
		readAll(t, mnt, dir, paths)
		waitKept(t, mnt, len(paths))
		mnts = append(mnts, mnt)
	}
	pid := readStats(t, mnts[0]).PID
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	gone(t, pid)
	before := p.Stats()
	for i, k := range []string{"a", "b"} {
		if _, err := os.Stat(filepath.Join(mnts[i], paths[0])); err == nil {
			t.Error("a mount outlived its daemon")
		}
		mountAt(t, env, "s3://"+name+"-"+k+"/train", mnts[i], "--cache-dir", cache)
		dropCaches(t)
		readAll(t, mnts[i], dir, paths)
	}
	if d := p.Stats().Sub(before); d.Gets != 0 {
		t.Errorf("%d GETs after the daemon died", d.Gets)
	}
	for _, mnt := range mnts {
		umount(t, mnt)
	}
	mustBeClean(t, cache)
}
