package top

import (
	"cmp"
	"fmt"
	"strings"

	"charm.land/lipgloss/v2"
	"github.com/charmbracelet/x/ansi"

	"github.com/shoalfs/shoal/internal/admin/verdict"
	"github.com/shoalfs/shoal/internal/human"
)

// frame is the screen at one moment.
type frame struct {
	styles
	series *series
	target string // the daemon, in words
	err    error  // of the last request; nil if it succeeded
	paused bool
	help   bool
	pane   pane
	scroll int  // rows of the pane above the visible ones
	plain  bool // without colours and attributes
}

type pane int

const (
	orders pane = iota
	sessions
	slowest
	failures
	nodes // in a cluster only
	panes
)

var paneNames = [panes]string{"Orders", "Sessions", "Slowest keys", "Errors", "Nodes"}

// render draws the frame. With height 0 it draws all of it.
func (f *frame) render(width, height int) string {
	width = max(width, 20)
	s, v, ok := f.series.last()
	lines := f.title(&s, ok, width)
	if !ok {
		if f.err != nil {
			lines = append(lines, wrap(clean(f.err.Error()), width, 3)...)
		} else {
			lines = append(lines, "Asking "+clean(f.target)+" …")
		}
		return f.finish(lines, width, height)
	}
	tight := height > 0 && height < 16
	lines = append(lines, f.verdict(v, width, tight)...)
	lines = append(lines, f.figures(&s, v.Rates, width, tight)...)
	if f.help {
		return f.finish(append(lines, helpText...), width, height)
	}
	room := height - len(lines) - 1 // a line for the keys
	all := f.all(&s, v, width)
	f.pane = min(f.pane, pane(len(all)-1))
	if height == 0 || room >= total(all) {
		for p, rows := range all {
			lines = append(lines, "", f.heading(pane(p), all))
			lines = append(lines, rows...)
		}
		return f.finish(lines, width, height)
	}
	if room >= 2 {
		lines = append(lines, f.tabs(all, width))
		lines = append(lines, f.window(all[f.pane], room-1)...)
	}
	return f.finish(lines, width, height)
}

// total is the number of lines of all panes with their headings.
func total(all [][]string) (n int) {
	for _, rows := range all {
		n += 2 + len(rows)
	}
	return n
}

// window returns the visible rows of a pane; the first one names the columns and stays.
func (f *frame) window(rows []string, room int) []string {
	if len(rows) <= room || room < 2 {
		return rows[:min(len(rows), room)]
	}
	from := min(f.scroll, len(rows)-room)
	out := append([]string{rows[0]}, rows[1+from:from+room]...)
	if left := len(rows) - from - room; left > 0 && room > 2 {
		out[len(out)-1] = f.dim.Render(fmt.Sprintf("… %d more (↓)", left+1))
	}
	return out
}

func (f *frame) finish(lines []string, width, height int) string {
	if height > 0 {
		lines = lines[:min(len(lines), height-1)]
		for len(lines) < height-1 {
			lines = append(lines, "")
		}
		lines = append(lines, f.footer(width))
	}
	for i := range lines {
		if f.plain {
			lines[i] = ansi.Strip(lines[i])
		}
		lines[i] = strings.TrimRight(ansi.Truncate(lines[i], width, "…"), " ")
	}
	return strings.Join(lines, "\n")
}

func (f *frame) footer(width int) string {
	for _, keys := range []string{
		fmt.Sprintf("q quit  p pause  1-%d, tab, ←→ pane  ↑↓ scroll  ? help", f.panes()),
		"q quit  p pause  tab pane  ? help",
	} {
		if len(keys) <= width {
			return f.dim.Render(keys)
		}
	}
	return f.dim.Render("q quit  ? help")
}

func (f *frame) title(s *verdict.Snapshot, ok bool, width int) []string {
	left := f.bold.Render("shoal top")
	right := ""
	if ok {
		left += "  " + clean(s.Source)
		if width >= 76 {
			left += f.dim.Render(fmt.Sprintf("  %s samples, %s", human.Number(s.Samples), human.Bytes(s.Bytes)))
		}
		right = "up " + span(max(10, s.Uptime))
		if s.Uptime < 10 {
			right = fmt.Sprintf("up %.0f s", s.Uptime)
		}
	}
	switch {
	case f.err != nil:
		right = f.bad.Render("no answer")
	case f.paused:
		right = f.warn.Render("paused")
	}
	gap := width - ansi.StringWidth(left) - ansi.StringWidth(right)
	if gap < 1 {
		return []string{fit(left, width-ansi.StringWidth(right)-1) + " " + right}
	}
	return []string{left + strings.Repeat(" ", gap) + right}
}

// verdict draws the verdict. If the daemon is lost, it says so in its place.
func (f *frame) verdict(v verdict.Verdict, width int, tight bool) []string {
	style, mark := f.level(v.Level)
	if f.err != nil {
		lines := []string{f.bad.Render("✕ The daemon does not answer")}
		return append(lines, indent(wrap(clean(f.err.Error()), width-2, 2))...)
	}
	lines := []string{style.Render(mark + " " + v.Title)}
	if tight {
		if v.Remedy != "" {
			lines = append(lines, indent(wrap("→ "+v.Remedy, width-2, 1))...)
		}
		return lines
	}
	lines = append(lines, indent(wrap(clean(v.Detail), width-2, 2))...)
	if v.Remedy != "" {
		lines = append(lines, indent(wrap("→ "+clean(v.Remedy), width-2, 2))...)
	}
	for _, n := range v.Notes[:min(len(v.Notes), 2)] {
		style, mark := f.level(n.Level)
		lines = append(lines, "  "+style.Render(mark+" "+n.Title)+": "+clean(n.Detail))
	}
	return append(lines, "")
}

