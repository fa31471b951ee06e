package loader

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/shoalfs/shoal/loader/feedpb"
)

// heldBatch is a batch in a slot, in the model.
type heldBatch struct {
	batch    *batch
	users    map[*session]bool // true: delivered
	complete bool
	built    bool // others may take it
}

// passModel says which slot may be used for what: by plain sets, without the pass's bookkeeping.
type passModel struct {
	slots map[uint32]*heldBatch // that are not free
	idle  []uint32              // in the order in which they became so
}

func (m *passModel) at(where place) *heldBatch {
	for _, h := range m.slots {
		if h.built && h.batch.at == where {
			return h
		}
	}
	return nil
}

func (m *passModel) refs(s *session) (n int) {
	for _, h := range m.slots {
		if _, ok := h.users[s]; ok {
			n++
		}
	}
	return n
}

// leave removes a session's claim.
func (m *passModel) leave(slot uint32, s *session) {
	h := m.slots[slot]
	delete(h.users, s)
	switch {
	case len(h.users) > 0:
	case !h.complete:
		h.built = false
	case h.built:
		m.idle = append(m.idle, slot)
	default:
		delete(m.slots, slot)
	}
}

// Whatever sessions do, a slot is reused when no session refers to it and its readers are done, and
// not before; a session gets at most its number; a batch that is there is not built again.
func TestPassStateMachine(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		shared := rapid.Bool().Draw(t, "shared")
		count := rapid.IntRange(1, 6).Draw(t, "slots")
		mem, err := newSlotMemory(count, slotBytes(100))
		if err != nil {
			t.Fatal(err)
		}
		srv := NewServer(func() Dataset { return nil }, Options{Readers: 1})
		defer srv.Close()
		p := srv.newPass(passKey{}, shared, mem)
		model := &passModel{slots: map[uint32]*heldBatch{}}
		var sessions []*session
		n := 1
		if shared {
			n = rapid.IntRange(2, 4).Draw(t, "sessions")
			p.sessions = n
		}
		for range n {
			s := &session{srv: srv, spec: &spec{batch: 1, world: 1}, window: newWindow(1, 1), pass: p, ctx: t.Context(),
				cancel: func(error) {}}
			limit := rapid.IntRange(1, count).Draw(t, "limit")
			srv.passMu.Lock()
			s.lease = p.lease(limit, s)
			srv.passMu.Unlock()
			sessions = append(sessions, s)
		}
		gone := map[*session]bool{}
		someone := func(t *rapid.T) *session {
			s := rapid.SampledFrom(sessions).Draw(t, "session")
			if gone[s] {
				t.Skip("gone")
			}
			return s
		}
		t.Repeat(map[string]func(*rapid.T){
			"claim": func(t *rapid.T) {
				s := someone(t)
				where := place{0, rapid.IntRange(0, 4).Draw(t, "place")}
				for _, h := range model.slots {
					if _, ok := h.users[s]; ok && h.batch.at == where {
						t.Skip("a session asks for each place once")
					}
				}
				total := int64(rapid.SampledFrom([]int{50, 100, 100, 100, 5000}).Draw(t, "bytes"))
				b := &batch{by: s, at: where, source: &source{at: where}, ctx: s.ctx, header: &feedpb.BatchHeader{}}
				there, full, fits := model.at(where), model.refs(s) >= s.lease.limit, total <= mem.room()
				if there != nil && full {
					if got, err := p.take(&ending{Context: ended(t.Context())}, s, where); !errors.Is(err,
						context.Canceled) {
						t.Fatalf("a session with all its slots took %v, %v", got, err)
					}
					return
				}
				if there != nil {
					if got, err := p.take(t.Context(), s, where); got != there.batch || err != nil {
						t.Fatalf("took %p, not the batch that is there: %v", got, err)
					}
					there.users[s] = false
					model.idle = slices.DeleteFunc(model.idle, func(i uint32) bool { return i == there.batch.slot })
					return
				}
				if fits && full {
					if got, err := p.claim(&ending{Context: ended(t.Context())}, s, b, total); !errors.Is(err,
						context.Canceled) {
						t.Fatalf("a session with all its slots got %v, %v", got, err)
					}
					return
				}
				none := len(model.slots) == count && len(model.idle) == 0
				s.impatient = none // else it would wait for others here
				got, err := p.claim(t.Context(), s, b, total)
				if got != b || err != nil {
					t.Fatalf("claimed %v, %v", got, err)
				}
				if b.source.at.cursor != where.cursor+1 {
					t.Fatal("the source was not advanced")
				}
				if !fits || none {
					if b.slot != 0 {
						t.Fatalf("slot %d for %d bytes, none free: %v", b.slot, total, none)
					}
					return
				}
				if h := model.slots[b.slot]; h != nil {
					if len(model.slots) < count || len(model.idle) == 0 || model.idle[0] != b.slot {
						t.Fatalf("slot %d was reused: %+v, idle %v", b.slot, h, model.idle)
					}
					model.idle = model.idle[1:]
				}
				p.mem.begin(b.slot, b.header)
				model.slots[b.slot] = &heldBatch{batch: b, users: map[*session]bool{s: false}, built: shared}
			},
			"complete": func(t *rapid.T) {
				h := some(t, model.slots, func(h *heldBatch) bool { return !h.complete })
				if rapid.Bool().Draw(t, "fails") {
					h.batch.failed = true
					h.built = false
				}
				p.completed(h.batch)
				if h.complete = true; len(h.users) == 0 {
					delete(model.slots, h.batch.slot)
				}
			},
			"deliver": func(t *rapid.T) {
				h := some(t, model.slots, func(h *heldBatch) bool { return h.complete })
				for _, s := range sessions {
					if given, ok := h.users[s]; ok && !given {
						if !s.lease.give(h.batch) {
							t.Fatal("not given")
						}
						h.users[s] = true
					}
				}
			},
			"release": func(t *rapid.T) {
				s, slot := someone(t), uint32(rapid.IntRange(0, count+1).Draw(t, "slot"))
				h := model.slots[slot]
				err := s.lease.release([]uint32{slot})
				if h == nil || !h.users[s] {
					if err == nil {
						t.Fatalf("slot %d was not the client's to give back", slot)
					}
					return
				}
				if err != nil {
					t.Fatal(err)
				}
				model.leave(slot, s)
			},
			"leave": func(t *rapid.T) {
				s := someone(t)
				if len(gone) == len(sessions)-1 {
					t.Skip("the last one stays")
				}
				if model.refs(s) == 0 || rapid.IntRange(0, 4).Draw(t, "not yet") > 0 {
					t.Skip("later, with something in its hands")
				}
				gone[s] = true
				connected := rapid.Bool().Draw(t, "connected")
				if connected {
					here, there := net.Pipe()
					defer there.Close()
					if _, err := srv.attach(s.lease.key, here, nil); err != nil {
						t.Fatal(err)
					}
				}
				if err := p.leave(s.lease); err != nil {
					t.Fatal(err)
				}
				drop := func(which func(delivered bool) bool) {
					// In the pass's order, which is a map's, batches become idle: take it over.
					var slots []uint32
					for slot, h := range model.slots {
						if given, ok := h.users[s]; ok && which(given) {
							slots = append(slots, slot)
						}
					}
					slices.SortFunc(slots, func(a, b uint32) int { return p.rank(a) - p.rank(b) })
					for _, slot := range slots {
						model.leave(slot, s)
					}
				}
				if connected {
					drop(func(delivered bool) bool { return !delivered })
					if n := model.refs(s); n != len(s.lease.refs) {
						t.Fatalf("%d slots are still the client's, %d counted", n, len(s.lease.refs))
					}
					s.lease.gone()
				}
				drop(func(bool) bool { return true })
			},
			"": func(t *rapid.T) {
				for _, s := range sessions {
					if model.refs(s) != len(s.lease.refs) {
						t.Fatalf("a session has %d slots, %d counted", model.refs(s), len(s.lease.refs))
					}
				}
				if len(p.free) != count-len(model.slots) {
					t.Fatalf("%d slots free, %d in use of %d", len(p.free), len(model.slots), count)
				}
				var idle []uint32
				for _, b := range p.idle {
					idle = append(idle, b.slot)
				}
				if slices.Sort(idle); !slices.Equal(idle, slices.Sorted(slices.Values(model.idle))) {
					t.Fatalf("idle %v, want %v", idle, model.idle)
				}
			},
		})
		for _, h := range model.slots {
			if !h.complete {
				p.completed(h.batch)
			}
		}
		for _, s := range sessions {
			if !gone[s] {
				if err := p.leave(s.lease); err != nil {
					t.Fatal(err)
				}
			}
		}
		if p.mem.data != nil || len(srv.leases) != 0 {
			t.Fatal("something is left")
		}
	})
}

