package main

import (
	"bytes"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// docs/cli.md says what the help says.
func TestReferenceIsUpToDate(t *testing.T) {
	var b bytes.Buffer
	if err := writeReference(&b); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile("../../docs/cli.md")
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(text, b.Bytes()) {
		t.Error("docs/cli.md is not what the help texts say: run `make docs`")
	}
}

// Packages get a page for every verb, which names every flag, and scripts that their shells can read.
func TestDocs(t *testing.T) {
	dir, here := t.TempDir(), "/run/user/1000"
	defer func(was string) { defaultFeed = was }(defaultFeed)
	defaultFeed = "unix://" + here + "/shoal/feed.sock"
	if err := writeDocs(dir); err != nil {
		t.Fatal(err)
	}
	commands(root(), func(c *cobra.Command) {
		name := strings.ReplaceAll(c.CommandPath(), " ", "-")
		text, err := os.ReadFile(filepath.Join(dir, "man/man1", name+".1"))
		if err != nil {
			t.Error(err)
			return
		}
		page := strings.ReplaceAll(string(text), `\-`, "-")
		for _, want := range []string{".TH ", "SH NAME", name + " - ", "SH SYNOPSIS", "SH DESCRIPTION",
			"SH EXIT STATUS"} {
			if !strings.Contains(page, want) {
				t.Errorf("%s.1 has no %q", name, want)
			}
		}
		c.Flags().VisitAll(func(f *pflag.Flag) {
			if !f.Hidden && !strings.Contains(page, "--"+f.Name) {
				t.Errorf("%s.1 does not name --%s", name, f.Name)
			}
		})
		if strings.Contains(page, "%!") {
			t.Errorf("%s.1 is not formatted", name)
		}
	})
	pages, err := fs.Glob(os.DirFS(dir), "man/man1/*.1")
	if err != nil || len(pages) < 20 {
		t.Errorf("%d pages, %v", len(pages), err)
	}
	if out, err := exec.Command("bash", "-n", filepath.Join(dir, "completions/bash/shoal")).
		CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
	for file, want := range map[string]string{"completions/zsh/_shoal": "#compdef shoal",
		"completions/fish/shoal.fish": "complete -c shoal", "shoal.yaml": "#cache-dir:"} {
		if text, err := os.ReadFile(filepath.Join(dir, file)); err != nil || !strings.Contains(string(text), want) {
			t.Errorf("%s: %v, or %q is not in it", file, err, want)
		}
	}
	text, err := os.ReadFile(filepath.Join(dir, "shoal.yaml"))
	if err != nil || strings.Contains(string(text), here) || !strings.Contains(string(text), `#node-id: ""`) {
		t.Errorf("defaults of this machine: %v", err)
	}
}

func TestCompletions(t *testing.T) {
	complete := func(args ...string) string {
		t.Helper()
		c := root()
		var out, errs bytes.Buffer
		c.SetOut(&out)
		c.SetErr(&errs)
		c.SetArgs(append([]string{"__complete"}, args...))
		if err := c.Execute(); err != nil {
			t.Fatal(err)
		}
		return out.String()
	}
	for _, tc := range []struct {
		args []string
		want string // all of it; or, after *, a part
	}{
		{[]string{"mount", "--cache-s"}, "*--cache-size\t"},
		{[]string{"m"}, "mount\tMount a dataset as a filesystem that reads ahead in the order of the epoch\n:4\n"},
	} {
		got := complete(tc.args...)
		if part, ok := strings.CutPrefix(tc.want, "*"); ok && strings.Contains(got, part) || got == tc.want {
			continue
		}
		t.Errorf("%q is completed to\n%swant\n%s", tc.args, got, tc.want)
	}
}
