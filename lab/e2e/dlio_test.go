package e2e

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/lab/rig/port"
	"github.com/shoalfs/shoal/lab/rig/proxy"
)

// dlio runs the DLIO benchmark's trainer on data that DLIO has made.
type dlio struct {
	python  string
	dataset []string // the settings of the dataset
}

// run starts DLIO with settings, a line of them in the form of Hydra's command line without its prefix.
func (d *dlio) run(t *testing.T, env []string, settings ...string) (output string) {
	t.Helper()
	output = t.TempDir()
	here, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	args := []string{"-m", "dlio_benchmark.main", "workload=default", "hydra.run.dir=" + output}
	for _, s := range append(
		append([]string{"framework=pytorch", "workflow.evaluation=False", "output.folder=" + output,
			"checkpoint.checkpoint_folder=" + output, "reader.data_loader=pytorch"}, d.dataset...), settings...) {
		args = append(args, "++workload."+s)
	}
	cmd := exec.CommandContext(t.Context(), d.python, args...)
	cmd.Dir = output
	cmd.Env = append(append(os.Environ(), "DFTRACER_ENABLE=0", "PYTHONPATH="+here), env...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %v\n%s", args, err, out[max(0, len(out)-3000):])
	}
	return output
}

// epochs of a run: how busy DLIO's emulated accelerator was, from the second batch on, and the seconds of all batches.
type epochs struct{ busy, seconds [2]float64 }

func (d *dlio) train(t *testing.T, env []string, settings ...string) (e epochs) {
	t.Helper()
	output := d.run(t, env, append(settings, "workflow.generate_data=False", "workflow.train=True",
		"train.epochs=2")...)
	var summary struct {
		Metric struct {
			Busy []float64 `json:"train_au_percentage"`
		}
	}
	var each map[string]struct{ Duration string }
	for name, into := range map[string]any{"summary.json": &summary, "per_epoch_stats.json": &each} {
		b, err := os.ReadFile(filepath.Join(output, name))
		if err == nil {
			err = json.Unmarshal(b, into)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	for i := range e.busy {
		var err error
		if e.seconds[i], err = strconv.ParseFloat(each[strconv.Itoa(i+1)].Duration, 64); err != nil ||
			i >= len(summary.Metric.Busy) {
			t.Fatalf("%v: %v of %v", err, each, summary.Metric.Busy)
		}
		e.busy[i] = summary.Metric.Busy[i]
	}
	return e
}

// helper runs a function of dlio.py.
func (d *dlio) helper(t *testing.T, args ...string) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), d.python, append([]string{"dlio.py"}, args...)...).Output()
	if err != nil {
		t.Fatalf("%v: %v", args, err)
	}
	return string(out)
}

