// Package infer finds the order of an unmodified trainer from the files that it opens.
//
// PyTorch shuffles with a Mersenne Twister of which only 32 bits of seed matter. So there are at most 2^32 shuffles
// of a dataset, and a dozen opens tell one of them from all others. A [Detector] receives the opens. When it has
// enough for an attempt it returns a [Search]. The caller runs its steps, in parallel and whenever there is time, and
// passes their findings back to the Detector, which from then on checks every open against them.
//
//	opens ──► Detector ──► Search ──► steps ──► Finding ──► Detector.Lock ──► order
//	             ▲   what does not fit a finding is evidence for the next   │
//	             └──────────────────────────────────────────────────────────┘
//
// The package is pure: no clock, no I/O, no goroutines.
//
// # Traps
//
//   - A sample here is a number in the mount's own order. A trainer may have numbered a part of it
//     from 0 (ImageFolder(mount/train)): see [Subset].
//   - A process is known by a number, or not at all: 0. Numbers are of threads; DataLoader's workers
//     have one that reads.
//   - Evidence is counted in bits, over what an unrelated shuffle would give: see [Finding].
package infer

import (
	"fmt"

	"github.com/shoalfs/shoal/prefetch/order"
)

// Open is one file that was opened.
type Open struct {
	Process uint32 // who opened it; 0: not known
	Sample  uint32
}

// Subset is a range of samples that a trainer may have numbered from 0: all, or those below a folder.
type Subset struct {
	Folder     string // relative to the mount; "" for all samples
	First, Len int
}

// maxSubset is the largest number of samples for which shuffles are known: above that torch draws differently
// (order.Generator.RandPerm).
const maxSubset = 1<<32/20 - 1

func (s Subset) holds(sample uint32) bool {
	return int(sample) >= s.First && int(sample) < s.First+s.Len
}

// Shuffle names a permutation: the result of torch.randperm with a generator that was seeded with Seed and has drawn
// Skip 32-bit words since.
type Shuffle struct {
	Seed uint32
	Skip int
}

// Kind says where a shuffle's generator got its seed.
type Kind uint8

const (
	// Drawn: a DataLoader without a generator draws a seed for each epoch from an unknown generator.
	Drawn Kind = iota
	// Successive: seed + epoch, as in DistributedSampler.
	Successive
	// Default: drawn from the default generator after torch.manual_seed, Step words after the previous epoch.
	Default
	// Private: permuted by the loader's own generator, which continues from epoch to epoch.
	Private
)

// Source is the origin of shuffles.
type Source struct {
	Kind Kind
	Seed uint32 // of epoch 0 for Drawn and Successive; else what the generator was seeded with
	Word int    // Default: the word of its stream that seeds epoch 0. Private: words drawn before epoch 0
	Step int    // words from one epoch to the next
}

// Shuffle returns the permutation of an epoch, counted from the one that was found. ok is false if it cannot be known
// in advance.
func (s Source) Shuffle(epoch int) (sh Shuffle, ok bool) {
	switch s.Kind {
	case Successive:
		return Shuffle{Seed: s.Seed + uint32(epoch)}, true
	case Default:
		g := order.NewGenerator(uint64(s.Seed))
		g.Skip(s.Word + epoch*s.Step)
		return Shuffle{Seed: g.Random()}, true
	case Private:
		return Shuffle{s.Seed, s.Word + epoch*s.Step}, true
	}
	return Shuffle{Seed: s.Seed}, epoch == 0
}

// from returns the source as counted from the given epoch.
func (s Source) from(epoch int) Source {
	switch s.Kind {
	case Successive:
		s.Seed += uint32(epoch)
	case Default, Private:
		s.Word += epoch * s.Step
	}
	return s
}

func (s Source) String() string {
	switch s.Kind {
	case Successive:
		return fmt.Sprintf("seed %d, and one more each epoch", s.Seed)
	case Default:
		return fmt.Sprintf("drawn after torch.manual_seed(%d), word %d, then every %d words", s.Seed, s.Word, s.Step)
	case Private:
		return fmt.Sprintf("a generator seeded %d, after %d words, then every %d words", s.Seed, s.Word, s.Step)
	}
	return fmt.Sprintf("seed %d, drawn for this epoch", s.Seed)
}

// Finding is an order for which the opens are evidence.
type Finding struct {
	Subset Subset
	Source Source

	// The ranks whose opens were seen: First to Last of a world of World. A mount that serves all ranks has World 1.
	World       int
	First, Last int

	// Bits is the evidence: the logarithm to base 2 of how much more probable a reader of this shuffle makes the opens
	// than chance. For any trace, an unrelated shuffle reaches b bits with a probability of at most 2^-b.
	Bits  float64
	Reads int // opens, from the epoch's beginning, until the evidence was enough

	Opened Open // the first of the opens by which the Detector has it in force

	Together bool // all processes are one reader
}

// Order returns the order of an epoch, counted from the one that was found, over the samples' numbers in the mount;
// nil if unknown. It takes 4 bytes a sample.
func (f Finding) Order(epoch int) order.Order {
	sh, ok := f.Source.Shuffle(epoch)
	if !ok {
		return nil
	}
	var o order.Order
	if sh.Skip == 0 {
		o = order.Torch(f.Subset.Len, uint64(sh.Seed), 0, f.World, f.First, f.Last, false)
	} else {
		g := order.NewGenerator(uint64(sh.Seed))
		g.Skip(sh.Skip)
		o = order.Stripe(order.List(g.RandPerm(f.Subset.Len)), f.World, f.First, f.Last)
	}
	return offset{o, f.Subset.First}
}

// Spec returns the order spec of the epoch that was found; "auto" if it has none.
func (f Finding) Spec() string {
	sh, _ := f.Source.Shuffle(0)
	name := "torch"
	switch {
	case sh.Skip != 0 || f.Subset.Folder != "":
		return "auto"
	case f.Source.Kind == Drawn || f.Source.Kind == Default:
		name = "torch-loader"
	}
	if f.World == 1 {
		return fmt.Sprintf("%s:seed=%d", name, sh.Seed)
	}
	return fmt.Sprintf("torch:seed=%d,world=%d,rank=%s", sh.Seed, f.World, order.Ranks{First: f.First, Last: f.Last})
}

// offset is an order over samples that are numbered from first on.
type offset struct {
	order.Order
	first int
}

func (o offset) At(pos int) int { return o.Order.At(pos) + o.first }

// setBits is a set of small numbers.
type setBits []uint64

func newSet(n int) setBits       { return make(setBits, (n+63)/64) }
func (s setBits) has(i int) bool { return s[i/64]>>(i%64)&1 != 0 }
func (s setBits) add(i int)      { s[i/64] |= 1 << (i % 64) }
