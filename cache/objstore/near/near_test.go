package near

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/lab/rig/memstore"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type stored struct {
	data []byte
	note string
}

// engine is a tier's store in memory. fault is called before each request, and may return what goes wrong.
type engine struct {
	mu    sync.Mutex
	m     map[string]stored
	fault func(op, key string) string
	gets  int
}

func transient(text string) error {
	return &objstore.Error{Op: "read", Kind: objstore.KindTransient, Err: errors.New(text)}
}

func (e *engine) ask(ctx context.Context, op, key string) (string, error) {
	what := ""
	if e.fault != nil {
		what = e.fault(op, key)
	}
	switch what {
	case "fail":
		return what, transient("fails")
	case "full":
		if op == "put" {
			return what, transient("HTTP 507")
		}
	case "denied":
		return what, &objstore.Error{Op: op, Kind: objstore.KindDenied, Err: errors.New("HTTP 403")}
	case "hang":
		<-ctx.Done()
		return what, ctx.Err()
	}
	return what, ctx.Err()
}

func (e *engine) GetNoted(ctx context.Context, key string, size int64, p []byte, off int64) (string, error) {
	what, err := e.ask(ctx, "get", key)
	if err != nil {
		clear(p) // what is in p after an error is undefined
		return "", err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.gets++
	s, ok := e.m[key]
	switch {
	case what == "mix up" && e.other(key, size) != nil:
		s = *e.other(key, size)
	case !ok || what == "lose":
		delete(e.m, key)
		return "", &objstore.Error{Op: "read", Kind: objstore.KindNotFound}
	case int64(len(s.data)) != size:
		return "", &objstore.Error{Op: "read", Kind: objstore.KindChanged, Err: errors.New("another size")}
	}
	copy(p, s.data[off:])
	switch what {
	case "flip":
		p[len(p)/2] ^= 1
	case "unnoted":
		return "", nil
	}
	return s.note, nil
}

// other returns another object of that size.
func (e *engine) other(key string, size int64) *stored {
	for k, s := range e.m {
		if k != key && int64(len(s.data)) == size {
			return &s
		}
	}
	return nil
}

func (e *engine) PutNoted(ctx context.Context, key string, data []byte, note string, onlyNew bool) error {
	what, err := e.ask(ctx, "put", key)
	if err != nil {
		return err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if _, ok := e.m[key]; ok && onlyNew {
		return objstore.Exists(key)
	}
	if what == "condition" && onlyNew {
		return &objstore.Error{Op: "put", Kind: objstore.KindInvalid, Err: errors.New("HTTP 501")}
	}
	data = bytes.Clone(data)
	switch what {
	case "cut":
		data = data[:len(data)/2]
	case "damage":
		data[len(data)/3] ^= 1
	}
	e.m[key] = stored{data, note}
	return nil
}

// bed is a tier between an origin of objects in memory and an engine.
type bed struct {
	origin  *memstore.Mem
	counted *objstore.Meter
	engine  *engine
	tier    *Tier
	log     *strings.Builder
	r       objstore.Layer
}

type lockedWriter struct {
	mu sync.Mutex
	to *strings.Builder
}

func (w *lockedWriter) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.to.Write(p)
}

func newBed(e *engine) *bed {
	b := &bed{origin: memstore.New(), engine: e, log: &strings.Builder{}}
	b.counted = objstore.NewMeter(b.origin)
	b.tier = New(Config{Store: e, Prefix: "p/", Name: "near", Memory: 64 << 20,
		Log: slog.New(slog.NewTextHandler(&lockedWriter{to: b.log}, nil))})
	b.r = b.tier.Over(b.counted, "http://origin/bucket")
	return b
}

func newEngine() *engine { return &engine{m: map[string]stored{}} }

// settle waits until nothing is queued.
func (b *bed) settle(t interface{ Fatal(...any) }) {
	for range 10_000 {
		if s := b.tier.Stats(); s.Queued == 0 && s.InFlight == 0 {
			return
		}
		time.Sleep(time.Millisecond)
	}
	t.Fatal("copies are still queued")
}

var contents sync.Map // made once: the tests make the same ones many times

func contentOf(key string, n int) []byte {
	name := fmt.Sprint(key, n)
	if p, ok := contents.Load(name); ok {
		return p.([]byte)
	}
	p := make([]byte, n)
	var seed [32]byte
	copy(seed[:], key)
	_, _ = rand.NewChaCha8(seed).Read(p)
	contents.Store(name, p)
	return p
}

func (b *bed) read(t testing.TB, o objstore.Object, off int64, n int) {
	t.Helper()
	p := make([]byte, n)
	if err := b.r.ReadAt(t.Context(), o, p, off); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(p, contentOf(o.Key, int(o.Size))[off:off+int64(n)]) {
		t.Fatalf("%s: other bytes at %d", o.Key, off)
	}
}

func (b *bed) object(key string, n int) objstore.Object {
	return b.origin.PutBytes(key, contentOf(key, n))
}

func TestFilledOnceAndShared(t *testing.T) {
	e := newEngine()
	b := newBed(e)
	small, large := b.object("small", 100_000), b.object("large", 9<<20)
	for range 3 {
		b.read(t, small, 0, 100_000)
		for off := int64(0); off < large.Size; off += unitSize {
			b.read(t, large, off, int(min(unitSize, large.Size-off)))
		}
	}
	if s := b.counted.Stats(); s.Reads != 4 || s.Bytes != small.Size+large.Size {
		t.Errorf("the origin was read %d times, %d bytes", s.Reads, s.Bytes)
	}
	b.tier.Close()
	if s := b.tier.Stats(); s.Puts != 4 || s.Hits != 8 || s.Misses != 4 || s.Reads != 12 || s.Queued != 0 ||
		s.State != "on" {
		t.Errorf("%+v", s)
	}
	// Another node, and parts of units, over two units, by spans.
	c := newBed(e)
	c.origin = b.origin
	defer c.tier.Close()
	b.tier, b.r = c.tier, c.tier.Over(b.counted, "http://origin/bucket")
	b.read(t, small, 70_000, 20_000)
	b.read(t, large, unitSize-1000, 200_000)
	p, q := make([]byte, 10), make([]byte, 5<<20)
	if err := b.r.ReadSpans(t.Context(), large, []objstore.Span{{Off: 7, P: p}, {Off: 3 << 20, P: q}}); err != nil {
		t.Fatal(err)
	}
	want := contentOf("large", 9<<20)
	if !bytes.Equal(p, want[7:17]) || !bytes.Equal(q, want[3<<20:8<<20]) {
		t.Error("other bytes by spans")
	}
	if s := b.counted.Stats(); s.Reads != 4 {
		t.Errorf("the origin was read %d times", s.Reads)
	}
}

// Parts are read as asked, until half of a unit was read.
func TestParts(t *testing.T) {
	b := newBed(newEngine())
	defer b.tier.Close()
	o := b.object("large", 6<<20)
	for i := range int64(16) {
		b.read(t, o, i*granuleSize, granuleSize)
	}
	b.settle(t)
	if s, got := b.tier.Stats(), b.counted.Stats(); s.Puts != 0 || got.Bytes != 16*granuleSize {
		t.Errorf("%+v, %d bytes of the origin", s, got.Bytes)
	}
	for i := range int64(16) {
		b.read(t, o, (16+i)*granuleSize, granuleSize)
	}
	b.settle(t)
	if s := b.tier.Stats(); s.Fills != 1 || s.Puts != 1 {
		t.Errorf("%+v", s)
	}
	before := b.counted.Stats().Reads
	b.read(t, o, 0, unitSize)
	if b.counted.Stats().Reads != before {
		t.Error("the unit was not put")
	}
}

// Another version has other copies; the old one is still read if it is asked for.
func TestVersions(t *testing.T) {
	b := newBed(newEngine())
	defer b.tier.Close()
	old := b.object("a", 1000)
	b.read(t, old, 0, 1000)
	b.settle(t)
	now := b.origin.PutBytes("a", bytes.Repeat([]byte{7}, 1000))
	p := make([]byte, 1000)
	if err := b.r.ReadAt(t.Context(), now, p, 0); err != nil || p[5] != 7 {
		t.Errorf("%v, %d", err, p[5])
	}
	b.read(t, old, 0, 1000) // what the origin no longer has
	none := old
	none.ETag = "none"
	if err := b.r.ReadAt(t.Context(), none, p, 0); objstore.KindOf(err) != objstore.KindChanged {
		t.Errorf("%v, want the origin's error", err)
	}
}

func TestDamagedIsReplaced(t *testing.T) {
	for name, damage := range map[string]func(s *stored){
		"byte":    func(s *stored) { s.data[99_999] ^= 1 },
		"size":    func(s *stored) { s.data = s.data[:70_000] },
		"no note": func(s *stored) { s.note = "" },
		"other":   func(s *stored) { s.note = noteOf(objstore.Object{Key: "a"}, "v1/00/other", s.data).String() },
	} {
		t.Run(name, func(t *testing.T) {
			b := newBed(newEngine())
			defer b.tier.Close()
			o := b.object("a", 100_000)
			b.read(t, o, 0, 100_000)
			b.settle(t)
			for key, s := range b.engine.m {
				damage(&s)
				b.engine.m[key] = s
			}
			b.read(t, o, 0, 100_000)
			b.settle(t)
			reads := b.counted.Stats().Reads
			b.read(t, o, 0, 100_000)
			if s := b.tier.Stats(); s.Damaged != 1 || s.Puts != 2 || reads != 2 || b.counted.Stats().Reads != 2 ||
				!strings.Contains(b.log.String(), "damaged") {
				t.Errorf("%+v; the origin was read %d times", s, reads)
			}
		})
	}
}

// An engine that damages all it stores is left out after a while.
func TestDamagingEngine(t *testing.T) {
	b := newBed(newEngine())
	b.engine.fault = func(op, _ string) string { return map[string]string{"get": "unnoted"}[op] }
	defer b.tier.Close()
	o := b.object("a", 1000)
	for range 30 {
		b.read(t, o, 0, 1000)
		b.settle(t)
	}
	if s := b.tier.Stats(); s.State != "away" || s.Damaged != mostDamaged || s.Passed == 0 {
		t.Errorf("%+v", s)
	}
}

// The tier hangs: readers wait for two seconds once, and then not at all, but for one read at the end of each pause.
func TestHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(newEngine())
		hang := true
		b.engine.fault = func(op, _ string) string {
			if hang && op == "get" {
				return "hang"
			}
			return ""
		}
		o := b.object("a", 1000)
		var all sync.WaitGroup
		start := time.Now()
		for range 100 { // more than there are places
			all.Go(func() { b.read(t, o, 0, 1000) })
		}
		all.Wait()
		if took := time.Since(start); took > longestDelay {
			t.Errorf("the readers waited %v", took)
		}
		start = time.Now()
		b.read(t, o, 0, 1000)
		if took := time.Since(start); took > 0 {
			t.Errorf("a read of a tier that is left out took %v", took)
		}
		waited, last := 0, time.Now()
		for end := time.Now().Add(10 * time.Minute); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
			start := time.Now()
			b.read(t, o, 0, 1000)
			if took := time.Since(start); took > 0 {
				waited++
				last = start
			}
		}
		if waited < 10 || waited > 15 { // after 1, 2, 4, 8, 16, 32 s and then each minute
			t.Errorf("%d reads tried", waited)
		}
		hang = false
		time.Sleep(time.Until(last.Add(time.Minute + 3*time.Second)))
		b.read(t, o, 0, 1000)
		b.read(t, o, 0, 1000)
		b.tier.Close()
		if s := b.tier.Stats(); s.State != "on" || strings.Count(b.log.String(), "left out") != 1 ||
			strings.Count(b.log.String(), "read again") != 1 {
			t.Errorf("%+v\n%s", s, b.log)
		}
	})
}

