package fusefs

// The mount under test is served by a child process (this test binary, started again), because a
// process must not read its own mount. The test steers the child by lines on its stdin and gets one
// line of answer each.

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"io/fs"
	"iter"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/internal/profile/trace"
	"github.com/shoalfs/shoal/lab/rig/synced"
)

const (
	serveEnv  = "SHOAL_FUSEFS_TEST_SERVE"
	readerEnv = "SHOAL_FUSEFS_TEST_READER"
	faultEnv  = "SHOAL_FUSEFS_TEST_FAULT"
	// transportEnv is the transport of all mounts. TestOverIOURing sets it.
	transportEnv = "SHOAL_FUSEFS_TEST_TRANSPORT"
	// procsEnv is the GOMAXPROCS of the children.
	procsEnv = "SHOAL_FUSEFS_TEST_PROCS"
)

func TestMain(m *testing.M) {
	if spec := os.Getenv(serveEnv); spec != "" {
		if err := serve(spec); err != nil {
			fmt.Printf("error %s\n", strings.ReplaceAll(err.Error(), "\n", " "))
			os.Exit(1)
		}
		os.Exit(0)
	}
	if path := os.Getenv(readerEnv); path != "" {
		os.Exit(directReader(path))
	}
	if path := os.Getenv(faultEnv); path != "" {
		os.Exit(faultReader(path))
	}
	os.Exit(m.Run())
}

// spec is what a child serves.
type spec struct {
	Mountpoint  string
	UID         uint32 // of the child, if not root
	Data        string // name in datasets
	Options     Options
	MemoryLimit int64
	ArenaMiB    int
	Volume      string        // what serves, see makeVolume
	Folder      string        // of the volume
	Delay       time.Duration // of a read, on average: 0.4 to 1.6 of it, or all readers would move in step
	NoRings     bool          // io_uring is forbidden, as in most containers
}

// testFile is a file of a test dataset.
type testFile struct {
	path, etag string
	size       int64
	mtime      time.Time
}

// epoch is the time of what has none.
var epoch = time.Unix(0, 0)

var day = time.Date(2025, 3, 1, 12, 30, 15, 0, time.UTC)

// datasets are the versions of each test dataset.
var datasets = map[string]func(version int) []testFile{
	"tree": func(version int) []testFile {
		files := []testFile{
			{"README.md", "r1", 100, day},
			{"empty", "e1", 0, day},
			{"class a/one.jpg", "a1", 1, day.Add(time.Hour)},
			{"class a/two.jpg", "a2", 4095, day},
			{"class a/deep/er/three.jpg", "a3", 4096, day.Add(48 * time.Hour)},
			{"class a/.hidden", "a4", 4097, day},
			{"b/große Datei \\ \"x\".bin", "b1", 2<<20 + 3, day},
			{"b/63k", "b2", 63 * 1024, time.Time{}},
			{"b/700k", "b3", 700*1024 + 1, day},
		}
		for i := range 300 {
			files = append(files, testFile{fmt.Sprintf("many/%03d.bin", i), fmt.Sprint("m", i), int64(i * 331), day})
		}
		for _, name := range []string{"changed", "missing", "denied", "invalid", "transient", "other",
			"canceled", "short"} {
			files = append(files, testFile{"err/" + name, "x", 1000, day})
		}
		files = append(files, testFile{"slow/file", "s", 1 << 20, day})
		if version > 1 {
			files = slices.DeleteFunc(files, func(f testFile) bool {
				return f.path == "class a/two.jpg" || strings.HasPrefix(f.path, "b/")
			})
			files = append(files, testFile{"new/file", "n1", 77, day}, testFile{"newroot", "n2", 5, day})
			for i := range files {
				if files[i].path == "class a/one.jpg" {
					files[i].etag, files[i].size = "a1-changed", 2000
				}
			}
		}
		return files
	},
	"big": func(int) []testFile {
		var files []testFile
		for i := range 100_000 {
			files = append(files, testFile{fmt.Sprintf("dir/file-%06d.jpg", i), "e", 10, day})
		}
		return files
	},
	"million": func(int) []testFile {
		files := make([]testFile, 1_000_000)
		for i := range files {
			files[i] = testFile{fmt.Sprintf("c%03d/%07d.jpg", i%1000, i), "e", 1000, day}
		}
		return files
	},
	"large": func(int) []testFile { return []testFile{{"large", "e", 16 << 20, day}} },
	"small": func(int) []testFile { return alike(8000, 4096) },
	"cold":  func(int) []testFile { return alike(1000, 63_000) },
	"half":  func(int) []testFile { return alike(400, 512<<10) },
	"one":   func(int) []testFile { return alike(200, 1<<20) },
	"huge":  func(int) []testFile { return alike(16, 16<<20) },
	"bench": func(int) []testFile { return alike(4000, 63_000) },
}

