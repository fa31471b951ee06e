package loader_test

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/shoalfs/shoal/lab/rig/certtest"
)

// TestPython runs the Python client's own tests (python/tests) against the server of this package.
// They need Debian's python3-grpcio, python3-numpy, python3-torch and python3-torchvision.
func TestPython(t *testing.T) {
	server, err := os.Executable() // it serves them, too: serveFeed
	if err != nil {
		t.Fatal(err)
	}
	python := os.Getenv("SHOAL_PYTHON")
	if python == "" {
		python = "/usr/bin/python3"
	}
	certs := t.TempDir()
	authority := certtest.New(t, "the tests' authority")
	place(t, certs, "ca.crt", authority.File)
	for _, name := range []string{"server", "client"} {
		cert, key := authority.Issue(t, "127.0.0.1", time.Hour)
		place(t, certs, name+".crt", cert)
		place(t, certs, name+".key", key)
	}
	place(t, certs, "other.crt", certtest.New(t, "somebody else").File)
	// half of the work each: they mostly start interpreters
	for _, files := range []string{"test_[a-q]*.py", "test_[r-z]*.py"} {
		t.Run(files, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithTimeout(t.Context(), 30*time.Minute) // with 30 other programs on two processors
			defer cancel()
			cmd := exec.CommandContext(ctx, python, "-B", "-m", "unittest", "discover", "-v", "-s", ".", "-p", files)
			cmd.Dir = filepath.Join("..", "python", "tests")
			cmd.Env = append(os.Environ(), "SHOAL_FEEDSERVER="+server, "SHOAL_CERTS="+certs)
			cmd.WaitDelay = 10 * time.Second
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Fatalf("%v: %v\n%s", cmd, err, out)
			}
		})
	}
}

// place copies a file to where the Python tests look for it.
func place(t *testing.T, dir, name, from string) {
	t.Helper()
	data, err := os.ReadFile(from)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
		t.Fatal(err)
	}
}
