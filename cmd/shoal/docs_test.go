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

	"github.com/shoalfs/shoal/prefetch/order"
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
	dir := t.TempDir()
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
		for _, want := range []string{".TH ", "SH NAME", name + " - ", "SH SYNOPSIS", "SH DESCRIPTION", "SH EXIT STATUS"} {
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
	if out, err := exec.Command("bash", "-n", filepath.Join(dir, "completions/bash/shoal")).CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
	for file, want := range map[string]string{"completions/zsh/_shoal": "#compdef shoal", "completions/fish/shoal.fish": "complete -c shoal", "shoal.yaml": "#cache-dir:"} {
		if text, err := os.ReadFile(filepath.Join(dir, file)); err != nil || !strings.Contains(string(text), want) {
			t.Errorf("%s: %v, or %q is not in it", file, err, want)
		}
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
		{[]string{"mount", "--log-level", ""}, "debug\ninfo\nwarn\nerror\n:4\n"},
		{[]string{"mount", "--kernel-cache=o"}, "on\noff\n:4\n"},
		{[]string{"mount", "--order", "torch"}, "torch:seed=\tDistributedSampler\ntorch-loader:seed=\tDataLoader(shuffle=True)\n:6\n"},
		{[]string{"mount", "--order", "au"}, "*auto"},
		{[]string{"mount", "--order", "list:/x"}, ":0\n"}, // files
		{[]string{"mount", "--cache-size", "a"}, "auto\n:4\n"},
		{[]string{"warm", "--list", ""}, ":0\n"},
		{[]string{"warm", "--cache-dir", ""}, ":16\n"}, // folders
		{[]string{"mount", "file:///x", ""}, ":16\n"},
		{[]string{"mount", "file:///x", "/y", ""}, ":4\n"},
		{[]string{"order", "sequ"}, "sequential\tby number\n:4\n"},
		{[]string{"feed", "--transport", "s"}, "slots\n:4\n"},
		{[]string{"config", "cache", ""}, "*ls\tList the datasets"},
		{[]string{"config", ""}, "*mount\tMount a dataset"},
		{[]string{"mount", "--cache-s"}, "*--cache-size\t"},
		{[]string{"m"}, "mount\tMount a dataset as a filesystem that reads ahead in the order of the epoch\n:4\n"},
	} {
		got := complete(tc.args...)
		if part, ok := strings.CutPrefix(tc.want, "*"); ok && strings.Contains(got, part) || got == tc.want {
			continue
		}
		t.Errorf("%q is completed to\n%swant\n%s", tc.args, got, tc.want)
	}
	for _, w := range orderWords {
		word, _, _ := strings.Cut(w, "\t")
		switch word {
		case "windowed:seed=":
			word += "7,window=2"
		case "mixture:seed=":
			word += "7,weights=a:1"
		case "buckets:seed=":
			word += "7,batch=2"
		case "list:":
			word += "/x"
		default:
			if strings.HasSuffix(word, "=") {
				word += "7"
			}
		}
		if spec, err := order.Parse(word); err != nil || spec.Check() != nil {
			t.Errorf("%s is offered, and is no order: %v", word, err)
		}
	}
}

// What is offered for a flag is taken by it, and every word stands for a flag that is there.
func TestOfferedWordsAreTaken(t *testing.T) {
	used := map[string]bool{}
	commands(root(), func(c *cobra.Command) {
		c.Flags().VisitAll(func(f *pflag.Flag) {
			used[f.Name] = true
			for _, w := range offered(f) {
				word, _, _ := strings.Cut(w, "\t")
				if err := f.Value.Set(word); err != nil {
					t.Errorf("%s --%s %s: %v", c.CommandPath(), f.Name, w, err)
				}
			}
		})
	})
	for name := range flagWords {
		if !used[name] {
			t.Errorf("there is no flag --%s", name)
		}
	}
}
