package accelerator

import (
	"encoding/xml"
	"fmt"
	"io"
	"strconv"
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

// node is an SVG element.
type node struct {
	XMLName xml.Name
	Attrs   []xml.Attr `xml:",any,attr"`
	Text    string     `xml:",chardata"`
	Nodes   []node     `xml:",any"`
}

// element makes a node; attributes are pairs of a name and a value.
func element(name string, attributes ...any) node {
	n := node{XMLName: xml.Name{Local: name}}
	for i := 0; i+1 < len(attributes); i += 2 {
		v := fmt.Sprint(attributes[i+1])
		if f, ok := attributes[i+1].(float64); ok {
			v = strconv.FormatFloat(f, 'f', 1, 64)
		}
		n.Attrs = append(n.Attrs, xml.Attr{Name: xml.Name{Local: fmt.Sprint(attributes[i])}, Value: v})
	}
	return n
}

func (n *node) add(children ...node) { n.Nodes = append(n.Nodes, children...) }

func text(x, y float64, class, format string, args ...any) node {
	n := element("text", "x", x, "y", y, "class", class)
	n.Text = fmt.Sprintf(format, args...)
	return n
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

// Plot writes an SVG image: for each epoch the utilisation over time, and how long its steps waited. notes
// stand under the title.
func Plot(w io.Writer, title, notes string, epochs []Epoch) error {
	high := panelTop + panelSpace*float64(len(epochs))
	svg := element("svg", "xmlns", "http://www.w3.org/2000/svg", "width", plotWidth, "height", high, "viewBox", fmt.Sprintf("0 0 %g %g", plotWidth, high))
	style := element("style")
	style.Text = plotStyle
	svg.add(style, element("rect", "width", plotWidth, "height", high, "fill", "#fff"), text(20, 28, "title", "%s", title), text(20, 46, "small", "%s", notes))
	for i, e := range epochs {
		top := panelTop + panelSpace*float64(i)
		svg.add(text(plotLeft, top+10, "", "epoch %d: utilisation %.1f%%, first batch after %.2f s", i, 100*e.Utilisation, e.FirstBatch))
		svg.add(linePanel(e, top+20)...)
		svg.add(text(barsLeft, top+10, "", "steps by how long they waited"))
		svg.add(barPanel(e, top+20)...)
	}
	if _, err := io.WriteString(w, xml.Header); err != nil {
		return err
	}
	return xml.NewEncoder(w).Encode(svg)
}

// linePanel draws utilisation over time.
func linePanel(e Epoch, top float64) (nodes []node) {
	for _, percent := range []float64{0, 25, 50, 75, 100} {
		y := top + panelHigh*(1-percent/100)
		nodes = append(nodes, element("line", "x1", plotLeft, "x2", plotLeft+lineWide, "y1", y, "y2", y, "class", "grid"),
			text(plotLeft-6, y+4, "small end", "%g%%", percent))
	}
	points := ""
	for i, u := range e.Over(plotParts) {
		points += fmt.Sprintf("%.1f,%.1f ", plotLeft+lineWide*(float64(i)+0.5)/plotParts, top+panelHigh*(1-u))
	}
	return append(nodes, element("polyline", "points", points, "class", "line"),
		text(plotLeft, top+panelHigh+16, "small", "0 s"), text(plotLeft+lineWide, top+panelHigh+16, "small end", "%.1f s", e.Seconds))
}

// barPanel draws the stall histogram, a bar for each bucket that is not empty.
func barPanel(e Epoch, top float64) (nodes []node) {
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
		nodes = append(nodes, text(barsLeft-6, y+row*0.75, "small end", "%s", label),
			element("rect", "x", barsLeft, "y", y, "width", max(wide, 1), "height", row*0.8, "class", class),
			text(barsLeft+wide+6, y+row*0.75, "small", "%d", b.Count))
	}
	return nodes
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