// alike returns n files of one size.
func alike(n int, size int64) (files []testFile) {
	for i := range n {
		files = append(files, testFile{fmt.Sprintf("c%02d/%05d.jpg", i%20, i), "e", size, day})
	}
	return files
}

func buildManifest(files []testFile) *catalog.Manifest {
	var seq iter.Seq2[objstore.Object, error] = func(yield func(objstore.Object, error) bool) {
		for _, f := range files {
			if !yield(objstore.Object{Key: f.path, Size: f.size, ETag: f.etag, ModTime: f.mtime}, nil) {
				return
			}
		}
	}
	m, err := catalog.Build(seq, catalog.BuildOptions{})
	if err != nil {
		panic(err)
	}
	return m
}

// arena is what all content is cut from.
type arena []byte

func newArena(mib int) arena {
	a := make([]byte, mib<<20)
	r := rand.NewChaCha8([32]byte{1})
	r.Read(a)
	return a
}

// readAt fills p with the content of a file, which depends on path and ETag.
func (a arena) readAt(path, etag string, p []byte, off int64) {
	h := fnv.New64a()
	h.Write([]byte(path + "\x00" + etag))
	at := (int64(h.Sum64()>>1) + off) % int64(len(a))
	for len(p) > 0 {
		n := copy(p, a[at:])
		p, at = p[n:], 0
	}
}

func (a arena) content(f testFile) []byte {
	b := make([]byte, f.size)
	a.readAt(f.path, f.etag, b, 0)
	return b
}

// testArena is the arena that tests and their children agree on.
var testArena = sync.OnceValue(func() arena { return newArena(4) })

// memVolume is a Volume and Control in memory.
type memVolume struct {
	arena    arena
	delay    time.Duration
	data     func(int) []testFile
	version  int
	manifest atomic.Pointer[catalog.Manifest]
	server   atomic.Pointer[Server]
	release  chan struct{} // closed to let slow reads go on

	mu               sync.Mutex
	opened, released map[string]int
	plans            map[string][]byte
	installs         int
	removals         int
	refused          string
	waiting          int // slow reads now
	canceled         int
	failRefresh      bool
}

func (v *memVolume) Manifest() *catalog.Manifest { return v.manifest.Load() }

// It lends nothing, is waited for at every read, and shows all files to everybody.

func (v *memVolume) Lend(*catalog.Manifest, int, int64, int) ([]byte, func(), bool) {
	return nil, nil, false
}
func (v *memVolume) ReadNow(*catalog.Manifest, int, []byte, int64) bool   { return false }
func (v *memVolume) WasRead(*catalog.Manifest, int, int64, int64, uint32) {}
func (v *memVolume) Permissions(*catalog.Manifest, int) (uint32, bool)    { return 0, false }

// It dies with its mount, and records nothing.

func (v *memVolume) SetPages(func(*catalog.Manifest, int) bool)           {}
func (v *memVolume) VersionName(*catalog.Manifest) string                 { return "" }
func (v *memVolume) VersionNamed(string) *catalog.Manifest                { return nil }
func (v *memVolume) Record() (Recording, error)                           { return nil, errors.New("not here") }
func (v *memVolume) Recording() bool                                      { return false }
func (v *memVolume) Saw(*catalog.Manifest, trace.Event, time.Time)        {}
func (v *memVolume) Area(*catalog.Manifest, int, int64) (none trace.Area) { return none }

var errKinds = map[string]objstore.Kind{
	"changed": objstore.KindChanged, "missing": objstore.KindNotFound, "denied": objstore.KindDenied,
	"invalid": objstore.KindInvalid, "transient": objstore.KindTransient,
}

