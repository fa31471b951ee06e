package profile

import (
	"cmp"
	"fmt"
	"io"
	"strings"

	humanize "github.com/dustin/go-humanize"

	"github.com/shoalfs/shoal/internal/human"
)

// Print writes a report for people.
func (r Report) Print(w io.Writer) error {
	var b strings.Builder
	f := r.Figures
	line := func(name, format string, args ...any) {
		fmt.Fprintf(&b, "%-10s "+format+"\n", append([]any{name}, args...)...)
	}
	line("source", "%s, %.1f s recorded", r.Source, r.Seconds)
	line("opens", "%s of %s files (of %s), %.0f files/s by %.1f processes at a time; %s names looked up", human.Number(f.Opens), human.Number(f.Files), human.Number(f.DatasetFiles), f.FilesPerSecond, f.AtOnce, human.Number(f.Lookups))
	of := func(n int) float64 { return 100 * share(float64(n), float64(f.Reads)) }
	line("reads", "%s, %s: %.0f%% keep, %.0f%% ring, %.0f%% joined a fetch, %.0f%% missed", human.Number(f.Reads), humanize.IBytes(uint64(max(f.Bytes, 0))), of(f.Keep), of(f.Ring), of(f.Joined), of(f.Misses))
	line("waits", "%.0f%% of the processes' time; a read p50 %s, p99 %s; the store's GETs p50 %s", 100*f.WaitShare, millis(f.WaitP50), millis(f.WaitP99), millis(f.LatencySeconds))
	line("order", "%s (%s)", f.Order, cmp.Or(f.OrderState, "not told"))
	if f.Lost > 0 {
		line("lost", "%s events: the recorder's ring was full, or the mount has moved to a new version; the counts are too low", humanize.Comma(f.Lost))
	}
	for _, p := range r.Patterns {
		fmt.Fprintf(&b, "\n%s: %s\n", p.Pattern, p.Title)
		for _, e := range p.Evidence {
			fmt.Fprintf(&b, "  %s\n", e)
		}
		for _, h := range p.Helps {
			gain := ""
			if h.Gain > 0 {
				gain = fmt.Sprintf("  [%.1fx: %s]", h.Gain, h.By)
			}
			fmt.Fprintf(&b, "  -> %s%s\n", h.What, gain)
			if h.Command != "" {
				fmt.Fprintf(&b, "     %s\n", h.Command)
			}
		}
	}
	fmt.Fprintf(&b, "\n%s\n", r.Verdict)
	_, err := io.WriteString(w, b.String())
	return err
}
