// Package main_test runs shoal-gpu as its users do, with `shoal serve` before it, trainers behind it, and a driver in
// software under both.
package main_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/shoalfs/shoal/gpuingest/jpeg"
	"github.com/shoalfs/shoal/lab/driver"
	"github.com/shoalfs/shoal/lab/rig/synced"
	"github.com/shoalfs/shoal/loader/feedclient"
	"github.com/shoalfs/shoal/loader/feedpb"
)

// patience is for what must happen some time.
const patience = time.Minute

// world is what all tests share, built once.
type world struct{ dir, shoal, gpu, lib string }

var shared *world

func TestMain(m *testing.M) {
	code, err := func() (int, error) {
		dir, err := os.MkdirTemp("", "shoal-gpu-")
		if err != nil {
			return 1, err
		}
		defer os.RemoveAll(dir)
		need, err := filepath.Abs("../../bin/cuda")
		if err != nil {
			return 1, err
		}
		if _, err := os.Stat(filepath.Join(need, "cuda.h")); err != nil {
			fmt.Println("shoal-gpu is not tested: run `make gpu` first:", err)
			return m.Run(), nil
		}
		w := &world{dir: dir, shoal: filepath.Join(dir, "shoal"), gpu: filepath.Join(dir, "shoal-gpu")}
		for _, args := range [][]string{{"-o", w.shoal, "../shoal"},
			{"-tags", "netgo,osusergo,cuda", "-o", w.gpu, "."}} {
			cmd := exec.Command("go", append([]string{"build"}, args...)...)
			cmd.Env = os.Environ()
			if len(args) > 3 {
				cmd.Env = append(cmd.Env, "CGO_CFLAGS=-O2 -g -I"+need, "CGO_LDFLAGS=-L"+need)
			}
			if out, err := cmd.CombinedOutput(); err != nil {
				return 1, fmt.Errorf("build %v: %w\n%s", args, err, out)
			}
		}
		lib, err := driver.Build(dir)
		if err != nil {
			return 1, err
		}
		w.lib, shared = filepath.Dir(lib), w
		return m.Run(), nil
	}()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	os.Exit(code)
}

func need(t *testing.T) *world {
	t.Helper()
	if shared == nil {
		t.Skip("run `make gpu` first")
	}
	return shared
}

// pictures makes a dataset of n files.
func pictures(t *testing.T, n int) string {
	t.Helper()
	dir := t.TempDir()
	const w, h = 96, 80
	for i := range n {
		rgb := make([]byte, 3*w*h)
		for k := range rgb {
			rgb[k] = byte(k*(i+1)/7 + k/w)
		}
		data, err := jpeg.Encode(nil, rgb, w, h, 90, jpeg.Sub420)
		if err != nil {
			t.Fatal(err)
		}
		class := filepath.Join(dir, fmt.Sprintf("class%d", i%3))
		if err := os.MkdirAll(class, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(class, fmt.Sprintf("%04d.jpg", i)), data, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// process is one that was started; its error output is kept.
type process struct {
	*exec.Cmd
	errs synced.Buffer
	done chan struct{}
}

func run(t *testing.T, env []string, name string, args ...string) *process {
	t.Helper()
	p := &process{Cmd: exec.Command(name, args...), done: make(chan struct{})}
	p.Env = append(os.Environ(), env...)
	p.Stderr = &p.errs
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		_ = p.Wait() // ProcessState has it
		close(p.done)
	}()
	t.Cleanup(func() {
		_ = p.Process.Kill()
		<-p.done
		if t.Failed() {
			t.Logf("%s %v:\n%s", name, args, p.errs.String())
		}
	})
	return p
}

// house is a server and a shoal-gpu before it.
type house struct {
	w             *world
	source, cache string
	feedAt, gpuAt string
	server, gpu   *process
	trace         string
	gEnv          []string
}

func start(t *testing.T, samples int, script string) *house {
	t.Helper()
	w := need(t)
	dir := t.TempDir()
	h := &house{w: w, source: "file://" + pictures(t, samples), cache: filepath.Join(dir, "cache"),
		feedAt: "unix://" + filepath.Join(dir, "feed.sock"), gpuAt: "unix://" + filepath.Join(dir, "gpu.sock"),
		trace: filepath.Join(dir, "trace")}
	h.gEnv = []string{"LD_LIBRARY_PATH=" + w.lib, "SHOAL_CUDA_SCRIPT=" + script, "SHOAL_CUDA_TRACE=" + h.trace}
	h.startServer(t)
	h.startGPU(t)
	return h
}

func (h *house) startServer(t *testing.T) {
	t.Helper()
	h.server = run(t, nil, h.w.shoal, "serve", h.source, "--listen", h.feedAt, "--cache-dir", h.cache)
	answers(t, h.feedAt, h.server)
}

func (h *house) startGPU(t *testing.T) {
	t.Helper()
	h.gpu = run(t, h.gEnv, h.w.gpu, h.feedAt, "--listen", h.gpuAt)
	answers(t, h.gpuAt, h.gpu)
}

// answers waits until a feed does.
func answers(t *testing.T, addr string, p *process) {
	t.Helper()
	for deadline := time.Now().Add(patience); ; time.Sleep(5 * time.Millisecond) {
		if _, err := stats(addr); err == nil {
			return
		}
		select {
		case <-p.done:
			t.Fatalf("%s has ended: %s", p.Path, p.errs.String())
		default:
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s does not answer: %s", addr, p.errs.String())
		}
	}
}

type counters struct {
	GPU struct {
		Sessions, Buffers, Batches int
		Bytes                      int `json:"buffer_bytes"`
		Held                       int `json:"buffers_held"`
		Fallen                     int `json:"fallen_back"`
	}
	Feed struct {
		Open int   `json:"open_sessions"`
		Held int64 `json:"held_bytes"`
	}
}

func stats(addr string) (c counters, err error) {
	client, err := feedclient.Dial(addr, feedclient.Security{})
	if err != nil {
		return c, err
	}
	defer client.Close()
	text, err := client.Stats(context.Background())
	if err != nil {
		return c, err
	}
	return c, json.Unmarshal(text, &c)
}

// settle waits until neither server nor device hold anything for anybody.
func (h *house) settle(t *testing.T) {
	t.Helper()
	for deadline := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		c, err := stats(h.gpuAt)
		if err == nil && c.GPU.Sessions+c.GPU.Buffers+c.GPU.Bytes+c.GPU.Held+c.Feed.Open == 0 && c.Feed.Held == 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("held long after the last trainer: %+v, %v", c, err)
		}
	}
}

