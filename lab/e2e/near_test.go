package e2e

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/minio/minio-go/v7"

	"github.com/shoalfs/shoal/lab/rig/proxy"
	"github.com/shoalfs/shoal/lab/rig/s3server"
)

// nearServer starts a second S3 server with a bucket "near", and returns the flags for it.
func nearServer(t *testing.T) (*s3server.Server, *minio.Client, []string) {
	t.Helper()
	s, err := s3server.Start(context.Background(), s3server.Options{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Stop)
	c, err := s3server.Client(s.URL, 4)
	if err == nil {
		err = c.MakeBucket(context.Background(), "near", minio.MakeBucketOptions{})
	}
	if err != nil {
		t.Fatal(err)
	}
	return s, c, []string{"--near", "s3://near/train", "--near-endpoint", s.URL}
}

type nearStats struct {
	stats
	Near struct {
		State                                                                     string
		Reads, Hits, Misses, Passed, Bytes, Puts, Exist, Dropped, Damaged, Errors int64
		Queued                                                                    int64 `json:"queued_bytes"`
	}
}

func readNear(t *testing.T, target string) (s nearStats) {
	t.Helper()
	decode(t, mustShoal(t, nil, "stat", target, "--json"), &s)
	return s
}

// copies waits until as many copies are at the tier.
func copies(t *testing.T, target string, n int) {
	t.Helper()
	within(t, patience, "the copies are put", func() bool {
		s := readNear(t, target).Near
		return s.Puts+s.Exist >= int64(n) && s.Queued == 0
	})
}

// readByNear reads all files by a daemon of its own, and again by another one if the tier was late for a read, as it is
// on a machine that stalls: late is whether it ever was.
func readByNear(t *testing.T, env []string, source, dir string, paths []string, flags ...string) (
	s nearStats, late bool) {
	t.Helper()
	for range 10 {
		mnt := mount(t, env, source, flags...)
		readAll(t, mnt, dir, paths)
		within(t, patience, "the copies are put", func() bool {
			s = readNear(t, mnt)
			return s.Near.Queued == 0
		})
		if text := mustShoal(t, nil, "stat", mnt); !strings.Contains(text, "s3://near/train at http://") {
			t.Errorf("shoal stat:\n%s", text)
		}
		umount(t, mnt)
		if s.Near.Errors+s.Near.Passed+s.Near.Dropped == 0 {
			return s, late
		}
		late = true
		t.Logf("the tier was late: %+v", s)
	}
	t.Fatal("the tier is always late")
	return s, late
}

// Daemons with caches of their own, one after the other: the second reads nothing from the origin. A damaged copy is
// passed by and replaced. Large files are read there too, in parts.
func TestNearTier(t *testing.T) {
	dir, paths := tree(t, 3, 40, 20<<10)
	write(t, filepath.Join(dir, "class0", "large.jpg"), bytes.Repeat([]byte("0123456789abcdef"), 9<<20/16))
	paths = append(paths, "class0/large.jpg")
	source, env := bucket(t, dir), s3server.Env(server.URL)
	_, client, flags := nearServer(t)
	flags = append(flags, "--kernel-cache", "off", "--order", "sequential")
	read := func() (nearStats, bool) { return readByNear(t, env, source, dir, paths, flags...) }
	if s, late := read(); !late && (s.Near.Hits != 0 || s.Near.Damaged > 0 || s.Near.Puts != int64(len(paths)+2) ||
		s.Near.State != "on") {
		t.Errorf("the first: %+v", s)
	}
	if s, late := read(); !late && (s.Gets != 0 || s.Near.Hits < int64(len(paths)) || s.Near.Misses > 0) {
		t.Errorf("the second: %+v", s)
	}

	var keys []string
	for o := range client.ListObjects(t.Context(), "near",
		minio.ListObjectsOptions{Prefix: "train/v1/", Recursive: true, WithMetadata: true}) {
		if o.Err != nil {
			t.Fatal(o.Err)
		}
		keys = append(keys, o.Key)
	}
	if len(keys) != len(paths)+2 {
		t.Fatalf("%d copies", len(keys))
	}
	for i, key := range keys[:10] {
		info, err := client.StatObject(t.Context(), "near", key, minio.StatObjectOptions{})
		if err != nil {
			t.Fatal(err)
		}
		data := get(t, client, "near", key)
		data[len(data)/2] ^= 1
		if i%2 == 1 {
			data = data[:len(data)-1]
		}
		if _, err := client.PutObject(t.Context(), "near", key, bytes.NewReader(data), int64(len(data)),
			minio.PutObjectOptions{UserMetadata: info.UserMetadata}); err != nil {
			t.Fatal(err)
		}
	}
	if s, late := read(); !late && (s.Near.Damaged != 10 || s.Gets != 10 || !said(s.stats, "damaged")) {
		t.Errorf("with damaged copies: %+v", s)
	}
	if s, late := read(); !late && (s.Near.Damaged != 0 || s.Gets != 0) {
		t.Errorf("after they were replaced: %+v", s)
	}
}

// The near tier is killed in mid-epoch: no error and no wrong byte, and it is said.
func TestNearTierDies(t *testing.T) {
	dir, paths := tree(t, 3, 100, 20<<10)
	source, env := bucket(t, dir), s3server.Env(server.URL)
	srv, _, flags := nearServer(t)
	flags = append(flags, "--kernel-cache", "off", "--order", "none")
	mnt := mount(t, env, source, flags...)
	readAll(t, mnt, dir, paths[:150])
	srv.Stop()
	start := time.Now()
	readAll(t, mnt, dir, paths)
	if took := time.Since(start); took > 30*time.Second {
		t.Errorf("it took %v", took)
	}
	if s := readNear(t, mnt); s.Near.State != "away" || s.Near.Errors == 0 || !said(s.stats, "left out") {
		t.Errorf("%+v", s)
	}
	umount(t, mnt)
	// A daemon starts without it.
	mnt = mount(t, env, source, flags...)
	readAll(t, mnt, dir, paths[:10])
}

// The near tier stops answering: no read takes longer than 5 s, and it is read again once it answers.
func TestNearTierHangs(t *testing.T) {
	dir, paths := tree(t, 2, 200, 4<<10)
	source, env := bucket(t, dir), s3server.Env(server.URL)
	srv, _, flags := nearServer(t)
	flags = append(flags, "--kernel-cache", "off", "--order", "none")
	readByNear(t, env, source, dir, paths, flags...)
	two := mount(t, env, source, flags...)
	readAll(t, two, dir, paths[:20])
	if err := srv.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	readAll(t, two, dir, paths[20:60])
	if took := time.Since(start); took > 15*time.Second { // each reader waits once, and the machine may be slow
		t.Errorf("40 files took %v", took)
	}
	if s := readNear(t, two); s.Near.State != "away" || s.Gets == 0 {
		t.Errorf("%+v", s)
	}
	if err := srv.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	// Each try takes a file that is not in the cache yet, so they must last for the longest pause.
	for _, path := range paths[60:] {
		readAll(t, two, dir, []string{path})
		if readNear(t, two).Near.State == "on" {
			return
		}
		time.Sleep(200 * time.Millisecond)
	}
	t.Error("the tier is not read again")
}

func TestNearTierRefused(t *testing.T) {
	dir, _ := tree(t, 1, 2, 1<<10)
	source, env := bucket(t, dir), s3server.Env(server.URL)
	key := filepath.Join(t.TempDir(), "key")
	write(t, key, []byte("thirty-two bytes, which differ, ")) // else it is refused as a key
	if err := os.Chmod(key, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		code  int
		says  string
		flags []string
	}{
		{2, "it lies in s3://", []string{"--near", source}},
		{2, "it lies in s3://", []string{"--near", source + "/deeper"}},
		{2, "the cache is encrypted", []string{"--near", "s3://near", "--encryption-key-file", key}},
		{1, "profile", []string{"--near", "s3://near", "--near-profile", "nobody"}},
		{2, "--near", []string{"--near-endpoint", "http://x"}},
		{2, "s3://BUCKET", []string{"--near", "/tmp"}},
	} {
		if _, errs, code := shoal(t, env,
			append([]string{"warm", source, "--cache-dir", t.TempDir()}, c.flags...)...); code != c.code ||
			!strings.Contains(errs, c.says) {
			t.Errorf("%v: exit %d, %s", c.flags, code, errs)
		}
	}
	secret := append(slices.Clip(env), "SHOAL_SSE_C_KEY="+strings.Repeat("6b", 32))
	if _, errs, code := shoal(t, secret, "warm", source, "--cache-dir", t.TempDir(), "--near",
		"s3://near"); code != 2 || !strings.Contains(errs, "SSE-C") {
		t.Errorf("objects that are encrypted: exit %d, %s", code, errs)
	}
	if _, errs, code := shoal(t, env, "warm", dir, "--cache-dir", t.TempDir(), "--near", "s3://near"); code != 2 ||
		!strings.Contains(errs, "no bucket") {
		t.Errorf("a folder: exit %d, %s", code, errs)
	}
}

// Shards, read in part and then filled; and warm, whose copies outlive it.
func TestNearTierOfShards(t *testing.T) {
	dir, paths := tree(t, 4, 200, 20<<10)
	source, env := bucket(t, dir), s3server.Env(server.URL)
	_, _, flags := nearServer(t)
	packed := "s3://" + bucketName(t) + "/packed"
	mustShoal(t, env, "pack", source, packed)
	mustShoal(t, env, append([]string{"warm", packed, "--cache-dir", t.TempDir()}, flags...)...)
	mnt := mount(t, env, packed, append(flags, "--kernel-cache", "off", "--order", "windowed:seed=1,window=100")...)
	readAll(t, mnt, dir, paths)
	s := readNear(t, mnt)
	if s.Near.Hits == 0 || s.Bytes > int64(len(paths))*20<<10/2 {
		t.Errorf("%d bytes of the origin: %+v", s.Bytes, s)
	}
	t.Logf("%+v", s)
}

// said reports whether the stats have an event with this text.
func said(s stats, text string) bool {
	return slices.ContainsFunc(s.Errors, func(e struct{ Text string }) bool { return strings.Contains(e.Text, text) })
}

// A pack fills the tier, and reads from it.
func TestNearTierPacks(t *testing.T) {
	dir, paths := tree(t, 2, 30, 20<<10)
	source := bucket(t, dir)
	origin, env := far(t, proxy.Options{})
	_, _, flags := nearServer(t)
	for n, want := range []int64{int64(len(paths)), 0} {
		before := origin.Stats()
		mustShoal(t, env, append([]string{"pack", source, fmt.Sprintf("file://%s/%d", t.TempDir(), n)}, flags...)...)
		if got := origin.Stats().Sub(before).Gets; got != want {
			t.Errorf("pack %d: %d GETs of the origin, want %d", n, got, want)
		}
	}
}
