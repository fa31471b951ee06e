package e2e

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/minio/minio-go/v7"

	"github.com/shoalfs/shoal/lab/rig/photos"
	"github.com/shoalfs/shoal/lab/rig/proxy"
)

// photographs makes real ones, a few of each class.
func photographs(t testing.TB, count int) (dir string, paths []string) {
	t.Helper()
	dir = filepath.Join(t.TempDir(), "photos")
	if _, err := photos.Make(context.Background(), dir, count, nil); err != nil {
		t.Fatal(err)
	}
	err := filepath.WalkDir(dir, func(p string, d os.DirEntry, err error) error {
		if err == nil && !d.IsDir() && d.Name()[0] != '.' {
			rel, e := filepath.Rel(dir, p)
			paths, err = append(paths, rel), e
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return dir, paths
}

// untar unpacks tars with GNU tar or with Python's tarfile and returns all members in order, shard by
// shard.
func untar(t testing.TB, tool, into string, tars []string) (members [][]string) {
	t.Helper()
	for _, f := range tars {
		var out []byte
		var err error
		switch tool {
		case "tar":
			if out, err = exec.Command("tar", "tf", f).CombinedOutput(); err == nil {
				var more []byte
				more, err = exec.Command("tar", "xf", f, "-C", into).CombinedOutput()
				if len(more) > 0 {
					t.Errorf("tar xf %s says: %s", f, more)
				}
			}
		case "python":
			out, err = exec.Command("/usr/bin/python3", "-c", `
import sys, tarfile
with tarfile.open(sys.argv[1]) as t:
    for m in t:
        assert m.isreg(), m
        print(m.name)
    t.extractall(sys.argv[2])`, f, into).CombinedOutput()
		}
		if err != nil {
			t.Fatalf("%s %s: %v\n%s", tool, f, err, out)
		}
		members = append(members, strings.Fields(string(out)))
	}
	return members
}

func tars(t testing.TB, dir string) []string {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(dir, "*.tar"))
	if err != nil || len(found) == 0 {
		t.Fatalf("no tars in %s, %v", dir, err)
	}
	return found
}

// Photographs are packed from S3 to S3. What comes out is plain tars for everybody, and as a source the
// same dataset: tree, bytes, ETags, version.
func TestPack(t *testing.T) {
	dir, paths := photographs(t, 230)
	_, env := far(t, proxy.Options{Latency: 5 * time.Millisecond, Sigma: 0.3})
	source := bucket(t, dir)
	packed := newBucket(t, "-packed")
	dest := "s3://" + packed + "/set"
	out := mustShoal(t, env, "pack", source, dest, "--shard-size", "2MiB", "--seed", "5", "--json")
	var result map[string]any
	decode(t, out, &result)

	local := t.TempDir()
	download(t, packed, "set/", local)
	files := tars(t, local)
	if len(files) < 4 {
		t.Errorf("%d shards of 2 MiB", len(files))
	}
	for _, f := range files {
		if _, err := os.Stat(f + ".sidx"); err != nil {
			t.Error(err)
		}
		if fi, err := os.Stat(f); err != nil || fi.Size() > 4<<20 {
			t.Errorf("%s: %v, %v", f, fi, err)
		}
	}
	if _, err := os.Stat(filepath.Join(local, "shoal-manifest.json")); err != nil {
		t.Error(err)
	}
	for _, tool := range []string{"tar", "python"} {
		into := t.TempDir()
		members := untar(t, tool, into, files)
		if got := slices.Sorted(slices.Values(slices.Concat(members...))); !slices.Equal(got,
			slices.Sorted(slices.Values(paths))) {
			t.Errorf("%s lists %d members, want the %d paths", tool, len(got), len(paths))
		}
		readAll(t, into, dir, paths)
		// Random order, not directory order: a shard mixes the classes.
		for i, m := range members {
			classes := make(map[string]bool)
			for _, name := range m {
				classes[path.Dir(name)] = true
			}
			if len(m) > 15 && len(classes) < 8 {
				t.Errorf("shard %d holds %d files of %d classes", i, len(m), len(classes))
			}
		}
	}

	plain := mount(t, env, source)
	whole := mount(t, env, dest, "--kernel-cache", "off")
	sameTree(t, whole, dir, paths)
	a, b := readStats(t, plain), readStats(t, whole)
	if a.Dataset != b.Dataset || a.Files != b.Files || a.Samples != b.Samples {
		t.Errorf("version %s of %d files, packed %s of %d", a.Dataset, a.Files, b.Dataset, b.Files)
	}
	for _, f := range paths[:20] {
		if x, y := xattr(t, filepath.Join(plain, f), "user.shoal.etag"),
			xattr(t, filepath.Join(whole, f), "user.shoal.etag"); x != y || x == "" {
			t.Errorf("%s: ETag %q, packed %q", f, x, y)
		}
	}

	// In the windowed order neighbours come in one GET.
	umount(t, whole)
	windowed := mount(t, env, dest, "--order", "windowed:seed=3,window=2", "--kernel-cache", "off")
	order := strings.Fields(mustShoal(t, nil, "order", "windowed:seed=3,window=2", "--mount", windowed, "--paths"))
	if !slices.Equal(slices.Sorted(slices.Values(order)), slices.Sorted(slices.Values(paths))) {
		t.Fatalf("shoal order --mount --paths prints %d paths, want each of %d once", len(order), len(paths))
	}
	readAll(t, windowed, dir, order)
	gets := readStats(t, windowed).Gets
	if gets > int64(len(paths)/5) {
		t.Errorf("%d GETs for %d files in the windowed order", gets, len(paths))
	}
	t.Logf("windowed: %d GETs for %d files in %d shards", gets, len(paths), len(files))

	// Packing again finds everything there; another dataset does not go into the same place.
	was := keys(t, packed, "set/")
	mustShoal(t, env, "pack", source, dest, "--shard-size", "2MiB", "--seed", "5")
	if now := keys(t, packed, "set/"); !slices.Equal(was, now) {
		t.Errorf("packed again: %v, before %v", now, was)
	}
	write(t, filepath.Join(dir, "aqua/extra.jpg"), []byte("another file"))
	upload(t, dir, bucketName(t))
	if _, errs, code := shoal(t, env, "pack", source, dest, "--shard-size", "2MiB", "--seed", "5"); code != 1 ||
		!strings.Contains(errs, "shoal-manifest.json") || !strings.Contains(errs, "version") {
		t.Errorf("another dataset into the same place: exit %d, %s", code, errs)
	}
}

// A set in a folder, names that tar and WebDataset are particular about, and a destination inside the
// source.
func TestPackNames(t *testing.T) {
	dir := t.TempDir()
	names := []string{
		"a/img.0001.jpg", "a/img.0002.jpg", "a/.hidden.jpg", "a/LICENSE", "a/one.jpg", "a/one.cls", "a/one.json",
		"b/" + strings.Repeat("long-", 45) + ".jpg", "b/späße und ☃.jpg", "b/new\nline.jpg", "b/%2Eodd.jpg",
		"b/empty.jpg",
		strings.Repeat("deep/", 40) + "x.jpg",
	}
	rng := rand.New(rand.NewPCG(7, 7))
	for i, n := range names {
		data := make([]byte, 100*i)
		for j := range data {
			data[j] = byte(rng.Uint32())
		}
		if n == "b/empty.jpg" {
			data = nil
		}
		write(t, filepath.Join(dir, n), data)
	}
	dest := filepath.Join(t.TempDir(), "not", "there", "yet")
	mustShoal(t, nil, "pack", "file://"+dir, "file://"+dest, "--seed", "1")
	for _, tool := range []string{"tar", "python"} {
		into := t.TempDir()
		untar(t, tool, into, tars(t, dest))
		n := 0
		if err := filepath.WalkDir(into, func(_ string, d os.DirEntry, err error) error {
			if err == nil && !d.IsDir() {
				n++
			}
			return err
		}); err != nil || n != len(names) {
			t.Errorf("%s unpacks %d files of %d, %v", tool, n, len(names), err)
		}
	}
	mnt := mount(t, nil, "file://"+dest, "--samples", "*")
	sameTree(t, mnt, dir, names)
	if _, errs, code := shoal(t, nil, "pack", "file://"+dir, "file://"+dir+"/a"); code == 0 ||
		!strings.Contains(errs, "overlap") {
		t.Errorf("packed into the source: exit %d, %s", code, errs)
	}
	if _, errs, code := shoal(t, nil, "pack", "file://"+dest, "file://"+t.TempDir()); code == 0 {
		t.Errorf("a set was packed: %s", errs)
	}
}

// A pack that is killed again and again is resumed, and what comes out is what one that was not
// killed makes. No upload is left open.
func TestPackKilled(t *testing.T) {
	dir, paths := tree(t, 4, 150, 48<<10)
	near := proxy.Options{Latency: 5 * time.Millisecond, Sigma: 0.3}
	p, env := far(t, near)
	source := bucket(t, dir)
	packed := newBucket(t, "-packed")
	args := func(set string) []string {
		return []string{"pack", source, "s3://" + packed + "/" + set, "--shard-size", "2MiB", "--seed", "9",
			"--connections", "32"}
	}
	mustShoal(t, env, args("whole")...)
	whole := p.Stats().Requests
	rng := rand.New(rand.NewPCG(uint64(time.Now().UnixNano()), 1))
	set, sets := "", 0
	for killed := 0; killed < atMost(3, 10); {
		if set == "" {
			set = fmt.Sprint("killed", sets)
			sets++
		}
		// The store stops to answer after some requests, and not after a time: how long a pack takes is the machine's
		// business, and may be another one than before.
		n := rng.Int64N(whole)
		stuck := near
		stuck.Faults = []proxy.Fault{{Kind: proxy.Slow, Op: proxy.OpAny, After: int(n), For: time.Hour}}
		before := p.Stats().Requests
		if err := p.Set(stuck); err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command(shoalBin, args(set)...)
		cmd.Env = append(os.Environ(), env...)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		done := make(chan error, 1)
		go func() { done <- cmd.Wait() }()
		within(t, 2*time.Minute, "the pack is stuck, or has ended", func() bool {
			return len(done) > 0 || p.Stats().Requests-before > n
		})
		_ = cmd.Process.Kill()
		switch err := <-done; {
		case err == nil: // what was left was less
			set = ""
		case cmd.ProcessState.ExitCode() >= 0:
			t.Fatalf("pack: %v", err)
		default:
			killed++
		}
	}
	if err := p.Set(near); err != nil {
		t.Fatal(err)
	}
	mustShoal(t, env, args(set)...)
	t.Logf("%d sets; a whole pack takes %d requests", sets, whole)
	sum := func(set string) map[string]string {
		sums := make(map[string]string)
		for o := range store(t).ListObjects(context.Background(), packed,
			minio.ListObjectsOptions{Prefix: set + "/", Recursive: true}) {
			if o.Err != nil {
				t.Fatal(o.Err)
			}
			if name := path.Base(o.Key); strings.HasSuffix(name, ".tar") {
				sums[name] = fmt.Sprint(o.Size)
			} else {
				sums[name] = ""
			}
		}
		return sums
	}
	for i := range sets {
		if a, b := sum("whole"), sum(fmt.Sprint("killed", i)); !maps.Equal(a, b) {
			t.Errorf("a killed pack leaves %v, one that was not %v", b, a)
		}
	}
	x, y := t.TempDir(), t.TempDir()
	download(t, packed, "whole/", x)
	download(t, packed, set+"/", y)
	for _, f := range tars(t, x) {
		a, _ := os.ReadFile(f)
		b, err := os.ReadFile(filepath.Join(y, filepath.Base(f)))
		if err != nil || !bytes.Equal(a, b) {
			t.Errorf("%s differs, %v", filepath.Base(f), err)
		}
	}
	for u := range store(t).ListIncompleteUploads(context.Background(), packed, "", true) {
		t.Errorf("an upload of %s is left open, %v", u.Key, u.Err)
	}
	sameTree(t, mount(t, env, "s3://"+packed+"/"+set), dir, paths)
}

// Tars that others made, by GNU tar and by Python, as a brace list and as a folder.
func TestForeignTars(t *testing.T) {
	dir, paths := tree(t, 3, 40, 8<<10)
	long := "class00/" + strings.Repeat("a-long-name-", 18) + ".jpg"
	uni := "class01/späße ☃.jpg"
	for _, p := range []string{long, uni} {
		write(t, filepath.Join(dir, p), []byte("content of "+p))
	}
	paths = append(paths, long, uni)
	set := t.TempDir()
	run := func(name string, args ...string) {
		t.Helper()
		cmd := exec.Command(name, args...)
		cmd.Dir = dir
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%s %v: %v\n%s", name, args, err, out)
		}
	}
	run("tar", "cf", set+"/x-0000.tar", "--format=gnu", "class00")
	run("tar", "cf", set+"/x-0001.tar", "--format=pax", "--transform=s,^,./,", "class01")
	run("/usr/bin/python3", "-c", `
import sys, tarfile
with tarfile.open(sys.argv[1], "w", format=tarfile.USTAR_FORMAT) as t:
    t.add("class02")`, set+"/x-0002.tar")
	name := bucketName(t)
	if _, err := server.Upload(t.Context(), set, name, "train", nil); err != nil {
		t.Fatal(err)
	}
	_, env := far(t, proxy.Options{Latency: 2 * time.Millisecond})
	for _, source := range []string{
		"file://" + set, "file://" + set + "/x-{0000..0002}.tar", "s3://" + name + "/train",
		"s3://" + name + "/train/x-{0000..0002}.tar",
	} {
		t.Run(source[:4], func(t *testing.T) {
			mnt := mount(t, env, source, "--kernel-cache", "off")
			sameTree(t, mnt, dir, paths)
			if s := readStats(t, mnt); s.Files != len(paths) {
				t.Errorf("%s: %d files of %d", source, s.Files, len(paths))
			}
		})
	}
	one := mount(t, env, "file://"+set+"/x-0002.tar")
	var class02 []string
	for _, p := range paths {
		if strings.HasPrefix(p, "class02/") {
			class02 = append(class02, p)
		}
	}
	sameTree(t, one, dir, class02)
}

// A shard that is cut short refuses the set, unless it is to be left out: then it is named and counted, also when the
// listing comes from the catalog, and the rest is shown.
func TestBadShards(t *testing.T) {
	dir, paths := tree(t, 3, 40, 8<<10)
	set := t.TempDir()
	for _, class := range []string{"class00", "class01", "class02"} {
		if out, err := exec.Command("tar", "cf", set+"/"+class+".tar", "-C", dir, class).CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
	}
	bad := filepath.Join(set, "class01.tar")
	whole, err := os.ReadFile(bad)
	if err != nil {
		t.Fatal(err)
	}
	write(t, bad, whole[:len(whole)/2])
	source, cache := "file://"+set, t.TempDir()
	refused(t, nil, source, "class01.tar", "--bad-shards skip")
	left := slices.Concat(paths[:40], paths[80:])
	skip := func() (mnt string) {
		t.Helper()
		mnt = mount(t, nil, source, "--cache-dir", cache, "--bad-shards", "skip", "--kernel-cache", "off")
		sameTree(t, mnt, dir, left)
		var s struct {
			Skipped struct {
				Bad      int `json:"bad_shards"`
				Examples []string
			} `json:"keys_not_shown"`
		}
		decode(t, mustShoal(t, nil, "stat", mnt, "--json"), &s)
		if s.Skipped.Bad != 1 || !strings.Contains(strings.Join(s.Skipped.Examples, " "), "class01.tar") {
			t.Errorf("the stats count %+v", s.Skipped)
		}
		if text := mustShoal(t, nil, "stat", mnt); !strings.Contains(text, "class01.tar") {
			t.Errorf("shoal stat:\n%s", text)
		}
		return mnt
	}
	umount(t, skip())
	mnt := skip()
	log, err := os.ReadFile(filepath.Join(cache, "shoal.log"))
	if err != nil || !strings.Contains(string(log), "bad shards are left out") ||
		!strings.Contains(string(log), "class01.tar") {
		t.Errorf("the log: %v\n%s", err, log)
	}
	write(t, bad, whole)
	mustShoal(t, nil, "refresh", mnt)
	sameTree(t, mnt, dir, paths)
	umount(t, mnt)
	// What was left out is nothing that another mount, which was not told so, goes by.
	write(t, bad, whole[:len(whole)/2])
	mustShoal(t, nil, "warm", source, "--cache-dir", cache, "--bad-shards", "skip", "--refresh")
	if _, errs, code := shoal(t, nil, "mount", source, t.TempDir(), "--cache-dir", cache, "--daemon"); code != 1 ||
		!strings.Contains(errs, "class01.tar") {
		t.Errorf("without --bad-shards: exit %d, %s", code, errs)
	}
	// A set of its own version that is damaged stands in for nothing.
	packed := t.TempDir()
	mustShoal(t, nil, "pack", "file://"+dir, "file://"+packed, "--shard-size", "1MiB")
	if err := os.Remove(tars(t, packed)[0]); err != nil {
		t.Fatal(err)
	}
	sameTree(t, mount(t, nil, "file://"+dir, "--shards", "file://"+packed, "--bad-shards", "skip"), dir, paths)
}

// Members that must not be shown as they are: nothing outside the mount, nothing lost in silence, and
// what cannot be read is refused with its name.
func TestHostileTars(t *testing.T) {
	set := t.TempDir()
	script := `
import io, sys, tarfile
def add(t, name, data=b"x", **kw):
    m = tarfile.TarInfo(name); m.size = len(data)
    for k, v in kw.items(): setattr(m, k, v)
    t.addfile(m, io.BytesIO(data))
with tarfile.open(sys.argv[1] + "/h-0000.tar", "w", format=tarfile.PAX_FORMAT) as t:
    add(t, "good/a.jpg", b"good a")
    add(t, "../outside.jpg", b"evil")
    add(t, "/etc/absolute.jpg", b"evil")
    add(t, "good//double.jpg", b"evil")
    add(t, "good/../../up.jpg", b"evil")
    add(t, "good/" + "n" * 300 + ".jpg", b"evil")
    add(t, "good/" + "d/" * 32000 + "x.jpg", b"evil")
    add(t, "good/twice.jpg", b"first")
    add(t, "good/twice.jpg", b"second")
    add(t, "good/link.jpg", b"", type=tarfile.SYMTYPE, linkname="/etc/passwd")
    add(t, "good/device", b"", type=tarfile.CHRTYPE)
with tarfile.open(sys.argv[1] + "/h-0001.tar", "w") as t:
    add(t, "good/a.jpg", b"of the second shard")
    add(t, "good/b.jpg", b"good b")
`
	if out, err := exec.Command("/usr/bin/python3", "-c", script, set).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	mnt := mount(t, nil, "file://"+set)
	want := map[string]string{"good/a.jpg": "good a", "good/twice.jpg": "second", "good/b.jpg": "good b",
		"good/h-0001~a.jpg": "of the second shard"}
	dir := t.TempDir()
	for p, text := range want {
		write(t, filepath.Join(dir, p), []byte(text))
	}
	sameTree(t, mnt, dir, slices.Collect(maps.Keys(want)))
	var s struct {
		Skipped struct {
			Hostile  int
			Shadowed int
			Examples []string
		} `json:"keys_not_shown"`
	}
	decode(t, mustShoal(t, nil, "stat", mnt, "--json"), &s)
	if s.Skipped.Hostile < 5 {
		t.Errorf("the stats count %+v", s.Skipped)
	}

	sparse := t.TempDir()
	for _, format := range []string{"gnu", "pax"} {
		f := filepath.Join(sparse, "hole.bin")
		write(t, f, nil)
		if err := os.Truncate(f, 1<<20); err != nil {
			t.Fatal(err)
		}
		bad := t.TempDir()
		if out, err := exec.Command("tar", "cf", bad+"/s.tar", "--sparse", "--format="+format, "-C", sparse,
			"hole.bin").CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		refused(t, nil, "file://"+bad, "sparse", "hole.bin")
	}
	// A tar that is cut off, or none at all.
	whole, err := os.ReadFile(set + "/h-0001.tar")
	if err != nil {
		t.Fatal(err)
	}
	for _, content := range [][]byte{whole[:520], bytes.Repeat([]byte("no tar at all "), 1000)} {
		bad := t.TempDir()
		write(t, bad+"/x.tar", content)
		refused(t, nil, "file://"+bad, "x.tar")
	}
}

// refused fails the test unless a mount of source ends with an error of these words.
func refused(t testing.TB, env []string, source string, words ...string) {
	t.Helper()
	mnt := t.TempDir()
	_, errs, code := shoal(t, env, "mount", source, mnt, "--daemon", "--cache-dir", t.TempDir())
	if code == 0 {
		umount(t, mnt)
	}
	for _, w := range words {
		if code != 1 || !strings.Contains(errs, w) {
			t.Errorf("%s: exit %d, want 1 and %q: %s", source, code, w, errs)
		}
	}
}

// mount --shards reads a source through a set that was packed of it: not one small GET. Where the set
// is of another version, that is said, and no byte is wrong.
func TestMountShards(t *testing.T) {
	dir, paths := tree(t, 3, 60, 32<<10)
	p, env := far(t, proxy.Options{})
	source := bucket(t, dir)
	dest := "s3://" + newBucket(t, "-packed") + "/set"
	mustShoal(t, env, "pack", source, dest, "--shard-size", "1MiB")
	// Whoever reads a small file is told that the store is not there.
	if err := p.Set(proxy.Options{Faults: []proxy.Fault{{Kind: proxy.Unavailable, Key: "train/*/*"}}}); err != nil {
		t.Fatal(err)
	}
	mnt := mount(t, env, source, "--shards", dest, "--order", "torch:seed=1", "--kernel-cache", "off")
	sameTree(t, mnt, dir, paths)
	umount(t, mnt)

	if err := p.Set(proxy.Options{}); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(dir, paths[0]), []byte("changed after it was packed"))
	upload(t, dir, bucketName(t))
	other := t.TempDir()
	cache := t.TempDir()
	_, errs, code := shoal(t, env, "mount", source, other, "--shards", dest, "--daemon", "--cache-dir", cache)
	if code == 0 {
		defer umount(t, other)
		sameTree(t, other, dir, paths)
		log, _ := os.ReadFile(filepath.Join(cache, "shoal.log"))
		errs += string(log)
	}
	if !strings.Contains(errs, dest) || !strings.Contains(errs, "version") {
		t.Errorf("a set of another version: exit %d, %s", code, errs)
	}
}