// rank is where a slot stands among the idle ones.
func (p *pass) rank(slot uint32) int {
	return slices.IndexFunc(p.idle, func(b *batch) bool { return b.slot == slot })
}

// ending is over, but says so only when asked the second time.
type ending struct {
	context.Context
	asked bool
}

func (e *ending) Err() error {
	if !e.asked {
		e.asked = true
		return nil
	}
	return e.Context.Err()
}

func ended(ctx context.Context) context.Context {
	ctx, cancel := context.WithCancel(ctx)
	cancel()
	return ctx
}

func some(t *rapid.T, all map[uint32]*heldBatch, want func(*heldBatch) bool) *heldBatch {
	var list []uint32
	for _, slot := range slices.Sorted(maps.Keys(all)) {
		if want(all[slot]) {
			list = append(list, slot)
		}
	}
	if len(list) == 0 {
		t.Skip("none")
	}
	return all[rapid.SampledFrom(list).Draw(t, "batch")]
}

func TestSlotHeader(t *testing.T) {
	m, err := newSlotMemory(2, slotBytes(10_000))
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := m.close(); err != nil {
			t.Error(err)
		}
	}()
	if m.bytes != 4096+12288 || m.room() != 12288 || len(m.data) != 2*16384 {
		t.Errorf("slots of %d bytes, with room for %d", m.bytes, m.room())
	}
	h := &feedpb.BatchHeader{Epoch: 3, Rows: 7, Index: 9, TotalBytes: 5000, Planes: []*feedpb.Plane{
		{Name: "data", Dtype: "uint8", Shape: []uint64{7, 3, 4, 5}, Offset: 0, Length: 420},
		{Name: "a-very-long-name-of-a-plane", Dtype: "int64", Shape: []uint64{1, 2, 3, 4, 5}, Offset: 448, Length: 960},
	}}
	m.begin(2, h)
	m.begin(2, h)
	b := m.data[m.bytes:]
	want := "5348" + "4f414c534c54" + "01000000" + "00100000" + "02000000" + "01000000" + "0200000000000000" +
		"03000000" + "07000000" +
		"0900000000000000" + "8813000000000000" + "02000000" + "00000000" +
		"64617461000000000000000000000000" + "75696e743800000000000000" + "04000000" + "0000000000000000" +
		"a401000000000000" + "07000000030000000400000005000000" +
		"612d766572792d6c6f6e672d6e616d00" + "696e74363400000000000000" + "05000000" + "c001000000000000" +
		"c003000000000000" + "01000000020000000300000004000000"
	if got := fmt.Sprintf("%x", b[:192]); got != want {
		t.Errorf("header\n%s, want\n%s", got, want)
	}
	if m.finish(2); b[20] != 0 {
		t.Error("still being filled")
	}
	if m.begin(1, h); m.data[24] != 1 {
		t.Error("each slot counts for itself")
	}
}

func TestSlotSizeOfRaw(t *testing.T) {
	for name, c := range map[string]struct {
		sizes []int64
		rows  int
		want  int64
	}{
		"none":                           {nil, 10, 0},
		"equal":                          {[]int64{100, 100, 100}, 10, 1000},
		"different":                      {[]int64{90, 110}, 100, 10_600}, // the mean and 6 * 10 * sqrt(100)
		"one is most, so twice the mean": {append(make([]int64, 99), 10_000), 100, 20_000},
	} {
		t.Run(name, func(t *testing.T) {
			var z sizes
			z.count = len(c.sizes)
			for _, n := range c.sizes {
				z.sum += n
				z.most = max(z.most, n)
				z.sumSquares += float64(n) * float64(n)
			}
			if got := z.slotted(c.rows); got != c.want {
				t.Errorf("%d bytes, want %d", got, c.want)
			}
		})
	}
}
