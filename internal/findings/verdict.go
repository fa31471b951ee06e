package findings

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	"github.com/shoalfs/shoal/internal/human"
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

// Shares of the time from which the trainer counts as waiting. Below waits, interleaved workers hide the waiting.
const (
	waits    = 0.05
	waitsBad = 0.20
)

const least = 0.5 // seconds; a shorter window is not judged

func (w *window) waiting() bool { return w.rates.Stall >= waits }

// level is that of a finding which is bad if the trainer waits for so long.
func (w *window) level(bad float64) Level {
	if w.rates.Stall >= bad {
		return Fail
	}
	return Warn
}

// trouble are faults, all of which are reported, by importance. Most are bad as soon as the trainer waits.
var trouble = []Rule[*window]{
	{"starting", func(w *window) Finding {
		return when(w.did.Uptime < least, Idle, "Just started", "There is nothing to judge yet.", "")
	}},
	{"store-silent", func(w *window) Finding {
		return when(w.now.Silent >= 5, Fail, "The store does not answer",
			fmt.Sprintf("%s to the store in flight, and no answer for %.0f s.", human.Count(w.now.InFlight, "request"),
				w.now.Silent),
			"Check that the store is up and reachable from here: shoal doctor "+human.Shell(w.now.Source))
	}},
	{"budget-spent", func(w *window) Finding {
		b := w.now.Cost.Budget
		if b == nil || b.WaitingDemand == 0 || b.Left > 0 {
			return Finding{}
		}
		return when(true, w.level(waits), "The budget of GETs is spent",
			fmt.Sprintf("Waiting: %s; %d GETs an hour.", human.Count(b.WaitingDemand, "read"), b.PerHour),
			"Raise gets-per-hour in --store, raise --cache-size, or pack small files (shoal pack).")
	}},
	{"access-denied", func(w *window) Finding {
		n := w.errors["access denied"]
		return when(n > 0, Fail, "The store refuses access", human.Count(n, "request")+" refused.",
			"Check the credentials and their right to s3:GetObject; the errors below name the key and the cause.")
	}},
	{"dataset-changed", func(w *window) Finding {
		n := w.errors["changed"] + w.errors["not found"]
		return when(n > 0, Fail, "The dataset changed in the store",
			human.Count(n, "object")+" changed or deleted since they were listed; reads of them fail.",
			"Restore them, or switch to the new version: shoal refresh MOUNTPOINT.")
	}},
	{"store-errors", func(w *window) Finding {
		var n int64
		var kinds []string
		for _, kind := range slices.Sorted(maps.Keys(w.errors)) {
			n += w.errors[kind]
			kinds = append(kinds, fmt.Sprintf("%d %s", w.errors[kind], kind))
		}
		sent, givenUp := max(w.did.GetRequests, n), w.did.FetchErrors
		cause := fmt.Sprintf("%d of %s failed (%s) and are retried.", n, human.Count(sent, "request"),
			strings.Join(kinds, ", "))
		if givenUp > 0 {
			cause += " " + human.Count(givenUp, "prefetch") + " given up."
		}
		return when(n > 0 && (n*100 >= sent || givenUp > 0), w.level(waits), "The store fails requests", cause,
			"See the errors below. If the store throttles (503 SlowDown), lower --connections or set it to auto.")
	}},
	{"disk-down", func(w *window) Finding {
		reason := ""
		if w.now.Disk.Reason != "" {
			reason = " (" + w.now.Disk.Reason + ")"
		}
		return when(w.now.Disk.OutOfUse, w.level(waits), "The cache's disk is out of use",
			"Reads go on from memory and the store"+reason+"; nothing more is kept.",
			"Free space on the disk of "+w.now.CacheDir+", or repair it; it is used again once it recovers.")
	}},
	{"disk-slow", func(w *window) Finding {
		d := &w.did.Disk
		return when(d.GaveUp > 0, w.level(waits), "The cache's disk is slow",
			human.Count(d.GaveUp, "read")+" waited too long for the disk and went to the store; "+
				human.Count(d.Errors, "disk error")+".",
			"Move --cache-dir to a faster disk (NVMe, not a network file system), or find the other users of the disk.")
	}},
	{"disk-errors", func(w *window) Finding {
		d := &w.did.Disk
		return when(d.Errors > 0 && d.GaveUp == 0, w.level(waits), "The cache's disk fails",
			human.Count(d.Errors, "disk error")+" so far; what could not be kept is fetched again.",
			"The log names the cause. Free space on the disk of "+w.now.CacheDir+", or repair it.")
	}},
	{"cluster-apart", func(w *window) Finding {
		c := w.now.Cluster
		if c == nil || c.Cause == "" {
			return Finding{}
		}
		remedy := "Restore etcd; the node registers again by itself."
		if c.State == "refused" {
			remedy = "Delete the file node in " + w.now.CacheDir + ", and start the daemon again."
		}
		nodes := human.Count(len(c.Nodes), "node")
		return when(true, w.level(waits), "This node is not in its cluster",
			"Reads go on with the "+nodes+" known last. The cause: "+c.Cause+".", remedy)
	}},
	{"nodes-away", func(w *window) Finding {
		if w.now.Cluster == nil {
			return Finding{}
		}
		var away []string
		for _, n := range w.now.Cluster.Away() {
			away = append(away, n.Address+" ("+n.Asked.Cause+")")
		}
		return when(len(away) > 0, w.level(waits), "Other nodes do not answer",
			"What they keep is read from the store: "+strings.Join(away[:min(len(away), 3)], ", ")+".",
			"Check that these daemons run, and that this machine reaches them; shoal cluster ls shows all nodes.")
	}},
	{"versions-differ", func(w *window) Finding {
		return when(w.otherVersion > 0, w.level(waits), "The nodes have different versions of a dataset",
			human.Count(w.otherVersion, "piece")+
				" of a file came from the store instead of from the node that keeps it.",
			"If it does not pass within a minute: shoal refresh on one node moves all of them; shoal cluster ls shows "+
				"who has which version.")
	}},
}

