package main

import (
	"strings"
	"testing"

	"github.com/shoalfs/shoal/internal/machine"
)

func TestChooseMount(t *testing.T) {
	one := []machine.Mount{{Source: "s", Point: "/a"}}
	two := append(one[:1:1], machine.Mount{Source: "t", Point: "/b"})
	for _, c := range []struct {
		mounts []machine.Mount
		ask    bool
		typed  string
		want   string
		err    string
	}{
		{one, false, "", "/a", ""},
		{two, false, "", "", "2 mounts found; name one (/a, /b)"},
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
