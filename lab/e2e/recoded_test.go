package e2e

import (
	"bytes"
	"fmt"
	"image"
	"image/png"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/shoalfs/shoal/lab/rig/etcd"
	"github.com/shoalfs/shoal/lab/rig/proxy"
)

const (
	eyes     = "RandomResizedCrop(64)|RandomHorizontalFlip()|uint8|nchw"
	fraction = "Resize(32)|CenterCrop(28)|fp16|nhwc|dct"
)

// recodedAll waits until all that can be recoded is.
func recodedAll(t testing.TB, target string, atLeast int) (s stats) {
	t.Helper()
	quiet := 0
	within(t, 2*patience, "the files are recoded", func() bool {
		time.Sleep(500 * time.Millisecond)
		before := s.Recoded.Files
		if s = readStats(t, target); s.Recoded.Files < atLeast || s.Recoded.UnderWay || s.Recoded.Files != before {
			quiet = 0
		}
		quiet++
		return quiet > 3
	})
	return s
}

// What a feed delivers, and what a mount reads, is the same whether the disk has the files recoded or as they came; and
// after a kill in the midst of it.
func TestRecodedCache(t *testing.T) {
	dir, paths := pictures(t, 4, 60)
	var b bytes.Buffer
	if err := png.Encode(&b, image.NewRGBA(image.Rect(0, 0, 70, 50))); err != nil {
		t.Fatal(err)
	}
	jpg := content(t, filepath.Join(dir, paths[0]))
	for name, data := range map[string][]byte{"class00/a.png": b.Bytes(),
		"class01/trailing.jpg": append(bytes.Clone(jpg), "and more"...), "class02/notes.txt": []byte("no picture")} {
		write(t, filepath.Join(dir, name), data)
		paths = append(paths, name)
	}
	p, env := far(t, proxy.Options{})
	source := bucket(t, dir)
	for _, encrypted := range []bool{false, true} {
		t.Run(fmt.Sprintf("encrypted=%v", encrypted), func(t *testing.T) {
			cache := t.TempDir()
			flags := []string{"--cache-dir", cache, "--kernel-cache", "off"}
			if encrypted {
				keyFile := filepath.Join(t.TempDir(), "key")
				write(t, keyFile, []byte(newKey()+"\n"))
				flags = append(flags, "--encryption-key-file", keyFile)
			}
			addr, mnt := serve(t, env, source, append(flags, "--recode", "off")...)
			want := feed(t, addr, "--transform", eyes, "--seed", "4").Digest
			raw, small := feed(t, addr).Digest, feed(t, addr, "--transform", fraction).Digest
			readAll(t, mnt, dir, paths)
			waitKept(t, mnt, len(paths))
			plain := readStats(t, mnt)
			if plain.Recoded.Files != 0 {
				t.Fatalf("--recode off: %+v", plain.Recoded)
			}
			umount(t, mnt)

			gets := int64(0)                                     // without what tries the key at each start
			for _, mode := range []string{"auto", "on", "off"} { // the first is killed
				addr, mnt = serve(t, env, source, append(flags, "--recode", mode)...)
				before := p.Stats()
				if got := feed(t, addr, "--transform", eyes, "--seed", "4").Digest; got != want {
					t.Errorf("--recode %s: digest %s, want %s", mode, got, want)
				}
				if mode == "auto" {
					within(t, 2*patience, "some files are recoded", func() bool { // by idle processors
						return readStats(t, mnt).Recoded.Files > 0
					})
					if err := syscall.Kill(readStats(t, mnt).PID, syscall.SIGKILL); err != nil {
						t.Fatal(err)
					}
					within(t, patience, "the daemon is gone", func() bool {
						_, err := os.Stat(filepath.Join(mnt, paths[0]))
						return err != nil
					})
					umount(t, mnt)
					gets += p.Stats().Sub(before).Gets
					continue
				}
				s := recodedAll(t, mnt, 200)
				if s.Recoded.Files > 241 || s.Recoded.After >= s.Recoded.Before || s.Disk.Used >= plain.Disk.Used ||
					s.Disk.Kept != len(paths) {
					t.Errorf("--recode %s: %+v; %d on disk, %d before", mode, s.Recoded, s.Disk.Used, plain.Disk.Used)
				}
				readAll(t, mnt, dir, paths)
				if got := feed(t, addr, "--transform", eyes, "--seed", "4").Digest; got != want {
					t.Errorf("--recode %s: digest %s of recoded files, want %s", mode, got, want)
				}
				if got := feed(t, addr); got.Digest != raw {
					t.Errorf("--recode %s: raw digest %s, want %s", mode, got.Digest, raw)
				}
				if got := feed(t, addr, "--transform", fraction); got.Digest != small {
					t.Errorf("--recode %s: dct digest %s, want %s", mode, got.Digest, small)
				}
				if s := readStats(t, mnt); s.Recoded.Restored == 0 || s.Disk.Corrupt != 0 {
					t.Errorf("%+v, %+v", s.Recoded, s.Disk)
				}
				umount(t, mnt)
				gets += p.Stats().Sub(before).Gets
			}
			if gets != 0 {
				t.Errorf("%d GETs of what was kept", gets)
			}
			reread := func(atLeast, atMost int64) {
				t.Helper()
				_, mnt = serve(t, env, source, append(flags, "--recode", "off")...)
				before := p.Stats()
				readAll(t, mnt, dir, paths)
				if n := p.Stats().Sub(before).Gets - readStats(t, mnt).Hedges.Sent; n < atLeast || n > atMost ||
					readStats(t, mnt).Disk.Corrupt != 0 {
					t.Errorf("%d GETs, want %d to %d; %+v", n, atLeast, atMost, readStats(t, mnt).Disk)
				}
				umount(t, mnt)
			}
			lose := func(pattern string) {
				t.Helper()
				names, err := filepath.Glob(filepath.Join(cache, pattern))
				if err != nil || len(names) == 0 {
					t.Fatalf("no %s: %v", pattern, err)
				}
				for _, name := range names {
					if err := os.Remove(name); err != nil {
						t.Fatal(err)
					}
				}
			}
			for _, lost := range []string{"facts*", "facts", "codings/*[0-9a-f]", "codings/*.copy"} {
				lose(lost)
				reread(0, 0)
			}
			check := append([]string{"fsck", cache}, flags[4:]...)
			mustShoal(t, env, check...)
			// Without its tables a recoded file is lost, and fsck says so. A mount fetches it again.
			lose("codings/*")
			if out, errs, code := shoal(t, env, check...); code != 1 || !strings.Contains(out, "cannot be restored") {
				t.Errorf("without tables: fsck exits %d: %s%s", code, out, errs)
			}
			if out, errs, code := shoal(t, env, append(check, "--repair")...); code != 1 {
				t.Errorf("without tables: fsck --repair exits %d: %s%s", code, out, errs)
			}
			mustShoal(t, env, check...)
			reread(200, 241)
		})
	}
}

