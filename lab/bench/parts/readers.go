// Package parts are the programs that benchmarks run beside Shoal, each a verb of lab/bench in a process of its own.
package parts

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/lab/bench/kit"
)

const shownErrors = 5

// reader is one pass over the files of dir.
type reader struct {
	dir, originals string // originals are compared with, unless ""
	files          atomic.Int64
	mu             sync.Mutex
	failed         int
	errs           []error // the first of them
}

// Readers reads files once with several threads, as a DataLoader's workers do, and prints what it took as a line of JSON.
//
//	readers [-threads 8] [-verify DIR] DIR
//	readers -list FILE DIR          only these paths below DIR, in this order
//
// Without -list the folder is walked beforehand, which is not timed, and the paths are shuffled. Each thread takes the next
// path; a file is opened, read to its end in one call if possible, and closed.
func Readers(args []string) error {
	flags := flag.NewFlagSet("readers", flag.ContinueOnError)
	threads := flags.Int("threads", 8, "readers at a time")
	list := flags.String("list", "", "file of paths below DIR, one a line, read in this order")
	verify := flags.String("verify", "", "folder of originals to compare with")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() != 1 || *threads < 1 {
		return errors.New("give one folder; -threads must be at least 1")
	}
	var paths []string
	var err error
	if *list != "" {
		var text []byte
		text, err = os.ReadFile(*list)
		paths = strings.Split(strings.TrimSpace(string(text)), "\n")
	} else {
		paths, err = kit.Walk(flags.Arg(0))
		rand.New(rand.NewPCG(1, 0)).Shuffle(len(paths), func(i, j int) { paths[i], paths[j] = paths[j], paths[i] })
	}
	if err != nil {
		return err
	}
	r := &reader{dir: flags.Arg(0), originals: *verify}
	result, err := r.pass(paths, *threads)
	return errors.Join(err, json.NewEncoder(os.Stdout).Encode(result))
}

// pass reads every path once. The error says what could not be read, or differs from the original.
func (r *reader) pass(paths []string, threads int) (kit.Read, error) {
	var next atomic.Int64
	var wg sync.WaitGroup
	start := time.Now()
	for range threads {
		wg.Go(func() {
			buf := make([]byte, 128<<10)
			for i := next.Add(1) - 1; i < int64(len(paths)); i = next.Add(1) - 1 {
				var n int
				var err error
				if buf, n, err = readFile(r.dir+"/"+paths[i], buf); err == nil && r.originals != "" {
					err = r.compare(paths[i], buf[:n])
				}
				if err != nil {
					r.fail(err)
					continue
				}
				r.files.Add(1)
			}
		})
	}
	wg.Wait()
	files := r.files.Load()
	res := kit.Read{Files: int(files), Rate: float64(files) / time.Since(start).Seconds()}
	if r.failed > 0 {
		return res, fmt.Errorf("%d files could not be read or differ: %w", r.failed, errors.Join(r.errs...))
	}
	return res, nil
}

func (r *reader) compare(path string, data []byte) error {
	want, err := os.ReadFile(filepath.Join(r.originals, path))
	if err == nil && !bytes.Equal(data, want) {
		err = fmt.Errorf("%s differs from the original", path)
	}
	return err
}

func (r *reader) fail(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.failed++; r.failed <= shownErrors {
		r.errs = append(r.errs, err)
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
