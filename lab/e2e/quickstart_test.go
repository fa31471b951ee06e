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

// What quickstart prints can be pasted: a mount where FUSE is there, a feed where this user cannot mount. The commands that
// it names end it.
func TestQuickstart(t *testing.T) {
	dir, _ := pictures(t, 2, 40)
	_, env := far(t, proxy.Options{})
	source := bucket(t, dir)
	for _, mounts := range []bool{true, false} {
		home := t.TempDir()
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
			if cmd.Path = filepath.Join(home, "program"); os.WriteFile(cmd.Path, data, 0o755) != nil { // where that user may run it
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
		if want := map[bool]string{true: "yes: a mount", false: ": a feed"}[mounts]; !strings.Contains(out, want) || !strings.Contains(out, "credentials  AWS_ACCESS_KEY_ID") {
			t.Errorf("it does not say %q and whose credentials it has:\n%s", want, out)
		}
		_, code, _ := strings.Cut(out, "Paste into Python:\n\n")
		code, rest, _ := strings.Cut(code, "\nLook at it:")
		p := exec.Command("/usr/bin/python3", "-c", code)
		p.Env = append(os.Environ(), "PATH="+filepath.Dir(shoalBin)+":"+os.Getenv("PATH"), "XDG_CACHE_HOME="+t.TempDir())
		if said, err := p.CombinedOutput(); err != nil || !strings.HasPrefix(lastLine(string(said)), "epoch 1 ") {
			t.Errorf("%v\n%s\n%s", err, code, said)
		}
		_, end, _ := strings.Cut(rest, "End it:      shoal ")
		mustShoal(t, nil, strings.Fields(end)...)
	}
	if _, errs, code := shoal(t, nil, "quickstart", "/no/such/folder"); code != 1 || !strings.Contains(errs, "/no/such/folder is no folder (give") {
		t.Errorf("exit %d, %s", code, errs)
	}
}
