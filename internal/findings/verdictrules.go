package findings

import (
	"fmt"
	"slices"
	"strings"

	"github.com/shoalfs/shoal/internal/human"
)

// Shares of the time from which the trainer counts as waiting. Below waits, interleaved workers hide the waiting.
const (
	waits    = 0.05
	waitsBad = 0.20
)

// A window shorter than this, in seconds, is not judged.
const least = 0.5

func (w *window) waiting() bool { return w.rates.Stall >= waits }

// level is the level of findings about a trainer that waits.
func (w *window) level() Level {
	if w.rates.Stall >= waitsBad {
		return Fail
	}
	return Warn
}

// troubleLevel is the level of a fault: bad if it makes the trainer wait.
func (w *window) troubleLevel() Level {
	if w.waiting() {
		return Fail
	}
	return Warn
}

func tooShort(w *window) (Finding, bool) {
	return Finding{Code: "starting", Level: Idle, Thing: "Just started", Cause: "There is nothing to judge yet."}, w.seconds < least
}

// silent: requests are in flight and no answer comes.
func silent(w *window) (Finding, bool) {
	return Finding{
		Code: "store-silent", Level: Fail, Thing: "The store does not answer",
		Cause:  fmt.Sprintf("%s to the store in flight, and no answer for %.0f s.", human.Count(w.inFlight, "request"), w.seconds),
		Remedy: "Check that the store is up and reachable from here: shoal doctor " + w.now.Source,
	}, w.inFlight > 0 && w.bytes == 0 && w.gets <= w.inFlightMost && w.seconds >= 5 && !w.restarted
}

func denied(w *window) (Finding, bool) {
	n := w.errors["access denied"]
	return Finding{
		Code: "access-denied", Level: Fail, Thing: "The store refuses access",
		Cause:  human.Count(n, "request") + " refused.",
		Remedy: "Check the credentials and their right to s3:GetObject; the errors below name the key and the cause.",
	}, n > 0
}

func changed(w *window) (Finding, bool) {
	n := w.errors["changed"] + w.errors["not found"]
	return Finding{
		Code: "dataset-changed", Level: Fail, Thing: "The dataset changed in the store",
		Cause:  human.Count(n, "object") + " changed or deleted since they were listed; reads of them fail.",
		Remedy: "Restore them, or switch to the new version: shoal refresh MOUNTPOINT.",
	}, n > 0
}

// failing: the store fails requests, which are retried.
func failing(w *window) (Finding, bool) {
	var n int64
	var kinds []string
	for kind, k := range w.errors {
		n += k
		kinds = append(kinds, fmt.Sprintf("%d %s", k, kind))
	}
	slices.Sort(kinds)
	f := Finding{
		Code: "store-errors", Level: w.troubleLevel(), Thing: "The store fails requests",
		Cause:  fmt.Sprintf("%d of %s failed (%s) and are retried.", n, human.Count(max(w.gets, n), "request"), strings.Join(kinds, ", ")),
		Remedy: "See the errors below. If the store throttles (503 SlowDown), lower --connections or set it to auto.",
	}
	if w.prefetchFails > 0 {
		f.Cause += fmt.Sprintf(" %s given up.", human.Count(w.prefetchFails, "prefetch"))
	}
	return f, n > 0 && (n*100 >= w.gets || w.prefetchFails > 0)
}

func diskDown(w *window) (Finding, bool) {
	d := w.now.Disk
	reason := ""
	if d.Reason != "" {
		reason = " (" + d.Reason + ")"
	}
	return Finding{
		Code: "disk-down", Level: w.troubleLevel(), Thing: "The cache's disk is out of use",
		Cause:  "Reads go on from memory and the store" + reason + "; nothing more is kept.",
		Remedy: "Free space on the disk of " + w.now.CacheDir + ", or repair it; it is used again once it recovers.",
	}, d.OutOfUse
}

func diskSlow(w *window) (Finding, bool) {
	if w.diskGaveUp == 0 {
		return Finding{
			Code: "disk-errors", Level: w.troubleLevel(), Thing: "The cache's disk fails",
			Cause:  human.Count(w.diskErrors, "disk error") + " so far; what could not be kept is fetched again.",
			Remedy: "The log names the cause. Free space on the disk of " + w.now.CacheDir + ", or repair it.",
		}, w.diskErrors > 0
	}
	return Finding{
		Code: "disk-slow", Level: w.troubleLevel(), Thing: "The cache's disk is slow",
		Cause:  fmt.Sprintf("%s waited too long for the disk and went to the store; %s.", human.Count(w.diskGaveUp, "read"), human.Count(w.diskErrors, "disk error")),
		Remedy: "Move --cache-dir to a faster disk (NVMe, not a network file system), or find the other users of the disk.",
	}, true
}

