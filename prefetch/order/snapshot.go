package order

import (
	"encoding/json"
	"fmt"
	"strings"
)

// Snapshot is where a run stands in an order: a small value, the same for all ranks, taken between two
// global batches. Together with the dataset that it names it determines what all ranks have still to
// read. For an order over shards Dataset has to name the packing too, since the same samples packed otherwise
// are another order.
type Snapshot struct {
	V       int    `json:"v"`       // format, 1
	Dataset string `json:"dataset"` // version of the dataset
	Order   string `json:"order"`   // Spec.Versioned, such as uniform@1:seed=5
	World   int    `json:"world"`   // ranks that shared the batches
	Epoch   int    `json:"epoch"`   // from 0
	Cursor  int    `json:"cursor"`  // positions of the epoch that all ranks together have read
}

// snapshotVersion is the version of Snapshot's format.
const snapshotVersion = 1

// Snapshot returns where a run of spec stands that has read cursor positions of an epoch.
func (s Spec) Snapshot(dataset string, epoch, cursor int) Snapshot {
	return Snapshot{snapshotVersion, dataset, s.Versioned(), s.World(), epoch, cursor}
}

// JSON returns the snapshot as text.
func (s Snapshot) JSON() string {
	b, err := json.Marshal(s)
	if err != nil {
		panic(err) // strings and integers only
	}
	return string(b)
}

// ParseSnapshot reads what JSON wrote and checks what can be checked without a dataset.
func ParseSnapshot(text string) (Snapshot, error) {
	var s Snapshot
	if err := json.Unmarshal([]byte(text), &s); err != nil {
		return Snapshot{}, fmt.Errorf("snapshot: not valid JSON: %w", err)
	}
	switch {
	case s.V != snapshotVersion:
		return Snapshot{}, fmt.Errorf("snapshot: format version %d, this program reads version %d", s.V, snapshotVersion)
	case s.Epoch < 0 || s.Cursor < 0 || s.World < 1:
		return Snapshot{}, fmt.Errorf("snapshot: epoch %d, cursor %d, world %d: the first two are at least 0, world at least 1", s.Epoch, s.Cursor, s.World)
	}
	if _, err := ParseVersioned(s.Order); err != nil {
		return Snapshot{}, fmt.Errorf("snapshot: %w", err)
	}
	return s, nil
}

// Restore returns what the ranks first..last of a new world have still to read of the snapshot's
// epoch, in the order of time. Whatever the new world, all its ranks together read exactly the positions
// that the old one had not read, each once, and none of them is padding; of the epochs to follow all is
// as if nothing had happened.
//
// The one exception is a torch order at the world size that it was taken with: then it continues as
// torch does, padding included. At another world size, what is left of the permutation is read as it is.
//
// Errors: those of Over; another dataset version; a cursor beyond the epoch, or, for length buckets,
// inside a batch; a world that cannot share the buckets' batches.
func (s Snapshot) Restore(f Facts, dataset string, world, first, last int) (Order, error) {
	spec, err := ParseVersioned(s.Order)
	if err != nil {
		return nil, fmt.Errorf("snapshot: %w", err)
	}
	if dataset != s.Dataset {
		return nil, fmt.Errorf("snapshot is of dataset %s, not of %s: a snapshot holds for one version of a dataset only", s.Dataset, dataset)
	}
	if first < 0 || first > last || last >= world {
		return nil, fmt.Errorf("snapshot: ranks %d-%d are outside a world of %d", first, last, world)
	}
	if spec.batch > 0 && (s.Cursor%spec.batch != 0 && s.Cursor != f.Samples || spec.batch%world != 0) {
		return nil, fmt.Errorf("snapshot of %s: cursor %d, world %d: length buckets continue at a batch of %d, which the ranks share evenly",
			s.Order, s.Cursor, world, spec.batch)
	}
	if spec.world = 0; spec.name == "torch" && world == s.World && world > 1 {
		spec.world, spec.hasRanks, spec.ranks = world, true, Ranks{0, world - 1}
	}
	whole, err := spec.Over(f, s.Epoch)
	if err != nil {
		return nil, err
	}
	n := whole.Len()
	cursor := s.Cursor
	if spec.name == "torch" && world != s.World {
		cursor = min(cursor, n) // the old world may have been in its padding
	}
	if cursor > n {
		return nil, fmt.Errorf("snapshot of %s: cursor %d is beyond the epoch's %d positions", s.Order, s.Cursor, n)
	}
	return Stripe(Slice(whole, cursor, n), world, first, last), nil
}

// Versioned returns the canonical text of what determines the order of all epochs, under the versioned name of the algorithm,
// such as "uniform@1:seed=5": without the epoch that a run starts with and without ranks; the world size
// stands in it only for torch, whose order depends on it. It is what resume states hold: equal texts
// promise equal orders. It is "" for orders that are not computed.
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

// ParseVersioned reads what Versioned returned. It refuses an algorithm version that is not the one
// implemented here, since its order would be another.
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
