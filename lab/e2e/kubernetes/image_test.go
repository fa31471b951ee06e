package kubernetes

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"testing"
)

// images gives containerd the images: Shoal's, which make image has built, a trainer's with Python and Shoal's client,
// and the one that holds a pod's namespaces.
func (c *cluster) images(t *testing.T) {
	t.Helper()
	pause := filepath.Join(t.TempDir(), "pause")
	build := exec.Command("go", "build", "-o", pause, "./testdata/pause")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	c.load(t, "pause", map[string]string{pause: "/pause"}, map[string]any{"Entrypoint": []string{"/pause"}})
	c.load(t, "trainer", python(t), map[string]any{"WorkingDir": "/app", "Env": []string{"PATH=/usr/bin"}})
	c.archives = append(c.archives, absolute(t, "../../../bin/shoal-image.tar"))
	c.imports(t, &c.machine)
}

// imports gives a machine the images.
func (c *cluster) imports(t *testing.T, m *machine) {
	t.Helper()
	for _, path := range c.archives {
		m.ctr(t, "images", "import", path)
	}
	name := regexp.MustCompile(`\S+/shoal:\S+`).FindString(m.ctr(t, "images", "ls", "-q"))
	m.ctr(t, "images", "tag", name, registry+"shoal:"+tag)
}

func (m *machine) ctr(t *testing.T, args ...string) string {
	t.Helper()
	return m.inside(t, "ctr",
		append([]string{"--address", "/run/containerd/containerd.sock", "-n", "k8s.io"}, args...)...)
}

// load makes an image of one layer, which has files and folders under the names that they have there, and imports it.
func (c *cluster) load(t *testing.T, name string, files map[string]string, config map[string]any) {
	t.Helper()
	var layer bytes.Buffer
	w := tar.NewWriter(&layer)
	must(t, w.WriteHeader(&tar.Header{Name: "tmp/", Mode: 0o1777, Typeflag: tar.TypeDir}))
	for from, to := range files {
		must(t, filepath.WalkDir(from, func(p string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() {
				return err
			}
			b, err := os.ReadFile(p) // what a link leads to
			if err != nil {
				return err
			}
			h := &tar.Header{Name: strings.TrimPrefix(to+strings.TrimPrefix(p, from), "/"), Mode: 0o755,
				Size: int64(len(b))}
			if err = w.WriteHeader(h); err == nil {
				_, err = w.Write(b)
			}
			return err
		}))
	}
	must(t, w.Close())
	sum := sha256.Sum256(layer.Bytes())
	entry := func(v any) []byte { b, err := json.Marshal(v); must(t, err); return b }
	path := filepath.Join(t.TempDir(), "image.tar")
	f, err := os.Create(path)
	must(t, err)
	w = tar.NewWriter(f)
	for _, e := range []struct {
		name string
		data []byte
	}{
		{"layer.tar", layer.Bytes()},
		{"config.json", entry(map[string]any{"architecture": runtime.GOARCH, "os": "linux", "config": config,
			"rootfs": map[string]any{"type": "layers", "diff_ids": []string{"sha256:" + hex.EncodeToString(sum[:])}}})},
		{"manifest.json", entry(
			[]any{map[string]any{"Config": "config.json", "Layers": []string{"layer.tar"},
				"RepoTags": []string{registry + name + ":" + tag}}})},
	} {
		must(t, w.WriteHeader(&tar.Header{Name: e.name, Mode: 0o644, Size: int64(len(e.data))}))
		_, err := io.Copy(w, bytes.NewReader(e.data))
		must(t, err)
	}
	must(t, w.Close())
	must(t, f.Close())
	c.archives = append(c.archives, path)
}

// python returns what a trainer needs of this machine: Debian's Python with numpy and grpc, their libraries, and the
// client; and etcd, where its own image has it.
func python(t *testing.T) map[string]string {
	t.Helper()
	out, err := exec.Command("/usr/bin/python3", "-c",
		"import sysconfig, numpy, grpc; print(sysconfig.get_path('stdlib'), numpy.__path__[0], grpc.__path__[0])").
		Output()
	must(t, err)
	folders := strings.Fields(string(out))
	files := map[string]string{"/usr/bin/python3": "/usr/bin/python", absolute(t, "testdata/train.py"): "/app/train.py",
		"/usr/bin/etcd":                      "/usr/local/bin/etcd",
		absolute(t, "../../../python/shoal"): filepath.Dir(folders[1]) + "/shoal"}
	programs := []string{"/usr/bin/python3", "/usr/bin/etcd"}
	for _, folder := range folders {
		files[folder] = folder
		must(t, filepath.WalkDir(folder, func(p string, d fs.DirEntry, err error) error {
			if strings.HasSuffix(p, ".so") {
				programs = append(programs, p)
			}
			return err
		}))
	}
	out, err = exec.Command("ldd", programs...).Output()
	must(t, err)
	for _, m := range regexp.MustCompile(`(?m)(/\S+) \(0x`).FindAllStringSubmatch(string(out), -1) {
		files[m[1]] = m[1]
	}
	return files
}

func absolute(t *testing.T, path string) string {
	t.Helper()
	p, err := filepath.Abs(path)
	must(t, err)
	return p
}
