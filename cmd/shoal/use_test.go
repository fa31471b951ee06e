package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/shoalfs/shoal/cache/crypt"
	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/ckpt/folder"
	"github.com/shoalfs/shoal/internal/admin"
	"github.com/shoalfs/shoal/internal/cli"
	"github.com/shoalfs/shoal/internal/daemon"
	"github.com/shoalfs/shoal/internal/human"
	"github.com/shoalfs/shoal/internal/progress"
	"github.com/shoalfs/shoal/lab/rig/hostile"
	"github.com/shoalfs/shoal/loader"
	"github.com/shoalfs/shoal/prefetch/engine"
	"github.com/shoalfs/shoal/prefetch/run"
	"github.com/shoalfs/shoal/s3api"
)

// awaitIdle waits until the daemon of the folder cache runs and serves nothing.
func (s *shell) awaitIdle() {
	s.t.Helper()
	for deadline := time.Now().Add(time.Minute); ; {
		_, errs, _ := s.run(nil, "stat", "cache")
		if strings.Contains(errs, servesNothing) {
			return
		}
		if time.Now().After(deadline) {
			s.t.Fatal(errs)
		}
	}
}

// A wrong command line is told what is wrong with it: by the names that the help has, and with what may be meant.
func TestWrongUse(t *testing.T) {
	unused := func(flag string) string {
		return "--" + flag + ": no address is https:// or tls://, so nothing would use it (give such an address, or " +
			"leave it out)"
	}
	nowhere := func(flag string) string {
		return "there is no address for the S3 endpoint: give --" + flag + " 127.0.0.1:9000"
	}
	for line, want := range map[string]string{
		"mount": "shoal mount takes SOURCE MOUNTPOINT: SOURCE is missing (see: shoal mount " +
			"--help)",
		"mount s3://b": "shoal mount takes SOURCE MOUNTPOINT: MOUNTPOINT is missing (see: shoal " +
			"mount --help)",
		"mount a b c": `shoal mount takes SOURCE MOUNTPOINT: "c" is one too many (see: shoal mount --help)`,
		"stat a b":    `shoal stat takes [MOUNTPOINT|ADDR|CACHE-DIR]: "b" is one too many (see: shoal stat --help)`,
		"version x":   `shoal version takes no arguments, and "x" is one (see: shoal version --help)`,
		"cache pin d": "shoal cache pin takes CACHE-DIR SOURCE: SOURCE is missing (see: shoal cache " +
			"pin --help)",
		"ckpt":   "shoal ckpt takes DIR DEST: DIR is missing (see: shoal ckpt --help)",
		"ckpt d": "shoal ckpt takes DIR DEST: DEST is missing (see: shoal ckpt --help)",
		"cache rekey": "shoal cache rekey takes CACHE-DIR: CACHE-DIR is missing (see: shoal cache " +
			"rekey --help)",
		"mout a b":         `there is no verb "mout": did you mean shoal mount? (see: shoal --help)`,
		"nonesuch":         `there is no verb "nonesuch" (see: shoal --help)`,
		"cache lss":        `there is no verb "lss": did you mean shoal cache ls? (see: shoal cache --help)`,
		"config mout":      `there is no verb "mout": did you mean shoal mount? (see: shoal --help)`,
		"config cache lss": `there is no verb "lss": did you mean shoal cache ls? (see: shoal cache --help)`,
		"help cache lss":   `there is no verb "lss": did you mean shoal cache ls? (see: shoal cache --help)`,
		"mount a b --cach-dir=x": "shoal mount has no flag --cach-dir: did you mean --cache-dir? (see: shoal " +
			"mount --help)",
		"mount a b --listen x": "shoal mount has no flag --listen, which belongs to shoal s3, shoal serve " +
			"(see: shoal mount --help)",
		"mount a b --nonesuch":    "shoal mount has no flag --nonesuch (see: shoal mount --help)",
		"mount a b -z":            "shoal mount has no flag -z (see: shoal mount --help)",
		"mount a b --cache-dir":   "--cache-dir needs a value (see: shoal mount --help)",
		"run --name sweep/3 true": `--name "sweep/3": it becomes a file's name in .shoal/plans of the mount: at most 200 bytes, without / and no dot first`,
		"feed x --batch -1":       `--batch: -1: it must be at least 0 (see: shoal feed --help)`,
		"feed a --epochs one":     `--epochs: "one" is not a number (see: shoal feed --help)`,
		"mount a b --epoch 3": "--epoch was removed: write it into the order, such as --order " +
			"torch:seed=7,epoch=3",
		"mount a b --daemon=perhaps":  `--daemon: "perhaps": give true, false or supervised (see: shoal mount --help)`,
		"mount a b --allow-other=1.5": `--allow-other: "1.5" is neither true nor false (see: shoal mount --help)`,
		"umount m --wait 5":           `--wait: "5" is not a duration (write 90s, 15m or 4h) (see: shoal umount --help)`,
		"mount a b --cache-size 10":   `--cache-size: "10" has no unit and would be 10 bytes (write 10GiB, 10MiB, or 10B if you mean it) (see: shoal mount --help)`,
		"mount a b --memory 0.5": `--memory: "0.5" has no unit and would be 0.5 bytes ` +
			"(write 0.5GiB, 0.5MiB, or 0.5B if you mean it) (see: shoal mount --help)",
		"mount a b --connections 1000": "--connections: give a number from 1 to 512, or auto (see: shoal mount --help)",
		"cluster frob":                 `there is no verb "frob" (see: shoal cluster --help)`,
		"warm file:///x --cluster etcd://h/c --cluster-insecure --advertise :7073":        `--advertise ":7073": give HOST:PORT`,
		"warm file:///x --cluster etcd://h/c --cluster-insecure --advertise h:99999":      `--advertise "h:99999": give HOST:PORT`,
		"warm file:///x --cluster etcd://h/c --cluster-insecure --advertise 0.0.0.0:7073": `--advertise "0.0.0.0:7073": other nodes cannot reach that: give an address of this machine`,
		"warm file:///x --fraction two":                                                   `--fraction: "two" is not a number (see: shoal warm --help)`,

		"mount file:///x m --tls-cert c --tls-key k":                    unused("tls-cert"),
		"mount file:///x m --s3 127.0.0.1:0 --s3-anonymous --tls-key k": unused("tls-key"),
		"serve file:///x --listen tcp://127.0.0.1:0 --tls-client-ca c":  unused("tls-client-ca"),
		"mount file:///x m --s3-keys k":                                 nowhere("s3"),
		"s3 file:///x --listen=":                                        nowhere("listen"),
		"order sequential --mount m --n 5": "--mount already gives samples, shards, classes and sizes: leave out " +
			"--n, --shard-samples, --class-samples and --sizes",
		"keeper x":                "keeper x: give unix:///PATH",
		"umount m --wait -1s":     "--wait -1s: it must be at least 0",
		"order sequential --n -1": "--n -1: it must be at least 0",

		"order sequential --sizes f --n 4611686018427387904": "--n 4611686018427387904: with --certificate, " +
			"--class-samples or --sizes give less than 2^32",
		"plan --samples 9 --sample-size 9kB --step-time 1s --accelerators 4 --batch 4611686018427387904": "--batch " +
			"4611686018427387904: give the samples per step of an accelerator, 1 to 1,000,000,000, or a --workload",
		"warm file:///x --fraction NaN": "--fraction NaN: give a number above 0, up to 1",
		"warm file:///x --list=":        "--list is empty: name a file of paths, or leave it out to keep all of SOURCE",
		"feed x --batches -1":           "--batches: -1: it must be at least 0 (see: shoal feed --help)",
		"stat m --watch --json":         "--watch and --json: leave one out (docs/stats.md: the last 15 minutes)",
		"profile --from f --out g":      "--out: f is already a recording",
		"python x":                      `shoal python takes no arguments, and "x" is one (see: shoal python --help)`,
	} {
		c := root()
		c.SetArgs(strings.Fields(line))
		c.SetOut(io.Discard)
		c.SetErr(io.Discard)
		if err := c.ExecuteContext(t.Context()); err == nil || err.Error() != want || !cli.IsUsage(err) {
			t.Errorf("shoal %s: %v\nwant %s", line, err, want)
		}
	}
}

