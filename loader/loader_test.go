package loader_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	reflectionpb "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"pgregory.net/rapid"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/loader"
	"github.com/shoalfs/shoal/loader/feedclient"
	"github.com/shoalfs/shoal/loader/feedpb"
	"github.com/shoalfs/shoal/prefetch/order"
)

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == serveVerb {
		if err := serveFeed(os.Args[2:]); err != nil {
			fmt.Fprintln(os.Stderr, "feedserver:", err)
			os.Exit(1)
		}
		return
	}
	goleak.VerifyTestMain(m)
}

// rig is a server on a unix socket with a client.
type rig struct {
	ds     *testDataset
	mem    *testLedger
	server *loader.Server
	addr   string
	client *feedclient.Client

	refreshed atomic.Pointer[testDataset] // served to new sessions instead of ds
}

// start serves ds until the test ends, and then checks that nothing is left of any session.
func start(t testing.TB, ds *testDataset, o loader.Options, limit int64) *rig {
	t.Helper()
	r, stop := serve(t, filepath.Join(t.TempDir(), "feed.sock"), ds, o, limit)
	t.Cleanup(stop)
	return r
}

func serve(t fataler, socket string, ds *testDataset, o loader.Options, limit int64) (r *rig, stop func()) {
	t.Helper()
	r = &rig{ds: ds, mem: &testLedger{Limit: limit}, addr: "unix://" + socket}
	o.Compile, o.Memory = compileRamp, r.mem
	r.server = loader.NewServer(func() loader.Dataset {
		if next := r.refreshed.Load(); next != nil {
			return next
		}
		return ds
	}, o)
	l, err := loader.Listen(r.addr, loader.ListenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- r.server.Serve(l) }()
	if r.client, err = feedclient.Dial(r.addr, feedclient.Security{}); err != nil {
		t.Fatal(err)
	}
	return r, func() {
		r.client.Close()
		r.server.Close()
		if err := <-served; err != nil {
			t.Errorf("Serve: %v", err)
		}
		r.empty(t)
	}
}

// fataler is what testing.TB and rapid.T have in common and is used here.
type fataler interface {
	Helper()
	Fatal(args ...any)
	Fatalf(format string, args ...any)
	Errorf(format string, args ...any)
}

