// Package order computes which sample is read when. It is pure: an order depends only on its spec, the number of
// samples and the epoch, not on threads, clocks, caches or the machine.
//
// Traps:
//   - torch orders are bit-exact copies of what PyTorch computes, so a change here that is not a change there breaks
//     every unmodified trainer. They pad: with a world size that does not divide the number of samples, some samples
//     occur twice (or more, if there are fewer samples than ranks). Our own orders never pad.
//   - A position is an index into the order, a sample is an index into the dataset. Both are int;
//     mixing them up compiles.
//   - The epoch of a Spec is where a run starts; Spec.Order takes the epoch that is wanted and does not add the two.
//   - Published algorithms are frozen: resume states name them by Spec.Algorithm. A change of any
//     output needs a new version number.
package order

import (
	"bytes"
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// Order is the sequence in which samples are read. Implementations are immutable and so safe for concurrent use;
// equal positions always give equal samples.
type Order interface {
	// Len returns the number of positions, which need not be the number of samples: an order may
	// repeat samples or leave some out.
	Len() int
	// At returns the sample at pos. It panics unless 0 <= pos < Len().
	At(pos int) int
}

// Locator is an Order that can also be searched by sample.
type Locator interface {
	Order
	// Find returns the smallest position not below from that holds sample, or -1 if there is
	// none. Any sample and any from are allowed.
	Find(sample, from int) int
}

// Repeating is an Order in which samples repeat before all have come.
type Repeating interface {
	Order
	// Occurrence numbers the occurrences of one sample in this order: 0, 1, … in the order of their positions. Numbers
	// may be left out.
	Occurrence(pos int) int
}

// Mixed is an Order over several sources.
type Mixed interface {
	Order
	// Source returns the number of the source that has a sample, from 0, or -1 if none has.
	Source(sample int) int
}

// Sequential is the identity on [0,n).
func Sequential(n int) Locator {
	if n < 0 {
		panic(fmt.Sprintf("order: negative length %d", n))
	}
	return sequential(n)
}

type sequential int

func (n sequential) Len() int { return int(n) }

func (n sequential) At(pos int) int {
	check(pos, int(n))
	return pos
}

func (n sequential) Find(sample, from int) int {
	if sample < max(from, 0) || sample >= int(n) {
		return -1
	}
	return sample
}

// List is an order as an explicit list, such as a plan. It keeps the slice without a copy: the caller must not change
// it afterwards. Samples may repeat.
func List(samples []uint32) Order { return list(samples) }

type list []uint32

func (l list) Len() int { return len(l) }

func (l list) At(pos int) int {
	check(pos, len(l))
	return int(l[pos])
}

// Slice returns the positions [from,to) of o as an order. It is a view: O(1) memory. It panics unless 0 <= from <= to
// <= o.Len(). If o is a Locator, so is the result.
func Slice(o Order, from, to int) Order {
	if from < 0 || from > to || to > o.Len() {
		panic(fmt.Sprintf("order: slice [%d,%d) of an order of %d positions", from, to, o.Len()))
	}
	v := view{o: o, n: to - from, block: max(to-from, 1), stride: max(to-from, 1), first: from}
	return v.order()
}

// Stripe returns the positions of the ranks first..last (inclusive) of a world: of each world consecutive positions
// of o, in order, those numbered first to last. An incomplete step at the end is kept. It is a view: O(1) memory. It
// panics unless 0 <= first <= last < world. If o is a Locator, so is the result.
func Stripe(o Order, world, first, last int) Order {
	if first < 0 || first > last || last >= world {
		panic(fmt.Sprintf("order: ranks %d-%d of a world of %d", first, last, world))
	}
	block := last - first + 1
	if block == world {
		return o
	}
	n := o.Len()/world*block + min(max(o.Len()%world-first, 0), block)
	v := view{o: o, n: n, block: block, stride: world, first: first}
	return v.order()
}

// view takes from each stride positions of o, counted from position first, the leading block.
type view struct {
	o             Order
	n             int
	block, stride int
	first         int
}

func (v view) order() Order {
	if l, ok := v.o.(Locator); ok {
		return locatorView{v, l}
	}
	return v
}

func (v view) Len() int { return v.n }

func (v view) At(pos int) int {
	check(pos, v.n)
	return v.o.At(v.base(pos))
}

// base maps a position of the view to one of the order below.
func (v view) base(pos int) int { return pos/v.block*v.stride + pos%v.block + v.first }

type locatorView struct {
	view
	l Locator
}

func (v locatorView) Find(sample, from int) int {
	if from = max(from, 0); from >= v.n {
		return -1
	}
	for p := v.l.Find(sample, v.base(from)); p >= 0; p = v.l.Find(sample, p+1) {
		q := p - v.first
		if q%v.stride >= v.block {
			continue
		}
		pos := q/v.stride*v.block + q%v.stride
		if pos >= v.n {
			return -1
		}
		return pos
	}
	return -1
}

// ParseList reads an explicit order: a sample on each line, by its number, below n, or by a name that find resolves,
// such as a path. Empty lines and lines that begin with # are skipped; a leading ./ is removed, so that a file called
// 7 can be named as ./7. find may be nil. Samples may repeat and may be missing.
//
// Errors name the first lines that are wrong, and end with "and N more".
func ParseList(data []byte, n int, find func(name string) (sample int, ok bool)) ([]uint32, error) {
	samples, bad := ParseLines(data, maxListErrors, func(line string) (int, error) {
		text := strings.TrimSuffix(line, "\r")
		if text == "" || text[0] == '#' {
			return -1, nil
		}
		if v, err := strconv.ParseUint(text, 10, 32); err == nil {
			if int(v) >= n {
				return 0, fmt.Errorf("sample %d: the dataset has 0 to %d", v, n-1)
			}
			return int(v), nil
		}
		if find == nil {
			return 0, fmt.Errorf("%q is not a sample number", text)
		}
		if s, ok := find(strings.TrimPrefix(text, "./")); ok {
			return s, nil
		}
		return 0, fmt.Errorf("no sample %q", text)
	})
	if len(bad) > 0 {
		return nil, errors.New(strings.Join(bad, "; "))
	}
	return samples, nil
}

// ParseLines returns the numbers that of returns for the lines of data, without negative ones. bad describes the
// errors of the first most bad lines, and says how many more there are.
func ParseLines(data []byte, most int, of func(line string) (int, error)) (list []uint32, bad []string) {
	lineNo, more := 0, 0
	for line := range bytes.SplitSeq(data, []byte("\n")) {
		lineNo++
		switch n, err := of(string(line)); {
		case err == nil && n >= 0:
			list = append(list, uint32(n))
		case err == nil:
		case len(bad) == most:
			more++
		default:
			bad = append(bad, fmt.Sprintf("line %d: %s", lineNo, err))
		}
	}
	if more > 0 {
		bad = append(bad, fmt.Sprintf("and %d more", more))
	}
	return list, bad
}

const maxListErrors = 5

func check(pos, n int) {
	if pos < 0 || pos >= n {
		panic(fmt.Sprintf("order: position %d outside [0,%d)", pos, n))
	}
}
