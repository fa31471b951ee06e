package objstore_test

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/lab/rig/memstore"
)

func TestRetryKinds(t *testing.T) {
	for _, c := range []struct {
		script string
		reads  int64 // tries
		want   objstore.Kind
		ok     bool
	}{
		{"", 1, 0, true},
		{"read k 1-3 503", 4, 0, true},
		{"read k 1-2 truncate", 3, 0, true},
		{"read k 1-4 503", 4, objstore.KindTransient, false},
		{"read k 1 503\nread k all changed", 2, objstore.KindChanged, false},
		{"read k all changed", 1, objstore.KindChanged, false},
		{"read k all notfound", 1, objstore.KindNotFound, false},
		{"read k all denied", 1, objstore.KindDenied, false},
	} {
		m := memstore.New()
		o := m.PutBytes("k", []byte("content"))
		meter := objstore.NewMeter(Fault(t, m, c.script))
		var slept []time.Duration
		r := objstore.Retry(meter, objstore.RetryPolicy{
			Tries: 4, Base: 100 * time.Millisecond, Cap: 250 * time.Millisecond,
			Rand:  func() float64 { return 0.5 },
			Sleep: func(_ context.Context, d time.Duration) error { slept = append(slept, d); return nil },
		})
		p := make([]byte, 7)
		err := r.ReadAt(t.Context(), o, p, 0)
		if c.ok && (err != nil || string(p) != "content") || !c.ok && (err == nil || objstore.KindOf(err) != c.want) {
			t.Errorf("%q: read %q, error %v", c.script, p, err)
		}
		if got := meter.Stats().Reads; got != c.reads {
			t.Errorf("%q: %d tries, want %d", c.script, got, c.reads)
		}
		if c.want == objstore.KindTransient && !strings.Contains(fmt.Sprint(err), "gave up after 4 tries") {
			t.Errorf("%q: the text does not tell the tries: %v", c.script, err)
		}
		want := []time.Duration{50 * time.Millisecond, 100 * time.Millisecond, 125 * time.Millisecond}
		if !slices.Equal(slept, want[:c.reads-1]) {
			t.Errorf("%q: slept %v, want %v", c.script, slept, want[:c.reads-1])
		}
		if s := r.Stats(); s.Retries != c.reads-1 {
			t.Errorf("%q: %d retries counted, want %d", c.script, s.Retries, c.reads-1)
		}
	}
}

func TestRetryTotal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := memstore.New()
		o := m.PutBytes("k", []byte("x"))
		r := objstore.Retry(Fault(t, m, "read k all 503"), objstore.RetryPolicy{
			Tries: 1000, Base: time.Second, Cap: time.Second, Total: 10 * time.Second, Rand: func() float64 {
				return 0.999
			},
		})
		start := time.Now()
		err := r.ReadAt(t.Context(), o, make([]byte, 1), 0)
		if d := time.Since(start); objstore.KindOf(err) != objstore.KindTransient || d > 10*time.Second ||
			d < 9*time.Second {
			t.Errorf("gave up after %v with %v", d, err)
		}
		if r.Stats().GaveUp != 1 {
			t.Errorf("stats %+v", r.Stats())
		}
	})
}

// TestRetryTotalOfHangs: however long each try hangs, the request ends with its time.
func TestRetryTotalOfHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := memstore.New()
		o := m.PutBytes("k", make([]byte, 1<<20))
		r := objstore.Retry(Fault(t, m, "* k all stall"), objstore.RetryPolicy{Tries: 1000})
		start := time.Now()
		err := r.ReadAt(t.Context(), o, make([]byte, 1<<20), 0)
		if d := time.Since(start); objstore.KindOf(err) != objstore.KindTransient || d > 121*time.Second ||
			d < 115*time.Second {
			t.Errorf("gave up after %v with %v", d, err)
		}
	})
}

func TestRetryCancel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := memstore.New()
		o := m.PutBytes("k", []byte("x"))
		r := objstore.Retry(Fault(t, m, "read k all 503"),
			objstore.RetryPolicy{Base: time.Hour, Cap: time.Hour, Total: 100 * time.Hour})
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := r.ReadAt(ctx, o, make([]byte, 1), 0); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("canceled while it slept: %v", err)
		}
	})
}

