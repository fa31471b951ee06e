package demo

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	humanize "github.com/dustin/go-humanize"
)

// clusterReport is what all acts together show.
type clusterReport struct {
	Options
	Acts  []*act
	Bytes int64 // of the dataset
	Cores int
	Began time.Time
	Took  time.Duration
}

// print writes the table, and the nodes of the acts with a cluster.
func (r *clusterReport) print(w io.Writer) {
	fmt.Fprintf(w, "\n%s real photographs (%s), %d nodes, S3 at %v median latency, %d cores\n\n",
		humanize.Comma(int64(r.Photos)), humanize.Bytes(uint64(r.Bytes)), clusterNodes, r.Latency, r.Cores)
	tw := tabwriter.NewWriter(w, 0, 0, 3, ' ', tabwriter.AlignRight)
	fmt.Fprintln(tw, "\tfrom the store\tof the dataset\tfrom peers\town caches\tseconds\tas the order says\t")
	for _, a := range r.Acts {
		s := a.Sum()
		fmt.Fprintf(tw, "%-26s\t%s\t%.2f\t%s\t%s\t%.1f\t%d of %d nodes\t\n", a.Title, size(s.Store), float64(s.Store)/float64(r.Bytes),
			size(s.Peers), size(s.Own), a.Seconds, a.Right, a.Alive())
	}
	_ = tw.Flush()
	for _, a := range r.Acts {
		fmt.Fprintf(w, "\n%s\n", a.Title)
		tw := tabwriter.NewWriter(w, 0, 0, 3, ' ', tabwriter.AlignRight)
		fmt.Fprintln(tw, "\tfrom the store\tfrom peers\town cache\tgiven to peers\t")
		for i, o := range a.Rows {
			fmt.Fprintf(tw, "node %d%s\t%s\t%s\t%s\t%s\t\n", i+1, o.Died(), size(o.Store), o.of(o.Peers), o.of(o.Own), o.of(o.Given))
		}
		_ = tw.Flush()
	}
}

func size(n int64) string { return humanize.Bytes(uint64(max(n, 0))) }

// Died says that the node did.
func (o Origin) Died() string {
	if o.Dead {
		return ", killed"
	}
	return ""
}

// of is a figure that a dead node took along.
func (o Origin) of(n int64) string {
	if o.Dead {
		return "?"
	}
	return size(n)
}

// Bar is a node's part of the chart of an act: three lengths, one after the other.
type Bar struct {
	Origin
	Number             int
	Store, Peers, Own  float64
	AtPeers, AtOwn, At float64 // where they begin; y
}

const (
	barHeight = 16
	barGap    = 6
)

// Bars are those of an act. What a node read from the store for others counts with the store.
func (r *clusterReport) Bars(a *act) []Bar {
	most := int64(1)
	for _, each := range r.Acts {
		for _, o := range each.Rows {
			most = max(most, o.Store+o.Peers+o.Own)
		}
	}
	scale := (chartWidth - chartLeft - 8) / float64(most)
	var bars []Bar
	for i, o := range a.Rows {
		b := Bar{Origin: o, Number: i + 1, Store: float64(o.Store) * scale, Peers: float64(o.Peers) * scale, Own: float64(o.Own) * scale, At: float64(i * (barHeight + barGap))}
		b.AtPeers = chartLeft + b.Store
		b.AtOwn = b.AtPeers + b.Peers
		bars = append(bars, b)
	}
	return bars
}

// BarsHeight and the following give the geometry to the template.
func (r *clusterReport) BarsHeight() int  { return clusterNodes * (barHeight + barGap) }
func (r *clusterReport) BarHeight() int   { return barHeight }
func (r *clusterReport) ChartWidth() int  { return chartWidth }
func (r *clusterReport) ChartLeft() int   { return chartLeft }
func (r *clusterReport) ChartHeight() int { return chartHeight }
func (r *clusterReport) Nodes() int       { return clusterNodes }

// Share is a number of bytes as a share of the dataset.
func (r *clusterReport) Share(n int64) float64 { return float64(n) / float64(r.Bytes) }

// longest and most bound the chart over time.
func (r *clusterReport) longest() (seconds float64) {
	for _, a := range r.Acts {
		seconds = max(seconds, a.Seconds)
	}
	return seconds
}

func (r *clusterReport) most() float64 {
	share := 1.0
	for _, a := range r.Acts {
		share = max(share, r.Share(a.Sum().Store))
	}
	return share
}

func (r *clusterReport) x(t float64) float64 {
	return chartLeft + t/r.longest()*(chartWidth-chartLeft-8)
}

func (r *clusterReport) y(share float64) float64 {
	return 10 + (1-share/r.most())*(chartHeight-20)
}

// TimeTicks are the marks of the time axis, ShareTicks those of the other one.
func (r *clusterReport) TimeTicks() []Tick {
	return ticks(r.longest(), niceStep(r.longest()/7), r.x, "%g s")
}

// ShareTicks are the marks of the axis of bytes, as shares of the dataset.
func (r *clusterReport) ShareTicks() []Tick {
	return ticks(r.most(), niceStep(r.most()/4), r.y, "%.1f")
}

func ticks(end, step float64, at func(float64) float64, format string) (ticks []Tick) {
	for i := 0.0; i*step <= end; i++ {
		ticks = append(ticks, Tick{at(i * step), fmt.Sprintf(format, i*step)})
	}
	return ticks
}

// Lines are the courses of all acts: bytes from the store over time.
func (r *clusterReport) Lines() []Line {
	var lines []Line
	for i, a := range r.Acts {
		var b strings.Builder
		fmt.Fprintf(&b, "%.1f,%.1f", r.x(0), r.y(0))
		for k, n := range a.Course {
			fmt.Fprintf(&b, " %.1f,%.1f", r.x(a.Seconds*float64(k+1)/float64(len(a.Course)+1)), r.y(r.Share(n)))
		}
		fmt.Fprintf(&b, " %.1f,%.1f", r.x(a.Seconds), r.y(r.Share(a.Sum().Store)))
		lines = append(lines, Line{i + 1, a.Title, b.String()})
	}
	return lines
}
