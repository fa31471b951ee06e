package e2e

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shoalfs/shoal/gpuingest/jpeg"
	"github.com/shoalfs/shoal/lab/rig/proxy"
)

// A set in S3 is unpacked: the tree, its bytes and times; again, what is there is kept; another file is never overwritten.
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
	if _, errs, code := shoal(t, env, "unpack", set, into); code != 1 || !strings.Contains(errs, paths[9]) || !strings.Contains(errs, "another folder") {
		t.Errorf("another file: exit %d, %s", code, errs)
	}
	if data, err := os.ReadFile(filepath.Join(into, paths[9])); err != nil || string(data) != "mine" {
		t.Errorf("it holds %q, %v", data, err)
	}
	for _, args := range [][]string{{source, into}, {"s3://nosuchbucket-unpack/set", into}} {
		if _, errs, code := shoal(t, env, append([]string{"unpack"}, args...)...); code != 1 || strings.Count(errs, "\n") != 1 {
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
	decode(t, mustShoal(t, env, "pack", source, set, "--shard-size", "1MiB", "--recode", "--spool", spool, "--json"), &small)
	if small.Version != plain.Version || small.Bytes != plain.Bytes || small.Size > plain.Size*97/100 {
		t.Errorf("%+v, plain %+v", small, plain)
	}
	t.Logf("recoded %d bytes, plain %d", small.Size, plain.Size)
	if left, err := os.ReadDir(spool); err != nil || len(left) > 0 {
		t.Errorf("%v left in the spool, %v", left, err)
	}
	local := t.TempDir()
	download(t, packed, "set/", local)
	if got := slices.Sorted(slices.Values(slices.Concat(untar(t, "tar", t.TempDir(), tars(t, local))...))); !slices.Equal(got, slices.Sorted(slices.Values(paths))) {
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
	readAll(t, windowed, dir, strings.Fields(mustShoal(t, nil, "order", "windowed:seed=3,window=2", "--mount", windowed, "--paths")))
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
	for _, flags := range [][]string{{"--transform", eyes, "--seed", "4"}, {}} {
		if want, got := feed(t, addr, flags...).Digest, feed(t, coded, flags...).Digest; got != want {
			t.Errorf("feed %v: digest %s, want %s", flags, got, want)
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
