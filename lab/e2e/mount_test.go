package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/lab/rig/proxy"
	"github.com/shoalfs/shoal/lab/rig/s3server"
	"github.com/shoalfs/shoal/lab/rig/uringswitch"
)

// Every byte is right, cold and warm, with 8 readers, and a warm pass asks the store for nothing.
func TestEveryByte(t *testing.T) {
	dir, paths := tree(t, 6, 60, 64<<10)
	p, env := far(t, proxy.Options{Latency: 5 * time.Millisecond, Sigma: 0.3})
	source := bucket(t, dir)
	cache := t.TempDir()
	mnt := mount(t, env, source, "--cache-dir", cache, "--kernel-cache", "off")
	readAll(t, mnt, dir, paths)
	s := readStats(t, mnt)
	if s.Gets-s.Hedges.Sent != int64(len(paths)) || s.Opens != int64(len(paths)) {
		t.Errorf("cold: %d GETs and %d opens for %d files", s.Gets, s.Opens, len(paths))
	}
	umount(t, mnt)

	before := p.Stats()
	mountAt(t, env, source, mnt, "--cache-dir", cache)
	dropCaches(t)
	readAll(t, mnt, dir, paths)
	s = readStats(t, mnt)
	if d := p.Stats().Sub(before); d.Gets != 0 || d.Lists != 0 {
		t.Errorf("the second mount sent %d GETs and %d listings", d.Gets, d.Lists)
	}
	if s.Hits.Keep < int64(len(paths)) || s.Misses != 0 {
		t.Errorf("warm: %+v", s)
	}
	umount(t, mnt)

	// A warm start with a wrong key says that it is the key. It asks by a HEAD, whose refusal has no cause.
	_, errs, code := shoal(t, append(env, "AWS_ACCESS_KEY_ID=nobody"), "mount", source, mnt, "--cache-dir", cache,
		"--daemon")
	if code != 1 || !strings.Contains(errs, "check AWS_ACCESS_KEY_ID") {
		t.Errorf("a wrong key: exit %d, %s", code, errs)
	}
}

// TestMountOverIOURing: the same by io_uring, cold and warm, and then without the switch, which is the machine's.
func TestMountOverIOURing(t *testing.T) {
	const enable = uringswitch.Path
	uringswitch.Off(t)
	if err := os.WriteFile(enable, []byte("Y"), 0); err != nil {
		t.Fatal(err)
	}
	dir, paths := tree(t, 4, 50, 64<<10)
	_, env := far(t, proxy.Options{Latency: 5 * time.Millisecond, Sigma: 0.3})
	source, cache := bucket(t, dir), t.TempDir()
	mnt := mount(t, env, source, "--cache-dir", cache, "--kernel-cache", "off", "--fuse-transport", "uring")
	readAll(t, mnt, dir, paths)
	umount(t, mnt)
	mountAt(t, env, source, mnt, "--cache-dir", cache, "--kernel-cache", "off")
	dropCaches(t)
	readAll(t, mnt, dir, paths)
	out, err := exec.Command(shoalBin, "stat", mnt).Output()
	if err != nil || !strings.Contains(string(out), "by io_uring: ") {
		t.Errorf("%s, %v", out, err)
	}
	if s := readStats(t, mnt); s.Misses != 0 || s.Hits.Keep < int64(len(paths)) {
		t.Errorf("warm: %+v", s)
	}
	umount(t, mnt)

	if err := os.WriteFile(enable, []byte("N"), 0); err != nil {
		t.Fatal(err)
	}
	if _, text, code := shoal(t, env, "mount", source, mnt, "--cache-dir", cache, "--fuse-transport",
		"uring"); code != 1 || !strings.Contains(text, "echo Y > "+enable) {
		t.Errorf("%d %s", code, text)
	}
	mountAt(t, env, source, mnt, "--cache-dir", cache, "--kernel-cache", "off")
	readAll(t, mnt, dir, paths)
}

