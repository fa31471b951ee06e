package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/shoalfs/shoal/lab/rig/proxy"
)

// shoal.open reads round FUSE what is on disk, gives the mount's bytes, and reports what it opens: before and after a
// restart, a refresh, in forked processes, in threads.
func TestOpen(t *testing.T) {
	dir, paths := tree(t, 3, 300, 20<<10)
	write(t, filepath.Join(dir, "large.bin"), make([]byte, 5<<20))
	write(t, filepath.Join(dir, "empty.bin"), nil)
	_, env := far(t, proxy.Options{})
	source, cache := bucket(t, dir), t.TempDir()
	log := filepath.Join(t.TempDir(), "audit.log")
	mnt := mount(t, env, source, "--cache-dir", cache, "--cache-size", "256MiB", "--kernel-cache", "off",
		"--audit-log", log)
	cmd := python(t, openScript, mnt, dir, "steps")
	cmd.Stderr = os.Stderr
	in, out := piped(t, cmd)
	lines := json.NewDecoder(out)
	step := func(what string) (got map[string]int) {
		t.Helper()
		if _, err := in.Write([]byte(what + "\n")); err != nil {
			t.Fatal(err)
		}
		if err := lines.Decode(&got); err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		t.Log(what, got)
		return got
	}
	all := len(paths) + 2
	if got := step("read"); got["round"]+got["mount"] != all { // what came ahead of the reader may be on disk already
		t.Errorf("first: %v", got)
	}
	waitKept(t, mnt, len(paths))
	step("read")
	step("wait")
	if got := step("read"); got["round"] != len(paths) || got["mount"] != 2 {
		t.Errorf("kept: %v", got)
	}
	var opens int64
	defer func() { t.Logf("%d opens of 3 times %d", opens, all) }()
	within(t, patience, "all opens are reported", func() bool { // the last ones of each time may come late
		opens = readStats(t, mnt).Opens
		return opens == 3*int64(all)
	})
	for _, how := range []string{"fork", "threads", "odd"} {
		if got := step(how); got["round"] < len(paths) {
			t.Errorf("%s: %v", how, got)
		}
	}
	// Another version: the same paths, other bytes.
	for i, p := range paths {
		if i%3 == 0 {
			write(t, filepath.Join(dir, p), []byte("changed "+p))
		}
	}
	upload(t, dir, bucketName(t))
	mustShoal(t, env, "refresh", mnt)
	step("read")
	umount(t, mnt)
	events, err := os.ReadFile(log)
	// the process and the one that it has forked
	if n := strings.Count(string(events), `"mount_open"`); err != nil || n != 2 {
		t.Errorf("%d readers in the audit log, %v\n%s", n, err, events)
	}
	if got := step("read"); got["round"] != 0 || got["errors"] != all {
		t.Errorf("without a mount: %v", got)
	}
	mount(t, env, source) // it takes the device number that has become free
	mountAt(t, env, source, mnt, "--cache-dir", cache, "--cache-size", "256MiB", "--kernel-cache", "off")
	segments, err := filepath.Glob(filepath.Join(cache, "segments", "*", "*.seg"))
	for _, path := range segments {
		content(t, path) // into memory, from where they are verified when they are asked for
	}
	if err != nil {
		t.Error(err)
	}
	// What was not verified in time, or has left memory meanwhile, is read through the mount, which brings it back.
	within(t, patience, "reads round the mount after a restart", func() bool {
		step("wait")
		return step("read")["round"] >= len(paths)*2/3
	})
	if err := in.Close(); err != nil {
		t.Error(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
}

// 40 readers, of which some have time limits by signals and some are interrupted by Ctrl-C: after a refresh has
// returned none gets the old version of a file, and none an error but those that its handlers raise.
func TestOpenAmidRefreshes(t *testing.T) {
	dir, paths := tree(t, 2, 60, 100)
	version := func(n int) {
		for _, p := range paths {
			write(t, filepath.Join(dir, p), fmt.Appendf(nil, "%06d %s %s", n, p, strings.Repeat("x", 5000)))
		}
		upload(t, dir, bucketName(t))
	}
	_, env := far(t, proxy.Options{})
	source := bucket(t, dir)
	version(0)
	mnt := mount(t, env, source, "--cache-size", "256MiB", "--kernel-cache", "off")
	cmd := python(t, refreshesScript, mnt, "40")
	cmd.Stderr = os.Stderr
	in, out := piped(t, cmd)
	lines := json.NewDecoder(out)
	var got struct{ Reads, Round, Interrupted, Wrong, Errors, Stale int }
	say := func(what string, n int) {
		t.Helper()
		if _, err := fmt.Fprintln(in, what, n); err != nil {
			t.Fatal(err)
		}
		if err := lines.Decode(&got); err != nil {
			t.Fatal(err)
		}
	}
	const rounds = 3
	for n := range rounds {
		waitKept(t, mnt, len(paths))
		say("all", 40) // have read round the mount since
		t.Logf("version %d: %+v", n, got)
		if n == rounds-1 {
			break
		}
		say("highest", n+1)
		version(n + 1)
		mustShoal(t, env, "refresh", mnt)
		say("lowest", n+1)
	}
	if err := in.Close(); err != nil {
		t.Error(err)
	}
	if err := lines.Decode(&got); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
	if t.Logf("%+v", got); got.Wrong+got.Errors > 0 || got.Interrupted == 0 {
		t.Errorf("%+v", got)
	}
}

const refreshesScript = `
import ctypes, errno, json, mmap, os, random, signal, sys, threading, time
import shoal, shoal._open
mnt, n = sys.argv[1], int(sys.argv[2])
shoal._open._RECONNECT = 0.05
paths = [os.path.join(at, f)[len(mnt) + 1:] for at, _, files in os.walk(mnt) if ".shoal" not in at for f in files]
NAMES = ("reads", "round", "interrupted", "wrong", "errors", "stale")
shared = (ctypes.c_int64 * (3 + n * len(NAMES))).from_buffer(mmap.mmap(-1, 8 * (3 + n * len(NAMES))))
LOWEST, HIGHEST, STOP = 0, 1, 2

def reader(i):
    def count(name): shared[3 + i * len(NAMES) + NAMES.index(name)] += 1
    armed = False  # one exception a read, and inside the try
    def interrupt(number, _):
        nonlocal armed
        if armed:
            armed = False
            raise KeyboardInterrupt if number == signal.SIGINT else TimeoutError("too slow")
    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGALRM, interrupt)
    while not shared[STOP]:
        time.sleep(random.random() / 50)
        try:
            armed = random.random() < 0.9  # the rest leave a slow machine the time to connect
            if armed and i % 3 == 0:
                signal.setitimer(signal.ITIMER_REAL, random.random() / 30)
            path = random.choice(paths)
            lowest, round = shared[LOWEST], False
            with shoal.open(mnt + "/" + path) as f:
                round, data = isinstance(f, shoal._open.File), f.read()
            signal.setitimer(signal.ITIMER_REAL, 0)
            version, name, rest = data.decode().split(" ")
            good = lowest <= int(version) <= shared[HIGHEST] and name == path and rest == "x" * 5000
            if not good:
                print(path, data[:50], lowest, shared[HIGHEST], round, file=sys.stderr)
            count("reads")
            if round: count("round")
            if not good: count("wrong")
            armed = False
        except (KeyboardInterrupt, TimeoutError):
            count("interrupted")
        except OSError as e:
            armed = False
            if e.errno == errno.ESTALE and not round:
                count("stale")  # the mount's, of a name that was looked up before a refresh and opened after it
            else:
                print(repr(e), file=sys.stderr)
                count("errors")

signal.signal(signal.SIGINT, signal.SIG_IGN)
children = []
for i in range(n):
    pid = os.fork()
    if pid == 0:
        try:
            reader(i)
        finally:
            os._exit(0)
    children.append(pid)

def interrupts():
    while not shared[STOP]:
        os.kill(random.choice(children[1::3]), signal.SIGINT)
        time.sleep(0.005)
threading.Thread(target=interrupts, daemon=True).start()

def counts(name): return [shared[3 + i * len(NAMES) + NAMES.index(name)] for i in range(n)]
def totals(): print(json.dumps({name.capitalize(): sum(counts(name)) for name in NAMES}), flush=True)

try:
    for line in sys.stdin:
        what, number = line.split()
        if what == "all":
            before = counts("round")
            while any(a == b for a, b in zip(before, counts("round"))):
                time.sleep(0.01)
        else:
            shared[LOWEST if what == "lowest" else HIGHEST] = int(number)
        totals()
finally:
    shared[STOP] = 1
for pid in children:
    os.waitpid(pid, 0)
totals()
`

// Encrypted caches hand out no descriptors: everything is read from the mount.
func TestOpenEncrypted(t *testing.T) {
	dir, paths := tree(t, 2, 20, 20<<10)
	_, env := far(t, proxy.Options{})
	key := filepath.Join(t.TempDir(), "key")
	write(t, key, []byte("0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef\n"))
	mnt := mount(t, env, bucket(t, dir), "--encryption-key-file", key, "--cache-size", "256MiB")
	var got []map[string]int
	runPython(t, &got, openScript+`
print(json.dumps([read(), read()]))`, mnt, dir)
	for _, g := range got {
		if g["round"] != 0 || g["mount"] != len(paths) {
			t.Errorf("%v", g)
		}
	}
}

// Pillow, torchvision and, in make conformance, fsspec read through shoal.open what they read from the mount.
func TestOpenPictures(t *testing.T) {
	dir, paths := pictures(t, 3, 20)
	_, env := far(t, proxy.Options{})
	mnt := mount(t, env, bucket(t, dir), "--cache-size", "256MiB", "--kernel-cache", "off")
	cmd := python(t, picturesScript, mnt)
	if clients := os.Getenv("SHOAL_CLIENTS"); clients != "" {
		cmd.Path = clients + "-torch/bin/python"
		cmd.Args[0] = cmd.Path
		cmd.Env = append(cmd.Env, "SHOAL_TEST_FSSPEC=1")
	}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	waitKept(t, mnt, len(paths))
}

const picturesScript = `
import os, sys, time, torch
import shoal, shoal._open
from PIL import Image
from torch.utils.data import DataLoader
from torchvision import datasets, transforms as T

round = 0
def load(path):
    global round
    with shoal.open(path) as f:
        round += isinstance(f, shoal._open.File)
        return Image.open(f).convert("RGB")

look = T.Compose([T.CenterCrop(64), T.ToTensor()])
plain, ours = datasets.ImageFolder(sys.argv[1], look), datasets.ImageFolder(sys.argv[1], look, loader=load)
for workers in (0, 2, 2):
    for (a, x), (b, y) in zip(DataLoader(plain, 8), DataLoader(ours, 8, num_workers=workers)):
        assert torch.equal(a, b) and torch.equal(x, y)
    time.sleep(2.1)
for _ in range(2):
    for path, _ in ours.samples:
        load(path).load()
assert round > len(ours.samples), round
path = ours.samples[0][0]
assert Image.open(shoal.open(path)).size == Image.open(path).size
if os.environ.get("SHOAL_TEST_FSSPEC"):
    import fsspec, shoal._fsspec
    fsspec.register_implementation("shoal", "shoal._fsspec.ShoalFileSystem")
    data = open(path, "rb").read()
    for opened in (fsspec.open("shoal://" + path).open(), fsspec.filesystem("shoal")._open(path), fsspec.filesystem("file").open(path)):
        with opened as f:
            assert f.size == len(data) and f.path == path and f.peek(1) and f.fileno() > 0
    assert fsspec.filesystem("shoal").read_block(path, 10, 20) == data[10:30]
    with fsspec.open("shoal://" + path) as f:
        assert isinstance(f, shoal._open.File) and f.read() == data
    fs, root = fsspec.core.url_to_fs("shoal://" + sys.argv[1])
    assert fs.cat(path) == data and fs.cat_file("shoal://" + path, 3, -5) == data[3:-5] and fs.size(path) == len(data)
    assert sorted(f for f in fs.find(root) if f.endswith(".jpg")) == sorted(p for p, _ in ours.samples) and fs.ls(root)
    assert fs.unstrip_protocol(path) == "shoal://" + path and fs.exists("shoal://" + path) and not fs.exists("shoal:///nowhere")
    try:
        fs.open(path, "wb")
        assert False
    except OSError:
        pass
`

const openScript = `
import json, os, sys, threading, time
import shoal, shoal._open
mnt, dir = sys.argv[1:3]
paths = sorted(os.path.join(at, f)[len(dir) + 1:] for at, _, files in os.walk(dir) for f in files)

def read(spelled=None, only=paths):
    n = {"round": 0, "mount": 0, "errors": 0}
    for p in only:
        try:
            with shoal.open((spelled or mnt) + "/" + p) as f:
                n["round" if isinstance(f, shoal._open.File) else "mount"] += 1
                data = f.read()
        except OSError:
            n["errors"] += 1
            continue
        with open(os.path.join(dir, p), "rb") as f:
            assert data == f.read(), p
    shoal._open._end()  # tells of the last opens
    return n

def fork():
    r, w = os.pipe()
    if os.fork() == 0:
        n = read()
        os.write(w, json.dumps(n).encode())
        os._exit(0)
    got = json.loads(os.read(r, 1000))
    os.wait()
    more = read()
    return {k: min(got[k], more[k]) for k in got}

def threads():
    got = []
    all = [threading.Thread(target=lambda: got.append(read())) for _ in range(4)]
    for t in all: t.start()
    for t in all: t.join()
    return {k: min(n[k] for n in got) for k in got[0]}

def odd():
    link = mnt + "-link"
    os.symlink(mnt, link)
    os.chdir(os.path.dirname(mnt))
    try:
        found = [read(s) for s in (link, mnt + "/../" + os.path.basename(mnt) + "/.", os.path.basename(mnt))]
    finally:
        os.unlink(link)
    for bad in (mnt, mnt + "/nope.jpg", mnt + "/nope/nope.jpg", mnt + "/" + paths[0] + "/x"):
        try:
            shoal.open(bad)
        except OSError as e:
            try:
                open(bad, "rb")
            except OSError as e2:
                assert (e.errno, e.filename) == (e2.errno, e2.filename)
                continue
        assert False, bad
    assert shoal.open(__file__ if "__file__" in globals() else "/etc/hostname").read()
    f = shoal.open(mnt + "/" + paths[2])
    assert f.readable() and f.seekable() and not f.writable() and f.name.endswith(paths[2])
    assert f.peek(1) and f.read(3) + f.read() == open(f.name, "rb").read() and os.fstat(f.fileno()).st_size == os.stat(f.name).st_size
    for write in (lambda: f.write(b"x"), lambda: f.truncate(1), lambda: f.writelines([b"x"]), lambda: os.write(f.fileno(), b"x")):
        try:
            write()
            assert False
        except OSError:
            pass
    return {k: min(n[k] for n in found) for k in found[0]}

def wait():
    time.sleep(2.1)  # until what had no place is asked for again
    return {}

for line in sys.stdin if len(sys.argv) > 3 else ():
    print(json.dumps(globals()[line.strip()]()), flush=True)
`
