package cache

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// modelGift is what the rules of gifts say of an extent that was asked for.
type modelGift struct {
	extent  uint32
	state   string
	counted bool
}

// Others ask for extents, which are fetched and leave memory, and are asked for here, in any order: what is counted is what the
// rules say.
func TestGiftsModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		g := newGifts()
		g.most = rapid.SampledFrom([]int{1, 3, 10, 300, 400}).Draw(t, "most")
		var all []*modelGift // in the order in which they were asked for; all are looked at
		here, judged, good := map[uint32]bool{}, fewGifts, fewGifts
		most := func() int {
			if giftPays*good >= judged {
				return g.most
			}
			return (g.most + GiftSample - 1) / GiftSample
		}
		latest := func(e uint32) *modelGift {
			for _, m := range slices.Backward(all) {
				if m.extent == e {
					return m
				}
			}
			return &modelGift{}
		}
		judge := func() {
			for i, m := range all {
				waits := m.state == "asked" || m.state == "open" && here[m.extent]
				if m.counted || waits && len(all)-i <= most() {
					if waits && !m.counted {
						break
					}
					continue
				}
				m.counted = true
				if m.state == "asked" || m.state == "found" {
					continue
				}
				if judged >= 2*fewGifts {
					judged, good = judged/2, good/2
				}
				judged++
				good += b2i(m.state == "wanted")
			}
			all = all[max(0, len(all)-most()):]
		}
		extent := rapid.Uint32Range(0, 20)
		for range rapid.IntRange(1, 1500).Draw(t, "steps") {
			e := extent.Draw(t, "extent")
			m := latest(e)
			switch rapid.IntRange(0, 5).Draw(t, "step") {
			case 0, 1, 2: // another node asks
				switch {
				case m.state == "asked", m.state == "open" && here[e]:
					m.state = "wanted"
				case here[e] && m.state != "":
				default:
					if m.state == "open" {
						m.state = "lost"
					}
					all = append(all, &modelGift{extent: e, state: map[bool]string{true: "found", false: "asked"}[here[e]]})
				}
				g.ask(e, func(e uint32) bool { return here[e] })
				judge()
			case 3: // it is fetched
				if !here[e] {
					if here[e] = true; m.state == "asked" {
						m.state = "open"
					}
					g.turn(e, asked, open)
				}
			case 4: // a reader here asks
				if here[e] {
					if m.state == "open" {
						m.state = "wanted"
					}
					g.again(e)
				}
			case 5:
				delete(here, e)
			}
			waits := 0
			for _, m := range all {
				waits += b2i(!m.counted)
			}
			if g.judged != judged || g.good != good || g.stopped.Load() != (giftPays*good < judged) || len(g.looked) != len(all) ||
				len(g.at) > len(all) || g.waits.Load() != int64(waits) {
				t.Fatalf("%d of %d are good, %d of %d wait, want %d of %d and %d of %d", g.good, g.judged, g.waits.Load(), len(g.looked),
					good, judged, waits, len(all))
			}
		}
	})
}

func b2i(b bool) int {
	if b {
		return 1
	}
	return 0
}

// Nodes that read the same: what the owner does not keep it fetches once for all. Nodes that read each its part: it says no,
// but for the sample, until others ask for that again.
func TestGifts(t *testing.T) {
	const files = 600
	f := newFixture(t, slices.Repeat([]int{1000}, files)...)
	c, v := f.open(t, 64<<20, "", 0)
	defer closeCache(t, c)
	p := &peerNode{all: []*peerNode{nil}, sampled: func(file int) bool { return file%10 == 0 }}
	owner := func(int, int) int { return 0 }
	p.owner.Store(&owner)
	v.SetPeers(p)
	v.SetAdmit(func(int, int) bool { return false })
	ask := func(file int) error {
		v.Asked(file, 0)
		_, release, err := v.Serve(context.Background(), file, 0, 1000, time.Time{}, false)
		if err == nil {
			release()
		}
		return err
	}
	for file := range 100 {
		for range 3 {
			if err := ask(file); err != nil {
				t.Fatal(err)
			}
		}
	}
	if n := f.gate.reads.Load(); n != 100 || !v.Gives() {
		t.Errorf("%d fetches of 100 files, gives: %v", n, v.Gives())
	}
	refused := 0
	for file := 100; file < files; file++ {
		c.ring.drop(nil)
		switch err := ask(file); {
		case errors.Is(err, ErrNotHeld) && file%10 > 0:
			refused++
		case err != nil:
			t.Fatalf("file %d: %v", file, err)
		}
	}
	if refused < 300 || v.Gives() {
		t.Errorf("%d refused, gives: %v", refused, v.Gives())
	}
	for file := 0; file < files && !v.Gives(); file += 10 {
		if err := errors.Join(ask(file), ask(file)); err != nil {
			t.Fatal(err)
		}
	}
	if !v.Gives() {
		t.Error("what is asked for again is not given")
	}
	// A reader's own fetch is no gift, and others get it from memory.
	c.ring.drop(nil)
	checkFiles(t, v, f.bytes, 1)
	if n := v.gifts.waits.Load(); n != 0 {
		t.Errorf("%d gifts are open", n)
	}
	_, release, err := v.Serve(context.Background(), 1, 0, 1000, time.Time{}, true)
	if err != nil {
		t.Fatal(err)
	}
	release()
}

// Memory has everything, and each epoch another node reads an extent: that is no reason to fetch for others. Several that read the same
// are, also if they are a few extents apart.
func TestGiftsOfLaterEpochs(t *testing.T) {
	const given = 600
	for readers, want := range map[int]bool{1: false, 3: true} {
		g, here, asks := newGifts(), map[uint32]bool{}, 0
		g.most = given / 4
		for range 20 {
			order := rand.Perm(given)
			for i := range order {
				for r := range readers {
					e := uint32(order[max(0, i-40*r)])
					if e%GiftSample != 0 && g.stopped.Load() {
						continue
					}
					if g.ask(e, func(e uint32) bool { return here[e] }); !here[e] {
						g.turn(e, asked, open)
					}
					here[e] = true
					asks++
				}
			}
		}
		if g.stopped.Load() == want || !want && asks > 2*given {
			t.Errorf("%d readers: it pays: %v, after %d asks", readers, !g.stopped.Load(), asks)
		}
	}
}