// With the order known the daemon is ahead of a slow store.
func TestKnownOrderIsAhead(t *testing.T) {
	dir, paths := tree(t, 4, 100, 32<<10)
	_, env := far(t, proxy.Options{Latency: 30 * time.Millisecond, Sigma: 0.3})
	source := bucket(t, dir)
	mnt := mount(t, env, source, "--order", "torch:seed=7", "--kernel-cache", "off")
	ordered := torchOrder(t, "torch:seed=7", paths)
	start := time.Now()
	readAll(t, mnt, dir, ordered)
	s := readStats(t, mnt)
	t.Logf("%d files in %s, %+v", len(paths), time.Since(start), s)
	if s.Gets-s.Hedges.Sent != int64(len(paths)) {
		t.Errorf("%d GETs for %d files", s.Gets, len(paths))
	}
	if s.Misses > int64(len(paths)/10) {
		t.Errorf("%d of %d reads had to start their own fetch", s.Misses, len(paths))
	}
	if s.Order.Spec != "torch:seed=7" || s.Order.Position != len(paths) {
		t.Errorf("order %+v", s.Order)
	}
	// The next epoch is recognised by its head.
	readAll(t, mnt, dir, torchOrder(t, "torch:seed=7", paths, "--epoch", "1")[:200])
	if s = readStats(t, mnt); s.Order.Epoch != 1 {
		t.Errorf("after 200 reads of epoch 1: %+v", s.Order)
	}
}

// A dataset larger than the cache: what is kept is never evicted, the rest passes through memory, and
// both limits hold.
func TestLimitsHold(t *testing.T) {
	dir, paths := tree(t, 4, 200, 96<<10) // about 77 MiB
	_, env := far(t, proxy.Options{Latency: 5 * time.Millisecond})
	source := bucket(t, dir)
	cache := t.TempDir()
	const cacheSize, memory = 48 << 20, 160 << 20
	mnt := mount(t, env, source, "--cache-dir", cache, "--cache-size", fmt.Sprint(cacheSize),
		"--memory", fmt.Sprint(memory),
		"--order", "torch:seed=3", "--kernel-cache", "off")
	var last stats
	for epoch := range 3 {
		readAll(t, mnt, dir, torchOrder(t, "torch:seed=3", paths, "--epoch", fmt.Sprint(epoch)))
		s := readStats(t, mnt)
		t.Logf("epoch %d: %d GETs, %d kept, hits %+v, misses %d, RSS %d MiB, peak ledger %d MiB",
			epoch, s.Gets-last.Gets, s.Disk.Kept, s.Hits, s.Misses, s.Memory.RSS>>20, s.Memory.Peak>>20)
		if s.Memory.RSS > memory+100<<20 {
			t.Errorf("RSS %d with --memory %d", s.Memory.RSS, memory)
		}
		if s.Memory.Peak > s.Memory.Limit {
			t.Errorf("ledger peak %d over %d", s.Memory.Peak, s.Memory.Limit)
		}
		if used := diskUsage(t, cache); used > cacheSize {
			t.Errorf("%d bytes in the cache directory with --cache-size %d", used, cacheSize)
		}
		// Kept once, kept for good: a later epoch fetches what is missing, and little twice.
		if missing := int64(len(paths) - s.Disk.Kept); epoch > 0 && s.Gets-last.Gets > missing+missing/4+256 {
			t.Errorf("epoch %d: %d GETs for %d files that are not kept", epoch, s.Gets-last.Gets, missing)
		}
		last = s
	}
	if last.Disk.Kept < len(paths)/4 {
		t.Errorf("only %d of %d files kept in %d MiB", last.Disk.Kept, len(paths), cacheSize>>20)
	}
}

func diskUsage(t *testing.T, dir string) int64 {
	t.Helper()
	var sum int64
	err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		var st unix.Stat_t
		if err == nil {
			err = unix.Lstat(path, &st)
		}
		if errors.Is(err, os.ErrNotExist) && path != dir {
			return nil // a daemon that runs removes and renames files meanwhile
		}
		sum += st.Blocks * 512
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return sum
}

