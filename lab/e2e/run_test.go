package e2e

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/shoalfs/shoal/lab/rig/proxy"
)

// `shoal run` is the command that it runs: its exit code, its signals, its input and output.
func TestRunIsItsCommand(t *testing.T) {
	env := []string{"XDG_CACHE_HOME=" + t.TempDir()}
	plain := filepath.Join(t.TempDir(), "plain")
	write(t, plain, nil)
	for _, c := range []struct {
		args []string
		code int
		text string // on standard error
	}{
		{[]string{"--", "sh", "-c", "exit 7"}, 7, ""},
		{[]string{"sh", "-c", "exit 0", "--name"}, 0, ""},
		{[]string{"--", "no-such-command"}, 127,
			"shoal: run no-such-command: executable file not found in $PATH (check the name, or give its path)\n"},
		{[]string{"--", plain}, 126, "permission denied"},
		{nil, 2, "COMMAND is missing"},
		{[]string{"--nam", "x", "true"}, 2, "did you mean --name?"},
	} {
		if _, errs, code := shoal(t, env, append([]string{"run"}, c.args...)...); code != c.code ||
			!strings.Contains(errs, c.text) || c.text == "" && errs != "" {
			t.Errorf("run %q: exit %d, want %d\n%s", c.args, code, c.code, errs)
		}
	}
	cat := exec.Command(shoalBin, "run", "cat")
	cat.Stdin = strings.NewReader("hello")
	cat.Env = append(os.Environ(), env...)
	if out, err := cat.Output(); err != nil || string(out) != "hello" {
		t.Errorf("cat: %q, %v", out, err)
	}
	for _, s := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGUSR1} {
		var out bytes.Buffer
		sleep := exec.Command(shoalBin, "run", "sh", "-c", "echo $$; exec sleep 60")
		sleep.Env, sleep.Stdout = append(os.Environ(), env...), &out
		if err := sleep.Start(); err != nil {
			t.Fatal(err)
		}
		within(t, patience, "it sleeps", func() bool {
			comm, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", sleep.Process.Pid))
			return string(comm) == "sleep\n"
		})
		if err := sleep.Process.Signal(s); err != nil {
			t.Error(err)
		}
		_ = sleep.Wait()
		if got := sleep.ProcessState.Sys().(syscall.WaitStatus); !got.Signaled() || got.Signal() != s ||
			out.String() != fmt.Sprintln(sleep.Process.Pid) {
			t.Errorf("%v: %v, of process %q", s, sleep.ProcessState, out.String())
		}
	}
}

// A trainer that knows nothing of Shoal, with weights and workers, which no inference finds: the mount follows its
// order.
func TestRunHints(t *testing.T) {
	dir, paths := pictures(t, 8, 32)
	_, env := far(t, proxy.Options{Latency: 20 * time.Millisecond})
	mnt := mount(t, env, bucket(t, dir), "--kernel-cache", "off", "--memory", "128MiB", "--cache-size", "32MiB")
	cmd := exec.Command(shoalBin, "run", "-v", "--name", "job", "--", "/usr/bin/python3", "-B", "-c", `
import os, sys, torch
from torch.utils.data import DataLoader, Subset, WeightedRandomSampler
from torchvision import datasets, transforms as T
sys.modules["_shoal_run"].WAIT = 600  # for a machine that stands still
train = datasets.ImageFolder(sys.argv[1], T.Compose([T.CenterCrop(64), T.ToTensor()]))
val = Subset(train, range(0, len(train), 4))
loader = DataLoader(train, 16, sampler=WeightedRandomSampler([1.0 + i % 5 for i in range(len(train))], len(train)), num_workers=2)
for epoch in range(3):
    for x, y in loader:
        pass
    for x, y in DataLoader(val, 16, num_workers=1):
        pass
os.system("cat %s/.shoal/stats" % sys.argv[1])
`, mnt)
	var errs bytes.Buffer
	cmd.Env, cmd.Stderr = append(os.Environ(), "XDG_CACHE_HOME="+t.TempDir()), &errs
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v\n%s", err, errs.String())
	}
	if want := fmt.Sprintf("shoal run: told %s the order of %d files, as plan job, in",
		mnt, len(paths)); !strings.Contains(errs.String(), want) || strings.Count(errs.String(), "\n") != 2 {
		t.Errorf("%s", errs.String())
	}
	st := streamsIn(t, out)
	train, val := st["plans/job"], st["plans/job-2"]
	if train.Len != len(paths) || train.Epoch != 2 || train.Events["jumps"] != 0 || val.Len != len(paths)/4 ||
		val.Epoch != 2 {
		t.Errorf("train %+v\nval %+v", train, val)
	}
	s := readStats(t, mnt)
	t.Logf("%d opens, %d reads, %d misses, %d joined", s.Opens, s.Reads, s.Misses, s.Joined)
	if s.Misses > s.Reads/10 {
		t.Errorf("%d of %d reads were for what nobody had asked for yet", s.Misses, s.Reads)
	}
	if plans, err := os.ReadDir(mnt + "/.shoal/plans"); err != nil || len(plans) != 0 {
		t.Errorf("plans after the end: %v, %v", plans, err)
	}
	if text := orderSays(t, mnt); s.Order.State != "ended" ||
		!strings.Contains(text, fmt.Sprintf("plan job ended in epoch 2: %d of %d read", train.Len, train.Len)) {
		t.Errorf("after the end the order is %q:\n%s", s.Order.State, text)
	}
}
