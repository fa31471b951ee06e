package order

import (
	"errors"
	"fmt"
	"math"
	"path"
	"slices"
	"sort"
	"strconv"
	"strings"
)

// The limits of a mixture. They bound the table of a period, which takes 6 bytes a position, and the
// time that it takes to fill: 65,536 positions of 256 sources take some 40 ms.
const (
	maxPeriod  = 1 << 16
	maxSources = 256
)

// weights are the sources of a mixture, with whole weights that have no common factor.
type weights []source

// source says which samples are of a source: those whose class matches a glob, or those in a range.
type source struct {
	pattern     string // as written: a glob of class names, or @A-B
	first, last int    // of a range, inclusive; last < 0 for a glob
	weight      int
}

// parseWeights reads PATTERN:WEIGHT+PATTERN:WEIGHT…
func parseWeights(text string) (weights, error) {
	var w weights
	var micro []int64 // weights in millionths
	for term := range strings.SplitSeq(text, "+") {
		i := strings.LastIndexByte(term, ':')
		if i <= 0 {
			return nil, fmt.Errorf("weights=%q: %q is no source: write GLOB:WEIGHT, or @FIRST-LAST:WEIGHT for sample numbers, "+
				"with + between sources (in a glob, write ? for a + or a comma in a name)", text, term)
		}
		s := source{pattern: term[:i], last: -1}
		if r, ok := strings.CutPrefix(s.pattern, "@"); ok {
			a, b, _ := strings.Cut(r, "-")
			first, err1 := strconv.ParseUint(a, 10, 32)
			last, err2 := strconv.ParseUint(b, 10, 32)
			if err1 != nil || err2 != nil || first > last {
				return nil, fmt.Errorf("weights=%q: %q must be a range of sample numbers such as @0-999", text, s.pattern)
			}
			s.first, s.last = int(first), int(last)
			s.pattern = fmt.Sprintf("@%d-%d", first, last)
		} else if _, err := path.Match(s.pattern, ""); err != nil {
			return nil, fmt.Errorf("weights=%q: %q is no glob: * matches any text, ? any character, [a-z] a set", text, s.pattern)
		}
		m, err := parseMicro(term[i+1:])
		if err != nil {
			return nil, fmt.Errorf("weights=%q: %w", text, err)
		}
		w = append(w, s)
		micro = append(micro, m)
	}
	if len(w) > maxSources {
		return nil, fmt.Errorf("weights: %d sources, and %d are the most: let a glob match several classes", len(w), maxSources)
	}
	factor, sum := int64(0), int64(0)
	for _, m := range micro {
		factor = gcd(factor, m)
		sum += m
	}
	if sum/factor > maxPeriod {
		return nil, fmt.Errorf("weights=%q: as whole numbers they add up to %d, and %d is the most: round them", text, sum/factor, maxPeriod)
	}
	for i := range w {
		w[i].weight = int(micro[i] / factor)
	}
	return w, nil
}

// parseMicro reads a positive decimal number of up to 6 decimals, in millionths. The limit of a million
// keeps sums small.
func parseMicro(text string) (int64, error) {
	whole, decimals, _ := strings.Cut(text, ".")
	bad := fmt.Errorf("weight %q: must be a number above 0 and up to 1000000, with at most 6 decimals", text)
	if len(decimals) > 6 || whole == "" || len(whole) > 7 {
		return 0, bad
	}
	v, err := strconv.ParseUint(whole+decimals+strings.Repeat("0", 6-len(decimals)), 10, 63)
	if err != nil || v == 0 || v > 1e12 {
		return 0, bad
	}
	return int64(v), nil
}

func gcd(a, b int64) int64 {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}

// String returns the canonical text, with whole weights.
func (w weights) String() string {
	terms := make([]string, len(w))
	for i, s := range w {
		terms[i] = s.pattern + ":" + strconv.Itoa(s.weight)
	}
	return strings.Join(terms, "+")
}

