package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestShoalMounts(t *testing.T) {
	table := filepath.Join(t.TempDir(), "mounts")
	text := `proc /proc proc rw 0 0
s3://a/train /mnt/a fuse.shoal rw,nosuid 0 0
shoal /mnt/other ext4 rw 0 0
file:///my\040data /mnt/two\040words\134x fuse.shoal rw 0 0
`
	if err := os.WriteFile(table, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	got, err := shoalMounts(table)
	want := []shoalMount{{"s3://a/train", "/mnt/a"}, {"file:///my data", `/mnt/two words\x`}}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("%q, %v", got, err)
	}
}

func TestChooseMount(t *testing.T) {
	one, two := []shoalMount{{"s", "/a"}}, []shoalMount{{"s", "/a"}, {"t", "/b"}}
	for _, c := range []struct {
		mounts []shoalMount
		ask    bool
		typed  string
		want   string
		err    string
	}{
		{one, false, "", "/a", ""},
		{two, false, "", "", "there are 2 mounts (give one of /a, /b)"},
		{two, true, "2\n", "/b", ""},
		{two, true, "3\n", "", "is none of 1 to 2"},
		{two, true, "", "", "no answer"},
	} {
		var out strings.Builder
		got, err := chooseMount(c.mounts, c.ask, strings.NewReader(c.typed), &out)
		if got != c.want || (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
			t.Errorf("%+v: %q, %v", c, got, err)
		}
	}
}
