package e2e

import (
	"archive/zip"
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/internal/durable"
	"github.com/shoalfs/shoal/lab/rig/proxy"
)

// The daemon is killed at random moments while checkpoints are saved in the ways that savers have: whoever looks into
// the bucket meanwhile finds what each last name names, and nothing that was not written so; in the end all is there,
// and no upload is left.
func TestCkptKills(t *testing.T) {
	s := newCkptSaver(t, t.TempDir())
	stop, saved := make(chan struct{}), make(chan error, 1)
	go func() { saved <- s.run(stop) }()
	bucket, env := s.watched(t)
	kills := cutCount(t, 6)
	for range kills {
		s.killSoon(t, inForeground(t, env, "ckpt", s.dir, "s3://"+bucket+"/run"))
	}
	close(stop)
	if err := <-saved; err != nil {
		t.Fatal(err)
	}
	d := carry(t, env, s.dir, "s3://"+bucket+"/run")
	mustShoal(t, env, "ckpt", "wait", s.dir, "--timeout", "300s")
	there := published(t, bucket, "run")
	for p, b := range local(t, s.dir) {
		if there[p] != b {
			t.Errorf("%s is not in the bucket as it is here", p)
		}
	}
	within(t, patience, "no upload is left", func() bool { return len(unfinished(t, bucket)) == 0 })
	d.signal(t, syscall.SIGTERM)
	d.ended(t)
	t.Logf("%d kills, %d saves", kills, s.saves)
}

// The power goes at random moments, and the disk has what was synced, or happened to be written: the bucket keeps its
// promises, and what was synced and closed arrives.
func TestCkptPowerCut(t *testing.T) {
	disk, dir := newForgetful(t)
	s := newCkptSaver(t, dir)
	s.disk = true
	bucket, env := s.watched(t)
	cuts := cutCount(t, 4)
	for range cuts {
		saved := make(chan error, 1)
		go func() { saved <- s.run(nil) }()
		s.killSoon(t, inForeground(t, env, "ckpt", dir, "s3://"+bucket+"/run"), func(kill func()) {
			s.between.Lock()
			s.cut = true
			kill()
			disk.keep(t)
			s.between.Unlock()
			if err := <-saved; !errors.Is(err, errCut) {
				t.Fatalf("the saver: %v", err)
			}
		})
		disk.cut(t)
		s.cut = false
		for p, n := range s.must {
			b, err := os.ReadFile(filepath.Join(dir, p))
			if has, ok := s.number(b); err != nil || !ok || has != n {
				t.Fatalf("%s was synced, and the disk has %d of it instead of %d: %v", p, has, n, err)
			}
		}
		if s.rng.IntN(2) == 0 { // else the next cut may come before all is carried
			s.arrive(t, bucket, carry(t, env, dir, "s3://"+bucket+"/run"))
		}
	}
	d := carry(t, env, dir, "s3://"+bucket+"/run", "--drain-timeout", "20s")
	s.arrive(t, bucket, nil)
	within(t, patience, "no upload is left", func() bool { return len(unfinished(t, bucket)) == 0 })
	d.signal(t, syscall.SIGTERM)
	select {
	case <-d.exited:
	case <-time.After(time.Minute):
		t.Fatalf("the daemon is still there after a minute:\n%s", d.log())
	}
	// a last name waits for what the cut has torn, and nobody writes it again
	if d.err != nil && !strings.Contains(d.log(), "(torn") {
		t.Errorf("the daemon ended with %v:\n%s", d.err, d.log())
	}
	t.Logf("%d cuts, %d saves, journal begun anew %d times", cuts, s.saves, disk.moved)
}

