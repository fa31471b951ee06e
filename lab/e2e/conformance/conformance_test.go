// Package conformance runs Shoal against S3 servers of other makers, each as its makers ship it: every byte of a mount,
// a pack, a refresh, what changes under a mount, versions, and objects without ETags. It prints a table;
// docs/SEMANTICS.md has the last one.
//
// `make conformance` fetches the servers and runs it.
package conformance

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"text/tabwriter"
	"time"
)

// errNotOffered says that a store does not have something, so that there is nothing to check.
var errNotOffered = errors.New("not offered")

// TestStores starts each store and runs all checks, each in a bucket of its own. With -artifacts the logs of daemons
// and servers stay.
func TestStores(t *testing.T) {
	tools := os.Getenv("SHOAL_CONFORMANCE")
	if tools == "" {
		t.Skip("SHOAL_CONFORMANCE is not set to the folder of the servers, which make conformance fills")
	}
	shoal, err := filepath.Abs("../../../bin/shoal")
	if err != nil {
		t.Fatal(err)
	}
	cells := []string{"store"}
	for _, c := range checks {
		cells = append(cells, c.name)
	}
	rows, notes := [][]string{cells}, []string(nil)
	for _, s := range stores(tools) {
		row := []string{s.name + " " + s.version}
		t.Run(s.name, func(t *testing.T) {
			dir := t.ArtifactDir()
			server, err := s.start(t.Context(), dir)
			if err != nil {
				row, notes = append(row, "not started"), append(notes, fmt.Sprintf("%s: %v", s.name, err))
				t.Fatal(err)
			}
			defer server.stop()
			for _, c := range checks {
				outcome := "FAILED"
				t.Run(c.name, func(t *testing.T) {
					note, err := c.run(server.bed(t, shoal, dir, c.name))
					if err != nil {
						note = err.Error()
					}
					if note != "" {
						notes = append(notes, fmt.Sprintf("%s, %s: %s", s.name, c.name, note))
					}
					switch {
					case errors.Is(err, errNotOffered):
						outcome = "not offered"
						t.Skip(err)
					case err != nil:
						t.Fatal(err)
					}
					outcome = "ok"
				})
				row = append(row, outcome)
			}
		})
		rows = append(rows, row)
	}
	w := tabwriter.NewWriter(t.Output(), 0, 0, 1, ' ', tabwriter.Debug)
	fmt.Fprintln(w, time.Now().UTC().Format(time.DateOnly))
	for _, row := range rows {
		fmt.Fprintln(w, strings.Join(row, "\t "))
	}
	for _, n := range notes {
		fmt.Fprintln(w, "- "+n)
	}
	if err := w.Flush(); err != nil {
		t.Error(err)
	}
}
