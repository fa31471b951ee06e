package loader_test

import (
	"context"
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/shoalfs/shoal/loader"
	"github.com/shoalfs/shoal/loader/feedpb"
)

// A server that drains delivers what was granted, whole, also what had not been read yet, and nothing beyond; it takes
// nobody new.
func TestDrain(t *testing.T) {
	const batch, credits = 4, 3
	g := newGate(batch + 1) // in the second batch
	defer g.open(batch + 1)
	r := start(t, &testDataset{Samples: 400, Hold: g.hold}, loader.Options{Workers: 1, Readers: 2}, 0)
	if err := r.client.Healthy(t.Context()); err != nil {
		t.Fatal(err)
	}
	open := &feedpb.Open{Order: "sequential", Batch: batch, Transform: "ramp(2,2)", Epochs: 1, Credits: credits}
	s := r.open(t, open)
	eventually(t, "the first batch is sent", func() bool { return r.server.Stats().Total.Batches == 1 })

	type end struct{ sessions, left int }
	drained := make(chan end, 1)
	go func() {
		var e end
		e.sessions, e.left = r.server.Drain(context.Background())
		drained <- e
	}()
	eventually(t, "it says so", func() bool { return r.client.Healthy(t.Context()) != nil })
	_, err := r.client.Open(t.Context(), open)
	wantError(t, err, codes.Unavailable, "stopping")
	select {
	case e := <-drained:
		t.Fatalf("drained, %+v, while a batch was under way", e)
	default:
	}
	g.open(batch + 1)
	next := int64(0)
	for {
		b, err := s.Next()
		if err != nil {
			wantError(t, err, codes.Unavailable, "stopping")
			break
		}
		for i := range b.Rows() {
			if b.ID(i) != next {
				t.Fatalf("sample %d, want %d", b.ID(i), next)
			}
			next++
		}
		b.Release()
	}
	// The client grants a credit for each batch that it takes, some of them before the server was told.
	if next%batch != 0 || next < batch*credits || next > 2*batch*credits {
		t.Errorf("%d samples came, of %d that were granted", next, batch*credits)
	}
	if e := <-drained; e != (end{1, 0}) {
		t.Errorf("drained: %+v", e)
	}
}

// What does not come in time is cut off.
func TestDrainCutOff(t *testing.T) {
	g := newGate(1)
	defer g.open(1)
	r := start(t, &testDataset{Samples: 400, Hold: g.hold}, loader.Options{Workers: 1, Readers: 2}, 0)
	s := r.open(t, &feedpb.Open{Order: "sequential", Batch: 4, Transform: "ramp(2,2)", Credits: 1})
	eventually(t, "a batch is begun", func() bool { return r.server.Stats().HeldBytes > 0 })
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if sessions, left := r.server.Drain(ctx); sessions != 1 || left != 1 {
		t.Errorf("%d sessions, %d left", sessions, left)
	}
	go r.server.Close()
	_, err := s.Next()
	wantError(t, err, codes.Unavailable)
	g.open(1)
}

// A trainer that has all that it asked for, and is busy with it, is not waited for.
func TestDrainIdle(t *testing.T) {
	r := start(t, &testDataset{Samples: 400}, loader.Options{LookAhead: 1}, 0)
	s := r.open(t, &feedpb.Open{Order: "sequential", Batch: 4, Transform: "ramp(2,2)", Credits: 2})
	eventually(t, "it has what it asked for", func() bool { return r.server.Stats().Total.Batches == 2 })
	if sessions, left := r.server.Drain(context.Background()); sessions != 1 || left != 0 {
		t.Errorf("%d sessions, %d left", sessions, left)
	}
	for range 2 {
		b, err := s.Next()
		if err != nil {
			t.Fatal(err)
		}
		b.Release()
	}
	_, err := s.Next()
	wantError(t, err, codes.Unavailable, "stopping")
}