// schedule returns which source each position of a period has. After t positions source i of weight w
// out of P has come between w·t/P - d and w·t/P + d times, d = 1 - 1/(2k-2) < 1 for k sources; no
// schedule does better for all weights.
//
// It is R. Tijdeman's, "The chairman assignment problem", Discrete Mathematics 32 (1980): of the sources
// that are at least 1/(2k-2) behind their share, the one that would be too late first.
func (w weights) schedule() []uint16 {
	period := 0
	for _, s := range w {
		period += s.weight
	}
	slots := make([]uint16, period)
	if len(w) == 1 {
		return slots
	}
	h := 2*len(w) - 2
	count := make([]int, len(w))
	for t := range slots {
		best := -1
		for i, s := range w {
			if (s.weight*(t+1)-count[i]*period)*h < period {
				continue
			}
			// Its deadline is ((1+count)·h - 1)/h · P/w: compare without the common factors.
			if best < 0 || ((1+count[i])*h-1)*w[best].weight < ((1+count[best])*h-1)*s.weight {
				best = i
			}
		}
		slots[t] = uint16(best)
		count[best]++
	}
	return slots
}

// Mixture, mixture@1, is an order that draws from several sources in fixed proportions: over any
// prefix of an epoch each source has its share of positions to within one (weights.schedule, which
// depends on the weights alone and repeats after their sum).
//
// Each source is read in a uniform permutation of its own (Uniform, with the number of the source mixed into the seed),
// and when it is exhausted in another, and so on. An epoch is a number of positions, by default
// that of the samples in all sources together: in it a source of more than its share of samples is not
// exhausted, one of less is repeated. What one epoch leaves of a source's permutation the next
// epoch goes on with, so that over many epochs all samples of a source come equally often (to
// within one).
//
// At and Find take O(log classes) time; the memory is that of a period.
type mixture struct {
	n      int
	epoch  int
	slots  []uint16 // by position in the period: its source
	rank   []uint32 // and how many positions of that source are before it in the period
	parts  []part   // by source
	ranges []span   // of all sources, by first sample
}

// part is a source as the dataset has it.
type part struct {
	size   int
	seed   uint64
	weight int
	per    int      // positions in an epoch
	at     []uint32 // positions in the period
	spans  []span
}

// span is a run of a source's samples.
type span struct {
	first, end int // samples
	before     int // samples of the source in earlier runs
	source     int
}

// newMixture resolves the weights of s against the dataset.
func newMixture(f Facts, s Spec, epoch int) (*mixture, error) {
	w, err := parseWeights(s.weights)
	if err != nil {
		return nil, err
	}
	if f.Samples >= math.MaxUint32 || s.samples >= math.MaxUint32 {
		return nil, fmt.Errorf("%d samples: 2^32-2 are the most", max(f.Samples, s.samples))
	}
	spans, err := w.spans(f)
	if err != nil {
		return nil, err
	}
	m := &mixture{epoch: epoch, slots: w.schedule(), ranges: spans, parts: make([]part, len(w))}
	m.rank = make([]uint32, len(m.slots))
	for i := range w {
		m.parts[i].weight = w[i].weight
		m.parts[i].seed = key(s.seed, i)
	}
	for i := range spans {
		p := &m.parts[spans[i].source]
		spans[i].before = p.size
		p.spans = append(p.spans, spans[i])
		p.size += spans[i].end - spans[i].first
		m.n += spans[i].end - spans[i].first
	}
	for i, p := range m.parts {
		if p.size == 0 {
			return nil, fmt.Errorf("source %q has no sample: its pattern matches no class, or only what an earlier source has%s", w[i].pattern, classesOf(f))
		}
	}
	for t, i := range m.slots {
		p := &m.parts[i]
		m.rank[t] = uint32(len(p.at))
		p.at = append(p.at, uint32(t))
	}
	if s.samples != 0 {
		m.n = s.samples
	}
	for i := range m.parts {
		p := &m.parts[i]
		p.per = p.until(m.n, len(m.slots))
		if uint64(epoch+1) > math.MaxInt/uint64(max(p.per, 1)) {
			return nil, fmt.Errorf("epoch %d is too far: all epochs together can have 2^63 positions", epoch)
		}
	}
	return m, nil
}

// classesOf lists some classes, for errors.
func classesOf(f Facts) string {
	if f.Classes == nil {
		return ""
	}
	names := f.Classes()
	if len(names) > 8 {
		return fmt.Sprintf(" (there are %s and %d more)", strings.Join(names[:8], ", "), len(names)-8)
	}
	return fmt.Sprintf(" (there are %s)", strings.Join(names, ", "))
}

