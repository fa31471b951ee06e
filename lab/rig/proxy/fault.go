package proxy

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"path"
	"strings"
	"time"
)

// Kind is a kind of fault.
type Kind string

// The kinds of faults.
const (
	// Unavailable answers 503 SlowDown without asking the server.
	Unavailable Kind = "503"
	// Slow adds For to the time to the first byte.
	Slow Kind = "slow"
	// Stall stops sending at At of the body for For, then goes on.
	Stall Kind = "stall"
	// Reset resets the connection (RST) at At of the body.
	Reset Kind = "reset"
	// Truncate closes the connection in good order at At of the body.
	Truncate Kind = "truncate"
	// ETag makes the object look overwritten: a request with If-Match gets 412, any other one a
	// changed ETag.
	ETag Kind = "etag"
)

// Op is what a request does.
type Op string

// The operations that faults distinguish.
const (
	OpGet   Op = "get"  // the content of one object
	OpHead  Op = "head" // its metadata
	OpList  Op = "list" // a listing of a bucket
	OpPut   Op = "put"
	OpOther Op = "other"
	OpAny   Op = "any" // only in rules
)

// Fault is a rule: which requests fail, and how.
type Fault struct {
	Kind Kind `json:"kind"`
	// Op selects requests by what they do; empty means [OpGet].
	Op Op `json:"op,omitempty"`
	// Key selects requests by key: a pattern of package path, matched against the whole key
	// (without the bucket), or against its last element if the pattern has no slash. Empty: all.
	Key string `json:"key,omitempty"`
	// After is how many selected requests pass untouched first.
	After int `json:"after,omitempty"`
	// Count is how many requests fail in all; 0 is no limit.
	Count int `json:"count,omitempty"`
	// P is the probability that a selected request fails; 0 means 1.
	P float64 `json:"p,omitempty"`
	// At is the place in the body, 0 to 1, where Stall, Reset and Truncate strike.
	At float64 `json:"at,omitempty"`
	// For is the duration of Slow and Stall.
	For time.Duration `json:"for_ns,omitempty"`
}

func (f Fault) validate() error {
	switch f.Kind {
	case Unavailable, Slow, Stall, Reset, Truncate, ETag:
	default:
		return fmt.Errorf("unknown fault %q", f.Kind)
	}
	switch f.Op {
	case "", OpGet, OpHead, OpList, OpPut, OpOther, OpAny:
	default:
		return fmt.Errorf("fault %s: unknown operation %q", f.Kind, f.Op)
	}
	if _, err := path.Match(f.Key, ""); err != nil {
		return fmt.Errorf("fault %s: key %q: %w", f.Kind, f.Key, err)
	}
	if f.After < 0 || f.Count < 0 || f.For < 0 || !(f.P >= 0 && f.P <= 1) || !(f.At >= 0 && f.At <= 1) {
		return fmt.Errorf("fault %s: after, count and for must not be negative, p and at must lie in 0..1", f.Kind)
	}
	if (f.Kind == Slow || f.Kind == Stall) && f.For == 0 {
		return fmt.Errorf("fault %s: needs a duration, for=10s", f.Kind)
	}
	return nil
}

// rule is a fault with its counters.
type rule struct {
	Fault
	selected, fired int
}

func (r *rule) fires(op Op, key string, rng *rand.Rand) bool {
	want := cmp.Or(r.Op, OpGet)
	if want != OpAny && want != op || !r.matches(key) {
		return false
	}
	if r.selected++; r.selected <= r.After || r.Count > 0 && r.fired >= r.Count {
		return false
	}
	if r.P > 0 && rng.Float64() >= r.P {
		return false
	}
	r.fired++
	return true
}

func (r *rule) matches(key string) bool {
	if r.Key == "" {
		return true
	}
	if !strings.Contains(r.Key, "/") {
		key = path.Base(key)
	}
	ok, _ := path.Match(r.Key, key) // the pattern was checked
	return ok
}
