package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/lab/rig/proxy"
)

// The daemon is killed with reads in flight: every reader gets an error, soon; none hangs.
func TestKilledUnderReaders(t *testing.T) {
	dir, paths := tree(t, 2, 50, 32<<10)
	p, env := far(t, proxy.Options{})
	source := bucket(t, dir)
	mnt := mount(t, env, source, "--kernel-cache", "off", "--order", "none")
	if err := p.Set(proxy.Options{Faults: []proxy.Fault{{Kind: proxy.Slow, For: 60 * time.Second}}}); err != nil {
		t.Fatal(err)
	}
	pid := readStats(t, mnt).PID
	ended := make(chan error, 16)
	for i := range cap(ended) {
		go func() {
			_, err := os.ReadFile(filepath.Join(mnt, paths[i]))
			ended <- err
		}()
	}
	within(t, patience, "the reads are in flight", func() bool { return p.Stats().InFlight >= int64(cap(ended)) })
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	deadline := time.After(30 * time.Second) // half of what the store would take
	for i := range cap(ended) {
		select {
		case err := <-ended:
			if !errors.Is(err, syscall.ECONNABORTED) && !errors.Is(err, syscall.ENOTCONN) &&
				!errors.Is(err, syscall.ECANCELED) {
				t.Errorf("a reader of the killed daemon got %v", err)
			}
		case <-deadline:
			t.Fatalf("%d of %d readers hang", cap(ended)-i, cap(ended))
		}
	}
}

// A daemon that is killed leaves its mount in the volume that it shares with the host, where no kubelet can remove it.
// The process that stands by in a container of its own takes it away when it is told to end, whether the daemon has
// left one, two or none.
func TestUnmountAtExit(t *testing.T) {
	dir, paths := tree(t, 1, 5, 1<<10)
	for left := range 3 {
		volume := tmpfs(t, unix.MS_SHARED)
		at := filepath.Join(volume, "data")
		standby := startForeground(t, apart(volume, shoalBin, "umount", "--at-exit", at))
		within(t, patience, "the process stands by", func() bool { return strings.Contains(standby.log(), "SIGTERM") })
		for range left {
			d := startForeground(t, apart(volume, shoalBin, "mount", "file://"+dir, at, "--cache-dir", t.TempDir(),
				"--kernel-cache", "off"))
			within(t, patience, "the mount", func() bool {
				_, err := os.Stat(filepath.Join(at, paths[0]))
				return err == nil
			})
			d.signal(t, syscall.SIGKILL)
			<-d.exited
		}
		if err := os.RemoveAll(at); left > 0 && !errors.Is(err, syscall.ENOTCONN) &&
			!errors.Is(err, syscall.ECONNABORTED) && !errors.Is(err, syscall.ECANCELED) &&
			!errors.Is(err, syscall.EBUSY) {
			t.Errorf("a volume with a dead mount can be removed: %v", err)
		}
		standby.signal(t, syscall.SIGTERM)
		standby.ended(t)
		if err := os.RemoveAll(at); err != nil {
			t.Errorf("%d mounts were left: %v", left, err)
		}
	}
}

