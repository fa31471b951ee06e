package order

import (
	"errors"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/shoalfs/shoal/internal/levenshtein"
)

// Errors that Spec.Order, Spec.Over and Parse wrap.
var (
	// ErrNotComputed: the spec names no algorithm (plan, auto, none).
	ErrNotComputed = errors.New("not a computed order: give one that is, such as uniform:seed=0")
	// ErrEpochUnknown: the order of this epoch cannot be known in advance (torch-loader).
	ErrEpochUnknown = errors.New("the order of this epoch is not known in advance")
	// ErrNeedsShards: the order is over shards, and the caller has none (Spec.NeedsGroups).
	ErrNeedsShards = errors.New("needs a shard set")
	// ErrNeedsFacts: the order needs sizes, classes or a list, and the caller has none.
	ErrNeedsFacts = errors.New("needs to know more of the dataset")
)

// Spec is a parsed order spec, a comparable value: a name with keys (docs/orders.md), such as
// torch:seed=1,epoch=3,world=8,rank=0-7. plan, auto and none name no algorithm: see Computed. The zero value is not a
// spec: use Parse.
//
// rank is R or A-B (inclusive), for a mount that serves several ranks; with world above 1 it is required. epoch is
// where a run starts. A seed is any integer that torch.manual_seed accepts, -2^63 to 2^64-1; that of torch-loader means
// what from says: see Loader.
type Spec struct {
	name     string
	seed     uint64
	epoch    int
	window   int // shards
	world    int // 0: not given, or 1
	ranks    Ranks
	hasRanks bool
	dropLast bool

	from        LoaderSource // of torch-loader
	persistent  bool
	workers     bool
	replacement bool
	samples     int // positions of an epoch; 0: as many as there are samples

	weights string // of mixture, canonical
	batch   int    // global batch of buckets
	count   int    // number of buckets; 0: the default
	path    string // of list
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

// algorithm describes the name before the colon.
type algorithm struct {
	name, version string   // version is empty if nothing is computed
	keys          []string // in canonical order
	needs         []string // those of them that have to be given
	first         string   // the key that the first word may be the value of
}

var algorithms = []algorithm{
	{name: "torch", version: "torch@1", keys: []string{"seed", "epoch", "world", "rank", "drop_last"},
		needs: []string{"seed"}},
	{name: "torch-loader", version: "torch-loader@1", keys: []string{"seed", "from", "persistent", "workers", "samples",
		"replacement", "epoch"}, needs: []string{"seed"}},
	{name: "uniform", version: "uniform@1", keys: []string{"seed", "epoch", "world", "rank"}, needs: []string{"seed"}},
	{name: "windowed", version: "windowed@1", keys: []string{"seed", "window", "epoch", "world", "rank"},
		needs: []string{"seed", "window"}},
	{name: "mixture", version: "mixture@2", keys: []string{"seed", "weights", "samples", "epoch", "world", "rank"},
		needs: []string{"seed", "weights"}},
	{name: "buckets", version: "buckets@2", keys: []string{"seed", "batch", "count", "epoch", "world", "rank"},
		needs: []string{"seed", "batch"}},
	{name: "sequential", version: "sequential@1", keys: []string{"epoch", "world", "rank"}},
	{name: "list", version: "list@1", keys: []string{"path", "epoch", "world", "rank"}, needs: []string{"path"},
		first: "path"},
	{name: "plan"},
	{name: "auto"},
	{name: "none"},
}

func find(name string) (algorithm, bool) {
	i := slices.IndexFunc(algorithms, func(a algorithm) bool { return a.name == name })
	if i < 0 {
		return algorithm{}, false
	}
	return algorithms[i], true
}

// Parse reads an order spec. Its errors name the wrong word, its column (in characters from 1) and the correct form.
func Parse(text string) (Spec, error) {
	fail := func(at int, format string, args ...any) (Spec, error) {
		column := utf8.RuneCountInString(text[:at]) + 1
		return Spec{}, fmt.Errorf("order spec %q, column %d: %w", text, column, fmt.Errorf(format, args...))
	}
	name, rest, hasKeys := strings.Cut(text, ":")
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
			valueAt := at + len(key) + 1
			if a.first != "" && len(seen) == 0 && !slices.Contains(a.keys, key) {
				key, value, ok, valueAt = a.first, word, true, at
			}
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
				return fail(valueAt, "%w", err)
			}
			seen = append(seen, key)
			at += len(word) + 1
		}
	}
	for _, key := range a.needs {
		if !slices.Contains(seen, key) {
			return fail(len(text), "order %s needs a %s; write %s:%s=…", name, key, name, strings.Join(a.needs, "=…,"))
		}
	}
	return s, nil
}

