package order

import (
	"fmt"
	"strings"
)

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

// Ranked reports whether the ranks' shares are part of the order's algorithm: torch's padding depends on the world size.
func (s Spec) Ranked() bool { return s.name == "torch" }

// ParseVersioned reads a text of Versioned. It refuses another version of the algorithm, whose order would differ.
func ParseVersioned(text string) (Spec, error) {
	versioned, keys, hasKeys := strings.Cut(text, ":")
	name, _, _ := strings.Cut(versioned, "@")
	if hasKeys {
		keys = ":" + keys
	}
	s, err := Parse(name + keys)
	if err != nil {
		return Spec{}, err
	}
	if s.Algorithm() != versioned || versioned == "" {
		return Spec{}, fmt.Errorf("order %q: this program has %s, which is another order: resume with the Shoal that the state was taken with, or start the epoch again without a state", text, s.Algorithm())
	}
	return s, nil
}