// refresh lists again: new files appear, changed ones are read anew, and what did not change stays
// cached.
func TestRefresh(t *testing.T) {
	dir, paths := tree(t, 2, 20, 8<<10)
	p, env := far(t, proxy.Options{})
	source := bucket(t, dir)
	mnt := mount(t, env, source)
	readAll(t, mnt, dir, paths)
	if out := mustShoal(t, nil, "refresh", mnt); !strings.HasPrefix(out, "unchanged") {
		t.Errorf("refresh of the same listing: %s", out)
	}

	write(t, filepath.Join(dir, "class00/new.jpg"), []byte("new"))
	write(t, filepath.Join(dir, "class00/img0000.jpg"), []byte("changed, and of another length"))
	if err := os.Remove(filepath.Join(dir, "class01/img0001.jpg")); err != nil {
		t.Fatal(err)
	}
	upload(t, dir, bucketName(t))
	if _, err := os.Stat(filepath.Join(mnt, "class00/new.jpg")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("before the refresh: %v", err)
	}
	before := p.Stats()
	if out := mustShoal(t, nil, "refresh", mnt); !strings.HasPrefix(out, "version ") {
		t.Errorf("refresh: %s", out)
	}
	var after []string
	for _, f := range append(paths, "class00/new.jpg") {
		if f != "class01/img0001.jpg" {
			after = append(after, f)
		}
	}
	readAll(t, mnt, dir, after)
	if _, err := os.Stat(filepath.Join(mnt, "class01/img0001.jpg")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a removed file: %v", err)
	}
	if d := p.Stats().Sub(before); d.Gets != 2 {
		t.Errorf("%d GETs after a refresh that changed two files", d.Gets)
	}
}

// An object that changed under the mount is ESTALE, names itself, and is never remapped in silence.
func TestChangedObject(t *testing.T) {
	dir, paths := tree(t, 1, 3, 8<<10)
	_, env := far(t, proxy.Options{})
	source := bucket(t, dir)
	mnt := mount(t, env, source)
	write(t, filepath.Join(dir, paths[0]), []byte("another version"))
	if err := os.Remove(filepath.Join(dir, paths[1])); err != nil {
		t.Fatal(err)
	}
	upload(t, dir, bucketName(t))
	for _, p := range paths[:2] {
		if _, err := os.ReadFile(filepath.Join(mnt, p)); !errors.Is(err, syscall.ESTALE) {
			t.Errorf("%s: %v, want ESTALE", p, err)
		}
	}
	readAll(t, mnt, dir, paths[2:])
	var text string
	for _, e := range readStats(t, mnt).Errors {
		text += e.Text + "\n"
	}
	for _, p := range paths[:2] {
		if !strings.Contains(text, p) {
			t.Errorf("the stats' errors do not name %s:\n%s", p, text)
		}
	}
}

// The plan file's rules, through a shell as users write it.
func TestPlanFile(t *testing.T) {
	dir, paths := tree(t, 2, 50, 16<<10)
	_, env := far(t, proxy.Options{Latency: 10 * time.Millisecond})
	source := bucket(t, dir)
	mnt := mount(t, env, source, "--kernel-cache", "off")
	sh := func(script string) error {
		cmd := exec.Command("sh", "-c", script)
		cmd.Dir = mnt
		return cmd.Run()
	}
	ordered := torchOrder(t, "torch:seed=11", paths)
	list := filepath.Join(t.TempDir(), "list")
	write(t, list, []byte(strings.Join(ordered, "\n")+"\n"))
	if err := sh("cat " + list + " > .shoal/plan"); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(filepath.Join(mnt, ".shoal/plan"))
	if want := strings.Join(ordered, "\n") + "\n"; err != nil || string(got) != want {
		t.Errorf("the plan reads back as %d bytes, %v", len(got), err)
	}
	// A plan that names an unknown path is refused whole, and the old one stays.
	if err := os.WriteFile(filepath.Join(mnt, ".shoal/plan"), []byte(paths[0]+"\nclass00/none.jpg\n"),
		0o644); !errors.Is(err, syscall.EINVAL) {
		t.Errorf("a bad plan: %v, want EINVAL", err)
	}
	text, err := os.ReadFile(filepath.Join(mnt, ".shoal/order"))
	if err != nil || !strings.Contains(string(text), "line 2") || !strings.Contains(string(text), "class00/none.jpg") {
		t.Errorf(".shoal/order: %v\n%s", err, text)
	}
	if again, _ := os.ReadFile(filepath.Join(mnt, ".shoal/plan")); !bytes.Equal(again, got) {
		t.Error("a refused plan replaced the one in force")
	}
	within(t, patience, "all of the plan is fetched", func() bool { return readStats(t, mnt).Lead >= len(paths) })
	readAll(t, mnt, dir, ordered)
	if s := readStats(t, mnt); s.Misses+s.Joined != 0 || s.Order.Spec != "plan" {
		t.Errorf("a planned epoch waited: %+v", s)
	}
	// ImageFolder must not see the control folder as a class.
	entries, err := os.ReadDir(mnt)
	if err != nil || len(entries) != 2 {
		t.Errorf("root lists %v, %v", entries, err)
	}
}