func (v *memVolume) ReadAt(ctx context.Context, m *catalog.Manifest, file int, p []byte, off int64) (int, error) {
	path := m.Path(file)
	if name, ok := strings.CutPrefix(path, "err/"); ok {
		switch kind, ok := errKinds[name]; {
		case ok:
			return 0, fmt.Errorf("wrapped: %w", &objstore.Error{Op: "read", Key: path, Kind: kind})
		case name == "canceled":
			return 0, context.Canceled
		case name == "short":
			return len(p) - 1, nil
		default:
			return 0, errors.New("something else")
		}
	}
	if strings.HasPrefix(path, "slow/") {
		v.mu.Lock()
		v.waiting++
		release := v.release
		v.mu.Unlock()
		defer func() {
			v.mu.Lock()
			v.waiting--
			v.mu.Unlock()
		}()
		select {
		case <-release:
		case <-ctx.Done():
			v.mu.Lock()
			v.canceled++
			v.mu.Unlock()
			return 0, ctx.Err()
		}
	}
	time.Sleep(time.Duration(float64(v.delay) * (0.4 + 1.2*rand.Float64())))
	n := min(int64(len(p)), m.Size(file)-off)
	v.arena.readAt(path, m.ETag(file), p[:n], off)
	return int(n), nil
}

// State is "kept" for every third file, and so on.
func (v *memVolume) State(_ *catalog.Manifest, file int) string {
	return []string{"kept", "staged", "remote"}[file%3]
}

func (v *memVolume) Opened(m *catalog.Manifest, file int, _ uint32) {
	v.mu.Lock()
	v.opened[m.Path(file)]++
	v.mu.Unlock()
}

func (v *memVolume) Released(m *catalog.Manifest, file int) {
	v.mu.Lock()
	v.released[m.Path(file)]++
	v.mu.Unlock()
}

func (v *memVolume) Get(name string) ([]byte, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	switch name {
	case "stats":
		return fmt.Appendf(nil, "{\"installs\": %d, \"padding\": %q}\n", v.installs, strings.Repeat("x", 10_000)), nil
	case "order":
		return []byte("refused: " + v.refused + "\n"), nil
	case "refresh":
		return []byte("write to refresh\n"), nil
	}
	if text, ok := v.plans[strings.TrimPrefix(name, "plans/")]; ok {
		return text, nil
	}
	return nil, fs.ErrNotExist
}

func (v *memVolume) PutPlan(name string, data []byte) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	for i, line := range strings.Split(strings.TrimSuffix(string(data), "\n"), "\n") {
		if n, ok := v.Manifest().Find(line); !ok || n.IsDir {
			v.refused = fmt.Sprintf("line %d: %q", i+1, line)
			return errors.New(v.refused)
		}
	}
	v.installs++
	v.plans[name] = bytes.Clone(data)
	return nil
}

func (v *memVolume) RemovePlan(name string) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	if _, ok := v.plans[name]; !ok {
		return fs.ErrNotExist
	}
	v.removals++
	delete(v.plans, name)
	return nil
}

