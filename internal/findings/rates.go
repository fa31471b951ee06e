package findings

import (
	"github.com/shoalfs/shoal/loader"
)

// Rates are the activity between two snapshots, per second or as shares.
type Rates struct {
	Seconds  float64 `json:"seconds"`         // between the snapshots
	Samples  float64 `json:"samples_per_sec"` // delivered to trainers
	Requests float64 `json:"get_requests_per_sec"`
	Bytes    float64 `json:"get_bytes_per_sec"`

	// Stall is the share of the time (0 to 1) that the trainer waited: a feed's sessions, while they were open, for a
	// batch that they wanted; the mount's reading threads, while they read, for the store.
	Stall float64 `json:"stall_share"`
	// Spare is the share of the time (0 to 1) in which the feed's sessions were open, had batches ready and wanted none.
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

// window is two snapshots and the difference between them.
type window struct {
	now           Snapshot
	restarted     bool // the window is the daemon's whole life
	rates         Rates
	seconds       float64
	opens, reads  int64
	gets, bytes   int64
	samples       int64
	prefetchFails int64
	faults
	errors map[string]int64
	following
	inFlight     int64 // the lower of the two snapshots
	inFlightMost int64
	feed         loader.SessionStats
	feedStall    float64 // shares of the time; Rates.Stall is the larger of the two
	mountStall   float64
	sessions     int // open now or before
}

// faults are those that neither the store's errors nor the state tell of.
type faults struct {
	diskErrors, diskGaveUp int64
	otherVersion           int64 // pieces that other nodes of the cluster have in another version
}

// following says how closely the readers followed their orders.
type following struct {
	consumed int64 // by all streams, following their orders
	strays   int64 // opened, but in no stream's order
	moves    int64 // times that a reader moved elsewhere; reading an epoch again does not count
}

// steady is the longest window, in seconds, for which the number of readers at its ends is taken for the time between.
// The daemon counts readers over the same length.
const steady = 10

func between(before, now Snapshot) window {
	if before.PID != now.PID || before.Uptime > now.Uptime || before.Source != now.Source {
		before = Snapshot{}
	}
	w := window{
		now: now, restarted: before.PID == 0, seconds: now.Uptime - before.Uptime, errors: map[string]int64{},
		opens: now.Opens - before.Opens, reads: now.Reads - before.Reads,
		gets: now.GetRequests - before.GetRequests, bytes: now.GetBytes - before.GetBytes,
		prefetchFails: now.FetchErrors - before.FetchErrors,
		faults:        faults{diskErrors: now.Disk.Errors - before.Disk.Errors, diskGaveUp: now.Disk.GaveUp - before.Disk.GaveUp},
		inFlight:      min(before.InFlight, now.InFlight), inFlightMost: max(before.InFlight, now.InFlight),
	}
	for kind, n := range now.StoreErrors {
		if n -= before.StoreErrors[kind]; n > 0 {
			w.errors[kind] = n
		}
	}
	if c := now.Cluster; c != nil {
		if w.otherVersion = c.OtherVersion(); before.Cluster != nil {
			w.otherVersion -= before.Cluster.OtherVersion()
		}
	}
	w.orders(before)
	w.ofFeed(before.Feed)
	w.samples = now.Delivered - before.Delivered

	r := &w.rates
	r.Seconds, r.Lead, r.LeadSeconds = w.seconds, now.Lead, now.LeadSeconds
	if n := float64(w.reads); n > 0 {
		r.Hits = Areas{
			Keep: float64(now.Hits.Keep-before.Hits.Keep) / n, Ring: float64(now.Hits.Ring-before.Hits.Ring) / n,
			Joined: float64(now.Joined-before.Joined) / n, Missed: float64(now.Misses-before.Misses) / n,
		}
	}
	if w.seconds <= 0 {
		return w
	}
	r.Samples, r.Requests, r.Bytes = float64(w.samples)/w.seconds, float64(w.gets)/w.seconds, float64(w.bytes)/w.seconds
	if w.served() {
		w.feedStall = part(w.feed.Stall, w.feed.Age)
		r.Spare = part(w.feed.Credit+w.feed.Slots, w.feed.Age)
	}
	if w.opens > 0 || !w.served() {
		reading := w.seconds * float64(max(now.Readers, before.Readers, 1))
		if counted := now.ReaderTime - before.ReaderTime; w.seconds > steady && counted > 0 {
			reading = counted
		}
		// The feed reads through the same cache: its waiting is not the mount's.
		w.mountStall = part(now.Stall-before.Stall-w.feed.Fetch, reading)
	}
	r.Stall = max(w.feedStall, w.mountStall)
	return w
}

// served reports whether the feed had a session in the window, even if none was open at either end.
func (w *window) served() bool { return w.feed.Age > 0 }

// part returns a/b, limited to [0, 1].
func part(a, b float64) float64 { return min(1, max(0, a/b)) }

// orders counts the events of the streams between the snapshots.
func (w *window) orders(before Snapshot) {
	for _, s := range w.now.Streams {
		var was struct{ consumed, strays, moves int }
		for _, b := range before.Streams {
			if b.Name == s.Name {
				e := b.Events
				was.consumed, was.strays, was.moves = e.Consumed, b.Strays, e.Jumps+e.PrevEpochs+e.Found
			}
		}
		if s.Events.Consumed < was.consumed { // another stream of the same name
			was.consumed, was.strays, was.moves = 0, 0, 0
		}
		e := s.Events
		w.consumed += int64(e.Consumed - was.consumed)
		w.strays += int64(max(0, s.Strays-was.strays))
		w.moves += int64(max(0, e.Jumps+e.PrevEpochs+e.Found-was.moves))
	}
}

// ofFeed computes the differences of the feed's totals.
func (w *window) ofFeed(before *loader.Stats) {
	if w.now.Feed == nil {
		return
	}
	var was loader.Stats
	if before != nil {
		was = *before
	}
	a, b, d := was.Total, w.now.Feed.Total, &w.feed
	w.sessions = max(was.Open, w.now.Feed.Open)
	d.Age, d.Batches, d.Samples, d.Bad, d.Bytes = b.Age-a.Age, b.Batches-a.Batches, b.Samples-a.Samples, b.Bad-a.Bad, b.Bytes-a.Bytes
	d.Fetch, d.Decode, d.Stall, d.Send = b.Fetch-a.Fetch, b.Decode-a.Decode, b.Stall-a.Stall, b.Send-a.Send
	d.Credit, d.Reserve, d.Slots = b.Credit-a.Credit, b.Reserve-a.Reserve, b.Slots-a.Slots
}
