package profile

import (
	"slices"
	"time"

	"github.com/shoalfs/shoal/internal/profile/trace"
)

// visit is one open of a file, with its reads.
type visit struct {
	file    int32
	process uint32
	start   time.Duration
	end     time.Duration // of the last read
	wait    time.Duration // time in which at least one read was pending
	bytes   int64
	reads   int
	jumps   int   // reads that do not continue near the end of the previous one
	first   int64 // bytes of the first read
	closed  bool
	again   bool // the same process had this file open just before

	next int64 // offset after the last read
}

// process is the activity of one thread.
type process struct {
	id     uint32
	visits []int // into digest.visits
	from   time.Duration
	to     time.Duration
	wait   time.Duration
}

func (p *process) span() time.Duration { return p.to - p.from }

// digest is a recording prepared for analysis.
type digest struct {
	trace       *trace.Trace
	first, last stats

	visits    []visit // by their start
	processes []*process
	reads     int
	readBytes int64
	areas     [5]int
	waits     []time.Duration // of reads, sorted
	lens      []int           // of reads, sorted
	from, to  time.Duration   // of the visits
	named

	files  map[int32]int // visits of each file, without immediate repeats
	passes []pass
	jobs   int     // jobs that read the same files in parallel
	shared float64 // share of the visits that another job made shortly before
}

// named counts requests by name: lookups, and pieces of listings.
type named struct {
	lookups   int
	lists     int
	lookedAt  time.Duration // the first lookup
	lookedTo  time.Duration // when nine tenths of the lookups were over
	perLookup int           // files looked up and never opened
}

// digestOf prepares a recording.
func digestOf(t *trace.Trace) (*digest, error) {
	d := &digest{trace: t, files: map[int32]int{}}
	var err error
	if d.first, d.last, err = statsOf(t); err != nil {
		return nil, err
	}
	events := slices.Clone(t.Events)
	slices.SortStableFunc(events, func(a, b trace.Event) int { return int(a.At - b.At) })

	type place struct {
		process uint32
		file    int32
	}
	open := map[place]int{}    // the latest visit
	anybody := map[int32]int{} // the latest visit by any process
	latest := map[uint32]int{} // the latest visit of each process
	var looked []time.Duration
	unopened := map[int32]bool{}
	begin := func(e trace.Event) int {
		v := visit{file: e.File, process: e.Process, start: e.At, end: e.At}
		if i, ok := latest[e.Process]; ok && e.Process != 0 {
			v.again = d.visits[i].file == e.File
		}
		i := len(d.visits)
		d.visits = append(d.visits, v)
		open[place{e.Process, e.File}], anybody[e.File], latest[e.Process] = i, i, i
		return i
	}
	for _, e := range events {
		switch e.Kind {
		case trace.Open:
			delete(unopened, e.File)
			begin(e)
		case trace.Read:
			i, ok := open[place{e.Process, e.File}]
			if !ok {
				if i, ok = anybody[e.File]; !ok {
					i = begin(e) // opened before the recording began
				}
			}
			d.read(&d.visits[i], e)
		case trace.Close:
			// The kernel may name any process for a close: prefer the one that closed, if it has a visit.
			if i, ok := open[place{e.Process, e.File}]; ok {
				d.visits[i].closed = true
			} else if i, ok := anybody[e.File]; ok {
				d.visits[i].closed = true
			}
		case trace.Lookup, trace.List:
			d.lookups++
			if e.Kind == trace.List {
				d.lists++
			} else if e.File >= 0 {
				unopened[e.File] = true
			}
			looked = append(looked, e.At)
		}
	}
	d.perLookup = len(unopened)
	if len(looked) > 0 {
		d.lookedAt, d.lookedTo = looked[0], looked[len(looked)*9/10]
	}
	slices.Sort(d.waits)
	slices.Sort(d.lens)
	d.group()
	d.findPasses()
	return d, nil
}

func (d *digest) read(v *visit, e trace.Event) {
	end := e.At + e.Wait
	if from := max(e.At, v.end); v.reads == 0 {
		v.wait += e.Wait
		v.first = int64(e.Len)
	} else if end > from {
		v.wait += end - from
	}
	// The kernel reads ahead with several requests at once, which arrive in any order.
	if off := e.Off - v.next; v.reads > 0 && max(off, -off) > 2*int64(e.Len) {
		v.jumps++
	}
	v.reads++
	v.bytes += int64(e.Len)
	v.next = e.Off + int64(e.Len)
	v.end = max(v.end, end)
	d.reads++
	d.readBytes += int64(e.Len)
	d.areas[min(int(e.Area), len(d.areas)-1)]++
	d.waits = append(d.waits, e.Wait)
	d.lens = append(d.lens, int(e.Len))
}

