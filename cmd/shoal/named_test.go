package main

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

const repository = "../.."

var (
	fenced   = regexp.MustCompile("(?ms)^```.*?^```$")
	spans    = regexp.MustCompile("`[^`\n]+`")
	mention  = regexp.MustCompile("(?:^|[\\s(/`\"'>])shoal((?: +[^\\s|;&)#<>`]+)+)")
	labVerb  = regexp.MustCompile(`\bshoal-lab +([a-z]+)`)
	verbWord = regexp.MustCompile(`^[a-z]+(-[a-z]+)*$`)
	flagWord = regexp.MustCompile(`^(--[a-z][a-z0-9-]*|-[a-z])(=.*)?$`)
	flagIn   = regexp.MustCompile("(?:^|[\\s(`\"'/])(--[a-z][a-z0-9-]*[a-z0-9])")
	flagItem = regexp.MustCompile(`^\s*- "?(--[a-z][a-z0-9-]*)`)
	// others are programs whose flags texts name beside ours.
	others = regexp.MustCompile(
		`\b(apt-get|docker|etcdctl|in a container|helm|mount --|setpriv|shoal-gpu|systemctl|torchrun|useradd|versitygw|tar)\b`)
	// labels are no commands: they go into hashes.
	labels = []string{"shoal key wrap v1", "shoal encryption key id v1", "shoal shard plan 1", "shoal facts 1 %08x",
		"shoal owner 1\x00……"}
)

// otherFlags are flags of other programs that stand without these.
var otherFlags = []string{
	"--device", "--groups", // shoal-gpu, setpriv
	"--user", "--cap-add", "--security-opt", "--health-cmd", // docker
	"--force",                                                                                      // kubectl
	"--data-dir", "--listen-client-urls", "--advertise-client-urls", "--auto-compaction-retention", // etcd
}

// named is one piece of text that may name commands: a line of code, a span, a string.
type named struct {
	where, text string
	kind        kind
}

type kind int

const (
	page    kind = iota // code of a Markdown page
	literal             // of Go
	line                // of anything else
)

