package demo

import (
	"embed"
	"encoding/base64"
	"errors"
	"fmt"
	"html/template"
	"io"
	"io/fs"
	"math"
	"os"
	"runtime"
	"strings"
	"text/tabwriter"
	"time"

	humanize "github.com/dustin/go-humanize"
)

//go:embed *.tmpl
var templates embed.FS

// report is what all runs together show.
type report struct {
	Options
	Results []*Result
	Classes int
	Cores   int
	Dropped bool
	Began   time.Time
	Took    time.Duration
	Sheet   template.URL // data URI of the contact sheet; empty if there is none
}

// print writes the table.
func (r *report) print(w io.Writer) {
	fmt.Fprintf(w, "\n%s real photographs, S3 at %v median latency, %d cores, batch %d, DataLoader workers %d\n\n",
		humanize.Comma(int64(r.Photos)), r.Latency, r.Cores, r.Batch, r.Workers)
	tw := tabwriter.NewWriter(w, 0, 0, 3, ' ', tabwriter.AlignRight)
	fmt.Fprintln(tw, "\twaiting\tGETs\tfrom the store\tsamples/s\tseconds\t") // first what a busy machine changes least
	for _, s := range r.Results {
		fmt.Fprintf(tw, "%-26s\t%.0f%%\t%s\t%s\t%.0f\t%.1f\t\n", s.Title, 100*s.WaitShare(),
			humanize.Comma(s.StoreGets), humanize.Bytes(uint64(s.StoreGetBytes)), s.Rate(), s.Seconds)
	}
	_ = tw.Flush()
	fmt.Fprintln(w)
	for _, s := range r.Results {
		fmt.Fprintf(w, "%-26s  %s\n", s.Title, s.Bound) // 26: the longest title
	}
	for _, n := range r.Notes() {
		fmt.Fprintf(w, "\nnote: %s", n)
	}
	if len(r.Notes()) > 0 {
		fmt.Fprintln(w)
	}
}

// Notes are what a reader must know to judge the figures.
func (r *report) Notes() []string {
	var notes []string
	for _, s := range r.Results {
		if off := math.Abs(float64(s.Gets - s.StoreGets)); off > 0.01*float64(max(s.StoreGets, 100)) {
			notes = append(notes, fmt.Sprintf("%s: Shoal counts %s GETs and %s, the store saw %s and %s", s.Title,
				humanize.Comma(s.Gets), humanize.Bytes(uint64(s.GetBytes)), humanize.Comma(s.StoreGets), humanize.Bytes(uint64(s.StoreGetBytes))))
		}
		if share := s.OtherCPU / (s.Seconds * float64(r.Cores)); share > 0.1 {
			notes = append(notes, fmt.Sprintf("%s: other processes took %.0f%% of the cores meanwhile", s.Title, 100*share))
		}
	}
	if len(r.Results) > 2 {
		if cold, warm := r.Results[1], r.Results[2]; warm.Rate() < 1.05*cold.Rate() {
			notes = append(notes, fmt.Sprintf("the warm pass is no faster than the cold one, since the trainer's own work takes as long in both: compare the waiting (%.0f%%, then %.0f%%) and the GETs (%s, then %s)",
				100*cold.WaitShare(), 100*warm.WaitShare(), humanize.Comma(cold.StoreGets), humanize.Comma(warm.StoreGets)))
		}
	}
	if !r.Dropped {
		notes = append(notes, "the kernel's caches could not be dropped between the runs (that takes root): the warm runs may have read from memory")
	}
	return notes
}

// explain says what bounds a run, from what was measured.
func (j *job) explain(r *Result, s scenario) string {
	cores := float64(runtime.NumCPU())
	busy := (r.TrainerCPU + r.ShoalCPU + r.StoreCPU) / (r.Seconds * cores)
	per := func(cpu float64) string { return fmt.Sprintf("%.1f", 1e3*cpu/float64(r.Samples)) }
	split := fmt.Sprintf("CPU a sample: trainer %s ms, shoal %s ms, S3 server and proxy %s ms", per(r.TrainerCPU), per(r.ShoalCPU), per(r.StoreCPU))
	switch {
	case r.WaitShare() < 0.1:
		return fmt.Sprintf("bound by the model itself, which computes %.0f%% of the time (%s)", 100*(1-r.WaitShare()), split)
	case busy > 0.8:
		what := "PIL decoding in the workers"
		if s.feed {
			what = "decoding and the model"
		}
		return fmt.Sprintf("bound by CPU, most of it %s: %.0f%% of %.0f cores busy (%s)", what, 100*busy, cores, split)
	case busy+r.OtherCPU/(r.Seconds*cores) > 0.9:
		return fmt.Sprintf("bound by CPU: all of %.0f cores are busy, %.0f%% with what is not part of the demo (%s)",
			cores, 100*r.OtherCPU/(r.Seconds*cores), split)
	case s.order == "none":
		limit := float64(max(j.Workers, 1)) / (j.Latency.Seconds() * math.Exp(j.Sigma*j.Sigma/2))
		return fmt.Sprintf("bound by latency: %d workers that wait for one GET each cannot pass %.0f samples/s (%s)", max(j.Workers, 1), limit, split)
	default:
		return fmt.Sprintf("bound by waiting: only %.0f%% of %.0f cores busy (%s)", 100*busy, cores, split)
	}
}

// write makes the HTML report, with the contact sheet inside.
func (r *report) write(path, sheet string) error {
	b, err := os.ReadFile(sheet)
	switch {
	case err == nil:
		r.Sheet = template.URL("data:image/png;base64," + base64.StdEncoding.EncodeToString(b)) //nolint:gosec // our own file
	case !errors.Is(err, fs.ErrNotExist):
		return err
	}
	return render(path, "report.html.tmpl", r)
}