// cameLate returns how often another node's answer came too late for a daemon, or was not waited for.
func cameLate(t testing.TB, target string) (n int64) {
	t.Helper()
	var s fleetStats
	decode(t, mustShoal(t, nil, "stat", target, "--json"), &s)
	for _, other := range s.Cluster.Nodes {
		n += other.Asked.Late + other.Asked.Passed
	}
	return n
}

// What one node keeps recoded goes to another as it is, with the tables, and is kept so there, also over
// a restart. The node that came takes all from the first one, which restores nothing for its feed.
func TestRecodedCluster(t *testing.T) {
	if _, err := etcd.FindBinary(); err != nil {
		t.Skip(err)
	}
	members, err := etcd.Start(t.Context(), false)
	if err != nil {
		t.Fatal(err)
	}
	defer members.Close()
	dir, paths := pictures(t, 4, 60)
	p, env := far(t, proxy.Options{})
	source := bucket(t, dir)
	caches := []string{t.TempDir(), t.TempDir()}
	start := func(i int) (addr, mnt string) {
		return serve(t, env, source, "--cache-dir", caches[i], "--kernel-cache", "off", "--recode", "on",
			"--cluster", "etcd://"+members.Addr+"/recoded", "--cluster-insecure", "--advertise", "127.0.0.1:0")
	}
	addr, first := start(0)
	want := feed(t, addr, "--transform", eyes, "--seed", "4").Digest
	waitKept(t, first, len(paths))
	if s := recodedAll(t, first, len(paths)); s.Recoded.Files != len(paths) {
		t.Fatalf("%+v", s.Recoded)
	}

	addr, second := start(1)
	within(t, patience, "the other node's tables are there", func() bool {
		return bytes.Contains(content(t, filepath.Join(caches[1], "shoal.log")), []byte("tables of another node"))
	})
	gets, late := p.Stats().Gets, int64(0)
	for round := range 2 {
		if got := feed(t, addr, "--transform", eyes, "--seed", "4").Digest; got != want {
			t.Errorf("digest %s, want %s", got, want)
		}
		within(t, patience, "what it is to keep is on disk", func() bool {
			s := readStats(t, second)
			return s.Disk.Kept > len(paths)/5 && s.Recoded.Files == s.Disk.Kept
		})
		if s := readStats(t, first); s.Recoded.Restored != 0 {
			t.Errorf("round %d: restored for the other node: %+v", round, s.Recoded)
		}
		late += cameLate(t, second)
		umount(t, second)
		addr, second = start(1)
	}
	readAll(t, second, dir, paths)
	late += cameLate(t, second)
	// None; on a busy machine as atMost of clusters has it, and never most of them.
	if n := p.Stats().Gets - gets; n > min(2*late, int64(len(paths)/4)) {
		t.Errorf("%d GETs of what the other node has, of which %d came late", n, late)
	}
	umount(t, second)
	umount(t, first)
}
