package e2e

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/shoalfs/shoal/gpuingest/jpeg"
	"github.com/shoalfs/shoal/lab/rig/certtest"
	"github.com/shoalfs/shoal/lab/rig/proxy"
)

// pictures makes JPEG files of 200 by 150 pixels, classes of perClass.
func pictures(t testing.TB, classes, perClass int) (dir string, paths []string) {
	t.Helper()
	dir = t.TempDir()
	const w, h = 200, 150
	for c := range classes {
		for i := range perClass {
			rgb := make([]byte, 3*w*h)
			for y := range h {
				for x := range w {
					p := rgb[3*(y*w+x):]
					p[0], p[1], p[2] = byte(x+i), byte(y+c*20), byte(x*y/64+i*c)
				}
			}
			data, err := jpeg.Encode(nil, rgb, w, h, 90, jpeg.Sub420)
			if err != nil {
				t.Fatal(err)
			}
			p := fmt.Sprintf("class%02d/img%04d.jpg", c, i)
			write(t, filepath.Join(dir, p), data)
			paths = append(paths, p)
		}
	}
	return dir, paths
}

// serve starts a feed and returns its address and mount point.
func serve(t testing.TB, env []string, source string, flags ...string) (addr, mnt string) {
	t.Helper()
	mnt = t.TempDir()
	addr = "unix://" + filepath.Join(t.TempDir(), "run", "feed.sock")
	args := append([]string{"serve", source, "--listen", addr, "--mount", mnt, "--cache-dir", t.TempDir(),
		"--daemon"}, flags...)
	mustShoal(t, env, args...)
	t.Cleanup(func() {
		if mounted(mnt) {
			umount(t, mnt)
		}
	})
	return addr, mnt
}

type feedResult struct {
	Batches, Samples int
	Digest, State    string
	Order            struct {
		Spec     string
		Position int
		State    string
	}
}

func feed(t testing.TB, addr string, flags ...string) feedResult {
	t.Helper()
	var r feedResult
	out := mustShoal(t, nil, append([]string{"feed", addr, "--json"}, flags...)...)
	if err := json.Unmarshal([]byte(out), &r); err != nil {
		t.Fatal(err)
	}
	return r
}

// digest is the contract's: SHA-256 over (sample u64, length u64, bytes) in order of delivery.
func digest(t testing.TB, dir string, paths []string, order []int) string {
	t.Helper()
	h := sha256.New()
	for _, i := range order {
		data, err := os.ReadFile(filepath.Join(dir, paths[i]))
		if err != nil {
			t.Fatal(err)
		}
		var head [16]byte
		binary.LittleEndian.PutUint64(head[:8], uint64(i))
		binary.LittleEndian.PutUint64(head[8:], uint64(len(data)))
		h.Write(head[:])
		h.Write(data)
	}
	return hex.EncodeToString(h.Sum(nil))
}

func orderOf(t testing.TB, spec string, n int, flags ...string) (order []int) {
	t.Helper()
	for line := range strings.Lines(
		mustShoal(t, nil, append([]string{"order", spec, "--n", strconv.Itoa(n)}, flags...)...)) {
		i, err := strconv.Atoi(strings.TrimSpace(line))
		if err != nil {
			t.Fatal(err)
		}
		order = append(order, i)
	}
	return order
}

// What the feed delivers is what the order says, byte for byte, whole, by ranks, and resumed.
func TestFeedDigests(t *testing.T) {
	dir, paths := tree(t, 3, 50, 20<<10)
	_, env := far(t, proxy.Options{Latency: 5 * time.Millisecond})
	addr, _ := serve(t, env, bucket(t, dir))
	n := len(paths)
	for _, c := range []struct{ spec, flags string }{
		{"uniform:seed=3", ""},
		{"uniform:seed=3", "--epoch 4"},
		{"uniform:seed=3", "--world 3 --rank 1"},
		{"torch:seed=9", "--epoch 2"},
		{"torch:seed=9", "--world 4 --rank 3"},
		{"sequential", ""},
	} {
		flags := strings.Fields(c.flags)
		r := feed(t, addr, append([]string{"--batch", "16", "--order", c.spec}, flags...)...)
		if want := digest(t, dir, paths, orderOf(t, c.spec, n, flags...)); r.Digest != want {
			t.Errorf("%s %s: %d samples with another digest than the order's", c.spec, c.flags, r.Samples)
		}
	}
	// Stopped after 4 batches and resumed from the state, the rest is what would have followed.
	part := feed(t, addr, "--batch", "16", "--order", "uniform:seed=3", "--batches", "4")
	rest := feed(t, addr, "--state", part.State)
	order := orderOf(t, "uniform:seed=3", n)
	if part.Digest != digest(t, dir, paths, order[:64]) || rest.Digest != digest(t, dir, paths, order[64:]) {
		t.Errorf("resumed: %d + %d samples, digests differ from the order's", part.Samples, rest.Samples)
	}
}

