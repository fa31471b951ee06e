package sim

import "cmp"

// trainer models accelerators that work in step, each with a PyTorch DataLoader: batch k is read by worker k mod
// Workers, sample by sample, as soon as it is less than Prefetch batches ahead of the accelerator. The loader
// restarts with every epoch. The global batch is a stretch of the order, of which accelerator a takes the positions
// a, a+Accelerators, ….
type trainer struct {
	s        *simulation
	epoch    int
	len      int // positions
	samples  int // read
	steps    int
	ready    []int // accelerators that have their batch, by step modulo its length
	taken    int   // steps begun
	finished int   // steps ended
	working  bool
	since    float64 // when the accelerators began to wait
	window   int     // batches that a loader may be ahead
	workers  []worker
	perLoad  int // workers a loader
}

// worker reads the batches of one accelerator whose step is its number modulo the loader's workers.
type worker struct {
	accelerator int
	step        int
	at          int    // sample of the batch
	extent      int    // of the sample
	waits       bool   // for an extent to arrive
	awaits      uint32 // the extent
	class       class  // how the sample was found so far
	busy        bool   // reading, or waiting
	opened      bool   // the sample's position counts as read
	done        int64  // bytes of the sample that were read, and are freed at its end
}

// class says how a sample was found.
type class uint8

const (
	keepHit class = iota
	ringHit
	waited
)

func (t *trainer) init(s *simulation) {
	t.s, t.perLoad = s, max(s.Workers, 1)
	t.window = cmp.Or(s.Prefetch, 2*t.perLoad)
	if s.Workers == 0 {
		t.window = 1
	}
	t.ready = make([]int, t.window+1)
	t.workers = make([]worker, s.Accelerators*t.perLoad)
}

func (t *trainer) begin(epoch int) {
	t.epoch, t.len = epoch, t.s.order(epoch).Len()
	global := t.s.Accelerators * t.s.Batch
	t.steps = (t.len + global - 1) / global
	t.taken, t.finished, t.samples, t.working, t.since = 0, 0, 0, false, t.s.now
	clear(t.ready)
	for i := range t.workers {
		t.workers[i] = worker{accelerator: i / t.perLoad, step: i % t.perLoad}
	}
	for i := range t.workers {
		t.advance(i)
	}
}

func (t *trainer) done() bool { return t.finished == t.steps }

// batch returns how many samples an accelerator takes in a step; fewer in the last one.
func (t *trainer) batch(step, accelerator int) int {
	global := t.s.Accelerators * t.s.Batch
	left := min(t.len-step*global, global)
	return max((left-accelerator+t.s.Accelerators-1)/t.s.Accelerators, 0)
}

// allowed is the first step whose batches may not be read yet.
func (t *trainer) allowed() int {
	if t.s.Workers == 0 {
		return t.finished + 1
	}
	return t.taken + t.window
}

// advance runs a worker until it must wait, or is far enough ahead.
func (t *trainer) advance(i int) {
	w := &t.workers[i]
	w.busy, w.waits = true, false
	for w.step < min(t.allowed(), t.steps) {
		if w.at == t.batch(w.step, w.accelerator) {
			step := w.step
			w.step, w.at = w.step+t.perLoad, 0
			slot := &t.ready[step%len(t.ready)]
			if *slot++; *slot == t.s.Accelerators {
				t.tryStep()
			}
			continue
		}
		pos := (w.step*t.s.Batch+w.at)*t.s.Accelerators + w.accelerator
		if !t.read(i, pos) {
			return
		}
		w.at++
		if t.s.Read > 0 {
			t.s.agenda.add(event{at: t.s.now + t.s.Read, kind: workerReady, worker: i})
			return
		}
	}
	w.busy = false
}

// read continues the sample at pos. It reports whether that is done; otherwise the worker is woken later.
func (t *trainer) read(i, pos int) bool {
	w, v := &t.workers[i], &t.s.volume
	sample := t.s.stream.cur.order.At(pos)
	if !w.opened {
		w.opened = true
		t.s.stream.opened(pos)
	}
	for n := v.sizes.Extents(sample); w.extent < n; {
		e := v.extent(sample, w.extent)
		switch st := v.states[e]; {
		case st&staged != 0:
			w.class = max(w.class, ringHit)
		case st&flying != 0:
			if r := v.flight[e]; r != nil {
				t.s.store.raise(r)
			}
			t.wait(w, e)
			return false
		case v.cache.has(sample, e):
			t.s.result(t.epoch).DiskBytes += v.sizes.ExtentBytes(sample, w.extent)
		default:
			w.class = waited
			if n := v.sizes.ExtentBytes(sample, w.extent); !t.reserve(n) {
				v.hungry = append(v.hungry, int32(i))
				return false
			}
			v.fetch(t.s.stream.cur, sample, w.extent, true)
			t.wait(w, e)
			return false
		}
		x := w.extent
		w.extent++
		w.done += v.spend(sample, x)
	}
	t.giveBack(w)
	r := t.s.result(t.epoch)
	*[...]*int64{keepHit: &r.KeepHits, ringHit: &r.RingHits, waited: &r.Waits}[w.class]++
	t.samples++
	w.extent, w.class, w.opened = 0, keepHit, false
	return true
}

// giveBack frees the memory of the samples that a worker has read. It reports whether there was any.
func (t *trainer) giveBack(w *worker) bool {
	n := w.done
	if w.done = 0; n > 0 {
		t.s.volume.release(n)
	}
	return n > 0
}

// reserve takes memory for a worker's own request: if there is none, that of the read parts of unfinished samples.
func (t *trainer) reserve(n int64) bool {
	if t.s.volume.reserve(n, true) {
		return true
	}
	any := false
	for i := range t.workers {
		any = t.giveBack(&t.workers[i]) || any
	}
	return any && t.s.volume.reserve(n, true)
}

func (t *trainer) wait(w *worker, e uint32) {
	w.class, w.waits, w.awaits = waited, true, e
	t.s.volume.states[e] |= awaited
}

// wake resumes the workers that wait for an extent that has arrived.
func (t *trainer) wake(e uint32) {
	for i := range t.workers {
		if w := &t.workers[i]; w.waits && w.awaits == e {
			t.advance(i)
		}
	}
}

// tryStep begins the next step if the accelerators are idle and all have their batch.
func (t *trainer) tryStep() {
	if t.working || t.taken == t.steps || t.ready[t.taken%len(t.ready)] < t.s.Accelerators {
		return
	}
	step := t.taken
	t.ready[step%len(t.ready)] = 0
	t.taken++
	t.working = true
	seconds := t.s.Step * float64(t.batch(step, 0)) / float64(t.s.Batch)
	r := t.s.result(t.epoch)
	r.Stalls.Add(t.s.now - t.since)
	r.Compute += seconds
	t.s.agenda.add(event{at: t.s.now + seconds, kind: stepEnd})
	t.goOn()
}

func (t *trainer) stepEnded() {
	t.working = false
	t.finished++
	t.since = t.s.now
	t.tryStep()
	t.goOn()
}

// goOn resumes the workers whose next batch is due.
func (t *trainer) goOn() {
	step := t.allowed() - 1
	for a := range t.s.Accelerators {
		i := a*t.perLoad + step%t.perLoad
		if w := &t.workers[i]; !w.busy && w.step == step && step < t.steps {
			t.advance(i)
		}
	}
}
