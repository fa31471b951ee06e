package doctor

import (
	"fmt"
	"io"
	"strings"

	"github.com/shoalfs/shoal/internal/human"
)

// textWidth is the width of the lines, except for longer words.
const textWidth = 133

// Print writes a report for people: areas, checks, and below each its meaning and remedy.
func (r Report) Print(w io.Writer) error {
	var b strings.Builder
	block := func(first, rest, text string) {
		for _, line := range human.Fold(text, textWidth-len(rest)) {
			b.WriteString(first + line + "\n")
			first = rest
		}
	}
	area := ""
	for _, c := range r.Results {
		if c.Area != area {
			if area != "" {
				b.WriteString("\n")
			}
			area = c.Area
			b.WriteString(area + "\n")
		}
		what := c.Measured
		if what == "" {
			what, c.Meaning = c.Meaning, ""
		}
		indent := strings.Repeat(" ", 23)
		block(fmt.Sprintf("  %-7s %-12s ", c.Status, c.Check), indent, what)
		block(indent, indent, c.Meaning)
		block(indent+"-> ", indent+"   ", c.Remedy)
	}
	fmt.Fprintf(&b, "\n%d ok, %d warnings, %d failed, %d skipped; %.1f s\n", r.OK, r.Warn, r.Fail, r.Skipped, r.Seconds)
	_, err := io.WriteString(w, b.String())
	return err
}
