package loader

import (
	"cmp"
	"slices"
	"time"

	"github.com/shoalfs/shoal/cache/objstore"
)

// Stats is a snapshot of the feed's counters, as its JSON shows them.
type Stats struct {
	Version   int            `json:"version"`          // of this schema, 1
	Listen    []string       `json:"listen,omitempty"` // addresses, if the daemon sets them
	Open      int            `json:"open_sessions"`
	Sessions  int64          `json:"sessions"`   // opened since the start
	Fenced    int64          `json:"fenced"`     // ended by a newer stream of the same session and rank
	Failed    int64          `json:"failed"`     // ended by an error, not counting clients that disconnected
	HeldBytes int64          `json:"held_bytes"` // memory of batches now, all slots included
	Workers   int            `json:"workers"`    // transforms that may run at once
	Working   int            `json:"working"`    // transforms that run now
	Total     SessionStats   `json:"total"`      // over all sessions since the start
	List      []SessionStats `json:"session_list"`
	Ended     []SessionStats `json:"ended_list"` // the last sessions that have ended, the latest at the end

	Decoding objstore.HistogramCounts `json:"-"` // how long the transform of a sample took
}

// keptSessions is how many ended sessions are reported: a client asks for its own after its last batch.
const keptSessions = 64

// SessionStats are the counters of one session, or of all of them.
type SessionStats struct {
	Session string  `json:"session,omitempty"`
	Client  string  `json:"client,omitempty"`
	Rank    int     `json:"rank"`
	World   int     `json:"world,omitempty"`
	Age     float64 `json:"age_seconds"` // time since it was opened
	Epoch   int64   `json:"epoch"`
	Batch   int64   `json:"batch"`             // number in the epoch of the next batch to send
	Packing *Waste  `json:"packing,omitempty"` // of documents into rows

	Batches     int64 `json:"batches"`
	Samples     int64 `json:"samples"` // valid ones
	Bad         int64 `json:"bad_samples"`
	InSlots     int64 `json:"slot_batches"`   // of batches, those delivered in shared memory
	Shared      int64 `json:"shared_batches"` // of batches, those built for another session of the same pass
	Bytes       int64 `json:"bytes"`          // of batches, sent
	SourceBytes int64 `json:"source_bytes"`   // of stored samples, read

	Fetch   float64 `json:"fetch_seconds"`   // waiting for the engine, summed over parallel readers
	Decode  float64 `json:"decode_seconds"`  // in the transform, summed over parallel workers
	Stall   float64 `json:"stall_seconds"`   // the client had credit and no batch was ready
	Send    float64 `json:"send_seconds"`    // writing to the connection, flow control included
	Credit  float64 `json:"credit_seconds"`  // waiting for credit: the client is the slower side
	Reserve float64 `json:"reserve_seconds"` // waiting for memory, slots included
	Slots   float64 `json:"slot_seconds"`    // the client wanted a batch and had released no slot
}

func (s *SessionStats) add(open *session) {
	c := &open.count
	s.Age += time.Since(open.opened).Seconds()
	s.InSlots += c.inSlots.Load()
	s.Shared += c.shared.Load()
	s.Slots += open.window.slots.Sum().Seconds()
	s.Batches += c.batches.Load()
	s.Samples += c.samples.Load()
	s.Bad += c.bad.Load()
	s.Bytes += c.bytes.Load()
	s.SourceBytes += c.sourceBytes.Load()
	s.Fetch += c.fetch.Sum().Seconds()
	s.Decode += c.decode.Sum().Seconds()
	s.Stall += open.window.stall.Sum().Seconds()
	s.Send += c.send.Sum().Seconds()
	s.Credit += c.credit.Sum().Seconds()
	s.Reserve += c.reserve.Sum().Seconds()
}

func (s *session) stats() SessionStats {
	out := SessionStats{Session: s.spec.session, Client: s.spec.client, Rank: s.spec.rank, World: s.spec.world,
		Epoch: s.count.epoch.Load(), Batch: s.count.index.Load()}
	if p, ok := s.ds.(*Packed); ok {
		out.Packing = &p.waste
	}
	out.add(s)
	return out
}

// Stats returns the counters as of now.
func (s *Server) Stats() Stats {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := Stats{Version: 1, Open: len(s.sessions), Sessions: s.counters.opened, Fenced: s.counters.fenced,
		Failed: s.counters.failed, HeldBytes: s.counters.held.Load(), Workers: cap(s.cpu), Working: len(s.cpu),
		Decoding: s.decoding.Counts(), Total: s.counters.ended, List: []SessionStats{},
		Ended: append([]SessionStats{}, s.counters.lately...)}
	for open := range s.sessions {
		out.List = append(out.List, open.stats())
		out.Total.add(open)
	}
	slices.SortFunc(out.List, func(a, b SessionStats) int {
		return cmp.Or(cmp.Compare(a.Session, b.Session), cmp.Compare(a.Rank, b.Rank))
	})
	return out
}
