package parts

import (
	"bufio"
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

const runEnv = "FUSECEILING_TEST_ARGS"

// The mount is served by a child: a process must not read its own mount.
func TestMain(m *testing.M) {
	if args := os.Getenv(runEnv); args != "" {
		if err := Fuseceiling(strings.Split(args, "\n")); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

func TestServesTheSameTree(t *testing.T) {
	from := t.TempDir()
	want := map[string][]byte{}
	for i := range 50 {
		path := fmt.Sprintf("d%d/e/f%02d", i%3, i)
		want[path] = bytes.Repeat([]byte{byte(i)}, i*5000)
		if err := os.MkdirAll(filepath.Join(from, filepath.Dir(path)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(from, path), want[path], 0o644); err != nil {
			t.Fatal(err)
		}
	}
	mnt := filepath.Join(t.TempDir(), "mnt")
	if err := os.Mkdir(mnt, 0o755); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), runEnv+"=-from\n"+from+"\n"+mnt)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "ready\n" {
		t.Fatal(line, err)
	}
	files := 0
	err = filepath.WalkDir(mnt, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		files++
		got, err := os.ReadFile(path)
		rel, _ := filepath.Rel(mnt, path)
		if err != nil || !bytes.Equal(got, want[rel]) {
			t.Errorf("%s: %d bytes of %d, %v", path, len(got), len(want[rel]), err)
		}
		return nil
	})
	if err != nil || files != 50 {
		t.Errorf("%d files, %v", files, err)
	}
	cmd.Process.Signal(os.Interrupt)
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
}