// What the bucket has of a file is here after the power has gone, also if its writer did not sync it; and so is its
// name.
func TestCkptPowerCutAfterwards(t *testing.T) {
	disk, dir := newForgetful(t)
	bucket := newBucket(t, "")
	_, env := far(t, proxy.Options{})
	d := carry(t, env, dir, "s3://"+bucket+"/run")
	write(t, filepath.Join(dir, "a/small.bin"), bytes.Repeat([]byte("s"), 100_000))
	write(t, filepath.Join(dir, "a/large.bin"), bytes.Repeat([]byte("l"), 9<<20))
	mustShoal(t, env, "ckpt", "wait", dir, "--timeout", "60s")
	if err := os.Rename(filepath.Join(dir, "a"), filepath.Join(dir, "b")); err != nil {
		t.Fatal(err)
	}
	mustShoal(t, env, "ckpt", "wait", filepath.Join(dir, "b"), "--timeout", "60s")
	d.signal(t, syscall.SIGKILL)
	<-d.exited
	disk.keep(t)
	disk.cut(t)
	there := published(t, bucket, "run/b")
	sameFiles(t, there, local(t, filepath.Join(dir, "b")))
	carry(t, env, dir, "s3://"+bucket+"/run")
	mustShoal(t, env, "ckpt", "wait", dir, "--timeout", "60s")
	sameFiles(t, published(t, bucket, "run/b"), there)
	if len(there) != 2 {
		t.Errorf("%d files", len(there))
	}
}

// cutCount is SHOAL_KILLS, or few.
func cutCount(t testing.TB, few int) int {
	if os.Getenv("SHOAL_KILLS") == "" {
		return few
	}
	return killCount(t)
}

// forgetful is a disk with an ext4 that writes nothing before it must.
type forgetful struct {
	at, image string
	dev       uint64
	moved     int // mounts with another device number
}

// newForgetful returns a disk, and a folder on it.
func newForgetful(t testing.TB) (d *forgetful, dir string) {
	t.Helper()
	if _, err := exec.LookPath("mkfs.ext4"); err != nil || os.Geteuid() != 0 {
		t.Skipf("only root can mount an ext4: %v", err)
	}
	d = &forgetful{at: t.TempDir(), image: filepath.Join(tmpfs(t, unix.MS_PRIVATE), "image")}
	write(t, d.image, nil)
	if err := os.Truncate(d.image, 128<<20); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("mkfs.ext4", "-q", "-E",
		"lazy_itable_init=0,lazy_journal_init=0", d.image).CombinedOutput(); err != nil {
		t.Fatalf("mkfs.ext4: %v: %s", err, out)
	}
	d.mount(t)
	t.Cleanup(d.unmount)
	dir = filepath.Join(d.at, "ckpt")
	if err := errors.Join(os.Mkdir(dir, 0o755), durable.SyncDir(d.at)); err != nil {
		t.Fatal(err)
	}
	return d, dir
}

func (d *forgetful) mount(t testing.TB) {
	t.Helper()
	if out, err := exec.Command("mount", "-o", "loop,commit=900,noatime", d.image, d.at).CombinedOutput(); err != nil &&
		d.dev != 0 {
		t.Fatalf("after a cut: %v: %s", err, out)
	} else if err != nil {
		t.Skipf("no loop device can be mounted here: %v: %s", err, out)
	}
	var st unix.Stat_t
	if err := unix.Stat(d.at, &st); err != nil {
		t.Fatal(err)
	}
	if d.dev != 0 && d.dev != st.Dev {
		d.moved++
	}
	d.dev = st.Dev
}

func (d *forgetful) unmount() { _ = exec.Command("umount", "-l", d.at).Run() }

// keep copies what the disk has: what its file system has not written yet is in none of the file's pages.
func (d *forgetful) keep(t testing.TB) {
	t.Helper()
	for before := []byte(nil); ; { // until nothing was written to it meanwhile
		b, err := os.ReadFile(d.image)
		if err != nil {
			t.Fatal(err)
		}
		if bytes.Equal(b, before) {
			write(t, d.image+".kept", b)
			return
		}
		before = b
	}
}

// cut mounts what keep has kept.
func (d *forgetful) cut(t testing.TB) {
	t.Helper()
	within(t, patience, "it is unmounted", func() bool { return unix.Unmount(d.at, 0) == nil })
	if err := os.Rename(d.image+".kept", d.image); err != nil {
		t.Fatal(err)
	}
	d.mount(t)
}

