package main

import (
	"math"
	"slices"
)

// ratios returns now/old of each pair.
func ratios(old, now []float64) []float64 {
	r := make([]float64, len(old))
	for i := range r {
		r[i] = now[i] / old[i]
	}
	return r
}

// interval returns bounds that hold the median of what v was drawn from with a probability of at least 95%, whatever
// its distribution: the order statistics of the sign test (Conover, Practical Nonparametric Statistics, 3.2). Of fewer
// than 6 values no bounds have that probability; then they are infinite.
func interval(v []float64) (lo, hi float64) {
	s, n := slices.Sorted(slices.Values(v)), len(v)
	p := math.Pow(0.5, float64(n)) // that exactly k of n lie below the median
	tail := 0.0
	k := 0
	for ; k < n/2 && tail+p <= 0.025; k++ {
		tail += p
		p *= float64(n-k) / float64(k+1)
	}
	if k == 0 {
		return math.Inf(-1), math.Inf(1)
	}
	return s[k-1], s[n-k]
}

// median returns the median, or 0 of nothing.
func median(v []float64) float64 {
	s := slices.Sorted(slices.Values(v))
	if len(s) == 0 {
		return 0
	}
	return (s[(len(s)-1)/2] + s[len(s)/2]) / 2
}
