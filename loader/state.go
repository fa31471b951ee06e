package loader

import (
	"encoding/json"
	"fmt"
)

// stateVersion is the version of State's format.
const stateVersion = 1

// State is a trainer's progress: with a session's spec it determines everything that comes next. It is small JSON, the
// same for all ranks (except Bad), and taken at a boundary between global batches.
type State struct {
	V         int    `json:"v"`         // format, 1
	Dataset   string `json:"dataset"`   // version of the dataset
	Order     string `json:"order"`     // algorithm with its version and keys, such as uniform@1:seed=5
	Transform string `json:"transform"` // hash of the transform, or raw
	Seed      uint64 `json:"seed"`      // of the augmentation
	Epoch     int    `json:"epoch"`
	Cursor    int    `json:"cursor"` // samples of the epoch that all ranks together have consumed
	Batch     int    `json:"batch"`  // global batch: batch of a rank times world
	Tail      string `json:"tail"`
	// Placement is the digest of the placement, for whoever compares states. A state may be resumed with another, or
	// without: it is taken between global batches, whose samples do not depend on it.
	Placement string `json:"placement,omitempty"`
	// Bad counts the samples of the epoch that this rank skipped before the cursor, so that a quota holds for the whole
	// epoch however often the trainer resumes. It is the only field in which the states of two ranks may differ.
	Bad int `json:"bad,omitempty"`
	// Samples is how many the dataset has: the same version has others under another --samples. 0: not known.
	Samples int `json:"samples,omitempty"`
}

// JSON returns the state as text.
func (s State) JSON() string {
	b, err := json.Marshal(s)
	if err != nil {
		panic(err) // strings and integers only
	}
	return string(b)
}

// ParseState parses a state, and checks everything that needs no dataset.
func ParseState(text string) (State, error) {
	var s State
	if err := json.Unmarshal([]byte(text), &s); err != nil {
		return State{}, fmt.Errorf("state: not valid JSON: %w", err)
	}
	switch {
	case s.V != stateVersion:
		return State{}, fmt.Errorf("state: format version %d, this server reads version %d", s.V, stateVersion)
	case s.Epoch < 0 || s.Epoch > maxEpoch:
		return State{}, fmt.Errorf("state: epoch %d is outside 0..%d", s.Epoch, maxEpoch)
	case s.Cursor < 0:
		return State{}, fmt.Errorf("state: cursor %d is negative", s.Cursor)
	case s.Bad < 0:
		return State{}, fmt.Errorf("state: %d bad samples; it must not be negative", s.Bad)
	case s.Tail == "":
		return State{}, fmt.Errorf("state: it has no tail: give it whole, as state_dict() returned it")
	case s.Batch <= 0:
		return State{}, fmt.Errorf("state: global batch %d; it must be positive", s.Batch)
	}
	return s, nil
}

// maxEpoch keeps epochs within the range of Philox's counter and of the protocol.
const maxEpoch = 1<<31 - 1
