package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/shoalfs/shoal/internal/cli"
)

// shoal runs a verb in this process and returns what it prints.
func shoal(t *testing.T, args ...string) (string, error) {
	t.Helper()
	var out bytes.Buffer
	c := root()
	c.SetArgs(args)
	c.SetOut(&out)
	c.SetErr(&out)
	err := c.ExecuteContext(t.Context())
	return out.String(), err
}

func planned(t *testing.T, args ...string) (r planReport) {
	t.Helper()
	out, err := shoal(t, append([]string{"plan", "--json"}, args...)...)
	if err != nil {
		t.Fatalf("shoal plan %s: %v", strings.Join(args, " "), err)
	}
	if err := json.Unmarshal([]byte(out), &r); err != nil {
		t.Fatalf("%v in %s", err, out)
	}
	return r
}

func TestPlanSynthetic(t *testing.T) {
	// Two accelerators take 200 samples of 100 kB a second, 160 Mbit; the line brings half of that.
	args := []string{"--samples", "2000", "--sample-size", "100KB", "--batch", "10", "--step-time", "100ms",
		"--accelerators", "2", "--workers", "2",
		"--bandwidth", "80Mbit", "--connections", "16", "--cache-size", "100MB", "--memory", "112MiB",
		"--target", "95%"}
	r := planned(t, args...)
	if math.Abs(r.Demand-20e6) > 1 {
		t.Errorf("the demand is %g", r.Demand)
	}
	cold, warm := r.Epochs[0], r.Epochs[1]
	if math.Abs(cold.Utilisation-0.5) > 0.02 || cold.Bound != "bandwidth" || cold.Bytes != 200e6 {
		t.Errorf("the cold epoch: %+v", cold)
	}
	if warm.Utilisation < 0.9 {
		t.Errorf("the warm epoch: %+v", warm)
	}
	// 95% of 0.5/(1-f), where memory keeps an eighth of the samples beside the cache.
	if r.Target == nil || r.Target.CacheFraction == nil || math.Abs(*r.Target.CacheFraction-(0.475-0.125)) > 0.05 {
		t.Errorf("the target: %+v", r.Target)
	}
	out, err := shoal(t, append([]string{"plan"}, args...)...)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"2,000 samples, 191 MiB, each an object", "2 accelerators take 160 Mbit/s",
		"bandwidth", "for 95%: --cache-size ", "--bandwidth "} {
		if !strings.Contains(out, want) {
			t.Errorf("%q is missing in:\n%s", want, out)
		}
	}
}

// Four nodes whose caches together hold four fifths: a fifth comes from the store or the near tier, and of the rest a
// quarter from the reader's own disk.
func TestPlanNodes(t *testing.T) {
	args := []string{"--samples", "8000", "--sample-size", "100KB", "--batch", "10", "--step-time", "100ms",
		"--cache-size", "160MB", "--memory", "96MiB", "--nodes", "4"}
	within := func(what string, got int64, want, most float64) {
		t.Helper()
		if math.Abs(float64(got)/800e6-want) > most {
			t.Errorf("%s: %d bytes, want %.2f of the dataset", what, got, want)
		}
	}
	r := planned(t, args...)
	cold, later := r.Epochs[0], r.Epochs[1]
	within("epoch 0, from the store", cold.Bytes, 1, 0.001)
	within("epoch 0, from peers", cold.Peers.Bytes, 0.6, 0.02)
	within("epoch 1, from the store", later.Bytes, 0.2, 0.03)
	within("epoch 1, from peers", later.Peers.Bytes, 0.6, 0.02)
	within("epoch 1, from disk", later.DiskBytes, 0.2, 0.02)
	if r.Nodes != 4 || math.Abs(r.Demand-4*10e6) > 1 || later.Utilisation < 0.99 {
		t.Errorf("%+v", r)
	}
	// Each node takes 10 MB/s, six of them from its peers.
	r = planned(t, append(args, "--link", "3MB/s", "--target", "95%")...)
	if later = r.Epochs[1]; math.Abs(later.Utilisation-0.5) > 0.03 || later.Limits.Binding().Name != "the link" ||
		r.Target.CacheBytes != nil && *r.Target.CacheBytes > 100e6 {
		t.Errorf("%+v, %+v", later, r.Target)
	}
	// All nodes take 8 MB/s from the tier.
	r = planned(t, append(args, "--near-bandwidth", "4MB/s")...)
	if later = r.Epochs[1]; math.Abs(later.Utilisation-0.5) > 0.05 || later.Limits.Binding().Name != "the near tier" ||
		later.Near.Bytes == 0 {
		t.Errorf("%+v", later)
	}
	out, err := shoal(t, append([]string{"plan", "--near-bandwidth", "1Gbit", "--store", "get=0.01"}, args...)...)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"4 nodes of 1 accelerator take 320 Mbit/s; bandwidth: 10 Gbit/s, to the near tier 1 Gbit/s, between nodes 10 " +
			"Gbit/s; the caches hold 80%", "near tier    peers  own disk", "received: 80 USD"} {
		if !strings.Contains(out, want) {
			t.Errorf("%q is missing in:\n%s", want, out)
		}
	}
}

