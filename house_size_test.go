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
	"slices"
	"strings"
	"testing"
)

// budget is how many lines of Go and C a room may hold, tests and generated code apart. A room is the longest key that a
// file's path begins with. The commit that needs more raises it, and says why.
var budget = map[string]int{
	"cmd/shoal":       8_095,
	"cmd/shoal-gpu":   1_370,
	"cmd/shoal-lab":   890,
	"fusefs":          2_540,
	"cache":           25_830,
	"prefetch":        9_670,
	"prefetch/engine": 4_530,
	"loader":          6_350,
	"gpuingest":       10_950,
	"internal":        10_250,
	"lab":             14_850,
	"python":          160,
	"docs":            110,
	"deploy":          690,
	"tools":           80,
}

// What reads well has bounds. Beyond each there is what was there before it was; it may only become less.
const (
	longestFunction, longFunctions = 80, 0
	mostFields, wideStructs        = 20, 10
	mostFolders                    = 12
)

func TestRoomsKeepTheirBudget(t *testing.T) {
	lines, folders := map[string]int{}, map[string]bool{}
	var long, wide []string
	err := filepath.WalkDir(".", func(p string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && (p != "." && strings.HasPrefix(d.Name(), ".") || d.Name() == "bin" || d.Name() == "testdata"):
			return filepath.SkipDir
		case d.IsDir() || !slices.Contains([]string{".go", ".c", ".h", ".cu"}, filepath.Ext(p)) || strings.HasSuffix(p, "_test.go") || strings.HasSuffix(p, ".pb.go"):
			return nil
		}
		text, err := os.ReadFile(p)
		if err != nil {
			return err
		}
		room := filepath.ToSlash(filepath.Dir(p))
		for budget[room] == 0 && strings.Contains(room, "/") {
			room = room[:strings.LastIndexByte(room, '/')]
		}
		lines[room] += bytes.Count(text, []byte("\n"))
		top, _, _ := strings.Cut(filepath.ToSlash(p), "/")
		folders[top] = true
		if filepath.Ext(p) == ".go" {
			l, w := beyond(t, p, text)
			long, wide = append(long, l...), append(wide, w...)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	all := 0
	for _, room := range slices.Sorted(maps.Keys(lines)) {
		t.Logf("%-14s %6d lines of %6d", room, lines[room], budget[room])
		if all += lines[room]; lines[room] > budget[room] {
			t.Errorf("%s holds %d lines, and its budget is %d: remove what it no longer needs, or raise the budget and say why", room, lines[room], budget[room])
		}
	}
	t.Logf("%-14s %6d lines in %d folders", "all", all, len(folders))
	if len(folders) > mostFolders {
		t.Errorf("%d folders at the top, %d are enough", len(folders), mostFolders)
	}
	if len(long) > longFunctions {
		t.Errorf("%d functions are longer than %d lines, where there were %d:\n%s", len(long), longestFunction, longFunctions, strings.Join(long, "\n"))
	}
	if len(wide) > wideStructs {
		t.Errorf("%d structs have more than %d fields, where there were %d:\n%s", len(wide), mostFields, wideStructs, strings.Join(wide, "\n"))
	}
}

// beyond returns the functions and structs of a file that are beyond their bounds.
func beyond(t *testing.T, path string, text []byte) (long, wide []string) {
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
	return long, wide
}
