package fusefs

import (
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/fusefs/fuseio"
	"github.com/shoalfs/shoal/lab/rig/uringswitch"
)

// needRings switches FUSE over io_uring on, or skips the test.
func needRings(t testing.TB) {
	t.Helper()
	uringswitch.On(t)
	if err := fuseio.Available(); err != nil {
		t.Skip(err)
	}
}

// TestOverIOURing runs all tests of this package again, with the mounts' requests coming by io_uring. The threads of
// rings take processors from Go's scheduler, so it does with few and with many of those.
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
			cmd := exec.Command(os.Args[0], "-test.timeout=15m", "-test.v="+strconv.FormatBool(testing.Verbose()),
				"-test.short="+strconv.FormatBool(testing.Short()))
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
	if got := transport(TransportAuto); got.Threads < 1 || got.Entries < 8 ||
		got.Buffers < 8*maxRequest {
		t.Errorf("%+v", got)
	}
	if got := transport(TransportDev); got != (Transport{}) {
		t.Errorf("%+v", got)
	}
	large := mountChild(t, "large", func(s *spec) { s.Options.Transport = TransportAuto })
	if got := large.report().Transport; got.Threads > 0 || !strings.Contains(got.Why, "on average") {
		t.Errorf("%+v", got)
	}
}

// TestTransportSwitchedOff: without the switch auto falls back, and uring says what to do.
func TestTransportSwitchedOff(t *testing.T) {
	if os.Getenv(transportEnv) != "" {
		t.Skip("the others need it on")
	}
	uringswitch.Off(t)
	c := mountChild(t, "tree", func(s *spec) { s.Options.Transport = TransportAuto })
	if got := c.report().Transport; got.Threads > 0 || !strings.Contains(got.Why, "switched off") {
		t.Errorf("%+v", got)
	}
	if _, err := os.ReadFile(c.path("README.md")); err != nil {
		t.Error(err)
	}
	v := &memVolume{}
	v.manifest.Store(buildManifest(datasets["tree"](1)))
	if _, err := Mount(t.TempDir(), v, v, Options{Transport: TransportURing}); err == nil ||
		!strings.Contains(err.Error(), "echo Y > "+fuseio.Switch) {
		t.Error(err)
	}
}

// forbidRings makes io_uring_setup fail with EPERM in this process, as a container's seccomp profile does.
func forbidRings() error {
	program := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS}, // the system call's number
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.SYS_IO_URING_SETUP, Jf: 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ERRNO | uint32(unix.EPERM)},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW},
	}
	filter := unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]}
	_, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC,
		uintptr(unsafe.Pointer(&filter)))
	if errno != 0 {
		return errno
	}
	return nil
}

// TestTransportForbidden: where a container forbids io_uring, auto falls back.
func TestTransportForbidden(t *testing.T) {
	needRings(t)
	if os.Geteuid() != 0 {
		t.Skip("only root can forbid itself a system call and mount")
	}
	c := mountChild(t, "tree", func(s *spec) { s.Options.Transport, s.NoRings = TransportAuto, true })
	if got := c.report().Transport; got.Threads > 0 || !strings.Contains(got.Why, "seccomp") {
		t.Errorf("%+v", got)
	}
	if _, err := os.ReadFile(c.path("README.md")); err != nil {
		t.Error(err)
	}
}

// TestMissesDoNotWaitForEachOther: reads that wait for the store leave the ring's thread to others.
func TestMissesDoNotWaitForEachOther(t *testing.T) {
	const reads = 32 // fewer than a CPU's entries, and all may come by one CPU
	c := mountChild(t, "tree")
	fd, err := unix.Open(c.path("slow/file"), unix.O_RDONLY|unix.O_CLOEXEC|unix.O_DIRECT, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	done := make(chan error, reads)
	for i := range int64(reads) {
		go func() {
			_, err := unix.Pread(fd, make([]byte, 4096), i*4096)
			done <- err
		}()
	}
	c.eventually("all wait", func(r report) bool { return r.Waiting == reads })
	if _, err := os.ReadFile(c.path("README.md")); err != nil {
		t.Error(err)
	}
	c.do("release")
	for range reads {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}
