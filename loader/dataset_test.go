package loader_test

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

// testDataset is in memory. It has Samples samples of numClasses classes, sample i being sampleOf(i).
type testDataset struct {
	Samples int
	Shard   int                // samples a shard; 0: none
	Bytes   func(i int) []byte // nil: sampleOf
	Bad     map[int]bool       // samples that the transform refuses
	Errors  map[int]error      // samples that cannot be read
	Delay   func(i int) time.Duration
	Hold    func(i int) // called by each read, which waits for it whatever its context says

	Reading atomic.Int64 // samples handed out and not released
	Open    atomic.Int64 // streams begun and not closed
	Begun   func(name string, seq order.Order, start int)
}

// numClasses is the number of classes; sample i's is i % numClasses.
const numClasses = 10

// sampleOf returns the content of sample i.
func sampleOf(i int) []byte {
	p := make([]byte, 20+i%50)
	for j := range p {
		p[j] = byte(i*31 + j*7)
	}
	return p
}

var badBytes = []byte("BAD!")

func (d *testDataset) bytes(i int) []byte {
	switch {
	case d.Bad[i]:
		return badBytes
	case d.Bytes != nil:
		return d.Bytes(i)
	}
	return sampleOf(i)
}

// Version implements loader.Dataset.
func (d *testDataset) Version() string {
	h := sha256.Sum256(fmt.Appendf(nil, "%d samples", d.Samples))
	return hex.EncodeToString(h[:])
}

// Len implements loader.Dataset.
func (d *testDataset) Len() int { return d.Samples }

// Label implements loader.Dataset.
func (d *testDataset) Label(i int) int { return i % numClasses }

// Path implements loader.Dataset.
func (d *testDataset) Path(i int) string { return fmt.Sprintf("class%d/%06d.bin", i%numClasses, i) }

// Size implements loader.Dataset.
func (d *testDataset) Size(i int) int64 { return int64(len(d.bytes(i))) }

// Classes implements loader.Dataset.
func (d *testDataset) Classes() []string {
	var names []string
	for i := range numClasses {
		names = append(names, fmt.Sprintf("class%d", i))
	}
	return names
}

// Groups implements loader.Dataset: it has shards of d.Shard samples, none if that is 0.
func (d *testDataset) Groups() (order.Groups, string) {
	if d.Shard == 0 {
		return nil, ""
	}
	return order.Contiguous(d.Samples, d.Shard), fmt.Sprintf("of-%d", d.Shard)
}

// Parts implements loader.Dataset.
func (d *testDataset) Parts(string) (found, numbered bool) { return false, false }

// Begin implements loader.Dataset.
func (d *testDataset) Begin(name string, seq order.Order, start, weight int, _ ...string) (loader.Stream, error) {
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
	return &testStream{d: d, seq: seq, read: make([]atomic.Bool, seq.Len())}, nil
}

// testStream also checks the rules that a session promises to keep.
type testStream struct {
	d      *testDataset
	seq    order.Order
	read   []atomic.Bool
	closed atomic.Bool
}

func (s *testStream) Read(ctx context.Context, pos int) ([]byte, func(), error) {
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

func (s *testStream) Close() error {
	if s.closed.Swap(true) {
		panic("stream closed twice")
	}
	s.d.Open.Add(-1)
	return nil
}

// ramp is a transform whose output is simple arithmetic.
type ramp struct {
	Height, Width int
	Type          string // uint8 or fp32
}

// compileRamp parses ramp(H,W) and ramp(H,W)|fp32.
func compileRamp(_ context.Context, spec string, _ loader.Dataset) (loader.Transform, error) {
	r := ramp{Type: "uint8"}
	text, dtype, _ := strings.Cut(spec, "|")
	if n, err := fmt.Sscanf(text, "ramp(%d,%d)", &r.Height, &r.Width); n != 2 || err != nil {
		return nil, fmt.Errorf("transform %q: must be ramp(H,W)", spec)
	}
	if dtype != "" {
		r.Type = dtype
	}
	return r, nil
}

// rampValue is element k of what ramp makes of a sample.
func rampValue(src []byte, at loader.Draw, k int) byte {
	return src[k%len(src)] + byte(at.Seed) + 7*byte(at.Epoch) + 13*byte(at.Sample) + 31*byte(at.Occurrence) + byte(k)
}

// Make implements loader.Transform.
func (r ramp) Make(s loader.Sample, at loader.Draw, row *loader.Row) error {
	src, dst := s.Data, row.Fields[0]
	if bytes.Equal(src, badBytes) {
		return errors.New("no end marker")
	}
	for k := range 3 * r.Height * r.Width {
		if v := rampValue(src, at, k); r.Type == "fp32" {
			binary.LittleEndian.PutUint32(dst[4*k:], math.Float32bits(float32(v)))
		} else {
			dst[k] = v
		}
	}
	return nil
}

// OutBytes is the length of a row.
func (r ramp) OutBytes() int {
	n := 3 * r.Height * r.Width
	if r.Type == "fp32" {
		n *= 4
	}
	return n
}

// Fields implements loader.Transform.
func (r ramp) Fields() []loader.Field {
	return []loader.Field{{Name: "data", DType: r.Type, Shape: []int{3, r.Height, r.Width}, Bytes: r.OutBytes()}}
}

// Layout implements loader.Transform.
func (ramp) Layout() string { return "nchw" }

// String implements loader.Transform.
func (r ramp) String() string { return fmt.Sprintf("ramp(%d,%d)|%s", r.Height, r.Width, r.Type) }

// Hash implements loader.Transform.
func (r ramp) Hash() string {
	h := sha256.Sum256([]byte(r.String()))
	return hex.EncodeToString(h[:8])
}

// testLedger is a loader.Memory of Limit bytes; 0 is no limit.
type testLedger struct {
	Limit int64

	mu      sync.Mutex
	used    int64
	peak    int64
	awaited int64
	more    chan struct{}
}

// Reserve implements loader.Memory.
func (l *testLedger) Reserve(ctx context.Context, n int64) error {
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
func (l *testLedger) TryReserve(n int64) bool {
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
func (l *testLedger) Awaited() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.awaited
}

// Release implements loader.Memory.
func (l *testLedger) Release(n int64) {
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
func (l *testLedger) Used() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.used
}

// Peak returns the most bytes that were ever reserved.
func (l *testLedger) Peak() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.peak
}

// Source implements loader.Owned.
func (d *testDataset) Source() [16]byte { return [16]byte{1} }

// Units implements loader.Owned.
func (d *testDataset) Units() func(i int) uint64 { return func(i int) uint64 { return uint64(i) } }

// placementOf returns a placement of ranks on nodes n0, n1, …, by the index of each rank's node.
func placementOf(ranks ...int) string {
	nodes := make([]string, slices.Max(ranks)+1)
	for i := range nodes {
		nodes[i] = fmt.Sprintf(`{"id":"n%d","weight":%d}`, i, 100+i)
	}
	list, _ := json.Marshal(ranks) // integers only
	return fmt.Sprintf(`{"v":2,"nodes":[%s],"ranks":%s}`, strings.Join(nodes, ","), list)
}
