package cache

// Number returns an extent's number among all of the version's, which Kept counts.
func (v *Volume) Number(file, extent int) int { return int(v.extent(file, extent)) }

// Numbered returns the file and the extent of a number.
func (v *Volume) Numbered(n int) (file, extent int) {
	file = v.fileOf(uint32(n))
	return file, n - v.Number(file, 0)
}

// KeptExtent reports whether the extent is on disk.
func (v *Volume) KeptExtent(file, extent int) bool { return v.onDisk(v.extent(file, extent)) }