// A flag that a verb does not need harms no script (docs/install.md: flags only grow).
func TestNeedlessFlags(t *testing.T) {
	t.Chdir(t.TempDir())
	for _, line := range []string{"stat m --interval 5s", "profile --from f --duration 5m",
		"mount file:///x m --s3-read-only --cache-dir c"} {
		if _, err := shoal(t, strings.Fields(line)...); err == nil || cli.IsUsage(err) {
			t.Errorf("shoal %s: %v", line, err)
		}
	}
}

// A source of another kind is wrong use of every verb that takes one, and the largest numbers are some.
func TestOddArguments(t *testing.T) {
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	for _, line := range []string{"plan gopher://x --batch 1 --step-time 1s", "mount gopher://x m", "warm gopher://x",
		"pack gopher://x d", "unpack gopher://x d", "ckpt d gopher://x", "doctor gopher://x"} {
		if _, err := shoal(t, strings.Fields(line)...); !cli.IsUsage(err) {
			t.Errorf("%s: %v", line, err)
		}
	}
	const largest = "9223372036854775807"
	out, err := shoal(t, "order", "mixture:seed=1,weights=class0:1", "--n=4", "--class-samples="+largest)
	if err != nil || out == "" {
		t.Errorf("%q, %v", out, err)
	}
}

