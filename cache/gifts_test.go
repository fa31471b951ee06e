package cache

import (
	"context"
	"errors"
	"maps"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// modelGift is what the rules of gifts say of one.
type modelGift struct {
	extent uint32
	later  int // gifts that came after it
}

// Gifts are made, asked for, and leave memory, in any order: what is counted is what the rules say.
func TestGiftsModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		g := gifts{waits: map[uint32]int{}, judged: fewGifts, good: fewGifts}
		var all []*modelGift // in the order in which they were made
		here, judged, good := map[uint32]bool{}, fewGifts, fewGifts
		count := func(m *modelGift, isGood bool) {
			all = slices.DeleteFunc(all, func(o *modelGift) bool { return o == m })
			if judged >= 2*fewGifts {
				judged, good = judged/2, (good+b2i(isGood))/2
			} else {
				good += b2i(isGood)
			}
			judged++
		}
		open := func(e uint32) *modelGift {
			for _, m := range all {
				if m.extent == e {
					return m
				}
			}
			return nil
		}
		extent := rapid.Uint32Range(0, 20)
		for range rapid.IntRange(1, 400).Draw(t, "steps") {
			e := extent.Draw(t, "extent")
			switch rapid.IntRange(0, 4).Draw(t, "step") {
			case 0, 1:
				if here[e] { // who asks gets it
					continue
				}
				most := mostGifts
				if giftPays*good < judged {
					most = mostGifts / GiftSample
				}
				if m := open(e); m != nil {
					count(m, false)
				}
				for _, m := range all {
					m.later++
				}
				all = append(all, &modelGift{extent: e})
				here[e] = true
				g.made(e, func(e uint32) bool { return here[e] })
				// Those before the first that is still waited for are judged, and of those behind it the ones that are waited for too long.
				for _, m := range slices.Clone(all) {
					if m.later < most && here[m.extent] {
						break
					}
					count(m, false)
				}
			case 2, 3:
				if m := open(e); here[e] && m != nil {
					count(m, true)
				}
				if here[e] {
					g.asked(e)
				}
			case 4:
				delete(here, e)
			}
			waits := map[uint32]bool{}
			for _, m := range all {
				waits[m.extent] = true
			}
			known := slices.Collect(maps.Keys(g.waits))
			if g.judged != judged || g.good != good || g.pay() != (giftPays*good >= judged) || len(known) != len(waits) ||
				slices.ContainsFunc(known, func(e uint32) bool { return !waits[e] }) || g.open.Load() != int64(len(waits)) {
				t.Fatalf("%d of %d are good, %d are open, want %d of %d and %v", g.good, g.judged, len(g.waits), good, judged, waits)
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
	if n := v.gifts.open.Load(); n != 0 {
		t.Errorf("%d gifts are open", n)
	}
	_, release, err := v.Serve(context.Background(), 1, 0, 1000, time.Time{}, true)
	if err != nil {
		t.Fatal(err)
	}
	release()
}