// A picture that cannot be decoded fails the session with its name, or is skipped within the quota.
func TestFeedBadPicture(t *testing.T) {
	dir, paths := pictures(t, 2, 10)
	whole, err := os.ReadFile(filepath.Join(dir, paths[7]))
	if err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(dir, paths[7]), whole[:len(whole)/2])
	_, env := far(t, proxy.Options{})
	addr, _ := serve(t, env, bucket(t, dir))
	const transform = "RandomResizedCrop(64)|RandomHorizontalFlip()|uint8|nchw"
	_, errs, code := shoal(t, nil, "feed", addr, "--batch", "5", "--transform", transform)
	if code != 1 || !strings.Contains(errs, paths[7]) || !strings.Contains(errs, "truncated") {
		t.Errorf("exit %d:\n%s", code, errs)
	}
	out, errs, code := shoal(t, nil, "feed", addr, "--batch", "5", "--transform", transform, "--bad", "skip:10%")
	if code != 0 || !strings.Contains(errs, paths[7]) || !strings.HasPrefix(out, "19 samples") {
		t.Errorf("skip: exit %d:\n%s%s", code, out, errs)
	}
}

// piped starts a command, and returns its input and output.
func piped(t testing.TB, cmd *exec.Cmd) (in io.WriteCloser, out io.Reader) {
	t.Helper()
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if out, err = cmd.StdoutPipe(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return in, out
}

// python runs a script with the client on its path.
func python(t testing.TB, script string, args ...string) *exec.Cmd {
	t.Helper()
	client, err := filepath.Abs("../../python")
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("/usr/bin/python3", append([]string{"-c", script}, args...)...)
	cmd.Env = append(os.Environ(), "PYTHONPATH="+client, "PYTHONDONTWRITEBYTECODE=1")
	return cmd
}

func runPython(t testing.TB, into any, script string, args ...string) {
	t.Helper()
	cmd := python(t, script, args...)
	var errs bytes.Buffer
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v\n%s", err, errs.String())
	}
	if err := json.Unmarshal(out, into); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
}

// A trainer with torch: batches through DataLoader(feed, batch_size=None), several epochs, labels right.
func TestFeedIntoTorch(t *testing.T) {
	dir, paths := pictures(t, 4, 16)
	_, env := far(t, proxy.Options{Latency: 2 * time.Millisecond})
	addr, _ := serve(t, env, bucket(t, dir))
	var got struct {
		Lens   []int
		Shape  []int
		Dtype  string
		IDs    [][]int
		Labels [][]int
	}
	runPython(t, &got, `
import json, sys, torch
from shoal import Feed
feed = Feed(sys.argv[1], 16, transform="RandomResizedCrop(32)|RandomHorizontalFlip()|uint8|nchw", seed=5)
out = dict(Lens=[], IDs=[], Labels=[])
for epoch in range(2):
    feed.set_epoch(epoch)
    out["Lens"].append(len(feed))
    ids, labels = [], []
    for batch in torch.utils.data.DataLoader(feed, batch_size=None):
        x, y = batch
        ids += batch.id.tolist(); labels += y.tolist()
    out["IDs"].append(ids); out["Labels"].append(labels)
out["Shape"], out["Dtype"] = list(x.shape), str(x.dtype)
print(json.dumps(out))`, addr)
	if got.Dtype != "torch.uint8" || fmt.Sprint(got.Shape) != "[16 3 32 32]" {
		t.Errorf("batches are %s of %v", got.Dtype, got.Shape)
	}
	for epoch := range 2 {
		want := orderOf(t, "uniform:seed=5", len(paths), "--epoch", strconv.Itoa(epoch))
		if fmt.Sprint(got.IDs[epoch]) != fmt.Sprint(want) {
			t.Errorf("epoch %d: delivered %v, order %v", epoch, got.IDs[epoch], want)
		}
		for i, id := range got.IDs[epoch] {
			if got.Labels[epoch][i] != id/16 {
				t.Errorf("sample %d has label %d", id, got.Labels[epoch][i])
			}
		}
	}
}

