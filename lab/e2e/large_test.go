package e2e

import (
	"bytes"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/minio/minio-go/v7"
	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/lab/rig/proxy"
	"github.com/shoalfs/shoal/lab/rig/s3server"
)

// Reads at random places of a large file fetch little more than they ask for, through pread and through a memory map;
// what is read from start to end is fetched once, but for a few granules, and then lies on disk.
func TestLargeFile(t *testing.T) {
	const size, touches = 384 << 20, 200
	dir, data := t.TempDir(), make([]byte, size)
	_, _ = rand.NewChaCha8([32]byte{5}).Read(data)
	write(t, filepath.Join(dir, "c", "tokens.bin"), data)
	url, env := bucket(t, dir), s3server.Env(server.URL)
	mnt := t.TempDir()
	cached := t.TempDir()
	open := func() (*os.File, func() stats) {
		mountAt(t, env, url, mnt, "--cache-dir", cached, "--cache-size", "1GiB", "--memory", "256MiB")
		f, err := os.Open(filepath.Join(mnt, "c", "tokens.bin"))
		if err != nil {
			t.Fatal(err)
		}
		return f, func() stats {
			defer umount(t, mnt)
			defer f.Close()
			return readStats(t, mnt)
		}
	}
	check := func(p []byte, off int) {
		if !bytes.Equal(p, data[off:off+len(p)]) {
			t.Fatalf("other bytes at %d", off)
		}
	}

	f, end := open()
	p := make([]byte, 8<<10)
	for range touches {
		off := rand.IntN(size - len(p))
		if _, err := f.ReadAt(p, int64(off)); err != nil {
			t.Fatal(err)
		}
		check(p, off)
	}
	if n := end().Bytes; n > 20*touches*int64(len(p)) {
		t.Errorf("%d bytes fetched for %d of reads", n, touches*len(p))
	}

	f, end = open()
	m, err := unix.Mmap(int(f.Fd()), 0, size, unix.PROT_READ, unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	for range touches {
		off := rand.IntN(size/4096) * 4096
		check(m[off:off+4096], off)
	}
	if err := unix.Munmap(m); err != nil {
		t.Fatal(err)
	}
	if n := end().Bytes; n > 40*touches*4096 {
		t.Errorf("%d bytes fetched for %d pages", n, touches)
	}

	for epoch, last := 0, int64(1); last > 0; epoch++ {
		f, end = open()
		all, err := os.ReadFile(f.Name())
		if err != nil {
			t.Fatal(err)
		}
		check(all, 0)
		// The kernel reads ahead in parallel: what overtakes the start of an extent is a jump, whose granules are
		// fetched again with the extent. And if a late request is sent twice, both answers may arrive. On a busy disk
		// some extents give way to others before they are written, and are kept in a later epoch.
		s := end()
		if most := size + 1<<20 + s.Hedges.Sent*4<<20; epoch == 0 && s.Bytes > most || epoch > 0 && s.Bytes > size/2 ||
			epoch == 5 {
			t.Fatalf("%d bytes fetched in epoch %d, with %d second requests", s.Bytes, epoch, s.Hedges.Sent)
		}
		last = s.Bytes
	}
}

// BenchmarkLargeFile reads files of 2 GiB, cold: four with 2,000 reads of 8 to 64 KiB at random by 32 readers over a
// line of 200 MB/s and 30 ms, and one from start to end over one of 250 MB/s, through the mount, through the S3
// endpoint and with a plain client.
func BenchmarkLargeFile(b *testing.B) {
	const size = 2 << 30
	dir, data := b.TempDir(), make([]byte, 64<<20)
	_, _ = rand.NewChaCha8([32]byte{5}).Read(data)
	path := func(i int) string { return filepath.Join(dir, "c", fmt.Sprint(i)) }
	write(b, path(0), nil)
	f, err := os.OpenFile(path(0), os.O_WRONLY, 0)
	for range size / len(data) {
		if _, werr := f.Write(data); err == nil {
			err = werr
		}
	}
	if err != nil || f.Close() != nil {
		b.Fatal(err)
	}
	for i := range 3 {
		if err := os.Link(path(0), path(i+1)); err != nil {
			b.Fatal(err)
		}
	}
	name := bucketName(b)
	upload(b, dir, name)
	url := "s3://" + name + "/train"
	cold := func(b *testing.B, bandwidth int64, read func(f []*os.File) int64) {
		_, env := far(b, proxy.Options{Latency: 30 * time.Millisecond, Bandwidth: bandwidth})
		for b.Loop() {
			b.StopTimer()
			mnt := b.TempDir()
			mountAt(b, env, url, mnt, "--cache-dir", b.TempDir(), "--cache-size", "4GiB", "--memory", "1GiB")
			var files []*os.File
			for i := range 4 {
				f, err := os.Open(filepath.Join(mnt, "c", fmt.Sprint(i)))
				if err != nil {
					b.Fatal(err)
				}
				files = append(files, f)
			}
			b.StartTimer()
			n := read(files)
			b.StopTimer()
			s := readStats(b, mnt)
			b.SetBytes(n)
			b.ReportMetric(float64(s.Gets), "GETs/op")
			b.ReportMetric(float64(s.Bytes)/float64(n), "fetched/asked")
			for _, f := range files {
				_ = f.Close()
			}
			umount(b, mnt)
			b.StartTimer()
		}
	}
	b.Run("random", func(b *testing.B) {
		cold(b, 200e6, func(files []*os.File) (asked int64) {
			var all sync.WaitGroup
			var sum atomic.Int64
			for r := range 32 {
				all.Go(func() {
					draw := rand.New(rand.NewPCG(uint64(r), 1))
					p := make([]byte, 64<<10)
					for range 2000 / 32 {
						p := p[:8<<10<<draw.IntN(4)]
						if _, err := files[draw.IntN(4)].ReadAt(p, draw.Int64N(size-int64(len(p)))); err != nil {
							b.Error(err)
						}
						sum.Add(int64(len(p)))
					}
				})
			}
			all.Wait()
			return sum.Load()
		})
	})
	b.Run("sequential", func(b *testing.B) {
		cold(b, 250e6, func(files []*os.File) int64 {
			n, err := io.Copy(io.Discard, struct{ io.Reader }{files[0]})
			if err != nil {
				b.Error(err)
			}
			return n
		})
	})
	b.Run("sequential, S3 endpoint", func(b *testing.B) {
		_, env := far(b, proxy.Options{Latency: 30 * time.Millisecond, Bandwidth: 250e6})
		for b.Loop() {
			b.StopTimer()
			addr := freePort(b)
			d := inForeground(b, env, "s3", url, "--listen", addr, "--s3-anonymous", "--cache-dir", b.TempDir(),
				"--cache-size", "4GiB", "--memory", "1GiB")
			d.says(b, "S3 endpoint")
			b.StartTimer()
			resp, err := http.Get("http://" + addr + "/" + name + "/train/c/0") //nolint:noctx // it ends with the daemon
			if err != nil {
				b.Fatal(err)
			}
			n, err := io.Copy(io.Discard, resp.Body)
			b.StopTimer()
			if resp.Body.Close(); err != nil || n != size {
				b.Fatalf("%d bytes, %v", n, err)
			}
			b.SetBytes(n)
			d.signal(b, syscall.SIGTERM)
			d.ended(b)
			b.StartTimer()
		}
	})
	b.Run("sequential, plain client", func(b *testing.B) {
		p, _ := far(b, proxy.Options{Latency: 30 * time.Millisecond, Bandwidth: 250e6})
		client, err := s3server.Client(p.URL, 8)
		if err != nil {
			b.Fatal(err)
		}
		for b.Loop() {
			o, err := client.GetObject(b.Context(), name, "train/c/0", minio.GetObjectOptions{})
			if err == nil {
				_, err = io.Copy(io.Discard, o)
			}
			if err != nil {
				b.Fatal(err)
			}
			b.SetBytes(size)
		}
	})
}
