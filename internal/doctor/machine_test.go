package doctor

import (
	"context"
	"encoding/json"
	"errors"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// fake is a machine of the given files, with a kernel that refuses what is asked of it.
func fake(t testing.TB, files map[string]string) Machine {
	t.Helper()
	root := t.TempDir()
	if _, told := files["proc/self/mountinfo"]; !told && files["proc/self/cgroup"] != "" {
		files["proc/self/mountinfo"] = cgroupMounts
	}
	for path, text := range files {
		full := filepath.Join(root, path)
		if err := os.MkdirAll(filepath.Dir(full), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(full, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return Machine{
		Root: root, UID: func() int { return 1000 }, Getenv: func(string) string { return "" },
		OpenRW:   func(string) error { return nil },
		LookPath: func(string) (string, error) { return "", errors.New("not there") },
		Limit:    func(int) (uint64, error) { return math.MaxUint64, nil },
		Statfs: func(string) (unix.Statfs_t, error) {
			return unix.Statfs_t{Type: unix.EXT4_SUPER_MAGIC, Bsize: 4096, Bavail: 1 << 30, Files: 1 << 20, Ffree: 1 << 20}, nil
		},
		Command: func(context.Context, string, ...string) (string, error) { return "", errors.New("no such program") },
		Dial:    func(string) error { return errors.New("refused") },
	}
}

const (
	meminfo  = "MemTotal:       16777216 kB\nMemFree: 1 kB\nMemAvailable:    8388608 kB\n"
	cgroupV2 = "0::/kubepods/pod1\n"
	cgroupV1 = "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n2:pids:/docker/abc\n"
	// Both versions; the process is in one.
	cgroupMounts = "2 1 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n3 1 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n" +
		"4 1 0:28 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n5 1 0:29 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n"
	status = "Name:\tshoal\nCapEff:\t00000000a80425fb\n" // Docker's usual ones, without CAP_SYS_ADMIN
)

func TestMachine(t *testing.T) {
	type change = func(m *Machine)
	root := func(m *Machine) { m.UID = func() int { return 0 } }
	for _, c := range []struct {
		name   string
		files  map[string]string
		change change
		check  func(m *Machine) Result
		status Status
		word   string
	}{
		{"fuse", nil, nil, fuseDevice, OK, "/dev/fuse"},
		{"no fuse", nil, func(m *Machine) { m.OpenRW = func(string) error { return unix.ENOENT } }, fuseDevice, Fail, "modprobe fuse"},
		{"no fuse in a container", map[string]string{".dockerenv": ""}, func(m *Machine) { m.OpenRW = func(string) error { return unix.ENOENT } }, fuseDevice, Fail, "--device /dev/fuse"},
		{"no right to fuse", nil, func(m *Machine) { m.OpenRW = func(string) error { return unix.EACCES } }, fuseDevice, Fail, "chmod 666"},
		{"device rules", map[string]string{"run/.containerenv": ""}, func(m *Machine) { m.OpenRW = func(string) error { return unix.EPERM } }, fuseDevice, Fail, "device rules"},
		{"root", nil, root, fusermount, Skipped, "root"},
		{"no fusermount", nil, nil, fusermount, Fail, "fuse3"},
		{"fusermount without its bit", map[string]string{"fusermount3": ""}, func(m *Machine) {
			m.LookPath = func(string) (string, error) { return filepath.Join(m.Root, "fusermount3"), nil }
		}, fusermount, Fail, "chmod u+s"},
		{"fusermount", map[string]string{"fusermount3": ""}, func(m *Machine) {
			path := filepath.Join(m.Root, "fusermount3")
			if err := os.Chmod(path, 0o755|os.ModeSetuid); err != nil {
				t.Fatal(err)
			}
			m.LookPath = func(string) (string, error) { return path, nil }
		}, fusermount, OK, "set-user-ID"},
		{"kernel", map[string]string{"proc/sys/kernel/osrelease": "6.18.1-generic\n"}, nil, fuseKernel, OK, "6.18"},
		{"older kernel", map[string]string{"proc/sys/kernel/osrelease": "5.4.0\n"}, nil, fuseKernel, Warn, "close(2)"},
		{"old kernel", map[string]string{"proc/sys/kernel/osrelease": "4.18.0-553.el8.x86_64\n"}, nil, fuseKernel, Warn, "128 KiB"},
		{"no kernel", nil, nil, fuseKernel, Skipped, "cannot be read"},
		{"odd kernel", map[string]string{"proc/sys/kernel/osrelease": "next\n"}, nil, fuseKernel, Skipped, "next"},
		{"io_uring", map[string]string{"sys/module/fuse/parameters/enable_uring": "Y\n", "proc/sys/kernel/io_uring_disabled": "0\n"}, nil, fuseRings, OK, "switched on"},
		{"io_uring off", map[string]string{"sys/module/fuse/parameters/enable_uring": "N\n"}, nil, fuseRings, OK, "echo Y"},
		{"io_uring forbidden", map[string]string{"sys/module/fuse/parameters/enable_uring": "Y\n", "proc/sys/kernel/io_uring_disabled": "2\n"}, root, fuseRings, Warn, "io_uring_disabled=0"},
		{"no io_uring", nil, nil, fuseRings, Skipped, "6.14"},
		{"allow_other", map[string]string{"etc/fuse.conf": "# user_allow_other\n"}, nil, allowOther, Warn, "tee -a"},
		{"allow_other is set", map[string]string{"etc/fuse.conf": "mount_max = 10\nuser_allow_other\n"}, nil, allowOther, OK, "has"},
		{"no fuse.conf", nil, nil, allowOther, Warn, "cannot be read"},
		{"background", map[string]string{"sys/module/fuse/parameters/max_user_bgreq": "64\n"}, nil, background, Warn, "256"},
		{"background of root", map[string]string{"sys/module/fuse/parameters/max_user_bgreq": "64\n"}, root, background, OK, "64"},
		{"no container", nil, nil, inContainer, Skipped, "not in a container"},
		{"root without rights", map[string]string{".dockerenv": "", "proc/self/status": status}, root, inContainer, Fail, "SYS_ADMIN"},
		{"AppArmor", map[string]string{"proc/self/cgroup": cgroupV2, "proc/self/attr/current": "docker-default (enforce)\n"}, nil, inContainer, Warn, "apparmor=unconfined"},
		{"private mount", map[string]string{".dockerenv": "", "proc/self/mountinfo": "1 0 8:1 / / rw - overlay overlay rw\n2 1 8:2 / /mnt rw - ext4 /dev/sda rw\n"}, nil, inContainer, Warn, "mountPropagation"},
		{"shared mount", map[string]string{".dockerenv": "", "proc/self/mountinfo": "1 0 8:1 / / rw - overlay overlay rw\n2 1 8:2 / /mnt rw shared:5 - ext4 /dev/sda rw\n"}, nil, inContainer, OK, "shared"},
		{"files", nil, nil, openFiles, OK, "unlimited"},
		{"few files", nil, func(m *Machine) { m.Limit = func(int) (uint64, error) { return 1024, nil } }, openFiles, Warn, "LimitNOFILE"},
		{"memlock", nil, func(m *Machine) { m.Limit = func(int) (uint64, error) { return 64 << 10, nil } }, memlock, Warn, "ulimit -l"},
		{"memlock is enough", nil, nil, memlock, OK, "unlimited"},
		{"processes", nil, nil, processes, OK, "no limit"},
		{"few processes", map[string]string{"proc/self/cgroup": cgroupV1, "sys/fs/cgroup/pids/pids.max": "300", "sys/fs/cgroup/pids/pids.current": "100"}, nil, processes, Warn, "200"},
		{"processes of v2", map[string]string{"proc/self/cgroup": cgroupV2, "sys/fs/cgroup/kubepods/pod1/pids.max": "max", "sys/fs/cgroup/kubepods/pids.max": "10000", "sys/fs/cgroup/kubepods/pids.current": "4"}, nil, processes, OK, "9,996"},
		{"memory", map[string]string{"proc/meminfo": meminfo}, nil, memory2, OK, "16 GiB"},
		{"no meminfo", nil, nil, memory2, Skipped, "meminfo"},
		{"too little memory", map[string]string{"proc/meminfo": meminfo, "proc/self/cgroup": cgroupV2, "sys/fs/cgroup/kubepods/pod1/memory.max": "1073741824", "sys/fs/cgroup/kubepods/pod1/memory.current": "1000"}, nil, memory2, Fail, "--memory 512MiB"},
		{"limit above", map[string]string{"proc/meminfo": meminfo, "proc/self/cgroup": cgroupV2, "sys/fs/cgroup/kubepods/pod1/memory.max": "max", "sys/fs/cgroup/memory.max": "1073741824"}, nil, memory2, Fail, "--memory 512MiB"},
		{"little memory of v1", map[string]string{"proc/meminfo": meminfo, "proc/self/cgroup": cgroupV1, "sys/fs/cgroup/memory/memory.limit_in_bytes": "2500000000", "sys/fs/cgroup/memory/memory.usage_in_bytes": "5"}, nil, memory2, Warn, "leaves little"},
		{"v1 without a limit", map[string]string{"proc/meminfo": meminfo, "proc/self/cgroup": cgroupV1, "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712"}, nil, memory2, OK, "no cgroup limit"},
		{"killed before", map[string]string{"proc/meminfo": meminfo, "proc/self/cgroup": cgroupV2, "sys/fs/cgroup/kubepods/pod1/memory.events": "low 0\noom_kill 3\n"}, nil, memory2, Warn, "killed 3"},
		{"cpu", nil, nil, cpu4, OK, "4 cores, no quota"},
		{"quota", map[string]string{"proc/self/cgroup": cgroupV2, "sys/fs/cgroup/kubepods/pod1/cpu.max": "250000 100000"}, nil, cpu4, OK, "2.50"},
		{"half a core", map[string]string{"proc/self/cgroup": cgroupV1, "sys/fs/cgroup/cpu/docker/abc/cpu.cfs_quota_us": "50000", "sys/fs/cgroup/cpu/docker/abc/cpu.cfs_period_us": "100000"}, nil, cpu4, Warn, "0.50"},
		{"throttled", map[string]string{"proc/self/cgroup": cgroupV2, "sys/fs/cgroup/kubepods/pod1/cpu.max": "400000 100000", "sys/fs/cgroup/kubepods/pod1/cpu.stat": "usage_usec 1\nnr_periods 1000\nnr_throttled 300\n"}, nil, cpu4, Warn, "30.0%"},
		{"throttled seldom", map[string]string{"proc/self/cgroup": cgroupV2, "sys/fs/cgroup/kubepods/pod1/cpu.stat": "nr_periods 1000\nnr_throttled 3\n"}, nil, cpu4, OK, "0.3%"},
		{"load", map[string]string{"proc/loadavg": "3.1 2 1 1/2 3\n"}, nil, load4, OK, "3.1"},
		{"busy", map[string]string{"proc/loadavg": "30.1 2 1 1/2 3\n"}, nil, load4, Warn, "top"},
		{"empty loadavg", map[string]string{"proc/loadavg": ""}, nil, load4, Skipped, ""},
		{"no GPU", nil, nil, gpuDriver, Skipped, "no NVIDIA GPU"},
		{"GPU without a driver", map[string]string{"dev/nvidia0": ""}, nil, gpuDriver, Warn, "modprobe nvidia"},
		{"driver without a GPU", map[string]string{"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15\n"}, nil, gpuDriver, Warn, "--gpus all"},
		{"GPU", map[string]string{"dev/nvidia0": "", "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15\nGCC"}, nil, gpuDriver, OK, "550.54.15; /dev/nvidia0"},
		{"GPU of others", map[string]string{"dev/nvidia0": "", "proc/driver/nvidia/version": "NVRM version: x\n"}, func(m *Machine) { m.OpenRW = func(string) error { return unix.EACCES } }, gpuDriver, Fail, "/dev/nvidia0"},
		{"GPU without libcuda", map[string]string{"dev/nvidia0": ""}, nil, libcuda, Fail, "NVIDIA_DRIVER_CAPABILITIES"},
		{"libcuda", map[string]string{"usr/lib64/libcuda.so.1": ""}, nil, libcuda, OK, "/usr/lib64/libcuda.so.1"},
		{"MPS", map[string]string{"dev/nvidia0": "", "tmp/nvidia-mps/control": ""}, nil, mps, OK, "MPS control daemon at /tmp/nvidia-mps"},
		{"no MPS", map[string]string{"dev/nvidia0": ""}, nil, mps, OK, "no MPS"},
		{"nvidia-smi fails", map[string]string{"dev/nvidia0": ""}, func(m *Machine) { m.LookPath = found }, devices, Fail, "no such program"},
		{"nvidia-smi", nil, func(m *Machine) {
			m.LookPath = found
			m.Command = printing("NVIDIA H200, 143771 MiB, 3 %, Default, 5, 16\n")
		}, devices, OK, "H200 143771 MiB, 3 % busy, PCIe 5 x16"},
		{"exclusive", nil, func(m *Machine) {
			m.LookPath = found
			m.Command = printing("NVIDIA A10, 2 MiB, 3 %, Exclusive_Process, 4, 8\n")
		}, devices, OK, "MPS"},
		{"no Python", nil, nil, pythonOf, Skipped, "no such program"},
		{"Python", nil, func(m *Machine) {
			m.Command = printing(`{"python":"3.11.2","executable":"/usr/bin/python3","numpy":"1.24.2","grpcio":"1.51.1","torch":"1.13.1"}`)
		}, pythonOf, OK, "torch 1.13.1"},
		{"bare Python", nil, func(m *Machine) {
			m.Command = printing(`{"python":"3.11.2","executable":"/opt/p","numpy":"1.24.2"}`)
		}, pythonOf, Warn, "/opt/p -m pip install grpcio"},
		{"old Python", nil, func(m *Machine) {
			m.Command = printing(`{"python":"3.7.2","executable":"/opt/p","numpy":"1.24.2","grpcio":"1.51.1"}`)
		}, pythonOf, Warn, "python 3.7.2 (needs 3.9)"},
		{"odd Python", nil, func(m *Machine) { m.Command = printing(`hello`) }, pythonOf, Skipped, "not JSON"},
		{"ext4", nil, nil, filesystemOf, OK, "ext4"},
		{"NFS", nil, func(m *Machine) {
			m.Statfs = func(string) (unix.Statfs_t, error) { return unix.Statfs_t{Type: unix.NFS_SUPER_MAGIC}, nil }
		}, filesystemOf, Warn, "across the network"},
		{"overlay", nil, func(m *Machine) {
			m.Statfs = func(string) (unix.Statfs_t, error) { return unix.Statfs_t{Type: unix.OVERLAYFS_SUPER_MAGIC}, nil }
		}, filesystemOf, Warn, "emptyDir"},
		{"CIFS", nil, func(m *Machine) {
			m.Statfs = func(string) (unix.Statfs_t, error) { return unix.Statfs_t{Type: unix.CIFS_SUPER_MAGIC}, nil }
		}, filesystemOf, Warn, "CIFS"},
		{"unknown", nil, func(m *Machine) {
			m.Statfs = func(string) (unix.Statfs_t, error) { return unix.Statfs_t{Type: 0x1234}, nil }
		}, filesystemOf, OK, "0x1234"},
		{"room", nil, nil, spaceOf, OK, "4.0 TiB free"},
		{"little room", nil, free(10 << 30), spaceOf, Warn, "--cache-size 9216MiB"},
		{"no room", nil, free(1 << 20), spaceOf, Fail, "free space"},
		{"no inodes", nil, func(m *Machine) {
			m.Statfs = func(string) (unix.Statfs_t, error) {
				return unix.Statfs_t{Bsize: 4096, Bavail: 1 << 30, Files: 1000, Ffree: 3}, nil
			}
		}, spaceOf, Fail, "df -i"},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := fake(t, c.files)
			if c.change != nil {
				c.change(&m)
			}
			r := c.check(m.fill())
			if r.Status != c.status || !strings.Contains(r.Measured+"|"+r.Meaning+"|"+r.Remedy, c.word) {
				t.Errorf("%+v, want %s and %q", r, c.status, c.word)
			}
			if (r.Status == Fail || r.Status == Warn) && (r.Measured == "" || r.Meaning == "" || r.Remedy == "") {
				t.Errorf("it does not name all of thing, meaning and remedy: %+v", r)
			}
		})
	}
}

func inContainer(m *Machine) Result  { return fuseContainer(m, "/mnt/data") }
func memory2(m *Machine) Result      { return memory(m, 2<<30) }
func cpu4(m *Machine) Result         { return cpu(m, 4) }
func load4(m *Machine) Result        { return load(m, 4) }
func devices(m *Machine) Result      { return gpuDevices(context.Background(), m) }
func pythonOf(m *Machine) Result     { return python(context.Background(), m, "") }
func filesystemOf(m *Machine) Result { return filesystem(m, os.TempDir()) }
func spaceOf(m *Machine) Result      { return space(m, m.Root, 20<<30) }

func found(name string) (string, error) { return "/usr/bin/" + name, nil }

func printing(text string) func(context.Context, string, ...string) (string, error) {
	return func(context.Context, string, ...string) (string, error) { return text, nil }
}

func free(n uint64) func(m *Machine) {
	return func(m *Machine) {
		m.Statfs = func(string) (unix.Statfs_t, error) { return unix.Statfs_t{Bsize: 4096, Bavail: n / 4096}, nil }
	}
}

func TestDeadMounts(t *testing.T) {
	m := fake(t, map[string]string{"proc/self/mountinfo": `1 0 8:1 / / rw - ext4 /dev/sda rw
2 1 0:5 / /mnt/live rw - fuse.shoal s3://b/p/ rw
3 1 0:6 / /mnt/de\040ad rw - fuse.shoal s3://b/p/ rw
4 1 0:7 / /mnt/other rw - fuse.sshfs x rw
`, "mnt/live/x": ""})
	r := liveMounts(t.Context(), m.fill())
	if r.Status != Fail || !strings.Contains(r.Remedy, "fusermount3 -uz /mnt/de ad") {
		t.Errorf("%+v", r)
	}
	if err := os.MkdirAll(filepath.Join(m.Root, "mnt/de ad"), 0o755); err != nil {
		t.Fatal(err)
	}
	if r := liveMounts(t.Context(), m.fill()); r.Status != OK || !strings.Contains(r.Measured, "2 of") {
		t.Errorf("%+v", r)
	}
}

func TestCacheDirectory(t *testing.T) {
	m := fake(t, nil)
	m.UID = os.Getuid
	dir := filepath.Join(t.TempDir(), "cache")
	is := func(r Result, status Status, word string) {
		t.Helper()
		if r.Status != status || !strings.Contains(r.Measured+"|"+r.Meaning+"|"+r.Remedy, word) {
			t.Errorf("%+v, want %s and %q", r, status, word)
		}
	}
	is(cacheDirectory(m.fill(), dir), OK, "will be created")
	is(cacheContents(dir), OK, "nothing")
	is(cacheDaemon(m.fill(), dir), OK, "no daemon has ever")
	if err := os.MkdirAll(filepath.Join(dir, "segments", "ab"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "segments", "ab", "1.seg"), make([]byte, 2048), 0o600); err != nil {
		t.Fatal(err)
	}
	is(cacheContents(dir), OK, "2.0 KiB in 1 segments")
	if err := os.Chmod(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	is(cacheDirectory(m.fill(), dir), Warn, "chmod 700")
	file := filepath.Join(dir, "lock")
	lock, err := os.Create(file)
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	is(cacheDirectory(m.fill(), file), Fail, "is a file")

	m.Root = "" // the kernel's own list of locks
	is(cacheDaemon(m.fill(), dir), OK, "no daemon owns it now")
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	is(cacheDaemon(m.fill(), dir), Warn, "does not listen")
	m.Dial = func(string) error { return nil }
	is(cacheDaemon(m.fill(), dir), OK, "others can attach")
}

func TestDiskSpeedLeavesNothing(t *testing.T) {
	dir := t.TempDir()
	for _, window := range []time.Duration{50 * time.Millisecond, 0} { // 0: the machine was busy with others
		r := diskSpeed(t.Context(), dir, window)
		if r.Status != OK && r.Status != Warn || r.Values["random_reads_per_second"] <= 0 || r.Values["write_bytes_per_second"] <= 0 {
			t.Errorf("in %s: %+v", window, r)
		}
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
	if r := diskSpeed(t.Context(), "/proc/self", 50*time.Millisecond); r.Status != Fail {
		t.Errorf("a folder that takes no files: %+v", r)
	}
}

// TestRunIsBounded: a check that hangs is given up, and the others go on.
func TestRunIsBounded(t *testing.T) {
	block := make(chan struct{})
	defer close(block)
	hangs := Check{Area: "a", Name: "hangs", Takes: -990 * time.Millisecond, Run: func(context.Context) Result { <-block; return ok("late") }}
	late := Check{Area: "a", Name: "waits", Takes: -990 * time.Millisecond, Run: func(ctx context.Context) Result { <-ctx.Done(); return ok("in the end") }}
	fails := Check{Area: "b", Name: "fails", Run: func(context.Context) Result { return ok("x").because(Fail, "y", "z") }}
	told := 0
	r, err := Run(t.Context(), []Check{hangs, late, fails}, func(Check) func(Result) { return func(Result) { told++ } })
	if err != nil || told != 3 || r.Fail != 2 || r.OK != 1 || len(r.Results) != 3 {
		t.Fatalf("%+v, %v, told %d times", r, err, told)
	}
	if r.Results[0].Status != Fail || r.Results[1].Measured != "in the end" {
		t.Errorf("%+v", r.Results)
	}
	if err := r.Failed(); err == nil || !strings.Contains(err.Error(), "2 checks failed") || !strings.Contains(err.Error(), "a/hangs") {
		t.Error(err)
	}
	var text strings.Builder
	if err := r.Print(&text); err != nil || !strings.Contains(text.String(), "-> z") || !strings.Contains(text.String(), "1 ok, 0 warnings, 2 failed, 0 skipped") {
		t.Errorf("%v\n%s", err, text.String())
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Run(ctx, []Check{fails}, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("an end from outside: %v", err)
	}
}

// TestSchema holds docs/doctor.md's names.
func TestSchema(t *testing.T) {
	var r Report
	r.Version = Version
	r.add(ok("m").with("v", 1).because(Warn, "why", "do"))
	b, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{`"version":1`, `"ok":0`, `"warn":1`, `"fail":0`, `"skipped":0`, `"results":[{"area":`, `"check":`, `"status":"warn"`, `"measured":"m"`, `"meaning":"why"`, `"remedy":"do"`, `"values":{"v":1}`, `"seconds":`} {
		if !strings.Contains(string(b), name) {
			t.Errorf("%s lacks %s", b, name)
		}
	}
}

// TestHere runs all checks of the machine on this one: whatever they find, none of them panics or lacks a word.
func TestHere(t *testing.T) {
	checks := Checks(Options{CacheDir: t.TempDir(), CacheSize: 1 << 30, Memory: 1 << 30, Quick: true, ShoalVersion: "test"})
	r, err := Run(t.Context(), checks, nil)
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Results) != len(checks) || len(checks) < 20 {
		t.Errorf("%d results of %d checks", len(r.Results), len(checks))
	}
	for _, c := range r.Results {
		if c.Measured == "" && c.Meaning == "" || c.Status == "" {
			t.Errorf("%+v", c)
		}
	}
}