const spec = "RandomResizedCrop(32)|RandomHorizontalFlip()|fp16|nchw|Normalize((0.485, 0.456, 0.406), (0.229, 0.224, " +
	"0.225))"

// line is what a trainer prints of a batch.
type line struct {
	Index  uint64
	Digest string // of data, label, id, valid, as they are
	State  string
}

// expected reads the stream from the server itself, in host memory.
func (h *house) expected(t *testing.T, batches int) (list []line) {
	t.Helper()
	client, err := feedclient.Dial(h.feedAt, feedclient.Security{})
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	s, err := client.Open(context.Background(), &feedpb.Open{Session: "expected", Batch: 4, Transform: spec, Seed: 3})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	for range batches {
		b, err := s.Next()
		if err != nil {
			t.Fatal(err)
		}
		sum := sha256.New()
		for _, p := range b.Header.GetPlanes() {
			sum.Write(b.Bytes()[p.GetOffset():][:p.GetLength()])
		}
		list = append(list, line{b.Header.GetIndex(), hex.EncodeToString(sum.Sum(nil)), b.Header.GetState()})
		b.Release()
	}
	return list
}

// trainer imports the buffers and prints a line for each batch. It keeps two batches, as a training loop with one in
// flight does. After so many as its last argument says it rests until its standard input ends.
const trainer = `
import hashlib, json, os, queue, sys
import grpc
from shoal import _cuda, _slots, _wire
address, batches, state, rest = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[5])
requests = queue.Queue()
send = lambda **kinds: requests.put(_wire.encode(_wire.CLIENT_MESSAGE, **kinds))
send(open=dict(session="trainer", batch=4, transform=sys.argv[4], seed=3, state=state, credits=2, slots=4, device="cuda:0"))
channel = grpc.insecure_channel(address)
stream = channel.stream_stream("/shoal.feed.v1.Feed/Stream")(iter(requests.get, None))
opened = _wire.decode(_wire.SERVER_MESSAGE, next(stream)).opened
assert opened.pool is not None and opened.pool.device == "cuda:0", opened
connection, answer, fds = _slots.handover(address[len("unix://"):], opened.pool.key, opened.pool.slots + 1)
device = _cuda.Device.open("cuda:0")
ring = _cuda.Imported(device, opened, answer, fds)
for fd in fds: os.close(fd)
kept = []
while batches:
    m = _wire.decode(_wire.SERVER_MESSAGE, next(stream))
    if m.batch is None: continue
    h = m.batch
    planes = ring.put(h, lambda slot=h.slot: send(release=dict(slots=[slot]))).take()
    sum = hashlib.sha256()
    for p in h.planes:
        x = planes[p.name]
        sum.update((x.get() if hasattr(x, "get") else x).tobytes())
    print(json.dumps(dict(Index=h.index, Digest=sum.hexdigest(), State=h.state)), flush=True)
    kept = kept[-1:] + [planes]
    send(credit=dict(n=1))
    batches -= 1
    rest -= 1
    if rest == 0: sys.stdin.read()
del kept, planes, x
ring.close()
requests.put(None)
stream.cancel()
channel.close()
del stream # while its threads run: grpc's destructor waits for one that the interpreter's end would have stopped
`

