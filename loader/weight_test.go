package loader

import (
	"testing"

	"github.com/shoalfs/shoal/loader/feedpb"
)

func TestWeightOfOpen(t *testing.T) {
	for weight, want := range map[uint32]int{0: 1, 1: 1, 1000: 1000, 1001: -1, 1 << 31: -1} {
		s, _, err := parse(t.Context(), &feedpb.Open{Batch: 1, Weight: weight}, nil, nil)
		if want < 0 != (err != nil) || err == nil && s.weight != want {
			t.Errorf("weight %d: %v, %v", weight, s, err)
		}
	}
}
