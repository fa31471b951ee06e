package demo

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/shoalfs/shoal/lab/rig/photos"
	"github.com/shoalfs/shoal/lab/rig/testbed"
)

//go:embed trainer/*.py
var trainers embed.FS

// ErrMissing says that the machine lacks something that the demo needs.
var ErrMissing = errors.New("demo: something is missing")

// missing returns what the demo needs and does not find, each with the command that gets it.
func (j *job) missing(ctx context.Context) []string {
	packages, other := j.missingModules(ctx), testbed.Missing()
	if _, err := os.Stat(j.Python); err != nil {
		packages = append([]string{"python3"}, packages...)
	}
	_, err := photos.Sources()
	wallpapers, _ := errors.AsType[photos.Missing](err)
	packages = append(packages, wallpapers...)
	if _, err := os.Stat(j.Shoal); err != nil {
		other = append(other, fmt.Sprintf("%s is not there: run make build", j.Shoal))
	}
	if len(packages) > 0 {
		other = append([]string{"Debian packages: apt-get update && apt-get install --no-install-recommends " +
			strings.Join(packages, " ")}, other...)
	}
	return other
}

// missingModules returns the packages of the Python modules that cannot be found: of all without an interpreter.
func (j *job) missingModules(ctx context.Context) []string {
	modules := []struct{ name, pkg string }{
		{"torch", "python3-torch"}, {"torchvision", "python3-torchvision"}, {"numpy", "python3-numpy"},
		{"PIL", "python3-pil"}, {"grpc", "python3-grpcio"},
	}
	args := []string{"-c", "import sys, importlib.util as u; print(*[m for m in sys.argv[1:] if u.find_spec(m) " +
		"is None])"}
	for _, m := range modules {
		args = append(args, m.name)
	}
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, j.Python, args...).Output()
	absent := strings.Fields(string(out))
	var packages []string
	for _, m := range modules {
		if err != nil || slices.Contains(absent, m.name) {
			packages = append(packages, m.pkg)
		}
	}
	return packages
}

// writeTrainers puts the trainers and the Python client into WorkDir/trainer.
func (j *job) writeTrainers() error {
	dir := j.path("trainer")
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	scripts, err := fs.Sub(trainers, "trainer")
	if err != nil {
		return err
	}
	return errors.Join(os.CopyFS(dir, scripts), os.CopyFS(dir, j.Client))
}

// dropKernelCaches empties the page, inode and dentry caches, which only root may.
func dropKernelCaches() bool {
	syscall.Sync()
	return os.WriteFile("/proc/sys/vm/drop_caches", []byte("3\n"), 0o200) == nil
}
