package e2e

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/lab/rig/proxy"
)

// Large files, made and read by the libraries that trainers use, cold: through a mount, on a local disk, and from the
// store by the library's own client. The values are equal, and the mount fetches a bounded multiple of what they take
// where they lie. It prints a table, lab/bench/results/large-files.md.
func TestReaders(t *testing.T) {
	python := os.Getenv("SHOAL_READERS")
	if python == "" {
		t.Skip("make conformance runs it")
	}
	dir := t.TempDir()
	far, env := far(t, proxy.Options{Latency: 30 * time.Millisecond, Bandwidth: 250e6})
	run := func(t *testing.T, into any, args ...string) {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), python, append([]string{"readers.py"}, args...)...)
		var errs bytes.Buffer
		cmd.Env, cmd.Stderr = append(os.Environ(), env...), &errs
		out, err := cmd.Output()
		if err == nil && into != nil {
			err = json.Unmarshal(out, into)
		}
		if err != nil {
			t.Fatalf("%v: %v\n%s", args, err, errs.String())
		}
	}
	run(t, nil, "make", dir)
	url := bucket(t, dir)
	fmt.Println("| reader | MB asked | local, s | mount, s | GETs | MB | S3 client, s | GETs | MB |")
	fmt.Println("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
	for _, c := range []struct {
		name, set string
		most      int64 // times what was asked for
	}{
		{"memmap: uint16", "tokens", 80},
		{"memmap: int32", "tokens", 80},
		{"parquet: two columns", "parquet", 8},
		{"parquet: two row groups", "parquet", 4},
		{"parquet: take", "parquet", 24},
		{"h5py", "hdf5", 8},
		{"zarr: shards", "zarr", 16},
		{"lance: take", "lance", 32},
	} {
		t.Run(c.name, func(t *testing.T) {
			type result struct {
				Seconds float64
				Asked   int64
				Digest  string
			}
			var local, mounted, direct result
			forget(t, filepath.Join(dir, c.set))
			run(t, &local, c.name, filepath.Join(dir, c.set))
			mnt := mount(t, env, url+"/"+c.set, "--cache-size", "4GiB", "--memory", "512MiB")
			run(t, &mounted, c.name, mnt)
			s := readStats(t, mnt)
			umount(t, mnt)
			before := far.Stats()
			run(t, &direct, c.name, url+"/"+c.set)
			by := far.Stats().Sub(before)
			fmt.Printf("| %s | %.2f | %.2f | %.2f | %d | %.1f | %.2f | %d | %.1f |\n",
				c.name, float64(local.Asked)/1e6, local.Seconds,
				mounted.Seconds, s.Gets, float64(s.Bytes)/1e6, direct.Seconds, by.Gets, float64(by.GetBytes)/1e6)
			if mounted.Digest != local.Digest || direct.Digest != local.Digest {
				t.Errorf("values differ: local %.8s, mount %.8s, S3 client %.8s",
					local.Digest, mounted.Digest, direct.Digest)
			}
			if s.Bytes > c.most*local.Asked {
				t.Errorf("%d bytes fetched for %d", s.Bytes, local.Asked)
			}
		})
	}
}

// forget takes the files of a folder out of the kernel's cache.
func forget(t *testing.T, dir string) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		defer f.Close()
		if err := f.Sync(); err != nil {
			return err
		}
		return unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED)
	})
	if err != nil {
		t.Fatal(err)
	}
}