func (v *memVolume) Plans() []string {
	v.mu.Lock()
	defer v.mu.Unlock()
	var names []string
	for name := range v.plans {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

func (v *memVolume) Refresh(context.Context) error {
	v.mu.Lock()
	fail := v.failRefresh
	v.mu.Unlock()
	if fail {
		return errors.New("the store is down")
	}
	v.version++
	v.manifest.Store(buildManifest(v.data(v.version)))
	v.server.Load().Invalidate(nil)
	return nil
}

// testMemory counts and limits.
type testMemory struct{ used, limit atomic.Int64 }

func (m *testMemory) Reserve(n int64) bool {
	if m.used.Add(n) > m.limit.Load() {
		m.used.Add(-n)
		return false
	}
	return true
}
func (m *testMemory) Release(n int64) { m.used.Add(-n) }

// report is what the child tells about itself.
type report struct {
	Opened, Released  map[string]int
	Installs, Waiting int
	Canceled          int
	Generations       int
	Memory            int64
	Lent, Returned    int64
	Transport         Transport
}

// serve is the child.
func serve(text string) error {
	var sp spec
	if err := json.Unmarshal([]byte(text), &sp); err != nil {
		return err
	}
	interrupt := make(chan os.Signal, 1)
	signal.Notify(interrupt, os.Interrupt)
	mem := &testMemory{}
	mem.limit.Store(sp.MemoryLimit)
	sp.Options.Memory = mem
	level := slog.LevelInfo
	if sp.Options.Debug {
		level = slog.LevelDebug
	}
	sp.Options.Logger = slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level}))
	v := &memVolume{delay: sp.Delay, data: datasets[sp.Data], version: 1, opened: map[string]int{},
		released: map[string]int{},
		plans:    map[string][]byte{}, release: make(chan struct{})}
	if sp.ArenaMiB > 0 {
		v.arena = newArena(sp.ArenaMiB)
	} else {
		v.arena = testArena()
	}
	v.manifest.Store(buildManifest(v.data(1)))
	volume, err := makeVolume(v, sp.Volume, sp.Folder)
	if err != nil {
		return err
	}
	if sp.NoRings {
		if err := forbidRings(); err != nil {
			return err
		}
	}
	s, err := Mount(sp.Mountpoint, volume, v, sp.Options)
	if err != nil {
		return err
	}
	v.server.Store(s)
	fmt.Println("ready")
	lines := make(chan string)
	go func() {
		in := bufio.NewScanner(os.Stdin)
		for in.Scan() {
			lines <- in.Text()
		}
		close(lines)
	}()
	for {
		var cmd string
		select {
		case cmd = <-lines: // "" at the end of stdin
		case <-interrupt:
		}
		switch cmd {
		case "report":
			v.mu.Lock()
			r := report{Opened: v.opened, Released: v.released, Installs: v.installs, Waiting: v.waiting,
				Canceled:    v.canceled,
				Generations: len(*s.fs.gens.all.Load()), Memory: mem.used.Load(), Transport: s.Transport()}
			switch w := volume.(type) {
			case *lender:
				r.Lent, r.Returned = w.lent.Load(), w.returned.Load()
			}
			b, _ := json.Marshal(r)
			v.mu.Unlock()
			fmt.Printf("%s\n", b)
		case "collect":
			debug.FreeOSMemory()
			fmt.Println("ok")
		case "release":
			v.mu.Lock()
			close(v.release)
			v.mu.Unlock()
			fmt.Println("ok")
		case "hold":
			v.mu.Lock()
			v.release = make(chan struct{})
			v.mu.Unlock()
			fmt.Println("ok")
		case "fail refresh":
			v.mu.Lock()
			v.failRefresh = true
			v.mu.Unlock()
			fmt.Println("ok")
		case "limit":
			mem.limit.Store(100)
			fmt.Println("ok")
		case "unmount":
			if err := s.Unmount(false); err != nil {
				fmt.Println(err)
			} else {
				fmt.Println("ok")
			}
		case "abort":
			if err := s.Abort(); err != nil {
				fmt.Println(err)
			} else {
				fmt.Println("ok")
			}
		default:
			err := s.Unmount(false)
			// As the daemon does: a process that looks through all mounts uses this one for a moment, too.
			for begun := time.Now(); err != nil && time.Since(begun) < time.Minute; time.Sleep(10 * time.Millisecond) {
				err = s.Unmount(false)
			}
			if err != nil {
				fmt.Println(err)
				if err := s.Unmount(true); err != nil {
					return err
				}
			}
			s.Wait()
			if used := mem.used.Load(); used != 0 {
				return fmt.Errorf("%d bytes of staging are still reserved", used)
			}
			// The reader of stdin and the runtime's signal loop are the child's own.
			if err := goleak.Find(goleak.IgnoreTopFunction("internal/poll.runtime_pollWait"),
				goleak.IgnoreAnyFunction("github.com/shoalfs/shoal/fusefs.serve.func1"),
				goleak.IgnoreAnyFunction("os/signal.loop")); err != nil {
				return fmt.Errorf("goroutines leaked: %w", err)
			}
			fmt.Println("clean")
			return nil
		}
	}
}

// child is a mount served by a child process.
type child struct {
	t    testing.TB
	dir  string
	cmd  *exec.Cmd
	in   *os.File
	out  *bufio.Reader
	log  synced.Buffer
	data []testFile
	dead bool
}