// What a trainer's stats say of the server is what `shoal serve` counted, while it trains and after its last batch.
func TestFeedStatsOfTheServer(t *testing.T) {
	dir, _ := pictures(t, 2, 16)
	_, env := far(t, proxy.Options{Latency: 2 * time.Millisecond})
	addr, _ := serve(t, env, bucket(t, dir))
	var got struct{ During, After map[string]float64 }
	runPython(t, &got, `
import json, sys
from shoal import Feed
feed = Feed(sys.argv[1], 2, transform="CenterCrop(64)|uint8", epochs=1, credits=1, session="job", as_torch=False)
out = {}
for batch in feed:
    out["During"] = feed.stats()  # which takes longer than the server does: it waits for credit
out["After"] = feed.stats()
print(json.dumps(out))`, addr)
	var st struct {
		Feed struct {
			Ended []map[string]any `json:"ended_list"`
		}
	}
	if err := json.Unmarshal([]byte(mustShoal(t, nil, "stat", addr, "--json")), &st); err != nil {
		t.Fatal(err)
	}
	if len(st.Feed.Ended) != 1 || st.Feed.Ended[0]["session"] != "job" {
		t.Fatalf("sessions that have ended: %v", st.Feed.Ended)
	}
	for _, name := range []string{"fetch_seconds", "decode_seconds", "stall_seconds", "credit_seconds"} {
		if got.After[name] == 0 || got.After[name] < got.During[name] || got.After[name] != st.Feed.Ended[0][name] {
			t.Errorf("%s: %g in mid-epoch, %g at the end; the server says %v",
				name, got.During[name], got.After[name], st.Feed.Ended[0][name])
		}
	}
}

