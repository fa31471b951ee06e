package main

import (
	"sync"
	"testing"

	"github.com/shoalfs/shoal/loader"
)

// The latest packings are kept, and each is made once.
func TestPackingsAreKept(t *testing.T) {
	var c packingCache
	made := map[string]int{}
	for _, spec := range []string{"a", "b", "a", "c", "d", "e", "a", "b"} {
		_, err := c.entry(keptPacking{key: spec, packed: sync.OnceValues(func() (*loader.Packed, error) {
			made[spec]++
			return nil, nil //nolint:nilnil // it is not looked at
		})})()
		if err != nil {
			t.Fatal(err)
		}
	}
	if made["a"] != 1 || made["b"] != 2 || len(c.list) != keptPackings {
		t.Errorf("%v, %d are kept", made, len(c.list))
	}
}
