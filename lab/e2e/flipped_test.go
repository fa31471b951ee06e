package e2e

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/lab/rig/proxy"
)

// A bit that has flipped in a plain packed member, in a shard with the same size and time, is neither served nor kept;
// the error names the shard, and the other files are read. Of a member of several extents, that holds for the extent.
func TestFlippedPackedMember(t *testing.T) {
	dir, paths := tree(t, 2, 20, 40<<10)
	packed, cache := t.TempDir(), t.TempDir()
	data := make([]byte, 9<<20+5)
	rng := rand.New(rand.NewPCG(3, 4))
	for i := range data {
		data[i] = byte(rng.Uint32())
	}
	paths = append(paths, "class00/large.bin")
	write(t, filepath.Join(dir, "class00/large.bin"), data)
	mustShoal(t, nil, "pack", "file://"+dir, "file://"+packed)
	bad := map[string]int{paths[7]: 5000, "class00/large.bin": 5 << 20} // which byte
	for _, name := range tars(t, packed) {
		fi, err := os.Stat(name)
		if err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		for p, at := range bad {
			content, err := os.ReadFile(filepath.Join(dir, p))
			if i := bytes.Index(b, content); i >= 0 && err == nil {
				b[i+at] ^= 8
			}
		}
		if err := errors.Join(os.WriteFile(name, b, 0o644), os.Chtimes(name, fi.ModTime(), fi.ModTime())); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 { // cold, and from the cache
		mnt := t.TempDir()
		mountAt(t, nil, "file://"+packed, mnt, "--cache-dir", cache)
		for _, p := range paths {
			got, err := os.ReadFile(filepath.Join(mnt, p))
			want, e := os.ReadFile(filepath.Join(dir, p))
			if e != nil {
				t.Fatal(e)
			}
			switch at := bad[p]; {
			case at > 0 && (!errors.Is(err, syscall.EIO) || len(got) > at || !bytes.HasPrefix(want, got)):
				t.Errorf("%s: %d bytes, %v", p, len(got), err)
			case at == 0 && (err != nil || !bytes.Equal(got, want)):
				t.Errorf("%s: %v", p, err)
			}
		}
		text := ""
		for _, e := range readStats(t, mnt).Errors {
			text += e.Text + "\n"
		}
		for p := range bad {
			if !strings.Contains(text, ".tar") || !strings.Contains(text, p) || !strings.Contains(text, "checksum") {
				t.Errorf("stat says nothing of %s:\n%s", p, text)
			}
		}
		umount(t, mnt)
	}
}

// What `shoal cache verify` drops does not come back: not from the kernel's page cache, nor after a restart. Without it
// the daemon and the kernel go on with what they have, as the file's size and time are the same.
func TestVerifyDropsForGood(t *testing.T) {
	dir, paths := tree(t, 2, 20, 40<<10)
	cache, mnt, source := t.TempDir(), t.TempDir(), "file://"+dir
	mountAt(t, nil, source, mnt, "--cache-dir", cache)
	readAll(t, mnt, dir, paths)
	bad := filepath.Join(dir, paths[7])
	fi, err := os.Stat(bad)
	if err != nil {
		t.Fatal(err)
	}
	old, err := os.ReadFile(bad)
	if err != nil {
		t.Fatal(err)
	}
	data := bytes.Clone(old)
	data[len(data)/2] ^= 8
	if err := errors.Join(os.WriteFile(bad, data, 0o644), os.Chtimes(bad, fi.ModTime(), fi.ModTime())); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(filepath.Join(mnt, paths[7])); err != nil || !bytes.Equal(got, old) {
		t.Fatalf("it was not in the cache: %v", err)
	}
	if _, text, code := shoal(t, nil, "cache", "verify", cache, source); code != 1 ||
		!strings.Contains(text, "1 of 40 extents had other bytes") {
		t.Fatalf("%d: %s", code, text)
	}
	readAll(t, mnt, dir, paths)
	umount(t, mnt)
	mountAt(t, nil, source, mnt, "--cache-dir", cache)
	readAll(t, mnt, dir, paths)
	if text, err, code := shoal(t, nil, "cache", "verify", cache, source); code != 0 {
		t.Errorf("%d: %s%s", code, text, err)
	}
	umount(t, mnt)
	// Nor where no daemon runs, and nothing is read between.
	if err := errors.Join(os.WriteFile(bad, old, 0o644), os.Chtimes(bad, fi.ModTime(), fi.ModTime())); err != nil {
		t.Fatal(err)
	}
	for _, want := range []int{1, 0} {
		if text, err, code := shoal(t, nil, "cache", "verify", cache, source); code != want {
			t.Errorf("%d, want %d: %s%s", code, want, text, err)
		}
	}
}

// Bytes that change on the disk after they were read, and checked, are not served when the files are read again. Each
// is fetched, and counted.
func TestFlippedAfterItWasRead(t *testing.T) {
	dir, paths := tree(t, 2, 40, 60<<10)
	write(t, filepath.Join(dir, "c/large"), bytes.Repeat(content(t, filepath.Join(dir, paths[0])), 11))
	paths = append(paths, "c/large")
	cache := t.TempDir()
	source := bucket(t, dir)
	_, env := far(t, proxy.Options{})
	// nothing is read ahead into memory
	flags := []string{"--cache-dir", cache, "--kernel-cache", "off", "--order", "none"}
	mnt := mount(t, env, source, flags...)
	readAll(t, mnt, dir, paths)
	waitKept(t, mnt, len(paths))
	umount(t, mnt)
	mountAt(t, env, source, mnt, flags...)
	readAll(t, mnt, dir, paths) // from the disk, and checked
	if s := readStats(t, mnt); s.Disk.Corrupt != 0 || s.Hits.Keep < int64(len(paths)) {
		t.Fatalf("%+v, %+v", s.Disk, s.Hits)
	}
	flipped := 0
	for _, name := range segments(t, cache) {
		b := content(t, name)
		f, err := os.OpenFile(name, os.O_WRONLY, 0)
		if err != nil {
			t.Fatal(err)
		}
		for i, p := range paths {
			want := content(t, filepath.Join(dir, p))
			at := bytes.Index(b, want)
			if i%2 == 1 && p != "c/large" || at < 0 {
				continue
			}
			at += len(want) - 100
			if _, err := f.WriteAt([]byte{^b[at]}, int64(at)); err != nil {
				t.Fatal(err)
			}
			flipped++
		}
		if err := errors.Join(f.Sync(), unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED), f.Close()); err != nil {
			t.Fatal(err)
		}
	}
	if flipped < len(paths)/2 {
		t.Fatalf("%d files were found on disk", flipped)
	}
	readAll(t, mnt, dir, paths)
	if s := readStats(t, mnt); s.Disk.Corrupt != int64(flipped) {
		t.Errorf("%d of %d were found", s.Disk.Corrupt, flipped)
	}
	umount(t, mnt)
}
