package cache

import (
	"slices"
	"testing"
)

// staysOf reads 64 files through memory for 16 of them, and returns which are in it then.
func staysOf(t *testing.T, ordered bool) (stays []int) {
	t.Helper()
	const size = 64 << 10
	f := newFixture(t, slices.Repeat([]int{size}, 64)...)
	c, v := f.open(t, 16*footprint(size), "", 0)
	defer closeCache(t, c)
	v.rankOf = func(file, _ int) uint8 { return uint8(4 * (file * 29 % 64)) }
	if ordered {
		defer c.CloseAccount(c.NewAccount(1))
	}
	for file := range 64 {
		checkFiles(t, v, f.bytes, file)
		eventually(t, "the flight has let go of what it brought", func() (free bool) {
			free = true
			c.ring.each(func(e *entry) { free = free && e.buf.refs.Load() == 1 })
			return free
		})
	}
	for file := range 64 {
		if v.Where(file, 0) > OnWay {
			stays = append(stays, file)
		}
	}
	return stays
}

// Without a known order what was read last stays in memory. With one it is what has the lowest ranks, whenever it was
// read, beside the last one.
func TestStaysInMemory(t *testing.T) {
	if got := staysOf(t, false); !slices.Equal(got, span(48, 64)) {
		t.Errorf("no order: %v", got)
	}
	var low []int
	for file := range 63 {
		if file*29%64 < 15 {
			low = append(low, file)
		}
	}
	if got := staysOf(t, true); !slices.Equal(got, append(low, 63)) {
		t.Errorf("ordered: %v, want %v and 63", got, low)
	}
}

// What is fetched ahead may take all of what is idle, but leaves an eighth of memory to it and to readers who wait.
func TestLedgerRoom(t *testing.T) {
	l := newLedger(80)
	idle := int64(0)
	l.idle = func() int64 { return idle }
	l.reclaim = func(need int64, _ Class) {
		freed := min(need, idle)
		idle -= freed
		l.Release(freed, ForDemand)
	}
	if !l.TryReserve(30, ForDemand) || l.TryReserve(41, ForPrefetch) || !l.TryReserve(40, ForPrefetch) {
		t.Fatal("of 80, 70 are for what is fetched ahead, with what others have")
	}
	idle = 30
	if room, free := l.PrefetchRoom(); room != 30 || free != 10 {
		t.Errorf("room for %d, %d of it free", room, free)
	}
	if l.TryReserve(31, ForPrefetch) || idle != 30 {
		t.Errorf("what does not fit took something: %d idle", idle)
	}
	if !l.TryReserve(30, ForPrefetch) || idle != 10 {
		t.Errorf("%d idle", idle)
	}
	if !l.TryReserve(10, ForDemand) || idle != 0 {
		t.Errorf("%d idle", idle)
	}
	l.Release(70, ForPrefetch)
	l.Release(10, ForDemand)
}
