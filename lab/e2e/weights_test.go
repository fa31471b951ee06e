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
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/minio/minio-go/v7"
	"golang.org/x/sync/errgroup"

	"github.com/shoalfs/shoal/lab/rig/netns"
	"github.com/shoalfs/shoal/lab/rig/proxy"
	"github.com/shoalfs/shoal/lab/rig/s3server"
)

// weights is a model in the store, and what reads it.
type weights struct {
	t      *testing.T
	python string
	name   string // bucket
	size   int64
	sum    uint64
	line   *proxy.Proxy // to the store, shared by all nodes
}

// loaded is what a process of weights.py has read.
type loaded struct {
	Seconds float64
	Bytes   int64
	Sum     uint64
}

// One model is loaded by each way that servers of models have, by one node and by four at once, cold and again, over a
// line to the store that all share, and restored by eight processes and by four nodes. It judges bytes, and prints
// times (lab/bench/results/weights.md).
//
// SHOAL_WEIGHTS is a Python that has safetensors, fastsafetensors, runai-model-streamer[s3] and grpcio,
// SHOAL_WEIGHTS_SIZE the bytes of the model, and SHOAL_WEIGHTS_LINE the line's bytes a second.
func TestWeights(t *testing.T) {
	w := newWeights(t)
	w.direct()
	for _, c := range []struct {
		way                     string
		nodes, processes, ranks int
	}{
		{"plain", 1, 1, 1}, {"mmap", 1, 1, 1}, {"shoal.open", 1, 1, 1}, {"streamer", 1, 1, 1},
		{"fastsafetensors", 1, 1, 1},
		{"plain", 4, 1, 1}, {"mmap", 4, 1, 1}, {"shoal.open", 4, 1, 1}, {"streamer", 4, 1, 1},
		{"mmap", 1, 8, 1}, {"mmap", 1, 8, 8}, {"mmap", 4, 1, 4},
	} {
		what := fmt.Sprintf("%s, %d nodes of %d processes, 1/%d each", c.way, c.nodes, c.processes, c.ranks)
		t.Run(what, func(t *testing.T) {
			w.t = t
			w.load(what, c.way, c.nodes, c.processes, c.ranks)
		})
	}
}

func newWeights(t *testing.T) *weights {
	w := &weights{t: t, python: os.Getenv("SHOAL_WEIGHTS"), size: number(t, "SHOAL_WEIGHTS_SIZE", 256<<20)}
	if w.python == "" {
		t.Skip("SHOAL_WEIGHTS is not set")
	}
	if m := netns.Missing(); m != "" {
		t.Skip(m)
	}
	dir := t.TempDir()
	if out, err := exec.Command(w.python, "weights.py", "make", dir, fmt.Sprint(w.size)).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	all := w.run(exec.Command(w.python, "weights.py", "plain", dir, "0", "1"), nil)
	if w.sum = all.Sum; all.Bytes != w.size {
		t.Fatalf("a model of %d bytes, want %d", all.Bytes, w.size)
	}
	w.name = bucketName(t)
	upload(t, dir, w.name)
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	w.line, _ = far(t, proxy.Options{Latency: 15 * time.Millisecond, Bandwidth: number(t, "SHOAL_WEIGHTS_LINE", 50e6)})
	return w
}

