package main

import (
	"slices"
	"testing"
)

// The command finds its modules where it does without Shoal. A last folder that is empty is the current one.
func TestRunHandsOnThePath(t *testing.T) {
	for own, want := range map[string]string{"": "/c/shoal/_site", "/x": "/c/shoal/_site:/x",
		"/x:": "/c/shoal/_site:/x:", ":": "/c/shoal/_site::"} {
		t.Setenv("PYTHONPATH", own)
		if env := withHints(nil, "/c", "", false); !slices.Contains(env, "PYTHONPATH="+want) {
			t.Errorf("%q: %q", own, env)
		}
	}
}
