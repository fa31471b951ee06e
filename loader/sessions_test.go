package loader_test

import (
	"errors"
	"fmt"
	"math"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"pgregory.net/rapid"

	"github.com/shoalfs/shoal/loader"
	"github.com/shoalfs/shoal/loader/feedclient"
	"github.com/shoalfs/shoal/loader/feedpb"
)

// eventually waits, for minutes if it must, until ok.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(2 * time.Minute); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("never: %s", what)
		}
	}
}

// gate holds the reads of some samples until it is opened, and remembers which were read.
type gate struct {
	mu   sync.Mutex
	shut map[int]chan struct{}
	read map[int]bool
}

func newGate(samples ...int) *gate {
	g := &gate{shut: map[int]chan struct{}{}, read: map[int]bool{}}
	for _, i := range samples {
		g.shut[i] = make(chan struct{})
	}
	return g
}

func (g *gate) hold(i int) {
	g.mu.Lock()
	c := g.shut[i]
	g.mu.Unlock()
	if c != nil {
		<-c
	}
	g.mu.Lock()
	g.read[i] = true
	g.mu.Unlock()
}

// open lets the reads of a sample through; once.
func (g *gate) open(i int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if c := g.shut[i]; c != nil {
		close(c)
		delete(g.shut, i)
	}
}

// has reports whether the samples from..to-1 were read, without those that are held.
func (g *gate) has(from, to int) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	for i := from; i < to; i++ {
		if g.shut[i] == nil && !g.read[i] {
			return false
		}
	}
	return true
}

func (g *gate) any(from int) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	for i := range g.read {
		if i >= from {
			return true
		}
	}
	return false
}

// One sample that does not come holds up its own batch and the delivery of those after it. The rest of the
// window is built meanwhile, and nothing beyond: credits and look-ahead, and MaxWindow at most.
func TestSlowSample(t *testing.T) {
	const batch = 4
	for _, c := range []struct {
		name                        string
		credits, look, most, window int
	}{
		{"credits and look-ahead", 3, 2, 16, 5},
		{"most", 100, 2, 6, 6},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := newGate(1)
			defer g.open(1)
			ds := &testDataset{Samples: 400, Hold: g.hold}
			r := start(t, ds, loader.Options{Workers: 1, Readers: 2, LookAhead: c.look, MaxWindow: c.most}, 0)
			s := r.open(t, &feedpb.Open{Order: "sequential", Batch: batch, Transform: "ramp(2,2)", Epochs: 1,
				Credits: uint32(c.credits)})
			eventually(t, "the window's other samples are read", func() bool { return g.has(0, batch*c.window) })
			if n := r.server.Stats().Total.Batches; n != 0 {
				t.Errorf("%d batches were delivered before the first", n)
			}
			if g.any(batch * c.window) {
				t.Errorf("samples beyond the window of %d batches were read", c.window)
			}
			g.open(1)
			if ids := drain(t, s); len(ids) != 400 || !slices.IsSorted(ids) {
				t.Errorf("%d samples, sorted: %v", len(ids), slices.IsSorted(ids))
			}
		})
	}
}

// What a session waits for shows in the statistics while the wait lasts.
func TestWaitsShowWhileTheyLast(t *testing.T) {
	open := &feedpb.Open{Order: "sequential", Batch: 4, Transform: "ramp(2,2)", Epochs: 1, Credits: 1}
	t.Run("sample", func(t *testing.T) {
		g := newGate(0)
		defer g.open(0)
		r := start(t, &testDataset{Samples: 8, Hold: g.hold}, loader.Options{}, 0)
		s := r.open(t, open)
		eventually(t, "the wait for a sample shows", func() bool {
			st := r.server.Stats()
			return st.Total.Fetch > 0 && st.List[0].Stall > 0
		})
		g.open(0)
		drain(t, s)
	})
	t.Run("memory", func(t *testing.T) {
		const limit = 1 << 20
		r := start(t, &testDataset{Samples: 8}, loader.Options{}, limit)
		if !r.mem.TryReserve(limit) {
			t.Fatal("the memory is in use")
		}
		s := r.open(t, open)
		eventually(t, "the wait for memory shows", func() bool {
			st := r.server.Stats()
			return st.Total.Reserve > 0 && st.List[0].Stall > 0
		})
		r.mem.Release(limit)
		drain(t, s)
	})
}

