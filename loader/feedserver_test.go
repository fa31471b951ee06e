package loader_test

import (
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/shoalfs/shoal/loader"
)

// serveVerb has this binary serve a testDataset, for the tests of the Python client.
const serveVerb = "serve"

// serveFeed serves a testDataset by the options in args. It prints its address when it is ready, and ends with its
// standard input.
func serveFeed(args []string) error {
	flag := flag.NewFlagSet(serveVerb, flag.ContinueOnError)
	samples := flag.Int("samples", 1000, "number of samples")
	bad := flag.String("bad", "", "numbers of samples that the transform refuses, with commas")
	delay := flag.Duration("delay", 0, "time that each read takes")
	listen := flag.String("listen", "tcp://127.0.0.1:0", "address")
	pattern := flag.String("files", "", "files whose contents are the samples, by turns")
	memory := flag.Int64("memory", 0, "bytes that batches may take; 0: any number")
	node := flag.String("node", "", "the server's node in its cluster")
	weight := flag.Uint("weight", 0, "the weight of that node")
	token := flag.String("token", "", "what clients have to present")
	var files loader.TLSFiles
	flag.StringVar(&files.Cert, "tls-cert", "", "the server's certificate, for tls://")
	flag.StringVar(&files.Key, "tls-key", "", "its key")
	flag.StringVar(&files.ClientCA, "tls-client-ca", "", "who signs the certificates that clients have to show")
	if err := flag.Parse(args); err != nil {
		return err
	}

	ds := &testDataset{Samples: *samples, Bad: map[int]bool{}}
	if *delay > 0 {
		ds.Delay = func(int) time.Duration { return *delay }
	}
	if *pattern != "" {
		var err error
		if ds.Bytes, err = samplesIn(*pattern); err != nil {
			return err
		}
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
	var listenOptions loader.ListenOptions
	if files.Cert != "" {
		c, err := loader.ServerTLS(files, slog.Default())
		if err != nil {
			return err
		}
		listenOptions.TLS = c
	}
	tokens, err := loader.NewTokens(*token, "", slog.Default())
	if err != nil {
		return err
	}
	l, err := loader.Listen(*listen, listenOptions)
	if err != nil {
		return err
	}
	s := loader.NewServer(func() loader.Dataset {
		return ds
	}, loader.Options{Version: "test", Compile: compileRamp, Tokens: tokens,
		Memory: &testLedger{Limit: *memory}, Node: func() (string, uint32, bool) {
			return *node, uint32(*weight), *node != ""
		}})
	scheme, _, _ := strings.Cut(*listen, "://")
	fmt.Printf("%s://%s\n", scheme, l.Addr())
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin) // until the parent closes it, or dies
		s.Close()
	}()
	return s.Serve(l)
}

// samplesIn returns the samples of a dataset that is made of files.
func samplesIn(pattern string) (func(i int) []byte, error) {
	names, err := filepath.Glob(pattern)
	if err != nil {
		return nil, err
	}
	if len(names) == 0 {
		return nil, fmt.Errorf("no file is named %s", pattern)
	}
	files := make([][]byte, len(names))
	for i, name := range names {
		if files[i], err = os.ReadFile(name); err != nil {
			return nil, err
		}
	}
	return func(i int) []byte { return files[i%len(files)] }, nil
}
