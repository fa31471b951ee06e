// Package uringswitch turns the kernel's FUSE over io_uring on and off for a test. The switch is the machine's, and
// concerns all mounts made meanwhile, so tests of all processes take turns: many may need it on, and one at a time off.
package uringswitch

import (
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// Path is the switch.
const Path = "/sys/module/fuse/parameters/enable_uring"

// On turns it on until the test ends, and skips the test where that is impossible.
func On(t testing.TB) { turn(t, "Y", unix.LOCK_SH) }

// Off turns it off until the test ends.
func Off(t testing.TB) { turn(t, "N", unix.LOCK_EX) }

func turn(t testing.TB, to string, lock int) {
	t.Helper()
	f, err := os.Open(Path)
	if err != nil {
		t.Skipf("the kernel has no FUSE over io_uring: %v", err)
	}
	t.Cleanup(func() { f.Close() }) // which unlocks it
	if err := unix.Flock(int(f.Fd()), lock); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(Path)
	if err != nil {
		t.Fatal(err)
	}
	before := strings.TrimSpace(string(text))
	if before == "Y" && to == "Y" {
		return
	}
	if err := os.WriteFile(Path, []byte(to), 0); err != nil {
		t.Skipf("only root can switch FUSE over io_uring: %v", err)
	}
	t.Cleanup(func() {
		_ = unix.Flock(int(f.Fd()), unix.LOCK_EX) // until nobody needs it
		_ = os.WriteFile(Path, []byte(before), 0)
	})
}