func TestPlanSource(t *testing.T) {
	dir := t.TempDir()
	var bytes int64
	for i := range 60 {
		path := filepath.Join(dir, "train", fmt.Sprintf("class%d", i%3), fmt.Sprintf("%d.jpg", i))
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, make([]byte, 1000+i), 0o600); err != nil {
			t.Fatal(err)
		}
		bytes += 1000 + int64(i)
	}
	t.Setenv("XDG_CACHE_HOME", filepath.Join(dir, "cache"))
	job := []string{"--batch", "4", "--step-time", "10ms", "--cache-size", "20kB", "--warm"}
	r := planned(t, append([]string{"file://" + dir + "/train"}, job...)...)
	if r.Dataset.Samples != 60 || r.Dataset.Bytes != bytes || r.Dataset.Packed {
		t.Errorf("%+v", r.Dataset)
	}
	// What is no sample is in the dataset, and accelerators do not read it.
	if err := os.WriteFile(filepath.Join(dir, "train", "class0", "notes.txt"), make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	more := planned(t, append([]string{"file://" + dir + "/train"}, job...)...)
	if more.Demand != r.Demand || more.Dataset.Bytes != bytes+1<<20 || more.Dataset.Samples != 60 {
		t.Errorf("with a file that is no sample: %v bytes/s, want %v; %+v", more.Demand, r.Demand, more.Dataset)
	}
	if err := os.Remove(filepath.Join(dir, "train", "class0", "notes.txt")); err != nil {
		t.Fatal(err)
	}
	e := r.Epochs[0]
	if e.Bytes < bytes-20_000 || e.Bytes > bytes-18_000 || e.KeepHits == 0 || e.Requests != 60-e.KeepHits {
		t.Errorf("with 20 of %d bytes kept: %+v", bytes, e)
	}
	if _, err := os.Stat(filepath.Join(dir, "cache")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the user's cache folder: %v", err)
	}

	if _, err := shoal(t, "pack", "file://"+dir+"/train", "file://"+dir+"/shards"); err != nil {
		t.Fatal(err)
	}
	r = planned(t, append([]string{"file://" + dir + "/shards", "--order", "windowed:seed=1,window=2", "--cache-size",
		"1MB", "--epochs", "1"}, job[:4]...)...)
	if e := r.Epochs[0]; !r.Dataset.Packed || e.Samples != 60 || e.Requests > 10 {
		t.Errorf("%+v: %+v", r.Dataset, e)
	}
	if _, err := shoal(t, "plan", "file://"+dir+"/train", "--batch", "4", "--step-time", "10ms", "--samples",
		"*.none"); err == nil || !strings.Contains(err.Error(), "--samples") {
		t.Errorf("no file is a sample: %v", err)
	}
}

// What the file says of samples for all verbs is understood by plan, too.
func TestPlanOfRows(t *testing.T) {
	s := newShell(t)
	s.write("shoal.yaml", "samples: rows\n")
	s.write("tables/a.csv", "x,y\n1,2\n3,4\n5,6\n7,8\n")
	out := s.must(nil, "plan", "--config=shoal.yaml", "file://"+s.path("tables"), "--batch=2",
		"--step-time=10ms", "--json")
	var r planReport
	if err := json.Unmarshal([]byte(out), &r); err != nil || r.Dataset.Samples != 4 {
		t.Errorf("%v, %+v", err, r.Dataset)
	}
}