// field returns a pointer to what a key sets.
func (s *Spec) field(key string) any {
	return map[string]any{
		"seed": &s.seed, "epoch": &s.epoch, "window": &s.window, "world": &s.world, "rank": &s.ranks,
		"drop_last": &s.dropLast,
		"from":      &s.from, "persistent": &s.persistent, "workers": &s.workers, "replacement": &s.replacement,
		"samples": &s.samples,
		"weights": &s.weights, "batch": &s.batch, "count": &s.count, "path": &s.path,
	}[key]
}

// set assigns the value of one key. check tests whether values fit together, since flags may still change them.
func (s *Spec) set(key, value string) (err error) {
	switch f := s.field(key).(type) {
	case *uint64:
		*f, err = parseSeed(value)
	case *int:
		least := 1
		if key == "epoch" {
			least = 0
		}
		if *f, err = parseCount(key, value, least); key == "world" && *f == 1 {
			*f = 0
		}
	case *Ranks:
		*f, err = parseRanks(value)
		s.hasRanks = s.hasRanks || err == nil
	case *bool:
		if *f = value == "1"; !*f && value != "0" {
			err = fmt.Errorf("%s=%q: must be 0 or 1", key, value)
		}
	case *LoaderSource:
		*f, err = parseLoaderSource(value)
	case *string:
		var w weights
		*f = value
		if key == "weights" {
			w, err = parseWeights(value)
			*f = w.String()
		} else if value == "" {
			err = errors.New("no path; write list:PATH, a file of sample numbers or paths, one a line")
		}
	}
	return err
}

// With returns the spec with one key replaced, as by a command-line flag. Default values (epoch 0, world 1, rank 0)
// are accepted for orders without the key.
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
	var words []string
	for _, key := range a.keys {
		v := reflect.ValueOf(s.field(key)).Elem()
		switch {
		case v.Kind() == reflect.Bool && v.Bool():
			words = append(words, key+"=1")
		case key == "seed", key == "rank" && s.hasRanks, key != "rank" && !v.IsZero():
			words = append(words, fmt.Sprintf("%s=%v", key, v))
		}
	}
	if words == nil {
		return s.name
	}
	return s.name + ":" + strings.Join(words, ",")
}

// Name returns the name before the colon.
func (s Spec) Name() string { return s.name }

// Epoch returns the epoch with which a run starts.
func (s Spec) Epoch() int { return s.epoch }

// NeedsGroups reports whether the order is over shards: then Order fails, and Over needs the shards.
func (s Spec) NeedsGroups() bool { return s.name == "windowed" }

// Batch returns the global batch that an order of length buckets is cut into, 0 for other orders.
func (s Spec) Batch() int { return s.batch }

// Path returns the file that a list is read from, "" for other orders.
func (s Spec) Path() string { return s.path }

// World returns the world size, at least 1.
func (s Spec) World() int { return max(s.world, 1) }

// Ranks returns the served ranks. It is 0 by default, which is complete only for World() == 1.
func (s Spec) Ranks() Ranks { return s.ranks }

// Computed reports whether the spec determines the order. Otherwise (plan, auto, none) Order fails.
func (s Spec) Computed() bool { return s.Algorithm() != "" }

