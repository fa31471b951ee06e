package learn

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// A daemon that serves others too is left alone unless all are meant, and a number that is not the daemon's
// of this machine is never signalled.
func TestStop(t *testing.T) {
	dir := scratch(t)
	w := &world{env: environment(dir)}
	addrs := []string{"unix://" + dir + "/a.sock", "unix://" + dir + "/b.sock"}
	for i, source := range []string{"a", "b"} {
		folder := filepath.Join(dir, source)
		writeFile(t, filepath.Join(folder, "class", "x.jpg"), source)
		w.shoal(t, "serve", "file://"+folder, "--listen", addrs[i], "--cache-dir", filepath.Join(dir, "cache"), "--daemon")
	}
	stop := func(args ...string) (string, error) {
		cmd := exec.Command(filepath.Join(clone, "bin", "shoal"), append([]string{"stop"}, args...)...)
		cmd.Env = w.env
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	if out, err := stop(addrs[0]); err == nil || !strings.Contains(out, "serves 2 mounts and feeds") {
		t.Errorf("stop of one of two: %v, %s", err, out)
	}
	w.shoal(t, "stat", addrs[1])
	if out, err := stop(addrs[0], "--all"); err != nil {
		t.Errorf("%v: %s", err, out)
	}
	if out, err := stop(addrs[1]); err == nil || !strings.Contains(out, "no such file or directory") {
		t.Errorf("stop of what has ended: %v, %s", err, out)
	}

	// As from another container: the cache directory is not to be seen at the path that the daemon names.
	w.shoal(t, "serve", "file://"+filepath.Join(dir, "a"), "--listen", addrs[0], "--cache-dir", filepath.Join(dir, "cache"), "--daemon")
	hidden := exec.Command("unshare", "-m", "sh", "-c", `mount -t tmpfs none "$1" && exec "$2" stop "$3"`, "sh",
		filepath.Join(dir, "cache"), filepath.Join(clone, "bin", "shoal"), addrs[0])
	hidden.Env = w.env
	if out, err := hidden.CombinedOutput(); err == nil || !strings.Contains(string(out), "is not one of this machine and user") {
		t.Errorf("stop of a daemon whose cache directory is elsewhere: %v, %s", err, out)
	}
	w.shoal(t, "stop", addrs[0])
}