// ckptSaver saves checkpoints, each under a new name. What it writes has a number, which grows. Whoever changes a field
// holds between.
type ckptSaver struct {
	dir  string
	rng  *rand.Rand // of the test
	way  *rand.Rand // of the saver
	disk bool       // power goes: what has no form that shows a torn file is synced before it gets its name

	between sync.Mutex // held by each of its calls, so that a cut comes between two
	cut     bool
	last    int              // number
	saves   int              // whole ones
	wrote   map[[32]byte]int // number by content
	holed   map[string]int   // number of what is not synced, by the form's name and size: a disk has holes in it
	must    map[string]int   // number by path, of what was synced
}

var errCut = errors.New("the power has gone")

func newCkptSaver(t testing.TB, dir string) *ckptSaver {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	return &ckptSaver{
		dir: dir, rng: rand.New(rand.NewPCG(seed, 0)), way: rand.New(rand.NewPCG(seed, 1)),
		wrote: map[[32]byte]int{}, holed: map[string]int{}, must: map[string]int{},
	}
}

// killSoon kills the daemon at any moment, by how if it is given.
func (s *ckptSaver) killSoon(t testing.TB, d *foreground, how ...func(kill func())) {
	t.Helper()
	if s.rng.IntN(2) == 0 {
		within(t, patience, "it carries", func() bool {
			select {
			case <-d.exited:
				t.Fatalf("it ended by itself:\n%s", d.log())
			default:
			}
			return strings.Contains(d.log(), "carrying")
		})
	}
	select {
	case <-time.After(time.Duration(s.rng.IntN(600)) * time.Millisecond): // any moment is as good
	case <-d.exited:
		t.Fatalf("it ended by itself:\n%s", d.log())
	}
	kill := func() { _ = d.cmd.Process.Kill(); <-d.exited }
	if len(how) > 0 {
		how[0](kill)
	} else {
		kill()
	}
}

// arrive waits until the bucket has what must arrive, and ends d.
func (s *ckptSaver) arrive(t testing.TB, bucket string, d *foreground) {
	t.Helper()
	root := objectsOf(bucket, "run")
	lacks := func() (lacks []string) {
		for p, n := range s.must {
			b, _ := os.ReadFile(filepath.Join(root, p))
			if has, _ := s.number(b); has < n {
				lacks = append(lacks, fmt.Sprintf("%s (%d, not %d)", p, has, n))
			}
		}
		return lacks
	}
	for deadline := time.Now().Add(2 * time.Minute); len(lacks()) > 0; time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("what was synced does not arrive: %v", lacks())
		}
	}
	if d != nil {
		_ = d.cmd.Process.Kill()
		<-d.exited
	}
}

// number returns the number of a content, if it was written so.
func (s *ckptSaver) number(content []byte) (int, bool) {
	s.between.Lock()
	defer s.between.Unlock()
	n, ok := s.wrote[sha256.Sum256(content)]
	return n, ok
}

func (s *ckptSaver) run(stop chan struct{}) error {
	for {
		select {
		case <-stop:
			return nil
		case <-time.After(time.Duration(s.way.IntN(120)) * time.Millisecond): // it trains
			if err := s.save(); err != nil {
				return err
			}
		}
	}
}

// do makes a call, unless the power has gone.
func (s *ckptSaver) do(call func() error) error {
	s.between.Lock()
	defer s.between.Unlock()
	if s.cut {
		return errCut
	}
	return call()
}

// shape is how a kind of saver names its files, and the name that it writes last.
type shape struct {
	ext, last string
	content   func(size, number int) []byte
	form      bool // which shows a torn file
}

