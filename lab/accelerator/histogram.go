package accelerator

import (
	"encoding/json"
	"math"
	"time"
)

// Histogram counts durations in buckets whose bounds grow by the factor √2 from 100 µs to 52 s, so that a
// quantile is known to within that factor. Durations of 0 are counted apart. The zero value is empty.
type Histogram struct {
	zero   int64
	counts [buckets]int64 // of durations up to bound(i), and above bound(i-1)
	max    time.Duration
}

const (
	buckets = 40
	lowest  = 100 * time.Microsecond
)

// bound returns the largest duration of a bucket; the last one has none.
func bound(i int) time.Duration {
	if i == buckets-1 {
		return math.MaxInt64
	}
	return time.Duration(float64(lowest) * math.Exp2(float64(i)/2))
}

// Add counts a duration; negative ones count as 0.
func (h *Histogram) Add(d time.Duration) {
	if d <= 0 {
		h.zero++
		return
	}
	h.max = max(h.max, d)
	i := 0
	for d > bound(i) {
		i++
	}
	h.counts[i]++
}

// Count returns how many durations were added, and how many of them were 0.
func (h *Histogram) Count() (all, zero int64) {
	all = h.zero
	for _, n := range h.counts {
		all += n
	}
	return all, h.zero
}

// Max returns the longest duration.
func (h *Histogram) Max() time.Duration { return h.max }

// Quantile returns a duration that the part q of all, 0 to 1, do not exceed: the bound of the bucket
// in which that is so, but never more than Max. It is 0 for an empty histogram.
func (h *Histogram) Quantile(q float64) time.Duration {
	all, seen := h.Count()
	for i := 0; float64(seen) < q*float64(all); i++ {
		if seen += h.counts[i]; float64(seen) >= q*float64(all) {
			return min(bound(i), h.max)
		}
	}
	return 0
}

// Bucket is a part of a histogram.
type Bucket struct {
	// Above and UpTo bound the durations in seconds; the bucket of those that are 0 has 0 and 0.
	Above float64 `json:"above"`
	UpTo  float64 `json:"up_to"`
	Count int64   `json:"count"`
}

// Buckets returns those that are not empty, the shortest durations first. The last one ends at Max.
func (h *Histogram) Buckets() []Bucket {
	list := []Bucket{}
	if h.zero > 0 {
		list = append(list, Bucket{Count: h.zero})
	}
	above := time.Duration(0)
	for i, n := range h.counts {
		to := bound(i)
		if n > 0 {
			list = append(list, Bucket{above.Seconds(), min(to, max(h.max, above)).Seconds(), n})
		}
		above = to
	}
	return list
}

// MarshalJSON writes the buckets that are not empty.
func (h Histogram) MarshalJSON() ([]byte, error) { return json.Marshal(h.Buckets()) }