// A folder that is not what a verb needs is named, with the cause and a remedy that works.
func TestWrongFolder(t *testing.T) {
	cache, left, plain := t.TempDir(), t.TempDir(), t.TempDir()
	for _, file := range []string{filepath.Join(cache, "FORMAT"), filepath.Join(left, "FORMAT"),
		filepath.Join(left, "shoal.sock")} {
		if err := os.WriteFile(file, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	missing := filepath.Join(plain, "missing")
	// of which no more is read than a key can have
	key, notRead := filepath.Join(plain, "key"), strings.Repeat(" ", 4096)+strings.Repeat("0f", 32)
	if err := os.WriteFile(key, []byte(notRead), 0o600); err != nil {
		t.Fatal(err)
	}
	_, noKey := crypt.ParseSecret(nil)
	nobody := func(dir string) string {
		return "no daemon answers at the cache directory " + dir +
			": there is none to stop or to ask (shoal cache ls " + dir +
			" shows what it holds; shoal mount SOURCE MOUNTPOINT --cache-dir " + dir + " starts one)"
	}
	notACache := func(dir string) string {
		return dir + " is not a cache directory: stat " + dir + "/FORMAT: no such file or directory " +
			"(give a folder that was a --cache-dir, as its user or as root; shoal cache ls shows the default ones)"
	}
	for line, want := range map[string]string{
		"stop " + cache:       nobody(cache),
		"stop " + left:        nobody(left), // its daemon was killed
		"stat " + cache:       nobody(cache),
		"refresh " + cache:    nobody(cache),
		"refresh " + plain:    notMounted(plain).Error(),
		"stop " + plain:       notMounted(plain).Error(),
		"cache ls " + missing: notACache(missing),
		"cache ls " + plain:   notACache(plain),
		"fsck " + missing:     notACache(missing),
		"fsck " + plain:       notACache(plain),
		"cache rekey " + cache + " --new-encryption-key-file " + key: "--new-encryption-key-file: " + key + ": " +
			noKey.Error(),
	} {
		c := root()
		c.SetArgs(strings.Fields(line))
		c.SetOut(io.Discard)
		c.SetErr(io.Discard)
		if err := c.ExecuteContext(t.Context()); err == nil || err.Error() != want {
			t.Errorf("shoal %s: %v\nwant %s", line, err, want)
		}
	}
}

// An address or a certificate of an S3 endpoint that can never work is wrong use.
func TestWrongEndpoint(t *testing.T) {
	for addr, want := range map[string]string{"x": "missing port", "https://127.0.0.1:0": "--tls-cert and --tls-key"} {
		o := s3Options{addr: addr, anonymous: yes, tls: &loader.TLSFiles{}}
		_, err := o.listen(&invocation{}, slog.New(slog.DiscardHandler))
		if !cli.IsUsage(err) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", addr, err)
		}
	}
}

// Of a folder that this user must not look into nobody says that it is none of Shoal's.
func TestAnothersFolder(t *testing.T) {
	dir := t.TempDir()
	if err := os.Chmod(dir, 0); err != nil {
		t.Fatal(err)
	}
	s := newShell(t)
	for _, verb := range []string{"stat", "stop", "refresh"} {
		cmd := s.command(nil, verb, dir)
		if os.Geteuid() == 0 { // who may look into all
			cmd.Path, cmd.Dir = "/proc/self/exe", "/"
			cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
		}
		out, err := cmd.CombinedOutput()
		const want = "permission denied (run this as its owner"
		if cmd.ProcessState.ExitCode() != 1 || !strings.Contains(string(out), want) {
			t.Errorf("%s: %v\n%s", verb, err, out)
		}
	}
}

// A destination in the source is refused before a folder is made there.
func TestNothingIsMadeInASource(t *testing.T) {
	dir := t.TempDir()
	if err := os.MkdirAll(filepath.Join(dir, "train", "class"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("train", filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	for verb, want := range map[string]string{"pack": "overlap", "ckpt": "overlap",
		"mount": "and would be listed with it"} {
		for _, dest := range []string{"train/new", "link/new"} {
			_, err := shoal(t, verb, filepath.Join(dir, "train"), filepath.Join(dir, dest))
			if !cli.IsUsage(err) || !strings.Contains(err.Error(), want) {
				t.Errorf("%s to %s: %v", verb, dest, err)
			}
			if _, err := os.Lstat(filepath.Join(dir, "train", "new")); err == nil {
				t.Fatalf("%s to %s made a folder in the source", verb, dest)
			}
		}
	}
}

// A mount that fails leaves no mount point that it has made.
func TestAFailedMountLeavesNoFolder(t *testing.T) {
	s := newShell(t)
	for _, flags := range [][]string{nil, {"--daemon"}} {
		if _, errs, code := s.run(nil, append([]string{"mount", s.path("none"), "m"}, flags...)...); code != 1 {
			t.Errorf("exit code %d, %s", code, errs)
		}
		if _, err := os.Lstat(s.path("m")); err == nil {
			t.Errorf("%v: the mount point is there", flags)
		}
	}
}

// Who unmounts is told what is waited for, if that takes more than a second.
func TestUmountSaysWhatItWaitsFor(t *testing.T) {
	dir := t.TempDir()
	var told atomic.Bool
	a := &daemon.Answers{Verbs: []string{"cache"}, Most: 1, Run: func(_ context.Context, v *daemon.Verb) error {
		users := 2
		if told.Load() {
			users = 1
		}
		_, err := fmt.Fprintf(v, `[{"users": %d}]`, users)
		return err
	}, Failed: func(*daemon.Verb, error) {}}
	if _, err := a.ListenIn(t.Context(), dir); err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	r := stderr(t)
	go func() {
		line, _ := r.ReadString('\n')
		told.Store(strings.Contains(line, "waiting for the daemon of "+dir))
	}()
	if err := waitUsers(t.Context(), dir, 2, time.Minute); err != nil {
		t.Error(err)
	}
	told.Store(false)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for range 20 { // it hears of that now and then before it can ask
		if err := waitUsers(ctx, dir, 2, time.Minute); !errors.Is(err, context.Canceled) {
			t.Errorf("interrupted: %v", err)
		}
	}
}

// stderr takes what this process says for the rest of a test.
func stderr(t *testing.T) *bufio.Reader {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	was := os.Stderr
	os.Stderr = w
	t.Cleanup(func() { os.Stderr = was; w.Close(); r.Close() })
	return bufio.NewReader(r)
}

// A step that takes more than a second is shown, whether it gets on or not.
func TestLateStep(t *testing.T) {
	r := stderr(t)
	late(daemon.Own, "short").Done("")
	bar := late(daemon.Own, "long")
	if line, err := r.ReadString('\n'); line != "long ...\n" {
		t.Errorf("%q, %v", line, err)
	}
	bar.Done("")
	bar.Done("")
}

// The help of a verb is shown whoever is asked for it.
func TestHelpOfAVerb(t *testing.T) {
	out := newShell(t).must(nil, "config", "mount", "--help")
	if !strings.Contains(out, "shoal mount SOURCE MOUNTPOINT") {
		t.Error(out)
	}
}

// A driver says what is wrong with its limits, as a mount does.
func TestDriverLimits(t *testing.T) {
	s := newShell(t)
	env := []string{"SHOAL_KEEPER=unix://" + s.path("none")}
	_, errs, _ := s.run(env, "csi", "--cache-dir=cache", "--memory=9000TiB")
	if !strings.Contains(errs, "--memory exceeds the limit") {
		t.Error(errs)
	}
}

// A Python that ends without a word is a cause, too.
func TestVerifySaysWhy(t *testing.T) {
	killed := filepath.Join(t.TempDir(), "python")
	if err := os.WriteFile(killed, []byte("#!/bin/sh\n[ \"$1\" = -c ] || kill -9 $$\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	_, err := shoal(t, "verify", "unix:///none", "--python", killed)
	if !cli.IsUsage(err) || !strings.HasSuffix(err.Error(), "could not be compared: signal: killed") {
		t.Error(err)
	}
}

// What nobody can read was not done.
func TestFullOutput(t *testing.T) {
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer full.Close()
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	dest := t.TempDir()
	if err := os.MkdirAll(filepath.Join(dest, "step-1"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dest, "step-1", ".metadata"), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	config := filepath.Join(dest, "shoal.yaml")
	if err := os.WriteFile(config, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	ready := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	defer ready.Close()
	for _, line := range []string{"version", "python --path", "ckpt latest file://" + dest, "health " + ready.URL,
		"order sequential --n 1", "config --check " + config} {
		c := root()
		c.SetArgs(strings.Fields(line))
		c.SetOut(full)
		if err := c.ExecuteContext(t.Context()); !errors.Is(err, syscall.ENOSPC) {
			t.Errorf("shoal %s: %v", line, err)
		}
	}
}

// What an admin address answers is JSON and a line of its own, or an error; one that does not answer says for how long.
func TestStatOfAnAddress(t *testing.T) {
	said, over := `{"version": 1}`, make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/readyz" {
			<-over
		}
		_, _ = io.WriteString(w, said)
	}))
	defer server.Close()
	defer close(over)
	if out, err := shoal(t, "stat", server.URL, "--json"); err != nil || out != said+"\n" {
		t.Errorf("%q, %v", out, err)
	}
	said = "<html>"
	if out, err := shoal(t, "stat", server.URL, "--json"); err == nil || out != "" {
		t.Errorf("%q, %v", out, err)
	}
	_, err := shoal(t, "health", server.URL, "--timeout", "50ms")
	if err == nil || !strings.Contains(err.Error(), "the daemon of "+server.URL+" does not answer since") {
		t.Error(err)
	}
}

// A checkpoint has one line, whatever its name: it makes no others, and has no commands for a terminal.
func TestNamesInOneLine(t *testing.T) {
	dest := t.TempDir()
	at := filepath.Join(dest, "step-1\nstep-2\t9\x1b[2J")
	if err := errors.Join(os.Mkdir(at, 0o700), os.WriteFile(filepath.Join(at, ".metadata"), nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	out, err := shoal(t, "ckpt", "ls", "file://"+dest)
	if lines := strings.Split(out, "\n"); err != nil || len(lines) != 3 ||
		!strings.HasPrefix(lines[1], "step-1·step-2·9·[2J  1  ") {
		t.Errorf("%q, %v", out, err)
	}
}

// A process whose own verb has ended, and that goes on for others', says so.
func TestOwnerGoesOn(t *testing.T) {
	s := newShell(t)
	serve := func(name string) []string {
		s.write(name+"/class/0.jpg", name)
		return []string{"serve", s.path(name), "--listen", "unix://" + s.path(name+".sock"), "--cache-dir", "cache"}
	}
	first := s.command(nil, serve("a")...)
	errs, err := first.StderrPipe()
	if err == nil {
		err = first.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	defer time.AfterFunc(time.Minute, func() { _ = first.Process.Kill() }).Stop()
	s.must(nil, "health", "unix://"+s.path("a.sock"), "--wait", "60s")
	s.must(nil, append(serve("b"), "--daemon")...)
	var feeds [2]struct{ Feed struct{ Workers int } } // which have one for each core, whichever process began them
	for i, name := range []string{"a", "b"} {
		text := s.must(nil, "stat", "unix://"+s.path(name+".sock"), "--json")
		if err := json.Unmarshal([]byte(text), &feeds[i]); err != nil || feeds[i] != feeds[0] {
			t.Errorf("%+v, %v", feeds, err)
		}
	}
	if _, errs, code := s.run(nil, "stop", "cache"); code != 1 || !strings.Contains(errs, "stop all with --all") {
		t.Errorf("stop of one of two, which it does not name: exit code %d, %s", code, errs)
	}
	s.must(nil, "stop", "unix://"+s.path("a.sock"))
	said := bufio.NewScanner(errs)
	for said.Scan() && !strings.Contains(said.Text(), "this process goes on for the mounts and feeds") {
	}
	if said.Text() == "" {
		t.Error("it does not say why it goes on")
	}
	go func() { _, _ = io.Copy(io.Discard, errs) }()
	s.must(nil, "stop", "unix://"+s.path("b.sock"))
	if err := first.Wait(); err != nil {
		t.Error(err)
	}
}

// What uses a cache directory can be stopped while it is starting, or fills the cache.
func TestStopWhileStarting(t *testing.T) {
	silent := make(chan struct{})
	store := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		select {
		case <-silent:
		case <-r.Context().Done():
		}
	}))
	defer store.Close()
	defer close(silent)
	s := newShell(t)
	warm := s.command([]string{"AWS_ENDPOINT_URL=" + store.URL, "AWS_ACCESS_KEY_ID=a", "AWS_SECRET_ACCESS_KEY=b"},
		"warm", "s3://photos/train", "--cache-dir", "cache")
	if err := warm.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = warm.Process.Kill() }()
	s.awaitIdle()
	if _, errs, code := s.run(nil, "stop", "cache"); code != 0 {
		t.Errorf("exit code %d, %s", code, errs)
	}
	if err := warm.Wait(); err == nil || warm.ProcessState.ExitCode() != 1 {
		t.Errorf("warm: %v", err)
	}
}

// A supervised daemon that is starting again, after a death, is stopped for good.
func TestStopWhileStartingAgain(t *testing.T) {
	silent, ended := new(atomic.Bool), make(chan struct{})
	store := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if silent.Load() {
			select {
			case <-ended:
			case <-r.Context().Done():
			}
		}
		if !r.URL.Query().Has("list-type") {
			http.Error(w, "<Error><Code>NoSuchKey</Code></Error>", http.StatusNotFound)
			return
		}
		_, _ = io.WriteString(w, hostile.Page("", hostile.Entry("train/0.jpg", "1", `"a"`)))
	}))
	defer store.Close()
	defer close(ended)
	s := newShell(t)
	env := []string{"AWS_ENDPOINT_URL=" + store.URL, "AWS_ACCESS_KEY_ID=a", "AWS_SECRET_ACCESS_KEY=b"}
	addr := "unix://" + s.path("sock")
	s.must(env, "serve", "s3://photos/train", "--cache-dir", "cache", "--listen", addr, "--daemon=supervised")
	var st struct{ PID int }
	if err := json.Unmarshal([]byte(s.must(nil, "stat", addr, "--json")), &st); err != nil {
		t.Fatal(err)
	}
	var parent int
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", st.PID))
	if err == nil {
		_, err = fmt.Sscanf(string(stat[bytes.LastIndexByte(stat, ')')+1:]), " %c %d", new(rune), &parent)
	}
	if err != nil {
		t.Fatal(err)
	}
	silent.Store(true)
	err = os.RemoveAll(s.path("cache/manifests")) // so that it lists again
	if err = errors.Join(err, syscall.Kill(st.PID, syscall.SIGKILL)); err != nil {
		t.Fatal(err)
	}
	s.awaitIdle()
	s.must(nil, "stop", "cache")
	if !daemon.Gone(t.Context(), parent, time.Minute) {
		_ = syscall.Kill(parent, syscall.SIGTERM)
		t.Error("its supervisor goes on")
	}
}

