package e2e

import (
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/shoalfs/shoal/lab/rig/proxy"
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

// What a plan says of a large file is in memory before it is read, by pread and through a memory map. A next plan that comes while
// the first one is read is followed, too.
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
				out, err := exec.CommandContext(t.Context(), "python3", "ranges.py", filepath.Join(mnt, "c/tokens.bin"), filepath.Join(dir, "c/tokens.bin"), plan, how).CombinedOutput()
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
		out, err := exec.CommandContext(t.Context(), "python3", "ranges.py", filepath.Join(mnt, "c/tokens.bin"), filepath.Join(dir, "c/tokens.bin"), plan, how).CombinedOutput()
		if err != nil {
			t.Fatalf("%s: %v", out, err)
		}
		within(t, patience, "the plan is withdrawn", func() bool {
			text := orderSays(t, mnt)
			return strings.Contains(text, "plan default withdrawn") && strings.Contains(text, " reads matched") && streamsOf(t, mnt)["plans/default"].Len == 0
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
	for i, bad := range []string{"c/tokens.bin\t67108860\t5", "c/tokens.bin\t-1\t5", "c/other.bin\t0\t5", "c/tokens.bin"} {
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
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+addr+"/"+bucketNameOf(url)+"/train/c/tokens.bin", nil)
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
