package sim

import "math/rand/v2"

// sharing is what the nodes of a job have in common: its order, their caches, and the near tier. One of the nodes is
// simulated. The others do as it does, each with its part of the order, so they have read as far as it has.
type sharing struct {
	near bits // extents that the near tier has; nil: there is none
	at   int  // position of the whole order up to which the others' reads are known
}

func (h *sharing) init(s *simulation) {
	if s.Near == nil {
		return
	}
	h.near = newBits(len(s.volume.states))
	for e := range s.volume.states {
		if s.Warm {
			h.near.set(uint32(e))
		}
	}
}

// others returns the lines to the near tier and to the peers; zero without.
func (c *Config) others() (near, peers Line) {
	if c.Near != nil {
		near = *c.Near
	}
	if c.Peers != nil {
		peers = c.Peers.Line
	}
	return near, peers
}

func (c *Config) nodes() int {
	if c.Peers == nil {
		return 1
	}
	return c.Peers.Nodes
}

// owns returns which samples the node owns: an equal part, by a hash of what the kept set is chosen by.
func (s *simulation) owns() func(sample int) bool {
	n, key := uint64(s.nodes()), s.key()
	return func(sample int) bool {
		return n == 1 || rand.NewPCG(key(sample), 0).Uint64()%n == 0 // another hash than the kept set's
	}
}

// source says who answers a request for an extent that the node's own cache lacks. What the next epoch needs is fetched
// in this one by the node that reads it now, however early the request for the next is sent.
func (s *simulation) source(p *reader, sample int, e uint32) (from source) {
	soon := s.nodes() > 1 && p == s.stream.next && s.whole(s.stream.cur.epoch).Find(sample, 0) >= 0
	if s.sharing.near != nil && (soon || s.sharing.near.has(e)) {
		from.at = atNear
	}
	if k := s.volume.cache; (soon || !k.owns(sample)) && k.admit(sample) {
		if soon || k.kept.has(e) {
			return source{at: atPeer}
		}
		from.via = true
	}
	return from
}

// follow records what the others have fetched while the node came to a position of its part.
func (s *simulation) follow(frontier int) {
	if s.nodes() == 1 {
		return
	}
	h, mine, of := &s.sharing, s.Accelerators, s.Accelerators*s.nodes()
	whole := s.whole(s.stream.cur.epoch)
	until := whole.Len()
	if frontier < s.stream.cur.order.Len() {
		until = frontier / mine * of // the round of a position begins there
	}
	for ; h.at < until; h.at++ {
		if h.at%of < mine {
			continue
		}
		sample := whole.At(h.at)
		for x := range s.Sizes.Extents(sample) {
			e := s.volume.extent(sample, x)
			s.volume.cache.landed(sample, e)
			if h.near != nil {
				h.near.set(e)
			}
		}
	}
}

// put records that what a request has brought from the store is in the near tier.
func (s *simulation) put(r *request) {
	if s.sharing.near == nil {
		return
	}
	for _, f := range r.files {
		s.sharing.near.set(s.volume.extent(int(f), int(r.extent)))
	}
}

func (e *Epoch) count(r *request) {
	switch r.from.at {
	case atStore:
		e.Requests++
		e.Bytes += r.bytes
	case atNear:
		e.Near.Requests++
		e.Near.Bytes += r.bytes
	}
	if r.from.via || r.from.at == atPeer {
		e.Peers.Requests++
		e.Peers.Bytes += r.bytes
	}
}

// ofAll makes the counts of one node those of all, whose samples are given.
func (e *Epoch) ofAll(samples int) {
	if samples == e.Samples {
		return
	}
	times := float64(samples) / float64(e.Samples)
	for _, n := range []*int64{&e.Bytes, &e.Requests, &e.Near.Bytes, &e.Near.Requests, &e.Peers.Bytes,
		&e.Peers.Requests, &e.DiskBytes, &e.KeepHits, &e.RingHits} {
		*n = int64(float64(*n) * times)
	}
	e.Samples = samples
	e.Waits = int64(samples) - e.KeepHits - e.RingHits
}

// bits is a set of extents, or of positions.
type bits []uint64

func newBits(n int) bits { return make(bits, (n+63)/64) }

func (b bits) has(e uint32) bool { return b[e/64]>>(e%64)&1 != 0 }
func (b bits) set(e uint32)      { b[e/64] |= 1 << (e % 64) }
