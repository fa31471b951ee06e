package findings

import (
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/shoalfs/shoal/internal/profile/trace"
	"github.com/shoalfs/shoal/prefetch/order"
)

const ms = time.Millisecond

// program is a synthetic trainer: workers that read whole batches of an order.
type program struct {
	files   int
	size    func(file int) int64
	epochs  []order.Order // over the files, which are the samples
	workers int
	batch   int
	wait    time.Duration // of a read
	think   time.Duration // between two files
	step    time.Duration // of a batch, for which workers whose queue is full wait
	area    trace.Area
	reads   func(file int) []trace.Event // of a visit; nil: one of all
	first   uint32                       // process
	jitter  *rand.Rand                   // nil: none
	begin   time.Duration
	persist bool // workers live through the epochs
}

func (p program) sizeOf(file int) int64 {
	if p.size == nil {
		return 100_000
	}
	return p.size(file)
}

// run returns the program's events and when it ends.
func (p program) run() (events []trace.Event, end time.Duration) {
	if p.first == 0 {
		p.first = 100
	}
	now := p.begin
	taken := now // when the trainer is through with the latest batch
	for e, o := range p.epochs {
		type worker struct{ at time.Duration }
		ws := make([]worker, p.workers)
		for i := range ws {
			ws[i].at = now
		}
		var ends []time.Duration // of the steps
		for b := 0; b*p.batch < o.Len(); b++ {
			w := b % p.workers
			at := &ws[w].at
			if k := b - 2*p.workers; p.step > 0 && k >= 0 {
				*at = max(*at, ends[k]) // the queue holds two batches a worker
			}
			process := p.first + uint32(w)
			if !p.persist {
				process += uint32(e * p.workers)
			}
			for pos := b * p.batch; pos < min((b+1)*p.batch, o.Len()); pos++ {
				file := o.At(pos)
				think, wait := p.think, p.wait
				if p.jitter != nil {
					think = time.Duration(float64(think) * (0.5 + p.jitter.Float64()))
					wait = time.Duration(float64(wait) * (0.5 + p.jitter.Float64()))
				}
				*at += think
				events = append(events, trace.Event{At: *at, Kind: trace.Open, Process: process, File: int32(file)})
				reads := []trace.Event{{Len: int32(p.sizeOf(file)), Wait: wait}}
				if p.reads != nil {
					reads = p.reads(file)
				}
				for _, r := range reads {
					r.At, r.Kind, r.Process, r.File, r.Area = *at, trace.Read, process, int32(file), p.area
					events = append(events, r)
					*at += r.Wait
				}
				events = append(events, trace.Event{At: *at, Kind: trace.Close, Process: process, File: int32(file)})
			}
			taken = max(taken, *at) + p.step
			ends = append(ends, taken)
		}
		for _, w := range ws {
			now = max(now, w.at)
		}
		now = max(now, taken)
	}
	return events, now
}

// recorded makes a recording of programs over one dataset.
func recorded(programs ...program) *trace.Trace {
	p := programs[0]
	t := &trace.Trace{Header: trace.Header{
		Version: 1, Source: "s3://photos/train", Files: p.files, Samples: p.files, Order: "auto", Memory: 1 << 30,
		CacheBytes: 1 << 40, Connections: 256,
	}, Files: map[int]trace.File{}}
	for f := range p.files {
		t.Files[f] = trace.File{File: f, Sample: f, Size: p.sizeOf(f),
			Path: fmt.Sprintf("c%02d/%05d.jpg", f*10/p.files, f)}
		t.Bytes += p.sizeOf(f)
	}
	for _, p := range programs {
		events, end := p.run()
		t.Events = append(t.Events, events...)
		t.Length = max(t.Length, end)
	}
	slices.SortStableFunc(t.Events, func(a, b trace.Event) int { return int(a.At - b.At) })
	t.Stats = []json.RawMessage{
		[]byte(`{"get_latency_p50_seconds":0.03,"connections":256,"order":{"spec":"auto","state":"searching"}}`)}
	return t
}

