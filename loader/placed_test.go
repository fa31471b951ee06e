package loader_test

import (
	"bytes"
	"errors"
	"io"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"pgregory.net/rapid"

	"github.com/shoalfs/shoal/cache/owner"
	"github.com/shoalfs/shoal/lab/rig/synced"
	"github.com/shoalfs/shoal/loader"
	"github.com/shoalfs/shoal/loader/feedclient"
	"github.com/shoalfs/shoal/loader/feedpb"
	"github.com/shoalfs/shoal/prefetch/order"
)

// With a placement all ranks together have the same global batches, each sample once, also after they have died and
// resumed with another placement, at another world size.
func TestExactlyOncePlaced(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "feed.sock")
	rapid.Check(t, func(rt *rapid.T) {
		n := rapid.IntRange(1, 150).Draw(rt, "n")
		world, batch := rapid.IntRange(1, 5).Draw(rt, "world"), rapid.IntRange(1, 9).Draw(rt, "batch")
		tail := rapid.SampledFrom([]string{"drop", "pad", "uneven"}).Draw(rt, "tail")
		algorithm := rapid.SampledFrom([]string{"uniform", "torch", "sequential"}).Draw(rt, "order")
		global := batch * world
		if tail == "drop" && global > n || tail == "uneven" && world > n {
			rt.Skip("no batch for some rank")
		}
		r, stop := serve(rt, socket, &testDataset{Samples: n}, loader.Options{}, 0)
		defer stop()
		spec, err := order.Parse(algorithm)
		if algorithm != "sequential" {
			spec, err = order.Parse(algorithm + ":seed=3")
		}
		if err != nil {
			rt.Fatal(err)
		}
		whole, err := spec.Order(n, 0)
		if algorithm == "torch" {
			whole = order.Torch(n, 3, 0, world, 0, world-1, false)
		}
		if err != nil {
			rt.Fatal(err)
		}
		end := whole.Len()
		if tail == "drop" {
			end = end / global * global
		}
		state, name := "", rapid.StringMatching("[a-z]{8}").Draw(rt, "session")
		for from := 0; from < end; {
			w := world
			if algorithm != "torch" {
				w = rapid.SampledFrom(divisors(global, n)).Draw(rt, "world of this life")
			}
			placement := placementOf(rapid.SliceOfN(rapid.IntRange(0, 3), w, w).Draw(rt, "nodes")...)
			to := min(end, from+global*rapid.IntRange(1, 5).Draw(rt, "batches"))
			got := make([][]int64, (end+global-1)/global)
			next := state
			for rank := range w {
				s, err := r.client.Open(rt.Context(),
					&feedpb.Open{Session: name, Order: algorithm, Seed: 3, Batch: uint32(global / w), World: uint32(w),
						Rank: uint32(rank), Tail: tail, Epochs: 1, State: state, Credits: 3, Placement: placement,
						Transform: "ramp(2,2)|uint8"})
				if err != nil {
					rt.Fatal(err)
				}
				for k := from / global; k < (to+global-1)/global; k++ {
					b, err := s.Next()
					if errors.Is(err, io.EOF) {
						break // an uneven tail
					}
					if err != nil {
						rt.Fatal(err)
					}
					ids := validIDs(b)
					got[k] = append(got[k], ids...)
					plain := 0
					for pos := k*global + rank; pos < min((k+1)*global, end); pos += w {
						plain++
					}
					if len(ids) != plain {
						rt.Fatalf("rank %d has %d samples of batch %d, and %d without a placement",
							rank, len(ids), k, plain)
					}
					next = s.State()
					b.Release()
				}
				defer s.Close()
			}
			for k := from / global; k < (to+global-1)/global; k++ {
				var want []int64
				for pos := k * global; pos < min((k+1)*global, end); pos++ {
					want = append(want, int64(whole.At(pos)))
				}
				slices.Sort(want)
				slices.Sort(got[k])
				if !slices.Equal(got[k], want) {
					rt.Fatalf("batch %d has %v, want %v", k, got[k], want)
				}
			}
			// The next life has the same name; the ranks of this one have closed their feeds by then.
			name, from, state = name+"x", to, next
		}
	})
}

// A sample's augmentation is that of its place in the order, whichever rank reads it.
func TestPlacedAugmentation(t *testing.T) {
	const text = "mixture:seed=1,weights=@0-1:1+@2-19:1,samples=24"
	r := start(t, &testDataset{Samples: 20}, loader.Options{}, 0)
	rows := func(world int, placement string) (all [][]byte) {
		for rank := range world {
			s := r.open(t, &feedpb.Open{Session: "s" + placement, Order: text, Batch: uint32(12 / world),
				World: uint32(world), Rank: uint32(rank), Epochs: 1,
				Transform: "ramp(5,7)|uint8", Placement: placement})
			for {
				b, err := s.Next()
				if errors.Is(err, io.EOF) {
					break
				}
				if err != nil {
					t.Fatal(err)
				}
				for i := range b.Rows() {
					all = append(all, bytes.Clone(b.Row(i)))
				}
				b.Release()
			}
		}
		slices.SortFunc(all, bytes.Compare)
		return all
	}
	plain := rows(1, "")
	for _, ranks := range [][]int{{0, 1, 2}, {1, 0, 0, 1}} {
		if placed := rows(len(ranks), placementOf(ranks...)); !slices.EqualFunc(plain, placed, bytes.Equal) {
			t.Errorf("ranks on nodes %v: other pixels than without a placement", ranks)
		}
	}
}