var shapes = []shape{
	{".safetensors", "model.safetensors.index.json", func(size, number int) []byte {
		header := fmt.Sprintf(`{"__metadata__":{"number":"%09d"},"w":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}`, number, size, size)
		b := binary.LittleEndian.AppendUint64(nil, uint64(len(header)))
		return append(append(b, header...), make([]byte, size)...)
	}, true},
	{".pt", "_SUCCESS", func(size, number int) []byte {
		var b bytes.Buffer
		z := zip.NewWriter(&b)
		w, err := z.CreateHeader(&zip.FileHeader{Name: fmt.Sprintf("archive/%09d", number), Method: zip.Store})
		if err == nil {
			_, err = w.Write(make([]byte, size))
		}
		if err = errors.Join(err, z.Close()); err != nil {
			panic(err) // a buffer takes all
		}
		return b.Bytes()
	}, true},
	{".distcp", ".metadata", func(size, number int) []byte {
		return append(fmt.Appendf(nil, "%09d", number), make([]byte, size)...)
	}, false},
}

// lists is what a last name has in it: the files beside it, and their numbers; latest has that of another last name.
type lists map[string]int

// save saves a checkpoint.
func (s *ckptSaver) save() error {
	r, kind := s.way, shapes[s.way.IntN(len(shapes))]
	sync := s.disk && (!kind.form || r.IntN(2) == 0)
	s.last++
	name := fmt.Sprintf("step-%09d", s.last)
	at, done := name, lists{}
	if r.IntN(3) == 0 {
		at += ".tmp"
	}
	if err := s.do(func() error { return os.Mkdir(filepath.Join(s.dir, at), 0o755) }); err != nil {
		return err
	}
	for i := range 1 + r.IntN(3) {
		f := fmt.Sprintf("w-%d%s", i, kind.ext)
		n, err := s.write(path.Join(at, f), kind, sync, r.IntN(3))
		if err != nil {
			return err
		}
		done[f] = n
	}
	complete := r.IntN(6) > 0
	if err := s.seal(at, kind, done, complete); err != nil {
		return err
	}
	if complete && r.IntN(4) == 0 { // again, under a last name that may be on its way
		s.forget(at)
		n, err := s.write(path.Join(at, "w-0"+kind.ext), kind, sync, r.IntN(2))
		if err != nil {
			return err
		}
		done["w-0"+kind.ext] = n
		if err := s.seal(at, kind, done, true); err != nil {
			return err
		}
	}
	to := name
	if r.IntN(4) == 0 {
		to = strings.Replace(name, "step", "kept", 1)
	}
	if err := s.rename(at, to, done, sync); err != nil {
		return err
	}
	if r.IntN(5) == 0 {
		if err := s.remove(to); err != nil {
			return err
		}
	} else if complete && (sync || !s.disk) {
		if err := s.put("latest", lists{path.Join(to, kind.last): done[kind.last]}); err != nil {
			return err
		}
	}
	s.saves++
	return s.rotate()
}

// write writes a file in one of three ways: in place; under a temporary name; or, as DCP does for Hugging Face, its
// header first, and the rest after it was closed. What shows no torn file gets its name when it is synced, if power may
// go.
func (s *ckptSaver) write(p string, kind shape, sync bool, how int) (number int, err error) {
	size := 1000 + s.way.IntN(20_000)
	if s.way.IntN(8) == 0 {
		size = 5<<20 + s.way.IntN(4<<20)
	}
	s.between.Lock()
	s.last++
	number = s.last
	b := kind.content(size, number)
	s.wrote[sha256.Sum256(b)] = number
	if s.disk && !sync {
		s.holed[hole(p, len(b))] = number
	}
	s.between.Unlock()
	if how == 2 && kind.ext != ".safetensors" || s.disk && !kind.form || sync {
		how = 1
	}
	to := filepath.Join(s.dir, p)
	if how == 1 {
		to += ".tmp"
	}
	parts := [][]byte{b[:50], b[50 : len(b)/2], b[len(b)/2:]}
	var f *os.File
	defer func() { f.Close() }() // also if the power has gone
	for i, part := range parts {
		if i == 0 || i == 1 && how == 2 {
			flags := os.O_WRONLY | os.O_CREATE | os.O_TRUNC
			if i == 1 {
				if err := s.do(f.Close); err != nil {
					return 0, err
				}
				flags = os.O_WRONLY | os.O_APPEND
			}
			if err := s.do(func() error { f, err = os.OpenFile(to, flags, 0o644); return err }); err != nil {
				return 0, err
			}
		}
		err := s.do(func() error {
			_, err := f.Write(part)
			if s.disk && s.way.IntN(3) == 0 { // a disk has more than what was synced
				err = errors.Join(err, unix.SyncFileRange(int(f.Fd()), 0, 0,
					unix.SYNC_FILE_RANGE_WRITE|unix.SYNC_FILE_RANGE_WAIT_AFTER))
			}
			return err
		})
		if err != nil {
			return 0, err
		}
	}
	if sync {
		if err := s.do(f.Sync); err != nil {
			return 0, err
		}
	}
	if err := s.do(f.Close); err != nil {
		return 0, err
	}
	if how == 1 {
		err = s.do(func() error { return os.Rename(to, filepath.Join(s.dir, p)) })
	}
	return number, err
}

