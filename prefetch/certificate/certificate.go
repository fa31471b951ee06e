// Package certificate measures how far an order's batches are from batches drawn at random. It sees only the
// sequence, so that a fault in a generator cannot hide in it: it shares no code and no assumption with the packages
// that make orders.
//
// It is pure: it depends only on the sequence, and on the samples' shards and classes.
package certificate

import (
	"errors"
	"fmt"
	"math"

	"github.com/shoalfs/shoal/prefetch/order"
)

// Subject is the input of a measurement.
type Subject struct {
	Order order.Order // one epoch, of all ranks together
	Batch int         // global batch, in positions
	// Samples is the number of samples of the dataset.
	Samples int
	// Shard returns the number of the shard that holds a sample, from 0; nil without shards.
	Shard func(sample int) int
	// Label returns the class of a sample, -1 for none; nil without classes.
	Label func(sample int) int
	// World is the number of ranks, of which rank r reads the positions r, r+World, …; 0 is 1.
	World int
	// Progress is called now and then with the number of positions seen; it may be nil.
	Progress func(positions int)
}

// Certificate is the measurement of one epoch of an order.
type Certificate struct {
	Positions int `json:"positions"` // of the epoch
	Samples   int `json:"samples"`   // of the dataset
	Missing   int `json:"missing"`   // samples that do not occur
	Repeated  int `json:"repeated"`  // positions that hold a sample for the second time or more
	Batch     int `json:"batch"`
	Batches   int `json:"batches"` // whole ones; the rest is not measured

	Shards *Shards `json:"shards,omitempty"`
	Labels *Labels `json:"labels,omitempty"`
	Ranks  []Rank  `json:"ranks,omitempty"` // if there are several, and classes
}

// Rank describes the samples of one rank in the epoch.
type Rank struct {
	Rank      int     `json:"rank"`
	Positions int     `json:"positions"`
	Classes   int     `json:"classes"`                // that the rank sees
	Variation float64 `json:"total_variation"`        // between the labels of the rank's epoch and those of all ranks'
	Random    float64 `json:"random_total_variation"` // expectation of Variation for positions that are drawn at random
}

// Shards describes the distribution of the batches over the shards.
type Shards struct {
	Shards  int     `json:"shards"`                // that hold samples of the order
	Mean    float64 `json:"mean_shard"`            // positions in one, on average
	Pairs   float64 `json:"pairs"`                 // unordered pairs of positions of a batch in the same shard, mean
	Random  float64 `json:"random_pairs"`          // what a uniform shuffle of the same positions has on average
	Design  float64 `json:"design_effect"`         // D of docs/orders.md, against random batches without replacement
	Open    int     `json:"most_open"`             // most shards begun and not finished: at hand to read each once
	Formula float64 `json:"formula_design_effect"` // what Formula expects of Open shards open, all of the mean size
}

// Labels describes how far the classes in a batch are from those in the dataset.
type Labels struct {
	Classes int `json:"classes"` // that occur in the order; having no label counts as one
	// Variation is the total variation distance between the labels of a batch and those of the epoch, half the sum of
	// the differences of the shares: 0 if they are the same, near 1 if a batch has one class out of many. Mean.
	Variation float64 `json:"total_variation"`
	Worst     float64 `json:"worst_total_variation"`  // of all batches
	Random    float64 `json:"random_total_variation"` // expectation of Variation for batches drawn at random
}

