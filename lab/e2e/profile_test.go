package e2e

import (
	"archive/tar"
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/shoalfs/shoal/lab/rig/proxy"
)

// readers does, for each line "KIND MOUNT", what such a program does on a mount. torch is imported once.
const readers = `
import multiprocessing, os, random, sys, time
import numpy, torch, torchvision
from PIL import Image
from torch.utils.data import DataLoader, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

def files(root, suffix=''):
    return sorted(os.path.join(d, f) for d, _, names in os.walk(root) for f in names if f.endswith(suffix))

def train(root, epochs, workers, pause=0, batch=8, sampler=None, set_epoch=False, **more):
    data = torchvision.datasets.ImageFolder(root, torchvision.transforms.ToTensor())
    s = sampler(data) if sampler else None
    loader = DataLoader(data, batch, sampler=s, num_workers=workers, **more)
    for epoch in range(epochs):
        if set_epoch:
            s.set_epoch(epoch)
        for i, _ in enumerate(loader):
            time.sleep(pause)

def distributed(seed):
    return lambda data: DistributedSampler(data, num_replicas=1, rank=0, seed=seed)

def job(root, seed, ready):
    rng = random.Random(seed)
    paths = files(root)
    rng.shuffle(paths)
    ready.wait()
    for p in paths:
        open(p, 'rb').read()
        time.sleep(0.003)

def jobs(root):
    ready = multiprocessing.Barrier(2)
    both = [multiprocessing.Process(target=job, args=(root, seed, ready)) for seed in (1, 2)]
    [p.start() for p in both]
    [p.join() for p in both]

def walk(root):
    for d, dirs, names in os.walk(root):
        for n in names:
            os.stat(os.path.join(d, n))

def header_then_body(root):
    paths = files(root)
    random.Random(3).shuffle(paths)
    for p in paths:
        with open(p, 'rb') as f:
            f.read(16)
        with open(p, 'rb') as f:
            f.read()

def memmap(root):
    rng = random.Random(4)
    maps = [numpy.memmap(p, dtype=numpy.uint8, mode='r') for p in files(root, '.npy')]
    for _ in range(300):
        m = rng.choice(maps)
        i = rng.randrange(len(m) - 4096)
        m[i:i + 4096].sum()

def shards(root):
    paths = files(root, '.tar')
    random.Random(5).shuffle(paths)
    for p in paths:
        with open(p, 'rb') as f:
            while f.read(1 << 20):
                pass

def weighted(root):
    weights = lambda data: WeightedRandomSampler([1.0 + i % 7 for i in range(len(data))], len(data))
    train(root, 1, 2, sampler=weights)

kinds = {
    'single': lambda r: train(r, 1, 0, sampler=distributed(7), set_epoch=True),
    'distributed': lambda r: train(r, 2, 2, sampler=distributed(7), set_epoch=True),
    'forgetful': lambda r: train(r, 2, 2, sampler=distributed(7)),
    'loader': lambda r: (torch.manual_seed(1234), train(r, 1, 2, shuffle=True)),
    'drawn': lambda r: (torch.seed(), train(r, 1, 2, shuffle=True)),
    'sequential': lambda r: train(r, 2, 2),
    'persistent': lambda r: train(r, 3, 2, sampler=distributed(7), set_epoch=True, persistent_workers=True),
    'slow': lambda r: train(r, 1, 2, pause=0.06, sampler=distributed(7), set_epoch=True),
    'weighted': weighted, 'jobs': jobs, 'walk': walk, 'header': header_then_body, 'memmap': memmap, 'shards': shards,
}
print('ready', flush=True)
for line in sys.stdin:
    kind, root = line.split()
    kinds[kind](root)
    print('done', flush=True)
`

// readerProcess runs readers; it is ended with the test.
type readerProcess struct {
	t   *testing.T
	in  io.Writer
	out *bufio.Reader
}

func startReaders(t *testing.T) *readerProcess {
	t.Helper()
	c := exec.CommandContext(t.Context(), "/usr/bin/python3", "-c", readers)
	c.Stderr = os.Stderr
	in, out := piped(t, c)
	t.Cleanup(func() {
		_ = in.Close()
		_ = c.Wait()
	})
	p := &readerProcess{t, in, bufio.NewReader(out)}
	p.says("ready")
	return p
}

func (p *readerProcess) says(want string) {
	p.t.Helper()
	if got, err := p.out.ReadString('\n'); err != nil || strings.TrimSpace(got) != want {
		p.t.Fatalf("the reader says %q, %v; want %q", got, err, want)
	}
}

func (p *readerProcess) do(kind, root string) {
	p.t.Helper()
	fmt.Fprintln(p.in, kind, root)
	p.says("done")
}

