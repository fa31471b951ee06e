// Package kit is what the benchmarks share: the programs, the photographs, the store behind its
// proxy, mounts, and a report that says where and how its figures were made.
//
// What is compared must alternate within one run (A B C A B C …), because the machine is never quiet:
// report medians and ratios.
package kit

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io/fs"
	"log"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/lab/rig/cputime"
	"github.com/shoalfs/shoal/lab/rig/photos"
	"github.com/shoalfs/shoal/lab/rig/proxy"
	"github.com/shoalfs/shoal/lab/rig/s3server"
)

// Kit is one run of a benchmark.
type Kit struct {
	Ctx    context.Context
	Dir    string // work folder, absolute, on a disk
	Bin    string // the programs
	Shoal  string
	Env    []string // of every command
	report bytes.Buffer
}

// Main is a benchmark's main function. It takes -dir, -out and -shoal beside the flags that the caller has defined, gives
// run a kit, and writes the report of a run that has come to its end.
func Main(out string, run func(k *Kit) error) {
	log.SetFlags(0)
	log.SetPrefix(filepath.Base(os.Args[0]) + ": ")
	dir := flag.String("dir", ".bench", "work folder; photographs and objects are kept there")
	flag.StringVar(&out, "out", out, "report")
	shoal := flag.String("shoal", "", "binary to measure (default: built from this tree)")
	flag.Parse()
	k, err := New(*dir, *shoal)
	if err == nil {
		err = run(k)
	}
	if err == nil {
		err = k.Save(out)
	}
	if err != nil {
		log.Fatal(err)
	}
}

// New builds the programs, or takes shoal as it is given, and returns a kit that works in dir. It
// ends with SIGINT and SIGTERM.
func New(dir, shoal string) (*Kit, error) {
	abs, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	k := &Kit{Ctx: ctx, Dir: abs, Bin: filepath.Join(abs, "bin"), Env: environ()}
	if err := os.MkdirAll(k.Bin, 0o755); err != nil {
		return nil, err
	}
	build := []string{"./lab/bench/bareclient", "./lab/bench/readers", "./lab/bench/fuseceiling", "./lab/rig/cmd/s3proxy"}
	if shoal == "" {
		build = append(build, "./cmd/shoal")
		k.Shoal = filepath.Join(k.Bin, "shoal")
	} else if k.Shoal, err = filepath.Abs(shoal); err != nil {
		return nil, err
	}
	for _, pkg := range build {
		if out, err := k.Command("go", "build", "-o", k.Bin+"/", pkg).CombinedOutput(); err != nil {
			return nil, fmt.Errorf("build %s: %w\n%s", pkg, err, out)
		}
	}
	return k, nil
}

// Say prints a line and adds it to the report.
func (k *Kit) Say(format string, args ...any) {
	line := fmt.Sprintf(format, args...)
	fmt.Println(line)
	k.report.WriteString(line + "\n")
}

// Header begins the report: title, command, date, machine.
func (k *Kit) Header(title string) {
	k.Say("# %s\n", title)
	version, _ := k.Command(k.Shoal, "version").Output()
	k.Say("`go run ./bench/%s %s`, %s, %s.", filepath.Base(os.Args[0]), strings.Join(os.Args[1:], " "), time.Now().UTC().Format("2006-01-02 15:04 UTC"), Machine())
	k.Say("%s\n", strings.TrimSpace(string(version)))
}

// Machine describes where this runs.
func Machine() string {
	model := "unknown processor"
	info, _ := os.ReadFile("/proc/cpuinfo")
	for line := range strings.Lines(string(info)) {
		if name, ok := strings.CutPrefix(line, "model name"); ok {
			model = strings.TrimSpace(strings.TrimLeft(name, "\t :"))
			break
		}
	}
	var uts unix.Utsname
	_ = unix.Uname(&uts)
	return fmt.Sprintf("%d cores (%s), Linux %s, %s, load %s at the start", runtime.NumCPU(), model,
		unix.ByteSliceToString(uts.Release[:]), runtime.Version(), load())
}

