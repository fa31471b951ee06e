//go:build killpoints

package shard

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/objstore"
)

// packInto packs DIR/src, a local folder, into DIR/out.
func packInto(dir string) error {
	ctx := context.Background()
	d, err := objstore.NewDir(dir)
	if err != nil {
		return err
	}
	m, err := catalog.Build(d.List(ctx, "src/", ""), catalog.BuildOptions{Prefix: "src/"})
	if err != nil {
		return err
	}
	o := small(1)
	o.partSize, o.ShardSize = 1<<20, 20<<10
	_, err = Pack(ctx, m, d, d, "out/", o)
	return err
}

// A pack that is killed by kill -9 at each of its points, at the first and at later passings, is
// finished by the next one, and leaves what an undisturbed one leaves.
func TestKilledPack(t *testing.T) {
	if dir := os.Getenv("SHOAL_TEST_PACK"); dir != "" {
		if err := packInto(dir); err != nil {
			t.Fatal(err)
		}
		return
	}
	run := func(dir string, env ...string) error {
		c := exec.Command(os.Args[0], "-test.run=^TestKilledPack$")
		c.Env = append(append(os.Environ(), "SHOAL_TEST_PACK="+dir), env...)
		out, err := c.CombinedOutput()
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	}
	dir := t.TempDir()
	for p, n := range manyFiles(12) {
		name := filepath.Join(dir, "src", p)
		if err := os.MkdirAll(filepath.Dir(name), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, bytesOf(uint64(len(p)+n), n), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	// contents maps names to bytes; an index and the manifest hold ETags, which are times here.
	contents := func() map[string]string {
		found := make(map[string]string)
		entries, err := os.ReadDir(filepath.Join(dir, "out"))
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			b := []byte(nil)
			if strings.HasSuffix(e.Name(), ".tar") {
				if b, err = os.ReadFile(filepath.Join(dir, "out", e.Name())); err != nil {
					t.Fatal(err)
				}
			}
			found[e.Name()] = string(b)
		}
		return found
	}
	log := filepath.Join(t.TempDir(), "log")
	if err := run(dir, "SHOAL_KILLPOINTS_LOG="+log); err != nil {
		t.Fatal(err)
	}
	want := contents()
	text, err := os.ReadFile(log)
	if err != nil {
		t.Fatal(err)
	}
	passed := make(map[string]int)
	for p := range strings.FieldsSeq(string(text)) {
		passed[p]++
	}
	if len(passed) < 10 {
		t.Fatalf("points %v", passed)
	}
	kills, deleted := 0, 0
	for p, n := range passed {
		for at := 1; at <= min(n, 3); at++ {
			if err := os.RemoveAll(filepath.Join(dir, "out")); err != nil {
				t.Fatal(err)
			}
			err := run(dir, fmt.Sprintf("SHOAL_KILLPOINT=%s:%d", p, at))
			var exit *exec.ExitError
			if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
				t.Fatalf("%s:%d: not killed: %v", p, at, err)
			}
			kills++
			// The next run dies, too, if it has a stale shard to delete.
			if err := run(dir, "SHOAL_KILLPOINT=shard.pack.deleted:1"); err != nil {
				if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
					t.Fatalf("after %s:%d: %v", p, at, err)
				}
				deleted++
			}
			if err := run(dir); err != nil {
				t.Fatalf("after %s:%d: %v", p, at, err)
			}
			got := contents()
			for name, b := range want {
				if g, ok := got[name]; !ok || g != b {
					t.Errorf("after %s:%d: %s is missing or differs", p, at, name)
				}
			}
			if len(got) != len(want) {
				t.Errorf("after %s:%d: %d objects, want %d", p, at, len(got), len(want))
			}
		}
	}
	if deleted == 0 {
		t.Error("no run died after it had deleted a stale shard")
	}
	t.Logf("%d kills at %d points", kills+deleted, len(passed)+1)
}