func (f *frame) level(l verdict.Level) (lipgloss.Style, string) {
	switch l {
	case verdict.Good:
		return f.good, "●"
	case verdict.Warn:
		return f.warn, "▲"
	case verdict.Bad:
		return f.bad, "■"
	}
	return f.idle, "○"
}

func indent(lines []string) []string {
	for i := range lines {
		lines[i] = "  " + lines[i]
	}
	return lines
}

// figures draws the rates, each with its history if there is room.
func (f *frame) figures(s *verdict.Snapshot, r verdict.Rates, width int, tight bool) []string {
	lead := human.Number(r.Lead) + " samples"
	if r.LeadSeconds > 0 {
		lead += ", " + span(r.LeadSeconds)
	}
	read := ""
	if before := f.series.before(); len(f.series.snaps) > 1 && s.Uptime > before.Uptime {
		read = ", " + human.Bytes(int64(float64(s.ReadBytes-before.ReadBytes)/(s.Uptime-before.Uptime))) + "/s"
	}
	rows := []struct {
		name, value string
		past        []float64
		top         float64
	}{
		{"lead", lead, f.series.of(func(r verdict.Rates) float64 { return float64(r.Lead) }), 0},
		{"delivered", human.Rate(r.Samples) + " samples/s" + read, f.series.of(func(r verdict.Rates) float64 { return r.Samples }), 0},
		{"waits", human.Percent(r.Stall) + " of the time", f.series.of(func(r verdict.Rates) float64 { return r.Stall }), 0.1},
		{"store", human.Bytes(int64(r.Bytes)) + "/s, " + human.Rate(r.Requests) + " requests/s", f.series.of(func(r verdict.Rates) float64 { return r.Bytes }), 0},
	}
	const nameWidth, valueWidth = 10, 32
	var lines []string
	for _, row := range rows {
		line := f.dim.Render(fit(row.name, nameWidth)) + row.value
		if past := width - nameWidth - valueWidth; past >= 10 {
			line = fit(line, nameWidth+valueWidth) + spark(row.past, past, row.top)
		}
		lines = append(lines, line)
	}
	h := r.Hits
	names := []string{"disk " + human.Percent(h.Keep), "memory " + human.Percent(h.Ring), "under way " + human.Percent(h.Joined), "fetched " + human.Percent(h.Missed)}
	for i, n := range names {
		names[i] = f.area[i].Render(string([]rune("█▓▒░")[i])) + " " + n
	}
	served := strings.Join(names, "  ")
	barWidth := width - nameWidth - ansi.StringWidth(served) - 2
	if barWidth >= 8 {
		served = f.shares([4]float64{h.Keep, h.Ring, h.Joined, h.Missed}, min(barWidth, 60)) + "  " + served
	}
	lines = append(lines, f.dim.Render(fit("reads", nameWidth))+served)
	if tight {
		return lines
	}
	m, d := s.Memory, s.Disk
	limit := cmp.Or(d.Limit, d.Budget)
	part := func(a, b int64) float64 { return float64(a) / float64(max(b, 1)) }
	line := func(g int) string {
		return fmt.Sprintf("%s %s of %s   %s%s %s of %s, %s kept", gauge(part(m.Used, m.Limit), g), human.Bytes(m.Used), human.Bytes(m.Limit),
			f.dim.Render("disk "), gauge(part(d.Used, limit), g), human.Bytes(d.Used), human.Bytes(limit), human.Percent(part(int64(d.Kept), int64(d.Extents))))
	}
	text := line(12)
	for _, g := range []int{10, 8, 6, 4} {
		if ansi.StringWidth(text)+nameWidth <= width {
			break
		}
		text = line(g)
	}
	lines = append(lines, f.dim.Render(fit("memory", nameWidth))+text)
	if c := s.Cluster; c != nil {
		lines = append(lines, f.dim.Render(fit("cluster", nameWidth))+fmt.Sprintf("%s, %s; store %s, peers %s, disk %s; owns %s", human.Count(len(c.Nodes), "node"),
			c.State, human.Bytes(s.GetBytes), human.Bytes(c.PeerBytes), human.Bytes(c.DiskBytes), human.Percent(c.Owned)))
	}
	return lines
}

// tabs names the panes, with the chosen one reversed.
func (f *frame) tabs(all [][]string, width int) string {
	var parts []string
	for p := range pane(len(all)) {
		name := fmt.Sprintf(" %d %s ", p+1, f.counted(p, all))
		if p == f.pane {
			name = f.chosen.Render(name)
			if f.plain {
				name = fmt.Sprintf("[%d %s]", p+1, f.counted(p, all))
			}
		}
		parts = append(parts, name)
	}
	if tabs := strings.Join(parts, " "); ansi.StringWidth(tabs) <= width {
		return tabs
	}
	return parts[f.pane] + f.dim.Render(" tab: next")
}

func (f *frame) heading(p pane, all [][]string) string { return f.head.Render(f.counted(p, all)) }

// counted is a pane's name with its number of rows.
func (f *frame) counted(p pane, all [][]string) string {
	if n := len(all[p]) - 1; n > 0 {
		return fmt.Sprintf("%s (%d)", paneNames[p], n)
	}
	return paneNames[p]
}

var helpText = []string{
	"q, Ctrl-C     quit",
	"p, space      pause, resume",
	"1 2 3 4 5     orders, sessions, slowest keys, errors, nodes of a cluster",
	"tab, ← →      next pane, previous pane",
	"↑ ↓ PgUp PgDn scroll the pane",
	"?, Esc        close this help",
	"",
	"lead   samples that can be read without waiting",
	"waits  share of the time that the trainer waited for data",
	"reads  where they were served from: disk and memory do not wait;",
	"       others waited for a fetch in progress, or for a new one",
}