// Of measures an order. Its time is proportional to the order's length; its memory is a bit per sample and some words
// per shard and class.
func Of(s Subject) (Certificate, error) {
	n := s.Order.Len()
	switch {
	case s.Batch < 1:
		return Certificate{}, fmt.Errorf("certificate: a batch of %d; it needs at least 1", s.Batch)
	case n < s.Batch:
		return Certificate{}, fmt.Errorf(
			"certificate: an epoch of %d positions has no whole batch of %d: give a smaller batch", n, s.Batch)
	}
	c := Certificate{Positions: n, Samples: s.Samples, Batch: s.Batch, Batches: n / s.Batch}
	var shards, labels tally
	seen := make([]uint64, (s.Samples+63)/64)
	distinct := 0
	for pos := range n {
		sample := s.Order.At(pos)
		if sample < 0 || sample >= s.Samples {
			return Certificate{}, fmt.Errorf("certificate: position %d holds sample %d of %d", pos, sample, s.Samples)
		}
		if bit := uint64(1) << (sample % 64); seen[sample/64]&bit == 0 {
			seen[sample/64] |= bit
			distinct++
		}
		if s.Shard != nil {
			if err := shards.add(s.Shard(sample)); err != nil {
				return Certificate{}, fmt.Errorf("certificate: shard of sample %d: %w", sample, err)
			}
		}
		if s.Label != nil {
			if err := labels.add(s.Label(sample) + 1); err != nil {
				return Certificate{}, fmt.Errorf("certificate: label of sample %d: %w", sample, err)
			}
		}
		if s.Progress != nil && pos%(1<<16) == 0 {
			s.Progress(pos)
		}
	}
	c.Missing, c.Repeated = s.Samples-distinct, n-distinct
	if s.Shard != nil {
		c.Shards = measureShards(s, shards)
	}
	if s.Label != nil {
		c.Labels = measureLabels(s, labels)
		if s.World > 1 {
			c.Ranks = measureRanks(s, labels)
		}
	}
	return c, nil
}

// tally counts occurrences of small numbers.
type tally struct {
	count    []int
	distinct int
}

// most bounds the numbers of shards and classes, and so the memory of a tally.
const most = 1 << 30

func (t *tally) add(x int) error {
	if x < 0 || x > most {
		return errors.New("out of range")
	}
	for x >= len(t.count) {
		t.count = append(t.count, make([]int, max(x+1-len(t.count), len(t.count)))...)
	}
	if t.count[x]++; t.count[x] == 1 {
		t.distinct++
	}
	return nil
}

func pairs(n float64) float64 { return n * (n - 1) / 2 }

// measureShards goes over the order again, with the shares of the shards known.
//
// The design effect from pairs. Let values be independent between shards, with mean 0 and variance 1,
// and p the shares of the shards of the whole epoch, c those of a batch in positions. Then the variance
// of the batch's mean about the epoch's is Σ(c/B - p)² = (B + 2P)/B² - 2Σcp/B + Σp², P being the
// batch's same-shard pairs. The batches between them hold the epoch, so the middle term is 2Σp² on
// average: 1/B + 2P/B² - Σp². D is this over the same with the random pairs.
func measureShards(s Subject, all tally) *Shards {
	n, batch := float64(s.Order.Len()), float64(s.Batch)
	out := &Shards{Shards: all.distinct, Mean: n / float64(all.distinct)}
	var squares, together float64
	for _, c := range all.count {
		squares += float64(c) / n * float64(c) / n
		together += pairs(float64(c))
	}
	if n > 1 {
		out.Random = pairs(batch) * together / pairs(n)
	}
	in := make([]int, len(all.count))     // of the batch
	left := append([]int{}, all.count...) // still to come
	open, total := 0, 0.0
	end := s.Order.Len() / s.Batch * s.Batch
	for pos := range s.Order.Len() {
		g := s.Shard(s.Order.At(pos))
		if left[g] == all.count[g] {
			open++
			out.Open = max(out.Open, open)
		}
		if left[g]--; left[g] == 0 {
			open--
		}
		if pos < end {
			total += float64(in[g]) // one pair with each of the shard that came before in the batch
			in[g]++
			if (pos+1)%s.Batch == 0 {
				for p := pos + 1 - s.Batch; p <= pos; p++ {
					in[s.Shard(s.Order.At(p))] = 0
				}
			}
		}
	}
	out.Pairs = total / float64(end/s.Batch)
	spread := func(pairs float64) float64 { return 1/batch + 2*pairs/(batch*batch) - squares }
	if random := spread(out.Random); random > 1e-12 {
		out.Design = spread(out.Pairs) / random
	} else {
		out.Design = 1 // one shard, or a batch that is the epoch: nothing varies
	}
	out.Formula = Formula(s.Batch, out.Mean, out.Open, out.Shards)
	return out
}

