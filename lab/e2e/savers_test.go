package e2e

import (
	"bufio"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shoalfs/shoal/ckpt/folder"
	"github.com/shoalfs/shoal/lab/rig/etcd"
	"github.com/shoalfs/shoal/lab/rig/proxy"
)

// Libraries that save checkpoints, of today, save three into a folder that shoal ckpt carries, and wait for each. While
// they do, the bucket has only whole files, and last names only beside what they name. Then it is as the folder, its
// newest checkpoint is known, and the library loads that through a mount, the same values. It prints a table.
func TestCkptSavers(t *testing.T) {
	py := os.Getenv("SHOAL_SAVERS")
	if py == "" {
		t.Skip("make conformance runs it")
	}
	for _, c := range []struct {
		saver string
		sure  bool // it has a last name
	}{
		{"torch", false},
		{"safetensors", false},
		{"dcp", true},
		{"dcp-thread", true},
		{"dcp-process", true},
		{"dcp-hf", true},
		{"torch-checkpointing", true},
		{"lightning", false},
		{"trainer", true},
		{"orbax", true},
	} {
		t.Run(c.saver, func(t *testing.T) {
			dir, want := t.TempDir(), filepath.Join(t.TempDir(), "want.npz")
			name := newBucket(t, "")
			_, env := far(t, proxy.Options{Latency: 3 * time.Millisecond})
			carry(t, env, dir, "s3://"+name+"/run")
			w := watchBucket(name, "run")
			_, newest, _ := strings.Cut(runSaver(t, py, "save", c.saver, dir, want), "newest: ")
			newest = strings.TrimSpace(newest)
			mustShoal(t, env, "ckpt", "wait", dir, "--timeout", "60s")
			looks := w.end(t, local(t, dir))
			sameFiles(t, published(t, name, "run"), local(t, dir))
			out, errs, code := shoal(t, env, "ckpt", "latest", "s3://"+name+"/run")
			sure := !strings.Contains(errs, "no last name")
			if out != "s3://"+name+"/run/"+newest+"\n" || code != 0 || sure != c.sure {
				t.Errorf("latest: exit %d, %q, want %s, %v: %s", code, out, newest, c.sure, errs)
			}
			runSaver(t, py, "load", c.saver, filepath.Join(mount(t, env, "s3://"+name+"/run"), newest), want)
			t.Logf("| %s | %d files | %d looks | %s | %v |", c.saver, len(local(t, dir)), looks, newest, sure)
		})
	}
}

// Two ranks save with DCP, each into a folder of its own, as hosts of one cluster: the bucket has the checkpoint of
// both.
func TestCkptSaversHosts(t *testing.T) {
	py := os.Getenv("SHOAL_SAVERS")
	if py == "" {
		t.Skip("make conformance runs it")
	}
	s, err := etcd.Start(t.Context(), false)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	dir, want := t.TempDir(), filepath.Join(t.TempDir(), "want.npz")
	name := newBucket(t, "")
	all := map[string]string{}
	w := watchBucket(name, "run")
	var hosts []string
	for i := range 2 {
		_, env := far(t, proxy.Options{Latency: time.Duration(3+40*i) * time.Millisecond})
		hosts = append(hosts, filepath.Join(dir, fmt.Sprint("host-", i)))
		if err := os.Mkdir(hosts[i], 0o755); err != nil {
			t.Fatal(err)
		}
		carry(t, env, hosts[i], "s3://"+name+"/run", "--cluster", "etcd://"+s.Addr+"/train")
	}
	runSaver(t, py, "save", "dcp-hosts", dir, want)
	for _, host := range hosts {
		mustShoal(t, nil, "ckpt", "wait", host, "--timeout", "60s")
		maps.Copy(all, local(t, host))
	}
	t.Logf("%d files, %d looks", len(all), w.end(t, all))
	sameFiles(t, published(t, name, "run"), all)
	_, env := far(t, proxy.Options{})
	runSaver(t, py, "load", "dcp-hosts", filepath.Join(mount(t, env, "s3://"+name+"/run"), "step-3"), want)
}

