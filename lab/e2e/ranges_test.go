package e2e

import (
	"bytes"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/minio/minio-go/v7"

	"github.com/shoalfs/shoal/lab/rig/proxy"
	"github.com/shoalfs/shoal/lab/rig/s3server"
)

// tokens is a large file behind a far store: its folder, its source, and how to reach that.
func tokens(t testing.TB, size int) (dir, url string, env []string, data []byte) {
	t.Helper()
	dir, data = t.TempDir(), make([]byte, size)
	_, _ = rand.NewChaCha8([32]byte{5}).Read(data)
	write(t, filepath.Join(dir, "c", "tokens.bin"), data)
	_, env = far(t, proxy.Options{Latency: 30 * time.Millisecond, Bandwidth: 200e6})
	return dir, bucket(t, dir), env, data
}

// rangesOf is a plan of n ranges of the file, of each bytes, at random places.
func rangesOf(size, each, n int, seed uint64) string {
	text := "#ranges\n"
	for _, i := range rand.New(rand.NewPCG(seed, 2)).Perm(size / each)[:n] {
		text += fmt.Sprintf("c/tokens.bin\t%d\t%d\n", i*each, each)
	}
	return text
}

// What a plan says of a large file is in memory before it is read, by pread and through a memory map. A next plan that
// comes while the first one is read is followed, too.
func TestRangePlans(t *testing.T) {
	const size, each, n = 128 << 20, 8 << 10, 400
	dir, url, env, _ := tokens(t, size)
	for _, how := range []string{"pread", "mmap"} {
		t.Run(how, func(t *testing.T) {
			mnt := t.TempDir()
			mountAt(t, env, url, mnt, "--cache-size", "0", "--memory", "256MiB")
			text := rangesOf(size, each, n, 1)
			for k := range 3 {
				write(t, filepath.Join(mnt, ".shoal", "plan"), []byte(text))
				plan := filepath.Join(dir, "plan")
				write(t, plan, []byte(text))
				next := rangesOf(size, each, n, uint64(k+2))
				out, err := exec.CommandContext(t.Context(), "python3", "ranges.py", filepath.Join(mnt, "c/tokens.bin"),
					filepath.Join(dir, "c/tokens.bin"), plan, how).CombinedOutput()
				s := streamsOf(t, mnt)["plans/default"]
				t.Logf("plan %d: %s of %d ranges waited; %+v", k, strings.TrimSpace(string(out)), n, s)
				if err != nil {
					t.Fatalf("%s: %v", out, err)
				}
				if st := readStats(t, mnt); st.Misses > n/5 {
					t.Errorf("plan %d: %d reads were not fetched before", k, st.Misses)
				}
				if s.Position < n*9/10 || s.Events["jumps"] > 0 {
					t.Errorf("plan %d is not followed: %+v", k, s)
				}
				text = next
			}
		})
	}
}

// An epoch over a file, in ranges of which several lie in a granule, fetches it once if the cache holds it, in less
// memory than it has. A later epoch fetches nothing, nor does one of the next daemon.
func TestRangePlansFetchOnce(t *testing.T) {
	const size, each = 96 << 20, 16 << 10
	dir, url, env, _ := tokens(t, size)
	for _, how := range []string{"pread", "mmap"} {
		cached := t.TempDir()
		for k := range 2 {
			mnt := t.TempDir()
			mountAt(t, env, url, mnt, "--cache-dir", cached, "--cache-size", "128MiB", "--memory", "144MiB")
			epoch := func(most int64) {
				before := readStats(t, mnt)
				text := []byte(rangesOf(size, each, size/each, uint64(k)))
				write(t, filepath.Join(mnt, ".shoal", "plan"), text)
				plan := filepath.Join(dir, "plan")
				write(t, plan, text)
				out, err := exec.CommandContext(t.Context(), "python3", "ranges.py", filepath.Join(mnt, "c/tokens.bin"),
					filepath.Join(dir, "c/tokens.bin"), plan, how).CombinedOutput()
				if err != nil {
					t.Fatalf("%s: %v", out, err)
				}
				s := readStats(t, mnt)
				got := s.Bytes - before.Bytes
				t.Logf("%s, daemon %d: %d of %d bytes fetched, %s of %d ranges waited",
					how, k, got, size, strings.TrimSpace(string(out)), size/each)
				if got > most+s.Hedges.Sent<<16 {
					t.Errorf("%s, daemon %d: %d bytes fetched of %d, with %d second requests",
						how, k, got, size, s.Hedges.Sent)
				}
			}
			if k == 0 {
				epoch(size + size/20)
			}
			epoch(size / 100)
			umount(t, mnt)
		}
	}
}

