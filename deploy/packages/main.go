// Command packages makes the Python wheels and the source distribution of a release, and the statement of what its
// files were built from. deploy/packages/build.sh, which make release runs, makes everything else.
//
//	packages wheels VERSION STAGE DIST      of STAGE/shoal, licences in STAGE/licences
//	packages client VERSION STAGE DIST      the wheel and the source distribution of the client alone
//	packages provenance VERSION COMMIT DIST
//
// SOURCE_DATE_EPOCH is the time of every file. The same input gives the same bytes.
package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"debug/elf"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/shoalfs/shoal/python"
)

func main() {
	verbs := map[string]func(version, from, dist string) error{"wheels": binaryWheel, "client": client,
		"provenance": provenance}
	if len(os.Args) != 5 || verbs[os.Args[1]] == nil {
		fmt.Fprintln(os.Stderr, "usage: packages wheels|client|provenance VERSION STAGE|COMMIT DIST")
		os.Exit(2)
	}
	if err := verbs[os.Args[1]](os.Args[2], os.Args[3], os.Args[4]); err != nil {
		fmt.Fprintln(os.Stderr, "packages: "+err.Error())
		os.Exit(1)
	}
}

func created() time.Time {
	n, _ := strconv.ParseInt(os.Getenv("SOURCE_DATE_EPOCH"), 10, 64)
	return time.Unix(n, 0).UTC()
}

// platforms are those of wheels on which a static binary runs: glibc's and musl's.
var platforms = map[elf.Machine][]string{
	elf.EM_X86_64: {"py3-none-manylinux2014_x86_64", "py3-none-manylinux_2_17_x86_64", "py3-none-musllinux_1_1_x86_64"},
	elf.EM_AARCH64: {"py3-none-manylinux2014_aarch64", "py3-none-manylinux_2_17_aarch64",
		"py3-none-musllinux_1_1_aarch64"},
}

// binaryWheel makes the wheel shoalfs: the client and the binary. shoalfs-client is the client alone. Both hold the
// package shoal, so an environment needs one of them.
func binaryWheel(version, stage, dist string) error {
	path := filepath.Join(stage, "shoal")
	e, err := elf.Open(path)
	if err != nil {
		return err
	}
	defer func() { _ = e.Close() }()
	tags := platforms[e.Machine]
	if libs, err := e.ImportedLibraries(); err != nil || len(libs) > 0 || tags == nil {
		return fmt.Errorf("%s: for %v, needs %v: want a static binary for amd64 or arm64", path, e.Machine, libs)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	return wheel(&python.Wheel{Name: "shoalfs", Version: version, Tags: tags,
		Scripts: []python.File{{Name: "shoal", Data: data}}}, stage, "*", dist)
}

func wheel(w *python.Wheel, stage, licences, dist string) (err error) {
	w.Created = created()
	if w.Readme, err = os.ReadFile("python/README.md"); err != nil {
		return err
	}
	paths, err := filepath.Glob(filepath.Join(stage, "licences", licences))
	if err != nil || len(paths) == 0 {
		return fmt.Errorf("%s/licences: no licence %s", stage, licences)
	}
	for _, p := range paths {
		text, err := os.ReadFile(p)
		if err != nil {
			return err
		}
		w.Notes = append(w.Notes, python.File{Name: "licenses/" + filepath.Base(p), Data: text})
	}
	var out bytes.Buffer
	if err := w.Write(&out); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dist, w.FileName()), out.Bytes(), 0o644)
}

// client makes the wheel shoalfs-client and its source distribution, of which any build front end makes the same wheel.
func client(version, stage, dist string) error {
	w := &python.Wheel{Name: "shoalfs_client", Version: version, Tags: []string{"py3-none-any"}}
	if err := wheel(w, stage, "shoal", dist); err != nil {
		return err
	}
	files, err := python.Client(version)
	if err != nil {
		return err
	}
	files = append(files, python.File{Name: "PKG-INFO", Mode: 0o644, Data: w.Metadata()})
	for _, p := range []string{"python/pyproject.toml", "python/README.md", "LICENSE"} {
		data, err := os.ReadFile(p)
		if err != nil {
			return err
		}
		files = append(files, python.File{Name: filepath.Base(p), Mode: 0o644, Data: data})
	}
	base := w.Name + "-" + python.Version(version)
	var out bytes.Buffer
	z := gzip.NewWriter(&out)
	t := tar.NewWriter(z)
	for _, f := range files {
		h := tar.Header{Name: base + "/" + f.Name, Mode: int64(f.Mode), Size: int64(len(f.Data)), ModTime: w.Created,
			Format: tar.FormatPAX}
		if err := t.WriteHeader(&h); err != nil {
			return err
		}
		if _, err := t.Write(f.Data); err != nil {
			return err
		}
	}
	if err := errors.Join(t.Close(), z.Close()); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dist, base+".tar.gz"), out.Bytes(), 0o644)
}

// provenance says what the files in dist were built from: an in-toto statement with SLSA's predicate
// (slsa.dev/spec/v1.0/provenance). It is not signed, and names no time of the build: two builds give the same bytes.
func provenance(version, commit, dist string) error {
	const project = "https://github.com/shoalfs/shoal"
	type object map[string]any
	entries, err := os.ReadDir(dist)
	if err != nil {
		return err
	}
	gcc, err := exec.Command("gcc", "-dumpfullversion").Output()
	if err != nil {
		return err
	}
	var subjects []object
	parts := map[string]bool{} // what the bills of materials name
	for _, e := range entries {
		data, err := os.ReadFile(filepath.Join(dist, e.Name()))
		if err != nil {
			return err
		}
		sum := sha256.Sum256(data)
		subjects = append(subjects, object{"name": e.Name(), "digest": object{"sha256": hex.EncodeToString(sum[:])}})
		if strings.HasSuffix(e.Name(), ".cdx.json") {
			var bill struct{ Components []struct{ Purl string } }
			if err := json.Unmarshal(data, &bill); err != nil {
				return err
			}
			for _, c := range bill.Components {
				parts[c.Purl] = true
			}
		}
	}
	delete(parts, "") // the binary itself
	sources := []object{{"uri": "git+" + project, "digest": object{"gitCommit": commit}}}
	for _, p := range slices.Sorted(maps.Keys(parts)) {
		sources = append(sources, object{"uri": p})
	}
	text, err := json.MarshalIndent(object{
		"_type":         "https://in-toto.io/Statement/v1",
		"subject":       subjects,
		"predicateType": "https://slsa.dev/provenance/v1",
		"predicate": object{
			"buildDefinition": object{
				"buildType":            project + "/blob/main/docs/install.md#building-a-release",
				"externalParameters":   object{"command": "make release", "version": version},
				"resolvedDependencies": sources,
			},
			"runDetails": object{"builder": object{
				"id":      project + "/blob/main/deploy/packages/build.sh",
				"version": object{"go": runtime.Version(), "gcc": strings.TrimSpace(string(gcc))},
			}},
		},
	}, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dist, "provenance.json"), append(text, '\n'), 0o644)
}