func (r *rig) dial(t testing.TB) *feedclient.Client {
	t.Helper()
	c, err := feedclient.Dial(r.addr, feedclient.Security{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// empty waits until all gauges are zero.
func (r *rig) empty(t fataler) {
	t.Helper()
	var st loader.Stats
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(time.Millisecond) {
		st = r.server.Stats()
		if st.Open == 0 && st.HeldBytes == 0 && r.mem.Used() == 0 && r.ds.Open.Load() == 0 && r.ds.Reading.Load() == 0 {
			return
		}
	}
	t.Fatalf("left over: %d sessions, %d bytes held, %d reserved, %d streams, %d samples",
		st.Open, st.HeldBytes, r.mem.Used(), r.ds.Open.Load(), r.ds.Reading.Load())
}

func (r *rig) open(t testing.TB, o *feedpb.Open) *feedclient.Stream {
	t.Helper()
	s, err := r.client.Open(t.Context(), o)
	if err != nil {
		t.Fatalf("open %v: %v", o, err)
	}
	t.Cleanup(s.Close)
	return s
}

func code(err error) codes.Code {
	var e *feedclient.Error
	if errors.As(err, &e) {
		return e.Code
	}
	return codes.Unknown
}

func wantError(t testing.TB, err error, c codes.Code, words ...string) {
	t.Helper()
	if err == nil || code(err) != c {
		t.Fatalf("got %v (%v), want %v", err, code(err), c)
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Fatalf("error %q does not name %q", err, w)
		}
	}
}

// drain returns the ids of all valid rows that are left.
func drain(t testing.TB, s *feedclient.Stream) (ids []int64) {
	t.Helper()
	for {
		b, err := s.Next()
		if errors.Is(err, io.EOF) {
			return ids
		}
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, validIDs(b)...)
		b.Release()
	}
}

func validIDs(b *feedclient.Batch) (ids []int64) {
	for i := range b.Rows() {
		if b.Valid(i) {
			ids = append(ids, b.ID(i))
		}
	}
	return ids
}

func TestRawSamples(t *testing.T) {
	ds := &testDataset{Samples: 103}
	r := start(t, ds, loader.Options{}, 0)
	s := r.open(t, &feedpb.Open{Order: "uniform:seed=9", Batch: 10, Tail: "pad", Epochs: 2})
	digest, want := feedclient.NewDigest(), feedclient.NewDigest()
	batches := 0
	for {
		b, err := s.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		for i := range b.Rows() {
			if !b.Valid(i) {
				if b.ID(i) != -1 || b.Label(i) != loader.IgnoredLabel || len(b.Row(i)) != 0 {
					t.Fatalf("padding row %d: id %d, label %d, %d bytes", i, b.ID(i), b.Label(i), len(b.Row(i)))
				}
				continue
			}
			if id := int(b.ID(i)); !bytes.Equal(b.Row(i), sampleOf(id)) || b.Label(i) != int64(id%numClasses) {
				t.Fatalf("row %d, sample %d: wrong bytes or label", i, id)
			}
		}
		digest.Add(b)
		batches++
		b.Release()
	}
	for epoch := range 2 {
		o := order.Uniform(103, 9, epoch)
		for p := range 103 {
			want.AddSample(uint64(o.At(p)), sampleOf(o.At(p)))
		}
	}
	if batches != 22 || s.Epochs() != 2 {
		t.Errorf("%d batches, %d epochs; want 22 and 2", batches, s.Epochs())
	}
	if !bytes.Equal(digest.Sum(), want.Sum()) {
		t.Error("the digest is not that of the order")
	}
}

func TestDecodedBatches(t *testing.T) {
	for _, dtype := range []string{"uint8", "fp32"} {
		t.Run(dtype, func(t *testing.T) {
			r := start(t, &testDataset{Samples: 50}, loader.Options{}, 0)
			s := r.open(t, &feedpb.Open{Order: "torch", Seed: 3, Batch: 4, World: 3, Rank: 1, Epoch: 2, Epochs: 1,
				Transform: "ramp(5,7)|" + dtype, Tail: "uneven"})
			o := s.Opened()
			if o.GetOrder() != "torch@1:seed=3,world=3" || o.GetBatches() != 5 || o.GetPerEpoch() != 5 ||
				o.GetLayout() != "nchw" {
				t.Fatalf("opened: %v", o)
			}
			want := order.Torch(50, 3, 2, 3, 1, 1, false)
			pos := 0
			for {
				b, err := s.Next()
				if errors.Is(err, io.EOF) {
					break
				}
				if err != nil {
					t.Fatal(err)
				}
				p := b.Header.GetPlanes()[0]
				shape := []uint64{uint64(b.Rows()), 3, 5, 7}
				name := map[string]string{"uint8": "uint8", "fp32": "float32"}[dtype]
				if p.GetDtype() != name || !slices.Equal(p.GetShape(), shape) {
					t.Fatalf("data plane %v", p)
				}
				for i := range b.Rows() {
					id := want.At(pos)
					row := make([]byte, len(b.Row(i)))
					tr, _ := compileRamp(t.Context(), "ramp(5,7)|"+dtype, nil)
					draw := loader.Draw{Seed: 3, Epoch: 2, Sample: uint64(id), Occurrence: uint32((1 + 3*pos) / 50)}
					if err := tr.Make(loader.Sample{Data: sampleOf(id)}, draw,
						&loader.Row{Fields: [][]byte{row}}); err != nil {
						t.Fatal(err)
					}
					if b.ID(i) != int64(id) || !bytes.Equal(b.Row(i), row) {
						t.Fatalf("position %d: sample %d, want %d, or other bytes", pos, b.ID(i), id)
					}
					pos++
				}
				b.Release()
			}
			if pos != want.Len() {
				t.Errorf("%d rows, want %d", pos, want.Len())
			}
		})
	}
}

// The stream of all ranks together is the order, each position once, whatever the world size, the
// batch and the tail, and however often trainers die and resume, also at another world size.
func TestExactlyOnce(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "feed.sock")
	rapid.Check(t, func(rt *rapid.T) {
		n := rapid.IntRange(1, 200).Draw(rt, "n")
		tail := rapid.SampledFrom([]string{"drop", "pad", "uneven"}).Draw(rt, "tail")
		world := rapid.IntRange(1, 5).Draw(rt, "world")
		batch := rapid.IntRange(1, 9).Draw(rt, "batch")
		seed := rapid.Uint64Range(0, 3).Draw(rt, "seed")
		algorithm := rapid.SampledFrom([]string{"uniform", "torch", "sequential"}).Draw(rt, "order")
		if tail == "drop" && batch*world > n || tail == "uneven" && world > n {
			rt.Skip("no batch for some rank")
		}
		r, stop := serve(rt, socket, &testDataset{Samples: n}, loader.Options{LookAhead: 1}, 0)
		defer stop()
		global := batch * world
		const epochs = 2 // a session that was resumed may go on beyond them

		// The oracle: the global order of each epoch, cut into global batches.
		var oracle [][]int64
		for e := range epochs {
			var o order.Order
			switch algorithm {
			case "uniform":
				o = order.Uniform(n, seed, e)
			case "sequential":
				o = order.Sequential(n)
			case "torch": // DistributedSampler's padding, all ranks step by step
				o = order.Torch(n, seed, e, world, 0, world-1, false)
			}
			end := o.Len()
			if tail == "drop" {
				end = end / global * global
			}
			for p := 0; p < end; p += global {
				var ids []int64
				for q := p; q < min(p+global, end); q++ {
					ids = append(ids, int64(o.At(q)))
				}
				oracle = append(oracle, ids)
			}
		}

		perEpoch := len(oracle) / epochs
		name := rapid.StringMatching("[a-z]{8}").Draw(rt, "session")
		state, done := "", 0
		for done < len(oracle) {
			// All ranks resume from one state, take the global batches up to stop, and die, with
			// more on the way to them.
			stop := rapid.IntRange(done+1, len(oracle)).Draw(rt, "stop")
			w := world
			if state != "" && algorithm != "torch" {
				w = rapid.SampledFrom(divisors(global, n)).Draw(rt, "new world")
			}
			got := make([][][]int64, stop-done) // by step and rank
			for i := range got {
				got[i] = make([][]int64, w)
			}
			next := state
			for rank := range w {
				s, err := r.client.Open(t.Context(),
					&feedpb.Open{Session: name, Order: algorithm, Seed: seed, Batch: uint32(global / w),
						World: uint32(w), Rank: uint32(rank), Tail: tail, Epochs: epochs, State: state, Credits: 3})
				if err != nil {
					rt.Fatal(err)
				}
				for {
					b, err := s.Next()
					if errors.Is(err, io.EOF) {
						break
					}
					if err != nil {
						rt.Fatal(err)
					}
					step := int(b.Header.GetEpoch())*perEpoch + int(b.Header.GetIndex())
					if step >= stop || step >= len(oracle) {
						break
					}
					if tail != "uneven" && b.Rows() != global/w {
						rt.Fatalf("%d rows with tail %s", b.Rows(), tail)
					}
					if rank == 0 {
						next = b.Header.GetState()
					}
					got[step-done][rank] = validIDs(b)
					b.Release()
				}
				s.Close()
			}
			for step, ranks := range got {
				var ids []int64
				for i := range global / w {
					for _, mine := range ranks {
						if i < len(mine) {
							ids = append(ids, mine[i])
						}
					}
				}
				if !slices.Equal(ids, oracle[done+step]) {
					rt.Fatalf("global batch %d (world %d): got %v, want %v", done+step, w, ids, oracle[done+step])
				}
			}
			state, done = next, stop
		}
	})
}

