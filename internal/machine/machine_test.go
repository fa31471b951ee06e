package machine

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// lay writes the files of a made-up machine.
func lay(t *testing.T, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	for name, text := range files {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

const (
	gib     = 1 << 30
	meminfo = "MemTotal:       16777216 kB\nMemFree:  100 kB\nMemAvailable:    8388608 kB\n" // 16 GiB, 8 GiB
	v2      = "25 21 0:22 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
	v1      = "36 32 0:33 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n37 32 0:34 / /sys/fs/cgroup/cpu rw - " +
		"cgroup cgroup rw,cpu,cpuacct\n"
)

func TestMemory(t *testing.T) {
	for _, tc := range []struct {
		name  string
		files map[string]string
		want  Memory
	}{
		{"a bare machine", map[string]string{"proc/meminfo": meminfo}, Memory{16 * gib, 0, "", 8 * gib}},
		{"nothing is told", nil, Memory{0, 0, "", 1 << 62}},
		{"version 2, in a namespace of its own", map[string]string{
			"proc/meminfo": meminfo, "proc/self/cgroup": "0::/\n", "proc/self/mountinfo": v2,
			"sys/fs/cgroup/memory.max": "1073741824\n", "sys/fs/cgroup/memory.current": "700000000\n",
			"sys/fs/cgroup/memory.stat": "anon 1\nfile 600000000\nactive_file 100000000\ninactive_file 400000000\n",
		}, Memory{16 * gib, gib, "/sys/fs/cgroup/memory.max", gib - 200000000}},
		{"version 2, nested, a parent is less", map[string]string{
			"proc/meminfo": meminfo, "proc/self/cgroup": "0::/kubepods/pod1/box\n", "proc/self/mountinfo": v2,
			"sys/fs/cgroup/kubepods/pod1/box/memory.max": "max\n",
			"sys/fs/cgroup/kubepods/pod1/memory.max":     "3221225472\n",
			"sys/fs/cgroup/kubepods/memory.max":          "8589934592\n",
		}, Memory{16 * gib, 3 * gib, "/sys/fs/cgroup/kubepods/pod1/memory.max", 3 * gib}},
		{"version 2, none", map[string]string{
			"proc/meminfo": meminfo, "proc/self/cgroup": "0::/user.slice\n", "proc/self/mountinfo": v2,
			"sys/fs/cgroup/user.slice/memory.max": "max\n",
		}, Memory{16 * gib, 0, "", 8 * gib}},
		{"version 2, high is less than max", map[string]string{
			"proc/meminfo": meminfo, "proc/self/cgroup": "0::/\n", "proc/self/mountinfo": v2,
			"sys/fs/cgroup/memory.max": "4294967296\n", "sys/fs/cgroup/memory.high": "2147483648\n",
		}, Memory{16 * gib, 2 * gib, "/sys/fs/cgroup/memory.high", 2 * gib}},
		{"version 2, seen from a namespace below", map[string]string{
			"proc/meminfo": meminfo, "proc/self/cgroup": "0::/../other\n", "proc/self/mountinfo": v2,
			"sys/fs/cgroup/memory.max": "2147483648\n",
		}, Memory{16 * gib, 2 * gib, "/sys/fs/cgroup/memory.max", 2 * gib}},
		{"version 1, the machine's path, the container's mount", map[string]string{
			"proc/meminfo": meminfo, "proc/self/cgroup": "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/\n",
			"proc/self/mountinfo":                               strings.Replace(v1, "0:33 / ", "0:33 /docker/abc ", 1),
			"sys/fs/cgroup/memory/memory.limit_in_bytes":        "536870912\n",
			"sys/fs/cgroup/memory/memory.usage_in_bytes":        "100000000\n",
			"sys/fs/cgroup/memory/memory.stat":                  "total_inactive_file 60000000\n",
			"sys/fs/cgroup/memory/docker/memory.limit_in_bytes": "1\n",
		}, Memory{16 * gib, gib / 2, "/sys/fs/cgroup/memory/memory.limit_in_bytes", gib/2 - 40000000}},
		{"version 1, nested", map[string]string{
			"proc/meminfo": meminfo, "proc/self/cgroup": "4:memory:/a/b\n", "proc/self/mountinfo": v1,
			"sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": "9223372036854771712\n",
			"sys/fs/cgroup/memory/a/memory.limit_in_bytes":   "2147483648\n",
			"sys/fs/cgroup/memory/memory.limit_in_bytes":     "9223372036854771712\n",
		}, Memory{16 * gib, 2 * gib, "/sys/fs/cgroup/memory/a/memory.limit_in_bytes", 2 * gib}},
		{"both versions", map[string]string{
			"proc/meminfo": meminfo, "proc/self/cgroup": "4:memory:/a\n0::/u\n",
			"proc/self/mountinfo": v1 +
				strings.Replace(v2, "/sys/fs/cgroup", "/sys/fs/cgroup/unified", 1),
			"sys/fs/cgroup/memory/a/memory.limit_in_bytes": "4294967296\n",
			"sys/fs/cgroup/unified/u/memory.max":           "5368709120\n",
		}, Memory{16 * gib, 4 * gib, "/sys/fs/cgroup/memory/a/memory.limit_in_bytes", 4 * gib}},
		{"more than the machine has", map[string]string{
			"proc/meminfo": meminfo, "proc/self/cgroup": "0::/\n", "proc/self/mountinfo": v2,
			"sys/fs/cgroup/memory.max": "99999999999999\n",
		}, Memory{16 * gib, 0, "", 8 * gib}},
		{"a mount with a space", map[string]string{
			"proc/meminfo": meminfo, "proc/self/cgroup": "0::/\n",
			"proc/self/mountinfo": strings.Replace(v2, "/sys/fs/cgroup", `/cg\040x`, 1),
			"cg x/memory.max":     "1073741824\n",
		}, Memory{16 * gib, gib, "/cg x/memory.max", gib}},
		{"nonsense", map[string]string{"proc/meminfo": "MemTotal: x\n", "proc/self/cgroup": "x\n\n:",
			"proc/self/mountinfo": "x - y\n\n1 2 3 / /a - cgroup2 a b"}, Memory{0, 0, "", 1 << 62}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if got := readMemory(lay(t, tc.files)); got != tc.want {
				t.Errorf("%+v, want %+v", got, tc.want)
			}
		})
	}
}

// The machine that the test runs on has memory, and this test fits it.
func TestThisMachine(t *testing.T) {
	m := ReadMemory()
	if m.Total < 64<<20 || m.Most() > m.Total || m.Available <= 0 || m.Available > m.Total {
		t.Errorf("%+v", m)
	}
}

func TestRoom(t *testing.T) {
	dir := t.TempDir()
	if _, err := Room(filepath.Join(dir, "not", "yet")); err != nil {
		t.Error(err)
	}
	if n, err := Room(dir); err != nil || n <= 0 {
		t.Errorf("%d, %v", n, err)
	}
	f, err := os.Create(filepath.Join(dir, "file"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for i := range 1 << 10 { // not zeros, which some file systems do not store
		if _, err := f.WriteString(strings.Repeat(string(rune('a'+i%26)), 1<<10)); err != nil {
			t.Fatal(err)
		}
	}
	if err := f.Sync(); err != nil {
		t.Fatal(err)
	}
	if n := taken(dir); n < 1<<18 { // some compress
		t.Errorf("%d bytes are taken by 1 MiB", n)
	}
}

func TestCPUQuota(t *testing.T) {
	for _, tc := range []struct {
		name  string
		files map[string]string
		want  float64
	}{
		{"nothing is told", nil, 0},
		{"version 2, none", map[string]string{"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": v2,
			"sys/fs/cgroup/cpu.max": "max 100000\n"}, 0},
		{"version 2, a parent has less", map[string]string{
			"proc/self/cgroup": "0::/pod/box\n", "proc/self/mountinfo": v2,
			"sys/fs/cgroup/pod/box/cpu.max": "400000 100000\n", "sys/fs/cgroup/pod/cpu.max": "150000 100000\n",
		}, 1.5},
		{"version 1", map[string]string{
			"proc/self/cgroup": "5:cpu,cpuacct:/a\n0::/\n", "proc/self/mountinfo": v1,
			"sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "50000\n", "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000\n",
			"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
		}, 0.5},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if got := CPUQuota(lay(t, tc.files)); got != tc.want {
				t.Errorf("%v, want %v", got, tc.want)
			}
		})
	}
}
