package main

import (
	"io"

	"github.com/shoalfs/shoal/internal/cli"
)

// writeReference writes docs/cli-lab.md.
func writeReference(w io.Writer) error {
	if _, err := io.WriteString(w, `# shoal-lab

What Shoal is tried with; `+"`make build`"+` puts it beside bin/shoal, and no package or image contains it. Generated from the help texts by
`+"`make docs`"+`; a test holds it to them.

`); err != nil {
		return err
	}
	return cli.Reference(w, root())
}
