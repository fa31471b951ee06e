package top

import (
	"fmt"
	"math"
	"strings"
	"time"
	"unicode"

	"charm.land/lipgloss/v2"
	"github.com/charmbracelet/x/ansi"
)

// styles are the colours of a frame. They are the terminal's own 16, so that its theme applies.
type styles struct {
	good, warn, bad, idle, bold, dim, head, chosen lipgloss.Style
	area                                           [4]lipgloss.Style // keep, ring, joined, missed
}

func newStyles() styles {
	color := func(c string) lipgloss.Style { return lipgloss.NewStyle().Foreground(lipgloss.Color(c)) }
	bold := lipgloss.NewStyle().Bold(true)
	return styles{
		good: color("2").Bold(true), warn: color("3").Bold(true), bad: color("1").Bold(true), idle: color("4").Bold(true),
		bold: bold, dim: color("8"), head: bold.Underline(true), chosen: lipgloss.NewStyle().Reverse(true),
		area: [4]lipgloss.Style{color("4"), color("6"), color("3"), color("1")},
	}
}

// fit cuts a line to the width, and pads it with spaces.
func fit(line string, width int) string {
	line = ansi.Truncate(line, width, "…")
	if n := width - ansi.StringWidth(line); n > 0 {
		line += strings.Repeat(" ", n)
	}
	return line
}

// wrap breaks a text between words into at most this many lines of the width.
func wrap(text string, width, lines int) (out []string) {
	line := ""
	for _, word := range strings.Fields(text) {
		switch {
		case line == "":
			line = word
		case ansi.StringWidth(line)+1+ansi.StringWidth(word) <= width || len(out) == lines-1:
			line += " " + word
		default:
			out, line = append(out, line), word
		}
	}
	if line != "" {
		out = append(out, ansi.Truncate(line, width, "…"))
	}
	return out
}

// clean makes a text from the daemon (a key may contain anything) safe for a terminal: no control characters, no marks
// that change the direction of writing.
func clean(text string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r < ' ':
			return r + 0x2400 // their symbols
		case r == unicode.ReplacementChar, unicode.IsControl(r), unicode.Is(unicode.Cf, r), unicode.Is(unicode.Zl, r), unicode.Is(unicode.Zp, r):
			return '\u00b7'
		}
		return r
	}, text)
}

var blocks = []rune("▁▂▃▄▅▆▇█")

// spark draws the last values as bars, the latest on the right; top is the smallest end of its axis.
func spark(values []float64, width int, top float64) string {
	if len(values) > width {
		values = values[len(values)-width:]
	}
	for _, v := range values {
		top = math.Max(top, v)
	}
	var b strings.Builder
	b.WriteString(strings.Repeat(" ", max(0, width-len(values))))
	for _, v := range values {
		switch i := int(v / top * float64(len(blocks)-1)); {
		case top <= 0 || v <= 0:
			b.WriteRune('▁')
		default:
			b.WriteRune(blocks[min(max(i, 0), len(blocks)-1)])
		}
	}
	return b.String()
}

// gauge draws a share as a bar.
func gauge(part float64, width int) string {
	n := int(math.Round(math.Min(1, math.Max(0, part)) * float64(width)))
	return strings.Repeat("█", n) + strings.Repeat("░", width-n)
}

// shares draws shares side by side, each by its letter if there is no colour.
func (st *styles) shares(parts [4]float64, width int) string {
	const fills = "█▓▒░"
	var b strings.Builder
	at, sum := 0, 0.0
	for i, p := range parts {
		sum += p
		end := int(math.Round(math.Min(1, sum) * float64(width)))
		fill := string([]rune(fills)[i])
		b.WriteString(st.area[i].Render(strings.Repeat(fill, max(0, end-at))))
		at = max(at, end)
	}
	b.WriteString(strings.Repeat("·", width-at))
	return b.String()
}

// column is a column of a table.
type column struct {
	name  string
	width int  // least
	right bool // aligned
	grow  bool // takes the remaining width
}

// table lays out cells in columns; columns that do not fit are dropped from the right.
func (st *styles) table(columns []column, rows [][]string, width int) []string {
	n, used := 0, 0
	widths := make([]int, len(columns))
	for i, c := range columns {
		widths[i] = max(c.width, ansi.StringWidth(c.name))
		if !c.grow {
			for _, row := range rows {
				widths[i] = max(widths[i], ansi.StringWidth(row[i]))
			}
		}
		if used+widths[i] > width && i > 0 {
			break
		}
		used += widths[i] + 2
		n++
	}
	if left := width - (used - 2); left > 0 {
		for i, c := range columns[:n] {
			if c.grow {
				widths[i] += left
			}
		}
	}
	line := func(cells []string, style func(string) string) string {
		parts := make([]string, n)
		for i := range n {
			text := ansi.Truncate(cells[i], widths[i], "…")
			pad := strings.Repeat(" ", max(0, widths[i]-ansi.StringWidth(text)))
			if columns[i].right {
				parts[i] = pad + style(text)
			} else {
				parts[i] = style(text) + pad
			}
		}
		return strings.TrimRight(strings.Join(parts, "  "), " ")
	}
	var names []string
	for _, c := range columns {
		names = append(names, c.name)
	}
	out := []string{line(names, func(s string) string { return st.dim.Render(s) })}
	for _, row := range rows {
		out = append(out, line(row, func(s string) string { return s }))
	}
	return out
}

func span(seconds float64) string {
	switch d := time.Duration(seconds * float64(time.Second)); {
	case d < time.Second:
		return fmt.Sprintf("%.0f ms", seconds*1e3)
	case d < 10*time.Second:
		return fmt.Sprintf("%.1f s", seconds)
	case d < time.Minute:
		return fmt.Sprintf("%.0f s", seconds)
	case d < time.Hour:
		return fmt.Sprintf("%d min %d s", int(d.Minutes()), int(d.Seconds())%60)
	case d < 24*time.Hour:
		return fmt.Sprintf("%d h %d min", int(d.Hours()), int(d.Minutes())%60)
	default:
		return fmt.Sprintf("%d d %d h", int(d.Hours())/24, int(d.Hours())%24)
	}
}
