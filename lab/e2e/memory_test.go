package e2e

import (
	"bytes"
	"cmp"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/shoalfs/shoal/gpuingest/jpeg"
	"github.com/shoalfs/shoal/lab/rig/s3server"
)

// oddPictures adds JPEG files to dir that take much memory to decode or to recode: large ones, progressive ones, ones
// with all their chroma, grey ones and CMYK.
func oddPictures(t testing.TB, dir string) (paths []string) {
	t.Helper()
	for i, o := range []struct {
		w, h int
		e    jpeg.Encoding
	}{
		{4000, 3000, jpeg.Encoding{Progressive: true, Quality: 80, Subsampling: jpeg.Sub420}},
		{4000, 3000, jpeg.Encoding{Progressive: true, Quality: 60, Subsampling: jpeg.Sub444}},
		{4000, 3000, jpeg.Encoding{Quality: 85, Subsampling: jpeg.Sub420}},
		{4000, 3000, jpeg.Encoding{Quality: 70, Subsampling: jpeg.Sub444, Optimize: true}},
		{6000, 4000, jpeg.Encoding{Quality: 50, Subsampling: jpeg.Sub420, RestartRows: 1}},
		{4000, 3000, jpeg.Encoding{Quality: 80, Components: 1}},
		{3000, 2000, jpeg.Encoding{Progressive: true, Quality: 75, Components: 1}},
		{2500, 2000, jpeg.Encoding{Quality: 80, Components: 4, YCCK: true, Subsampling: jpeg.Sub420}},
		{2000, 1500, jpeg.Encoding{Progressive: true, Quality: 80, Components: 4, Subsampling: jpeg.Sub444}},
		{1600, 1200, jpeg.Encoding{Progressive: true, Quality: 90, Subsampling: jpeg.Sub422}},
		{1600, 1200, jpeg.Encoding{Quality: 95, Subsampling: jpeg.Sub440}},
		{9000, 400, jpeg.Encoding{Progressive: true, Quality: 85, Subsampling: jpeg.Sub411}},
	} {
		n := cmp.Or(o.e.Components, 3)
		pix, state := make([]byte, o.w*o.h*n), uint32(i)
		for y := range o.h {
			for x := range o.w {
				state = state*1664525 + 1013904223
				for c := range n {
					pix[(y*o.w+x)*n+c] = byte(x/(7+c) + y/5 + int(state>>28)*((x/200+y/100)%3))
				}
			}
		}
		data, err := jpeg.EncodeWith(nil, pix, o.w, o.h, o.e)
		if err != nil {
			t.Fatal(err)
		}
		p := fmt.Sprintf("odd/%02d.jpg", i)
		write(t, filepath.Join(dir, p), data)
		paths = append(paths, p)
	}
	return paths
}

// memoryGroup makes a memory cgroup with a limit. enter is the begin of a shell's line that is to run in it; killed
// returns how many processes the kernel has killed there.
func memoryGroup(t testing.TB, limit int64) (enter string, killed func() int) {
	t.Helper()
	own, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		t.Fatal(err)
	}
	at, limits, events := "", "memory.max", "memory.events"
	for line := range strings.Lines(strings.TrimSpace(string(own))) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		switch {
		case f[1] == "memory":
			at, limits, events = "/sys/fs/cgroup/memory"+f[2], "memory.limit_in_bytes", "memory.oom_control"
		case f[1] == "" && at == "":
			at = "/sys/fs/cgroup" + f[2]
		}
	}
	at = filepath.Join(at, fmt.Sprintf("shoal-test-%d", os.Getpid()))
	if err := os.Mkdir(at, 0o755); err != nil {
		t.Skipf("no memory cgroup can be made here: %v", err)
	}
	t.Cleanup(func() { within(t, patience, "the cgroup is empty", func() bool { return os.Remove(at) == nil }) })
	if err := os.WriteFile(filepath.Join(at, limits), fmt.Append(nil, limit), 0); err != nil {
		t.Skipf("no limit of a memory cgroup can be set here: %v", err)
	}
	return "echo $$ > " + at + "/cgroup.procs && ", func() (n int) {
		_, rest, _ := strings.Cut(string(content(t, filepath.Join(at, events))), "oom_kill ")
		_, _ = fmt.Sscan(rest, &n)
		return n
	}
}

