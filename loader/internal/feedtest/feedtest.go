// Package feedtest holds what the feed's tests share, in Go and, through the command feedserver, in
// Python: a dataset in memory whose samples can be computed, a transform that can be predicted, and
// a ledger that remembers its peak.
package feedtest

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/shoalfs/shoal/loader"
	"github.com/shoalfs/shoal/prefetch/order"
)

// Dataset has Samples samples of Classes classes, sample i being Sample(i).
type Dataset struct {
	Samples int
	Shard   int                // samples a shard; 0: none
	Bytes   func(i int) []byte // nil: Sample
	Bad     map[int]bool       // samples that the transform refuses
	Errors  map[int]error      // samples that cannot be read
	Delay   func(i int) time.Duration
	Hold    func(i int) // called by each read, which waits for it whatever its context says

	Reading atomic.Int64 // samples handed out and not released
	Open    atomic.Int64 // streams begun and not closed
	Begun   func(name string, seq order.Order, start int)
}

// NumClasses is the number of classes; sample i's is i % NumClasses.
const NumClasses = 10

// Sample returns the content of sample i.
func Sample(i int) []byte {
	p := make([]byte, 20+i%50)
	for j := range p {
		p[j] = byte(i*31 + j*7)
	}
	return p
}

var bad = []byte("BAD!")

func (d *Dataset) bytes(i int) []byte {
	switch {
	case d.Bad[i]:
		return bad
	case d.Bytes != nil:
		return d.Bytes(i)
	}
	return Sample(i)
}

// Version implements loader.Dataset.
func (d *Dataset) Version() string {
	h := sha256.Sum256(fmt.Appendf(nil, "%d samples", d.Samples))
	return hex.EncodeToString(h[:])
}

// Len implements loader.Dataset.
func (d *Dataset) Len() int { return d.Samples }

// Label implements loader.Dataset.
func (d *Dataset) Label(i int) int { return i % NumClasses }

// Path implements loader.Dataset.
func (d *Dataset) Path(i int) string { return fmt.Sprintf("class%d/%06d.bin", i%NumClasses, i) }

// Size implements loader.Dataset.
func (d *Dataset) Size(i int) int64 { return int64(len(d.bytes(i))) }

// Classes implements loader.Dataset.
func (d *Dataset) Classes() []string {
	var names []string
	for i := range NumClasses {
		names = append(names, fmt.Sprintf("class%d", i))
	}
	return names
}

// Groups implements loader.Dataset: it has shards of d.Shard samples, none if that is 0.
func (d *Dataset) Groups() (order.Groups, string) {
	if d.Shard == 0 {
		return nil, ""
	}
	return order.Contiguous(d.Samples, d.Shard), fmt.Sprintf("of-%d", d.Shard)
}

// Parts implements loader.Dataset.
func (d *Dataset) Parts(string) (found, numbered bool) { return false, false }

// Begin implements loader.Dataset.
func (d *Dataset) Begin(name string, seq order.Order, start, weight int, _ ...string) (loader.Stream, error) {
	if weight < 1 || weight > loader.MaxWeight {
		return nil, fmt.Errorf("begin %s with weight %d", name, weight)
	}
	if start < 0 || start > seq.Len() {
		return nil, fmt.Errorf("begin %s at %d of %d", name, start, seq.Len())
	}
	if d.Begun != nil {
		d.Begun(name, seq, start)
	}
	d.Open.Add(1)
	return &stream{d: d, seq: seq, read: make([]atomic.Bool, seq.Len())}, nil
}

// stream also checks the rules that a session promises to keep.
type stream struct {
	d      *Dataset
	seq    order.Order
	read   []atomic.Bool
	closed atomic.Bool
}

func (s *stream) Read(ctx context.Context, pos int) ([]byte, func(), error) {
	if s.closed.Load() {
		panic("read after close")
	}
	if s.read[pos].Swap(true) {
		panic("position read twice")
	}
	i := s.seq.At(pos)
	if s.d.Hold != nil {
		s.d.Hold(i)
	}
	if s.d.Delay != nil {
		t := time.NewTimer(s.d.Delay(i))
		defer t.Stop()
		select {
		case <-t.C:
		case <-ctx.Done():
			return nil, nil, ctx.Err()
		}
	}
	if err := s.d.Errors[i]; err != nil {
		return nil, nil, err
	}
	s.d.Reading.Add(1)
	return s.d.bytes(i), sync.OnceFunc(func() { s.d.Reading.Add(-1) }), nil
}

func (s *stream) Close() error {
	if s.closed.Swap(true) {
		panic("stream closed twice")
	}
	s.d.Open.Add(-1)
	return nil
}