// divisors returns the world sizes that a global batch can be resumed with, no larger than most.
func divisors(global, most int) (list []int) {
	for w := 1; w <= min(global, most); w++ {
		if global%w == 0 {
			list = append(list, w)
		}
	}
	return list
}

// A stream resumed after any batch goes on byte for byte as the first would have.
func TestResumeIsIdentical(t *testing.T) {
	r := start(t, &testDataset{Samples: 61}, loader.Options{}, 0)
	open := func(state string) *feedclient.Stream {
		return r.open(t, &feedpb.Open{Session: "s", Seed: 4, Batch: 7, Transform: "ramp(3,3)", Epochs: 2, State: state,
			Tail: "pad"})
	}
	var states []string
	var batches [][]byte
	s := open("")
	states = append(states, s.State())
	for range 18 {
		b, err := s.Next()
		if err != nil {
			t.Fatal(err)
		}
		batches = append(batches, bytes.Clone(b.Bytes()))
		states = append(states, s.State())
		b.Release()
	}
	for k := range batches {
		s := open(states[k])
		for j := k; j < min(k+3, len(batches)); j++ {
			b, err := s.Next()
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(b.Bytes(), batches[j]) || s.State() != states[j+1] {
				t.Fatalf("resumed after %d batches: batch %d differs", k, j)
			}
		}
	}
	var st loader.State
	if err := json.Unmarshal([]byte(states[1]), &st); err != nil {
		t.Fatal(err)
	}
	want := fmt.Sprintf(`{"v":1,"dataset":%q,"order":"uniform@1:seed=4","transform":%q,"seed":4,"epoch":0,"cursor":7,"batch":7,"tail":"pad","samples":%d}`,
		r.ds.Version(), st.Transform, r.ds.Len())
	if states[1] != want {
		t.Errorf("state %s\n want %s", states[1], want)
	}
}

// An order over shards is that of the packing: the feed delivers it whole, resumes it, and refuses a state
// that was taken with another packing.
func TestWindowedOrders(t *testing.T) {
	ds := &testDataset{Samples: 60, Shard: 10}
	r := start(t, ds, loader.Options{}, 0)
	open := func(state string) *feedpb.Open {
		return &feedpb.Open{Session: "s", Order: "windowed:seed=3,window=2", Batch: 8, Epochs: 1,
			Tail: "pad", State: state}
	}
	spec, err := order.Parse("windowed:seed=3,window=2")
	if err != nil {
		t.Fatal(err)
	}
	o, err := spec.Over(order.Facts{Samples: 60, Shards: func() order.Groups { return order.Contiguous(60, 10) }}, 0)
	if err != nil {
		t.Fatal(err)
	}
	var want []int64
	for pos := range o.Len() {
		want = append(want, int64(o.At(pos)))
	}
	if got := drain(t, r.open(t, open(""))); !slices.Equal(got, want) {
		t.Errorf("delivered %v\n want %v", got, want)
	}
	s := r.open(t, open(""))
	for range 3 {
		b, err := s.Next()
		if err != nil {
			t.Fatal(err)
		}
		b.Release()
	}
	state := s.State()
	if got := drain(t, r.open(t, open(state))); !slices.Equal(got, want[24:]) {
		t.Errorf("resumed with %v\n want %v", got, want[24:])
	}
	resumed := open(state)
	resumed.Order = "" // the state names it
	if got := drain(t, r.open(t, resumed)); !slices.Equal(got, want[24:]) {
		t.Errorf("resumed by the state's order with %v\n want %v", got, want[24:])
	}

	other := start(t, &testDataset{Samples: 60, Shard: 12}, loader.Options{}, 0)
	_, err = other.dial(t).Open(t.Context(), open(state))
	wantError(t, err, codes.FailedPrecondition, "shards=")
	loose := start(t, &testDataset{Samples: 60}, loader.Options{}, 0)
	_, err = loose.dial(t).Open(t.Context(), open(""))
	wantError(t, err, codes.InvalidArgument, "shoal pack")
}

