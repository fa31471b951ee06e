package e2e

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/shoalfs/shoal/lab/rig/proxy"
)

// `shoal run` gives a mount the orders of Accelerate's, timm's and Ultralytics' loaders as they are (make conformance).
func TestRunAccelerate(t *testing.T) {
	clients := os.Getenv("SHOAL_CLIENTS")
	if clients == "" {
		t.Skip("SHOAL_CLIENTS names no folder: make conformance")
	}
	python := clients + "-torch/bin/python"
	dir, _ := pictures(t, 3, 17)
	_, env := far(t, proxy.Options{})
	mnt := mount(t, env, bucket(t, dir))
	free, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	_, port, _ := net.SplitHostPort(free.Addr().String())
	_ = free.Close()
	t.Run("Accelerate", func(t *testing.T) {
		readAsTold(t, python, "hf_accelerate.py", mnt, 2, 24, "MASTER_PORT="+port)
	})
	t.Run("timm and Ultralytics", func(t *testing.T) { readAsTold(t, python, "others_loaders.py", mnt, 1, 18) })
}

// Trainers that make the loaders themselves, or own their epochs: what each reads is what was told.
func TestRunTrainers(t *testing.T) {
	python := os.Getenv("SHOAL_ADAPTERS")
	if python == "" {
		t.Skip("make conformance runs it")
	}
	dir, _ := pictures(t, 3, 17)
	_, env := far(t, proxy.Options{Latency: 30 * time.Millisecond})
	mnt := mount(t, env, bucket(t, dir), "--cache-size", "0", "--kernel-cache", "off")
	readAsTold(t, python, "trainers.py", mnt, 1, 18)
	s := readStats(t, mnt)
	t.Logf("%d opens, of which %d waited for the store", s.Opens, s.Misses+s.Joined)
}

// readAsTold runs a trainer under shoal run, in as many ranks, and compares what each read in its epochs with its
// plans.
func readAsTold(t *testing.T, python, script, mnt string, world, each int, env ...string) {
	out := t.TempDir()
	var ranks sync.WaitGroup
	for rank := range world { // torchrun of Debian's torch does not start with its Python
		ranks.Go(func() {
			cmd := exec.Command(shoalBin, "run", "--", python, "-B", script, mnt, out)
			cmd.Env = append(append(os.Environ(), env...), "XDG_CACHE_HOME="+t.TempDir(),
				"YOLO_CONFIG_DIR="+t.TempDir(), "OMP_NUM_THREADS=1",
				fmt.Sprint("WORLD_SIZE=", world), fmt.Sprint("LOCAL_WORLD_SIZE=", world),
				fmt.Sprint("RANK=", rank), fmt.Sprint("LOCAL_RANK=", rank), "MASTER_ADDR=127.0.0.1")
			if text, err := cmd.CombinedOutput(); err != nil {
				t.Errorf("rank %d: %v\n%s", rank, err, text)
			}
		})
	}
	ranks.Wait()
	if t.Failed() {
		return
	}
	for rank := range world {
		data, err := os.ReadFile(filepath.Join(out, fmt.Sprintf("%d.json", rank)))
		if err != nil {
			t.Fatal(err)
		}
		var epochs [][4]any
		if err := json.Unmarshal(data, &epochs); err != nil || len(epochs) != each {
			t.Fatalf("%d epochs, %v", len(epochs), err)
		}
		for _, e := range epochs {
			if told, read := e[2].([]any), e[3].([]any); !slices.Equal(told, read) {
				t.Errorf("rank %d, %v, epoch %v: told\n%v, and read\n%v", rank, e[0], e[1], told, read)
			}
		}
	}
}
