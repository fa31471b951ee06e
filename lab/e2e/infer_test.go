package e2e

import (
	"bufio"
	"fmt"
	"image"
	"image/png"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/shoalfs/shoal/lab/rig/proxy"
	"github.com/shoalfs/shoal/prefetch/order"
)

// trainer is an unmodified torch program. Before an epoch, and after as many batches of it as it was told, it
// waits for a line on its standard input.
const trainer = `
import sys, torch, torchvision
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
root, kind, seed, world, rank, workers, batch, epochs, pause = sys.argv[1:3] + [int(a) for a in sys.argv[3:]]
data = torchvision.datasets.ImageFolder(root, torchvision.transforms.ToTensor())
if kind in ('distributed', 'forgetful'):
    sampler = DistributedSampler(data, num_replicas=world, rank=rank, seed=seed)
    loader = DataLoader(data, batch, sampler=sampler, num_workers=workers)
elif kind == 'generator':
    loader = DataLoader(data, batch, shuffle=True, num_workers=workers, generator=torch.Generator().manual_seed(seed))
elif kind == 'sequential':
    loader = DataLoader(data, batch, num_workers=workers)
else:
    torch.manual_seed(seed)
    loader = DataLoader(data, batch, shuffle=True, num_workers=workers)
def wait(what):
    print(what, flush=True)
    if not sys.stdin.readline():
        sys.exit(1)
for epoch in range(epochs):
    wait('epoch')
    if kind == 'distributed':
        sampler.set_epoch(epoch)
    for i, (x, y) in enumerate(loader):
        if i + 1 == pause:
            wait('paused')
wait('end')
`

type torchTrainer struct {
	t   *testing.T
	in  io.Writer
	out *bufio.Reader
}

// startTrainer runs the trainer; it is ended with the test.
func startTrainer(t *testing.T, args ...any) *torchTrainer {
	t.Helper()
	words := []string{"-c", trainer}
	for _, a := range args {
		words = append(words, fmt.Sprint(a))
	}
	cmd := exec.Command("/usr/bin/python3", words...)
	cmd.Stderr = os.Stderr
	in, out := piped(t, cmd)
	t.Cleanup(func() {
		_ = in.Close() // it is told to go on, or finds the end
		_ = cmd.Wait()
	})
	return &torchTrainer{t, in, bufio.NewReader(out)}
}

// at waits until the trainer waits there.
func (p *torchTrainer) at(what string) {
	p.t.Helper()
	line, err := p.out.ReadString('\n')
	if err != nil || line != what+"\n" {
		p.t.Fatalf("the trainer said %q, %v, want %q", line, err, what)
	}
}

func (p *torchTrainer) goOn() {
	if _, err := io.WriteString(p.in, "\n"); err != nil {
		p.t.Fatal(err)
	}
}

