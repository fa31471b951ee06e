package cache

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// An owner whose memory has room for some extents, while others read: in step, or some extents apart, all or each its
// part. It fetches for them where that saves at least as many reads as it makes detours, and finds out when that
// changes.
func TestGiftsPay(t *testing.T) {
	const given, room = 6000, 600
	l := newLedger(1 << 30)
	var g gifts
	g.most.Store(given / 4)
	g.begin(true)
	memory, oldest := map[uint32]*buffer{}, []uint32{}
	detours := 0 // fetches for another node
	put := func(e uint32, of *phase) *buffer {
		if !l.TryReserve(footprint(1), ForDemand) {
			t.Fatal("no memory")
		}
		if oldest = append(oldest, e); len(oldest) > room {
			memory[oldest[0]].Release()
			delete(memory, oldest[0])
			oldest = oldest[1:]
		}
		b := newBuffer(l, 1, ForDemand)
		b.lent, b.detour, memory[e] = of, of != nil, b
		return b
	}
	own := uint32(given)
	ask := func(e uint32) {
		own++
		put(own, nil) // what the owner reads itself passes through its memory
		b := memory[e]
		if b == nil {
			if !g.phase.Load().pays && e%GiftSample != 0 {
				return
			}
			detours++
			b = put(e, g.phase.Load())
		}
		b.wanted(false)
	}
	for _, test := range []struct {
		name   string
		behind []int // the first reader, in extents; nil: an epoch has each extent once
		epochs int
		pays   bool
		most   int // fetches
	}{
		{"in step", []int{0, 0, 0}, 2, true, 2 * given},
		{"apart by what memory holds", []int{0, 0, room / 8}, 2, true, 2 * given},
		{"one far ahead of three in step", []int{0, 2 * room, 2 * room, 2 * room}, 2, true, 4 * given},
		{"each its part", nil, 2, false, given + room},
		{"each its part, as before", nil, 10, false, 11 * given / GiftSample},
		{"in step again", []int{0, 0, 0}, 3, true, 3 * given},
		{"all far apart", []int{0, 2 * room, 4 * room}, 3, false, 3 * given},
	} {
		if detours = 0; test.behind == nil {
			test.behind = []int{0}
		}
		for range test.epochs {
			order := rand.Perm(given)
			for i := range given + slices.Max(test.behind) {
				for _, n := range test.behind {
					if i >= n && i-n < given {
						ask(uint32(order[i-n]))
					}
				}
			}
		}
		if pays := g.phase.Load().pays; pays != test.pays || detours > test.most {
			t.Errorf("%s: it pays: %v, after %d fetches, want %v after at most %d",
				test.name, pays, detours, test.pays, test.most)
		}
	}
}

// Nodes that read the same: what the owner does not keep it fetches once for all. Nodes that read each its part: it
// says no, but for the sample, until others ask for that again.
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
	_, release, err := v.Serve(context.Background(), 1, 0, 1000, time.Time{}, true)
	if err != nil {
		t.Fatal(err)
	}
	release()
}
