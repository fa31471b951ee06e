package e2e

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/minio/minio-go/v7"
	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/lab/rig/netns"
	"github.com/shoalfs/shoal/lab/rig/s3server"
)

// beside is what TestCkptBeside compares: ways to have a checkpoint in a bucket, all over one line.
type beside struct {
	*testing.T
	node   *netns.Node
	env    []string
	memory string // memoryDir
	size   int64
}

// way is one of them. Each has a bucket of its own.
type way struct {
	name, path, with string
	bucket           string // empty: nothing is uploaded
	blocked, whole   []float64
}

// What a checkpoint of 2 GiB costs the trainer, and when the bucket has it all, beside other programs on the same line
// of 200 MB/s: one rank saves with DCP, in turn. It judges that the bucket has the bytes, and prints times.
// lab/bench/results/ckpt.md has the command.
func TestCkptBeside(t *testing.T) {
	py, juice := os.Getenv("SHOAL_BESIDE"), os.Getenv("SHOAL_BESIDE_JUICEFS")
	if py == "" || juice == "" {
		t.Skip("SHOAL_BESIDE names a Python with tools/conformance/beside.txt, SHOAL_BESIDE_JUICEFS a juicefs")
	}
	b := newBeside(t)
	buckets := map[string]string{}
	for _, w := range []string{"shoal", "juicefs", "rclone", "s3torchconnector", "s3fs", "msc"} {
		buckets[w] = newBucket(t, "-"+w)
	}
	carried := filepath.Join(b.memory, "carried")
	if err := os.Mkdir(carried, 0o755); err != nil {
		t.Fatal(err)
	}
	startForeground(t, b.command(shoalBin, "ckpt", carried, "s3://"+buckets["shoal"]+"/run")).says(t, "carrying")
	mounted, cache := b.juicefs(juice, buckets["juicefs"])
	config := filepath.Join(b.memory, "msc.json")
	profile := map[string]any{"type": "s3", "options": map[string]string{
		"base_path": buckets["msc"], "endpoint_url": b.endpoint(), "region_name": s3server.Region}}
	text, err := json.Marshal(
		map[string]any{"profiles": map[string]any{"beside": map[string]any{"storage_provider": profile}}})
	if err != nil {
		t.Fatal(err)
	}
	write(t, config, text)
	b.env = append(b.env, "MSC_CONFIG="+config, "PYTHONPATH=../../python", "PYTHONWARNINGS=ignore",
		"RCLONE_CONFIG_BESIDE_TYPE=s3",
		"RCLONE_CONFIG_BESIDE_PROVIDER=Other", "RCLONE_CONFIG_BESIDE_ENV_AUTH=true",
		"RCLONE_CONFIG_BESIDE_ENDPOINT="+b.endpoint(), "RCLONE_CONFIG_BESIDE_REGION="+s3server.Region)
	ways := []*way{
		{name: "folder", path: filepath.Join(b.memory, "folder")},
		{name: "shoal", path: carried, bucket: buckets["shoal"]},
		{name: "juicefs", path: mounted, with: cache, bucket: buckets["juicefs"]},
		{name: "rclone", path: filepath.Join(b.memory, "rclone"), with: "beside:" + buckets["rclone"],
			bucket: buckets["rclone"]},
		{name: "s3torchconnector", path: "s3://" + buckets["s3torchconnector"], bucket: buckets["s3torchconnector"]},
		{name: "s3fs", path: "s3://" + buckets["s3fs"], bucket: buckets["s3fs"]},
		{name: "multi-storage-client", path: "msc://beside", bucket: buckets["msc"]},
	}
	saver := b.command(py, "ckptbeside.py", fmt.Sprint(b.size))
	in, err := saver.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := saver.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	saver.Stderr = os.Stderr
	if err := saver.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		in.Close()
		if err := saver.Wait(); err != nil {
			t.Error(err)
		}
	}()
	answers := bufio.NewScanner(out)
	for i := range 3 {
		for _, w := range ways {
			at := fmt.Sprintf("%s/step-%d", w.path, i)
			fmt.Fprintln(in, w.name, at, w.with)
			var blocked, whole float64
			answers.Scan()
			if _, err := fmt.Sscan(answers.Text(), &blocked, &whole); err != nil {
				t.Fatalf("%s: %v", w.name, err)
			}
			w.blocked, w.whole = append(w.blocked, blocked), append(w.whole, whole)
			b.clean(w, at)
		}
	}
	var table strings.Builder
	for _, w := range ways {
		each := fmt.Sprintf("%.2f, %.2f", w.blocked, w.whole)
		whole := "-"
		if m := median(w.whole); w.bucket != "" {
			whole = fmt.Sprintf("%.2f s", m)
		}
		fmt.Fprintf(&table, "| %s | %.2f s | %s | %s |\n", w.name, median(w.blocked), whole, each)
	}
	t.Logf("%d MiB, medians of 3, then each: blocked, whole after the save's beginning\n%s", b.size>>20, table.String())
}

