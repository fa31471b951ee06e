package shard

import (
	"archive/tar"
	"bytes"
	"strings"
	"time"
	"unicode/utf8"
)

const (
	blockSize  = 512
	endLen     = 2 * blockSize // the two zero blocks that end a tar
	ustarName  = 100
	ustarOctal = 1<<33 - 1 // largest number in 11 octal digits
)

// pad returns n rounded up to whole blocks.
func pad(n int64) int64 { return (n + blockSize - 1) &^ (blockSize - 1) }

// tarHeader returns the bytes before a member's content, nil if no tar can have such a name. mtime is in seconds.
func tarHeader(name string, size, mtime int64) []byte {
	if mtime < 0 || mtime > ustarOctal {
		mtime = 0
	}
	var b bytes.Buffer
	if tar.NewWriter(&b).WriteHeader(
		&tar.Header{Typeflag: tar.TypeReg, Name: name, Size: size, Mode: 0o644, ModTime: time.Unix(mtime, 0)}) != nil {
		return nil
	}
	return b.Bytes()
}

// headerLen returns the length of the tarHeader. Most need not be made for that.
func headerLen(name string, size int64) int64 {
	if len(name) <= ustarName && size <= ustarOctal && strings.IndexFunc(name, func(r rune) bool {
		return r >= utf8.RuneSelf
	}) < 0 {
		return blockSize
	}
	return int64(len(tarHeader(name, size, 0)))
}
