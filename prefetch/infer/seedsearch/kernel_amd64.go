package seedsearch

import "golang.org/x/sys/cpu"

// kernels are those that this processor runs, the slowest first.
var kernels = supported()

func supported() []kernel {
	k := []kernel{plain}
	if cpu.X86.HasAVX2 {
		k = append(k, kernel{"avx2", advanceAVX2, numberAVX2})
		// number is a fiftieth of the work: it stays as it is.
		if cpu.X86.HasAVX512F {
			k = append(k, kernel{"avx512", advanceAVX512, numberAVX2})
		}
	}
	return k
}

//go:noescape
func advanceAVX2(s *block, from, to uint32)

//go:noescape
func advanceAVX512(s *block, from, to uint32)

//go:noescape
func numberAVX2(s, next, far, out *block)
