package infer

// trace is the opens of a subset since a possible start of an epoch, each sample once.
type trace struct {
	subset Subset
	opens  []Open // samples are numbered from the subset's first
	seen   setBits
	last   map[uint32]uint32 // sample that each process opened last
	nearby int               // opens close to the process's last one: a scan

	// The opens since the latest repeat. A reader that begins another epoch repeats samples.
	tail    []Open
	repeats int

	epoch int // how often the trace was begun
	tries tries
}

const (
	// maxTrace bounds a trace, at 8 bytes an open.
	maxTrace = 1 << 20
	// Half of tailLen opens must be repeats for a new epoch to have begun.
	tailLen = 16
	// scanGap is the largest distance of an open of a scan from the last one, in samples: listings need not have our
	// order.
	scanGap = 16
	// maxProcesses is how many processes are distinguished.
	maxProcesses = 1 << 14
)

func newTrace(s Subset) *trace {
	return &trace{subset: s, seen: newSet(s.Len), last: map[uint32]uint32{}}
}

// begin clears the trace except for the given opens.
func (t *trace) begin(opens []Open) {
	clear(t.seen)
	clear(t.last)
	t.opens, t.nearby, t.tail, t.repeats, t.tries = nil, 0, nil, 0, tries{}
	t.epoch++
	for _, o := range opens {
		t.note(o)
	}
}

// add adds an open of one of the subset's samples.
func (t *trace) add(o Open) {
	o.Sample -= uint32(t.subset.First)
	if last, ok := t.last[o.Process]; ok && last == o.Sample {
		return // opened again, after a look at the header
	}
	repeat := t.seen.has(int(o.Sample))
	if repeat {
		t.repeats++
	}
	if repeat || len(t.tail) > 0 {
		t.tail = append(t.tail, o)
	}
	t.note(o)
	switch {
	case t.repeats >= tailLen/2:
		t.begin(t.tail)
	case len(t.tail) == tailLen:
		t.tail, t.repeats = nil, 0
	}
}

func (t *trace) note(o Open) {
	if len(t.last) == maxProcesses {
		clear(t.last)
	}
	last, known := t.last[o.Process]
	t.last[o.Process] = o.Sample
	if t.seen.has(int(o.Sample)) || len(t.opens) == maxTrace {
		return
	}
	if d := int(o.Sample) - int(last); known && d >= -scanGap && d <= scanGap {
		t.nearby++
	}
	t.seen.add(int(o.Sample))
	t.opens = append(t.opens, o)
}

// shuffled reports whether the trace is worth a search: it is not a scan of a listing.
func (t *trace) shuffled() bool { return 2*t.nearby < len(t.opens) }