// The ranks of a job have one version of the dataset, whenever each opens its session.
func TestRanksHaveOneVersion(t *testing.T) {
	r := start(t, &testDataset{Samples: 100}, loader.Options{}, 0)
	open := func(session string, rank uint32) *feedclient.Stream {
		return r.open(t, &feedpb.Open{Session: session, Batch: 5, World: 2, Rank: rank, Credits: 1})
	}
	first := open("job", 0)
	next := &testDataset{Samples: 80}
	r.refreshed.Store(next)
	second, other := open("job", 1), open("another", 1)
	if a, b := first.State(), second.State(); a != b {
		t.Errorf("the states of two ranks are %s and %s", a, b)
	}
	if s := other.State(); !strings.Contains(s, next.Version()) {
		t.Errorf("another job has state %s, and the dataset is %s", s, next.Version())
	}
	keyed := r.open(t, &feedpb.Open{Session: "job", Batch: 5, Order: "uniform:world=2,rank=1", Credits: 1})
	if a, b := second.State(), keyed.State(); a != b {
		t.Errorf("a rank that its order names has state %s, by its fields %s", b, a)
	}
	again := open("job", 0)
	if a, b := again.State(), second.State(); a != b {
		t.Errorf("a rank came back with state %s, the other has %s", a, b)
	}
	for _, s := range []*feedclient.Stream{again, second, keyed} {
		s.Close()
	}
	eventually(t, "the job has ended", func() bool { return r.server.Stats().Open == 1 })
	if s := open("job", 0).State(); !strings.Contains(s, next.Version()) {
		t.Errorf("the job begins again with state %s, and the dataset is %s", s, next.Version())
	}
}

// Slow samples of one session do not hold up another.
func TestSlowSampleOfAnother(t *testing.T) {
	g := newGate(1, 2, 3)
	defer func() { g.open(1); g.open(2); g.open(3) }()
	r := start(t, &testDataset{Samples: 100, Hold: g.hold}, loader.Options{Workers: 1, Readers: 3}, 0)
	// all its readers are held
	r.open(t, &feedpb.Open{Order: "sequential", Batch: 4, Transform: "ramp(2,2)", Credits: 2})
	s := r.open(t, &feedpb.Open{Order: "sequential", Batch: 4, Transform: "ramp(2,2)", Epochs: 1,
		State: fmt.Sprintf(`{"v":1,"dataset":%q,"order":"sequential@1","transform":%q,"seed":0,"epoch":0,"cursor":4,"batch":4,"tail":"drop"}`,
			r.ds.Version(), ramp{Height: 2, Width: 2, Type: "uint8"}.Hash())})
	if ids := drain(t, s); len(ids) != 96 {
		t.Errorf("%d samples", len(ids))
	}
}

// A rank that does not read holds its window, and neither more memory nor anybody else.
func TestSlowRank(t *testing.T) {
	const size, n = 20_000, 1200
	sample := make([]byte, size)
	r := start(t, &testDataset{Samples: n, Bytes: func(int) []byte {
		return sample
	}}, loader.Options{LookAhead: 2, MaxWindow: 5}, 0)
	open := func(rank uint32, credits uint32) *feedclient.Stream {
		s, err := r.dial(t).Open(t.Context(),
			&feedpb.Open{Session: "job", Order: "uniform", Batch: 4, World: 3, Rank: rank, Epochs: 1, Credits: credits})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(s.Close)
		return s
	}
	slow := open(1, 1)
	var ids []int64
	for _, rank := range []uint32{0, 2} {
		ids = append(ids, drain(t, open(rank, 2))...)
	}
	if len(ids) != n/3*2 {
		t.Errorf("the others got %d samples", len(ids))
	}
	r.client.Close()
	// One credit, two batches of look-ahead; gRPC may still hold the one that was sent.
	if held, most := r.server.Stats().HeldBytes, int64(4*4*size*17/16); held > most {
		t.Errorf("the slow rank holds %d bytes, more than %d", held, most)
	}
	ids = append(ids, drain(t, slow)...)
	slices.Sort(ids)
	if len(slices.Compact(ids)) != n {
		t.Errorf("%d different samples in all", len(slices.Compact(ids)))
	}
}

