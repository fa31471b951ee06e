package e2e

import (
	"bytes"
	"crypto/rand"
	"encoding/base64"
	"encoding/hex"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/shoalfs/shoal/lab/rig/proxy"
)

// newKey returns a new encryption key as text.
func newKey() string {
	b := make([]byte, 32)
	_, _ = rand.Read(b)
	return base64.StdEncoding.EncodeToString(b)
}

func content(t testing.TB, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// TestEncryptedCache uses an encrypted cache by every verb, and looks for what it caches on its disk.
func TestEncryptedCache(t *testing.T) {
	dir, paths := tree(t, 2, 30, 40<<10)
	marker := []byte("these are the pixels of somebody's X-ray, ")
	write(t, filepath.Join(dir, "class00/patient-4711.jpg"), bytes.Repeat(marker, 5<<20/len(marker)))
	paths = append(paths, "class00/patient-4711.jpg")
	p, env := far(t, proxy.Options{})
	source := bucket(t, dir)
	cache, keyFile, other := t.TempDir(), filepath.Join(t.TempDir(), "key"), filepath.Join(t.TempDir(), "other")
	key := newKey()
	write(t, keyFile, []byte(key+"\n"))
	raw, _ := base64.StdEncoding.DecodeString(newKey())
	write(t, other, raw)
	flags := []string{"--cache-dir", cache, "--encryption-key-file", keyFile}

	mustShoal(t, env, append([]string{"warm", source, "--fraction", "0.5"}, flags...)...)
	mnt := mount(t, env, source, append(flags, "--kernel-cache", "off", "--order", "torch:seed=1")...)
	readAll(t, mnt, dir, paths)
	waitKept(t, mnt, len(paths))
	// Another who shares the daemon gives the right key, or none.
	for _, c := range []struct {
		flags []string
		code  int
	}{{[]string{"--encryption-key-file", keyFile}, 0}, {nil, 0}, {[]string{"--encryption-key-file", other}, 1}} {
		_, errs, code := shoal(t, env, append([]string{"cache", "ls", cache}, c.flags...)...)
		if code != c.code || code != 0 && !strings.Contains(errs, "wrong encryption key") {
			t.Errorf("cache ls %v: exit %d, %s", c.flags, code, errs)
		}
	}
	umount(t, mnt)
	t.Run("feed", func(t *testing.T) { // a test of its own: its end is the server's
		addr, _ := serve(t, env, source, flags...)
		if r := feed(t, addr, "--batch", "8", "--epochs", "1"); r.Samples != len(paths) {
			t.Errorf("%+v", r)
		}
	})
	before := p.Stats()
	mnt = mount(t, append(env, "SHOAL_ENCRYPTION_KEY="+key), source, "--cache-dir", cache, "--kernel-cache", "off")
	readAll(t, mnt, dir, paths)
	if d := p.Stats().Sub(before); d.Gets != 0 {
		t.Errorf("%d GETs from a cache that was whole", d.Gets)
	}
	umount(t, mnt)

	kinds := map[string]bool{}
	err := filepath.WalkDir(cache, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() || d.Name() == "shoal.log" { // which names the source
			return err
		}
		b, err := os.ReadFile(path)
		kinds[strings.SplitN(strings.TrimPrefix(path, cache+"/"), "/", 2)[0]] = true
		for _, text := range []string{"X-ray", "pixels of", "patient-4711",
			"class00", bucketName(t), key, hex.EncodeToString(raw)} {
			if bytes.Contains(b, []byte(text)) {
				t.Errorf("%q is in %s", text, path)
			}
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, kind := range []string{"segments", "manifests", "tables", "facts", "ENCRYPTION"} {
		if !kinds[kind] {
			t.Errorf("no %s among %v: the test has looked at nothing", kind, kinds)
		}
	}

	// What does not fit is refused at once, in one line with the remedy, and in the background, too.
	for name, c := range map[string]struct {
		args []string
		want []string
	}{
		"no key": {[]string{"--cache-dir", cache},
			[]string{"is encrypted", "--encryption-key-file", "SHOAL_ENCRYPTION_KEY"}},
		"wrong key": {[]string{"--cache-dir", cache, "--encryption-key-file", other},
			[]string{"wrong encryption key", "another --cache-dir"}},
		"no such file": {[]string{"--cache-dir", cache, "--encryption-key-file", "/nowhere/key"},
			[]string{"--encryption-key-file", "/nowhere/key"}},
		"no key inside": {[]string{"--cache-dir", cache,
			"--encryption-key-file", filepath.Join(dir, "class00/patient-4711.jpg")}, []string{"32 random bytes"}},
	} {
		for _, verb := range [][]string{{"mount", source, t.TempDir(), "--daemon"}, {"warm", source}} {
			_, errs, code := shoal(t, env, append(verb, c.args...)...)
			if code != 1 || strings.Count(errs, "\n") != 1 {
				t.Errorf("%s, %s: exit %d, %s", name, verb[0], code, errs)
			}
			for _, text := range c.want {
				if !strings.Contains(errs, text) {
					t.Errorf("%s, %s: %q is not in %s", name, verb[0], text, errs)
				}
			}
		}
	}
	for _, verb := range [][]string{{"fsck", cache}, {"cache", "ls", cache}, {"cache", "rm", cache, source}} {
		if _, errs, code := shoal(t, env, verb...); code != 1 || !strings.Contains(errs, "is encrypted") {
			t.Errorf("%v without a key: exit %d, %s", verb, code, errs)
		}
	}

	if out, code := fsck(t, cache, "--encryption-key-file", keyFile); code != 0 || !strings.Contains(out, "clean") {
		t.Errorf("fsck: exit %d, %s", code, out)
	}
	mustShoal(t, env, "cache", "rekey", cache, "--encryption-key-file", keyFile, "--new-encryption-key-file", other)
	if _, errs, code := shoal(t, env, append([]string{"warm", source}, flags...)...); code != 1 ||
		!strings.Contains(errs, "wrong encryption key") {
		t.Errorf("the key of before: exit %d, %s", code, errs)
	}
	before = p.Stats()
	mustShoal(t, env, "warm", source, "--cache-dir", cache, "--encryption-key-file", other)
	if d := p.Stats().Sub(before); d.Gets != 0 {
		t.Errorf("%d GETs: a new key costs what was cached", d.Gets)
	}
	mustShoal(t, env, "cache", "rm", cache, source, "--encryption-key-file", other)
	if segs, _ := filepath.Glob(filepath.Join(cache, "segments", "*", "*")); len(segs) > 0 {
		t.Errorf("%v are left", segs)
	}
}
