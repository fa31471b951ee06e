package doctor

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/shoalfs/shoal/internal/findings"
)

// is checks a finding's level and that its texts hold a word.
func is(t testing.TB, f findings.Finding, level findings.Level, word string) {
	t.Helper()
	if f.Level != level || !strings.Contains(f.Thing+"|"+f.Cause+"|"+f.Remedy, word) {
		t.Errorf("%+v, want %s and %q", f, level, word)
	}
}

// lookAt runs a machine's checks of a cache directory, or one of them.
func lookAt(t testing.TB, dir, code string) (f findings.Finding) {
	t.Helper()
	for _, c := range Checks(Options{CacheDir: dir, CacheSize: 1 << 20, Quick: true}) {
		if c.Code == code || code == "disk/speed" && c.Code == "disk/filesystem" {
			f = c.run(t.Context())
		}
	}
	return f
}

func TestCacheDirectory(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "cache")
	is(t, lookAt(t, dir, "disk/filesystem"), findings.OK, "with room for")
	if err := os.WriteFile(dir, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	is(t, lookAt(t, dir, "disk/filesystem"), findings.Fail, "not a directory")
}

func TestDiskSpeedLeavesNothing(t *testing.T) {
	dir := t.TempDir()
	f := lookAt(t, dir, "disk/speed")
	if f.Level != findings.OK && f.Level != findings.Warn || f.Values["random_read_bytes_per_second"] <= 0 ||
		f.Values["write_bytes_per_second"] <= 0 {
		t.Errorf("%+v", f)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
	is(t, lookAt(t, "/proc/self", "disk/speed"), findings.Fail, "cannot create a file")
}

// TestRunIsBounded: a check that hangs is given up, and the others go on, but for those that need it.
func TestRunIsBounded(t *testing.T) {
	block := make(chan struct{})
	defer close(block)
	check := func(code string, takes time.Duration, gather func(ctx context.Context) error) Check {
		return Check{code, step{takes, gather}, func() findings.Finding {
			return findings.Finding{Level: findings.OK, Thing: "in the end"}
		}}
	}
	all := []Check{
		check("a/hangs", -990*time.Millisecond, func(context.Context) error { <-block; return nil }),
		check("a/needs", 0, func(context.Context) error { t.Error("it ran"); return nil }),
		check("b/waits", -990*time.Millisecond, func(ctx context.Context) error { <-ctx.Done(); return nil }),
		check("c/fails", 3*time.Second, func(context.Context) error { return errors.New("x") }),
	}
	told := ""
	r, err := Run(t.Context(), all, func(code string) func(string) {
		return func(result string) { told += code + " " + result }
	})
	if err != nil || told != "c/fails fail" || r.Fail != 2 || r.OK != 1 || r.Skipped != 1 || len(r.Findings) != 4 {
		t.Fatalf("%+v, %v, told %q", r, err, told)
	}
	is(t, r.Findings[0], findings.Fail, "no answer in time")
	is(t, r.Findings[1], findings.Skipped, "it needs a/hangs")
	is(t, r.Findings[2], findings.OK, "in the end")
	var text strings.Builder
	if err := r.Print(&text); err != nil || !strings.Contains(text.String(), "1 ok, 0 warnings, 2 failed, 1 skipped") {
		t.Errorf("%v\n%s", err, text.String())
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Run(ctx, all[3:], nil); !errors.Is(err, context.Canceled) {
		t.Errorf("an end from outside: %v", err)
	}
}

// TestSchema holds docs/doctor.md's names.
func TestSchema(t *testing.T) {
	f := findings.Finding{Code: "a/b", Level: findings.Warn,
		Thing: "m", Cause: "why", Remedy: "do", Values: map[string]float64{"v": 1}}
	b, err := json.Marshal(Report{Version: Version, Warn: 1, Findings: []findings.Finding{f}})
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{
		`"version":2`, `"shoal":`, `"seconds":`, `"ok":0`, `"warn":1`, `"fail":0`, `"skipped":0`,
		`"findings":[{"code":"a/b","level":"warn","thing":"m","cause":"why","remedy":"do","values":{"v":1}}]`,
	} {
		if !strings.Contains(string(b), name) {
			t.Errorf("%s lacks %s", b, name)
		}
	}
}

// TestHere runs all checks of the machine on this one: whatever they find, none of them panics or lacks a word.
func TestHere(t *testing.T) {
	checks := Checks(Options{CacheDir: t.TempDir(), CacheSize: 1 << 30, Memory: 1 << 30, Quick: true})
	r, err := Run(t.Context(), checks, nil)
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Findings) != len(checks) || len(checks) != 5 {
		t.Errorf("%d findings of %d checks", len(r.Findings), len(checks))
	}
	for _, f := range r.Findings {
		if f.Thing == "" || f.Level == "" {
			t.Errorf("%+v", f)
		}
	}
}
