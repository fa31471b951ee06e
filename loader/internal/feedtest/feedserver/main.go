// Command feedserver serves a small dataset in memory for the tests of the Python client. It prints
// its address when it is ready and ends with its standard input.
package main

import (
	"flag"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/shoalfs/shoal/loader"
	"github.com/shoalfs/shoal/loader/internal/feedtest"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "feedserver:", err)
		os.Exit(1)
	}
}

func run() error {
	samples := flag.Int("samples", 1000, "number of samples")
	bad := flag.String("bad", "", "numbers of samples that the transform refuses, with commas")
	delay := flag.Duration("delay", 0, "time that each read takes")
	listen := flag.String("listen", "tcp://127.0.0.1:0", "address")
	flag.Parse()

	ds := &feedtest.Dataset{Samples: *samples, Bad: map[int]bool{}}
	if *delay > 0 {
		ds.Delay = func(int) time.Duration { return *delay }
	}
	for word := range strings.SplitSeq(*bad, ",") {
		if word == "" {
			continue
		}
		i, err := strconv.Atoi(word)
		if err != nil {
			return err
		}
		ds.Bad[i] = true
	}
	l, err := loader.Listen(*listen, loader.ListenOptions{})
	if err != nil {
		return err
	}
	s := loader.NewServer(func() loader.Dataset { return ds }, loader.Options{Version: "test", Compile: feedtest.Compile})
	scheme, _, _ := strings.Cut(*listen, "://")
	fmt.Printf("%s://%s\n", scheme, l.Addr())
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin) // until the parent closes it, or dies
		s.Close()
	}()
	return s.Serve(l)
}
