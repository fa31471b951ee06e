package loader

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/shoalfs/shoal/loader/feedpb"
	"github.com/shoalfs/shoal/prefetch/order"
)

// raw is the transform that leaves samples unchanged.
const raw = "raw"

// spec is a checked Open: everything that determines a session's stream.
type spec struct {
	session   string
	client    string
	order     order.Spec // of all ranks together
	orderName string     // as in states
	batch     int        // rows of this rank
	world     int
	rank      int
	transform Transform // nil for raw samples
	ds        Dataset   // the dataset that the transform reads, once the spec is resolved
	hash      string    // of the transform, and of the labels' source
	label     labelSource
	parts     []string // extensions of the parts that are read of every sample
	seed      uint64
	tail      Tail
	bad       badPolicy
	epochs    int        // 0: without end
	weight    int        // relative to other streams of the daemon
	placement *placement // nil: ranks take their positions in turn
	start     State
}

// global is the global batch.
func (s *spec) global() int { return s.batch * s.world }

// transformName is the canonical text of the transform.
func (s *spec) transformName() string {
	if s.transform == nil {
		return raw
	}
	return s.transform.String()
}

// plan returns the plan of one epoch from a cursor on.
func (s *spec) plan(ds Dataset, epoch, cursor int) (plan, error) {
	o, err := s.order.Over(facts(ds), epoch)
	if err != nil {
		return plan{}, invalid("%w", err)
	}
	if b := s.order.Batch(); b > 0 && cursor%b != 0 && cursor != o.Len() {
		return plan{}, refused("state of %s: cursor %d is inside a batch of %d", s.orderName, cursor, b)
	}
	p, err := newPlan(o, cursor, s.batch, s.world, s.rank, s.tail, s.placement)
	if err != nil {
		return plan{}, refused("state of %s: %w", s.orderName, err)
	}
	p.again, _ = o.(order.Repeating)
	return p, nil
}

// packingKey precedes the name of a packing in the name of an order over shards.
const packingKey = ",shards="

// facts returns the properties of a dataset that orders may depend on.
func facts(ds Dataset) order.Facts {
	f := order.Facts{Samples: ds.Len(), Size: ds.Size, Classes: ds.Classes, Label: ds.Label}
	if groups, _ := ds.Groups(); groups != nil {
		f.Shards = func() order.Groups { return groups }
	}
	return f
}

// Check reports an error of an Open that does not depend on the dataset; nil if there is none.
func Check(ctx context.Context, o *feedpb.Open, compile Compiler) error {
	_, _, err := parse(ctx, o, nil, compile)
	return err
}

// parse reads an Open; from is its state, nil if it has none.
func parse(ctx context.Context, o *feedpb.Open, ds Dataset, compile Compiler) (s *spec, from *State, err error) {
	fail := func(err error) (*spec, *State, error) { return nil, nil, invalid("%w", err) }
	if o.GetState() != "" {
		st, err := ParseState(o.GetState())
		if err != nil {
			return fail(err)
		}
		from = &st
	}
	s = &spec{session: o.GetSession(), client: o.GetClient(), seed: o.GetSeed(), epochs: int(o.GetEpochs())}
	if s.weight = max(1, int(o.GetWeight())); s.weight > MaxWeight {
		return fail(fmt.Errorf("weight %d: give 1 to %d", s.weight, MaxWeight))
	}
	if s.bad, err = parseBad(o.GetBad()); err != nil {
		return fail(err)
	}
	if s.label, err = parseLabel(o.GetLabel()); err != nil {
		return fail(err)
	}
	tail := o.GetTail()
	if tail == "" && from != nil {
		tail = from.Tail
	}
	if s.tail, err = ParseTail(tail); err != nil {
		return fail(err)
	}
	if err := s.resolveOrder(o, from); err != nil {
		return fail(err)
	}
	if s.placement, err = parsePlacement(o.GetPlacement(), s.world); err != nil {
		return fail(err)
	}
	s.hash = raw
	if t := strings.TrimSpace(o.GetTransform()); t != "" && t != raw {
		if compile == nil {
			return fail(fmt.Errorf("transform %q: this server delivers raw samples only", t))
		}
		if s.transform, err = compile(ctx, t, ds); err != nil {
			return fail(err)
		}
		s.hash = s.transform.Hash()
	}
	if err := s.resolveBatch(o, from); err != nil {
		return nil, nil, err
	}
	return s, from, nil
}

// shortVersion is how many digits of a version messages show.
const shortVersion = 12

