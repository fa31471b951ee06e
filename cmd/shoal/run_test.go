package main

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
)

// The command finds its modules where it does without Shoal. A last folder that is empty is the current one.
func TestRunHandsOnThePath(t *testing.T) {
	for own, want := range map[string]string{"": "/c/shoal/_site", "/x": "/c/shoal/_site:/x",
		"/x:": "/c/shoal/_site:/x:", ":": "/c/shoal/_site::"} {
		t.Setenv("PYTHONPATH", own)
		if env := withHints(nil, "/c", "", false); !slices.Contains(env, "PYTHONPATH="+want) {
			t.Errorf("%q: %q", own, env)
		}
	}
}

// It runs what a shell runs: a script that names no interpreter, in a PATH with the current folder. Where PYTHONPATH
// cannot name the client's folder it says so.
func TestRunRunsWhatAShellRuns(t *testing.T) {
	s := newShell(t)
	if err := os.Chmod(s.write("script", "echo $0 $1 $PYTHONPATH; exit 7\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	env := []string{"PATH=.:" + os.Getenv("PATH"), "XDG_CACHE_HOME=" + s.path("a:b")}
	out, errs, code := s.run(env, "run", "script", "x")
	if out != "script x\n" || code != 7 || !strings.Contains(errs, "a folder without a colon") {
		t.Errorf("%q, %q, exit code %d", out, errs, code)
	}
}

// A signal that comes before the command has begun is not lost to it.
func TestRunHeedsASignalBefore(t *testing.T) {
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	c := root()
	c.SetArgs([]string{"run", "--", "false"}) // which would take this process's place
	if err := c.ExecuteContext(ctx); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// A signal ends an order at once, wherever it is: while nobody reads what it has printed, too.
func TestASignalEndsAnOrder(t *testing.T) {
	cmd := newShell(t).command(nil, "order", "uniform:seed=1", "--n=4000000000")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Process.Kill() }()
	if _, err := out.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	state, err := cmd.Process.Wait()
	if err != nil || state.Sys().(syscall.WaitStatus).Signal() != syscall.SIGTERM {
		t.Errorf("%v, %v", state, err)
	}
}

// What is wrong on a command line that asks for JSON is said in JSON, too.
func TestWrongUseInJSON(t *testing.T) {
	s := newShell(t)
	for _, wrong := range []string{"--order=none-such", "--nonesuch", "--memory=x", "one-too-many"} {
		_, errs, code := s.run(nil, "mount", "file:///none", "m", "--log-level=info,json", wrong)
		var said struct{ Level, Msg string }
		if err := json.Unmarshal([]byte(errs), &said); err != nil || code != 2 || said.Level != "ERROR" {
			t.Errorf("%s: exit code %d, %s", wrong, code, errs)
		}
	}
}