// A full or read-only tier is still read.
func TestTakesNoCopies(t *testing.T) {
	for _, what := range []string{"full", "denied"} {
		synctest.Test(t, func(t *testing.T) {
			b := newBed(newEngine())
			a := b.object("a", 1000)
			b.read(t, a, 0, 1000)
			synctest.Wait()
			refuse := true
			b.engine.fault = func(op, _ string) string {
				if refuse && op == "put" {
					return what
				}
				return ""
			}
			o := b.object("b", 1000)
			for range 5 {
				b.read(t, o, 0, 1000)
				synctest.Wait()
				b.read(t, a, 0, 1000)
			}
			if s := b.tier.Stats(); s.State != "read-only" || s.Hits != 5 || s.Errors != 1 || s.Dropped != 5 {
				t.Errorf("%s: %+v", what, s)
			}
			refuse = false
			time.Sleep(2 * time.Second)
			b.read(t, o, 0, 1000)
			b.tier.Close()
			if s := b.tier.Stats(); s.State != "on" || s.Puts != 2 {
				t.Errorf("%s: %+v", what, s)
			}
		})
	}
}

func TestNoConditions(t *testing.T) {
	b := newBed(newEngine())
	b.engine.fault = func(op, _ string) string { return "condition" }
	for i := range 3 {
		b.read(t, b.object(fmt.Sprint(i), 1000), 0, 1000)
	}
	b.tier.Close()
	if s := b.tier.Stats(); s.Puts != 3 || s.Errors != 0 {
		t.Errorf("%+v", s)
	}
}

