package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/shoalfs/shoal/gpuingest/jpeg"
	"github.com/shoalfs/shoal/lab/rig/proxy"
)

// A set in S3 is unpacked: the tree, its bytes and times; again, what is there is kept; another file is never
// overwritten.
func TestUnpack(t *testing.T) {
	dir, paths := tree(t, 4, 60, 24<<10)
	_, env := far(t, proxy.Options{Latency: 5 * time.Millisecond, Sigma: 0.3})
	source := bucket(t, dir)
	set := "s3://" + newBucket(t, "-packed") + "/set"
	mustShoal(t, env, "pack", source, set, "--shard-size", "1MiB", "--seed", "3")
	into := filepath.Join(t.TempDir(), "train")
	mustShoal(t, env, "unpack", set, into)
	readAll(t, into, dir, paths)
	mnt := mount(t, env, source)
	sameTree(t, into, dir, paths)
	for _, p := range paths[:10] {
		a, err := os.Stat(filepath.Join(mnt, p))
		if err != nil {
			t.Fatal(err)
		}
		if b, err := os.Stat(filepath.Join(into, p)); err != nil || !a.ModTime().Equal(b.ModTime()) {
			t.Errorf("%s: %v and %v, %v", p, a.ModTime(), b, err)
		}
	}
	if err := os.Remove(filepath.Join(into, paths[7])); err != nil {
		t.Fatal(err)
	}
	var done struct{ Files, Kept int }
	decode(t, mustShoal(t, env, "unpack", set+"/", into, "--json"), &done)
	if done.Files != len(paths) || done.Kept != len(paths)-1 {
		t.Errorf("%+v of %d files", done, len(paths))
	}
	write(t, filepath.Join(into, paths[9]), []byte("mine"))
	if _, errs, code := shoal(t, env, "unpack", set, into); code != 1 || !strings.Contains(errs, paths[9]) ||
		!strings.Contains(errs, "another folder") {
		t.Errorf("another file: exit %d, %s", code, errs)
	}
	if data, err := os.ReadFile(filepath.Join(into, paths[9])); err != nil || string(data) != "mine" {
		t.Errorf("it holds %q, %v", data, err)
	}
	for _, args := range [][]string{{source, into}, {"s3://nosuchbucket-unpack/set", into}} {
		if _, errs, code := shoal(t, env, append([]string{"unpack"}, args...)...); code != 1 ||
			strings.Count(errs, "\n") != 1 {
			t.Errorf("%v: exit %d, %s", args, code, errs)
		}
	}
	for _, args := range [][]string{{set}, {"ftp://x/y", into}} {
		if _, errs, code := shoal(t, env, append([]string{"unpack"}, args...)...); code != 2 {
			t.Errorf("%v: exit %d, %s", args, code, errs)
		}
	}
}