func load() string {
	b, _ := os.ReadFile("/proc/loadavg")
	first, _, _ := strings.Cut(string(b), " ")
	return first
}

// Save writes the report to path.
func (k *Kit) Save(path string) error {
	k.Say("\nLoad average at the end: %s.", load())
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, k.report.Bytes(), 0o644)
}

// Command returns a command with the kit's environment that ends in good order with the run.
func (k *Kit) Command(name string, args ...string) *exec.Cmd {
	c := exec.CommandContext(k.Ctx, name, args...)
	c.Env = k.Env
	c.Cancel = func() error { return c.Process.Signal(syscall.SIGTERM) }
	c.WaitDelay = 20 * time.Second
	return c
}

// Run runs a program; into, if not nil, takes the JSON of the last line that it prints.
func (k *Kit) Run(into any, name string, args ...string) error {
	c := k.Command(name, args...)
	var stderr bytes.Buffer
	c.Stderr = &stderr
	out, err := c.Output()
	if err != nil {
		return fmt.Errorf("%s %s: %w\n%s", filepath.Base(name), strings.Join(args, " "), err, stderr.String())
	}
	if into == nil {
		return nil
	}
	lines := bytes.Split(bytes.TrimSpace(out), []byte("\n"))
	if err := json.Unmarshal(lines[len(lines)-1], into); err != nil {
		return fmt.Errorf("%s %s: %w in %.200s", filepath.Base(name), strings.Join(args, " "), err, out)
	}
	return nil
}

// Photos makes the photographs and returns their folder and the paths below it in ImageFolder's order.
func (k *Kit) Photos(count int) (dir string, paths []string, err error) {
	dir = filepath.Join(k.Dir, "photos")
	if _, err = photos.Make(k.Ctx, dir, photos.Options{Count: count}, func(done, total int) {
		if done%512 == 0 {
			fmt.Fprintf(os.Stderr, "photographs: %d of %d\n", done, total)
		}
	}); err != nil {
		return "", nil, err
	}
	paths, err = Walk(dir)
	return dir, paths, err
}

// Walk returns the files below dir, relative, dotfiles left out.
func Walk(dir string) (paths []string, err error) {
	err = filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || d.Name()[0] == '.' {
			return err
		}
		rel, err := filepath.Rel(dir, p)
		paths = append(paths, rel)
		return err
	})
	return paths, err
}

// Store starts the S3 server and, before it, a proxy with the latency (0: none). The kit's environment
// leads through the proxy.
func (k *Kit) Store(latency time.Duration) (*s3server.Server, *proxy.Process, error) {
	server, err := s3server.Start(k.Ctx, s3server.Options{Dir: filepath.Join(k.Dir, "objects")})
	if err != nil {
		return nil, nil, err
	}
	far, err := proxy.Spawn(k.Ctx, []string{filepath.Join(k.Bin, "s3proxy")}, server.URL, proxy.Options{Latency: latency, Sigma: 0.3})
	if err != nil {
		server.Stop()
		return nil, nil, err
	}
	k.Env = append(environ(), s3server.Env(far.URL)...)
	return server, far, nil
}

// environ is this process's environment without the settings of whoever measures.
func environ() []string { return append(os.Environ(), "SHOAL_SETTLED=1") }

// Mount is a live mount.
type Mount struct {
	Dir string
	PID int
	// Took is the time from the command to its return: the mount can be read.
	Took time.Duration
	k    *Kit
}

// Mount mounts source at a folder of the work folder.
func (k *Kit) Mount(source, name string, flags ...string) (*Mount, error) {
	dir := filepath.Join(k.Dir, name)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	begin := time.Now()
	if err := k.Run(nil, k.Shoal, append([]string{"mount", source, dir, "--daemon"}, flags...)...); err != nil {
		return nil, err
	}
	took := time.Since(begin)
	m, err := k.Attach(dir)
	m.Took = took
	return m, err
}

// Attach returns the mount at dir, which another verb has made.
func (k *Kit) Attach(dir string) (*Mount, error) {
	m := &Mount{Dir: dir, k: k}
	s, err := m.Stats()
	m.PID = s.PID
	return m, err
}

