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
	"cmd/shoal": {"cache/cluster", "cache/peer", "internal/admin", "fusefs", "loader", "loader/feedpb",
		"loader/feedclient", "gpuingest", "gpuingest/jpeg", "prefetch/engine", "prefetch/order", "prefetch/run",
		"prefetch/certificate", "prefetch/sim", "s3api", "cache", "cache/cachedir", "cache/catalog", "cache/objstore",
		"cache/objstore/s3", "cache/objstore/stores", "cache/segment", "cache/shard", "internal/machine",
		"internal/progress", "internal/settings", "internal/cli", "internal/workload", "python", "cache/crypt",
		"internal/logs", "internal/doctor", "internal/findings", "internal/profile/trace", "internal/trace/export",
		"internal/levenshtein", "internal/audit", "internal/human", "internal/shortcut", "internal/daemon",
		"internal/prom", "ckpt", "ckpt/folder", "csi", "internal/pause"},
	"internal/admin": {"prefetch/engine", "prefetch/run", "loader", "s3api", "cache/objstore",
		"cache/objstore/near", "internal/admin/dashboard", "internal/findings", "internal/prom", "internal/pause"},
	"deploy/packages": {"python"},
	"lab/bench/gpu":   {"gpuingest/cuda"},
	"cmd/shoal-gpu": {"loader", "loader/feedpb", "gpuingest", "gpuingest/cuda", "gpuingest/cuda/nvtx",
		"internal/cli", "internal/handover", "internal/logs", "internal/prom"},
	"lab/demo": {"lab/rig", "lab/rig/testbed", "internal/progress", "python"},
	"fusefs": {"cache/catalog", "cache/objstore", "fusefs/fuseio", "internal/machine",
		"internal/profile/trace"},
	"fusefs/fuseio": {},
	"loader": {"loader/feedpb", "prefetch/order", "cache/objstore", "cache/owner",
		"internal/handover", "internal/trace", "internal/audit", "internal/rows", "internal/pause"},
	"s3api":             {"cache/catalog", "cache/objstore", "cache/objstore/s3"},
	"loader/feedclient": {"loader", "loader/feedpb", "internal/handover"},
	"loader/feedpb":     {},
	"gpuingest": {"gpuingest/jpeg", "gpuingest/internal/pillow", "internal/levenshtein",
		"internal/rows"},
	"gpuingest/internal/pillow": {"gpuingest/jpeg"},
	"gpuingest/jpeg":            {},
	"gpuingest/cuda":            {"gpuingest", "gpuingest/cuda/kernel", "gpuingest/cuda/nvtx"},
	"gpuingest/cuda/nvtx":       {},
	"gpuingest/cuda/kernel":     {"python"},
	"lab/driver":                {},
	"prefetch/engine": {"cache/cluster", "cache/peer", "prefetch", "prefetch/run", "prefetch/order",
		"prefetch/infer", "cache", "cache/cachedir", "cache/owner", "cache/objstore", "cache/objstore/near",
		"cache/objstore/s3", "cache/objstore/stores", "cache/catalog", "cache/segment", "cache/shard", "cache/crypt",
		"internal/machine", "internal/profile/trace", "internal/trace", "internal/audit", "internal/pause"},
	"prefetch":                  {"prefetch/order"},
	"prefetch/run":              {"prefetch", "prefetch/order", "cache", "cache/catalog", "internal/pause"},
	"prefetch/infer":            {"prefetch/order", "prefetch/infer/seedsearch"},
	"prefetch/infer/seedsearch": {},
	"prefetch/order":            {"internal/levenshtein"},
	"prefetch/sim":              {"prefetch", "prefetch/order"},
	"prefetch/certificate":      {"prefetch/order"},
	"internal/levenshtein":      {},
	"internal/human":            {},
	"internal/rows":             {},
	"internal/machine":          {},
	"internal/settings":         {"internal/human", "internal/levenshtein"},
	"internal/daemon": {"internal/audit", "internal/cli", "internal/handover", "internal/progress",
		"internal/pause"},
	"internal/handover":  {},
	"internal/shortcut":  {"cache/catalog", "cache/segment", "internal/audit"},
	"internal/progress":  {"internal/pause"},
	"internal/killpoint": {},
	"internal/pause":     {},
	"internal/durable":   {"internal/killpoint"},
	"cache": {"cache/objstore", "cache/catalog", "cache/segment", "internal/killpoint",
		"internal/trace", "internal/pause"},
	"cache/owner":   {},
	"cache/cluster": {"internal/pause"},
	"cache/cachedir": {"cache", "cache/catalog", "cache/crypt", "cache/objstore", "cache/segment",
		"internal/pause"},
	"cache/shard": {"cache/catalog", "cache/objstore", "internal/killpoint", "internal/trace"},
	"cache/catalog": {"cache/objstore", "cache/segment", "internal/durable", "internal/killpoint",
		"cache/crypt"},
	"cache/segment":         {"internal/durable", "internal/killpoint", "cache/crypt"},
	"cache/objstore":        {"internal/durable", "internal/pause", "internal/trace"},
	"cache/objstore/near":   {"cache/objstore"},
	"cache/peer":            {"cache", "cache/objstore", "internal/pause"},
	"cache/objstore/s3":     {"cache/objstore"},
	"cache/objstore/stores": {"cache/objstore", "cache/objstore/s3"},
	"lab/accelerator":       {"internal/pause"},
	"internal/cli":          {"internal/levenshtein", "internal/settings"},
	"internal/workload":     {},
	"cmd/shoal-lab": {"internal/cli", "internal/workload", "internal/progress", "prefetch/order",
		"lab/accelerator", "lab/demo", "lab/rig/proxy", "lab/rig/testbed"},
	"python": {},
	"lab/rig": {"lab/rig", "gpuingest/jpeg", "internal/machine", "internal/progress",
		"internal/pause"},
	"lab/rig/memstore":         {"cache/objstore"},
	"lab/rig/testbed":          {"fusefs", "lab/rig", "lab/accelerator"},
	"lab/bench":                {"lab/accelerator", "lab/rig", "lab/rig/testbed", "gpuingest", "gpuingest/jpeg"},
	"lab/e2e":                  {"lab/rig"},
	"docs/examples/consumer":   {"loader/feedclient", "loader/feedpb"},
	"cache/crypt":              {"internal/durable"},
	"internal/logs":            {},
	"internal/prom":            {"internal/cli"},
	"internal/admin/dashboard": {},
	"internal/profile/trace":   {},
	"internal/doctor": {"fusefs", "internal/findings", "cache/objstore", "cache/objstore/s3",
		"cache/objstore/stores", "internal/machine", "internal/human"},
	"internal/findings": {"prefetch/engine", "loader", "cache/objstore", "prefetch/order", "prefetch/infer",
		"prefetch/sim", "internal/profile/trace", "internal/machine", "internal/human"},
	"internal/trace":        {},
	"internal/trace/export": {"internal/trace"},
	"internal/audit":        {"internal/durable"},
	"ckpt": {"cache/cluster", "cache/objstore", "ckpt/folder", "internal/durable",
		"internal/killpoint", "internal/prom", "internal/pause"},
	"ckpt/folder":        {},
	"csi":                {"csi/registrationpb", "internal/daemon", "internal/machine"},
	"csi/registrationpb": {},
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