// A wait that fails ends the line of its progress before it says why, and the name of a file is no command for a
// terminal.
func TestWaitEndsItsLine(t *testing.T) {
	s := newShell(t)
	home := s.path(filepath.Join("run", folder.Home))
	if err := os.MkdirAll(home, 0o700); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", filepath.Join(home, folder.Socket))
	if err != nil {
		t.Fatal(err)
	}
	carrier := http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Has("look") {
			_, _ = io.WriteString(w, `{"lacks": "a\u001b[2J", "why": "being written"}`)
			return
		}
		<-r.Context().Done()
	})}
	go func() { _ = carrier.Serve(l) }()
	defer carrier.Close()
	_, errs, code := s.run(nil, "ckpt", "wait", s.path("run"), "--timeout", "1s")
	if want := regexp.MustCompile(`(?s)^waiting for \. \.\.\.\n(.*\n)?waiting for \.  +[0-9.]+s\nshoal: [^\n]*` +
		`is not whole in the bucket after 1s: a·\[2J is being written`); code != 1 || !want.MatchString(errs) {
		t.Errorf("exit code %d, %q", code, errs)
	}
}

// What a verb's Use names is what it takes: every verb says so of an argument too many, and none blames cobra's count.
func TestArgumentsAreNamed(t *testing.T) {
	commands(root(), func(c *cobra.Command) {
		if c.Args == nil || c.Hidden || strings.Contains(c.Use, "...") || c.HasSubCommands() {
			return
		}
		err := c.Args(c, strings.Fields(strings.Repeat("x ", len(cli.ArgumentsOf(c))+1)))
		if err == nil { // the verb checks it itself, since --cache-dir may stand for one of them
			if !strings.HasPrefix(c.CommandPath(), "shoal cache ") {
				t.Errorf("%s takes more than %q", c.CommandPath(), c.Use)
			}
			return
		}
		if !regexp.MustCompile("is one too many|takes no arguments|there is no verb").MatchString(err.Error()) {
			t.Errorf("%s: %v", c.CommandPath(), err)
		}
	})
}