// apart: etcd does not answer, or does not have this node.
func apart(w *window) (Finding, bool) {
	c := w.now.Cluster
	if c == nil || c.Cause == "" {
		return Finding{}, false
	}
	f := Finding{
		Code: "cluster-apart", Level: w.troubleLevel(), Thing: "This node is not in its cluster",
		Cause:  fmt.Sprintf("Reads go on with the %s known last. The cause: %s.", human.Count(len(c.Nodes), "node"), c.Cause),
		Remedy: "Restore etcd; the node registers again by itself.",
	}
	if c.State == "refused" {
		f.Remedy = "Delete the file node in " + w.now.CacheDir + ", and start the daemon again."
	}
	return f, true
}

// nodesAway: other nodes do not answer this one.
func nodesAway(w *window) (Finding, bool) {
	if w.now.Cluster == nil {
		return Finding{}, false
	}
	var said []string
	for _, n := range w.now.Cluster.Away() {
		said = append(said, n.Address+" ("+n.Asked.Cause+")")
	}
	return Finding{
		Code: "nodes-away", Level: w.troubleLevel(), Thing: "Other nodes do not answer",
		Cause:  fmt.Sprintf("What they keep is read from the store: %s.", strings.Join(said[:min(len(said), 3)], ", ")),
		Remedy: "Check that these daemons run, and that this machine reaches them; shoal cluster ls shows all nodes.",
	}, len(said) > 0
}

// versionsDiffer: other nodes have another version of a dataset.
func versionsDiffer(w *window) (Finding, bool) {
	return Finding{
		Code: "versions-differ", Level: w.troubleLevel(), Thing: "The nodes have different versions of a dataset",
		Cause:  human.Count(w.otherVersion, "piece") + " of a file came from the store instead of from the node that keeps it.",
		Remedy: "If it does not pass within a minute: shoal refresh on one node moves all of them; shoal cluster ls shows who has which version.",
	}, w.otherVersion > 0
}

// otherOrder: the trainer does not read in the order that it announced.
func otherOrder(w *window) (Finding, bool) {
	lost := w.strays > w.consumed || w.moves >= 8
	return Finding{
		Code: "order-differs", Level: w.level(), Thing: "The trainer reads in another order than Shoal was told",
		Cause:  fmt.Sprintf("Of %s, %d were not in the order that Shoal follows, and the reader moved %d times.", human.Count(w.opens, "opened file"), w.strays, w.moves),
		Remedy: "Check seed, world size and rank in --order (.shoal/order shows the order in use), or let Shoal infer it: --order auto.",
	}, w.waiting() && w.opens > 0 && lost
}

func (w *window) orderKnown() bool {
	switch w.now.Order.State {
	case "none", "watching", "searching", "unknown":
		return false
	}
	return true
}

func unknownOrder(w *window) (Finding, bool) {
	f := Finding{
		Code: "order-unknown", Level: w.level(), Thing: "The trainer waits: Shoal does not know its order",
		Cause:  fmt.Sprintf("Readers wait %s of the time; %s of the reads were not prefetched.", human.Percent(w.rates.Stall), human.Percent(w.rates.Hits.late())),
		Remedy: "Run the trainer by `shoal run`, or pass the order: shoal.hint(sampler) in the trainer, --order torch:seed=… when mounting; or use the feed.",
	}
	switch w.now.Order.State {
	case "watching":
		f.Thing = "The trainer waits: Shoal does not recognise its order yet"
		f.Remedy = "A search begins after about 64 reads. If this remains, run the trainer by `shoal run`, or pass the order: shoal.hint(sampler), or a list of paths in .shoal/plan."
	case "searching":
		f.Thing = "The trainer waits: Shoal is searching for its order"
		f.Remedy = "The search (.shoal/order has details) may not finish for unseeded loaders: run the trainer by `shoal run`, or pass the order: shoal.hint(sampler)."
	case "unknown":
		f.Thing = "The trainer waits: its order is unknown"
		f.Remedy = "Run the trainer by `shoal run`, or pass the order: shoal.hint(sampler), or a list of paths in .shoal/plan; .shoal/order says why it was not found."
	}
	return f, w.waiting() && w.opens > 0 && !w.orderKnown()
}

