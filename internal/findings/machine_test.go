package findings

import (
	"errors"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/internal/machine"
)

// sound is a machine with which nothing is wrong.
func sound() *Site {
	return &Site{Machine: Machine{
		Limits: Limits{Memory: machine.Memory{Total: 16 << 30, Available: 8 << 30}, Want: 2 << 30, Cores: 4, Load: 3.1},
		Disk: Disk{Dir: "/nvme", Type: unix.EXT4_SUPER_MAGIC, Room: 1 << 40, Want: 20 << 30, Direct: true, Write: 1e9,
			Random: 1e9},
	}}
}

// said gives what one rule says.
func said(t testing.TB, code string, facts *Site) Finding {
	t.Helper()
	for _, r := range SiteRules {
		if r.Code == code {
			f := r.Of(facts)
			if f.Thing == "" || (f.Level == Fail || f.Level == Warn) && (f.Cause == "" || f.Remedy == "") {
				t.Errorf("it does not name all of thing, cause and remedy: %+v", f)
			}
			return f
		}
	}
	t.Fatalf("no rule %s", code)
	return Finding{}
}

func (f Finding) is(t testing.TB, level Level, word string) {
	t.Helper()
	if f.Level != level || !strings.Contains(f.Thing+"|"+f.Cause+"|"+f.Remedy, word) {
		t.Errorf("%+v, want %s and %q", f, level, word)
	}
}

func TestMachine(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(m *Site)
		code   string
		level  Level
		word   string
	}{
		{"fuse", nil, "fuse/device", OK, "/dev/fuse"},
		{"no fuse", func(m *Site) {
			m.Device = errors.New("/dev/fuse: no such device (load the kernel module: modprobe fuse)")
		}, "fuse/device", Fail, "|load the kernel module: modprobe fuse"},
		{"odd fuse", func(m *Site) { m.Device = unix.EIO }, "fuse/device", Fail, "|dmesg | tail"},
		{"dead mount", func(m *Site) { m.Live, m.Dead = []string{"/a"}, []string{"/mnt/de ad"} }, "fuse/mounts", Fail,
			`shoal umount --lazy /mnt/de\ ad`},
		{"mounts stay in the container", func(m *Site) { m.Private = true }, "fuse/mounts", Warn,
			"|mountPropagation: Bidirectional"},
		{"live mounts", func(m *Site) { m.Live = []string{"/a", "/b"} }, "fuse/mounts", OK, "2 of"},
		{"limits", nil, "limits/machine", OK, "4 cores, load 3.1; 16 GiB, 8.0 GiB available"},
		{"too little memory", func(m *Site) { m.Limits.Memory.Available = 1 << 30 }, "limits/machine", Fail,
			"--memory 512MiB"},
		{"half a core", func(m *Site) { m.Limits.Quota = 0.5 }, "limits/machine", Warn, "0.50"},
		{"throttled", func(m *Site) {
			m.Limits.Periods, m.Limits.Throttled = 1000, 300
		}, "limits/machine", Warn, "30.0%"},
		{"throttled seldom", func(m *Site) {
			m.Limits.Periods, m.Limits.Throttled = 1000, 3
		}, "limits/machine", OK, "0.3%"},
		{"busy", func(m *Site) { m.Limits.Load = 30.1 }, "limits/machine", Warn, "top"},
		{"ext4", nil, "disk/filesystem", OK, "ext4 at /nvme, with room for 1.0 TiB"},
		{"CIFS", func(m *Site) { m.Disk.Type = unix.CIFS_SUPER_MAGIC }, "disk/filesystem", Warn, "across the network"},
		{"overlay", func(m *Site) { m.Disk.Type = unix.OVERLAYFS_SUPER_MAGIC }, "disk/filesystem", Warn, "emptyDir"},
		{"unknown", func(m *Site) { m.Disk.Type = 0x1234 }, "disk/filesystem", OK, "0x1234"},
		{"little room", func(m *Site) { m.Disk.Room = 10 << 30 }, "disk/filesystem", Warn, "--cache-size 9216MiB"},
		{"no room", func(m *Site) { m.Disk.Room = 1 << 20 }, "disk/filesystem", Fail, "free space"},
		{"fast", nil, "disk/speed", OK, "writes 1.0 GB/s"},
		{"no O_DIRECT", func(m *Site) { m.Disk.Direct = false }, "disk/speed", OK, "O_DIRECT"},
		{"slow at random", func(m *Site) { m.Disk.Random = 10e6 }, "disk/speed", Warn, "76 of 128 KiB"},
		{"slow to write", func(m *Site) { m.Disk.Write = 10e6 }, "disk/speed", Warn, "NVMe"},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := sound()
			if c.change != nil {
				c.change(m)
			}
			said(t, c.code, m).is(t, c.level, c.word)
		})
	}
}