// Ramp is a transform whose output is simple arithmetic.
type Ramp struct {
	Height, Width int
	Type          string // uint8 or fp32
}

// Compile parses ramp(H,W) and ramp(H,W)|fp32.
func Compile(_ context.Context, spec string, _ loader.Dataset) (loader.Transform, error) {
	r := Ramp{Type: "uint8"}
	text, dtype, _ := strings.Cut(spec, "|")
	if n, err := fmt.Sscanf(text, "ramp(%d,%d)", &r.Height, &r.Width); n != 2 || err != nil {
		return nil, fmt.Errorf("transform %q: must be ramp(H,W)", spec)
	}
	if dtype != "" {
		r.Type = dtype
	}
	return r, nil
}

// Value is element k of what Ramp makes of a sample.
func Value(src []byte, at loader.Draw, k int) byte {
	return src[k%len(src)] + byte(at.Seed) + 7*byte(at.Epoch) + 13*byte(at.Sample) + 31*byte(at.Occurrence) + byte(k)
}

// Make implements loader.Transform.
func (r Ramp) Make(s loader.Sample, at loader.Draw, row *loader.Row) error {
	src, dst := s.Data, row.Fields[0]
	if bytes.Equal(src, bad) {
		return errors.New("no end marker")
	}
	for k := range 3 * r.Height * r.Width {
		if v := Value(src, at, k); r.Type == "fp32" {
			binary.LittleEndian.PutUint32(dst[4*k:], math.Float32bits(float32(v)))
		} else {
			dst[k] = v
		}
	}
	return nil
}

// OutBytes is the length of a row.
func (r Ramp) OutBytes() int {
	n := 3 * r.Height * r.Width
	if r.Type == "fp32" {
		n *= 4
	}
	return n
}

// Fields implements loader.Transform.
func (r Ramp) Fields() []loader.Field {
	return []loader.Field{{Name: "data", DType: r.Type, Shape: []int{3, r.Height, r.Width}, Bytes: r.OutBytes()}}
}

// Layout implements loader.Transform.
func (Ramp) Layout() string { return "nchw" }

// String implements loader.Transform.
func (r Ramp) String() string { return fmt.Sprintf("ramp(%d,%d)|%s", r.Height, r.Width, r.Type) }

// Hash implements loader.Transform.
func (r Ramp) Hash() string {
	h := sha256.Sum256([]byte(r.String()))
	return hex.EncodeToString(h[:8])
}

// Ledger is a loader.Memory of Limit bytes; 0 is no limit.
type Ledger struct {
	Limit int64

	mu      sync.Mutex
	used    int64
	peak    int64
	awaited int64
	more    chan struct{}
}

// Reserve implements loader.Memory.
func (l *Ledger) Reserve(ctx context.Context, n int64) error {
	if l.Limit > 0 && n > l.Limit {
		return fmt.Errorf("%d bytes are more than the ledger's %d", n, l.Limit)
	}
	for !l.TryReserve(n) {
		l.mu.Lock()
		if l.more == nil {
			l.more = make(chan struct{})
		}
		more := l.more
		l.awaited = max(l.awaited, n)
		full := l.used+n > l.Limit
		l.mu.Unlock()
		if !full {
			continue
		}
		select {
		case <-more:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// TryReserve implements loader.Memory.
func (l *Ledger) TryReserve(n int64) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.Limit > 0 && l.used+n > l.Limit {
		return false
	}
	l.used += n
	l.peak = max(l.peak, l.used)
	return true
}

// Awaited returns the most bytes for which Reserve has waited.
func (l *Ledger) Awaited() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.awaited
}

// Release implements loader.Memory.
func (l *Ledger) Release(n int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.used -= n; l.used < 0 {
		panic("released more than was reserved")
	}
	if l.more != nil {
		close(l.more)
		l.more = nil
	}
}

// Used returns the bytes reserved now.
func (l *Ledger) Used() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.used
}

// Peak returns the most bytes that were ever reserved.
func (l *Ledger) Peak() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.peak
}

// Source implements loader.Owned.
func (d *Dataset) Source() [16]byte { return [16]byte{1} }

// Units implements loader.Owned.
func (d *Dataset) Units() func(i int) uint64 { return func(i int) uint64 { return uint64(i) } }

// Placement returns a placement of ranks on nodes n0, n1, …, by the index of each rank's node.
func Placement(ranks ...int) string {
	nodes := make([]string, slices.Max(ranks)+1)
	for i := range nodes {
		nodes[i] = fmt.Sprintf(`{"id":"n%d","weight":%d}`, i, 100+i)
	}
	list, _ := json.Marshal(ranks) // integers only
	return fmt.Sprintf(`{"v":2,"nodes":[%s],"ranks":%s}`, strings.Join(nodes, ","), list)
}
