package loader_test

import (
	"bytes"
	"fmt"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/loader"
	"github.com/shoalfs/shoal/loader/feedclient"
	"github.com/shoalfs/shoal/loader/feedpb"
)

// startParted serves a dataset with parts, with one place to decode.
func startParted(t *testing.T, ds *partedDataset) *rig {
	t.Helper()
	r := &rig{ds: ds.testDataset, mem: &testLedger{}, addr: "unix://" + filepath.Join(t.TempDir(), "%41#b?c")} // no URL
	r.server = loader.NewServer(func() loader.Dataset {
		return ds
	}, loader.Options{Compile: compileJoined, Memory: r.mem, Workers: 1})
	l, err := loader.Listen(r.addr, loader.ListenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- r.server.Serve(l) }()
	if r.client, err = feedclient.Dial(r.addr, feedclient.Security{}); err != nil {
		t.Fatal(err)
	}
	r.client.Transport = feedclient.Chunks // counts of reads are of one session, whatever the transport
	t.Cleanup(func() {
		r.client.Close()
		r.server.Close()
		if err := <-served; err != nil {
			t.Errorf("Serve: %v", err)
		}
		r.empty(t)
	})
	return r
}

func cls(i int) []byte  { return fmt.Appendf(nil, "%d\n", 1000+i) }
func anno(i int) []byte { return fmt.Appendf(nil, `{"a": {"class": %d}, "b": "x", "f": 1.5}`, 5000+i) }

func parted(n int) *partedDataset {
	return &partedDataset{testDataset: &testDataset{Samples: n},
		Files: map[string]func(int) []byte{"cls": cls, "json": anno}}
}

// Where labels come from: what is asked for, else folders, else .cls.
func TestLabels(t *testing.T) {
	folder := func(i int) int64 { return int64(i % numClasses) }
	inCls := func(i int) int64 { return int64(1000 + i) }
	inJSON := func(i int) int64 { return int64(5000 + i) }
	none := func(int) int64 { return -1 }
	for _, tt := range []struct {
		flat    bool
		label   string
		want    func(int) int64
		opened  string
		hash    string // behind that of the transform
		wanted  []string
		without string // extension that the dataset has not
	}{
		{false, "", folder, "folder", "", nil, ""},
		{true, "", inCls, "cls", ",label=cls", []string{"cls"}, ""},
		{true, "", none, "folder", "", nil, "cls"},
		{false, "cls", inCls, "cls", ",label=cls", []string{"cls"}, ""},
		{true, "folder", none, "folder", "", nil, ""},
		{false, "none", none, "none", ",label=none", nil, ""},
		{true, "json:a.class", inJSON, "json:a.class", ",label=json:a.class", []string{"json"}, ""},
	} {
		for _, transform := range []string{"", "ramp(2,2)"} {
			t.Run(fmt.Sprintf("flat=%v label=%s without=%s %s", tt.flat, tt.label, tt.without, transform),
				func(t *testing.T) {
					ds := parted(30)
					ds.Flat = tt.flat
					delete(ds.Files, tt.without)
					var wanted []string
					ds.Wanted = func(parts []string) { wanted = parts }
					r := startParted(t, ds)
					s := r.open(t, &feedpb.Open{Batch: 10, Epochs: 1, Label: tt.label, Transform: transform})
					base := "raw"
					if transform != "" {
						tr, _ := compileRamp(t.Context(), transform, nil)
						base = tr.Hash()
					}
					if o := s.Opened(); o.GetLabel() != tt.opened || o.GetTransformHash() != base+tt.hash {
						t.Errorf("opened: label %q, hash %q", o.GetLabel(), o.GetTransformHash())
					}
					for range 3 {
						b, err := s.Next()
						if err != nil {
							t.Fatal(err)
						}
						for i := range b.Rows() {
							if id := int(b.ID(i)); b.Label(i) != tt.want(id) {
								t.Errorf("sample %d: label %d, want %d", id, b.Label(i), tt.want(id))
							}
						}
						b.Release()
					}
					if !slices.Equal(wanted, tt.wanted) {
						t.Errorf("parts announced: %q", wanted)
					}
				})
		}
	}
}

// A label that cannot be read makes a bad sample, which the policy is for.
func TestBadLabels(t *testing.T) {
	for label, bad := range map[string][]byte{
		"cls":          []byte("dog"),
		"json:a.class": []byte(`{"a": {"class": "dog"}}`),
		"json:b":       []byte(`{"b": 1.5}`),
		"json:c.d":     []byte(`{"c": [1]}`),
		"json:d":       []byte(`{"d": 1`),
		"json:e":       nil,
	} {
		t.Run(label, func(t *testing.T) {
			ds := parted(20)
			good := map[string]func(i int) []byte{"cls": cls, "json": func(i int) []byte {
				return fmt.Appendf(nil, `{"a": {"class": %d}, "b": 1, "c": {"d": 1}, "d": 1, "e": 1}`, i)
			}}
			ext := "json"
			if label == "cls" {
				ext = "cls"
			}
			ds.Files[ext] = func(i int) []byte {
				if i == 7 {
					return bad
				}
				return good[ext](i)
			}
			r := startParted(t, ds)
			s := r.open(t, &feedpb.Open{Batch: 20, Epochs: 1, Label: label, Bad: "skip:1"})
			b, err := s.Next()
			if err != nil {
				t.Fatal(err)
			}
			if n := b.Header.GetBad(); len(n) != 1 || n[0].GetId() != 7 {
				t.Errorf("bad: %v", n)
			}
			for i := range b.Rows() {
				if b.ID(i) == 7 && (b.Valid(i) || b.Label(i) != loader.IgnoredLabel ||
					len(bytes.Trim(b.Row(i), "\x00")) > 0) {
					t.Errorf("the bad row: valid %v, label %d", b.Valid(i), b.Label(i))
				}
			}
			b.Release()
			_, err = r.open(t, &feedpb.Open{Batch: 20, Epochs: 1, Label: label}).Next()
			wantError(t, err, codes.DataLoss, "sample 7", "."+ext)
		})
	}
}

