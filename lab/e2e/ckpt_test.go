package e2e

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/minio/minio-go/v7"

	"github.com/shoalfs/shoal/lab/rig/port"
	"github.com/shoalfs/shoal/lab/rig/proxy"
)

// carry starts shoal ckpt, and waits until it knows all that is in the folder.
func carry(t testing.TB, env []string, dir, dest string, flags ...string) *foreground {
	t.Helper()
	d := inForeground(t, env, append([]string{"ckpt", dir, dest}, flags...)...)
	d.says(t, "carrying", dir)
	return d
}

// published returns the objects under a prefix, without Shoal's own.
func published(t testing.TB, bucket, prefix string) map[string]string {
	t.Helper()
	root := objectsOf(bucket, prefix)
	names, err := visible(root)
	found := map[string]string{}
	for _, name := range names {
		b, rerr := os.ReadFile(filepath.Join(root, name))
		if errors.Is(rerr, fs.ErrNotExist) {
			continue
		}
		found[name], err = string(b), cmp.Or(err, rerr)
	}
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// objectsOf is where the server keeps what is under a prefix.
func objectsOf(bucket, prefix string) string {
	return filepath.Join(workDir, "objects/data", bucket, prefix)
}

// visible returns the names of the objects there, without Shoal's own. They may come and go meanwhile.
func visible(root string) (names []string, err error) {
	err = filepath.WalkDir(root, func(p string, e fs.DirEntry, err error) error {
		rel, _ := filepath.Rel(root, p)
		// the server's, as it replaces an object
		if err == nil && e.Type().IsRegular() && !strings.HasPrefix(rel, ".shoal") &&
			!strings.Contains(rel, ".sgwtmp.") {
			names = append(names, rel)
		}
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return err
	})
	return names, err
}

// local returns the files below a folder, without Shoal's own.
func local(t testing.TB, dir string) map[string]string {
	t.Helper()
	found := map[string]string{}
	err := filepath.WalkDir(dir, func(p string, e fs.DirEntry, err error) error {
		rel, _ := filepath.Rel(dir, p)
		if err != nil || !e.Type().IsRegular() || strings.HasPrefix(rel, ".shoal") {
			return err
		}
		b, err := os.ReadFile(p)
		found[rel] = string(b)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

func sameFiles(t testing.TB, got, want map[string]string) {
	t.Helper()
	for p := range want {
		if got[p] != want[p] {
			_, there := got[p]
			t.Errorf("%s: in the bucket %v, %d bytes; here %d bytes", p, there, len(got[p]), len(want[p]))
		}
	}
	for p := range got {
		if _, ok := want[p]; !ok {
			t.Errorf("%s is in the bucket, and not here", p)
		}
	}
}

// unfinished returns the keys of the uploads that are not complete.
func unfinished(t testing.TB, bucket string) (keys []string) {
	t.Helper()
	core := minio.Core{Client: store(t)}
	page, err := core.ListMultipartUploads(context.Background(), bucket, "", "", "", "", 1000)
	if err != nil {
		t.Fatal(err)
	}
	for _, u := range page.Uploads {
		keys = append(keys, u.Key)
	}
	return keys
}

// safetensors is a file in that format with one tensor of n bytes.
func safetensors(n int, fill byte) []byte {
	header := fmt.Sprintf(`{"w":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}`, n, n)
	b := binary.LittleEndian.AppendUint64(nil, uint64(len(header)))
	return append(append(b, header...), bytes.Repeat([]byte{fill}, n)...)
}

// Objects appear in the order in which files were closed, and a last name after all of them, however large the first
// is.
func TestCkptOrder(t *testing.T) {
	dir := t.TempDir()
	name := newBucket(t, "")
	_, env := far(t, proxy.Options{Latency: 3 * time.Millisecond})
	admin, release, err := port.Hold()
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	carry(t, env, dir, "s3://"+name+"/run", "--admin", admin)
	var order []string
	save := func(p string, b []byte) {
		write(t, filepath.Join(dir, p), b)
		order = append(order, p)
	}
	save("step-1/large.safetensors", safetensors(40<<20, 1))
	for i := range 30 {
		save(fmt.Sprintf("step-1/part-%02d.bin", i), bytes.Repeat([]byte{byte(i)}, 1000*i))
	}
	save("step-1/.metadata", []byte("{}"))
	save("step-2/a.bin", []byte("a")) // it waits for no last name, but may pass none of the files before it
	done := make(chan struct{})
	go func() {
		defer close(done)
		mustShoal(t, env, "ckpt", "wait", dir, "--timeout", "60s")
	}()
	for waiting := true; waiting; {
		select {
		case <-done:
			waiting = false
		default:
		}
		there := published(t, name, "run")
		before := true
		for _, p := range order {
			if _, ok := there[p]; ok && !before && p != "step-2/a.bin" {
				t.Fatalf("%s is visible before another that was closed before it: %v",
					p, slices.Sorted(maps.Keys(there)))
			} else if !ok && p != "step-1/.metadata" {
				before = false
			}
		}
		if _, ok := there["step-1/.metadata"]; ok && len(there) < 32 {
			t.Fatalf("the last name is visible with %d others", len(there)-1)
		}
	}
	sameFiles(t, published(t, name, "run"), local(t, dir))
	if got := mustShoal(t, env, "ckpt", "latest", "s3://"+name+"/run"); got != "s3://"+name+"/run/step-1\n" {
		t.Errorf("latest: %q", got)
	}
	resp, err := http.Get("http://" + admin + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	metrics, err := io.ReadAll(resp.Body)
	if want := fmt.Sprintf("\nshoal_ckpt_published_files_total %d\n", len(order)); err != nil ||
		!strings.Contains(string(metrics), want) {
		t.Errorf("%v: no %q in %s", err, want, metrics)
	}
}

// A file that is written again before or after it was published, a rename, removals with and without --delete,
// --keep-local.
func TestCkptChanges(t *testing.T) {
	dir := t.TempDir()
	name := newBucket(t, "")
	p, env := far(t, proxy.Options{})
	d := carry(t, env, dir, "s3://"+name+"/run")
	wait := func(at string) {
		t.Helper()
		mustShoal(t, env, "ckpt", "wait", filepath.Join(dir, at), "--timeout", "60s")
	}
	// A header is closed, and the file opened again to append, as DCP's writer for Hugging Face does.
	whole := safetensors(9<<20, 7)
	write(t, filepath.Join(dir, "s/model.safetensors"), whole[:80])
	f, err := os.OpenFile(filepath.Join(dir, "s/model.safetensors"), os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.Write(whole[80:]); err != nil {
		t.Fatal(err)
	}
	if len(published(t, name, "run")) > 0 {
		t.Error("a file that is being written is in the bucket")
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(dir, "s/model.safetensors.index.json"), []byte("{}"))
	wait("s")
	sameFiles(t, published(t, name, "run"), local(t, dir))
	// A later write is another generation.
	write(t, filepath.Join(dir, "s/model.safetensors"), safetensors(5<<20, 8))
	wait("s")
	sameFiles(t, published(t, name, "run"), local(t, dir))
	// A rename is a copy: no bytes are sent.
	before := p.Stats()
	if err := os.Rename(filepath.Join(dir, "s"), filepath.Join(dir, "t")); err != nil {
		t.Fatal(err)
	}
	wait("t")
	if sent := p.Stats().Sub(before).PutBytes; sent > 100<<10 {
		t.Errorf("a rename sent %d bytes", sent)
	}
	there := published(t, name, "run")
	if there["t/model.safetensors"] != there["s/model.safetensors"] || len(there) != 4 {
		t.Errorf("after a rename: %v", slices.Sorted(maps.Keys(there)))
	}
	d.signal(t, syscall.SIGTERM)
	d.ended(t)

	// With --delete what is not here is removed, also what went meanwhile, and after what comes first.
	write(t, filepath.Join(dir, "u/a.bin"), []byte("a"))
	write(t, filepath.Join(dir, "u/_SUCCESS"), nil)
	d = carry(t, env, dir, "s3://"+name+"/run", "--delete")
	within(t, patience, "the bucket is as the folder", func() bool {
		return maps.Equal(published(t, name, "run"), local(t, dir))
	})
	if err := os.RemoveAll(filepath.Join(dir, "t")); err != nil {
		t.Fatal(err)
	}
	within(t, patience, "the removal", func() bool { return len(published(t, name, "run")) == 2 })
	d.signal(t, syscall.SIGTERM)
	d.ended(t)

	// --keep-local removes here what is complete there, and --delete does not follow.
	d = carry(t, env, dir, "s3://"+name+"/run", "--delete", "--keep-local", "2")
	for i := range 4 {
		write(t, filepath.Join(dir, fmt.Sprintf("step-%d/a.bin", i)), []byte("a"))
		write(t, filepath.Join(dir, fmt.Sprintf("step-%d/.metadata", i)), []byte("m"))
	}
	within(t, patience, "two are left here", func() bool { return len(local(t, dir)) == 4 })
	wait(".")
	if n := len(published(t, name, "run")); n != 10 {
		t.Errorf("%d objects are left: %v", n, slices.Sorted(maps.Keys(published(t, name, "run"))))
	}
	d.signal(t, syscall.SIGTERM)
	d.ended(t)
	d = carry(t, env, dir, "s3://"+name+"/run", "--delete")
	wait(".")
	d.signal(t, syscall.SIGTERM)
	d.ended(t)
	if n := len(published(t, name, "run")); n != 10 {
		t.Errorf("%d objects are left after a restart", n)
	}
}

// A folder that goes before its last name was visible goes from the bucket, too.
func TestCkptWithdrawn(t *testing.T) {
	dir := t.TempDir()
	name := newBucket(t, "")
	p, env := far(t, proxy.Options{})
	d := carry(t, env, dir, "s3://"+name+"/run")
	if err := p.Set(proxy.Options{
		Faults: []proxy.Fault{{Kind: proxy.Unavailable, Op: proxy.OpPut, Key: ".metadata"}}}); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(dir, "good/a.bin"), []byte("a"))
	write(t, filepath.Join(dir, "step/a.bin"), []byte("a"))
	write(t, filepath.Join(dir, "step/.metadata"), []byte("m"))
	within(t, patience, "the files are there", func() bool { return len(published(t, name, "run")) == 2 })
	d.signal(t, syscall.SIGKILL) // the next one has to know
	<-d.exited
	if err := os.RemoveAll(filepath.Join(dir, "step")); err != nil {
		t.Fatal(err)
	}
	carry(t, env, dir, "s3://"+name+"/run")
	within(t, patience, "the folder has gone", func() bool { return len(published(t, name, "run")) == 1 })
}

// What cannot work is refused, and what is no file for a bucket is left out.
func TestCkptRefuses(t *testing.T) {
	dir := t.TempDir()
	name := newBucket(t, "")
	_, env := far(t, proxy.Options{})
	dest := "s3://" + name + "/run"
	d := carry(t, env, dir, dest)
	var refused sync.WaitGroup // side by side: that another host lives shows after some seconds
	for _, c := range []struct {
		args []string
		code int
		say  string
	}{
		{[]string{dir, dest}, 1, "another process follows it"},
		{[]string{filepath.Join(dir, "none"), dest}, 1, "no such file"},
		{[]string{"/dev/null", dest}, 1, "not a directory"},
		{[]string{"", dest}, 2, "the DIR is empty"},
		{[]string{dir, "s3://" + name + "/x.tar"}, 2, "tar shard"},
		{[]string{dir, "file://" + dir + "/copy"}, 2, "overlap"},
		{[]string{dir, dest, "--last", "["}, 2, "--last"},
		{[]string{dir, dest, "--keep-local", "-1"}, 2, "--keep-local"},
		{[]string{t.TempDir(), dest}, 1, "is in use by host"},
		{[]string{t.TempDir(), dest, "--hosts-unordered"}, 1, "is in use by host"},
		{[]string{t.TempDir(), dest, "--cluster", "etcd://127.0.0.1:1/train"}, 1, "without --cluster"},
		{[]string{t.TempDir(), dest, "--cluster", "etcd://h/c", "--hosts-unordered"}, 2, "one or the other"},
		{[]string{t.TempDir(), dest, "--cluster", "h/c"}, 2, "the address of a cluster is"},
		{[]string{"wait", t.TempDir()}, 1, "no shoal ckpt carries it"},
		{[]string{"wait", filepath.Join(dir, "none")}, 1, "is not in"},
		{[]string{"latest", dest}, 1, "no complete checkpoint"},
	} {
		refused.Go(func() {
			_, errs, code := shoal(t, env, append([]string{"ckpt"}, c.args...)...)
			if code != c.code || !strings.Contains(errs, c.say) {
				t.Errorf("ckpt %v: exit %d, %s", c.args, code, errs)
			}
		})
	}
	refused.Wait()
	if err := os.Symlink("a", filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mkfifo(filepath.Join(dir, "pipe"), 0o644); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(dir, "torn.safetensors"), safetensors(1000, 1)[:500])
	write(t, filepath.Join(dir, "a.tmp"), []byte("a"))
	write(t, filepath.Join(dir, "a.bin"), []byte("a"))
	mustShoal(t, env, "ckpt", "wait", filepath.Join(dir, "a.bin"), "--timeout", "60s")
	sameFiles(t, published(t, name, "run"), map[string]string{"a.bin": "a"})
	var s struct {
		Here struct{ Temporary, Torn, Skipped int }
	}
	if err := json.Unmarshal([]byte(mustShoal(t, env, "ckpt", "ls", dir, "--json")), &s); err != nil ||
		s.Here.Temporary != 1 || s.Here.Torn != 1 || s.Here.Skipped != 2 {
		t.Errorf("left out: %+v, %v", s, err)
	}
	d.signal(t, syscall.SIGKILL)
	<-d.exited
	// The same folder takes its destination over at once.
	carry(t, env, dir, dest)
}

// The daemon is killed again and again while checkpoints are saved, renamed and removed. Whoever finds a last name
// finds what it names; nothing torn is ever visible; in the end all is there, and no upload is left but another
// program's.
func TestCkptKilled(t *testing.T) {
	dir := t.TempDir()
	name := newBucket(t, "")
	_, env := far(t, proxy.Options{Latency: time.Millisecond})
	core := minio.Core{Client: store(t)}
	foreign := "run/step-3/w-0.safetensors"
	if _, err := core.NewMultipartUpload(context.Background(), name, foreign, minio.PutObjectOptions{}); err != nil {
		t.Fatal(err)
	}
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	kills := killCount(t)
	stop := make(chan struct{})
	saved := make(chan struct{})
	go func() {
		defer close(saved)
		r := rand.New(rand.NewPCG(seed, 1))
		for step := 0; ; step++ {
			select {
			case <-stop:
				return
			case <-time.After(50 * time.Millisecond): // it trains
				saveOnce(t, r, dir, step)
			}
		}
	}()
	for range kills {
		d := inForeground(t, env, "ckpt", dir, "s3://"+name+"/run")
		select {
		case <-time.After(time.Duration(rng.IntN(400)) * time.Millisecond): // any moment is as good
		case <-d.exited:
			t.Fatalf("it ended by itself:\n%s", d.log())
		}
		_ = d.cmd.Process.Kill()
		<-d.exited
		checkCkpt(t, published(t, name, "run"))
	}
	close(stop)
	<-saved
	d := carry(t, env, dir, "s3://"+name+"/run")
	mustShoal(t, env, "ckpt", "wait", dir, "--timeout", "120s")
	there := published(t, name, "run")
	checkCkpt(t, there)
	for p, b := range local(t, dir) {
		if there[p] != b {
			t.Errorf("%s is not in the bucket as it is here", p)
		}
	}
	within(t, patience, "no upload is left", func() bool {
		return slices.Equal(unfinished(t, name), []string{foreign})
	})
	d.signal(t, syscall.SIGTERM)
	d.ended(t)
}

// saveOnce saves a checkpoint in one of the ways that savers have: files in place, closed and opened again, or renamed;
// a folder that is renamed at the end; a manifest last. Some are removed before the manifest.
func saveOnce(t *testing.T, r *rand.Rand, dir string, step int) {
	name := fmt.Sprintf("step-%d", step)
	at := filepath.Join(dir, name)
	renamed := r.IntN(3) == 0
	if renamed {
		at += ".tmp"
	}
	sums := map[string]string{}
	for i := range 1 + r.IntN(4) {
		size := 1000 + r.IntN(20_000)
		if r.IntN(4) == 0 {
			size = 9 << 20
		}
		b := safetensors(size, byte(r.IntN(256)))
		f := fmt.Sprintf("w-%d.safetensors", i)
		sum := sha256.Sum256(b)
		sums[f] = hex.EncodeToString(sum[:])
		path := filepath.Join(at, f)
		switch r.IntN(3) {
		case 0:
			write(t, path, b)
		case 1:
			write(t, path+".tmp", b)
			if err := os.Rename(path+".tmp", path); err != nil {
				t.Error(err)
			}
		default:
			write(t, path, b[:50])
			f, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
			if err == nil {
				_, err = f.Write(b[50:])
				err = errors.Join(err, f.Close())
			}
			if err != nil {
				t.Error(err)
			}
		}
	}
	if r.IntN(6) > 0 {
		b, err := json.Marshal(sums)
		if err != nil {
			t.Error(err)
		}
		write(t, filepath.Join(at, ".metadata"), b)
	}
	if renamed {
		if err := os.Rename(at, filepath.Join(dir, name)); err != nil {
			t.Error(err)
		}
	}
	if r.IntN(4) == 0 {
		if err := os.RemoveAll(filepath.Join(dir, name)); err != nil {
			t.Error(err)
		}
	} else if _, err := os.Stat(filepath.Join(dir, name, ".metadata")); err == nil {
		write(t, filepath.Join(dir, "latest"), []byte(name))
	}
}

// checkCkpt looks for a last name without what it names, and for torn files.
func checkCkpt(t *testing.T, there map[string]string) {
	t.Helper()
	for p, b := range there {
		switch filepath.Base(p) {
		case "latest":
			if _, ok := there[b+"/.metadata"]; !ok {
				t.Errorf("latest names %s, which is not complete", b)
			}
		case ".metadata":
			var sums map[string]string
			if err := json.Unmarshal([]byte(b), &sums); err != nil {
				t.Errorf("%s: %v", p, err)
			}
			for f, want := range sums {
				sum := sha256.Sum256([]byte(there[filepath.Join(filepath.Dir(p), f)]))
				if hex.EncodeToString(sum[:]) != want {
					t.Errorf("%s is visible, and %s is not as it says", p, f)
				}
			}
		default:
			if n := binary.LittleEndian.Uint64([]byte(b)); len(b) < 8 || n > 1000 {
				t.Errorf("%s is torn", p)
			} else {
				var header map[string]struct {
					End [2]int `json:"data_offsets"`
				}
				if err := json.Unmarshal([]byte(b[8:8+n]), &header); err != nil ||
					len(b) != 8+int(n)+header["w"].End[1] {
					t.Errorf("%s is torn: %d bytes, %v", p, len(b), err)
				}
			}
		}
	}
}

// Nothing waits for a large file that was removed while it was sent, however slowly.
func TestCkptRemovedWhileSent(t *testing.T) {
	dir := t.TempDir()
	name := newBucket(t, "")
	p, env := far(t, proxy.Options{
		Faults: []proxy.Fault{{Kind: proxy.Slow, Op: proxy.OpPut, Key: "a.bin", For: 5 * time.Minute}}})
	d := carry(t, env, dir, "s3://"+name+"/run", "--drain-timeout", "1s")
	write(t, filepath.Join(dir, "a.bin"), make([]byte, 9<<20))
	within(t, patience, "its parts are being sent", func() bool { return p.Stats().InFlight > 0 })
	if err := os.Remove(filepath.Join(dir, "a.bin")); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(dir, "b.bin"), []byte("b"))
	mustShoal(t, env, "ckpt", "wait", filepath.Join(dir, "b.bin"), "--timeout", "30s")
	sameFiles(t, published(t, name, "run"), local(t, dir))
	d.signal(t, syscall.SIGTERM)
	<-d.exited
}

// --keep-local removes nothing that the bucket lacks.
func TestCkptKeepsWhatTheBucketLacks(t *testing.T) {
	dir := t.TempDir()
	name := newBucket(t, "")
	_, env := far(t, proxy.Options{})
	d := carry(t, env, dir, "s3://"+name+"/run", "--keep-local", "1")
	write(t, filepath.Join(dir, "one/notes.tmp"), []byte("kept"))
	for _, step := range []string{"one", "two", "three"} {
		write(t, filepath.Join(dir, step, "a.bin"), []byte("a"))
		write(t, filepath.Join(dir, step, ".metadata"), []byte("m"))
	}
	d.says(t, "a complete checkpoint stays here", "one")
	within(t, patience, "the others but the newest have gone", func() bool { return len(local(t, dir)) == 5 })
	if _, ok := local(t, dir)["one/notes.tmp"]; !ok {
		t.Error("a file is lost")
	}
}
