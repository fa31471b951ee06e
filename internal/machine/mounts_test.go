package machine

import (
	"slices"
	"testing"
)

func TestParseMounts(t *testing.T) {
	for _, tc := range []struct {
		line string
		want []Mount
	}{
		{"36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue",
			[]Mount{{"98:0", "/mnt1", "/mnt2", "ext3", "/dev/root", "rw,errors=continue", false}}},
		{`61 28 0:52 / /mnt/a\040b rw,nosuid shared:7 - fuse.shoal s3://x/a\134b\011 rw`,
			[]Mount{{"0:52", "/", "/mnt/a b", "fuse.shoal", "s3://x/a\\b\t", "rw", true}}},
		{`61 28 0:52 / /mnt/end\0 rw - tmpfs none rw`,
			[]Mount{{"0:52", "/", `/mnt/end\0`, "tmpfs", "none", "rw", false}}},
		{"", nil},
		{"36 35 98:0 - ext3 /dev/root rw", nil},
	} {
		if got := parseMounts(tc.line); !slices.Equal(got, tc.want) {
			t.Errorf("%q: %+v", tc.line, got)
		}
	}
}

func FuzzParseMounts(f *testing.F) {
	f.Add(`61 28 0:52 / /mnt/a\040b rw,nosuid - fuse.shoal s3://x/a\134b\011 rw`)
	f.Fuzz(func(t *testing.T, text string) {
		for _, m := range parseMounts(text) {
			if m.Point == "" || m.Type == "" {
				t.Errorf("%q: %+v", text, m)
			}
		}
	})
}
