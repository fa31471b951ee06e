package driver_test

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

// TestPython runs the device tests of the Python client (python/tests/cuda) with this driver.
func TestPython(t *testing.T) {
	python := os.Getenv("SHOAL_PYTHON")
	if python == "" {
		python = "/usr/bin/python3"
	}
	tests, err := filepath.Glob("../../python/tests/cuda/test_*.py")
	if err != nil || len(tests) == 0 {
		t.Fatal("no tests", err)
	}
	for _, path := range tests {
		t.Run(filepath.Base(path), func(t *testing.T) {
			t.Parallel()
			tmp := t.TempDir()
			ctx, cancel := context.WithTimeout(t.Context(), 15*time.Minute)
			defer cancel()
			cmd := exec.CommandContext(ctx, python, "-B", filepath.Base(path))
			cmd.Dir = filepath.Dir(path)
			script := "pageable=0;devices=2"
			for _, kind := range []string{"step", "HtoD", "memset"} {
				file := filepath.Join(tmp, kind)
				if err := os.WriteFile(file, nil, 0o600); err != nil {
					t.Fatal(err)
				}
				script += ";hold." + kind + "=" + file
			}
			cmd.Env = append(os.Environ(), "LD_LIBRARY_PATH="+dir, "SHOAL_CUDA_DIR="+tmp,
				"SHOAL_CUDA_TRACE="+filepath.Join(tmp, "trace"),
				"SHOAL_CUDA_SCRIPT="+script)
			cmd.WaitDelay = 10 * time.Second
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Fatalf("%v: %v\n%s", cmd, err, out)
			}
		})
	}
}