// Algorithm returns the versioned name of the algorithm for resume states, such as "uniform@1",
// and "" if nothing is computed. Equal names promise equal orders.
func (s Spec) Algorithm() string {
	a, _ := find(s.name)
	return a.version
}

// Versioned returns the canonical text of everything that determines the order of all epochs, with the algorithm's
// versioned name, such as "uniform@1:seed=5": without the first epoch and without ranks; the world size is included
// only for torch, whose order depends on it. Resume states contain it: equal texts promise equal orders. It is "" for
// orders that are not computed.
func (s Spec) Versioned() string {
	if !s.Computed() {
		return ""
	}
	s.epoch, s.hasRanks, s.ranks = 0, false, Ranks{}
	if !s.Ranked() {
		s.world = 0
	}
	return s.Algorithm() + strings.TrimPrefix(s.String(), s.name)
}

// Ranked reports whether the ranks' shares are part of the order's algorithm: torch's padding depends on the world
// size.
func (s Spec) Ranked() bool { return s.name == "torch" }

// Unversioned returns the spec of a text of Versioned, NAME@VERSION:KEYS.
func Unversioned(text string) string {
	versioned, keys, keyed := strings.Cut(text, ":")
	name, _, _ := strings.Cut(versioned, "@")
	if keyed {
		name += ":" + keys
	}
	return name
}

// ParseVersioned reads a text of Versioned. It refuses another version of the algorithm, whose order would differ.
func ParseVersioned(text string) (Spec, error) {
	versioned, _, _ := strings.Cut(text, ":")
	s, err := Parse(Unversioned(text))
	if err != nil {
		return Spec{}, err
	}
	if s.Algorithm() != versioned || versioned == "" {
		return Spec{}, fmt.Errorf(
			"order %q: this program has %s, which is another order: resume with the Shoal that the state was taken "+
				"with, or start the epoch again without a state", text, s.Algorithm())
	}
	return s, nil
}

// Check reports errors that do not depend on the dataset: keys that do not fit together. Call it after the flags were
// applied.
func (s Spec) Check() error {
	switch {
	case s.world > 1 && !s.hasRanks:
		return fmt.Errorf("order %s: a world of %d needs rank=R, or rank=0-%d for all of them", s, s.world, s.world-1)
	case s.ranks.Last >= s.World():
		return fmt.Errorf("order %s: rank %d is outside a world of %d; ranks are 0 to %d: correct rank, or world=W",
			s, s.ranks.Last, s.World(), s.World()-1)
	case s.batch%s.World() != 0:
		return fmt.Errorf(
			"order %s: a batch of %d cannot be shared by %d ranks: batch is the global batch, a multiple of world", s,
			s.batch, s.World())
	case s.name == "torch-loader":
		if err := s.loader().check(s.epoch); err != nil {
			return fmt.Errorf("order %s: %w", s, err)
		}
	}
	return nil
}

func (s Spec) loader() Loader {
	return Loader{Seed: s.seed, From: s.from, Persistent: s.persistent, Workers: s.workers, Samples: s.samples,
		Replacement: s.replacement}
}

// Facts are what an order may depend on besides its spec and the epoch. Only Samples is always set: a func is nil if
// its answer is unknown. They are called only for orders that need them, may take long (over all samples), and always
// return the same.
type Facts struct {
	// Samples is the number of samples.
	Samples int
	// Shards returns the samples by shard, for windowed orders.
	Shards func() Groups
	// Unpacked says why there is no Shards, and the remedy, unless the dataset is just not packed. Errors quote it.
	Unpacked string
	// Size returns the length of a sample in bytes, for length buckets.
	Size func(sample int) int64
	// Classes returns the names of the classes by label, for mixtures that name them.
	Classes func() []string
	// Label returns the class of a sample, -1 if it has none; it is set if Classes is.
	Label func(sample int) int
	// List returns the samples in the list file path; its errors name the path.
	List func(path string) ([]uint32, error)
}

