package kernel_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/shoalfs/shoal/gpuingest/cuda/kernel"
)

func read(t *testing.T, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// TestPTXIsOfTheSource finds a source that was changed without `go generate`.
func TestPTXIsOfTheSource(t *testing.T) {
	sum := sha256.Sum256(read(t, "finish.cu"))
	head, _, _ := strings.Cut(kernel.PTX, "\n")
	if !strings.Contains(head, hex.EncodeToString(sum[:])) {
		t.Errorf("finish.ptx is not of this finish.cu: run go generate ./gpuingest/cuda/kernel\n%s", head)
	}
}

func TestPTXIsReproducible(t *testing.T) {
	if _, err := exec.LookPath("clang-14"); err != nil {
		t.Skip("clang-14 is not installed")
	}
	dir := t.TempDir()
	for _, name := range []string{"finish.cu", "generate.go"} {
		if err := os.WriteFile(dir+"/"+name, read(t, name), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	work := dir + "/a/b/c"
	for _, d := range []string{work, dir + "/python/shoal"} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"finish.cu", "generate.go"} {
		if err := os.Rename(dir+"/"+name, work+"/"+name); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.Command("go", "run", "generate.go")
	cmd.Dir = work
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if !bytes.Equal(read(t, dir+"/python/shoal/finish.ptx"), []byte(kernel.PTX)) {
		t.Error("clang-14 makes another finish.ptx of finish.cu than the one that is committed")
	}
}

// TestPTXAssembles has NVIDIA's own assembler judge the PTX, where it is installed (Debian: nvidia-cuda-toolkit, in
// non-free). SHOAL_PTXAS names one that is not on PATH.
func TestPTXAssembles(t *testing.T) {
	ptxas := os.Getenv("SHOAL_PTXAS")
	if ptxas == "" {
		var err error
		if ptxas, err = exec.LookPath("ptxas"); err != nil {
			t.Skip("ptxas is not installed")
		}
	}
	for _, arch := range []string{"sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90"} {
		if out, err := exec.Command(ptxas, "-arch="+arch, "-o", t.TempDir()+"/finish.cubin",
			"../../../python/shoal/finish.ptx").CombinedOutput(); err != nil {
			t.Errorf("%s: %v\n%s", arch, err, out)
		}
	}
}

func TestName(t *testing.T) {
	for _, elem := range []int{1, 2, 4} {
		for _, layout := range []string{"nchw", "nhwc"} {
			if name := kernel.Name(elem, layout); !strings.Contains(kernel.PTX, ".entry "+name+"(") {
				t.Errorf("elements of %d bytes, %s: %q: not in the PTX", elem, layout, name)
			}
		}
	}
}