// resolve checks an Open against the dataset.
func resolve(ctx context.Context, o *feedpb.Open, ds Dataset, compile Compiler, maxBatchBytes int64) (*spec, error) {
	if v := o.GetDataset(); v != "" && v != ds.Version() &&
		(len(v) < shortVersion || !strings.HasPrefix(ds.Version(), v)) {
		return nil, refused("the trainer requires dataset %s, this server has %s: serve that version, or omit dataset",
			v, ds.Version())
	}
	s, from, err := parse(ctx, o, ds, compile)
	if err != nil {
		return nil, err
	}
	if d, ok := s.transform.(Deriving); ok {
		ds = d.Derived()
	}
	s.ds = ds
	s.label = s.label.over(ds)
	s.hash = s.label.hashed(s.hash)
	s.parts = s.wantedParts()
	if err := s.checkParts(ds); err != nil {
		return nil, invalid("%w", err)
	}
	if _, packing := ds.Groups(); s.order.NeedsGroups() && packing != "" {
		// The same samples, packed differently, are another order.
		s.orderName += packingKey + packing
	}
	if from != nil && (from.Dataset != ds.Version() || from.Samples != 0 && from.Samples != ds.Len()) {
		return nil, refused("the state is of dataset %s, %d samples, this server has %s, %d samples: a state is valid "+
			"for one version of a dataset and one --samples only; serve these, or start the epoch again without a "+
			"state", from.Dataset, from.Samples, ds.Version(), ds.Len())
	}
	row := int64(64)
	if s.transform != nil {
		for _, f := range s.transform.Fields() {
			row += int64(f.Bytes)
		}
	}
	if int64(s.batch) > maxBatchBytes/row {
		return nil, invalid("a batch of %d rows of %d bytes is more than the server's limit of %d bytes: "+
			"lower the batch size", s.batch, row-64, maxBatchBytes)
	}

	if from == nil {
		epoch, of := int64(o.GetEpoch()), int64(s.order.Epoch())
		switch {
		case epoch != 0 && of != 0 && epoch != of:
			return nil, invalid("order %s starts at epoch %d, the session at %d: omit one of them", s.order, of, epoch)
		case max(epoch, of) > maxEpoch:
			return nil, invalid("epoch %d is beyond %d", max(epoch, of), maxEpoch)
		}
		s.start = s.state(ds, int(max(epoch, of)), 0)
		return s, nil
	}
	if err := s.agrees(from); err != nil {
		return nil, err
	}
	s.start = s.state(ds, from.Epoch, from.Cursor)
	if from.Cursor > 0 { // a client that sets the epoch starts it again
		s.start.Bad = from.Bad
	}
	return s, nil
}

// agrees returns why a state is not of this session's order.
func (s *spec) agrees(from *State) error {
	switch {
	case from.Transform != s.hash:
		return refused("the state was taken with transform %s, the session asks for %s (%s): pass the transform that "+
			"the state was taken with", from.Transform, s.hash, s.transformName())
	case from.Order != s.orderName:
		name, _, _ := strings.Cut(from.Order, packingKey)
		if _, err := order.ParseVersioned(name); err != nil {
			return refused("the state: %w", err)
		}
		return refused("the state was taken with order %s, the session asks for %s: pass that order, or start without "+
			"a state", from.Order, s.orderName)
	case from.Seed != s.seed:
		return refused("the state was taken with seed %d, the session asks for seed %d: pass seed=%d",
			from.Seed, s.seed, from.Seed)
	case from.Tail != string(s.tail):
		return refused("the state was taken with tail %q, the session asks for %q: pass tail=%q",
			from.Tail, s.tail, from.Tail)
	}
	return nil
}

// resolveOrder completes the order with the session's fields.
func (s *spec) resolveOrder(o *feedpb.Open, from *State) error {
	text := strings.TrimSpace(o.GetOrder())
	switch {
	case text == "" && from != nil:
		text, _, _ = strings.Cut(order.Unversioned(from.Order), packingKey) // which is compared later
		s.seed = from.Seed
	case text == "":
		text = "uniform"
	}
	name, keys, _ := strings.Cut(text, ":")
	has := func(key string) bool { return strings.Contains(","+keys, ","+key+"=") }
	add := func(key string, value uint64) {
		keys = strings.TrimPrefix(fmt.Sprintf("%s,%s=%d", keys, key, value), ",")
		text = name + ":" + keys
	}
	if seeded[name] && !has("seed") {
		add("seed", s.seed)
	}
	if name == "buckets" && !has("batch") {
		// The session's global batch; resolveBatch compares them.
		global := uint64(o.GetBatch()) * uint64(max(o.GetWorld(), 1))
		if global == 0 && from != nil {
			global = uint64(from.Batch)
		}
		if global > 0 {
			add("batch", global)
		}
	}
	spec, err := order.Parse(text)
	if err != nil {
		if _, e := order.Parse(cmp.Or(strings.TrimSpace(o.GetOrder()), text)); e != nil {
			err = e // report the text as written
		}
		return err
	}
	if !spec.Computed() {
		return fmt.Errorf(
			"order %s is for mounts: use an order that the feed computes, such as uniform:seed=0 or torch:seed=0", spec)
	}
	if spec.Path() != "" {
		return fmt.Errorf("order %s: a server reads no local files for a trainer: mount with --order list:PATH, or "+
			"use a computed order", spec)
	}
	s.world, s.rank = int(o.GetWorld()), int(o.GetRank())
	r, hasWorld, hasRank := spec.Ranks(), has("world"), has("rank")
	switch {
	case r.First != r.Last:
		return fmt.Errorf("order %s: one stream is one rank, not %s: open one for each", spec, r)
	case s.world == 0 && (hasWorld || hasRank):
		s.world, s.rank = spec.World(), r.First
	case hasWorld && s.world != spec.World():
		return fmt.Errorf(
			"order %s: the session is rank %d of %d: open it with world=%d, or leave world and rank out of the order",
			spec, s.rank, s.world, spec.World())
	case hasRank && s.rank != r.First:
		return fmt.Errorf("order %s: the session is rank %d of %d: leave rank out of the order", spec, s.rank, s.world)
	}
	s.world = max(s.world, 1)
	if s.rank >= s.world {
		return fmt.Errorf("rank %d is outside a world of %d: ranks are 0 to %d", s.rank, s.world, s.world-1)
	}
	// The order of all ranks: newPlan takes this one's share. What torch pads it with depends on the world.
	world := 1
	if spec.Ranked() {
		world = s.world
	}
	if spec, err = spec.With("world", strconv.Itoa(world)); err != nil {
		return err
	}
	if spec, err = spec.With("rank", order.Ranks{Last: world - 1}.String()); err != nil {
		return err
	}
	s.order, s.orderName = spec, spec.Versioned()
	return nil
}