// The laboratory leaves the product alone: neither binary that users run contains any of it.
func TestProductIsWithoutLaboratory(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", "-tags", "cuda", "./cmd/shoal", "./cmd/shoal-gpu").Output()
	if err != nil {
		t.Fatal(err)
	}
	for pkg := range strings.Lines(string(out)) {
		if strings.HasPrefix(pkg, module+"lab/") {
			t.Errorf("the product contains %s", pkg)
		}
	}
	// Its users have chosen these.
	for _, pkg := range []string{"github.com/minio/minio-go/v7", "github.com/hanwen/go-fuse/v2/fuse",
		"github.com/dgraph-io/badger/v4", "google.golang.org/grpc", "gorgonia.org/cu"} {
		if !strings.Contains(string(out), "\n"+pkg+"\n") {
			t.Errorf("the product does without %s", pkg)
		}
	}
}

// The planner plans, simulates and predicts with the same code, and all nodes compute the same owners, so neither can
// have a clock or do I/O.
func TestPrefetchIsPure(t *testing.T) {
	out, err := exec.Command("go", "list", "-f", `{{.ImportPath}} {{join .Imports " "}}`, "./prefetch/...",
		"./cache/owner").Output()
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(out)) {
		f := strings.Fields(line)
		if f[0] == module+"prefetch/run" || f[0] == module+"prefetch/engine" { // they carry out what the others decide
			continue
		}
		for _, imp := range f[1:] {
			if imp == "math/rand/v2" && f[0] == module+"prefetch/sim" { // of its seed alone: TestEqualRunsAreEqual
				continue
			}
			switch imp {
			case "time", "os", "net", "io", "context", "sync", "log/slog", "math/rand", "math/rand/v2":
				t.Errorf("%s imports %s: it must stay pure", f[0], imp)
			}
		}
	}
}
