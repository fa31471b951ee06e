// Readers reads files with several threads, as a DataLoader's workers do, and prints what it took as
// one line of JSON.
//
//	readers [-threads 8] [-seed 1] [-passes 1] [-drop-caches] [-verify DIR | -sums FILE] DIR
//	readers -list FILE DIR          only these paths below DIR, in this order
//
// Without -list the folder is walked once beforehand, which is not timed, and the paths are shuffled
// by seed and pass. Each thread takes the next path of the pass; a file is opened, read to its end in
// one call if possible, and closed. -drop-caches empties the kernel's caches before every pass.
package main

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// result is what is printed, one line a pass.
type result struct {
	Pass        int      `json:"pass"`
	Threads     int      `json:"threads"`
	Files       int64    `json:"files"`
	Bytes       int64    `json:"bytes"`
	Seconds     float64  `json:"seconds"`
	FilesPerSec float64  `json:"files_per_s"`
	MBPerSec    float64  `json:"mb_per_s"`
	P50Micros   int64    `json:"p50_us"` // open to close
	P99Micros   int64    `json:"p99_us"`
	MaxMicros   int64    `json:"max_us"`
	Verified    bool     `json:"verified"`
	Errors      int64    `json:"errors"`
	FirstErrors []string `json:"first_errors,omitempty"`
}

const shownErrors = 5

func main() {
	failed, err := run()
	if err != nil {
		fmt.Fprintln(os.Stderr, "readers:", err)
	}
	if failed || err != nil {
		os.Exit(1)
	}
}

type reader struct {
	dir    string
	check  func(path string, data []byte) error // nil: do not check
	files  atomic.Int64
	bytes  atomic.Int64
	errors atomic.Int64
	mu     sync.Mutex
	shown  []string
}

func run() (failed bool, err error) {
	threads := flag.Int("threads", 8, "readers at a time")
	seed := flag.Uint64("seed", 1, "of the order")
	passes := flag.Int("passes", 1, "how often everything is read")
	list := flag.String("list", "", "file of paths below DIR, one a line, read in this order")
	verify := flag.String("verify", "", "folder of originals to compare with")
	sums := flag.String("sums", "", "file as sha256sum prints it, paths below DIR, to compare with")
	drop := flag.Bool("drop-caches", false, "empty the kernel's caches before each pass (root)")
	flag.Parse()
	if flag.NArg() != 1 {
		return false, errors.New("give one folder")
	}
	if *threads < 1 || *passes < 1 {
		return false, errors.New("-threads and -passes must be at least 1")
	}
	dir := flag.Arg(0)
	var paths []string
	if *list != "" {
		paths, err = readLines(*list)
	} else {
		paths, err = walk(dir)
	}
	if err != nil {
		return false, err
	}
	check, err := checker(*verify, *sums)
	if err != nil {
		return false, err
	}
	for pass := range *passes {
		if *list == "" {
			// From the walk's order each time, so that a pass does not depend on the ones before.
			slices.Sort(paths)
			rand.New(rand.NewPCG(*seed, uint64(pass))).Shuffle(len(paths), func(i, j int) { paths[i], paths[j] = paths[j], paths[i] })
		}
		if *drop {
			unix.Sync()
			if err := os.WriteFile("/proc/sys/vm/drop_caches", []byte("3"), 0); err != nil {
				return false, err
			}
		}
		r := &reader{dir: dir, check: check}
		res := r.pass(paths, *threads)
		res.Pass = pass
		if err := json.NewEncoder(os.Stdout).Encode(res); err != nil {
			return false, err
		}
		failed = failed || res.Errors > 0
	}
	return failed, nil
}

func readLines(path string) ([]string, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var lines []string
	s := bufio.NewScanner(f)
	for s.Scan() {
		if s.Text() != "" {
			lines = append(lines, s.Text())
		}
	}
	return lines, s.Err()
}

