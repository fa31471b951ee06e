package e2e

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/lab/rig/proxy"
)

// ociConfig is what the tests look at of an image's configuration.
type ociConfig struct {
	OS, Architecture string
	Config           struct {
		User                 string
		Entrypoint, Cmd, Env []string
		Labels               map[string]string
		Healthcheck          struct{ Test []string }
	}
}

// ociImage reads the image of an OCI layout for this machine's architecture.
func ociImage(t testing.TB, layout string) (config ociConfig, layers []string, bill []byte) {
	t.Helper()
	type descriptor struct {
		MediaType, Digest string
		Size              int64
	}
	type manifest struct {
		Manifests []descriptor
		Config    descriptor
		Layers    []descriptor
		Subject   *descriptor
	}
	blob := func(d descriptor) string {
		return filepath.Join(layout, "blobs", strings.ReplaceAll(d.Digest, ":", "/"))
	}
	read := func(path string, into any) {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(b, into); err != nil {
			t.Fatalf("%s: %v", path, err)
		}
	}
	var top, index, image, referrer manifest
	read(filepath.Join(layout, "index.json"), &top)
	if len(top.Manifests) != 2 {
		t.Fatalf("%d entries in the layout, want the index and one bill", len(top.Manifests))
	}
	read(blob(top.Manifests[0]), &index)
	read(blob(index.Manifests[0]), &image)
	read(blob(image.Config), &config)
	for _, l := range image.Layers {
		layers = append(layers, blob(l))
	}
	read(blob(top.Manifests[1]), &referrer)
	if referrer.Subject == nil || referrer.Subject.Digest != index.Manifests[0].Digest {
		t.Errorf("the bill is attached to %v, and not to the image %s", referrer.Subject, index.Manifests[0].Digest)
	}
	bill, err := os.ReadFile(blob(referrer.Layers[0]))
	if err != nil {
		t.Fatal(err)
	}
	return config, layers, bill
}

// tmpfs mounts a fresh one, whose propagation is as the flag says, and takes it and all that lies on it away in the
// end.
func tmpfs(t testing.TB, propagation uintptr) string {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "mode=755"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	if err := unix.Mount("", dir, "", propagation, ""); err != nil {
		t.Fatal(err)
	}
	return dir
}

// pod has the volumes that its containers share, as a kubelet makes them.
type pod struct {
	root string // unpacked image
	env  []string
	mnt  string // shared both ways with the sidecar, seen by the trainer
	run  string // for the socket
}

// start starts a container from the image as process 1 of its own, with mount and pid namespaces. become is a command
// that goes on as the rest of its line, with fewer rights.
func (p *pod) start(t testing.TB, cache, become string, readOnly bool, args ...string) *foreground {
	t.Helper()
	script := `set -e
root=$1 mnt=$2 run=$3 cache=$4 become=$5 ro=$6; shift 6
mount -t proc proc "$root/proc"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
for d in null urandom fuse; do : >"$root/dev/$d"; mount --bind /dev/$d "$root/dev/$d"; done
mount --rbind "$mnt" "$root/mnt"
mount --bind "$run" "$root/run/shoal"
mount --bind "$cache" "$root/var/cache/shoal"
[ -z "$ro" ] || mount -o remount,ro "$root"
exec $become "$root" /usr/bin/shoal "$@"`
	ro := ""
	if readOnly {
		ro = "ro"
	}
	cmd := exec.Command("sh", append([]string{alone, p.mnt, "sh", "-c", script,
		"sh", p.root, p.mnt, p.run, cache, become, ro}, args...)...)
	cmd.Env = p.env
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWIPC |
		unix.CLONE_NEWUTS}
	return startForeground(t, cmd)
}

// probe runs a command in a container, as a probe does, until it succeeds.
func (p *pod) probe(t testing.TB, c *foreground, cmd []string) string {
	t.Helper()
	var out []byte
	within(t, 2*time.Minute, "the container is healthy", func() bool {
		select {
		case <-c.exited:
			t.Fatalf("the container ended: %v\n%s", c.err, c.log())
		default:
		}
		var err error
		out, err = exec.Command("nsenter",
			append([]string{"-t", fmt.Sprint(c.cmd.Process.Pid), "-m", "-p", "-r", "-w"}, cmd...)...).CombinedOutput()
		return err == nil
	})
	return string(out)
}

