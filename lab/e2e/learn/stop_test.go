package learn

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// Of a daemon that serves others too, only the feed that is meant ends, unless all are; and a number that is not the
// daemon's of this machine is never signalled.
func TestStop(t *testing.T) {
	dir := scratch(t)
	w := &world{env: environment(dir)}
	addrs := []string{"unix://" + dir + "/a.sock", "unix://" + dir + "/b.sock"}
	for i, source := range []string{"a", "b"} {
		folder := filepath.Join(dir, source)
		writeFile(t, filepath.Join(folder, "class", "x.jpg"), source)
		w.shoal(t, "serve", "file://"+folder, "--listen", addrs[i], "--cache-dir", filepath.Join(dir, "cache"),
			"--daemon")
	}
	stop := func(args ...string) (string, error) {
		cmd := exec.Command(filepath.Join(clone, "bin", "shoal"), append([]string{"stop"}, args...)...)
		cmd.Env = w.env
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	mnt := filepath.Join(dir, "mnt")
	third := "unix://" + dir + "/c.sock"
	w.shoal(t, "serve", "file://"+filepath.Join(dir, "a"), "--listen", third, "--mount", mnt,
		"--cache-dir", filepath.Join(dir, "cache"), "--daemon")
	alone := filepath.Join(dir, "alone")
	w.shoal(t, "mount", "file://"+filepath.Join(dir, "a"), alone, "--cache-dir", filepath.Join(dir, "cache"),
		"--daemon")
	if out, err := stop(alone); err == nil || !strings.Contains(out, "shoal umount "+alone) {
		t.Errorf("stop of one of several mounts: %v, %s", err, out)
	}
	w.shoal(t, "umount", alone)
	if out := w.shoal(t, "stat", mnt); !strings.Contains(out, "sessions open") {
		t.Errorf("the mount of a daemon that serves a feed, too: %s", out)
	}
	// Each ends alone: the one that owns the cache directory, and one with its mount, of which the mount point is
	// given.
	for i, one := range []string{addrs[0], mnt} {
		if out, err := stop(one); err != nil {
			t.Errorf("stop of %s, one of several: %v, %s", one, err, out)
		}
		if out, err := stop([]string{addrs[0], third}[i]); err == nil ||
			!strings.Contains(out, "no such file or directory") {
			t.Errorf("stop of what has ended: %v, %s", err, out)
		}
		w.shoal(t, "stat", addrs[1])
	}
	if _, err := os.Stat(filepath.Join(mnt, ".shoal", "stats")); err == nil {
		t.Error("what was mounted beside the feed is still mounted")
	}
	w.shoal(t, "serve", "file://"+filepath.Join(dir, "a"), "--listen", addrs[0],
		"--cache-dir", filepath.Join(dir, "cache"), "--daemon")
	if out, err := stop(addrs[0], "--all"); err != nil {
		t.Errorf("%v: %s", err, out)
	}
	if out, err := stop(addrs[1]); err == nil || !strings.Contains(out, "no such file or directory") {
		t.Errorf("stop of what has ended: %v, %s", err, out)
	}

	// As from another container: the cache directory is not to be seen at the path that the daemon names.
	w.shoal(t, "serve", "file://"+filepath.Join(dir, "a"), "--listen", addrs[0],
		"--cache-dir", filepath.Join(dir, "cache"), "--daemon")
	hidden := exec.Command("unshare", "-m", "sh", "-c", `mount -t tmpfs none "$1" && exec "$2" stop "$3"`, "sh",
		filepath.Join(dir, "cache"), filepath.Join(clone, "bin", "shoal"), addrs[0])
	hidden.Env = w.env
	if out, err := hidden.CombinedOutput(); err == nil ||
		!strings.Contains(string(out), "is not one of this machine and user") {
		t.Errorf("stop of a daemon whose cache directory is elsewhere: %v, %s", err, out)
	}
	w.shoal(t, "stop", addrs[0])
}
