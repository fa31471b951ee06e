package learn

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/shoalfs/shoal/lab/rig/photos"
	"github.com/shoalfs/shoal/lab/rig/s3server"
)

const (
	photographs = 300
	seed        = 7
)

// world is what the examples run against: photographs, in a bucket, behind mount and feed.
type world struct {
	folder string // the photographs as files, which are the oracle
	mount  string
	addr   string
	env    []string
}

func newWorld(t *testing.T) *world {
	t.Helper()
	dir := scratch(t)
	w := &world{folder: filepath.Join(dir, "photos"), mount: filepath.Join(dir, "mnt"),
		addr: "unix://" + dir + "/feed.sock"}
	set, err := photos.Make(t.Context(), w.folder, photographs, nil)
	if err != nil {
		t.Fatal(err)
	}
	if set.Files != photographs {
		t.Fatalf("%d photographs", set.Files)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	server, err := s3server.Start(ctx,
		s3server.Options{Dir: filepath.Join(dir, "s3"), Binary: filepath.Join(clone, "bin", "versitygw")})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(server.Stop)
	if _, err := server.Upload(t.Context(), w.folder, "photos", "train", nil); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(w.mount, 0o755); err != nil {
		t.Fatal(err)
	}
	w.env = environment(dir,
		append(s3server.Env(server.URL), "PYTHONPATH="+filepath.Join(clone, "python"), "GLOO_SOCKET_IFNAME=lo")...)
	w.shoal(t, "serve", "s3://photos/train", "--listen", w.addr, "--mount", w.mount,
		"--cache-dir", filepath.Join(dir, "cache"), "--daemon")
	t.Cleanup(func() { w.shoal(t, "stop", w.addr) })
	return w
}

// command runs a program to its end and returns what it printed on standard output.
func (w *world) command(t *testing.T, name string, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env, cmd.Dir, cmd.WaitDelay = w.env, clone, 10*time.Second
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s %q: %v\n%s\n%.4000s", name, args, err, out, stderr.String())
	}
	return string(out)
}

func (w *world) shoal(t *testing.T, args ...string) string {
	t.Helper()
	return w.command(t, filepath.Join(clone, "bin", "shoal"), args...)
}

func (w *world) python(t *testing.T, args ...string) string {
	t.Helper()
	return w.command(t, "/usr/bin/python3", args...)
}

// epoch is a line that an example prints at the end of one.
type epoch struct {
	samples int
	loss    float64
}

var epochLine = regexp.MustCompile(`(?m)^epoch (\d+): .*?(\d+) samples, loss ([0-9.]+)$`)

// epochs returns the epochs that an example has reported, which must be first, first+1, …, count of them.
func epochs(t *testing.T, out string, first, count int) []epoch {
	t.Helper()
	var found []epoch
	for i, m := range epochLine.FindAllStringSubmatch(out, -1) {
		if m[1] != strconv.Itoa(first+i) {
			t.Fatalf("epochs out of order:\n%s", out)
		}
		n, _ := strconv.Atoi(m[2])
		loss, err := strconv.ParseFloat(m[3], 64)
		if err != nil {
			t.Fatal(err)
		}
		found = append(found, epoch{n, loss})
	}
	if len(found) != count {
		t.Fatalf("%d epochs, want %d:\n%s", len(found), count, out)
	}
	return found
}

// learned checks that each epoch had so many samples, and that the last had a lower loss than the first.
func learned(t *testing.T, found []epoch, samples int) {
	t.Helper()
	for _, e := range found {
		if e.samples != samples {
			t.Errorf("%d samples, want %d", e.samples, samples)
		}
	}
	if first, last := found[0].loss, found[len(found)-1].loss; last >= first {
		t.Errorf("the loss went from %v to %v", first, last)
	}
}

func TestExamples(t *testing.T) {
	if testing.Short() {
		t.Skip("make night runs it")
	}
	w := newWorld(t)
	tests := map[string]func(*testing.T, *world){
		"torch_mount.py":     testTorchMount,
		"torch_ddp.py":       testDDP,
		"lightning_style.py": testLightning,
		"numpy_jax.py":       testNumpy,
		"consumer":           testConsumer,
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) { test(t, w) })
	}
	// Whoever adds an example adds its test, and its line in the list.
	list, err := os.ReadFile("../../../docs/examples/README.md")
	if err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir("../../../docs/examples")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		name := e.Name()
		if name == "README.md" || name == "__pycache__" {
			continue
		}
		if tests[name] == nil {
			t.Errorf("docs/examples/%s has no test", name)
		}
		if !strings.Contains(string(list), "("+name+")") && !strings.Contains(string(list), "("+name+"/main.go)") {
			t.Errorf("docs/examples/README.md does not name %s", name)
		}
	}
}

