package prefetch

import (
	"testing"

	"github.com/shoalfs/shoal/prefetch/order"
)

// A lead is what is staged and unread, however much was read beyond it. What was read unseen does not end it; what is
// on its way does, and what failed.
func TestLead(t *testing.T) {
	m := &world{limit: 1000}
	for range 20 {
		m.sizes = append(m.sizes, []int64{1, 1})
	}
	o := order.Index(order.Sequential(20))
	s := &walker{world: m, cur: newSitting(o)}
	w := &Walk{WalkOptions: WalkOptions{Source: s}, cur: phase{Route: Route{o, s.cur}, pos: 15}}
	for _, pos := range []int{0, 2, 3, 6} {
		s.cur.read[pos] = true
	}
	s.cur.head = 7
	gone, comes := map[int]bool{}, map[int]bool{}
	lead := func() int {
		return w.Lead(18, func(f, x int) (bool, bool) { return x == 0 || !gone[f] && !comes[f], comes[f] })
	}
	for _, step := range []struct {
		gone, comes, want int
	}{
		{gone: -1, comes: -1, want: 15}, // from 1 to 18, without 2, 3 and 6
		{gone: 16, comes: -1, want: 12},
		{gone: 1, comes: -1, want: 11}, // read unseen
		{gone: 9, comes: -1, want: 4},  // it failed
		{gone: -1, comes: 5, want: 1},
	} {
		gone[step.gone], comes[step.comes] = true, true
		if got := lead(); got != step.want {
			t.Errorf("%d is gone, and %d on its way: a lead of %d, want %d", step.gone, step.comes, got, step.want)
		}
	}
}
