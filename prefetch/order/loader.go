package order

import (
	"fmt"
	"math"
	"slices"
	"strings"
)

// LoaderSource says where a DataLoader's permutations come from, and so the meaning of its seed.
type LoaderSource string

// The sources. With all but the first every epoch is known, if every epoch is read to its end.
const (
	// SamplerSeed: S is what the RandomSampler drew for its epoch. The next epoch draws another, so
	// only epoch 0 is known.
	SamplerSeed LoaderSource = ""
	// ManualSeed: S is the argument of torch.manual_seed, after which nothing but this loader draws from the default
	// generator: its base seed and a seed for the sampler each epoch, with persistent workers the base seed only once.
	ManualSeed LoaderSource = "manual_seed"
	// GivenGenerator: DataLoader(generator=g) with g.manual_seed(S). The loader draws its base seed
	// from g and the sampler permutes with g directly; at exhaustion it takes one more permutation, of
	// which it uses the first samples%n entries, often none.
	GivenGenerator LoaderSource = "generator"
	// Stateful: torchdata's StatefulDataLoader without a generator, up to torchdata 0.10: as GivenGenerator, with a
	// private generator that nothing else draws from. It is seeded with 1, so S is 1.
	Stateful LoaderSource = "stateful"
	// StatefulManualSeed: the same loader since torchdata 0.11, made directly after torch.manual_seed(S): its private
	// generator's seed is drawn from the default generator when the loader is made. An epoch takes one permutation; a
	// loader with workers begins with one more that it does not use, each epoch or, with persistent workers, once.
	StatefulManualSeed LoaderSource = "stateful_manual_seed"
)

// loaderSources are their names; the first is that of SamplerSeed.
var loaderSources = []string{"sampler", string(ManualSeed), string(GivenGenerator), string(Stateful),
	string(StatefulManualSeed)}

func parseLoaderSource(value string) (LoaderSource, error) {
	switch slices.Index(loaderSources, value) {
	case -1:
		return "", fmt.Errorf("from=%q: %s", value, suggest(value, loaderSources))
	case 0:
		return SamplerSeed, nil
	}
	return LoaderSource(value), nil
}

// Loader describes the RandomSampler of a DataLoader(shuffle=True), or of one that is made with
// sampler=RandomSampler(dataset, replacement, num_samples) and the generator that From tells of.
//
// A Loader follows torch/utils/data/dataloader.py and sampler.py (the same from 1.13 to 2.x) and
// torchdata/stateful_dataloader (0.10.1 and 0.11.0). It cannot know of epochs that a trainer ends early: then the
// exhausted sampler's last draws are missing, and from a generator come other permutations from there on.
type Loader struct {
	Seed        uint64
	From        LoaderSource
	Persistent  bool // persistent_workers=True: the base seed is drawn only once
	Workers     bool // num_workers > 0; matters to StatefulManualSeed only
	Samples     int  // num_samples; 0: the number of samples of the dataset
	Replacement bool
}

// maxDraws bounds the numbers that are drawn for the epochs before one, which takes about a minute.
const maxDraws = 1 << 36

// maxReplacement: below 2^28 samples torch.randint draws 32 bits a number, in every version.
const maxReplacement = 1 << 28

// check returns errors of Order that do not depend on the dataset.
func (l Loader) check(epoch int) error {
	stateful := strings.HasPrefix(string(l.From), string(Stateful))
	switch {
	case epoch > 0 && l.From == SamplerSeed:
		return fmt.Errorf("epoch %d: %w: each epoch's sampler draws a new seed; use from=manual_seed or "+
			"from=generator if that is where its seeds come from, DistributedSampler with torch:seed=S, or write a plan",
			epoch, ErrEpochUnknown)
	case stateful && (l.Replacement || l.Samples != 0):
		return fmt.Errorf("samples and replacement are for torch's own DataLoader; leave them out with from=%s", l.From)
	}
	return nil
}

// Order returns what the loader reads in an epoch, counted from 0, of a dataset of n samples. It takes
// 4 bytes a position (8 with replacement), and time for the draws of the epochs before: 2 ns a sample and epoch where
// they come from one generator, none where only seeds are drawn.
//
// It fails with ErrEpochUnknown where only epoch 0 is known or the draws would take too long, and on datasets that are
// too large.
func (l Loader) Order(n, epoch int) (Order, error) {
	if err := l.check(epoch); err != nil {
		return nil, err
	}
	samples := n
	if l.Samples != 0 {
		samples = l.Samples
	}
	switch {
	case n < 0 || n > math.MaxUint32-1 || samples > math.MaxUint32-1:
		return nil, fmt.Errorf("%d of %d samples: 2^32-2 are the most", samples, n)
	case n == 0:
		return List(nil), nil // torch refuses to make such a sampler
	case l.Replacement && n >= maxReplacement:
		return nil, fmt.Errorf("%d samples, drawn with replacement: versions of torch differ from 2^28 on", n)
	}
	p := pass{n: n, samples: samples, replacement: l.Replacement}
	if l.From != ManualSeed && epoch > maxDraws/(p.words()+2) {
		return nil, fmt.Errorf(
			"epoch %d of %d samples: %w: the draws of all epochs before it would take too long; use "+
				"DistributedSampler with torch:seed=S, or write a plan", epoch, samples, ErrEpochUnknown)
	}
	switch l.From {
	case SamplerSeed:
		return p.draw(NewGenerator(l.Seed)), nil
	case StatefulManualSeed:
		g := NewGenerator(NewGenerator(l.Seed).Int63())
		unused := 0
		switch {
		case l.Workers && l.Persistent:
			unused = 1
		case l.Workers:
			unused = epoch + 1
		}
		for range epoch + unused {
			g.Skip(permWords(n))
		}
		return p.draw(g), nil
	}
	g := NewGenerator(l.Seed)
	for e := 0; ; e++ {
		if l.From != Stateful && (e == 0 || !l.Persistent) {
			g.Int63() // the base seed, from which worker seeds derive
		}
		switch {
		case l.From == ManualSeed && e == epoch:
			return p.draw(NewGenerator(g.Int63())), nil
		case l.From == ManualSeed:
			g.Int63()
		case e == epoch:
			return p.draw(g), nil
		default:
			g.Skip(p.words())
		}
	}
}

// pass is one iteration of torch's RandomSampler.
type pass struct {
	n, samples  int
	replacement bool
}

// words is the number of words that a pass takes from its generator when it is exhausted.
func (p pass) words() int {
	if p.replacement {
		return p.samples
	}
	return (p.samples/p.n + 1) * permWords(p.n)
}

func (p pass) draw(g *Generator) Order {
	if !p.replacement && p.samples == p.n {
		return List(g.RandPerm(p.n))
	}
	all := make([]uint32, 0, p.samples)
	if p.replacement {
		r := replaced{before: make([]uint32, 0, p.samples)}
		times := make([]uint32, p.n)
		for range p.samples {
			sample := g.Random() % uint32(p.n)
			all = append(all, sample)
			r.before = append(r.before, times[sample])
			times[sample]++
		}
		r.list = all
		return r
	}
	for len(all) < p.samples {
		perm := g.RandPerm(p.n)
		all = append(all, perm[:min(p.n, p.samples-len(all))]...)
	}
	return List(all)
}

// replaced is drawn with replacement.
type replaced struct {
	list
	before []uint32 // by position: how often its sample came before
}

func (r replaced) Occurrence(pos int) int { return int(r.before[pos]) }

// permWords is the number of words that RandPerm(n) draws.
func permWords(n int) int {
	if n >= randPermWide {
		return 2 * n
	}
	return max(0, n-1)
}
