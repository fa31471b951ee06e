package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/shoalfs/shoal/lab/rig/proxy"
)

// TestParquetBeside reads the text of a dataset of Parquet in a shuffled order, over a line of 200 MB/s and 30 ms: by a
// feed (a full shuffle) in its first epoch, with and without the first list, and in its second, and by Hugging Face's
// streaming (a buffer of 10,000 rows). It judges that all read the same, and prints times.
// lab/bench/results/parquet.md has the command.
func TestParquetBeside(t *testing.T) {
	py := os.Getenv("SHOAL_BESIDE")
	if py == "" {
		t.Skip("SHOAL_BESIDE names a Python with tools/conformance/beside.txt")
	}
	p, env := far(t, proxy.Options{Latency: 30 * time.Millisecond, Bandwidth: 200 << 20, Seed: 1})
	files := os.Getenv("SHOAL_BESIDE_FILES")
	if files == "" {
		files = "8"
	}
	env = append(env, "PYTHONPATH=../../python", "PYTHONWARNINGS=ignore", "HF_HOME="+t.TempDir())
	run := func(args ...string) []byte {
		cmd := exec.CommandContext(t.Context(), py, append([]string{"-B", "parquetbeside.py"}, args...)...)
		cmd.Env, cmd.Stderr = append(os.Environ(), env...), os.Stderr
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("%v: %v", args, err)
		}
		return out
	}
	dir := t.TempDir()
	run("write", dir, files, "32")
	source := bucket(t, dir)
	var table strings.Builder
	var want string
	read := func(name string, args ...string) {
		before := p.Stats()
		out := string(run(args...))
		var rows, size int64
		var first, all float64
		if _, err := fmt.Sscan(out, &rows, &size, &first, &all); err != nil {
			t.Fatalf("%s: %v in %q", name, err, out)
		}
		after := p.Stats()
		fmt.Fprintf(&table, "| %s | %.0f | %.1f s | %.1f s | %d | %.0f MB |\n", name, float64(rows)/all, first, all,
			after.Gets-before.Gets, float64(after.GetBytes-before.GetBytes)/1e6)
		if got := fmt.Sprint(rows, size); want == "" {
			want = got
		} else if got != want {
			t.Errorf("%s read %s rows and characters, the first %s", name, got, want)
		}
	}
	addr := "unix://" + filepath.Join(t.TempDir(), "f.sock")
	began := time.Now()
	inForeground(t, env, "serve", source, "--listen", addr, "--samples", "rows:text,", "--cache-dir", t.TempDir(),
		"--memory", "2GiB")
	healthy(t, addr)
	fmt.Fprintf(&table, "| the first list | | | %.1f s | %d | %.0f MB |\n", time.Since(began).Seconds(), p.Stats().Gets,
		float64(p.Stats().GetBytes)/1e6)
	for _, way := range []string{"first", "second"} {
		read("shoal, a full shuffle, "+way+" epoch", "shoal", addr, "0")
		for _, workers := range []string{"1", "2"} {
			read("datasets, "+workers+" processes", "datasets", source, workers)
		}
	}
	t.Logf("%s files of 32,000 rows; rows/s, first batch, all, GETs, bytes\n%s", files, table.String())
}