// hole names what may have holes: a file, in whatever folder, and its size.
func hole(p string, size int) string {
	_, number, _ := strings.Cut(strings.TrimSuffix(path.Dir(p), ".tmp"), "-")
	return fmt.Sprint(number, path.Base(p), size)
}

// seal writes a last name.
func (s *ckptSaver) seal(at string, kind shape, done lists, complete bool) error {
	if !complete {
		return nil
	}
	beside := lists{}
	for f, n := range done {
		if f != kind.last {
			beside[f] = n
		}
	}
	err := s.put(path.Join(at, kind.last), beside)
	done[kind.last] = s.last
	return err
}

// put writes a last name as savers do that are careful.
func (s *ckptSaver) put(p string, of lists) error {
	s.between.Lock()
	s.last++
	b, err := json.Marshal(struct {
		Number int
		Of     lists
	}{s.last, of})
	s.wrote[sha256.Sum256(b)] = s.last
	delete(s.must, p)
	s.between.Unlock()
	to := filepath.Join(s.dir, p)
	var f *os.File
	defer func() { f.Close() }()
	for _, call := range []func() error{
		func() error { f, err = os.Create(to + ".tmp"); return err },
		func() error { _, err = f.Write(b); return err },
		func() error {
			if s.disk {
				return f.Sync()
			}
			return nil
		},
		func() error { return f.Close() },
		func() error { return os.Rename(to+".tmp", to) },
		func() error {
			if s.disk {
				err = durable.SyncDir(filepath.Dir(to))
			}
			if p == "latest" {
				s.must[p] = s.last
			}
			return err
		},
	} {
		if err := s.do(call); err != nil {
			return err
		}
	}
	return nil
}

// rename gives a folder its last name. What is in it must arrive from then on, if it was synced.
func (s *ckptSaver) rename(at, to string, done lists, sync bool) error {
	s.forget(at)
	if at != to {
		if err := s.do(func() error {
			return os.Rename(filepath.Join(s.dir, at), filepath.Join(s.dir, to))
		}); err != nil {
			return err
		}
	}
	if !sync {
		return nil
	}
	return s.do(func() error {
		for f, n := range done {
			s.must[path.Join(to, f)] = n
		}
		return errors.Join(durable.SyncDir(filepath.Join(s.dir, to)), durable.SyncDir(s.dir))
	})
}

// forget lets what is in a folder stay away.
func (s *ckptSaver) forget(dir string) {
	s.between.Lock()
	defer s.between.Unlock()
	maps.DeleteFunc(s.must, func(p string, _ int) bool { return path.Dir(p) == dir })
}

func (s *ckptSaver) remove(dir string) error {
	s.forget(dir)
	files, err := os.ReadDir(filepath.Join(s.dir, dir))
	for _, f := range files {
		err = cmp.Or(err, s.do(func() error { return os.Remove(filepath.Join(s.dir, dir, f.Name())) }))
	}
	return cmp.Or(err, s.do(func() error { return os.Remove(filepath.Join(s.dir, dir)) }))
}

