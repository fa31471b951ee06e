// Command bench runs one of the benchmarks: go run ./lab/bench NAME [flags], from the repository's root as root. README.md
// says what each measures; -help lists its flags.
package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"

	"github.com/shoalfs/shoal/lab/bench/kit"
	"github.com/shoalfs/shoal/lab/bench/pairs"
	"github.com/shoalfs/shoal/lab/bench/parts"
	"github.com/shoalfs/shoal/lab/bench/soak"
	"github.com/shoalfs/shoal/lab/rig/proxy"
)

const (
	work    = ".bench"
	results = "lab/bench/results"
)

var benchmarks = []struct {
	name, what string
	dir, out   string // the defaults of -dir and -out
	bench      kit.Bench
}{
	{"pairs", "two binaries, pair by pair", work, results, pairs.Bench},
	{"soak", "one daemon for as long as it is told", work, work, soak.Bench},
}

// verbs are what benchmarks run beside Shoal.
var verbs = map[string]func(args []string) error{
	"readers": parts.Readers, "s3proxy": proxy.Main,
}

func main() {
	if len(os.Args) < 2 {
		usage()
	}
	name, args := os.Args[1], os.Args[2:]
	run := verbs[name]
	for _, b := range benchmarks {
		if b.name == name {
			run = func(args []string) error {
				return kit.Run(flag.NewFlagSet(name, flag.ContinueOnError), b.dir, filepath.Join(b.out, name+".md"), b.bench, args)
			}
		}
	}
	if run == nil {
		usage()
	}
	switch err := run(args); {
	case errors.Is(err, flag.ErrHelp):
	case err != nil:
		fmt.Fprintf(os.Stderr, "%s: %v\n", name, err)
		os.Exit(1)
	}
}

func usage() {
	fmt.Fprintln(os.Stderr, "go run ./lab/bench NAME [flags], from the repository's root as root")
	for _, b := range benchmarks {
		fmt.Fprintf(os.Stderr, "  %-10s %s\n", b.name, b.what)
	}
	os.Exit(2)
}
