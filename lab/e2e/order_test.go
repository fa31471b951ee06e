package e2e

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/shoalfs/shoal/internal/machine"
	"github.com/shoalfs/shoal/lab/rig/proxy"
)

// What an unmodified trainer reads, printed by torch itself, one JSON object of epochs a line.
const torchEpochs = `
import json, torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

def epochs(loader, each=lambda e: None):
    out = []
    for e in range(3):
        each(e)
        out.append([int(x) for b in loader for x in b])
    return out

n = range(1237)
torch.manual_seed(42)
print(json.dumps(epochs(DataLoader(n, batch_size=32, shuffle=True))))
torch.manual_seed(42)
print(json.dumps(epochs(DataLoader(n, batch_size=32, shuffle=True, num_workers=2, persistent_workers=True))))
g = torch.Generator()
g.manual_seed(-7)
print(json.dumps(epochs(DataLoader(n, batch_size=32, shuffle=True, generator=g))))
s = DistributedSampler(n, num_replicas=5, rank=3, seed=11)
print(json.dumps(epochs(DataLoader(n, batch_size=32, sampler=s), s.set_epoch)))
`

func TestOrderVerbAgainstTorch(t *testing.T) {
	cmd := exec.Command("/usr/bin/python3", "-c", torchEpochs)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v\n%s", err, stderr.Bytes())
	}
	answers := json.NewDecoder(bytes.NewReader(out))
	for _, args := range [][]string{
		{"torch-loader:seed=42,from=manual_seed"},
		{"torch-loader:seed=42,from=manual_seed,persistent=1"},
		{"torch-loader:seed=-7,from=generator"},
		{"torch:seed=11", "--world", "5", "--rank", "3"},
	} {
		var want [][]int
		if err := answers.Decode(&want); err != nil {
			t.Fatal(err)
		}
		for epoch := range want {
			got := numbers(t, mustShoal(t, nil,
				append([]string{"order", "--n", "1237", "--epoch", strconv.Itoa(epoch)}, args...)...))
			if !slices.Equal(got, want[epoch]) {
				t.Errorf("%v, epoch %d: not what torch reads", args, epoch)
			}
		}
	}
}

// What the kernel has of the epoch before is not fetched again, whoever knows that it will be opened: there is no room
// for it on disk or in memory.
func TestOrderBesidePageCache(t *testing.T) {
	dir, paths := tree(t, 4, 150, 64<<10)
	_, env := far(t, proxy.Options{Latency: 5 * time.Millisecond})
	source := bucket(t, dir)
	// Another test may empty the kernel's caches at any moment, which the kernel counts.
	emptied := func() int64 {
		counts := machine.Fields("/proc/vmstat")
		return counts["drop_pagecache"] + counts["drop_slab"]
	}
	for begun := time.Now(); ; {
		before := emptied()
		mnt := mount(t, env, source, "--order", "torch:seed=5", "--kernel-cache", "on", "--cache-size", "8MiB",
			"--memory", "112MiB")
		for epoch := range 3 {
			readAll(t, mnt, dir, strings.Fields(mustShoal(t, env, "order", "torch:seed=5", "--epoch",
				strconv.Itoa(epoch), "--mount", mnt, "--paths")))
		}
		s := readStats(t, mnt)
		umount(t, mnt)
		if emptied() != before {
			if time.Since(begun) > patience {
				t.Fatal("others empty the kernel's caches all the time")
			}
			continue
		}
		if s.Order.Epoch != 2 || s.Gets-s.Hedges.Sent > int64(len(paths))*102/100 {
			t.Errorf("%d GETs for %d files, %+v", s.Gets, len(paths), s.Order)
		}
		return
	}
}

func numbers(t *testing.T, out string) (list []int) {
	t.Helper()
	for line := range strings.Lines(out) {
		v, err := strconv.Atoi(strings.TrimSpace(line))
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, v)
	}
	return list
}