// rotate removes the oldest checkpoints, but the one that latest names.
func (s *ckptSaver) rotate() error {
	latest, err := os.ReadFile(filepath.Join(s.dir, "latest"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	var all []string
	entries, err := os.ReadDir(s.dir)
	for _, e := range entries {
		if _, number, ok := strings.Cut(e.Name(), "-"); ok && e.IsDir() && !strings.Contains(string(latest),
			`"`+e.Name()+"/") {
			all = append(all, number+" "+e.Name())
		}
	}
	slices.Sort(all)
	for _, dir := range all[:max(0, len(all)-2)] {
		_, name, _ := strings.Cut(dir, " ")
		err = cmp.Or(err, s.remove(name))
	}
	return err
}

// ckptWatch looks into a bucket again and again.
type ckptWatch struct {
	s    *ckptSaver
	root string
	seen map[string]object
	said map[string]bool // what is broken
}

// object is what was read of one, and which that was.
type object struct {
	ino         uint64
	size, mtime int64
	number      int
	of          lists
}

// watched makes a bucket that is looked at until the test ends.
func (s *ckptSaver) watched(t testing.TB) (bucket string, env []string) {
	t.Helper()
	bucket = newBucket(t, "")
	_, env = far(t, proxy.Options{Latency: time.Millisecond})
	w := &ckptWatch{s, objectsOf(bucket, "run"), map[string]object{}, map[string]bool{}}
	stop, ended := make(chan struct{}), make(chan struct{})
	looks := 0
	go func() {
		defer close(ended)
		for more := true; more; looks++ {
			select {
			case <-stop:
				more = false
			case <-time.After(10 * time.Millisecond):
			}
			w.look(t)
		}
	}()
	t.Cleanup(func() {
		close(stop)
		<-ended
		t.Logf("%d objects, %d looks", len(w.seen), looks)
	})
	return bucket, env
}

// broken says once what is broken.
func (w *ckptWatch) broken(t testing.TB, format string, args ...any) {
	if what := fmt.Sprintf(format, args...); !w.said[what] {
		w.said[what] = true
		t.Error(what)
	}
}

// read reads an object, unless it was seen; ok is false if there is none.
func (w *ckptWatch) read(t testing.TB, p string) (o object, ok bool) {
	f, err := os.Open(filepath.Join(w.root, p))
	if err != nil {
		return o, false
	}
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		t.Error(err)
	}
	if o = w.seen[p]; o.ino == st.Ino && o.size == st.Size && o.mtime == st.Mtim.Nano() {
		return o, true
	}
	b, err := io.ReadAll(f)
	if err != nil {
		t.Error(err)
	}
	o = object{ino: st.Ino, size: st.Size, mtime: st.Mtim.Nano()}
	if o.number, ok = w.s.number(b); !ok && len(b) > 0 && b[0] > 0 {
		w.s.between.Lock()
		o.number, ok = w.s.holed[hole(p, len(b))]
		w.s.between.Unlock()
	}
	if !ok {
		w.broken(t, "%s: what is visible was never written so: %d bytes, %.60q", p, len(b), b)
	}
	if path.Ext(p) != ".safetensors" && len(b) < 1000 {
		var last struct{ Of lists }
		_ = json.Unmarshal(b, &last) // said above
		o.of = last.Of
	}
	w.seen[p] = o
	return o, true
}

// look looks at last names first: what they name must be there then.
func (w *ckptWatch) look(t testing.TB) {
	var lasts, others []string
	names, err := visible(w.root)
	if err != nil {
		t.Error(err)
	}
	for _, name := range names {
		if strings.HasPrefix(path.Base(name), "w-") {
			others = append(others, name)
		} else {
			lasts = append(lasts, name)
		}
	}
	for _, last := range lasts {
		o, ok := w.read(t, last)
		for f, n := range o.of {
			beside := path.Join(path.Dir(last), f)
			it, there := w.read(t, beside)
			if again, still := w.read(t, last); ok && (!there || it.number < n) && still && again.ino == o.ino &&
				again.number == o.number {
				if it, there = w.read(t, beside); !there || it.number < n {
					w.broken(t, "%s (%d) is visible, and not what it names: %s (%d, not %d)", last, o.number, beside,
						it.number, n)
				}
			}
		}
	}
	for _, p := range others {
		w.read(t, p)
	}
}
