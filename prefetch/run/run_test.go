package run

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/shoalfs/shoal/cache"
	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/lab/rig/memstore"
	"github.com/shoalfs/shoal/prefetch"
	"github.com/shoalfs/shoal/prefetch/order"
)

func TestMoveText(t *testing.T) {
	for _, c := range []struct {
		move prefetch.Move
		want string
	}{
		{prefetch.Move{Event: prefetch.Jump, From: 40_200, To: 40_123, Unread: 1000},
			"jumped to position 40,123: the reader skipped 1,000 samples"},
		{prefetch.Move{Event: prefetch.Jump, From: 900, To: 100},
			"went back to position 100 from 900: the reader repeats what it had read"},
		{prefetch.Move{Event: prefetch.NextEpoch}, "went on to epoch 7"},
		{prefetch.Move{Event: prefetch.NextEpoch, Unread: 3},
			"went on to epoch 7; the reader left 3 samples of the pass before unread"},
		{prefetch.Move{Event: prefetch.Restart}, "began epoch 7 again"},
		{prefetch.Move{Event: prefetch.PrevEpoch, Unread: 1},
			"went back to epoch 7; the reader left 1 samples of the pass before unread"},
		{prefetch.Move{Event: prefetch.Found, To: 12}, "found the reader in epoch 7, position 12, by what it opens"},
	} {
		if got := moveText(c.move, 7); got != c.want {
			t.Errorf("%+v: %s", c.move, got)
		}
	}
}

// A position that the reader has passed may be asked for at any moment.
func TestDue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &Stream{tracker: prefetch.NewTracker(order.Sequential(30), 0, 16)}
		for sample := range 10 {
			s.tracker.Open(sample)
		}
		now := time.Now()
		for _, c := range []struct {
			pos  int
			rate float64
			want time.Time
		}{{20, 5, now.Add(2 * time.Second)}, {10, 5, now}, {3, 5, now}, {20, 0, time.Time{}}, {3, 0, now}} {
			if s.pace.rate = c.rate; !s.due(c.pos).Equal(c.want) {
				t.Errorf("%d at %v a second: %v, want %v", c.pos, c.rate, s.due(c.pos), c.want)
			}
		}
	})
}

// cacheOf returns a cache with one volume: files of size bytes in one class.
func cacheOf(t *testing.T, files, size int) (*cache.Cache, *cache.Volume) {
	t.Helper()
	mem := memstore.New()
	for i := range files {
		mem.PutBytes(fmt.Sprintf("c/%04d.jpg", i), make([]byte, size))
	}
	m, err := catalog.Build(mem.List(t.Context(), "", ""), catalog.BuildOptions{})
	if err != nil {
		t.Fatal(err)
	}
	c := cache.New(cache.Options{Memory: 32 << 20})
	return c, c.NewVolume(cache.VolumeOptions{Manifest: m, Store: mem})
}

// A reader that has nothing to do with the order is not found in any epoch, at bounded cost.
func TestSearchEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const files = 240
		c, v := cacheOf(t, files, 1)
		r := New(c)
		s, err := r.Begin(Options{
			Name: "mount", Volume: v, Gate: &prefetch.Gate{}, Places: func() int { return 4 },
			Ease: func() int { return 4 }, Keep: nothing{}, Search: true,
			Epochs: func(epoch int) order.Order { return order.Uniform(files, 3, epoch) },
		})
		if err != nil {
			t.Fatal(err)
		}
		rng := rand.New(rand.NewPCG(8, 8))
		for range 150 {
			file := rng.IntN(files)
			r.Opened(v, file, 1, s)
			r.Done(v, file)
		}
		synctest.Wait()
		if !s.searched {
			t.Error("the search goes on")
		}
		if p := s.Progress(); p.Events.Found != 0 || p.Epoch != 0 {
			t.Errorf("%+v", p)
		}
		s.Close()
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
}

// Workers that read a batch each are far apart. A walk serves the last of them, too, and not only the first; and all of
// them if an open was not seen, at which the frontier stays. A few opens elsewhere are no workers.
func TestWorkersFarApart(t *testing.T) {
	const files, workers, batch = 2000, 4, 64
	two := func(t *testing.T, do func(read func(pos int), s *Stream)) {
		synctest.Test(t, func(t *testing.T) {
			c, v := cacheOf(t, files, 16<<10)
			r := New(c)
			var streams [2]*Stream // two, so that none goes as far ahead as memory allows
			for i := range streams {
				var err error
				if streams[i], err = r.Begin(Options{
					Name: "mount", Volume: v, Gate: &prefetch.Gate{}, Places: func() int { return 4 },
					Ease: func() int { return 4 }, Keep: nothing{},
					Epochs: func(epoch int) order.Order { return order.Uniform(files, uint64(i), epoch) },
				}); err != nil {
					t.Fatal(err)
				}
			}
			ctx, cancel := context.WithCancel(t.Context())
			go r.Run(ctx)
			o := order.Uniform(files, 0, 0)
			do(func(pos int) {
				r.Opened(v, o.At(pos), 1, streams[0])
				r.Done(v, o.At(pos))
			}, streams[0])
			cancel()
			synctest.Wait()
			for _, s := range streams {
				s.Close()
			}
			if err := c.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	two(t, func(read func(pos int), s *Stream) {
		for i := range 4 * batch {
			for w := range workers {
				if pos := (i/batch*workers+w)*batch + i%batch; pos != 5 {
					read(pos)
				}
			}
			synctest.Wait()
			if p := s.Progress(); i%batch == batch/2 && p.Planned < (i/batch+1)*workers*batch {
				t.Errorf("planned up to %d: the last worker is at %d", p.Planned, p.Position)
			}
		}
		if p := s.Progress(); p.Lead > p.Planned-p.Position+1 {
			t.Errorf("%d samples are said to be ready from %d on, planned are %d", p.Lead, p.Position, p.Planned)
		}
	})
	two(t, func(read func(pos int), s *Stream) {
		for pos := range 4 * batch {
			if read(pos); pos%16 == 0 {
				read(files - 1 - pos)
			}
			synctest.Wait()
			if p := s.Progress(); p.Planned > pos+2*batch {
				t.Errorf("planned up to %d: the reader is at %d", p.Planned, pos)
				return
			}
		}
	})
}

// nothing keeps nothing.
type nothing struct{}

func (nothing) Opened(int)         {}
func (nothing) Choose(order.Order) {}

func TestStripIsBounded(t *testing.T) {
	if s := newStrip("", 1<<40, 1000); s.Cells != 1000 || s.Exact {
		t.Errorf("%+v", s)
	}
}