// TestSilence: the meter tells for how long a store has not answered, over tries, until it does.
func TestSilence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := memstore.New()
		o := m.PutBytes("k", make([]byte, 1))
		meter := objstore.NewMeter(Fault(t, m, "* k 1 stall\n* k 2 stall"))
		r := objstore.Retry(meter, objstore.RetryPolicy{TryTimeout: 6 * time.Second, Rand: func() float64 { return 0 }})
		go r.ReadAt(t.Context(), o, make([]byte, 1), 0)
		time.Sleep(9 * time.Second)
		if s := meter.Stats(); s.Reads != 2 || s.Silent != 9*time.Second {
			t.Errorf("silent for %v in try %d after 9 s", s.Silent, s.Reads)
		}
		time.Sleep(time.Minute)
		if s := meter.Stats(); s.Outcomes["get"].OK != 1 || s.Silent != 0 {
			t.Errorf("silent for %v after an answer: %+v", s.Silent, s)
		}
		go meter.ReadAt(t.Context(), o, make([]byte, 1), 0) // what was before is forgotten
		synctest.Wait()
		if s := meter.Stats(); s.Silent != 0 {
			t.Errorf("silent for %v at once", s.Silent)
		}
	})
}

// TestRetryHang: a try that hangs is ended and made again; the meter below calls it a failure of the
// store, not of the caller.
func TestRetryHang(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := memstore.New()
		o := m.PutBytes("k", make([]byte, 2<<20))
		meter := objstore.NewMeter(Fault(t, m, "* k 1 stall"))
		r := objstore.Retry(meter,
			objstore.RetryPolicy{TryTimeout: 5 * time.Second, Rand: func() float64 { return 0 }})
		start := time.Now()
		if err := r.ReadAt(t.Context(), o, make([]byte, 2<<20), 0); err != nil {
			t.Fatal(err)
		}
		if d := time.Since(start); d != 7*time.Second { // 5 s and 2 MiB at 1 MiB/s
			t.Errorf("took %v", d)
		}
		if s := meter.Stats(); s.Errors["temporary failure"] != 1 || s.Canceled != 0 || s.InFlight != 0 {
			t.Errorf("meter: %+v", s)
		}
	})
}

// flaky fails a listing at drawn places, before or after the yield.
type flaky struct {
	*memstore.Mem
	fail func() bool
}

func (f flaky) cut(seq iter.Seq2[objstore.Object, error]) iter.Seq2[objstore.Object, error] {
	return func(yield func(objstore.Object, error) bool) {
		for o, err := range seq {
			if f.fail() {
				yield(objstore.Object{}, &objstore.Error{Op: "list", Kind: objstore.KindTransient})
				return
			}
			if !yield(o, err) {
				return
			}
		}
	}
}

func (f flaky) List(ctx context.Context, prefix, after string) iter.Seq2[objstore.Object, error] {
	return f.cut(f.Mem.List(ctx, prefix, after))
}

func (f flaky) ListLevel(ctx context.Context, prefix string) iter.Seq2[objstore.Object, error] {
	return f.cut(f.Mem.ListLevel(ctx, prefix))
}

// TestRetryList: however often a listing breaks, each key comes once and in order.
func TestRetryList(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		m := memstore.New()
		for _, k := range rapid.SliceOfDistinct(rapid.StringMatching(`[ab/-]{1,5}`), rapid.ID).Draw(rt, "keys") {
			m.PutBytes(k, nil)
		}
		failures := rapid.SliceOfN(rapid.IntRange(0, 4), 0, 20).Draw(rt, "runs between failures")
		fail := func() bool {
			if len(failures) == 0 {
				return false
			}
			if failures[0]--; failures[0] < 0 {
				failures = failures[1:]
				return true
			}
			return false
		}
		policy := objstore.RetryPolicy{Tries: 25, Sleep: func(context.Context, time.Duration) error { return nil }}
		r := objstore.Retry(flaky{m, fail}, policy)
		prefix := rapid.SampledFrom([]string{"", "a", "a/", "a/b"}).Draw(rt, "prefix")
		same(rt, memstore.Collect(rt, r.List(t.Context(), prefix, "")),
			memstore.Collect(rt, m.List(t.Context(), prefix, "")))
		if prefix == "" || strings.HasSuffix(prefix, "/") {
			same(rt, memstore.Collect(rt, r.ListLevel(t.Context(), prefix)),
				memstore.Collect(rt, m.ListLevel(t.Context(), prefix)))
		}
	})
}