func TestPlacementRefused(t *testing.T) {
	r := start(t, &testDataset{Samples: 60}, loader.Options{}, 0)
	open := func(o *feedpb.Open) (*feedclient.Stream, error) {
		o.Session, o.Batch, o.World = "s", 4, 2
		return r.dial(t).Open(t.Context(), o)
	}
	first, err := open(&feedpb.Open{Placement: placementOf(0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	for text, words := range map[string]string{
		"here":               "not valid JSON",
		placementOf(0, 1, 1): "placement of 3 ranks: the session's world has 2",
	} {
		_, err := open(&feedpb.Open{Placement: text, Rank: 1})
		wantError(t, err, codes.InvalidArgument, words)
	}
	for _, text := range []string{"", placementOf(1, 0)} {
		_, err := open(&feedpb.Open{Placement: text, Rank: 1})
		wantError(t, err, codes.FailedPrecondition, "give all ranks the same one", "rank 0")
	}
	second, err := open(&feedpb.Open{Placement: strings.ReplaceAll(placementOf(0, 1), ",", " , "), Rank: 1})
	if err != nil {
		t.Fatal(err)
	}
	if a, b := first.State(), second.State(); a != b || !strings.Contains(a, `"placement":"`) {
		t.Errorf("the states of two ranks are %s and %s", a, b)
	}
}

// Sessions share batches if they have the same placement.
func TestPlacementShares(t *testing.T) {
	r := start(t, &testDataset{Samples: 60}, loader.Options{}, 0)
	ids := map[string][]int64{}
	for _, text := range []string{"", placementOf(0, 1), placementOf(1, 0)} {
		for range 2 {
			s := r.open(t, &feedpb.Open{Batch: 5, World: 2, Epochs: 1, Slots: 4, Readonly: true, Placement: text})
			got := drain(t, s)
			if ids[text] != nil && !slices.Equal(got, ids[text]) {
				t.Errorf("%q: %v, and before %v", text, got, ids[text])
			}
			ids[text] = got
		}
	}
	if slices.Equal(ids[placementOf(0, 1)], ids[placementOf(1, 0)]) {
		t.Error("two placements have the same samples")
	}
}

// A placement that was made for other nodes is correct, but of no use. A node that got another cache directory is
// another node.
func TestPlacementOfAnotherNode(t *testing.T) {
	var log synced.Buffer
	r := start(t, &testDataset{Samples: 60}, loader.Options{Log: slog.New(slog.NewTextHandler(&log, nil)),
		Node: func() (string, uint32, bool) { return "n0", 100, true }}, 0)
	for rank, warned := range []bool{false, true} {
		r.open(t, &feedpb.Open{Session: "s", Batch: 5, World: 2, Rank: uint32(rank), Placement: placementOf(0, 1)})
		if strings.Contains(log.String(), "placement_node=n1") != warned {
			t.Errorf("rank %d: %s", rank, log.String())
		}
	}
}

func TestOwners(t *testing.T) {
	r := start(t, &testDataset{Samples: 300_000}, loader.Options{Node: func() (string, uint32, bool) {
		return "n1", 101, true
	}}, 0)
	info, err := r.client.Info(t.Context())
	if err != nil || info.GetNode() != "n1" || info.GetWeight() != 101 {
		t.Errorf("the server is node %q of weight %d, %v", info.GetNode(), info.GetWeight(), err)
	}
	conn, err := grpc.NewClient(r.addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	text := placementOf(0, 1, 2)
	parts, err := feedpb.NewFeedClient(conn).Owners(t.Context(), &feedpb.OwnersRequest{Placement: text})
	if err != nil {
		t.Fatal(err)
	}
	var all []byte
	for {
		part, err := parts.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if len(all) == 0 && part.GetDataset() != r.ds.Version() {
			t.Errorf("the owners are of dataset %q", part.GetDataset())
		}
		all = append(all, part.GetOwners()...)
	}
	p, err := owner.ParsePlacement(text)
	if err != nil {
		t.Fatal(err)
	}
	owners := p.Owners(r.ds.Source(), r.ds.Units())
	if len(all) != 2*r.ds.Len() {
		t.Fatalf("%d bytes for %d samples", len(all), r.ds.Len())
	}
	for sample := range r.ds.Len() {
		if got, want := int(all[2*sample]), owners(sample); got != want {
			t.Fatalf("node %d owns sample %d, want %d", got, sample, want)
		}
	}
	parts, err = feedpb.NewFeedClient(conn).Owners(t.Context(), &feedpb.OwnersRequest{})
	if err == nil {
		_, err = parts.Recv()
	}
	if err == nil || !strings.Contains(err.Error(), "not valid JSON") {
		t.Errorf("owners without a placement: %v", err)
	}
}