// profiled is what `shoal profile --json` prints, as far as is looked at.
type profiled struct {
	Version int
	Seconds float64
	Figures struct {
		Opens, Reads, Lookups, Files, Passes int
		Lost                                 int64
		WaitShare                            float64 `json:"wait_share"`
		AtOnce                               float64 `json:"processes_at_once"`
	}
	Findings []struct {
		Code, Level, Thing, Cause, Remedy string
	}
	Estimate *struct {
		Now  float64 `json:"files_per_second"`
		Cold float64 `json:"cold_files_per_second"`
	}
	Verdict string
}

func (p profiled) has(pattern string) bool {
	for _, f := range p.Findings {
		if f.Code == pattern {
			return true
		}
	}
	return false
}

func (p profiled) names() (names []string) {
	for _, f := range p.Findings {
		names = append(names, f.Code)
	}
	return names
}

// profileWhile records the mount while something goes on, until Ctrl-C.
func profileWhile(t *testing.T, mnt string, do func(), flags ...string) (p profiled) {
	t.Helper()
	c := exec.CommandContext(t.Context(), shoalBin,
		append([]string{"profile", mnt, "--duration", "0", "--json"}, flags...)...)
	var out bytes.Buffer
	c.Stdout = &out
	errs, err := c.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	said := bufio.NewReader(errs)
	first, err := said.ReadString('\n')
	if err != nil || !strings.Contains(first, "recording") {
		t.Fatalf("it says %q, %v", first, err)
	}
	do()
	if err := c.Process.Signal(syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	rest, _ := io.ReadAll(said)
	if err := c.Wait(); err != nil {
		t.Fatalf("%v\n%s", err, rest)
	}
	if err := json.Unmarshal(out.Bytes(), &p); err != nil {
		t.Fatalf("%v in %s", err, out.Bytes())
	}
	return p
}

// TestProfile: what unmodified programs do on a mount is recognised for what it is.
func TestProfile(t *testing.T) {
	long(t)
	dir := images24(t, 4, 100, "")
	large := t.TempDir()
	rng := rand.New(rand.NewPCG(5, 6))
	data := make([]byte, 9<<20)
	for i := range data {
		data[i] = byte(rng.Uint32())
	}
	for i := range 2 {
		write(t, filepath.Join(large, "maps", fmt.Sprintf("%d.npy", i)), data)
	}
	for i := range 3 {
		var b bytes.Buffer
		w := tar.NewWriter(&b)
		for k := range 9 {
			if err := w.WriteHeader(
				&tar.Header{Name: fmt.Sprintf("%d-%d.bin", i, k), Size: 1 << 20, Mode: 0o644}); err != nil {
				t.Fatal(err)
			}
			if _, err := w.Write(data[k<<20 : (k+1)<<20]); err != nil {
				t.Fatal(err)
			}
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		write(t, filepath.Join(large, "shards", fmt.Sprintf("shard-%06d.tar", i)), b.Bytes())
	}
	_, env := far(t, proxy.Options{Latency: 8 * time.Millisecond, Sigma: 0.3})
	source := bucket(t, dir)
	small := mount(t, env, source, "--kernel-cache", "off", "--order", "none")
	cached := mount(t, env, source, "--kernel-cache", "on", "--order", "none")
	walked := mount(t, env, source, "--order", "none")
	others := mount(t, env, "file://"+large, "--kernel-cache", "off", "--order", "none", "--samples", "*.bin")
	p := startReaders(t)
	for _, c := range []struct {
		kind, mount, folder string
		want, not           []string
	}{
		// cold: it waits
		{"single", small, "", []string{"torch-shuffle", "one-reader"}, []string{"sequential", "not-the-storage"}},
		{"distributed", small, "", []string{"torch-shuffle"},
			[]string{"with-replacement", "repeated-shuffle", "one-reader"}},
		{"persistent", small, "", []string{"torch-shuffle"}, []string{"with-replacement"}},
		{"forgetful", small, "", []string{"torch-shuffle", "repeated-shuffle"}, []string{"with-replacement"}},
		{"loader", small, "", []string{"torch-shuffle"}, []string{"shuffle"}},
		{"drawn", small, "", []string{"shuffle"}, []string{"torch-shuffle", "sequential"}},
		{"sequential", small, "", []string{"sequential"}, []string{"shuffle"}},
		{"weighted", small, "", []string{"with-replacement"}, []string{"torch-shuffle"}},
		{"jobs", small, "", []string{"with-replacement"}, []string{"sequential"}},
		{"header", small, "", []string{"shuffle"}, []string{"with-replacement"}},
		{"slow", small, "", []string{"not-the-storage"}, []string{"one-reader"}},
		{"memmap", others, "maps", []string{"random-inside-files"}, []string{"shards", "sequential"}},
		{"shards", others, "shards", []string{"shards"}, []string{"random-inside-files"}},
		{"walk", walked, "", []string{"idle"}, []string{"sequential", "shuffle"}},
	} {
		t.Run(c.kind, func(t *testing.T) {
			var got profiled
			for range 3 {
				got = profileWhile(t, c.mount, func() { p.do(c.kind, filepath.Join(c.mount, c.folder)) })
				t.Logf("%v: %+v\n%s", got.names(), got.Figures, got.Verdict)
				wrong := slices.DeleteFunc(slices.Clone(c.want), got.has)
				for _, not := range c.not {
					if got.has(not) {
						wrong = append(wrong, not)
					}
				}
				// Who waits for what is a matter of times, which a busy machine changes. What is read is not.
				if len(wrong) == 0 || slices.ContainsFunc(wrong, func(name string) bool {
					return name != "one-reader" && name != "not-the-storage"
				}) {
					break
				}
			}
			for _, want := range c.want {
				if !got.has(want) {
					t.Errorf("it is not seen to be %s: %+v", want, got.Findings)
				}
			}
			for _, not := range c.not {
				if got.has(not) {
					t.Errorf("it is taken for %s: %+v", not, got.Findings)
				}
			}
			if got.Version != 2 || got.Verdict == "" || got.Figures.Lost != 0 {
				t.Errorf("%+v", got)
			}
		})
	}
	t.Run("page cache", func(t *testing.T) {
		// Another test may empty the kernel's caches at any moment.
		within(t, patience, "the page cache seen", func() bool {
			p.do("sequential", cached)
			got := profileWhile(t, cached, func() { p.do("sequential", cached) })
			t.Logf("%v: %+v", got.names(), got.Figures)
			return got.has("page-cache")
		})
	})
	t.Run("kept", func(t *testing.T) {
		file := filepath.Join(t.TempDir(), "kept.trace")
		live := profileWhile(t, small, func() { p.do("distributed", small) }, "--out", file)
		var again profiled
		decode(t, mustShoal(t, nil, "profile", "--from", file, "--json"), &again)
		if !slices.Equal(live.names(), again.names()) || live.Figures != again.Figures ||
			live.Verdict != again.Verdict {
			t.Errorf("live %+v, from the file %+v", live, again)
		}
		if _, errs, code := shoal(t, nil, "profile", small, "--duration", "1s", "--out", "/dev/full"); code != 1 ||
			!strings.Contains(errs, "--out: ") {
			t.Errorf("a recording that no disk takes: %d, %s", code, errs)
		}
		if text := mustShoal(t, nil, "profile", "--from", file); !strings.Contains(text, "torch-shuffle") ||
			!strings.Contains(text, live.Verdict) {
			t.Errorf("%s", text)
		}
	})
	t.Run("ends with its reader", func(t *testing.T) {
		c := exec.Command(shoalBin, "profile", small, "--duration", "0")
		errs, err := c.StderrPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		if _, err := bufio.NewReader(errs).ReadString('\n'); err != nil {
			t.Fatal(err)
		}
		if err := c.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = c.Wait()
		// As many as there may be at once can be begun again, so none was left behind.
		within(t, patience, "four recordings at once", func() bool {
			var open []*os.File
			defer func() {
				for _, f := range open {
					f.Close()
				}
			}()
			for range 4 {
				f, err := os.Open(filepath.Join(small, ".shoal/profile"))
				if err != nil {
					return false
				}
				open = append(open, f)
			}
			f, err := os.Open(filepath.Join(small, ".shoal/profile"))
			if err == nil {
				f.Close()
				t.Error("a fifth")
			}
			return true
		})
	})
	t.Run("not listed", func(t *testing.T) {
		names, err := os.ReadDir(filepath.Join(small, ".shoal"))
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range names {
			if n.Name() == "profile" {
				t.Error("it is listed: whatever goes through the folder would record")
			}
		}
	})
	t.Run("no mount", func(t *testing.T) {
		if _, errs, code := shoal(t, nil, "profile", t.TempDir()); code != 1 ||
			!strings.Contains(errs, "not a live shoal mount") {
			t.Errorf("exit %d, %s", code, errs)
		}
		if _, errs, code := shoal(t, nil, "profile"); code != 2 {
			t.Errorf("exit %d, %s", code, errs)
		}
		if _, errs, code := shoal(t, nil, "profile", "--from", "/dev/null"); code != 1 ||
			!strings.Contains(errs, "empty") {
			t.Errorf("exit %d, %s", code, errs)
		}
	})
}
