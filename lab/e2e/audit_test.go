package e2e

import (
	"crypto/sha256"
	"encoding/json"
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

func fingerprint(token string) string {
	return fmt.Sprintf("%x", sha256.Sum256([]byte(token)))[:8]
}

// audited checks that an audit log has, in this order, though not one behind the other, events with these
// fields: "" is none, "*" any.
func audited(t testing.TB, file string, want ...map[string]string) {
	t.Helper()
	text := string(content(t, file))
	next := 0
	for line := range strings.Lines(text) {
		var e map[string]any
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		if at, err := time.Parse(time.RFC3339, fmt.Sprint(e["time"])); err != nil || time.Since(at) > time.Hour {
			t.Errorf("time of %s: %v", line, err)
		}
		if next < len(want) && matches(e, want[next]) {
			next++
		}
	}
	if next < len(want) {
		t.Errorf("after %d others there is no %v in\n%s", next, want[next], text)
	}
}

func matches(e map[string]any, want map[string]string) bool {
	for k, v := range want {
		in, name := e, k
		if p, field, ok := strings.Cut(k, "."); ok {
			in, _ = e[p].(map[string]any)
			name = field
		}
		got, there := in[name]
		switch {
		case v == "" && there, v != "" && !there, v != "" && v != "*" && fmt.Sprint(got) != v:
			return false
		}
	}
	return true
}

// TestAuditLog looks at what is written down of a mount: who mounted, read, wrote plans, and changed the cache.
func TestAuditLog(t *testing.T) {
	dir, paths := tree(t, 2, 10, 4<<10)
	_, env := far(t, proxy.Options{})
	source := bucket(t, dir)
	cache, file := t.TempDir(), filepath.Join(t.TempDir(), "audit.log")
	flags := []string{"--cache-dir", cache, "--audit-log", file, "--order", "torch:seed=1"}
	if os.Getuid() == 0 {
		flags = append(flags, "--allow-other")
	}
	mnt := mount(t, env, source, flags...)
	if info, err := os.Stat(filepath.Join(cache, "shoal.sock")); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the daemon's socket: %v, %v", info, err)
	}
	if err := os.Chmod(filepath.Dir(mnt), 0o755); err != nil { // for another user
		t.Fatal(err)
	}
	const nobody = 65534
	for range 3 { // three processes; each reads several files
		cmd := exec.Command("cat", filepath.Join(mnt, paths[0]), filepath.Join(mnt, paths[1]),
			filepath.Join(mnt, paths[2]))
		if os.Getuid() == 0 {
			cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
		}
		if out, err := cmd.CombinedOutput(); err != nil || len(out) == 0 {
			t.Fatalf("%v: %.300s", err, out)
		}
	}
	uid := fmt.Sprint(os.Getuid())
	reader := uid
	if os.Getuid() == 0 {
		reader = fmt.Sprint(nobody)
	}
	if err := os.WriteFile(filepath.Join(mnt, ".shoal/plan"), []byte(paths[3]+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	_ = os.WriteFile(filepath.Join(mnt, ".shoal/plans/rank1"), []byte("no such file\n"), 0o600) // refused
	mustShoal(t, env, "refresh", mnt)
	mustShoal(t, env, "cache", "pin", cache, source)
	mustShoal(t, env, "cache", "quota", cache, source, "64MiB")
	if _, _, code := shoal(t, env, "cache", "rm", cache, source); code != 1 { // it is open
		t.Errorf("cache rm: exit %d", code)
	}
	// Another who attaches may name this log, or none, but not one that would stay empty.
	if _, errs, code := shoal(t, env, "warm", source, "--cache-dir", cache, "--audit-log", file+"2"); code != 2 ||
		!strings.Contains(errs, file) {
		t.Errorf("another audit log: exit %d, %s", code, errs)
	}
	within(t, patience, "the stats count the lines of the log", func() bool {
		var stats struct{ Audit struct{ Written, Lost int } }
		if err := json.Unmarshal(content(t, filepath.Join(mnt, ".shoal/stats")), &stats); err != nil {
			t.Fatal(err)
		}
		return stats.Audit.Written == strings.Count(string(content(t, file)), "\n") && stats.Audit.Lost == 0
	})
	umount(t, mnt)
	mustShoal(t, env, "cache", "rm", cache, source, "--audit-log", file)
	self := map[string]string{"peer.uid": uid, "peer.comm": "*", "peer.pid": "*"}
	by := func(want map[string]string) map[string]string {
		for k, v := range self {
			want[k] = v
		}
		return want
	}
	audited(t, file,
		by(map[string]string{"event": "cache_open", "cache_dir": cache}),
		by(map[string]string{"event": "mount", "mountpoint": mnt, "source": source + "/", "dataset": "*", "order": "*",
			"outcome": ""}),
		map[string]string{"event": "mount_open", "mountpoint": mnt, "peer.uid": reader, "peer.gid": reader,
			"peer.comm": "cat", "peer.pid": "*"},
		map[string]string{"event": "mount_open", "peer.comm": "cat"},
		map[string]string{"event": "mount_open", "peer.comm": "cat"},
		by(map[string]string{"event": "plan", "plan": "plans/default", "outcome": ""}),
		by(map[string]string{"event": "plan", "plan": "plans/rank1", "outcome": "failed", "cause": "*"}),
		by(map[string]string{"event": "refresh", "outcome": ""}),
		by(map[string]string{"event": "cache_pin", "source": "*", "peer.network": "unix"}),
		by(map[string]string{"event": "cache_quota", "quota": "6.7108864e+07"}),
		by(map[string]string{"event": "cache_rm", "outcome": "failed", "cause": "*"}),
		by(map[string]string{"event": "attach", "verb": "warm", "outcome": "failed"}),
		map[string]string{"event": "unmount", "mountpoint": mnt},
		map[string]string{"event": "cache_close"},
		by(map[string]string{"event": "cache_rm", "outcome": ""}),
	)
	// the daemon's own look at the mount and the plan's writer
	if n := strings.Count(string(content(t, file)), `"mount_open"`); n > 5 {
		t.Errorf("%d openings are written down of 3 processes with 9", n)
	}
	if info, err := os.Stat(file); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info, err)
	}
}