func TestOnly(t *testing.T) {
	for _, c := range []struct {
		found []string
		want  string
		err   string
	}{
		{nil, "", "no Shoal mount was found (give a mount point)"},
		{[]string{"/a"}, "/a", ""},
		{[]string{"/a", "/b"}, "", "2 mounts found; name one (/a, /b)"},
	} {
		got, err := only(c.found, "give a mount point")
		if got != c.want || (err == nil) != (c.err == "") || err != nil && err.Error() != c.err {
			t.Errorf("%q: %q, %v", c.found, got, err)
		}
	}
	if _, err := shoal(t, "mount", "file:///data", ""); err == nil ||
		!strings.Contains(err.Error(), "the MOUNTPOINT is empty") {
		t.Errorf("mount at nothing: %v", err)
	}
	for _, verb := range []string{"stat", "top", "health", "refresh", "stop", "umount", "profile"} {
		if _, err := shoal(t, verb, ""); err == nil || !strings.Contains(err.Error(), "name of the mount is empty") {
			t.Errorf("%s of nothing: %v", verb, err)
		}
	}
	if _, err := shoal(t, "cache", "ls", ""); err == nil || !strings.HasPrefix(err.Error(), "the CACHE-DIR is empty") {
		t.Errorf("the cache in nothing: %v", err)
	}
	if err := notMounted("/a {b}"); !strings.Contains(err.Error(), "`shoal mount SOURCE /a\\ \\{b\\}`") {
		t.Errorf("a remedy that a shell changes: %v", err)
	}
	for _, verb := range []string{"umount", "refresh", "upgrade", "profile"} {
		if _, err := shoal(t, verb, "s3://photos/train"); err == nil ||
			!strings.Contains(err.Error(), "s3://photos/train is a URL, not a mount point") {
			t.Errorf("%s of a URL: %v", verb, err)
		}
	}
}

