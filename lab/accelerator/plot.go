package accelerator

import (
	"encoding/xml"
	"fmt"
	"html"
	"io"
	"strings"
	"time"
)

// Over returns the utilisation in each of n equal parts of the epoch's time.
func (e Epoch) Over(n int) []float64 {
	parts := make([]float64, n)
	width, step := e.Seconds/float64(n), e.Compute/float64(max(len(e.Steps), 1))
	for _, s := range e.Steps {
		for from := s.Start; from < s.Start+step; {
			i := min(int(from/width), n-1)
			to := s.Start + step
			if i < n-1 {
				to = min(to, float64(i+1)*width)
			}
			if to <= from { // the part's end is not exact
				to = min(s.Start+step, from+width/1000)
			}
			parts[i] += (to - from) / width
			from = to
		}
	}
	for i := range parts {
		parts[i] = min(parts[i], 1)
	}
	return parts
}

// Measures of a plot, in pixels.
const (
	plotWidth  = 860.0
	panelTop   = 70.0
	panelSpace = 210.0
	panelHigh  = 130.0
	plotLeft   = 60.0
	lineWide   = 480.0
	barsLeft   = 610.0
	barsWide   = 220.0
	plotParts  = 80 // of an epoch's time
)

const plotStyle = "text{font:12px sans-serif;fill:#222}.title{font-size:16px;font-weight:bold}.small{font-size:11px;fill:#666}" +
	".end{text-anchor:end}.line{fill:none;stroke:#1668b8;stroke-width:1.5}.grid{stroke:#ddd}.bar{fill:#d1702a}.ready{fill:#1668b8}"

// plot is SVG text.
type plot struct{ strings.Builder }

// add writes an element, or several.
func (p *plot) add(format string, args ...any) { fmt.Fprintf(p, format+"\n", args...) }

func (p *plot) text(x, y float64, class, format string, args ...any) {
	p.add(`<text x="%.1f" y="%.1f" class="%s">%s</text>`, x, y, class, html.EscapeString(fmt.Sprintf(format, args...)))
}

// Plot writes an SVG image: for each epoch the utilisation over time, and how long its steps waited. notes
// stand under the title.
func Plot(w io.Writer, title, notes string, epochs []Epoch) error {
	var p plot
	high := panelTop + panelSpace*float64(len(epochs))
	p.add(`%s<svg xmlns="http://www.w3.org/2000/svg" width="%[2]g" height="%[3]g" viewBox="0 0 %[2]g %[3]g">`, xml.Header, plotWidth, high)
	p.add(`<style>%s</style><rect width="%g" height="%g" fill="#fff"/>`, plotStyle, plotWidth, high)
	p.text(20, 28, "title", "%s", title)
	p.text(20, 46, "small", "%s", notes)
	for i, e := range epochs {
		top := panelTop + panelSpace*float64(i)
		p.text(plotLeft, top+10, "", "epoch %d: utilisation %.1f%%, first batch after %.2f s", i, 100*e.Utilisation, e.FirstBatch)
		p.line(e, top+20)
		p.text(barsLeft, top+10, "", "steps by how long they waited")
		p.bars(e, top+20)
	}
	p.add(`</svg>`)
	_, err := io.WriteString(w, p.String())
	return err
}

// line draws utilisation over time.
func (p *plot) line(e Epoch, top float64) {
	for _, percent := range []float64{0, 25, 50, 75, 100} {
		y := top + panelHigh*(1-percent/100)
		p.add(`<line x1="%.1f" x2="%.1f" y1="%[3].1f" y2="%[3].1f" class="grid"/>`, plotLeft, plotLeft+lineWide, y)
		p.text(plotLeft-6, y+4, "small end", "%g%%", percent)
	}
	points := ""
	for i, u := range e.Over(plotParts) {
		points += fmt.Sprintf("%.1f,%.1f ", plotLeft+lineWide*(float64(i)+0.5)/plotParts, top+panelHigh*(1-u))
	}
	p.add(`<polyline points="%s" class="line"/>`, points)
	p.text(plotLeft, top+panelHigh+16, "small", "0 s")
	p.text(plotLeft+lineWide, top+panelHigh+16, "small end", "%.1f s", e.Seconds)
}

// bars draws the stall histogram, a bar for each bucket that is not empty.
func (p *plot) bars(e Epoch, top float64) {
	buckets := e.Stalls.Buckets()
	var most int64 = 1
	for _, b := range buckets {
		most = max(most, b.Count)
	}
	row := min(18, panelHigh/float64(max(len(buckets), 1)))
	for i, b := range buckets {
		y, class, label := top+row*float64(i), "bar", "to "+short(b.UpTo)
		if b.UpTo == 0 {
			class, label = "ready", "none"
		}
		wide := (barsWide - 40) * float64(b.Count) / float64(most)
		p.text(barsLeft-6, y+row*0.75, "small end", "%s", label)
		p.add(`<rect x="%.1f" y="%.1f" width="%.1f" height="%.1f" class="%s"/>`, barsLeft, y, max(wide, 1), row*0.8, class)
		p.text(barsLeft+wide+6, y+row*0.75, "small", "%d", b.Count)
	}
}

// short writes a duration in two digits.
func short(seconds float64) string {
	d := time.Duration(seconds * float64(time.Second))
	for unit := time.Microsecond; unit < time.Hour; unit *= 10 {
		if d < 100*unit {
			return d.Round(unit).String()
		}
	}
	return d.String()
}