// A plan of ranges whose reader has another order is withdrawn.
func TestRangePlanWithdrawn(t *testing.T) {
	const size, each, n = 64 << 20, 64 << 10, 1024
	dir, url, env, _ := tokens(t, size)
	for _, how := range []string{"pread", "mmap"} {
		mnt := t.TempDir()
		mountAt(t, env, url, mnt, "--cache-size", "0", "--memory", "256MiB", "--kernel-cache", "off")
		write(t, filepath.Join(mnt, ".shoal", "plan"), []byte(rangesOf(size, each, n, 1)))
		plan := filepath.Join(dir, "plan")
		write(t, plan, []byte(rangesOf(size, each, 200, 2)))
		out, err := exec.CommandContext(t.Context(), "python3", "ranges.py", filepath.Join(mnt, "c/tokens.bin"),
			filepath.Join(dir, "c/tokens.bin"), plan, how).CombinedOutput()
		if err != nil {
			t.Fatalf("%s: %v", out, err)
		}
		within(t, patience, "the plan is withdrawn", func() bool {
			text := orderSays(t, mnt)
			return strings.Contains(text, "plan default withdrawn") && strings.Contains(text, " reads matched") &&
				streamsOf(t, mnt)["plans/default"].Len == 0
		})
	}
}

// Ranged GETs of the endpoint move the reader as well, a bad plan leaves the one in force, and says where it is wrong.
func TestRangePlanAtTheEndpoint(t *testing.T) {
	const size, each, n = 64 << 20, 8 << 10, 200
	_, url, env, data := tokens(t, size)
	mnt, addr := t.TempDir(), freePort(t)
	mountAt(t, env, url, mnt, "--cache-size", "0", "--memory", "256MiB", "--s3", addr, "--s3-anonymous")
	text := rangesOf(size, each, n, 1)
	write(t, filepath.Join(mnt, ".shoal", "plan"), []byte(text))
	for i, bad := range []string{"c/tokens.bin\t67108860\t5", "c/tokens.bin\t-1\t5", "c/other.bin\t0\t5",
		"c/tokens.bin"} {
		if err := os.WriteFile(filepath.Join(mnt, ".shoal", "plan"), []byte(text+bad+"\n"), 0o644); err == nil {
			t.Errorf("%q was taken", bad)
		}
		order, err := os.ReadFile(filepath.Join(mnt, ".shoal", "order"))
		if want := fmt.Sprintf("line %d: ", n+2); err != nil || !strings.Contains(string(order), want) {
			t.Errorf("bad plan %d: no %q in %s, %v", i, want, order, err)
		}
	}
	for _, line := range strings.Split(strings.TrimSpace(text), "\n")[1:] {
		var off, length int
		if _, err := fmt.Sscanf(line, "c/tokens.bin\t%d\t%d", &off, &length); err != nil {
			t.Fatal(err)
		}
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet,
			"http://"+addr+"/"+bucketNameOf(url)+"/train/c/tokens.bin", nil)
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Range", fmt.Sprintf("bytes=%d-%d", off, off+length-1))
		resp, err := http.DefaultClient.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(resp.Body)
		if resp.Body.Close(); err != nil || string(got) != string(data[off:off+length]) {
			t.Fatalf("%d bytes at %d, %v", len(got), off, err)
		}
	}
	if s, p := readStats(t, mnt), streamsOf(t, mnt)["plans/default"]; p.Consumed != n || s.Misses > n/5 {
		t.Errorf("%d of %d ranges waited; %+v", s.Misses, n, p)
	}
}

