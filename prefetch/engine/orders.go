package engine

import (
	"bytes"
	"context"
	"fmt"
	"io/fs"
	"maps"
	slashpath "path"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	humanize "github.com/dustin/go-humanize"

	"github.com/shoalfs/shoal/cache"
	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/internal/pause"
	"github.com/shoalfs/shoal/prefetch"
	"github.com/shoalfs/shoal/prefetch/order"
	"github.com/shoalfs/shoal/prefetch/run"
)

// plan is a written order: the files that a reader will open, in order.
type plan struct {
	text     []byte // as written; nil for a name under which only bad plans were written
	written  time.Time
	reserved int64  // in the ledger, for this plan
	before   int64  // in the ledger, for the previous plan, which may still be read
	rejected string // what became of the latest write, and why, if it is not in force; empty if it is
	opens    int    // opens of its files, at the last check
	read     time.Time
	stale    bool // no reader has followed it for staleAfter
	ended    bool // it was followed, and removed
}

const (
	// maxPlans is how many plans may be in force: some for each rank of a large machine.
	maxPlans = 128
	// staleAfter is the time without a reader after which a plan no longer prevents inference. Most validations and
	// checkpoints are shorter.
	staleAfter = 10 * time.Minute
)

const maxPlanErrors = 20

// orders are what the readers of a dataset follow: --order, written plans, or what was inferred from their opens; and
// the orders of the feed's sessions.
//
// Who changes what the mount follows holds planning from the decision until the streams have changed: it begins and
// ends streams, which waits for the runner. mu is held for moments. Streams begin and end without it.
type orders struct {
	engine    *Engine
	gate      prefetch.Gate              // guarded by the runner's lock
	spec      atomic.Pointer[order.Spec] // the order of the mount
	inference atomic.Pointer[inference]  // nil unless the mount's order is inferred

	planning  sync.Mutex
	mu        sync.Mutex
	streams   []*run.Stream            // of the mount: by --order, or one per plan; replaced, never changed
	plans     map[string]*plan         // by name
	mountedAt []string                 // replaced, never changed
	sessions  map[*run.Stream]struct{} // the feed's
}

func (r *orders) mounted() []*run.Stream {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.streams
}

// close ends all streams. Nobody reads any more.
func (r *orders) close() {
	r.planning.Lock() // a plan may be withdrawn at this moment, and those after it find none
	defer r.planning.Unlock()
	r.stopInferring()
	r.drop(func(*run.Stream) bool { return true })
	_, sessions := r.following()
	for _, s := range sessions {
		s.Close()
	}
	for _, p := range r.plans {
		r.engine.cache.Ledger().Release(p.reserved+p.before, cache.ForDemand)
	}
}

// options are the options of a mount's stream of a version.
func (r *orders) options(name string, v *view, epochs func(epoch int) order.Order) run.Options {
	limiter := r.engine.remoteOf(v).limiter
	return run.Options{
		Name: name, Volume: v.volume, Layout: v.layout, Samples: v.samples, Gate: &r.gate, Places: limiter.Places,
		Ease: limiter.Ease, Grouped: func() bool { return r.engine.order().NeedsGroups() },
		Keep: v.keeping, Choose: true, Weight: 1, Epochs: epochs,
		Has: func(file int) bool { return v.inPages(r.engine, file) },
	}
}

// start (re)starts the mount's order, by spec, on the version in force. If it fails, all stays as it was.
func (r *orders) start(spec order.Spec) error {
	r.planning.Lock() // a plan written meanwhile would be installed on the old version, or beside an inference
	defer r.planning.Unlock()
	return r.restart(spec)
}