// With --daemon=supervised a killed daemon is back within seconds, warm, and umount ends it for good.
func TestSupervise(t *testing.T) {
	dir, paths := tree(t, 2, 50, 32<<10)
	p, env := far(t, proxy.Options{Latency: 2 * time.Millisecond})
	source := bucket(t, dir)
	cache := t.TempDir()
	mnt := mount(t, env, source, "--cache-dir", cache, "--daemon=supervised", "--kernel-cache", "off")
	readAll(t, mnt, dir, paths)
	waitKept(t, mnt, len(paths))
	before := p.Stats()
	for kill := range 3 {
		pid := readStats(t, mnt).PID
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		within(t, patience, "it is mounted again", func() bool {
			b, err := os.ReadFile(filepath.Join(mnt, ".shoal/stats"))
			return err == nil && !bytes.Contains(b, []byte(fmt.Sprintf(`"pid":%d,`, pid)))
		})
		t.Logf("kill %d: back after %s", kill, time.Since(start).Round(time.Millisecond))
		dropCaches(t)
		readAll(t, mnt, dir, paths)
	}
	if d := p.Stats().Sub(before); d.Gets != 0 || d.Lists != 0 {
		t.Errorf("%d GETs and %d listings after three kills", d.Gets, d.Lists)
	}
	umount(t, mnt)
	within(t, patience, "nothing runs any more", func() bool { return len(processes(mnt)) == 0 })
	if mounted(mnt) {
		t.Error("still mounted")
	}
	// A start that fails is told, once.
	if _, errs, code := shoal(t, env, "mount", "s3://no-such-bucket/x", t.TempDir(), "--daemon=supervised",
		"--cache-dir", t.TempDir()); code != 1 || !strings.Contains(errs, "no-such-bucket") {
		t.Errorf("a start that fails: exit %d, %s", code, errs)
	}
}

// scenario is what a daemon or a verb is doing when it is killed.
type scenario struct {
	name string
	// start lays out the state that the run begins with, under a fresh folder.
	start func(t *testing.T, dir string)
	// run does the work with the binary that may die, and leaves nothing running but what died.
	run func(t *testing.T, env []string, dir string)
	// check reopens with a binary that lives: every byte right, nothing left.
	check func(t *testing.T, dir string)
}