// DCP itself on the hosts of TestCkptHosts: four ranks, each with a folder of its own.
func TestCkptSaversFleet(t *testing.T) {
	py := os.Getenv("SHOAL_SAVERS")
	if py == "" {
		t.Skip("make conformance runs it")
	}
	var end func() error
	ckptHosts(t, func(dirs []string, seed uint64) func(int) func() {
		cmd := saverCommand(t, py, append([]string{"fleet", fmt.Sprint(seed)}, dirs...)...)
		cmd.Stderr = os.Stderr
		in, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		out, err := cmd.StdoutPipe()
		if err == nil {
			err = cmd.Start()
		}
		if err != nil {
			t.Fatal(err)
		}
		end = func() error { return errors.Join(in.Close(), cmd.Wait()) }
		saved := bufio.NewScanner(out)
		return func(step int) (finish func()) {
			fmt.Fprintln(in, step)
			return func() {
				if !saved.Scan() || saved.Text() != fmt.Sprint("saved ", step) {
					t.Fatalf("save %d: %q, %v", step, saved.Text(), saved.Err())
				}
			}
		}
	})
	if err := end(); err != nil {
		t.Error(err)
	}
}

func saverCommand(t *testing.T, py string, args ...string) *exec.Cmd {
	client, _ := filepath.Abs("../../python")
	cmd := exec.CommandContext(t.Context(), py, append([]string{"savers.py"}, args...)...)
	cmd.Env = append(os.Environ(), "PYTHONPATH="+client, "PYTHONDONTWRITEBYTECODE=1", "HF_HUB_OFFLINE=1",
		"JAX_PLATFORMS=cpu")
	return cmd
}

func runSaver(t *testing.T, py string, args ...string) string {
	t.Helper()
	out, err := saverCommand(t, py, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %v\n%s", args, err, out)
	}
	return string(out)
}

// A bucketWatch looks at a bucket, again and again.
type bucketWatch struct {
	root    string
	isLast  func(string) bool
	stop    chan struct{}
	stopped chan struct{}
	err     error
	looks   int
	objects map[string]fs.FileInfo
	saw     map[string][][sha256.Size]byte // the contents that an object has had
	beside  map[string][]string            // what was visible when a last name was seen first
}

func watchBucket(bucket, prefix string) *bucketWatch {
	isLast, err := folder.LastNames()
	w := &bucketWatch{root: objectsOf(bucket, prefix), isLast: isLast, err: err,
		stop: make(chan struct{}), stopped: make(chan struct{}), objects: map[string]fs.FileInfo{},
		saw: map[string][][sha256.Size]byte{}, beside: map[string][]string{}}
	go func() {
		defer close(w.stopped)
		for w.err == nil {
			select {
			case <-w.stop:
				return
			case <-time.After(2 * time.Millisecond): // the saver needs the processor, too
				w.look()
			}
		}
	}()
	return w
}

func (w *bucketWatch) look() {
	w.looks++
	var names []string
	names, w.err = visible(w.root)
	for _, name := range names {
		if w.isLast(name) && w.beside[name] == nil {
			w.beside[name] = names
		}
		path := filepath.Join(w.root, name)
		now, err := os.Stat(path)
		if before := w.objects[name]; err == nil && before != nil && os.SameFile(before, now) &&
			before.ModTime().Equal(now.ModTime()) {
			continue
		}
		var b []byte
		if err == nil {
			b, err = os.ReadFile(path)
		}
		if errors.Is(err, fs.ErrNotExist) {
			continue
		} else if err != nil {
			w.err = err
			return
		}
		w.objects[name] = now
		if sum := sha256.Sum256(b); !slices.Contains(w.saw[name], sum) {
			w.saw[name] = append(w.saw[name], sum)
		}
	}
}

// end compares what was seen with the files as they are in the end, and returns how often it looked.
func (w *bucketWatch) end(t *testing.T, files map[string]string) (looks int) {
	t.Helper()
	close(w.stop)
	<-w.stopped
	if w.err != nil {
		t.Fatal(w.err)
	}
	for name, saw := range w.saw {
		if len(saw) != 1 || saw[0] != sha256.Sum256([]byte(files[name])) {
			t.Errorf("%s: %d contents were visible", name, len(saw))
		}
	}
	for last, beside := range w.beside {
		in := strings.TrimSuffix(last, filepath.Base(last))
		for name := range files {
			if strings.HasPrefix(name, in) && !w.isLast(name) && !slices.Contains(beside, name) {
				t.Errorf("%s was visible before %s", last, name)
			}
		}
	}
	return w.looks
}