// The orders that need to know the dataset: a mount tells them, reads ahead in them, and measures them.
func TestOrdersOfAMount(t *testing.T) {
	dir, paths := tree(t, 4, 30, 4<<10)
	_, env := far(t, proxy.Options{Latency: 5 * time.Millisecond})
	source := bucket(t, dir)
	list := filepath.Join(t.TempDir(), "order.txt")
	var lines []string
	for i := len(paths) - 1; i >= 0; i -= 2 {
		lines = append(lines, paths[i])
	}
	write(t, list, []byte(strings.Join(lines, "\n")+"\n0\n"))
	lines = append(lines, paths[0])

	pathsOf := func(mnt, spec string) []string {
		return strings.Fields(mustShoal(t, env, "order", spec, "--mount", mnt, "--paths"))
	}
	mnt := mount(t, env, source, "--order", "list:"+list, "--kernel-cache", "off")
	if got := pathsOf(mnt, "list:"+list); !slices.Equal(got, lines) {
		t.Errorf("list: %v", got)
	}
	readAll(t, mnt, dir, lines)
	if s := readStats(t, mnt); s.Order.Position != len(lines) || s.Order.Spec != "list:path="+list {
		t.Errorf("after the list was read: %+v", s.Order)
	}
	umount(t, mnt)

	mixture := "mixture:seed=2,weights=class00:0.5+class0[12]:0.5,samples=80"
	mnt = mount(t, env, source, "--order", mixture, "--kernel-cache", "off")
	mixed := pathsOf(mnt, mixture)
	count := map[string]int{}
	for _, p := range mixed {
		count[p[:strings.IndexByte(p, '/')]]++
	}
	if half := count["class00"]; len(mixed) != 80 || half <= 35 || half >= 45 ||
		half+count["class01"]+count["class02"] != 80 {
		t.Errorf("mixture: %d paths, %v", len(mixed), count)
	}
	readAll(t, mnt, dir, mixed)
	if s := readStats(t, mnt); s.Order.Position != len(mixed) {
		t.Errorf("after the mixture was read: %+v", s.Order)
	}

	sizes := make([]string, len(paths)) // the same by flags as by mount
	for i, p := range paths {
		fi, err := os.Stat(filepath.Join(dir, p))
		if err != nil {
			t.Fatal(err)
		}
		sizes[i] = fmt.Sprint(fi.Size())
	}
	file := filepath.Join(t.TempDir(), "sizes")
	write(t, file, []byte(strings.Join(sizes, "\n")))
	const buckets = "buckets:seed=2,batch=8,count=3"
	a := mustShoal(t, env, "order", buckets, "--mount", mnt)
	b := mustShoal(t, nil, "order", buckets, "--n", fmt.Sprint(len(paths)), "--sizes", file)
	if a != b || len(numbers(t, a)) != len(paths) {
		t.Error("buckets differ between mount and flags")
	}

	var c struct {
		Algorithm string
		Epoch     int
		Missing   int
		Labels    struct {
			Classes   int
			Variation float64 `json:"total_variation"`
			Random    float64 `json:"random_total_variation"`
		}
	}
	out := mustShoal(t, env, "order", "sequential", "--mount", mnt, "--certificate", "--batch", "10", "--epochs",
		"2", "--json")
	dec := json.NewDecoder(strings.NewReader(out))
	for epoch := range 2 {
		if err := dec.Decode(&c); err != nil {
			t.Fatal(err)
		}
		// Batches of 10 in classes of 30: each of one class in four.
		if c.Epoch != epoch || c.Algorithm != "sequential@1" || c.Missing != 0 || c.Labels.Classes != 4 ||
			c.Labels.Variation != 0.75 || c.Labels.Random > 0.3 {
			t.Errorf("certificate: %+v", c)
		}
	}
	text := mustShoal(t, env, "order", mixture, "--mount", mnt, "--world", "2", "--certificate", "--batch", "10")
	if !strings.Contains(text, "rank 1   40 positions of 3 classes") {
		t.Errorf("certificate of two ranks: %s", text)
	}
	text = mustShoal(t, nil, "order", "windowed:seed=1,window=4", "--n", "4000", "--shard-samples", "100",
		"--certificate", "--batch", "50")
	if !strings.Contains(text, "at most 4 open at once") || !strings.Contains(text, "D = ") {
		t.Errorf("certificate: %s", text)
	}

	for words, args := range map[string][]string{
		"--sizes FILE":     {"order", buckets, "--n", "9"},
		"--shard-samples":  {"order", "windowed:seed=1,window=2", "--n", "9"},
		"--class-samples":  {"order", "mixture:seed=1,weights=a:1", "--n", "9"},
		"--batch":          {"order", "uniform:seed=1", "--n", "9", "--certificate"},
		"class00, class01": {"order", "mixture:seed=1,weights=zebra:1", "--mount", mnt},
		"a sample number":  {"order", "list:" + list, "--n", "9"},
		"from=manual_seed": {"order", "torch-loader:seed=1", "--n", "9", "--epoch", "1"},
	} {
		if _, errs, code := shoal(t, env, args...); code != 2 || !strings.Contains(errs, words) {
			t.Errorf("shoal %v: exit %d, %q; want 2 and %q", args, code, errs, words)
		}
	}
}
