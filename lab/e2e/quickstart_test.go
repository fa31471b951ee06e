package e2e

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/shoalfs/shoal/lab/rig/proxy"
)

// The trainer that quickstart prints runs as it says: on a mount if FUSE is available, with the order passed on; on a
// feed if this user cannot mount. The commands that it names end it and leave nothing.
func TestQuickstart(t *testing.T) {
	dir, _ := pictures(t, 2, 40)
	_, env := far(t, proxy.Options{})
	source := bucket(t, dir)
	for _, mounts := range []bool{true, false} {
		home := filepath.Join(t.TempDir(), "it's a home") // which shells would split
		if err := os.Mkdir(home, 0o777); err != nil {
			t.Fatal(err)
		}
		for d := home; d != os.TempDir() && d != "/"; d = filepath.Dir(d) { // for the other user
			if err := os.Chmod(d, 0o777); err != nil {
				t.Fatal(err)
			}
		}
		cmd := exec.Command(shoalBin, "quickstart", source)
		cmd.Env = append(append(os.Environ(), env...), "HOME="+home, "XDG_CACHE_HOME="+home+"/.cache")
		if !mounts {
			data, err := os.ReadFile(shoalBin)
			if err != nil {
				t.Fatal(err)
			}
			// where that user may run it
			if cmd.Path = filepath.Join(home, "program"); os.WriteFile(cmd.Path, data, 0o755) != nil {
				t.Fatal(cmd.Path)
			}
			cmd.Env = append(cmd.Env, "PATH=/nowhere")
			cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
			cmd.Dir = home
		}
		text, err := cmd.CombinedOutput()
		out := string(text)
		if err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		if want := map[bool]string{true: "yes: a mount", false: ": a feed"}[mounts]; !strings.Contains(out, want) ||
			!strings.Contains(out, "credentials  a key pair, env AWS_ACCESS_KEY_ID") {
			t.Errorf("it does not say %q and whose credentials it has:\n%s", want, out)
		}
		_, code, _ := strings.Cut(out, "Save as train.py:\n\n")
		code, rest, _ := strings.Cut(code, "\nRun it:      ")
		train := filepath.Join(t.TempDir(), "train.py")
		if err := os.WriteFile(train, []byte(code), 0o644); err != nil {
			t.Fatal(err)
		}
		line := func(name string) string {
			_, line, _ := strings.Cut("Run it:      "+rest, name)
			line, _, _ = strings.Cut(line, "\n")
			return strings.TrimSpace(line)
		}
		sh := func(line string) string {
			p := exec.Command("sh", "-c", line)
			p.Dir = filepath.Dir(train)
			p.Env = append(os.Environ(), "PATH="+filepath.Dir(shoalBin)+":/usr/bin:"+os.Getenv("PATH"),
				"XDG_CACHE_HOME="+t.TempDir())
			said, err := p.CombinedOutput()
			if err != nil {
				t.Errorf("%s: %v\n%s\n%s", line, err, code, said)
			}
			return string(said)
		}
		if said := sh(line("Run it:")); !strings.HasPrefix(lastLine(said), "epoch 1 ") {
			t.Errorf("%s\n%s", code, said)
		}
		look, _, _ := strings.Cut(line("Look at it:"), ",")
		if said := sh(look); mounts && !strings.Contains(said, "order      plan, ended with its trainer") {
			t.Errorf("the order was not passed on:\n%s", said)
		}
		sh(line("End it:"))
		sh(line("Remove it:"))
		for _, dir := range []string{home + "/shoal", home + "/.cache/shoal"} {
			if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
				t.Errorf("left in %s: %v, %v", dir, left, err)
			}
		}
	}
	quickstartElsewhere(t, env)
	if _, errs, code := shoal(t, nil, "quickstart", "/no/such/folder"); code != 1 ||
		!strings.Contains(errs, "/no/such/folder is not a folder (give") {
		t.Errorf("exit %d, %s", code, errs)
	}
}

// quickstartElsewhere gives the folders, without a HOME, for a dataset in Parquet; and fails, after which nothing is
// left.
func quickstartElsewhere(t *testing.T, env []string) {
	dir, at := t.TempDir(), filepath.Join(t.TempDir(), "data")
	if err := os.WriteFile(filepath.Join(dir, "part-0.parquet"), []byte("PAR1"), 0o644); err != nil {
		t.Fatal(err)
	}
	quick := func(args ...string) (string, error) {
		cmd := exec.Command(shoalBin, append([]string{"quickstart"}, args...)...)
		for _, e := range append(os.Environ(), env...) {
			if !strings.HasPrefix(e, "HOME=") && !strings.HasPrefix(e, "XDG_CACHE_HOME=") {
				cmd.Env = append(cmd.Env, e)
			}
		}
		text, err := cmd.CombinedOutput()
		return string(text), err
	}
	cache := filepath.Join(t.TempDir(), "cache")
	out, err := quick(dir, "--mountpoint", at, "--cache-dir", cache)
	if want := `glob("` + at + `/**/*.parquet"`; err != nil || !strings.Contains(out, want) ||
		!strings.Contains(out, "Run it:      python3 train.py\n") {
		t.Errorf("%v, and %q is missing in:\n%s", err, want, out)
	}
	mustShoal(t, nil, "umount", at)
	below := filepath.Join(filepath.Dir(at), "new", "data")
	if out, err := quick("s3://no-such-bucket/train", "--mountpoint", below, "--cache-dir", cache+"2"); err == nil {
		t.Errorf("no error:\n%s", out)
	}
	for _, left := range []string{filepath.Dir(below), cache + "2"} {
		if _, err := os.Lstat(left); !os.IsNotExist(err) {
			t.Errorf("%s is left: %v", left, err)
		}
	}
}