// restart is start. e.orders.planning is held.
func (r *orders) restart(spec order.Spec) error {
	v := r.engine.cur.Load()
	var streams []*run.Stream
	if spec.Computed() && v.manifest.Len() > 0 {
		if v.samples.Len() == 0 {
			return fmt.Errorf("--order %s: %w",
				spec, noSamples(r.engine.source.String(), r.engine.cfg.Samples, v.manifest))
		}
		if _, err := spec.Over(v.facts(), spec.Epoch()); err != nil {
			return fmt.Errorf("--%w", err) // it begins with the order: the spec was checked before
		}
		o := r.options("mount", v, func(epoch int) order.Order {
			o, err := spec.Over(v.facts(), epoch)
			if err != nil {
				return nil // an epoch that this order does not know
			}
			return filesOf(o, v.samples)
		})
		o.First, o.Search = spec.Epoch(), true
		s, err := r.engine.host.runner.Begin(o)
		if err != nil {
			return err
		}
		streams = append(streams, s)
	}
	r.stopInferring()
	r.spec.Store(&spec)
	r.mu.Lock()
	old := r.streams
	r.streams = streams
	r.mu.Unlock()
	for _, s := range old {
		s.Close()
	}
	for _, name := range r.engine.Plans() { // they contain paths, so they are parsed again against the new version
		r.mu.Lock()
		p := r.plans[name]
		text, held := p.text, p.reserved+p.before
		p.reserved, p.before = 0, 0
		r.mu.Unlock()
		r.engine.cache.Ledger().Release(held, cache.ForDemand) // its streams have ended
		if err := r.put(name, text); err != nil {
			r.engine.log.Warn("a plan does not fit the new version of the dataset", "plan", name, "cause", err)
		}
	}
	if spec.Name() == "auto" && len(r.mounted()) == 0 {
		r.infer(v)
	}
	return nil
}

// PutPlan checks a whole plan and installs it, or fails and leaves the old one in force. data contains relative
// paths, one a line. While the old one is being read the new one waits; see run.Stream.Retell.
func (e *Engine) PutPlan(name string, data []byte) error {
	e.orders.planning.Lock()
	defer e.orders.planning.Unlock()
	return e.orders.put(name, data)
}

// put is PutPlan. e.orders.planning is held.
func (r *orders) put(name string, data []byte) error {
	for old := range r.stale() { // of jobs that were killed
		if r.inForce(name) >= maxPlans {
			_ = r.remove(strings.TrimPrefix(old, "plans/"))
		}
	}
	v, each := r.engine.cur.Load(), int64(12) // of order.Index
	if ofRanges(data) {
		each = rangeBytes
	}
	// The text, the files' numbers, and the lines. It is reserved before they are parsed, which takes as much.
	reserved := int64(len(data)) + 4*int64(v.manifest.Len()) + each*int64(1+bytes.Count(data, []byte("\n")))
	var w written
	var err error
	switch n := r.inForce(name); {
	case r.engine.order().Name() == "none":
		reserved, err = 0, fmt.Errorf(
			"the mount runs with --order none, which follows no plan; mount with --order auto")
	case n >= maxPlans:
		reserved, err = 0, fmt.Errorf(
			"%d plans are in force; remove those of jobs that have ended: rm MOUNTPOINT/.shoal/plans/NAME", n)
	case !r.engine.cache.TryReserve(reserved):
		reserved, err = 0, fmt.Errorf(
			"it needs %s of memory, and --memory leaves too little; raise --memory, or split the plan",
			humanize.IBytes(uint64(reserved)))
	default:
		w, err = r.read(v, name, data)
	}
	var s *run.Stream
	waits, waited := false, false
	if err == nil {
		if s = w.stream; s != nil {
			waited = s.Behind()
			waits = s.Retell(w.order())
		} else {
			s, err = r.engine.host.runner.BeginPlan(w.options, w.order())
		}
	}
	if err == nil {
		r.stopInferring()
	}
	r.mu.Lock()
	p := r.plans[name]
	if p == nil {
		if len(r.plans) >= 2*maxPlans { // those that were refused or withdrawn: the latest matter
			maps.DeleteFunc(r.plans, func(_ string, p *plan) bool { return p.text == nil })
		}
		p = &plan{}
		r.plans[name] = p
	}
	if err != nil {
		p.rejected = "refused:\n  " + strings.ReplaceAll(err.Error(), "\n", "\n  ")
		r.mu.Unlock()
		r.engine.cache.Ledger().Release(reserved, cache.ForDemand)
		return fmt.Errorf("plan %s: %w", name, err)
	}
	held, free := int64(0), p.reserved+p.before
	switch {
	case waits && waited: // the dropped one was never begun
		held, free = p.before, p.reserved
	case waits:
		held, free = p.reserved, p.before
	}
	*p = plan{text: slices.Clone(data), written: time.Now(), reserved: reserved, before: held}
	maps.DeleteFunc(r.plans, func(_ string, p *plan) bool { return p.ended }) // each job may have a name of its own
	r.streams = append([]*run.Stream{s}, slices.DeleteFunc(slices.Clone(r.streams), func(m *run.Stream) bool {
		return m == s
	})...)
	r.mu.Unlock()
	// Streams of the old version, and those guessed for --order auto, are replaced.
	r.drop(func(m *run.Stream) bool {
		return m != s && (m.Name == s.Name || m.Name == "mount" || m.Name == sequenceName)
	})
	r.engine.cache.Ledger().Release(free, cache.ForDemand)
	r.engine.log.Info("plan installed", "plan", name, "lines", w.lines)
	return nil
}

