// Package learn runs what the documentation shows: the tutorials' commands and the programs in
// examples, against the built binary and a real S3 server.
package learn

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// clone is a folder that looks like a clone after `make setup build`, with the binary under test.
var clone string

func TestMain(m *testing.M) {
	code, err := func() (int, error) {
		dir, err := os.MkdirTemp("", "shoal-learn-")
		if err != nil {
			return 1, err
		}
		defer os.RemoveAll(dir)
		// Trainers that run as other users go through it.
		if err := os.Chmod(dir, 0o755); err != nil {
			return 1, err
		}
		if clone, err = makeClone(dir); err != nil {
			return 1, err
		}
		return m.Run(), nil
	}()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	os.Exit(code)
}

// makeClone links the repository's files into dir/shoal, but for bin, where the binary is built, and the
// Makefile: what setup and build do has been done.
func makeClone(dir string) (string, error) {
	root, err := filepath.Abs("../../..")
	if err != nil {
		return "", err
	}
	to := filepath.Join(dir, "shoal")
	if err := os.MkdirAll(filepath.Join(to, "bin"), 0o755); err != nil {
		return "", err
	}
	entries, err := os.ReadDir(root)
	if err != nil {
		return "", err
	}
	for _, e := range entries {
		if name := e.Name(); name != "bin" && name != "Makefile" && !strings.HasPrefix(name, ".") {
			if err := os.Symlink(filepath.Join(root, name), filepath.Join(to, name)); err != nil {
				return "", err
			}
		}
	}
	if err := os.Symlink(filepath.Join(root, "bin", "versitygw"), filepath.Join(to, "bin", "versitygw")); err != nil {
		return "", err
	}
	const done = "setup build:\n\t@echo done before\n.PHONY: setup build\n"
	if err := os.WriteFile(filepath.Join(to, "Makefile"), []byte(done), 0o644); err != nil {
		return "", err
	}
	build := exec.Command("go", "build", "-o", filepath.Join(to, "bin")+"/", "./cmd/shoal", "./cmd/shoal-lab")
	build.Dir = root
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build: %w\n%s", err, out)
	}
	return to, nil
}

// scratch returns an empty folder that other users may enter.
func scratch(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp(filepath.Dir(clone), "scratch-")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// environment is that of a newcomer's shell: nothing of this machine's AWS configuration, one thread a trainer.
func environment(home string, more ...string) []string {
	var env []string
	for _, kv := range os.Environ() {
		if !strings.HasPrefix(kv, "AWS_") && !strings.HasPrefix(kv, "SHOAL_") && !strings.HasPrefix(kv, "PYTHON") {
			env = append(env, kv)
		}
	}
	// Debian's python3 comes first: it has the packages that setup installs.
	env = append(env, "HOME="+home, "OMP_NUM_THREADS=1", "PYTHONDONTWRITEBYTECODE=1",
		"PATH=/usr/bin:"+os.Getenv("PATH"))
	return append(env, more...)
}

func runPage(t *testing.T, path string) (notRun int) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("../../..", path))
	if err != nil {
		t.Fatal(err)
	}
	blocks, err := parsePage(string(text))
	if err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	for _, b := range blocks {
		if b.Kind == notRunBlock {
			notRun++
		}
	}
	dir := scratch(t)
	ctx, cancel := context.WithTimeout(t.Context(), 8*time.Minute)
	defer cancel()
	if err := runBlocks(ctx, path, blocks, pageSession{Dir: clone, Scratch: dir, Env: environment(dir)}); err != nil {
		t.Fatal(err)
	}
	return notRun
}

func TestStart(t *testing.T) { runPage(t, "docs/start.md") }

func TestTutorialMount(t *testing.T) { runPage(t, "docs/tutorial-mount.md") }

func TestTutorialFeed(t *testing.T) { runLongPage(t, "docs/tutorial-feed.md") }

func TestTutorialSidecar(t *testing.T) { runLongPage(t, "docs/tutorial-sidecar.md") }

func runLongPage(t *testing.T, path string) {
	t.Helper()
	if testing.Short() {
		t.Skip("make night runs it")
	}
	runPage(t, path)
}

// TestReadme runs what README.md shows of mount and feed, at the paths that it shows, in a mount namespace where these
// are empty. The bucket is the demo's, epochs are fewer, and the trainer is the one of the tutorial.
func TestReadme(t *testing.T) {
	text, err := os.ReadFile("../../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	page := string(text)
	begin, end := strings.Index(page, "### A mounted filesystem"), strings.Index(page, "### A sidecar")
	if begin < 0 || end < begin {
		t.Fatal("README.md does not have the sections that are run")
	}
	shown, err := parsePage(page[begin:end])
	if err != nil {
		t.Fatal(err)
	}
	blocks := []docBlock{{Kind: shellBlock, Code: `for d in /mnt /run /var/cache; do mount -t tmpfs none $d; done
export PATH=$PWD/bin:$PATH PYTHONPATH=$PWD/python
cd "$(mktemp -d)"
eval "$(shoal-lab store --photos 128)"
cat > train.py <<'END'
import sys
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, transforms
data = datasets.ImageFolder(sys.argv[1], transforms.Compose([transforms.RandomResizedCrop(64), transforms.ToTensor()]))
for images, labels in DataLoader(data, 32, sampler=DistributedSampler(data, num_replicas=1, rank=0, seed=7)):
    pass
END
`}}
	ran := 0
	for _, b := range shown {
		if strings.Contains(b.Code, "shoal.hint(") {
			continue // wants a sampler and a loader: docs/examples/torch_mount.py has them
		}
		b.Line += strings.Count(page[:begin], "\n")
		b.Code = strings.NewReplacer("epochs=90", "epochs=1", "range(90)", "range(1)").Replace(b.Code)
		blocks = append(blocks, b)
		ran++
	}
	if ran != 5 {
		t.Errorf("%d blocks are run, not 5", ran)
	}
	blocks = append(blocks, docBlock{Kind: shellBlock, Code: "kill $STORE_PID\n"})
	dir := scratch(t)
	ctx, cancel := context.WithTimeout(t.Context(), 8*time.Minute)
	defer cancel()
	alone, err := filepath.Abs("../../rig/alone.sh")
	if err != nil {
		t.Fatal(err)
	}
	session := pageSession{Dir: clone, Scratch: dir, Env: environment(dir),
		Within: []string{"unshare", "-m", "sh", alone, ""}}
	if err := runBlocks(ctx, "README.md", blocks, session); err != nil {
		t.Fatal(err)
	}
}
