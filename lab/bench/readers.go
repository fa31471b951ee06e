package main

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"strings"
	"sync/atomic"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

// threads read at a time, as a DataLoader's workers do.
const threads = 8

// readers reads the files of a list (paths below a folder, one a line) in this order, and prints how many. Each thread takes the next path; a
// file is opened, read to its end in one call if possible, and closed.
func readers(args []string) error {
	if len(args) != 2 {
		return errors.New("readers: give LIST DIR")
	}
	text, err := os.ReadFile(args[0])
	if err != nil {
		return err
	}
	paths := strings.Split(strings.TrimSpace(string(text)), "\n")
	var next atomic.Int64
	var g errgroup.Group
	for range threads {
		g.Go(func() (err error) {
			buf := make([]byte, 128<<10)
			for i := next.Add(1) - 1; i < int64(len(paths)) && err == nil; i = next.Add(1) - 1 {
				buf, err = readFile(args[1]+"/"+paths[i], buf)
			}
			return err
		})
	}
	return errors.Join(g.Wait(), json.NewEncoder(os.Stdout).Encode(len(paths)))
}

// readFile reads a whole file into buf, which it grows if need be. Raw calls, because os.File costs
// an epoll registration an open, which is not what is measured.
func readFile(path string, buf []byte) ([]byte, error) {
	fd, err := retry(func() (int, error) { return unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0) })
	if err != nil {
		return buf, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	defer func() { _ = unix.Close(fd) }()
	n := 0
	for {
		if n == len(buf) {
			buf = append(buf, make([]byte, len(buf))...)
		}
		m, err := retry(func() (int, error) { return unix.Read(fd, buf[n:]) })
		if err != nil {
			return buf, &fs.PathError{Op: "read", Path: path, Err: err}
		}
		if m == 0 {
			return buf, nil
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
