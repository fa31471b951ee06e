package main

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/shoalfs/shoal/cache/cachedir"
	"github.com/shoalfs/shoal/internal/machine"
)

func TestAmount(t *testing.T) {
	for text, want := range map[string]string{
		"2GiB": "2.0 GiB", "1.5GB": "1.4 GiB", "auto": "auto", "80%": "80%", "12.5%": "12.5%", "100%": "100%",
		"0": "0 B", "0.0": "0 B", "1048576": "1.0 MiB", "10B": "10 B", "10": "", "2048": "", "1e3": "",
		"0%": "", "101%": "", "-5%": "", "nan%": "", "%": "", "much": "", "": "", "auto%": "", "1,5GB": "",
	} {
		a := amount{bytes: 5}
		err := a.Set(text)
		if (err == nil) != (want != "") || err == nil && a.String() != want {
			t.Errorf("%q is %s, %v; want %s", text, a.String(), err, want)
		}
		if err != nil && a.bytes != 5 {
			t.Errorf("%q has changed the value", text)
		}
	}
}

func TestMemoryLimits(t *testing.T) {
	const gib = 1 << 30
	free := machine.Memory{Total: 16 * gib, Available: 8 * gib}
	boxed := machine.Memory{Total: 16 * gib, Limit: gib, From: "/sys/fs/cgroup/memory.max", Available: gib}
	roomy := machine.Memory{Total: 16 * gib, Limit: 8 * gib, From: "/sys/fs/cgroup/memory.max", Available: gib}
	small := machine.Memory{Total: 16 * gib, Limit: 128 << 20, From: "/sys/fs/cgroup/memory.max", Available: gib}
	tiny := machine.Memory{Total: 16 * gib, Limit: 64 << 20, From: "/sys/fs/cgroup/memory.max", Available: gib}
	for _, tc := range []struct {
		flag string // "" is the default of 2 GiB
		m    machine.Memory
		want float64 // GiB; 0 for an error
		says string
	}{
		{"", free, 2, ""},
		{"", roomy, 2, ""},
		{"", boxed, 0.8, "WARN --memory is set below its default"},
		{"", machine.Memory{Total: gib}, 0.8, "WARN --memory is set below its default"},
		{"", machine.Memory{}, 2, ""},
		{"", small, float64(cachedir.LeastMemory) / gib, "WARN"}, // 80% would be too little
		{"", tiny, 0, "/sys/fs/cgroup/memory.max allows 64 MiB of memory, and Shoal needs 107MiB (raise the " +
			"container's limit)"},
		{"auto", free, 4, "INFO --memory auto"},
		{"auto", boxed, 0.8, "INFO --memory auto"},
		{"auto", roomy, 6.4, "INFO --memory auto"},
		{"auto", tiny, 0, "allows 64 MiB"},
		{"auto", machine.Memory{}, 0, "the kernel reports neither"},
		{"50%", free, 8, "INFO --memory 50%"},
		{"50%", roomy, 4, "INFO --memory 50%"},
		{"1%", boxed, float64(cachedir.LeastMemory) / gib, "INFO"},
		{"512MiB", boxed, 0.5, ""},
		{"2GiB", boxed, 2, "WARN --memory exceeds the limit"},
		{"16GiB", free, 16, ""},
		{"1024GiB", free, 1024, "WARN --memory exceeds the limit at which the kernel kills the daemon: give less, or " +
			"auto [memory 1.0 TiB limit 16 GiB of the machine]"},
		{"1024GiB", machine.Memory{}, 1024, ""},
	} {
		a := amount{bytes: 2 * gib}
		if tc.flag != "" {
			if err := a.Set(tc.flag); err != nil {
				t.Fatal(err)
			}
		}
		n, remarks, err := a.memory(tc.m)
		said := ""
		if err != nil {
			said = err.Error()
		}
		for _, r := range remarks {
			said += fmt.Sprint(r.level, " ", r.text, " ", r.args)
		}
		if (err == nil) != (tc.want > 0) || err == nil && n != int64(tc.want*gib) || !strings.Contains(said, tc.says) ||
			tc.says == "" && said != "" {
			t.Errorf("--memory %q on %+v is %d, want %.2f GiB; says %q, %v", tc.flag, tc.m, n, tc.want, said, err)
		}
	}
}

func TestDiskLimits(t *testing.T) {
	for _, tc := range []struct {
		flag string // "" is the default of 20 GiB
		room int64
		want int64 // 0 for an error
		says string
	}{
		{"", 1000, 20 << 30, ""},
		{"", -1, 20 << 30, ""},
		{"auto", 1000, 800, "INFO --cache-size auto"},
		{"50%", 1000, 500, "INFO --cache-size 50%"},
		{"100%", 1000, 1000, "INFO"},
		{"1GiB", 2 << 30, 1 << 30, ""},
		{"1GiB", 1000, 1 << 30, "WARN --cache-size is more than its file system has room for"},
		{"1GiB", -1, 1 << 30, ""},
		{"auto", -1, 0, "--cache-size auto: no such disk (give a size)"},
	} {
		a := amount{bytes: 20 << 30}
		if tc.flag != "" {
			if err := a.Set(tc.flag); err != nil {
				t.Fatal(err)
			}
		}
		n, remarks, err := a.disk("/dir", func(string) (int64, error) {
			if tc.room < 0 {
				return 0, errors.New("no such disk")
			}
			return tc.room, nil
		})
		said := ""
		if err != nil {
			said = err.Error()
		}
		for _, r := range remarks {
			said += fmt.Sprint(r.level, " ", r.text, " ", r.args)
		}
		if (err == nil) != (tc.want > 0) || err == nil && n != tc.want || !strings.Contains(said, tc.says) ||
			tc.says == "" && said != "" {
			t.Errorf("--cache-size %q with room for %d is %d, want %d; says %q, %v",
				tc.flag, tc.room, n, tc.want, said, err)
		}
	}
}
