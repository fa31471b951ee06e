package findings

import (
	"reflect"
	"slices"
	"strings"

	"github.com/shoalfs/shoal/loader"
	"github.com/shoalfs/shoal/prefetch/engine"
)

// Snapshot is the state that a daemon reports for one dataset, without the counters of an S3 endpoint.
type Snapshot struct {
	engine.Stats
	Feed *loader.Stats `json:"feed,omitempty"` // nil without a feed
}

// Verdict is the most important finding, and the other ones.
type Verdict struct {
	Version int `json:"version"` // of this schema, 2
	Finding
	Rates Rates     `json:"rates"`
	Notes []Finding `json:"notes"`  // other findings, worst first
	Error []Advice  `json:"errors"` // the latest warnings and errors, newest first
}

// Of judges the time between two snapshots of one daemon. If the daemon was restarted in between, or before is the zero
// Snapshot, it judges the time since the start.
func Of(before, now Snapshot) Verdict {
	w := between(before, now)
	found := judge(trouble, &w)
	if w.waiting() {
		found = append(found, judge(causes, &w)[0]) // the later rules would repeat it
	} else if f := judge(calm, &w)[0]; len(found) == 0 || f.Level == Warn {
		found = append(found, f)
	}
	return Verdict{
		Version: 2, Finding: found[0], Notes: append([]Finding{}, found[1:]...), Rates: w.rates,
		Error: Explain(now.Errors),
	}
}

// Advice is a warning or error of the log, with its remedy separated.
type Advice struct {
	engine.ErrorEvent        // its Text is without the remedy
	Remedy            string `json:"remedy,omitempty"`
}

// Explain returns the events, newest first. An event's remedy is its attribute of that name, or the text in parentheses
// at its end, as in all errors of Shoal.
func Explain(events []engine.ErrorEvent) []Advice {
	list := make([]Advice, 0, len(events))
	for _, e := range slices.Backward(events) {
		a := Advice{ErrorEvent: e}
		a.Text, a.Remedy = split(a.Text)
		list = append(list, a)
	}
	return list
}

func split(text string) (what, remedy string) {
	if what, remedy, ok := strings.Cut(text, "; remedy: "); ok {
		return what, remedy
	}
	depth := 0
	for i := len(text) - 1; i > 0 && strings.HasSuffix(text, ")"); i-- {
		switch text[i] {
		case ')':
			depth++
		case '(':
			depth--
		}
		if depth == 0 { // where the last parenthesis begins
			inner := text[i+1 : len(text)-1]
			if text[i-1] == ' ' && strings.Contains(inner, " ") {
				return text[:i-1], inner
			}
			break
		}
	}
	return text, ""
}

// Rates are the activity between two snapshots, per second or as shares.
type Rates struct {
	Seconds  float64 `json:"seconds"`         // between the snapshots
	Samples  float64 `json:"samples_per_sec"` // delivered to trainers
	Requests float64 `json:"get_requests_per_sec"`
	Bytes    float64 `json:"get_bytes_per_sec"`

	// Stall is the share of the time (0 to 1) that the trainer waited: a feed's sessions, while they were open, for a
	// batch that they wanted; the mount's reading threads, while they read, for the store.
	Stall float64 `json:"stall_share"`
	// Spare is the share of the time (0 to 1) in which the feed's sessions were open, had batches ready and wanted
	// none.
	Spare float64 `json:"spare_share"`

	Hits Areas `json:"hits"`

	Lead        int     `json:"lead_samples"`
	LeadSeconds float64 `json:"lead_seconds"` // at the reader's pace; 0 while that is unknown
}

// Areas are the shares (0 to 1) of the reads that each area served; all 0 if nothing was read.
type Areas struct {
	Keep   float64 `json:"keep"`   // disk
	Ring   float64 `json:"ring"`   // memory
	Joined float64 `json:"joined"` // waited for a fetch in progress
	Missed float64 `json:"missed"` // had to start a fetch
}

// late is the share of the reads that had to wait for the store.
func (a Areas) late() float64 { return a.Joined + a.Missed }