// mount --publish: what one node has read whole, the next one finds packed.
func TestPublish(t *testing.T) {
	dir, paths := tree(t, 3, 60, 32<<10)
	p, env := far(t, proxy.Options{Latency: 2 * time.Millisecond})
	source := bucket(t, dir)
	packed := newBucket(t, "-packed")
	dest := "s3://" + packed + "/set"
	mnt := mount(t, env, source, "--publish", dest, "--order", "torch:seed=1", "--kernel-cache", "off")
	before := p.Stats()
	readAll(t, mnt, dir, torchOrder(t, "torch:seed=1", paths))
	within(t, patience, "the set is published", func() bool {
		return slices.Contains(keys(t, packed, "set/"), "set/shoal-manifest.json")
	})
	if d := p.Stats().Sub(before); d.Gets > int64(len(paths)+len(paths)/4) {
		t.Errorf("%d GETs to read and publish %d files: what is cached was fetched again", d.Gets, len(paths))
	}
	version := readStats(t, mnt).Dataset
	umount(t, mnt)
	next := mount(t, env, dest)
	sameTree(t, next, dir, paths)
	if v := readStats(t, next).Dataset; v != version {
		t.Errorf("version %s, published %s", version, v)
	}
	if _, errs, code := shoal(t, env, "mount", source, t.TempDir(), "--daemon", "--publish", source+"/packed",
		"--cache-dir", t.TempDir()); code == 0 || !strings.Contains(errs, "overlap") {
		t.Errorf("published into the source: exit %d, %s", code, errs)
	}
}