// The image is made twice with the same bits, says what it holds, and is small. Its root file system, started as a
// sidecar is, serves a mount and a feed to a trainer in another mount namespace and of another user, is replaced after
// a SIGKILL, and ends in good order; and a feed without any rights.
func TestImage(t *testing.T) {
	long(t)
	outs := [2]string{t.TempDir(), t.TempDir()}
	for _, out := range outs {
		cmd := exec.Command("make", "--no-print-directory", "-C", "../..", "image", "OUT="+out, "ARCHS="+runtime.GOARCH)
		cmd.Env = append(os.Environ(), "MAKEFLAGS=", "MFLAGS=") // make check runs this
		if b, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("make image: %v\n%s", err, b)
		} else {
			t.Logf("%s", lastLine(string(b)))
		}
	}
	tar, err := os.ReadFile(filepath.Join(outs[0], "shoal-image.tar"))
	if err != nil {
		t.Fatal(err)
	}
	again, err := os.ReadFile(filepath.Join(outs[1], "shoal-image.tar"))
	if err != nil || !bytes.Equal(tar, again) {
		t.Errorf("made twice, the image differs (%v)", err)
	}
	if len(tar) > 60e6 {
		t.Errorf("the image has %d bytes", len(tar))
	}
	for _, name := range []string{"manifest.json", "shoal"} { // what `docker load` reads first
		if !bytes.Contains(tar, []byte(name)) {
			t.Errorf("no %s in the tarball", name)
		}
	}

	config, layers, bill := ociImage(t, filepath.Join(outs[0], "shoal-image"))
	if config.OS != "linux" || config.Architecture != runtime.GOARCH || config.Config.User != "65532:65532" {
		t.Errorf("%+v", config)
	}
	for _, label := range []string{"title", "version", "revision", "created", "source", "licenses"} {
		if config.Config.Labels["org.opencontainers.image."+label] == "" && label != "revision" {
			t.Errorf("no label %s", label)
		}
	}
	beside, err := os.ReadFile(filepath.Join(outs[0], "shoal-image-"+runtime.GOARCH+".cdx.json"))
	if err != nil || !bytes.Equal(bill, beside) {
		t.Errorf("the bill beside the image is another than the one attached (%v)", err)
	}
	var sbom struct {
		BomFormat  string
		Components []struct{ Name, Version, Purl string }
	}
	if err := json.Unmarshal(bill, &sbom); err != nil || sbom.BomFormat != "CycloneDX" {
		t.Errorf("%v: %.200s", err, bill)
	}
	var parts []string
	for _, c := range sbom.Components {
		if c.Version == "" {
			t.Errorf("%s has no version", c.Name)
		}
		parts = append(parts, c.Name)
	}
	for _, want := range []string{"stdlib", "github.com/minio/minio-go/v7", "github.com/hanwen/go-fuse/v2",
		"libjpeg62-turbo-dev", "libc6-dev", "golang.org/x/crypto/x509roots/fallback"} {
		if !slices.Contains(parts, want) {
			t.Errorf("the bill does not name %s, but %v", want, parts)
		}
	}

	dir, paths := pictures(t, 2, 16)
	_, env := far(t, proxy.Options{})
	source := bucket(t, dir)
	p := &pod{root: tmpfs(t, unix.MS_PRIVATE), mnt: tmpfs(t, unix.MS_SHARED), run: tmpfs(t, unix.MS_PRIVATE),
		env: append(config.Config.Env, env...)}
	for _, l := range layers {
		if out, err := exec.Command("tar", "-C", p.root, "-xzpf", l).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	inside, err := os.ReadFile(filepath.Join(p.root, "usr/share/sbom/shoal.cdx.json"))
	if err != nil || !bytes.Equal(bill, inside) {
		t.Errorf("the bill in the image is another (%v)", err)
	}
	if roots, err := os.ReadFile(filepath.Join(p.root, "etc/ssl/certs/ca-certificates.crt")); err != nil ||
		bytes.Count(roots, []byte("BEGIN CERTIFICATE")) < 50 {
		t.Errorf("authorities: %v, %d bytes", err, len(roots))
	}
	for _, d := range []string{"proc", "dev"} { // as the runtime does
		if err := os.Mkdir(filepath.Join(p.root, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if config.Config.Entrypoint[0] != "/usr/bin/shoal" || config.Config.Healthcheck.Test[0] != "CMD" {
		t.Fatalf("%+v", config)
	}
	health := config.Config.Healthcheck.Test[1:]

	// The trainer is there first, as another user in the group of the sockets.
	reader := startSteps(t, apart(p.mnt, "sh", "-c",
		`mount --make-rslave "$1" && cd "$1" && exec setpriv --reuid 1000 --regid 1000 --groups 65532 /usr/bin/python3 -u -c "$2" data`, "sh", p.mnt, stepsScript))
	reader.want("sha256 "+paths[0], errno(syscall.ENOENT))
	readThere := func() {
		t.Helper()
		for _, path := range paths {
			b, err := os.ReadFile(filepath.Join(dir, path))
			if err != nil {
				t.Fatal(err)
			}
			sum := sha256.Sum256(b)
			reader.want("sha256 "+path, hex.EncodeToString(sum[:]))
		}
	}
	// Root, with the capabilities that deploy/compose leaves it, and what chroot itself needs.
	const limited = "setpriv --bounding-set=-all,+sys_admin,+dac_override,+chown,+sys_chroot /usr/sbin/chroot"
	cache := t.TempDir()
	serve := []string{"serve", source, "--mount", "/mnt/data", "--allow-other", "--socket-group", "65532"}
	addr := "unix://" + filepath.Join(p.run, "feed.sock")
	want := digest(t, dir, paths, orderOf(t, "uniform:seed=3", len(paths)))
	for kill := range 2 {
		sidecar := p.start(t, cache, limited, true, serve...)
		if said := p.probe(t, sidecar, health); !strings.Contains(said, "/mnt/data") {
			t.Errorf("healthy before it was mounted: %s", said)
		}
		readThere()
		if got := feed(t, addr, "--batch", "8", "--seed", "3"); got.Digest != want {
			t.Error("the feed from the image delivers other samples")
		}
		if kill == 0 {
			sidecar.signal(t, syscall.SIGKILL)
			<-sidecar.exited
			if got := reader.do("sha256 " + paths[0]); !strings.HasPrefix(got, "errno") {
				t.Errorf("the sidecar is dead, and a read gives %s", got)
			}
			continue
		}
		sidecar.signal(t, syscall.SIGTERM)
		sidecar.ended(t)
		reader.want("sha256 "+paths[0], errno(syscall.ENOENT)) // unmounted in the trainer's namespace, too
	}

	// As the image's user, without a right, on a root file system that nobody can write to.
	own := tmpfs(t, unix.MS_PRIVATE)
	for _, d := range []string{own, p.run} {
		if err := os.Chown(d, 65532, 65532); err != nil {
			t.Fatal(err)
		}
	}
	only := p.start(t, own, "setpriv --no-new-privs /usr/sbin/chroot --userspec=65532:65532 --groups=65532", true,
		"serve", source)
	p.probe(t, only, health)
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", only.cmd.Process.Pid))
	if err != nil || !bytes.Contains(status, []byte("CapEff:\t0000000000000000")) ||
		!bytes.Contains(status, []byte("Uid:\t65532")) || !bytes.Contains(status, []byte("NoNewPrivs:\t1")) {
		t.Errorf("the feed's process has rights (%v):\n%s", err, status)
	}
	if got := feed(t, addr, "--batch", "8", "--seed", "3"); got.Digest != want {
		t.Error("the feed of an ordinary user delivers other samples")
	}
	only.signal(t, syscall.SIGTERM)
	only.ended(t)
}
