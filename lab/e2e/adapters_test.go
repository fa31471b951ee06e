package e2e

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/minio/minio-go/v7"

	"github.com/shoalfs/shoal/lab/rig/proxy"
)

// The libraries that `shoal run` has adapters for, from PyPI and unchanged, over a mount whose store is far away. The
// library is the oracle: its plans are what it then reads, its batches and all that the generators draw are those of a
// local disk, and what it reads is in memory. It prints a table, each row beside a mount that follows no order.
func TestAdapters(t *testing.T) {
	python := os.Getenv("SHOAL_ADAPTERS")
	if python == "" {
		t.Skip("make conformance runs it")
	}
	dir := t.TempDir()
	if out, err := exec.CommandContext(t.Context(), python, "-B", "adapters.py",
		"make", dir).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	_, env := far(t, proxy.Options{Latency: 30 * time.Millisecond, Bandwidth: 200e6})
	url := bucket(t, dir)
	const info = "/tars/.nv-meta/.info.json" // bucket leaves names with a dot out
	if _, err := store(t).FPutObject(t.Context(), bucketName(t), "train"+info, dir+info,
		minio.PutObjectOptions{DisableContentSha256: true}); err != nil {
		t.Fatal(err)
	}
	fmt.Println("| case | samples/s without Shoal's order | with | on a local disk | reads or opens that wait, " +
		"without | with | reads |")
	fmt.Println("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
	for _, c := range []struct {
		name, plan string
		exact      bool // each process reads a part of the plan, in its order, and all together the whole plan
	}{
		{"datasets", "datasets", true},
		{"datasets shuffled", "datasets", true},
		{"energon", "energon-worker", false},
		{"litdata", "litdata-worker", false},
		{"megatron", "megatron", true},
		{"megatron mmap", "megatron", true},
		{"megatron blended", "megatron", true},
		{"webdataset", "webdataset-worker", true},
		{"webdataset detshuffle", "webdataset-worker", true},
		{"webdataset resampled", "webdataset-worker", false},
		{"streaming", "streaming", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			local := adapted(t, nil, python, c.name, dir)
			forMount := func(order string, run ...string) trained {
				mnt := mount(t, env, url, "--cache-size", "0", "--memory", "384MiB", "--order", order)
				defer umount(t, mnt)
				return adapted(t, run, python, c.name, mnt)
			}
			without, with := forMount("none"), forMount("auto", shoalBin, "run", "-v", "--")
			if with.Digest != local.Digest || without.Digest != local.Digest {
				t.Errorf("batches or random numbers differ: local %.8s, without hints %.8s, with %.8s",
					local.Digest, without.Digest, with.Digest)
			}
			told := with.told(t, c.plan)
			for i, read := range with.Read {
				if c.exact && !partOf(read, told) {
					t.Errorf("process %d does not read in the order of any plan", i)
				}
			}
			if read, plans := sorted(slices.Concat(with.paths()...)),
				sorted(slices.Concat(told...)); c.exact && !slices.Equal(read, plans) {
				t.Errorf("%d reads, %d told", len(read), len(plans))
			} else if i := slices.IndexFunc(read, func(what string) bool {
				return !slices.ContainsFunc(plans, func(told string) bool { return inRange(what, told) })
			}); i >= 0 {
				t.Errorf("%s was read, and not told", read[i])
			} else if read, told := bytesOf(read), bytesOf(plans); told > read+512*64 {
				t.Errorf("%d bytes read, %d told", read, told)
			}
			fmt.Printf("| %s | %.1f | %.1f | %.1f | %.1f%% | %.1f%% | %d |\n", c.name, without.rate(), with.rate(),
				local.rate(), 100*without.waited(), 100*with.waited(), len(sorted(slices.Concat(with.paths()...))))
			if with.waited() > 0.25 { // a busy machine has reads wait for itself
				t.Errorf("%.1f%% waited:\n%s", 100*with.waited(), with.said)
			}
		})
	}
}