// late reports whether the trainer waits for the store rather than for decoding. The mount's readers always do; a
// feed's do if reads of its samples waited, and for longer than half of the decoding time.
func (w *window) late() bool {
	if w.mountStall >= w.feedStall || w.reads == 0 && w.feed.Batches == 0 {
		return true
	}
	return w.rates.Hits.late() >= 0.02 && w.feed.Fetch >= w.feed.Decode/2
}

func memorySmall(w *window) (Finding, bool) {
	m := w.now.Memory
	full := m.Limit > 0 && m.Used >= m.Limit*4/5 && w.inFlightMost > 0 && w.inFlightMost*2 <= int64(w.now.Connections)
	reserve := w.feed.Reserve > w.feed.Fetch && w.feed.Reserve > w.feed.Decode && w.rates.Stall > 0
	return Finding{
		Code: "memory-small", Level: w.level(), Thing: "The trainer waits: memory is too small",
		Cause:  fmt.Sprintf("%s of the %s for data are in use, so only %d of %d connections can be used.", human.Bytes(m.Used), human.Bytes(m.Limit), w.inFlightMost, w.now.Connections),
		Remedy: "Raise --memory, or raise --cache-size so that fetched data can leave memory.",
	}, w.waiting() && (reserve || w.late() && full)
}

// filling: the first seconds of a pass over data that is not cached yet.
func filling(w *window) (Finding, bool) {
	f := Finding{
		Code: "filling", Level: Warn, Thing: "Starting up: fetching the first samples",
		Cause: fmt.Sprintf("%s, %s so far; the trainer waited %s of the time.", human.Count(w.now.GetRequests, "request"), human.Bytes(w.now.GetBytes), human.Percent(w.rates.Stall)),
	}
	if d := w.now.Disk; w.inFlight == 0 && (w.now.Order.Position >= w.now.Samples || d.Kept == d.Extents || w.now.Order.State == "ended") {
		f.Thing = "All was read, for the first time from the store"
		f.Cause = strings.TrimSuffix(f.Cause, ".") + "; nothing is left to fetch."
	}
	return f, w.waiting() && w.now.Uptime < 10 && w.late() && w.orderKnown() && w.now.Order.State != "finished"
}

func decodeBound(w *window) (Finding, bool) {
	return Finding{
		Code: "decode-bound", Level: w.level(), Thing: "The trainer waits for decoding",
		Cause:  fmt.Sprintf("The samples are here; decoding them keeps %.1f workers of each session busy; sessions wait %s of the time.", w.feed.Decode/w.feed.Age, human.Percent(w.rates.Stall)),
		Remedy: "Give the daemon more cores, use a cheaper transform, or store smaller pictures: shoal pack SOURCE DEST --resize short=400.",
	}, w.waiting() && w.served() && !w.late() && w.feed.Decode >= w.feed.Send
}

func clientLink(w *window) (Finding, bool) {
	return Finding{
		Code: "link-slow", Level: w.level(), Thing: "The trainer waits for its connection",
		Cause:  fmt.Sprintf("Batches are ready; sending them takes %s of the time, at %s/s.", human.Percent(w.feed.Send/w.feed.Age), human.Bytes(int64(float64(w.feed.Bytes)/w.feed.Age))),
		Remedy: "On one machine listen on unix:// so that batches go through shared memory; over a network send uint8, not float32.",
	}, w.waiting() && w.served() && !w.late() && w.feed.Send > w.feed.Decode
}

