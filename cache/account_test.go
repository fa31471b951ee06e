package cache

import (
	"context"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// Whatever two of those who fetch ahead do, what is on their accounts is what is staged unread, each extent
// once; and in the end nothing.
func TestAccountsModel(t *testing.T) {
	const files, size = 12, 64 << 10
	sizes := slices.Repeat([]int{size}, files)
	rapid.Check(t, func(rt *rapid.T) {
		f := newFixture(t, sizes...)
		c, v := f.open(t, 8*size, "", 0)
		accounts := []*Account{c.NewAccount(1), c.NewAccount(3)}
		file := rapid.IntRange(0, files-1)
		account := func() *Account { return rapid.SampledFrom(accounts).Draw(rt, "account") }
		landed := make(chan error, 1)
		rt.Repeat(map[string]func(*rapid.T){
			"prefetch": func(rt *rapid.T) {
				if v.Prefetch(account(), file.Draw(rt, "file"), 0, time.Time{}, func(_ int, err error) {
					landed <- err
				}) == Started {
					if err := <-landed; err != nil {
						rt.Fatal(err)
					}
				}
			},
			"claim": func(rt *rapid.T) { v.Claim(account(), file.Draw(rt, "file"), 0) },
			"hand":  func(rt *rapid.T) { v.Hand(account(), file.Draw(rt, "file")) },
			"spend": func(rt *rapid.T) { v.Spend(file.Draw(rt, "file")) },
			"read": func(rt *rapid.T) {
				if _, err := v.ReadAt(context.Background(), file.Draw(rt, "file"), make([]byte, 10), 0); err != nil {
					rt.Fatal(err)
				}
			},
			"take back": func(rt *rapid.T) {
				to := account()
				c.TakeBack(account(), size, rapid.SampledFrom([]float64{0, 1.25, 4}).Draw(rt, "over"), heir{to})
			},
			"": func(rt *rapid.T) {
				c.ring.mu.Lock()
				defer c.ring.mu.Unlock()
				idle := c.ring.spent.bytes + c.ring.clean.bytes
				for i := range c.ring.rest {
					idle += c.ring.rest[i].bytes
				}
				if got := c.ring.idle.Load(); got != idle {
					rt.Fatalf("%d bytes are idle, and %d are counted", idle, got)
				}
				var want [2]int64
				for _, e := range c.ring.entries {
					if i := slices.Index(accounts, e.account); i >= 0 {
						want[i] += e.buf.size
						if e.spent || e.in != &accounts[i].staged {
							rt.Fatal("an entry that is spent is on an account")
						}
					} else if !e.spent && e.left == size {
						rt.Fatal("an entry that nobody has begun to read is on no account")
					}
				}
				for i, a := range accounts {
					if a.Held() != want[i] {
						rt.Fatalf("account %d holds %d bytes, and %d are staged for it", i, a.Held(), want[i])
					}
				}
			},
		})
		for _, a := range accounts {
			c.CloseAccount(a)
			if a.Held() != 0 {
				rt.Fatalf("%d bytes on a closed account", a.Held())
			}
		}
		closeCache(t, c)
	})
}

// stage fetches the first n files ahead, one after the other.
func stage(t *testing.T, v *Volume, a *Account, n int) {
	t.Helper()
	landed := make(chan error)
	for file := range n {
		if out := v.Prefetch(a, file, 0, time.Time{}, func(_ int, err error) { landed <- err }); out != Started {
			t.Fatal(out)
		}
		if err := <-landed; err != nil {
			t.Fatal(err)
		}
	}
}

// Bytes are taken back only from who holds much more, the last first; the owner is told.
func TestTakeBack(t *testing.T) {
	const size = 64 << 10
	f := newFixture(t, slices.Repeat([]int{size}, 8)...)
	c, v := f.open(t, 10*size, "", 0)
	defer closeCache(t, c)
	var lost []int
	c.OnLost(func(_ *Volume, r Range) { lost = append(lost, r.File) })
	a, b := c.NewAccount(1), c.NewAccount(1)
	stage(t, v, a, 8)
	nobody := heir{}
	c.TakeBack(b, size, 9, nobody)
	if len(lost) != 0 {
		t.Errorf("8 are not 9 times as many as 1: %v", lost)
	}
	c.TakeBack(b, 2*size, 4, nobody)
	if !slices.Equal(lost, []int{7, 6}) {
		t.Errorf("lost %v", lost)
	}
	c.TakeBack(b, size, 1.25, heir{b}) // b wants them too
	if len(lost) != 2 || b.Held() < 2*size || a.Held() < 3*size {
		t.Errorf("lost %v, held %d and %d", lost, a.Held(), b.Held())
	}
}

// A batch gets its memory though all of that holds what was fetched ahead, its own samples for one, but nothing gives
// way to a batch that waits for others.
func TestBatchTakesWhatIsAhead(t *testing.T) {
	const size = 64 << 10
	f := newFixture(t, slices.Repeat([]int{size}, 8)...)
	c, v := f.open(t, 10*size, "", 0)
	defer closeCache(t, c)
	var lost []int
	c.OnLost(func(_ *Volume, r Range) { lost = append(lost, r.File) })
	a := c.NewAccount(1)
	stage(t, v, a, 8)
	if err := c.ReserveBatch(t.Context(), 2*size); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(lost, []int{7, 6}) {
		t.Errorf("lost %v, want the latest", lost)
	}
	if n := c.ledger.missing(4 * size); n != 0 {
		t.Errorf("%d bytes give way, and only batches can", n)
	}
	c.Ledger().Release(2*size, ForBatches)
}

// heir is an account that wants everything, and whose owners need the files in the order of their numbers.
type heir struct{ to *Account }

func (heir) Needed(_ *Account, _ *Volume, file int) int { return file }
func (h heir) Heir(*Volume, int) *Account               { return h.to }
