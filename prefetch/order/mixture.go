package order

import (
	"errors"
	"fmt"
	"math"
	"math/big"
	"path"
	"slices"
	"sort"
	"strconv"
	"strings"
)

// The limits of a mixture bound its table, of 10 bytes per position, and the time to fill it.
const (
	maxPeriod  = 1 << 16
	maxSources = 256
	leastTurn  = 4096 // positions of a table, at least
)

// weights are the sources of a mixture, with whole weights that have no common factor.
type weights []source

// source selects samples: those whose class matches a glob, or those in a range.
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
			return nil, fmt.Errorf(
				"weights=%q: %q is not a source: write GLOB:WEIGHT, or @FIRST-LAST:WEIGHT for sample numbers, "+
					"with + between sources (in a glob, write ? for a + or a comma in a name)", text, term)
		}
		s := source{pattern: term[:i], last: -1}
		if r, ok := strings.CutPrefix(s.pattern, "@"); ok {
			a, b, _ := strings.Cut(r, "-")
			first, err1 := strconv.ParseUint(a, 10, 32)
			last, err2 := strconv.ParseUint(b, 10, 32)
			if err1 != nil || err2 != nil || first > last {
				return nil, fmt.Errorf("weights=%q: %q must be a range of sample numbers such as @0-999",
					text, s.pattern)
			}
			s.first, s.last = int(first), int(last)
			s.pattern = fmt.Sprintf("@%d-%d", first, last)
		} else if _, err := path.Match(s.pattern, ""); err != nil {
			return nil, fmt.Errorf("weights=%q: %q is not a glob: * matches any text, ? any character, [a-z] a set",
				text, s.pattern)
		}
		m, err := parseMicro(term[i+1:])
		if err != nil {
			return nil, fmt.Errorf("weights=%q: %w", text, err)
		}
		w = append(w, s)
		micro = append(micro, m)
	}
	if len(w) > maxSources {
		return nil, fmt.Errorf("weights: %d sources, but the maximum is %d: let a glob match several classes",
			len(w), maxSources)
	}
	factor, sum := new(big.Int), int64(0)
	for _, m := range micro {
		factor.GCD(nil, nil, factor, big.NewInt(m))
		sum += m
	}
	if sum /= factor.Int64(); sum > maxPeriod {
		return nil, fmt.Errorf("weights=%q: as whole numbers they add up to %d, but the maximum is %d: round them",
			text, sum, maxPeriod)
	}
	for i := range w {
		w[i].weight = int(micro[i] / factor.Int64())
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

// String returns the canonical text, with whole weights.
func (w weights) String() string {
	terms := make([]string, len(w))
	for i, s := range w {
		terms[i] = s.pattern + ":" + strconv.Itoa(s.weight)
	}
	return strings.Join(terms, "+")
}

// schedule returns the source of each position of a turn. A turn is the smallest multiple of the weights' sum of at
// least 4,096 positions; in it source i comes n[i] times, its exact share.
//
// Draw j of source i is due at the time (j + 4·U)/n[i] of the turn, modulo 1, U uniform below 1 and drawn
// for each; the draws in the order of their times are the turn. So in no cyclic run of positions is a
// source of share p off that share by 5·(1+(k-2)·p) or more, of k sources (5 of two sources), and by
// about 1 on average; and its positions follow no pattern that a number of ranks could share. With 1 in
// place of 4 they would: of 3:1 every fourth position has too few of the rarer source.
func (w weights) schedule(seed uint64) (slots []uint8, n []int) {
	period := 0
	for _, s := range w {
		period += s.weight
	}
	turns := (leastTurn + period - 1) / period
	due := make([]uint64, 0, turns*period)
	n = make([]int, len(w))
	k := key(seed, maxSources)
	for i, s := range w {
		n[i] = s.weight * turns
		for j := range n[i] {
			k += golden
			time := (uint64(j)<<32 + mix13(k)>>30) % (uint64(n[i]) << 32)
			due = append(due, time<<14/uint64(n[i])<<8|uint64(i))
		}
	}
	slices.Sort(due)
	slots = make([]uint8, len(due))
	for t, d := range due {
		slots[t] = uint8(d)
	}
	return slots, n
}

// Mixture, mixture@2, is an order that draws from several sources in fixed proportions: any run of positions has each
// source's share to within a few (weights.schedule), and so has what any rank of any world reads of it: the order knows
// neither batches nor ranks, but each position is as likely as any other to be of a source.
//
// The schedule goes on over the epochs in turns. Turn q begins at a position of the table that is drawn
// for it: a draw below the table's length as Windowed has it, from the state mix(mix(seed+c)^mix(mix(257)+c)+c) ^
// mix(mix(q)+c). Every turn has exact shares.
//
// Each source is read in a uniform permutation of its own (Uniform, with the number of the source mixed into the seed),
// and when it is exhausted in another, and so on. An epoch is a number of positions, by default that of the samples in
// all sources together: in it a source of more than its share of samples is not exhausted, one of less is repeated.
// What one epoch leaves of a source's permutation the next epoch goes on with, so that over many epochs all samples of
// a source come equally often (to within one).
//
// At and Find take O(log classes + log table) time; the memory is that of a table.
type mixture struct {
	n      int
	begin  int      // positions of earlier epochs
	seed   uint64   // of where turns begin
	slots  []uint8  // by position in the table: its source
	rank   []uint32 // and how many positions of that source are before it in the table
	parts  []part   // by source
	ranges []span   // of all sources, by first sample
}

// part is a source resolved against the dataset.
type part struct {
	size       int
	seed       uint64
	at         []uint32 // positions in the table
	first, end int      // draws before the epoch, and before the next one
	spans      []span
}

// span is a run of a source's samples.
type span struct {
	first, end int // samples
	before     int // samples of the source in earlier runs
	source     int
}

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
	m := &mixture{seed: key(s.seed, maxSources+1), ranges: spans, parts: make([]part, len(w))}
	for i := range spans {
		p := &m.parts[spans[i].source]
		spans[i].before = p.size
		p.spans = append(p.spans, spans[i])
		p.size += spans[i].end - spans[i].first
		m.n += spans[i].end - spans[i].first
	}
	for i, p := range m.parts {
		if p.size == 0 {
			return nil, fmt.Errorf(
				"source %q has no sample: its pattern matches no class, or only what an earlier source has%s",
				w[i].pattern, classesOf(f))
		}
	}
	if s.samples != 0 {
		m.n = s.samples
	}
	if epoch >= math.MaxInt/2/m.n {
		return nil, fmt.Errorf("epoch %d is too far: all epochs together can have 2^62 positions", epoch)
	}
	m.begin = epoch * m.n
	slots, count := w.schedule(s.seed)
	m.slots, m.rank = slots, make([]uint32, len(slots))
	for i := range m.parts {
		m.parts[i].seed = key(s.seed, i)
		m.parts[i].at = make([]uint32, 0, count[i])
	}
	for t, i := range slots {
		p := &m.parts[i]
		m.rank[t] = uint32(len(p.at))
		p.at = append(p.at, uint32(t))
	}
	for i := range m.parts {
		p := &m.parts[i]
		p.first, p.end = m.until(p, m.begin), m.until(p, m.begin+m.n)
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

// spans returns the runs of the sources' samples, ascending. A sample belongs to the first source that it matches;
// samples that match none are left out.
func (w weights) spans(f Facts) ([]span, error) {
	bounds := []int{f.Samples} // where ranges begin and end
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
	slices.Sort(bounds)
	var byLabel []int
	if globs {
		if f.Classes == nil || f.Label == nil {
			return nil, fmt.Errorf("%w: the classes' names; or give sources by number, @FIRST-LAST:WEIGHT",
				ErrNeedsFacts)
		}
		var err error
		if byLabel, err = w.byLabel(f.Classes()); err != nil {
			return nil, err
		}
	}
	of := func(sample int) int {
		a := slices.IndexFunc(w, func(s source) bool { return s.last >= 0 && sample >= s.first && sample <= s.last })
		if !globs {
			return a
		}
		if label := f.Label(sample); label >= 0 && label < len(byLabel) {
			if b := byLabel[label]; b >= 0 && (a < 0 || b < a) {
				return b
			}
		}
		return a
	}
	var all []span
	for first := 0; first < f.Samples; {
		end := first + 1
		if !globs { // the source can change only at the bounds
			i, _ := slices.BinarySearch(bounds, end)
			end = bounds[i]
		}
		switch s := of(first); {
		case s < 0:
		case len(all) > 0 && all[len(all)-1].source == s && all[len(all)-1].end == first:
			all[len(all)-1].end = end
		default:
			all = append(all, span{first: first, end: end, source: s})
		}
		first = end
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

// before returns how many of the table's first t positions belong to the source.
func (p *part) before(t int) int {
	i, _ := slices.BinarySearch(p.at, uint32(t))
	return i
}

// sample returns the i-th sample of the source.
func (p *part) sample(i int) int {
	k := sort.Search(len(p.spans), func(k int) bool { return p.spans[k].before > i }) - 1
	return p.spans[k].first + i - p.spans[k].before
}

func (m *mixture) Len() int { return m.n }

// phase returns the position of the table at which turn q begins.
func (m *mixture) phase(q int) int {
	k := draws(key(m.seed, q))
	return k.below(len(m.slots))
}

// until returns how many of the first n positions of all epochs belong to the source.
func (m *mixture) until(p *part, n int) int {
	q, t := n/len(m.slots), n%len(m.slots)
	phase := m.phase(q)
	draws := q*len(p.at) - p.before(phase)
	if t += phase; t >= len(m.slots) {
		t -= len(m.slots)
		draws += len(p.at)
	}
	return draws + p.before(t)
}

// draw returns the source of a position and how many draws of it came before, in all epochs.
func (m *mixture) draw(pos int) (p *part, j int) {
	check(pos, m.n)
	q := (m.begin + pos) / len(m.slots)
	phase := m.phase(q)
	t := (m.begin + pos + phase) % len(m.slots)
	p = &m.parts[m.slots[t]]
	return p, q*len(p.at) + (int(m.rank[t])-p.before(phase)+len(p.at))%len(p.at)
}

// position is draw's inverse.
func (m *mixture) position(p *part, j int) int {
	q := j / len(p.at)
	phase := m.phase(q)
	t := int(p.at[(j+p.before(phase))%len(p.at)])
	return q*len(m.slots) + (t-phase+len(m.slots))%len(m.slots) - m.begin
}

func (m *mixture) At(pos int) int {
	p, j := m.draw(pos)
	u := newUniform(p.size, p.seed, j/p.size)
	return p.sample(u.At(j % p.size))
}

// Occurrence implements Repeating: it counts the source's permutations.
func (m *mixture) Occurrence(pos int) int {
	p, j := m.draw(pos)
	return j/p.size - p.first/p.size
}

func (m *mixture) Source(sample int) int {
	k := sort.Search(len(m.ranges), func(k int) bool { return m.ranges[k].end > sample })
	if k == len(m.ranges) || sample < m.ranges[k].first {
		return -1
	}
	return m.ranges[k].source
}

func (m *mixture) Find(sample, from int) int {
	k := sort.Search(len(m.ranges), func(k int) bool { return m.ranges[k].end > sample })
	if from = max(from, 0); k == len(m.ranges) || sample < m.ranges[k].first || from >= m.n {
		return -1
	}
	r := m.ranges[k]
	p := &m.parts[r.source]
	least := m.until(p, m.begin+from)
	for turn := least / p.size; turn*p.size < p.end; turn++ {
		u := newUniform(p.size, p.seed, turn)
		j := turn*p.size + u.Find(r.before+sample-r.first, 0)
		if j < least {
			continue
		}
		if j >= p.end {
			return -1
		}
		return m.position(p, j)
	}
	return -1
}
