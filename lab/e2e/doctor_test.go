package e2e

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shoalfs/shoal/lab/rig/proxy"
	"github.com/shoalfs/shoal/lab/rig/s3server"
)

// examined is what `shoal doctor --json` prints, as far as is looked at.
type examined struct {
	Version, OK, Warn, Fail, Skipped int
	Results                          []examination
}

type examination struct {
	Area, Check, Status, Measured, Meaning, Remedy string
}

func (e examined) status(area, check string) string {
	for _, r := range e.Results {
		if r.Area == area && r.Check == check {
			return r.Status
		}
	}
	return "not there"
}

// TestDoctor: the verb as a whole, on this machine, whatever that is like. What checks find is tested in package doctor.
func TestDoctor(t *testing.T) {
	dir, _ := tree(t, 2, 20, 20_000)
	source := bucket(t, dir)
	_, env := far(t, proxy.Options{Latency: 3 * time.Millisecond, Sigma: 0.3})
	examine := func(args ...string) (e examined, errs string, code int) {
		t.Helper()
		out, errs, code := shoal(t, env, append([]string{"doctor", "--json", "--quick", "--cache-dir", t.TempDir()}, args...)...)
		if err := json.Unmarshal([]byte(out), &e); err != nil {
			t.Fatalf("%v in %s (%s)", err, out, errs)
		}
		if e.Version != 1 || e.OK+e.Warn+e.Fail+e.Skipped != len(e.Results) || (code == 1) != (e.Fail > 0) {
			t.Errorf("exit %d, %+v", code, e)
		}
		if strings.Contains(out+errs, s3server.SecretKey) {
			t.Error("it prints a secret")
		}
		return e, errs, code
	}
	e, _, _ := examine(source)
	for _, check := range []string{"bucket", "listing", "get", "range", "if-match", "memory", "epoch", "credentials"} {
		if got := e.status("source", check); got != "ok" {
			t.Errorf("source/%s is %s: %+v", check, got, e.Results)
		}
	}
	for _, area := range []string{"fuse", "limits", "disk", "cache", "versions", "gpu", "source"} {
		if !slices.ContainsFunc(e.Results, func(r examination) bool {
			return r.Area == area
		}) {
			t.Errorf("nothing of %s", area)
		}
	}
	if e, _, _ := examine("--feed-only"); e.status("fuse", "device") != "skipped" || e.status("source", "name") != "not there" {
		t.Errorf("%+v", e)
	}
	e, errs, code := examine("s3://no-such-bucket-here/x")
	if code != 1 || e.status("source", "bucket") != "fail" || !strings.Contains(errs, "failed") {
		t.Errorf("exit %d, %s, %+v", code, errs, e)
	}
	if _, errs, code := shoal(t, env, "doctor", source, "two"); code != 2 {
		t.Errorf("exit %d, %s", code, errs)
	}
	// A daemon that owns the directory is told from one that hangs.
	cache := t.TempDir()
	mount(t, env, source, "--cache-dir", cache)
	out, _, _ := shoal(t, env, "doctor", "--quick", "--cache-dir", cache)
	if !strings.Contains(out, "others can attach to it") {
		t.Errorf("%s", out)
	}
}
