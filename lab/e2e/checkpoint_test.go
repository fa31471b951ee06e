package e2e

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/shoalfs/shoal/lab/rig/proxy"
)

// It prints the class of the error, or null, and what it says.
const waitInPython = `
import json, os, pathlib, sys, threading
import shoal.checkpoint

def ask(path, timeout=60):
    try:
        shoal.checkpoint.wait(path, timeout)
    except Exception as e:
        return type(e).__name__, str(e)
    return None, ""

dir, other = sys.argv[1:]
said = {}
if other:
    said["whole"] = ask(pathlib.Path(dir, "step-1"))
    os.chdir(dir)
    said["relative"] = ask("step-1/a.bin")
    said["no time"] = ask(dir, 0)
    said["none"] = ask(dir + "/none")
    said["other"] = ask(other)
    with open(dir + "/step-1/b.bin", "wb") as f:
        f.write(b"half")
        f.flush()
        said["written"] = ask(dir + "/step-1", 0.2)
        waiting = threading.Thread(target=lambda: said.update(closed=ask(dir + "/step-1")))
        waiting.start()
        f.write(b", and the rest")
    waiting.join()
else:
    said["ended"] = ask(dir + "/step-1")
json.dump(said, sys.stdout)
`

// shoal.checkpoint.wait returns when the bucket has the files, also those that are being written, and raises what it
// says.
func TestCkptPython(t *testing.T) {
	dir := t.TempDir()
	name := newBucket(t, "")
	_, env := far(t, proxy.Options{})
	d := carry(t, env, dir, "s3://"+name+"/run")
	write(t, filepath.Join(dir, "step-1/a.bin"), []byte("a"))
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(dir, link); err != nil {
		t.Fatal(err)
	}
	var said map[string][2]string
	expect := func(class map[string]string) {
		t.Helper()
		for what, want := range class {
			if got, ok := said[what]; !ok || got[0] != want {
				t.Errorf("%s: %q, want %q", what, got, want)
			}
		}
	}
	runPython(t, &said, waitInPython, link, t.TempDir())
	expect(map[string]string{"whole": "", "relative": "", "no time": "", "none": "FileNotFoundError",
		"other":   "ConnectionError",
		"written": "TimeoutError", "closed": ""})
	sameFiles(t, published(t, name, "run"), local(t, dir))
	d.signal(t, syscall.SIGKILL) // its socket stays
	<-d.exited
	runPython(t, &said, waitInPython, dir, "")
	expect(map[string]string{"ended": "ConnectionError"})
	t.Log(said)
}