// kill -9, and the next mount replaces the dead mount point and is warm.
func TestKilledDaemon(t *testing.T) {
	dir, paths := tree(t, 2, 30, 32<<10)
	p, env := far(t, proxy.Options{})
	source := bucket(t, dir)
	cache := t.TempDir()
	mnt := mount(t, env, source, "--cache-dir", cache)
	readAll(t, mnt, dir, paths)
	waitKept(t, mnt, len(paths))
	pid := readStats(t, mnt).PID
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	within(t, patience, "the mount is dead", func() bool {
		_, err := os.Stat(filepath.Join(mnt, "none")) // nothing that the kernel may know for hours
		return errors.Is(err, syscall.ENOTCONN)
	})
	before := p.Stats()
	mountAt(t, env, source, mnt, "--cache-dir", cache)
	dropCaches(t)
	readAll(t, mnt, dir, paths)
	if d := p.Stats().Sub(before); d.Gets != 0 {
		t.Errorf("%d GETs after a kill", d.Gets)
	}
}

// A full disk costs the disk tier, not the reads, and never the daemon.
func TestFullDisk(t *testing.T) {
	dir, paths := tree(t, 2, 150, 96<<10) // about 29 MiB
	p, env := far(t, proxy.Options{})
	source := bucket(t, dir)
	small := t.TempDir()
	if err := unix.Mount("tmpfs", small, "tmpfs", 0, "size=24m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(small, unix.MNT_DETACH) })
	cache, ballast := filepath.Join(small, "cache"), filepath.Join(small, "ballast")
	fill := func() {
		f, err := os.Create(ballast)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		for block := make([]byte, 4096); ; {
			if _, err := f.Write(block); err != nil {
				return
			}
		}
	}
	healthy := func() {
		log, err := os.ReadFile(filepath.Join(cache, "shoal.log"))
		if err != nil {
			t.Fatal(err)
		}
		for _, word := range []string{"SIGBUS", "fault", "panic", "reserved"} {
			if strings.Contains(string(log), word) {
				t.Fatalf("log:\n%.3000s", log)
			}
		}
	}
	mnt := mount(t, env, source, "--cache-dir", cache, "--kernel-cache", "off")
	readAll(t, mnt, dir, paths)
	readAll(t, mnt, dir, paths)
	s := readStats(t, mnt)
	if !s.Disk.OutOfUse || len(s.Errors) == 0 || s.Disk.Kept < 100 {
		t.Errorf("the stats do not say that the disk is full: %+v", s)
	}
	umount(t, mnt)
	healthy()

	// Somebody else takes the last block, before and while it is mounted.
	fill()
	if _, errs, code := shoal(t, env, "mount", source, mnt, "--cache-dir", cache); code != 1 ||
		!strings.Contains(errs, "no space left") || !strings.Contains(errs, "--cache-dir") {
		t.Errorf("a start on a full disk: exit %d, %s", code, errs)
	}
	if err := os.Remove(ballast); err != nil {
		t.Fatal(err)
	}
	before := p.Stats()
	mountAt(t, env, source, mnt, "--cache-dir", cache, "--kernel-cache", "off")
	if d := p.Stats().Sub(before); d.Lists != 0 {
		t.Errorf("%d listings after the disk had been full", d.Lists)
	}
	fill()
	readAll(t, mnt, dir, paths)
	umount(t, mnt)
	healthy()
	if err := os.Remove(ballast); err != nil {
		t.Fatal(err)
	}
	before = p.Stats()
	mountAt(t, env, source, mnt, "--cache-dir", cache, "--kernel-cache", "off")
	readAll(t, mnt, dir, paths)
	if d := p.Stats().Sub(before); d.Lists != 0 || d.Gets > 250 {
		t.Errorf("%d listings and %d GETs after the disk had been full", d.Lists, d.Gets)
	}
	umount(t, mnt)
	healthy()
}

// After a mount is gone nothing is left: no process, no lock, no mount.
func TestNothingIsLeft(t *testing.T) {
	dir, paths := tree(t, 1, 10, 8<<10)
	_, env := far(t, proxy.Options{})
	source := bucket(t, dir)
	cache := t.TempDir()
	for _, end := range []string{"umount", "SIGTERM", "SIGINT", "SIGHUP"} {
		mnt := mount(t, env, source, "--cache-dir", cache, "--order", "torch:seed=1")
		readAll(t, mnt, dir, paths)
		s := readStats(t, mnt)
		switch end {
		case "umount":
			umount(t, mnt)
		case "SIGTERM":
			_ = syscall.Kill(s.PID, syscall.SIGTERM)
		case "SIGINT":
			_ = syscall.Kill(s.PID, syscall.SIGINT)
		case "SIGHUP":
			_ = syscall.Kill(s.PID, syscall.SIGHUP)
		}
		gone(t, s.PID)
		if mounted(mnt) {
			t.Errorf("%s: still mounted", end)
		}
		log, err := os.ReadFile(filepath.Join(cache, "shoal.log"))
		if err != nil || strings.Contains(string(log), "still reserved") || strings.Contains(string(log), "panic") {
			t.Errorf("%s: log: %v\n%s", end, err, log)
		}
	}
}

// A start with --daemon that is interrupted, or killed, leaves no daemon that mounts later.
func TestInterruptedStart(t *testing.T) {
	dir, _ := tree(t, 1, 10, 1<<10)
	p, env := far(t, proxy.Options{})
	source := bucket(t, dir)
	for _, sig := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGKILL} {
		// Longer than this process may be kept from sending the signal. A daemon whose parent was killed sees it after
		// that.
		if err := p.Set(proxy.Options{
			Faults: []proxy.Fault{{Kind: proxy.Slow, Op: proxy.OpList, For: 10 * time.Second}}}); err != nil {
			t.Fatal(err)
		}
		mnt, cache := t.TempDir(), t.TempDir()
		cmd := exec.Command(shoalBin, "mount", source, mnt, "--daemon", "--cache-dir", cache)
		cmd.Env = append(os.Environ(), env...)
		var errs bytes.Buffer
		cmd.Stderr = &errs
		lists := p.Stats().Lists
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		within(t, patience, "the daemon lists", func() bool { return p.Stats().Lists > lists })
		_ = cmd.Process.Signal(sig)
		err := cmd.Wait()
		if sig != syscall.SIGKILL &&
			(cmd.ProcessState.ExitCode() != 1 || !strings.Contains(errs.String(), "interrupted")) {
			t.Errorf("%s: %v\n%s", sig, err, errs.String())
		}
		// The cache directory is free again once the daemon is gone.
		if err := p.Set(proxy.Options{}); err != nil {
			t.Fatal(err)
		}
		within(t, patience, sig.String()+": the daemon is gone", func() bool { return len(processes(mnt)) == 0 })
		other := t.TempDir()
		mountAt(t, env, source, other, "--cache-dir", cache)
		umount(t, other)
		if mounted(mnt) {
			t.Errorf("%s: mounted after all", sig)
			umount(t, mnt)
		}
	}
}