// namedTexts returns all that users may read: what a Markdown page shows as code, the strings of Go files, and
// the lines of everything else that is installed or copied.
func namedTexts(t *testing.T) (all []named) {
	t.Helper()
	err := filepath.WalkDir(repository, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(repository, p)
		if err != nil {
			return err
		}
		rel = filepath.ToSlash(rel)
		if d.IsDir() {
			if rel != "." && strings.HasPrefix(d.Name(), ".") ||
				slices.Contains([]string{"bin", "tools", "lab/bench", "lab/rig", "lab/e2e"}, rel) ||
				d.Name() == "testdata" || d.Name() == "__pycache__" {
				return filepath.SkipDir
			}
			return nil
		}
		data, err := os.ReadFile(p)
		if err != nil {
			return err
		}
		text := string(data)
		switch ext := filepath.Ext(rel); {
		case rel == "CHANGELOG.md" || strings.HasPrefix(rel, "docs/adr/"):
			// of their time
		case ext == ".md":
			all = append(all, codeOf(rel, text)...)
		case ext == ".go" && !strings.HasSuffix(rel, "_test.go"):
			all = append(all, stringsOf(t, rel, data)...)
		case ext == ".py", slices.ContainsFunc([]string{"deploy/", "docs/examples/", "internal/admin/", "lab/demo/"},
			func(dir string) bool {
				return strings.HasPrefix(rel, dir)
			}) && ext != ".css" && ext != ".go" && d.Type().IsRegular():
			for i, text := range strings.Split(strings.ReplaceAll(text, "\\\n", " "), "\n") {
				all = append(all, named{rel + ":" + strconv.Itoa(i+1), text, line})
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// codeOf returns the code of a Markdown page.
func codeOf(path, text string) (all []named) {
	for _, block := range fenced.FindAllString(text, -1) {
		if kind, _, _ := strings.Cut(strings.TrimPrefix(block, "```"), "\n"); kind == "output" {
			continue
		}
		for text := range strings.Lines(strings.ReplaceAll(block, "\\\n", " ")) {
			all = append(all, named{path, text, page})
		}
	}
	for _, span := range spans.FindAllString(fenced.ReplaceAllString(text, ""), -1) {
		all = append(all, named{path, strings.Trim(span, "`"), page})
	}
	return all
}

// stringsOf returns the string literals of a Go file, those that + joins as one, with … for what is no literal.
func stringsOf(t *testing.T, path string, source []byte) (all []named) {
	t.Helper()
	files := token.NewFileSet()
	file, err := parser.ParseFile(files, path, source, parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	var text func(e ast.Expr) string
	text = func(e ast.Expr) string {
		switch e := e.(type) {
		case *ast.BasicLit:
			if s, err := strconv.Unquote(e.Value); err == nil && e.Kind == token.STRING {
				return s
			}
		case *ast.BinaryExpr:
			if e.Op == token.ADD {
				return text(e.X) + text(e.Y)
			}
		}
		return "…"
	}
	ast.Inspect(file, func(n ast.Node) bool {
		e, isExpr := n.(ast.Expr)
		if _, ok := n.(*ast.ImportSpec); ok || !isExpr {
			return !ok
		}
		s := text(e)
		if s == "…" {
			return true
		}
		for text := range strings.Lines(s) {
			all = append(all, named{files.Position(e.Pos()).String(), text, literal})
		}
		return false
	})
	return all
}

// flagsOf returns the flags of a command as they are written.
func flagsOf(c *cobra.Command) map[string]bool {
	have := map[string]bool{"--help": true, "-h": true}
	add := func(f *pflag.Flag) {
		have["--"+f.Name] = true
		if f.Shorthand != "" {
			have["-"+f.Shorthand] = true
		}
	}
	c.Flags().VisitAll(add)
	c.InheritedFlags().VisitAll(add)
	return have
}

// commandOf returns the command that words begin with, and its words.
func commandOf(words []string) (*cobra.Command, int) {
	c, n := root(), 0
	for n < len(words) {
		next := slices.IndexFunc(c.Commands(), func(sub *cobra.Command) bool {
			return sub.Name() == words[n] || sub.HasAlias(words[n])
		})
		if next < 0 {
			break
		}
		c, n = c.Commands()[next], n+1
	}
	return c, n
}

// unknownNames returns the verbs and flags of commands in a text that do not exist, and how many commands it names.
func unknownNames(n named) (wrong []string, commands int) {
	for _, m := range mention.FindAllStringSubmatch(n.text, -1) {
		words := strings.Fields(m[1])
		if next := slices.Index(words, "shoal"); next > 0 {
			words = words[:next] // a sentence that names two commands
		}
		if end := slices.IndexFunc(words, func(w string) bool {
			return strings.HasSuffix(w, ",") || strings.HasSuffix(w, ":")
		}); end >= 0 {
			words = words[:end+1] // the sentence goes on
		}
		words[0] = strings.TrimRight(words[0], ".,:'\"")
		if !verbWord.MatchString(words[0]) || slices.Contains([]string{"help", "completion", "import"}, words[0]) {
			continue // VERB, a path, an option of another program; Python's import
		}
		c, depth := commandOf(words)
		if depth == 0 {
			if n.kind != page || strings.HasPrefix(strings.TrimLeft(n.text, " $"), "shoal ") {
				wrong = append(wrong, "there is no verb "+words[0])
			}
			continue
		}
		commands++
		have := flagsOf(c)
		if words[0] == "config" && len(words) > 1 { // it takes the command line of the verb that it is asked about
			of, _ := commandOf(words[1:])
			maps.Copy(have, flagsOf(of))
		}
		for _, w := range words[depth:] {
			if f := flagWord.FindStringSubmatch(strings.Trim(w, "[]'\".,:")); f != nil && !have[f[1]] {
				wrong = append(wrong, c.CommandPath()+" has no "+f[1])
			}
		}
	}
	return wrong, commands
}

// flagsAlone returns the flags of a text whose verb is clear from what is said.
func flagsAlone(n named) (flags []string) {
	found := [][]string{}
	switch {
	case others.MatchString(n.text), strings.HasPrefix(n.where, "docs/coming-from.md"),
		strings.HasPrefix(n.where, "lab/demo/trainer"):
	case n.kind == page && strings.HasPrefix(n.text, "--"):
		word, _, _ := strings.Cut(n.text, " ")
		found = append(found, flagIn.FindStringSubmatch(word))
	case n.kind == literal && strings.Contains(n.text, " "),
		n.kind == line && strings.HasPrefix(n.where, "python/shoal"):
		found = flagIn.FindAllStringSubmatch(n.text, -1)
	case n.kind == line && strings.HasPrefix(n.where, "deploy/"):
		found = flagItem.FindAllStringSubmatch(n.text, -1)
	}
	for _, m := range found {
		if m != nil {
			flags = append(flags, m[1])
		}
	}
	return flags
}

// Every verb and every flag that a string, page, script or manifest names exists.
func TestVerbsAndFlags(t *testing.T) {
	known := map[string]bool{}
	for _, f := range otherFlags {
		known[f] = true
	}
	var each func(c *cobra.Command)
	each = func(c *cobra.Command) {
		maps.Copy(known, flagsOf(c))
		for _, sub := range c.Commands() {
			each(sub)
		}
	}
	each(root())
	lab, err := os.ReadFile(repository + "/docs/cli-lab.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range flagIn.FindAllStringSubmatch(string(lab), -1) {
		known[m[1]] = true
	}
	commands, alone := 0, 0
	for _, n := range namedTexts(t) {
		if slices.Contains(labels, strings.TrimSpace(n.text)) {
			continue
		}
		wrong, found := unknownNames(n)
		commands += found
		for _, f := range flagsAlone(n) {
			if alone++; !known[f] {
				wrong = append(wrong, "no verb has "+f)
			}
		}
		for _, m := range labVerb.FindAllStringSubmatch(n.text, -1) {
			if commands++; !strings.Contains(string(lab), "\n## shoal-lab "+m[1]+"\n") {
				wrong = append(wrong, "shoal-lab has no verb "+m[1])
			}
		}
		for _, w := range wrong {
			t.Errorf("%s: %s: %s", n.where, w, strings.TrimSpace(n.text))
		}
	}
	if commands < 300 || alone < 300 {
		t.Errorf("only %d commands and %d flags were found", commands, alone)
	}
}
