package loader_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/shoalfs/shoal/lab/rig/synced"
	"github.com/shoalfs/shoal/loader"
	"github.com/shoalfs/shoal/loader/feedclient"
	"github.com/shoalfs/shoal/loader/feedpb"
	"github.com/shoalfs/shoal/prefetch/order"
)

// contents returns the bytes of all batches of a stream.
func contents(t testing.TB, s *feedclient.Stream) (all [][]byte) {
	t.Helper()
	for {
		b, err := s.Next()
		if errors.Is(err, io.EOF) {
			return all
		}
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, bytes.Clone(b.Bytes()))
		b.Release()
	}
}

// Slots and Chunks bring the same bytes.
func TestSlotsAreChunks(t *testing.T) {
	for name, transform := range map[string]string{"raw": "", "uint8": "ramp(9,5)", "fp32": "ramp(9,5)|fp32"} {
		t.Run(name, func(t *testing.T) {
			r := start(t, &testDataset{Samples: 203}, loader.Options{}, 0)
			open := &feedpb.Open{Batch: 10, Epochs: 2, Tail: "pad", Transform: transform, Seed: 5}
			r.client.Transport = feedclient.Slots
			s := r.open(t, open)
			in := contents(t, s)
			if st := r.server.Stats(); st.Total.InSlots != int64(len(in)) || len(in) != 42 {
				t.Errorf("%d batches, %d in slots", len(in), st.Total.InSlots)
			}
			r.client.Transport = feedclient.Chunks
			want := contents(t, r.open(t, open))
			if len(in) != len(want) {
				t.Fatalf("%d batches in slots, %d in chunks", len(in), len(want))
			}
			for i := range want {
				if !bytes.Equal(in[i], want[i]) {
					t.Fatalf("batch %d differs", i)
				}
			}
		})
	}
}

// Two trainers get the very same memory, and each sample is read once.
func TestSharedPass(t *testing.T) {
	ds := &testDataset{Samples: 400}
	r := start(t, ds, loader.Options{}, 0)
	r.client.Transport = feedclient.Slots
	open := &feedpb.Open{Batch: 10, Epochs: 1, Transform: "ramp(9,5)", Readonly: true}
	a, b := r.open(t, open), r.open(t, open)
	for i := 0; ; i++ {
		x, errX := a.Next()
		y, errY := b.Next()
		if errors.Is(errX, io.EOF) && errors.Is(errY, io.EOF) {
			break
		}
		if errX != nil || errY != nil {
			t.Fatal(errX, errY)
		}
		if x.Header.GetSlot() != y.Header.GetSlot() || !bytes.Equal(x.Bytes(), y.Bytes()) {
			t.Fatalf("batch %d: slots %d and %d", i, x.Header.GetSlot(), y.Header.GetSlot())
		}
		x.Release()
		y.Release()
	}
	if st := r.server.Stats(); st.Total.Shared != 40 || st.Total.Batches != 80 {
		t.Errorf("%d of %d batches shared", st.Total.Shared, st.Total.Batches)
	}
}

// A client that keeps every slot waits; what it has is not touched meanwhile, and one slot that it
// gives back brings the next batch.
func TestSlotsRunOut(t *testing.T) {
	r := start(t, &testDataset{Samples: 400}, loader.Options{}, 0)
	r.client.Transport = feedclient.Slots
	// Many more slots than credits: the Go client copies what would hold the server up.
	s := r.open(t, &feedpb.Open{Batch: 10, Epochs: 1, Transform: "ramp(9,5)", Slots: 5, Credits: 2})
	var kept []*feedclient.Batch
	var was [][]byte
	for {
		b, err := s.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		kept, was = append(kept, b), append(was, bytes.Clone(b.Bytes()))
	}
	views := slices.DeleteFunc(slices.Clone(kept), func(b *feedclient.Batch) bool {
		return reflect.ValueOf(b).Elem().FieldByName("memory").IsNil()
	})
	if len(views) != 3 {
		t.Errorf("%d of 40 batches are views of slots, 3 fit", len(views))
	}
	s.Close()
	eventually(t, "the session ends", func() bool { return r.server.Stats().Open == 0 })
	for i, b := range kept {
		if !bytes.Equal(b.Bytes(), was[i]) {
			t.Errorf("batch %d changed", i)
		}
		b.Release()
	}
}

