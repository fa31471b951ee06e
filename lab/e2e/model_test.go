package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/minio/minio-go/v7"

	"github.com/shoalfs/shoal/lab/rig/proxy"
)

// world is a mount, its store and the disk of its cache, beside a model of what each file must hold.
type world struct {
	*testing.T
	rnd    *rand.Rand
	env    []string
	source string
	bucket string
	client *minio.Client
	disk   *faultDisk
	cache  string
	mnt    string

	stored  map[string][]byte // what the store has
	pinned  map[string][]byte // what was listed
	sick    bool              // the disk fails now
	damaged bool              // a segment was, and was not repaired
	next    int               // number of the next new file
}

// TestModel drives the built binary, a real store and a disk that can fail through random operations,
// and compares every read with a model: a file has the bytes that were listed, or, once the store has
// others, it may fail with ESTALE. SHOAL_STEPS makes it longer, SHOAL_SEED repeats a run.
func TestModel(t *testing.T) {
	steps, seed := 40, uint64(time.Now().UnixNano())
	if text := os.Getenv("SHOAL_STEPS"); text != "" {
		n, err := strconv.Atoi(text)
		if err != nil {
			t.Fatalf("SHOAL_STEPS: %v", err)
		}
		steps = n
	}
	if text := os.Getenv("SHOAL_SEED"); text != "" {
		n, err := strconv.ParseUint(text, 10, 64)
		if err != nil {
			t.Fatalf("SHOAL_SEED: %v", err)
		}
		seed = n
	}
	t.Logf("SHOAL_SEED=%d", seed)
	if seed%3 == 0 {
		t.Log("the cache is encrypted")
		t.Setenv("SHOAL_ENCRYPTION_KEY", newKey())
	}
	dir, paths := tree(t, 3, 40, 96<<10)
	_, env := far(t, proxy.Options{Latency: 2 * time.Millisecond})
	disk := badDisk(t)
	w := &world{
		T: t, rnd: rand.New(rand.NewPCG(seed, 0)), env: env, source: bucket(t, dir), bucket: bucketName(t),
		client: store(t), disk: disk,
		cache: filepath.Join(disk.Dir, "cache"), mnt: t.TempDir(), stored: map[string][]byte{},
	}
	for _, p := range paths {
		data, err := os.ReadFile(filepath.Join(dir, p))
		if err != nil {
			t.Fatal(err)
		}
		w.stored[p] = data
	}
	w.pinned = maps.Clone(w.stored)
	w.mount()
	ops := []struct {
		name   string
		weight int
		do     func()
	}{
		{"read", 8, w.readSome}, {"change", 3, w.change}, {"refresh", 2, w.refresh}, {"remount", 2, w.remount},
		{"kill", 2, w.kill},
		{"quota", 2, w.quota}, {"disk", 2, w.trouble}, {"damage", 1, w.damage}, {"plan", 1, w.plan},
		{"warm", 1, w.warm},
	}
	var bag []int
	for i, op := range ops {
		bag = append(bag, slices.Repeat([]int{i}, op.weight)...)
	}
	for step := range steps {
		op := ops[bag[w.rnd.IntN(len(bag))]]
		t.Logf("step %d: %s", step, op.name)
		op.do()
		if t.Failed() {
			t.FailNow()
		}
	}
	w.heal()
	w.refresh()
	for p := range w.pinned {
		w.read(p, 0, len(w.pinned[p]))
	}
	umount(t, w.mnt)
	if w.damaged { // what was found and fetched again still lies there
		fsck(t, w.cache, "--repair")
	}
	mustBeClean(t, w.cache)
}

func (w *world) mount() {
	mountAt(w.T, w.env, w.source, w.mnt, "--cache-dir", w.cache, "--kernel-cache", "off", "--memory", "160MiB",
		"--cache-size", "1GiB", "--samples", "*")
}

func (w *world) path() string {
	all := slices.Sorted(maps.Keys(w.pinned))
	return all[w.rnd.IntN(len(all))]
}

// read reads a range and compares it.
func (w *world) read(p string, off, n int) {
	want := w.pinned[p]
	f, err := os.Open(filepath.Join(w.mnt, p))
	if err != nil {
		w.Errorf("open %s: %v", p, err)
		return
	}
	defer f.Close()
	got := make([]byte, n)
	k, err := f.ReadAt(got, int64(off))
	switch changed := !bytes.Equal(w.stored[p], want); {
	case errors.Is(err, syscall.ESTALE) && changed:
	case k != n:
		w.Errorf("%s [%d,+%d) of %d: %d bytes, %v (changed in the store: %v)", p, off, n, len(want), k, err, changed)
	case !bytes.Equal(got, want[off:off+n]):
		w.Errorf("%s [%d,+%d): wrong bytes", p, off, n)
	}
}