// The mount follows the plan that the hint wrote, and the hint changes nothing: with the same files in a folder
// the same trainer prints the same losses, to the digit.
func testTorchMount(t *testing.T, w *world) {
	args := []string{"-W", "ignore", "docs/examples/torch_mount.py", "--epochs", "2"}
	out := w.python(t, append(args, w.mount)...)
	learned(t, epochs(t, out, 0, 2), photographs)
	if plain := w.python(t, append(args, "--plain", w.folder)...); out != plain {
		t.Errorf("over the mount:\n%s\nover a folder:\n%s", out, plain)
	}
	var stats struct {
		Order   struct{ Spec, State string }
		Streams []struct{ Consumed, Epoch int }
	}
	if err := json.Unmarshal([]byte(w.shoal(t, "stat", w.mount, "--json")), &stats); err != nil {
		t.Fatal(err)
	}
	if stats.Order.Spec != "plan" || stats.Order.State != "finished" {
		t.Errorf("the mount followed %+v", stats.Order)
	}
}

// Two ranks read each sample once, and are resumed by one.
func testDDP(t *testing.T, w *world) {
	checkpoint := filepath.Join(t.TempDir(), "job.pt")
	ranks := func(n, epochs int) string {
		script := fmt.Sprintf(`export MASTER_ADDR=127.0.0.1 MASTER_PORT=%s WORLD_SIZE=%d
			for r in $(seq 0 %d); do RANK=$r LOCAL_RANK=$r /usr/bin/python3 docs/examples/torch_ddp.py "$@" & pids="$pids $!"; done
			for p in $pids; do wait $p || exit 1; done`, freePort(t), n, n-1)
		return w.command(t, "bash", "-c", script, "ranks", w.addr, "--global-batch", "60",
			"--epochs", strconv.Itoa(epochs), "--checkpoint", checkpoint)
	}
	first := ranks(2, 2)
	second := ranks(1, 3)
	learned(t, append(epochs(t, first, 0, 2), epochs(t, second, 2, 1)...), photographs) // 60 divides 300
	if !strings.Contains(first, " 2 ranks,") || !strings.Contains(second, " 1 ranks,") {
		t.Errorf("not so many ranks:\n%s%s", first, second)
	}
}

func freePort(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return strconv.Itoa(l.Addr().(*net.TCPAddr).Port)
}

// A job that was stopped twice has trained on the samples of one that was not, in the same order, and ends with the
// same loss.
func testLightning(t *testing.T, w *world) {
	run := func(checkpoint string, steps int) string {
		return w.python(t, "docs/examples/lightning_style.py", w.addr, "--batch", "50",
			"--max-steps", strconv.Itoa(steps), "--checkpoint", checkpoint)
	}
	dir := t.TempDir()
	whole := run(filepath.Join(dir, "whole.pt"), -1)
	run(filepath.Join(dir, "parts.pt"), 4)
	run(filepath.Join(dir, "parts.pt"), 9)
	parts := run(filepath.Join(dir, "parts.pt"), -1)
	if whole != parts || !strings.HasPrefix(whole, "step 12, loss ") {
		t.Errorf("at once: %sin parts: %s", whole, parts)
	}
	if done := run(filepath.Join(dir, "whole.pt"), -1); !strings.HasPrefix(done, "step 12, loss nan") {
		t.Errorf("when all is done: %s", done)
	}
}

func testNumpy(t *testing.T, w *world) {
	learned(t, epochs(t, w.python(t, "docs/examples/numpy_jax.py", w.addr), 0, 5), photographs)
}

// The digest is that of the files, in the order that `shoal order` prints; in parts, the parts have it together.
func testConsumer(t *testing.T, w *world) {
	program := filepath.Join(t.TempDir(), "consumer")
	if out, err := exec.Command("go", "build", "-o", program,
		"../../../docs/examples/consumer").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	numbered, err := filepath.Glob(filepath.Join(w.folder, "*", "*.jpg"))
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(numbered) // no folder's name begins with another's: as ImageFolder sorts them
	digest, size := sha256.New(), 0
	for line := range strings.Lines(
		w.shoal(t, "order", fmt.Sprintf("uniform:seed=%d", seed), "--n", strconv.Itoa(photographs))) {
		number, err := strconv.Atoi(strings.TrimSpace(line))
		if err != nil {
			t.Fatal(err)
		}
		content, err := os.ReadFile(numbered[number])
		if err != nil {
			t.Fatal(err)
		}
		size += len(content)
		var head [16]byte
		binary.LittleEndian.PutUint64(head[:], uint64(number))
		binary.LittleEndian.PutUint64(head[8:], uint64(len(content)))
		digest.Write(head[:])
		digest.Write(content)
	}
	want := fmt.Sprintf("%d samples, %d bytes, digest %x\n", photographs, size, digest.Sum(nil))
	if out := w.command(t, program, w.addr); !strings.HasSuffix(out, want) {
		t.Errorf("want %sgot:\n%s", want, out)
	}
	samples, bytes := 0, 0
	for range 5 { // 300 samples are four batches of 64 and one of 44
		out := w.command(t, program, "-batches", "1",
			"-state", filepath.Join(filepath.Dir(program), "state.json"), w.addr)
		var n, b int
		last := out[strings.LastIndexByte(strings.TrimSpace(out), '\n')+1:]
		if _, err := fmt.Sscanf(last, "%d samples, %d bytes,", &n, &b); err != nil {
			t.Fatalf("%v:\n%s", err, out)
		}
		samples, bytes = samples+n, bytes+b
	}
	if samples != photographs || bytes != size {
		t.Errorf("in five parts %d samples, %d bytes", samples, bytes)
	}
}

func writeFile(t *testing.T, path, content string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
}