func storeSlow(w *window) (Finding, bool) {
	s := &w.now
	f := Finding{
		Code: "store-slow", Level: w.level(), Thing: "The trainer waits: the store is too slow",
		Cause: fmt.Sprintf("It waits %s of the time. The store delivers %s/s in %.0f requests/s", human.Percent(w.rates.Stall), human.Bytes(int64(w.rates.Bytes)), w.rates.Requests),
	}
	if w.inFlightMost > 0 { // otherwise the run is over
		f.Cause += fmt.Sprintf(", with %d of %d connections in use", w.inFlightMost, s.Connections)
	}
	if w.rates.Requests > 0 && w.inFlight > 0 {
		// Requests in flight are the rate times the duration of each (J. D. C. Little, Operations Research 9, 1961). The
		// quantiles of the latency cover the daemon's whole life.
		each := float64(w.inFlight+w.inFlightMost) / 2 / w.rates.Requests
		f.Cause += fmt.Sprintf(", about %.2g s each", each)
	}
	f.Cause += "."
	var todo []string
	if w.gets > 0 && w.bytes/w.gets < 512<<10 && !s.Packed {
		todo = append(todo, fmt.Sprintf("pack the dataset, since a request fetches only %s (shoal pack)", human.Bytes(w.bytes/w.gets)))
	}
	if d := s.Disk; d.Kept < d.Extents && diskFull(s) {
		todo = append(todo, fmt.Sprintf("raise --cache-size, since only %s of the dataset is kept", human.Percent(float64(d.Kept)/float64(d.Extents))))
	}
	if w.inFlightMost*10 >= int64(s.Connections)*9 {
		todo = append(todo, "raise --connections")
	}
	if len(todo) == 0 {
		todo = append(todo, "find the bottleneck with shoal doctor "+s.Source)
		if d := s.Disk; d.Kept < d.Extents {
			f.Cause += fmt.Sprintf(" %s of the dataset is kept so far, and will be faster in the next epoch.", human.Percent(float64(d.Kept)/float64(d.Extents)))
		}
	}
	f.Remedy = upper(strings.Join(todo, "; ")) + "."
	return f, w.waiting()
}

// diskFull reports whether fetched data no longer fits on the disk.
func diskFull(s *Snapshot) bool {
	d := s.Disk
	full := func(used, limit int64) bool { return limit > 0 && used >= limit/10*9 }
	return full(d.Used, d.Limit) || full(d.AllUsed, d.Budget)
}

func (w *window) quiet() bool {
	return w.reads == 0 && w.samples == 0
}

func finished(w *window) (Finding, bool) {
	return Finding{
		Code: "finished", Level: Idle, Thing: "The epoch is over",
		Cause: fmt.Sprintf("All %s of epoch %d were read; there are no reads now.", human.Count(w.now.Order.Position, "sample"), w.now.Order.Epoch),
	}, w.quiet() && w.now.Order.State == "finished"
}

func idle(w *window) (Finding, bool) {
	f := Finding{
		Code: "idle", Level: Idle, Thing: "Idle",
		Cause: fmt.Sprintf("No reads for %.0f s; %s can be read without waiting.", w.seconds, human.Count(w.rates.Lead, "sample")),
	}
	switch {
	case w.now.Reads == 0 && w.now.Opens == 0:
		f.Thing = "Waiting for the trainer"
	case w.rates.Spare >= 0.5:
		f.Thing, f.Cause = "The trainer requests nothing", fmt.Sprintf("%s; batches are ready, and none was requested for %.0f s.", human.Count(w.sessions, "open session"), w.seconds)
	}
	return f, w.quiet()
}

func trainerSlower(w *window) (Finding, bool) {
	return Finding{
		Code: "trainer-slower", Level: OK, Thing: "The GPU has data: the trainer is the slower side",
		Cause: fmt.Sprintf("Batches were ready and not requested %s of the time, at %s samples/s%s.", human.Percent(w.rates.Spare), human.Rate(w.rates.Samples), w.ahead()),
	}, w.rates.Spare >= waitsBad
}

func fed(w *window) (Finding, bool) {
	f := Finding{
		Code: "fed", Level: OK, Thing: "The GPU has data",
		Cause: fmt.Sprintf("%s samples/s; %s of the reads did not wait%s.", human.Rate(w.rates.Samples), human.Percent(1-w.rates.Hits.late()), w.ahead()),
	}
	if w.reads == 0 {
		f.Cause = fmt.Sprintf("%s samples/s, all from the kernel's page cache%s.", human.Rate(w.rates.Samples), w.ahead())
	}
	if !w.orderKnown() && !w.served() && w.rates.Hits.late() > 0.02 {
		f.Level, f.Thing = Warn, "The GPU has data, but Shoal does not know the order"
		f.Remedy = "Run the trainer by `shoal run`, so that no read waits; or pass the order: shoal.hint(sampler) in the trainer, or --order torch:seed=…"
	}
	return f, true
}

// ahead describes the lead, as the end of a sentence.
func (w *window) ahead() string {
	switch {
	case !w.orderKnown() || w.now.Order.State == "ended":
		return ""
	case w.rates.LeadSeconds > 0:
		return fmt.Sprintf("; Shoal is %s (%.0f s) ahead", human.Count(w.rates.Lead, "sample"), w.rates.LeadSeconds)
	}
	return fmt.Sprintf("; Shoal is %s ahead", human.Count(w.rates.Lead, "sample"))
}

func upper(s string) string { return strings.ToUpper(s[:1]) + s[1:] }
