package catalog

import "github.com/cespare/xxhash/v2"

// Inode returns a path's inode number in a mount: xxHash64, without the kernel's own numbers (0, and 1 for the root).
func Inode(path []byte) uint64 {
	h := xxhash.Sum64(path)
	if h <= 1 {
		h += 1 << 32
	}
	return h
}
