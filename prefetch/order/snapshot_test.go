package order

import (
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// Whatever the order, a run that stops, and goes on at other world sizes again and again, delivers what
// the order says, in its order, each position once.
func TestSnapshotAcrossWorlds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(0, 80).Draw(t, "n")
		const batch = 12 // for 1, 2, 3, 4, 6 and 12 ranks
		text := rapid.SampledFrom([]string{"torch:seed=3", "torch:seed=3,drop_last=1", "torch-loader:seed=3,from=manual_seed", "torch-loader:seed=3,from=generator,samples=50",
			"uniform:seed=3", "windowed:seed=3,window=2", "mixture:seed=3,weights=@0-1:1+@2-3:4,samples=70", "buckets:seed=3,batch=12", "sequential", "list:x"}).Draw(t, "order")
		if strings.HasPrefix(text, "mixture") {
			n = max(n, 4)
		}
		f := Facts{Samples: n, Shards: func() Groups { return Contiguous(n, 7) }, Size: func(s int) int64 { return int64(s * 31 % 17) },
			List: func(string) ([]uint32, error) { return []uint32{2, 0, 2, 1}, nil }}
		worlds := rapid.SliceOfN(rapid.SampledFrom([]int{1, 2, 3, 4, 6, 12}), 1, 5).Draw(t, "worlds")
		epoch := rapid.IntRange(0, 3).Draw(t, "epoch")
		spec, err := Parse(text)
		if err != nil {
			t.Fatal(err)
		}
		whole, err := spec.Over(f, epoch)
		if err != nil {
			t.Fatal(err)
		}
		want := samples(whole)
		if spec.Ranked() {
			if spec, err = spec.With("world", itoa(worlds[0])); err == nil {
				spec, err = spec.With("rank", "0")
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		snap := spec.Snapshot("d1", epoch, 0)
		var got []int
		for i, world := range worlds {
			if snap, err = ParseSnapshot(snap.JSON()); err != nil {
				t.Fatal(err)
			}
			ranks := make([]Order, world)
			for r := range ranks {
				if ranks[r], err = snap.Restore(f, "d1", world, r, r); err != nil {
					t.Fatal(err)
				}
			}
			all, err := snap.Restore(f, "d1", world, 0, world-1)
			if err != nil {
				t.Fatal(err)
			}
			left := max(0, len(want)-snap.Cursor)
			if padded := spec.Ranked() && i == 0; padded { // torch at its own world
				if left = len(want) / world * world; !spec.dropLast && left < len(want) {
					left += world
				}
			}
			if all.Len() != left {
				t.Fatalf("%s, %d ranks from %d on: %d positions are left, want %d", snap.Order, world, snap.Cursor, all.Len(), left)
			}
			read := left
			if i < len(worlds)-1 { // stop at a batch's end
				read = min(left, batch*rapid.IntRange(0, 3).Draw(t, "batches"))
			}
			for step := range read {
				s := ranks[step%world].At(step / world)
				if s != all.At(step) {
					t.Fatalf("rank %d of %d reads %d at step %d, all together %d", step%world, world, s, step, all.At(step))
				}
				got = append(got, s)
			}
			if spec.Ranked() && i > 0 {
				snap.World = 1 << 20 // never its own world again: the unpadded rest
			}
			snap.Cursor += read
			if spec.Ranked() && len(worlds) > 1 && i == 0 && worlds[1] == worlds[0] {
				return // goes on with its padding, as the first step has shown
			}
		}
		if len(got) < len(want) {
			if spec.Ranked() && spec.dropLast && len(worlds) == 1 {
				want = want[:len(got)]
			} else {
				t.Fatalf("%s over worlds %v: %d of %d positions", text, worlds, len(got), len(want))
			}
		}
		if !slices.Equal(got[:len(want)], want) {
			t.Fatalf("%s over worlds %v:\n%v, want\n%v", text, worlds, got, want)
		}
	})
}

