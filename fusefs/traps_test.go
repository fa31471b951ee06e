package fusefs

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func sumOf(b []byte) string {
	s := sha256.Sum256(b)
	return hex.EncodeToString(s[:])
}

var requestLine = regexp.MustCompile(`rx \d+: ([A-Z_]+) n\d+ (?:\{[^}]*?\[\d+ \+(\d+)\))?`)

// requests returns what the kernel asked while do ran, by operation, and the sizes of READs.
func requests(t *testing.T, c *child, do func()) (ops map[string]int, reads []int) {
	t.Helper()
	settle := func() int {
		// The log comes by a pipe: all that was asked before is in it once this, which nothing else asks, is. A RELEASE
		// comes when the kernel likes.
		marks := strings.Count(c.log.String(), ": STATFS ")
		if err := unix.Statfs(c.dir, new(unix.Statfs_t)); err != nil {
			t.Fatal(err)
		}
		for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(time.Millisecond) {
			if log := c.log.String(); strings.Count(log, ": STATFS ") > marks && strings.Count(log,
				": RELEASE ") >= strings.Count(log, ": OPEN ") {
				return len(log)
			}
		}
		t.Fatalf("the log is without the end of the requests:\n%s", c.log.String())
		return 0
	}
	from := settle()
	do()
	ops = map[string]int{}
	settle()
	for _, m := range requestLine.FindAllStringSubmatch(c.log.String()[from:], -1) {
		if m[1] == "STATFS" {
			continue
		}
		ops[m[1]]++
		if m[1] == "READ" {
			n, err := strconv.Atoi(m[2])
			if err != nil {
				t.Fatalf("no size in %q", m[0])
			}
			reads = append(reads, n)
		}
	}
	return ops, reads
}

// A file costs one round trip each to find, open, and read it, and a RELEASE that nobody waits for. The
// OPEN comes also where the kernel has all the rest.
func TestRoundTrips(t *testing.T) {
	for _, keep := range []bool{true, false} {
		t.Run(fmt.Sprint("kernel cache ", keep), func(t *testing.T) {
			var wrong []string
			// somebody else on this machine may drop its caches
			for try := 1; try == 1 || len(wrong) > 0 && try < 10; try++ {
				wrong = roundTrips(t, keep)
			}
			for _, w := range wrong {
				t.Error(w)
			}
		})
	}
}

// roundTrips returns what was not as it should be.
func roundTrips(t *testing.T, keep bool) (wrong []string) {
	c := mountChild(t, "tree", func(s *spec) {
		s.Options.Debug, s.Options.KernelCache, s.Options.ReadAhead = true, keep, 1<<20
	})
	expect := func(what string, want map[string]int, do func()) {
		if got, _ := requests(t, c, do); fmt.Sprint(got) != fmt.Sprint(want) {
			wrong = append(wrong, fmt.Sprintf("%s: %v, want %v", what, got, want))
		}
	}
	readAll := func(path string) func() {
		return func() {
			// As readers of lab/bench does. Python's open adds an ioctl, which FUSE cannot avoid.
			buf := make([]byte, 4<<20)
			if n, err := readOnce(c.path(path), buf); err != nil || int64(n) != fileOf(c.data, path).size {
				t.Error(n, err)
			}
		}
	}
	if _, err := os.Stat(c.path("b")); err != nil {
		t.Fatal(err)
	}
	want := map[string]int{"LOOKUP": 1, "OPEN": 1, "READ": 1, "RELEASE": 1}
	expect("first", want, readAll("b/63k"))
	delete(want, "LOOKUP")
	if keep {
		delete(want, "READ")
	}
	expect("again", want, readAll("b/63k"))
	got, reads := requests(t, c, readAll("b/große Datei \\ \"x\".bin"))
	if got["OPEN"] != 1 || len(reads) > 6 {
		wrong = append(wrong, fmt.Sprintf("2 MiB: %v, READs of %v", got, reads))
	}
	for _, n := range reads {
		if n > maxRequest {
			t.Errorf("a READ of %d bytes, more than %d", n, maxRequest)
		}
	}
	// What is asked twice is answered by the kernel.
	expect("six stats of two names", map[string]int{"LOOKUP": 2}, func() {
		for range 3 {
			_, _ = os.Lstat(c.path("b/700k"))
			_, _ = os.Lstat(c.path("b/none"))
		}
	})
	c.finish()
	return wrong
}