func TestRefusedStates(t *testing.T) {
	r := start(t, &testDataset{Samples: 100}, loader.Options{}, 0)
	base := func() *feedpb.Open {
		return &feedpb.Open{Order: "uniform:seed=5", Seed: 5, Batch: 4, World: 2, Transform: "ramp(2,2)", Tail: "drop"}
	}
	s := r.open(t, base())
	if _, err := s.Next(); err != nil {
		t.Fatal(err)
	}
	state := s.State()
	s.Close()
	edit := func(from, to string) string {
		if !strings.Contains(state, from) {
			t.Fatalf("state %s has no %s", state, from)
		}
		return strings.Replace(state, from, to, 1)
	}
	for _, c := range []struct {
		name   string
		change func(o *feedpb.Open)
		code   codes.Code
		words  []string
	}{
		{"dataset", func(o *feedpb.Open) {
			o.State = edit(r.ds.Version(), "feed")
		}, codes.FailedPrecondition, []string{"feed", r.ds.Version()}},
		{"samples", func(o *feedpb.Open) {
			o.State = edit(`"samples":100`, `"samples":99`)
		}, codes.FailedPrecondition, []string{"99 samples", "100", "--samples"}},
		{"order seed", func(o *feedpb.Open) {
			o.Order = "uniform:seed=6"
		}, codes.FailedPrecondition, []string{"uniform@1:seed=5", "uniform@1:seed=6"}},
		{"algorithm", func(o *feedpb.Open) {
			o.Order = "torch"
		}, codes.FailedPrecondition, []string{"uniform@1:seed=5", "torch@1:seed=5,world=2"}},
		{"algorithm version", func(o *feedpb.Open) {
			o.State = edit("uniform@1", "uniform@9")
		}, codes.FailedPrecondition, []string{"uniform@9", "uniform@1"}},
		{"transform", func(o *feedpb.Open) {
			o.Transform = "ramp(2,3)"
		}, codes.FailedPrecondition, []string{"ramp(2,3)"}},
		{"seed", func(o *feedpb.Open) { o.Seed = 6 }, codes.FailedPrecondition, []string{"seed 5", "seed 6"}},
		{"tail", func(o *feedpb.Open) { o.Tail = "pad" }, codes.FailedPrecondition, []string{"drop", "pad"}},
		{"batch", func(o *feedpb.Open) {
			o.World = 1
		}, codes.FailedPrecondition, []string{"global batch of 8", "a batch size of 8"}},
		{"world", func(o *feedpb.Open) { o.World, o.Batch = 3, 0 }, codes.FailedPrecondition, []string{"8", "3 ranks"}},
		{"cursor", func(o *feedpb.Open) {
			o.State = edit(`"cursor":8`, `"cursor":101`)
		}, codes.FailedPrecondition, []string{"101", "100"}},
		{"negative cursor", func(o *feedpb.Open) {
			o.State = edit(`"cursor":8`, `"cursor":-1`)
		}, codes.InvalidArgument, []string{"-1"}},
		{"no tail", func(o *feedpb.Open) {
			o.State = edit(`,"tail":"drop"`, ``)
		}, codes.InvalidArgument, []string{"no tail", "state_dict()"}},
		{"format", func(o *feedpb.Open) {
			o.State = edit(`"v":1`, `"v":2`)
		}, codes.InvalidArgument, []string{"version 2"}},
		{"not JSON", func(o *feedpb.Open) { o.State = "{" }, codes.InvalidArgument, []string{"JSON"}},
		{"two", func(o *feedpb.Open) { o.State = state + state }, codes.InvalidArgument, []string{"after top-level"}},
		{"a brace", func(o *feedpb.Open) { o.State = state + "}" }, codes.InvalidArgument, []string{"after top-level"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			o := base()
			o.State = state
			c.change(o)
			_, err := r.client.Open(t.Context(), o)
			wantError(t, err, c.code, c.words...)
		})
	}

	// What is left out comes from the state; another global batch is possible on request.
	s = r.open(t, &feedpb.Open{State: state, World: 4, Rank: 3, Transform: "ramp(2,2)"})
	if o := s.Opened(); o.GetBatch() != 2 || o.GetOrder() != "uniform@1:seed=5" || o.GetState() != state {
		t.Errorf("resumed as %v", o)
	}
	o := base()
	o.State, o.Batch, o.World, o.Rebatch, o.Epochs = state, 3, 1, true, 1
	o.Tail = "drop"
	ids := drain(t, r.open(t, o))
	want := order.Uniform(100, 5, 0)
	if len(ids) != 90 { // 92 are left, 30 batches of 3
		t.Fatalf("%d samples after the new batch size", len(ids))
	}
	for i, id := range ids {
		if id != int64(want.At(8+i)) {
			t.Fatalf("sample %d after the new batch size: %d, want %d", i, id, want.At(8+i))
		}
	}
}

func TestRefusedOpens(t *testing.T) {
	r := start(t, &testDataset{Samples: 100}, loader.Options{MaxBatchBytes: 1 << 20}, 0)
	for _, c := range []struct {
		name  string
		open  *feedpb.Open
		code  codes.Code
		words []string
	}{
		{"no batch", &feedpb.Open{}, codes.InvalidArgument, []string{"batch size missing"}},
		{"huge batch", &feedpb.Open{Batch: 1 << 31}, codes.InvalidArgument, []string{"batch"}},
		{"large batch", &feedpb.Open{Batch: 50_000, Transform: "ramp(8,8)"}, codes.InvalidArgument,
			[]string{"limit of 1048576"}},
		{"rank", &feedpb.Open{Batch: 1, World: 2, Rank: 2}, codes.InvalidArgument, []string{"rank 2", "world of 2"}},
		{"rank in a world of one", &feedpb.Open{Batch: 1, Rank: 2}, codes.InvalidArgument, []string{"rank 2"}},
		{"rank twice", &feedpb.Open{Batch: 1, World: 2, Rank: 1, Order: "torch:seed=1,world=2,rank=0"},
			codes.InvalidArgument, []string{"rank 1 of 2"}},
		{"several ranks", &feedpb.Open{Batch: 1, Order: "torch:seed=1,world=2,rank=0-1"}, codes.InvalidArgument,
			[]string{"0-1"}},
		{"order", &feedpb.Open{Batch: 1, Order: "unifrom"}, codes.InvalidArgument, []string{"unifrom", "uniform"}},
		{"plan", &feedpb.Open{Batch: 1, Order: "plan"}, codes.InvalidArgument, []string{"mounts"}},
		{"epochs", &feedpb.Open{Batch: 1, Order: "uniform:epoch=3", Epoch: 2}, codes.InvalidArgument,
			[]string{"epoch 3"}},
		{"tail", &feedpb.Open{Batch: 1, Tail: "wrap"}, codes.InvalidArgument, []string{"wrap", "uneven"}},
		{"bad", &feedpb.Open{Batch: 1, Bad: "skip"}, codes.InvalidArgument, []string{`"skip"`}},
		{"bad share", &feedpb.Open{Batch: 1, Bad: "skip:NaN%"}, codes.InvalidArgument, []string{"NaN"}},
		{"transform", &feedpb.Open{Batch: 1, Transform: "blur()"}, codes.InvalidArgument, []string{"blur()"}},
		{"dataset", &feedpb.Open{Batch: 1, Dataset: "abc"}, codes.FailedPrecondition, []string{"abc", r.ds.Version()}},
		{"nothing to deliver", &feedpb.Open{Batch: 60, World: 2}, codes.InvalidArgument,
			[]string{"100 samples", "120"}},
		{"nothing for the rank", &feedpb.Open{Batch: 1, World: 101, Rank: 100, Tail: "uneven"}, codes.InvalidArgument,
			[]string{"rank 100"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := r.client.Open(t.Context(), c.open)
			wantError(t, err, c.code, c.words...)
		})
	}
	if st := r.server.Stats(); st.Sessions != 0 {
		t.Errorf("%d sessions were opened", st.Sessions)
	}
}