// What the server makes of pictures is what the trainer's torchvision makes of them with the same draws, which Python
// computes by itself.
func TestVerify(t *testing.T) {
	long(t)
	dir, _ := pictures(t, 2, 12)
	_, env := far(t, proxy.Options{})
	addr, _ := serve(t, env, bucket(t, dir))
	own := t.TempDir()
	write(t, filepath.Join(own, "own.py"), []byte(`
import torch
from torchvision import transforms as T
classes = T.Compose([T.Resize(100), T.RandomCrop(90, padding=4), T.RandomHorizontalFlip(), T.ColorJitter(.4, .4, .4, .1), T.RandomRotation(9),
                     T.RandAugment(), T.AutoAugment(), T.RandomEqualize(), T.RandomResizedCrop(64), T.TrivialAugmentWide(), T.PILToTensor(),
                     T.ConvertImageDtype(torch.half), T.Normalize(.5, (.2, .3, .4)), T.RandomErasing(.5, value=(1, 2, 3))])
def view(size, blur):
    return T.Compose([T.RandomResizedCrop(size), T.RandomApply([T.ColorJitter(.4, .4, .2, .1), T.RandomGrayscale()], p=.8), T.RandomApply([T.GaussianBlur(5)], p=blur),
                      T.RandomChoice([T.RandomSolarize(128), T.RandomHorizontalFlip(1.)], p=[1, 2]), T.RandomChoice([T.RandomInvert(), T.RandomEqualize()]), T.ToTensor()])
views = [view(64, 1.), view((48, 40), .5), view((48, 40), .5)]
`))
	t.Setenv("PYTHONPATH", own)
	for _, c := range []struct {
		transform string
		code      int
		says      string
	}{
		{"RandomResizedCrop(64)|RandomHorizontalFlip()|fp32|nhwc|Normalize((0.485,0.456,0.406),(0.229,0.224,0.225))|RandomErasing()", 0, "24 of 24 rows equal"},
		{"RandomResizedCrop((40,70), interpolation='bicubic')|RandomVerticalFlip()|RandAugment()|bf16", 0,
			"24 of 24 rows equal"},
		{"Resize(80)|RandomCrop(90, padding=4, " +
			"pad_if_needed=True)|ColorJitter(0.4,0.4,0.4,0.1)|TrivialAugmentWide()|fp16", 0, "24 of 24 rows equal"},
		{"CenterCrop(90)|AutoAugment()|RandomRotation(20)|RandomGrayscale()|GaussianBlur(5)", 0, "24 of 24 rows equal"},
		// Debian's Pillow has the rule of 9.4
		{"Resize((40,190))|pillow(13)", 1, "of 22800 values, by 1 at most"},
		// within 1 of 255
		{"RandomResizedCrop(64)|GaussianBlur(5)|fp16|Normalize((0.5,),(0.2,),dtype='fp16')|v2", 0,
			"24 of 24 rows equal"},
		{"own:classes", 0, "24 of 24 rows equal"},
		{"views(2x[RandomResizedCrop(64, interpolation='bicubic')|RandomApply([ColorJitter(0.4,0.4,0.4,0.1)], " +
			"0.8)|RandomApply([GaussianBlur(5)])], [CenterCrop(170)|RandomHorizontalFlip()], " +
			"3x[RandomResizedCrop((32,40))|RandomChoice([RandomSolarize(99), RandomRotation(20)], [1, " +
			"3])|RandomChoice([RandAugment(), " +
			"RandomVerticalFlip()])])|fp16|nhwc|Normalize((0.5,),(0.2,))|RandomErasing()", 0, "24 of 24 rows equal"},
		{"own:views", 0, "24 of 24 rows equal"},
		{"views(2x[Resize((40,190))])|pillow(13)", 1, "view 1: "},
		{"own:absent", 2, "own:absent"},
		{"CenterCrop(90)|MixUp()", 2, "MixUp is not replayed"},
		{"CenterCrop(90)|RandomChoice([CutMix()])", 2, "CutMix is not replayed"},
		{"CenterCrop(90", 2, "column 14"},
	} {
		out, errs, code := shoal(t, nil, "verify", addr, "--python", "/usr/bin/python3", "--batch", "12", "--batches",
			"2", "--seed", "9", "--epoch", "1", "--transform", c.transform)
		if code != c.code || !strings.Contains(out+errs, c.says) {
			t.Errorf("%s: exit %d\n%s%s", c.transform, code, out, errs)
		}
	}
	ca := certtest.New(t, "e2e")
	cert, key := ca.Issue(t, "feed.example.org", 24*time.Hour)
	secure := "tls://" + freePort(t)
	serve(t, env, bucket(t, dir), "--listen", secure, "--tls-cert", cert, "--tls-key", key)
	if out, errs, code := shoal(t, nil, "verify", secure, "--python", "/usr/bin/python3", "--ca", ca.File,
		"--server-name", "feed.example.org"); code != 0 {
		t.Errorf("over TLS: exit %d\n%s%s", code, out, errs)
	}
	if out, errs, code := shoal(t, nil, "verify", addr, "--python", "/usr/bin/python3", "--batches", "0"); code != 2 ||
		!strings.Contains(errs, "--batches=0") {
		t.Errorf("no batches are equal: exit %d, %s%s", code, out, errs)
	}
	if _, errs, code := shoal(t, nil, "verify", addr, "--python", "/nonexistent/python3"); code != 2 ||
		!strings.Contains(errs, "--python") {
		t.Errorf("without a Python: exit %d, %s", code, errs)
	}
	// The same numbers for whoever asks: in a copy, and not of raw samples.
	var got struct{ Params, Raw string }
	runPython(t, &got, `
import json, sys
from shoal import Feed
feed = Feed(sys.argv[1], 4, transform="RandomResizedCrop(32)|RandomHorizontalFlip()", tail="pad", order="sequential", bad="skip:1")
batch = next(iter(feed))
assert batch.copy().params == batch.params and len(batch.params) == 4
raw = next(iter(Feed(sys.argv[1], 4)))
try:
    raw.params
except ValueError as e:
    raw = str(e)
print(json.dumps(dict(Params=str(batch.params[0]), Raw=raw)))`, addr)
	if !strings.HasPrefix(got.Params, "[('RandomResizedCrop', {'left': ") ||
		!strings.Contains(got.Params, "('RandomHorizontalFlip', {'flip': ") || !strings.Contains(got.Raw, "pictures") {
		t.Errorf("%+v", got)
	}
}

