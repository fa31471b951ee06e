package gpuingest

import "math"

// resampler converts between two rates with a windowed sinc: sample j of the result is at j*m/l of the source, where
// m/l is the quotient of the rates, and is the sum of the source's samples x[i] with weights
//
//	h(u) = s * sinc(s*u) * cos^2(pi*s*u / (2*w)),  u = j*m/l - i,  |s*u| < w
//
// with s = 0.99 * min(1, l/m), w = 32 zero crossings on each side (Smith, "Digital audio resampling", 2002; the window
// is Hann's). Frequencies below 90% of half the lower rate pass within 0.2%; those above 112% of it are stopped. The
// weights of each of the l phases are computed once, and sum to 1.
type resampler struct {
	m, l    int
	reach   int // samples of the source on each side
	weights []float32
}

const (
	zeroCrossings = 32
	rolloff       = 0.99
	maxWeights    = 1 << 22
	maxFilters    = 8
)

// filter returns the resampler from a recording's rate, and keeps a few.
func (t *audioIngest) filter(rate int) (*resampler, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if f, ok := t.filters[rate]; ok {
		return f, nil
	}
	f := newResampler(rate, t.rate)
	if f == nil {
		return nil, badArray(
			"%d Hz to %d: the greatest common divisor of the rates is too small: convert it beforehand", rate, t.rate)
	}
	if len(t.filters) == maxFilters {
		clear(t.filters)
	}
	t.filters[rate] = f
	return f, nil
}

func newResampler(from, to int) *resampler {
	g, b := to, from // Euclid's algorithm
	for b > 0 {
		g, b = b, g%b
	}
	f := &resampler{m: from / g, l: to / g}
	s := rolloff * min(1, float64(to)/float64(from))
	f.reach = int(math.Ceil(zeroCrossings/s)) + 1
	taps := 2*f.reach + 1
	if f.l > maxWeights/taps {
		return nil
	}
	f.weights = make([]float32, f.l*taps)
	row := make([]float64, taps)
	for phase := range f.l {
		sum := 0.0
		for k := range row {
			u := s * (float64(phase)/float64(f.l) - float64(k-f.reach))
			row[k] = 0
			if math.Abs(u) < zeroCrossings {
				c := math.Cos(math.Pi * u / (2 * zeroCrossings))
				row[k] = sinc(u) * c * c
			}
			sum += row[k]
		}
		for k, w := range row {
			f.weights[phase*taps+k] = float32(w / sum)
		}
	}
	return f
}

func sinc(x float64) float64 {
	if x == 0 {
		return 1
	}
	return math.Sin(math.Pi*x) / (math.Pi * x)
}

// length returns the number of samples computed from this many frames.
func (f *resampler) length(frames int) int {
	return int((int64(frames)*int64(f.l) + int64(f.m) - 1) / int64(f.m))
}

// frames returns the number of frames that n samples are computed from.
func (f *resampler) frames(n int) int {
	return int((int64(n)*int64(f.m) + int64(f.l) - 1) / int64(f.l))
}

// at computes sample j from in, whose first element is frame from. Beyond in there is silence.
func (f *resampler) at(in []float32, from, j int) float32 {
	pos := int64(j) * int64(f.m)
	phase := int(pos % int64(f.l))
	taps := 2*f.reach + 1
	first := from + int(pos/int64(f.l)) - f.reach
	w := f.weights[phase*taps : (phase+1)*taps]
	lo, hi := max(0, -first), min(taps, len(in)-first)
	sum := 0.0
	for k := lo; k < hi; k++ {
		sum += float64(w[k]) * float64(in[first+k])
	}
	return float32(sum)
}
