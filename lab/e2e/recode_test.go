package e2e

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// packed packs a source and mounts what came of it.
func packed(t testing.TB, source string, flags ...string) (set, mnt, version string) {
	t.Helper()
	set = filepath.Join(t.TempDir(), "set")
	out := mustShoal(t, nil,
		append([]string{"pack", source, "file://" + set, "--json", "--spool", t.TempDir()}, flags...)...)
	var r struct{ Version string }
	if err := json.Unmarshal([]byte(out), &r); err != nil || r.Version == "" {
		t.Fatalf("pack says %q: %v", out, err)
	}
	return set, mount(t, nil, "file://"+set, "--samples", "*"), r.Version
}

// Pixels that pack has decoded are Pillow's, and a feed of them delivers what a feed of the JPEGs does:
// the same samples in the same order with the same labels, byte for byte.
func TestPackDecoded(t *testing.T) {
	dir, paths := photographs(t, 24)
	write(t, filepath.Join(dir, paths[0]+".txt"), []byte("no picture"))
	set, mnt, version := packed(t, "file://"+dir, "--decode")
	if _, _, again := packed(t, "file://"+dir, "--decode"); again != version {
		t.Errorf("packed again, the version is %s, before %s", again, version)
	}
	args := []string{"-c", `
import sys, numpy as np
from PIL import Image
dir, mnt = sys.argv[1:3]
for p in sys.argv[3:]:
    with Image.open(f"{dir}/{p}") as im:
        want = np.asarray(im.convert("RGB"))
    got = np.load(f"{mnt}/{p}.npy")
    assert got.dtype == np.uint8 and got.shape == want.shape and (got == want).all(), p
`, dir, mnt}
	if out, err := exec.Command("/usr/bin/python3", append(args, paths...)...).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if text, err := os.ReadFile(filepath.Join(mnt, paths[0]+".txt")); err != nil || string(text) != "no picture" {
		t.Errorf("what is no picture: %q, %v", text, err)
	}
	manifest, err := os.ReadFile(filepath.Join(set, "shoal-manifest.json"))
	if err != nil || !strings.Contains(string(manifest), "decoded to npy") {
		t.Errorf("the manifest does not say that the pictures were decoded: %v\n%s", err, manifest)
	}
	for _, transform := range []string{"RandomResizedCrop(64)|RandomHorizontalFlip()|uint8",
		"Resize(80)|CenterCrop(64)|fp16|nhwc"} {
		var digests []string
		for _, source := range []string{"file://" + dir, "file://" + set} {
			addr, _ := serve(t, nil, source)
			digests = append(digests, feed(t, addr, "--batch", "8", "--order", "torch:seed=3", "--seed", "5",
				"--transform", transform).Digest)
		}
		if digests[0] != digests[1] {
			t.Errorf("%s: the digest is %s from JPEG and %s from pixels", transform, digests[0], digests[1])
		}
	}
}

// Pictures that pack resizes are those that Pillow would have made; small ones stay, byte for byte.
func TestPackResized(t *testing.T) {
	long(t)
	dir, paths := photographs(t, 23)
	small, _ := pictures(t, 1, 1) // 200 x 150
	data, err := os.ReadFile(filepath.Join(small, "class00/img0000.jpg"))
	if err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(dir, "small/a.jpg"), data)
	_, mnt, _ := packed(t, "file://"+dir, "--resize", "short=151", "--quality", "85")
	if got, err := os.ReadFile(filepath.Join(mnt, "small/a.jpg")); err != nil || string(got) != string(data) {
		t.Errorf("a small picture was changed, or lost: %v", err)
	}
	args := []string{"-c", `
import io, sys, numpy as np
from PIL import Image
dir, mnt = sys.argv[1:3]
for p in sys.argv[3:]:
    with Image.open(f"{dir}/{p}") as im:
        im = im.convert("RGB")
    short = min(im.size)
    w, h = (int(151 * s / short) for s in im.size)
    out = io.BytesIO()
    im.resize((w, h), Image.BILINEAR).save(out, "JPEG", quality=85)
    want = np.asarray(Image.open(out))
    got = np.asarray(Image.open(f"{mnt}/{p}"))
    assert got.shape == want.shape and (got == want).all(), (p, got.shape, want.shape)
`, dir, mnt}
	if out, err := exec.Command("/usr/bin/python3", append(args, paths...)...).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}

// A recoding that is killed goes on where it was, and leaves nothing behind in the end.
func TestPackRecodeKilled(t *testing.T) {
	long(t)
	dir, _ := photographs(t, 40)
	_, _, want := packed(t, "file://"+dir, "--decode")
	spool, set := t.TempDir(), filepath.Join(t.TempDir(), "set")
	args := []string{"pack", "file://" + dir, "file://" + set, "--json", "--decode", "--spool", spool}
	for _, made := range []int{1, 10, 30} {
		c := exec.Command(shoalBin, args...)
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		within(t, patience, "files in the spool, or the end", func() bool {
			notes, _ := filepath.Glob(filepath.Join(spool, "*", "*.json"))
			_, err := os.Stat(filepath.Join(set, "shoal-manifest.json"))
			return len(notes) > made || err == nil
		})
		_ = c.Process.Signal(syscall.SIGKILL)
		_ = c.Wait()
	}
	var r struct{ Version string }
	if out := mustShoal(t, nil, args...); json.Unmarshal([]byte(out), &r) != nil || r.Version != want {
		t.Errorf("%s after kills, want version %s", out, want)
	}
	if left, err := filepath.Glob(filepath.Join(spool, "*")); err != nil || len(left) > 0 {
		t.Errorf("left in the spool: %v, %v", left, err)
	}
}
