package sim

// Files are the sizes in bytes of samples that are files of their own, over and over, in the extents of a mount.
type Files []int64

const fileExtent = 4 << 20 // cache.ExtentSize

func (f Files) of(i int) int64 { return f[i%len(f)] }

// Extents implements prefetch.Sizes.
func (f Files) Extents(i int) int { return int((f.of(i) + fileExtent - 1) / fileExtent) }

// ExtentBytes implements prefetch.Sizes.
func (f Files) ExtentBytes(i, x int) int64 { return min(f.of(i)-int64(x)*fileExtent, fileExtent) }
