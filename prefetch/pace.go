package prefetch

const (
	// AheadFor is how far ahead of its reader a walk is, in seconds: longer than a slow answer of a store takes.
	AheadFor = 1.0
	// leastAhead is how many extents that is at least, for a reader whose pace is not known.
	leastAhead = 64
)

// Reach returns Source.Ahead for a reader of rate samples of mean bytes a second, whose share of the memory fits share
// of them: as far as it gets in AheadFor, if that takes no more than a quarter of the share. A reader who waits for the
// store gets faster by it, and so is soon as far ahead as that. spread is how far the workers of the reader, who read a
// batch each, are apart: who is less far ahead than that serves only the first of them. It covers their next batches.
func Reach(rate float64, spread, share int, mean int64) int {
	return max(leastAhead/int(1+mean/(4<<20)), min(int(rate*AheadFor), share/4), min(2*spread, share*3/4), 1)
}
