//go:build killpoints

package cache

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// TestKillRecoding kills a process that recodes at each point that it passes, at the first, second, fifth and twentieth
// passing. What was kept is kept then, in either form, and read without a request.
func TestKillRecoding(t *testing.T) {
	const env = "CACHE_KILL_ROOT"
	if root := os.Getenv(env); root != "" {
		f := newCodedIn(t, root, 40, 60<<10)
		f.recode()
		closeCache(t, f.c)
		return
	}
	run := func(root, point, log string) (died bool) {
		cmd := exec.Command(os.Args[0], "-test.run=^TestKillRecoding$")
		cmd.Env = append(os.Environ(), env+"="+root, "SHOAL_KILLPOINT="+point, "SHOAL_KILLPOINTS_LOG="+log)
		out, err := cmd.CombinedOutput()
		var exit *exec.ExitError
		if errors.As(err, &exit) && exit.Sys().(syscall.WaitStatus).Signal() == syscall.SIGKILL {
			return true
		}
		if err != nil {
			t.Fatalf("%s: %v\n%s", point, err, out)
		}
		return false
	}
	fill := func(root string) {
		f := newCodedIn(t, root, 40, 60<<10)
		f.fill()
		closeCache(t, f.c)
	}
	log := filepath.Join(t.TempDir(), "log")
	root := t.TempDir()
	fill(root)
	run(root, "", log)
	b, err := os.ReadFile(log)
	if err != nil {
		t.Fatal(err)
	}
	passed := map[string]int{}
	for point := range strings.Lines(string(b)) {
		passed[strings.TrimSpace(point)]++
	}
	for _, point := range []string{"cache.recode.appended", "cache.recode.moved", "segment.condense.copied",
		"segment.drop.file"} {
		if passed[point] == 0 {
			t.Errorf("%s is not passed: %v", point, passed)
		}
	}
	died := 0
	for point, times := range passed {
		for _, n := range []int{1, 2, 5, 20} {
			if n > times {
				continue
			}
			root := t.TempDir()
			fill(root)
			if run(root, fmt.Sprintf("%s:%d", point, n), os.DevNull) {
				died++
			}
			f := newCodedIn(t, root, 40, 60<<10)
			f.readAll(f.v)
			if s := f.v.Stats(); f.gets() != 0 || s.Kept != 40 || s.Corrupt != 0 {
				t.Errorf("%s:%d: %d requests, %+v", point, n, f.gets(), s)
			}
			f.recode()
			f.readAll(f.v)
			if s := f.v.Stats(); f.gets() != 0 || s.Coded != 32 {
				t.Errorf("%s:%d: then %d requests, %+v", point, n, f.gets(), s)
			}
			closeCache(t, f.c)
		}
	}
	t.Logf("%d died", died)
	if died < len(passed) {
		t.Errorf("only %d died", died)
	}
}
