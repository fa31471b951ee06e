// Package kit is what the benchmarks share: the photographs, the store behind its proxy, mounts and feeds, and a report
// that says where and how its figures were made.
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
	"github.com/shoalfs/shoal/lab/rig/testbed"
)

// Source is where [Kit.Stored] puts the photographs.
const Source = "s3://photos/train"

// Cold is the order of a cold epoch, that of DistributedSampler(seed=7).
const Cold = "torch:seed=7"

// Bench is a benchmark: it defines its flags, and returns what it does once they are parsed.
type Bench func(flags *flag.FlagSet) func(k *Kit) error

// Kit is one run of a benchmark.
type Kit struct {
	Ctx   context.Context
	Dir   string // work folder, absolute, on a disk
	Self  string // this program, which has its parts (readers, s3proxy …) as verbs
	Shoal string
	Out   string   // the report; "" writes none
	Env   []string // of every command

	Photos string   // the folder of the photographs
	Paths  []string // below it, in ImageFolder's order
	Up     s3server.Uploaded
	Bed    *testbed.Bed // the store
	report bytes.Buffer
}

// Run parses the arguments of a benchmark, with -dir, -out and -shoal beside its own flags, runs it, and writes the
// report of a run that has come to its end. It ends with SIGINT and SIGTERM.
func Run(flags *flag.FlagSet, dir, out string, bench Bench, args []string) error {
	k := &Kit{Env: environ()}
	flags.StringVar(&dir, "dir", dir, "work folder; photographs, objects and measurements are kept there")
	flags.StringVar(&k.Out, "out", out, "report")
	flags.StringVar(&k.Shoal, "shoal", "", "binary to measure (default: built from this tree)")
	run := bench(flags)
	if err := flags.Parse(args); err != nil {
		return err
	}
	var stop context.CancelFunc
	k.Ctx, stop = signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(k.Ctx, stop)
	defer stop()
	if err := k.prepare(dir); err != nil {
		return err
	}
	err := run(k)
	if k.Bed != nil {
		k.Bed.Close()
	}
	if err != nil || k.Out == "" {
		return err
	}
	return k.save()
}

// prepare makes the work folder, and builds the binary if none was given.
func (k *Kit) prepare(dir string) (err error) {
	if k.Dir, err = filepath.Abs(dir); err != nil {
		return err
	}
	if k.Self, err = os.Executable(); err != nil {
		return err
	}
	bin := filepath.Join(k.Dir, "bin")
	if err := os.MkdirAll(bin, 0o755); err != nil {
		return err
	}
	if k.Shoal != "" {
		k.Shoal, err = filepath.Abs(k.Shoal)
		return err
	}
	k.Shoal = filepath.Join(bin, "shoal")
	if out, err := k.Command("go", "build", "-o", k.Shoal, "./cmd/shoal").CombinedOutput(); err != nil {
		return fmt.Errorf("build: %w\n%s", err, out)
	}
	return nil
}

