package proxy

import (
	"cmp"
	"math/rand/v2"
	"path"
	"strings"
	"time"
)

// Kind is a kind of fault.
type Kind string

// The kinds of faults.
const (
	Unavailable Kind = "503"      // answers 503 SlowDown without asking the server
	Slow        Kind = "slow"     // adds For to the time to the first byte
	Stall       Kind = "stall"    // stops sending at At of the body for For, then goes on
	Reset       Kind = "reset"    // resets the connection (RST) at At of the body
	Truncate    Kind = "truncate" // closes the connection in good order at At of the body
	// ETag makes the object look overwritten: a request with If-Match gets 412, any other one a changed ETag.
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
	Kind Kind
	Op   Op // selects requests by what they do; empty means [OpGet]
	// Key selects requests by key: a pattern of package path, matched against the whole key
	// (without the bucket), or against its last element if the pattern has no slash. Empty: all.
	Key   string
	After int           // how many selected requests pass untouched first
	Count int           // how many requests fail in all; 0 is no limit
	P     float64       // the probability that a selected request fails; 0 means 1
	At    float64       // the place in the body, 0 to 1, where Stall, Reset and Truncate strike
	For   time.Duration // of Slow and Stall
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
	ok, _ := path.Match(r.Key, key)
	return ok
}