// causes are reasons why the trainer waits. The first that applies is reported; the last one always does.
var causes = []Rule[*window]{
	{"order-differs", func(w *window) Finding {
		return when(w.did.Opens > 0 && (w.strays > w.consumed || w.moves >= 8), w.level(waitsBad),
			"The trainer reads in another order than Shoal was told",
			fmt.Sprintf("Of %s, %d were not in the order that Shoal follows, and the reader moved %d times.",
				human.Count(w.did.Opens, "opened file"), w.strays, w.moves),
			"Check seed, world size and rank in --order (.shoal/order shows the order in use), or let Shoal infer it: "+
				"--order auto.")
	}},
	{"order-unknown", func(w *window) Finding {
		said := unknown[w.now.Order.State]
		return when(w.did.Opens > 0 && !w.orderKnown(), w.level(waitsBad), said.thing,
			fmt.Sprintf("Readers wait %s of the time; %s of the reads were not prefetched.",
				human.Percent(w.rates.Stall), human.Percent(w.rates.Hits.late())), said.remedy)
	}},
	{"memory-small", func(w *window) Finding {
		m, places := w.now.Memory, w.now.Connections
		full := m.Limit > 0 && m.Used >= m.Limit*4/5 && w.inFlightMost > 0 && w.inFlightMost*2 <= int64(places)
		reserving := w.feed.Reserve > max(w.feed.Fetch, w.feed.Decode)
		return when(reserving || w.late() && full, w.level(waitsBad), "The trainer waits: memory is too small",
			fmt.Sprintf("%s of the %s for data are in use, so only %d of %d connections can be used.",
				human.Bytes(m.Used), human.Bytes(m.Limit), w.inFlightMost, places),
			"Raise --memory, or raise --cache-size so that fetched data can leave memory.")
	}},
	{"filling", func(w *window) Finding { // the first seconds of a pass over data that is not cached yet
		s := &w.now
		thing, rest := "Starting up: fetching the first samples", "."
		all := s.Order.Position >= s.Samples || s.Disk.Kept == s.Disk.Extents || s.Order.State == "ended"
		if w.inFlight == 0 && all {
			thing, rest = "All was read, for the first time from the store", "; nothing is left to fetch."
		}
		return when(s.Uptime < 10 && w.late() && w.orderKnown() && s.Order.State != "finished", Warn, thing,
			fmt.Sprintf("%s, %s so far; the trainer waited %s of the time%s", human.Count(s.GetRequests, "request"),
				human.Bytes(s.GetBytes), human.Percent(w.rates.Stall), rest), "")
	}},
	{"decode-bound", func(w *window) Finding {
		return when(w.served() && !w.late() && w.feed.Decode >= w.feed.Send, w.level(waitsBad),
			"The trainer waits for decoding",
			fmt.Sprintf("The samples are here; decoding them keeps %.1f workers of each session busy; sessions wait "+
				"%s of the time.", w.feed.Decode/w.feed.Age, human.Percent(w.rates.Stall)),
			"Give the daemon more cores, use a cheaper transform, or store smaller pictures: shoal pack SOURCE DEST "+
				"--resize short=400.")
	}},
	{"link-slow", func(w *window) Finding {
		remedy := "Send uint8, not float32."
		if w.feed.InSlots < w.feed.Batches {
			remedy = "On one machine listen on unix://, with enough --memory, so that batches go through shared " +
				"memory; over a network send uint8, not float32."
		}
		return when(w.served() && !w.late(), w.level(waitsBad), "The trainer waits for its connection",
			fmt.Sprintf("Batches are ready; sending them takes %s of the time, at %s/s.",
				human.Percent(w.feed.Send/w.feed.Age), human.Bytes(int64(float64(w.feed.Bytes)/w.feed.Age))), remedy)
	}},
	{"store-slow", storeSlow},
}