// A full queue drops, and readers do not wait.
func TestQueueIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(newEngine())
		b.engine.fault = func(op, _ string) string {
			if op == "put" {
				time.Sleep(time.Second)
			}
			return ""
		}
		start := time.Now()
		for i := range 20 { // 80 MiB
			b.read(t, b.object(fmt.Sprint(i), unitSize), 0, unitSize)
		}
		if s := b.tier.Stats(); time.Since(start) > 0 || s.Dropped != 12 || s.Queued != 32<<20 {
			t.Errorf("%v, %+v", time.Since(start), s)
		}
		b.tier.Close()
		if s := b.tier.Stats(); s.Puts != 8 || s.Queued != 0 {
			t.Errorf("%+v", s)
		}
	})
}

// A daemon's end waits 5 s for an engine that hangs.
func TestCloseIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(newEngine())
		b.engine.fault = func(op, _ string) string { return map[string]string{"put": "hang"}[op] }
		for i := range 20 {
			b.read(t, b.object(fmt.Sprint(i), 1000), 0, 1000)
		}
		start := time.Now()
		b.tier.Close()
		if took := time.Since(start); took != closing {
			t.Errorf("it took %v", took)
		}
		if s := b.tier.Stats(); s.Dropped != 20 || s.Queued != 0 || s.InFlight != 0 || s.Errors != 0 {
			t.Errorf("%+v", s)
		}
	})
}

