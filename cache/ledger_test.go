package cache

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"
)

// A ledger under random reservations never passes a limit, loses no byte, and ends at zero.
func TestLedgerModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		limit := rapid.Int64Range(64, 4096).Draw(t, "limit")
		l := newLedger(limit)
		type hold struct {
			n int64
			c Class
		}
		var held []hold
		var used [numClasses]int64
		total := int64(0)
		t.Repeat(map[string]func(*rapid.T){
			"try": func(t *rapid.T) {
				c := Class(rapid.IntRange(0, int(numClasses)-1).Draw(t, "class"))
				n := rapid.Int64Range(1, limit).Draw(t, "n")
				want := total+n <= limit
				if c != ForDemand {
					want = total+n <= limit-limit/8
				}
				if c == ForBatches {
					want = want && used[c]+n <= limit/2
				}
				if got := l.TryReserve(n, c); got != want {
					t.Fatalf("TryReserve(%d, %d) = %v with %d of %d used", n, c, got, total, limit)
				}
				if want {
					held, total, used[c] = append(held, hold{n, c}), total+n, used[c]+n
				}
			},
			"release": func(t *rapid.T) {
				if len(held) == 0 {
					t.Skip()
				}
				i := rapid.IntRange(0, len(held)-1).Draw(t, "i")
				h := held[i]
				held = append(held[:i:i], held[i+1:]...)
				l.Release(h.n, h.c)
				total, used[h.c] = total-h.n, used[h.c]-h.n
			},
			"": func(t *rapid.T) {
				if l.Used() != total || l.Used() > limit {
					t.Fatalf("used %d, model %d, limit %d", l.Used(), total, limit)
				}
			},
		})
	})
}

func TestReserveWaitsAndIsServedInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLedger(80)
		if !l.TryReserve(80, ForDemand) {
			t.Fatal("the first reservation must fit")
		}
		served := make(chan string, 2)
		for _, c := range []struct {
			name  string
			class Class
		}{{"batch", ForBatches}, {"demand", ForDemand}} {
			go func() {
				if err := l.reserve(t.Context(), 10, c.class, func() {}); err != nil {
					t.Error(err)
				}
				served <- c.name
			}()
			synctest.Wait() // it waits
		}
		l.Release(20, ForDemand) // room for the reader alone: it may take what batches leave
		synctest.Wait()
		if first := <-served; first != "demand" || len(served) > 0 {
			t.Errorf("%s was served first, with %d more", first, len(served))
		}
		l.Release(60, ForDemand)
		<-served
	})
}

func (l *Ledger) waiting() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.waiters)
}

func TestReserveGivesUp(t *testing.T) {
	l := newLedger(80)
	if err := l.reserve(context.Background(), 81, ForDemand, func() {}); !errors.Is(err, ErrTooLarge) {
		t.Fatalf("more than the limit: %v", err)
	}
	if err := l.reserve(context.Background(), 41, ForBatches, func() {}); !errors.Is(err, ErrTooLarge) {
		t.Fatalf("more than the batches' half: %v", err)
	}
	l.TryReserve(80, ForDemand)
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
	defer cancel()
	if err := l.reserve(ctx, 1, ForDemand, func() {}); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("cancelled: %v", err)
	}
	if l.waiting() != 0 || l.Used() != 80 {
		t.Fatalf("a cancelled reservation left %d waiters, %d bytes", l.waiting(), l.Used())
	}
}

// Batches that wait for batches delay nobody else; and a wait that can never succeed ends when the limit falls.
func TestBatchesWaitForBatches(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLedger(80)
		if !l.TryReserve(36, ForBatches) {
			t.Fatal("the first reservation must fit")
		}
		ended := make(chan error)
		go func() { ended <- l.reserve(t.Context(), 36, ForBatches, func() {}) }()
		synctest.Wait()
		if l.waiting() != 1 || !l.TryReserve(10, ForPrefetch) {
			t.Errorf("%d wait, and prefetching does, too", l.waiting())
		}
		if l.TryReserve(1, ForBatches) {
			t.Error("a batch overtook another")
		}
		if !l.Withhold(20) {
			t.Fatal("20 of 80 are not there")
		}
		if err := <-ended; !errors.Is(err, ErrTooLarge) || l.waiting() > 0 {
			t.Errorf("36 of 60, of which batches get a half: %v", err)
		}
	})
}

// The limit changes while others reserve.
func TestWithholdMeanwhile(t *testing.T) {
	l := newLedger(80)
	var wg sync.WaitGroup
	wg.Go(func() {
		for range 100 {
			if err := l.reserve(context.Background(), 10, ForDemand, func() {}); err != nil {
				t.Error(err)
				return
			}
			l.Release(10, ForDemand)
		}
	})
	for range 100 {
		if l.Withhold(10) {
			l.Withhold(-10)
		}
	}
	wg.Wait()
	if l.Limit() != 80 || l.Used() != 0 {
		t.Errorf("%d of %d used", l.Used(), l.Limit())
	}
}

func TestReserveReclaims(t *testing.T) {
	l := newLedger(80)
	l.TryReserve(80, ForDemand)
	l.reclaim = func(need int64, _ Class) { l.Release(need, ForDemand) }
	if !l.TryReserve(30, ForDemand) || l.Used() != 80 {
		t.Fatalf("used %d", l.Used())
	}
}

func TestBufferClasses(t *testing.T) {
	for n := 1; n < 5<<20; n += 1 + n/7 {
		class, size := sizeClass(n)
		if size < n || n > 4096 && size > n+n/3 {
			t.Fatalf("sizeClass(%d) = %d", n, size)
		}
		if again, same := sizeClass(size); again != class || same != size {
			t.Fatalf("sizeClass(%d) = %d,%d is not stable: %d,%d", n, class, size, again, same)
		}
		if p := getBytes(n); len(p) != n || cap(p) != size {
			t.Fatalf("getBytes(%d): len %d cap %d", n, len(p), cap(p))
		}
	}
}