// unknown says, by the order's state, that the order is not known.
var unknown = map[string]struct{ thing, remedy string }{
	"none": {"The trainer waits: Shoal does not know its order",
		"Run the trainer with `shoal run`, or pass the order: shoal.hint(sampler) in the trainer, " +
			"--order torch:seed=… when mounting; or use the feed."},
	"watching": {"The trainer waits: Shoal does not recognise its order yet",
		"A search begins after about 64 reads. If this remains, run the trainer with `shoal run`, or pass the order: " +
			"shoal.hint(sampler), or a list of paths in .shoal/plan."},
	"searching": {"The trainer waits: Shoal is searching for its order",
		"The search (.shoal/order has details) may not finish for unseeded loaders: run the trainer with " +
			"`shoal run`, or pass the order: shoal.hint(sampler)."},
	"unknown": {"The trainer waits: its order is unknown",
		"Run the trainer with `shoal run`, or pass the order: shoal.hint(sampler), or a list of paths in " +
			".shoal/plan; .shoal/order says why it was not found."},
}

func (w *window) orderKnown() bool {
	_, is := unknown[w.now.Order.State]
	return !is
}

// late reports whether the trainer waits for the store rather than for decoding. The mount's readers always do; a
// feed's do if reads of its samples waited, and for longer than half of the decoding time.
func (w *window) late() bool {
	if w.mountStall >= w.feedStall || w.did.Reads == 0 && w.feed.Batches == 0 {
		return true
	}
	return w.rates.Hits.late() >= 0.02 && w.feed.Fetch >= w.feed.Decode/2
}

func storeSlow(w *window) Finding {
	s, r, places := &w.now, &w.rates, int64(w.now.Connections)
	cause := fmt.Sprintf("It waits %s of the time. The store delivers %s/s in %.0f requests/s",
		human.Percent(r.Stall), human.Bytes(int64(r.Bytes)), r.Requests)
	if w.inFlightMost > 0 { // otherwise the run is over
		cause += fmt.Sprintf(", with %d of %d connections in use", w.inFlightMost, places)
	}
	if r.Requests > 0 && w.inFlight > 0 {
		// Requests in flight are the rate times the duration of each (J. D. C. Little, Operations Research 9, 1961).
		// The quantiles of the latency cover the daemon's whole life.
		cause += fmt.Sprintf(", about %.2g s each", float64(w.inFlight+w.inFlightMost)/2/r.Requests)
	}
	cause += "."
	kept := human.Percent(float64(s.Disk.Kept) / float64(s.Disk.Extents))
	full := func(used, limit int64) bool { return limit > 0 && used >= limit/10*9 }
	part := s.Disk.Kept < s.Disk.Extents
	var todo []string
	if n := w.did.GetRequests; n > 0 && w.did.GetBytes/n < 512<<10 && !s.Packed {
		each := human.Bytes(w.did.GetBytes / n)
		todo = append(todo, "pack the dataset, since a request fetches only "+each+" (shoal pack)")
	}
	if part && (full(s.Disk.Used, s.Disk.Limit) || full(s.Disk.AllUsed, s.Disk.Budget)) {
		todo = append(todo, "raise --cache-size, since only "+kept+" of the dataset is kept")
	}
	if w.inFlightMost*10 >= places*9 {
		todo = append(todo, "raise --connections, unless it is auto")
	}
	if len(todo) == 0 {
		todo = append(todo, "find the bottleneck with shoal doctor "+human.Shell(s.Source))
		if part {
			cause += " " + kept + " of the dataset is kept so far, and will be faster in the next epoch."
		}
	}
	remedy := strings.Join(todo, "; ") + "."
	return when(true, w.level(waitsBad), "The trainer waits: the store is too slow", cause,
		strings.ToUpper(remedy[:1])+remedy[1:])
}

