package profile

import (
	"slices"
	"time"

	"github.com/shoalfs/shoal/internal/profile/trace"
)

// visit is one open of a file and what was read under it.
type visit struct {
	file    int32
	process uint32
	start   time.Duration
	end     time.Duration // of the last read
	wait    time.Duration // in which at least one read was not answered
	bytes   int64
	reads   int
	jumps   int   // reads that do not go on about where the one before ended
	first   int64 // bytes of the first read
	closed  bool
	again   bool // the same process had this file open just before

	next int64 // offset after the last read
}

// process is what one thread did.
type process struct {
	id     uint32
	visits []int // into digest.visits
	from   time.Duration
	to     time.Duration
	wait   time.Duration
}

func (p *process) span() time.Duration { return p.to - p.from }

// digest is a recording made ready for looking at.
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

	files  map[int32]int // visits of each file, without those that come again at once
	passes []pass
	jobs   int     // that read the same files side by side
	shared float64 // share of the visits that another job has made shortly before
}

// named is what was asked for by name: lookups, and pieces of listings.
type named struct {
	lookups   int
	lists     int
	lookedAt  time.Duration // the first lookup
	lookedTo  time.Duration // when nine tenths of the lookups were over
	perLookup int           // files that were looked up and never opened
}

// digestOf makes a recording ready.
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
	anybody := map[int32]int{} // the latest of whatever process
	latest := map[uint32]int{} // visit of each process
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
					i = begin(e) // it was open before the recording began
				}
			}
			d.read(&d.visits[i], e)
		case trace.Close:
			// The kernel tells the closing of whom it likes: by the process that closed, if it has one.
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
	// The kernel reads ahead by several requests at once, which arrive in any order.
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

// spans returns the processes' time together, and how much of it they waited. A process that did nothing
// between its first and its last visit counts as being there.
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

// atOnce returns how many processes there were at a time, on average.
func (d *digest) atOnce() float64 {
	all, _ := d.spans()
	return share(float64(all), float64(d.to-d.from))
}

// pace returns the files opened a second, while any were.
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

// size returns a file's size, 0 if it is not known.
func (d *digest) size(file int32) int64 { return d.trace.Files[int(file)].Size }

// sizes returns the sizes of the files that were visited, each once, in the order of the first visits.
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

// number returns where a file stands in the listing's order: its sample number where most files have one.
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

// latency returns the store's median, as the daemon has measured it, else what reads that began a fetch waited.
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

// ordered says that the mount knew what would be read.
func (d *digest) ordered() bool {
	switch d.last.Order.State {
	case "inferred", "following", "finished":
		return true
	}
	return false
}