// check compares a batch of ramp(9,5) with what its samples say.
func check(b *feedclient.Batch, seed uint64) error {
	for i := range b.Rows() {
		id := b.ID(i)
		row, src := b.Row(i), sampleOf(int(id))
		draw := loader.Draw{Seed: seed, Epoch: b.Header.GetEpoch(), Sample: uint64(id)}
		for k, v := range row {
			if v != rampValue(src, draw, k) {
				return fmt.Errorf("epoch %d, batch %d, row %d, sample %d: element %d is wrong",
					b.Header.GetEpoch(), b.Header.GetIndex(), i, id, k)
			}
		}
	}
	return nil
}

// Trainers that come and go, and are quick and slow, each get what they would alone.
func TestSharedPassOfMany(t *testing.T) {
	before := memfds(t)
	r := start(t, &testDataset{Samples: 300}, loader.Options{}, 0)
	r.client.Transport = feedclient.Slots
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	var trainers sync.WaitGroup
	for i := range 5 {
		trainers.Go(func() {
			rng := rand.New(rand.NewPCG(seed, uint64(i)))
			for range 6 {
				epoch := rng.Uint32N(2)
				s, err := r.client.Open(t.Context(),
					&feedpb.Open{Batch: 10, Order: "uniform:seed=4", Seed: 3, Transform: "ramp(9,5)", Readonly: true,
						Credits: 1 + rng.Uint32N(3), Slots: 4, Epoch: epoch, Epochs: 2})
				if err != nil {
					t.Error(err)
					return
				}
				want, at := epochIDs(4, int(epoch), int(epoch)+1), 0
				var kept []*feedclient.Batch
				for range rng.IntN(60) {
					b, err := s.Next()
					if err != nil {
						t.Error(err)
						break
					}
					if ids := validIDs(b); !slices.Equal(ids, want[at:at+len(ids)]) {
						t.Errorf("samples %v, want %v", ids, want[at:at+len(ids)])
					}
					at += b.Rows()
					kept = append(kept, b)
					for len(kept) > rng.IntN(4) {
						if err := check(kept[0], 3); err != nil {
							t.Error(err)
						}
						kept[0].Release()
						kept = kept[1:]
					}
				}
				s.Close()
				for _, b := range kept { // of a session that is over, while others go on
					if err := check(b, 3); err != nil {
						t.Error(err)
					}
					b.Release()
				}
			}
		})
	}
	trainers.Wait()
	r.empty(t)
	if n := memfds(t) - before; n != 0 {
		t.Errorf("%d descriptors and mappings of slots are left", n)
	}
}

// epochIDs returns the samples of some epochs of uniform order over 300.
func epochIDs(seed uint64, epochs ...int) (ids []int64) {
	for _, e := range epochs {
		o := order.Uniform(300, seed, e)
		for p := range 300 {
			ids = append(ids, int64(o.At(p)))
		}
	}
	return ids
}