// TestDaemonLogIsRotated fills the log of a daemon with a supervisor, and sees both go on in the new one, the
// runtime's own words when the daemon dies included.
func TestDaemonLogIsRotated(t *testing.T) {
	long(t)
	dir, _ := tree(t, 2, 10, 4<<10)
	_, env := far(t, proxy.Options{})
	cache := t.TempDir()
	mnt := mount(t, env, bucket(t, dir), "--cache-dir", cache, "--daemon=supervised")
	log := filepath.Join(cache, "shoal.log")
	fill := func(with string) { // 10 MiB, which a daemon would take days to say
		f, err := os.OpenFile(log, os.O_APPEND|os.O_WRONLY, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if _, err := f.WriteString(strings.Repeat(with+"\n", 10<<20/(len(with)+1)+1)); err != nil {
			t.Fatal(err)
		}
	}
	rotated := func(with string) {
		fill(with)
		within(t, 2*time.Minute, "the log is rotated", func() bool {
			old, err := os.ReadFile(log + ".1")
			info, err2 := os.Stat(log)
			return err == nil && err2 == nil && strings.Contains(string(old), with) && info.Size() < 1<<20
		})
	}
	rotated("first")
	rotated("second")
	pid := readStats(t, mnt).PID
	if err := syscall.Kill(pid, syscall.SIGQUIT); err != nil { // a dump of all goroutines, by the runtime
		t.Fatal(err)
	}
	said := func() string {
		b, _ := os.ReadFile(log)
		old, _ := os.ReadFile(log + ".1")
		return string(old) + string(b)
	}
	within(t, patience, "what the runtime says is in the log", func() bool {
		return strings.Contains(said(), "SIGQUIT: quit")
	})
	within(t, patience, "it is mounted again", func() bool {
		b, err := os.ReadFile(filepath.Join(mnt, ".shoal/stats"))
		return err == nil && !strings.Contains(string(b), fmt.Sprintf(`"pid":%d,`, pid))
	})
	rotated("third") // by the next daemon, or its supervisor
	umount(t, mnt)
	// The supervisor, which umount does not wait for, may be between two logs.
	within(t, patience, "nothing runs any more", func() bool { return len(processes(mnt)) == 0 })
	if files, _ := filepath.Glob(log + "*"); len(files) != 2 {
		t.Errorf("%v", files)
	}
}
