package e2e

import (
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/minio/minio-go/v7"
	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/lab/rig/s3server"
)

// A folder as a source: what is no file is counted and said, modes are kept but for writing, and links that lead out
// are refused unless they are asked for.
func TestFolderSource(t *testing.T) {
	dir, paths := tree(t, 1, 4, 4<<10)
	outside := filepath.Join(t.TempDir(), "outside.jpg")
	write(t, outside, []byte("outside"))
	modes := []os.FileMode{0o755, 0o640, 0o400, 0o444}
	for i, mode := range modes {
		if err := os.Chmod(filepath.Join(dir, paths[i]), mode); err != nil {
			t.Fatal(err)
		}
	}
	if err := syscall.Mkfifo(filepath.Join(dir, "pipe"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("nowhere", filepath.Join(dir, "dangling")); err != nil {
		t.Fatal(err)
	}
	mnt := mount(t, nil, dir, "--order", "none")
	for i, mode := range modes {
		if info, err := os.Stat(filepath.Join(mnt, paths[i])); err != nil || info.Mode() != mode&0o555 {
			t.Errorf("%v: mode %v, want %v", err, info.Mode(), mode&0o555)
		}
	}
	readAll(t, mnt, dir, paths)
	if s := readStats(t, mnt); s.Files != len(paths) || len(s.Errors) != 1 ||
		!strings.Contains(s.Errors[0].Text, "dangling_links: 1; pipes_sockets_devices: 1; examples: [dangling pipe]") {
		t.Errorf("%d files, %+v", s.Files, s.Errors)
	}
	umount(t, mnt)

	link := filepath.Join(dir, "class00", "link.jpg")
	if err := os.Symlink(outside, link); err != nil {
		t.Fatal(err)
	}
	if _, errs, code := shoal(t, nil, "mount", dir, mnt, "--cache-dir", t.TempDir(), "--daemon"); code != 1 ||
		!strings.Contains(errs, outside) || !strings.Contains(errs, "--store links-outside") {
		t.Errorf("a link that leads out: exit %d, %s", code, errs)
	}
	mountAt(t, nil, dir, mnt, "--order", "none", "--store", "links-outside")
	readAll(t, mnt, dir, append(paths, "class00/link.jpg"))
}

// Empty folders are shown: those of a folder, and those that a bucket marks by keys that end in "/". A copy of a
// dataset in the same cache has its own. One that comes is shown by the next mount after a refresh.
func TestEmptyFolders(t *testing.T) {
	dir, paths := tree(t, 2, 4, 4<<10)
	source := bucket(t, dir)
	empty := []string{"class00/deep/none", "valid", "with space"}
	for _, name := range empty {
		if err := os.MkdirAll(filepath.Join(dir, name), 0o755); err != nil {
			t.Fatal(err)
		}
		if _, err := store(t).PutObject(t.Context(), bucketName(t), "train/"+name+"/", nil, 0,
			minio.PutObjectOptions{DisableContentSha256: true}); err != nil {
			t.Fatal(err)
		}
	}
	folders := func(root string) (names []string) {
		t.Helper()
		if err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			switch {
			case err != nil || !d.IsDir() || path == root:
				return err
			case d.Name() == ".shoal":
				return fs.SkipDir
			}
			names = append(names, path[len(root)+1:])
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		return names
	}
	cache, env := t.TempDir(), s3server.Env(server.URL)
	mnt := mount(t, env, dir, "--cache-dir", cache, "--order", "none")
	far := mount(t, env, source, "--cache-dir", cache, "--order", "none")
	want := []string{"class00", "class00/deep", "class00/deep/none", "class01", "valid", "with space"}
	for _, m := range []string{mnt, far} {
		if got := folders(m); !slices.Equal(got, want) {
			t.Errorf("%s: folders %q, want %q", m, got, want)
		}
		readAll(t, m, dir, paths)
		var st unix.Statfs_t
		if err := unix.Statfs(m, &st); err != nil || st.Bfree != 0 || st.Bavail != 0 {
			t.Errorf("statfs: %d blocks free, %d available, %v", st.Bfree, st.Bavail, err)
		}
	}
	if got, with := readStats(t, far), readStats(t, mnt); got.Samples != len(paths) || with.Samples != len(paths) {
		t.Errorf("%d and %d samples, want %d", got.Samples, with.Samples, len(paths))
	}

	if err := os.Mkdir(filepath.Join(dir, "test"), 0o755); err != nil {
		t.Fatal(err)
	}
	if out := mustShoal(t, nil, "refresh", mnt); !strings.HasPrefix(out, "unchanged") {
		t.Errorf("refresh: %s", out)
	}
	if got := folders(mnt); !slices.Equal(got, want) {
		t.Errorf("after the refresh: folders %q, want %q", got, want)
	}
	umount(t, mnt)
	mountAt(t, env, dir, mnt, "--cache-dir", cache, "--order", "none")
	if got, want := folders(mnt), slices.Insert(slices.Clone(want), 4, "test"); !slices.Equal(got, want) {
		t.Errorf("at the next mount: folders %q, want %q", got, want)
	}
	umount(t, far)
	mountAt(t, env, source, far, "--cache-dir", cache, "--order", "none")
	if got := folders(far); !slices.Equal(got, want) {
		t.Errorf("the copy: folders %q, want %q", got, want)
	}
}