// The DLIO benchmark's PyTorch reader over the local disk, a mount, the S3 endpoint and a plain S3 client: a cold epoch
// and a warm one. With Shoal each byte is fetched once. It prints a table, lab/bench/results/dlio.md.
func TestDLIO(t *testing.T) {
	python := os.Getenv("SHOAL_DLIO")
	if python == "" {
		t.Skip("make conformance-dlio runs it")
	}
	far, env := far(t, proxy.Options{Latency: 30 * time.Millisecond, Bandwidth: 250e6})
	for _, c := range []struct {
		format, reader string
		settings       []string // of the dataset
		train          []string
	}{
		{"jpeg", "dlio.S3Image", []string{"dataset.num_files_train=2400", "dataset.record_length=114660",
			"dataset.record_length_resize=150528"},
			[]string{"reader.batch_size=50", "train.computation_time=0.25"}},
		{"npz", "dlio.S3Array", []string{"dataset.num_files_train=600", "dataset.record_length=2000000",
			"dataset.record_length_resize=150528"},
			[]string{"reader.batch_size=8", "train.computation_time=0.12"}},
	} {
		t.Run(c.format, func(t *testing.T) {
			dir := t.TempDir()
			d := &dlio{python, append(c.settings, "dataset.format="+c.format, "dataset.num_samples_per_file=1",
				"dataset.num_subfolders_train=0", "dataset.num_subfolders_eval=0", "dataset.num_files_eval=1")}
			// One file for evaluation: DLIO lists that folder, and a bucket has none without files.
			d.run(t, nil, "dataset.data_folder="+dir, "workflow.generate_data=True", "workflow.train=False")
			url := bucket(t, dir)
			list := d.helper(t, "order", dir, "2")
			plan := filepath.Join(t.TempDir(), "order.txt")
			write(t, plan, []byte(list))
			train := append(c.train, "reader.read_threads=4", "reader.sample_shuffle=seed")
			remote := func(t *testing.T, endpoint []string) epochs {
				return d.train(t, append(endpoint, "DLIO_OBJECTS="+strings.TrimPrefix(url, "s3://")),
					append(train, "dataset.data_folder="+dir, "reader.reader_classname="+c.reader)...)
			}
			flags := []string{"--samples", "." + c.format, "--cache-size", "8GiB"}
			mounted := func(t *testing.T, plan string) epochs {
				mnt := mount(t, env, url, flags...)
				if plan != "" {
					write(t, filepath.Join(mnt, ".shoal/plan"), []byte(plan))
				}
				e := d.train(t, nil, append(train, "dataset.data_folder="+mnt)...)
				umount(t, mnt)
				return e
			}
			fmt.Printf("| %s | busy, cold | warm | seconds, cold | warm | GETs | MB |\n| --- | ---: | ---: | ---: | "+
				"---: | ---: | ---: |\n", c.format)
			for _, way := range []struct {
				name string
				run  func(t *testing.T) epochs
			}{
				{"local disk", func(t *testing.T) epochs {
					d.helper(t, "forget", dir)
					return d.train(t, nil, append(train, "dataset.data_folder="+dir)...)
				}},
				{"mount", func(t *testing.T) epochs { return mounted(t, "") }},
				{"mount with plan", func(t *testing.T) epochs { return mounted(t, list) }},
				{"endpoint", func(t *testing.T) epochs { return remote(t, endpoint(t, env, url, flags...)) }},
				{"endpoint with list", func(t *testing.T) epochs {
					return remote(t, endpoint(t, env, url, append(flags, "--order", "list:"+plan)...))
				}},
				{"boto3", func(t *testing.T) epochs { return remote(t, env) }},
			} {
				t.Run(way.name, func(t *testing.T) {
					before := far.Stats()
					e := way.run(t)
					by := far.Stats().Sub(before)
					fmt.Printf("| %s | %.1f%% | %.1f%% | %.1f | %.1f | %d | %.0f |\n",
						way.name, e.busy[0], e.busy[1], e.seconds[0], e.seconds[1], by.Gets, float64(by.GetBytes)/1e6)
					if size := folderSize(t, filepath.Join(dir, "train")); way.name != "boto3" &&
						by.GetBytes > size+size/50 {
						t.Errorf("%d bytes fetched of %d", by.GetBytes, size)
					}
				})
			}
		})
	}
}

// endpoint serves url to S3 clients until the test ends, and returns their environment.
func endpoint(t *testing.T, env []string, url string, flags ...string) []string {
	t.Helper()
	addr, release, err := port.Hold()
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	cmd := exec.Command(shoalBin,
		append([]string{"s3", url, "--listen", addr, "--s3-anonymous", "--cache-dir", t.TempDir()}, flags...)...)
	var log bytes.Buffer
	cmd.Env, cmd.Stderr = append(os.Environ(), env...), &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Signal(unix.SIGTERM)
		if err := cmd.Wait(); err != nil {
			t.Errorf("shoal s3: %v\n%s", err, &log)
		}
	})
	within(t, patience, "the endpoint listens", func() bool {
		c, err := net.Dial("tcp", addr)
		if err == nil {
			c.Close()
		}
		return err == nil
	})
	return append(env, "AWS_ENDPOINT_URL=http://"+addr)
}

func folderSize(t *testing.T, dir string) (size int64) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		info, err := e.Info()
		if err != nil {
			t.Fatal(err)
		}
		size += info.Size()
	}
	return size
}