// killCount is how many kills are made in all: SHOAL_KILLS=200 is what issue B asks for and nightly
// runs do.
func killCount(t testing.TB) int {
	text := os.Getenv("SHOAL_KILLS")
	if text == "" {
		return atMost(20, 40)
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 {
		t.Fatalf("SHOAL_KILLS=%q: give a number", text)
	}
	return n
}

// passings counts how often each kill point was passed.
func passings(t testing.TB, log string) map[string]int {
	t.Helper()
	b, err := os.ReadFile(log)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	seen := make(map[string]int)
	for name := range strings.Lines(string(b)) {
		seen[strings.TrimSpace(name)]++
	}
	return seen
}

// counts lists passings of 1..most: the first, then the middle, then the quarters, and so on. The last
// ones are left out: how many there are depends on timing.
func counts(most, n int) []int {
	list := []int{1}
	for parts := 2; len(list) < n && parts <= 2*most; parts *= 2 {
		for i := 1; i < parts; i += 2 {
			if at := 1 + most*i/parts; at < most && !slices.Contains(list, at) {
				list = append(list, at)
			}
		}
	}
	return list[:min(n, len(list))]
}

// mountpoint makes a mount point below at, or finds it, perhaps with a dead mount on it.
func mountpoint(t *testing.T, at string) string {
	t.Helper()
	mnt := filepath.Join(at, "mnt")
	if err := os.Mkdir(mnt, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		t.Fatal(err)
	}
	return mnt
}

// The process is killed at every moment that the code names, each at several passings, in a mount, a
// pack, a repair, a warm-up, a removal. After each kill it is opened again: every byte is right, fsck
// finds nothing, nothing is mounted or running.
func TestKillPoints(t *testing.T) {
	long(t)
	deadly := program(t, &killOnce, "shoal-killpoints", "../../cmd/shoal", "-tags", "netgo,osusergo,killpoints")
	dir, paths := tree(t, 2, 24, 24<<10)
	p, direct := far(t, proxy.Options{})
	source := bucket(t, dir)
	name := bucketName(t)
	bigFile := bytes.Repeat([]byte("several extents "), 5<<20/16)
	write(t, filepath.Join(dir, "class00/big.jpg"), bigFile)
	upload(t, dir, name)
	paths = append(paths, "class00/big.jpg")
	packed := newBucket(t, "-packed")

	// A cache that is half full, and one that is damaged, are made once and copied.
	seed := t.TempDir()
	half := filepath.Join(seed, "half")
	mnt := mount(t, direct, source, "--cache-dir", half)
	readAll(t, mnt, dir, paths[:20])
	waitKept(t, mnt, 20)
	umount(t, mnt)
	damaged := filepath.Join(seed, "damaged")
	if err := os.CopyFS(damaged, os.DirFS(half)); err != nil {
		t.Fatal(err)
	}
	f := segments(t, damaged)[0]
	b, err := os.ReadFile(f)
	if err != nil {
		t.Fatal(err)
	}
	b[len(b)/2] ^= 0xff
	if err := os.WriteFile(f, append(b, "a torn tail"...), 0o600); err != nil {
		t.Fatal(err)
	}
	copyOf := func(t *testing.T, from, to string) {
		t.Helper()
		if err := os.CopyFS(to, os.DirFS(from)); err != nil {
			t.Fatal(err)
		}
	}

	// use mounts with the given binary, reads what it can, and unmounts. Errors mean that it died.
	use := func(t *testing.T, bin string, env []string, at string, flags ...string) {
		t.Helper()
		mnt := mountpoint(t, at)
		args := append([]string{"mount", source, mnt, "--daemon", "--cache-dir", filepath.Join(at, "cache"),
			"--kernel-cache", "off"}, flags...)
		if _, _, code := shoalWith(t, bin, env, args...); code != 0 {
			return
		}
		// Several passes: what was prefetched and what was dropped, too.
		for range 2 {
			for _, f := range paths {
				got, err := os.ReadFile(filepath.Join(mnt, f))
				if err != nil {
					return
				}
				if want, e := os.ReadFile(filepath.Join(dir, f)); e != nil || !bytes.Equal(got, want) {
					t.Errorf("%s: wrong bytes before the kill", f)
				}
			}
		}
		_, _, _ = shoalWith(t, bin, nil, "refresh", mnt)
		_, _, _ = shoalWith(t, bin, nil, "umount", mnt)
	}
	checkCache := func(t *testing.T, at string) {
		t.Helper()
		mnt, cache := mountpoint(t, at), filepath.Join(at, "cache")
		mountAt(t, direct, source, mnt, "--cache-dir", cache, "--kernel-cache", "off")
		readAll(t, mnt, dir, paths)
		waitKept(t, mnt, len(paths))
		umount(t, mnt)
		mustBeClean(t, cache)
		before := p.Stats()
		mountAt(t, direct, source, mnt, "--cache-dir", cache, "--kernel-cache", "off")
		readAll(t, mnt, dir, paths)
		if d := p.Stats().Sub(before); d.Gets != 0 {
			t.Errorf("%d GETs from a cache that was whole before", d.Gets)
		}
		umount(t, mnt)
	}
	set := func(at string) string { return filepath.Base(filepath.Dir(at)) + "-" + filepath.Base(at) }
	packInto := func(t *testing.T, bin string, env []string, at string) int {
		t.Helper()
		_, errs, code := shoalWith(t, bin, env, "pack", source, "s3://"+packed+"/"+set(at), "--shard-size", "1MiB",
			"--seed", "2")
		if bin == shoalBin && code != 0 {
			t.Errorf("pack: exit %d, %s", code, errs)
		}
		return code
	}
	scenarios := []scenario{
		{"mount with an empty cache",
			func(*testing.T, string) {},
			func(t *testing.T, env []string, at string) { use(t, deadly, env, at) }, checkCache},
		{"an encrypted cache, and another key for it",
			func(t *testing.T, at string) {
				for _, f := range []string{"key", "next"} {
					write(t, filepath.Join(at, f), []byte(newKey()))
				}
			},
			func(t *testing.T, env []string, at string) {
				use(t, deadly, append(env, "SHOAL_ENCRYPTION_KEY="+string(content(t, filepath.Join(at, "key")))), at)
				_, _, _ = shoalWith(t, deadly, env, "cache", "rekey", filepath.Join(at, "cache"),
					"--encryption-key-file", filepath.Join(at, "key"), "--new-encryption-key-file",
					filepath.Join(at, "next"))
			},
			func(t *testing.T, at string) {
				t.Setenv("SHOAL_ENCRYPTION_KEY", string(content(t, filepath.Join(at, "key"))))
				if _, errs, code := shoal(t, nil, "cache", "ls", filepath.Join(at, "cache")); code != 0 &&
					strings.Contains(errs, "wrong encryption key") {
					t.Setenv("SHOAL_ENCRYPTION_KEY", string(content(t, filepath.Join(at, "next"))))
				}
				checkCache(t, at)
				if err := os.Unsetenv("SHOAL_ENCRYPTION_KEY"); err != nil { // of the scenarios that come
					t.Fatal(err)
				}
			}},
		{"mount with a half full cache",
			func(t *testing.T, at string) { copyOf(t, half, filepath.Join(at, "cache")) },
			func(t *testing.T, env []string, at string) {
				use(t, deadly, env, at, "--order", "torch:seed=1")
			}, checkCache},
		{"mount with a full and small cache",
			func(t *testing.T, at string) { copyOf(t, half, filepath.Join(at, "cache")) },
			func(t *testing.T, env []string, at string) {
				use(t, deadly, env, at, "--cache-size", "4MiB")
			}, checkCache},
		{"fsck --repair",
			func(t *testing.T, at string) { copyOf(t, damaged, filepath.Join(at, "cache")) },
			func(t *testing.T, env []string, at string) {
				_, _, _ = shoalWith(t, deadly, env, "fsck", filepath.Join(at, "cache"), "--repair")
			},
			func(t *testing.T, at string) {
				_, _ = fsck(t, filepath.Join(at, "cache"), "--repair")
				mustBeClean(t, filepath.Join(at, "cache"))
				checkCache(t, at)
			}},
		{"warm, then cache rm",
			func(t *testing.T, at string) { copyOf(t, half, filepath.Join(at, "cache")) },
			func(t *testing.T, env []string, at string) {
				cache := filepath.Join(at, "cache")
				if _, _, code := shoalWith(t, deadly, env, "warm", source, "--cache-dir", cache); code == 0 {
					_, _, _ = shoalWith(t, deadly, env, "cache", "rm", cache, source)
				}
			}, checkCache},
		{"pack",
			func(*testing.T, string) {},
			func(t *testing.T, env []string, at string) { packInto(t, deadly, env, at) },
			func(t *testing.T, at string) {
				packInto(t, shoalBin, direct, at)
				mnt := mountpoint(t, at)
				mountAt(t, direct, "s3://"+packed+"/"+set(at), mnt, "--cache-dir", filepath.Join(at, "cache"),
					"--kernel-cache", "off")
				sameTree(t, mnt, dir, paths)
				umount(t, mnt)
				for u := range store(t).ListIncompleteUploads(t.Context(), packed, set(at), true) {
					t.Errorf("an upload of %s is left open, %v", u.Key, u.Err)
				}
			}},
	}

	// Which points does each scenario pass, and how often?
	type visit struct {
		scenario int
		point    string
		most     int
	}
	var visits []visit
	all := make(map[string]bool)
	for i, s := range scenarios {
		at, log := t.TempDir(), filepath.Join(t.TempDir(), "log")
		s.start(t, at)
		s.run(t, append([]string{"SHOAL_KILLPOINTS_LOG=" + log}, direct...), at)
		seen := passings(t, log)
		if len(seen) == 0 {
			t.Errorf("%s passes no kill point", s.name)
		}
		for _, point := range slices.Sorted(maps.Keys(seen)) {
			visits = append(visits, visit{i, point, seen[point]})
			all[point] = true
		}
		s.check(t, at)
	}
	t.Logf("%d points, %d of them in a scenario: %s",
		len(all), len(visits), strings.Join(slices.Sorted(maps.Keys(all)), " "))

	// Every visit once; what is left of the number goes round by round to further passings.
	total := killCount(t)
	type kill struct {
		visit
		count int
	}
	var kills []kill
	for round := 0; len(kills) < total && round < 64; round++ {
		added := false
		// In another order each round, so that a small number takes of all scenarios.
		for _, k := range rand.New(rand.NewPCG(uint64(round), 1)).Perm(len(visits)) {
			v := visits[k]
			if c := counts(v.most, 64); round < len(c) && len(kills) < total {
				kills = append(kills, kill{v, c[round]})
				added = true
			}
		}
		if !added {
			break
		}
	}
	visited := make(map[string]bool)
	died := 0
	start := time.Now()
	for _, k := range kills {
		s := scenarios[k.scenario]
		ok := t.Run(fmt.Sprintf("%s/%s:%d", s.name, k.point, k.count), func(t *testing.T) {
			at := t.TempDir()
			log := filepath.Join(t.TempDir(), "log")
			s.start(t, at)
			s.run(t, append([]string{fmt.Sprintf("SHOAL_KILLPOINT=%s:%d", k.point, k.count),
				"SHOAL_KILLPOINTS_LOG=" + log}, direct...), at)
			// The last name in the log is where it died, if it did; how often a point is passed
			// depends on timing.
			if seen := passings(t, log); seen[k.point] >= k.count {
				died++
				visited[k.point] = true
			}
			// A process that is being killed holds its locks and its mount a moment longer.
			within(t, patience, "the killed process is gone", func() bool { return len(processes(at)) == 0 })
			s.check(t, at)
			mnt := filepath.Join(at, "mnt")
			if mounted(mnt) {
				t.Error("a mount is left")
				umount(t, mnt)
			}
			within(t, patience, "nothing runs any more", func() bool { return len(processes(at)) == 0 })
		})
		if !ok {
			t.Logf("again with: SHOAL_KILLPOINT=%s:%d in %q", k.point, k.count, s.name)
		}
	}
	t.Logf("%d of %d runs died, at %d points, in %s",
		died, len(kills), len(visited), time.Since(start).Round(time.Second))
	if died < len(kills)*8/10 {
		t.Errorf("only %d of %d runs died where they should", died, len(kills))
	}
	if total >= len(visits) {
		for point := range all {
			if !visited[point] {
				t.Errorf("no run died at %s", point)
			}
		}
	}
}

// Readers, kills and remounts in a row, without kill points: each kill comes after more reads, the cache is never
// wrong, and only what was being written is lost.
func TestKilledAgainAndAgain(t *testing.T) {
	dir, paths := tree(t, 4, 60, 48<<10)
	_, env := far(t, proxy.Options{Latency: 3 * time.Millisecond})
	source := bucket(t, dir)
	cache, mnt := t.TempDir(), t.TempDir()
	for i := range 6 {
		mountAt(t, env, source, mnt, "--cache-dir", cache, "--order", "torch:seed=1", "--kernel-cache", "off")
		pid := readStats(t, mnt).PID
		var wg sync.WaitGroup
		var reads atomic.Int64
		for k := range 8 {
			wg.Go(func() {
				for j := k; ; j += 8 {
					reads.Add(1)
					f := paths[j%len(paths)]
					got, err := os.ReadFile(filepath.Join(mnt, f))
					if err != nil {
						return
					}
					if want, e := os.ReadFile(filepath.Join(dir, f)); e != nil || !bytes.Equal(got, want) {
						t.Errorf("%s: wrong bytes", f)
					}
				}
			})
		}
		within(t, patience, "reads before the kill", func() bool { return reads.Load() > int64(20+50*i) })
		_ = syscall.Kill(pid, syscall.SIGKILL)
		wg.Wait()
		gone(t, pid)
	}
	mountAt(t, env, source, mnt, "--cache-dir", cache, "--kernel-cache", "off")
	readAll(t, mnt, dir, paths)
	waitKept(t, mnt, len(paths))
	umount(t, mnt)
	mustBeClean(t, cache)
	if left, _ := exec.Command("pgrep", "-f", mnt).Output(); len(bytes.TrimSpace(left)) > 0 {
		t.Errorf("processes are left: %s", left)
	}
}
