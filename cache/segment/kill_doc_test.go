package segment

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// killpoints returns the points that doc.go lists.
func killpoints(t *testing.T) []string {
	t.Helper()
	doc, err := os.ReadFile("doc.go")
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, m := range regexp.MustCompile(`(?m)^//\t(segment\.[a-z]+\.[a-z]+) `).FindAllStringSubmatch(string(doc), -1) {
		names = append(names, m[1])
	}
	return names
}

// TestKillpointsAreListed compares the package comment with the code.
func TestKillpointsAreListed(t *testing.T) {
	entries, err := os.ReadDir(".")
	if err != nil {
		t.Fatal(err)
	}
	var passed []string
	for _, e := range entries {
		if !strings.HasSuffix(e.Name(), ".go") || strings.HasSuffix(e.Name(), "_test.go") {
			continue
		}
		src, err := os.ReadFile(e.Name())
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range regexp.MustCompile(`killpoint\.Pass\("([^"]+)"\)`).FindAllStringSubmatch(string(src), -1) {
			passed = append(passed, m[1])
		}
	}
	listed := killpoints(t)
	slices.Sort(passed)
	slices.Sort(listed)
	if len(listed) < 15 || !slices.Equal(passed, listed) {
		t.Errorf("the code passes\n%v\nthe package comment lists\n%v", passed, listed)
	}
}