// A client that grants credits and takes nothing holds no more than its window, and one that takes
// everything, but slowly, too; others are not held up by them.
func TestBackPressure(t *testing.T) {
	const size = 40_000 // of a sample: a batch of 8 does not fit gRPC's buffers many times
	sample := make([]byte, size)
	ds := &testDataset{Samples: 4000, Bytes: func(int) []byte { return sample }}
	r := start(t, ds, loader.Options{LookAhead: 2, MaxWindow: 6}, 0)
	r.client.Transport = feedclient.Chunks
	batchBytes := int64(8*size) * 17 / 16 // rounded up to a class
	// held is what a stuck session holds while another is served an epoch, which it does not keep from that.
	held := func() int64 {
		s, err := r.dial(t).Open(t.Context(), &feedpb.Open{Session: "other", Batch: 8, Epochs: 1})
		if err != nil {
			t.Fatal(err)
		}
		if ids := drain(t, s); len(ids) != 4000 {
			t.Errorf("%d samples beside a stuck session", len(ids))
		}
		eventually(t, "the other session ends", func() bool { return r.server.Stats().Open == 1 })
		return r.server.Stats().HeldBytes
	}

	idle := r.open(t, &feedpb.Open{Session: "idle", Batch: 8, Credits: 1})
	eventually(t, "the look-ahead is there", func() bool { return r.server.Stats().HeldBytes >= 2*8*size })
	if n := held(); n > 4*batchBytes {
		t.Errorf("one credit, look-ahead 2: %d bytes held, batches have %d", n, batchBytes)
	}
	idle.Close()
	r.empty(t)

	// The windows of the client are 32 MiB; this one's credits are far beyond them.
	greedy := r.open(t, &feedpb.Open{Session: "greedy", Batch: 8, Credits: 1 << 30})
	// Two more may lie in gRPC's queue: the end of one and the next.
	if n := held(); n > 8*batchBytes {
		t.Errorf("endless credits: %d bytes held, batches have %d and the window is 6", n, batchBytes)
	}
	greedy.Close()
}

func TestMemoryLimit(t *testing.T) {
	r := start(t, &testDataset{Samples: 300}, loader.Options{}, 50_000)
	// Two batches of 64 rows of 3*16*16 bytes do not fit: they take turns.
	s := r.open(t, &feedpb.Open{Batch: 32, Transform: "ramp(16,16)", Epochs: 1, Credits: 8, Tail: "uneven"})
	if ids := drain(t, s); len(ids) != 300 {
		t.Errorf("%d samples", len(ids))
	}
	if r.mem.Peak() > 50_000 || r.mem.Peak() < 2*32*3*16*16/2 {
		t.Errorf("peak %d of 50000", r.mem.Peak())
	}
	s = r.open(t, &feedpb.Open{Batch: 128, Transform: "ramp(16,16)"})
	_, err := s.Next()
	wantError(t, err, codes.ResourceExhausted, "128 samples", "50000")
}

func TestFencing(t *testing.T) {
	r := start(t, &testDataset{Samples: 100}, loader.Options{}, 0)
	o := func(rank uint32) *feedpb.Open {
		return &feedpb.Open{Session: "job", Batch: 5, World: 2, Rank: rank, Credits: 1}
	}
	old, other := r.open(t, o(0)), r.open(t, o(1))
	if _, err := old.Next(); err != nil {
		t.Fatal(err)
	}
	newer := r.open(t, o(0))
	var err error
	for err == nil { // at most what was granted is still delivered
		_, err = old.Next()
	}
	wantError(t, err, codes.Aborted, "newer stream")
	for _, s := range []*feedclient.Stream{newer, other} {
		for range 12 {
			if _, err := s.Next(); err != nil {
				t.Fatal(err)
			}
		}
	}
	if st := r.server.Stats(); st.Fenced != 1 || st.Open != 2 || st.Failed != 0 {
		t.Errorf("stats after fencing: %+v", st)
	}
}

