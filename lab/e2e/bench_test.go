package e2e

import (
	"encoding/json"
	"path/filepath"
	"strings"
	"testing"

	"github.com/shoalfs/shoal/lab/rig/proxy"
)

type benchReport struct {
	Version      int
	Workload     string
	Accelerators int
	Samples      int
	Cached       float64
	Bound        float64
	Order        string
	Utilisation  float64
	Epochs       []struct {
		Epoch       int
		Samples     int
		Bytes       int64
		Requests    int64
		RemoteBytes int64 `json:"remote_bytes"`
		Keep        int64 `json:"keep_hits"`
		Seconds     float64
		Compute     float64 `json:"compute_seconds"`
		Stall       float64 `json:"stall_seconds"`
		Utilisation float64
		Steps       []struct{ Stall float64 }
	}
}

// check tests what holds on a machine of any speed.
func (r benchReport) check(t *testing.T, epochs, steps, samples int, sampleBytes int64) {
	t.Helper()
	if r.Version != 2 || len(r.Epochs) != epochs || r.Utilisation <= 0 || r.Utilisation > 1 {
		t.Fatalf("%+v", r)
	}
	for _, e := range r.Epochs {
		if e.Samples != samples || e.Bytes != int64(samples)*sampleBytes || len(e.Steps) != steps {
			t.Errorf("%+v", e)
		}
		if d := e.Seconds - e.Compute - e.Stall; d > 1e-6 || d < -1e-6 || e.Utilisation != e.Compute/e.Seconds {
			t.Errorf("times do not add up: %+v", e)
		}
	}
}

func TestBench(t *testing.T) {
	dir := t.TempDir()
	flags := []string{"bench", "--batch", "4", "--sample-size", "50KB", "--step-time", "20ms", "--steps", "20",
		"--accelerators", "2", "--epochs", "2",
		"--latency", "5ms", "--work-dir", dir, "--json"}
	run := func(more ...string) (r benchReport) {
		t.Helper()
		out, errs, code := lab(t, append(flags, more...)...)
		if err := json.Unmarshal([]byte(out), &r); err != nil {
			t.Fatalf("exit %d, %v in %s\n%s", code, err, out, errs)
		}
		r.check(t, 2, 20, 160, 50_000)
		return r
	}
	r := run("--cached", "0")
	var requests, remote int64
	for _, e := range r.Epochs {
		requests, remote = requests+e.Requests, remote+e.RemoteBytes
	}
	// Each sample has come over the line, though not twice: all of them fit the daemon's memory.
	if r.Order != "torch:seed=7,world=2,rank=0-1" || r.Cached != 0 || requests < 160 || remote < 160*50_000 {
		t.Errorf("nothing cached: %+v", r)
	}

	if r = run("--cached", "1"); r.Cached != 1 || r.Epochs[0].Requests != 0 {
		t.Errorf("all cached: %+v", r)
	}
	if mounted(filepath.Join(dir, "mnt")) {
		t.Error("a mount is left")
	}
}

func TestBenchMount(t *testing.T) {
	dir, _ := tree(t, 2, 30, 20_000)
	_, env := far(t, proxy.Options{})
	mnt := mount(t, env, bucket(t, dir), "--order", "torch:seed=3")
	var r benchReport
	out, errs, code := lab(t, "bench", "resnet50-h100", "--mount", mnt, "--batch", "5", "--step-time", "5ms",
		"--epochs", "2", "--json")
	if err := json.Unmarshal([]byte(out), &r); err != nil {
		t.Fatalf("exit %d, %v in %s\n%s", code, err, out, errs)
	}
	if r.Order != "torch:seed=3" || r.Samples != 60 || len(r.Epochs) != 2 || r.Epochs[1].Epoch != r.Epochs[0].Epoch+1 ||
		r.Epochs[0].Samples != 60 {
		t.Errorf("%+v", r)
	}
	if s := readStats(t, mnt); s.Opens < 120 {
		t.Errorf("%d files were opened for two epochs of 60", s.Opens)
	}
}

func TestBenchWrongUse(t *testing.T) {
	for _, c := range []struct {
		args string
		code int
		says string
	}{
		{"bench", 2, "--step-time"},
		{"bench vgg", 2, "vgg"},
		{"bench cosmoflow extra", 2, "is one too many"},
		{"bench cosmoflow --cached 2", 2, "--cached"},
		{"bench cosmoflow --bandwidth fast", 2, "1.1x"},
		{"bench cosmoflow --scale 0", 2, "--scale"},
		{"bench cosmoflow --order plan", 2, "--order"},
		{"bench cosmoflow --accelerators 0", 2, "--accelerators"},
		{"bench cosmoflow --mount /nowhere --cached 0.5", 2, "--cached"},
		{"bench cosmoflow --mount /nowhere", 1, "not a live shoal mount"},
	} {
		_, errs, code := lab(t, strings.Fields(c.args)...)
		if code != c.code || !strings.Contains(errs, c.says) {
			t.Errorf("shoal-lab %s: exit %d, %q", c.args, code, errs)
		}
	}
}