// Views of one decode are the same however they come: in slots, in chunks or after a resume.
func TestFeedViews(t *testing.T) {
	dir, _ := pictures(t, 3, 16)
	_, env := far(t, proxy.Options{Latency: 2 * time.Millisecond})
	addr, _ := serve(t, env, bucket(t, dir))
	const spec = "views(2x[RandomResizedCrop(64)|RandomApply([ColorJitter(0.4)], p=0.8)], 3x[RandomResizedCrop((32, " +
		"24))|RandomHorizontalFlip()])|fp16"
	whole := feed(t, addr, "--batch", "8", "--epochs", "2", "--seed", "3", "--transform", spec)
	if chunks := feed(t, addr, "--batch", "8", "--epochs", "2", "--seed", "3", "--transform", spec, "--transport",
		"chunks"); chunks.Digest != whole.Digest || whole.Samples != 96 {
		t.Errorf("%d samples; in slots %s, in chunks %s", whole.Samples, whole.Digest, chunks.Digest)
	}
	var got struct{ Whole, Resumed, Params, Fields string }
	runPython(t, &got, `
import hashlib, json, sys
import torch
from shoal import Feed
def take(feed, h, most=None):
    for k, batch in enumerate(feed):
        views, label = batch
        assert [tuple(v.shape[1:]) for v in views] == [(3, 64, 64)] * 2 + [(3, 32, 24)] * 3 and views[0].dtype is torch.float16
        assert batch.view0 is views[0] and batch.view4 is views[4] and batch.copy().view4 is not views[4]
        for v in views:
            h.update(v.numpy().tobytes())
        h.update(label.numpy().tobytes())
        if k + 1 == most:
            return batch
    return batch
a, b = hashlib.sha256(), hashlib.sha256()
make = lambda: Feed(sys.argv[1], 8, transform=sys.argv[2], seed=3, epochs=2)
with make() as feed:
    for epoch in range(2):
        feed.set_epoch(epoch)
        last = take(feed, a)
with make() as feed:
    take(feed, b, 4)
    state = feed.state_dict()
with make() as feed:
    feed.load_state_dict(state)
    take(feed, b)
    feed.set_epoch(1)
    take(feed, b)
print(json.dumps(dict(Whole=a.hexdigest(), Resumed=b.hexdigest(), Params=str([[name for name, _ in view] for view in last.params[0]]), Fields=str(list(last.fields)))))`, addr, spec)
	if got.Whole != got.Resumed || got.Fields != "['view0', 'view1', 'view2', 'view3', 'view4']" ||
		got.Params != "[['RandomResizedCrop', 'RandomApply'], ['RandomResizedCrop', 'RandomApply'], "+
			strings.Repeat("['RandomResizedCrop', 'RandomHorizontalFlip'], ", 2)+
			"['RandomResizedCrop', 'RandomHorizontalFlip']]" {
		t.Errorf("%+v", got)
	}
}