func TestLabelIsRefused(t *testing.T) {
	ds := parted(20)
	ds.Files["png"], ds.Numbered = cls, map[string]bool{"png": true}
	delete(ds.Files, "json")
	r := startParted(t, ds)
	for _, tt := range []struct {
		open  *feedpb.Open
		words []string
	}{
		{&feedpb.Open{Label: "dog"}, []string{`"dog"`, "json:KEY"}},
		{&feedpb.Open{Label: "json:"}, []string{"json:KEY"}},
		{&feedpb.Open{Label: "json:a..b"}, []string{"json:KEY"}},
		{&feedpb.Open{Label: "json:a"}, []string{".json", "label json:a"}},
		{&feedpb.Open{Transform: "joined(txt,)"}, []string{".txt", "the transform"}},
		{&feedpb.Open{Transform: "joined(png,)"}, []string{".png", "--samples"}},
	} {
		tt.open.Batch = 4
		_, err := r.client.Open(t.Context(), tt.open)
		wantError(t, err, codes.InvalidArgument, tt.words...)
	}
	// A dataset that knows of no parts.
	plain := start(t, &testDataset{Samples: 10}, loader.Options{}, 0)
	_, err := plain.client.Open(t.Context(), &feedpb.Open{Batch: 4, Label: "cls"})
	wantError(t, err, codes.InvalidArgument, ".cls")
}

// A state goes on with the labels that it was taken with, and no others.
func TestLabelInState(t *testing.T) {
	r := startParted(t, parted(40))
	s := r.open(t, &feedpb.Open{Batch: 10, Label: "cls", Epochs: 1})
	b, err := s.Next()
	if err != nil {
		t.Fatal(err)
	}
	state := b.Header.GetState()
	b.Release()
	_, err = r.client.Open(t.Context(), &feedpb.Open{State: state})
	wantError(t, err, codes.FailedPrecondition, "label=cls")
	if ids := drain(t, r.open(t, &feedpb.Open{State: state, Label: "cls", Epochs: 1})); len(ids) != 30 {
		t.Errorf("%d samples after the state", len(ids))
	}
}

// A transform reads the parts that it has announced and others; those of the label come along.
func TestPartsOfTransform(t *testing.T) {
	ds := parted(40)
	ds.Files["txt"] = func(i int) []byte {
		if i%3 == 0 {
			return nil
		}
		return fmt.Appendf(nil, "text %d", i)
	}
	var wanted []string
	ds.Wanted = func(parts []string) { wanted = parts }
	r := startParted(t, ds)
	s := r.open(t, &feedpb.Open{Batch: 10, Epochs: 1, Transform: "joined(txt+cls,json+nothing)", Label: "json:a.class"})
	for range 4 {
		b, err := s.Next()
		if err != nil {
			t.Fatal(err)
		}
		for i := range b.Rows() {
			id := int(b.ID(i))
			want := make([]byte, 64)
			copy(want, ds.Files["txt"](id))
			copy(want[16:], cls(id))
			copy(want[32:48], anno(id))
			if !bytes.Equal(b.Row(i), want) || b.Label(i) != int64(5000+id) {
				t.Errorf("sample %d: %q, label %d", id, b.Row(i), b.Label(i))
			}
		}
		b.Release()
	}
	if !slices.Equal(wanted, []string{"cls", "json", "txt"}) {
		t.Errorf("announced: %q", wanted)
	}
}

// What the store says of a part ends the stream as what it says of a sample does; what is wrong with a part's
// content makes a bad sample.
func TestErrorsOfParts(t *testing.T) {
	changed := &objstore.Error{Op: "GET", Key: "train/7.txt", Kind: objstore.KindChanged}
	for _, transform := range []string{"joined(txt,)", "joined(,txt)"} {
		ds := parted(20)
		ds.Files["txt"], ds.Broken = cls, map[string]error{"txt": changed}
		r := startParted(t, ds)
		_, err := r.open(t, &feedpb.Open{Batch: 4, Transform: transform, Bad: "skip:20"}).Next()
		wantError(t, err, codes.FailedPrecondition, "train/7.txt", "part .txt")
	}
	ds := parted(20)
	var calls atomic.Int64
	ds.Files["txt"] = func(i int) []byte {
		calls.Add(1)
		if i == 3 {
			return []byte("bad")
		}
		return cls(i)
	}
	r := startParted(t, ds)
	s := r.open(t, &feedpb.Open{Batch: 20, Transform: "joined(txt,)", Bad: "skip:1", Epochs: 1})
	// each by slots and by chunks
	if ids := drain(t, s); len(ids) != 19 || slices.Contains(ids, 3) || calls.Load() != 20*r.server.Stats().Sessions {
		t.Errorf("%d samples, %d reads of parts", len(ids), calls.Load())
	}
}
