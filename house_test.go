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
	"cmd/shoal":                   {"admin", "fusefs", "loader", "loader/feedpb", "loader/feedclient", "gpuingest", "engine", "prefetch/order", "prefetch/certificate", "prefetch/sim", "cache", "cache/catalog", "cache/objstore", "cache/segment", "cache/shard", "internal/machine", "internal/progress", "internal/settings", "demo", "python", "rig/proxy", "rig/testbed", "accelerator", "cache/crypt", "internal/logs", "admin/top", "admin/verdict", "doctor", "profile", "profile/trace", "internal/trace/export", "internal/levenshtein", "audit"},
	"admin":                       {"engine", "loader", "cache/objstore", "admin/dashboard", "admin/verdict"},
	"bench/gpu":                   {"gpuingest/cuda"},
	"cmd/shoal-gpu":               {"loader", "loader/feedpb", "gpuingest", "gpuingest/cuda", "gpuingest/cuda/nvtx", "internal/handover", "internal/logs"},
	"demo":                        {"rig/photos", "rig/proxy", "rig/s3server", "rig/subproc", "rig/cputime", "internal/progress", "python"},
	"fusefs":                      {"cache/catalog", "cache/objstore", "profile/trace"},
	"loader":                      {"loader/feedpb", "prefetch/order", "cache/objstore", "internal/handover", "internal/trace", "audit"},
	"loader/feedclient":           {"loader", "loader/feedpb", "internal/handover"},
	"loader/feedpb":               {},
	"gpuingest":                   {"gpuingest/jpeg", "gpuingest/internal/pillow", "internal/levenshtein"},
	"gpuingest/internal/pillow":   {"gpuingest/jpeg"},
	"gpuingest/jpeg":              {},
	"gpuingest/cuda":              {"gpuingest", "gpuingest/cuda/kernel", "gpuingest/cuda/nvtx"},
	"gpuingest/cuda/nvtx":         {},
	"gpuingest/cuda/kernel":       {},
	"gpuingest/cuda/driver":       {},
	"engine":                      {"prefetch", "prefetch/order", "prefetch/infer", "cache", "cache/objstore", "cache/catalog", "cache/segment", "cache/shard", "cache/crypt", "internal/machine", "profile/trace", "internal/trace", "audit"},
	"prefetch":                    {"prefetch/order"},
	"prefetch/infer":              {"prefetch/order", "prefetch/infer/seedsearch"},
	"prefetch/infer/seedsearch":   {},
	"prefetch/order":              {"internal/levenshtein"},
	"prefetch/sim":                {"prefetch", "prefetch/order"},
	"prefetch/certificate":        {"prefetch/order"},
	"internal/levenshtein":        {},
	"internal/machine":            {},
	"internal/settings":           {"internal/levenshtein"},
	"internal/handover":           {},
	"internal/progress":           {},
	"internal/killpoint":          {},
	"internal/doctest":            {},
	"cache":                       {"cache/objstore", "cache/catalog", "cache/segment", "internal/killpoint", "internal/trace"},
	"cache/shard":                 {"cache/catalog", "cache/objstore", "internal/killpoint", "internal/trace"},
	"cache/catalog":               {"cache/objstore", "cache/segment", "internal/killpoint", "cache/crypt"},
	"cache/segment":               {"internal/killpoint", "cache/crypt"},
	"cache/objstore":              {"internal/trace"},
	"cache/objstore/objstoretest": {"cache/objstore"},
	"accelerator":                 {},
	"python":                      {},
	"rig":                         {"rig", "gpuingest/jpeg", "internal/progress"},
	"rig/testbed":                 {"rig", "accelerator"},
	"bench/transport":             {"bench/kit", "rig/cputime", "loader", "loader/feedclient", "loader/feedpb", "prefetch/order"},
	"bench/scale":                 {"bench/kit", "rig", "cache/catalog", "cache/segment", "cache/objstore"},
	"bench":                       {"rig", "gpuingest", "gpuingest/jpeg", "rig/testbed", "cache/objstore", "internal/progress", "accelerator", "prefetch", "prefetch/order", "prefetch/sim"},
	"e2e":                         {"rig", "internal/doctest"},
	"examples/consumer":           {"loader/feedclient", "loader/feedpb"},
	"e2e/trainer":                 {"loader", "loader/feedclient", "loader/feedpb"},
	"cache/crypt":                 {"internal/killpoint"},
	"internal/logs":               {},
	"admin/dashboard":             {},
	"admin/verdict":               {"engine", "loader"},
	"admin/top":                   {"admin/verdict", "engine", "loader"},
	"profile":                     {"profile/trace", "prefetch", "prefetch/order", "prefetch/infer", "prefetch/sim"},
	"profile/trace":               {},
	"doctor":                      {"cache/objstore", "internal/machine"},
	"internal/trace":              {},
	"internal/trace/export":       {"internal/trace"},
	"audit":                       {},
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
	out, err := exec.Command("go", "list", "-tags", "cuda", "-json=ImportPath,Imports", "./...").Output()
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
