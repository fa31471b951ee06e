package loader_test

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

// TestPython runs the Python client's own tests (python/tests) against the server of this package.
// They need Debian's python3-grpcio, python3-numpy, python3-torch and python3-torchvision.
func TestPython(t *testing.T) {
	server := filepath.Join(t.TempDir(), "feedserver")
	if out, err := exec.Command("go", "build", "-o", server, "./internal/feedtest/feedserver").CombinedOutput(); err != nil {
		t.Fatalf("build the test server: %v\n%s", err, out)
	}
	python := os.Getenv("SHOAL_PYTHON")
	if python == "" {
		python = "/usr/bin/python3"
	}
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, python, "-B", "-m", "unittest", "discover", "-s", ".")
	cmd.Dir = filepath.Join("..", "python", "tests")
	cmd.Env = append(os.Environ(), "SHOAL_FEEDSERVER="+server)
	cmd.WaitDelay = 10 * time.Second
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", cmd, err, out)
	}
}