// window is two snapshots, and what happened between them.
type window struct {
	now      Snapshot
	did      engine.Stats // its counters are those of the window
	feed     loader.SessionStats
	sessions int              // open now or before
	errors   map[string]int64 // of the store, by kind
	rates    Rates

	otherVersion            int64   // pieces that other nodes of the cluster have in another version
	inFlight, inFlightMost  int64   // the lower and the higher of the two snapshots
	consumed, strays, moves int     // opens in a stream's order, in none, and of readers that moved elsewhere
	feedStall, mountStall   float64 // shares of the time; Rates.Stall is the larger of the two
}

// steady is the longest window, in seconds, for which the number of readers at its ends is taken for the time between.
// The daemon counts readers over the same length.
const steady = 10

func between(before, now Snapshot) window {
	if before.PID != now.PID || before.Uptime > now.Uptime || before.Source != now.Source {
		before = Snapshot{}
	}
	w := window{
		now: now, did: since(now.Stats, before.Stats), errors: map[string]int64{},
		inFlight: min(before.InFlight, now.InFlight), inFlightMost: max(before.InFlight, now.InFlight),
	}
	for kind, n := range now.StoreErrors {
		if n -= before.StoreErrors[kind]; n > 0 {
			w.errors[kind] = n
		}
	}
	if now.Cluster != nil {
		w.otherVersion = now.Cluster.OtherVersion()
	}
	if before.Cluster != nil {
		w.otherVersion -= before.Cluster.OtherVersion()
	}
	if now.Feed != nil {
		var was loader.Stats
		if before.Feed != nil {
			was = *before.Feed
		}
		w.feed, w.sessions = since(now.Feed.Total, was.Total), max(was.Open, now.Feed.Open)
	}
	w.orders(before)
	w.rate(max(now.Readers, before.Readers, 1))
	return w
}

// since returns a struct whose numbers are those of now less those before.
func since[T any](now, before T) T {
	subtract(reflect.ValueOf(&now).Elem(), reflect.ValueOf(before))
	return now
}

func subtract(now, before reflect.Value) {
	switch {
	case now.Kind() == reflect.Struct:
		for i := range now.NumField() {
			subtract(now.Field(i), before.Field(i))
		}
	case now.CanSet() && now.CanInt():
		now.SetInt(now.Int() - before.Int())
	case now.CanSet() && now.CanFloat():
		now.SetFloat(now.Float() - before.Float())
	}
}

// orders counts how closely the readers followed the orders of their streams. To read an epoch again is not to move.
func (w *window) orders(before Snapshot) {
	for _, s := range w.now.Streams {
		for _, b := range before.Streams {
			if b.Name == s.Name && b.Events.Consumed <= s.Events.Consumed { // otherwise it is another of the same name
				s = since(s, b)
				break
			}
		}
		w.consumed += s.Events.Consumed
		w.strays += max(0, s.Strays)
		w.moves += max(0, s.Events.Jumps+s.Events.PrevEpochs+s.Events.Found)
	}
}

func (w *window) rate(readers int) {
	d, r := &w.did, &w.rates
	r.Seconds, r.Lead, r.LeadSeconds = d.Uptime, w.now.Lead, w.now.LeadSeconds
	r.Hits = Areas{
		Keep: share(d.Hits.Keep, d.Reads), Ring: share(d.Hits.Ring, d.Reads),
		Joined: share(d.Joined, d.Reads), Missed: share(d.Misses, d.Reads),
	}
	r.Samples, r.Requests = share(float64(d.Delivered), d.Uptime), share(float64(d.GetRequests), d.Uptime)
	r.Bytes = share(float64(d.GetBytes), d.Uptime)
	w.feedStall, r.Spare = part(w.feed.Stall, w.feed.Age), part(w.feed.Credit+w.feed.Slots, w.feed.Age)
	if d.Opens > 0 || !w.served() {
		reading := d.Uptime * float64(readers)
		if d.Uptime > steady && d.ReaderTime > 0 {
			reading = d.ReaderTime
		}
		// The feed reads through the same cache: its waiting is not the mount's.
		w.mountStall = part(d.Stall-w.feed.Fetch, reading)
	}
	r.Stall = max(w.feedStall, w.mountStall)
}

// served reports whether the feed had a session in the window, even if none was open at either end.
func (w *window) served() bool { return w.feed.Age > 0 }

// part is a share, limited to [0, 1].
func part(a, b float64) float64 { return min(1, max(0, share(a, b))) }