func epochsOf(n int, of func(epoch int) order.Order) (all []order.Order) {
	for e := range n {
		all = append(all, of(e))
	}
	return all
}

func uniform(files int, seed uint64) func(int) order.Order {
	return func(e int) order.Order { return order.Uniform(files, seed, e) }
}

func torch(files int, seed uint64) func(int) order.Order {
	return func(e int) order.Order { return order.Torch(files, seed, e, 1, 0, 0, false) }
}

func inOrder(files int) func(int) order.Order {
	return func(int) order.Order { return order.Sequential(files) }
}

// drawn is n draws with replacement.
func drawn(files, n int, seed uint64) order.Order {
	rng := rand.New(rand.NewPCG(seed, 1))
	list := make([]uint32, n)
	for i := range list {
		list[i] = uint32(rng.IntN(files))
	}
	return order.List(list)
}

func analyse(t interface{ Fatal(...any) }, tr *trace.Trace, o ProfileOptions) Profile {
	r, err := Analyse(tr, o)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func (r Profile) find(name string) *Finding {
	for i := range r.Findings {
		if r.Findings[i].Code == name {
			return &r.Findings[i]
		}
	}
	return nil
}

func (r Profile) patterns() (names []string) {
	for _, f := range r.Findings {
		names = append(names, f.Code)
	}
	return names
}

// whole reads in pieces of so many bytes, one after the other.
func inPieces(size, piece int64, wait time.Duration) func(int) []trace.Event {
	return func(int) (reads []trace.Event) {
		for off := int64(0); off < size; off += piece {
			reads = append(reads, trace.Event{Off: off, Len: int32(min(piece, size-off)), Wait: wait})
		}
		return reads
	}
}

func TestPatterns(t *testing.T) {
	const n = 400
	usual := program{files: n, workers: 4, batch: 16, wait: 30 * ms, think: ms, area: trace.Miss}
	with := func(change func(p *program)) program {
		p := usual
		change(&p)
		return p
	}
	lookups := func(tr *trace.Trace, n, lists int, from, to time.Duration) *trace.Trace {
		for i := range n {
			e := trace.Event{At: from + (to-from)*time.Duration(i)/time.Duration(n), Kind: trace.Lookup, Process: 9,
				File: int32(i % tr.Header.Files)}
			if i < lists {
				e.Kind, e.File = trace.List, -1
			}
			tr.Events = append(tr.Events, e)
		}
		return tr
	}
	large := func(int) int64 { return 64 << 20 }
	rng := rand.New(rand.NewPCG(1, 1))
	for _, c := range []struct {
		name      string
		trace     *trace.Trace
		want, not []string
		word      string // in the text
	}{
		{"nothing", recorded(with(func(p *program) { p.epochs = []order.Order{order.List([]uint32{1, 2, 3})} })),
			[]string{"idle"}, []string{"sequential", "shuffle"}, "too few"},
		{"sequential", recorded(with(func(p *program) { p.epochs = epochsOf(1, inOrder(n)) })), []string{"sequential"},
			[]string{"shuffle"}, "--order sequential"},
		{"sequential, twice", recorded(with(func(p *program) { p.epochs = epochsOf(2, inOrder(n)) })),
			[]string{"sequential"}, []string{"repeated-shuffle"}, "2 passes"},
		{"a rank of four, not shuffled", recorded(with(func(p *program) {
			p.epochs = epochsOf(2, func(int) order.Order { return order.Stripe(order.Sequential(n), 4, 1, 1) })
		})), []string{"sequential"}, []string{"shuffle"}, "2 passes"},
		{"shuffle", recorded(with(func(p *program) { p.epochs = epochsOf(1, uniform(n, 3)) })), []string{"shuffle"},
			[]string{"sequential", "torch-shuffle", "with-replacement"}, "shoal.hint"},
		{"shuffle, three epochs", recorded(with(func(p *program) { p.epochs = epochsOf(3, uniform(n, 3)) })),
			[]string{"shuffle"}, []string{"with-replacement", "repeated-shuffle"}, "3 passes"},
		{"DistributedSampler", recorded(with(func(p *program) { p.epochs = epochsOf(2, torch(n, 7)) })),
			[]string{"torch-shuffle"}, []string{"shuffle", "repeated-shuffle"}, "torch:seed=7"},
		{"a rank", recorded(with(func(p *program) {
			p.epochs = epochsOf(2, func(e int) order.Order { return order.Torch(n, 7, e, 4, 2, 2, false) })
		})), []string{"torch-shuffle"}, nil, "1 of 4 ranks"},
		{"set_epoch forgotten", recorded(with(func(p *program) {
			p.epochs = epochsOf(3, func(int) order.Order { return order.Torch(n, 7, 0, 1, 0, 0, false) })
		})), []string{"torch-shuffle", "repeated-shuffle"}, []string{"with-replacement"}, "set_epoch"},
		{"another shuffle, repeated", recorded(with(func(p *program) {
			p.epochs = epochsOf(2, func(int) order.Order { return order.Uniform(n, 7, 0) })
		})), []string{"repeated-shuffle"}, []string{"shuffle"}, "far apart"},
		{"replacement", recorded(with(func(p *program) { p.epochs = []order.Order{drawn(n, n, 5)} })),
			[]string{"with-replacement"}, []string{"shuffle"}, "WeightedRandomSampler"},
		{"persistent workers", recorded(with(func(p *program) {
			p.epochs, p.persist = epochsOf(4, uniform(n, 3)), true
		})), []string{"shuffle"}, []string{"with-replacement"}, "4 passes"},
		{"two jobs", recorded(with(func(p *program) {
			p.epochs, p.workers = epochsOf(1, uniform(n, 3)), 1
		}), with(func(p *program) { p.epochs, p.first, p.workers = epochsOf(1, uniform(n, 4)), 500, 1 })),
			[]string{"with-replacement"}, []string{"shuffle"}, "several jobs"},
		{"two jobs in step", recorded(with(func(p *program) {
			p.epochs, p.workers = epochsOf(2, uniform(n, 3)), 2
		}), with(func(p *program) { p.epochs, p.first, p.workers, p.begin = epochsOf(2, uniform(n, 3)), 500, 2, ms })),
			[]string{"with-replacement"}, []string{"repeated-shuffle"}, "several jobs"},
		{"a walk", lookups(recorded(with(func(p *program) { p.epochs = []order.Order{order.List([]uint32{1})} })), 1000,
			10, 0, time.Second), []string{"idle"}, []string{"shuffle"}, "1,000 lookups"},
		{"lookups of the opens",
			lookups(recorded(with(func(p *program) { p.epochs = epochsOf(1, uniform(n, 3)) })), n, 0, 0, 3*time.Second),
			[]string{"shuffle"}, nil, ""},
		{"header, then body", recorded(with(func(p *program) {
			p.workers = 1
			p.epochs = []order.Order{twice(order.Uniform(n, 3, 0))}
		})), []string{"shuffle"}, []string{"with-replacement"}, "1 pass"},
		{"large reads", recorded(with(func(p *program) {
			p.epochs = epochsOf(1, uniform(n, 3))
			p.size, p.reads = func(int) int64 { return 1_000_000 }, inPieces(1_000_000, 512<<10, ms)
		})), []string{"shuffle"}, []string{"shards"}, ""},
		{"shards", recorded(program{files: 12, workers: 2, batch: 1, epochs: epochsOf(1, uniform(12, 3)), size: large,
			reads: inPieces(64<<20, 512<<10, ms), area: trace.Miss}),
			[]string{"shards"}, []string{"idle", "random-inside-files"}, "768 MiB read by 12 opens"},
		{"memory maps", recorded(program{files: 2, workers: 2, batch: 1, epochs: epochsOf(1, inOrder(2)), size: large,
			area: trace.Miss, reads: func(int) (reads []trace.Event) {
				for range 60 {
					reads = append(reads, trace.Event{Off: rng.Int64N(60<<20) &^ 4095, Len: 4096, Wait: 30 * ms})
				}
				return reads
			}}), []string{"random-inside-files"}, []string{"shards", "idle"}, "HDF5"},
		{"one reader", recorded(with(func(p *program) { p.workers, p.epochs = 1, epochsOf(1, uniform(n, 3)) })),
			[]string{"one-reader", "shuffle"}, []string{"not-the-storage"}, "num_workers"},
		{"wait for the step", recorded(with(func(p *program) {
			p.epochs, p.step, p.wait, p.area = epochsOf(1, uniform(n, 3)), 200*ms, ms/10, trace.Ring
		})), []string{"not-the-storage"}, []string{"one-reader"}, "wait for the step"},
		{"decoding sets the pace", recorded(with(func(p *program) {
			p.epochs, p.think, p.wait, p.area = epochsOf(1, uniform(n, 3)), 20*ms, ms/10, trace.Keep
		})), []string{"not-the-storage"}, nil, "decode"},
		{"page cache", recorded(with(func(p *program) {
			p.epochs, p.reads = epochsOf(2, uniform(n, 3)), func(file int) []trace.Event {
				if file%4 > 0 {
					return nil
				}
				return []trace.Event{{Len: 100_000, Wait: ms}}
			}
		})), []string{"page-cache"}, nil, "75%"},
		{"behind", func() *trace.Trace {
			tr := recorded(with(func(p *program) { p.epochs = epochsOf(1, torch(n, 7)) }))
			tr.CacheBytes = 1 << 20
			tr.Stats = []json.RawMessage{
				[]byte(`{"get_latency_p50_seconds":0.03,"connections":2,"order":{"spec":"torch:seed=7","state":"following"},"lead_samples":3}`)}
			return tr
		}(), []string{"behind", "torch-shuffle"}, nil, "shoal doctor"},
	} {
		t.Run(c.name, func(t *testing.T) {
			o := ProfileOptions{Bandwidth: 1.25e9}
			if slices.Contains(c.want, "torch-shuffle") || slices.Contains(c.not, "torch-shuffle") {
				o.Searches = 4
			}
			r := analyse(t, c.trace, o)
			var text strings.Builder
			if err := r.Print(&text); err != nil {
				t.Fatal(err)
			}
			for _, want := range c.want {
				if r.find(want) == nil {
					t.Errorf("not %s: %v\n%s", want, r.patterns(), text.String())
				}
			}
			for _, not := range c.not {
				if r.find(not) != nil {
					t.Errorf("%s: %v\n%s", not, r.patterns(), text.String())
				}
			}
			if !strings.Contains(strings.Join(strings.Fields(text.String()), " "), c.word) { // it is folded
				t.Errorf("no %q in\n%s", c.word, text.String())
			}
		})
	}
}

// twice visits each file two times in a row.
func twice(o order.Order) order.Order {
	var list []uint32
	for pos := range o.Len() {
		list = append(list, uint32(o.At(pos)), uint32(o.At(pos)))
	}
	return order.List(list)
}

// TestEstimate compares with what follows from the model by hand.
func TestEstimate(t *testing.T) {
	const n = 2000
	job := program{files: n, workers: 4, batch: 16, wait: 30 * ms, think: 2 * ms, area: trace.Miss,
		epochs: epochsOf(1, uniform(n, 3))}
	r := analyse(t, recorded(job), ProfileOptions{})
	e := r.Estimate
	near := func(what string, got, want, tolerance float64) {
		t.Helper()
		if math.Abs(got-want) > tolerance*want {
			t.Errorf("%s: %g, want about %g", what, got, want)
		}
	}
	near("files/s", e.Now, 4/0.032, 0.05) // 4 workers, 32 ms a file
	near("files/s of a cold epoch", e.Cold, 4/0.002, 0.15)
	near("seconds of a worker", e.Read, 0.002, 0.1)
	if e.Workers != 4 || e.Bound != "the workers' own time" {
		t.Errorf("%+v", e)
	}
	near("its gain", r.find("shuffle").Values["gain"], 16, 0.2)

	// A line of 20 MB/s brings 200 files of 100 KB.
	r = analyse(t, recorded(job), ProfileOptions{Bandwidth: 20e6})
	near("files/s over a narrow line", r.Estimate.Cold, 200, 0.1)
	if r.Estimate.Bound != "the store's bandwidth" {
		t.Errorf("%+v", r.Estimate)
	}
	near("files/s from the cache", r.Estimate.Warm, 4/0.002, 0.15)

	// With the step as the limit nothing is gained.
	job.step, job.wait = 100*ms, ms/10
	r = analyse(t, recorded(job), ProfileOptions{})
	near("files/s that a step of 100 ms takes", r.Estimate.Now, 160, 0.1)
	near("files/s with a known order", r.Estimate.Cold, 160, 0.1)
}

// TestAnyTraining: whatever files, workers and epochs, an order is taken for what it is.
func TestAnyTraining(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(250, 900).Draw(t, "files")
		seed := rapid.Uint64Range(2_000_000, 1<<31).Draw(t, "seed") // none that people choose
		epochs := rapid.IntRange(1, 3).Draw(t, "epochs")
		kind := rapid.SampledFrom([]string{"sequential", "shuffle", "replacement"}).Draw(t, "kind")
		p := program{
			files: n, workers: rapid.IntRange(1, 6).Draw(t, "workers"), batch: rapid.IntRange(4, 32).Draw(t, "batch"),
			area:   trace.Miss,
			wait:   time.Duration(rapid.IntRange(100, 50_000).Draw(t, "wait")) * time.Microsecond,
			think:  time.Duration(rapid.IntRange(100, 20_000).Draw(t, "think")) * time.Microsecond,
			jitter: rand.New(rand.NewPCG(seed, 1)), persist: rapid.Bool().Draw(t, "persist"),
		}
		switch kind {
		case "sequential":
			p.epochs = epochsOf(epochs, inOrder(n))
		case "shuffle":
			p.epochs = epochsOf(epochs, uniform(n, seed))
		case "replacement":
			epochs = 1
			p.epochs = []order.Order{drawn(n, n, seed)}
		}
		r := analyse(t, recorded(p), ProfileOptions{Bandwidth: 1e9})
		want := map[string]string{"sequential": "sequential", "shuffle": "shuffle",
			"replacement": "with-replacement"}[kind]
		if r.find(want) == nil || (r.find("with-replacement") != nil) != (kind == "replacement") ||
			r.find("idle") != nil {
			t.Fatalf("%v, want %s: %+v", r.patterns(), want, r.Figures)
		}
		if kind != "replacement" && r.Figures.Passes != epochs {
			t.Fatalf("%d passes, want %d", r.Figures.Passes, epochs)
		}
		checkSane(t, r)
	})
}