// A daemon that is told to end while its mount is being read ends in good order.
func TestEndUnderLoad(t *testing.T) {
	dir, _ := tree(t, 2, 100, 64<<10)
	_, env := far(t, proxy.Options{Latency: 30 * time.Millisecond})
	cache := t.TempDir()
	mnt := mount(t, env, bucket(t, dir), "--cache-dir", cache, "--order", "torch:seed=1", "--kernel-cache", "off")
	// Readers in a process of their own, which has files open whatever happens.
	reader := exec.Command("/usr/bin/python3", "-c", `
import os, sys, threading
hold = open(sys.argv[1] + "/class00/img0000.jpg", "rb")
def read(k):
    try:
        while True:
            for i in range(k, 100, 8):
                open("%s/class01/img%04d.jpg" % (sys.argv[1], i), "rb").read()
            if not k:
                print("read", flush=True)
    except OSError:
        pass
for k in range(8):
    threading.Thread(target=read, args=(k,)).start()
sys.stdin.read()`, mnt)
	in, out := piped(t, reader)
	defer func() { _ = in.Close(); _ = reader.Wait() }()
	if _, err := out.Read(make([]byte, 8)); err != nil {
		t.Fatal(err)
	}
	pid := readStats(t, mnt).PID
	_ = syscall.Kill(pid, syscall.SIGTERM)
	gone(t, pid)
	if mounted(mnt) {
		t.Error("still mounted")
	}
	log, err := os.ReadFile(filepath.Join(cache, "shoal.log"))
	if err != nil || !strings.Contains(string(log), "in use") {
		t.Errorf("%v: the log does not say that the mount was in use:\n%s", err, log)
	}
	for _, word := range []string{"reserved", "panic", "SIGSEGV", "fatal"} {
		if strings.Contains(string(log), word) {
			t.Errorf("log:\n%s", log)
		}
	}
}