func TestSnapshotErrors(t *testing.T) {
	f := Facts{Samples: 30, Size: func(int) int64 { return 1 }}
	snap := must(t, "buckets:seed=1,batch=4").Snapshot("d1", 0, 8)
	for words, c := range map[string]struct {
		s       Snapshot
		dataset string
		world   int
	}{
		"one version":        {snap, "d2", 1},
		"share evenly":       {snap, "d1", 3},
		"batch of 4":         {must(t, "buckets:seed=1,batch=4").Snapshot("d1", 0, 9), "d1", 1},
		"beyond the epoch":   {must(t, "uniform:seed=1").Snapshot("d1", 0, 31), "d1", 1},
		"needs a shard set":  {must(t, "windowed:seed=1,window=2").Snapshot("d1", 0, 0), "d1", 1},
		"outside a world of": {snap, "d1", 0},
	} {
		if _, err := c.s.Restore(f, c.dataset, c.world, 0, max(0, c.world-1)); err == nil || !strings.Contains(err.Error(), words) {
			t.Errorf("%v, want %q", err, words)
		}
	}
	for words, text := range map[string]string{
		"not valid JSON":   "{",
		"format version 2": `{"v":2}`,
		"cursor -1":        `{"v":1,"world":1,"cursor":-1}`,
		"uniform@1":        `{"v":1,"world":1,"order":"uniform@2:seed=1"}`,
		"no order":         `{"v":1,"world":1,"order":"unifrom@1:seed=1"}`,
		"this program":     `{"v":1,"world":1,"order":"plan"}`,
	} {
		if _, err := ParseSnapshot(text); err == nil || !strings.Contains(err.Error(), words) {
			t.Errorf("%s: %v, want %q", text, err, words)
		}
	}
	for text, want := range map[string]string{
		"uniform:seed=1,epoch=4,world=8,rank=3": "uniform@1:seed=1", "torch:seed=1,world=8,rank=3,drop_last=1": "torch@1:seed=1,world=8,drop_last=1",
		"sequential": "sequential@1", "plan": "",
	} {
		if got := must(t, text).Versioned(); got != want {
			t.Errorf("%s: %q, want %q", text, got, want)
		}
	}
}

func FuzzParseSnapshot(f *testing.F) {
	f.Add(`{"v":1,"dataset":"d","order":"uniform@1:seed=5","world":2,"epoch":3,"cursor":64}`)
	f.Add(`{"v":1,"world":1,"order":"torch@1:seed=5,world=8"}`)
	f.Add(`{}`)
	f.Fuzz(func(t *testing.T, text string) {
		s, err := ParseSnapshot(text)
		if err != nil {
			return
		}
		if again, err := ParseSnapshot(s.JSON()); err != nil || again.Order != s.Order || again.Cursor != s.Cursor {
			t.Errorf("%q became %s, which became %v, %v", text, s.JSON(), again, err)
		}
	})
}

func TestParseList(t *testing.T) {
	find := func(name string) (int, bool) {
		i := slices.Index([]string{"a/x.jpg", "a/y.jpg", "7"}, name)
		return i, i >= 0
	}
	l, err := ParseList([]byte("# of mine\n2\n\na/y.jpg\r\n./7\n2\n./a/x.jpg"), 3, find)
	if err != nil || !slices.Equal(l, []uint32{2, 1, 2, 2, 0}) {
		t.Errorf("%v, %v", l, err)
	}
	for words, text := range map[string]string{
		`line 2: no sample "b"`:        "0\nb",
		"line 1: sample 3":             "3",
		"and 2 more":                   "a\nb\nc\nd\ne\nf\ng",
		`line 1: no sample "-1"`:       "-1",
		`line 1: no sample "999999999`: "99999999999999",
	} {
		if _, err := ParseList([]byte(text), 3, find); err == nil || !strings.Contains(err.Error(), words) {
			t.Errorf("%q: %v, want %q", text, err, words)
		}
	}
	if _, err := ParseList([]byte("a"), 3, nil); err == nil || !strings.Contains(err.Error(), "no sample number") {
		t.Errorf("%v", err)
	}
}

func FuzzParseList(f *testing.F) {
	f.Add([]byte("1\n2\n./3\n#\n\r\na"))
	f.Fuzz(func(t *testing.T, data []byte) {
		l, err := ParseList(data, 10, func(name string) (int, bool) { return len(name), len(name) < 10 })
		for _, s := range l {
			if s >= 10 || err != nil {
				t.Errorf("%q: sample %d, %v", data, s, err)
			}
		}
	})
}
