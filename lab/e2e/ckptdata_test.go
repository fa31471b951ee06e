package e2e

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/shoalfs/shoal/lab/accelerator"
)

// A trainer reads its data over a mount while shoal ckpt on the same node uploads one checkpoint after another, over a
// line of 1 Gbit/s each way that the trainer fills to a fifth, or to four fifths. It waits at most a hundredth of the
// time more than without.
func TestCkptBesideData(t *testing.T) {
	long(t)
	dir, paths := tree(t, 20, 50, starSize)
	set := &clusterSet{dir: dir, source: bucket(t, dir), paths: paths}
	for _, p := range paths {
		set.bytes += int64(len(content(t, filepath.Join(dir, p))))
	}
	c := fleetOver(t, set, server.URL, 0.1)
	c.flags[slices.Index(c.flags, "--order")+1] = "torch:seed=7"
	c.start(0)
	n := c.Nodes[0]
	folder := memoryDir(t)
	saved := bytes.Repeat([]byte{1, 2, 3, 5}, 64<<20)
	epoch := 0
	train := func(rate float64) float64 {
		files := &accelerator.Files{Dir: n.Mount}
		for _, i := range orderOf(t, fmt.Sprintf("torch:seed=7,epoch=%d", epoch), len(paths)) {
			files.Paths = append(files.Paths, paths[i])
		}
		epoch++
		step := time.Duration(float64(c.bytes) / float64(len(paths)) * starBatch / rate * float64(time.Second))
		e, err := (accelerator.Job{Accelerators: 1, Batch: starBatch, Step: step, Workers: 4, Prefetch: 4}).Run(
			t.Context(), len(paths), files, nil)
		if err != nil {
			t.Fatal(err)
		}
		return waiting(t, e)
	}
	for _, load := range []float64{0.2, 0.8} {
		rate := load * 125e6
		train(rate)
		var alone, beside []float64
		for i := range 3 {
			alone = append(alone, train(rate))
			cmd := n.Command(shoalBin, "ckpt", folder, fmt.Sprintf("s3://%s/run-%v-%d", bucketName(t), load, i),
				"--delete")
			cmd.Env = n.Env()
			d := startForeground(t, cmd)
			d.says(t, "carrying")
			stop, stopped, uploaded := make(chan struct{}), make(chan struct{}), 0
			go func() {
				defer close(stopped)
				for {
					if err := os.WriteFile(filepath.Join(folder, "state.bin"), saved, 0o644); err != nil {
						t.Error(err)
						return
					}
					out, err := n.Shoal(t.Context(), "ckpt", "wait", folder)
					if err != nil {
						t.Errorf("%v: %s", err, out)
						return
					}
					uploaded++
					select {
					case <-stop:
						return
					default:
					}
				}
			}()
			began := time.Now()
			beside = append(beside, train(rate))
			took := time.Since(began)
			close(stop)
			<-stopped
			t.Logf("%.0f MB/s: uploads of some %.0f MB/s beside",
				rate/1e6, float64(uploaded*len(saved))/1e6/took.Seconds())
			d.signal(t, syscall.SIGKILL)
			<-d.exited
		}
		a, b := median(alone), median(beside)
		t.Logf(
			"at %.0f MB/s of 125: waited %.4f of the time alone, %.4f beside uploads (medians of 3: %.4f and %.4f)",
			rate/1e6, a, b, alone, beside)
		if b > a+0.01 {
			t.Errorf("uploads make the trainer wait %.1f points more", 100*(b-a))
		}
	}
}