// What goes wrong is told in one line that names the thing, the cause and the remedy.
func TestErrors(t *testing.T) {
	dir, _ := tree(t, 1, 2, 4<<10)
	env := s3server.Env(server.URL)
	source := bucket(t, dir)
	with := func(kv ...string) []string { return append(append([]string{}, env...), kv...) }
	full := t.TempDir()
	write(t, filepath.Join(full, "file"), nil)
	busyCache := t.TempDir()
	busyMount := mount(t, env, source)
	// A process that has the lock and no socket to attach to, as fsck has.
	lock, err := os.Create(filepath.Join(busyCache, "lock"))
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	fmt.Fprintf(lock, "pid %d: the test\n", os.Getpid())
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	newer := t.TempDir()
	write(t, filepath.Join(newer, "FORMAT"), []byte("shoal cache 999\n"))
	for _, c := range []struct {
		name string
		env  []string
		args []string
		code int
		want []string // all in the one line on stderr
	}{
		{"wrong endpoint", with("AWS_ENDPOINT_URL=http://127.0.0.1:1"), []string{"mount", source, "MNT"}, 1,
			[]string{"127.0.0.1:1", "AWS_ENDPOINT_URL"}},
		{"wrong bucket", env, []string{"mount", "s3://no-such-bucket/x", "MNT"}, 1,
			[]string{"no-such-bucket", "not found"}},
		{"wrong secret", with("AWS_SECRET_ACCESS_KEY=wrong"), []string{"mount", source, "MNT"}, 1,
			[]string{"denied", "AWS_SECRET_ACCESS_KEY"}},
		{"wrong key", with("AWS_ACCESS_KEY_ID=nobody"), []string{"mount", source, "MNT"}, 1,
			[]string{"denied", "AWS_ACCESS_KEY_ID"}},
		{"empty prefix", env, []string{"mount", source + "/nothing", "MNT"}, 1, []string{"nothing", "prefix"}},
		{"bad source", env, []string{"mount", "gs://bucket", "MNT"}, 2, []string{"gs://bucket", "s3://"}},
		{"missing mount point", env, []string{"mount", source, "/no/such/dir"}, 1, []string{"/no/such/dir", "mkdir"}},
		{"mount point not empty", env, []string{"mount", source, full}, 1, []string{full, "empty"}},
		{"already mounted", env, []string{"mount", source, busyMount}, 1, []string{busyMount, "umount"}},
		{"cache in use", env, []string{"mount", source, "MNT", "--cache-dir", busyCache}, 1,
			[]string{busyCache, "pid"}},
		{"newer cache", env, []string{"mount", source, "MNT", "--cache-dir", newer}, 1, []string{newer, "newer"}},
		{"little memory", env, []string{"mount", source, "MNT", "--memory", "16MiB"}, 1,
			[]string{"16 MiB", "--memory"}},
		{"bad size", env, []string{"mount", source, "MNT", "--memory", "lots"}, 2, []string{"lots", "--memory"}},
		{"bad order", env, []string{"mount", source, "MNT", "--order", "torhc:seed=1"}, 2, []string{"torhc", "torch"}},
		{"nothing numbered", env, []string{"mount", source, "MNT", "--order", "torch:seed=1", "--samples", "*.png"}, 1,
			[]string{"*.png", "--samples '*'"}},
		{"bad samples", env, []string{"mount", source, "MNT", "--samples", "["}, 2,
			[]string{"--samples", "[", "*.jpg"}},
		{"bad kernel cache", env, []string{"mount", source, "MNT", "--kernel-cache", "maybe"}, 2,
			[]string{"maybe", "auto, on or off"}},
		{"bad transport", env, []string{"mount", source, "MNT", "--fuse-transport", "dbus"}, 2,
			[]string{"dbus", "auto, uring or dev"}},
		{"cache under a file", env, []string{"mount", source, "MNT", "--cache-dir", full + "/file/cache"}, 1,
			[]string{full, "not a directory", "--cache-dir"}},
		{"cache in the source", env, []string{"mount", dir, "MNT", "--cache-dir", filepath.Join(dir, "cache")}, 2,
			[]string{dir, "the source", "--cache-dir outside"}},
		{"cache in the mount point", env, []string{"mount", source, "MNT", "--cache-dir", "MNT/cache"}, 2,
			[]string{"/cache lies in the mount point", "--cache-dir outside"}},
		{"bad flag", env, []string{"mount", source, "MNT", "--nope"}, 2, []string{"--nope", "--help"}},
		{"no arguments", env, []string{"mount"}, 2, []string{"--help"}},
		{"unknown verb", env, []string{"munt"}, 2, []string{"munt"}},
		{"stat of nothing", env, []string{"stat", full}, 1, []string{full, "shoal mount"}},
		{"umount of nothing", env, []string{"umount", full}, 1, []string{full, "not"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			mnt := t.TempDir()
			args := append([]string{}, c.args...)
			for i := range args {
				if rest, ok := strings.CutPrefix(args[i], "MNT"); ok {
					args[i] = mnt + rest
				}
			}
			joined := strings.Join(args, " ")
			if args[0] == "mount" && !strings.Contains(joined, "--cache-dir") && len(args) > 1 {
				args = append(args, "--cache-dir", t.TempDir())
			}
			for _, daemon := range []bool{false, true} {
				if daemon {
					if args[0] != "mount" {
						continue
					}
					args = append(args, "--daemon")
				}
				start := time.Now()
				_, errs, code := shoal(t, c.env, args...)
				lines := strings.Split(strings.TrimSpace(errs), "\n")
				last := lines[len(lines)-1]
				if code != c.code || !strings.HasPrefix(last, "shoal: ") {
					t.Errorf("exit %d, want %d:\n%s", code, c.code, errs)
				}
				for _, w := range c.want {
					if !strings.Contains(last, w) {
						t.Errorf("the error does not say %q:\n%s", w, errs)
					}
				}
				if strings.Contains(errs, "shoal-test-secret") {
					t.Errorf("a secret in the error text:\n%s", errs)
				}
				if took := time.Since(start); took > 30*time.Second { // on a busy machine
					t.Errorf("told only after %s", took)
				}
				t.Logf("%s", last)
			}
			if mounted(mnt) {
				t.Error("a failed mount left a mount")
			}
		})
	}
}