// spans returns the runs of samples of the sources, ascending. A sample is of the first source that it
// fits; one that fits none is left out.
func (w weights) spans(f Facts) ([]span, error) {
	var bounds []int // where ranges begin and end
	globs := false
	for _, s := range w {
		if s.last < 0 {
			globs = true
			continue
		}
		if s.last >= f.Samples {
			return nil, fmt.Errorf("source %q: the dataset has the samples 0 to %d only", s.pattern, f.Samples-1)
		}
		bounds = append(bounds, s.first, s.last+1)
	}
	sourceOf := func(sample, label int) int {
		return slices.IndexFunc(w, func(s source) bool {
			if s.last < 0 {
				return false
			}
			return sample >= s.first && sample <= s.last
		})
	}
	if !globs {
		// Only at the bounds can the source change.
		slices.Sort(bounds)
		return runs(slices.Compact(bounds), func(sample int) int { return sourceOf(sample, -1) }), nil
	}
	if f.Classes == nil || f.Label == nil {
		return nil, fmt.Errorf("%w: the classes' names; or give sources by number, @FIRST-LAST:WEIGHT", ErrNeedsFacts)
	}
	byLabel, err := w.byLabel(f.Classes())
	if err != nil {
		return nil, err
	}
	of := func(sample int) int {
		a := sourceOf(sample, -1)
		if label := f.Label(sample); label >= 0 && label < len(byLabel) {
			if b := byLabel[label]; b >= 0 && (a < 0 || b < a) {
				return b
			}
		}
		return a
	}
	var all []span
	for sample := range f.Samples {
		switch s := of(sample); {
		case s < 0:
		case len(all) > 0 && all[len(all)-1].source == s && all[len(all)-1].end == sample:
			all[len(all)-1].end++
		default:
			all = append(all, span{first: sample, end: sample + 1, source: s})
		}
	}
	return all, nil
}

// byLabel returns the source of each class by glob, -1 for none.
func (w weights) byLabel(classes []string) ([]int, error) {
	if len(classes) == 0 {
		return nil, errors.New("the dataset has no class folders: give sources by number, @FIRST-LAST:WEIGHT")
	}
	by := make([]int, len(classes))
	for label, name := range classes {
		by[label] = slices.IndexFunc(w, func(s source) bool {
			ok, _ := path.Match(s.pattern, name)
			return ok && s.last < 0
		})
	}
	return by, nil
}

// runs returns the spans between bounds that have a source.
func runs(bounds []int, sourceOf func(sample int) int) []span {
	var all []span
	for i := range len(bounds) - 1 {
		if s := sourceOf(bounds[i]); s >= 0 {
			all = append(all, span{first: bounds[i], end: bounds[i+1], source: s})
		}
	}
	return all
}

// until returns how many of the first n positions of a schedule are the source's.
func (p *part) until(n, period int) int {
	i, _ := slices.BinarySearch(p.at, uint32(n%period))
	return n/period*p.weight + i
}

// sample returns the i-th sample of the source.
func (p *part) sample(i int) int {
	k := sort.Search(len(p.spans), func(k int) bool { return p.spans[k].before > i }) - 1
	return p.spans[k].first + i - p.spans[k].before
}

func (m *mixture) Len() int { return m.n }

// draw returns the source of a position and how many draws of it came before, in all epochs.
func (m *mixture) draw(pos int) (p *part, j int) {
	check(pos, m.n)
	q, t := pos/len(m.slots), pos%len(m.slots)
	p = &m.parts[m.slots[t]]
	return p, m.epoch*p.per + q*p.weight + int(m.rank[t])
}

func (m *mixture) At(pos int) int {
	p, j := m.draw(pos)
	u := newUniform(p.size, p.seed, j/p.size)
	return p.sample(u.At(j % p.size))
}

// Occurrence implements Repeating: it counts the source's permutations.
func (m *mixture) Occurrence(pos int) int {
	p, j := m.draw(pos)
	return j/p.size - m.epoch*p.per/p.size
}

func (m *mixture) Find(sample, from int) int {
	k := sort.Search(len(m.ranges), func(k int) bool { return m.ranges[k].end > sample })
	if from = max(from, 0); k == len(m.ranges) || sample < m.ranges[k].first || from >= m.n {
		return -1
	}
	r := m.ranges[k]
	p := &m.parts[r.source]
	before := m.epoch * p.per
	least := before + p.until(from, len(m.slots))
	for turn := least / p.size; turn*p.size < before+p.per; turn++ {
		u := newUniform(p.size, p.seed, turn)
		j := turn*p.size + u.Find(r.before+sample-r.first, 0)
		if j < least {
			continue
		}
		if j -= before; j >= p.per {
			return -1
		}
		return j/p.weight*len(m.slots) + int(p.at[j%p.weight])
	}
	return -1
}