// Formula returns the design effect that is expected of batches of an order that has open of so many shards open,
// each of size samples: 1 + (B-1)(S-1)/(WS-1)·(1-W/shards).
func Formula(batch int, size float64, open, shards int) float64 {
	w := float64(open)
	if w*size <= 1 || shards == 0 {
		return 1
	}
	return 1 + float64(batch-1)*(size-1)/(w*size-1)*(1-w/float64(shards))
}

func measureLabels(s Subject, all tally) *Labels {
	n, batch := s.Order.Len(), s.Batch
	out := &Labels{Classes: all.distinct}
	out.Random = randomVariation(all, n, batch)
	in := make([]int, len(all.count))
	total := 0.0
	whole := n / batch
	for k := range whole {
		for p := k * batch; p < (k+1)*batch; p++ {
			in[s.Label(s.Order.At(p))+1]++
		}
		// Both shares add up to 1, so the distance is also what the batch has too much of: only the
		// classes in it need a look.
		excess := 0.0
		for p := k * batch; p < (k+1)*batch; p++ {
			label := s.Label(s.Order.At(p)) + 1
			if in[label] > 0 {
				excess += max(0, float64(in[label])/float64(batch)-float64(all.count[label])/float64(n))
				in[label] = 0
			}
		}
		total += excess
		out.Worst = max(out.Worst, excess)
	}
	out.Variation = total / float64(whole)
	return out
}

func measureRanks(s Subject, all tally) []Rank {
	n := s.Order.Len()
	ranks := make([]Rank, s.World)
	in := make([]int, len(all.count))
	for r := range ranks {
		rank := Rank{Rank: r}
		for p := r; p < n; p += s.World {
			in[s.Label(s.Order.At(p))+1]++
			rank.Positions++
		}
		for label, k := range in {
			if k > 0 {
				rank.Classes++
				rank.Variation += max(0, float64(k)/float64(rank.Positions)-float64(all.count[label])/float64(n))
			}
		}
		if clear(in); rank.Positions > 0 {
			rank.Random = randomVariation(all, n, rank.Positions)
		}
		ranks[r] = rank
	}
	return ranks
}

// randomVariation returns the expected distance between the labels of so many of n positions, drawn at random, and
// those of all.
func randomVariation(all tally, n, draws int) (v float64) {
	for _, c := range all.count {
		v += absoluteDeviation(n, c, draws) / float64(2*draws)
	}
	return v
}

// absoluteDeviation returns E|X - E(X)| for X, the number of marked ones among draws out of n without
// replacement of which so many are marked (a hypergeometric variable). De Moivre's closed form, 2m(N-K-d+m)/N·P(X=m)
// with m = ⌊dK/N⌋+1: P. Diaconis and S. Zabell, "Closed Form Summation for Classical Distributions",
// Statistical Science 6(3), 1991.
func absoluteDeviation(n, marked, draws int) float64 {
	m := int(math.Floor(float64(draws)/float64(n)*float64(marked)+1e-9)) + 1
	if m > marked || m > draws {
		return 0
	}
	logP := choose(marked, m) + choose(n-marked, draws-m) - choose(n, draws)
	return 2 * float64(m) * float64(n-marked-draws+m) / float64(n) * math.Exp(logP)
}

// choose returns the logarithm of the binomial coefficient, -Inf where it is 0.
func choose(n, k int) float64 {
	if k < 0 || k > n {
		return math.Inf(-1)
	}
	a, _ := math.Lgamma(float64(n + 1))
	b, _ := math.Lgamma(float64(k + 1))
	c, _ := math.Lgamma(float64(n - k + 1))
	return a - b - c
}
