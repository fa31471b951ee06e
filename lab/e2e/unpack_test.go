package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

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