func TestPlanWrongUse(t *testing.T) {
	some := []string{"--samples", "100", "--sample-size", "1MB", "--batch", "4", "--step-time", "1s"}
	for _, args := range [][]string{
		{}, {"--batch", "4", "--step-time", "1s"}, {"--samples", "images", "--workload", "tokens"},
		{"--samples", "0", "--workload", "tokens"},
		{"--workload", "resnet"}, {"file:///x", "--workload", "tokens", "--sample-size", "1MB"},
		{"file:///x", "file:///y"}, {"file:///x", "--workload", "tokens", "--samples", "[a"},
		append(some, "--batch", "0"), append(some, "--step-time", "-1s"), append(some, "--accelerators", "0"),
		append(some, "--workers", "-1"),
		append(some, "--prefetch", "0"), append(some, "--connections", "513"), append(some, "--epochs", "0"),
		append(some, "--latency", "-1ms"),
		append(some, "--latency-sigma", "NaN"), append(some, "--request-rate", "-1"), append(some, "--order", "plan"),
		append(some, "--order", "torch-loader:seed=1"),
		append(some, "--order", "torch:seed=1,world=2"), append(some, "--target", "100%"),
		append(some, "--target", "x"), append(some, "--bandwidth", "10"),
		append(some, "--near-bandwidth", "fast"), append(some, "--nodes", "0"), append(some, "--nodes", "1025"),
		append(some, "--link", "1Gbit"),
		append(some, "--nodes", "26"), append(some, "--nodes", "2", "--order", "torch:seed=1,world=4,rank=0-1"),
	} {
		if _, err := shoal(t, append([]string{"plan"}, args...)...); !cli.IsUsage(err) {
			t.Errorf("shoal plan %s: %v", strings.Join(args, " "), err)
		}
	}
	for _, args := range [][]string{append(some, "--memory", "64MiB"),
		append(some, "--order", "windowed:seed=1,window=2")} {
		if _, err := shoal(t, append([]string{"plan"}, args...)...); err == nil {
			t.Errorf("shoal plan %s: no error", strings.Join(args, " "))
		}
	}
}

// What --json prints is what docs/plan.md lists, in names as those of the other schemas.
func TestPlanSchema(t *testing.T) {
	page, err := os.ReadFile("../../docs/plan.md")
	if err != nil {
		t.Fatal(err)
	}
	out, err := shoal(t, "plan", "--json", "--samples", "2000", "--sample-size", "100KB", "--batch", "10",
		"--step-time", "100ms", "--cache-size", "20MB", "--target", "95%", "--nodes", "2", "--near-bandwidth", "1Gbit")
	if err != nil {
		t.Fatal(err)
	}
	var report map[string]any
	if err := json.Unmarshal([]byte(out), &report); err != nil {
		t.Fatal(err)
	}
	if report["version"] != float64(planVersion) ||
		!strings.Contains(string(page), fmt.Sprintf("the schema's version, now %d", planVersion)) {
		t.Errorf("version %v", report["version"])
	}
	snake := regexp.MustCompile(`^[a-z]+(_[a-z]+)*$`)
	var each func(v any)
	each = func(v any) {
		switch v := v.(type) {
		case []any:
			for _, x := range v {
				each(x)
			}
		case map[string]any:
			for name, x := range v {
				if !snake.MatchString(name) || !regexp.MustCompile("[`.]"+name+"[`\\[.]").Match(page) {
					t.Errorf("field %q: not in docs/plan.md, or no name of a schema", name)
				}
				each(x)
			}
		}
	}
	each(report)
}

// The memory that is demanded for a large dataset is enough.
func TestPlanDemandsEnoughMemory(t *testing.T) {
	args := []string{"plan", "--samples", "200000", "--sample-size", "100KB", "--batch", "1000", "--step-time", "1ms",
		"--epochs", "1", "--memory"}
	_, err := shoal(t, append(args, "70MiB")...)
	if err == nil {
		t.Fatal("70 MiB are enough")
	}
	m := regexp.MustCompile(
		`^--memory 70 MiB leaves .* beside the metadata of 200,000 samples, .* \(give at least (\d+MiB)\)$`).
		FindStringSubmatch(err.Error())
	if m == nil {
		t.Fatal(err)
	}
	if _, err := shoal(t, append(args, m[1])...); err != nil {
		t.Errorf("with %s: %v", m[1], err)
	}
}
