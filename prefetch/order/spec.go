package order

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/shoalfs/shoal/internal/levenshtein"
)

// Errors that Spec.Order and Parse wrap.
var (
	// ErrNotComputed: the spec names no algorithm (plan, auto, none).
	ErrNotComputed = errors.New("not a computed order")
	// ErrEpochUnknown: the order of this epoch cannot be known in advance (torch-loader).
	ErrEpochUnknown = errors.New("order of this epoch is not known in advance")
	// ErrNeedsShards: the order is one over shards, and there are none.
	ErrNeedsShards = errors.New("needs a shard set")
)

// Spec is a parsed order spec, a comparable value. The zero value is not a spec: use Parse.
//
//	torch:seed=S[,epoch=E][,world=W,rank=R][,drop_last=1]   DistributedSampler(shuffle=True)
//	torch-loader:seed=S                                     DataLoader(shuffle=True)
//	uniform:seed=S[,epoch=E][,world=W,rank=R]               our keyed permutation
//	sequential[:world=W,rank=R]                             0, 1, 2, …
//	plan, auto, none                                        no algorithm: see Computed
//
// rank is R or A-B (inclusive), for a mount that serves several ranks; with world above 1 it has to
// be given. epoch is where a run starts. A seed is any integer that torch.manual_seed takes, -2^63
// to 2^64-1.
//
// torch-loader's S is the seed that the loader's RandomSampler draws, not the argument of
// torch.manual_seed (see LoaderSeeds). Every epoch draws another, so the spec tells epoch 0 only.
type Spec struct {
	name     string
	seed     uint64
	epoch    int
	world    int // 0: not given, or 1
	ranks    Ranks
	hasRanks bool
	dropLast bool
}

// Ranks is an inclusive range of ranks.
type Ranks struct{ First, Last int }

// String returns R or A-B.
func (r Ranks) String() string {
	if r.First == r.Last {
		return strconv.Itoa(r.First)
	}
	return fmt.Sprintf("%d-%d", r.First, r.Last)
}

// algorithm describes what stands before the colon.
type algorithm struct {
	name, version string   // version is empty if nothing is computed
	keys          []string // in canonical order
	needsSeed     bool
}

var algorithms = []algorithm{
	{name: "torch", version: "torch@1", keys: []string{"seed", "epoch", "world", "rank", "drop_last"}, needsSeed: true},
	{name: "torch-loader", version: "torch-loader@1", keys: []string{"seed"}, needsSeed: true},
	{name: "uniform", version: "uniform@1", keys: []string{"seed", "epoch", "world", "rank"}, needsSeed: true},
	{name: "sequential", version: "sequential@1", keys: []string{"epoch", "world", "rank"}},
	{name: "plan"},
	{name: "auto"},
	{name: "none"},
}

const windowed = "windowed"

func find(name string) (algorithm, bool) {
	i := slices.IndexFunc(algorithms, func(a algorithm) bool { return a.name == name })
	if i < 0 {
		return algorithm{}, false
	}
	return algorithms[i], true
}

// Parse reads an order spec. Its errors name the offending word, its column (counted in
// characters from 1) and what would be right.
func Parse(text string) (Spec, error) {
	fail := func(at int, format string, args ...any) (Spec, error) {
		column := utf8.RuneCountInString(text[:at]) + 1
		return Spec{}, fmt.Errorf("order spec %q, column %d: %w", text, column, fmt.Errorf(format, args...))
	}
	name, rest, hasKeys := strings.Cut(text, ":")
	if name == windowed {
		return fail(0, "windowed orders read whole shards and this dataset has none (%w, made by packing); "+
			"for single files use uniform:seed=S", ErrNeedsShards)
	}
	a, ok := find(name)
	if !ok {
		names := make([]string, len(algorithms))
		for i, a := range algorithms {
			names[i] = a.name
		}
		return fail(0, "no order is called %q; %s", name, suggest(name, names))
	}
	s := Spec{name: name}
	var seen []string
	if hasKeys {
		at := len(name) + 1
		for word := range strings.SplitSeq(rest, ",") {
			key, value, ok := strings.Cut(word, "=")
			switch {
			case !slices.Contains(a.keys, key):
				if len(a.keys) == 0 {
					return fail(at, "%q: order %s takes no keys", word, name)
				}
				return fail(at, "order %s has no key %q; %s", name, key, suggest(key, a.keys))
			case !ok:
				return fail(at, "key %q has no value; write %s=…", key, key)
			case slices.Contains(seen, key):
				return fail(at, "key %q is given twice; leave one out", key)
			}
			if err := s.set(key, value); err != nil {
				return fail(at+len(key)+1, "%w", err)
			}
			seen = append(seen, key)
			at += len(word) + 1
		}
	}
	if a.needsSeed && !slices.Contains(seen, "seed") {
		return fail(len(text), "order %s needs a seed; write %s:seed=S", name, name)
	}
	return s, nil
}