// For a version that its adapter does not know no plan is written; -v says so in one line, and nothing else changes.
func TestAdaptersUnknownVersion(t *testing.T) {
	python := os.Getenv("SHOAL_ADAPTERS")
	if python == "" {
		t.Skip("make conformance runs it")
	}
	dir, other := t.TempDir(), t.TempDir()
	write(t, filepath.Join(other, "webdataset-9.9.9.dist-info", "METADATA"), []byte(
		"Metadata-Version: 2.1\nName: webdataset\nVersion: 9.9.9\n"))
	cmd := exec.CommandContext(t.Context(), shoalBin, "run", "-v", "--", python, "-B", "-c",
		"import webdataset; print(webdataset.cache.StreamingOpen.__call__.__module__)")
	var errs bytes.Buffer
	cmd.Env, cmd.Stderr = append(os.Environ(), "XDG_CACHE_HOME="+dir, "PYTHONPATH="+other), &errs
	out, err := cmd.Output()
	if want := regexp.MustCompile(
		`^shoal run: no hint: the adapter of webdataset knows [0-9.]+, and this is 9\.9\.9\n$`); err != nil ||
		string(out) != "webdataset.cache\n" || !want.MatchString(errs.String()) {
		t.Errorf("%v: %s%s", err, out, errs.String())
	}
}

// trained is what adapters.py says.
type trained struct {
	Seconds          float64
	Batches, Samples int
	Digest           string
	Read             [][]read    // by process
	Plans            [][2]string // names and texts
	said             string
}

// read is what a process read: a file, or a range of one, and how many seconds it took.
type read [2]any

func adapted(t *testing.T, run []string, args ...string) (r trained) {
	t.Helper()
	args = append(slices.Insert(args, 1, "-B", "adapters.py"), "0.01")
	cmd := exec.CommandContext(t.Context(), slices.Concat(run, args)[0], slices.Concat(run, args)[1:]...)
	var errs bytes.Buffer
	cmd.Env, cmd.Stderr = append(os.Environ(), "XDG_CACHE_HOME="+t.TempDir()), &errs
	out, err := cmd.Output()
	if err == nil {
		err = json.Unmarshal(out, &r)
	}
	if r.said = errs.String(); err != nil || r.Batches == 0 {
		t.Fatalf("%v: %v\n%s", args, err, r.said)
	}
	return r
}

func (r trained) rate() float64 { return float64(r.Samples) / r.Seconds }

// paths are the reads of each process.
func (r trained) paths() (paths [][]string) {
	for _, reads := range r.Read {
		var one []string
		for _, read := range reads {
			one = append(one, read[0].(string))
		}
		paths = append(paths, one)
	}
	return paths
}

// waited is the share of the reads that took as long as the store is away.
func (r trained) waited() float64 {
	all := slices.Concat(r.Read...)
	n := 0
	for _, read := range all {
		if read[1].(float64) > 0.025 {
			n++
		}
	}
	return float64(n) / float64(len(all))
}

// told is what each process was told to read: the plans of a name, window after window.
func (r trained) told(t *testing.T, name string) (told [][]string) {
	t.Helper()
	by := map[string][]string{}
	for _, p := range r.Plans {
		if !strings.HasPrefix(p[0], name) {
			t.Errorf("plan %s", p[0])
		}
		for line := range strings.Lines(p[1]) {
			if path, where, _ := strings.Cut(strings.TrimSpace(line), "\t"); path != "#ranges" {
				by[p[0]] = append(by[p[0]],
					strings.TrimSpace(filepath.Base(path)+" "+strings.ReplaceAll(where, "\t", " ")))
			}
		}
	}
	for _, lines := range by {
		told = append(told, lines)
	}
	return told
}

// partOf reports whether a process's reads are, in order, a part of one of the plans.
func partOf(reads []read, plans [][]string) bool {
	return slices.ContainsFunc(plans, func(plan []string) bool {
		for _, read := range reads {
			i := slices.Index(plan, read[0].(string))
			if i < 0 {
				return false
			}
			plan = plan[i+1:]
		}
		return true
	})
}

// inRange reports whether what was read is a part of what was told: both are files, or ranges of files.
func inRange(read, told string) bool {
	a, from, n := rangeOf(read)
	b, begin, size := rangeOf(told)
	return a == b && from >= begin && from+n <= begin+size
}

func rangeOf(s string) (file string, from, n int64) {
	_, _ = fmt.Sscan(s, &file, &from, &n)
	return file, from, n
}

func bytesOf(ranges []string) (sum int64) {
	for _, s := range ranges {
		_, _, n := rangeOf(s)
		sum += n
	}
	return sum
}

func sorted(s []string) []string {
	slices.Sort(s)
	return s
}