// A trainer that stops keeps what it has and holds up nobody, however many do; when it goes on, it
// gets what it would have got.
func TestStoppedFollowers(t *testing.T) {
	r := start(t, &testDataset{Samples: 300}, loader.Options{}, 0)
	r.client.Transport = feedclient.Slots
	open := &feedpb.Open{Batch: 10, Order: "uniform:seed=4", Seed: 3, Transform: "ramp(9,5)", Readonly: true, Slots: 4,
		Credits: 2, Epochs: 2}
	var stopped []*feedclient.Stream
	var kept []*feedclient.Batch
	for i := range 5 {
		s := r.open(t, open)
		for k := range 3*i + 2 { // each elsewhere, so that together they keep every slot
			b, err := s.Next()
			if err != nil {
				t.Fatal(err)
			}
			if k < 3*i {
				b.Release()
			} else {
				kept = append(kept, b)
			}
		}
		stopped = append(stopped, s)
	}
	want := epochIDs(4, 0, 1)
	if got := drain(t, r.open(t, open)); !slices.Equal(got, want) {
		t.Error("the trainer that goes on got something else")
	}
	if st := r.server.Stats(); st.Total.InSlots == st.Total.Batches {
		t.Error("there were slots enough: the test tests nothing")
	}
	for i, s := range stopped {
		for _, b := range kept[2*i : 2*i+2] {
			if err := check(b, 3); err != nil {
				t.Error(err)
			}
			b.Release()
		}
		if got := drain(t, s); !slices.Equal(got, want[10*(3*i+2):]) {
			t.Errorf("trainer %d got something else after its pause", i)
		}
	}
}

// Trainers that may write to their slots never share them.
func TestWritersDoNotShare(t *testing.T) {
	r := start(t, &testDataset{Samples: 300}, loader.Options{}, 0)
	r.client.Transport = feedclient.Slots
	open := &feedpb.Open{Batch: 10, Transform: "ramp(9,5)", Epochs: 1, Seed: 3}
	a, b := r.open(t, open), r.open(t, open)
	for range 30 {
		x, err := a.Next()
		if err != nil {
			t.Fatal(err)
		}
		clear(x.Bytes())
		y, err := b.Next()
		if err != nil {
			t.Fatal(err)
		}
		if err := check(y, 3); err != nil {
			t.Fatal(err)
		}
		x.Release()
		y.Release()
	}
	if n := r.server.Stats().Total.Shared; n != 0 {
		t.Errorf("%d batches shared", n)
	}
}

// A client that holds every slot and wants more is waited for, which the stats tell; a slot that it
// gives back brings the next batch.
func TestWaitingForSlots(t *testing.T) {
	var log synced.Buffer
	r := start(t, &testDataset{Samples: 300}, loader.Options{Log: slog.New(slog.NewTextHandler(&log, nil))}, 0)
	s, opened := plain(t, r.addr, &feedpb.Open{Batch: 4, Slots: 3, Credits: 100, Transform: "ramp(4,4)"})
	handover(t, r.addr, opened.GetPool().GetKey())
	var slots []uint32
	next := func() {
		t.Helper()
		m, err := s.Recv()
		if err != nil || m.GetBatch().GetSlot() == 0 || slices.Contains(slots, m.GetBatch().GetSlot()) {
			t.Fatalf("got %v, %v, holding %v", m, err, slots)
		}
		slots = append(slots, m.GetBatch().GetSlot())
	}
	for range 3 {
		next()
	}
	eventually(t, "three batches are counted, and the wait for a fourth", func() bool {
		st := r.server.Stats().List[0]
		return st.Slots > 0 && st.Batches == 3
	})
	first := r.server.Stats().List[0]
	eventually(t, "the wait goes on", func() bool { return r.server.Stats().List[0].Slots > first.Slots })
	if st := r.server.Stats().List[0]; st.Stall != first.Stall {
		t.Errorf("the server stalled for %v s, and for %v s once the client had all slots", first.Stall, st.Stall)
	}
	eventually(t, "a warning", func() bool { return strings.Contains(log.String(), "holds all its slots") })
	if n := strings.Count(log.String(), "holds all its slots"); n != 1 {
		t.Errorf("%d warnings:\n%s", n, log.String())
	}
	for range 5 {
		if err := s.Send(release(slots[1])); err != nil {
			t.Fatal(err)
		}
		slots = slices.Delete(slots, 1, 2)
		next()
	}
}

