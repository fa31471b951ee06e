package engine

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func putPlan(t testing.TB, e *Engine, paths []string) {
	t.Helper()
	if err := e.PutPlan("default", []byte(strings.Join(paths, "\n"))); err != nil {
		t.Fatal(err)
	}
}

func shuffled(paths []string, seed uint64) []string {
	out := append([]string(nil), paths...)
	rand.New(rand.NewPCG(seed, 0)).Shuffle(len(out), func(i, j int) { out[i], out[j] = out[j], out[i] })
	return out
}

// The next epoch's plan is written while this one is read: what is staged stays, the rest is still
// fetched, and the reader never waits, nor is anything fetched twice.
func TestPlanWaitsForItsTurn(t *testing.T) {
	dir, paths := folder(t, 4, 50)
	e := openEngine(t, dir, t.TempDir(), "auto")
	defer closeEngine(t, e)
	first, second := shuffled(paths, 1), shuffled(paths, 2)
	putPlan(t, e, first)
	waitFor(t, "the plan is staged", func() bool { return e.Stats().Lead == len(paths) })
	for _, p := range first[:100] {
		read(t, e, dir, p)
	}
	// One is written by mistake, and another in its place.
	putPlan(t, e, shuffled(paths, 3))
	putPlan(t, e, second)
	if s := e.Stats(); s.Lead != 100 || s.Order.Position != 100 || s.Order.Epoch != 0 {
		t.Errorf("the plan in progress is not what is followed: %+v, lead %d", s.Order, s.Lead)
	}
	if text := string(e.orders.text()); !strings.Contains(text, "another plan was written") {
		t.Errorf("order: %s", text)
	}
	for _, p := range append(first[100:], second...) {
		read(t, e, dir, p)
	}
	s := e.Stats()
	if s.Misses+s.Joined != 0 || s.GetRequests-s.Hedges.Sent != int64(len(paths)) {
		t.Errorf("%d misses, %d joined, %d GETs for %d files", s.Misses, s.Joined, s.GetRequests, len(paths))
	}
	if st := s.Streams[0]; st.Epoch != 1 || st.Consumed != len(paths) || st.Events.NextEpochs != 1 ||
		st.Reanchored.Unread != 0 {
		t.Errorf("%+v, %+v", st, st.Reanchored)
	}
	if text := string(e.orders.text()); strings.Contains(text, "another plan was written") ||
		!strings.Contains(text, "went on to epoch 1, at 20") {
		t.Errorf("order: %s", text)
	}
	// The same again is another epoch's, which is expected at its beginning.
	putPlan(t, e, second)
	waitFor(t, "the plan is staged again", func() bool {
		s := e.Stats()
		return s.Order.Epoch == 2 && s.Lead == len(paths)
	})
	for _, p := range second[:50] {
		read(t, e, dir, p)
	}
	if st := e.Stats().Streams[0]; st.Epoch != 2 || st.Consumed != 50 || st.Events.Restarts != 0 {
		t.Errorf("%+v", st)
	}
}

// However plans are written and read, extended, replaced and repeated, the ledger gets back what they held,
// and the plan in force is the last one that was taken.
func TestPlansModel(t *testing.T) {
	dir, paths := folder(t, 3, 20)
	e := openEngine(t, dir, t.TempDir(), "auto")
	ledger := e.cache.Ledger()
	plan, at := []string(nil), 0 // the next check goes on from where the last one ended
	rapid.Check(t, func(rt *rapid.T) {
		for range rapid.IntRange(1, 12).Draw(rt, "steps") {
			switch rapid.SampledFrom([]string{"write", "append", "bad", "read", "skip"}).Draw(rt, "step") {
			case "write":
				plan, at = shuffled(paths,
					rapid.Uint64Range(0, 5).Draw(rt, "seed"))[:rapid.IntRange(1, len(paths)).Draw(rt, "length")], 0
				putPlan(t, e, plan)
			case "append":
				plan = append(append([]string(nil), plan...),
					shuffled(paths, 9)[:rapid.IntRange(1, 30).Draw(rt, "more")]...)
				putPlan(t, e, plan)
			case "bad":
				if err := e.PutPlan("default", []byte(paths[0]+"\nnone\n")); err == nil {
					rt.Fatal("a bad plan was taken")
				}
			case "read":
				for n := rapid.IntRange(1, 60).Draw(rt, "reads"); n > 0 && at < len(plan); n-- {
					read(t, e, dir, plan[at])
					at++
				}
			case "skip":
				at += rapid.IntRange(1, 20).Draw(rt, "skipped")
			}
			if plan == nil {
				continue
			}
			if got, err := e.Get("plans/default"); err != nil || string(got) != strings.Join(plan, "\n") {
				rt.Fatalf("the plan in force has %d bytes, %v", len(got), err)
			}
			if n := len(e.orders.mounted()); n != 1 {
				rt.Fatalf("%d streams", n)
			}
		}
		if len(plan) > 500 {
			plan, at = paths, 0
			putPlan(t, e, plan)
		}
	})
	closeEngine(t, e)
	if used := ledger.Used(); used != 0 {
		t.Errorf("%d bytes are still reserved", used)
	}
}

// A reader in an epoch far from the expected one is found, from either side.
func TestSearchEpoch(t *testing.T) {
	dir, paths := folder(t, 4, 60)
	for _, c := range []struct{ expected, reads int }{{0, 9}, {40, 3}, {40, 90}} {
		e := openEngine(t, dir, t.TempDir(), fmt.Sprintf("torch:seed=3,epoch=%d", c.expected))
		spec := e.order()
		o, err := spec.Order(len(paths), c.reads)
		if err != nil {
			t.Fatal(err)
		}
		for pos := range 60 {
			read(t, e, dir, paths[o.At(pos)])
		}
		waitFor(t, "the epoch is found", func() bool { return e.Stats().Order.Epoch == c.reads })
		closeEngine(t, e)
	}
}
