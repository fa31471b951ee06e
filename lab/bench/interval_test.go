package main

import (
	"math"
	"math/rand/v2"
	"strings"
	"testing"
)

func TestInterval(t *testing.T) {
	for n, rank := range map[int]int{5: 0, 6: 1, 15: 4, 20: 6, 25: 8} { // tables of the binomial distribution
		v := make([]float64, n)
		for i, j := range rand.New(rand.NewPCG(1, 2)).Perm(n) {
			v[i] = float64(j + 1)
		}
		lo, hi := interval(v)
		if rank == 0 {
			if !math.IsInf(lo, -1) || !math.IsInf(hi, 1) {
				t.Errorf("%d values: %v to %v", n, lo, hi)
			}
			continue
		}
		if lo != float64(rank) || hi != float64(n+1-rank) {
			t.Errorf("%d values: ranks %v and %v, want %d and %d", n, lo, hi, rank, n+1-rank)
		}
	}
}

func TestWrongUse(t *testing.T) {
	for _, args := range [][]string{{}, {"-old", "x", "-pairs", "0"}, {"pairs", "-old", "x"}, {"-old", "x", "more"}} {
		if err := pairs(args); err == nil || !strings.Contains(err.Error(), "-pairs is at least 1") {
			t.Errorf("%q: %v", args, err)
		}
	}
}