// written is a plan that has been checked.
type written struct {
	lines   int
	stream  *run.Stream          // that goes on with it; nil: a new one begins
	options run.Options          // of a new one
	order   func() order.Locator // called once, if the plan is accepted
}

// read checks a plan for a version.
func (r *orders) read(v *view, name string, data []byte) (w written, err error) {
	w.options = r.options("plans/"+name, v, nil)
	w.options.Departs = func(s *run.Stream, matched, of int) { r.withdraw(name, s, matched, of) }
	if ofRanges(data) {
		return r.readRanges(v, w, data)
	}
	files, err := parsePlan(v.manifest, data, r.mountPoints())
	if err != nil {
		return w, err
	}
	w.lines, w.stream = len(files), r.ofPlan(w.options.Name, v, false)
	w.order = func() order.Locator { return order.Index(order.List(files)) }
	return w, nil
}

// RemovePlan ends a plan. Without another one, the mount continues as if none had been written. It fails with
// fs.ErrNotExist if there is none.
func (e *Engine) RemovePlan(name string) error {
	e.orders.planning.Lock()
	defer e.orders.planning.Unlock()
	return e.orders.remove(name)
}

// withdraw removes a plan that its readers do not follow. The order is inferred then, and says why.
func (r *orders) withdraw(name string, s *run.Stream, matched, of int) {
	r.planning.Lock()
	defer r.planning.Unlock()
	if !slices.Contains(r.mounted(), s) || !s.Departed() {
		return // another was written meanwhile
	}
	if err := r.remove(name); err != nil {
		r.engine.log.Warn("a plan that its readers do not follow stays in force", "plan", name, "cause", err)
		return
	}
	what := "opens"
	if s.Ranges != nil {
		what = "reads"
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.plans[name] = &plan{rejected: fmt.Sprintf(
		"withdrawn at %s: the readers do not follow it; %d of their first %d %s matched",
		time.Now().UTC().Format(time.RFC3339), matched, of, what)}
	r.engine.log.Warn("plan withdrawn: the readers do not follow it", "plan", name, "matched", matched, what, of)
}

// remove is RemovePlan. e.orders.planning is held.
func (r *orders) remove(name string) error {
	r.mu.Lock()
	p := r.plans[name]
	if p == nil || p.text == nil {
		r.mu.Unlock()
		return fs.ErrNotExist
	}
	delete(r.plans, name)
	r.mu.Unlock()
	of := func(s *run.Stream) bool { return s.Name == "plans/"+name }
	for _, s := range r.mounted() {
		if !of(s) {
			continue
		}
		if read := s.Progress(); read.Consumed > 0 { // said while nothing else is known
			r.mu.Lock()
			r.plans[name] = &plan{rejected: fmt.Sprintf("ended in epoch %d: %d of %d read",
				read.Epoch, read.Consumed, read.Len), ended: true}
			r.mu.Unlock()
		}
	}
	r.drop(of)
	r.engine.cache.Ledger().Release(p.reserved+p.before, cache.ForDemand)
	r.engine.log.Info("plan removed", "plan", name)
	if r.inForce("") > 0 {
		r.look(time.Now())
		return nil
	}
	return r.restart(r.engine.order())
}

// inForce returns how many plans are in force, except one.
func (r *orders) inForce(name string) int {
	return len(slices.DeleteFunc(r.engine.Plans(), func(other string) bool { return other == name }))
}

// watch checks the plans now and then until ctx ends.
func (r *orders) watch(ctx context.Context) {
	for now := range pause.Every(ctx, staleAfter/20) {
		r.planning.Lock()
		r.look(now)
		r.planning.Unlock()
	}
}

// look records which plans are stale. While all are, the order is inferred as well, if enabled. planning is held.
func (r *orders) look(now time.Time) {
	v, live := r.engine.cur.Load(), 0
	opened := map[string]int{}
	for _, s := range r.mounted() {
		opened[s.Name] = s.Followed()
	}
	r.mu.Lock()
	for name, p := range r.plans {
		opens, followed := opened["plans/"+name]
		if !followed {
			continue
		}
		if opens != p.opens {
			p.opens, p.read = opens, now
		}
		if p.stale = now.Sub(p.written) > staleAfter && now.Sub(p.read) > staleAfter; !p.stale {
			live++
		}
	}
	r.mu.Unlock()
	inferring := r.inference.Load() != nil
	switch {
	case live > 0 && inferring:
		r.stopInferring()
		r.drop(func(s *run.Stream) bool { return !s.OfPlan() }) // what it has left
	case live == 0 && !inferring && r.engine.order().Name() == "auto":
		r.infer(v)
	}
}

// drop takes streams out of the mount's, and ends them.
func (r *orders) drop(which func(*run.Stream) bool) {
	r.mu.Lock()
	old := r.streams
	r.streams = slices.DeleteFunc(slices.Clone(old), which)
	r.mu.Unlock()
	for _, s := range old {
		if which(s) {
			s.Close()
		}
	}
}

// ended reports whether a plan was followed and removed, as `shoal run` does at its end.
func (r *orders) ended() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.ContainsFunc(slices.Collect(maps.Values(r.plans)), func(p *plan) bool { return p.ended })
}

