package e2e

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/minio/minio-go/v7"

	"github.com/shoalfs/shoal/lab/rig/netns"
	"github.com/shoalfs/shoal/lab/rig/proxy"
	"github.com/shoalfs/shoal/lab/rig/s3server"
)

// putBare is this program as the plainest client: it uploads a file in parts of 8 MiB, 16 at once.
func putBare(endpoint, bucket, key, file string) error {
	c, err := s3server.Client(endpoint, 32)
	if err != nil {
		return err
	}
	o := minio.PutObjectOptions{PartSize: 8 << 20, NumThreads: 16, ConcurrentStreamParts: true,
		DisableContentSha256: true}
	_, err = c.FPutObject(context.Background(), bucket, key, file, o)
	return err
}

// saverNode is a machine with a line of 200 MB/s to a store that is 15 ms away.
func saverNode(t *testing.T) (*netns.Node, *proxy.Proxy) {
	t.Helper()
	if m := netns.Missing(); m != "" {
		t.Skip(m)
	}
	n, err := netns.New(1, 1_600_000_000)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	})
	l, err := net.Listen("tcp", net.JoinHostPort(n.Host, "0"))
	if err != nil {
		t.Fatal(err)
	}
	p, err := proxy.Serve(context.Background(), l, server.URL, proxy.Options{Latency: 15 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Stop)
	return n.Nodes[0], p
}

// memoryDir is a folder in memory: the server's disk is this machine's, too, and would make a saver wait.
func memoryDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "shoal-ckpt-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// What a save costs the trainer, and how long it takes to be whole in the bucket: beside the same without Shoal, and a
// plain client over the same line of 200 MB/s. It judges requests and bytes, and prints times
// (lab/bench/results/ckpt.md).
func TestCkptRate(t *testing.T) {
	long(t)
	node, p := saverNode(t)
	name := newBucket(t, "")
	run := func(args ...string) *exec.Cmd {
		c := node.Command(args[0], args[1:]...)
		c.Env = append(os.Environ(), s3server.Env(p.URL)...)
		return c
	}
	must := func(args ...string) {
		t.Helper()
		if out, err := run(args...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v\n%s", args, err, out)
		}
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	const size = 2 << 30
	content := safetensors(size, 1)
	// save writes the file as n processes would, in pieces, and returns how long that took.
	save := func(dir string, files int) time.Duration {
		t.Helper()
		began := time.Now()
		var all sync.WaitGroup
		for i := range files {
			all.Go(func() {
				if err := os.MkdirAll(dir, 0o755); err != nil {
					t.Error(err)
				}
				f, err := os.Create(filepath.Join(dir, fmt.Sprintf("%d.bin", i)))
				if err == nil {
					_, err = io.Copy(f, bytes.NewReader(content[:size/files]))
				}
				if err == nil {
					err = f.Sync()
				}
				if err == nil {
					err = f.Close()
				}
				if err != nil {
					t.Error(err)
				}
			})
		}
		all.Wait()
		return time.Since(began)
	}
	memory := memoryDir(t)
	carried, plain := filepath.Join(memory, "carried"), filepath.Join(memory, "plain")
	if err := os.Mkdir(carried, 0o755); err != nil {
		t.Fatal(err)
	}
	d := startForeground(t, run(shoalBin, "ckpt", carried, "s3://"+name+"/run"))
	d.says(t, "carrying")
	for _, files := range []int{1, 8} {
		var with, without, whole, bare []float64
		for i := range 3 {
			without = append(without, save(filepath.Join(plain, "x"), files).Seconds())
			at := filepath.Join(carried, fmt.Sprintf("%d-%d", files, i))
			with = append(with, save(at, files).Seconds())
			saved := time.Now()
			must(shoalBin, "ckpt", "wait", at)
			whole = append(whole, time.Since(saved).Seconds())
			if files == 1 {
				began := time.Now()
				must(self, "put", p.URL, name, "bare", filepath.Join(at, "0.bin"))
				bare = append(bare, time.Since(began).Seconds())
			}
			for _, dir := range []string{at, filepath.Join(plain, "x")} {
				if err := os.RemoveAll(dir); err != nil {
					t.Fatal(err)
				}
			}
		}
		t.Logf("2 GiB in %d files: saved in %.2f s, without Shoal %.2f (median of 3: ratio %.3f); whole %.2f s "+
			"later; a bare client takes %.2f", files, median(with), median(without), median(with)/median(without),
			median(whole), median(bare))
	}
	before := p.Stats()
	began := time.Now()
	const many = 5000
	for i := range many {
		write(t, filepath.Join(carried, "many", fmt.Sprintf("%04d.bin", i)), bytes.Repeat([]byte{byte(i)}, 64<<10))
	}
	must(shoalBin, "ckpt", "wait", filepath.Join(carried, "many"))
	took := time.Since(began)
	sent := p.Stats().Sub(before)
	t.Logf("%d files of 64 KiB: whole after %.1f s, %.2f of the latency each; %d requests",
		many, took.Seconds(), took.Seconds()/many/0.015, sent.Requests)
	if sent.Requests > many*12/10 {
		t.Errorf("%d requests for %d files", sent.Requests, many)
	}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", d.cmd.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	_, peak, _ := strings.Cut(string(status), "VmHWM:")
	peak, _, _ = strings.Cut(peak, "\n")
	d.signal(t, syscall.SIGTERM)
	d.ended(t)
	used := d.cmd.ProcessState.UserTime() + d.cmd.ProcessState.SystemTime()
	t.Logf("the daemon took %.1f s of processor time for 12 GiB and %d files, and%s of memory at most",
		used.Seconds(), many, strings.ReplaceAll(peak, "\t", ""))
}

func median(of []float64) float64 {
	if len(of) == 0 {
		return 0
	}
	slices.Sort(of)
	return of[len(of)/2]
}