func number(t *testing.T, name string, otherwise int64) int64 {
	t.Helper()
	text := os.Getenv(name)
	if text == "" {
		return otherwise
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// run runs weights.py to its end.
func (w *weights) run(cmd *exec.Cmd, env []string) (l loaded) {
	var errs bytes.Buffer
	module, err := filepath.Abs("../../python")
	if err != nil {
		w.t.Error(err)
	}
	cmd.Env = append(append(os.Environ(), env...), "PYTHONPATH="+module)
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if err == nil {
		err = json.Unmarshal(out, &l)
	}
	if err != nil {
		w.t.Errorf("%v: %v\n%s", cmd.Args, err, errs.String())
	}
	return l
}

// direct loads the model from the store without Shoal: by a bare client, and by the streamer.
func (w *weights) direct() {
	client, err := s3server.Client(w.line.URL, 32)
	if err != nil {
		w.t.Fatal(err)
	}
	began := time.Now()
	var all errgroup.Group
	all.SetLimit(16)
	for o := range client.ListObjects(w.t.Context(), w.name,
		minio.ListObjectsOptions{Prefix: "train/", Recursive: true}) {
		for at := int64(0); at < o.Size; at += 8 << 20 {
			all.Go(func() error {
				var of minio.GetObjectOptions
				if err := of.SetRange(at, min(at+8<<20, o.Size)-1); err != nil {
					return err
				}
				r, err := client.GetObject(w.t.Context(), w.name, o.Key, of)
				if err != nil {
					return err
				}
				_, err = io.Copy(io.Discard, r)
				return errors.Join(err, r.Close())
			})
		}
	}
	if err := all.Wait(); err != nil {
		w.t.Fatal(err)
	}
	w.row("a bare client", time.Since(began).Seconds(), 1, "")
	l := w.run(exec.Command(w.python, "weights.py", "streamer", "s3://"+w.name+"/train", "0", "1"),
		w.streaming(w.line.URL))
	w.row("streamer, without Shoal", l.Seconds, 1, "")
}

func (w *weights) streaming(endpoint string) []string {
	return append(s3server.Env(endpoint), "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING=0",
		"AWS_EC2_METADATA_DISABLED=true", "RUNAI_STREAMER_MEMORY_LIMIT=536870912")
}

func (w *weights) row(what string, seconds, store float64, again string) {
	w.t.Helper()
	w.t.Logf("| %s | %.1f | %.3f | %s |", what, seconds, store, again)
}

// load loads the model on nodes at once, cold, with processes on each, of which each reads every ranks-th tensor, and
// then again.
func (w *weights) load(what, way string, nodes, processes, ranks int) {
	w.t.Helper()
	dir := w.t.TempDir()
	f, err := makeFleet(context.Background(),
		fleetOptions{Shoal: shoalBin, Dir: dir, Mounts: true, Nodes: nodes, Store: w.line.URL})
	if err != nil {
		w.t.Fatal(err)
	}
	defer func() {
		if err := errors.Join(f.Close(), os.RemoveAll(dir)); err != nil {
			w.t.Error(err)
		}
	}()
	flags := []string{"--memory", "512MiB", "--cache-size", "5GiB", "--kernel-cache", "auto", "--s3", "127.0.0.1:9000",
		"--s3-anonymous"}
	if nodes > 1 {
		join, err := f.StartEtcd(w.t.Context())
		if err != nil {
			w.t.Fatal(err)
		}
		flags = append(flags, join...)
	}
	if err := f.Each(func(n *fleetNode) error {
		return n.Serve(w.t.Context(), "s3://"+w.name+"/train", flags...)
	}); err != nil {
		w.t.Fatal(err)
	}
	if nodes > 1 {
		if err := f.Settled(w.t.Context()); err != nil {
			w.t.Fatal(err)
		}
	}
	cold, store := w.pass(f, way, processes, ranks)
	var hedges, late int64 // which are sent to the store besides
	for _, n := range f.Nodes {
		s, err := n.Stats(w.t.Context())
		if err != nil {
			w.t.Fatal(err)
		}
		hedges += s.Hedges.Sent
		for _, peer := range s.Cluster.Nodes {
			late += peer.Asked.Late + peer.Asked.Passed
		}
	}
	warm, again := w.pass(f, way, processes, ranks)
	w.row(what, cold, store, fmt.Sprintf("%.1f | %.3f | %d | %d", warm, again, hedges, late))
	if nodes > 1 && way == "streamer" { // owners have no memory in time for so many requests at once
		return
	}
	if nodes == 1 && way != "streamer" && again > 0 {
		w.t.Errorf("%s: %.3f of the model was read from the store again", what, again)
	}
	if store > 1.03 {
		w.t.Errorf("%s: %.3f of the model was read from the store", what, store)
	}
}

// pass has all processes read at once, and returns the seconds of the last one, and what was read from the store as a
// share of the model.
func (w *weights) pass(f *fleet, way string, processes, ranks int) (seconds, store float64) {
	var before int64
	for _, n := range f.Nodes {
		before += n.Store().GetBytes
	}
	var all sync.WaitGroup
	got := make([]loaded, len(f.Nodes)*processes)
	for i := range got {
		all.Go(func() {
			n := f.Nodes[i/processes]
			root, env := n.Mount, []string(nil)
			if way == "streamer" {
				root, env = "s3://"+w.name+"/train", w.streaming("http://127.0.0.1:9000")
			}
			args := []string{"weights.py", way, root, fmt.Sprint(i % ranks), fmt.Sprint(ranks)}
			got[i] = w.run(n.Command(w.python, args...), env)
		})
	}
	all.Wait()
	var sum uint64
	var size int64
	for _, l := range got {
		seconds, sum, size = max(seconds, l.Seconds), sum+l.Sum, size+l.Bytes
	}
	times := len(got) / ranks
	if size != w.size*int64(times) || sum != w.sum*uint64(times) {
		w.t.Errorf("%s: other bytes: %d, sum %d; want %d times %d, %d", way, size, sum, times, w.size, w.sum)
	}
	after := int64(0)
	within(w.t, time.Minute, "nothing is on its way, nor to be written", func() bool {
		after = 0
		for _, n := range f.Nodes {
			s, err := n.Stats(w.t.Context())
			if err != nil || s.Disk.Queued > 0 || n.Store().InFlight > 0 {
				return false
			}
			after += n.Store().GetBytes
		}
		return true
	})
	return seconds, float64(after-before) / float64(w.size)
}