// stale returns the names of the streams whose plans are stale.
func (r *orders) stale() map[string]bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	stale := map[string]bool{}
	for name, p := range r.plans {
		if p.stale {
			stale["plans/"+name] = true
		}
	}
	return stale
}

// MountedAt sets a mount point of the dataset, so that plans may contain absolute paths.
func (e *Engine) MountedAt(dir string) {
	r := &e.orders
	r.mu.Lock()
	defer r.mu.Unlock()
	if !slices.Contains(r.mountedAt, dir) {
		r.mountedAt = append(slices.Clip(r.mountedAt), dir)
	}
}

// MountedOver says how the mount's requests come from the kernel, for the stats.
func (e *Engine) MountedOver(transport func() string) { e.counted.transport.Store(&transport) }

func (r *orders) mountPoints() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.mountedAt
}

// ofPlan returns the stream of the plans of a name, nil if there is none for this version.
func (r *orders) ofPlan(name string, v *view, ofRanges bool) *run.Stream {
	for _, s := range r.mounted() {
		if s.Name == name && s.Volume == v.volume && (s.Ranges != nil) == ofRanges {
			return s
		}
	}
	return nil
}

// parsePlan returns the files that lines of paths name, which are relative or below one of the mount points.
func parsePlan(m *catalog.Manifest, data []byte, mountPoints []string) ([]uint32, error) {
	files, bad := order.ParseLines(data, maxPlanErrors, func(path string) (int, error) {
		return findFile(m, path, mountPoints)
	})
	if len(bad) > 0 {
		return nil, fmt.Errorf("%s (paths are relative to the mount point, one a line)", strings.Join(bad, "\n"))
	}
	if len(files) == 0 {
		return nil, fmt.Errorf("it names no file")
	}
	return files, nil
}