// Stats are the fields of .shoal/stats that benchmarks use.
type Stats struct {
	PID     int   `json:"pid"`
	Files   int   `json:"files"`
	Opens   int64 `json:"opens"`
	Gets    int64 `json:"get_requests"`
	GetSize int64 `json:"get_bytes"`
	Misses  int64 `json:"misses"`
	Memory  struct {
		Limit int64 `json:"ledger_limit"`
		Peak  int64 `json:"ledger_peak"`
	} `json:"memory"`
	Disk struct {
		Kept int `json:"kept_extents"`
	} `json:"disk"`
	Order struct {
		Spec  string `json:"spec"`
		State string `json:"state"`
	} `json:"order"`
}

// Stats reads the mount's stats.
func (m *Mount) Stats() (Stats, error) {
	var s Stats
	b, err := os.ReadFile(filepath.Join(m.Dir, ".shoal", "stats"))
	if err == nil {
		err = json.Unmarshal(b, &s)
	}
	return s, err
}

// Close unmounts and waits for the daemon, of a run that was interrupted, too.
func (m *Mount) Close() error {
	if out, err := exec.Command(m.k.Shoal, "umount", m.Dir).CombinedOutput(); err != nil {
		return fmt.Errorf("shoal umount %s: %w\n%s", m.Dir, err, out)
	}
	return nil
}

// Result is what lab/bench/readers prints.
type Result struct {
	Files   int      `json:"files"`
	Bytes   int64    `json:"bytes"`
	Seconds float64  `json:"seconds"`
	Rate    float64  `json:"files_per_s"`
	MB      float64  `json:"mb_per_s"`
	Errors  int      `json:"errors"`
	First   []string `json:"first_errors"`
}

// Read reads the listed files below dir with 8 threads.
func (k *Kit) Read(dir, list string, flags ...string) (Result, error) {
	var r Result
	err := k.Run(&r, filepath.Join(k.Bin, "readers"), append(append([]string{"-list", list, "-threads", "8"}, flags...), dir)...)
	if err == nil && r.Errors > 0 {
		err = fmt.Errorf("%d files could not be read or differ: %v", r.Errors, r.First)
	}
	return r, err
}

// List writes the paths to a file of the work folder and returns its path.
func (k *Kit) List(name string, paths []string) (string, error) {
	path := filepath.Join(k.Dir, name)
	return path, os.WriteFile(path, []byte(strings.Join(paths, "\n")+"\n"), 0o644)
}

// CPU returns the seconds of CPU that a process has used, in all its threads, and that its children
// have that it has waited for.
func CPU(pid int) float64 {
	seconds, _ := cputime.Family(pid) // 0 if it is gone
	return seconds
}

// Status returns a field of /proc/PID/status in bytes, such as VmRSS, RssAnon, VmHWM.
func Status(pid int, field string) int64 { return kib(fmt.Sprintf("/proc/%d/status", pid), field) }

// MemInfo returns a field of /proc/meminfo in bytes, such as Slab.
func MemInfo(field string) int64 { return kib("/proc/meminfo", field) }

func kib(path, field string) int64 {
	b, _ := os.ReadFile(path)
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, field+":"); ok {
			n, _ := strconv.ParseInt(strings.Fields(rest)[0], 10, 64)
			return n << 10
		}
	}
	return 0
}

// DropCaches empties the kernel's caches.
func DropCaches() error {
	unix.Sync()
	return os.WriteFile("/proc/sys/vm/drop_caches", []byte("3"), 0)
}

// Median returns the median, or 0 of nothing.
func Median(v []float64) float64 {
	s := slices.Sorted(slices.Values(v))
	if len(s) == 0 {
		return 0
	}
	return (s[(len(s)-1)/2] + s[len(s)/2]) / 2
}

// Numbers writes all values.
func Numbers(v []float64, digits int) string {
	var s []string
	for _, x := range v {
		s = append(s, strconv.FormatFloat(x, 'f', digits, 64))
	}
	return strings.Join(s, " ")
}

// Verdict says whether a figure meets its target.
func Verdict(ok bool) string {
	if ok {
		return "met"
	}
	return "**missed**"
}