// mountChild mounts data at a fresh folder.
func mountChild(t testing.TB, data string, change ...func(*spec)) *child {
	t.Helper()
	sp := spec{Data: data, MemoryLimit: 1 << 30, Options: Options{KernelCache: true, FsName: "s3://bucket/" + data}}
	if sp.Options.Transport = os.Getenv(transportEnv); sp.Options.Transport == "" {
		sp.Options.Transport = TransportDev
	}
	for _, f := range change {
		f(&sp)
	}
	if sp.Mountpoint == "" {
		sp.Mountpoint = filepath.Join(t.TempDir(), "mnt")
		if err := os.Mkdir(sp.Mountpoint, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	text, err := json.Marshal(sp)
	if err != nil {
		t.Fatal(err)
	}
	c := &child{t: t, dir: sp.Mountpoint, cmd: exec.Command(os.Args[0]), data: datasets[data](1)}
	// The race detector waits a second at exit for reports of other goroutines; there are none left.
	c.cmd.Env = append(os.Environ(), serveEnv+"="+string(text), "GORACE=atexit_sleep_ms=0 "+os.Getenv("GORACE"))
	if procs := os.Getenv(procsEnv); procs != "" {
		c.cmd.Env = append(c.cmd.Env, "GOMAXPROCS="+procs)
	}
	c.cmd.Stderr = &c.log
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if sp.UID != 0 {
		c.cmd.Path = publicCopy(t, os.Args[0])
		c.cmd.SysProcAttr.Credential = &syscall.Credential{Uid: sp.UID, Gid: sp.UID}
	}
	stdin, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	r, stdout, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	c.cmd.Stdin, c.cmd.Stdout = stdin, stdout
	if err := c.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	stdin.Close()
	stdout.Close()
	c.in, c.out = w, bufio.NewReader(r)
	t.Cleanup(func() {
		if !c.dead {
			c.finish()
		}
		w.Close()
		r.Close()
		if t.Failed() {
			t.Logf("log of the child:\n%s", c.log.String())
		}
	})
	if line := c.line(); line != "ready" {
		t.Fatalf("child: %s", line)
	}
	return c
}

// publicCopy copies a program to where every user can run it.
func publicCopy(t testing.TB, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("/tmp", "fusefs-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	to := filepath.Join(dir, "fusefs.test")
	if err := errors.Join(os.Chmod(dir, 0o755), os.WriteFile(to, b, 0o755)); err != nil {
		t.Fatal(err)
	}
	return to
}

func (c *child) line() string {
	line, err := c.out.ReadString('\n')
	if err != nil {
		c.t.Errorf("child ended: %v\n%s", err, c.log.String())
	}
	return strings.TrimSuffix(line, "\n")
}

func (c *child) do(cmd string) string {
	c.t.Helper()
	if _, err := fmt.Fprintln(c.in, cmd); err != nil {
		c.t.Fatal(err)
	}
	return c.line()
}

func (c *child) report() (r report) {
	c.t.Helper()
	if err := json.Unmarshal([]byte(c.do("report")), &r); err != nil {
		c.t.Fatal(err)
	}
	return r
}

// eventually waits for a state that the kernel brings about in its own time.
func (c *child) eventually(what string, ok func(report) bool) {
	c.t.Helper()
	deadline := time.Now().Add(time.Minute)
	for {
		r := c.report()
		if ok(r) {
			return
		}
		if time.Now().After(deadline) {
			c.t.Fatalf("not so after a minute: %s; it is %+v", what, r)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// finish unmounts; the child must leave nothing behind.
func (c *child) finish() {
	c.t.Helper()
	c.dead = true
	if line := c.do("quit"); line != "clean" {
		c.t.Errorf("end of the child: %s", line)
	}
	if err := c.cmd.Wait(); err != nil {
		c.t.Errorf("child: %v", err)
	}
	if mi, err := findMount(c.dir); err != nil || mi != nil && mi.Type == "fuse.shoal" {
		c.t.Errorf("still mounted: %+v, %v", mi, err)
	}
}

// kill ends the child as a crash would.
func (c *child) kill() {
	c.t.Helper()
	c.dead = true
	c.cmd.Process.Kill()
	c.cmd.Wait()
}

func (c *child) path(elem ...string) string {
	return filepath.Join(append([]string{c.dir}, elem...)...)
}