func (h *house) train(t *testing.T, batches int, state string) (*process, *bufio.Scanner) {
	t.Helper()
	p, lines, _ := h.trainUntil(t, batches, 0, state)
	return p, lines
}

// trainUntil has the trainer rest after so many batches, until goOn is called; never if that is 0.
func (h *house) trainUntil(t *testing.T, batches, rest int, state string) (
	p *process, lines *bufio.Scanner, goOn func()) {
	t.Helper()
	client, err := filepath.Abs("../../python")
	if err != nil {
		t.Fatal(err)
	}
	p = &process{Cmd: exec.Command("/usr/bin/python3", "-c", trainer, h.gpuAt, fmt.Sprint(batches), state, spec,
		fmt.Sprint(rest)), done: make(chan struct{})}
	p.Env = append(os.Environ(), "PYTHONPATH="+client, "PYTHONDONTWRITEBYTECODE=1", "LD_LIBRARY_PATH="+h.w.lib,
		"GRPC_VERBOSITY=ERROR")
	p.Stderr = &p.errs
	out, in, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	p.Stdout = in
	pause, err := p.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	_ = in.Close()
	go func() {
		_ = p.Wait()
		close(p.done)
	}()
	t.Cleanup(func() {
		_ = p.Process.Kill()
		<-p.done
		_ = out.Close()
		if t.Failed() {
			t.Logf("trainer:\n%s", p.errs.String())
		}
	})
	return p, bufio.NewScanner(out), func() { _ = pause.Close() } // it may have ended
}

// take reads n lines and compares them with what comes after what was taken before. It returns what was read.
func take(t *testing.T, lines *bufio.Scanner, n int, want []line) (got []line) {
	t.Helper()
	for len(got) < n && lines.Scan() {
		var l line
		if err := json.Unmarshal(lines.Bytes(), &l); err != nil {
			t.Fatalf("%v: %s", err, lines.Text())
		}
		if w := want[len(got)]; l != w {
			t.Fatalf("batch %d on the device is %+v, the server's %+v", len(got), l, w)
		}
		got = append(got, l)
	}
	return got
}

// A trainer takes batches that lie on the device: their bytes and states are the server's own, over epochs' ends, and
// nothing is held when it has gone.
func TestTrainer(t *testing.T) {
	h := start(t, 41, "")
	const batches = 33 // three epochs
	want := h.expected(t, batches)
	p, lines := h.train(t, batches, "")
	if got := take(t, lines, batches, want); len(got) != batches {
		t.Fatalf("%d batches, want %d", len(got), batches)
	}
	<-p.done
	if !p.ProcessState.Success() {
		t.Errorf("trainer: %v", p.ProcessState)
	}
	h.settle(t)
	if c, err := stats(h.gpuAt); err != nil || c.GPU.Fallen != 0 {
		t.Errorf("%+v, %v", c, err)
	}
	graphs, pageable := 0, 0
	text, err := os.ReadFile(h.trace)
	if err != nil {
		t.Fatal(err)
	}
	for l := range strings.Lines(string(text)) {
		if strings.Contains(l, `"cuGraphLaunch"`) {
			graphs++
		}
		if strings.Contains(l, `"pageable"`) {
			pageable++
		}
	}
	if graphs < batches-2 || pageable != 0 {
		t.Errorf("%d of %d batches by graph, %d copies from memory that is not page-locked", graphs, batches, pageable)
	}
	_ = h.gpu.Process.Signal(syscall.SIGTERM)
	<-h.gpu.done
	if code := h.gpu.ProcessState.ExitCode(); code != 0 {
		t.Errorf("shoal-gpu ends with %d: %s", code, h.gpu.errs.String())
	}
}