// render writes a page.
func render(path, name string, data any) error {
	t, err := template.New(name).Funcs(template.FuncMap{
		"comma":   func(n int64) string { return humanize.Comma(n) },
		"bytes":   func(n int64) string { return humanize.Bytes(uint64(max(n, 0))) },
		"percent": func(f float64) string { return fmt.Sprintf("%.0f%%", 100*f) },
		"fixed":   func(digits int, f float64) string { return fmt.Sprintf("%.*f", digits, f) },
		"lossOf": func(s *Result) string {
			first, last := s.Learned()
			return fmt.Sprintf("%.2f → %.2f", first, last)
		},
		"int64": func(n int) int64 { return int64(n) },
	}).ParseFS(templates, "*.tmpl")
	if err != nil {
		return err
	}
	var out strings.Builder
	if err := t.Execute(&out, data); err != nil {
		return err
	}
	return os.WriteFile(path, []byte(out.String()), 0o644)
}

// Geometry of the charts, in SVG units. ChartLeft leaves room for the labels of the y axis.
const (
	chartWidth  = 900
	chartLeft   = 46
	chartHeight = 220
	stripHeight = 44
	binWidth    = 3
)

// longest is the longest run in seconds: all charts have one time scale, so that lengths compare.
func (r *report) longest() float64 {
	var m float64
	for _, s := range r.Results {
		m = max(m, s.Seconds)
	}
	return m
}

func (r *report) x(t float64) float64 {
	return chartLeft + t/r.longest()*(chartWidth-chartLeft-8)
}

// Tick is a mark on an axis.
type Tick struct {
	At   float64
	Text string
}

// TimeTicks are the marks of the time axis.
func (r *report) TimeTicks() []Tick {
	var ticks []Tick
	for i, step := 0.0, niceStep(r.longest()/7); i*step <= r.longest(); i++ {
		ticks = append(ticks, Tick{r.x(i * step), fmt.Sprintf("%g s", i*step)})
	}
	return ticks
}

// SampleTicks are the marks of the axis of samples.
func (r *report) SampleTicks() []Tick {
	var ticks []Tick
	step := int(max(niceStep(float64(r.mostSamples())/4), 1))
	for n := 0; n <= r.mostSamples(); n += step {
		ticks = append(ticks, Tick{r.y(n), humanize.Comma(int64(n))})
	}
	return ticks
}

// niceStep returns the smallest of 1, 2, 5, 10, ... that is at least v.
func niceStep(v float64) float64 {
	p := math.Pow(10, math.Floor(math.Log10(v)))
	for _, m := range []float64{1, 2, 5} {
		if m*p >= v {
			return m * p
		}
	}
	return 10 * p
}

func (r *report) mostSamples() int {
	n := 1
	for _, s := range r.Results {
		n = max(n, s.Samples)
	}
	return n
}

func (r *report) y(samples int) float64 {
	return 10 + (1-float64(samples)/float64(r.mostSamples()))*(chartHeight-20)
}

// Line is the course of one run: samples trained over time.
type Line struct {
	Class  int // of colour, from 1
	Title  string
	Points string
}

// Lines are the courses of all runs.
func (r *report) Lines() []Line {
	var lines []Line
	for i, s := range r.Results {
		var b strings.Builder
		fmt.Fprintf(&b, "%.1f,%.1f", r.x(0), r.y(0))
		done := 0
		for _, st := range s.Steps {
			done += st.Samples
			fmt.Fprintf(&b, " %.1f,%.1f", r.x(st.T+st.Compute), r.y(done))
		}
		lines = append(lines, Line{i + 1, s.Title, b.String()})
	}
	return lines
}

// Strip is one run's timeline: for each slice of time the share that was spent waiting.
type Strip struct {
	Result *Result
	End    float64 // x of the run's end
	Width  float64 // of the whole run
	Stalls string  // SVG path of the waiting
}

// Strips are the timelines of all runs, on one time scale.
func (r *report) Strips() []Strip {
	var strips []Strip
	for _, s := range r.Results {
		bins := waitBins(s, r.longest()/float64((chartWidth-chartLeft-8)/binWidth))
		var b strings.Builder
		for i, share := range bins {
			if share > 0.005 {
				fmt.Fprintf(&b, "M%d %dv-%.1fh%dv%.1fz", chartLeft+i*binWidth, stripHeight, share*stripHeight, binWidth, share*stripHeight)
			}
		}
		strips = append(strips, Strip{s, r.x(s.Seconds), r.x(s.Seconds) - chartLeft, b.String()})
	}
	return strips
}

// waitBins returns for each slice of width seconds the share of it that the run waited.
func waitBins(r *Result, width float64) []float64 {
	bins := make([]float64, int(math.Ceil(r.Seconds/width)))
	for _, st := range r.Steps {
		from := st.T - st.Wait
		for i := max(int(from/width), 0); i < len(bins) && float64(i)*width < st.T; i++ {
			overlap := min(st.T, float64(i+1)*width) - max(from, float64(i)*width)
			bins[i] = min(bins[i]+max(overlap, 0)/width, 1)
		}
	}
	return bins
}

// ChartWidth and the following give the geometry to the template.
func (r *report) ChartWidth() int  { return chartWidth }
func (r *report) ChartHeight() int { return chartHeight }
func (r *report) ChartLeft() int   { return chartLeft }
func (r *report) StripHeight() int { return stripHeight }
