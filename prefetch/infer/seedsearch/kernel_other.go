//go:build !amd64

package seedsearch

var kernels = []kernel{plain}
