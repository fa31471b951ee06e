package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/minio/minio-go/v7"
	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/lab/rig/s3server"
)

// program builds a program once, beside shoal.
func program(t testing.TB, once *sync.Once, name, pkg string, flags ...string) string {
	t.Helper()
	path := filepath.Join(workDir, name)
	once.Do(func() {
		if out, err := exec.Command("go", append(append([]string{"build", "-o", path}, flags...), pkg)...).
			CombinedOutput(); err != nil {
			t.Fatalf("build %s: %v\n%s", pkg, err, out)
		}
	})
	if _, err := os.Stat(path); err != nil {
		t.Fatal(err)
	}
	return path
}

var killOnce sync.Once

// badDisk mounts a disk that breaks on request.
func badDisk(t testing.TB) *faultDisk {
	t.Helper()
	d, err := spawnFaultDisk(context.Background(), t.TempDir(), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.Stop)
	return d
}

// shoalWith runs a verb of another binary to its end.
func shoalWith(t testing.TB, bin string, env []string, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, bin, args...)
	cmd.Env = append(os.Environ(), env...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatalf("%s %v: %v\n%s", filepath.Base(bin), args, err, errs.String())
	}
	return out.String(), errs.String(), cmd.ProcessState.ExitCode()
}

// store returns a client of the S3 server itself, not of the proxy.
func store(t testing.TB) *minio.Client {
	t.Helper()
	c, err := s3server.Client(server.URL, 8)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// keys lists a bucket.
func keys(t testing.TB, bucket, prefix string) (list []string) {
	t.Helper()
	for o := range store(t).ListObjects(context.Background(), bucket,
		minio.ListObjectsOptions{Prefix: prefix, Recursive: true}) {
		if o.Err != nil {
			t.Fatal(o.Err)
		}
		list = append(list, o.Key)
	}
	return list
}

// newBucket makes an empty bucket named after the test.
func newBucket(t testing.TB, suffix string) string {
	t.Helper()
	name := bucketName(t) + suffix
	if err := store(t).MakeBucket(context.Background(), name,
		minio.MakeBucketOptions{Region: s3server.Region}); err != nil {
		t.Fatal(err)
	}
	return name
}

// download copies what lies under a prefix into a folder.
func download(t testing.TB, bucket, prefix, dir string) {
	t.Helper()
	for _, key := range keys(t, bucket, prefix) {
		o, err := store(t).GetObject(context.Background(), bucket, key, minio.GetObjectOptions{})
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(o)
		_ = o.Close()
		if err != nil {
			t.Fatal(err)
		}
		write(t, filepath.Join(dir, strings.TrimPrefix(key, prefix)), b)
	}
}

// xattr returns an attribute of a file.
func xattr(t testing.TB, path, name string) string {
	t.Helper()
	buf := make([]byte, 1024)
	n, err := unix.Getxattr(path, name, buf)
	if err != nil {
		t.Errorf("%s: %s: %v", path, name, err)
		return ""
	}
	return string(buf[:n])
}

// sameTree compares what a mount shows with a folder: names, sizes and bytes, and nothing besides.
func sameTree(t testing.TB, mnt, dir string, paths []string) {
	t.Helper()
	want := make(map[string]bool, len(paths))
	for _, p := range paths {
		want[p] = true
	}
	seen := 0
	err := filepath.WalkDir(mnt, func(p string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		rel, err := filepath.Rel(mnt, p)
		if err == nil && !want[rel] {
			t.Errorf("%s is shown and should not be", rel)
		}
		seen++
		return err
	})
	if err != nil || seen != len(paths) {
		t.Errorf("%d files are shown, want %d, %v", seen, len(paths), err)
	}
	readAll(t, mnt, dir, paths)
}

// fsck checks a cache directory and returns its exit code and output.
func fsck(t testing.TB, cache string, flags ...string) (out string, code int) {
	t.Helper()
	stdout, stderr, code := shoal(t, nil, append([]string{"fsck", cache}, flags...)...)
	return stdout + stderr, code
}

func mustBeClean(t testing.TB, cache string) {
	t.Helper()
	if out, code := fsck(t, cache); code != 0 {
		t.Fatalf("fsck: exit %d\n%s", code, out)
	}
}

// processes returns the ids of the processes whose command line holds text.
func processes(text string) (pids []int) {
	all, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, p := range all {
		b, err := os.ReadFile(p)
		if err != nil || !bytes.Contains(b, []byte(text)) {
			continue
		}
		var pid int
		if _, err := fmt.Sscanf(p, "/proc/%d/", &pid); err == nil && pid != os.Getpid() {
			pids = append(pids, pid)
		}
	}
	return pids
}

// long marks a test that make check leaves to make night.
func long(t *testing.T) {
	t.Helper()
	if testing.Short() {
		t.Skip("make night runs it")
	}
}

// atMost returns n, or few for make check.
func atMost(few, n int) int {
	if testing.Short() {
		return few
	}
	return n
}

// waitKept waits until all of n files lie on disk.
func waitKept(t testing.TB, mnt string, n int) {
	t.Helper()
	within(t, patience, fmt.Sprintf("%d files on disk", n), func() bool { return readStats(t, mnt).Disk.Kept >= n })
}

// gone waits until a process has ended.
func gone(t testing.TB, pid int) {
	t.Helper()
	within(t, patience, fmt.Sprintf("the end of process %d", pid), func() bool {
		return syscall.Kill(pid, 0) != nil
	})
}

// decode reads JSON that a verb printed.
func decode(t testing.TB, text string, into any) {
	t.Helper()
	if err := json.Unmarshal([]byte(text), into); err != nil {
		t.Fatalf("%v in %.500s", err, text)
	}
}

// lag watches how late this machine wakes who sleeps. The function that it returns ends that, and returns the most: a
// limit for what programs do together, each of which has to be woken, grows by some of it.
func lag() (end func() time.Duration) {
	const nap = 10 * time.Millisecond
	stop, most := make(chan struct{}), make(chan time.Duration, 1)
	go func() {
		for late, begun := time.Duration(0), time.Now(); ; begun = time.Now() {
			select {
			case <-stop:
				most <- late
				return
			case <-time.After(nap):
				late = max(late, time.Since(begun)-nap)
			}
		}
	}()
	return func() time.Duration { close(stop); return <-most }
}

// reading is readers that read the files over and over until stop is closed, each with a pause between two. Every byte
// must be right; longest is what the slowest read took.
type reading struct {
	stop    chan struct{}
	wg      sync.WaitGroup
	mu      sync.Mutex
	longest time.Duration
	which   string
	files   int
}

func startReading(t testing.TB, readers int, pause time.Duration, mnt, dir string, paths []string) *reading {
	r := &reading{stop: make(chan struct{})}
	for k := range readers {
		r.wg.Go(func() {
			for i := k; ; i += readers {
				select {
				case <-r.stop:
					return
				case <-time.After(pause): // as a trainer makes
				}
				p := paths[i%len(paths)]
				start := time.Now()
				got, err := os.ReadFile(filepath.Join(mnt, p))
				took := time.Since(start)
				want, e := os.ReadFile(filepath.Join(dir, p))
				if err != nil || e != nil || !bytes.Equal(got, want) {
					t.Errorf("%s: %d bytes, want %d, %v, %v", p, len(got), len(want), err, e)
					return
				}
				r.mu.Lock()
				r.files++
				if took > r.longest {
					r.longest, r.which = took, p
				}
				r.mu.Unlock()
			}
		})
	}
	return r
}

// end stops the readers and returns how many files they read and what the slowest took.
func (r *reading) end() (files int, longest time.Duration) {
	close(r.stop)
	r.wg.Wait()
	return r.files, r.longest
}