// With returns a kit that measures another binary, and is otherwise the same.
func (k *Kit) With(shoal string) *Kit {
	other := *k
	other.Shoal = shoal
	return &other
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
	k.Say("`go run ./lab/bench %s`, %s, %s.", strings.Join(os.Args[1:], " "), time.Now().UTC().Format("2006-01-02 15:04 UTC"), Machine())
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

func (k *Kit) save() error {
	k.Say("\nLoad average at the end: %s.", load())
	if err := os.MkdirAll(filepath.Dir(k.Out), 0o755); err != nil {
		return err
	}
	return os.WriteFile(k.Out, k.report.Bytes(), 0o644)
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

// Stored makes the photographs, starts the S3 server and, before it, a proxy with the latency (0: none), until the run's
// end, and puts them there. The kit's environment leads through the proxy.
func (k *Kit) Stored(count int, latency time.Duration) (err error) {
	k.Photos = filepath.Join(k.Dir, "photos")
	if _, err = photos.Make(k.Ctx, k.Photos, photos.Options{Count: count}, func(done, total int) {
		if done%512 == 0 {
			fmt.Fprintf(os.Stderr, "photographs: %d of %d\n", done, total)
		}
	}); err != nil {
		return err
	}
	if k.Paths, err = Walk(k.Photos); err != nil {
		return err
	}
	if k.Bed, err = testbed.Start(k.Ctx, k.Dir, k.Shoal, k.Self, "s3proxy"); err != nil {
		return err
	}
	k.Env = k.Bed.Env
	if err := k.Bed.Far(k.Ctx, proxy.Options{Latency: latency, Sigma: 0.3}); err != nil {
		return err
	}
	k.Up, err = k.Bed.Server.Upload(k.Ctx, k.Photos, "photos", "train", nil)
	return err
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

// environ is this process's environment without the settings of whoever measures.
func environ() []string { return append(os.Environ(), "SHOAL_SETTLED=1") }

// Mount is a live mount.
type Mount struct {
	Dir string
	PID int
	// Addr is the feed's, of a daemon that has one.
	Addr string
	k    *Kit
}

// Mount mounts source at a folder of the work folder.
func (k *Kit) Mount(source, name string, flags ...string) (*Mount, error) {
	m := &Mount{Dir: filepath.Join(k.Dir, name), k: k}
	return m, m.start(append([]string{"mount", source, m.Dir, "--daemon"}, flags...))
}

// Serve serves source as a feed, and at a folder of the work folder.
func (k *Kit) Serve(source, name string, flags ...string) (*Mount, error) {
	dir := filepath.Join(k.Dir, name)
	m := &Mount{Dir: dir, Addr: "unix://" + dir + ".sock", k: k}
	return m, m.start(append([]string{"serve", source, "--listen", m.Addr, "--mount", dir, "--daemon"}, flags...))
}

func (m *Mount) start(args []string) error {
	if err := os.MkdirAll(m.Dir, 0o755); err != nil {
		return err
	}
	if err := m.k.Run(nil, m.k.Shoal, args...); err != nil {
		return err
	}
	s, err := m.Stats()
	m.PID = s.PID
	return err
}

// Stats reads the mount's stats.
func (m *Mount) Stats() (testbed.Stats, error) { return testbed.ReadStats(m.Dir) }

// Close unmounts and waits for the daemon, of a run that was interrupted, too.
func (m *Mount) Close() error {
	if out, err := exec.Command(m.k.Shoal, "umount", m.Dir).CombinedOutput(); err != nil {
		return fmt.Errorf("shoal umount %s: %w\n%s", m.Dir, err, out)
	}
	return nil
}

// Read is what the part readers prints.
type Read struct {
	Files int     `json:"files"`
	Rate  float64 `json:"files_per_s"`
}

// Read reads the listed files below dir with 8 threads.
func (k *Kit) Read(dir, list string) (r Read, err error) {
	err = k.Run(&r, k.Self, "readers", "-list", list, dir)
	return r, err
}

// Fed is what `shoal feed --json` prints.
type Fed struct {
	Samples int `json:"samples"`
}

// Feed consumes batches of 64 of a feed.
func (k *Kit) Feed(addr string, flags ...string) (f Fed, err error) {
	err = k.Run(&f, k.Shoal, append([]string{"feed", addr, "--batch", "64", "--json"}, flags...)...)
	return f, err
}

// Order writes the photographs, in the order of epoch 0, to a list.
func (k *Kit) Order(spec, name string) (list string, err error) {
	positions, err := k.Positions(spec)
	if err != nil {
		return "", err
	}
	paths := make([]string, len(positions))
	for i, at := range positions {
		paths[i] = k.Paths[at]
	}
	return k.List(name, paths)
}

// Positions returns the numbers of the photographs in the order of epoch 0.
func (k *Kit) Positions(spec string) (list []int, err error) {
	out, err := k.Command(k.Shoal, "order", spec, "--n", strconv.Itoa(len(k.Paths))).Output()
	if err != nil {
		return nil, fmt.Errorf("shoal order %s: %w", spec, err)
	}
	for word := range strings.FieldsSeq(string(out)) {
		i, err := strconv.Atoi(word)
		if err != nil {
			return nil, err
		}
		list = append(list, i)
	}
	return list, nil
}

// List writes the paths to a file of the work folder and returns its path.
func (k *Kit) List(name string, paths []string) (string, error) {
	path := filepath.Join(k.Dir, name)
	return path, os.WriteFile(path, []byte(strings.Join(paths, "\n")+"\n"), 0o644)
}

// Cost is what it took to read so many files.
type Cost struct{ Files, Seconds, CPU float64 }

// Cost measures what f reads from a daemon.
func (m *Mount) Cost(f func() (files int, err error)) (c Cost, err error) {
	cpu, begin := CPU(m.PID), time.Now()
	files, err := f()
	return Cost{float64(files), time.Since(begin).Seconds(), CPU(m.PID) - cpu}, err
}

// CPU returns the seconds of CPU that a process has used, in all its threads, and that its children
// have that it has waited for.
func CPU(pid int) float64 {
	seconds, _ := cputime.Family(pid) // 0 if it is gone
	return seconds
}

// Median returns the median, or 0 of nothing.
func Median(v []float64) float64 {
	s := slices.Sorted(slices.Values(v))
	if len(s) == 0 {
		return 0
	}
	return (s[(len(s)-1)/2] + s[len(s)/2]) / 2
}

// Verdict says whether a figure meets its target.
func Verdict(ok bool) string {
	if ok {
		return "met"
	}
	return "**missed**"
}
