// Package shoal_test keeps the house in order: imports point down only.
package shoal_test

import (
	"encoding/json"
	"io"
	"os/exec"
	"strings"
	"testing"
)

const module = "github.com/shoalfs/shoal/"

// mayImport lists, for each room, the rooms that its code (not its tests) may import. A room is the
// longest key that a package's path begins with. What is missing here fails the test, so a new room
// has to be given its place.
var mayImport = map[string][]string{
	"cmd/shoal":                   {"fusefs", "loader", "loader/feedpb", "loader/feedclient", "gpuingest", "engine", "prefetch/order", "cache", "cache/catalog", "cache/objstore", "demo", "python", "rig/proxy"},
	"demo":                        {"rig/photos", "rig/proxy", "rig/s3server", "rig/subproc", "rig/progress", "python"},
	"fusefs":                      {"cache/catalog", "cache/objstore"},
	"loader":                      {"loader/feedpb", "prefetch/order", "cache/objstore"},
	"loader/feedclient":           {"loader", "loader/feedpb"},
	"loader/feedpb":               {},
	"gpuingest":                   {"gpuingest/jpeg", "internal/levenshtein"},
	"gpuingest/jpeg":              {},
	"engine":                      {"prefetch", "prefetch/order", "cache", "cache/objstore", "cache/catalog", "cache/segment"},
	"prefetch":                    {"prefetch/order"},
	"prefetch/order":              {"internal/levenshtein"},
	"internal/levenshtein":        {},
	"cache":                       {"cache/objstore", "cache/catalog", "cache/segment"},
	"cache/catalog":               {"cache/objstore", "cache/segment"},
	"cache/segment":               {},
	"cache/objstore":              {},
	"cache/objstore/objstoretest": {"cache/objstore"},
	"python":                      {},
	"rig":                         {"rig", "gpuingest/jpeg"},
	"bench":                       {"rig", "cache/objstore"},
	"e2e":                         {"rig"},
}

func room(pkg string) string {
	path := strings.TrimPrefix(pkg, module)
	for {
		if _, ok := mayImport[path]; ok {
			return path
		}
		i := strings.LastIndexByte(path, '/')
		if i < 0 {
			return ""
		}
		path = path[:i]
	}
}

func TestImportsPointDown(t *testing.T) {
	out, err := exec.Command("go", "list", "-json=ImportPath,Imports", "./...").Output()
	if err != nil {
		t.Fatal(err)
	}
	for dec := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p struct {
			ImportPath string
			Imports    []string
		}
		if err := dec.Decode(&p); err == io.EOF {
			return
		} else if err != nil {
			t.Fatal(err)
		}
		if p.ImportPath+"/" == module {
			continue
		}
		from := room(p.ImportPath)
		if from == "" {
			t.Errorf("%s has no place in the house: add it to mayImport", p.ImportPath)
			continue
		}
		for _, imp := range p.Imports {
			if !strings.HasPrefix(imp, module) {
				continue
			}
			to := room(imp)
			allowed := to == from
			for _, a := range mayImport[from] {
				allowed = allowed || a == to || a == strings.TrimPrefix(imp, module)
			}
			if !allowed {
				t.Errorf("%s imports %s: %s may not import %s", p.ImportPath, imp, from, to)
			}
		}
	}
}

// The planner plans, simulates and predicts with the same code, so it can have no clock and do no I/O.
func TestPrefetchIsPure(t *testing.T) {
	out, err := exec.Command("go", "list", "-f", `{{.ImportPath}} {{join .Imports " "}}`, "./prefetch/...").Output()
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(out)) {
		f := strings.Fields(line)
		for _, imp := range f[1:] {
			switch imp {
			case "time", "os", "net", "io", "context", "sync", "log/slog", "math/rand", "math/rand/v2":
				t.Errorf("%s imports %s: it must stay pure", f[0], imp)
			}
		}
	}
}
