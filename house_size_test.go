package shoal_test

import (
	"bytes"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

// bound is how many lines of Go and C all rooms may hold together, tests and generated code apart. No commit raises it,
// but one whose issue gives an allowance: rooms trade, and a new capability pays with what it made unnecessary.
const bound = 108_078

// widest is how many columns a line of code, of a comment or of prose may have, a tab as four, so that nobody saves
// lines by longer ones (ADR 84). wideLines are the others: tables, and literals without a place to break them.
const widest, wideLines = 120, 98

// rooms are listed in the log. A file belongs to the longest that its path begins with.
var rooms = []string{"cmd/shoal", "cmd/shoal-gpu", "cmd/shoal-lab", "fusefs", "fusefs/fuseio", "cache", "prefetch",
	"prefetch/engine",
	"loader", "s3api", "gpuingest", "ckpt", "csi", "internal", "lab", "python", "docs", "deploy", "tools"}

// What reads well has bounds. Beyond each there is what was there before it was; it may only become less.
const (
	longestFunction, longFunctions = 80, 0
	mostFields, wideStructs        = 20, 9
	mostFolders                    = 15
	mostNames                      = 40 // exported by a package at its top level, unless its comment says why
	manyNames                      = "More than 40 names are exported"
)

func TestTheHouseDoesNotGrow(t *testing.T) {
	lines, folders, names := map[string]int{}, map[string]bool{}, map[string]int{}
	var long, wide []string
	err := filepath.WalkDir(".", func(p string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && (p != "." && strings.HasPrefix(d.Name(), ".") || d.Name() == "bin" || d.Name() == "testdata"):
			return filepath.SkipDir
		case d.IsDir() || !slices.Contains([]string{".go", ".c", ".h", ".cu"}, filepath.Ext(p)) ||
			strings.HasSuffix(p, "_test.go") || strings.HasSuffix(p, ".pb.go"):
			return nil
		}
		text, err := os.ReadFile(p)
		if err != nil {
			return err
		}
		room := filepath.ToSlash(filepath.Dir(p))
		for !slices.Contains(rooms, room) && strings.Contains(room, "/") {
			room = room[:strings.LastIndexByte(room, '/')]
		}
		lines[room] += bytes.Count(text, []byte("\n"))
		top, _, _ := strings.Cut(filepath.ToSlash(p), "/")
		folders[top] = true
		if filepath.Ext(p) == ".go" {
			l, w, n := beyond(t, p, text)
			long, wide = append(long, l...), append(wide, w...)
			if names[filepath.Dir(p)] += n; bytes.Contains(text, []byte(manyNames)) {
				names[filepath.Dir(p)] -= 1000
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	all := 0
	for _, room := range slices.Sorted(maps.Keys(lines)) {
		t.Logf("%-16s %6d lines", room, lines[room])
		all += lines[room]
	}
	t.Logf("%-16s %6d lines of %d, in %d folders", "all", all, bound, len(folders))
	if all > bound {
		t.Errorf("all rooms hold %d lines, %d more than the bound: remove what is no longer needed", all, all-bound)
	}
	if len(folders) > mostFolders {
		t.Errorf("%d folders at the top, %d are enough", len(folders), mostFolders)
	}
	for folder, n := range names {
		if n > mostNames {
			t.Errorf(
				"%s exports %d names, and %d are enough: make some private, divide it, or say why in its comment (%q)",
				folder, n, mostNames, manyNames)
		}
	}
	if len(long) > longFunctions {
		t.Errorf("%d functions are longer than %d lines, where there were %d:\n%s",
			len(long), longestFunction, longFunctions, strings.Join(long, "\n"))
	}
	if len(wide) > wideStructs {
		t.Errorf("%d structs have more than %d fields, where there were %d:\n%s",
			len(wide), mostFields, wideStructs, strings.Join(wide, "\n"))
	}
}

// beyond returns the functions and structs of a file that are beyond their bounds, and how many names it exports.
func beyond(t *testing.T, path string, text []byte) (long, wide []string, names int) {
	files := token.NewFileSet()
	file, err := parser.ParseFile(files, path, text, parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.FuncDecl:
			if l := files.Position(n.End()).Line - files.Position(n.Pos()).Line + 1; l > longestFunction {
				long = append(long, path+": "+n.Name.Name)
			}
		case *ast.TypeSpec:
			if s, ok := n.Type.(*ast.StructType); ok && s.Fields.NumFields() > mostFields {
				wide = append(wide, path+": "+n.Name.Name)
			}
		}
		return true
	})
	for _, d := range file.Decls {
		switch d := d.(type) {
		case *ast.FuncDecl:
			if d.Recv == nil && d.Name.IsExported() {
				names++
			}
		case *ast.GenDecl:
			for _, s := range d.Specs {
				switch s := s.(type) {
				case *ast.TypeSpec:
					names += count(s.Name)
				case *ast.ValueSpec:
					names += count(s.Names...)
				}
			}
		}
	}
	return long, wide, names
}

func count(names ...*ast.Ident) (exported int) {
	for _, n := range names {
		if n.IsExported() {
			exported++
		}
	}
	return exported
}

// pageWords is how many words the pages written by hand may hold together. What a program writes does not count.
const pageWords = 50_000

// writtenPages are those that a program writes.
var writtenPages = []string{"docs/cli.md", "docs/cli-lab.md", "docs/python-api.md"}

var metricTables = regexp.MustCompile(`(?s)<!-- metrics: begin -->.*?<!-- metrics: end -->`)

func TestThePagesDoNotGrow(t *testing.T) {
	words := 0
	for _, pattern := range []string{"README.md", "docs/*.md", "docs/examples/*.md"} {
		pages, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range pages {
			text, err := os.ReadFile(p)
			if err != nil {
				t.Fatal(err)
			}
			if !slices.Contains(writtenPages, filepath.ToSlash(p)) {
				words += len(strings.Fields(metricTables.ReplaceAllString(string(text), "")))
			}
		}
	}
	t.Logf("%d words of %d", words, pageWords)
	if words > pageWords {
		t.Errorf("the pages hold %d words, %d more than the bound: say each thing once", words, words-pageWords)
	}
}

func TestLinesFit(t *testing.T) {
	var wide []string
	err := filepath.WalkDir(".", func(p string, d fs.DirEntry, err error) error {
		switch ext := filepath.Ext(p); {
		case err != nil:
			return err
		case d.IsDir() && (p != "." && strings.HasPrefix(d.Name(), ".") || d.Name() == "bin"):
			return filepath.SkipDir
		case d.IsDir() || strings.HasSuffix(p, ".pb.go") || slices.Contains(writtenPages, filepath.ToSlash(p)) ||
			!slices.Contains([]string{".go", ".c", ".h", ".cu", ".py", ".md"}, ext):
			return nil
		}
		text, err := os.ReadFile(p)
		inside := false // a literal between backquotes
		for line := range strings.Lines(string(text)) {
			was := inside
			if filepath.Ext(p) == ".go" && strings.Count(line, "`")%2 == 1 {
				inside = !inside
			}
			line = strings.ReplaceAll(strings.TrimSuffix(line, "\n"), "\t", "    ")
			if utf8.RuneCountInString(line) > widest && !was && !strings.ContainsAny(line, "`|") {
				wide = append(wide, p+": "+strings.TrimSpace(line))
			}
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(wide) > wideLines {
		t.Errorf("%d lines are wider than %d columns, where there were %d:\n%s",
			len(wide), widest, wideLines, strings.Join(wide, "\n"))
	}
}