func walk(dir string) ([]string, error) {
	var paths []string
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() {
			rel, err := filepath.Rel(dir, path)
			paths = append(paths, rel)
			return err
		}
		return err
	})
	return paths, err
}

// checker returns the comparison that was asked for, or nil.
func checker(originals, sums string) (func(string, []byte) error, error) {
	switch {
	case originals != "" && sums != "":
		return nil, errors.New("give -verify or -sums, not both")
	case originals != "":
		return func(path string, data []byte) error {
			want, err := os.ReadFile(filepath.Join(originals, path))
			if err == nil && !bytes.Equal(data, want) {
				err = fmt.Errorf("%s differs from the original", path)
			}
			return err
		}, nil
	case sums == "":
		return nil, nil
	}
	lines, err := readLines(sums)
	if err != nil {
		return nil, err
	}
	want := make(map[string]string, len(lines))
	for _, line := range lines {
		sum, path, ok := strings.Cut(line, " ")
		if !ok || len(sum) != 2*sha256.Size {
			return nil, fmt.Errorf("%s: %q is no line of sha256sum", sums, line)
		}
		want[strings.TrimPrefix(strings.TrimLeft(path, " *"), "./")] = sum
	}
	return func(path string, data []byte) error {
		sum := sha256.Sum256(data)
		if got := hex.EncodeToString(sum[:]); got != want[path] {
			return fmt.Errorf("%s has SHA-256 %s, want %q", path, got, want[path])
		}
		return nil
	}, nil
}

func (r *reader) pass(paths []string, threads int) result {
	var next atomic.Int64
	latencies := make([][]int64, threads)
	var wg sync.WaitGroup
	start := time.Now()
	for t := range threads {
		wg.Go(func() {
			buf := make([]byte, 128<<10)
			for {
				i := next.Add(1) - 1
				if i >= int64(len(paths)) {
					return
				}
				begin := time.Now()
				var n int
				var err error
				buf, n, err = readFile(r.dir+"/"+paths[i], buf)
				latencies[t] = append(latencies[t], time.Since(begin).Microseconds())
				if err == nil && r.check != nil {
					err = r.check(paths[i], buf[:n])
				}
				if err != nil {
					r.fail(err)
					continue
				}
				r.files.Add(1)
				r.bytes.Add(int64(n))
			}
		})
	}
	wg.Wait()
	seconds := time.Since(start).Seconds()
	all := slices.Concat(latencies...)
	slices.Sort(all)
	res := result{Threads: threads, Files: r.files.Load(), Bytes: r.bytes.Load(), Seconds: seconds, Errors: r.errors.Load(),
		FirstErrors: r.shown, Verified: r.check != nil}
	res.FilesPerSec, res.MBPerSec = float64(res.Files)/seconds, float64(res.Bytes)/seconds/1e6
	if n := len(all); n > 0 {
		res.P50Micros, res.P99Micros, res.MaxMicros = all[n/2], all[n*99/100], all[n-1]
	}
	return res
}

func (r *reader) fail(err error) {
	r.errors.Add(1)
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.shown) < shownErrors {
		r.shown = append(r.shown, err.Error())
	}
}

// readFile reads a whole file into buf, which it grows if need be. Raw calls, because os.File costs
// an epoll registration an open, which is not what is measured.
func readFile(path string, buf []byte) ([]byte, int, error) {
	fd, err := retry(func() (int, error) { return unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0) })
	if err != nil {
		return buf, 0, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	defer func() { _ = unix.Close(fd) }()
	n := 0
	for {
		if n == len(buf) {
			buf = append(buf, make([]byte, len(buf))...)
		}
		m, err := retry(func() (int, error) { return unix.Read(fd, buf[n:]) })
		if err != nil {
			return buf, n, &fs.PathError{Op: "read", Path: path, Err: err}
		}
		if m == 0 {
			return buf, n, nil
		}
		n += m
	}
}

func retry(call func() (int, error)) (int, error) {
	for {
		n, err := call()
		if !errors.Is(err, unix.EINTR) {
			return n, err
		}
	}
}