// A set of recoded photographs is the same dataset through every door, and smaller.
func TestPackRecoded(t *testing.T) {
	if !jpeg.Available {
		t.Skip("no JPEG")
	}
	dir, paths := photographs(t, 130)
	write(t, filepath.Join(dir, "aqua/notes.txt"), []byte("no photograph"))
	write(t, filepath.Join(dir, "aqua/large.bin"), bytes.Repeat([]byte("large "), 900_000))
	paths = append(paths, "aqua/notes.txt", "aqua/large.bin")
	_, env := far(t, proxy.Options{Latency: 5 * time.Millisecond, Sigma: 0.3})
	source := bucket(t, dir)
	packed := newBucket(t, "-packed")
	set := "s3://" + packed + "/set"
	spool := t.TempDir()
	var plain, small struct {
		Version     string
		Bytes, Size int64
	}
	decode(t, mustShoal(t, env, "pack", source, "s3://"+packed+"/plain", "--shard-size", "1MiB", "--json"), &plain)
	decode(t, mustShoal(t, env, "pack", source, set, "--shard-size", "1MiB", "--recode", "--spool", spool,
		"--json"), &small)
	if small.Version != plain.Version || small.Bytes != plain.Bytes || small.Size > plain.Size*97/100 {
		t.Errorf("%+v, plain %+v", small, plain)
	}
	t.Logf("recoded %d bytes, plain %d", small.Size, plain.Size)
	if left, err := os.ReadDir(spool); err != nil || len(left) > 0 {
		t.Errorf("%v left in the spool, %v", left, err)
	}
	local := t.TempDir()
	download(t, packed, "set/", local)
	if got := slices.Sorted(
		slices.Values(slices.Concat(untar(t, "tar", t.TempDir(), tars(t, local))...))); !slices.Equal(got,
		slices.Sorted(slices.Values(paths))) {
		t.Errorf("tar lists %d members of %d", len(got), len(paths))
	}
	into := t.TempDir()
	mustShoal(t, env, "unpack", set, into)
	sameTree(t, into, dir, paths)

	whole := mount(t, env, set, "--kernel-cache", "off")
	sameTree(t, whole, dir, paths)
	umount(t, whole)
	// In the windowed order neighbours come in one GET; then from a warm cache, and through the shards of the source.
	cache := t.TempDir()
	windowed := mount(t, env, set, "--order", "windowed:seed=3,window=2", "--kernel-cache", "off", "--cache-dir", cache)
	readAll(t, windowed, dir,
		strings.Fields(mustShoal(t, nil, "order", "windowed:seed=3,window=2", "--mount", windowed, "--paths")))
	if gets := readStats(t, windowed).Gets; gets > int64(len(paths)/2) {
		t.Errorf("%d GETs for %d files in the windowed order", gets, len(paths))
	}
	umount(t, windowed)
	again := mount(t, env, set, "--cache-dir", cache)
	sameTree(t, again, dir, paths)
	if s := readStats(t, again); s.Dataset != plain.Version {
		t.Errorf("version %s, want %s", s.Dataset, plain.Version)
	}
	through := mount(t, env, source, "--shards", set, "--kernel-cache", "off")
	sameTree(t, through, dir, paths)
	addr, _ := serve(t, env, source)
	coded, _ := serve(t, env, set)
	asIs, _ := serve(t, env, set, "--recode", "on", "--cache-dir", t.TempDir())
	for _, flags := range [][]string{{"--transform", eyes, "--seed", "4"}, {}} {
		want := feed(t, addr, flags...).Digest
		for _, at := range []string{coded, asIs} {
			if got := feed(t, at, flags...).Digest; got != want {
				t.Errorf("feed %v at %s: digest %s, want %s", flags, at, got, want)
			}
		}
		if len(flags) > 0 {
			within(t, patience, "all photographs are kept as they came", func() bool {
				return readStats(t, asIs).Recoded.Files > 120
			})
			if s := readStats(t, asIs); s.Recoded.Restored > 0 {
				t.Errorf("%+v", s.Recoded)
			}
		}
	}
	door := endpoint(t, env, source, "--shards", set)
	client := s3Client(t, strings.TrimPrefix(door[len(door)-1], "AWS_ENDPOINT_URL=http://"))
	for _, p := range paths[len(paths)-20:] {
		if got := get(t, client, bucketName(t), "train/"+p); !bytes.Equal(got, content(t, filepath.Join(dir, p))) {
			t.Errorf("%s: other bytes through the endpoint", p)
		}
	}
	mustShoal(t, env, "warm", set, "--cache-dir", t.TempDir())
}

// killedWhenStuck runs a verb against a store that stops to answer after n requests of a kind, and kills it a while
// later. It reports whether the verb had ended before.
func killedWhenStuck(t testing.TB, p *proxy.Proxy, env []string, op proxy.Op, n int, later time.Duration,
	args ...string) (ended bool) {
	t.Helper()
	if err := p.Set(proxy.Options{
		Faults: []proxy.Fault{{Kind: proxy.Slow, Op: op, After: n, For: time.Hour}}}); err != nil {
		t.Fatal(err)
	}
	before := p.Stats().Faults[string(proxy.Slow)]
	cmd := exec.Command(shoalBin, args...)
	cmd.Env = append(os.Environ(), env...)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	within(t, 2*time.Minute, "it is stuck, or has ended", func() bool {
		return len(done) > 0 || p.Stats().Faults[string(proxy.Slow)] > before
	})
	time.Sleep(later)
	_ = cmd.Process.Kill()
	err := <-done
	if err != nil && cmd.ProcessState.ExitCode() >= 0 {
		t.Fatalf("%q: %v", args, err)
	}
	if err := p.Set(proxy.Options{}); err != nil {
		t.Fatal(err)
	}
	return err == nil
}

