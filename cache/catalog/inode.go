package catalog

import "github.com/cespare/xxhash/v2"

// Inode returns the inode number that a mount gives to a path: xxHash64, with the kernel's own numbers (0, and 1 for
// the root) avoided.
func Inode(path []byte) uint64 {
	h := xxhash.Sum64(path)
	if h <= 1 {
		h += 1 << 32
	}
	return h
}
