package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/minio/minio-go/v7"
	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/lab/rig/proxy"
)

// hangTime is how long the disk hangs: make night gives SHOAL_HANG=30s. The limits of the daemon are well below the
// shorter one.
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
	const most = 5 * time.Second // "no stall beyond a few seconds"
	for _, c := range []struct {
		name     string
		settings faultSettings
		hangs    bool
		reads    bool // strikes what is read: the readers begin with all on disk
	}{
		{"ENOSPC", faultSettings{
			Rules: []faultRule{{Op: faultWrite, Path: "cache/segments", Errno: "ENOSPC"}}}, false, false},
		{"EIO on writes", faultSettings{
			Rules: []faultRule{{Op: faultWrite, Path: "cache/segments", Errno: "EIO"}}}, false, false},
		{"EIO on fsync", faultSettings{
			Rules: []faultRule{{Op: faultSync, Path: "cache/segments", Errno: "EIO"},
				{Op: faultWrite, Path: "cache/segments", Errno: "EIO"}}}, false, false},
		{"EIO on reads", faultSettings{
			Rules: []faultRule{{Op: faultRead, Path: "cache/segments", Errno: "EIO"}}}, false, true},
		{"hangs on writes", faultSettings{Rules: []faultRule{{Path: "cache/segments", Hang: true}}},
			true, false},
		{"hangs on reads", faultSettings{Rules: []faultRule{{Path: "cache/segments", Hang: true}}},
			true, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel() // each waits for its own disk most of the time
			dir, paths := tree(t, 4, 60, 64<<10)
			_, env := far(t, proxy.Options{Latency: 2 * time.Millisecond})
			source := bucket(t, dir)
			disk := badDisk(t)
			cache := filepath.Join(disk.Dir, "cache")
			mnt := mount(t, env, source, "--cache-dir", cache, "--order", "none", "--kernel-cache", "off",
				"--memory", "160MiB")
			// Before the disk is let go: a daemon that waits for it cannot end.
			t.Cleanup(func() { _ = disk.Set(t.Context(), faultSettings{}) })
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
			r, late := startReading(t, 8, 200*time.Millisecond, mnt, dir, known), lag()
			within(t, patience, "the stats say that the disk is out of use", func() bool {
				return readStats(t, mnt).Disk.OutOfUse
			})
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
			if err := disk.Set(t.Context(), faultSettings{}); err != nil {
				t.Fatal(err)
			}
			within(t, patience, "the disk is taken back", func() bool { return !readStats(t, mnt).Disk.OutOfUse })
			files, longest := r.end()
			t.Logf("%d reads, the slowest %s; %v", files, longest.Round(time.Millisecond), s.Errors)
			if late := late(); longest > most+4*late {
				t.Errorf("a reader waited for %s, on a machine that was late by %s", longest, late)
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

// loopDisk makes an ext4 file system in a file, and mounts it. It needs root and a loop device, as all mounts here need
// root and /dev/fuse; without them the test fails with what losetup or mount says.
func loopDisk(t testing.TB, mib int64) (dir, image string) {
	t.Helper()
	run := func(name string, args ...string) string {
		out, err := exec.Command(name, args...).CombinedOutput()
		if err != nil {
			t.Fatalf("%s %v: %v: %s", name, args, err, out)
		}
		return strings.TrimSpace(string(out))
	}
	dir, image = t.TempDir(), filepath.Join(t.TempDir(), "image")
	write(t, image, nil)
	if err := os.Truncate(image, mib<<20); err != nil {
		t.Fatal(err)
	}
	device := run("losetup", "--find", "--show", image)
	t.Cleanup(func() { run("losetup", "--detach", device) })
	run("mkfs.ext4", "-q", device)
	if err := unix.Mount(device, dir, "ext4", 0, ""); err != nil {
		t.Fatalf("mount %s: %v", device, err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	return dir, image
}

// mappings returns what a process has mapped of files below dir.
func mappings(t testing.TB, pid int, dir string) (ranges []unix.RemoteIovec, names []string) {
	t.Helper()
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(maps)) {
		f := strings.Fields(line)
		if len(f) < 6 || !strings.HasPrefix(f[5], dir+"/") {
			continue
		}
		var from, to uintptr
		if _, err := fmt.Sscanf(f[0], "%x-%x", &from, &to); err != nil {
			t.Fatal(err)
		}
		ranges, names = append(ranges, unix.RemoteIovec{Base: from, Len: int(to - from)}), append(names, f[5])
	}
	return ranges, names
}

// pageOut makes a process's next access to what it has mapped of files below dir go to the disk.
func pageOut(t testing.TB, pid int, dir string) {
	t.Helper()
	ranges, _ := mappings(t, pid, dir)
	if len(ranges) == 0 {
		return
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	for i := range ranges {
		_, _, errno := unix.Syscall6(unix.SYS_PROCESS_MADVISE, uintptr(fd), uintptr(unsafe.Pointer(&ranges[i])), 1,
			unix.MADV_PAGEOUT, 0, 0)
		if errno != 0 {
			t.Fatalf("process_madvise: %v", errno)
		}
	}
}

// The disk of the cache loses all that it held, under its file system and under all that the daemon may have mapped:
// every read and listing goes on, from memory and the store, and no verb ends the daemon.
func TestDiskIsGone(t *testing.T) {
	for _, name := range []string{"clear", "encrypted"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir, paths := tree(t, 4, 50, 64<<10)
			_, env := far(t, proxy.Options{})
			source := bucket(t, dir)
			disk, image := loopDisk(t, 128)
			cache := filepath.Join(disk, "cache")
			flags := []string{"--cache-dir", cache, "--order", "none", "--kernel-cache", "off", "--memory", "160MiB"}
			if name == "encrypted" {
				key := filepath.Join(t.TempDir(), "key")
				if err := os.WriteFile(key, []byte("000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"),
					0o600); err != nil {
					t.Fatal(err)
				}
				flags = append(flags, "--encryption-key-file", key)
			}
			mnt := mount(t, env, source, flags...)
			pid := readStats(t, mnt).PID
			readAll(t, mnt, dir, paths[:100])
			waitKept(t, mnt, 100)

			unix.Sync()
			pageOut(t, pid, disk)
			if err := os.Truncate(image, 0); err != nil {
				t.Fatal(err)
			}
			dropCaches(t)
			alive := func(after string) {
				t.Helper()
				if err := syscall.Kill(pid, 0); err != nil {
					t.Fatalf("the daemon has ended after %s", after)
				}
			}
			sameTree(t, mnt, dir, paths)
			alive("a walk")
			readAll(t, mnt, dir, paths)
			alive("reads")
			// What the file system writes makes the image longer again: from there on what was lost reads as zeros.
			within(t, patience, "the stats say that the disk fails", func() bool {
				d := readStats(t, mnt).Disk
				return d.OutOfUse || d.Corrupt > 0
			})
			write(t, filepath.Join(dir, "class00/new.jpg"), []byte("new"))
			upload(t, dir, bucketName(t))
			for _, verb := range [][]string{
				{"stat", mnt}, {"refresh", mnt}, {"cache", "ls", cache}, {"cache", "quota", cache, source, "1GiB"},
				{"cache", "pin", cache, source},
				{"fsck", cache}, {"health", mnt}, {"warm", source, "--cache-dir", cache},
			} {
				_, errs, code := shoal(t, env, verb...)
				t.Logf("%v: exit %d, %.200s", verb, code, errs)
				alive(verb[0])
			}
			readAll(t, mnt, dir, paths)
			alive("all that")
			if _, names := mappings(t, pid, disk); len(names) > 0 {
				t.Errorf("mapped: %v", names)
			}
			umount(t, mnt)
			gone(t, pid)
		})
	}
}

// Other processes fill the disk under the cache, and empty it again.
func TestDiskFillsUp(t *testing.T) {
	long(t)
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
	if err := disk.Set(t.Context(), faultSettings{Capacity: used + 4<<20}); err != nil {
		t.Fatal(err)
	}
	known := paths[:200] // the others are for after it
	readAll(t, mnt, dir, known)
	within(t, patience, "the stats say that the disk is out of use", func() bool {
		return readStats(t, mnt).Disk.OutOfUse
	})
	readAll(t, mnt, dir, known)
	if now, err := disk.Stats(t.Context()); err != nil || now.Failed == d.Failed {
		t.Errorf("no write failed: %+v, %v", now, err)
	}
	if err := disk.Set(t.Context(), faultSettings{}); err != nil {
		t.Fatal(err)
	}
	within(t, patience, "the disk is taken back", func() bool { return !readStats(t, mnt).Disk.OutOfUse })
	kept := readStats(t, mnt).Disk.Kept
	readAll(t, mnt, dir, paths)
	waitKept(t, mnt, kept+40)
	umount(t, mnt)
	mustBeClean(t, cache)
}

// A cache of a hundredth of the dataset, in memory and on disk, with 64 readers: limits hold, nothing
// starves, every byte is right.
func TestHundredth(t *testing.T) {
	long(t)
	dir, paths := tree(t, 8, 250, 96<<10) // about 190 MiB
	_, env := far(t, proxy.Options{Latency: 2 * time.Millisecond})
	source := bucket(t, dir)
	for _, order := range []string{"torch:seed=1", "none"} {
		cache := t.TempDir()
		const cacheSize, memory = 2 << 20, 128 << 20
		mnt := mount(t, env, source, "--cache-dir", cache, "--cache-size", fmt.Sprint(cacheSize),
			"--memory", fmt.Sprint(memory), "--order", order, "--kernel-cache", "off")
		r := startReading(t, 64, 0, mnt, dir, torchOrder(t, "torch:seed=1", paths))
		within(t, patience, "one epoch", func() bool {
			r.mu.Lock()
			defer r.mu.Unlock()
			return r.files >= len(paths)
		})
		files, longest := r.end()
		s := readStats(t, mnt)
		t.Logf("--order %s: %d reads, the slowest %s, RSS %d MiB, kept %d",
			order, files, longest.Round(time.Millisecond), s.Memory.RSS>>20, s.Disk.Kept)
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

// The disk of the cache becomes read-only: what would write to it says so, and reads go on.
func TestReadOnlyDisk(t *testing.T) {
	dir, paths := tree(t, 1, 8, 4<<10)
	_, env := far(t, proxy.Options{})
	source := bucket(t, dir)
	disk := badDisk(t)
	cache := filepath.Join(disk.Dir, "cache")
	mnt := mount(t, env, source, "--cache-dir", cache, "--order", "none", "--memory", "160MiB")
	t.Cleanup(func() { _ = disk.Set(t.Context(), faultSettings{}) })
	readAll(t, mnt, dir, paths[:4])
	waitKept(t, mnt, 4)
	err := disk.Set(t.Context(),
		faultSettings{Rules: []faultRule{{Op: faultMake, Path: "cache", Errno: "EROFS"},
			{Op: faultWrite, Path: "cache", Errno: "EROFS"}}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := store(t).PutObject(t.Context(), bucketName(t), "train/class00/new.jpg", strings.NewReader("new"), 3,
		minio.PutObjectOptions{DisableContentSha256: true}); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{{"cache", "pin", cache, source}, {"cache", "quota", cache, source, "1GiB"},
		{"refresh", mnt}} {
		_, errs, code := shoal(t, env, args...)
		if code != 1 || !strings.Contains(errs, "read-only") || !strings.Contains(errs, cache) ||
			!strings.Contains(errs, "(") {
			t.Errorf("shoal %s: exit %d: %s", strings.Join(args, " "), code, errs)
		}
	}
	readAll(t, mnt, dir, paths)
}