// Each of the three processes is killed in mid-epoch. The others notice and hold nothing for it, and a trainer that
// goes on from its last state gets the batches that it has not had.
func TestKills(t *testing.T) {
	h := start(t, 200, "")
	const batches = 24
	want := h.expected(t, batches)
	done := 0
	state := func() string {
		if done == 0 {
			return ""
		}
		return want[done-1].State
	}
	for _, kill := range []string{"trainer", "shoal-gpu", "serve"} {
		p, lines, goOn := h.trainUntil(t, 1000, 5, state()) // else it might be through before it is killed
		done += len(take(t, lines, 5, want[done:]))
		switch kill {
		case "trainer":
			_ = p.Process.Kill()
		case "shoal-gpu":
			_ = h.gpu.Process.Kill()
			<-h.gpu.done
		case "serve":
			_ = h.server.Process.Kill()
			<-h.server.done
		}
		goOn()
		// What was on its way may still come; it is no other.
		done += len(take(t, lines, batches-done-1, want[done:]))
		<-p.done
		switch kill {
		case "shoal-gpu":
			h.startGPU(t)
		case "serve":
			h.startServer(t)
		}
		h.settle(t)
	}
	p, lines := h.train(t, batches-done, state())
	done += len(take(t, lines, batches-done, want[done:]))
	<-p.done
	if done != batches {
		t.Errorf("%d batches in all, want %d", done, batches)
	}
	h.settle(t)
}

// A device that fails in mid-stream ends the stream with a message and a state to go on from; a session that it has no
// memory for comes to host memory.
func TestDeviceFails(t *testing.T) {
	h := start(t, 60, "cuMemCreate:5=2")
	want := h.expected(t, 8)
	p, lines := h.train(t, 4, "")
	if got := take(t, lines, 4, want); len(got) != 4 {
		t.Fatalf("%d batches", len(got))
	}
	<-p.done
	h.settle(t)
	p, lines = h.train(t, 4, "") // its first buffer is the fifth
	if got := take(t, lines, 4, want); len(got) != 0 {
		t.Errorf("%d batches from a device without memory", len(got))
	}
	<-p.done
	if !strings.Contains(h.gpu.errs.String(), "out of memory") {
		t.Errorf("the log does not say why: %s", h.gpu.errs.String())
	}
	h.settle(t)
	if c, err := stats(h.gpuAt); err != nil || c.GPU.Fallen != 1 {
		t.Errorf("%+v, %v", c, err)
	}
	// Now it has memory again.
	p, lines = h.train(t, 4, "")
	if got := take(t, lines, 4, want); len(got) != 4 {
		t.Errorf("%d batches", len(got))
	}
	<-p.done
}

// What shoal-gpu says where it cannot work, and how it ends.
func TestNoDevice(t *testing.T) {
	w := need(t)
	none := t.TempDir()
	if err := os.WriteFile(filepath.Join(none, "libcuda.so.1"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name, lib, script string
		args              []string
		code              int
		text              string
	}{
		{"no driver", none, "", []string{"check"}, 3, "install NVIDIA's driver"},
		{"no device", w.lib, "devices=0", []string{"check"}, 3, "nvidia-smi -L"},
		{"other device", w.lib, "", []string{"check", "--device", "7"}, 3, "cuda:7"},
		{"old driver", w.lib, "version=11020", []string{"unix:///nowhere", "--listen", "unix:///nowhere"}, 3,
			"11.4 or newer"},
		{"no feed", w.lib, "", nil, 2, "address of the feed"},
		{"no address", w.lib, "", []string{"nowhere"}, 2, "unix:///PATH"},
		{"not here", w.lib, "", []string{"unix:///a", "--listen", "tcp://127.0.0.1:1"}, 2, "--listen"},
		{"check of what", w.lib, "", []string{"check", "cuda:0"}, 2, "unknown command"},
		{"works", w.lib, "", []string{"check"}, 0, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			cmd := exec.Command(w.gpu, c.args...)
			cmd.Env = append(os.Environ(), "LD_LIBRARY_PATH="+c.lib, "SHOAL_CUDA_SCRIPT="+c.script)
			out, err := cmd.CombinedOutput()
			var exit *exec.ExitError
			if err != nil && !errors.As(err, &exit) {
				t.Fatal(err)
			}
			if code := cmd.ProcessState.ExitCode(); code != c.code || !bytes.Contains(out, []byte(c.text)) ||
				strings.Count(string(out), "\n") != 1 {
				t.Errorf("exit %d, want %d; one line with %q:\n%s", code, c.code, c.text, out)
			}
		})
	}
}