// TestRetryListOutOfOrder: a store that is found not to list in key order after a listing was continued loses no key by
// that, and its listing is not continued once more.
func TestRetryListOutOfOrder(t *testing.T) {
	list := func(again error) (keys []string, last error) {
		broken := &objstore.Error{Op: "list", Kind: objstore.KindTransient}
		r := objstore.Retry(pieces{nil, []string{"a", "c"}, broken, []string{"f", "d", "e"}, again},
			objstore.RetryPolicy{Base: 1})
		for o, err := range r.List(t.Context(), "", "") {
			if err != nil {
				return keys, err
			}
			keys = append(keys, o.Key)
		}
		return keys, nil
	}
	if got, err := list(nil); err != nil || strings.Join(got, "") != "acfde" {
		t.Errorf("%q, %v", got, err)
	}
	if got, err := list(&objstore.Error{Op: "list", Kind: objstore.KindTransient}); err == nil {
		t.Errorf("%q, and no error", got)
	}
}

// pieces is a store with two listings, the second of what follows.
type pieces struct {
	objstore.Layer
	first  []string
	broken error
	rest   []string
	again  error
}

func (p pieces) List(_ context.Context, _, after string) iter.Seq2[objstore.Object, error] {
	if after == "" {
		return listed(p.first, p.broken)
	}
	return listed(p.rest, p.again)
}

func listed(keys []string, err error) iter.Seq2[objstore.Object, error] {
	return func(yield func(objstore.Object, error) bool) {
		for _, key := range keys {
			if !yield(objstore.Object{Key: key, ETag: "e"}, nil) {
				return
			}
		}
		if err != nil {
			yield(objstore.Object{}, err)
		}
	}
}

type tb interface {
	Helper()
	Fatalf(format string, args ...any)
}

func same(t tb, got, want []objstore.Object) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Fatalf("listing\n got %v\nwant %v", got, want)
	}
}

// disorderly lists in the order of a directory walk.
type disorderly struct{ objstore.Layer }

func (disorderly) List(context.Context, string, string) iter.Seq2[objstore.Object, error] {
	return func(yield func(objstore.Object, error) bool) {
		for _, k := range []string{"a/b", "a-b"} {
			if !yield(objstore.Object{Key: k, ETag: "e"}, nil) {
				return
			}
		}
		yield(objstore.Object{}, &objstore.Error{Op: "list", Kind: objstore.KindTransient})
	}
}

// TestRetryDisorder: where the store's order is wrong, going on after the last key could lose
// objects, so the failure is told instead.
func TestRetryDisorder(t *testing.T) {
	r := objstore.Retry(disorderly{}, objstore.RetryPolicy{Base: 1, Cap: 1})
	var keys []string
	var last error
	for o, err := range r.List(t.Context(), "", "") {
		if last = err; err == nil {
			keys = append(keys, o.Key)
		}
	}
	if !slices.Equal(keys, []string{"a/b", "a-b"}) || objstore.KindOf(last) != objstore.KindTransient {
		t.Errorf("listed %v, then %v", keys, last)
	}
}

// TestRetryPrice: a prefetch that is wanted late gives a store in trouble time; one that is wanted soon,
// or by a reader, does not, and a reader who arrives ends the sleep.
func TestRetryPrice(t *testing.T) {
	for _, c := range []struct {
		name     string
		due      time.Duration // 0: not known
		raise    time.Duration // 0: never
		from, to time.Duration
	}{
		{"far", time.Hour, 0, 5 * time.Second, 5 * time.Second},
		{"not so far", 8 * time.Second, 0, 2 * time.Second, 2 * time.Second},
		{"soon", 10 * time.Millisecond, 0, 50 * time.Millisecond, 50 * time.Millisecond},
		{"past", -time.Second, 0, 50 * time.Millisecond, 50 * time.Millisecond},
		{"unknown", 0, 0, 50 * time.Millisecond, 50 * time.Millisecond},
		{"raised while it sleeps", time.Hour, time.Second, time.Second, time.Second},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := memstore.New()
				o := m.PutBytes("k", []byte("content"))
				r := objstore.Retry(Fault(t, m, "read k 1 503"), objstore.RetryPolicy{Rand: func() float64 {
					return 1
				}})
				var due time.Time
				if c.due != 0 {
					due = time.Now().Add(c.due)
				}
				u := objstore.NewUrgency(due)
				if c.raise > 0 {
					time.AfterFunc(c.raise, u.Raise)
				}
				start := time.Now()
				if err := r.ReadAt(objstore.WithUrgency(t.Context(), u), o, make([]byte, o.Size), 0); err != nil {
					t.Fatal(err)
				}
				if took := time.Since(start); took < c.from || took > c.to {
					t.Errorf("it slept for %v, want %v to %v", took, c.from, c.to)
				}
			})
		})
	}
}