func newBeside(t *testing.T) *beside {
	node, p := saverNode(t)
	b := &beside{T: t, node: node, env: s3server.Env(p.URL), memory: memoryDir(t), size: 2 << 30}
	if mib := os.Getenv("SHOAL_BESIDE_MIB"); mib != "" { // for those who work on it
		if _, err := fmt.Sscan(mib, &b.size); err != nil {
			t.Fatal(err)
		}
		b.size <<= 20
	}
	return b
}

func (b *beside) endpoint() string { return strings.TrimPrefix(b.env[0], "AWS_ENDPOINT_URL=") }

func (b *beside) command(program string, args ...string) *exec.Cmd {
	c := b.node.Command(program, args...)
	c.Env = append(os.Environ(), b.env...)
	return c
}

// juicefs mounts a new volume that writes back.
func (b *beside) juicefs(program, bucket string) (mounted, cache string) {
	meta := "sqlite3://" + filepath.Join(b.memory, "juicefs.db")
	format := b.command(program, "format", meta, "juicefs", "--storage", "minio", "--bucket", b.endpoint()+"/"+bucket,
		"--access-key", s3server.AccessKey, "--secret-key", s3server.SecretKey, "--trash-days", "0")
	if out, err := format.CombinedOutput(); err != nil {
		b.Fatalf("juicefs format: %v\n%s", err, out)
	}
	mounted, cache = filepath.Join(b.memory, "juicefs"), filepath.Join(b.memory, "cache")
	if err := os.Mkdir(mounted, 0o755); err != nil {
		b.Fatal(err)
	}
	d := startForeground(b, b.command(program, "mount", meta, mounted, "--writeback", "--cache-dir", cache,
		"--cache-size", "1M",
		"--free-space-ratio", "0.01", "--no-usage-report", "--backup-meta", "0"))
	d.says(b, "is ready")
	b.Cleanup(func() {
		if err := unix.Unmount(mounted, unix.MNT_DETACH); err != nil && !errors.Is(err, syscall.EINVAL) {
			b.Error(err)
		}
	})
	return mounted, cache
}

// clean fails unless a way's bucket has all of a checkpoint, and removes it here and there.
func (b *beside) clean(w *way, at string) {
	b.Helper()
	if filepath.IsAbs(at) {
		defer func() {
			if err := os.RemoveAll(at); err != nil && !errors.Is(err, fs.ErrNotExist) {
				b.Error(err)
			}
		}()
	}
	if w.bucket == "" {
		return
	}
	c := store(b)
	var has int64
	for o := range c.ListObjects(context.Background(), w.bucket, minio.ListObjectsOptions{Recursive: true}) {
		if strings.Contains(o.Key, ".shoal") {
			continue
		}
		has += o.Size
		if w.name != "juicefs" || strings.Contains(o.Key, "/chunks/") {
			if err := c.RemoveObject(context.Background(), w.bucket, o.Key, minio.RemoveObjectOptions{}); err != nil {
				b.Error(err)
			}
		}
	}
	if has < b.size {
		b.Errorf("%s: the bucket has %d bytes of %d", w.name, has, b.size)
	}
}