// Order is Over for a dataset of which only the number of samples is known.
func (s Spec) Order(n, epoch int) (Order, error) { return s.Over(Facts{Samples: n}, epoch) }

// Over returns the order of the spec's ranks for a dataset in the given epoch, in the order of time: several ranks
// take turns, step by step. epoch counts from 0; the spec's is not added.
//
// torch orders, buckets and lists take 4 bytes a position, windowed ones 8 bytes a sample, the others a few KiB. Ranks
// of our own orders read the positions r, r+W, … of the unpadded order, so that the last step may be incomplete.
//
// Errors: those of Check, and those above; a dataset too large to permute in memory (2^32-1 positions; uniform and
// sequential orders have no such limit); what Facts.List returns.
func (s Spec) Over(f Facts, epoch int) (Order, error) {
	if err := s.Check(); err != nil {
		return nil, err
	}
	n := f.Samples
	if n < 0 || epoch < 0 {
		return nil, fmt.Errorf("order %s: %d samples, epoch %d: neither can be negative", s, n, epoch)
	}
	if strings.HasPrefix(s.name, "torch") && max(n, s.samples) > math.MaxUint32-1-s.World() {
		return nil, fmt.Errorf(
			"order %s: %d samples are more than a torch order can have here (2^32-1); use uniform:seed=S", s, n)
	}
	if s.name == "torch" {
		return Torch(n, s.seed, epoch, s.World(), s.ranks.First, s.ranks.Last, s.dropLast), nil
	}
	whole, err := s.whole(f, epoch)
	if err != nil {
		return nil, fmt.Errorf("order %s: %w", s, err)
	}
	return Stripe(whole, s.World(), s.ranks.First, s.ranks.Last), nil
}

// whole returns the order of all ranks together, except for torch, whose padding depends on the world size.
func (s Spec) whole(f Facts, epoch int) (Order, error) {
	n := f.Samples
	switch s.name {
	case "torch-loader":
		return s.loader().Order(n, epoch)
	case "uniform":
		if n > 1<<60 {
			return nil, fmt.Errorf("%d samples are more than 2^60", n)
		}
		return Uniform(n, s.seed, epoch), nil
	case "windowed":
		if f.Shards == nil && f.Unpacked != "" {
			return nil, fmt.Errorf("%w: %s", ErrNeedsShards, f.Unpacked)
		}
		if f.Shards == nil {
			return nil, fmt.Errorf("%w, and the source is one of single files: "+
				"pack it (shoal pack SOURCE DEST) and read the shards, or use uniform:seed=%d", ErrNeedsShards, s.seed)
		}
		return Windowed(f.Shards(), s.seed, epoch, s.window)
	case "mixture":
		return newMixture(f, s, epoch)
	case "buckets":
		if f.Size == nil {
			return nil, fmt.Errorf("%w: give the samples' lengths in bytes", ErrNeedsFacts)
		}
		return newBuckets(n, f.Size, s.seed, epoch, s.batch, s.count)
	case "sequential":
		return Sequential(n), nil
	case "list":
		if f.List == nil {
			return nil, fmt.Errorf("%w: the file cannot be read here", ErrNeedsFacts)
		}
		l, err := f.List(s.path)
		if err != nil {
			return nil, err
		}
		return List(l), nil
	}
	return nil, ErrNotComputed
}

func parseSeed(value string) (uint64, error) {
	if v, err := strconv.ParseUint(value, 10, 64); err == nil {
		return v, nil
	}
	if v, err := strconv.ParseInt(value, 10, 64); err == nil && strings.HasPrefix(value, "-") {
		return uint64(v), nil // torch.manual_seed accepts negative seeds modulo 2^64
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

// suggest names the candidate nearest to word, if it is near, and all of them.
func suggest(word string, candidates []string) string {
	all := "there are " + strings.Join(candidates, ", ")
	if near := levenshtein.Nearest(word, candidates, 2); near != "" {
		return fmt.Sprintf("did you mean %q? (%s)", near, all)
	}
	return all
}
