// Command conformance runs Shoal against S3 servers of other makers, each as its makers ship it: every byte of
// a mount, a pack, a refresh, what changes under a mount, versions, and objects without ETags. It prints a table
// and exits 1 where one of them fails; docs/SEMANTICS.md has the last one.
//
// `make conformance` fetches the servers and runs it.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"
)

func main() {
	log.SetFlags(0)
	log.SetPrefix("conformance: ")
	shoal := flag.String("shoal", "bin/shoal", "binary to run")
	tools := flag.String("servers", "bin/conformance", "folder of the servers, as make conformance fills it")
	only := flag.String("only", "", "stores to run against, comma-separated (default: all)")
	keep := flag.Bool("keep", false, "keep the work folder, with the daemons' and servers' logs")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	failed, err := run(ctx, *shoal, *tools, *only, *keep)
	stop()
	if err != nil {
		log.Fatal(err)
	}
	if failed {
		os.Exit(1)
	}
}

// outcome is what a check of a store came to.
type outcome struct {
	err  error
	note string // what is worth knowing of one that is ok
}

func (o outcome) String() string {
	switch {
	case errors.Is(o.err, errNotOffered):
		return "not offered"
	case o.err != nil:
		return "FAILED"
	}
	return "ok"
}

// errNotOffered says that a store does not have something, so that there is nothing to check.
var errNotOffered = errors.New("not offered")

// run checks all stores and prints the table; failed says that a check did.
func run(ctx context.Context, shoal, tools, only string, keep bool) (failed bool, err error) {
	if shoal, err = filepath.Abs(shoal); err != nil {
		return false, err
	}
	if tools, err = filepath.Abs(tools); err != nil {
		return false, err
	}
	dir, err := os.MkdirTemp("", "shoal-conformance-")
	if err != nil {
		return false, err
	}
	if keep {
		log.Printf("work folder %s", dir)
	} else {
		defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	}
	cells := []string{"store"}
	for _, c := range checks {
		cells = append(cells, c.name)
	}
	rows, notes := [][]string{cells}, []string(nil)
	for _, s := range stores(tools) {
		if only != "" && !slices.Contains(strings.Split(only, ","), s.name) {
			continue
		}
		row := []string{s.name + " " + s.version}
		results, err := checkStore(ctx, s, shoal, filepath.Join(dir, s.name))
		if err := ctx.Err(); err != nil {
			return false, err
		}
		if err != nil {
			failed, row, notes = true, append(row, "not started"), append(notes, fmt.Sprintf("%s: %v", s.name, err))
		}
		for i, o := range results {
			row = append(row, o.String())
			failed = failed || o.String() == "FAILED"
			if o.err != nil {
				o.note = o.err.Error()
			}
			if o.note != "" {
				notes = append(notes, fmt.Sprintf("%s, %s: %s", s.name, checks[i].name, o.note))
			}
		}
		rows = append(rows, row)
	}
	if len(rows) == 1 {
		return false, fmt.Errorf("-only %s names no store", only)
	}
	fmt.Printf("\n%s\n\n", time.Now().UTC().Format(time.DateOnly))
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 1, ' ', tabwriter.Debug)
	for _, row := range rows {
		fmt.Fprintln(w, strings.Join(row, "\t "))
	}
	if err := w.Flush(); err != nil {
		return false, err
	}
	fmt.Println()
	for _, n := range notes {
		fmt.Println("- " + n)
	}
	return failed, nil
}

// checkStore starts a store and runs all checks, each in a bucket of its own.
func checkStore(ctx context.Context, s store, shoal, dir string) ([]outcome, error) {
	log.Printf("starting %s %s", s.name, s.version)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	server, err := s.start(ctx, dir)
	if err != nil {
		return nil, err
	}
	defer server.stop()
	var results []outcome
	for _, c := range checks {
		start := time.Now()
		b, err := server.bed(ctx, shoal, dir, c.name)
		var note string
		if err == nil {
			note, err = c.run(b)
			err = errors.Join(err, b.close())
		}
		o := outcome{err, note}
		results = append(results, o)
		log.Printf("%s: %s: %s (%.1f s)", s.name, c.name, o, time.Since(start).Seconds())
	}
	return results, nil
}