// Credits beyond all sense are as good as many.
func TestEndlessCredits(t *testing.T) {
	r := start(t, &testDataset{Samples: 100}, loader.Options{MaxWindow: 3}, 0)
	conn, err := grpc.NewClient(r.addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	s, err := feedpb.NewFeedClient(conn).Stream(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	open := &feedpb.Open{Order: "sequential", Batch: 1, Epochs: 1, Credits: math.MaxUint32}
	credit := &feedpb.ClientMessage{Kind: &feedpb.ClientMessage_Credit{Credit: &feedpb.Credit{N: math.MaxUint32}}}
	for _, m := range []*feedpb.ClientMessage{{Kind: &feedpb.ClientMessage_Open{Open: open}}, credit, credit, credit} {
		if err := s.Send(m); err != nil {
			t.Fatal(err)
		}
	}
	if batches := countBatches(t, s); batches != 100 {
		t.Errorf("%d batches", batches)
	}
}

// Once a newer stream is open the older delivers nothing, even if batches are ready, credits come, and its
// workers have not noticed yet.
func TestFencedDeliversNothing(t *testing.T) {
	g := newGate(9)
	defer g.open(9)
	r := start(t, &testDataset{Samples: 100, Hold: g.hold}, loader.Options{LookAhead: 4, Readers: 2}, 0)
	o := &feedpb.Open{Session: "job", Order: "sequential", Batch: 4, Credits: 1}
	old := r.open(t, o)
	if b, err := old.Next(); err != nil || b.ID(0) != 0 {
		t.Fatal(err)
	}
	// The second batch is ready and has no credit; the third waits for sample 9.
	eventually(t, "the second batch is ready", func() bool { return g.has(0, 9) })
	newer, err := r.dial(t).Open(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	defer newer.Close()
	ended := make(chan error, 1)
	go func() {
		_, err := old.Next() // grants a credit
		ended <- err
	}()
	// The new stream is at work, and the old one still winds up: it has had its time to deliver.
	for range 2 {
		if _, err := newer.Next(); err != nil {
			t.Fatal(err)
		}
	}
	g.open(9)
	wantError(t, <-ended, codes.Aborted, "newer stream")
}

// A job that comes back with another number of ranks ends all ranks of before.
func TestFencingAcrossWorlds(t *testing.T) {
	r := start(t, &testDataset{Samples: 100}, loader.Options{}, 0)
	open := func(session string, world, rank uint32) *feedclient.Stream {
		return r.open(t, &feedpb.Open{Session: session, Batch: 5, World: world, Rank: rank, Credits: 1})
	}
	var before []*feedclient.Stream
	for rank := range uint32(4) {
		before = append(before, open("job", 4, rank))
	}
	other := open("another job", 4, 3)
	after := []*feedclient.Stream{open("job", 2, 0), open("job", 2, 1)}
	for rank, s := range before {
		var err error
		for err == nil {
			_, err = s.Next()
		}
		wantError(t, err, codes.Aborted, "newer stream")
		if e := (*feedclient.Error)(nil); !errors.As(err, &e) {
			t.Errorf("rank %d: %v", rank, err)
		}
	}
	for _, s := range append(after, other) {
		for range 6 {
			if _, err := s.Next(); err != nil {
				t.Fatal(err)
			}
		}
	}
	if st := r.server.Stats(); st.Fenced != 4 || st.Open != 3 {
		t.Errorf("%d fenced, %d open", st.Fenced, st.Open)
	}
}

// A quota of bad samples is one of the epoch, however often the trainer resumes.
func TestQuotaSurvivesResume(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "feed.sock")
	rapid.Check(t, func(rt *rapid.T) {
		const n = 60
		batch := rapid.IntRange(1, 12).Draw(rt, "batch")
		quota := rapid.IntRange(0, 5).Draw(rt, "quota")
		bad := map[int]bool{}
		for _, i := range rapid.SliceOfNDistinct(rapid.IntRange(0, n-1), 0, 8, rapid.ID).Draw(rt, "bad") {
			bad[i] = true
		}
		r, stop := serve(rt, socket, &testDataset{Samples: n, Bad: bad}, loader.Options{LookAhead: 1}, 0)
		defer stop()

		// The model: two epochs, each fails at the bad sample after the quota.
		type step struct{ epoch, index, bad int }
		var want []step
		failure := ""
	model:
		for epoch := range 2 {
			seen := 0
			for k := 0; k*batch < n; k++ {
				for i := k * batch; i < min(n, (k+1)*batch); i++ {
					if bad[i] {
						if seen++; seen > quota {
							failure = fmt.Sprintf("bad sample %d ", i)
							break model
						}
					}
				}
				want = append(want, step{epoch, k, seen})
			}
		}

		state, failed := "", ""
		var got []step
		for over := false; !over; {
			lives := rapid.IntRange(0, 6).Draw(rt, "batches")
			s, err := r.client.Open(t.Context(),
				&feedpb.Open{Order: "sequential", Batch: uint32(batch), Transform: "ramp(2,2)",
					Bad: fmt.Sprintf("skip:%d", quota), Tail: "uneven", State: state, Credits: 2})
			if err != nil {
				rt.Fatal(err)
			}
			for k := 0; k <= lives && !over; k++ {
				b, err := s.Next()
				if err != nil {
					failed, over = err.Error(), true
					break
				}
				if b.Header.GetEpoch() == 2 {
					over = true
					break
				}
				st, err := loader.ParseState(b.Header.GetState())
				if err != nil {
					rt.Fatal(err)
				}
				if strings.Contains(b.Header.GetState(), "bad") != (st.Bad > 0) {
					rt.Fatalf("state %s", b.Header.GetState())
				}
				got = append(got, step{int(b.Header.GetEpoch()), int(b.Header.GetIndex()), st.Bad})
				state = s.State()
			}
			s.Close()
		}
		if !slices.Equal(got, want) || (failure != "") != (failed != "") || !strings.Contains(failed, failure) {
			rt.Fatalf("got %v, %q\nwant %v, %q", got, failed, want, failure)
		}
	})
}
