//go:build !linux

package segment

import "os"

// osFile is a file of an operating system without preadv2.
type osFile struct{ *os.File }

func newOSFile(f *os.File) (File, error) { return osFile{f}, nil }