// A trainer that dies in mid-epoch: its session ends and its memory comes back.
func TestFeedTrainerDies(t *testing.T) {
	dir, _ := pictures(t, 4, 64)
	_, env := far(t, proxy.Options{Latency: 2 * time.Millisecond})
	addr, mnt := serve(t, env, bucket(t, dir))
	cmd := python(t, `
import sys, time
from shoal import Feed
feed = iter(Feed(sys.argv[1], 8, transform="CenterCrop(128)|uint8|nchw", credits=8))
next(feed); print("running", flush=True); time.sleep(600)`, addr)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := out.Read(make([]byte, 64)); err != nil {
		t.Fatal(err)
	}
	type feedStats struct {
		Feed struct {
			Open int   `json:"open_sessions"`
			Held int64 `json:"held_bytes"`
		}
	}
	read := func() (s feedStats) {
		if err := json.Unmarshal([]byte(mustShoal(t, nil, "stat", addr, "--json")), &s); err != nil {
			t.Fatal(err)
		}
		return s
	}
	if s := read(); s.Feed.Open != 1 || s.Feed.Held == 0 {
		t.Errorf("while it runs: %+v", s)
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	within(t, patience, "the session is over and its memory is back", func() bool {
		s := read()
		return s.Feed.Open == 0 && s.Feed.Held == 0 && readStats(t, mnt).Memory.Used == 0
	})
}

// An unmodified ImageFolder + DataLoader + DistributedSampler on a mount that knows the order.
func TestUnmodifiedTrainer(t *testing.T) {
	dir, paths := pictures(t, 8, 64)
	_, env := far(t, proxy.Options{Latency: 20 * time.Millisecond, Sigma: 0.3})
	mnt := mount(t, env, bucket(t, dir), "--order", "torch:seed=13", "--kernel-cache", "off")
	var got struct{ Images int }
	runPython(t, &got, `
import json, sys
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, transforms as T
data = datasets.ImageFolder(sys.argv[1], T.Compose([T.CenterCrop(64), T.ToTensor()]))
assert data.classes == ["class%02d" % c for c in range(8)], data.classes
sampler = DistributedSampler(data, num_replicas=1, rank=0, shuffle=True, seed=13)
n = 0
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in DataLoader(data, 16, sampler=sampler, num_workers=2):
        n += len(y)
print(json.dumps(dict(Images=n)))`, mnt)
	s := readStats(t, mnt)
	t.Logf("%+v", s)
	if got.Images != 2*len(paths) || s.Gets-s.Hedges.Sent != int64(len(paths)) {
		t.Errorf("%d images, %d GETs for %d files", got.Images, s.Gets, len(paths))
	}
	if s.Order.Epoch != 1 || s.Misses > int64(len(paths)/10) {
		t.Errorf("order %+v, %d misses", s.Order, s.Misses)
	}
}

// hint tells the mount what a DataLoader will read, and changes nothing in the trainer.
func TestHint(t *testing.T) {
	dir, paths := pictures(t, 4, 32)
	_, env := far(t, proxy.Options{Latency: 20 * time.Millisecond})
	mnt := mount(t, env, bucket(t, dir), "--kernel-cache", "off")
	var got struct{ Hinted, Plain []int }
	runPython(t, &got, `
import json, sys, torch, shoal
from torch.utils.data import DataLoader
from torchvision import datasets, transforms as T
def run(hinted):
    torch.manual_seed(99)
    data = datasets.ImageFolder(sys.argv[1], T.Compose([T.CenterCrop(8), T.ToTensor()]))
    loader = DataLoader([(i, i) for i in range(len(data))], 8, shuffle=True)
    if hinted:
        shoal.hint(loader, data, sys.argv[1])
    return [int(i) for x, y in loader for i in x]
print(json.dumps(dict(Plain=run(False), Hinted=run(True))))`, mnt)
	if fmt.Sprint(got.Hinted) != fmt.Sprint(got.Plain) {
		t.Error("hint changed what the trainer reads")
	}
	plan, err := os.ReadFile(filepath.Join(mnt, ".shoal/plan"))
	if err != nil {
		t.Fatal(err)
	}
	var want []string
	for _, i := range got.Hinted {
		want = append(want, paths[i])
	}
	if string(plan) != strings.Join(want, "\n")+"\n" {
		t.Errorf("the plan is not what was read:\n%.200s", plan)
	}
}

// What can never work is wrong use, exit 2, with a server or without one. The text says where and what.
func TestFeedWrongUse(t *testing.T) {
	dir, _ := pictures(t, 1, 4)
	_, env := far(t, proxy.Options{})
	addr, _ := serve(t, env, bucket(t, dir))
	for _, c := range []struct{ flag, value, want string }{
		{"--transform", "Resize(256)|CentreCrop(224)",
			"column 13: unknown operation CentreCrop: did you mean CenterCrop?"},
		{"--order", "torch:sed=1", `order spec "torch:sed=1", column 7`},
		{"--rank", "1", "rank 1 is outside"},
		{"--batch", "0", "batch size missing"},
		{"--bad", "skip", "policy"},
		{"--tail", "whole", "tail"},
		{"--transport", "pigeon", "--transport"},
		{"--state", "{}", "state"},
	} {
		for _, to := range []string{addr, "unix:///nonexistent/feed.sock"} {
			_, errs, code := shoal(t, nil, "feed", to, c.flag, c.value)
			if code != 2 || !strings.Contains(errs, c.want) || strings.Count(errs, "\n") != 1 {
				t.Errorf("%s %s %s: exit %d\n%s", to, c.flag, c.value, code, errs)
			}
		}
	}
	for _, c := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"feed", "localhost:70"}, 2, "unix:///PATH, tcp://HOST:PORT or tls://HOST:PORT"},
		{[]string{"stat", "localhost:70"}, 2, "unix:///PATH, tcp://HOST:PORT or tls://HOST:PORT"},
		{[]string{"feed", "unix:///nonexistent/feed.sock"}, 1, "shoal serve"},
		{[]string{"serve", "s3://bucket/train", "--listen", "localhost:70"}, 2,
			"unix:///PATH, tcp://HOST:PORT or tls://HOST:PORT"},
		{[]string{"serve", "s3://bucket/train", "--listen", "tcp://0.0.0.0:0"}, 1, "use tls://"},
	} {
		if _, errs, code := shoal(t, nil, c.args...); code != c.code || !strings.Contains(errs, c.want) {
			t.Errorf("%v: exit %d\n%s", c.args, code, errs)
		}
	}
}

