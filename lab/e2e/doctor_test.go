package e2e

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/shoalfs/shoal/lab/rig/proxy"
	"github.com/shoalfs/shoal/lab/rig/s3server"
)

// examined is what `shoal doctor --json` prints, as far as is looked at.
type examined struct {
	Version, OK, Warn, Fail, Skipped int
	Findings                         []struct {
		Code, Level, Thing, Cause, Remedy string
	}
}

func (e examined) level(code string) string {
	for _, f := range e.Findings {
		if f.Code == code {
			return f.Level
		}
	}
	return "not there"
}

// TestDoctor: the verb as a whole, on this machine, whatever that is like. What the rules find is tested in package
// findings.
func TestDoctor(t *testing.T) {
	dir, _ := tree(t, 2, 20, 20_000)
	source := bucket(t, dir)
	_, env := far(t, proxy.Options{Latency: 3 * time.Millisecond, Sigma: 0.3})
	examine := func(args ...string) (e examined, errs string, code int) {
		t.Helper()
		out, errs, code := shoal(t, env,
			append([]string{"doctor", "--json", "--quick", "--cache-dir", t.TempDir()}, args...)...)
		if err := json.Unmarshal([]byte(out), &e); err != nil {
			t.Fatalf("%v in %s (%s)", err, out, errs)
		}
		if e.Version != 2 || e.OK+e.Warn+e.Fail+e.Skipped != len(e.Findings) || (code == 1) != (e.Fail > 0) {
			t.Errorf("exit %d, %+v", code, e)
		}
		if strings.Contains(out+errs, s3server.SecretKey) {
			t.Error("it prints a secret")
		}
		return e, errs, code
	}
	e, _, _ := examine(source)
	for _, code := range []string{"source/bucket", "source/listing", "source/epoch"} {
		if got := e.level(code); got != "ok" {
			t.Errorf("%s is %s: %+v", code, got, e.Findings)
		}
	}
	for _, code := range []string{"fuse/device", "limits/machine", "disk/filesystem", "disk/speed", "source/latency",
		"source/bandwidth"} {
		if e.level(code) == "not there" {
			t.Errorf("nothing of %s", code)
		}
	}
	if e, _, _ := examine("--feed-only"); e.level("fuse/device") != "skipped" ||
		e.level("source/bucket") != "not there" {
		t.Errorf("%+v", e)
	}
	e, errs, code := examine("s3://no-such-bucket-here/x")
	if code != 1 || e.level("source/bucket") != "fail" || !strings.Contains(errs, "failed") {
		t.Errorf("exit %d, %s, %+v", code, errs, e)
	}
	if _, errs, code := shoal(t, env, "doctor", source, "two"); code != 2 {
		t.Errorf("exit %d, %s", code, errs)
	}
}