// A fenced session whose client has stopped reading gives its memory back although its last message
// cannot be sent.
func TestFencingAStuckClient(t *testing.T) {
	sample := make([]byte, 400_000)
	r := start(t, &testDataset{Samples: 500, Bytes: func(int) []byte { return sample }}, loader.Options{}, 0)
	stuck := r.dial(t)
	stuck.Transport = feedclient.Chunks
	_, err := stuck.Open(t.Context(), &feedpb.Open{Session: "job", Batch: 10, Credits: 1000})
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the client's window of 32 MiB has no room for the next batch, which is there", func() bool {
		return r.server.Stats().Total.Batches == 8 && r.mem.Used() >= 10*400_000
	})
	s := r.open(t, &feedpb.Open{Session: "job", Batch: 1, Credits: 1})
	if _, err := s.Next(); err != nil {
		t.Fatal(err)
	}
	s.Close()
	r.empty(t)
}

// A trainer that dies in mid-epoch leaves nothing behind.
func TestClientDies(t *testing.T) {
	ds := &testDataset{Samples: 1000, Delay: func(int) time.Duration { return time.Millisecond }}
	r := start(t, ds, loader.Options{}, 0)
	for k := range 3 {
		c := r.dial(t)
		s, err := c.Open(t.Context(), &feedpb.Open{Batch: 16, Transform: "ramp(32,32)", Credits: 4})
		if err != nil {
			t.Fatal(err)
		}
		for range k {
			if _, err := s.Next(); err != nil {
				t.Fatal(err)
			}
		}
		c.Close()
		r.empty(t)
	}
	if st := r.server.Stats(); st.Failed != 0 || st.Sessions != 3 || st.Total.Batches == 0 {
		t.Errorf("stats: %+v", st)
	}
}

func TestBadSamples(t *testing.T) {
	ds := &testDataset{Samples: 100, Bad: map[int]bool{25: true, 27: true, 60: true}}
	r := start(t, ds, loader.Options{Workers: 4}, 0)
	open := func(bad string) *feedclient.Stream {
		return r.open(t, &feedpb.Open{Order: "sequential", Batch: 10, Transform: "ramp(2,2)", Bad: bad, Epochs: 2,
			Credits: 8})
	}
	for _, c := range []struct {
		bad   string
		good  int // batches before the error; -1: none
		words []string
	}{
		{"error", 2, []string{"bad sample 25", "class5/000025.bin", "no end marker", "skip:"}},
		{"", 2, []string{"bad sample 25"}},
		{"skip:1", 2, []string{"bad sample 27", "more than the 1", "epoch 0"}},
		{"skip:1.5%", 6, []string{"bad sample 60", "more than the 2"}},
		{"skip:3%", -1, nil},
		{"skip:3", -1, nil},
	} {
		t.Run(c.bad, func(t *testing.T) {
			s := open(c.bad)
			for k := 0; ; k++ {
				b, err := s.Next()
				if errors.Is(err, io.EOF) && c.good < 0 && k == 20 {
					return
				}
				if err != nil {
					if k != c.good {
						t.Errorf("failed after %d batches, want %d", k, c.good)
					}
					wantError(t, err, codes.DataLoss, c.words...)
					return
				}
				reported := map[int]string{}
				for _, bad := range b.Header.GetBad() {
					reported[int(bad.GetId())] = bad.GetPath() + bad.GetCause()
				}
				for i := range b.Rows() {
					id := int(b.ID(i))
					if b.Valid(i) == ds.Bad[id] || (reported[id] != "") != ds.Bad[id] {
						t.Errorf("sample %d: valid %v, reported %q", id, b.Valid(i), reported[id])
					}
					if ds.Bad[id] && (b.Label(i) != loader.IgnoredLabel || !bytes.Equal(b.Row(i), make([]byte, 12))) {
						t.Errorf("sample %d: label %d, row %v", id, b.Label(i), b.Row(i))
					}
				}
				if int(b.Header.GetValid()) != b.Rows()-len(reported) {
					t.Errorf("batch %d: valid %d", k, b.Header.GetValid())
				}
				b.Release()
			}
		})
	}
}

// Errors of the store have codes, name the key, and come after the batches before them.
func TestStoreErrors(t *testing.T) {
	for kind, want := range map[objstore.Kind]codes.Code{
		objstore.KindNotFound: codes.FailedPrecondition, objstore.KindChanged: codes.FailedPrecondition,
		objstore.KindDenied: codes.PermissionDenied, objstore.KindTransient: codes.Unavailable,
		objstore.KindInvalid: codes.FailedPrecondition, objstore.KindOther: codes.Internal,
	} {
		t.Run(kind.String(), func(t *testing.T) {
			err := fmt.Errorf("wrapped: %w",
				&objstore.Error{Op: "read", Key: "s3://b/p/key.jpg", Kind: kind, Err: errors.New("cause")})
			r := start(t, &testDataset{Samples: 100, Errors: map[int]error{50: err}}, loader.Options{}, 0)
			s := r.open(t, &feedpb.Open{Order: "sequential", Batch: 10, Bad: "skip:100%", Credits: 8})
			var got error
			k := -1
			for ; got == nil; k++ {
				_, got = s.Next()
			}
			wantError(t, got, want, "s3://b/p/key.jpg", "sample 50", "cause")
			if k != 5 {
				t.Errorf("failed after %d batches, want 5", k)
			}
		})
	}
}

func TestStopping(t *testing.T) {
	ds := &testDataset{Samples: 100, Delay: func(int) time.Duration { return time.Millisecond }}
	r := start(t, ds, loader.Options{}, 0)
	s := r.open(t, &feedpb.Open{Batch: 5})
	if _, err := s.Next(); err != nil {
		t.Fatal(err)
	}
	go r.server.Close()
	var err error
	for err == nil {
		_, err = s.Next()
	}
	wantError(t, err, codes.Unavailable)
}