func checkSane(t *rapid.T, r Profile) {
	for _, f := range r.Findings {
		gain, gained := f.Values["gain"]
		if f.Thing == "" || f.Cause == "" || f.Level == Warn && f.Remedy == "" ||
			gained && (math.IsInf(gain, 0) || !(gain > 0)) {
			t.Fatalf("%+v", f)
		}
	}
	if r.Verdict == "" || r.Figures.WaitShare < 0 || r.Figures.WaitShare > 1 {
		t.Fatalf("%+v", r)
	}
	if _, err := json.Marshal(r); err != nil { // NaN and Inf are not to be had in JSON
		t.Fatal(err)
	}
	var b strings.Builder
	if err := r.Print(&b); err != nil {
		t.Fatal(err)
	}
}

// TestAnyEvents: no recording is too odd, whether it was made by a mount or not.
func TestAnyEvents(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		files := rapid.IntRange(0, 40).Draw(t, "files")
		tr := &trace.Trace{Header: trace.Header{Version: 1, Files: files,
			Samples: rapid.IntRange(0, 40).Draw(t, "samples"), Bytes: rapid.Int64Range(0, 1<<40).Draw(t, "bytes"),
			CacheBytes:  rapid.Int64Range(0, 1<<40).Draw(t, "cache"),
			Connections: rapid.IntRange(0, 600).Draw(t, "connections"),
			Memory:      rapid.Int64Range(0, 1<<34).Draw(t, "memory"),
			Trees: []trace.Tree{
				{Folder: "a", First: rapid.IntRange(-3, 50).Draw(t, "first"),
					Len: rapid.IntRange(-3, 50).Draw(t, "len")}}}, Files: map[int]trace.File{}}
		for f := range files {
			tr.Files[f] = trace.File{File: f, Sample: rapid.IntRange(-1, 50).Draw(t, "sample"),
				Size: rapid.SampledFrom([]int64{0, 1, 5000, 200_000, 100 << 20}).Draw(t, "size"),
				Path: rapid.SampledFrom([]string{"", "a.tar", "b/c.jpg"}).Draw(t, "path")}
		}
		for range rapid.IntRange(0, 300).Draw(t, "events") {
			e := trace.Event{
				At:      time.Duration(rapid.Int64Range(0, 1e9).Draw(t, "at")),
				Process: uint32(rapid.IntRange(0, 4).Draw(t, "process")),
				File:    int32(rapid.IntRange(-1, 45).Draw(t, "file")),
				Kind: rapid.SampledFrom([]trace.Kind{trace.Open, trace.Read, trace.Close, trace.Lookup, trace.List}).
					Draw(t, "kind"),
			}
			if e.Kind == trace.Read {
				e.Off, e.Len, e.Wait = rapid.Int64Range(0, 1<<40).Draw(t, "off"),
					int32(rapid.IntRange(0, 1<<20).Draw(t, "length")),
					time.Duration(rapid.Int64Range(0, 1e9).Draw(t, "wait"))
				e.Area = trace.Area(rapid.IntRange(0, 4).Draw(t, "area"))
			}
			tr.Events = append(tr.Events, e)
		}
		checkSane(t, analyse(t, tr, ProfileOptions{Bandwidth: float64(rapid.IntRange(0, 1e9).Draw(t, "bandwidth"))}))
	})
}

func TestStatsThatAreNone(t *testing.T) {
	tr := recorded(program{files: 10, workers: 1, batch: 1, epochs: epochsOf(1, inOrder(10))})
	tr.Stats = []json.RawMessage{[]byte(`{"order":3}`)}
	if _, err := Analyse(tr, ProfileOptions{}); err == nil {
		t.Error("taken")
	}
}

// The call that remedies name has arguments that the Python client knows.
func TestHintIsTheClients(t *testing.T) {
	client, err := os.ReadFile("../../python/shoal/_hint.py")
	if err != nil {
		t.Fatal(err)
	}
	_, arguments, _ := strings.Cut(string(client), "\ndef hint(")
	arguments, _, found := strings.Cut(arguments, ") -> int:")
	named := regexp.MustCompile(`(\w+)=`).FindAllStringSubmatch(hint, -1)
	if !found || len(named) == 0 {
		t.Fatalf("arguments %q, and of the remedy %q", arguments, named)
	}
	for _, m := range named {
		if !strings.Contains(" "+arguments, " "+m[1]+": ") {
			t.Errorf("shoal.hint has no argument %s: %s", m[1], hint)
		}
	}
}