// A pack --recode that is killed while it learns, recodes and uploads is resumed: it reads no photograph again that is
// in the spool, keeps the shards that are there, and makes what one that was not killed makes.
func TestPackRecodedKilled(t *testing.T) {
	if !jpeg.Available {
		t.Skip("no JPEG")
	}
	dir, paths := photographs(t, 130)
	write(t, filepath.Join(dir, "aqua/notes.txt"), []byte("no photograph"))
	paths = append(paths, "aqua/notes.txt")
	p, env := far(t, proxy.Options{})
	source := bucket(t, dir)
	packed := newBucket(t, "-packed")
	spool := t.TempDir()
	args := func(set string) []string {
		return []string{"pack", source, "s3://" + packed + "/" + set, "--shard-size", "1MiB", "--recode",
			"--spool", spool, "--connections", "16"}
	}
	var want struct{ Version string }
	rng := rand.New(rand.NewPCG(uint64(time.Now().UnixNano()), 1))
	start := p.Stats()
	decode(t, mustShoal(t, env, append(args("whole"), "--json")...), &want)
	whole := p.Stats().Sub(start)
	for _, kill := range []struct {
		op    proxy.Op
		after int
	}{{proxy.OpGet, 30}, {proxy.OpGet, 64 + 40}, {proxy.OpGet, 40}, {proxy.OpPut, 1},
		{proxy.OpPut, int(whole.Puts) / 2}, {proxy.OpPut, int(whole.Puts) / 4}} {
		if killedWhenStuck(t, p, env, kill.op, kill.after, 0, args("killed")...) {
			t.Fatalf("it ended before its %s %d", kill.op, kill.after)
		}
		if kill.op == proxy.OpPut { // the machine goes down, too, and the spool was not on the disk yet
			spooled, err := filepath.Glob(filepath.Join(spool, "*", "[0t]*"))
			if err != nil || len(spooled) < len(paths) {
				t.Fatalf("%v, %v", spooled, err)
			}
			for _, f := range []string{spooled[0], spooled[1], spooled[len(spooled)-1]} {
				if err := os.Truncate(f, rng.Int64N(int64(len(content(t, f))))); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	start = p.Stats()
	said := mustShoal(t, env, args("killed")...)
	last := p.Stats().Sub(start)
	// The last requests of a killed pack may arrive after its end; then all is there.
	if !strings.Contains(said, "resumed: ") && !strings.Contains(said, "holds this set already") ||
		!strings.Contains(said, fmt.Sprintf("%d files", len(paths))) || !strings.Contains(said, want.Version[:12]) ||
		last.Gets > whole.Gets/2 {
		t.Errorf("%s with %d GETs, want version %s; a whole one takes %d", said, last.Gets, want.Version, whole.Gets)
	}
	if left, err := os.ReadDir(spool); err != nil || len(left) > 0 {
		t.Errorf("%v left in the spool, %v", left, err)
	}
	for u := range store(t).ListIncompleteUploads(context.Background(), packed, "", true) {
		t.Errorf("an upload of %s is left open, %v", u.Key, u.Err)
	}
	x, y := t.TempDir(), t.TempDir()
	download(t, packed, "whole/", x)
	download(t, packed, "killed/", y)
	if a, b := tars(t, x), tars(t, y); len(a) != len(b) {
		t.Errorf("a killed pack leaves %v, one that was not %v", b, a)
	}
	for _, f := range tars(t, x) {
		if !bytes.Equal(content(t, f), content(t, filepath.Join(y, filepath.Base(f)))) {
			t.Errorf("%s differs", filepath.Base(f))
		}
	}
	into := t.TempDir()
	mustShoal(t, env, "unpack", "s3://"+packed+"/killed", into)
	sameTree(t, into, dir, paths)
}

// An unpack that is killed again and again leaves whole files only, and is continued.
func TestUnpackKilled(t *testing.T) {
	dir, paths := tree(t, 4, 150, 24<<10)
	large := make([]byte, 20<<20) // in several pieces
	for i := range large {
		large[i] = byte(i >> 9 * i)
	}
	write(t, filepath.Join(dir, "class00/large.bin"), large)
	paths = append(paths, "class00/large.bin")
	p, env := far(t, proxy.Options{})
	set := "s3://" + newBucket(t, "-packed") + "/set"
	mustShoal(t, env, "pack", bucket(t, dir), set, "--shard-size", "1MiB")
	before := p.Stats()
	mustShoal(t, env, "unpack", set, t.TempDir())
	whole := int(p.Stats().Sub(before).Gets)
	rng := rand.New(rand.NewPCG(uint64(time.Now().UnixNano()), 1))
	into, kept := t.TempDir(), 0
	for i := range atMost(4, 20) {
		later := time.Duration(rng.IntN(20*(i+1))) * time.Millisecond // what is there has to be read first
		kept = 0
		if killedWhenStuck(t, p, env, proxy.OpGet, whole/2+rng.IntN(whole/2), later, "unpack", set, into) {
			into = t.TempDir()
			continue
		}
		for _, f := range paths {
			data, err := os.ReadFile(filepath.Join(into, f))
			if os.IsNotExist(err) {
				continue
			}
			if kept++; err != nil || !bytes.Equal(data, content(t, filepath.Join(dir, f))) {
				t.Errorf("%s: %d bytes after a kill, %v", f, len(data), err)
			}
		}
		t.Logf("%d of %d files are there", kept, len(paths))
	}
	var done struct{ Files, Kept int }
	decode(t, mustShoal(t, env, "unpack", set, into, "--json"), &done)
	if done.Files != len(paths) || done.Kept != kept {
		t.Errorf("%+v of %d files, %d of them kept", done, len(paths), kept)
	}
	sameTree(t, into, dir, paths)
}

// A set of recoded photographs is verified like any other. Where a member is damaged, each reader names the file, and
// all others can be read.
func TestDamagedRecoded(t *testing.T) {
	if !jpeg.Available {
		t.Skip("no JPEG")
	}
	dir, paths := photographs(t, 24)
	set := filepath.Join(t.TempDir(), "set")
	mustShoal(t, nil, "pack", "file://"+dir, "file://"+set, "--recode", "--spool", t.TempDir())
	verify := func() (string, int) {
		addr, _ := serve(t, nil, "file://"+set)
		out, errs, code := shoal(t, nil, "verify", addr, "--python", "/usr/bin/python3", "--batch", "12",
			"--batches", "2")
		return out + errs, code
	}
	if said, code := verify(); code != 0 || !strings.Contains(said, "24 of 24 rows equal") {
		t.Errorf("exit %d\n%s", code, said)
	}
	shard := filepath.Join(set, "shard-000000.tar")
	data := content(t, shard)
	was, err := os.Stat(shard)
	if err != nil {
		t.Fatal(err)
	}
	at := bytes.Index(data, []byte(paths[5]+"\x00")) + 512 // after its header
	data[at+2000] ^= 4
	write(t, shard, data)
	if err := os.Chtimes(shard, was.ModTime(), was.ModTime()); err != nil { // it keeps its ETag
		t.Fatal(err)
	}
	if said, code := verify(); code != 2 || !strings.Contains(said, "("+paths[5]+")") {
		t.Errorf("damaged: exit %d\n%s", code, said)
	}
	if _, errs, code := shoal(t, nil, "unpack", "file://"+set, t.TempDir()); code != 1 ||
		!strings.Contains(errs, "unpack: "+paths[5]+": ") {
		t.Errorf("damaged: exit %d\n%s", code, errs)
	}
	mnt := mount(t, nil, "file://"+set)
	if _, err := os.ReadFile(filepath.Join(mnt, paths[5])); !errors.Is(err, syscall.EIO) {
		t.Errorf("damaged: %v", err)
	}
	readAll(t, mnt, dir, slices.Delete(paths, 5, 6))
}