func (w *world) readSome() {
	var wg sync.WaitGroup
	for range 4 {
		var jobs []func()
		for range 15 {
			p := w.path()
			off := w.rnd.IntN(len(w.pinned[p]))
			n := 1 + w.rnd.IntN(len(w.pinned[p])-off)
			jobs = append(jobs, func() { w.read(p, off, n) })
		}
		wg.Go(func() {
			for _, do := range jobs {
				do()
			}
		})
	}
	wg.Wait()
}

// change overwrites, removes and adds objects.
func (w *world) change() {
	put := func(p string) {
		data := make([]byte, 1+w.rnd.IntN(200<<10))
		for i := range data {
			data[i] = byte(w.rnd.Uint32())
		}
		if _, err := w.client.PutObject(w.Context(), w.bucket, "train/"+p, bytes.NewReader(data), int64(len(data)),
			minio.PutObjectOptions{}); err != nil {
			w.Fatal(err)
		}
		w.stored[p] = data
	}
	put(w.path())
	gone := w.path()
	if err := w.client.RemoveObject(w.Context(), w.bucket, "train/"+gone, minio.RemoveObjectOptions{}); err != nil {
		w.Fatal(err)
	}
	delete(w.stored, gone)
	added := fmt.Sprintf("class00/new%04d.jpg", w.next)
	w.next++
	put(added)
	if _, err := os.Stat(filepath.Join(w.mnt, added)); !errors.Is(err, fs.ErrNotExist) {
		w.Errorf("%s is seen before a refresh: %v", added, err)
	}
}

func (w *world) refresh() {
	mustShoal(w.T, w.env, "refresh", w.mnt)
	w.pinned = maps.Clone(w.stored)
	names := 0
	err := filepath.WalkDir(w.mnt, func(_ string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			names++
		}
		return err
	})
	if err != nil || names != len(w.pinned) {
		w.Errorf("%d files after a refresh, want %d: %v", names, len(w.pinned), err)
	}
}

func (w *world) remount() {
	umount(w.T, w.mnt)
	w.mount()
}

func (w *world) kill() {
	pid := readStats(w.T, w.mnt).PID
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		w.Fatal(err)
	}
	gone(w.T, pid)
	w.mount()
}

func (w *world) quota() {
	size := []string{"16MiB", "none"}[w.rnd.IntN(2)]
	mustShoal(w.T, nil, "cache", "quota", w.cache, w.source, size)
}

// trouble makes the disk fail, or ends that.
func (w *world) trouble() {
	if w.sick {
		w.heal()
		return
	}
	rules := [][]faultRule{
		{{Op: faultWrite, Path: "cache/segments", Errno: "ENOSPC"}},
		{{Op: faultWrite, Path: "cache/segments", Errno: "EIO"}},
		{{Op: faultRead, Path: "cache/segments", Errno: "EIO"}},
	}
	if err := w.disk.Set(w.Context(), faultSettings{Rules: rules[w.rnd.IntN(len(rules))]}); err != nil {
		w.Fatal(err)
	}
	w.sick = true
	w.readSome()
	w.heal() // a start on a sick disk is another test's
}

func (w *world) heal() {
	if err := w.disk.Set(w.Context(), faultSettings{}); err != nil {
		w.Fatal(err)
	}
	w.sick = false
}

// damage flips bytes of a segment that nobody uses, and has fsck find and mend it.
func (w *world) damage() {
	umount(w.T, w.mnt)
	if list := segmentsIfAny(w.T, w.cache); len(list) > 0 {
		name := list[w.rnd.IntN(len(list))]
		data, err := os.ReadFile(name)
		if err != nil {
			w.Fatal(err)
		}
		if len(data) > 4096 {
			at := 64 + w.rnd.IntN(len(data)-512)
			for i := range 256 {
				data[at+i] ^= 0x55
			}
			if err := os.WriteFile(name, data, 0o644); err != nil {
				w.Fatal(err)
			}
			if w.damaged = true; w.rnd.IntN(2) == 0 {
				fsck(w.T, w.cache, "--repair")
				mustBeClean(w.T, w.cache)
				w.damaged = false
			}
		}
	}
	w.mount()
	w.readSome()
}

func (w *world) plan() {
	var lines strings.Builder
	for range 30 {
		lines.WriteString(w.path() + "\n")
	}
	if err := os.WriteFile(filepath.Join(w.mnt, ".shoal/plan"), []byte(lines.String()), 0o644); err != nil {
		w.Errorf("plan: %v", err)
	}
}

// warm has the daemon keep what it can; files that changed in the store are named by its error.
func (w *world) warm() {
	_, errs, code := shoal(w.T, w.env, "warm", w.source, "--cache-dir", w.cache, "--samples", "*")
	if code != 0 && !strings.Contains(errs, "could not be read") && !strings.Contains(errs, "full") {
		w.Errorf("warm: %s", errs)
	}
}
