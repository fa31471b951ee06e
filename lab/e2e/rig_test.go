// Package e2e runs the built binary as a user would: a real S3 server, the latency proxy, real
// mounts and trainers, each in a process of its own. The tests read mounts that other processes
// serve.
package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/lab/rig/proxy"
	"github.com/shoalfs/shoal/lab/rig/s3server"
)

var (
	shoalBin string // built once
	server   *s3server.Server
	workDir  string
)

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "faultdisk" { // this program again, for badDisk
		if err := faultDiskMain(os.Args[2:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	if len(os.Args) == 6 && os.Args[1] == "put" { // for TestCkptRate
		if err := putBare(os.Args[2], os.Args[3], os.Args[4], os.Args[5]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	if len(os.Args) > 1 && os.Args[1] == "trainer" { // and for the tests of exactly-once
		os.Exit(trainAs(os.Args[2]))
	}
	if len(os.Args) > 3 && os.Args[1] == "readon" { // and for TestUpgrade
		if err := readOn(os.Args[2], os.Args[3], os.Args[4:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	// Under nohup the programs started here would ignore SIGHUP, as they should, and beside others SIGINT, which a
	// shell has those ignore that it does not wait for. A signal that is caught here is not ignored by them.
	for _, s := range []os.Signal{unix.SIGHUP, unix.SIGINT} {
		if signal.Ignored(s) {
			signal.Notify(make(chan os.Signal, 1), s)
		}
	}
	code, err := func() (int, error) {
		dir, err := os.MkdirTemp("", "shoal-e2e-")
		if err != nil {
			return 1, err
		}
		defer os.RemoveAll(dir)
		workDir = dir
		os.Setenv("SHOAL_SETTLED", "1")       // the settings of whoever runs the tests are not theirs
		programs := os.Getenv("E2E_PROGRAMS") // where tools/test has built them, for several processes of this test
		if programs == "" {
			programs = dir
			if out, err := exec.Command("go", "build", "-o", dir+"/", "../../cmd/shoal",
				"../../cmd/shoal-lab").CombinedOutput(); err != nil {
				return 1, fmt.Errorf("build: %w\n%s", err, out)
			}
		}
		shoalBin = filepath.Join(programs, "shoal")
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		if server, err = s3server.Start(ctx, s3server.Options{Dir: filepath.Join(dir, "objects")}); err != nil {
			return 1, err
		}
		defer server.Stop()
		return m.Run(), nil
	}()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	os.Exit(code)
}

// tree makes files of seeded content under a fresh folder: classes folders of perClass files.
func tree(t testing.TB, classes, perClass, size int) (dir string, paths []string) {
	t.Helper()
	dir = t.TempDir()
	rng := rand.New(rand.NewPCG(1, 2))
	for c := range classes {
		for i := range perClass {
			p := fmt.Sprintf("class%02d/img%04d.jpg", c, i)
			data := make([]byte, size/2+rng.IntN(size))
			for j := range data {
				data[j] = byte(rng.Uint32())
			}
			write(t, filepath.Join(dir, p), data)
			paths = append(paths, p)
		}
	}
	return dir, paths
}

func write(t testing.TB, path string, data []byte) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, data, 0o644); err != nil {
		t.Fatal(err)
	}
}

// bucket uploads dir into a bucket named after the test and returns its source.
func bucket(t testing.TB, dir string) string {
	t.Helper()
	name := bucketName(t)
	upload(t, dir, name)
	return "s3://" + name + "/train"
}

func bucketName(t testing.TB) string {
	return strings.ToLower(strings.NewReplacer("/", "-", "_", "-", " ", "-").Replace(t.Name()))
}

func upload(t testing.TB, dir, bucket string) {
	t.Helper()
	if _, err := server.Upload(context.Background(), dir, bucket, "train", nil); err != nil {
		t.Fatal(err)
	}
}

// far puts the latency proxy before the server and returns it and the environment that leads there.
func far(t testing.TB, o proxy.Options) (*proxy.Proxy, []string) {
	t.Helper()
	p, err := proxy.Start(context.Background(), server.URL, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Stop)
	return p, s3server.Env(p.URL)
}

// shoal runs a verb to its end.
func shoal(t testing.TB, env []string, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	return shoalWith(t, shoalBin, env, args...)
}

// lab runs shoal-lab, which runs the shoal beside it.
func lab(t testing.TB, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	return shoalWith(t, shoalBin+"-lab", nil, args...)
}

// mustShoal fails the test unless the verb exits 0.
func mustShoal(t testing.TB, env []string, args ...string) string {
	t.Helper()
	out, errs, code := shoal(t, env, args...)
	if code != 0 {
		t.Fatalf("shoal %s: exit %d\n%.3000s", strings.Join(args, " "), code, errs)
	}
	return out
}

// mount mounts in the background and unmounts at the test's end.
func mount(t testing.TB, env []string, source string, flags ...string) (mnt string) {
	t.Helper()
	mnt = t.TempDir()
	mountAt(t, env, source, mnt, flags...)
	return mnt
}

func mountAt(t testing.TB, env []string, source, mnt string, flags ...string) {
	t.Helper()
	args := append([]string{"mount", source, mnt, "--daemon"}, flags...)
	if !slices.Contains(flags, "--cache-dir") {
		args = append(args, "--cache-dir", t.TempDir())
	}
	mustShoal(t, env, args...)
	t.Cleanup(func() {
		if mounted(mnt) {
			umount(t, mnt)
		}
	})
}

func umount(t testing.TB, mnt string) {
	t.Helper()
	if _, errs, code := shoal(t, nil, "umount", mnt); code != 0 {
		t.Errorf("umount: %s", errs)
		_ = unix.Unmount(mnt, unix.MNT_DETACH)
	}
}

func mounted(mnt string) bool {
	b, err := os.ReadFile("/proc/self/mountinfo")
	return err == nil && strings.Contains(string(b), " "+mnt+" ")
}

type stats struct {
	PID     int    `json:"pid"`
	Dataset string `json:"dataset"`
	Files   int
	Samples int
	Opens   int64
	Reads   int64
	Hits    struct{ Keep, Ring int64 }
	Joined  int64
	Misses  int64
	Gets    int64 `json:"get_requests"`
	Hedges  struct{ Sent int64 }
	Bytes   int64 `json:"get_bytes"`
	Lead    int   `json:"lead_samples"`
	Order   struct {
		Spec     string
		Epoch    int
		Position int
		State    string
	}
	Memory struct {
		Used       int64 `json:"ledger_used"`
		Peak       int64 `json:"ledger_peak"`
		Limit      int64 `json:"ledger_limit"`
		RSS        int64
		Goroutines int
	}
	Disk struct {
		Used     int64
		Kept     int   `json:"kept_extents"`
		Corrupt  int64 `json:"corrupt"`
		OutOfUse bool  `json:"out_of_use"`
	}
	Recoded struct {
		UnderWay bool `json:"under_way"`
		Files    int
		Before   int64 `json:"bytes_before"`
		After    int64 `json:"bytes_after"`
		Restored int64
	}
	Errors []struct{ Text string }
}

func readStats(t testing.TB, target string) stats {
	t.Helper()
	var s stats
	text, err := os.ReadFile(filepath.Join(target, ".shoal/stats")) // which shoal stat prints, but costs no process
	if err != nil {
		text = []byte(mustShoal(t, nil, "stat", target, "--json"))
	}
	if err := json.Unmarshal(text, &s); err != nil {
		t.Fatal(err)
	}
	return s
}

// readAll reads the files with 8 readers and compares them with dir's.
func readAll(t testing.TB, mnt, dir string, paths []string) {
	t.Helper()
	next := make(chan string)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for p := range next {
				got, err := os.ReadFile(filepath.Join(mnt, p))
				if err != nil {
					t.Error(err)
					continue
				}
				want, err := os.ReadFile(filepath.Join(dir, p))
				if err != nil {
					t.Error(err)
				} else if !bytes.Equal(got, want) {
					t.Errorf("%s: %d bytes that are not the object's %d", p, len(got), len(want))
				}
			}
		})
	}
	for _, p := range paths {
		next <- p
	}
	close(next)
	wg.Wait()
}

// dropCaches empties the kernel's caches, so that every read reaches the daemon again.
func dropCaches(t testing.TB) {
	t.Helper()
	unix.Sync()
	if err := os.WriteFile("/proc/sys/vm/drop_caches", []byte("3"), 0); err != nil {
		t.Fatal(err)
	}
}

// torchOrder returns the paths in the order that DistributedSampler(seed, epoch) gives them.
func torchOrder(t testing.TB, spec string, paths []string, flags ...string) []string {
	t.Helper()
	out := mustShoal(t, nil, append([]string{"order", spec, "--n", fmt.Sprint(len(paths))}, flags...)...)
	var ordered []string
	for line := range strings.Lines(out) {
		var i int
		if _, err := fmt.Sscan(line, &i); err != nil {
			t.Fatal(err)
		}
		ordered = append(ordered, paths[i])
	}
	return ordered
}

// within waits until ok, or fails the test.
func within(t testing.TB, d time.Duration, what string, ok func() bool) {
	t.Helper()
	deadline, pause := time.Now().Add(d), 20*time.Millisecond
	for ; !ok(); time.Sleep(pause) {
		pause = min(pause*5/4, 100*time.Millisecond) // to ask is often to run a program
		if time.Now().After(deadline) {
			t.Fatalf("not within %s: %s", d, what)
		}
	}
}
