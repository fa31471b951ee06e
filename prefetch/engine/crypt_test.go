package engine

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/shoalfs/shoal/cache/cachedir"
	"github.com/shoalfs/shoal/cache/crypt"
)

func secretOf(t testing.TB, b byte) *crypt.Secret {
	t.Helper()
	s, err := crypt.ParseSecret(append(bytes.Repeat([]byte{b}, 31), b+1))
	if err != nil {
		t.Fatal(err)
	}
	return &s
}

// TestEncryptedCache fills a cache that is encrypted, finds nothing of names, ETags and bytes on its disk, and opens
// it again: with the key, everything is there; without one, with another, or where the cache is in clear,
// it is refused, and nothing is changed.
func TestEncryptedCache(t *testing.T) {
	const marker = "plaintext that nobody may find"
	dir := t.TempDir()
	var paths []string
	for i := range 40 {
		p := fmt.Sprintf("secretclass%d/secretname%03d.jpg", i%4, i)
		if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, p)), 0o700); err != nil {
			t.Fatal(err)
		}
		content := strings.Repeat(fmt.Sprintf("%s %03d, ", marker, i), 50+500*(i%3)*(i%3)*(i%5))
		if err := os.WriteFile(filepath.Join(dir, p), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		paths = append(paths, p)
	}
	set := packFolder(t, dir, 256<<10)
	cacheDir := t.TempDir()
	config := func(s *crypt.Secret) HostConfig {
		return HostConfig{Options: cachedir.Options{Path: cacheDir, Size: 256 << 20, Memory: 256 << 20, Secret: s}}
	}
	for _, source := range []string{dir, set} {
		e := open(t, config(secretOf(t, 1)), Config{Source: source, Order: spec(t, "none")})
		for _, p := range paths {
			read(t, e, dir, p)
		}
		if e.host.Key == nil {
			t.Error("not encrypted")
		}
		d := e.Dataset()
		sealed := d.SealFit("name", []byte(marker))
		if b, err := d.OpenFit("name", sealed); err != nil || string(b) != marker ||
			bytes.Contains(sealed, []byte("plaintext")) {
			t.Errorf("%q, %v", b, err)
		}
		if _, err := d.OpenFit("another", sealed); err == nil {
			t.Error("a fit of another name was opened")
		}
		if err := e.host.Accepts(config(secretOf(t, 2)), func(string) bool {
			return false
		}); !errors.Is(err, crypt.ErrWrongSecret) {
			t.Error(err)
		}
		if err := errors.Join(e.host.Accepts(config(nil), func(string) bool { return false }),
			e.host.Accepts(config(secretOf(t, 1)), func(string) bool { return false })); err != nil {
			t.Error(err)
		}
		closeEngine(t, e)
	}
	snapshot := func() map[string]string {
		files := map[string]string{}
		err := filepath.WalkDir(cacheDir, func(path string, d fs.DirEntry, err error) error {
			if err != nil || !d.Type().IsRegular() {
				return err
			}
			b, err := os.ReadFile(path)
			if name, _ := filepath.Rel(cacheDir, path); name != "lock" {
				files[name] = string(b)
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		return files
	}
	before := snapshot()
	segments := 0
	for name, b := range before {
		if strings.HasSuffix(name, ".seg") {
			segments++
		}
		for _, text := range []string{"plaintext", "nobody may", "secretclass",
			"secretname", filepath.Base(filepath.Dir(dir))} {
			if strings.Contains(b, text) {
				t.Errorf("%q is in %s", text, name)
			}
		}
	}
	if segments < 2 {
		t.Errorf("%d segments", segments)
	}

	for name, s := range map[string]*crypt.Secret{"none": nil, "wrong": secretOf(t, 9)} {
		h, err := OpenHost(config(s))
		if !errors.Is(err, cachedir.ErrEncryption) || name == "wrong" != errors.Is(err, crypt.ErrWrongSecret) ||
			!strings.Contains(err.Error(), "--cache-dir") {
			t.Errorf("key %s: %v, %v", name, h, err)
		}
		if _, err := cachedir.Fsck(context.Background(), cacheDir,
			cachedir.FsckOptions{Secret: s, Repair: true}); !errors.Is(err, cachedir.ErrEncryption) {
			t.Errorf("fsck with key %s: %v", name, err)
		}
	}
	clear := t.TempDir()
	closeEngine(t, open(t, HostConfig{Options: cachedir.Options{Path: clear, Size: 64 << 20, Memory: 256 << 20}},
		Config{Source: dir, Order: spec(t, "none")}))
	if _, err := OpenHost(HostConfig{
		Options: cachedir.Options{Path: clear, Size: 64 << 20, Memory: 256 << 20, Secret: secretOf(t, 1)}}); !errors.Is(
		err, cachedir.ErrEncryption) {
		t.Errorf("a cache in clear, with a key: %v", err)
	}
	after := snapshot()
	for name, b := range before {
		if after[name] != b {
			t.Errorf("%s was changed by one who had no key", name)
		}
	}

	if r, err := cachedir.Fsck(context.Background(), cacheDir,
		cachedir.FsckOptions{Secret: secretOf(t, 1), Progress: func(int64, int64) {}}); err != nil || r.Damage != 0 ||
		r.Records < len(paths) {
		t.Errorf("%+v, %v", r, err)
	}
	reread := func(s *crypt.Secret) {
		t.Helper()
		e := open(t, config(s), Config{Source: dir, Order: spec(t, "none")})
		defer closeEngine(t, e)
		for _, p := range paths {
			read(t, e, dir, p)
		}
		if s := e.Stats(); s.Misses > 0 {
			t.Errorf("%d files were fetched again", s.Misses)
		}
	}
	reread(secretOf(t, 1))

	// Another key of the user's: what is cached stays.
	h, err := OpenHost(config(secretOf(t, 1)))
	if err != nil {
		t.Fatal(err)
	}
	if err := h.Rekey(*secretOf(t, 5)); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(h.Accepts(config(secretOf(t, 5)), func(string) bool { return false }),
		h.Close()); err != nil {
		t.Fatal(err)
	}
	if _, err := OpenHost(config(secretOf(t, 1))); !errors.Is(err, crypt.ErrWrongSecret) {
		t.Errorf("the old key: %v", err)
	}
	reread(secretOf(t, 5))

	// A lost or damaged key file is told, and nothing is thrown away.
	path := filepath.Join(cacheDir, crypt.FileName)
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for i := range b {
		damaged := bytes.Clone(b)
		damaged[i] ^= 1
		if err := os.WriteFile(path, damaged, 0o600); err != nil {
			t.Fatal(err)
		}
		if k, err := crypt.Open(cacheDir, *secretOf(t, 5)); err == nil &&
			!bytes.Equal(k.Derive("x", nil), mustKey(t, cacheDir, path, b, secretOf(t, 5)).Derive("x", nil)) {
			t.Fatalf("byte %d damaged, and another key came of it", i)
		}
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	for _, s := range []*crypt.Secret{nil, secretOf(t, 5)} {
		if _, err := OpenHost(config(s)); !errors.Is(err, cachedir.ErrEncryption) {
			t.Errorf("the key file is gone: %v", err)
		}
	}
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	reread(secretOf(t, 5))
}

// mustKey opens a key file with this content.
func mustKey(t *testing.T, dir, path string, content []byte, s *crypt.Secret) *crypt.Key {
	t.Helper()
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
	k, err := crypt.Open(dir, *s)
	if err != nil {
		t.Fatal(err)
	}
	return k
}
