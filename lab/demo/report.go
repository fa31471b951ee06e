package demo

import (
	"fmt"
	"io"
	"math"
	"runtime"
	"text/tabwriter"

	humanize "github.com/dustin/go-humanize"
)

// report is what all runs together show.
type report struct {
	Options
	Results []*Result
	Cores   int
	Dropped bool
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
	for _, n := range r.notes() {
		fmt.Fprintf(w, "\nnote: %s", n)
	}
	if len(r.notes()) > 0 {
		fmt.Fprintln(w)
	}
}

// notes are what a reader must know to judge the figures.
func (r *report) notes() []string {
	var notes []string
	for _, s := range r.Results {
		if off := math.Abs(float64(s.Gets - s.StoreGets)); off > 0.01*float64(max(s.StoreGets, 100)) {
			notes = append(notes, fmt.Sprintf("%s: Shoal counts %s GETs and %s, the store saw %s and %s",
				s.Title, humanize.Comma(s.Gets), humanize.Bytes(uint64(s.GetBytes)), humanize.Comma(s.StoreGets),
				humanize.Bytes(uint64(s.StoreGetBytes))))
		}
		if share := s.OtherCPU / (s.Seconds * float64(r.Cores)); share > 0.1 {
			notes = append(notes, fmt.Sprintf("%s: other processes took %.0f%% of the cores meanwhile",
				s.Title, 100*share))
		}
	}
	if len(r.Results) > 2 {
		if cold, warm := r.Results[1], r.Results[2]; warm.Rate() < 1.05*cold.Rate() {
			notes = append(notes, fmt.Sprintf(
				"the warm pass is no faster than the cold one, since the trainer's own work takes as long in both: "+
					"compare the waiting (%.0f%%, then %.0f%%) and the GETs (%s, then %s)",
				100*cold.WaitShare(), 100*warm.WaitShare(), humanize.Comma(cold.StoreGets),
				humanize.Comma(warm.StoreGets)))
		}
	}
	if !r.Dropped {
		notes = append(notes, "the kernel's caches could not be dropped between the runs (that takes root): the warm "+
			"runs may have read from memory")
	}
	return notes
}

// explain says what bounds a run, from what was measured.
func (j *job) explain(r *Result, s scenario) string {
	cores := float64(runtime.NumCPU())
	busy := (r.TrainerCPU + r.ShoalCPU + r.StoreCPU) / (r.Seconds * cores)
	per := func(cpu float64) string { return fmt.Sprintf("%.1f", 1e3*cpu/float64(r.Samples)) }
	split := fmt.Sprintf("CPU a sample: trainer %s ms, shoal %s ms, S3 server and proxy %s ms",
		per(r.TrainerCPU), per(r.ShoalCPU), per(r.StoreCPU))
	switch {
	case r.WaitShare() < 0.1:
		return fmt.Sprintf("bound by the model itself, which computes %.0f%% of the time (%s)",
			100*(1-r.WaitShare()), split)
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
		return fmt.Sprintf("bound by latency: %d workers that wait for one GET each cannot pass %.0f samples/s (%s)",
			max(j.Workers, 1), limit, split)
	default:
		return fmt.Sprintf("bound by waiting: only %.0f%% of %.0f cores busy (%s)", 100*busy, cores, split)
	}
}