// What is lent is given back, whatever became of the reader, and the descriptors of the daemon do not
// grow.
func TestLend(t *testing.T) {
	c := mountChild(t, "tree", func(s *spec) { s.Volume, s.Options.KernelCache = lendVolume, false })
	descriptors := func() int {
		fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", c.cmd.Process.Pid))
		if err != nil {
			t.Fatal(err)
		}
		return len(fds)
	}
	before := descriptors()
	for range 2 {
		readTree(t, c)
		c.do("collect") // an os.File that nobody holds any more would be closed now
	}
	for range 10 {
		lent := c.report().Lent
		cmd := exec.Command("dd", "if="+c.path("b/700k"), "of=/dev/null", "bs=1", "iflag=direct")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		c.eventually("it reads", func(r report) bool { return r.Lent > lent+10 })
		cmd.Process.Kill()
		cmd.Wait()
	}
	c.eventually("all is given back", func(r report) bool {
		return r.Lent > int64(len(c.data)) && r.Lent == r.Returned
	})
	if after := descriptors(); after > before {
		t.Errorf("%d descriptors, %d before", after, before)
	}
}

const faulted = "SIGBUS"

// faultReader is a child that reads a page of a mapped file. Go's scheduler takes no processor from a thread that waits
// for a page: a process that has only one stands still.
func faultReader(path string) int {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		fmt.Println(err)
		return 1
	}
	b, err := unix.Mmap(fd, 512<<10, 4096, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		fmt.Println(err)
		return 1
	}
	debug.SetPanicOnFault(true)
	defer func() {
		if recover() != nil {
			fmt.Print(faulted)
		}
	}()
	fmt.Println("it read", b[0])
	return 1
}

// Readers that wait when the daemon is killed get an error at once. A new mount takes the dead one's
// place.
func TestKilledWithReadsInFlight(t *testing.T) {
	c := mountChild(t, "tree")
	open := func(flags int) int {
		fd, err := unix.Open(c.path("slow/file"), unix.O_RDONLY|unix.O_CLOEXEC|flags, 0)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { unix.Close(fd) })
		return fd
	}
	type result struct {
		how string
		err error
	}
	results := make(chan result, 16)
	buffered, direct := open(0), open(unix.O_DIRECT)
	fault := exec.CommandContext(t.Context(), os.Args[0])
	fault.Env = append(os.Environ(), faultEnv+"="+c.path("slow/file"))
	readers := []struct {
		how string
		do  func() error
	}{
		{"read", func() error { _, err := unix.Pread(buffered, make([]byte, 100), 0); return err }},
		{"O_DIRECT", func() error { _, err := unix.Pread(direct, make([]byte, 4096), 0); return err }},
		{"page fault", func() error {
			out, err := fault.CombinedOutput()
			if err == nil && string(out) == faulted {
				return unix.ECONNABORTED // SIGBUS
			}
			return fmt.Errorf("%s, %w", out, err)
		}},
	}
	for _, r := range readers {
		go func() { results <- result{r.how, r.do()} }()
	}
	c.eventually("all wait", func(r report) bool { return r.Waiting >= len(readers) })
	c.kill()
	for range readers {
		select {
		case r := <-results:
			switch {
			case died(r.err):
			case r.how == "read" && errors.Is(r.err, unix.EIO): // the page that was to be filled
			default:
				t.Errorf("%s: %v", r.how, r.err)
			}
		case <-time.After(time.Minute):
			t.Fatal("a reader hangs")
		}
	}
	for range 2 {
		if _, err := os.ReadDir(c.dir); !died(err) {
			t.Errorf("later: %v", err)
		}
	}
	again := mountChild(t, "tree", func(s *spec) { s.Mountpoint = c.dir })
	if _, err := os.ReadFile(again.path("README.md")); err != nil {
		t.Error(err)
	}
	again.finish()
	if mi, err := findMount(c.dir); err != nil || mi != nil {
		t.Errorf("something is still mounted: %+v, %v", mi, err)
	}
}