// images24 makes a tree of small images that PIL can decode, in class folders below each of the given ones.
func images24(t testing.TB, classes, perClass int, below ...string) (dir string) {
	t.Helper()
	dir = t.TempDir()
	rng := rand.New(rand.NewPCG(3, 4))
	for _, b := range below {
		for c := range classes {
			folder := filepath.Join(dir, b, fmt.Sprintf("class%02d", c))
			if err := os.MkdirAll(folder, 0o755); err != nil {
				t.Fatal(err)
			}
			for i := range perClass {
				m := image.NewNRGBA(image.Rect(0, 0, 24, 24))
				for j := range m.Pix {
					m.Pix[j] = byte(rng.Uint32()) | 0xff*byte(j%4/3)
				}
				f, err := os.Create(filepath.Join(folder, fmt.Sprintf("img%04d.png", i)))
				if err != nil {
					t.Fatal(err)
				}
				if err := png.Encode(f, m); err != nil {
					t.Fatal(err)
				}
				if err := f.Close(); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	return dir
}

// orderSays returns .shoal/order, and what stands in it where the format has a verb, if it does.
func orderSays(t testing.TB, mnt string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(mnt, ".shoal/order"))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// waitInferred waits until an order is inferred and returns after how many reads.
// A search takes what nobody else uses of the processors, which beside other tests is little.
func waitInferred(t testing.TB, mnt string) (reads int) {
	t.Helper()
	within(t, 15*time.Minute, "an order inferred", func() bool { return readStats(t, mnt).Order.State == "inferred" })
	text := orderSays(t, mnt)
	_, after, ok := strings.Cut(text, "known after ")
	if _, err := fmt.Sscanf(after, "%d reads", &reads); !ok || err != nil {
		t.Fatalf("%v in %s", err, text)
	}
	t.Log(text)
	return reads
}

// loaderSpec is the spec of the order that a DataLoader without a sampler reads first.
func loaderSpec(seed uint64) string {
	g := order.NewGenerator(seed)
	g.Int63()
	return fmt.Sprintf("torch-loader:seed=%d", uint32(g.Int63()))
}

// An unmodified trainer on a mount without --order: the order is known after 64 reads at most, what
// follows is prefetched, and so is the next epoch.
func TestInfer(t *testing.T) {
	source := bucket(t, images24(t, 4, 300, "train", "val"))
	for _, c := range []struct {
		name        string
		folder      string // of the mount that the trainer reads
		kind        string
		seed        int
		world, rank int
		workers     int
		spec        string
		repeats     bool // each epoch is the first again
	}{
		{name: "workers", kind: "distributed", seed: 42, workers: 2, spec: "torch:seed=42"},
		{name: "manual_seed", kind: "loader", seed: 1234, workers: 2, spec: loaderSpec(1234)},
		{name: "one process", kind: "distributed", spec: "torch:seed=0"},
		{name: "a rank", kind: "distributed", seed: 7, world: 3, rank: 1, workers: 2,
			spec: "torch:seed=7,world=3,rank=1"},
		{name: "never told the epoch", kind: "forgetful", seed: 3, workers: 2, spec: "torch:seed=3", repeats: true},
		{name: "a generator of its own", kind: "generator", seed: 5, workers: 2, spec: "auto"},
		{name: "a folder", folder: "train", kind: "distributed", workers: 2, spec: "auto"},
	}[:atMost(2, 7)] {
		t.Run(c.name, func(t *testing.T) {
			_, env := far(t, proxy.Options{Latency: 5 * time.Millisecond, Sigma: 0.3})
			source := source
			if c.folder == "" {
				source += "/train" // of which the class folders are the mount's
			}
			mnt := mount(t, env, source, "--kernel-cache", "off")
			const batch = 8
			pause := 64 / batch
			if c.workers > 0 {
				pause -= 2 * c.workers // as many more batches are read ahead
			}
			p := startTrainer(t, filepath.Join(mnt, c.folder), c.kind, c.seed, max(c.world, 1), c.rank, c.workers,
				batch, 3, pause)
			p.at("epoch")
			p.goOn()
			p.at("paused")
			if reads := waitInferred(t, mnt); reads > 64 {
				t.Errorf("known after %d reads", reads)
			}
			before := readStats(t, mnt)
			if before.Order.Spec != c.spec {
				t.Errorf("order %q, want %q", before.Order.Spec, c.spec)
			}
			for epoch := range 2 {
				p.goOn()
				p.at("epoch")
				s := readStats(t, mnt)
				t.Logf("epoch %d: %d opens, %d misses, %d joined, %+v",
					epoch, s.Opens-before.Opens, s.Misses-before.Misses, s.Joined-before.Joined, s.Order)
				if opens, misses := s.Opens-before.Opens, s.Misses-before.Misses; misses > opens/10 {
					t.Errorf("epoch %d: %d of %d reads had to start their own fetch", epoch, misses, opens)
				}
				before = s
				p.goOn()
				p.at("paused")
				within(t, 5*time.Minute, "the next epoch noticed", func() bool {
					s := readStats(t, mnt)
					return s.Order.Epoch == epoch+1 || c.repeats && s.Order.Position < s.Files/4
				})
			}
			p.goOn()
			p.at("end")
			if s := readStats(t, mnt); s.Order.State != "inferred" || s.Order.Spec != c.spec {
				t.Errorf("%+v", s.Order)
			}
		})
	}
}

// A seed that is drawn, from a generator that was seeded with anything, is found among all 2^32.
func TestInferAnySeed(t *testing.T) {
	long(t)
	source := bucket(t, images24(t, 4, 300, ""))
	_, env := far(t, proxy.Options{Latency: 5 * time.Millisecond, Sigma: 0.3})
	mnt := mount(t, env, source, "--kernel-cache", "off")
	// What it draws is 138,148,906: a search of all takes its time, and most of it comes after that.
	const seed = 3_141_592_986
	p := startTrainer(t, mnt, "loader", seed, 1, 0, 2, 8, 2, 12)
	p.at("epoch")
	p.goOn()
	p.at("paused")
	waitInferred(t, mnt)
	before := readStats(t, mnt)
	if want := loaderSpec(seed); before.Order.Spec != want {
		t.Errorf("order %q, want %q", before.Order.Spec, want)
	}
	p.goOn()
	p.at("epoch")
	s := readStats(t, mnt)
	if opens, misses := s.Opens-before.Opens, s.Misses-before.Misses; misses > opens/10 {
		t.Errorf("%d of %d reads had to start their own fetch", misses, opens)
	}
	// The next epoch's seed is another one, and the mount says that it does not know.
	p.goOn()
	p.at("paused")
	within(t, patience, "a new search", func() bool { return readStats(t, mnt).Order.State == "searching" })
	p.goOn()
	p.at("end")
}

// A pass in sequence, as of a validation, is no shuffle: it is read ahead of after 16 opens, and a plan ends the
// guessing.
func TestInferSequence(t *testing.T) {
	source := bucket(t, images24(t, 4, 100, ""))
	_, env := far(t, proxy.Options{})
	mnt := mount(t, env, source, "--kernel-cache", "off")
	p := startTrainer(t, mnt, "sequential", 0, 1, 0, 2, 8, 2, 1)
	for range 2 {
		p.at("epoch")
		p.goOn()
		p.at("paused")
		within(t, patience, "a sequence", func() bool { return readStats(t, mnt).Order.Spec == "sequential" })
		p.goOn()
	}
	p.at("end")
	if s := readStats(t, mnt); s.Order.State != "inferred" || s.Opens < 800 || s.Misses > 80 {
		t.Errorf("%d misses of %d, %+v", s.Misses, s.Opens, s.Order)
	}
	if text := orderSays(t, mnt); !strings.HasPrefix(text, "order: sequential (inferred: file after file") {
		t.Error(text)
	}
	write(t, filepath.Join(mnt, ".shoal/plan"), []byte("class00/img0001.png\nclass01/img0002.png\n"))
	if s := readStats(t, mnt); s.Order.State != "waiting" || s.Order.Spec != "plan" {
		t.Errorf("%+v", s.Order)
	}
}