// Where there is no memory for slots, or no way to hand it over, batches come in Chunks.
func TestWithoutSlots(t *testing.T) {
	open := &feedpb.Open{Batch: 10, Transform: "ramp(32,32)", Epochs: 1, Tail: "uneven"}
	small := start(t, &testDataset{Samples: 300}, loader.Options{}, 100_000) // a batch has 31 KB
	if ids := drain(t, small.open(t, open)); len(ids) != 300 {
		t.Errorf("%d samples", len(ids))
	}
	small.client.Transport = feedclient.Slots
	if _, err := small.client.Open(t.Context(), open); err == nil ||
		!strings.Contains(err.Error(), "no shared memory") {
		t.Errorf("got %v", err)
	}

	r := start(t, &testDataset{Samples: 300}, loader.Options{}, 0)
	// A server that has no device ignores that one is wanted: the client finishes the batches itself.
	if _, opened := plain(t, r.addr, &feedpb.Open{Batch: 10, Slots: 4, Device: "cuda:0"}); opened.GetPool().
		GetSlots() != 4 {
		t.Errorf("the pool is %v", opened.GetPool())
	}
	l, err := loader.Listen("tcp://127.0.0.1:0", loader.ListenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- r.server.Serve(l) }()
	addr := "tcp://" + l.Addr().String()
	c, err := feedclient.Dial(addr, feedclient.Security{})
	if err != nil {
		t.Fatal(err)
	}
	s, err := c.Open(t.Context(), open)
	if err != nil {
		t.Fatal(err)
	}
	if ids, in := drain(t, s), r.server.Stats().Total.InSlots; len(ids) != 300 || in != 0 {
		t.Errorf("%d samples, %d batches in slots", len(ids), in)
	}
	s.Close()
	c.Transport = feedclient.Slots
	if _, err := c.Open(t.Context(), open); err == nil || !strings.Contains(err.Error(), "on this host") {
		t.Errorf("got %v", err)
	}
	c.Close()
}

// Where there is no memory for all slots that are asked for, there are as many as fit, down to one more than the
// credits.
func TestFewerSlots(t *testing.T) {
	const slot = 36 << 10 // of 10 rows of ramp(32,32)
	for _, c := range []struct {
		room, slots, credits, want int
		readonly                   bool
	}{
		{5, 7, 3, 5, false}, {4, 7, 3, 4, false}, {3, 7, 3, 0, false}, {20, 7, 3, 7, false}, {5, 3, 9, 3, false},
		{5, 7, 0, 0, false},
		// what is shared leaves room for a batch in Chunks
		{6, 7, 3, 5, true}, {20, 7, 3, 14, true}, {4, 7, 3, 0, true},
	} {
		r := start(t, &testDataset{Samples: 300}, loader.Options{}, int64(c.room*slot))
		open := &feedpb.Open{Batch: 10, Transform: "ramp(32,32)", Slots: uint32(c.slots), Credits: uint32(c.credits),
			Readonly: c.readonly, Epochs: 1}
		if c.credits == 0 { // the Go client would choose some
			if _, opened := plain(t, r.addr, open); opened.GetPool() != nil {
				t.Errorf("%+v: %v", c, opened.GetPool())
			}
			continue
		}
		s := r.open(t, open)
		if got := int(s.Opened().GetPool().GetSlots()); got != c.want {
			t.Errorf("%+v: %d slots", c, got)
		}
		if c.readonly && c.want > 0 && c.want < c.slots { // who comes later takes part in what there is
			o := proto.CloneOf(open)
			o.Session = "another"
			other := r.open(t, o)
			if got := int(other.Opened().GetPool().GetSlots()); got != c.want {
				t.Errorf("%+v: %d slots for another", c, got)
			}
			other.Close()
		}
		var kept *feedclient.Batch // a trainer holds one while it asks for the next
		for k := range 30 {
			b, err := s.Next()
			if err != nil {
				t.Fatalf("%+v: batch %d: %v", c, k, err)
			}
			if (b.Header.GetSlot() != 0) != (c.want > 0) {
				t.Errorf("%+v: batch %d in slot %d", c, k, b.Header.GetSlot())
			}
			if kept != nil {
				kept.Release()
			}
			kept = b
		}
		kept.Release()
		s.Close()
		r.server.Close()
	}
}