// findFile returns the file that a plan names; negative: the path is empty.
func findFile(m *catalog.Manifest, path string, mountPoints []string) (file int, err error) {
	node, ok := m.Find(path) // a name may end with CR
	if !ok {
		path = slashpath.Clean(strings.TrimSuffix(path, "\r"))
		for _, dir := range mountPoints {
			if below, in := strings.CutPrefix(path, dir+"/"); in {
				path = below
				break
			}
		}
		node, ok = m.Find(path)
	}
	switch {
	case path == "", path == ".":
		return -1, nil
	case !ok:
		return 0, fmt.Errorf("no file %.300q in the dataset", path) // not all of it: it may be anything
	case node.IsDir:
		return 0, fmt.Errorf("%q is a folder", path)
	}
	return node.Index, nil
}

// Get returns the content of a control file: order, refresh or plans/NAME.
func (e *Engine) Get(name string) ([]byte, error) {
	switch name {
	case "order":
		return e.orders.text(), nil
	case "refresh":
		return []byte("Write anything to this file to list the source again.\n"), nil
	}
	plainName, ok := strings.CutPrefix(name, "plans/")
	e.orders.mu.Lock()
	defer e.orders.mu.Unlock()
	if p := e.orders.plans[plainName]; ok && p != nil && p.text != nil {
		return p.text, nil
	}
	return nil, fs.ErrNotExist
}

// Plans returns the names of the written plans.
func (e *Engine) Plans() []string {
	e.orders.mu.Lock()
	defer e.orders.mu.Unlock()
	var names []string
	for name, p := range e.orders.plans {
		if p.text != nil {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

func (r *orders) text() []byte {
	var b bytes.Buffer
	streams := r.mounted()
	inference := r.inference.Load()
	if inference != nil {
		inference.text(&b)
	} else if len(streams) == 0 {
		fmt.Fprintf(&b, "order: none (--order %s)\n", r.engine.order())
	}
	switch hint := "shoal.hint(loader)"; {
	case len(streams) > 0:
	case r.engine.order().Name() == "none":
		fmt.Fprintln(&b, "  to give one, mount with --order auto")
	default:
		if m := r.engine.cur.Load().manifest; m.Bytes() > cache.ExtentSize*int64(m.Len()) { // the mean file is large
			hint = "shoal.hint(ranges=[(path, offset, length), …])"
		}
		fmt.Fprintf(&b, "  to give one, use `shoal run`, write paths to .shoal/plan, or in Python: %s\n", hint)
	}
	stale := r.stale()
	for _, s := range streams {
		p := s.Progress()
		switch {
		case inference != nil && !s.OfPlan(): // which has written it
		case p.Name == "mount":
			fmt.Fprintf(&b, "order: %s (by --order)\n", r.engine.order())
		default:
			fmt.Fprintf(&b, "order: plan (written to .shoal/%s)\n", oneLine(p.Name))
		}
		fmt.Fprintf(&b, "  epoch %d, position %d of %d, %d read, %d ahead of the reader\n", p.Epoch, p.Position, p.Len,
			p.Consumed, p.Lead)
		if r := p.Reanchored; r != nil {
			fmt.Fprintf(&b, "  %s, at %s\n", r.Text, r.Time.Format(time.RFC3339))
		}
		if ev := p.Events; ev.Jumps+ev.NextEpochs+ev.Restarts+ev.PrevEpochs+ev.Found > 0 {
			fmt.Fprintf(&b, "  moves so far: %d jumps, %d next epochs, %d restarts, %d returns to an epoch, %d found "+
				"elsewhere\n",
				ev.Jumps, ev.NextEpochs, ev.Restarts, ev.PrevEpochs, ev.Found)
		}
		if stale[p.Name] {
			fmt.Fprintf(&b, "  stale: no reader has followed it for %v, so the order is inferred, too; rm .shoal/%s "+
				"ends it\n", staleAfter, oneLine(p.Name))
		}
		if s.Behind() {
			fmt.Fprintf(&b, "  another plan was written, and takes effect when the reader begins it\n")
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for name, p := range r.plans {
		if p.rejected != "" {
			fmt.Fprintf(&b, "plan %s %s\n", oneLine(name), p.rejected)
		}
	}
	return b.Bytes()
}

// oneLine is a plan's name as a part of a line: anybody may choose it.
func oneLine(name string) string { quoted := strconv.Quote(name); return quoted[1 : len(quoted)-1] }
