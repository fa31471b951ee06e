package doctor

import (
	"fmt"
	"io"
	"strings"
)

// textWidth is what meanings and remedies are folded at.
const textWidth = 110

// Print writes a report for people: areas, checks, and below each what it means and what to change.
func (r Report) Print(w io.Writer) error {
	p := printer{w: w}
	area := ""
	for _, c := range r.Results {
		if c.Area != area {
			if area != "" {
				p.line("")
			}
			area = c.Area
			p.line("%s", area)
		}
		what := c.Measured
		if what == "" {
			what, c.Meaning = c.Meaning, ""
		}
		const head = "  %-7s %-12s "
		indent := strings.Repeat(" ", 23)
		for i, line := range fold(what, textWidth) {
			if i == 0 {
				p.line(head+"%s", c.Status, c.Check, line)
			} else {
				p.line("%s%s", indent, line)
			}
		}
		for _, line := range fold(c.Meaning, textWidth) {
			p.line("%s%s", indent, line)
		}
		for i, line := range fold(c.Remedy, textWidth-3) {
			if i == 0 {
				p.line("%s-> %s", indent, line)
			} else {
				p.line("%s   %s", indent, line)
			}
		}
	}
	p.line("")
	p.line("%d ok, %d to look at, %d failed, %d skipped; %.1f s", r.OK, r.Warn, r.Fail, r.Skipped, r.Seconds)
	return p.err
}

type printer struct {
	w   io.Writer
	err error
}

func (p *printer) line(format string, args ...any) {
	if p.err == nil {
		_, p.err = fmt.Fprintf(p.w, format+"\n", args...)
	}
}

// fold breaks a text between words; a word that is longer stays whole, so that it can be copied.
func fold(text string, width int) (lines []string) {
	line := ""
	for _, word := range strings.Fields(text) {
		if line != "" && len(line)+1+len(word) > width {
			lines = append(lines, line)
			line = ""
		}
		if line != "" {
			line += " "
		}
		line += word
	}
	if line != "" {
		lines = append(lines, line)
	}
	return lines
}