// What the engine is told is what is read: the rank's share, without a tail that is dropped.
func TestAnnouncements(t *testing.T) {
	type call struct {
		seq   order.Order
		start int
	}
	calls := make(chan call, 8)
	ds := &testDataset{Samples: 103, Begun: func(_ string, seq order.Order, start int) { calls <- call{seq, start} }}
	r := start(t, ds, loader.Options{}, 0)
	s := r.open(t, &feedpb.Open{Session: "s", Order: "uniform:seed=2", Batch: 5, World: 3, Rank: 1, Epochs: 1})
	if _, err := s.Next(); err != nil {
		t.Fatal(err)
	}
	state := s.State()
	s.Close()
	s = r.open(t, &feedpb.Open{Session: "s", Order: "uniform:seed=2", Batch: 5, World: 3, Rank: 1, Epochs: 1,
		State: state})
	drain(t, s)
	whole := order.Uniform(103, 2, 0)
	for _, first := range []int{0, 5} {
		c := <-calls
		if c.start != first || c.seq.Len() != 30 { // 6 batches of 5 for each of 3 ranks are 90 of 103
			t.Fatalf("announced %d positions from %d, want 30 from %d", c.seq.Len(), c.start, first)
		}
		for p := range c.seq.Len() {
			if c.seq.At(p) != whole.At(1+3*p) {
				t.Fatalf("position %d: sample %d, want %d", p, c.seq.At(p), whole.At(1+3*p))
			}
		}
	}
}