// A reader that gives up says nothing about the tier, and gets its own error.
func TestGivesUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(newEngine())
		b.engine.fault = func(op, _ string) string { return "hang" }
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := b.r.ReadAt(ctx, b.object("a", 10), make([]byte, 10), 0); !errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
		b.tier.Close()
		if s := b.tier.Stats(); s.State != "on" || s.Errors != 0 || s.InFlight != 0 {
			t.Errorf("%+v", s)
		}
	})
}

// TestModel: whatever the tier does, a read has the bytes of the version it asks for, or the origin's own error.
func TestModel(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		faults := rapid.SliceOfN(
			rapid.SampledFrom([]string{"", "", "", "", "fail", "full", "denied", "lose", "flip", "unnoted", "mix up",
				"cut", "damage", "condition"}), 1, 30).Draw(rt, "faults")
		readers := rapid.IntRange(1, 4).Draw(rt, "readers")
		seed := rapid.Uint64().Draw(rt, "seed")
		healthy := rapid.Bool().Draw(rt, "healthy")
		e := newEngine()
		var mu sync.Mutex
		n := 0
		if !healthy {
			e.fault = func(string, string) string {
				mu.Lock()
				defer mu.Unlock()
				n++
				return faults[n%len(faults)]
			}
		} else {
			readers = 1 // the cache's flights see to it that one reads a unit at a time
		}
		b := newBed(e)
		clock := time.Now()
		quick := func() time.Time {
			mu.Lock()
			defer mu.Unlock()
			clock = clock.Add(100 * time.Millisecond)
			return clock
		}
		b.tier.reading = objstore.NewCircuit(quick, b.tier.say("left out", "read again"))
		b.tier.putting = objstore.NewCircuit(quick, b.tier.say("nothing is put", "copies are put"))
		sizes := []int{1, granuleSize, granuleSize + 1, 300_000, unitSize, unitSize + 5, 1000}
		type version struct {
			o    objstore.Object
			data []byte
			gone bool
		}
		var all []version
		for i, size := range sizes {
			key := fmt.Sprint("key ", i)
			all = append(all, version{b.object(key, size), contentOf(key, size), i%3 == 1})
			if i%3 == 1 {
				data := contentOf("new"+key, size)
				all = append(all, version{b.origin.PutBytes(key, data), data, false})
			}
		}
		var group sync.WaitGroup
		for k := range readers {
			group.Go(func() {
				r := rand.New(rand.NewPCG(seed, uint64(k)))
				for range 12 {
					v := all[r.IntN(len(all))]
					spans := drawSpans(r, v.o.Size, healthy)
					err := b.r.ReadSpans(context.Background(), v.o, spans)
					if v.gone != (err != nil) || v.gone && objstore.KindOf(err) != objstore.KindChanged {
						rt.Errorf("%s: %v", v.o.Key, err)
						return
					}
					for _, s := range spans {
						if err == nil && !bytes.Equal(s.P, v.data[s.Off:s.Off+int64(len(s.P))]) {
							rt.Errorf("%s: other bytes at %d", v.o.Key, s.Off)
							return
						}
					}
				}
			})
		}
		group.Wait()
		b.tier.Close()
		s := b.tier.Stats()
		if s.Queued != 0 || s.InFlight != 0 || s.Reads < s.Hits+s.Misses+s.Passed {
			rt.Errorf("%+v", s)
		}
		const units = 8 // of the versions that there are
		if once := b.counted.Stats().Outcomes["get"].OK; healthy && (s.Errors+s.Damaged+s.Passed+s.Dropped > 0 ||
			s.Puts != once || once > units) {
			rt.Errorf("the origin was read %d times: %+v", once, s)
		}
	})
}

// drawSpans draws what a cache reads of an object: an extent, or pieces.
func drawSpans(r *rand.Rand, size int64, whole bool) (spans []objstore.Span) {
	if whole || r.IntN(3) > 0 {
		off := r.Int64N((size+unitSize-1)/unitSize) * unitSize
		return []objstore.Span{{Off: off, P: make([]byte, min(unitSize, size-off))}}
	}
	for at := r.Int64N(size); at < size && len(spans) < 5; at += 1 + r.Int64N(1<<20) {
		n := 1 + r.Int64N(min(size-at, 1<<20))
		spans = append(spans, objstore.Span{Off: at, P: make([]byte, n)})
		at += n
	}
	return spans
}