// calm are the activities of a trainer that does not wait. The last rule always applies.
var calm = []Rule[*window]{
	{"finished", func(w *window) Finding {
		o := &w.now.Order
		return when(w.quiet() && o.State == "finished", Idle, "The epoch is over", fmt.Sprintf(
			"All %s of epoch %d were read; there are no reads now.", human.Count(o.Position, "sample"), o.Epoch), "")
	}},
	{"slots-held", func(w *window) Finding {
		return when(w.quiet() && w.sessions > 0 && w.feed.Slots >= max(w.did.Uptime/2, 5), Fail,
			"The trainer holds all its slots",
			fmt.Sprintf("It wants another batch, and has released none for %.0f s.", w.did.Uptime),
			"Release older batches, copy those to keep, or ask for more slots.")
	}},
	{"idle", func(w *window) Finding {
		thing := "Idle"
		cause := fmt.Sprintf("No reads for %.0f s; %s can be read without waiting.",
			w.did.Uptime, human.Count(w.rates.Lead, "sample"))
		switch {
		case w.now.Reads == 0 && w.now.Opens == 0:
			thing = "Waiting for the trainer"
		case w.rates.Spare >= 0.5:
			thing = "The trainer requests nothing"
			cause = fmt.Sprintf("%s; batches are ready, and none was requested for %.0f s.",
				human.Count(w.sessions, "open session"), w.did.Uptime)
		}
		return when(w.quiet(), Idle, thing, cause, "")
	}},
	{"trainer-slower", func(w *window) Finding {
		return when(w.rates.Spare >= waitsBad, OK, "The GPU has data: the trainer is the slower side",
			fmt.Sprintf("Batches were ready and not requested %s of the time, at %s samples/s%s.",
				human.Percent(w.rates.Spare), human.Rate(w.rates.Samples), w.ahead()), "")
	}},
	{"fed", func(w *window) Finding {
		late, served := w.rates.Hits.late(), ", all from the kernel's page cache"
		if w.did.Reads != 0 {
			served = "; " + human.Percent(1-late) + " of the reads did not wait"
		}
		cause := human.Rate(w.rates.Samples) + " samples/s" + served + w.ahead() + "."
		if !w.orderKnown() && !w.served() && late > 0.02 {
			return when(true, Warn, "The GPU has data, but Shoal does not know the order", cause,
				"Run the trainer with `shoal run`, so that no read waits; or pass the order: shoal.hint(sampler) in "+
					"the trainer, or --order torch:seed=…")
		}
		return when(true, OK, "The GPU has data", cause, "")
	}},
}

func (w *window) quiet() bool { return w.did.Reads == 0 && w.did.Delivered == 0 }

// ahead describes the lead, as the end of a sentence.
func (w *window) ahead() string {
	seconds := ""
	switch {
	case !w.orderKnown() || w.now.Order.State == "ended":
		return ""
	case w.rates.LeadSeconds > 0:
		seconds = fmt.Sprintf(" (%.0f s)", w.rates.LeadSeconds)
	}
	return "; Shoal is " + human.Count(w.rates.Lead, "sample") + seconds + " ahead"
}