// An interrupted consumer says how to go on, and a trainer does from there.
func TestFeedInterrupted(t *testing.T) {
	dir, paths := pictures(t, 2, 32)
	_, env := far(t, proxy.Options{Latency: 5 * time.Millisecond})
	addr, _ := serve(t, env, bucket(t, dir))
	cmd := exec.Command(shoalBin, "feed", addr, "--batch", "8", "--epochs", "0", "--seed", "3")
	var errs bytes.Buffer
	cmd.Stderr = &errs
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	within(t, patience, "batches have arrived", func() bool {
		var s struct {
			Feed struct{ Total struct{ Batches int } }
		}
		decode(t, mustShoal(t, nil, "stat", addr, "--json"), &s)
		return s.Feed.Total.Batches > 64 // more than are sent to who takes none
	})
	out := mustShoal(t, nil, "stat", addr)
	if !strings.Contains(out, "1 session open") || !strings.Contains(out, "shoal feed (pid") {
		t.Errorf("stat does not show the session:\n%s", out)
	}
	if err := cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	text := errs.String()
	from, to := strings.Index(text, "'"), strings.LastIndex(text, "'")
	if cmd.ProcessState.ExitCode() != 1 || !strings.Contains(text, "interrupted") || from == to {
		t.Fatalf("exit %d\n%s", cmd.ProcessState.ExitCode(), text)
	}
	var state struct{ Epoch, Cursor int }
	if err := json.Unmarshal([]byte(text[from+1:to]), &state); err != nil {
		t.Fatal(err)
	}
	rest := feed(t, addr, "--state", text[from+1:to])
	order := orderOf(t, "uniform:seed=3", len(paths), "--epoch", strconv.Itoa(state.Epoch))
	if rest.Digest != digest(t, dir, paths, order[state.Cursor:]) {
		t.Errorf("resumed at %+v: other samples than the order's", state)
	}
	if rest.Order.Spec != "uniform:seed=3" { // what `shoal order` takes
		t.Errorf("order %q", rest.Order.Spec)
	}
}

// After a refresh new sessions see the new version.
func TestFeedAfterRefresh(t *testing.T) {
	dir, paths := pictures(t, 2, 8)
	_, env := far(t, proxy.Options{})
	source := bucket(t, dir)
	addr, mnt := serve(t, env, source)
	if r := feed(t, addr); r.Samples != len(paths) {
		t.Fatalf("%d samples", r.Samples)
	}
	added, err := os.ReadFile(filepath.Join(dir, paths[0]))
	if err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(dir, "class01/zzz.jpg"), added)
	upload(t, dir, bucketName(t))
	mustShoal(t, env, "refresh", mnt)
	n := len(paths) + 1
	if r := feed(t, addr, "--seed", "1"); r.Samples != n ||
		r.Digest != digest(t, dir, append(paths, "class01/zzz.jpg"), orderOf(t, "uniform:seed=1", n)) {
		t.Errorf("after the refresh: %d samples, digest %s", r.Samples, r.Digest)
	}
}