// mostFlags are enough for a verb: all are in its --help, and are read in a minute or two. A new one needs an old one
// to go.
const mostFlags = 40

func TestHelpIsShort(t *testing.T) {
	commands(root(), func(c *cobra.Command) {
		n := 0
		c.LocalFlags().VisitAll(func(f *pflag.Flag) {
			if n++; f.Hidden && f.Name != standingFlag {
				t.Errorf("%s hides --%s", c.CommandPath(), f.Name)
			}
			from, some := removedFrom[f.Name]
			if !some {
				from = []string{"mount", "serve"}
			}
			if _, gone := removed[f.Name]; gone && slices.Contains(from, c.Name()) {
				t.Errorf("%s has --%s, which was removed", c.CommandPath(), f.Name)
			}
		})
		t.Logf("%s: %d flags", c.CommandPath(), n)
		if n > mostFlags {
			t.Errorf("%s has %d flags, %d are enough", c.CommandPath(), n, mostFlags)
		}
	})
}

// The help tells a default once, and there is one thing and two things.
func TestDefaultsAreToldOnce(t *testing.T) {
	commands(root(), func(c *cobra.Command) {
		for line := range strings.Lines(c.Flags().FlagUsages()) {
			if strings.Count(line, "(default") > 1 {
				t.Errorf("%s: %s", c.CommandPath(), line)
			}
		}
	})
	for n, want := range map[int]string{0: "0 batches", 1: "1 batch", 2: "2 batches", 1_234_567: "1,234,567 batches"} {
		if got := human.Count(n, "batch"); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// What is kept may be more than what may be, after others have come: that is said as such.
func TestDiskAboveItsLimit(t *testing.T) {
	for used, want := range map[int64]string{27 << 20: "27 MiB of 27 MiB, 1 of 1 extent kept",
		28 << 20: "28 MiB, above the limit of 27 MiB that there is now: nothing is added, 1 of 1 extent kept"} {
		var s admin.Snapshot
		s.Disk = engine.DiskStats{Used: used, Budget: 27 << 20, Kept: 1, Extents: 1}
		var b strings.Builder
		if printStats(&b, &s); !strings.Contains(b.String(), want) {
			t.Errorf("%s\nwant %s", b.String(), want)
		}
	}
}

// What is watched shows all that stat shows, the S3 endpoint too.
func TestTopShowsTheEndpoint(t *testing.T) {
	now := admin.Snapshot{S3: &s3api.Stats{Requests: 7, Listen: "127.0.0.1:9000"}}
	var b strings.Builder
	if printFrame(&b, new(admin.Snapshot), &now); !strings.Contains(b.String(), "7 requests at 127.0.0.1:9000") {
		t.Error(b.String())
	}
}

// On a terminal with fewer rows than lines, the first lines stay, and the rest is counted.
func TestTopFitsTheTerminal(t *testing.T) {
	var now admin.Snapshot
	now.Source = "file:///data"
	for i := range 40 {
		now.Streams = append(now.Streams, run.Progress{Name: fmt.Sprintf("feed/job/rank%d/epoch0", i)})
	}
	daemon := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_ = json.NewEncoder(w).Encode(now)
	}))
	defer daemon.Close()
	screen, tty, err := pty.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer screen.Close()
	defer tty.Close()
	if err := pty.Setsize(tty, &pty.Winsize{Rows: 24, Cols: 80}); err != nil {
		t.Fatal(err)
	}
	if t.Setenv("TERM", "dumb"); progress.Terminal(tty) {
		t.Error("a dumb terminal would show the commands")
	}
	t.Setenv("TERM", "xterm")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var c cobra.Command
	c.SetContext(ctx)
	c.SetOut(tty)
	ended := make(chan error, 1)
	go func() {
		w := watch{target: daemon.URL, interval: 100 * time.Millisecond}
		ended <- w.run(&c, &clientSecurity{})
	}()
	var frame []byte
	for from := bufio.NewReader(screen); !bytes.HasSuffix(frame, []byte("\x1b[J")); {
		b, err := from.ReadByte()
		if err != nil {
			t.Fatal(err)
		}
		frame = append(frame, b)
	}
	text := string(frame)
	if n := strings.Count(text, "\n"); n >= 24 || !strings.Contains(text, "samples/s") ||
		!strings.Contains(text, "rank0/") || !strings.Contains(text, "lines more") {
		t.Errorf("a frame of %d lines:\n%s", n, text)
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// quickstart finds the laboratory beside this program before one on PATH.
func TestLaboratory(t *testing.T) {
	beside, path, none := t.TempDir(), t.TempDir(), t.TempDir()
	for _, dir := range []string{beside, path} {
		if err := os.WriteFile(filepath.Join(dir, "shoal-lab"), []byte("#!/bin/false\n"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", path)
	for dir, want := range map[string]string{beside: filepath.Join(beside, "shoal-lab"),
		none: filepath.Join(path, "shoal-lab")} {
		if lab := laboratory(dir); lab != want {
			t.Errorf("%q, want %q", lab, want)
		}
	}
	t.Setenv("PATH", none)
	if lab := laboratory(none); lab != "" {
		t.Errorf("%q, and there is none", lab)
	}
}

// The default cache directories are found in any home.
func TestDefaultDirs(t *testing.T) {
	home := filepath.Join(t.TempDir(), "[me")
	t.Setenv("XDG_CACHE_HOME", home)
	dir := filepath.Join(home, "shoal", "f0")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "FORMAT"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if found, err := defaultDirs(); err != nil || !slices.Equal(found, []string{dir}) {
		t.Errorf("%q, %v", found, err)
	}
}

// A cache folder that was there before may hold what is others': the user is not advised to remove it.
func TestQuickstartRemovesItsOwn(t *testing.T) {
	for want, made := range map[string][]string{"rm -r /nvme": {"/nvme"}, "shoal cache rm /nvme s3://b/p": nil} {
		var b strings.Builder
		q := quickstart{out: &b, cache: "/nvme", at: "/m", made: made}
		q.say("s3://b/p", "unix:///m.sock", feedCode, false)
		if !strings.Contains(b.String(), "Remove it:   "+want+"\n") {
			t.Errorf("%q is not in %s", want, b.String())
		}
	}
}

// A quickstart that fails leaves none of the folders that it has made.
func TestQuickstartLeavesNothing(t *testing.T) {
	s := newShell(t)
	s.write("photos/class/0.jpg", "x")
	_, errs, code := s.run(nil, "quickstart", "photos", "--mountpoint=a/b/c/m", "--cache-dir=photos/x/y")
	if _, err := os.Lstat(s.path("a")); code == 0 || err == nil {
		t.Errorf("exit code %d, %s", code, errs)
	}
	if _, err := os.Lstat(s.path("photos/x")); err == nil {
		t.Error("the cache's folder is there")
	}
}

// A folder is served whatever its name: it is no URL.
func TestQuickstartOfAnyFolder(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "100% {a}")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	text, err := new(quickstart).source(t.Context(), dir)
	if src, failed := objstore.ParseSource(text); err != nil || failed != nil || src.Dir != dir {
		t.Errorf("%q, %v: %+v, %v", text, err, src, failed)
	}
}

// A dataset of some columns is verified as any other, which its name tells, and with the key of its objects.
func TestVerifyOfColumns(t *testing.T) {
	s := newShell(t)
	s.write("tables/x.csv", "a,b\n1,2\n")
	for _, samples := range []string{"rows", "rows:a,", "rows:a,b"} {
		s.must(nil, "warm", "file://"+s.path("tables"), "--samples", samples, "--cache-dir", samples)
		for range 2 { // which makes no dataset more
			var list []cacheEntry
			text := s.must(nil, "cache", "ls", samples, "--json")
			if err := json.Unmarshal([]byte(text), &list); err != nil || len(list) != 1 {
				t.Fatal(err, text)
			}
			s.must(nil, "cache", "verify", samples, list[0].ID)
			_, errs, code := s.run([]string{customerKeyVariable + "=short"}, "cache", "verify", samples, list[0].ID)
			if code == 0 || !strings.Contains(errs, customerKeyVariable) {
				t.Errorf("%s: exit code %d, %s", samples, code, errs)
			}
		}
	}
}