func TestStandardServices(t *testing.T) {
	r := start(t, &testDataset{Samples: 100}, loader.Options{Version: "1.2.3",
		Stats: func(feed loader.Stats) any {
			return struct {
				Feed loader.Stats `json:"feed"`
			}{feed}
		}}, 0)
	conn, err := grpc.NewClient(r.addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	for _, name := range []string{"", "shoal.feed.v1.Feed"} {
		h, err := healthpb.NewHealthClient(conn).Check(t.Context(), &healthpb.HealthCheckRequest{Service: name})
		if err != nil || h.GetStatus() != healthpb.HealthCheckResponse_SERVING {
			t.Errorf("health of %q: %v, %v", name, h, err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	refl, err := reflectionpb.NewServerReflectionClient(conn).ServerReflectionInfo(ctx)
	if err != nil {
		t.Fatal(err)
	}
	ask := &reflectionpb.ServerReflectionRequest{MessageRequest: &reflectionpb.ServerReflectionRequest_ListServices{}}
	if err := refl.Send(ask); err != nil {
		t.Fatal(err)
	}
	m, err := refl.Recv()
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(m.String(), "shoal.feed.v1.Feed") {
		t.Errorf("reflection lists %v", m)
	}

	// A client without our codec gets the same bytes.
	plain, err := feedpb.NewFeedClient(conn).Stream(ctx)
	if err != nil {
		t.Fatal(err)
	}
	open := &feedpb.Open{Order: "sequential", Batch: 2, Transform: "ramp(2,2)", Credits: 1, Client: "plain"}
	if err := plain.Send(&feedpb.ClientMessage{Kind: &feedpb.ClientMessage_Open{Open: open}}); err != nil {
		t.Fatal(err)
	}
	var kinds []string
	for range 3 {
		m, err := plain.Recv()
		if err != nil {
			t.Fatal(err)
		}
		kinds = append(kinds, fmt.Sprintf("%T", m.GetKind()))
		if c := m.GetChunk(); c != nil {
			tr, _ := compileRamp(t.Context(), "ramp(2,2)", nil)
			want := make([]byte, 12)
			if err := tr.Make(loader.Sample{Data: sampleOf(0)}, loader.Draw{},
				&loader.Row{Fields: [][]byte{want}}); err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(c.GetData()[:12], want) {
				t.Errorf("row 0 is %v, want %v", c.GetData()[:12], want)
			}
		}
	}
	if want := []string{"*feedpb.ServerMessage_Opened", "*feedpb.ServerMessage_Batch",
		"*feedpb.ServerMessage_Chunk"}; !slices.Equal(kinds, want) {
		t.Errorf("messages %v", kinds)
	}

	info, err := r.client.Info(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var size uint64
	for i := range 100 {
		size += uint64(len(sampleOf(i)))
	}
	if info.GetDataset() != r.ds.Version() || info.GetSamples() != 100 || info.GetBytes() != size ||
		len(info.GetClasses()) != numClasses || info.GetServer() != "1.2.3" {
		t.Errorf("info %v", info)
	}
	var st loader.Stats
	eventually(t, "the batch is counted, which it is after it was sent", func() bool {
		text, err := r.client.Stats(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		var all struct{ Feed loader.Stats }
		if err := json.Unmarshal(text, &all); err != nil {
			t.Fatal(err)
		}
		st = all.Feed
		return st.Total.Samples > 0
	})
	if st.Version != 1 || st.Open != 1 || st.List[0].Client != "plain" || st.Total.Batches != 1 ||
		st.Total.Samples != 2 {
		t.Errorf("stats %+v", st)
	}
}

func TestProtocolMisuse(t *testing.T) {
	r := start(t, &testDataset{Samples: 100}, loader.Options{}, 0)
	conn, err := grpc.NewClient(r.addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	open := &feedpb.ClientMessage{Kind: &feedpb.ClientMessage_Open{Open: &feedpb.Open{Batch: 1, Credits: 1}}}
	credit := &feedpb.ClientMessage{Kind: &feedpb.ClientMessage_Credit{Credit: &feedpb.Credit{N: 1}}}
	for name, messages := range map[string][]*feedpb.ClientMessage{
		"credit first": {credit}, "nothing": {{}}, "open twice": {open, open},
	} {
		t.Run(name, func(t *testing.T) {
			s, err := feedpb.NewFeedClient(conn).Stream(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			for _, m := range messages {
				if err := s.Send(m); err != nil && !errors.Is(err, io.EOF) {
					t.Fatal(err)
				}
			}
			for err == nil {
				_, err = s.Recv()
			}
			if loader.Code(err) != codes.InvalidArgument {
				t.Errorf("got %v", err)
			}
		})
	}

	// A client that says no more will come gets what it has credit for.
	s, err := feedpb.NewFeedClient(conn).Stream(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range []*feedpb.ClientMessage{open, credit} {
		if err := s.Send(m); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.CloseSend(); err != nil {
		t.Fatal(err)
	}
	if batches := countBatches(t, s); batches != 2 {
		t.Errorf("%d batches for 2 credits", batches)
	}
}

// countBatches counts the batches that come until the stream ends in good order.
func countBatches(t *testing.T, s feedpb.Feed_StreamClient) (n int) {
	t.Helper()
	for {
		m, err := s.Recv()
		if errors.Is(err, io.EOF) {
			return n
		}
		if err != nil {
			t.Fatal(err)
		}
		if m.GetBatch() != nil {
			n++
		}
	}
}

func TestListen(t *testing.T) {
	dir := t.TempDir()
	sock := filepath.Join(dir, "feed.sock")
	l, err := loader.Listen("unix://"+sock, loader.ListenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(sock)
	if err != nil {
		t.Fatal(err)
	}
	if info.Mode().Perm() != 0o660 {
		t.Errorf("mode %v", info.Mode())
	}
	if _, err := loader.Listen("unix://"+sock, loader.ListenOptions{}); err == nil ||
		!strings.Contains(err.Error(), "another server") {
		t.Errorf("a socket in use: %v", err)
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false) // as a killed server leaves it
	l.Close()
	l, err = loader.Listen("unix://"+sock, loader.ListenOptions{SocketGroup: "12345"})
	if err != nil {
		t.Fatalf("a stale socket: %v", err)
	}
	info, err = os.Stat(sock)
	if err != nil {
		t.Fatal(err)
	}
	if info.Mode().Perm() != 0o660 || info.Sys().(*syscall.Stat_t).Gid != 12345 {
		t.Errorf("mode %v, %+v", info.Mode(), info.Sys())
	}
	l.Close()

	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, []byte("precious"), 0o644); err != nil {
		t.Fatal(err)
	}
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	for addr, words := range map[string]string{
		"unix://" + file: "not a socket", "unix://relative": "absolute", "unix://" + file + "/s": "not a directory",
		"tcp://0.0.0.0:0": "other machines", "tcp://:0": "other machines", "tcp://192.0.2.1:70": "other machines",
		"udp://127.0.0.1:0": "unknown scheme", "127.0.0.1:0": "must be", "tcp://127.0.0.1": "missing port",
		"tcp://" + taken.Addr().String(): "another port",
	} {
		if l, err := loader.Listen(addr, loader.ListenOptions{}); err == nil || !strings.Contains(err.Error(), words) {
			t.Errorf("%s: %v, want %q", addr, err, words)
			if l != nil {
				l.Close()
			}
		}
	}
	if l, err := loader.Listen("unix://"+dir+"/new/folder/s", loader.ListenOptions{}); err != nil {
		t.Errorf("a folder that is not there yet: %v", err)
	} else {
		l.Close()
	}
	if b, err := os.ReadFile(file); err != nil || string(b) != "precious" {
		t.Errorf("the file that was in the way: %q, %v", b, err)
	}
	l, err = loader.Listen("tcp://127.0.0.1:0", loader.ListenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
}

func FuzzParseState(f *testing.F) {
	f.Add(`{"v":1,"dataset":"d","order":"uniform@1:seed=5","transform":"raw","seed":5,"epoch":0,"cursor":8,"batch":8,"tail":"drop"}`)
	f.Add(`{"v":1,"batch":-1}`)
	f.Fuzz(func(t *testing.T, text string) {
		s, err := loader.ParseState(text)
		if err != nil {
			return
		}
		again, err := loader.ParseState(s.JSON())
		if err != nil || again != s {
			t.Fatalf("%q became %q: %v", text, s.JSON(), err)
		}
	})
}

// BenchmarkFeed measures the way from finished rows to a client's memory, in one process: both ends
// share the processors.
func BenchmarkFeed(b *testing.B) {
	row := make([]byte, 3*224*224)
	for _, addr := range []string{"unix", "tcp"} {
		b.Run(addr, func(b *testing.B) {
			listen := "unix://" + filepath.Join(b.TempDir(), "feed.sock")
			if addr == "tcp" {
				listen = "tcp://127.0.0.1:0"
			}
			ds := &testDataset{Samples: 1 << 20, Bytes: func(int) []byte { return row }}
			s := loader.NewServer(func() loader.Dataset { return ds }, loader.Options{})
			defer s.Close()
			l, err := loader.Listen(listen, loader.ListenOptions{})
			if err != nil {
				b.Fatal(err)
			}
			go s.Serve(l)
			if addr == "tcp" {
				listen = "tcp://" + l.Addr().String()
			}
			c, err := feedclient.Dial(listen, feedclient.Security{})
			if err != nil {
				b.Fatal(err)
			}
			defer c.Close()
			st, err := c.Open(b.Context(), &feedpb.Open{Batch: 256, Credits: 3})
			if err != nil {
				b.Fatal(err)
			}
			defer st.Close()
			b.SetBytes(int64(256 * len(row)))
			b.ReportAllocs()
			for b.Loop() {
				batch, err := st.Next()
				if err != nil {
					b.Fatal(err)
				}
				batch.Release()
			}
		})
	}
}
