package fusefs

import (
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/shoalfs/shoal/fusefs/uring"
)

// needRings skips the test where FUSE over io_uring is impossible. Root turns it on for the test, and then off again: the switch
// is the machine's, and concerns all mounts made meanwhile.
func needRings(t testing.TB) {
	t.Helper()
	err := uring.Available()
	if err == nil {
		return
	}
	if os.Geteuid() != 0 || os.WriteFile(uring.Switch, []byte("Y"), 0) != nil {
		t.Skip(err)
	}
	t.Cleanup(func() { _ = os.WriteFile(uring.Switch, []byte("N"), 0) })
	if err := uring.Available(); err != nil {
		t.Skip(err)
	}
}

// TestOverIOURing runs all tests of this package again, with the mounts' requests coming by io_uring. The threads of rings take
// processors from Go's scheduler, so it does with few and with many of those.
func TestOverIOURing(t *testing.T) {
	if os.Getenv(transportEnv) != "" {
		t.Skip("this is the second run")
	}
	needRings(t)
	for _, procs := range []string{"1", "2", "8"} {
		if testing.Short() && procs != "2" {
			continue
		}
		t.Run("GOMAXPROCS="+procs, func(t *testing.T) {
			cmd := exec.Command(os.Args[0], "-test.timeout=5m", "-test.v="+strconv.FormatBool(testing.Verbose()), "-test.short="+strconv.FormatBool(testing.Short()))
			cmd.Env = append(os.Environ(), transportEnv+"="+TransportURing, procsEnv+"="+procs)
			out, err := cmd.CombinedOutput()
			if err != nil {
				t.Errorf("over io_uring: %v\n%s", err, out)
			} else {
				t.Logf("over io_uring:\n%s", out)
			}
		})
	}
}

// TestTransport: auto takes rings where they are possible and pay, and says why not otherwise.
func TestTransport(t *testing.T) {
	needRings(t)
	transport := func(want string) Transport {
		return mountChild(t, "tree", func(s *spec) { s.Options.Transport = want }).report().Transport
	}
	if got := transport(TransportAuto); got.Name != TransportURing || got.Threads < 1 || got.Entries < 8 || got.Buffers < 8*maxRequest {
		t.Errorf("%+v", got)
	}
	if got := transport(TransportDev); got != (Transport{Name: TransportDev}) {
		t.Errorf("%+v", got)
	}
	large := mountChild(t, "large", func(s *spec) { s.Options.Transport = TransportAuto })
	if got := large.report().Transport; got.Name != TransportDev || !strings.Contains(got.Why, "on average") {
		t.Errorf("%+v", got)
	}
}

// TestTransportSwitchedOff: without the switch auto falls back, and uring says what to do.
func TestTransportSwitchedOff(t *testing.T) {
	before, err := os.ReadFile(uring.Switch)
	if err != nil || os.Geteuid() != 0 || os.WriteFile(uring.Switch, []byte("N"), 0) != nil {
		t.Skip("only root can turn the switch off")
	}
	t.Cleanup(func() { _ = os.WriteFile(uring.Switch, before, 0) })
	c := mountChild(t, "tree", func(s *spec) { s.Options.Transport = TransportAuto })
	if got := c.report().Transport; got.Name != TransportDev || !strings.Contains(got.Why, "switched off") {
		t.Errorf("%+v", got)
	}
	if _, err := os.ReadFile(c.path("README.md")); err != nil {
		t.Error(err)
	}
	v := &memVolume{}
	v.manifest.Store(buildManifest(datasets["tree"](1)))
	if _, err = Mount(t.TempDir(), v, v, Options{Transport: TransportURing}); err == nil || !strings.Contains(err.Error(), "echo Y > "+uring.Switch) {
		t.Error(err)
	}
}

// TestMissesDoNotWaitForEachOther: reads that wait for the store leave the ring's thread to others.
func TestMissesDoNotWaitForEachOther(t *testing.T) {
	const files, delay = 64, 50 * time.Millisecond
	c := mountChild(t, "bench", func(s *spec) { s.ArenaMiB, s.Delay = 4, delay })
	begun := time.Now()
	done := make(chan error, files)
	for _, f := range c.data[:files] {
		go func() {
			_, err := os.ReadFile(c.path(f.path))
			done <- err
		}()
	}
	for range files {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	if took := time.Since(begun); took > files*delay/2 {
		t.Errorf("%d files took %v", files, took)
	}
}