// With all features on, odd pictures and many readers, a daemon's memory stays within --memory plus 100 MiB, also in a
// memory cgroup of that size, and what a burst took is given back. It is RssAnon that counts: the kernel takes file
// pages back when it needs them. SHOAL_MEMORY_FOR is for how long.
func TestMemoryHolds(t *testing.T) {
	const memory, most = 128 << 20, 228 << 20
	lasts, err := time.ParseDuration(cmp.Or(os.Getenv("SHOAL_MEMORY_FOR"), fmt.Sprint(atMost(6, 12), "s")))
	if err != nil {
		t.Fatal(err)
	}
	dir, paths := photographs(t, 200)
	paths = append(paths, oddPictures(t, dir)...)
	source := bucket(t, dir)
	enter, killed := memoryGroup(t, most)
	keyFile, mnt, endpoint := filepath.Join(t.TempDir(), "key"), t.TempDir(), freePort(t)
	write(t, keyFile, []byte(newKey()+"\n"))
	addr := "unix://" + filepath.Join(t.TempDir(), "run", "feed.sock")
	c := exec.Command("sh", "-c", enter+`exec "$0" "$@"`, shoalBin, "serve", source, "--listen", addr, "--mount", mnt,
		"--cache-dir", t.TempDir(), "--daemon",
		"--memory", fmt.Sprint(memory), "--recode", "on", "--encryption-key-file", keyFile, "--kernel-cache", "off",
		"--s3", endpoint, "--s3-keys", s3Keys(t))
	c.Env = append(os.Environ(), s3server.Env(server.URL)...)
	if out, err := c.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	t.Cleanup(func() { umount(t, mnt) })
	pid := readStats(t, mnt).PID

	end := time.Now().Add(lasts)
	var all sync.WaitGroup
	for i := range 6 {
		all.Go(func() {
			for at := i * 31; time.Now().Before(end); at++ {
				p := paths[(at*17)%len(paths)]
				if got, err := os.ReadFile(filepath.Join(mnt, p)); err != nil ||
					!bytes.Equal(got, content(t, filepath.Join(dir, p))) {
					t.Errorf("%s: %v, or other bytes", p, err)
					return
				}
			}
		})
	}
	for i := range 2 {
		all.Go(func() {
			for seed := i; time.Now().Before(end) && !t.Failed(); seed++ {
				// What takes more memory than there is for a picture is a bad sample.
				feed(t, addr, "--batch", "8", "--order", fmt.Sprintf("torch:seed=%d", seed), "--bad", "skip:12",
					"--transform", eyes)
			}
		})
	}
	all.Go(func() {
		client := s3Client(t, endpoint)
		for at := 0; time.Now().Before(end) && !t.Failed(); at++ {
			get(t, client, bucketName(t), "train/"+paths[(at*13)%len(paths)])
		}
	})
	done := make(chan struct{})
	go func() { all.Wait(); close(done) }()
	peak := int64(0)
	for tick := time.NewTicker(20 * time.Millisecond); ; {
		select {
		case <-tick.C:
			peak = max(peak, inStatus(pid, "RssAnon"))
			continue
		case <-done:
		}
		break
	}
	if kills := killed(); kills > 0 || t.Failed() {
		t.Fatalf("the kernel killed %d processes for their memory", kills)
	}
	s := readStats(t, mnt)
	t.Logf("highest RssAnon %d MiB, VmHWM %d MiB; %+v; %+v", peak>>20, inStatus(pid, "VmHWM")>>20, s.Memory, s.Recoded)
	if peak > most {
		t.Errorf("RssAnon %d MiB with --memory %d MiB", peak>>20, memory>>20)
	}
	// by idle processors
	within(t, 2*patience, "files are recoded", func() bool { return readStats(t, mnt).Recoded.Files > 0 })
	// which docs/SEMANTICS.md promises within a minute
	within(t, time.Minute, "memory is given back", func() bool { return inStatus(pid, "RssAnon") < memory })
}

// inStatus returns a field of /proc/PID/status in bytes, such as RssAnon; 0 if the process has ended.
func inStatus(pid int, field string) (n int64) {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	_, rest, _ := strings.Cut(string(b), "\n"+field+":")
	_, _ = fmt.Sscan(rest, &n)
	return n << 10
}
