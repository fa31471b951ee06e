package proxy

import (
	"fmt"
	"math/rand/v2"
	"path"
	"strconv"
	"strings"
	"time"
)

// Kind is a kind of fault.
type Kind uint8

// The kinds of faults.
const (
	// Unavailable answers 503 SlowDown without asking the server.
	Unavailable Kind = iota
	// Slow adds For to the time to the first byte.
	Slow
	// Stall stops sending at At of the body for For, then goes on.
	Stall
	// Reset resets the connection (RST) at At of the body.
	Reset
	// Truncate closes the connection in good order at At of the body.
	Truncate
	// Flip inverts one bit of the body's byte at At.
	Flip
	// ETag makes the object look overwritten: a request with If-Match gets 412, any other one a
	// changed ETag.
	ETag

	numKinds
)

var kindNames = [numKinds]string{"503", "slow", "stall", "reset", "truncate", "flip", "etag"}

// String returns the name that [ParseFault] takes.
func (k Kind) String() string {
	if k < numKinds {
		return kindNames[k]
	}
	return fmt.Sprintf("kind %d", uint8(k))
}

func parseKind(s string) (Kind, error) {
	for k, n := range kindNames {
		if n == s {
			return Kind(k), nil
		}
	}
	return 0, fmt.Errorf("unknown fault %q; known: %s", s, strings.Join(kindNames[:], ", "))
}

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
	// At is the place in the body, 0 to 1, where Stall, Reset, Truncate and Flip strike.
	At float64 `json:"at,omitempty"`
	// For is the duration of Slow and Stall.
	For time.Duration `json:"for_ns,omitempty"`
}

func (f Fault) validate() error {
	if f.Kind >= numKinds {
		return fmt.Errorf("fault: unknown kind %d", f.Kind)
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

// ParseFault reads the text form of a rule: KIND[:name=value[,name=value]...], for example
// "503:after=10,count=5", "stall:key=train/*/x.jpg,for=10s", "flip:p=0.01,at=0.5". The names are
// the fields of [Fault] in lower case. At defaults to 0.5 here.
func ParseFault(s string) (Fault, error) {
	name, rest, _ := strings.Cut(s, ":")
	kind, err := parseKind(name)
	if err != nil {
		return Fault{}, err
	}
	f := Fault{Kind: kind, At: 0.5}
	for _, kv := range strings.FieldsFunc(rest, func(r rune) bool { return r == ',' }) {
		k, v, ok := strings.Cut(kv, "=")
		if !ok {
			return Fault{}, fmt.Errorf("fault %q: %q is not name=value", s, kv)
		}
		switch k {
		case "op":
			f.Op = Op(v)
		case "key":
			f.Key = v
		case "after":
			f.After, err = strconv.Atoi(v)
		case "count":
			f.Count, err = strconv.Atoi(v)
		case "p":
			f.P, err = strconv.ParseFloat(v, 64)
		case "at":
			f.At, err = strconv.ParseFloat(v, 64)
		case "for":
			f.For, err = time.ParseDuration(v)
		default:
			err = fmt.Errorf("unknown name %q", k)
		}
		if err != nil {
			return Fault{}, fmt.Errorf("fault %q: %w", s, err)
		}
	}
	return f, f.validate()
}

// rule is a fault with its counters.
type rule struct {
	Fault
	selected, fired int
}

func (r *rule) fires(op Op, key string, rng *rand.Rand) bool {
	want := r.Op
	if want == "" {
		want = OpGet
	}
	if want != OpAny && want != op || !r.matches(key) {
		return false
	}
	r.selected++
	if r.selected <= r.After || r.Count > 0 && r.fired >= r.Count {
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