// group sorts the visits by process.
func (d *digest) group() {
	by := map[uint32]*process{}
	for i := range d.visits {
		v := &d.visits[i]
		p := by[v.process]
		if p == nil {
			p = &process{id: v.process, from: v.start}
			by[v.process] = p
			d.processes = append(d.processes, p)
		}
		p.visits = append(p.visits, i)
		p.to = max(p.to, v.end)
		p.wait += v.wait
		if !v.again {
			d.files[v.file]++
		}
		if i == 0 {
			d.from = v.start
		}
		d.to = max(d.to, v.end)
	}
}

// spans returns the total time of the processes, and how much of it they waited. A process counts as present from its
// first visit to its last.
func (d *digest) spans() (all, wait time.Duration) {
	for _, p := range d.processes {
		all += p.span()
		wait += min(p.wait, p.span())
	}
	return all, wait
}

func (d *digest) waitShare() float64 {
	all, wait := d.spans()
	return share(float64(wait), float64(all))
}

// atOnce returns the mean number of processes at a time.
func (d *digest) atOnce() float64 {
	all, _ := d.spans()
	return share(float64(all), float64(d.to-d.from))
}

// pace returns the files opened per second, while any were.
func (d *digest) pace() float64 {
	return share(float64(len(d.visits)-d.repeatedAtOnce()), (d.to - d.from).Seconds())
}

func (d *digest) repeatedAtOnce() (n int) {
	for i := range d.visits {
		if d.visits[i].again {
			n++
		}
	}
	return n
}

func share(part, whole float64) float64 {
	if whole <= 0 {
		return 0
	}
	return part / whole
}

func quantile[T any](sorted []T, q float64) (v T) {
	if len(sorted) == 0 {
		return v
	}
	return sorted[min(int(q*float64(len(sorted))), len(sorted)-1)]
}

// size returns a file's size, 0 if unknown.
func (d *digest) size(file int32) int64 { return d.trace.Files[int(file)].Size }

// sizes returns the sizes of the visited files, each once, in the order of their first visits.
func (d *digest) sizes() (all []int64) {
	seen := map[int32]bool{}
	for i := range d.visits {
		if f := d.visits[i].file; !seen[f] {
			seen[f] = true
			all = append(all, d.size(f))
		}
	}
	return all
}

// numbers returns a file's place in the listing's order: its sample number if most files have one.
func (d *digest) numbers() func(file int32) int {
	numbered := 0
	for i := range d.visits {
		if d.trace.Files[int(d.visits[i].file)].Sample >= 0 {
			numbered++
		}
	}
	if 2*numbered <= len(d.visits) {
		return func(file int32) int { return int(file) }
	}
	return func(file int32) int { return d.trace.Files[int(file)].Sample }
}

func (d *digest) figures() Figures {
	f := Figures{
		Opens: len(d.visits), Reads: d.reads, Bytes: d.readBytes, Lookups: d.lookups, Files: len(d.files), DatasetFiles: d.trace.Header.Files,
		Processes: len(d.processes), AtOnce: d.atOnce(), FilesPerSecond: d.pace(), WaitShare: d.waitShare(),
		WaitP50: quantile(d.waits, 0.5).Seconds(), WaitP99: quantile(d.waits, 0.99).Seconds(),
		Areas:  Areas{d.areas[trace.Keep], d.areas[trace.Ring], d.areas[trace.Joined], d.areas[trace.Miss]},
		Passes: len(d.passes), Lost: d.trace.Lost, LatencySeconds: d.latency(), Order: d.trace.Order, OrderState: d.last.Order.State,
	}
	if d.last.Order.Spec != "" {
		f.Order = d.last.Order.Spec
	}
	var total int64
	sizes := d.sizes()
	for _, n := range sizes {
		total += n
	}
	if len(sizes) > 0 {
		f.MeanSampleBytes = total / int64(len(sizes))
	}
	return f
}

// latency returns the store's median as measured by the daemon, otherwise the median wait of reads that began a fetch.
func (d *digest) latency() float64 {
	if d.last.LatencyP50 > 0 {
		return d.last.LatencyP50
	}
	var waits []time.Duration
	for _, e := range d.trace.Events {
		if e.Kind == trace.Read && e.Area == trace.Miss {
			waits = append(waits, e.Wait)
		}
	}
	slices.Sort(waits)
	return quantile(waits, 0.5).Seconds()
}

// ordered reports whether the mount knew the order of the reads.
func (d *digest) ordered() bool {
	switch d.last.Order.State {
	case "inferred", "following", "finished":
		return true
	}
	return false
}