// Mounts that died on top of each other are an error that says what to do, not a third layer.
func TestDeadMountsInLayers(t *testing.T) {
	below := mountChild(t, "tree")
	hidden := filepath.Join(t.TempDir(), "mnt")
	if err := os.Mkdir(hidden, 0o755); err != nil {
		t.Fatal(err)
	}
	above := mountChild(t, "tree", func(s *spec) { s.Mountpoint = hidden })
	if err := unix.Mount(hidden, below.dir, "", unix.MS_MOVE, ""); err != nil {
		// A shared parent mount cannot be moved; bind it instead.
		if err := unix.Mount(hidden, below.dir, "", unix.MS_BIND, ""); err != nil {
			t.Fatal(err)
		}
		defer unix.Unmount(hidden, unix.MNT_DETACH)
	}
	below.kill()
	above.kill()
	defer func() {
		for unix.Unmount(below.dir, unix.MNT_DETACH) == nil {
		}
	}()
	if err := Check(below.dir); err != nil {
		t.Errorf("Check: %v", err)
	}
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), serveEnv+`={"Data":"tree","Mountpoint":"`+below.dir+`"}`)
	out, err := cmd.Output()
	if err == nil || !bytes.Contains(out, []byte("several dead mounts lie on it")) {
		t.Errorf("%s, %v", out, err)
	}
}

// Invalidate is called from the handler of the FLUSH that ends a write to .shoal/refresh. The kernel
// holds the root's lock while it looks names up in it, so a notification from a handler would wait for
// itself.
func TestRefreshAmidLookups(t *testing.T) {
	c := mountChild(t, "tree")
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for reader := range 4 {
		wg.Go(func() {
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				switch reader {
				case 0:
					_, _ = os.ReadDir(c.dir)
				case 1:
					_, _ = os.Stat(c.path(fmt.Sprint("none", i)))
				default:
					_, _ = os.ReadFile(c.path("many", fmt.Sprintf("%03d.bin", i%300)))
				}
			}
		})
	}
	done := make(chan error, 1)
	go func() {
		for range 20 {
			if err := os.WriteFile(c.path(".shoal/refresh"), []byte("x"), 0); err != nil {
				done <- err
				return
			}
		}
		done <- nil
	}()
	select {
	case err := <-done:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(2 * time.Minute):
		c.kill() // lets everybody go
		t.Error("refresh hangs")
	}
	close(stop)
	wg.Wait()
}

// Replies are of any size that a READ may have.
func TestLargeDirectReads(t *testing.T) {
	for _, volume := range []string{"", lendVolume} {
		c := mountChild(t, "tree", func(s *spec) { s.Volume = volume })
		f := fileOf(c.data, "b/große Datei \\ \"x\".bin")
		want := testArena().content(f)
		fd, err := unix.Open(c.path(f.path), unix.O_RDONLY|unix.O_DIRECT, 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, off := range []int64{0, 1, 4095, 4096, 1<<20 - 7, f.size - 1, f.size} {
			buf := make([]byte, 4<<20)
			n, err := unix.Pread(fd, buf, off)
			if err != nil || !bytes.Equal(buf[:n], want[off:]) {
				t.Errorf("at %d: %d bytes, %v", off, n, err)
			}
		}
		unix.Close(fd)
		c.finish()
	}
}

// readTree compares every file of a mount with the dataset.
func readTree(t *testing.T, c *child) {
	t.Helper()
	for _, f := range c.data {
		if got, err := os.ReadFile(c.path(f.path)); err != nil || !bytes.Equal(got, testArena().content(f)) {
			t.Errorf("%s: %d bytes, %v", f.path, len(got), err)
		}
	}
}