// BenchmarkRangePlans reads a file of tokens of 1 GiB in sequences of 8 KiB, shuffled, cold, over a line of 200 MB/s
// and 30 ms, into a cache that holds it: through the mount with plans of 50,000 lines, through it without an order (the
// first 2,000 sequences), and by a plain client of 32 connections that knows the order, fetches the same granules, and
// keeps them in memory.
func BenchmarkRangePlans(b *testing.B) {
	const size, each, window, granule = 1 << 30, 8 << 10, 50_000, 64 << 10
	_, url, env, data := tokens(b, size)
	lines := strings.SplitAfter(rangesOf(size, each, size/each, 1), "\n")[1:]
	lines = lines[:len(lines)-1]
	offs := make([]int64, len(lines))
	for i, line := range lines {
		if _, err := fmt.Sscanf(line, "c/tokens.bin\t%d\t", &offs[i]); err != nil {
			b.Fatal(err)
		}
	}
	report := func(b *testing.B, n int, first time.Duration, began time.Time, bytes int64) {
		b.ReportMetric(float64(n)/time.Since(began).Seconds(), "sequences/s")
		b.ReportMetric(first.Seconds(), "s/first-2000")
		b.ReportMetric(float64(bytes)/size, "fetched/size")
	}
	mount := func(b *testing.B, n int, plan bool) {
		mnt := b.TempDir()
		mountAt(b, env, url, mnt, "--cache-size", "2GiB", "--memory", "512MiB")
		f, err := os.Open(filepath.Join(mnt, "c/tokens.bin"))
		if err != nil {
			b.Fatal(err)
		}
		defer umount(b, mnt)
		defer f.Close()
		tell := func(i int) {
			if plan && i < n {
				write(b, filepath.Join(mnt, ".shoal", "plan"),
					[]byte("#ranges\n"+strings.Join(lines[i:min(i+window, n)], "")))
			}
		}
		runtime.LockOSThread() // one reader
		defer runtime.UnlockOSThread()
		p, began, first := make([]byte, each), time.Now(), time.Duration(0)
		for i, off := range offs[:n] {
			switch i % window {
			case 0:
				if i == 0 {
					tell(0)
				}
			case window / 2:
				tell(i + window/2)
			}
			if _, err := f.ReadAt(p, off); err != nil {
				b.Fatal(err)
			}
			if !bytes.Equal(p, data[off:off+each]) {
				b.Fatalf("other bytes at %d", off)
			}
			if i == 1999 {
				first = time.Since(began)
			}
		}
		report(b, n, first, began, readStats(b, mnt).Bytes)
	}
	b.Run("mount", func(b *testing.B) { mount(b, len(offs), true) })
	b.Run("mount, no order", func(b *testing.B) { mount(b, 2000, false) })
	b.Run("plain client", func(b *testing.B) {
		p, _ := far(b, proxy.Options{Latency: 30 * time.Millisecond, Bandwidth: 200e6})
		client, err := s3server.Client(p.URL, 32)
		if err != nil {
			b.Fatal(err)
		}
		core, began, first := minio.Core{Client: client}, time.Now(), time.Duration(0)
		landed, next := make([]chan struct{}, size/granule), make(chan int, 64)
		held := make([][]byte, size/granule)
		for i := range landed {
			landed[i] = make(chan struct{})
		}
		go func() {
			seen := make([]bool, size/granule)
			for _, off := range offs {
				if g := int(off / granule); !seen[g] {
					seen[g] = true
					next <- g
				}
			}
			close(next)
		}()
		for range 32 {
			go func() {
				for g := range next {
					o := minio.GetObjectOptions{}
					if err := o.SetRange(int64(g)*granule, int64(g+1)*granule-1); err != nil {
						b.Error(err)
					}
					body, _, _, err := core.GetObject(b.Context(), bucketNameOf(url), "train/c/tokens.bin", o)
					if err == nil {
						held[g], err = io.ReadAll(body)
					}
					if err != nil {
						b.Error(err)
					}
					close(landed[g])
				}
			}()
		}
		for i, off := range offs {
			<-landed[off/granule]
			if !bytes.Equal(held[off/granule][off%granule:][:each], data[off:off+each]) {
				b.Fatalf("other bytes at %d", off)
			}
			if i == 1999 {
				first = time.Since(began)
			}
		}
		report(b, len(offs), first, began, size)
	})
}
