package fusefs

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

func (c *child) plan(name string) string {
	c.t.Helper()
	b, err := os.ReadFile(c.path(".shoal", name))
	if err != nil {
		c.t.Errorf("plan: %v", err)
	}
	return string(b)
}

func (c *child) sh(script string) (string, error) {
	cmd := exec.Command("sh", "-c", script)
	cmd.Dir = c.dir
	out, err := cmd.CombinedOutput()
	return string(out), err
}

func TestControlFolderIsHidden(t *testing.T) {
	c := mountChild(t, "tree")
	entries, err := os.ReadDir(c.dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if e.Name() == ".shoal" {
			t.Error(".shoal is listed")
		}
	}
	entries, err = os.ReadDir(c.path(".shoal"))
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	if err != nil || !slices.Equal(names, []string{"order", "plan", "plans", "refresh", "stats"}) {
		t.Errorf("in .shoal: %v, %v", names, err)
	}
	out, err := c.sh("ls -la .shoal .shoal/plans && find .shoal && wc -c < .shoal/stats")
	if err != nil || !strings.HasSuffix(out, "\n10031\n") {
		t.Errorf("%v: %s", err, out)
	}
}

func TestStatsIsReadInEveryWay(t *testing.T) {
	c := mountChild(t, "tree")
	want := "{\"installs\": 0, \"padding\": \"" + strings.Repeat("x", 10_000) + "\"}\n"
	for _, script := range []string{
		"cat .shoal/stats",
		"dd if=.shoal/stats bs=7 status=none",
		"cp .shoal/stats /dev/stdout",
		"/usr/bin/python3 -c 'import sys; sys.stdout.write(open(\".shoal/stats\").read())'",
		"/usr/bin/python3 -c 'import json; print(json.dumps(json.load(open(\".shoal/stats\"))))'",
		"/usr/bin/python3 -c 'import os, sys; fd = os.open(\".shoal/stats\", os.O_RDONLY); " +
			"sys.stdout.write((os.pread(fd, 100, 0) + os.pread(fd, 100000, 100)).decode())'",
	} {
		if out, err := c.sh(script); err != nil || out != want {
			t.Errorf("%s: %v, %d bytes", script, err, len(out))
		}
	}

	// A handle shows one moment, another one the next.
	f, err := os.Open(c.path(".shoal/stats"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if out, err := c.sh("printf 'README.md\\n' > .shoal/plan"); err != nil {
		t.Fatal(err, out)
	}
	if got, err := io.ReadAll(f); err != nil || string(got) != want {
		t.Errorf("old handle: %v", err)
	}
	if out, _ := c.sh("cat .shoal/stats"); !strings.Contains(out, `"installs": 1`) {
		t.Errorf("new handle: %.30s", out)
	}
}

func TestPlanByShell(t *testing.T) {
	c := mountChild(t, "tree")
	if got := c.plan("plan"); got != "" {
		t.Errorf("before any: %q", got)
	}
	for _, tc := range []struct {
		name, script string
		plan         string // what is in force afterwards
		installs     int    // how many plans were put in force
	}{
		{"printf", `printf 'README.md\nempty\n' > .shoal/plan`, "README.md\nempty\n", 1},
		{"the other name", `cat .shoal/plans/default > /dev/null; printf 'empty\n' > .shoal/plans/default`,
			"empty\n", 1},
		{"append", `printf 'README.md\n' >> .shoal/plan`, "empty\nREADME.md\n", 1},
		{"several commands", `{ printf 'empty\n'; /bin/echo README.md; } > .shoal/plan`, "empty\nREADME.md\n", -1},
		{"several commands append", `{ /bin/echo README.md; /bin/echo empty; } >> .shoal/plan`,
			"empty\nREADME.md\nREADME.md\nempty\n", 2},
		{"touch", `touch .shoal/plan`, "empty\nREADME.md\nREADME.md\nempty\n", 0},
		{"bad line", `printf 'empty\nnope\n' > .shoal/plan`, "empty\nREADME.md\nREADME.md\nempty\n", 0},
		{"a folder is no file", `printf 'many\n' > .shoal/plan`, "empty\nREADME.md\nREADME.md\nempty\n", 0},
		{"bad append", `printf 'nope\n' >> .shoal/plan`, "empty\nREADME.md\nREADME.md\nempty\n", 0},
		{"find, large", `find many -type f > .shoal/plan`, "", 1},
		{"cp -p", `printf 'empty\n' > "$TMPDIR/p"; chmod 600 "$TMPDIR/p"; cp -p "$TMPDIR/p" .shoal/plan`, "empty\n", 1},
		{"shutil.copy2", `printf 'README.md\n' > "$TMPDIR/p"; /usr/bin/python3 -c 'import os, shutil; shutil.copy2(os.environ["TMPDIR"] + "/p", ".shoal/plan")'`, "README.md\n", 1},
		{"cp", `printf 'class a/one.jpg' > "$TMPDIR/p"; cp "$TMPDIR/p" .shoal/plan`, "class a/one.jpg", 1},
		{"append after a missing newline", `echo empty >> .shoal/plan`, "class a/one.jpg\nempty\n", 1},
		{"tee", `echo README.md | tee .shoal/plan > /dev/null`, "README.md\n", 1},
		{"dd", `yes README.md | head -n 200000 | dd of=.shoal/plan bs=1M iflag=fullblock status=none`,
			strings.Repeat("README.md\n", 200000), 1},
		{"mv", `echo empty > .shoal/plans/next && mv .shoal/plans/next .shoal/plans/default`, "empty\n", 2},
		{"mv -n", `echo README.md > .shoal/plans/next; mv -n .shoal/plans/next .shoal/plans/default; rm .shoal/plans/next`, "empty\n", 1},
		{"mv of none is bad", `mv .shoal/plans/none .shoal/plans/default`, "empty\n", 0},
		{"mv to the other name", `echo README.md > .shoal/plans/next; mv .shoal/plans/next .shoal/plan`,
			"README.md\n", 2},
		{"mv out of the plans is bad", `mv -T .shoal/plans/default .shoal/refresh`, "README.md\n", -1},
		{"mv of another's name is bad", `mv .shoal/plans/default .shoal/plans/.x`, "README.md\n", -1},
		{"sed -i", `printf 'empty\nREADME.md\n' > .shoal/plan; sed -i 1d .shoal/plans/default`, "README.md\n", 3},
		{"again", `yes README.md | head -n 200000 > .shoal/plan`, strings.Repeat("README.md\n", 200000), 1},
		{"sed to another name", `sed -n 1,3p .shoal/plan > .shoal/plans/rank0`,
			strings.Repeat("README.md\n", 200000), 1},
	} {
		t.Setenv("TMPDIR", t.TempDir())
		before := c.report().Installs
		out, err := c.sh(tc.script)
		if err != nil && !strings.Contains(tc.name, "bad") && tc.name != "a folder is no file" {
			t.Errorf("%s: %v %s", tc.name, err, out)
		}
		if got := c.plan("plan"); got != tc.plan && tc.plan != "" {
			t.Errorf("%s: the plan is %.80q, want %.80q", tc.name, got, tc.plan)
		}
		if got := c.report().Installs - before; got != tc.installs && tc.installs >= 0 {
			t.Errorf("%s: %d installs, want %d", tc.name, got, tc.installs)
		}
	}
	if got := c.plan("plans/rank0"); got != "README.md\nREADME.md\nREADME.md\n" {
		t.Errorf("rank0: %q", got)
	}
	if out, err := c.sh("ls .shoal/plans"); err != nil || out != "default\nrank0\n" {
		t.Errorf("plans: %q, %v", out, err)
	}
	if fi, err := os.Stat(c.path(".shoal/plans/rank0")); err != nil || fi.Size() != 30 || fi.Mode() != 0o666 {
		t.Errorf("%v, %v", fi, err)
	}
	if out, _ := c.sh("cat .shoal/order"); !strings.Contains(out, `line 5: "nope"`) {
		t.Errorf("the order file names no line: %s", out)
	}
	c.eventually("nothing is reserved any more", func(r report) bool { return r.Memory == 0 }) // with the last RELEASE
}

// Close tells the result, as a program that looks at it sees it.
func TestPlanByProgram(t *testing.T) {
	c := mountChild(t, "tree")
	write := func(flags int, pieces ...string) error {
		f, err := os.OpenFile(c.path(".shoal/plan"), flags, 0o666)
		if err != nil {
			return err
		}
		for _, p := range pieces {
			if _, err := f.WriteString(p); err != nil {
				f.Close()
				return err
			}
		}
		return f.Close()
	}
	const create = os.O_WRONLY | os.O_CREATE | os.O_TRUNC
	check := func(what string, err, wantErr error, plan string) {
		t.Helper()
		if !errors.Is(err, wantErr) {
			t.Errorf("%s: %v, want %v", what, err, wantErr)
		}
		if got := c.plan("plan"); got != plan {
			t.Errorf("%s: the plan is %q, want %q", what, got, plan)
		}
	}
	check("in pieces", write(create, "REA", "DME.md", "\nemp", "ty"), nil, "README.md\nempty")
	check("bad", write(create, "nope\n"), unix.EINVAL, "README.md\nempty")
	check("append", write(os.O_WRONLY|os.O_APPEND, "empty\n"), nil, "README.md\nempty\nempty\n")
	check("written at the start", write(os.O_WRONLY, "empty\n#"), unix.EINVAL, "README.md\nempty\nempty\n")
	check("truncated and appended", write(create|os.O_APPEND, "empty\n", "empty\n"), nil, "empty\nempty\n")

	out, err := c.sh(`/usr/bin/python3 -c '
try:
    with open(".shoal/plan", "w") as f:
        f.write("nope\n")
except OSError as e:
    print("errno", e.errno)
with open(".shoal/plan", "w") as f:
    print("README.md", file=f)
with open(".shoal/plan", "a") as f:
    print("empty", file=f)
with open(".shoal/plan", "r+") as f:
    f.seek(0, 2)
    f.write("b/63k\n")
print(open(".shoal/plan").read(), end="")
'`)
	if err != nil || out != "errno 22\nREADME.md\nempty\nb/63k\n" {
		t.Errorf("python: %v\n%s", err, out)
	}

	f, err := os.OpenFile(c.path(".shoal/plan"), create, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt([]byte("x"), 10); !errors.Is(err, unix.EINVAL) {
		t.Errorf("a hole: %v", err)
	}
	if _, err := f.WriteAt([]byte("x"), maxPlanBytes); !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.EFBIG) {
		t.Errorf("too big: %v", err)
	}
	if err := f.Truncate(100); !errors.Is(err, unix.EINVAL) {
		t.Errorf("lengthened by truncate: %v", err)
	}
	if _, err := f.WriteString("empty\nnope\n"); err != nil {
		t.Fatal(err)
	}
	if err := f.Sync(); !errors.Is(err, unix.EINVAL) {
		t.Errorf("sync of a bad plan: %v", err)
	}
	if err := f.Truncate(6); err != nil {
		t.Error(err)
	}
	if err := f.Sync(); err != nil {
		t.Errorf("sync: %v", err)
	}
	if got := c.plan("plan"); got != "empty\n" {
		t.Errorf("after sync: %q", got)
	}
	c.do("limit")
	if _, err := f.WriteAt([]byte(strings.Repeat("README.md\n", 1000)), 6); !errors.Is(err, unix.ENOMEM) {
		t.Errorf("over the memory limit: %v", err)
	}
}

// A plan is withdrawn by rm, and by writing nothing in its place; not by the FLUSH that a shell sends before it
// writes. The latter takes effect with the last descriptor's RELEASE, for which no caller waits.
func TestPlanWithdrawn(t *testing.T) {
	c := mountChild(t, "tree")
	for _, script := range []string{
		`: > .shoal/plan`,
		`truncate -s 0 .shoal/plan`,
		`cp /dev/null .shoal/plan`,
		`/usr/bin/python3 -c 'open(".shoal/plan", "w").close()'`,
		`rm .shoal/plan`,
		`rm .shoal/plans/default`,
	} {
		if out, err := c.sh(`printf 'README.md\nempty\n' > .shoal/plan; printf 'empty\n' > .shoal/plans/r; ` +
			script); err != nil {
			t.Errorf("%s: %v %s", script, err, out)
		}
		c.eventually(script, func(report) bool {
			_, err := os.Stat(c.path(".shoal/plans/default"))
			return c.plan("plan") == "" && err == nil
		})
		if out, err := c.sh("ls .shoal/plans"); err != nil || out != "r\n" {
			t.Errorf("%s: plans: %q, %v", script, out, err)
		}
	}
	if err := os.Remove(c.path(".shoal/plans/r")); err != nil {
		t.Error(err)
	}
	for name, want := range map[string]error{".shoal/plans/r": fs.ErrNotExist, ".shoal/plan": fs.ErrNotExist,
		".shoal/order": unix.EROFS, "README.md": unix.EROFS} {
		if err := os.Remove(c.path(name)); !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", name, err, want)
		}
	}
	if _, err := c.sh(`printf 'empty\n' > .shoal/plans/r`); err != nil || c.plan("plans/r") != "empty\n" {
		t.Errorf("a plan of the name of one that was removed: %v", err)
	}
}

func TestPlanNames(t *testing.T) {
	c := mountChild(t, "tree")
	if _, err := os.Stat(c.path(".shoal/plans/r1")); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
	f, err := os.OpenFile(c.path(".shoal/plans/r1"), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.Stat(); err != nil {
		t.Errorf("stat before it is installed: %v", err)
	}
	if _, err := f.WriteString("empty\n"); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(c.path(".shoal/plans/r1")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("there before it is installed: %v", err)
	}
	if err := f.Close(); err != nil {
		t.Error(err)
	}
	if got := c.plan("plans/r1"); got != "empty\n" {
		t.Errorf("%q", got)
	}
	if _, err := os.OpenFile(c.path(".shoal/plans/r1"), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600); !errors.Is(err,
		fs.ErrExist) {
		t.Error(err)
	}
	if _, err := os.OpenFile(c.path(".shoal/plans/"+strings.Repeat("n", 256)), os.O_RDWR|os.O_CREATE,
		0o600); !errors.Is(err, unix.ENAMETOOLONG) {
		t.Error(err)
	}
}

// With --allow-other the kernel checks modes: another user may read, and plan.
func TestOtherUsers(t *testing.T) {
	for _, tc := range []struct {
		other   bool
		mayRead bool
		mayPlan bool
	}{
		{false, false, false},
		{true, true, true},
	} {
		c := mountChild(t, "tree", func(s *spec) { s.Options.AllowOther = tc.other })
		for dir := c.dir; dir != "/tmp" && dir != "/"; dir = parentOf(dir) {
			if fi, err := os.Stat(dir); err == nil && dir != c.dir {
				os.Chmod(dir, fi.Mode()|0o055)
			}
		}
		as := func(script string) error {
			cmd := exec.Command("sh", "-c", script)
			cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
			cmd.Env = append(os.Environ(), "M="+c.dir)
			return cmd.Run()
		}
		if err := as(`cat "$M/README.md"`); (err == nil) != tc.mayRead {
			t.Errorf("%+v: read: %v", tc, err)
		}
		if err := as(`printf 'empty\n' > "$M/.shoal/plan"`); (err == nil) != tc.mayPlan {
			t.Errorf("%+v: plan: %v", tc, err)
		}
		if err := as(`printf 'empty\n' > "$M/.shoal/plans/r"`); (err == nil) != tc.mayPlan {
			t.Errorf("%+v: new plan: %v", tc, err)
		}
		if err := as(`echo > "$M/.shoal/refresh"`); err == nil {
			t.Errorf("%+v: anybody may refresh", tc)
		}
		c.finish()
	}
}

func parentOf(path string) string { return path[:max(strings.LastIndexByte(path, '/'), 1)] }