// warm fills the cache: a part, a list, all.
func TestWarm(t *testing.T) {
	dir, paths := tree(t, 4, 50, 32<<10)
	p, env := far(t, proxy.Options{Latency: 2 * time.Millisecond})
	source := bucket(t, dir)
	cache := t.TempDir()
	gets := func() int64 { return p.Stats().Gets }
	before := gets()
	mustShoal(t, env, "warm", source, "--cache-dir", cache, "--fraction", "0.5")
	half := gets() - before
	if half < int64(len(paths))*4/10 || half > int64(len(paths))*6/10 {
		t.Errorf("--fraction 0.5 of %d files: %d GETs", len(paths), half)
	}
	list := filepath.Join(t.TempDir(), "list")
	write(t, list, []byte(strings.Join(paths[:30], "\n")+"\n"))
	mustShoal(t, env, "warm", source, "--cache-dir", cache, "--list", list)
	before = gets()
	mnt := mount(t, env, source, "--cache-dir", cache, "--order", "none", "--kernel-cache", "off")
	readAll(t, mnt, dir, paths[:30])
	if n := gets() - before; n != 0 {
		t.Errorf("%d GETs for files that were warmed", n)
	}
	// Beside a daemon that owns the folder.
	mustShoal(t, env, "warm", source, "--cache-dir", cache)
	before = gets()
	readAll(t, mnt, dir, paths)
	if n := gets() - before; n != 0 {
		t.Errorf("%d GETs after everything was warmed", n)
	}
	mustShoal(t, env, "warm", source, "--cache-dir", cache)
	if n := gets() - before; n != 0 {
		t.Errorf("%d GETs to warm what is warm", n)
	}
	write(t, list, []byte("class00/none.jpg\n"))
	if _, errs, code := shoal(t, env, "warm", source, "--cache-dir", t.TempDir(), "--list", list); code != 1 ||
		!strings.Contains(errs, "class00/none.jpg") {
		t.Errorf("a list with an unknown path: exit %d, %s", code, errs)
	}
	if _, errs, code := shoal(t, env, "warm", source, "--cache-dir", t.TempDir(), "--fraction", "2"); code != 2 ||
		!strings.Contains(errs, "--fraction") {
		t.Errorf("--fraction 2: exit %d, %s", code, errs)
	}
}