// seeded are the orders that use the session's seed if their text has none.
var seeded = map[string]bool{"uniform": true, "torch": true, "windowed": true, "mixture": true, "buckets": true}

// resolveBatch determines the rank's batch. The global batch stays as in the state.
func (s *spec) resolveBatch(o *feedpb.Open, from *State) error {
	s.batch = int(o.GetBatch())
	if from != nil && s.batch == 0 {
		if from.Batch%s.world != 0 {
			return refused("the state's global batch of %d cannot be shared by %d ranks: resume with a divisor of it, "+
				"or pass a batch size and allow rebatch", from.Batch, s.world)
		}
		s.batch = from.Batch / s.world
	}
	if s.batch <= 0 {
		return invalid("batch size missing: it is the number of samples in a batch of this rank, at least 1")
	}
	if s.batch > math.MaxInt32/s.world {
		return invalid("batches of %d for %d ranks are more than 2^31 samples", s.batch, s.world)
	}
	if from != nil && from.Batch != s.global() && !o.GetRebatch() {
		return refused("the state was taken with a global batch of %d, the session asks for %d (%d for each of %d "+
			"ranks): pass a batch size of %s, or allow rebatch",
			from.Batch, s.global(), s.batch, s.world, share(from.Batch, s.world))
	}
	if b := s.order.Batch(); b > 0 && b != s.global() {
		return invalid("order %s has batches of %d, the session's global batch is %d (%d for each of %d ranks): pass "+
			"a batch size of %s, or another batch in the order",
			s.order, b, s.global(), s.batch, s.world, share(b, s.world))
	}
	return nil
}

func share(batch, world int) string {
	if batch%world == 0 {
		return strconv.Itoa(batch / world)
	}
	return fmt.Sprintf("%d/%d (not a whole number: use another world size)", batch, world)
}

// state returns the session's state at a position.
func (s *spec) state(ds Dataset, epoch, cursor int) State {
	return State{V: stateVersion, Dataset: ds.Version(), Order: s.orderName, Transform: s.hash, Seed: s.seed,
		Epoch: epoch, Cursor: cursor, Batch: s.global(), Tail: string(s.tail), Placement: s.placement.name(),
		Samples: ds.Len()}
}

// badPolicy says how many bad samples of an epoch a session skips. The zero value is none.
type badPolicy struct {
	text     string
	fraction float64
	count    int
}

// parseBad reads error, skip:P% or skip:N.
func parseBad(text string) (badPolicy, error) {
	if text == "" || text == "error" {
		return badPolicy{text: "error"}, nil
	}
	fail := fmt.Errorf("bad-sample policy %q: must be error, skip:P%% (of a rank's samples in an epoch) or skip:N",
		text)
	quota, ok := strings.CutPrefix(text, "skip:")
	if !ok {
		return badPolicy{}, fail
	}
	if p, ok := strings.CutSuffix(quota, "%"); ok {
		v, err := strconv.ParseFloat(p, 64)
		if err != nil || !(v >= 0 && v <= 100) {
			return badPolicy{}, fail
		}
		return badPolicy{text: text, fraction: v / 100}, nil
	}
	v, err := strconv.ParseUint(quota, 10, 31)
	if err != nil {
		return badPolicy{}, fail
	}
	return badPolicy{text: text, count: int(v)}, nil
}

// allows returns how many of the rank's samples in an epoch may be bad. A share is rounded up, so that a small dataset
// may have one.
func (b badPolicy) allows(samples int) int {
	return max(b.count, int(math.Ceil(b.fraction*float64(samples))))
}