// With all memory used up, opening a session waits for none: it goes on without slots.
func TestSlotsWaitForNoMemory(t *testing.T) {
	r := start(t, &testDataset{Samples: 300}, loader.Options{}, 1<<20)
	if err := r.mem.Reserve(t.Context(), 1<<20); err != nil {
		t.Fatal(err)
	}
	defer r.mem.Release(1 << 20)
	for _, readonly := range []bool{false, true} {
		_, opened := plain(t, r.addr,
			&feedpb.Open{Batch: 10, Transform: "ramp(32,32)", Slots: 4, Readonly: readonly, Epochs: 1})
		const batch = 32 << 10 // for which building the first one may wait, once the session is open
		if opened.GetPool() != nil || r.mem.Awaited() > batch {
			t.Errorf("readonly %v: %v, waited for %d bytes", readonly, opened.GetPool(), r.mem.Awaited())
		}
	}
}

// A raw batch that is much larger than the mean comes in Chunks, among others in slots.
func TestRawBatchTooLargeForASlot(t *testing.T) {
	ds := &testDataset{Samples: 200, Bytes: func(i int) []byte {
		n := 100
		if i >= 90 && i < 100 {
			n = 20_000
		}
		return bytes.Repeat([]byte{byte(i)}, n)
	}}
	r := start(t, ds, loader.Options{}, 0)
	r.client.Transport = feedclient.Slots
	s := r.open(t, &feedpb.Open{Batch: 10, Order: "sequential", Epochs: 1})
	for k := range 20 {
		b, err := s.Next()
		if err != nil {
			t.Fatal(err)
		}
		if (k == 9) != (b.Header.GetSlot() == 0) {
			t.Errorf("batch %d of %d bytes in slot %d", k, len(b.Bytes()), b.Header.GetSlot())
		}
		for i := range b.Rows() {
			if !bytes.Equal(b.Row(i), ds.Bytes(10*k+i)) {
				t.Fatalf("batch %d, row %d", k, i)
			}
		}
		b.Release()
	}
}

// A stream that is over, or fails, before its client has fetched the slots waits for that: nothing is lost,
// and the client hears of the failure.
func TestHandoverBeforeTheEnd(t *testing.T) {
	for _, open := range []*feedpb.Open{
		{Batch: 10, Slots: 3, Credits: 3, Epochs: 1, Transform: "ramp(4,4)"},
		{Batch: 10, Slots: 3, Credits: 3, Epochs: 1, Transform: "ramp(4,4)", Order: "sequential"},
	} {
		ds := &testDataset{Samples: 10}
		if open.GetOrder() != "" {
			ds.Bad = map[int]bool{3: true}
		}
		r := start(t, ds, loader.Options{}, 0)
		s, opened := plain(t, r.addr, open)
		eventually(t, "the whole epoch to be built", func() bool {
			l := r.server.Stats().List
			return ds.Open.Load() == 0 && len(l) == 1 && l[0].SourceBytes > 0
		})
		if _, reply := handover(t, r.addr, opened.GetPool().GetKey()); reply["error"] != nil {
			t.Fatalf("the handover: %v", reply["error"])
		}
		m, err := s.Recv()
		if ds.Bad != nil {
			if status.Code(err) != codes.DataLoss {
				t.Errorf("got %v, want that sample 3 is bad", err)
			}
			continue
		}
		if err != nil || m.GetBatch().GetSlot() == 0 {
			t.Fatalf("%v, %v", m, err)
		}
	}
}