// set assigns the value of one key. Whether values fit each other is for check, as flags may still
// change them.
func (s *Spec) set(key, value string) (err error) {
	switch key {
	case "seed":
		s.seed, err = parseSeed(value)
	case "epoch":
		s.epoch, err = parseCount(key, value, 0)
	case "world":
		if s.world, err = parseCount(key, value, 1); s.world == 1 {
			s.world = 0
		}
	case "rank":
		if s.ranks, err = parseRanks(value); err == nil {
			s.hasRanks = true
		}
	case "drop_last":
		if value != "0" && value != "1" {
			return fmt.Errorf("drop_last=%q: must be 0 or 1", value)
		}
		s.dropLast = value == "1"
	}
	return err
}

// With returns the spec with one key replaced, as a command-line flag does. Flags of the value
// that is the default anyway (epoch 0, world 1, rank 0) are accepted for orders that lack the key.
func (s Spec) With(key, value string) (Spec, error) {
	a, _ := find(s.name)
	with := s
	if err := with.set(key, value); err != nil {
		return Spec{}, fmt.Errorf("order %s: %w", s, err)
	}
	if slices.Contains(a.keys, key) {
		return with, nil
	}
	if with.hasRanks = false; slices.Contains([]string{"epoch", "world", "rank"}, key) && with == s {
		return s, nil
	}
	return Spec{}, fmt.Errorf("order %s takes no %s: leave %s=%s out, or use torch:… or uniform:…", s, key, key, value)
}

// String returns the canonical text. Parse(s.String()) is s.
func (s Spec) String() string {
	a, _ := find(s.name)
	var keys []string
	for _, key := range a.keys {
		switch {
		case key == "seed":
			keys = append(keys, fmt.Sprintf("seed=%d", s.seed))
		case key == "epoch" && s.epoch != 0:
			keys = append(keys, fmt.Sprintf("epoch=%d", s.epoch))
		case key == "world" && s.world != 0:
			keys = append(keys, fmt.Sprintf("world=%d", s.world))
		case key == "rank" && s.hasRanks:
			keys = append(keys, "rank="+s.ranks.String())
		case key == "drop_last" && s.dropLast:
			keys = append(keys, "drop_last=1")
		}
	}
	if keys == nil {
		return s.name
	}
	return s.name + ":" + strings.Join(keys, ",")
}

// Name returns what stands before the colon.
func (s Spec) Name() string { return s.name }

// Seed returns the seed, modulo 2^64.
func (s Spec) Seed() uint64 { return s.seed }

// Epoch returns the epoch with which a run starts.
func (s Spec) Epoch() int { return s.epoch }

// World returns the world size, at least 1.
func (s Spec) World() int { return max(s.world, 1) }

// Ranks returns the ranks that are served. It is 0 if none were given, which is complete only for
// World() == 1.
func (s Spec) Ranks() Ranks { return s.ranks }

// Computed reports whether the order follows from the spec. Otherwise (plan, auto, none) Order
// fails and the caller has to look elsewhere.
func (s Spec) Computed() bool { return s.Algorithm() != "" }

// Algorithm returns the versioned name of the algorithm for resume states, such as "uniform@1",
// and "" if nothing is computed. Equal names promise equal orders.
func (s Spec) Algorithm() string {
	a, _ := find(s.name)
	return a.version
}

// Check reports what Order would refuse for any dataset: ranks that do not fit the world. Call it
// once the flags have been applied.
func (s Spec) Check() error {
	switch {
	case s.world > 1 && !s.hasRanks:
		return fmt.Errorf("order %s: a world of %d needs rank=R, or rank=0-%d for all of them", s, s.world, s.world-1)
	case s.ranks.Last >= s.World():
		return fmt.Errorf("order %s: rank %d is outside a world of %d; ranks are 0 to %d: correct rank, or world=W",
			s, s.ranks.Last, s.World(), s.World()-1)
	}
	return nil
}

// Order returns what the spec's ranks read of a dataset of n samples in the given epoch, in the
// order of time: several ranks take turns, step by step. The epoch counts from 0 and does not
// start at the spec's.
//
// torch orders take 4n bytes, the others O(1). Ranks of our own orders take the positions r, r+W, …
// of the unpadded order, so that the last step may be incomplete.
//
// Errors: those of Check; ErrNotComputed; ErrEpochUnknown for torch-loader beyond epoch 0; a
// dataset too large to permute in memory (2^32-1 positions, torch only).
func (s Spec) Order(n, epoch int) (Order, error) {
	if err := s.Check(); err != nil {
		return nil, err
	}
	if n < 0 || epoch < 0 {
		return nil, fmt.Errorf("order %s: %d samples, epoch %d: neither can be negative", s, n, epoch)
	}
	if strings.HasPrefix(s.name, "torch") && n > math.MaxUint32-1-s.World() {
		return nil, fmt.Errorf("order %s: %d samples are more than a torch order can have here (2^32-1); use uniform:seed=S", s, n)
	}
	var whole Order
	switch s.name {
	case "torch":
		return Torch(n, s.seed, epoch, s.World(), s.ranks.First, s.ranks.Last, s.dropLast), nil
	case "torch-loader":
		if epoch != 0 {
			return nil, fmt.Errorf("order %s, epoch %d: %w: each epoch's sampler draws a new seed; "+
				"use DistributedSampler with torch:seed=S, or write a plan", s, epoch, ErrEpochUnknown)
		}
		return Torch(n, s.seed, 0, 1, 0, 0, false), nil
	case "uniform":
		if n > 1<<60 {
			return nil, fmt.Errorf("order %s: %d samples are more than 2^60", s, n)
		}
		whole = Uniform(n, s.seed, epoch)
	case "sequential":
		whole = Sequential(n)
	default:
		return nil, fmt.Errorf("order %q: %w", s.name, ErrNotComputed)
	}
	return Stripe(whole, s.World(), s.ranks.First, s.ranks.Last), nil
}

func parseSeed(value string) (uint64, error) {
	if v, err := strconv.ParseUint(value, 10, 64); err == nil {
		return v, nil
	}
	if v, err := strconv.ParseInt(value, 10, 64); err == nil && strings.HasPrefix(value, "-") {
		return uint64(v), nil // torch.manual_seed takes negative seeds modulo 2^64
	}
	return 0, fmt.Errorf("seed=%q: must be an integer, -2^63 to 2^64-1", value)
}

func parseCount(key, value string, least int) (int, error) {
	v, err := strconv.ParseUint(value, 10, 31)
	if err != nil || int(v) < least {
		return 0, fmt.Errorf("%s=%q: must be an integer, %d to 2^31-1", key, value, least)
	}
	return int(v), nil
}

func parseRanks(value string) (Ranks, error) {
	a, b, isRange := strings.Cut(value, "-")
	if !isRange {
		b = a
	}
	first, err1 := strconv.ParseUint(a, 10, 31)
	last, err2 := strconv.ParseUint(b, 10, 31)
	if err1 != nil || err2 != nil || first > last {
		return Ranks{}, fmt.Errorf("rank=%q: must be a rank such as 3, or a range such as 0-7", value)
	}
	return Ranks{int(first), int(last)}, nil
}

// suggest names the candidate nearest to word, and all of them.
func suggest(word string, candidates []string) string {
	best := slices.MinFunc(candidates, func(a, b string) int {
		return levenshtein.Distance(word, a) - levenshtein.Distance(word, b)
	})
	return fmt.Sprintf("did you mean %q? (there are %s)", best, strings.Join(candidates, ", "))
}
